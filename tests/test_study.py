"""The studies: what all runs get alike, how their rows are kept, and how they are compared."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from experiments import pretrained, references, speedrun, study
from experiments.studies import play, report, rows, runs
from trajectory import Trajectory, write_trajectories

KEPT = rows.studies()


@pytest.fixture
def results(tmp_path, monkeypatch):
    """No rows yet, and the file that they are kept in."""
    path = tmp_path / "results.jsonl.gz"
    monkeypatch.setattr(rows, "RESULTS", path)
    return path


# ---- playing ----


@pytest.fixture
def commands(results, tmp_path, monkeypatch):
    """The commands that a study gives, which leave what the scripts would, and how the next
    trainings end: "killed", "stopped" by a signal, or well."""
    given, endings = [], []
    row = dict.fromkeys((*play.KEPT, "seconds_rollout", "seconds_update"), 1.0)

    def call(script, *words):
        given.append((script, *map(str, words)))
        flags = dict(zip(words[::2], words[1::2]))
        out = Path(flags["--out"])
        if script == "eval.py":
            config = {"env": flags["--env"], "model": str(flags["--model"]), "samples": 2,
                      "horizon": 4, "data": "", "model_sha256": "abc"}
            out.write_text(json.dumps({
                "success": 0.5, "score": 0.5, "turns": 2.0, "valid_actions": 1.0,
                "env_error": 0.9 if config["model"] == "broken" else 0.01, "config": config,
                "categories": {}, "items": {}, "ci95": {"success": [0, 1], "score": [0, 1]}}))
            return ""
        out.mkdir(parents=True, exist_ok="--resume" in words)  # they refuse an old one
        ending = endings.pop(0) if endings else "well"
        if ending == "killed":
            raise RuntimeError(ending)
        (out / "metrics.jsonl").write_text(json.dumps(
            row | {"turns": 2, "trajectories": 256, "env_error": 0.5}))
        if ending == "well":
            (out / "final").mkdir()
        return ""

    monkeypatch.setattr(play, "call", call)
    monkeypatch.setattr(play, "ROOT", tmp_path)
    monkeypatch.setattr(play, "revision", lambda: "abc")
    monkeypatch.setattr(play, "base_sha256", lambda: "1")
    return given, endings


def test_missing_runs_are_run_and_interrupted_ones_resumed(commands, monkeypatch):
    given, endings = commands
    endings += ["killed", "stopped"]
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["study.py", "rooms_horizon", "--jobs", "1"])
    with pytest.raises(SystemExit, match="2 runs failed"):
        study.main()
    study.main()
    of_study = {run.name: run for run in runs.runs_of("rooms_horizon")}
    turns = {f"turns={run.turns}" for run in of_study.values() if run.label != "base"}
    trainings = [words for words in given if words[0] == "train.py"]
    assert trainings[-2:] == [(*words, "--resume") for words in trainings[:2]]
    assert sum("--resume" in words for words in trainings) == 2
    assert {word for words in trainings for word in words if word.startswith("turns=")} == turns
    kept = rows.load("rooms_horizon")
    assert kept.keys() == of_study.keys()
    for name, (*trained, summary) in kept.items():
        # Of 256 turns in trajectories, and one in a continuation.
        assert summary["environment_turns"] == 257 * len(trained)
        assert len(trained) == (of_study[name].label != "base")
    rows.keep("rooms_horizon", {name: [{"base_sha256": "of another model"}]})
    with pytest.raises(SystemExit, match="another built-in model"):
        play.check_base("rooms_horizon", rows.load("rooms_horizon"))


def test_a_run_is_evaluated_in_the_worlds_that_it_names(commands, tmp_path):
    given, _ = commands
    base = runs.runs_of("transfer")[0]
    play.do("transfer", base, "abc")
    (row,) = rows.load("transfer")[base.name]
    assert [words[2] for words in given] == list(row["worlds"]) == list(runs.TRANSFER_STEPS)
    assert (row["commit"], row["model_sha256"], row["success"]) == ("abc", "abc", 0.5)
    # The model before training is the one that the study's runs start from.
    play.do("pretrained_horizon", runs.runs_of("pretrained_horizon")[0], "abc")
    assert given[-1][4] == "runs/mix_warm/final"
    with pytest.raises(RuntimeError, match="90%"):  # of its episodes failed: it is no row
        play.evaluate("webarena", base, "broken", 2, tmp_path / "run")


def test_a_run_of_the_speedrun_is_verified_by_running_it_again(
        commands, tmp_path, monkeypatch, capsys):
    given, _ = commands
    monkeypatch.setattr(speedrun, "ROOT", tmp_path)
    run = runs.runs_of("speedrun")[0]
    play.do("speedrun", run, "abc")
    assert speedrun.verify(run.name) == 0 and "bit for bit" in capsys.readouterr().out
    commands_of = [[w for w in words if str(tmp_path) not in w] for words in given]
    assert commands_of[:2] == commands_of[2:]
    assert speedrun.table().endswith("| no | abc |")  # half of the episodes succeed
    with pytest.raises(SystemExit, match="no run 'x'"):
        speedrun.verify("x")


@pytest.mark.parametrize("change, processor, is_verified", [
    ({}, "this", True), ({"reward": 0.2}, "this", False), ({"reward": 0.2}, "other", True),
    ({"seconds": 9}, "this", True), ({"reward": 0.2, "success": 0.7}, "other", False),
    ({"model_sha256": "b"}, "this", False), ({"items": {"babyai_1": 0.0}}, "other", True)])
def test_equal_bits_or_on_another_processor_a_success_within_the_interval_verify_a_run(
        change, processor, is_verified, monkeypatch):
    monkeypatch.setattr(play, "processor", lambda: processor)
    kept = {"success": 0.9, "ci95": [0.85, 0.95], "items": {"babyai_1": 1.0},
            "model_sha256": "a", "processor": "this"}
    step = {"step": 0, "reward": 0.1, "seconds": 5}
    again = {name: change.get(name, value) for name, value in step.items()}
    found = {name: change.get(name, kept[name]) for name in ("success", "items")}
    found["config"] = {"model_sha256": change.get("model_sha256", "a")}
    assert speedrun.compare([step], kept, [again], found)[1] == is_verified


def test_the_speedruns_page_has_the_table_of_the_rows():
    assert speedrun.table() in (ROOT / "docs/speedrun.md").read_text()


def test_an_edited_checkout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    for words in ("init -q", "add a.py", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    assert len(play.revision()) >= 7
    (tmp_path / "a.py").write_text("x = 2\n")
    with pytest.raises(SystemExit, match="a.py"):
        play.revision()


def test_a_chain_of_worlds_begins_with_the_model_of_the_run_before():
    chain = [run for run in runs.runs_of("transfer") if run.label == "next"]
    before = ["babyai_alone_s0", *(run.name for run in chain)]
    for run, model in zip(chain, before):
        assert play.flag(run, "--model", "") == f"runs/study/transfer/{model}/final"
    order = [run.name for run in runs.runs_of("transfer")]
    assert sorted(before, key=order.index) == before  # a model is there when it is needed


@pytest.mark.parametrize("name", ["horizon", "rooms_horizon", *runs.PRETRAINED])
def test_the_schedules_of_a_study_differ_in_the_horizon_alone(name):
    others = {}  # world -> what its runs have besides the horizon
    for run in runs.runs_of(name):
        if run.label != "base":
            flags = [pair for pair in zip(run.flags[::2], run.flags[1::2])
                     if not pair[0].startswith("--horizon")]
            others.setdefault(run.world, set()).add((run.turns, run.horizon, *sorted(flags)))
    assert set(map(len, others.values())) == {1}


# ---- rows ----


def test_rows_are_kept_beside_those_of_other_runs_in_bytes_that_depend_on_them_alone(
        results, monkeypatch):
    first = [{"step": 0, "success": 0.1}, {"success": 1.0, "ci95": [0.9, 1.0]}]
    second = [{"success": 0.30000000000000004, "command": "é"}]
    assert rows.load("b") == {}
    rows.keep("b", {"run_b": first})
    rows.keep("b", {"run_a": second})
    rows.keep("a", {"run_b": second})
    assert rows.load("b") == {"run_a": second, "run_b": first}
    assert rows.load("a") == {"run_b": second} and rows.studies() == ["a", "b"]
    kept = results.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    for run in (first, second):
        rows.keep("b", {"run_a": run})
        assert rows.load("b") == {"run_a": run, "run_b": first}
    assert results.read_bytes() == kept


@pytest.mark.parametrize("name", KEPT, ids=lambda name: f"rows of {name}")
def test_every_kept_run_says_what_it_takes_to_repeat_it(name):
    results = rows.load(name)
    if name in runs.STUDIES:
        assert set(results) <= {run.name for run in runs.runs_of(name)}
    if name == "references":
        assert set(results) == set(references.REFERENCES)
    for run_name, run_rows in results.items():
        known = {field for row in run_rows for field in row if row[field] is not None}
        assert not {"command", "commit", "seed", "machine"} - known, run_name
        assert known & {"model_sha256", "start_sha256"}, run_name
        # The command is empty only before training, and the hash only where no model plays.
        assert any(row.get("command") or row.get("evaluation") for row in run_rows), run_name
        if name not in ("references", "sciworld_expert"):
            assert "" not in [row.get("model_sha256") for row in run_rows], run_name
        if name in runs.STUDIES:
            assert [row["step"] for row in run_rows[:-1]] == list(range(len(run_rows) - 1))


# ---- references and pretrained models ----


def test_a_reference_keeps_what_its_commands_find(commands, tmp_path, monkeypatch):
    given, _ = commands
    monkeypatch.setattr(references, "ROOT", tmp_path / "a checkout")
    for _ in range(2):  # in a folder of its own, also the second time
        row = references.measure("warm_levels", "abc")
    (_, *training), (_, *evaluation) = given[-2:]
    model = evaluation[evaluation.index("--model") + 1]
    assert model == training[training.index("--out") + 1] + "/final"
    assert row["model_sha256"] == "abc" and row["figures"]["success"] == 0.5
    assert "success 0.500 [0.000, 1.000]" in references.table("warm_levels", row)
    monkeypatch.setattr(play, "call", lambda *_: "best 0.168\n")
    row = references.measure("fixed_actions_babyai", "abc")
    assert row["figures"] == {"printed": ["best 0.168"]}
    with pytest.raises(RuntimeError, match="another commit"):
        references.measure("fixed_actions_babyai", "decaf")


def test_a_policy_is_measured_as_recorded():
    recorded = rows.load("references")["policies_textcraft_20"][0]["figures"]["uniform"]
    entry = references.REFERENCES["policies_textcraft_20"]._replace(only="uniform")
    assert json.loads(json.dumps(references.measure_policies(entry))) == {"uniform": recorded}


def test_the_report_of_pretrained_models_says_what_grpo_adds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    pretrained.report()
    assert (tmp_path / "docs/pretrained.png").exists()
    said = re.findall(r"(.+): GRPO minus warm start over items: (\S+)", capsys.readouterr().out)
    assert len(said) >= 4
    kept = rows.load("pretrained")
    for world, rise in said:
        warm, rl = (kept[f"{world}_{stage}"][-1]["evaluation"] for stage in ("warm", "rl"))
        assert abs(float(rise) - (rl["success"] - warm["success"])) < 6e-4


# ---- statistics and pictures ----


def test_differences_are_taken_seed_by_seed():
    # The differences are 0.1, 0.2, 0.3: their standard deviation is 0.1.
    found = report.paired([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert found == pytest.approx((0.2, 4.303 * 0.1 / 3**0.5))
    assert report.difference({0: 0.5}, {0: 0.4, 1: 0.5}) == ""  # one pair


def test_differences_over_items_are_paired_and_averaged_over_seeds():
    a = {0: {"x": 1.0, "y": 0.5, "z": 1.0}, 1: {"x": 1.0, "y": 0.5, "z": 0.0, "here": 1.0}}
    b = {0: {"x": 0.0, "y": 0.5, "z": 1.0}, 1: {"x": 1.0, "y": 0.5, "z": 0.0}}
    # x: the mean of 1 and 0; y and z: 0. The standard deviation of (0.5, 0, 0) is 0.5 / sqrt(3).
    assert report.difference_over_items(a, b) == "+0.167 ± 0.327, not significant (seeds: 2)"
    better, worse = {0: {"x": 1.0, "y": 0.9}}, {0: {"x": 0.5, "y": 0.5}, 1: {"x": 0.0}}
    assert report.difference_over_items(better, worse) == "+0.450 ± 0.098 (seeds: 1)"
    assert report.difference_over_items({0: {"x": 1.0}}, {0: {"x": 0.0}}) == ""  # no spread


@pytest.mark.parametrize("successes, stopped, has_collapsed", [
    ((0.2, 0.41, 0.21), "", False), ((0.2, 0.41, 0.2), "", True),
    ((0.9,), "the KL is too large", True)])
def test_a_collapse_is_the_loss_of_half_of_the_best(successes, stopped, has_collapsed, tmp_path):
    costs = dict.fromkeys(("turns", "trajectories", "seconds_rollout", "seconds_update"), 1)
    metrics = [costs, *({"eval/success": success} | costs for success in successes)]
    (tmp_path / "trajectories").mkdir()
    lost = Trajectory("babyai_0", "babyai")
    write_trajectories(tmp_path / "trajectories/eval_000001.jsonl", [lost])
    held_out = play.evaluate_midway(runs.Run("babyai", "long", 0, ()), tmp_path, metrics, ())
    assert [p.get("effective_horizon", 0) for p in held_out] == [None, 0, 0][: len(successes)]
    summary = {"stopped": stopped, "success": successes[-1], "held_out": held_out}
    assert report.collapsed(summary) == has_collapsed and held_out[0]["turns"] == 1


@pytest.mark.parametrize("name", [name for name in runs.STUDIES if name in KEPT])
def test_the_table_of_a_study_shows_every_kept_run(name):
    results = rows.load(name)
    lines = report.table(name, results).splitlines()
    assert results and len({line.count("|") for line in lines}) == 1
    labels = {(run.world, run.label) for run in runs.runs_of(name) if run.name in results}
    assert {tuple(line.split(" | ")[:2]) for line in lines[2:]} >= {
        (f"| {world}", label) for world, label in labels if name not in ("transfer", "worlds")}


def test_the_matrix_shows_every_score_and_compares_it_with_the_built_in_model():
    results = {}
    for number, run in enumerate(runs.runs_of("transfer")):
        score = 0.1 + 0.05 * number
        figures = {"score": score, "score_ci95": [score - 0.02, score + 0.02]}
        results[run.name] = [{"worlds": dict.fromkeys(runs.TRANSFER_STEPS, figures)}]
    ax = report.matrix(results).axes[0]
    first_cells = [text.get_text() for text in ax.texts][::len(runs.TRANSFER_STEPS)]
    assert first_cells[:3] == ["0.100 ± 0.020", "0.150 ± 0.020", "0.200 ± 0.020"]
    assert abs(ax.images[0].get_array()[-1, 0] - 0.5) < 1e-9  # the last of eleven runs


# ---- the pages ----


def test_links_between_pages_lead_somewhere_and_every_picture_is_shown():
    linked = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md")]:
        for target, anchor in re.findall(r"\]\(([^)\s:#]*)#?([^)\s:]*)\)", page.read_text()):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(path), f"{page.name}: {target}#{anchor}"
            linked.add(path)
    assert set(ROOT.glob("docs/*.png")) <= linked


def anchors_of(path):
    """Those that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
