"""Faults that must do no harm: python experiments/faults.py [quick | chaos | NAME ...]

Plays every case of CASES with real processes: our servers and servers like AgentGym's that are
killed, are restarted and lie; a browser; a JVM; a full disk; signals. Prints a table of case, time
and verdict, and exits with 1 if one fails. Without arguments all cases are played (about 90 minutes
on two cores); `quick` plays the short ones, a name (see the table) that one.

`chaos` trains for 20 steps and evaluates on a server behind a proxy that answers 10 % of the
requests with status 500, lets 5 % hang, tears 5 % of the replies, gives 2 % another shape and 2 %
of the creates a number that is in use, while the server is killed and started again three times,
and another client has taken the first 1,000 numbers. Then every trajectory that was kept is played
again in this process: each observation must be the same.
"""

import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import agent  # noqa: E402
from envs import make_env  # noqa: E402
from worlds.agentgym import LENIENT  # noqa: E402


ACTION_FORMAT = "react"  # of the built-in model in BabyAI


class Case(NamedTuple):
    """A fault, and the command that must exit with 0 in spite of it."""

    what: str
    command: list[str]
    is_quick: bool = True


def tests(path, words):
    """The command that runs the tests of a file whose names hold one of the words."""
    return [sys.executable, "-m", "pytest", "-q", "-n0", f"tests/test_{path}.py", "-k",
            " or ".join(words.split())]


def script(name, *flags):
    return [sys.executable, f"experiments/{name}.py", *flags]


CASES = {
    "restart": Case("a server is restarted, another client takes the numbers",
                    tests("protocol", "restarted_server over_a_new_connection below_earlier")),
    "twice": Case("a server hands a number out twice", tests("protocol", "another_live_episode")),
    "chaos": Case("500, hangs, torn replies, wrong shapes, used numbers, three restarts",
                  script("faults", "chaos-run"), is_quick=False),
    "world": Case("the wrong world behind an address", tests("protocol", "wrong_world")),
    "replies": Case("replies of any shape; /reset that ends the episode",
                    tests("protocol", "garbage first_reply trickles limit_in_both")),
    "huge": Case("an observation of 21 MB", tests("rollout", "huge_observation")),
    "create": Case("environments that take long to make", tests("rollout", "making_of_an_env")),
    "clients": Case("chunked bodies of any length, slow clients",
                    tests("protocol", "chunked slow_clients numbers_of_episodes")),
    "jvm": Case("SciWorld: resets beside steps in one JVM",
                script("faults_sciworld"), is_quick=False),
    "redirects": Case("the browser is sent to another port",
                      tests("webarena", "another_server no_other_address"), is_quick=False),
    "again": Case("a run is started again, or twice at a time",
                  tests("train", "not_started_anew work_in_one_folder")),
    "signals": Case("SIGTERM, Ctrl-C, SIGHUP; torchrun with two processes",
                    tests("parallel", "ended_at_random signal_while"), is_quick=False),
    "kills": Case("30 kills, half of them while saving", script("kill"), is_quick=False),
    "damage": Case("bits flipped, files cut or missing in a checkpoint",
                   tests("checkpoint", "damaged bit")),
    "templates": Case("chat templates that loop, fail, fill the memory or tell the time",
                      tests("agent", "template")),
    "code": Case("a model folder with code of its own", tests("train", "its_own_code")),
    "evaluation": Case("an evaluation is killed", tests("eval", "killed_evaluation")),
    "lack": Case("a full disk, no memory", tests("train", "lack_of_disk")),
    "input": Case("items, configurations, metrics and flags that cannot be",
                  tests("train", "nonsense do_not_exist damaged_row without_a_chat_template")),
    "served": Case("a model's server that does not answer", tests("eval", "models_server")),
    "bad-clients": Case("1,000 bad requests and 600 slow connections",
                        script("memory", "server"), is_quick=False),
    "steps": Case("memory over 1,000 steps of training", script("memory", "train"),
                  is_quick=False),
    **{f"memory-{world}": Case(f"memory over {episodes} episodes of {world}",
                               script("memory", world), is_quick=False)
       for world, episodes in (("babyai", "2,000"), ("textcraft", "2,000"), ("searchqa", "2,000"),
                               ("sciworld", "300"), ("webarena", "300"))},
    "page": Case("a page of damaged files",
                 tests("view", "damaged fields_of_another_kind without_a_config deleted_row")),
}


