"""A program that knows nothing of the trainer but a URL: an agent of AgentGym's kind, with `openai`
or `requests`, that plays its own BabyAI and forgets what is long ago. Its reward is its result, and
the last line that it prints.

    python examples/their_agent.py http://127.0.0.1:8000/v1 17
"""

import sys

import requests

from worlds.babyai import BabyAI


def run(url: str, item: int, turns: int = 4) -> float:
    world = BabyAI()
    messages = [{"role": "system", "content": world.prompt + "\nAnswer: Action: one action"},
                {"role": "user", "content": world.reset(item)}]
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        answer = requests.post(f"{url}/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"]
        step = world.step(said.split("Action:")[-1].strip())
        if step.done:
            return step.reward
        messages += [{"role": "assistant", "content": said},
                     {"role": "user", "content": step.observation}]
        if len(messages) > 6:
            del messages[2:4]
    return 0.0


if __name__ == "__main__":
    print(run(sys.argv[1], int(sys.argv[2])))
