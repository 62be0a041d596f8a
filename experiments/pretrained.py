"""A pretrained model, as it comes -> warm start -> RL: keep the rows of the runs, and draw them.

    python experiments/pretrained.py add WORLD STAGE RESULT.json [RUN COMMIT]
    python experiments/pretrained.py policies WORLD HORIZON
    python experiments/pretrained.py

STAGE: raw, warm or rl. RESULT: what eval.py wrote to --out. RUN: the folder of the sft.py or
train.py run, for its flags and its rows; COMMIT: the one it ran at. `policies` plays the world's
expert and the uniformly random policy (where a world does not list its valid actions, the one that
the built-in model was trained to imitate). Without arguments: the table and docs/pretrained.png,
from experiments/results/pretrained.jsonl.gz alone.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from eval import bootstrap  # noqa: E402
from experiments.studies import rows  # noqa: E402
from experiments.studies.report import in_words  # noqa: E402

STUDY = "pretrained"
STAGES = {"raw": "as it comes", "warm": "warm start", "rl": "GRPO"}
POLICIES = {"random": "random policy", "expert": "expert"}


def add(world, stage, result, run=None, commit=""):
    """Keep one evaluation, with the flags and the rows of the run that made the model."""
    summary = {"evaluation": json.loads(Path(result).read_text())}
    metrics = []
    if run:
        metrics = rows.read_lines(Path(run) / "metrics.jsonl")
        summary["flags"] = json.loads((Path(run) / "config.json").read_text())
        summary["minutes"] = round(sum(map(seconds, metrics)) / 60, 1)
        summary["commit"] = commit
    keep(world, stage, [*metrics, summary])


def seconds(row):
    return row.get("seconds_rollout", 0) + row["seconds_update"]


def add_policies(world, horizon):
    """Keep what the expert and a random policy reach on the held-out items."""
    from experiments.policies import measure

    found = measure(world, horizon=horizon)
    found["random"] = found.get("uniform", found["imitated"])
    for label in POLICIES:
        success = list(found[label]["success"].values())
        keep(world, label, [{"evaluation": {
            "success": sum(success) / len(success),
            "ci95": {"success": bootstrap(success, 0)},
            "turns": sum(found[label]["turns"].values()) / len(success),
            "config": {"samples": 1, "items": len(success), "horizon": int(horizon)},
        }}])


def keep(world, stage, new):
    rows.save(STUDY, rows.load(STUDY) | {f"{world}_{stage}": new})


def report():
    """Print the table and write the picture."""
    kept = {name: run[-1] for name, run in rows.load(STUDY).items()}
    worlds = sorted({name.rpartition("_")[0] for name in kept})
    print("| world, horizon | model | steps, min | held-out success | valid actions | turns |")
    print("|---|---|---|---|---|---|")
    figure, axes = plt.subplots(figsize=(2 + 2.2 * len(worlds), 4), layout="constrained")
    for place, world in enumerate(worlds):
        for number, (stage, label) in enumerate((STAGES | POLICIES).items()):
            summary = kept.get(f"{world}_{stage}")
            x = place + 0.25 * (number - 1)
            if summary is None:
                axes.text(x, 0.01, "not measured", rotation=90, ha="center", fontsize=8)
                continue
            steps = len(rows.load(STUDY)[f"{world}_{stage}"]) - 1
            print(line(world, label, summary, steps))
            success = summary["evaluation"]["success"]
            low, high = summary["evaluation"]["ci95"]["success"]
            if stage in STAGES:
                axes.bar(x, success, 0.22, color=f"C{number}", label=label if place == 0 else None)
                bar = axes.errorbar(x, success, [[success - low], [high - success]], fmt="none",
                                    color="black", capsize=3)
                axes.text(x, high + 0.01, f"{success:.3f}", ha="center", va="bottom")
            else:
                axes.hlines(success, place - 0.38, place + 0.38, colors="0.3",
                            linestyles="--" if stage == "expert" else ":",
                            label=label if place == 0 else None)
    horizons = [kept[f"{world}_warm"]["evaluation"]["config"]["horizon"] for world in worlds]
    names = [" ".join(map(in_words, world.split())) for world in worlds]
    axes.set_xticks(range(len(worlds)), [f"{n}, horizon {h}" for n, h in zip(names, horizons)])
    bar.set_label("95 % interval\nover items")
    axes.set(ylabel="success on held-out items", ylim=(0, 1.04), title="SmolLM2-135M, seed 0")
    figure.legend(loc="outside right upper")
    figure.savefig(ROOT / "docs/pretrained.png", dpi=110)
    print("docs/pretrained.png")


def line(world, label, summary, steps):
    """A line of the table."""
    found = summary["evaluation"]
    low, high = found["ci95"]["success"]
    trained = f"{steps}, {summary['minutes']:.0f}" if steps else ""
    valid = f"{found['valid_actions']:.3f}" if "valid_actions" in found else ""
    return (f"| {world}, {found['config']['horizon']} | {label} | {trained} | "
            f"{found['success']:.3f} [{low:.3f}, {high:.3f}] | {valid} | {found['turns']:.2f} |")


if __name__ == "__main__":
    command = {"add": add, "policies": add_policies}.get(sys.argv[1] if sys.argv[1:] else "")
    if len(sys.argv) == 1:
        report()
    elif command is None or len(sys.argv) < 4:
        sys.exit(__doc__)
    else:
        command(*sys.argv[2:])
