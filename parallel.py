"""The processes of a run, from one to many nodes, and a model sharded over them (FSDP2).

Every rank plays and trains on its share; what they say to each other is here. Without sharding each rank holds the whole
model and gradients are summed after the backward pass (right for small models and for LoRA). Sharded, a rank holds its part
of the float32 weights, of their gradients and of the optimizer's state; `fully_shard` gathers a block when it computes.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method


def init_distributed() -> tuple[int, int, torch.device]:
    """Join torchrun's process group if there is one -> (rank, world size, device)."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():  # both kinds of tensors; the slowest rollout is waited for
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=2))
    return rank, world, device


def ranks() -> tuple[int, int]:
    """-> (rank, world size)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(part: list) -> list:
    """Every rank's list, interleaved (0 of rank 0, 0 of rank 1, 1 of rank 0, ...): undoes `whole[rank::world]`."""
    _, world = ranks()
    if world == 1:
        return part
    parts = [None] * world
    dist.all_gather_object(parts, part)
    return [parts[i % world][i // world] for i in range(sum(map(len, parts)))]


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Each tensor becomes its sum over all processes, in place. One dtype and device; any shapes."""
    if dist.is_initialized():
        flat = torch.cat([t.flatten() for t in tensors])  # one message instead of one a tensor
        dist.all_reduce(flat)
        for t, new in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(new.view_as(t))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks: what is sharded, and computed again in a backward pass, as one."""
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    return [m for m in model.modules() if type(m).__name__ in names]


def shard(model: nn.Module, device: torch.device, dtype: str = "float32", offload: bool = False) -> nn.Module:
    """FSDP2 over all ranks, a group of parameters a block and one of all others. Weights, gradients' sums and the optimizer stay
    in the weights' own precision; blocks are gathered and computed in `dtype`. offload: kept in the CPU's memory, and updated
    there. Returns the model, changed in place."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)
    how = dict(mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
               mp_policy=MixedPrecisionPolicy(getattr(torch, dtype) if dtype != "float32" else None, torch.float32),
               offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for block in blocks(model):
        fully_shard(block, **how)
    fully_shard(model, **how)
    model.call = lambda function, *args: function(*args)  # to be called through the model's hooks: see `through`
    register_fsdp_forward_method(model, "call")
    return model


def sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds its parameters."""
    return isinstance(model, FSDPModule)


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes; offloaded parameters are elsewhere."""
    p = next(model.parameters())
    return torch.device(p.device_mesh.device_type) if hasattr(p, "device_mesh") else p.device


def through(model: nn.Module, function: Callable[..., Any], *args: object) -> Any:
    """function(*args), which uses the model's parts by themselves (its body, its head), with their parameters gathered."""
    return model.call(function, *args) if sharded(model) else function(*args)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, a sharded model's parameters are whole in `dtype`, and forward passes need no other rank: a rollout's ranks take
    as many as they like. A copy of the weights has to fit into the device's memory."""
    parts = [m for m in model.modules() if sharded(m)]
    if not parts or getattr(model, "whole", False):  # it is already
        yield
        return
    for m in parts:
        m.set_reshard_after_forward(False, recurse=False)
        m.unshard()
    model.whole = True
    try:
        yield
    finally:
        model.whole = False
        for m in parts:
            m.reshard()
            m.set_reshard_after_forward(m is not model, recurse=False)  # its backward pass needs the root's at once


# ---- signals ----


class Terminated(BaseException):
    """SIGTERM came while a rollout was under way: the weights are those of the step's beginning."""


class Sigterm:
    """Says whether SIGTERM has come; inside `with` it raises Terminated there and then. An update is finished first."""

    def __init__(self) -> None:
        self.came = self.inside = False
        self.main = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGTERM, self._take) if self.main else None

    def end(self) -> None:
        """SIGTERM does again what it did before."""
        if self.main:
            signal.signal(signal.SIGTERM, self.before)

    def _take(self, *_):
        first, self.came = not self.came, True
        if first and self.inside:
            raise Terminated

    def __enter__(self):
        self.inside = True
        if self.came:
            raise Terminated

    def __exit__(self, *_):
        self.inside = False
