"""SciWorld: primary school science in a house of ten rooms (ScienceWorld, Wang et al., 2022).

The simulator is that of the package `scienceworld`, a Java program. One JVM holds many worlds
(about 11 MB each). They share some of the simulator's state, so each JVM has a lock that every call
takes, and every call first restores the state of its own world (see `SciWorld._call`).

Item numbers are AgentGym's: its 23 tasks in the package's order, each with all its variations,
numbered through (0 to 4638). The package's other seven tasks follow (4639 to 7206).

These things differ from the package's wrapper on purpose:
* The wrapper lists all valid actions after every step: about 2,700, which takes three times as long
  as the step itself. Here they are listed only when asked for. The wrapper's rules for the end of
  an episode are kept: task completed, negative score, or more than 100 moves.
* Score and reward are between 0 and 1. A negative score (something irrevocable went wrong) becomes
  0; this ends the episode, as in the wrapper.
* Objects are listed in the same order in every process, because of `-XX:hashCode=2`. With Java's
  default the order differs from run to run.
"""

import atexit
import json
import os
import re
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from scienceworld.constants import JAR_PATH

from envs import Env, EnvError, Step
from worlds import check_item, sciplans
from worlds.agentgym import PROTOCOLS
from worlds.jvm import JavaProcess, java

# ---- tasks and items ----

