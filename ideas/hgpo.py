"""Credit by state and history: turns are compared in nested groups, which share the state and the
0, 1 ... `history` states before it.

    A = A_trajectory + sum_h w_h A_h / sum_h w_h,    w_h = (h + 1)^alpha
    A_h = (R_k - mean(R)) / std(R) over the turns of one state that share the h states before it

HGPO (arXiv 2602.22817): a state that was reached in another way is another situation, but few
trajectories share a long history. A group of one turn has no advantage and no weight. With
history=0 it is GiGPO (ideas/gigpo.py). The world must tell its states (`Env.state`).

    python train.py --algo hgpo --algo_args "gamma=0.95 history=2"
"""

import torch
from torch import Tensor

import algos
from trajectory import reply_spans


def advantage(step, gamma: float = 0.95, history: int = 2, alpha: float = 1.0,
              normalize_std: bool = True) -> Tensor:
    """step: see `update.Gathered`. gamma: discount per turn. -> [B, T]"""
    rows, returns, pasts = [], [], []  # of each turn: (b, span), its return, its states up to here
    for b, t in enumerate(step.trajectories):
        later, of_row = 0.0, []
        states = [(b, k) if s is None else s for k, s in enumerate(t.states)]
        for k, span in reversed(list(enumerate(reply_spans(t.mask)[: len(states)]))):
            later = step.rewards[b, slice(*span)].sum().item() + gamma * later
            of_row.append(((b, span), round(later, 5), states[: k + 1]))
        for row, value, past in reversed(of_row):
            rows.append(row)
            returns.append(value)
            pasts.append(past)
    total, weights = torch.zeros(2, len(rows))
    returns = torch.tensor(returns)
    valid = step.valid[[b for b, _ in rows]]
    for h in range(history + 1):
        ids = {}
        groups = torch.tensor([ids.setdefault((int(step.groups[b]), *past[-h - 1:]), len(ids))
                               for (b, _), past in zip(rows, pasts)])
        shared = (groups.bincount(valid.float())[groups] > 1) & valid
        of_turns = algos.grpo_advantage(returns, groups, valid, normalize_std)
        total += (h + 1) ** alpha * of_turns
        weights += (h + 1) ** alpha * shared
    outcomes = algos.grpo_advantage(step.outcomes, step.groups, step.valid, normalize_std)
    advantages = outcomes[:, None].repeat(1, step.mask.shape[1])
    for (b, span), own in zip(rows, total / weights.clamp(min=1)):
        advantages[b, slice(*span)] += own
    return advantages * step.mask


advantage.compares_samples = advantage.needs_states = True
