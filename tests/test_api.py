"""Models behind an OpenAI-compatible server: same items, prompts and figures; keys go nowhere; faults end with a line."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT

import eval as evaluation
from envs import EnvError, EnvPool, items
from eval import summarise
from rollout import rollout


@contextmanager
def server(answer):
    """answer(body, headers) -> (status, reply as a string, or a dict)"""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(body, self.headers) if self.path == "/v1/chat/completions" else (404, {})
            if isinstance(reply, str):
                reply = {"choices": [{"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}], "usage": {"total_tokens": 9}}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Retry-After", "1" if status == 429 else "soon")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        running.server_close()


@pytest.mark.parametrize("env, how", [("babyai", {}), ("textcraft", dict(plan=True, reflect=True)), ("searchqa", {})])
def test_the_same_replies_make_the_same_trajectories(tiny, env, how):
    """What the tiny model said in a rollout, said again over HTTP: same texts, rewards and figures."""
    if env == "searchqa":
        pytest.importorskip("bm25s")
    names = items(env, "test")[:12]
    with EnvPool() as pool:
        here = rollout(*tiny, pool, names, 4, max_tokens=32, **how)
    said = {}
    for t in here:
        for n in range(3, len(t.messages), 2):
            said[json.dumps([m["content"].strip() for m in t.messages[:n]])] = t.messages[n]["content"]

    def answer(body, _):
        assert body["model"] == "m" and body["max_tokens"] == 32
        assert [m["role"] for m in body["messages"]][:4] in (["user", "assistant", "user"], ["user", "assistant", "user", "assistant"])
        return 200, said[json.dumps([m["content"].strip() for m in body["messages"]])]
    with server(answer) as url, EnvPool() as pool:
        there = evaluation.play_served(evaluation.ServedModel("m", url, max_tokens=32), pool, names, 4, **how)
    for a, b in zip(here, there):
        assert (a.item, a.status, a.turns, a.valid_actions, a.score, a.success, a.reward, a.progress) == (
            b.item, b.status, b.turns, b.valid_actions, b.score, b.success, b.reward, b.progress)
        assert [m["content"].strip() for m in a.messages] == [m["content"].strip() for m in b.messages]
    assert summarise(here, {}, [1], 0)["success"] == summarise(there, {}, [1], 0)["success"]


def run(*args, key=None):
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"} | ({"OPENAI_API_KEY": key} if key else {})
    return subprocess.run([sys.executable, "eval.py", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_the_command_writes_the_same_table_and_never_the_key(tmp_path):
    heard = []

    def answer(body, headers):
        heard.append(headers["Authorization"])
        return 200, "Thought: I look.\nAction: inventory"
    with server(answer) as url:
        done = run("--env", "textcraft", "--model", "openai:some/model", "--base_url", url, "--items", "6", "--horizon", "2",
                   "--out", str(tmp_path / "r.json"), "--trajectories", str(tmp_path / "t.jsonl"), key="sk-secret")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["success"] == 0 and result["turns"] == 2 and result["valid_actions"] == 1 and result["config"]["model"] == "openai:some/model"
    assert set(heard) == {"Bearer sk-secret"}
    assert not any("secret" in text for text in (done.stdout, done.stderr, *(p.read_text() for p in tmp_path.iterdir())))
    (line, *_) = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][3]["content"] == "Thought: I look.\nAction: inventory"


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_ends_it(monkeypatch):
    monkeypatch.setattr(evaluation.random, "uniform", lambda a, b: 0.0)  # at once
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    with server(lambda body, headers: (401, {"error": "x" * 170 + headers["Authorization"]})) as url, pytest.raises(evaluation.ModelError, match=r"Bearer \*\*\*"):
        evaluation.ServedModel("m", url)([])
    replies = iter([(429, {}), (503, {}), (200, {"choices": []}), (200, "yes")])
    with server(lambda *_: next(replies)) as url:
        assert evaluation.ServedModel("m", url)([]) == ("yes", False, 9)
    for status, reply, says in ((401, {"error": "no key"}, "status 401"), (500, {}, "status 500"), (200, {}, "KeyError")):
        with server(lambda *_: (status, reply)) as url, pytest.raises(evaluation.ModelError, match=says):
            evaluation.ServedModel("m", url)([])
    with server(lambda *_: (200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]})) as url:
        assert evaluation.ServedModel("m", url)([]) == ("", True, 0)


def test_what_is_wrong_is_one_line(capsys, monkeypatch):
    import eval as evaluation
    with server(lambda *_: (401, {"error": "no key"})) as url:
        assert evaluation.main(["--env", "textcraft", "--model", "openai:m", "--base_url", url, "--items", "3"]) == 1
    assert "status 401" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\u00e9")
    for args, says in ((("--model", "openai:m"), "needs --base_url"), (("--model", "openai:m", "--base_url", "http://me:word@x/v1"), "without a password"),
                       (("--base_url", "http://x"), "is for --model openai:NAME"),
                       (("--model", "openai:m", "--base_url", "http://x", "--top_k", "3"), "run here"),
                       (("--model", "openai:m", "--base_url", "http://x"), "OPENAI_API_KEY holds")):
        assert evaluation.main(["--env", "textcraft", *args]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and says in said


def test_replies_end_at_the_worlds_stop_strings_and_faults_of_a_world_are_no_reward():
    pytest.importorskip("bm25s")
    with server(lambda *_: (200, "<search> Tavi </search> and then <answer> x </answer>")) as url, EnvPool() as pool:
        (t,) = evaluation.play_served(evaluation.ServedModel("m", url), pool, ["searchqa_0"], 1)
    assert t.messages[3]["content"] == "<search> Tavi </search>" and t.status == "horizon" and t.valid_actions == 1

    def gone(name):
        raise EnvError("gone")
    with server(lambda *_: (200, "x")) as url, EnvPool(make=gone) as pool:
        (t,) = evaluation.play_served(evaluation.ServedModel("m", url), pool, ["textcraft_0"], 1, retries=1)
    assert t.status == "env_error" and t.error == "fault: gone"


def test_a_conversation_that_the_server_finds_too_long_ends_with_length_and_the_others_go_on():
    def answer(body, _):
        return (200, "Action: inventory") if len(body["messages"]) < 7 else (400, {"error": "too many tokens"})
    with server(answer) as url, EnvPool() as pool:
        for t in evaluation.play_served(evaluation.ServedModel("m", url), pool, ["textcraft_0", "textcraft_1"], 5):
            assert (t.status, t.turns, t.error) == ("length", 2, "")
    with server(lambda *_: (200, {"choices": [{"message": {"content": [{"type": "text"}]}}]})) as url, pytest.raises(evaluation.ModelError, match="no text"):
        evaluation.ServedModel("m", url, tries=1)([])


def test_when_the_server_fails_nobody_goes_on_asking_it():
    asked = []

    def answer(body, _):
        asked.append(1)
        return (200, "Action: inventory") if len(asked) < 6 else (401, {})
    with server(answer) as url, EnvPool() as pool, pytest.raises(evaluation.ModelError, match="401"):
        evaluation.play_served(evaluation.ServedModel("m", url), pool, [f"textcraft_{n}" for n in range(40)], 50, slots=4)
    assert len(asked) < 16


def test_a_server_that_is_not_there_is_named_and_the_model_can_play_again(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation.random, "uniform", lambda a, b: 0.0)
    with EnvPool() as pool:
        model = evaluation.ServedModel("m", "http://127.0.0.1:9/v1")
        with pytest.raises(evaluation.ModelError, match="127.0.0.1:9.*Connection"):
            evaluation.play_served(model, pool, items("textcraft", "test")[:16], 3)
        with pytest.raises(ValueError, match="textcraft"):
            evaluation.play_served(model, pool, ["textcraft_-1"], 3)
        with server(lambda *_: (200, "Action: inventory")) as url:
            model.url = f"{url}/chat/completions"
            (t,) = evaluation.play_served(model, pool, ["textcraft_0"], 2)
    assert t.status == "horizon"


def test_parameters_that_a_server_does_not_know_are_left_out_or_called_by_their_newer_name():
    heard = []

    def answer(body, _):
        heard.append(body)
        if "max_tokens" in body:
            return 400, {"error": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."}
        return (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}) if "seed" in body else (200, "yes")
    with server(answer) as url:
        model = evaluation.ServedModel("m", url, max_tokens=7)
        assert model([])[0] == model([])[0] == "yes"
    assert len(heard) == 4 and heard[-1] == {"model": "m", "temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 7, "messages": []}


def test_a_conversation_that_is_refused_counts_as_nothing_and_is_not_begun_again():
    asked = []

    def answer(body, _):
        asked.append(body["seed"])
        return (200, "Action: inventory") if len(body["messages"]) < 5 else (400, {"error": "content management policy"})
    with server(answer) as url, EnvPool() as pool:
        (t,) = evaluation.play_served(evaluation.ServedModel("m", url), pool, ["textcraft_0"], 5)
    assert t.status == "env_error" and "content management" in t.error and len(asked) == 2 == len(set(asked))


def test_a_busy_server_says_when_to_come_back(monkeypatch):
    waited, replies = [], iter([(429, {}), (200, "yes")])

    class Stop:
        def is_set(self):
            return False

        def wait(self, seconds):
            waited.append(seconds)
    monkeypatch.setattr(evaluation.random, "uniform", lambda a, b: 0.0)
    with server(lambda *_: next(replies)) as url:
        assert evaluation.ServedModel("m", url)([], stop=Stop())[0] == "yes"
    assert waited == [1.0]


def test_what_was_played_before_the_server_failed_is_kept(tmp_path):
    asked = []

    def answer(body, _):
        asked.append(1)
        return (200, "Action: inventory") if len(asked) < 8 else (401, {})
    with server(answer) as url:
        done = run("--env", "textcraft", "--model", "openai:m", "--base_url", url, "--items", "9", "--horizon", "2", "--slots", "1",
                   "--out", str(tmp_path / "r.json"), "--trajectories", str(tmp_path / "t.jsonl"))
    assert done.returncode == 1 and "status 401" in done.stderr and not (tmp_path / "r.json").exists()
    assert [json.loads(line)["turns"] for line in (tmp_path / "t.jsonl").read_text().splitlines()] == [2, 2, 2]
