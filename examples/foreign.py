"""Train a program that somebody else wrote, through an OpenAI-compatible server on this machine.

    python train.py --agent examples/foreign.py:agent --agent_args "run=examples/their_agent.py:run"
    python train.py --agent examples/foreign.py:agent \
        --agent_args "command='python their_agent.py {url} {item}'"

run: a function of (url, item number) -> reward, in a thread of its own for each episode. command: a
process for each episode; the last line that it prints is the reward. The program sends requests to
{url}/chat/completions as to any such server; its environment is its own. To the decode loop it is
one more agent: it yields the messages of each request, and its reply is the policy's. Messages that
extend the last request's extend the segment, others begin a new one.

One request of an episode is answered at a time. A program that fails, or that sends no request
within --deadline seconds, gives an `env_error`. Once its episode has ended (here also at the
horizon, with the reward 0), requests get status 410. `temperature`, `max_tokens` and the like in a
request have no effect: the run's settings hold.
"""

import atexit
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError
from contextlib import suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agent import Agent, Play
from envs import EnvError, load_named

MAX_BODY = 2**24  # bytes of a request
ROLES = {"system", "developer", "user", "assistant", "tool"}
FIELDS = {"role", "content", "name", "tool_call_id", "refusal"}  # of a message


class Request:
    """A request that waits for its reply: a Future of (text, whether it was cut), an exception, or
    cancelled because the episode has ended."""

    def __init__(self, body: dict):
        self.messages = messages_of(body)
        self.tools = body.get("tools") or None
        self.reply = Future()


def messages_of(body: dict) -> list[dict[str, str]]:
    """The messages of a request, whose contents are plain text. Raises ValueError, LookupError or
    TypeError for what this server does not do."""
    if body.get("stream") or body.get("n") not in (None, 1):
        raise ValueError("stream, n: this server gives one reply, in one piece")
    messages = []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):  # of parts
            content = "".join(part["text"] for part in content)
        str.encode(content)  # raises for what is no text
        unknown = {name for name, value in message.items() if value} - FIELDS
        if message["role"] not in ROLES or unknown:
            raise ValueError(f"a message of role {message['role']} with {sorted(message)}: this "
                             "server takes text contents, and no tool_calls")
        role = "system" if message["role"] == "developer" else message["role"]
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("messages: the last one is not the model's own")
    return messages


class Server(ThreadingHTTPServer):
    """Passes requests for /EPISODE/v1/chat/completions on to the episode's queue."""

    daemon_threads = True
    request_queue_size = 1024  # all slots may ask at once

    def __init__(self):
        self.episodes: dict[str, queue.SimpleQueue] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        """A client that has gone is nothing to tell."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 600  # seconds without a byte from the client

    def do_POST(self):
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= MAX_BODY:
                raise ValueError(f"a body has at most {MAX_BODY} bytes")
            body = json.loads(self.rfile.read(length))
            _, episode, *rest = self.path.split("/")
            if rest != ["v1", "chat", "completions"]:
                raise ValueError("there is only /EPISODE/v1/chat/completions")
            request = Request(body)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            self.close_connection = True
            return self.answer(400, f"{type(e).__name__}: {e}")
        inbox = self.server.episodes.get(episode)
        if inbox is not None:
            inbox.put(request)
        while self.server.episodes.get(episode) is inbox is not None:
            # The episode may end before it has seen the request.
            with suppress(TimeoutError, CancelledError, ValueError):
                request.reply.result(timeout=1)
            if request.reply.done():
                break
        if request.reply.cancelled() or not request.reply.done():
            return self.answer(410, "this episode has ended")  # a client does not try it again
        if request.reply.exception():
            return self.answer(400, str(request.reply.exception()))
        text, cut = request.reply.result()
        choice = {"index": 0, "finish_reason": "length" if cut else "stop", "logprobs": None,
                  "message": {"role": "assistant", "content": text}}
        self.answer(200, {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion",
                          "created": int(time.time()), "model": str(body.get("model")),
                          "choices": [choice]})

    def answer(self, status: int, body: dict | str) -> None:
        """Send a body, or what is wrong."""
        if isinstance(body, str):
            body = {"error": {"message": body, "type": "invalid_request_error"}}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = cache(Server)  # the server of this process


def agent(play: Play, run: str = "", command: str = "") -> Agent:
    """The program as an agent; one of `run` and `command` says which."""
    if bool(run) == bool(command):
        raise ValueError("examples/foreign.py: give either run=FILE.py:FUNCTION or command='...'")
    host, name, inbox = server(), secrets.token_hex(16), queue.SimpleQueue()
    host.episodes[name] = inbox
    url = f"{host.url}/{name}/v1"
    process = None
    if command:
        process = start_process(command, url, play.number)
        program = partial(result_of, process)
    else:
        program = partial(load_named(run, {}, "program"), url, play.number)
    threading.Thread(target=play_to_the_end, args=(program, inbox), daemon=True).start()
    try:
        while True:
            try:  # the decode loop gives this thread up at the same time
                request = inbox.get(timeout=play.deadline)
            except queue.Empty:
                raise EnvError(f"the program sent no request for {play.deadline:g} s") from None
            if not isinstance(request, Request):
                break
            play.tools = request.tools
            try:
                request.reply.set_result(((yield request.messages), play.cut))
            except ValueError as e:  # the chat template does not show such messages
                request.reply.set_exception(e)
            finally:
                request.reply.cancel()  # unless it has one
        if isinstance(request, BaseException) or not play.turns:
            raise EnvError(f"the program failed: {request!r} after {play.turns} requests")
        play.earn(request)
    finally:  # also when the horizon is reached, or the run stops
        del host.episodes[name]
        while not inbox.empty():
            if isinstance(request := inbox.get(), Request):
                request.reply.cancel()
        if process is not None:  # a thread cannot be ended, but its next request fails
            kill(process)


def play_to_the_end(program: Callable[[], object], inbox: queue.SimpleQueue) -> None:
    """In a thread: put the program's reward into the queue of its episode, or its exception."""
    try:
        inbox.put(float(program()))
    except (Exception, SystemExit) as e:
        inbox.put(e)


RUNNING: set[subprocess.Popen] = set()  # programs that have not ended


def kill(process: subprocess.Popen) -> None:
    """End a program, with the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


atexit.register(lambda: [kill(process) for process in list(RUNNING)])


def start_process(command: str, url: str, item: int) -> subprocess.Popen:
    """Run a command with {url} and {item} filled in."""
    words = [word.replace("{url}", url).replace("{item}", str(item))
             for word in shlex.split(command)]
    environment = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=pipe,
                               stderr=pipe, start_new_session=True)
    RUNNING.add(process)
    return process


def result_of(process: subprocess.Popen) -> str:
    """The last line that a program prints. Raises ValueError for one that fails."""
    out, errors = process.communicate()
    RUNNING.discard(process)
    if process.returncode:
        said = errors[-500:].decode(errors="replace")
        raise ValueError(f"exit code {process.returncode}: {said}")
    return out.decode(errors="replace").strip().rpartition("\n")[2]
