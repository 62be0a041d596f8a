"""The algorithms against slow and obvious implementations.

The oracles are loops over lists, enumerations and numbers computed by hand, some of which are the
examples in the docstrings (tests/test_doctests.py).
"""

import itertools
import math
import random
import statistics
from functools import partial

import pytest
import torch

from algos import aggregate, entropy, gae, grpo_advantage, kl, policy_loss, ppo_loss
from algos import reinforce_pp_advantage, rloo_advantage, turn_numbers, value_loss, whiten

NAN = float("nan")
INF = float("inf")
F64 = torch.float64
KL_KINDS = ("k1", "abs", "k2", "k3")
X = torch.zeros(3, 3)
MASK = torch.ones(3, 3, dtype=torch.bool)


def close(a, b, tol=1e-6):
    a = torch.as_tensor(a, dtype=F64)
    b = torch.as_tensor(b, dtype=F64)
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=F64)


def random_batch(seed, B=5, T=23, p=0.4):
    """Random rewards, values and mask [B, T]. Rewards are on sampled tokens only.

    Row 0 has no sampled token, row 1 has only sampled tokens.
    """
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < p
    mask[0] = False
    mask[1] = True
    rewards = normal(g, B, T) * mask
    return rewards, normal(g, B, T), mask


def gae_oracle(rewards, values, mask, gamma, lam):
    """A_i = sum_{j >= i} (gamma lam)^(j - i) (r_j + gamma V_{j+1} - V_j), over sampled tokens."""
    B, T = mask.shape
    out = [[0.0] * T for _ in range(B)]
    for b in range(B):
        sampled = [t for t in range(T) if mask[b, t]]
        r = [rewards[b, t].item() for t in sampled]
        v = [values[b, t].item() for t in sampled] + [0.0]
        for i, t in enumerate(sampled):
            for j in range(i, len(sampled)):
                delta = r[j] + gamma * v[j + 1] - v[j]
                out[b][t] += (gamma * lam) ** (j - i) * delta
    return out


# ---- GAE ----


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    rewards, values, mask = random_batch(0)
    advantages, returns = gae(rewards, values.clone().requires_grad_(), mask, gamma, lam)
    close(advantages, gae_oracle(rewards, values, mask, gamma, lam))
    close(returns, torch.where(mask, advantages + values, 0.0))
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_by_hand():
    # The tokens are observation, a, observation, b, c. gamma = lam = 0.5.
    mask = torch.tensor([[False, True, False, True, True]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])
    values = torch.tensor([[7.0, 4.0, 7.0, 2.0, 1.0]])
    # delta_c = 2 - 1 = 1                     A_c = 1
    # delta_b = 0 + 0.5 * 1 - 2 = -1.5        A_b = -1.5 + 0.25 * 1 = -1.25
    # delta_a = 1 + 0.5 * 2 - 4 = -2          A_a = -2 + 0.25 * -1.25 = -2.3125
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    close(advantages, [[0, -2.3125, 0, -1.25, 1]])
    close(returns, [[0, 1.6875, 0, 0.75, 2]])


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_where_nothing_was_sampled_there_is_no_advantage_and_no_loss(shape):
    zeros, nothing = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    loss, stats = policy_loss(zeros, zeros, zeros, nothing)
    assert stats["clip_fraction"] == 0
    for result in (*gae(zeros, zeros, nothing), loss):
        assert result.shape == shape and not result.any()


@pytest.mark.parametrize("dtype, expected", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)])
def test_results_are_in_float32_or_more(dtype, expected):
    x, groups = MASK.to(dtype), torch.arange(3)
    results = [
        *gae(x, x, MASK), whiten(x, MASK), reinforce_pp_advantage(x, MASK), entropy(x),
        grpo_advantage(x[:, 0], groups), rloo_advantage(x[:, 0], groups),
        policy_loss(x, x, x, MASK)[0], value_loss(x, x, x, MASK), kl(x, x, "k3"),
        aggregate(x, MASK), aggregate(x, MASK, "sequence", 7)]
    assert {result.dtype for result in results} == {expected}


