"""Environments: the `Env` protocol, the registry of worlds, item ids, and a pool of environments.

A world is a text game. An environment plays one episode of a world at a time: `reset(item)` starts
the episode of item number `item` and returns the first observation; `step(action)` takes one
action. The same item number gives the same episode on every machine.

To add a world, write `worlds/NAME.py` with a subclass of `Env` and add one line to `WORLDS`
(the README has a complete example).

    python envs.py serve --env babyai --port 36001   # serve a world in AgentGym's HTTP protocol
    python envs.py play --env textcraft --item 3     # play a world in the terminal
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import random
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import requests
from urllib3.exceptions import HTTPError

# ---- the protocol ----


class EnvError(RuntimeError):
    """The environment itself failed (crash, time-out, lost server). Never a reward of 0."""


class UserError(ValueError):
    """A mistake of the user, which ends the command with one line."""


class ItemError(UserError):
    """There is no such item."""


class AgentError(RuntimeError):
    """The agent itself failed (a bug in its function). It ends the run."""


@dataclass
class Step:
    """What an environment returns for one action."""

    observation: str
    reward: float = 0.0  # this step's increment; a trajectory's return is the sum over its steps
    score: float = 0.0  # the world's own measure of the episode so far, from 0 to 1
    done: bool = False  # the episode is over
    success: bool = False  # the task is fulfilled
    valid: bool = True  # the action was well-formed and possible; --invalid_penalty needs False
    progress: float = 0.0  # from 0 to 1, how far the task has come; --shaping pays for it

    def __post_init__(self):
        # A world may return NumPy scalars, which the json module cannot write.
        self.reward, self.score = float(self.reward), float(self.score)
        self.done, self.success, self.valid = bool(self.done), bool(self.success), bool(self.valid)
        self.progress = float(self.progress)


class Env:
    """A world that plays one episode at a time and is reused by `reset`.

    Failures of the environment raise `EnvError`, an unknown item raises `ValueError`.
    """

    prompt = ""  # the instructions, shown once at the start of every conversation
    whole_reply = False  # `step` takes the agent's whole reply, not the action parsed from it
    stop = ()  # strings that end a reply; the string itself belongs to the reply
    # `step` is fast and cannot hang. On a CPU the rollout then calls it directly, without switching
    # to the environment's thread, unless the episode is `remote`.
    instant = False
    remote = False  # the episode is played on a server
    has_progress = False  # `step` gives `Step.progress`; --shaping needs it
    # Defaults of settings in this world, for the tiny model and for others, where they are not
    # config.py's. "eval_horizon" is the last horizon of training if it is absent.
    tiny: dict[str, Any] = {}
    real: dict[str, Any] = {}

    def reset(self, item: int) -> str:
        """Begin the episode of `item` -> the first observation. Several episodes may follow each
        other without a `close` in between: release what the previous one held."""
        raise NotImplementedError

    def step(self, action: str) -> Step:
        """Take the agent's action. Any text is allowed: an invalid action gives valid=False."""
        raise NotImplementedError

    def expert(self) -> str | None:
        """The action that an expert takes now. None: this world has none, or there is no way on.

        It leaves the episode as it is. The expert may know what the agent cannot see.
        """
        return None

    def state(self) -> str | None:
        """A short text that names the state of the episode, for credit by state: equal states have
        equal texts, however the agent came to them and whatever it has been shown. None: this
        world does not tell its state."""
        return None

    def valid_actions(self) -> list[str]:
        """Actions that are accepted now; [] in a world that does not list them."""
        return []

    def refused_actions(self) -> list[str]:
        """Actions that look right but are refused now; [] in a world that does not list them.
        `sft.py --noise` takes some of them, so that the expert shows how to recover."""
        return []

    def close(self) -> None:
        """Release what the environment holds: processes, files, connections. Called once, at the
        end, even if `reset` never was."""

    @staticmethod
    def category(item: int) -> str:
        """The kind of task that an item is, for tables; "": they are all of one kind."""
        return ""


# ---- the registry ----

WORLDS = {  # name -> "module:class"
    "babyai": "worlds.babyai:BabyAI",
    "textcraft": "worlds.textcraft:TextCraft",
    "sciworld": "worlds.sciworld:SciWorld",
    "searchqa": "worlds.searchqa:SearchQA",
    "webarena": "worlds.webarena.env:WebArena",
    "textworld": "worlds.textworld:TextWorld",
}
# Worlds on servers of another protocol than AgentGym's: name -> "module:class". The class takes the
# address and the arguments in --env_args.
SERVER_WORLDS = {"openenv": "worlds.openenv:OpenEnv"}


