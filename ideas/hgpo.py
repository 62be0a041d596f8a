"""Credit by state and history: turns are compared in nested groups, which share the state and the
0, 1 ... `history` states before it.

    A = sum_h w_h A_h / sum_h w_h,    w_h = (h + 1)^alpha
    A_h = (R_k - mean(R)) / std(R) over the turns of one state that share the h states before it

HGPO (arXiv 2602.22817): a state that was reached in another way is another situation, but few
trajectories share a long history. A group of one turn, and a turn with fewer than h turns before
it, has no A_h and no w_h. (The authors' program also leaves out levels whose A_h is 0, and weighs
by (h + 2)^alpha: on one batch the two correlate at 0.99.) No advantage of the whole trajectory is
added, as it is in GiGPO. The world must tell its states (`Env.state`).

    python train.py --algo hgpo --algo_args "gamma=0.95 history=2"
"""

import torch
from torch import Tensor

import algos
from trajectory import reply_spans


def advantage(step, gamma: float = 0.95, history: int = 2, alpha: float = 1.0,
              normalize_std: bool = True) -> Tensor:
    """step: see `update.Gathered`. gamma: discount per turn. -> [B, T]"""
    turns, returns, pasts = [], [], []  # of each turn: (b, span), its return, its states up to here
    for b, t in enumerate(step.trajectories):
        later = 0.0
        states = [(b, k) if s is None else s for k, s in enumerate(t.states)]
        for k, span in reversed(list(enumerate(reply_spans(t.mask)[: len(states)]))):
            later = step.turn_rewards[b, slice(*span)].sum().item() + gamma * later
            turns.append((b, span))
            returns.append(round(later, 6))
            pasts.append(states[: k + 1])
    returns, valid = torch.tensor(returns), step.valid[[b for b, _ in turns]]
    total, weights = torch.zeros(2, len(turns))
    for h in range(history + 1):
        ids = {}
        groups = torch.tensor([ids.setdefault((int(step.groups[b]), *past[-h - 1:]), len(ids))
                               for (b, _), past in zip(turns, pasts)])
        counts = valid & torch.tensor([len(past) > h for past in pasts])
        shared = counts & (groups.bincount(counts.float())[groups] > 1)
        total += (h + 1) ** alpha * algos.grpo_advantage(returns, groups, shared, normalize_std)
        weights += (h + 1) ** alpha * shared
    advantages = torch.zeros(step.mask.shape)
    for (b, span), own in zip(turns, total / weights.clamp(min=1)):
        advantages[b, slice(*span)] = own
    return advantages * step.mask


advantage.compares_samples = advantage.needs_states = True
advantage.divides_unless = "normalize_std", False
