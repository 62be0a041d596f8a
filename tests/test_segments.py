"""Agents that show the model something else than the whole conversation, templates that rewrite
history, and agents that somebody else wrote: each prompt begins a new segment or extends one.

Oracles: the model's plain forward pass over a segment alone, transformers' `apply_chat_template`,
slow loops over the sampled tokens.
"""

import copy
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests
import torch
from conftest import ROOT, plain_logprobs, random_model
from test_rollout import scripted
from test_train import TINIEST, assert_same, completed, metrics, refused

import agent
import envs
import rl
import rollout as rollouts
import sft
import update
from agent import Chat, Play, assistant, user
from config import parse_config
from envs import AgentError, Env, EnvPool, ItemError, Step
from rollout import rollout
from trajectory import Status

EXAMPLES = ["last_two", "two_calls", "tools", "planner"]
AGENTS = {"react": {}, "window": dict(agent="window", agent_args="keep=1"),
          "summary": dict(agent="summary", agent_args="every=2"),
          **{name: dict(agent=f"examples/{name}.py:agent") for name in EXAMPLES},
          "foreign": dict(agent="examples/foreign.py:agent",
                          agent_args="run=examples/their_agent.py:run")}
ONE_SEGMENT = {"react", "tools"}
ITEMS = ["babyai_50", "babyai_90", "babyai_8"]
SETTINGS = dict(samples=2, max_tokens=24, horizon=6)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Agents are files of the project."""
    monkeypatch.chdir(ROOT)


def play(model, pool, agent_name, **changes):
    how = SETTINGS | AGENTS[agent_name] | changes
    return rollout(*model, pool, ITEMS, how.pop("horizon"), **how)


def segments_of(t, *columns):
    """Yield each segment's tokens, mask, recorded log-probs and other columns [1, T]."""
    for start, end in t.spans():
        yield [torch.tensor([row[start:end]]) for row in (t.tokens, t.mask, t.logprobs, *columns)]


def sampled_of(t):
    """The tokens that the policy sampled."""
    return [token for token, sampled in zip(t.tokens, t.mask) if sampled]


def check_logprobs(model, t, tolerance):
    """The recorded log-probs are those of the plain forward pass over each segment alone."""
    for ids, mask, recorded in segments_of(t):
        with torch.no_grad():
            logp, _ = plain_logprobs(model, ids, mask)
        torch.testing.assert_close(recorded, logp, atol=tolerance, rtol=0)


# ---- what is sampled ----


@pytest.mark.parametrize("name", AGENTS)
def test_each_token_is_sampled_once_with_the_log_prob_of_its_segment_alone(
        tiny, pool, monkeypatch, name):
    drawn = {}  # trajectory -> the tokens that were sampled for it, in order
    add_token = rollouts.Episode.add_token

    def noted(episode, token, *numbers):
        drawn.setdefault(id(episode.trajectory), []).append(token)
        return add_token(episode, token, *numbers)

    monkeypatch.setattr(rollouts.Episode, "add_token", noted)
    stats = {}
    played = play(tiny, pool, name, stats=stats)
    assert all(t.status in (Status.DONE, Status.HORIZON) for t in played)
    assert (max(len(t.starts) for t in played) > 1) == (name not in ONE_SEGMENT)
    assert max(t.turns for t in played) > 2
    for t in played:
        assert sampled_of(t) == drawn[id(t)]
        assert len(update.reply_spans(t.mask)) == t.turns
        assert t.starts[0] == 0 and not any(t.mask[start] for start in t.starts)
        check_logprobs(tiny[0], t, 1e-4)
    if name == "window":  # a new segment copies the prefix that it shares
        assert stats["forwarded"] < 0.8 * sum(len(t.tokens) for t in played)
    said = attrgetter("tokens", "starts", "reward", "status")
    assert [*map(said, play(tiny, pool, name, engine="hf", slots=2))] == [*map(said, played)]


def test_the_longest_segment_is_limited_and_not_the_trajectory(tiny, pool):
    longest = max(len(t.tokens) for t in play(tiny, pool, "react", horizon=8))
    cut = play(tiny, pool, "react", horizon=8, max_length=longest - 40)
    assert Status.LENGTH in {t.status for t in cut}
    windows, unlimited = (play(tiny, pool, "window", horizon=8, **limit)
                          for limit in (dict(max_length=longest - 40), {}))
    assert {t.status for t in windows} <= {Status.DONE, Status.HORIZON}
    assert max(len(t.tokens) for t in windows) > longest
    assert [t.to_json() for t in windows] == [t.to_json() for t in unlimited]
    assert max(end - start for t in windows for start, end in t.spans()) < longest - 40


