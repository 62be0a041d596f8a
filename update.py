"""From a step's trajectories to new weights: rewards, advantages, and passes over mini-batches.

Every rank holds all trajectories of a step, since they are small, and computes gradients for its
share of the micro-batches. Gradients are summed over ranks. The denominator of a loss is counted
once over the whole mini-batch, so the result is the same however it is cut into micro-batches and
over however many ranks.

A batch is a dict of tensors with one row a trajectory: "ids", "mask", "old_logprobs", "segments"
and further columns, all [B, T] and padded with zeros on the right. Algorithms see whole
trajectories. A model sees segments, since a segment's tokens know nothing of earlier ones: a
micro-batch has one row a segment.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import algos
import rl
from envs import ABOVE_0, NOT_NEGATIVE, UserError, flag, load_function
from metrics import explained_variance, timed
from models.packed import common_prefix_length
from parallel import device_of, gather, ranks, sent, sharded, sum_over_ranks, through
from rl import Sampling
from trajectory import Trajectory, reply_spans

Batch = dict[str, Tensor]
Span = tuple[int, int, int]  # row, start, end: where a segment is in a batch
LossFunction = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]

# ---- settings ----


@dataclass
class Optim(Sampling):
    """optimization, memory and precision"""

    # AdamW's learning rate
    lr: float = flag(1e-6, ABOVE_0, first=True)
    # after the warm-up; cosine: to a tenth, over all steps
    lr_schedule: str = flag("constant", ("constant", "cosine"), study=True)
    # steps over which the learning rates rise to their values (Adam's first steps are mostly noise)
    warmup_steps: int = flag(10, NOT_NEGATIVE, study=True)
    # gradients are clipped to this norm
    max_grad_norm: float = flag(1.0, ABOVE_0, study=True)
    # largest number of tokens in one forward and backward pass
    microbatch_tokens: int = flag(16384, ABOVE_0, may_change=True)
    # compute blocks again in the backward pass: a third slower, far less memory
    gradient_checkpointing: bool = flag(True, may_change=True)
    # compile the blocks in the first step, about a minute; default: real models on a GPU
    compile: bool = flag(False, study=True, may_change=True)
    # 0: train all weights; else LoRA adapters of this rank (needs the extra lora), merged into the
    # weights in final/
    lora_rank: int = flag(0, NOT_NEGATIVE)
    # FSDP2: shard weights, gradients and optimizer states over the ranks; default: on GPUs, without
    # --lora_rank
    shard: bool | None = flag(None, may_change=True)
    # with --shard: keep the shards in CPU memory and update them there
    offload: bool = flag(False, study=True, may_change=True)


@dataclass
class Loss(Optim):
    """rewards, advantages and loss"""

    # or the name of a file in ideas/, FILE.py:NAME, module:NAME
    algo: str = flag("grpo", algos.ALGOS, first=True)
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
                  turn_cost: float = 0.0) -> Sequence[Trajectory]:
    """Add the shaping reward (--shaping none | potential | progress) to each turn's reward and
    subtract `turn_cost` from it. Changes `rewards` and `reward` of the trajectories in place.
    -> the trajectories"""
    for t in trajectories if shaping != "none" or turn_cost else ():
        turns = len(t.progress)  # a last reply that was never answered is not a turn
        potentials = [0.0] * turns if shaping == "none" else t.progress
        extra = potential_rewards(potentials, keep=shaping == "progress")
        for (_, end), more in zip(reply_spans(t.mask), extra):
            t.rewards[end - 1] += more - turn_cost
        if shaping == "potential":
            # The added rewards sum to 0. Adding them to the return would only round it, and equal
            # returns must stay equal.
            t.reward -= turn_cost * turns
        else:
            t.reward = round(math.fsum(t.rewards), 9)
    return trajectories


def potential_rewards(potentials: Sequence[float], keep: bool = False) -> list[float]:
    """The rewards that potential-based shaping adds to the turns of one trajectory.

    Shaping (Ng, Harada & Russell 1999) adds gamma Phi(s') - Phi(s) to each reward. Here gamma is 1:
    the sum of the added rewards is zero, so the optimal policy does not change.

    potentials: [turns], Phi after each turn; before the first turn it is 0. The potential of the
    final state counts as 0, also where the horizon cuts the trajectory. With keep=True the final
    potential keeps its value, which rewards progress itself and may change the optimal policy.
    -> [turns] floats. They sum to 0, so advantages that compare sums within a group (GRPO, RLOO) do
    not change. PPO and REINFORCE++ use them per turn.

    >>> potential_rewards([0.25, 0.75, 1.0])
    [0.25, 0.5, -0.75]
    >>> potential_rewards([0.25, 0.75, 1.0], keep=True)
    [0.25, 0.5, 0.25]
    """
    after = [*potentials] if keep else [*potentials[:-1], 0.0]
    return [new - old for old, new in zip([0.0, *potentials], after)]


@dataclass
class Gathered:
    """All trajectories of a step as tensors on the CPU, from all ranks: what a function of
    `algos.ALGOS` takes. B trajectories, T tokens."""

    trajectories: Sequence[Trajectory]
    batch: Batch  # see `collate`
    mask: Tensor  # [B, T] bool: chosen by the policy, and the environment did not fail
    rewards: Tensor  # [B, T]: where no token of a turn was chosen, its reward is in the turn before
    turn_rewards: Tensor  # [B, T]: each in its own turn, as "turns" of the batch counts them
    # [B], `Trajectory.reward`: an exactly rounded sum. The sum over a row of `rewards` would be
    # rounded by the turns in which the rewards came.
    outcomes: Tensor
    groups: Tensor  # [B] long
    valid: Tensor  # [B] bool
    # Of the sampled tokens -> [B, T].
    logprobs_of: Callable[[PreTrainedModel], Tensor] | None = None
    models: dict[str, PreTrainedModel] = field(default_factory=dict)  # setting -> its model
    # (items, samples, episode_class) -> trajectories: see `rollout`.
    play: Callable[..., list[Trajectory]] | None = None
    columns: dict[str, float] = field(default_factory=dict)  # of the step's row of metrics
    values: Tensor | None = None  # [B, T], with a critic
    returns: Tensor | None = None  # [B, T]: what the critic learns, set by the function


def gather_step(trajectories: Sequence[Trajectory], **more: Any) -> Gathered:
    """The trajectories of a step as tensors. more: further fields of `Gathered`."""
    batch = collate(trajectories, rewards=[t.credited() for t in trajectories],
                    turn_rewards=[t.rewards for t in trajectories])
    valid = torch.tensor([t.status != "env_error" for t in trajectories])
    return Gathered(trajectories, batch, batch["mask"] & valid[:, None], batch["rewards"],
                    batch["turn_rewards"], outcomes=torch.tensor([t.reward for t in trajectories]),
                    groups=torch.tensor([t.group for t in trajectories]), valid=valid, **more)


def advantages_of(trajectories: Sequence[Trajectory], settings: Loss, device: torch.device,
                  reference: PreTrainedModel | None = None, critic: rl.Critic | None = None,
                  **more: Any) -> Batch:
    """Compute the advantages of a whole step, gathered from all ranks.

    device: where the critic computes; the batch stays on the CPU. reference: the model that the KL
    refers to; with LoRA the policy itself, with its adapters switched off. more: further fields of
    `Gathered`.
    -> the batch, with "advantages"; with a reference also "ref_logprobs"; with a critic also
    "old_values" and "returns". Each trajectory's `advantage` is set for the record.
    """
    step = gather_step(trajectories, **more)
    batch = step.batch
    step.logprobs_of = partial(logprobs_of, batch=batch, settings=settings)

    # The KL to the reference, which may be part of the reward.
    if reference is not None:
        with rl.adapters_off(reference):
            batch["ref_logprobs"] = logprobs_of(reference, batch, settings)
        if settings.kl_in == "reward":
            kl = algos.kl(batch["old_logprobs"], batch["ref_logprobs"], settings.kl_type, step.mask)
            penalty = settings.kl_coef * torch.where(step.mask, kl, 0.0)
            step.rewards, step.turn_rewards = step.rewards - penalty, step.turn_rewards - penalty
            step.outcomes = step.outcomes - penalty.sum(1)

    if critic is not None:
        with rl.compute_in(settings.dtype, device):
            step.values = map_rows(
                lambda critic, part: through(critic, critic.forward, part["ids"], part["mask"]),
                critic, batch, settings.microbatch_tokens)
    batch["advantages"] = settings.advantage(step)
    if critic is not None:
        batch |= {"old_values": step.values, "returns": step.returns}
    for t, row in zip(trajectories, batch["advantages"].tolist()):
        t.advantage = row[: len(t.tokens)]
        if getattr(settings.advantage, "one_a_trajectory", False):
            t.advantage = next((a for a, decided in zip(row, t.decided()) if decided), 0.0)
    return batch


def logprobs_of(model: PreTrainedModel, batch: Batch, settings: Loss) -> Tensor:
    """A model's log-probs of a whole batch's sampled tokens, in micro-batches, shared among the
    ranks. -> [B, T] float32 on the CPU"""
    with rl.compute_in(settings.dtype, device_of(model)):
        return map_rows(lambda model, part: rl.token_logprobs(
            model, part["ids"], part["mask"], settings.temperature, allowed=part.get("allowed"))[0],
            model, batch, settings.microbatch_tokens)


# ---- the passes over a step's trajectories ----


def update(trajectories: Sequence[Trajectory], batch: Batch, settings: Loss, step: int,
           policy: PreTrainedModel, optimizer: torch.optim.Optimizer,
           critic: rl.Critic | None = None,
           critic_optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """`epochs` passes over one step's trajectories, an optimizer step for each mini-batch.

    batch: from `advantages_of`. -> the metrics of the update, means over optimizer steps or over
    tokens.
    """
    # A trajectory of advantage 0 has a gradient only if the loss has another term.
    has_kl = "ref_logprobs" in batch and settings.kl_in == "loss"
    needs_observations = getattr(settings.loss_function, "needs_observations", False)
    has_other_term = settings.entropy_coef > 0 or has_kl or settings.loss not in algos.LOSSES
    has_gradient = ((batch["advantages"] != 0).any(1) | has_other_term).tolist()
    sums: Counter[str] = Counter()
    gap = 0.0
    parts = [rows for epoch in range(settings.epochs)
             for rows in minibatches(trajectories, settings, step, epoch)]
    for number, rows in enumerate(parts):
        # Rows without a gradient count in the denominator, and are not computed.
        denominator = algos.loss_denominator(batch["mask"][rows], settings.aggregation)
        with_gradient = [i for i in rows if has_gradient[i]]
        if number == 0 and not with_gradient:
            with_gradient = rows[:1]  # one trajectory, to measure `logprob_gap`
        observed = int(batch["observed"][rows].sum()) if needs_observations else 0
        loss_of = partial(policy_objective, policy, settings, denominator, observed=observed)
        stats = optimizer_step(policy, optimizer, batch, with_gradient, loss_of,
                               settings.microbatch_tokens, settings.max_grad_norm)
        if math.isfinite(stats["grad_norm"]) and isinstance(optimizer, torch.optim.AdamW):
            stats["weight_change"] = timed(stats, "seconds_adam", adam_step_norm, policy, optimizer)
        if number == 0:  # the weights were still those that sampled
            gap = stats["gap"] / max(1.0, stats["tokens"])
        if critic is not None:
            loss_of = partial(value_objective, critic, settings, denominator)
            stats["value_loss"] = optimizer_step(
                critic, critic_optimizer, batch, rows, loss_of, settings.microbatch_tokens,
                settings.max_grad_norm)["loss"]
        sums.update(stats)

    tokens, fed, computed = (max(1.0, sums[name]) for name in ("tokens", "fed", "computed"))
    metrics = {name: sums[name] / len(parts) for name in ("loss", "grad_norm", "weight_change")}
    metrics |= {
        "logprob_gap": gap,
        # To the reference; without one, to the weights that sampled.
        "kl": sums["kl" if "kl" in sums else "approx_kl"] / tokens,
        "kl_behaviour": sums["approx_kl"] / tokens,
        "clip_fraction": sums["clip_fraction"] / tokens,
        "padding": max(0.0, 1 - fed / computed),
        "computed_per_fed": computed / fed, "seconds_adam": sums["seconds_adam"],
    }
    if sums["observed"]:
        metrics["observation_loss"] = sums["observation_loss"] / sums["observed"]
    if critic is not None:
        valid = torch.tensor([t.status != "env_error" for t in trajectories])
        metrics["value_loss"] = sums["value_loss"] / len(parts)
        metrics["explained_variance"] = explained_variance(
            batch["returns"], batch["old_values"], batch["mask"] & valid[:, None])
    return metrics


def minibatches(trajectories: Sequence[Trajectory], settings: Loss, step: int,
                epoch: int) -> list[list[int]]:
    """Divide the trajectories whose environments did not fail among the mini-batches of an epoch
    -> the rows of each.

    The order is a function of (seed, step, epoch). Groups stay whole, so that the prefixes that
    their rows share are computed once, unless there are fewer groups than mini-batches.
    """
    rows_of: dict[int, list[int]] = {}
    for i, t in enumerate(trajectories):
        if t.status != "env_error":
            rows_of.setdefault(t.group, []).append(i)
    groups = list(rows_of.values())
    if len(groups) < settings.minibatches:
        groups = [[i] for i in sorted(sum(groups, []))]
    order = np.random.default_rng([settings.seed, step, epoch, 1]).permutation(len(groups))
    count = min(settings.minibatches, max(1, len(groups)))
    return [[i for group in part for i in groups[group]] for part in np.array_split(order, count)]


def policy_objective(policy: PreTrainedModel, settings: Loss, denominator: int, part: Batch,
                     observed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch on the CPU: clipped surrogate, KL to the reference, entropy bonus.
    observed: the number of the mini-batch's tokens of observations, if the loss needs their
    log-probs. -> loss, stats, which are sums over its tokens."""
    here, part = part, {name: sent(x, device_of(policy)) for name, x in part.items()}
    mask, scored = part["mask"], here["mask"] | (here["observed"] & (observed > 0))
    with rl.compute_in(settings.dtype, device_of(policy)):
        logp, entropy = rl.token_logprobs(policy, here["ids"], scored, settings.temperature,
                                          settings.entropy_coef > 0, here.get("allowed"))
    loss, stats, *others = settings.loss_function(part | {"logprobs": logp})
    if loss.shape != mask.shape:  # a mean would be broadcast over all tokens
        raise UserError(f"--loss {settings.loss} has to return the loss of each token, [B, T]")
    old, new = part["old_logprobs"], logp.detach()
    stats |= {"tokens": mask.sum(), "gap": ((new - old) * mask).abs().sum(),
              "approx_kl": algos.kl(old, new, "k3", mask).sum()}  # KL(old || new)
    if "ref_logprobs" in part:
        kl = algos.kl(logp, part["ref_logprobs"], settings.kl_type, mask)
        stats["kl"] = kl.detach().sum()
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coef * kl
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    objective = algos.aggregate(loss, mask, settings.aggregation, denominator, part["num_sampled"])
    if others:  # the loss of observations
        objective = objective + algos.aggregate(others[0], part["observed"], denominator=observed)
        stats["observed"] = part["observed"].sum()
        stats["observation_loss"] = -(logp.detach() * part["observed"]).sum()
    return objective, stats


def value_objective(critic: rl.Critic, settings: Loss, denominator: int,
                    part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss of a micro-batch on the CPU -> loss, no stats."""
    here, part = part, {name: sent(x, device_of(critic)) for name, x in part.items()}
    mask = part["mask"]
    with rl.compute_in(settings.dtype, device_of(critic)):
        values = through(critic, critic.forward, here["ids"], here["mask"])
    loss = algos.value_loss(values, part["old_values"], part["returns"], mask, settings.value_clip)
    return algos.aggregate(loss, mask, settings.aggregation, denominator, part["num_sampled"]), {}


# ---- batches and micro-batches ----


def pad(rows: Sequence[Tensor]) -> Tensor:
    """Rows [T_b] or [T_b, A] of several lengths -> [B, T] or [B, T, A], with zeros on the right. T
    is at least 2: a model is fed all columns but the last."""
    return pad_sequence([*rows, rows[0].new_zeros(2, *rows[0].shape[1:])], batch_first=True)[:-1]


def collate(trajectories: Sequence[Trajectory],
            **columns: Sequence[Sequence[float] | float]) -> Batch:
    """-> {"ids" [B, T] long, "mask" [B, T] bool, "segments" [B, T] long: the number of a token's
    segment, from 1 on, "turns" [B, T] long: the number of a sampled token's reply, from 1 on, else
    0, "old_logprobs" [B, T], name: [B, T] ...}, with zeros on the right. "mask" leaves out tokens
    that were the only ones allowed, "turns" does not. Where a token was chosen among some, there is
    "allowed" [B, T, A] long: their ids plus one, 0 for none.

    columns: name -> for each trajectory a list of T numbers, or one number for all its tokens.
    """
    def column(rows, dtype=torch.float32):
        return pad([torch.as_tensor(row, dtype=dtype).expand(len(t.tokens))
                    for t, row in zip(trajectories, rows)])

    segments = [np.searchsorted(t.starts[1:], range(len(t.tokens)), side="right") + 1
                for t in trajectories]
    batch = {"ids": column([t.tokens for t in trajectories], torch.long),
             "mask": column([t.decided() for t in trajectories], torch.bool),
             "observed": column([t.observed() for t in trajectories], torch.bool),
             "segments": column(segments, torch.long),
             "turns": algos.turn_numbers(column([t.mask for t in trajectories], torch.bool)) + 1,
             "old_logprobs": column([t.logprobs for t in trajectories])}
    if any(t.choices for t in trajectories):
        rows = [[i + 1 for i in ids or ()] for t in trajectories for ids in t.allowed()]
        by_column = torch.tensor([*zip_longest(*rows, fillvalue=0)], dtype=torch.long)
        table = by_column.view(-1, len(rows)).T  # [sum of T, A]
        batch["allowed"] = pad(table.split([len(t.tokens) for t in trajectories]))
    return batch | {name: column(rows) for name, rows in columns.items()}


def segment_spans(batch: Batch, rows: Sequence[int]) -> list[Span]:
    """The segments of some rows of a batch, in their order."""
    spans = []
    for b in rows:
        ends = batch["segments"][b].bincount()[1:].cumsum(0).tolist()  # of segments 1, 2 ...
        spans += [(b, start, end) for start, end in zip([0, *ends], ends)]
    return spans


def ids_of(batch: Batch, spans: Sequence[Span]) -> list[list[int]]:
    """The ids of each segment."""
    return [batch["ids"][b, start:end].tolist() for b, start, end in spans]


def micro_batches(rows: list[list[int]], max_tokens: int, num_ranks: int = 1,
                  packed: bool = True) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens` positions, or of one longer
    sequence.

    rows: the ids of each sequence. -> lists of indices, a multiple of `num_ranks` of them:
    micro-batch i belongs to rank i % num_ranks; it is [] if none is left for that rank.
    packed=True: rows are sorted lexicographically, and a prefix shared within a micro-batch counts
    once. There are as few micro-batches as the limit allows, and the largest is as small as it can
    be. packed=False: rows are sorted by length, and padding counts.

    >>> rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 7, 7, 7, 7, 7]]
    >>> micro_batches(rows, max_tokens=6)
    [[0, 1], [2]]
    >>> micro_batches(rows, max_tokens=10, packed=False)
    [[0, 1], [2]]
    >>> micro_batches(rows, max_tokens=20, num_ranks=2)
    [[0, 1], [2]]
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i] if packed else len(rows[i]))
    shared = [0, *(common_prefix_length(rows[a], rows[b]) for a, b in zip(order, order[1:]))]

    def cut(limit: int) -> list[list[int]]:
        cuts, size = [], 0
        for i, common in zip(order, shared):
            if packed:
                size += len(rows[i]) - common
            elif cuts:
                size = (len(cuts[-1]) + 1) * len(rows[i])
            if size > limit or not cuts:  # the first of a micro-batch shares with none
                cuts.append([])
                size = len(rows[i])
            cuts[-1].append(i)
        return cuts

    limit = max_tokens
    if packed:
        longest = max(map(len, rows), default=1)
        limits = range(longest, max(max_tokens, longest) + 1)
        count = -(-len(cut(limits[-1])) // num_ranks) * num_ranks
        limit = limits[bisect_left(limits, True, key=lambda x: len(cut(x)) <= count)]
    cuts = cut(limit)
    return cuts + [[]] * (-len(cuts) % num_ranks)


def num_positions(rows: list[list[int]], packed: bool) -> int:
    """How many positions are computed for a micro-batch from `micro_batches`."""
    if not packed:
        return len(rows) * max(map(len, rows))
    return sum(map(len, rows)) - sum(map(common_prefix_length, rows, rows[1:]))


def own_micro_batches(model: nn.Module, batch: Batch, rows: Sequence[int],
                      max_tokens: int) -> Iterator[tuple[Batch, list[Span]]]:
    """This rank's micro-batches of some rows, one row a segment, on the CPU, and where their
    segments are in the batch. "num_sampled" [b]: the number of sampled tokens of a segment's whole
    trajectory. A GPU computes one micro-batch while the next one is made.

    A sharded model is computed by all ranks together. A rank that has no micro-batch left repeats
    the shortest segment; it has no spans, and the caller must ignore its result.
    """
    rank, num_ranks = ranks()
    spans = segment_spans(batch, rows)
    cuts = micro_batches(ids_of(batch, spans), max_tokens, num_ranks, rl.packs(model))
    for cut in cuts[rank::num_ranks]:
        own = [spans[i] for i in cut]
        if not own and not sharded(model):
            continue
        computed = own or [min(spans, key=lambda span: span[2] - span[1])]
        part = {name: pad([x[b, start:end] for b, start, end in computed])
                for name, x in batch.items()}
        part["num_sampled"] = batch["mask"][[b for b, _, _ in computed]].sum(1)
        yield part, own


@torch.no_grad()
def map_rows(function: Callable[[nn.Module, Batch], Tensor], model: nn.Module,
             batch: Batch, max_tokens: int) -> Tensor:
    """Apply `function` to a whole batch in micro-batches that are shared among the ranks.

    function(model, micro-batch) -> [b, t]. -> [B, T] float32 on the CPU, on every rank.
    """
    parts = own_micro_batches(model, batch, range(len(batch["ids"])), max_tokens)
    mine = [(spans, function(model, part)) for part, spans in parts]
    if sharded(model):
        model.reshard()  # otherwise done by the backward pass
    out = torch.zeros(batch["mask"].shape)
    for spans, result in gather([(spans, result.cpu()) for spans, result in mine]):
        for (b, start, end), values in zip(spans, result):
            out[b, start:end] = values[: end - start]
    return out


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch,
                   rows: Sequence[int], loss_of: LossFunction, max_tokens: int,
                   max_grad_norm: float = 1.0) -> Counter[str]:
    """One optimizer step over one mini-batch: these rows of the batch.

    loss_of(micro-batch) -> (loss, stats). The loss is already divided by the mini-batch's
    denominator; stats are 0-d tensors, sums over the micro-batch. -> the sums of loss ("loss") and
    stats over all micro-batches and ranks, the gradient norm before clipping ("grad_norm"), the
    number of tokens in the rows ("fed") and of positions in the forward passes ("computed": less
    than "fed" with shared prefixes, more with padding); 0 for any other name. If the gradient is
    not finite, the weights stay as they are.
    """
    # Forward and backward pass of each of this rank's micro-batches.
    total = Counter()
    for part, spans in own_micro_batches(model, batch, rows, max_tokens):
        loss, stats = loss_of(part)
        scale = 1.0
        if sharded(model):  # FSDP averages gradients over ranks, but the loss is a sum over ranks
            scale = ranks()[1] if spans else 0.0
        (loss * scale).backward()
        if spans:
            ids = ids_of(batch, spans)
            total.update(stats | {"loss": loss.detach(), "fed": sum(map(len, ids)),
                                  "computed": num_positions(ids, rl.packs(model))})

    # Sum gradients and stats over ranks. A rank without a micro-batch has no stats.
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not sharded(model):
        sum_over_ranks([p.grad for p in parameters])
    result = Counter()
    for stats in gather([{name: float(value) for name, value in total.items()}]):
        result.update(stats)

    # Clip and step.
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    result["grad_norm"] = float(norm.full_tensor() if sharded(model) else norm)
    if math.isfinite(result["grad_norm"]):
        timed(result, "seconds_adam", optimizer.step)
    optimizer.zero_grad(set_to_none=True)
    return result


def adam_step_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The norm of the last change that AdamW, without weight decay, made to all trained weights.

    It is computed from the moments, so it needs no copy of the weights, and does not have their
    rounding. 0 before the first step. Called by all ranks.
    """
    (group,) = optimizer.param_groups
    beta1, beta2 = group["betas"]
    total = 0.0
    for state in optimizer.state.values():
        mean, square = (x.to_local() if sharded(model) else x
                        for x in (state["exp_avg"], state["exp_avg_sq"]))
        steps = float(state["step"])
        change = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"]).reciprocal_().mul_(mean)
        total += (float(change.norm()) * group["lr"] / (1 - beta1**steps)) ** 2
    return math.sqrt(sum(gather([total])) if sharded(model) else total)