# ---- chaos ----


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to `port`, a server on loopback, and does something wrong with many.

    A client's connection ends with the connection to the server, as it would without the proxy:
    see `cut_off`.
    """

    daemon_threads = True

    def __init__(self, port: int, seed: int):
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.port = port
        self.rng = random.Random(seed)
        self.counts = dict.fromkeys(("requests", "500", "hang", "torn", "shape", "used"), 0)
        self.numbers = [0]  # all that /create has given
        self.connections = set()
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def cut_off(self):
        """End all connections: the server has died."""
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was faster

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)
        self.backend = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)

    def finish(self):
        self.server.connections.discard(self.connection)
        self.backend.close()
        super().finish()

    def do_POST(self):
        """Pass a request on, or not."""
        proxy = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        proxy.counts["requests"] += 1
        draw = proxy.rng.random()
        if draw < 0.10:
            proxy.counts["500"] += 1
            return self.reply(500, b"{}")
        if draw < 0.15:
            proxy.counts["hang"] += 1
            time.sleep(6)  # longer than the deadline
            self.close_connection = True
            return
        try:
            is_json = {"Content-Type": "application/json"}
            self.backend.request(self.command, self.path, body, is_json)
            self.backend.auto_open = 0  # a lost connection is not reopened
            response = self.backend.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        if draw < 0.20:
            proxy.counts["torn"] += 1
            self.reply(response.status, data, cut=len(data) // 2)
            self.close_connection = True
            return
        if draw < 0.22:
            proxy.counts["shape"] += 1
            data = json.dumps({"reply": [data.decode()]}).encode()
        elif self.path == "/create" and draw < 0.24:
            proxy.counts["used"] += 1
            data = json.dumps({"id": proxy.rng.choice(proxy.numbers)}).encode()
        elif self.path == "/create":
            proxy.numbers.append(json.loads(data)["id"])
        self.reply(response.status, data)

    do_GET = do_POST

    def reply(self, status, data, cut=None):
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:cut])
        except OSError:
            self.close_connection = True

    def handle(self):
        try:
            super().handle()
        except OSError:
            pass  # cut off

    def log_message(self, *_):
        pass


def start_server(env):
    """Start our server in a new process -> (process, port), once it answers."""
    command = [sys.executable, "envs.py", "serve", "--env", env, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline().split(":")[-1])


def restart_server(proxy, process, successor):
    """Let another server, (process, port), take the place of the one behind the proxy, which is
    killed -> its process."""
    new, proxy.port = successor
    process.kill()
    process.wait()
    proxy.cut_off()
    return new


def wait_for_requests(proxy, count, process):
    """Return after so many more requests, or at the end of the process."""
    until = proxy.counts["requests"] + count
    while proxy.counts["requests"] < until and process.poll() is None:
        time.sleep(0.01)


def take_numbers(port, count):
    """Begin episodes on the server, as another client of it."""
    for number in range(count):
        url = f"http://127.0.0.1:{port}"
        created = requests.post(f"{url}/create", json={}, timeout=10).json()
        body = {"id": created["id"], "data_idx": number}
        requests.post(f"{url}/reset", json=body, timeout=10)


def replay(path, env):
    """Play the trajectories of a file again in this process -> the numbers of those that were
    kept, of those among them in which an observation differs, and of all."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if row["status"] != "env_error"]
    different = 0
    for row in kept:
        play = agent.Play(env, row["item"], 100, action_format=ACTION_FORMAT,
                          choose=LENIENT.get(row["env"]))
        said = [message["content"] for message in row["messages"]]
        seen = [play.send()[-1]["content"]]
        for reply in said[3::2]:
            messages = play.send(reply)
            seen.append(messages[-1]["content"] if messages else play.turn.observation)
        different += any(a.strip() != b.strip() for a, b in zip(seen, said[2::2]))
    return len(kept), different, len(rows)


def chaos(env_name="babyai", steps=20, seed=0):
    """Train and evaluate on a server behind the faulty proxy -> the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(env_name)
        proxy = FaultyProxy(port, seed)
        out = Path(folder) / "run"
        flags = ["--env", env_name, "--env_url", proxy.url, "--deadline", "4",
                 "--create_deadline", "20"]
        train = subprocess.Popen([sys.executable, "train.py", *flags, "--steps", str(steps),
                                  "--out", str(out)], cwd=ROOT, stderr=subprocess.DEVNULL)
        restarts = 0
        successor = None  # ready beforehand, so that the server is away for an instant only
        while train.poll() is None:
            time.sleep(0.05)
            if not successor and restarts < 3:
                successor = start_server(env_name)
                take_numbers(successor[1], 1000)
            rows = out / "metrics.jsonl"
            done = rows.read_text().count("\n") if rows.exists() else 0
            if restarts < 3 and done >= (restarts + 1) * steps // 4:
                wait_for_requests(proxy, 200, train)  # to be in the middle of a rollout
                process = restart_server(proxy, process, successor)
                successor = None
                restarts += 1
        played = Path(folder) / "eval.jsonl"
        for _ in range(5):  # the one request at the start may meet a fault, too: exit code 2
            evaluation = subprocess.run(
                [sys.executable, "eval.py", *flags, "--items", "60", "--model",
                 str(out / "final"), "--trajectories", str(played)],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if b"no environment server answers" not in evaluation.stderr:
                break
        process.kill()
        env = make_env(env_name)
        totals = [0, 0, 0]
        if evaluation.returncode:
            print(evaluation.stderr.decode()[-500:])
        for path in [*out.glob("trajectories/*.jsonl"), *played.parent.glob(played.name)]:
            totals = [a + b for a, b in zip(totals, replay(path, env))]
    kept, different, all_played = totals
    print(f"training rc {train.returncode}, evaluation rc {evaluation.returncode}, {restarts} "
          f"restarts, faults {proxy.counts}; {all_played} trajectories, {kept} kept, "
          f"{different} of these do not follow from their own actions")
    return int(bool(different or train.returncode or evaluation.returncode or restarts < 3))


# ---- the command ----


def main(args):
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    if args == ["chaos-run"]:
        return chaos()
    names = args
    if not args:
        names = list(CASES)
    elif args == ["quick"]:
        names = [name for name, case in CASES.items() if case.is_quick]
    unknown = set(names) - set(CASES)
    if unknown:
        sys.exit(f"faults.py: no case {min(unknown)}; there are quick, {', '.join(CASES)}")
    failed = 0
    print("| case | what goes wrong | what happened | seconds | verdict |\n|---|---|---|---|---|")
    for name in names:
        case = CASES[name]
        start = time.monotonic()
        done = subprocess.run(case.command, cwd=ROOT, capture_output=True, text=True)
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
        verdict = "holds" if done.returncode == 0 else "FAILS"
        failed += done.returncode != 0
        print(f"| {name} | {case.what} | {lines[-1]} | {time.monotonic() - start:.0f} | "
              f"{verdict} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
