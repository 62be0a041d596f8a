"""Many episodes at once: `python experiments/load.py sciworld 64` in this process, `python experiments/load.py babyai 256 --serve`
on a server of ours. Each episode has a thread, and plays `--steps` random actions of a fixed list.
-> steps/s over the busy time, latencies (ms), memory of this process and its children (MiB, the sum of what is resident)."""

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import items, make_env, split_item  # noqa: E402

ACTIONS = {"sciworld": ["look around", "open door to kitchen", "go to kitchen", "open door to hallway", "go to hallway", "inventory",
                        "pick up picture", "look at air", "wait1", "open door to art studio", "go to art studio"],
           "babyai": ["turn left", "turn right", "move forward", "check available actions"],
           "textcraft": ["inventory", "get 1 oak log", "craft 4 oak planks using 1 oak log"]}


def resident():
    """MiB of this process and everything below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found, new = set(), {os.getpid()}
    while new:
        found |= new
        new = {p for p, parent in parents.items() if parent in new} - found
    total = 0
    for pid in found:
        try:
            total += int(next(line for line in open(f"/proc/{pid}/status") if line.startswith("VmRSS")).split()[1])
        except (OSError, StopIteration):
            pass
    return total / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", choices=list(ACTIONS))
    parser.add_argument("episodes", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help="on a server of ours, in a process of its own")
    args = parser.parse_args()
    url, server = None, None
    if args.serve:
        server = subprocess.Popen([sys.executable, "envs.py", "serve", "--env", args.env, "--port", "0"], text=True,
                                  stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
        url = server.stdout.readline().split()[-1]
    try:
        measure(args, url)
    finally:
        if server:
            server.terminate()
            server.wait(10)


def measure(args, url):
    names, ready, go = items(args.env, "test"), threading.Barrier(args.episodes + 1), threading.Event()
    resets, steps, failed = [], [], []

    def play(k):
        rng = random.Random(k)
        try:
            env, begin = make_env(args.env, url), time.perf_counter()
            env.reset(split_item(names[k % len(names)])[1])
            resets.append(time.perf_counter() - begin)
            ready.wait()
            go.wait()
            for _ in range(args.steps):
                begin = time.perf_counter()
                env.step(rng.choice(ACTIONS[args.env]))
                steps.append(time.perf_counter() - begin)
            env.close()
        except Exception as e:
            failed.append(repr(e))
            ready.abort()

    before, begin = resident(), time.perf_counter()
    threads = [threading.Thread(target=play, args=(k,)) for k in range(args.episodes)]
    [t.start() for t in threads]
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        sys.exit(f"{len(failed)} episodes failed; the first: {failed[0]}")
    started, memory, begin = time.perf_counter() - begin, resident(), time.perf_counter()
    go.set()
    [t.join() for t in threads]
    took = time.perf_counter() - begin
    if failed:
        sys.exit(f"{len(failed)} episodes failed; the first: {failed[0]}")
    p50, p99 = np.percentile(np.array(steps) * 1000, [50, 99])
    print(f"{args.env}, {args.episodes} episodes{' on a server' * args.serve}: started in {started:.1f} s, {len(steps) / took:.0f} steps/s, "
          f"step p50 {p50:.1f} p99 {p99:.1f} ms, memory {before:.0f} -> {memory:.0f} -> {resident():.0f} MiB")


if __name__ == "__main__":
    main()
