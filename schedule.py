"""The horizon: the largest number of turns of a trajectory, as a pure function of the training step.

ScalingInter-RL (arXiv 2509.08755) starts with few turns, where the policy learns to use what it knows, and raises
the limit in stages, so that it learns to explore before long episodes can collapse. As nothing is remembered
between calls, a resumed run has the same horizon at step t as one that was never interrupted. `adaptive_horizon` is pure,
too: what it remembers is a state that is handed in and out, and kept in the checkpoints.

    >>> [horizon_at(step, rounds=(6, 13, 20), every=100) for step in (0, 99, 100, 200, 10_000)]
    [6, 6, 13, 20, 20]
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple


class Preset(NamedTuple):
    rounds: tuple[int, ...]  # the horizons, in the order of training
    every: int  # steps spent at each but the last
    eval_rounds: int  # the horizon in evaluation


UPSTREAM = {  # the published settings, for real models
    "babyai": Preset((6, 13, 20), 100, 20),
    "textcraft": Preset((10, 20, 30), 100, 30),
    "sciworld": Preset((10, 20, 30), 100, 30),
    "searchqa": Preset((5, 8, 10), 100, 30),
    "webarena": Preset((8, 12, 15), 80, 15),
}
TINY = {  # for the built-in tiny model
    "babyai": Preset((3, 4), 30, 4),
    "textcraft": Preset((3, 5, 8), 25, 8),
    "sciworld": Preset((4, 6), 20, 6),
    "searchqa": Preset((2, 3, 4), 30, 4),
    "webarena": Preset((3, 5, 8), 30, 8),
}


def _is_count(x):
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def lr_at(step: int, steps: int, warmup: int, kind: str = "constant") -> float:
    """The learning rate's factor: it rises over `warmup` steps to 1, then stays, or falls to a tenth as a cosine.

    >>> [round(lr_at(s, 10, 2, "cosine"), 2) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.13]
    """
    if step < warmup or kind == "constant":
        return min(1.0, (step + 1) / max(1, warmup))
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def horizon_at(step: int, rounds: Sequence[int] = (6, 13, 20), every: int = 100, kind: str = "scaling_inter") -> int:
    """The horizon at `step` (counted from 0): rounds[step // every], and the last one from there on.

    kind "fixed" takes exactly one round and uses it throughout.
    """
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer >= 0, not {step!r}")
    if not rounds or not all(_is_count(r) for r in rounds):
        raise ValueError(f"the horizon must be one or more positive integers, not {rounds!r}")
    if not _is_count(every):
        raise ValueError(f"the number of steps a horizon lasts must be an integer >= 1, not {every!r}")
    if kind == "fixed":
        if len(rounds) > 1:
            raise ValueError(f"a fixed horizon is one number, not {len(rounds)} of them: {rounds!r}")
        return rounds[0]
    if kind == "scaling_inter":
        return rounds[min(step // every, len(rounds) - 1)]
    raise ValueError(f"unknown horizon schedule '{kind}'; choose from fixed, scaling_inter, adaptive")


def adaptive_start(rounds: Sequence[int], window: int = 5) -> dict:
    """The state of `adaptive_horizon` before the first step. Its horizon is rounds[0]; `window`: steps that a mean is taken over."""
    horizon_at(0, rounds)
    if not _is_count(window):
        raise ValueError(f"the number of steps of a mean must be an integer >= 1, not {window!r}")
    return {"rounds": list(rounds), "window": window, "stage": 0, "success": [], "truncated": [], "best": 0.0}


def adaptive_horizon(state: dict, metrics: dict) -> tuple[int, dict]:
    """The horizon of the next step, from what this one was like: `metrics` of all its trajectories, of which "success" and "truncated"
    are read. Pure: state (numbers and lists, as JSON keeps them) -> (horizon, new state).

    It compares the mean success of the last `window` steps at this horizon with that of the `window` before them:
      - levelled off (risen by less than 0.02) while more than 0.05 of the trajectories are cut: the next round;
      - collapsed (below half of the best mean so far, at any horizon): one round back. What it falls to is the new best.

    >>> state, horizons = adaptive_start((2, 4), window=1), []
    >>> for success in (0.1, 0.3, 0.31, 0.4, 0.1):
    ...     horizon, state = adaptive_horizon(state, {"success": success, "truncated": 0.5})
    ...     horizons.append(horizon)
    >>> horizons
    [2, 2, 4, 4, 2]
    """
    rounds, w, stage, best = state["rounds"], state["window"], state["stage"], state["best"]
    success = [*state["success"], metrics["success"]][-2 * w:]
    truncated = [*state["truncated"], metrics["truncated"]][-w:]
    if len(success) >= w:
        now = math.fsum(success[-w:]) / w
        if now < best / 2 and stage > 0:
            stage, best = stage - 1, now
        else:
            best = max(best, now)
            if len(success) == 2 * w and now - math.fsum(success[:w]) / w < 0.02 and math.fsum(truncated) / w > 0.05:
                stage = min(stage + 1, len(rounds) - 1)
    if stage != state["stage"]:
        success, truncated = [], []
    return rounds[stage], state | {"stage": stage, "success": success, "truncated": truncated, "best": best}


def parse_rounds(text: str, world: str) -> tuple[int, ...]:
    """The rounds of `world` in the text of a flag: one list for all worlds, or one for each.

    >>> parse_rounds("6,13,20", "babyai")
    (6, 13, 20)
    >>> parse_rounds("babyai=6,13,20 textcraft=10,20,30", "textcraft")
    (10, 20, 30)
    """
    entries = {}  # world -> its list, as text; None stands for all worlds
    for part in text.split() if "=" in text else [text.strip()]:
        m = re.fullmatch(r"(?:(\w+)=)?([1-9][0-9]*(?:,[1-9][0-9]*)*)", part)
        if not m or (m[1] is None and "=" in text):
            raise ValueError(f"cannot read the horizon '{text}'; write 6,13,20 or babyai=6,13,20 textcraft=10,20,30")
        if m[1] in entries:
            raise ValueError(f"the horizon '{text}' names '{m[1]}' twice")
        entries[m[1]] = m[2]
    numbers = entries.get(None) or entries.get(world)
    if numbers is None:
        raise ValueError(f"the horizon '{text}' has no entry for '{world}'; add {world}=6,13,20")
    return tuple(int(n) for n in numbers.split(","))