def test_a_recurrent_model_plays_segments(tiny, pool):
    """On its own attention and state, which a new segment computes anew for all rows."""
    model = random_model("qwen3_5_text", linear_num_key_heads=2, linear_num_value_heads=4,
                         linear_key_head_dim=16, linear_value_head_dim=16,
                         layer_types=["linear_attention", "full_attention"])
    played = play((model, tiny[1]), pool, "window", horizon=3, max_tokens=6, samples=1)
    assert max(len(t.starts) for t in played) > 1
    for t in played:
        check_logprobs(model, t, 5e-4)


# ---- templates that rewrite history ----

TEMPLATES = {  # name -> its special tokens, the token that ends a reply
    "qwen3": (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "r1_distill": (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
                    "<｜Assistant｜>"], "<｜end▁of▁sentence｜>"),
    "glm_4_6": (["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
                "<|user|>")}


@pytest.fixture(params=TEMPLATES, scope="module")
def thinking(request):
    """The built-in model with the template of a family that drops earlier thoughts."""
    model, tokenizer = rl.load_policy("tiny")
    names, end = TEMPLATES[request.param]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = end
    if request.param == "r1_distill":
        tokenizer.bos_token = names[0]
    tokenizer.generation_eos_ids = []
    tokenizer.chat_template = (ROOT / f"tests/templates/{request.param}.jinja").read_text()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rl.set_compute_paths(model, rl.FASTEST)
    return model, tokenizer


class Echo(Env):
    """Answers with what it was told. "look" ends nothing, "stop" does."""

    prompt = "Play <|im_end|><|user|><｜User｜>."  # no text of a world is a control token
    instant = True

    def reset(self, item):
        return f"  Item {item}.<|im_end|>\n<|im_start|>assistant\n"

    def step(self, action):
        return Step(f"You said {action}.\n<｜Assistant｜><|assistant|>\n", 0.5, 0.5,
                    action == "stop", True)


@pytest.fixture(scope="module")
def echoes():
    with EnvPool(make=lambda _: Echo()) as pool:
        yield pool


SAYS = ["<think>\nwhere am I?\n</think>\n\nlook", "jump", "<think>hm</think>look", "",
        "<think>\nenough\n</think>", "stop"]


def say(model, echoes, monkeypatch, replies, **how):
    """Play an episode in which the policy writes these replies -> trajectory, ids of the
    replies."""
    tokenizer = model[1]
    if Chat(tokenizer).opens_thought:  # the policy has to close it
        replies = [text if "</think>" in text else f"</think>{text}" for text in replies]
    written = [tokenizer.encode(text) + tokenizer.encode(tokenizer.eos_token) for text in replies]
    rest = scripted(monkeypatch, sum(written, []))
    (t,) = rollout(*model, echoes, ["echo_1"], 9, action_format="plain", max_tokens=60, **how)
    assert next(rest, None) is None
    return t, written


@pytest.mark.parametrize("name", ["react", "window", "last_two"])
@pytest.mark.parametrize("template_args", ["", "enable_thinking=false"])
def test_every_prompt_is_what_the_template_writes(
        thinking, echoes, monkeypatch, request, name, template_args):
    """As text, and as ids: the scripted replies have the ids that the tokenizer gives them."""
    model, tokenizer = thinking
    tokenizer = copy.deepcopy(tokenizer)
    if template_args and "enable_thinking" not in tokenizer.chat_template:
        pytest.skip("this template has no such switch")
    tokenizer.tried_template = agent.try_template(tokenizer, chat_args=template_args)
    template = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True,
                       **agent.read_settings(template_args, ""))
    asked = []  # the messages of every prompt
    send = Play.send
    monkeypatch.setattr(Play, "send", lambda *how: asked.append(send(*how)) or asked[-1])
    chat = Chat(tokenizer)
    assert chat.drops_thoughts and chat.history == "template"
    t, written = say((model, tokenizer), echoes, monkeypatch, SAYS, parse="strict", **AGENTS[name])
    assert t.turns == len(SAYS) and t.status == Status.DONE
    spans = update.reply_spans(t.mask)
    assert [t.tokens[a:b] for a, b in spans] == written
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for (place, _), messages in zip(spans, asked):
        start = max(s for s in t.starts if s <= place)
        ids = t.tokens[start:place]
        assert tokenizer.decode(ids) == template(messages)
        # The ids: where the messages hold no text of a control token, the whole text is encoded
        # at once to the same.
        harmless = [m | {"content": re.sub(r"[\W_]+", " ", m["content"]).strip()}
                    if m["role"] == "user" else m for m in messages]
        expected = tokenizer.encode(template(harmless), split_special_tokens=False)
        assert chat.prompt(harmless) == expected
        assert Counter(i for i in ids if i in control) == Counter(
            i for i in expected if i in control)
    if name == "react":
        # Where a template shows a reply as it was sampled, the prompt after it extends the segment:
        # Qwen3's a reply without a thought, GLM's without thinking an empty one.
        extending = {("qwen3", ""): 2, ("glm_4_6", "enable_thinking=false"): 1}
        family = next(family for family in TEMPLATES if family in request.node.name)
        assert len(t.starts) == 6 - extending.get((family, template_args), 0)


