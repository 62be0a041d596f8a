"""Plays the plan of an embedded task (websites/templates.py), an action for each observation.

A plan sees what the agent sees, and scrolls where an element is not in the window.
"""

from envs import Env, Step
from websites import tasks
from worlds.webarena.tree import find

MAX_SCROLLS = 10  # in a row, to look for one element


def next_action(step: tuple, observation: str) -> tuple[str, bool]:
    """One step of a plan -> (an action in WebArena's words, whether it carries the step out).

    step: ("click", role, name), ("type", role, name, text, enter), or ("do", action).
    An element that is not in the observation gives a scroll, which does not carry the step out.
    """
    if step[0] == "do":
        return step[1], True
    number = find(observation, step[1], step[2])
    if number is None:
        return "scroll [down]", False
    if step[0] == "click":
        return f"click [{number}]", True
    text, enter = step[3:]
    return f"type [{number}] [{text}] [{enter}]", True


def solve(env: Env, item: int) -> Step:
    """Play the item by its plan -> the last step. Raises RuntimeError for a missing element."""
    observation = env.reset(item)
    _, plan, answer = tasks.make(item)
    for step in [*plan, ("do", f"stop [{answer}]")]:
        done = False
        scrolls = 0
        while not done:
            if scrolls == MAX_SCROLLS:
                raise RuntimeError(f"item {item}: no {step} on\n{observation}")
            action, done = next_action(step, observation)
            last = env.step(f"```{action}```")
            observation = last.observation
            scrolls += 1
    return last
