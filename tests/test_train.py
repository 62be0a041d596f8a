"""The command train.py: all algorithms, repeated, resumed, interrupted, mixtures, faults."""

import fcntl
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import agent
import checkpoint
import rl
import train
from config import parse_config
from envs import EnvError, ItemError
from metrics import alarm, warn
from parallel import StopSignals
from schedule import adaptive_horizon
from worlds.textcraft import TextCraft

SMALL = ["--items_per_step", "4", "--rollouts_per_item", "4", "--horizon", "2,3",
         "--horizon_steps", "2", "--steps", "3", "--max_tokens", "8"]
TINIEST = ["--items_per_step", "2", "--rollouts_per_item", "2", "--steps", "1", "--max_tokens", "4",
           "--horizon", "1"]
NO_RUN = ["--out", "runs/never-made"]
TIMES = ("seconds_", "tokens_per_second", "memory_gb")  # beginnings of names
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


run = partial(run_script, "train.py")


def begin(*args, out, until="metrics.jsonl", launcher=(sys.executable,), script="train.py", **how):
    """Start a command in another process -> the process, when its folder has a certain file."""
    # nohup and shells that run jobs in the background let them ignore SIGHUP and SIGINT.
    child = subprocess.Popen(
        [*launcher, script, "--out", str(out), *args], cwd=ROOT, env=ENV, text=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL)
                            for number in (signal.SIGHUP, signal.SIGINT)], **how)
    while not (out / until).exists():
        time.sleep(0.01)
        assert child.poll() is None, "the run ended too early"
    return child


