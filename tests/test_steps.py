"""Whole training steps, computed again from the trajectories alone: the models' plain forward
passes, loops over tokens, SGD. The weights of policy and critic must be the same."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import rl
import update
from rollout import rollout
from trajectory import Status, Trajectory

TEMPERATURE, STEP, NORM, RATE = 0.7, 5, 0.5, 0.2
PPO = dict(algo="ppo", algo_args="gamma=0.9 lam=0.7", value_clip=0.05,
           loss_args="clip_low=0.01 clip_high=0.02")
CASES = {
    "grpo": {},
    "dr_grpo, KL in the loss": dict(algo_args="normalize_std=false", kl_coef=0.3, kl_type="k2"),
    "dr_grpo, KL in the reward": dict(algo_args="normalize_std=false", kl_coef=0.3, kl_in="reward"),
    "rloo": dict(algo="rloo", aggregation="sequence", entropy_coef=0.05),
    "reinforce_pp": dict(algo="reinforce_pp", algo_args="gamma=0.9", kl_coef=0.3, kl_in="reward",
                         kl_type="k1"),
    "ppo": PPO, "ppo, KL in the reward": PPO | dict(kl_coef=0.3, kl_in="reward", kl_type="abs"),
    "ppo, KL in the loss": PPO | dict(kl_coef=0.3)}


@pytest.fixture(scope="module")
def played(tiny, pool):
    """Trajectories of three groups, with rewards drawn at random for each turn; one has failed."""
    items = ["babyai_7", "babyai_50", "textcraft_3"]
    found = rollout(*tiny, pool, items, 3, samples=4, max_tokens=8, temperature=TEMPERATURE)
    rng = random.Random(0)
    for t in found:
        for _, end in update.reply_spans(t.mask):
            t.rewards[end - 1] = rng.choice([0.0, 0.5, 1.0, -0.25])
        t.reward = math.fsum(t.rewards)
    found[5].status = Status.ENV_ERROR
    return [Trajectory.from_json(t.to_json() | {"logprobs": t.logprobs}) for t in found]


def places(t):
    return [i for i, sampled in enumerate(t.mask) if sampled]


def of_tokens(model, t):
    """Log-probs and entropies of a trajectory's sampled tokens, from a plain forward pass."""
    logits = model(input_ids=torch.tensor([t.tokens])).logits[0] / TEMPERATURE
    logp = torch.log_softmax(logits, -1)
    before = [i - 1 for i in places(t)]
    chosen = torch.tensor([t.tokens[i] for i in places(t)])
    return (logp[before].gather(1, chosen[:, None]).squeeze(1),
            -(logp[before].exp() * logp[before]).sum(1))


def values_of(critic, t):
    hidden = critic.base_model(input_ids=torch.tensor([t.tokens])).last_hidden_state[0]
    return critic.head(hidden[[i - 1 for i in places(t)]]).squeeze(1)


