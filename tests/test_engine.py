"""The engine forwards each token once, in any batch, and agrees with the model's own attention."""

import copy
import math
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import engine as engine_module
import rl
import models.packed
from benches.limit import big_model
from engine import SAMPLED_LAST, Ragged, _truncate, sample
from envs import Env, EnvPool, Step, make_env
from experiments.families import tiny_model
from models.packed import attend_within, pack
from rollout import rollout
from trajectory import reply_spans

ITEMS = ["textcraft_0", "babyai_8", "textcraft_3", "babyai_50", "babyai_19"]


@torch.no_grad()
def reference(model, ids):
    """The logits after `ids` by the model's eager attention, without a cache."""
    with models.packed.use_attention(model.config, "eager"):
        return model(torch.tensor([ids])).logits[0, -1]


def drawer():
    """-> a function that draws so many ids."""
    generator = torch.Generator().manual_seed(0)
    return lambda count: torch.randint(5, 1000, (count,), generator=generator).tolist()


def tokens_of(trajectories):
    return [t.tokens for t in trajectories]


# ---- against the model's own attention ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["tiny", "qwen2", "qwen3", "llama"])
def test_greedy_trajectories_are_those_of_generate_over_eight_turns(tiny, pool, family, device):
    """The oracle is Hugging Face's `generate`, without our cache, on all tokens before a reply."""
    tokenizer = tiny[1]
    model = copy.deepcopy(tiny[0] if family == "tiny" else random_model(family)).to(device)
    kw = dict(temperature=0, max_tokens=8, slots=4)
    played = rollout(model, tokenizer, pool, ITEMS, 8, **kw)
    padded = rollout(model, tokenizer, pool, ITEMS, 8, engine="hf", **kw)
    assert tokens_of(padded) == tokens_of(played)
    assert max(t.turns for t in played) == 8
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    for t in played:
        spans = reply_spans(t.mask)
        assert len(spans) == t.turns
        ids, mask = torch.tensor([t.tokens, t.mask], device=device)[:, None]
        for start, end in spans:
            past = ids[:, :start]
            new = model.generate(past, attention_mask=torch.ones_like(past), do_sample=False,
                                 max_new_tokens=8, **ends)[0, start:]
            assert new.tolist() == t.tokens[start:end]
        trained = rl.token_logprobs(model, ids, mask.bool())[0].cpu()
        assert torch.allclose(trained, torch.tensor([t.logprobs]), atol=1e-4)


