"""Pictures of a run: `python view.py runs/NAME` draws runs/NAME/curves.png again (training draws it at every checkpoint)."""

import json
import os
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def draw_curves(run):
    """runs/NAME -> runs/NAME/curves.png from its metrics.jsonl, written whole or not at all. A mixture's worlds have a colour each."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in rows]
    worlds = [key.removeprefix("success/") for key in (rows[0] if rows else ()) if key.startswith("success/")]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for ax, names in zip(axes.flat, (["success"], ["reward"], ["turns", "horizon"], ["entropy"], ["kl"], ["valid_actions"])):
        for name in names:
            own = [f"{name}/{w}" for w in worlds if f"{name}/{w}" in rows[0]]
            for i, key in enumerate(own or [name]):
                values, colour = np.array([r[key] for r in rows], float), f"C{i}"
                if name == "horizon":
                    ax.plot(steps, values, color=colour if own else "0.6", ls=":" if own else "-", drawstyle="steps-post")
                    continue
                smooth = len(values) >= 5
                ax.plot(steps, values, color=colour, alpha=0.3 if smooth else 1, label=None if smooth or not own else worlds[i])
                if smooth:
                    ax.plot(steps, np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, "valid"), color=colour,
                            label=worlds[i] if own else None)
        for at in [s for s, a, b in zip(steps[1:], rows, rows[1:]) if a["horizon"] != b["horizon"]]:
            ax.axvline(at, color="0.8", lw=1, zorder=0)
        if worlds and ax is axes[0, 0]:
            ax.legend()
        ax.set_title(" and ".join(n.replace("_", " ") for n in names))
        ax.set_xlabel("training step")
    figure.suptitle(f"{Path(run).name}: training trajectories, mean of 5 steps over single steps; lines: the horizon grows")
    figure.savefig(Path(run) / "curves.png.tmp", format="png", dpi=110)
    os.replace(Path(run) / "curves.png.tmp", Path(run) / "curves.png")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").exists():
        print("usage: python view.py runs/NAME, the folder of a run (with its metrics.jsonl)", file=sys.stderr)
        sys.exit(2)
    draw_curves(sys.argv[1])
    print(Path(sys.argv[1]) / "curves.png")
