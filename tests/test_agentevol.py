"""experiments/agentevol.py: explore, keep what succeeded, learn."""

import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from conftest import ROOT, run_script
from test_train import ENV, read_jsonl

import sft
from experiments import agentevol

FLAGS = ["--horizon", "3", "--demos", "8", "--epochs", "1", "--batch", "4", "--max_length", "900"]


def test_an_iteration_trains_with_the_flags_of_the_warm_start(tmp_path, monkeypatch):
    warm = sft.parse_sft_config([
        "--env", "babyai,textcraft", "--demos", "3", "--lora_rank", "0", "--set", "warmup_steps=7",
        "--system", "Be brief.", "--horizon", "babyai=3 textcraft=5", "--out", str(tmp_path / "w")])
    (tmp_path / "w").mkdir()
    (tmp_path / "w/config.json").write_text(json.dumps(asdict(warm)))
    commands = []
    monkeypatch.setattr(agentevol, "command", lambda script, *flags: commands.append(flags))
    args = SimpleNamespace(env=warm.env, warm=tmp_path / "w")
    for _ in range(2):  # the second time an interrupted training goes on
        agentevol.learn(args, [], tmp_path)
        (tmp_path / "sft").mkdir(exist_ok=True)
        (tmp_path / "sft/metrics.jsonl").write_text("{}\n")
    first, again = ([str(flag) for flag in flags] for flags in commands)
    assert again == [*first, "--resume"]
    own = {"out": str(tmp_path / "sft"), "demos": 0, "noise": 0.1,
           "trajectories": str(tmp_path / "learnt.jsonl")}
    (tmp_path / "sft/metrics.jsonl").unlink()
    again = sft.parse_sft_config(first)
    assert asdict(again) == asdict(warm) | own | {"run_id": again.run_id} and again.run_id


@pytest.mark.slow
def test_an_iteration_keeps_successes_and_starts_from_the_first_model(tmp_path):
    done = run_script("sft.py", *FLAGS, "--out", tmp_path / "warm")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "experiments/agentevol.py", "--warm", tmp_path / "warm", "--out",
               tmp_path / "evol", "--items", "10", "--samples", "2", "--turns", "60"]
    for _ in range(2):  # the second time everything is there already
        done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = read_jsonl(tmp_path / "evol/rows.jsonl")
        assert rows[-1]["turns"] >= 60 > (rows[-2]["turns"] if len(rows) > 1 else 0)
    learnt = len(read_jsonl(tmp_path / "warm/demos.jsonl"))
    for i, row in enumerate(rows):
        folder = tmp_path / f"evol/iteration_{i}"
        kept = read_jsonl(folder / "kept.jsonl")
        assert all(t["success"] for t in kept)
        learnt += len(kept)
        assert row["learnt"] == learnt == len(read_jsonl(folder / "sft/demos.jsonl"))
        assert json.loads((folder / "sft/config.json").read_text())["model"] == "tiny"
