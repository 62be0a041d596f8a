"""A server of AgentGym's HTTP protocol: any client of AgentGym can play this project's worlds.

    python envs.py serve --env babyai --port 36001 [--host 127.0.0.1] [--idle_seconds 3600]
                         [--max_episodes N] [--random_ids]

Bodies and replies are those of AgentGym's servers. For babyai, textcraft and sciworld they follow
the traffic recorded in tests/wire/, for searchqa and webarena AgentGym's source; any other world
has babyai's. /step's reply also has "success", "valid" and "progress". As in AgentGym, a failure is
a reply {"error": ...} with status 200, and a body of the wrong form is answered with status 422.

Anyone who knows an episode's number can play it. On loopback the numbers are 0, 1, 2 ... as in
AgentGym; on any other address they are random, so that no client plays another's episode.
"""

import argparse
import asyncio
import base64
import io
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from anyio import to_thread
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from matplotlib.image import imsave
from pydantic import create_model
from uvicorn.protocols.http.h11_impl import H11Protocol

from envs import WORLDS, CommandParser, Env, EnvError, UserError, close_quietly, env_options
from envs import load_named, make_env
from worlds.agentgym import PROTOCOLS, Protocol

LARGEST_BODY = 1 << 20  # bytes; no request of the protocol comes near
REQUEST_SECONDS = 30.0  # that a client may take to send a request's head, and again for its body
MAX_THREADS = 256  # requests handled at the same time: each slow or hanging world holds a thread
SECONDS_TO_STOP = 8.0  # after SIGTERM, even if a world hangs
# The fields of /reset's reply, as recorded from AgentGym's servers.
RESET_FIELDS = {
    "babyai": ("observation", "reward", "score", "deleted", "done"),
    "textcraft": ("id", "observation", "done", "reward"),
    "webarena": ("observation", "sites", "object"),
    "sciworld": ("task_name", "var_num", "task_description")
    + ("observation", "reward", "score", "deleted", "done"),
}
REFUSE_AFTER_THE_END = ("babyai", "sciworld")  # whose servers of AgentGym do so until /reset
APPS = {"agentgym": "worlds.serve:build_app", "openenv": "worlds.openenv:build_app"}


class ServedEpisode:
    """An environment that a client plays on."""

    def __init__(self, env: Env | None):
        self.env = env  # None while it is being made
        self.lock = threading.Lock()  # held by the one request that uses the episode
        self.last_used = time.monotonic()
        self.last_reply: dict = {}  # all fields; empty before the first reset
        self.reusable = True  # False after the environment failed


