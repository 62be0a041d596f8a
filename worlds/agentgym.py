"""The client of AgentGym's HTTP protocol: `RemoteEnv` plays a world on a server like a local one.

AgentGym has one server for each world. All of them have the paths /create, /reset and /step, most
of them /close, but the keys in the JSON bodies differ. `PROTOCOLS` lists the differences.

A restarted server counts its episodes from 0 again, and no reply names its episode. So a number is
used only as long as it is known to mean the same episode: see `RemoteEnv._check_episode`.
"""

import json
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import requests
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.util import wait_for_read

from envs import WORLDS, Env, EnvError, Step, UserError, world_class
from worlds.wire import WireSession, read_body

FIRST_RANDOM_NUMBER = 1 << 32  # our server's random numbers of episodes are above, and in no order
NEVER_MATCHES = "(?!)"  # a regular expression


class Protocol(NamedTuple):
    """The bodies of one AgentGym server. The defaults are those of this project's own server."""

    server_name: str = ""  # GET / says "This is environment NAME."; empty: it does not
    base_path: str = ""  # the server's address ends with it: http://host:port/maze
    opening: str = ""  # a regular expression found in every first observation; empty: not known
    # The key of the episode's number in every body. /create replies {id_key: number} or number.
    id_key: str = "id"
    create_body: dict = {}
    item_key: str = "data_idx"  # the key of the item's number in /reset's body
    reset_extras: dict = {}  # the rest of /reset's body
    # The keys of /reset's reply that make the first observation, a line each.
    # Empty: the reply is the observation itself or [observation, null].
    first_observation_keys: tuple[str, ...] = ("observation",)
    # The first observation is what GET /observation replies after /reset.
    first_is_fetched: bool = False
    vocabulary_path: str = ""  # GET replies with the list of allowed words, added to the prompt
    observation_key: str = "observation"  # in /step's reply
    done_keys: tuple[str, ...] = ("done",)  # each of them ends the episode
    # The key in /step's reply of what the episode has achieved so far, from 0 to `max_score`.
    # A step's reward is the increase. Empty: "reward" is already this step's increment.
    score_key: str = ""
    max_score: float = 1.0
    # An episode that ends with this reward (with `score_key`: score / max_score) is a success.
    success_reward: float = 1.0
    # GET /observation gives the first observation at any time, not the last one.
    observation_is_first: bool = False
    # GET /observation replies with other texts than /reset and /step, so the client requests it
    # after each of them.
    observation_differs: bool = False
    # GET /observation fails once the episode has ended, so the client closes the episode then.
    ended_is_unknown: bool = False
    whole_reply: bool = False  # "action" is the agent's whole reply, not the action parsed from it
    has_close: bool = True
    # The start of the observation after an invalid action (a regular expression).
    invalid_pattern: str = NEVER_MATCHES
    # /step's "info" is null after an action that could not be read, else a dictionary with
    # "fail_error", which is empty unless the action failed.
    info_tells_validity: bool = False
    # An observation that says that the environment itself has failed (a regular expression).
    failure_pattern: str = NEVER_MATCHES
    prompt: str = ""  # for worlds that this project does not have


def _tool_server(purpose):
    """The protocol of the five tool servers: "reward" says whether the task is achieved so far."""
    return Protocol(
        id_key="env_idx", create_body={"id": 0}, item_key="id", first_observation_keys=(),
        score_key="reward", observation_differs=True, whole_reply=True, has_close=False,
        prompt=f"Use tools to {purpose}. One call a turn, for example\n"
               "Action: check_valid_actions with Action Input: {}\n"
               "which lists the tools. End with\n"
               'Action: finish with Action Input: {"answer": ...}')