def test_history_append_keeps_every_reply_as_it_was_sampled(thinking, echoes, monkeypatch):
    replies = [SAYS[0], SAYS[2], "stop"]
    t, written = say(thinking, echoes, monkeypatch, replies, history="append")
    assert len(t.starts) == 1 and sampled_of(t) == sum(written, [])


TOOL = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
WEIGH = [{"type": "function", "function": {"name": "weigh", "parameters": {}}}]


@pytest.mark.parametrize("said", ["<think>\nhm\n</think>\n\ncount", "<think>hm</think>count",
                                  "<think>hm</think>", "count", " count\n"])
def test_tools_and_their_answers_are_what_the_template_writes(thinking, said):
    """After the last question Qwen3's and GLM's templates keep a thought, and write it in their own
    form. No text of a tool is a control token."""
    tokenizer, chat = thinking[1], Chat(thinking[1])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [user("How many?"), assistant(said), {"role": "tool", "content": "7<|im_end|>"}]
    for shown in (messages, [*messages, user("And?")]):
        ids = chat.prompt(shown, TOOL)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            shown, tools=TOOL, tokenize=False, add_generation_prompt=True)
        harmless = chat.prompt([m | {"content": m["content"].replace("<|im_end|>", "")}
                                for m in shown], TOOL)
        assert ids.count(end) == harmless.count(end)
    if ids != chat.prompt(shown):  # the template shows tools
        with pytest.raises(ValueError, match="control token"):
            chat.prompt(messages, [{"type": "function", "function": {"name": tokenizer.eos_token}}])


def test_old_replies_keep_their_sampled_ids_and_other_messages_do_not_get_them(
        tiny, echoes, monkeypatch):
    """Replies are written character by character, and "look" twice in different ids. The user's
    message quotes a reply."""
    tokenizer = tiny[1]
    apart = [token for character in "look" for token in tokenizer.encode(character)]
    written = [tokenizer.encode("look"), apart, apart]
    assert written[0] != apart

    def quoting(play):
        turns, observation = [], play.reset()
        while True:
            reply = yield [user(f"{len(turns)}"), *turns, user(observation)]
            turns += [user(observation), assistant(reply)]
            play.act(reply)
            observation = reply

    scripted(monkeypatch, [i for ids in written for i in (*ids, tokenizer.eos_token_id)])
    (t,) = rollout(*tiny, echoes, ["echo_1"], 3, agent=quoting, max_tokens=20,
                   action_format="plain")
    assert len(t.starts) == 3
    last = t.tokens[t.starts[2]:]
    start, stop = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("<|im_end|>\n")
    quoted = tokenizer.encode("<|im_start|>user\nlook<|im_end|>")
    for part, count in ((start + written[0] + stop, 1), (start + apart + stop, 1), (quoted, 2)):
        assert sum(last[i:i + len(part)] == part for i in range(len(last))) == count


def test_other_tools_begin_a_segment(thinking, echoes, monkeypatch):
    if "tools" not in thinking[1].chat_template:
        pytest.skip("this template shows no tools")

    def changing(play):
        messages = [user(play.reset())]
        for play.tools in (TOOL, TOOL, WEIGH):
            messages += [assistant((yield messages)), user("More.")]

    t, _ = say(thinking, echoes, monkeypatch, ["look"] * 3, agent=changing, history="append")
    assert len(t.starts) == 2
    assert "weigh" in thinking[1].decode(t.segment())


