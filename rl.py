"""The policy as a trainable thing: loading, token log-probs, one optimizer step. Knows no text.

Every rank holds all trajectories of a step (they are gathered, they are small) and computes gradients for its share of
the micro-batches; gradients are summed over ranks. The denominator of a loss is counted once over the whole mini-batch,
so the result is the same however it is cut into micro-batches and over however many ranks. The processes and FSDP2 are in
parallel.py, trajectories in one row in packing.py, checkpoints in checkpoint.py.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import algos
from checkpoint import LORA_SCALE, checkpoints, clean, drop_old, resume, save  # noqa: F401 (rl.save, rl.resume)
from packing import attention, hidden_before, packs
from parallel import blocks, device_of, gather, ranks, sharded, sum_over_ranks, through

if TYPE_CHECKING:
    from rollout import Trajectory

TINY = Path(__file__).parent / "data" / "tiny"
LOGITS = {"cpu": 2**24, "cuda": 2**27}  # at a time; in float32 64 MB, and half a gigabyte


# ---- models ----


def model_path(name: str) -> str:
    """"tiny" -> the built-in model's folder; a folder or a hub id stays. Raises ValueError if there is no such thing."""
    if name == "tiny":
        return str(TINY)
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists():
            raise ValueError(f"the model folder '{name}' has no config.json")
        return name
    if name.count("/") != 1 or name[0] in "./~" or Path(name).parent.is_dir():
        raise ValueError(f"no model folder '{name}'; give 'tiny', a folder, or a hub id such as Qwen/Qwen2.5-3B-Instruct")
    return name


def load_policy(name: str = "tiny", device: str | torch.device = "cpu",
                dtype: str | torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """-> (causal LM, tokenizer). Weights are read from safetensors only. Raises ValueError if that fails."""
    path = model_path(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return model.to(device), AutoTokenizer.from_pretrained(path)
    except (OSError, ImportError, ValueError, SafetensorError) as e:
        raise ValueError(f"cannot load the model '{name}': {str(e).splitlines()[0]}") from e


def compute_in(dtype: str, device: str | torch.device) -> torch.autocast:
    """Context of a forward pass: float32 weights, arithmetic in `dtype`. Weights kept in bfloat16 would not learn: a step
    of 1e-6 is far below its resolution."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, a model with LoRA is the one it started from."""
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    for m in layers:
        m.enable_adapters(False)
    try:
        yield
    finally:
        for m in layers:
            m.enable_adapters(True)


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> None:
    """LoRA's adapters in all linear layers but the head, in place; nothing else is trained. They are float32, and begin as
    nothing. Needs the package peft."""
    from peft import LoraConfig, inject_adapter_in_model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules="all-linear"), model)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


def recompute_blocks(model: nn.Module) -> None:
    """Gradient checkpointing, in place: a block remembers its input alone, and is computed again in the backward pass."""
    def recomputed(forward):
        def run(*args, **kwargs):
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            name = model.config._attn_implementation  # of this pass; by the backward pass it is another

            def again(*args, **kwargs):
                with attention(model.config, name):
                    return forward(*args, **kwargs)
            return checkpoint(again, *args, use_reentrant=False, **kwargs)
        return run

    for block in blocks(model):
        block.forward = recomputed(block.forward)


