"""OpenEnv's own package against ours, both ways:

    python experiments/openenv.py --python VENV/bin/python --envs OPENENV/envs [--episodes 50]

VENV is a virtual environment with the package openenv (another one than ours: it brings 477 MB) and
what its worlds need: pip install openenv textarena reasoning-gym. OPENENV is a clone of
meta-pytorch/OpenEnv, whose folder envs/ holds the worlds. What is missing is named and left out.

1. Their client plays our server: the expert's episodes of BabyAI and TextCraft, played in this
   process, are played again through it. Every observation, reward and end must be the same.
2. Our client plays their servers: a scripted policy that can win, then an evaluation and two
   training steps of the built-in model, in which no environment may fail.

Prints a Markdown table. Exit code 1 if anything differs.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from envs import held_out, make_env, split_item  # noqa: E402

HORIZON = 20
# Their client: reads the address and [[seed, [action, ...]], ...], writes what it was answered.
THEIR_CLIENT = """
import json, sys
from openenv.core.generic_client import GenericEnvClient
url, episodes = json.load(sys.stdin)
answers = []
with GenericEnvClient(base_url=url).sync() as env:
    for seed, actions in episodes:
        results = [env.reset(seed=seed)]
        results += [env.step({"message": action}) for action in actions]
        answers.append([[r.observation["text"], r.reward, r.done] for r in results])
        assert env.state()["step_count"] == len(actions)
print(json.dumps(answers))
"""
# Their server: a world of the folder envs/ in the package's own application.
THEIR_SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
sys.path.insert(0, sys.argv[1])
{imports}
app = create_fastapi_app(lambda: {make}, {action}, {observation}, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


def guess(env, seed):
    """TextArena's Guess The Number: halve the interval. -> the last Step."""
    env.reset(seed)
    low, high = 1, 20
    for _ in range(10):
        middle = (low + high) // 2
        step = env.step(f"[{middle}]")
        if step.done:
            break
        if step.observation.rstrip().endswith("higher."):
            low = middle + 1
        else:
            high = middle - 1
    return step


def answer(env, seed):
    """Reasoning Gym: the right answer is in the reply to a wrong one, and the seed brings the same
    question again. -> the last Step."""
    question = env.reset(seed)
    told = re.search("correct_answer: (.*)", env.step("0").observation)[1]
    assert env.reset(seed) == question
    return env.step(told)


def echo(env, seed):
    """The echo world, whose actions are calls of tools. It never ends. -> the last Step."""
    env.reset(seed)
    step = env.step(f"number {seed}")
    assert f"number {seed}" in step.observation, step.observation
    return step


