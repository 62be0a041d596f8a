"""Evaluation: estimators against brute force, numbers worked out by hand, a repeatable command,
and which settings win."""

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, run_script

import envs
import eval as evaluation
import rl
import train
from agent import hash_of_sources
from envs import EnvPool
from eval import bootstrap, evaluate, parse_eval_config, pass_at_k, summarise
from rollout import Rollouts, rollout
from trajectory import Trajectory, read_objects, read_trajectories, to_text, write_trajectories
from worlds.babyai import BabyAI

# ---- estimators ----


def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_that_hold_a_success():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15), (n, c, k)
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)  # exact for many, too


def test_the_bootstrap_interval_holds_the_truth_about_19_times_in_20():
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        low, high = bootstrap(rng.random(100) < 0.3, seed, resamples=1000)
        held += low <= 0.3 <= high
    assert 0.915 <= held / 400 <= 0.975


def test_the_bootstrap_is_a_function_of_values_and_seed_and_has_no_width_without_spread():
    values = np.random.default_rng(2).random(30)
    assert bootstrap(values, 5) == bootstrap(list(values), 5) != bootstrap(values, 6)
    assert bootstrap([1] * 9, 0, is_share=False) == [1.0, 1.0]
    # Wilson's interval where all are equal: z^2 / (n + z^2) wide where they are 0 or 1.
    assert bootstrap([0.5] * 9, 0) == pytest.approx([0.2265, 0.7735], abs=1e-4)
    assert bootstrap([0] * 16, 0) == pytest.approx([0.0, 0.1936], abs=1e-4)
    assert bootstrap([1] * 16, 0) == pytest.approx([0.8064, 1.0], abs=1e-4)
    # One stream of random numbers, although it is drawn in parts to bound the memory.
    drawn = np.random.default_rng(5).integers(0, 30, (3000, 30))
    assert bootstrap(values, 5, 3000) == list(np.percentile(values[drawn].mean(1), [2.5, 97.5]))


# ---- the summary, by hand ----


def trajectories_of(item, *outcomes):
    """outcomes: (success, score, turns, valid actions), or None for a failed environment."""
    failed = (True, 1.0, 99, 0)  # must not be seen in any number
    names = ("success", "score", "turns", "valid_actions")
    return [Trajectory(item, "toy", sample=sample, status="done" if outcome else "env_error",
                       **dict(zip(names, outcome or failed)))
            for sample, outcome in enumerate(outcomes)]


def by_hand():
    win = (True, 1.0, 1, 1)
    loss = (False, 0.0, 4, 0)
    trajectories = [
        # success 1/2, score .55, 2 turns, valid .625
        *trajectories_of("toy_1", win, (False, 0.2, 2, 1), (False, 0.0, 3, 0), (True, 1.0, 2, 2)),
        # 1/3, .3, 3, 1
        *trajectories_of("toy_2", (False, 0.0, 3, 3), (False, 0.0, 3, 3), None, (True, 0.9, 3, 3)),
        # 1, 1, 1, 1
        *trajectories_of("toy_3", None, win, None, None),
        # nothing
        *trajectories_of("toy_4", None, None, None, None),
        # 0, 0, 4, 0
        *trajectories_of("toy_5", loss, loss, loss, loss)]
    categories = {"toy_1": "goto", "toy_2": "goto", "toy_3": "pickup", "toy_4": "mixed",
                  "toy_9": "goto"}
    return trajectories, categories


