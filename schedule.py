"""What depends on the training step alone: the horizon, the learning rate, the items.

The horizon is the largest number of turns of a trajectory. ScalingInter-RL (arXiv 2509.08755)
starts with few turns, so that the policy first learns to use what it knows, and raises the limit in
stages, so that it explores; training on long episodes from the start may collapse. No function here
remembers anything between calls: a resumed run has the same horizon, learning rate and items at
step t as a run that was never interrupted.

    >>> [horizon_at(step, rounds=(6, 13, 20), every=100) for step in (0, 99, 100, 200, 10_000)]
    [6, 6, 13, 20, 20]
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_RISE = 0.02  # adaptive: success has levelled off if its mean rose by less than this
MIN_CUT = 0.05  # adaptive: a longer horizon helps only if it cuts more trajectories than this


@dataclass
class Horizon:
    """the horizon"""

    # fixed: one horizon throughout | adaptive: a stage ends when success levels off
    horizon_schedule: str = field(
        default="scaling_inter", metadata={"choices": ("scaling_inter", "fixed", "adaptive")})
    # training steps of a stage; adaptive: success is averaged over windows of half as many steps
    horizon_steps: int = field(default=100, metadata={"choices": None})


def horizon_at(step: int, rounds: Sequence[int] = (6, 13, 20), every: int = 100,
               kind: str = "scaling_inter") -> int:
    """The horizon at `step`, counted from 0: rounds[0] for `every` steps, then rounds[1] ..., and
    the last round from then on. Raises ValueError for rounds or steps below 1, for rounds that
    fall, and for a kind "fixed" with several rounds."""
    if not rounds or min([*rounds, every]) < 1 or list(rounds) != sorted(rounds):
        raise ValueError("the horizon, and the steps that a stage of it lasts, are at least 1, and "
                         f"it never falls, not {rounds}, {every}")
    if kind == "fixed" and len(rounds) > 1:
        raise ValueError(f"a fixed horizon is one number, not {rounds}")
    return rounds[min(step // every, len(rounds) - 1)]


def adaptive_horizon(state: dict, success: float, cut: float, num_rounds: int,
                     window: int) -> dict:
    """The adaptive schedule's next state. The horizon is rounds[state["stage"]].

    state: {"stage": 0} before the first step; numbers and lists that survive JSON. success, cut:
    the shares of this step's trajectories that succeeded, and that the horizon cut. window: the
    number of steps that a mean is taken over.

    The mean success of the last `window` steps at this horizon is compared with the mean of the
    `window` steps before them. If it has levelled off while the horizon cuts many trajectories, the
    next stage follows. If it is below half of the best mean so far, at any horizon, success has
    collapsed: one stage back, and the collapsed mean becomes the new best.

    >>> state, stages = {"stage": 0}, []
    >>> for success in (0.1, 0.3, 0.31, 0.4, 0.1):
    ...     state = adaptive_horizon(state, success, 0.5, num_rounds=2, window=1)
    ...     stages.append(state["stage"])
    >>> stages
    [0, 0, 1, 1, 0]
    """
    stage, best = state["stage"], state.get("best", 0.0)
    successes = [*state.get("success", []), success][-2 * window:]
    cuts = [*state.get("cut", []), cut][-window:]
    if len(successes) >= window:
        mean = math.fsum(successes[-window:]) / window
        if mean < best / 2:  # collapsed
            stage, best, successes, cuts = max(0, stage - 1), mean, [], []
        else:
            best = max(best, mean)
            if len(successes) == 2 * window:
                rise = mean - math.fsum(successes[:window]) / window
                if rise < MIN_RISE and math.fsum(cuts) / window > MIN_CUT:
                    stage = min(stage + 1, num_rounds - 1)
    if stage != state["stage"]:  # a mean is taken over steps at one horizon only
        successes, cuts = [], []
    return {"stage": stage, "best": best, "success": successes, "cut": cuts}


def lr_factor_at(step: int, steps: int, warmup: int, kind: str = "constant") -> float:
    """What the learning rate is multiplied by at `step`, counted from 0: a linear rise to 1 over
    `warmup` steps, then 1 ("constant"), or a cosine to 0.1 at `steps` ("cosine").

    >>> [round(lr_factor_at(s, 10, 2, "cosine"), 2) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.13]
    """
    if step < warmup or kind == "constant":
        return min(1.0, (step + 1) / max(1, warmup))
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def items_at(items: Sequence[str], seed: int, step: int, count: int) -> list[str]:
    """The items of a training step. Every epoch has a new order, a function of (seed, epoch); the
    items that are left over at its end, fewer than `count`, are not played in it. Raises ValueError
    if there are fewer than `count` items, or `count` is 0."""
    if not 0 < count <= len(items):
        raise ValueError(f"a step cannot take {count} of {len(items)} items (--items_per_step)")
    epoch, part = divmod(step, len(items) // count)
    order = np.random.default_rng([seed, epoch]).permutation(len(items))
    return [items[i] for i in order[part * count:(part + 1) * count]]


def rows_of_step(count: int, batch: int, seed: int, step: int) -> list[int]:
    """The indices, below `count`, of the demonstrations of a supervised step. Each epoch has a new
    order, which is a function of (seed, epoch); its last step takes what is left."""
    epoch, part = divmod(step, -(-count // batch))
    order = np.random.default_rng([seed, epoch, 2]).permutation(count)
    return order[part * batch:(part + 1) * batch].tolist()


def parse_rounds(text: str, worlds: Collection[str]) -> dict[str, list[int]]:
    """World -> its rounds in --horizon, which has one list for all worlds or one for each. Raises
    ValueError if the text cannot be read, or names a world twice, another world, or not all worlds.

    >>> parse_rounds("6,13,20", ["babyai"])
    {'babyai': [6, 13, 20]}
    >>> parse_rounds("babyai=6,13,20 textcraft=10,20,30", ["babyai", "textcraft"])
    {'babyai': [6, 13, 20], 'textcraft': [10, 20, 30]}
    """
    parts = text.split() if "=" in text else [f"{world}={text.strip()}" for world in worlds]
    matches = [re.fullmatch(r"(\w+)=([1-9][0-9]*(?:,[1-9][0-9]*)*)", part) for part in parts]
    rounds = {match[1]: [*map(int, match[2].split(","))] for match in matches if match}
    if len(rounds) < len(parts) or rounds.keys() != set(worlds):
        raise ValueError(f"cannot read the horizon '{text}' of {', '.join(worlds)}; write 6,13,20 "
                         "or babyai=6,13,20 textcraft=10,20,30, each world once")
    return rounds
