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

import itertools
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from models.packed import common_prefix_length, fits_flash_attention, flash_over_cache
from models.packed import masked_attention, seen_keys, use_attention
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
    if logits.device.type != "cpu":  # without waiting for the GPU
        return tokens, logprobs, torch.special.entr(probs).sum(-1)
    # H = logsumexp(logits) - E[logits], and logsumexp(logits) = logits[token] - logprob.
    drawn = logits.gather(-1, tokens[:, None]).squeeze(1)
    entropies = drawn - logprobs - torch.linalg.vecdot(probs, logits)
    if not entropies.isfinite().all():  # a logit of -inf: 0 * inf
        entropies = torch.special.entr(probs).sum(-1)
    return tokens, logprobs, entropies.clamp(min=0.0)


def _truncate(weights: Tensor, top_p: float, top_k: int) -> Tensor:
    """weights [B, V] -> the same, with 0 for each token that top_k or top_p leaves out."""
    if top_k:
        largest = weights.topk(min(top_k, weights.shape[-1]))
        weights = torch.zeros_like(weights).scatter(-1, largest.indices, largest.values)
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
    is_full: bool  # each query sees all keys, but for a sliding window


class PrefillChunk(NamedTuple):
    """A prefilling slot: its new ids and the keys that they see."""

    row: slice  # the new ids in the flat row
    slot: int
    past: int  # number of keys of the slot before the new ones
    length: int  # number of its keys, the new ones included
    masks: dict[int | None, Tensor]  # window -> mask [H / H_kv * new ids, length], made when needed


# What each layer calls.
AttentionInterface.register("ragged", lambda *args, ragged, **kw: ragged.attend(*args, **kw))

# On a GPU a step in which slots prefill is a CUDA graph up to this many prefilled ids.
MAX_GRAPH_PREFILL = 2048
# In a feed: the id that was sampled for this slot last, which the host may not know yet.
SAMPLED_LAST = -1


