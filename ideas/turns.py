"""Turn-level returns: a turn is compared with the turns of the same number in its group.

    A_k = (R_k - mean(R_k)) / std(R_k) over the trajectories of the item that have a turn k
    R_k = r_k + gamma R_{k+1}

The simplest credit for turns (turn-level GRPO, arXiv 2505.11821): what a turn cannot have caused,
the rewards before it, is left out. With one reward at the end it differs from GRPO only by the
trajectories that have ended before turn k, which are not compared.

    python train.py --algo turns --algo_args gamma=1
"""

import torch
from torch import Tensor

import algos


def advantage(step, gamma: float = 1.0, normalize_std: bool = True) -> Tensor:
    """step: see `update.Gathered`. gamma: discount per turn. -> [B, T]"""
    numbers = step.batch["turns"] - 1  # [B, T]
    rewards = step.turn_rewards.double()
    advantages, later = torch.zeros(step.mask.shape), torch.zeros(len(step.mask))
    for k in reversed(range(int(numbers.max()) + 1)):
        in_turn = numbers == k
        later = (rewards * in_turn).sum(1) + gamma * later
        has_turn = in_turn.any(1) & step.valid
        # Rounded, so that equal returns that came in another order stay equal.
        returns = later.round(decimals=6).float()
        own = algos.grpo_advantage(returns, step.groups, has_turn, normalize_std)
        advantages += own[:, None] * in_turn
    return advantages * step.mask


advantage.compares_samples, advantage.divides_unless = True, ("normalize_std", False)
