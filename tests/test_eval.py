"""Evaluation: estimators against brute force, hand-computed numbers, a repeatable command, whose settings win."""

import doctest
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import envs as worlds  # noqa: E402
import eval as evaluation  # noqa: E402
import rl  # noqa: E402
import train  # noqa: E402
from eval import bootstrap, evaluate, parse_config, pass_at_k, powers, summarise  # noqa: E402
from envs import EnvPool  # noqa: E402
from rollout import Trajectory, rollout  # noqa: E402


# ---- estimators ----


def test_the_documented_examples_hold():
    result = doctest.testmod(evaluation)
    assert result.attempted >= 1 and result.failed == 0


def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_that_hold_a_success():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15), (n, c, k)


def test_pass_at_k_stays_exact_for_many_samples_and_refuses_what_is_no_estimate():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)
    for n, c, k in ((3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(n, c, k)


def test_k_runs_over_powers_of_two_and_the_number_of_samples():
    assert [powers(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_the_bootstrap_agrees_with_the_normal_approximation_of_a_mean():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    half = 1.96 * values.std() / 20
    low, high = bootstrap(values, seed=0)
    assert low == pytest.approx(values.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.06 * half)


def test_the_bootstrap_interval_holds_the_truth_about_19_times_in_20():
    rng = np.random.default_rng(1)
    held = sum(low <= 0.3 <= high for low, high in
               (bootstrap(rng.random(100) < 0.3, seed, resamples=400) for seed in range(400)))
    assert 0.915 <= held / 400 <= 0.975


def test_the_bootstrap_is_a_function_of_values_and_seed_and_has_no_width_without_spread():
    values = np.random.default_rng(2).random(30)
    assert bootstrap(values, 5) == bootstrap(list(values), 5) != bootstrap(values, 6)
    assert bootstrap([0.5] * 9, 0) == (0.5, 0.5)
    drawn = np.random.default_rng(5).integers(0, 30, (700, 30))  # one stream, however it is cut to bound the memory
    assert bootstrap(values, 5, 700) == tuple(np.percentile(values[drawn].mean(1), [2.5, 97.5]))


# ---- the summary, by hand ----


def play(item, *outcomes):
    """outcomes: (success, score, turns, valid actions), or None for a failed environment."""
    lost = (True, 1.0, 99, 0)  # must not be seen in any number
    return [Trajectory(item, "toy", sample=k, status="env_error" if o is None else "done",
                       **dict(zip(("success", "score", "turns", "valid_actions"), o or lost)))
            for k, o in enumerate(outcomes)]


def by_hand():
    win, loss = (True, 1.0, 1, 1), (False, 0.0, 4, 0)
    trajectories = (
        play("toy_1", win, (False, 0.2, 2, 1), (False, 0.0, 3, 0), (True, 1.0, 2, 2))  # 1/2, .55, 2 turns, .625 valid
        + play("toy_2", (False, 0.0, 3, 3), (False, 0.0, 3, 3), None, (True, 0.9, 3, 3))  # 1/3, .3, 3, 1
        + play("toy_3", None, win, None, None)  # 1, 1, 1, 1
        + play("toy_4", None, None, None, None)  # nothing
        + play("toy_5", loss, loss, loss, loss))  # 0, 0, 4, 0
    return trajectories, {"toy_1": "goto", "toy_2": "goto", "toy_3": "pickup", "toy_4": "mixed", "toy_9": "goto"}


def test_the_summary_equals_numbers_worked_out_by_hand():
    got = summarise(*by_hand(), ks=[1, 2, 4], seed=3)
    expected = {"success": (1 / 2 + 1 / 3 + 1 + 0) / 4, "score": 1.85 / 4, "turns": 2.5, "valid_actions": 2.625 / 4,
                "env_error": (0 + 1 / 4 + 3 / 4 + 1 + 0) / 5, "avg@1": 11 / 24, "avg@4": 11 / 24, "pass@1": 11 / 24,
                "pass@2": (5 / 6 + 2 / 3 + 0) / 3,  # toy_3 has too few samples
                "pass@4": (1 + 0) / 2}  # toy_2 as well
    assert list(got) == [*expected, "ci95", "categories"]
    assert {k: got[k] for k in expected} == pytest.approx(expected)
    assert got["ci95"].keys() == expected.keys()
    assert got["ci95"]["success"] == pytest.approx(bootstrap([1 / 2, 1 / 3, 1, 0], 3))
    assert got["ci95"]["pass@2"] == pytest.approx(bootstrap([5 / 6, 2 / 3, 0], 3))
    goto, pickup = got["categories"].pop("goto"), got["categories"].pop("pickup")
    assert not got["categories"]  # all of toy_4 failed
    assert goto.pop("ci95")["success"] == pytest.approx(bootstrap([1 / 2, 1 / 3], 3))
    assert goto == pytest.approx({"items": 2, "success": 5 / 12, "score": 0.425, "turns": 2.5})
    assert pickup == {"items": 1, "success": 1.0, "score": 1.0, "turns": 1.0, "ci95": {"success": [1.0, 1.0]}}
    assert json.loads(json.dumps(got)) == got  # plain numbers


def test_a_k_that_no_item_has_enough_samples_for_is_none_and_nothing_at_all_is_an_error():
    got = summarise(by_hand()[0], {}, [1, 8], 0)
    assert got["pass@8"] is None and got["ci95"]["pass@8"] is None and got["avg@8"] == got["success"]
    with pytest.raises(ValueError, match="every environment failed"):
        summarise(play("toy_4", None), {}, [1], 0)


# ---- settings ----


def settings(*argv):
    return asdict(parse_config(list(argv)))


@pytest.mark.parametrize("env", worlds.WORLDS)
@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen2.5-3B-Instruct"])
def test_without_flags_the_settings_are_those_that_training_takes_by_default(env, model, tmp_path):
    if env == "webarena" and not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    got = settings("--env", env, "--model", model)
    trained = asdict(train.parse_config(["--env", env, "--model", model, "--out", str(tmp_path / "none")]))
    same = ("max_tokens", "max_length", "slots", "action_format", "dtype", "temperature", "top_p", "top_k", "data")
    assert {k: got[k] for k in same} == {k: trained[k] for k in same}
    longer = env == "searchqa" and model != "tiny"  # the paper evaluates it with 30 turns, after training with 10
    assert got["horizon"] == ("30" if longer else trained["horizon"].split(",")[-1]) and got["split"] == "test"
    assert len(evaluation.pick_items(parse_config(["--env", env]))) >= 200


def make_run(folder, model=None, **changes):
    """A run folder as train.py leaves it; -> its final/ (an empty stand-in, or a copy of a model)."""
    shutil.copytree(model, folder / "final") if model else (folder / "final").mkdir(parents=True)
    (folder / "final/config.json").touch()
    cfg = asdict(train.parse_config(["--out", str(folder / "none")])) | changes
    (folder / "config.json").write_text(json.dumps(cfg))
    return str(folder / "final")


def test_a_runs_settings_win_over_presets_and_flags_win_over_both(tmp_path):
    items = tmp_path / "items"
    shutil.copytree(ROOT / "data/AgentEval", items / "AgentEval")
    run = dict(env="textcraft", action_format="react", max_tokens=9, max_length=999, data=str(items), horizon="2,7",
               dtype="bfloat16")
    final = make_run(tmp_path / "run", **run)
    got = settings("--model", final)
    assert {k: got[k] for k in run} == run | {"horizon": "7"}
    checkpoint = tmp_path / "run/checkpoints/step_000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").touch()
    assert settings("--model", str(checkpoint)) == got | {"model": str(checkpoint)}
    flags = dict(env="babyai", action_format="plain", max_tokens=8, max_length=888, data="", horizon="3",
                 dtype="float32")
    got = settings("--model", final, *(x for k, v in flags.items() for x in (f"--{k}", str(v))))
    assert {k: got[k] for k in flags} == flags


def test_a_run_says_nothing_about_the_horizon_of_a_world_that_it_did_not_train_on(tmp_path):
    final = make_run(tmp_path / "one", env="babyai", horizon="2,3")
    assert settings("--model", final, "--env", "textcraft")["horizon"] == "8"  # the tiny model's preset
    final = make_run(tmp_path / "two", env="babyai:2,textcraft:1", horizon="babyai=2,3 textcraft=4,6")
    assert settings("--model", final, "--env", "textcraft")["horizon"] == "6"
    with pytest.raises(ValueError, match="--env"):
        settings("--model", final)


def test_fewer_items_are_the_head_of_a_seeded_shuffle():
    few, more, other = (evaluation.pick_items(parse_config(["--items", n, "--seed", s]))
                        for n, s in (("5", "1"), ("9", "1"), ("9", "2")))
    assert few == more[:5] and more != other and len(set(more)) == 9
    assert set(more) < set(worlds.items("babyai", "test")) and more != sorted(more)


# ---- the command ----


def command(*argv):
    run = subprocess.run([sys.executable, "eval.py", *map(str, argv)], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=60)
    return run.returncode, run.stdout, run.stderr


def test_the_command_repeats_bit_for_bit_and_reports_what_its_trajectories_say(tmp_path):
    final = make_run(tmp_path / "run", rl.TINY, horizon="1,3")
    flags = ("--model", final, "--items", "8", "--samples", "2", "--out")
    log = tmp_path / "new/trajectories.jsonl"
    rc, table, err = command(*flags, tmp_path / "new/a.json", "--trajectories", log)
    assert rc == 0, err
    assert command(*flags, tmp_path / "b.json", "--trajectories", tmp_path / "b.jsonl")[0] == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("new/a.json", "b.json"))
    assert a["config"].pop("date") <= b["config"].pop("date")
    assert json.dumps(a) == json.dumps(b) and log.read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert sorted(p.name for p in log.parent.iterdir()) == ["a.json", "trajectories.jsonl"]  # nothing temporary stays

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["group"], r["sample"]) for r in rows] == [(g, k) for g in range(8) for k in range(2)]
    assert len({r["item"] for r in rows}) == 8 and max(r["turns"] for r in rows) == 3
    for name in ("success", "score", "turns"):
        assert a[name] == pytest.approx(np.mean([r[name] for r in rows])), name
    assert a["avg@1"] == a["avg@2"] == a["success"] == pytest.approx(a["pass@1"]) and a["env_error"] == 0
    assert a["pass@2"] == np.mean([rows[i]["success"] or rows[i + 1]["success"] for i in range(0, 16, 2)])
    assert sum(c["items"] for c in a["categories"].values()) == 8

    weights = (tmp_path / "run/final/model.safetensors").read_bytes()
    ids = "\n".join(r["item"] for r in rows[::2])
    pinned = dict(env="babyai", model=final, model_sha256=hashlib.sha256(weights).hexdigest(), split="test", items=8,
                  items_sha256=hashlib.sha256(ids.encode()).hexdigest(), samples=2, seed=0, temperature=1.0,
                  top_p=1.0, top_k=0, horizon=3, max_tokens=32, max_length=4096, action_format="react")
    assert {k: a["config"].get(k) for k in pinned} == pinned
    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert f"{a['pass@2']:.3f}" in lines["pass@2"] and set(a["categories"]) < set(lines)


