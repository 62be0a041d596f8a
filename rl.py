"""The policy as a trainable thing: loading, token log-probs, one optimizer step, checkpoints. Knows no text.

Every rank holds all trajectories of a step (they are gathered, they are small) and computes gradients for its share of
the micro-batches; gradients are summed over ranks. The denominator of a loss is counted once over the whole mini-batch,
so the result is the same however it is cut into micro-batches and over however many ranks.
"""

import json
import os
import pickle
import shutil
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, AutoTokenizer

import algos

TINY = Path(__file__).parent / "data" / "tiny"
LOGITS = 2**27  # at a time: half a gigabyte in float32


# ---- processes ----


def init_distributed():
    """Join torchrun's process group if there is one -> (rank, world size, device)."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=2))  # the slowest rollout is waited for
    return rank, world, device


def _ranks():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(part: list) -> list:
    """Every rank's list, interleaved (0 of rank 0, 0 of rank 1, 1 of rank 0, ...): undoes `whole[rank::world]`."""
    rank, world = _ranks()
    if world == 1:
        return part
    parts = [None] * world
    dist.all_gather_object(parts, part)
    return [parts[i % world][i // world] for i in range(sum(map(len, parts)))]


def _sum_over_ranks(tensors):
    if dist.is_initialized():
        flat = torch.cat([t.flatten() for t in tensors])  # one message instead of one a tensor
        dist.all_reduce(flat)
        for t, new in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(new.view_as(t))


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


def load_policy(name="tiny", device="cpu", dtype=torch.float32):
    """-> (causal LM, tokenizer). Weights are read from safetensors only. Raises ValueError if that fails."""
    path = model_path(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return model.to(device), AutoTokenizer.from_pretrained(path)
    except (OSError, ImportError, ValueError, SafetensorError) as e:
        raise ValueError(f"cannot load the model '{name}': {str(e).splitlines()[0]}") from e


def compute_in(dtype, device):
    """Context of a forward pass: float32 weights, arithmetic in `dtype`. Weights kept in bfloat16 would not learn: a step
    of 1e-6 is far below its resolution."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")


def attend_within(module, query, key, value, attention_mask, scaling=None, lengths=(), **_):
    """transformers' attention function for sequences that stand one after the other in one row: each sees itself alone.
    query [1, H, N, D], key and value [1, H_kv, N, D], sum of `lengths` N -> [1, N, H, D]."""
    parts = zip(*(x.to(value.dtype).split(lengths, 2) for x in (query, key, value)))
    out = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
           for q, k, v in parts]
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register("within", attend_within)


@contextmanager
def attention(config, name):
    """Inside, the models with this config attend by `name` of transformers' AttentionInterface."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def columns_count(config) -> str:
    """What in this model hangs on how many columns a batch has, so that padding would change it; "" if nothing does."""
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"} or (
            getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        return "sliding windows"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in [rope, *rope.values()] if isinstance(part, dict)}
    return "rotary embeddings that change with the length" if kinds & {"dynamic", "longrope"} else ""


def packs(config) -> bool:
    """Whether the model's sequences can stand in one row: its attention takes any function, and sees all that is before."""
    return config.model_type in ("qwen2", "qwen3", "llama") and not columns_count(config)


def hidden_before(body, ids, mask):
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


class Critic(nn.Module):
    """PPO's value function: a model of its own, started from the policy's weights, and a linear head started at 0."""

    def __init__(self, name, device="cpu", dtype=torch.float32):
        super().__init__()
        self.body = AutoModel.from_pretrained(model_path(name), dtype=dtype, use_safetensors=True)
        self.config = self.body.config
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(device)

    def forward(self, ids, mask):
        """ids [B, T] long, mask [B, T] bool -> values [B, T] of the states in which the masked tokens were sampled
        (those before them); zero elsewhere."""
        hidden = hidden_before(self.body, ids, mask)  # [S, D]
        values = torch.zeros(mask.shape, device=ids.device)
        values[mask] = self.head(hidden.float()).squeeze(-1).float()
        return values


def token_logprobs(model, ids, mask, temperature=1.0, entropy_gradient=True):
    """Log-probs and entropies of the sampled tokens under `model`.

    ids [B, T] long, padded on the right (with a causal mask the padding reaches nothing that counts); mask [B, T] bool,
    never True in the first column -> logprobs [B, T], entropies [B, T] float32, zero outside the mask.
    logprobs[b, t] = log_softmax(logits[b, t - 1] / temperature)[ids[b, t]], as recorded by the rollout. Only positions
    before a sampled token go through the head, and no more of them at a time than give LOGITS logits.
    """
    def head(hidden, sampled):
        logits = model.get_output_embeddings()(hidden).float()  # [S, V]
        if cap := getattr(model.config, "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        logits = logits / temperature
        logp = torch.log_softmax(logits, dim=-1).gather(-1, sampled[:, None]).squeeze(1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):  # else two [S, V] are kept for nothing
            return logp, algos.entropy(logits)

    hidden, few = hidden_before(model.base_model, ids, mask), max(1, LOGITS // model.config.vocab_size)  # [S, D]
    parts = list(zip(hidden.split(few), ids[mask].split(few)))
    if len(parts) > 1:  # each part's logits are computed again in the backward pass
        parts = [checkpoint(head, *part, use_reentrant=False) for part in parts]
    else:
        parts = [head(*part) for part in parts]
    logprobs, entropies = torch.zeros(mask.shape, device=ids.device), torch.zeros(mask.shape, device=ids.device)
    logprobs[mask], entropies[mask] = (torch.cat(column) for column in zip(*parts))
    return logprobs, entropies


# ---- batches ----


def collate(trajectories, device="cpu", **columns):
    """Pad to the right -> {"ids" [B, T] long, "mask" [B, T] bool, "old_logprobs" [B, T], name: [B, T] ...}.
    columns: name -> a list with one list of T numbers, or one number for all its tokens, a trajectory."""
    B, T = len(trajectories), max(1, *(len(t.tokens) for t in trajectories))

    def pad(rows, dtype):
        out = torch.zeros(B, T, dtype=dtype)
        for b, (t, row) in enumerate(zip(trajectories, rows)):
            out[b, : len(t.tokens)] = torch.as_tensor(row, dtype=dtype)
        return out.to(device)

    batch = {"ids": pad([t.tokens for t in trajectories], torch.long),
             "mask": pad([t.mask for t in trajectories], torch.bool),
             "old_logprobs": pad([t.logprobs for t in trajectories], torch.float32)}
    return batch | {name: pad(rows, torch.float32) for name, rows in columns.items()}


def micro_batches(lengths, max_tokens):
    """Cut trajectories into micro-batches of similar length, at most `max_tokens` positions each, padding included.

    >>> micro_batches([5, 9, 4, 5], max_tokens=10)
    [[2, 0], [3], [1]]
    """
    out, current = [], []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if current and (len(current) + 1) * lengths[i] > max_tokens:
            out.append(current)
            current = []
        current.append(i)
    if current:
        out.append(current)
    return out


@torch.no_grad()
def map_trajectories(function, trajectories, device, max_tokens):
    """function(ids, mask) -> [B, T], over all trajectories in micro-batches, shared among the ranks -> list of [T]."""
    rank, world = _ranks()
    cuts = micro_batches([len(t.tokens) for t in trajectories], max_tokens)
    mine = []
    for cut in cuts[rank::world]:
        batch = collate([trajectories[i] for i in cut], device)
        rows = function(batch["ids"], batch["mask"]).cpu()
        mine.append([(i, row[: len(trajectories[i].tokens)].tolist()) for i, row in zip(cut, rows)])
    return [row for _, row in sorted(pair for part in gather(mine) for pair in part)]


def optimizer_step(model, optimizer, trajectories, columns, loss_of, max_tokens, max_grad_norm=1.0):
    """One optimizer step over one mini-batch.

    columns: name -> per-trajectory rows (see `collate`); loss_of(batch) -> (loss, stats): the micro-batch's share of the
    loss, already divided by the mini-batch's one denominator, and a dict of 0-d tensors that add up over micro-batches.
    -> stats, summed over micro-batches and ranks, with "loss", "grad_norm" and the positions computed, "padded" and
    "unpadded".
    """
    rank, world = _ranks()
    device = next(model.parameters()).device
    total = {}
    packed = packs(model.config)
    cuts = micro_batches([len(t.tokens) for t in trajectories], max_tokens)
    for cut in cuts[rank::world]:
        part = [trajectories[i] for i in cut]
        batch = collate(part, device, **{name: [rows[i] for i in cut] for name, rows in columns.items()})
        loss, stats = loss_of(batch)
        loss.backward()
        tokens = sum(len(t.tokens) for t in part)
        stats = stats | {"loss": loss.detach(), "unpadded": torch.tensor(float(tokens)),
                         "padded": torch.tensor(float(tokens if packed else batch["ids"].numel()))}
        total = {k: total.get(k, 0.0) + float(v) for k, v in stats.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    _sum_over_ranks([p.grad for p in parameters])
    if world > 1:  # a rank without a micro-batch has no stats of its own
        parts = [None] * world
        dist.all_gather_object(parts, total)
        total = {k: sum(p.get(k, 0.0) for p in parts) for k in {k: None for p in parts for k in p}}
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total | {"grad_norm": float(norm)}


# ---- checkpoints ----


def save(folder, model, tokenizer, state, tensors):
    """Write a checkpoint, or, with state None, a plain Hugging Face folder. All or nothing: the folder gets its name
    when it is complete. state: what JSON can hold; tensors: name -> state dict, read back with weights_only."""
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if state is not None:
        torch.save(tensors, partial / "training.pt")
        (partial / "state.json").write_text(json.dumps(state))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def checkpoints(run):
    """The complete checkpoints of a run folder, oldest first."""
    return sorted(p.parent for p in Path(run).glob("checkpoints/step_*/state.json")
                  if not p.parent.name.endswith(".partial"))


def drop_old(run, keep):
    for folder in checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def resume(folder):
    """-> (state, tensors) of a checkpoint, on the CPU; its weights are loaded by `load_policy(folder)`. Raises ValueError
    if it is broken."""
    try:
        tensors = torch.load(Path(folder) / "training.pt", map_location="cpu", weights_only=True)
        return json.loads((Path(folder) / "state.json").read_text()), tensors
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"the checkpoint {folder} is broken; delete it to go on from the one before") from e
