"""Advantages, batches, micro-batches and optimizer steps: one result however a batch is cut."""

import copy
import math
import random

import pytest
import torch

import rl
import update
from config import parse_config
from trajectory import Status, Trajectory


def config(*flags):
    return parse_config(["--out", "runs/never-made", "--minibatches", "1", *flags])


def weights_of(*models):
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


@pytest.fixture
def model(tiny):
    """A copy, which a test may train."""
    return copy.deepcopy(tiny[0])


# ---- batches ----


def test_collate_pads_on_the_right_and_repeats_one_number_over_all_tokens():
    long = Trajectory("babyai_1", "babyai")
    long.append([5, 6])
    long.append([7], [-0.5])
    long.begin_segment()
    long.append([8])
    short = Trajectory("babyai_2", "babyai")
    short.append([8])
    batch = update.collate([long, short, Trajectory("babyai_3", "babyai")],
                           rewards=[[0.0, 0.0, 1.0, 0.0], [2.0], []], advantages=[3.0, 4.0, 5.0])
    rows = {"ids": [[5, 6, 7, 8], [8, 0, 0, 0]], "segments": [[1, 1, 1, 2], [1, 0, 0, 0]],
            "mask": [[False, False, True, False], [False] * 4], "observed": [[False] * 4] * 2,
            "turns": [[0, 0, 1, 0], [0] * 4], "old_logprobs": [[0.0, 0.0, -0.5, 0.0], [0.0] * 4],
            "rewards": [[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0]],
            "advantages": [[3.0] * 4, [4.0, 0.0, 0.0, 0.0]]}
    assert {name: x.tolist() for name, x in batch.items()} == {
        name: [*values, [0] * 4] for name, values in rows.items()}
    assert (batch["ids"].dtype, batch["mask"].dtype) == (torch.long, torch.bool)


@pytest.mark.parametrize("max_tokens", [1, 700, 10**9])
def test_map_rows_keeps_the_order(tiny, trajectories, max_tokens):
    batch = update.collate([*trajectories, Trajectory("babyai_1", "babyai")])
    calls = []

    def function(model, part):
        calls.append(len(part["ids"]))
        return part["ids"].float()

    result = update.map_rows(function, tiny[0], batch, max_tokens)
    assert torch.equal(result, batch["ids"].float())
    assert sum(calls) == len(trajectories)
    assert (len(calls) > 1) == (max_tokens < 10**9)


# ---- micro-batches ----


def trie_size(rows):
    """The number of different prefixes of the rows: an oracle for shared positions."""
    return len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_everything_once_and_are_as_many_for_each_rank(packed):
    rng = random.Random(0)
    balanced = shares_prefixes = 0
    for _ in range(100):
        prefixes = [[rng.randint(0, 9) for _ in range(60)] for _ in range(3)]
        rows = [rng.choice(prefixes)[: rng.randint(0, 60)]
                + [rng.randint(0, 9) for _ in range(rng.randint(1, 60))]
                for _ in range(rng.randint(0, 40))]
        num_ranks, max_tokens = rng.randint(1, 5), rng.randint(50, 400)
        cuts = update.micro_batches(rows, max_tokens, num_ranks, packed)
        assert sorted(i for cut in cuts for i in cut) == list(range(len(rows)))
        assert len(cuts) % num_ranks == 0
        longest = max(map(len, rows), default=0)
        sizes = []  # the number of positions that each micro-batch takes
        for own in ([rows[i] for i in cut] for cut in cuts if cut):
            sizes.append(trie_size(own) if packed else len(own) * max(map(len, own)))
            assert update.num_positions(own, packed) == sizes[-1] <= max(max_tokens, longest)
        if packed and len(rows) > 4 * num_ranks:
            assert max(sizes) - sum(sizes) / len(sizes) <= longest
            balanced += 1
            shares_prefixes += sum(sizes) < sum(map(len, rows))
    assert min(balanced, shares_prefixes) > 25 or not packed
    others = [[7] * 6, [8] * 6, [9] * 6]  # no two of them fit together
    assert len(update.micro_batches(others, 10, 1, packed)) == 3


