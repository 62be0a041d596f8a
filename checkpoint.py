"""Checkpoints: complete or absent, intact or refused, for any optimizer and number of processes.

    checkpoints/step_000050/   the policy as a plain Hugging Face folder
        training/              optimizer states, critic, LoRA's adapters (safetensors)
        state.json             the step and the like, and the sha256 of every file; written last
"""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from parallel import gather, of_rank_0
from rl import Trained, full_state_dict

# These modules warn that torch.distributed is not initialized. A single process does without it.
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
OPTIONS = state_dict.StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True,
                                      strict=False)


def training_state(trained: Trained, with_optimizers: bool) -> tuple[dict[str, Tensor], dict]:
    """What a run holds besides the policy's plain folder, as the ranks hold it: tensors, and the
    numbers of its optimizers.

    The tensors are the weights of the critic and of LoRA's adapters. with_optimizers: also the
    optimizers' states, which are initialized if no step was taken.
    """
    tensors, numbers = {}, {}
    for name, (module, optimizer) in trained.items():
        for key, x in state_dict.get_model_state_dict(module, options=OPTIONS).items():
            if name != "policy" or ".lora_" in key:
                tensors[f"{name}.module.{key}"] = x
        if with_optimizers:
            states = state_dict.get_optimizer_state_dict(module, optimizer, options=OPTIONS)
            for key, x in states.items():
                (tensors if isinstance(x, Tensor) else numbers)[f"{name}.optimizer.{key}"] = x
    return tensors, numbers


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
         state: dict | None = None, trained: Trained | None = None,
         dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint of `model` and `trained`, or, without them, a plain Hugging Face folder
    with weights in `dtype`.

    The folder gets its name when it is complete. It replaces an older one, but raises OSError for a
    folder of other files. state: what JSON can hold. Called by all ranks; all of them see the
    folder.
    """
    folder, partial = Path(folder), Path(f"{folder}.partial")

    def write_policy(weights):
        shutil.rmtree(partial, ignore_errors=True)
        with torch.device("meta"):  # the plain class has neither FSDP's nor peft's wrappers
            plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype or torch.float32)
        plain.generation_config = model.generation_config
        # The tokens that end a reply in this run. If the model has no generation_config.json,
        # transformers takes those of config.json, which may be others.
        plain.generation_config.eos_token_id = (
            getattr(tokenizer, "generation_eos_ids", None) or tokenizer.eos_token_id)
        plain.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)

    # The other ranks wait: it clears the folder that they write to below. The memory of the weights
    # is free before the rest is copied.
    of_rank_0(write_policy, full_state_dict(model, dtype))
    if state is not None:
        tensors, numbers = training_state(trained, any(opt.state for _, opt in trained.values()))
        # A rank copies its part of a file's tensors to the CPU before it writes the file.
        files = {name: 1 + place // 32 for place, name in enumerate(tensors)}
        try:
            dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(
                str(partial / "training"), files, save_distributed=True))
        except CheckpointException as e:
            raise next(iter(e.failures.values()))[0] from e  # the error of one of the ranks
        # Rank 0 has written config.json, and renames the folder after all ranks have looked.
        if not all(gather([(partial / "config.json").exists()])):
            raise OSError(f"{partial} must be on a file system that all machines share")

    def publish():
        if state is not None:
            saved = state | {"optimizers": numbers, "sha256": hashes(partial)}
            (partial / "state.json").write_text(json.dumps(saved | {"own": digest(saved)}))
        if (folder / "config.json").exists():
            shutil.rmtree(folder)
        partial.rename(folder)

    of_rank_0(publish)


def resume(folder: Path, trained: Trained) -> dict:
    """Fill `trained` from a checkpoint, in place -> its state. The policy's own weights are loaded
    by `rl.load_policy(folder)`. The number of ranks may have changed. PyTorch raises an exception
    if the checkpoint was saved with other modules or optimizers."""
    state = read_state(folder)
    tensors, _ = training_state(trained, with_optimizers=bool(state["optimizers"]))
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "training")))
    found = tensors | state["optimizers"]
    for name, (module, optimizer) in trained.items():
        of_optimizer, weights = (
            {key.removeprefix(prefix): x for key, x in found.items() if key.startswith(prefix)}
            for prefix in (f"{name}.optimizer.", f"{name}.module."))
        if of_optimizer:
            state_dict.set_optimizer_state_dict(module, optimizer, of_optimizer, options=OPTIONS)
        state_dict.set_model_state_dict(module, weights, options=OPTIONS)
    return state


# ---- the checkpoints of a run ----


def step_in(path: Path) -> int:
    """The step in the name of a checkpoint or of a file of trajectories, as in step_000050 or
    eval_000050; -1 for another name."""
    number = path.name.removeprefix("step_").removeprefix("eval_").removesuffix(".jsonl")
    return int(number) if number.isdecimal() else -1


def named(run: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first. A folder gets its name when it is complete."""
    return sorted(path for path in Path(run).glob("checkpoints/step_*") if step_in(path) >= 0)


def newest(run: str | Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are as they were saved, and what is wrong with newer ones;
    (None, []) if there has never been one. Raises ValueError if all are damaged."""
    notes = []
    for folder in named(run)[::-1]:
        try:
            if damaged := read_state(folder)["sha256"].items() - hashes(folder).items():
                raise ValueError(f"{', '.join(sorted(dict(damaged)))}: damaged or missing")
            return folder, notes
        except (ValueError, OSError) as e:
            notes.append(f"{folder}: {e}")
    if notes:
        raise ValueError(f"no intact checkpoint is left: {'; '.join(notes)}")
    return None, []


def read_state(folder: Path) -> dict:
    """A checkpoint's state. Raises ValueError or OSError unless it is as it was saved."""
    state = json.loads((folder / "state.json").read_text("utf-8"))
    if state.pop("own", "") != digest(state):
        raise ValueError("state.json is damaged, or `git checkout 3fc98f8` reads it")
    return state


def digest(state: dict) -> str:
    """The sha256 of a state."""
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file in a folder, without state.json, by the file's name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "state.json":
            with path.open("rb") as f:
                found[str(path.relative_to(folder))] = hashlib.file_digest(f, "sha256").hexdigest()
    return found


def tidy(run: str | Path, step: int) -> None:
    """Delete what a run that goes on from `step` has left incomplete, and the trajectories of later
    steps. Later checkpoints, which `newest` found damaged, get the name damaged_step_..."""
    for folder in [*Path(run).glob("checkpoints/*.partial"), Path(run) / "final.partial"]:
        shutil.rmtree(folder, ignore_errors=True)
    for file in Path(run).glob("trajectories/????_*.jsonl"):  # step_, eval_
        if step_in(file) >= step:
            file.unlink()
    for folder in named(run):
        if step_in(folder) > step:
            aside = folder.with_name(f"damaged_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)  # renamed by an earlier resume
            folder.rename(aside)


def drop_old(run: str | Path, keep: int) -> None:
    """Delete all checkpoints of a run but the last `keep`. What cannot be deleted now is deleted by
    the next resume."""
    for folder in named(run)[:-keep]:
        shutil.rmtree(folder.rename(f"{folder}.partial"), ignore_errors=True)
