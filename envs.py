"""Environments: the `Env` protocol, the registry of worlds, item ids, and a pool of environments.

A world is a text game. An environment plays one episode of a world at a time: `reset(item)` starts
the episode of item number `item` and returns the first observation; `step(action)` takes one
action. The same item number gives the same episode on every machine.

To add a world, write `worlds/NAME.py` with a subclass of `Env` and add one line to `WORLDS`
(docs/own_world.md has a complete example).

    python envs.py serve --env babyai --port 36001   # serve a world in AgentGym's HTTP protocol
    python envs.py play --env textcraft --item 3     # play a world in the terminal
"""

import argparse
import difflib
import functools
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
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

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
        # A world may return NumPy scalars, which the json module cannot write. The sum raises
        # TypeError for a text in the place of a number, because bool("no") is True, and for None.
        for name, kind in Step.__annotations__.items():
            setattr(self, name, kind(kind() + getattr(self, name)))


class Env:
    """A world that plays one episode at a time and is reused by `reset`.

    Failures of the environment raise `EnvError`, an unknown item raises `ItemError`.
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

    def choices(self) -> tuple[list[str], list[str]]:
        """What an agent that chooses is offered -> (actions, beginnings of actions that cannot be
        listed, such as typed text). Two empty lists: any action."""
        return self.valid_actions(), []

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
# World -> the client that plays it on a server, "module:class". It is made with the world's name,
# the server's address and the arguments in --env_args.
CLIENTS = dict.fromkeys([*WORLDS, "webshop", "sqlgym", "alfworld", "maze", "wordle", "weather",
                         "todo", "movie", "sheet", "academia"], "worlds.agentgym:RemoteEnv")
CLIENTS["openenv"] = "worlds.openenv:OpenEnv"  # plays whatever world the server has
# What is not part of a plain install has an extra of its own name.
EXTRAS = {*CLIENTS, "serve"} - {"babyai", "textcraft"}
_loading = threading.RLock()


def load_named(name: str, table: dict[str, str], kind: str) -> Any:
    """The object that a name stands for: a key of `table` (name -> "module:attribute"), a
    "module:attribute" or "FILE.py:attribute", or NAME of a file ideas/NAME.py, for its `kind`.

    kind: "agent", "advantage", "loss" ...: also the word in the error message. Raises UserError
    if there is no such object. Exceptions of the module's own code pass.
    """
    path = table.get(name, name if ":" in name else f"ideas.{name}:{kind}")
    where, _, attribute = path.rpartition(":")
    file, module = Path(where).resolve(), None
    try:
        if file.suffix == ".py" and file.is_file():
            with _loading:
                module = _load_file(file)
        elif not where.startswith("."):
            module = importlib.import_module(where)
    except ModuleNotFoundError as e:
        if not f"{where}.".startswith(f"{e.name}."):  # a package that the module needs
            raise _missing_package(name, e) from e
    if not hasattr(module, attribute):
        choices = [*table, "the name of a file in ideas/, FILE.py:NAME or module:NAME"]
        raise UserError(f"there is no {kind} '{name}': write {', '.join(choices)}")
    return getattr(module, attribute)


@functools.cache
def _load_file(path: Path) -> Any:
    """The module that a file is."""
    spec = importlib.util.spec_from_file_location(f"file:{path}", path)
    # Dataclasses look in sys.modules.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _missing_package(name, error):
    """The UserError that says how to install what the world or the command `name` needs."""
    install = f'-e ".[{name}]"' if name in EXTRAS else error.name
    return UserError(f"{name} needs the package '{error.name}': pip install {install}")


def read_settings(text: str, flag: str) -> dict[str, Any]:
    """NAME=VALUE pairs, or a JSON object, as a dict. Raises UserError for what cannot be read.

    >>> read_settings("enable_thinking=false reasoning_effort=low keep=2", "--chat_args")
    {'enable_thinking': False, 'reasoning_effort': 'low', 'keep': 2}
    >>> read_settings("command='python a.py {url}'", "--agent_args")
    {'command': 'python a.py {url}'}
    >>> read_settings('{"enable_thinking": false}', "--chat_args")
    {'enable_thinking': False}
    """
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        pairs = [part.split("=", 1) for part in shlex.split(text)]
        return {name: _read_value(value) for name, value in pairs}
    except (ValueError, RecursionError) as e:
        raise UserError(f"{flag} '{text}' is no list of NAME=VALUE and no JSON object: {e}") from e


def _read_value(text):
    """The value of a JSON text, of True and False, too; any other text is a value itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


