"""The numbers of a training step."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from metrics import explained_variance, held_out_summary, rollout_bar, rollout_metrics
from metrics import turns_are_played
from page import curves
from trajectory import Status, Trajectory, read_objects


def test_failed_environments_are_left_out_of_the_metrics():
    played = []
    for group, reward, advantage in ((0, 1.0, 0.7), (0, 0.5, 0.0), (1, 0.25, [0.0] * 4),
                                     (2, 0.25, 0.0)):
        t = Trajectory("babyai_8", "babyai", group=group, status=Status.DONE, reward=reward,
                       success=reward == 1.0, turns=2, valid_actions=1, advantage=advantage)
        t.append([5, 6])
        t.append([7, 8], [-1.0, -2.0])
        played.append(t)
    played[3].status = Status.HORIZON
    failed = Trajectory("babyai_8", "babyai", status=Status.ENV_ERROR, turns=9, error="fault: gone")
    row = rollout_metrics([*played, failed])
    expected = {"reward": 0.5, "success": 0.25, "turns": 2.0, "valid_actions": 0.5, "entropy": 1.5,
                "reply_tokens": 1.0, "zero_gradient_groups": 2 / 3, "truncated": 0.25,
                "env_error": 0.2, "env_error/fault": 0.2, "trajectories": 5}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert not turns_are_played(SimpleNamespace(turns=12), [row])  # 8 were, of which 2 each
    # Nothing was played: that is no success of 0.
    assert rollout_metrics([failed]) == {"env_error": 1, "env_error/fault": 1, "trajectories": 1}


def test_lines_that_hold_no_object_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n[]\n' + "[" * 100_000 + '\n{"step": 2}\n{"step"')
    assert read_objects(path) == ([{"step": 1}, {"step": 2}], 3)


def test_the_explained_variance_counts_sampled_tokens_only():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    returns = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, -50.0]])
    # The variance of the returns is 1.25, that of the errors -0.5, 0.5, 0.5, -0.5 is 0.25.
    values = torch.tensor([[1.5, 0.0, 1.5], [2.5, 4.5, 0.0]])
    assert explained_variance(returns, values, mask) == pytest.approx(0.8)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns, torch.zeros(2, 3), mask) == 0.0
    assert explained_variance(torch.ones(2, 3), values, mask) == 0.0


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """-> a function that draws the curves of rows of metrics -> title -> axes."""
    figures = []
    monkeypatch.setattr(curves.Figure, "savefig",
                        lambda figure, *args, **kw: figures.append(figure))

    def draw_rows(rows):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        curves.draw_curves(tmp_path)
        return {ax.get_title(): ax for ax in figures[0].axes}
    return draw_rows


@pytest.mark.parametrize("of_sft, worlds", [(False, ()), (True, ()), (False, ("a", "b"))])
def test_each_measure_has_an_axis_of_its_own_with_the_values_of_its_column(
        draw, of_sft, worlds):
    names = ["loss", "grad_norm"] if of_sft else [
        "success", "reward", "turns", "horizon", "entropy", "kl", "valid_actions"]
    rows = []
    for step in range(3):
        row = {name: step + 10.0 * i for i, name in enumerate(names)} | {"step": step}
        for world in worlds:
            row |= {f"{name}/{world}": row[name] for name in ("success", "horizon")}
        rows.append(row | ({"eval/success": 7.0 + step} if step != 1 else {}))
    axes = draw(rows)
    titles = curves.SFT_PLOTS if of_sft else curves.PLOTS
    assert list(axes) == [title for name, title in titles.items()
                          if name in (*names, "eval/success")]
    ax = axes[titles["grad_norm" if of_sft else "reward"]]
    assert list(ax.lines[0].get_ydata()) == [10.0, 11.0, 12.0]
    success = axes[titles["eval/success" if of_sft else "success"]]
    assert [7.0, 9.0] in [list(line.get_ydata()) for line in success.lines]
    if worlds:
        assert [text.get_text() for text in success.get_legend().get_texts()] == ["a", "b"]


def test_a_mixtures_stages_are_those_of_each_world():
    horizons = [(5, 3), (5, 3), (5, 4), (8, 4)]
    rows = [{"horizon": h, "horizon/babyai": b, "horizon/textcraft": h} for h, b in horizons]
    assert curves.horizon_changes(rows) == [2, 3]
    assert curves.horizon_changes([{"horizon": 3}] * 2) == []


def test_a_long_rollout_shows_its_trajectories_turns_and_speed(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    ended, playing = Trajectory("babyai_8", "babyai", turns=4), Trajectory("babyai_8", "babyai")
    for shown in (False, True):  # a bar is cleared when it is closed
        queue = SimpleNamespace(finished={}, alive=[SimpleNamespace(trajectory=playing)],
                                stats={"busy": 640})
        with rollout_bar(5, shown=shown) as watch:
            watch(queue)  # too early
            queue.finished[0, 0] = ended
            playing.turns = 3
            now[0] += 64
            watch(queue)
            now[0] += 30
            queue.stats["busy"] = 99999
            watch(queue)  # stderr is no terminal: once a minute
            drawn = capsys.readouterr().err
        if shown:
            assert "1/5" in drawn and "7 turns 10 tok/s" in drawn and "99999" not in drawn
        else:
            assert drawn == ""


def test_the_gain_is_from_the_first_evaluation_to_the_last():
    rows = [{"step": 4}, {"step": 5, "eval/success": 0.25}, {"step": 7, "eval/success": 0.5}]
    assert held_out_summary(rows, {"eval/success": 0.75, "eval/turns": 3.0}) == (
        "held-out success: 0.250 at step 5, 0.750 after training")
    rows = [{"step": 0, "eval/success/babyai": 0.1}]
    last = {"eval/success/babyai": 0.3, "eval/success/textcraft": math.nan}
    assert held_out_summary(rows, last) == (
        "held-out success of babyai: 0.100 at step 0, 0.300 after training\n"
        "held-out success of textcraft: nan after training")