THEIR_WORLDS = {  # name -> its server, our --env_args for it, the policy, whether the policy wins
    "TextArena GuessTheNumber-v0": dict(
        imports="from textarena_env.models import TextArenaAction, TextArenaObservation\n"
                "from textarena_env.server.environment import TextArenaEnvironment",
        make="TextArenaEnvironment('GuessTheNumber-v0', download_nltk=False)",
        action="TextArenaAction", observation="TextArenaObservation",
        options=dict(action="message", observation="messages.content"),
        policy=guess, wins=True),
    "Reasoning Gym leg_counting": dict(
        imports="from reasoning_gym_env.models import *\n"
                "from reasoning_gym_env.server.reasoning_gym_environment import *",
        make="ReasoningGymEnvironment()",
        action="ReasoningGymAction", observation="ReasoningGymObservation",
        options=dict(reset='{"dataset_name":"leg_counting","dataset_config":{},"size":1}'),
        policy=answer, wins=True),
    "echo (tools)": dict(
        imports="from openenv.core.env_server.mcp_types import CallToolAction\n"
                "from openenv.core.env_server.mcp_types import CallToolObservation\n"
                "from echo_env.server.echo_environment import EchoEnvironment",
        make="EchoEnvironment()", action="CallToolAction", observation="CallToolObservation",
        options=dict(action='{"type":"call_tool","tool_name":"echo_message",'
                            '"arguments":{"message":"$"}}'),
        policy=echo, wins=False),
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@contextmanager
def running(command, url=None, **kw):
    """A server in a process -> its address. url: where it will be; otherwise its first line says
    so. Raises RuntimeError with the last line of what it printed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **kw)
        try:
            if url is None:
                url = (process.stdout.readline().split() or [""])[-1]
            deadline = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    requests.get(f"{url}/health", timeout=5).raise_for_status()
                    break
                except requests.RequestException:
                    time.sleep(0.5)
            else:
                errors.seek(0)
                raise RuntimeError((errors.read().strip() or "no answer").splitlines()[-1])
            yield url
        finally:
            process.kill()
            process.wait()


def expert_episodes(world, count):
    """-> ([[seed, actions]], the answers that this process gives, successes)."""
    env = make_env(world)
    episodes, answers, successes = [], [], 0
    for item in held_out(world, count):
        seed = split_item(item)[1]
        actions, answered = [], [[env.reset(seed), 0.0, False]]
        for _ in range(HORIZON):
            action = env.expert() or "look around"
            step = env.step(action)
            actions.append(action)
            answered.append([step.observation, float(step.reward), bool(step.done)])
            if step.done:
                successes += step.success
                break
        episodes.append([seed, actions])
        answers.append(answered)
    return episodes, answers, successes


def ours_by_their_client(world, python, count):
    """-> (a row of the table, whether everything is the same)."""
    episodes, expected, successes = expert_episodes(world, count)
    serve = [sys.executable, "envs.py", "serve", "--env", world, "--protocol", "openenv"]
    with running([*serve, "--port", "0"], cwd=ROOT) as url:
        done = subprocess.run([python, "-c", THEIR_CLIENT], input=json.dumps([url, episodes]),
                              capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    got = json.loads(done.stdout.splitlines()[-1])
    pairs = [pair for a, b in zip(expected, got, strict=True) for pair in zip(a, b, strict=True)]
    different = sum(a != b for a, b in pairs)
    rewards = [sum(reward for _, reward, _ in answered) for answered in got]
    text = (f"{len(pairs)} replies, {different} differ; mean reward {sum(rewards) / count:.3f}, "
            f"{successes} successes in process")
    return f"| {world}, ours | their client, expert | {count} | {text} |", different == 0


def theirs_by_our_client(name, python, folder, count):
    """-> (rows of the table, whether all went well)."""
    world = THEIR_WORLDS[name]
    port = free_port()
    program = THEIR_SERVER.format(**world)
    env_args = " ".join(f"openenv.{key}={value}" for key, value in world["options"].items())
    rows = []
    with running([python, "-c", program, folder, str(port)], f"http://127.0.0.1:{port}") as url:
        env = make_env("openenv", url=url, **world["options"])
        steps = [world["policy"](env, seed) for seed in range(count)]
        env.close()
        won = sum(step.success for step in steps)
        rewards = sum(step.reward for step in steps) / count
        rows.append(f"| {name} | our client, scripted policy | {count} | {won} successes, mean "
                    f"last reward {rewards:.3f} |")
        good = won == count if world["wins"] else True

        with tempfile.TemporaryDirectory() as out:
            shared = ["--env", "openenv", "--env_url", url, "--env_args", env_args, "--model",
                      "tiny", "--horizon", "4", "--slots", "16", "--action_format", "plain"]
            run("eval.py", *shared, "--items", "16", "--samples", "1", "--out", f"{out}/e.json")
            result = json.loads(Path(f"{out}/e.json").read_text())
            rows.append(f"| {name} | eval.py | 16 | success {result['success']:.3f}, score "
                        f"{result['score']:.3f}, turns {result['turns']:.2f}, env_error "
                        f"{result['env_error']:.3f} |")
            run("train.py", *shared, "--steps", "2", "--items_per_step", "4",
                "--rollouts_per_item", "4", "--horizon_schedule", "fixed", "--out", f"{out}/run")
            lines = Path(f"{out}/run/metrics.jsonl").read_text().splitlines()
            metrics = [json.loads(line) for line in lines]
            faults = [m["env_error"] for m in metrics]
            turns = [round(m["turns"], 2) for m in metrics]
            rows.append(f"| {name} | train.py, 2 steps | 32 | env_error {faults}, turns {turns}, "
                        f"reward {[round(m['reward'], 3) for m in metrics]} |")
        good = good and result["env_error"] == 0 and len(metrics) == 2 and not any(faults)
    return rows, good


def run(script, *flags):
    command = [sys.executable, script, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip().splitlines()[-1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="", help="of the virtual environment with openenv")
    parser.add_argument("--envs", default="", help="the folder envs/ of OpenEnv's repository")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--only", default="", help="worlds whose names contain this")
    args = parser.parse_args()

    asked = "import importlib.metadata as m; print(m.version('openenv'))"
    found = subprocess.run([args.python or "false", "-c", asked], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"no package openenv in --python {args.python}")
    print(f"openenv {found.stdout.strip()}\n")
    print("| world | played by | episodes | |\n|---|---|---|---|")
    all_good = True
    for world in ("babyai", "textcraft"):
        if args.only in world:
            row, good = ours_by_their_client(world, args.python, args.episodes)
            print(row, flush=True)
            all_good = all_good and good
    for name in THEIR_WORLDS:
        if args.only not in name:
            continue
        try:
            rows, good = theirs_by_our_client(name, args.python, args.envs, 10)
        except RuntimeError as e:
            rows, good = [f"| {name} | | | not played: {e} |"], False
        print("\n".join(rows), flush=True)
        all_good = all_good and good
    sys.exit(0 if all_good else 1)


if __name__ == "__main__":
    main()
