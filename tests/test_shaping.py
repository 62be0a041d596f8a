"""Shaping by potentials leaves the best policy as it is; nothing of it reaches an evaluation."""

import itertools

import pytest

from envs import make_env
from trajectory import Trajectory
from update import potential_rewards, shape_rewards
from worlds.textcraft import solution


def play(env, item, choices):
    """Play actions, each given as an index into the valid ones -> (rewards, progress) by turn."""
    env.reset(item)
    steps = []
    for choice in choices:
        valid = env.valid_actions()
        steps.append(env.step(valid[choice % len(valid)]))
        if steps[-1].done:
            break
    return [step.reward for step in steps], [step.progress for step in steps]


def test_every_sequence_of_actions_keeps_its_return():
    """With potentials every sequence of three actions in a game of TextCraft keeps its return.

    The control: paying for progress itself changes returns, and so what is best.
    """
    env = make_env("textcraft")
    changed_by_progress = 0
    for choices in itertools.product(range(6), repeat=3):
        rewards, progress = play(env, 5, choices)  # a game with 4 valid actions at the start
        shaped = [reward + more for reward, more in zip(rewards, potential_rewards(progress))]
        assert sum(shaped) == pytest.approx(sum(rewards))
        changed_by_progress += abs(sum(potential_rewards(progress, keep=True))) > 1e-6
    assert changed_by_progress > 10


def test_progress_reaches_1_on_the_way_of_a_solution():
    env = make_env("textcraft")
    for item in range(0, 544, 13):
        env.reset(item)
        steps = [env.step(action) for action in solution(item)]
        progress = [step.progress for step in steps]
        assert progress == sorted(progress) and progress[-1] == 1.0 and steps[-1].success


def trajectory():
    """Two turns: a prompt of 2 tokens, a reply of 2, an observation of 1, a reply of 3."""
    t = Trajectory("textcraft_1", "textcraft", turns=2, reward=1.0, progress=[0.5, 1.0])
    t.append([1, 2])
    t.append([3, 4], [-1.0, -1.0])
    t.append([5])
    t.append([6, 7, 8], [-1.0, -1.0, -1.0])
    t.rewards[-1] = 1.0
    return t


@pytest.mark.parametrize("shaping, cost, rewards", [
    ("none", 0.0, [0, 0, 0, 0, 0, 0, 0, 1.0]), ("none", 0.125, [0, 0, 0, -0.125, 0, 0, 0, 0.875]),
    ("potential", 0.0, [0, 0, 0, 0.5, 0, 0, 0, 0.5]),
    ("potential", 0.125, [0, 0, 0, 0.375, 0, 0, 0, 0.375]),
    ("progress", 0.0, [0, 0, 0, 0.5, 0, 0, 0, 1.5])])
def test_it_is_paid_where_a_turn_ends(shaping, cost, rewards):
    t = trajectory()
    shape_rewards([t], shaping, cost)
    assert t.rewards == rewards and t.reward == sum(rewards) and t.score == 0.0


@pytest.mark.parametrize("shaping, first_reward", [("potential", 0.0), ("progress", 0.5)])
def test_a_trajectory_that_broke_off_in_a_reply_is_shaped_as_far_as_it_went(shaping, first_reward):
    t = trajectory()
    t.progress.pop()  # the second reply was never taken by the environment
    shape_rewards([t], shaping)
    assert t.rewards == pytest.approx([0, 0, 0, first_reward, 0, 0, 0, 1.0])
    assert t.reward == pytest.approx(1.0 + first_reward)
    empty = Trajectory("a_1", "a")
    shape_rewards([empty], shaping, 0.1)
    assert empty.rewards == [] and empty.reward == 0.0
