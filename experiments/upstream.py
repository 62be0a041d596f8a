"""Our client and server against AgentGym's own: a Markdown table of what differs.

    python experiments/upstream.py AGENTGYM PYTHON [--worlds babyai,maze] [--episodes 12]

AGENTGYM: a checkout of https://github.com/WooooDyy/AgentGym with its submodule (maze and wordle
need it). PYTHON: the interpreter of a virtual environment with the servers' packages;
docs/worlds.md lists them. --train: instead of comparing, evaluate the built-in model on each of the
servers and train it there for two steps.

Each server of AgentGym is started. A scripted policy plays each episode twice on it: through
`worlds.agentgym.RemoteEnv`, and through the class for that world in the package agentenv. Then the
classes of agentenv play on `python envs.py serve` and are compared with the same world in this
process. A comparison is one observation with its reward and its end. Where data, models or a
browser would have to be downloaded, a stand-in takes their place, as the table says.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs import WORLDS, EnvError, make_env  # noqa: E402
from worlds.agentgym import PROTOCOLS  # noqa: E402

# ---- the servers ----

SQL_QUESTIONS = [  # question, SQL
    ("How many towns are there?", "SELECT COUNT(*) FROM town"),
    ("Which towns have more than 500 people?", "SELECT name FROM town WHERE people > 500"),
    ("How many people live in all towns?", "SELECT SUM(people) FROM town"),
]

SEARCHQA_STAND_IN = """
import sys, types
import transformers  # before "datasets" is replaced, which it would inspect
answers = {"ground_truth": {"target": ["Shakespeare"]}}
question = {"question": "Who wrote Hamlet?", "reward_model": answers}
datasets = types.ModuleType("datasets")
datasets.load_dataset = lambda *_, **__: {"train": [question] * 60000}
sys.modules["datasets"] = datasets
class Retriever:
    def search(self, query, num, return_score):
        texts = [f'"{query[0]} {n}"\\nIt is text number {n}.' for n in range(num)]
        return [{"contents": text} for text in texts], [1.0] * num
retriever = types.ModuleType("agentenv_searchqa.retriever")
retriever.get_retriever = lambda config: Retriever()
sys.modules["agentenv_searchqa.retriever"] = retriever
"""

WEBARENA_STAND_IN = """
import sys, types
sys.path.append(AGENTGYM + "/agentenv-webarena/webarena")
import os
for name in "SHOPPING SHOPPING_ADMIN REDDIT GITLAB MAP WIKIPEDIA HOMEPAGE".split():
    os.environ.setdefault(name, "http://" + name.lower())
os.environ["OPENAI_API_KEY"] = "none"
sys.modules["text_generation"] = types.SimpleNamespace(Client=None)
import browser_env
from browser_env.utils import DetachedPage
class Browser:
    # Two buttons; each click is counted on the page.
    def __init__(self, **_):
        self.clicks = 0
        self.page = None
    def observe(self, fail_error=""):
        nodes = {"1": {"text": "[1] button 'Buy'"}, "2": {"text": "[2] link 'Home'"}}
        text = f"[1] button 'Buy'\\n[2] link 'Home'\\n[3] StaticText 'clicked {self.clicks} times'"
        page = DetachedPage("http://shopping/cart", "")
        metadata = {"text": {"obs_nodes_info": nodes}}
        info = {"page": page, "fail_error": fail_error, "observation_metadata": metadata}
        return {"text": text, "image": ""}, info
    def reset(self, seed=None, options=None):
        self.clicks = 0
        return self.observe()
    def step(self, action):
        known = action["element_id"] in ("", "1", "2")
        self.clicks += known
        obs, info = self.observe("" if known else "no such element")
        return obs, float(known), False, False, info
    def get_page_client(self, page):
        return None
    def close(self):
        pass
browser_env.ScriptBrowserEnv = Browser
harness = types.ModuleType("evaluation_harness")
def evaluate(trajectory, **_):
    return float(trajectory[-1]["answer"] == "3")
