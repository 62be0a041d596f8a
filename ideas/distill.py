"""On-policy distillation: the reverse KL to a teacher, token by token, in the advantage.

    A_t = A'_t - weight (log p(x_t) - log p_teacher(x_t))

Without credit for what follows a token. A' is another algorithm's advantage (plus=grpo), or 0.

    python train.py --algo distill --algo_args "teacher=MODEL weight=1 plus=none" --kl_coef 0
"""

import torch
from torch import Tensor

import algos
from envs import UserError, load_named


def advantage(step, teacher: str = "", weight: float = 1.0, plus: str = "none") -> Tensor:
    """step: see `update.Gathered`. teacher: a model with the policy's vocabulary. plus: none, or
    the name of an algorithm. -> [B, T]"""
    if not teacher:
        raise UserError("distill needs a teacher: --algo_args teacher=MODEL")
    base = torch.zeros(step.mask.shape)
    if plus != "none":
        base = load_named(plus, algos.ALGOS, "advantage")(step)
    logprobs = step.logprobs_of(step.models["teacher"])
    return base - weight * algos.kl(step.batch["old_logprobs"], logprobs, "k1", step.mask)


advantage.needs_models = ("teacher",)
