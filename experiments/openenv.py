"""OpenEnv's own package against ours, both ways:

    python experiments/openenv.py --python VENV/bin/python --envs OPENENV/envs [--episodes 50]

VENV is a virtual environment with the package openenv (another one than ours: it brings 477 MB) and
what its worlds need: pip install openenv textarena reasoning-gym. OPENENV is a clone of
meta-pytorch/OpenEnv, whose folder envs/ holds the worlds.

1. Their client plays our server: the expert's episodes of BabyAI and TextCraft, played in this
   process, are played again through it. Every observation, reward and end must be the same.
2. Our client plays their servers: a scripted policy that can win.

Prints a Markdown table. Exit code 1 if anything differs.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
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
        options=dict(reset={"dataset_name": "leg_counting", "dataset_config": {}, "size": 1}),
        policy=answer, wins=True),
    "echo (tools)": dict(
        imports="from openenv.core.env_server.mcp_types import CallToolAction\n"
                "from openenv.core.env_server.mcp_types import CallToolObservation\n"
                "from echo_env.server.echo_environment import EchoEnvironment",
        make="EchoEnvironment()", action="CallToolAction", observation="CallToolObservation",
        options=dict(action={"type": "call_tool", "tool_name": "echo_message",
                             "arguments": {"message": "$"}}),
        policy=echo, wins=False),
}


@contextmanager
def running(command, url=""):
    """A server in a process -> its address. url: where it will be; otherwise its first line says
    so. Raises RuntimeError: it does not answer."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        url = url or process.stdout.readline().split()[-1]
        deadline = time.monotonic() + 300
        while True:
            try:
                requests.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException as e:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server does not answer") from e
                time.sleep(0.5)
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
    with running([*serve, "--port", "0"]) as url:
        done = subprocess.run([python, "-c", THEIR_CLIENT], input=json.dumps([url, episodes]),
                              stdout=subprocess.PIPE, text=True, check=True)
    got = json.loads(done.stdout.splitlines()[-1])
    pairs = [pair for a, b in zip(expected, got, strict=True) for pair in zip(a, b, strict=True)]
    different = sum(a != b for a, b in pairs)
    rewards = [sum(reward for _, reward, _ in answered) for answered in got]
    text = (f"{len(pairs)} replies, {different} differ; mean reward {sum(rewards) / count:.3f}, "
            f"{successes} successes in process")
    return f"| {world}, ours | their client, expert | {count} | {text} |", different == 0


def theirs_by_our_client(name, python, folder, count):
    """-> (a row of the table, whether all went well)."""
    world = THEIR_WORLDS[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = THEIR_SERVER.format(**world)
    with running([python, "-c", program, folder, str(port)], f"http://127.0.0.1:{port}") as url:
        env = make_env("openenv", url=url, **world["options"])
        steps = [world["policy"](env, seed) for seed in range(count)]
        env.close()
        won = sum(step.success for step in steps)
    return (f"| {name}, theirs | our client, scripted policy | {count} | {won} successes |",
            won == count or not world["wins"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of the virtual environment with openenv")
    parser.add_argument("--envs", required=True, help="the folder envs/ of OpenEnv's repository")
    parser.add_argument("--episodes", type=int, default=50)
    args = parser.parse_args()
    print("| world | played by | episodes | |\n|---|---|---|---|")
    found = [ours_by_their_client(world, args.python, args.episodes)
             for world in ("babyai", "textcraft")]
    found += [theirs_by_our_client(name, args.python, args.envs, 10) for name in THEIR_WORLDS]
    print(*(row for row, _ in found), sep="\n")
    sys.exit(not all(good for _, good in found))


if __name__ == "__main__":
    main()