def completed(*args, script="train.py"):
    """Run a command, which succeeds -> what it printed."""
    done = run_script(script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*args, script="train.py"):
    """Run a command, which refuses its input -> its one line on stderr."""
    done = run_script(script, *args)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder):
    """The rows of metrics of a run, without what depends on the machine."""
    rows = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def contents(folder):
    """The files that a run has written: path -> bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy(folder, to, *without):
    """Copy a run, but for files and folders of these names -> the copy."""
    return shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*without))


def assert_same(out, reference):
    """The run gave the metrics, weights and last trajectories of another."""
    assert metrics(out) == metrics(reference)
    for name in ("trajectories/step_000002.jsonl", "final/model.safetensors"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert not list(out.glob("**/*.partial"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a small run that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "a"
    completed("--out", out, "--save_every", "1", *SMALL)
    return out


# ---- what a run writes ----


def test_a_run_leaves_everything_it_promises(reference):
    rows = read_jsonl(reference / "metrics.jsonl")
    assert [(r["step"], r["horizon"], r["trajectories"]) for r in rows] == [
        (0, 2, 16), (1, 2, 16), (2, 3, 16)]
    columns = """env loss success score turns reward entropy grad_norm valid_actions env_error
        truncated zero_gradient_groups forwarded_per_kept"""
    for row in rows:
        assert set(columns.split()) <= set(row)
        assert row["logprob_gap"] < 1e-4 and row["padding"] == 0
        assert row["kl_behaviour"] == row["kl"] >= 0
        assert 0 < row["occupancy"] <= 1 and row["memory_gb"] > 0.1
        assert len(times := [row[name] for name in row if name.startswith(TIMES)]) == 8
        rollout, update, adam, replies, waiting, advantages = (row[f"seconds_{part}"] for part in (
            "rollout", "update", "adam", "replies", "waiting", "advantages"))
        assert min(times) > 0 and waiting + replies < rollout and advantages + adam < update
    assert (reference / "curves.png").stat().st_size > 10_000
    assert json.loads((reference / "config.json").read_text())["horizon"] == "2,3"

    trajectories = read_jsonl(reference / "trajectories/step_000001.jsonl")
    fields = """item env step group status reward score success turns messages tokens mask starts
        logprobs rewards advantage"""
    assert len(trajectories) == 16 and set(fields.split()) <= set(trajectories[0])
    assert len(list((reference / "checkpoints").iterdir())) == 2  # the default of `keep`
    AutoModelForCausalLM.from_pretrained(reference / "final")


def test_a_copy_of_final_keeps_the_settings_of_its_run(reference, tmp_path):
    """Otherwise a model made of the built-in one would get the learning rate of a large model."""
    elsewhere = copy(reference / "final", tmp_path / "elsewhere")
    flags = ["--env", "searchqa", "--out", str(tmp_path / "next"), "--model"]
    there, here = (parse_config([*flags, str(model)]) for model in (reference / "final", elsewhere))
    here.model = there.model
    assert here == there and here.first_model == "tiny"


def test_a_run_says_how_success_on_held_out_items_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("config.EVAL_ITEMS", 16)
    flags = ["--out", tmp_path / "r", "--eval_every", "3", *SMALL, "--horizon", "1,4"]
    printed = completed(*flags)
    assert metrics(tmp_path / "r")[0]["eval/turns"] > 1  # at the last horizon
    assert f"--model {tmp_path}/r/final" in printed
    before, after = printed.splitlines()[-1].split(",")
    assert f"{metrics(tmp_path / 'r')[0]['eval/success']:.3f}" in before
    # What is said last is what an evaluation of final/ with the same items gives.
    completed(*flags, "--resume", "--steps", "4")
    assert f"{metrics(tmp_path / 'r')[3]['eval/success']:.3f}" in after
    for step, text in ((0, before), (3, after)):
        played = read_jsonl(tmp_path / f"r/trajectories/eval_{step:06d}.jsonl")
        assert f"{sum(t['success'] for t in played) / 16:.3f}" in text


@pytest.mark.slow
def test_metrics_go_to_tensorboard_too(tmp_path, monkeypatch):
    """As if the process had been killed after its last step, that step is repeated, in a process
    whose end must write the last row."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils import tensorboard
    at_once = partial(tensorboard.SummaryWriter, flush_secs=0.1)  # 0 would never sleep
    monkeypatch.setattr(tensorboard, "SummaryWriter", at_once)
    flags = [*TINIEST, "--report_to", "tensorboard", "--save_every", "1", "--steps", "2"]
    completed("--out", tmp_path, *flags)
    shutil.rmtree(tmp_path / "final")
    shutil.rmtree(tmp_path / "checkpoints/step_000002")
    assert begin(*flags, "--resume", out=tmp_path).wait(300) == 0
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    rows = metrics(tmp_path)
    assert [event.step for event in board.Scalars("entropy")] == [0, 1]
    assert [event.value for event in board.Scalars("entropy")] == pytest.approx(
        [row["entropy"] for row in rows])


def test_help_lists_flags_fields_of_studies_and_presets():
    printed = completed("--help")
    for text in ("--horizon_schedule scaling_inter|fixed|adaptive", "--set value_clip", "6,13,20",
                 "'horizon': '3,5,8', 'horizon_steps': 25", "--shard"):
        assert text in printed, text
    head = printed.split("flags to know first:")[1].split("\n\n")[0]
    assert head.count("\n  --") == 10 and "--model" in head


# ---- repeated and resumed ----


def test_a_seeded_run_repeats_bit_for_bit_and_a_killed_one_resumes_exactly(reference, tmp_path):
    out = tmp_path / "b"
    args = ["--out", str(out), "--save_every", "1", *SMALL]
    child = begin(*args[2:], out=out, until="checkpoints/step_000001/state.json")
    child.kill()
    child.wait()
    assert not (out / "final").exists()
    left = {out / f"trajectories/{name}.jsonl": b"{}" for name in (
        "step_000009", "eval_000009", "mine")}
    for path, text in left.items():
        path.write_bytes(text)

    before = contents(out)
    assert "--resume" in refused(*args)
    assert contents(out) == before
    completed(*args, "--resume")
    assert_same(out, reference)
    # Trajectories of later steps go, the user's own files stay.
    assert [path.name for path in left if path.exists()] == ["mine.jsonl"]
    assert completed(*args, "--resume") == f"{out} is finished (3 steps)\n"


