"""Playing on after recorded turns, and experiments/credit.py against a world whose values are
known."""

import copy
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from agent import Chat, user
from config import parse_config
from envs import Env, EnvPool, Step
from experiments import credit
from rollout import rollout
from trajectory import Status, reply_spans
from worlds.replayed import Continuation, prefixes

NAMES = {"babyai": ["babyai_8", "babyai_50"], "textcraft": ["textcraft_3", "textcraft_8"],
         "searchqa": ["searchqa_0", "searchqa_1"]}
WAYS = [("babyai", {}), ("textcraft", {}), ("textcraft", {"engine": "hf", "slots": 2}),
        ("babyai", {"agent": "window", "agent_args": "keep=1"}),
        ("babyai", {"agent": "choose", "action_format": "plain"}),
        ("babyai", {"agent_args": "plan=true reflect=true"})]


def recorded(tiny, pool, world, **how):
    return rollout(*tiny, pool, NAMES[world], 4, samples=2, max_tokens=16, **how)


def continued(tiny, pool, after, horizon, **how):
    return rollout(*tiny, pool, [t.item for t, _ in after], horizon, max_tokens=16,
                   episode_class=partial(Continuation, after), **how)


@pytest.mark.parametrize("world, how", WAYS)
def test_a_continuation_is_the_recorded_episode_up_to_its_turn(tiny, pool, world, how):
    after = [(t, k) for t in recorded(tiny, pool, world, **how) for k in range(t.turns)]
    found = continued(tiny, pool, after, 4, samples=3, **how)
    assert len(found) == 3 * len(after) > 30
    differs = 0
    for t in found:
        old, k = after[t.group]
        end = reply_spans(old.mask)[k][0]
        for name in ("tokens", "mask", "logprobs", "entropies"):
            assert getattr(t, name)[:end] == getattr(old, name)[:end], name
        assert t.status != Status.ENV_ERROR and t.turns > k
        assert [s for s in t.starts if s < end] == [s for s in old.starts if s < end]
        assert t.messages[: 2 * k] == old.messages[: 2 * k]
        differs += t.tokens[end:] != old.tokens[end:]
    assert differs > len(found) / 2  # they have random numbers of their own


def test_a_whole_episode_is_replayed_and_goes_on_beyond_its_horizon(tiny, pool):
    played = [t for t in recorded(tiny, pool, "babyai") if t.status == Status.HORIZON]
    after = [(t, t.turns) for t in played]
    assert [t.tokens for t in continued(tiny, pool, after, 4)] == [t.tokens for t in played]
    assert all(new.tokens[: len(t.tokens)] == t.tokens and new.turns > 4
               for t, new in zip(played, continued(tiny, pool, after, 6)))


@pytest.mark.parametrize("change", ["observation", "first", "end", "last"])
def test_an_environment_that_answers_otherwise_has_failed(tiny, pool, change):
    (t, *_) = [t for t in recorded(tiny, pool, "babyai") if t.turns == 4]
    other, spans = copy.deepcopy(t), reply_spans(t.mask)
    if change == "last":  # another observation, to which there was no reply
        other.append([5, 6])
    elif change == "end":  # the recorded episode went on
        other.tokens += t.tokens[spans[0][1] :]
        other.mask += t.mask[spans[0][1] :]
        other.logprobs, other.entropies = other.logprobs * 2, other.entropies * 2
    else:
        other.tokens[spans[2][0] - 1 if change == "observation" else 0] += 1
    k = {"observation": 3, "first": 0, "end": 5, "last": 4}[change]
    (found,) = continued(tiny, pool, [(other, k)], 6 if change == "last" else 4, retries=0)
    assert found.status == Status.ENV_ERROR and found.error.startswith("what follows turn")


class Fork(Env):
    """Four states, two actions, no chance: the values follow from the policy's probabilities."""

    prompt = "Go left or right."
    instant = True
    NEXT = {("A", "left"): "B", ("A", "right"): "C", ("B", "left"): 1.0, ("B", "right"): "D",
            ("C", "left"): 0.0, ("C", "right"): "D", ("D", "left"): 0.5, ("D", "right"): 0.0}

    def reset(self, item):
        self.item, self.place = item, "A"
        return f"Item {item}, place A."

    def step(self, action):
        after = self.NEXT[self.place, action]
        done = isinstance(after, float)
        self.place = after
        return Step(f"Place {after}.", after if done else 0.0, after if done else 0.0, done,
                    done and after > 0)

    def valid_actions(self):
        return ["left", "right"]

    def state(self):
        return self.place


CHOOSE = ["--env", "babyai", "--agent", "choose", "--action_format", "plain", "--kl_coef", "0",
          "--out", "runs/never-made", "--items_per_step", "8", "--rollouts_per_item", "8",
          "--temperature", "1"]


class Moody(Fork):
    """Says something else from its second episode on."""

    episodes = 0

    def reset(self, item):
        self.episodes += 1
        return super().reset(item) + " Again." * (self.episodes > 1)


@pytest.mark.parametrize("world", [Fork, Moody])
def test_prefixes_that_do_not_replay_are_counted(world):
    with EnvPool(make=lambda _: world()) as pool:
        policy = credit.Policy(parse_config([*CHOOSE, "--slots", "64"]), pool, 3, True)
        names = [f"fork_{n}" for n in range(8)]
        _, facts = credit.replay(SimpleNamespace(replays=30), policy, lambda step: names)
    assert facts["prefixes"] >= 30 and (facts["not_replayed"] > 0) == (world is Moody)


