"""The README's code is code: every Python block runs, and the world it adds can be played."""

import re

from conftest import ROOT

import envs
from rollout import EnvPool, rollout

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_world_in_the_readme_plays(tiny):
    space = {}
    exec(next(b for b in BLOCKS if "class Guess" in b), space)
    world = space["Guess"]()
    assert world.reset(3) == world.reset(3)
    assert [world.step(str(n)).success for n in range(1, 21)].count(True) == 1
    assert not world.step("seven").valid
    (t,) = rollout(*tiny, EnvPool(make=lambda name: space["Guess"]()), ["guess_3"], 2, max_tokens=4)
    assert t.status in ("done", "horizon") and t.turns >= 1


def test_the_notebook_cells_run(capsys):
    for block in BLOCKS:
        if "class Guess" not in block:
            exec(block, {})
    assert "\033[1;32m" in capsys.readouterr().out  # sampled tokens in green


def test_the_names_that_others_import():
    from algos import gae, grpo_advantage  # noqa: F401
    from envs import make_env  # noqa: F401
    from rollout import rollout  # noqa: F401
    from schedule import horizon_at  # noqa: F401
    assert set(envs.WORLDS) == {"babyai", "textcraft", "sciworld"}
