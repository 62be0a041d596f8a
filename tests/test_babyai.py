"""BabyAI: an item is the same level and seed everywhere, the recorded wording, plans that go where they say, and
success that is minigrid's own verdict, however late."""

import copy
import hashlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
from worlds import babyai  # noqa: E402
from worlds.babyai import BabyAI  # noqa: E402

WIRE = json.loads((ROOT / "tests/wire/babyai.json").read_text())["exchanges"]
LEVELS = """GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 GoToImpUnlock
GoToSeqS5R2 GoToRedBlueBall GoToDoor GoToObjDoor Open OpenRedDoor OpenDoorLoc OpenRedBlueDoorsDebug
OpenDoorsOrderN4Debug Pickup UnblockPickup PickupLoc PickupDistDebug PickupAbove PutNextLocalS6N4
PutNextS7N4Carrying Unlock UnlockLocalDist KeyInBox UnlockPickupDist BlockedUnlockPickup UnlockToUnlock
ActionObjDoor FindObjS7 KeyCorridorS6R3 OneRoomS20 MoveTwoAcrossS8N9 SynthS5R2 SynthLoc SynthSeq MiniBossLevel
BossLevel BossLevelNoUnlock""".split()
FORWARD = [(1, 0), (0, 1), (-1, 0), (0, -1)]  # by direction; right of direction d is FORWARD[(d + 1) % 4]
THING = re.compile(r"There is a (\w+) (?:(open|closed|locked) )?(ball|box|key|door) (\d+) (?:right in front of you "
                   r"(\d+) steps away|(\d+) steps in front of you and (\d+) steps to your (left|right))\. ")
REFUSED = ("The action is not recognized. Please check valid actions.", "You cannot ", "There is a barrier ")

# One item of every level and actions that fulfil its mission. L, R, F: turn left, turn right, move forward;
# through!: toggle and go through. Found from minigrid's bot, its moves joined wherever one action makes several.
SOLUTIONS = """
40: R / R / go to red ball 1
41: R / R / go to red ball 1
42: R / R / go to red ball 1
83: L / L / go to blue ball 1
124: go to red box 2 / go to purple ball 1
45: R / through! green closed door 1 / go to grey closed door 1
86: L / go to grey key 1 / through! yellow closed door 1 / F / L / through! yellow closed door 1 / through! red
   closed door 1 / go to green key 1
207: go to green closed door 1 / go to red closed door 1
88: R / go to yellow key 1 / go to grey key 1
209: L / L / go to green closed door 1
90: go to red key 1 / go to yellow key 1
11: R / through! yellow closed door 1 / F / R / F / F / F / F / L / through! green closed door 1
92: R / through! red closed door 1
53: through! yellow closed door 1
214: go to red closed door 1 / toggle / L / L / through! blue closed door 1
135: through! green closed door 1
176: L / through! yellow closed door 1 / through! grey closed door 1 / F / through! yellow closed door 1 / pickup
   green ball 1
57: R / R / pickup red ball 1
98: R / R / pickup yellow box 1
19: pickup green key 1
180: through! red closed door 1 / pickup red ball 1
61: pickup green ball 1 / L / L / F / drop
142: L / L / F / L / drop
103: R / R / through! purple closed door 1
224: pickup grey key 1 / through! grey locked door 1
25: L / L / go to yellow box 1 / toggle / pickup purple key 1 / L / L / F / R / through! purple locked door 1
106: pickup grey key 1 / go to grey locked door 1 / toggle / L / drop / pickup green box 1
227: R / pickup yellow key 1 / L / go to blue ball 1 / L / drop / pickup blue ball 1 / go to yellow key 1 / L / drop
   / pickup yellow key 1 / go to yellow locked door 1 / toggle / R / drop / go through yellow open door 1 / pickup
   red box 1
28: R / R / pickup green key 1 / L / go to green locked door 1 / toggle / R / drop / pickup purple key 1 / go
   through green open door 1 / go to purple locked door 1 / toggle / R / drop / go through purple open door 1 /
   pickup red ball 1
149: pickup grey key 1
150: R / pickup blue key 1
191: L / F / go to grey closed door 1 / toggle / L / F / L / go to blue closed door 1 / toggle / R / F / F / go to
   grey closed door 1 / toggle / R / R / through! grey closed door 1 / through! yellow closed door 1 / F / L / go
   through yellow open door 1 / pickup red key 1 / R / go through grey open door 1 / go to grey open door 1 / L / go
   to red locked door 1 / toggle / R / drop / pickup purple ball 1
112: pickup yellow ball 1
113: R / pickup purple ball 1 / go to grey box 1 / L / F / R / F / drop / go to grey box 1 / pickup green box 1 / go
   to blue ball 1 / go to grey key 1 / R / F / F / F / F / L / F / F / F / drop
34: pickup red key 1 / through! blue closed door 1
235: L / L / go to yellow closed door 1
236: L / L / F / F / F / F / R / pickup purple key 1 / F / L / F / F / drop
157: go to purple ball 1 / pickup purple key 1 / through! purple closed door 1
238: L / L / F / F / F / F / R / pickup purple key 1 / F / L / F / F / drop
239: L / through! green closed door 1
"""
SHORT = {"L": "turn left", "R": "turn right", "F": "move forward"}


def solutions():
    """{item: [action, ...]}, one for every level"""
    table = {}
    for item, text in re.findall(r"^(\d+): (.*(?:\n   .*)*)", SOLUTIONS, re.M):
        actions = " ".join(text.split()).replace("through!", "toggle and go through").split(" / ")
        table[int(item)] = [SHORT.get(action, action) for action in actions]
    return table


def world(item):
    env = BabyAI()
    env.reset(item)
    return env


def snapshot(env):
    return copy.deepcopy(env, {id(env._levels): {}})  # without the other levels


def random_states(items, turns, seed=0):
    """(item, env) after each of `turns` random actions; the env is to be copied before it is stepped."""
    env, rng = BabyAI(), random.Random(seed)
    for item in items:
        env.reset(item)
        yield item, env
        for _ in range(turns):
            if env.step(rng.choice(env.valid_actions())).done:
                break
            yield item, env


def state(env):
    """All there is to change: the grid (with the contents of boxes), the agent, the text, the verdict."""
    grid = [o and (o.type, o.color, o.encode(), bool(getattr(o, "contains", None))) for o in env.env.grid.grid]
    at = (*map(int, env.env.agent_pos), int(env.env.agent_dir))
    return grid, at, id(env.env.carrying), env.description, list(env.actions), env.done, env.success


def visible(env):
    """Absolute cells that the agent sees, by minigrid's own mask, without the agent's."""
    base = env.env
    mask = base.gen_obs_grid()[1]  # [column, row] of the view
    cells = {(x, y) for x in range(base.width) for y in range(base.height)
             if base.in_view(x, y) and mask[tuple(map(int, base.relative_coords(x, y)))]}
    return cells - {tuple(map(int, base.agent_pos))}


def said_things(env):
    """[(colour, state or "", kind, number, absolute cell)] as the description has them"""
    (x, y), d = env.env.agent_pos, int(env.env.agent_dir)
    (fx, fy), (rx, ry) = FORWARD[d], FORWARD[(d + 1) % 4]
    things = []
    for colour, how, kind, number, straight, ahead, aside, side in THING.findall(env.description):
        a = int(straight or ahead)
        r = int(aside or 0) * (-1 if side == "left" else 1)
        things.append((colour, how, kind, int(number), (int(x) + a * fx + r * rx, int(y) + a * fy + r * ry)))
    assert len(things) == env.description.count("There is a ")
    return things


def verdicts(env):
    """Hooks into the running episode -> the growing list of minigrid's own verdicts, one or more a primitive."""
    found, verify = [], env.env.instrs.verify
    env.env.instrs.verify = lambda action: found.append(verify(action)) or found[-1]
    return found


# ---- items ----


def test_the_order_of_levels_and_seeds():
    env = BabyAI()
    assert len(LEVELS) == 40 and babyai.LEVELS == LEVELS
    for n, name in enumerate(LEVELS):
        name = f"BabyAI-{name}-{'v1' if n == 3 else 'v0'}"
        other = gymnasium.make(name, disable_env_checker=True).unwrapped
        for seed in (0, 1, 57):
            first = env.reset(n + 40 * seed)
            other.reset(seed=seed)
            assert env.env.spec.id == name
            assert first.startswith(f"Your goal: {other.mission}\nIn front of you ")
            assert (env.env.grid.encode() == other.grid.encode()).all()
            assert (tuple(env.env.agent_pos), env.env.agent_dir) == (tuple(other.agent_pos), other.agent_dir)


def fingerprint(items):
    env = BabyAI()
    return hashlib.sha256("\n".join(env.reset(n) for n in items).encode()).hexdigest()


def test_the_same_item_is_the_same_text_in_any_process_and_after_other_items():
    items = [0, 6, 16, 22, 25, 36, 39, 40, 1234, 5678, 10**12]
    here = fingerprint(items)
    code = f"from tests.test_babyai import fingerprint; print(fingerprint({items}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == here, run.stderr
    env, texts = BabyAI(), {n: world(n).reset(n) for n in items}
    for n in random.Random(0).sample(items * 3, 3 * len(items)):
        assert env.reset(n) == texts[n]
        for _ in range(3):
            env.step(random.choice(env.valid_actions()))


@pytest.mark.parametrize("item", [-1, -40, 1.0, "3", None, True, [1]])
def test_bad_items_are_value_errors(item):
    with pytest.raises(ValueError, match="babyai has items"):
        BabyAI().reset(item)


def test_nothing_reaches_stdout(capfd, monkeypatch):
    items = (6, 10, 17, 35)  # in each, minigrid rejects layouts
    for n in items:
        world(n)
    assert capfd.readouterr() == ("", "")
    monkeypatch.delattr(babyai.roomgrid_level, "print")  # what would be there without our silencing
    for n in items:
        world(n)
        assert "Sampling rejected" in capfd.readouterr().out


def test_a_reset_takes_under_5_ms():
    env, seconds = BabyAI(), []
    for n in range(120):
        start = time.process_time()
        env.reset(n)
        seconds.append(time.process_time() - start)
    assert statistics.median(seconds[40:]) < 0.005  # the first 40 also make the levels


# ---- wording ----


def test_a_layout_without_a_place_for_the_agent_is_made_again():
    signal.alarm(30)  # minigrid alone would look for one for ever
    try:
        assert BabyAI().reset(37243114).startswith("Your goal: ")
    finally:
        signal.alarm(0)


def test_recorded_traffic_replays_exactly():
    env, checked = BabyAI(), 0
    for exchange in WIRE:
        reply = exchange["response"]
        if exchange["path"] not in ("/reset", "/step") or "observation" not in reply:
            continue
        if exchange["path"] == "/reset":
            assert env.reset(exchange["json"]["data_idx"]) == reply["observation"]
        else:
            step = env.step(exchange["json"]["action"])
            assert (step.observation, step.reward, step.score, step.done) == (
                reply["observation"], reply["reward"], reply["score"], reply["done"])
            assert step.valid == (not reply["observation"].startswith("The action is not recognized"))
        checked += 1
    assert checked == 8


def test_the_mission_keeps_its_order():
    for item, mission in ((15, "open the purple door after you open the red door"),
                          (55, "open the yellow door, then open the green door")):
        assert BabyAI().reset(item).split("\n")[0] == f"Your goal: {mission}"


def test_the_description_is_what_the_grid_holds():
    """Every visible thing is named once, at its place, with its state, from near to far; then come the wall or box
    ahead and what is carried."""
    states = 0
    for item, env in random_states(range(0, 40 * 6), turns=8):
        grid, cells, things = env.env.grid, visible(env), said_things(env)
        x, y = map(int, env.env.agent_pos)
        fx, fy = FORWARD[env.env.agent_dir]
        for colour, how, kind, _, pos in things:
            thing = grid.get(*pos)
            assert thing and (thing.color, thing.type) == (colour, kind), (item, env.description)
            if kind == "door":
                assert how == ("open" if thing.is_open else "locked" if thing.is_locked else "closed")
        named = [pos for *_, pos in things]
        assert sorted(named) == sorted(c for c in cells if grid.get(*c) and grid.get(*c).type != "wall"), item
        distances = [abs(px - x) + abs(py - y) for px, py in named]
        assert distances == sorted(distances)
        for i, (colour, how, kind, number, _) in enumerate(things):
            assert number == 1 + sum(t[:3] == (colour, how, kind) for t in things[:i])
        ray = [(k, grid.get(x + k * fx, y + k * fy)) for k in range(1, 7) if (x + k * fx, y + k * fy) in cells]
        ahead = [f"You are facing a {o.type} {k} steps away. " for k, o in ray if o and o.type in ("wall", "box")]
        holds = env.env.carrying
        holds = f"You are carrying a {holds.color} {holds.type}." if holds else "You are not carrying anything."
        assert env.description.endswith(f"The room has walls around you. {''.join(ahead[:1])}{holds}"), item
        states += 1
    assert states > 1500


def test_the_list_in_the_text_is_the_list():
    for item, env in random_states(range(0, 400, 7), turns=5, seed=1):
        listed = json.loads(env._last_text.split("\nAvailable actions: ")[1])
        assert listed == env.valid_actions() and len(set(listed)) == len(listed)
        assert listed[:2] == ["turn left", "turn right"] and listed[-1] == "check available actions"


# ---- actions ----


def test_every_listed_action_is_accepted():
    taken = 0
    for item, env in random_states(range(0, 400, 9), turns=4, seed=2):
        for action in env.valid_actions():
            written = action.upper() + " \n" if taken % 2 else action  # case and space around it do not matter
            step = snapshot(env).step(written)
            assert step.valid and not step.observation.startswith(REFUSED), (item, action)
            taken += 1
    assert taken > 1000


def test_drop_toggle_doors_and_forward_are_listed_when_they_can_be_done():
    met = {"matching": 0, "other": 0, "none": 0, "cannot drop": 0, "toggle": 0}
    items = [level + 40 * seed for level in (6, 22, 23, 24, 25, 26, 27, 28, 31) for seed in range(12)]
    for item, env in random_states(items, turns=25, seed=6):
        front, holds, listed = env.env.grid.get(*env.env.front_pos), env.env.carrying, env.valid_actions()
        assert ("drop" in listed) == (holds is not None and front is None), item
        assert ("move forward" in listed) == (front is None or front.type not in ("wall", "box")), item
        met["cannot drop"] += holds is not None and front is not None
        key_for = holds.color if holds and holds.type == "key" else None
        opens = front and front.type == "door"
        opens = opens and (not front.is_locked or key_for == front.color)
        assert ("toggle" in listed) == bool(opens or front and front.type == "box" and front.contains), item
        met["toggle"] += "toggle" in listed
        for colour, how, kind, number, _ in said_things(env):
            name = " ".join(filter(None, (colour, how, kind, str(number))))
            if kind == "door" and how != "open" and f"go to {name}" in listed:
                fits = how == "closed" or key_for == colour
                assert (f"toggle and go through {name}" in listed) == fits, (item, name)
                if how == "locked":
                    met["matching" if fits else "other" if key_for else "none"] += 1
            if kind != "door" and f"go to {name}" in listed:
                assert (f"pickup {name}" in listed) == (holds is None), (item, name)
    assert min(met.values()) >= 10, met


NONSENSE = ["", " ", "\n", ".", "fly", "turn", "left", "turn  left", "turn left, turn left", "turn left\nturn right",
            '"turn left"', "go to", "go to 1", "go to red ball", "go to red ball 99", "go to dragon 1", "pickup",
            "done", "pickup wall 1", "go through wall 1", "toggle and go through", "0", "None", "\0", "\ud800", "左转",
            "🏃", "ｔｕｒｎ left", "x" * 10**6, "turn left " * 10**5, "go to " * 10**5]


def test_anything_else_is_refused_and_changes_nothing():
    refused = 0
    for item, env in random_states(range(3, 400, 13), turns=4, seed=3):
        known = {a for other in (world(item - item % 40 + n) for n in (10, 23, 27)) for a in other.actions}
        for action in {*NONSENSE, *known, *env.refusals, "drop", "toggle", "move forward"} - set(env.actions):
            before = state(env)
            step = env.step(action)
            assert not step.valid and (step.reward, step.done, step.success) == (0, False, False), (item, action)
            assert step.observation.startswith(REFUSED) and len(step.observation) < 10**4
            assert state(env) == before, (item, action)
            refused += 1
    assert refused > 4000


def test_step_before_reset_is_an_env_error():
    with pytest.raises(envs.EnvError):
        BabyAI().step("turn left")
    env = BabyAI()
    with pytest.raises(ValueError):
        env.reset(-1)
    with pytest.raises(envs.EnvError):
        env.step("turn left")


def allowed_area(env):
    """The cells of a plan: the view, and one column more at the low end facing right or down (x), one row more at the
    low end facing down or left (y)."""
    x0, y0, x1, y1 = map(int, env.env.get_view_exts())
    d = env.env.agent_dir
    return {(x, y) for x in range(x0 - (d in (0, 1)), x1) for y in range(y0 - (d in (1, 2)), y1)}


def slow_distances(env):
    """Primitives from here to every (cell, direction): waves over the allowed cells that are not seen blocked."""
    grid, free = env.env.grid, allowed_area(env)
    for cell in visible(env):
        thing = grid.get(*cell)
        if thing and not (thing.type == "door" and thing.is_open):
            free.discard(cell)
    start = (tuple(map(int, env.env.agent_pos)), int(env.env.agent_dir))
    steps, wave = {start: 0}, {start}
    while wave:
        n = steps[next(iter(wave))] + 1
        wave = {new for (x, y), d in wave
                for new in (((x, y), (d + 1) % 4), ((x, y), (d + 3) % 4), ((x + FORWARD[d][0], y + FORWARD[d][1]), d))
                if new not in steps and (new[0] in free or new[0] == (x, y))}
        steps.update(dict.fromkeys(wave, n))
    return steps


def test_plans_are_shortest_and_end_where_they_say():
    whole = cut = impossible = 0
    for item, env in random_states(range(1, 40 * 10, 3), turns=5, seed=4):
        steps, seen = slow_distances(env), visible(env)
        for colour, how, kind, number, (x, y) in said_things(env):
            name = " ".join(filter(None, (colour, how, kind, str(number))))
            beside = [((x - FORWARD[d][0], y - FORWARD[d][1]), d) for d in range(4)]
            best = min((steps[s] for s in beside if s in steps), default=None)
            verbs = {f"go to {name}": (best, 0)}  # action -> (moves, what comes after them)
            if kind != "door" and not env.env.carrying:
                verbs[f"pickup {name}"] = (best, 1)
            if how == "closed":
                verbs[f"toggle and go through {name}"] = (best, 2)
            if how == "open":
                onto = [n for (cell, _), n in steps.items() if cell == (x, y)]
                verbs[f"go through {name}"] = (min(onto, default=None), 0)
            for action, (moves, after) in verbs.items():
                if moves is None:
                    assert action not in env.actions and "no path leading to it" in env.step(action).observation
                    impossible += 1
                    continue
                assert len(env.actions[action]) == (moves + after or 1), (item, action, env.description)
                if not action.startswith("go to"):
                    continue
                probe, calls = snapshot(env), []
                primitive = probe.env.step
                probe.env.step = lambda a: calls.append(a) or primitive(a)
                step = probe.step(action)
                front = tuple(map(int, probe.env.front_pos))
                if len(calls) == max(moves, 1) and front == (x, y):
                    whole += 1
                elif not step.done:  # the plan ran into something that was not to be seen from the start
                    assert calls[-1] == 2 and front not in seen and probe.env.grid.get(*front), (item, action)
                    assert not probe.env.grid.get(*front).can_overlap(), (item, action)
                    cut += 1
    assert whole > 1000 and impossible > 20 and cut < whole / 20, (whole, cut, impossible)


def test_go_to_what_is_already_in_front_fulfils_the_mission():
    env = world(4290)
    assert env.env.mission == "go to the purple door" and env.env.grid.get(*env.env.front_pos).color == "purple"
    before = state(env)[:2]
    step = env.step("go to purple closed door 1")
    assert (step.reward, step.score, step.done, step.success, step.valid) == (1, 1, True, True, True)
    assert state(env)[:2] == before


# ---- success ----


def test_a_mission_of_every_level_is_fulfilled_by_listed_actions():
    found = solutions()
    assert sorted(item % 40 for item in found) == list(range(40))
    env = BabyAI()
    for item, actions in found.items():
        env.reset(item)
        steps = [env.step(action) for action in actions]
        assert all(step.valid for step in steps), (item, [s.valid for s in steps])
        *early, last = steps
        assert all((s.reward, s.score, s.done, s.success) == (0, 0, False, False) for s in early), item
        assert (last.reward, last.score, last.done, last.success) == (1, 1, True, True), item
        assert "\n The task is completed.\nAvailable actions: [" in last.observation


def test_success_is_the_verifiers_and_the_end_too():
    ends = {"success": 0, "failure": 0}
    env, rng = BabyAI(), random.Random(5)
    for item in [*range(0, 200), *range(19, 1200, 40), *range(15, 1200, 40)]:
        env.reset(item)
        found = verdicts(env)
        for _ in range(15):
            step = env.step(rng.choice(env.valid_actions()))
            assert step.success == ("success" in found) and step.done == any(v != "continue" for v in found), item
            assert step.reward == step.score == float(step.success)
            if step.done:
                assert found[-1] in ends and set(found[:-1]) <= {"continue", found[-1]}
                ends[found[-1]] += 1
                break
    assert ends["success"] > 50 and ends["failure"] > 15, ends


@pytest.mark.parametrize("turns", [40, 60, 64, 68, 72, 100, 1000])
def test_a_late_success_counts_as_much(turns):
    env = world(2)
    assert env.env.max_steps == 64  # minigrid's own limit; its reward is <= 0.5 from 36 on and <= 0 from 72 on
    for _ in range(turns):
        step = env.step("turn left")
        assert (step.reward, step.done) == (0, False)
    step = env.step("go to red ball 1")
    assert (step.reward, step.score, step.done, step.success) == (1, 1, True, True)


@pytest.mark.parametrize("item, action", [(19, "pickup red ball 1"), (99, "pickup grey key 1"), (54, None),
                                          (15, "toggle and go through grey closed door 1")])
def test_a_strict_level_ends_when_it_is_spoiled(item, action):
    env = world(item)
    if action is None:  # the blue door opened first
        action = "toggle and go through blue closed door 1"
        while action not in env.actions:
            assert not env.step("turn left").done
    step = env.step(action)
    assert (step.valid, step.reward, step.score, step.done, step.success) == (True, 0, 0, True, False)
    assert "completed" not in step.observation


@pytest.mark.parametrize("action, success", [("pickup red ball 1", False), ("pickup green key 1", True)])
def test_after_the_end_the_last_step_comes_again_without_reward(action, success):
    env = world(19)
    last = env.step(action)
    assert last.done and last.success is success
    before = state(env)
    for again in ("turn left", action, "fly", "check available actions", ""):
        assert env.step(again) == replace(last, reward=0.0)
        assert state(env) == before
    env.reset(19)
    assert not env.step("turn left").done


def test_two_worlds_do_not_touch():
    one, two = world(5), world(5)
    before = state(two)
    one.step("turn left")
    assert state(two) == before and one.env is not two.env
