"""OpenEnv's protocol: `OpenEnv` plays on any of its servers, `build_app` makes one.

    python eval.py --env openenv --env_url http://host:port --env_args openenv.action=message
    python envs.py serve --env babyai --protocol openenv --port 8000

An episode is a WebSocket at /ws. Every message is JSON: {"type": "reset", "data": {"seed": 17}},
{"type": "step", "data": ACTION}, {"type": "state"} or {"type": "close"}. The replies are {"type":
"observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}, {"type": "state",
"data": {...}} and {"type": "error", "data": {"message": ..., "code": ...}}. GET /schema has the
JSON schemas of ACTION and of the observation, /metadata a name and a description.

No reply says which message it answers. So the client sends {"type": "state"} behind each reset and
step, if the server answers it: a message too many is found where the state should be.

Source: meta-pytorch/OpenEnv at 685de41 (2026-05-01), src/openenv/core: env_client.py,
env_server/types.py, http_server.py; and the package openenv 0.10.0 (2026-10-22).
"""

import functools
import json
import random
import re
import sys
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync import client
from websockets.sync.client import ClientConnection, connect

from envs import Env, EnvError, Step, UserError, items, split_item
from worlds.wire import LARGEST_REPLY, WireSession, read_body

# Of an observation these are for the trainer, not for the agent.
NOT_SHOWN = ("metadata", "reward", "done")
STEP_FIELDS = ("score", "success", "valid", "progress")  # in the metadata of our own server
SLOT = '"$"'  # in a template of an action, a JSON text: the place of the agent's text
ASK_STATE = json.dumps({"type": "state"})
client.MAX_REDIRECTS = 1  # connections tried: a server must not choose who gets a request
STARTS = defaultdict(dict)  # address -> how the first two items that were played there begin


# ---- the client ----


class InvalidAction(EnvError):
    """The text is no action, or the server answers it with an error. The episode goes on."""


class Disconnected(EnvError):
    """The connection is lost, or was never made."""


