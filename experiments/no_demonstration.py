"""SmolLM2 that chooses among the actions of a world: keep and draw the rows.

    python experiments/no_demonstration.py add NAME COMMIT RESULT.json [RUN]
    python experiments/no_demonstration.py hidden RUN ...
    python experiments/no_demonstration.py

RESULT: what eval.py wrote to --out: of a checkpoint or of final/ of RUN, a train.py run, or of the
model before training. NAME: of the route and the seed, such as babyai_warmup_s0; before training
babyai_before. Evaluations of one run are kept together, by the environment turns after which they
were made. hidden: of runs in BabyAI's go-to levels, by blocks of ten steps, success where the first
observation offers to go to the goal and where it does not, how often the agent turns while it does
not, and in how many failures a reply changes nothing of what the agent sees. Without arguments: the
table, and docs/no_demonstration.png.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments.pretrained import command_of  # noqa: E402
from experiments.studies import play, report, rows  # noqa: E402
from trajectory import read_trajectories  # noqa: E402
from worlds import goal_line  # noqa: E402

STUDY = "no_demonstration"
ROUTES = {  # of a name, which begins with its panel -> the row before training, and its label
    "babyai_choose": ("babyai_choose_before", "the whole conversation, lr 5e-5"),
    "babyai_task": ("babyai_task_before", "the last observation, lr 3e-5, warm-up of 2 steps"),
    "babyai_warmup": ("babyai_task_before", "the last observation, lr 4e-5, warm-up of 10 steps"),
    "babyai_falling": ("babyai_task_before", "the last observation, lr 2e-5, falling to a tenth"),
    "rooms_task": ("rooms_task_before", "the last observation, lr 3e-5, falling to a tenth"),
    "rooms_warm": ("rooms_warm_before", "the same, after 240 demonstrations (1,016 turns)"),
    "textcraft_backward": ("textcraft_before", "the expert plays to within k turns of the goal"),
    "textcraft_warm": ("textcraft_warm_before", "the same, after 480 demonstrations (3,441 turns)"),
    "searchqa_names": ("searchqa_before", "the last observation, lr 2e-5, falling to a tenth"),
}
PANELS = {"babyai": "BabyAI's go-to levels, 250 held-out items",
          "rooms": "BabyAI's rooms, 250 held-out items",
          "textcraft": "TextCraft, all depths, 200 held-out items",
          "searchqa": "SearchQA, 450 held-out items"}


def add(name, commit, result, run=""):
    """Keep an evaluation, and the rows of the training before it."""
    found = json.loads(Path(result).read_text())
    config = found["config"]
    row = play.held_out_figures(found) | {
        "command": "", "commit": commit, "seed": config["seed"], "machine": play.machine(),
        "model_sha256": config["model_sha256"], "seconds": 0, "environment_turns": 0}
    metrics, points = [], []
    if run:
        flags = json.loads((Path(run) / "config.json").read_text())
        metrics = rows.read_lines(Path(run) / "metrics.jsonl")
        step = re.search(r"step_(\d+)", config["model"])
        played = metrics[: int(step[1])] if step else metrics
        points = [p for r in rows.load(STUDY).get(name, []) for p in r.get("held_out", [])]
        points = [p for p in points if p["step"] != len(played)]
        points.append(play.point(played, found) | {"step": len(played), "ci95": row["ci95"]})
        points.sort(key=lambda p: p["step"])
        row |= {"command": command_of(flags), "seed": flags["seed"], "held_out": points,
                "seconds": round(play.seconds(metrics)),
                "environment_turns": round(play.turns_played(metrics))}
        if points[-1]["step"] != len(played):  # the row is that of the last evaluation
            row = rows.load(STUDY)[name][-1] | {"held_out": points}
    rows.keep(STUDY, {name: [*map(play.training_row, metrics), row]})


def hidden(*runs):
    """Print what the file's docstring says of `hidden`."""
    for run in map(Path, runs):
        files = sorted(run.glob("trajectories/step_*.jsonl"))
        for first in range(0, len(files), 10):
            played = [t for file in files[first:first + 10] for t in read_trajectories(file)
                      if t.status != "env_error"]
            success, turned, stuck = {True: [], False: []}, [], []
            for t in played:
                said = [m["content"] for m in t.messages[2:]]
                *_, colour, thing = goal_line(said[0]).split()  # "... go to the grey door"
                offer = re.compile(f'"go to {colour} [^"]*{thing} ')  # "go to grey locked door 1"
                offered = [bool(offer.search(observation)) for observation in said[::2]]
                success[offered[0]].append(t.success)
                turned += [reply.startswith("turn ") for is_there, reply
                           in zip(offered, said[1::2]) if not is_there]
                if not t.success:
                    stuck.append(any(a == b for a, b in pairwise(said[2::2])))
            print(f"{run.name} from step {first}: goal offered {fmean(success[True]):.2f} of "
                  f"{len(success[True])}, hidden {fmean(success[False]):.2f} of "
                  f"{len(success[False])}; turns while hidden {fmean(turned):.2f}; "
                  f"nothing changed in {sum(stuck)} of {len(stuck)} failures")


def draw():
    """Held-out success over environment turns, a panel a world, a line a route and seed."""
    kept = {name: run[-1] for name, run in rows.load(STUDY).items()}
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), sharey=True)
    panels = dict(zip(PANELS, axes.flat, strict=True))
    drawn = set()
    for name, row in kept.items():
        route, _, seed = name.rpartition("_s")
        if route not in ROUTES or not seed.isdecimal():
            continue
        first, label = ROUTES[route]
        world, before = route.split("_")[0], kept[first]
        last = {"turns": row["environment_turns"], "success": row["success"], "ci95": row["ci95"]}
        points = [p for p in row.get("held_out") or [last]  # those on all items
                  if len(p.get("items", row["items"])) == len(before["items"])]
        points.insert(0, {**before, "turns": 0})
        values = [p["success"] for p in points]
        bars = [[v - p["ci95"][0] for v, p in zip(values, points)],
                [p["ci95"][1] - v for v, p in zip(values, points)]]
        panels[world].errorbar(
            [p["turns"] for p in points], values, bars, capsize=3, marker="o",
            color=f"C{[*ROUTES].index(route)}", linestyle=["-", "--"][int(seed) % 2],
            label=label if route not in drawn else None)
        drawn.add(route)
        print(f"{name:22}", ", ".join(f"{p['turns']:.0f} turns {p['success']:.3f} "
                                      f"[{p['ci95'][0]:.3f}, {p['ci95'][1]:.3f}]" for p in points),
              "; item by item", report.difference_over_items(
                  {0: points[-1].get("items", row["items"])}, {0: before["items"]}))
    panels["babyai"].axhline(0.297, color="grey", linestyle=":", label="random policy")
    for world, ax in panels.items():
        ax.set(xlabel="environment turns", title=PANELS[world], ylim=(0, 1))
        ax.legend(loc="lower right" if world == "babyai" else "upper left", fontsize=8.5)
    figure.supylabel("success (dashed: odd seeds)")
    figure.suptitle("SmolLM2-135M chooses among the actions of a world", fontsize=12)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/no_demonstration.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        add(*sys.argv[2:])
    elif sys.argv[1:2] == ["hidden"]:
        sys.exit(hidden(*sys.argv[2:]))
    elif sys.argv[1:]:
        sys.exit(__doc__)
    draw()
