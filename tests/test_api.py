"""Models behind an OpenAI-compatible server: the same items, prompts and measures as a model here;
keys are never written; a failing server ends the evaluation with one line."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from conftest import run_script
from serving import serving

import agent
import eval as evaluation
from envs import EnvError, EnvPool, items
from models.served import ConversationRefused, ModelError, ServedModel, play_served
from rollout import Rollouts, rollout

LOOK = "Action: inventory"  # a reply with an action that is always valid in TextCraft


@contextmanager
def server(answer):
    """answer(body, headers) -> (status, the reply as a string, or the whole JSON: a dict, or
    bytes)"""
    def respond(request):
        status, reply = 404, {}
        if request.path == "/v1/chat/completions":
            status, reply = answer(json.loads(request.body), request.headers)
        if isinstance(reply, str):
            choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
            reply = {"choices": [choice], "usage": {"total_tokens": 9}}
        headers = {"Retry-After": "1"} if status == 429 else {}
        return status, headers, reply if isinstance(reply, bytes) else json.dumps(reply)

    with serving(respond) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def pauses(monkeypatch):
    """A server that fails is asked again at once -> the seconds that would have passed."""
    asked_for = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", asked_for.append)
    return asked_for


def play(url, names, horizon, **how):
    """Play the items with the server's model."""
    with EnvPool() as pool:
        return play_served(ServedModel("m", url), pool, names, horizon, Rollouts(slots=16, **how))


def ask(url, text="", **how):
    return ServedModel("m", url, **how)([{"role": "user", "content": text}])


def roles_and_texts(messages):
    return [(message["role"], message["content"].strip()) for message in messages]


# ---- what is played ----


@pytest.mark.parametrize("env, how", [("babyai", {}),
                                      ("textcraft", dict(agent_args="plan=true reflect=true")),
                                      ("searchqa", {})])
def test_the_same_replies_make_the_same_trajectories(tiny, env, how):
    """What the tiny model said in a rollout, said again over HTTP."""
    if env == "searchqa":
        pytest.importorskip("bm25s")
    names = items(env, "test")[:12]
    config = Rollouts(max_tokens=32, slots=16, **how)
    with EnvPool() as pool:
        here = rollout(*tiny, pool, names, 4, config)
    said = {}  # a conversation -> the reply to it
    for t in here:
        for n in range(3, len(t.messages), 2):
            said[json.dumps(roles_and_texts(t.messages[:n]))] = t.messages[n]["content"]

    def answer(body, _):
        assert body["model"] == "m" and body["max_tokens"] == 32
        return 200, said[json.dumps(roles_and_texts(body["messages"]))]

    reported_by = []  # it may write a file: two threads at once would lose a trajectory
    with server(answer) as url, EnvPool() as pool:
        there = play_served(ServedModel("m", url, max_tokens=32), pool, names, 4, config,
                            lambda t: reported_by.append(threading.current_thread()))
    assert reported_by == [threading.current_thread()] * 12
    assert len(there) == 12 and sum(t.turns for t in there) > 12
    for a, b in zip(here, there, strict=True):
        for name in ("item", "group", "sample", "status", "turns", "valid_actions", "score",
                     "success", "reward", "progress"):
            assert getattr(a, name) == getattr(b, name), name
        assert roles_and_texts(a.messages) == roles_and_texts(b.messages)
        assert all(m["content"] == m["content"].strip() for m in b.messages[::2])


def test_replies_end_at_the_worlds_stop_strings():
    pytest.importorskip("bm25s")
    with server(lambda *_: (200, "<search> Tavi </search> and <answer> x </answer>")) as url:
        (t,) = play(url, ["searchqa_0"], 1)
    assert t.messages[3]["content"] == "<search> Tavi </search>"
    assert t.status == "horizon" and t.valid_actions == 1


def test_a_failed_environment_is_no_reward_of_zero():
    made = []

    def gone(name):
        made.append(name)
        raise EnvError("gone")

    with server(lambda *_: (200, "x")) as url, EnvPool(make=gone) as pool:
        (t,) = play_served(ServedModel("m", url), pool, ["textcraft_0"], 1, Rollouts(retries=1))
    assert t.status == "env_error" and t.error == "fault: gone" and len(made) == 2


@pytest.mark.parametrize("error, status", [
    ({"error": "too many tokens"}, "length"),
    ({"error": "content management policy", "request": {"max_tokens": 64}}, "env_error")])
