"""Defaults that depend on the machine."""

import json
from dataclasses import asdict

import pytest
import torch

import config
from config import REAL, REAL_ON_CPU, machine, parse_config
from eval import parse_eval_config

MODEL = ["--model", "Qwen/Qwen2.5-3B-Instruct"]
AVX2 = {"fpu", "avx2"}
MACHINES = [
    (AVX2, "float32"),
    (AVX2 | {"avx512f", "avx512_bf16"}, "bfloat16"),
    (AVX2 | {"avx512f", "amx_bf16"}, "bfloat16"),
    (AVX2 | {"cuda"}, "bfloat16"),
    (set(), "float32"),
]


def test_a_machine_is_the_flags_of_its_cpu_and_cuda(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\nbugs\t\t: avx512_bf16\n\n"
                       "processor\t: 1\nflags\t\t: fpu avx2 amx_bf16\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine(cpuinfo) == {"fpu", "avx2", "amx_bf16"}
    assert machine(tmp_path / "absent") == set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine(tmp_path / "absent") == {"cuda"}


@pytest.mark.parametrize("has, dtype", MACHINES)
def test_the_defaults_of_real_models_depend_on_what_the_machine_has(has, dtype, monkeypatch):
    monkeypatch.setattr(config, "machine", lambda: has)
    cfg = parse_config([*MODEL, "--out", "runs/never-made"])
    expected = {name: (REAL if "cuda" in has else REAL_ON_CPU)[name] for name in REAL_ON_CPU}
    assert {name: getattr(cfg, name) for name in REAL_ON_CPU} == expected
    assert cfg.dtype == dtype
    assert cfg.lr == REAL["lr"]
    of_eval = parse_eval_config(MODEL)
    for name in ("dtype", "max_tokens", "max_length", "slots"):
        assert getattr(of_eval, name) == getattr(cfg, name)
    given = parse_config([*MODEL, "--dtype", "bfloat16", "--max_tokens", "9", "--out", "runs/no"])
    assert (given.dtype, given.max_tokens) == ("bfloat16", 9)


def test_the_defaults_of_the_tiny_model_are_the_same_on_all_machines(monkeypatch):
    found = []
    for has, _ in MACHINES:
        monkeypatch.setattr(config, "machine", lambda has=has: has)
        found.append(parse_config(["--out", "runs/never-made"]))
    assert all(cfg == found[0] for cfg in found)


@pytest.mark.parametrize("env", ["babyai", "babyai,textcraft"])
def test_a_run_that_is_resumed_on_another_machine_keeps_its_settings(env, monkeypatch, tmp_path):
    argv = [*MODEL, "--env", env, "--out", str(tmp_path)]
    monkeypatch.setattr(config, "machine", lambda: {"cuda"})
    started = parse_config([*argv, "--microbatch_tokens", "999"])
    (tmp_path / "config.json").write_text(json.dumps(asdict(started)))
    monkeypatch.setattr(config, "machine", lambda: AVX2)
    resumed = parse_config([*argv, "--resume"])
    assert asdict(resumed) == asdict(started) | {"resume": True}
    assert (resumed.dtype, resumed.max_tokens, resumed.microbatch_tokens) == ("bfloat16", 512, 999)
    with pytest.raises(ValueError, match="was started with --dtype bfloat16, not float32"):
        parse_config([*argv, "--resume", "--dtype", "float32"])
    with pytest.raises(ValueError, match="was started with --lr 1e-06, not 1e-05"):
        parse_config([*argv, "--resume", "--lr", "1e-5"])