def test_a_damaged_checkpoint_is_never_trained_on(reference, tmp_path):
    flags = ["--save_every", "1", *SMALL, "--resume", "--out"]
    bare = copy(reference, tmp_path / "bare", "checkpoints")
    out = copy(reference, tmp_path / "r")
    newest = out / "checkpoints/step_000003"
    (newest / "tokenizer.json").unlink()

    # A finished run stays finished, also without checkpoints, which leave nothing to go on from.
    assert completed(*flags, out) == f"{out} is finished (3 steps)\n"
    before = contents(bare)
    assert completed(*flags, bare) == f"{bare} is finished (3 steps)\n"
    assert f"--model {bare}/final" in refused(*flags, bare, "--steps", "5")
    assert contents(bare) == before

    # Another run goes on from the checkpoint before, and keeps the damaged one.
    shutil.rmtree(out / "final")
    assert f"{newest}: tokenizer.json" in run(*flags, out).stderr
    assert_same(out, reference)
    assert not (out / "checkpoints/damaged_step_000003/tokenizer.json").exists()

    # No checkpoint is left to go on from.
    shutil.rmtree(out / "final")
    for folder in (out / "checkpoints").glob("step_*"):
        (folder / "state.json").unlink()
    before = contents(out)
    assert f"{newest}: " in refused(*flags, out)
    assert contents(out) == before


