"""Shorter plans for SciWorld.

The solver of the package `scienceworld` walks through room after room and opens one container after
another until it finds a thing, and measures after every moment while it waits. An episode has no
time for that.
"""

import math
import re
from collections import deque
from collections.abc import Callable
from itertools import groupby

# The doors of the house, which is the same in every item.
DOORS = [
    ("kitchen", "bathroom"), ("kitchen", "hallway"), ("kitchen", "outside"), ("foundry", "outside"),
    ("greenhouse", "outside"), ("greenhouse", "hallway"), ("art studio", "hallway"),
    ("bedroom", "hallway"), ("living room", "hallway"), ("workshop", "hallway"),
]
MOMENTS = {"wait": 11, "wait1": 2}  # how long an action lasts, if not one moment
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


def tour(start: str) -> list[str]:
    """The rooms on a way through the whole house, without the first."""
    path = []
    left = set(ROOMS) - {start}
    here = start
    while left:
        here_to = {room: way(here, room) for room in left}
        here = min(left, key=lambda room: (len(here_to[room]), room))
        path += here_to[here]
        left.difference_update(path)
    return path


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

    room: where the plan starts. works: tries a plan out -> whether it fulfils the task. If neither
    the plan nor a shorter one does, an empty list is returned.
    """
    candidates = []  # the boldest first
    for shorter_waits in (True, False):
        # What a search looks for may be in the last container that it opens.
        for num_opened in (0, 1):
            for base in (_without_stove(plan), plan):
                candidates.append(_shorter(base, room, num_opened, shorter_waits))
    tried = []
    for candidate in [*candidates, plan]:
        if candidate in tried:
            continue
        if works(candidate):
            return candidate
        tried.append(candidate)
    return []


def _without_stove(plan):
    """The plan without the attempt on the stove, if it goes on to the blast furnace."""
    to_stove = [i for i, action in enumerate(plan) if re.match("move .* to stove", action)]
    if not to_stove or "activate blast furnace" not in plan:
        return plan
    away = next(i for i in range(to_stove[0], len(plan)) if plan[i].startswith("pick up "))
    return plan[:to_stove[0]] + plan[away + 1:]


def _shorter(plan, room, num_opened, shorter_waits):
    """A plan without detours. num_opened: of how many containers a search is left."""
    parts = [list(actions) for _, actions in groupby(plan, kind_of)]
    # The solver always measures, but only tasks with a focus on the thermometer ask for it.
    measures = any(part[0].startswith("focus on thermometer") for part in parts)
    shorter = []
    opened = set()  # doors
    for part in parts:
        kind = kind_of(part[0])
        rooms = [action.removeprefix("go to ") for action in part if action.startswith("go to ")]
        if rooms:
            look = part[-1:] if part[-1] == "look around" else []
            part = walk(room, rooms[-1], opened) + look
            room = rooms[-1]
        elif kind == "walk":
            part = []
        elif kind == "search" and len(part) > 1:
            part = part[len(part) - num_opened:]
        elif kind == "wait" and shorter_waits:
            part = min(_wait(part, measures), part, key=len)
        elif part == ["pick up thermometer"] and shorter_waits and not measures:
            part = []
        shorter += part
    return shorter


def _wait(part, measures):
    """As long a wait in as few actions, with the last measurement at its end if `measures`."""
    moments = sum(MOMENTS.get(action, 1) for action in part)
    measured = [action for action in part if action.startswith("use ")][-1:] if measures else []
    num_waits = math.ceil((moments - len(measured)) / MOMENTS["wait"])
    return ["wait"] * num_waits + measured
