"""The studies: what all runs get alike, how their rows are kept, and how they are compared."""

import json
import re
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT

from experiments import pretrained, references, study
from experiments.studies import play, report, rows, runs

KEPT = rows.studies()


@pytest.fixture
def results(tmp_path, monkeypatch):
    """No rows yet, and the file that they are kept in."""
    path = tmp_path / "results.jsonl.gz"
    monkeypatch.setattr(rows, "RESULTS", path)
    return path


# ---- playing ----


def test_a_training_is_limited_by_turns_and_resumed(tmp_path, monkeypatch):
    out = tmp_path / "run"
    commands = []

    def train_py(*command):
        commands.append(command)
        out.mkdir(exist_ok=True)
        if len(commands) == 1:
            raise RuntimeError("killed")
        if len(commands) == 3:  # the second one is stopped by a signal
            (out / "final").mkdir()
            (out / "metrics.jsonl").write_text('{"turns": 2.0, "trajectories": 128}\n')

    monkeypatch.setattr(play, "call", train_py)
    run = next(run for run in runs.runs_of("horizon") if run.turns)
    for reason in ("killed", "stopped"):
        with pytest.raises(RuntimeError, match=reason):
            play.train(run, out)
    metrics, stopped = play.train(run, out)
    assert play.turns_played(metrics) == 256 and not stopped
    assert ["--resume" in command for command in commands] == [False, True, True]
    assert all(f"turns={run.turns}" in command for command in commands)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that a study gives. eval.py writes a result, and the others make a folder."""
    given = []

    def call(script, *words):
        given.append((script, *map(str, words)))
        value = dict(zip(words[::2], words[1::2]))
        if script != "eval.py":
            Path(value["--out"]).mkdir(parents=True)  # train.py and sft.py refuse an old one
            return ""
        found = {"success": 0.5, "score": 0.5, "turns": 2.0, "valid_actions": 1.0,
                 "env_error": 0.9 if value["--model"] == "broken" else 0.01, "categories": {},
                 "items": {}, "ci95": {"success": [0, 1], "score": [0, 1]},
                 "config": {"env": value["--env"], "model": str(value["--model"]), "samples": 2,
                            "horizon": 4, "data": "", "model_sha256": "abc"}}
        Path(value["--out"]).write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(play, "call", call)
    monkeypatch.setattr(play, "ROOT", tmp_path)
    monkeypatch.setattr(play, "revision", lambda: "abc")
    monkeypatch.setattr(play, "base_sha256", lambda: "1")
    return given


def test_a_run_is_evaluated_in_the_worlds_that_it_names(results, commands, tmp_path):
    base = runs.runs_of("transfer")[0]
    play.do("transfer", base, "abc")
    assert [words[2] for words in commands] == list(runs.TRANSFER_STEPS)
    (row,) = rows.load("transfer")[base.name]
    assert list(row["worlds"]) == list(runs.TRANSFER_STEPS)
    assert (row["commit"], row["model_sha256"], row["success"]) == ("abc", "abc", 0.5)
    # The model before training is the one that the study's runs start from.
    play.do("pretrained_horizon", runs.runs_of("pretrained_horizon")[0], "abc")
    assert commands[-1][4] == "runs/mix_warm/final"
    with pytest.raises(RuntimeError, match="90%"):  # of its episodes failed: it is no row
        play.evaluate("webarena", base, "broken", 2, tmp_path / "run")


def test_only_missing_runs_are_run(results, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(play, "revision", lambda: "abc")
    done = []
    failing = {"textcraft_long_s1"}

    def do(name, run, commit):
        if run.name in failing:
            raise RuntimeError("no memory")
        done.append(run.name)
        row = {"success": 0.5, "ci95": [0.4, 0.6], "turns": 2.0, "valid_actions": 1.0, "seconds": 0,
               "environment_turns": 0, "stopped": "", "base_sha256": play.base_sha256()}
        rows.keep(name, {run.name: [row]})

    monkeypatch.setattr(play, "do", do)
    monkeypatch.setattr("sys.argv", ["study.py", "collapse", "--jobs", "1"])
    with pytest.raises(SystemExit, match="1 runs failed"):
        study.main()
    failing.clear()
    study.main()
    names = [run.name for run in runs.runs_of("collapse")]
    assert sorted(done) == sorted(names) and done[-1] == "textcraft_long_s1"
    rows.keep("collapse", {names[0]: [{"base_sha256": "of another model"}]})
    with pytest.raises(SystemExit, match="another built-in model"):
        play.check_base("collapse", rows.load("collapse"))


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


def test_a_chain_of_worlds_begins_with_the_model_of_the_run_before():
    chain = [run for run in runs.runs_of("transfer") if run.label == "next"]
    before = ["babyai_alone_s0", *(run.name for run in chain)]
    for run, model in zip(chain, before):
        assert play.flag(run, "--model", "") == f"runs/study/transfer/{model}/final"
    order = [run.name for run in runs.runs_of("transfer")]
    assert sorted(before, key=order.index) == before  # a model is there when it is needed


def test_the_schedules_of_a_study_differ_in_the_horizon_alone():
    for name in ("horizon", "rooms_horizon", *runs.PRETRAINED):
        others = {}  # world -> what its runs have besides the horizon
        for run in runs.runs_of(name):
            if run.label != "base":
                pairs = dict(zip(run.flags[::2], run.flags[1::2]))
                kept = {k: v for k, v in pairs.items() if not k.startswith("--horizon")}
                others.setdefault(run.world, []).append((run.turns, run.horizon, kept))
        assert all(kept == of_world[0] for of_world in others.values() for kept in of_world), name


# ---- rows ----


def test_rows_are_kept_beside_those_of_other_runs_in_bytes_that_depend_on_them_alone(results):
    first = [{"step": 0, "success": 0.1}, {"success": 1.0, "ci95": [0.9, 1.0]}]
    second = [{"success": 0.30000000000000004, "command": "é"}]
    assert rows.load("b") == {}
    rows.keep("b", {"run_b": first})
    rows.keep("b", {"run_a": second})
    rows.keep("a", {"run_b": second})
    assert rows.load("b") == {"run_a": second, "run_b": first}
    assert rows.load("a") == {"run_b": second} and rows.studies() == ["a", "b"]
    kept = results.read_bytes()
    rows.keep("b", {"run_a": first})
    assert rows.load("b") == {"run_a": first, "run_b": first}
    rows.keep("b", {"run_a": second})
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
            steps = [row["step"] for row in run_rows[:-1]]
            assert steps == list(range(len(steps))), run_name


# ---- references and pretrained models ----


def test_a_reference_keeps_what_its_commands_find(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(references, "ROOT", tmp_path / "a checkout")
    for _ in range(2):  # in a folder of its own, also the second time
        row = references.measure("warm_levels", "abc")
    trained = commands[-2][commands[-2].index("--out") + 1]
    assert commands[-1][commands[-1].index("--model") + 1] == f"{trained}/final"
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
    found = references.measure_policies(entry)
    assert json.loads(json.dumps(found)) == {"uniform": recorded}


def test_the_report_of_pretrained_models_says_what_grpo_adds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    pretrained.report()
    assert (tmp_path / "docs/pretrained.png").exists()
    said = [line.split(": GRPO minus warm start over items: ")
            for line in capsys.readouterr().out.splitlines() if "GRPO minus" in line]
    kept = rows.load("pretrained")
    assert len(said) >= 4
    for world, rise in said:
        warm, rl = (kept[f"{world}_{stage}"][-1]["evaluation"] for stage in ("warm", "rl"))
        assert abs(float(rise.split()[0]) - (rl["success"] - warm["success"])) < 6e-4


# ---- statistics and pictures ----


def test_differences_are_taken_seed_by_seed():
    # The differences are 0.1, 0.2, 0.3: their standard deviation is 0.1.
    mean, half = report.paired([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert abs(mean - 0.2) < 1e-9
    assert abs(half - 4.303 * 0.1 / 3**0.5) < 1e-9
    assert report.difference({0: 0.5}, {0: 0.4, 1: 0.5}) == ""  # one pair


def test_differences_over_items_are_paired_and_averaged_over_seeds():
    a = {0: {"x": 1.0, "y": 0.5, "z": 1.0}, 1: {"x": 1.0, "y": 0.5, "z": 0.0, "here": 1.0}}
    b = {0: {"x": 0.0, "y": 0.5, "z": 1.0}, 1: {"x": 1.0, "y": 0.5, "z": 0.0}}
    # x: the mean of 1 and 0; y and z: 0. The standard deviation of (0.5, 0, 0) is 0.5 / sqrt(3).
    assert report.difference_over_items(a, b) == "+0.167 ± 0.327, not significant (seeds: 2)"
    better, worse = {0: {"x": 1.0, "y": 0.9}}, {0: {"x": 0.5, "y": 0.5}, 1: {"x": 0.0}}
    assert report.difference_over_items(better, worse) == "+0.450 ± 0.098 (seeds: 1)"
    assert report.difference_over_items({}, {}) == ""
    assert report.difference_over_items({0: {"x": 1.0}}, {0: {"x": 0.0}}) == ""  # no spread


def test_a_collapse_is_the_loss_of_half_of_the_best():
    def summary(*successes, stopped=""):
        held_out = [{"success": success} for success in successes]
        return {"stopped": stopped, "success": successes[-1], "held_out": held_out}

    assert not report.collapsed(summary(0.2, 0.41, 0.21))
    assert report.collapsed(summary(0.2, 0.41, 0.2))
    assert report.collapsed(summary(0.9, stopped="the KL is too large"))


@pytest.mark.parametrize("name", runs.STUDIES)
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
    figure = report.matrix(results)
    plt.close(figure)
    ax = figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[0] == "nothing (built-in model)" and names[-1] == "all five, mixed"
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