@pytest.mark.parametrize("function, arguments", [
    # A shape that would broadcast, a mask that would index.
    (gae, (X[0], X, MASK)), (gae, (X, X, MASK.long())), (aggregate, (X[:, :1], MASK)),
    (policy_loss, (X, X, X[0], MASK)), (policy_loss, (X, X[0], X, MASK)),
    (policy_loss, (X, X, X[:1], MASK)), (value_loss, (X, X, X[:, 0], MASK)),
    (value_loss, (X, X[0], X, MASK)), (value_loss, (X[:1], X, X, MASK)),
    (grpo_advantage, (X[0], torch.arange(4))),
    # A reward on a token that was not sampled would be lost.
    (gae, (X + 1, X, ~MASK)), (reinforce_pp_advantage, (X + 1, ~MASK)),
    # Unknown names.
    (kl, (X, X, "low_var_kl")), (aggregate, (X, MASK, "mean"))])
def test_what_would_be_silently_wrong_is_refused(function, arguments):
    with pytest.raises(ValueError, match="mask|must be .B, T.|did not sample|choose from"):
        function(*arguments)


# ---- REINFORCE++ ----


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reinforce_pp_equals_the_double_sum_then_whitened(gamma):
    rewards, _, mask = random_batch(3)
    returns = torch.tensor(gae_oracle(rewards, 0 * rewards, mask, gamma, 1.0), dtype=F64)
    kept = returns[mask].tolist()
    whitened = (returns - statistics.mean(kept)) / statistics.stdev(kept)
    close(reinforce_pp_advantage(rewards, mask, gamma), torch.where(mask, whitened, 0.0))


def test_reinforce_pp_is_zero_without_spread():
    same = torch.full((7, 1), 0.7)
    assert same.mean() != same[0]  # rounding: (x - mean) alone would not be zero
    one = torch.tensor([[False, True, False]])
    for rewards, mask in ((same, same > 0), (5.0 * one, one), (X, ~MASK)):
        assert not reinforce_pp_advantage(rewards, mask).any()


# ---- GRPO and RLOO ----


def group_oracle(scores, groups, valid, advantage_of):
    """The advantages [B] of `advantage_of(score, valid scores of its group)`.

    Invalid rows and groups without two different valid scores get 0.
    """
    out = []
    for score, group, is_valid in zip(scores, groups, valid):
        compared = [s for s, g, v in zip(scores, groups, valid) if g == group and v]
        comparable = is_valid and len(set(compared)) > 1
        out.append(advantage_of(score, compared) if comparable else 0.0)
    return out


def grpo_of(score, group_scores):
    return (score - statistics.mean(group_scores)) / (statistics.stdev(group_scores) + 1e-6)


def centred_of(score, group_scores):
    return score - statistics.mean(group_scores)


def rloo_of(score, group_scores):
    others = list(group_scores)
    others.remove(score)
    return score - sum(others) / len(others)


@pytest.mark.parametrize("advantage, one", [
    (grpo_advantage, grpo_of), (rloo_advantage, rloo_of),
    (partial(grpo_advantage, normalize_std=False), centred_of)])
@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_equal_brute_force(seed, advantage, one):
    rng = random.Random(seed)
    ids = [0, -3, 17, 2**62, 2**62 + 1, 5]  # 2**62 and 2**62 + 1 are equal as floats
    groups = [rng.choice(ids) for _ in range(40)] + [99]
    scores = [rng.choice([0.0, 0.25, 1.0, rng.random()]) for _ in groups]
    valid = [rng.random() < 0.8 for _ in groups]
    s, g, v = torch.tensor(scores, dtype=F64), torch.tensor(groups), torch.tensor(valid)
    # The score of an invalid row must not matter. Without `valid` all rows count.
    close(advantage(torch.where(v, s, NAN), g, v), group_oracle(scores, groups, valid, one))
    close(advantage(s, g), group_oracle(scores, groups, [True] * len(scores), one))