PROTOCOLS = {
    # AgentGym's server replies with the sum of the episode's rewards as the score, and AgentGym's
    # client takes that sum for the reward of every step. Here a step has its own reward. An episode
    # ends only with a reward above 0.5: 1 less a cost for each step.
    "babyai": Protocol(
        server_name="BabyAI", opening="Your goal: ", success_reward=0.5, ended_is_unknown=True,
        invalid_pattern="The action is not recognized|You cannot (?!see)|There is a barrier"),
    "textcraft": Protocol(
        server_name="TextCraft", opening="Goal: craft ",
        create_body={"commands": None, "goal": None},
        invalid_pattern="Could not (?!find enough)|Wrong item format"),
    "sciworld": Protocol(
        server_name="ScienceWorld", opening="Your task is ",
        first_observation_keys=("task_description", "observation"),
        score_key="score", max_score=100.0, ended_is_unknown=True,
        invalid_pattern="No known action|Unknown action",
        prompt="You are in a small world of rooms with things in them, and you have a science task "
               "to carry out.\n"
               "Some actions: look around, look at OBJ, look in OBJ, inventory, open OBJ, close "
               "OBJ, go to PLACE, pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, "
               "dunk OBJ in OBJ, mix OBJ, activate OBJ, deactivate OBJ, use OBJ on OBJ, "
               "connect OBJ to OBJ, disconnect OBJ, read OBJ, eat OBJ, focus on OBJ, wait, wait1.\n"
               "Where a request is ambiguous, answer with the number of what you mean. Focus only "
               "on what the task names: a wrong focus ends it."),
    "searchqa": Protocol(
        server_name="SearchQA", opening="Question: ", id_key="env_idx", create_body={"id": 0},
        item_key="id", first_observation_keys=(), observation_is_first=True, whole_reply=True),
    "webarena": Protocol(
        server_name="WebArena", id_key="env_idx", item_key="idx", reset_extras={"seed": 0},
        first_is_fetched=True, done_keys=("terminated", "truncated"), whole_reply=True,
        info_tells_validity=True,
        # A number alone: the text of the KeyError for an episode unknown to the server.
        failure_pattern=r"TimeoutError$|Error: Env \d+ is dead$|\d+$"),
    "webshop": Protocol(
        id_key="env_idx", item_key="session_id", first_observation_keys=(),
        observation_key="state", has_close=False,
        prompt="Buy what is asked for in a web shop. An action is search[words] where there is a "
               "search bar, or click[button] with a button of the page, such as click[buy now]."),
    "sqlgym": Protocol(
        id_key="env_idx", item_key="item_id", first_observation_keys=(), observation_key="state",
        observation_is_first=True, has_close=False,
        prompt="Answer the question about a SQLite database. "
               "An action is one SQL statement in one line."),
    "alfworld": Protocol(
        server_name="AlfWorld", item_key="game", reset_extras={"world_type": "Text"},
        has_close=False, invalid_pattern="Nothing happen",
        prompt="Do a household task. Every turn, answer with one action, such as go to desk 1, "
               "open drawer 2, take mug 1 from desk 1. The first observation lists the actions "
               "that are available at the start."),
    "maze": Protocol(
        server_name="LMRL-Gym", base_path="maze", item_key="game", has_close=False,
        prompt="Find the way to the goal of a maze. The actions are: move up (the first coordinate "
               "falls), move down, move left (the second one falls), move right."),
    "wordle": Protocol(
        server_name="LMRL-Gym", base_path="wordle", item_key="seed",
        vocabulary_path="filtered_vocab", has_close=False, invalid_pattern="invalid word",
        prompt="Guess a word of five letters in six tries. Write a guess with spaces: s h i r e. "
               "The answer has g for a letter in its place, y for one that is elsewhere in the "
               "word, b for one that is not in it. The words that are allowed:\n"),
    "weather": _tool_server("answer a question about the weather"),
    "todo": _tool_server("manage a list of things to do"),
    "movie": _tool_server("answer a question about films and the people who made them"),
    "sheet": _tool_server("edit a spreadsheet as you are asked"),
    "academia": _tool_server("answer a question about scientific papers and their authors"),
}


