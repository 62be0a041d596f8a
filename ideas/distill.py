"""On-policy distillation: the reverse KL to a teacher, token by token, in the advantage.

    A_t = A'_t - weight (log p(x_t) - log p_teacher(x_t))

Without credit for what follows a token. A' is another algorithm's advantage (plus=grpo), or 0.

    python train.py --algo distill --algo_args "teacher=MODEL weight=1 plus=none" --kl_coef 0
"""

import torch
from torch import Tensor

import algos
from envs import UserError

PLUS = {"none": lambda step: torch.zeros(step.mask.shape), "grpo": algos.grpo, "rloo": algos.rloo,
        "reinforce_pp": algos.reinforce_pp}


def advantage(step, teacher: str = "", weight: float = 1.0, plus: str = "none") -> Tensor:
    """step: see `update.Gathered`. teacher: a model with the policy's vocabulary. plus: none | grpo
    | rloo | reinforce_pp. -> [B, T]"""
    if plus not in PLUS:
        raise UserError(f"distill adds {', '.join(PLUS)}, not {plus}")
    if plus in ("grpo", "rloo") and len(step.groups.unique()) == len(step.groups):
        raise UserError(f"plus={plus} compares the rollouts of an item: have 2 or more")
    if plus == "grpo" and step.rewards is not step.batch["rewards"]:
        raise UserError("--kl_in reward: GRPO would divide by the KL's deviation; use plus=rloo")
    logprobs = step.logprobs_of(step.models["teacher"])
    kl = algos.kl(step.batch["old_logprobs"], logprobs, "k1", step.mask)
    return PLUS[plus](step) - weight * kl


advantage.needs_models = ("teacher",)
