"""Defaults that depend on the machine, and what runs keep of the way replies are read."""

import shutil
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import config
import envs
from config import REAL, REAL_ON_CPU, machine, parse_config
from conftest import ROOT, run_script
from envs import Env
from eval import parse_eval_config
from sft import parse_sft_config
from worlds.textcraft import TextCraft

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


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Debian's chromium")
def test_a_mixture_plays_as_many_at_a_time_as_its_most_costly_world():
    slots = {env: parse_config(["--env", env, "--out", "runs/no"]).slots
             for env in ("babyai", "webarena", "babyai,webarena")}
    assert slots == {"babyai": 128, "webarena": 32, "babyai,webarena": 32}
    given = parse_config(["--env", "babyai,webarena", "--slots", "64", "--out", "runs/no"])
    assert given.slots == 64


def test_a_served_models_replies_do_not_depend_on_this_machine(monkeypatch):
    monkeypatch.setattr(config, "machine", lambda: AVX2)
    found = config.presets("openai:x", "textcraft")
    assert (found["max_tokens"], found["max_length"]) == (REAL["max_tokens"], 12288)


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
    smaller = parse_config([*argv, "--resume", "--microbatch_tokens", "99", "--slots", "2"])
    assert (smaller.microbatch_tokens, smaller.slots) == (99, 2)
    with pytest.raises(ValueError, match="was started with --dtype bfloat16, not float32"):
        parse_config([*argv, "--resume", "--dtype", "float32"])
    with pytest.raises(ValueError, match="was started with --lr 1e-06, not 1e-05"):
        parse_config([*argv, "--resume", "--lr", "1e-5"])


def test_a_run_that_is_evaluated_needs_held_out_items(tmp_path):
    (tmp_path / "AgentItemId").mkdir()
    names = [{"item_id": f"babyai_{n}"} for n in range(20)]
    (tmp_path / "AgentItemId/babyai_train.json").write_text(json.dumps(names))
    argv = ["--data", str(tmp_path), "--out", str(tmp_path / "r")]
    parse_config(argv)
    parse_sft_config([*argv, "--demos", "1"])
    with pytest.raises(ValueError, match="no items for 'babyai': .*AgentEval"):
        parse_config([*argv, "--eval_every", "1"])
    with pytest.raises(ValueError, match="no items for 'babyai': .*AgentEval"):
        parse_sft_config([*argv, "--demos", "1", "--eval_every", "1"])


# ---- how replies are read, and --prompts ----

TEXTS = {"babyai": {"prompt": "Play.\n\n", "reply": "Ok."},
         "webshop": {"prompt": "Buy.", "reply": "Ok."}}


def started_run(folder, *argv):
    """A run folder with config.json -> its final/, which is empty."""
    cfg = parse_config([*argv, "--out", str(folder)])
    (folder / "final").mkdir(parents=True)
    (folder / "final/config.json").touch()
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return str(folder / "final")


