"""The ratio of a whole sequence, or of a turn, in place of a token's.

    s_t = sg(s) pi_t / sg(pi_t),    s = exp(mean of the sequence's log ratios)

where sg stops the gradient: GSPO-token (arXiv 2507.18071, eq. 14), clipped as PPO's ratio is. The
paper's mean over sequences is --set aggregation=sequence. A sequence is a trajectory, or with
per=turn each reply.

    python train.py --loss gspo --loss_args per=turn --set aggregation=sequence
"""

import torch
from torch import Tensor

import algos
from envs import UserError


def loss(part, clip_low: float = 3e-4, clip_high: float = 4e-4,
         per: str = "trajectory") -> tuple[Tensor, dict[str, Tensor]]:
    """part: a micro-batch. clip_low, clip_high: the paper's. per: trajectory | turn. -> the loss of
    each token [B, T], stats as of `algos.policy_loss`. Raises UserError for trajectories of
    several segments, which a micro-batch does not hold whole."""
    if per not in ("trajectory", "turn"):
        raise UserError(f"gspo has the ratio per trajectory or turn, not {per}")
    if per == "trajectory" and (part["num_sampled"] > part["mask"].sum(1)).any():
        raise UserError("gspo compares whole trajectories, and this agent's have several segments:"
                        " give --loss_args per=turn")

    def ratio_of(log_ratio, logp, mask):
        parts = part["turns"] if per == "turn" else torch.zeros_like(part["turns"])  # [B, T]
        return (mean_of_parts(log_ratio.detach(), mask, parts) + logp - logp.detach()).exp()

    return algos.policy_loss(part["logprobs"], part["old_logprobs"], part["advantages"],
                             part["mask"], clip_low, clip_high, ratio_of)


def mean_of_parts(x: Tensor, mask: Tensor, parts: Tensor) -> Tensor:
    """The mean of x over the sampled tokens of each part of a row, at every token of the part.

    x [B, T], mask [B, T] bool, parts [B, T] long ids, from 0 on -> [B, T]
    """
    num_parts = int(parts.max()) + 1 if parts.numel() else 0
    sums, counts = torch.zeros(2, len(x), num_parts, dtype=x.dtype, device=x.device)
    sums.scatter_add_(1, parts, x * mask)
    counts.scatter_add_(1, parts, mask.to(x.dtype))
    return (sums / counts.clamp(min=1)).gather(1, parts)
