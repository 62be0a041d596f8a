"""The decode engine: each step is one forward pass over ONE flat row of ids, and every token is forwarded once.

    flat row [1, N]:  one new id of each trajectory that is writing, then the whole new text of each that was told something

The linear layers never see padding, and prompts, observations and replies mix freely: any slot can be given to another
trajectory at any step. Only the attention knows about slots. It is a function of ours (`attend`, registered with
transformers' AttentionInterface): it writes the new keys and values at (slot, position) of a cache with a row for each slot
and lets each query look at its own row: one batched call for all that are writing, one for each that reads.

`Ragged` is the engine, for Qwen2, Qwen3 and Llama; `Padded` is the model's own attention and cache, all rows in step and
padded: the reference, and for all other models.
"""

import math
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from parallel import device_of
from rl import length_dependence, packs, use_attention


def sample(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
           min_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    logits [B, V], uniforms [B] float64 in [0, 1) -> tokens [B] long, logprobs [B] float32: log_softmax(logits / temperature) at
    the token, without truncation by top_p / top_k / min_p (which leaves out what has less than min_p times the probability
    of the likeliest token). temperature 0 takes the argmax (log-probs as at temperature 1).
    """
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature
    weights = probs = torch.softmax(logits, -1)  # [B, V]
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        if top_k:
            weights = weights.masked_fill(weights < weights.topk(min(top_k, weights.shape[-1]), dim=-1).values[:, -1:], 0.0)
        if min_p:
            weights = weights.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), 0.0)
        if top_p < 1.0:
            ordered, order = weights.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True)] = 0.0
            weights = torch.zeros_like(weights).scatter(-1, order, ordered)
        tokens = invert(weights, uniforms.double())
    return tokens, probs.gather(-1, tokens[:, None]).log().squeeze(1)


def invert(weights: Tensor, uniforms: Tensor, width: int = 64) -> Tensor:
    """The inverse of the cumulative distribution that weights [B, V] are proportional to, at uniforms [B] float64 -> [B] long. Never an
    entry of weight 0. First among blocks of `width` entries, then inside one: sums in double are cheap, cumulative sums are not."""
    if weights.shape[1] % width:
        weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % width))
    blocks = weights.view(len(weights), -1, width)  # [B, V / width, width]
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]  # [B, 1]
    block = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
    target -= torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    cdf = blocks.take_along_dim(block[..., None], 1).squeeze(1).cumsum(-1, dtype=torch.float64)  # [B, width]
    target = target.clamp(min=0.0).minimum(cdf[:, -1:] * (1 - 1e-12))  # the two sums may differ in their last bits
    return (block * width + torch.searchsorted(cdf, target, right=True)).squeeze(1).clamp(max=weights.shape[1] - 1)


def common_prefix_length(a: list[int], b: list[int], least: int = 0) -> int:
    """How many ids two lists have in common from their beginning; 0 if that is not more than `least`.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5]), common_prefix_length([1, 2, 3], [1, 2, 4, 5], least=2)
    (2, 0)
    """
    low, high = least + 1, min(len(a), len(b))
    if high < low or a[:low] != b[:low]:
        return 0
    while low < high:  # a[:low] == b[:low] always
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, ragged: "Ragged | None" = None, **_: object) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D]."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast's rotary embedding gives float32
    return ragged.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register("ragged", attend)


class Ragged:
    """The KV cache of `slots` trajectories, and the forward pass that extends it. `ids[slot]`: what the cache holds there; it
    stays after a trajectory has ended, and whoever begins with the same ids copies their keys and values."""

    def __init__(self, policy: PreTrainedModel, slots: int):
        self.policy, self.slots, self.device = policy, slots, device_of(policy)
        self.shared = policy.config.num_attention_heads // policy.config.num_key_value_heads  # heads that share keys and values
        self.call = 512 if self.device.type == "cpu" else 10**6  # what an attention call costs, in keys read for nothing
        self.kv = {}  # layer -> [keys and values: 2, slots, H_kv, capacity, D]
        self.graphs = self.device.type == "cuda"  # whether steps in which all write are CUDA graphs
        self.inputs = torch.zeros(2, slots, dtype=torch.long, device=self.device)  # their ids and positions; recordings know its
        self.rows = torch.arange(slots, device=self.device)  # place, and this one's
        self.clear()

    def clear(self, most: int = 10**9) -> None:
        """Nothing is held any more, as after a change of the weights; `most`: a trajectory's largest number of ids. A CPU keeps
        the memory: pages are slow to come by."""
        self.ids, self.forwarded, self.most = [[] for _ in range(self.slots)], 0, most
        self.steps = {}  # width -> what does a step of `_decode`
        if self.device.type != "cpu":
            self.kv = {}

    @staticmethod
    def lacks(policy: PreTrainedModel) -> str:
        """Why this model cannot be played so; "" if it can."""
        config = policy.config
        return "" if packs(config) else length_dependence(config) or f"model type {config.model_type}"

    def attention(self) -> AbstractContextManager[None]:
        """The policy's attention is ours inside."""
        return use_attention(self.policy.config, "ragged")

    def best_prefix(self, ids: list[int]) -> tuple[int, int]:
        """-> (slot, n): the slot that holds most of the beginning of `ids`, and how much of it, the last id left out."""
        slot, n = 0, 0
        for other, held in enumerate(self.ids):
            if n < len(held) and n < len(ids) - 1 and held[n] == ids[n] and (more := common_prefix_length(held, ids, n)):
                slot, n = other, min(more, len(ids) - 1)
        return slot, n

    def begin(self, slot: int, ids: list[int], source: int, n: int) -> list[int]:
        """Give `slot` to a trajectory that begins with `ids`, the first n of which `source` holds (see `best_prefix`).
        -> those that still have to be forwarded: one at least, for its logits."""
        if n and source != slot:
            for kv in self.kv.values():
                kv[:, slot, :, :n] = kv[:, source, :, :n]
        self.ids[slot] = ids[:n]
        return ids[n:]

    @torch.no_grad()
    def forward(self, feed: dict[int, list[int]]) -> Tensor:
        """feed: {slot: new ids} -> logits [len(feed), V] after the last new id of each, in the order of `feed`."""
        if self.graphs and 2 * len(feed) >= self.slots and all(len(ids) == 1 for ids in feed.values()):
            return self._decode(feed)
        one = sorted(slot for slot, ids in feed.items() if len(ids) == 1)
        more = [slot for slot, ids in feed.items() if len(ids) > 1]
        ids, slots, positions, ends, self.chunks = [], [], [], {}, []
        for slot in one + more:
            new, past = feed[slot], len(self.ids[slot])
            if len(new) > 1:
                seen = None if not past else torch.ones(
                    len(new), past + len(new), dtype=torch.bool, device=self.device).tril(past).repeat(self.shared, 1)
                self.chunks.append((len(ids), len(ids) + len(new), slot, past + len(new), seen))
            ids += new
            slots += [slot] * len(new)
            positions += range(past, past + len(new))
            ends[slot] = len(ids) - 1
            self.ids[slot] += new
        ids, self.row, self.position = torch.tensor([ids, slots, positions], device=self.device)
        self.forwarded += len(ids)
        self.writing, self.longest = len(one), max(len(self.ids[slot]) for slot in feed)
        self.views = self._views(one)
        out = self.policy(input_ids=ids[None], position_ids=self.position[None], use_cache=False, ragged=self,
                          logits_to_keep=torch.tensor([ends[slot] for slot in feed], device=self.device))
        return out.logits[0]

    def _decode(self, feed):
        """A step in which all that are fed write, as one CUDA graph: its tensors stand at fixed places, so all slots take part. A slot
        that is not fed writes where its next id will be written over it."""
        inputs = torch.tensor([[feed.get(slot, [0])[0] for slot in range(self.slots)], [len(ids) for ids in self.ids]])
        for slot, ids in feed.items():
            self.ids[slot] += ids
        self.forwarded += self.slots
        self.longest = 1 + max(map(len, self.ids))
        # of the keys that are read; a graph for each
        width = min(1 << max(8, (self.longest - 1).bit_length()), max(self.longest, self.most + 1))
        if any(kv.shape[3] < width for kv in self.kv.values()) or not self.kv:
            self.longest = width
            for layer, kv in self.kv.items():
                self._room(layer, kv[0, 0])
        self.inputs.copy_(inputs, non_blocking=True)  # before a recording, which writes keys and values where they say
        if width not in self.steps:
            self.steps[width] = self._graph(width)
        return self.steps[width]()[list(feed)]

    def _graph(self, width):
        """-> a function: `inputs` (ids and positions, [2, slots]) -> logits [slots, V]; on a GPU it replays a recording."""
        def step():
            (ids, self.position), self.row, self.chunks, self.writing = self.inputs, self.rows, [], self.slots
            seen = (torch.arange(width, device=self.device) <= self.position[:, None])[:, None, None]
            self.views = [(0, self.slots, (slice(None), slice(None), slice(width)), None, seen)]
            return self.policy(input_ids=ids[None], position_ids=self.position[None], use_cache=False, ragged=self).logits[0]

        if self.device.type != "cuda":
            step()  # as often as below, so that tests see what it leaves behind
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is set up on first use must not be recorded
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        return lambda: graph.replay() or logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [H, N, D], key and value [H_kv, N, D] of the flat row -> [N, H, D]."""
        (H, N, D), G = query.shape, len(key)
        keys, values = self._room(layer, key)  # [slots, G, capacity, D]
        keys[self.row, :, self.position] = key.transpose(0, 1)
        values[self.row, :, self.position] = value.transpose(0, 1)
        out = query.new_empty(N, H, D)
        # heads that share keys stand where a sequence's queries would
        writing = query[:, :self.writing].transpose(0, 1).reshape(-1, G, H // G, D)
        for begin, end, view, spread, seen in self.views:
            q = writing[begin:end]
            if spread is not None:
                q = q.new_zeros(view[0].stop - view[0].start, *q.shape[1:]).index_copy_(0, spread, q)
            o = scaled_dot_product_attention(q, keys[view], values[view], seen, scale=scaling)
            out[begin:end] = (o if spread is None else o[spread]).reshape(-1, H, D)
        for begin, end, slot, length, seen in self.chunks:
            q, k, v = query[:, begin:end], keys[None, slot, :, :length], values[None, slot, :, :length]
            if seen is None:  # nothing before it
                o = scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=scaling, enable_gqa=H != G)
            else:
                o = scaled_dot_product_attention(q.reshape(1, G, -1, D), k, v, seen, scale=scaling)
            out[begin:end] = o.reshape(H, -1, D).transpose(0, 1)
        return out

    def _views(self, writing):
        """Cut the slots that are writing into runs of about equal length, each one view of the cache and one call.
        -> [(first, end, view, their places in it or None for all, mask [rows, 1, 1, width] or None)]; first, end: of the row."""
        runs, views, n = [], [], 0  # runs: (slots, width, sum of lengths)
        for slot in writing:
            length = len(self.ids[slot])
            if runs:
                slots, width, total = runs[-1]
                wider, total = max(width, length), total + length
                if (slot + 1 - slots[0]) * wider - total <= self.call:
                    runs[-1] = [*slots, slot], wider, total
                    continue
            runs.append(([slot], length, length))
        for slots, width, total in runs:
            rows, last, spread, seen = slots[-1] + 1 - slots[0], self.position[n:n + len(slots)], None, None
            if rows > len(slots):
                spread = self.row[n:n + len(slots)] - slots[0]
                last = last.new_zeros(rows).index_copy_(0, spread, last)  # those between look at their first key
            if total < rows * width:
                seen = (torch.arange(width, device=self.device) <= last[:, None])[:, None, None]
            views.append((n, n + len(slots), (slice(slots[0], slots[-1] + 1), slice(None), slice(width)), spread, seen))
            n += len(slots)
        return views

    def _room(self, layer, key):
        """The layer's cache, large enough for this step; key [H_kv, N, D]."""
        old, (heads, _, size) = self.kv.get(layer), key.shape
        if old is None or old.shape[3] < self.longest or old.dtype != key.dtype:
            shape = 2, self.slots, heads, max(self.longest, min(2 * self.longest, self.most)), size
            # zeros: what was never written is masked, but 0 times not-a-number would be seen
            if key.device.type == "cpu":  # numpy's cost nothing until they are touched
                new = torch.from_numpy(np.zeros(math.prod(shape) * key.itemsize, np.uint8)).view(key.dtype).view(shape)
            else:
                new = key.new_zeros(shape)
            if old is not None:
                new[..., :old.shape[3], :] = old
            self.kv[layer], self.steps = new, {}  # recordings know the old one's place
        return self.kv[layer]


