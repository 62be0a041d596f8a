"""Whether memory grows: over training steps, over episodes, and in a server with bad clients.

    python experiments/memory.py train | WORLD | server [COUNT]

train: COUNT (1,000) steps of training on the built-in model, each of four trajectories, at a
learning rate so low that the policy does not collapse.
WORLD (babyai, textcraft, searchqa, sciworld, webarena): COUNT episodes (2,000; sciworld and
webarena: 300) of held-out items in one environment, with random actions where the world lists its
valid ones, else the expert's, 20 turns at most.
server: COUNT (1,000) bad requests to our server, and then 600 connections that send half a request.

The resident memory of the Python process is sampled at every step or episode. It must not grow by
more than 2 % after the first quarter (medians of a tenth of the samples each), and what runs below
it, SciWorld's JVM or the browser, must stay below 2,048 MiB. Exit status 1 if it does not.
"""

import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(ROOT / "data")]
import envs  # noqa: E402
from load import process_tree, resident  # noqa: E402
from policies import play  # noqa: E402

LARGEST_GROWTH = 0.02
CEILING = 2048  # MiB, of the processes below
COUNTS = {"sciworld": 300, "webarena": 300, "train": 1000, "server": 1000}


class Samples:
    """The memory of a process and of what runs below it, sampled again and again."""

    def __init__(self, pid: int):
        self.pid = pid
        self.own = []
        self.below = []

    def add(self):
        self.own.append(resident([self.pid]))
        self.below.append(resident(process_tree(self.pid) - {self.pid}))

    def verdict(self) -> int:
        """Print the figures -> the exit status."""
        tenth = max(1, len(self.own) // 10)
        quarter = max(tenth, len(self.own) // 4)
        before = statistics.median(self.own[quarter - tenth:quarter])
        after = statistics.median(self.own[-tenth:])
        growth = after / before - 1
        below = max(self.below)
        holds = growth <= LARGEST_GROWTH and below <= CEILING
        print(f"{len(self.own)} samples: {before:.0f} MiB after a quarter, {after:.0f} MiB at the "
              f"end ({growth:+.1%}), {below:.0f} MiB at most below it: "
              f"{'holds' if holds else 'FAILS'}")
        return int(not holds)


def train(steps):
    """The memory of train.py over its steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = subprocess.Popen(
            [sys.executable, "train.py", "--items_per_step", "2", "--rollouts_per_item", "2",
             "--lr", "1e-5", "--steps", str(steps), "--save_every", "100", "--keep", "1", "--out",
             str(out)],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=(Path(folder) / "stderr").open("w"))
        rows = out / "metrics.jsonl"
        samples = Samples(run.pid)
        with tqdm(total=steps, desc="steps") as bar:
            while run.poll() is None:
                time.sleep(0.05)
                done = rows.read_bytes().count(b"\n") if rows.exists() else 0
                if done > bar.n:
                    bar.update(done - bar.n)
                    samples.add()
        if run.returncode:
            sys.exit((Path(folder) / "stderr").read_text()[-500:])
    return samples.verdict()


def world(name, episodes):
    """The memory of this process over episodes of a world."""
    env = envs.make_env(name)
    items = envs.items(name, "test")
    samples = Samples(os.getpid())

    def policy(rng, _):
        actions = env.valid_actions()
        return rng.choice(actions) if actions else env.expert()

    rng = random.Random(0)
    for episode in tqdm(range(episodes), desc=name):
        play(env, items[episode % len(items)], 20, policy, rng)
        samples.add()
    env.close()
    return samples.verdict()


def bad_request(url, rng):
    """Send what no client of the protocol sends."""
    path = rng.choice(["create", "reset", "step", "close", "observation", "nothing"])
    kind = rng.randrange(5)
    if kind == 0:
        requests.post(f"{url}/{path}", data=rng.randbytes(rng.randrange(5000)), timeout=60)
    elif kind == 1:
        body = {"id": rng.choice([10**9, "x", None, [], -1]), "action": "a" * rng.randrange(10**5)}
        requests.post(f"{url}/{path}", json=body, timeout=60)
    elif kind == 2:
        requests.post(f"{url}/{path}", data="[" * rng.randrange(10**5), timeout=60)
    elif kind == 3:
        try:
            pieces = (b"x" * 10**5 for _ in range(100))
            requests.post(f"{url}/{path}", data=pieces, timeout=60)
        except requests.ConnectionError:
            pass  # the server does not read all of it
    else:
        requests.get(f"{url}/{path}?id={rng.randrange(10**12)}", timeout=60)


def server(count):
    """The memory of our server over bad requests, and after 600 slow connections."""
    command = [sys.executable, "envs.py", "serve", "--env", "textcraft", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    port = int(process.stdout.readline().split(":")[-1])
    url = f"http://127.0.0.1:{port}"
    samples = Samples(process.pid)
    rng = random.Random(0)
    for _ in tqdm(range(count), desc="bad requests"):
        bad_request(url, rng)
        samples.add()
    slow = []
    for _ in tqdm(range(600), desc="slow connections"):
        slow.append(socket.create_connection(("127.0.0.1", port)))
        slow[-1].sendall(b"POST /step HTTP/1.1\r\nContent-Length: 100\r\n")
        samples.add()
    env = envs.make_env("textcraft", url=url)  # served while 600 others wait
    assert env.reset(0) and env.step("inventory").observation
    env.close()
    for connection in tqdm(slow, desc="closed by the server"):
        connection.settimeout(60)
        assert connection.recv(1) == b""
        samples.add()
    process.terminate()
    return samples.verdict()


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) in (2, 3) else ""
    names = {"train": train, "server": server}
    if what not in names and what not in envs.WORLDS:
        sys.exit(__doc__)
    number = int(sys.argv[2]) if len(sys.argv) == 3 else COUNTS.get(what, 2000)
    sys.exit(names[what](number) if what in names else world(what, number))
