"""The world "slow", and the command that serves it: python tests/slow.py serve --env slow ..."""

import itertools
import os
import sys
import time

from envs import Env, EnvError, Step
from worlds import serve


class Slow(Env):
    """Knows its number among all those made. A step sleeps for as long as its action says."""

    made = itertools.count()
    busy = False

    def __init__(self):
        self.number = next(self.made)

    def reset(self, item):
        if item == 13:
            raise ValueError("no item 13")
        return f"world {self.number} item {item}"

    def step(self, action):
        if action == "fault":
            raise EnvError("the world broke")
        if action == "crash":
            raise ZeroDivisionError
        told = "together" if self.busy else "alone"
        self.busy = True
        time.sleep(float(action))
        self.busy = False
        return Step(told, 0.25, 0.5)


if __name__ == "__main__":
    serve.REQUEST_SECONDS = float(os.environ["REQUEST_SECONDS"])
    serve.WORLDS["slow"] = "slow:Slow"
    sys.exit(serve.main())
