"""Every token is forwarded once, in whatever company, and what comes out is what the model's own attention says."""

import copy
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rl
import rollout as ro
from engine import Padded, Ragged, sample
from envs import Env, Step, make_env
from envs import EnvPool
from rl import attend_within
from rollout import rollout

ITEMS = ["textcraft_0", "babyai_8", "textcraft_3", "babyai_50", "babyai_19"]


def other(family, **kw):
    """A model of another family with random weights and the tiny model's vocabulary; shared keys unless told otherwise."""
    torch.manual_seed(0)
    size = dict(vocab_size=len(rl.load_policy("tiny")[1]), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=96, head_dim=16, initializer_range=0.3, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size | kw)).eval()


@pytest.mark.parametrize("family", ["tiny", "qwen2", "qwen3", "llama"])
def test_greedy_trajectories_are_those_of_generate_over_eight_turns(tiny, pool, family):
    """The oracle is Hugging Face's `generate`, alone and without any cache of ours, on all that was said before."""
    model, tokenizer = tiny if family == "tiny" else (other(family), tiny[1])
    kw = dict(temperature=0, max_tokens=8, slots=4)
    played = rollout(model, tokenizer, pool, ITEMS, 8, **kw)
    assert [t.tokens for t in rollout(model, tokenizer, pool, ITEMS, 8, engine="hf", **kw)] == [t.tokens for t in played]
    assert max(t.turns for t in played) == 8
    for t in played:
        starts = [i for i in range(1, len(t.mask)) if t.mask[i] and not t.mask[i - 1]]
        assert len(starts) == t.turns
        for i in starts:
            said = t.tokens[i:next((k for k in range(i, len(t.mask)) if not t.mask[k]), len(t.mask))]
            ids = torch.tensor([t.tokens[:i]])
            new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
                                 eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)[0, i:]
            assert new.tolist() == said


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "llama"))])
def test_steps_at_fixed_places_say_the_same(tiny, pool, family):
    """What a GPU records as a CUDA graph: with shared keys, idle slots, and a cache that grows between."""
    model = other(family).double()
    engines = [Ragged(model, 3) for _ in range(2)]
    engines[1].use_graphs = True
    plain, fixed = (rollout(model, tiny[1], pool, ITEMS, 8, samples=2, max_tokens=24, seed=3, engine=e) for e in engines)
    assert [t.tokens for t in plain] == [t.tokens for t in fixed]
    assert max(len(t.tokens) for t in fixed) > 512 and engines[1].forwarded == 0  # over more than one width


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["tiny", "qwen2", "qwen3", "llama"])
def test_on_a_gpu_the_engine_says_what_the_models_own_attention_says(tiny, pool, family):
    model, tokenizer = copy.deepcopy(tiny[0] if family == "tiny" else other(family)).cuda(), tiny[1]
    kw = dict(temperature=0, max_tokens=8)
    played = rollout(model, tokenizer, pool, ITEMS, 8, slots=4, **kw)
    assert [t.tokens for t in rollout(model, tokenizer, pool, ITEMS, 8, engine="hf", **kw)] == [t.tokens for t in played]
    sampled = rollout(model, tokenizer, pool, ITEMS, 4, samples=2, max_tokens=8, slots=6)
    for t in sampled:
        again = rl.token_logprobs(model, torch.tensor([t.tokens]).cuda(), torch.tensor([t.mask]).cuda())[0].detach().cpu()
        assert torch.allclose(again, torch.tensor([t.logprobs]), atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [1, 2])
