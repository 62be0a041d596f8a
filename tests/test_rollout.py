"""Tokens are canonical: what a rollout records is what a fresh forward pass over the ids gives."""

import itertools
import json
import math
import threading
import time

import numpy as np
import pytest
import torch
from conftest import plain_logprobs

import agent
import envs
import rollout as ro
from envs import Env, EnvError, EnvPool, Step
from parallel import Terminated
from rollout import Rollouts, rollout, sample
from trajectory import Trajectory, reply_spans
from worlds.babyai import BabyAI

ITEMS = ["babyai_8", "textcraft_3", "babyai_50", "babyai_19"]
SETTINGS = dict(samples=2, seed=3, max_tokens=12)


@pytest.fixture(scope="module")
def played(tiny, pool):
    return rollout(*tiny, pool, ITEMS, 4, **SETTINGS)


# ---- what is recorded ----


@pytest.mark.parametrize("how", [
    {}, dict(temperature=0.7), dict(top_k=4), dict(top_p=0.6),
    dict(agent_args="plan=true reflect=true", action_format="tags")])
def test_recorded_logprobs_are_those_of_a_fresh_forward_pass(tiny, pool, how):
    for t in rollout(*tiny, pool, ITEMS, 4, **how, **SETTINGS):
        assert any(t.mask) and len(t.progress) == t.turns == len(reply_spans(t.mask))
        expected = plain_logprobs(tiny[0], torch.tensor([t.tokens]), torch.tensor([t.mask]),
                                  how.get("temperature", 1.0))
        for recorded, new in zip((t.logprobs, t.entropies), expected, strict=True):
            assert recorded == pytest.approx(new[0].tolist(), abs=1e-4)


@pytest.mark.parametrize("more", [{}, dict(agent_args="plan=true reflect=true")])
def test_the_state_before_each_reply_is_recorded_if_it_is_asked_for(tiny, pool, more):
    """The oracle: an environment of one's own that gets the same replies. A plan or a reflection
    begins in another state than the action after it, though the world's state is the same."""
    def state_of(env, play):
        return f"{play.kind}: {env.state()}" if play.kind else env.state()

    settings = SETTINGS | more
    items = ["babyai_8", "textcraft_3"]
    assert all(t.states == [] for t in rollout(*tiny, pool, items, 2, **settings))
    changes = 0
    for t in rollout(*tiny, pool, items, 5, record_states=True, **settings):
        assert len(t.states) == len(reply_spans(t.mask)) > 1
        env = envs.make_env(t.env)
        play = Rollouts(**more).play(t.item, env, 5)
        play.send()
        states = [state_of(env, play)]
        said = [m["content"] for m in t.messages if m["role"] == "assistant"][-len(t.states):]
        for reply in said[:-1]:
            play.send(reply)
            states.append(state_of(env, play))
        assert t.states == states
        assert None not in t.states
        if more:
            assert t.states[:2] == [f"PLAN: {t.states[1]}", t.states[1]]
        changes += len(set(t.states)) > 1
    assert changes >= 2  # trajectories in which something happens


def test_columns_align_and_turns_and_trajectories_end_where_they_have_to(tiny, played):
    end_id = agent.Chat(tiny[1]).end_id
    assert {t.status for t in played} == {"done", "horizon"}
    for t in played:
        assert t.turns == 4 or t.status == "done" and t.turns < 4
        columns = (t.tokens, t.mask, t.logprobs, t.entropies, t.rewards)
        assert len({len(column) for column in columns}) == 1
        assert all((h > 0) <= sampled for h, sampled in zip(t.entropies, t.mask))
        spans = reply_spans(t.mask)
        assert len(spans) == t.turns  # one run of sampled tokens for each turn
        assert t.mask[-1]  # nothing comes after the last reply
        for start, end in spans:
            assert end - start <= 12
            assert end - start == 12 or t.tokens[end - 1] == end_id
            assert end_id not in t.tokens[start:end - 1]


def test_tokens_are_the_chat_template_over_the_messages(tiny, played):
    """A trajectory whose replies are all closed reads, decoded, as its messages rendered at once.

    The trajectory strips observations, and the template does not, so messages with white space at
    their ends are left out.
    """
    tokenizer = tiny[1]
    checked = 0
    for t in played:
        ends = [t.tokens[end - 1] for _, end in reply_spans(t.mask)]
        contents = [message["content"] for message in t.messages]
        if {*ends} == {tokenizer.eos_token_id} and contents == [c.strip() for c in contents]:
            text = tokenizer.apply_chat_template(t.messages[:-1], tokenize=False)
            assert tokenizer.decode(t.tokens) + "\n" == text
            checked += 1
    assert checked >= len(played) // 2


