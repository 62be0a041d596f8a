"""BabyAI: items, wording, plans and success.

An item is the same level and seed in every process. The wording is the recorded one. Plans end
where they say. Success is minigrid's own verdict, however late it comes.
"""

import copy
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import gymnasium
import pytest
from conftest import ROOT

import envs
from worlds import babyai
from worlds.babyai import LEVELS, BabyAI

UPSTREAM = json.loads((ROOT / "tests/wire/babyai_upstream.json").read_text())
WIRE = json.loads((ROOT / "tests/wire/babyai.json").read_text())["exchanges"]
# AgentGym's order of the levels: the meaning of every item number.
LEVELS_HASH = "4f7761158abb719d5fac9a097cda086e81da259586797e4baed2d02bd1df17a9"
# By direction: right, down, left, up. The cell to the right of direction d is FORWARD[(d + 1) % 4].
FORWARD = [(1, 0), (0, 1), (-1, 0), (0, -1)]
THING = re.compile(
    r"There is a (\w+) (?:(open|closed|locked) )?(ball|box|key|door) (\d+) "
    r"(?:right in front of you (\d+) steps away"
    r"|(\d+) steps in front of you and (\d+) steps to your (left|right))\. ")
REFUSED = ("The action is not recognized. Please check valid actions.", "You cannot ",
           "There is a barrier ")


def world(item):
    env = BabyAI()
    env.reset(item)
    return env


def random_states(items, turns, seed=0):
    """Yield (item, env) at the start and after each of `turns` random actions.

    The environment goes on by itself: take a snapshot of it before stepping it.
    """
    env = BabyAI()
    rng = random.Random(seed)
    for item in items:
        env.reset(item)
        yield item, env
        for _ in range(turns):
            if env.step(rng.choice(env.valid_actions())).done:
                break
            yield item, env


def state(env):
    """All that an action can change: grid, contents of boxes, agent, texts, verdict."""
    grid = [thing and (thing.type, thing.color, thing.encode(),
                       bool(getattr(thing, "contains", None))) for thing in env.env.grid.grid]
    agent = (*map(int, env.env.agent_pos), int(env.env.agent_dir))
    carried = id(env.env.carrying)
    return grid, agent, carried, env.description, list(env.actions), env.done, env.success


def visible(env):
    """The grid cells that the agent sees, by minigrid's own mask, without the agent's cell."""
    base = env.env
    mask = base.gen_obs_grid()[1]  # [column, row] of the view
    cells = {(x, y) for x in range(base.width) for y in range(base.height)
             if base.in_view(x, y) and mask[tuple(map(int, base.relative_coords(x, y)))]}
    return cells - {tuple(map(int, base.agent_pos))}


def said_things(env):
    """What the description names -> [(colour, state or "", kind, number, grid cell)]"""
    x, y = map(int, env.env.agent_pos)
    forward_x, forward_y = FORWARD[env.env.agent_dir]
    right_x, right_y = FORWARD[(env.env.agent_dir + 1) % 4]
    things = []
    for colour, how, kind, number, straight, ahead, aside, side in THING.findall(env.description):
        ahead = int(straight or ahead)
        right = int(aside or 0) * (-1 if side == "left" else 1)
        cell = (x + ahead * forward_x + right * right_x, y + ahead * forward_y + right * right_y)
        things.append((colour, how, kind, int(number), cell))
    assert len(things) == env.description.count("There is a ")
    return things


def full_name(colour, how, kind, number):
    """The name in actions: "red ball 1", "blue locked door 2"."""
    return " ".join(filter(None, (colour, how, kind, str(number))))


def record(owner, name):
    """Record the calls of a method -> list of (argument, result), which grows with every call."""
    calls = []
    method = getattr(owner, name)

    def recording(argument):
        calls.append((argument, method(argument)))
        return calls[-1][1]

    setattr(owner, name, recording)
    return calls


