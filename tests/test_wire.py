"""Servers that answer with what no client should follow or wait for: every client of ours."""

from contextlib import contextmanager

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
    "retriever": (lambda url: Retriever(url, timeout=1).search("x", 1), EnvError),
}
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
@pytest.mark.parametrize("location", ["OTHER/step", "http://[::1"])
def test_a_redirect_in_an_episode_is_a_fault(path, location):
    good = {"/create": {"id": 0}, "/reset": {"observation": "Your goal: go"}, "/close": True}
    with stand_in_server(lambda *_: (200, GOOD)) as (other, seen):
        def answer(request):
            if request.path == f"/{path}":
                return 307, {"Location": location.replace("OTHER", other)}, ""
            return 200, {}, evaluation.json.dumps(good[request.path])

        with serving(answer, protocol_version="HTTP/1.1") as port:
            env = RemoteEnv("babyai", f"http://127.0.0.1:{port}")
            with pytest.raises(EnvError, match="status 307"):
                env.reset(0)
                env.step("turn left")
        assert seen == []


def test_an_evaluation_does_not_ask_whom_the_models_server_names():
    with redirecting(302, "OTHER/") as (url, seen):
        evaluation.parse_eval_config(["--model", "openai:m", "--base_url", url])
        assert seen == []