def test_a_turns_reward_sits_on_its_last_sampled_token(tiny, pool):
    for t in rollout(*tiny, pool, ITEMS, 4, invalid_penalty=0.25, **SETTINGS):
        last_tokens = {end - 1 for _, end in reply_spans(t.mask)}
        assert all(r == 0.0 for i, r in enumerate(t.rewards) if i not in last_tokens)
        assert abs(t.reward - sum(t.rewards)) < 1e-9
        invalid_actions = t.turns - t.valid_actions
        assert abs(t.reward - (t.success - 0.25 * invalid_actions)) < 1e-6
        assert len(t.invalid_turns) == invalid_actions


def test_a_trajectory_depends_on_its_seed_step_item_and_sample_alone(tiny, pool, played):
    def again(items=ITEMS, **changes):
        return [t.to_json() for t in rollout(*tiny, pool, items, 4, **SETTINGS | changes)]

    assert again() == [t.to_json() for t in played]
    tokens = [t.tokens for t in played]
    for others in (again(ITEMS[2:3]), again(slots=3), again(samples=1)):  # what is played beside it
        for t in others:
            assert t["tokens"] == tokens[2 * ITEMS.index(t["item"]) + t["sample"]]
    assert len({tuple(t) for t in tokens[:2]}) == 2
    for others in (again(ITEMS[:1], seed=4), again(ITEMS[:1], step=1)):
        assert all(t["tokens"] not in tokens for t in others)


def test_a_trajectory_fills_its_largest_length_exactly(tiny, pool, monkeypatch):
    (t,) = rollout(*tiny, pool, ["babyai_8"], 1, max_tokens=1)
    prompt = t.mask.index(True)
    (t,) = rollout(*tiny, pool, ["babyai_8"], 1, max_length=prompt)
    assert (t.status, t.turns, t.tokens) == ("length", 0, [])  # there is no room for a reply
    word = tiny[1].encode(" ball")[0]
    for room in (1, 2):
        scripted(monkeypatch, [word] * 9)
        (t,) = rollout(*tiny, pool, ["babyai_8"], 2, max_tokens=9, max_length=prompt + room)
        assert (t.status, t.turns, len(t.tokens)) == ("length", 1, prompt + room)
        assert t.tokens[prompt:] == [word] * room and t.cut_turns == [1]


def test_the_turn_that_forgets_what_was_earned_loses_it():
    t = Trajectory("door_1", "door")
    for reward, forgets in ((0.1, False), (0.2, False), (0.0, True), (0.5, False)):
        t.append([1, 2], [0.0, 0.0])
        t.record_turn("", Step("", reward=reward), forgets)
    assert t.rewards[1::2] == pytest.approx([0.1, 0.2, -0.3, 0.5])
    assert t.reward == pytest.approx(0.5) and not any(t.rewards[::2])


# ---- tokens that the policy is made to sample ----


def scripted(monkeypatch, ids):
    """Let the policy "sample" these tokens, one after the other, whatever the logits say. -> those
    that are left."""
    rest = iter(ids)

    def draw(logits, uniforms, *_):
        tokens = torch.tensor([next(rest) for _ in uniforms])
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None]).squeeze(1)
        return tokens, logprobs, logprobs * 0

    monkeypatch.setattr(ro, "sample", draw)
    return rest


def test_special_tokens_that_the_policy_writes_change_nothing(tiny, pool, monkeypatch):
    model, tokenizer = tiny
    end, start = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    reply = [start, *tokenizer.encode("turn left"), start, end]
    scripted(monkeypatch, reply)
    (t,) = rollout(model, tokenizer, pool, ["babyai_8"], 1, max_tokens=20, action_format="plain")
    assert t.tokens[-len(reply):] == reply
    assert t.mask[-len(reply):] == [True] * len(reply)
    assert sum(t.mask) == len(reply)
    assert t.valid_actions == 1  # the text view leaves special tokens out


