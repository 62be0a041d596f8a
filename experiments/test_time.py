"""What more samples and more turns are worth at test time, before and after RL.

    python experiments/test_time.py WORLD [MODEL...] [--before MODEL --name NAME] [--samples 16]

MODEL: folders of models after RL, one per seed (default runs/study/horizon/WORLD_scaling_s*/final,
which `experiments/study.py horizon` leaves). --before: the model that RL started from (default: the
built-in one); --name: what the table and the pictures call it.

Every held-out item is played --samples times with the longest of the horizons below. No prompt
tells the horizon, and a trajectory draws the same random numbers at every horizon. So the same
evaluation gives the success within fewer turns: the successes that took no more turns. avg@k is the
mean success, pass@k the probability that one of k samples succeeds (the unbiased estimate).

Writes the rows of WORLD, or of "WORLD, NAME", in experiments/results/test_time.jsonl.gz, each when
it is measured, and, from all rows, docs/test_time.png and a table. Without arguments: those alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from eval import bootstrap, pass_at_k  # noqa: E402
from experiments.studies import rows  # noqa: E402
from experiments.studies.play import machine, revision  # noqa: E402
from experiments.studies.report import in_words  # noqa: E402

WORK = ROOT / "runs/test_time"  # for eval.py's output, which is not kept
HORIZONS = {"babyai": (1, 2, 3, 4, 6, 8), "textcraft": (2, 3, 5, 8, 12)}
SHOWN = {"babyai": 4, "textcraft": 8}  # the horizon of the figure over k: the last in training
KS = (1, 2, 4, 8, 16)
BUILT_IN = Path("tiny")


def within(trajectories, horizon, samples=KS[-1]):
    """What these trajectories, `samples` of each item, would have reached with `horizon` turns.

    -> {"success": float, "ci95": [low, high], "pass@k": float for each k of KS up to `samples`}
    """
    by_item = {}
    for t in trajectories:
        if t["status"] != "env_error":
            by_item.setdefault(t["item"], []).append(t["success"] and t["turns"] <= horizon)
    rates = [statistics.mean(wins) for wins in by_item.values()]
    found = {"success": statistics.mean(rates), "ci95": bootstrap(rates, 0)}
    for k in ks_of(samples):
        found[f"pass@{k}"] = statistics.mean(
            pass_at_k(len(wins), sum(wins), k) for wins in by_item.values() if len(wins) >= k
        )
    return found


def ks_of(samples):
    return [k for k in KS if k <= samples]


def measure(world, models, before=BUILT_IN, name="", samples=KS[-1]):
    """Play the held-out items with the models before and after RL, and keep the rows."""
    labels = {"before": before}
    for model in models:
        label = f"after, {model.parent.name}"
        if label in labels:
            sys.exit(f"test_time.py: {labels[label]} and {model} would both be called '{label}'")
        labels[label] = model
    commit = revision()
    # Until a model is measured, its row of an earlier measurement stays.
    key = f"{world}, {name}" if name else world
    found = {row["model"]: row for row in rows.load("test_time").get(key, [])}
    for label, model in labels.items():
        trajectories, sha256, command = play(world, f"{key}, {label}", model, samples)
        found[label] = {
            "model": label,
            "model_sha256": sha256,
            "commit": commit,
            "command": command,
            "seed": 0,
            "machine": machine(),
            "samples": samples,
            "horizons": {h: within(trajectories, h, samples) for h in HORIZONS[world]},
        }
        keep(key, found.values())
    keep(key, [found[label] for label in labels])  # no rows of models that were not given


def keep(key, found):
    rows.save("test_time", rows.load("test_time") | {key: found})


def play(world, label, model, samples):
    """Play the held-out items `samples` times; `label` names the files meanwhile.

    -> the trajectories (of each: item, status, success, turns), the sha256 of the weights, and the
    command.
    """
    model = model if model == BUILT_IN else model.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    # Files for each model: eval.py goes on from the trajectories of one that was interrupted.
    out = WORK / f"{label}.partial"
    result = WORK / f"{label}.result"
    command = ["eval.py", "--env", world, "--model", str(model), "--samples", str(samples)]
    command += ["--horizon", str(HORIZONS[world][-1])]
    subprocess.run(
        [sys.executable, *command, "--out", str(result), "--trajectories", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    trajectories = []
    with out.open() as lines:
        for t in map(json.loads, lines):
            trajectories.append({k: t[k] for k in ("item", "status", "success", "turns")})
    sha256 = json.loads(result.read_text())["config"]["model_sha256"]
    out.unlink()
    result.unlink()
    # The command names the run folder and what is in it, not where it lies.
    text = f"OMP_NUM_THREADS=1 python {' '.join(command)}"
    return trajectories, sha256, text.replace(f"{model.parent.parent}/", "")


def draw(results):
    """Write docs/test_time.png and print a table, from {"WORLD" or "WORLD, NAME": [row per model]}.
    """
    figure, axes = plt.subplots(
        len(results), 2, figsize=(9.2, 3.4 * len(results)), layout="constrained", squeeze=False
    )
    print("| world | model | turns allowed: success | pass@1, 4, 8 or 16 |\n|---|---|---|---|")
    for (key, models), (left, right) in zip(sorted(results.items()), axes):
        world, _, name = key.partition(", ")
        shown = SHOWN[world]
        for number, model in enumerate(models):
            by_horizon = {int(h): figures for h, figures in model["horizons"].items()}
            ks = ks_of(model.get("samples", KS[-1]))
            plot_model(left, right, number, by_horizon, shown, ks)
            print(f"| {key} | {model['model']} | {cells(by_horizon, shown, ks)} |")
        title = f"{in_words(world)}, {name or 'the built-in model'}"
        left.set(title=f"{title}: more samples, {shown} turns", xscale="log")
        left.set(xlabel="samples of an item, k", ylabel="success of at least one (pass@k)")
        left.set_xticks(ks, map(str, ks))
        left.minorticks_off()
        right.set(title=f"{title}: more turns", xlabel="turns allowed", ylabel="success (avg@k)")
        for ax in (left, right):
            ax.set_ylim(0, 1.05 * ax.dataLim.y1)
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("held-out items", fontsize=11)
    figure.savefig(ROOT / "docs/test_time.png", dpi=110)
    print("docs/test_time.png")


def plot_model(left, right, number, by_horizon, shown, ks):
    """pass@k over k on the left axes, success over the horizon on the right ones.

    Args:
        number: 0 for the model before RL, 1, 2, ... for the seeds after RL.
    """
    label = None  # the seeds after RL share the first one's entry in the legend
    if number == 0:
        label = "before RL"
    elif number == 1:
        label = "after RL, each seed"
    color = f"C{min(number, 1)}"
    line = {"color": color, "label": label}
    left.plot(ks, [by_horizon[shown][f"pass@{k}"] for k in ks], "o-", **line)
    horizons = list(by_horizon)
    right.plot(horizons, [figures["success"] for figures in by_horizon.values()], "o-", **line)
    low, high = zip(*(figures["ci95"] for figures in by_horizon.values()))
    band = "95 % interval over items (right)" if number == 1 else None
    right.fill_between(horizons, low, high, alpha=0.15, color=color, lw=0, label=band)


def cells(by_horizon, shown, ks):
    """The last two cells of a line of the table."""
    success = [f"{h}: {figures['success']:.3f}" for h, figures in by_horizon.items()]
    passes = [f"{by_horizon[shown][f'pass@{k}']:.3f}" for k in (1, 4, ks[-1])]
    return f"{', '.join(success)} | {', '.join(passes)}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", nargs="?", choices=list(HORIZONS))
    parser.add_argument("models", nargs="*", metavar="MODEL", type=Path)
    parser.add_argument("--before", default=BUILT_IN, type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--samples", default=KS[-1], type=int, choices=KS[2:])
    args = parser.parse_intermixed_args()  # flags may stand before the MODELs
    if args.world:
        runs = ROOT / "runs/study/horizon"
        models = args.models or sorted(runs.glob(f"{args.world}_scaling_s*/final"))
        if not models:
            parser.error(f"give a MODEL: {runs} has none")
        if (args.before == BUILT_IN) != (not args.name):
            parser.error("--before and --name go together")
        for model in [args.before, *models]:
            if model != BUILT_IN and not model.is_dir():
                parser.error(f"there is no model {model}")
        measure(args.world, models, args.before, args.name, args.samples)
    results = rows.load("test_time")
    if not results:
        sys.exit("test_time.py: nothing is measured yet: give a world")
    draw(results)


if __name__ == "__main__":
    main()