# ---- items ----


def test_the_order_of_levels_and_seeds():
    assert len(LEVELS) == 40
    assert hashlib.sha256(" ".join(LEVELS).encode()).hexdigest() == LEVELS_HASH
    env = BabyAI()
    for n, level in enumerate(LEVELS):
        name = f"BabyAI-{level}-{'v1' if n == 3 else 'v0'}"
        other = gymnasium.make(name, disable_env_checker=True).unwrapped
        for seed in (0, 1, 57):
            first = env.reset(n + 40 * seed)
            other.reset(seed=seed)
            assert env.env.spec.id == name
            assert first.startswith(f"Your goal: {other.mission}\nIn front of you ")
            assert (env.env.grid.encode() == other.grid.encode()).all()
            assert tuple(env.env.agent_pos) == tuple(other.agent_pos)
            assert env.env.agent_dir == other.agent_dir


def first_texts():
    """The first texts of items, each of them after another item."""
    env = BabyAI()
    return [env.reset(n) for n in (0, 6, 16, 22, 25, 36, 39, 40, 1234, 5678, 10**12)]


def test_the_same_item_is_the_same_text_in_any_process_and_after_other_items():
    code = ("import sys; sys.path[:0] = ['.', 'tests']\n"
            "from test_babyai import first_texts; print(first_texts())")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == str(first_texts()), run.stderr
    env = world(1234)
    first = env._last_text
    for item in (22, 10**12, 1234):
        env.step(random.choice(env.valid_actions()))
        again = env.reset(item)
    assert again == first


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_an_episode_is_the_one_that_minigrid_makes_and_no_other_changes_it(number):
    item = 7 * len(LEVELS) + number
    other, env = world(item), world(item)
    version = "v1" if LEVELS[number] == "GoToObjS6" else "v0"
    made = gymnasium.make(f"BabyAI-{LEVELS[number]}-{version}", disable_env_checker=True).unwrapped
    made.reset(seed=7)
    rng = random.Random(number)
    for _ in range(40):
        assert (env.env.grid.encode() == made.grid.encode()).all()
        assert (env.env.mission, tuple(env.env.agent_pos)) == (made.mission, tuple(made.agent_pos))
        action = rng.randrange(7)
        results = [minigrid.step(action)[1:] for minigrid in (env.env, made)]
        assert results[0] == results[1]
    assert other._last_text == world(item)._last_text and other.env.step_count == 0


def test_nothing_reaches_stdout(capfd, monkeypatch):
    for is_silent in (True, False):  # the control: without babyai's silent `print`
        babyai._begin.cache_clear()
        for item in (6, 10, 17, 35):  # for each of these minigrid rejects a layout
            world(item)
            assert ("Sampling rejected" in capfd.readouterr().out) != is_silent
        monkeypatch.delattr(babyai.roomgrid_level, "print", raising=False)


def test_a_layout_without_a_place_for_the_agent_is_made_again():
    signal.alarm(60)  # minigrid's own search would never end
    assert world(37243114).env.mission
    signal.alarm(0)


# ---- wording ----


def test_recorded_traffic_replays_exactly():
    env = BabyAI()
    exchanges = [(exchange["path"], exchange["json"], exchange["response"]) for exchange in WIRE
                 if exchange["path"] in ("/reset", "/step")]
    replayed = [each for each in exchanges if "observation" in each[2]]
    assert len(replayed) == 8
    for path, sent, reply in replayed:
        if path == "/reset":
            assert env.reset(sent["data_idx"]) == reply["observation"]
            continue
        step = env.step(sent["action"])
        assert {key: getattr(step, key) for key in reply} == reply
        assert step.valid != reply["observation"].startswith("The action is not recognized")


