"""`kill -9` at random moments: python experiments/kill.py [KILLS] [SEED]. A run of 40 steps that saves every step is killed KILLS
times, 0.2 to 4 s after it wrote its first or next row, and resumed; in the end every metric and every bit of the weights must be
those of the run that nobody killed. Prints what it was doing when it was killed."""

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
ARGS = [sys.executable, "train.py", "--algo", "ppo", "--items_per_step", "8", "--steps", "40", "--save_every", "1"]
TIMES = ("seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def start(out, *more):
    return subprocess.Popen([*ARGS, "--out", str(out), *more], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(kills=20, seed=0):
    rng, doing = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        assert start(whole).wait() == 0
        for n in tqdm(range(kills), desc="kills"):
            child = start(killed, *["--resume"] * (n > 0))
            rows = killed / "metrics.jsonl"
            size = rows.stat().st_size if rows.exists() else 0
            while not (rows.exists() and rows.stat().st_size > size):
                time.sleep(0.005)
                assert child.poll() is None, "the run ended before it was killed: more steps are needed"
            time.sleep(rng.choice([0, rng.uniform(0, 0.1), rng.uniform(0, 2)]))  # right after a row it saves
            child.send_signal(signal.SIGKILL)
            child.wait()
            step = len(metrics(killed))
            saving = any(killed.glob("checkpoints/*.partial"))
            played = (killed / f"trajectories/step_{step - 1:06d}.jsonl").exists()
            doing["saving" if saving else "between the row and the save" if step > max(
                [0, *(int(p.parent.name[5:]) for p in killed.glob("checkpoints/step_*/state.json"))]) or not played
                else "rollout or update"] += 1
        assert start(killed, "--resume").wait() == 0
        same = metrics(whole) == metrics(killed)
        bits = (whole / "final/model.safetensors").read_bytes() == (killed / "final/model.safetensors").read_bytes()
    print(f"{kills} kills while: {dict(doing)}; metrics equal: {same}; weights equal bit for bit: {bits}")
    return 0 if same and bits else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) if all(arg.isdecimal() for arg in sys.argv[1:]) else __doc__)
