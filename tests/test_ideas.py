"""The files of ideas/ against slow and obvious implementations. The core needs none of them."""

import copy
import itertools
import math
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import FILES, ROOT, plain_logprobs, random_model
from test_algos import F64, NAN, check_outside_the_mask, close, group_oracle, grpo_of, normal
from test_algos import centred_of, rloo_of, turns_of
from test_device import check_device
from test_parallel import DEALT, TWO_PROCESSES, first_step
from test_train import ENV, SMALL, TINIEST, completed, metrics, refused
from test_update import check_small_micro_batches
from transformers import AutoModelForCausalLM

import algos
import rl
import update
from algos import aggregate, grpo_advantage, rloo_advantage, turn_numbers
from config import parse_config
from envs import UserError
from ideas import distill, gagpo, gigpo, gspo, hgpo, information, tree, turns, vine
from ideas.gigpo import turn_advantage, turn_returns
from rollout import rollout
from trajectory import Status, Trajectory, read_trajectories, reply_spans
from worlds import category_of

NO_RUN = ["--out", "runs/never-made"]
IDEAS = sorted(path for path in FILES if path.parent == ROOT / "ideas")
PER = pytest.mark.parametrize("per", ["trajectory", "turn"])


# ---- the core and its ideas ----


@pytest.mark.parametrize("idea", IDEAS, ids=lambda path: path.stem)
def test_each_idea_can_be_deleted(idea, monkeypatch):
    """The other ideas do not import it, and the core imports none: see the next test."""
    monkeypatch.setitem(sys.modules, f"ideas.{idea.stem}", None)
    monkeypatch.delattr(sys.modules["ideas"], idea.stem, raising=False)
    for other in IDEAS:
        if other != idea:
            runpy.run_path(str(other))


def test_the_core_trains_without_ideas(tmp_path):
    left_out = shutil.ignore_patterns(".*", "ideas", "tests", "runs", "smollm2", "__pycache__",
                                      "websites")
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=left_out)
    done = subprocess.run([sys.executable, "train.py", *TINIEST, "--out", "runs/r"], cwd=project,
                          env=ENV | {"PYTHONPATH": str(project)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(metrics(project / "runs/r")) == 1


def test_the_core_names_no_idea():
    core = [".", "models", "worlds", "worlds/webarena", "page"]
    files = [path for path in FILES if str(path.parent.relative_to(ROOT)) in core]
    files += (path for path in (ROOT / "page").iterdir() if path.suffix in (".js", ".css", ".html"))
    assert len(files) > 30
    for path in files:
        assert not re.search("gspo|gigpo|distill", path.read_text().lower()), path


SEGMENT = {"mask": torch.ones(1, 2, dtype=torch.bool), "num_sampled": torch.tensor([3])}


@pytest.mark.parametrize("function, settings, message", [
    (gigpo.advantage, {"compare": "ppo"}, "grpo or rloo, not ppo"),
    (distill.advantage, {"plus": "ppo"}, "none, grpo, rloo, reinforce_pp, not"),
    (gspo.loss, {"per": "token"}, "trajectory or turn, not token"),
    (gspo.loss, {}, "give --loss_args per=turn")])  # one segment of a longer trajectory
def test_what_an_idea_does_not_do_is_refused(function, settings, message):
    with pytest.raises(UserError, match=message):
        function(SEGMENT, **settings)


def test_shaping_and_a_discount_of_turns_do_not_go_together():
    flags = [*NO_RUN, *"--algo gigpo --env textcraft --shaping potential --algo_args".split()]
    parse_config([*flags, "gamma=1"])
    with pytest.raises(ValueError, match="--shaping needs --algo_args gamma=1"):
        parse_config([*flags, ""])


# ---- the ratio of a sequence or a turn ----


def gspo_loss(logprobs, old_logprobs, advantages, mask, *clips, per="trajectory"):
    part = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages,
            "mask": mask, "num_sampled": mask.sum(1), "turns": turn_numbers(mask) + 1}
    return gspo.loss(part, *clips, per=per)


@PER
def test_the_losses_of_gspo_equal_the_loop_and_so_do_their_gradients(per):
    g = torch.Generator().manual_seed(5)
    clipped = kept = 0
    for _ in range(20):
        mask = torch.rand(4, 9, generator=g) < 0.6
        mask[0] = False
        logp = (normal(g, 4, 9) - 2).requires_grad_()
        old = logp.detach() + 0.3 * normal(g, 4, 9)
        advantages = normal(g, 4, 9)
        loss, stats = gspo_loss(logp, old, advantages, mask, 0.05, 0.1, per=per)
        gradient, = torch.autograd.grad(loss.sum(), logp)

        expected, expected_gradient = torch.zeros(2, 4, 9, dtype=F64)
        for b in range(4):
            turns = turns_of(mask[b])
            for part in turns if per == "turn" else [sum(turns, [])]:
                for t in part:
                    ratio = math.exp(statistics.mean((logp - old)[b, part].tolist()))
                    a = advantages[b, t].item()
                    terms = ratio * a, min(max(ratio, 0.95), 1.1) * a
                    expected[b, t] = -min(terms)
                    expected_gradient[b, t] = -ratio * a if terms[0] <= terms[1] else 0.0
        close(loss.detach(), expected)
        close(gradient, expected_gradient)
        num_clipped = int((mask & (expected_gradient == 0)).sum())
        close(stats["clip_fraction"], num_clipped)
        clipped += num_clipped
        kept += int(mask.sum()) - num_clipped
    assert min(clipped, kept) > 50


@PER
def test_the_gradient_of_gspo_is_that_of_the_papers_ratio_of_a_sequence(per):
    """Eq. 5 of arXiv 2507.18071, through autograd: mean of min(s A, clip(s) A) over sequences. A
    row of one turn is a sequence in both kinds."""
    g = torch.Generator().manual_seed(6)
    lengths = [1, 4, 7, 2, 6]
    places = torch.arange(9)
    mask = (places > 0) & (places <= torch.tensor(lengths)[:, None])
    logp = (normal(g, 5, 9) - 2).requires_grad_()
    old = logp.detach() + 0.2 * normal(g, 5, 9)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5], dtype=F64)

    loss, _ = gspo_loss(logp, old, advantages[:, None], mask, 0.02, 0.02, per=per)
    loss = aggregate(loss, mask, "sequence")
    terms = []
    for b, length in enumerate(lengths):
        s = (logp - old)[b, 1:1 + length].mean().exp()
        terms.append(torch.min(s * advantages[b], s.clamp(0.98, 1.02) * advantages[b]))
    paper = -sum(terms) / len(terms)
    gradient, paper_gradient = (torch.autograd.grad(x, logp)[0] for x in (loss, paper))
    close(loss.detach(), paper.detach())
    close(gradient, paper_gradient)
    assert len({*(gradient != 0).any(1).tolist()}) == 2