@pytest.mark.parametrize("episode", UPSTREAM, ids=lambda episode: str(episode["item"]))
def test_with_upstream_an_episode_is_as_on_agentgyms_server(episode):
    env = BabyAI(upstream=1)
    first, *replies = episode["replies"]
    assert env.reset(episode["item"]) == first[0]
    if "grid" in episode:
        assert env.env.grid.encode().tolist() == episode["grid"]
        assert [*map(int, env.env.agent_pos), int(env.env.agent_dir)] == episode["agent"]
    for action, (observation, reward, score, done) in zip(episode["actions"], replies, strict=True):
        step = env.step(action)
        assert step.observation == observation
        assert (step.reward, step.score, step.done) == (reward, score, done)
        assert step.success == (done and reward > 0.5)


def test_a_door_opened_on_the_way_counts_here_and_not_upstream():
    plan = ("go to red closed door 1", "turn right", "toggle and go through red closed door 1")
    for env, opened in ((BabyAI(), True), (BabyAI(upstream=1), False)):
        env.reset(LEVELS.index("OpenRedDoor") + 40 * 3)
        *_, step = [env.step(action) for action in plan]
        assert (step.done, step.success, step.reward) == (opened, opened, opened)


def test_the_description_is_what_the_grid_holds():
    """Every visible thing is named once, at its place, with its state, from near to far.

    Then come the nearest wall or box straight ahead, and what is carried.
    """
    states = 0
    for item, env in random_states(range(0, 40 * 14, 7), turns=8):
        grid = env.env.grid
        cells = visible(env)
        things = said_things(env)
        x, y = map(int, env.env.agent_pos)
        forward_x, forward_y = FORWARD[env.env.agent_dir]

        # What is named is there, and what is there is named, from near to far, and numbered.
        count = Counter()
        for colour, how, kind, number, cell in things:
            thing = grid.get(*cell)
            assert thing and (thing.color, thing.type) == (colour, kind), (item, env.description)
            if kind == "door":
                assert (how == "open") == thing.is_open
                assert (how == "locked") == (thing.is_locked and not thing.is_open)
            count[colour, how, kind] += 1
            assert number == count[colour, how, kind]
        named = [thing[-1] for thing in things]
        there = [c for c in cells if grid.get(*c) and grid.get(*c).type != "wall"]
        assert sorted(named) == sorted(there), item
        distances = [abs(cell_x - x) + abs(cell_y - y) for cell_x, cell_y in named]
        assert distances == sorted(distances)

        # The end of the text.
        ahead = [(k, (x + k * forward_x, y + k * forward_y)) for k in range(1, 7)]
        faced = (f"You are facing a {grid.get(*cell).type} {k} steps away. " for k, cell in ahead
                 if cell in cells and grid.get(*cell) and grid.get(*cell).type in ("wall", "box"))
        carried = env.env.carrying
        holds = f"carrying a {carried.color} {carried.type}" if carried else "not carrying anything"
        end = f"The room has walls around you. {next(faced, '')}You are {holds}."
        assert env.description.endswith(end), item
        states += 1
    assert states > 500


# ---- actions ----


def test_drop_toggle_doors_and_forward_are_listed_when_they_can_be_done():
    met = Counter()  # how often each case was met
    levels = (6, 22, 23, 24, 25, 26, 27, 28, 31)
    items = [level + 40 * seed for level in levels for seed in range(8)]
    for item, env in random_states(items, turns=25, seed=6):
        front = env.env.grid.get(*env.env.front_pos)
        holds = env.env.carrying
        listed = env.valid_actions()
        key_colour = holds.color if holds and holds.type == "key" else None
        assert ("drop" in listed) == (holds is not None and front is None), item
        barrier = front is not None and front.type in ("wall", "box")
        assert ("move forward" in listed) == (not barrier), item
        can_toggle = front is not None and (
            front.type == "door" and (not front.is_locked or key_colour == front.color)
            or front.type == "box" and front.contains is not None)
        assert ("toggle" in listed) == can_toggle, item
        met["cannot drop"] += holds is not None and front is not None
        met["toggle"] += can_toggle

        # Doors to go through and things to pick up, where they can be reached.
        for colour, how, kind, number, _ in said_things(env):
            name = full_name(colour, how, kind, number)
            if f"go to {name}" not in listed:
                continue
            if kind != "door":
                assert (f"pickup {name}" in listed) == (holds is None), (item, name)
            elif how != "open":
                fits = how == "closed" or key_colour == colour
                assert (f"toggle and go through {name}" in listed) == fits, (item, name)
                met[how, fits, key_colour is None] += 1
    for case in ("cannot drop", "toggle", ("locked", True, False), ("locked", False, False),
                 ("locked", False, True)):
        assert met[case] >= 7, (case, met)