def with_settings(function: Callable, settings: dict, name: str, first: int = 1) -> Callable:
    """A function, whose attributes stay, with settings for its parameters after the `first` ones. A
    text is read as JSON where the setting's default is no text. Raises UserError for a setting that
    is missing, unknown or not of the type of its default."""
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * first, **settings)
    except TypeError as e:
        raise UserError(f"{name}{signature}: {e}") from e
    checked = {}
    for key, value in settings.items():
        kind = type(signature.parameters[key].default)
        checked[key] = _read_value(value) if isinstance(value, str) and kind is not str else value
        allowed = (float, int) if kind is float else (kind,)
        if kind in (bool, int, float, str) and type(checked[key]) not in allowed:
            raise UserError(f"{name}: {key} is {kind.__name__}, not {value!r}")
    return functools.update_wrapper(functools.partial(function, **checked), function)


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


def flag(default: Any, choices: Container | None = None, **marks: bool) -> Any:
    """A field of a dataclass of settings that is a flag of a command. The comment above it is its
    line of --help. A field without it is no flag.

    choices: a table names the usual values and allows others. marks: study=True if the field is set
    by --set FIELD=VALUE; may_change=True if --resume accepts another value than the run's;
    first=True if --help shows it before the others.
    """
    return field(default=default, metadata={"choices": choices} | marks)


def load_function(name: str | Callable, table: dict, kind: str, settings: str) -> Callable:
    """The agent, advantage or loss (`kind`) that `name` stands for, or the function `name` itself,
    with settings "NAME=VALUE ...". Raises UserError: see `load_named`, `read_settings` and
    `with_settings`."""
    label = f"{kind} {getattr(name, '__name__', name)}"
    function = load_named(name, table, kind) if isinstance(name, str) else name
    return with_settings(function, read_settings(settings, f"settings of {label}"), label)


def make_env(name: str, url: str | None = None, **kw: Any) -> Env:
    """Make the world `name`, with the arguments `kw`: in this process, or on the server at `url`.

    Raises UserError for an unknown name, an unknown argument or a missing package, and EnvError if
    the server fails.
    """
    address = (name, url) if url else ()
    try:
        return with_settings(world_class(name, url), kw, name, len(address))(*address)
    except ModuleNotFoundError as e:  # some worlds import their packages when they are made
        raise _missing_package(name, e) from e


def check_env(name: str, urls: Sequence[str] = (), **kw: Any) -> None:
    """Raise UserError unless the world `name` can be played.

    Without `urls` the world is made once in this process, with the arguments `kw`. Otherwise each
    server gets one request and at most 10 s.
    """
    try:
        if not urls:
            make_env(name, **kw).close()
        for url in urls:
            client = world_class(name, url)
            check = getattr(client, "check", client)  # else making the client is the check
            with_settings(check, kw, f"{name} on a server", 2)(name, url)
    except (EnvError, OSError) as e:
        raise UserError(str(e)) from e


def world_class(name: str, url: str | Sequence[str] | None = None) -> type[Env]:
    """The class of the world `name`, with `url` that of its client. Raises UserError for an unknown
    name, and if a package that the class needs is missing."""
    known, where = (CLIENTS, "on a server") if url else (WORLDS, "without --env_url")
    if name not in known:
        close = "".join(f"did you mean {word}? " for word in difflib.get_close_matches(name, known))
        raise UserError(f"there is no world '{name}' {where}: {close}choose from "
                        f"{', '.join(known)}")
    return load_named(name, known, "world")


def env_options(env_args: str, names: Collection[str]) -> dict[str, dict[str, str]]:
    """World -> its keyword arguments in --env_args, as text; `make_env` knows their types.

    names: the worlds that may have arguments. Raises ValueError for what cannot be read.

    >>> env_options("searchqa.topk=5 searchqa.corpus=wiki.jsonl", ["searchqa"])
    {'searchqa': {'topk': '5', 'corpus': 'wiki.jsonl'}}
    """
    options = defaultdict(dict)
    for part in env_args.split():
        match = re.fullmatch(r"(\w+)\.([a-z]\w*)=(.*)", part)
        if not match or match[1] not in names:
            raise UserError(f"cannot read --env_args '{part}'; write {[*names][0]}.NAME=VALUE")
        options[match[1]][match[2]] = match[3]
    return dict(options)