def test_a_template_with_channels_drops_the_analysis_in_a_new_segment(
        channels, echoes, monkeypatch):
    analysis = "<|channel|>analysis<|message|>left or right?<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>"
    replies = [f"{analysis}{final}look", "<|channel|>final<|message|>stop"]
    t, _ = say(channels, echoes, monkeypatch, replies, engine="hf")
    assert len(t.starts) == 2 and t.success
    first, second = (channels[1].decode(t.tokens[a:b]) for a, b in t.spans())
    assert "left or right?" in first and "left or right?" not in second
    assert f"{final}look<|end|><|start|>user" in second


def test_a_system_message_stands_where_the_template_has_it_or_before_the_first_message(
        tiny, thinking):
    messages = [{"role": "system", "content": "Be brief."}, user("Go.")]
    for tokenizer in (tiny[1], thinking[1]):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert "Be brief." in text
        assert tokenizer.decode(Chat(tokenizer).prompt(messages)) == text
    without = refusing(tiny[1], "system")
    assert "<|im_start|>user\nBe brief.\n\nGo.<|im_end|>" in without.decode(
        Chat(without).prompt(messages))


def refusing(tokenizer, role):
    """A copy of the tokenizer, whose template refuses a first message of this role."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (f"{{% if messages[0].role == '{role}' %}}{{{{ raise_exception('no')"
                               f" }}}}{{% endif %}}{tokenizer.chat_template}")
    return tokenizer


# ---- what is learnt ----


@pytest.fixture(scope="module")
def segmented(tiny, pool):
    with pytest.MonkeyPatch.context() as m:
        m.chdir(ROOT)
        return [*play(tiny, pool, "window"), *play(tiny, pool, "two_calls", step=1)]


@pytest.mark.parametrize("played, mode, microbatch", [
    ("trajectories", "token", 1), ("trajectories", "sequence", 1), ("segmented", "token", 1),
    ("segmented", "sequence", 400), ("segmented", "token", 10**6)])
def test_an_update_takes_the_step_of_the_plain_loss_of_each_segment_alone(
        tiny, request, played, mode, microbatch):
    """The oracle: the loss of the whole batch, token by token. Trajectory 1 has advantage 0,
    trajectory 2 is of a failed environment."""
    cfg = parse_config(["--out", "runs/never-made", "--minibatches", "1", "--kl_coef", "0.3",
                        "--microbatch_tokens", str(microbatch), "--entropy_coef", "0.2",
                        "--loss_args", "clip_high=0.3",
                        "--set", "max_grad_norm=1e9", f"aggregation={mode}"])
    generator = torch.Generator().manual_seed(0)
    played = copy.deepcopy(request.getfixturevalue(played)[:8:2])
    played[2].status = Status.ENV_ERROR
    references = []
    for number, t in enumerate(played):
        t.group = number
        noise = torch.randn(2, len(t.tokens), generator=generator) * 0.3 * torch.tensor(t.mask)
        references.append((torch.tensor(t.logprobs) + noise[0]).tolist())
        t.logprobs = (torch.tensor(t.logprobs) + noise[1]).tolist()
    advantages = [1.5, 0.0, -0.5, -1.5][:len(played)]
    batch = update.collate(played, advantages=advantages, ref_logprobs=references)
    model, plain = copy.deepcopy(tiny[0]), copy.deepcopy(tiny[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = update.update(played, batch, cfg, 0, model, optimizer)

    sums, counts = [], []  # one for each trajectory
    for t, advantage, reference in zip(played, advantages, references, strict=True):
        if t.status == Status.ENV_ERROR:
            continue
        losses = []
        for ids, mask, old, ref in segments_of(t, reference):
            logp, entropy = plain_logprobs(plain, ids, mask)
            ratio = (logp - old).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
            k3 = (ref - logp).exp() - (ref - logp) - 1
            losses += (-clipped + 0.3 * k3 - 0.2 * entropy)[mask]
        sums.append(sum(losses))
        counts.append(len(losses))
    loss = sum(sums) / sum(counts)
    if mode == "sequence":
        loss = sum(total / count for total, count in zip(sums, counts)) / len(counts)
    loss.backward()
    assert len(set(counts)) > 1
    assert result["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for p, q, before in zip(model.parameters(), plain.parameters(), tiny[0].parameters()):
        torch.testing.assert_close(p, before - q.grad, atol=1e-5, rtol=0)
    assert max(q.grad.abs().max() for q in plain.parameters()) > 1e-2


@pytest.mark.parametrize("algo, gamma, lam", [("ppo", 0.97, 0.9), ("reinforce_pp", 0.95, 1.0)])
def test_advantages_walk_over_the_sampled_tokens_of_all_segments(
        tiny, segmented, algo, gamma, lam):
    """The oracle: the loop over a trajectory's sampled tokens, with the critic's value of each in
    its segment alone."""
    settings = f"gamma={gamma} lam={lam}" if algo == "ppo" else f"gamma={gamma}"
    cfg = parse_config(["--out", "runs/never-made", "--algo", algo, "--algo_args", settings,
                        "--kl_coef", "0"])
    played = copy.deepcopy(segmented)
    critic = rl.Critic("tiny").requires_grad_(False).eval()
    critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = update.advantages_of(played, cfg, torch.device("cpu"), critic=critic)
    expected = []
    for t in played:
        values = [0.0] * len(t.tokens)
        if algo == "ppo":
            values = [value for ids, mask, _ in segments_of(t)
                      for value in critic(ids, mask)[0].tolist()]
        own, after, value_after = [], 0.0, 0.0
        for place in reversed([i for i, sampled in enumerate(t.mask) if sampled]):
            delta = t.rewards[place] + gamma * value_after - values[place]
            after = delta + gamma * lam * after
            value_after = values[place]
            own.append(after)
        expected += own[::-1]
    expected = torch.tensor(expected)
    expected = (expected - expected.mean()) / (expected.std(correction=0) + 1e-8)
    found = batch["advantages"][batch["mask"]]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert max(len(t.starts) for t in played) > 2


# ---- agents and their faults ----


def test_what_an_agent_earns_changes_success_and_score_only_where_it_says_so():
    def paid(play, **judged):
        play.act((yield [user(play.reset())]))
        play.turn.success = True  # as the world says
        play.earn(-0.75)
        play.earn(0.25, **judged)

    for judged, expected in (({}, (0.0, 0.5, True)), ({"success": False}, (0.0, 0.25, False))):
        episode = Play(Echo(), "echo_1", 5, agent.load_agent(partial(paid, **judged)))
        episode.send()
        assert episode.send("stop") is None and episode.turn.done
        assert (episode.turn.reward, episode.turn.score, episode.turn.success) == expected


def test_what_an_agent_does_between_two_replies_is_the_last_replys():
    def several(play):
        reply = yield [user(play.reset())]
        play.turn.valid = False  # as after an invalid action
        play.step(reply)
        play.step("again")
        play.earn(0.25)
        play.act((yield [user("more")]))

    episode = Play(Echo(), "echo_1", 5, agent.load_agent(several))
    episode.send()
    episode.send("look")
    assert episode.turn.reward == 1.25 and episode.turn.score == 0.5 and episode.turns == 1
    assert not episode.turn.valid
    assert episode.send("stop") is None
    assert (episode.turn.reward, episode.turn.done) == (0.5, True)


def test_a_message_that_the_agent_writes_itself_extends_the_segment_and_is_not_learnt(
        tiny, echoes):
    def guided(play):
        messages = [*play.start(), user(play.reset())]
        for said in ("jump", "hop"):
            messages.append(assistant((yield messages)))
            step = play.step(said)
            messages += [user(step.observation), assistant(said)]
            messages += [user(play.step("look").observation)]
        yield messages

    (t,) = rollout(*tiny, echoes, ["echo_1"], 3, agent=guided, max_tokens=5)
    assert t.starts == [0] and t.turns == 3 and len(update.reply_spans(t.mask)) == 3
    text = tiny[1].decode([token for token, mask in zip(t.tokens, t.mask) if not mask])
    assert text.count("assistant\njump<|im_end|>") == text.count("assistant\nhop<|im_end|>") == 1


@pytest.mark.parametrize("agent", ["guide", "backward"])
def test_an_agent_that_needs_an_expert_is_refused_without_one(tiny, echoes, agent):
    with pytest.raises(envs.UserError, match="no expert"):
        rollout(*tiny, echoes, ["echo_1"], 3, agent=agent, step=1)


def yields(*prompts):
    """An agent that yields these prompts, or raises one, and then ends the episode."""
    def agent(play):
        play.reset()
        for prompt in prompts:
            if isinstance(prompt, Exception):
                raise prompt
            _ = yield prompt
    return agent


def early(play):
    play.reset()
    play.step("look")
    yield [user("Go.")]


def hasty(play):
    play.step("look")
    yield [user("Go.")]


@pytest.mark.parametrize("function, says", [
    (yields([{"role": "user", "content": None}]), "TypeError"), (hasty, "play.reset"),
    (yields([user("Go.")], KeyError("a bug")), "KeyError: 'a bug'"),
    (yields(), "before the first reply"), (early, "belongs to no reply"),
    (yields([]), "the last message"), (yields([assistant("I went.")]), "the last message")])
@pytest.mark.parametrize("is_instant", [True, False])
def test_a_bug_of_an_agent_ends_the_run(tiny, echoes, function, says, is_instant):
    function.instant = is_instant
    with pytest.raises(AgentError, match=says):
        rollout(*tiny, echoes, ["echo_1"], 4, agent=function, max_tokens=5)


IMPOSSIBLE = {4: {"reward": float("nan")}, 7: {"reward": 1e308}, 8: {"reward": "1"},
              9: {"success": "no"}, 10: {"done": "False"}, 11: {"observation": None},
              12: {"score": 7}, 13: {"progress": float("inf")}, 14: {"valid": None}}


class Faulty(Echo):
    def reset(self, item):
        self.item = item
        if item in (1, 5, 6):
            raise {1: ItemError("no such item"), 5: StopIteration, 6: ValueError("a bug")}[item]
        return None if item == 2 else "Go."

    def step(self, action):
        if self.item in IMPOSSIBLE:
            return Step(**{"observation": "x"} | IMPOSSIBLE[self.item])
        raise KeyError("the world's")


def deaf(play):
    messages = [*play.start(), user(play.reset())]
    while True:
        reply = yield messages
        try:
            play.act(reply)
        except Exception:
            messages += [assistant(reply), user("Never mind.")]


@pytest.mark.parametrize("item, player", [
    *((f"echo_{number}", "window") for number in (2, 3, 5, 6, *IMPOSSIBLE)), ("echo_3", deaf)])
def test_a_fault_of_the_world_is_an_env_error_under_any_agent_also_if_it_is_caught(
        tiny, item, player):
    with EnvPool(make=lambda _: Faulty()) as pool:
        play = partial(rollout, *tiny, pool, horizon=4, max_tokens=5, action_format="plain")
        (t,) = play([item], agent=player, retries=0)
        assert t.status == Status.ENV_ERROR
        with pytest.raises(ItemError, match="no such item"):
            play(["echo_1"], agent="window")


def test_generators_are_closed_in_the_thread_of_their_environment(tiny):
    closed = []  # whether in the main thread

    def closing(play):
        try:
            while True:
                yield [user(play.reset())]
        finally:
            play.reset()  # the environment is still its own
            closed.append(threading.current_thread() is threading.main_thread())

    closing.instant = True
    with EnvPool(make=lambda _: Echo()) as pool:
        play = partial(rollout, *tiny, pool, horizon=2, agent=closing, max_tokens=3)
        play(["echo_1", "echo_2"], samples=2)
        with pytest.raises(KeyboardInterrupt):
            play(["echo_3"], on_step=Mock(side_effect=KeyboardInterrupt))
    assert closed == [False] * 5


def test_an_agent_that_may_wait_runs_in_no_main_thread_and_has_a_deadline(tiny):
    in_main_thread = set()

    def waiting(play):
        while True:
            in_main_thread.add(threading.current_thread() is threading.main_thread())
            yield [user(play.reset())]
            if play.number == 2:
                time.sleep(2.5)

    began = time.monotonic()
    played = rollout(*tiny, EnvPool(make=lambda _: Echo()), ["echo_1", "echo_2"], 2, agent=waiting,
                     max_tokens=3, deadline=0.5, retries=0)
    assert time.monotonic() - began < 2.5
    assert [t.status for t in played] == [Status.HORIZON, Status.ENV_ERROR]
    assert "timeout" in played[1].error and in_main_thread == {False}


def test_a_run_goes_on_with_the_source_of_its_agent_alone_and_is_evaluated_with_it(tmp_path):
    path = tmp_path / "mine.py"
    source = (ROOT / "examples/last_two.py").read_text()
    path.write_text(source)
    args = [*TINIEST, "--agent", f"{path}:agent", "--out", tmp_path / "r"]
    completed(*args)
    envs._load_file.cache_clear()  # another process would import it anew
    path.write_text(source + "# changed")
    assert "agent_sha256" in refused(*args, "--resume", "--steps", "2")
    path.write_text(source)
    completed(*args, "--resume", "--steps", "2")
    evaluation = ["--model", tmp_path / "r/final", "--items", "2"]
    completed(*evaluation, script="eval.py")
    path.unlink()
    envs._load_file.cache_clear()
    assert "there is no agent" in refused(*evaluation, script="eval.py")


def test_an_expert_plays_for_any_agent_that_asks_for_actions(tiny, tmp_path):
    cfg = sft.parse_sft_config(["--demos", "4", "--agent", "window", "--agent_args", "keep=0",
                                "--out", str(tmp_path / "r")])
    for t in sft.expert_trajectories(cfg, Chat(tiny[1]), "train", 6, 0.3):
        assert t.success and len(t.starts) == t.turns
        for (start, end), reply in zip(t.spans(), t.messages[3::2]):
            segment = tiny[1].decode(t.tokens[start:end])
            assert segment.endswith(f"assistant\n{reply['content']}<|im_end|>")
            assert segment.count("<|im_start|>") == 4  # instructions, OK, observation, reply
    cfg.agent, cfg.agent_args = "summary", "every=1"
    with pytest.raises(envs.UserError, match="has no SUMMARY"):
        sft.expert_trajectories(cfg, Chat(tiny[1]), "train", 6, 0.3)


# ---- programs that somebody else wrote ----


def client(url, item, behaviour):
    """A program with `openai` that plays three turns, or does something wrong with item 2."""
    from openai import OpenAI
    fault = behaviour if item == 2 else ""
    if fault == "silent":
        return 1.0
    speaker = OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "system", "content": "You play."}, {"role": "user", "content": f"{item}?"}]
    for _ in range(3):
        answer = speaker.chat.completions.create(model="policy", messages=messages, tools=TOOL)
        said = answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")
        if fault == "crash":
            raise RuntimeError("their bug")
        if fault == "hang":
            time.sleep(60)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    return None if fault == "nothing" else len(said) % 2


fine, crash, hang, nothing, silent = (
    partial(client, behaviour=what) for what in ("", "crash", "hang", "nothing", "silent"))


def foreign(tiny, name, horizon=6, **changes):
    how = dict(agent="examples/foreign.py:agent", agent_args=f"run={__name__}:{name}", samples=2,
               max_tokens=6, retries=0) | changes
    with EnvPool(make=lambda _: Echo()) as pool:
        return rollout(*tiny, pool, ["echo_1", "echo_2", "echo_3"], horizon, **how)


@pytest.fixture(scope="module")
def good(tiny):
    pytest.importorskip("openai")
    return foreign(tiny, "fine")


@pytest.mark.parametrize("name, error", [("crash", "their bug"), ("nothing", "NoneType"),
                                         ("hang", "5 s"), ("silent", "after 0 requests")])
def test_a_program_that_fails_costs_its_own_episode(tiny, good, name, error):
    assert all(t.status == Status.DONE and t.turns == 3 for t in good)
    assert {t.reward for t in good} == {0.0, 1.0}
    deadline = 5.0 if name == "hang" else 60.0
    for before, t in zip(good, foreign(tiny, name, deadline=deadline)):
        if t.item == "echo_2":
            assert t.status == Status.ENV_ERROR and error in t.error
        else:  # other numbers of slots are computed at once, which may change the last digit
            rounded = {"logprobs": pytest.approx(before.logprobs, abs=1e-4),
                       "entropies": pytest.approx(before.entropies, abs=2e-3)}
            assert t.to_json() == before.to_json() | rounded


ANSWERED = []  # of each episode of `both`: its address, the codes that it got


def both(url, item):
    """Two requests at once, of which the horizon lets one through."""
    with ThreadPoolExecutor() as threads:
        ANSWERED.append((url, sorted(threads.map(ask, [url] * 2))))
    return 1.0


def ask(url, *earlier):
    body = {"messages": [*earlier, user("x")]}
    return requests.post(f"{url}/chat/completions", json=body, timeout=30).status_code


def test_requests_after_the_end_get_410_and_change_nothing(tiny):
    played = foreign(tiny, "both", horizon=1)
    assert {(t.status, t.turns, t.reward) for t in played} == {(Status.HORIZON, 1, 0.0)}
    wait_for(lambda: len(ANSWERED) == len(played))
    for url, codes in ANSWERED:
        assert codes == [200, 410] and ask(url) == 410


def wait_for(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def bad_role(url, item):
    return float(ask(url, {"role": "tool", "content": "x"}) == 400 and fine(url, item) >= 0)


def test_messages_that_the_template_refuses_are_a_400_and_the_episode_goes_on(tiny):
    pytest.importorskip("openai")
    played = foreign((tiny[0], refusing(tiny[1], "tool")), "bad_role")
    assert {(t.status, t.reward, t.turns) for t in played} == {(Status.DONE, 1.0, 3)}


def test_many_programs_may_ask_at_once():
    server = envs.load_named("examples/foreign.py:server", {}, "server")()
    with ThreadPoolExecutor(128) as threads:
        assert {*threads.map(ask, [f"{server.url}/x/v1"] * 128)} == {410}


SLEEPER = """
import os, sys, time, urllib.request
open(sys.argv[2], "w").write(str(os.getpid()))
urllib.request.urlopen(sys.argv[1] + "/chat/completions",
                       b'{"messages": [{"role": "user", "content": "x"}]}')