def test_the_summary_equals_numbers_worked_out_by_hand():
    got = summarise(*by_hand(), samples=4, seed=3)
    expected = {
        "success": (1 / 2 + 1 / 3 + 1 + 0) / 4,
        "score": 1.85 / 4,
        "turns": 2.5,
        "valid_actions": 2.625 / 4,
        "env_error": (0 + 1 / 4 + 3 / 4 + 1 + 0) / 5,
        "avg@1": 11 / 24,
        "avg@4": 11 / 24,
        "pass@1": 11 / 24,
        "pass@2": (5 / 6 + 2 / 3 + 0) / 3,  # toy_3 has too few samples
        "pass@4": (1 + 0) / 2,  # toy_2 as well
    }
    assert list(got) == [*expected, "ci95", "categories", "items"]
    assert {k: got[k] for k in expected} == pytest.approx(expected)
    assert got["ci95"].keys() == expected.keys()
    assert got["ci95"]["success"] == pytest.approx(bootstrap([1 / 2, 1 / 3, 1, 0], 3))
    assert got["ci95"]["pass@2"] == pytest.approx(bootstrap([5 / 6, 2 / 3, 0], 3))
    assert json.loads(json.dumps(got)) == got  # plain numbers
    assert list(got["categories"]) == ["goto", "pickup"]  # all of toy_4 failed
    goto = got["categories"]["goto"]
    assert goto.pop("ci95")["success"] == pytest.approx(bootstrap([1 / 2, 1 / 3], 3))
    assert goto == pytest.approx({"items": 2, "success": 5 / 12, "score": 0.425, "turns": 2.5})
    assert got["items"] == pytest.approx({"toy_1": 1 / 2, "toy_2": 1 / 3, "toy_3": 1, "toy_5": 0})
    assert got["categories"]["pickup"] == {"items": 1, "success": 1.0, "score": 1.0, "turns": 1.0,
                                           "ci95": {"success": bootstrap([1.0], 3)}}


def test_k_runs_over_powers_of_two_and_the_samples_and_is_none_without_an_item_of_so_many():
    got = summarise(by_hand()[0], {}, 6, 0)
    assert [name for name in got if "@" in name] == ["avg@1", "avg@6", "pass@1", "pass@2",
                                                     "pass@4", "pass@6"]
    assert got["pass@6"] is None and got["ci95"]["pass@6"] is None
    assert got["avg@6"] == got["success"]


# ---- settings ----


def as_argv(flags):
    """{"horizon": "2,3"} -> ["--horizon", "2,3"]"""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def settings(*argv):
    return asdict(parse_eval_config(list(argv)))


@pytest.mark.parametrize("env", envs.WORLDS)
@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen2.5-3B-Instruct"])
def test_without_flags_the_settings_are_those_that_training_takes_by_default(env, model, tmp_path):
    if env == "webarena" and not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    argv = ["--env", env, "--model", model]
    got = settings(*argv)
    trained = asdict(train.parse_config([*argv, "--out", str(tmp_path / "none")]))
    same = ("max_tokens", "max_length", "slots", "action_format", "dtype", "temperature", "data")
    assert {name: got[name] for name in same} == {name: trained[name] for name in same}
    assert (got["top_p"], got["top_k"]) == (1.0, 0)  # the whole distribution, as in training
    horizon = trained["horizon"].split(",")[-1]
    if env == "searchqa" and model != "tiny":
        horizon = "30"  # the paper evaluates with 30 turns, after training with 10
    assert got["horizon"] == horizon and got["split"] == "test"
    assert len(evaluation.pick_items(parse_eval_config(["--env", env]))) >= 200


def make_run(folder, **flags):
    """A run folder as train.py leaves it -> its final/, the built-in model."""
    shutil.copytree(rl.TINY_MODEL, folder / "final")
    cfg = train.parse_config(["--out", str(folder / "none"), *as_argv(flags)])
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return str(folder / "final")


