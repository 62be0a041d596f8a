"""AgentGym's HTTP protocol.

The client is tested against servers that do everything wrong, the server against recorded traffic,
and both against each other. Our servers run in processes of their own, on free loopback ports.
"""

import base64
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests
from conftest import ROOT

import envs
import eval as evaluation
from envs import EnvError, EnvPool, Step, make_env
from rollout import rollout
from worlds import agentgym, sciworld, serve, textcraft
from worlds.agentgym import RemoteEnv
from worlds.jvm import java

pytest.importorskip("uvicorn")
GO = "Your goal: go"  # a first observation of babyai
RUN = os.environ | {"OMP_NUM_THREADS": "1"}

SLOW = """
import itertools, time
from envs import Env, EnvError, Step
made = itertools.count()


class Slow(Env):
    # Knows its number among all those made. A step sleeps for as long as its action says.
    busy = False

    def __init__(self):
        self.number = next(made)

    def reset(self, item):
        if item == 13:
            raise ValueError("no item 13")
        return f"world {self.number} item {item}"

    def step(self, action):
        if action == "fault":
            raise EnvError("the world broke")
        if action == "crash":
            raise ZeroDivisionError
        told = "together" if self.busy else "alone"
        self.busy = True
        time.sleep(float(action))
        self.busy = False
        return Step(told, 0.25, 0.5)
"""


@contextmanager
def serving(env, *flags, folder=None, seconds=30):
    """Run our server in a process -> (url, process). With a `folder` it knows the world "slow".
    seconds: that a client may take to send a request."""
    lines = ["import sys", "from worlds import serve", f"serve.REQUEST_SECONDS = {seconds}"]
    if folder:
        (folder / "slow.py").write_text(SLOW)
        lines.append(f"sys.path.insert(0, {str(folder)!r})")
        lines.append("serve.WORLDS['slow'] = 'slow:Slow'")
    lines.append("sys.exit(serve.main())")
    program = [sys.executable, "-c", "\n".join(lines)]
    process = subprocess.Popen([*program, "serve", "--env", env, "--port", "0", *flags], cwd=ROOT,
                               env=RUN, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True)
    try:
        url = process.stdout.readline().split()[-1]
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def _no_servers_known_from_other_tests():
    """A server of another test may have had the same port."""
    agentgym.SERVERS.clear()


@pytest.fixture(scope="module")
def servers():
    with serving("babyai") as (babyai, _), serving("textcraft") as (crafting, _):
        yield {"babyai": babyai, "textcraft": crafting}


