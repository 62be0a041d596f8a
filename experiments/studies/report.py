"""The table and the picture of a study, from its rows alone.

`results` is everywhere {run name: rows}. The last of a run's rows is its summary.
"""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from experiments.studies.runs import (  # noqa: E402
    BASELINES,
    MIDWAY,
    TRANSFER_STEPS,
    Run,
    runs_of,
)

ROOT = Path(__file__).parent.parent.parent
IN_DOCS = ("algorithms", "horizon", "transfer")  # whose pictures the docs show

# What pictures call the worlds and the labels of the runs.
WORDS = {
    "babyai": "BabyAI",
    "textcraft": "TextCraft",
    "searchqa": "SearchQA",
    "sciworld": "SciWorld",
    "webarena": "WebArena",
    "grpo": "GRPO",
    "ppo": "PPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "scaling": "growing (ScalingInter)",
    "long": "fixed, long",
    "short": "fixed, short",
}


def in_words(name):
    """A world, several of them with commas, or a label, as pictures call it."""
    return ", ".join(WORDS.get(part, part) for part in name.split(","))


# ---- statistics ----

# 97.5 % quantiles of Student's t, by the number of pairs.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306,
           10: 2.262}


def paired(a, b):
    """Mean of a - b over the pairs, and half the width of its 95 % interval (Student's t)."""
    differences = [x - y for x, y in zip(a, b)]
    n = len(differences)
    half = STUDENT[n] * statistics.stdev(differences) / n**0.5
    return statistics.mean(differences), half


def with_verdict(mean, half):
    verdict = "" if abs(mean) > half else ", not significant"
    return f"{mean:+.3f} ± {half:.3f}{verdict}"


def difference(a, b):
    """The paired difference of two {seed: success} with its interval, as text. Fewer than two
    pairs: ""."""
    seeds = a.keys() & b.keys()
    if len(seeds) < 2:
        return ""
    mean_and_half = paired([a[seed] for seed in seeds], [b[seed] for seed in seeds])
    return f"{with_verdict(*mean_and_half)} ({len(seeds)} pairs)"


def difference_over_items(a, b):
    """The mean over items and seeds of a - b, as text, with its 95 % interval over items (normal
    approximation), which says nothing about other seeds.

    Args:
        a, b: {seed: {item: success}}. Items and seeds that one of them lacks are left out.
    """
    seeds = a.keys() & b.keys()
    of_seeds = [found[seed] for found in (a, b) for seed in seeds]
    items = set.intersection(*map(set, of_seeds)) if seeds else ()
    if len(items) < 2:
        return ""
    differences = [statistics.mean(a[seed][item] - b[seed][item] for seed in seeds)
                   for item in sorted(items)]
    half = 1.96 * statistics.stdev(differences) / len(items) ** 0.5
    return f"{with_verdict(statistics.mean(differences), half)} (seeds: {len(seeds)})"


def collapsed(summary):
    """Whether the run ended with less than half of its best success on held-out items, or was
    stopped."""
    best = max(point["success"] for point in summary.get("held_out", [summary]))
    return bool(summary["stopped"]) or summary["success"] < best / 2


def at_end(seeds, name):
    """{seed: a figure on held-out items after training}, for rows that have it.

    seeds: {seed: (training rows, summary)}. name: "success", or "items": {item: success}.
    """
    return {seed: summary[name] for seed, (_, summary) in seeds.items() if name in summary}