@pytest.mark.parametrize("advantage", [grpo_advantage, rloo_advantage])
@pytest.mark.parametrize("scores, groups, valid", [
    ([5.0], [3], [True]),
    # The float32 mean of seven times 0.7 is not 0.7. Dividing by the std would amplify that error.
    ([0.1] * 3 + [0.7] * 7, [1] * 3 + [2] * 7, [True] * 10),
    ([1.0, 0.0], [1, 1], [True, False]), ([1.0, 0.0], [1, 1], [False, False]), ([], [], [])])
def test_groups_without_spread_are_exactly_zero(advantage, scores, groups, valid):
    found = advantage(torch.tensor(scores), torch.tensor(groups, dtype=torch.long),
                      torch.tensor(valid, dtype=torch.bool))
    assert found.tolist() == [0.0] * len(scores)


# ---- turns ----


def turns_of(row):
    """The turns of a row of the mask: lists of the positions of their tokens."""
    turns = []
    for t, sampled in enumerate(row.tolist()):
        if sampled and t and row[t - 1]:
            turns[-1].append(t)
        elif sampled:
            turns.append([t])
    return turns


@pytest.mark.parametrize("shape", [(4, 9), (1, 1), (0, 3), (2, 0)])
def test_turns_are_numbered_as_by_the_loop(shape):
    g = torch.Generator().manual_seed(0)
    for p in (0.0, 0.3, 0.7, 1.0):
        mask = torch.rand(shape, generator=g) < p
        numbers = torch.full(shape, -1)
        for b, row in enumerate(mask):
            for k, turn in enumerate(turns_of(row)):
                numbers[b, turn] = k
        assert torch.equal(turn_numbers(mask), numbers)


# ---- policy loss ----


def test_policy_loss_equals_the_loop():
    g = torch.Generator().manual_seed(4)
    old = normal(g, 4, 9) - 2
    advantages = normal(g, 4, 9)
    new = (old + 0.4 * normal(g, 4, 9)).requires_grad_()
    mask = torch.rand(4, 9, generator=g) < 0.6
    part = {"logprobs": new, "old_logprobs": old, "advantages": advantages, "mask": mask}
    loss, stats = ppo_loss(part, clip_low=0.1, clip_high=0.3)

    expected, approx_kl = {"clip_fraction": 0}, 0.0
    expected_loss = torch.zeros(4, 9)
    for b, t in mask.nonzero().tolist():
        advantage = advantages[b, t].item()
        ratio = math.exp((new - old)[b, t].item())
        expected_loss[b, t] = -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        expected["clip_fraction"] += ratio > 1.3 if advantage > 0 else ratio < 0.9
        approx_kl += ratio - 1 - math.log(ratio)

    close(loss.detach(), expected_loss)
    close(kl(old, new.detach(), "k3", mask).sum(), approx_kl)  # as `update.policy_objective` has it
    assert 0 < expected["clip_fraction"] < mask.sum()
    assert stats.keys() == expected.keys()
    for name, value in expected.items():
        close(stats[name], value)
        assert stats[name].dim() == 0 and not stats[name].requires_grad


@pytest.mark.parametrize("ratio, advantage, has_gradient", [
    # A good token that became more likely: the gradient stops at 1 + clip_high = 1.3.
    (1.25, 1.0, True), (1.35, 1.0, False),
    # A bad token that became less likely: the gradient stops at 1 - clip_low = 0.9.
    (0.85, -1.0, False), (0.95, -1.0, True),
    # A token that moved in the wrong direction: the gradient stays, however far it moved.
    (0.5, 1.0, True), (2.0, -1.0, True)])
def test_the_clip_stops_only_the_direction_that_goes_too_far(ratio, advantage, has_gradient):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    old = torch.zeros(1, 1, dtype=F64)
    mask = torch.tensor([[True]])
    loss, stats = policy_loss(logp, old, torch.tensor([[advantage]]), mask, 0.1, 0.3)
    loss.sum().backward()
    close(logp.grad, [[-ratio * advantage if has_gradient else 0.0]])
    assert stats["clip_fraction"] == (not has_gradient)