@contextmanager
def stand_in_server(answer, port=0):
    """A server that answers as told -> (url, list of the (path, body) that came, in order).

    answer(path, body) -> (status, reply), where the reply is JSON or the bytes to send, or None to
    break the connection off.
    """
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "null")
            seen.append((self.path, body))
            answered = answer(self.path, body)
            if answered is None:
                self.close_connection = True
                return
            status, reply = answered
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def like_babyai(**special):
    """Answers of a healthy server. special: path -> (status, reply), or a function of the body."""
    numbers = itertools.count()
    last = {}  # number -> the last observation

    def good(path, body):
        if path == "create":
            return {"id": next(numbers)}
        if path.startswith("observation"):
            return last.get(int(path.split("=")[1]), "none")
        replies = {
            "reset": {"observation": GO},
            "step": {"observation": "ok", "reward": 0, "done": False},
            "close": True,
        }
        return replies.get(path, "hello")

    def answer(path, body):
        path = path.strip("/")
        if path not in special:
            answered = 200, good(path, body)
        elif callable(special[path]):
            answered = special[path](body)
        else:
            answered = special[path]
        if path in ("reset", "step") and answered and isinstance(answered[1], dict):
            last[body["id"]] = answered[1].get("observation")
        return answered

    return answer


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@contextmanager
def refusing():
    """An address at which connections are refused. Nobody else can listen there meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


# ---- the server, by recorded traffic ----

# Of these replies only the fields and types are compared. The goals behind the item numbers and the
# distractors depend on the file order and the hash seed of the machine that recorded them.
CONTENT_DIFFERS = {("textcraft", "/create"), ("textcraft", "/reset"), ("textcraft", "/observation")}
# The lines of these observations are compared as a sorted list. The recorded order of sciworld's
# things depends on the JVM's hash codes; ours is the same on every machine.
LINES_IN_ANY_ORDER = {("sciworld", "/reset")}
KINDS = {bool: "truth", int: "number", float: "number", str: "text", dict: "dict", list: "list"}


@pytest.mark.parametrize("name", ["babyai", "textcraft", "sciworld"])
def test_recorded_requests_get_recorded_replies(name):
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    recording = json.loads((ROOT / f"tests/wire/{name}.json").read_text())
    with serving(name) as (url, _):
        for exchange in recording["exchanges"]:
            check_exchange(name, url, exchange)


def check_exchange(name, url, exchange):
    path, body, params = exchange["path"], exchange.get("json"), exchange.get("params")
    reply = requests.request(exchange["method"], url + path, json=body, params=params, timeout=30)
    ours, theirs = reply.json(), exchange["response"]
    at = f"{path} {body or params}: {ours}"
    assert reply.status_code == exchange["status"], at
    assert KINDS[type(ours)] == KINDS[type(theirs)], at
    if isinstance(theirs, dict):
        may_be_added = {"success", "valid", "progress"} if path == "/step" else set()
        assert set(theirs) <= set(ours) <= set(theirs) | may_be_added, at
        ours = {k: ours[k] for k in theirs}
        assert [KINDS[type(v)] for v in ours.values()] == [KINDS[type(v)] for v in theirs.values()]
    if (name, path) in LINES_IN_ANY_ORDER:
        for either in (ours, theirs):
            either["observation"] = sorted(either["observation"].split("\n"))
    is_error = isinstance(theirs, dict) and "error" in theirs
    if is_error or (name, path) not in CONTENT_DIFFERS:
        assert ours == theirs, at


@pytest.mark.parametrize("env", ["babyai", "textcraft"])
def test_a_rollout_on_our_server_is_the_rollout_in_this_process(tiny, servers, env):
    items = [f"{env}_{n}" for n in (8, 50, 121)]
    how = dict(samples=2, seed=5, max_tokens=24, invalid_penalty=0.05)
    here = rollout(*tiny, EnvPool(), items, 4, **how)
    with EnvPool({env: [servers[env]]}) as pool:
        there = rollout(*tiny, pool, items, 4, **how)
    assert [t.to_json() for t in there] == [t.to_json() for t in here]
    assert sum(t.turns for t in here) > 6


@pytest.mark.parametrize("env, package, actions", [
    ("babyai", "minigrid", ["", "fly", "turn left", "move forward", "é\u2028\n"]),
    ("textcraft", "textcraft", ["", "inventory", "get 1 oak log", "é\u2028\n"]),
    ("sciworld", "scienceworld", ["look around", "open door to kitchen", "dance",
                                  "focus on substance in metal pot"]),
    ("searchqa", "bm25s", ["", "no tag", "<search> Tavi </search>", "<answer> nobody </answer>"]),
])
def test_steps_are_the_same_here_and_there(env, package, actions):
    if env != "textcraft":
        pytest.importorskip(package)
    with serving(env) as (url, _):
        here, there = make_env(env), make_env(env, url=url)
        for item in (0, 3, 8):
            assert there.reset(item) == here.reset(item)
            # textcraft is played to the end, and two steps further
            solution = textcraft.solution(item) if env == "textcraft" else []
            for action in [*actions, *solution, *actions[:2]]:
                step = here.step(action)
                assert there.step(action) == step
                if step.done and env == "sciworld":
                    break  # AgentGym's server refuses further steps
        there.close()


@pytest.mark.parametrize("name", ["babyai", "sciworld"])
def test_an_episode_that_has_ended_is_refused_until_it_is_reset_as_by_agentgyms_servers(name):
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    env = make_env(name)
    env.reset(8)
    plan = [env.expert()]
    while not env.step(plan[-1]).done:
        plan.append(env.expert())
    env.close()

    refused = {"error": "The task with environment 0 has finished."}
    with serving(name) as (url, _):
        def post(path, **body):
            return requests.post(f"{url}/{path}", json={"id": 0, **body}, timeout=60).json()

        post("create")
        first = post("reset", data_idx=8)["observation"]
        replies = [post("step", action=action) for action in plan]
        assert [reply["done"] for reply in replies] == [False] * (len(plan) - 1) + [True]
        assert post("step", action=plan[0]) == refused
        assert requests.get(f"{url}/observation?id=0", timeout=60).json() == refused
        assert post("reset", data_idx=8)["observation"] == first
        assert post("step", action=plan[0])["observation"] == replies[0]["observation"]


def test_babyais_picture_is_the_frame_that_minigrid_draws(servers):
    """/render gives a PNG as a data URL, as AgentGym's server does."""
    image = pytest.importorskip("PIL.Image")
    url = servers["babyai"]
    number = requests.post(f"{url}/create", json={}, timeout=30).json()["id"]
    requests.post(f"{url}/reset", json={"id": number, "data_idx": 8}, timeout=30)
    reply = requests.post(f"{url}/render", json={"id": number}, timeout=30).json()
    head, _, data = reply.partition(",")
    assert head == "data:image/png;base64"
    drawn = image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    env = make_env("babyai")
    env.reset(8)
    frame = env.env.get_frame(highlight=True, tile_size=32)
    assert np.array_equal(np.asarray(drawn), frame)


def test_sciworlds_hints_are_those_of_its_package(monkeypatch):
    package = pytest.importorskip("scienceworld")
    monkeypatch.setenv("PATH", f"{Path(java('sciworld')).parent}:{os.environ['PATH']}")
    theirs = package.ScienceWorldEnv()
    theirs.load(*sciworld.task_of(8))
    theirs.step("look around")
    with serving("sciworld") as (url, _):
        requests.post(f"{url}/create", json={}, timeout=60)
        requests.post(f"{url}/reset", json={"id": 0, "data_idx": 8}, timeout=60)
        hint, description = (requests.get(f"{url}/{path}?id=0", timeout=60).json()
                             for path in ("action_hint", "task_description"))
    assert hint == {"possible_actions": theirs.get_possible_actions(),
                    "possible_objects": theirs.get_possible_objects()}
    assert theirs.get_task_description().endswith(description["task_description"])
    theirs.close()


def test_bad_bodies_are_422_and_unknown_ids_are_errors(servers):
    def post(path, **body):
        return requests.post(f"{servers['babyai']}/{path}", **body)

    bad = [("reset", {}), ("reset", {"id": 0, "data_idx": "a"}), ("step", {"id": 0}),
           ("step", {"id": 0, "action": 3}), ("close", []), ("close", {"id": None}), ("create", 3)]
    for path, body in bad:
        assert post(path, json=body).status_code == 422, (path, body)
    as_json = {"Content-Type": "application/json"}
    assert post("step", data=b"{", headers=as_json).status_code == 422
    observation = f"{servers['babyai']}/observation?id="
    assert requests.get(observation + "x").status_code == 422

    unknown = {"id": 987654, "data_idx": 1}
    for reply in (requests.get(observation + "987654"), post("reset", json=unknown)):
        assert "987654" in reply.json()["error"]
    assert post("close", json=unknown).json() is False

    number = post("create").json()["id"]  # /create needs no body
    assert "error" in post("step", json={"id": number, "action": "fly"}).json()
    assert "error" in requests.get(f"{observation}{number}").json()
    assert "babyai has items" in post("reset", json={"id": number, "data_idx": -1}).json()["error"]


