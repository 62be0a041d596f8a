"""OpenEnv's protocol: `OpenEnv` plays on any of its servers, `build_app` makes one.

    python eval.py --env openenv --env_url http://host:port --env_args openenv.action=message
    python envs.py serve --env babyai --protocol openenv --port 8000

An episode is a WebSocket at /ws. Every message is JSON: {"type": "reset", "data": {"seed": 17}},
{"type": "step", "data": ACTION}, {"type": "state"} or {"type": "close"}. The replies are {"type":
"observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}, {"type": "state",
"data": {...}} and {"type": "error", "data": {"message": ..., "code": ...}}. GET /schema has the
JSON schemas of ACTION and of the observation, /metadata a name and a description.

Source: meta-pytorch/OpenEnv at 685de41 (2026-05-01), src/openenv/core: env_client.py,
env_server/types.py, http_server.py; and the package openenv 0.10.0 (2026-10-22).
"""

import contextlib
import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import requests
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from envs import Env, EnvError, Step, UserError, items, split_item

LARGEST_REPLY = 16 << 20  # bytes
# Of an observation these are for the trainer, not for the agent.
NOT_SHOWN = ("metadata", "reward", "done")
STEP_FIELDS = ("score", "success", "valid", "progress")  # in the metadata of our own server
SLOT = '"$"'  # in a template of an action, a JSON text: the place of the agent's text


# ---- the client ----


class InvalidAction(EnvError):
    """The server's schema refuses the action. The episode goes on."""


class Disconnected(EnvError):
    """The connection is lost, or was never made."""


class OpenEnv(Env):
    """An environment on an OpenEnv server: one WebSocket, connected by the first `reset`.

    Whatever is wrong with the server or its replies raises EnvError with the address and the
    reason. An action that the server's schema refuses is an invalid action.
    """

    remote = True

    def __init__(
        self,
        name: str,  # "openenv"
        url: str,  # http://host:port or ws://host:port
        # How the agent's text becomes an action: the name of a field, found from the server's
        # schema if there is only one; an object with "$" in the text's place, such as
        # {"type":"call_tool","tool_name":"guess","arguments":{"word":"$"}}; or "json": the agent
        # itself writes the object.
        action: Any = None,
        # The fields of the observation that the agent sees: "prompt,messages.content" (the content
        # of every message). Empty: all, one a line.
        observation: str = "",
        prompt: str = "",  # the instructions, or FILE.txt or FILE.md; empty: the server's own
        success: float = 1.0,  # an episode that ends with this reward is a success
        reset: Any = None,  # an object: what /ws's reset gets besides the seed
        whole_reply: bool = False,  # send the agent's whole reply, not the parsed action
        timeout: float = 300.0,  # seconds for one reply; a rollout's own deadline is shorter
    ):
        """Read the server's description. Raises EnvError if there is none, and UserError for
        arguments that do not fit it."""
        self.name = name
        self.url = re.sub("^ws", "http", url).rstrip("/")
        self.schema, description = describe(self.url)
        self.template, self.kinds = self._read_action(action)
        self.paths = [path for path in observation.split(",") if path]
        known = self.schema.get("observation", {}).get("properties")
        for path in self.paths:
            if known and path.split(".")[0] not in known:
                raise UserError(f"{name}.observation={path}: the observations of {self.url} have "
                                f"the fields {', '.join(known)}")
        is_file = " " not in prompt and prompt.endswith((".txt", ".md"))
        self.prompt = Path(prompt).read_text() if is_file else prompt or description
        self.success = success
        self.reset_extras = reset or {}
        self.whole_reply = whole_reply
        self.timeout = timeout
        self.connection = contextlib.ExitStack()  # its end closes the socket
        self.socket = None
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
        return text

    def step(self, action: str) -> Step:
        """Send the action -> the Step that the server's reply means."""
        score = min(1.0, max(0.0, self.total))
        if self.socket is None:
            raise EnvError(f"{self.url}: step without a connection")
        try:
            message = self._action(action)
        except (ValueError, RecursionError) as e:
            return Step(f"The action cannot be read: {e}", score=score, valid=False)
        try:
            text, reward, done, metadata = self._ask("step", message)
        except InvalidAction as e:
            return Step(str(e), score=score, valid=False)
        self.total += reward
        told = {"score": min(1.0, max(0.0, self.total)), "success": done and reward >= self.success}
        if metadata.keys() == set(STEP_FIELDS):  # from our own server: the protocol lacks them
            told = metadata
        return Step(text, reward, done=done, **told)

    def close(self) -> None:
        """End the connection, and with it the episode. Never raises; may be called twice."""
        if self.socket is None:
            return
        try:
            try:
                self.socket.send('{"type": "close"}')
            finally:
                self.connection.close()
        except (WebSocketException, OSError):
            pass  # the episode is gone with its connection
        self.socket = None

    def _read_action(self, action):
        """-> (the server's action as a JSON text with "$" in the place of the agent's text, the
        JSON types that this place may have)."""
        schema = self.schema.get("action", {})
        fields = schema.get("properties", {})
        if action is None:
            candidates = [f for f in schema.get("required") or fields if f not in NOT_SHOWN]
            if len(candidates) != 1:
                raise UserError(f"an action of {self.url} has {', '.join(candidates) or 'no field'}"
                                f": say what the agent's text is with {self.name}.action=FIELD")
            action = candidates[0]
        if action == "json":
            return SLOT, {"object"}
        if isinstance(action, dict):
            if SLOT not in json.dumps(action):
                raise UserError(f"{self.name}.action={action}: no value in it is {SLOT}, the "
                                "place of the agent's text")
            return json.dumps(action), {"string"}
        if fields and action not in fields:
            raise UserError(f"{self.name}.action={action}: the actions of {self.url} have the "
                            f"fields {', '.join(fields)}")
        field = fields.get(action, {})
        return json.dumps({action: "$"}), {kind.get("type") for kind in field.get("anyOf", [field])}

    def _action(self, text):
        """The agent's text as the server's action. Raises ValueError and RecursionError."""
        value = text
        if self.kinds & {"integer", "number", "boolean", "array", "object"}:
            try:
                value = json.loads(text)
                # Python reads NaN, Infinity and 1e999, too, which no JSON text can hold.
                json.dumps(value, allow_nan=False)
            except ValueError:
                if "string" not in self.kinds:
                    raise
                value = text
        if self.template == SLOT and not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        return json.loads(self.template.replace(SLOT, json.dumps(value)))

    def _ask(self, kind, data):
        """Send a message -> (text of the observation, reward, done, metadata). Raises EnvError.

        After a failure the connection is closed: a late reply must not answer the next message.
        """
        try:
            return self._exchange(kind, data)
        except InvalidAction:
            raise
        except (EnvError, WebSocketException, OSError, ValueError, RecursionError, LookupError,
                TypeError, AttributeError) as e:  # from ValueError on: the reply is malformed
            self.close()
            is_lost = isinstance(e, (WebSocketException, OSError))
            error = Disconnected if is_lost and not isinstance(e, TimeoutError) else EnvError
            raise error(f"{self.url}: {kind}: {type(e).__name__}: {e}") from e

    def _exchange(self, kind, data):
        if self.socket is None:
            # Without pings: the deadlines here are those of the replies.
            socket = connect(re.sub("^http", "ws", self.url) + "/ws", open_timeout=10,
                             close_timeout=2, max_size=LARGEST_REPLY, ping_interval=None)
            self.socket = self.connection.enter_context(socket)
        try:
            self.socket.send(json.dumps({"type": kind, "data": data}))
        except ConnectionClosed:
            pass  # a server that has no room says so before it closes
        reply = json.loads(self.socket.recv(timeout=self.timeout))
        data = reply["data"]
        if reply["type"] == "error":
            code = data.get("code")
            text = f"{data.get('message')} ({code}) {data.get('errors', '')}"[:500]
            if code == "VALIDATION_ERROR":
                raise InvalidAction(text)
            raise EnvError(f"{text}; lower --slots" if code == "CAPACITY_REACHED" else text)
        observation = data["observation"]
        reward = data.get("reward") or 0.0  # null: the world gives none here
        is_number = isinstance(reward, (int, float)) and abs(reward) < 1e9  # no nan, no inf
        if not isinstance(observation, dict) or not is_number or type(data["done"]) is not bool:
            raise ValueError(f"no observation, reward and done in {data!r:.200}")
        metadata = observation.get("metadata") or data.get("metadata") or {}
        return text_of(observation, self.paths), float(reward), data["done"], metadata


