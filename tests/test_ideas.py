"""The files of ideas/ against slow and obvious implementations. The core needs none of them."""

import copy
import itertools
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
from functools import partial

import pytest
import test_update
import torch
from conftest import ROOT, random_model, run_script
from test_algos import F64, NAN, check_outside_the_mask, close, group_oracle, grpo_of, normal
from test_algos import rloo_of, turns_of
from test_device import check_device
from test_parallel import DEALT, TWO_PROCESSES, first_step
from test_train import SMALL, metrics, read_jsonl, run
from transformers import AutoModelForCausalLM

import rl
import train
import update
from algos import aggregate, grpo_advantage, rloo_advantage
from config import parse_config
from envs import category_of
from ideas import gspo, information
from ideas.gigpo import turn_advantage, turn_returns, turns_by_state
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
def test_each_idea_can_be_deleted(idea, project):
    kept = [f"ideas.{path.stem}" for path in IDEAS if path != idea]
    top_level = [path.stem for path in ROOT.glob("*.py")]
    file = project / "ideas" / idea.name
    source = file.read_text()
    file.unlink()
    try:
        done = in_copy(project, "-c", f"import {', '.join(kept + top_level)}\n"
                                      "print(train.__file__)\n"
                                      f"envs.load_named('{idea.stem}', algos.ALGOS, 'advantage')")
        assert done.stdout == f"{project}/train.py\n"
        last = done.stderr.splitlines()[-1]
        assert f"there is no advantage '{idea.stem}'" in last
    finally:
        file.write_text(source)


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


@pytest.mark.parametrize("flags, says", [
    ("--algo gigpo --rollouts_per_item 1", "--rollouts_per_item 2 or more"),
    ("--algo gigpo --env textcraft --shaping potential", "--shaping needs --algo_args gamma=1"),
    ("--algo gspo", "there is no advantage 'gspo'"),
    ("--loss gigpo", "there is no loss 'gigpo'"),
    ("--loss gspo --loss_args clip=0.2", "clip_low"),
])
def test_flags_that_an_idea_cannot_take_are_refused_in_one_line(flags, says):
    with pytest.raises(ValueError) as error:
        parse_config([*NO_RUN, *flags.split()])
    assert says in str(error.value) and "\n" not in str(error.value)
    parse_config([*NO_RUN, *"--algo gigpo --env textcraft --shaping potential --algo_args".split(),
                  "gamma=1"])


@pytest.mark.parametrize("flags, says", [
    ("--algo gigpo --algo_args compare=ppo", "gigpo compares by grpo or rloo, not ppo"),
    ("--algo distill --algo_args plus=ppo", "distill adds none, grpo, rloo, reinforce_pp, not ppo"),
    ("--loss gspo --loss_args per=token", "gspo has the ratio per trajectory or turn, not token"),
    ("--loss gspo --agent window --agent_args keep=0", "give --loss_args per=turn"),
])
def test_what_an_idea_finds_wrong_in_a_step_is_one_line(flags, says, tmp_path):
    flags = flags.replace("plus=ppo", "plus=ppo,teacher=tiny").split()
    flags = [flag.replace(",", " ") for flag in flags]
    done = run(*SMALL, *flags, "--out", tmp_path / "r")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert says in line and "Traceback" not in done.stderr


# ---- the ratio of a sequence or a turn ----


