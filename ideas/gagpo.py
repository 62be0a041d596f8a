"""Values of states from the group itself, and GAE over turns: no critic.

    V(s) = mean of the returns from the turns of the group's trajectories that begin in state s
    delta_k = r_k + gamma V(s_{k+1}) - V(s_k),    A_k = delta_k + gamma lam A_{k+1}

GAGPO (arXiv 2605.13217); the defaults of gamma and lam are the usual ones, not the paper's. The
advantages of an item's tokens are divided by their standard deviation, unless normalize=false. The
world must tell its states (`Env.state`). Where it does not know one, V is the turn's own return.

    python train.py --algo gagpo --algo_args "gamma=0.95 lam=0.95"
"""

from statistics import mean

import torch
from torch import Tensor

from trajectory import reply_spans


def advantage(step, gamma: float = 0.95, lam: float = 0.95, normalize: bool = True) -> Tensor:
    """step: see `update.Gathered`. gamma, lam: per turn. -> [B, T]"""
    rewards, returns, of_state = [], [], {}
    for b, t in enumerate(step.trajectories):
        spans = reply_spans(t.mask)[: len(t.states)]
        rewards.append([step.turn_rewards[b, start:end].sum().item() for start, end in spans])
        to_go = [0.0]
        for reward in reversed(rewards[-1]):
            to_go.insert(0, reward + gamma * to_go[0])
        returns.append(to_go[:-1])
        if step.valid[b]:
            for state, value in zip(t.states, returns[-1]):
                of_state.setdefault((t.group, state), []).append(value)

    advantages = torch.zeros(step.mask.shape)
    for b, t in enumerate(step.trajectories):
        known = [of_state.get((t.group, state)) if state is not None else None
                 for state in t.states[: len(returns[b])]]
        values = [mean(v) if v else own for v, own in zip(known, returns[b])] + [0.0]
        later = 0.0
        spans = reply_spans(t.mask)
        for k in reversed(range(len(returns[b]))):
            delta = rewards[b][k] + gamma * values[k + 1] - values[k]
            later = delta + gamma * lam * later
            advantages[b, slice(*spans[k])] = later
    advantages *= step.mask
    if normalize:
        for group in step.groups.unique():
            rows = step.groups == group
            of_group = advantages[rows][step.mask[rows]]
            if len(of_group) > 1:
                advantages[rows] /= of_group.std() + 1e-6
    return advantages


advantage.compares_samples = advantage.needs_states = True
advantage.divides_unless = "normalize", False