def load_named(name: str, table: dict[str, str], kind: str) -> Any:
    """The object that a name stands for: a key of `table` (name -> "module:attribute"), a
    "module:attribute" or "FILE.py:attribute", or NAME of a file ideas/NAME.py, for its `kind`.

    kind: "agent", "advantage", "loss" ...: also the word in the error message. Raises ValueError
    if there is no such object. Exceptions of the module's own code pass.
    """
    where, _, attribute = table.get(name, name).rpartition(":")
    if not where:
        where, attribute = f"ideas.{name}", kind
    module = None
    try:
        if where.endswith(".py"):
            module = _load_file(Path(where)) if Path(where).is_file() else None
        elif not where.startswith("."):
            module = importlib.import_module(where)
    except ModuleNotFoundError as e:
        if not f"{where}.".startswith(f"{e.name}."):  # a package that the module needs
            raise
    if not hasattr(module, attribute):
        choices = [*table, "the name of a file in ideas/, FILE.py:NAME or module:NAME"]
        raise ValueError(f"there is no {kind} '{name}': write {', '.join(choices)}")
    return getattr(module, attribute)


def with_settings(function: Callable[..., Any], settings: dict[str, Any],
                  name: str) -> Callable[..., Any]:
    """A function, whose attributes stay, with settings for its parameters after the first. Raises
    ValueError for one that it does not have or that is not of the type of its default."""
    if not callable(function):
        raise ValueError(f"{name} is no function")
    parameters = [*inspect.signature(function).parameters.values()][1:]
    defaults = {p.name: p.default for p in parameters}
    missing = [key for key, default in defaults.items()
               if default is inspect.Parameter.empty and key not in settings]
    if missing:
        raise ValueError(f"{name} needs a setting '{missing[0]}'")
    for key, value in settings.items():
        if key not in defaults:
            has = ", ".join(defaults) or "none"
            raise ValueError(f"{name} has no setting '{key}'; it has {has}")
        kind = type(defaults[key])
        if kind is float and type(value) is int:
            settings = settings | {key: float(value)}
        elif kind in (bool, int, float, str) and type(value) is not kind:
            raise ValueError(f"{name}: {key} is {kind.__name__}, not {value!r}")
    return functools.update_wrapper(functools.partial(function, **settings), function)


