"""Worlds that can be drawn: an episode is played again, and its states are recorded.

BabyAI's state is its room from above, TextCraft's the inventory with a way to the goal. Both worlds
run in this process and give the same episode for the same item and actions.
"""

from itertools import zip_longest
from typing import Any

from agent import PLAN, READERS, REFLECT, REFLECT_ON_ALL, SUMMARISE, complaint, parse
from envs import Env, make_env, split_item
from trajectory import Trajectory
from worlds import category_of
from worlds.agentgym import LENIENT

# A cell as the simulator encodes it is (kind of object, colour, state).
DOOR = 4
LETTERS = {2: "#", 5: "k", 6: "o", 7: "b"}  # wall, key, ball, box; other kinds are a space
MAX_REMEMBERED = 64  # episodes
DOOR_LETTERS = "dcl"  # by state: open, closed, locked


def draw_room(world: Env) -> dict[str, Any]:
    """BabyAI's room from above -> {"room": (width, cells, (x, y, direction) of the agent)}.

    `cells` has two characters a cell, row by row: a letter and the colour's number.
    """
    env = world.env.unwrapped
    cells = env.grid.encode().transpose(1, 0, 2).reshape(-1, 3).tolist()  # [H * W, 3]
    drawn = []
    for kind, colour, state in cells:
        letter = DOOR_LETTERS[state] if kind == DOOR else LETTERS.get(kind, " ")
        drawn.append(letter + str(colour))
    x, y = env.agent_pos
    return {"room": (env.grid.width, "".join(drawn), (int(x), int(y), int(env.agent_dir)))}


def list_inventory(world: Env) -> dict[str, Any]:
    """TextCraft's state -> {"inventory": {name: amount}} and, while it is empty, "tree": a way to
    the goal."""
    inventory = {name.replace("_", " "): amount for name, amount in world.inventory.items()}
    if inventory:
        return {"inventory": inventory}
    return {"inventory": inventory, "tree": world.goal_tree()}


DRAW = {"babyai": draw_room, "textcraft": list_inventory}


class Replay:
    """Plays the trajectories of a run again.

    config: the run's flags. Without them, or with worlds on servers, nothing is drawn.
    """

    def __init__(self, config: dict):
        self.config = config
        self.arguments = str(config.get("env_args"))
        self.worlds = {}
        self.drawn: dict[tuple, list[dict] | None] = {}  # episodes of late steps are often equal
        # How replies were read must be known.
        if not config.get("env_url") and "action_format" in config:
            self.worlds = {name: self._make(name) for name in DRAW if name in str(config["env"])}

    def _make(self, name: str) -> Env:
        if name == "babyai":
            return make_env(name, upstream=int("babyai.upstream=1" in self.arguments))
        return make_env(name)

    def category(self, item: str) -> str:
        """The kind of task that an item is, "" if that is not known."""
        # On a server, and with tasks of the user's own, the item numbers mean other tasks.
        own_tasks = "questions=" in self.arguments or "tasks=" in self.arguments
        return "" if self.config.get("env_url") or own_tasks else category_of(item)

    def action(self, env: str, reply: str) -> str:
        """The action that the world `env` took from a reply, "" if it found none."""
        action_format = str(self.config.get("action_format"))
        choose = LENIENT.get(env) if self.config.get("parse") == "lenient" else None
        return parse(reply, action_format, choose) if action_format in READERS else ""

    def scenes(self, t: Trajectory) -> list[dict] | None:
        """The state before each reply and after the last one; None if it cannot be drawn."""
        episode = (t.env, t.item, t.turns, str(t.messages))
        if episode not in self.drawn:
            if len(self.drawn) == MAX_REMEMBERED:
                self.drawn.clear()
            self.drawn[episode] = self._draw(t)
        return self.drawn[episode]

    def _draw(self, t: Trajectory) -> list[dict] | None:
        world, agent = self.worlds.get(t.env), self.config.get("agent")
        asked, replies = ([m["content"] for m in t.messages[n::2]] for n in (2, 3))
        context = len(replies) - t.turns  # an expert's replies, before the first one of the policy
        if world is None or not asked or agent == "guide" or context and agent != "backward":
            return None
        try:
            number = split_item(t.item)[1]
            draw, shown = DRAW[t.env], world.reset(number)
            drawn = [draw(world)]
            for text, reply in zip_longest(asked, replies):
                # In a trajectory of another program, the item's number may mean another task. An
                # agent of the user's own may act otherwise, or show something else.
                if shown.strip() not in text:
                    return None
                if reply is None:
                    break
                shown = ""
                if text.endswith(REFLECT_ON_ALL):  # after it the episode starts again
                    shown = world.reset(number)
                elif not text.endswith((PLAN, REFLECT, SUMMARISE)):
                    action = self.action(t.env, reply)
                    shown = world.step(action).observation if action else complaint(
                        reply, str(self.config["action_format"]))
                drawn.append(draw(world))
        except (ValueError, IndexError, KeyError, TypeError):
            return None
        return drawn[context:]
