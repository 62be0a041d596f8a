"""The worlds, one in a file, and what they share."""

import re

from envs import ItemError


def check_item(world: str, item: int, end: int | None = None) -> None:
    """Raise ItemError unless `item` is an int from 0 on, below `end` if there is one."""
    is_number = isinstance(item, int) and not isinstance(item, bool)
    if not is_number or item < 0 or (end is not None and item >= end):
        last = "..." if end is None else end - 1
        raise ItemError(f"{world} has items 0 to {last}, not {item!r}")


def goal_line(observation: str) -> str:
    """The first line that names a goal, task, question or objective; "" if there is none. So the
    first observation of BabyAI, TextCraft, SciWorld, SearchQA and WebArena says what is to be done.

    >>> goal_line("Two rooms.\\nYour goal: go to the red ball\\nYou see a wall.")
    'Your goal: go to the red ball'
    """
    named = re.search(r".*\b(goal|task|question|objective)\b.*", observation, re.IGNORECASE)
    return named[0].strip() if named else ""
