"""How full the slots are when trajectories are dealt to ranks: simulated, with real lengths.

    python experiments/dealing.py [--trajectories FILE.jsonl ...] [--slots 32] [--per_slot 4]

Decode steps of a trajectory: one for each sampled token, and one more for each observation. They
are drawn from a run's recorded trajectories; without any, a log-normal distribution with a heavy
tail (median 60, sigma 0.8). In each simulated rollout there are `--per_slot` trajectories for each
slot of all ranks, or a quarter of one ("small batch"). Two ways:

    split     items are split among ranks beforehand: rank r plays every R-th
    dealt     `parallel.share_out` as the rollout uses it: every 8 decode steps, with trajectories
              for half of the slots in advance

Printed for each: the share of all slots that decode until the queue is empty, the share over the
whole rollout, and the length of the tail in steps. A rank decodes as many steps as the others in
the same time.
"""

import argparse
import json
import sys
from collections import deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from parallel import share_out  # noqa: E402
from rollout import DEAL_EVERY, SLOTS_PER_SPARE  # noqa: E402


def steps_of(path):
    """Decode steps of each trajectory of a file."""
    found = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        found.append(sum(row["mask"]) + row["turns"] + 1)
    return found


def simulate(lengths, ranks, slots, is_dealt):
    """-> (share of slots that decode until nothing is left to begin, share over the whole rollout,
    steps of the tail)"""
    todo = [deque() for _ in range(ranks)]
    undealt = deque(lengths)
    if not is_dealt:
        for number, length in enumerate(lengths):
            todo[number % ranks].append(length)
        undealt.clear()
    playing = [[] for _ in range(ranks)]  # steps left of each trajectory
    busy = []  # number of slots that decode, at each step
    empty_at = None
    while undealt or any(todo) or any(playing):
        step = len(busy)
        # An idle rank waits for the next exchange, which takes place when all have come to it.
        if undealt and step % DEAL_EVERY == 0:
            rooms = [max(0, slots - len(held) + slots // SLOTS_PER_SPARE - len(queue))
                     for held, queue in zip(playing, todo)]
            for queue, count in zip(todo, share_out(len(undealt), rooms)):
                queue.extend(undealt.popleft() for _ in range(count))
        for held, queue in zip(playing, todo):
            while queue and len(held) < slots:
                held.append(queue.popleft())
        if empty_at is None and not undealt and not all(todo):
            empty_at = step  # a rank has nothing more to begin
        busy.append(sum(map(len, playing)))
        playing = [[left - 1 for left in held if left > 1] for held in playing]
    room = ranks * slots
    until_empty = np.mean(busy[:empty_at]) / room if empty_at else float("nan")
    return until_empty, np.mean(busy) / room, len(busy) - empty_at


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", nargs="*", default=[])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--per_slot", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.slots < 1:
        parser.error("--slots must be 1 or more")
    rng = np.random.default_rng(args.seed)
    recorded = [length for path in args.trajectories for length in steps_of(path)]
    if not recorded:
        recorded = np.exp(rng.normal(np.log(60), 0.8, 10_000)).astype(int) + 1
    median, p99 = np.percentile(recorded, [50, 99])
    print(f"{len(recorded)} lengths: median {median:.0f}, 99th percentile {p99:.0f} steps")
    heads = ["ranks", "trajectories", "way", "until the queue is empty", "whole rollout", "steps",
             "tail"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for ranks in (1, 2, 4, 8, 64):
        for per_slot in (args.per_slot, 0.25):
            count = max(1, int(per_slot * ranks * args.slots))
            lengths = rng.choice(recorded, count).tolist()
            for way in ("split", "dealt"):
                until, whole, tail = simulate(lengths, ranks, args.slots, way == "dealt")
                steps = round(sum(lengths) / (whole * ranks * args.slots))
                shown = "" if np.isnan(until) else f"{until:.2f}"
                print(f"| {ranks} | {count} | {way} | {shown} | {whole:.2f} | {steps} | {tail} |")


if __name__ == "__main__":
    main()
