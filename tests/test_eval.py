"""Evaluation: estimators against brute force, numbers worked out by hand, a repeatable command,
and which settings win."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

import envs
import eval as evaluation
import rl
import train
from envs import EnvPool
from eval import bootstrap, evaluate, parse_eval_config, pass_at_k, powers, summarise
from rollout import RolloutConfig, rollout
from trajectory import Trajectory

# ---- estimators ----


def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_that_hold_a_success():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15), (n, c, k)


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
    held = 0
    for seed in range(400):
        low, high = bootstrap(rng.random(100) < 0.3, seed, resamples=400)
        held += low <= 0.3 <= high
    assert 0.915 <= held / 400 <= 0.975


def test_the_bootstrap_is_a_function_of_values_and_seed_and_has_no_width_without_spread():
    values = np.random.default_rng(2).random(30)
    assert bootstrap(values, 5) == bootstrap(list(values), 5) != bootstrap(values, 6)
    assert bootstrap([0.5] * 9, 0) == (0.5, 0.5)
    # One stream of random numbers, also where it is drawn in parts to bound the memory.
    drawn = np.random.default_rng(5).integers(0, 30, (1700, 30))
    expected = tuple(np.percentile(values[drawn].mean(1), [2.5, 97.5]))
    assert bootstrap(values, 5, 1700) == expected


# ---- the summary, by hand ----


def trajectories_of(item, *outcomes):
    """outcomes: (success, score, turns, valid actions), or None for a failed environment."""
    failed = (True, 1.0, 99, 0)  # must not be seen in any number
    played = []
    for sample, outcome in enumerate(outcomes):
        success, score, turns, valid = outcome or failed
        status = "done" if outcome else "env_error"
        played.append(Trajectory(item, "toy", sample=sample, status=status, success=success,
                                 score=score, turns=turns, valid_actions=valid))
    return played


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
        *trajectories_of("toy_5", loss, loss, loss, loss),
    ]
    categories = {"toy_1": "goto", "toy_2": "goto", "toy_3": "pickup", "toy_4": "mixed",
                  "toy_9": "goto"}
    return trajectories, categories


def test_the_summary_equals_numbers_worked_out_by_hand():
    got = summarise(*by_hand(), ks=[1, 2, 4], seed=3)
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
                                           "ci95": {"success": [1.0, 1.0]}}


def test_a_k_that_no_item_has_enough_samples_for_is_none_and_nothing_at_all_is_an_error():
    got = summarise(by_hand()[0], {}, [1, 8], 0)
    assert got["pass@8"] is None and got["ci95"]["pass@8"] is None
    assert got["avg@8"] == got["success"]
    with pytest.raises(ValueError, match="every environment failed"):
        summarise(trajectories_of("toy_4", None), {}, [1], 0)


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


def make_run(folder, model=None, **flags):
    """A run folder as train.py leaves it -> its final/: an empty stand-in, or a copy of a model."""
    if model:
        shutil.copytree(model, folder / "final")
    else:
        (folder / "final").mkdir(parents=True)
        (folder / "final/config.json").touch()
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


def test_a_run_says_nothing_about_the_horizon_of_a_world_that_it_did_not_train_on(tmp_path):
    final = make_run(tmp_path / "one", env="babyai", horizon="2,3")
    assert settings("--model", final, "--env", "textcraft")["horizon"] == "8"  # tiny's preset
    final = make_run(tmp_path / "two", env="babyai:2,textcraft:1",
                     horizon="babyai=2,3 textcraft=4,6")
    assert settings("--model", final, "--env", "textcraft")["horizon"] == "6"
    with pytest.raises(ValueError, match="--env"):
        settings("--model", final)


def test_an_item_that_is_listed_twice_counts_once(tmp_path):
    (tmp_path / "AgentEval/babyai").mkdir(parents=True)
    names = [{"item_id": f"babyai_{number}"} for number in (3, 4, 3)]
    (tmp_path / "AgentEval/babyai/babyai_test.json").write_text(json.dumps(names))
    assert envs.items("babyai", "test", tmp_path) == ["babyai_3", "babyai_4"]


def test_a_world_that_needs_no_action_format_says_nothing_of_it_elsewhere(tmp_path):
    final = make_run(tmp_path / "own", env="searchqa")  # its replies have tags of their own
    assert settings("--model", final, "--env", "babyai")["action_format"] == "react"
    again = train.parse_config(["--model", final, "--env", "babyai", "--out", str(tmp_path / "r")])
    assert again.action_format == "react"
    for env in ("babyai", "searchqa,babyai"):
        final = make_run(tmp_path / env, env=env, action_format="plain")
        assert settings("--model", final, "--env", "textcraft")["action_format"] == "plain"


def test_a_world_gets_its_own_arguments_of_a_mixtures_run(tmp_path):
    final = make_run(tmp_path / "run", env="babyai,searchqa", env_args="searchqa.topk=5")
    assert settings("--model", final, "--env", "searchqa")["env_args"] == "searchqa.topk=5"
    assert settings("--model", final, "--env", "babyai")["env_args"] == ""


def test_a_runs_limits_hold_for_the_worlds_that_it_was_trained_on(tmp_path):
    """SciWorld's environments are processes: tiny's preset has 32 slots there, 128 in BabyAI."""
    for name in ("AgentEval", "AgentItemId"):
        shutil.copytree(ROOT / "data" / name, tmp_path / "items" / name,
                        ignore=shutil.ignore_patterns("sciworld*"))
    final = make_run(tmp_path / "run", env="babyai", max_tokens=9, max_length=999, slots=99,
                     data=str(tmp_path / "items"))
    limits = ("max_tokens", "max_length", "slots", "data")
    got = settings("--model", final)
    assert [got[name] for name in limits] == [9, 999, 99, str(tmp_path / "items")]
    elsewhere = settings("--model", final, "--env", "sciworld")
    by_default = settings("--model", "tiny", "--env", "sciworld")
    assert [elsewhere[name] for name in limits] == [by_default[name] for name in limits]
    assert elsewhere["slots"] == 32


def test_in_a_mixture_each_world_has_its_own_limits(tmp_path):
    final = make_run(tmp_path / "run", env="babyai,textcraft")
    path = tmp_path / "run/config.json"
    run = json.loads(path.read_text())
    run["worlds"]["babyai"]["max_tokens"] = 5
    run["worlds"]["textcraft"]["max_tokens"] = 6
    path.write_text(json.dumps(run))
    got = {world: settings("--model", final, "--env", world)["max_tokens"]
           for world in ("babyai", "textcraft")}
    assert got == {"babyai": 5, "textcraft": 6}


def test_an_older_runs_horizon_is_read_from_its_flag(tmp_path):
    """Its config.json has no list of horizons for each world."""
    final = make_run(tmp_path / "run", env="babyai,textcraft",
                     horizon="babyai=2,3 textcraft=4,6")
    path = tmp_path / "run/config.json"
    run = json.loads(path.read_text())
    for own in run["worlds"].values():
        del own["rounds"]
    path.write_text(json.dumps(run))
    assert settings("--model", final, "--env", "textcraft")["horizon"] == "6"
    del run["worlds"]
    path.write_text(json.dumps(run))
    assert settings("--model", final, "--env", "babyai")["horizon"] == "3"


def test_fewer_items_are_the_head_of_a_seeded_shuffle():
    def picked(items, seed):
        return evaluation.pick_items(parse_eval_config(["--items", items, "--seed", seed]))

    few = picked("5", "1")
    more = picked("9", "1")
    other = picked("9", "2")
    assert few == more[:5] and more != other and len(set(more)) == 9
    assert set(more) < set(envs.items("babyai", "test")) and more != sorted(more)


def test_out_and_trajectories_are_two_files(tmp_path):
    out = str(tmp_path / "r.json")
    for name in (out, out + ".part"):
        with pytest.raises(ValueError, match="is the file of --out"):
            settings("--out", out, "--trajectories", name)


def test_the_hash_of_a_gguf_model_is_that_of_its_file(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    monkeypatch.setattr(evaluation.rl, "model_path", lambda name: str(path))
    monkeypatch.setattr(evaluation.rl, "load_tokenizer", lambda *names: SimpleNamespace(
        chat_template=""))
    cfg = parse_eval_config([])
    found = evaluation.result_config(cfg, ["babyai_1"])["model_sha256"]
    assert found == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("error", [
    FloatingPointError("the policy's logits are not finite"),
    OSError("No space left on device"),
    MemoryError(),
    RuntimeError("CUDA out of memory"),
])
def test_what_ends_an_evaluation_is_one_line(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(evaluation, "play_horizons", fail)
    assert evaluation.main(["--env", "babyai", "--items", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("eval.py: ") and said.count("\n") == 1
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        evaluation.main(["--env", "babyai", "--items", "2"])


# ---- the command ----


def command(*argv):
    done = subprocess.run([sys.executable, "eval.py", *map(str, argv)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def two_evaluations(tmp_path_factory):
    """The same command twice -> its folder: new/a.json, new/trajectories.jsonl; b.json, b.jsonl;
    and the first one's table."""
    folder = tmp_path_factory.mktemp("two")
    final = make_run(folder / "run", rl.TINY_MODEL, horizon="1,3")
    flags = ("--model", final, "--items", "8", "--samples", "2")
    code, table, err = command(*flags, "--out", folder / "new/a.json",
                               "--trajectories", folder / "new/trajectories.jsonl")
    assert code == 0, err
    code, _, err = command(*flags, "--out", folder / "b.json",
                           "--trajectories", folder / "b.jsonl")
    assert code == 0, err
    return folder, table