def test_policy_loss_gradient_agrees_with_finite_differences():
    g = torch.Generator().manual_seed(6)
    old = normal(g, 3, 4)
    advantages = normal(g, 3, 4)
    new = (old + 0.5 * normal(g, 3, 4)).requires_grad_()
    mask = torch.rand(3, 4, generator=g) < 0.7
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, mask)[0], new)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, advantages, mask), new)
    for kind in KL_KINDS:
        assert torch.autograd.gradcheck(lambda x: kl(x, old, kind, mask), new)


def test_a_runaway_ratio_stays_finite():
    logp = torch.tensor([[500.0, -500.0, 500.0]], requires_grad=True)
    zeros = torch.zeros(1, 3)
    loss, stats = policy_loss(logp, zeros, torch.tensor([[-1.0, 1.0, 0.0]]), zeros == 0)
    total = loss.sum() + kl(logp, zeros, "k3").sum() + kl(-logp, zeros, "k3").sum()
    total.backward()
    assert total.isfinite() and logp.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


def check_outside_the_mask(terms, mask, clean, dirty):
    """What stands outside the mask reaches neither the loss nor the gradient of these terms, which
    are functions of (x, data) at x = data."""
    for (name, term), mode in itertools.product(terms.items(), ("token", "sequence")):
        found = []
        for data in (clean, dirty):
            x = data.clone().requires_grad_()
            loss = aggregate(term(x, data), mask, mode)
            found.append((loss.detach(), *torch.autograd.grad(loss, x)))
        (clean_loss, clean_gradient), (dirty_loss, dirty_gradient) = found
        assert torch.equal(clean_loss, dirty_loss), name
        assert torch.equal(clean_gradient, dirty_gradient), name
        assert (dirty_gradient[~mask] == 0).all(), name


@pytest.mark.parametrize("dirt", [NAN, INF, -INF])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    dirty = torch.where(mask, clean, dirt)
    terms = {"policy": lambda x, data: policy_loss(x, data - 0.1 * mask, data, mask)[0],
             "value": lambda x, data: value_loss(x, data - 0.1 * mask, data + 1, mask),
             "raw": lambda x, data: x}
    for kind in KL_KINDS:
        terms[kind] = lambda x, data, kind=kind: kl(x, data - 0.1 * mask, kind, mask)
    check_outside_the_mask(terms, mask, clean, dirty)

    _, stats = policy_loss(dirty, dirty, dirty, mask)
    assert all(value.isfinite() for value in stats.values())
    rewards = torch.where(mask, clean, 0.0)
    assert torch.equal(gae(rewards, dirty, mask)[0], gae(rewards, clean, mask)[0])


# ---- value loss ----


@pytest.mark.parametrize("value, old, target, loss, gradient", [
    (1.25, 1.0, 2.0, 0.28125, -0.75),  # within the clip: 0.5 * 0.75^2
    (2.0, 0.0, 2.0, 1.125, 0.0),  # moved beyond the clip: 0.5 * (0.5 - 2)^2, no gradient
    (3.0, 0.0, 1.0, 2.0, 2.0),  # moved beyond the target: the unclipped error 2 is larger
    (-1.0, 0.0, -2.0, 1.125, 0.0)])  # moved beyond the clip, downwards
def test_value_loss_by_hand(value, old, target, loss, gradient):
    # The second token is outside the mask.
    values = torch.tensor([[value, NAN]], requires_grad=True)
    old_values = torch.tensor([[old, NAN]])
    returns = torch.tensor([[target, NAN]])
    out = value_loss(values, old_values, returns, torch.tensor([[True, False]]))
    assert out.tolist() == [[loss, 0.0]]
    out.sum().backward()
    assert values.grad.tolist() == [[gradient, 0.0]]


