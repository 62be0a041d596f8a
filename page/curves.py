"""The curves of a run: runs/NAME/curves.png, from its metrics.jsonl."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metrics import columns_of, is_number
from trajectory import read_objects

PLOTS = {  # measure -> the title of its axes
    "success": "success (share of trajectories)", "reward": "reward of a trajectory",
    "turns": "turns of a trajectory; grey: horizon", "entropy": "entropy (nats a token)",
    "kl": "KL divergence (nats a token)", "valid_actions": "valid actions (share of turns)"}
SFT_PLOTS = {
    "loss": "loss (nats a token)", "held_out_loss": "held-out loss (nats a token)",
    "grad_norm": "gradient norm", "eval/success": "held-out success (share of trajectories)",
    "eval/valid_actions": "held-out valid actions (share of turns)",
    "eval/turns": "held-out turns of a trajectory"}
DRAWN_BESIDE = {"success": "eval/success", "turns": "horizon"}  # in the same axes


def all_columns(rows: list[dict]) -> list[str]:
    """The names of the columns that any row of metrics has, in the order of their appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def horizon_changes(rows: list[dict]) -> list[int]:
    """The indices of those rows of metrics whose horizon differs from that of the row before (in a
    mixture: the horizon of any world). A missing horizon counts as unchanged."""
    return [i for i, (before, row) in enumerate(pairwise(rows), 1)
            if any(before.get(key, value) != value for key, value in row.items()
                   if key.startswith("horizon"))]


def draw_curves(run: str | Path) -> None:
    """Draw runs/NAME/curves.png from its metrics.jsonl. The worlds of a mixture have a colour
    each; measures on held-out items are drawn as dots. Axes of values that are not negative start
    at 0. Rows without a step are left out."""
    run = Path(run)
    rows = [row for row in read_objects(run / "metrics.jsonl")[0] if is_number(row.get("step"))]
    columns = all_columns(rows)
    titles = PLOTS if "success" in columns else SFT_PLOTS
    plots = [name for name in titles if columns_of(name, columns)]
    if not plots:  # the run was stopped in its first step
        return
    figure = Figure(figsize=(10.5, 5.8), layout="constrained")
    for place, name in enumerate(plots, 1):
        ax = figure.add_subplot(-(-len(plots) // 3), min(3, len(plots)), place)
        draw_measure(ax, rows, name)
        draw_measure(ax, rows, DRAWN_BESIDE.get(name, ""))
        for i in horizon_changes(rows):
            ax.axvline(rows[i]["step"], color="0.8", lw=1, zorder=0)
        ax.set_title(titles[name], fontsize=11)
        if ax.dataLim.ymin >= 0:
            ax.set_ylim(bottom=0)
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend()
    figure.supxlabel("training step", fontsize=10)
    dots = "; dots: held-out items" * any(c.startswith(("eval/", "held_out")) for c in columns)
    figure.suptitle(f"{run.name}; dark: mean of 5 steps{dots}; vertical: new horizon", fontsize=11)
    figure.savefig(run / "curves.png", dpi=110)


def draw_measure(ax: Axes, rows: list[dict], name: str) -> None:
    """One measure, with a curve for each world: each step in a light colour, and the mean of five
    steps in a dark one. A measure on held-out items, which only some rows have, is drawn as
    dots."""
    for i, key in enumerate(columns_of(name, all_columns(rows))):
        steps, values = np.array([(row["step"], row[key] if is_number(row[key]) else math.nan)
                                  for row in rows if key in row]).T
        world, colour = key.removeprefix(name).strip("/"), f"C{i}"
        if key.startswith(("eval/", "held_out")):
            ax.plot(steps, values, "o-", color=colour, ms=4, lw=0.8)
        elif name == "horizon":
            ax.plot(steps, values, drawstyle="steps-post", color=colour if world else "0.6",
                    ls=":" if world else "-")
        else:
            ax.plot(steps, values, color=colour, alpha=0.3)
            smooth = np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, "valid")
            ax.plot(steps, smooth, color=colour, label=world or None)
