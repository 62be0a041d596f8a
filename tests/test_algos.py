"""The algorithms against slow and obvious implementations.

The oracles are loops over lists, enumerations and numbers computed by hand, some of which are the
examples in the docstrings (tests/test_doctests.py).
"""

import math
import random
import statistics

import pytest
import torch

from algos import aggregate, entropy, gae, grpo_advantage, kl, policy_loss, ppo_loss
from algos import reinforce_pp_advantage, rloo_advantage, turn_numbers, value_loss, whiten

NAN = float("nan")
INF = float("inf")
F64 = torch.float64
KL_KINDS = ("k1", "abs", "k2", "k3")


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
    values = normal(g, B, T)
    return rewards, values, mask


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
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    close(advantages, gae_oracle(rewards, values, mask, gamma, lam))
    close(returns, torch.where(mask, advantages + values, 0.0))
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


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


def test_a_reward_outside_the_mask_is_refused():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, False]])
    message = "reward on a token the policy did not sample"
    with pytest.raises(ValueError, match=message):
        gae(rewards, torch.zeros_like(rewards), mask)
    with pytest.raises(ValueError, match=message):
        reinforce_pp_advantage(rewards, mask)


def test_the_task_signal_reaches_every_sampled_token_of_every_turn():
    # Two turns of two tokens. The only reward is on the last sampled token of the last turn.
    mask = torch.tensor([[False, True, True, False, False, True, True, False]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1.0, 0]])
    close(gae(rewards, torch.zeros(1, 8), mask)[0], mask.double())


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_where_nothing_was_sampled_there_is_no_advantage_and_no_loss(shape):
    zeros, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    loss, stats = policy_loss(zeros, zeros, zeros, mask)
    assert stats["tokens"] == 0
    for result in (*gae(zeros, zeros, mask), loss):
        assert result.shape == shape and not result.any()