def test_a_reply_cut_at_its_limit_gets_no_end_of_turn_in_the_loss(tiny, pool, monkeypatch):
    model, tokenizer = tiny
    word = tokenizer.encode(" ball")[0]
    scripted(monkeypatch, [word] * 6)
    (t,) = rollout(model, tokenizer, pool, ["babyai_8"], 2, max_tokens=3)
    first = t.mask.index(True)
    assert t.tokens[first:first + 3] == [word] * 3
    assert t.mask[first:first + 3] == [True] * 3
    assert t.tokens[first + 3] == tokenizer.eos_token_id
    assert not t.mask[first + 3]
    assert sum(t.mask) == 6


def test_a_worlds_stop_string_ends_a_reply(tiny, monkeypatch):
    word = tiny[1].encode(" ball")
    rest = scripted(monkeypatch, [tiny[1].encode("turn left")[0], *word, *word])
    monkeypatch.setattr(Doors, "stop", ("all", "ball"), raising=False)
    (t,) = rollout(*tiny, EnvPool(make=lambda name: Doors()), ["doors_0"], 1, max_tokens=9,
                   action_format="plain")
    assert list(rest) == word
    assert sum(t.mask) == 1 + len(word)
    assert t.messages[-2]["content"].endswith("ball")
    assert t.cut_turns == []


# ---- environments that fail ----


class Broken(Env):
    """A world whose method `at` fails, hangs or crashes; otherwise its episodes have one turn.

    how: a name of `exceptions`, or an exception. faults: an iterator, shared by all environments of
    a test. A call of `at` fails if its next element is true; by default each does.
    """

    prompt = "Do something."
    exceptions = {
        "fault": EnvError,
        "crash": ZeroDivisionError,
        "hang": EnvError,
        "late": TimeoutError,  # one of the world's own
        "page": UnicodeError,  # a page that cannot be read; a subclass of ValueError
    }

    def __init__(self, how, at="step", faults=None):
        self.how = how
        self.at = at
        self.faults = itertools.repeat(True) if faults is None else faults

    def _maybe_fail(self, method):
        if method == self.at and next(self.faults, False):
            if self.how == "hang":
                time.sleep(10)
            raise self.exceptions.get(self.how, self.how)("broken")

    def reset(self, item):
        self._maybe_fail("reset")
        return "Go."

    def step(self, action):
        self._maybe_fail("step")
        return Step("Done.", 1.0, 1.0, True, True)


def play_once(tiny, make, **settings):
    """One trajectory, of at most two turns, of a world that `make` makes."""
    (t,) = rollout(*tiny, EnvPool(make=lambda name: make()), ["broken_1"], 2, max_tokens=4,
                   action_format="plain", **settings)
    return t


@pytest.mark.parametrize("is_instant", [True, False])
def test_a_world_that_returns_no_step_ends_the_run(tiny, is_instant):
    class Wordy(Broken):
        instant = is_instant

        def step(self, action):
            return "Done."

    with pytest.raises(envs.UserError, match="Wordy.step returned 'Done.'"):
        play_once(tiny, lambda: Wordy("fault", at=""))


@pytest.mark.parametrize("how", Broken.exceptions)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_a_failing_environment_is_an_env_error_never_a_reward(tiny, how, at):
    def make(name):
        return Broken(how, at) if name == "broken" else envs.make_env(name)

    start = time.time()
    items = ["babyai_8", *(f"broken_{number}" for number in range(4))]
    good, *bad = rollout(*tiny, EnvPool(make=make), items, 2, max_tokens=8, retries=1,
                         deadline=2 if how == "hang" else 30, action_format="plain")
    for t in bad:
        assert (t.status, t.reward, t.success) == ("env_error", 0.0, False)
        assert t.error.startswith({"fault": "fault", "hang": "timeout"}.get(how, "crash"))
    assert good.status in ("done", "horizon") and good.turns >= 1
    assert time.time() - start < 13  # two tries of 2 s: hung environments share their deadlines


@pytest.mark.parametrize("retries, num_faults, status", [
    (0, 1, "env_error"), (2, 1, "done"), (2, 2, "done"), (2, 3, "env_error")])
def test_a_failing_environment_is_retried_a_bounded_number_of_times(
        tiny, retries, num_faults, status):
    calls = []
    faults = (calls.append(n) or n < num_faults for n in itertools.count())
    t = play_once(tiny, lambda: Broken("fault", "step", faults), retries=retries)
    assert len(calls) == min(num_faults, retries) + 1
    assert (t.status, t.success) == (status, status == "done")
    assert t.reward == sum(t.rewards) == t.turns == (status == "done")