class Critic(nn.Module):
    """PPO's value function: a model of its own, started from the policy's weights, and a linear head started at 0."""

    def __init__(self, name: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = torch.float32):
        super().__init__()
        self.body = AutoModel.from_pretrained(model_path(name), dtype=dtype, use_safetensors=True)
        self.config = self.body.config
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(device)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids [B, T] long, mask [B, T] bool -> values [B, T] of the states in which the masked tokens were sampled
        (those before them); zero elsewhere."""
        hidden = hidden_before(self.body, ids, mask)  # [S, D]
        values = torch.zeros(mask.shape, device=ids.device)
        with torch.autocast(ids.device.type, enabled=False):  # in bfloat16 values near 1 would be multiples of 0.004
            values[mask] = nn.functional.linear(hidden.float(), self.head.weight.float(), self.head.bias.float()).squeeze(-1)
        return values


def token_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, temperature: float = 1.0,
                   entropy_gradient: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens under `model`.

    ids [B, T] long, padded on the right (with a causal mask the padding reaches nothing that counts); mask [B, T] bool,
    never True in the first column -> logprobs [B, T], entropies [B, T] float32, zero outside the mask.
    logprobs[b, t] = log_softmax(logits[b, t - 1] / temperature)[ids[b, t]], as recorded by the rollout. Only positions
    before a sampled token go through the head, and no more of them at a time than give LOGITS logits.
    """
    return through(model, _token_logprobs, model, ids, mask, temperature, entropy_gradient)