def test_requests_to_one_episode_take_turns_and_environments_are_used_again(tmp_path):
    with serving("slow", folder=tmp_path) as (url, _):
        env = RemoteEnv("slow", url)
        assert env.reset(4) == "world 0 item 4"
        assert env.step("0") == Step("alone", 0.25, 0.5)
        body = {"id": env.episode_id, "action": "0.1"}
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(requests.post, url + "/step", json=body) for _ in range(4)]
        assert [f.result().json()["observation"] for f in futures] == ["alone"] * 4
        with pytest.raises(EnvError, match="no item 13"):
            env.reset(13)
        env.close()
        env.close()
        again = RemoteEnv("slow", url)
        assert again.reset(5) == "world 0 item 5"  # not made anew
        for action, why in (("fault", "the world broke"), ("crash", "status 500")):
            with pytest.raises(EnvError, match=why):
                again.step(action)
        again.close()
        # the environment that failed is not used again
        assert RemoteEnv("slow", url).reset(1) == "world 1 item 1"


def test_episodes_are_limited_in_number_and_idle_ones_are_closed(tmp_path):
    flags = ("--idle_seconds", "2", "--max_episodes", "3")
    with serving("slow", *flags, folder=tmp_path) as (url, _):
        three = [RemoteEnv("slow", url) for _ in range(3)]
        assert [env.reset(1) for env in three] == [f"world {n} item 1" for n in range(3)]
        with pytest.raises(EnvError, match="3 episodes are taken"):
            RemoteEnv("slow", url)

        def step(number):
            return requests.post(url + "/step", json={"id": number, "action": "0"}).json()

        numbers = [e.episode_id for e in three]
        for _ in range(30):  # the first one is kept alive
            assert "observation" in step(numbers[0])
            time.sleep(0.1)
        assert ["error" not in step(n) for n in numbers] == [True, False, False]
        # the client makes itself a new episode
        assert three[1].reset(7) in ("world 1 item 7", "world 2 item 7")


@pytest.mark.parametrize("seconds", [0.8, 60])
def test_sigterm_ends_the_server_within_10_seconds(seconds, tmp_path):
    """A request under way is answered if it takes less than 5 s; a world that hangs is left."""
    with serving("slow", folder=tmp_path) as (url, process), ThreadPoolExecutor() as threads:
        env = RemoteEnv("slow", url)
        env.reset(0)
        step = threads.submit(env.step, str(seconds))
        time.sleep(0.4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        error = step.exception(5)
        assert error is None if seconds < 5 else isinstance(error, EnvError)


def test_a_port_in_use_and_a_missing_package_are_one_line_and_exit_code_2(servers):
    taken = servers["babyai"].split(":")[-1]
    without_fastapi = ("import sys, runpy; sys.modules['fastapi'] = None; "
                       "sys.argv = ['envs.py', 'serve']; "
                       "runpy.run_path('envs.py', run_name='__main__')")
    for args, says in ((["envs.py", "serve", "--port", taken], taken),
                       (["-c", without_fastapi], 'pip install -e ".[serve]"')):
        done = run_python(*args)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


def run_python(*args):
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, env=RUN, capture_output=True, text=True, timeout=60)


# ---- the client, on servers that we do not have ----


class Bodies(NamedTuple):
    """What one AgentGym server expects and replies: episode 7, item 5."""

    id_key: str
    create: dict  # /create's body
    created: Any  # /create's reply
    reset: dict  # /reset's body without the episode's number
    first: Any  # /reset's reply
    has_close: bool = False
    observation_key: str = "observation"


CRAFTED = {"observation": "Goal: craft x.", "done": False, "reward": 0}
SEEN = "OBSERVATION: Go. URL: http://shop OBJECTIVE: buy"  # webarena, GET /observation
CHOICE = {"observation": "Go.", "available_actions": ["look", "wait"]}
TOOL = Bodies("env_idx", {"id": 0}, 7, {"id": 5}, "Go.")
BODIES = {
    "babyai": Bodies("id", {}, {"id": 7}, {"data_idx": 5},
                     {"observation": GO, "reward": 0, "score": 0}, True),
    "textcraft": Bodies("id", {"commands": None, "goal": None},
                        {"id": 7, "observation": "x", "done": False, "reward": 0},
                        {"data_idx": 5}, {"id": 7, **CRAFTED}, True),
    "sciworld": Bodies("id", {}, {"id": 7}, {"data_idx": 5},
                       {"task_description": "Your task is x.", "observation": "Go."}, True),
    "searchqa": Bodies("env_idx", {"id": 0}, 7, {"id": 5}, "Question: x?", True),
    "webarena": Bodies("env_idx", {}, {"env_idx": 7}, {"seed": 0, "idx": 5},
                       {"observation": "Go.", "sites": [], "object": ""}, True),
    "webshop": Bodies("env_idx", {}, 7, {"session_id": 5}, ["Go.", None], False, "state"),
    "sqlgym": Bodies("env_idx", {}, 7, {"item_id": 5}, ["Go.", None], False, "state"),
    "alfworld": Bodies("id", {}, {"id": 7}, {"game": 5, "world_type": "Text"}, CHOICE),
    "maze": Bodies("id", {}, {"id": 7}, {"game": 5}, {"observation": "Go."}),
    "wordle": Bodies("id", {}, {"id": 7}, {"seed": 5}, {"observation": "Go.", "id": 7}),
    **dict.fromkeys(["weather", "todo", "movie", "sheet", "academia"], TOOL),
}


