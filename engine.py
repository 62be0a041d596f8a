"""The decode engine of a rollout: each step is one forward pass, and each token is forwarded once.

A slot holds one trajectory. While the policy samples a reply, the slot decodes: its only new id is
the token that was sampled last. After a prompt or an observation the slot prefills: it has several
new ids. The input of a step is one flat row of ids without padding:

    flat row [1, N]:  the new id of each decoding slot, then all new ids of each prefilling slot

Only the attention must know the slots. `Ragged.attend` writes the new keys and values at
(slot, position) of a cache. Each query then reads its own slot: decoding slots share batched calls.
So do prefilling slots where flash attention runs; elsewhere each takes a call of its own. A free
slot can be given to another trajectory at any step.

`Ragged` is this engine, for all models whose layers keep nothing but keys and values and whose
attention can be any function. `models/lockstep.py` is the reference, and it plays all other models.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from models.packed import common_prefix_length, fits_flash_attention, flash_attention
from models.packed import masked_attention, seen_keys, spans_of, use_attention
from parallel import device_of

# What `_record_step` uses is a prototype.
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")

# ---- sampling ----

# `sample` takes at most this many logits at a time on a CPU. Larger tensors do not fit in the CPU's
# cache, and their memory is returned to the system after each operation.
MAX_SAMPLED_LOGITS = 2**20


def sample(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0,
           top_k: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token for each row by inverting the cumulative distribution at `uniforms`.

    logits [B, V], uniforms [B] float64 in [0, 1) -> tokens [B] long, logprobs [B] float32 and
    entropies [B] float32 in nats, which are those of softmax(logits / temperature).
    In evaluation, where log-probs play no part, top_k keeps the k likeliest tokens (0: all), top_p
    the fewest likeliest tokens whose mass reaches top_p.
    Temperature 0 takes the argmax, with log-probs and entropies as at temperature 1.
    """
    if logits.device.type == "cpu" and logits.numel() > MAX_SAMPLED_LOGITS and len(logits) > 1:
        rows = max(1, MAX_SAMPLED_LOGITS // logits.shape[1])
        parts = zip(logits.split(rows), uniforms.split(rows))
        drawn = (sample(*part, temperature, top_p, top_k) for part in parts)
        return tuple(map(torch.cat, zip(*drawn)))
    logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    probs = torch.softmax(logits, -1)  # [B, V]
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        tokens = _invert_cdf(_truncate(probs, top_p, top_k), uniforms.double())
    logprobs = probs.gather(-1, tokens[:, None]).log().squeeze(1)
    # H = logsumexp(logits) - E[logits], and logsumexp(logits) = logits[token] - logprob.
    drawn = logits.gather(-1, tokens[:, None]).squeeze(1)
    entropies = drawn - logprobs - torch.linalg.vecdot(probs, logits)
    if not entropies.isfinite().all():  # a logit of -inf: 0 * inf
        entropies = torch.special.entr(probs).sum(-1)
    return tokens, logprobs, entropies.clamp(min=0.0)


def _truncate(weights: Tensor, top_p: float, top_k: int) -> Tensor:
    """weights [B, V] -> the same, with 0 for each token that top_k or top_p leaves out."""
    if top_k:
        kth_largest = weights.topk(min(top_k, weights.shape[-1])).values[:, -1:]
        weights = weights.masked_fill(weights < kth_largest, 0.0)
    if top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(-1) - ordered
        left_out = mass_before >= top_p * ordered.sum(-1, keepdim=True)
        left_out[:, 0] = False
        ordered[left_out] = 0.0
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    return weights


def _invert_cdf(weights: Tensor, uniforms: Tensor, block_size: int = 64) -> Tensor:
    """Draw from the distributions that `weights` [B, V] are proportional to.

    uniforms [B] float64 -> tokens [B] long; never a token of weight 0. The search finds a block of
    tokens first, then a token in it: in float64 sums are cheap, cumulative sums are not.
    """
    if padding := -weights.shape[1] % block_size:
        weights = pad(weights, (0, padding))
    blocks = weights.view(len(weights), -1, block_size)  # [B, V / block_size, block_size]
    block_cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * block_cdf[:, -1:]  # [B, 1]
    block = torch.searchsorted(block_cdf, target, right=True).clamp(max=block_cdf.shape[1] - 1)
    mass_up_to_previous = block_cdf.gather(1, (block - 1).clamp(min=0))
    target -= torch.where(block > 0, mass_up_to_previous, 0.0)
    chosen_block = blocks.take_along_dim(block[..., None], 1).squeeze(1)
    cdf = chosen_block.cumsum(-1, dtype=torch.float64)  # [B, block_size]
    # The block's sum and the last entry of its cumulative sum may differ in their last bits.
    target = target.clamp(min=0.0).minimum(cdf[:, -1:] * (1 - 1e-12))
    place = torch.searchsorted(cdf, target, right=True)
    return (block * block_size + place).squeeze(1).clamp(max=weights.shape[1] - 1)


# ---- the engine ----


class DecodeView(NamedTuple):
    """One attention call of decoding slots, which reads a rectangle of the cache without a copy.

    The rectangle: all slots from the first to the last of a group, and as many keys as the longest
    of the group has. Slots in between that do not decode are computed too, and dropped.
    """

    row: slice  # the group's queries in the flat row
    slots: slice  # of the rectangle
    width: int  # the number of its keys
    places: Tensor | None  # the group's slots within `slots`; None: there are no others
    last_keys: Tensor  # [slots] long: the last key that each slot's query sees
    masks: dict[int | None, Tensor | None]  # window -> mask [slots, 1, 1, keys], made when needed


class PrefillChunk(NamedTuple):
    """A prefilling slot: its new ids and the keys that they see."""

    row: slice  # the new ids in the flat row
    slot: int
    past: int  # number of keys of the slot before the new ones
    length: int  # number of its keys, the new ones included
    masks: dict[int | None, Tensor]  # window -> mask [H / H_kv * new ids, length], made when needed


# What each layer calls.
AttentionInterface.register("ragged", lambda *args, ragged, **kw: ragged.attend(*args, **kw))


class Ragged:
    """The KV cache of `slots` trajectories, and the forward pass that extends it.

    `ids[slot]` are the ids whose keys and values the cache holds. They stay after a trajectory
    has ended, so that a later one that begins with the same ids can copy them.
    `forwarded` counts the token positions that were computed. graphs: on a GPU, record decode steps
    as CUDA graphs.
    """

    def __init__(self, policy: PreTrainedModel, slots: int, graphs: bool = True):
        self.policy = policy
        self.slots = slots
        self.device = device_of(policy)
        # The cost of one more attention call, in masked keys that could be read in the same time.
        # A GPU takes all decoding slots in one call.
        self.attention_call_cost = 512 if self.device.type == "cpu" else 10**6
        self.kv_cache = {}  # layer -> keys, values [slots, H_kv, capacity, D]
        # CUDA graphs of decode steps. A graph reads its inputs at fixed addresses, so these two
        # tensors are never replaced.
        self.use_graphs = graphs and self.device.type == "cuda"
        self.graph_inputs = torch.zeros(2, slots, dtype=torch.long, device=self.device)
        self.all_slots = torch.arange(slots, device=self.device)
        self.clear()

    def clear(self, max_length: int = 10**9) -> None:
        """Forget what the cache holds, as after a change of the weights.

        max_length: the largest number of ids that a trajectory will have. On a CPU the memory is
        kept, because the first access to fresh memory is slow.
        """
        self.ids = [[] for _ in range(self.slots)]
        self.forwarded = 0
        self.max_length = max_length
        self.graph_steps = {}  # number of keys read -> function that runs a decode step
        if self.device.type != "cpu":
            self.kv_cache = {}

    def attention(self) -> AbstractContextManager[None]:
        """Inside this context the policy's layers call `attend`."""
        return use_attention(self.policy.config, "ragged")

    def best_prefix(self, ids: list[int], first: int = 0) -> tuple[int, int]:
        """Find the slot that holds the longest prefix of `ids` -> (slot, length of the prefix).
        The prefix never includes the last id, which must be forwarded for its logits. Of equal
        prefixes the one in the slot `first` is taken, then that of the smallest number."""
        best_slot, best_length = first, 0
        ids = ids[:-1]
        for slot in [first, *range(self.slots)]:
            if length := common_prefix_length(self.ids[slot], ids, best_length):
                best_slot, best_length = slot, length
        return best_slot, best_length

    def begin(self, slot: int, ids: list[int], source_slot: int, prefix_length: int) -> list[int]:
        """Give `slot` to a trajectory that begins with `ids`. The keys and values of the first
        `prefix_length` ids are copied from `source_slot`. -> the other ids: forward them next."""
        if prefix_length and source_slot != slot:
            for keys_and_values in self.kv_cache.values():
                for held in keys_and_values:
                    held[slot, :, :prefix_length] = held[source_slot, :, :prefix_length]
        self.ids[slot] = ids[:prefix_length]
        return ids[prefix_length:]

    @torch.no_grad()
    def forward(self, feed: dict[int, list[int]]) -> Tensor:
        """Append new ids to some slots. feed: {slot: new ids, at least one} -> logits
        [len(feed), V] after the last new id of each slot, in the order of `feed`."""
        all_decode = all(len(new_ids) == 1 for new_ids in feed.values())
        # A graph computes all slots. It pays off if at least half of them are fed.
        if self.use_graphs and all_decode and 2 * len(feed) >= self.slots:
            if step := self._graph_step(feed):
                for slot, new_ids in feed.items():
                    self.ids[slot] += new_ids
                self.forwarded += self.slots
                return step()[list(feed)]

        # Build the flat row, and set the attributes that `attend` reads.
        decoding = sorted(slot for slot, new_ids in feed.items() if len(new_ids) == 1)
        prefilling = [slot for slot, new_ids in feed.items() if len(new_ids) > 1]
        ids, slots, positions = [], [], []  # of each token of the flat row
        last_place = {}  # slot -> place of its last new id in the flat row
        self.prefills, self.prefill_layout = [], None
        for slot in decoding + prefilling:
            start, past = len(ids), len(self.ids[slot])
            ids += feed[slot]
            self.ids[slot] += feed[slot]
            length = len(self.ids[slot])
            slots += [slot] * len(feed[slot])
            positions += range(past, length)
            last_place[slot] = len(ids) - 1
            if slot in prefilling:
                self.prefills.append(PrefillChunk(slice(start, len(ids)), slot, past, length, {}))
        self.forwarded += len(ids)

        # One transfer to the device. token_slots, token_positions [N]: each token's cache entry.
        flat_row = torch.tensor([ids, slots, positions], device=self.device)
        ids_on_device, self.token_slots, self.token_positions = flat_row
        self.decode_count = len(decoding)
        self.needed_capacity = max(len(self.ids[slot]) for slot in feed)
        self._set_decode_views(decoding)
        places = torch.tensor([last_place[slot] for slot in feed], device=self.device)
        return self._logits(ids_on_device, logits_to_keep=places)

    def _logits(self, ids, **options):
        """The policy's forward pass over the flat row [N] -> logits of the places kept."""
        return self.policy(input_ids=ids[None], position_ids=self.token_positions[None],
                           use_cache=False, ragged=self, **options).logits[0]

    def _set_decode_views(self, decoding):
        """Cut decoding slots, in order, into groups that share one attention call.

        A slot joins the last group if the masked keys that are then read cost no more than a call.
        """
        groups = []  # (slots, length of the longest, sum of lengths)
        for slot in decoding:
            length = len(self.ids[slot])
            slots, longest, total = groups[-1] if groups else ([slot], 0, 0)
            longest, total = max(longest, length), total + length
            masked_keys = (slot + 1 - slots[0]) * longest - total
            if groups and masked_keys <= self.attention_call_cost:
                groups[-1] = ([*slots, slot], longest, total)
            else:
                groups.append(([slot], length, length))

        self.decode_views, start = [], 0
        for slots, longest, total in groups:
            row = slice(start, start + len(slots))
            start = row.stop
            num_slots = slots[-1] + 1 - slots[0]  # those in between included
            last_keys = self.token_positions[row]  # the last key that each query sees
            places = None
            if num_slots > len(slots):
                places = self.token_slots[row] - slots[0]
                # A slot in between sees its first key: a softmax over no key would be NaN.
                last_keys = last_keys.new_zeros(num_slots).index_copy_(0, places, last_keys)
            masks = {None: None} if total == num_slots * longest else {}
            self.decode_views.append(DecodeView(row, slice(slots[0], slots[-1] + 1), longest,
                                                places, last_keys, masks))

    def _graph_step(self, feed):
        """Prepare a step in which all slots of `feed` decode, as one CUDA graph -> a function that
        runs it and returns logits [slots, V]; None if the step cannot be recorded.

        The shapes of a graph are fixed, so all slots take part. A slot that is not fed writes a key
        and a value at its next position, where its next id overwrites them before they are read.
        If a step cannot be recorded, it and all later ones run eagerly, which rewrites what the
        attempt has written.
        """
        new_ids = [feed.get(slot, [0])[0] for slot in range(self.slots)]
        inputs = torch.tensor([new_ids, [len(ids) for ids in self.ids]])  # ids and positions
        needed = 1 + max(len(ids) + (slot in feed) for slot, ids in enumerate(self.ids))

        # The number of keys that are read is a power of two, for few graphs, but no larger than a
        # trajectory can become.
        width = 1 << max(8, (needed - 1).bit_length())
        width = self.needed_capacity = min(width, max(needed, self.max_length + 1))
        # Grow every layer's cache now: a recorded graph must not change its address.
        for layer, (keys, values) in self.kv_cache.items():
            self._layer_cache(layer, keys[0], values[0])

        # Recording runs the step, which writes keys and values: set the inputs first.
        self.graph_inputs.copy_(inputs, non_blocking=True)
        if width not in self.graph_steps:
            try:
                self.graph_steps[width] = self._record_step(width)
            except RuntimeError as e:  # CUDA's errors are RuntimeErrors, out of memory among them
                self.use_graphs = False
                self.graph_steps = {}
                # Leaving a failed recording raises a second error. Its context is the cause.
                warnings.warn("a decode step cannot be recorded as a CUDA graph, so all run "
                              f"eagerly, which is slower: {e.__context__ or e}", stacklevel=2)
                return None
        return self.graph_steps[width]

    def _record_step(self, width: int) -> Callable[[], Tensor]:
        """-> a function that decodes `graph_inputs` (ids and positions) to logits [slots, V], and
        reads `width` keys in each slot. On a GPU it replays a graph."""
        def decode():
            ids, self.token_positions = self.graph_inputs
            self.token_slots = self.all_slots
            self.prefills = []
            self.decode_count = self.slots
            every = slice(self.slots)
            self.decode_views = [DecodeView(every, every, width, None, self.token_positions, {})]
            return self._logits(ids)

        if self.device.type != "cuda":
            decode()  # a warm-up, as on a GPU, so that tests on a CPU cover its side effects
            return decode
        # Warm up outside the recording: the first calls allocate and initialize. In the second one
        # code that waits for the GPU raises an error. A graph cannot record such code, and the
        # attempt would leave CUDA's random generator in a state in which it cannot be used.
        stream = torch.cuda.current_stream()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(stream)
        try:
            with torch.cuda.stream(side_stream):
                decode()
                torch.cuda.set_sync_debug_mode("error")
                decode()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            stream.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # After an error torch.cuda.graph does not restore the current stream; the outer context
        # does.
        with torch.cuda.stream(stream), torch.cuda.graph(graph):
            logits = decode()

        def replay():
            graph.replay()
            return logits
        return replay

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
               attention_mask: Tensor | None, scaling: float | None = None,
               sliding_window: int | None = None, softcap: float | None = None,
               s_aux: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Attention of one layer over the flat row: store the new keys and values, then read.
        query [1, H, N, D], key [1, H_kv, N, D], value [1, H_kv, N, D_v] -> [1, N, H, D_v]. softcap,
        s_aux [H] (sinks): see `models.packed.masked_attention`."""
        # Under autocast queries and keys may be float32.
        query, key, value = query[0].to(value.dtype), key[0].to(value.dtype), value[0]
        H, N, D = query.shape
        H_kv, D_v = len(key), value.shape[-1]
        keys, values = self._layer_cache(module.layer_idx, key, value)  # [slots, H_kv, capacity, D]
        keys[self.token_slots, :, self.token_positions] = key.transpose(0, 1)
        values[self.token_slots, :, self.token_positions] = value.transpose(0, 1)
        out = query.new_empty(N, H, D_v)
        sinks = None if s_aux is None else s_aux.view(1, H_kv, H // H_kv, 1)

        # Decoding slots have one query each. The query heads that share a KV head stand where the
        # queries of a sequence would, so that no key is copied: [slots, H_kv, H / H_kv, D].
        queries = query[:, : self.decode_count].transpose(0, 1).reshape(-1, H_kv, H // H_kv, D)
        for view in self.decode_views:
            q = queries[view.row]
            k, v = (held[view.slots, :, : view.width] for held in (keys, values))
            if view.places is not None:
                q = q.new_zeros(len(k), *q.shape[1:]).index_copy_(0, view.places, q)
            window = sliding_window if (sliding_window or view.width) < view.width else None
            if window not in view.masks:
                view.masks[window] = seen_keys(view.last_keys, view.width, window, v)[:, None, None]
            o = masked_attention(q, k, v, view.masks[window], scaling, softcap, sinks)
            if view.places is not None:
                o = o[view.places]
            out[view.row] = o.reshape(-1, H, D_v)

        # A prefilling slot has several queries.
        is_plain = softcap is None and sinks is None
        if self.prefills and is_plain and D == D_v and fits_flash_attention(value):
            (slots, positions), spans = self._prefill_layout()
            k, v = (held[slots, :, positions] for held in (keys, values))
            out[self.decode_count :] = flash_attention(query[:, self.decode_count :], k, v, spans,
                                                       scaling, sliding_window)
            return out[None], None
        for chunk in self.prefills:
            q = query[:, chunk.row]
            k, v = (held[None, chunk.slot, :, : chunk.length] for held in (keys, values))
            sees_all = (sliding_window or chunk.length) >= chunk.length
            if not chunk.past and sees_all and is_plain:
                o = scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=scaling,
                                                 enable_gqa=H != H_kv)
            else:
                if sliding_window not in chunk.masks:
                    last_keys = torch.arange(chunk.past, chunk.length, device=self.device)
                    seen = seen_keys(last_keys, chunk.length, sliding_window, v)
                    chunk.masks[sliding_window] = seen.repeat(H // H_kv, 1)
                sink = None if sinks is None else sinks.repeat_interleave(q.shape[1], 2)
                o = masked_attention(q.reshape(1, H_kv, -1, D), k, v, chunk.masks[sliding_window],
                                     scaling, softcap, sink)
            out[chunk.row] = o.reshape(H, -1, D_v).transpose(0, 1)
        return out[None], None

    def _prefill_layout(self):
        """-> the cache entries that the prefilling slots read, as slots and positions, [keys] each;
        and the Spans of their queries and keys. They are the same in all layers of a step."""
        if self.prefill_layout is None:
            lengths = [chunk.length for chunk in self.prefills]
            slots = torch.tensor([chunk.slot for chunk in self.prefills])
            positions = torch.cat([torch.arange(length) for length in lengths])
            entries = torch.stack([slots.repeat_interleave(torch.tensor(lengths)), positions])
            counts = [chunk.length - chunk.past for chunk in self.prefills]
            self.prefill_layout = (entries.to(self.device).unbind(),
                                   spans_of(counts, lengths, self.device))
        return self.prefill_layout

    def _layer_cache(self, layer, key, value):
        """The layer's keys and values, [slots, H_kv, capacity, D] each, grown if this step needs
        more room. key and value [H_kv, any, D]: their dtype and device are the cache's."""
        old = self.kv_cache.get(layer, ())
        needed = self.needed_capacity
        if old and old[0].shape[2] >= needed and old[0].dtype == key.dtype:
            return old
        capacity = max(needed, min(2 * needed, self.max_length))
        new = self._zeros(capacity, key), self._zeros(capacity, value)
        for larger, smaller in zip(new, old):
            larger[:, :, : smaller.shape[2]] = smaller
        self.kv_cache[layer] = new
        self.graph_steps = {}  # recorded graphs use the old cache's address
        return new

    def _zeros(self, capacity, like):
        """Zeros, because the weight of a masked key is 0, but 0 times NaN would still be NaN."""
        shape = (self.slots, len(like), capacity, like.shape[-1])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # numpy's zeros take memory only where they are written; torch's are all written at once. As
        # bytes, because numpy has no bfloat16.
        num_bytes = math.prod(shape) * like.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like.dtype).view(shape)
