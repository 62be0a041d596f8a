"""How fast does a base model learn to read BabyAI's missions if it is told the answer? `python experiments/learn_to_read.py
data/tiny 4e-4` (folder, learning rate; 4 minutes on one thread). It ranks base models before any RL is tried on them. What it
trains is thrown away: no model of this project has seen a solver."""

import sys, random, torch, re, time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
torch.set_num_threads(1)
import make_tiny as M, rl, envs, agent
from agent import Chat, instructions

m, tok = rl.load_policy(sys.argv[1])
lr = float(sys.argv[2])
chat = Chat(tok)
env = envs.make_env("babyai")
r = random.Random(5)


def oracle(obs, goal):
    acts = env.valid_actions()
    g = goal.replace("Your goal: ", "")
    mm = re.match(r"(go to|pick up|open) (?:the|a) (?:(\w+) )?(\w+)", g)
    if not mm:
        return None
    v, c, n = mm.groups()
    pref = {"go to": ["go to", "pickup"], "pick up": ["pickup"], "open": ["toggle and go through", "toggle"]}[v]
    for p in pref:
        for a in acts:
            if a.startswith(p + " ") and (c is None or f" {c} " in a) and (n in a or n == "object"):
                return a
    return "turn left"


def make(items):
    out = []
    for it in items:
        o = env.reset(envs.split_item(it)[1])
        goal = o.split("\n")[0]
        a = oracle(o, goal)
        if a:
            out.append((M.encode(chat, (instructions(env.prompt), [(o, a)])), a != "turn left"))
    return out


tr = make(envs.items("babyai", "train"))
te = make(envs.items("babyai", "test"))
print(len(tr), len(te), sum(v for _, v in te) / len(te))
opt = torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0)


def ev():
    ok = [[], [], [], []]
    with torch.no_grad():
        for i in range(0, len(te), 50):
            for (ids, mask), v in te[i : i + 50]:
                x = torch.tensor(ids.astype("int64"))[None]
                mk = torch.tensor(mask)[1:]
                right = (m(x).logits[0, :-1].argmax(-1) == x[0, 1:])[mk]
                ok[v].append(bool(right.all()))
                if v:  # given that it acts: the verb, and then the thing
                    ok[2].append(bool(right[0]))
                    ok[3].append(bool(right[1:].all()))
    return [round(sum(o) / len(o), 3) for o in ok]


print("before", ev())
gen = M.batches([d for d, _ in tr], 64 * 220, r)
t = time.time()
for s in range(120):
    for g in opt.param_groups:
        g["lr"] = lr * min(1, (s + 1) / 10)
    ids, kind = next(gen)
    l = torch.nn.functional.cross_entropy(m(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = (kind[:, 1:].flatten() == 2).float()
    l = (l * w).sum() / w.sum()
    l.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    if s % 15 == 14:
        print(s + 1, "loss", round(l.item(), 3), "right where it turns / acts / the verb alone / the thing alone", ev(), len(ids), round(time.time() - t), flush=True)
