"""OpenEnv's protocol: the client against our server, and against servers that do all wrong."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from unittest.mock import Mock

import pytest
import requests
from serving import our_server, refusing

import envs
from envs import EnvError, EnvPool, Step, UserError, make_env

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import connect  # noqa: E402
from websockets.sync.server import serve as serve_sockets  # noqa: E402

from worlds import openenv  # noqa: E402


def fields(**properties):
    return {"action": {"properties": properties | {"metadata": {}}}}


TEXT, NUMBER, REAL = {"type": "string"}, {"type": "integer"}, {"type": "number"}
SCHEMA = fields(move=TEXT)


@pytest.fixture(scope="module")
def babyai():
    """Our server -> its address. It may be resting for longer than a request may take."""
    flags = ("--protocol", "openenv", "--max_episodes", "3")
    with our_server("babyai", *flags, seconds=1) as (url, _):
        yield url


@pytest.fixture(scope="module")
def slow():
    """Our server of the world of tests/slow.py -> its address."""
    with our_server("slow", "--protocol", "openenv", "--idle_seconds", "2") as (url, _):
        yield url


@pytest.fixture(autouse=True)
def forget_descriptions():
    openenv.describe.cache_clear()
    openenv.tells_state.cache_clear()
    openenv.STARTS.clear()


def raw(url):
    """A WebSocket of our server."""
    return connect(url.replace("http", "ws") + "/ws", open_timeout=20)


def ask(ws, message):
    ws.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
    return json.loads(ws.recv(timeout=20))


@contextmanager
def stand_in(answer, schema=SCHEMA, described="Go.", upgrade=lambda connection: None):
    """An OpenEnv server in a thread -> its address. answer(message) -> what to send, a list for
    several messages, or None to break the connection off. GET /schema gives `schema` (a dict, or
    the text to send), /metadata a description. upgrade: what /ws gives, or None to connect."""
    def http(connection, request):
        if request.path == "/ws":
            return upgrade(connection)
        body = schema if request.path == "/schema" else {"description": described}
        return connection.respond(200, body if isinstance(body, str) else json.dumps(body))

    def play(connection):
        for message in connection:
            reply = answer(json.loads(message))
            if reply is None:
                return
            for each in reply if isinstance(reply, list) else [reply]:
                connection.send(each if isinstance(each, str) else json.dumps(each))

    server = serve_sockets(play, "127.0.0.1", 0, process_request=http)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    server.shutdown()


@contextmanager
def playing(answer, schema=SCHEMA, **options):
    """-> our client in an episode on such a server, and the messages that the server gets."""
    got = []

    with stand_in(lambda message: got.append(message) or answer(message), schema) as url:
        env = make_env("openenv", url=url, **options)
        env.reset(0)
        yield env, got
        env.close()


def healthy(message):
    """A good reply of a world that repeats the action and ends with "end"."""
    if message["type"] == "reset":
        return reply_with(observation={"place": f"seed {message['data']['seed']}"}, done=False)
    if message["type"] == "step":
        return reply_with(observation={"place": json.dumps(message["data"])}, reward=0.25,
                          done=message["data"].get("move") == "end")
    if message["type"] == "state":
        return {"type": "state", "data": {"episode_id": time.monotonic()}}
    return None  # "close" or "break"


def reply_with(**data):
    return {"type": "observation", "data": data}


# ---- against our server ----


def test_an_episode_on_our_server_is_the_one_played_in_this_process(babyai):
    here, finished = make_env("babyai"), 0
    with EnvPool({"openenv": [babyai]}) as pool:
        for item in (0, 41, 82, 123, 7):
            worker = pool.take("openenv")
            assert worker.call(lambda env: env.reset(item)).result(30) == here.reset(item)
            there = worker.env
            step = here.step("fly")
            assert there.step("fly") == step and not step.valid
            for _ in range(20):
                action = here.expert() or "turn left"
                step = here.step(action)
                assert there.step(action) == step  # observation, reward, score, done, success ...
                if step.done:
                    finished += step.success
                    break
            pool.give_back("openenv", worker)
        assert len(pool.workers) == 1 and there.prompt == here.prompt
    assert finished >= 3


def test_our_server_says_what_is_wrong_with_a_message_and_plays_on(babyai):
    with raw(babyai) as ws:
        item = ask(ws, {"type": "reset"})["data"]["observation"]["metadata"]["item"]
        assert item in envs.items("babyai", "train")
    with raw(babyai) as ws:
        for message, code in (
            ("no JSON", "INVALID_JSON"), (b"\xff\x00", "INVALID_JSON"),
            ("[" * 100_000, "INVALID_JSON"), ([1], "VALIDATION_ERROR"),
            ({"type": "reset", "data": 3}, "VALIDATION_ERROR"),
            ({"type": ["reset"]}, "UNKNOWN_TYPE"), ({}, "UNKNOWN_TYPE"),
            ({"type": "step", "data": {"message": 3}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"message": "turn left"}}, "WORLD_ERROR"),
            *(({"type": "reset", "data": {"seed": seed}}, "VALIDATION_ERROR")
              for seed in ("x", -1, True)),
        ):
            reply = ask(ws, message)
            assert reply["type"] == "error" and reply["data"]["code"] == code, (message, reply)
        reply = ask(ws, {"type": "reset", "data": {"seed": 17, "episode_id": "mine"}})
        assert reply["data"]["observation"]["text"] == make_env("babyai").reset(17)
        time.sleep(1.5)  # longer than a request may take
        assert ask(ws, {"type": "step", "data": {"message": "turn left"}})["data"]["done"] is False
        state = {"episode_id": "mine", "step_count": 1, "item": "babyai_17"}
        assert ask(ws, {"type": "state"}) == {"type": "state", "data": state}
        ws.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=20)


def test_a_large_message_ends_the_connection_and_a_page_in_a_browser_gets_none(babyai):
    with raw(babyai) as ws, pytest.raises(ConnectionClosed):
        ws.send("x" * (2 << 20))
        ws.recv(timeout=20)
    with pytest.raises(InvalidStatus, match="403"):
        connect(babyai.replace("http", "ws") + "/ws", origin="http://example.org")


def test_our_server_describes_itself(babyai):
    prompt = make_env("babyai").prompt
    assert requests.get(f"{babyai}/health").json() == {"status": "healthy"}
    assert requests.get(f"{babyai}/metadata").json() == {"name": "babyai", "description": prompt}
    schema = requests.get(f"{babyai}/schema").json()
    assert schema["action"]["required"] == ["message"]
    assert schema["action"]["description"] == prompt


def test_a_full_server_refuses_and_a_closed_episode_makes_room(babyai):
    *three, late = [make_env("openenv", url=babyai) for _ in range(4)]
    for env in three:
        env.reset(0)
    with pytest.raises(EnvError, match="--slots"):
        late.reset(0)
    three[0].close()
    while late.socket is None:
        with suppress(EnvError):  # the server has not noticed the closing yet
            assert late.reset(0)
    for env in (*three, late):
        env.close()
    assert late.socket is None


def test_a_worlds_fault_crash_and_unknown_item_are_errors_of_one_episode(slow):
    env, other = make_env("openenv", url=slow), make_env("openenv", url=slow)
    other.reset(1)
    with pytest.raises(EnvError, match="no item 13"):
        env.reset(13)
    for action, said in (("fault", "EnvError: the world broke"), ("crash", "ZeroDivisionError")):
        env.reset(0)
        with pytest.raises(EnvError, match=said):
            env.step(action)
        assert other.step("0") == Step("alone", 0.25, 0.5)
    assert env.reset(2).endswith("item 2")
    env.close()
    other.close()


def test_an_idle_episode_is_closed_and_its_connection_plays_the_next_one(slow):
    with raw(slow) as one, raw(slow) as two:
        for ws in (one, two):
            ask(ws, {"type": "reset", "data": {"seed": 0}})
        time.sleep(3)
        assert ask(one, {"type": "step", "data": {"message": "0"}})["type"] == "error"
        for ws in (one, two):
            reply = ask(ws, {"type": "reset", "data": {"seed": 5}})
            assert reply["data"]["observation"]["text"].endswith("item 5")


def test_connections_play_at_the_same_time(slow):
    players = [make_env("openenv", url=slow) for _ in range(4)]
    for env in players:
        env.reset(0)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        steps = list(threads.map(lambda env: env.step("1.5"), players))
    assert time.monotonic() - began < 4.5  # one after the other: 6 s
    assert [step.observation for step in steps] == ["alone"] * 4
    for env in players:
        env.close()


def test_a_killed_server_is_a_fault_and_a_new_one_is_found_by_the_next_reset():
    with our_server("babyai", "--protocol", "openenv") as (url, process):
        env = make_env("openenv", url=url)
        env.reset(0)
        process.kill()
        process.wait()
        for _ in range(2):  # never on another episode
            with pytest.raises(EnvError, match=url):
                env.step("turn left")
        with pytest.raises(EnvError, match="Refused"):
            env.reset(0)
    with our_server("babyai", "--protocol", "openenv", "--port", url.split(":")[-1]):
        assert env.reset(0) == make_env("babyai").reset(0)
        env.close()


def test_our_server_ends_within_ten_seconds_of_sigterm_with_an_open_connection():
    with (our_server("babyai", "--protocol", "openenv") as (url, process), raw(url) as ws):
        ask(ws, {"type": "reset", "data": {"seed": 0}})
        process.terminate()
        assert process.wait(timeout=10) == 0


# ---- against servers that do everything wrong ----


@pytest.mark.parametrize("status", [301, 303, 307, 308])
@pytest.mark.parametrize("location", ["OTHER/ws", "/ws", "http://[::1", "ws://h:port/"])
def test_a_connection_is_made_to_no_other_address(location, status):
    def upgrade(connection):
        reply = connection.respond(status, "")
        reply.headers["Location"] = location.replace("OTHER", other)
        return reply

    got = []
    with (stand_in(lambda message: got.append(message) or healthy(message)) as other,
          stand_in(healthy, upgrade=upgrade) as url):
        with pytest.raises(EnvError, match=url.replace("ws", "http")):
            make_env("openenv", url=url).reset(0)
    assert got == []


FIELDS = {"score": 1, "success": False, "valid": True, "progress": 0.5}
EXTRA = reply_with(observation={"place": "elsewhere"}, reward=1, done=False)


@pytest.mark.parametrize("extra", [EXTRA, {"type": "state", "data": {}}, "<html>", healthy,
                                   {"type": "error", "data": {"code": "EXECUTION_ERROR"}}])
@pytest.mark.parametrize("kind, place, seconds", [
    ("reset", 0, 0), ("step", 0, 0), ("reset", 1, 0), ("step", 1, 0), ("state", 1, 0),
    ("step", 0, 0.1), ("step", 1, 0.1), ("state", 1, 0.1), ("close", 1, 0)])
def test_a_message_too_many_shifts_no_observation(extra, kind, place, seconds):
    """Before the reply to a message or behind it, while the server is slow."""
    late, begun = [], []

    def answer(message):
        replies = [healthy(message)]
        begun.extend([1] * (message["type"] == "reset"))
        if message["type"] == kind and begun and not late:
            late.append(1)
            replies.insert(place, extra(message) if callable(extra) else extra)
        time.sleep(seconds)
        return None if replies == [None] else replies

    with stand_in(answer) as url:
        env = make_env("openenv", url=url)
        faults = 0
        for item in (0, 1, 2):
            try:
                assert env.reset(item) == f"seed {item}"
                for move in ("on", "off", "end"):
                    step = env.step(move)
                    if step.valid:  # an error looks like an answer to the action
                        assert json.loads(step.observation) == {"move": move}
            except EnvError:
                faults += 1
        assert faults == (kind != "close")
        env.close()


@pytest.mark.parametrize("move, success", [("on", False), ("end", True)])
def test_a_success_counts_when_the_episode_has_ended(move, success):
    def answer(message):
        reply = healthy(message)
        if message["type"] == "step":
            reply["data"]["observation"]["metadata"] = FIELDS | {"success": True}
        return reply

    with playing(answer) as (env, _):
        assert env.step(move).success is success


@pytest.mark.parametrize("begin, is_said", [
    (lambda _: reply_with(observation={"place": "a room"}, done=False), True),
    (lambda _: reply_with(observation={"grid": [[0, 1]], "left": 9}, done=False), True),
    (healthy, False)])
def test_a_server_that_ignores_the_seed_is_found_by_the_first_two_items(begin, is_said, capsys):
    with playing(lambda m: begin(m) if m["type"] == "reset" else healthy(m)) as (env, _):
        for item in (0, 0, 7, 8):
            env.reset(item)
    said = capsys.readouterr().err
    assert said.count("items 0 and 7 alike") == is_said and is_said or not said


@pytest.mark.parametrize("reply", [
    "<html>", "[" * 100_000, '"x"', None, {"type": "observation"}, {"data": None},
    {"type": "state", "data": {"observation": {}, "reward": 0, "done": False}},
    {"type": "mcp", "data": {"observation": {}, "reward": 0, "done": False}},
    *(reply_with(observation={"metadata": FIELDS | bad}, reward=0, done=False)
      for bad in ({"score": float("nan")}, {"score": "1"}, {"score": 7}, {"progress": 1e9},
                  {"success": "yes"}, {"success": 1}, {"valid": None})),
    reply_with(observation={"metadata": "text"}, reward=0, done=False),
    reply_with(observation="text", reward=0, done=False),
    *(reply_with(observation={}, reward=reward, done=False) for reward in ("1", "", [], {})),
    reply_with(observation={}, reward=float("nan"), done=False),
    reply_with(observation={}, reward=1e300, done=False),
    reply_with(observation={}, reward=0), reply_with(observation={}, reward=0, done="no"),
    {"type": "error", "data": {"message": "broke", "code": "EXECUTION_ERROR"}},
    {"type": "error", "data": {}},
])
def test_a_bad_reply_is_a_fault_that_names_the_server(reply):
    is_refusal = "EXECUTION_ERROR" in str(reply)  # which an action may get
    for kind in ("reset",) if is_refusal else ("reset", "step"):
        with stand_in(lambda message: reply if message["type"] == kind
                      else healthy(message)) as url:
            env = make_env("openenv", url=url)
            with pytest.raises(EnvError, match=url.replace("ws", "http")):
                env.reset(0)
                env.step("on")
            with pytest.raises(EnvError):
                env.step("on")  # a late reply must not be taken for this one's
            env.close()


def test_a_server_that_does_not_answer_is_a_fault_after_the_timeout():
    release = threading.Event()

    def answer(message):
        if message["type"] == "step":
            release.wait(20)
        return healthy(message)

    with playing(answer) as (env, _):
        env.timeout = 0.5
        began = time.monotonic()
        with pytest.raises(EnvError, match="step.* 0.5"):
            env.step("on")
        assert time.monotonic() - began < 5
        release.set()


def test_a_connection_lost_between_two_episodes_is_made_anew_and_in_one_is_a_fault():
    with playing(healthy, reset={"size": 5}) as (env, got):
        env.socket.send('{"type": "break"}')
        assert env.reset(2) == "seed 2"
        env.socket.send('{"type": "break"}')
        with pytest.raises(EnvError):
            env.step("on")
        assert "step" not in [message["type"] for message in got]
        assert {"type": "reset", "data": {"size": 5, "seed": 0}} in got


def test_a_connection_that_takes_no_message_any_more_is_closed_nevertheless(monkeypatch):
    with playing(healthy) as (env, _):
        connection = env.socket
        monkeypatch.setattr(connection, "send", Mock(side_effect=OSError))
        env.close()
        assert env.socket is None
        assert connection.socket.fileno() == -1


@pytest.mark.parametrize("tells_state", [True, False])
@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "EXECUTION_ERROR"])
def test_an_action_that_the_server_refuses_is_invalid_and_the_episode_goes_on(code, tells_state):
    """Also on a server that breaks the connection off where it is asked for the state."""
    refusal = {"message": "Invalid message", "code": code,
               "errors": [{"msg": "Input should be 'on' or 'end'"}]}

    def answer(message):
        if message["type"] == "state" and not tells_state:
            return None
        is_refused = message.get("data", {}).get("move") == "fly"
        return {"type": "error", "data": refusal} if is_refused else healthy(message)

    with playing(answer) as (env, _):
        step = env.step("fly")
        assert not step.valid and step.reward == 0 and not step.done
        assert "Input should be 'on' or 'end'" in step.observation
        assert env.step("end").done


# ---- what an action and an observation are ----

CALL = {"type": "call_tool", "tool_name": "guess", "arguments": {"word": "$"}}


@pytest.mark.parametrize("schema, options, text, action", [
    (fields(move=TEXT), {}, "3", {"move": "3"}),
    (fields(move=NUMBER), {}, "3", {"move": 3}),
    (fields(move={"anyOf": [NUMBER, {"type": "null"}]}), {}, "3", {"move": 3}),
    (fields(move={"anyOf": [NUMBER, TEXT]}), {}, "up", {"move": "up"}),
    (fields(move={"type": ["integer", "null"]}), {}, "3", {"move": 3}),
    (fields(move={"$ref": "#/$defs/Move"}), {}, "UP", {"move": "UP"}),
    (fields(a=TEXT, b=NUMBER), {"action": "b"}, "3", {"b": 3}),
    ({}, {"action": "b"}, "3", {"b": "3"}),
    (fields(a=TEXT, b=NUMBER), {"action": "json"}, '{"a": "x", "b": 1}', {"a": "x", "b": 1}),
    (fields(), {"action": CALL}, "crane", CALL | {"arguments": {"word": "crane"}}),
    # None: invalid, and never sent. JSON has no such numbers, Python's reader takes them.
    (fields(move=NUMBER), {}, "left", None), (fields(a=TEXT), {"action": "json"}, "left", None),
    (fields(a=TEXT, b=TEXT), {"action": "json"}, "[1]", None),
    (fields(move=REAL), {}, "NaN", None), (fields(move=REAL), {}, "1e999", None),
    (fields(move={"type": "array"}), {}, "[Infinity]", None),
    (fields(a=REAL), {"action": "json"}, '{"a": NaN}', None),
])
def test_the_agents_text_becomes_the_servers_action(schema, options, text, action):
    with playing(healthy, schema, **options) as (env, got):
        step = env.step(text)
    sent = [message["data"] for message in got if message["type"] == "step"]
    assert sent == ([] if action is None else [action])
    assert step.valid == bool(sent) == ("cannot be read" not in step.observation)


@pytest.mark.parametrize("paths, text", [
    ([], 'place: a room\nlog: [{"say": "hi", "to": 1}, {"say": "ho"}]\nleft: 0'),
    (["place"], "a room"), (["left", "place"], "0\na room"), (["log.say"], "hi\nho"),
    (["nothing"], ""), (["place.deeper"], ""),
])
def test_the_agent_reads_the_chosen_fields_of_an_observation(paths, text):
    observation = {"place": "a room", "log": [{"say": "hi", "to": 1}, {"say": "ho"}], "left": 0,
                   "empty": None, "reward": 0.5, "done": False, "metadata": {"secret": 1}}
    assert openenv.text_of(observation, paths) == text


def test_an_episode_that_ends_with_enough_reward_is_a_success():
    for options, success in (({}, False), ({"success": 0.25}, True), ({"success": 0.3}, False)):
        with playing(healthy, **options) as (env, _):
            step = env.step("end")
        assert (step.done, step.success, step.reward, step.score) == (True, success, 0.25, 0.25)
    with playing(healthy, success=0) as (env, _):
        assert env.step("on").success is False  # not ended


def test_the_instructions_are_the_servers_description_a_text_or_a_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Take one step at a time.")
    with stand_in(healthy, described="Find the way.") as url:
        for option, text in (("", "Find the way."), ("Read rules.txt", "Read rules.txt"),
                             ("Walk. " * 999, "Walk. " * 999), (str(file), file.read_text())):
            assert make_env("openenv", url=url, prompt=option).prompt == text


# ---- bad usage ----


def test_arguments_that_do_not_fit_the_server_are_refused():
    schema = fields(a=TEXT, b=TEXT) | {"observation": {"properties": {"place": TEXT}}}
    with stand_in(healthy, schema) as url:
        for env_args, names in [
            ("", "a, b"), ("openenv.action=c", "a, b"), ("openenv.action={", "a, b"),
            ("openenv.colour=c", "colour"), ('openenv.action={"a":"b"}', "[$]"),
            ("openenv.action=a openenv.success=x", "success"),
            ("openenv.action=a openenv.whole_reply=no", "whole_reply"),
            ("openenv.action=a openenv.prompt=x.txt", "x.txt"),
            ("openenv.action=a openenv.observation=text", "place"),
        ]:
            options = envs.env_options(env_args, ["openenv"]).get("openenv", {})
            with pytest.raises(UserError, match=names):
                envs.check_env("openenv", [url], **options)


@pytest.mark.parametrize("schema", [
    "[]", "null", '{"action": 3}', '{"action": {"properties": [1]}}', fields(move=3),
    fields(move={"anyOf": 3}), {"action": {"required": 3}}, SCHEMA | {"observation": [1]},
    SCHEMA | {"observation": {"properties": 3}}])
def test_a_malformed_description_is_one_line(schema):
    with stand_in(healthy, schema if isinstance(schema, str) else json.dumps(schema)) as url:
        with pytest.raises(UserError, match=url.replace("ws", "http")):
            envs.check_env("openenv", [url])


def test_a_server_that_is_not_there_silent_or_malformed_is_named():
    with (refusing() as dead, socket.create_server(("", 0)) as silent,
          stand_in(healthy, schema="[" * 100_000) as malformed):
        began = time.monotonic()
        for url in (dead, f"http://127.0.0.1:{silent.getsockname()[1]}", "nonsense", malformed):
            with pytest.raises(UserError, match=url.replace("ws", "http")):
                envs.check_env("openenv", [url])
        assert time.monotonic() - began < 15
