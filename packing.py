"""Trajectories that stand one after the other in one row, without padding, each attending to itself alone.

The attention is a function of ours, registered with transformers' AttentionInterface, so the models stay as they are. On a GPU
it is one call of flash attention for sequences of different lengths (PyTorch's own `varlen_attn`), elsewhere one of SDPA each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel


def attend_within(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  scaling: float | None = None, lengths: Sequence[int] = (), **_: object) -> tuple[Tensor, None]:
    """transformers' attention function for sequences that stand one after the other in one row: each sees itself alone.
    query [1, H, N, D], key and value [1, H_kv, N, D], sum of `lengths` N -> [1, N, H, D]."""
    query, key, shared = query.to(value.dtype), key.to(value.dtype), query.shape[1] != key.shape[1]
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and value.shape[-1] % 8 == 0:
        ends = torch.tensor([0, *lengths], device=value.device).cumsum(0, dtype=torch.int32)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [N, H, D]
        out = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), scale=scaling, window_size=(-1, 0), enable_gqa=shared)
        return out[None], None
    out = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=shared)
           for part in zip(*(x.split(lengths, 2) for x in (query, key, value)))]
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register("within", attend_within)


@contextmanager
def attention(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Inside, the models with this config attend by `name` of transformers' AttentionInterface."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def columns_count(config: PreTrainedConfig) -> str:
    """What in this model hangs on how many columns a batch has, so that padding would change it; "" if nothing does."""
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"} or (
            getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        return "sliding windows"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in [rope, *rope.values()] if isinstance(part, dict)}
    return "rotary embeddings that change with the length" if kinds & {"dynamic", "longrope"} else ""


def steady_length(config: PreTrainedConfig) -> float:
    """The longest sequence, in tokens, whose rotary embeddings do not hang on its length. Beyond it a cache holds others than a pass over all."""
    if not columns_count(config).startswith("rotary"):
        return float("inf")
    rope = config.rope_parameters
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return min((part["original_max_position_embeddings"] for part in parts if "original_max_position_embeddings" in part), default=config.max_position_embeddings)


def packs(config: PreTrainedConfig) -> bool:
    """Whether the model's sequences can stand in one row: its attention takes any function, and sees all that is before."""
    return config.model_type in ("qwen2", "qwen3", "llama") and not columns_count(config)


def hidden_before(body: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states at the positions before the sampled tokens: ids, mask [B, T] -> [S, D], in the order of the mask.
    Where the model allows it, padding and what follows the last sampled token are left out: the rows stand in one."""
    if not packs(body.config):
        return body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask[:, 1:]]
    place = torch.arange(ids.shape[1], device=ids.device)
    lengths = (place * mask).amax(1).clamp(min=1)  # [B]: the last sampled token is not fed
    fed = place < lengths[:, None]  # [B, T]
    with attention(body.config, "within"):
        out = body(input_ids=ids[fed][None], position_ids=place.expand_as(ids)[fed][None], use_cache=False,
                   lengths=lengths.tolist())
    return out.last_hidden_state[0][mask.roll(-1, 1)[fed]]
