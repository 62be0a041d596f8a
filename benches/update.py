"""`python bench.py update`: one optimizer step of ours (trajectories in one row without padding, the head on sampled positions
alone) against the padded way with all logits: every row as long as the longest, as many rows at a time as fill the same number
of positions, a logit for each position and word. Same trajectories, model, machine and loss; the losses must agree to 1e-4.
`sorted` is a milder baseline: rows of similar length together, padded to the longest of them, all logits. Workloads:

    agent   128 trajectories of the model (--model; a trained one ends early where it succeeds) in TextCraft, 8 turns at most
    long    128 trajectories of 1 to 8 turns with heavy-tailed replies: 5 to 300 tokens, log-uniform, as in `bench.py rollout`
"""

import statistics
import time

import numpy as np
import torch
from torch.nn.functional import pad
from tqdm import tqdm

import algos
import rl
import update
from benches.rollout import law, models
from envs import EnvPool, items
from rollout import Trajectory, rollout

TRAJECTORIES, POSITIONS = 128, 8192
TARGETS = {"agent": 2, "long": 2}  # times the padded way, on the tiny model


def heavy(vocabulary, count=TRAJECTORIES):
    """Trajectories of random ids: a prompt of 150, then 1 to 8 replies by the law, an observation of 30 after each."""
    out = []
    for i in range(count):
        rng, t = np.random.default_rng([19, i]), Trajectory(f"told_{i}", "told")
        t.append(rng.integers(0, vocabulary, 150).tolist())
        for n in law("long", i)[0][:rng.integers(1, 9)]:
            t.append(rng.integers(0, vocabulary, n).tolist(), [-5.0] * n)
            t.append(rng.integers(0, vocabulary, 30).tolist())
        out.append(t)
    return out


def loss_and_stats(logprobs, batch, denominator):
    loss, _ = algos.policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"], 0.2, 0.2)
    return algos.aggregate(loss, batch["mask"], "token", denominator), {}


def ours(model, optimizer, trajectories, columns, denominator):
    def loss_of(batch):
        return loss_and_stats(rl.token_logprobs(model, batch["ids"], batch["mask"], entropy_gradient=False)[0], batch, denominator)
    return update.optimizer_step(model, optimizer, trajectories, columns, loss_of, POSITIONS)["loss"]


def padded(model, optimizer, trajectories, columns, denominator, cuts, width=0):
    """Rows as long as the longest of them, or `width`."""
    total = 0.0
    for cut in cuts:
        batch = update.collate([trajectories[i] for i in cut], **{name: [rows[i] for i in cut] for name, rows in columns.items()})
        batch = {name: pad(x, (0, max(0, width - x.shape[1]))) for name, x in batch.items()}
        logits = model(input_ids=batch["ids"], use_cache=False).logits.float()[:, :-1]  # [B, T - 1, V]
        logprobs = torch.log_softmax(logits, -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
        loss, _ = loss_and_stats(pad(logprobs, (1, 0)), batch, denominator)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def add_flags(parser):
    parser.add_argument("--model", default="tiny", help="whose trajectories `agent` are; 'tiny' or a folder with a model like it")


def measure(args):
    nets, _ = models()
    agent, tokenizer = rl.load_policy(args.model)
    with EnvPool() as pool:
        played = rollout(agent, tokenizer, pool, items("textcraft", "test")[:TRAJECTORIES], 8, max_tokens=32)
    found, missed = {}, []
    jobs = [(name, w) for name in (["tiny", "3.7M"] if args.full else ["tiny"]) for w in ("agent", "long")]
    for name, workload in tqdm(jobs, desc="update", unit="workload"):
        net = nets[name]
        trajectories = played if workload == "agent" else heavy(net.config.vocab_size)
        lengths, sampled = [len(t.tokens) for t in trajectories], sum(sum(t.mask) for t in trajectories)
        columns = {"advantages": [[1.0 - 2 * (i % 2)] * n for i, n in enumerate(lengths)]}
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        rows = POSITIONS // max(lengths)
        in_order = [range(first, min(first + rows, len(lengths))) for first in range(0, len(lengths), rows)]
        ways = {
            "ours": lambda: ours(net, optimizer, trajectories, columns, sampled),
            "padded": lambda: padded(net, optimizer, trajectories, columns, sampled, in_order, max(lengths)),
            "sorted": lambda: padded(net, optimizer, trajectories, columns, sampled,
                                     update.micro_batches(lengths, POSITIONS, packed=False))}
        row, losses = {"tokens": sum(lengths), "sampled": sampled, "longest": max(lengths)}, {}
        seconds = {way: [] for way in ways}
        for _ in range(5 if args.full else 3):  # in turns, so that what else the machine does falls on all
            for way, step in ways.items():
                begin = time.perf_counter()
                losses[way] = step()
                seconds[way].append(time.perf_counter() - begin)
        row |= {way: statistics.median(s) for way, s in seconds.items()}
        row |= {"ratio_padded": row["padded"] / row["ours"], "ratio_sorted": row["sorted"] / row["ours"],
                "tokens_per_second": sum(lengths) / row["ours"], "loss_gap": max(abs(losses["ours"] - x) for x in losses.values())}
        found.setdefault(name, {})[workload] = row
        tqdm.write(f"{name:5} {workload:6}" + "".join(f"  {k} {row[k]:.2f}" for k in ("ours", "ratio_padded", "ratio_sorted"))
                   + f"  {row['tokens_per_second']:.0f} tokens/s  loss gap {row['loss_gap']:.1e}")
        if row["loss_gap"] > 1e-4:
            missed.append(f"{name} {workload}: the losses differ by {row['loss_gap']:.1e}")
        if name == "tiny" and row["ratio_padded"] < TARGETS[workload]:
            missed.append(f"{workload}: ratio_padded is {row['ratio_padded']:.2f}, not {TARGETS[workload]}")
    return found["tiny"] | {"models": found}, missed