NONSENSE = [
    *("", " ", "\n", ".", "fly", "turn", "left", "turn  left", "turn left, turn left"),
    *("turn left\nturn right", '"turn left"', "go to", "go to 1", "go to red ball"),
    *("go to red ball 99", "go to dragon 1", "pickup", "done", "pickup wall 1"),
    *("go through wall 1", "toggle and go through", "0", "None", "\0", "\ud800", "左转"),
    *("🏃", "ｔｕｒｎ left", "x" * 10**6, "turn left " * 10**5, "go to " * 10**5),
]


def test_what_is_listed_is_accepted_and_anything_else_is_refused_and_changes_nothing():
    accepted = refused = 0
    for item, env in random_states(range(3, 400, 13), turns=3, seed=3):
        listed = env.valid_actions()
        assert json.loads(env._last_text.split("\nAvailable actions: ")[1]) == listed
        assert len(set(listed)) == len(listed)
        of_other_items = world(item - item % 40 + 10).actions
        actions = {*NONSENSE, *of_other_items, *env.refusals, "drop", "toggle", "move forward"}
        for action in actions - set(listed):
            before = state(env)
            step = env.step(action)
            assert not (step.valid or step.done or step.success or step.reward), (item, action)
            assert step.observation.startswith(REFUSED) and len(step.observation) < 10**4
            assert state(env) == before, (item, action)
            refused += 1
        for action in listed:  # case and the space around an action do not matter
            written = action.upper() + " \n" if accepted % 2 == 1 else action
            step = copy.deepcopy(env).step(written)
            assert step.valid and not step.observation.startswith(REFUSED), (item, action)
            accepted += 1
    assert accepted > 700 and refused > 2000

    for item in (-1, "3", True):
        with pytest.raises(ValueError, match="babyai has items"):
            BabyAI().reset(item)
    with pytest.raises(envs.EnvError):
        BabyAI().step("turn left")


# ---- plans ----


def allowed_area(env):
    """The cells that a plan may use.

    These are the cells of the view, one more column at the low end of x where the agent looks right
    or down, and one more row at the low end of y where it looks down or left.
    """
    x0, y0, x1, y1 = map(int, env.env.get_view_exts())
    x0 -= env.env.agent_dir in (0, 1)
    y0 -= env.env.agent_dir in (1, 2)
    return {(x, y) for x in range(x0, x1) for y in range(y0, y1)}


def slow_distances(env):
    """Primitives from here to every (cell, direction), in waves over the cells that look free."""
    free = allowed_area(env)
    for cell in visible(env):
        thing = env.env.grid.get(*cell)
        if thing and not (thing.type == "door" and thing.is_open):
            free.discard(cell)
    wave = {(tuple(map(int, env.env.agent_pos)), int(env.env.agent_dir))}
    distances = dict.fromkeys(wave, 0)
    while wave:
        reached = set()
        for (x, y), d in wave:
            forward = (x + FORWARD[d][0], y + FORWARD[d][1])
            reached |= {((x, y), (d + 1) % 4), ((x, y), (d + 3) % 4)}
            if forward in free:
                reached.add((forward, d))
        distance = distances[wave.pop()] + 1
        wave = reached - distances.keys()
        distances.update(dict.fromkeys(wave, distance))
    return distances


