"""The files of ideas/ against slow and obvious implementations. The core needs none of them."""

import copy
import itertools
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, random_model, run_script
from test_algos import F64, NAN, check_outside_the_mask, close, group_oracle, grpo_of, normal
from test_algos import rloo_of, turns_of
from test_device import check_device
from test_parallel import DEALT, TWO_PROCESSES, first_step
from test_train import SMALL, metrics, read_jsonl, run
from test_update import check_small_micro_batches
from transformers import AutoModelForCausalLM

import rl
import update
from algos import aggregate, grpo_advantage, rloo_advantage
from config import parse_config
from envs import UserError, category_of
from ideas import distill, gigpo, gspo, information
from ideas.gigpo import turn_advantage, turn_returns
from rollout import rollout
from trajectory import Status, Trajectory, read_trajectories

NO_RUN = ["--out", "runs/never-made"]
IDEAS = sorted((ROOT / "ideas").glob("*.py"))
PER = ("trajectory", "turn")


@pytest.fixture(scope="module")
def trajectories(tiny, pool):
    return rollout(*tiny, pool, ["babyai_8", "babyai_50", "textcraft_3"], 3, samples=2,
                   max_tokens=8)


# ---- the core and its ideas ----


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project."""
    left_out = shutil.ignore_patterns(".*", "tests", "runs", "smollm2", "__pycache__", "websites")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "project", ignore=left_out)


def in_copy(project, *words):
    env = os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=project, env=env, capture_output=True,
                          text=True, timeout=300)


@pytest.mark.parametrize("idea", IDEAS, ids=lambda path: path.stem)
def test_each_idea_can_be_deleted(idea, project, tmp_path):
    others = [f"ideas.{path.stem}" for path in IDEAS if path != idea]
    top_level = [path.stem for path in ROOT.glob("*.py")]
    shutil.move(project / "ideas" / idea.name, tmp_path)
    try:
        done = in_copy(project, "-c", f"import {', '.join(others + top_level)}\n"
                                      "print(train.__file__)\n"
                                      f"envs.load_named('{idea.stem}', algos.ALGOS, 'advantage')")
    finally:
        shutil.move(tmp_path / idea.name, project / "ideas")
    assert done.stdout == f"{project}/train.py\n"
    assert f"there is no advantage '{idea.stem}'" in done.stderr.splitlines()[-1]


def test_the_core_trains_without_ideas(project, tmp_path):
    shutil.move(project / "ideas", tmp_path / "ideas")
    done = in_copy(project, "train.py", "--steps", "1", "--items_per_step", "2",
                   "--rollouts_per_item", "2", "--horizon", "2", "--out", tmp_path / "r")
    shutil.move(tmp_path / "ideas", project / "ideas")
    assert done.returncode == 0, done.stderr


def test_the_core_names_no_idea():
    files = [*ROOT.glob("*.py")]
    for folder in ("models", "worlds", "page"):
        files += [path for path in (ROOT / folder).rglob("*")
                  if path.suffix in (".py", ".js", ".css", ".html")]
    found = [(str(path), word) for path in files for word in ("gspo", "gigpo", "distill")
             if word in path.read_text().lower()]
    assert len(files) > 30 and not found


def test_settings_that_an_idea_does_not_know_are_refused():
    rollouts = [*NO_RUN, *"--algo gigpo --env textcraft --shaping potential".split()]
    with pytest.raises(ValueError, match="--shaping needs --algo_args gamma=1"):
        parse_config(rollouts)
    parse_config([*rollouts, "--algo_args", "gamma=1"])
    mask = torch.ones(1, 2, dtype=torch.bool)
    part = {"mask": mask, "num_sampled": torch.tensor([3])}  # one segment of a longer trajectory
    for call, message in (
            (lambda: gigpo.advantage(None, compare="ppo"), "grpo or rloo, not ppo"),
            (lambda: distill.advantage(None, plus="ppo"), "none, grpo, rloo, reinforce_pp, not"),
            (lambda: gspo.loss(part, per="token"), "trajectory or turn, not token"),
            (lambda: gspo.loss(part), "give --loss_args per=turn")):
        with pytest.raises(UserError, match=message):
            call()


# ---- the ratio of a sequence or a turn ----


def gspo_loss(logprobs, old_logprobs, advantages, mask, *clips, per="trajectory"):
    part = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages,
            "mask": mask, "num_sampled": mask.sum(1)}
    return gspo.loss(part, *clips, per=per)


@pytest.mark.parametrize("per", PER)
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
        num_clipped = 0
        for b in range(4):
            turns = turns_of(mask[b])
            for part in turns if per == "turn" else [sum(turns, [])]:
                for t in part:
                    ratio = math.exp(statistics.mean((logp - old)[b, part].tolist()))
                    limited = min(max(ratio, 0.95), 1.1)
                    a = advantages[b, t].item()
                    expected[b, t] = -min(ratio * a, limited * a)
                    if ratio * a <= limited * a:
                        expected_gradient[b, t] = -ratio * a
                    num_clipped += ratio * a > limited * a
        close(loss.detach(), expected)
        close(gradient, expected_gradient)
        close(stats["clip_fraction"], num_clipped)
        clipped += num_clipped
        kept += int(mask.sum()) - num_clipped
    assert min(clipped, kept) > 50


@pytest.mark.parametrize("per", PER)
def test_the_gradient_of_gspo_is_that_of_the_papers_ratio_of_a_sequence(per):
    """Eq. 5 of arXiv 2507.18071, through autograd: mean of min(s A, clip(s) A) over sequences. A
    row of one turn is a sequence in both kinds."""
    g = torch.Generator().manual_seed(6)
    lengths = [1, 4, 7, 2, 6]
    mask = torch.arange(9) - 1 < torch.tensor(lengths)[:, None]
    mask[:, 0] = False
    logp = (normal(g, 5, 9) - 2).requires_grad_()
    old = logp.detach() + 0.2 * normal(g, 5, 9)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5], dtype=F64)

    loss, _ = gspo_loss(logp, old, advantages[:, None], mask, 0.02, 0.02, per=per)
    loss = aggregate(loss, mask, "sequence")
    gradient, = torch.autograd.grad(loss, logp)
    terms = []
    for b, length in enumerate(lengths):
        s = (logp - old)[b, 1:1 + length].mean().exp()
        terms.append(torch.min(s * advantages[b], s.clamp(0.98, 1.02) * advantages[b]))
    paper = -sum(terms) / len(terms)
    paper_gradient, = torch.autograd.grad(paper, logp)
    close(loss.detach(), paper.detach())
    close(gradient, paper_gradient)
    has_gradient = (gradient != 0).any(1)
    assert has_gradient.any() and not has_gradient.all()


@pytest.mark.parametrize("ratio, advantage, is_clipped", [
    (1.00039, 1.0, False), (1.00041, 1.0, True), (0.99971, -1.0, False), (0.99969, -1.0, True)])
@pytest.mark.parametrize("per", PER)
def test_the_clip_is_that_of_the_paper_unless_it_is_given(per, ratio, advantage, is_clipped):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64)
    columns = logp, logp * 0, torch.tensor([[advantage]]), torch.tensor([[True]])
    assert gspo_loss(*columns, per=per)[1]["clip_fraction"] == is_clipped
    assert gspo_loss(*columns, 0.2, 0.2, per=per)[1]["clip_fraction"] == 0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_results_are_in_float32_or_more_and_zero_where_nothing_was_sampled(dtype, shape):
    x, mask = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    for per in PER:
        loss, stats = gspo_loss(x, x, x, mask, per=per)
        assert loss.dtype == (F64 if dtype == F64 else torch.float32) and stats["tokens"] == 0
        assert loss.shape == shape and not loss.any()
    groups = torch.zeros(shape[0], 0, dtype=torch.long)
    of_turns = turn_advantage(x * 0, mask, groups)
    assert of_turns.dtype == torch.float32 and of_turns.tolist() == mask.float().tolist()


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dirt", [NAN, math.inf, -math.inf])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt, per):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    term = {"gspo": lambda x, data: gspo_loss(x, data - 0.1 * mask, data, mask, per=per)[0]}
    check_outside_the_mask(term, mask, clean, torch.where(mask, clean, dirt))


@pytest.mark.parametrize("flags", [
    "--loss gspo --set aggregation=sequence", "--algo gigpo", "--loss gspo --loss_args per=turn"])
def test_the_update_of_a_step_is_the_same_however_small_its_micro_batches(
        tiny, trajectories, flags):
    check_small_micro_batches(tiny, trajectories, flags)


def test_the_ratio_of_a_turn_may_be_that_of_one_segment(tmp_path):
    done = run(*SMALL, "--agent", "window", "--agent_args", "keep=0", "--loss", "gspo",
               "--loss_args", "per=turn", "--steps", "1", "--out", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    (row,) = metrics(tmp_path / "r")
    assert row["segments"] == row["turns"] and row["grad_norm"] > 0


# ---- credit by state ----


def random_turns(seed):
    """Rewards of turns and now and then of tokens, the mask and its turns, groups of turns, valid
    rows."""
    g = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    B, T = rng.randint(1, 7), rng.randint(1, 12)
    mask = torch.rand(B, T, generator=g) < rng.random()
    mask[0] &= seed % 3 > 0
    turns = [turns_of(row) for row in mask]
    rewards = torch.zeros(B, T, dtype=F64)
    for b, own in enumerate(turns):
        for turn in own:
            rewards[b, turn[-1]] = rng.choice([0.0, -0.05, 1.0])
            if rng.random() < 0.2:  # a penalty on each token
                rewards[b, turn] -= 0.25
    K = max(map(len, turns))
    valid = torch.rand(B, generator=g) < 0.8
    return rewards, mask, turns, torch.randint(4, (B, K), generator=g), valid


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_returns_and_advantages_of_turns_equal_the_loops(gamma):
    compared = 0
    for seed in range(60):
        rewards, mask, turns, groups, valid = random_turns(seed)
        returns = torch.zeros(groups.shape, dtype=F64)
        names = [(b, k) for b, own in enumerate(turns) for k in range(len(own))]
        for b, k in names:  # sum_{j >= k} gamma^(j - k) r_j
            returns[b, k] = sum(gamma ** j * rewards[b, turn].sum()
                                for j, turn in enumerate(turns[b][k:]))
        close(turn_returns(rewards, mask, gamma), returns)

        scores = [round(returns[name].item(), 9) for name in names]
        rows = scores, [groups[name].item() for name in names], [valid[b].item() for b, _ in names]
        for compare, one in ((grpo_advantage, grpo_of), (rloo_advantage, rloo_of)):
            advantages = torch.zeros(mask.shape, dtype=F64)
            for (b, k), advantage in zip(names, group_oracle(*rows, one)):
                advantages[b, turns[b][k]] = advantage
                compared += advantage != 0
            close(turn_advantage(rewards, mask, groups, valid, gamma, compare), advantages)
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
    assert not turn_advantage(rewards, mask, groups).any()
    assert len(set(turn_returns(rewards, mask)[:, 0].tolist())) == 1
    rewards = torch.tensor([[0.01, 0.0, 0.05], [0.0, 0.0, 0.06]], dtype=dtype)
    mask = torch.tensor([[True, False, True]] * 2)
    assert not turn_advantage(rewards, mask, torch.tensor([[0, 1], [0, 2]])).any()


def turn_trajectory(rewards, group=0, states=(), status=Status.DONE):
    """A trajectory with a turn of two tokens for each reward."""
    t = Trajectory(f"babyai_{group}", "babyai", group=group, status=status, states=list(states))
    for reward in rewards:
        t.append([5, 6])
        t.append([7, 8], [-1.0, -2.0])
        t.rewards[-1] = reward
    t.reward = math.fsum(rewards)
    return t


# Three trajectories of an item, and two of another one. The failed one has the most turns.
TURNS = [
    turn_trajectory([0.0, 1.0], 4, ["a", "b"]),
    turn_trajectory([0.5, 0.0, 0.25], 4, ["a", "a", "b"]),
    turn_trajectory([0.0], 4, ["a"]),
    turn_trajectory([1.0], 9, ["b"]),
    turn_trajectory([0.0, 0.0], 9, [None, None]),
    turn_trajectory([0.0, 9.0, 0.0, 0.0], 9, ["b"] * 4, Status.ENV_ERROR),
]


@pytest.mark.parametrize("settings, gamma, one", [
    ("", 0.95, grpo_of), ("compare=rloo", 0.95, rloo_of), ("gamma=0.5", 0.5, grpo_of)])
def test_the_advantages_of_turns_are_those_of_the_loops(settings, gamma, one):
    def compare(value, values):
        return one(value, values) if len(set(values)) > 1 else 0.0

    played = copy.deepcopy(TURNS)
    cfg = parse_config([*NO_RUN, "--algo", "gigpo", "--algo_args", settings])
    advantages = update.advantages_of(played, cfg, "cpu")["advantages"]
    valid = [t for t in played if t.status != "env_error"]
    turns = []  # (trajectory, turn, its group and state, its return)
    for b, t in enumerate(played):
        rewards = t.rewards[3::4]
        for k in range(len(rewards) if t in valid else 0):
            value = sum(gamma ** j * reward for j, reward in enumerate(rewards[k:]))
            turns.append((b, k, (t.group, t.states[k] or (b, k)), value))
    expected = torch.zeros_like(advantages)
    for b, k, name, value in turns:
        advantage = compare(value, [other for *_, named, other in turns if named == name])
        # GiGPO adds the trajectory's advantage.
        advantage += compare(played[b].reward,
                             [t.reward for t in valid if t.group == played[b].group])
        expected[b, 4 * k + 2:4 * k + 4] = advantage
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert (expected != 0).sum() > 8 and not advantages[5].any()
    for t, row in zip(played, advantages.tolist()):
        assert t.advantage == row[:len(t.tokens)]


# ---- a teacher ----


def plain_logprobs(model, tokens):
    """The log-prob of each token after the ones before it; 0 for the first one."""
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    return torch.cat([torch.zeros(1), logp[range(len(tokens) - 1), tokens[1:]]])


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
        expected = 0.5 * (plain_logprobs(teacher, t.tokens) - torch.tensor(t.logprobs))
        if plus == "rloo" and i not in (2, 3):  # the group of the failed one has no other
            expected += 2.0 if t.sample else -2.0
        expected = torch.where(torch.tensor(t.mask), expected, 0.0) * (i != 3)
        torch.testing.assert_close(advantages[i, :len(t.tokens)], expected, atol=1e-3, rtol=1e-4)
        assert t.advantage == advantages[i, :len(t.tokens)].tolist()
    assert advantages.abs().max() > 1


def test_a_teacher_of_another_family_teaches_and_one_of_another_vocabulary_is_refused(
        tiny, tmp_path):
    model = random_model("llama", vocab_size=tiny[0].config.vocab_size)
    tokenizer = copy.deepcopy(tiny[1])
    for name in ("teacher", "stranger"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        tokenizer.add_tokens(["<other>"])
    args = ["--algo", "distill", "--kl_coef", "0", "--max_length", "2048", *SMALL, "--steps", "1",
            "--out", str(tmp_path / "r"), "--algo_args"]
    refused = run(*args, f"teacher={tmp_path}/stranger")
    assert refused.returncode == 2
    assert refused.stderr == (f"train.py: teacher {tmp_path}/stranger has another vocabulary "
                              "than tiny\n")
    done = run(*args, f"teacher={tmp_path}/teacher")
    assert done.returncode == 0, done.stderr
    (t, *_) = read_trajectories(tmp_path / "r/trajectories/step_000000.jsonl")
    expected = plain_logprobs(model, t.tokens) - torch.tensor(t.logprobs)
    assert t.advantage == pytest.approx((expected * torch.tensor(t.mask)).tolist(), abs=1e-3)


# ---- mutual information ----


def test_mutual_information_is_that_of_a_small_channel():
    """Each prompt once, with each of its replies as often as its probability says: the mean is the
    mutual information, the double sum over prompts and replies."""
    mutual_information = information.mutual_information
    channel = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0, 0.25, 0.75]], dtype=F64)
    marginal = channel.mean(0)
    expected = 0.0
    for row in channel.tolist():
        for p, m in zip(row, marginal.tolist()):
            expected += p / 3 * math.log(p / m) if p else 0.0
    # The mean over all choices of a reply to each prompt, weighted by their probabilities.
    found = 0.0
    for z in itertools.product(range(3), repeat=3):
        weight = math.prod(channel[x, z[x]].item() for x in range(3))
        if weight:
            scores = channel[:, list(z)].T.log()  # of reply z[i] after prompt j
            found += weight * mutual_information(scores)
    assert 0.1 < expected < math.log(3)
    close(found, expected)
    # Replies that tell everything, replies that tell nothing, a single item.
    close(mutual_information(torch.eye(5).log()), math.log(5))
    assert mutual_information(torch.tensor([[-7.0] * 3, [-1.0] * 3, [-90.0] * 3])) == 0.0
    assert mutual_information(torch.tensor([[-3.0]])) == 0.0
    # Items that are compared within two kinds: replies that tell the kind alone, or the item, too.
    nan = [[0.0, 0.0, NAN, NAN], [0.0, 0.0, NAN, NAN], [NAN, NAN, 0.0, 0.0], [NAN, NAN, 0.0, 0.0]]
    scores = torch.tensor(nan)
    assert mutual_information(scores) == 0.0
    close(mutual_information(scores + torch.eye(4).log()), math.log(2))


def terms_of_information(model, own):
    """The oracle: log p(reply i | prompt i) - log mean_j p(reply i | prompt j) for the first reply
    of each of these trajectories, by the model's own forward pass."""
    prompts, replies = [], []
    for t in own:
        start = t.mask.index(True)
        end = start
        while end < len(t.mask) and t.mask[end]:
            end += 1
        prompts.append(t.tokens[:start])
        replies.append(t.tokens[start:end])
    terms = []
    for i, reply in enumerate(replies):
        scores = [plain_logprobs(model, prompt + reply)[len(prompt):].double().sum().item()
                  for prompt in prompts]
        terms.append(scores[i] - math.log(sum(map(math.exp, scores)) / len(scores)))
    return terms