def test_mini_batches_hold_whole_groups_unless_there_are_too_few():
    played = [Trajectory("babyai_1", "babyai", group=i // 4) for i in range(24)]
    cfg = config("--minibatches", "3")
    parts = update.minibatches(played, cfg, step=0, epoch=0)
    assert sorted(i for part in parts for i in part) == list(range(24))
    assert [len({i // 4 for i in part}) for part in parts] == [2, 2, 2]
    assert parts != update.minibatches(played, cfg, step=1, epoch=0)
    for t in played[2:]:
        t.status = Status.ENV_ERROR if t.group else Status.DONE
    assert sorted(map(len, update.minibatches(played, cfg, 0, 0))) == [1, 1, 2]


# ---- optimizer steps ----


@pytest.mark.parametrize("rows, norm", [([], 0.0), ([0], math.nan)])
def test_no_row_and_a_gradient_that_is_not_finite_leave_the_weights_as_they_are(
        rows, norm, tiny, model, trajectories):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)

    def loss_of(part):
        return rl.token_logprobs(model, part["ids"], part["mask"])[0].sum() * math.nan, {}

    batch = update.collate(trajectories)
    stats = update.optimizer_step(model, optimizer, batch, rows, loss_of, 100)
    assert stats["grad_norm"] == pytest.approx(norm, nan_ok=True)
    assert torch.equal(weights_of(model), weights_of(tiny[0]))
    assert all(p.grad is None for p in model.parameters())


# ---- advantages and the update of a step ----


def test_equal_rewards_give_no_advantage_wherever_they_stand():
    """-0.05 twice and then 1 add up differently in float32, depending on their positions.

    The advantage must not depend on it.
    """
    played = []
    for places in ((3, 5, 9), (2, 11, 14), (7, 8, 20), (1, 2, 3)):
        t = Trajectory("babyai_8", "babyai", tokens=[5] * 24, logprobs=[0.0] * 24,
                       mask=[i in places for i in range(24)], rewards=[0.0] * 24)
        for i, reward in zip(places, (-0.05, -0.05, 1.0)):
            t.rewards[i] = reward
        t.reward = math.fsum(t.rewards)
        played.append(t)
    assert not update.advantages_of(played, config(), "cpu")["advantages"].any()
    played[0].reward += 0.5
    assert update.advantages_of(played, config(), "cpu")["advantages"].any()


def test_the_metrics_say_how_far_adam_moved_the_weights_without_a_gradient_too(model, trajectories):
    """In a step whose groups are all equal, no weight changes and the gap is measured; but after a
    step with a gradient Adam's momentum moves the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for step, spread in enumerate((0.0, 1.0, 0.3, 0.0)):
        played = copy.deepcopy(trajectories)
        for t in played:
            t.reward = t.rewards[-1] = spread * t.sample
        before = weights_of(model)
        batch = update.advantages_of(played, config(), "cpu")
        row = update.update(played, batch, config(), step, model, optimizer)
        assert (row["grad_norm"] > 0) == (spread > 0) and 0 < row["logprob_gap"]
        moved = float((weights_of(model).double() - before.double()).norm())
        assert row["weight_change"] == pytest.approx(moved, rel=1e-4)
        assert moved > 0.1 if step else (moved == 0 == row["loss"] and row["logprob_gap"] < 1e-4)


@pytest.mark.parametrize("flags", [
    "--minibatches 1", "--set aggregation=sequence", "--kl_coef 0.1 --entropy_coef 0.01",
    "--algo ppo"])
def test_the_update_of_a_step_is_the_same_however_small_its_micro_batches(
        tiny, trajectories, flags):
    check_small_micro_batches(tiny, trajectories, flags)


def check_small_micro_batches(tiny, trajectories, flags):
    """Also for the flags of ideas: see tests/test_ideas.py."""
    played = copy.deepcopy(trajectories)
    for t in played:  # the two samples of an item get different rewards
        t.reward = t.rewards[-1] = float(t.sample)
        t.states = [f"{t.item} {k}" for k in range(len(t.tokens))]
    results = []
    for microbatch_tokens in (10**6, 1):
        cfg = config("--minibatches", "4", *flags.split(),
                     "--microbatch_tokens", str(microbatch_tokens))
        trained = []  # model, optimizer of the policy, and of the critic
        for model in [copy.deepcopy(tiny[0])] + [rl.Critic("tiny")] * (cfg.algo == "ppo"):
            rl.set_compute_paths(model, rl.FASTEST)
            trained += [model, torch.optim.SGD(model.parameters(), lr=0.01)]
        critic = (trained[2:] or [None])[0]
        reference = tiny[0] if cfg.kl_coef else None
        batch = update.advantages_of(played, cfg, "cpu", reference, critic)
        row = update.update(played, batch, cfg, 0, *trained)
        results.append((row | {"seconds_adam": 0}, weights_of(*trained[::2])))
    (whole, whole_weights), (cut, cut_weights) = results
    # Small micro-batches share fewer prefixes; one of all rows shares all of them.
    shared, less_shared = whole.pop("computed_per_fed"), cut.pop("computed_per_fed")
    rows = [t.tokens for t in played]
    least = trie_size(rows) / sum(map(len, rows))
    assert least <= shared < less_shared <= 1
    assert "--minibatches" not in flags or shared == pytest.approx(least)
    assert whole["grad_norm"] > 0
    assert cut == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert (cut_weights - whole_weights).abs().max() < 1e-6
    unchanged = weights_of(tiny[0])
    assert (whole_weights[:len(unchanged)] - unchanged).abs().max() > 1e-4


def test_a_loss_of_ones_own_is_that_of_all_rows_of_advantage_0_too(tiny, trajectories, tmp_path):
    (tmp_path / "own.py").write_text("def loss(part):\n    return -part['logprobs'], {}")
    cfg = config("--loss", f"{tmp_path}/own.py:loss", "--minibatches", "1")
    batch, model = update.advantages_of(trajectories, cfg, "cpu"), copy.deepcopy(tiny[0])
    batch["advantages"] *= 0
    row = update.update(trajectories, batch, cfg, 0, model, torch.optim.SGD(model.parameters()))
    expected = -(batch["old_logprobs"].sum() / batch["mask"].sum()).item()
    assert row["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("algo, per_token", [
    ("grpo", False), ("grpo --algo_args normalize_std=false", False), ("rloo", False),
    ("reinforce_pp", True)])
def test_each_trajectorys_record_holds_its_advantage(algo, per_token):
    """It is that of the sampled tokens of all segments. A failed environment's trajectory has
    advantage 0 and is left out of its group's mean."""
    played = []
    for sample, reward in enumerate((1.0, 0.0, 0.75)):
        t = Trajectory("babyai_8", "babyai", sample=sample, reward=reward)
        t.append([5, 6])
        t.append([7], [-1.0])
        t.begin_segment()
        t.append([5])
        t.append([8], [-1.0])
        t.rewards[-1] = reward
        played.append(t)
    played[2].status = Status.ENV_ERROR
    cfg = config("--algo", *algo.split())
    advantages = update.advantages_of(played, cfg, "cpu")["advantages"]
    assert advantages[0, 2] == advantages[0, 4] == -advantages[1, 4] > 0
    assert (advantages[0, 2] == 0.5) == ("=false" in algo)
    assert not advantages[:, [0, 1, 3]].any() and not advantages[2].any()
    for t, row in zip(played, advantages.tolist(), strict=True):
        assert t.advantage == (row if per_token else row[2])


@pytest.mark.parametrize("algo", ["rloo", "reinforce_pp"])
def test_the_kl_in_the_reward_is_taken_off_each_sampled_token(tiny, trajectories, algo):
    cfg = config("--algo", algo, "--kl_in", "reward", "--set", "kl_type=k1", "--kl_coef", "0.5")
    played = copy.deepcopy(trajectories[:2])  # a group
    scores, returns = [], []  # of the trajectories; of the sampled tokens of both
    for t, shift, reward in zip(played, (0.5, -0.25), (1.0, 0.0)):
        # The policy gave each token another log-prob than the reference, which is the tiny model.
        t.logprobs = [x + shift if sampled else 0.0 for x, sampled in zip(t.logprobs, t.mask)]
        t.rewards[-1] = t.reward = reward
        own = [x - 0.5 * shift * sampled for x, sampled in zip(t.rewards, t.mask)]
        scores.append(sum(own))
        returns += [sum(own[i:]) for i, sampled in enumerate(t.mask) if sampled]
    batch = update.advantages_of(played, cfg, "cpu", tiny[0])
    returns = torch.tensor(returns)
    expected = (returns - returns.mean()) / returns.std()
    if algo == "rloo":
        difference = scores[0] - scores[1]
        expected = torch.tensor([difference] * sum(played[0].mask)
                                + [-difference] * sum(played[1].mask))
    torch.testing.assert_close(batch["advantages"][batch["mask"]], expected, atol=1e-3, rtol=0)
