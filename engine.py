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
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer


def sample(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    logits [B, V], uniforms [B] float64 in [0, 1) -> tokens [B] long, logprobs [B] float32: log_softmax(logits / temperature) at
    the token, without truncation by top_p / top_k / min_p (which leaves out what has less than min_p times the probability
    of the likeliest token). temperature 0 takes the argmax (log-probs as at temperature 1).
    """
    logits = logits.float()
    logp = torch.log_softmax(logits / temperature if temperature not in (0, 1) else logits, dim=-1)  # [B, V]
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        probs = logp.exp()
        if top_k:
            probs = probs.masked_fill(probs < probs.topk(min(top_k, probs.shape[-1]), dim=-1).values[:, -1:], 0.0)
        if min_p:
            probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        if top_p < 1.0:
            ordered, order = probs.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True)] = 0.0
            probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        cdf = probs.cumsum(-1, dtype=torch.float64)  # [B, V]; double, so that the last step of a long sum is not lost
        tokens = torch.searchsorted(cdf, uniforms.double()[:, None] * cdf[:, -1:], right=True).squeeze(1)
        tokens = tokens.clamp(max=probs.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(1)


CALL = 512  # what a call of the attention costs, in keys and values read for nothing


def common(a, b, least=0) -> int:
    """How many ids two lists have in common from their beginning; 0 if that is not more than `least`.

    >>> common([1, 2, 3], [1, 2, 4, 5]), common([1, 2, 3], [1, 2, 4, 5], least=2)
    (2, 0)
    """
    low, high = least + 1, min(len(a), len(b))
    if high < low or a[:low] != b[:low]:
        return 0
    while low < high:  # a[:low] == b[:low] always
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def attend(module, query, key, value, attention_mask, scaling=None, ragged=None, **_):
    """transformers' attention function: query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D]."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast's rotary embedding gives float32
    return ragged.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register("ragged", attend)


class Ragged:
    """The KV cache of `slots` trajectories, and the forward pass that extends it. `ids[slot]`: what the cache holds there; it
    stays after a trajectory has ended, and whoever begins with the same ids copies their keys and values."""

    def __init__(self, policy, slots):
        self.policy, self.slots, self.device = policy, slots, policy.device
        self.kv = None  # [layers, keys and values: 2, slots, H_kv, capacity, D]
        self.clear()

    def clear(self):
        """Nothing is held any more, as after a change of the weights. A CPU keeps the memory: pages are slow to come by."""
        self.ids, self.forwarded = [[] for _ in range(self.slots)], 0
        if self.device.type != "cpu":
            self.kv = None

    @staticmethod
    def lacks(policy) -> str:
        """Why this model cannot be played so; "" if it can."""
        config = policy.config
        if config.model_type not in ("qwen2", "qwen3", "llama"):
            return f"model type {config.model_type}"
        windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
        return "sliding windows" if windows else ""

    @contextmanager
    def attention(self):
        """The policy's attention is ours inside."""
        config = self.policy.config
        before, config._attn_implementation = config._attn_implementation, "ragged"
        try:
            yield self
        finally:
            config._attn_implementation = before

    def best_prefix(self, ids):
        """-> (slot, n): the slot that holds most of the beginning of `ids`, and how much of it."""
        slot, n = 0, 0
        for other, held in enumerate(self.ids):
            if more := common(held, ids, n):
                slot, n = other, more
        return slot, n

    def begin(self, slot, ids):
        """Give `slot` to a trajectory that begins with `ids`; -> those of them that still have to be forwarded (one at least, for
        its logits)."""
        source, n = self.best_prefix(ids)
        n = min(n, len(ids) - 1)
        if n and source != slot:
            self.kv[:, :, slot, :, :n] = self.kv[:, :, source, :, :n]
        self.ids[slot] = ids[:n]
        return ids[n:]

    @torch.no_grad()
    def forward(self, feed):
        """feed: {slot: new ids} -> logits [len(feed), V] after the last new id of each, in the order of `feed`."""
        one = sorted(slot for slot, ids in feed.items() if len(ids) == 1)
        more = [slot for slot, ids in feed.items() if len(ids) > 1]
        ids, slots, positions, ends, self.chunks = [], [], [], {}, []
        for slot in one + more:
            new, past = feed[slot], len(self.ids[slot])
            if len(new) > 1:
                self.chunks.append((len(ids), len(ids) + len(new), slot, past + len(new)))
            ids += new
            slots += [slot] * len(new)
            positions += range(past, past + len(new))
            ends[slot] = len(ids) - 1
            self.ids[slot] += new
        ids, self.row, self.position = torch.tensor([ids, slots, positions], device=self.device)
        self.forwarded += len(ids)
        self.writing, self.longest = len(one), max(len(self.ids[slot]) for slot in feed)
        self.views = self._views(one)
        self.masks = [torch.ones(end - begin, length, dtype=torch.bool, device=self.device).tril(length - end + begin)
                      for begin, end, _, length in self.chunks]
        out = self.policy(input_ids=ids[None], position_ids=self.position[None], use_cache=False, ragged=self,
                          logits_to_keep=torch.tensor([ends[slot] for slot in feed], device=self.device))
        return out.logits[0]

    def attend(self, layer, query, key, value, scaling):
        """query [H, N, D], key and value [H_kv, N, D] of the flat row -> [N, H, D]."""
        if self.kv is None or self.kv.shape[4] < self.longest:
            self._grow(key)
        keys, values = self.kv[layer]  # [slots, H_kv, capacity, D]
        keys[self.row, :, self.position] = key.transpose(0, 1)
        values[self.row, :, self.position] = value.transpose(0, 1)
        (H, N, D), G = query.shape, len(key)
        out = query.new_empty(N, H, D)
        q = query[:, :self.writing].transpose(0, 1).reshape(-1, G, H // G, D)  # heads that share keys stand where a sequence's queries would
        for begin, end, view, seen in self.views:
            o = scaled_dot_product_attention(q[begin:end], keys[view], values[view], seen, scale=scaling)
            out[begin:end] = o.view(-1, H, D)
        for (begin, end, slot, length), mask in zip(self.chunks, self.masks):
            o = scaled_dot_product_attention(query[None, :, begin:end], keys[None, slot, :, :length], values[None, slot, :, :length],
                                             mask, scale=scaling, enable_gqa=H != G)
            out[begin:end] = o[0].transpose(0, 1)
        return out

    def _views(self, writing):
        """Cut the writing slots into neighbours of about equal length: each is one view of the cache, and one call.
        -> [(first, end, view, mask [end - first, 1, 1, width] or None)], first and end counting the writing ones."""
        views, n = [], 0
        for slot in writing:
            length = len(self.ids[slot])
            if views and slot == views[-1][1]:
                low, _, width, total = views[-1]
                wider = max(width, length)
                if (slot + 1 - low) * wider - total - length <= CALL:
                    views[-1][1:] = slot + 1, wider, total + length
                    continue
            views.append([slot, slot + 1, length, length])  # first, end, width, sum of lengths
        for i, (low, high, width, total) in enumerate(views):
            seen = None
            if total < (high - low) * width:
                last = self.position[n:n + high - low, None]
                seen = (torch.arange(width, device=self.device) <= last)[:, None, None]
            views[i] = n, n + high - low, (slice(low, high), slice(None), slice(width)), seen
            n += high - low
        return views

    def _grow(self, key):
        old, (heads, _, size) = self.kv, key.shape
        cpu = key.device.type == "cpu"
        shape = self.policy.config.num_hidden_layers, 2, self.slots, heads, self.longest * (8 if cpu else 2), size
        # zeros: what was never written is masked, but 0 times not-a-number would be seen
        if cpu:  # numpy's cost nothing until they are touched
            self.kv = torch.from_numpy(np.zeros(math.prod(shape) * key.itemsize, np.uint8)).view(key.dtype).view(shape)
        else:
            self.kv = key.new_zeros(shape)
        if old is not None:
            self.kv[..., :old.shape[4], :] = old


class _Layer(DynamicLayer):
    """Appends in place to a buffer that doubles; DynamicLayer's torch.cat would copy all of it for every token."""

    buffer = None  # [keys and values: 2, B, heads, capacity, D]

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old, new = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if self.buffer is None or new > self.buffer.shape[3]:
            B, H, _, D = key_states.shape
            buffer = value_states.new_empty(2, B, H, new + new // 2 + 64, D)
            if old:
                buffer[0, :, :, :old], buffer[1, :, :, :old] = self.keys, self.values
            self.buffer = buffer
        self.buffer[0, :, :, old:new], self.buffer[1, :, :, old:new] = key_states, value_states
        self.keys, self.values = self.buffer[0, :, :, :new], self.buffer[1, :, :, :new]
        return self.keys, self.values

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.buffer = None


class Padded:
    """The KV cache of rows that all are forwarded in step. Each chunk of new tokens is padded on the left to one width; the 2-D
    `seen` mask over all columns keeps the padding out of the attention, and positions count real tokens only."""

    def __init__(self, policy):
        self.policy, self.kv, self.device = policy, Cache(layer_class_to_replicate=_Layer), policy.device
        self.seen, self.length, self.forwarded = None, None, 0  # seen [B, C] bool, length [B] long

    def start(self, chunks):
        """The first forward: rows that begin alike (the samples of one item) are computed once and copied."""
        place = {}
        for chunk in chunks:
            place.setdefault(tuple(chunk), len(place))
        logits = self.forward([list(chunk) for chunk in place])
        rows = [place[tuple(chunk)] for chunk in chunks]
        self.keep(rows)
        return logits[rows]

    @torch.no_grad()
    def forward(self, chunks):
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

    def keep(self, rows):
        rows = torch.tensor(rows, device=self.device)
        self.kv.batch_select_indices(rows)
        self.seen, self.length = self.seen[rows], self.length[rows]
