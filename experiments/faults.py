"""Training and evaluation on a server that fails: python experiments/faults.py [--steps 20]

Trains and evaluates on a server of ours behind a proxy that answers 10 % of the requests with
status 500, lets 5 % hang, tears 5 % of the replies, gives 2 % another shape and 2 % of the creates
a number that is in use, while the server is killed and started again three times, and another
client has taken the first 1,000 numbers. Then every trajectory that was kept is played again in
this process: each observation must be the same. Exit code 1 if one differs or a command fails.
"""

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import agent  # noqa: E402
from envs import make_env  # noqa: E402
from worlds.agentgym import LENIENT  # noqa: E402

ACTION_FORMAT = "react"  # of the built-in model in BabyAI


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
            with suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)


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
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
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
        with suppress(OSError):  # cut off
            super().handle()

    def log_message(self, *_):
        pass


def start_server(env):
    """Start our server in a new process -> (process, port), once it answers."""
    command = [sys.executable, "envs.py", "serve", "--env", env, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline().split(":")[-1])


def take_numbers(port, count):
    """Begin episodes on the server, as another client of it."""
    url = f"http://127.0.0.1:{port}"
    for number in range(count):
        created = requests.post(f"{url}/create", json={}, timeout=10).json()
        body = {"id": created["id"], "data_idx": number}
        requests.post(f"{url}/reset", json=body, timeout=10)


def restart_while_training(train, out, proxy, process, env_name, steps):
    """Replace the server three times in the middle of a rollout -> (the last one, restarts)."""
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
            until = proxy.counts["requests"] + 200  # in the middle of a rollout
            while proxy.counts["requests"] < until and train.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.wait()
            process, proxy.port = successor
            proxy.cut_off()
            successor = None
            restarts += 1
    return process, restarts


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


def main(env_name="babyai"):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    process, port = start_server(env_name)
    proxy = FaultyProxy(port, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        out, played = Path(folder) / "run", Path(folder) / "eval.jsonl"
        flags = ["--env", env_name, "--env_url", f"http://127.0.0.1:{proxy.server_port}",
                 "--deadline", "4", "--set", "create_deadline=20"]
        command = [sys.executable, "train.py", *flags, "--steps", str(args.steps), "--out",
                   str(out)]
        train = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        process, restarts = restart_while_training(train, out, proxy, process, env_name,
                                                   args.steps)
        command = [sys.executable, "eval.py", *flags, "--items", "60", "--model",
                   str(out / "final"), "--trajectories", str(played)]
        for _ in range(5):  # the one request at the start may meet a fault, too: exit code 2
            evaluation = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if "no environment server answers" not in evaluation.stderr:
                break
        process.kill()
        env = make_env(env_name)
        files = [*out.glob("trajectories/*.jsonl"), *played.parent.glob(played.name)]
        kept, different, all_played = map(sum, zip(*(replay(path, env) for path in files)))
    if evaluation.returncode:
        print(evaluation.stderr[-500:])
    print(f"training rc {train.returncode}, evaluation rc {evaluation.returncode}, {restarts} "
          f"restarts, faults {proxy.counts}; {all_played} trajectories, {kept} kept, "
          f"{different} of these do not follow from their own actions")
    return int(bool(different or train.returncode or evaluation.returncode or restarts < 3))


if __name__ == "__main__":
    sys.exit(main())