def test_chunks_do_not_change_what_is_played():
    policy, tokenizer = rl.load_policy()
    pool, items = EnvPool(), worlds.items("babyai", "test")[:3]
    how = dict(seed=1, max_tokens=8)
    cut, whole = (evaluate(policy, tokenizer, pool, items, 2, 2, slots=slots, **how) for slots in (2, 128))
    for a, b in itertools.product((cut, whole), [rollout(policy, tokenizer, pool, items, 2, samples=2, **how)]):
        for t, u in zip(a, b, strict=True):
            assert t.logprobs == pytest.approx(u.logprobs, abs=1e-3)  # a sum's last digits depend on the batch
            t.logprobs = u.logprobs
            assert t.to_json() == u.to_json()
    assert [t.group for t in cut] == [0, 0, 1, 1, 2, 2]


def test_a_sweep_gives_one_result_for_each_horizon(tmp_path, capsys):
    out, log = tmp_path / "sweep.json", tmp_path / "t.jsonl"
    assert evaluation.main(["--items", "3", "--horizon", "1,2", "--out", str(out), "--trajectories", str(log)]) == 0
    sweep = json.loads(out.read_text())
    assert sweep.keys() == {"sweep", "config"} and sweep["config"]["horizon"] == [1, 2]
    for horizon, result in zip((1, 2), sweep["sweep"], strict=True):
        rows = [json.loads(line) for line in (tmp_path / f"t.h{horizon}.jsonl").read_text().splitlines()]
        assert result["config"] == sweep["config"] | {"horizon": horizon}
        assert result["turns"] == np.mean([r["turns"] for r in rows]) <= horizon
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["horizon", "1", "2"]