@functools.lru_cache
def describe(url: str) -> tuple[dict, str]:
    """Ask a server for its schemas and its description -> (schemas, text), empty for what it does
    not have. Raises EnvError if there is no server, within about 10 s. url: http://..."""
    replies = []
    for path in ("schema", "metadata"):
        try:
            reply = requests.get(f"{url}/{path}", timeout=5)
            replies.append(reply.json() if reply.ok else {})
        except (OSError, ValueError, RecursionError) as e:  # requests' exceptions are OSErrors
            raise EnvError(f"no OpenEnv server answers at {url}/{path} "
                           f"({type(e).__name__}); start one or drop --env_url") from e
    schema, metadata = replies
    return schema, metadata.get("description") or ""


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
    if not path:
        return value
    return _look_up(value.get(path[0]), path[1:]) if isinstance(value, dict) else None


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
        kind = message.get("type")
        try:
            if kind == "reset":
                return self.reset(data.get("seed"), data.get("episode_id"))
            if kind == "step":
                return self.step(data.get("message"))
        except ValueError as e:  # an unknown item
            return _error("EXECUTION_ERROR", str(e))
        except Exception as e:  # a world's crash is its own episode's alone
            self.close()
            return _error("EXECUTION_ERROR", f"{type(e).__name__}: {e}")
        if kind == "state":
            return {"type": "state", "data": self.state}
        return None if kind == "close" else _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def reset(self, seed: int | None, episode_id: str | None = None) -> dict:
        """Begin item number `seed`; None: any training item."""
        name = self.store.name
        if seed is None:
            seed = split_item(random.choice(items(name, "train")))[1]
        if type(seed) is not int or seed < 0:
            return _error("VALIDATION_ERROR", f"seed should be 0, 1, 2 ..., not {seed!r:.80}")
        if self.number not in self.store.episodes:  # the first one, or closed because it was idle
            if self.store.is_full():
                return _error("CAPACITY_REACHED", "all episodes are taken")
            self.number = self.store.create()
        text = self.store.reset(self.number, seed)["text"]
        item = f"{name}_{seed}"
        self.state = {"episode_id": episode_id or item, "step_count": 0, "item": item}
        return _observation(text, 0.0, False, {"item": item})

    def step(self, message: str | None) -> dict:
        """Take the action. The reply's metadata has the fields of `Step` that OpenEnv lacks."""
        if not isinstance(message, str):
            return _error("VALIDATION_ERROR", 'an action is {"message": TEXT}')
        if self.number is None:
            return _error("EXECUTION_ERROR", "step before reset")
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
                await socket.send_text(json.dumps(reply))
        except WebSocketDisconnect:
            pass  # the client left before its reply came
        finally:
            await to_thread.run_sync(session.close, limiter=threads)

    return app
