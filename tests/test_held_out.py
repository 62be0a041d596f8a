"""What is held out in any folder of data/ is trained on in none."""

import json

import pytest
from conftest import ROOT

from envs import UserError, items, make_env, split_item
from websites import tasks

FOLDERS = [ROOT / "data", *(ROOT / "data" / name for name in ("rooms", "levels", "crafts", "coin"))]
WORLDS = sorted(path.stem.removesuffix("_train")
                for path in (ROOT / "data/AgentItemId").glob("*_train.json"))
# World -> how many held-out items begin, goal included, as some item in training does. SciWorld's
# variations of a task, and TextWorld's games of a kind, differ in what is seen later.
SAME_BEGINNING = {"sciworld": 16, "textworld": 0}


def both_sides(world):
    """-> the numbers of the training items, and of the held-out ones, of all folders"""
    found = set(), set()
    for folder in FOLDERS:
        if (folder / f"AgentItemId/{world}_train.json").exists():
            for numbers, split in zip(found, ("train", "test")):
                numbers.update(split_item(item)[1] for item in items(world, split, folder))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_no_item_is_on_both_sides(world):
    train, test = both_sides(world)
    assert train and test and not train & test


@pytest.mark.parametrize("world", ["babyai", "textcraft", *(
    pytest.param(name, marks=pytest.mark.slow) for name in SAME_BEGINNING)])
def test_no_held_out_episode_begins_as_one_in_training_does(world):
    env = make_env(world)
    train, test = ([env.reset(n) for n in sorted(numbers)] for numbers in both_sides(world))
    env.close()
    same = sum(observation in set(train) for observation in test)
    print(f"{world}: {same} of {len(test)}")
    assert same == SAME_BEGINNING.get(world, 0)


def test_webarenas_templates_and_words_are_on_one_side():
    """The sites have few forums, projects, people and years, so tasks share their names."""
    train, test = both_sides("webarena")
    count = len(tasks.TEMPLATES)
    assert not {n % count for n in train} & {n % count for n in test}
    made, held_out = ([tasks.make(n)[0] for n in numbers] for numbers in (train, test))
    intents = {task["intent"] for task in held_out}
    assert len(intents) == len(test) and not intents & {task["intent"] for task in made}
    names = {str(value) for task in made for value in task["instantiation_dict"].values()}
    shared = sum(not names.isdisjoint(map(str, task["instantiation_dict"].values()))
                 for task in held_out)
    print(f"webarena: {shared} of {len(test)} name something that is named in training")
    assert shared == 98


def test_searchqas_questions_with_their_answers_are_on_one_side():
    from worlds.almanac import QUESTIONS, almanac
    sides = []
    for numbers in both_sides("searchqa"):
        questions = [almanac(n // QUESTIONS).questions[n % QUESTIONS] for n in numbers]
        sides.append({(q.text, tuple(q.answers)) for q in questions})
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("item", ["babyai_03", "babyai_003", "babyai_00", "babyai_\u0663",
                                  "babyai_\uff13", "babyai_-3", "babyai_3 ", "babyai_+3",
                                  "lmrlgym_maze_03", "babyai_3_0x1"])
def test_an_episode_has_one_name(item, tmp_path):
    assert split_item("babyai_0") == ("babyai", 0) and split_item("babyai_30") == ("babyai", 30)
    with pytest.raises(UserError, match="item id"):
        split_item(item)
    (tmp_path / "AgentItemId").mkdir()
    file = tmp_path / "AgentItemId/babyai_train.json"
    file.write_text(json.dumps([{"item_id": "babyai_3"}, {"item_id": item}]))
    with pytest.raises(UserError, match="babyai_train.json"):
        items("babyai", "train", tmp_path)