@pytest.mark.parametrize("ratio, advantage, is_clipped", [
    (1.00039, 1.0, False), (1.00041, 1.0, True), (0.99971, -1.0, False), (0.99969, -1.0, True)])
def test_the_clip_is_that_of_the_paper_unless_it_is_given(ratio, advantage, is_clipped):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64)
    columns = logp, logp * 0, torch.tensor([[advantage]]), torch.tensor([[True]])
    assert gspo_loss(*columns)[1]["clip_fraction"] == is_clipped
    assert gspo_loss(*columns, 0.2, 0.2)[1]["clip_fraction"] == 0


@PER
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_results_are_in_float32_or_more_and_zero_where_nothing_was_sampled(dtype, shape, per):
    x, mask = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    loss, stats = gspo_loss(x, x, x, mask, per=per)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32)
    assert stats["clip_fraction"] == 0
    assert loss.shape == shape and not loss.any()
    of_turns = turn_advantage(x * 0, turn_numbers(mask), torch.zeros(shape[0], 0, dtype=torch.long))
    assert of_turns.dtype == torch.float32 and torch.equal(of_turns, mask.float())


@PER
@pytest.mark.parametrize("dirt", [NAN, math.inf, -math.inf])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt, per):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    term = {"gspo": lambda x, data: gspo_loss(x, data - 0.1 * mask, data, mask, per=per)[0]}
    check_outside_the_mask(term, mask, clean, torch.where(mask, clean, dirt))


@pytest.mark.parametrize("flags", [
    "--loss gspo --set aggregation=sequence", "--algo gigpo", "--loss gspo --loss_args per=turn",
    "--loss echo"])
def test_the_update_of_a_step_is_the_same_however_small_its_micro_batches(
        tiny, trajectories, flags):
    check_small_micro_batches(tiny, trajectories, flags)


def test_the_ratio_of_a_turn_may_be_that_of_one_segment(tmp_path):
    completed(*SMALL, "--agent", "window", "--agent_args", "keep=0", "--loss", "gspo",
              "--loss_args", "per=turn", "--steps", "1", "--out", tmp_path / "r")
    (row,) = metrics(tmp_path / "r")
    assert row["segments"] == row["turns"] and row["grad_norm"] > 0