harness.evaluator_router = lambda config: evaluate
sys.modules["evaluation_harness"] = harness
"""


class Server(NamedTuple):
    """How one server of AgentGym is started."""

    folder: str
    module: str
    path: str = ""  # of the world, behind the server's address
    code: str = ""  # runs first
    stands_in: str = ""  # for what `code` and the made files stand in


TOOLS = "agentenv-tool"
SERVERS = {
    "babyai": Server("agentenv-babyai", "agentenv_babyai"),
    "textcraft": Server("agentenv-textcraft", "agentenv_textcraft"),
    "maze": Server("agentenv-lmrlgym", "agentenv_lmrlgym", "/maze/"),
    "wordle": Server("agentenv-lmrlgym", "agentenv_lmrlgym", "/wordle/"),
    "sqlgym": Server("agentenv-sqlgym", "agentenv_sqlgym", stands_in="a database of one table"),
    "sciworld": Server("agentenv-sciworld", "agentenv_sciworld"),
    "searchqa": Server("agentenv-searchqa", "agentenv_searchqa", code=SEARCHQA_STAND_IN,
                       stands_in="one question and a retriever that invents articles"),
    "webarena": Server("agentenv-webarena", "agentenv_webarena", code=WEBARENA_STAND_IN,
                       stands_in="a browser with one page, and an evaluator that wants 3"),
    "weather": Server(TOOLS, "agentenv_weather"),
    "movie": Server(TOOLS, "agentenv_movie"),
    "academia": Server(TOOLS, "agentenv_academia"),
    "todo": Server(TOOLS, "agentenv_todo"),
    "sheet": Server(TOOLS, "agentenv_sheet"),
    "alfworld": Server("agentenv-alfworld", "agentenv_alfworld"),
    "webshop": Server("agentenv-webshop", "agentenv_webshop"),
}


class NotStarted(Exception):
    """A server did not start; the text says why."""


@contextlib.contextmanager
def running(world, args):
    """Start AgentGym's server of `world` -> its address. Raises NotStarted."""
    server = SERVERS[world]
    with tempfile.TemporaryDirectory() as made, socket_port() as port:
        folder = args.agentgym / server.folder
        work_folder = folder
        variables = {"PROJECT_PATH": str(folder / "Toolusage"), "PYTHONWARNINGS": "ignore"}
        paths = [folder, folder / "Toolusage/toolusage", folder / "lmrlgym"]
        if world == "sqlgym":
            make_bird(Path(made))
            variables["AGENTENV_SQLGYM_BIRD_PATH"] = made
        if world == "webarena":
            work_folder = Path(made)
            make_webarena(work_folder, folder)
        variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        start = f"import uvicorn; from {server.module} import app; "
        start += f"uvicorn.run(app, host='127.0.0.1', port={port}, log_level='warning')"
        code = f"AGENTGYM = {str(args.agentgym)!r}\n{server.code}\n{start}"
        log = Path(made) / "log"
        with log.open("w") as file:
            process = subprocess.Popen([args.python, "-c", code], cwd=work_folder, stdout=file,
                                       stderr=file, env=os.environ | variables,
                                       start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(url, process)
            yield url + server.path
        except (requests.RequestException, EnvError, AssertionError, KeyError) as e:
            lines = log.read_text().strip().splitlines() or ["nothing was written"]
            said = f"its last words: {lines[-1]}"
            raise NotStarted(f"{type(e).__name__}: {e}; {said}") from e
        finally:
            stop(process)


@contextlib.contextmanager
def socket_port():
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield port


def wait_for(url, process, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EnvError("the server ended at once")
        with contextlib.suppress(requests.RequestException):
            requests.get(url, timeout=5)
            return
        time.sleep(0.2)
    raise EnvError(f"no answer within {seconds} s")


def stop(process):
    """End a server and the processes that it started: its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_bird(folder):
    """A data set in the layout of BIRD: items 0, 1, 2 (train) and 9428, 9429, 9430 (dev)."""
    columns = [[-1, "*"], [0, "name"], [0, "people"]]
    table = {"db_id": "towns", "column_names": columns, "table_names": ["town"],
             "primary_keys": [1], "foreign_keys": []}
    questions = [{"db_id": "towns", "question": question, "SQL": sql, "evidence": ""}
                 for question, sql in SQL_QUESTIONS]
    for split in ("train", "dev"):
        (folder / split / f"{split}_databases/towns").mkdir(parents=True)
        (folder / split / f"{split}.json").write_text(json.dumps(questions))
        (folder / split / f"{split}_tables.json").write_text(json.dumps([table]))
        path = folder / split / f"{split}_databases/towns/towns.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE town (name TEXT, people INTEGER)")
            database.executemany("INSERT INTO town VALUES (?, ?)",
                                 [("Arn", 400), ("Bel", 900), ("Cor", 1200)])
            database.commit()


def make_webarena(folder, server_folder):
    """The files that AgentGym's webarena server looks for, with ten tasks."""
    prompt_file = server_folder / "webarena/agent/prompts/raw/p_cot_id_actree_2s.py"
    (assignment,) = ast.parse(prompt_file.read_text()).body
    prompts = folder / "webarena/agent/prompts/jsons"
    prompts.mkdir(parents=True)
    prompt = ast.literal_eval(assignment.value)
    (prompts / "p_cot_id_actree_2s.json").write_text(json.dumps(prompt))
    (folder / "webarena/config_files").mkdir()
    for n in range(10):
        task = {"sites": ["shopping"], "intent": f"How many things are in cart {n}?"}
        (folder / f"webarena/config_files/{n}.json").write_text(json.dumps(task))
    (folder / "webarena/.auth").mkdir()
    cookies = {"cookies": [{"expires": time.time() + 1e6}]}
    (folder / "webarena/.auth/shopping.json").write_text(json.dumps(cookies))


# ---- the scripted policies: (random numbers, step, last observation) -> action ----


def listed_action(rng, step, seen):
    """BabyAI: one of the actions that the observation lists, or none of them."""
    listed = re.findall(r'"([^"]+)"', seen[-1].split("Available actions:")[-1])
    return rng.choice([*listed, "fly"])


def crafting(rng, step, seen):
    commands = re.findall(r"^craft .*", seen[0], re.MULTILINE)
    command = rng.choice(commands)
    ingredients = command.split(" using ")[1].split(", ")
    return rng.choice([command, "inventory", "dance", *[f"get {i}" for i in ingredients]])


def maze_move(rng, step, seen):
    """Mostly the way to the goal: along the first row, down, to the middle, down."""
    found = re.search(r"current position is at position (\d+), (\d+)", seen[-1])
    if not found or rng.random() < 0.2:
        return rng.choice(["move left", "move up", "move right", "fly"])
    row, column = map(int, found.groups())
    if row >= 5:
        return "move down" if column == 6 else "move right" if column < 6 else "move left"
    branch = 3 if column < 6 else 9
    if column == branch:
        return "move down"
    return "move right" if column < branch else "move left"


def guess(rng, step, seen):
    return " ".join(rng.choice(["there", "about", "think", "going", "great", "zzzzz"]))


def query(rng, step, seen):
    sql = dict(SQL_QUESTIONS)[seen[0].splitlines()[-1]]
    return rng.choice([sql, sql, "SELECT 1", "SELECT * FROM nothing", "SELECT name FROM town"])


def science(rng, step, seen):
    return rng.choice([
        "look around", "open door to kitchen", "go to kitchen", "inventory", "dance",
        "open door to hallway", "go to hallway", "pick up picture", "focus on door to hallway",
    ])


def search(rng, step, seen):
    think = "<think> hm </think> "
    right = "<answer> Shakespeare </answer>"
    others = ["<search> Hamlet </search>", "<answer> Marlowe </answer>", "I do not know."]
    return think + rng.choice([right, *others])


def browse(rng, step, seen):
    found = re.search(r"^\[(\d+)\] (?:link|button)", seen[-1], re.MULTILINE)
    some = found[1] if found else "1"
    action = rng.choice([f"click [{some}]", "click [2]", "click [99999]", "stop [3]", "stop [7]",
                         "scroll [down]", "fly", "click"])
    return f"I take this. ```{action}```"


def tool_call(*calls):
    def choose(rng, step, seen):
        call = rng.choice([*calls, "check_valid_actions with Action Input: {}"])
        return rng.choice([f"Thought: hm.\n\nAction: {call}", f"Action: {call}", "no call"])

    return choose


FINISH = 'finish with Action Input: {"answer": 18.5}'
OFFLINE_WEATHER = [
    "get_user_current_date with Action Input: {}",
    "get_user_current_location with Action Input: {}",
    'get_air_quality_level with Action Input: {"air_quality_index": 30}',
]
POLICIES: dict[str, Callable] = {
    "babyai": listed_action, "textcraft": crafting, "maze": maze_move, "wordle": guess,
    "sqlgym": query, "sciworld": science, "searchqa": search, "webarena": browse,
    "weather": tool_call(FINISH, *OFFLINE_WEATHER), "movie": tool_call(FINISH),
    "academia": tool_call(FINISH), "todo": tool_call(FINISH), "sheet": tool_call(FINISH),
}


def items_of(world, episodes):
    if world == "sqlgym":
        return [(0, 1, 2, 9428, 9429, 9430)[n % 6] for n in range(episodes)]
    if world == "webarena":
        return [n % 10 for n in range(episodes)]
    if world in ("babyai", "sciworld"):
        return [7 * n for n in range(episodes)]
    return list(range(episodes))


# ---- the two clients ----


class Turn(NamedTuple):
    observation: str
    reward: float
    done: bool


def as_reply(world, action):
    """What a model would write to take `action`."""
    if PROTOCOLS[world].whole_reply:
        return action
    if world == "sqlgym":
        return f"Thought: hm.\n\nAction: ```sql\n{action}\n```"
    return f"Thought: hm.\n\nAction:\n{action}"


def play_ours(env, world, item, actions):
    """Play on a RemoteEnv or a world -> Turns. Rewards are in the terms of agentenv's classes."""
    first = env.reset(item)
    turns = [Turn(first, 0.0, False)]
    for action in actions:
        step = env.step(action)
        reward = step.reward
        if world in ("babyai", "sciworld") or PROTOCOLS[world].score_key:
            reward = step.score
        turns.append(Turn(step.observation, round(reward, 6), step.done))
    return turns


def play_theirs(client, world, item, actions):
    """Play with a class of agentenv -> Turns, and the actions that the policy chose.

    actions: the actions to take, or a policy.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        client.reset(item)
        turns = [Turn(client.observe(), 0.0, False)]
        taken = []
        rng = random.Random(item)
        while len(taken) < 12 and not turns[-1].done:
            seen = [turn.observation for turn in turns]
            taken.append(actions(rng, len(taken), seen))
            output = client.step(as_reply(world, taken[-1]))
            reward = float(output.reward)
            if world == "sciworld":
                reward = max(0.0, reward) / 100
            turns.append(Turn(output.state, round(reward, 6), bool(output.done)))
    return turns, taken


def client_class(world, agentgym):
    """agentenv's class for `world`. Its other parts import the package openai, not used here."""
    if "openai" not in sys.modules:
        with contextlib.suppress(ModuleNotFoundError):
            import openai  # noqa: F401
    if "openai" not in sys.modules:
        sys.modules["openai"] = types.SimpleNamespace(OpenAI=None)
    sys.path.append(str(agentgym / "agentenv"))
    from agentenv import envs as theirs

    classes = {name.lower(): value for name, value in vars(theirs).items()}
    return classes[f"{world}envclient"]


# ---- comparing ----


class Row(NamedTuple):
    world: str
    how: str
    episodes: int
    compared: int
    different: list[tuple[str, Any, Any]]


def compare(world, theirs, ours, theirs_shows_instructions):
    """The differences between two plays -> [(where, theirs, ours)]."""
    different = []
    for n, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if n == 0 and theirs_shows_instructions:
            a = a._replace(observation=b.observation if a.observation.endswith(b.observation)
                           else a.observation)
        for field in Turn._fields:
            if getattr(a, field) != getattr(b, field):
                different.append((f"{field} of turn {n}", getattr(a, field), getattr(b, field)))
    return different


def our_client(world, args):
    """Both clients on AgentGym's server -> Row."""
    compared = 0
    different = []
    with running(world, args) as url:
        their_client = make_client(world, url, args)
        env = make_env(world, url=url)
        if world == "wordle":
            compared += 1
            missing = [word for word in their_client.info["vocab"] if word not in env.prompt]
            if missing:
                different.append(("vocabulary", missing, env.prompt))
        for item in items_of(world, args.episodes):
            theirs, actions = play_theirs(their_client, world, item, POLICIES[world])
            if world == "wordle":  # the class shows its instructions instead of the server's words
                theirs[0] = theirs[0]._replace(observation=their_words(url, item))
            ours = play_ours(env, world, item, actions)
            compared += len(theirs)
            different += compare(world, theirs, ours, world == "maze")
        env.close()
    return Row(world, "our client, their server", args.episodes, compared, different)


def make_client(world, url, args):
    with contextlib.redirect_stdout(io.StringIO()):
        return client_class(world, args.agentgym)(url.rstrip("/"), data_len=1)


def their_words(url, item):
    """The observation in wordle's reply to /reset."""
    number = requests.post(f"{url}create", timeout=30).json()["id"]
    body = {"id": number, "seed": item}
    return requests.post(f"{url}reset", json=body, timeout=30).json()["observation"]


def our_server(world, args):
    """agentenv's class on our server, and the same world in this process -> Row."""
    compared = 0
    different = []
    command = [sys.executable, ROOT / "envs.py", "serve", "--env", world, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    env = make_env(world)
    try:
        url = process.stdout.readline().split()[-1]
        their_client = make_client(world, url, args)
        for item in items_of(world, args.episodes):
            theirs, actions = play_theirs(their_client, world, item, POLICIES[world])
            compared += len(theirs)
            different += compare(world, theirs, play_ours(env, world, item, actions), False)
        their_client.close()
    finally:
        stop(process)
        env.close()
    return Row(world, "their client, our server", args.episodes, compared, different)


EXPLAINED: dict[tuple[str, str], str] = {}  # (world, who meets whom) -> why there are differences


def train_on(world, args):
    """The built-in model on AgentGym's server: 8 items evaluated, two steps of 4 items x 4 -> a row
    of the second table."""
    with running(world, args) as url, tempfile.TemporaryDirectory() as folder:
        items = [{"item_id": f"{world}_{n}"} for n in sorted(set(items_of(world, 8)))]
        for path in (f"AgentItemId/{world}_train.json", f"AgentEval/{world}/{world}_test.json"):
            file = Path(folder, path)
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(items))
        flags = ["--env", world, "--env_url", url, "--data", folder, "--max_length", "8192",
                 "--slots", "4", "--horizon", "4"]
        run_script("eval.py", *flags, "--samples", "1", "--out", f"{folder}/eval.json")
        result = json.loads(Path(f"{folder}/eval.json").read_text())
        run_script("train.py", *flags, "--horizon_schedule", "fixed", "--steps", "2",
                   "--items_per_step", "4", "--rollouts_per_item", "4", "--minibatches", "1",
                   "--out", f"{folder}/run")
        rows = [json.loads(line)
                for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
    steps = " and ".join(f"{row['turns']:.1f} turns, valid {row['valid_actions']:.2f}, "
                         f"env_error {row['env_error']:.2f}" for row in rows)
    return (f"| {world} | {len(items)} items, turns {result['turns']:.1f}, env_error "
            f"{result['env_error']:.2f} | {steps} |")


def run_script(script, *flags):
    command = [sys.executable, script, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise EnvError(f"{script}: {done.stderr.strip().splitlines()[-1]}")


def main(argv=None):
    """The command: prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("agentgym", type=Path)
    parser.add_argument("python")
    parser.add_argument("--worlds", default=",".join(SERVERS))
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args(argv)
    args.agentgym = args.agentgym.resolve()
    if not (args.agentgym / "agentenv/agentenv/envs").is_dir():
        print(f"upstream.py: {args.agentgym} is no checkout of AgentGym", file=sys.stderr)
        return 2
    not_started = []
    if args.train:
        print("| world | eval.py | train.py, two steps |\n|---|---|---|")
        for world in args.worlds.split(","):
            try:
                print(train_on(world, args), flush=True)
            except (NotStarted, EnvError) as e:
                not_started.append((world, "training", str(e)))
        return report_missing(not_started)
    print("| world | who meets whom | episodes | comparisons | differences |")
    print("|---|---|---|---|---|")
    for world in args.worlds.split(","):
        for measure in (our_client, our_server):
            if measure is our_server and world not in WORLDS:
                continue
            try:
                print_row(measure(world, args))
            except (NotStarted, EnvError, ValueError) as e:
                not_started.append((world, measure.__name__, str(e)))
    return report_missing(not_started)


def report_missing(not_started):
    for world, how, why in not_started:
        print(f"\n{world} ({how.replace('_', ' ')}) was not played: {why[:300]}")
    return 0


def print_row(row):
    stands_in = SERVERS[row.world].stands_in if row.how.startswith("our") else ""
    name = f"{row.world} (stand-in: {stands_in})" if stands_in else row.world
    count = str(len(row.different))
    if row.different:
        count += f": {EXPLAINED.get((row.world, row.how), 'not explained')}"
    print(f"| {name} | {row.how} | {row.episodes} | {row.compared} | {count} |", flush=True)
    for where, theirs, ours in row.different[:3]:
        both = f"theirs {theirs!r:.300}, ours {ours!r:.300}"
        print(f"  {row.world}, {where}: {both}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
