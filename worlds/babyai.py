"""BabyAI: AgentGym's 40 levels of the package `minigrid`, in words and with high-level actions.

Item n is level n % 40 (in the order of `LEVELS`) with seed n // 40, as in AgentGym. Observations
and actions are worded as in AgentGym. These things differ on purpose, and are as in AgentGym with
`--env_args babyai.upstream=1`:

* Reward and score are 1 when the mission is fulfilled, else 0. AgentGym passes on minigrid's
  reward, 1 - 0.9 * steps / limit, and adds the rewards up in `score`. It also reports an episode
  that ends with a reward <= 0.5 as not done, so that a slow success does not count. Here every
  success counts, and only the horizon limits the number of turns.
* An action ends as soon as the mission is fulfilled. AgentGym performs all primitives of the action
  and keeps only the reward of the last one, so that a door that is opened and passed in one action
  does not count as opened (12 of 234 random episodes succeed only here, one only there).
* Level 4, GoToObjS6, is minigrid 3's -v1, a room of 6 as its name says. AgentGym has minigrid
  2.3.1's -v0, a room of 4.
* The mission keeps minigrid's words. AgentGym replaces "then" and "after you" by "and", which hides
  the order that the level checks.
* `go to` an object directly in front of the agent performs minigrid's action `done`, so that the
  level checks whether the mission is fulfilled. In AgentGym nothing happens.
* A box that contains something can be toggled: without that, KeyInBox has no solution.
* An open door can be toggled: otherwise a door that was passed too early could never be opened
  again where the mission says "after ...".
* The object that the agent carries at the start of PutNextS7N4Carrying is not also listed as seen.
* `go to red ball 2` is the ball that the description calls red ball 2. AgentGym numbers equal
  things anew for each verb, leaving out those without a path, so that the names may not agree.
* `drop` is not listed in front of a door, where minigrid drops nothing.
* A plan does not lead through a closed door. AgentGym's stops in front of it.
* Where neither things nor walls are in view, the description begins as usual. AgentGym uses another
  sentence.

Three things differ even with `upstream=1`. Of two shortest ways AgentGym may take the other one (2
of 240 random episodes). In 5 of the first 1,200 items of levels 35 to 40 (one of level 36) minigrid
2.3.1 chooses another mission, because a room that was locked in a rejected layout still counts as
locked; minigrid 3 has fixed that. Some refusals of doors without a path are worded differently.

Two levels are left as in minigrid although some of their items are impossible. Where the mission of
OpenDoorsOrderN4Debug names two doors, minigrid's strict check fails every order. In 3 of 100 items
of GoToImpUnlock (10 of 300) the key lies in the room that it unlocks: minigrid compares NumPy
integers with `is`.
"""

import copy
import hashlib
import itertools
import pickle
from collections import deque
from functools import lru_cache
from typing import NamedTuple

import gymnasium
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level
from minigrid.core.constants import DIR_TO_VEC, IDX_TO_COLOR, IDX_TO_OBJECT
from minigrid.core.roomgrid import RoomGrid
from minigrid.minigrid_env import MiniGridEnv

from envs import Env, EnvError, Step
from worlds import check_item
from worlds.babyai_expert import NoWay, Planner, first_action

# ---- changes to minigrid ----

# minigrid prints a line for every layout that it rejects.
roomgrid_level.print = lambda *_: None


def place_agent(
    self: RoomGrid, i: int | None = None, j: int | None = None, rand_dir: bool = True
) -> tuple:
    """Replace minigrid's `RoomGrid.place_agent`, which can loop forever.

    It draws the same random numbers, but gives up after 10,000 tries. minigrid's loop does not end
    where every free cell of the room faces an object (item 37243114).

    i, j: column and row of the room; drawn if None. rand_dir: whether the direction is drawn.
    Returns the agent's position (x, y). Raises RejectSampling, which makes minigrid try another
    layout.
    """
    if i is None:
        i = self._rand_int(0, self.num_cols)
    if j is None:
        j = self._rand_int(0, self.num_rows)
    room = self.room_grid[j][i]
    for _ in range(10_000):
        MiniGridEnv.place_agent(self, room.top, room.size, rand_dir, max_tries=1000)
        front = self.grid.get(*self.front_pos)
        if front is None or front.type == "wall":
            return self.agent_pos
    raise roomgrid_level.RejectSampling("no place for the agent")


RoomGrid.place_agent = place_agent

# ---- constants ----

