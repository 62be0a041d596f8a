"""Bad inputs end a command with exit code 2 and one line on stderr, which names what is wrong."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, run_script

import rl
from models.served import ServedModel
from parallel import run_command

# A line: a command and its flags | what the message names. Words in capitals are in `given`.
ROWS = (ROOT / "tests/bad_inputs.txt").read_text().splitlines()
OWN = """
def taught(step, coach: str = ""): ...
taught.needs_models = ("coach",)
def pairs(step): ...
pairs.compares_samples = True
def needing(play, that):
    yield
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The folder of files and models that the commands name."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "OWN.py").write_text(OWN)
    for name, items in (("EMPTY", []), ("OTHERS", [{"item_id": "textcraft_3"}]), ("ODD", [3])):
        (folder / name / "AgentItemId").mkdir(parents=True)
        (folder / name / "AgentItemId/babyai_train.json").write_text(json.dumps(items))
    for name, template in (("NO_TEMPLATE", ""), ("BAD_TEMPLATE", "{{ raise_exception('a\nb') }}"),
                           ("NO_END", "{% for m in messages %}{{ m.content }}\n{% endfor %}")):
        shutil.copytree(rl.TINY_MODEL, folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    first = {"id": 0, "special": False, "content": "<|other|>"} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False)
    for name, change in (("NO_TOKENIZER", None), ("HALF", lambda file: file["model"].update(
            vocab={text: n for text, n in file["model"]["vocab"].items() if len(text) > 1},
            merges=[])), ("MOVED", lambda file: file["added_tokens"][-1].update(id=9999)),
            ("TWICE", lambda file: file["added_tokens"].append(first))):
        file = Path(shutil.copytree(rl.TINY_MODEL, folder / name), "tokenizer.json")
        content = json.loads(file.read_text())
        if change:
            change(content)
            file.write_text(json.dumps(content))
        else:
            file.unlink()
    shutil.copytree(rl.TINY_MODEL, folder / "OWN_CODE")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (folder / "OWN_CODE/config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (folder / "OWN_CODE/own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    (folder / "RUN").mkdir()
    (folder / "RUN/metrics.jsonl").write_text('{"step": 0}\n')
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_input_is_one_line_and_exit_code_2(row, given, tmp_path):
    command, _, named = row.rpartition(" | ")
    script, *flags = shlex.split(command)
    flags = [str(given / flag) if flag.split(".")[0].isupper() else flag for flag in flags]
    if script in ("train.py", "sft.py") and "--out" not in flags:
        flags += ["--out", str(tmp_path / "r")]
    done = run_script(script, *flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and named in lines[0], done.stderr
    assert not list(tmp_path.rglob("*.json*")) and not (given / "ran").exists()


@pytest.mark.parametrize("rank, said", [("0", "x.py: no\n"), ("1", "x.py: rank 1: no\n")])
def test_an_error_says_its_rank_and_one_on_a_later_rank_waits_for_that_of_the_first(
        rank, said, monkeypatch, capsys):
    waited = []  # torchrun ends the other ranks when rank 0 has ended
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match="2"):
        run_command("x.py", lambda: [], lambda settings: open_file("no"))
    assert capsys.readouterr().err == said and bool(waited) == (rank == "1")
    with pytest.raises(SystemExit, match="2"):
        run_command("x.py", lambda: 2**60, bytearray)  # more memory than any machine has
    assert "MemoryError" in capsys.readouterr().err
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="2"):
        patch.setattr("sys.stderr", Mock(write=Mock(side_effect=OSError("full"))))
        run_command("x.py", lambda: "no", open_file)
    with pytest.raises(ValueError):  # a bug keeps its traceback
        run_command("x.py", lambda: "no number", int)


def open_file(text):
    raise OSError(text)


@pytest.mark.parametrize("command", ["train.py --horizon 0", "-m benches rollout --threads 0"])
def test_a_process_that_is_given_a_bad_input_ends_with_code_2(command):
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True,
                          text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


def test_a_key_that_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-é")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        ServedModel("m", "http://127.0.0.1:9/v1")
