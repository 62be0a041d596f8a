"""A person plays a world in the terminal, with the prompt that the model gets: `python envs.py play --env textcraft [--item 3]`."""

import argparse
import sys

import agent
from envs import WORLDS, EnvError, items, make_env, split_item


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 for a world or an item that does not exist."""
    parser = argparse.ArgumentParser(prog="envs.py", description=__doc__)
    parser.add_argument("command", choices=["play"])
    parser.add_argument("--env", default="babyai", help=", ".join(WORLDS))
    parser.add_argument("--item", type=int, help="default: the first of the held-out set")
    parser.add_argument("--horizon", type=int, default=100, help="largest number of turns")
    args = parser.parse_args(argv)
    env = None
    try:
        env = make_env(args.env)
        item = split_item(items(args.env, "test")[0])[1] if args.item is None else args.item
        print(agent.instructions(env.prompt), "", env.reset(item), sep="\n")
        if hasattr(env, "homepage"):  # a world that can be looked at
            print(f"\nIn your own browser, the same sites in the same state: {env.homepage()}")
        total = 0.0
        for turn in range(1, args.horizon + 1):
            reply = input(f"\n[turn {turn}; an empty line ends] > ")
            if not reply.strip():
                return 0
            step = env.step(reply if env.whole_reply else agent.parse(reply))
            total += step.reward
            print(step.observation)
            print(f"[reward {step.reward:g}, {total:g} so far; score {step.score:g}{'' if step.valid else '; that was no action'}]")
            if step.done:
                print("You did it." if step.success else "It is over.")
                return 0
        print("Out of turns.")
        return 0
    except (EOFError, KeyboardInterrupt):
        return 0
    except (EnvError, ValueError, ImportError) as e:
        print(f"envs.py: {e}", file=sys.stderr)
        return 2
    finally:
        if env is not None:
            env.close()
