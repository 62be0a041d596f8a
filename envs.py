"""Environments: the `Env` protocol, the registry of worlds, item ids, and the client of AgentGym's HTTP protocol.

A world is a text game. `reset(item)` starts episode number `item` (the same number is the same episode on
every machine) and returns the first observation; `step(action)` takes one parsed action. To add a world, write
`worlds/NAME.py` with a subclass of `Env` and add one line to `WORLDS` (the README shows all 30 lines).
"""

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import requests

WORLDS = {"babyai": "worlds.babyai:BabyAI", "textcraft": "worlds.textcraft:TextCraft"}
DATA = Path(__file__).parent / "data"


class EnvError(RuntimeError):
    """The environment itself failed (crash, time-out, lost server). Never a reward of 0."""


@dataclass
class Step:
    observation: str
    reward: float = 0.0  # this step's increment; a trajectory's return is the sum over its steps
    score: float = 0.0  # the world's own measure of the episode so far, 0..1
    done: bool = False
    success: bool = False  # the task is fulfilled
    valid: bool = True  # the action was one (well-formed and possible); False makes --invalid_penalty count


class Env:
    """One episode at a time; reused by `reset`. Faults raise `EnvError`, an unknown item `ValueError`."""

    prompt = ""  # the instructions, shown once at the start of every conversation

    def reset(self, item: int) -> str:
        raise NotImplementedError

    def step(self, action: str) -> Step:
        raise NotImplementedError

    def close(self) -> None:
        pass


def make_env(name: str, url: str | None = None, **kw) -> Env:
    """The world `name`: in this process, or on the AgentGym server at `url`. Keyword arguments go to the world's class.
    Raises ValueError for an unknown name or a missing package."""
    if name not in WORLDS:
        raise ValueError(f"unknown environment '{name}'; choose from {', '.join(WORLDS)}")
    module, cls = WORLDS[name].split(":")
    try:
        world = getattr(importlib.import_module(module), cls)
        return RemoteEnv(name, url, world.prompt) if url else world(**kw)
    except ModuleNotFoundError as e:
        raise ValueError(f"environment '{name}' needs the package '{e.name}': pip install {e.name}") from e


# ---- items: which episodes are trained on, which are held out ----


def _item_file(env: str, split: str, data=None) -> Path:
    root = Path(data or DATA)
    path = {"train": root / f"AgentItemId/{env}_train.json", "test": root / f"AgentEval/{env}/{env}_test.json"}.get(split)
    if path is None:
        raise ValueError(f"unknown split '{split}'; choose from train, test")
    if not path.exists():
        raise ValueError(f"no items for '{env}': {path} does not exist")
    return path


def _read_items(path: Path) -> list[str]:
    try:
        return [entry["item_id"] for entry in json.loads(path.read_text())]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f'{path} is no list of {{"item_id": ...}}') from e


def items(env: str, split: str, data=None) -> list[str]:
    """Item ids such as "babyai_17", in the layout of AgentGym-RL-Data-ID under the folder `data` (default: ours)."""
    return _read_items(_item_file(env, split, data))


def categories(env: str, data=None) -> dict[str, str]:
    """Test item -> category: the files beside the test file, each named after the category it lists."""
    test = _item_file(env, "test", data)
    return {item: path.stem for path in sorted(test.parent.glob("*.json")) if path != test for item in _read_items(path)}


def split_item(item: str) -> tuple[str, int]:
    """"babyai_17" -> ("babyai", 17). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\w+?)_(\d+)", item)
    if not match:
        raise ValueError(f"'{item}' is no item id; write it like babyai_17")
    return match[1], int(match[2])


# ---- AgentGym's HTTP protocol: the client ----


def check_url(url: str) -> None:
    """One request, at most 10 s. Raises ValueError if nobody answers."""
    try:
        requests.get(url, timeout=(5, 5)).raise_for_status()
    except (requests.RequestException, ValueError) as e:
        raise ValueError(f"no environment server answers at {url} ({type(e).__name__}); "
                         "start one or drop --env_url") from e


class RemoteEnv(Env):
    """A world on an AgentGym server whose bodies are those of babyai and textcraft: POST /create, /reset, /step, /close.
    Errors, also those that arrive as status 200 with {"error": ...}, raise EnvError."""

    def __init__(self, name: str, url: str, prompt: str, timeout: float = 30.0):
        self.name, self.url, self.prompt, self.timeout = name, url.rstrip("/"), prompt, timeout
        self.session = requests.Session()
        self.id = self._post("create", {})["id"]

    def _post(self, path, body):
        try:
            response = self.session.post(f"{self.url}/{path}", json=body, timeout=self.timeout)
            response.raise_for_status()
            reply = response.json()
        except (requests.RequestException, ValueError) as e:
            raise EnvError(f"{self.url}/{path}: {type(e).__name__}") from e
        if isinstance(reply, dict) and "error" in reply:
            raise EnvError(f"{self.url}/{path}: {reply['error']}")
        return reply

    def reset(self, item: int) -> str:
        return self._post("reset", {"id": self.id, "data_idx": item})["observation"]

    def step(self, action: str) -> Step:
        reply = self._post("step", {"id": self.id, "action": action})
        reward, done = float(reply["reward"]), bool(reply["done"])
        text = reply["observation"]
        valid = not re.match(r"The action is not recognized|You cannot|Could not", text)
        return Step(text, reward, min(1.0, float(reply.get("score", reward))), done, done and reward > 0, valid)

    def close(self) -> None:
        try:
            self._post("close", {"id": self.id})
        except EnvError:
            pass  # the server is gone, and so is the episode
        self.session.close()