def test_on_a_gpu_flash_attention_over_sequences_in_a_row_is_sdpa(shared):
    lengths, generator = [5, 1, 70, 33], torch.Generator("cuda").manual_seed(0)
    make = lambda heads: torch.randn(1, heads, sum(lengths), 64, device="cuda", generator=generator)  # noqa: E731
    qkv = [make(4).requires_grad_(), make(4 // shared).requires_grad_(), make(4 // shared).requires_grad_()]
    plain = attend_within(None, *qkv, None, lengths=lengths)[0]
    half = attend_within(None, *(x.bfloat16() for x in qkv), None, lengths=lengths)[0]
    torch.testing.assert_close(half.float(), plain, atol=2e-2, rtol=2e-2)
    for a, b in zip(torch.autograd.grad(plain.square().sum(), qkv), torch.autograd.grad(half.float().square().sum(), qkv)):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_logprobs_are_the_trainers(tiny, pool, family):
    model = other(family)
    for t in rollout(model, tiny[1], pool, ITEMS, 3, samples=2, max_tokens=6, slots=3):
        ids, mask = torch.tensor([t.tokens]), torch.tensor([t.mask])
        again = rl.token_logprobs(model, ids, mask)[0].detach()
        assert torch.allclose(again, torch.tensor([t.logprobs]), atol=1e-4)


def test_in_float64_a_trajectory_depends_neither_on_slots_nor_on_the_engine(pool):
    model, tokenizer = rl.load_policy("tiny", dtype=torch.float64)
    how = dict(samples=3, seed=5, max_tokens=10)
    first, *others = [rollout(model, tokenizer, pool, ITEMS, 5, **how, **kw) for kw in (
        dict(slots=2), dict(slots=7), dict(slots=64), dict(slots=4, arrival=True), dict(slots=4, engine="hf"))]
    graphs = Ragged(model, 4)
    graphs.use_graphs = True  # on the CPU the same step, not recorded
    others.append(rollout(model, tokenizer, pool, ITEMS, 5, **how, engine=graphs))
    assert graphs.graph_inputs.shape == (2, 4)
    for played in others:
        assert [t.tokens for t in played] == [t.tokens for t in first]
        assert all(a == pytest.approx(b, abs=1e-6) for t, u in zip(first, played) for a, b in zip(t.logprobs, u.logprobs))
    half = rollout(model, tokenizer, pool, ITEMS[1::2], 5, **how)  # what the second of two ranks plays
    assert [t.tokens for t in half] == [t.tokens for t in first if t.item in ITEMS[1::2]]


def test_every_token_is_forwarded_once_and_the_slots_are_busy(tiny, pool):
    stats = {}
    played = rollout(*tiny, pool, [f"textcraft_{i}" for i in range(40)], 8, samples=2, slots=8, max_tokens=16, stats=stats)
    kept = sum(len(t.tokens) for t in played)
    prompts = sum(t.mask.index(True) for t in played)
    assert kept - prompts - len(played) <= stats["forwarded"] < 0.7 * kept  # the prompts' common beginning is copied
    assert stats["busy"] / stats["room"] > 0.8


def test_a_slot_is_used_again_and_again_without_traces(tiny):
    """One slot, filled with noise before: the forward pass sees none of it."""
    model, _ = tiny
    engine, generator = Ragged(model, 3), torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(5, 1000, (n,), generator=generator).tolist()  # noqa: E731
    with engine.attention():
        for n in (50, 7, 90, 1, 33):
            ids, more, single = draw(n), draw(9), draw(1)
            noise = draw(20)
            assert engine.begin(1, ids, *engine.best_prefix(ids)) == ids  # nothing of it is held anywhere
            engine.forward({0: noise, 1: ids})
            engine.forward({2: draw(5), 1: single, 0: draw(1)})
            logits = engine.forward({0: draw(1), 1: more})[1]
            assert torch.allclose(logits, reference(model, ids + single + more), atol=1e-4)
            again = ids + single + [3]
            assert engine.best_prefix(again) == (1, len(again) - 1)
            rest = engine.begin(2, again, 1, len(again) - 1)
            assert rest == [3]
            assert torch.allclose(engine.forward({2: rest})[0], reference(model, ids + single + [3]), atol=1e-4)
            engine.begin(0, noise, 0, 0)


def reference(model, ids):
    before, model.config._attn_implementation = model.config._attn_implementation, "eager"
    with torch.no_grad():
        out = model(torch.tensor([ids])).logits[0, -1]
    model.config._attn_implementation = before
    return out


def test_padded_rows_say_the_same(tiny):
    model, _ = tiny
    cache = Padded(model)
    cache.start([[5, 6, 7], [5, 6, 7], [8, 9]])
    logits = cache.forward([[10], [], [11, 12]])
    for row, ids in ((0, [5, 6, 7, 10]), (2, [8, 9, 11, 12])):
        assert torch.allclose(logits[row], reference(model, ids), atol=1e-4)


def test_other_models_are_played_on_their_own_attention(tiny, pool, capsys):
    sliding = other("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    for t in rollout(sliding, tiny[1], pool, ITEMS, 2, max_tokens=6):
        again = rl.token_logprobs(sliding, torch.tensor([t.tokens]), torch.tensor([t.mask]))[0].detach()
        assert torch.allclose(again, torch.tensor([t.logprobs]), atol=1e-4)
    assert "sliding windows" in capsys.readouterr().err


class Slow(Env):
    """Answers after a while, which hangs on the item and the turn; item 7 hangs."""
    prompt = "Wait."

    def __init__(self, scale=1.0, hang=0.0):
        self.scale, self.hang = scale, hang

    def reset(self, item):
        self.item, self.turns = item, 0
        return f"Item {item}."

    def step(self, action):
        self.turns += 1
        time.sleep(self.hang if self.item == 7 and self.hang else self.scale * 0.002 * ((self.item * 7 + self.turns * 3) % 5))
        return Step(f"Turn {self.turns}.", 0.0, 0.0, False, False)


@pytest.mark.parametrize("slots", [3, 16])
def test_latencies_change_no_bit(tiny, slots):
    """Answers are taken at a fixed point of the decode order, however late they come."""
    played = [rollout(*tiny, EnvPool(make=lambda name: Slow(scale)), [f"slow_{i}" for i in range(6)], 4, samples=2, seed=1,
                      max_tokens=6, slots=slots, action_format="plain") for scale in (0.0, 1.0, 3.0)]
    assert [t.to_json() for t in played[0]] == [t.to_json() for t in played[1]] == [t.to_json() for t in played[2]]


def test_in_arrival_order_one_hanging_environment_delays_only_itself(tiny):
    ended, start = {}, time.monotonic()
    played = rollout(*tiny, EnvPool(make=lambda name: Slow(0.0, hang=30)), [f"slow_{i}" for i in range(12)], 3, max_tokens=4, slots=4,
                     action_format="plain", deadline=5, retries=0, arrival=True, progress=lambda t: ended.update({t.item: time.monotonic() - start}))
    assert [t.status for t in played] == ["env_error" if i == 7 else "horizon" for i in range(12)]
    assert max(took for item, took in ended.items() if item != "slow_7") < 5 <= ended["slow_7"] < 10


def test_an_interrupted_rollout_leaves_no_thread_behind(tiny):
    before = set(threading.enumerate())

    def stop(t):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        rollout(*tiny, EnvPool(), ITEMS, 4, samples=4, slots=8, max_tokens=8, progress=stop)
    until = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.05)
    left = [t for t in set(threading.enumerate()) - before]
    assert len(left) <= 1  # the one whose trajectory had ended is free in the pool, for the next rollout


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rollouts(tiny, pool):
    sizes = []
    engine = Ragged(tiny[0], 8)
    for n in range(200):
        rollout(*tiny, pool, ITEMS[:1], 2, samples=2, seed=n, max_tokens=6, slots=8, engine=engine if n % 2 else "ragged")
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))  # pages
    assert sizes[-1] < sizes[40] * 1.03


