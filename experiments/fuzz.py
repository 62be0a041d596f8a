"""Nonsense for hours: `python experiments/fuzz.py babyai` resets a world 2,000 times and sends it 20,000 actions: valid ones, none, huge
ones, unicode, malformed ones. No exception may escape, and memory (with child processes) may grow by 5 % after the first fifth."""

import argparse
import random
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import Step, items, make_env, split_item  # noqa: E402
from experiments.load import resident  # noqa: E402

PIECES = ["go to", "get", "craft", "using", "open", "focus on", "red ball 1", "oak planks", "-1", "0", "99999999999999999999", ",", "\n",
          "\t", "\x00", "\ud800", "日本", "🙂", "{}", "[\"", "%s", "../", "<|im_end|>", "\u2028", "door to kitchen", "substance"]


def nonsense(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(["", " ", "\n", "x" * rng.choice([1000, 100_000]), "get " * 5000])
    if kind == 1:
        return "".join(chr(rng.choice([rng.randrange(32), rng.randrange(0x300), rng.randrange(0x110000)])) for _ in range(rng.randrange(60)))
    return " ".join(rng.choices(PIECES, k=rng.randint(1, 8)))


def fuzz(name, resets=2000, steps=20_000, seed=0, progress=False):
    """-> (MiB after the first fifth, MiB at the end). Raises whatever the world lets through."""
    env, rng, numbers = make_env(name), random.Random(seed), [split_item(i)[1] for split in ("test", "train") for i in items(name, split)]
    early = 0.0
    for k in tqdm(range(resets), disable=not progress):
        first = env.reset(rng.choice(numbers))
        assert isinstance(first, str) and first
        for _ in range(steps // resets):
            # listing SciWorld's valid actions is slow: now and then is enough
            valid = env.valid_actions() if rng.random() < (0.05 if name == "sciworld" else 0.5) else []
            step = env.step(rng.choice(valid) if valid else nonsense(rng))
            assert isinstance(step, Step) and isinstance(step.observation, str) and 0 <= step.score <= 1 and len(step.observation) < 100_000
        if k == resets // 5:
            early = resident()
    late = resident()
    env.close()
    return early, late


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("--resets", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    early, late = fuzz(args.env, args.resets, args.steps, progress=True)
    print(f"{args.env}: {args.resets} resets, {args.steps} steps, memory {early:.0f} -> {late:.0f} MiB ({100 * (late / early - 1):+.1f} %)")
    sys.exit(late > 1.05 * early)