OWN = """
def plain(part):
    return -part["logprobs"] * part["advantages"], {}

def mean(part):
    return plain(part)[0].mean(), {}
"""


def test_a_loss_of_ones_own_need_not_count_and_a_mean_is_refused(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    flags = (*SMALL, "--steps", "1", "--minibatches", "1", "--out", tmp_path / "r")
    completed(*flags, "--loss", f"{file}:plain")
    (row,) = metrics(tmp_path / "r")
    assert row["logprob_gap"] < 1e-5 and row["kl"] > 0
    shutil.rmtree(tmp_path / "r")
    assert "own.py:mean has to return" in refused(*flags, "--loss", f"{file}:mean")


# ---- credit by state ----


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("compare, one", [(grpo_advantage, grpo_of), (rloo_advantage, rloo_of)])
def test_the_returns_and_advantages_of_turns_equal_the_loops(gamma, compare, one):
    compared = 0
    for seed in range(60):
        g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        B, T = rng.randint(1, 7), rng.randint(1, 12)
        mask = torch.rand(B, T, generator=g) < rng.random()
        mask[0] &= seed % 3 > 0
        turns = [turns_of(row) for row in mask]
        rewards = torch.zeros(B, T, dtype=F64)
        for row, own in zip(rewards, turns):
            for turn in own:
                row[turn[-1]] = rng.choice([0.0, -0.05, 1.0])
                row[turn] -= rng.choice([0.0, 0.0, 0.0, 0.0, 0.25])  # a penalty on each token
        groups = torch.randint(4, (B, max(map(len, turns))), generator=g)
        valid = torch.rand(B, generator=g) < 0.8

        names = [(b, k) for b in range(B) for k in range(len(turns[b]))]
        returns = torch.zeros(groups.shape, dtype=F64)
        for b, k in names:  # sum_{j >= k} gamma^(j - k) r_j
            returns[b, k] = sum(gamma ** j * rewards[b, turn].sum()
                                for j, turn in enumerate(turns[b][k:]))
        close(turn_returns(rewards, turn_numbers(mask), gamma), returns)

        scores = [round(returns[name].item(), 9) for name in names]
        rows = scores, [groups[name].item() for name in names], [valid[b].item() for b, _ in names]
        advantages = torch.zeros(B, T, dtype=F64)
        for (b, k), advantage in zip(names, group_oracle(*rows, one)):
            advantages[b, turns[b][k]] = advantage
        found = turn_advantage(rewards, turn_numbers(mask), groups, valid, gamma, compare)
        close(found, advantages, 1e-5)
        compared += int((advantages != 0).sum())
    assert compared > 200


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_turn_rewards_in_another_order_give_exactly_no_advantage(dtype):
    """-0.05 twice and then 1 add up to another number than 1 and then -0.05 twice, and in float32
    0.01 + 0.05 is not 0.06."""
    mask = torch.tensor([[True, False] * 3] * 4)
    rewards = torch.zeros(4, 6, dtype=dtype)
    for b, order in enumerate(((-0.05, -0.05, 1.0), (1.0, -0.05, -0.05), (-0.05, 1.0, -0.05))):
        rewards[b, ::2] = torch.tensor(order, dtype=dtype)
    rewards[3, 4] = 0.9
    # Each first turn's return is 0.9, and no other turn is compared.
    groups = torch.tensor([[0, 1, 2], [0, 3, 4], [0, 5, 6], [0, 7, 8]])
    assert not turn_advantage(rewards, turn_numbers(mask), groups).any()
    assert len(set(turn_returns(rewards, turn_numbers(mask))[:, 0].tolist())) == 1
    rewards = torch.tensor([[0.01, 0.0, 0.05], [0.0, 0.0, 0.06]], dtype=dtype)
    mask = torch.tensor([[True, False, True]] * 2)
    assert not turn_advantage(rewards, turn_numbers(mask), torch.tensor([[0, 1], [0, 2]])).any()


def turn_trajectory(rewards, group=0, states=(), status=Status.DONE):
    """A trajectory with a turn of two tokens for each reward."""
    t = Trajectory(f"babyai_{group}", "babyai", group=group, status=status, states=list(states))
    for reward in rewards:
        t.append([5, 6])
        t.append([7, 8], [-1.0, -2.0])
        t.rewards[-1] = reward
    t.reward = math.fsum(rewards)
    return t


def test_equal_returns_give_turns_exactly_no_advantage():
    """Equal returns that came in another order; equal trajectories; and equal ones of which some
    were forced to their last reply: the turn before it earns what it does in the others."""
    orders = itertools.permutations((0.03, 0.08, 0.17, 0.34))
    step = update.gather_step([turn_trajectory(order) for order in orders])
    assert not turns.advantage(step)[:, 2:4].any()
    step = update.gather_step([turn_trajectory([0.1, 0.7], states=["a", "b"])] * 3)
    assert not gagpo.advantage(step).any()
    played = [turn_trajectory([0.0, 1.0], states=["a", str(number)]) for number in range(4)]
    for t in played[::2]:
        t.choices = {6: [[7, 8]]}
    for method in gagpo, gigpo, hgpo, turns:
        assert not method.advantage(update.gather_step(played), gamma=0.95)[:, 2:4].any()


# Three trajectories of an item, and two of another one. The failed one has the most turns.
TURNS = [
    turn_trajectory([0.0, 1.0], 4, ["a", "b"]),
    turn_trajectory([0.5, 0.0, 0.25], 4, ["a", "a", "b"]),
    turn_trajectory([0.0], 4, ["a"]),
    turn_trajectory([1.0], 9, ["b"]),
    turn_trajectory([0.0, 0.5], 9, [None, None]),
    turn_trajectory([0.0, 9.0, 0.0, 0.0], 9, ["b"] * 4, Status.ENV_ERROR),
]


@pytest.mark.parametrize("settings, gamma, one", [
    ("", 0.95, grpo_of), ("compare=rloo", 0.95, rloo_of), ("gamma=0.5", 0.5, grpo_of)])
def test_the_advantages_of_turns_are_those_of_the_loops(settings, gamma, one):
    """GiGPO adds the trajectory's advantage to that of each turn."""
    played = copy.deepcopy(TURNS)
    cfg = parse_config([*NO_RUN, "--algo", "gigpo", "--algo_args", settings])
    advantages = update.advantages_of(played, cfg, "cpu")["advantages"]
    valid = [t.status != "env_error" for t in played]
    of_trajectories = group_oracle([t.reward for t in played], [t.group for t in played], valid,
                                   one)
    turns = []  # (trajectory, turn), its return, its group and state, whether it counts
    for b, t in enumerate(played):
        rewards = t.rewards[3::4]
        for k, state in enumerate(t.states):
            value = sum(gamma ** j * reward for j, reward in enumerate(rewards[k:]))
            turns.append(((b, k), value, (t.group, state or (b, k)), valid[b]))
    names, *rows = zip(*turns)
    expected = torch.zeros_like(advantages)
    for (b, k), advantage in zip(names, group_oracle(*rows, one)):
        expected[b, 4 * k + 2:4 * k + 4] = advantage + of_trajectories[b]
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert (expected != 0).sum() > 8 and not advantages[5].any()
    for t, row in zip(played, advantages.tolist()):
        assert t.advantage == row[:len(t.tokens)]


def returns_of(t, gamma):
    """The discounted return from each turn of a `turn_trajectory` on."""
    rewards = t.rewards[3::4]
    return [sum(gamma ** j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]


def loop_of_turns(played, valid, gamma, one):
    rows = [((b, k), value, (t.group, k), valid[b]) for b, t in enumerate(played)
            for k, value in enumerate(returns_of(t, gamma))]
    names, *columns = zip(*rows)
    return dict(zip(names, group_oracle(*columns, one)))


def loop_of_hgpo(played, valid, gamma, one, history=2):
    total, weights = Counter(), Counter()
    for h in range(history + 1):
        rows = [((b, k), value, (t.group, *[s or (b, j) for j, s in enumerate(t.states)]
                                 [k - h : k + 1]), valid[b])
                for b, t in enumerate(played) for k, value in enumerate(returns_of(t, gamma))
                if k >= h]
        names, *columns = zip(*rows)
        for row, own in zip(rows, group_oracle(*columns, one)):
            if sum(other[2:] == row[2:] for other in rows) > 1 and row[3]:
                total[row[0]] += (h + 1) * own
                weights[row[0]] += h + 1
    return {name: total[name] / weights[name] for name in total}


def loop_of_gagpo(played, valid, gamma, one, lam=0.95):
    def value(b, k):
        t = played[b]
        if k == len(t.states):
            return 0.0
        same = [returns_of(other, gamma)[j] for n, other in enumerate(played)
                for j, state in enumerate(other.states)
                if state and state == t.states[k] and other.group == t.group and valid[n]]
        return statistics.mean(same or [returns_of(t, gamma)[k]])

    found = {}
    for b, t in enumerate(played):
        deltas = [r + gamma * value(b, k + 1) - value(b, k) for k, r in enumerate(t.rewards[3::4])]
        found |= {(b, k): valid[b] * sum((gamma * lam) ** j * d for j, d in enumerate(deltas[k:]))
                  for k in range(len(deltas))}
    if one is grpo_of:  # by the standard deviation of the tokens' advantages in the group
        for group in {t.group for t in played}:
            own = [name for name in found if played[name[0]].group == group and valid[name[0]]]
            spread = statistics.stdev([found[name] for name in own for _ in range(2)])
            found |= {name: found[name] / (spread + 1e-6) for name in own}
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("idea, loop, plain", [
    (turns, loop_of_turns, {"normalize_std": False}),
    (hgpo, loop_of_hgpo, {"normalize_std": False}),
    (gagpo, loop_of_gagpo, {"normalize": False})], ids=["turns", "hgpo", "gagpo"])
def test_credit_by_turn_and_state_is_that_of_the_loops(idea, loop, plain, gamma):
    valid = [t.status != "env_error" for t in TURNS]
    for settings, one in ({}, grpo_of), (plain, centred_of):
        found = idea.advantage(update.gather_step(TURNS), gamma=gamma, **settings)
        expected = torch.zeros_like(found)
        for (b, k), advantage in loop(TURNS, valid, gamma, one).items():
            expected[b, 4 * k + 2:4 * k + 4] = advantage
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (expected != 0).sum() >= 8 and not found[5].any()


def test_hgpo_without_history_is_gigpos_part_of_the_turns():
    step = update.gather_step(TURNS)
    states = gigpo.turns_by_state(TURNS)
    of_turns = turn_advantage(step.rewards, step.batch["turns"] - 1, states, step.valid, 0.95)
    torch.testing.assert_close(hgpo.advantage(step, history=0), of_turns)


def test_the_advantage_of_playing_on_is_the_difference_of_mean_returns():
    """Of the continuations after each distinct prefix, some fail: all of one prefix of the last."""
    played = [copy.deepcopy(t) for t in TURNS[:5]]
    for b, t in enumerate(played):
        t.tokens = [x + (100 * b if n > 3 else 0) for n, x in enumerate(t.tokens)]
        t.turns = len(t.states)
    asked, returns = [], {}

    def play(items, samples, episode_class):
        rng, found = random.Random(0), []
        (after,) = episode_class.args
        assert items == [t.item for t, _ in after]
        for group, (t, k) in enumerate(after):
            asked.append((t.item, tuple(t.tokens[: 4 * k + 2])))
            for sample in range(samples):
                new = copy.deepcopy(t)
                new.group, new.rewards[4 * k + 3 :] = group, [rng.random(), 0.0, 0.0]
                if (t is played[4] and k == 1) or (sample == 0 and k):
                    new.status = Status.ENV_ERROR
                else:
                    returns.setdefault(asked[-1], []).append(new.rewards[4 * k + 3])
                found.append(new)
        return found

    step = update.gather_step(played, play=play)
    found = vine.advantage(step, continuations=3)
    assert step.columns["continued_turns"] > 0 < step.columns["continued_env_error"] < 1
    assert len(asked) == len(set(asked)) == 2 + 1 + 2 + 1  # the first prompts are shared
    for b, t in enumerate(played):
        values = [returns.get((t.item, tuple(t.tokens[: 4 * k + 2]))) for k in range(t.turns)]
        values = [statistics.mean(v) if v else math.nan for v in values] + [0.0]
        for k in range(t.turns):
            expected = t.rewards[4 * k + 3] + values[k + 1] - values[k]
            expected = 0.0 if math.isnan(expected) else expected
            assert found[b, 4 * k + 2:4 * k + 4].tolist() == pytest.approx([expected] * 2)


def test_a_turn_of_a_tree_is_judged_by_the_leaves_that_follow_it():
    """The second branch fails. In `TURNS` a reply has two tokens, after two of its prompt."""
    played = [copy.deepcopy(t) for t in TURNS]
    for t in played:
        t.turns = len(t.states)
    grown = []  # (the trajectory, the turn before which it branches, the return)

    def play(items, samples, episode_class):
        (after,) = episode_class.args
        found = [copy.deepcopy(t) for t, _ in after]
        for n, (new, (t, k)) in enumerate(zip(found, after)):
            new.group, new.reward = n, 0.1 * n
            if n == 1:
                new.status = Status.ENV_ERROR
            else:
                grown.append((played.index(t), k, new.reward))
        return found

    step = update.gather_step(played, play=play)
    close(tree.advantage(step, branches=0), algos.grpo(step))
    found = tree.advantage(step, branches=2)
    leaves = [(b, 0, t.reward) for b, t in enumerate(played)] + grown
    trees, begins, returns = zip(*leaves)
    assert len(grown) == 2 + 2 + 1 + 1 + 2 - 1
    valid = [step.valid[b] for b in trees]
    within = [group_oracle(returns, groups, valid, grpo_of)
              for groups in (trees, [played[b].group for b in trees])]
    for b, t in enumerate(played):
        for k in range(t.turns):
            judges = [sum(rows[n] for rows in within) for n in range(len(leaves))
                      if trees[n] == b and (n == b or begins[n] > k)]
            expected = statistics.mean(judges) if step.valid[b] else 0.0
            assert found[b, 4 * k + 2:4 * k + 4].tolist() == pytest.approx([expected] * 2, abs=1e-5)


def test_a_run_counts_the_turns_that_it_plays_on(tmp_path):
    completed("--out", tmp_path / "r", *TINIEST, "--algo", "vine", "--algo_args",
              "continuations=2", "--steps", "2")
    for row in metrics(tmp_path / "r"):
        played = row["turns"] * row["trajectories"]
        assert row["trajectories"] <= row["continued_turns"] <= 2 * played * row["horizon"]
    assert "--kl_in" in refused("--out", tmp_path / "r2", *TINIEST, "--algo", "vine",
                                "--kl_coef", "0.1", "--kl_in", "reward")


@pytest.mark.parametrize("branches", ["0", "1"])
def test_a_cost_of_turns_is_taken_from_what_is_played_on_too(tmp_path, branches):
    """One turn, and no success: all returns are -0.2."""
    completed("--out", tmp_path / "r", *TINIEST, "--algo", "tree", "--algo_args",
              f"branches={branches}", "--set", "turn_cost=0.2", "--invalid_penalty", "0")
    played = read_trajectories(tmp_path / "r/trajectories/step_000000.jsonl")
    assert {t.reward for t in played} == {-0.2} and not any(any(t.advantage) for t in played)


# ---- the observations' tokens ----


def test_echo_adds_the_cross_entropy_of_what_follows_a_reply(tiny, trajectories):
    """Of the model's plain forward pass, over a loop. The second half of an episode is a segment:
    the observation that begins it does not count."""
    played = copy.deepcopy(trajectories)
    for t in played[:2]:
        spans = reply_spans(t.mask)
        t.starts = [0, spans[1][1]] if len(spans) > 2 else [0]
    played[2].status = Status.ENV_ERROR
    expected = []
    for t in played:
        if t.status == "env_error":
            continue
        for start, end in t.spans():
            ids = torch.tensor([t.tokens[start:end]])
            logp, _ = plain_logprobs(tiny[0], ids, torch.ones_like(ids, dtype=torch.bool))
            replied = False
            for n in range(end - start):
                if t.mask[start + n]:
                    replied = True
                elif replied:
                    expected.append(-logp[0, n].item())
    assert len({len(t.starts) for t in played}) == 2 and len(expected) > 50

    def row_of(played, flags):
        model = copy.deepcopy(tiny[0])
        cfg = parse_config([*NO_RUN, *f"--kl_coef 0 --minibatches 1 --loss {flags}".split()])
        batch = update.advantages_of(played, cfg, "cpu")
        return update.update(played, batch, cfg, 0, model, torch.optim.SGD(model.parameters(), 0.1))

    without, row = row_of(played, "ppo"), row_of(played, "echo --loss_args weight=0.5")
    assert row["observation_loss"] == pytest.approx(statistics.mean(expected), rel=1e-4)
    assert row["loss"] - without["loss"] == pytest.approx(0.5 * row["observation_loss"], rel=1e-4)
    assert row["grad_norm"] > 2 * without["grad_norm"] and "observation_loss" not in without
    assert row_of(trajectories, "echo")["logprob_gap"] < 1e-4  # of the replies alone


# ---- a teacher ----


def logprobs_of(model, tokens):
    """The log-prob of each token after the ones before it, by the plain forward pass."""
    with torch.no_grad():
        return plain_logprobs(model, torch.tensor([tokens]), torch.ones(1, len(tokens)))[0][0]


@pytest.mark.parametrize("plus", ["none", "rloo"])
def test_a_teacher_adds_its_log_prob_less_the_policys_to_each_tokens_advantage(
        trajectories, plus):
    teacher = random_model("qwen2")
    rl.set_compute_paths(teacher, rl.FASTEST)
    played = copy.deepcopy(trajectories)
    played[3].status = Status.ENV_ERROR
    for t in played:
        t.reward = t.rewards[-1] = 2.0 * t.sample
    cfg = parse_config([*NO_RUN, "--algo", "distill", "--algo_args",
                        f"teacher=other weight=0.5 plus={plus}", "--microbatch_tokens", "300"])
    advantages = update.advantages_of(played, cfg, "cpu", models={"teacher": teacher})["advantages"]
    for i, t in enumerate(played):
        expected = 0.5 * (logprobs_of(teacher, t.tokens) - torch.tensor(t.logprobs))
        if plus == "rloo" and i not in (2, 3):  # the group of the failed one has no other
            expected += 2.0 if t.sample else -2.0
        expected = torch.where(torch.tensor(t.mask), expected, 0.0) * (i != 3)
        torch.testing.assert_close(advantages[i, :len(t.tokens)], expected, atol=1e-3, rtol=1e-4)
        assert t.advantage == advantages[i, :len(t.tokens)].tolist()
    assert advantages.abs().max() > 1


def test_a_teacher_of_another_family_teaches_and_one_of_another_vocabulary_is_refused(
        tiny, tmp_path):
    model = random_model("llama")
    tokenizer = copy.deepcopy(tiny[1])
    for name in ("teacher", "stranger"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        tokenizer.add_tokens(["<other>"])
    args = ["--algo", "distill", "--kl_coef", "0", "--max_length", "2048", *TINIEST,
            "--out", tmp_path / "r", "--algo_args"]
    assert "another vocabulary than tiny" in refused(*args, f"teacher={tmp_path}/stranger")
    completed(*args, f"teacher={tmp_path}/teacher")
    (t, *_) = read_trajectories(tmp_path / "r/trajectories/step_000000.jsonl")
    expected = logprobs_of(model, t.tokens) - torch.tensor(t.logprobs)
    assert t.advantage == pytest.approx((expected * torch.tensor(t.mask)).tolist(), abs=1e-3)


# ---- mutual information ----


def test_mutual_information_is_that_of_a_small_channel():
    """Each prompt once, with each of its replies as often as its probability says: the mean is the
    mutual information, the double sum over prompts and replies."""
    mutual_information = information.mutual_information
    channel = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0, 0.25, 0.75]], dtype=F64)
    marginal = channel.mean(0).tolist()
    expected = sum(p / 3 * math.log(p / m) for row in channel.tolist()
                   for p, m in zip(row, marginal) if p)
    # The mean over all choices of a reply to each prompt, weighted by their probabilities.
    found = 0.0
    for z in itertools.product(range(3), repeat=3):
        weight = math.prod(channel[x, z[x]].item() for x in range(3))
        if weight:
            found += weight * mutual_information(channel[:, list(z)].T.log())
    assert 0.1 < expected < math.log(3)
    close(found, expected)
    # Replies that tell everything, replies that tell nothing, a single item.
    close(mutual_information(torch.eye(5).log()), math.log(5))
    assert mutual_information(torch.tensor([[-7.0] * 3, [-1.0] * 3, [-90.0] * 3])) == 0.0
    assert mutual_information(torch.tensor([[-3.0]])) == 0.0
    chosen = copy.deepcopy(TURNS[:1])
    chosen[0].choices = {2: [[1, 2], [3, 4]]}
    with pytest.raises(UserError, match="all tokens"):
        information.item_information(chosen, None)
    # Items that are compared within two kinds: replies that tell the kind alone, or the item, too.
    scores = torch.where(torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) > 0, 0.0, NAN)
    assert mutual_information(scores) == 0.0
    close(mutual_information(scores + torch.eye(4).log()), math.log(2))