@pytest.fixture
def prompts(tmp_path):
    """A file with TEXTS."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(TEXTS))
    return path


def test_a_run_keeps_the_texts_of_prompts_whatever_becomes_of_the_file(prompts, tmp_path):
    argv = ["--prompts", str(prompts)]
    final = started_run(tmp_path / "run", *argv)
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert recorded["prompt_texts"] == TEXTS
    resume = [*argv, "--resume", "--out", str(tmp_path / "run")]
    for change in (lambda: prompts.write_text("{"), prompts.unlink):
        change()
        assert parse_config(resume).prompt_texts == TEXTS
        assert parse_eval_config(["--model", final]).prompt_texts == TEXTS
    assert parse_config(["--model", final, "--out", "runs/no"]).prompt_texts == TEXTS
    assert parse_sft_config(["--model", final, "--demos", "1", "--out", "runs/no"]
                            ).prompt_texts == TEXTS


def test_prompts_given_anew_win_over_those_of_the_models_run(prompts, tmp_path):
    final = started_run(tmp_path / "run", "--prompts", str(prompts))
    other = tmp_path / "other.json"
    texts = {"babyai": {"prompt": "Go.", "reply": "Yes."}}
    other.write_text(json.dumps(texts))
    for given, expected in ((str(other), texts), ("", {})):
        argv = ["--model", final, "--prompts", given]
        assert parse_eval_config(argv).prompt_texts == expected
        assert parse_config([*argv, "--out", "runs/no"]).prompt_texts == expected


def test_a_run_is_not_resumed_with_another_file_of_prompts(prompts, tmp_path):
    started_run(tmp_path / "with", "--prompts", str(prompts))
    started_run(tmp_path / "without")
    for name, given in (("with", []), ("without", ["--prompts", str(prompts)])):
        with pytest.raises(ValueError, match="was started with --prompts"):
            parse_config(["--resume", "--out", str(tmp_path / name), *given])


BAD_PROMPTS = {
    "": "cannot read",
    "{": "cannot read",
    "[" * 100_000: "cannot read",
    '{"babyai": {"prompt": "\\ud800", "reply": "b"}}': "cannot read",
    "[]": "holds no object",
    '{"babyay": {"prompt": "a", "reply": "b"}}': "names the unknown world 'babyay'",
    '{"babyai": "Play."}': "'babyai' in",
    '{"babyai": {"prompt": "a"}}': "'babyai' in",
    '{"babyai": {"prompt": "a", "reply": ""}}': "'babyai' in",
    '{"babyai": {"prompt": "a", "reply": 3}}': "'babyai' in",
    '{"babyai": {"prompt": "a", "reply": "b", "more": "c"}}': "'babyai' in",
    '{"textcraft": {"prompt": "a", "reply": "b"}}': "has no texts for babyai",
    "{}": "has no texts for babyai",
}


@pytest.mark.parametrize("text", BAD_PROMPTS)
@pytest.mark.parametrize("script", ["train.py", "eval.py", "sft.py"])
def test_a_bad_file_of_prompts_is_one_line_and_exit_code_2(script, text, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    out = tmp_path / "out"
    result = run_script(script, "--env", "babyai", "--prompts", path, "--out", out)
    assert result.returncode == 2 and not out.exists()
    assert len(result.stderr.splitlines()) == 1
    assert BAD_PROMPTS[text] in result.stderr and str(path) in result.stderr


def test_a_file_of_prompts_that_is_absent_is_one_line():
    with pytest.raises(ValueError, match="--prompts: cannot read /nowhere.json"):
        parse_config(["--prompts", "/nowhere.json", "--out", "runs/no"])


def test_replies_are_read_leniently_unless_the_run_read_them_strictly(tmp_path):
    assert parse_config(["--out", "runs/no"]).parse == parse_eval_config([]).parse == "lenient"
    final = started_run(tmp_path / "run", "--parse", "strict")
    assert parse_eval_config(["--model", final]).parse == "strict"
    assert parse_eval_config(["--model", final, "--parse", "lenient"]).parse == "lenient"
    with pytest.raises(ValueError, match="unknown --parse 'loose'; choose from strict, lenient"):
        parse_config(["--parse", "loose", "--out", "runs/no"])


def test_a_run_from_before_the_flag_goes_on_reading_strictly(tmp_path):
    final = started_run(tmp_path / "run")
    path = tmp_path / "run/config.json"
    run = json.loads(path.read_text())
    for name in ("parse", "prompts", "prompt_texts"):
        del run[name]
    path.write_text(json.dumps(run))
    resumed = parse_config(["--resume", "--out", str(tmp_path / "run")])
    assert (resumed.parse, resumed.prompt_texts) == ("strict", {})
    evaluated = parse_eval_config(["--model", final])
    assert (evaluated.parse, evaluated.prompt_texts) == ("strict", {})
    with pytest.raises(ValueError, match="was started with --parse strict, not lenient"):
        parse_config(["--resume", "--out", str(tmp_path / "run"), "--parse", "lenient"])


# ---- algorithms and losses ----

OWN = """
def by_state(step, gamma: float = 1.0): ...
by_state.needs_states = True