def at_half(seeds, name):
    """`at_end` for half of the turns, for runs that were evaluated there: at 4 points, or at half
    and at the end."""
    found = {}
    for seed, (_, summary) in seeds.items():
        points = summary.get("held_out", ())
        half = points[len(points) // 2 - 1] if len(points) in (2, 4) else {}
        if name in half:
            found[seed] = half[name]
    return found


# ---- the table ----

COLUMNS = (
    "world", "run", "seeds", "steps", "environment turns", "min", "held-out success", "score",
    "turns", "valid actions", "success in training, mean of all steps",
)
MIDWAY_COLUMNS = (
    "collapsed", "difference to {0}, 95 %", "over items", "at half of the turns", "difference",
    "at half, over items",
)


def table(study, results):
    """Means and standard deviations over the seeds, as Markdown: a line per world and label."""
    baseline = BASELINES.get(study, "scaling")
    columns = COLUMNS + (MIDWAY_COLUMNS if study in MIDWAY else ())
    lines = [f"| {' | '.join(columns)} |".format(baseline), "|---" * len(columns) + "|"]
    for world in sorted({run.world for run in runs_of(study)}):
        labels = by_label(study, world, results)
        for label, seeds in labels.items():
            cells = [world, label, *common_cells(seeds)]
            if study in MIDWAY:
                is_compared = label not in (baseline, "base")
                cells += midway_cells(seeds, labels.get(baseline, {}) if is_compared else {})
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_label(study, world, results):
    """-> {label: {seed: (training rows, summary)}}. A mixture has a label for each of its
    worlds."""
    found = {}
    for run in runs_of(study):
        if run.world != world or run.name not in results:
            continue
        *training, summary = results[run.name]
        for part, figures in summary.get("worlds", {"": {}}).items():
            label = f"{run.label} {part}".strip()
            found.setdefault(label, {})[run.seed] = training, summary | figures
    return found


def mean_and_spread(values):
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def common_cells(seeds):
    """The cells of one label that every study has, from {seed: (training rows, summary)}."""
    trainings, summaries = zip(*seeds.values())

    def mean(key):
        return statistics.mean(summary[key] for summary in summaries)

    def held_out(key, interval):
        if len(summaries) > 1:
            return mean_and_spread([summary[key] for summary in summaries])
        low, high = summaries[0][interval]
        return f"{summaries[0][key]:.3f} [{low:.3f}, {high:.3f}]"

    # Rows without a score are of worlds where it equals the success.
    has_score = all("score_ci95" in summary for summary in summaries)
    in_training = [statistics.mean(row["success"] for row in rows) for rows in trainings if rows]
    return (
        f"{len(summaries)}",
        f"{statistics.mean(map(len, trainings)):.0f}",
        f"{mean('environment_turns'):.0f}",
        f"{mean('seconds') / 60:.1f}",
        held_out("success", "ci95"),
        held_out("score", "score_ci95") if has_score else held_out("success", "ci95"),
        f"{mean('turns'):.2f}",
        f"{mean('valid_actions'):.3f}",
        f"{statistics.mean(in_training):.3f}" if in_training else "",
    )


def midway_cells(seeds, baseline_seeds):
    """The cells of one label in studies that evaluate on the way: collapsed runs, the difference to
    the baseline at the end, and the same at half of the turns."""
    is_trained = any(training for training, _ in seeds.values())
    number = sum(collapsed(summary) for _, summary in seeds.values())
    cells = [f"{number}" if is_trained else ""]
    for figures_at in (at_end, at_half):
        successes = figures_at(seeds, "success")
        if figures_at is at_half:
            cells.append(mean_and_spread(successes.values()) if len(successes) > 1 else "")
        cells += [
            difference(successes, figures_at(baseline_seeds, "success")),
            difference_over_items(figures_at(seeds, "items"), figures_at(baseline_seeds, "items")),
        ]
    return cells


# ---- the pictures ----


def draw(study, results):
    """Write docs/study_NAME.png, or runs/study/NAME/curves.png if no page shows it."""
    path = ROOT / f"runs/study/{study}/curves.png"
    if study in IN_DOCS:
        path = ROOT / f"docs/study_{study}.png"
    worlds = sorted({run.world for run in runs_of(study) if run.name in results})
    if study == "horizon" and "textcraft" in worlds:
        worlds = ["textcraft"]  # BabyAI is a control
    if study == "transfer":
        figure = matrix(results)
    else:
        figure = curves_over_turns(study, worlds, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


def matrix(results):
    """A line per training of study "transfer", a column per world: the score on held-out items
    with half the width of its 95 % interval; the color is the score less the built-in model's."""
    order = ("base", "alone", "next", "mixture")
    runs = sorted(runs_of("transfer"), key=lambda run: order.index(run.label))
    runs = [run for run in runs if run.name in results]
    columns = list(TRANSFER_STEPS)
    cells = np.array([[results[run.name][-1]["worlds"][world]["score"] for world in columns]
                      for run in runs])
    gained = cells - cells[0]
    figure, ax = plt.subplots(figsize=(8, 1.6 + 0.45 * len(runs)), layout="constrained")
    image = ax.imshow(gained, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for y, run in enumerate(runs):
        for x, world in enumerate(columns):
            low, high = results[run.name][-1]["worlds"][world]["score_ci95"]
            ax.text(x, y, f"{cells[y, x]:.3f} ± {(high - low) / 2:.3f}", ha="center", va="center",
                    color="white" if abs(gained[y, x]) > 0.6 else "black", fontsize=9)
    ax.set_xticks(range(len(columns)), map(in_words, columns))
    ax.set_yticks(range(len(runs)), map(training_in_words, runs))
    ax.set(xlabel="score on held-out items, with half of its 95 % interval over items",
           title="Trained in one world, measured in all")
    figure.colorbar(image, label="difference to the built-in model")
    return figure


def training_in_words(run):
    """What a model of study "transfer" was trained on."""
    if run.label == "base":
        return "nothing (built-in model)"
    if run.label == "mixture":
        return "all five, mixed"
    if run.label == "alone":
        return in_words(run.world)
    first, second, *_ = TRANSFER_STEPS
    before = f"{in_words(first)}, " if run.world == second else "... "
    return f"{before}then {in_words(run.world)}"


def curves_over_turns(study, worlds, results):
    """Mean and standard deviation over the seeds, over environment turns: success in training for
    each world, and in studies that evaluate on the way the horizon and the success on held-out
    items. A label has one color in all axes."""
    measures = ("success",)
    if study in MIDWAY:
        measures = ("success", "horizon", "held out")
    count = len(worlds) * len(measures)
    columns = min(3, count)
    figure, grid = plt.subplots(-(-count // columns), columns, squeeze=False, layout="constrained",
                                figsize=(1.2 + 3.6 * columns, 0.9 + 2.9 * -(-count // columns)))
    trained = [run for run in runs_of(study) if len(results.get(run.name, ())) > 1]
    colors = {label: f"C{n}" for n, label in enumerate(dict.fromkeys(r.label for r in trained))}
    panels = [(world, what) for world in worlds for what in measures]
    for (world, what), ax in zip(panels, grid.flat):
        labels = {}  # label -> the rows of each seed
        for run in trained:
            if run.world == world:
                labels.setdefault(run.label, []).append(results[run.name])
        base = results.get(Run(world, "base", 0).name)
        # In SciWorld success is 0 throughout. Older rows of the other worlds have no score.
        if what == "success" and world == "sciworld":
            what = "score"
        for label, seeds in labels.items():
            name = f"{in_words(label)} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"
            style = {"label": name, "color": colors[label]}
            if what == "held out":
                draw_held_out(ax, seeds, style)
            else:
                draw_training(ax, seeds, what, style)
        if what == "held out" and base:
            ax.axhline(base[-1]["success"], color="grey", ls=":", label="before training")
        where = "held-out items" if what == "held out" else "training"
        ax.set(title=f"{in_words(world)}: {where}", xlabel="environment turns (thousands)",
               ylabel="horizon (turns)" if what == "horizon" else what.replace("held out",
                                                                              "success"))
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
    for ax in grid.flat[count:]:
        ax.set_axis_off()
    figure.suptitle("mean over the seeds; bands and bars: ± one standard deviation "
                    "(bands within the seeds' range)", fontsize=10)
    legend = {}  # each label once: in some world a label may be missing
    for ax in grid.flat:
        handles, names = ax.get_legend_handles_labels()
        legend |= zip(names, handles)
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def draw_training(ax, seeds, what, style):
    """A training curve of one label: `what`, a key of the rows, over environment turns."""
    grid, curves = resampled([rows[:-1] for rows in seeds], what)
    mean = np.nanmean(curves, 0)
    spread = np.nanstd(curves, 0, ddof=min(1, len(curves) - 1))
    ax.plot(grid, mean, **style)
    # The band of one standard deviation is cut where the lowest and the highest seed are.
    low = np.maximum(mean - spread, np.nanmin(curves, 0))
    high = np.minimum(mean + spread, np.nanmax(curves, 0))
    ax.fill_between(grid, low, high, alpha=0.15, color=style["color"], lw=0)


def resampled(trainings, what):
    """Smoothed curves of several seeds on one grid of thousand turns -> grid [n],
    curves [seeds, n].

    The grid ends where half of the seeds have ended. Before that, a seed that has ended is NaN.
    """
    turns = [np.cumsum([row["turns"] * row["trajectories"] / 1000 for row in rows])
             for rows in trainings]
    grid = np.linspace(0, max(t[-1] for t in turns), 100)
    width = 1 if what == "horizon" else 5  # steps that are shown as their mean
    curves = []
    for rows, at in zip(trainings, turns):
        padded = np.pad([row[what] for row in rows], width // 2, mode="edge")
        smooth = np.convolve(padded, np.ones(width) / width, "valid")
        curves.append(np.interp(grid, at, smooth, right=np.nan))
    curves = np.array(curves)
    shown = 2 * np.isfinite(curves).sum(0) > len(curves)
    return grid[shown], curves[:, shown]


def draw_held_out(ax, seeds, style):
    """Success of one label on held-out items, for the seeds with all evaluations (2 or 4)."""
    evaluated = [rows[-1]["held_out"] for rows in seeds if len(rows[-1]["held_out"]) in (2, 4)]
    points = [[(p["turns"] / 1000, p["success"]) for p in held_out] for held_out in evaluated]
    turns, success = np.mean(points, 0).T
    spread = np.std(points, 0, ddof=min(1, len(points) - 1))[:, 1]
    ax.errorbar(turns, success, spread, fmt="o-", capsize=3, **style)