def test_the_information_of_a_step_is_that_of_each_first_reply_after_each_first_prompt(
        tiny, pool, monkeypatch):
    # Three items of one level, two of another one, and two without another of their category.
    items = ["babyai_8", "babyai_3", "babyai_48", "babyai_4", "babyai_43", "babyai_88",
             "textcraft_3"]
    played = rollout(*tiny, pool, items, 2, samples=2, max_tokens=8)
    cfg = parse_config([*NO_RUN, "--microbatch_tokens", "300"])
    expected = partial(terms_of_information, tiny[0])

    def found_in(played):
        return information.item_information(
            played, lambda batch: update.logprobs_of(tiny[0], batch, cfg))

    def first_samples(*groups):
        return [played[2 * group] for group in groups]

    # Only the first sample of an item counts.
    three = expected(first_samples(0, 2, 5))
    two = expected(first_samples(1, 4))
    found = found_in(played)
    assert found == {"babyai": pytest.approx(statistics.mean(three + two), abs=1e-4)}
    assert 0.01 < found["babyai"] < math.log(3)
    # The larger category comes first, and one item alone says nothing.
    monkeypatch.setattr(information, "MOST_ITEMS", 4)
    assert found_in(played) == {"babyai": pytest.approx(statistics.mean(three), abs=1e-4)}
    # An item whose first sample never came to a reply.
    failed = Trajectory("babyai_8", "babyai", status=Status.ENV_ERROR)
    monkeypatch.setattr(information, "MOST_ITEMS", 3)
    three = expected([played[1], *first_samples(2, 5)])
    found = found_in([failed, *played[1:]])
    assert found == {"babyai": pytest.approx(statistics.mean(three), abs=1e-4)}
    assert found_in(first_samples(0, 1, 6)) == {}


