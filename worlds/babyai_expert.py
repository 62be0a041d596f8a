"""BabyAI's expert: which action of the list to take now, planned with the whole grid in view.

It plans anew for every action and remembers nothing, so it goes on from any state. It has two
stages:

* `Planner` finds the next goal: one primitive action in front of one of some cells. It takes the
  cheapest route to what the mission asks for next, and removes the first obstacle on it: it opens a
  door, fetches a key, carries a thing aside, or empties the agent's hands.
* `first_action` searches the lists of actions for the fewest turns that reach the goal.

Neither changes the environment or draws a random number.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from minigrid.core.actions import Actions
from minigrid.core.constants import DIR_TO_VEC
from minigrid.envs.babyai.core.verifier import (
    ActionInstr, AndInstr, BeforeInstr, GoToInstr, Instr, OpenInstr, PickupInstr,
)
from minigrid.minigrid_env import MiniGridEnv

Cell = tuple[int, int]

DIRECTIONS = [(int(x), int(y)) for x, y in DIR_TO_VEC]

# What an obstacle adds to the cost of a route, in primitive actions. They are rough figures that
# decide which detour is worth taking.
OPEN_DOOR = 1
MOVE_THING = 6
FETCH_KEY = 30

# The search assumes that a turn covers this many cells. A larger number sometimes finds fewer
# turns, but takes longer.
CELLS_A_TURN = 4


class NoWay(Exception):
    """The mission can no longer be fulfilled."""


class Goal(NamedTuple):
    """Perform `primitive` with one of `cells` in front of the agent."""

    primitive: int | None  # None: any primitive, it is enough to face the cell
    cells: set[Cell]
    through: bool = False  # the cell is a door on the way: going on into it saves a turn


# ---- what to do next ----


class Planner:
    """Finds the next goal in the present state of a minigrid environment, which it only reads."""

    def __init__(self, env: MiniGridEnv):
        self.instrs = env.instrs
        self.carrying = env.carrying
        self.agent = (int(env.agent_pos[0]), int(env.agent_pos[1]))
        self.things = {}  # cell -> what is in it, walls included
        self.empty = set()  # the other cells
        for index, thing in enumerate(env.grid.grid):
            cell = (index % env.width, index // env.width)
            if thing is None:
                self.empty.add(cell)
            else:
                self.things[cell] = thing
        self.walls = {cell for cell, thing in self.things.items() if thing.type == "wall"}
        self.to_unlock = set()  # doors whose keys the plan is after: no route leads through them

    def goal(self) -> Goal:
        """The next goal, for the instruction that costs least. Raises NoWay."""
        plans = []
        for instr in next_instructions(self.instrs):
            self.to_unlock.clear()
            try:
                plans.append(self._plan(instr))
            except NoWay:
                continue
        if not plans:
            raise NoWay
        return min(plans, key=lambda plan: plan[0])[1]

    def blocks(self, cell: Cell) -> bool:
        """Whether the agent cannot step into `cell` now."""
        if cell in self.empty:
            return False
        return cell not in self.things or not self.things[cell].can_overlap()

    def _plan(self, instr):
        """-> (cost of the route for `instr`, the next goal). Raises NoWay."""
        if isinstance(instr, GoToInstr):
            # The verifier, too, compares with these positions. They lag behind while a thing is
            # carried.
            cells = {(int(x), int(y)) for x, y in instr.desc.obj_poss} - self.walls
            cost, route = self._route(self.agent, cells)
            return cost, self._clear(route[:-1]) or Goal(None, cells)
        if isinstance(instr, OpenInstr):
            return self._open(self._cells_of(instr.desc))
        if isinstance(instr, PickupInstr):
            return self._fetch(self._cells_of(instr.desc))
        return self._put_next(instr)

    def _put_next(self, instr):
        beside = _neighbours(self._cells_of(instr.desc_fixed))
        places = beside & self.empty
        if not places:  # all are taken: remove a thing
            return self._fetch({cell for cell in beside if self._is_movable(cell)})
        if self.carrying is None or self.carrying not in instr.desc_move.obj_set:
            return self._fetch(self._cells_of(instr.desc_move), places)
        cost, route = self._route(self.agent, places)
        return cost, self._clear(route[:-1]) or Goal(Actions.drop, places)

    def _open(self, doors):
        """Plan to toggle one of `doors`: a closed one opens, an open one closes."""
        doors = {door for door in doors if not self._needs_key(door)} or doors
        cost, route = self._route(self.agent, doors)
        goal = self._clear(route[:-1])
        if goal is None and self._needs_key(route[-1]):
            goal = self._get_key(route[-1])
        return cost, goal or Goal(Actions.toggle, {route[-1]})

    def _fetch(self, cells, onward=(), keep_free=()):
        """Plan to pick up the thing in one of `cells`, in order to carry it to one of `onward`.

        Things and locked doors on the way onward are dealt with first: that takes free hands.
        keep_free: cells in which nothing is put down.
        """
        if self.carrying is not None and not cells:  # it is the thing that is carried
            return 0, self._put_down(set())
        cost, route = self._route(self.agent, cells)
        way_on = []
        if onward:
            cost_on, way_on = self._route(route[-1], onward)
            cost += cost_on
        goal = self._clear(route[:-1]) or self._clear(way_on[:-1], with_hands_only=True)
        if goal is None and self.carrying is not None:
            goal = self._put_down({*route, *way_on, *keep_free})
            cost += MOVE_THING
        return cost, goal or Goal(Actions.pickup, {route[-1]})

    def _clear(self, way, with_hands_only=False):
        """-> the goal that removes the first obstacle of `way`, or None if there is none.

        with_hands_only: leave the doors that can be opened whatever the agent carries.
        """
        for cell in way:
            if self._needs_key(cell):  # first of all: with the key another way is taken to the door
                return self._get_key(cell)
        for cell in way:
            if not self.blocks(cell):
                continue
            thing = self.things[cell]
            if thing.type != "door":
                return self._fetch({cell}, keep_free=way)[1]
            if thing.is_locked or not with_hands_only:
                goal = self._open({cell})[1]
                return goal._replace(through=goal.cells == {cell})
        return None

    def _get_key(self, door):
        """-> the next goal on the way to holding the key of a locked door."""
        self.to_unlock.add(door)
        keys = {cell for cell, thing in self.things.items() if self._opens(thing, door)}
        if keys:
            return self._fetch(keys, {door})[1]
        if self._holds_key(self.carrying, door):
            return self._put_down(set())
        boxes = {cell for cell, thing in self.things.items() if self._holds_key(thing, door)}
        _, route = self._route(self.agent, boxes)
        return self._clear(route[:-1]) or Goal(Actions.toggle, {route[-1]})

    def _put_down(self, way):
        """-> the goal to drop what is carried, beside `way` and not in front of a door."""
        doors = {cell for cell, thing in self.things.items() if thing.type == "door"}
        reached = self._reached()
        aside = reached - way - _neighbours(doors)
        return Goal(Actions.drop, aside or reached - way or reached)

    # ---- the grid ----

    def _route(self, start: Cell, ends: Iterable[Cell]) -> tuple[int, list[Cell]]:
        """The cheapest way to one of `ends` -> (cost, its cells without `start`). Raises NoWay.

        Dijkstra's algorithm. What is in the end itself costs nothing: the agent only faces it. The
        way from an end to itself is [start].
        """
        ends = set(ends)
        costs = {start: 0}
        previous = {}
        queue = [(0, start)]
        while queue:
            cost, cell = heapq.heappop(queue)
            if cell in ends:
                way = [cell]
                while previous.get(way[-1], start) != start:
                    way.append(previous[way[-1]])
                return cost, way[::-1]
            if cost > costs[cell]:
                continue
            for ahead in _neighbours({cell}):
                new_cost = cost + 1 + (0 if ahead in ends else self._obstacle_cost(ahead))
                if new_cost < costs.get(ahead, float("inf")):
                    costs[ahead] = new_cost
                    previous[ahead] = cell
                    heapq.heappush(queue, (new_cost, ahead))
        raise NoWay

    def _obstacle_cost(self, cell):
        if not self.blocks(cell):
            return 0
        if self._is_movable(cell):
            return MOVE_THING
        if cell not in self.things or cell in self.walls or cell in self.to_unlock:
            return float("inf")
        return FETCH_KEY if self._needs_key(cell) else OPEN_DOOR

    def _reached(self):
        """The empty cells that the agent can face without removing an obstacle."""
        found = {self.agent}
        stack = [self.agent]
        while stack:
            for cell in _neighbours({stack.pop()}) - found:
                if not self.blocks(cell):
                    found.add(cell)
                    stack.append(cell)
        return found & self.empty

    def _cells_of(self, desc):
        """The cells of the things that a description refers to. Things in boxes have none.

        To minigrid a "grey object" may be a wall. Walls are not meant.
        """
        meant = {id(thing) for thing in desc.obj_set}
        cells = {cell for cell, thing in self.things.items() if id(thing) in meant}
        return cells - self.walls

    def _is_movable(self, cell):
        return cell in self.things and self.things[cell].can_pickup()

    def _needs_key(self, cell):
        """Whether there is a locked door in `cell` that the agent has no key for."""
        thing = self.things.get(cell)
        if thing is None or thing.type != "door" or not thing.is_locked:
            return False
        return not self._opens(self.carrying, cell)

    def _opens(self, thing, door):
        """Whether `thing` is a key of the door in the cell `door`."""
        return thing is not None and thing.type == "key" and thing.color == self.things[door].color

    def _holds_key(self, thing, door):
        """Whether `thing` is a box with a key of the door in the cell `door`."""
        return thing is not None and thing.type == "box" and self._opens(thing.contains, door)


def next_instructions(instr: Instr) -> list[ActionInstr]:
    """The instructions of a mission that can be fulfilled now. Raises NoWay if it is impossible."""
    if isinstance(instr, ActionInstr):
        return [instr]
    first, then = instr.instr_a, instr.instr_b
    if isinstance(instr, AndInstr):
        parts = ((first, instr.a_done), (then, instr.b_done))
        return [part for part, verdict in parts if verdict != "success"]
    first_done = instr.a_done
    if not isinstance(instr, BeforeInstr):  # "... after you ..."
        first, then = then, first
        first_done = instr.b_done
    if isinstance(first, OpenInstr) and isinstance(then, OpenInstr) and then.strict:
        # OpenDoorsOrderN4Debug: the toggle that opens the first door is also checked against the
        # second instruction, for which it is the wrong door. Every order fails.
        raise NoWay
    return next_instructions(then if first_done == "success" else first)


def _neighbours(cells):
    return {(x + dx, y + dy) for x, y in cells for dx, dy in DIRECTIONS}


# ---- how to get there in few turns ----


def first_action(
    actions_at: Callable[[Cell, int], dict[str, list[int]]],
    start: tuple[Cell, int],
    goal: Goal,
    blocks: Callable[[Cell], bool],
) -> str | None:
    """The first of few actions that reach `goal` -> its name, or None if there is no way.

    An A* search over (cell, direction). It counts turns, then primitive actions. Its estimate may
    be too high, so that the number of turns is small, not always the smallest.

    actions_at: (cell, direction) -> the list of actions there, name -> primitives.
    blocks: whether the agent cannot step into a cell.
    """
    steps = _steps_to(goal.cells, blocks, start[0])
    best = {start: (0, 0)}  # (cell, direction) -> turns and primitives to get there
    number = itertools.count()  # entries of equal cost leave the queue in their order
    queue = [(0.0, 0, 0, next(number), start, None)]
    while queue:
        _, turns, length, _, state, first = heapq.heappop(queue)
        if state is None:  # the goal
            return first
        if (turns, length) > best[state]:
            continue
        for name, primitives in actions_at(*state).items():
            new_state, reached = _walk(state, primitives, goal, blocks)
            new_cost = (turns + 1, length + len(primitives))
            new_first = first or name
            if reached:
                stays = goal.through and primitives[-1] != Actions.forward
                heapq.heappush(queue, (turns + 1 + stays, *new_cost, next(number), None, new_first))
            elif new_state and new_cost < best.get(new_state, (float("inf"),)):
                best[new_state] = new_cost
                left = max(1, steps.get(new_state[0], float("inf")) / CELLS_A_TURN)
                heapq.heappush(
                    queue, (turns + 1 + left, *new_cost, next(number), new_state, new_first)
                )
    return None


def _walk(state, primitives, goal, blocks):
    """Where an action leads -> ((cell, direction), whether it reaches the goal).

    The state is None if the action would change the grid in a way that is not the goal.
    """
    cell, direction = state
    for primitive in primitives:
        ahead = _ahead(cell, direction)
        if primitive in (Actions.pickup, Actions.drop, Actions.toggle):
            reached = primitive == goal.primitive and ahead in goal.cells
            return None, reached
        stopped = primitive == Actions.forward and blocks(ahead)
        if primitive == Actions.left:
            direction = (direction - 1) % 4
        elif primitive == Actions.right:
            direction = (direction + 1) % 4
        elif primitive == Actions.forward and not stopped:
            cell = ahead
        # The mission is checked after every primitive, also within an action.
        if goal.primitive is None and _ahead(cell, direction) in goal.cells:
            return None, True
        if stopped:
            break
    return (cell, direction), False


def _ahead(cell, direction):
    dx, dy = DIRECTIONS[direction]
    return cell[0] + dx, cell[1] + dy


def _steps_to(cells, blocks, start):
    """Cell -> the number of steps from it to one of `cells`, over cells that are free.

    start: the agent's cell, which counts as free.
    """
    steps = dict.fromkeys(cells, 0)
    wave = set(cells)
    while wave:
        distance = steps[next(iter(wave))] + 1
        wave = {c for c in _neighbours(wave) - steps.keys() if c == start or not blocks(c)}
        steps.update(dict.fromkeys(wave, distance))
    return steps