def test_a_refused_conversation_ends_and_the_others_go_on(error, status):
    """One that is too long has its result; any other counts as nothing and is not begun again."""
    asked = []

    def answer(body, _):
        asked.append(body["seed"])
        return (200, LOOK) if len(body["messages"]) < 7 else (400, error)

    with server(answer) as url:
        played = play(url, ["textcraft_0", "textcraft_1"], 5)
    assert [(t.status, t.turns) for t in played] == [(status, 2)] * 2
    for t in played:
        assert ("content management" in t.error) == (status == "env_error")
    assert len(asked) == 6 == len(set(asked))


def test_a_first_prompt_that_is_refused_is_one_conversation_once_the_server_has_replied():
    def answer(body, _):
        if "first" in str(body["messages"]):
            return 400, {"error": "content management policy"}
        return 200, LOOK

    first = [{"role": "user", "content": "first"}]
    with server(answer) as url:
        model = ServedModel("m", url)
        with pytest.raises(ModelError):  # the form of the requests may be wrong
            model(first)
        assert model([{"role": "user", "content": "another"}])[0] == LOOK
        with pytest.raises(ConversationRefused):
            model(first)


def test_when_the_server_fails_nobody_goes_on_asking_it():
    asked = []

    def answer(body, _):
        asked.append(1)
        return (200, LOOK) if len(asked) < 6 else (401, {})

    names = [f"textcraft_{n}" for n in range(40)]
    with server(answer) as url, EnvPool() as pool, pytest.raises(ModelError, match="401"):
        play_served(ServedModel("m", url), pool, names, 50, Rollouts(slots=4))
    assert len(asked) < 16


def test_an_item_that_does_not_exist_is_named_and_so_is_a_server_that_is_not_there(
        pauses, capsys):
    with pytest.raises(ModelError, match="127.0.0.1:9.*Connection"):
        play("http://127.0.0.1:9/v1", ["textcraft_0"], 3)
    assert 120 <= sum(pauses) <= 135  # two minutes
    with pytest.raises(ValueError, match="textcraft_-1"):
        play("http://127.0.0.1:9/v1", ["textcraft_-1"], 3)
    # The command asks once, before it loads anything.
    assert evaluation.main(["--model", "openai:m", "--base_url", "http://127.0.0.1:9/v1"]) == 1
    assert "port=9" in capsys.readouterr().err and len(pauses) == 6


# ---- one request ----


def test_a_reply_that_trickles_in_has_a_deadline():
    def drip(request):
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        with suppress(OSError):
            for _ in range(300):
                request.wfile.write(b" ")
                threading.Event().wait(0.1)  # `pauses` of the next test replaces time.sleep

    start = time.monotonic()
    with serving(drip) as port, pytest.raises(ModelError, match="timed out"):
        ask(f"http://127.0.0.1:{port}", timeout=1, tries=1)
    assert time.monotonic() - start < 20


