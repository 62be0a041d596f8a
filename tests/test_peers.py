"""`benches peers`: reading the reports of other programs. None of them is needed here."""

import json
from types import SimpleNamespace

import pytest

from benches import peers
from envs import items


def report():
    """Two measured steps of a peer, with numbers that are easy to add up."""
    step = {"rollout": 3.0, "update": 1.0, "cpu_rollout": 1.5, "cpu_update": 0.5,
            "rollout_positions": 900, "update_positions": 100, "trained": 40, "answered": 30,
            "turns": 16, "reward": 0.25, "episodes": 8}
    other = step | {"rollout": 5.0, "cpu_rollout": 2.5, "trained": 90, "answered": 60,
                    "reward": 0.5}
    check = {"trained": 50, "not_sampled": 2, "sampled_not_trained": 1, "unanswered": 12,
             "unclosed_replies": 3, "gap_max": 1e-3, "gap_sum": 0.01, "gap_tokens": 40}
    return {"versions": {"trl": "1.16.0"}, "settings": {"micro_batches": 4},
            "steps": [step, other], "check": check, "memory_mb": 700.0}


def test_the_figures_of_a_report_are_medians_or_means_of_its_steps():
    row = peers.figures_of(json.dumps(report()))
    assert row["tokens_per_second"] == (40 / 4 + 90 / 6) / 2
    assert row["tokens_per_cpu_second"] == (40 / 2 + 90 / 3) / 2
    assert (row["slowest"], row["fastest"]) == (40 / 4, 90 / 6)
    assert (row["seconds_rollout"], row["seconds_update"]) == (4.0, 1.0)
    assert row["positions_per_trained"] == 2000 / 130
    assert row["answered_share"] == 90 / 130
    assert row["turns"] == 2.0
    assert row["reward"] == 0.375
    assert row["gap_mean"] == 0.01 / 40
    assert row["check"] == {"trained": 50, "not_sampled": 2, "sampled_not_trained": 1,
                            "unanswered": 12, "unclosed_replies": 3}
    without = peers.figures_of(json.dumps(report() | {"check": None}))
    assert "gap_max" not in without and "check" not in without


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": []}', '{"steps": [{"rollout": 1}]}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match="no report"):
        peers.figures_of(text)


def test_the_ratio_is_taken_to_the_fastest_peer_and_failed_ones_are_left_out():
    def row(wall, cpu):
        return {"tokens_per_second": wall, "tokens_per_cpu_second": cpu}

    rows = {"ours": row(60.0, 90.0), "a": row(10.0, 30.0), "b": row(12.0, 20.0),
            "c": {"error": "cannot be installed"}}
    assert peers.ratios(rows) == {"fastest": "b", "ratio": 5.0, "cpu_ratio": 3.0}
    assert peers.ratios({"ours": row(60.0, 90.0), "c": {"error": ""}}) == {}


def test_a_model_of_ones_own_gets_the_job_of_a_real_model(tmp_path):
    args = SimpleNamespace(items=2, samples=None, measured=None, threads=1, horizon=4, data="")
    assert peers.scale_of(args, "tiny") == peers.TINY._replace(items=2)
    program = peers.PROGRAMS["ours"]
    job = peers.job_of(args, str(tmp_path), "babyai", program, {}, measured=1, checked=True)
    assert job["model"] == str(tmp_path) and job["lr"] == peers.REAL.lr
    assert (job["items_per_step"], job["samples"], len(job["items"])) == (2, 4, 6)
    assert job["action_format"] == "react"
    run = {"env": "babyai", "algo": "sft", "horizon": "4", "action_format": "plain"}
    (tmp_path / "config.json").write_text(json.dumps(run))
    (tmp_path / "final").mkdir()
    model = str(tmp_path / "final")
    job = peers.job_of(args, model, "babyai", program, {}, measured=1, checked=True)
    assert job["action_format"] == "plain"
    args.data = peers.ROOT / "data/levels"
    job = peers.job_of(args, str(tmp_path), "babyai", program, {}, measured=1, checked=True)
    assert job["items"] == items("babyai", "train", args.data)[:6]
