"""The algorithms: advantages, policy and value losses, KL estimators, aggregation.

All functions are pure functions of tensors. Shapes: B trajectories, T tokens, V entries of the
vocabulary. A row holds the prompt, all replies and all observations of one trajectory, padded on
the right. `mask` [B, T] bool is True where the policy sampled the token. Every other [B, T] tensor
is aligned with it: `logprobs[b, t]` and `values[b, t]` belong to the state in which token t was
sampled. Entries outside the mask (padding, NaN) affect neither a result nor a gradient. `kl`
guarantees this only if it is given the mask.
Results are float32, or float64 if the input is float64. bfloat16 inputs are widened to float32.

Differences from the papers or from the usual implementations:
- Token-level returns visit sampled tokens only. The successor of the last sampled token of a turn
  is the first sampled token of the next turn, however long the observation between them is.
  gamma discounts once per sampled token.
- A trajectory always ends with value 0, also when the horizon cut it short (no bootstrapping).
- A group of one, or a group whose scores are all equal, gives exactly zero: neither the raw score
  nor rounding noise.
- Log-ratios are clamped to +-20 before `exp`, so that one outlier token cannot make the whole
  step infinite.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
# name -> "module:function". An advantage takes an `update.Gathered`, a loss a micro-batch, and both
# take settings as keyword arguments. Attributes of a function say what it needs: several
# trajectories of an item (`compares_samples`), a critic (`needs_critic`), `Trajectory.states`
# (`needs_states`), models that its settings name (`needs_models`). `one_a_trajectory`: all tokens
# of a trajectory have one advantage. `sums_rewards`: what a trajectory earns counts, not when.
ALGOS = {"grpo": "algos:grpo", "rloo": "algos:rloo", "reinforce_pp": "algos:reinforce_pp",
         "ppo": "algos:ppo"}
LOSSES = {"ppo": "algos:ppo_loss"}


def _as_float(x: Tensor) -> Tensor:
    """Return float64 tensors unchanged and convert all others to float32."""
    return x if x.dtype == torch.float64 else x.float()


def _check_mask(mask: Tensor, *tensors: Tensor) -> None:
    """Require a bool mask and tensors of the mask's shape.

    Without this check a [B] tensor would broadcast against [B, T] silently, and an integer mask
    would select by index.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
    for x in tensors:
        if x.shape != mask.shape:
            raise ValueError(
                f"shape {tuple(x.shape)} does not match the mask's {tuple(mask.shape)}")


