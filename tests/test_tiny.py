"""The built-in model is an honest base: it speaks the interface and knows nothing of the tasks."""

import hashlib
import itertools
import json
import random
import sys

import numpy as np
import pytest
from conftest import ROOT

import envs
import rl
from rollout import rollout
from worlds.webarena import env as webarena

sys.path.insert(0, str(ROOT / "data"))
import make_tiny  # noqa: E402

HORIZON = {"babyai": 4, "textcraft": 8, "sciworld": 6}


def random_policy(name, items, episodes):
    """make_tiny's random policy -> score of each item [n] (BabyAI and TextCraft: the success)."""
    env = envs.make_env(name)
    scores = []
    for item, k in itertools.product(items, range(episodes)):
        read = [env.reset(envs.split_item(item)[1])]
        rng = random.Random(f"{item} {k}")
        for _ in range(HORIZON[name]):
            _, action = make_tiny.draw(make_tiny.random_policy(env, name, read), rng)
            step = env.step(action)
            read.append(step.observation)
            if step.done:
                break
        scores.append(step.score)
    env.close()
    return np.array(scores).reshape(len(items), episodes).mean(1)


def test_the_web_policy_acts_on_what_the_window_shows():
    page = ("OBSERVATION:\nTab 0 (current): Shop\n\n[1] RootWebArea 'Shop' focused: True\n"
            "\t[2] link 'My orders'\n\t[3] searchbox 'Find'\n\t[4] StaticText 'Hello.'\n"
            "URL: http://shop.localhost/\nOBJECTIVE: Show my orders.\nPREVIOUS ACTION: None")
    policy = make_tiny.on_page(page)
    assert list(policy) == ["My orders", "Find", "Hello.", "nothing"]
    assert abs(sum(p for p, _ in policy.values()) - 1) < 1e-9
    for _, actions in policy.values():
        assert abs(sum(actions.values()) - 1) < 1e-9
        assert all(webarena.parse(action) for action in actions)
    assert policy["My orders"][1] == {"```click [2]```": 0.95, "```stop [My orders]```": 0.05}
    assert "```type [3] [Show my] [1]```" in policy["Find"][1]
    assert policy["Hello."][1] == {"```stop [Hello.]```": 1.0}


def test_the_targets_of_a_reply_are_the_policys_probabilities():
    # Thoughts: (1, 2), (1, 3) or (4,). Then an action: (5, 9) or (6, 9), where 9 ends the turn.
    levels = [{(1, 2): 0.5, (1, 3): 0.25, (4,): 0.25}, {(5, 9): 0.75, (6, 9): 0.25}]
    found = make_tiny.token_probabilities((1, 2, 5, 9), levels)
    expected = [(0, 1, 0.75), (0, 4, 0.25), (1, 2, 2 / 3), (1, 3, 1 / 3), (2, 5, 0.75),
                (2, 6, 0.25), (3, 9, 1.0)]
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert np.allclose([p for *_, p in found], [p for *_, p in expected])


def test_it_is_ordinary_files_of_a_few_megabytes_and_the_one_that_the_results_refer_to():
    files = list(rl.TINY_MODEL.iterdir())
    assert sum(file.stat().st_size for file in files) < 10e6
    assert not {file.suffix for file in files} & {".bin", ".pt", ".pkl", ".py"}
    config = json.loads((rl.TINY_MODEL / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("qwen2", 8192)
    digest = hashlib.sha256((rl.TINY_MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (ROOT / "data/README.md").read_text()


@pytest.mark.parametrize("name", [
    "babyai", "textcraft", pytest.param("sciworld", marks=pytest.mark.slow)])
def test_it_acts_validly_and_scores_as_much_as_the_random_policy(tiny, name):
    items = envs.items(name, "test")[::4]
    if name == "sciworld":  # the one task in which it scores; its items are few
        items = [item for item, task in envs.categories(name).items()
                 if task == "find-non-living-thing"]
    with envs.EnvPool() as pool:
        played = rollout(*tiny, pool, items, HORIZON[name], samples=2, max_tokens=32, seed=1)
    valid = sum(t.valid_actions for t in played) / sum(t.turns for t in played)
    assert valid > (0.9 if name == "sciworld" else 0.95)
    ours = np.array([t.score for t in played]).reshape(len(items), 2).mean(1)
    difference = ours - random_policy(name, items, 4)  # paired over items
    error = difference.std(ddof=1) / len(items) ** 0.5
    assert abs(difference.mean()) < 3 * error + 0.02, ours.mean()


@pytest.mark.parametrize("name, items_per_seed, tasks", [("babyai", 40, 250),
                                                         ("textcraft", 544, 200)])
def test_no_transcript_uses_an_item_of_the_item_sets_or_has_a_held_out_task(
        name, items_per_seed, tasks):
    env = envs.make_env(name)
    seen = {}  # split -> the first observations of its items
    for split in ("train", "test"):
        numbers = [envs.split_item(item)[1] for item in envs.items(name, split)]
        # make_tiny plays seeds from 100,000 on. Those of the sets are far below.
        assert max(numbers) // items_per_seed < 100_000
        seen[split] = set(map(env.reset, numbers))
    assert not seen["train"] & seen["test"]
    held_out = set(map(make_tiny.task, seen["test"]))
    assert len(held_out) == tasks
    openings = [turns[0][0] for _, turns in make_tiny.conversations(1000, seed=5, worlds=(name,))]
    assert len(openings) == 1000 and not held_out & set(map(make_tiny.task, openings))


def test_exercises_are_in_no_worlds_format():
    rng = random.Random(0)
    words = make_tiny.vocabulary()
    texts = [text for _ in range(3000) for text in make_tiny.exercise(rng, words)]
    for _ in range(500):
        first, pairs = make_tiny.repeating(rng, words)
        texts += [first, *itertools.chain(*pairs)]
    marks = ("Your goal", "Available actions", "Crafting commands", "Goal:", "There is a", '["',
             "go to ", "pickup", "toggle", "Thought", "Action")
    assert [mark for mark in marks if mark in "\n".join(texts)] == []
