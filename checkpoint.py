"""Checkpoints: complete or absent, intact or refused, for any optimizer and number of processes.

    checkpoints/step_000050/   the policy as a plain Hugging Face folder
        training/              optimizer states, critic, LoRA's adapters (safetensors)
        state.json             the step and the like, and the sha256 of every file; written last
"""

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from parallel import gather, of_rank_0, ranks
from rl import Trained, full_state_dict

# These modules warn that torch.distributed is not initialized. A single process does without it.
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
TRAINED_ALONE = StateDictOptions(ignore_frozen_params=True, strict=False)
FILE_BYTES = 2**28  # of a rank in each file, which it copies to the CPU before it writes it


def module_state(name: str, module: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a module that the policy's own folder does not hold: those of the critic, and
    LoRA's adapters."""
    state = get_model_state_dict(module, options=TRAINED_ALONE)
    return {key: x for key, x in state.items() if name != "policy" or ".lora_" in key}


def training_state(trained: Trained,
                   with_optimizers: bool) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What a run holds beside the policy's weights, as the ranks hold it: tensors, and the numbers
    of its optimizers. with_optimizers: their state too, initialized where no step was taken."""
    tensors, numbers = {}, {}
    for name, (module, optimizer) in trained.items():
        found = {f"{name}.module.{key}": x for key, x in module_state(name, module).items()}
        if with_optimizers:
            state = get_optimizer_state_dict(module, optimizer, options=FLAT)
            found |= {f"{name}.optimizer.{key}": x for key, x in state.items()}
        for key, x in found.items():
            (tensors if isinstance(x, Tensor) else numbers)[key] = x
    return tensors, numbers


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
         state: dict | None = None, trained: Trained | None = None,
         dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint of `model` and `trained`, or, without them, a plain Hugging Face folder
    with weights in `dtype`.

    The folder gets its name when it is complete. It replaces an older one. state: what JSON can
    hold. Called by all ranks; all of them see the folder. Raises ValueError for a folder that holds
    something else than a model.
    """
    folder, is_first = Path(folder), ranks()[0] == 0
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds files, but no model: choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    weights = full_state_dict(model, dtype)
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with torch.device("meta"):  # the plain class has neither FSDP's nor peft's wrappers
            plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype or torch.float32)
        plain.generation_config = model.generation_config
        plain.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
    del weights
    if state is not None:
        has_stepped = any(optimizer.state for _, optimizer in trained.values())
        tensors, numbers = training_state(trained, has_stepped)
        writer = HuggingFaceStorageWriter(str(partial / "training"), file_numbers(tensors),
                                          save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        names = of_rank_0(lambda: sorted(str(path.relative_to(partial))
                                         for path in partial.rglob("*") if path.is_file()))
        found = hashes(partial, names)
        if "" in found:
            raise OSError(f"a process cannot read {partial / names[found.index('')]}: the run "
                          "folder must be on a file system that all machines share")
        state = state | {"optimizers": numbers, "sha256": dict(zip(names, found))}
        if is_first:
            (partial / "state.json").write_text(json.dumps(state | {"own": digest(state)}))
    if is_first:  # state.json goes first: half a folder is no checkpoint
        (folder / "state.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    if dist.is_initialized():
        dist.barrier()


def resume(folder: Path, trained: Trained) -> dict:
    """Fill `trained` from a checkpoint, in place -> its state. The policy's own weights are loaded
    by `rl.load_policy(folder)`. The number of ranks may have changed. Raises ValueError for a
    checkpoint that does not fit."""
    state = read_state(folder)
    try:
        tensors, _ = training_state(trained, with_optimizers=bool(state["optimizers"]))
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / "training")),
                 no_dist=not dist.is_initialized())
        found = tensors | state["optimizers"]
        for name, (module, optimizer) in trained.items():
            own, weights = ({key.removeprefix(prefix): x for key, x in found.items()
                             if key.startswith(prefix)}
                            for prefix in (f"{name}.optimizer.", f"{name}.module."))
            if own:
                set_optimizer_state_dict(module, optimizer, own, options=FLAT)
            if weights:
                set_model_state_dict(module, weights, options=TRAINED_ALONE)
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, SafetensorError,
            CheckpointException) as e:
        raise ValueError(f"the checkpoint {folder} does not fit: {e}") from e
    return state


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Name of each tensor -> the number of the file that holds it: 1, 2 ..."""
    numbers, begun = {}, 0  # bytes of the tensors so far
    for name, tensor in tensors.items():
        numbers[name] = 1 + begun // (FILE_BYTES * ranks()[1])
        begun += tensor.numel() * tensor.element_size()
    return numbers


# ---- the checkpoints of a run ----


def step_in(path: Path) -> int | None:
    """The step in the name of a checkpoint or of a file of trajectories, as in step_000050; None
    for another name."""
    number = path.name.removeprefix("step_").removesuffix(".jsonl")
    return int(number) if number.isdecimal() else None


def named(run: str | Path) -> list[Path]:
    """The folders that were complete checkpoints once, oldest first: a folder gets its name when it
    is complete."""
    folders = Path(run).glob("checkpoints/step_*")
    return sorted(folder for folder in folders if step_in(folder) is not None)


def complete(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [folder for folder in named(run) if (folder / "state.json").exists()]


def newest(run: str | Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are as they were saved, and what is wrong with newer ones;
    (None, []) if there has never been one. Raises ValueError if all are damaged. Called by all
    ranks."""
    notes = []
    for folder in of_rank_0(lambda: named(run)[::-1]):
        try:
            saved = of_rank_0(lambda: read_state(folder))["sha256"]
            for name, found in zip(saved, hashes(folder, list(saved))):
                if found != saved[name]:
                    raise ValueError(f"{folder / name} is damaged" if found else
                                     f"{folder / name} is missing or cannot be read")
            return folder, notes
        except ValueError as e:
            notes.append(str(e))
    if notes:
        raise ValueError(f"no intact checkpoint is left in {run}: {'; '.join(notes)}; "
                         "to start anew, choose another --out")
    return None, []