TASKS = {  # name -> number of variations, in the order of the items
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    # The following tasks are not in AgentGym's data.
    "grow-plant": 126,
    "grow-fruit": 126,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
ENDS = list(accumulate(TASKS.values()))  # for each task, one more than its last item
ITEMS = ENDS[-1]
MAX_ACTION = 500  # characters


def task_of(item: int) -> tuple[str, int]:
    """The task and variation of an item. Raises ItemError unless `item` is an int from 0 to 7206.

    Item 100 -> ("change-the-state-of-matter-of", 10).
    """
    check_item("sciworld", item, ITEMS)
    place = bisect(ENDS, item)
    task = list(TASKS)[place]
    first_item = ENDS[place] - TASKS[task]
    return task, item - first_item


# ---- Java processes ----

WORLDS_A_JVM = 32
DEADLINE = 30.0  # seconds that a call may take before its JVM is given up
# The same for the package's solver, which takes a minute for a few tasks, more on a busy machine.
SOLVER_DEADLINE = 600.0


class FairLock:
    """A lock that threads get in the order in which they ask for it.

    `threading.Lock` may give the lock to one thread again and again: with it, a step of one of 256
    worlds waited 15 s.
    """

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.waiting = deque()  # the thread whose turn it is, and those that wait

    def __enter__(self):
        me = object()
        with self.turn:
            self.waiting.append(me)
            try:
                self.turn.wait_for(lambda: self.waiting[0] is me)
            except BaseException:  # for example Ctrl-C in a notebook
                self._leave(me)
                raise

    def __exit__(self, *_):
        with self.turn:
            self._leave(self.waiting[0])

    def _leave(self, one):
        self.waiting.remove(one)
        self.turn.notify_all()


def _singleton(package, name):
    """The one instance of a Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


class JVM(JavaProcess):
    """A Java process. `calls` takes its lock.

    A process that ends or hangs raises EnvError and is not used again.

    deadline: seconds that a call may take.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__("sciworld", JAR_PATH, deadline)
        self.lock = FairLock()
        self.worlds = 0  # how many environments use this process
        self.begun = None  # when the running call began, by time.monotonic(); None: no call runs
        with self.calls():
            # The simulator's state that all worlds of the JVM share (see `SciWorld._call`).
            classes = self.gateway.jvm
            self.random = _singleton(classes.scala.util, "Random")
            self.object_ids = _singleton(classes.util, "UniqueIdentifier")
            runtime = classes.main.scala.scienceworld.runtime
            self.simplifier = _singleton(runtime, "SimplifierProcessor")
            # Those in force; None: a world was just loaded and has set its own.
            self.simplifications = None

    @contextmanager
    def calls(self) -> Iterator[None]:
        with self.lock:
            self.begun = time.monotonic()
            try:
                with super().calls():
                    yield
            finally:
                self.begun = None

    def new_world(self) -> JavaObject:
        with self.calls():
            return self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def hangs(self) -> bool:
        begun = self.begun  # read once, as another thread may set it to None
        return begun is not None and time.monotonic() - begun > 5


_jvms = []
_jvms_lock = threading.Lock()


def _take_jvm() -> JVM:
    """Choose the JVM with the fewest worlds for one more world.

    A new JVM is started if all are full, or if none is unused and there are fewer than
    min(cores, 4).
    """
    with _jvms_lock:
        _jvms[:] = [jvm for jvm in _jvms if jvm.alive()]
        usable = [jvm for jvm in _jvms if not jvm.hangs()]
        best = min(usable, key=lambda jvm: jvm.worlds, default=None)
        below_limit = len(usable) < min(len(os.sched_getaffinity(0)), 4)
        full = best is None or best.worlds >= WORLDS_A_JVM
        if full or (below_limit and best.worlds > 0):
            best = JVM(DEADLINE)
            _jvms.append(best)
        best.worlds += 1
        return best


def _give_back(jvm):
    with _jvms_lock:
        jvm.worlds -= 1


@atexit.register
def close_jvms() -> None:
    """End all JVMs. They are started again when needed."""
    with _jvms_lock:
        for jvms in (_jvms, _solvers):
            while jvms:
                jvms.pop().close()


# ---- the package's own solutions ----

_solvers = []  # the JVM that `solve` plays in, once there is one
_solved = {}  # (item, simplifications, max_moves, actions so far ...) -> its solution


def solve(item: int, simplifications: str, max_moves: int, actions: Sequence[str]) -> list[str]:
    """Let the package solve an item from the state that an episode is in -> the actions.

    The package's solver looks at the state of a world and plays on in it. So that no episode is
    changed, the episode is played again up to this state, in a JVM where nothing else is played.

    actions: those of the episode so far. An empty list is returned where the solver finds no way
    to the score 1, or none of at most `max_moves` moves. Raises EnvError when the JVM is lost.
    """
    with _jvms_lock:
        if not _solvers or not _solvers[0].alive():
            _solvers[:] = [JVM(SOLVER_DEADLINE)]
        (jvm,) = _solvers
    world, key = jvm.new_world(), (item, simplifications, max_moves, *actions)
    with jvm.calls():  # one at a time: the samples of an item wait for the first one's solution
        if key not in _solved:
            _solved[key] = _solve(jvm, world, item, simplifications, max_moves, actions)
        return [*_solved[key]]


def _solve(jvm, world, item, simplifications, max_moves, actions):
    """The work of `solve`, in the world `world` of the JVM."""
    _set_search_paths(jvm)
    _play_again(jvm, world, item, simplifications, actions)
    interface = world.agentInterface().get()
    room = interface.agent().getContainer().get().name()
    num_played = world.getActionHistory().size()
    if interface.inputParser().isInAmbiguousState():
        world.step("look around")  # takes back the action that was ambiguous
    try:
        world.taskMaker().createGoldActions(*task_of(item), world)
    except Py4JJavaError:  # what the solver looks for is not there
        return []
    if world.getScore() < 1:
        return []

    def works(plan):
        _play_again(jvm, world, item, simplifications, [*actions, *plan])
        return world.getScore() >= 1 and world.getNumMoves() <= max_moves

    return sciplans.shorten(list(world.getActionHistory())[num_played:], room, works)


def _play_again(jvm, world, item, simplifications, actions):
    """Play an item as `SciWorld` does, with the same random numbers, until it is completed."""
    seed = 1000 * item
    jvm.random.setSeed(seed)
    world.load(*task_of(item), simplifications, False)
    world.step("look around")
    for number, action in enumerate(actions):
        jvm.random.setSeed(seed + number)
        world.step(action)
        if world.getCompleted():
            break


def _set_search_paths(jvm):
    """Set the paths that the package's solver takes through all rooms in search of a thing.

    The solver itself takes seconds to find such a way, and keeps it, so that its solutions would
    depend on the items solved before.
    """
    finder = getattr(jvm.gateway.jvm.scienceworld.goldagent, "PathFinder$")
    paths = getattr(finder, "MODULE$").precomputedExhaustivePaths()
    if paths.size() > 0:
        return
    for start in sciplans.ROOMS:
        rooms = sciplans.tour(start)
        path = jvm.gateway.new_array(jvm.gateway.jvm.java.lang.String, len(rooms), 2)
        for i, room in enumerate(rooms):
            path[i][0] = f"open door to {room}"
            path[i][1] = f"go to {room}"
        paths.update(start, path)


# ---- the environment ----


def objects_in_reach(world: JavaObject) -> set[int]:
    """The numbers of the objects that an action may name: those in the room and in the agent's
    inventory, but in nothing that is closed. ScienceWorld's `InputParser.parse` looks for an
    action's objects in these two sets."""
    interface = world.agentInterface().get()
    roots = interface.getAgentVisibleObjects(False)._2(), interface.agent()
    names = [interface.inputParser().getAllUniqueReferentsLUT(root, True, False).mkString(",")
             for root in roots]
    return set(map(int, re.findall(r"(\d+) ->", ",".join(names))))


class SciWorld(Env):
    """One world at a time. Any number of environments may play at once, in threads.

    `reset` uses the environment's world again, or makes one in another JVM if its JVM has ended.

    simplifications: the package's, such as "easy" or "teleportAction,openDoors". The default, none,
        is AgentGym's.
    max_moves: an episode ends after more moves than this. Some tasks' own solutions are longer than
        the package's 100.
    """

    # A Java process holds 32 environments. With more processes, resets were too slow.
    tiny = dict(horizon="4,6", horizon_steps=20, steps=40, slots=32)
    real = dict(horizon="10,20,30", items_per_step=16, rollouts_per_item=8, max_tokens=200)

    has_progress = True
    prompt = PROTOCOLS["sciworld"].prompt  # the same here and on a server

    def __init__(self, simplifications: str = "", max_moves: int = 100):
        java("sciworld")  # raises ValueError without Java
        self.simplifications = simplifications
        self.max_moves = max_moves
        self.jvm = None
        self.world = None  # the simulator's object in the JVM
        self.last = None  # the last Step of this episode
        self.actions = []  # those of this episode
        # The expert's next actions, as long as the agent follows them. None: no plan yet.
        self.plan = None

    def _call(self, *calls):
        """Call methods of the world, (name, arguments ...), or functions of it -> the results."""
        # Three things in the simulator belong to all worlds of a JVM. Each call starts from its own
        # world's, so that a world's texts depend on its item and its own steps alone.
        # * The random generator chooses by which of its names an object appears among the valid
        #   actions: every call has its own seed.
        # * Objects are numbered, and objects of equal numbers are taken for the same one. Loading a
        #   world starts the numbers again: in another world, a new object would get the number of
        #   an old one, for example the agent's, and the old one would not be found.
        # * The simplifications in force are those of the world loaded last.
        jvm = self.jvm
        try:
            with jvm.calls():
                jvm.random.setSeed(self.seed)
                getattr(jvm.object_ids, "count_$eq")(self.last_object_id)
                if jvm.simplifications != self.active_simplifications:
                    if self.active_simplifications is not None:
                        jvm.simplifier.parseSimplificationStr(self.active_simplifications)
                    jvm.simplifications = self.active_simplifications
                results = [call(self.world) if callable(call) else
                           getattr(self.world, call)(*args) for call, *args in calls]
                self.last_object_id = jvm.object_ids.count()
                return results
        except EnvError:
            self.close()
            raise

    def _load(self, item):
        task, variation = task_of(item)
        self.seed = 1000 * item
        if self.jvm is None or not self.jvm.alive():
            self.close()
            self.jvm = _take_jvm()
        if self.world is None:
            self.world = self.jvm.new_world()
        self.last_object_id = 0
        # `load` sets them, and the call after it reads which they are.
        self.active_simplifications = None
        load = ("load", task, variation, self.simplifications, False)
        _, self.active_simplifications = self._call(load, ("getSimplificationsUsed",))
        self.task_name = task
        self.variation = variation

    def reset(self, item: int) -> str:
        """Start item `item` -> the task's description and a look around.

        Raises ItemError unless `item` is an int from 0 to 7206.
        """
        self._load(item)
        look, description = self._call(("step", "look around"), ("freeActionTaskDesc",))
        self.task_description = description.removeprefix("Task Description:\n").strip()
        self.last = Step(look)
        self.item = item
        self.actions = []
        self.plan = None
        return f"{self.task_description}\n{look}"

    def step(self, action: str) -> Step:
        """Take one action. An action that the simulator does not know has valid=False.

        After the end of the episode the last step is returned again with reward 0. Raises EnvError
        before the first reset and when the JVM is lost.
        """
        if self.last is None or self.world is None:
            raise EnvError("sciworld: step before reset")
        before = self.last
        if before.done:
            return Step(before.observation, 0.0, before.score, True, before.success, before.valid)
        # Lone surrogates cannot be sent, and a line break would end py4j's command.
        action = action[:MAX_ACTION].encode("utf-8", "replace").decode("utf-8")
        action = " ".join(action.split())
        observation, score, completed, moves = self._call(
            ("step", action), ("getScore",), ("getCompleted",), ("getNumMoves",)
        )
        self.seed += 1
        self.actions.append(action)
        as_planned = self.plan and self.plan[0] == action
        self.plan = (self.plan[1:] or None) if as_planned else None
        percent = int(round(100 * score))
        done = completed or percent < 0 or moves > self.max_moves
        success = done and percent == 100
        valid = not observation.startswith(("No known action", "Unknown action"))
        score = max(0, percent) / 100
        self.last = Step(
            observation,
            reward=score - before.score,
            score=score,
            done=done,
            success=success,
            valid=valid,
            progress=score,
        )
        return self.last

    @staticmethod
    def category(item: int) -> str:
        """The name of the item's task."""
        return task_of(item)[0]

    def valid_actions(self) -> list[str]:
        """All actions that the simulator takes now, sorted: hundreds or thousands.

        The simulator's own list also holds actions on things in closed containers, which it
        refuses. They are left out. Before a reset and after the end of an episode: none.
        """
        if self.last is None or self.last.done:
            return []
        listed, found = self._call(("getValidActionObjectCombinationsJSON",), (objects_in_reach,))
        return sorted({entry["action"] for entry in json.loads(listed)["validActions"]
                       if found.issuperset(entry["obj_ids"])
                       or entry["action"].startswith("teleport")})  # to any room

    def action_hint(self) -> tuple[list[str], list[str]]:
        """The templates of actions, such as "open OBJ", and the names of the objects in reach."""
        return self._list("getPossibleActions"), self._list("getPossibleObjects")

    def goals(self) -> str:
        """The simulator's own table of sub-goals, and which of them are reached."""
        return self._call(("getGoalProgressStr",))[0]

    def expert(self) -> str | None:
        """The expert's next action; None if it knows no way to go on.

        The expert is the package's solver, which goes on from any state (see `solve`) in a JVM of
        its own. The first call of an episode and the first call after another action than the
        expert's take about a second, some tasks 5 s, mendelian-genetics-known-plant a minute.
        Raises EnvError when the JVM is lost.
        """
        if self.last is None or self.last.done:
            return None
        if self.plan is None:
            self.plan = solve(self.item, self.simplifications, self.max_moves, self.actions)
        return self.plan[0] if self.plan else None

    def variations(self, split: str) -> list[int]:
        """The variations of the current task in the package's split "train", "dev" or "test"."""
        return self._list(f"getVariations{split.capitalize()}")

    def _list(self, name):
        (found,) = self._call((name,))
        with self.jvm.lock:  # reading an element of a Java list takes a call
            return list(found)

    def close(self) -> None:
        """Leave the JVM. May be called again."""
        if self.jvm is not None:
            _give_back(self.jvm)
        self.jvm = None
        self.world = None
