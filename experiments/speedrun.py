"""The speedrun: the fewest environment turns to a success on held-out items (docs/speedrun.md).

    python experiments/speedrun.py                 # the table
    python experiments/speedrun.py verify NAME     # NAME: a kept run, such as babyai_steps_16_s0

verify runs the commands of a kept run again, in a new folder. On the same kind of processor, with
the same PyTorch, every row of metrics, the weights and the success of every held-out item must be
the same bit for bit; else the success must lie within the kept run's 95 % interval over items. Exit
code 1 if it is neither. `python experiments/study.py speedrun --jobs 1` runs what is missing.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments.studies import play, report, rows  # noqa: E402
from experiments.studies.runs import SAMPLES, SPEEDRUNS, runs_of  # noqa: E402

STUDY = "speedrun"
SEEDS = 2


def table():
    """A line for each entry, as Markdown: those that reach their target first, by turns."""
    lines, found = [], rows.load(STUDY)
    for label, (world, target, _) in SPEEDRUNS.items():
        seeds = report.by_label(STUDY, world, found).get(label)
        if not seeds:
            continue
        kept = [summary for _, summary in seeds.values()]
        turns, minutes = (statistics.mean(row[name] for row in kept) / unit for name, unit in
                          (("environment_turns", 1), ("seconds", 60)))
        success = statistics.mean(row["success"] for row in kept)
        verdict = "no"
        if success >= target:
            verdict = "yes" if len(kept) >= SEEDS else f"too few seeds: {len(kept)}"
        each = ", ".join(f"{row['success']:.3f}" for row in kept)
        lines.append((world, -target, verdict != "yes", turns,
                      f"| {world}, {target:.2f} | {label} | {turns:,.0f} | {minutes:.1f} | "
                      f"**{success:.3f}** ({each}) | {verdict} | {kept[0]['commit']} |"))
    head = "| world, target | entry | turns | minutes | success (seeds) | reached | commit |"
    return "\n".join([head, "|---" * 7 + "|", *(line for *_, line in sorted(lines))])


def verify(name):
    """Run a kept run again and compare -> the exit code."""
    run = next((run for run in runs_of(STUDY) if run.name == name), None)
    if name not in rows.load(STUDY) or not run:
        sys.exit(f"speedrun.py: no run '{name}'; there are {', '.join(rows.load(STUDY))}")
    *kept_steps, kept = rows.load(STUDY)[name]
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        out = Path(folder) / name
        metrics, stopped = play.train(run, out)
        if stopped:
            sys.exit(f"speedrun.py: {stopped}")
        found = play.evaluate(run.world, run, out / "final", SAMPLES.get(STUDY, 2), out)
    verdict, is_verified = compare(kept_steps, kept, [*map(play.training_row, metrics)], found)
    print(f"{name}: {verdict}")
    return 0 if is_verified else 1


def compare(kept_steps, kept, steps, found):
    """The kept rows against those of the run that repeats them, and what eval.py found -> a text,
    and whether the run is verified."""
    same = [without_seconds(a) == without_seconds(b) for a, b in zip(kept_steps, steps)]
    if len(kept_steps) == len(steps) and all(same) and kept["items"] == found["items"] \
            and kept["model_sha256"] == found["config"]["model_sha256"]:
        return f"the same bit for bit (success {found['success']:.3f})", True
    first = same.index(False) if False in same else len(same)
    low, high = kept["ci95"]
    verdict = f"differs from step {first} on; success {found['success']:.3f}, kept " \
              f"{kept['success']:.3f} [{low:.3f}, {high:.3f}]"
    if play.processor() == kept["processor"]:
        return f"{verdict}: not verified, the processor is of the same kind", False
    is_within = low <= found["success"] <= high
    return f"{verdict}; {play.processor()}, kept {kept['processor']}", is_within


def without_seconds(row):
    return {name: value for name, value in row.items() if name != "seconds"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["verify"] and len(sys.argv) == 3:
        sys.exit(verify(sys.argv[2]))
    if sys.argv[1:]:
        sys.exit(__doc__)
    print(table())
