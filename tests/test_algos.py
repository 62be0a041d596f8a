"""The algorithms against slow and obvious versions of themselves: loops over lists, enumeration, hand numbers."""

import doctest
import math
import random
import statistics

import pytest
import torch

import algos
from algos import aggregate, entropy, gae, grpo_advantage, kl, policy_loss, reinforce_pp_advantage, rloo_advantage
from algos import value_loss, whiten

NAN, INF = float("nan"), float("inf")
F64 = torch.float64


def close(a, b, tol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), rtol=tol, atol=tol)


def random_batch(seed, B=5, T=23, p=0.4):
    """rewards, values, mask; rewards on sampled tokens only. Row 0 has no sampled token, row 1 nothing else."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < p
    mask[0], mask[1] = False, True
    rewards = torch.randn(B, T, generator=g, dtype=F64) * mask
    return rewards, torch.randn(B, T, generator=g, dtype=F64), mask


def gae_oracle(rewards, values, mask, gamma, lam):
    """A_i = sum_j>=i (gamma lam)^(j-i) (r_j + gamma V_j+1 - V_j) over the sampled tokens, as a double sum."""
    B, T = mask.shape
    out = [[0.0] * T for _ in range(B)]
    for b in range(B):
        at = [t for t in range(T) if mask[b, t]]
        r = [rewards[b, t].item() for t in at]
        v = [values[b, t].item() for t in at] + [0.0]
        for i, t in enumerate(at):
            out[b][t] = sum((gamma * lam) ** (j - i) * (r[j] + gamma * v[j + 1] - v[j]) for j in range(i, len(at)))
    return out


def test_the_documented_examples_hold():
    result = doctest.testmod(algos)
    assert result.attempted >= 15 and result.failed == 0


# ---- GAE ----


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    rewards, values, mask = random_batch(0)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    close(advantages, gae_oracle(rewards, values, mask, gamma, lam))
    close(returns, torch.where(mask, advantages + values, 0.0))
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_gae_by_hand():
    # observation, a, observation, b, c    gamma = lam = 0.5
    mask = torch.tensor([[False, True, False, True, True]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])
    values = torch.tensor([[7.0, 4.0, 7.0, 2.0, 1.0]])
    # delta_c = 2 - 1 = 1                     A_c = 1
    # delta_b = 0 + 0.5 * 1 - 2 = -1.5        A_b = -1.5 + 0.25 * 1 = -1.25
    # delta_a = 1 + 0.5 * 2 - 4 = -2          A_a = -2 + 0.25 * -1.25 = -2.3125
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    close(advantages, [[0, -2.3125, 0, -1.25, 1]])
    close(returns, [[0, 1.6875, 0, 0.75, 2]])


def test_gae_without_values_and_discount_is_the_sum_of_future_rewards():
    rewards, _, mask = random_batch(1)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            close(advantages[b, t], rewards[b, t:].sum() if mask[b, t] else 0.0)


def insert_observations(x, at, fill):
    """Widen [B, T] by columns of `fill` in front of the columns `at`."""
    columns = []
    for t in range(x.shape[1]):
        columns += [torch.full_like(x[:, 0], fill)] * at.count(t) + [x[:, t]]
    return torch.stack(columns + [torch.full_like(x[:, 0], fill)] * 3, 1)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp"])
def test_observations_between_the_sampled_tokens_change_nothing(estimator):
    rewards, values, mask = random_batch(2)
    at = [0, 0, 4, 5, 5, 5, 11, 22]
    wide_rewards, wide_values = insert_observations(rewards, at, 0.0), insert_observations(values, at, NAN)
    wide_mask = insert_observations(mask, at, False)
    if estimator == "gae":
        narrow = gae(rewards, values, mask, 0.9, 0.7)[0]
        wide = gae(wide_rewards, wide_values, wide_mask, 0.9, 0.7)[0]
    else:
        narrow = reinforce_pp_advantage(rewards, mask, 0.9)
        wide = reinforce_pp_advantage(wide_rewards, wide_mask, 0.9)
    assert torch.equal(wide[wide_mask], narrow[mask])
    assert (wide[~wide_mask] == 0).all()


def test_the_task_signal_reaches_every_sampled_token_of_every_turn():
    # two turns of two tokens, the only reward on the last sampled token of the last turn
    mask = torch.tensor([[False, True, True, False, False, True, True, False]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1.0, 0]])
    close(gae(rewards, torch.zeros(1, 8), mask)[0], mask.double())


@pytest.mark.parametrize("call", [lambda r, m: gae(r, torch.zeros_like(r), m), reinforce_pp_advantage])
def test_a_reward_outside_the_mask_is_refused(call):
    with pytest.raises(ValueError, match="reward on a token the policy did not sample"):
        call(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, True, False]]))


def test_gae_of_nothing():
    for shape in ((2, 3), (0, 3), (2, 0)):
        advantages, returns = gae(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        assert advantages.shape == returns.shape == shape and not advantages.any() and not returns.any()


def test_advantages_are_constants():
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool))
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_results_are_in_float32_or_more(dtype):
    x, mask = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=torch.bool)
    want = F64 if dtype == F64 else torch.float32
    outs = [*gae(x, x, mask), whiten(x, mask), reinforce_pp_advantage(x, mask)]
    outs += [f(x[:, 0], torch.arange(2)) for f in (grpo_advantage, rloo_advantage)]
    outs += [policy_loss(x, x, x, mask)[0], value_loss(x, x, x, mask)]
    outs += [kl(x, x, "k3"), entropy(x), aggregate(x, mask), aggregate(x, mask, "sequence", 7)]
    assert [o.dtype for o in outs] == [want] * len(outs)


def test_shapes_and_masks_that_would_broadcast_or_index_are_refused():
    x, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    for bad in (lambda: gae(x[0], x, mask), lambda: gae(x, x, mask.long()), lambda: aggregate(x[:, :1], mask),
                lambda: policy_loss(x, x, x[0], mask), lambda: policy_loss(x, x[0], x, mask),
                lambda: value_loss(x, x, x[:, 0], mask), lambda: grpo_advantage(x[0], torch.arange(4))):  # fmt: skip
        with pytest.raises(ValueError):
            bad()


# ---- REINFORCE++ ----


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reinforce_pp_equals_the_double_sum_then_whitened(gamma):
    rewards, _, mask = random_batch(3)
    togo = gae_oracle(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    kept = [g for row, m in zip(togo, mask.tolist()) for g, on in zip(row, m) if on]
    mean, std = statistics.mean(kept), statistics.stdev(kept)
    expected = [[(g - mean) / std if on else 0.0 for g, on in zip(row, m)] for row, m in zip(togo, mask.tolist())]
    close(reinforce_pp_advantage(rewards, mask, gamma), expected)


def test_reinforce_pp_by_hand():
    # return-to-go with gamma 0.5: 1, 2 and 0, so mean 1 and unbiased std 1
    mask = torch.tensor([[True, False, True], [False, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    close(reinforce_pp_advantage(rewards, mask, 0.5), [[0, 0, 1], [0, -1, 0]])


def test_reinforce_pp_is_zero_without_spread():
    one = torch.tensor([[False, True, False]])
    assert not reinforce_pp_advantage(torch.tensor([[0.0, 5.0, 0.0]]), one).any()
    assert not reinforce_pp_advantage(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)).any()
    same = torch.full((7, 1), 0.7)
    assert same.mean() != same[0]  # in float32, so the zeros below do not come by themselves
    assert not reinforce_pp_advantage(same, torch.ones(7, 1, dtype=torch.bool)).any()


# ---- GRPO and RLOO ----


def group_oracle(scores, groups, valid, member):
    """`member(score, scores of its group)` for every valid row of a group with two different scores, else 0."""
    out = []
    for s, g, ok in zip(scores, groups, valid):
        mine = [x for x, h, o in zip(scores, groups, valid) if h == g and o]
        out.append(member(s, mine) if ok and len(mine) > 1 and len(set(mine)) > 1 else 0.0)
    return out


def random_groups(seed):
    rng = random.Random(seed)
    ids = [0, -3, 17, 2**62, 2**62 + 1, 5]  # neighbours that a float would merge
    groups = [rng.choice(ids) for _ in range(40)] + [99]
    scores = [rng.choice([0.0, 0.25, 1.0, rng.random()]) for _ in groups]
    valid = [rng.random() < 0.8 for _ in groups]
    return scores, groups, valid


@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_equal_brute_force(seed):
    scores, groups, valid = random_groups(seed)
    s, g, ok = torch.tensor(scores, dtype=F64), torch.tensor(groups), torch.tensor(valid)
    s_dirty = torch.where(ok, s, NAN)  # what an invalid row scored must not matter

    def grpo(x, mine):
        return (x - statistics.mean(mine)) / (statistics.stdev(mine) + 1e-6)

    def centred(x, mine):
        return x - statistics.mean(mine)

    def rloo(x, mine):
        others = list(mine)
        others.remove(x)
        return x - sum(others) / len(others)

    close(grpo_advantage(s_dirty, g, ok), group_oracle(scores, groups, valid, grpo))
    close(grpo_advantage(s_dirty, g, ok, normalize_std=False), group_oracle(scores, groups, valid, centred))
    close(rloo_advantage(s_dirty, g, ok), group_oracle(scores, groups, valid, rloo))
    everyone = [True] * len(scores)
    close(grpo_advantage(s, g), group_oracle(scores, groups, everyone, grpo))
    close(rloo_advantage(s, g), group_oracle(scores, groups, everyone, rloo))


def test_grpo_and_rloo_by_hand():
    scores, groups = torch.tensor([0.0, 8.0, 1.0, 9.0, 2.0]), torch.tensor([4, -1, 4, -1, 4])
    # group 4: 0, 1, 2, mean 1, unbiased std 1; group -1: 8, 9, mean 8.5, std 1/sqrt(2)
    half = 0.5 * math.sqrt(2)
    close(grpo_advantage(scores, groups), [-1, -half, 0, half, 1], 1e-5)
    close(rloo_advantage(scores, groups), [-1.5, -1, 0, 1, 1.5])


@pytest.mark.parametrize("advantage", [grpo_advantage, rloo_advantage])
def test_groups_without_spread_are_exactly_zero(advantage):
    assert advantage(torch.tensor([5.0]), torch.tensor([3])).tolist() == [0.0]  # a group of one
    # the mean of seven times 0.7 is not 0.7 in float32: rounding noise would be blown up by the division
    assert advantage(torch.tensor([0.1] * 3 + [0.7] * 7), torch.tensor([1] * 3 + [2] * 7)).tolist() == [0.0] * 10
    # one valid row left, and none
    pair = torch.tensor([1.0, 0.0]), torch.tensor([1, 1])
    assert advantage(*pair, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert advantage(*pair, torch.tensor([False, False])).tolist() == [0.0, 0.0]
    assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_rloo_is_n_over_n_minus_one_times_the_centred_score():
    scores, groups = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=F64), torch.arange(12) % 3
    close(rloo_advantage(scores, groups), 4 / 3 * grpo_advantage(scores, groups, normalize_std=False))


def test_the_order_of_trajectories_does_not_matter():
    scores, groups, valid = (torch.tensor(x) for x in random_groups(9))
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    for advantage in (grpo_advantage, rloo_advantage):
        close(advantage(scores, groups, valid)[order], advantage(scores[order], groups[order], valid[order]), 1e-5)


# ---- policy loss ----


def test_policy_loss_equals_the_loop():
    g = torch.Generator().manual_seed(4)
    old, adv = torch.randn(4, 9, generator=g, dtype=F64) - 2, torch.randn(4, 9, generator=g, dtype=F64)
    new, mask = old + 0.4 * torch.randn(4, 9, generator=g, dtype=F64), torch.rand(4, 9, generator=g) < 0.6
    loss, stats = policy_loss(new, old, adv, mask, 0.1, 0.3)
    clipped = tokens = k3 = ratios = 0.0
    for b in range(4):
        for t in range(9):
            if not mask[b, t]:
                assert loss[b, t] == 0
                continue
            a, ratio = adv[b, t].item(), math.exp((new - old)[b, t].item())
            close(loss[b, t], -min(ratio * a, min(max(ratio, 0.9), 1.3) * a))
            tokens, ratios = tokens + 1, ratios + ratio
            clipped += (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.9)
            k3 += ratio - 1 - math.log(ratio)
    assert 0 < clipped < tokens
    for name, value in dict(clip_fraction=clipped, tokens=tokens, approx_kl=k3, ratio=ratios).items():
        close(stats[name], value)
        assert stats[name].dim() == 0 and not stats[name].requires_grad


def test_stats_of_micro_batches_add_up():
    g = torch.Generator().manual_seed(5)
    old, new, adv = (torch.randn(6, 7, generator=g, dtype=F64) for _ in range(3))
    mask = torch.rand(6, 7, generator=g) < 0.5
    whole = policy_loss(new, old, adv, mask)[1]
    parts = [policy_loss(new[b], old[b], adv[b], mask[b])[1] for b in (slice(0, 1), slice(1, 5), slice(5, 6))]
    for name in whole:
        close(whole[name], sum(p[name] for p in parts))


def test_gradient_at_ratio_one_is_minus_the_advantage():
    logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    policy_loss(logp, logp.detach(), torch.tensor([[2.0, -3.0, 9.0]]), mask)[0].sum().backward()
    assert logp.grad.tolist() == [[-2.0, 3.0, 0.0]]


@pytest.mark.parametrize(
    "ratio, advantage, alive",
    [
        (1.25, 1.0, True), (1.35, 1.0, False),  # good token, already much likelier: stop at 1 + clip_high = 1.3
        (0.85, -1.0, False), (0.95, -1.0, True),  # bad token, already much less likely: stop at 1 - clip_low = 0.9
        (0.5, 1.0, True), (2.0, -1.0, True),  # moved the wrong way: the gradient must stay, however far
    ],
)  # fmt: skip
def test_the_clip_stops_only_the_direction_that_goes_too_far(ratio, advantage, alive):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=F64), torch.tensor([[True]])
    loss, stats = policy_loss(logp, old, torch.tensor([[advantage]]), mask, 0.1, 0.3)
    loss.sum().backward()
    close(logp.grad, [[-ratio * advantage if alive else 0.0]])
    assert stats["clip_fraction"] == (not alive)


def test_policy_loss_gradient_agrees_with_finite_differences():
    g = torch.Generator().manual_seed(6)
    old, adv = torch.randn(3, 4, generator=g, dtype=F64), torch.randn(3, 4, generator=g, dtype=F64)
    new = (old + 0.5 * torch.randn(3, 4, generator=g, dtype=F64)).requires_grad_()
    mask = torch.rand(3, 4, generator=g) < 0.7
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, adv, mask)[0], new)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, adv, mask), new)
    for kind in ("k1", "abs", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x: kl(x, old, kind, mask), new)


def test_one_advantage_a_trajectory_may_be_given_as_a_column():
    g = torch.Generator().manual_seed(7)
    new, old, mask = torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g), torch.ones(3, 4) > 0
    adv = torch.tensor([1.0, -2.0, 0.5])
    a, b = policy_loss(new, old, adv[:, None], mask)[0], policy_loss(new, old, adv[:, None].expand(3, 4), mask)[0]
    assert torch.equal(a, b)


def test_a_runaway_ratio_stays_finite():
    logp = torch.tensor([[500.0, -500.0, 500.0]], requires_grad=True)
    loss, stats = policy_loss(logp, torch.zeros(1, 3), torch.tensor([[-1.0, 1.0, 0.0]]), torch.ones(1, 3) > 0)
    (loss.sum() + kl(logp, torch.zeros(1, 3), "k3").sum() + kl(-logp, torch.zeros(1, 3), "k3").sum()).backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all() and all(s.isfinite() for s in stats.values())


@pytest.mark.parametrize("dirt", [NAN, INF, -INF])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    dirty = torch.where(mask, clean, dirt)
    terms = {
        "policy": lambda x, o: policy_loss(x, o - 0.1 * mask, o, mask)[0],
        "value": lambda x, o: value_loss(x, o - 0.1 * mask, o + 1, mask),
        **{kind: lambda x, o, kind=kind: kl(x, o - 0.1 * mask, kind, mask) for kind in ("k1", "abs", "k2", "k3")},
        "raw": lambda x, o: x,
    }
    for name, term in terms.items():
        for mode in ("token", "sequence"):
            results = []
            for data in (clean, dirty):
                x = data.clone().requires_grad_()
                loss = aggregate(term(x, data), mask, mode)
                loss.backward()
                results.append((loss.detach(), x.grad))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1]), name
            assert (results[1][1][~mask] == 0).all()
    assert all(s.isfinite() for s in policy_loss(dirty, dirty, dirty, mask)[1].values())
    rewards = torch.where(mask, clean, 0.0)
    assert torch.equal(gae(rewards, dirty, mask)[0], gae(rewards, clean, mask)[0])


# ---- value loss ----


@pytest.mark.parametrize(
    "v, old, R, loss, grad",
    [
        (1.25, 1.0, 2.0, 0.28125, -0.75),  # within the clip: 0.5 * 0.75^2
        (2.0, 0.0, 2.0, 1.125, 0.0),  # right, but moved too far: 0.5 * (0.5 - 2)^2, no gradient
        (3.0, 0.0, 1.0, 2.0, 2.0),  # overshot: the unclipped error 2 is the larger one
        (-1.0, 0.0, -2.0, 1.125, 0.0),  # the same downwards
    ],
)
def test_value_loss_by_hand(v, old, R, loss, grad):
    x = torch.tensor([[v, NAN]], requires_grad=True)
    out = value_loss(x, torch.tensor([[old, NAN]]), torch.tensor([[R, NAN]]), torch.tensor([[True, False]]))
    assert out.tolist() == [[loss, 0.0]]
    out.sum().backward()
    assert x.grad.tolist() == [[grad, 0.0]]


# ---- KL and entropy: exact expectations by enumeration over a small vocabulary ----

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7], dtype=F64)
REF = torch.tensor([1.0, 0.5, -0.4, 0.1, -2.0], dtype=F64).log_softmax(0)


def true_kl(p_log, q_log):
    return sum(math.exp(p) * (p - q) for p, q in zip(p_log.tolist(), q_log.tolist()))


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    logp = LOGITS.log_softmax(0)
    expect = {kind: (logp.exp() * kl(logp, REF, kind)).sum() for kind in ("k1", "k2", "k3", "abs")}
    close(expect["k1"], true_kl(logp, REF))
    close(expect["k3"], true_kl(logp, REF))
    assert abs(expect["k2"] - true_kl(logp, REF)) > 0.01 and expect["abs"] > expect["k1"]
    assert (kl(logp, REF, "k3") >= 0).all() and (kl(logp, REF, "k1") < 0).any()


def test_what_each_estimator_descends_on_as_a_loss():
    def expected_gradient(kind):
        # sum_x p(x) d/dtheta estimator(x): the samples are given, only the estimator is differentiated
        theta = LOGITS.clone().requires_grad_()
        logp = theta.log_softmax(0)
        (logp.detach().exp() * kl(logp, REF, kind)).sum().backward()
        return theta.grad

    def true_gradient(divergence):
        theta = LOGITS.clone().requires_grad_()
        divergence(theta.log_softmax(0)).backward()
        return theta.grad

    close(expected_gradient("k1"), torch.zeros(5))
    reverse = true_gradient(lambda logp: (logp.exp() * (logp - REF)).sum())  # KL(policy || reference)
    forward = true_gradient(lambda logp: (REF.exp() * (REF - logp)).sum())  # KL(reference || policy)
    close(expected_gradient("k2"), reverse)
    close(expected_gradient("k3"), forward)
    assert reverse.abs().max() > 0.1 and forward.abs().max() > 0.1


def test_kl_by_hand_and_zero_for_equal_policies():
    logp, ref = torch.tensor([[math.log(0.2)]], dtype=F64), torch.tensor([[math.log(0.4)]], dtype=F64)
    ln2 = 0.6931471805599453
    for kind, value in (("k1", -ln2), ("abs", ln2), ("k2", 0.5 * ln2**2), ("k3", 2 - 1 - ln2)):
        close(kl(logp, ref, kind), [[value]])
        assert kl(logp, logp, kind).item() == 0


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'low_var_kl'; choose from k1, abs, k2, k3"):
        kl(torch.zeros(1, 1), torch.zeros(1, 1), "low_var_kl")
    with pytest.raises(ValueError, match="'mean'; choose from token, sequence"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1) > 0, "mean")


def test_entropy_equals_the_sum_and_survives_excluded_words():
    probs = LOGITS.softmax(0).tolist()
    close(entropy(LOGITS), -sum(p * math.log(p) for p in probs))
    close(entropy(torch.zeros(2, 3, 8)), torch.full((2, 3), math.log(8)))
    logits = torch.tensor([[1.0, -INF, 1.0, -INF], [-INF, 3.0, -INF, -INF]], requires_grad=True)
    out = entropy(logits)
    close(out.detach(), [math.log(2), 0.0])
    out.sum().backward()
    assert logits.grad.isfinite().all()
    assert torch.autograd.gradcheck(entropy, LOGITS.clone().requires_grad_())
    far = torch.tensor([1e4, 1e4, -1e4])  # exp of any of these overflows or vanishes
    close(entropy(far), math.log(2))


# ---- aggregation ----


def test_aggregate_by_hand():
    x = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    close(aggregate(x, mask), (1 + 2 + 6) / 3)
    close(aggregate(x, mask, "sequence"), (1.5 + 6) / 2)  # the third row has no token and is not counted
    close(aggregate(x, mask, "token", 10), 0.9)
    close(aggregate(x, mask, "sequence", torch.tensor(3)), 2.5)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("cuts", [[8], [4, 4], [1, 2, 5], [1] * 8])
def test_micro_batches_add_up_to_the_whole(mode, cuts):
    g = torch.Generator().manual_seed(8)
    x, mask = torch.randn(8, 11, generator=g, dtype=F64), torch.rand(8, 11, generator=g) < 0.3
    mask[2] = False  # an empty micro-batch in the finest cut
    count = mask.sum() if mode == "token" else mask.any(1).sum()
    whole = x.clone().requires_grad_()
    loss = aggregate(whole**2, mask, mode)
    loss.backward()
    parts = x.clone().requires_grad_()
    total = 0.0
    for rows, m in zip(parts.split(cuts), mask.split(cuts)):
        part = aggregate(rows**2, m, mode, count)
        part.backward()
        total += part.item()
    close(total, loss.item())
    close(parts.grad, whole.grad)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("denominator", [None, 0, 5, torch.tensor(0)])
def test_nothing_masked_gives_zero_with_a_gradient_of_zero(mode, denominator):
    x = torch.ones(2, 3, requires_grad=True)
    loss = aggregate(x * NAN, torch.zeros(2, 3, dtype=torch.bool), mode, denominator)
    assert loss.item() == 0 and loss.dim() == 0 and loss.requires_grad
    x = torch.ones(2, 3, requires_grad=True)
    aggregate(x * 2, torch.zeros(2, 3, dtype=torch.bool), mode, denominator).backward()
    assert x.grad.tolist() == [[0.0] * 3] * 2