def gspo_loss(logprobs, old_logprobs, advantages, mask, *clips, per="trajectory"):
    part = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages,
            "mask": mask}
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
            for t in [t for turn in turns for t in turn]:
                if per == "trajectory":
                    of_ratio = [i for turn in turns for i in turn]
                else:
                    of_ratio, = [turn for turn in turns if t in turn]
                ratio = math.exp(statistics.mean((logp - old)[b, i].item() for i in of_ratio))
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


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dirt", [NAN, math.inf, -math.inf])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(dirt, per):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.tensor([[-1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    term = {"gspo": lambda x, data: gspo_loss(x, data - 0.1 * mask, data, mask, per=per)[0]}
    check_outside_the_mask(term, mask, clean, torch.where(mask, clean, dirt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_results_are_in_float32_or_more(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    mask = torch.ones(2, 3, dtype=torch.bool)
    expected = F64 if dtype == F64 else torch.float32
    assert {gspo_loss(x, x, x, mask, per=per)[0].dtype for per in PER} == {expected}
    of_turns = turn_returns(x, mask), turn_advantage(x, mask, torch.arange(2)[:, None])
    assert [result.dtype for result in of_turns] == [torch.float32] * 2


@pytest.mark.parametrize("per", PER)
def test_an_update_takes_the_step_of_the_loss_that_it_is_given(tiny, trajectories, per):
    """The oracle: the loss of the whole batch, on the model's own forward pass. The recorded
    log-probs are not the policy's, so that the ratios differ."""
    cfg = parse_config([*NO_RUN, "--minibatches", "1", "--microbatch_tokens", "1", "--loss", "gspo",
                        "--loss_args", f"per={per}", "--set", "max_grad_norm=1e9", "--kl_coef",
                            "0"])
    generator = torch.Generator().manual_seed(0)
    played = copy.deepcopy(trajectories)
    for t in played:
        noise = torch.randn(len(t.tokens), generator=generator) * 0.3 * torch.tensor(t.mask)
        t.logprobs = (torch.tensor(t.logprobs) + noise).tolist()
    batch = update.collate(played, advantages=[1.5 - i for i in range(len(played))])
    model = copy.deepcopy(tiny[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = update.update(played, batch, cfg, 0, model, optimizer)

    plain = copy.deepcopy(tiny[0])
    logp = torch.log_softmax(plain(batch["ids"]).logits[:, :-1], -1)
    logp = logp.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    old, advantages, mask = (batch[name][:, 1:] for name in ("old_logprobs", "advantages", "mask"))
    losses, _ = gspo_loss(logp, old, advantages, mask, per=per)
    loss = losses.sum() / mask.sum()
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for p, q, before in zip(model.parameters(), plain.parameters(), tiny[0].parameters()):
        torch.testing.assert_close(p, before - q.grad, atol=1e-5, rtol=0)
    assert max(q.grad.abs().max() for q in plain.parameters()) > 1e-3


@pytest.mark.parametrize("flags", [
    "--loss gspo --set aggregation=sequence", "--algo gigpo", "--loss gspo --loss_args per=turn"])
def test_the_update_of_a_step_is_the_same_however_small_its_micro_batches(
        tiny, trajectories, flags):
    test_update.check_small_micro_batches(tiny, trajectories, flags.split())


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


def returns_oracle(rewards, turns, gamma):
    """The return from each turn of each row on: sum_{j >= k} gamma^(j - k) r_j."""
    by_turn = [[rewards[b, turn].sum().item() for turn in own] for b, own in enumerate(turns)]
    return [[sum(gamma ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))]
            for own in by_turn]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_returns_and_advantages_of_turns_equal_the_loops(gamma):
    compared = 0
    for seed in range(60):
        rewards, mask, turns, groups, valid = random_turns(seed)
        expected = returns_oracle(rewards, turns, gamma)
        K = groups.shape[1]
        close(turn_returns(rewards, mask, gamma),
              torch.tensor([own + [0.0] * (K - len(own)) for own in expected], dtype=F64))

        names = [(b, k) for b, own in enumerate(turns) for k in range(len(own))]
        scores = [round(expected[b][k], 9) for b, k in names]
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


def test_a_trajectory_that_is_left_out_may_have_the_most_turns():
    """Its mask may be empty, so that the groups have more columns than there are turns."""
    mask = torch.tensor([[True, False, False], [True, False, False], [False, False, False]])
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    groups = torch.tensor([[0, -1], [0, -1], [0, 1]])
    advantages = turn_advantage(rewards, mask, groups, torch.tensor([True, True, False]))
    half = 0.5 * math.sqrt(2)
    close(advantages, [[half, 0, 0], [-half, 0, 0], [0, 0, 0]], 1e-5)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_turns_of_nothing_have_no_advantage_and_no_loss(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    groups = torch.zeros(shape[0], 0, dtype=torch.long)
    nothing = torch.zeros(shape)
    assert turn_advantage(nothing, mask, groups).tolist() == mask.float().tolist()
    for per in PER:
        loss, stats = gspo_loss(nothing, nothing, nothing, mask, per=per)
        assert loss.shape == shape and stats["tokens"] == 0


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


def test_turns_are_compared_by_state_within_an_item_alone():
    def pairs(ids):
        """The turns (row, turn) of each group of at least two."""
        groups = {}
        for b, t in enumerate(TURNS):
            for k in range(t.mask.count(True) // 2):
                groups.setdefault(ids[b, k].item(), []).append((b, k))
        return sorted(group for group in groups.values() if len(group) > 1)

    assert pairs(turns_by_state(TURNS)) == [
        [(0, 0), (1, 0), (1, 1), (2, 0)], [(0, 1), (1, 2)],
        [(3, 0), (5, 0), (5, 1), (5, 2), (5, 3)]]
    nothing = Trajectory("babyai_1", "babyai", tokens=[5], mask=[False])
    assert turns_by_state([nothing]).shape == (1, 0)


@pytest.mark.parametrize("settings, gamma, one", [
    ("", 0.95, grpo_of), ("compare=rloo", 0.95, rloo_of), ("gamma=0.5", 0.5, grpo_of)])
def test_the_advantages_of_turns_are_those_of_the_loops(settings, gamma, one):
    def compare(value, values):
        return one(value, values) if len(set(values)) > 1 else 0.0

    played = copy.deepcopy(TURNS)
    cfg = parse_config([*NO_RUN, "--algo", "gigpo", "--algo_args", settings])
    advantages = update.advantages_of(played, cfg, "cpu")["advantages"]
    valid = [t for t in played if t.status != "env_error"]
    returns = {}  # group and state -> the returns of its turns
    of_turn = []  # (trajectory, turn, name of its group, return)
    for t in valid:
        rewards = t.rewards[3::4]
        for k in range(len(rewards)):
            name = t.group, t.states[k] or (id(t), k)
            value = sum(gamma ** j * reward for j, reward in enumerate(rewards[k:]))
            returns.setdefault(name, []).append(value)
            of_turn.append((t, k, name, value))
    expected = torch.zeros_like(advantages)
    for t, k, name, value in of_turn:
        advantage = compare(value, returns[name])
        # GiGPO adds the trajectory's advantage.
        advantage += compare(t.reward, [other.reward for other in valid
                                        if other.group == t.group])
        expected[played.index(t), 4 * k + 2:4 * k + 4] = advantage
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert (expected != 0).sum() > 8 and not advantages[5].any()
    for t, row in zip(played, advantages.tolist()):
        assert t.advantage == row[:len(t.tokens)]


# ---- a teacher ----


@pytest.fixture(scope="module")
def teacher():
    """Another model with the vocabulary of the tiny one."""
    model = random_model("qwen2")
    rl.set_compute_paths(model, rl.FASTEST)
    return model


def plain_logprobs(model, tokens):
    """The log-prob of each token after the ones before it; 0 for the first one."""
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    return torch.cat([torch.zeros(1), logp[range(len(tokens) - 1), tokens[1:]]])


@pytest.mark.parametrize("plus", ["none", "rloo"])
def test_a_teacher_adds_its_log_prob_less_the_policys_to_each_tokens_advantage(
        trajectories, teacher, plus):
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
    for name in ("teacher", "stranger"):
        # The tiny model has more rows than its tokenizer has tokens.
        random_model("llama", vocab_size=tiny[0].config.vocab_size).save_pretrained(tmp_path / name)
        tokenizer = copy.deepcopy(tiny[1])
        if name == "stranger":
            tokenizer.add_tokens(["<other>"])
        tokenizer.save_pretrained(tmp_path / name)
    args = ["--algo", "distill", "--kl_coef", "0", "--max_length", "2048", *SMALL, "--steps", "1",
            "--out", str(tmp_path / "r"), "--algo_args"]
    refused = run(*args, f"teacher={tmp_path}/stranger")
    assert refused.returncode == 2
    assert refused.stderr == (f"train.py: teacher {tmp_path}/stranger has another vocabulary "
                              "than tiny\n")

    done = run(*args, f"teacher={tmp_path}/teacher")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    t = read_jsonl(tmp_path / "r/trajectories/step_000000.jsonl")[0]
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([t["tokens"]])).logits[0], -1)
    for i, sampled in enumerate(t["mask"]):
        expected = logp[i - 1, t["tokens"][i]].item() - t["logprobs"][i] if sampled else 0.0
        assert t["advantage"][i] == pytest.approx(expected, abs=1e-3)


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

# Both ideas of advantages at once, as a user may write them.
BOTH = """
from ideas import distill, gigpo

def both(step, teacher: str = "tiny"):
    return gigpo.advantage(step) + distill.advantage(step, teacher, 0.5)

both.needs_states = both.compares_samples = True
both.needs_models = ("teacher",)
"""


@pytest.fixture(scope="module")
def signal_flags(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(BOTH)
    return ["--algo", f"{file}:both", "--algo_args", "teacher=tiny", "--loss", "gspo",
            "--loss_args", "per=turn", "--save_every", "1", "--minibatches", "2"]


@pytest.fixture(scope="module")
def with_signal(tmp_path_factory, signal_flags):
    """The folder of a run with all of these, not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "signal"
    done = run("--out", str(out), *SMALL, *signal_flags)
    assert done.returncode == 0, done.stderr
    return out


def test_rows_and_trajectories_have_what_credit_by_state_needs(with_signal):
    played = read_jsonl(with_signal / "trajectories/step_000000.jsonl")
    assert len(played) == 16
    assert all(len(t["states"]) == t["turns"] for t in played)
    assert all(row["logprob_gap"] < 1e-4 for row in metrics(with_signal))


def test_the_command_prints_the_information_of_each_checkpoints_next_step(with_signal):
    done = run_script("ideas/information.py", with_signal)
    assert done.returncode == 0, done.stderr
    # Step 2: keep=2 leaves the checkpoints of steps 2 and 3, and step 3 is not played.
    model = AutoModelForCausalLM.from_pretrained(with_signal / "checkpoints/step_000002").eval()
    by_category = {}
    for t in read_trajectories(with_signal / "trajectories/step_000002.jsonl"):
        if t.sample == 0:
            by_category.setdefault(category_of(t.item), []).append(t)
    terms = [term for own in by_category.values() if len(own) > 1
             for term in terms_of_information(model, own)]
    assert terms and done.stdout == f"step 2: babyai {statistics.mean(terms):.3f}\n"


def test_a_run_with_all_of_these_that_is_stopped_resumes_exactly(
        with_signal, signal_flags, tmp_path, monkeypatch):
    out = tmp_path / "r"
    played = []  # the steps of the calls

    def play_items(run, pool, signals, items, horizons, samples, step):
        played.append(step)
        if step == 1:  # the weights are no longer the teacher's
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, pool, signals, items, horizons, samples, step)

    original = train.play_items
    monkeypatch.setattr(train, "play_items", play_items)
    train.train(parse_config(["--out", str(out), *SMALL, *signal_flags]))
    assert played[-1] == 1 and len(metrics(out)) == 1
    done = run("--out", str(out), *SMALL, *signal_flags, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(with_signal)
    weights = "final/model.safetensors"
    assert (out / weights).read_bytes() == (with_signal / weights).read_bytes()


@pytest.mark.parametrize("has_teacher", [
    False, pytest.param(True, marks=pytest.mark.slow),
])
@pytest.mark.parametrize("more", [
    ["--shard", "true"],
    pytest.param([], marks=pytest.mark.slow),
])
def test_credit_by_state_and_a_teacher_are_those_of_one_process(
        tiny, more, has_teacher, tmp_path):
    teacher = random_model("qwen2", vocab_size=tiny[0].config.vocab_size)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny[1].save_pretrained(tmp_path / "teacher")
    flags = [*DEALT, "--items_per_step", "4", "--minibatches", "2", "--loss", "gspo"]
    if has_teacher:
        flags += ["--algo", "distill", "--set", "aggregation=sequence", "--algo_args",
                  f"teacher={tmp_path}/teacher weight=0.01 plus=grpo"]
    else:
        flags += ["--algo", "gigpo", "--loss_args", "per=turn"]
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
