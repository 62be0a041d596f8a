"""The table and the pictures of a study, from its rows alone.

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
    EVALUATED_MIDWAY,
    TRANSFER_STEPS,
    Run,
    runs_of,
)

DOCS = Path(__file__).parent.parent.parent / "docs"

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
    "lr_2e-4": "learning rate 2e-4",
    "lr_8e-4": "learning rate 8e-4",
    "8x16": "8 items x 16 samples",
    "32x4": "32 items x 4 samples",
    "minibatches_1": "1 mini-batch",
    "minibatches_4": "4 mini-batches",
    "kl_0.01": "KL coefficient 0.01",
    "clip_high_0.28": "upper clip 0.28",
    "entropy_0.01": "entropy bonus 0.01",
    "penalty_0": "no penalty for invalid actions",
    "penalty_0.2": "penalty for invalid actions 0.2",
    "no_std": "advantage without the deviation",
    "sequence": "loss averaged by sequence",
    "horizon_4": "horizon 4 from the start",
    "gspo": "GSPO",
    "gspo_turn": "GSPO, by turn",
    "cispo": "CISPO",
    "turn": "credit by turn",
    "state": "credit by state (GiGPO)",
    "dynamic": "dynamic sampling",
    "keep_half": "half of the groups",
    "frontier": "items on the frontier",
    "distill": "a teacher's log-probs",
}


def in_words(name):
    """A world, several of them with commas, or a label, as pictures call it."""
    return ", ".join(WORDS.get(part, part) for part in name.split(","))

# 97.5 % quantiles of Student's t, by the number of pairs.
STUDENT = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}


# Statistics


def paired(a, b):
    """Mean of a - b over the pairs, and half the width of its 95 % interval (Student's t)."""
    differences = [x - y for x, y in zip(a, b)]
    n = len(differences)
    half = float("inf")
    if n > 1:
        half = STUDENT[n] * statistics.stdev(differences) / n**0.5
    return statistics.mean(differences), half


def difference(a, b):
    """The paired difference with its interval, as text. Fewer than two pairs: ""."""
    if len(a) < 2:
        return ""
    mean, half = paired(a, b)
    verdict = "" if abs(mean) > half else ", not shown"
    return f"{mean:+.3f} ± {half:.3f}{verdict} ({len(a)} pairs)"


def difference_over_items(a, b):
    """The mean over items and seeds of a - b, as text, with its 95 % interval over items (normal
    approximation), which says nothing about other seeds.

    Args:
        a, b: {item: success} for each seed. Items that one of them lacks are left out.
    """
    items = sorted(set.intersection(*map(set, a + b))) if a else []
    if len(items) < 2:
        return ""
    differences = [statistics.mean(x[item] - y[item] for x, y in zip(a, b)) for item in items]
    mean = statistics.mean(differences)
    half = 1.96 * statistics.stdev(differences) / len(items) ** 0.5
    verdict = "" if abs(mean) > half else ", not shown"
    return f"{mean:+.3f} ± {half:.3f}{verdict} (seeds: {len(a)})"


def collapsed(summary):
    """Whether the run ended with less than half of its best success on held-out items, or was
    stopped."""
    if summary["stopped"]:
        return True
    best = max(point["success"] for point in summary.get("held_out", [summary]))
    return summary["success"] < best / 2


# The table

COLUMNS = (
    "world", "run", "seeds", "steps", "environment turns", "min", "held-out success", "score",
    "turns", "valid actions", "success in training, mean of all steps",
)
MIDWAY_COLUMNS = (
    "collapsed", "difference to {0}, 95 %", "over items", "at half of the turns", "difference",
    "at half, over items", "difference at equal time",
)


def table(study, results):
    """Means and standard deviations over the seeds, as Markdown: a line per world and label."""
    midway = study in EVALUATED_MIDWAY
    baseline = BASELINES.get(study)
    columns = COLUMNS + (MIDWAY_COLUMNS if midway else ())
    columns = [column.format(baseline) for column in columns]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for world in sorted({run.world for run in runs_of(study)}):
        labels = by_label(study, world, results)
        for label, seeds in labels.items():
            line = f"| {world} | {label} | {common_cells(seeds)}"
            if midway:
                line += midway_cells(label, labels, baseline)
                base = results.get(Run(world, "base", 0).name)
                line += f" {at_equal_time(label, labels, baseline, base)} |"
            lines.append(line)
    return "\n".join(lines)


def by_label(study, world, results):
    """-> {label: {seed: (training rows, summary)}}. A mixture has a label for each of its
    worlds."""
    found = {}
    for run in runs_of(study):
        rows = results.get(run.name)
        if run.world != world or not rows:
            continue
        *training, summary = rows
        for part, figures in summary.get("worlds", {"": {}}).items():
            label = f"{run.label} {part}".strip()
            found.setdefault(label, {})[run.seed] = training, summary | figures
    return found


def common_cells(seeds):
    """The cells of one label that every study has, from {seed: (training rows, summary)}."""
    summaries = [summary for _, summary in seeds.values()]
    trainings = [training for training, _ in seeds.values()]

    def mean(key):
        return statistics.mean(summary[key] for summary in summaries)

    def mean_and_spread(key, interval):
        values = [summary[key] for summary in summaries]
        if len(values) > 1:
            return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
        low, high = summaries[0][interval]
        return f"{values[0]:.3f} [{low:.3f}, {high:.3f}]"

    # Rows without a score are of worlds where it equals the success.
    has_score = all("score_ci95" in summary for summary in summaries)
    success = mean_and_spread("success", "ci95")
    cells = (
        f"{len(summaries)}",
        f"{statistics.mean(map(len, trainings)):.0f}",
        f"{mean('environment_turns'):.0f}",
        f"{mean('seconds') / 60:.1f}",
        success,
        mean_and_spread("score", "score_ci95") if has_score else success,
        f"{mean('turns'):.2f}",
        f"{mean('valid_actions'):.3f}",
    )
    line = " | ".join(cells) + " | "
    if not any(trainings):
        return line + "|"
    in_training = [statistics.mean(row["success"] for row in rows) for rows in trainings if rows]
    return line + f"{statistics.mean(in_training):.3f} |"


def midway_cells(label, labels, baseline):
    """The cells of one label in studies that evaluate on the way: collapsed runs, the difference
    to the label `baseline` at the end, and the same at half of the turns."""
    seeds = labels[label]
    is_compared = label not in (baseline, "base")

    ends = figures_at_end(seeds, "success")
    baseline_seeds = labels.get(baseline, {})
    baseline_ends = figures_at_end(baseline_seeds, "success")
    halves = figures_at_half(seeds, "success")
    baseline_halves = figures_at_half(baseline_seeds, "success")

    def over_items(figures_at):
        if not is_compared:
            return ""
        pairs = figures_at(seeds, "items"), figures_at(baseline_seeds, "items")
        return difference_over_items(*common_seeds(*pairs))

    line = " |"
    if any(training for training, _ in seeds.values()):
        line = f" {sum(collapsed(summary) for _, summary in seeds.values())} |"
    line += f" {difference(*common_seeds(ends, baseline_ends)) if is_compared else ''} |"
    line += f" {over_items(figures_at_end)} |"
    if len(halves) > 1:
        values = [halves[seed] for seed in sorted(halves)]
        line += f" {statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} |"
    else:
        line += " |"
    line += f" {difference(*common_seeds(halves, baseline_halves)) if is_compared else ''} |"
    line += f" {over_items(figures_at_half)} |"
    return line


def at_equal_time(label, labels, baseline, base):
    """The paired difference to `baseline` when the faster of the two runs of a seed has ended, as
    text."""
    if label in (baseline, "base") or not base or baseline not in labels:
        return ""
    return difference(*pairs_at_equal_time(labels[label], labels[baseline], base))


def pairs_at_equal_time(seeds, baseline_seeds, base):
    """Success of both runs of each seed when the faster of the two has ended -> two lists.

    Between evaluations success is interpolated; it starts with that of `base`, rows of the model
    before training. Times are those of training alone, on whatever else the machine did.
    """
    pairs = []
    for seed in sorted(seeds.keys() & baseline_seeds.keys()):
        curves = []
        for of_seed in (seeds[seed], baseline_seeds[seed]):
            points = of_seed[1].get("held_out", [])
            curves.append(([0, *(p["seconds"] for p in points)],
                           [base[-1]["success"], *(p["success"] for p in points)]))
        end = min(seconds[-1] for seconds, _ in curves)
        pairs.append([float(np.interp(end, *curve)) for curve in curves])
    return [a for a, _ in pairs], [b for _, b in pairs]


def figures_at_end(seeds, name):
    """{seed: a figure on held-out items after training}, for rows that have it.

    name: "success", or "items": {item: success}.
    """
    return {seed: summary[name] for seed, (_, summary) in seeds.items() if name in summary}


def figures_at_half(seeds, name):
    """`figures_at_end` for half of the turns, for runs that were evaluated there: at 4 points, or
    at half and at the end."""
    found = {}
    for seed, (_, summary) in seeds.items():
        points = summary.get("held_out", ())
        half = points[len(points) // 2 - 1] if len(points) in (2, 4) else {}
        if name in half:
            found[seed] = half[name]
    return found


def common_seeds(a, b):
    """Two lists with the values of the seeds that both {seed: value} have."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


# The pictures


def draw(study, results):
    """Write docs/study_NAME*.png: one picture of all worlds; of the horizons one per world."""
    worlds = sorted({run.world for run in runs_of(study) if run.name in results})
    if study == "horizon":
        for world in worlds:
            picture(study, [world], results, DOCS / f"study_{study}_{world}.png")
    elif study == "recipe":
        sweep(worlds, results, DOCS / f"study_{study}.png")
    elif study == "credit":
        gains(study, worlds, results, DOCS / f"study_{study}.png")
    elif study == "transfer":
        matrix(results, DOCS / f"study_{study}.png")
    else:
        picture(study, worlds, results, DOCS / f"study_{study}.png")


def sweep(worlds, results, path):
    """A line per setting, a dot per seed: the success on held-out items after training, and how
    soon it came, measured as the success in the first 20 steps of training."""
    found = {}  # label -> the rows of each seed
    for run in runs_of("recipe"):
        if run.label != "base" and run.name in results:
            found.setdefault(run.label, []).append(results[run.name])

    def first_steps(rows):
        return statistics.mean(row["success"] for row in rows[:20])

    figure, (after, early) = plt.subplots(
        1, 2, figsize=(9.2, 1.2 + 0.32 * len(found)), layout="constrained", sharey=True
    )
    for line, seeds in enumerate(found.values()):
        for number, rows in enumerate(seeds):
            y = line + 0.3 * number  # the bars of two seeds stand apart
            success = rows[-1]["success"]
            low, high = rows[-1]["ci95"]
            label = "one seed; bar: 95 % interval over items" if y == 0 else None
            after.errorbar(success, y, xerr=[[success - low], [high - success]], fmt="o",
                           color="C0", ms=4, label=label)
            early.plot(first_steps(rows), y, "o", color="C0", ms=4)
    base = results.get(Run("babyai", "base", 0).name)
    if base:
        after.axvline(base[-1]["success"], color="grey", ls=":", label="before training")
    if "default" in found:
        default = statistics.mean(map(first_steps, found["default"]))
        early.axvline(default, color="black", ls="--", lw=1, label="mean of the default's seeds")
        default = statistics.mean(rows[-1]["success"] for rows in found["default"])
        after.axvline(default, color="black", ls="--", lw=1)
    world = " and ".join(map(in_words, worlds))
    figure.suptitle(f"{world}: 40 steps of GRPO with one setting changed", fontsize=11)
    after.set_title("held-out items, after training", fontsize=11)
    early.set_title("training, mean of the first 20 steps", fontsize=11)
    for ax in (after, early):
        ax.set(xlabel="success", xlim=(0, 1.02))
        ax.grid(axis="x", alpha=0.3)

    names = []
    for label, seeds in found.items():
        names.append(f"{in_words(label)} ({len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'})")
    after.set_yticks(range(len(found)), names)
    after.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    save(figure, path)


def gains(study, worlds, results, path):
    """A column per world, a line per label: by how much its success on held-out items differs from
    the baseline's, seed by seed, at half of the turns, at the end and at equal time."""
    baseline = BASELINES[study]
    figure, axes = plt.subplots(1, len(worlds), figsize=(9.2, 4.6), layout="constrained",
                                sharey=True, squeeze=False)
    of_world = {world: by_label(study, world, results) for world in worlds}
    compared = dict.fromkeys(label for labels in of_world.values() for label in labels
                             if label not in (baseline, "base"))
    for (world, labels), ax in zip(of_world.items(), axes[0]):
        base = results.get(Run(world, "base", 0).name)
        for line, label in enumerate(compared):
            if label not in labels or baseline not in labels:
                continue
            seeds, baseline_seeds = labels[label], labels[baseline]
            halves = common_seeds(figures_at_half(seeds, "success"),
                                  figures_at_half(baseline_seeds, "success"))
            ends = common_seeds(figures_at_end(seeds, "success"),
                                figures_at_end(baseline_seeds, "success"))
            measures = {"half of the turns": halves, "all turns": ends}
            if base:
                measures["equal time"] = pairs_at_equal_time(seeds, baseline_seeds, base)
            for number, (name, (a, b)) in enumerate(measures.items()):
                if not a:  # no seed has both yet
                    continue
                mean, half = paired(a, b)
                ax.errorbar(mean, line + 0.22 * (number - 1), xerr=half, fmt="o", ms=4,
                            color=f"C{number}", label=name if line == 0 else None)
        ax.axvline(0, color="black", lw=1)
        ax.set(title=in_words(world), xlabel=f"success, difference to {in_words(baseline)}")
        ax.set_yticks(range(len(compared)), map(in_words, compared))
        ax.locator_params(axis="x", nbins=5)
        ax.grid(axis="x", alpha=0.3)
    axes[0, 0].invert_yaxis()
    figure.suptitle("held-out items; dots: mean over the seeds, bars: 95 % interval of the paired "
                    "differences", fontsize=10)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    save(figure, path)


def matrix(results, path):
    """A line per training of study "transfer", a column per world: the score on held-out items
    with half the width of its 95 % interval; the color is the score less the built-in model's."""
    order = ("base", "alone", "next", "mixture")
    runs = sorted(runs_of("transfer"), key=lambda run: order.index(run.label))
    runs = [run for run in runs if run.name in results]
    if not runs or runs[0].label != "base":
        return  # nothing to compare with
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
    save(figure, path)


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


def picture(study, worlds, results, path):
    """Mean and standard deviation over the seeds. Per world a row with the training, and in
    studies that evaluate on the way a second row with the success on held-out items. A label has
    one color in all worlds. The legend is that of one world, which must have runs of all labels."""
    midway = study in EVALUATED_MIDWAY
    columns = 4 if midway else 2
    figure, axes = plt.subplots(
        len(worlds) * columns // 2,
        2,
        figsize=(9.2, 1.8 * columns * len(worlds)),
        layout="constrained",
        squeeze=False,
    )
    trained = [run for run in runs_of(study) if len(results.get(run.name, ())) > 1]
    colors = {}
    for run in trained:
        colors.setdefault(run.label, f"C{len(colors)}")
    for world, line in zip(worlds, axes.reshape(len(worlds), columns)):
        labels = {}  # label -> the rows of each seed
        for run in trained:
            if run.world == world:
                labels.setdefault(run.label, []).append(results[run.name])

        # In SciWorld success is 0 throughout. Older rows of the other worlds have no score.
        what = "score" if study == "worlds" or world == "sciworld" else "success"
        draw_training(line[0], world, labels, colors, "turns", what)
        if midway:
            draw_training(line[1], world, labels, colors, "turns", "horizon")
            line[1].yaxis.get_major_locator().set_params(integer=True)
            base = results.get(Run(world, "base", 0).name)
            draw_held_out(line[2:], world, labels, colors, base)
        elif len({rows[-1].get("machine", "not said") for s in labels.values() for rows in s}) > 1:
            message = "These runs come from different machines:\ntheir minutes cannot be compared."
            line[1].text(0.5, 0.5, message, ha="center", transform=line[1].transAxes)
            line[1].set_axis_off()
        else:
            draw_training(line[1], world, labels, colors, "minutes", what)
    for ax in axes.flat:
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
    marks = "bands and bars" if midway else "bands"
    figure.suptitle(f"mean over the seeds; {marks}: ± one standard deviation "
                    "(bands within the seeds' range)", fontsize=10)
    # The last axes of a study with held-out items name the built-in model, too.
    handles, names = axes.flat[-1 if midway else 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if midway else 4, fontsize=9)
    save(figure, path)


UNITS = {"turns": "environment turns (thousands)", "minutes": "training time (minutes)"}
MEASURES = {
    "success": "success within the run's horizon",
    "score": "score within the run's horizon",
    "horizon": "horizon (turns)",
}


def draw_training(ax, world, labels, colors, cost, what):
    """Training curves of each label: `what` (a key of the rows) over `cost` (a key of UNITS)."""
    for label, seeds in labels.items():
        grid, curves = resampled([rows[:-1] for rows in seeds], cost, what)
        mean = np.nanmean(curves, 0)
        spread = np.nanstd(curves, 0, ddof=min(1, len(curves) - 1))
        ax.plot(grid, mean, label=name_of(label, seeds), color=colors[label])
        # The band of one standard deviation is cut where the lowest and the highest seed are.
        low = np.maximum(mean - spread, np.nanmin(curves, 0))
        high = np.minimum(mean + spread, np.nanmax(curves, 0))
        ax.fill_between(grid, low, high, alpha=0.15, color=colors[label], lw=0)
    title = f"{in_words(world)}: training"
    ax.set(xlabel=UNITS[cost], ylabel=MEASURES[what], title=title)


def name_of(label, seeds):
    return f"{in_words(label)} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"


def resampled(trainings, cost, what):
    """Smoothed curves of several seeds on one grid of costs -> grid [n], curves [seeds, n].

    The grid ends where half of the seeds have ended. Before that, a seed that has ended is NaN.
    """

    def cost_of(row):
        if cost == "turns":
            return row["turns"] * row["trajectories"] / 1000
        return row["seconds"] / 60

    costs = [np.cumsum([cost_of(row) for row in rows]) for rows in trainings]
    grid = np.linspace(0, max(c[-1] for c in costs), 100)
    width = 1 if what == "horizon" else 5  # steps that are shown as their mean
    curves = []
    for rows, at in zip(trainings, costs):
        padded = np.pad([row[what] for row in rows], width // 2, mode="edge")
        smooth = np.convolve(padded, np.ones(width) / width, "valid")
        curves.append(np.interp(grid, at, smooth, right=np.nan))
    curves = np.array(curves)
    shown = 2 * np.isfinite(curves).sum(0) > len(curves)
    return grid[shown], curves[:, shown]


def draw_held_out(axes, world, labels, colors, base):
    """Success on held-out items, over environment turns (first axes) and minutes (second).

    Args:
        base: the rows of the model before training, or None.
    """
    for label, seeds in labels.items():
        # Of each seed with all evaluations: [2 or 4, 3], thousand turns, minutes, success.
        points = []
        for rows in seeds:
            held_out = rows[-1]["held_out"]
            if len(held_out) in (2, 4):
                points.append(
                    [(p["turns"] / 1000, p["seconds"] / 60, p["success"]) for p in held_out]
                )
        mean = np.mean(points, 0)
        spread = np.std(points, 0, ddof=min(1, len(points) - 1))
        style = {"fmt": "o-", "capsize": 3, "color": colors[label]}
        name = name_of(label, seeds)
        for column, ax in enumerate(axes):
            ax.errorbar(mean[:, column], mean[:, 2], spread[:, 2], label=name, **style)
    any_rows = base or next(iter(labels.values()))[0]  # all are evaluated at one horizon
    ylabel = f"success within {any_rows[-1]['eval_horizon']} turns"
    for unit, ax in zip(UNITS.values(), axes):
        ax.set(xlabel=unit, ylabel=ylabel, title=f"{in_words(world)}: held-out items")
        if base:
            ax.axhline(base[-1]["success"], color="grey", ls=":", label="before training")


def save(figure, path):
    figure.savefig(path, dpi=110)
    print(path)
