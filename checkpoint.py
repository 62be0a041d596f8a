"""Checkpoints: all or nothing, safetensors only, read back by any number of processes.

    checkpoints/step_000050/   the policy as a plain Hugging Face folder (one can play with it),
                               training/*.safetensors: the optimizers' moments, the critic, LoRA's adapters, in pieces as the
                               ranks hold them (torch.distributed.checkpoint), and state.json, without which it is not complete
"""

import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from parallel import ranks, sharded

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