# ---- advantages: constants for the optimizer, computed once over the whole gathered batch ----


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0,
        lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16), over sampled tokens only.

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k = delta_k + gamma lam A_{k+1}
        returns_k = A_k + V_k

    where k + 1 is the next *sampled* token, and V = A = 0 after the last one.
    rewards, values [B, T] float, mask [B, T] bool -> advantages, returns [B, T], both zero outside
    the mask. Raises ValueError for a reward outside the mask, because it would be lost silently.

    One trajectory: a prompt token, two sampled tokens, an observation token, one sampled token.
    The reward of each turn is on its last token.
    >>> mask = torch.tensor([[False, True, True, False, True]])
    >>> gae(torch.tensor([[0., 0., 1., 0., 2.]]), torch.zeros(1, 5), mask, gamma=0.5)[0]
    tensor([[0., 1., 2., 0., 2.]])
    """
    _check_mask(mask, rewards, values)
    if (rewards[~mask] != 0).any():
        raise ValueError("reward on a token the policy did not sample; "
                         "put it on the last sampled token of its turn")
    # Most tokens are observations. Move the sampled tokens of each row to the left, so that the
    # loop below runs only over the largest number of sampled tokens in a row.
    counts = mask.sum(1)
    slots = torch.arange(max(counts.tolist(), default=0), device=mask.device) < counts[:, None]
    dtype = torch.promote_types(_as_float(rewards).dtype, _as_float(values).dtype)
    # r, v, adv: like `slots` [B, S]. After the last sampled token of a row they stay 0: V = A = 0.
    r, v, adv = torch.zeros(3, *slots.shape, dtype=dtype, device=mask.device)
    r[slots], v[slots] = rewards[mask].to(dtype), values[mask].to(dtype)
    next_v = next_adv = torch.zeros(len(mask), dtype=dtype, device=mask.device)  # [B]
    for k in reversed(range(slots.shape[1])):
        delta = r[:, k] + gamma * next_v - v[:, k]
        next_adv = delta + gamma * lam * next_adv
        adv[:, k] = next_adv
        next_v = v[:, k]
    # Move the results back to the positions of the tokens.
    advantages, returns = torch.zeros(2, *mask.shape, dtype=dtype, device=mask.device)  # [B, T]
    advantages[mask], returns[mask] = adv[slots], (adv + v)[slots]
    return advantages, returns


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / std over the sampled tokens of the whole batch.

    x [B, T] float, mask [B, T] bool -> [B, T], zero outside the mask. The result is all zeros if
    there are fewer than two sampled tokens or if they are all equal. 1e-8 is added to the variance,
    so that differences that are only rounding noise are not scaled up to +-1.

    >>> whiten(torch.tensor([[1., 9., 3.]]), torch.tensor([[True, False, True]]))
    tensor([[-0.7071,  0.0000,  0.7071]])
    """
    _check_mask(mask, x)
    out = torch.zeros_like(_as_float(x))
    kept = _as_float(x[mask])  # [S]
    if len(kept) >= 2 and kept.max() != kept.min():
        out[mask] = (kept - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    return out


@torch.no_grad()
def reinforce_pp_advantage(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): discounted return-to-go, whitened over all sampled tokens.

        G_k = r_k + gamma G_{k+1}        where k + 1 is the next sampled token
        A_k = (G_k - mean(G)) / std(G)

    The paper's KL penalty is part of `rewards` (see `kl`). Pass the whole batch, because mean and
    std are taken over all sampled tokens of it.
    rewards [B, T] float, mask [B, T] bool -> advantages [B, T], zero outside the mask.
    Raises ValueError for a reward outside the mask.

    >>> mask = torch.tensor([[True, False, True], [True, False, True]])
    >>> reinforce_pp_advantage(torch.tensor([[0., 0., 1.], [0., 0., 0.]]), mask)
    tensor([[ 0.8660,  0.0000,  0.8660],
            [-0.8660,  0.0000, -0.8660]])
    """
    returns_to_go, _ = gae(rewards, torch.zeros_like(_as_float(rewards)), mask, gamma)
    return whiten(returns_to_go, mask)


def _within_groups(compare: Callable[[Tensor], Tensor], scores: Tensor, groups: Tensor,
                   valid: Tensor | None) -> Tensor:
    """compare(scores [n]) -> advantages [n], for the valid scores of each group that has at least
    two different ones. All others get advantage 0. -> advantages, like `scores`."""
    if valid is None:
        valid = torch.ones_like(groups, dtype=torch.bool)
    _check_mask(valid, scores, groups)
    scores = _as_float(scores)
    advantages = torch.zeros_like(scores)
    for group in groups.unique():
        rows = ((groups == group) & valid).nonzero().squeeze(1)  # [n]
        if len(rows) >= 2 and scores[rows].max() != scores[rows].min():
            advantages[rows] = compare(scores[rows])
    return advantages


@torch.no_grad()
def grpo_advantage(scores: Tensor, groups: Tensor, valid: Tensor | None = None,
                   normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO with outcome supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

        A_i = (s_i - mean(s)) / (std(s) + eps)   over the trajectories of one group, unbiased std

    normalize_std=False omits the division (Dr. GRPO, arXiv 2503.20783).
    scores [B] float. groups [B] long: arbitrary ids in any order. valid [B] bool: trajectories with
    False are left out of the statistics and get advantage 0.
    -> advantages [B], one per trajectory; `[:, None]` broadcasts them over its tokens.

    >>> scores, groups = torch.tensor([1., 0., 1., 5.]), torch.tensor([7, 7, 2, 7])
    >>> grpo_advantage(scores, groups, torch.tensor([True, True, True, False]))
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    return _within_groups(
        lambda s: (s - s.mean()) / (s.std() + eps if normalize_std else 1.0), scores, groups, valid)


@torch.no_grad()
def rloo_advantage(scores: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """REINFORCE leave-one-out (arXiv 2402.14740).

        A_i = s_i - 1/(n - 1) sum_{j != i} s_j

    The baseline is the mean score of the *other* members of the group.
    Arguments and result are those of `grpo_advantage`.

    >>> rloo_advantage(torch.tensor([1., 0., 0.5]), torch.tensor([3, 3, 3]))
    tensor([ 0.7500, -0.7500,  0.0000])
    """
    return _within_groups(lambda s: s - (s.sum() - s) / (len(s) - 1), scores, groups, valid)


def turn_numbers(mask: Tensor) -> Tensor:
    """The number 0, 1, 2 ... of the turn within its row that each sampled token belongs to.

    A turn is a run of sampled tokens. mask [B, T] bool -> [B, T] long, -1 outside the mask.

    >>> turn_numbers(torch.tensor([[False, True, True, False, True]]))
    tensor([[-1,  0,  0, -1,  1]])
    """
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, starts.cumsum(1) - 1, -1)


# The functions of ALGOS: step -> advantages [B, T].


def grpo(step: Any, normalize_std: bool = True) -> Tensor:
    """See `grpo_advantage`."""
    scores = grpo_advantage(step.outcomes, step.groups, step.valid, normalize_std)
    return scores[:, None] * step.mask


def rloo(step: Any) -> Tensor:
    """See `rloo_advantage`."""
    return rloo_advantage(step.outcomes, step.groups, step.valid)[:, None] * step.mask


def reinforce_pp(step: Any, gamma: float = 1.0) -> Tensor:
    """See `reinforce_pp_advantage`."""
    return reinforce_pp_advantage(step.rewards * step.mask, step.mask, gamma)


def ppo(step: Any, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """`gae` with the critic's values, whitened. It sets `step.returns`, which the critic learns."""
    advantages, step.returns = gae(step.rewards * step.mask, step.values, step.mask, gamma, lam)
    return whiten(advantages, step.mask)


grpo.compares_samples = rloo.compares_samples = True
grpo.one_a_trajectory = rloo.one_a_trajectory = grpo.sums_rewards = rloo.sums_rewards = True
grpo.divides_unless = "normalize_std", False
ppo.needs_critic = True


# ---- losses: per token, differentiable in their first argument, zero outside the mask ----


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
                clip_low: float = 0.2, clip_high: float = 0.2,
                ratio_of: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
                ) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate (arXiv 1707.06347, eq. 7), to be minimised:

        max(-ratio_t A_t, -clip(ratio_t) A_t)
        ratio_t = exp(logp_t - old_t), clip(x) = min(max(x, 1 - clip_low), 1 + clip_high)

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    ratio_of(log_ratio, logp, mask) -> ratio [B, T]: another ratio than exp(log_ratio).
    logprobs, old_logprobs [B, T] float, mask [B, T] bool, advantages [B, T], or [B, 1] for one per
    trajectory -> per-token loss [B, T] (pass it to `aggregate`) and stats.
    stats: 0-d detached tensors, *sums* over the sampled tokens, so that they can be added over
    micro-batches and ranks: "clip_fraction", the tokens whose gradient the clip removes.

    >>> old, new = torch.tensor([[0.5, 0.5, 0.5]]).log(), torch.tensor([[0.5, 0.9, 0.1]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> loss, stats = policy_loss(new, old, torch.tensor([[1.0]]), mask)
    >>> loss
    tensor([[-1.0000, -1.2000,  0.0000]])
    >>> stats["clip_fraction"]
    tensor(1.)
    """
    _check_mask(mask, logprobs, old_logprobs)
    if advantages.shape not in (mask.shape, (len(mask), 1)):
        raise ValueError(f"advantages must be [B, T] or [B, 1], not {list(advantages.shape)}")
    # Mask the inputs, not only the result. With a NaN outside the mask, masking only the result
    # would still give a NaN gradient, because the backward pass computes 0 * NaN.
    logp, old, adv = (torch.where(mask, _as_float(x), 0.0)  # [B, T]
                      for x in (logprobs, old_logprobs, advantages))
    log_ratio = (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp() if ratio_of is None else ratio_of(log_ratio, logp, mask)
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.max(-ratio * adv, -clipped_ratio * adv)
    is_clipped = -clipped_ratio * adv > -ratio * adv
    return torch.where(mask, loss, 0.0), {"clip_fraction": is_clipped.sum().to(ratio.dtype)}


def ppo_loss(part: dict[str, Tensor], clip_low: float = 0.2,
             clip_high: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """The function of LOSSES: see `policy_loss`."""
    return policy_loss(part["logprobs"], part["old_logprobs"], part["advantages"], part["mask"],
                       clip_low, clip_high)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor,
               clip: float = 0.5) -> Tensor:
    """The critic's clipped squared error, as in OpenAI Baselines (the paper clips no values).

        loss = 0.5 max((v - R)^2, (old + clip(v - old, -clip, clip) - R)^2)

    values, old_values, returns [B, T] float, mask [B, T] bool -> per-token loss [B, T], to be
    passed to `aggregate`.

    >>> value, old, target = torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]])
    >>> value_loss(value, old, target, torch.tensor([[True]]))
    tensor([[1.1250]])
    """
    _check_mask(mask, values, old_values, returns)
    v, old, R = (torch.where(mask, _as_float(x), 0.0) for x in (values, old_values, returns))
    v_clipped = old + (v - old).clamp(-clip, clip)
    return 0.5 * torch.max((v - R) ** 2, (v_clipped - R) ** 2)


def kl(logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Estimates of KL(policy || reference) from one sampled token.

        k1   logp - ref                             unbiased, noisy, can be negative
        abs  |logp - ref|                           a distance, not an estimate of the KL
        k2   0.5 (logp - ref)^2                     biased, small variance
        k3   exp(ref - logp) - (ref - logp) - 1     unbiased, never negative (DeepSeekMath, eq. 4)

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    Any of them can be a penalty in the reward. As a loss only the gradient matters, and there they
    differ: the expected gradient of k1 is zero (E[grad logp] = 0), so k1 is for the reward only.
    The expected gradient of k2 is that of KL(policy || reference), and the expected gradient of k3
    is that of KL(reference || policy).
    logprobs, ref_logprobs [B, T] float -> [B, T]. With `mask` [B, T] bool, values and gradients
    outside the mask are zero, whatever the inputs hold there. Pass the mask whenever the result is
    differentiated and the padding may hold NaN or inf. Raises ValueError for an unknown kind.

    >>> logp, ref = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> [round(kl(logp, ref, kind).item(), 4) for kind in ("k1", "abs", "k2", "k3")]
    [0.6931, 0.6931, 0.2402, 0.1931]
    """
    logp = _as_float(logprobs)
    ref = _as_float(ref_logprobs)
    if mask is not None:
        _check_mask(mask, logprobs, ref_logprobs)
        logp = torch.where(mask, logp, 0.0)
        ref = torch.where(mask, ref, 0.0)
    difference = (ref - logp).clamp(max=MAX_LOG_RATIO)
    estimates = {"k1": logp - ref, "abs": (logp - ref).abs(), "k2": 0.5 * (logp - ref) ** 2,
                 "k3": torch.expm1(difference) - difference}
    if kind not in estimates:
        raise ValueError(f"unknown KL estimator '{kind}'; choose from {', '.join(estimates)}")
    return estimates[kind]


