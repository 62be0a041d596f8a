"""A person plays a world in the terminal, with the prompt that the model gets.

    python envs.py play --env textcraft [--item 3] [--hint]
    python envs.py play --item textcraft_3
"""

import sys
from collections.abc import Callable

import agent
from envs import WORLDS, CommandParser, EnvError, items, make_env, split_item


def play(name: str, item: int | None = None, horizon: int = 100, hint: bool = False,
         make_agent: Callable[[agent.Play], agent.Agent] = agent.react) -> None:
    """Play an episode of the world `name` for at most `horizon` turns; an empty line ends it.

    item: its number (default: the first of the held-out set).
    hint: show the expert's action with every observation.
    make_agent: shows the person what it would show a model, see `agent.load_agent`.
    """
    env = make_env(name)
    try:
        if item is None:
            item = split_item(items(name, "test")[0])[1]
        episode = agent.Play(env, f"{name}_{item}", horizon, make_agent)
        messages = episode.send()
        print(messages[0]["content"], "", messages[-1]["content"], sep="\n")
        if hasattr(env, "homepage"):  # a world with web pages
            address = env.homepage()
            print(f"\nIn your own browser, the same sites in the same state: {address}")
        total = 0.0
        while episode.turns < horizon:
            if hint:
                print(f"[hint: {env.expert() or 'none'}]")
            reply = input(f"\n[turn {episode.turns + 1}; an empty line ends] > ")
            if not reply.strip():
                return
            messages = episode.send(reply)
            turn = episode.turn
            total += turn.reward
            print(turn.observation if messages is None else messages[-1]["content"])
            note = "" if turn.valid else "; that was no action"
            print(f"[reward {turn.reward:g}, {total:g} so far; score {turn.score:g}{note}]")
            if messages is None:
                print("You did it." if turn.success else "It is over.")
                return
        print("Out of turns.")
    finally:
        env.close()


def read_item(item: str | None, world: str | None) -> tuple[str, int | None]:
    """--item and --env -> (world, number of the item). Raises ValueError if they do not fit.

    >>> read_item("textcraft_3", None), read_item("3", "textcraft"), read_item(None, None)
    (('textcraft', 3), ('textcraft', 3), ('babyai', None))
    """
    if item is None or item.isdecimal():
        return world or "babyai", None if item is None else int(item)
    named, number = split_item(item)
    if world not in (None, named):
        raise ValueError(f"--item {item} is not an item of --env {world}")
    return named, number


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 for bad flags, or a world or item that does not exist."""
    parser = CommandParser(prog="envs.py", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("command", choices=["play", "serve", "new"],
        help="serve, new: see python envs.py serve --help, python envs.py new --help")
    add("--env", help=f"{', '.join(WORLDS)}; default: the item's, else babyai")
    add("--item", help="a number, or a name such as textcraft_3; default: the first of the "
                       "held-out set")
    add("--agent", default="react", help="as in train.py --help")
    add("--agent_args", default="", help="the agent's settings: keep=2")
    add("--horizon", type=int, default=100, help="largest number of turns")
    add("--hint", action="store_true", help="show the action that an expert would take")
    try:
        args = parser.parse_args(argv)
        world, number = read_item(args.item, args.env)
        play(world, number, args.horizon, args.hint,
             agent.load_agent(args.agent, args.agent_args))
    except (EOFError, KeyboardInterrupt):
        pass
    except (EnvError, ValueError, ImportError) as e:
        print(f"envs.py: {e}", file=sys.stderr)
        return 2
    return 0
