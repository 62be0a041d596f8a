"""Runs that are ended at bad moments: `kill -9` and full disks.

    python experiments/kill.py [--ends 30] [--seed 0] [train.py's flags ...]

A run of 40 steps that saves at every step is ended again and again, and resumed: a third of the
ends are `kill -9` at a random moment, a half `kill -9` while a checkpoint (two in five of them:
`final/`) is being saved, a sixth are full disks, where train.py must end by itself with one line
and exit code 2. Finally the run is resumed to its end: every metric and every bit of the weights
must equal those of a run that was left alone. Prints what the run was saving when it was killed.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "train.py", "--algo", "ppo", "--items_per_step", "8", "--steps", "40",
           "--save_every", "1"]
NOT_REPEATABLE = ("seconds_", "tokens_per_second", "memory_gb")  # beginnings of names
CHECKPOINT = "checkpoints/step_*.partial"
FINAL = "final.partial"


def metrics(folder):
    """The rows of metrics.jsonl, without times and memory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATABLE)} for row in rows]


def wait_for(condition, child):
    """Return when the condition holds."""
    while not condition():
        time.sleep(0.002)
        assert child.poll() is None, f"the run ended before it was killed: {child.stderr.read()}"


def wait_for_row(out, child):
    """Return when the run has written its next row of metrics, right before it saves."""
    rows = out / "metrics.jsonl"
    size = rows.stat().st_size if rows.exists() else 0
    wait_for(lambda: rows.exists() and rows.stat().st_size > size, child)


def kill_at_random(out, child, rng):
    wait_for_row(out, child)
    time.sleep(rng.choice([0, rng.uniform(0, 0.1), rng.uniform(0, 2)]))
    child.kill()


def kill_in_checkpoint(out, child, rng):
    wait_for_row(out, child)
    wait_for(lambda: any(out.glob(CHECKPOINT)), child)
    time.sleep(rng.uniform(0, 0.02))
    child.kill()


def kill_in_final(out, child, rng):
    wait_for(lambda: any(out.glob(FINAL)), child)
    time.sleep(rng.uniform(0, 0.02))
    child.kill()


def fill_disk(out, child, rng):
    """From now on no file of the run can be larger than a part of a checkpoint's files."""
    wait_for_row(out, child)
    largest = rng.choice([0, 10**3, 10**5, 3 * 10**6])  # bytes
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (largest, largest))


def draw_ends(number, rng):
    """The ends of a run in the order in which they come: those in final/ last."""
    num_disks = number // 6
    num_final = number // 5
    num_checkpoints = number // 2 - num_final
    num_random = number - num_disks - num_final - num_checkpoints
    ends = ([fill_disk] * num_disks + [kill_in_checkpoint] * num_checkpoints
            + [kill_at_random] * num_random)
    rng.shuffle(ends)
    return ends + [kill_in_final] * num_final


def main(num_ends, seed, flags):
    """Returns whether anything differs."""

    def start(out, *more):
        return subprocess.Popen([*COMMAND, *flags, *more, "--out", str(out)], cwd=ROOT, text=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    rng = random.Random(seed)
    killed_while = Counter()
    faults = []  # full disks after which the run did not end as it should
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        _, said = (child := start(whole)).communicate()
        assert child.returncode == 0, said
        for number, end in enumerate(tqdm(draw_ends(num_ends, rng), desc="ends")):
            child = start(killed, *(["--resume"] if number else []))
            end(killed, child, rng)
            _, said = child.communicate()
            is_line = (said.splitlines() or [""])[-1].startswith("train.py: ")
            if end is fill_disk and (child.returncode != 2 or not is_line):
                faults.append(f"exit code {child.returncode}: {said}")
            what = "saving" if any([*killed.glob(CHECKPOINT), *killed.glob(FINAL)]) else "else"
            killed_while["full disk" if end is fill_disk else what] += 1
        _, said = (child := start(killed, "--resume")).communicate()
        assert child.returncode == 0, said
        same = metrics(whole) == metrics(killed)
        weights = "final/model.safetensors"
        bits = (whole / weights).read_bytes() == (killed / weights).read_bytes()
    print(*faults, sep="\n")
    print(f"{num_ends} ends: {dict(killed_while)}; {len(faults)} full disks not said in a line; "
          f"metrics equal: {same}; weights equal bit for bit: {bits}")
    return not same or not bits or bool(faults)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args, train_flags = parser.parse_known_args()
    sys.exit(main(args.ends, args.seed, train_flags))