def entropy(logprobs: Tensor) -> Tensor:
    """-sum_v p_v log p_v, in nats.

    logprobs [..., V]: log-softmax of the logits -> [...]. Entries of -inf have probability 0 and
    contribute 0.

    >>> entropy(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    logp = _as_float(logprobs)
    # 0 * -inf is NaN in the forward and in the backward pass.
    finite_logp = logp.clamp(min=torch.finfo(logp.dtype).min)
    return -(logp.exp() * finite_logp).sum(-1)


def loss_denominator(mask: Tensor, mode: str) -> int:
    """What a loss is divided by: the number of sampled tokens (mode "token"), or of the rows that
    have one ("sequence"); at least 1. mask [B, T] bool."""
    counted = {"token": mask, "sequence": mask.any(1)}[mode]
    return max(1, int(counted.sum()))


def aggregate(per_token: Tensor, mask: Tensor, mode: str = "token",
              denominator: float | Tensor | None = None,
              num_sampled: Tensor | None = None) -> Tensor:
    """Reduce a per-token loss to one number.

        token      sum over sampled tokens / number of sampled tokens
                   (DAPO, arXiv 2503.14476, section 3.3)
        sequence   sum over sequences of the mean over their sampled tokens
                   / number of sequences that have a sampled token (GRPO, arXiv 2402.03300, eq. 3)

    per_token [B, T] float, mask [B, T] bool -> 0-d.
    `denominator` (a number or a 0-d tensor) replaces the number of tokens or sequences. Pass the
    `loss_denominator` of all micro-batches and ranks of an optimizer step: then the losses of the
    micro-batches add up to that of the whole batch.
    `num_sampled` [B]: where a row is only a part of its sequence, the number of sampled tokens of
    the whole sequence.
    If no token was sampled, the result is 0 and still attached to the graph.
    Raises ValueError for an unknown mode.

    >>> x = torch.tensor([[1., 2., 9.], [6., 9., 9.]])
    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> aggregate(x, mask), aggregate(x, mask, "sequence")
    (tensor(3.), tensor(3.7500))
    >>> sum(aggregate(x[b : b + 1], mask[b : b + 1], denominator=3) for b in range(2))
    tensor(3.)
    """
    _check_mask(mask, per_token)
    x = torch.where(mask, _as_float(per_token), 0.0)  # [B, T]
    if mode == "sequence":
        counts = mask.sum(1) if num_sampled is None else num_sampled
        x = x.sum(1) / counts.clamp(min=1)  # [B], the means of the sequences
    elif mode != "token":
        raise ValueError(f"unknown aggregation '{mode}'; choose from token, sequence")
    if denominator is None:
        denominator = loss_denominator(mask, mode)
    denominator = x.new_zeros(()).add_(denominator)  # a copy of a number would wait for a GPU
    # A count of 0 comes with a total of 0. Dividing by 1 then gives 0 instead of NaN.
    return x.sum() / torch.where(denominator == 0, 1.0, denominator)