def read_settings(text: str, flag: str) -> dict[str, Any]:
    """NAME=VALUE pairs, or a JSON object, as a dict. Raises ValueError for what cannot be read.

    >>> read_settings("enable_thinking=false reasoning_effort=low keep=2", "--chat_args")
    {'enable_thinking': False, 'reasoning_effort': 'low', 'keep': 2}
    >>> read_settings("command='python a.py {url}'", "--agent_args")
    {'command': 'python a.py {url}'}
    >>> read_settings('{"enable_thinking": false}', "--chat_args")
    {'enable_thinking': False}
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{flag} is not a JSON object: {e}") from e
    settings = {}
    try:
        parts = shlex.split(text)
    except ValueError as e:
        raise ValueError(f"cannot read {flag}: {e}") from e
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"cannot read {flag} '{part}'; write NAME=VALUE, several with spaces "
                             "between them, or a JSON object")
        try:
            settings[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):
            settings[name] = value
    return settings


class Numbers:
    """The numbers that a flag may have, as argparse's `choices`: finite, and at least `low`, or
    above it."""

    def __init__(self, low: float, itself: bool):
        self.low, self.itself = low, itself

    def __contains__(self, x: float) -> bool:
        return self.low < x < math.inf or self.itself and x == self.low

    def __iter__(self):
        yield f"numbers {'from' if self.itself else 'above'} {self.low}{' on' * self.itself}"


ABOVE_0, NOT_NEGATIVE = Numbers(0, itself=False), Numbers(0, itself=True)


def flag(default: Any, help: str, choices: Container | None = None, study: bool = False) -> Any:
    """A field of a dataclass of settings that is a flag of a command, with its line of --help. A
    field without it is no flag. study: it is set by --set FIELD=VALUE."""
    return field(default=default, metadata={"help": help, "choices": choices, "study": study})


def load_function(name: str, table: dict[str, str], kind: str, settings: str) -> Callable[..., Any]:
    """The advantage or loss (`kind`) that `name` stands for, with settings "NAME=VALUE ...". Raises
    ValueError: see `load_named`, `read_settings` and `with_settings`."""
    return with_settings(load_named(name, table, kind), read_settings(settings, f"{kind} {name}"),
                         f"{kind} {name}")


_loading = threading.RLock()


def _load_file(path: Path) -> Any:
    """The module that a file is, imported once."""
    name = f"file:{path.resolve()}"
    with _loading:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def make_env(name: str, url: str | None = None, **kw: Any) -> Env:
    """Make the world `name`: in this process, or on the AgentGym server at `url`.

    Keyword arguments go to the world's class, or to `worlds.agentgym.RemoteEnv` if there is a
    `url`; a world of SERVER_WORLDS takes both. Raises ValueError for an unknown name, an unknown
    argument or a missing package, and EnvError if the server fails.
    """
    check_name(name, url)
    if name in SERVER_WORLDS:
        return _make_local(name, {"url": url, **kw})
    if url:
        return _make_remote(name, url, kw)
    return _make_local(name, kw)


def _make_local(name, kw):
    try:
        world = world_class(name)
        parameters = inspect.signature(world).parameters
        unknown = kw.keys() - parameters.keys()
        if unknown:
            takes = ", ".join(parameters) or "none"
            raise ValueError(f"{name} takes no argument '{min(unknown)}'; it takes {takes}")
        for key, value in kw.items():
            if type(parameters[key].default) is int:
                if not str(value).isdecimal():
                    raise ValueError(f"{name}.{key} is a whole number, not '{value}'")
                kw[key] = int(value)
        return world(**kw)
    except ModuleNotFoundError as e:
        raise _missing_package(name, e) from e


def _make_remote(name, url, kw):
    client = _agentgym_client()
    prompt = client.PROTOCOLS[name].prompt if name in client.PROTOCOLS else ""
    world = Env  # its attributes are the defaults of a world that this project does not have
    if name in WORLDS:
        try:
            world = world_class(name)
            prompt = world.prompt
        except ModuleNotFoundError as e:
            # The world runs on the server, so without its package only its prompt is needed.
            if not prompt:
                raise _missing_package(name, e) from e
    return client.RemoteEnv(name, url, prompt, world.stop, world.instant, world.whole_reply, **kw)


def world_class(name: str) -> type[Env]:
    """Import the class of a world of `WORLDS` or `SERVER_WORLDS`. Raises ModuleNotFoundError if a
    package that it needs is missing."""
    return load_named({**WORLDS, **SERVER_WORLDS}[name], {}, "world")


def _missing_package(name, error):
    """The ValueError that says how to install what the world `name` needs."""
    if name in ("babyai", "textcraft"):  # part of a plain install
        install = error.name
    else:  # every other world has an extra of its own name
        install = f'-e ".[{name}]"'
    needs = f"environment '{name}' needs the package '{error.name}'"
    return ValueError(f"{needs}: pip install {install}")


def _agentgym_client():
    """Return the module `worlds.agentgym`, loaded by name because it imports this file."""
    return importlib.import_module("worlds.agentgym")


def check_name(name: str, url: str | Sequence[str] | None = None) -> None:
    """Raise ValueError unless there is a world `name`.

    url: an address of a server, or a list of them. With it the worlds that only AgentGym's
    servers have are allowed too.
    """
    protocols = _agentgym_client().PROTOCOLS
    if name in protocols and name not in WORLDS and not url:
        raise ValueError(f"'{name}' is played on an AgentGym server only: give --env_url")
    if name in SERVER_WORLDS and not url:
        raise ValueError(f"'{name}' is played on a server only: give --env_url")
    known = {**WORLDS, **protocols, **SERVER_WORLDS} if url else WORLDS
    if name not in known:
        raise ValueError(f"unknown environment '{name}'; choose from {', '.join(known)}")


def check_env(name: str, urls: Sequence[str] = (), **kw: Any) -> None:
    """Raise ValueError, with one line, unless the world `name` can be played.

    Without `urls` the world is made once in this process, with the arguments `kw`. Otherwise each
    server gets one request and at most 10 s.
    """
    check_name(name, urls)
    if not urls:
        make_env(name, **kw).close()
    if name in SERVER_WORLDS:
        for url in urls:
            try:
                make_env(name, url, **kw).close()
            except EnvError as e:
                raise ValueError(str(e)) from e
        return
    for url in urls:
        try:
            # Any answer will do: maze's server has nothing at http://host:port/maze/ itself.
            with requests.get(url, timeout=(5, 5), stream=True) as reply:
                # What is there at once: reading a slow body to its end could exceed the limit.
                greeting = reply.raw.read1(1000, decode_content=True).decode(errors="replace")
        except (requests.RequestException, HTTPError, OSError, ValueError) as e:
            raise ValueError(f"no environment server answers at {url} ({type(e).__name__}); "
                             "start one or drop --env_url") from e
        _agentgym_client().check_name(name, url, greeting)


def env_options(env_args: str, names: Collection[str]) -> dict[str, dict[str, str]]:
    """World -> its keyword arguments in --env_args, as text; `make_env` knows their types.

    names: the worlds that may have arguments. Raises ValueError for what cannot be read.

    >>> env_options("searchqa.topk=5 searchqa.corpus=wiki.jsonl", ["searchqa"])
    {'searchqa': {'topk': '5', 'corpus': 'wiki.jsonl'}}
    """
    options = {}
    for part in env_args.split():
        match = re.fullmatch(r"(\w+)\.([a-z]\w*)=(.*)", part)
        if not match or match[1] not in names:
            example = f"{next(iter(names))}.NAME=VALUE"
            raise ValueError(f"cannot read --env_args '{part}'; write {example}")
        world, key, value = match.groups()
        options.setdefault(world, {})[key] = value
    return options


# ---- items: the episodes that are trained on, and those that are held out ----

DATA = Path(__file__).parent / "data"
# Worlds that AgentGym's item sets know by another name: "lmrlgym_maze_3" is item 3 of maze.
DATA_NAMES = {"maze": "lmrlgym_maze", "wordle": "lmrlgym_wordle"}
WORLD_OF = {data_name: world for world, data_name in DATA_NAMES.items()}


def items(env: str, split: str, data: str | Path | None = None) -> list[str]:
    """Item ids such as "babyai_17" of the split "train" or "test".

    data: a folder in the layout of AgentGym-RL-Data-ID (default: this project's item sets).
    Raises ValueError for an unknown split, and for a file that is missing, damaged or empty.
    """
    path = _item_file(env, split, data)
    names = _read_items(path, env)
    if not names:
        raise ValueError(f"{path} holds no items")
    return names


def held_out(env: str, count: int, data: str | Path | None = None) -> list[str]:
    """At most `count` items of the split "test", drawn at random, always the same ones."""
    names = items(env, "test", data)
    return random.Random(0).sample(names, min(count, len(names)))


def categories(env: str, data: str | Path | None = None) -> dict[str, str]:
    """Test item -> category. Each file beside the test file lists the items of one category."""
    test_file = _item_file(env, "test", data)
    found = {}
    for path in sorted(test_file.parent.glob("*.json")):
        if path != test_file:
            found.update(dict.fromkeys(_read_items(path, env), path.stem))
    return found


def has_known_categories(env_url: str, env_args: str) -> bool:
    """Whether `category_of` is right for a run with these flags. It is not for worlds on a server
    or for the user's own tasks, whose item numbers mean other tasks."""
    return not env_url and "questions=" not in env_args and "tasks=" not in env_args


def category_of(item: str) -> str:
    """The kind of task that an item is, by its world; "" for an unknown item or world, or one that
    lacks its package.

    >>> category_of("babyai_0")
    'GoToRedBallGrey'
    """
    try:
        name, number = split_item(item)
        return world_class(name).category(number) if name in WORLDS else ""
    except (ValueError, LookupError, ImportError):
        return ""


def has_states(name: str) -> bool:
    """Whether the world `name`, played in this process, tells its states. Raises ValueError if its
    package is missing."""
    return name in WORLDS and _installed_class(name).state is not Env.state


def has_progress(name: str) -> bool:
    """Whether the world `name`, played in this process, gives `Step.progress`. Raises ValueError if
    its package is missing."""
    return name in WORLDS and _installed_class(name).has_progress


def _installed_class(name):
    try:
        return world_class(name)
    except ModuleNotFoundError as e:
        raise _missing_package(name, e) from e


def split_item(item: str) -> tuple[str, int]:
    """"babyai_17" -> ("babyai", 17), "lmrlgym_maze_3" -> ("maze", 3). Raises ValueError for
    anything else."""
    match = re.fullmatch(r"(\w+?)_(\d+)", item)
    if not match:
        raise ValueError(f"'{item}' is not an item id; write it like babyai_17")
    return WORLD_OF.get(match[1], match[1]), int(match[2])


def _item_file(env, split, data):
    root = Path(data or DATA)
    layout = {"train": "AgentItemId/{0}_train.json", "test": "AgentEval/{0}/{0}_test.json"}
    if split not in layout:
        raise ValueError(f"unknown split '{split}'; choose from train, test")
    # The files of maze and wordle may have AgentGym's names or ours.
    for name in (DATA_NAMES.get(env, env), env):
        path = root / layout[split].format(name)
        if path.exists():
            return path
    raise ValueError(f"no items for '{env}': {path} does not exist")


_warned = set()  # files of items of which a warning has been printed


def _read_items(path, env):
    try:
        names = [entry["item_id"] for entry in json.loads(path.read_text())]
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f'{path} is not a list of {{"item_id": ...}}') from e
    for name in names:
        allowed = f"({re.escape(env)}|{DATA_NAMES.get(env, env)})_\\d+"
        if not isinstance(name, str) or not re.fullmatch(allowed, name):
            raise ValueError(f"{path} holds the item {name!r:.80}; those of {env} are written "
                             f"{env}_17")
    repeated = len(names) - len(set(names))
    if repeated and path not in _warned:
        _warned.add(path)
        print(f"warning: {path}: {repeated} repeated entries are left out", file=sys.stderr)
    return list(dict.fromkeys(names))


