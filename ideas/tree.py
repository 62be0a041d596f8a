"""GRPO over a tree: each trajectory grows branches at some of its turns, and a turn is judged by
all leaves that follow it.

    A(leaf) = (R - mean over its tree) / std over its tree
              + (R - mean over the group's trees) / std over the group's trees
    A_k     = mean of A(leaf) over the leaves after turn k

Tree-GRPO (arXiv 2509.21240): `branches` turns of each trajectory are drawn, and the policy plays on
before each of them once more. A leaf is the end of the trajectory or of a branch. The paper trains
on the branches, too; here they only judge, and their turns count: `continued_turns` in
metrics.jsonl. Without branches it is GRPO.

    python train.py --env babyai --algo tree --algo_args branches=2
"""

import random

import torch
from torch import Tensor

from algos import grpo_advantage
from trajectory import reply_spans
from worlds.replayed import play_on


def advantage(step, branches: int = 2) -> Tensor:
    """step: see `update.Gathered`. branches: turns of a trajectory at which it branches, at most
    all. A branch whose environment failed is left out. -> [B, T]"""
    drawn = []  # (trajectory, the turn before which it branches)
    # The key has the tokens: what was sampled depends on the seed of the run.
    for b, t in enumerate(step.trajectories):
        turns = random.Random(str((t.tokens, t.sample, t.step))).sample(range(t.turns), t.turns)
        drawn += [(b, k) for k in turns[:branches] if step.valid[b]]
    grown = play_on(step, [(step.trajectories[b], k) for b, k in drawn], 1) if drawn else []
    branched = [(b, k, t.reward) for (b, k), found in zip(drawn, grown) for t in found]

    # The leaves: the ends of the trajectories, then those of the branches.
    size = len(step.trajectories)
    of_tree = torch.tensor([*range(size), *(b for b, _, _ in branched)])
    begins = torch.tensor([0] * size + [k for _, k, _ in branched])
    outcomes = torch.cat([step.outcomes, torch.tensor([reward for *_, reward in branched])])
    leaves = sum(grpo_advantage(outcomes, groups, step.valid[of_tree])
                 for groups in (of_tree, step.groups[of_tree]))

    advantages = torch.zeros(step.mask.shape)
    for b, t in enumerate(step.trajectories):
        for k, (start, end) in enumerate(reply_spans(t.mask)):
            # A branch before turn k has a turn k of its own.
            follows = (of_tree == b) & ((begins > k) | (torch.arange(len(of_tree)) == b))
            advantages[b, start:end] = leaves[follows].mean()
    return advantages * step.mask


advantage.needs_continuations = advantage.sums_rewards = True