def test_half_a_row_of_metrics_is_dropped_and_a_damaged_one_is_named(reference, tmp_path):
    out = copy(reference, tmp_path / "r", "final", "step_000003")
    path = out / "metrics.jsonl"
    rows = path.read_text()
    flags = ["--out", out, "--save_every", "1", *SMALL, "--resume"]
    path.write_text(rows[: len(rows) // 2])  # the second of the two rows before the checkpoint
    assert str(path) in refused(*flags)
    path.write_text(rows[:-50])  # of the step after it
    completed(*flags)
    assert metrics(out) == metrics(reference)


@pytest.mark.parametrize("last_done", [
    (checkpoint, "full_state_dict"), (PreTrainedTokenizerBase, "save_pretrained")])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
        reference, last_done, tmp_path, monkeypatch):
    """The file of the weights is too large, or one of the optimizer's state."""
    original = getattr(*last_done)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(*args, **kw):
        value = original(*args, **kw)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        return value

    flags = ["--out", tmp_path / "r", "--save_every", "1", *SMALL]
    try:
        with monkeypatch.context() as m:
            m.setattr(*last_done, fill_the_disk)
            done = run(*flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "too large" in done.stderr.splitlines()[-1]
    assert not checkpoint.named(tmp_path / "r")
    completed(*flags, "--resume")
    assert_same(tmp_path / "r", reference)


def test_an_earlier_final_is_kept_until_there_is_a_new_one(reference, tmp_path):
    out = copy(reference, tmp_path / "r")
    flags = ["--out", str(out), "--save_every", "1", *SMALL, "--steps", "4", "--resume"]
    weights = out / "final/model.safetensors"
    with StopSignals() as signals:
        train.start(parse_config(flags), None, signals)
    assert weights.read_bytes() == (reference / "final/model.safetensors").read_bytes()
    completed(*flags)
    later = weights.read_bytes()
    # Killed after the last step, and before final/ was replaced.
    shutil.rmtree(out / "final")
    copy(reference / "final", out / "final")
    completed(*flags)
    assert weights.read_bytes() == later != (reference / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize("script, flags", [
    ("train.py", ["--seed", "1"]), ("train.py", ["--lr", "1e-3"]), ("train.py", []),
    ("sft.py", ["--demos", "2"])])
def test_a_run_goes_on_from_no_checkpoint_or_final_of_another_run(
        reference, tmp_path, script, flags):
    """An equal command begins another run, too. A moved folder and other --steps go on."""
    small = ["--save_every", "1", *TINIEST] if script == "train.py" else ["--horizon", "2"]
    completed("--out", tmp_path / "other", *small, *flags, script=script)
    (theirs, *_) = checkpoint.named(tmp_path / "other")
    out = copy(reference, tmp_path / "moved")
    again = ["--out", out, "--resume", *SMALL, "--steps", "4"]
    for place, moved in (("checkpoints/step_000009", theirs), ("final", tmp_path / "other/final")):
        shutil.move(out / "final", tmp_path / "final")
        shutil.copytree(moved, out / place)
        assert f"{out / place} is of another run" in refused(*again)
        shutil.rmtree(out / place)
        shutil.move(tmp_path / "final", out / "final")
    completed(*again)
    assert len(metrics(out)) == 4


def test_two_processes_do_not_work_in_one_folder(tmp_path, monkeypatch, capsys):
    args = ["--out", str(tmp_path / "r"), *TINIEST]
    with train.lock_folder(parse_config(args)):
        assert f"another process is at work in {tmp_path}" in refused(*args)
        assert not (tmp_path / "r/metrics.jsonl").exists()
    # A file system without locks.
    monkeypatch.setattr(fcntl, "flock", lambda *args: os.close(-1))  # raises OSError
    with train.lock_folder(parse_config(args)):
        assert "cannot lock" in capsys.readouterr().err


def tiny_with_template(folder, template):
    """A model folder: the tiny model with another chat template."""
    shutil.copytree(rl.TINY_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    return ["--model", str(folder), "--kl_coef", "0", "--max_length", "4096", "--dtype", "float32"]


def test_a_template_that_shows_the_time_shows_that_of_the_runs_start(tmp_path):
    template = (rl.TINY_MODEL / "chat_template.jinja").read_text()
    model = tiny_with_template(tmp_path / "m", "{{ strftime_now('%H:%M:%S.%f') }}" + template)
    args = [*model, "--out", str(tmp_path / "r"), *TINIEST]
    completed(*args)
    completed(*args, "--steps", "2", "--resume")
    tokenizer = rl.load_tokenizer(str(tmp_path / "r/final"))
    assert "strftime_now" in tokenizer.chat_template
    paths = (tmp_path / "r/trajectories").iterdir()
    (beginning,) = {tokenizer.decode(t["tokens"]).partition("<|im_start|>")[0]
                    for path in paths for t in read_jsonl(path)}
    assert len(beginning) == len("12:34:56.123456")


def test_a_system_message_and_switches_reach_every_command_and_last(tmp_path):
    """The model has no template of its own: sft.py is given one."""
    template = "{{ 'LOUD' if loud }}" + (rl.TINY_MODEL / "chat_template.jinja").read_text()
    (tmp_path / "template").write_text(template)
    model = tiny_with_template(tmp_path / "m", "")
    given = ["--system", "Be brief.", "--chat_args", "loud=true", "--chat_template",
             tmp_path / "template"]
    warm, out = tmp_path / "warm", tmp_path / "r"
    completed(*model[:2], *model[4:], *given, "--demos", "2", "--batch", "2", "--epochs", "1",
              "--out", warm, script="sft.py")

    # train.py takes them from the run of sft.py, and keeps them when it goes on.
    args = ["--out", str(out), *TINIEST, "--model", str(warm / "final"), *model[2:]]
    completed(*args)
    completed(*args, "--resume", "--steps", "2")
    assert "--system Be brief." in refused(*args, "--resume", "--system", "Be loud.")

    # eval.py takes them from the run of train.py.
    completed("--model", out / "final", "--items", "2", "--horizon", "1", "--max_tokens", "4",
              "--trajectories", tmp_path / "t.jsonl", script="eval.py")
    tokenizer = rl.load_tokenizer("tiny")
    beginning = "LOUD<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    for path in (warm / "demos.jsonl", *out.glob("trajectories/*"), tmp_path / "t.jsonl"):
        for t in read_jsonl(path):
            assert tokenizer.decode(t["tokens"]).startswith(beginning)


def test_the_adaptive_horizon_follows_the_metrics_and_resumes(tmp_path):
    args = [*SMALL, "--horizon", "2,3,4", "--horizon_schedule", "adaptive", "--steps", "6",
            "--save_every", "4", "--seed", "0", "--out"]
    completed(*args, tmp_path / "a")
    rows = metrics(tmp_path / "a")
    state = {"stage": 0}
    for row in rows:
        assert row["horizon"] == (2, 3, 4)[state["stage"]]
        cut = row["truncated"] - row["truncated/length"]
        state = adaptive_horizon(state, row["success"], cut, 3, window=2)
    assert rows[-1]["horizon"] > 2
    copy(tmp_path / "a", tmp_path / "b", "final", "step_000006")
    completed(*args, tmp_path / "b", "--resume")
    assert metrics(tmp_path / "b") == rows


def test_turns_end_a_run_and_are_counted_over_a_resume(reference, tmp_path):
    rows = metrics(reference)
    turns = round(sum(row["turns"] * row["trajectories"] for row in rows))
    out = copy(reference, tmp_path / "r", "final", "step_000003")
    flags = ["--resume", *SMALL, "--steps", "9", "--set"]
    completed("--out", out, *flags, f"turns={turns}")
    assert metrics(out) == rows
    bare = copy(out, tmp_path / "bare", "checkpoints")
    for folder in (out, bare):
        printed = completed("--out", folder, *flags, f"turns={turns}")
        assert printed == f"{folder} is finished (3 steps)\n"
    assert "no checkpoint" in refused("--out", bare, *flags, f"turns={turns + 60}")
    completed("--out", out, *flags, f"turns={turns + 60}")
    assert len(metrics(out)) > 3 and metrics(out)[:3] == rows


# ---- algorithms, worlds and settings ----


def test_rewards_less_the_kl_are_learnt_from(tmp_path):
    completed("--out", tmp_path / "r", "--algo", "reinforce_pp", "--kl_coef", "0.01", "--kl_in",
              "reward", "--set", "kl_type=k1", *SMALL)
    rows = metrics(tmp_path / "r")
    assert len(rows) == 3 and all(r["grad_norm"] > 0 for r in rows)
    assert abs(rows[0]["kl"]) < 0.5 and rows[0]["logprob_gap"] < 1e-4


def test_bfloat16_arithmetic_trains_float32_weights(tmp_path):
    completed("--out", tmp_path / "r", "--algo", "ppo", "--dtype", "bfloat16", "--kl_coef", "0.01",
              *SMALL, "--steps", "1")  # slow: most CPUs emulate bfloat16
    (row,) = metrics(tmp_path / "r")
    assert 0 < row["logprob_gap"] < 0.05 and 0 < row["grad_norm"] < math.inf
    for folder, dtype in (("checkpoints/step_000001", torch.float32), ("final", torch.bfloat16)):
        weights = load_file(tmp_path / "r" / folder / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {dtype}


def test_frozen_weights_of_lora_keep_the_compute_dtype_in_policy_and_critic(tmp_path):
    """Also where the model has a head of its own; and what ends a reply is saved as it is here."""
    model, tokenizer = rl.load_policy()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings, model.generation_config.eos_token_id = False, 7
    checkpoint.save(tmp_path / "untied", model, tokenizer)
    own_ends = tokenizer.generation_eos_ids or [tokenizer.eos_token_id]
    assert rl.load_tokenizer(str(tmp_path / "untied")).generation_eos_ids == own_ends
    cfg = parse_config(["--model", str(tmp_path / "untied"), "--algo", "ppo", "--lora_rank", "2",
                        "--dtype", "bfloat16", *NO_RUN])
    trained = train.load(cfg, None, None).trained
    for name, (model, _) in trained.items():
        dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16}, name
    assert all(p.requires_grad == (".lora_" in name)
               for name, p in trained["policy"][0].named_parameters())


@pytest.mark.parametrize("name", agent.FORMATS)
def test_each_action_format_rolls_out_and_trains_a_step(name, tmp_path):
    completed(*TINIEST, "--horizon", "4", "--agent_args", "plan=true reflect=true", "--max_tokens",
              "32", "--temperature", "1.5", "--out", tmp_path / "r", "--action_format", name)
    (row,) = metrics(tmp_path / "r")
    assert row["turns"] > 1 and row["env_error"] == 0 and row["logprob_gap"] < 1e-4
    messages = read_jsonl(tmp_path / "r/trajectories/step_000000.jsonl")[0]["messages"]
    assert agent.FORMATS[name] in messages[0]["content"]
    assert messages[2]["content"].endswith(agent.PLAN)


def test_shaping_and_costs_reach_training_and_no_evaluation(tmp_path):
    completed("--out", tmp_path, "--env", "textcraft", *SMALL, "--steps", "1", "--shaping",
              "progress", "--set", "turn_cost=0.125", "--invalid_penalty", "0.5")
    played = read_jsonl(tmp_path / "trajectories/step_000000.jsonl")
    for t in played:
        costs = 0.125 * t["turns"] + 0.5 * (t["turns"] - t["valid_actions"])
        assert t["reward"] == pytest.approx(t["score"] + t["progress"][-1] - costs)
    completed("--env", "textcraft", "--model", tmp_path / "final", "--items", "20", "--horizon",
              "3", "--max_tokens", "8", "--trajectories", tmp_path / "t.jsonl", script="eval.py")
    played = read_jsonl(tmp_path / "t.jsonl")
    assert len(played) == 20
    assert all(t["reward"] == t["score"] for t in played)  # neither shaping nor costs


# ---- mixtures of worlds ----


def test_a_mixture_gives_each_world_its_weight_its_horizon_its_limits_and_its_columns(tmp_path):
    out = tmp_path / "r"
    completed("--env", "babyai:2,textcraft", "--items_per_step", "4", "--rollouts_per_item", "2",
              "--algo", "rloo", "--kl_coef", "0.01", "--steps", "2", "--max_tokens", "8",
              "--horizon", "babyai=1,2 textcraft=3,5", "--horizon_steps", "1", "--out", out)
    penalties = {"babyai": 0.05, "textcraft": 0.0}
    rows = metrics(out)
    horizons = [(r["horizon/babyai"], r["horizon/textcraft"], r["horizon"]) for r in rows]
    assert horizons == [(1, 3, 3), (2, 5, 5)]
    for step, row in enumerate(rows):
        played = read_jsonl(out / f"trajectories/step_{step:06d}.jsonl")
        for world, count in (("babyai", 6), ("textcraft", 2)):  # three items, one; groups of two
            own = [t for t in played if t["env"] == world]
            assert len(own) == count and all(t["turns"] <= row[f"horizon/{world}"] for t in own)
            assert row[f"success/{world}"] == sum(t["success"] for t in own) / len(own)
            rewards = [t["success"] - penalties[world] * (t["turns"] - t["valid_actions"])
                       for t in own]
            assert [t["reward"] for t in own] == pytest.approx(rewards)
            assert row[f"reward/{world}"] == pytest.approx(sum(rewards) / len(own))
    assert (out / "curves.png").stat().st_size > 10_000


# ---- faults, and runs that cannot go on ----


def test_one_world_that_fails_for_a_step_does_not_end_a_mixture(tmp_path, monkeypatch):
    monkeypatch.setattr(TextCraft, "reset", Mock(side_effect=EnvError("down for a moment")))
    train.train(parse_config([*TINIEST, "--env", "babyai,textcraft", "--out", str(tmp_path)]))
    (row,) = metrics(tmp_path)
    assert (row["env_error/textcraft"], row["env_error/babyai"]) == (1, 0)


def test_environments_that_all_fail_end_a_run_at_a_checkpoint(tmp_path, monkeypatch):
    flags = [*TINIEST, "--env", "textcraft", "--steps", "2", "--out", str(tmp_path)]
    fail = Mock(side_effect=EnvError("the server has stopped"))
    with (monkeypatch.context() as m,
          pytest.raises(SystemExit, match="step 1; .*--resume.* the server has stopped")):
        # After the first step all environments fail.
        m.setattr(train.metrics, "warn", lambda *_: m.setattr(TextCraft, "reset", fail))
        train.train(parse_config(flags))
    assert checkpoint.named(tmp_path) == [tmp_path / "checkpoints/step_000001"]
    train.train(parse_config([*flags, "--resume"]))
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]


def test_an_item_that_its_world_does_not_have_ends_a_run_with_one_line(tmp_path, monkeypatch):
    refuse = Mock(side_effect=ItemError("textcraft has\nno such item"))
    monkeypatch.setattr(TextCraft, "reset", refuse)
    done = run("--env", "textcraft", *TINIEST, "--out", tmp_path / "r")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("train.py: textcraft has no such item")


def test_steps_without_a_signal_and_cut_trajectories_are_warned_of_once(capsys):
    idle, learning, able = (0.0, 0.0), (0.0, 0.1), (1.0, 0.0)  # success, gradient norm
    steps = [*[idle] * 4, learning, *[able] * 9, *[idle] * 7]
    cuts = {3: 0.05, 7: 0.25, 9: 0.3}  # step -> the share that --max_length cut
    expected = {7: "--max_length", 18: "without success and gradient"}
    rows = []
    for step, (success, grad_norm) in enumerate(steps):
        rows.append({"success": success, "grad_norm": grad_norm,
                     "truncated/length": cuts.get(step, 0.0)})
        warn(rows)
        said = capsys.readouterr().err
        assert expected.get(step, "") in said and bool(said) == (step in expected), step


def test_metrics_with_which_training_cannot_go_on_raise_an_alarm():
    cfg = parse_config(NO_RUN)
    fine = {"turns": 2.0, "loss": 0.1, "grad_norm": 1.0, "kl": 0.01, "kl_behaviour": 0.02,
            "entropy": 0.3, "logprob_gap": 0.02}
    assert alarm(fine, cfg) == alarm(fine | {"turns": 0.0, "entropy": 0.0}, cfg) == ""
    wrong = {"loss": math.nan, "grad_norm": math.inf, "value_loss": math.inf, "entropy": 1e-6,
             "kl": 12.0, "kl_behaviour": 11.0, "logprob_gap": 0.3}
    for name, value in wrong.items():
        assert alarm(fine | {name: value}, cfg).startswith(f"{name} is {value:.2g}")


def test_an_alarm_stops_the_run_with_one_line_and_keeps_the_step(tmp_path):
    done = run("--out", tmp_path, "--set", "min_entropy=5", *TINIEST)
    assert done.returncode == 1 and "min_entropy" in done.stderr.splitlines()[-1]
    assert (tmp_path / "trajectories/step_000000.jsonl").exists() and len(metrics(tmp_path)) == 1


def test_a_run_is_not_continued_with_other_items(tmp_path):
    for folder in ("AgentItemId", "AgentEval/babyai"):
        shutil.copytree(ROOT / "data" / folder, tmp_path / "data" / folder)
    args = [*TINIEST, "--data", tmp_path / "data", "--out", tmp_path / "r"]
    completed(*args)
    path = tmp_path / "data/AgentItemId/babyai_train.json"
    whole = path.read_text()
    items = json.loads(whole)
    for others in (items[:40], items[::-1], items[1:] + [{"item_id": "babyai_1"}]):
        path.write_text(json.dumps(others))
        assert "other items" in refused(*args, "--resume", "--steps", "2")
    path.write_text(whole)
    completed(*args, "--resume", "--steps", "2")


def test_a_resumed_run_keeps_the_model_that_its_kl_refers_to(tmp_path):
    base = shutil.copytree(rl.TINY_MODEL, tmp_path / "base")
    flags = [*TINIEST, "--model", base, "--kl_coef", "0.1", "--entropy_coef", "0.1", "--lr", "1e-2"]
    completed(*flags, "--steps", "2", "--out", tmp_path / "a")
    completed(*flags, "--out", tmp_path / "b")
    completed(*flags, "--resume", "--steps", "2", "--out", tmp_path / "b")
    rows, resumed = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert rows[1]["kl"] > 1e-6
    assert [row["kl"] for row in resumed] == [row["kl"] for row in rows]
    shutil.copytree(tmp_path / "a/final", base, dirs_exist_ok=True)
    assert "another --model" in refused(*flags, "--resume", "--steps", "3", "--out", tmp_path / "b")
