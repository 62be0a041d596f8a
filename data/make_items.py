"""The item sets: `python data/make_items.py` writes data/AgentItemId and data/AgentEval, and
data/rooms, data/levels, data/crafts and data/coin for `--data FOLDER`.

It takes minutes and needs Java. `--check` plays BabyAI's held-out items with policies that cannot
read (minutes). `--searchqa` prints how SearchQA's questions lead to its articles (seconds).

BabyAI: five levels whose mission stays in one room and which a random policy solves in 20-35 % of
    episodes of 4 turns. 250 held-out items and 2,000 for training. The first observation of every
    held-out item differs from all those in training. data/rooms: as many, of nine levels of going
    to, picking up, opening, and sequences of these; the expert needs more than three turns for half
    of the items, and never more than ten. data/levels: all of AgentGym's 40 levels, five
    held-out items and 40 for training of each, impossible ones (see worlds/babyai.py) included.
    What is held out in one of the three folders, or begins as such an item does, is trained on in
    none.
TextCraft: 200 goals are held out; their depths are distributed as those of all goals. Of the other
    goals, those of depth 1 and 2 are trained on, with nine and three sets of distractors. The tiny
    model never succeeds on deeper goals, so it could learn nothing from them. data/crafts: three
    sets for the goals of every depth, with the same held-out items.
SciWorld: of each of the 30 tasks up to 8 of the package's test variations are held out, and up to
    40 of its training variations are trained on.
WebArena: a third of the templates is held out, by site. The lists of forums, projects, people and
    years are short, so their names stand on both sides; products, posts and orders do not.
OpenEnv: the items are seeds, 0 to 999 for training and 1,000 to 1,199 held out.
TextWorld: of each game the first 100 seeds of the package's training fold are trained on, and the
    first 25 of its test fold are held out. data/coin: 800 and 200 of the coin game alone.
SearchQA: four worlds are trained on. The held-out questions are of two other worlds, in words that
    no training world uses.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from envs import make_env  # noqa: E402
from worlds.babyai import LEVELS  # noqa: E402
from worlds.textcraft import GOALS, goal_depth  # noqa: E402

# Level -> (family, held-out items, share of the items that take the expert 4 to 10 turns; the
# others take 1 to 3). The built-in model's random actions solve each of these levels now and then.
ROOMS = {
    "GoToRedBlueBall": ("go_to", 20, 0.0), "GoToObjMazeS7": ("go_to", 30, 0.6),
    "Open": ("open", 30, 0.6), "PickupLoc": ("pick_up", 20, 0.0), "Pickup": ("pick_up", 30, 0.6),
    "UnblockPickup": ("pick_up", 30, 0.6), "FindObjS7": ("pick_up", 30, 0.6),
    "GoToSeqS5R2": ("sequence", 30, 0.6), "SynthS5R2": ("sequence", 30, 0.6),
}

# Level -> (family, held-out items). Few of the red balls: there a policy that ignores the mission
# does well.
BABYAI = {
    "GoToRedBallGrey": ("ball", 30), "GoToRedBall": ("ball", 30), "GoToRedBlueBall": ("ball", 40),
    "GoToDoor": ("door", 80), "GoToObjDoor": ("object", 70),
}

# The 40 levels -> the kind of their missions.
KINDS = {
    "go_to": """GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7
        GoToImpUnlock GoToRedBlueBall GoToDoor GoToObjDoor""",
    "open": "Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug OpenDoorsOrderN4Debug",
    "pick_up": """Pickup UnblockPickup PickupLoc PickupDistDebug PickupAbove FindObjS7
        OneRoomS20""",
    "put_next": "PutNextLocalS6N4 PutNextS7N4Carrying MoveTwoAcrossS8N9",
    "unlock": """Unlock UnlockLocalDist KeyInBox UnlockPickupDist BlockedUnlockPickup
        UnlockToUnlock KeyCorridorS6R3""",
    "mixed": """GoToSeqS5R2 ActionObjDoor SynthS5R2 SynthLoc SynthSeq MiniBossLevel BossLevel
        BossLevelNoUnlock""",
}
ALL_LEVELS = {level: (kind, 5) for kind, levels in KINDS.items() for level in levels.split()}


def write(path, env, numbers):
    path = HERE / path  # or an absolute path
    path.parent.mkdir(parents=True, exist_ok=True)
    items = [{"item_id": f"{env}_{n}"} for n in numbers]
    path.write_text(json.dumps(items, indent=0) + "\n")


# Each of these functions -> (training numbers, {category: held-out numbers}).


def babyai_rooms():
    env = make_env("babyai")
    seen = set()  # first observations: none is used twice
    train = []
    test = {}
    for level, (family, held_out, long_share) in ROOMS.items():
        # Short and long items are split between training and held out in the same shares.
        for share, turns in ((1 - long_share, range(1, 4)), (long_share, range(4, 11))):
            chosen = []
            seed = 0
            while len(chosen) < round(9 * held_out * share):
                number = LEVELS.index(level) + len(LEVELS) * seed
                first = env.reset(number)
                if first not in seen and turns_of_expert(env) in turns:
                    seen.add(first)
                    chosen.append(number)
                seed += 1
            count = round(held_out * share)
            test.setdefault(family, []).extend(chosen[:count])
            train += chosen[count:]
    return sorted(train), test


def turns_of_expert(env):
    """The turns that the expert takes from here to success; 0: it does not succeed in ten."""
    for turn in range(1, 11):
        action = env.expert()
        if action is None:
            return 0
        step = env.step(action)
        if step.done:
            return turn if step.success else 0
    return 0


def babyai(levels=BABYAI):
    env = make_env("babyai")
    seen = set()  # first observations: none is used twice
    train = []
    test = {}
    for level, (family, held_out) in levels.items():
        chosen = []
        for seed in range(2000):
            number = LEVELS.index(level) + len(LEVELS) * seed
            first = env.reset(number)
            if first not in seen:
                seen.add(first)
                chosen.append(number)
            if len(chosen) == 9 * held_out:
                break
        test.setdefault(family, []).extend(chosen[:held_out])
        train += chosen[held_out:]
    return sorted(train), test


# TextCraft's depth -> how many sets of distractors each of its goals is trained on with.
SHALLOW = {1: 9, 2: 3}
ALL_DEPTHS = {1: 3, 2: 3, 3: 3, 4: 3}


def textcraft(distractor_sets=SHALLOW):
    rng = random.Random(0)
    test = {}
    for depth in (1, 2, 3, 4):
        goals = [goal for goal in range(GOALS) if goal_depth(goal) == depth]
        test[f"depth_{depth}"] = sorted(rng.sample(goals, round(200 * len(goals) / GOALS)))
    held_out = {goal for goals in test.values() for goal in goals}
    train = []
    for k in range(9):
        for goal in range(GOALS):
            if goal not in held_out and k < distractor_sets.get(goal_depth(goal), 0):
                train.append(goal + GOALS * k)
    return train, test


def sciworld():
    from worlds.sciworld import ENDS, TASKS  # an extra, and Java

    rng = random.Random(0)
    env = make_env("sciworld")
    train = []
    test = {}
    for (task, count), end in zip(TASKS.items(), ENDS):
        first = end - count  # the task's first item
        env.reset(first)
        chosen = {}
        for split, most in (("test", 8), ("train", 40)):
            numbers = sorted(env.variations(split))
            sample = sorted(rng.sample(numbers, min(most, len(numbers))))
            chosen[split] = [first + n for n in sample]
        test[task] = chosen["test"]
        train += chosen["train"]
    env.close()
    return sorted(train), test


def known_as(title, question, world):
    """The words of a question that lead to an article: its title, or the pen name in its place."""
    alias = world.facts[title].get("alias", "")
    return alias if alias and alias in question.text else title


def searchqa(report=False):
    """Train on worlds 0 to 3. Of each of the worlds 100 and 101, hold out the first 50 questions of
    a source (75 of one hop).

    A question of several hops is left out where searching for its own text brings the answer: it
    needs no second search. A question is left out, too, where one of its articles is not found by
    its title (or by its pen name, where the question has that). With `report`, also print how
    often that is so.
    """
    from worlds.almanac import HELD_OUT, QUESTIONS, almanac
    from worlds.searchqa import BM25

    train = []
    test = {}
    for number in (0, 1, 2, 3, HELD_OUT, HELD_OUT + 1):
        world = almanac(number)
        index = BM25(world.articles)
        chosen = {}  # source -> item numbers
        checks = {}  # source -> (answer shown, every article found) of each question
        for k, question in enumerate(world.questions):
            articles = index.search(question.text, 3)
            text = " ".join(" ".join(article) for article in articles)
            is_shown = any(answer in text for answer in question.answers)
            is_found = all(
                title in [t for t, _ in index.search(known_as(title, question, world), 3)]
                for title in question.titles
            )
            source = question.source
            checks.setdefault(source, []).append((is_shown, is_found))
            if is_found and (source in ("1_hop", "comparison") or not is_shown):
                chosen.setdefault(source, []).append(number * QUESTIONS + k)
        if report:
            report_searches(number, checks)
        for source, numbers in chosen.items():
            if number < HELD_OUT:
                train += numbers
            else:
                most = 75 if source == "1_hop" else 50
                test.setdefault(source, []).extend(numbers[:most])
    return sorted(train), test


def report_searches(world, checks):
    for source, pairs in sorted(checks.items()):
        shown, found = (sum(column) / len(pairs) for column in zip(*pairs))
        print(
            f"world {world:3}  {source:10}  {len(pairs):4} questions  "
            f"answer in the top 3 of the question {shown:.3f}  "
            f"every article in the top 3 of its title {found:.3f}"
        )


def held_out_templates():
    """WebArena's templates that are never trained on: every third of a site's kind of task."""
    from websites.tasks import TEMPLATES

    kinds = {}
    for number, template in enumerate(TEMPLATES):
        kinds.setdefault((template.site, template.kind), []).append(number)
    return {number for numbers in kinds.values()
            for number in (numbers[2::3] if len(numbers) > 2 else numbers[1:])}


def webarena():
    """Templates are trained on with 24 seeds. Of the others up to twelve tasks are held out, with
    names and answers of no training task where a template has such, and all in other words."""
    from websites.tasks import HELD_OUT, TEMPLATES, make

    def names_in(task, answer):
        values = map(str, task["instantiation_dict"].values())
        return {text.lower() for text in (*values, answer) if text not in ("", "N/A")}

    count = len(TEMPLATES)
    held_out = held_out_templates()
    train = [number + count * seed for seed in range(24) for number in range(count)
             if number not in held_out]
    trained_names = set()
    for item in train:
        task, _, answer = make(item)
        trained_names |= names_in(task, answer)
    test = {}
    for number in sorted(held_out):
        tasks = {}  # words -> (how many of its names are trained on, item)
        for seed in range(HELD_OUT, HELD_OUT + 60):
            task, _, answer = make(number + count * seed)
            shared = len(names_in(task, answer) & trained_names)
            tasks.setdefault(task["intent"], (shared, number + count * seed))
        chosen = [item for _, item in sorted(tasks.values())[:12]]
        test.setdefault(TEMPLATES[number].site, []).extend(chosen)
    return train, test


def textworld(games=None, held_out=25, train=100):
    """The package's own folds: of each game the first seeds of its training and test fold.

    games: names; default: all. held_out, train: how many items of each game.
    """
    from worlds.textworld import FOLDS, GAMES, SEEDS  # an extra, and Java

    def numbers(game, fold, count):
        first = SEEDS * (len(FOLDS) * list(GAMES).index(game) + FOLDS.index(fold))
        return list(range(first, first + count))

    games = games or list(GAMES)
    trained_on = [n for game in games for n in numbers(game, "train", train)]
    return trained_on, {game: numbers(game, "test", held_out) for game in games}


def success(env, items, policy, horizon=4):
    """Mean success over items, and by level. `policy(env, turn) -> action`."""
    wins = {}
    for n in items:
        env.reset(n)
        for turn in range(horizon):
            step = env.step(policy(env, turn))
            if step.done:
                break
        wins.setdefault(LEVELS[n % len(LEVELS)], []).append(step.success)
    by_level = {level: round(sum(w) / len(w), 3) for level, w in wins.items()}
    return sum(map(sum, wins.values())) / len(items), by_level


def blind_baselines():
    """Print success at horizon 4 of a random policy, of the best constant action and of the best
    fixed sequence of actions (by coordinate ascent), both chosen on 250 training items."""
    env = make_env("babyai")
    rng = random.Random(0)
    train, by_family = babyai()
    test = sorted(n for numbers in by_family.values() for n in numbers)
    train = rng.sample(train, 250)
    print("random", success(env, test * 4, lambda e, turn: rng.choice(e.valid_actions())))

    # The 30 actions that are most often valid in the first two turns.
    count = Counter()
    for n in train:
        env.reset(n)
        for _ in range(2):
            count.update(env.valid_actions())
            env.step("turn left")
    actions = sorted(count, key=count.get)[-30:]

    def playing(plan):
        return lambda env, turn: plan[turn]

    def success_in_training(plan):
        return success(env, train, playing(plan))[0]

    best = max(([action] * 4 for action in actions), key=success_in_training)
    print("constant", best[0], success(env, test, playing(best)))
    best = ["go to red ball 1", "turn left"] * 2
    for turn in (0, 1, 2, 3) * 2:
        plans = (best[:turn] + [action] + best[turn + 1 :] for action in actions)
        best = max(plans, key=success_in_training)
    print("sequence", best, success(env, test, playing(best)))


def make_babyai():
    """BabyAI's three folders. What is held out in one of them is trained on in none."""
    sets = {".": babyai(), "rooms": babyai_rooms(), "levels": babyai(ALL_LEVELS)}
    env = make_env("babyai")
    held_out = {n for _, test in sets.values() for numbers in test.values() for n in numbers}
    seen = {env.reset(n) for n in held_out}
    for folder, (train, test) in sets.items():
        kept = [n for n in train if n not in held_out and env.reset(n) not in seen]
        print(f"babyai, {folder}: {len(train) - len(kept)} training items are held out elsewhere")
        write_set(folder, "babyai", kept, test)


