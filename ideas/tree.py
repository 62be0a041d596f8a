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


def advantage(step, branches: int = 2) -> Tensor:
    """step: see `update.Gathered`. branches: turns of a trajectory at which it branches, at most
    all. A branch whose environment failed is left out. -> [B, T]"""
    drawn = []  # (trajectory, the turn before which it branches)
    for b, t in enumerate(step.trajectories):
        rng = random.Random(str((t.item, t.sample, t.step)))
        drawn += [(b, k) for k in rng.sample(range(t.turns), min(branches, t.turns))
                  if step.valid[b]]
    after = [(step.trajectories[b], k) for b, k in drawn]
    grown = [t for t in step.play_on(after, 1) if t.status != "env_error"] if after else []

    # The leaves: the ends of the trajectories, then those of the branches.
    size = len(step.trajectories)
    tree = torch.tensor([*range(size), *(drawn[t.group][0] for t in grown)])
    begins = torch.tensor([0] * size + [drawn[t.group][1] for t in grown])
    outcomes = torch.cat([step.outcomes, torch.tensor([t.reward for t in grown])])
    valid = step.valid[tree]
    leaves = (grpo_advantage(outcomes, tree, valid)
              + grpo_advantage(outcomes, step.groups[tree], valid))

    advantages = torch.zeros(step.mask.shape)
    for b, t in enumerate(step.trajectories):
        for k, span in enumerate(reply_spans(t.mask)):
            # A branch before turn k has a turn k of its own.
            follow = (tree == b) & ((begins > k) | (torch.arange(len(tree)) == b))
            advantages[b, slice(*span)] = leaves[follow].mean()
    return advantages * step.mask


advantage.needs_continuations = True
