"""BabyAI: AgentGym's 40 levels of the package `minigrid`, in words, with high-level actions.

Item n is level n % 40 (in the order of `LEVELS`) with seed n // 40, as in AgentGym. What the agent reads and the actions
it may take are worded as there; these things differ on purpose:

* Reward and score are 1 when the mission is fulfilled and 0 otherwise. AgentGym passes minigrid's 1 - 0.9 steps/limit
  through, adds rewards up into `score`, and takes back the end of an episode whose reward is <= 0.5, so that a slow
  success counts as none. Here success means success, and the limit on turns is the horizon's business alone.
* The mission keeps its own words. AgentGym turns "then" and "after you" into "and", which hides the order it then checks.
* `go to` an object that is already in front performs minigrid's `done`, so that the level looks whether the mission is
  fulfilled; a box that holds something can be toggled (else level 26 has no solution), and so can an open door (else a
  door passed too early could never be opened "after ..."). What one carries at the start (level 23) is not also seen.
Level 16 stays as minigrid has it: where its mission names two doors, its strict check fails every order.
"""

from collections import deque

import gymnasium
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level
from minigrid.core.constants import DIR_TO_VEC, IDX_TO_COLOR, IDX_TO_OBJECT
from minigrid.core.roomgrid import RoomGrid
from minigrid.minigrid_env import MiniGridEnv

from envs import Env, EnvError, Step

roomgrid_level.print = lambda *_: None  # minigrid reports every rejected layout on stdout


def place_agent(self: RoomGrid, i: int | None = None, j: int | None = None, rand_dir: bool = True) -> tuple:
    """minigrid's, draw for draw, but for its search without end where every free cell of a room faces an object (item
    37243114): such a layout is rejected, and minigrid makes another. Returns the agent's position (x, y)."""
    i = self._rand_int(0, self.num_cols) if i is None else i
    j = self._rand_int(0, self.num_rows) if j is None else j
    room = self.room_grid[j][i]
    for _ in range(10_000):
        MiniGridEnv.place_agent(self, room.top, room.size, rand_dir, max_tries=1000)
        front = self.grid.get(*self.front_pos)
        if front is None or front.type == "wall":
            return self.agent_pos
    raise roomgrid_level.RejectSampling("no place for the agent")


RoomGrid.place_agent = place_agent

LEVELS = """GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 GoToImpUnlock
GoToSeqS5R2 GoToRedBlueBall GoToDoor GoToObjDoor Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug
OpenDoorsOrderN4Debug Pickup UnblockPickup PickupLoc PickupDistDebug PickupAbove PutNextLocalS6N4 PutNextS7N4Carrying
Unlock UnlockLocalDist KeyInBox UnlockPickupDist BlockedUnlockPickup UnlockToUnlock ActionObjDoor FindObjS7
KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 SynthS5R2 SynthLoc SynthSeq MiniBossLevel BossLevel
BossLevelNoUnlock""".split()

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)  # minigrid's primitive actions
DOOR_STATES = ("open", "closed", "locked")