# ---- environments in threads ----


class Worker:
    """An environment in a daemon thread of its own, so that a slow one delays no other.

    The environment is made in the thread, with the first call. A worker that misses its deadline
    is abandoned: Python cannot end a thread that hangs.
    """

    def __init__(self, make: Callable[[], Env]):
        self.make = make
        self.env: Env | None = None
        self.made = 0.0  # when the environment was made, by `time.monotonic`
        self.began = 0.0  # when the last call began
        self.inbox = queue.SimpleQueue()  # jobs; None ends the thread
        self.thread = threading.Thread(target=self._run, daemon=True)

    def call(self, function: Callable[..., Any], *args: object, here: bool = False) -> Future:
        """Call function(environment, *args) in the environment's thread -> a Future.

        here: call it at once, in the caller's thread. The environment's thread must be idle.
        """
        future = Future()
        self.began = time.monotonic()
        if here:
            self._do(future, function, args)
            return future
        self.inbox.put((future, function, args))
        if not self.thread.ident:  # not started yet
            self.thread.start()
        return future

    def limit(self, deadline: float, create_deadline: float) -> float:
        """The time, on the clock of `time.monotonic`, at which the last call times out. While the
        environment is being made: `create_deadline` seconds after the call began. Then: `deadline`
        seconds after the call began, or after the environment was made if that is later."""
        if self.env is None:
            return self.began + create_deadline
        return max(self.began, self.made) + deadline

    def outcome(self, future: Future, deadline: float, create_deadline: float) -> tuple[Any, str]:
        """Wait for the last call -> (its result, "") or (None, what went wrong). AgentError and
        ItemError pass: they are no faults of the environment."""
        while True:
            seconds_left = self.limit(deadline, create_deadline) - time.monotonic()
            try:
                # In slices, because the limit moves when the environment has been made.
                return future.result(timeout=min(1.0, max(0.0, seconds_left))), ""
            except TimeoutError as e:
                if future.done():
                    if future.exception() is e:  # the world itself raised it
                        return None, _crash(e)
                    continue  # the answer has come at this moment
                if seconds_left <= 0 and self.env is None:
                    return None, f"timeout: not made within {create_deadline:g} s"
                if seconds_left <= 0:
                    return None, f"timeout: no answer within {deadline:g} s"
            except EnvError as e:
                return None, f"fault: {e}"
            except (AgentError, ItemError):
                raise
            except Exception as e:  # a world's crash is an env_error of its episode alone
                return None, _crash(e)

    def _run(self):
        while (job := self.inbox.get()) is not None:
            self._do(*job)
        if self.env is not None:
            close_quietly(self.env)

    def _make_env(self) -> Env:
        try:
            return self.make()
        except ValueError as e:  # no such world: the caller's mistake, as an unknown item is
            raise_if_item_unknown(e)
            raise

    def _do(self, future, function, args):
        try:
            if self.env is None:
                env = self._make_env()
                self.made = time.monotonic()
                self.env = env
            future.set_result(function(self.env, *args))
        except Exception as e:  # whoever waits for the future gets it
            future.set_exception(e)
        except SystemExit as e:
            # A world must not end the run. KeyboardInterrupt is not caught: Ctrl-C and SIGTERM may
            # arrive while a world is played in the main thread, and must end the run.
            future.set_exception(RuntimeError(repr(e)))