class EpisodeStore:
    """The episodes of one world, by number. All methods may be called from any thread.

    The environment of a closed episode is reused for a new one. `reap` closes episodes that nobody
    used for `idle_seconds`. What cannot be done raises EnvError.
    """

    def __init__(
        self,
        name: str,
        idle_seconds: float = 3600.0,
        max_episodes: int = 0,  # at the same time; 0: no limit
        options: dict | None = None,  # keyword arguments of the world
        random_ids: bool = False,  # numbers that cannot be guessed, in place of 0, 1, 2 ...
    ):
        """Make the first environment. Raises UserError if the world cannot be made."""
        self.name = name
        self.idle_seconds = idle_seconds
        self.max_episodes = max_episodes
        self.options = options or {}
        self.random_ids = random_ids
        self.free_envs = [make_env(name, **self.options)]
        self.episodes: dict[int, ServedEpisode] = {}
        self.next_number = 0
        self.lock = threading.Lock()  # for `episodes` and `next_number`

    def create(self) -> int:
        """Begin an episode -> its number."""
        self.reap()
        with self.lock:
            if self.is_full():
                raise EnvError(f"all {self.max_episodes} episodes are taken; close one first")
            number = self.next_number
            self.next_number += 1
            if self.random_ids:
                number = secrets.randbits(53)  # the largest that every JSON reader reads exactly
            episode = ServedEpisode(self.free_envs.pop() if self.free_envs else None)
            self.episodes[number] = episode
        try:
            # Not under the lock: some worlds take seconds to make.
            episode.env = episode.env or make_env(self.name, **self.options)
        except BaseException:
            with self.lock:
                del self.episodes[number]
            raise
        return number

    def is_full(self) -> bool:
        """Whether there are as many episodes as there may be at the same time."""
        return 0 < self.max_episodes <= len(self.episodes)

    @contextmanager
    def use(self, number: int, must_be_reset: bool = True) -> Iterator[ServedEpisode]:
        """Hold the episode for one request. An environment that fails meanwhile is not reused.

        must_be_reset: raise EnvError before the first reset, when a reused environment may still be
        in the middle of an earlier episode.
        """
        episode = self.episodes.get(number)
        if episode is None:
            raise EnvError(f"The id {number} is not valid.")
        with episode.lock:
            if number not in self.episodes:  # closed while this request waited for the lock
                raise EnvError(f"The id {number} is not valid.")
            if must_be_reset and not episode.last_reply:
                raise EnvError(f"The id {number} was not reset.")
            is_over = episode.last_reply.get("done") and self.name in REFUSE_AFTER_THE_END
            if must_be_reset and is_over:
                raise EnvError(f"The task with environment {number} has finished.")
            try:
                yield episode
            except ValueError:  # an unknown item: the environment itself is in order
                raise
            except BaseException:
                episode.reusable = False
                raise
            finally:
                episode.last_used = time.monotonic()

    def reset(self, number: int, item: int) -> dict:
        """Begin item number `item` in the episode -> the fields of every world's /reset, and
        "text", the first observation as in this process."""
        with self.use(number, must_be_reset=False) as episode:
            env = episode.env
            episode.last_reply = {}  # if the environment fails, the episode is not reset
            text = env.reset(item)
            reply = {"id": number, "text": text, "observation": text, "reward": 0, "score": 0,
                     "deleted": False, "done": False}
            if self.name == "sciworld":
                reply |= {"task_name": env.task_name, "var_num": env.variation,
                          "task_description": env.task_description,
                          "observation": text.removeprefix(env.task_description + "\n")}
            if self.name == "webarena":
                reply |= {"sites": env.sites, "object": env.objective}
            episode.last_reply = reply
            return reply

    def step(self, number: int, action: str) -> dict:
        """Take the action in the episode -> /step's reply."""
        with self.use(number) as episode:
            step = episode.env.step(action)
            reply = {"observation": step.observation, "reward": self._points(step.reward),
                     "score": self._points(step.score), "done": step.done}
            episode.last_reply.update(reply)
        if self.name == "textcraft":
            del reply["score"]
        if self.name == "webarena":
            reply |= {"terminated": reply.pop("done"), "truncated": False, "info": None}
        # AgentGym's replies do not have these. With them this project's client need not guess.
        return reply | {"success": step.success, "valid": step.valid, "progress": step.progress}

    def _points(self, value):
        """A reward or score in the units of AgentGym's server, whole numbers as ints."""
        points = round(100 * value, 6) if self.name == "sciworld" else value
        return int(points) if points.is_integer() else points

    def close(self, number: int, only_idle: bool = False) -> bool:
        """Close the episode -> whether there was one. only_idle: not if it was used again."""
        episode = self.episodes.get(number)
        if episode is None:
            return False
        with episode.lock:  # wait for the request that uses it
            with self.lock:
                is_closed = number not in self.episodes
                if is_closed or (only_idle and not self._is_idle(episode)):
                    return False
                del self.episodes[number]
            if episode.reusable:
                self.free_envs.append(episode.env)
            else:
                close_quietly(episode.env)
        return True

    def reap(self) -> None:
        """Close the idle episodes."""
        with self.lock:
            # A request that uses an episode holds its lock. An episode without an environment is
            # still being made.
            idle = [number for number, episode in self.episodes.items()
                    if episode.env and self._is_idle(episode) and not episode.lock.locked()]
        for number in idle:
            self.close(number, only_idle=True)

    def _is_idle(self, episode):
        return episode.last_used < time.monotonic() - self.idle_seconds

    def close_envs(self) -> None:
        """Close all environments, also those of episodes that were not closed."""
        for env in [*self.free_envs, *(episode.env for episode in self.episodes.values())]:
            if env:
                close_quietly(env)


