"""The policy also learns to predict what the environment answers.

    L = L_ppo + weight * mean over the tokens of observations of -log pi(o_t | what came before)

ECHO (arXiv 2605.24517). An observation counts where it follows a reply of the same segment, the
template around it and what an agent writes itself (the turns of guide's expert) included, in every
trajectory whose environment did not fail, with a denominator of its own. `observation_loss` in
metrics.jsonl is the mean before the weight, on trajectories that the policy has just played: what
it has understood of the world.

    python train.py --env babyai --loss echo --loss_args weight=0.1
"""

from torch import Tensor

import algos


def loss(part, weight: float = 0.1, clip_low: float = 0.2,
         clip_high: float = 0.2) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """part: a micro-batch, with the log-probs of observations' tokens, too. weight: of their
    cross-entropy. -> the loss of each sampled token [B, T], stats as of `algos.policy_loss`, the
    loss of each token of an observation [B, T]."""
    return *algos.ppo_loss(part, clip_low, clip_high), -weight * part["logprobs"]


loss.needs_observations = True
