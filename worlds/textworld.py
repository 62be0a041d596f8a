"""TextWorld: the eight games of TextWorldExpress (Jansen and Côté, 2022).

The games are those of the package `textworld-express`, a Java program. This file is an example of
wrapping a package: it says which episode an item is, and turns the package's replies into `Step`s.

Each game has 3,000 items, numbered through in the order of `GAMES` (see `game_of`). An item is the
same game on every machine. Its size is small (`GAMES`), or the package's own default (`size`).

One JVM plays all episodes of this process. In the package all sorting games of one problem share
their objects, so that what one game takes away is missing in the others. Here each game gets
objects of its own (`JVM._renew_problem`). The other games share nothing.

These things differ from the package's wrapper on purpose:
* Score and reward are between 0 and 1. A failure, which has the score -1 there, has the score 0.
* Only the horizon limits the number of turns. The wrapper's limit is 100.
* Actions are listed in alphabetical order.
"""

import atexit
import json
import threading
from dataclasses import replace
from typing import NamedTuple

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from textworld_express.constants import JAR_PATH

from envs import Env, EnvError, Step
from worlds import check_item
from worlds.jvm import JavaProcess, java

# ---- games and items ----

ONE_ROOM = "numLocations=1,includeDoors=0,limitInventorySize=0"
FIVE_ROOMS = "numLocations=5,includeDoors=0,limitInventorySize=0"


class Game(NamedTuple):
    solver: str  # the package's class that knows how to win
    small: str  # parameters of a small game


GAMES = {  # in the order of the items
    "cookingworld": Game("CookingWorldGoldAgent", f"{ONE_ROOM},numIngredients=2"),
    "coin": Game("CoinGoldAgent", f"{FIVE_ROOMS},numDistractorItems=0"),
    "twc": Game("TWCGoldAgent", f"{ONE_ROOM},numItemsToPutAway=1"),
    "mapreader": Game("MapReaderGoldAgent", f"{FIVE_ROOMS},maxDistanceApart=2"),
    "arithmetic": Game("ArithmeticGoldAgent", ""),
    "sorting": Game("SortingGoldAgent", ""),
    "simonsays": Game("SimonSaysGoldAgent", "gameLength=3"),
    "peckingorder": Game("PeckingOrderGoldAgent", ""),
}
FOLDS = ["train", "dev", "test"]
SEEDS = 1000  # of each fold: the package's are 0 to 999, 10,000 to 10,999 and 20,000 to 20,999
ITEMS = len(GAMES) * len(FOLDS) * SEEDS
MAX_ACTION = 500  # characters
ATTEMPTS = 5  # that the solver has to win: it walks about at random


def game_of(item: int) -> tuple[str, str, int]:
    """The game, fold and seed of an item. Raises ItemError unless it is an int from 0 to 23999.

    Item 3000 -> ("coin", "train", 0); item 5007 -> ("coin", "test", 20007).
    """
    check_item("textworld", item, ITEMS)
    place, seed = divmod(item, SEEDS)
    game, fold = divmod(place, len(FOLDS))
    return list(GAMES)[game], FOLDS[fold], 10_000 * fold + seed


# ---- the Java process ----

DEADLINE = 30.0  # seconds that a call may take before the JVM is given up


class JVM(JavaProcess):
    """A Java process, and the generators of games in it."""

    def __init__(self) -> None:
        super().__init__("textworld", JAR_PATH, DEADLINE)
        self.classes = self.gateway.jvm.textworldexpress
        self.lock = threading.Lock()  # held while a game is made
        self.generators = {}  # (game, parameters) -> its generator, which takes long to make

    def new_game(self, item: int, size: str) -> tuple[JavaObject, dict]:
        """-> (the package's interface to a new game, its first reply)."""
        game, fold, seed = game_of(item)
        key = game, GAMES[game].small if size == "small" else ""
        with self.lock:
            world = self.classes.runtime.PythonInterface()
            if key not in self.generators:
                world.load(*key)
                self.generators[key] = world.gameGenerator()
            getattr(world, "gameGenerator_$eq")(self.generators[key])
            if game == "sorting":
                self._renew_problem(fold, seed)
            return world, json.loads(world.generateNewGameJSON(seed, fold, False))

    def _renew_problem(self, fold, seed):
        """Give the problem of a sorting game objects that no other game has."""
        generator = getattr(self.classes.data, "SortingProblemGenerator$")
        problems = getattr(getattr(generator, "MODULE$"), f"{fold}Set")()
        place = seed % len(problems)
        field = problems[place].getClass().getDeclaredField("inputItems")
        field.setAccessible(True)
        inputs = field.get(problems[place])
        problems[place] = self.classes.preprocessing.SortingProblem(inputs)


_jvms = []  # none or one
_jvms_lock = threading.Lock()


def _running_jvm():
    with _jvms_lock:
        if not _jvms or not _jvms[0].alive():
            _jvms[:] = [JVM()]
        return _jvms[0]


@atexit.register
def close_jvm() -> None:
    """End the JVM. It is started again when needed."""
    with _jvms_lock:
        while _jvms:
            _jvms.pop().close()