def make_all():
    makers = {
        "textcraft": textcraft, "sciworld": sciworld, "searchqa": searchqa, "webarena": webarena,
        "textworld": textworld,
    }
    make_babyai()
    for env, make in makers.items():
        write_set(".", env, *make())
    write("AgentItemId/openenv_train.json", "openenv", range(1000))
    write("AgentEval/openenv/openenv_test.json", "openenv", range(1000, 1200))
    write_set("crafts", "textcraft", *textcraft(ALL_DEPTHS))
    write_set("coin", "textworld", *textworld(["coin"], 200, 800))


def write_set(folder, env, train, test):
    """Write a world's items as files in data/FOLDER, or in an absolute folder."""
    write(f"{folder}/AgentItemId/{env}_train.json", env, train)
    all_held_out = sorted(n for numbers in test.values() for n in numbers)
    write(f"{folder}/AgentEval/{env}/{env}_test.json", env, all_held_out)
    for category, numbers in test.items():
        write(f"{folder}/AgentEval/{env}/{category}.json", env, sorted(numbers))
    counts = {category: len(numbers) for category, numbers in test.items()}
    print(env, len(train), "for training,", counts, "held out")


def main(args):
    if "-h" in args or "--help" in args:
        print(__doc__)
    elif "--check" in args:
        blind_baselines()
    elif "--searchqa" in args:
        searchqa(report=True)
    else:
        make_all()


if __name__ == "__main__":
    main(sys.argv[1:])