class ServerRefused(EnvError):
    """The server answered with {"error": ...}, with a failure in the place of an observation, or
    with a status of 500 or above, however often it was asked."""


class LostEpisode(EnvError):
    """The episode's number may mean another episode by now: nothing is sent with it any more."""


class Server:
    """What this process knows of the episodes on one server.

    `doubts` counts the signs that the server was restarted. After each of them every episode is
    checked before its next request.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.doubts = 0
        self.highest = -1  # the largest number that /create has given since the last restart
        self.closed: set[int] = set()  # the numbers closed by this process since then
        self.live: weakref.WeakValueDictionary[int, RemoteEnv] = weakref.WeakValueDictionary()

    def add(self, number: int, env: "RemoteEnv") -> bool:
        """Note a new episode -> False if its number is that of a live episode of this process.

        A number that is not above all earlier ones, and that was not closed, is a sign of a
        restart.
        """
        with self.lock:
            is_counted = number < FIRST_RANDOM_NUMBER
            if is_counted and number <= self.highest and number not in self.closed:
                self.doubts += 1
                self.highest = -1
                self.closed.clear()
            if is_counted:
                self.highest = max(self.highest, number)
            self.closed.discard(number)
            return self.live.setdefault(number, env) is env


SERVERS: dict[str, Server] = {}  # by address


class RemoteEnv(Env):
    """An environment on an AgentGym server: one episode there, over one connection kept open.

    Whatever is wrong with the server or its replies raises EnvError with the address and the
    reason. An object must be made and used in one thread.
    """

    remote = True
    # The limits are long because a rollout sets shorter deadlines.
    timeout = 300.0  # seconds for one call, all its attempts together
    create_timeout = 3600.0  # the same for /create, where some servers start a process
    tries = 3  # largest number of attempts at a call

    def __init__(self, name: str, url: str):
        """Create an episode of the world `name` on the server. Raises EnvError if that fails, and
        UserError if the world's instructions are in a package that is missing here."""
        self.name = name
        self.protocol = PROTOCOLS.get(name, Protocol())
        world = Env  # its attributes are the defaults of a world that this project does not have
        if name in WORLDS:
            try:
                world = world_class(name)
            except UserError:
                # The world runs on the server, so without its package only its prompt is needed.
                if not self.protocol.prompt:
                    raise
        self.prompt = world.prompt or self.protocol.prompt
        self.stop = world.stop
        # So that a rollout without --set arrival_order=builds the same batches as in this process.
        self.instant = world.instant
        self.whole_reply = world.whole_reply or self.protocol.whole_reply
        self.url = url.rstrip("/")
        self.session = WireSession()
        self.socket = None  # the connection over which the last reply came
        self.server = SERVERS.setdefault(self.url, Server())
        self.doubts = 0  # of `server`, when the episode was last known to be ours
        self.episode_id: int | None = None  # the server's number of the episode
        # The first and the last observation, as the server sent them; empty: not known.
        self.first = ""
        self.last = ""
        self.total = 0.0  # sum of the episode's rewards
        self._create_episode()
        if self.protocol.vocabulary_path:
            words = self._get(self.protocol.vocabulary_path)
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise EnvError(f"{self.url}: no list of words in the reply {words!r:.80}")
            self.prompt += ", ".join(words)

    @staticmethod
    def check(name: str, url: str) -> None:
        """Raise UserError if no server answers at `url` within 10 s, or one that names another
        world. An episode is not created."""
        try:
            # Any answer will do: maze's server has nothing at http://host:port/maze/ itself.
            with WireSession().get(url, timeout=(5, 5), stream=True) as reply:
                # What is there at once: reading a slow body to its end could exceed the limit.
                greeting = reply.raw.read1(1000, decode_content=True).decode(errors="replace")
        except (OSError, HTTPError) as e:
            raise UserError(f"no environment server answers at {url} ({type(e).__name__}); "
                            "start one or drop --env_url") from e
        named = re.search(r"This is environment ([\w-]+)", greeting)
        # A world that AgentGym does not have is served by worlds/serve.py, which names its class.
        own = Protocol(server_name=WORLDS.get(name, "").partition(":")[2])
        protocol = PROTOCOLS.get(name, own)
        if named and named[1] != protocol.server_name:
            raise UserError(f"the server at {url} plays {named[1]}, not {name}")
        if named and protocol.base_path:
            raise UserError(
                f"{name} has an address of its own: {url.rstrip('/')}/{protocol.base_path}/")

    def reset(self, item: int) -> str:
        """Begin the episode of `item` on the server -> the first observation."""
        protocol = self.protocol
        if self.episode_id is None:
            self._create_episode()
        try:
            reply = self._send_reset(item)
        except (ServerRefused, LostEpisode):
            # The server has closed the idle episode, has failed or was restarted: try once with a
            # new episode.
            self._close_episode()
            self._create_episode()
            reply = self._send_reset(item)
        self.total = 0.0
        keys = protocol.first_observation_keys
        if not keys:
            keys = ("observation",)
            if not isinstance(reply, dict):
                reply = {"observation": reply[0] if isinstance(reply, list) and reply else reply}
        observation = self._read_observation(reply, keys)
        self._read(reply, "reward", float, 0.0)  # a reward that is no number is a fault
        if any(self._read(reply, key, bool, False) for key in protocol.done_keys):
            raise EnvError(f"{self.url}: /reset began an episode that has ended: {reply!r:.200}")
        if not re.search(protocol.opening, observation):
            wrong = f"no first observation of {self.name}: {observation!r:.80}"
            raise EnvError(f"{self.url}/reset: {wrong}")
        self.first = self.last = reply[keys[-1]]
        if protocol.observation_differs:
            self.last = self._current_observation()
        actions = reply.get("available_actions")  # alfworld; AgentGym's client shows the first ones
        if isinstance(actions, list):
            observation += f"\nAVAILABLE ACTIONS: {','.join(map(str, actions))}"
        return observation

    def choices(self) -> tuple[list[str], list[str]]:
        """Raises UserError: a server does not list actions, and any would be allowed."""
        raise UserError(f"{self.url} lists no actions, so that an agent cannot choose among them")

    def step(self, action: str) -> Step:
        """Send the action -> the Step that the server's reply means."""
        protocol = self.protocol
        body = {protocol.id_key: self.episode_id, "action": action}
        # The server may have taken the step although its reply was lost: never send it twice.
        reply = self._call("step", body, repeat=False)
        observation = self._read_observation(reply, (protocol.observation_key,))
        self.last = reply[protocol.observation_key]
        done_flags = [self._read(reply, key, bool) for key in protocol.done_keys]
        done = any(done_flags)

        if protocol.score_key:
            achieved = self._read(reply, protocol.score_key, float) / protocol.max_score
            achieved = min(1.0, max(0.0, achieved))
            reward = achieved - self.total
        else:
            # webarena's replies always have a reward. It counts only with "terminated".
            counts = protocol.done_keys == ("done",) or done_flags[0]
            achieved = reward = self._read(reply, "reward", float) if counts else 0.0
        self.total += reward
        looks_valid = not re.match(protocol.invalid_pattern, observation)
        differs = protocol.observation_differs
        if protocol.info_tells_validity:
            info = reply.get("info")
            # After an action that could not be read, /step replies with a message, not the page.
            differs = info is None
            looks_valid = isinstance(info, dict) and not info.get("fail_error")

        # "success", "valid" and "progress" come from this project's server only.
        score = self.total
        if not protocol.score_key:
            score = self._read(reply, "score", float, score)
        succeeded = done and achieved >= protocol.success_reward
        success = self._read(reply, "success", bool, succeeded)
        valid = self._read(reply, "valid", bool, looks_valid)
        known_progress = self.total if protocol.score_key == "score" else 0.0
        progress = self._read(reply, "progress", float, known_progress)
        if done and protocol.ended_is_unknown:
            self._close_episode()
        elif differs:
            self.last = self._current_observation()
        score, progress = (min(1.0, max(0.0, value)) for value in (score, progress))
        return Step(observation, reward, score, done, done and success, valid, progress)

    def close(self) -> None:
        """Close the episode on the server, if it has /close. Never raises; may be called twice."""
        self._close_episode()
        self.session.close()

    # ---- the calls ----

    def _create_episode(self):
        key = self.protocol.id_key
        reply = self._call("create", self.protocol.create_body, timeout=self.create_timeout)
        number = reply.get(key) if isinstance(reply, dict) else reply
        if type(number) is not int:
            raise EnvError(f"{self.url}/create: no {key} in the reply {reply!r:.80}")
        if not self.server.add(number, self):
            raise EnvError(f"{self.url}/create: {number} is the number of another live episode")
        self.episode_id = number
        self.last = ""
        self.doubts = self.server.doubts

    def _get(self, path, timeout=None):
        """GET `path` of this episode -> the JSON of the reply."""
        return self._call(f"{path}?{self.protocol.id_key}={self.episode_id}", None, timeout=timeout)

    def _current_observation(self):
        """The reply to GET /observation; "" (not known) if the request fails or needs a new
        connection."""
        connection = self.socket
        try:
            texts = _texts(self._get("observation"))
        except EnvError:
            texts = []
        return texts[0] if texts and self.socket is connection else ""

    def _send_reset(self, item):
        protocol = self.protocol
        ids = {protocol.item_key: item, protocol.id_key: self.episode_id}
        reply = self._call("reset", {**protocol.reset_extras, **ids})
        if protocol.first_is_fetched:
            (key,) = protocol.first_observation_keys
            self._read_observation(reply, (key,))  # raises ServerRefused
            reply[key] = self._get("observation")
        return reply

    def _close_episode(self):
        """Close the episode on the server, unless the number may be another episode's by now."""
        number = self.episode_id
        if number is not None and self.protocol.has_close:
            try:
                self._call("close", {self.protocol.id_key: number}, timeout=5.0)
                self.server.closed.add(number)
            except EnvError:
                pass  # without its server the episode is gone, too
        self._forget_episode()

    def _forget_episode(self):
        self.server.live.pop(self.episode_id, None)
        self.episode_id = None

    def _check_episode(self, deadline):
        """Raise LostEpisode unless the number still means the episode that this object began.

        The number is valid while replies come over one connection (a restarted server closes all
        of them) and there was no sign of a restart. Otherwise the server is asked for the episode's
        observation, which must be the one that it sent last.
        """
        if self.episode_id is None:
            raise LostEpisode(f"{self.url}: the episode is lost")
        doubts = self.server.doubts
        is_connected = self._is_connected()
        if is_connected and (doubts == self.doubts or not self.last):
            return

        found = []
        try:
            if self.last:
                found = _texts(self._get("observation", timeout=deadline - time.monotonic()))
        except EnvError:
            pass  # the server cannot tell
        known = {self.last}
        if self.protocol.observation_is_first:
            known.add(self.first)
        # /reset and /observation put different things before the same observation.
        if not any(a.endswith(b) or b.endswith(a) for a in found for b in known):
            number = self.episode_id
            self.server.doubts += 1
            self._forget_episode()
            raise LostEpisode(f"{self.url}: episode {number} may be another one by now: the server "
                              "does not give its last observation; was the server restarted?")
        self.doubts = doubts

    def _is_connected(self):
        """Whether the next request goes over the connection of the last reply."""
        if self.socket is None or self.socket.fileno() < 0:
            return False
        return not wait_for_read(self.socket, timeout=0.0)  # readable: the server has closed it

    def _call(self, path, body, repeat=True, timeout=None):
        """POST `body` to `path`, or GET without a body -> the JSON of the reply. Raises EnvError.

        A request that no server got is sent again, up to `tries` attempts. One that the server may
        have handled is sent again only with `repeat`. Whatever goes wrong with an episode is a sign
        of a restart.
        """
        url = f"{self.url}/{path}"
        has_number = path in ("reset", "step", "close")
        deadline = time.monotonic() + (timeout or self.timeout)
        for attempt in range(1, self.tries + 1):
            if has_number:
                self._check_episode(deadline)
                self.last = ""  # not known until there is a reply
            connection = self.socket
            error, status, was_unsent = None, 0, False
            try:
                status, data = self._send(url, body, deadline)
                reason = f"status {status} {data[:200].decode(errors='replace')}"
                may_pass = status >= 500
            except (OSError, ValueError) as e:  # requests' exceptions are OSErrors
                error = e
                reason = f"{type(e).__name__}: {e}"
                may_pass = not isinstance(e, ValueError)  # a ValueError: the address is wrong
                was_unsent = _was_unsent(e)
            if 200 <= status < 300:
                break
            if has_number and may_pass:
                self.server.doubts += 1
            # Random pauses, because all episodes notice a server's restart at the same moment.
            pause = 0.1 * 2**attempt * random.uniform(0.5, 1.5)
            may_repeat = was_unsent or (may_pass and repeat)
            too_late = time.monotonic() + pause > deadline
            if attempt == self.tries or not may_repeat or too_late:
                kind = ServerRefused if status >= 500 else EnvError
                raise kind(f"{url}: {reason[:300]}") from error
            time.sleep(pause)
        if path == "step" and self.socket is not connection:
            # The connection was closed after the check, and the library opened another one.
            self._forget_episode()
            raise LostEpisode(f"{url}: the connection was lost; was the server restarted?")
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise EnvError(f"{url}: no JSON: {data[:80]!r}") from e
        if isinstance(reply, dict) and "error" in reply:
            self.server.doubts += has_number
            raise ServerRefused(f"{url}: {reply['error']}")
        return reply

    def _send(self, url, body, deadline):
        """One attempt -> (status, bytes of the reply or else the address of a redirect). Raises
        OSError, and EnvError for a reply that is too large."""
        seconds_left = max(0.01, deadline - time.monotonic())
        timeouts = (min(5.0, seconds_left), seconds_left)  # to connect, between two reads
        method = "GET" if body is None else "POST"
        with self.session.request(method, url, json=body, timeout=timeouts, stream=True) as reply:
            self.socket = getattr(reply.raw.connection, "sock", None)
            data = read_body(reply, url)
            return reply.status_code, data or reply.headers.get("Location", "").encode()

    # ---- the replies ----

    def _read(self, reply, key, kind, default=None):
        """reply[key] as `kind`: str, bool or float. Raises EnvError if it is of another kind, or if
        it is missing and there is no default."""
        if default is not None and key not in reply:
            return default
        value = reply.get(key) if isinstance(reply, dict) else None
        if kind is bool:
            good = value in (False, True)  # 0 and 1 are accepted
        elif kind is float:
            # nan and inf are no rewards: the comparison is False for them.
            good = isinstance(value, (int, float)) and abs(value) < 1e9
        else:
            good = isinstance(value, str)
        if not good:
            wanted = f"'{key}' should be a {kind.__name__}"
            raise EnvError(f"{self.url}: {wanted} in the reply {reply!r:.200}")
        return kind(value)

    def _read_observation(self, reply, keys):
        """The texts of `keys`, a line each. Raises ServerRefused for one that says that the
        environment has failed."""
        text = "\n".join(self._read(reply, key, str) for key in keys)
        if re.match(self.protocol.failure_pattern, text):
            raise ServerRefused(f"{self.url}: {text} in the place of an observation")
        return text


