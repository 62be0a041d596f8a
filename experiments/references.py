"""Figures that trained models are compared with, each with a row.

    python experiments/references.py [--only TEXT] [--show] [--again]
    python experiments/references.py sciworld FOLDER TASK...

What simple policies reach on held-out items, the built-in model on all tasks of a world, and warm
starts of the built-in model. Each entry of REFERENCES leaves a row in experiments/results.jsonl.gz:
its commit, the machine, the hash of the model (if one plays) and the figures. An entry with a row
is measured only with --again. --show prints the kept rows and measures nothing. The policies:

uniform: any of the valid actions, in worlds that list them.
imitated: the random policy that the built-in model was trained to imitate, in worlds that it knows.
expert: `Env.expert`, in worlds that have one. It gives up where it sees no way on.
in_view, untried: BabyAI only. Acts on its goal where it sees it; else it turns, or goes through a
door, at random. The second prefers what it has not done yet where it saw the same.

Measuring needs a checkout that nobody edits, the extras sciworld, textworld and webarena, and
Chromium. One entry at a time, one thread. The policies take half an hour, trainings 45 minutes.

sciworld FOLDER TASK...: writes item sets of some of SciWorld's tasks, for --data FOLDER. Training
items are the package's training variations, held-out items its test variations: at most 300 and 100
of each task.
"""

import argparse
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import envs  # noqa: E402
from eval import bootstrap  # noqa: E402
from experiments import web  # noqa: E402
from experiments.studies import play, rows  # noqa: E402
from experiments.studies.runs import SCIWORLD_ITEMS, WEBARENA_ITEMS  # noqa: E402
from make_items import write_set  # noqa: E402
from make_tiny import SLIPS, draw, random_policy, world  # noqa: E402
from worlds import goal_line  # noqa: E402

STUDY = "references"
# What a goal of BabyAI begins with -> what an action for it begins with.
BEGINS = {"go to": "go to", "pick up": "pickup", "open": "toggle"}
FIND_ITEMS = "runs/items/FIND"
SCIWORLD_TASKS = {  # folder of item sets -> their tasks
    SCIWORLD_ITEMS: ("find-non-living-thing",),
    FIND_ITEMS: ("find-living-thing", "find-non-living-thing", "find-plant", "find-animal"),
}


class Policies(NamedTuple):
    """Policies on the held-out items of a world."""

    world: str
    episodes: int  # of each item
    horizon: int
    data: str = ""  # folder of item sets
    only: str = ""  # the names of some policies
    options: dict = {}  # arguments of the world


def evaluation(flags):
    return [f"eval.py --model tiny --out {{out}} {flags}"]


def warm_start(world, demos, epochs, horizon, data=""):
    """Train the built-in model on demonstrations, then evaluate it."""
    items = f"--data {data} " if data else ""
    return [
        f"sft.py --env {world} {items}--model tiny --horizon {horizon} --demos {demos} "
        f"--epochs {epochs} --batch 16 --lr 1e-3 --seed 0 --out {{run}}",
        f"eval.py --env {world} {items}--model {{run}}/final --horizon {horizon} --samples 2 "
        "--out {out}",
    ]


COIN = "--env textworld --data data/coin"
COIN_WARM = f"sft.py {COIN} --demos 150 --horizon 8 --out {{run}}/warm"
COIN_EVAL = f"eval.py {COIN} --horizon 8 --samples 2 --out {{out}} --model {{run}}/"