class OpenEnv(Env):
    """An environment on an OpenEnv server: one WebSocket, connected by the first `reset`.

    Whatever is wrong with the server or its replies raises EnvError with the address and the
    reason. An action that the server answers with an error is an invalid action.
    """

    remote = True

    def __init__(self, name: str, url: str, action: Any = None, observation: str = "",
                 prompt: str = "", success: float = 1.0, reset: Any = None,
                 whole_reply: bool = False, timeout: float = 300.0):
        """Read the server's description. Raises EnvError if there is none, and UserError for
        arguments that do not fit it.

        name: "openenv". url: http://host:port or ws://host:port.
        action: how the agent's text becomes an action: the name of a field, found from the server's
            schema if there is only one; an object with "$" in the text's place, such as
            {"type":"call_tool","tool_name":"guess","arguments":{"word":"$"}}; or "json": the agent
            itself writes the object.
        observation: the fields of the observation that the agent sees: "prompt,messages.content"
            (the content of every message). Empty: all, one a line.
        prompt: the instructions, or FILE.txt or FILE.md; empty: the server's own.
        success: an episode that ends with this reward is a success.
        reset: an object: what /ws's reset gets besides the seed.
        whole_reply: send the agent's whole reply, not the parsed action.
        timeout: seconds for one reply; a rollout's own deadline is shorter.
        """
        self.url = re.sub("^ws", "http", url).rstrip("/")
        schema, description = describe(self.url)
        self.paths = [path for path in observation.split(",") if path]
        try:
            self.template, self.kinds = self._read_action(action, schema.get("action", {}))
            known = list(schema.get("observation", {}).get("properties", {}))
        except (AttributeError, TypeError) as e:
            raise EnvError(f"{self.url}/schema has no JSON schemas: {e}") from e
        if known and not {path.split(".")[0] for path in self.paths} <= {*known}:
            raise UserError(f"{name}.observation={observation}: the observations of {self.url} "
                            f"have the fields {', '.join(known)}")
        is_file = " " not in prompt and prompt.endswith((".txt", ".md"))
        self.prompt = Path(prompt).read_text("utf-8") if is_file else prompt or description
        self.success = success
        self.reset_extras = reset or {}
        self.whole_reply = whole_reply
        self.timeout = timeout
        self.connection = ExitStack()  # its end closes the socket
        self.socket = None
        self.asks_state = False
        self.state: dict = {}  # the episode's, as the server tells it
        self.total = 0.0  # sum of the episode's rewards

    def reset(self, item: int) -> str:
        """Begin the episode with the seed `item` -> the first observation."""
        message = self.reset_extras | {"seed": item}
        try:
            text, _, done, _ = self._ask("reset", message)
        except Disconnected:
            # The connection of the last episode may have been closed since: open it again, once.
            text, _, done, _ = self._ask("reset", message)
        if done:
            raise EnvError(f"{self.url}: reset began an episode that has ended")
        self.total = 0.0
        starts = STARTS[self.url]
        if len(starts) < 2 and item not in starts:
            starts[item] = text, self.state | {"episode_id": None}
            if list(starts.values()) == [starts[item]] * 2:
                print(f"warning: {self.url} begins items {' and '.join(map(str, starts))} alike: "
                      "if it ignores the seed, all items are one episode", file=sys.stderr)
        return text

    def step(self, action: str) -> Step:
        """Send the action -> the Step that the server's reply means."""
        if self.socket is None:
            raise EnvError(f"{self.url}: step without a connection")
        try:
            text, reward, done, metadata = self._ask("step", self._action(action))
        except InvalidAction as e:
            return Step(str(e), score=min(1.0, max(0.0, self.total)), valid=False)
        self.total += reward
        told = {"score": min(1.0, max(0.0, self.total)), "success": done and reward >= self.success}
        if metadata.keys() == set(STEP_FIELDS):  # from our own server: the protocol lacks them
            told = metadata | {"success": done and metadata["success"]}
        return Step(text, reward, done=done, **told)

    def close(self) -> None:
        """End the connection, and with it the episode. Never raises; may be called twice."""
        if self.socket is not None:
            with suppress(WebSocketException, OSError):  # then the episode is gone, too
                self.socket.send('{"type": "close"}')
            with suppress(WebSocketException, OSError):
                self.connection.close()
        self.socket = None

    def _read_action(self, action, schema):
        """-> (the server's action as a JSON text with "$" in the place of the agent's text, the
        JSON types that this place may have)."""
        if action == "json":
            return SLOT, {"object"}
        if isinstance(action, dict) and SLOT in json.dumps(action):
            return json.dumps(action), {"string"}
        fields = schema.get("properties", {})
        names = [name for name in schema.get("required") or fields if name not in NOT_SHOWN]
        names = names if action is None else [action]
        if len(names) != 1 or (fields and names[0] not in list(fields)):
            raise UserError(f"an action of {self.url} has the fields {', '.join(fields)}: "
                            f"give openenv.action=FIELD, or an object with {SLOT} in the place of "
                            "the agent's text")
        field = fields.get(names[0], {})
        kinds = [kind.get("type") for kind in field.get("anyOf", [field])]
        kinds = {part for kind in kinds for part in (kind if isinstance(kind, list) else [kind])}
        return json.dumps({names[0]: "$"}), kinds

    def _action(self, text):
        """The agent's text as the server's action. Raises InvalidAction."""
        value = text
        if self.kinds & {"integer", "number", "boolean", "array", "object"}:
            try:
                value = json.loads(text)
                # Python reads NaN, Infinity and 1e999, too, which no JSON text can hold.
                json.dumps(value, allow_nan=False)
            except (ValueError, RecursionError) as e:
                if "string" not in self.kinds:
                    raise InvalidAction(f"The action cannot be read: {e}") from e
                value = text
        if self.template == SLOT and not isinstance(value, dict):
            raise InvalidAction("The action cannot be read: it is no JSON object")
        return json.loads(self.template.replace(SLOT, json.dumps(value)))

    def _ask(self, kind, data):
        """Send a message -> (text of the observation, reward, done, metadata). Raises EnvError.

        After a failure the connection is closed: a late reply must not answer the next message.
        """
        try:
            if self.socket is None:
                # First: a server may have room for one connection only.
                self.asks_state = tells_state(self.url)
                self.socket = self.connection.enter_context(connection_to(self.url))
            else:
                with suppress(TimeoutError):  # no message is waiting, as it should be
                    raise ValueError(f"a message too many: {self.socket.recv(timeout=0)!r:.80}")
            with suppress(ConnectionClosed):  # a server that has no room says so before it closes
                self.socket.send(json.dumps({"type": kind, "data": data}))
                if self.asks_state:
                    self.socket.send(ASK_STATE)
            reply = json.loads(self.socket.recv(timeout=self.timeout))
            with suppress(ConnectionClosed):
                if self.asks_state:
                    self._take_state(json.loads(self.socket.recv(timeout=self.timeout)))
            return self._read(kind, reply)
        except InvalidAction:
            raise
        except Exception as e:  # the reply may be malformed in any way
            self.close()
            is_lost = isinstance(e, (WebSocketException, OSError))
            error = Disconnected if is_lost and not isinstance(e, TimeoutError) else EnvError
            raise error(f"{self.url}: {kind}: {type(e).__name__}: {e}") from e

    def _take_state(self, reply):
        if reply["type"] not in ("state", "error"):
            raise ValueError(f"a message too many: {reply!r:.80}")
        self.state = dict(reply["data"])

    def _read(self, kind, reply):
        data = reply["data"]
        if reply["type"] == "error":
            code = data.get("code")
            text = f"{data.get('message')} ({code}) {data.get('errors', '')}"[:500]
            # The connection goes on, so an error in answer to an action is the action's.
            if code == "VALIDATION_ERROR" or kind == "step" and code == "EXECUTION_ERROR":
                raise InvalidAction(text)
            raise EnvError(f"{text}; lower --slots" if code == "CAPACITY_REACHED" else text)
        observation = data["observation"]
        reward = 0.0 if data.get("reward") is None else data["reward"]  # null: none here
        is_number = isinstance(reward, (int, float)) and abs(reward) < 1e9  # no nan, no inf
        if (reply["type"] != "observation" or not isinstance(observation, dict) or not is_number
                or type(data["done"]) is not bool):
            raise ValueError(f"no observation, reward and done in {reply!r:.200}")
        metadata = observation.get("metadata") or data.get("metadata") or {}
        if metadata.keys() == set(STEP_FIELDS) and not (  # a TypeError: no number
                0 <= metadata["score"] <= 1 and 0 <= metadata["progress"] <= 1
                and {type(metadata["success"]), type(metadata["valid"])} == {bool}):
            raise ValueError(f"no score, success, valid and progress in {metadata!r:.200}")
        return text_of(observation, self.paths), float(reward), data["done"], metadata


