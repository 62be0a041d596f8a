"""The code in README and docs is code: blocks run, commands exist, the world trains."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import config
import eval as evaluation
from experiments import readme

README, OWN_WORLD, AGENTS = ((ROOT / name).read_text()
                             for name in ("README.md", "docs/own_world.md", "docs/agents.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
PITFALLS = (ROOT / "docs/pitfalls.md").read_text()
GUESS = re.search(r"```python\n(.*?)```", OWN_WORLD, re.S)[1]
DIARY = re.search(r"```python\n([^`]*def diary.*?)```", AGENTS, re.S)[1]


def test_the_world_in_the_docs_plays():
    space = {}
    exec(GUESS, space)
    world = space["Guess"]()
    assert world.reset(3) == world.reset(3)
    assert [world.step(str(n)).success for n in range(1, 21)].count(True) == 1
    assert not world.step("seven").valid


def test_the_world_and_the_agent_in_the_docs_train_as_the_docs_say(tmp_path):
    repo, out = tmp_path / "repo", tmp_path / "run"
    left_out = shutil.ignore_patterns(".*", "runs", "tests", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, repo, ignore=left_out)
    begin = [sys.executable, repo / "envs.py", "new"]
    assert subprocess.run([*begin, "guess"], cwd=tmp_path).returncode == 0
    assert (repo / "worlds/guess.py").read_text() == GUESS
    for name in ("guess", "babyai", "../guess", "Guess"):
        again = subprocess.run([*begin, name], cwd=tmp_path, capture_output=True, text=True)
        assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
    (tmp_path / "mine.py").write_text(DIARY)
    # Files of the same names in the current folder are not ours.
    (tmp_path / "agent.py").write_text("raise RuntimeError('the wrong file')\n")
    flags = "--agent mine.py:diary --agent_args most=3"
    assert flags in AGENTS
    flags += f" --env guess --horizon 4,8 --items_per_step 4 --steps 2 --out {out}"
    done = subprocess.run([sys.executable, repo / "train.py", *flags.split()], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    command = f"{repo}/eval.py --model {out}/final --items 4 --samples 1"
    assert subprocess.run([sys.executable, *command.split()], cwd=tmp_path).returncode == 0
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        assert (row["env"], row["trajectories"], row["env_error"]) == ("guess", 32, 0.0)
        assert row["segments"] == row["turns"] and row["logprob_gap"] < 1e-4


def test_the_other_blocks_run(capsys):
    for block in BLOCKS:
        exec(block, {})
    printed = capsys.readouterr().out
    assert "\033[1;32m" in printed  # the notebook's cell: sampled tokens in green
    assert "step 1  success" in printed  # the loop's second step


def test_the_pitfalls_print_what_the_page_says(capsys):
    """The page's blocks are one program; each is followed by what it prints."""
    space = {}
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PITFALLS, re.S)
    assert len(blocks) == PITFALLS.count("```python") == 9
    for block, printed in blocks:
        exec(block, space)
        assert capsys.readouterr().out == printed


def test_every_command_of_the_readme_is_one():
    """Flags exist and make sense; `experiments/readme.py` runs the commands."""
    seen = 0
    flags = {"train.py": config.Config, "eval.py": evaluation.EvalConfig}
    for command in readme.commands(readme.pages(ROOT)):
        found = re.search(r"(?:python|torchrun)(?: --\S+)* ([\w/]+\.py)([^&]*)", command)
        assert not found or (ROOT / found[1]).exists(), command
        if found and found[1] in flags:
            words = shlex.split(found[2], comments=True)
            config.read_flags(flags[found[1]], words, found[1], "")  # raises for unknown flags
            seen += 1
    assert seen >= 8


@pytest.mark.slow
def test_a_newcomer_can_follow_the_readme():
    """Every command of the README and of docs/ that can run here, in a fresh clone and
    environment; trainings and evaluations are cut short."""
    done = subprocess.run([sys.executable, "experiments/readme.py", "--quick"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\nok ") > 10


def test_an_installation_that_is_not_editable_is_refused():
    """It would lack the model, the items and the page."""
    assert 'build-backend = "editable_only"' in (ROOT / "pyproject.toml").read_text()
    command = [sys.executable, "-c", "import editable_only; editable_only.build_wheel('.')"]
    done = subprocess.run(command, cwd=ROOT / "build_backend", capture_output=True, text=True)
    assert done.returncode and done.stderr.splitlines()[-1].endswith("pip install -e .")
