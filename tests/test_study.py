"""The studies: what all runs get alike, and how they are compared."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import study  # noqa: E402
import test_time  # noqa: E402


@pytest.mark.parametrize("run", [r for r in study.runs("horizon") if r.seed == 0 and r.label != "base"], ids=lambda r: r.name)
def test_every_run_ends_within_half_a_step_of_the_same_number_of_turns(run, tmp_path, monkeypatch):
    turns = lambda step: 0.8 * (study.longest(run, step) if run.label != "adaptive" else 3 + step // 40)  # noqa: E731
    pieces = []

    def train_py(*command):  # what a piece of training leaves behind
        steps = int(command[command.index("--steps") + 1])
        assert ("--resume" in command) == bool(pieces) and steps > (pieces or [0])[-1]
        pieces.append(steps)
        (tmp_path / "run/final").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps({"turns": turns(s), "trajectories": 128}) + "\n" for s in range(steps)))
    monkeypatch.setattr(study, "call", train_py)
    rows = study.train(run, tmp_path / "run")
    assert abs(study.played(rows) - study.TURNS[run.world]) <= 64 * rows[-1]["turns"] + 1e-6 and len(pieces) < 12
    assert study.train(run, tmp_path / "run") == rows and pieces[-1] == len(rows)  # nothing is done again


def test_differences_are_taken_seed_by_seed():
    mean, half = study.paired([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])  # 0.1, 0.2, 0.3: deviation 0.1
    assert abs(mean - 0.2) < 1e-9 and abs(half - 4.303 * 0.1 / 3 ** 0.5) < 1e-9


def test_a_collapse_is_the_loss_of_half_of_the_best():
    held_out = [{"success": 0.2}, {"success": 0.41}, {"success": 0.21}]
    assert not study.collapsed({"stopped": "", "success": 0.21, "held_out": held_out})
    assert study.collapsed({"stopped": "", "success": 0.2, "held_out": [*held_out[:2], {"success": 0.2}]})
    assert study.collapsed({"stopped": "the KL is too large", "success": 0.9, "held_out": [{"success": 0.9}]})


def test_an_edited_checkout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    git = lambda *args: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)  # noqa: E731
    (tmp_path / "a.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", "a.py")
    git("commit", "-qm", "a")
    assert len(study.revision()) >= 7
    (tmp_path / "a.py").write_text("x = 2\n")
    with pytest.raises(SystemExit, match="a.py"):
        study.revision()


def test_one_sweep_of_the_longest_horizon_holds_the_shorter_ones():
    played = [{"item": "a", "success": s, "turns": t, "status": "done"} for s, t in ((True, 3), (False, 9), (True, 2), (False, 9))]
    found = test_time.within(played + [{"item": "b", "success": False, "turns": 9, "status": "horizon"}] * 4, 2, ks=(1, 2))
    assert found["success"] == 0.125 and found["pass@1"] == 0.125 and abs(found["pass@2"] - 0.25) < 1e-9


def test_a_study_of_another_model_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "data/tiny").mkdir(parents=True)
    (tmp_path / "data/tiny/model.safetensors").write_bytes(b"one")
    study.begin("horizon").close()
    study.begin("horizon").close()
    (tmp_path / "data/tiny/model.safetensors").write_bytes(b"two")
    with pytest.raises(SystemExit, match="another built-in model"):
        study.begin("horizon")
