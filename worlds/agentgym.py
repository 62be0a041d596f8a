"""The client of AgentGym's HTTP protocol: a world on a server, played like one in this process."""

import json
import random
import re
import time
from typing import NamedTuple

import requests
from urllib3.exceptions import HTTPError, NewConnectionError

from envs import Env, EnvError, Step


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