def attend_one_by_one(query, keys, values, spans, scale, window):
    """An oracle for `flash_over_cache`: PyTorch's plain attention, slot by slot. A row of the
    queries that belongs to no slot becomes NaN."""
    query_ends, key_starts, most, lengths = spans
    slots = key_starts // keys.shape[2]
    out = torch.full((query.shape[1], len(query), values.shape[-1]), math.nan, dtype=query.dtype)
    for slot, length, start, end in zip(slots, lengths.tolist(), query_ends, query_ends[1:]):
        past = length - (end - start)
        assert end - start <= most and past >= 0
        seen = torch.ones(end - start, length, dtype=torch.bool).tril(past)
        if window is not None:
            seen = seen.triu(past - window + 1)
        k, v = (x[slot : slot + 1, :, :length] for x in (keys, values))
        out[start:end] = scaled_dot_product_attention(
            query[None, :, start:end], k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    return out


def as_on_a_gpu(monkeypatch):
    """Take the engine's paths of a GPU, with `attend_one_by_one` for flash attention."""
    monkeypatch.setattr(engine_module, "fits_flash_attention", lambda value: True)
    monkeypatch.setattr(engine_module, "flash_over_cache", attend_one_by_one)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_steps_at_fixed_places_say_the_same_also_where_one_cannot_be_recorded(
        tiny, pool, monkeypatch, fails, flash):
    """The steps of a GPU: recorded as CUDA graphs, and their tokens read one step late. Shared KV
    heads, idle slots, a growing cache, slots that take an observation in such a step."""
    model = random_model("qwen3").double()
    record = Ragged._record_step
    widths = []

    def record_or_fail(self, inputs, width, prefilled):
        widths.append((width, prefilled))
        step = record(self, inputs, width, prefilled)  # the warm-up writes to the cache
        if fails and len(widths) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return step

    def play(engine, items=ITEMS):
        known = []  # ids read late, and not only their places, are found as prefixes of others
        played = rollout(model, tiny[1], pool, items, 4, samples=2, max_tokens=20, seed=3,
                         engine=engine, on_end=lambda t: known.extend(map(list, engine.ids)))
        assert all(SAMPLED_LAST not in ids[:-1] for ids in known)
        return played

    expected = play(Ragged(model, 3))
    monkeypatch.setattr(Ragged, "_record_step", record_or_fail)
    if flash:
        as_on_a_gpu(monkeypatch)
    engine = Ragged(model, 3)
    engine.use_graphs = engine.reads_late = True  # on a CPU: the same steps, not recorded
    warned = pytest.warns(UserWarning, match="when stream is capturing") if fails else nullcontext()
    with warned:
        played = play(engine)
    for t, other in zip(played, expected, strict=True):
        assert t.tokens == other.tokens
        assert t.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert engine.sampled.any()
    assert engine.forwarded == 0  # the rollout leaves a cleared engine
    assert {prefilled for _, prefilled in widths} >= ({0, 128} if flash else {0})
    recorded = len(widths)
    play(engine, ITEMS[:1])
    assert (len(widths) == recorded) == fails  # after a failure it does not try again


@pytest.mark.parametrize("layers, backend", [
    (0, "aot_eager"), *(pytest.param(*more, marks=pytest.mark.slow)
                        for more in ((0, "inductor"), (30, "aot_eager"), (2, "inductor")))])
def test_a_compiled_model_says_the_same_and_compiles_once(tiny, pool, monkeypatch, layers, backend):
    """The steps of a GPU, and log-probs with and without gradients, of batches of many sizes. Of
    the built-in model, and of so many layers of SmolLM2-135M, with the built-in one's words."""
    model = big_model(tiny[0].config.vocab_size, layers) if layers else copy.deepcopy(tiny[0])
    rl.set_compute_paths(model, rl.FASTEST)
    as_on_a_gpu(monkeypatch)

    def play(seed):
        engine = Ragged(model, 3)
        engine.use_graphs = engine.reads_late = True
        return rollout(model, tiny[1], pool, ITEMS, 3, max_tokens=8, seed=seed, engine=engine)

    def gradients(trajectories):
        columns = [[torch.tensor(getattr(t, name)) for t in trajectories]
                   for name in ("tokens", "mask")]
        batch = [torch.nn.utils.rnn.pad_sequence(column, True) for column in columns]
        with torch.no_grad():
            without = rl.token_logprobs(model, *batch)[0]
        logprobs, _ = rl.token_logprobs(model, *batch)
        torch.testing.assert_close(logprobs, without, atol=1e-5, rtol=1e-5)
        return [logprobs, *torch.autograd.grad(logprobs.sum(), list(model.parameters()))]

    played = [play(seed) for seed in (0, 1)]
    expected = [gradients(trajectories) for trajectories in (played[0], played[1][:2])]
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        rl.compile_model(model)
    counts = []
    for k in (0, 1):
        for t, other in zip(play(k), played[k]):
            assert t.tokens == other.tokens
            assert t.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for found, other in zip(gradients((played[0], played[1][:2])[k]), expected[k]):
            torch.testing.assert_close(found, other, atol=1e-4, rtol=1e-4)
        assert all(map(torch.equal, gradients(played[k]), gradients(played[k])))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < counts[0] == counts[1]
    torch._dynamo.reset()


def test_graphs_are_recorded_on_a_gpu_unless_they_are_turned_off(monkeypatch):
    monkeypatch.setattr(engine_module, "device_of", lambda policy: torch.device("cuda"))
    with FakeTensorMode():
        assert Ragged(None, 2).use_graphs and not Ragged(None, 2, graphs=False).use_graphs


class Synchronizing(TorchDispatchMode):
    """Note the operations for which the host would wait for a GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        by_mask = name.startswith("aten.index.") and any(
            index is not None and index.dtype == torch.bool for index in args[1])
        if by_mask or any(word in name for word in self.NAMES):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "mistral, window", "gemma2, strong caps", "gpt_oss",
                                  "deepseek_v3"])
def test_a_graph_step_has_fixed_shapes_and_never_waits_for_the_gpu(name):
    """Windows, soft caps, sinks and experts are recorded as any other layer."""
    model, _ = tiny_model(name)
    engine = Ragged(model, 3)
    engine.clear(600)
    with engine.attention():
        engine.forward({0: [5] * 40, 1: [6] * 2, 2: [7] * 3})
        engine.use_graphs = True
        engine.forward({0: [5], 1: [6], 2: [7]})
        ((_, step),) = engine.graph_steps.values()
        with torch.no_grad(), Synchronizing() as mode:
            step()
    assert not mode.found


@pytest.mark.parametrize("name", ["llama", "mistral, window"])
def test_on_a_gpu_all_prefilling_slots_share_one_call(name, monkeypatch):
    model, _ = tiny_model(name)
    ids = drawer()
    # Two slots come to hold more than the window of 64. In the last four steps at least half of the
    # slots are fed.
    feeds = [{0: ids(9), 2: ids(80)}, {1: ids(4)}, {2: ids(5)}, {0: ids(1), 2: ids(1)},
             {1: ids(150), 0: ids(1)}, {2: ids(5), 1: ids(1), 0: ids(7)}, {1: ids(80), 2: ids(1)}]

    def logits(graphs):
        engine = Ragged(model, 3)
        engine.use_graphs = graphs
        engine.clear(600)
        with engine.attention():
            return [engine.forward(feed).clone() for feed in feeds]

    one_by_one = logits(False)
    as_on_a_gpu(monkeypatch)
    for graphs in (False, True):
        for expected, found in zip(one_by_one, logits(graphs)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [1, 2])
def test_on_a_gpu_flash_attention_over_sequences_in_a_row_is_sdpa(shared):
    rows = [[1] * 5, [2], [3] * 40 + [4] * 30, [3] * 40 + [5] * 33]  # two share a prefix
    packed, parts, _ = pack(rows, 73, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)

    def make(heads):
        shape = (1, heads, packed.shape[1], 64)
        return torch.randn(shape, device="cuda", generator=generator).requires_grad_()

    qkv = [make(4), make(4 // shared), make(4 // shared)]
    plain, half = (attend_within(None, *(x.to(dtype) for x in qkv), None, parts=parts)[0]
                   for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(half.float(), plain, atol=2e-2, rtol=2e-2)
    gradients = [torch.autograd.grad(out.float().square().sum(), qkv) for out in (plain, half)]
    torch.testing.assert_close(*gradients, atol=0.1, rtol=0.1)


def test_flash_attention_is_used_where_it_runs(monkeypatch):
    """A V100 (compute capability 7.0) and a T4 (7.5) do not have it."""
    def fits(dtype=torch.bfloat16, size=64, capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        value = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, size))
        return models.packed.fits_flash_attention(value)

    assert fits() and fits(capability=(12, 0)) and not fits(capability=(7, 5))
    assert not fits(torch.float32) and not fits(size=512) and not fits(size=20)


def test_in_float64_a_trajectory_depends_neither_on_slots_nor_on_the_engine(pool):
    model, tokenizer = rl.load_policy("tiny", dtype=torch.float64)
    kw = dict(samples=2, seed=5, max_tokens=8)
    first = rollout(model, tokenizer, pool, ITEMS, 5, **kw, slots=2)
    for way in (dict(slots=7), dict(slots=64), dict(slots=4, arrival_order=True),
                dict(slots=4, engine="hf")):
        played = rollout(model, tokenizer, pool, ITEMS, 5, **kw, **way)
        assert tokens_of(played) == tokens_of(first)
        for t, expected in zip(played, first):
            assert t.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    # The second of two ranks plays every other item.
    half = rollout(model, tokenizer, pool, ITEMS[1::2], 5, **kw)
    assert tokens_of(half) == tokens_of([t for t in first if t.item in ITEMS[1::2]])


# ---- the cache ----


def test_every_token_is_forwarded_once_and_the_slots_are_busy(tiny, pool):
    items = [f"textcraft_{i}" for i in range(20)]
    stats, usable = {}, []
    played = rollout(*tiny, pool, items, 8, samples=2, slots=8, max_tokens=16, stats=stats,
                     on_step=lambda queue: usable.append(len(queue.todo) + len(queue.alive)))
    kept = sum(len(t.tokens) for t in played)
    assert stats["forwarded"] >= kept - sum(t.mask.index(True) for t in played) - len(played)
    assert stats["forwarded"] < 0.7 * kept  # the common prefix of the prompts is copied
    assert stats["busy"] / sum(min(8, count) for count in usable) > 0.8


def test_a_slot_is_used_again_and_again_without_traces(tiny):
    """Slots that held other ids before: the forward pass sees nothing of them."""
    model, _ = tiny
    engine, draw = Ragged(model, 3), drawer()
    with engine.attention():
        for n in (50, 7, 90, 1, 33):
            ids, more, single = draw(n), draw(9), draw(1)
            noise = draw(20)
            assert engine.begin(1, ids, *engine.best_prefix(ids)) == ids  # no slot holds a prefix
            engine.forward({0: noise, 1: ids})
            engine.forward({2: draw(5), 1: single, 0: draw(1)})
            logits = engine.forward({0: draw(1), 1: more})[1]
            assert torch.allclose(logits, reference(model, ids + single + more), atol=1e-4)
            again = ids + single + [3]
            assert engine.best_prefix(again) == (1, len(again) - 1)
            rest = engine.begin(2, again, 1, len(again) - 1)
            assert rest == [3]
            logits = engine.forward({2: rest})[0]
            assert torch.allclose(logits, reference(model, again), atol=1e-4)
            engine.begin(0, noise, 0, 0)


# ---- slow environments ----


class Slow(Env):
    """An environment whose latency depends on the item and the turn. With `hang`, item 7 hangs."""

    prompt = "Wait."

    def __init__(self, scale=1.0, hang=0.0):
        self.scale, self.hang = scale, hang

    def reset(self, item):
        self.item, self.turns = item, 0
        return f"Item {item}."

    def step(self, action):
        self.turns += 1
        latency = self.scale * 0.002 * ((self.item * 7 + self.turns * 3) % 5)
        time.sleep(self.hang if self.item == 7 and self.hang else latency)
        return Step(f"Turn {self.turns}.", 0.0, 0.0, False, False)


@pytest.mark.parametrize("slots", [3, 16])
def test_latencies_change_no_bit(tiny, slots):
    """Answers are collected at a fixed step of the decode order, however late they come."""
    items = [f"slow_{i}" for i in range(6)]
    kw = dict(samples=2, seed=1, max_tokens=6, slots=slots, action_format="plain")

    def play(scale):
        pool = EnvPool(make=lambda name: Slow(scale))
        return [t.to_json() for t in rollout(*tiny, pool, items, 4, **kw)]

    assert play(scale=0.0) == play(scale=1.0) == play(scale=3.0)


def test_in_arrival_order_one_hanging_environment_delays_only_itself(tiny):
    ended_after = {}  # item -> seconds
    start = time.monotonic()
    played = rollout(*tiny, EnvPool(make=lambda name: Slow(0.0, hang=30)),
                     [f"slow_{i}" for i in range(12)], 3, max_tokens=4, slots=4,
                     action_format="plain", deadline=4, retries=0, arrival_order=True,
                     on_end=lambda t: ended_after.update({t.item: time.monotonic() - start}))
    assert [t.status for t in played] == ["horizon"] * 7 + ["env_error"] + ["horizon"] * 4
    hanging = ended_after.pop("slow_7")
    assert max(ended_after.values()) < 4 <= hanging < 16


def test_an_interrupted_rollout_leaves_no_thread_behind(tiny):
    before = set(threading.enumerate())

    def stop(t):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(*tiny, EnvPool(), ITEMS, 4, samples=4, slots=8, max_tokens=8, on_end=stop)

    def left():
        return set(threading.enumerate()) - before

    until = time.monotonic() + 5
    while len(left()) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    # The environment whose trajectory had ended is free in the pool, for the next rollout.
    assert len(left()) <= 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rollouts(tiny, pool):
    resident_pages = []
    engine = Ragged(tiny[0], 8)
    for n in range(200):
        rollout(*tiny, pool, ITEMS[:1], 2, samples=2, seed=n, max_tokens=6, slots=8,
                engine=engine if n % 2 else None)
        resident_pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert resident_pages[-1] < resident_pages[40] * 1.03


def test_worlds_are_made_as_often_as_slots_need_them(tiny):
    made = []
    pool = EnvPool(make=lambda name: made.append(name) or make_env(name))
    rollout(*tiny, pool, ["babyai_8"], 2, samples=20, slots=4, max_tokens=6)
    assert len(made) <= 5  # four are played, one is being reset


# ---- the end of a reply, and sampling ----


def test_turns_whose_replies_reach_their_limit_are_recorded(tiny, pool):
    played = rollout(*tiny, pool, ITEMS, 4, samples=2, seed=3, max_tokens=7)
    for t in played:
        assert t.cut_turns == [
            turn for turn, (start, end) in enumerate(reply_spans(t.mask), 1)
            if end - start == 7 and t.tokens[end - 1] != tiny[1].eos_token_id]
    assert any(t.cut_turns for t in played)


def test_a_token_that_is_left_out_is_never_drawn():
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.4, 0.05]])).repeat(2, 1)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)  # the smallest and the largest
    for truncation in (dict(top_k=2), dict(top_p=0.8)):
        assert sample(logits, uniforms, **truncation)[0].tolist() == [1, 2]
    assert (_truncate(torch.tensor([[0.2, 0.4, 0.4]]), 1.0, 1) > 0).sum() == 1  # of equal ones
    # The fewest tokens that reach top_p.
    assert _truncate(torch.tensor([[0.25, 0.5, 0.25]]), 0.5, 0).tolist() == [[0.0, 0.5, 0.0]]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_sampling_in_parts_changes_no_bit(monkeypatch, rows):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 1000, generator=generator)
    uniforms = torch.rand(7, generator=generator, dtype=torch.float64)
    flags = dict(temperature=0.7, top_p=0.9)
    whole = sample(logits, uniforms, **flags)
    monkeypatch.setattr(engine_module, "MAX_SAMPLED_LOGITS", 1000 * rows)
    for column, expected in zip(sample(logits, uniforms, **flags), whole):
        assert torch.equal(column, expected)


def kept_by(p, top_k=0, top_p=1.0):
    """The tokens of a distribution, a list of different numbers, that a truncation keeps."""
    kept = sorted(range(len(p)), key=lambda token: -p[token])[:top_k or None]
    whole = sum(p[token] for token in kept)
    return [token for n, token in enumerate(kept)
            if sum(p[before] for before in kept[:n]) < top_p * whole or top_p == 1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("truncation", [
    {}, dict(top_k=3), dict(top_p=0.7), dict(top_k=6, top_p=0.8)])
def test_tokens_are_drawn_from_the_ones_that_are_kept_as_often_as_they_are_likely(
        truncation, temperature):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)) * 2
    rows = logits.repeat_interleave(200, 0)
    uniforms = torch.linspace(0, 0.9999, 200, dtype=torch.float64).repeat(5)
    tokens, logprobs, _ = sample(rows, uniforms, temperature, **truncation)
    full = torch.softmax(logits.double() / temperature, -1).tolist()
    for i, token in enumerate(tokens.tolist()):
        p = full[i // 200]
        kept = kept_by(p, **truncation)
        assert token in kept
        assert logprobs[i].item() == pytest.approx(math.log(p[token]), abs=1e-5)
        share = p[token] / sum(p[other] for other in kept)
        drawn = (tokens[i // 200 * 200:][:200] == token).double().mean().item()
        assert drawn == pytest.approx(share, abs=0.011)  # 200 equally spaced numbers
    assert sample(logits, uniforms[:5], 0, **truncation)[0].tolist() == logits.argmax(-1).tolist()