def test_the_table_is_complete():
    assert {*BODIES, *envs.WORLDS, "openenv"} == set(envs.CLIENTS)
    assert set(BODIES) == set(agentgym.PROTOCOLS)
    assert all(p.prompt or name in envs.WORLDS for name, p in agentgym.PROTOCOLS.items())


@pytest.mark.parametrize("name", BODIES)
def test_every_server_of_the_table_is_spoken_to_in_its_own_bodies(name):
    bodies = BODIES[name]
    steps = iter([(0, False), (1, True)])
    more = {"sciworld": lambda reward, _: {"score": 100 * reward, "reward": 37},
            "babyai": lambda reward, _: {"score": reward},
            "alfworld": lambda *_: {"available_actions": ["look"]},
            "webarena": lambda _, done: {"terminated": done, "truncated": False, "reward": 1,
                                         "info": {"fail_error": ""}}}

    def answer(path, body):
        if path != "/step":
            return 200, fixed_reply(name, path)
        reward, done = next(steps)
        reply = {bodies.observation_key: "Well.", "reward": reward, "info": None}
        reply |= {} if name == "webarena" else {"done": done}
        return 200, reply | more.get(name, lambda *_: {})(reward, done)

    first = {"babyai": GO, "textcraft": "Goal: craft x.", "searchqa": "Question: x?",
             "sciworld": "Your task is x.\nGo.", "webarena": SEEN,
             # in the first turn only
             "alfworld": "Go.\nAVAILABLE ACTIONS: look,wait"}.get(name, "Go.")
    with stand_in_server(answer) as (url, seen):
        env = make_env(name, url=url)
        assert env.prompt
        assert env.whole_reply == (name in ("searchqa", "webarena") or bodies is TOOL)
        assert env.reset(5) == first
        assert env.step("a") == Step("Well.")
        progress = 1.0 if name == "sciworld" else 0.0
        assert env.step("b") == Step("Well.", 1.0, 1.0, True, True, progress=progress)
        env.close()
        env.close()
    number = {bodies.id_key: 7}
    expected = [("/create", bodies.create), ("/reset", bodies.reset | number),
                *[("/step", number | {"action": action}) for action in "ab"]]
    expected += [("/close", number)] * bodies.has_close
    if name == "wordle":
        expected.insert(1, ("/filtered_vocab?id=7", None))
        assert env.prompt.endswith("\nshire, panic")
    # webarena's first observation is fetched; the tool servers' are, after each reply
    for place in [2] * (name == "webarena") + [2, 4, 6] * (bodies is TOOL):
        expected.insert(place, ("/observation?env_idx=7", None))
    assert seen == expected


def fixed_reply(name, path):
    """What the server replies to any request but /step."""
    bodies = BODIES[name]
    replies = {"/create": bodies.created, "/reset": bodies.first, "/close": True}
    replies[f"/observation?{bodies.id_key}=7"] = SEEN
    replies["/filtered_vocab?id=7"] = ["shire", "panic"]
    return replies[path]


@pytest.mark.parametrize("name, ours", [("weather", False), ("webarena", False),
                                        ("webarena", True)])
def test_an_episode_outlives_a_pause_after_any_reply(name, ours):
    """uvicorn closes a connection after a pause of 5 s. The tool servers' GET /observation lacks
    /step's last line, and its message about an unreadable action. AgentGym's WebArena replies with
    the page instead of that message. Ours replies with what /step did, whose "info" is always
    null."""
    steps = []

    def answer(path, body):
        if path.startswith("/observation"):
            if ours:
                return 200, f"Page {len(steps)}."
            return 200, SEEN if name == "webarena" else f"After {steps.count('good')}."
        if path != "/step":
            return 200, fixed_reply(name, path)
        steps.append(body["action"])
        text = "I cannot read that." if body["action"] == "bad" else f"After {steps.count('good')}."
        reply = {"observation": text + "\nGive me one action.", "reward": 0, "info": None}
        if ours:
            reply["observation"] = f"Page {len(steps)}."
        if name == "webarena":
            if body["action"] == "good" and not ours:
                reply |= {"observation": SEEN, "info": {"fail_error": ""}}
            return 200, reply | {"terminated": False, "truncated": False}
        return 200, reply | {"done": False}

    with stand_in_server(answer) as (url, _):
        env = make_env(name, url=url)
        env.reset(5)
        for action in ("good", "bad", "bad", "good"):
            env.socket.shutdown(socket.SHUT_RDWR)
            env.step(action)
        assert env.server.doubts == 0
        env.close()


def test_an_episode_that_has_ended_is_closed(servers):
    """Our server, as AgentGym's, knows no observation of an episode that has ended. If the
    connection is lost then, the episode could not be told from another one, nor be closed."""
    env, local = make_env("babyai", url=servers["babyai"]), make_env("babyai")
    first = env.reset(5)
    assert local.reset(5) == first
    number = env.episode_id
    done = False
    while not done:
        action = local.expert()
        local.step(action)
        done = env.step(action).done
    assert env.episode_id is None and number not in env.server.live
    env.socket.shutdown(socket.SHUT_RDWR)
    before = env.server.doubts
    assert env.reset(5) == first and env.server.doubts == before
    env.close()