class Ragged:
    """The KV cache of `slots` trajectories, and the forward pass that extends it.

    `ids[slot]` are the ids whose keys and values the cache holds. They stay after a trajectory
    has ended, so that a later one that begins with the same ids can copy them.
    `sampled` [slots + 1] are the ids that were sampled last, `fed` the slots of the last feed, as a
    tensor. `forwarded` counts the token positions that were computed. graphs: on a GPU, record
    decode steps as CUDA graphs.
    """

    def __init__(self, policy: PreTrainedModel, slots: int, graphs: bool = True):
        self.policy = policy
        self.slots = slots
        self.device = device_of(policy)
        # The cost of one more attention call, in masked keys that could be read in the same time.
        # A GPU takes all decoding slots in one call.
        self.attention_call_cost = 512 if self.device.type == "cpu" else 10**6
        self.kv_cache = {}  # attention module -> keys, values [slots + 1, H_kv, capacity, D]
        self.use_graphs = graphs and self.device.type == "cuda"
        self.sampled = torch.zeros(slots + 1, dtype=torch.long, device=self.device)
        # On a GPU a step is started before the ids that the last one has sampled are read.
        self.reads_late = self.device.type != "cpu"
        self.fits_flash = True  # whether all calls of `attend` so far could be flash attention
        self.cache_spans = None  # in a step at fixed places: what `flash_over_cache` reads
        self.clear()

    def clear(self, max_length: int = 10**9) -> None:
        """Forget what the cache holds, as after a change of the weights.

        max_length: the largest number of ids that a trajectory will have. On a CPU the memory is
        kept, because the first access to fresh memory is slow.
        """
        self.ids = [[] for _ in range(self.slots)]
        self.forwarded = 0
        self.max_length = max_length
        # (number of keys read, number of prefilled ids) -> (inputs, function that runs such a step)
        self.graph_steps = {}
        for module in self.kv_cache:
            module.__dict__.pop("kv_cache", None)
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
        """Append new ids to some slots. feed: {slot: new ids, at least one; the first may be
        SAMPLED_LAST} -> logits [len(feed), V] after the last new id of each slot, in the order of
        `feed`."""
        self.fed = torch.tensor(list(feed)).to(self.device, non_blocking=True)
        prefilled = sum(map(len, feed.values())) - len(feed)
        largest = MAX_GRAPH_PREFILL if self.fits_flash else 0
        can_be_graph = self.use_graphs and self.kv_cache and prefilled <= largest
        if can_be_graph and (step := self._graph_step(feed)):
            for slot, new_ids in feed.items():
                self.ids[slot] += new_ids
            return step()[self.fed]

        # Build the flat row, and set the attributes that `attend` reads.
        decoding = sorted(slot for slot, new_ids in feed.items() if len(new_ids) == 1)
        prefilling = [slot for slot, new_ids in feed.items() if len(new_ids) > 1]
        ids, slots, positions = [], [], []  # of each token of the flat row
        last_place = {}  # slot -> place of its last new id in the flat row
        self.prefills, self.prefill_spans, self.cache_spans = [], None, None
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
        # No shape comes again, so nothing is compiled for it.
        with torch.compiler.set_stance("force_eager") if self.use_graphs else nullcontext():
            return self._logits(ids_on_device, logits_to_keep=places)

    def _logits(self, ids, **options):
        """The policy's forward pass over the flat row [N] -> logits of the places kept."""
        if self.reads_late:
            ids = torch.where(ids == SAMPLED_LAST, self.sampled[self.token_slots], ids)
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

        self.decode_views, self.masks, start = [], {}, 0
        for slots, longest, total in groups:
            row, start = slice(start, start + len(slots)), start + len(slots)
            num_slots = slots[-1] + 1 - slots[0]  # those in between included
            places = self.token_slots[row] - slots[0] if num_slots > len(slots) else None
            self.decode_views.append(DecodeView(row, slice(slots[0], slots[-1] + 1), longest,
                                                places, total == num_slots * longest))

    def _graph_step(self, feed):
        """Prepare a step at fixed places, as one CUDA graph -> a function that runs it and returns
        logits [slots, V]; None if the step cannot be recorded.

        The shapes of a graph are fixed. Its flat row has the last new id of every slot, and then
        the new ids before them, padded to a power of two. The padding, and slots that are not fed,
        write to a slot of their own, the last of the cache. If a step cannot be recorded, it and
        all later ones run eagerly, which rewrites what the attempt has written.
        """
        held = [len(ids) if slot in feed else 0 for slot, ids in enumerate(self.ids)]
        new_ids = [feed.get(slot, (0,)) for slot in range(self.slots)]
        before = [(slot, ids[:-1]) for slot, ids in enumerate(new_ids) if len(ids) > 1]
        ends = list(itertools.accumulate((len(ids) - 1 for ids in new_ids), initial=0))
        prefilled = ends[-1] and 1 << max(7, (ends[-1] - 1).bit_length())
        padding = [0] * (prefilled - ends[-1])
        inputs = torch.tensor([*itertools.chain(  # token ids, slots, positions, ends
            (ids[-1] for ids in new_ids), *(ids for _, ids in before), padding,
            (slot if slot in feed else self.slots for slot in range(self.slots)),
            *([slot] * len(ids) for slot, ids in before), [self.slots] * len(padding),
            (n + len(ids) - 1 for n, ids in zip(held, new_ids)),
            *(range(held[slot], held[slot] + len(ids)) for slot, ids in before), padding, ends)])

        needed = max(n + len(ids) for n, ids in zip(held, new_ids))
        # The number of keys that are read is a power of two, for few graphs, but no larger than a
        # trajectory can become. Flash attention reads as many as a slot has.
        width = 1 << max(8, (needed - 1).bit_length())
        width = self.needed_capacity = min(width, max(needed, self.max_length))
        # Grow every layer's cache now: a recorded graph must not change its address.
        for module, (keys, values) in list(self.kv_cache.items()):
            if keys.shape[2] < width:
                self._layer_cache(module, keys[0], values[0])
        key = (0 if self.fits_flash else width, prefilled)
        if key not in self.graph_steps:
            # Recording runs the step, which writes keys and values: with its own inputs.
            inputs = inputs.to(self.device)
            try:
                self.graph_steps[key] = inputs, self._record_step(inputs, width, prefilled)
            except RuntimeError as e:  # CUDA's errors are RuntimeErrors, out of memory among them
                self.use_graphs = False
                self.graph_steps = {}
                # Leaving a failed recording raises a second error. Its context is the cause.
                warnings.warn("a decode step cannot be recorded as a CUDA graph, so all run "
                              f"eagerly, which is slower: {e.__context__ or e}", stacklevel=2)
                return None
        fixed_inputs, step = self.graph_steps[key]
        fixed_inputs.copy_(inputs, non_blocking=True)
        self.forwarded += self.slots + prefilled
        return step

    def _record_step(self, inputs: Tensor, width: int, prefilled: int) -> Callable[[], Tensor]:
        """-> a function that computes the logits [slots, V] of what `inputs` (see `_graph_step`)
        holds then. Without flash attention it reads `width` keys in each slot. On a GPU it replays
        a graph."""
        places = self.slots + prefilled
        for module, (keys, values) in self.kv_cache.items():
            module.kv_cache = keys, values  # so that compiled blocks need no number of the layer
        capacity = keys.shape[2]

        def decode():
            ids, self.token_slots, self.token_positions = inputs[: 3 * places].view(3, -1)
            last_keys = self.token_positions[: self.slots]
            self.prefills, self.decode_count = [], self.slots
            every = slice(self.slots)
            self.decode_views, self.masks = [DecodeView(every, every, width, None, False)], {}
            if self.fits_flash:
                one_each = torch.arange(self.slots + 1, dtype=torch.int32, device=self.device)
                starts, last_keys = one_each * capacity, last_keys.int()
                self.cache_spans = [(every, (one_each, starts, 1, last_keys + 1))]
                if prefilled:  # they do not see the last new id
                    rest = slice(self.slots, places)
                    ends = inputs[3 * places :].int()
                    self.cache_spans.append((rest, (ends, starts, prefilled, last_keys)))
            return self._logits(ids, logits_to_keep=every)

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
        if self.cache_spans is None:
            return self._attend_eagerly(module, query, key, value, scaling, sliding_window, softcap,
                                        s_aux)
        keys, values = module.kv_cache  # of `_record_step`
        keys[self.token_slots, :, self.token_positions] = key.transpose(0, 1)
        values[self.token_slots, :, self.token_positions] = value.transpose(0, 1)
        out = [flash_over_cache(query[:, row], keys, values, spans, scaling, sliding_window)
               for row, spans in self.cache_spans]
        return (torch.cat(out) if len(out) > 1 else out[0])[None], None

    @torch.compiler.disable  # it would be compiled again for each number of slots
    def _attend_eagerly(self, module, query, key, value, scaling, window, softcap, s_aux):
        H, N, D = query.shape
        H_kv, D_v = len(key), value.shape[-1]
        keys, values = self._layer_cache(module, key, value)  # [slots + 1, H_kv, capacity, D]
        keys[self.token_slots, :, self.token_positions] = key.transpose(0, 1)
        values[self.token_slots, :, self.token_positions] = value.transpose(0, 1)
        is_plain = softcap is None and s_aux is None and D == D_v
        self.fits_flash = self.fits_flash and is_plain and fits_flash_attention(value)
        out = query.new_empty(N, H, D_v)
        sinks = None if s_aux is None else s_aux.view(1, H_kv, H // H_kv, 1)

        # Decoding slots have one query each. The query heads that share a KV head stand where the
        # queries of a sequence would, so that no key is copied: [slots, H_kv, H / H_kv, D].
        queries = query[:, : self.decode_count].transpose(0, 1).reshape(-1, H_kv, H // H_kv, D)
        for view, mask in zip(self.decode_views, self._decode_masks(window, value)):
            q = queries[view.row]
            k, v = (held[view.slots, :, : view.width] for held in (keys, values))
            if view.places is not None:
                q = q.new_zeros(len(k), *q.shape[1:]).index_copy_(0, view.places, q)
            o = masked_attention(q, k, v, mask, scaling, softcap, sinks)
            if view.places is not None:
                o = o[view.places]
            out[view.row] = o.reshape(-1, H, D_v)

        # A prefilling slot has several queries.
        if self.prefills and is_plain and fits_flash_attention(value):
            out[self.decode_count :] = flash_over_cache(
                query[:, self.decode_count :], keys, values, self._prefill_spans(keys.shape[2]),
                scaling, window)
            return out[None], None
        for chunk in self.prefills:
            q = query[:, chunk.row]
            k, v = (held[None, chunk.slot, :, : chunk.length] for held in (keys, values))
            sees_all = (window or chunk.length) >= chunk.length
            if not chunk.past and sees_all and softcap is None and sinks is None:
                o = masked_attention(q[None], k, v, None, scaling, is_causal=True)
            else:
                if window not in chunk.masks:
                    seen = seen_keys(self.token_positions[chunk.row], chunk.length, window, v)
                    chunk.masks[window] = seen if H == H_kv else seen.repeat(H // H_kv, 1)
                sink = None if sinks is None else sinks.repeat_interleave(q.shape[1], 2)
                o = masked_attention(q.reshape(1, H_kv, -1, D), k, v, chunk.masks[window],
                                     scaling, softcap, sink)
            out[chunk.row] = o.reshape(H, -1, D_v).transpose(0, 1)
        return out[None], None

    def _decode_masks(self, window, like):
        """For each of `decode_views` its mask [slots, 1, 1, keys] (see `seen_keys`), or None if all
        keys are seen. All are parts of one mask, which the layers with this window share."""
        if window not in self.masks:
            slots, keys = (x[: self.decode_count] for x in (self.token_slots, self.token_positions))
            # Other slots see their first key: a softmax over no key would be NaN.
            last_keys = self.fed.new_zeros(self.slots + 1).index_copy_(0, slots, keys)
            whole = seen_keys(last_keys, self.needed_capacity, window, like)[:, None, None]
            self.masks[window] = [None if view.is_full and (window or view.width) >= view.width
                                  else whole[view.slots, ..., : view.width]
                                  for view in self.decode_views]
        return self.masks[window]

    def _prefill_spans(self, capacity):
        """What `flash_over_cache` reads for the prefilling slots; the same in all layers."""
        if self.prefill_spans is None:
            counts = [chunk.length - chunk.past for chunk in self.prefills]
            rows = [[*itertools.accumulate(counts, initial=0)],
                    [*(chunk.slot * capacity for chunk in self.prefills), 0],
                    [*(chunk.length for chunk in self.prefills), 0]]
            ends, starts, lengths = torch.tensor(rows, dtype=torch.int32, device=self.device)
            self.prefill_spans = ends, starts, max(counts), lengths[:-1]
        return self.prefill_spans

    def _layer_cache(self, module, key, value):
        """The layer's keys and values, [slots, H_kv, capacity, D] each, grown if this step needs
        more room. key and value [H_kv, any, D]: their dtype and device are the cache's."""
        old = self.kv_cache.get(module, ())
        needed = self.needed_capacity
        if old and old[0].shape[2] >= needed and old[0].dtype == key.dtype:
            return old
        capacity = max(needed, min(2 * needed, self.max_length))
        new = self._zeros(capacity, key), self._zeros(capacity, value)
        for larger, smaller in zip(new, old):
            larger[:, :, : smaller.shape[2]] = smaller
        self.kv_cache[module] = new
        self.graph_steps = {}  # recorded graphs use the old cache's address
        return new

    def _zeros(self, capacity, like):
        """Zeros, because the weight of a masked key is 0, but 0 times NaN would still be NaN."""
        heads, size = like.shape[::2]
        if like.device.type != "cpu":  # as flash attention reads them; one more slot for padding
            return like.new_zeros(self.slots + 1, capacity, heads, size).transpose(1, 2)
        shape = (self.slots + 1, heads, capacity, size)
        # numpy's zeros take memory only where they are written; torch's are all written at once. As
        # bytes, because numpy has no bfloat16.
        num_bytes = math.prod(shape) * like.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like.dtype).view(shape)
