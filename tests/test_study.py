"""The studies: what all runs get alike, how their rows are kept, and how they are compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT

from experiments import by_level, faults, policies, pretrained, references, study, test_time
from experiments.studies import play, report, rows, runs
from schedule import parse_rounds

ROW = {  # the summary of a run without training
    "success": 0.5, "ci95": [0.4, 0.6], "score": 0.5, "turns": 2.0, "valid_actions": 1.0,
    "environment_turns": 0, "seconds": 0, "stopped": "", "eval_horizon": 8,
}
HORIZON_RUNS = [r for r in runs.runs_of("horizon") if r.seed == 0 and r.label != "base"]


@pytest.mark.parametrize("run", HORIZON_RUNS, ids=lambda run: run.name)
def test_a_training_is_limited_by_turns_and_resumed(run, tmp_path, monkeypatch):
    out = tmp_path / "run"
    commands = []

    def train_py(*command):
        commands.append(command)
        out.mkdir(exist_ok=True)
        if len(commands) == 1:
            raise RuntimeError("killed")
        if len(commands) == 2:
            return  # stopped by a signal
        (out / "final").mkdir(exist_ok=True)
        (out / "metrics.jsonl").write_text('{"turns": 2.0, "trajectories": 128}\n')

    monkeypatch.setattr(play, "call", train_py)
    for reason in ("killed", "stopped"):
        with pytest.raises(RuntimeError, match=reason):
            play.train(run, out)
    assert play.turns_played(play.train(run, out)) == 256
    assert ["--resume" in command for command in commands] == [False, True, True]
    for command in commands:
        assert command[command.index("--turns") + 1] == runs.TURNS[run.world]


def test_differences_are_taken_seed_by_seed():
    # The differences are 0.1, 0.2, 0.3: their standard deviation is 0.1.
    mean, half = report.paired([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert abs(mean - 0.2) < 1e-9
    assert abs(half - 4.303 * 0.1 / 3**0.5) < 1e-9


def test_differences_over_items_are_paired_and_averaged_over_seeds():
    a = [{"x": 1.0, "y": 0.5, "z": 1.0}, {"x": 1.0, "y": 0.5, "z": 0.0, "only here": 1.0}]
    b = [{"x": 0.0, "y": 0.5, "z": 1.0}, {"x": 1.0, "y": 0.5, "z": 0.0}]
    # x: the mean of 1 and 0; y and z: 0. The standard deviation of (0.5, 0, 0) is 0.5 / sqrt(3).
    assert report.difference_over_items(a, b) == "+0.167 ± 0.327, not shown (seeds: 2)"
    assert report.difference_over_items(b[:1], a[:1]) == "-0.333 ± 0.653, not shown (seeds: 1)"
    better = [{"x": 1.0, "y": 0.9}]
    worse = [{"x": 0.5, "y": 0.5}]
    assert report.difference_over_items(better, worse) == "+0.450 ± 0.098 (seeds: 1)"
    assert report.difference_over_items([], []) == ""
    assert report.difference_over_items([{"x": 1.0}], [{"x": 0.0}]) == ""  # no spread


def test_at_equal_time_both_runs_count_up_to_the_end_of_the_faster_one():
    def run(*points):
        held_out = [{"seconds": seconds, "success": success} for seconds, success in points]
        return [], {"held_out": held_out}

    base = [{"success": 0.0}]
    slow, fast = run((10, 0.2), (20, 0.4)), run((5, 0.1), (10, 0.5))
    assert report.pairs_at_equal_time({0: slow}, {0: fast}, base) == ([0.2], [0.5])
    assert report.pairs_at_equal_time({0: fast}, {0: slow}, base) == ([0.5], [0.2])
    # A seed without a partner does not count.
    assert report.pairs_at_equal_time({1: slow}, {2: fast}, base) == ([], [])


def test_all_horizons_of_a_study_share_their_other_flags():
    others = {"pretrained_horizon": tuple(runs.PRETRAINED.split()),
              "pretrained_rooms": tuple(runs.PRETRAINED_ROOMS.split()),
              "pretrained_rooms_gpu": tuple(runs.PRETRAINED_ROOMS_GPU.split()),
              "pretrained_rooms_36k": tuple(runs.PRETRAINED_ROOMS_36K.split())}
    for name in ("horizon", "rooms_horizon", *others):
        own = others.get(name, runs.TO_THE_END)
        for run in runs.runs_of(name):
            if run.label == "base":
                continue
            assert run.flags[-len(own):] == own
            rounds = runs.TINY_HORIZONS[run.world].rounds
            if "--horizon" in run.flags:
                rounds = parse_rounds(play.flag(run, "--horizon", ""), run.world)
            longest = run.horizon or runs.TINY_HORIZONS[run.world].rounds[-1]
            largest = {"short": 3}.get(run.label, longest)
            assert rounds[-1] == largest, run.name


def test_a_chain_of_worlds_begins_with_the_model_of_the_run_before():
    chain = [run for run in runs.runs_of("transfer") if run.label == "next"]
    before = ["babyai_alone_s0", *(run.name for run in chain)]
    for run, model in zip(chain, before):
        assert play.flag(run, "--model", "") == f"runs/study/transfer/{model}/final"
    order = [run.name for run in runs.runs_of("transfer")]
    assert sorted(before, key=order.index) == before  # a model is there when it is needed


def test_a_run_is_evaluated_in_the_worlds_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(play, "ROOT", tmp_path)
    monkeypatch.setattr(play, "revision", lambda: "abc")
    (tmp_path / "data/tiny").mkdir(parents=True)
    (tmp_path / "data/tiny/model.safetensors").write_bytes(b"one")
    asked = []
    models = []

    def evaluate(world, run, model, *_):
        asked.append(world)
        models.append(model)
        figures = {"success": 0.5, "score": 0.5, "turns": 2.0, "valid_actions": 1.0,
                   "env_error": 0.0, "categories": {}, "items": {}}
        config = {"env": world, "model": "tiny", "samples": 2, "horizon": 4, "data": "",
                  "model_sha256": "1"}
        return figures | {"ci95": {"success": [0, 1], "score": [0, 1]}, "config": config}

    monkeypatch.setattr(play, "evaluate", evaluate)
    base = runs.runs_of("transfer")[0]
    play.do("transfer", base, "abc")
    assert asked == list(runs.TRANSFER_STEPS)
    assert list(rows.load("transfer")[base.name][-1]["worlds"]) == asked
    assert set(models) == {"tiny"}

    # The model before training is the one that the study's runs start from.
    models.clear()
    play.do("pretrained_horizon", runs.runs_of("pretrained_horizon")[0], "abc")
    assert models == ["runs/mix_warm/final"]


def test_an_evaluation_of_which_many_episodes_failed_is_no_row(tmp_path, monkeypatch):
    share = {}

    files = []

    def eval_py(*command):
        out = command[command.index("--out") + 1]
        files.append(out)
        out.write_text(json.dumps({"success": 0.1, "env_error": share["failed"]}))

    monkeypatch.setattr(play, "call", eval_py)
    base = runs.runs_of("transfer")[0]
    share["failed"] = 0.01
    assert play.evaluate("webarena", base, "tiny", 2, tmp_path / "run.jsonl")["success"] == 0.1
    # No evaluation goes on from what another one of the run has left.
    play.evaluate("babyai", base, "tiny", 2, tmp_path / "run.jsonl")
    play.evaluate("webarena", base, tmp_path / "step_000005", 2, tmp_path / "run.jsonl")
    play.evaluate("webarena", base, "tiny", 1, tmp_path / "run.jsonl")
    assert len(set(files)) == 4
    share["failed"] = 0.9
    with pytest.raises(RuntimeError, match="90% of the episodes in webarena failed"):
        play.evaluate("webarena", base, "tiny", 2, tmp_path / "run.jsonl")


def test_a_collapse_is_the_loss_of_half_of_the_best():
    def summary(*successes, stopped=""):
        held_out = [{"success": success} for success in successes]
        return {"stopped": stopped, "success": successes[-1], "held_out": held_out}

    assert not report.collapsed(summary(0.2, 0.41, 0.21))
    assert report.collapsed(summary(0.2, 0.41, 0.2))
    assert report.collapsed(summary(0.9, stopped="the KL is too large"))


def test_an_edited_checkout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "ROOT", tmp_path)

    def git(*args):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True)

    (tmp_path / "a.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", "a.py")
    git("commit", "-qm", "a")
    assert len(play.revision()) >= 7
    (tmp_path / "a.py").write_text("x = 2\n")
    with pytest.raises(SystemExit, match="a.py"):
        play.revision()


def test_one_sweep_of_the_longest_horizon_holds_the_shorter_ones():
    def played(item, success, turns, status="done"):
        return {"item": item, "success": success, "turns": turns, "status": status}

    a = [played("a", True, 3), played("a", False, 9), played("a", True, 2), played("a", False, 9)]
    b = [played("b", False, 9, "horizon")] * 4
    found = test_time.within(a + b, 2, samples=4)
    assert found["success"] == 0.125
    assert found["pass@1"] == 0.125
    assert abs(found["pass@2"] - 0.25) < 1e-9


def test_models_of_the_same_name_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(test_time, "revision", lambda: "abc")
    monkeypatch.setattr(test_time, "play", None)
    paths = [ROOT / "x/textcraft_s0/final", ROOT / "y/textcraft_s0/final"]
    with pytest.raises(SystemExit, match="would both be called 'after, textcraft_s0'"):
        test_time.measure("textcraft", paths)


@pytest.mark.parametrize("flags, message", [
    (("x/final",), "there is no model x/final"),
    (("--before", "data/tiny", "data/tiny"), "--before and --name go together"),
    ((), "give a MODEL"),
])
def test_bad_arguments_of_test_time_are_one_line(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["test_time.py", "babyai", *flags])
    with pytest.raises(SystemExit):
        test_time.main()
    assert message in capsys.readouterr().err


def test_each_model_has_files_of_its_own_and_its_row_is_kept_when_it_is_measured(
        tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(test_time, "WORK", tmp_path)
    monkeypatch.setattr(test_time, "revision", lambda: "new")
    outs = []
    stopped = True

    def eval_py(command, **_):
        out = Path(command[command.index("--out") + 1])
        outs.append(out)
        if stopped and len(outs) == 2:
            raise KeyboardInterrupt
        out.write_text(json.dumps({"config": {"model_sha256": "abc"}}))
        played = {"item": "babyai_1", "status": "done", "success": True, "turns": 1, "env": "x"}
        lines = Path(command[command.index("--trajectories") + 1])
        lines.write_text((json.dumps(played) + "\n") * 16)

    def kept():
        return {row["model"]: row["commit"] for row in rows.load("test_time")["babyai"]}

    monkeypatch.setattr(test_time.subprocess, "run", eval_py)
    earlier = [{"model": label, "commit": "old"} for label in ("before", "after, s0", "after, s9")]
    rows.save("test_time", {"babyai": earlier})
    models = [tmp_path / "s0/final", tmp_path / "s1/final"]
    with pytest.raises(KeyboardInterrupt):
        test_time.measure("babyai", models)
    assert kept() == {"before": "new", "after, s0": "old", "after, s9": "old"}

    # The same command goes on with what the model that was interrupted has left.
    stopped = False
    test_time.measure("babyai", models)
    assert len(set(outs)) == 3 and outs[1] == outs[3]
    assert kept() == {"before": "new", "after, s0": "new", "after, s1": "new"}

    # Another model before RL has rows of its own.
    test_time.measure("babyai", models[:1], tmp_path / "warm/final", "SmolLM2-135M")
    assert list(rows.load("test_time")) == ["babyai", "babyai, SmolLM2-135M"]
    assert len(set(outs)) == 5


def test_the_random_policy_is_the_uniform_one_where_there_is_one():
    found = pretrained.policies()
    kept = {name: run_rows[0]["figures"] for name, run_rows in rows.load("references").items()}
    for world, policy in (("babyai go-to", "uniform"), ("searchqa", "imitated")):
        entry = kept[pretrained.REFERENCES[world][0]]
        evaluation = found[f"{world}_random"][0]["evaluation"]
        assert evaluation["success"] == entry[policy]["success"]
        assert ("uniform" in entry) == (policy == "uniform")
    for world, (entry, horizon) in pretrained.REFERENCES.items():
        command = references.REFERENCES[entry][0].split()
        assert int(command[3]) == horizon  # WORLD EPISODES HORIZON
        assert found[f"{world}_expert"][0]["evaluation"]["config"]["horizon"] == horizon


def test_what_grpo_adds_is_said_item_by_item_where_both_items_are_kept(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pretrained, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    pretrained.report()
    said = re.findall(r"^(.*): GRPO minus warm start over items: ([+-].\S*)",
                      capsys.readouterr().out, re.M)
    kept = rows.load("pretrained")
    for world, rise in said:
        warm, rl = (kept[f"{world}_{stage}"][-1]["evaluation"] for stage in ("warm", "rl"))
        assert abs(float(rise) - (rl["success"] - warm["success"])) < 6e-4
    with_items = {name[:-3] for name, run in kept.items()
                  if name.endswith("_rl") and "items" in run[-1]["evaluation"]}
    assert {world for world, _ in said} == with_items != set()
    assert (tmp_path / "docs/pretrained.png").exists()


def test_a_study_of_another_model_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "ROOT", tmp_path)
    model = tmp_path / "data/tiny/model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"one")
    play.begin("horizon", {}).close()
    play.begin("horizon", {"run": [{"base_sha256": play.sha256(model)}]}).close()
    with pytest.raises(SystemExit, match="another built-in model"):
        play.begin("horizon", {"run": [{"base_sha256": "of another model"}]})
    model.write_bytes(b"two")
    with pytest.raises(SystemExit, match="another built-in model"):
        play.begin("horizon", {})


def test_two_processes_do_not_work_at_one_study(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "ROOT", tmp_path)
    (tmp_path / "data/tiny").mkdir(parents=True)
    (tmp_path / "data/tiny/model.safetensors").write_bytes(b"one")
    lock = play.begin("horizon", {})
    with pytest.raises(SystemExit, match="at work"):
        play.begin("horizon", {})
    lock.close()


def test_packed_rows_are_the_rows_of_the_plain_files(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    first = [{"step": 0, "success": 0.1}, {"success": 1.0, "ci95": [0.9, 1.0]}]
    second = [{"success": 0.30000000000000004, "command": "é"}]

    def write(name, run_rows):
        path = rows.run_path("horizon", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in run_rows))

    write("b_s0", first)
    assert rows.load("horizon") == {"b_s0": first}  # before it is packed
    rows.pack("horizon")
    assert not (tmp_path / "horizon").exists()
    assert rows.load("horizon") == {"b_s0": first}

    write("a_s0", second)
    assert rows.load("horizon") == {"a_s0": second, "b_s0": first}  # from both places
    rows.pack("horizon")
    assert rows.load("horizon") == {"a_s0": second, "b_s0": first}

    packed = rows.packed_path("horizon").read_bytes()
    rows.save("horizon", {"b_s0": first, "a_s0": second})
    assert rows.packed_path("horizon").read_bytes() == packed
    rows.pack("horizon")  # nothing to pack
    assert rows.packed_path("horizon").read_bytes() == packed


def test_only_missing_runs_are_run_and_all_are_packed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(play, "ROOT", tmp_path)
    monkeypatch.setattr(play, "revision", lambda: "abc")
    (tmp_path / "data/tiny").mkdir(parents=True)
    (tmp_path / "data/tiny/model.safetensors").write_bytes(b"one")
    base = play.sha256(tmp_path / "data/tiny/model.safetensors")
    done = []
    failing = {"textcraft_long_s1"}

    def do(name, run, commit):
        if run.name in failing:
            raise RuntimeError("no memory")
        done.append(run.name)
        path = rows.run_path(name, run.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ROW | {"base_sha256": base}) + "\n")

    monkeypatch.setattr(play, "do", do)
    monkeypatch.setattr("sys.argv", ["study.py", "collapse", "--jobs", "1"])
    with pytest.raises(SystemExit, match="1 runs failed"):
        study.main()
    names = [run.name for run in runs.runs_of("collapse")]
    assert done == [name for name in names if name not in failing]
    assert set(rows.load("collapse")) == set(done)
    assert not (tmp_path / "results/collapse").exists()

    failing.clear()
    done.clear()
    study.main()
    assert done == ["textcraft_long_s1"]
    assert set(rows.load("collapse")) == set(names)


def test_every_kept_run_belongs_to_its_study_and_ends_with_a_summary():
    for name in runs.STUDIES:
        names = {run.name for run in runs.runs_of(name)}
        results = rows.load(name)
        assert results and set(results) <= names
        for run_name, run_rows in results.items():
            assert run_rows[-1]["commit"] and run_rows[-1]["model_sha256"], run_name
            steps = [row["step"] for row in run_rows[:-1]]
            assert steps == list(range(len(steps))), run_name
    assert (ROOT / "experiments/results/test_time.jsonl.gz").exists()


@pytest.mark.parametrize("path", sorted(rows.RESULTS.glob("*.gz")), ids=lambda path: path.name)
def test_every_kept_run_says_what_it_takes_to_repeat_it(path):
    for run_name, run_rows in rows.load(path.name.removesuffix(".jsonl.gz")).items():
        known = {field for row in run_rows for field in row if row[field] is not None}
        assert not {"command", "commit", "seed", "machine"} - known, run_name
        assert known & {"model_sha256", "start_sha256"}, run_name
        # The command is empty only before training, and the hash only where no model plays.
        assert any(row.get("command") or row.get("evaluation") for row in run_rows), run_name
        if path.name not in ("references.jsonl.gz", "sciworld_expert.jsonl.gz"):
            assert "" not in [row.get("model_sha256") for row in run_rows], run_name


def test_a_reference_keeps_its_commands_and_its_figures(tmp_path, monkeypatch):
    commands = []
    evaluation = {
        "success": 0.5, "score": 0.5, "turns": 2.0, "valid_actions": 1.0, "env_error": 0.0,
        "ci95": {"success": [0.4, 0.6], "score": [0.4, 0.6]}, "categories": {}, "items": {},
        "config": {"env": "babyai", "model": "m", "samples": 2, "horizon": 16, "data": "",
                   "model_sha256": "abc"},
    }

    def call(script, *words):
        commands.append((script, *words))
        if "--out" not in words:
            return "best 0.168\n"
        out = Path(words[words.index("--out") + 1])
        if script == "sft.py":
            out.mkdir()  # refuses a folder that holds a run
        elif script == "eval.py":
            out.write_text(json.dumps(evaluation))
        else:
            out.write_text('{"uniform": {"success": 0.25}}')

    monkeypatch.setattr(references, "ROOT", tmp_path / "a checkout")
    monkeypatch.setattr(play, "call", call)
    monkeypatch.setattr(play, "revision", lambda: "c0ffee")
    row = references.measure("policies_textcraft", "c0ffee")
    assert row["command"] == ("OMP_NUM_THREADS=1 python experiments/policies.py textcraft 4 8 "
                              "--out OUT.json")
    assert row["figures"] == {"uniform": {"success": 0.25}} and row["model_sha256"] == ""
    assert commands.pop()[:4] == ("experiments/policies.py", "textcraft", "4", "8")
    row = references.measure("fixed_actions_babyai", "c0ffee")
    assert row["figures"] == {"printed": ["best 0.168"]}
    references.measure("policies_webarena", "c0ffee")
    assert commands.pop()[1:6] == ("webarena", "1", "15", "", "expert")

    # A warm start is trained in a folder of its own, also the second time, and evaluated.
    for _ in range(2):
        commands.clear()
        row = references.measure("warm_levels", "c0ffee")
    trained = commands[0][commands[0].index("--out") + 1]
    assert commands[1][commands[1].index("--model") + 1] == f"{trained}/final"
    assert row["model_sha256"] == "abc" and row["figures"]["success"] == 0.5
    assert "success 0.500 [0.400, 0.600]" in references.table("warm_levels", row)

    # Item sets that are not in the repository are made first, and named.
    commands.clear()
    row = references.measure("fixed_link_webarena", "c0ffee")
    assert [words[1] for words in commands] == ["navigate", "fixed_link"]
    assert "web.py navigate runs/items/NAV && OMP" in row["command"]

    with pytest.raises(RuntimeError, match="another commit"):
        references.measure("policies_textcraft", "decaf")


def test_what_a_policy_leaves_in_its_file():
    by_item = {"success": {"a_1": 1.0, "a_2": 0.0, "a_3": 0.5}, "turns": {"a_1": 1, "a_2": 4,
                                                                           "a_3": 2}}
    kept = policies.kept_figures(by_item, {"a_1": "near", "a_2": "far", "a_3": "far"})
    assert kept["success"] == 0.5 and kept["categories"] == {"near": 1.0, "far": 0.25}
    assert kept["items"] == {"a_1": [1.0, 1.0], "a_2": [0.0, 4.0], "a_3": [0.5, 2.0]}


def test_every_reference_has_its_row():
    kept = {name: run_rows[0]["command"] for name, run_rows in rows.load("references").items()}
    assert kept == {name: references.command_line(name) for name in references.REFERENCES}


# ---- pictures ----


def words_of(figure):
    """The titles, axis labels, names of settings and legends of a figure."""
    texts = [figure.get_suptitle()]
    for ax in figure.axes:
        texts += [ax.get_title(), ax.get_xlabel(), ax.get_ylabel()]
        texts += [label.get_text() for label in ax.get_yticklabels()]
    for legend in figure.legends:
        texts += [text.get_text() for text in legend.get_texts()]
    return texts


def test_the_matrix_shows_every_score_and_compares_it_with_the_built_in_model(monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure))
    results = {}
    for number, run in enumerate(runs.runs_of("transfer")):
        score = 0.1 + 0.05 * number
        figure = {"score": score, "score_ci95": [score - 0.02, score + 0.02]}
        results[run.name] = [{"worlds": dict.fromkeys(runs.TRANSFER_STEPS, figure)}]
    report.draw("transfer", {"babyai_alone_s0": results["babyai_alone_s0"]})
    assert not figures  # without the built-in model
    report.draw("transfer", results)
    (figure,) = figures
    plt.close(figure)
    ax = figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[:3] == ["nothing (built-in model)", "BabyAI", "TextCraft"]
    assert names[6] == "BabyAI, then TextCraft" and names[-1] == "all five, mixed"
    first_cells = [text.get_text() for text in ax.texts][::len(runs.TRANSFER_STEPS)]
    assert first_cells[:3] == ["0.100 ± 0.020", "0.150 ± 0.020", "0.200 ± 0.020"]
    assert abs(ax.images[0].get_array()[-1, 0] - 0.5) < 1e-9  # the last of eleven runs


@pytest.mark.parametrize("name, missing", [
    ("recipe", "default"), ("credit", "base"), ("credit", "grpo_s"), ("credit", "grpo_s0"),
    ("credit", "grpo_s[1-4]|(?<!grpo)_s0"),  # no other label has a seed of the baseline
])
def test_a_study_whose_baseline_is_missing_is_drawn(name, missing, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure))
    results = {run: found for run, found in rows.load(name).items()
               if not re.search(missing, run)}
    report.draw(name, results)
    plt.close(*figures)
    assert report.table(name, results)


def test_a_result_that_cannot_be_drawn_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"sweep": [], "config": {}}))
    with pytest.raises(SystemExit, match="a stage is one of raw, warm, rl, not warn"):
        pretrained.add("babyai", "warn", path)
    with pytest.raises(SystemExit, match="not the result of one evaluation"):
        pretrained.add("babyai", "raw", path)
    assert not rows.load("pretrained")


def test_a_world_without_a_warm_start_is_drawn():
    evaluation = {"success": 0.1, "ci95": {"success": [0.0, 0.2]}, "config": {"horizon": 4}}
    figure, axes = plt.subplots()
    pretrained.draw(axes, {"babyai new_raw": [{"evaluation": evaluation}]}, ["babyai new"])
    plt.close(figure)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["BabyAI new,\nhorizon 4"]


@pytest.mark.parametrize("name", ["algorithms", "horizon", "collapse", "recipe", "credit",
                                  "distill"])
def test_a_picture_says_what_its_bars_are_starts_at_0_and_has_words_for_names(name, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure))
    report.draw(name, rows.load(name))
    assert len(figures) == (2 if name == "horizon" else 1)
    for figure in figures:
        plt.close(figure)
        words = words_of(figure)
        assert any("standard deviation" in text or "95 % interval" in text for text in words)
        keys = {"babyai", "textcraft", "grpo", "scaling"}
        assert not [text for text in words if "_" in text or keys & set(text.split())]
        for ax in figure.axes:
            if ax.axison:
                is_success = "success" in ax.get_ylabel()
                assert is_success or "success" in ax.get_xlabel() or "horizon" in ax.get_ylabel()
                assert name == "credit" or ax.get_xlim()[0] == 0  # its differences may be negative
                assert name in ("recipe", "credit") or ax.get_ylim()[0] == 0


def test_an_algorithm_has_one_color_in_all_worlds_also_where_others_are_missing(monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure))
    results = {run: found for run, found in rows.load("algorithms").items()
               if not run.startswith("webarena_ppo")}
    report.draw("algorithms", results)
    plt.close(*figures)
    colors = {}
    for ax in figures[0].axes:
        for line in ax.lines:
            colors.setdefault(line.get_label(), set()).add(line.get_color())
    assert len(colors) == 4 and {len(found) for found in colors.values()} == {1}


def test_success_by_level_leaves_out_failed_environments_and_other_worlds(tmp_path):
    rows = [{"item": "babyai_9", "env": "babyai", "status": "done", "success": True},
            {"item": "babyai_9", "env": "babyai", "status": "env_error", "success": False},
            {"item": "textcraft_9", "env": "textcraft", "status": "done", "success": False}]
    (tmp_path / "t").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert by_level.success_by_level([tmp_path / "t"]) == {"GoToDoor": [True]}


def test_every_word_of_a_fault_names_a_test():
    for name, case in faults.CASES.items():
        if "pytest" not in case.command:
            continue
        path, words = case.command[-3], case.command[-1].split(" or ")
        found = re.findall(r"^def test_(\w+)", (ROOT / path).read_text(), re.MULTILINE)
        unknown = [word for word in words if not any(word in test for test in found)]
        assert not unknown, f"case {name}: {path} has no test {unknown}"