class Padded:
    """The KV cache of rows that all are forwarded in step. Each chunk of new tokens is padded on the left to one width; the 2-D
    `seen` mask over all columns keeps the padding out of the attention, and positions count real tokens only."""

    def __init__(self, policy: PreTrainedModel):
        self.policy, self.kv, self.device = policy, DynamicCache(), device_of(policy)
        self.seen, self.length, self.forwarded = None, None, 0  # seen [B, C] bool, length [B] long

    def start(self, chunks: list[list[int]]) -> Tensor:
        """The first forward: rows that begin alike (the samples of one item) are computed once and copied."""
        place = {}
        for chunk in chunks:
            place.setdefault(tuple(chunk), len(place))
        logits = self.forward([list(chunk) for chunk in place])
        rows = [place[tuple(chunk)] for chunk in chunks]
        self.keep(rows)
        return logits[rows]

    @torch.no_grad()
    def forward(self, chunks: list[list[int]]) -> Tensor:
        """chunks: B lists of ids, [] for a row that waits -> logits [B, V] after each row's last id."""
        B, W = len(chunks), max(map(len, chunks))
        ids, real = torch.zeros(B, W, dtype=torch.long), torch.zeros(B, W, dtype=torch.bool)
        for row, chunk in enumerate(chunks):
            if chunk:
                ids[row, W - len(chunk):], real[row, W - len(chunk):] = torch.tensor(chunk), True
        ids, real = ids.to(self.device), real.to(self.device)
        if self.seen is None:
            self.seen = real[:, :0]
            self.length = torch.zeros(B, dtype=torch.long, device=self.device)
        self.seen = torch.cat([self.seen, real], dim=1)  # [B, C + W]
        positions = (self.length[:, None] + real.cumsum(1) - 1).clamp(min=0)  # [B, W]
        self.length = self.length + real.sum(1)
        self.forwarded += B * W
        out = self.policy(input_ids=ids, attention_mask=self.seen.long(), position_ids=positions,
                          past_key_values=self.kv, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        rows = torch.tensor(rows, device=self.device)
        self.kv.batch_select_indices(rows)
        self.seen, self.length = self.seen[rows], self.length[rows]
