"""A pretrained model before training, after a warm start and after RL: keep and draw the rows.

    python experiments/pretrained.py add WORLD STAGE RESULT.json [RUN COMMIT]
    python experiments/pretrained.py

WORLD: a name that begins with the world's, such as "sciworld find"; "mixture, sciworld find" for
the model of several worlds; "sciworld find seed 1" for another seed, "... float32" for another
dtype. STAGE: raw, warm or rl.
RESULT: what eval.py wrote to --out. RUN: the folder of the sft.py or train.py run, for its flags
and its rows; COMMIT: the one it ran at. Without arguments: the table, and docs/pretrained.png of
what has been through RL, from the rows of "pretrained" and, for random policies and experts,
"references" alone. Where both evaluations kept their items, what GRPO adds to the warm start, item
by item.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import Config  # noqa: E402
from experiments.references import REFERENCES  # noqa: E402
from experiments.studies import play, rows  # noqa: E402
from experiments.studies.report import difference_over_items, in_words  # noqa: E402
from sft import SFTConfig  # noqa: E402

STUDY = "pretrained"
STAGES = {"raw": "zero-shot", "warm": "warm start", "rl": "GRPO"}
POLICIES = {"random": "random policy", "expert": "expert"}
MIXTURE = "mixture, "
POLICIES_OF = {  # world -> its entry in experiments/references.py
    "babyai go-to": "policies_babyai_once",
    "babyai levels": "policies_levels_four",
    "textcraft": "policies_textcraft_20",
    "searchqa": "policies_searchqa_5",
    "sciworld find": "policies_sciworld_find",
}


def add(world, stage, result, run=None, commit=""):
    """Keep one evaluation, with the flags and the rows of the run that made the model.

    `machine` in the row is the one that this is called on. A model without a run has no command:
    the flags of its evaluation are in evaluation["config"].
    """
    assert stage in STAGES, f"a stage is one of {', '.join(STAGES)}, not {stage}"
    evaluation = json.loads(Path(result).read_text())
    assert "success" in evaluation, f"{result} is not the result of one evaluation"
    config = evaluation["config"]
    summary = {"evaluation": evaluation, "model_sha256": config["model_sha256"],
               "seed": config["seed"], "command": "", "commit": commit, "machine": play.machine()}
    metrics = []
    if run:
        metrics = rows.read_lines(Path(run) / "metrics.jsonl")
        flags = json.loads((Path(run) / "config.json").read_text())
        seconds = sum(row.get("seconds_rollout", 0) + row["seconds_update"] for row in metrics)
        summary |= {"flags": flags, "seed": flags["seed"], "command": command_of(flags),
                    "minutes": round(seconds / 60, 1)}
    rows.keep(STUDY, {f"{world}_{stage}": [*metrics, summary]})


def command_of(flags):
    """The command of a run, from the flags in its config.json."""
    script, settings = ("sft.py", SFTConfig) if "demos" in flags else ("train.py", Config)
    empty = [name for name, value in flags.items() if value == ""]
    return shlex.join(["python", script, *play.flags_of(settings, flags, ["resume", *empty])])


def policies():
    """The rows of random policies and experts, in the form of a model's -> {name: [row]}."""
    found = {}
    measured = rows.load("references")
    for world, entry in POLICIES_OF.items():
        figures = measured[entry][0]["figures"]
        random = "uniform" if "uniform" in figures else "imitated"
        config = {"horizon": REFERENCES[entry].horizon}
        for stage, policy in (("random", random), ("expert", "expert")):
            found[f"{world}_{stage}"] = [{"evaluation": {**figures[policy], "config": config}}]
    return found


def report():
    """Print the table and write the picture."""
    kept = rows.load(STUDY) | policies()
    worlds = sorted({name.rpartition("_")[0] for name in kept})
    print("| world, horizon | model | steps, min | held-out success | valid actions | turns |")
    print("|---|---|---|---|---|---|")
    for world in worlds:
        for stage, label in (STAGES | POLICIES).items():
            if f"{world}_{stage}" in kept:
                print(line(world, label, kept[f"{world}_{stage}"]))

    trained = [world for world in worlds if f"{world}_rl" in kept]
    for world in trained:
        warm, rl = (kept[f"{world}_{stage}"][-1]["evaluation"] for stage in ("warm", "rl"))
        if "items" in warm and "items" in rl:
            rise = difference_over_items({0: rl["items"]}, {0: warm["items"]})
            print(f"{world}: GRPO minus warm start over items: {rise}")
    alone = [world for world in trained if not world.startswith(MIXTURE)]
    together = [world for world in trained if world.startswith(MIXTURE)]
    figure, (above, below) = plt.subplots(2, figsize=(2 + 2 * len(alone), 7.5),
                                          layout="constrained", sharey=True)
    draw(above, kept, alone)
    draw(below, kept, together)
    above.set_title("SmolLM2-135M: a model for each world (seed 0 where none is named)")
    below.set_title("one model for these worlds")
    handles, labels = above.get_legend_handles_labels()
    legend = dict(zip(labels, handles))  # each label once
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=6)
    figure.savefig(ROOT / "docs/pretrained.png", dpi=110)
    print("docs/pretrained.png")


def draw(axes, kept, worlds):
    """The bars of some worlds, and lines for the policies that are not models.

    The mixture and other seeds have no rows for what they share with a world's own model: the
    policies, and the model before training.
    """
    names = []
    for place, world in enumerate(worlds):
        own = re.sub(r"( seed \d+| float32)+$", "", world.removeprefix(MIXTURE))
        for number, (stage, label) in enumerate((STAGES | POLICIES).items()):
            source = world if stage in ("warm", "rl") else own
            evaluation = kept[f"{source}_{stage}"][-1]["evaluation"]
            success = evaluation["success"]
            if stage in POLICIES:
                axes.hlines(success, place - 0.38, place + 0.38, colors="0.3",
                            linestyles="--" if stage == "expert" else ":", label=label)
                continue
            x = place + 0.25 * (number - 1)
            low, high = evaluation["ci95"]["success"]
            axes.bar(x, success, 0.22, color=f"C{number}", label=label)
            axes.errorbar(x, success, [[success - low], [high - success]], fmt="none",
                          color="black", capsize=3, label="95 % interval over items")
            axes.text(x, high + 0.02, f"{success:.3f}", ha="center", va="bottom", size=8,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})
        horizon = kept[f"{world}_rl"][-1]["evaluation"]["config"]["horizon"]
        words = map(in_words, world.removeprefix(MIXTURE).split())
        names.append(f"{' '.join(words)},\nhorizon {horizon}")
    axes.set_xticks(range(len(worlds)), names)
    axes.set(ylabel="success on held-out items", ylim=(0, 1.12))


def line(world, label, run):
    """A line of the table."""
    *steps, summary = run
    found = summary["evaluation"]
    low, high = found["ci95"]["success"]
    trained = f"{len(steps)}, {summary['minutes']:.0f}" if steps else ""
    valid = f"{found['valid_actions']:.3f}" if "valid_actions" in found else ""
    return (f"| {world}, {found['config']['horizon']} | {label} | {trained} | "
            f"{found['success']:.3f} [{low:.3f}, {high:.3f}] | {valid} | {found['turns']:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"] and len(sys.argv) in (5, 7):
        add(*sys.argv[2:])
    elif len(sys.argv) == 1:
        report()
    else:
        sys.exit(__doc__)