def test_a_runs_settings_win_over_presets_and_flags_win_over_both(tmp_path):
    items = tmp_path / "items"
    for name in ("AgentEval", "AgentItemId"):
        shutil.copytree(ROOT / "data" / name, items / name)
    run = dict(env="textcraft", action_format="tags", max_tokens=9, max_length=999,
               data=str(items), horizon="2,7", dtype="bfloat16", slots=5, system="Be brief.",
               chat_args="enable_thinking=false")
    final = make_run(tmp_path / "run", **run)
    got = settings("--model", final)
    assert {name: got[name] for name in run} == run | {"horizon": "7"}
    checkpoint = tmp_path / "run/checkpoints/step_000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").touch()
    assert settings("--model", str(checkpoint)) == got | {"model": str(checkpoint)}
    flags = dict(env="babyai", action_format="plain", max_tokens=8, max_length=888, data="",
                 horizon="3", dtype="float32", slots=6, system="", chat_args="")
    got = settings("--model", final, *as_argv(flags))
    assert {name: got[name] for name in flags} == flags


def test_a_run_says_little_of_a_world_that_it_was_not_trained_on(tmp_path):
    """Not its horizon, its limits, its items or an action format that needs none in its world."""
    for name in ("AgentEval", "AgentItemId"):
        shutil.copytree(ROOT / "data" / name, tmp_path / "items" / name,
                        ignore=shutil.ignore_patterns("textcraft*"))
    final = make_run(tmp_path / "run", env="babyai", horizon="2,3", max_tokens=9, max_length=999,
                     slots=99, data=str(tmp_path / "items"), action_format="plain")
    names = ("horizon", "max_tokens", "max_length", "slots", "data")
    trained = settings("--model", final)
    assert [trained[name] for name in names] == ["3", 9, 999, 99, str(tmp_path / "items")]
    elsewhere = settings("--model", final, "--env", "textcraft")
    by_default = settings("--model", "tiny", "--env", "textcraft")
    assert [elsewhere[name] for name in names] == [by_default[name] for name in names]
    assert elsewhere["horizon"] == "8" and elsewhere["action_format"] == "plain"
    final = make_run(tmp_path / "own", env="searchqa")  # its replies have tags of their own
    assert settings("--model", final, "--env", "babyai")["action_format"] == "react"


def test_in_a_mixture_each_world_has_its_own_horizon_limits_and_arguments(tmp_path):
    final = make_run(tmp_path / "run", env="babyai:2,searchqa", env_args="searchqa.topk=5",
                     horizon="babyai=2,3 searchqa=4,6")
    path = tmp_path / "run/config.json"
    run = json.loads(path.read_text())
    run["worlds"]["babyai"]["max_tokens"] = 5
    run["worlds"]["searchqa"]["max_tokens"] = 6
    path.write_text(json.dumps(run))
    for world, expected in (("babyai", ("3", 5, "")), ("searchqa", ("6", 6, "searchqa.topk=5"))):
        got = settings("--model", final, "--env", world)
        assert (got["horizon"], got["max_tokens"], got["env_args"]) == expected
    with pytest.raises(ValueError, match="--env"):
        settings("--model", final)


def test_an_item_that_is_listed_twice_counts_once(tmp_path):
    (tmp_path / "AgentEval/babyai").mkdir(parents=True)
    names = [{"item_id": f"babyai_{number}"} for number in (3, 4, 3)]
    (tmp_path / "AgentEval/babyai/babyai_test.json").write_text(json.dumps(names))
    assert envs.items("babyai", "test", tmp_path) == ["babyai_3", "babyai_4"]


def test_fewer_items_are_the_head_of_a_seeded_shuffle():
    few, more, other = (evaluation.pick_items(evaluation.EvalConfig(items=items, seed=seed))
                        for items, seed in ((5, 1), (9, 1), (9, 2)))
    assert few == more[:5] and more != other and len(set(more)) == 9
    assert set(more) < set(envs.items("babyai", "test")) and more != sorted(more)