LEVELS = """
GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 GoToImpUnlock
GoToSeqS5R2 GoToRedBlueBall GoToDoor GoToObjDoor Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug
OpenDoorsOrderN4Debug Pickup UnblockPickup PickupLoc PickupDistDebug PickupAbove PutNextLocalS6N4
PutNextS7N4Carrying Unlock UnlockLocalDist KeyInBox UnlockPickupDist BlockedUnlockPickup
UnlockToUnlock ActionObjDoor FindObjS7 KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 SynthS5R2
SynthLoc SynthSeq MiniBossLevel BossLevel BossLevelNoUnlock
""".split()

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)  # minigrid's primitive actions
SEEN = "In front of you in this room, you can see several objects: "
DOOR_STATES = ("open", "closed", "locked")  # in the order of minigrid's encoding


# ---- plans ----


class Plans:
    """The shortest plans (lists of primitive actions) that lead the agent to the cells in view.

    A breadth-first search over (cell, direction), from the agent's cell and direction. The agent
    does not enter the cells `blocked`. size: side length of the view, in cells.
    """

    def __init__(self, start: tuple, direction: int, blocked: set, size: int):
        free = _plan_area(start, direction, size) - blocked
        first = (start, direction)
        self._previous = {first: None}  # state -> (state before it, primitive action between them)
        self._on = {}  # cell -> the first state found that stands on it
        self._beside = {}  # cell -> the first state found that stands in front of it and faces it
        queue = deque([first])
        while queue:
            state = queue.popleft()
            (x, y), d = state
            ahead = (x + int(DIR_TO_VEC[d][0]), y + int(DIR_TO_VEC[d][1]))
            self._on.setdefault((x, y), state)
            self._beside.setdefault(ahead, state)
            moves = [(LEFT, ((x, y), (d - 1) % 4)), (RIGHT, ((x, y), (d + 1) % 4))]
            if ahead in free:
                moves.insert(0, (FORWARD, (ahead, d)))
            for action, new_state in moves:
                if new_state not in self._previous:
                    self._previous[new_state] = (state, action)
                    queue.append(new_state)

    def onto(self, cell: tuple) -> list[int] | None:
        """The primitive actions after which the agent stands on `cell`; None if there are none."""
        return self._actions_to(self._on.get(cell))

    def beside(self, cell: tuple) -> list[int] | None:
        """The primitive actions after which the agent faces `cell`; None if there are none."""
        return self._actions_to(self._beside.get(cell))

    def _actions_to(self, state):
        if state is None:
            return None
        actions = []
        while self._previous[state] is not None:
            state, action = self._previous[state]
            actions.append(action)
        return actions[::-1]


def _plan_area(start, direction, size):
    """The cells that a plan may use -> set of (x, y).

    As in AgentGym these are the cells of the view, and one more row or column on the side of the
    smaller coordinate where that side is behind or to the right of the agent. Cells of the view
    that the agent cannot see count as free.
    """
    forward_x, forward_y = (int(c) for c in DIR_TO_VEC[direction])
    right_x, right_y = -forward_y, forward_x
    columns = _plan_span(start[0], forward_x, right_x, size)
    rows = _plan_span(start[1], forward_y, right_y, size)
    return {(x, y) for x in columns for y in rows}


