"""SciWorld's concurrent episodes against the same episodes alone.

    python experiments/faults_sciworld.py [--episodes 200] [--at_once 32] [--rounds 2] [--seed 0]

Each episode is played alone first, with actions drawn from the valid ones. In every round all are
played again with the same actions in `--at_once` environments, each in a thread. Every second
environment has the package's simplifications "easy". Beside them one environment in five does
nothing but reset: without it, the error that this script was written for is not seen, as it shows
only in the first steps after a reset of another world. Every reply must equal the one alone. Prints
how many differ, and the first of them; exit status 1 if there is one.
"""

import argparse
import random
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from worlds import sciworld  # noqa: E402
from worlds.sciworld import ENDS, ITEMS, TASKS, SciWorld  # noqa: E402


def draw_items(episodes, rng):
    """Items of all tasks, in random order."""
    tasks = list(zip(TASKS.values(), ENDS))
    drawn = [tasks[k % len(tasks)] for k in range(episodes)]
    items = [end - 1 - rng.randrange(variations) for variations, end in drawn]
    rng.shuffle(items)
    return items


def draw_actions(valid, rng):
    """From 5 to 25 actions: three that an error of the past changed, two valid ones, and so on."""
    of_verb = {}
    for action in valid:
        of_verb.setdefault(action.split()[0], []).append(action)
    of_verb.pop("focus")  # ends most episodes
    verbs = sorted(of_verb)  # each is as likely as any other
    actions = []
    for _ in range(rng.randint(1, 5)):
        # `mix` makes new objects in the simulator, also where there is nothing to mix. The two
        # actions after it need the agent and its inventory, which are among the last objects made.
        actions += ["mix agent", "disconnect agent", "look in inventory"]
        actions += [rng.choice(of_verb[rng.choice(verbs)]) for _ in range(2)]
    return actions


def play_alone(items, simplifications, rng):
    """Play items where nothing else is played -> for each its actions and replies."""
    sciworld.close_jvms()
    env = SciWorld(simplifications)
    episodes = {}
    for item in tqdm(items, desc="alone"):
        replies = [env.reset(item)]
        actions = draw_actions(env.valid_actions(), rng)
        replies += [str(env.step(action)) for action in actions]
        episodes[item] = actions, replies
    sciworld.close_jvms()
    return episodes


def play_together(parts):
    """Play each part, (simplifications, {item: (actions, replies alone)}), in its own thread.

    -> for each reply that differs: item, number of the step (0: the reset), the reply, that alone;
    and the number of resets made meanwhile
    """
    differing = []
    num_resets = []
    played = threading.Event()

    def run(simplifications, episodes):
        env = SciWorld(simplifications)
        for item, (actions, alone) in episodes.items():
            try:
                replies = [env.reset(item), *(str(env.step(action)) for action in actions)]
            except Exception as e:  # an exception would end the thread silently
                replies = [repr(e)] * len(alone)
            for step, (reply, wanted) in enumerate(zip(replies, alone)):
                if reply != wanted:
                    differing.append((item, step, reply, wanted))
        env.close()

    def keep_resetting(seed):
        rng = random.Random(seed)
        env = SciWorld()
        while not played.is_set():
            env.reset(rng.randrange(ITEMS))
            num_resets.append(1)
        env.close()

    players = [threading.Thread(target=run, args=part) for part in parts]
    resetters = [
        threading.Thread(target=keep_resetting, args=(seed,)) for seed in range(len(parts) // 5 + 1)
    ]
    for thread in [*players, *resetters]:
        thread.start()
    for thread in players:
        thread.join()
    played.set()
    for thread in resetters:
        thread.join()
    return differing, len(num_resets)


def main(num_episodes, at_once, rounds, seed):
    """Returns the number of replies that differ."""
    rng = random.Random(seed)
    items = draw_items(num_episodes, rng)
    begin = time.perf_counter()
    parts = []
    for number, simplifications in enumerate(("", "easy")):
        episodes = play_alone(items[number::2], simplifications, rng)
        parts_here = (at_once + 1 - number) // 2
        for part in range(parts_here):
            parts.append((simplifications, dict(list(episodes.items())[part::parts_here])))
    num_replies = sum(len(alone) for _, part in parts for _, alone in part.values())
    print(f"alone: {num_replies} replies in {time.perf_counter() - begin:.0f} s", flush=True)

    num_differing = 0
    for number in range(1, rounds + 1):
        begin = time.perf_counter()
        differing, num_resets = play_together(parts)
        num_differing += len(differing)
        print(
            f"round {number}, {len(parts)} at a time: {len(differing)} of {num_replies} replies "
            f"differ, {num_resets} resets beside, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        for item, step, reply, wanted in differing[:3]:
            print(f"  item {item}, step {step}: {reply[:200]!r}, alone {wanted[:200]!r}")
    return num_differing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--at_once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(min(main(args.episodes, args.at_once, args.rounds, args.seed), 1))