def read_state(folder: Path) -> dict:
    """A checkpoint's state. Raises ValueError unless it is as it was saved."""
    path = Path(folder) / "state.json"
    if not path.exists():
        raise ValueError(f"{path} is missing")
    try:
        state = json.loads(path.read_text())
        if state.pop("own") == digest(state):
            return state
    except (OSError, ValueError, AttributeError, KeyError, RecursionError):
        pass  # what cannot be read is as damaged as what has another hash
    raise ValueError(f"{path} is damaged, or of a version before the tag before-4050, which reads "
                     "it")


def digest(state: dict) -> str:
    """The sha256 of a state."""
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def hashes(folder: Path, names: list[str]) -> list[str]:
    """The sha256 of each of these files, "" for one that cannot be read. Called by all ranks; each
    reads its share of the files."""
    rank, num_ranks = ranks()
    found = []
    for name in names[rank::num_ranks]:
        try:
            digest_of_file = hashlib.sha256()
            with (folder / name).open("rb") as f:
                while block := f.read(2**20):
                    digest_of_file.update(block)
            found.append(digest_of_file.hexdigest())
        except (OSError, ValueError):
            found.append("")
    return gather(found)


def tidy(run: str | Path, step: int) -> None:
    """Delete what is incomplete in a run that goes on from `step`. Later checkpoints, which
    `newest` found damaged, get the name damaged_step_..."""
    for folder in [*Path(run).glob("checkpoints/*.partial"), Path(run) / "final.partial"]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in named(run):
        if step_in(folder) > step:
            aside = folder.with_name(f"damaged_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)  # renamed by an earlier resume
            folder.rename(aside)
        elif not (folder / "state.json").exists():
            shutil.rmtree(folder)


def drop_old(run: str | Path, keep: int) -> None:
    """Delete all checkpoints of a run but the last `keep`. One that cannot be deleted is named on
    stderr, and no longer counts."""
    for folder in complete(run)[:-keep]:
        (folder / "state.json").unlink()
        try:
            shutil.rmtree(folder)
        except OSError as e:  # a file of it is open on a network file system, for example
            print(f"warning: cannot delete {folder}: {e.strerror}", file=sys.stderr)