# ---- items: the episodes that are trained on, and those that are held out ----

DATA = Path(__file__).parent / "data"
# AgentGym's item sets of maze and wordle have this before their names: "lmrlgym_maze_3".
PREFIX = "lmrlgym_"


def items(env: str, split: str, data: str | Path | None = None) -> list[str]:
    """Item ids such as "babyai_17" of the split "train" or "test".

    data: a folder in the layout of AgentGym-RL-Data-ID (default: this project's item sets).
    Raises UserError for a file that is missing, damaged or empty.
    """
    return _read_items(_item_file(env, split, data), env)


def held_out(env: str, count: int, data: str | Path | None = None) -> list[str]:
    """At most `count` items of the split "test", drawn at random, always the same ones."""
    names = items(env, "test", data)
    return random.Random(0).sample(names, min(count, len(names)))


def categories(env: str, data: str | Path | None = None) -> dict[str, str]:
    """Test item -> category. Each file beside the test file lists the items of one category."""
    test_file = _item_file(env, "test", data)
    return {name: path.stem for path in sorted(test_file.parent.glob("*.json"))
            if path != test_file for name in _read_items(path, env)}


def split_item(item: str) -> tuple[str, int]:
    """"babyai_17" -> ("babyai", 17), "lmrlgym_maze_3" -> ("maze", 3). Raises UserError for
    anything else."""
    match = re.fullmatch(rf"(?:{PREFIX})?(\w+?)_(0|[1-9][0-9]*)", item)
    if not match:
        raise UserError(f"'{item:.80}' is not an item id; write it like babyai_17")
    return match[1], int(match[2])


def _item_file(env, split, data):
    layout = {"train": "AgentItemId/{0}_train.json", "test": "AgentEval/{0}/{0}_test.json"}[split]
    # The files of maze and wordle may have AgentGym's names or ours.
    theirs, ours = (Path(data or DATA) / layout.format(name) for name in (PREFIX + env, env))
    return theirs if theirs.exists() else ours


def _read_items(path, env):
    try:
        names = [entry["item_id"] for entry in json.loads(path.read_text("utf-8"))]
        if {split_item(name)[0] for name in names} != {env}:
            raise ValueError("it holds no items, or another world's")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f'{path} is not a list of {{"item_id": "{env}_17"}}: {e}') from e
    return list(dict.fromkeys(names))  # some of AgentGym's files list an item twice


# ---- environments in threads ----


failures: list[BaseException] = []  # of environments in this process


class Worker:
    """An environment in a daemon thread of its own, so that a slow one delays no other.

    The environment is made in the thread, with the first call. A worker that misses its deadline
    is abandoned: Python cannot end a thread that hangs.
    """

    def __init__(self, make: Callable[[], Env]):
        self.make = make
        self.env: Env | None = None
        # When the last call began, or when the environment was made if that is later.
        self.began = 0.0
        self.inbox = queue.SimpleQueue()  # jobs; None ends the thread
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., Any], *args: object, here: bool = False) -> Future:
        """Call function(environment, *args) in the environment's thread -> a Future.

        here: call it at once, in the caller's thread. The environment's thread must be idle.
        """
        future = Future()
        self.began = time.monotonic()
        if here:
            self._do(future, function, args)
        else:
            self.inbox.put((future, function, args))
        return future

    def late(self, deadline: float, create_deadline: float) -> str:
        """Say that the last call has missed its deadline; "": it may go on. It may take
        `create_deadline` seconds while the environment is being made, then `deadline` seconds."""
        limit, what = (create_deadline, "not made") if self.env is None else (deadline, "no answer")
        is_late = time.monotonic() >= self.began + limit
        return f"timeout: {what} within {limit:g} s" if is_late else ""

    def failure(self, future: Future, deadline: float, create_deadline: float) -> str:
        """Wait for the last call -> what went wrong in it, or "". AgentError and UserError pass:
        they are no faults of the environment."""
        while not future.done():
            if late := self.late(deadline, create_deadline):
                return late
            # In slices, because the limit moves when the environment has been made.
            wait([future], timeout=0.05)
        if (error := future.exception()) is None:
            return ""
        if isinstance(error, (AgentError, UserError)):
            raise error
        # A world's crash is an env_error of its episode alone.
        kind = "fault" if isinstance(error, EnvError) else f"crash: {type(error).__name__}"
        if not failures:  # it may be a bug of the world: show the first one
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f"warning: an episode failed, {kind}: {error} ({place.filename}, line "
                  f"{place.lineno}); see env_error in the metrics", file=sys.stderr)
        failures.append(error)
        return f"{kind}: {error}"

    def _run(self):
        while (job := self.inbox.get()) is not None:
            self._do(*job)
        if self.env is not None:
            close_quietly(self.env)

    def _do(self, future, function, args):
        try:
            if self.env is None:
                env = self.make()
                self.began = time.monotonic()
                self.env = env
            future.set_result(function(self.env, *args))
        except (Exception, SystemExit) as e:  # whoever waits for the future gets it
            # KeyboardInterrupt is not caught: Ctrl-C and SIGTERM may arrive while a world is played
            # in the main thread, and must end the run.
            future.set_exception(e)