def test_the_hash_of_a_gguf_model_is_that_of_its_file(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    monkeypatch.setattr(evaluation.rl, "model_path", lambda name: str(path))
    monkeypatch.setattr(evaluation.rl, "load_tokenizer", lambda *names: SimpleNamespace(
        chat_template=""))
    found = evaluation.result_config(parse_eval_config([]), ["babyai_1"])["model_sha256"]
    assert found == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("error, code", [(OSError("full"), 1), (envs.UserError("bad"), 2),
                                         (MemoryError(), 1), (KeyboardInterrupt(), 130)])
def test_what_ends_an_evaluation_is_one_line(error, code, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(evaluation, "run", fail)
    assert evaluation.main(["--items", "2"]) == code
    said = capsys.readouterr().err
    assert said.startswith("eval.py: ") and said.count("\n") == 1 and str(error) in said
    assert len(said) > 12


# ---- the command ----


def result_of(path):
    result = json.loads(path.read_text())
    for one in [result, *result.get("sweep", [])]:
        del one["config"]["date"]
    return result


def test_the_command_repeats_bit_for_bit_and_reports_what_its_trajectories_say(tmp_path):
    final = make_run(tmp_path / "run", horizon="1,3")
    for name in ("new/a", "b"):
        done = run_script("eval.py", "--model", final, "--items", "8", "--samples", "2", "--out",
                          tmp_path / f"{name}.json", "--trajectories", tmp_path / f"{name}.jsonl")
        assert done.returncode == 0, done.stderr
    result = result_of(tmp_path / "new/a.json")
    assert result == result_of(tmp_path / "b.json")
    assert (tmp_path / "new/a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    # Nothing temporary stays.
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.json", "a.jsonl"]

    rows, _ = read_objects(tmp_path / "b.jsonl")
    places = [(row["group"], row["sample"]) for row in rows]
    assert places == [(group, sample) for group in range(8) for sample in range(2)]
    assert len({row["item"] for row in rows}) == 8
    assert max(row["turns"] for row in rows) == 3
    for name in ("success", "score", "turns"):
        assert result[name] == pytest.approx(np.mean([row[name] for row in rows])), name
    assert result["avg@1"] == result["avg@2"] == result["success"]
    wins = [rows[i]["success"] or rows[i + 1]["success"] for i in range(0, 16, 2)]
    assert result["pass@2"] == np.mean(wins) and result["env_error"] == 0
    assert sum(c["items"] for c in result["categories"].values()) == 8
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert f"{result['pass@2']:.3f}" in lines["pass@2"]
    assert set(result["categories"]) < set(lines)

    # What it takes to repeat it.
    weights = (tmp_path / "run/final/model.safetensors").read_bytes()
    items = "\n".join(row["item"] for row in rows[::2])
    pinned = dict(env="babyai", model=final, split="test", items=8, samples=2, seed=0, horizon=3,
                  model_sha256=hashlib.sha256(weights).hexdigest(), temperature=1.0, top_k=0,
                  items_sha256=hashlib.sha256(items.encode()).hexdigest(), max_tokens=32)
    assert {name: result["config"].get(name) for name in pinned} == pinned


def test_the_number_of_slots_does_not_change_what_is_played(tiny):
    items = envs.items("babyai", "test")[:3]
    how = dict(samples=2, seed=1, max_tokens=8)
    with EnvPool() as pool:
        few, many = (evaluate(*tiny, pool, items, 2, Rollouts(slots=slots, **how))
                     for slots in (2, 128))
        expected = rollout(*tiny, pool, items, 2, **how)
    for got in (few, many):
        for t, u in zip(got, expected, strict=True):
            # A sum's last digits depend on the batch.
            assert t.logprobs == pytest.approx(u.logprobs, abs=1e-3)
            assert t.to_json() | {"logprobs": []} == u.to_json() | {"logprobs": []}
    assert [t.group for t in few] == [0, 0, 1, 1, 2, 2]


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path, capsys):
    def flags(name):
        return ["--items", "20", "--horizon", "2,3", "--max_tokens", "16", "--agent", "choose",
                "--out", str(tmp_path / f"{name}.json"),
                "--trajectories", str(tmp_path / f"{name}.jsonl")]

    slowly = [sys.executable, "eval.py", *flags("killed"), "--slots", "1"]
    process = subprocess.Popen(slowly, cwd=ROOT, stdout=subprocess.DEVNULL)
    file = tmp_path / "killed.h2.jsonl"
    until = time.monotonic() + 120
    while not file.exists() or file.read_text().count("\n") < 4:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    whole = len(read_trajectories(file))
    assert whole < 20
    with file.open("a") as f:
        f.write('{"item": "babyai_')  # cut off in the middle of a line
    assert evaluation.main(flags("killed")) == evaluation.main(flags("whole")) == 0
    assert f"goes on from {whole} trajectories in {file}" in capsys.readouterr().err
    assert (killed := result_of(tmp_path / "killed.json")) == result_of(tmp_path / "whole.json")
    assert killed["config"]["agent_sha256"] == hash_of_sources(dict(agent="choose", agent_args=""))
    for horizon in (2, 3):
        killed, uninterrupted = (
            [(t.item, t.group, t.tokens, t.mask, t.messages, t.score, t.status)
             for t in read_trajectories(tmp_path / f"{name}.h{horizon}.jsonl")]
            for name in ("killed", "whole"))
        assert killed == uninterrupted
    assert evaluation.main(flags("killed")) == 0  # nothing is left to play
    assert evaluation.main([*flags("killed"), "--temperature", "0.5"]) == 2
    assert str(file) in capsys.readouterr().err


def record_of(tmp_path, *changes, horizon=2):
    cfg = parse_eval_config(["--items", "2", "--samples", "3", "--trajectories",
                             str(tmp_path / "t.jsonl"), *changes])
    config = evaluation.result_config(cfg, ["babyai_1", "babyai_2"])
    return evaluation.Record(cfg, config, horizon)


@pytest.mark.parametrize("wrong", [
    {"score": math.nan}, {"score": 1e308}, {"turns": -7}, {"success": "yes"}, {"success": None},
    {"tokens": 3}, {"status": "won"}, {"choices": [1]}])
def test_an_evaluation_goes_on_from_no_trajectory_with_an_impossible_field(tmp_path, wrong):
    record = record_of(tmp_path)
    record.add(Trajectory("babyai_1", "babyai", turns=1))
    assert len(record_of(tmp_path).finished) == 1
    record.path.write_text(json.dumps(json.loads(record.path.read_text()) | wrong) + "\n")
    with pytest.raises(ValueError, match=f"line 1 of {record.path}"):
        record_of(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_file_of_ours_holds_a_number_that_is_not_finite(tmp_path, number):
    t = Trajectory("babyai_1", "babyai", logprobs=[number], advantage=number, score=number)
    record = record_of(tmp_path)
    record.add(t)
    write_trajectories(tmp_path / "all.jsonl", [t])
    for text in (record.path.read_text(), (tmp_path / "all.jsonl").read_text(),
                 to_text({"loss": [number, 1.5]}, indent=1)):
        found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert found.get("logprobs", [None]) == [None] and found.get("loss", [0, 1.5])[1] == 1.5


def test_a_full_disk_says_which_file_is_kept(tmp_path):
    record = record_of(tmp_path)
    record.path = Path("/dev/full")
    with pytest.raises(OSError, match="/dev/full are kept"):
        record.add(Trajectory("babyai_1", "babyai", turns=1))


def test_an_evaluation_goes_on_with_other_slots_and_deadlines_but_nothing_else(tmp_path):
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}")
    flags = ("--chat_template", str(template))
    record_of(tmp_path, *flags).add(Trajectory("babyai_1", "babyai", turns=1))
    assert len(record_of(tmp_path, *flags, "--slots", "3", "--deadline", "9").finished) == 1

    def refuses(*changes, **horizon):
        with pytest.raises(ValueError, match="is of an evaluation with another"):
            record_of(tmp_path, *changes, **horizon)

    refuses(*flags, horizon=3)
    refuses(*flags, "--samples", "4")
    template.write_text("{{ messages[1].content }}")  # a file of the same name with another text
    refuses(*flags)
    # Lines that do not say what was evaluated: the file of a training step, say.
    write_trajectories(tmp_path / "t.jsonl", [Trajectory("babyai_1", "babyai", turns=1)])
    refuses()


def test_an_item_is_played_again_if_a_sample_is_missing_or_its_environment_failed(tiny, tmp_path):
    items = ["babyai_1", "babyai_2"]
    config = Rollouts(samples=3, max_tokens=8)
    with EnvPool() as pool:
        whole = evaluate(*tiny, pool, items, 2, config)
        for t in [*whole[:5], replace(whole[5], status="env_error"), whole[4]]:
            record_of(tmp_path).add(t)  # a sample counts once
        finished = record_of(tmp_path).finished
        assert [(t.item, t.sample) for t in finished] == [
            ("babyai_1", 0), ("babyai_1", 1), ("babyai_1", 2), ("babyai_2", 0), ("babyai_2", 1)]
        saved = []
        again = evaluate(*tiny, pool, items, 2, config, finished=finished, save=saved.append)
    assert [(t.item, t.group) for t in saved] == [("babyai_2", 1)] * 3
    for t, u in zip(again, whole, strict=True):
        assert (t.item, t.group, t.sample, t.tokens) == (u.item, u.group, u.sample, u.tokens)


def test_a_sweep_gives_one_result_for_each_horizon(tmp_path, capsys):
    out = tmp_path / "sweep.json"
    flags = dict(items=3, horizon="1,2", out=out, trajectories=tmp_path / "t.jsonl")
    assert evaluation.main(as_argv(flags)) == 0
    sweep = json.loads(out.read_text())
    assert sweep.keys() == {"sweep", "config"} and sweep["config"]["horizon"] == [1, 2]
    for horizon, result in zip((1, 2), sweep["sweep"], strict=True):
        rows, _ = read_objects(tmp_path / f"t.h{horizon}.jsonl")
        assert result["config"] == sweep["config"] | {"horizon": horizon}
        assert result["turns"] == np.mean([row["turns"] for row in rows]) <= horizon
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert first_words == ["horizon", "1", "2"]


def test_every_setting_reaches_the_rollout(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(evaluation, "rollout", lambda *args, **kw: calls.append(args) or rollout(
        *args, **kw))
    # No value is the default of a Rollouts or of a flag.
    how = dict(samples=2, seed=3, slots=4, max_tokens=2, max_length=999, temperature=0.5,
               top_p=0.9, top_k=5, action_format="plain", agent_args="plan=true reflect=true",
               parse="strict")
    texts = {"babyai": {"prompt": "Play.", "reply": "Ok."}}
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    flags = as_argv(dict(items=2, horizon=2, prompts=tmp_path / "prompts.json") | how)
    flags += ["--set", "engine=hf", "arrival_order=true"]
    assert evaluation.main(flags) == 0
    ((*_, items, horizon, config),) = calls
    assert items == evaluation.pick_items(parse_eval_config(flags)) and len(items) == 2
    assert horizon == 2 and config.prompt_texts == texts
    how |= dict(engine="hf", arrival_order=True)
    assert {name: getattr(config, name) for name in how} == how


def test_failed_environments_are_counted_apart(tmp_path, monkeypatch, capsys):
    reset = BabyAI.reset
    names = evaluation.pick_items(parse_eval_config(["--items", "4"]))
    broken = {names[1]}

    def failing(env, item):
        if f"babyai_{item}" in broken:
            raise envs.EnvError("the power is out")
        return reset(env, item)

    monkeypatch.setattr(BabyAI, "reset", failing)
    out = tmp_path / "r.json"
    flags = as_argv(dict(items=4, horizon=2, out=out))
    assert evaluation.main(flags) == 0
    result = json.loads(out.read_text())
    assert result["env_error"] == 0.25
    assert sum(c["items"] for c in result["categories"].values()) == 3

    out.unlink()
    broken.update(names)
    assert evaluation.main(flags) == 1
    assert "the power is out" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
