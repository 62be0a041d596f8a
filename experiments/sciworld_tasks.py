"""Item sets of some of SciWorld's tasks alone.

    python experiments/sciworld_tasks.py FOLDER find-non-living-thing
    python train.py --env sciworld --data FOLDER

eval.py plays such a run on the folder's held-out items. Training items are the package's training
variations, held-out items its test variations: at most 300 and 100 of each task.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from worlds.sciworld import ENDS, TASKS, SciWorld  # noqa: E402


def main(folder, *tasks):
    rng = random.Random(0)
    env = SciWorld()
    train = []
    test = []
    for path in ("AgentItemId", "AgentEval/sciworld"):
        (Path(folder) / path).mkdir(parents=True)
    for task in tasks:
        first = ENDS[list(TASKS).index(task)] - TASKS[task]  # the task's first item
        env.reset(first)
        variations = {split: env.variations(split) for split in ("train", "test")}
        train += [first + n for n in sample(rng, variations["train"], 300)]
        held_out = [first + n for n in sample(rng, variations["test"], 100)]
        write(Path(folder) / f"AgentEval/sciworld/{task}.json", held_out)
        test += held_out
    write(Path(folder) / "AgentEval/sciworld/sciworld_test.json", test)
    write(Path(folder) / "AgentItemId/sciworld_train.json", train)
    print(f"{len(train)} training items, {len(test)} held out")


def sample(rng, numbers, most):
    return rng.sample(numbers, min(most, len(numbers)))


def write(path, numbers):
    path.write_text(json.dumps([{"item_id": f"sciworld_{n}"} for n in sorted(numbers)]))


if __name__ == "__main__":
    unknown = [task for task in sys.argv[2:] if task not in TASKS]
    if len(sys.argv) < 3 or unknown:
        sys.exit(f"usage: sciworld_tasks.py FOLDER TASK...; the tasks: {', '.join(TASKS)}")
    main(*sys.argv[1:])