def terms_of_information(model, own):
    """The oracle: log p(reply i | prompt i) - log mean_j p(reply i | prompt j) for the first reply
    of each of these trajectories, by the model's own forward pass."""
    spans = [reply_spans(t.mask)[0] for t in own]
    prompts = [t.tokens[:start] for t, (start, _) in zip(own, spans)]
    terms = []
    for i, (start, end) in enumerate(spans):
        reply = own[i].tokens[start:end]
        scores = [logprobs_of(model, prompt + reply)[len(prompt):].double().sum().item()
                  for prompt in prompts]
        terms.append(scores[i] - math.log(statistics.mean(map(math.exp, scores))))
    return terms


def test_the_information_of_a_step_is_that_of_each_first_reply_after_each_first_prompt(
        tiny, pool, monkeypatch):
    # Three items of one level, two of another one, and two without another of their category.
    items = ["babyai_8", "babyai_3", "babyai_48", "babyai_4", "babyai_43", "babyai_88",
             "textcraft_3"]
    played = rollout(*tiny, pool, items, 2, samples=2, max_tokens=8)
    first = played[::2]  # only the first sample of an item counts
    cfg = parse_config([*NO_RUN, "--microbatch_tokens", "300"])

    def found_in(played):
        return information.item_information(
            played, lambda batch: update.logprobs_of(tiny[0], batch, cfg))

    def expected(*groups):
        """Of the items of each of these groups, which are compared with each other."""
        terms = [term for own in groups for term in terms_of_information(tiny[0], own)]
        return {"babyai": pytest.approx(statistics.mean(terms), abs=1e-4)}

    three, two = [first[0], first[2], first[5]], [first[1], first[4]]
    assert found_in(played) == expected(three, two)
    assert 0.01 < found_in(played)["babyai"] < math.log(3)
    # The larger category comes first, and one item alone says nothing.
    monkeypatch.setattr(information, "MOST_ITEMS", 4)
    assert found_in(played) == expected(three)
    assert found_in([first[0], first[1], first[6]]) == {}
    # An item whose first sample never came to a reply.
    failed = Trajectory("babyai_8", "babyai", status=Status.ENV_ERROR)
    monkeypatch.setattr(information, "MOST_ITEMS", 3)
    assert found_in([failed, *played[1:]]) == expected([played[1], *three[1:]])