class Tagged(Env):
    prompt, stop = "Search.", ("all", "ball")

    def reset(self, item):
        return "Go."

    def step(self, action):
        return Step("Done.", 0.0, 0.0, True, False)


def test_a_worlds_stop_string_ends_a_reply(tiny, monkeypatch):
    word = tiny[1].encode(" ball")
    script = iter([tiny[1].encode("turn left")[0], *word, *word])
    monkeypatch.setattr(ro, "sample", lambda logits, *_: (torch.full((len(logits),), next(script)), torch.zeros(len(logits))))
    (t,) = rollout(*tiny, EnvPool(make=lambda name: Tagged()), ["tagged_0"], 2, max_tokens=9, action_format="plain")
    assert sum(t.mask) == 1 + len(word) and t.messages[-2]["content"].endswith("ball") and t.cut_replies == 0


def test_replies_that_reach_their_limit_are_counted(tiny, pool):
    for t in rollout(*tiny, pool, ITEMS, 4, samples=2, seed=3, max_tokens=7):
        spans = "".join("x" if m else " " for m in t.mask).split()
        ends = [i for i in range(len(t.mask)) if t.mask[i] and (i + 1 == len(t.mask) or not t.mask[i + 1])]
        assert t.cut_replies == sum(len(s) == 7 and t.tokens[e] != tiny[1].eos_token_id for s, e in zip(spans, ends))


def test_min_p_leaves_out_what_is_unlikely():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(1000, 1)
    tokens, logprobs = sample(logits, torch.linspace(0, 0.9999, 1000), min_p=0.5)
    assert set(tokens.tolist()) == {0, 1} and torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3])[tokens], atol=1e-6)


def test_worlds_are_made_as_often_as_slots_need_them(tiny):
    made = []
    pool = EnvPool(make=lambda name: made.append(name) or make_env(name))
    rollout(*tiny, pool, ["babyai_8"], 2, samples=20, slots=4, max_tokens=6)
    assert len(made) <= 5  # four play, one is being reset