def test_a_request_that_the_server_calls_wrong_is_not_repeated_and_the_key_is_not_shown(
        monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    asked = []

    def answer(body, headers):
        asked.append(1)
        return 401, {"error": "x" * 170 + headers["Authorization"]}

    with server(answer) as url, pytest.raises(ModelError, match=r"Bearer \*\*\*") as caught:
        ask(url)
    assert "secret" not in str(caught.value) and len(asked) == 1


def test_a_server_that_is_busy_is_asked_again_when_it_says_so(pauses):
    replies = iter([(429, {}), (503, {}), (200, "yes")])
    with server(lambda *_: next(replies)) as url:
        assert ask(url) == ("yes", False, 9)
    assert pauses[0] == 1 and 2 <= pauses[1] <= 3  # Retry-After, then urllib3's own pause


@pytest.mark.parametrize("status, reply, says", [
    (500, {}, "status 500"),
    (200, {}, "KeyError"),
    (200, {"choices": [{"message": {"content": [{"type": "text"}]}}]}, "TypeError"),
    (200, b"[" * 100_000, "RecursionError")])
def test_a_server_that_fails_every_time_is_given_up(pauses, status, reply, says):
    asked = []

    def answer(*_):
        asked.append(1)
        return status, reply

    with server(answer) as url, pytest.raises(ModelError, match=says):
        ask(url, tries=3)
    assert len(asked) == (3 if status == 500 else 1)


@pytest.mark.parametrize("message, reason", [
    ({"content": None, "reasoning_content": "I think long"}, "length"),
    ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"), ({}, "stop")])
def test_replies_without_text_are_empty_ones_and_are_counted_by_their_reason(
        message, reason, capsys):
    reply = {"choices": [{"message": message, "finish_reason": reason}]}
    with server(lambda body, headers: (200, reply)) as url:
        (t,) = play(url, ["textcraft_1"], 3)
    assert t.turns == 3 and t.valid_actions == 0 and t.messages[3]["content"] == ""
    assert f"3 replies were empty (finish_reason {reason}: 3)" in capsys.readouterr().err


def test_a_reply_that_a_filter_held_back_is_no_failure_of_the_model():
    reply = {"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}
    with server(lambda body, headers: (200, reply)) as url:
        (t,) = play(url, ["textcraft_1"], 3)
    assert t.status == "env_error" and "content_filter" in t.error


def test_parameters_that_a_server_does_not_know_are_left_out_or_called_by_their_newer_name():
    heard = []
    together = threading.Barrier(2)  # neither request knows of the other's answer

    def answer(body, _):
        heard.append(body)
        if len(heard) <= 2:
            together.wait(20)
        if body["messages"][0]["content"] == "late" and len(heard) <= 2:
            time.sleep(1)  # the other one has a reply by then
        if "max_tokens" in body:
            return 400, {"error": "Unsupported parameter: 'max_tokens' is not supported with this "
                                  "model. Use 'max_completion_tokens' instead."}
        if "seed" in body:
            return 422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}
        return 200, "yes"

    with server(answer) as url, ThreadPoolExecutor(2) as threads:
        model = ServedModel("m", url, max_tokens=7, tries=1)
        asked = [[{"role": "user", "content": name}] for name in ("early", "late")]
        assert [reply for reply, *_ in threads.map(model, asked)] == ["yes", "yes"]
    assert len(heard) == 5
    assert heard[-1] == {"model": "m", "max_completion_tokens": 7, "messages": asked[1]}


# ---- the command ----


def test_every_setting_reaches_the_server_and_the_key_is_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    heard, keys = [], set()

    def answer(body, headers):
        heard.append(body)
        keys.add(headers["Authorization"])
        return 200, "get"

    with server(answer) as url:
        done = run_script(
            "eval.py", "--env", "textcraft", "--model", "openai:some/model", "--base_url", url,
            "--items", "2", "--samples", "2", "--horizon", "4", "--temperature", "0.5",
            "--top_p", "0.25", "--max_tokens", "7", "--max_length", "5", "--agent_args",
            "plan=true", "--action_format", "plain", "--out", tmp_path / "r.json",
            "--trajectories", tmp_path / "t.jsonl")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["success"], result["turns"]) == (0, 1)
    assert result["config"]["model"] == "openai:some/model"
    played = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    # The server counts 9 tokens, which is above --max_length, after the first turn.
    assert [(t["group"], t["sample"], t["turns"], t["status"]) for t in played] == [
        (group, sample, 1, "length") for group in range(2) for sample in range(2)]
    assert len(heard) == 4 == len({body["seed"] for body in heard})
    for body in heard:
        sampling = (body["model"], body["temperature"], body["top_p"], body["max_tokens"])
        assert sampling == ("some/model", 0.5, 0.25, 7)
        assert body["messages"][2]["content"].endswith(agent.PLAN.strip())
        assert "Thought:" not in body["messages"][0]["content"]
    assert keys == {"Bearer sk-secret"}
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert len(written) == 2
    assert not any("secret" in text for text in (done.stdout, done.stderr, *written))


def test_an_evaluation_whose_server_fails_goes_on_later(tmp_path, capsys):
    """What was played is kept, and a first request that is refused is one conversation."""
    answers = []
    file = tmp_path / "t.jsonl"
    flags = ["--env", "textcraft", "--model", "openai:m", "--items", "9", "--horizon", "2",
             "--slots", "1", "--out", str(tmp_path / "r.json"), "--trajectories", str(file)]
    with server(lambda *_: answers.pop(0) if answers else (401, {"error": "no key"})) as url:
        flags += ["--base_url", url]
        answers += [(200, LOOK)] * 6  # three trajectories
        assert evaluation.main(flags) == 1
        assert len(file.read_text().splitlines()) == 3
        answers += [(400, {"error": "content management policy"})] + [(200, LOOK)] * 2
        assert evaluation.main(flags) == 1
    assert "status 401" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "r.json").exists()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [t["status"] for t in kept] == ["horizon"] * 3 + ["env_error", "horizon"]
    assert [t["group"] for t in kept] == [0, 1, 2, 3, 4]