def pairs(step): ...
pairs.compares_samples = True

def taught(step, coach: str = ""): ...
taught.needs_models = ("coach",)

def nothing(): ...
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A file with algorithms of one's own."""
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


NO_ADVANTAGE = "write grpo, rloo, reinforce_pp, ppo, the name of a file in ideas/, FILE.py:NAME"


@pytest.mark.parametrize("flags, says", [
    ("--algo OWN:by_state --env_url http://127.0.0.1:9", "babyai, on a server, does not tell its"),
    ("--algo OWN:by_state --env babyai,textcraft --env_url textcraft=http://127.0.0.1:9",
     "textcraft, on a server, does not"),
    ("--algo OWN:pairs --rollouts_per_item 1", "--rollouts_per_item must be at least 2"),
    ("--algo OWN:taught", "own.py:taught needs --algo_args coach=MODEL"),
    ("--algo OWN:other", f"own.py:other': {NO_ADVANTAGE}"),
    ("--algo OWN:OWN", "there is no advantage"),
    ("--algo OWN:nothing --algo_args gamma=1", "own.py:nothing"),
    ("--algo gpro", f"there is no advantage 'gpro': {NO_ADVANTAGE}"),
    ("--algo .algos:grpo", f"there is no advantage '.algos:grpo': {NO_ADVANTAGE}"),
    ("--algo_args gama=0.9", "'gama'"),
    ("--algo_args normalize_std=1", "advantage grpo: normalize_std is bool, not 1"),
    ("--algo ppo --algo_args gamma=high", "advantage ppo: gamma is float, not 'high'"),
    ("--loss gpso", "there is no loss 'gpso': write ppo, the name of a file in ideas/"),
    ("--loss_args clip_low", "cannot read loss ppo 'clip_low'; write NAME=VALUE"),
    ("--loss_args clip=0.2", "clip_low"),
    ("--env babyai,searchqa --shaping progress",
     "babyai, searchqa in this process: no world gives its progress"),
    ("--env textcraft --shaping potential --algo ppo --algo_args gamma=0.9",
     "--shaping needs --algo_args gamma=1"),
    ("--algo grpo --kl_in reward --kl_coef 0.1",
     "give --kl_in loss or --algo_args normalize_std=false"),
    ("--value_clip 0", "--value_clip must be positive"),
])
def test_flags_that_do_not_go_together_are_refused_in_one_line(flags, says, own):
    with pytest.raises(ValueError) as error:
        parse_config([*flags.replace("OWN:", f"{own}:").split(), "--out", "runs/no"])
    assert says in str(error.value) and "\n" not in str(error.value)


def test_settings_reach_the_function_and_allow_what_they_make_right(own):
    def advantage(*flags):
        return parse_config([*flags, "--out", "runs/no"]).advantage

    assert advantage("--algo", "ppo", "--algo_args", "gamma=1 lam=0.9").keywords == {
        "gamma": 1.0, "lam": 0.9}
    assert advantage("--kl_in", "reward", "--kl_coef", "0.1", "--algo_args",
                     "normalize_std=false").keywords == {"normalize_std": False}
    shaped = ["--env", "textcraft", "--shaping", "potential", "--algo"]
    advantage(*shaped, f"{own}:by_state", "--algo_args", "gamma=1")
    assert advantage("--algo", f"{own}:taught", "--algo_args", "coach=tiny").needs_models
    assert parse_config(["--algo", f"{own}:pairs"]).out.endswith("_own_py_pairs_s0")