# ---- runs ----

def test_the_command_prints_the_information_of_each_checkpoints_next_step(tmp_path):
    """Of two steps the checkpoint of step 1 has a next step that was played."""
    out = tmp_path / "r"
    completed(*TINIEST, "--items_per_step", "6", "--steps", "2", "--save_every", "1", "--out", out)
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoints/step_000001").eval()
    by_category = {}
    for t in read_trajectories(out / "trajectories/step_000001.jsonl"):
        if t.sample == 0:
            by_category.setdefault(category_of(t.item), []).append(t)
    terms = [term for own in by_category.values() if len(own) > 1
             for term in terms_of_information(model, own)]
    shown = completed(out, script="ideas/information.py")
    assert terms and shown == f"step 1: babyai {statistics.mean(terms):.3f}\n"


@pytest.mark.parametrize("ideas, more", [
    ("gspo --algo gigpo --loss_args per=turn", ["--shard", "true"]),
    pytest.param("echo --algo vine", [], marks=pytest.mark.slow),
    pytest.param("gspo --algo distill --set aggregation=sequence --algo_args", [],
                 marks=pytest.mark.slow)])
def test_credit_by_state_and_a_teacher_are_those_of_one_process(tiny, ideas, more, tmp_path):
    flags = [*DEALT, "--items_per_step", "4", "--minibatches", "2", "--steps", "1", "--loss",
             *ideas.split()]
    has_teacher = "distill" in ideas
    if has_teacher:
        random_model("qwen2").save_pretrained(tmp_path / "teacher")
        tiny[1].save_pretrained(tmp_path / "teacher")
        flags.append(f"teacher={tmp_path}/teacher weight=0.01 plus=grpo")
    completed(*flags, "--out", tmp_path / "one")
    done = subprocess.run([*TWO_PROCESSES, "train.py", *flags, *more, "--out", tmp_path / "two"],
                          cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "two") == first_step(tmp_path / "one")
    (one,), (two,) = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("loss", "grad_norm", "clip_fraction", "reward", "success"):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name
    played = [read_trajectories(tmp_path / name / "trajectories/step_000000.jsonl")
              for name in ("one", "two")]
    assert any(any(t.advantage) for t in played[0])
    for t, other in zip(*played, strict=True):
        assert t.states == other.states and bool(t.states) == ("gigpo" in ideas)
        assert other.advantage == pytest.approx(t.advantage, abs=1e-3)


def test_a_step_of_training_keeps_to_its_device(monkeypatch, tiny):
    def information_of(trajectories, policy, cfg):
        return information.item_information(
            trajectories, lambda batch: update.logprobs_of(policy, batch, cfg))

    flags = "--algo gigpo --loss gspo --set aggregation=sequence"
    check_device(flags, ("padded", "padded"), monkeypatch, tiny, information_of)
