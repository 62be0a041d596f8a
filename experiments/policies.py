"""What simple policies and the world's expert reach on held-out items.

    python experiments/policies.py WORLD [episodes per item [horizon [FOLDER [POLICY]]]]

FOLDER: item sets other than those in data/; "" for those. POLICY: this one alone.

uniform: any of the valid actions, in worlds that list them.
imitated: the random policy that the built-in model was trained to imitate, in worlds that it knows.
expert: `Env.expert`, in worlds that have one. It gives up where it sees no way on.
"""

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


def main(name, episodes=1, horizon=None, data=None, only=None):
    data = data or None
    category = envs.categories(name, data)
    for label, figures in measure(name, int(episodes), horizon, data, only).items():
        for what, by_item in figures.items():
            print(f"{label:9} {what:8} {summary(by_item, category)}")


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


def summary(by_item, category):
    """The mean over items, its interval, and the mean of each category, as text.

    by_item: {item: its mean}.
    """
    low, high = bootstrap(list(by_item.values()), 0)
    parts = []
    for c in sorted(set(category.values())):
        part = np.mean([mean for item, mean in by_item.items() if category.get(item) == c])
        parts.append(f"{c} {part:.3f}")
    return f"{np.mean(list(by_item.values())):.3f} [{low:.3f}, {high:.3f}]  {'  '.join(parts)}"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4, 5, 6) or sys.argv[1] not in TINY_HORIZONS:
        worlds = "|".join(TINY_HORIZONS)
        sys.exit(f"usage: policies.py {worlds} [episodes per item [horizon [FOLDER [POLICY]]]]")
    if not all(number.isdecimal() and int(number) > 0 for number in sys.argv[2:4]):
        sys.exit("policies.py: episodes per item and the horizon are integers above 0")
    main(*sys.argv[1:])