def connection_to(url: str) -> ClientConnection:
    """A new connection to a server, without pings: the deadlines are those of the replies."""
    return connect(re.sub("^http", "ws", url) + "/ws", open_timeout=10, close_timeout=2,
                   max_size=LARGEST_REPLY, ping_interval=None)


@functools.lru_cache
def tells_state(url: str) -> bool:
    """Whether a server answers {"type": "state"}. OpenEnv's servers do, a smaller one may break the
    connection off: it is asked once, over a connection of its own."""
    with suppress(OSError, ValueError, LookupError, TypeError, WebSocketException):
        with connection_to(url) as socket:
            socket.send(ASK_STATE)
            return json.loads(socket.recv(timeout=10))["type"] in ("state", "error")
    return False


@functools.lru_cache
def describe(url: str) -> tuple[dict, str]:
    """Ask a server for its schemas and its description -> (schemas, text), empty for what it does
    not have. Raises EnvError if there is no server, within about 10 s. url: http://..."""
    try:
        replies = [WireSession().get(f"{url}/{path}", timeout=5, stream=True)
                   for path in ("schema", "metadata")]
        schema, metadata = (json.loads(read_body(reply, url)) if reply.ok else {}
                            for reply in replies)
        return schema, str(metadata.get("description") or "")
    # requests' exceptions are OSErrors; an AttributeError: a reply is no object.
    except (OSError, ValueError, RecursionError, AttributeError) as e:
        raise EnvError(f"no OpenEnv server answers at {url} ({type(e).__name__}); "
                       "start one or drop --env_url") from e


def text_of(observation: dict, paths: list[str]) -> str:
    """What the agent reads of an observation: the fields `paths`, or all, one a line.

    >>> text_of({"text": "a wall", "reward": 0, "metadata": {}}, [])
    'a wall'
    >>> text_of({"x": 1, "log": [{"say": "hi"}, {"say": "ho"}]}, [])
    'x: 1\\nlog: [{"say": "hi"}, {"say": "ho"}]'
    >>> text_of({"x": 1, "log": [{"say": "hi"}, {"say": "ho"}]}, ["log.say"])
    'hi\\nho'
    """
    if paths:
        return "\n".join(_as_text(_look_up(observation, path.split("."))) for path in paths)
    shown = {name: value for name, value in observation.items()
             if name not in NOT_SHOWN and value not in (None, "", [], {})}
    if len(shown) == 1:
        return _as_text(*shown.values())
    return "\n".join(f"{name}: {_as_text(value)}" for name, value in shown.items())


def _look_up(value, path):
    """The value at the end of `path`; of a list, the values at the ends of its elements' paths."""
    if isinstance(value, list):
        return [_look_up(element, path) for element in value]
    if path:
        return _look_up(value.get(path[0]), path[1:]) if isinstance(value, dict) else None
    return value


def _as_text(value):
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- the server ----

