"""Fuzz a world: `python experiments/fuzz.py babyai`.

Resets a world 2,000 times and sends it 20,000 actions: valid ones, empty ones, huge ones, unicode
and malformed ones. No exception may escape. After the first fifth, memory (with that of child
processes) may grow by 5 %; exit code 1 if it grows by more.
"""

import argparse
import random
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import Step, items, make_env, split_item  # noqa: E402
from experiments.load import process_tree, resident  # noqa: E402

PIECES = [
    "go to", "get", "craft", "using", "open", "focus on", "red ball 1", "oak planks", "-1", "0",
    "99999999999999999999", ",", "\n", "\t", "\x00", "\ud800", "日本", "🙂", "{}", '["', "%s",
    "../", "<|im_end|>", "\u2028", "door to kitchen", "substance",
]


def nonsense(rng):
    """A random action that is most likely invalid."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(["", " ", "\n", "x" * rng.choice([1000, 100_000]), "get " * 5000])
    if kind == 1:
        return "".join(random_character(rng) for _ in range(rng.randrange(60)))
    return " ".join(rng.choices(PIECES, k=rng.randint(1, 8)))


def random_character(rng):
    """A control character, a letter of a European script, or any code point."""
    points = [rng.randrange(32), rng.randrange(0x300), rng.randrange(0x110000)]
    return chr(rng.choice(points))


def fuzz(name, resets=2000, steps=20_000, seed=0, progress=False):
    """Play the world `name` -> (MiB after the first fifth, MiB at the end).

    Raises:
        Exception: whatever the world lets through.
        AssertionError: an answer of the world is malformed.
    """
    env = make_env(name)
    rng = random.Random(seed)
    numbers = [split_item(i)[1] for split in ("test", "train") for i in items(name, split)]
    # Listing SciWorld's valid actions is slow: there a valid action is rare. SearchQA and WebArena
    # list none.
    valid_share = 0.05 if name == "sciworld" else 0.5
    early = 0.0
    for k in tqdm(range(resets), disable=not progress):
        first = env.reset(rng.choice(numbers))
        assert isinstance(first, str) and first
        for _ in range(steps // resets):
            valid = env.valid_actions() if rng.random() < valid_share else []
            step = env.step(rng.choice(valid) if valid else nonsense(rng))
            assert isinstance(step, Step) and isinstance(step.observation, str)
            assert 0 <= step.score <= 1
            assert len(step.observation) < 100_000
        if k == resets // 5:
            early = resident(process_tree())
    late = resident(process_tree())
    env.close()
    return early, late


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env")
    parser.add_argument("--resets", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    early, late = fuzz(args.env, args.resets, args.steps, progress=True)
    print(
        f"{args.env}: {args.resets} resets, {args.steps} steps, "
        f"memory {early:.0f} -> {late:.0f} MiB ({100 * (late / early - 1):+.1f} %)"
    )
    return int(late > 1.05 * early)


if __name__ == "__main__":
    sys.exit(main())
