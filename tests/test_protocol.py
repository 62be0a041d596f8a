"""AgentGym's HTTP protocol: our client against servers that do everything wrong, our server against recorded traffic, and
both against each other. Servers run in processes of their own, on free loopback ports."""

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

import pytest
import requests
from conftest import ROOT

import envs
from envs import EnvError, EnvPool, Step, make_env
from rollout import rollout
from worlds import agentgym
from worlds.agentgym import RemoteEnv

pytest.importorskip("uvicorn")
RUN = os.environ | {"OMP_NUM_THREADS": "1"}

SLOW = '''
import itertools, time
from envs import Env, EnvError, Step
made = itertools.count()


class Slow(Env):
    """Says which of the worlds made it is; a step sleeps for as long as its action says."""
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
        alone, self.busy = not self.busy, True
        time.sleep(float(action))
        self.busy = False
        return Step("alone" if alone else "together", 0.25, 0.5)
'''


@contextmanager
def serving(env, *flags, folder=None):
    """Our server in a process -> (url, process). `folder` gets the world "slow"."""
    code = "import sys; from worlds import serve; sys.exit(serve.main())"
    if folder:
        (folder / "slow.py").write_text(SLOW)
        code = (f"import sys; sys.path.insert(0, {str(folder)!r}); from worlds import serve; "
                "serve.WORLDS['slow'] = 'slow:Slow'; sys.exit(serve.main())")
    command = [sys.executable, "-c", code, "serve", "--env", env, "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=RUN, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def servers():
    with serving("babyai") as (babyai, _), serving("textcraft") as (textcraft, _):
        yield {"babyai": babyai, "textcraft": textcraft}


@contextmanager
def standing_in(answer, port=0):
    """A server that we do not have: answer(path, body) -> (status, reply); reply: JSON, or bytes as they are. None: hang up.
    -> (url, list of (path, body) in the order in which they came)"""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            seen.append((self.path, body))
            result = answer(self.path, body)
            if result is None:
                self.close_connection = True
                return
            data = result[1] if isinstance(result[1], bytes) else json.dumps(result[1]).encode()
            self.send_response(result[0])
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
    """The bodies of a healthy server; `special`: path -> (status, reply), or a function that gives it."""
    good = {"create": {"id": 0}, "reset": {"observation": "go"}, "step": {"observation": "ok", "reward": 0, "done": False},
            "close": True}

    def answer(path, body):
        path = path.strip("/")
        if path in special:
            return special[path](body) if callable(special[path]) else special[path]
        return 200, good.get(path, "hello")
    return answer


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


# ---- the server, by recorded traffic ----

# Where the content differs from the recording, and why. Fields and types are compared all the same.
DIFFERS = {
    # goals behind numbers and the distractors hang on the file order and hash seed of the machine that recorded them
    ("textcraft", "/create"), ("textcraft", "/reset"), ("textcraft", "/observation"),
}
# sciworld's things stand in an order that hangs on the JVM's hash codes; ours are the same everywhere, so lines are sorted
IN_ANY_ORDER = {("sciworld", "/reset")}


@pytest.mark.parametrize("name", ["babyai", "textcraft", "sciworld"])
def test_recorded_requests_get_recorded_replies(name):
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    kinds = {bool: "truth", int: "number", float: "number", str: "text", dict: "dict", list: "list"}
    exchanges = json.loads((ROOT / f"tests/wire/{name}.json").read_text())["exchanges"]
    with serving(name) as (url, _):
        for e in exchanges:
            reply = requests.request(e["method"], url + e["path"], json=e.get("json"), params=e.get("params"), timeout=30)
            ours, theirs = reply.json(), e["response"]
            at = f"{e['method']} {e['path']} {e.get('json') or e.get('params')}: {ours}"
            assert reply.status_code == e["status"], at
            assert kinds[type(ours)] == kinds[type(theirs)], at
            if isinstance(theirs, dict):
                more = set(ours) - set(theirs)
                assert set(theirs) <= set(ours) and more <= ({"success", "valid", "progress"} if e["path"] == "/step" else set()), at
                assert all(kinds[type(ours[k])] == kinds[type(v)] for k, v in theirs.items()), at
                ours = {k: ours[k] for k in theirs}
            if (name, e["path"]) in IN_ANY_ORDER:
                for reply in ours, theirs:
                    reply["observation"] = sorted(reply["observation"].split("\n"))
            if (name, e["path"]) not in DIFFERS or isinstance(theirs, dict) and "error" in theirs:
                assert ours == theirs, at


@pytest.mark.parametrize("env, horizon", [("babyai", 4), ("textcraft", 3), ("searchqa", 3)])
def test_a_rollout_on_our_server_is_the_rollout_in_this_process(tiny, servers, env, horizon):
    if env == "searchqa":
        pytest.importorskip("bm25s")
        with serving(env) as (url, _):
            return same_rollouts(tiny, {env: url}, env, horizon)
    same_rollouts(tiny, servers, env, horizon)


def same_rollouts(tiny, servers, env, horizon):
    items = [f"{env}_{n}" for n in (8, 50, 121)]
    how = dict(samples=2, seed=5, max_tokens=24, invalid_penalty=0.05)
    here = rollout(*tiny, EnvPool(), items, horizon, **how)
    with EnvPool([servers[env]]) as pool:
        there = rollout(*tiny, pool, items, horizon, **how)
    assert [t.to_json() for t in there] == [t.to_json() for t in here]
    assert sum(t.turns for t in here) > 6


@pytest.mark.parametrize("env", ["babyai", "textcraft", "sciworld", "searchqa"])
def test_steps_are_the_same_here_and_there(env, servers):
    if env == "searchqa":
        pytest.importorskip("bm25s")
        with serving(env) as (url, _):
            same_steps(env, url, ["", "no tag", "<search> Tavi </search>", "<answer> nobody </answer>"])
    elif env == "sciworld":
        pytest.importorskip("scienceworld")
        with serving(env) as (url, _):
            same_steps(env, url, ["look around", "open door to kitchen", "dance", "focus on substance in metal pot"])
    else:
        actions = ["", "fly", "inventory", "drop", "turn left", "move forward", "get 1 oak log", "é\u2028\n"]
        same_steps(env, servers[env], actions)


def same_steps(env, url, actions):
    here, there = make_env(env), make_env(env, url=url)
    for item in (0, 3, 8):
        assert there.reset(item) == here.reset(item)
        solve = [] if env != "textcraft" else __import__("worlds.textcraft").textcraft.solution(item)
        for action in [*actions, *solve, *actions[:2]]:  # textcraft: to the end, and two steps further
            assert there.step(action) == here.step(action)
    there.close()


def test_64_episodes_at_once_from_as_many_threads(servers):
    def play(item, url=None):
        env = make_env("babyai", url=url)
        out = [env.reset(item), *(env.step(a) for a in ("turn left", "turn right", "move forward", "fly"))]
        env.close()
        return out
    with ThreadPoolExecutor(64) as threads:
        played = list(threads.map(lambda item: play(item, servers["babyai"]), range(64)))
    assert played == [play(item) for item in range(64)]


def test_bad_bodies_are_422_and_unknown_ids_are_errors(servers):
    url = servers["babyai"]
    for path, body in (("reset", {}), ("reset", {"id": 0, "data_idx": "a"}), ("step", {"id": 0}),
                       ("step", {"id": 0, "action": 3}), ("close", []), ("close", {"id": None}), ("create", 3)):
        assert requests.post(f"{url}/{path}", json=body).status_code == 422, (path, body)
    assert requests.post(url + "/step", data=b"{", headers={"Content-Type": "application/json"}).status_code == 422
    assert requests.get(url + "/observation?id=x").status_code == 422
    not_valid = {"error": "The id 987654 is not valid."}
    assert requests.get(url + "/observation?id=987654").json() == not_valid
    assert requests.post(url + "/reset", json={"id": 987654, "data_idx": 1}).json() == not_valid
    assert requests.post(url + "/close", json={"id": 987654}).json() is False
    number = requests.post(url + "/create").json()["id"]  # without a body, too
    assert "error" in requests.post(url + "/step", json={"id": number, "action": "turn left"}).json()  # not reset yet
    assert "error" in requests.get(f"{url}/observation?id={number}").json()
    assert "babyai has items" in requests.post(url + "/reset", json={"id": number, "data_idx": -1}).json()["error"]


def test_episodes_take_turns_worlds_are_used_again_and_idle_ones_are_reaped(tmp_path):
    with serving("slow", "--idle_seconds", "1.2", "--max_episodes", "3", folder=tmp_path) as (url, _):
        env = make_env_at(url)
        assert env.reset(4) == "world 0 item 4"
        assert env.step("0") == Step("alone", 0.25, 0.5)
        with ThreadPoolExecutor(4) as threads:  # four requests to one episode
            body = {"id": env.id, "action": "0.1"}
            replies = list(threads.map(lambda _: requests.post(url + "/step", json=body).json()["observation"], range(4)))
        assert replies == ["alone"] * 4
        with pytest.raises(EnvError, match="no item 13"):
            env.reset(13)
        env.close()
        env.close()
        again = make_env_at(url)
        assert again.reset(5) == "world 0 item 5"  # not made anew
        for action, why in (("fault", "the world broke"), ("crash", "status 500")):
            with pytest.raises(EnvError, match=why):
                again.step(action)
        again.close()
        envs_now = [make_env_at(url) for _ in range(3)]
        assert [e.reset(1) for e in envs_now] == ["world 1 item 1", "world 2 item 1", "world 3 item 1"]  # the broken one is gone
        with pytest.raises(EnvError, match="3 episodes are taken"):
            make_env_at(url)
        ids = [e.id for e in envs_now]
        until = time.monotonic() + 1.7
        while time.monotonic() < until:  # the first one is kept alive
            assert "observation" in requests.post(url + "/step", json={"id": ids[0], "action": "0"}).json()
            time.sleep(0.1)
        valid = ["error" not in requests.post(url + "/step", json={"id": i, "action": "0"}).json() for i in ids]
        assert valid == [True, False, False]
        assert envs_now[1].reset(7) in ("world 2 item 7", "world 3 item 7")  # the client makes itself a new episode


def make_env_at(url):
    return RemoteEnv("slow", url)


@pytest.mark.parametrize("seconds", [0.8, 60])
def test_sigterm_ends_the_server_within_10_seconds(seconds, tmp_path):
    """A request under way gets its answer if that takes no longer; a world that hangs is not waited for."""
    with serving("slow", folder=tmp_path) as (url, process):
        env, replies = make_env_at(url), []

        def step():
            try:
                replies.append(env.step(str(seconds)).observation)
            except EnvError:
                replies.append("lost")
        env.reset(0)
        thread = threading.Thread(target=step)
        thread.start()
        time.sleep(0.4)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0 and time.monotonic() - start < 10
        thread.join(5)
        assert replies == ["alone" if seconds < 5 else "lost"]


def test_nonsense_is_one_line_and_exit_code_2(servers):
    taken = servers["babyai"].split(":")[-1]
    for flags, says in ((["serve", "--env", "nope"], "unknown environment 'nope'; choose from babyai"), (["dance"], "serve"),
                        (["serve", "--port", taken], f"127.0.0.1:{taken}"), (["serve", "--port", "99999"], "99999"),
                        (["serve", "--env", "webshop"], "webshop"), (["serve", "--idle_seconds", "0"], "idle_seconds")):
        done = subprocess.run([sys.executable, "envs.py", *flags], cwd=ROOT, env=RUN, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("envs.py: ") and says in done.stderr
    bare = "import sys; sys.modules['fastapi'] = None; from worlds import serve; sys.exit(serve.main(['serve']))"
    done = subprocess.run([sys.executable, "-c", bare], cwd=ROOT, env=RUN, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and 'pip install -e ".[serve]"' in done.stderr


# ---- the client, on servers that we do not have ----

TOOL = ("env_idx", {"id": 0}, 7, {"id": 5}, "Go.", False, "observation")
BODIES = {  # id key, /create's body and reply, /reset's body but for the id, and reply, has /close, key of the text
    "babyai": ("id", {}, {"id": 7}, {"data_idx": 5}, {"observation": "Go.", "reward": 0, "score": 0}, True, "observation"),
    "textcraft": ("id", {"commands": None, "goal": None}, {"id": 7, "observation": "x", "done": False, "reward": 0},
                  {"data_idx": 5}, {"id": 7, "observation": "Go.", "done": False, "reward": 0}, True, "observation"),
    "sciworld": ("id", {}, {"id": 7}, {"data_idx": 5}, {"task_description": "Boil.", "observation": "Go."}, True,
                 "observation"),
    "searchqa": ("env_idx", {"id": 0}, 7, {"id": 5}, "Go.", True, "observation"),
    "webarena": ("env_idx", {}, {"env_idx": 7}, {"seed": 0, "idx": 5}, {"observation": "Go.", "sites": [], "object": ""}, True,
                 "observation"),
    "webshop": ("env_idx", {}, 7, {"session_id": 5}, ["Go.", None], True, "state"),
    "sqlgym": ("env_idx", {}, 7, {"item_id": 5}, ["Go.", None], False, "state"),
    "alfworld": ("id", {}, {"id": 7}, {"game": 5, "world_type": "Text"},
                 {"observation": "Go.", "available_actions": ["look", "wait"]}, False, "observation"),
    "maze": ("id", {}, {"id": 7}, {"game": 5}, {"observation": "Go."}, False, "observation"),
    "wordle": ("id", {}, {"id": 7}, {"seed": 5}, {"observation": "Go.", "id": 7}, False, "observation"),
    **dict.fromkeys(["weather", "todo", "movie", "sheet", "academia"], TOOL),
}


def test_the_table_is_complete():
    assert set(BODIES) == set(agentgym.PROTOCOLS)
    for name, protocol in agentgym.PROTOCOLS.items():
        assert protocol.prompt or name in envs.WORLDS
        if name not in envs.WORLDS:
            with pytest.raises(ValueError, match=f"'{name}' is played on an AgentGym server only: give --env_url"):
                make_env(name)


@pytest.mark.parametrize("name", BODIES)
def test_every_server_of_the_table_is_spoken_to_in_its_own_bodies(name):
    key, create, created, reset, first, has_close, text = BODIES[name]
    steps = iter([(0, False), (1, True)])

    def answer(path, body):
        if path != "/step":
            return 200, {"/create": created, "/reset": first, "/close": True}[path]
        reward, done = next(steps)
        reply = {text: "Well.", "reward": reward, "done": done, "info": None}
        if name == "sciworld":
            reply |= {"score": 100 * reward, "reward": 37}
        if name == "babyai":
            reply["score"] = reward
        if name == "alfworld":
            reply["available_actions"] = ["look"]
        if name == "webarena":
            del reply["done"]
            reply |= {"terminated": done, "truncated": False, "reward": 1}
        return 200, reply
    with standing_in(answer) as (url, seen):
        env = make_env(name, url=url)
        actions = "\nAvailable actions: look" if name == "alfworld" else ""
        assert env.prompt and env.whole_reply == (name in ("searchqa", "webarena") or BODIES[name] is TOOL)
        assert env.reset(5) == ("Boil.\n" if name == "sciworld" else "") + "Go." + (actions and actions + ", wait")
        assert env.step("a") == Step("Well." + actions)
        assert env.step("b") == Step("Well." + actions, 1.0, 1.0, True, True, progress=float(name == "sciworld"))
        env.close()
        env.close()
    assert seen == [("/create", create), ("/reset", reset | {key: 7}), ("/step", {key: 7, "action": "a"}),
                    ("/step", {key: 7, "action": "b"}), *([("/close", {key: 7})] if has_close else [])]


def steps_of(name, *replies):
    """The Steps that these /step replies are read as."""
    replies = iter(replies)
    key, _, created, _, first, _, _ = BODIES[name]
    fixed = {"/create": created, "/reset": first, "/close": True}
    with standing_in(lambda path, _: (200, fixed[path] if path in fixed else next(replies))) as (url, _):
        env = make_env(name, url=url)
        env.reset(5)
        out = []
        try:
            while True:
                out.append(env.step("x"))
        except EnvError:  # the replies are used up
            return out


def test_rewards_scores_and_successes_are_read_as_each_server_means_them():
    def read(name, *replies):
        return [(round(s.reward, 9), round(s.score, 9), s.done, s.success) for s in steps_of(name, *replies)]
    o, end = {"observation": "x", "done": False}, {"observation": "x", "done": True}
    assert read("sciworld", o | {"score": 7, "reward": 7}, o | {"score": 7, "reward": 0}, end | {"score": -100, "reward": -107}) \
        == [(0.07, 0.07, False, False), (0, 0.07, False, False), (-0.07, 0, True, False)]
    assert read("babyai", o | {"score": 0, "reward": 0}, end | {"score": 0.9, "reward": 0.9}) \
        == [(0, 0, False, False), (0.9, 0.9, True, True)]
    assert read("babyai", end | {"score": 0, "reward": 0}) == [(0, 0, True, False)]
    assert read("webshop", {"state": "x", "reward": 0.4, "done": True, "info": None}) == [(0.4, 0.4, True, False)]
    assert read("movie", o | {"reward": 1.0}, end | {"reward": 1.0}) == [(1, 1, False, False), (0, 1, True, True)]
    w = {"observation": "x", "reward": 1.0, "info": {}}
    assert read("webarena", w | {"terminated": False, "truncated": False}, w | {"terminated": False, "truncated": True}) \
        == [(0, 0, False, False), (0, 0, True, False)]
    refusals = {"babyai": ["The action is not recognized. Please check", "You cannot drop the object"],
                "textcraft": ["Could not execute dance", "Wrong item format: x", "Could not find a valid recipe for"],
                "sciworld": ["No known action matches that input."]}
    for name, texts in refusals.items():
        replies = [{"observation": t, "reward": 0, "score": 0, "done": False} for t in [*texts, "Well."]]
        assert [s.valid for s in steps_of(name, *replies)] == [False] * len(texts) + [True]


GARBAGE = [b"", b"hello", b"\xff\xfe", b"[]", b"{}", b"null", b"3", b'""', b'{"error": "no"}', b"[" * 50_000,
           b'{"observation": 3}', b'{"observation": null, "reward": 0, "done": false}', b'{"observation": "x", "done": false}',
           *(b'{"observation": "x", "reward": %s, "done": false}' % x for x in (b'"1"', b"NaN", b"1e999", b"9" * 400, b"null")),
           *(b'{"observation": "x", "reward": 0, "done": %s}' % x for x in (b'"no"', b"[]", b"2", b"null")),
           b'{"observation": "x", "reward": 0, "done": false, "score": "a"}']


def test_garbage_is_an_env_error_that_names_the_server_and_nothing_else():
    queue = []
    special = {name: lambda _: (200, queue.pop()) for name in ("create", "reset", "step")}
    with standing_in(like_babyai(**special)) as (url, seen):
        for data in GARBAGE:
            queue[:] = [data]
            if data != b"3":  # as good a number as any
                with pytest.raises(EnvError, match=url + "/create"):
                    RemoteEnv("babyai", url)
            queue[:] = [b'{"id": 0}']
            env = RemoteEnv("babyai", url)
            if b'"x"' not in data:
                queue[:] = [data, b'{"id": 1}', data]  # an error reply makes a new episode once
                with pytest.raises(EnvError, match=url):
                    env.reset(0)
            queue[:] = [b'{"observation": "go"}']
            env.reset(0)
            count, queue[:] = len(seen), [data]
            with pytest.raises(EnvError, match=url):
                env.step("x")
            assert len(seen) == count + 1
            env.close()
    with standing_in(lambda path, _: (200, {"env_idx": 1} if path == "/create" else {"observation": "TimeoutError"})) as (url, _):
        with pytest.raises(EnvError, match="TimeoutError"):
            make_env("webarena", url=url).reset(0)


def test_only_what_is_safe_to_repeat_is_repeated():
    failing = {}

    def sometimes(path, good):
        def answer(_):
            if failing.get(path):
                return failing[path].pop()
            return 200, good
        return answer
    special = {"create": sometimes("create", {"id": 0}), "reset": sometimes("reset", {"observation": "go"}),
               "step": sometimes("step", {"observation": "ok", "reward": 0, "done": False}), "close": sometimes("close", True)}
    with standing_in(like_babyai(**special)) as (url, seen):
        failing["create"], failing["reset"] = [(500, "x"), None], [None, (503, "x")]  # None: the connection breaks off
        env = RemoteEnv("babyai", url)
        assert env.reset(0) == "go" and [path for path, _ in seen] == ["/create"] * 3 + ["/reset"] * 3
        for fault in (None, (500, "x"), (503, "x"), (404, "x")):
            seen.clear()
            failing["step"] = [fault]
            with pytest.raises(EnvError, match=url + "/step"):
                env.step("x")
            assert len(seen) == 1  # it may have been taken
        assert env.step("x").observation == "ok"
        failing["reset"] = [(500, "x")] * 9
        seen.clear()
        with pytest.raises(EnvError, match="status 500"):
            env.reset(0)
        assert len(seen) == 3
        failing["reset"], failing["close"] = [(422, "x")], [(500, "x")]
        seen.clear()
        with pytest.raises(EnvError, match="status 422"):
            env.reset(0)
        env.close()
        assert [path for path, _ in seen] == ["/reset", "/close", "/close"]
        port = int(url.split(":")[-1])
        env = RemoteEnv("babyai", url)
        env.reset(0)
    back = threading.Event()

    def return_later():
        time.sleep(0.15)
        with standing_in(like_babyai(), port):
            back.wait(10)
    env.session.close()
    thread = threading.Thread(target=return_later)
    thread.start()
    env.tries = 9
    assert env.step("x").observation == "ok"  # refused: never sent, so it may be
    back.set()
    thread.join()


def test_a_call_has_a_deadline_and_a_refused_port_is_known_at_once():
    def trickle(_):
        time.sleep(30)
    with standing_in(like_babyai(step=trickle, close=trickle)) as (url, _):
        env = RemoteEnv("babyai", url, timeout=0.4)
        env.reset(0)
        start = time.monotonic()
        with pytest.raises(EnvError, match="Timeout"):
            env.step("x")
        assert 0.3 < time.monotonic() - start < 1.5
        env.protocol = env.protocol._replace(close=False)
        env.close()
    start = time.monotonic()
    with pytest.raises(EnvError, match="refused"):
        RemoteEnv("babyai", f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - start < 3
    for url in ("nonsense", "http://", "ftp://127.0.0.1"):
        with pytest.raises(EnvError):
            RemoteEnv("babyai", url)


def test_a_reply_that_trickles_in_has_the_same_deadline():
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
        with pytest.raises(EnvError, match="no end of the reply"):
            RemoteEnv("babyai", f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5, tries=1)
        assert time.monotonic() - start < 1.5


# ---- pools and runs ----


def counted(seen):
    return [sum(path == name for path, _ in seen) for name in ("/create", "/close")]


def test_episodes_are_spread_over_the_servers_and_a_dead_one_is_passed_over():
    with standing_in(like_babyai()) as (one, seen_one), standing_in(like_babyai()) as (two, seen_two):
        dead = f"http://127.0.0.1:{free_port()}"
        for urls, expected in (([one, two], [4, 4]), ([dead, one, two], [3, 5])):
            seen_one.clear()
            seen_two.clear()
            with EnvPool(urls) as pool:
                futures = [pool.take("babyai").call(lambda env: env.reset(0)) for _ in range(8)]
                assert [f.result(20) for f in futures] == ["go"] * 8
            assert sorted(counted(s)[0] for s in (seen_one, seen_two)) == expected
            assert counted(seen_one + seen_two) == [8, 8]
        with EnvPool([dead]) as pool, pytest.raises(EnvError, match="refused"):
            pool.take("babyai").call(lambda env: env.reset(0)).result(20)


def test_episodes_are_closed_however_a_run_ends(tiny, tmp_path, capsys):
    import eval as evaluation
    import train
    broken = []
    special = {"reset": lambda _: (200, {"error": "no power"} if broken else {"observation": "go"})}
    with standing_in(like_babyai(**special)) as (url, seen):
        def all_closed():
            created, closed = counted(seen)
            seen.clear()
            return created == closed > 0
        with pytest.raises(SystemExit), EnvPool([url]) as pool:
            rollout(*tiny, pool, ["babyai_1", "babyai_2"], 2, max_tokens=4)
            sys.exit(3)
        assert all_closed()
        with pytest.raises(ValueError), EnvPool([url]) as pool:  # broken off in the middle: nobody has given back
            rollout(*tiny, pool, ["babyai_1", "nowhere_2"], 2, max_tokens=4)
        assert all_closed()
        assert evaluation.main(["--env_url", url, "--items", "2", "--horizon", "2", "--max_tokens", "4"]) == 0
        assert all_closed()
        broken.append(True)
        assert evaluation.main(["--env_url", url, "--items", "2", "--horizon", "2", "--max_tokens", "4"]) == 1
        assert "no power" in capsys.readouterr().err and all_closed()
        cfg = train.parse_config(["--env_url", url, "--out", str(tmp_path / "r"), "--items_per_step", "2",
                                  "--rollouts_per_item", "2"])
        with pytest.raises(SystemExit, match="no power"):
            train.train(cfg)
        assert all_closed()


def test_a_world_that_wants_the_whole_reply_gets_it(tiny):
    def answer(path, body):
        return 200, {"/create": 1, "/reset": "Who?", "/close": True}.get(path) or {"observation": "?", "reward": 0, "done": False}
    with standing_in(answer) as (url, seen), EnvPool([url]) as pool:
        (t,) = rollout(*tiny, pool, ["searchqa_3"], 2, max_tokens=6)
    assert t.status == "horizon" and t.turns == 2
    assert [b["action"] for path, b in seen if path == "/step"] == [m["content"] for m in t.messages[3::2]]


def test_flags_know_the_worlds_that_only_servers_have(tmp_path):
    import train
    (tmp_path / "AgentItemId").mkdir()
    (tmp_path / "AgentItemId/webshop_train.json").write_text(json.dumps([{"item_id": f"webshop_{n}"} for n in range(40)]))
    args = ["--env", "webshop", "--data", str(tmp_path), "--out", str(tmp_path / "r")]
    with pytest.raises(ValueError, match="give --env_url"):
        train.parse_config(args)
    with standing_in(lambda *_: (200, "hello")) as (url, _):
        assert train.parse_config([*args, "--env_url", url]).env == "webshop"
        with pytest.raises(ValueError, match="unknown environment 'chess'; choose from .*academia"):
            train.parse_config(["--env", "chess", "--env_url", url])


def test_bodies_have_a_limit_in_both_directions(servers, monkeypatch):
    reply = requests.post(servers["babyai"] + "/step", data=b" " * (2 << 20), timeout=10)
    assert reply.status_code == 413
    monkeypatch.setattr(agentgym, "LARGEST_REPLY", 1000)
    with standing_in(like_babyai(reset=(200, {"observation": "x" * 2000}))) as (url, _):
        env = RemoteEnv("babyai", url)
        with pytest.raises(EnvError, match="a reply of more than"):
            env.reset(0)
        env.close()


def test_an_episode_that_is_being_made_is_not_reaped(monkeypatch):
    from worlds import serve
    begun, go = threading.Event(), threading.Event()

    def slow(name):
        if begun.is_set():  # the first one is made at once
            go.wait(10)
        begun.set()
        return make_env("babyai")

    monkeypatch.setattr(serve, "make_env", slow)
    games = serve.Games("babyai", idle_seconds=0.01)
    games.create()
    with ThreadPoolExecutor() as threads:
        number = threads.submit(games.create)
        time.sleep(0.1)
        games.reap()
        go.set()
        assert games.reset(number.result(), 1)["observation"]