def test_an_algorithm_by_state_needs_worlds_that_tell_theirs(own, monkeypatch):
    worlds = ["babyai", "textcraft", "searchqa"]
    assert all(envs.has_states(name) for name in worlds) and not envs.has_states("nowhere")
    flags = ["--env", "babyai,textcraft", "--algo", f"{own}:by_state", "--out", "runs/no"]
    assert parse_config(flags).advantage.needs_states

    def missing(*_):
        raise ModuleNotFoundError("No module named 'py4j'", name="py4j")

    with monkeypatch.context() as patch:
        patch.setattr(envs, "load_named", missing)
        with pytest.raises(envs.UserError, match="textworld needs the package 'py4j'"):
            envs.has_states("textworld")
    monkeypatch.setattr(TextCraft, "state", Env.state)
    assert not envs.has_states("textcraft")
    with pytest.raises(ValueError, match="textcraft, in this process, does not tell its states"):
        parse_config(flags)


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


def test_a_resumed_run_keeps_the_rules_of_its_worlds(tmp_path):
    flags = ["--out", str(tmp_path / "r")]
    (tmp_path / "r").mkdir()
    first = parse_config([*flags, "--env_args", "babyai.upstream=1"])
    (tmp_path / "r/config.json").write_text(json.dumps(asdict(first)))
    assert parse_config([*flags, "--resume"]).env_args == "babyai.upstream=1"
    assert parse_config([*flags, "--resume", "--env_args", ""]).env_args == ""


def test_a_run_on_a_server_is_not_resumed_in_this_process(tmp_path):
    flags = ["--out", str(tmp_path / "r")]
    (tmp_path / "r").mkdir()
    first = asdict(parse_config(flags)) | {"env_url": "http://127.0.0.1:9"}
    (tmp_path / "r/config.json").write_text(json.dumps(first))
    with pytest.raises(ValueError, match="was started with --env_url http://127.0.0.1:9"):
        parse_config([*flags, "--resume"])


def run_folder(path, model):
    (path / "final").mkdir(parents=True)
    flags = asdict(parse_config(["--model", str(model), "--out", str(path / "never")]))
    (path / "config.json").write_text(json.dumps(flags))
    return path / "final"


def test_a_model_made_of_the_tiny_one_is_so_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(config.rl, "model_path", lambda name: name)
    warm = run_folder(tmp_path / "warm", "tiny")
    trained = run_folder(tmp_path / "a", warm)
    shutil.rmtree(tmp_path / "warm")
    cfg = parse_config(["--model", str(trained), "--out", str(tmp_path / "b")])
    assert (cfg.lr, cfg.max_tokens) == (config.TINY["lr"], config.TINY["max_tokens"])


def test_runs_that_began_with_each_others_models_are_one_line(tmp_path):
    for own, other in ("ab", "ba"):
        (tmp_path / own / "final").mkdir(parents=True)
        flags = {"env": "babyai", "algo": "grpo", "horizon": "3", "action_format": "react",
                 "model": str(tmp_path / other / "final")}
        (tmp_path / own / "config.json").write_text(json.dumps(flags))
    ask = "import config, sys; config.presets(sys.argv[1], 'babyai')"
    done = subprocess.run([sys.executable, "-c", ask, str(tmp_path / "a/final")], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert "began with each other's models" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("env_url, message", [
    ("babyai=http://a:1 babyai=http://b:1", "twice"), (",", "no address"),
    ("babyai=http://a:1 textcraft=", "no address")])
def test_servers_that_are_lost_on_the_way_are_refused(env_url, message):
    with pytest.raises(ValueError, match=message):
        config.servers(env_url, ["babyai"] if env_url == "," else ["babyai", "textcraft"])


def test_a_horizon_of_a_world_that_is_not_played_is_refused():
    with pytest.raises(ValueError, match="--horizon names textcraf, which is not in --env babyai"):
        parse_config(["--env", "babyai", "--horizon", "babyai=3,4 textcraf=3,5", "--out", "runs/n"])