def test_the_command_repeats_bit_for_bit(two_evaluations):
    folder, _ = two_evaluations
    a = json.loads((folder / "new/a.json").read_text())
    b = json.loads((folder / "b.json").read_text())
    assert a["config"].pop("date") <= b["config"].pop("date")
    assert json.dumps(a) == json.dumps(b)
    assert (folder / "new/trajectories.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
    # Nothing temporary stays.
    names = sorted(path.name for path in (folder / "new").iterdir())
    assert names == ["a.json", "trajectories.jsonl"]


def test_the_command_reports_what_its_trajectories_say(two_evaluations):
    folder, table = two_evaluations
    result = json.loads((folder / "new/a.json").read_text())
    rows = read_lines(folder / "new/trajectories.jsonl")
    places = [(row["group"], row["sample"]) for row in rows]
    assert places == [(group, sample) for group in range(8) for sample in range(2)]
    assert len({row["item"] for row in rows}) == 8
    assert max(row["turns"] for row in rows) == 3
    for name in ("success", "score", "turns"):
        assert result[name] == pytest.approx(np.mean([row[name] for row in rows])), name
    assert result["avg@1"] == result["avg@2"] == result["success"]
    assert result["pass@1"] == pytest.approx(result["success"])
    assert result["env_error"] == 0
    wins = [rows[i]["success"] or rows[i + 1]["success"] for i in range(0, 16, 2)]
    assert result["pass@2"] == np.mean(wins)
    assert sum(c["items"] for c in result["categories"].values()) == 8

    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert f"{result['pass@2']:.3f}" in lines["pass@2"]
    assert set(result["categories"]) < set(lines)


def test_the_result_names_what_it_takes_to_repeat_it(two_evaluations):
    folder, _ = two_evaluations
    result = json.loads((folder / "new/a.json").read_text())
    rows = read_lines(folder / "new/trajectories.jsonl")
    weights = (folder / "run/final/model.safetensors").read_bytes()
    items = "\n".join(row["item"] for row in rows[::2])
    pinned = dict(
        env="babyai", model=str(folder / "run/final"), split="test", items=8, samples=2, seed=0,
        model_sha256=hashlib.sha256(weights).hexdigest(),
        items_sha256=hashlib.sha256(items.encode()).hexdigest(),
        temperature=1.0, top_p=1.0, top_k=0, horizon=3, max_tokens=32, max_length=4096,
        action_format="react",
    )
    assert {name: result["config"].get(name) for name in pinned} == pinned


def test_the_number_of_slots_does_not_change_what_is_played(tiny):
    items = envs.items("babyai", "test")[:3]
    how = dict(samples=2, seed=1, max_tokens=8)
    with EnvPool() as pool:
        few, many = (evaluate(*tiny, pool, items, 2, RolloutConfig(slots=slots, **how))
                     for slots in (2, 128))
        expected = rollout(*tiny, pool, items, 2, **how)
    for got in (few, many):
        for t, u in zip(got, expected, strict=True):
            # A sum's last digits depend on the batch.
            assert t.logprobs == pytest.approx(u.logprobs, abs=1e-3)
            assert t.to_json() | {"logprobs": []} == u.to_json() | {"logprobs": []}
    assert [t.group for t in few] == [0, 0, 1, 1, 2, 2]


def test_an_evaluation_that_goes_on_keeps_the_places_of_its_items(tiny):
    items = envs.items("babyai", "test")[:3]
    config = RolloutConfig(max_tokens=8)
    saved = []  # as a second process would read it after another stop
    with EnvPool() as pool:
        first = evaluate(*tiny, pool, items[:1], 2, config)
        evaluate(*tiny, pool, items, 2, config, finished=first,
                 save=lambda t: saved.append((t.item, t.group)))
    assert sorted(saved) == sorted(zip(items[1:], [1, 2]))


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path, capsys):
    flags = ["--items", "40", "--horizon", "2,3", "--slots", "2", "--max_tokens", "16"]

    def result_of(path):
        result = json.loads(path.read_text())
        for one in [result, *result["sweep"]]:
            del one["config"]["date"]
        return result

    out = tmp_path / "killed.json"
    part = tmp_path / "killed.json.part"
    command = [sys.executable, "eval.py", *flags, "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not part.exists() or part.read_text().count("\n") < 4:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    whole = part.read_text().count("\n") - 1
    with part.open("a") as f:
        f.write('{"horizon": 2, "traj')  # cut off in the middle of a line
    assert evaluation.main([*flags, "--out", str(out)]) == 0
    assert f"goes on from {whole} trajectories in {part}" in capsys.readouterr().err
    assert not part.exists()
    assert evaluation.main([*flags, "--out", str(tmp_path / "whole.json")]) == 0
    assert result_of(out) == result_of(tmp_path / "whole.json")

    part.write_text('{"env": "textcraft"}\n')
    assert evaluation.main([*flags, "--out", str(out)]) == 2
    assert f"{part} is of an evaluation with another model" in capsys.readouterr().err


def test_a_stopped_evaluation_goes_on_with_other_slots_and_deadlines_but_not_other_flags(tmp_path):
    flags = ["--items", "2", "--out", str(tmp_path / "r.json")]

    def part_of(*changes):
        cfg = parse_eval_config([*flags, *changes])
        return evaluation.PartFile(cfg, evaluation.result_config(cfg, ["babyai_1"]))

    horizon = part_of().horizons[0]
    part_of().add(horizon, Trajectory("babyai_1", "babyai", turns=1))
    changed = part_of("--slots", "3", "--deadline", "9", "--create_deadline", "9")
    assert len(changed.played[horizon]) == 1
    with pytest.raises(ValueError, match="is of an evaluation with another model"):
        part_of("--temperature", "0.5")
    # A file of the same name with another text.
    template = tmp_path / "template"
    other = ("--chat_template", str(template), "--out", str(tmp_path / "s.json"))
    template.write_text("{{ messages[0].content }}")
    part_of(*other).add(horizon, Trajectory("babyai_1", "babyai", turns=1))
    assert len(part_of(*other).played[horizon]) == 1
    template.write_text("{{ messages[1].content }}")
    with pytest.raises(ValueError, match="is of an evaluation with another model"):
        part_of(*other)


def test_samples_that_were_played_twice_count_once(tmp_path):
    """An evaluation that is stopped twice plays the items that were not complete from the first
    sample on, each time."""
    cfg = parse_eval_config(["--items", "2", "--samples", "3", "--horizon", "2", "--out",
                             str(tmp_path / "r.json")])
    part = evaluation.PartFile(cfg, {"model": "tiny"})
    for item, samples in (("babyai_1", (0, 1)), ("babyai_1", (0, 2)), ("babyai_2", (0, 1, 0))):
        for sample in samples:
            part.add(2, Trajectory(item, "babyai", sample=sample, turns=1))
    found = evaluation.PartFile(cfg, {"model": "tiny"}).played[2]
    assert sorted((t.item, t.sample) for t in found) == [
        ("babyai_1", 0), ("babyai_1", 1), ("babyai_1", 2), ("babyai_2", 0), ("babyai_2", 1)]


def test_a_sweep_gives_one_result_for_each_horizon(tmp_path, capsys):
    out = tmp_path / "sweep.json"
    flags = dict(items=3, horizon="1,2", out=out, trajectories=tmp_path / "t.jsonl")
    assert evaluation.main(as_argv(flags)) == 0
    sweep = json.loads(out.read_text())
    assert sweep.keys() == {"sweep", "config"} and sweep["config"]["horizon"] == [1, 2]
    for horizon, result in zip((1, 2), sweep["sweep"], strict=True):
        rows = read_lines(tmp_path / f"t.h{horizon}.jsonl")
        assert result["config"] == sweep["config"] | {"horizon": horizon}
        assert result["turns"] == np.mean([row["turns"] for row in rows]) <= horizon
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert first_words == ["horizon", "1", "2"]


def test_every_setting_reaches_the_rollout(monkeypatch, tmp_path):
    calls = []

    def recorded(policy, tokenizer, pool, items, horizon, config, **kw):
        calls.append((items, horizon, config, kw))
        return rollout(policy, tokenizer, pool, items, horizon, config, **kw)

    monkeypatch.setattr(evaluation, "rollout", recorded)
    # No value is the default of a RolloutConfig or of a flag.
    how = dict(samples=2, seed=3, slots=4, max_tokens=2, max_length=999, temperature=0.5,
               top_p=0.9, top_k=5, action_format="plain", plan=True, reflect=True,
               arrival_order=True, parse="strict")
    texts = {"babyai": {"prompt": "Play.", "reply": "Ok."}}
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(texts))
    flags = as_argv(dict(items=2, horizon=2, engine="hf", prompts=prompts) | how)
    how["prompt_texts"] = texts
    assert evaluation.main(flags) == 0
    ((items, horizon, config, kw),) = calls
    assert items == evaluation.pick_items(parse_eval_config(flags)) and len(items) == 2
    assert horizon == 2 and kw["engine"] == "hf"
    assert {name: getattr(config, name) for name in how} == how
    defaults = asdict(RolloutConfig())
    assert {name for name in how if how[name] == defaults[name]} == set()


