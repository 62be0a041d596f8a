"""How fast does a base model learn to read BabyAI's missions if it is told the answer? It ranks base models before any RL is
tried on them: `python experiments/learn_to_read.py data/tiny 6e-4` (folder, learning rate; 4 minutes on one thread). What it
trains is thrown away: no model of this project has seen a solver."""

import random
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import envs  # noqa: E402
import rl  # noqa: E402
from agent import Chat, instructions  # noqa: E402
from make_tiny import batches, encode  # noqa: E402


def first_action(env, goal):
    """What a script that reads the mission does first: act on what it names if a listed action can, else turn."""
    read = re.match(r"Your goal: (go to|pick up|open) (?:the|a) (?:(\w+) )?(\w+)", goal)
    if not read:
        return None
    verb, colour, noun = read.groups()
    verbs = {"go to": ["go to", "pickup"], "pick up": ["pickup"], "open": ["toggle and go through", "toggle"]}[verb]
    fits = [a for v in verbs for a in env.valid_actions() if a.startswith(v + " ") and (not colour or f" {colour} " in a)
            and (noun in a or noun == "object")]
    return (fits or ["turn left"])[0]


def answered(env, chat, split):
    """-> [((ids, reply mask), whether the answer acts)]"""
    found = []
    for item in envs.items("babyai", split):
        observation = env.reset(envs.split_item(item)[1])
        action = first_action(env, observation.split("\n")[0])
        if action:
            talk = instructions(env.prompt), [(observation, action)]
            found.append((encode(chat, talk), action != "turn left"))
    return found


@torch.no_grad()
def right(model, talks):
    """Shares right, read with the right tokens before: where it turns, where it acts, there the verb, there the rest."""
    turns, acts, verbs, rests = [], [], [], []
    for (ids, mask), acting in talks:
        ids, reply = torch.from_numpy(ids.astype("int64"))[None], torch.from_numpy(mask[1:])
        hit = (model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:])[0, reply]
        (acts if acting else turns).append(hit.all().item())
        if acting:
            verbs.append(hit[0].item())
            rests.append(hit[1:].all().item())
    return "turns {:.3f}  acts {:.3f}  (verb {:.3f}  thing {:.3f})".format(*(sum(x) / len(x) for x in (turns, acts, verbs, rests)))


torch.set_num_threads(1)
model, tokenizer = rl.load_policy(sys.argv[1])
lr, env, chat = float(sys.argv[2]), envs.make_env("babyai"), Chat(tokenizer)
train, test = answered(env, chat, "train"), answered(env, chat, "test")
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
print("before  ", right(model, test))
source = batches([talk for talk, _ in train], 64 * 220, random.Random(5))
for step in range(1, 121):
    optimizer.param_groups[0]["lr"] = lr * min(1, step / 10)
    ids, kind = next(source)
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none")
    loss = loss[kind[:, 1:] == 2].mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 15 == 0:
        print(f"step {step}  loss {loss.item():.3f}  right: {right(model, test)}", flush=True)
