"""The default item sets: `python data/make_items.py` writes data/AgentItemId and data/AgentEval (seconds; needs Java).
`python data/make_items.py --check` plays BabyAI's held-out items with policies that cannot read (minutes); `--searchqa` tells how
SearchQA's questions and articles hang together (seconds).

BabyAI: five levels whose mission stays in one room and which a random policy solves in 20-35 % of episodes of 4 turns;
250 held-out items and 2,000 for training, every held-out first observation unlike every one in training.
TextCraft: 200 goals are held out, by depth as in the whole. Of the others those of depth 1 and 2 are trained on, with nine and
three sets of distractors: the tiny model starts with no success on deeper ones, so there is nothing to learn from in them.
SciWorld: of each of the 30 tasks up to 8 of the package's test variations are held out, and up to 40 of its training ones trained on.
WebArena: every template with 24 seeds is trained on, and held out with 3 seeds of its own; by site.
SearchQA: four worlds are trained on; the questions held out are of two others, in words that no training world uses.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from envs import make_env  # noqa: E402
from worlds.babyai import LEVELS  # noqa: E402
from worlds.textcraft import GOALS, goal_depth  # noqa: E402

BABYAI = {  # level -> (family, held-out items); fewer of the red balls, where a policy that ignores the mission does well
    "GoToRedBallGrey": ("ball", 30), "GoToRedBall": ("ball", 30), "GoToRedBlueBall": ("ball", 40),
    "GoToDoor": ("door", 80), "GoToObjDoor": ("object", 70)}


def write(path, env, numbers):
    path = HERE / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"item_id": f"{env}_{n}"} for n in numbers], indent=0) + "\n")


def babyai():
    env, seen, train, test = make_env("babyai"), set(), [], {}
    for level, (family, held_out) in BABYAI.items():
        chosen = []
        for seed in range(2000):  # no first observation twice
            n = LEVELS.index(level) + len(LEVELS) * seed
            first = env.reset(n)
            if first not in seen and len(chosen) < 9 * held_out:
                seen.add(first)
                chosen.append(n)
        test.setdefault(family, []).extend(chosen[:held_out])
        train += chosen[held_out:]
    return sorted(train), test


def textcraft():
    rng, test = random.Random(0), {}
    for depth in (1, 2, 3, 4):
        goals = [g for g in range(GOALS) if goal_depth(g) == depth]
        test[f"depth_{depth}"] = sorted(rng.sample(goals, round(200 * len(goals) / GOALS)))
    held = {g for goals in test.values() for g in goals}
    return [g + GOALS * k for k in range(9) for g in range(GOALS) if g not in held and k < {1: 9, 2: 3}.get(goal_depth(g), 0)], test


def sciworld():
    from worlds.sciworld import ENDS, TASKS  # an extra, and Java
    rng, env, train, test = random.Random(0), make_env("sciworld"), [], {}
    for (task, count), end in zip(TASKS.items(), ENDS):
        env.reset(end - count)
        splits = []
        for split, most in (("test", 8), ("train", 40)):
            numbers = sorted(env.variations(split))
            splits.append([end - count + n for n in sorted(rng.sample(numbers, min(most, len(numbers))))])
        test[task] = splits[0]
        train += splits[1]
    env.close()
    return sorted(train), test


def known_as(title, question, world):
    """How a question leads to an article: by its title, or by the pen name that the question has."""
    alias = world.facts[title].get("alias", "")
    return alias if alias and alias in question.text else title


def searchqa(report=False):
    """Train: worlds 0 to 3, held out: of worlds 100 and 101 each the first 50 of a source (75 of one hop). A question of several hops whose
    own search brings the answer is none, and is left out; so is one with an article that its title (or, where the question has
    one, the pen name) does not find. With `report` also a table of how often that is so."""
    from worlds.almanac import HELD_OUT, QUESTIONS, almanac
    from worlds.searchqa import BM25
    train, test = [], {}
    for world in (0, 1, 2, 3, HELD_OUT, HELD_OUT + 1):
        index, found, rows = BM25(almanac(world).articles), {}, {}
        for number, q in enumerate(almanac(world).questions):
            text = " ".join(" ".join(article) for article in index.search(q.text, 3))
            shown = any(answer in text for answer in q.answers)
            led = all(title in [t for t, _ in index.search(known_as(title, q, almanac(world)), 3)] for title in q.titles)
            rows.setdefault(q.source, []).append((shown, led))
            if led and (q.source in ("1_hop", "comparison") or not shown):
                found.setdefault(q.source, []).append(world * QUESTIONS + number)
        for source, part in sorted(rows.items()) if report else ():
            shown, led = (sum(column) / len(part) for column in zip(*part))
            print(f"world {world:3}  {source:10}  {len(part):4} questions  answer in the top 3 of the question {shown:.3f}  "
                  f"every article in the top 3 of its title {led:.3f}")
        for source, numbers in found.items():
            if world < HELD_OUT:
                train += numbers
            else:
                test.setdefault(source, []).extend(numbers[:75 if source == "1_hop" else 50])
    return sorted(train), test


def webarena():
    from websites.tasks import HELD_OUT, TEMPLATES
    test, count = {}, len(TEMPLATES)
    for number, template in enumerate(TEMPLATES):
        test.setdefault(template.site, []).extend(number + count * seed for seed in range(HELD_OUT, HELD_OUT + 3))
    return [number + count * seed for seed in range(24) for number in range(count)], test


def success(env, items, policy, horizon=4):
    """policy(env, turn) -> action. Mean success over items, and by level."""
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
    """Success at horizon 4 of a random policy, of the best constant action and of the best fixed sequence of actions (by
    coordinate ascent), both chosen on 250 training items."""
    env, rng = make_env("babyai"), random.Random(0)
    train, test = babyai()
    test = sorted(n for numbers in test.values() for n in numbers)
    train = rng.sample(train, 250)
    print("random", success(env, test * 4, lambda e, turn: rng.choice(e.valid_actions())))
    seen = {}
    for n in train:
        env.reset(n)
        for _ in range(2):
            for action in env.valid_actions():
                seen[action] = seen.get(action, 0) + 1
            env.step("turn left")
    actions = sorted(seen, key=seen.get)[-30:]
    plays = lambda plan: lambda e, turn: plan[turn]  # noqa: E731
    rate = lambda plan: success(env, train, plays(plan))[0]  # noqa: E731
    best = max(([a] * 4 for a in actions), key=rate)
    print("constant", best[0], success(env, test, plays(best)))
    best = ["go to red ball 1", "turn left"] * 2
    for turn in (0, 1, 2, 3) * 2:
        best = max((best[:turn] + [a] + best[turn + 1:] for a in actions), key=rate)
    print("sequence", best, success(env, test, plays(best)))


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__)
elif __name__ == "__main__" and "--check" in sys.argv:
    blind_baselines()
elif __name__ == "__main__" and "--searchqa" in sys.argv:
    searchqa(report=True)
elif __name__ == "__main__":
    for env, make in (("babyai", babyai), ("textcraft", textcraft), ("sciworld", sciworld), ("searchqa", searchqa),
                      ("webarena", webarena)):
        train, test = make()
        write(f"AgentItemId/{env}_train.json", env, train)
        write(f"AgentEval/{env}/{env}_test.json", env, sorted(n for numbers in test.values() for n in numbers))
        for category, numbers in test.items():
            write(f"AgentEval/{env}/{category}.json", env, sorted(numbers))
        print(env, len(train), "for training,", {c: len(n) for c, n in test.items()}, "held out")
