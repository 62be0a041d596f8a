"""Many episodes at once, in this process or on a server of ours.

    python experiments/load.py sciworld 64
    python experiments/load.py babyai 256 --serve

Each episode has a thread, and plays `--steps` random actions of a fixed list. Prints steps/s over
the busy time, latencies (ms), and the memory of this process and its children (MiB, the sum of
what is resident).
"""

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs import items, make_env, split_item  # noqa: E402

ACTIONS = {
    "sciworld": [
        "look around", "open door to kitchen", "go to kitchen", "open door to hallway",
        "go to hallway", "inventory", "pick up picture", "look at air", "wait1",
        "open door to art studio", "go to art studio",
    ],
    "babyai": ["turn left", "turn right", "move forward", "check available actions"],
    "textcraft": ["inventory", "get 1 oak log", "craft 4 oak planks using 1 oak log"],
}


def process_tree(root=None):
    """The ids of a process, this one if root is None, and of all processes below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name stands in parentheses; the parent's id is the second field after.
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # the process has ended
            pass
    found = set()
    new = {root or os.getpid()}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new} - found
    return found


def resident(pids):
    """MiB that are resident, the sum over processes."""
    kib = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return kib / 1024


def measure(name, episodes, steps_per_episode, url):
    numbers = [split_item(item)[1] for item in items(name, "test")]
    ready = threading.Barrier(episodes + 1)
    go = threading.Event()
    steps = []  # seconds of each
    failed = []

    def play(k):
        rng = random.Random(k)
        try:
            env = make_env(name, url)
            env.reset(numbers[k % len(numbers)])
            ready.wait()
            go.wait()
            for _ in range(steps_per_episode):
                begin = time.perf_counter()
                env.step(rng.choice(ACTIONS[name]))
                steps.append(time.perf_counter() - begin)
            env.close()
        except Exception as e:
            failed.append(repr(e))
            ready.abort()

    def give_up():
        sys.exit(f"{len(failed)} episodes failed; the first: {failed[0]}")

    # Start all episodes.
    memory_before = resident(process_tree())
    begin = time.perf_counter()
    threads = [threading.Thread(target=play, args=(k,)) for k in range(episodes)]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        give_up()
    started = time.perf_counter() - begin
    memory_started = resident(process_tree())

    # Play all steps.
    begin = time.perf_counter()
    go.set()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    if failed:
        give_up()

    p50, p99 = np.percentile(np.array(steps) * 1000, [50, 99])
    where = " on a server" if url else ""
    print(
        f"{name}, {episodes} episodes{where}: started in {started:.1f} s, "
        f"{len(steps) / took:.0f} steps/s, step p50 {p50:.1f} p99 {p99:.1f} ms, "
        f"memory {memory_before:.0f} -> {memory_started:.0f} -> {resident(process_tree()):.0f} MiB"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", choices=list(ACTIONS))
    parser.add_argument("episodes", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--serve", action="store_true", help="on a server of ours, in a process of its own"
    )
    args = parser.parse_args()
    if not args.serve:
        measure(args.env, args.episodes, args.steps, None)
        return
    command = [sys.executable, "envs.py", "serve", "--env", args.env, "--port", "0"]
    server = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        url = server.stdout.readline().split()[-1]
        measure(args.env, args.episodes, args.steps, url)
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