def kl_of(kind, logp, ref):
    gap = logp - ref
    return {"k1": gap, "abs": gap.abs(), "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[kind]


def whitened(rows):
    flat = torch.tensor([x for row in rows for x in row])
    return [[(x - flat.mean().item()) / (flat.var().item() + 1e-8) ** 0.5 for x in row]
            for row in rows]


def advantages_of(valid, s, refs, values):
    """-> the advantages of each trajectory's sampled tokens, and what the critic learns."""
    rewards = [[t.rewards[i] for i in places(t)] for t in valid]
    if s.kl_coef and s.kl_in == "reward":
        for t, row, ref in zip(valid, rewards, refs):
            old = torch.tensor([t.logprobs[i] for i in places(t)])
            for k, kl in enumerate(kl_of(s.kl_type, old, ref).tolist()):
                row[k] -= s.kl_coef * kl
    if s.algo in ("grpo", "rloo"):
        found = []
        for t, row in zip(valid, rewards):
            group = [sum(r) for u, r in zip(valid, rewards) if u.group == t.group]
            score, n = sum(row), len(group)
            mean = sum(group) / n
            if max(group) == min(group):
                advantage = 0.0
            elif s.algo == "rloo":
                advantage = score - (sum(group) - score) / (n - 1)
            else:
                deviation = (sum((x - mean) ** 2 for x in group) / (n - 1)) ** 0.5
                advantage = (score - mean) / (1.0 if "false" in s.algo_args else deviation + 1e-6)
            found.append([advantage] * len(row))
        return found, None
    gamma, lam = 0.9, 0.7
    found, returns = [], []
    for row, value in zip(rewards, values):
        value = value if s.algo == "ppo" else [0.0] * len(row)
        following, nearest, advantages = 0.0, 0.0, []
        for r, v in zip(row[::-1], value[::-1]):
            decay = lam if s.algo == "ppo" else 1.0
            nearest = r + gamma * following - v + gamma * decay * nearest
            following = v
            advantages.insert(0, nearest)
        found.append(advantages)
        returns.append([a + v for a, v in zip(advantages, value)])
    return whitened(found), returns


def train_plainly(trajectories, s, policy, reference, critic):
    """One training step with SGD."""
    valid = [t for t in trajectories if t.status != "env_error"]
    with torch.no_grad():
        refs = [of_tokens(reference, t)[0] for t in valid]
        values = [values_of(critic, t).tolist() for t in valid]
    advantages, returns = advantages_of(valid, s, refs, values)
    clip_low, clip_high = (0.01, 0.02) if s.loss_args else (0.2, 0.2)
    for epoch in range(s.epochs):
        order = np.random.default_rng([s.seed, STEP, epoch, 1]).permutation(3)
        for groups in np.array_split(order, s.minibatches):
            rows = [i for i, t in enumerate(valid) if t.group in groups]
            tokens = sum(len(places(valid[i])) for i in rows)

            def mean(losses, counts):
                if s.aggregation == "token":
                    return sum(loss.sum() for loss in losses) / tokens
                return sum(loss.sum() / n for loss, n in zip(losses, counts)) / len(rows)

            losses, of_values = [], []
            for i in rows:
                t = valid[i]
                logp, entropy = of_tokens(policy, t)
                a = torch.tensor(advantages[i])
                ratio = (logp - torch.tensor([t.logprobs[k] for k in places(t)])).exp()
                clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
                loss = -torch.minimum(ratio * a, clipped * a) - s.entropy_coef * entropy
                if s.kl_coef and s.kl_in == "loss":
                    loss = loss + s.kl_coef * kl_of(s.kl_type, logp, refs[i])
                losses.append(loss)
                if returns is not None and s.algo == "ppo":
                    v, old = values_of(critic, t), torch.tensor(values[i])
                    near = old + (v - old).clamp(-s.value_clip, s.value_clip)
                    goal = torch.tensor(returns[i])
                    of_values.append(torch.maximum((v - goal) ** 2, (near - goal) ** 2) / 2)
            counts = [len(loss) for loss in losses]
            for model, parts in ((policy, losses), (critic, of_values)):
                if parts:
                    mean(parts, counts).backward()
                    clip_grad_norm_(model.parameters(), NORM)
                    with torch.no_grad():
                        for p in model.parameters():
                            p -= RATE * p.grad
                            p.grad = None


@pytest.mark.parametrize("case", CASES)
def test_a_training_step_is_that_of_plain_loops(tiny, played, case):
    settings = update.Loss(
        **{"kl_coef": 0.0, "minibatches": 2, "epochs": 2, "temperature": TEMPERATURE, "seed": 8,
           "microbatch_tokens": 300, "max_grad_norm": NORM} | CASES[case])
    torch.manual_seed(0)
    reference, critic = copy.deepcopy(tiny[0]), rl.Critic("tiny")
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    with torch.no_grad():
        for p in reference.parameters():
            p += 0.02 * torch.randn_like(p)
    rl.set_compute_paths(critic, rl.FASTEST)
    models = [[copy.deepcopy(tiny[0]), copy.deepcopy(critic)] for _ in range(2)]
    (policy, critic), (plain_policy, plain_critic) = models

    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (policy, critic)]
    has_critic = settings.algo == "ppo"
    batch = update.advantages_of(played, settings, torch.device("cpu"),
                                 reference if settings.kl_coef else None,
                                 critic if has_critic else None)
    update.update(played, batch, settings, STEP, policy, optimizers[0],
                  *(critic, optimizers[1]) if has_critic else ())
    train_plainly(played, settings, plain_policy, reference, plain_critic)

    for ours, plain, first in ((policy, plain_policy, tiny[0]),
                               *([(critic, plain_critic, None)] if has_critic else [])):
        for a, b in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        if first is not None:
            assert max((a - b).abs().max() for a, b in
                       zip(ours.parameters(), first.parameters())) > 0.002