def test_every_setting_reaches_the_rollout(monkeypatch):
    seen = []
    monkeypatch.setattr(evaluation, "rollout", lambda *a, **kw: seen.append((a, kw)) or rollout(*a, **kw))
    how = dict(samples=2, seed=3, slots=4, max_tokens=2, max_length=999, temperature=0.5, top_p=0.9, top_k=5,
               action_format="react")
    flags = ["--items", "2", "--horizon", "2", *(x for k, v in how.items() for x in (f"--{k}", str(v)))]
    assert evaluation.main(flags) == 0
    (args, kw), = seen
    assert args[-1] == 2 and {k: kw.get(k) for k in how} == how


def broken_pool(monkeypatch, is_broken):
    def make(name, **kw):
        env = worlds.make_env(name, **kw)
        reset = env.reset

        def failing(item):
            if is_broken(item):
                raise worlds.EnvError("the power is out")
            return reset(item)
        env.reset = failing
        return env
    monkeypatch.setattr(evaluation, "EnvPool", lambda urls, options: EnvPool(urls, make, options))


def test_failed_environments_are_counted_apart(tmp_path, monkeypatch, capsys):
    names = evaluation.pick_items(parse_config(["--items", "4"]))
    broken_pool(monkeypatch, lambda item: f"babyai_{item}" == names[1])
    flags = ["--items", "4", "--horizon", "2", "--out", str(tmp_path / "r.json")]
    assert evaluation.main(flags) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["env_error"] == 0.25 and sum(c["items"] for c in result["categories"].values()) == 3
    (tmp_path / "r.json").unlink()
    capsys.readouterr()
    broken_pool(monkeypatch, lambda item: True)
    assert evaluation.main(flags) == 1
    out, err = capsys.readouterr()
    assert out == "" and "the power is out" in err.splitlines()[-1] and not list(tmp_path.iterdir())