time.sleep(100)
"""


def test_a_program_that_outlives_its_episode_is_killed(tiny, tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = f"{sys.executable} {tmp_path}/sleeper.py {{url}} {tmp_path}/pid"
    (t,) = rollout(*tiny, EnvPool(make=lambda _: Echo()), ["echo_1"], 2, max_tokens=4, deadline=4.0,
                   agent="examples/foreign.py:agent", agent_args=f"command='{command}'", retries=0)
    assert t.status == Status.ENV_ERROR
    pid = (tmp_path / "pid").read_text()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("body, says", [
    ({"messages": [user("\ud800")]}, "Unicode"), ({"stream": True}, "stream"), ({}, "messages"),
    ({"messages": [assistant("x")]}, "not the model's own"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ({"messages": [assistant("") | {"tool_calls": [{}]}, user("x")]}, "tool_calls"),
    ("[" * 10**5, "RecursionError"), ("{", "JSONDecodeError"), (b"", "at most")])
def test_a_request_that_the_endpoint_does_not_take_is_told_why(body, says):
    server = envs.load_named("examples/foreign.py:server", {}, "server")()
    how = {"json": body} if isinstance(body, dict) else {"data": body}
    if not body and says == "at most":
        how["headers"] = {"Content-Length": str(2**40)}
    answer = requests.post(f"{server.url}/x/v1/chat/completions", timeout=9, **how)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert server.server_address[0] == "127.0.0.1"


def test_a_program_in_a_process_of_its_own_is_played_unchanged(tiny):
    program = f"command='{sys.executable} examples/their_agent.py {{url}} {{item}}'"
    played = foreign(tiny, "", agent_args=program, samples=1, max_tokens=24)
    assert {t.status for t in played} == {Status.DONE} and max(t.turns for t in played) == 4
    for t in played:
        check_logprobs(tiny[0], t, 1e-4)


def test_the_endpoint_is_trained_on_by_openais_package_twice_bit_for_bit(tmp_path):
    pytest.importorskip("openai")
    flags = [*TINIEST, "--horizon", "6", "--steps", "3", "--max_tokens", "8", "--algo", "rloo",
             "--agent", "examples/foreign.py:agent", "--agent_args", f"run={__name__}:fine"]
    for name in "ab":
        completed(*flags, "--out", tmp_path / name)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert any(row["grad_norm"] > 0 for row in metrics(tmp_path / "a"))


def test_an_example_needs_no_more_than_its_file():
    assert all(agent.load_agent(f"examples/{name}.py:agent").instant for name in EXAMPLES)
    calculate = envs.load_named("examples/tools.py:calculate", {}, "function")
    assert [calculate(x) for x in ("3 * (4 - 1)", "-2 / 4")] == ["9", "-0.5"]
    for text in ("__import__('os')", "9 ** 9 ** 9", "1 / 0", "(" * 500, "x"):
        assert calculate(text) == "That cannot be computed."


def test_the_hash_of_an_agent_is_that_of_its_files(tmp_path):
    def hashed(args, **own):
        return agent.hash_of_sources(dict(agent="examples/foreign.py:agent", agent_args=args) | own)

    path = tmp_path / "a.py"
    path.write_text("x = 1\n")
    first = hashed(f"run={path}:run")
    assert first == hashed(f"command='python {path}'")
    path.write_text("x = 2\n")
    others = map(hashed, (f"run={path}:run", "run=worlds.babyai:BabyAI",
                          "run=worlds.textcraft:TextCraft"))
    assert len({first, *others}) == 4
    assert hashed("", agent="window") == "" != hashed("", agent="window", loss="echo")
