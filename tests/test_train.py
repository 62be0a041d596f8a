"""The command train.py: all algorithms, repeated, resumed, on two processes, with bad flags."""

import copy
import doctest
import errno
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import agent
import checkpoint
import config
import rl
import train
from config import items_per_world, mixture, parse_config
from envs import EnvError
from metrics import alarm
from models import check
from schedule import adaptive_horizon
from trajectory import Trajectory
from worlds.textcraft import TextCraft

SMALL = ["--items_per_step", "4", "--rollouts_per_item", "4", "--horizon", "2,3",
         "--horizon_steps", "2", "--steps", "3", "--max_tokens", "8"]
NO_RUN = ["--out", "runs/never-made"]
TIMES = ("seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*args, launcher=None):
    """Run train.py to its end -> the completed process. launcher: the beginning of the command of
    a process of its own; default: this process."""
    if launcher is None:
        return run_script("train.py", *args)
    return subprocess.run([*launcher, *args], cwd=ROOT, env=ENV, capture_output=True, text=True,
                          timeout=300)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder):
    """The rows of metrics of a run, without what depends on the machine."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a small run that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "a"
    done = run("--out", str(out), "--save_every", "1", *SMALL)
    assert done.returncode == 0, done.stderr
    return out


# ---- what a run writes ----


def test_a_run_leaves_everything_it_promises(reference):
    rows = metrics(reference)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert [r["horizon"] for r in rows] == [2, 2, 3]
    columns = """step env horizon loss success score turns reward kl entropy grad_norm
        valid_actions env_error truncated zero_gradient_groups logprob_gap forwarded_per_kept
        padding trajectories"""
    assert set(columns.split()) <= set(rows[0])
    assert all(r["logprob_gap"] < 1e-4 for r in rows)
    assert all(r["trajectories"] == 16 for r in rows)
    assert (reference / "curves.png").stat().st_size > 10_000
    settings = json.loads((reference / "config.json").read_text())
    assert settings["env"] == "babyai"
    assert settings["horizon"] == "2,3"

    trajectories = read_jsonl(reference / "trajectories/step_000001.jsonl")
    fields = """item env step group status reward score success turns messages tokens mask
        logprobs rewards advantage"""
    assert len(trajectories) == 16
    assert set(fields.split()) <= set(trajectories[0])
    assert len(list((reference / "checkpoints").iterdir())) == 2  # the default of --keep
    AutoModelForCausalLM.from_pretrained(reference / "final")


def test_a_copy_of_final_keeps_the_settings_of_its_run(reference, tmp_path):
    """Otherwise a model made of the built-in one would get the learning rate of a large model."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(reference / "final", copy)
    flags = ["--env", "searchqa", "--out", str(tmp_path / "next"), "--model"]
    there, here = (parse_config([*flags, str(model)]) for model in (reference / "final", copy))
    here.model = there.model
    assert here == there
    assert here.first_model == "tiny"


def test_the_metrics_hold_memory_and_speed(reference):
    for row in read_jsonl(reference / "metrics.jsonl"):
        assert row["padding"] == 0
        assert row["kl_behaviour"] == row["kl"] >= 0
        assert 0 < row["occupancy"] <= 1
        assert row["memory_gb"] > 0.1
        assert row["seconds_rollout"] > 0
        assert row["seconds_update"] > 0