class EnvPool:
    """Environments by world, made when first needed and reused by `reset`.

    Use it as `with EnvPool(...) as pool:`. The end of the block closes all environments, because a
    server keeps an episode until it is closed.
    """

    def __init__(self, urls: Sequence[str] | dict[str, list[str]] = (),
                 make: Callable[..., Env] = make_env, options: dict[str, dict] | None = None):
        """urls: servers, or world -> its servers. Without any, a world is played in this process.
        options: world -> keyword arguments of its class, for worlds that --env_args may name."""
        self.urls = urls
        self.make = make
        self.options = options or {}
        self.free: dict[str, list[Worker]] = {}
        self.workers: list[Worker] = []  # those in use and the free ones
        self.dropped: list[Worker] = []  # their threads may still run
        # Environments are numbered from the rank on, so that ranks begin with different servers.
        self.next_number = int(os.environ.get("RANK", 0))

    @property
    def on_servers(self) -> bool:
        """Whether any world is played on a server."""
        return any(self.urls.values()) if isinstance(self.urls, dict) else bool(self.urls)

    def take(self, name: str) -> Worker:
        """Return a free worker of the world `name`, or a new one."""
        try:
            return self.free[name].pop()
        except (KeyError, IndexError):  # none is free, or another thread took the last one
            pass
        number = self.next_number
        self.next_number += 1
        worker = Worker(lambda: self._make(name, number))
        # The thread starts with the first call, after the worker is in the list: `close` finds it.
        self.workers.append(worker)
        return worker

    def give_back(self, name: str, worker: Worker) -> None:
        """Make the worker free for the next episode of its world `name`."""
        self.free.setdefault(name, []).append(worker)

    def drop(self, worker: Worker) -> None:
        """Remove a worker that failed. Its environment is closed, unless it hangs. May be called
        again: a stop signal may come before the episode is known to have ended."""
        if worker not in self.workers:
            return
        worker.inbox.put(None)
        self.workers.remove(worker)
        still_running = [w for w in self.dropped if w.thread.is_alive()]
        self.dropped = [*still_running, worker]

    def close(self) -> None:
        """Close every environment, also those still in use. Waits for at most 5 seconds."""
        for worker in self.workers:
            worker.inbox.put(None)
        deadline = time.monotonic() + 5
        for worker in self.workers + self.dropped:
            if worker.thread.ident:  # started
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        self.free = {}
        self.workers = []
        self.dropped = []

    def _make(self, name, number):
        """Make environment `number` (0, 1, ...) of the world `name`.

        Servers take turns. If one fails, its environments are spread over the others, in turns.
        """
        urls = self.urls
        if isinstance(urls, dict):
            urls = urls.get(name)
        if not urls:
            return self.make(name, **self.options.get(name, {}))

        shift, first = divmod(number, len(urls))
        others = urls[:first] + urls[first + 1:]
        fallbacks = [others[(shift + i) % len(others)] for i in range(len(others))]
        for url in [urls[first], *fallbacks]:
            try:
                return self.make(name, url=url, **self.options.get(name, {}))
            except EnvError as e:
                error = e
        raise error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def close_quietly(env: Env) -> None:
    """Close an environment. A fault in its `close` is printed and ends nothing else."""
    try:
        env.close()
    except Exception as e:
        print(f"{type(env).__name__}.close failed: {type(e).__name__}: {e}", file=sys.stderr)


def raise_if_item_unknown(exception: BaseException | None) -> None:
    """Raise ItemError if `exception`, of a reset, means that there is no such item.

    Only a plain ValueError means that. A subclass, as for a page that is not JSON, is a fault of
    the environment. The message names the file and line that raised, as a bug in a world's `reset`
    may be the cause.
    """
    if type(exception) is ValueError:
        place = traceback.extract_tb(exception.__traceback__)[-1]
        raise ItemError(f"{exception} ({Path(place.filename).name}, line {place.lineno})"
                        ) from exception


def _crash(error):
    return f"crash: {type(error).__name__}: {error}"


# ---- the command ----


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError for bad flags, for commands that print one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of printing the usage and exiting."""
        raise ValueError(message)


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__.split("\n\n")[-1] + "\nBoth have a --help of their own.")
        sys.exit(0 if sys.argv[1:] else 2)
    command = sys.argv[1]
    if command not in ("serve", "play"):
        print(f"envs.py: there is no command '{command}'; choose from serve, play", file=sys.stderr)
        sys.exit(2)
    sys.exit(importlib.import_module(f"worlds.{command}").main())
