"""A person can play what the model plays."""

import random
import subprocess
import sys

import pytest
from conftest import ROOT

from envs import make_env


def play(*args, said=""):
    return subprocess.run([sys.executable, "envs.py", "play", *args], cwd=ROOT, input=said, capture_output=True, text=True, timeout=120)


def test_a_person_is_told_what_the_model_is_told_and_can_win():
    world = make_env("textcraft")
    first = world.reset(0)
    done = play("--env", "textcraft", "--item", "0", said="inventory\nnonsense\n\n")
    assert done.returncode == 0 and world.prompt in done.stdout and first in done.stdout
    assert "Inventory: You are not carrying anything." in done.stdout and "that was no action" in done.stdout
    world, rng, step, item = make_env("babyai"), random.Random(0), None, 0
    while not (step and step.success):  # somebody who takes any valid action wins now and then
        item, actions = item + 1, []
        world.reset(item)
        for _ in range(6):
            actions.append(rng.choice(world.valid_actions()))
            step = world.step(actions[-1])
            if step.done:
                break
    done = play("--item", str(item), said="\n".join(actions) + "\n")
    assert done.returncode == 0 and "You did it." in done.stdout


@pytest.mark.parametrize("args, says", [(["--env", "chess"], "chess"), (["--item", "-3"], "-3")])
def test_nonsense_is_one_line(args, says):
    done = play(*args)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and says in done.stderr