def test_a_rollout_has_no_more_episodes_on_a_server_than_slots(tiny):
    with serving("babyai", "--max_episodes", "4") as (url, _), EnvPool({"babyai": [url]}) as pool:
        played = rollout(*tiny, pool, ["babyai_8", "babyai_50"], 2, samples=6, slots=4, retries=0,
                         max_tokens=4, arrival_order=True)
    assert [t.error for t in played if t.error] == []


def steps_of(name, *replies):
    """The Steps that these replies to /step are read as."""
    waiting = iter(replies)

    def answer(path, _):
        return 200, next(waiting) if path == "/step" else fixed_reply(name, path)

    with stand_in_server(answer) as (url, _):
        env = make_env(name, url=url)
        env.reset(5)
        return [env.step("x") for _ in replies]


def test_webarenas_replies_that_were_not_understood_or_failed_are_invalid():
    """AgentGym's server replies to the first with "info": null, else with what the browser said."""
    rest = {"reward": 0, "terminated": False, "truncated": False}
    infos = [None, {"fail_error": "no such element"}, {"fail_error": ""}]
    replies = [{"observation": "x", "info": info, **rest} for info in infos]
    assert [s.valid for s in steps_of("webarena", *replies)] == [False, False, True]
    for text in ("TimeoutError", "Error: Env 7 is dead", "7"):  # a number: the text of a KeyError
        with pytest.raises(EnvError, match=text):
            steps_of("webarena", {"observation": text, "info": None, **rest})


def test_rewards_scores_and_successes_are_read_as_each_server_means_them():
    def read(name, *replies):
        steps = steps_of(name, *replies)
        return [(round(s.reward, 9), round(s.score, 9), s.done, s.success) for s in steps]

    def going(**values):
        return {"observation": "x", "done": False, **values}

    def ended(**values):
        return {"observation": "x", "done": True, **values}

    # sciworld: "score" is what is achieved so far, in percent, and a step's reward its increase
    replies = [going(score=7, reward=7), going(score=7, reward=0), ended(score=-100, reward=-107)]
    expected = [(0.07, 0.07, False, False), (0, 0.07, False, False), (-0.07, 0, True, False)]
    assert read("sciworld", *replies) == expected
    # babyai: an episode that ends with a reward above 0.5 is a success
    replies = [going(score=0, reward=0), ended(score=0.9, reward=0.9)]
    assert read("babyai", *replies) == [(0, 0, False, False), (0.9, 0.9, True, True)]
    assert read("babyai", ended(score=0, reward=0)) == [(0, 0, True, False)]
    # webshop: only the full reward is a success
    reply = {"state": "x", "reward": 0.4, "done": True, "info": None}
    assert read("webshop", reply) == [(0.4, 0.4, True, False)]
    # tools: "reward" is what is achieved so far
    replies = [going(reward=1.0), ended(reward=1.0)]
    assert read("movie", *replies) == [(1, 1, False, False), (0, 1, True, True)]
    # webarena: the reward counts only when the task has terminated
    running = {"observation": "x", "reward": 1.0, "info": {}, "terminated": False}
    replies = [{**running, "truncated": False}, {**running, "truncated": True}]
    assert read("webarena", *replies) == [(0, 0, False, False), (0, 0, True, False)]


@pytest.mark.parametrize("name, refusals", [
    ("babyai", ["The action is not recognized. Please check", "You cannot drop the object"]),
    ("textcraft", ["Could not execute dance", "Wrong item format: x",
                   "Could not find a valid recipe for"]),
    ("sciworld", ["No known action matches that input."]),
])
def test_invalid_actions_are_known_by_their_observation(name, refusals):
    rest = {"reward": 0, "score": 0, "done": False}
    replies = [{"observation": text, **rest} for text in [*refusals, "Well."]]
    assert [s.valid for s in steps_of(name, *replies)] == [False] * len(refusals) + [True]


STEP = b'{"observation": "x", "reward": %s, "done": %s}'
GARBAGE = [
    b"", b"hello", b"\xff\xfe", b"[]", b"{}", b"null", b"3", b'""', b'{"error": "no"}',
    b"[" * 50_000, b'{"observation": 3}', b'{"observation": "x", "done": false}',
    b'{"observation": null, "reward": 0, "done": false}',
    *[STEP % (reward, b"false") for reward in (b'"1"', b"NaN", b"1e999", b"9" * 400, b"null")],
    *[STEP % (b"0", done) for done in (b'"no"', b"2", b"null", b'false, "score": "a"')],
]


def test_garbage_is_an_env_error_that_names_the_server_and_nothing_else():
    replies = []  # taken from the end
    special = {name: lambda _: (200, replies.pop()) for name in ("create", "reset", "step")}
    with stand_in_server(like_babyai(**special)) as (url, seen):
        for data in GARBAGE:
            replies[:] = [data]
            if data != b"3":  # a valid number of an episode
                with pytest.raises(EnvError, match=url + "/create"):
                    RemoteEnv("babyai", url)
            replies[:] = [b'{"id": 0}']
            env = RemoteEnv("babyai", url)
            if b'"x"' not in data:
                # an {"error": ...} makes the client create a new episode once
                replies[:] = [data, b'{"id": 1}', data]
                with pytest.raises(EnvError, match=url):
                    env.reset(0)
            replies[:] = [b'{"observation": "Your goal: go"}']
            env.reset(0)
            count = len(seen)
            replies[:] = [data]
            with pytest.raises(EnvError, match=url):
                env.step("x")
            assert len(seen) == count + 1
            env.close()


@pytest.mark.parametrize("special", [{"done": True}, {"reward": "x"}, {"reward": None},
                                     {"reward": float("nan")}, {"done": "no"}])