def test_advantages_are_constants():
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool))
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_results_are_in_float32_or_more(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    mask = torch.ones(2, 3, dtype=torch.bool)
    expected = F64 if dtype == F64 else torch.float32
    results = [
        *gae(x, x, mask), whiten(x, mask), reinforce_pp_advantage(x, mask), entropy(x),
        grpo_advantage(x[:, 0], torch.arange(2)), rloo_advantage(x[:, 0], torch.arange(2)),
        policy_loss(x, x, x, mask)[0], value_loss(x, x, x, mask), kl(x, x, "k3"),
        aggregate(x, mask), aggregate(x, mask, "sequence", 7)]
    assert {result.dtype for result in results} == {expected}


X = torch.zeros(3, 3)
MASK = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize("function, arguments", [
    (gae, (X[0], X, MASK)),
    (gae, (X, X, MASK.long())),
    (aggregate, (X[:, :1], MASK)),
    (policy_loss, (X, X, X[0], MASK)),
    (policy_loss, (X, X[0], X, MASK)),
    (policy_loss, (X, X, X[:1], MASK)),
    (value_loss, (X, X, X[:, 0], MASK)),
    (grpo_advantage, (X[0], torch.arange(4))),
])
def test_shapes_and_masks_that_would_broadcast_or_index_are_refused(function, arguments):
    message = "mask must be bool|does not match the mask|must be .B, T."
    with pytest.raises(ValueError, match=message):
        function(*arguments)


# ---- REINFORCE++ ----


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reinforce_pp_equals_the_double_sum_then_whitened(gamma):
    rewards, _, mask = random_batch(3)
    returns = gae_oracle(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    sampled = mask.nonzero().tolist()
    kept = [returns[b][t] for b, t in sampled]
    mean = statistics.mean(kept)
    std = statistics.stdev(kept)
    expected = torch.zeros(mask.shape, dtype=F64)
    for b, t in sampled:
        expected[b, t] = (returns[b][t] - mean) / std
    close(reinforce_pp_advantage(rewards, mask, gamma), expected)


def test_reinforce_pp_is_zero_without_spread():
    one = torch.tensor([[False, True, False]])
    assert not reinforce_pp_advantage(torch.tensor([[0.0, 5.0, 0.0]]), one).any()
    assert not reinforce_pp_advantage(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)).any()
    same = torch.full((7, 1), 0.7)
    assert same.mean() != same[0]  # rounding: (x - mean) alone would not be zero
    assert not reinforce_pp_advantage(same, torch.ones(7, 1, dtype=torch.bool)).any()


# ---- GRPO and RLOO ----


def group_oracle(scores, groups, valid, advantage_of):
    """The advantages [B] of `advantage_of(score, valid scores of its group)`.

    Invalid rows and groups without two different valid scores get 0.
    """
    rows = list(zip(scores, groups, valid))
    out = []
    for score, group, is_valid in rows:
        group_scores = [s for s, g, v in rows if g == group and v]
        comparable = len(set(group_scores)) > 1
        out.append(advantage_of(score, group_scores) if is_valid and comparable else 0.0)
    return out


def grpo_of(score, group_scores):
    return (score - statistics.mean(group_scores)) / (statistics.stdev(group_scores) + 1e-6)


def centred_of(score, group_scores):
    return score - statistics.mean(group_scores)


def rloo_of(score, group_scores):
    others = list(group_scores)
    others.remove(score)
    return score - sum(others) / len(others)


def random_groups(seed):
    rng = random.Random(seed)
    ids = [0, -3, 17, 2**62, 2**62 + 1, 5]  # 2**62 and 2**62 + 1 are equal as floats
    groups = [rng.choice(ids) for _ in range(40)] + [99]
    scores = [rng.choice([0.0, 0.25, 1.0, rng.random()]) for _ in groups]
    valid = [rng.random() < 0.8 for _ in groups]
    return scores, groups, valid


@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_equal_brute_force(seed):
    rows = random_groups(seed)
    scores, groups, valid = rows
    s = torch.tensor(scores, dtype=F64)
    g = torch.tensor(groups)
    v = torch.tensor(valid)
    # The score of an invalid row must not matter.
    dirty = torch.where(v, s, NAN)
    close(grpo_advantage(dirty, g, v), group_oracle(*rows, grpo_of))
    close(grpo_advantage(dirty, g, v, normalize_std=False), group_oracle(*rows, centred_of))
    close(rloo_advantage(dirty, g, v), group_oracle(*rows, rloo_of))
    # Without `valid` all rows count.
    all_valid = [True] * len(scores)
    close(grpo_advantage(s, g), group_oracle(scores, groups, all_valid, grpo_of))
    close(rloo_advantage(s, g), group_oracle(scores, groups, all_valid, rloo_of))


@pytest.mark.parametrize("advantage", [grpo_advantage, rloo_advantage])
def test_groups_without_spread_are_exactly_zero(advantage):
    # A group of one.
    assert advantage(torch.tensor([5.0]), torch.tensor([3])).tolist() == [0.0]
    # The float32 mean of seven times 0.7 is not 0.7. Dividing by the std would amplify that error.
    scores = torch.tensor([0.1] * 3 + [0.7] * 7)
    groups = torch.tensor([1] * 3 + [2] * 7)
    assert advantage(scores, groups).tolist() == [0.0] * 10
    # A group with one valid row, and a group with none.
    pair = torch.tensor([1.0, 0.0]), torch.tensor([1, 1])
    assert advantage(*pair, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert advantage(*pair, torch.tensor([False, False])).tolist() == [0.0, 0.0]
    # No rows at all.
    assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


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
    new = old + 0.4 * normal(g, 4, 9)
    mask = torch.rand(4, 9, generator=g) < 0.6
    part = {"logprobs": new, "old_logprobs": old, "advantages": advantages, "mask": mask}
    loss, stats = ppo_loss(part, clip_low=0.1, clip_high=0.3)

    expected = {"clip_fraction": 0, "approx_kl": 0.0, "tokens": 0}
    for b in range(4):
        for t in range(9):
            if not mask[b, t]:
                assert loss[b, t] == 0
                continue
            advantage = advantages[b, t].item()
            ratio = math.exp((new - old)[b, t].item())
            clipped_ratio = min(max(ratio, 0.9), 1.3)
            close(loss[b, t], -min(ratio * advantage, clipped_ratio * advantage))
            too_high = advantage > 0 and ratio > 1.3
            too_low = advantage < 0 and ratio < 0.9
            expected["clip_fraction"] += too_high or too_low
            expected["approx_kl"] += ratio - 1 - math.log(ratio)
            expected["tokens"] += 1

    assert 0 < expected["clip_fraction"] < expected["tokens"]
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
    advantages = torch.tensor([[-1.0, 1.0, 0.0]])
    loss, stats = policy_loss(logp, zeros, advantages, torch.ones(1, 3, dtype=torch.bool))
    total = loss.sum() + kl(logp, zeros, "k3").sum() + kl(-logp, zeros, "k3").sum()
    total.backward()
    assert total.isfinite()
    assert logp.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


def loss_and_gradient(term, data, mask, mode):
    """The aggregated loss of `term(x, data)` at x = data, and its gradient for x."""
    x = data.clone().requires_grad_()
    loss = aggregate(term(x, data), mask, mode)
    loss.backward()
    return loss.detach(), x.grad


def check_outside_the_mask(terms, mask, clean, dirty):
    """What stands outside the mask reaches neither the loss nor the gradient of these terms."""
    for name, term in terms.items():
        for mode in ("token", "sequence"):
            clean_loss, clean_gradient = loss_and_gradient(term, clean, mask, mode)
            dirty_loss, dirty_gradient = loss_and_gradient(term, dirty, mask, mode)
            assert torch.equal(clean_loss, dirty_loss), name
            assert torch.equal(clean_gradient, dirty_gradient), name
            assert (dirty_gradient[~mask] == 0).all(), name


@pytest.mark.parametrize("dirt", [NAN, INF, -INF])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    dirty = torch.where(mask, clean, dirt)
    terms = {
        "policy": lambda x, data: policy_loss(x, data - 0.1 * mask, data, mask)[0],
        "value": lambda x, data: value_loss(x, data - 0.1 * mask, data + 1, mask),
        "raw": lambda x, data: x,
    }
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


def true_kl(p_log, q_log):
    return sum(math.exp(p) * (p - q) for p, q in zip(p_log.tolist(), q_log.tolist()))


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    logp = LOGITS.log_softmax(0)
    expected = {kind: (logp.exp() * kl(logp, REF, kind)).sum() for kind in KL_KINDS}
    close(expected["k1"], true_kl(logp, REF))
    close(expected["k3"], true_kl(logp, REF))
    assert abs(expected["k2"] - true_kl(logp, REF)) > 0.01
    assert expected["abs"] > expected["k1"]
    assert (kl(logp, REF, "k3") >= 0).all()
    assert (kl(logp, REF, "k1") < 0).any()


def test_what_each_estimator_descends_on_as_a_loss():
    def expected_gradient(kind):
        # sum_x p(x) d/dtheta estimator(x): the probabilities of the samples are constants.
        theta = LOGITS.clone().requires_grad_()
        logp = theta.log_softmax(0)
        (logp.detach().exp() * kl(logp, REF, kind)).sum().backward()
        return theta.grad

    def true_gradient(divergence):
        theta = LOGITS.clone().requires_grad_()
        divergence(theta.log_softmax(0)).backward()
        return theta.grad

    def kl_policy_reference(logp):
        return (logp.exp() * (logp - REF)).sum()

    def kl_reference_policy(logp):
        return (REF.exp() * (REF - logp)).sum()

    close(expected_gradient("k1"), torch.zeros(5))
    close(expected_gradient("k2"), true_gradient(kl_policy_reference))
    close(expected_gradient("k3"), true_gradient(kl_reference_policy))
    assert true_gradient(kl_policy_reference).abs().max() > 0.1
    assert true_gradient(kl_reference_policy).abs().max() > 0.1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'low_var_kl'; choose from k1, abs, k2, k3"):
        kl(torch.zeros(1, 1), torch.zeros(1, 1), "low_var_kl")
    with pytest.raises(ValueError, match="'mean'; choose from token, sequence"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1) > 0, "mean")


def test_entropy_equals_the_sum_and_survives_excluded_words():
    def of_logits(logits):
        return entropy(logits.log_softmax(-1))

    probs = LOGITS.softmax(0).tolist()
    close(of_logits(LOGITS), -sum(p * math.log(p) for p in probs))
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
    x = normal(g, 8, 11)
    mask = torch.rand(8, 11, generator=g) < 0.3
    mask[2] = False  # an empty micro-batch where each row is one
    denominator = mask.sum() if mode == "token" else mask.any(1).sum()

    whole = x.clone().requires_grad_()
    whole_loss = aggregate(whole**2, mask, mode)
    whole_loss.backward()

    parts = x.clone().requires_grad_()
    sum_of_losses = 0.0
    for part, part_mask in zip(parts.split(cuts), mask.split(cuts)):
        loss = aggregate(part**2, part_mask, mode, denominator)
        loss.backward()
        sum_of_losses += loss.item()
    close(sum_of_losses, whole_loss.item())
    close(parts.grad, whole.grad)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("denominator", [None, 0, 5, torch.tensor(0)])
def test_nothing_masked_gives_zero_with_a_gradient_of_zero(mode, denominator):
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    x = torch.ones(2, 3, requires_grad=True)
    loss = aggregate(x * NAN, nothing, mode, denominator)
    assert loss.item() == 0 and loss.dim() == 0 and loss.requires_grad
    x = torch.ones(2, 3, requires_grad=True)
    aggregate(x * 2, nothing, mode, denominator).backward()
    assert x.grad.tolist() == [[0.0] * 3] * 2
