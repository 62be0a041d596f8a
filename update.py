"""From a step's trajectories to new weights: advantages over the whole batch, then PPO-style passes over its mini-batches."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import algos
import rl
from metrics import explained_variance
from parallel import device_of, gather, ranks, sharded, sum_over_ranks

if TYPE_CHECKING:
    from config import Config
    from rollout import Trajectory


def shape(trajectories: "list[Trajectory]", shaping: str = "none", turn_cost: float = 0.0, gamma: float = 1.0) -> None:
    """Adds to the turns' rewards, and to `reward`, what --shaping (none | potential | progress) and --turn_cost say. In place."""
    for t in trajectories if shaping != "none" or turn_cost else ():
        edges = np.diff(np.array([False, *t.mask, False]).astype(int))
        starts, ends = (edges == 1).nonzero()[0], (edges == -1).nonzero()[0]  # of the replies
        n = len(t.progress)
        extra = [0.0] * n if shaping == "none" else algos.shaping_rewards(
            t.progress, (ends - starts)[:n].tolist(), gamma, keep=shaping == "progress")
        for end, more in zip(ends, extra):
            t.rewards[end - 1] += more - turn_cost
        # potentials add up to nothing (but for rounding, which must not make equal rewards unequal)
        t.reward = t.reward - turn_cost * n if shaping == "potential" else math.fsum(t.rewards)


def advantages_of(trajectories: "list[Trajectory]", cfg: "Config", device: torch.device, reference: PreTrainedModel | None = None,
                  critic: rl.Critic | None = None) -> dict[str, list[list[float]]]:
    """-> columns for the update, one row a trajectory: "advantages" and, with a critic, "returns" and "old_values"; with
    a reference model (or the policy with LoRA's adapters, which are put aside) "ref_logprobs". Computed over the gathered batch."""
    columns, valid = {}, torch.tensor([t.status != "env_error" for t in trajectories])
    batch = collate(trajectories, rewards=[t.rewards for t in trajectories])
    rewards, mask = batch["rewards"], batch["mask"] & valid[:, None]  # [B, T]
    scores = torch.tensor([t.reward for t in trajectories])  # [B]; a sum over the row would depend on where rewards stand
    if reference is not None:
        with rl.compute_in(cfg.dtype, device), rl.adapters_off(reference):
            rows = map_trajectories(lambda model, ids, m: rl.token_logprobs(model, ids, m, cfg.temperature)[0],
                                       reference, trajectories, cfg.microbatch_tokens)
        columns["ref_logprobs"] = rows
        if cfg.kl_in == "reward":
            ref = collate(trajectories, ref=rows)["ref"]
            penalty = cfg.kl_coef * torch.where(mask, algos.kl(batch["old_logprobs"], ref, cfg.kl_type, mask), 0.0)
            rewards, scores = rewards - penalty, scores - penalty.sum(1)
    groups = torch.tensor([t.group for t in trajectories])
    if cfg.algo == "grpo":
        advantages = algos.grpo_advantage(scores, groups, valid, cfg.normalize_std)[:, None] * mask
    elif cfg.algo == "rloo":
        advantages = algos.rloo_advantage(scores, groups, valid)[:, None] * mask
    elif cfg.algo == "reinforce_pp":
        advantages = algos.reinforce_pp_advantage(rewards * mask, mask, cfg.gamma)
    else:
        with rl.compute_in(cfg.dtype, device):
            values = map_trajectories(lambda model, ids, m: model(ids, m), critic, trajectories, cfg.microbatch_tokens)
        columns["old_values"] = values
        advantages, returns = algos.gae(rewards * mask, collate(trajectories, v=values)["v"], mask, cfg.gamma, cfg.lam)
        columns["returns"] = [r[: len(t.tokens)].tolist() for t, r in zip(trajectories, returns)]
        advantages = algos.whiten(advantages, mask)
    columns["advantages"] = [a[: len(t.tokens)].tolist() for t, a in zip(trajectories, advantages)]
    for t, row in zip(trajectories, columns["advantages"]):
        per_token = cfg.algo in ("ppo", "reinforce_pp")
        t.advantage = row if per_token else next((a for a, m in zip(row, t.mask) if m), 0.0)
    return columns


