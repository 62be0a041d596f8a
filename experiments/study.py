"""Studies of many short runs.

    python experiments/study.py NAME [--jobs N] [--only TEXT] [--dry | --draw]

A run (a world, a label, a seed) leaves its rows in experiments/results.jsonl.gz: a row per training
step, and a last row with the evaluation on held-out items, the commands, the commit and the model.
A finished run is not run again. An interrupted run continues where it was, so a study may take
days. It needs a checkout that nobody edits meanwhile (git worktree add). A run that train.py stops
(max_kl, nan) is evaluated at its last checkpoint.

--dry lists the missing runs. --draw prints the table and makes the picture from the rows alone, as
every other call does in the end. Two runs at a time by default, one thread each.

NAME is one of these. The runs, with all flags, are in studies/runs.py.

algorithms: PPO, GRPO, RLOO and REINFORCE++ with their defaults in five worlds, three seeds. Needs
    the extras searchqa, sciworld and webarena, and Chromium; the item sets are made in runs/items.
horizon: GRPO with a short, a long, a growing (ScalingInter) and an adaptive horizon. TextCraft with
    eight seeds. BabyAI with three, as a control: its items can all be done within the first stage.
    All runs get the same number of environment turns, so a short horizon gets more optimizer steps.
    All are evaluated at the longest horizon. They are compared with ScalingInter seed by seed, at
    the end and at half of the turns: a difference counts if the 95 % interval of the paired
    differences (Student's t) excludes 0. The comparison named beforehand, here and in the next
    five: scaling against long at the end. A run has collapsed if it ends with less than half of its
    best success on held-out items.
rooms_horizon: the same in BabyAI's rooms, where half of the items need more turns than the first
    stage allows; five seeds.
pretrained_horizon: SmolLM2-135M in SearchQA, two seeds. Starts from runs/mix_warm/final
    (docs/warm_start.md).
pretrained_rooms: SmolLM2-135M in BabyAI's rooms. Starts from runs/rooms_warm/final
    (docs/warm_start.md).
pretrained_rooms_gpu, pretrained_rooms_36k: the same on a GPU (--jobs 5, some 10 GB a run) with more
    and larger steps.
pretrained_lora: does LoRA learn in the rooms what all weights learn? One seed, on a GPU.
pretrained_collapse: the fixed long horizon, the growing and the short one over 300,000 turns in the
    rooms, by LoRA, three seeds, on a GPU (docs/gpus.md). The paper's fixed long horizon collapses
    after 2 to 4 x 10^5 turns.
collapse: TextCraft, 250 steps with the long horizon and with the growing one, two seeds. The
    paper's fixed 10 rounds collapse after about 125 steps.
recipe: the first 40 steps of the default run in BabyAI with one thing changed, two seeds.
worlds: GRPO in SearchQA, in one task of SciWorld, in WebArena's tasks of one click, and one model
    for BabyAI and TextCraft. Needs what algorithms needs.
transfer: train in one world, measure in all five: each alone, all of them mixed, and one after the
    other, each run starting from the model of the run before it (--jobs 1).
credit: GRPO against each addition to it, in BabyAI's rooms and in TextCraft, five seeds, equal
    turns. Those without a gain were taken out; commit 8a0ad8a has them.
oracle: does better credit learn faster? GRPO, REINFORCE++ with a discount, and the advantages that
    playing on gives, with 4 and with 32 continuations of every prefix (the truth, nearly), in
    BabyAI's rooms and in TextCraft, five seeds, equal steps; docs/credit.md has the prediction.
states: GRPO against the difference of state means (GAGPO without discount, lambda and division) in
    SearchQA, five seeds, equal steps; docs/credit.md has the prediction.
discount: GRPO against REINFORCE++ with and without a discount, and RLOO, in BabyAI's rooms, horizon
    20, five seeds, equal steps; docs/credit.md has the prediction.
ideas: the ways to the first success in ideas/ (docs/ideas.md) with the built-in model, each alone
    and `backward` with `choose`, in the worlds of `credit`, five seeds, equal turns of the policy.
distill: the default run of BabyAI, and the same run whose only signal is a teacher's log-probs: the
    model that the first one of the same seed has made. Three seeds (--jobs 1).
speedrun: the entries of docs/speedrun.md, two seeds.
"""

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments import references  # noqa: E402
from experiments.studies import play, report, rows  # noqa: E402
from experiments.studies.runs import (  # noqa: E402
    ALL_ITEMS,
    SCIWORLD_ITEMS,
    STUDIES,
    WEBARENA_ITEMS,
    runs_of,
)


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="runs whose name holds this text: babyai, _s0")
    parser.add_argument("--dry", action="store_true", help="list the missing runs")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    return parser.parse_args()


def main():
    args = parse()
    results = rows.load(args.study)
    runs = runs_of(args.study)
    missing = [run for run in runs if args.only in run.name and run.name not in results]
    print(f"{len(missing)} of {len(runs)} runs are missing")
    if args.dry:
        print("\n".join(run.name for run in missing))
        return

    failed = []
    if missing and not args.draw:
        commit = play.revision()
        play.check_base(args.study, results)
        if args.study in ("algorithms", "worlds", "transfer"):
            make_item_sets()
        failed = run_all(args.study, missing, commit, args.jobs)
        results = rows.load(args.study)
    print(report.table(args.study, results))
    report.draw(args.study, results)
    if failed:
        sys.exit(f"study.py: {len(failed)} runs failed")


def make_item_sets():
    """The item sets of several studies, where they are not there yet."""
    references.make_item_sets(f"{SCIWORLD_ITEMS} {WEBARENA_ITEMS}")
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