def _texts(reply):
    """The texts that are not empty in a reply, or in the values of one."""
    values = reply.values() if isinstance(reply, dict) else reply
    values = values if isinstance(reply, (dict, list)) else [reply]
    return [value for value in values if isinstance(value, str) and value]


def _was_unsent(error):
    """Whether no server got the request: there was no connection."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    # requests wraps urllib3's MaxRetryError, whose `reason` is the cause.
    wrapped = error.args[0] if error.args else None
    return isinstance(getattr(wrapped, "reason", None), NewConnectionError)



# ---- which action of a reply is taken ----

# How AgentGym's clients choose it (agentenv/envs/*.py at 3ef9235). They read react, and JSON and
# code in forms that differ from ours. Here each client's choice applies to every format. Arguments:
# the reply, the actions in it, and the reply itself where react finds none in it, else "".


def _only_words(_reply, actions, _bare):
    """The first line of the only action, without punctuation other than commas."""
    first_line = actions[0].partition("\n")[0] if len(actions) == 1 else ""
    return " ".join(re.sub("[^A-Za-z0-9, ]", "", first_line).split())


def _last(_reply, actions, _bare):
    return actions[-1] if actions else ""


def _first_or_bare(_reply, actions, bare):
    return actions[0] if actions else bare


def _last_or_bare_call(reply, actions, bare):
    """The last action; without any, the whole reply if it has a search or a click."""
    has_call = "search[" in reply or "click[" in reply
    return actions[-1] if actions else bare * has_call


def _sql(reply, actions, bare):
    """The last block of SQL between code fences; without any, the last action or the reply."""
    text = actions[-1] if actions else bare
    if "```sql" in reply:
        text = reply.split("```sql")[-1]
    return text.split("```")[0].strip()


LENIENT: dict[str, Callable[[str, list[str], str], str]] = {  # world -> the choice
    "babyai": _only_words,
    "textcraft": _only_words,
    "sciworld": _last,
    "alfworld": _last,
    "webshop": _last_or_bare_call,
    "sqlgym": _sql,
    "maze": _first_or_bare,
    "wordle": _first_or_bare,
}


# ---- AgentGym's trajectories ----


def read_conversation(entry: dict) -> tuple[list[dict[str, str]], list[bool], float, bool]:
    """An entry of AgentTraj-L, {"item_id", "conversations": [{"from", "value", "loss"}, ...]}, or
    {"item_id", "messages": [{"role", "content", "loss"}, ...]}, whose first three messages are the
    instructions, a fixed reply and the first observation -> its messages, which of them are learnt,
    its reward and whether it is a success.

    loss: whether a reply is learnt: true (the default), false, 1, 0 or null. An entry may have a
    "reward" and "success"; without them it counts as a success. Raises ValueError for any other
    field, and for messages that are not the user's and the model's in turns.
    """
    parts = entry["conversations"] if "conversations" in entry else entry["messages"]
    unknown = entry.keys() - {"item_id", "conversations", "messages", "reward", "success"}
    unknown |= {name for part in parts for name in part} - {"from", "value", "role", "content",
                                                            "loss"}
    roles = [{"human": "user", "gpt": "assistant"}.get(role, role)
             for role in (part.get("from", part.get("role")) for part in parts)]
    texts = [part.get("value", part.get("content")) for part in parts]
    learnt = [part.get("loss") in (None, True) for part in parts]
    reward = entry.get("reward", 1.0)
    success = entry.get("success", reward > 0)
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2):
        raise ValueError(f"the roles do not take turns: {', '.join(map(str, roles))}")
    if not all(isinstance(text, str) for text in texts) or not isinstance(success, bool) or not all(
            part.get("loss") in (None, True, False) for part in parts):
        raise ValueError("a value is no text, or loss or success is neither true nor false")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return messages, learnt, float(reward), success
