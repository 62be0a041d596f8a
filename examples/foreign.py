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
import math
import os
import queue
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agent import Agent, Play
from envs import EnvError, load_named

MAX_BODY = 2**24  # bytes of a request
ROLES = {"system", "developer", "user", "assistant", "tool"}
FIELDS = {"role", "content", "name", "tool_call_id", "refusal", "tool_calls"}  # of a message


class Request:
    """A request that waits for its reply."""

    def __init__(self, body: dict):
        self.messages = messages_of(body)
        self.tools = body.get("tools") or None
        if self.tools and not all(isinstance(tool, dict) for tool in self.tools):
            raise ValueError("tools: a list of objects")
        # Gets (text, cut), an exception, or None: the episode has ended.
        self.reply = queue.SimpleQueue()


def messages_of(body: dict) -> list[dict[str, str]]:
    """The messages of a request, whose contents are plain text. Raises ValueError for what this
    server does not do."""
    if body.get("stream"):
        raise ValueError("stream: this server answers in one piece")
    if body.get("n") not in (None, 1):
        raise ValueError("n: this server gives one reply")
    messages = []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):  # of parts
            if any(part["type"] != "text" for part in content):
                raise ValueError("content: this server takes text only")
            content = "".join(part["text"] for part in content)
        unknown = {name for name in message if message[name]} - (FIELDS - {"tool_calls"})
        if message["role"] not in ROLES or not isinstance(content, str) or unknown:
            raise ValueError(f"a message of role {message['role']} with {sorted(message)}: this "
                             "server takes text contents, and no tool_calls")
        content.encode()  # raises UnicodeEncodeError for half a surrogate pair
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
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

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
                return self.answer(404, error("there is only /EPISODE/v1/chat/completions"))
            request = Request(body)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            self.close_connection = True
            return self.answer(400, error(f"{type(e).__name__}: {e}"))
        inbox = self.server.episodes.get(episode)
        reply = None
        if inbox is not None:
            inbox.put(request)
        while inbox is not None and reply is None:
            try:
                reply = request.reply.get(timeout=1)
                break
            except queue.Empty:  # the episode may have ended before it saw the request
                if self.server.episodes.get(episode) is not inbox:
                    break
        if reply is None:  # a client does not try a 410 again
            return self.answer(410, error("this episode has ended"))
        if isinstance(reply, Exception):
            return self.answer(400, error(str(reply)))
        text, cut = reply
        choice = {"index": 0, "finish_reason": "length" if cut else "stop", "logprobs": None,
                  "message": {"role": "assistant", "content": text}}
        self.answer(200, {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion",
                          "created": int(time.time()), "model": str(body.get("model")),
                          "choices": [choice]})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_):
        pass


def error(message: str) -> dict:
    """The body of an answer that is no reply."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


STARTING = threading.Lock()


@cache
def only_server() -> Server:
    return Server()


def server() -> Server:
    """The server of this process."""
    with STARTING:
        return only_server()


class Ended:
    """What a program leaves in the queue of its episode when it has ended."""

    def __init__(self, reward: float | None = None, failure: str = ""):
        self.reward = reward
        self.failure = failure


def agent(play: Play, run: str = "", command: str = "") -> Agent:
    """The program as an agent; one of `run` and `command` says which."""
    if bool(run) == bool(command):
        raise ValueError("examples/foreign.py: give either run=FILE.py:FUNCTION or command='...'")
    start = start_thread if run else start_process
    name = secrets.token_hex(16)
    inbox = server().episodes[name] = queue.SimpleQueue()
    stop = start(run or command, f"{server().url}/{name}/v1", play.number, inbox)
    try:
        while True:
            # The decode loop gives this thread up at the same time: it must not wait for ever.
            try:
                request = inbox.get(timeout=play.deadline)
            except queue.Empty:
                raise EnvError(f"the program sent no request for {play.deadline:g} s") from None
            if isinstance(request, Ended):
                break
            play.tools = request.tools
            reply = None
            try:
                reply = (yield request.messages), play.cut
            except ValueError as e:  # the chat template does not show such messages
                reply = e
            finally:
                request.reply.put(reply)
        if request.failure or not play.turns:
            raise EnvError(f"the program failed: {request.failure or 'it has sent no request'}")
        play.earn(request.reward)
    finally:  # also when the horizon is reached, or the run stops
        del server().episodes[name]
        while not inbox.empty():
            if isinstance(request := inbox.get(), Request):
                request.reply.put(None)
        stop()


def start_thread(run: str, url: str, item: int, inbox: queue.SimpleQueue) -> Callable[[], None]:
    """Call run(url, item) in a thread. -> what ends it: nothing can, but its next request fails."""
    function = load_named(run, {}, "program")

    def call():
        try:
            inbox.put(Ended(finite(function(url, item))))
        except (Exception, SystemExit) as e:
            inbox.put(Ended(failure=f"{type(e).__name__}: {e}"))

    threading.Thread(target=call, daemon=True).start()
    return lambda: None


RUNNING: set[subprocess.Popen] = set()  # programs that have not ended


def kill(process: subprocess.Popen) -> None:
    """End a program, with the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


atexit.register(lambda: [kill(process) for process in list(RUNNING)])


def start_process(command: str, url: str, item: int,
                  inbox: queue.SimpleQueue) -> Callable[[], None]:
    """Run a command with {url} and {item} filled in -> what kills it."""
    words = [word.replace("{url}", url).replace("{item}", str(item))
             for word in shlex.split(command)]
    environment = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                               stderr=errors, start_new_session=True)

    RUNNING.add(process)

    def wait():
        code = process.wait()
        RUNNING.discard(process)
        try:
            if code:
                raise ValueError(f"exit code {code}: {last_line(errors)}")
            inbox.put(Ended(finite(last_line(out))))
        except ValueError as e:
            inbox.put(Ended(failure=str(e)))

    threading.Thread(target=wait, daemon=True).start()
    return lambda: kill(process)


def last_line(file) -> str:
    """The last line that a program has written into a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
    return (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]


def finite(reward: object) -> float:
    """A program's result as a reward. Raises ValueError for what is not a finite number."""
    try:
        number = float(reward)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{reward!r} is no reward") from e
    if not math.isfinite(number):
        raise ValueError(f"{reward!r} is no reward")
    return number
