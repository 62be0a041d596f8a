"""From a step's trajectories to new weights: rewards, advantages, and passes over mini-batches.

Every rank holds all trajectories of a step, since they are small, and computes gradients for its
share of the micro-batches. Gradients are summed over ranks. The denominator of a loss is counted
once over the whole mini-batch, so the result is the same however it is cut into micro-batches and
over however many ranks.

A batch is a dict of tensors with one row a trajectory: "ids", "mask", "old_logprobs" and further
columns, all [B, T] and padded on the right, and "lengths" [B], the number of tokens of each row.
Algorithms see whole trajectories. A model sees segments, since a segment's tokens know nothing of
earlier ones: `by_segment` cuts the rows where "segments" [B, T], a token's segment, changes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import algos
import rl
from envs import ABOVE_0, NOT_NEGATIVE, flag, load_function
from metrics import explained_variance
from models.packed import common_prefix_length
from parallel import device_of, gather, ranks, sharded, sum_over_ranks
from rl import Sampling
from trajectory import Trajectory, reply_spans

Batch = dict[str, Tensor]
LossFunction = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]

MOMENTS_AT_ONCE = 2**24  # elements of Adam's moments in `adam_step_norm`: 64 MB

# ---- settings ----


@dataclass
class Optim(Sampling):
    """optimization, memory and precision"""

    # AdamW's learning rate
    lr: float = flag(1e-6, ABOVE_0)
    # after the warm-up; cosine: to a tenth, over all steps
    lr_schedule: str = flag("constant", ("constant", "cosine"), study=True)
    # steps over which the learning rates rise to their values (Adam's first steps are mostly noise)
    warmup_steps: int = flag(10, NOT_NEGATIVE, study=True)
    # gradients are clipped to this norm
    max_grad_norm: float = flag(1.0, ABOVE_0, study=True)
    # largest number of tokens in one forward and backward pass
    microbatch_tokens: int = flag(16384, ABOVE_0)
    # compute blocks again in the backward pass: a third slower, far less memory
    gradient_checkpointing: bool = flag(True)
    # 0: train all weights; else LoRA adapters of this rank (needs the extra lora), merged into the
    # weights in final/
    lora_rank: int = flag(0, NOT_NEGATIVE)
    # FSDP2: shard weights, gradients and optimizer states over the ranks; default: on GPUs, without
    # --lora_rank
    shard: bool | None = flag(None)
    # with --shard: keep the shards in CPU memory and update them there
    offload: bool = flag(False, study=True)


@dataclass
class Loss(Optim):
    """rewards, advantages and loss"""

    # or the name of a file in ideas/, FILE.py:NAME, module:NAME
    algo: str = flag("grpo", algos.ALGOS)
    # settings of the algorithm, NAME=VALUE: gamma=0.99 lam=0.95
    algo_args: str = flag("")
    # or the name of a file in ideas/, FILE.py:NAME, module:NAME
    loss: str = flag("ppo", algos.LOSSES)
    # settings of the loss, NAME=VALUE: clip_low=0.2 clip_high=0.28
    loss_args: str = flag("")
    # potential: reward progress, and subtract the sum of these rewards at the end | progress:
    # reward progress (textcraft, sciworld, textworld)
    shaping: str = flag("none", ("none", "potential", "progress"))
    # subtracted from each turn's reward
    turn_cost: float = flag(0.0, NOT_NEGATIVE, study=True)
    # weight of the KL to the starting model; 0: no reference model at all
    kl_coef: float = flag(0.001, NOT_NEGATIVE)
    # add the KL to the loss, or subtract it from the rewards
    kl_in: str = flag("loss", ("loss", "reward"))
    # KL estimator (see algos.kl); k1 only with --kl_in reward
    kl_type: str = flag("k3", ("k1", "abs", "k2", "k3"), study=True)
    # weight of an entropy bonus
    entropy_coef: float = flag(0.0, NOT_NEGATIVE)
    # mean of the loss over tokens, or over trajectories' means
    aggregation: str = flag("token", ("token", "sequence"), study=True)
    # optimizer steps an epoch
    minibatches: int = flag(4, ABOVE_0)
    # passes over a step's trajectories
    epochs: int = flag(1, ABOVE_0, study=True)
    # AdamW's learning rate for PPO's critic
    critic_lr: float = flag(1e-5, ABOVE_0)
    # clip range of the critic's values around those before the update (ppo)
    value_clip: float = flag(0.5, ABOVE_0, study=True)

    @property
    def advantage(self) -> Callable[..., Any]:
        """The function of --algo with its settings. Raises ValueError."""
        return load_function(self.algo, algos.ALGOS, "advantage", self.algo_args)

    @property
    def loss_function(self) -> Callable[..., Any]:
        """The function of --loss with its settings. Raises ValueError."""
        return load_function(self.loss, algos.LOSSES, "loss", self.loss_args)


# ---- rewards and advantages of a step ----


def shape_rewards(trajectories: Sequence[Trajectory], shaping: str = "none",
                  turn_cost: float = 0.0, gamma: float = 1.0) -> None:
    """Add the shaping reward (--shaping none | potential | progress) to each turn's reward and
    subtract `turn_cost` from it. Changes `rewards` and `reward` of the trajectories in place."""
    if shaping not in ("none", "potential", "progress"):
        raise ValueError(f"no such shaping: {shaping}")
    if shaping == "none" and not turn_cost:
        return
    for t in trajectories:
        spans = reply_spans(t.mask)
        turns = len(t.progress)  # a last reply that was never answered is not a turn
        extra = [0.0] * turns
        if shaping != "none":
            lengths = [end - start for start, end in spans[:turns]]
            extra = potential_rewards(t.progress, lengths, gamma, keep=shaping == "progress")
        for (_, end), more in zip(spans, extra):
            t.rewards[end - 1] += more - turn_cost
        if shaping == "potential":
            # The added rewards sum to 0 (at gamma 1). Adding them to the return would only round
            # it, and equal returns must stay equal.
            t.reward = t.reward - turn_cost * turns
        else:
            t.reward = math.fsum(t.rewards)


def potential_rewards(potentials: Sequence[float], lengths: Sequence[int], gamma: float = 1.0,
                    keep: bool = False) -> list[float]:
    """The rewards that potential-based shaping adds to the turns of one trajectory.

    Shaping (Ng, Harada & Russell 1999) adds gamma Phi(s') - Phi(s) to each reward. With the
    discount `gamma` per sampled token, the discounted sum of the added rewards is zero, so the
    optimal policy does not change.

    potentials: [turns], Phi after each turn; before the first turn it is 0. The potential of the
    final state counts as 0, also where the horizon cuts the trajectory. With keep=True the final
    potential keeps its value, which rewards progress itself and may change the optimal policy.
    lengths: [turns], the number of tokens of each reply. The last token of a reply gets the
    reward. Within a reply the potential grows by 1 / gamma a token, so its other tokens get 0.
    -> [turns] floats. With gamma 1 the added rewards of a trajectory sum to 0, so advantages that
    compare sums within a group (GRPO, RLOO) do not change. PPO and REINFORCE++ use them per turn.

    >>> potential_rewards([0.25, 0.75, 1.0], [5, 5, 5])
    [0.25, 0.5, -0.75]
    >>> potential_rewards([0.25, 0.75, 1.0], [5, 5, 5], keep=True)
    [0.25, 0.5, 0.25]
    """
    before = [0.0, *potentials]
    after = list(potentials)
    if after and not keep:
        after[-1] = 0.0
    return [gamma * new - gamma ** (1 - length) * old
            for old, new, length in zip(before, after, lengths)]


def outcome_rewards(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    """-> outcomes [B], groups [B] long, valid [B] bool: False where the environment failed.

    An outcome is `Trajectory.reward`, an exactly rounded sum. The rounding of a plain sum over
    `rewards` would depend on the turns in which the rewards came.
    """
    outcomes = torch.tensor([t.reward for t in trajectories])
    groups = torch.tensor([t.group for t in trajectories])
    valid = torch.tensor([t.status != "env_error" for t in trajectories])
    return outcomes, groups, valid


@dataclass
class Gathered:
    """All trajectories of a step as tensors on the CPU, from all ranks: what a function of
    `algos.ALGOS` takes. B trajectories, T tokens."""

    trajectories: Sequence[Trajectory]
    batch: Batch  # see `collate`
    mask: Tensor  # [B, T] bool: sampled by the policy, and the environment did not fail
    rewards: Tensor  # [B, T]
    outcomes: Tensor  # [B]: see `outcome_rewards`
    groups: Tensor  # [B] long
    valid: Tensor  # [B] bool
    logprobs_of: Callable[[PreTrainedModel], Tensor]  # of the sampled tokens -> [B, T]
    models: dict[str, PreTrainedModel]  # setting -> the model that it names
    values: Tensor | None = None  # [B, T], with a critic
    returns: Tensor | None = None  # [B, T]: what the critic learns, set by the function


def advantages_of(trajectories: Sequence[Trajectory], settings: Loss, device: torch.device,
                  reference: PreTrainedModel | None = None, critic: rl.Critic | None = None,
                  models: dict[str, PreTrainedModel] | None = None) -> Batch:
    """Compute the advantages of a whole step, gathered from all ranks.

    device: where the critic computes; the batch stays on the CPU. reference: the model that the KL
    refers to; with LoRA the policy itself, with its adapters switched off. models: see `Gathered`.
    -> the batch, with "advantages"; with a reference also "ref_logprobs"; with a critic also
    "old_values" and "returns". Each trajectory's `advantage` is set for the record.
    """
    batch = collate(trajectories, rewards=[t.rewards for t in trajectories])
    outcomes, groups, valid = outcome_rewards(trajectories)
    mask = batch["mask"] & valid[:, None]  # [B, T]
    step = Gathered(trajectories, batch, mask, batch["rewards"], outcomes, groups, valid,
                    partial(logprobs_of, batch=batch, settings=settings), models or {})

    # The KL to the reference, which may be part of the reward.
    if reference is not None:
        with rl.adapters_off(reference):
            batch["ref_logprobs"] = logprobs_of(reference, batch, settings)
        if settings.kl_in == "reward":
            kl = algos.kl(batch["old_logprobs"], batch["ref_logprobs"], settings.kl_type, mask)
            penalty = settings.kl_coef * torch.where(mask, kl, 0.0)
            step.rewards = step.rewards - penalty
            step.outcomes = step.outcomes - penalty.sum(1)

    if critic is not None:
        with rl.compute_in(settings.dtype, device):
            step.values = map_rows(lambda model, ids, mask: model(ids, mask), critic, batch,
                                   settings.microbatch_tokens)
    advantage = settings.advantage
    batch["advantages"] = advantage(step)
    if critic is not None:
        batch |= {"old_values": step.values, "returns": step.returns}
    record_advantages(trajectories, batch["advantages"],
                      per_token=not getattr(advantage, "one_a_trajectory", False))
    return batch


def logprobs_of(model: PreTrainedModel, batch: Batch, settings: Loss) -> Tensor:
    """A model's log-probs of a whole batch's sampled tokens, in micro-batches, shared among the
    ranks. -> [B, T] float32 on the CPU"""
    def of_rows(model, ids, mask):
        return rl.token_logprobs(model, ids, mask, settings.temperature)[0]

    with rl.compute_in(settings.dtype, device_of(model)):
        return map_rows(of_rows, model, batch, settings.microbatch_tokens)


def record_advantages(trajectories: Sequence[Trajectory], advantages: Tensor,
                      per_token: bool) -> None:
    """Set `Trajectory.advantage` from advantages [B, T]: a list, or the one number of its sampled
    tokens."""
    for t, row in zip(trajectories, advantages):
        own = row[: len(t.tokens)].tolist()
        if per_token:
            t.advantage = own
        else:
            t.advantage = next((a for a, sampled in zip(own, t.mask) if sampled), 0.0)


# ---- the passes over a step's trajectories ----


def update(trajectories: Sequence[Trajectory], batch: Batch, settings: Loss, step: int,
           policy: PreTrainedModel, optimizer: torch.optim.Optimizer,
           critic: rl.Critic | None = None,
           critic_optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """`epochs` passes over one step's trajectories, an optimizer step for each mini-batch.

    batch: from `advantages_of`. -> the metrics of the update, means over optimizer steps or over
    tokens.
    """
    usable = [i for i, t in enumerate(trajectories) if t.status != "env_error"]
    has_advantage = (batch["advantages"] != 0).any(1).tolist()
    # A trajectory of advantage 0 has a gradient only if the loss has another term.
    has_kl = "ref_logprobs" in batch and settings.kl_in == "loss"
    other_terms = settings.entropy_coef > 0 or has_kl
    sums: dict[str, float] = {}
    num_updates = 0
    gap = 0.0
    groups = [trajectories[i].group for i in usable]
    for epoch in range(settings.epochs):
        for rows in minibatches(usable, groups, settings.minibatches, settings.seed, step, epoch):
            # Rows without a gradient count in the denominator, and are not computed.
            denominator = loss_denominator(batch["mask"][rows], settings.aggregation)
            with_gradient = [i for i in rows if other_terms or has_advantage[i]]
            is_first = num_updates == 0  # the weights are still those that sampled
            if is_first and not with_gradient:
                with_gradient = list(rows[:1])  # one trajectory, to measure `logprob_gap`

            loss_of = partial(policy_objective, policy, settings, denominator)
            stats = optimizer_step(policy, optimizer, batch, with_gradient, loss_of,
                                   settings.microbatch_tokens, settings.max_grad_norm)
            took_step = math.isfinite(stats["grad_norm"])
            stats["weight_change"] = adam_step_norm(policy, optimizer) if took_step else 0.0
            if critic is not None:
                loss_of = partial(value_objective, critic, settings, denominator)
                value_stats = optimizer_step(critic, critic_optimizer, batch, rows, loss_of,
                                             settings.microbatch_tokens, settings.max_grad_norm)
                stats["value_loss"] = value_stats.get("loss", 0.0)
            if is_first:
                gap = stats.get("gap", 0.0) / max(1.0, stats.get("tokens", 0.0))
            num_updates += 1
            for name, value in stats.items():
                sums[name] = sums.get(name, 0.0) + value
    metrics = update_metrics(sums, num_updates, gap)
    if critic is not None:
        valid = torch.zeros(len(trajectories), dtype=torch.bool)
        valid[usable] = True
        metrics["value_loss"] = sums["value_loss"] / num_updates
        metrics["explained_variance"] = explained_variance(
            batch["returns"], batch["old_values"], batch["mask"] & valid[:, None])
    return metrics


def minibatches(usable: list[int], groups: list[int], count: int, seed: int, step: int,
                epoch: int) -> list[list[int]]:
    """Divide the rows `usable` among `count` mini-batches -> the rows of each.

    The order is a function of (seed, step, epoch). groups[i] is the group of usable[i]. Groups stay
    whole, so that the prefixes that their rows share are computed once, unless there are fewer
    groups than mini-batches.
    """
    generator = np.random.default_rng([seed, step, epoch, 1])
    units = {}
    for i, group in zip(usable, groups):
        units.setdefault(group, []).append(i)
    if len(units) < count:
        units = {i: [i] for i in usable}
    order = generator.permutation(np.array(list(units), dtype=int))
    count = min(count, max(1, len(order)))
    return [[i for unit in part for i in units[int(unit)]]
            for part in np.array_split(order, count)]


def loss_denominator(mask: Tensor, aggregation: str) -> int:
    """What the losses of a mini-batch with this mask [B, T] are divided by: its sampled tokens
    (aggregation "token"), or its rows that have one ("sequence"); at least 1."""
    counted = {"token": mask, "sequence": mask.any(1)}[aggregation]
    return max(1, int(counted.sum()))


def policy_objective(policy: PreTrainedModel, settings: Loss, denominator: int,
                     part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch: clipped surrogate, KL to the reference, entropy bonus. -> loss,
    stats, which are sums over its tokens."""
    mask = part["mask"]
    with rl.compute_in(settings.dtype, part["ids"].device):
        logp, entropy = rl.token_logprobs(policy, part["ids"], mask, settings.temperature,
                                          entropy_gradient=settings.entropy_coef > 0)
    loss, stats = settings.loss_function(part | {"logprobs": logp})
    stats["gap"] = (logp.detach() - part["old_logprobs"]).abs().sum()
    if "ref_logprobs" in part:
        kl = algos.kl(logp, part["ref_logprobs"], settings.kl_type, mask)
        stats["kl"] = kl.detach().sum()
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coef * kl
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    return algos.aggregate(loss, mask, settings.aggregation, denominator,
                           part.get("num_sampled")), stats


def value_objective(critic: rl.Critic, settings: Loss, denominator: int,
                    part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss of a micro-batch -> loss, no stats."""
    mask = part["mask"]
    with rl.compute_in(settings.dtype, part["ids"].device):
        values = critic(part["ids"], mask)
    loss = algos.value_loss(values, part["old_values"], part["returns"], mask, settings.value_clip)
    return algos.aggregate(loss, mask, settings.aggregation, denominator,
                           part.get("num_sampled")), {}


def update_metrics(sums: dict[str, float], steps: int, gap: float) -> dict[str, float]:
    """Sums of `optimizer_step`'s stats over `steps` optimizer steps -> a row of metrics."""
    tokens = max(1.0, sums.get("tokens", 0.0))
    fed = max(1.0, sums.get("fed", 0.0))
    computed = max(1.0, sums.get("computed", 0.0))
    return {
        "loss": sums.get("loss", 0.0) / steps,
        "grad_norm": sums["grad_norm"] / steps,
        "weight_change": sums["weight_change"] / steps,
        "logprob_gap": gap,
        # To the reference; without one, to the weights that sampled.
        "kl": sums.get("kl", sums.get("approx_kl", 0.0)) / tokens,
        "kl_behaviour": sums.get("approx_kl", 0.0) / tokens,
        "clip_fraction": sums.get("clip_fraction", 0.0) / tokens,
        "padding": max(0.0, 1 - fed / computed),
        "computed_per_fed": computed / fed,
    }


# ---- batches and micro-batches ----


def collate(trajectories: Sequence[Trajectory], device: str | torch.device = "cpu",
            **columns: Sequence[Sequence[float] | float]) -> Batch:
    """Pad on the right -> {"ids" [B, T] long, "mask" [B, T] bool, "old_logprobs" [B, T],
    name: [B, T] ..., "lengths" [B] long}.

    columns: name -> for each trajectory a list of T numbers, or one number for all its tokens.
    """
    batch = pad_rows([t.tokens for t in trajectories], [t.mask for t in trajectories], device,
                     old_logprobs=[t.logprobs for t in trajectories], **columns)
    if any(len(t.starts) > 1 for t in trajectories):
        batch["segments"] = torch.zeros_like(batch["ids"])
        for row, t in zip(batch["segments"], trajectories):
            for start in t.starts[1:]:
                row[start:] += 1
    return batch


def by_segment(batch: Batch) -> tuple[Batch, list[tuple[int, int, int]]]:
    """A batch with one row a segment, and (row, start, end) of each segment in `batch`.

    "num_sampled" [R]: the number of sampled tokens of a segment's whole trajectory.
    """
    lengths = batch["lengths"].tolist()
    if "segments" not in batch:
        return batch, [(b, 0, length) for b, length in enumerate(lengths)]
    spans = []
    for b, length in enumerate(lengths):
        cuts = (batch["segments"][b, :length].diff().nonzero().flatten() + 1).tolist()
        spans += zip([b] * (len(cuts) + 1), [0, *cuts], [*cuts, length])
    parts = {name: pad_sequence([x[b, start:end] for b, start, end in spans], batch_first=True)
             for name, x in batch.items() if x.dim() == 2 and name != "segments"}
    rows = torch.tensor([b for b, _, _ in spans])
    return parts | {"lengths": torch.tensor([end - start for _, start, end in spans]),
                    "num_sampled": batch["mask"].sum(1)[rows]}, spans


def pad_rows(ids: Sequence[Sequence[int]], mask: Sequence[Sequence[bool]],
             device: str | torch.device = "cpu",
             **columns: Sequence[Sequence[float] | float]) -> Batch:
    """As `collate`, from each row's ids and mask."""
    lengths = [len(row) for row in ids]
    width = max([2, *lengths])  # at least 2: a model is fed all columns but the last

    def pad(rows, dtype):
        out = torch.zeros(len(lengths), width, dtype=dtype)
        for b, (length, row) in enumerate(zip(lengths, rows)):
            out[b, :length] = torch.as_tensor(row, dtype=dtype)
        return out.to(device)

    batch = {"ids": pad(ids, torch.long), "mask": pad(mask, torch.bool),
             "lengths": torch.tensor(lengths, device=device)}
    return batch | {name: pad(rows, torch.float32) for name, rows in columns.items()}


def select(batch: Batch, rows: Sequence[int], device: torch.device) -> Batch:
    """Some rows of a batch, on `device`, no wider than the longest of them."""
    lengths = batch["lengths"][rows]
    width = max(2, int(lengths.max()))
    selected = {name: x[rows] if x.dim() == 1 else x[rows, :width] for name, x in batch.items()}
    return {name: x.to(device) for name, x in selected.items()}


def micro_batches(rows: list[list[int]], max_tokens: int, num_ranks: int = 1,
                  packed: bool = True) -> list[list[int]]:
    """Cut trajectories into micro-batches of at most `max_tokens` positions, or of one longer
    trajectory.

    rows: the ids of each trajectory. -> lists of indices, a multiple of `num_ranks` of them:
    micro-batch i belongs to rank i % num_ranks; it is [] if none is left for that rank.
    packed=True: rows are sorted lexicographically, and a prefix shared within a micro-batch counts
    once. packed=False: rows are sorted by length, and padding counts.

    >>> rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 7, 7, 7, 7, 7]]
    >>> micro_batches(rows, max_tokens=6)
    [[0, 1], [2]]
    >>> micro_batches(rows, max_tokens=10, packed=False)
    [[0, 1], [2]]
    >>> micro_batches(rows, max_tokens=20, num_ranks=2)
    [[0, 1], [2]]
    """
    if packed:
        cuts = cut_packed(rows, max_tokens, num_ranks)
    else:
        cuts = cut_padded([len(row) for row in rows], max_tokens)
    return cuts + [[]] * (-len(cuts) % num_ranks)


def cut_packed(rows: list[list[int]], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """The fewest micro-batches, a multiple of `num_ranks`, that all keep the limit, and the largest
    of them as small as it can be."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [common_prefix_length(rows[a], rows[b]) for a, b in zip(order, order[1:])]

    def cut(limit: int) -> list[list[int]]:
        cuts, held = [], limit
        for i, common in zip(order, [0, *shared]):
            held += len(rows[i]) - common
            if held > limit or not cuts:  # the first of a micro-batch shares with none
                cuts.append([])
                held = len(rows[i])
            cuts[-1].append(i)
        return cuts

    longest = max(map(len, rows), default=1)
    high = max(max_tokens, longest)
    count = -(-len(cut(high)) // num_ranks) * num_ranks
    low = longest
    while low < high:  # binary search; `cut(high)` has at most `count` micro-batches throughout
        middle = (low + high) // 2
        if len(cut(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return cut(high)


def cut_padded(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of similar lengths, whose rows all count as long as the longest."""
    cuts = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not cuts or (len(cuts[-1]) + 1) * lengths[i] > max_tokens:
            cuts.append([])
        cuts[-1].append(i)
    return cuts


def own_micro_batches(model: nn.Module, rows: list[list[int]],
                      max_tokens: int) -> Iterator[tuple[list[int], bool]]:
    """This rank's micro-batches as (indices into `rows`, is_repeat).

    A sharded model is computed by all ranks together. A rank that has no micro-batch left repeats
    the shortest trajectory; the caller must ignore its result (is_repeat=True).
    """
    rank, num_ranks = ranks()
    cuts = micro_batches(rows, max_tokens, num_ranks, rl.packs(model))
    for cut in cuts[rank::num_ranks]:
        if cut:
            yield cut, False
        elif sharded(model):
            yield [min(range(len(rows)), key=lambda i: len(rows[i]))], True


def ids_of(batch: Batch) -> list[list[int]]:
    """The ids of each row of a batch, without its padding."""
    return [ids[:length].tolist() for ids, length in zip(batch["ids"], batch["lengths"])]


def num_positions(rows: list[list[int]], packed: bool) -> int:
    """How many positions are computed for a micro-batch from `micro_batches`."""
    if not packed:
        return len(rows) * max(map(len, rows))
    shared = sum(map(common_prefix_length, rows, rows[1:]))
    return sum(map(len, rows)) - shared


@torch.no_grad()
def map_rows(function: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module,
             batch: Batch, max_tokens: int) -> Tensor:
    """Apply `function` to a whole batch in micro-batches that are shared among the ranks.

    function(model, ids [b, t], mask [b, t]) -> [b, t]. -> [B, T] float32 on the CPU, on every rank.
    """
    mine = []
    segments, spans = by_segment(batch)
    for rows, is_repeat in own_micro_batches(model, ids_of(segments), max_tokens):
        part = select(segments, rows, device_of(model))
        result = function(model, part["ids"], part["mask"]).cpu()
        if not is_repeat:
            mine.append((rows, result))
    if sharded(model):
        model.reshard()  # otherwise done by the backward pass
    out = torch.zeros(batch["mask"].shape)
    for rows, result in gather(mine):
        for i, values in zip(rows, result):
            b, start, end = spans[i]
            out[b, start:end] = values[: end - start]
    return out


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch,
                   rows: Sequence[int], loss_of: LossFunction, max_tokens: int,
                   max_grad_norm: float = 1.0) -> dict[str, float]:
    """One optimizer step over one mini-batch: these rows of the batch.

    loss_of(micro-batch) -> (loss, stats). The loss is already divided by the mini-batch's
    denominator; stats are 0-d tensors, sums over the micro-batch. -> the sums of loss ("loss") and
    stats over all micro-batches and ranks, the gradient norm before clipping ("grad_norm"), the
    number of tokens in the rows ("fed") and of positions in the forward passes ("computed": less
    than "fed" with shared prefixes, more with padding). If the gradient is not finite, the weights
    stay as they are.
    """
    # Forward and backward pass of each of this rank's micro-batches.
    _, num_ranks = ranks()
    total: dict[str, Tensor | float] = {}
    segments = by_segment(select(batch, rows, batch["ids"].device))[0] if rows else {}
    ids = ids_of(segments) if rows else []
    for cut, is_repeat in own_micro_batches(model, ids, max_tokens):
        part = select(segments, cut, device_of(model))
        loss, stats = loss_of(part)
        scale = 1.0
        if sharded(model):  # FSDP averages gradients over ranks, but the loss is a sum over ranks
            scale = 0.0 if is_repeat else num_ranks
        (loss * scale).backward()
        if not is_repeat:
            own = [ids[i] for i in cut]
            stats = stats | {"loss": loss.detach(), "fed": sum(map(len, own)),
                             "computed": num_positions(own, rl.packs(model))}
            total = {name: total.get(name, 0.0) + value for name, value in stats.items()}

    # Sum gradients and stats over ranks. A rank without a micro-batch has no stats.
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not sharded(model):
        sum_over_ranks([p.grad for p in parameters])
    of_ranks = gather([{name: float(value) for name, value in total.items()}])
    names = {name: None for stats in of_ranks for name in stats}
    result = {name: sum(stats.get(name, 0.0) for stats in of_ranks) for name in names}

    # Clip and step.
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = float(norm.full_tensor() if sharded(model) else norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result | {"grad_norm": norm}


def adam_step_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The norm of the last change that AdamW, without weight decay, made to all trained weights.

    It is computed from the moments, so it needs no copy of the weights, and does not have their
    rounding. 0 for another optimizer, or before the first step. Called by all ranks.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return 0.0
    total = 0.0
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            steps = float(state.get("step", 0.0))
            if not steps:
                continue
            moments = []
            for name in ("exp_avg", "exp_avg_sq"):
                moment = state[name].to_local() if sharded(model) else state[name]
                moments.append(moment.flatten().split(MOMENTS_AT_ONCE))
            for mean, square in zip(*moments):
                denominator = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
                step = mean / denominator
                squares = step.square_().sum(dtype=torch.float64)
                total += float(squares) * (group["lr"] / (1 - beta1**steps)) ** 2
    if sharded(model):
        total = sum(gather([total]))
    return math.sqrt(total)