def build_app(store: EpisodeStore, max_threads: int) -> FastAPI:
    """The paths of AgentGym's protocol, as an ASGI application.

    max_threads: requests handled at the same time; each holds a thread.
    """

    @asynccontextmanager
    async def lifespan(app):
        to_thread.current_default_thread_limiter().total_tokens = max_threads
        yield

    app = FastAPI(lifespan=lifespan)
    name = store.name
    protocol = PROTOCOLS.get(name, Protocol())
    reset_fields = RESET_FIELDS.get(name, RESET_FIELDS["babyai"])
    id_key = protocol.id_key
    IdBody = create_model("IdBody", **{id_key: (int, ...)})
    ItemBody = create_model("ItemBody", __base__=IdBody, **{protocol.item_key: (int, ...)})
    ActionBody = create_model("ActionBody", __base__=IdBody, action=(str, ...))

    @app.exception_handler(EnvError)
    @app.exception_handler(ValueError)
    def report_failure(request, e):
        return JSONResponse({"error": str(e)})  # with status 200, as AgentGym's servers do

    def reset_reply(number, item):
        reply = store.reset(number, item)
        return {key: reply[key] for key in reset_fields}

    @app.get("/")
    def about():
        title = "ScienceWorld" if name == "sciworld" else WORLDS[name].split(":")[1]
        return f"This is environment {title}."

    @app.post("/create")
    def create(body: dict | None = None):
        number = store.create()
        if not protocol.first_observation_keys:
            return number
        reply = {id_key: number}
        if name == "textcraft":
            # Its episode n starts with item n, whatever the body's "commands" and "goal" are.
            reply |= reset_reply(number, 0 if store.random_ids else number)
        return reply

    @app.post("/reset")
    def reset(body: ItemBody):
        reply = reset_reply(getattr(body, id_key), getattr(body, protocol.item_key))
        return reply if protocol.first_observation_keys else reply["observation"]

    @app.post("/step")
    def step(body: ActionBody):
        return store.step(getattr(body, id_key), body.action)

    @app.post("/close")
    def close(body: IdBody):
        return store.close(getattr(body, id_key))

    @app.get("/detail")
    def detail(number: int = Query(alias=id_key)):
        with store.use(number) as episode:
            keys = (*reset_fields, "deleted")
            return {key: episode.last_reply[key] for key in keys if key != "id"}

    @app.get("/observation")
    def observation(number: int = Query(alias=id_key)):
        reply = detail(number)
        return reply if name == "babyai" else reply["observation"]

    if name == "sciworld":

        @app.get("/goals")
        def goals(number: int = Query(alias="id")):
            with store.use(number) as episode:
                return {"goals": episode.env.goals()}

        @app.get("/task_description")
        def task_description(number: int = Query(alias="id")):
            return {"task_description": detail(number)["task_description"]}

        @app.get("/action_hint")
        def action_hint(number: int = Query(alias="id")):
            with store.use(number) as episode:
                actions, objects = episode.env.action_hint()
            return {"possible_actions": actions, "possible_objects": objects}

    if name == "babyai":

        @app.post("/render")
        def render(body: IdBody):
            with store.use(getattr(body, id_key)) as episode:
                level = episode.env.env
                picture = io.BytesIO()
                pixels = level.get_frame(level.highlight, level.tile_size)
                imsave(picture, pixels, format="png")
            return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()

    return app


def limit_bodies(app: Any) -> Any:
    """Wrap the ASGI application: it sees a request only when its body is complete. A body over
    LARGEST_BODY gets status 413, one that takes longer than REQUEST_SECONDS status 408."""

    async def limited(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        try:
            body = await asyncio.wait_for(read_body(receive), REQUEST_SECONDS)
        except TimeoutError:
            return await JSONResponse({"detail": "the body is late"}, 408)(scope, receive, send)
        if len(body) > LARGEST_BODY:
            return await JSONResponse({"detail": "the body is large"}, 413)(scope, receive, send)
        complete = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again():
            return complete.pop() if complete else await receive()

        return await app(scope, receive_again, send)

    return limited


async def read_body(receive: Any) -> bytes:
    """Read a request's body, whatever length its head promised, until it is too large."""
    body = b""
    more = True
    while more and len(body) <= LARGEST_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)  # False, too, when the client has left
    return body


