"""The web world at work: `python experiments/web.py screenshots | solve [N] | load [EPISODES STEPS] | step | navigate FOLDER` (cwd: the repository; needs Chromium).

screenshots: docs/web_*.png. solve: N items of the held-out set (default 100) by their plans. load: EPISODES at once (default 32), a random
valid action each, STEPS each (default 100): steps a second, memory, and whether an episode saw another's mark; the browser is killed by
its process id in the middle with `kill` as the last word. step: how long a step and a reset take, one episode alone.
navigate: item sets of the easiest tasks, those done by one click, for train.py's --data FOLDER.
"""

import json
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs import EnvError, items, make_env, split_item  # noqa: E402
from websites import tasks  # noqa: E402
from worlds.webarena import browser, plans, tree  # noqa: E402
from worlds.webarena.env import embedded_websites  # noqa: E402

EPISODE = 50  # steps; WebArena's have 30 at most
SHOTS = {"shop": "/category/kitchen", "forum": "/f/books?sort=top", "code": "{}/-/issues?state=open", "admin": "/"}


def navigate(folder):
    easy = [n for n, t in enumerate(tasks.TEMPLATES) if t.kind == "navigate" and all(len(tasks.make(n + len(tasks.TEMPLATES) * s)[1]) == 1 for s in range(9))]
    for path, seeds in (("AgentItemId/webarena_train.json", range(100)), ("AgentEval/webarena/webarena_test.json", range(1000, 1030)),
                        *((f"AgentEval/webarena/{site}.json", range(1000, 1030)) for site in tasks.PLACE)):
        file = Path(folder) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = [n + len(tasks.TEMPLATES) * s for s in seeds for n in easy if file.stem in (tasks.TEMPLATES[n].site, "webarena_train", "webarena_test")]
        file.write_text(json.dumps([{"item_id": f"webarena_{n}"} for n in numbers], indent=0) + "\n")
    print("\n".join(f"{tasks.TEMPLATES[n].site:6} {tasks.TEMPLATES[n].sentence}" for n in easy))


def memory():
    """Bytes of this process and all it started (proportional set size: shared pages are shared out)."""
    parents, total = {}, 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    ours = {os.getpid()}
    while more := {p for p, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for p in ours:
        try:
            total += 1024 * next(int(line.split()[1]) for line in Path(f"/proc/{p}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return total


def screenshots():
    browser.FLAGS = [flag for flag in browser.FLAGS if "compositing" not in flag]  # there is no picture without it
    env = make_env("webarena", height=720, width=1100)
    env.reset(0)
    for name, path in SHOTS.items():
        if name == "code":
            db = embedded_websites().episodes[env.episode][0]
            path = path.format("/" + db.execute("select path from project order by stars desc").fetchone()[0])
        env.browser.call(env.window.goto, embedded_websites().address(name) + path)
        file = Path(__file__).parent.parent / f"docs/web_{name}.png"
        env.browser.call(lambda at=str(file): env.window.page.screenshot(path=at))
        print(file, file.stat().st_size)
    env.close()


def solve(count=100):
    names, start, wins, steps = items("webarena", "test"), time.monotonic(), 0, 0
    env = make_env("webarena")
    inner, calls = env.step, []
    env.step = lambda action: calls.append(1) or inner(action)
    for name in random.Random(0).sample(names, min(count, len(names))):
        wins += plans.solve(env, split_item(name)[1]).success
    seconds, steps = time.monotonic() - start, len(calls)
    print(f"{wins} of {min(count, len(names))} solved, {steps} steps in {seconds:.0f} s")
    env.close()


def step():
    env, resets, steps, rng = make_env("webarena"), [], [], random.Random(0)
    for n in range(30):
        at = time.monotonic()
        text = env.reset(n)
        resets.append(time.monotonic() - at)
        for _ in range(6):
            action = any_action(rng, text)
            at = time.monotonic()
            done = env.step(f"```{action}```")
            if action.startswith("click"):
                steps.append(time.monotonic() - at)
            text = done.observation if done.valid else text
    for name, values in (("reset", resets[1:]), ("click", steps)):
        values.sort()
        print(f"{name}: median {1000 * statistics.median(values):.0f} ms, p95 {1000 * values[int(0.95 * len(values))]:.0f} ms, {len(values)} of them")
    env.close()


def any_action(rng, text, mark="mark"):
    """An action on one of an observation's elements, or a scroll; `mark` is what it writes."""
    found = [line.split("] ")[0].split("[")[-1] + " " + line.split("] ")[1] for line in text.splitlines() if "] " in line
             and line.lstrip().startswith("[")]
    fields = [f.split()[0] for f in found if f.split()[1] in ("textbox", "searchbox")]
    links = [f.split()[0] for f in found if f.split()[1] in ("link", "button")]
    if fields and rng.random() < 0.2:
        return f"type [{rng.choice(fields)}] [{mark}] [1]"
    return f"click [{rng.choice(links)}]" if links and rng.random() < 0.9 else rng.choice(["scroll [down]", "scroll [up]", "go_back"])


def load(episodes=32, steps=100, kill=False):
    """Each episode writes a mark of its own into its shop address (and wherever it writes) and finds that one there whenever it looks. It begins
    anew every EPISODE steps: until then playwright keeps 30 kB of every page that was opened."""
    done, errors, foreign, lock = [0], [], [], threading.Lock()

    def play(k):
        env, rng = make_env("webarena"), random.Random(k)
        mark, text, count = f"Mark{k:03} Street", "", 0
        while count < steps:
            try:
                text = env.reset(k)
                env.step("```goto [http://shop.localhost/account/edit]```")
                number = tree.find(env._observe(), "textbox", "Street")
                env.step(f"```type [{number}] [{mark}] [1]```")
                for n in range(min(EPISODE, steps - count)):
                    if n % 20 == 19:
                        seen = env.step("```goto [http://shop.localhost/account]```").observation
                        if "Telephone" in seen and f"Mark{k:03}" not in seen or any(f"Mark{j:03}" in seen for j in range(episodes) if j != k):
                            foreign.append(k)
                            print(f"episode {k} sees\n{seen}", flush=True)
                    result = env.step(f"```{any_action(rng, text, mark)}```")
                    text = result.observation if result.valid else text
                    count += 1
                    with lock:
                        done[0] += 1
            except EnvError as e:
                errors.append(str(e))
                count += 1
        env.close()
    threads = [threading.Thread(target=play, args=(k,)) for k in range(episodes)]
    start = time.monotonic()
    [t.start() for t in threads]
    before, killed = 0, not kill
    while any(t.is_alive() for t in threads):
        time.sleep(10)
        seconds = time.monotonic() - start
        print(f"{seconds:5.0f} s  {done[0]} steps  {(done[0] - before) / 10:.1f} a second  {memory() / 2**30:.2f} GB  {len(errors)} errors",
              flush=True)
        before = done[0]
        if not killed and done[0] > episodes * steps / 2:
            killed = True
            next(b for found in browser._BROWSERS.values() for b in found).kill()
            print("killed one of the browsers", flush=True)
    print(f"{episodes} episodes x {steps}: {done[0] / (time.monotonic() - start):.1f} steps/s, {len(errors)} env_errors, {len(foreign)} saw "
          "another's mark")


if __name__ == "__main__":
    what, *numbers = sys.argv[1:] or ["step"]
    does = {"screenshots": screenshots, "solve": solve, "step": step, "load": load, "navigate": navigate}
    if what not in does:
        sys.exit(__doc__)
    does[what](
        *(n == "kill" or (int(n) if n.isdecimal() else n) for n in numbers))
