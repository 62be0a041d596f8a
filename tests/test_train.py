"""The command itself: every algorithm, repeated, resumed, on two processes, and given nonsense."""

import copy
import doctest
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

import agent
import train
from envs import EnvError
from schedule import adaptive_horizon, adaptive_start
from worlds.textcraft import TextCraft

SMALL = ["--items_per_step", "4", "--rollouts_per_item", "4", "--horizon", "2,3", "--horizon_steps", "2", "--steps", "3",
         "--max_tokens", "8"]
TIMES = ("seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*args, launcher=(sys.executable, "train.py"), **kw):
    return subprocess.run([*launcher, *args], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300, **kw)


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    done = run("--out", str(out), "--save_every", "1", *SMALL)
    assert done.returncode == 0, done.stderr
    return out


def test_a_run_leaves_everything_it_promises(reference):
    rows = metrics(reference)
    assert [r["step"] for r in rows] == [0, 1, 2] and [r["horizon"] for r in rows] == [2, 2, 3]
    assert set("""step env horizon loss success score turns reward kl entropy grad_norm valid_actions env_error truncated
        zero_gradient_groups logprob_gap forwarded_per_kept padding trajectories""".split()) <= set(rows[0])
    assert all(r["logprob_gap"] < 1e-4 for r in rows) and all(r["trajectories"] == 16 for r in rows)
    assert (reference / "curves.png").stat().st_size > 10_000
    config = json.loads((reference / "config.json").read_text())
    assert config["env"] == "babyai" and config["horizon"] == "2,3"
    lines = (reference / "trajectories/step_000001.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert len(lines) == 16 and set("""item env step group status reward score success turns messages tokens mask logprobs
        rewards advantage""".split()) <= set(first)
    assert len(list((reference / "checkpoints").iterdir())) == 2  # the last --keep
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(reference / "final")


def test_a_seeded_run_repeats_bit_for_bit_and_a_killed_one_resumes_exactly(reference, tmp_path):
    out = tmp_path / "b"
    args = ["--out", str(out), "--save_every", "1", *SMALL]
    child = subprocess.Popen([sys.executable, "train.py", *args], cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL)
    while not (out / "checkpoints/step_000001/state.json").exists():  # saved once, then killed
        time.sleep(0.02)
        assert child.poll() is None, "the run ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    refused = run(*args)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    done = run(*args, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(reference)
    for name in ("trajectories/step_000002.jsonl", "final/model.safetensors"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    again = run(*args, "--resume")
    assert again.returncode == 0 and "finished" in again.stdout and len(again.stdout.splitlines()) == 1


def test_the_adaptive_horizon_follows_the_metrics_and_resumes(tmp_path):
    args = [*SMALL, "--horizon", "2,3,4", "--horizon_schedule", "adaptive", "--steps", "8", "--save_every", "5"]
    done = run("--out", str(tmp_path / "a"), *args)
    assert done.returncode == 0, done.stderr
    state, rows = adaptive_start((2, 3, 4), window=2), metrics(tmp_path / "a")
    for row in rows:
        assert row["horizon"] == (2, 3, 4)[state["stage"]]
        _, state = adaptive_horizon(state, row)
    assert rows[-1]["horizon"] > 2
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("final", "step_000008"))
    done = run("--out", str(tmp_path / "b"), *args, "--resume")
    assert done.returncode == 0 and metrics(tmp_path / "b") == rows, done.stderr


@pytest.mark.slow
def test_two_processes_give_the_first_step_of_one(reference, tmp_path):
    out = tmp_path / "c"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29613", "train.py")
    done = run("--out", str(out), *SMALL, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    one, two = metrics(reference), metrics(out)
    assert len(two) == 3 and two[0]["trajectories"] == 16
    for key in ("loss", "grad_norm", "reward", "success", "turns", "entropy"):
        assert abs(one[0][key] - two[0][key]) < 1e-5, key


@pytest.mark.parametrize("algo, more", [
    ("ppo", []), ("rloo", ["--kl_coef", "0.01"]), ("reinforce_pp", ["--kl_coef", "0.01", "--kl_in", "reward", "--kl_type", "k1"])])
def test_every_algorithm_runs_and_learns_something(algo, more, tmp_path):
    done = run("--out", str(tmp_path / "r"), "--algo", algo, *more, *SMALL)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "r")
    assert all(r["grad_norm"] > 0 for r in rows)
    if "--kl_coef" in more:
        assert abs(rows[0]["kl"]) < 0.5 and rows[0]["logprob_gap"] < 1e-4


def test_textcraft_runs(tmp_path):
    done = run("--env", "textcraft", "--out", str(tmp_path / "r"), *SMALL)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "r")[0]["env"] == "textcraft"


@pytest.mark.parametrize("args, says", [
    (["--nonsense", "3"], "--nonsense"), (["--env", "chess"], "chess"), (["--algo", "dqn"], "dqn"),
    (["--model", "./no/such/folder"], "no/such/folder"), (["--horizon", "0"], "horizon"), (["--lr", "-1"], "--lr"),
    (["--lr", "fast"], "lr"), (["--resume"], "resume"), (["--env_url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    (["--horizon", "6,13", "--horizon_schedule", "fixed"], "fixed"), (["--data", "/nowhere"], "/nowhere"),
    (["--rollouts_per_item", "1"], "rollouts_per_item"), (["--kl_type", "k1", "--kl_coef", "1"], "k1")])
def test_nonsense_is_one_line_and_nothing_written(args, says, tmp_path, capsys):
    out = tmp_path / "r"
    with pytest.raises(ValueError) as e:
        train.parse_config([*args, "--out", str(out)])
    assert says in str(e.value) and "\n" not in str(e.value)
    assert not out.exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize("args", [["--nonsense", "3"], ["--horizon", "0"], ["--resume"]])
def test_nonsense_ends_the_command_with_2(args, tmp_path):
    done = run(*args, "--out", str(tmp_path / "r"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert not (tmp_path / "r").exists()


def test_an_item_that_does_not_exist_is_one_line(tmp_path):
    folder = tmp_path / "AgentItemId"
    folder.mkdir()
    (folder / "babyai_train.json").write_text(json.dumps([{"item_id": "babyai_x"}] * 20))
    done = run("--data", str(tmp_path), "--out", str(tmp_path / "r"), *SMALL)
    assert done.returncode == 2 and "babyai_x" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "r").exists()


def test_items_of_a_step_are_a_function_of_seed_and_step():
    items = [f"babyai_{i}" for i in range(10)]
    steps = [train.items_at(items, 0, s, 3) for s in range(6)]
    assert steps == [train.items_at(items, 0, s, 3) for s in range(6)]
    assert all(len(set(s)) == 3 for s in steps)
    assert len(set(sum(steps[:3], []))) == 9  # an epoch repeats nothing
    assert steps[:3] != steps[3:] and steps != [train.items_at(items, 1, s, 3) for s in range(6)]


def test_help_explains_and_shows_the_presets():
    done = run("--help")
    assert done.returncode == 0
    for word in ("--horizon_schedule", "6,13,20", "babyai 3,4 (a stage 30 steps)", "textcraft 3,5,8", "critic_lr", "REINFORCE", "minibatches"):
        assert word in done.stdout or word.lower() in done.stdout.lower(), word


def test_a_step_without_any_gradient_is_no_accident(tiny, pool):
    from rollout import rollout
    cfg = train.parse_config(["--out", "runs/never-made"])
    played = rollout(*tiny, pool, ["babyai_8", "babyai_50"], 2, samples=2, max_tokens=6)
    for t in played:
        t.rewards, t.reward = [0.0] * len(t.tokens), 0.5
    model = copy.deepcopy(tiny[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    columns = train.advantages_of(played, cfg, "cpu")
    result = train.update(played, columns, cfg, 0, model, optimizer)
    assert result["loss"] == 0.0 and result["grad_norm"] == 0.0 and 0 < result["logprob_gap"] < 1e-4  # the gap is measured all the same
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), tiny[0].state_dict().values()))


def test_equal_rewards_give_no_advantage_wherever_they_stand(tiny, pool):
    """-0.05 twice and then 1 adds up differently in float32 by position; the advantage must not see it."""
    from rollout import Trajectory
    cfg = train.parse_config(["--out", "runs/never-made"])
    played = []
    for at in ((3, 5, 9), (2, 11, 14), (7, 8, 20), (1, 2, 3)):
        t = Trajectory("babyai_8", "babyai", tokens=[5] * 24, mask=[i in at for i in range(24)], logprobs=[0.0] * 24,
                       rewards=[0.0] * 24)
        for i, r in zip(at, (-0.05, -0.05, 1.0)):
            t.rewards[i] = r
        t.reward = math.fsum(t.rewards)
        played.append(t)
    assert all(a == 0.0 for row in train.advantages_of(played, cfg, "cpu")["advantages"] for a in row)


def test_bfloat16_arithmetic_trains_float32_weights(tmp_path):
    done = run("--out", str(tmp_path / "r"), "--algo", "ppo", "--dtype", "bfloat16", "--kl_coef", "0.01", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "r")
    assert all(0 < r["logprob_gap"] < 0.05 and 0 < r["grad_norm"] < float("inf") for r in rows)
    from safetensors.torch import load_file
    dtypes = lambda folder: {w.dtype for w in load_file(folder / "model.safetensors").values()}  # noqa: E731
    assert dtypes(tmp_path / "r/checkpoints/step_000003") == {torch.float32} and dtypes(tmp_path / "r/final") == {torch.bfloat16}


def test_resume_refuses_other_flags(reference):
    with pytest.raises(ValueError, match="was started with --algo grpo"):
        train.parse_config(["--out", str(reference), "--resume", "--algo", "ppo", *SMALL])


def test_one_world_that_fails_for_a_step_does_not_end_a_mixture(tmp_path, monkeypatch):
    def down(self, item):
        raise EnvError("down for a moment")
    flags = ["--env", "babyai,textcraft", "--items_per_step", "2", "--rollouts_per_item", "2", "--steps", "1", "--max_tokens", "4", "--horizon", "1",
             "--horizon_schedule", "fixed", "--out", str(tmp_path / "r")]
    monkeypatch.setattr(TextCraft, "reset", down)
    train.train(train.parse_config(flags))
    (row,) = metrics(tmp_path / "r")
    assert row["env_error/textcraft"] == 1 and row["env_error/babyai"] == 0
    with pytest.raises(ValueError, match="with --invalid_penalty 0.0 for textcraft, not 0.05"):
        train.parse_config([*flags, "--resume", "--invalid_penalty", "0.05"])


def test_an_item_that_its_world_does_not_have_ends_a_run_with_one_line(tmp_path, monkeypatch, capsys):
    def none(self, item):
        raise ValueError("textcraft has\nno such item")
    monkeypatch.setattr(TextCraft, "reset", none)
    with pytest.raises(SystemExit) as ended:
        train.train(train.parse_config(["--env", "textcraft", "--out", str(tmp_path / "r")]))
    assert ended.value.code == 2 and capsys.readouterr().err.endswith("\ntrain.py: textcraft has no such item\n")


def test_a_mixture_gives_each_world_its_weight_its_horizon_its_limits_and_its_columns(tmp_path):
    out = tmp_path / "r"
    done = run("--env", "babyai:2,textcraft", "--items_per_step", "4", "--rollouts_per_item", "2", "--steps", "2", "--max_tokens",
               "8", "--horizon", "babyai=1,2 textcraft=3,5", "--horizon_steps", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert {w: own["weight"] for w, own in config["worlds"].items()} == {"babyai": 2, "textcraft": 1}
    assert {w: own["invalid_penalty"] for w, own in config["worlds"].items()} == {"babyai": 0.05, "textcraft": 0.0}
    rows = metrics(out)
    assert [(r["horizon/babyai"], r["horizon/textcraft"], r["horizon"]) for r in rows] == [(1, 3, 3), (2, 5, 5)]
    for step, row in enumerate(rows):
        played = [json.loads(line) for line in (out / f"trajectories/step_{step:06d}.jsonl").read_text().splitlines()]
        by = {w: [t for t in played if t["env"] == w] for w in ("babyai", "textcraft")}
        assert len(by["babyai"]) == 6 and len(by["textcraft"]) == 2  # 3 items and 1, in groups of 2
        for w, own in by.items():
            assert all(t["turns"] <= row[f"horizon/{w}"] for t in own)
            assert row[f"success/{w}"] == sum(t["success"] for t in own) / len(own)
            assert row[f"reward/{w}"] == pytest.approx(sum(t["reward"] for t in own) / len(own))
            cost = config["worlds"][w]["invalid_penalty"]
            assert all(t["reward"] == pytest.approx(t["success"] - cost * (t["turns"] - t["valid_actions"])) for t in own)
    assert (out / "curves.png").stat().st_size > 10_000


def test_of_a_steps_items_each_world_has_its_share():
    import config
    from config import items_of_a_step, mixture
    assert doctest.testmod(config).failed == 0
    cfg = train.parse_config(["--env", "babyai:2,textcraft:1", "--out", "runs/never-made"])
    assert items_of_a_step(cfg) == {"babyai": 22, "textcraft": 10} and cfg.horizon == "babyai=3,4 textcraft=3,5,8"
    assert [cfg.worlds[w]["horizon_steps"] for w in cfg.worlds] == [30, 25] and cfg.out == "runs/never-made"
    assert mixture("textcraft:0.5, babyai") == {"textcraft": 0.5, "babyai": 1.0}
    assert train.parse_config(["--env", "babyai:2", "--out", "runs/never-made"]).horizon == "3,4"  # a mixture of one
    assert train.parse_config(["--env", "babyai,textcraft", "--out", "runs/never-made"]).items_per_step == 32  # 16 of each
    for bad in ("babyai:0", "babyai:-1", "babyai:x", "babyai,babyai", "babyai,", "babyai,nowhere"):
        with pytest.raises(ValueError, match="--env|unknown environment"):
            train.parse_config(["--env", bad, "--out", "runs/never-made"])
    for env, url in (("babyai", "babyia=http://h:1"), ("babyai,textcraft", "http://h:1"), ("babyai", "babyai=http://a:1 http://b:2")):
        with pytest.raises(ValueError, match="cannot read --env_url .*babyai=http://host:port"):
            train.parse_config(["--env", env, "--env_url", url, "--out", "runs/never-made"])
    with pytest.raises(ValueError, match="leaves none for textcraft"):
        train.parse_config(["--env", "babyai:99,textcraft:1", "--out", "runs/never-made"])


def test_what_cannot_go_on_stops_with_a_line(tmp_path):
    cfg = train.parse_config(["--out", "runs/never-made"])
    fine = {"loss": 0.1, "grad_norm": 1.0, "kl": 0.01, "kl_behaviour": 0.02, "entropy": 0.3}
    assert train.alarm(fine, cfg) == ""
    for change, word in (({"loss": math.nan}, "loss is nan"), ({"grad_norm": math.inf}, "grad_norm"), ({"entropy": 1e-6}, "collapsed"),
                         ({"kl_behaviour": 11.0}, "kl_behaviour is 11"), ({"kl": 12.0}, "--max_kl")):
        assert word in train.alarm(fine | change, cfg)
    done = run("--out", str(tmp_path / "r"), "--min_entropy", "5", *SMALL)
    assert done.returncode == 1 and "collapsed" in done.stderr.splitlines()[-1]
    assert (tmp_path / "r/trajectories/step_000000.jsonl").exists() and len(metrics(tmp_path / "r")) == 1


def test_a_model_that_says_nan_stops_with_a_line(tiny, tmp_path):
    model = copy.deepcopy(tiny[0])
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "m")
    tiny[1].save_pretrained(tmp_path / "m")
    done = run("--model", str(tmp_path / "m"), "--out", str(tmp_path / "r"), "--kl_coef", "0", "--max_length", "4096", *SMALL)
    assert done.returncode == 1 and "not finite at step 0" in done.stderr.splitlines()[-1]


def test_metrics_go_to_tensorboard_too(tmp_path):
    pytest.importorskip("tensorboard")
    done = run("--out", str(tmp_path / "r"), "--report_to", "tensorboard", *SMALL)
    assert done.returncode == 0, done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(tmp_path / "r/tensorboard"))
    board.Reload()
    assert [e.value for e in board.Scalars("reward")] == pytest.approx([row["reward"] for row in metrics(tmp_path / "r")])


def test_an_extra_that_is_missing_is_one_line(monkeypatch):
    import importlib.util
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[lora\]"'):
        train.parse_config(["--lora_rank", "4", "--out", "runs/never-made"])


def test_the_loop_says_how_memory_and_speed_are(reference):
    for row in metrics(reference):
        assert row["padding"] == 0 and row["kl_behaviour"] == row["kl"] >= 0 and 0 < row["occupancy"] <= 1
    raw = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    assert all(r["memory_gb"] > 0.1 and r["seconds_rollout"] > 0 and r["seconds_update"] > 0 for r in raw)


def test_each_action_format_rolls_out_and_trains_a_step(tmp_path):
    code = ("import sys, train\nfor name in sys.argv[2:]:\n    train.train(train.parse_config(['--out', f'{sys.argv[1]}/{name}', '--action_format', name, "
            "'--plan', '--reflect', '--steps', '1', '--items_per_step', '2', '--rollouts_per_item', '2', '--horizon', '4', '--temperature', '1.5']))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), *agent.FORMATS], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, told in agent.FORMATS.items():
        (row,) = metrics(tmp_path / name)
        assert row["turns"] > 1 and row["env_error"] == 0 and row["logprob_gap"] < 1e-4
        first = json.loads((tmp_path / name / "trajectories/step_000000.jsonl").read_text().splitlines()[0])["messages"]
        assert told in first[0]["content"] and first[2]["content"].endswith(agent.PLAN)


def test_shaping_and_costs_reach_training_and_no_evaluation(tmp_path, tiny):
    """The weights of a shaped run, evaluated in its own folder and elsewhere: the same figures."""
    import eval as evaluation
    plain = run("--out", str(tmp_path / "a"), "--env", "textcraft", *SMALL, "--steps", "1")
    shaped = run("--out", str(tmp_path / "b"), "--env", "textcraft", *SMALL, "--steps", "1", "--shaping", "progress", "--turn_cost", "0.125",
                 "--invalid_penalty", "0.5")
    assert plain.returncode == shaped.returncode == 0, plain.stderr + shaped.stderr
    (a,), (b,) = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert a["success"] == b["success"] and a["score"] == b["score"] and a["turns"] == b["turns"]  # the same rollout
    assert abs(b["reward"] - a["reward"]) > 0.01  # but other rewards
    figures = []
    for folder in (tmp_path / "b/final", tmp_path / "c"):
        if not folder.exists():
            shutil.copytree(tmp_path / "b/final", folder)
        how = ["--env", "textcraft", "--model", str(folder), "--items", "20", "--horizon", "3", "--max_tokens", "8", "--dtype", "float32",
               "--max_length", "4096", "--out", str(tmp_path / "r.json"), "--trajectories", str(tmp_path / "t.jsonl")]
        assert evaluation.main(how) == 0
        result = json.loads((tmp_path / "r.json").read_text())
        played = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
        assert all(t["reward"] == t["score"] for t in played)  # nothing taken off, nothing paid
        figures.append({k: v for k, v in result.items() if k != "config"})
    assert figures[0] == figures[1]