BAD = {"--fool 1": "--fool", "--env nope": "unknown environment 'nope'", "--model runs/none/final": "no model folder",
       "--split dev": "unknown split 'dev'", "--horizon 0": "horizon '0'", "--horizon 2,,3": "horizon '2,,3'",
       "--samples 0": "--samples must be positive", "--samples x": "invalid int", "--items 251": "has only 250",
       "--temperature -1": "--temperature", "--temperature nan": "--temperature", "--top_p 0": "--top_p",
       "--action_format xml": "unknown --action_format", "--data {tmp}": "no items for 'babyai'",
       "--env_url http://127.0.0.1:9": "no environment server answers", "--max_length 9 --items 4": "max_length is 9",
       "--trajectories {tmp}": "is in the way", "--model {tmp}/bad/final": "is no JSON"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_usage_is_one_line_and_exit_code_2_and_nothing_is_written(flags, tmp_path, capsys):
    if "/bad/" in flags:
        (Path(make_run(tmp_path / "bad")).parent / "config.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    argv = ["--out", str(tmp_path / "new/r.json"), *flags.format(tmp=tmp_path).split()]
    assert evaluation.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 == len(err.splitlines()), err
    assert err.startswith("eval.py: ") and BAD[flags] in err and sorted(tmp_path.rglob("*")) == before


def test_a_shell_sees_exit_code_2_and_the_line(tmp_path):
    rc, out, err = command("--env", "nope", "--out", tmp_path / "r.json")
    assert (rc, out, err) == (2, "", f"eval.py: unknown environment 'nope'; choose from {', '.join(worlds.WORLDS)}\n")
    assert not list(tmp_path.iterdir())