def expected_plans(env, thing, distances):
    """action -> (moves to get there or None, primitives after them) for one thing in view"""
    colour, how, kind, number, (x, y) = thing
    name = full_name(colour, how, kind, number)
    beside = [((x - FORWARD[d][0], y - FORWARD[d][1]), d) for d in range(4)]
    to_beside = min((distances[s] for s in beside if s in distances), default=None)
    plans = {f"go to {name}": (to_beside, 0)}
    if kind != "door" and not env.env.carrying:
        plans[f"pickup {name}"] = (to_beside, 1)
    if how == "closed":
        plans[f"toggle and go through {name}"] = (to_beside, 2)
    if how == "open":
        onto = [n for (cell, _), n in distances.items() if cell == (x, y)]
        plans[f"go through {name}"] = (min(onto, default=None), 0)
    return plans


def test_plans_are_shortest_and_end_where_they_say():
    whole = cut = impossible = 0
    for item, env in random_states(range(1, 40 * 10, 7), turns=4, seed=4):
        distances = slow_distances(env)
        seen = visible(env)
        for thing in said_things(env):
            cell = thing[-1]
            for action, (moves, after) in expected_plans(env, thing, distances).items():
                if moves is None:
                    assert action not in env.actions
                    assert "no path leading to it" in env.step(action).observation
                    impossible += 1
                    continue
                # A plan without any primitive performs minigrid's `done`.
                length = max(moves + after, 1)
                assert len(env.actions[action]) == length, (item, action, env.description)
                if not action.startswith("go to"):
                    continue
                probe = copy.deepcopy(env)
                calls = record(probe.env, "step")
                step = probe.step(action)
                front = tuple(map(int, probe.env.front_pos))
                if len(calls) == max(moves, 1) and front == cell:
                    whole += 1
                elif not step.done:
                    # The plan ran into something that could not be seen from its start.
                    obstacle = probe.env.grid.get(*front)
                    assert calls[-1][0] == 2 and front not in seen, (item, action)
                    assert obstacle and not obstacle.can_overlap(), (item, action)
                    cut += 1
    assert whole > 300 and impossible > 5 and cut < whole / 20, (whole, cut, impossible)


# ---- success ----


def test_a_mission_of_every_level_is_fulfilled_by_the_moves_of_minigrids_bot():
    """In the file L, R and F stand for turn left, turn right and move forward; "through!" for
    toggle and go through. Moves are joined where one action makes several."""
    text = (ROOT / "tests/wire/babyai_solutions.txt").read_text().replace("\n   ", " ")
    short = {"L": "turn left", "R": "turn right", "F": "move forward"}
    found = dict(line.split(": ") for line in text.splitlines())
    assert sorted(int(item) % 40 for item in found) == list(range(40))
    env = BabyAI()
    for item, actions in found.items():
        env.reset(int(item))
        actions = actions.replace("through!", "toggle and go through").split(" / ")
        *early, last = [env.step(short.get(action, action)) for action in actions]
        assert all(step.valid for step in [*early, last]), item
        assert not any(step.done or step.success or step.reward or step.score for step in early)
        assert last.done and last.success and last.reward == last.score == 1, item


def test_success_is_the_verifiers_and_the_end_too():
    ends = {"success": 0, "failure": 0}
    env = BabyAI()
    rng = random.Random(5)
    # All levels, and more of two strict levels, which can be failed.
    for item in [*range(0, 200), *range(19, 1200, 40), *range(15, 1200, 40)]:
        env.reset(item)
        calls = record(env.env.instrs, "verify")
        for _ in range(15):
            step = env.step(rng.choice(env.valid_actions()))
            verdicts = [verdict for _, verdict in calls]
            assert step.success == ("success" in verdicts), item
            assert step.done == any(verdict != "continue" for verdict in verdicts), item
            assert step.reward == step.score == float(step.success)
            if step.done:
                last = verdicts[-1]
                assert last in ends and set(verdicts[:-1]) <= {"continue", last}
                ends[last] += 1
                break
    assert ends["success"] > 50 and ends["failure"] > 15, ends


