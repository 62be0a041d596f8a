"""Tokens are canonical: what is recorded in a rollout is what a fresh forward pass over the same ids says."""

import threading
import time

import pytest
import torch

import agent
import envs
import rollout as ro
import train
from envs import Env, EnvError, Step
from rollout import EnvPool, rollout, sample

ITEMS = ["babyai_8", "textcraft_3", "babyai_50", "babyai_19"]
KW = dict(samples=2, seed=3, max_tokens=12)


@pytest.fixture(scope="module")
def played(tiny, pool):
    return rollout(*tiny, pool, ITEMS, 4, **KW)


def slow_logprobs(model, tokens, temperature=1.0):
    """One trajectory, one forward pass, no cache, no padding."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return [0.0] + torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_a_fresh_forward_pass(tiny, pool, temperature):
    for t in rollout(*tiny, pool, ITEMS, 3, temperature=temperature, **KW):
        expected = slow_logprobs(tiny[0], t.tokens, temperature)
        for recorded, new, sampled in zip(t.logprobs, expected, t.mask):
            assert abs(recorded - new) < 1e-4 if sampled else recorded == 0.0


def test_columns_align_and_each_turn_ends_where_the_policy_ended_it(tiny, played):
    end = agent.Chat(tiny[1]).end_id
    for t in played:
        assert len(t.tokens) == len(t.mask) == len(t.logprobs) == len(t.rewards)
        replies = [t.tokens[i] for i in range(len(t.tokens)) if t.mask[i] and (i + 1 == len(t.mask) or not t.mask[i + 1])]
        assert len(replies) == t.turns  # one run of sampled tokens a turn
        assert t.mask[-1]  # nothing after the last reply
        spans = "".join("x" if m else " " for m in t.mask).split()
        assert all(len(s) <= 12 for s in spans)
        assert all(last == end or len(s) == 12 for last, s in zip(replies, spans))


def test_tokens_are_the_chat_template_over_the_messages(tiny, played):
    """Decoded, a trajectory whose replies were all closed reads as the template renders its messages at once."""
    tokenizer = tiny[1]
    checked = 0
    for t in played:
        if all(m["content"] == m["content"].strip() for m in t.messages) and t.tokens[-1] == tokenizer.eos_token_id:
            text = tokenizer.apply_chat_template(t.messages[:-1], tokenize=False)
            if tokenizer.decode(t.tokens) + "\n" == text:
                checked += 1
    assert checked >= len(played) // 2


def test_a_turns_reward_sits_on_its_last_sampled_token(tiny, pool):
    for t in rollout(*tiny, pool, ITEMS, 4, invalid_penalty=0.25, **KW):
        last = [i for i in range(len(t.mask)) if t.mask[i] and (i + 1 == len(t.mask) or not t.mask[i + 1])]
        assert all(r == 0.0 for i, r in enumerate(t.rewards) if i not in last)
        assert abs(t.reward - sum(t.rewards)) < 1e-9
        assert abs(t.reward - (t.success - 0.25 * (t.turns - t.valid_actions))) < 1e-6


def test_a_trajectory_does_not_depend_on_what_is_played_beside_it(tiny, pool, played):
    alone = rollout(*tiny, pool, ITEMS[2:3], 4, **KW)
    few_slots = rollout(*tiny, pool, ITEMS, 4, slots=3, **KW)
    assert [t.tokens for t in alone] == [t.tokens for t in played[4:6]]
    assert [t.tokens for t in few_slots] == [t.tokens for t in played]
    assert played[0].tokens != played[1].tokens  # but samples differ


def test_the_same_seed_repeats_bit_for_bit(tiny, pool, played):
    again = rollout(*tiny, pool, ITEMS, 4, **KW)
    assert [t.to_json() for t in again] == [t.to_json() for t in played]
    other = rollout(*tiny, pool, ITEMS, 4, **KW | {"seed": 4})
    assert [t.tokens for t in other] != [t.tokens for t in played]


def test_horizon_and_length_end_a_trajectory(tiny, pool):
    for t in rollout(*tiny, pool, ITEMS, 2, **KW):
        assert t.turns <= 2 and t.status == ("done" if t.turns < 2 else t.status)
        assert t.status in ("done", "horizon")
    prompt = max(len(t.tokens) for t in rollout(*tiny, pool, ITEMS, 1, **KW))
    for t in rollout(*tiny, pool, ITEMS, 30, max_length=prompt + 60, **KW):
        assert len(t.tokens) <= prompt + 60
        assert t.status in ("done", "length")


def scripted(monkeypatch, ids):
    """Let the policy "sample" these tokens, one after the other, whatever the logits say."""
    script = iter(ids)

    def draw(logits, uniforms, *_):
        token = torch.full((len(logits),), next(script))
        return token, torch.log_softmax(logits.float(), -1).gather(-1, token[:, None]).squeeze(1)
    monkeypatch.setattr(ro, "sample", draw)


def test_special_tokens_that_the_policy_writes_change_nothing(tiny, pool, monkeypatch):
    model, tokenizer = tiny
    end, start = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    word = tokenizer.encode("turn left")
    scripted(monkeypatch, [start, *word, start, end])
    (t,) = rollout(model, tokenizer, pool, ["babyai_8"], 1, max_tokens=20, action_format="plain")
    assert t.tokens[-4 - len(word) + 1:] == [start, *word, start, end]
    assert t.mask[-4 - len(word) + 1:] == [True] * (3 + len(word))
    assert sum(t.mask) == 3 + len(word)
    assert t.valid_actions == 1  # the text view leaves special tokens out


def test_a_reply_cut_at_its_limit_gets_no_end_of_turn_in_the_loss(tiny, pool, monkeypatch):
    model, tokenizer = tiny
    word = tokenizer.encode(" ball")[0]
    scripted(monkeypatch, [word] * 6)
    (t,) = rollout(model, tokenizer, pool, ["babyai_8"], 2, max_tokens=3)
    first = t.mask.index(True)
    assert t.tokens[first:first + 3] == [word] * 3 and t.mask[first:first + 3] == [True] * 3
    assert t.tokens[first + 3] == tokenizer.eos_token_id and not t.mask[first + 3]
    assert sum(t.mask) == 6


class Broken(Env):
    """A world that fails, hangs or crashes in a given call; otherwise one turn long."""
    prompt, count = "Do something.", 0

    def __init__(self, how, at="step", times=99):
        self.how, self.at, self.times = how, at, times

    def _maybe(self, method):
        Broken.count += 1
        if method == self.at and Broken.count <= self.times:
            if self.how == "hang":
                time.sleep(3)
            raise {"fault": EnvError, "crash": ZeroDivisionError, "hang": EnvError, "late": TimeoutError, "page": UnicodeError}[self.how]("broken")

    def reset(self, item):
        self._maybe("reset")
        return "Go."

    def step(self, action):
        self._maybe("step")
        return Step("Done.", 1.0, 1.0, True, True)


@pytest.mark.parametrize("how", ["fault", "crash", "hang", "late", "page"])  # a TimeoutError of the world's own; a page that cannot be read, a ValueError
@pytest.mark.parametrize("at", ["reset", "step"])
def test_a_failing_environment_is_an_env_error_never_a_reward(tiny, how, at):
    def make(name):
        return Broken(how, at) if name == "broken" else envs.make_env(name)
    start = time.time()
    good, bad = rollout(*tiny, EnvPool(make=make), ["babyai_8", "broken_1"], 2, max_tokens=8, deadline=0.3, retries=1,
                        action_format="plain")
    assert bad.status == "env_error" and bad.reward == 0 and not bad.success
    assert bad.error.startswith({"fault": "fault", "hang": "timeout"}.get(how, "crash"))
    assert good.status in ("done", "horizon") and good.turns >= 1
    assert time.time() - start < 3  # two tries of 0.3 s each, not the sleep


def test_a_passing_fault_is_retried(tiny):
    Broken.count = 0
    (t,) = rollout(*tiny, EnvPool(make=lambda name: Broken("fault", "step", times=2)), ["broken_1"], 2, max_tokens=4, action_format="plain")
    assert t.status == "done" and t.success and t.turns == 1 and sum(t.rewards) == 1.0


@pytest.mark.parametrize("told", [KeyboardInterrupt, train.Terminated])
def test_ctrl_c_and_sigterm_end_a_rollout_also_while_a_world_is_played_in_its_thread(tiny, told):
    class Told(Env):
        instant = True

        def reset(self, item):
            return "Go."

        def step(self, action):
            raise told

    with EnvPool(make=lambda name: Told()) as pool, pytest.raises(told):
        rollout(*tiny, pool, ["told_1"], 2, max_tokens=4, action_format="plain")


def test_an_item_that_does_not_exist_is_the_callers_mistake(tiny, pool):
    with pytest.raises(ValueError, match="item id"):
        rollout(*tiny, pool, ["babyai"], 2)
    with pytest.raises(ValueError, match="unknown environment"):
        rollout(*tiny, pool, ["nowhere_1"], 2)


def test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(40_000, 1)
    uniforms = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, uniforms)
    assert torch.allclose(tokens.bincount(minlength=4) / 40_000, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.01)
    assert torch.allclose(logprobs, logits.gather(1, tokens[:, None]).squeeze(1), atol=1e-6)
    tokens, logprobs = sample(logits, uniforms, top_p=0.6)
    assert set(tokens.tolist()) == {0, 1}  # the fewest tokens whose mass reaches top_p
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3])[tokens], atol=1e-6)
    assert set(sample(logits, uniforms, top_k=3)[0].tolist()) == {0, 1, 2}
    assert set(sample(logits, uniforms, temperature=0)[0].tolist()) == {0}
    hot = torch.softmax(logits[0] / 2, -1)
    tokens, logprobs = sample(logits, uniforms, temperature=2.0)
    assert torch.allclose(tokens.bincount(minlength=4) / 40_000, hot, atol=0.01)
    assert torch.allclose(logprobs, hot.log()[tokens], atol=1e-6)
    assert sample(logits[:2], torch.tensor([0.0, 1 - 1e-7]))[0].tolist() == [0, 3]


def test_samples_of_an_item_share_their_first_forward(tiny, pool):
    """The prompt is computed once a group: each further sample costs one token, forwarded for its logits."""
    one, eight = {}, {}
    (t,) = rollout(*tiny, pool, ["babyai_8"], 1, max_tokens=1, stats=one)
    rollout(*tiny, pool, ["babyai_8"], 1, samples=8, max_tokens=1, stats=eight)
    assert one["forwarded"] == len(t.tokens) - 1 and eight["forwarded"] == one["forwarded"] + 7


def test_hung_environments_share_one_deadline(tiny):
    start = time.time()
    played = rollout(*tiny, EnvPool(make=lambda name: Broken("hang", "step")), [f"broken_{i}" for i in range(6)], 2,
                     max_tokens=2, deadline=0.4, retries=0, action_format="plain")
    assert all(t.status == "env_error" for t in played)
    assert time.time() - start < 2 * 0.4 + 1  # not six times


# ---- plans, reflections, and replies without an action ----


def test_an_instant_world_is_stepped_in_the_rollouts_own_thread_and_a_remote_one_is_played_the_same(tiny):
    class Where(Env):
        prompt = "Say something."
        instant = True

        def __init__(self, remote):
            self.remote = remote

        def reset(self, item):
            self.item, self.turns = item, 0
            return f"Item {item}."

        def step(self, action):
            self.turns += 1
            stepped.append(threading.current_thread() is threading.main_thread())
            if self.item == 3:
                raise SystemExit("a world must not end the run")
            return Step(f"You said {action}.", 1.0, 1.0, self.turns == 2, True)

    both = []
    for remote in (True, False):
        stepped, stats = [], {}
        both.append(rollout(*tiny, EnvPool(make=lambda name, remote=remote: Where(remote)), [f"where_{n}" for n in range(5)], 3, samples=2,
                            max_tokens=5, action_format="plain", retries=0, stats=stats))
        assert stepped and all(here != remote for here in stepped)
        assert stats["room"] - stats["busy"] == 9  # ten slots, and the first pass is of one: the others wait for its beginning; none waits later
    assert [t.to_json() for t in both[0]] == [t.to_json() for t in both[1]]
    assert [t.status for t in both[1]] == ["done"] * 6 + ["env_error"] * 2 + ["done"] * 2


class Doors(Env):
    """Three doors, one of them right (the item's number); a wrong one ends the episode. "look" does nothing, all else is no action."""
    prompt = "Open a door: 0, 1 or 2."

    def reset(self, item):
        self.item, self.resets = item, getattr(self, "resets", 0) + 1
        return f"Three doors. (reset {self.resets})"

    def step(self, action):
        if action == "look":
            return Step("Doors.", reward=0.1, progress=0.5)
        if action not in "012":
            return Step("There is no such door.", valid=False)
        right = int(action) == self.item
        return Step("It opens." if right else "A wall.", float(right), float(right), True, right, progress=float(right))


def saying(tiny, monkeypatch, *replies):
    """A tiny model that says these replies, whatever it thinks."""
    chat = agent.Chat(tiny[1])
    script = [i for reply in replies for i in [*tiny[1].encode(reply), chat.end_id]]

    def says(logits, *_):
        return torch.tensor([script.pop(0)]), torch.zeros(1)
    monkeypatch.setattr(ro, "sample", says)
    return script


def play_doors(tiny, monkeypatch, item, horizon, *replies, **how):
    script = saying(tiny, monkeypatch, *replies)
    with EnvPool(make=lambda name: Doors()) as pool:
        (t,) = rollout(*tiny, pool, [f"doors_{item}"], horizon, max_tokens=40, action_format="plain", **how)
    assert not script
    return t, [m["content"] for m in t.messages]


def test_a_plan_is_asked_for_once_and_is_no_action(tiny, monkeypatch):
    t, said = play_doors(tiny, monkeypatch, 1, 3, "1 is right", "look", "1", plan=True)
    assert said[2].endswith(agent.PLAN) and said[3:5] == ["1 is right", agent.ACT] and said[5] == "look" and t.success
    assert (t.turns, t.valid_actions, t.status) == (3, 3, "done") and t.reward == pytest.approx(1.1)
    assert play_doors(tiny, monkeypatch, 1, 1, "1", plan=True)[0].success  # with one turn there is nothing to plan


def test_after_an_invalid_action_the_agent_is_asked_what_went_wrong(tiny, monkeypatch):
    t, said = play_doors(tiny, monkeypatch, 1, 5, "door 1", "a number is asked for", "1", reflect=True, invalid_penalty=0.25)
    assert said[4] == "There is no such door." + agent.REFLECT and said[6] == agent.ACT and t.success
    assert (t.turns, t.valid_actions, t.reward) == (3, 2, 0.75)
    t, said = play_doors(tiny, monkeypatch, 1, 2, "door 1", "1", reflect=True)  # a turn to reflect in would leave none to act in
    assert agent.REFLECT not in said[4] and t.success


def test_a_failed_episode_is_tried_once_more_within_the_same_turns(tiny, monkeypatch):
    t, said = play_doors(tiny, monkeypatch, 1, 6, "look", "0", "0 is wrong", "1", reflect=True)
    assert said[6] == "A wall." + agent.REFLECT_ON_ALL and said[8] == agent.AGAIN + "Three doors. (reset 2)"
    assert (t.turns, t.status, t.success, t.score) == (4, "done", True, 1.0)
    assert t.reward == 1.0  # what the first attempt had (0.1 for looking) is not counted
    t, said = play_doors(tiny, monkeypatch, 1, 6, "0", "hm", "2", reflect=True)
    assert (t.turns, t.status, t.success, t.reward) == (3, "done", False, 0.0)  # once
    t, said = play_doors(tiny, monkeypatch, 1, 2, "look", "0", reflect=True)
    assert (t.turns, t.status) == (2, "done")


def test_a_reply_without_an_action_is_told_so_and_does_not_reach_the_world(tiny, monkeypatch):
    script = saying(tiny, monkeypatch, "Action: 0\nAction: 1", "Action: 1")
    with EnvPool(make=lambda name: Doors()) as pool:
        (t,) = rollout(*tiny, pool, ["doors_1"], 3, max_tokens=40, action_format="react")
    assert not script and t.messages[4]["content"] == agent.complaint("Action: 0\nAction: 1", "react")
    assert "there are 2" in t.messages[4]["content"] and (t.turns, t.valid_actions, t.success) == (2, 1, True)


@pytest.mark.parametrize("action_format", agent.FORMATS)
def test_asides_obey_what_holds_for_tokens(tiny, pool, action_format):
    for t in rollout(*tiny, pool, ITEMS, 5, plan=True, reflect=True, action_format=action_format, **KW):
        expected = slow_logprobs(tiny[0], t.tokens)
        assert max(abs(a - b) for a, b, m in zip(t.logprobs, expected, t.mask) if m) < 1e-4
        assert len(t.progress) == t.turns and t.messages[2]["content"].endswith(agent.PLAN)
