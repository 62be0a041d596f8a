"""The policy as a trainable thing: loading, LoRA, the critic, token log-probs in packed rows, checkpoints. Knows no text."""

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import (AttentionInterface, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel,
                          PreTrainedTokenizerBase)

import algos
from parallel import blocks, ranks, sharded, through

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


# ---- packed rows ----


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


# ---- checkpoints ----

LORA_SCALE = 2.0  # alpha / rank


def whole(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """A causal LM's state dict on rank 0's CPU, LoRA's adapters merged into what they adapt; elsewhere {}. Called by all ranks."""
    if sharded(model):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    else:
        state = {name: tensor.cpu() for name, tensor in model.state_dict().items()} if ranks()[0] == 0 else {}
    for name in [name for name in state if ".lora_A." in name]:
        base, a, b = name.split("lora_A")[0] + "base_layer.weight", state.pop(name), state.pop(name.replace("lora_A", "lora_B"))
        state[base] = (state[base].float() + LORA_SCALE * b @ a).to(state[base].dtype)
    if getattr(model.config, "tie_word_embeddings", False):
        for name in getattr(model, "_tied_weights_keys", None) or ():
            state.pop(name, None)
    return {name.replace(".base_layer.", "."): tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in state.items()}


def tensors_of(trained: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]) -> dict[str, torch.Tensor]:
    """What a run holds beside the policy's weights, by name, AdamW's moments made where it has not stepped yet.
    trained: name -> (module, its optimizer)."""
    tensors = {}
    for name, (module, optimizer) in trained.items():
        for key, p in module.named_parameters():
            if not p.requires_grad:
                continue
            if name != "policy" or ".lora_" in key:
                tensors[f"{name}.{key}"] = p.detach()
            state = optimizer.state[p]
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
                tensors[f"{name}.{key}.{moment}"] = state[moment]
            state.setdefault("step", torch.zeros((), device=p.device if optimizer.defaults.get("fused") else None))
    return tensors


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict | None = None,
         trained: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] | None = None, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint, or, with state None, a plain Hugging Face folder with weights in `dtype`. All or nothing: the folder gets
    its name when it is complete. state: what JSON can hold; trained: see `tensors_of`. Called by all ranks; the folder is one
    that all of them see."""
    folder, rank = Path(folder), ranks()[0]
    partial = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    weights = whole(model, dtype)
    if rank == 0:
        with torch.device("meta"):  # the plain class: neither FSDP's nor peft's
            plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype or torch.float32)
        plain.generation_config = model.generation_config
        plain.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
    if state is not None:
        tensors = tensors_of(trained)
        steps = {name: max((float(s["step"]) for s in o.state.values()), default=0.0) for name, (_, o) in trained.items()}
        with warnings.catch_warnings(action="ignore"):  # "assuming the intent is to save in a single process"
            dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(partial / "training"), save_distributed=True),
                     no_dist=not dist.is_initialized())  # every rank has written when it returns
        if rank == 0:
            (partial / "state.json").write_text(json.dumps(state | {"optimizer_steps": steps}))
    if rank == 0:
        (folder / "state.json").unlink(missing_ok=True)  # half deleted it is no checkpoint
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    if dist.is_initialized():
        dist.barrier()


def checkpoints(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    return sorted(p.parent for p in Path(run).glob("checkpoints/step_*/state.json")
                  if not p.parent.name.endswith(".partial"))


def clean(run: str | Path) -> None:
    """Delete what a kill left behind: checkpoints that are not complete."""
    for folder in Path(run).glob("checkpoints/step_*"):
        if folder.name.endswith(".partial") or not (folder / "state.json").exists():
            shutil.rmtree(folder)
    shutil.rmtree(Path(run) / "final.partial", ignore_errors=True)


def drop_old(run: str | Path, keep: int) -> None:
    """Deletes all checkpoints of the run but the last `keep`."""
    for folder in checkpoints(run)[:-keep]:
        (folder / "state.json").unlink()  # from here on it is no checkpoint, though it still has its name
        shutil.rmtree(folder)


def resume(folder: str | Path, trained: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]) -> dict:
    """Fill `trained` (see `tensors_of`) from a checkpoint, in place -> its state. The policy's own weights are loaded by
    `load_policy(folder)`. The number of ranks may be another than when it was written. Raises ValueError if it is broken."""
    try:
        state = json.loads((Path(folder) / "state.json").read_text())
        with warnings.catch_warnings(action="ignore"):
            dcp.load(tensors_of(trained), storage_reader=HuggingFaceStorageReader(str(Path(folder) / "training")),
                     no_dist=not dist.is_initialized())
        for name, (_, optimizer) in trained.items():
            for s in optimizer.state.values():
                s["step"].fill_(state["optimizer_steps"][name])
        return state
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, SafetensorError, CheckpointException) as e:
        raise ValueError(f"the checkpoint {folder} is broken; delete it to go on from the one before") from e
