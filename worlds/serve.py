"""A server of AgentGym's HTTP protocol for the worlds of this project, so that any client of it can play on them.

    python envs.py serve --env babyai --port 36001 [--host 127.0.0.1] [--idle_seconds 3600] [--max_episodes N]

Bodies and replies are those of the servers for babyai, textcraft and sciworld, as recorded in tests/wire/, and of searchqa's and
webarena's as AgentGym's source has it; a world that is not among these has babyai's. /step's reply says "success" and "valid" besides. What fails comes as status 200 with
{"error": ...}, as from those servers; a body of the wrong form as 422.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

from envs import WORLDS, Env, EnvError, env_options, make_env
from worlds.agentgym import PROTOCOLS, Protocol

RESET_FIELDS = {  # of /reset's reply, as recorded from AgentGym's servers; any other world has babyai's
    "babyai": ("observation", "reward", "score", "deleted", "done"),
    "textcraft": ("id", "observation", "done", "reward"),
    "webarena": ("observation", "sites", "object"),
    "sciworld": ("task_name", "var_num", "task_description", "observation", "reward", "score", "deleted", "done"),
}


class Episode:
    """A world that is being played, the last reply, and when it was used."""

    def __init__(self, env: Env | None):
        self.env, self.lock, self.used, self.last, self.sound = env, threading.Lock(), time.monotonic(), {}, True


class Games:
    """Many episodes of one world, by number, in any threads. The world of a closed episode waits for the next one; so does
    that of an episode that nobody touched for `idle_seconds`. max_episodes 0: no limit. What cannot be done raises EnvError."""

    def __init__(self, name: str, idle_seconds: float = 3600.0, max_episodes: int = 0, options: dict | None = None):
        self.options = options or {}  # keyword arguments of the world
        self.name, self.idle, self.most = name, idle_seconds, max_episodes
        self.fields, self.points = RESET_FIELDS.get(name, RESET_FIELDS["babyai"]), 100 if name == "sciworld" else 1
        self.free = [make_env(name, **self.options)]  # also shows at once whether it can be made
        self.episodes, self.count, self.lock = {}, 0, threading.Lock()

    def create(self) -> int:
        self.reap()
        with self.lock:
            if self.most and len(self.episodes) >= self.most:
                raise EnvError(f"all {self.most} episodes are taken; close one first")
            number, self.count = self.count, self.count + 1
            episode = self.episodes[number] = Episode(self.free.pop() if self.free else None)
        try:
            episode.env = episode.env or make_env(self.name, **self.options)  # outside the lock: some worlds take seconds
        except BaseException:
            with self.lock:
                del self.episodes[number]
            raise
        return number

    @contextmanager
    def at(self, number: int, begun: bool = True) -> Iterator[Episode]:
        """The episode, for one request at a time. A world that failed in it is not used again after it."""
        episode = self.episodes.get(number)
        with episode.lock if episode else self.lock:
            if number not in self.episodes:  # never was, or was closed while this request waited
                raise EnvError(f"The id {number} is not valid.")
            if begun and not episode.last:  # its world may still be in the episode that it was used for before
                raise EnvError(f"The id {number} was not reset.")
            try:
                yield episode
            except ValueError:  # a bad item: the world is as it was
                raise
            except BaseException:
                episode.sound = False
                raise
            finally:
                episode.used = time.monotonic()

    def reset(self, number: int, item: int) -> dict:
        with self.at(number, begun=False) as episode:
            episode.last, env = {}, episode.env
            text = env.reset(item)
            episode.last = {"id": number, "observation": text, "reward": 0, "score": 0, "deleted": False, "done": False}
            if self.name == "sciworld":
                episode.last |= {"task_name": env.task_name, "var_num": env.variation, "task_description": env.task_description,
                                 "observation": text.removeprefix(env.task_description + "\n")}
            if self.name == "webarena":
                episode.last |= {"sites": env.sites, "object": env.objective}
            return {key: episode.last[key] for key in self.fields}

    def step(self, number: int, action: str) -> dict:
        def points(x):  # 0 and 1 rather than 0.0 and 1.0, as recorded
            x = float(x) if self.points == 1 else round(float(x) * self.points, 6)
            return int(x) if x.is_integer() else x

        with self.at(number) as episode:
            step = episode.env.step(action)
            new = {"observation": step.observation, "reward": points(step.reward), "score": points(step.score),
                   "done": bool(step.done)}
            episode.last |= new
            if self.name == "textcraft":
                del new["score"]
            if self.name == "webarena":
                new |= {"terminated": new.pop("done"), "truncated": False, "info": None}
            # these three are ours: no client has to guess
            return new | {"success": bool(step.success), "valid": bool(step.valid), "progress": float(step.progress)}

    def last(self, number: int) -> dict:
        with self.at(number) as episode:
            return {key: episode.last[key] for key in (*self.fields, "deleted") if key != "id"}

    def close(self, number: int, only_idle: bool = False) -> bool:
        episode = self.episodes.get(number)
        if episode is None:
            return False
        with episode.lock:  # a request that is under way ends first
            with self.lock:
                if number not in self.episodes or only_idle and episode.used >= time.monotonic() - self.idle:
                    return False
                del self.episodes[number]
            if episode.sound:
                self.free.append(episode.env)
            else:
                episode.env.close()
        return True

    def reap(self) -> None:
        with self.lock:  # whoever holds an episode's lock is using it, and one without a world is being made
            idle = [n for n, e in self.episodes.items() if e.env and e.used < time.monotonic() - self.idle and not e.lock.locked()]
        for number in idle:
            self.close(number, only_idle=True)


def serve(name: str, host: str = "127.0.0.1", port: int = 36001, idle_seconds: float = 3600.0, max_episodes: int = 0,
          options: dict | None = None) -> None:
    """Serve the world `name`, made with `options`, until SIGTERM or Ctrl-C. Raises ValueError if it cannot be: unknown, no FastAPI, port in use."""
    if name not in WORLDS:
        raise ValueError(f"unknown environment '{name}'; choose from {', '.join(WORLDS)}")
    try:
        import uvicorn
        from anyio import to_thread
        from fastapi import FastAPI, Query
        from fastapi.responses import JSONResponse
        from pydantic import create_model
    except ModuleNotFoundError as e:
        raise ValueError('serving needs FastAPI and uvicorn: pip install -e ".[serve]"') from e
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except (OSError, OverflowError) as e:
        raise ValueError(f"cannot listen on {host}:{port}: {e}") from e
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else every reply waits 40 ms for an acknowledgement
    games = Games(name, idle_seconds, max_episodes, options)

    @asynccontextmanager
    async def lifespan(app):
        to_thread.current_default_thread_limiter().total_tokens = 256  # instead of 40: each slow or hanging world holds a thread
        yield
    app = FastAPI(lifespan=lifespan)

    known = PROTOCOLS.get(name, Protocol())
    key = known.id
    Id = create_model("Id", **{key: (int, ...)})
    Item = create_model("Item", __base__=Id, **{known.item: (int, ...)})
    Action = create_model("Action", __base__=Id, action=(str, ...))

    @app.exception_handler(EnvError)
    @app.exception_handler(ValueError)
    def failed(request, e):
        return JSONResponse({"error": str(e)})  # with status 200, as AgentGym's servers do

    @app.get("/")
    def about():
        return f"This is environment {'ScienceWorld' if name == 'sciworld' else WORLDS[name].split(':')[1]}."

    @app.post("/create")
    def create(body: dict | None = None):  # textcraft's "commands" and "goal" choose nothing: its episode n starts with item n
        number = games.create()
        return number if not known.first else {key: number} | (games.reset(number, number) if name == "textcraft" else {})

    @app.post("/reset")
    def reset(body: Item):
        first = games.reset(getattr(body, key), getattr(body, known.item))
        return first if known.first else first["observation"]

    @app.post("/step")
    def step(body: Action):
        return games.step(getattr(body, key), body.action)

    @app.post("/close")
    def close(body: Id):
        return games.close(getattr(body, key))

    @app.get("/observation")
    def observation(id: int = Query(alias=key)):
        return games.last(id) if name == "babyai" else games.last(id)["observation"]

    @app.get("/detail")
    def detail(id: int = Query(alias=key)):
        return games.last(id)

    if hasattr(games.free[0], "goals"):
        @app.get("/goals")
        def goals(id: int):
            with games.at(id) as episode:
                return {"goals": episode.env.goals()}

    def stop(*_):
        # a request that is under way has 5 s; a world that hangs is not waited for
        end = threading.Timer(8.0, os._exit, (0,))
        end.daemon = True
        server.should_exit = True
        end.start()

    def reap():
        while not server.should_exit:
            time.sleep(min(10.0, idle_seconds / 4))
            games.reap()

    async def bounded(scope, receive, send):  # no body of the protocol comes near 1 MiB
        length = next((value for key, value in scope.get("headers", ()) if key == b"content-length"), b"0")
        if scope["type"] == "http" and not (length.isdigit() and int(length) <= 1 << 20):
            await JSONResponse({"detail": "the body is too large"}, 413)(scope, receive, send)
        else:
            await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(bounded, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=600))
    server.handle_exit = stop
    threading.Thread(target=reap, daemon=True).start()
    print(f"{name} on http://{host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
    for env in [*games.free, *(e.env for e in games.episodes.values() if e.env)]:
        env.close()


class Parser(argparse.ArgumentParser):
    """Says what is wrong by a ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 and one line on stderr for bad usage."""
    parser = Parser(prog="envs.py", description="Serve a world in AgentGym's HTTP protocol.", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"], help="or play: see python envs.py play --help")
    parser.add_argument("--env", default="babyai", help=", ".join(WORLDS))
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in: there is no password")
    parser.add_argument("--port", type=int, default=36001, help="0: any free one; the first line says which")
    parser.add_argument("--idle_seconds", type=float, default=3600.0, help="an episode that nobody touched for so long is closed")
    parser.add_argument("--max_episodes", type=int, default=0, help="at a time; 0: no limit")
    parser.add_argument("--env_args", default="", help="keyword arguments of the world: searchqa.topk=5")
    try:
        args = parser.parse_args(argv)
        if not 0 < args.idle_seconds < float("inf") or args.max_episodes < 0:
            raise ValueError("--idle_seconds must be positive and --max_episodes must not be negative")
        serve(args.env, args.host, args.port, args.idle_seconds, args.max_episodes, env_options(args.env_args, [args.env]).get(args.env))
    except ValueError as e:
        print(f"envs.py: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    return 0
