"""Packed rows: sequences laid out in one row, beginnings that they share once, and the attention
that keeps each within itself."""

import itertools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from parallel import sent


def common_prefix_length(a: list[int], b: list[int], threshold: int = 0) -> int:
    """The length of the longest common prefix of two lists; 0 if it is `threshold` or less.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4]), common_prefix_length([1, 2], [1, 2], 2)
    (2, 0)
    >>> common_prefix_length([1, 2, 3], [1, 9, 3], 2)  # they agree at place 2, but not before
    0
    """
    # A longer prefix agrees at this place, too. One comparison excludes most pairs.
    if min(len(a), len(b)) <= threshold or a[threshold] != b[threshold]:
        return 0
    length = sum(itertools.takewhile(bool, map(operator.eq, a, b)))
    return length if length > threshold else 0


# For `flash_attention`: where the queries and the keys of each sequence begin and end, as running
# sums [sequences + 1] int32 from 0 on; and the largest numbers of queries and of keys.
Spans = tuple[Tensor, Tensor, int, int]


@dataclass(eq=False)
class Parts:
    """What the sequences add to a packed row, in its order. It is no tuple, because compiled blocks
    would be compiled again for each number of sequences."""

    counts: list[int]  # the number of tokens that each adds
    lengths: list[int]  # of keys that these see: all its tokens, of which the added are the last
    places: Tensor  # of all those keys in the packed row, [sum of lengths] long
    spans: Spans


def pack(rows: list[list[int]], width: int, device: torch.device) -> tuple[Tensor, Parts, Tensor]:
    """Sort sequences, and lay them out one after the other. Each leaves out the prefix that it
    shares with the one before it, so a shared prefix stands there once.

    -> the packed row [2, N] long, token ids and positions in the sequences; its parts; and the
    place of each token of each sequence in the packed row, [B, width] long, on the CPU.
    """
    ids, positions, counts, keys = [], [], [], []
    index = torch.zeros(len(rows), width, dtype=torch.long)
    before, places = [], torch.zeros(0, dtype=torch.long)  # of the sequence before
    for b in sorted(range(len(rows)), key=rows.__getitem__):
        shared = common_prefix_length(before, rows[b])
        before = rows[b]
        start = len(ids)
        ids += before[shared:]
        positions += range(shared, len(before))
        places = torch.cat([places[:shared], torch.arange(start, len(ids))])
        index[b, : len(places)] = places
        if len(ids) > start:
            counts.append(len(ids) - start)
            keys.append(places)
    lengths = list(map(len, keys))
    ends = [sent(torch.tensor([0, *n]).cumsum(0).int(), device) for n in (counts, lengths)]
    spans = (*ends, max(counts), max(lengths))
    parts = Parts(counts, lengths, sent(torch.cat(keys), device), spans)
    return sent(torch.tensor([ids, positions]), device), parts, index


