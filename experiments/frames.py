"""An episode turn by turn, beside the run's success: python experiments/frames.py RUN PICTURE

Draws a successful episode of a BabyAI run's last ten steps: the one with the most turns. A frame is
a turn: the room from above, what the agent was told, what it said and what that earned.
"""

import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import read_json  # noqa: E402
from page.replay import Replay  # noqa: E402
from trajectory import read_objects, read_trajectories, reply_spans  # noqa: E402

COLOURS = ["#d62728", "#2a9d3a", "#1f6fd0", "#8e44ad", "#d4a900", "#808890"]  # as on the page
MARKERS = {"#": "s", "o": "o", "b": "s", "k": "P", "d": "s", "c": "s", "l": "X"}
MOST_FRAMES = 4


def draw_room(axes, width, cells, agent):
    """The agent's room from above. See `page.replay.draw_room`."""
    x, y, direction = agent
    row = [cells[2 * (y * width + k)] in "#dcl" for k in range(width)]
    column = [cells[2 * (k * width + x)] in "#dcl" for k in range(len(cells) // 2 // width)]
    left, top = (max(k for k in range(at) if line[k]) for line, at in ((row, x), (column, y)))
    right, bottom = (line.index(True, at + 1) for line, at in ((row, x), (column, y)))
    for place in range(len(cells) // 2):
        kind, colour = cells[2 * place], cells[2 * place + 1]
        at = place % width, place // width
        if not (left <= at[0] <= right and top <= at[1] <= bottom):
            continue
        if kind == "#":
            axes.add_patch(plt.Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, color="#5b636c"))
        elif kind in MARKERS:
            edge = COLOURS[int(colour)]
            axes.plot(*at, MARKERS[kind], markersize=10, markeredgecolor=edge, markeredgewidth=2,
                      markerfacecolor="none" if kind in "bd" else edge)
    axes.plot(x, y, marker=(3, 0, -90 - 90 * direction), markersize=12, color="#111")
    axes.set(xlim=(left - 0.5, right + 0.5), ylim=(bottom + 0.5, top - 0.5), aspect="equal")
    axes.axis("off")


def shortened(text, lines):
    """The text in at most so many lines of 28 columns."""
    return "\n".join(textwrap.wrap(" ".join(text.split()), 28, max_lines=lines, placeholder=" ..."))


def draw(run, picture):
    """Draw the episode and the run's success."""
    rows = read_objects(run / "metrics.jsonl")[0]
    files = sorted((run / "trajectories").glob("step_*.jsonl"))[-10:]
    played = [t for file in files for t in read_trajectories(file)
              if t.success and t.valid_actions == t.turns <= MOST_FRAMES]
    t = max(played, key=lambda t: t.turns)
    goal = t.messages[2 * t.turns + 1]["content"].split(" to ")[-1]  # what the last reply goes to
    scenes = Replay(read_json(run / "config.json")).scenes(t)
    figure, axes = plt.subplots(1, t.turns + 1, figsize=(2.3 * t.turns + 2.5, 4.5),
                                width_ratios=[1] * t.turns + [1.05])
    for turn, (start, end) in enumerate(reply_spans(t.mask)):
        draw_room(axes[turn], *scenes[turn]["room"])
        told, said = (t.messages[2 + 2 * turn + k]["content"] for k in (0, 1))
        told = ". ".join(s for s in told.split("Available")[0].split(". ") if goal in s) or told
        axes[turn].set_title(f"turn {turn + 1}", fontsize=11)
        axes[turn].text(0, -0.04, f"it sees: {shortened(told, 6)}", va="top", fontsize=8.5,
                        color="#626a74", transform=axes[turn].transAxes)
        axes[turn].text(0, -0.55, f"it says:\n{said}\n\nreward: {sum(t.rewards[start:end]):g}",
                        va="top", fontsize=9.5, color="#0b6b3a", weight="bold",
                        transform=axes[turn].transAxes)
    success = [row["success"] for row in rows]
    smooth = [sum(x := success[max(0, k - 4):k + 1]) / len(x) for k in range(len(success))]
    axes[-1].plot(success, alpha=0.3, color="#1f77b4")
    axes[-1].plot(smooth, color="#1f77b4")
    axes[-1].set(ylim=(0, 1.03), xlabel="training step", title="success while training")
    axes[-1].yaxis.tick_right()
    axes[-1].spines[["top", "left"]].set_visible(False)
    figure.subplots_adjust(left=0.02, right=0.965, top=0.93, bottom=0.43, wspace=0.16)
    figure.savefig(picture, dpi=110)
    print(f"{picture}: {t.item}, step {t.step}, sample {t.sample}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), sys.argv[2])