def break_environments(monkeypatch, is_broken):
    """Let reset(item) fail where is_broken(item)."""
    def make(name, **kw):
        env = envs.make_env(name, **kw)
        reset = env.reset

        def failing(item):
            if is_broken(item):
                raise envs.EnvError("the power is out")
            return reset(item)

        env.reset = failing
        return env

    monkeypatch.setattr(evaluation, "EnvPool",
                        lambda urls, options: EnvPool(urls, make, options))


def test_failed_environments_are_counted_apart(tmp_path, monkeypatch, capsys):
    names = evaluation.pick_items(parse_eval_config(["--items", "4"]))
    out = tmp_path / "r.json"
    flags = as_argv(dict(items=4, horizon=2, out=out))
    break_environments(monkeypatch, lambda item: f"babyai_{item}" == names[1])
    assert evaluation.main(flags) == 0
    result = json.loads(out.read_text())
    assert result["env_error"] == 0.25
    assert sum(c["items"] for c in result["categories"].values()) == 3

    out.unlink()
    capsys.readouterr()
    break_environments(monkeypatch, lambda item: True)
    assert evaluation.main(flags) == 1
    output, err = capsys.readouterr()
    assert output == "" and "the power is out" in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


BAD = {  # flags -> what the line on stderr says
    "--fool 1": "--fool",
    "--env nope": "unknown environment 'nope'",
    "--model runs/none/final": "no model folder",
    "--split dev": "unknown split 'dev'",
    "--horizon 0": "horizon '0'",
    "--horizon 2,,3": "horizon '2,,3'",
    "--samples 0": "--samples must be positive",
    "--samples x": "invalid int",
    "--items 0": "--items must be positive",
    "--items 251": "has only 250",
    "--temperature -1": "--temperature",
    "--temperature nan": "--temperature",
    "--top_p 0": "--top_p",
    "--top_k -1": "--top_k",
    "--seed -1": "--seed",
    "--slots 0": "--slots must be positive",
    "--max_tokens 0": "--max_tokens must be positive",
    "--max_length 0": "--max_length must be positive",
    "--dtype float16": "unknown --dtype",
    "--engine vllm": "unknown --engine",
    "--chat_args thinking": "cannot read --chat_args 'thinking'",
    "--chat_args thinking=1": "no switch 'thinking'",
    "--model openai:x --base_url http://127.0.0.1:9/v1 --system Hi": "--system, --chat_args and",
    "--model openai:x --base_url http://127.0.0.1:9/v1 --chat_template t": "--chat_template are",
    "--action_format xml": "unknown --action_format",
    "--data {tmp}": "no items for 'babyai'",
    "--env searchqa --env_args serchqa.topk=9": "cannot read --env_args 'serchqa.topk=9'",
    "--env babyai --env_args searchqa.topk=9": "cannot read --env_args 'searchqa.topk=9'",
    "--env sciworld --env_args sciworld.max_moves=1e3": "max_moves",
    "--env_url http://127.0.0.1:9": "no environment server answers",
    "--max_length 9 --items 4": "max_length is 9",
    "--trajectories {tmp}": "is in the way",
    "--model {tmp}/bad/final": "is damaged",
    "--model {tmp}/run": "its model is",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_usage_is_one_line_and_exit_code_2_and_nothing_is_written(flags, tmp_path, capsys):
    if "/bad/" in flags:
        final = Path(make_run(tmp_path / "bad"))
        (final.parent / "config.json").write_text("{")
    if flags.endswith("/run"):
        (Path(make_run(tmp_path / "run")).parent / "metrics.jsonl").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    argv = ["--out", str(tmp_path / "new/r.json"), *flags.format(tmp=tmp_path).split()]
    assert evaluation.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 == len(err.splitlines()), err
    assert err.startswith("eval.py: ") and BAD[flags] in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_models_server_that_does_not_answer_is_known_at_once(capsys):
    start = time.monotonic()
    flags = ["--model", "openai:x", "--base_url", "http://127.0.0.1:9/v1", "--items", "1"]
    assert evaluation.main(flags) == 2
    assert "no server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err
    assert time.monotonic() - start < 12


def test_a_shell_sees_exit_code_2_and_the_line(tmp_path):
    code, out, err = command("--env", "nope", "--out", tmp_path / "r.json")
    assert (code, out) == (2, "")
    worlds = ", ".join(envs.WORLDS)
    assert err == f"eval.py: unknown environment 'nope'; choose from {worlds}\n"
    assert not list(tmp_path.iterdir())
