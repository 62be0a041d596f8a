"""docs/questions.md: the names of its answers exist, and its edits can be made."""

import ast
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import rl
from envs import EnvPool
from rollout import rollout
from trajectory import read_trajectories

PAGE = (ROOT / "docs/questions.md").read_text()
NAME = re.compile(r"`([\w/]+\.py)`:\s`([\w.]+)`")  # `rollout.py`: `Trajectory.record_turn`
ANSWERS = re.findall(r"^\*\*([^*]+\?)\*\*\s(.+?)(?=\n\*\*|\n##|\Z)", PAGE, re.DOTALL | re.MULTILINE)


def source_of(file, name, root=ROOT):
    """The definition of `name`, "Class.method", in a file. StopIteration: there is none."""
    text = (root / file).read_text()
    node = ast.parse(text)
    for part in name.split("."):
        node = next(n for n in node.body if part in names_of(n))
    return ast.get_source_segment(text, node)


def names_of(node):
    """The names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}


@pytest.mark.parametrize("question, answer", ANSWERS, ids=[question for question, _ in ANSWERS])
def test_an_answer_names_existing_code_in_at_most_two_files(question, answer):
    named = NAME.findall(answer)
    assert 1 <= len({file for file, _ in named}) <= 2
    for file, name in named:
        assert source_of(file, name)


def block_of(text, language, has=""):
    """The one block of code that has this text."""
    blocks = re.findall(rf"```{language}\n(.+?)```", text, re.DOTALL)
    (found,) = [block for block in blocks if has in block]
    return found


def change(root, answer):
    """Make the edit of an answer, a line of diff, in the function that the answer names first."""
    old, new = re.search(r"```diff\n-\s+(.+)\n\+\s+(.+)\n```", answer).groups()
    file, name = NAME.search(answer).groups()
    text = (root / file).read_text()
    assert text.count(old) == source_of(file, name, root).count(old) == 1, f"{file}: {old}"
    (root / file).write_text(text.replace(old, new))


def test_the_ten_questions_are_tried(tmp_path):
    ten = PAGE.split("\n## ")[1]
    answers = [answer for _, answer in ANSWERS if answer in ten]
    assert len(answers) == 10
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "runs", "docs", "tests", "build")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for answer in answers:
        if "```diff" in answer:
            change(copy, answer)
    (copy / "ideas/mine.py").write_text(block_of(ten, "python", "def advantage"))
    (tmp_path / "mine.json").write_text(block_of(ten, "json"))
    out = tmp_path / "run"
    command = f"""train.py --env babyai --steps 2 --items_per_step 2 --rollouts_per_item 2
        --algo mine --minibatches 1 --algo_args scale=2 --prompts {tmp_path}/mine.json
        --horizon 2,3,4 --horizon_steps 1 --out {out}"""
    done = subprocess.run([sys.executable, *command.split()], cwd=copy, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    trajectories = read_trajectories(out / "trajectories/step_000001.jsonl")
    assert (first["horizon"], second["horizon"]) == (2, 4)
    assert second["longest"] == max(len(t.tokens) for t in trajectories)
    for t in trajectories:
        assert t.messages[0]["content"].startswith("Answer with one action.")
        assert t.turns == t.invalid_turns[0] if t.invalid_turns else t.turns <= 4
        replies = [m["content"] for m in t.messages if m["role"] == "assistant"]
        cost = 0.001 * sum(map(len, replies[1:])) + 0.05 * len(t.invalid_turns)
        assert t.reward == pytest.approx(t.success - cost)
        assert t.advantage == pytest.approx([2 * t.reward * sampled for sampled in t.mask])
    saved = b"".join(path.read_bytes() for path in out.glob("checkpoints/*/training/*"))
    assert b"momentum_buffer" in saved and b"exp_avg" not in saved


def test_a_chat_template_of_ones_own_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = rl.load_tokenizer("tiny").chat_template
    (tmp_path / "mine.jinja").write_text(own.replace("{{ m['role'] }}", "{{ m['role'] | upper }}"))
    names = {"rl": rl, "rollout": rollout, "EnvPool": EnvPool}
    exec(block_of(PAGE, "python", "jinja"), names)
    text = names["tokenizer"].decode(names["trajectory"].tokens)
    assert "<|im_start|>USER\nYou are" in text and "<|im_start|>user" not in text