# ---- KL and entropy: exact expectations by enumeration over a small vocabulary ----

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7], dtype=F64)
REF = torch.tensor([1.0, 0.5, -0.4, 0.1, -2.0], dtype=F64).log_softmax(0)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    logp = LOGITS.log_softmax(0)
    expected = {kind: (logp.exp() * kl(logp, REF, kind)).sum() for kind in KL_KINDS}
    true = sum(math.exp(p) * (p - q) for p, q in zip(logp.tolist(), REF.tolist()))
    close(expected["k1"], true)
    close(expected["k3"], true)
    assert abs(expected["k2"] - true) > 0.01 and expected["abs"] > true
    assert (kl(logp, REF, "k3") >= 0).all() and (kl(logp, REF, "k1") < 0).any()


def test_what_each_estimator_descends_on_as_a_loss():
    def gradient(function):
        theta = LOGITS.clone().requires_grad_()
        return torch.autograd.grad(function(theta.log_softmax(0)), theta)[0]

    def expected(kind):
        # sum_x p(x) d/dtheta estimator(x): the probabilities of the samples are constants.
        return gradient(lambda logp: (logp.detach().exp() * kl(logp, REF, kind)).sum())

    policy_reference = gradient(lambda logp: (logp.exp() * (logp - REF)).sum())
    reference_policy = gradient(lambda logp: (REF.exp() * (REF - logp)).sum())
    close(expected("k1"), torch.zeros(5))
    close(expected("k2"), policy_reference)
    close(expected("k3"), reference_policy)
    assert min(policy_reference.abs().max(), reference_policy.abs().max()) > 0.1


def test_entropy_equals_the_sum_and_survives_excluded_words():
    def of_logits(logits):
        return entropy(logits.log_softmax(-1))

    close(of_logits(LOGITS), -sum(p * math.log(p) for p in LOGITS.softmax(0).tolist()))
    close(of_logits(torch.zeros(2, 3, 8)), torch.full((2, 3), math.log(8)))
    logits = torch.tensor([[1.0, -INF, 1.0, -INF], [-INF, 3.0, -INF, -INF]], requires_grad=True)
    out = of_logits(logits)
    close(out.detach(), [math.log(2), 0.0])
    out.sum().backward()
    assert logits.grad.isfinite().all()
    assert torch.autograd.gradcheck(of_logits, LOGITS.clone().requires_grad_())
    far = torch.tensor([1e4, 1e4, -1e4])  # exp of each of these overflows or underflows
    close(of_logits(far), math.log(2))


# ---- aggregation ----


def test_aggregate_by_hand():
    x = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    close(aggregate(x, mask), (1 + 2 + 6) / 3)
    close(aggregate(x, mask, "sequence"), (1.5 + 6) / 2)  # the third row has no sampled token
    close(aggregate(x, mask, "token", 10), 0.9)
    close(aggregate(x, mask, "sequence", torch.tensor(3)), 2.5)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("cuts", [[8], [4, 4], [1, 2, 5], [1] * 8])
def test_micro_batches_add_up_to_the_whole(mode, cuts):
    g = torch.Generator().manual_seed(8)
    x = normal(g, 8, 11).requires_grad_()
    mask = torch.rand(8, 11, generator=g) < 0.3
    mask[2] = False  # an empty micro-batch where each row is one
    denominator = mask.sum() if mode == "token" else mask.any(1).sum()
    whole = aggregate(x**2, mask, mode)
    parts = sum(aggregate(part**2, part_mask, mode, denominator)
                for part, part_mask in zip(x.split(cuts), mask.split(cuts)))
    close(parts.detach(), whole.detach())
    close(*(torch.autograd.grad(loss, x)[0] for loss in (parts, whole)))


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("denominator", [None, 0, 5, torch.tensor(0)])
def test_nothing_masked_gives_zero_with_a_gradient_of_zero(mode, denominator):
    x = torch.full((3, 3), NAN, requires_grad=True)
    loss = aggregate(x, ~MASK, mode, denominator)
    loss.backward()
    assert loss.item() == 0 and loss.dim() == 0 and not x.grad.any()
