"""Replies that are chosen among given texts: sampling, log-probs and training over them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_agent import with_template

import rl
import update
from agent import Chat, Choice, Open, assistant, user
from config import parse_config
from engine import Ragged
from envs import UserError, items, make_env, split_item
from rollout import Conversation, Rollouts, rollout
from trajectory import Trajectory, reply_spans
from worlds.agentgym import RemoteEnv

TOKENIZER = rl.load_tokenizer("tiny")
ITEMS = ["babyai_8", "babyai_50", "babyai_19", "textcraft_3"]
KW = dict(samples=2, seed=3, max_tokens=16, action_format="plain")
# Texts that share beginnings; after the open ones the reply is free, whatever else is listed.
OPEN = Open("look at")
TEXTS = ["go to the red ball", "go to the red box", "go", "turn left", OPEN, "look at the red ball"]


def words(play):
    messages = [*play.start(), user(play.reset())]
    while True:
        reply = yield Choice(messages, TEXTS)
        if reply == "turn left":
            reply = yield Choice([*messages, assistant(reply), user("Sure?")], ["yes"])
        if play.act(reply).done:
            return


words.chooses = True


@pytest.fixture(scope="module")
def model(tiny):
    """The built-in model at the temperature of a fresh one: all texts are likely."""
    model = copy.deepcopy(tiny[0]).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.3)
    rl.set_compute_paths(model, rl.FASTEST)
    return model


@pytest.fixture(scope="module")
def played(model, tiny, pool):
    return rollout(model, tiny[1], pool, ITEMS, 4, agent=words, **KW)


def slow_logprobs(model, t):
    """A plain forward pass over each token's beginning, and a loop over the texts that begin with
    the same ids -> (log-probs, how many ids were allowed), of the sampled tokens."""
    logprobs, counts = [], []
    spans = reply_spans(t.mask)
    for (start, end), options in zip(spans, t.choices.values()):
        segment = max(place for place in t.starts if place <= start)
        for place in range(start, end):
            reply = t.tokens[start:place]
            ids = {o[len(reply)] for o in options
                   if len(o) > len(reply) and o[: len(reply)] == reply}
            is_free = any(o[-1] is None and reply[: len(o) - 1] == o[:-1] for o in options)
            logits = model(torch.tensor([t.tokens[segment:place]])).logits[0, -1]
            if not is_free:
                logits = torch.stack([logits[i] if i in ids else logits.new_tensor(-1e30)
                                      for i in range(len(logits))])
            logprobs.append(torch.log_softmax(logits, -1)[t.tokens[place]])
            counts.append(0 if is_free else len(ids))
    return torch.stack(logprobs), counts


def test_log_probs_and_gradients_are_those_of_a_loop_over_the_texts(model, tiny, played):
    tokenizer = tiny[1]
    some = [t for t in played if t.env == "babyai"][:3]
    replies = {tokenizer.decode(t.tokens[a:b], skip_special_tokens=True)
               for t in played for a, b in reply_spans(t.mask)}
    assert {r for r in replies if not r.startswith(OPEN)} <= {*TEXTS, "yes"}
    assert len(replies) > 3 and any(r.startswith(OPEN) for r in replies)
    assert len(Chat(tokenizer).options(["go", Open("go")])) == 2

    batch = update.collate(some)
    found = torch.zeros(batch["mask"].shape)
    for part, spans in update.own_micro_batches(model, batch, range(len(some)), 10**6):
        rows, _ = rl.token_logprobs(model, part["ids"], part["mask"], allowed=part["allowed"])
        for row, (b, start, end) in zip(rows, spans):
            found[b, start:end] = row[: end - start]
    loss = expected_loss = 0
    for t, row, own in zip(some, found, batch["mask"]):
        expected, counts = slow_logprobs(model, t)
        sampled = torch.tensor(t.mask)
        assert t.logprobs == pytest.approx(
            torch.zeros(len(t.mask)).double().masked_scatter(sampled, expected).tolist(), abs=1e-5)
        decided = torch.tensor([count != 1 for count in counts])
        assert own[: len(t.mask)][sampled].tolist() == decided.tolist()
        assert expected[~decided].abs().max() == 0  # the only one allowed
        torch.testing.assert_close(row[own].double(), expected[decided], atol=1e-5, rtol=0)
        loss, expected_loss = loss + row[own].sum(), expected_loss + expected[decided].sum()
    parameters = list(model.parameters())
    for a, b in zip(torch.autograd.grad(loss.double(), parameters, allow_unused=True),
                    torch.autograd.grad(expected_loss, parameters, allow_unused=True)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_with_two_threads_the_gradients_repeat_bit_for_bit(tiny, pool):
    part = update.collate(rollout(*tiny, pool, ITEMS[:2], 3, agent="choose", **KW | {"samples": 8}))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = [torch.autograd.grad(rl.token_logprobs(
            tiny[0], part["ids"], part["mask"], allowed=part["allowed"])[0].sum(),
            tiny[0].get_output_embeddings().weight)[0] for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


def test_a_reply_with_forced_tokens_is_one_turn_and_has_one_advantage(played):
    """"turn left" or "turn right": the first token is forced, and so may one in the middle be."""
    batch = update.collate(played)
    scattered = 0
    for t, numbers in zip(played, batch["turns"]):
        spans = reply_spans(t.mask)
        assert [{*numbers[a:b].tolist()} for a, b in spans] == [{n + 1} for n in range(len(spans))]
        scattered += len(reply_spans(t.decided())) != len(spans)
    assert scattered
    made = [Trajectory("babyai_8", "babyai", reward=float(n)) for n in range(2)]
    for n, t in enumerate(made):
        t.append([1, 2])
        t.append([5, 6 + n], [0.0, -0.7], [0.0, 0.7])
        t.choices = {2: [[5, 6], [5, 7]]}
    cfg = parse_config(["--out", "runs/never-made", "--kl_coef", "0"])
    update.advantages_of(made, cfg, torch.device("cpu"))
    assert made[0].advantage == -made[1].advantage < 0


def test_a_forced_turns_reward_counts_for_the_decision_before_it(played):
    for t in map(copy.deepcopy, played):
        decided = [place for place, is_decided in enumerate(t.decided()) if is_decided]
        expected = [0.0] * len(t.tokens)
        for number, (_, end) in enumerate(reply_spans(t.mask), 1):
            t.rewards[end - 1] = number
            expected[max(place for place in decided if place < end)] += number
        assert t.credited() == expected != t.rewards


def test_the_loss_is_the_same_in_any_micro_batches(model, played):
    failed = Trajectory("babyai_1", "babyai", status="env_error")  # it has no tokens
    batch = update.collate([*played, failed])
    losses = []
    for max_tokens in (1, 400, 10**6):
        values = update.map_rows(lambda model, part: rl.token_logprobs(
            model, part["ids"], part["mask"], allowed=part["allowed"])[0], model, batch, max_tokens)
        losses.append(values)
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], atol=1e-5, rtol=0)


def test_on_a_gpu_the_choice_waits_for_the_token_before_it(model, tiny, pool, played):
    engine = Ragged(model, 3)
    engine.use_graphs = engine.reads_late = True
    again = rollout(model, tiny[1], pool, ITEMS, 4, agent=words, engine=engine, **KW)
    assert [t.tokens for t in again] == [t.tokens for t in played]


def test_a_guide_plays_turns_that_are_context_and_fades(tiny, pool):
    items = [f"babyai_{n}" for n in (0, 1, 8, 9, 10)]

    def play(step, **kw):
        return rollout(*tiny, pool, items, 4, step=step, **KW | kw)

    for t in play(5, agent="guide", agent_args="fade=1000000"):
        assert t.success and t.turns == 1  # the policy's; the expert did the rest
        assert len(reply_spans(t.mask)) == 1 and t.rewards[t.mask.index(True):].count(1.0) == 1
    alone = play(0, agent="react")
    assert [t.tokens for t in play(0, agent="guide")] == [t.tokens for t in alone]
    faded = play(5, agent="guide", agent_args="fade=5")
    assert [t.tokens for t in faded] == [t.tokens for t in play(5, agent="react")]


def shown_before_the_first_reply(t):
    """-> the first observation and the replies and observations that follow, without the
    instructions and the fixed reply to them."""
    first = next(n for n, m in enumerate(t.messages) if m["content"] == reply_of(t))
    return [m["content"] for m in t.messages[2:first]]


def reply_of(t):
    start, end = reply_spans(t.mask)[0]
    return TOKENIZER.decode(t.tokens[start:end], skip_special_tokens=True)


@pytest.mark.parametrize("horizon, share, left", [
    (4, "0.25", {1}), (6, "0.4", {2}), (4, "0.01", {1}), (6, "0.4 mixed=true", {1, 2})])
def test_backward_begins_so_many_turns_before_the_goal(tiny, pool, horizon, share, left):
    settings = dict(agent="backward", agent_args=f"share={share}")
    moved, seen = 0, set()
    for t in rollout(*tiny, pool, ITEMS, horizon, step=7, **KW | settings):
        observation, *rest = shown_before_the_first_reply(t)
        env = make_env(t.env)
        assert env.reset(split_item(t.item)[1]).strip() == observation
        for action, observation in zip(rest[::2], rest[1::2], strict=True):
            step = env.step(action)
            assert step.observation.strip() == observation and not step.done
        needed, moved = 0, moved + len(rest) // 2
        while not env.step(env.expert()).done:  # from where the policy begins
            needed += 1
        assert needed + 1 in left or (not rest and needed + 1 < max(left))
        seen.add(needed + 1)
        assert len(reply_spans(t.mask)) == t.turns and not sum(t.rewards[: t.mask.index(True)])
    assert moved > 1 and len(seen) >= min(2, len(left))
    begun = {str([t.mask.index(True) for t in rollout(
        *tiny, pool, ITEMS, horizon, step=7, **KW | settings | {"seed": n})]) for n in range(5)}
    assert (len(begun) > 1) == ("mixed" in share)
    alone = [t.tokens for t in rollout(*tiny, pool, ITEMS, 2, agent="react", **KW)]
    assert [t.tokens for t in rollout(*tiny, pool, ITEMS, 2, **KW | settings)] == alone


def test_examples_of_other_items_stand_before_the_own_episode(tiny, pool):
    names = [items("babyai", "train")[0], "babyai_8", "textcraft_3"]
    played = rollout(*tiny, pool, names, 2, agent="few_shot", agent_args="shots=2", **KW)
    for t in played:
        shown = shown_before_the_first_reply(t)
        examples = [name for name in items(t.env, "train")[:3] if name != t.item][:2]
        expected = []
        for name in [*examples, t.item]:
            env = make_env(t.env)
            own = [env.reset(split_item(name)[1]).strip()]
            if expected:
                own[0] = f"{expected.pop()}\n\nThe next task.\n\n{own[0]}"
            step = None
            while name != t.item and not (step and step.done):
                action = env.expert()
                step = env.step(action)
                own += [action, step.observation.strip() or "Done."]
            expected += own
        assert shown == expected and t.turns == len(reply_spans(t.mask)) <= 2
    starts = [t.tokens[:400] for t in played if t.item in names[1:2]]
    assert starts[0] == starts[1]
    (t, _) = rollout(*tiny, pool, names[1:2], 1, agent="few_shot",
                     agent_args="shots=1 data=data/rooms", **KW)
    number = split_item(items("babyai", "train", "data/rooms")[0])[1]
    assert shown_before_the_first_reply(t)[0] == make_env("babyai").reset(number).strip()


def test_a_model_on_a_server_cannot_choose():
    conversation = Conversation(Trajectory("babyai_8", "babyai"), 2, Rollouts(agent=words), None)
    with pytest.raises(UserError, match="tokens"):
        conversation.advance(make_env("babyai"))
    with pytest.raises(UserError, match="h:1"):  # nor among what a world on a server offers
        RemoteEnv.choices(SimpleNamespace(url="http://h:1"))


def test_the_agent_choose_plays_only_possible_actions(tiny, pool):
    for agent, action_format in (("choose", "plain"), ("choose", "react"), ("guide", "plain"),
                                 ("backward", "plain"), ("few_shot", "plain")):
        args = "" if agent == "choose" else "choose=true"
        for t in rollout(*tiny, pool, ITEMS, 3, agent=agent, step=2, agent_args=args, **KW | {
                "action_format": action_format, "max_tokens": 40}):
            assert not t.error and t.valid_actions == t.turns > 0 and t.choices
    free = rollout(*tiny, pool, ITEMS, 3, agent="choose", agent_args="free=true", **KW)
    alone = rollout(*tiny, pool, ITEMS, 3, agent="react", **KW)
    assert [t.tokens for t in free] == [t.tokens for t in alone]


@pytest.mark.parametrize("name", ["nemotron_3_nano", "qwen3_5"])
def test_a_prompt_that_opens_a_thought_leaves_each_chosen_action_valid(tiny, pool, name):
    tokenizer = with_template(tiny[1], (ROOT / f"tests/templates/{name}.jinja").read_text())
    assert Chat(tokenizer).opens_thought
    for t in rollout(tiny[0], tokenizer, pool, ITEMS, 3, agent="choose", **KW | {
            "max_tokens": 40}):
        assert t.valid_actions == t.turns > 0 and not t.unclosed_turns


def test_in_searchqa_the_words_of_a_search_or_an_answer_are_free(tiny, pool):
    pytest.importorskip("bm25s")
    names = items("searchqa", "train")[:4]
    for t in rollout(*tiny, pool, names, 3, agent="choose", **KW | {"action_format": "tags"}):
        replies = [TOKENIZER.decode(t.tokens[a:b]) for a, b in reply_spans(t.mask)]
        assert replies and all(r.startswith(("<search>", "<answer>")) for r in replies)
        assert not t.error and {ids is None for ids in t.allowed()} == {True, False}
    assert not set(make_env("searchqa").valid_actions())  # for sft.py --noise


def test_it_is_shown_so_many_earlier_turns_and_the_task_after_each_observation(tiny, pool):
    def prompts(t):
        """The text of each prompt, from the messages that were new in it."""
        return [TOKENIZER.decode(t.tokens[start:end]) for start, end in zip(
            (max(s for s in t.starts if s <= place) for place, _ in reply_spans(t.mask)),
            (place for place, _ in reply_spans(t.mask)))]

    for agent, keep in (("choose", 0), ("choose", 1), ("backward", 0)):
        for t in rollout(*tiny, pool, ITEMS, 3, agent=agent, **KW | {
                "agent_args": f"keep={keep} task=true"}):
            first = t.messages[2]["content"].split("\n")
            goal, = {line for line in first if line.startswith(("Goal: ", "Your goal: "))}
            replies = [m["content"] for m in t.messages[3:] if m["role"] == "assistant"]
            for n, prompt in enumerate(prompts(t)):
                # Once for each turn that is shown, and once in the first observation.
                assert prompt.count(goal) == 1 + min(n, keep) + (n <= keep)
                assert prompt.split(goal)[-1] == "<|im_end|>\n<|im_start|>assistant\n"
                for k, reply in enumerate(replies[:n]):
                    assert (f"{reply}<|im_end|>" in prompt) >= (n - k <= keep)