def test_a_run_says_what_it_does_and_how_success_changed(tmp_path):
    out = tmp_path / "r"
    done = run("--out", str(out), "--eval_every", "3", *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["worlds", "model", "training", "files", "stop"]
    assert [line.split()[0] for line in lines[:5]] == names
    assert "step 0 to 3" in lines[2]
    assert f"--model {out}/final" in lines[5]
    before = metrics(out)[0]["eval/success"]
    assert lines[6].startswith(f"held-out success: {before:.3f} before, ")
    # What is said last is what an evaluation of final/ with the same items would give.
    done = run("--out", str(out), "--eval_every", "3", "--resume", *SMALL, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert lines[6].endswith(f"{metrics(out)[3]['eval/success']:.3f} after")


def test_metrics_go_to_tensorboard_too(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    flags = ["--out", str(tmp_path / "r"), "--report_to", "tensorboard", "--save_every", "1",
             *SMALL]
    for more in ((), ("--resume",)):
        done = run(*flags, *more, launcher=(sys.executable, "train.py"))
        assert done.returncode == 0, done.stderr
        # As if the process had been killed after its last step: that step is repeated.
        shutil.rmtree(tmp_path / "r/final")
        shutil.rmtree(tmp_path / "r/checkpoints/step_000003")
    board = EventAccumulator(str(tmp_path / "r/tensorboard"))
    board.Reload()
    rewards = [row["reward"] for row in metrics(tmp_path / "r")]
    assert len(rewards) == 3
    assert [event.value for event in board.Scalars("reward")] == pytest.approx(rewards)


# ---- repeated and resumed ----


def test_a_seeded_run_repeats_bit_for_bit_and_a_killed_one_resumes_exactly(reference, tmp_path):
    out = tmp_path / "b"
    args = ["--out", str(out), "--save_every", "1", *SMALL]
    child = subprocess.Popen([sys.executable, "train.py", *args], cwd=ROOT, env=ENV,
                             stderr=subprocess.DEVNULL)
    while not (out / "checkpoints/step_000001/state.json").exists():  # saved once, then killed
        time.sleep(0.02)
        assert child.poll() is None, "the run ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "final").exists()

    refused = run(*args)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = run(*args, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(reference)
    for name in ("trajectories/step_000002.jsonl", "final/model.safetensors"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()

    again = run(*args, "--resume")
    assert again.returncode == 0
    assert "finished" in again.stdout
    assert len(again.stdout.splitlines()) == 1


def test_an_error_of_one_rank_is_shown_on_that_rank(monkeypatch, capsys):
    for rank, local, of_one_rank, said in (
            ("0", "0", False, "train.py: no\n"), ("1", "1", False, ""),
            ("1", "1", True, "train.py: rank 1: no\n"),
            ("8", "0", False, "train.py: rank 8: no\n")):  # the first one of the second machine
        waited = []  # a rank that prints nothing ends after those that print
        monkeypatch.setattr(time, "sleep", waited.append)
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit):
            train.usage_error(ValueError("no"), of_one_rank=of_one_rank)
        assert capsys.readouterr().err == said
        assert bool(waited) == (said == "")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_never_trained_on(reference, tmp_path):
    out = tmp_path / "r"
    args = ["--out", str(out), "--save_every", "1", *SMALL]
    shutil.copytree(reference, out)
    newest = out / "checkpoints/step_000003"
    (newest / "tokenizer.json").unlink()

    # A finished run stays finished.
    done = run(*args, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out} is finished (3 steps)\n"

    # Also without any, which leaves nothing to go on from.
    shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    args_bare = ["--out", str(tmp_path / "bare"), *SMALL]
    before = contents(tmp_path / "bare")
    done = run(*args_bare, "--resume")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/bare is finished (3 steps)\n")
    done = run(*args_bare, "--resume", "--steps", "5")
    assert done.returncode == 2 and "start another run with --model" in done.stderr
    assert contents(tmp_path / "bare") == before

    # Another run goes on from the checkpoint before, and keeps the damaged one.
    shutil.rmtree(out / "final")
    done = run(*args, "--resume")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "checkpoint" in line]
    assert said == [f"{newest}/tokenizer.json is missing or cannot be read: "
                    "going on from step 2"]
    assert metrics(out) == metrics(reference)
    for name in ("final", "checkpoints/step_000003"):
        assert (out / name / "tokenizer.json").exists()
        weights = f"{name}/model.safetensors"
        assert (out / weights).read_bytes() == (reference / weights).read_bytes()
    assert len(list((out / "checkpoints").iterdir())) == 3
    assert not (out / "checkpoints/damaged_step_000003/tokenizer.json").exists()

    # No checkpoint is left to go on from.
    shutil.rmtree(out / "final")
    for folder in (out / "checkpoints").glob("step_*"):
        (folder / "state.json").unlink()
    before = contents(out)
    done = run(*args, "--resume")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"{newest}/state.json is missing" in done.stderr
    assert contents(out) == before


def tiny_with_template(folder, template):
    """A model folder: the tiny model with another chat template."""
    shutil.copytree(rl.TINY_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    return ["--model", str(folder), "--kl_coef", "0", "--max_length", "4096", "--dtype", "float32"]


def test_a_template_that_shows_the_time_shows_that_of_the_runs_start(tmp_path):
    template = (rl.TINY_MODEL / "chat_template.jinja").read_text()
    model = tiny_with_template(tmp_path / "m", "{{ strftime_now('%H:%M:%S.%f') }}" + template)
    args = [*model, "--out", str(tmp_path / "r"), *SMALL]
    for flags in (["--steps", "2"], ["--steps", "3", "--resume"]):
        done = run(*args, *flags)
        assert done.returncode == 0, done.stderr
    _, tokenizer = rl.load_policy(str(tmp_path / "r/final"))
    assert "strftime_now" in tokenizer.chat_template
    beginnings = set()
    for step in range(3):
        for t in read_jsonl(tmp_path / f"r/trajectories/step_{step:06d}.jsonl"):
            beginnings.add(tokenizer.decode(t["tokens"]).partition("<|im_start|>")[0])
    (beginning,) = beginnings
    assert len(beginning) == len("12:34:56.123456")


@pytest.mark.parametrize("script", ["train.py", "sft.py", "eval.py"])
def test_a_template_that_fails_is_one_line_and_nothing_written(script, tmp_path):
    model = tiny_with_template(tmp_path / "m", "{{ raise_exception('two\nlines') }}")
    if script != "train.py":
        model = model[:2]
    demos = ["--demos", "1"] if script == "sft.py" else []
    done = run_script(script, *model, *demos, "--out", tmp_path / "r")
    assert done.returncode == 2
    assert done.stderr == (f"{script}: this tokenizer's chat template fails: "
                           "TemplateError two lines\n")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("script", ["train.py", "sft.py", "eval.py"])
def test_a_template_without_an_end_token_and_switches_that_it_lacks_are_one_line(script, tmp_path):
    template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    model = tiny_with_template(tmp_path / "m", template)[:2]
    flags = ["--out", tmp_path / "r"]
    if script == "sft.py":
        flags += ["--demos", "1"]
    for more, says in [
        ([*model], "this tokenizer's chat template ends a reply with '\\n"),
        (["--chat_args", "thinking=false"], "it has no switch 'thinking'"),
        (["--chat_args", '{"thinking"'], "--chat_args is not a JSON object"),
    ]:
        done = run_script(script, *flags, *more)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith(f"{script}: ") and says in done.stderr
        assert not (tmp_path / "r").exists()


def test_a_system_message_and_switches_reach_every_command_and_last(tmp_path):
    template = "{{ 'LOUD' if loud }}" + (rl.TINY_MODEL / "chat_template.jinja").read_text()
    model = tiny_with_template(tmp_path / "m", template)
    given = ["--system", "Be brief.", "--chat_args", "loud=true"]
    beginning = "LOUD<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    warm, out = tmp_path / "warm", tmp_path / "r"
    done = run_script("sft.py", *model[:2], *given, "--demos", "2", "--batch", "2", "--epochs", "1",
                      "--dtype", "float32", "--max_length", "4096", "--out", warm)
    assert done.returncode == 0, done.stderr
    assert [len(read_jsonl(warm / "demos.jsonl")), len(metrics(warm))] == [2, 1]

    # train.py takes them from the run of sft.py, and keeps them when it goes on.
    args = ["--out", str(out), *SMALL, "--model", str(warm / "final"), *model[2:]]
    for flags in (["--steps", "1"], ["--steps", "2", "--resume"]):
        done = run(*args, *flags)
        assert done.returncode == 0, done.stderr
    refused = run(*args, "--resume", "--system", "Be loud.")
    assert refused.returncode == 2 and "was started with --system Be brief." in refused.stderr

    # eval.py takes them from the run of train.py.
    done = run_script("eval.py", "--model", out / "final", "--items", "2", "--horizon", "1",
                      "--max_tokens", "4", "--trajectories", tmp_path / "t.jsonl")
    assert done.returncode == 0, done.stderr
    tokenizer = rl.load_tokenizer("tiny")
    for path in (warm / "demos.jsonl", out / "trajectories/step_000000.jsonl",
                 out / "trajectories/step_000001.jsonl", tmp_path / "t.jsonl"):
        for t in read_jsonl(path):
            assert tokenizer.decode(t["tokens"]).startswith(beginning)


def test_the_adaptive_horizon_follows_the_metrics_and_resumes(tmp_path):
    args = [*SMALL, "--horizon", "2,3,4", "--horizon_schedule", "adaptive", "--steps", "8",
            "--save_every", "5", "--seed", "1"]
    done = run("--out", str(tmp_path / "a"), *args)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "a")
    assert len(rows) == 8
    state = {"stage": 0}
    for row in rows:
        assert row["horizon"] == (2, 3, 4)[state["stage"]]
        cut = row["truncated"] - row["truncated/length"]
        state = adaptive_horizon(state, row["success"], cut, 3, window=2)
    assert rows[-1]["horizon"] > 2

    not_copied = shutil.ignore_patterns("final", "step_000008")
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=not_copied)
    done = run("--out", str(tmp_path / "b"), *args, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "b") == rows
    assert (tmp_path / "b/final").exists()


def test_turns_end_a_run_and_are_counted_over_a_resume(reference, tmp_path):
    rows = metrics(reference)
    played = [row["turns"] * row["trajectories"] for row in rows]
    flags = ["--turns", str(round(sum(played[:2]))), "--save_every", "10", *SMALL, "--steps", "9"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = run("--out", str(whole), *flags)
    assert done.returncode == 0, done.stderr
    assert "step 0 to 9 or " in done.stdout
    assert metrics(whole) == rows[:2]
    assert (whole / "checkpoints/step_000002").is_dir()
    AutoModelForCausalLM.from_pretrained(whole / "final")

    assert run("--out", str(resumed), *SMALL, "--steps", "1").returncode == 0
    done = run("--out", str(resumed), *flags, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(resumed) == rows[:2]

    # It is finished, also without its checkpoints. With more turns it goes on.
    before = contents(resumed)
    done = run("--out", str(resumed), *flags, "--resume")
    assert (done.returncode, done.stdout) == (0, f"{resumed} is finished (2 steps)\n")
    assert contents(resumed) == before
    shutil.copytree(resumed, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    done = run("--out", str(tmp_path / "bare"), *flags, "--resume")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/bare is finished (2 steps)\n")
    more = ["--resume", "--turns", str(round(sum(played)))]
    shutil.copytree(resumed, tmp_path / "more")
    done = run("--out", str(tmp_path / "more"), *flags, *more)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "more") == rows

    # Turns that cannot be counted are refused, and nothing is changed.
    (resumed / "metrics.jsonl").unlink()
    before = contents(resumed)
    done = run("--out", str(resumed), *flags, *more)
    assert done.returncode == 2
    assert "resume without --turns" in done.stderr
    assert contents(resumed) == before


def test_resume_refuses_other_flags(reference):
    with pytest.raises(ValueError, match="was started with --algo grpo"):
        parse_config(["--out", str(reference), "--resume", "--algo", "ppo", *SMALL])


@pytest.mark.slow
def test_two_processes_give_the_first_step_of_one(reference, tmp_path):
    out = tmp_path / "c"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                "--master_port=29613", "train.py")
    done = run("--out", str(out), *SMALL, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    one, two = metrics(reference), metrics(out)
    assert len(two) == 3
    assert two[0]["trajectories"] == 16
    for key in ("loss", "grad_norm", "reward", "success", "turns", "entropy"):
        assert abs(one[0][key] - two[0][key]) < 1e-5, key


# ---- algorithms, worlds and settings ----


@pytest.mark.parametrize("algo, flags", [
    ("ppo", []),
    ("rloo", ["--kl_coef", "0.01"]),
    ("reinforce_pp", ["--kl_coef", "0.01", "--kl_in", "reward", "--kl_type", "k1"]),
])
def test_every_algorithm_runs_and_learns_something(algo, flags, tmp_path):
    done = run("--out", str(tmp_path / "r"), "--algo", algo, *flags, *SMALL)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "r")
    assert len(rows) == 3
    assert all(r["grad_norm"] > 0 for r in rows)
    if "--kl_coef" in flags:
        assert abs(rows[0]["kl"]) < 0.5
        assert rows[0]["logprob_gap"] < 1e-4


def test_textcraft_runs(tmp_path):
    done = run("--env", "textcraft", "--out", str(tmp_path / "r"), *SMALL)
    assert done.returncode == 0, done.stderr
    assert [row["env"] for row in metrics(tmp_path / "r")] == ["textcraft"] * 3


def test_bfloat16_arithmetic_trains_float32_weights(tmp_path):
    def dtypes(folder):
        weights = load_file(tmp_path / "r" / folder / "model.safetensors")
        return {weight.dtype for weight in weights.values()}

    done = run("--out", str(tmp_path / "r"), "--algo", "ppo", "--dtype", "bfloat16",
               "--kl_coef", "0.01", *SMALL, "--steps", "1")  # slow: most CPUs emulate bfloat16
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "r")
    assert len(rows) == 1
    assert all(0 < r["logprob_gap"] < 0.05 for r in rows)
    assert all(0 < r["grad_norm"] < math.inf for r in rows)
    assert dtypes("checkpoints/step_000001") == {torch.float32}
    assert dtypes("final") == {torch.bfloat16}


def test_each_action_format_rolls_out_and_trains_a_step(tmp_path):
    flags = "--plan --reflect --steps 1 --items_per_step 2 --rollouts_per_item 2 --horizon 4"
    for name, description in agent.FORMATS.items():
        done = run(*flags.split(), "--temperature", "1.5", "--out", str(tmp_path / name),
                   "--action_format", name)
        assert done.returncode == 0, done.stderr
        (row,) = metrics(tmp_path / name)
        assert row["turns"] > 1
        assert row["env_error"] == 0
        assert row["logprob_gap"] < 1e-4
        trajectories = read_jsonl(tmp_path / name / "trajectories/step_000000.jsonl")
        messages = trajectories[0]["messages"]
        assert description in messages[0]["content"]
        assert messages[2]["content"].endswith(agent.PLAN)


def test_shaping_and_costs_reach_training_and_no_evaluation(tmp_path):
    """A shaped run's weights are evaluated in its own folder and elsewhere: the same figures."""
    import eval as evaluation
    small_step = ["--env", "textcraft", *SMALL, "--steps", "1"]
    shaping = ["--shaping", "progress", "--turn_cost", "0.125", "--invalid_penalty", "0.5"]
    plain = run("--out", str(tmp_path / "a"), *small_step)
    shaped = run("--out", str(tmp_path / "b"), *small_step, *shaping)
    assert plain.returncode == shaped.returncode == 0, plain.stderr + shaped.stderr
    (a,), (b,) = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    for name in ("success", "score", "turns"):  # the same rollout
        assert a[name] == b[name]
    assert abs(b["reward"] - a["reward"]) > 0.01  # but other rewards

    shutil.copytree(tmp_path / "b/final", tmp_path / "c")
    figures = []
    for folder in (tmp_path / "b/final", tmp_path / "c"):
        assert evaluation.main([
            "--env", "textcraft", "--model", str(folder), "--items", "20", "--horizon", "3",
            "--max_tokens", "8", "--dtype", "float32", "--max_length", "4096",
            "--out", str(tmp_path / "r.json"), "--trajectories", f"{folder}.jsonl"]) == 0
        result = json.loads((tmp_path / "r.json").read_text())
        played = read_jsonl(folder.with_suffix(".jsonl"))
        assert len(played) == 20
        assert all(t["reward"] == t["score"] for t in played)  # neither shaping nor costs
        figures.append({k: v for k, v in result.items() if k != "config"})
    assert figures[0] == figures[1]


# ---- mixtures of worlds ----


def test_a_mixture_gives_each_world_its_weight_its_horizon_its_limits_and_its_columns(tmp_path):
    out = tmp_path / "r"
    done = run("--env", "babyai:2,textcraft", "--items_per_step", "4", "--rollouts_per_item", "2",
               "--steps", "2", "--max_tokens", "8", "--horizon", "babyai=1,2 textcraft=3,5",
               "--horizon_steps", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    worlds = json.loads((out / "config.json").read_text())["worlds"]
    assert {w: own["weight"] for w, own in worlds.items()} == {"babyai": 2, "textcraft": 1}
    penalties = {w: own["invalid_penalty"] for w, own in worlds.items()}
    assert penalties == {"babyai": 0.05, "textcraft": 0.0}
    rows = metrics(out)
    horizons = [(r["horizon/babyai"], r["horizon/textcraft"], r["horizon"]) for r in rows]
    assert horizons == [(1, 3, 3), (2, 5, 5)]
    for step, row in enumerate(rows):
        played = read_jsonl(out / f"trajectories/step_{step:06d}.jsonl")
        by_world = {w: [t for t in played if t["env"] == w] for w in ("babyai", "textcraft")}
        # Three items and one item, in groups of two.
        assert {w: len(own) for w, own in by_world.items()} == {"babyai": 6, "textcraft": 2}
        for world, own in by_world.items():
            assert all(t["turns"] <= row[f"horizon/{world}"] for t in own)
            assert row[f"success/{world}"] == sum(t["success"] for t in own) / len(own)
            mean_reward = sum(t["reward"] for t in own) / len(own)
            assert row[f"reward/{world}"] == pytest.approx(mean_reward)
            for t in own:
                invalid_actions = t["turns"] - t["valid_actions"]
                expected = t["success"] - penalties[world] * invalid_actions
                assert t["reward"] == pytest.approx(expected)
    assert (out / "curves.png").stat().st_size > 10_000


def test_one_world_that_fails_for_a_step_does_not_end_a_mixture(tmp_path, monkeypatch):
    def fail(self, item):
        raise EnvError("down for a moment")

    flags = ["--env", "babyai,textcraft", "--items_per_step", "2", "--rollouts_per_item", "2",
             "--steps", "1", "--max_tokens", "4", "--horizon", "1", "--horizon_schedule", "fixed",
             "--kl_coef", "0.01", "--out", str(tmp_path / "r")]
    monkeypatch.setattr(TextCraft, "reset", fail)
    train.train(parse_config(flags))
    (row,) = metrics(tmp_path / "r")
    assert row["env_error/textcraft"] == 1
    assert row["env_error/babyai"] == 0
    with pytest.raises(ValueError, match="with --invalid_penalty 0.0 for textcraft, not 0.05"):
        parse_config([*flags, "--resume", "--invalid_penalty", "0.05"])


def test_first_prompts_that_do_not_fit_end_a_run_in_its_first_step_only():
    run = SimpleNamespace(step=0, cfg=SimpleNamespace(worlds={
        "babyai": SimpleNamespace(max_length=9)}))
    too_long = [Trajectory("babyai_1", "babyai", status="length")]
    with pytest.raises(SystemExit, match="--max_length is 9: no first prompt of babyai fits"):
        train.check_trajectories(run, too_long)
    run.step = 28  # few items a step: there were others whose first prompts fit
    train.check_trajectories(run, too_long)


def test_environments_that_all_fail_end_a_run_at_a_checkpoint(tmp_path, monkeypatch):
    flags = ["--env", "textcraft", "--items_per_step", "2", "--rollouts_per_item", "2",
             "--steps", "2", "--max_tokens", "4", "--horizon", "1", "--horizon_schedule", "fixed",
             "--out", str(tmp_path / "r")]
    played = train.play_items

    def play(run, *args):
        if run.step == 1:
            monkeypatch.setattr(TextCraft, "reset", fail)
        return played(run, *args)

    def fail(self, item):
        raise EnvError("the server has stopped")

    with monkeypatch.context() as broken:
        broken.setattr(train, "play_items", play)
        with pytest.raises(SystemExit, match="failed at step 1; --resume repeats this step; .*"
                                             "the server has stopped"):
            train.train(parse_config(flags))
    monkeypatch.undo()
    assert checkpoint.complete(tmp_path / "r") == [tmp_path / "r/checkpoints/step_000001"]
    train.train(parse_config([*flags, "--resume"]))
    assert [row["step"] for row in metrics(tmp_path / "r")] == [0, 1]


def test_steps_without_success_and_gradient_are_warned_of_once(capsys):
    run = SimpleNamespace(rank=0, idle_steps=0)
    idle, learning, able = (0.0, 0.0), (0.0, 0.1), (1.0, 0.0)  # success, gradient norm
    steps = [*[idle] * 4, learning, *[able] * 9, *[idle] * 7]
    for step, (success, grad_norm) in enumerate(steps):
        train.warn_without_signal(run, {"success": success, "grad_norm": grad_norm})
        assert ("no success and no gradient" in capsys.readouterr().err) == (step == 18)


def test_trajectories_cut_by_their_length_give_one_warning(capsys):
    shares = (0.0, 0.05, 0.25, 0.3)
    for rank, expected in ((0, [2]), (1, [])):
        run = SimpleNamespace(warned_of_cuts=False, rank=rank)
        warned = []
        for step, share in enumerate(shares):
            train.warn_of_cuts(run, {"truncated/length": share})
            if f"--max_length cut {share:.0%} of this step's" in capsys.readouterr().err:
                warned.append(step)
        assert warned == expected


def test_each_world_of_a_mixture_has_its_share_of_a_steps_items():
    cfg = parse_config(["--env", "babyai:2,textcraft:1", *NO_RUN])
    assert items_per_world(cfg, cfg.items_per_step) == {"babyai": 22, "textcraft": 10}
    assert cfg.horizon == "babyai=3,4 textcraft=3,5,8"
    assert [own.horizon_steps for own in cfg.worlds.values()] == [30, 25]
    assert cfg.out == "runs/never-made"
    tenths = parse_config(["--env", "babyai:0.1,textcraft:0.3", *NO_RUN])
    assert items_per_world(tenths, 16) == {"babyai": 4, "textcraft": 12}
    assert mixture("textcraft:0.5, babyai") == {"textcraft": 0.5, "babyai": 1.0}
    assert parse_config(["--env", "babyai:2", *NO_RUN]).horizon == "3,4"  # a mixture of one
    assert parse_config(["--env", "babyai,textcraft", *NO_RUN]).items_per_step == 32  # 16 of each
    with pytest.raises(ValueError, match="leaves none for textcraft"):
        parse_config(["--env", "babyai:99,textcraft:1", *NO_RUN])


@pytest.mark.parametrize("env", ["babyai:0", "babyai:-1", "babyai:x", "babyai,babyai", "babyai,",
                                 "babyai,nowhere"])
def test_a_mixture_that_cannot_be_read_is_refused(env):
    with pytest.raises(ValueError, match="--env|unknown environment"):
        parse_config(["--env", env, *NO_RUN])


@pytest.mark.parametrize("env, env_url", [
    ("babyai", "babyia=http://h:1"),
    ("babyai,textcraft", "http://h:1"),
    ("babyai", "babyai=http://a:1 http://b:2"),
])
def test_servers_that_cannot_be_read_are_refused(env, env_url):
    with pytest.raises(ValueError, match="cannot read --env_url .*babyai=http://host:port"):
        parse_config(["--env", env, "--env_url", env_url, *NO_RUN])


# ---- bad usage: one line, and nothing is written ----


@pytest.mark.parametrize("args, named", [
    (["--nonsense", "3"], "--nonsense"),
    (["--top_p", "0.9"], "--top_p"),
    (["--env", "chess"], "chess"),
    (["--algo", "dqn"], "dqn"),
    (["--model", "./no/such/folder"], "no/such/folder"),
    (["--horizon", "0"], "horizon"),
    (["--horizon", "5,3"], "5,3"),
    (["--lr", "-1"], "--lr"),
    (["--lr", "fast"], "lr"),
    (["--resume"], "resume"),
    (["--env_url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    (["--horizon", "6,13", "--horizon_schedule", "fixed"], "fixed"),
    (["--data", "/nowhere"], "/nowhere"),
    (["--rollouts_per_item", "1"], "rollouts_per_item"),
    (["--kl_type", "k1", "--kl_coef", "1"], "k1"),
])
def test_nonsense_is_one_line_and_nothing_written(args, named, tmp_path, capsys):
    out = tmp_path / "r"
    with pytest.raises(ValueError) as e:
        parse_config([*args, "--out", str(out)])
    assert named in str(e.value)
    assert "\n" not in str(e.value)
    assert not out.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("args", [["--nonsense", "3"], ["--horizon", "0"], ["--resume"]])
def test_nonsense_ends_the_command_with_2(args, tmp_path):
    done = run(*args, "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "r").exists()


def test_a_folder_that_holds_rows_is_not_started_anew(tmp_path):
    out = tmp_path / "r"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    done = run("--out", str(out), *SMALL)
    assert done.returncode == 2
    assert "add --resume" in done.stderr and len(done.stderr.splitlines()) == 1
    assert (out / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_damaged_row_of_metrics_is_one_line_and_a_half_written_last_one_is_not(
        reference, tmp_path):
    rows = (reference / "metrics.jsonl").read_text()
    for end in (len(rows) - 50, len(rows) // 2):
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text(rows[:end])
        number = rows[:end].count("\n") + 1
        with pytest.raises(ValueError, match=f"line {number} of {metrics} is damaged"):
            train.rows_before(metrics, number)
        assert train.rows_before(metrics, number - 1) == rows.splitlines()[: number - 1]


@pytest.mark.parametrize("line", [b"\xff", b"[" * 100_000], ids=["no text", "nested deeply"])
def test_a_row_of_metrics_that_is_no_json_is_one_line(line, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 0}\n' + line + b"\n")
    assert train.rows_before(metrics, 1) == ['{"step": 0}']
    with pytest.raises(ValueError, match=f"line 2 of {metrics} is damaged"):
        train.rows_before(metrics, 2)


def test_a_run_that_goes_on_keeps_files_that_the_user_has_named(tmp_path):
    folder = tmp_path / "trajectories"
    folder.mkdir()
    names = ["step_000000.jsonl", "step_000001.jsonl", "step_000001_copy.jsonl",
             "step_000001_1.jsonl"]
    for name in names:
        (folder / name).write_text("")
    cfg = parse_config(["--env", "babyai", "--algo", "grpo", "--out", str(tmp_path / "new")])
    train.prepare_folder(cfg, tmp_path, 1)
    names.remove("step_000001.jsonl")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_lack_of_disk_is_one_line(tmp_path):
    refused = run_within("-f 2000", tmp_path / "r")  # less than the weights' file needs
    assert "File too large" in refused and "--resume goes on" in refused


def test_a_lack_of_memory_is_one_line(tmp_path):
    """A single large request fails, so that Python has memory left to say so. Where many small ones
    use up the memory, some libraries abort the process."""
    model = tmp_path / "large"
    shutil.copytree(ROOT / "data/tiny", model)
    size = 32 << 30  # bytes; the file is a hole
    header = json.dumps({"model.embed_tokens.weight": {
        "dtype": "F32", "shape": [size // 512, 128], "data_offsets": [0, size]}}).encode()
    with (model / "model.safetensors").open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + size)
    refused = run_within("-v 20000000", tmp_path / "r", "--model", str(model))
    assert "no memory or no thread left" in refused and "--microbatch_tokens" in refused


def run_within(limit, out, *flags):
    """Run train.py under a limit of bash's ulimit that it must exceed -> its one line."""
    command = shlex.join([sys.executable, "train.py", *SMALL, "--out", str(out), *flags])
    done = subprocess.run(["bash", "-c", f"ulimit {limit}; {command}"], cwd=ROOT, env=ENV,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def no_thread(*_):
    raise RuntimeError("can't start new thread")  # as Python says it


@pytest.mark.parametrize("use_up", [
    lambda: torch.empty(2**48),  # PyTorch's RuntimeError
    lambda: np.empty(2**56),  # numpy's MemoryError
    no_thread,
])
def test_every_lack_of_memory_or_threads_is_said_alike(use_up, capsys):
    cfg = parse_config(NO_RUN)
    with pytest.raises(SystemExit) as ended, train.exit_on_system_error(cfg, "train.py"):
        use_up()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: no memory or no thread left: ") and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="another"):
        with train.exit_on_system_error(cfg, "train.py"):
            raise RuntimeError("another error")


def test_a_model_without_a_chat_template_needs_the_file_of_one(tmp_path):
    flags = ["--steps", "1", "--horizon", "2", "--max_tokens", "4", "--items_per_step", "1",
             "--rollouts_per_item", "2", "--out", str(tmp_path / "r"),
             *tiny_with_template(tmp_path / "base", "")]
    done = run(*flags)
    assert done.returncode == 2 and "no chat template: take its Instruct version" in done.stderr
    done = run(*flags, "--chat_template", str(tmp_path / "nowhere"))
    assert done.returncode == 2 and str(tmp_path / "nowhere") in done.stderr
    done = run(*flags, "--chat_template", "data/tiny/chat_template.jinja")
    assert done.returncode == 0, done.stderr
    assert rl.load_tokenizer(str(tmp_path / "r/final")).chat_template


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(train.fcntl, "flock", flock)
    train.lock_folder(tmp_path).close()
    assert "cannot lock" in capsys.readouterr().err


def test_frozen_weights_of_lora_keep_the_compute_dtype_in_policy_and_critic():
    cfg = parse_config(["--env", "babyai", "--algo", "ppo", "--lora_rank", "2", "--dtype",
                        "bfloat16", "--out", "runs/never-made"])
    trained = train.load_for_training(cfg, None, torch.device("cpu"))[2]
    for name, (model, _) in trained.items():
        dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16}, name


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    out = tmp_path / "r"
    lock = train.lock_folder(out)
    done = run("--out", str(out), *SMALL, launcher=[sys.executable, "train.py"])
    assert done.returncode == 2
    assert done.stderr == f"train.py: another process is at work in {out}\n"
    assert not (out / "metrics.jsonl").exists()
    lock.close()
    assert run("--out", str(out), *SMALL, "--steps", "1").returncode == 0


def test_a_process_that_loaded_an_older_checkpoint_than_the_last_one_loses_none(
        reference, tmp_path):
    """Another process, which is being stopped, saves a step while this one loads."""
    out = tmp_path / "r"
    shutil.copytree(reference, out)
    aside = tmp_path / "step_000003"
    shutil.move(out / "checkpoints/step_000003", aside)
    cfg = parse_config(["--out", str(out), "--save_every", "1", *SMALL, "--resume"])
    loaded = train.load(cfg)
    assert loaded.step == 2
    shutil.move(aside, out / "checkpoints")
    before = contents(out)
    with pytest.raises(ValueError, match=f"has saved a checkpoint in {out} just now"):
        train.prepare(loaded)
    assert contents(out).items() >= before.items()
    train.lock_folder(out).close()  # is free again


def test_an_earlier_final_is_kept_until_there_is_a_new_one(reference, tmp_path):
    out = tmp_path / "r"
    shutil.copytree(reference, out)
    weights = (out / "final/model.safetensors").read_bytes()
    flags = ["--out", str(out), "--save_every", "1", *SMALL, "--steps", "4", "--resume"]
    loaded = train.load(parse_config(flags))
    train.prepare(loaded)
    train.release(loaded)
    assert (out / "final/model.safetensors").read_bytes() == weights

    shutil.move(out / "checkpoints", tmp_path)
    refused = run(*flags)
    assert refused.returncode == 2 and f"--model {out / 'final'}" in refused.stderr
    shutil.move(tmp_path / "checkpoints", out)
    shutil.copytree(out / "final", tmp_path / "final")
    assert run(*flags).returncode == 0
    later = (out / "final/model.safetensors").read_bytes()
    assert later != weights
    # Killed after the last step, and before final/ was replaced.
    shutil.rmtree(out / "final")
    shutil.copytree(tmp_path / "final", out / "final")
    assert run(*flags).returncode == 0
    assert (out / "final/model.safetensors").read_bytes() == later


def test_an_item_file_that_is_a_folder_is_one_line(tmp_path):
    (tmp_path / "AgentItemId/babyai_train.json").mkdir(parents=True)
    done = run("--out", str(tmp_path / "r"), "--data", str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "babyai_train.json" in done.stderr


def test_under_torchrun_rank_0_alone_prints_what_is_wrong():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"]
    done = run("--horizon", "0", launcher=torchrun)
    ours = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert len(ours) == 1 and "cannot read the horizon '0'" in ours[0], done.stderr
    assert "train.py\", line" not in done.stderr  # a worker's traceback


def test_a_model_folder_never_runs_its_own_code(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(rl.TINY_MODEL, folder)
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = run("--model", str(folder), "--out", str(tmp_path / "r"), *SMALL)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", [
    '[{"item_id": "babyai_x"}]', '[{"item_id": "textcraft_3"}]', '[{"item_id": 5}]',
    '[{"item_id": null}]', '[{"item_id": ["babyai_1"]}]', '[3]', "[" * 100_000,
])
def test_items_that_do_not_exist_are_one_line_that_names_the_file(text, tmp_path):
    path = tmp_path / "AgentItemId/babyai_train.json"
    path.parent.mkdir()
    path.write_text(text)
    done = run("--data", str(tmp_path), "--out", str(tmp_path / "r"), *SMALL)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and str(path) in done.stderr
    assert not (tmp_path / "r").exists()


def test_an_item_that_its_world_does_not_have_ends_a_run_with_one_line(
        tmp_path, monkeypatch, capsys):
    def refuse(self, item):
        raise ValueError("textcraft has\nno such item")

    monkeypatch.setattr(TextCraft, "reset", refuse)
    with pytest.raises(SystemExit) as ended:
        train.train(parse_config(["--env", "textcraft", "--out", str(tmp_path / "r")]))
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train.py: textcraft has no such item (test_train.py, line ")


def test_an_extra_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[lora\]"'):
        parse_config(["--lora_rank", "4", *NO_RUN])


def test_help_explains_and_shows_the_presets():
    done = run("--help")
    assert done.returncode == 0
    for text in ("--horizon_schedule", "6,13,20", "babyai 3,4 (a stage 30 steps)",
                 "textcraft 3,5,8", "--critic_lr", "reinforce_pp", "--minibatches",
                 "--horizon_schedule scaling_inter|fixed|adaptive", "--dtype float32|bfloat16",
                 "--algo_args TEXT", "--slots N", "--shard true|false"):
        assert text in done.stdout, text


def test_the_documented_examples_hold():
    result = doctest.testmod(config)
    assert result.attempted >= 1
    assert result.failed == 0


# ---- runs that cannot go on ----


@pytest.mark.parametrize("change, message", [
    ({"loss": math.nan}, "loss is nan"),
    ({"grad_norm": math.inf}, "grad_norm"),
    ({"entropy": 1e-6}, "collapsed"),
    ({"kl_behaviour": 11.0}, "kl_behaviour is 11"),
    ({"kl": 12.0}, "--max_kl"),
    ({"value_loss": math.inf}, "value_loss is inf"),
    ({"logprob_gap": 0.3}, "logprob_gap is 0.3"),
])
def test_metrics_with_which_training_cannot_go_on_raise_an_alarm(change, message):
    cfg = parse_config(NO_RUN)
    fine = {"turns": 2.0, "loss": 0.1, "grad_norm": 1.0, "kl": 0.01, "kl_behaviour": 0.02,
            "entropy": 0.3, "logprob_gap": 0.02}
    assert alarm(fine, cfg) == ""
    assert alarm(fine | {"turns": 0.0, "entropy": 0.0}, cfg) == ""
    assert message in alarm(fine | change, cfg)


def test_an_alarm_stops_the_run_with_one_line_and_keeps_the_step(tmp_path):
    done = run("--out", str(tmp_path / "r"), "--min_entropy", "5", *SMALL)
    assert done.returncode == 1
    assert "collapsed" in done.stderr.splitlines()[-1]
    assert (tmp_path / "r/trajectories/step_000000.jsonl").exists()
    assert len(metrics(tmp_path / "r")) == 1


def test_a_model_whose_logits_are_nan_stops_the_run_with_one_line(tiny, tmp_path):
    model = copy.deepcopy(tiny[0])
    model.save_pretrained(tmp_path / "m")
    tiny[1].save_pretrained(tmp_path / "m")
    # Before the first step only the first model of a configuration is checked.
    check.find_paths(rl.load_policy(str(tmp_path / "m"))[0])
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "m")
    done = run("--model", str(tmp_path / "m"), "--out", str(tmp_path / "r"), "--kl_coef", "0",
               "--max_length", "4096", "--dtype", "float32", *SMALL)
    assert done.returncode == 1
    assert "stopped at step 0: the policy's logits are not finite" in done.stderr.splitlines()[-1]
