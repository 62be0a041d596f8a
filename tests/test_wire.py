"""Servers that answer with what no client should follow or wait for: every client of ours."""

import itertools
import json
import threading
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest
from serving import serving, stand_in_server

import envs
import eval as evaluation
from envs import EnvError
from models.served import ModelError, ServedModel
from worlds.agentgym import SERVERS, RemoteEnv
from worlds.searchqa import Retriever

# What each client asks a server for, and the error that it raises if the server fails.
CLIENTS = {
    "agentgym": (lambda url: RemoteEnv("babyai", url), EnvError),
    "openenv": (lambda url: envs.make_env("openenv", url=url), EnvError),
    "model": (lambda url: ServedModel("m", url, timeout=1, tries=1)([], 0), ModelError),
    "retriever": (lambda url: Retriever(url, timeout=1).search("x", 1), EnvError)}
# All of these are what some client takes for a good answer.
GOOD = {"id": 0, "choices": [{"message": {"content": "yes"}}],
        "result": [[{"document": {"contents": "title\ntext"}}]]}


@pytest.fixture(autouse=True)
def _no_servers_known_from_other_tests():
    SERVERS.clear()


# ---- redirects ----


@contextmanager
def redirecting(status, location):
    """A server that answers with a redirect -> its address, and what another server is asked."""
    with stand_in_server(lambda *_: (200, GOOD)) as (other, seen):
        target = location.replace("OTHER", other)
        with serving(lambda _: (status, {"Location": target}, "")) as port:
            yield f"http://127.0.0.1:{port}", seen


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("status, location", [
    *((status, "OTHER/create") for status in (301, 302, 303, 307, 308)),
    (307, "http://[::1"), (302, "http://h:port/"), (307, "/create"), (308, ""), (302, "\x00")])
def test_no_client_follows_a_redirect(name, status, location):
    ask, error = CLIENTS[name]
    with redirecting(status, location) as (url, seen):
        with pytest.raises(error, match=url):
            ask(url)
        assert seen == []


@pytest.mark.parametrize("path", ["reset", "step"])
@pytest.mark.parametrize("status, location", [
    *((status, "OTHER/step") for status in (301, 302, 303, 307)), (307, "http://[::1")])
def test_a_redirect_in_an_episode_is_a_fault(path, status, location):
    good = {"/create": {"id": 0}, "/reset": {"observation": "Your goal: go"}, "/close": True}
    with stand_in_server(lambda *_: (200, GOOD)) as (other, seen):
        def answer(request):
            if request.path == f"/{path}":
                return status, {"Location": location.replace("OTHER", other)}, ""
            return 200, {}, json.dumps(good[request.path])

        with serving(answer, protocol_version="HTTP/1.1") as port:
            env = RemoteEnv("babyai", f"http://127.0.0.1:{port}")
            with pytest.raises(EnvError, match=f"status {status}"):
                env.reset(0)
                env.step("turn left")
        assert seen == []


def test_an_evaluation_does_not_ask_whom_the_models_server_names():
    with redirecting(302, "OTHER/") as (url, seen):
        evaluation.parse_eval_config(["--model", "openai:m", "--base_url", url])
        assert seen == []


# ---- slow and endless replies ----

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {  # what a server sends first, what it then repeats, and the seconds between
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0),
    "header lines": (OK, b"X: y\r\n", 0),
    "long header lines": (OK, b"X: " + b"y" * 60_000 + b"\r\n", 0.02),
    "slow status": (b"HTTP/1.1 200 ", b"O", 0.05),
    "slow header": (OK + b"X: ", b"y", 0.05),
    "slow body": (OK + b"Content-Length: 1000\r\n\r\n", b" ", 0.05),
    "slow chunk": (CHUNKED, b"0", 0.05),
    "slow trailer": (CHUNKED + b"1\r\n \r\n0\r\n", b"X: y\r\n", 0.05),
}


@pytest.mark.parametrize("kind, name", [
    *((kind, "agentgym") for kind in ENDLESS),
    *itertools.product(("100 Continue", "slow header"), ("openenv", "model", "retriever"))])
def test_a_reply_has_a_limit_in_bytes_and_time(kind, name, monkeypatch):
    """The thread that asked is free again, and has not computed for long."""
    first, again, pause = ENDLESS[kind]
    monkeypatch.setattr(RemoteEnv, "create_timeout", 1.0)
    monkeypatch.setattr(RemoteEnv, "tries", 1)
    stop = threading.Event()

    def endless(request):
        with suppress(OSError):
            request.wfile.write(first)
            while not stop.wait(pause):
                request.wfile.write(again)

    ask, error = CLIENTS[name]
    with serving(endless) as port:
        failed = []

        def play():
            with pytest.raises(error, match=f":{port}"):
                ask(f"http://127.0.0.1:{port}")
            failed.append(time.thread_time())

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        thread.join(8)
        stop.set()
        assert failed and failed[0] < 1


@pytest.mark.parametrize("times, is_good", [(100, True), (3000, False)])  # 2.5 and 75 kB
def test_a_head_has_a_limit_in_bytes(times, is_good):
    def answer(request):
        request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * times)
        return 200, {}, json.dumps({"id": 0} if request.path == "/create" else True)

    with serving(answer) as port:
        with nullcontext() if is_good else pytest.raises(EnvError, match=f":{port}"):
            RemoteEnv("babyai", f"http://127.0.0.1:{port}").close()


def test_a_model_server_that_names_a_time_next_week_is_asked_before(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with serving(lambda _: (503, {"Retry-After": "600000"}, "")) as port:
        with pytest.raises(ModelError, match="status 503"):
            ServedModel("m", f"http://127.0.0.1:{port}", timeout=5, tries=3)([], 0)
    assert 0 < sum(pauses) <= 600
