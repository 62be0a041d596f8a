"""Studies of many short runs.

    python experiments/study.py NAME [--jobs N] [--only TEXT] [--dry | --draw]

NAME is one of: algorithms, horizon, rooms_horizon, pretrained_horizon, pretrained_rooms,
pretrained_rooms_gpu, pretrained_rooms_36k, collapse, recipe, worlds, transfer, credit, distill.

A run (a world, a label, a seed) leaves one file, experiments/results/NAME/RUN.jsonl: a row per
training step, and a last row with the evaluation on held-out items, the commands, the commit and
the model. A finished run is not run again. An interrupted run goes on where it was, so a study may
take days. It needs a checkout that nobody edits meanwhile (git worktree add). A run that train.py
stops (--max_kl, nan) is evaluated at its last checkpoint. Two samples of each held-out item
(horizon: four; pretrained_horizon and pretrained_rooms: one). At the end the files are packed into
experiments/results/NAME.jsonl.gz.

--dry lists the missing runs and how long they will take. --draw makes docs/study_NAME*.png and the
table from the rows alone, as every other call does in the end. Two runs at a time by default, one
thread each.

algorithms: PPO, GRPO, RLOO and REINFORCE++ with their defaults in BabyAI, TextCraft and the worlds
    of study worlds, three seeds. Needs what that study needs. The worlds besides BabyAI and
    TextCraft take over a day.
horizon: GRPO with a short, a long, a growing (ScalingInter) and an adaptive horizon. TextCraft with
    eight seeds. BabyAI with three, as a control: its items can all be done within the first stage.
    All runs get the same number of environment turns (TURNS), so a short horizon gets more
    optimizer steps. All are evaluated at the longest horizon, also at a quarter, half and three
    quarters of the turns (one sample per item). They are compared with ScalingInter seed by seed,
    at the end and at half of the turns: a difference counts if the 95 % interval of the paired
    differences (Student's t) excludes 0. The comparison named beforehand: TextCraft, scaling
    against long. A run has collapsed if it ends with less than half of its best success on
    held-out items.
rooms_horizon: the same four horizons in BabyAI's rooms, where half of the items need more turns
    than the first stage allows; five seeds, evaluated at half of the turns and at the end.
    The comparison named beforehand: scaling against long at the end.
pretrained_horizon: a long, a growing and a short horizon for SmolLM2-135M in SearchQA, two seeds,
    evaluated at half of the turns and at the end. Starts from runs/mix_warm/final, which is made by
    the command in docs/warm_start.md. The comparison named beforehand: scaling against long at the
    end.
pretrained_rooms: the same in BabyAI's rooms. Starts from runs/rooms_warm/final, which is made by
    the command in docs/results.md.
pretrained_rooms_gpu: the same on a GPU (--jobs 5: all runs at a time, some 10 GB each), with three
    times the turns, twice the trajectories a step, a penalty for invalid actions and a lower
    learning rate. Its warm start is made on the GPU, too. The comparison named beforehand: scaling
    against long at the end.
pretrained_rooms_36k: as pretrained_rooms_gpu (--jobs 5) with 36,000 turns, up to six hours of a
    core by the pace of pretrained_rooms, and a larger --max_length. The comparison named
    beforehand: scaling against long at the end.
collapse: TextCraft, 250 steps with the long horizon and with the growing one, two seeds. The
    paper's fixed 10 rounds collapse after about 125 steps. Also evaluated on the way.
recipe: the first 40 steps of the default run in BabyAI with one thing changed, two seeds. (Three
    learning rates ended alike after 100 steps.)
worlds: GRPO in SearchQA, in one task of SciWorld, in WebArena's tasks of one click, and one model
    for BabyAI and TextCraft; three seeds. Needs the extras searchqa, sciworld and webarena, and
    Chromium. The item sets are made in runs/items.
transfer: train in one world, measure in all five (SciWorld's and WebArena's items are those of
    study worlds): each alone, all of them mixed, and one after the other, each run going on from
    the model of the run before it (--jobs 1). Draws a matrix.
credit: GRPO against each addition to it (losses, credit over turns, choice of groups and items)
    in BabyAI's rooms and in TextCraft, five seeds, all runs with the same number of environment
    turns (CREDIT_TURNS). Compared with GRPO seed by seed, as in study horizon, after half of them
    and at the end. Each addition is tried once, with the values of its paper; GRPO's settings are
    the defaults. Those without a gain were taken out; commit 8a0ad8a has them.
distill: the default run of BabyAI, and the same run whose only signal is a teacher's log-probs: the
    model that the first one of the same seed has made. Three seeds, one run at a time (--jobs 1).
"""

