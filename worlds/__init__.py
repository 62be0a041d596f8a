"""The worlds, one in a file, and what they share."""

import re
from contextlib import suppress

from envs import ItemError, split_item, world_class


def check_item(world: str, item: int, end: int | None = None) -> None:
    """Raise ItemError unless `item` is an int from 0 on, below `end` if there is one."""
    is_number = isinstance(item, int) and not isinstance(item, bool)
    if not is_number or item < 0 or (end is not None and item >= end):
        last = "..." if end is None else end - 1
        raise ItemError(f"{world} has items 0 to {last}, not {item!r}")


def goal_line(observation: str) -> str:
    """The first line that begins with a goal, task, question or objective, after two words at most;
    "" if there is none. So the first observation of BabyAI, TextCraft, SciWorld, SearchQA and
    WebArena says what is to be done.

    >>> goal_line("A link to a question.\\nYour goal: go to the red ball\\nYou see a wall.")
    'Your goal: go to the red ball'
    """
    named = re.search(r"(?im)^(?:\w+ ){0,2}(?:goal|task|question|objective)\b.*", observation)
    return named[0].strip() if named else ""


def category_of(item: str) -> str:
    """The kind of task that an item is, by its world in this process; "" for an unknown item or
    world, or one that lacks its package.

    >>> category_of("babyai_0")
    'GoToRedBallGrey'
    """
    with suppress(ValueError, LookupError):
        name, number = split_item(item)
        return world_class(name).category(number)
    return ""


# An action's verb, amount, thing, number or ingredients.
ACTION = re.compile(r"(?:toggle and go through|go through|go to|pick ?up|focus on|look at|\w+)"
                    r"(?: \d+)? (?!left|right|forward|available)(.+?)(?: \d+| using .*)?")


def thing_named(action: str) -> str:
    """The object of an action, which is the thought in an expert's reply.

    >>> thing_named("go to red ball 1"), thing_named("craft 4 oak planks using 1 oak log")
    ('red ball', 'oak planks')
    >>> thing_named("turn left")
    'nothing'
    """
    match = ACTION.fullmatch(action)
    return match[1] if match else "nothing"
