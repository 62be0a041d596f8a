"""Success by level of a BabyAI run, in blocks of steps: `python experiments/by_level.py runs/NAME [steps a block]`."""

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import split_item  # noqa: E402
from worlds.babyai import LEVELS  # noqa: E402

if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
    sys.exit(__doc__)
run, block = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
files = sorted(run.glob("trajectories/*.jsonl"))
for begin in range(0, len(rows), block):
    wins, part = defaultdict(list), rows[begin:begin + block]
    for file in files[begin:begin + block]:
        for line in file.read_text().splitlines():
            trajectory = json.loads(line)
            wins[LEVELS[split_item(trajectory["item"])[1] % len(LEVELS)]].append(trajectory["success"])
    means = "  ".join(f"{name} {sum(r[name] for r in part) / len(part):.3f}" for name in ("success", "entropy", "valid_actions", "turns"))
    print(f"step {begin}  horizon {part[-1]['horizon']}  {means}  |  "
          + "  ".join(f"{level} {sum(w) / len(w):.2f}" for level, w in sorted(wins.items())))
