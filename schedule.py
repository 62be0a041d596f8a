"""What depends on the training step alone: the horizon, the learning rate, the items.

The horizon is the largest number of turns of a trajectory.

ScalingInter-RL (arXiv 2509.08755) starts with few turns, so that the policy first learns to use
what it knows. It then raises the limit in stages, so that the policy explores; training on long
episodes from the start may collapse. `horizon_at` remembers nothing between calls: a resumed run
has the same horizon at step t as a run that was never interrupted. `adaptive_horizon` is pure, too:
it takes its state as an argument and returns the new one, and checkpoints contain it.

    >>> [horizon_at(step, rounds=(6, 13, 20), every=100) for step in (0, 99, 100, 200, 10_000)]
    [6, 6, 13, 20, 20]
"""

import math
import re
from collections.abc import Sequence

import numpy as np

MIN_RISE = 0.02  # adaptive: success has levelled off if its mean rose by less than this
MIN_TRUNCATED = 0.05  # adaptive: longer horizons help only if more trajectories than this are cut


def _is_positive_integer(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def lr_factor_at(step: int, steps: int, warmup: int, kind: str = "constant") -> float:
    """What the learning rate is multiplied by at `step` (counted from 0) of `steps`.

    It rises linearly to 1 over `warmup` steps. Then it stays at 1 (kind "constant") or falls to
    0.1 along a cosine (kind "cosine"). Raises ValueError for another kind.

    >>> [round(lr_factor_at(s, 10, 2, "cosine"), 2) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.13]
    """
    if kind not in ("constant", "cosine"):
        raise ValueError(f"unknown learning rate schedule '{kind}'; choose from constant, cosine")
    if step < warmup or kind == "constant":
        return min(1.0, (step + 1) / max(1, warmup))
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def horizon_at(step: int, rounds: Sequence[int] = (6, 13, 20), every: int = 100,
               kind: str = "scaling_inter") -> int:
    """The horizon at `step` (counted from 0).

    rounds: the horizons in the order of training. every: the number of steps at each horizon
    except the last. kind "scaling_inter" gives rounds[step // every], and the last round after
    that. kind "fixed" takes exactly one round and uses it at every step.
    Raises ValueError for arguments that make no schedule.
    """
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer >= 0, not {step!r}")
    if not rounds or not all(_is_positive_integer(r) for r in rounds):
        raise ValueError(f"the horizon must be one or more positive integers, not {rounds!r}")
    if not _is_positive_integer(every):
        raise ValueError(
            f"the number of steps a horizon lasts must be an integer >= 1, not {every!r}")
    if kind == "fixed":
        if len(rounds) > 1:
            raise ValueError(
                f"a fixed horizon is one number, not {len(rounds)} of them: {rounds!r}")
        return rounds[0]
    if kind == "scaling_inter":
        stage = min(step // every, len(rounds) - 1)
        return rounds[stage]
    if kind == "adaptive":
        raise ValueError("the adaptive horizon depends on metrics: use `adaptive_horizon`")
    raise ValueError(
        f"unknown horizon schedule '{kind}'; choose from fixed, scaling_inter, adaptive")


def adaptive_start(rounds: Sequence[int], window: int = 5) -> dict:
    """The state of `adaptive_horizon` before the first step, whose horizon is rounds[0].

    rounds: the horizons, shortest first. window: the number of steps that a mean is taken over.
    Raises ValueError if `rounds` or `window` is not positive integers.
    """
    horizon_at(0, rounds)  # checks `rounds`
    if not _is_positive_integer(window):
        raise ValueError(f"the number of steps of a mean must be an integer >= 1, not {window!r}")
    return {
        "rounds": list(rounds),
        "window": window,
        "stage": 0,  # the horizon is rounds[stage]
        "success": [],  # of the last steps at this horizon, at most 2 * window
        "truncated": [],  # of the last steps at this horizon, at most window
        "best": 0.0,  # the highest mean success so far
    }


def adaptive_horizon(state: dict, metrics: dict) -> tuple[int, dict]:
    """The horizon of the next step, chosen from the metrics of this step.

    metrics: the step's metrics over all its trajectories: "success", "truncated" and, where it is
    there, "truncated/length", the share cut by --max_length, which a longer horizon would not help.
    state: from `adaptive_start` or the last call; numbers and lists that survive JSON.
    -> (horizon, new state). `state` is not modified.

    The mean success of the last `window` steps at this horizon is compared with the mean of the
    `window` steps before them:
      - levelled off (it rose by less than 0.02 while the horizon cuts more than 0.05 of the
        trajectories): the next round.
      - collapsed (it is below half of the best mean so far, at any horizon): one round back, or
        the first round again, and the collapsed mean becomes the new best.

    >>> state, horizons = adaptive_start((2, 4), window=1), []
    >>> for success in (0.1, 0.3, 0.31, 0.4, 0.1):
    ...     horizon, state = adaptive_horizon(state, {"success": success, "truncated": 0.5})
    ...     horizons.append(horizon)
    >>> horizons
    [2, 2, 4, 4, 2]
    """
    rounds = state["rounds"]
    window = state["window"]
    stage = state["stage"]
    best = state["best"]
    success = [*state["success"], metrics["success"]][-2 * window:]
    cut_by_horizon = metrics["truncated"] - metrics.get("truncated/length", 0.0)
    truncated = [*state["truncated"], cut_by_horizon][-window:]

    if len(success) >= window:
        mean_success = math.fsum(success[-window:]) / window
        collapsed = mean_success < best / 2
        if collapsed:
            stage = max(0, stage - 1)
            best = mean_success
            success = []
            truncated = []
        else:
            best = max(best, mean_success)
            if len(success) == 2 * window:
                mean_before = math.fsum(success[:window]) / window
                levelled_off = mean_success - mean_before < MIN_RISE
                often_cut = math.fsum(truncated) / window > MIN_TRUNCATED
                if levelled_off and often_cut:
                    stage = min(stage + 1, len(rounds) - 1)

    # The means of a new horizon are taken over steps at that horizon only.
    if stage != state["stage"]:
        success = []
        truncated = []
    changes = {"stage": stage, "success": success, "truncated": truncated, "best": best}
    return rounds[stage], state | changes


def parse_rounds(text: str, world: str) -> tuple[int, ...]:
    """Read the rounds of `world` from a flag that has one list for all worlds or one per world.

    Raises ValueError if the text cannot be read, names a world twice or has no entry for `world`.

    >>> parse_rounds("6,13,20", "babyai")
    (6, 13, 20)
    >>> parse_rounds("babyai=6,13,20 textcraft=10,20,30", "textcraft")
    (10, 20, 30)
    """
    per_world = "=" in text
    parts = text.split() if per_world else [text.strip()]
    entries = {}  # name of the world (None: all worlds) -> its list, as text
    for part in parts:
        match = re.fullmatch(r"(?:(\w+)=)?([1-9][0-9]*(?:,[1-9][0-9]*)*)", part)
        if not match or (match[1] is None and per_world):
            raise ValueError(f"cannot read the horizon '{text}'; "
                             "write 6,13,20 or babyai=6,13,20 textcraft=10,20,30")
        name, numbers = match.groups()
        if name in entries:
            raise ValueError(f"the horizon '{text}' names '{name}' twice")
        entries[name] = numbers
    numbers = entries.get(world if per_world else None)
    if numbers is None:
        raise ValueError(f"the horizon '{text}' has no entry for '{world}'; add {world}=6,13,20")
    return tuple(int(number) for number in numbers.split(","))


def items_at(items: Sequence[str], seed: int, step: int, count: int) -> list[str]:
    """The items of a training step, in an order that is a function of (seed, step) alone.

    Every epoch has a new order, and no item comes twice in a step. The items that are left over at
    the end of an epoch, fewer than `count`, are not played in it. Raises ValueError for fewer than
    `count` items.
    """
    if len(items) < count:
        raise ValueError(f"a step takes {count} items, but there are {len(items)}")
    steps_per_epoch = len(items) // count
    epoch, part = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(items))
    return [items[i] for i in order[part * count:(part + 1) * count]]