# ---- runs ----

def test_the_command_prints_the_information_of_each_checkpoints_next_step(tmp_path):
    out = tmp_path / "r"
    done = run("--out", str(out), *SMALL, "--save_every", "1")
    assert done.returncode == 0, done.stderr
    done = run_script("ideas/information.py", out)
    assert done.returncode == 0, done.stderr
    # Step 2: keep=2 leaves the checkpoints of steps 2 and 3, and step 3 is not played.
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoints/step_000002").eval()
    by_category = {}
    for t in read_trajectories(out / "trajectories/step_000002.jsonl"):
        if t.sample == 0:
            by_category.setdefault(category_of(t.item), []).append(t)
    terms = [term for own in by_category.values() if len(own) > 1
             for term in terms_of_information(model, own)]
    assert terms and done.stdout == f"step 2: babyai {statistics.mean(terms):.3f}\n"


@pytest.mark.parametrize("ideas, more", [
    ("--algo gigpo --loss_args per=turn", ["--shard", "true"]),
    pytest.param("--algo distill --set aggregation=sequence --algo_args", [],
                 marks=pytest.mark.slow)])
def test_credit_by_state_and_a_teacher_are_those_of_one_process(tiny, ideas, more, tmp_path):
    teacher = random_model("qwen2", vocab_size=tiny[0].config.vocab_size)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny[1].save_pretrained(tmp_path / "teacher")
    flags = [*DEALT, "--items_per_step", "4", "--minibatches", "2", "--loss", "gspo",
             *ideas.split()]
    has_teacher = "distill" in ideas
    if has_teacher:
        flags.append(f"teacher={tmp_path}/teacher weight=0.01 plus=grpo")
    done = run(*flags, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    done = run(*flags, *more, "--out", str(tmp_path / "two"),
               launcher=(*TWO_PROCESSES, "train.py"))
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "two") == first_step(tmp_path / "one")
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("loss", "grad_norm", "clip_fraction", "reward", "success"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-5), name
    played = [read_jsonl(tmp_path / name / "trajectories/step_000000.jsonl")
              for name in ("one", "two")]
    assert any(any(t["advantage"]) for t in played[0])
    for t, other in zip(*played, strict=True):
        assert t["states"] == other["states"] and bool(t["states"]) != has_teacher
        assert other["advantage"] == pytest.approx(t["advantage"], abs=1e-3)


def test_a_step_of_training_keeps_to_its_device(monkeypatch, tiny):
    def information_of(trajectories, policy, cfg):
        return information.item_information(
            trajectories, lambda batch: update.logprobs_of(policy, batch, cfg))

    flags = "--algo gigpo --loss gspo --set aggregation=sequence"
    check_device(flags, ("padded", "padded"), monkeypatch, tiny, information_of)