class LimitedHTTP(H11Protocol):
    """A uvicorn connection that is closed if a request's head is incomplete after REQUEST_SECONDS.
    Between two requests it may stay idle."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self.timer = self.loop.call_later(REQUEST_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Start the timer at the first bytes of a head, and stop it at its last ones."""
        request = self.cycle
        is_head = request is None or request.response_complete
        if is_head and self.timer is None:
            self.timer = self.loop.call_later(REQUEST_SECONDS, self.transport.close)
        super().data_received(data)
        if self.cycle is not request:
            self._stop_timer()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Forget the timer: a WebSocket has no further requests."""
        self._stop_timer()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self):
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None


def listen(host: str, port: int) -> socket.socket:
    """Open the port (0: any free one)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # Without TCP_NODELAY every reply waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(args: argparse.Namespace) -> None:
    """Serve the world `args.env` until SIGTERM or Ctrl-C.

    Raises UserError or OSError if that is impossible: unknown world, a package not installed, port
    in use.
    """
    if not args.idle_seconds > 0:
        raise UserError(f"--idle_seconds must be positive, not {args.idle_seconds}")
    build = load_named(args.protocol, APPS, "protocol")
    options = env_options(args.env_args, [args.env]).get(args.env)
    listener = listen(args.host, args.port)
    random_ids = args.random_ids
    if random_ids is None:
        random_ids = not ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    store = EpisodeStore(args.env, args.idle_seconds, args.max_episodes, options, random_ids)
    config = uvicorn.Config(
        limit_bodies(build(store, MAX_THREADS)), http=LimitedHTTP, ws_max_size=LARGEST_BODY,
        log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=600)
    server = uvicorn.Server(config)

    def stop(*_):
        """End the server. Requests under way have 5 s (timeout_graceful_shutdown) to finish.
        Python cannot end a thread in which a world hangs, so a timer ends the whole process."""
        server.should_exit = True
        timer = threading.Timer(SECONDS_TO_STOP, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def reap_until_stopped():
        while not server.should_exit:
            time.sleep(min(10.0, store.idle_seconds / 4))
            store.reap()

    # Replaces uvicorn's signal handler: a world that hangs must not keep the process alive.
    server.handle_exit = stop
    threading.Thread(target=reap_until_stopped, daemon=True).start()
    shown = f"[{args.host}]" if ":" in args.host else args.host
    print(f"{args.env} on http://{shown}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
    store.close_envs()


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 and one line on stderr for bad usage."""
    parser = CommandParser(prog="envs.py", allow_abbrev=False,
                           description="Serve a world in AgentGym's protocol or OpenEnv's.")
    add = parser.add_argument
    add("command", choices=["serve"], help="or play: see python envs.py play --help")
    add("--env", default="babyai", choices=WORLDS)
    add("--protocol", default="agentgym", choices=APPS)
    add("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in: there is no password")
    add("--port", type=int, default=36001, help="0: any free one; the first line says which")
    add("--idle_seconds", type=float, default=3600.0,
        help="an episode that nobody touched for so long is closed")
    add("--max_episodes", type=int, default=0, help="at a time; 0: no limit")
    add("--random_ids", action=argparse.BooleanOptionalAction,
        help="numbers of episodes that cannot be guessed; default: unless --host is loopback")
    add("--env_args", default="", help="keyword arguments of the world: searchqa.topk=5")
    try:
        serve(parser.parse_args(argv))
    except ModuleNotFoundError as e:  # of the protocol
        print(f"envs.py: {e}; pip install -e \".[serve,openenv]\"", file=sys.stderr)
        return 2
    except (ValueError, OSError, OverflowError) as e:
        print("envs.py:", " ".join(str(e).split()), file=sys.stderr)
        return 2
    return 0