class EnvPool(AbstractContextManager):
    """Environments by world, made when first needed and reused by `reset`.

    Use it as `with EnvPool(...) as pool:`. The end of the block closes all environments, because a
    server keeps an episode until it is closed.
    """

    def __init__(self, urls: dict[str, list[str]] | None = None,
                 make: Callable[..., Env] = make_env, options: dict[str, dict] | None = None):
        """urls: world -> its servers. Without any, it is played in this process. options: world ->
        keyword arguments of its class, for worlds that --env_args may name."""
        self.urls = urls or {}
        self.make = make
        self.options = options or {}
        self.free: defaultdict[str, list[Worker]] = defaultdict(list)
        self.workers: list[Worker] = []  # all whose threads may still run
        # Environments are numbered from the rank on, so that ranks begin with different servers.
        self.next_number = int(os.environ.get("RANK", 0))

    def take(self, name: str) -> Worker:
        """Return a free worker of the world `name`, or a new one."""
        with suppress(IndexError):  # none is free
            return self.free[name].pop()
        worker = Worker(functools.partial(self._make, name, self.next_number))
        self.next_number += 1
        self.workers.append(worker)
        return worker

    def give_back(self, name: str, worker: Worker) -> None:
        """Make the worker free for the next episode of its world `name`."""
        self.free[name].append(worker)

    def drop(self, worker: Worker) -> None:
        """Leave a worker that failed. Its environment is closed, unless it hangs."""
        worker.inbox.put(None)
        self.workers = [other for other in self.workers if other.thread.is_alive()]

    def close(self, *_: object) -> None:
        """Close every environment, also those still in use. Waits for at most 5 seconds."""
        for worker in self.workers:
            worker.inbox.put(None)
        deadline = time.monotonic() + 5
        for worker in self.workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))

    __exit__ = close

    def _make(self, name, number):
        """Make environment `number` (0, 1, ...) of the world `name`.

        Servers take turns. If one fails, its environments are spread over the others, in turns.
        """
        urls, options = self.urls.get(name), self.options.get(name, {})
        if not urls:
            return self.make(name, **options)
        turn, first = divmod(number, len(urls))
        others = deque(urls[:first] + urls[first + 1:])
        others.rotate(-turn)
        for url in [urls[first], *others]:
            try:
                return self.make(name, url=url, **options)
            except EnvError as e:
                error = e
        raise error


def close_quietly(env: Env) -> None:
    """Close an environment. A fault in its `close` is printed and ends nothing else."""
    try:
        env.close()
    except Exception as e:
        print(f"{type(env).__name__}.close failed: {type(e).__name__}: {e}", file=sys.stderr)


# ---- the command ----


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError for bad flags, for commands that print one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of printing the usage and exiting."""
        for word in re.findall(r"--(?:set )?\w+", message.partition("unrecognized")[2]):
            for known in difflib.get_close_matches(word, self._option_string_actions, 1):
                message += f"; did you mean {known}?"
        raise ValueError(message)


if __name__ == "__main__":
    command = sys.argv[1] if sys.argv[1:2] in (["serve"], ["new"]) else "play"
    try:
        sys.exit(load_named(command, {command: f"worlds.{command}:main"}, "command")())
    except UserError as e:
        print(f"envs.py: {e}", file=sys.stderr)
        sys.exit(2)
