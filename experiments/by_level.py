"""Success by level of a BabyAI run: `python experiments/by_level.py runs/NAME [steps per line]`."""

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import split_item  # noqa: E402
from worlds.babyai import LEVELS  # noqa: E402


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def success_by_level(files):
    """-> {level: [success of each trajectory]}"""
    found = defaultdict(list)
    for file in files:
        for trajectory in read_lines(file):
            if trajectory["env"] != "babyai" or trajectory["status"] == "env_error":
                continue
            number = split_item(trajectory["item"])[1]
            found[LEVELS[number % len(LEVELS)]].append(trajectory["success"])
    return found


def main(run, block):
    """Print a line for each block of `block` training steps."""
    metrics = read_lines(run / "metrics.jsonl")
    files = sorted(run.glob("trajectories/*.jsonl"))
    for begin in range(0, len(metrics), block):
        rows = metrics[begin : begin + block]
        means = []
        for name in ("success", "entropy", "valid_actions", "turns"):
            means.append(f"{name} {sum(row[name] for row in rows) / len(rows):.3f}")
        levels = []
        for level, wins in sorted(success_by_level(files[begin : begin + block]).items()):
            levels.append(f"{level} {sum(wins) / len(wins):.2f}")
        horizon = rows[-1]["horizon"]
        print(f"step {begin}  horizon {horizon}  {'  '.join(means)}  |  {'  '.join(levels)}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    run, block = Path(sys.argv[1]), int((sys.argv[2:] or ["10"])[0])
    if block < 1 or "success" not in (read_lines(run / "metrics.jsonl") or [{}])[0]:
        sys.exit("by_level.py: give the folder of a train.py run and 1 step per line or more")
    main(run, block)