# ---- the environment ----


class TextWorld(Env):
    """One game at a time. Any number of environments may play at once, in threads.

    size: "small" or "full", the package's default parameters.
    """

    tiny = dict(horizon="4,8", horizon_steps=20, steps=40, items_per_step=8)
    real = dict(horizon="5,10,15")

    has_progress = True
    prompt = (
        "You play a text game by short commands. It says first what your task is. After each of "
        "your actions it says what has happened, and lists the actions that you can take next.\n"
        "Answer with one of these actions, word for word."
    )

    def __init__(self, size: str = "small"):
        if size not in ("small", "full"):
            raise ValueError(f"textworld.size is small or full, not {size}")
        java("textworld")  # raises ValueError without Java
        self.size = size
        self.world = None  # the package's interface to this episode's game
        self.last = None  # the last Step of this episode

    def reset(self, item: int) -> str:
        """Start item `item` -> the task, what there is, and the actions.

        Raises ItemError unless `item` is an int from 0 to 23999.
        """
        game_of(item)  # raises ItemError
        self.last = None
        self.jvm = _running_jvm()
        with self.jvm.calls():
            self.world, reply = self.jvm.new_game(item, self.size)
            task = self.world.getTaskDescription()
        self.item = item
        self.actions = []  # those of this episode
        self.plan = None  # the expert's next actions, while the agent follows them; None: unknown
        self.listed = sorted(reply["validActions"])
        self.last = Step(self._text(reply))
        return f"{task}\n{self.last.observation}"

    def step(self, action: str) -> Step:
        """Take one action. An action that was not listed has valid=False.

        After the end of the episode the last step is returned again with reward 0. Raises EnvError
        before the first reset and when the JVM is lost.
        """
        if self.last is None:
            raise EnvError("textworld: step before reset")
        if self.last.done:
            return replace(self.last, reward=0.0)
        # Lone surrogates cannot be sent, and a line break would end py4j's command.
        action = action[:MAX_ACTION].encode("utf-8", "replace").decode("utf-8")
        action = " ".join(action.split())
        with self.jvm.calls():
            reply = json.loads(self.world.stepJSON(action))
        as_planned = self.plan and self.plan[0] == action
        self.plan = self.plan[1:] if as_planned else None
        self.actions.append(action)
        valid = action in self.listed
        done = reply["tasksuccess"] or reply["taskfailure"]
        self.listed = [] if done else sorted(reply["validActions"])
        score = max(0.0, reply["score"])
        self.last = Step(
            self._text(reply),
            reward=score - self.last.score,
            score=score,
            done=done,
            success=reply["tasksuccess"],
            valid=valid,
            progress=score,
        )
        return self.last

    def _text(self, reply):
        if not self.listed:
            return reply["observation"].strip()
        quoted = ", ".join(f'"{action}"' for action in self.listed)
        return f"{reply['observation'].strip()}\nAvailable actions: [{quoted}]"

    def valid_actions(self) -> list[str]:
        """The listed actions; empty before a reset and after the end of an episode."""
        if self.last is None:
            return []
        return list(self.listed)

    # ---- the package's own solutions ----

    def expert(self) -> str | None:
        """The next action of the package's solver, which walks about at random until it has won;
        its detours are left out. None: it finds no way to go on. Raises EnvError when the JVM is
        lost.
        """
        if self.last is None or self.last.done:
            return None
        if not self.plan:
            with self.jvm.calls():
                self.plan = self._solve()
        return self.plan[0] if self.plan else None

    def _solve(self):
        """The solver's actions from here on, without detours. It plays on in a copy of the game."""
        solver = getattr(self.jvm.classes.goldagent, GAMES[game_of(self.item)[0]].solver)
        for seed in range(ATTEMPTS):
            world, _ = self._replay([])
            played = world.game().history().length()
            random = self.jvm.gateway.jvm.scala.util.Random(seed)
            try:
                found = solver(world.game()).mkGoldPath(random)
            except Py4JJavaError:  # what the solver looks for is not there
                continue
            path = list(found._2())[played:]
            for plan in (self._without_detours(path), path):
                if self._replay(plan)[1][-1]["tasksuccess"]:
                    return plan
        return []

    def _replay(self, plan):
        """Play this episode and then `plan` -> (the world, its replies from now on)."""
        world, now = self.jvm.new_game(self.item, self.size)
        for action in self.actions:
            now = json.loads(world.stepJSON(action))
        return world, [now, *(json.loads(world.stepJSON(action)) for action in plan)]

    def _without_detours(self, path):
        """The path without the parts that lead back to the same state."""
        states = []
        texts_read = []
        for action, reply in zip(["", *path], self._replay(path)[1]):
            if action.startswith("read "):
                texts_read = sorted({*texts_read, reply["observation"]})
            states.append((reply["look"], reply["inventory"], reply["score"], texts_read))
        plan = []
        place = 0
        while place < len(path):
            place = max(i for i, state in enumerate(states) if state == states[place])
            plan += path[place : place + 1]
            place += 1
        return plan
