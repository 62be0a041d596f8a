"""Runs that are ended at bad moments: `kill -9` and full disks.

    python experiments/kill.py [--ends 30] [--seed 0] [train.py's flags ...]

A run of 40 steps that saves at every step is ended again and again, and resumed: a third of the
ends are `kill -9` at a random moment, a half `kill -9` while a checkpoint (two in five of them:
`final/`) is being saved, a sixth are full disks, where train.py must end by itself with one line
and exit code 2. Finally the run is resumed to its end: every metric and every bit of the weights
must equal those of a run that was left alone. Prints what the run was doing when it was killed, and
the lines about full disks.
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
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
ARGS = [
    sys.executable, "train.py", "--algo", "ppo", "--items_per_step", "8", "--steps", "40",
    "--save_every", "1",
]
NOT_REPEATABLE = ("seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")
CHECKPOINT = "checkpoints/step_*.partial"
FINAL = "final.partial"


def metrics(folder):
    """The rows of metrics.jsonl, without times and memory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in NOT_REPEATABLE} for row in rows]


def start(out, flags):
    return subprocess.Popen([*ARGS, *flags, "--out", str(out)], cwd=ROOT, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for(condition: Callable[[], bool], child: subprocess.Popen):
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
    kill_in(CHECKPOINT, out, child, rng)


def kill_in_final(out, child, rng):
    kill_in(FINAL, out, child, rng)


def kill_in(partial, out, child, rng):
    """Kill the run while a folder that it is saving is not complete."""
    wait_for(lambda: any(out.glob(partial)), child)
    time.sleep(rng.uniform(0, 0.02))
    child.kill()


def fill_disk(out, child, rng):
    """From now on no file of the run can be larger than a part of a checkpoint's files."""
    wait_for_row(out, child)
    largest = rng.choice([0, 10**3, 10**5, 3 * 10**6])  # bytes
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (largest, largest))


def activity(out):
    """What the run was doing when it was killed, as its files tell."""
    if any(out.glob(CHECKPOINT)):
        return "saving a checkpoint"
    if any(out.glob(FINAL)):
        return "saving final/"
    step = len(metrics(out))
    states = out.glob("checkpoints/step_*/state.json")
    saved = max([0, *(int(path.parent.name[5:]) for path in states)])
    has_trajectories = (out / f"trajectories/step_{step - 1:06d}.jsonl").exists()
    if step > saved or not has_trajectories:
        return "between the row and the save"
    return "rollout or update"


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
    rng = random.Random(seed)
    activities = Counter()
    faults = []  # full disks after which the run did not end as it should
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        killed = Path(folder) / "killed"
        child = start(whole, flags)
        child.communicate()
        assert child.returncode == 0
        for number, end in enumerate(tqdm(draw_ends(num_ends, rng), desc="ends")):
            child = start(killed, [*flags, *(["--resume"] if number else [])])
            end(killed, child, rng)
            _, said = child.communicate()
            if end is fill_disk:
                activities["full disk"] += 1
                line = said.splitlines()[-1] if said else ""
                tqdm.write(line)
                if child.returncode != 2 or not line.startswith("train.py: "):
                    faults.append(f"exit code {child.returncode}: {said}")
            else:
                activities[activity(killed)] += 1
        child = start(killed, [*flags, "--resume"])
        _, said = child.communicate()
        assert child.returncode == 0, said
        same = metrics(whole) == metrics(killed)
        weights = "final/model.safetensors"
        bits = (whole / weights).read_bytes() == (killed / weights).read_bytes()
    print(*faults, sep="\n")
    print(
        f"{num_ends} ends: {dict(activities)}; {len(faults)} full disks not said in a line; "
        f"metrics equal: {same}; weights equal bit for bit: {bits}"
    )
    return not same or not bits or bool(faults)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ends", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args, train_flags = parser.parse_known_args()
    sys.exit(main(args.ends, args.seed, train_flags))
