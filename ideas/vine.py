"""The advantage of each turn by playing on: every prefix of a trajectory is continued N times.

    V(prefix) = mean of the N returns from there on
    A_k = r_k + V(prefix_{k+1}) - V(prefix_k),    V = 0 after the last turn

VinePPO (arXiv 2410.01679), at the borders of turns. The environment is replayed to the
prefix, with the recorded replies. A prefix that several trajectories share is continued N times in
all. The continuations are not trained on. Their turns count: `continued_turns` in metrics.jsonl.

    python train.py --env babyai --algo vine --algo_args continuations=4
"""

import torch
from torch import Tensor

from trajectory import reply_spans
from worlds.replayed import continuations_of, prefixes


def advantage(step, continuations: int = 4) -> Tensor:
    """step: see `update.Gathered`. continuations: N, of each prefix. A turn whose prefix could not
    be continued has advantage 0. -> [B, T]"""
    values = {}
    for (item, tokens), played in continuations_of(step, continuations).items():
        if played:
            returns = [sum(t.rewards[len(tokens):]) for t in played]
            values[item, tokens] = sum(returns) / len(returns)

    advantages = torch.zeros(step.mask.shape)
    for b, t in enumerate(step.trajectories):
        known = [*map(values.get, prefixes(t)), 0.0]
        for k, (start, end) in enumerate(reply_spans(t.mask)[: t.turns]):
            if None not in known[k : k + 2]:
                reward = sum(t.rewards[start:end])
                advantages[b, start:end] = reward + known[k + 1] - known[k]
    return advantages * step.mask


advantage.needs_continuations = True
