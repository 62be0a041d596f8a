"""The README's code is code: every Python block runs, and the world it adds can be played."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import envs
from rollout import rollout

RUN = os.environ | {"OMP_NUM_THREADS": "1"}
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_world_in_the_readme_plays(tiny):
    space = {}
    exec(next(b for b in BLOCKS if "class Guess" in b), space)
    world = space["Guess"]()
    assert world.reset(3) == world.reset(3)
    assert [world.step(str(n)).success for n in range(1, 21)].count(True) == 1
    assert not world.step("seven").valid
    (t,) = rollout(*tiny, envs.EnvPool(make=lambda name: space["Guess"]()), ["guess_3"], 2, max_tokens=4)
    assert t.status in ("done", "horizon") and t.turns >= 1


def test_the_world_in_the_readme_trains_as_the_readme_says(tmp_path):
    repo = tmp_path / "repo"
    shutil.copytree(ROOT, repo, ignore=shutil.ignore_patterns(".*", "runs", "tests", "*.egg-info", "__pycache__"))
    (repo / "worlds/guess.py").write_text(next(b for b in BLOCKS if "class Guess" in b))
    code = (repo / "envs.py").read_text()
    (repo / "envs.py").write_text(code.replace("WORLDS = {", 'WORLDS = {"guess": "worlds.guess:Guess", ', 1))
    items = [{"item_id": f"guess_{n}"} for n in range(16)]
    (repo / "data/AgentItemId/guess_train.json").write_text(json.dumps(items))
    command = [sys.executable, "train.py", "--env", "guess", "--horizon", "4,8", "--steps", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=repo, env=RUN, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(r["env"], r["trajectories"], r["env_error"]) for r in rows] == [("guess", 128, 0.0)] * 2


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
    assert set(envs.WORLDS) >= {"babyai", "textcraft", "sciworld", "searchqa"}


def test_every_command_of_the_readme_is_one():
    """Flags exist and make sense; `experiments/readme.py` runs them."""
    sys.path.insert(0, str(ROOT / "experiments"))
    import readme

    import config
    import eval as evaluation
    seen = 0
    for command in readme.commands(readme.pages(ROOT)):
        for name, cfg in (("train.py", config.Config), ("eval.py", evaluation.Config)):
            if name in command:
                words = shlex.split(command.split(name, 1)[1].split("&&")[0], comments=True)
                unknown = config.Parser(cfg, allow_abbrev=False).parse_args_into_dataclasses(words, return_remaining_strings=True)[1]
                assert not unknown, (command, unknown)
                seen += 1
        script = re.search(r"(?:python|torchrun)(?: --\S+)* ([\w/]+\.py)", command)
        assert not script or (ROOT / script[1]).exists(), command
    assert seen >= 8


@pytest.mark.slow
def test_a_newcomer_can_follow_the_readme():
    """Every command of the README and of docs/ that can run here, in a fresh clone and environment; trainings and evaluations cut short."""
    done = subprocess.run([sys.executable, "experiments/readme.py", "--quick"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\nok ") > 10
