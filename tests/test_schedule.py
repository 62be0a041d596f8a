"""The horizon schedules, their presets, the text form of a horizon, and the items of a step."""

import json
from types import SimpleNamespace

import pytest
import torch

import train
from config import Config, presets
from schedule import adaptive_horizon, horizon_at, items_at, lr_factor_at, parse_rounds


def test_horizon_rises_in_stages_and_stays_at_the_last():
    expected = [6] * 3 + [13] * 3 + [20] * 3 + [20] * 5
    assert [horizon_at(step, (6, 13, 20), every=3) for step in range(14)] == expected
    assert [horizon_at(step) for step in (0, 99, 100, 10**9)] == [6, 6, 13, 20]  # the paper's
    for kind in ("fixed", "scaling_inter"):
        assert [horizon_at(step, [7], 2, kind) for step in range(10)] == [7] * 10


@pytest.mark.parametrize("arguments", [
    dict(rounds=()), dict(rounds=(0, 6)), dict(rounds=(6, 5)), dict(every=0), dict(kind="fixed")])
def test_bad_schedules_are_refused(arguments):
    with pytest.raises(ValueError, match="horizon"):
        horizon_at(0, **arguments)


def horizons_of(success, cut=0.5, rounds=(2, 4, 8), window=2):
    """The adaptive horizons after steps with these values of success."""
    horizons = []
    state = {"stage": 0}
    for value in success:
        before = json.dumps(state)
        after = adaptive_horizon(state, value, cut, len(rounds), window)
        assert json.dumps(state) == before  # it is not changed
        state = json.loads(json.dumps(after))  # as in a checkpoint
        horizons.append(rounds[state["stage"]])
    return horizons


def test_the_adaptive_horizon_grows_when_success_levels_off_and_only_then():
    assert horizons_of([0.1 * n for n in range(10)]) == [2] * 10
    # Each stage needs two means of two steps.
    assert horizons_of([0.3] * 9) == [2, 2, 2, 4, 4, 4, 4, 8, 8]
    # Few trajectories are cut, so more turns would not help.
    assert horizons_of([0.3] * 9, cut=0.05) == [2] * 9


def test_the_adaptive_horizon_does_not_grow_because_of_the_largest_length():
    worlds = {"babyai": SimpleNamespace(rounds=[2, 4], horizon_steps=2)}
    for by_length, expected in ((0.5, 0), (0.46, 0), (0.4, 1)):
        run = SimpleNamespace(adaptive={"babyai": {"stage": 0}}, cfg=SimpleNamespace(worlds=worlds))
        row = {"success": 0.3, "truncated": 0.5, "truncated/length": by_length, "env_error": 0.0}
        for _ in range(4):
            train.advance_adaptive_horizons(run, {"babyai": row})
        assert run.adaptive["babyai"]["stage"] == expected
    before = run.adaptive["babyai"]
    train.advance_adaptive_horizons(run, {"babyai": row | {"env_error": 1.0}})
    assert run.adaptive["babyai"] is before  # all of its environments failed


def test_the_adaptive_horizon_steps_back_once_from_a_collapse():
    assert horizons_of([0.4] * 5 + [0.1] * 5) == [2, 2, 2, 4, 4, 4, 2, 2, 2, 2]
    # The first horizon is the shortest.
    assert horizons_of([0.4, 0.4, 0.1, 0.1, 0.1], cut=0.0) == [2] * 5
    assert horizons_of([0.4, 0.4, 0.1, 0.1, 0.1]) == [2] * 5
    # Two lucky steps at the first horizon do not keep it for ever.
    assert horizons_of([0.03] * 2 + [0.0] * 20)[-1] > 2
    # The collapsed mean is the new best, so the horizon can grow again.
    assert min(horizons_of([0.4] * 4 + [0.05] * 30, rounds=(2, 4, 8, 16))[20:]) >= 4


def test_the_horizons_of_agentgym_rl_are_the_defaults():
    published = {"babyai": "6,13,20", "textcraft": "10,20,30", "sciworld": "10,20,30",
                 "searchqa": "5,8,10", "webarena": "8,12,15"}
    for world, horizon in published.items():
        assert presets("any", world).get("horizon", Config.horizon) == horizon
    assert presets("any", "searchqa")["eval_horizon"] == 30
    assert presets("any", "webarena")["horizon_steps"] == 80 and Config.horizon_steps == 100


def test_items_of_a_step_are_a_function_of_seed_and_step():
    items = [f"babyai_{i}" for i in range(10)]
    steps = [items_at(items, 0, step, 3) for step in range(6)]
    assert steps == [items_at(items, 0, step, 3) for step in range(6)]
    assert all(len(set(step)) == 3 for step in steps)
    assert len({item for step in steps[:3] for item in step}) == 9  # an epoch repeats nothing
    assert steps[:3] != steps[3:]  # the next epoch has another order
    assert steps != [items_at(items, 1, step, 3) for step in range(6)]


def test_learning_rates_follow_their_schedule():
    cfg = SimpleNamespace(lr=0.1, critic_lr=0.2, warmup_steps=4, lr_schedule="constant")
    trained = {name: (None, torch.optim.SGD([torch.zeros(1)])) for name in ("policy", "critic")}
    for step, factor in ((0, 0.25), (1, 0.5), (3, 1.0), (50, 1.0)):
        lr = train.set_learning_rates(SimpleNamespace(cfg=cfg, trained=trained), step, 100)
        rates = [optimizer.param_groups[0]["lr"] for _, optimizer in trained.values()]
        assert rates == [lr, 0.2 * factor] and lr == 0.1 * factor


@pytest.mark.parametrize("text", [
    "", "=", "0", "-1", "3,,4", "3,4,", ",3", "3 4", "3.0", "six", "3,0", "³", "babyai=", "=3",
    "babyai=3 4", "3 babyai=4", "babyai=3=4", "babyai=3,babyai=4", "babyai=3 babyai=4",
    "textcraft=3",
])
def test_malformed_rounds_are_refused(text):
    """The others are read by the doctest."""
    with pytest.raises(ValueError, match="horizon"):
        parse_rounds(text, ["babyai"])


def test_the_learning_rate_rises_and_then_stays_or_falls():
    assert [lr_factor_at(step, 9, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    falling = [lr_factor_at(step, 9, 4, "cosine") for step in range(4, 10)]
    assert falling[0] == 1.0 and falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.1)
