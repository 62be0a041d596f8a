"""Item sets of some of SciWorld's tasks alone: `python experiments/sciworld_tasks.py FOLDER find-non-living-thing`, then
`python train.py --env sciworld --data FOLDER`; eval.py plays a run on the folder's held-out items. Training items are the
package's training variations, held-out ones its test variations, at most 300 and 100 of each task."""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from worlds.sciworld import ENDS, TASKS, SciWorld  # noqa: E402


def main(folder, *tasks):
    rng, env, train = random.Random(0), SciWorld(), []
    for path in ("AgentItemId", "AgentEval/sciworld"):
        (Path(folder) / path).mkdir(parents=True)
    test = []
    for task in tasks:
        begin = ENDS[list(TASKS).index(task)] - TASKS[task]
        env.reset(begin)
        numbers = {split: env.variations(split) for split in ("train", "test")}
        train += [begin + n for n in rng.sample(numbers["train"], min(300, len(numbers["train"])))]
        held = [begin + n for n in rng.sample(numbers["test"], min(100, len(numbers["test"])))]
        write(Path(folder) / f"AgentEval/sciworld/{task}.json", held)
        test += held
    write(Path(folder) / "AgentEval/sciworld/sciworld_test.json", test)
    write(Path(folder) / "AgentItemId/sciworld_train.json", train)
    print(f"{len(train)} training items, {len(test)} held out")


def write(path, numbers):
    path.write_text(json.dumps([{"item_id": f"sciworld_{n}"} for n in sorted(numbers)]))


if __name__ == "__main__":
    unknown = [task for task in sys.argv[2:] if task not in TASKS]
    if len(sys.argv) < 3 or unknown:
        sys.exit(f"usage: sciworld_tasks.py FOLDER TASK...; the tasks: {', '.join(TASKS)}")
    main(*sys.argv[1:])
