"""What policies that know nothing reach on held-out items: `python experiments/policies.py WORLD [episodes an item [horizon [FOLDER]]]`.
FOLDER: item sets other than those in data/.

uniform: any of the valid actions, where there is a list of them. imitated: the random policy that the built-in model learned its manners from."""

import random
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "data")]
import envs  # noqa: E402
import schedule  # noqa: E402
from eval import bootstrap  # noqa: E402
from make_tiny import draw, random_policy, world  # noqa: E402


def main(name, episodes=1, horizon=None, data=None):
    env, horizon, items = world(name), int(horizon or schedule.TINY[name].eval_rounds), envs.items(name, "test", data)
    category = envs.categories(name, data)
    policies = {"uniform": lambda rng, read: rng.choice(env.valid_actions()),
                "imitated": lambda rng, read: draw(random_policy(env, name, read), rng)[1]}
    if not hasattr(env, "valid_actions"):  # SearchQA and WebArena: there is no list of them
        del policies["uniform"]
    for label, policy in policies.items():
        rng, success, score = random.Random(0), {}, {}
        for item in tqdm(items * int(episodes), desc=label, leave=False):
            read = [env.reset(envs.split_item(item)[1])]
            for _ in range(horizon):
                step = env.step(policy(rng, read))
                read.append(step.observation)
                if step.done:
                    break
            success.setdefault(item, []).append(step.success)
            score.setdefault(item, []).append(step.score)
        for what, by_item in (("success", success), ("score", score)):
            means = [np.mean(values) for values in by_item.values()]
            low, high = bootstrap(means, 0)
            print(f"{label:9} {what:8} {np.mean(means):.3f} [{low:.3f}, {high:.3f}]  " + "  ".join(
                f"{c} {np.mean([m for i, m in zip(by_item, means) if category.get(i) == c]):.3f}" for c in sorted(set(category.values()))))
    env.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4, 5) or sys.argv[1] not in schedule.TINY:
        sys.exit(f"usage: policies.py {'|'.join(schedule.TINY)} [episodes an item [horizon [FOLDER]]]")
    main(*sys.argv[1:])
