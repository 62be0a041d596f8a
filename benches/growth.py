"""`python -m benches growth`: how the cost of rollouts and updates grows, one quantity at a time.

    turns          rollout of 64 trajectories of 4 to 64 turns, and one optimizer step on them;
                   per token
    slots          rollout of 512 trajectories of 4 turns in 16 to 512 slots; per token
    trajectories   rollout and update of 128 to 2,048 trajectories (--full: 4,096) of 2 turns; per
                   trajectory
    vocabulary     sampling 64 tokens, and the log-probs of 1,024 tokens with their gradient, from
                   hidden states of 64 numbers, 2k to 152k words; per 1,000 words
    ranks          ten further steps of `train.py --env textcraft` on 1, 2 and 4 ranks, all
                   processes together; per trajectory

Costs are processor time, in milliseconds per unit named above. `growth` is that cost divided by the
cost at the smallest size: 1.0 means linear. Built-in model, replies of 3 to 20 tokens.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

import engine
import rl
import update
from benches.limit import cpu_seconds
from benches.rollout import load_models, play_ours
from benches.update import SETTINGS, step_ours
from models.check import find_paths

ROOT = Path(__file__).parent.parent
TURNS = (4, 8, 16, 32, 64)
SLOTS = (16, 64, 256, 512)
TRAJECTORIES = (128, 512, 2048)
VOCABULARIES = (2_000, 8_000, 32_000, 152_000)
RANKS = (1, 2, 4)
FURTHER_STEPS = 10


def play(model, tokenizer, trajectories, slots, turns):
    """-> (processor seconds, the trajectories). A first rollout allocates the cache."""
    cache = engine.Ragged(model, slots)
    arguments = (model, tokenizer, "short", trajectories, slots, turns, cache)
    play_ours(*arguments)
    played = []
    seconds = cpu_seconds(lambda: played.extend(play_ours(*arguments)[1]))
    return seconds, played


def train_on(model, trajectories):
    """One optimizer step as train.py makes it, advantages included -> processor seconds."""
    for i, t in enumerate(trajectories):
        t.group, t.reward = i // 8, float(i % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        batch = update.advantages_of(trajectories, SETTINGS, torch.device("cpu"))
        step_ours(model, optimizer, batch, SETTINGS)
    return cpu_seconds(step)


def over_turns(model, tokenizer, _):
    for turns in TURNS:
        seconds, played = play(model, tokenizer, 64, 64, turns)
        tokens = sum(len(t.tokens) for t in played)
        yield turns, {"rollout": seconds / tokens, "update": train_on(model, played) / tokens}


def over_slots(model, tokenizer, _):
    for slots in SLOTS:
        seconds, played = play(model, tokenizer, 512, slots, 4)
        yield slots, {"rollout": seconds / sum(len(t.tokens) for t in played)}


def over_trajectories(model, tokenizer, full):
    for count in (*TRAJECTORIES, *([4096] if full else [])):
        seconds, played = play(model, tokenizer, count, 64, 2)
        yield count, {"rollout": seconds / count, "update": train_on(model, played) / count}


def over_vocabularies(*_):
    for size in VOCABULARIES:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=size, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=True))
        find_paths(model)
        logits, uniforms = torch.randn(64, size), torch.rand(64)
        ids = torch.randint(size, (8, 129))
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False

        def log_probs():
            rl.token_logprobs(model, ids, mask, entropy_gradient=False)[0].sum().backward()

        jobs = {"sampling": lambda: engine.sample(logits, uniforms), "log_probs": log_probs}
        costs = {}
        for name, job in jobs.items():
            job()
            costs[name] = statistics.median(cpu_seconds(job) for _ in range(5)) / (size / 1000)
        yield size, costs


def over_ranks(*_):
    for ranks in RANKS:
        # Many further steps, because the start of a process costs as much as several of them.
        seconds = [train_seconds(ranks, steps) for steps in (1, 1 + FURTHER_STEPS)]
        yield ranks, {"step": (seconds[1] - seconds[0]) / (FURTHER_STEPS * 128)}


def train_seconds(ranks, steps):
    """-> processor seconds of all processes of a run"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc_per_node={ranks}", "train.py", "--env", "textcraft",
                   "--steps", str(steps), "--out", f"{folder}/run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


QUANTITIES = {"turns": over_turns, "slots": over_slots, "trajectories": over_trajectories,
              "vocabulary": over_vocabularies, "ranks": over_ranks}


def add_flags(parser):
    parser.add_argument("--only", choices=list(QUANTITIES), help="one of the quantities")


def measure(args):
    """-> (figures for --out, one line for each target that was missed)"""
    models, tokenizer = load_models()
    model = models["tiny"]
    find_paths(model)
    figures = {}
    for quantity in tqdm([args.only] if args.only else QUANTITIES, desc="growth"):
        rows = figures[quantity] = {}
        first = None
        for size, costs in QUANTITIES[quantity](model, tokenizer, args.full):
            first = first or costs
            rows[size] = {name: {"milliseconds": 1000 * cost, "growth": cost / first[name]}
                          for name, cost in costs.items()}
            line = "".join(f"  {name} {row['milliseconds']:.3g} ms, growth {row['growth']:.2f}"
                           for name, row in rows[size].items())
            tqdm.write(f"{quantity:12} {size:7}{line}")
    return figures, []