def test_a_first_reply_that_ends_the_episode_or_has_no_number_for_a_reward_is_a_fault(special):
    reply = {"observation": GO, "reward": 0, "done": False} | special
    with stand_in_server(like_babyai(reset=(200, reply))) as (url, _):
        with pytest.raises(EnvError, match=url):
            RemoteEnv("babyai", url).reset(0)


def test_only_what_is_safe_to_repeat_is_repeated():
    failing = {}  # path -> the answers that come before the good one, the last one first
    healthy = like_babyai()

    def answer(path, body):
        left = failing.get(path.strip("/"))
        return left.pop() if left else healthy(path, body)

    with stand_in_server(answer) as (url, seen):
        failing["create"] = [(500, "x"), None]  # None: the connection breaks off
        failing["reset"] = [(503, "x"), (503, "x")]
        env = RemoteEnv("babyai", url)
        assert env.reset(0) == GO
        assert [path for path, _ in seen] == ["/create"] * 3 + ["/reset"] * 3

        for fault in ((500, "x"), (503, "x"), (404, "x")):
            seen.clear()
            failing["step"] = [fault]
            with pytest.raises(EnvError, match=url + "/step"):
                env.step("x")
            # The server may have taken the step.
            assert [path for path, _ in seen if path == "/step"] == ["/step"]
        assert env.step("x").observation == "ok"

        # A lost connection: nobody knows whether the step or the reset was taken.
        seen.clear()
        failing["step"] = [None]
        with pytest.raises(EnvError, match=url + "/step"):
            env.step("x")
        assert env.reset(0) == GO
        failing["reset"] = [None]
        assert env.reset(0) == GO
        paths = [path for path, _ in seen if "observation" not in path]
        assert paths == ["/step", "/create", "/reset", "/reset", "/create", "/reset"]

        # A server that goes on failing gets a new episode, once.
        failing["reset"] = [(500, "x")] * 9
        seen.clear()
        with pytest.raises(EnvError, match="status 500"):
            env.reset(0)
        paths = [path for path, _ in seen]
        assert paths == ["/reset"] * 3 + ["/close", "/create"] + ["/reset"] * 3
        failing["reset"] = [(500, "x")] * 3
        assert env.reset(0) == GO

        failing["reset"] = [(422, "x")]
        failing["close"] = [(500, "x")]
        seen.clear()
        with pytest.raises(EnvError, match="status 422"):
            env.reset(0)
        env.close()
        assert [path for path, _ in seen] == ["/reset", "/close", "/close"]


# ---- restarted servers ----


def test_an_episode_goes_on_over_a_new_connection_only_if_the_server_still_has_it():
    """Where a connection was lost, GET /observation decides."""
    healthy = like_babyai()
    told = {}  # what GET /observation replies in place of the truth

    def answer(path, body):
        if path.startswith("/observation") and told:
            return told["reply"]
        return healthy(path, body)

    with stand_in_server(answer) as (url, seen):
        env = RemoteEnv("babyai", url)
        env.reset(0)
        env.session.close()  # as a server does with a connection that is idle for seconds
        assert env.step("x").observation == "ok"
        assert [path for path, _ in seen][2:] == ["/observation?id=0", "/step"]
        # babyai's GET /observation puts the goal before the observation
        told["reply"] = 200, {"observation": GO + "\nok", "reward": 0, "done": False}
        env.session.close()
        assert env.step("x").observation == "ok"

        others = [RemoteEnv("babyai", url) for _ in range(5)]
        wrong = ((200, "another"), (200, ""), (404, "no path"), (200, {"error": "no id"}), None)
        for env, told["reply"] in zip(others, wrong):
            env.reset(0)
            env.session.close()
            seen.clear()
            with pytest.raises(EnvError, match=f"{url}: episode .* was the server restarted"):
                env.step("x")
            env.close()
            assert {path for path, _ in seen} == {f"/observation?id={others.index(env) + 1}"}
            assert env.reset(0) == GO  # in a new episode


def test_a_restarted_server_is_not_asked_to_step_or_close_an_episode_of_before(tmp_path):
    """Our server is killed and started again. Another client takes the numbers of our episodes."""
    port = str(free_port())
    with serving("textcraft", "--port", port) as (url, _):
        ours = [RemoteEnv("textcraft", url) for _ in range(6)]
        for item, env in enumerate(ours):
            env.reset(item)
            env.step("inventory")
    with serving("textcraft", "--port", port) as (url, _):
        numbers = [requests.post(url + "/create", json={}).json()["id"] for _ in range(6)]
        assert numbers == [env.episode_id for env in ours]
        for number in numbers:
            requests.post(url + "/reset", json={"id": number, "data_idx": 50 + number})
        for env in ours[:3]:
            with pytest.raises(EnvError, match="was the server restarted"):
                env.step("get 1 oak log")
        assert ours[3].reset(8) == make_env("textcraft").reset(8)
        assert ours[3].episode_id == 6
        for env in ours:
            env.close()
        for number in numbers:  # as the other client left them
            observation = requests.get(url + f"/observation?id={number}").json()
            assert observation == make_env("textcraft").reset(50 + number)


def test_a_number_that_another_live_episode_has_is_refused():
    """AgentGym's sqlgym hands out numbers twice beyond eight episodes."""
    def create(_):
        return 200, {"id": next(numbers) % 2}

    numbers = itertools.count()
    with stand_in_server(like_babyai(create=create)) as (url, seen):
        first, second = RemoteEnv("babyai", url), RemoteEnv("babyai", url)
        first.reset(0)
        second.reset(1)
        with pytest.raises(EnvError, match="/create: 0 is the number of another live episode"):
            RemoteEnv("babyai", url)
        # It may have been restarted: each episode is checked once.
        seen.clear()
        for env in (first, second):
            assert [env.step("x").observation for _ in range(2)] == ["ok", "ok"]
        paths = [path for path, _ in seen]
        assert paths == ["/observation?id=0", "/step", "/step",
                         "/observation?id=1", "/step", "/step"]
        first.close()
        with pytest.raises(EnvError, match="/create: 1 is the number of another live episode"):
            RemoteEnv("babyai", url)
        assert RemoteEnv("babyai", url).reset(2) == GO


