"""A person can play what the model plays."""

import random
import subprocess
import sys

import pytest
from conftest import ROOT

from envs import make_env


def play(*args, said=""):
    command = [sys.executable, "envs.py", "play", *args]
    return subprocess.run(
        command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=120
    )


def test_a_person_is_told_what_the_model_is_told():
    env = make_env("textcraft")
    first = env.reset(0)
    done = play("--env", "textcraft", "--item", "0", said="inventory\nnonsense\n\n")
    assert done.returncode == 0
    assert env.prompt in done.stdout and first in done.stdout
    assert "Inventory: You are not carrying anything." in done.stdout
    assert "that was no action" in done.stdout


def test_a_person_can_win():
    item, actions = a_won_episode()
    done = play("--item", str(item), said="\n".join(actions) + "\n")
    assert done.returncode == 0 and "You did it." in done.stdout


def a_won_episode():
    """An item of babyai and at most 6 actions that fulfil its task, found by random play."""
    env = make_env("babyai")
    rng = random.Random(0)
    for item in range(1, 1000):
        env.reset(item)
        actions = []
        for _ in range(6):
            actions.append(rng.choice(env.valid_actions()))
            step = env.step(actions[-1])
            if step.success:
                return item, actions
            if step.done:
                break
    raise AssertionError("random play never won")


@pytest.mark.parametrize(
    "args, says",
    [
        (["--env", "chess"], "chess"),
        (["--item", "-3"], "-3"),
        (["--item", "three"], "three"),
        (["--dance"], "--dance"),
    ],
)
def test_nonsense_is_one_line(args, says):
    done = play(*args)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr
