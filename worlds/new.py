"""`python envs.py new NAME`: begin a world of your own: a file, a row of WORLDS, item lists.

The file is a game that runs, to be changed: docs/own_world.md.
"""

import json
import re
import sys
from pathlib import Path

from envs import WORLDS, CommandParser

ROOT = Path(__file__).parent.parent
ITEMS = {"train": (0, 400), "test": (1000, 1016)}
TEMPLATE = '''import random
from envs import Env, EnvError, ItemError, Step

class {Name}(Env):
    prompt = ("I think of a number from 1 to 20. Answer with a number; I say whether mine is "
              "higher or lower.")
    number = None

    def reset(self, item: int) -> str:
        if item < 0:
            raise ItemError(f"{name} has items 0, 1, 2 ...; got {{item}}")
        # The same item is the same episode everywhere.
        self.number, self.low, self.high = random.Random(item).randint(1, 20), 1, 20
        return "Your first guess?"

    def step(self, action: str) -> Step:
        if self.number is None:
            raise EnvError("{name}: step before reset")
        if not action.isdecimal():
            return Step("That is not a number.", valid=False)
        guess = int(action)
        if guess == self.number:
            return Step("Right.", reward=1.0, score=1.0, done=True, success=True)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return Step("Higher.")
        self.high = min(self.high, guess - 1)
        return Step("Lower.")

    def expert(self) -> str:  # what sft.py imitates; may be left out
        return str((self.low + self.high) // 2)
'''


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 and one line on stderr for bad usage."""
    parser = CommandParser(prog="envs.py", description="Begin a world of your own.")
    parser.add_argument("command", choices=["new"])
    parser.add_argument("name", help="of the world: lower-case letters and digits")
    try:
        name = parser.parse_args(argv).name
        file = ROOT / "worlds" / f"{name}.py"
        if not re.fullmatch("[a-z][a-z0-9]*", name) or name in WORLDS or file.exists():
            raise ValueError(f"'{name}' is taken, or no name of lower-case letters and digits")
    except ValueError as e:
        print(f"envs.py: {e}", file=sys.stderr)
        return 2
    registry, table = ROOT / "envs.py", 'WORLDS = {  # name -> "module:class"\n'
    row = f'    "{name}": "worlds.{name}:{name.title()}",\n'
    registry.write_text(registry.read_text("utf-8").replace(table, table + row, 1), "utf-8")
    file.write_text(TEMPLATE.format(name=name, Name=name.title()))
    lists = {"train": ROOT / f"data/AgentItemId/{name}_train.json",
             "test": ROOT / f"data/AgentEval/{name}/{name}_test.json"}
    for split, path in lists.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        items = [{"item_id": f"{name}_{n}"} for n in range(*ITEMS[split])]
        path.write_text(json.dumps(items, indent=1) + "\n")
    print(f"worlds/{name}.py is a game to change; envs.py has its row, data/ its items. Try:\n"
          f"python envs.py play --env {name} --hint\n"
          f"python sft.py --env {name} --demos 400 --epochs 6 --horizon 8 --out runs/{name}_warm")
    return 0