def test_a_number_below_earlier_ones_is_a_sign_of_a_restart():
    numbers = iter([5, 6, 0, 7])
    special = {"create": lambda _: (200, {"id": next(numbers)})}
    with stand_in_server(like_babyai(**special)) as (url, seen):
        three = [RemoteEnv("babyai", url) for _ in range(2)]
        for env in three:
            env.reset(0)
        three.append(RemoteEnv("babyai", url))
        three[2].reset(0)
        seen.clear()
        for env in three:
            env.step("x")
        paths = [path for path, _ in seen if "observation" in path]
        assert paths == ["/observation?id=5", "/observation?id=6"]


def test_a_call_has_a_deadline_and_a_refused_port_is_known_at_once():
    def hang(_):
        time.sleep(30)

    start = time.monotonic()
    with stand_in_server(like_babyai(step=hang)) as (url, _):
        env = RemoteEnv("babyai", url)
        env.reset(0)
        env.timeout = 0.4
        with pytest.raises(EnvError, match="Timeout"):
            env.step("x")
        assert 0.3 < time.monotonic() - start < 15
        env.close()
    with refusing() as dead:
        for url in (dead, "nonsense", "http://", "ftp://127.0.0.1"):
            with pytest.raises(EnvError):
                RemoteEnv("babyai", url)
    assert time.monotonic() - start < 15


def test_a_reply_that_trickles_in_has_the_same_deadline(monkeypatch):
    monkeypatch.setattr(RemoteEnv, "create_timeout", 0.5)
    monkeypatch.setattr(RemoteEnv, "tries", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def drip():
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    for _ in range(100):
                        peer.sendall(b" ")
                        time.sleep(0.05)
                except OSError:
                    pass

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EnvError, match="no end of the reply"):
            RemoteEnv("babyai", url)
        assert time.monotonic() - start < 1.5


# ---- pools and runs ----


def created_and_closed(seen):
    """How many episodes a server was asked to create, and to close."""
    paths = [path for path, _ in seen]
    return paths.count("/create"), paths.count("/close")


def test_episodes_are_spread_over_the_servers_and_a_dead_one_is_passed_over():
    with (refusing() as dead, stand_in_server(like_babyai()) as (one, seen_one),
          stand_in_server(like_babyai()) as (two, seen_two)):
        for urls, expected in (([one, two], [4, 4]), ([dead, one, two], [3, 5])):
            seen_one.clear()
            seen_two.clear()
            with EnvPool({"babyai": urls}) as pool:
                futures = [pool.take("babyai").call(lambda env: env.reset(0)) for _ in range(8)]
                assert [f.result(20) for f in futures] == [GO] * 8
            assert sorted(created_and_closed(seen)[0] for seen in (seen_one, seen_two)) == expected
            assert created_and_closed(seen_one + seen_two) == (8, 8)
        pool = EnvPool({"babyai": [dead]})
        with pytest.raises(EnvError, match="refused"):
            pool.take("babyai").call(lambda env: env.reset(0)).result(20)


def test_episodes_are_closed_however_a_run_ends(tiny, capsys):
    broken = threading.Event()

    def reset(_):
        return 200, {"error": "no power"} if broken.is_set() else {"observation": GO}

    with stand_in_server(like_babyai(reset=reset)) as (url, seen):
        # The second one ends in the middle of a rollout: no environment was given back.
        for error, items in ((SystemExit, ["babyai_1", "babyai_2"]),
                             (ValueError, ["babyai_1", "nowhere_2"])):
            with pytest.raises(error), EnvPool({"babyai": [url]}) as pool:
                rollout(*tiny, pool, items, 2, max_tokens=4)
                sys.exit(3)
            created, closed = created_and_closed(seen)
            assert created == closed > 0
            seen.clear()
        broken.set()
        args = ["--env_url", url, "--items", "2", "--horizon", "2", "--max_tokens", "4"]
        assert evaluation.main(args) == 1
        assert "no power" in capsys.readouterr().err
        created, closed = created_and_closed(seen)
        assert created == closed > 0


def test_worlds_that_only_servers_have_need_an_address():
    with pytest.raises(envs.UserError, match="'webshop'.*--env_url"):
        make_env("webshop")
    with pytest.raises(envs.UserError, match="'chess'.*academia"):
        envs.world_class("chess", "http://any")
    with (stand_in_server(lambda *_: (200, "hello")) as (url, _),
          pytest.raises(envs.UserError, match="topk")):  # the world's arguments are the server's
        envs.check_env("searchqa", [url], topk=3)


