"""`kill -9` at random moments.

    python experiments/kill.py [KILLS [SEED [FLAGS ...]]]

A run of 40 steps that saves at every step is killed KILLS times, up to 2 s after it wrote its next
row of metrics, and resumed. At the end every metric and every bit of the weights must equal those
of a run that nobody killed. Prints what the run was doing when it was killed. FLAGS are train.py's:
another model, fewer steps.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
ARGS = [
    sys.executable, "train.py", "--algo", "ppo", "--items_per_step", "8", "--steps", "40",
    "--save_every", "1",
]
NOT_REPEATABLE = ("seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")


def metrics(folder):
    """The rows of metrics.jsonl, without times and memory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in NOT_REPEATABLE} for row in rows]


def start(out, *flags):
    return subprocess.Popen(
        [*ARGS, *flags, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_after_next_row(child, out, rng):
    """Wait until the run writes a row of metrics, then kill it up to 2 s later."""
    rows = out / "metrics.jsonl"
    size = rows.stat().st_size if rows.exists() else 0
    while not (rows.exists() and rows.stat().st_size > size):
        time.sleep(0.005)
        assert child.poll() is None, "the run ended before it was killed: more steps are needed"
    # The run saves right after a row: short delays hit the saving.
    time.sleep(rng.choice([0, rng.uniform(0, 0.1), rng.uniform(0, 2)]))
    child.send_signal(signal.SIGKILL)
    child.wait()


def activity(out):
    """What the run was doing when it was killed, as its files tell."""
    if any(out.glob("checkpoints/*.partial")):
        return "saving"
    step = len(metrics(out))
    states = out.glob("checkpoints/step_*/state.json")
    saved = max([0, *(int(path.parent.name[5:]) for path in states)])
    has_trajectories = (out / f"trajectories/step_{step - 1:06d}.jsonl").exists()
    if step > saved or not has_trajectories:
        return "between the row and the save"
    return "rollout or update"


def main(kills=20, seed=0, flags=()):
    rng = random.Random(seed)
    activities = Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        killed = Path(folder) / "killed"
        assert start(whole, *flags).wait() == 0
        for n in tqdm(range(kills), desc="kills"):
            child = start(killed, *flags, *(["--resume"] if n else []))
            kill_after_next_row(child, killed, rng)
            activities[activity(killed)] += 1
        assert start(killed, *flags, "--resume").wait() == 0
        same = metrics(whole) == metrics(killed)
        weights = "final/model.safetensors"
        bits = (whole / weights).read_bytes() == (killed / weights).read_bytes()
    print(
        f"{kills} kills while: {dict(activities)}; metrics equal: {same}; "
        f"weights equal bit for bit: {bits}"
    )
    return 0 if same and bits else 1


if __name__ == "__main__":
    numbers = sys.argv[1:3]
    if not all(arg.isdecimal() for arg in numbers):
        sys.exit(__doc__)
    sys.exit(main(*map(int, numbers), flags=sys.argv[3:]))