@torch.no_grad()
def exact_values(policy, trajectories):
    """{(item, prefix): its value}, by a loop over the tree of replies, with the model's own
    probabilities of the two replies."""
    chat, values = Chat(policy.tokenizer), {}

    def value(item, prefix, place):
        replies = {action: chat.options([action])[0] for action in ("left", "right")}
        logits = policy.model(torch.tensor([prefix])).logits[0, -1]
        # The two replies differ in their first token.
        p = logits[[ids[0] for ids in replies.values()]].double().softmax(0).tolist()
        total = 0.0
        for chance, (action, ids) in zip(p, replies.items()):
            after = Fork.NEXT[place, action]
            observation = chat.turns([user(f"Place {after}.")], closed=True)
            total += chance * (after if isinstance(after, float) else
                               value(item, (*prefix, *ids, *observation), after))
        values[item, prefix] = total
        return total

    for item, prefix in {prefixes(t)[0] for t in trajectories}:
        value(item, prefix, "A")
    return values


@pytest.fixture(scope="module")
def measured():
    """The table's rows for the world of four states, and the exact advantages beside."""
    args = SimpleNamespace(error=0.1, critic_steps=[0, 1], only=[""])
    cfg = parse_config(CHOOSE)
    names = [f"fork_{n}" for n in range(8)]
    seen = {}
    with EnvPool(make=lambda _: Fork()) as pool, pytest.MonkeyPatch.context() as patch:
        policy = credit.Policy(cfg, pool, 3, with_states=True)
        with torch.no_grad():  # a fresh model's logits, so that both actions are likely
            policy.model.get_input_embeddings().weight.mul_(0.5)
        continuations_of = credit.continuations_of

        def keep(step, samples):
            seen.update(played=step.trajectories, found=continuations_of(step, samples))
            return seen["found"]

        estimates, of_turns = [], credit.of_turns
        patch.setattr(credit, "continuations_of", keep)
        patch.setattr(credit, "of_turns",
                      lambda *a: estimates.append(of_turns(*a)) or estimates[-1])
        rows, facts = credit.measure(args, policy, lambda step: names)
    seen["estimates"] = dict(zip(credit.estimators(args, True), estimates, strict=True))
    return rows, facts, seen, exact_values(policy, seen["played"])


def test_the_truth_is_true(measured):
    """The mean of n returns is within 4.5 standard errors of the exact value."""
    _, facts, seen, values = measured
    assert facts["prefixes"] > 25 and facts["not_replayed"] == 0
    assert len({round(v, 3) for v in values.values()}) > 10
    for (item, prefix), own in seen["found"].items():
        returns = torch.tensor([sum(t.rewards[len(prefix):]) for t in own], dtype=torch.float64)
        error = max(returns.std().item(), 0.1) / len(returns) ** 0.5
        assert abs(returns.mean() - values[item, prefix]) < 4.5 * error
    exact = credit.true_advantages(seen["played"], {key: [v] for key, v in values.items()})
    # The continuations by which the truth is noisy: their mean is 0 in every state.
    assert abs(exact.mean()) < 0.05 < exact.std()


def test_each_estimators_correlation_with_the_exact_advantages_is_in_its_interval(measured):
    rows, _, seen, values = measured
    exact = credit.true_advantages(seen["played"], {key: [v] for key, v in values.items()})
    assert len(rows) > 15
    for row in rows:  # those with a critic and with continuations, too
        low, high = row["interval"]
        assert low <= credit.correlation(seen["estimates"][row["estimator"]], exact) <= high, row


def test_more_continuations_are_nearer_to_the_truth_and_estimates_have_noise(measured):
    rows = {row["estimator"]: row for row in measured[0]}
    few, many = (rows[f"vine continuations={n}"] for n in (2, 8))
    assert few["corr"] < many["corr"] and few["gradient"] < many["gradient"]
    assert many["corr"] > rows["grpo"]["corr"]
    # The difference is resampled with the same items for both.
    assert rows["grpo"]["beyond_grpo"] == [0, 0] and credit.differs(rows["grpo"]) == ""
    assert many["beyond_grpo"][0] > 0 and credit.differs(many) == "*"
    # With the truth as estimate nothing else is sampled: GRPO's noise is the rest of the group.
    assert 0 < rows["grpo"]["noise"] < 1


def test_an_idea_that_is_deleted_drops_out_of_the_table(tmp_path, monkeypatch):
    args = SimpleNamespace(only=[""], critic_steps=[0])
    every = credit.estimators(args, True)
    assert {"grpo", "gigpo", "hgpo", "tree branches=2"} < set(every)
    shutil.copytree(ROOT / "ideas", tmp_path / "ideas")
    (tmp_path / "ideas/hgpo.py").unlink()
    monkeypatch.setattr(credit, "ROOT", tmp_path)
    left = credit.estimators(args, True)
    assert set(every) - set(left) == {name for name in every if name.startswith("hgpo")} != set()
    assert not any(n.startswith("gigpo") for n in credit.estimators(args, with_states=False))
