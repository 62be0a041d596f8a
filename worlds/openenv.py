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
import math
import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from envs import Env, EnvError, Step, items, split_item

try:
    from websockets.exceptions import ConnectionClosed, WebSocketException
    from websockets.sync.client import connect
except ModuleNotFoundError as e:  # the extra "openenv" is not installed
    missing_package = e
else:
    missing_package = None

if TYPE_CHECKING:
    from fastapi import FastAPI

    from worlds.serve import EpisodeStore

LARGEST_REPLY = 16 << 20  # bytes
# Of an observation these are for the trainer, not for the agent.
NOT_SHOWN = ("metadata", "reward", "done")
SLOT = "$"  # in a template of an action: the place of the agent's text


# ---- the client ----


class Refused(EnvError):
    """The server answered with an error. `code` is OpenEnv's, such as "VALIDATION_ERROR"."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


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
        url: str,  # http://host:port or ws://host:port
        # How the agent's text becomes an action: the name of a field, found from the server's
        # schema if there is only one; a JSON object with "$" in the text's place, such as
        # {"type":"call_tool","tool_name":"guess","arguments":{"word":"$"}}; or "json": the agent
        # itself writes the object.
        action: str = "",
        # The fields of the observation that the agent sees: "prompt,messages.content" (the content
        # of every message). Empty: all, one a line.
        observation: str = "",
        # The instructions, or a file that holds them. Empty: the server's own description.
        prompt: str = "",
        success: float | str = 1.0,  # an episode that ends with this reward is a success
        reset: str = "",  # a JSON object: what /ws's reset gets besides the seed
        # Send the agent's whole reply, not the parsed action: 0, 1, true or false.
        whole_reply: bool | int | str = False,
        timeout: float | str = 300.0,  # seconds for one reply; a rollout's own deadline is shorter
    ):
        """Read the server's description. Raises EnvError if there is none, and ValueError for
        arguments that do not fit it."""
        if missing_package:
            raise missing_package
        self.url = re.sub("^ws", "http", url).rstrip("/")
        self.schema, description = describe(self.url)
        self.field, self.template = self._read_action(action)
        self.paths = [path for path in observation.split(",") if path]
        known = self.schema.get("observation", {}).get("properties", {})
        for path in self.paths:
            if known and path.split(".")[0] not in known:
                raise ValueError(f"openenv.observation={path}: the observations of {self.url} have "
                                 f"the fields {', '.join(known)}")
        prompt = str(prompt)  # --env_args makes an int of a number
        self.prompt = prompt or description
        if os.path.isfile(prompt):
            self.prompt = Path(prompt).read_text()
        elif _looks_like_a_path(prompt):
            raise ValueError(f"openenv.prompt={prompt}: there is no such file")
        try:
            self.success = float(success)
            self.timeout = float(timeout)
            if not (math.isfinite(self.success) and math.isfinite(self.timeout)):
                raise ValueError(f"they are finite numbers, not {success} and {timeout}")
        except ValueError as e:
            raise ValueError(f"openenv.success and openenv.timeout: {e}") from e
        self.reset_extras = _read_object(reset, "reset") if reset else {}
        self.whole_reply = _read_flag(whole_reply, "whole_reply")
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
        except ValueError as e:
            return Step(f"The action cannot be read: {e}", score=score, valid=False)
        try:
            text, reward, done, metadata = self._ask("step", message)
        except Refused as e:
            if e.code != "VALIDATION_ERROR":
                raise
            return Step(str(e).removeprefix(f"{self.url}: "), score=score, valid=False)
        self.total += reward
        succeeded = done and reward >= self.success
        # The protocol lacks these fields; our own server sends them as metadata.
        return Step(
            text,
            reward,
            score=_known(metadata, "score", float, min(1.0, max(0.0, self.total))),
            done=done,
            success=_known(metadata, "success", bool, succeeded),
            valid=_known(metadata, "valid", bool, True),
            progress=_known(metadata, "progress", float, 0.0),
        )

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
        """-> (the field of the action that the agent's text fills, "") or ("", template)."""
        fields = self.schema.get("action", {}).get("properties", {})
        if action.startswith("{"):
            template = _read_object(action, "action")
            if _fill(template, "") == template:
                raise ValueError(f"openenv.action={action}: no value in it is '{SLOT}', the place "
                                 "of the agent's text")
            return "", template
        if action == "json":
            return "", SLOT
        if not action:
            required = self.schema.get("action", {}).get("required", ())
            candidates = [f for f in required or fields if f not in NOT_SHOWN]
            if len(candidates) != 1:
                found = ", ".join(candidates) or "no field"
                raise ValueError(f"an action of {self.url} has {found}: say what the agent's text "
                                 "is with --env_args openenv.action=FIELD")
            return candidates[0], ""
        if fields and action not in fields:
            raise ValueError(f"openenv.action={action}: the actions of {self.url} have the fields "
                             f"{', '.join(fields)}")
        return action, ""

    def _action(self, text):
        """The agent's text as the server's action. Raises ValueError."""
        if self.template == SLOT:
            return _read_object(text, "action")
        if not self.field:
            return _fill(self.template, text)
        schema = self.schema.get("action", {}).get("properties", {}).get(self.field, {})
        kinds = {kind.get("type") for kind in schema.get("anyOf", [schema])}
        if kinds & {"integer", "number", "boolean", "array", "object"}:
            try:
                return {self.field: _read_json(text)}
            except (ValueError, RecursionError) as e:
                if "string" not in kinds:
                    raise ValueError(f"'{self.field}' is not text: {e}") from e
        return {self.field: text}

    def _ask(self, kind, data):
        """Send a message -> (text of the observation, reward, done, metadata). Raises EnvError.

        After a failure the connection is closed: a late reply must not answer the next message.
        """
        try:
            data = self._exchange(kind, data)
            observation = data.get("observation")
            reward = data.get("reward") or 0.0  # null: the world gives none here
            done = data.get("done")
            is_number = isinstance(reward, (int, float)) and abs(reward) < 1e9  # no nan, no inf
            if not isinstance(observation, dict) or not is_number or not isinstance(done, bool):
                raise EnvError(f"{self.url}: no observation, reward and done in {data!r:.200}")
            metadata = observation.get("metadata") or data.get("metadata")
            text = text_of(observation, self.paths)
            return text, float(reward), done, metadata if isinstance(metadata, dict) else {}
        except Refused as e:
            if e.code != "VALIDATION_ERROR":
                self.close()
            raise
        except EnvError:
            self.close()
            raise

    def _exchange(self, kind, data):
        """Send a message -> the data of the reply."""
        try:
            if self.socket is None:
                address = re.sub("^http", "ws", self.url) + "/ws"
                # Without pings: the deadlines here are those of the replies.
                socket = connect(address, open_timeout=10, close_timeout=2,
                                 max_size=LARGEST_REPLY, ping_interval=None)
                self.socket = self.connection.enter_context(socket)
            try:
                self.socket.send(json.dumps({"type": kind, "data": data}))
            except ConnectionClosed:
                pass  # a server that has no room says so before it closes
            reply = json.loads(self.socket.recv(timeout=self.timeout))
        except TimeoutError as e:
            raise EnvError(f"{self.url}: no reply to {kind} within {self.timeout:g} s") from e
        except (WebSocketException, OSError) as e:
            raise Disconnected(f"{self.url}: {kind}: {type(e).__name__}: {e}") from e
        except (ValueError, RecursionError) as e:
            raise EnvError(f"{self.url}: {kind}: no JSON: {e}") from e
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise EnvError(f"{self.url}: no data in the reply to {kind}: {reply!r:.200}")
        if reply.get("type") == "error":
            raise self._refusal(reply["data"])
        return reply["data"]

    def _refusal(self, data):
        """The error that the server's error message means."""
        code = str(data.get("code", ""))
        text = str(data.get("message", ""))
        errors = data.get("errors")
        if isinstance(errors, list):
            text += "".join(f"; {e.get('msg')}" for e in errors if isinstance(e, dict))
        if code == "CAPACITY_REACHED":
            text += "; lower --slots"
        return Refused(f"{self.url}: {text[:500]} ({code})", code)


@functools.lru_cache
def describe(url: str) -> tuple[dict, str]:
    """Ask a server for its schemas and its description -> (schemas, text), empty for what it does
    not have. url: http://...

    Raises EnvError if there is no server, within about 10 s, or if a schema is malformed.
    """
    replies = []
    for path in ("schema", "metadata"):
        try:
            reply = requests.get(f"{url}/{path}", timeout=5)
            found = reply.json() if reply.ok else {}
        except (requests.RequestException, ValueError, RecursionError) as e:
            raise EnvError(f"no OpenEnv server answers at {url}/{path} "
                           f"({type(e).__name__}); start one or drop --env_url") from e
        replies.append(found if isinstance(found, dict) else {})
    schema, metadata = replies
    for kind in ("action", "observation"):
        part = schema.get(kind, {})
        if not (isinstance(part, dict) and isinstance(part.get("properties", {}), dict)
                and isinstance(part.get("required", []), list)):
            raise EnvError(f"{url}/schema: '{kind}' is no schema: {part!r:.80}")
    return schema, str(metadata.get("description") or "")


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
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    return json.dumps(value, ensure_ascii=False)


def _known(metadata, key, kind, default):
    """metadata[key] if it is of this kind, else the default."""
    value = metadata.get(key)
    if kind is float and type(value) in (int, float):
        return min(1.0, max(0.0, float(value)))
    return value if type(value) is kind else default


def _fill(template, text):
    """The template with the agent's text in its place.

    >>> _fill({"tool": "say", "words": ["$", {"loud": "$"}]}, "hi")
    {'tool': 'say', 'words': ['hi', {'loud': 'hi'}]}
    """
    if isinstance(template, dict):
        return {key: _fill(value, text) for key, value in template.items()}
    if isinstance(template, list):
        return [_fill(value, text) for value in template]
    return text if template == SLOT else template


def _looks_like_a_path(prompt):
    is_one_word = len(prompt.split()) == 1
    return is_one_word and ("/" in prompt or prompt.endswith((".txt", ".md")))


def _read_flag(value, name):
    """A bool, from an argument that may be text. Raises ValueError."""
    flags = {"0": False, "1": True, "false": False, "true": True}
    text = str(value).lower()
    if text not in flags:
        raise ValueError(f"openenv.{name} is 0, 1, true or false, not '{text:.80}'")
    return flags[text]


def _read_json(text):
    """The value of a JSON text. Raises ValueError, also for NaN, Infinity and 1e999, which
    `json.loads` takes though no JSON text can hold them; and RecursionError."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def _read_object(text, name):
    """A JSON object. Raises ValueError."""
    try:
        found = _read_json(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"openenv.{name}: '{text:.80}' is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"openenv.{name}: '{text:.80}' is not a JSON object")
    return found


# ---- the server ----

TEXT = {"type": "string"}
SCHEMA = {
    "action": {"type": "object", "properties": {"message": TEXT}, "required": ["message"]},
    "observation": {"type": "object", "properties": {"text": TEXT, "metadata": {"type": "object"}}},
    "state": {"type": "object",
              "properties": {"episode_id": TEXT, "step_count": {"type": "integer"}, "item": TEXT}},
}


class BadMessage(ValueError):
    """A message of the wrong form."""


class Session:
    """A client's connection: it plays at most one episode of the store at a time."""

    def __init__(self, store: "EpisodeStore"):
        self.store = store
        self.number: int | None = None  # of the episode in the store
        self.state = {"episode_id": None, "step_count": 0, "item": None}

    def answer(self, raw: str | bytes) -> dict | None:
        """A client's message -> the reply; None: the client wants to end."""
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as e:
            return _error("INVALID_JSON", f"Invalid JSON: {e}")
        if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
            return _error("VALIDATION_ERROR", "a message is an object; so is its data")
        kind = message.get("type")
        data = message.get("data", {})
        try:
            if kind == "reset":
                return self.reset(data.get("seed"), data.get("episode_id"))
            if kind == "step":
                return self.step(data.get("message"))
            if kind == "state":
                return {"type": "state", "data": self.state}
            if kind == "close":
                return None
            return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        except BadMessage as e:
            return _error("VALIDATION_ERROR", str(e))
        except ValueError as e:  # an unknown item
            return _error("EXECUTION_ERROR", str(e))
        except Exception as e:  # a world's crash is its own episode's alone
            self.close()
            return _error("EXECUTION_ERROR", f"{type(e).__name__}: {e}")

    def reset(self, seed: int | None, episode_id: str | None = None) -> dict:
        """Begin item number `seed`; None: any training item."""
        name = self.store.name
        if seed is None:
            seed = split_item(random.choice(items(name, "train")))[1]
        if type(seed) is not int or seed < 0:
            raise BadMessage(f"seed should be 0, 1, 2 ..., not {seed!r:.80}")
        if self.number not in self.store.episodes:  # the first one, or closed because it was idle
            try:
                self.number = self.store.create()
            except EnvError as e:
                full = self.store.is_full()
                return _error("CAPACITY_REACHED" if full else "FACTORY_ERROR", str(e))
        with self.store.use(self.number, must_be_reset=False) as episode:
            episode.last_reply = {}  # if the environment fails, the episode is not reset
            text = episode.env.reset(seed)
            episode.last_reply = {"observation": text}
        item = f"{name}_{seed}"
        self.state = {"episode_id": episode_id or item, "step_count": 0, "item": item}
        return _observation(text, 0.0, False, {"item": item})

    def step(self, message: str | None) -> dict:
        """Take the action. The reply's metadata has the fields of `Step` that OpenEnv lacks."""
        if not isinstance(message, str):
            raise BadMessage('an action is {"message": TEXT}')
        if self.number is None:
            raise EnvError("step before reset")
        with self.store.use(self.number) as episode:
            step = episode.env.step(message)
        self.state["step_count"] += 1
        metadata = {
            "score": float(step.score),
            "success": bool(step.success),
            "valid": bool(step.valid),
            "progress": float(step.progress),
        }
        return _observation(step.observation, step.reward, step.done, metadata)

    def close(self) -> None:
        """Close the episode."""
        if self.number is not None:
            self.store.close(self.number)
        self.number = None


def _observation(text, reward, done, metadata):
    observation = {"text": text, "metadata": metadata}
    data = {"observation": observation, "reward": float(reward), "done": bool(done)}
    return {"type": "observation", "data": data}


def _error(code, message):
    return {"type": "error", "data": {"message": message, "code": code}}


def build_app(store: "EpisodeStore", max_threads: int) -> "FastAPI":
    """The store's world in OpenEnv's protocol, as an ASGI application.

    max_threads: messages handled at the same time; each holds a thread.
    """
    from anyio import CapacityLimiter, to_thread
    from fastapi import FastAPI, WebSocket, WebSocketDisconnect

    app = FastAPI()
    prompt = store.free_envs[0].prompt
    # For clients that show the agent only the schema, it contains the instructions.
    described = SCHEMA | {"action": SCHEMA["action"] | {"description": prompt}}
    threads = CapacityLimiter(max_threads)

    @app.get("/health")
    def health():
        return {"status": "healthy"}

    @app.get("/metadata")
    def metadata():
        return {"name": store.name, "description": prompt}

    @app.get("/schema")
    def schema():
        return described

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
