"""Servers on this machine, for tests: in a thread, or ours in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import ROOT


class Handler(BaseHTTPRequestHandler):
    """Answers what its function `answer` gives for the request, which has its `body`."""

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (answered := self.answer(self)) is None:
            self.close_connection = True
            return
        status, headers, content = answered
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # the client hung up. A traceback printed here would call
            self.wfile.write(data)  # ast.parse, which in Python 3.11 fails beside another thread's

    do_POST = do_GET

    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def serving(answer, **attributes):
    """A server on a free port -> the port. answer(request) -> (status, headers, text or bytes), or
    None to break the connection off; attributes: other members of the handler."""
    handler = type("Answering", (Handler,), {"answer": staticmethod(answer), **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def stand_in_server(answer):
    """A server of JSON -> (url, list of the (path, body) that came, in order).

    answer(path, body) -> (status, reply), where the reply is JSON or the bytes to send, or None to
    break the connection off.
    """
    seen = []

    def respond(request):
        body = json.loads(request.body or "null")
        seen.append((request.path, body))
        answered = answer(request.path, body)
        if answered is None:
            return None
        status, reply = answered
        return status, {}, reply if isinstance(reply, bytes) else json.dumps(reply)

    with serving(respond, protocol_version="HTTP/1.1") as port:
        yield f"http://127.0.0.1:{port}", seen


@contextmanager
def refusing():
    """An address at which connections are refused. Nobody else can listen there meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def our_server(env, *flags, seconds=30):
    """Run our server of a world, or of "slow", in a process -> (url, process). seconds: that a
    client may take to send a request."""
    command = [sys.executable, "tests/slow.py", "serve", "--env", env, "--port", "0", *flags]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "REQUEST_SECONDS": str(seconds)}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process.stdout.readline().split()[-1], process
        finally:
            process.kill()