def test_an_environment_that_hung_is_not_used_again(tiny):
    made = []

    def make():
        made.append(Broken("hang", "step", iter([True] if not made else [])))
        return made[-1]

    assert play_once(tiny, make, deadline=1, retries=1).status == "done"
    assert len(made) == 2


def test_the_making_of_an_environment_has_a_deadline_of_its_own(tiny):
    class Slow(Broken):
        def __init__(self):
            super().__init__("fault", faults=iter([]))
            time.sleep(0.8)

        def reset(self, item):
            time.sleep(reset_seconds)
            return "Go."

    reset_seconds = 0.4
    # The deadline begins when the environment has been made.
    assert play_once(tiny, Slow, retries=0, deadline=1.0, create_deadline=20).status == "done"
    t = play_once(tiny, Slow, retries=0, deadline=20, create_deadline=0.3)
    assert t.error == "timeout: not made within 0.3 s"
    reset_seconds = 4.0
    start = time.monotonic()
    t = play_once(tiny, Slow, retries=0, deadline=0.3, create_deadline=15)
    assert t.error == "timeout: no answer within 0.3 s"
    assert time.monotonic() - start < 3


def test_a_huge_observation_ends_its_own_trajectory_alone(tiny):
    class Huge(Env):
        prompt = "Do something."

        def reset(self, item):
            self.is_huge = item < 4
            return "Go."

        def step(self, action):
            # Other words than the tokenizer's own make it slow.
            return Step("qxz vj " * 50_000 if self.is_huge else "Go on.")

    pool = EnvPool(make=lambda name: Huge())
    played = rollout(*tiny, pool, [f"huge_{i}" for i in range(8)], 2, max_tokens=2,
                     deadline=20, retries=0, action_format="plain", max_length=400)
    assert [t.status for t in played] == ["length"] * 4 + ["horizon"] * 4


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Terminated])
def test_ctrl_c_and_sigterm_end_a_rollout_also_while_it_plays_an_instant_world(
        tiny, monkeypatch, interrupt):
    monkeypatch.setattr(Broken, "instant", True)
    with pytest.raises(interrupt):
        play_once(tiny, lambda: Broken(interrupt))


@pytest.mark.parametrize("item, horizon, says", [
    ("babyai", 2, "item id"), ("nowhere_1", 2, "nowhere"),
    ("babyai_8", 0, "a horizon is at least 1"), ("babyai_8", {"babyai": 0}, "at least 1")])
def test_what_the_caller_asks_for_wrongly_is_a_value_error(tiny, pool, item, horizon, says):
    with pytest.raises(ValueError, match=says):
        rollout(*tiny, pool, [item], horizon)


# ---- sampling, and what is computed ----


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_entropy_of_a_token_is_that_of_the_softmax(temperature):
    logits = torch.tensor([[0.0, 0.3, -2.0, -torch.inf], [-torch.inf, 0.0, 0.0, -torch.inf]])
    _, _, entropies = sample(logits, torch.rand(2), temperature=temperature, top_k=3)
    expected = [-sum(p * math.log(p) for p in row if p > 0)
                for row in torch.softmax(logits / temperature, -1).tolist()]
    assert entropies.tolist() == pytest.approx(expected, abs=1e-6)


def test_samples_of_an_item_share_their_first_forward(tiny, pool):
    """The prompt is computed once for a group.

    Each further sample costs one token, which is forwarded for its logits.
    """
    one, eight = {}, {}
    (t,) = rollout(*tiny, pool, ["babyai_8"], 1, max_tokens=1, stats=one)
    rollout(*tiny, pool, ["babyai_8"], 1, samples=8, max_tokens=1, stats=eight)
    assert one["forwarded"] == len(t.tokens) - 1
    assert eight["forwarded"] == one["forwarded"] + 7


class Where(Env):
    """Notes for each step whether it runs in the main thread. Item 3 raises SystemExit."""

    prompt = "Say something."
    instant = True

    def __init__(self, remote, in_main_thread):
        self.remote, self.in_main_thread = remote, in_main_thread

    def reset(self, item):
        self.item, self.turns = item, 0
        return f"Item {item}."

    def step(self, action):
        self.turns += 1
        self.in_main_thread.append(threading.current_thread() is threading.main_thread())
        if self.item == 3:
            raise SystemExit("a world must not end the run")
        return Step(f"You said {action}.", 1.0, 1.0, self.turns == 2, True)


