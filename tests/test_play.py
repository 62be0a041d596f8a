"""A person can play what the model plays."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

import worlds.play
from envs import make_env


def play(*args, said=""):
    command = [sys.executable, "envs.py", "play", *args]
    return subprocess.run(
        command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=120)


def test_a_person_is_told_what_the_model_is_told():
    env = make_env("textcraft")
    first = env.reset(0)
    done = play("--env", "textcraft", "--item", "0", said="inventory\nnonsense\n\n")
    assert done.returncode == 0
    assert env.prompt in done.stdout and first in done.stdout
    assert "Inventory: You are not carrying anything." in done.stdout
    assert "that was no action" in done.stdout


def test_a_person_who_follows_the_hints_wins():
    env = make_env("textcraft")
    env.reset(200)
    actions = []
    while action := env.expert():
        actions.append(action)
        env.step(action)
    assert len(actions) > 1
    done = play("--env", "textcraft", "--item", "200", "--hint", said="\n".join(actions) + "\n")
    assert "You did it." in done.stdout
    assert re.findall(r"\[hint: (.*)\]", done.stdout) == actions
    assert "[hint" not in play("--env", "textcraft", said="\n").stdout


@pytest.mark.parametrize("args", ["--env chess", "--item -3", "--item three", "--dance",
                                  "--env textcraft --item babyai_3"])
def test_nonsense_is_one_line(args, capsys):
    assert worlds.play.main(["play", *args.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and args.split()[-1] in said
