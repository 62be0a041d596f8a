"""Flags and their defaults: by model, machine and world; what --resume keeps; --prompts."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import config
from config import ON_CPU, TINY, Config, has_bfloat16, parse_config
from conftest import ROOT
from eval import parse_eval_config
from sft import parse_sft_config

MODEL = ["--model", "Qwen/Qwen2.5-3B-Instruct"]
LIMITS = ("max_tokens", "max_length", "slots", "dtype")


def parsed(*flags):
    return parse_config([*flags, "--out", "runs/never-made"])


def started_run(folder, *flags):
    """A run folder with config.json -> its final/, which is empty."""
    cfg = parse_config([*flags, "--out", str(folder)])
    (folder / "final").mkdir(parents=True)
    (folder / "final/config.json").touch()
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return str(folder / "final")


# ---- defaults ----


def test_bfloat16_is_for_machines_that_compute_it_fast(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, expected in (("fpu avx2", False), ("fpu amx_bf16", True), ("avx512_bf16", True)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert has_bfloat16(tmp_path / "cpuinfo") is expected
    assert not has_bfloat16(tmp_path / "absent")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert has_bfloat16(tmp_path / "absent")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_defaults_of_real_models_depend_on_the_machine_and_win_over_nothing_given(
        has_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(config, "has_bfloat16", lambda: has_gpu)
    cfg, own = parsed(*MODEL), Config()
    assert {name: getattr(cfg, name) for name in ON_CPU} == {
        name: getattr(own, name) if has_gpu else ON_CPU[name] for name in ON_CPU}
    assert cfg.dtype == ("bfloat16" if has_gpu else "float32")
    of_eval = parse_eval_config(MODEL)
    assert [getattr(of_eval, x) for x in LIMITS] == [getattr(cfg, x) for x in LIMITS]
    given = parsed(*MODEL, "--dtype", "bfloat16", "--max_tokens", "9")
    assert (given.dtype, given.max_tokens) == ("bfloat16", 9)
    tiny = parsed()
    assert {name: getattr(tiny, name) for name in TINY} == TINY and tiny.dtype == "float32"


def test_a_world_has_its_own_defaults_and_keeps_them_in_a_mixture():
    crafted = parsed("--env", "textcraft")
    assert (crafted.horizon, crafted.steps, crafted.invalid_penalty) == ("textcraft=3,5,8", 90, 0.0)
    both = parsed("--env", "babyai:3,textcraft")
    assert both.of_world("invalid_penalty", "babyai") == TINY["invalid_penalty"]
    assert both.of_world("invalid_penalty", "textcraft") == 0.0
    assert both.worlds["textcraft"].rounds == [3, 5, 8] and both.items_per_step == 32
    assert config.items_per_world(both, 16) == {"babyai": 12, "textcraft": 4}
    tenths = parsed("--env", "babyai:0.1,textcraft:0.3")  # in floats, 16 * 0.3 / 0.4 is below 12
    assert config.items_per_world(tenths, 16) == {"babyai": 4, "textcraft": 12}
    given = parsed("--env", "babyai,textcraft", "--invalid_penalty", "0.5", "--horizon", "7")
    assert [own.invalid_penalty for own in given.worlds.values()] == [0.5, 0.5]
    assert [own.rounds for own in given.worlds.values()] == [[7], [7]]
    assert parsed("--env", "searchqa,babyai", *MODEL).action_format == "react"
    assert parsed("--env", "textcraft", "--horizon_schedule", "fixed").worlds["textcraft"].rounds \
        == [8]
    assert parse_sft_config(["--env", "searchqa", *MODEL, "--demos", "1"]).worlds[
        "searchqa"].rounds == [30]


def test_studies_set_fields_and_a_field_of_a_study_is_no_flag():
    cfg = parsed("--set", "engine=hf", "turns=7", "--lr", "0.5", "--set", "graphs=false keep=3")
    assert (cfg.engine, cfg.turns, cfg.lr, cfg.graphs, cfg.keep) == ("hf", 7, 0.5, False, 3)
    with pytest.raises(ValueError, match="--turns"):
        parsed("--turns", "7")


def test_a_model_made_of_the_tiny_one_is_so_wherever_it_lies(tmp_path):
    trained = started_run(tmp_path / "a", "--model", started_run(tmp_path / "warm"))
    shutil.rmtree(tmp_path / "warm")
    assert parsed("--model", trained).lr == TINY["lr"]


def test_settings_reach_the_function_and_allow_what_they_make_right():
    assert parsed("--algo", "ppo", "--algo_args", "gamma=1 lam=0.9").advantage.keywords == {
        "gamma": 1.0, "lam": 0.9}
    parsed("--kl_in", "reward", "--kl_coef", "0.1", "--algo_args", "normalize_std=false")
    assert parsed("--algo", "gigpo").record_states


@pytest.mark.parametrize("flags, out", [
    ("", "runs/babyai_grpo_s0"), ("--algo rloo --seed 3", "runs/babyai_rloo_s3"),
    ("--env babyai:0.5,textcraft --algo ideas.q:advantage",
     "runs/babyai_0.5_textcraft_ideas.q_advantage_s0"),
    ("--model Qwen/Qwen2.5-7B-Instruct", "runs/babyai_grpo_qwen2.5-7b-instruct_s0"),
    ("--model runs/warm/checkpoints/step_000050/", "runs/babyai_grpo_warm_s0")])
def test_a_run_has_a_folder_of_its_own_by_default(flags, out):
    cfg = config.fill_in(Config, config.read_flags(Config, flags.split(), "train.py", ""))
    assert cfg.out == out


# ---- resumed runs ----


@pytest.mark.parametrize("env", ["babyai", "babyai,textcraft"])
def test_a_run_that_is_resumed_on_another_machine_keeps_its_settings(env, monkeypatch, tmp_path):
    argv = [*MODEL, "--env", env, "--out", str(tmp_path)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    started = parse_config([*argv, "--microbatch_tokens", "999", "--shard", "false"])
    (tmp_path / "config.json").write_text(json.dumps(asdict(started)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert asdict(parse_config([*argv, "--resume"])) == asdict(started) | {"resume": True}
    smaller = parse_config([*argv, "--resume", "--microbatch_tokens", "99", "--slots", "2"])
    assert (smaller.microbatch_tokens, smaller.slots) == (99, 2)
    for flag, value in (("dtype", "float32"), ("lr", "0.5"), ("max_tokens", "7")):
        with pytest.raises(ValueError, match=f"was started with --{flag} .*, not {value}"):
            parse_config([*argv, "--resume", f"--{flag}", value])


def test_a_limit_that_one_world_of_a_mixture_does_not_have_is_refused_at_a_resume(tmp_path):
    started_run(tmp_path / "r", "--env", "babyai,textcraft")  # the penalties are 0.05 and 0
    with pytest.raises(ValueError, match="was started with --invalid_penalty 0.0, not 0.05"):
        parse_config(["--out", str(tmp_path / "r"), "--resume", "--invalid_penalty", "0.05"])


def test_a_run_is_not_resumed_elsewhere_or_from_an_earlier_version(tmp_path):
    started_run(tmp_path / "r", "--env_args", "babyai.upstream=1")
    flags = ["--out", str(tmp_path / "r"), "--resume"]
    for more, added in (([], ""), (["--env_args", "babyai.upstream=0"], " babyai.upstream=0")):
        assert parse_config([*flags, *more]).env_args == "babyai.upstream=1" + added
    saved = json.loads((tmp_path / "r/config.json").read_text())
    with pytest.raises(ValueError, match="--env_url"):
        parse_config([*flags, "--env_url", "http://127.0.0.1:9"])
    for change, says in (({"agent_sha256": "0"}, "agent_sha256"),
                         ({"plan": False}, "3fc98f8")):
        (tmp_path / "r/config.json").write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=says):
            parse_config(flags)
    with pytest.raises(ValueError, match="3fc98f8"):
        parse_eval_config(["--model", str(tmp_path / "r/final")])


# ---- how replies are read, and --prompts ----

TEXTS = {"babyai": {"prompt": "Play.\n\n", "reply": "Ok."},
         "webshop": {"prompt": "Buy.", "reply": "Ok."}}


def test_a_run_keeps_the_texts_of_prompts_whatever_becomes_of_the_file(tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(TEXTS))
    final = started_run(tmp_path / "run", "--prompts", str(prompts))
    prompts.unlink()
    resume = ["--prompts", str(prompts), "--resume", "--out", str(tmp_path / "run")]
    assert parse_config(resume).prompt_texts == TEXTS
    assert parse_eval_config(["--model", final]).prompt_texts == TEXTS
    assert parsed("--model", final).prompt_texts == TEXTS
    assert parse_sft_config(["--model", final, "--demos", "1"]).prompt_texts == TEXTS
    for given, expected in (({"babyai": {"prompt": "Go.", "reply": "Y"}}, True), ({}, False)):
        prompts.write_text(json.dumps(given))
        argv = ["--model", final, "--prompts", str(prompts) if expected else ""]
        assert parse_eval_config(argv).prompt_texts == parsed(*argv).prompt_texts == given
    with pytest.raises(ValueError, match="was started with --prompts"):
        parse_config([*resume[2:], "--prompts", "other.json"])


@pytest.mark.parametrize("text", [
    "{", "[]", "{}", '{"babyai": "Play."}', '{"babyai": {"prompt": "a"}}',
    '{"babyai": {"prompt": "a", "reply": "b", "more": "c"}}',
    '{"textcraft": {"prompt": "a", "reply": "b"}}',
])
def test_a_bad_file_of_prompts_is_refused(text, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="prompts.json"):
        config.read_prompts(str(path), ["babyai"])


def test_an_evaluation_reads_replies_as_the_run_did(tmp_path):
    final = started_run(tmp_path / "run", "--parse", "strict", "--agent_args", "plan=true")
    evaluated = parse_eval_config(["--model", final])
    assert (evaluated.parse, evaluated.agent_args) == ("strict", "plan=true")
    assert parse_eval_config(["--model", final, "--parse", "lenient"]).parse == "lenient"


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(),
                    reason="this system has no large pages")
@pytest.mark.parametrize("module", ["config", "benches.__main__"])
def test_large_tensors_of_a_command_take_large_pages(module):
    code = f"import {module}, resource, torch\n" + (
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "torch.ones(50_000_000); counts = []\n"
        "for _ in range(5):\n"  # where memory is scattered, a large page is not always to be had
        "    before = faults(); torch.ones(50_000_000); counts.append(faults() - before)\n"
        "print(min(counts))")
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
                          text=True, check=True)
    assert int(done.stdout) < 200_000_000 // 4096 // 10  # a tenth of the pages of 4 kB