def test_an_instant_world_is_stepped_in_the_rollouts_own_thread_and_a_remote_one_is_played_the_same(
        tiny):
    played = {}
    for remote in (True, False):
        in_main_thread, stats, unfinished = [], {}, []
        pool = EnvPool(make=lambda name: Where(remote, in_main_thread))
        played[remote] = rollout(*tiny, pool, [f"where_{n}" for n in range(5)], 3, samples=2,
                                 max_tokens=5, action_format="plain", retries=0, deadline=10,
                                 stats=stats, on_step=lambda queue: unfinished.append(
                                     len(queue.todo) + len(queue.alive)))
        assert in_main_thread
        assert all(here != remote for here in in_main_thread)
        # Of the ten slots, nine are idle in the first forward pass, because their trajectories
        # wait to copy the first one's prefix. No slot is idle later.
        assert sum(unfinished) - stats["busy"] == 9
    assert [t.to_json() for t in played[True]] == [t.to_json() for t in played[False]]
    assert [t.status for t in played[False]] == ["done"] * 6 + ["env_error"] * 2 + ["done"] * 2


# ---- an item that is named twice in a step ----


def test_an_item_that_is_named_again_gets_further_samples(tiny, pool):
    items = ["babyai_8", "babyai_50", "babyai_8", "babyai_8"]
    played = [t.tokens for t in rollout(*tiny, pool, items, 3, **SETTINGS)]
    many = rollout(*tiny, pool, ["babyai_8", "babyai_50"], 3, **SETTINGS | {"samples": 6})
    many = [t.tokens for t in many]
    assert played == [*many[:2], *many[6:8], *many[2:6]]
    assert len({tuple(tokens) for tokens in many[:6]}) > 3


# ---- channels ----

ANALYSIS = "<|channel|>analysis<|message|>1 or</door> <|start|>2?<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("replies, says", [
    ([ANALYSIS + FINAL + "look<|return|>", FINAL[18:] + "1<|end|>"], ["look", "1"]),
    ([ANALYSIS + ANALYSIS + FINAL + "look</door>", ANALYSIS + "<|return|>"], ["look</door>", ""]),
])
def test_the_analysis_is_sampled_and_kept_and_is_no_action(channels, monkeypatch, replies, says):
    model, tokenizer = channels
    chat = agent.Chat(tokenizer)
    assert chat.history == "template"  # by default the analysis is not in later prompts
    written = [tokenizer.encode(reply) for reply in replies]
    rest = iter([token for ids in written for token in ids])
    scripted(monkeypatch, rest)
    monkeypatch.setattr(Doors, "stop", ("</door>",), raising=False)
    with EnvPool(make=lambda name: Doors()) as pool:
        (t,) = rollout(model, tokenizer, pool, ["doors_1"], 2, max_tokens=60, engine="hf",
                       action_format="plain", history="append")
    assert next(rest, None) is None
    assert [message["content"] for message in t.messages[3::2]] == says
    assert [t.tokens[start:end] for start, end in reply_spans(t.mask)] == written
    (_, first_end), (second_start, _) = reply_spans(t.mask)
    closed = written[0][-1] == tokenizer.eos_token_id
    assert t.tokens[first_end:second_start] == chat.turns([t.messages[4]], closed)
    assert tokenizer.decode(t.tokens[first_end:]).startswith("<|start|>user" if closed else
                                                             "<|end|><|start|>user")


# ---- plans, reflections, and replies without an action ----


class Doors(Env):
    """Three doors. The item's number is the right one; a wrong one ends the episode.

    The action "look" does nothing. All other texts are not actions.
    """

    prompt = "Open a door: 0, 1 or 2."
    resets = 0

    def reset(self, item):
        self.item = item
        self.resets += 1
        return f"Three doors. (reset {self.resets})"

    def step(self, action):
        if action == "look":
            return Step("Doors.", reward=0.1, progress=0.5)
        if action not in "012":
            return Step("There is no such door.", valid=False)
        right = int(action) == self.item
        observation = "It opens." if right else "A wall."
        return Step(observation, float(right), float(right), True, right, progress=float(right))


BEGIN, AGAIN = "(reset 1)", agent.AGAIN + "Three doors. (reset 2)"
TWO_ACTIONS = "Action: 0\nAction: 1"