def _plan_span(position, forward, right, size):
    """The range of one coordinate (x or y) of the plan area.

    forward, right: how the coordinate changes one cell forward and one cell to the right.
    """
    far_left = position + forward * (size - 1) - right * (size // 2)  # of the view's far left cell
    if right > forward:
        return range(far_left, far_left + size)
    return range(far_left - size, far_left + 1)


# ---- the environment ----


class Thing(NamedTuple):
    """An object in view, walls excepted."""

    name: str  # "red ball", "blue locked door"
    ahead: int  # cells in front of the agent
    right: int  # cells to its right; negative: to its left
    position: tuple  # (x, y) in the grid


@lru_cache(2**12)
def _begin(item: int, upstream: bool) -> bytes:
    """The minigrid environment of an item after its reset, and the first image, pickled. Reading
    takes a tenth of the time of making a level, and all samples of an item begin alike."""
    seed, number = divmod(item, len(LEVELS))
    level, version, sizes = LEVELS[number], "v0", {}
    if level == "GoToObjS6":
        version = "v1"
        if upstream:  # minigrid 2.3.1's BabyAI-GoToObjS6-v0, in spite of the S6
            sizes = {"room_size": 4}
    env = gymnasium.make(f"BabyAI-{level}-{version}", disable_env_checker=True, **sizes).unwrapped
    obs, _ = env.reset(seed=seed)
    if not upstream:
        # In PutNextS7N4Carrying the image that `reset` returns still shows the carried object.
        obs = env.gen_obs()
    return pickle.dumps((env, obs["image"]))


class BabyAI(Env):
    """BabyAI's 40 levels (item % 40): every turn a text and a list of actions, as in AgentGym.

    upstream: 1: AgentGym's rules and layouts, as the head of this file lists them. Raises
    ValueError for anything but 0 and 1.
    """

    tiny = dict(horizon="3,4", horizon_steps=30)

    instant = True
    prompt = (
        "You are an agent in a grid of rooms, and you have a goal. Every turn you see what is in "
        "front of you and a list of available actions. You can turn, move forward, go to an "
        "object, pick it up, drop it, and open or pass doors. What you look for may be behind you: "
        "turn to see it. Answer with exactly one action from the list."
    )

    def __init__(self, upstream: int = 0) -> None:
        if upstream not in (0, 1):
            raise ValueError(f"babyai.upstream must be 0 or 1, not {upstream!r}")
        self.upstream = bool(upstream)
        self.env = None  # the minigrid environment of this episode

    def reset(self, item: int) -> str:
        """Start item `item` -> goal, view and available actions.

        Raises ItemError unless `item` is an int >= 0.
        """
        check_item("babyai", item)
        # Bytes of this process's own: nothing from outside is unpickled.
        self.env, image = pickle.loads(_begin(item, self.upstream))
        self.success = False
        self.done = False
        self.reward = 0.0  # of the last action that was performed; with `upstream` only
        self.total = 0.0  # of the rewards; with `upstream` only
        mission = self.env.mission
        if self.upstream:
            mission = mission.replace("then", "and").replace("after you", "and")
        self._look(image)
        goal = f"Your goal: {mission}\n"
        self._last_text = goal + self.description + self._action_list()
        return self._last_text

    def step(self, action: str) -> Step:
        """Perform one action of the list. Any other text changes nothing and gets valid=False."""
        if self.env is None:
            raise EnvError("babyai: step before reset")
        if self.done:  # a finished episode stays as it is
            return Step(self._last_text, 0.0, float(self.success), True, self.success)
        action = action.strip().lower()
        if self.upstream:
            return self._upstream_step(action)
        valid = action in self.actions
        if action == "check available actions":
            text = "You can take the following actions: " + ", ".join(self.actions)
        elif valid:
            self._perform(self.actions[action])
            text = self.description
            if self.success:
                text += "\n The task is completed."
        else:
            unknown = "The action is not recognized. Please check valid actions."
            text = self.refusals.get(action, unknown)
        self._last_text = text + self._action_list()
        reward = float(self.success)
        return Step(self._last_text, reward, reward, self.done, self.success, valid)

    def _upstream_step(self, action: str) -> Step:
        """Take an action by AgentGym's rules.

        The reward is that of the last performed action, even if the present one is not performed.
        Only a reward above 0.5 ends the episode.
        """
        valid = True
        if "check" in action:
            text = "You can take the following actions: " + ", ".join(self.actions)
        elif action in self.actions:
            text = self._upstream_perform(self.actions[action])
        else:
            valid = False
            unknown = "The action is not recognized. Please check valid actions."
            text = self.refusals.get(action, unknown)
        self._last_text = text + self._action_list()
        self.total += self.reward
        score = min(1.0, max(0.0, self.total))
        return Step(self._last_text, self.reward, score, self.done, self.success, valid)

    def _upstream_perform(self, primitives: list[int]) -> str:
        """Perform primitive actions until the way is blocked -> the text."""
        if not primitives:
            return "No change in state."
        for primitive in primitives:
            obs, reward, terminated, _, _ = self.env.step(primitive)
            if (obs["image"] == self.image).all():
                break
            self.image = obs["image"]
        self._look(obs["image"])
        self.reward = float(reward)
        self.done = self.success = terminated and reward > 0.5
        completed = "\n The task is completed." if terminated else ""
        return self.description + completed

    @staticmethod
    def category(item: int) -> str:
        """The name of the item's level."""
        return LEVELS[item % len(LEVELS)]

    def valid_actions(self) -> list[str]:
        return list(self.actions)

    def state(self) -> str | None:
        """A hash of the grid, the agent, what it carries, and which parts of a mission are done."""
        if self.env is None:
            return None
        carried = self.env.carrying and self.env.carrying.encode()
        parts = [self.env.instrs]
        done = []
        for part in parts:  # `parts` grows
            for name in ("a", "b"):
                if hasattr(part, f"instr_{name}"):
                    done.append(getattr(part, f"{name}_done", False) == "success")
                    parts.append(getattr(part, f"instr_{name}"))
        x, y = map(int, self.env.agent_pos)
        agent = f"{x} {y} {self.env.agent_dir} {carried} {done}"
        return hashlib.sha256(self.env.grid.encode().tobytes() + agent.encode()).hexdigest()[:16]

    def expert(self) -> str | None:
        """The next action of an expert that sees the whole grid (`worlds.babyai_expert`)."""
        if self.env is None or self.done:
            return None
        planner = Planner(self.env)
        try:
            goal = planner.goal()
        except NoWay:
            return None
        start = (planner.agent, int(self.env.agent_dir))
        return first_action(self._actions_at, start, goal, planner.blocks)

    def _actions_at(self, cell: tuple, direction: int) -> dict[str, list[int]]:
        """The list of actions that the agent would see from `cell`, facing `direction`."""
        there = copy.copy(self)
        there.env = copy.copy(self.env)
        there.env.agent_pos = cell
        there.env.agent_dir = direction
        there._look(there.env.gen_obs()["image"])
        return there.actions

    def _perform(self, primitives: list[int]) -> None:
        """Perform primitive actions until the episode ends or the way is blocked."""
        for primitive in primitives:
            # Never reach minigrid's own limit of steps: it would make a late reward <= 0.
            self.env.step_count = 0
            obs, reward, terminated, _, _ = self.env.step(primitive)
            if terminated:  # the mission is fulfilled or, in strict levels, can no longer be
                self.done = True
                self.success = reward > 0
                break
            unchanged = (obs["image"] == self.image).all()
            if primitive != DONE and unchanged:
                break  # blocked, so the rest of the plan would lead elsewhere
            self.image = obs["image"]
        self._look(obs["image"])

    def _action_list(self) -> str:
        quoted = ", ".join(f'"{action}"' for action in self.actions)
        return f"\nAvailable actions: [{quoted}]"

    def _look(self, image) -> None:
        """Turn the view into the description and the available actions.

        image: [7, 7, 3], uint8; for each column and row of the view: object, colour, state.
        """
        self.image = image
        things, blocked, barrier = self._read_view(image)
        numbered = _number(things)
        self.description = self._describe(numbered, barrier)
        if self.upstream and not numbered and not blocked:
            nothing = "You cannot see any objects within sight."
            self.description = nothing + self.description.removeprefix(SEEN)
        x, y = (int(c) for c in self.env.agent_pos)
        plans = None
        if numbered:  # without anything in view no plan is asked for
            plans = Plans((x, y), int(self.env.agent_dir), blocked, self.env.agent_view_size)
        self._list_actions(numbered, barrier, plans)

    def _read_view(self, image):
        """-> things in view, near to far; cells that block the way; the barrier straight ahead.

        The barrier is the nearest wall or box straight ahead, as (kind, cells ahead), or None.
        """
        size = self.env.agent_view_size
        agent_x, agent_y = (int(c) for c in self.env.agent_pos)
        forward_x, forward_y = (int(c) for c in self.env.dir_vec)
        right_x, right_y = -forward_y, forward_x
        cells = image.tolist()
        things = []
        blocked = set()
        barrier = None
        # From the farthest row, left to right: things at equal distance are named in this order.
        for row in range(size):
            for col in range(size):
                ahead = size - 1 - row
                right = col - size // 2
                if ahead == 0 and right == 0:
                    continue  # the agent itself, or what it carries
                object_index, color_index, state_index = cells[col][row]
                kind = IDX_TO_OBJECT[object_index]
                if kind in ("unseen", "empty", "floor"):
                    continue
                position = (
                    agent_x + forward_x * ahead + right_x * right,
                    agent_y + forward_y * ahead + right_y * right,
                )
                state = DOOR_STATES[state_index] if kind == "door" else ""
                passed = kind == "door" if self.upstream else state == "open"
                if not passed and kind != "goal":
                    blocked.add(position)
                is_barrier = right == 0 and kind in ("wall", "box")
                if is_barrier and (barrier is None or ahead < barrier[1]):
                    barrier = (kind, ahead)
                if kind != "wall":
                    words = [IDX_TO_COLOR[color_index], state, kind]
                    name = " ".join(word for word in words if word)
                    things.append(Thing(name, ahead, right, position))
        things.sort(key=lambda thing: thing.ahead + abs(thing.right))
        return things, blocked, barrier

    def _describe(self, things, barrier):
        text = SEEN
        for thing in things:
            text += f"There is a {thing.name} "
            if thing.right == 0:
                text += f"right in front of you {thing.ahead} steps away. "
            else:
                side = "right" if thing.right > 0 else "left"
                text += f"{thing.ahead} steps in front of you "
                text += f"and {abs(thing.right)} steps to your {side}. "
            text += " "
        text += "The room has walls around you. "
        if barrier is not None:
            kind, ahead = barrier
            text += f"You are facing a {kind} {ahead} steps away. "
        carrying = self.env.carrying
        if carrying is None:
            return text + "You are not carrying anything."
        return text + f"You are carrying a {carrying.color} {carrying.type}."

    # ---- available actions ----

    def _list_actions(self, things, barrier, plans) -> None:
        """Fill `self.actions` (name -> primitive actions) and `self.refusals` (name -> why not).

        The order of `self.actions` is the order of the list that the agent sees.
        """
        self.actions = {"turn left": [LEFT], "turn right": [RIGHT]}
        self.refusals = {}
        if barrier is not None and barrier[1] == 1:
            reason = "There is a barrier in front of you, you can't move forward."
            self.refusals["move forward"] = reason
        else:
            self.actions["move forward"] = [FORWARD]
        self._list_pickup_and_drop(things, plans)
        for thing in things:
            if "door" in thing.name:
                self._list_door(thing, plans)
            elif "box" in thing.name and self._is_in_front(thing) and not self.upstream:
                box = self.env.grid.get(*thing.position)
                if box.contains is not None:
                    self.actions["toggle"] = [TOGGLE]
        for thing in things:
            to_goal = "goal" in thing.name
            path = plans.onto(thing.position) if to_goal else plans.beside(thing.position)
            self._offer("go to", thing, path, [])
        self.actions["check available actions"] = []

    def _list_pickup_and_drop(self, things, plans):
        if self.env.carrying is None:
            reason = "You cannot drop the object, as you are not carrying anything."
            self.refusals["drop"] = reason
            for thing in things:
                if "door" not in thing.name and "goal" not in thing.name:
                    self._offer("pickup", thing, plans.beside(thing.position), [PICKUP])
        elif not self._can_drop():
            reason = "You cannot drop the object, as there is already an object in front of you."
            self.refusals["drop"] = reason
        else:
            self.actions["drop"] = [DROP]

    def _can_drop(self):
        """Whether `drop` is listed, for an agent that carries something."""
        front = self.env.grid.get(*self._front())
        return front is None or self.upstream and front.type == "door"

    def _list_door(self, door, plans):
        """List what can be done with a door, or why it cannot."""
        if "open door" in door.name:
            self._offer("go through", door, plans.onto(door.position), [])
            # Close it: a mission may ask to open it again.
            if self._is_in_front(door) and not self.upstream:
                self.actions["toggle"] = [TOGGLE]
            return

        through = f"go through {door.name}"
        toggle = f"toggle and go through {door.name}"
        self.refusals[through] = (
            f"You cannot {through}, as it is closed. You should toggle it first."
        )
        carrying = self.env.carrying
        locked = "locked" in door.name
        if locked and (carrying is None or carrying.type != "key"):
            self.refusals[toggle] = f"You cannot {toggle}, as you are not carrying a key."
        elif locked and carrying.color != door.name.split()[0]:
            self.refusals[toggle] = (
                f"You cannot {toggle}, as the color of the key you are carrying does "
                "not match the color of door."
            )
        else:
            path = plans.beside(door.position)
            self._offer("toggle and go through", door, path, [TOGGLE, FORWARD])
            if self._is_in_front(door):
                self.actions["toggle"] = [TOGGLE]

    def _offer(self, verb, thing, path, then):
        """List the action "verb thing": the primitive actions `path`, then those of `then`.

        With path None the action is refused instead. An action without any primitive becomes DONE.
        With `upstream`, `pickup` and `go to` each number equal things anew, in this order.
        """
        name = f"{verb} {thing.name}"
        if self.upstream and verb in ("pickup", "go to"):
            name, _, _ = name.rpartition(" ")
            numbers = itertools.count(1)
            name = next(f"{name} {n}" for n in numbers if f"{name} {n}" not in self.actions)
        if path is None:
            self.refusals[name] = f"You cannot {name}, as there is no path leading to it."
        else:
            primitives = path + then
            self.actions[name] = primitives if primitives or self.upstream else [DONE]

    def _front(self):
        """The cell in front of the agent, as (x, y)."""
        x, y = self.env.front_pos
        return int(x), int(y)

    def _is_in_front(self, thing):
        return thing.position == self._front()


def _number(things):
    """Number things of the same name from 1, in their order: "red ball" -> "red ball 1"."""
    counts = {}
    numbered = []
    for thing in things:
        counts[thing.name] = counts.get(thing.name, 0) + 1
        numbered.append(thing._replace(name=f"{thing.name} {counts[thing.name]}"))
    return numbered
