import doctest
import json

import pytest

import schedule
from schedule import TINY, UPSTREAM, adaptive_horizon, adaptive_start, horizon_at, parse_rounds


def test_the_documented_examples_hold():
    result = doctest.testmod(schedule)
    assert result.attempted >= 3 and result.failed == 0


def test_horizon_rises_in_stages_and_stays_at_the_last():
    # walked step by step, as a counter would
    rounds, every, expected = (6, 13, 20), 3, []
    for r in rounds:
        expected += [r] * every
    expected += [20] * 5
    assert [horizon_at(step, rounds, every) for step in range(len(expected))] == expected


def test_defaults_are_those_of_the_paper_on_babyai():
    assert [horizon_at(s) for s in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [6, 6, 13, 13, 20, 20, 20, 20]


def test_one_round_is_constant_under_both_kinds():
    for kind in ("fixed", "scaling_inter"):
        assert {horizon_at(s, (7,), 2, kind) for s in range(10)} == {7}


def test_rounds_may_be_a_list():
    assert horizon_at(1, [2, 5], 1) == 5


@pytest.mark.parametrize(
    "kw, says",
    [
        (dict(rounds=()), "one or more positive"),
        (dict(rounds=(6, 0)), "one or more positive"),
        (dict(rounds=(-6,)), "one or more positive"),
        (dict(rounds=(6.0,)), "one or more positive"),
        (dict(rounds=("6",)), "one or more positive"),
        (dict(rounds=(True,)), "one or more positive"),
        (dict(every=0), ">= 1"),
        (dict(every=-5), ">= 1"),
        (dict(every=2.5), ">= 1"),
        (dict(step=-1), ">= 0"),
        (dict(step=1.5), ">= 0"),
        (dict(kind="linear"), "fixed, scaling_inter"),
        (dict(kind="fixed"), "fixed horizon is one number"),
    ],
)
def test_bad_schedules_are_refused_in_one_line(kw, says):
    with pytest.raises(ValueError, match=says) as e:
        horizon_at(**{"step": 0, **kw})
    assert "\n" not in str(e.value)


def walk(success, truncated=0.5, rounds=(2, 4, 8), window=2):
    horizons, state = [], adaptive_start(rounds, window)
    for value in success:
        horizon, state = adaptive_horizon(state, {"success": value, "truncated": truncated, "loss": 1.0})
        horizons.append(horizon)
    return horizons


def test_the_adaptive_horizon_grows_when_success_levels_off_and_only_then():
    assert walk([0.1 * n for n in range(10)]) == [2] * 10
    assert walk([0.3] * 9) == [2, 2, 2, 4, 4, 4, 4, 8, 8]  # two means of two steps each at every stage
    assert walk([0.3] * 9, truncated=0.05) == [2] * 9  # nothing is gained by more turns


def test_the_adaptive_horizon_steps_back_once_from_a_collapse():
    assert walk([0.4] * 4 + [0.4, 0.1, 0.1] + [0.1] * 3, truncated=0.5) == [2, 2, 2, 4, 4, 4, 2, 2, 2, 2]
    assert walk([0.4, 0.4, 0.1, 0.1, 0.1], truncated=0.0) == [2] * 5  # there is nothing shorter
    assert min(walk([0.4] * 4 + [0.05] * 30, rounds=(2, 4, 8, 16))[20:]) >= 4  # what it fell to is the measure from then on


def test_the_adaptive_state_is_plain_and_is_not_changed():
    state = adaptive_start((2, 4), 1)
    before = json.dumps(state)
    _, after = adaptive_horizon(state, {"success": 0.1 + 0.2, "truncated": 1 / 3})
    assert json.dumps(state) == before and json.loads(json.dumps(after)) == after
    for bad in ((), (0,), (2.0,)):
        with pytest.raises(ValueError, match="one or more positive"):
            adaptive_start(bad)
    with pytest.raises(ValueError, match=">= 1"):
        adaptive_start((2,), 0)


def test_presets_are_usable():
    assert UPSTREAM["babyai"] == ((6, 13, 20), 100, 20)
    assert UPSTREAM["textcraft"] == UPSTREAM["sciworld"] == ((10, 20, 30), 100, 30)
    assert UPSTREAM["searchqa"] == ((5, 8, 10), 100, 30)
    assert UPSTREAM["webarena"] == ((8, 12, 15), 80, 15)
    for table in (UPSTREAM, TINY):
        for preset in table.values():
            assert horizon_at(0, preset.rounds, preset.every) == preset.rounds[0]
            assert list(preset.rounds) == sorted(preset.rounds)
    assert all(p.eval_rounds == p.rounds[-1] for p in TINY.values())


def test_rounds_are_read_from_text():
    assert parse_rounds("6,13,20", "babyai") == (6, 13, 20)
    assert parse_rounds(" 8 ", "textcraft") == (8,)
    both = "babyai=6,13,20  textcraft=10,20,30"
    assert parse_rounds(both, "babyai") == (6, 13, 20)
    assert parse_rounds(both, "textcraft") == (10, 20, 30)


@pytest.mark.parametrize(
    "text",
    ["", " ", "=", "0", "-1", "3,,4", "3,4,", ",3", "3, 4", "3 4", "3.0", "six", "3,0", "babyai=", "=3", "babyai=3,x",
     "babyai=3 4", "babyai=3 textcraft=0", "3 babyai=4", "babyai=3=4", "babyai=3,babyai=4", "babyai=3 babyai=4", "³"],
)  # fmt: skip
def test_malformed_rounds_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match="horizon") as e:
        parse_rounds(text, "babyai")
    assert "\n" not in str(e.value)


def test_a_missing_world_is_named():
    with pytest.raises(ValueError, match="no entry for 'sciworld'"):
        parse_rounds("babyai=6,13,20 textcraft=10,20,30", "sciworld")