@pytest.mark.parametrize("agent_args, horizon, replies, asked, result", [
    ("plan=true", 3, ["1 is right", "look", "1"],
     [agent.PLAN, agent.ACT, "Doors.", "It opens."], (3, 3, "done", True, 1.1)),
    # With a single turn there is nothing to plan.
    ("plan=true", 1, ["1"], [BEGIN, "It opens."], (1, 1, "done", True, 1.0)),
    ("reflect=true", 5, ["door 1", "a number is asked for", "1"],
     [BEGIN, "There is no such door." + agent.REFLECT, agent.ACT, "It opens."],
     (3, 2, "done", True, 0.75)),
    # With two turns, a reflection would leave no turn for an action.
    ("reflect=true", 2, ["door 1", "1"], [BEGIN, "There is no such door.", "It opens."],
     (2, 1, "done", True, 0.75)),
    # A failed episode is tried once more. The reward of the first attempt does not count.
    ("reflect=true", 6, ["look", "0", "0 is wrong", "1"],
     [BEGIN, "Doors.", "A wall." + agent.REFLECT_ON_ALL, AGAIN, "It opens."],
     (4, 4, "done", True, 1.0)),
    ("reflect=true", 6, ["0", "hm", "2"],
     [BEGIN, "A wall." + agent.REFLECT_ON_ALL, AGAIN, "A wall."], (3, 3, "done", False, 0.0)),
    ("reflect=true", 2, ["look", "0"], [BEGIN, "Doors.", "A wall."], (2, 2, "done", False, 0.1)),
    # A reply without exactly one action does not reach the world.
    ("", 3, [TWO_ACTIONS, "Action: 1"],
     [BEGIN, agent.complaint(TWO_ACTIONS, "react"), "It opens."], (2, 1, "done", True, 0.75))])
def test_a_plan_a_reflection_and_a_complaint_are_asked_for_where_there_is_a_turn_for_them(
        tiny, monkeypatch, agent_args, horizon, replies, asked, result):
    model, tokenizer = tiny
    written = [[*tokenizer.encode(reply), tokenizer.eos_token_id] for reply in replies]
    rest = scripted(monkeypatch, sum(written, []))
    (t,) = rollout(model, tokenizer, EnvPool(make=lambda name: Doors()), ["doors_1"], horizon,
                   max_tokens=40, agent_args=agent_args, invalid_penalty=0.25,
                   action_format="react" if TWO_ACTIONS in replies else "plain")
    assert next(rest, None) is None  # the policy has said everything
    texts = [message["content"] for message in t.messages]
    assert texts[3::2] == replies
    assert all(text.endswith(end) for text, end in zip(texts[2::2], asked, strict=True))
    assert (t.turns, t.valid_actions, t.status, t.success, pytest.approx(t.reward)) == result
    assert t.invalid_turns == [1] * (t.valid_actions < t.turns)


def test_a_rollout_begins_with_the_texts_that_it_is_given(tiny, pool):
    texts = {"babyai": {"prompt": "Play.\n\n", "reply": "Ok. I will."}}
    (t,) = rollout(*tiny, pool, ["babyai_8"], 1, max_tokens=4, prompt_texts=texts)
    said = [message["content"] for message in t.messages[:3]]
    assert said[:2] == ["Play.\n\n", "Ok. I will."]
    start = agent.Chat(tiny[1]).prompt(t.messages[:3])
    assert t.tokens[: len(start)] == start and t.mask.index(True) == len(start)
    (ours,) = rollout(*tiny, pool, ["babyai_8"], 1, max_tokens=4,
                      prompt_texts={"textcraft": texts["babyai"]})
    assert ours.messages[0]["content"].startswith(BabyAI.prompt)


@pytest.mark.parametrize("parse, wins", [("lenient", True), ("strict", False)])
def test_a_rollout_reads_replies_as_it_is_told_to(parse, wins):
    config = Rollouts(parse=parse)
    play = config.play("babyai_88", BabyAI(), 9)
    play.send()
    play.send("Action: [turn right].")
    assert play.turn.valid == wins


def test_a_world_may_answer_with_numpys_numbers():
    number, yes = np.float32(0.5), np.bool_(True)
    step = Step("o", number, number, yes, yes, yes, number)
    t = Trajectory("babyai_1", "babyai")
    t.append([1])
    t.append([2], [0.0])
    t.record_turn("x", step)
    assert json.loads(json.dumps(t.to_json()))["rewards"] == [0.0, 0.5]
    assert json.dumps(step.__dict__)  # as worlds/serve.py sends it