@pytest.mark.parametrize("name", ["maze", "wordle"])
def test_maze_and_wordle_are_played_from_the_command_line(name, tmp_path):
    """Their address has a path, at which GET finds nothing, and their items another name."""
    folder = tmp_path / f"AgentEval/lmrlgym_{name}"
    folder.mkdir(parents=True)
    items = [{"item_id": f"lmrlgym_{name}_{n}"} for n in range(20)]
    (folder / f"lmrlgym_{name}_test.json").write_text(json.dumps(items))
    sent = []

    def answer(path, body):
        if path == "/":
            return 200, b'"This is environment LMRL-Gym."'
        if not path.startswith(f"/{name}/") or path == f"/{name}/":
            return 404, {"detail": "Not Found"}
        if path == f"/{name}/step":
            sent.append(body)
            return 200, {"observation": "There is a wall.", "reward": 0, "done": False}
        return 200, fixed_reply(name, path.removeprefix(f"/{name}"))

    args = ["--env", name, "--data", str(tmp_path), "--out", str(tmp_path / "result.json")]
    with stand_in_server(answer) as (url, seen):
        with pytest.raises(envs.UserError, match=f"{url}/{name}/"):
            envs.check_env(name, [url])
        how = ["--samples", "1", "--horizon", "2", "--slots", "1", "--items", "3"]
        assert not evaluation.main([*args, *how, "--env_url", f"{url}/{name}/"])
    key = {"maze": "game", "wordle": "seed"}[name]
    numbers = {body[key] for path, body in seen if path.endswith("/reset")}
    assert len(numbers) == 3 and numbers < set(range(20)) and sent
    assert envs.split_item(f"lmrlgym_{name}_3") == (name, 3)


def test_the_wrong_world_behind_an_address_is_found(servers):
    """By GET /, where the server names its world; else by the first observation. Worlds that
    AgentGym does not have are named by their classes."""
    babyai, crafting = servers["babyai"], servers["textcraft"]
    for name, url, other in (("babyai", crafting, "TextCraft"), ("webshop", babyai, "BabyAI"),
                             ("textworld", babyai, "BabyAI")):
        with pytest.raises(envs.UserError, match=f"{url} plays {other}, not {name}"):
            envs.check_env(name, [url])
    envs.check_env("babyai", [babyai])
    with stand_in_server(like_babyai()) as (url, _):  # it says "hello"
        envs.check_env("textcraft", [url])
        with pytest.raises(EnvError, match=f"{url}/reset: no first observation of textcraft"):
            RemoteEnv("textcraft", url).reset(0)


def test_bodies_have_a_limit_in_both_directions(servers, monkeypatch):
    def chunks():
        for _ in range(40):
            yield b" " * 65536

    def one_by_one():
        for byte in b'{"id": 987654, "action": "x"}':
            yield bytes([byte])

    url = servers["babyai"] + "/step"
    for body in (b" " * (2 << 20), chunks()):
        assert requests.post(url, data=body, timeout=10).status_code == 413
    reply = requests.post(url, data=one_by_one(), timeout=10,
                          headers={"Content-Type": "application/json"})
    assert "987654" in reply.json()["error"]
    monkeypatch.setattr(agentgym, "LARGEST_REPLY", 1000)
    with stand_in_server(like_babyai(reset=(200, {"observation": "x" * 2000}))) as (url, _):
        env = RemoteEnv("babyai", url)
        with pytest.raises(EnvError, match="a reply of more than"):
            env.reset(0)
        env.close()


def test_slow_clients_are_cut_off_and_idle_connections_are_not():
    with serving("babyai", seconds=1) as (url, _):
        env = RemoteEnv("babyai", url)
        env.reset(0)
        port = int(url.split(":")[-1])
        silent, head, body, again = (socket.create_connection(("127.0.0.1", port))
                                     for _ in range(4))
        head.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\n")
        body.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        again.settimeout(10)
        for pause in (1.5, 0):  # longer than a request may take
            again.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            reply = b""
            while not reply.endswith(b'BabyAI."'):
                part = again.recv(65536)
                assert part  # not closed
                reply += part
            assert reply.startswith(b"HTTP/1.1 200")
            time.sleep(pause)
        again.sendall(b"GET")
        for slow in (silent, head, again):
            slow.settimeout(10)
            assert slow.recv(10) == b""  # closed
        body.settimeout(10)
        assert body.recv(65536).startswith(b"HTTP/1.1 408")
        assert env._is_connected()
        assert env.step("turn left").observation


def test_numbers_of_episodes_cannot_be_guessed_but_on_loopback():
    with serving("textcraft", "--random_ids") as (url, _):
        three = [RemoteEnv("textcraft", url) for _ in range(3)]
        numbers = {env.episode_id for env in three}
        assert len(numbers) == 3 and min(numbers) > 1 << 32 and max(numbers) < 1 << 53
        for item, env in enumerate(three):
            assert env.reset(item) == make_env("textcraft").reset(item)
            assert env.server.doubts == 0
            env.close()
    for flags, is_random in ((("--host", "0.0.0.0"), True), ((), False)):
        with serving("babyai", *flags) as (url, _):
            number = requests.post(url.replace("0.0.0.0", "127.0.0.1") + "/create").json()["id"]
            assert number > 1 << 32 if is_random else number == 0


def test_an_episode_that_is_being_made_is_not_reaped(monkeypatch):
    first_made = threading.Event()
    go_on = threading.Event()

    def make(name):
        if first_made.is_set():
            go_on.wait(10)
        first_made.set()
        return make_env("babyai")

    monkeypatch.setattr(serve, "make_env", make)
    store = serve.EpisodeStore("babyai", idle_seconds=60)
    store.create()
    with ThreadPoolExecutor() as threads:
        number = threads.submit(store.create)
        time.sleep(0.2)
        assert not number.done()
        store.idle_seconds = 0.05
        store.reap()
        go_on.set()
        assert store.reset(number.result(), 1)["observation"]


def test_the_address_of_a_server_on_ipv6_can_be_used():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no loopback address of IPv6")
    with serving("textcraft", "--host", "::1") as (url, _):
        assert make_env("textcraft", url=url).reset(0).startswith("Crafting commands")