TEXT = {"type": "string"}
SCHEMA = {
    "action": {"type": "object", "properties": {"message": TEXT}, "required": ["message"]},
    "observation": {"type": "object", "properties": {"text": TEXT, "metadata": {"type": "object"}}},
    "state": {"type": "object",
              "properties": {"episode_id": TEXT, "step_count": {"type": "integer"}, "item": TEXT}},
}


class Session:
    """A client's connection: it plays at most one episode at a time of a `serve.EpisodeStore`."""

    def __init__(self, store: Any):
        self.store = store
        self.number: int | None = None  # of the episode in the store
        self.state = {"episode_id": None, "step_count": 0, "item": None}

    def answer(self, raw: str | bytes) -> dict | None:
        """A client's message -> the reply; None: the client wants to end."""
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as e:
            return _error("INVALID_JSON", f"Invalid JSON: {e}")
        data = message.get("data", {}) if isinstance(message, dict) else None
        if not isinstance(data, dict):
            return _error("VALIDATION_ERROR", "a message is an object; so is its data")
        kind, seed, action = message.get("type"), data.get("seed"), data.get("message")
        try:
            if kind == "reset" and (seed is None or type(seed) is int and seed >= 0):
                return self.reset(seed, data.get("episode_id"))
            if kind == "step" and isinstance(action, str):
                return self.step(action)
        except Exception as e:  # an unknown item, or a world's crash, is its own episode's alone
            self.close()
            # Not "EXECUTION_ERROR", which blames the action: here no action raises an exception.
            return _error("WORLD_ERROR", f"{type(e).__name__}: {e}")
        if kind == "state":
            return {"type": "state", "data": self.state}
        if kind in ("reset", "step"):
            return _error("VALIDATION_ERROR", 'a seed is 0, 1, 2 ..., an action {"message": TEXT}')
        return None if kind == "close" else _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def reset(self, seed: int | None, episode_id: str | None = None) -> dict:
        """Begin item number `seed`; None: any training item."""
        name = self.store.name
        item = random.choice(items(name, "train")) if seed is None else f"{name}_{seed}"
        if self.number not in self.store.episodes:  # the first one, or closed because it was idle
            if self.store.is_full():
                return _error("CAPACITY_REACHED", "all episodes are taken")
            self.number = self.store.create()
        text = self.store.reset(self.number, split_item(item)[1])["text"]
        self.state = {"episode_id": episode_id or item, "step_count": 0, "item": item}
        return _observation(text, 0.0, False, {"item": item})

    def step(self, message: str) -> dict:
        """Take the action. The reply's metadata has the fields of `Step` that OpenEnv lacks."""
        if self.number is None:
            raise EnvError("step before reset")
        with self.store.use(self.number) as episode:
            step = episode.env.step(message)
        self.state["step_count"] += 1
        metadata = {key: getattr(step, key) for key in STEP_FIELDS}
        return _observation(step.observation, step.reward, step.done, metadata)

    def close(self) -> None:
        """Close the episode."""
        if self.number is not None:
            self.store.close(self.number)
        self.number = None


def _observation(text, reward, done, metadata):
    observation = {"text": text, "metadata": metadata}
    return {"type": "observation",
            "data": {"observation": observation, "reward": reward, "done": done}}


def _error(code, message):
    return {"type": "error", "data": {"message": message, "code": code}}


def build_app(store: Any, max_threads: int) -> Any:
    """The world of an EpisodeStore in OpenEnv's protocol, as an ASGI application.

    max_threads: messages handled at the same time; each holds a thread.
    """
    from anyio import CapacityLimiter, to_thread
    from fastapi import FastAPI, WebSocket, WebSocketDisconnect

    app = FastAPI()
    prompt = store.free_envs[0].prompt
    # For clients that show the agent only the schema, it contains the instructions.
    described = SCHEMA | {"action": SCHEMA["action"] | {"description": prompt}}
    threads = CapacityLimiter(max_threads)
    app.get("/health")(lambda: {"status": "healthy"})
    app.get("/metadata")(lambda: {"name": store.name, "description": prompt})
    app.get("/schema")(lambda: described)

    @app.websocket("/ws")
    async def play(socket: WebSocket):
        # Browsers send an origin: a web page must not play on its reader's server.
        if "origin" in socket.headers:
            await socket.close()  # status 403
            return
        session = Session(store)
        await socket.accept()
        try:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                raw = message.get("text") or message.get("bytes") or ""
                reply = await to_thread.run_sync(session.answer, raw, limiter=threads)
                if reply is None:
                    await socket.close()
                    break
                await socket.send_json(reply)
        except WebSocketDisconnect:
            pass  # the client left before its reply came
        finally:
            await to_thread.run_sync(session.close, limiter=threads)

    return app