@contextmanager
def use_attention(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Inside, the models with this config attend by the function `name` of AttentionInterface."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                     scale: float | None, softcap: float | None = None,
                     sinks: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """softmax(query key^T scale) value, with what some families add. Each key is seen by the query
    heads that share it.

    query [B, H, N, D], key [B, H_kv, M, D], value [B, H_kv, M, D_v] -> [B, H, N, D_v]. mask: added
    to the scores, broadcast to [B, H, N, M] (see `seen_keys`); None: every key is seen. softcap c:
    scores s become c tanh(s / c) (Gemma 2). sinks, broadcast to [B, H, N, 1]: the score of one more
    key, whose value is 0 (GPT-OSS). is_causal, with none of these: query n sees the keys up to n.
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal,
                                            scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def seen_keys(last_keys: Tensor, width: int, window: int | None, like: Tensor) -> Tensor:
    """The mask [N, width] of queries whose last seen keys are at the positions last_keys [N]: 0 for
    keys up to there, with a sliding window for the last `window` of them, and -inf for all others.
    Its dtype is that of `like`."""
    positions, last_keys = torch.arange(width, device=last_keys.device), last_keys[:, None]
    hidden = positions > last_keys
    if window is not None:
        hidden |= positions <= last_keys - window
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


def attend_within(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, scaling: float | None = None,
                  sliding_window: int | None = None, softcap: float | None = None,
                  s_aux: Tensor | None = None, *, parts: Parts,
                  **_: object) -> tuple[Tensor, None]:
    """transformers' attention function for packed rows: each sequence sees itself alone.

    query [1, H, N, D], key and value [1, H_kv, N, D], parts: from `pack` -> [1, N, H, D]. On a GPU
    it is one call of flash attention for sequences of different lengths where the model allows it,
    elsewhere one call of `masked_attention` a sequence. sliding_window, softcap, s_aux (sinks):
    what layers of some families say about their attention.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    is_plain = softcap is None and s_aux is None and query.shape[-1] == value.shape[-1]
    if is_plain and fits_flash_attention(value):
        k, v = (x[0].transpose(0, 1)[parts.places] for x in (key, value))
        return flash_attention(query[0], k, v, parts.spans, scaling, sliding_window)[None], None
    return _attend_one_by_one(query, key, value, parts, scaling, sliding_window, softcap, s_aux)


@torch.compiler.disable  # it would be compiled for each number of sequences
def _attend_one_by_one(query, key, value, parts, scaling, sliding_window, softcap, s_aux):
    is_plain = softcap is None and s_aux is None
    sinks = None if s_aux is None else s_aux[:, None, None]  # [H, 1, 1]
    # One `index_select` and one `split` for all sequences: the gradient of a slice has the size of
    # the whole row, so slices would cost the number of sequences times the row.
    counts, lengths = parts.counts, parts.lengths
    keys, values = (x.index_select(2, parts.places).split(lengths, 2) for x in (key, value))
    out = []
    for q, k, v, count, length in zip(query.split(counts, 2), keys, values, counts, lengths):
        # Otherwise it shares a beginning with the sequence before, or the model's attention is
        # special.
        is_causal = is_plain and count == length and (sliding_window or count) >= count
        last_keys = torch.arange(length - count, length, device=value.device)
        mask = None if is_causal else seen_keys(last_keys, length, sliding_window, value)
        out.append(masked_attention(q, k, v, mask, scaling, softcap, sinks, is_causal))
    return torch.cat(out, 2).transpose(1, 2), None


def fits_flash_attention(value: Tensor) -> bool:
    """Whether `flash_attention` can be called with values [..., D_v] like these: in half precision,
    on a GPU of compute capability 8.0 (A100) or above."""
    size = value.shape[-1]
    return (value.device.type == "cuda" and value.dtype in (torch.bfloat16, torch.float16)
            and size % 8 == 0 and size <= 256
            and torch.cuda.get_device_capability(value.device) >= (8, 0))


# `varlen_attn` of PyTorch 2.11 lets query heads share a key head without being told.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def flash_attention(query: Tensor, key: Tensor, value: Tensor, spans: Spans,
                    scale: float | None, window: int | None) -> Tensor:
    """Causal attention of several sequences that stand one after the other, in one call.

    query [H, N, D]: the last tokens of each sequence; key and value [M, H_kv, D]: all its tokens ->
    [N, H, D]. The last query of a sequence sees its last key, and each one before it a key less.
    scale and window: see `masked_attention` and `seen_keys`.
    """
    left = -1 if window is None else window - 1
    return varlen_attn(query.transpose(0, 1).contiguous(), key, value, *spans, scale=scale,
                       window_size=(left, 0), **SHARED_HEADS)


def flash_over_cache(query: Tensor, keys: Tensor, values: Tensor,
                     spans: tuple[Tensor, Tensor, int, Tensor], scale: float | None,
                     window: int | None) -> Tensor:
    """Causal attention of several slots, which reads keys and values where a cache holds them.

    query [H, N, D]: the last tokens of some slots, one slot after the other; keys and values
    [slots, H_kv, capacity, D], in a row of slots * capacity keys. spans, of n slots: where their
    queries begin and end, running sums [n + 1] int32; where their keys begin, [n + 1] int32, the
    last is not read; the largest number of queries; and the numbers of keys, [n] int32 ->
    [N, H, D]. A row of no slot holds anything. scale and window: as for `flash_attention`.
    """
    query_ends, key_starts, most_queries, lengths = spans
    capacity = keys.shape[2]
    keys, values = (held.transpose(1, 2).flatten(0, 1) for held in (keys, values))
    # A single query sees all keys. Where it is also allowed later ones, of which there are none,
    # the kernel reads a key once for all heads that share it.
    left, right = -1 if window is None else window - 1, -1 if most_queries == 1 else 0
    return torch.ops.aten._flash_attention_forward(
        query.transpose(0, 1), keys, values, query_ends, key_starts, most_queries, capacity, 0.0,
        right == 0, False, scale=scale, window_size_left=left, window_size_right=right,
        seqused_k=lengths)[0]


AttentionInterface.register("within", attend_within)