# name -> Policies, or commands. {run}: the folder of a model that an earlier command writes. The
# last command writes its figures to {out}; what it prints is kept where it has no {out}.
REFERENCES = {
    "policies_babyai": Policies("babyai", 4, 4),
    "policies_babyai_once": Policies("babyai", 1, 4),
    "policies_rooms": Policies("babyai", 4, 10, "data/rooms"),
    "policies_rooms_programs": Policies("babyai", 4, 10, "data/rooms", "in_view untried"),
    "policies_rooms_programs_20": Policies("babyai", 4, 20, "data/rooms", "in_view untried"),
    "policies_levels": Policies("babyai", 1, 20, "data/levels"),
    "policies_levels_four": Policies("babyai", 4, 20, "data/levels"),
    "policies_textcraft": Policies("textcraft", 4, 8),
    "policies_textcraft_20": Policies("textcraft", 1, 20),
    "policies_textcraft_30": Policies("textcraft", 1, 30),
    "policies_searchqa": Policies("searchqa", 4, 4),
    "policies_searchqa_5": Policies("searchqa", 4, 5),
    "policies_searchqa_10": Policies("searchqa", 1, 10),
    "policies_searchqa_names": Policies("searchqa", 4, 5, "", "uniform expert", {"names": True}),
    "policies_sciworld": Policies("sciworld", 1, 6, only="uniform"),
    "policies_sciworld_imitated": Policies("sciworld", 1, 6, only="imitated"),
    "policies_sciworld_one_task": Policies("sciworld", 1, 6, SCIWORLD_ITEMS),
    "policies_sciworld_find": Policies("sciworld", 1, 20, FIND_ITEMS),
    "policies_webarena": Policies("webarena", 1, 15, only="expert"),
    "policies_textworld": Policies("textworld", 1, 15),
    "policies_textworld_8": Policies("textworld", 1, 8, only="expert"),
    "policies_coin": Policies("textworld", 2, 8, "data/coin"),
    "fixed_actions_babyai": ["data/make_items.py --check"],
    "tiny_sciworld": evaluation("--env sciworld --samples 1"),
    "tiny_textworld": evaluation("--env textworld --horizon 15 --samples 1"),
    "tiny_crafts": evaluation("--env textcraft --data data/crafts --horizon 20 --samples 2"),
    "tiny_levels": evaluation("--env babyai --data data/levels --horizon 16 --samples 2"),
    "warm_crafts_800": warm_start("textcraft", 800, 2, 20, "data/crafts"),
    "warm_crafts_4000": warm_start("textcraft", 4000, 3, 20, "data/crafts"),
    "warm_searchqa": warm_start("searchqa", 1500, 2, 4),
    "warm_levels": warm_start("babyai", 800, 2, 16, "data/levels"),
    "warm_coin": [COIN_WARM, COIN_EVAL + "warm/final"],
    "grpo_coin": [COIN_WARM,
                  f"train.py {COIN} --algo grpo --model {{run}}/warm/final --out {{run}}/grpo",
                  COIN_EVAL + "grpo/final"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="entries whose name holds this text")
    parser.add_argument("--show", action="store_true", help="print the kept rows")
    parser.add_argument("--again", action="store_true", help="measure what has a row, too")
    args = parser.parse_args()
    names = [name for name in REFERENCES if args.only in name]
    kept = rows.load(STUDY)
    if not args.show:
        commit = play.revision()
        for name in names:
            if args.again or name not in kept:
                print(name, flush=True)
                rows.keep(STUDY, {name: [measure(name, commit)]})
        kept = rows.load(STUDY)
    print("\n".join(table(name, kept[name][0]) for name in names if name in kept))


def measure(name, commit):
    """Measure an entry -> its row.

    Raises:
        RuntimeError: a command failed, or another commit than `commit` is checked out.
    """
    make_item_sets(str(REFERENCES[name]))
    folder = ROOT / "runs/references" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted call
    folder.mkdir(parents=True)
    begin = time.monotonic()
    entry = REFERENCES[name]
    model = ""
    if isinstance(entry, Policies):
        figures = measure_policies(entry)
    else:
        for command in entry:
            words = [word.format(out=folder / "figures.json", run=folder / "run")
                     for word in command.split()]
            figures = {"printed": play.call(*words).splitlines()}
        if "{out}" in command:
            found = json.loads((folder / "figures.json").read_text())
            model = found["config"]["model_sha256"]
            figures = play.held_out_figures(found)
    if play.revision() != commit:
        raise RuntimeError("another commit is checked out than at the beginning")
    return {
        "command": f"OMP_NUM_THREADS=1 python experiments/references.py --only {name}",
        "commit": commit, "machine": play.machine(), "seed": 0, "model_sha256": model,
        "seconds": round(time.monotonic() - begin), "figures": figures,
    }


def make_item_sets(needed):
    """The item sets whose folders the text `needed` names, where they are not there yet."""
    for folder, tasks in SCIWORLD_TASKS.items():
        if folder in needed and not (ROOT / folder).exists():
            sciworld_items(ROOT / folder, *tasks)
    if WEBARENA_ITEMS in needed and not (ROOT / WEBARENA_ITEMS).exists():
        web.navigate(ROOT / WEBARENA_ITEMS)


def table(name, row):
    """Lines of text: one for each model or policy, or what a command printed."""
    figures = row["figures"]
    if "printed" in figures:
        return "\n".join(f"{name:28} {line}" for line in figures["printed"])
    if row["model_sha256"]:
        figures = {"model": figures | {"ci95": {"success": figures["ci95"]}}}
    lines = []
    for label, found in figures.items():
        low, high = found["ci95"]["success"]
        lines.append(f"{name:28} {label:9} success {found['success']:.3f} [{low:.3f}, {high:.3f}], "
                     f"score {found['score']:.3f}, turns {found['turns']:.2f}")
    return "\n".join(lines)


# ---- the policies ----


def measure_policies(entry):
    """Play the held-out items -> {policy: its figures}."""
    env = envs.make_env(entry.world, **entry.options) if entry.options else world(entry.world)
    items = envs.items(entry.world, "test", entry.data or None)
    category = envs.categories(entry.world, entry.data or None)
    policies = {
        "uniform": lambda rng, read: rng.choice(env.choices()[0]),
        "imitated": lambda rng, read: draw(random_policy(env, entry.world, read), rng)[1],
        "expert": lambda rng, read: env.expert(),
        "in_view": search_and_act(env, remembers=False),
        "untried": search_and_act(env, remembers=True),
    }
    if entry.world != "babyai":
        del policies["in_view"], policies["untried"]
    if type(env).valid_actions is envs.Env.valid_actions and not entry.options:  # none are listed
        del policies["uniform"]
    if entry.world not in SLIPS:  # the built-in model was not trained on this world
        del policies["imitated"]
    if type(env).expert is envs.Env.expert:
        del policies["expert"]
    found = {}
    for label, policy in policies.items():
        if entry.only and label not in entry.only.split():
            continue
        rng = random.Random(0)
        played = {item: [] for item in items}
        for item in tqdm(items * entry.episodes, desc=label, leave=False):
            step, turns = play_episode(env, item, entry.horizon, policy, rng)
            played[item].append((step.success, step.score, turns))
        means = {item: np.mean(episodes, axis=0).tolist() for item, episodes in played.items()}
        found[label] = figures_of(means, category)
    env.close()
    return found


def figures_of(items, category):
    """Means, their intervals, and those of the categories.

    Args:
        items: {item: [success, score, turns]}.
        category: {item: its category}.
    """
    found = {"ci95": {}, "categories": {}, "items": items}
    for place, what in enumerate(("success", "score", "turns")):
        values = [figures[place] for figures in items.values()]
        found[what] = float(np.mean(values))
        found["ci95"][what] = bootstrap(values, 0)
    for name in sorted(set(category.values())):
        of_category = [items[item][0] for item in items if category.get(item) == name]
        found["categories"][name] = float(np.mean(of_category))
    return found


def play_episode(env, item, horizon, policy, rng):
    """One episode -> (the last step, the number of turns).

    `policy(rng, observations) -> action`; None gives up, which counts as all turns without success.
    """
    observations = [env.reset(envs.split_item(item)[1])]
    step = envs.Step(observations[0])
    for turn in range(1, horizon + 1):
        action = policy(rng, observations)
        if action is None:
            break
        step = env.step(action)
        observations.append(step.observation)
        if step.done:
            return step, turn
    return step, horizon


def search_and_act(env, remembers):
    """The policies in_view and, with `remembers`, untried: `policy(rng, observations)`, as for
    `play_episode`."""
    done = set()  # (an observation, the action taken there), in this episode

    def policy(rng, observations):
        if len(observations) == 1:
            done.clear()
        parts = re.findall(r"(go to|pick up|open) (?:an?|the) (\w+)(?: (ball|box|door|key))?",
                           goal_line(observations[0]))
        possible, seen = env.valid_actions(), observations[-1]
        choices = [action for action in possible for verb, *thing in parts
                   if action.startswith(BEGINS[verb]) and {*thing} - {""} <= {*action.split()}]
        choices = choices or [a for a in possible if "turn" in a or "go through" in a]
        untried = [action for action in choices if (seen, action) not in done]
        action = rng.choice(untried if untried and remembers else choices)
        done.add((seen, action))
        return action

    return policy


# ---- item sets of SciWorld's tasks ----


def sciworld_items(folder, *tasks):
    """Write item sets of these tasks."""
    from worlds.sciworld import ENDS, TASKS, SciWorld  # needs the extra sciworld

    rng = random.Random(0)
    env = SciWorld()
    train, test = [], {}
    for task in tasks:
        first = ENDS[list(TASKS).index(task)] - TASKS[task]  # the task's first item
        env.reset(first)
        variations = {split: env.variations(split) for split in ("train", "test")}
        train += [first + n for n in sample(rng, variations["train"], 300)]
        test[task] = [first + n for n in sample(rng, variations["test"], 100)]
    env.close()
    write_set(Path(folder).absolute(), "sciworld", sorted(train), test)


def sample(rng, numbers, most):
    return rng.sample(numbers, min(most, len(numbers)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["sciworld"]:
        sciworld_items(*sys.argv[2:])
    else:
        main()
