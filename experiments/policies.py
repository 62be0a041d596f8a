"""What simple policies and the world's expert reach on held-out items.

    python experiments/policies.py WORLD [EPISODES [HORIZON [FOLDER [POLICY]]]] [--out FILE.json]

uniform: any of the valid actions, in worlds that list them.
imitated: the random policy that the built-in model was trained to imitate, in worlds that it knows.
expert: `Env.expert`, in worlds that have one. It gives up where it sees no way on.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import envs  # noqa: E402
from config import TINY_HORIZONS  # noqa: E402
from eval import bootstrap  # noqa: E402
from make_tiny import SLIPS, draw, random_policy, world  # noqa: E402


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", choices=list(TINY_HORIZONS))
    parser.add_argument("episodes", nargs="?", type=int, default=1, help="of each item")
    parser.add_argument("horizon", nargs="?", type=int, help="default: the tiny model's")
    parser.add_argument("folder", nargs="?", default="", help="item sets; default: those in data/")
    parser.add_argument("policy", nargs="?", default="", help="this one alone")
    parser.add_argument("--out", type=Path, help="file for the figures, those of every item too")
    args = parser.parse_intermixed_args()
    if args.episodes < 1 or (args.horizon is not None and args.horizon < 1):
        parser.error("episodes per item and the horizon are integers above 0")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    return args


def main():
    args = parse()
    category = envs.categories(args.world, args.folder or None)
    found = measure(args.world, args.episodes, args.horizon, args.folder, args.policy)
    for label, figures in found.items():
        for what, by_item in figures.items():
            print(f"{label:9} {what:8} {summary(by_item, category)}")
    if args.out:
        kept = {label: kept_figures(figures, category) for label, figures in found.items()}
        args.out.write_text(json.dumps(kept))


def kept_figures(figures, category):
    """What --out keeps of a policy: means, their intervals, and the figures of every item.

    Args:
        figures: {"success", "score" or "turns": {item: its mean}}.
        category: {item: its category}.
    """
    kept = {"ci95": {what: bootstrap(list(by_item.values()), 0)
                     for what, by_item in figures.items()}}
    kept |= {what: float(np.mean(list(by_item.values()))) for what, by_item in figures.items()}
    by_category = category_means(figures["success"], category)
    kept["categories"] = {c: float(mean) for c, mean in by_category}
    kept["items"] = {item: [float(by_item[item]) for by_item in figures.values()]
                     for item in figures["success"]}  # [success, score, turns]
    return kept


def measure(name, episodes=1, horizon=None, data=None, only=None):
    """Play the held-out items -> {policy: {"success", "score", "turns": {item: its mean}}}.

    only: the name of a policy; None: all of them. Exits where the world does not have it.
    """
    env = world(name)
    horizon = int(horizon or TINY_HORIZONS[name].eval_horizon)
    items = envs.items(name, "test", data)

    def uniform(rng, read):
        return rng.choice(env.valid_actions())

    def imitated(rng, read):
        return draw(random_policy(env, name, read), rng)[1]

    def expert(rng, read):
        return env.expert()

    policies = {"uniform": uniform, "imitated": imitated, "expert": expert}
    if type(env).valid_actions is envs.Env.valid_actions:  # SearchQA and WebArena list none
        del policies["uniform"]
    if name not in SLIPS:  # the built-in model was not trained on this world
        del policies["imitated"]
    if type(env).expert is envs.Env.expert:
        del policies["expert"]
    if only:
        if only not in policies:
            sys.exit(f"policies.py: {name} has the policies {', '.join(policies)}, not {only}")
        policies = {only: policies[only]}
    found = {}
    for label, policy in policies.items():
        rng = random.Random(0)
        played = {item: [] for item in items}
        for item in tqdm(items * episodes, desc=label, leave=False):
            step, turns = play(env, item, horizon, policy, rng)
            played[item].append((step.success, step.score, turns))
        means = {item: np.mean(figures, axis=0) for item, figures in played.items()}
        found[label] = {what: {item: mean[place] for item, mean in means.items()}
                        for place, what in enumerate(("success", "score", "turns"))}
    env.close()
    return found


def play(env, item, horizon, policy, rng):
    """One episode -> (the last step, the number of turns).

    `policy(rng, observations) -> action`; None gives up, which counts as all turns without success.
    """
    observations = [env.reset(envs.split_item(item)[1])]
    step = envs.Step(observations[0])
    for turn in range(1, horizon + 1):
        action = policy(rng, observations)
        if action is None:
            break
        step = env.step(action)
        observations.append(step.observation)
        if step.done:
            return step, turn
    return step, horizon


def category_means(by_item, category):
    """The means of the categories, sorted by name -> (category, mean), ...

    Args:
        by_item: {item: its mean}.
        category: {item: its category}.
    """
    for c in sorted(set(category.values())):
        yield c, np.mean([mean for item, mean in by_item.items() if category.get(item) == c])


def summary(by_item, category):
    """The mean over items, its interval, and the mean of each category, as text."""
    low, high = bootstrap(list(by_item.values()), 0)
    parts = "  ".join(f"{c} {mean:.3f}" for c, mean in category_means(by_item, category))
    return f"{np.mean(list(by_item.values())):.3f} [{low:.3f}, {high:.3f}]  {parts}"


if __name__ == "__main__":
    main()