def test_a_late_success_counts_as_much():
    # minigrid's own limit is 64 steps. Its reward is <= 0.5 from step 36 on and <= 0 from 72 on.
    for turns in (40, 64, 72, 1000):
        env = world(2)
        steps = [env.step("turn left") for _ in range(turns)]
        assert not any(step.reward or step.done for step in steps)
        step = env.step("go to red ball 1")
        assert step.done and step.success and step.reward == step.score == 1


@pytest.mark.parametrize("item, action, success", [
    (19, "pickup green key 1", True), (19, "pickup red ball 1", False),
    (99, "pickup grey key 1", False), (15, "toggle and go through grey closed door 1", False),
    (54, "toggle and go through blue closed door 1", False),  # the mission names the red one first
    (4290, "go to purple closed door 1", True),  # it is in front of the agent already
])
def test_an_episode_ends_when_its_mission_is_fulfilled_or_spoiled(item, action, success):
    env = world(item)
    while action not in env.actions:
        assert not env.step("turn left").done
    last = env.step(action)
    assert (last.valid, last.done, last.success) == (True, True, success)
    assert last.reward == last.score == success
    assert ("\n The task is completed.\nAvailable actions: [" in last.observation) == success
    before = state(env)
    for again in ("turn left", action, "fly", "check available actions", ""):
        assert env.step(again) == replace(last, reward=0.0)
        assert state(env) == before
    env.reset(item)
    assert not env.step("turn left").done


# ---- the expert ----

# An item of every level but 15 (OpenDoorsOrderN4Debug), and more of those with several obstacles.
# 305: the box with the key is in the way. 299: minigrid counts walls among the "grey objects".
EXPERT_ITEMS = [40 * 7 + level for level in range(40) if level != 15]
EXPERT_ITEMS += [40 * seed + level for seed in (8, 9) for level in (6, 22, 23, 25, 27, 28, 31)]


def follow_expert(env, horizon):
    """Play the expert's actions -> the number of turns to success, or None."""
    for turn in range(1, horizon + 1):
        action = env.expert()
        assert action in env.actions, action
        step = env.step(action)
        assert step.valid and step.reward == step.score == step.success, action
        if step.done:
            return turn if step.success else None
    return None


def test_the_expert_fulfils_missions_of_every_level_also_after_random_actions():
    env = BabyAI()
    rng = random.Random(7)
    turns = []
    for number, item in enumerate(EXPERT_ITEMS):
        env.reset(item)
        turns.append(follow_expert(env, horizon=40))
        assert turns[-1], item
        if number % 3 == 0:
            env.reset(item)
            for _ in range(12):
                env.step(rng.choice(env.valid_actions()))
            assert env.done or follow_expert(env, horizon=80), item
    assert sum(turn <= 20 for turn in turns) >= 0.95 * len(turns), turns


@pytest.mark.parametrize("data, most", [(None, 4), (ROOT / "data/rooms", 10)])
def test_the_expert_solves_the_item_sets_within_their_horizons(data, most):
    test = envs.items("babyai", "test", data)[::2]
    names = test + envs.items("babyai", "train", data)[::80]
    env = BabyAI()
    turns = []
    for name in names:
        env.reset(envs.split_item(name)[1])
        turns.append(follow_expert(env, horizon=most))
    assert all(turns), dict(zip(names, turns))
    assert not data or sum(turn > 3 for turn in turns[:len(test)]) >= len(test) / 2 - 5


