"""experiments/gpu.py, the checklist for a GPU, tried on a CPU."""

import json

import pytest
import torch

from experiments import gpu

TRY = ["--device", "cpu", "--model", "tiny"]


@pytest.mark.parametrize("rank", ["0", "4"])
def test_the_checks_run_on_a_cpu_and_only_exactness_is_judged(rank, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "CHECKS", gpu.CHECKS[:4])  # without processes
    assert gpu.main([*TRY, "--lora_rank", rank, "--out", str(tmp_path / "gpu.json")]) == 0
    lines = json.loads((tmp_path / "gpu.json").read_text())["lines"]
    assert capsys.readouterr().out.count("\n") == 1 + len(lines)
    passed = {line["what"]: line["passed"] for line in lines}
    assert all(passed[f"check, {what} {dtype}"] for what in ("rollout", "update")
               for dtype in ("float32", "bfloat16"))
    unjudged = ("decode, 3 slots", "decode steps", "slots", "update", "memory")
    assert {passed[x] for x in unjudged} == {None}
    assert not torch.distributed.is_initialized()


def test_a_check_that_fails_is_a_line_and_the_exit_status(monkeypatch, capsys):
    def broken(setting):
        yield gpu.Line("first", "1", "1", True)
        raise RuntimeError("a trace\nno memory")

    def after(setting):
        yield gpu.Line("after", "2", "2", True)

    monkeypatch.setattr(gpu, "CHECKS", (broken, after))
    assert gpu.main(TRY) == 1
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["ok", "FAILED", "ok"]
    assert "RuntimeError: no memory" in lines[1]

    monkeypatch.setattr(gpu, "CHECKS", (gpu.check_exact,))
    monkeypatch.setattr(gpu.check, "LARGEST_MEAN_GAP", 0.0)
    assert gpu.main(TRY) == 1


def test_without_a_gpu_it_is_one_line(capsys):
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and "no GPU" in said.err


@pytest.mark.slow
def test_two_ranks_are_compared_with_one(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "CHECKS", (gpu.check_ranks,))
    assert gpu.main(TRY) == 0 and "loss differs by" in capsys.readouterr().out