class BabyAI(Env):
    """BabyAI's 40 levels (item % 40), a text and a list of actions a turn, as AgentGym's server has them."""

    instant = True
    prompt = (
        "You are an agent in a grid of rooms, and you have a goal. Every turn you see what is in front of you and a list "
        "of available actions. You can turn, move forward, go to an object, pick it up, drop it, and open or pass "
        "doors. What you look for may be behind you: turn to see it. Answer with exactly one action from the list."
    )

    def __init__(self) -> None:
        self._levels = {}  # level -> its minigrid environment, made once and reset
        self.env = None

    def reset(self, item: int) -> str:
        """Start item `item`; -> goal, view and available actions. Raises ValueError unless item is an int >= 0."""
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"babyai has items 0, 1, 2 ...; got {item!r}")
        level = LEVELS[item % len(LEVELS)]
        if level not in self._levels:
            version = "v1" if level == "GoToObjS6" else "v0"
            self._levels[level] = gymnasium.make(f"BabyAI-{level}-{version}", disable_env_checker=True).unwrapped
        self.env = self._levels[level]
        self.env.reset(seed=item // len(LEVELS))
        self.success = self.done = False
        self._look(self.env.gen_obs()["image"])  # the one that reset returns still shows level 23's carried object
        self._last = f"Your goal: {self.env.mission}\n{self.description}{self._action_list()}"
        return self._last

    def step(self, action: str) -> Step:
        """Perform one action of the list. Anything else changes nothing and comes back with valid=False."""
        if self.env is None:
            raise EnvError("babyai: step before reset")
        if self.done:  # a finished episode stays as it is
            return Step(self._last, 0.0, float(self.success), True, self.success)
        action, valid, text = action.strip().lower(), True, None
        if action == "check available actions":
            text = "You can take the following actions: " + ", ".join(self.actions)
        elif action not in self.actions:
            valid, text = False, self.refusals.get(action, "The action is not recognized. Please check valid actions.")
        else:
            self._perform(self.actions[action])
            text = self.description + ("\n The task is completed." if self.success else "")
        self._last = text + self._action_list()
        won = float(self.success)
        return Step(self._last, won, won, self.done, self.success, valid)

    def valid_actions(self) -> list[str]:
        return list(self.actions)

    def _perform(self, primitives: list[int]) -> None:
        for primitive in primitives:
            self.env.step_count = 0  # minigrid's own limit is not used: a late success would have a reward <= 0
            obs, reward, terminated, _, _ = self.env.step(primitive)
            if terminated:  # fulfilled, or (in strict levels) spoiled for good
                self.done, self.success = True, reward > 0
                break
            if primitive != DONE and (obs["image"] == self.image).all():
                break  # blocked: the rest of the plan no longer holds
            self.image = obs["image"]
        self._look(obs["image"])

    def _action_list(self) -> str:
        return "\nAvailable actions: [" + ", ".join(f'"{a}"' for a in self.actions) + "]"

    def _look(self, image) -> None:
        """Put the view (`image` [7, 7, 3]: object, colour, state) into words and into available actions."""
        self.image = image
        env, size = self.env, self.env.agent_view_size
        x0, y0 = (int(c) for c in env.agent_pos)
        fx, fy = (int(c) for c in env.dir_vec)  # unit vector forward; (-fy, fx) is the one to the right
        carrying = env.carrying
        things, blocked, facing = [], set(), None  # things: (distance, name, ahead, right, position)
        for row in range(size):  # farthest row first, left to right: the order in which ties are named
            for col in range(size):
                ahead, right = size - 1 - row, col - size // 2
                if ahead == right == 0:
                    continue  # the agent itself (or what it carries)
                kind = IDX_TO_OBJECT[int(image[col, row, 0])]
                if kind in ("unseen", "empty", "floor"):
                    continue
                pos = (x0 + fx * ahead - fy * right, y0 + fy * ahead + fx * right)
                state = DOOR_STATES[int(image[col, row, 2])] if kind == "door" else ""
                if state != "open" and kind != "goal":
                    blocked.add(pos)
                if right == 0 and kind in ("wall", "box") and (facing is None or ahead < facing[0]):
                    facing = (ahead, kind)
                if kind != "wall":
                    name = " ".join(filter(None, (IDX_TO_COLOR[int(image[col, row, 1])], state, kind)))
                    things.append((ahead + abs(right), name, ahead, right, pos))
        things.sort(key=lambda t: t[0])

        counts, seen = {}, []  # seen: (numbered name, position), near to far
        text = "In front of you in this room, you can see several objects: "
        for _, name, ahead, right, pos in things:
            counts[name] = counts.get(name, 0) + 1
            seen.append((f"{name} {counts[name]}", pos))
            side = f"{ahead} steps in front of you and {abs(right)} steps to your {'right' if right > 0 else 'left'}. "
            text += f"There is a {seen[-1][0]} " + (side if right else f"right in front of you {ahead} steps away. ") + " "
        text += "The room has walls around you. "
        if facing:
            text += f"You are facing a {facing[1]} {facing[0]} steps away. "
        text += f"You are carrying a {carrying.color} {carrying.type}." if carrying else "You are not carrying anything."
        self.description = text
        self._list_actions(seen, blocked, facing, self._paths((x0, y0), int(env.agent_dir), blocked, size))

    def _list_actions(self, seen, blocked, facing, paths) -> None:
        """Fill `self.actions` (name -> primitive actions) and `self.refusals` (name -> why not now)."""
        env, carrying = self.env, self.env.carrying
        acts, no = {"turn left": [LEFT], "turn right": [RIGHT]}, {}

        def offer(name, thing, pos, end, beside=True):
            path = paths(pos, beside)
            if path is None:
                no[f"{name} {thing}"] = f"You cannot {name} {thing}, as there is no path leading to it."
            else:
                acts[f"{name} {thing}"] = path + end or [DONE]

        if facing is None or facing[0] > 1:
            acts["move forward"] = [FORWARD]
        else:
            no["move forward"] = "There is a barrier in front of you, you can't move forward."
        front = tuple(int(c) for c in env.front_pos)
        if carrying is None:
            no["drop"] = "You cannot drop the object, as you are not carrying anything."
            for thing, pos in seen:
                if "door" not in thing and "goal" not in thing:
                    offer("pickup", thing, pos, [PICKUP])
        elif env.grid.get(*front) is not None:
            no["drop"] = "You cannot drop the object, as there is already an object in front of you."
        else:
            acts["drop"] = [DROP]
        for thing, pos in seen:
            if "open door" in thing:
                offer("go through", thing, pos, [], beside=False)
                if pos == front:  # close it: a mission may ask to open a door that was passed before
                    acts["toggle"] = [TOGGLE]
            elif "door" in thing:
                name = "toggle and go through"
                no[f"go through {thing}"] = f"You cannot go through {thing}, as it is closed. You should toggle it first."
                if "locked" in thing and (carrying is None or carrying.type != "key"):
                    no[f"{name} {thing}"] = f"You cannot {name} {thing}, as you are not carrying a key."
                elif "locked" in thing and carrying.color != thing.split()[0]:
                    no[f"{name} {thing}"] = (f"You cannot {name} {thing}, as the color of the key you are carrying does "
                                             "not match the color of door.")
                else:
                    offer(name, thing, pos, [TOGGLE, FORWARD])
                    if pos == front:
                        acts["toggle"] = [TOGGLE]
            elif "box" in thing and pos == front and env.grid.get(*front).contains is not None:
                acts["toggle"] = [TOGGLE]
        for thing, pos in seen:
            offer("go to", thing, pos, [], beside="goal" not in thing)
        acts["check available actions"] = []
        self.actions, self.refusals = acts, no

    def _paths(self, start, direction, blocked, size):
        """Breadth-first search over (cell, direction) inside the view -> function (position, beside) -> primitives or
        None. `beside`: stop in front of the position, looking at it; else on it."""
        reach = self._plan_area(start, direction, size) - blocked
        first = (start, direction)
        before, queue, ends = {first: None}, deque([first]), {}
        while queue:
            state = queue.popleft()
            (x, y), d = state
            ahead = (x + int(DIR_TO_VEC[d][0]), y + int(DIR_TO_VEC[d][1]))
            ends.setdefault((ahead, True), state)
            ends.setdefault(((x, y), False), state)
            for action, new in ((FORWARD, (ahead, d)), (LEFT, ((x, y), (d - 1) % 4)), (RIGHT, ((x, y), (d + 1) % 4))):
                if new not in before and (action != FORWARD or ahead in reach):
                    before[new] = (state, action)
                    queue.append(new)

        def path(pos, beside):
            state = ends.get((pos, beside))
            if state is None:
                return None
            steps = []
            while before[state]:
                state, action = before[state]
                steps.append(action)
            return steps[::-1]

        return path

    @staticmethod
    def _plan_area(start, direction, size):
        """The cells a plan may use: the view, and (as in AgentGym) one more row or column where the view grows towards
        smaller coordinates, behind or to the right of the agent. Cells not seen count as free."""
        fx, fy = (int(c) for c in DIR_TO_VEC[direction])
        rx, ry = -fy, fx
        spans = []
        for at, f, r in ((start[0], fx, rx), (start[1], fy, ry)):
            far_left = at + f * (size - 1) - r * (size // 2)
            spans.append(range(far_left, far_left + size) if r > f else range(far_left - size, far_left + 1))
        return {(x, y) for x in spans[0] for y in spans[1]}