def test_the_expert_does_not_drop_what_it_would_pick_up_again():
    # The agent holds a box in a small room that has the key of the only, locked door. Wherever the
    # box is put down, it is in the way to the door, but not in the way from the key to the door.
    env = world(8146)
    for action in ("pickup yellow box 1", "turn left", "go to purple key 1"):
        env.step(action)
    assert env.env.carrying.type == "box"
    assert follow_expert(env, horizon=20)


def test_an_episode_is_the_same_whether_or_not_the_expert_was_asked():
    for item in EXPERT_ITEMS[::4]:
        asked, alone = world(item), world(item)
        rng = random.Random(item)
        for _ in range(8):
            found = []
            for _ in range(2):
                base = asked.env
                found.append((state(asked), [id(thing) for thing in base.grid.grid],
                              base.np_random.bit_generator.state, base.step_count,
                              base.instrs.env is base, asked.expert()))
            assert found[0] == found[1]
            action = rng.choice([found[0][-1], *asked.valid_actions()])
            step = asked.step(action)
            assert alone.step(action) == step
            if step.done:
                break


def test_the_expert_takes_the_fewest_turns_to_a_thing_in_the_room():
    # An exhaustive search over lists of actions, on copies, in levels of one room.
    for item in [level + 40 * seed for level in (0, 3, 8, 9, 10) for seed in (11, 12)]:
        reached = [world(item)]
        for fewest in (1, 2, None):
            tried = [(action, copy.deepcopy(env))
                     for env in reached for action in env.valid_actions()]
            if fewest is None or any(env.step(action).success for action, env in tried):
                break
            reached = [env for action, env in tried if action.startswith(("turn", "move", "go to"))]
        turns = follow_expert(world(item), horizon=20)
        assert turns == fewest if fewest else turns > 2, item


def test_the_expert_gives_up_where_there_is_no_way_on():
    assert BabyAI().expert() is BabyAI().state() is None  # before an episode
    # minigrid fails every order of two doors.
    assert world(15).env.mission.count("open") == 2 and world(15).expert() is None
    one_door = world(135)
    assert one_door.env.mission.count("open") == 1 and follow_expert(one_door, 20)
    assert one_door.expert() is None  # after the end
    no_key = world(25)
    grid = no_key.env.grid.grid
    grid[:] = [None if thing is not None and thing.type == "box" else thing for thing in grid]
    assert no_key.expert() is None
    # The blue key is in the room behind the blue door.
    assert world(4286).expert() is None


# ---- states ----


def parts_done(instruction):
    """Which parts of a mission are done, by minigrid's own record, part by part."""
    if not hasattr(instruction, "instr_a"):
        return ()
    own = tuple(getattr(instruction, f"{name}_done", False) == "success" for name in "ab")
    return own, parts_done(instruction.instr_a), parts_done(instruction.instr_b)


def test_states_are_equal_exactly_where_all_that_counts_is_equal():
    """The oracle: the grid, thing by thing, the agent, what it carries, and the parts done. Items
    of all levels, with missions of one part and of several."""
    different = returned = carrying = only_parts = 0
    for item in [*range(0, 40), *range(47, 47 + 40 * 12, 40)]:  # the last ones: of GoToSeqS5R2
        by_key, by_state, seen = {}, {}, {}
        for _, env in random_states([item], 25 if item < 40 else 60, seed=item):
            before = state(env)
            found = env.state()
            assert env.state() == found and state(env) == before  # it changes nothing
            grid = tuple(None if thing is None else thing.encode() for thing in env.env.grid.grid)
            held = env.env.carrying
            rest = (grid, tuple(env.env.agent_pos), env.env.agent_dir, held and held.encode())
            key = rest, parts_done(env.env.instrs)
            returned += key in by_key
            carrying += held is not None
            only_parts += seen.setdefault(rest, found) != found
            assert by_key.setdefault(key, found) == found
            assert by_state.setdefault(found, key) == key
        different += len(by_state)
    assert different > 200 and returned > 50 and carrying > 50 and only_parts