def update(trajectories: "list[Trajectory]", columns: dict[str, list[list[float]]], cfg: "Config", step: int, policy: PreTrainedModel,
           optimizer: torch.optim.Optimizer, critic: rl.Critic | None = None,
           critic_optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """PPO-style passes over one step's trajectories -> metrics of the update."""
    sums = {}
    usable = [i for i, t in enumerate(trajectories) if t.status != "env_error"]
    gap = steps = 0.0
    for epoch in range(cfg.epochs):
        order = np.random.default_rng([cfg.seed, step, epoch, 1]).permutation(usable)
        for part in np.array_split(order, min(cfg.minibatches, max(1, len(order)))):
            masks = [trajectories[i].mask for i in part]
            denominator = max(1, sum(map(sum, masks)) if cfg.aggregation == "token" else len(masks))

            def policy_term(batch):
                with rl.compute_in(cfg.dtype, batch["ids"].device):
                    logp, ent = rl.token_logprobs(policy, batch["ids"], batch["mask"], cfg.temperature, cfg.entropy_coef > 0)
                loss, stats = algos.policy_loss(logp, batch["old_logprobs"], batch["advantages"], batch["mask"],
                                                cfg.clip_low, cfg.clip_high)
                stats["gap"] = (logp.detach() - batch["old_logprobs"]).abs().sum()
                if "ref_logprobs" in batch:
                    kl = algos.kl(logp, batch["ref_logprobs"], cfg.kl_type, batch["mask"])
                    stats["kl"] = kl.detach().sum()
                    if cfg.kl_in == "loss":
                        loss = loss + cfg.kl_coef * kl
                if cfg.entropy_coef:
                    loss = loss - cfg.entropy_coef * ent
                return algos.aggregate(loss, batch["mask"], cfg.aggregation, denominator), stats

            def value_term(batch):
                with rl.compute_in(cfg.dtype, batch["ids"].device):
                    values = critic(batch["ids"], batch["mask"])
                loss = algos.value_loss(values, batch["old_values"], batch["returns"], batch["mask"], cfg.value_clip)
                return algos.aggregate(loss, batch["mask"], cfg.aggregation, denominator), {}

            # where the advantage is zero and there is no other term there is no gradient: it counts above, and is skipped
            other_terms = cfg.entropy_coef or ("ref_logprobs" in columns and cfg.kl_in == "loss")
            with_gradient = [i for i in part if other_terms or any(columns["advantages"][i])] or list(part[:1]) * (not steps)  # one for the gap
            stats = _step(policy, optimizer, trajectories, columns, with_gradient, policy_term, cfg)
            if critic is not None:
                value_stats = _step(critic, critic_optimizer, trajectories, columns, part, value_term, cfg)
                stats["value_loss"] = value_stats.get("loss", 0.0)
            if not steps:  # the weights are still those that sampled
                gap = stats.get("gap", 0.0) / max(1.0, stats.get("tokens", 0.0))
            steps += 1
            for k, v in stats.items():
                sums[k] = sums.get(k, 0.0) + v
    tokens = max(1.0, sums.get("tokens", 0.0))
    return {"loss": sums.get("loss", 0.0) / steps, "grad_norm": sums["grad_norm"] / steps, "logprob_gap": gap,
            "kl": sums.get("kl", sums.get("approx_kl", 0.0)) / tokens,  # to the reference; without one, to the behaviour policy
            "kl_behaviour": sums.get("approx_kl", 0.0) / tokens,  # to the weights that sampled
            "clip_fraction": sums.get("clip_fraction", 0.0) / tokens,
            "padding": 1 - sums.get("unpadded", 0.0) / max(1.0, sums.get("padded", 0.0)),
            **({"value_loss": sums["value_loss"] / steps, "explained_variance": explained_variance(trajectories, columns)}
               if critic is not None else {})}


def _step(model, optimizer, trajectories, columns, rows, term, cfg):
    return optimizer_step(model, optimizer, [trajectories[i] for i in rows],
                             {k: [v[i] for i in rows] for k, v in columns.items()}, term,
                             cfg.microbatch_tokens, cfg.max_grad_norm)


# ---- batches ----


def collate(trajectories: "Sequence[Trajectory]", device: str | torch.device = "cpu",
            **columns: Sequence[Sequence[float] | float]) -> dict[str, Tensor]:
    """Pad to the right -> {"ids" [B, T] long, "mask" [B, T] bool, "old_logprobs" [B, T], name: [B, T] ...}.
    columns: name -> a list with one list of T numbers, or one number for all its tokens, a trajectory."""
    B, T = len(trajectories), max(2, *(len(t.tokens) for t in trajectories))

    def pad(rows, dtype):
        out = torch.zeros(B, T, dtype=dtype)
        for b, (t, row) in enumerate(zip(trajectories, rows)):
            out[b, : len(t.tokens)] = torch.as_tensor(row, dtype=dtype)
        return out.to(device)

    batch = {"ids": pad([t.tokens for t in trajectories], torch.long),
             "mask": pad([t.mask for t in trajectories], torch.bool),
             "old_logprobs": pad([t.logprobs for t in trajectories], torch.float32)}
    return batch | {name: pad(rows, torch.float32) for name, rows in columns.items()}


def micro_batches(lengths: list[int], max_tokens: int, ranks: int = 1, packed: bool = True) -> list[list[int]]:
    """Cut trajectories into micro-batches of at most `max_tokens` positions or the longest one's, a multiple of `ranks`
    of them: the i-th is rank i % ranks's, [] where there is none left. Packed, they are as equal as can be had by giving the
    longest left to the emptiest; else of similar lengths, and padding counts.

    >>> micro_batches([5, 9, 4, 5], max_tokens=10), micro_batches([5, 9, 4, 5], max_tokens=10, ranks=2)
    ([[1], [0, 2], [3]], [[1], [0], [3], [2]])
    >>> micro_batches([5, 9, 4, 5], max_tokens=10, packed=False)
    [[2, 0], [3], [1]]
    """
    cuts = []
    if packed and lengths:
        n = max(1, -(-sum(lengths) // max_tokens))
        while not cuts or max(sum(lengths[i] for i in cut) for cut in cuts) > max(max_tokens, *lengths):
            n = -(-n // ranks) * ranks
            cuts, emptiest = [[] for _ in range(n)], [(0, k) for k in range(n)]
            for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
                held, k = heapq.heappop(emptiest)
                cuts[k].append(i)
                heapq.heappush(emptiest, (held + lengths[i], k))
            n += 1
    else:
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            if not cuts or (len(cuts[-1]) + 1) * lengths[i] > max_tokens:
                cuts.append([])
            cuts[-1].append(i)
    return cuts + [[]] * (-len(cuts) % ranks)


def _share(model, trajectories, max_tokens):
    """This rank's micro-batches, as indices. A sharded model's ranks compute together: who has none left repeats the shortest
    trajectory, for nothing. -> [(indices, whether they count)]"""
    rank, world = ranks()
    lengths = [len(t.tokens) for t in trajectories]
    cuts = micro_batches(lengths, max_tokens, world, rl.packs(model.config))[rank::world]
    return [(cut or [lengths.index(min(lengths))], bool(cut)) for cut in cuts if cut or sharded(model)]


@torch.no_grad()
def map_trajectories(function: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module, trajectories: "Sequence[Trajectory]",
                     max_tokens: int) -> list[list[float]]:
    """function(model, ids, mask) -> [B, T], over all trajectories in micro-batches, shared among the ranks -> list of [T]."""
    mine = []
    for cut, counts in _share(model, trajectories, max_tokens):
        batch = collate([trajectories[i] for i in cut], device_of(model))
        rows = function(model, batch["ids"], batch["mask"]).cpu()
        if counts:
            mine.append([(i, row[: len(trajectories[i].tokens)].tolist()) for i, row in zip(cut, rows)])
    if sharded(model):
        model.reshard()  # the backward pass would have done it
    return [row for _, row in sorted(pair for part in gather(mine) for pair in part)]


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, trajectories: "Sequence[Trajectory]", columns: dict[str, list],
                   loss_of: Callable[[dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]], max_tokens: int,
                   max_grad_norm: float = 1.0) -> dict[str, float]:
    """One optimizer step over one mini-batch.

    columns: name -> per-trajectory rows (see `collate`); loss_of(batch) -> (loss, stats): the micro-batch's share of the
    loss, already divided by the mini-batch's one denominator, and a dict of 0-d tensors that add up over micro-batches.
    -> stats, summed over micro-batches and ranks, with "loss", "grad_norm" and the positions computed, "padded" and
    "unpadded".
    """
    (_, world), total = ranks(), {}
    for cut, counts in _share(model, trajectories, max_tokens):
        part = [trajectories[i] for i in cut]
        batch = collate(part, device_of(model), **{name: [rows[i] for i in cut] for name, rows in columns.items()})
        loss, stats = loss_of(batch)
        # FSDP takes the mean over ranks, and the loss is a sum
        (loss * (world * counts if sharded(model) else 1)).backward()
        if counts:
            tokens = sum(len(t.tokens) for t in part)
            stats = stats | {"loss": loss.detach(), "unpadded": tokens, "padded": tokens if rl.packs(model.config) else batch["ids"].numel()}
            total = {k: total.get(k, 0.0) + v for k, v in stats.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not sharded(model):
        sum_over_ranks([p.grad for p in parameters])
    parts = gather([{k: float(v) for k, v in total.items()}])  # a rank without a micro-batch has no stats of its own
    total = {k: sum(p.get(k, 0.0) for p in parts) for k in {k: None for p in parts for k in p}}
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = float(norm.full_tensor() if sharded(model) else norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total | {"grad_norm": norm}
