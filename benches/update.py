"""`python -m benches update`: one optimizer step of ours against the padded way with all logits.

    ours     trajectories in one row without padding, the head on sampled positions only
    padded   every row as long as the longest one, as many rows at a time as fill the same number
             of positions, a logit for each position and each token of the vocabulary
    sorted   a milder baseline: rows of similar length together, padded to the longest of them,
             all logits

Trajectories, model, machine and loss are the same, and the losses must agree to 1e-4. Workloads:

    agent    128 trajectories of the model (--model; a trained one ends early where it succeeds)
             in TextCraft, 8 turns at most
    long     128 trajectories of 1 to 8 turns, with replies of 5 to 300 tokens, log-uniform, as in
             `benches rollout`
"""

import statistics
import time
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad
from tqdm import tqdm

import algos
import rl
import update
from benches.rollout import load_models, script
from envs import EnvPool, items
from models.check import find_paths
from rollout import rollout
from trajectory import Trajectory

TRAJECTORIES, POSITIONS = 128, 8192
SETTINGS = update.Loss(kl_coef=0.0, microbatch_tokens=POSITIONS)
TARGETS = {"agent": 2, "long": 2}  # workload -> ratio_padded that must be reached, tiny model


def long_trajectories(vocab_size, count=TRAJECTORIES):
    """Trajectories of random ids: a prompt of 150 ids, then 1 to 8 turns.

    A turn is a reply of the script's length and an observation of 30 ids.
    """
    trajectories = []
    for i in range(count):
        rng = np.random.default_rng([19, i])
        t = Trajectory(f"told_{i}", "told")
        t.append(rng.integers(0, vocab_size, 150).tolist())
        lengths, _ = script("long", i)
        turns = rng.integers(1, 9)
        for length in lengths[:turns]:
            t.append(rng.integers(0, vocab_size, length).tolist(), [-5.0] * length)
            t.append(rng.integers(0, vocab_size, 30).tolist())
        trajectories.append(t)
    return trajectories


# ---- the ways of one optimizer step ----


def step_ours(model, optimizer, batch, settings):
    """One optimizer step by `update.optimizer_step` -> loss."""
    denominator = algos.loss_denominator(batch["mask"], settings.aggregation)
    objective = partial(update.policy_objective, model, settings, denominator)
    rows = range(len(batch["ids"]))
    positions = settings.microbatch_tokens
    return update.optimizer_step(model, optimizer, batch, rows, objective, positions)["loss"]


def with_advantages(trajectories):
    """The batch of these trajectories, with advantages of 1 and -1 in turn."""
    advantages = [1.0 - 2 * (i % 2) for i in range(len(trajectories))]
    return update.collate(trajectories, advantages=advantages)


def step_padded(model, optimizer, trajectories, micro_batches, width=0):
    """One optimizer step with padded rows and all logits -> loss.

    micro_batches: lists of places in `trajectories`. Rows are as long as the longest of their
    micro-batch, or `width` if that is more.
    """
    total = 0.0
    everything = with_advantages(trajectories)
    denominator = int(everything["mask"].sum())
    for places in micro_batches:
        longest = max(len(trajectories[i].tokens) for i in places)
        batch = {name: pad(x[list(places), :longest], (0, max(0, width - longest)))
                 for name, x in everything.items()}
        logits = model(input_ids=batch["ids"], use_cache=False).logits.float()[:, :-1]
        next_ids = batch["ids"][:, 1:, None]
        logprobs = torch.log_softmax(logits, -1).gather(-1, next_ids).squeeze(-1)  # [B, T - 1]
        loss, _ = SETTINGS.loss_function(batch | {"logprobs": pad(logprobs, (1, 0))})
        loss = algos.aggregate(loss, batch["mask"], "token", denominator)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


# ---- the table ----


def compare(model, trajectories, repeats):
    """Time all ways on the same trajectories -> figures."""
    lengths = [len(t.tokens) for t in trajectories]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    # Micro-batches of the padded way: trajectories in their order, each row of the full width.
    width = max(lengths)
    num_rows = POSITIONS // width
    in_order = [range(first, min(first + num_rows, len(lengths))) for first in range(0,
                                                                                     len(lengths),
                                                                                     num_rows)]

    ways = {"ours": lambda: step_ours(model, optimizer, with_advantages(trajectories), SETTINGS),
            "padded": lambda: step_padded(model, optimizer, trajectories, in_order, width),
            "sorted": lambda: step_padded(model, optimizer, trajectories,
                                          update.micro_batches([t.tokens for t in trajectories],
                                                               POSITIONS, packed=False))}
    losses = {}
    seconds = {way: [] for way in ways}
    # The ways take turns, so that other load on the machine slows all of them.
    for _ in range(repeats):
        for way, step in ways.items():
            start = time.perf_counter()
            losses[way] = step()
            seconds[way].append(time.perf_counter() - start)

    sampled = sum(sum(t.mask) for t in trajectories)
    row = {"tokens": sum(lengths), "sampled": sampled, "longest": width}
    for way in ways:
        row[way] = statistics.median(seconds[way])
    row["ratio_padded"] = row["padded"] / row["ours"]
    row["ratio_sorted"] = row["sorted"] / row["ours"]
    row["tokens_per_second"] = sum(lengths) / row["ours"]
    row["loss_gap"] = max(abs(losses["ours"] - loss) for loss in losses.values())
    return row


def add_flags(parser):
    parser.add_argument("--model", default="tiny", help="whose trajectories `agent` are; 'tiny' or "
                        "a folder with a model like it")


def measure(args):
    """-> (figures for --out, one line for each target that was missed)"""
    models, _ = load_models()
    agent, tokenizer = rl.load_policy(args.model)
    with EnvPool() as pool:
        test_items = items("textcraft", "test")[:TRAJECTORIES]
        played = rollout(agent, tokenizer, pool, test_items, 8, max_tokens=32)

    figures = {}
    missed = []
    names = ["tiny", "3.7M"] if args.full else ["tiny"]
    jobs = [(name, workload) for name in names for workload in ("agent", "long")]
    for name, workload in tqdm(jobs, desc="update", unit="workload"):
        model = models[name]
        find_paths(model)
        if workload == "agent":
            trajectories = played
        else:
            trajectories = long_trajectories(model.config.vocab_size)
        row = compare(model, trajectories, repeats=5 if args.full else 3)
        figures.setdefault(name, {})[workload] = row

        printed = ("ours", "ratio_padded", "ratio_sorted")
        columns = "".join(f"  {key} {row[key]:.2f}" for key in printed)
        speed = f"{row['tokens_per_second']:.0f} tokens/s"
        tqdm.write(f"{name:5} {workload:6}{columns}  {speed}  loss gap {row['loss_gap']:.1e}")
        if row["loss_gap"] > 1e-4:
            missed.append(f"{name} {workload}: the losses differ by {row['loss_gap']:.1e}")
        target = TARGETS[workload]
        if name == "tiny" and row["ratio_padded"] < target:
            missed.append(f"{workload}: ratio_padded is {row['ratio_padded']:.2f}, not {target}")
    return figures["tiny"] | {"models": figures}, missed