import argparse
import shutil
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments.studies import play, report, rows  # noqa: E402
from experiments.studies.runs import (  # noqa: E402
    ALL_ITEMS,
    SCIWORLD_ITEMS,
    STUDIES,
    WEBARENA_ITEMS,
    runs_of,
)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--only", default="", help="runs whose name holds this text: babyai, ppo, _s0"
    )
    parser.add_argument(
        "--dry", action="store_true", help="say what is missing and how long it will take"
    )
    parser.add_argument("--draw", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be 1 or more")
    return args


def main():
    args = parse()
    results = rows.load(args.study)
    runs = runs_of(args.study)
    missing = [run for run in runs if args.only in run.name and run.name not in results]
    minutes = sum(minutes_needed(missing, runs, results)) / args.jobs
    print(
        f"{len(missing)} of {len(runs)} runs are missing: about {minutes:.0f} minutes, "
        f"{args.jobs} at a time"
    )
    if args.dry:
        print("\n".join(run.name for run in missing))
        return

    failed = []
    if not args.draw and (missing or rows.plain_files(args.study)):
        commit = play.revision()
        lock = play.begin(args.study, results)
        if missing and args.study in ("algorithms", "worlds", "transfer"):
            make_item_sets()
        failed = run_all(args.study, missing, commit, args.jobs)
        rows.pack(args.study)
        lock.close()
        results = rows.load(args.study)

    report.draw(args.study, results)
    print(report.table(args.study, results))
    if failed:
        sys.exit(f"study.py: {len(failed)} runs failed")


def minutes_needed(missing, runs, results):
    """An estimate for each missing run, from the finished runs of its world."""
    known = {}  # world -> minutes of its finished runs
    for run in runs:
        if run.label != "base" and run.name in results:
            known.setdefault(run.world, []).append(results[run.name][-1]["seconds"] / 60)
    found = []
    for run in missing:
        evaluation = 1 if run.label == "base" else 2
        training = 0 if run.label == "base" else statistics.mean(known.get(run.world, [4]))
        found.append(evaluation + training)
    return found


def make_item_sets():
    """The item sets of several studies, where they are not there yet."""
    if not (ROOT / SCIWORLD_ITEMS).is_dir():
        play.call("experiments/sciworld_tasks.py", SCIWORLD_ITEMS, "find-non-living-thing")
    if not (ROOT / WEBARENA_ITEMS).is_dir():
        play.call("experiments/web.py", "navigate", WEBARENA_ITEMS)
    if not (ROOT / ALL_ITEMS).is_dir():
        sources = dict.fromkeys(("babyai", "textcraft", "searchqa"), "data")
        sources |= {"sciworld": SCIWORLD_ITEMS, "webarena": WEBARENA_ITEMS}
        (ROOT / ALL_ITEMS / "AgentItemId").mkdir(parents=True)
        for world, folder in sources.items():
            training = f"AgentItemId/{world}_train.json"
            shutil.copy(ROOT / folder / training, ROOT / ALL_ITEMS / training)
            held_out = f"AgentEval/{world}"
            shutil.copytree(ROOT / folder / held_out, ROOT / ALL_ITEMS / held_out)


def run_all(study, runs, commit, jobs):
    """Train and evaluate `runs`, `jobs` at a time -> a message for each that failed."""
    failed = []

    def attempt(run):
        try:
            play.do(study, run, commit)
        except (RuntimeError, OSError, ValueError) as e:
            failed.append(f"{run.name}: {e}")
            tqdm.write(failed[-1])

    with ThreadPoolExecutor(jobs) as threads:
        for _ in tqdm(threads.map(attempt, runs), total=len(runs), unit="run"):
            pass
    return failed


if __name__ == "__main__":
    main()
