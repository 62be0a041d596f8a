"""The effective horizon: the turns of solved episodes over those that the expert takes.

    python experiments/effective_horizon.py FILE ...    # RUN/trajectories/eval_*.jsonl, for example

FILE: trajectories of train.py or of `eval.py --trajectories`, in worlds with an expert. One line
for each: its episodes, the share that is solved, the mean turns of those, and their effective
horizon: the sum of their turns over the sum of the turns in which the expert solves the same items.
1: as short as the expert's. Items that the expert does not solve within MOST_TURNS are left out.
The expert plays in a world without --env_args.
"""

import functools
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs import make_env, split_item  # noqa: E402
from parallel import run_command, user_errors  # noqa: E402
from trajectory import Status, read_trajectories  # noqa: E402

MOST_TURNS = 200
world = functools.cache(make_env)


@functools.cache
def expert_turns(item):
    """The turns that the expert takes to solve the item; 0: it does not solve it."""
    name, number = split_item(item)
    env = world(name)
    env.reset(number)
    for turn in range(1, MOST_TURNS + 1):
        action = env.expert()
        step = action and env.step(action)
        if not step or step.done:
            return turn if step and step.success else 0
    return 0


def effective_horizon(trajectories):
    """The effective horizon of some trajectories -> a ratio of turns; None if none of them solves
    an item that the expert solves, too."""
    pairs = [(t.turns, expert_turns(t.item)) for t in trajectories if t.success]
    turns, expert = map(sum, zip(*(pair for pair in pairs if pair[1]), (0, 0)))
    return turns / expert if expert else None


def main(files):
    for file in files:
        with user_errors():
            played = [t for t in read_trajectories(file) if t.status != Status.ENV_ERROR]
            horizon = effective_horizon(played)
        solved = [t.turns for t in played if t.success]
        text = "none" if horizon is None else f"{horizon:.2f}"
        print(f"{file}: {len(played)} episodes, {len(solved) / max(1, len(played)):.3f} solved in "
              f"{fmean(solved or [0]):.2f} turns; effective horizon {text}", flush=True)


def parse():
    return sys.argv[1:] or sys.exit(__doc__)


if __name__ == "__main__":
    run_command("effective_horizon.py", parse, main)
