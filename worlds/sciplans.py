"""Shorter plans for SciWorld.

The solver of the package `scienceworld` walks through room after room and opens one container after
another until it finds a thing, and measures after every moment while it waits. An episode has no
time for that.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import chain, groupby

# The doors of the house, which is the same in every item.
DOORS = [
    ("kitchen", "bathroom"),
    ("kitchen", "hallway"),
    ("kitchen", "outside"),
    ("foundry", "outside"),
    ("greenhouse", "outside"),
    ("greenhouse", "hallway"),
    ("art studio", "hallway"),
    ("bedroom", "hallway"),
    ("living room", "hallway"),
    ("workshop", "hallway"),
]
ROOMS = sorted({room for door in DOORS for room in door})


def way(start: str, end: str) -> list[str]:
    """The rooms on the shortest way through the house, without the first.

    >>> way("bedroom", "kitchen")
    ['hallway', 'kitchen']
    """
    todo = deque([[start]])
    while todo[0][-1] != end:
        path = todo.popleft()
        here = path[-1]
        for one, other in DOORS:
            if here in (one, other):
                todo.append([*path, other if here == one else one])
    return todo[0][1:]


def walk(start: str, end: str, opened: set) -> list[str]:
    """The actions that lead from a room to another. The doors that they open are added to `opened`.

    >>> walk("bedroom", "art studio", {frozenset(["bedroom", "hallway"])})
    ['go to hallway', 'open door to art studio', 'go to art studio']
    """
    actions = []
    here = start
    for room in way(start, end):
        door = frozenset([here, room])
        if door not in opened:
            actions.append(f"open door to {room}")
            opened.add(door)
        actions.append(f"go to {room}")
        here = room
    return actions


def kind_of(action: str) -> str:
    """"walk", "search" or "wait"; for any other action the action itself."""
    if action == "look around" or action.startswith(("open door to ", "go to ")):
        return "walk"
    if action.startswith("open "):
        return "search"
    if action.startswith(("wait", "examine ", "use thermometer ")):
        return "wait"
    return action


def shorten(plan: list[str], room: str, works: Callable[[list[str]], bool]) -> list[str]:
    """Leave out detours, searches and idle turns, as far as the plan still works.

    room: where the plan starts. works: tries a plan out -> whether it fulfils the task.
    """
    parts = [list(actions) for _, actions in groupby(plan, kind_of)]

    # All at once. What a search looks for may be in the last container that it opens.
    for num_opened in (0, 1):
        shorter = _shorter_parts(parts, room, num_opened)
        candidate = list(chain(*shorter))
        if works(candidate):
            return candidate

    # Part by part.
    for index, part in enumerate(shorter):
        attempt = [*parts[:index], part, *parts[index + 1:]]
        if len(part) < len(parts[index]) and works(list(chain(*attempt))):
            parts = attempt
    return list(chain(*parts))


def _shorter_parts(parts, room, num_opened):
    """Each part of a plan, or what may take its place.

    num_opened: of how many containers a search is left.
    """
    shorter = []
    opened = set()  # doors
    for part in parts:
        kind = kind_of(part[0])
        rooms = [action.removeprefix("go to ") for action in part if action.startswith("go to ")]
        if rooms:
            look = part[-1:] if part[-1] == "look around" else []
            part = walk(room, rooms[-1], opened) + look
            room = rooms[-1]
        elif kind == "search" and len(part) > 1:
            part = part[len(part) - num_opened:]
        elif kind == "wait":
            part = min(_wait(part), part, key=len)
        shorter.append(part)
    return shorter


def _wait(part):
    """As long a wait in as few actions, with the last measurement, if there is one, at its end."""
    moments = sum(11 if action == "wait" else 1 for action in part)
    measured = [action for action in part if action.startswith("use ")][-1:]
    return ["wait"] * math.ceil((moments - len(measured)) / 11) + measured
