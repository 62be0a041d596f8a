"""Item sets and load of the world webarena.

    python experiments/web.py navigate FOLDER
    python experiments/web.py fixed_link FOLDER
    python experiments/web.py load [EPISODES STEPS] [kill]         (needs Chromium)

navigate: item sets of the easiest tasks, those that one click solves, for train.py's --data FOLDER.
fixed_link: of the held-out tasks in such a FOLDER, the link of each site that solves most, and the
    share that it solves: a policy that never reads the task. Counted from the tasks' plans.
load: EPISODES at once (default 32) with STEPS random valid actions each (default 100). Prints steps
    per second, memory, and whether an episode saw another's mark. `kill`: one browser is killed in
    the middle, by its process id.
"""

import os
import random
import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
from envs import EnvError, categories, make_env, split_item  # noqa: E402
from make_items import held_out_templates, write_set  # noqa: E402
from websites import tasks  # noqa: E402
from worlds.webarena import browser, tree  # noqa: E402

EPISODE = 50  # steps of an episode under load; WebArena's have 30 at most


def navigate(folder):
    """Write item sets of the navigation tasks whose plans have a single step."""
    templates = tasks.TEMPLATES

    def is_one_click(number):
        solutions = [tasks.make(number + len(templates) * seed)[1] for seed in range(9)]
        return all(len(plan) == 1 for plan in solutions)

    def item_numbers(easy, seeds):
        return [number + len(templates) * seed for seed in seeds for number in easy]

    easy = [n for n, t in enumerate(templates) if t.kind == "navigate" and is_one_click(n)]
    held_out = held_out_templates()
    test = {templates[n].site: item_numbers([n], range(1000, 1030)) for n in easy if n in held_out}
    trained = [n for n in easy if n not in held_out]
    write_set(Path(folder).absolute(), "webarena", item_numbers(trained, range(100)), test)
    for n in easy:
        side = "held out" if n in held_out else "training"
        print(f"{side} {templates[n].site:6} {templates[n].sentence}")


def fixed_link(folder):
    """Print for each site the link that solves most held-out tasks, and their share."""
    links = {}  # site -> how many tasks each link solves
    for item, site in categories("webarena", folder).items():
        [(_, _, link)] = tasks.make(split_item(item)[1])[1]
        links.setdefault(site, Counter())[link] += 1
    for site, counts in links.items():
        (best, count), = counts.most_common(1)
        print(f"{site:6} {best!r} {count / counts.total():.3f}")
    solved = sum(max(counts.values()) for counts in links.values())
    print(f"all    {solved / sum(counts.total() for counts in links.values()):.3f}")


def memory():
    """GiB of this process and everything below it (PSS: a shared page is divided among its
    users)."""
    kib = 0
    for pid in process_tree():
        with suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 2**20


def process_tree():
    """The ids of this process and of all processes below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # The command's name stands in parentheses; the parent's id is the second field after.
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def any_action(rng, text, mark):
    """An action on one of an observation's elements, or a scroll; `mark` is what it writes."""
    fields = re.findall(r"\[(\d+)\] (?:textbox|searchbox)\b", text)
    links = re.findall(r"\[(\d+)\] (?:link|button)\b", text)
    if fields and rng.random() < 0.2:
        return f"type [{rng.choice(fields)}] [{mark}] [1]"
    if links and rng.random() < 0.9:
        return f"click [{rng.choice(links)}]"
    return rng.choice(["scroll [down]", "scroll [up]", "go_back"])


class Load:
    """Episodes that look for each other's marks.

    Each episode writes its own mark into its shop address (and wherever else it writes), and
    must find its own there whenever it looks. It is reset every EPISODE steps: until a reset,
    playwright keeps 30 kB of every page that was opened.
    """

    def __init__(self, episodes, steps):
        self.episodes = episodes
        self.steps = steps
        self.done = [0] * episodes  # steps of each; an environment error counts as one
        self.errors = []
        self.foreign = []  # episodes that saw a mark that was not theirs

    def play(self, k):
        """Play episode k until it has made its steps."""
        env = make_env("webarena")
        rng = random.Random(k)
        mark = f"Mark{k:03} Street"
        while self.done[k] < self.steps:
            try:
                text = env.reset(k)
                env.step("```goto [http://shop.localhost/account/edit]```")
                number = tree.find(env._observe(), "textbox", "Street")
                env.step(f"```type [{number}] [{mark}] [1]```")
                for n in range(min(EPISODE, self.steps - self.done[k])):
                    if n % 20 == 19:
                        self.look(env, k)
                    result = env.step(f"```{any_action(rng, text, mark)}```")
                    text = result.observation if result.valid else text
                    self.done[k] += 1
            except EnvError as e:
                self.errors.append(str(e))
                self.done[k] += 1
        env.close()

    def look(self, env, k):
        """Look at the account: it must show this episode's mark and no other's."""
        seen = env.step("```goto [http://shop.localhost/account]```").observation
        is_lost = "Telephone" in seen and f"Mark{k:03}" not in seen
        others = [j for j in range(self.episodes) if j != k and f"Mark{j:03}" in seen]
        if is_lost or others:
            self.foreign.append(k)
            print(f"episode {k} sees\n{seen}", flush=True)


def load(episodes=32, steps=100, kill=False):
    run = Load(episodes, steps)
    threads = [threading.Thread(target=run.play, args=(k,)) for k in range(episodes)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(10)
        seconds, done = time.monotonic() - start, sum(run.done)
        print(f"{seconds:5.0f} s  {done} steps  {done / seconds:.1f} a second  {memory():.2f} GB  "
              f"{len(run.errors)} env_errors  {len(run.foreign)} saw another's mark", flush=True)
        if kill and done > episodes * steps / 2:
            kill = False
            next(b for browsers in browser._BROWSERS.values() for b in browsers).kill()
            print("killed one of the browsers", flush=True)


if __name__ == "__main__":
    command, *words = sys.argv[1:] or [""]
    if command == "navigate" and len(words) == 1:
        navigate(words[0])
    elif command == "fixed_link" and len(words) == 1:
        fixed_link(words[0])
    elif command == "load":
        load(*(int(word) for word in words if word != "kill"), kill="kill" in words)
    else:
        sys.exit(__doc__)