def _token_logprobs(model, ids, mask, temperature, entropy_gradient):
    def head(hidden, sampled):
        logits = model.get_output_embeddings()(hidden).float()  # [S, V]
        c = model.config
        for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):  # Cohere, Falcon-H1, Granite
            if (factor := getattr(c, name, None) or 1) != 1:
                logits = logits * factor ** power
        if cap := getattr(c, "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        logits = logits / temperature
        logp = torch.log_softmax(logits, dim=-1).gather(-1, sampled[:, None]).squeeze(1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):  # else two [S, V] are kept for nothing
            return logp, algos.entropy(logits)

    hidden, few = hidden_before(model.base_model, ids, mask), max(1, LOGITS[ids.device.type] // model.config.vocab_size)  # [S, D]
    parts = list(zip(hidden.split(few), ids[mask].split(few)))
    if len(parts) > 1:  # each part's logits are computed again in the backward pass
        parts = [checkpoint(head, *part, use_reentrant=False) for part in parts]
    else:
        parts = [head(*part) for part in parts]
    logprobs, entropies = torch.zeros(mask.shape, device=ids.device), torch.zeros(mask.shape, device=ids.device)
    logprobs[mask], entropies[mask] = (torch.cat(column) for column in zip(*parts))
    return logprobs, entropies


# ---- batches ----


def collate(trajectories: "Sequence[Trajectory]", device: str | torch.device = "cpu",
            **columns: Sequence[Sequence[float] | float]) -> dict[str, Tensor]:
    """Pad to the right -> {"ids" [B, T] long, "mask" [B, T] bool, "old_logprobs" [B, T], name: [B, T] ...}.
    columns: name -> a list with one list of T numbers, or one number for all its tokens, a trajectory."""
    B, T = len(trajectories), max(2, *(len(t.tokens) for t in trajectories))

    def pad(rows, dtype):
        out = torch.zeros(B, T, dtype=dtype)
        for b, (t, row) in enumerate(zip(trajectories, rows)):
            out[b, : len(t.tokens)] = torch.as_tensor(row, dtype=dtype)
        return out.to(device)

    batch = {"ids": pad([t.tokens for t in trajectories], torch.long),
             "mask": pad([t.mask for t in trajectories], torch.bool),
             "old_logprobs": pad([t.logprobs for t in trajectories], torch.float32)}
    return batch | {name: pad(rows, torch.float32) for name, rows in columns.items()}


def micro_batches(lengths: list[int], max_tokens: int, ranks: int = 1, packed: bool = True) -> list[list[int]]:
    """Cut trajectories into micro-batches of at most `max_tokens` positions or the longest one's, a multiple of `ranks`
    of them: the i-th is rank i % ranks's, [] where there is none left. Packed, they are as equal as can be had by giving the
    longest left to the emptiest; else of similar lengths, and padding counts.

    >>> micro_batches([5, 9, 4, 5], max_tokens=10), micro_batches([5, 9, 4, 5], max_tokens=10, ranks=2)
    ([[1], [0, 2], [3]], [[1], [0], [3], [2]])
    >>> micro_batches([5, 9, 4, 5], max_tokens=10, packed=False)
    [[2, 0], [3], [1]]
    """
    cuts = []
    if packed and lengths:
        n = max(1, -(-sum(lengths) // max_tokens))
        while not cuts or max(sum(lengths[i] for i in cut) for cut in cuts) > max(max_tokens, *lengths):
            n = -(-n // ranks) * ranks
            cuts, emptiest = [[] for _ in range(n)], [(0, k) for k in range(n)]
            for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
                held, k = heapq.heappop(emptiest)
                cuts[k].append(i)
                heapq.heappush(emptiest, (held + lengths[i], k))
            n += 1
    else:
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            if not cuts or (len(cuts[-1]) + 1) * lengths[i] > max_tokens:
                cuts.append([])
            cuts[-1].append(i)
    return cuts + [[]] * (-len(cuts) % ranks)


def _share(model, trajectories, max_tokens):
    """This rank's micro-batches, as indices. A sharded model's ranks compute together: who has none left repeats the shortest
    trajectory, for nothing. -> [(indices, whether they count)]"""
    rank, world = ranks()
    lengths = [len(t.tokens) for t in trajectories]
    cuts = micro_batches(lengths, max_tokens, world, packs(model.config))[rank::world]
    return [(cut or [lengths.index(min(lengths))], bool(cut)) for cut in cuts if cut or sharded(model)]


@torch.no_grad()
def map_trajectories(function: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module, trajectories: "Sequence[Trajectory]",
                     max_tokens: int) -> list[list[float]]:
    """function(model, ids, mask) -> [B, T], over all trajectories in micro-batches, shared among the ranks -> list of [T]."""
    mine = []
    for cut, counts in _share(model, trajectories, max_tokens):
        batch = collate([trajectories[i] for i in cut], device_of(model))
        rows = function(model, batch["ids"], batch["mask"]).cpu()
        if counts:
            mine.append([(i, row[: len(trajectories[i].tokens)].tolist()) for i, row in zip(cut, rows)])
    if sharded(model):
        model.reshard()  # the backward pass would have done it
    return [row for _, row in sorted(pair for part in gather(mine) for pair in part)]


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, trajectories: "Sequence[Trajectory]", columns: dict[str, list],
                   loss_of: Callable[[dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]], max_tokens: int,
                   max_grad_norm: float = 1.0) -> dict[str, float]:
    """One optimizer step over one mini-batch.

    columns: name -> per-trajectory rows (see `collate`); loss_of(batch) -> (loss, stats): the micro-batch's share of the
    loss, already divided by the mini-batch's one denominator, and a dict of 0-d tensors that add up over micro-batches.
    -> stats, summed over micro-batches and ranks, with "loss", "grad_norm" and the positions computed, "padded" and
    "unpadded".
    """
    (_, world), total = ranks(), {}
    for cut, counts in _share(model, trajectories, max_tokens):
        part = [trajectories[i] for i in cut]
        batch = collate(part, device_of(model), **{name: [rows[i] for i in cut] for name, rows in columns.items()})
        loss, stats = loss_of(batch)
        # FSDP takes the mean over ranks, and the loss is a sum
        (loss * (world * counts if sharded(model) else 1)).backward()
        if counts:
            tokens = sum(len(t.tokens) for t in part)
            stats = stats | {"loss": loss.detach(), "unpadded": tokens, "padded": tokens if packs(model.config) else batch["ids"].numel()}
            total = {k: total.get(k, 0.0) + v for k, v in stats.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not sharded(model):
        sum_over_ranks([p.grad for p in parameters])
    parts = gather([{k: float(v) for k, v in total.items()}])  # a rank without a micro-batch has no stats of its own
    total = {k: sum(p.get(k, 0.0) for p in parts) for k in {k: None for p in parts for k in p}}
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = float(norm.full_tensor() if sharded(model) else norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total | {"grad_norm": norm}
