"""The processes of a run, a model sharded over them (FSDP2), and the signals that end a run.

Every rank plays and trains on its share. Without sharding each rank holds the whole model, and
gradients are summed after the backward pass; this suits small models and LoRA. With sharding a rank
holds its part of the float32 weights, of their gradients and of the optimizer's state, and
`fully_shard` gathers each transformer block when it is computed.
"""

import atexit
import itertools
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TextIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from envs import UserError

# ---- processes ----

# With GPUs there are messages of CPU tensors, too.
BACKENDS = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def init_distributed() -> tuple[int, int, torch.device]:
    """Join torchrun's process group if there is one -> (rank, number of ranks, device). PyTorch
    raises an error if this machine has GPUs, but fewer than torchrun started processes."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # Ranks wait for the one whose rollout is slowest, which may take long.
        dist.init_process_group(BACKENDS, timeout=timedelta(hours=2))
    return *ranks(), device


def end_process() -> None:
    """End this process with code 0 if it has a process group: the last statement of a script.

    PyTorch's caches of sharded tensors keep Gloo's threads alive after the group. Such a thread
    aborts the process if it frees the tensors of its last message while the interpreter shuts
    down. So the exit handlers run, and the rest of the shutdown is skipped.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def ranks() -> tuple[int, int]:
    """-> (rank, number of ranks)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(part: list) -> list:
    """The lists of all ranks, one after the other, on every rank. They may have any lengths."""
    if not dist.is_initialized():
        return part
    parts = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return list(itertools.chain(*parts))


def of_rank_0(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on rank 0 only -> its result, on every rank. A ValueError is raised on every
    rank. Any other exception is raised on rank 0 alone, and the other ranks wait for it."""
    box = [None]  # the result, or the error
    if ranks()[0] == 0:
        try:
            box = [function(*args)]
        except ValueError as e:
            box = [e]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    if isinstance(box[0], ValueError):
        raise box[0]
    return box[0]


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in place. One dtype and device; any shapes."""
    if not dist.is_initialized():
        return
    flat = torch.cat([t.flatten() for t in tensors])  # one message instead of one for each tensor
    dist.all_reduce(flat)
    for t, total in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(total.view_as(t))


# ---- work that is dealt to ranks ----


def share_out(count: int, rooms: list[int]) -> list[int]:
    """Distribute `count` trajectories over the ranks -> the number for each rank.

    rooms[rank]: how many that rank can take. Each trajectory goes to the rank with the most room
    left.

    >>> share_out(4, [2, 5, 3]), share_out(9, [2, 0, 3])
    ([0, 3, 1], [2, 0, 3])
    """
    left = list(rooms)
    for _ in range(min(count, sum(rooms))):
        left[left.index(max(left))] -= 1
    return [room - rest for room, rest in zip(rooms, left)]


class Dealer:
    """Deals `count` trajectories to the ranks while they play, so that no rank waits long for one
    that got the longer trajectories.

    All ranks call `deal` together, at fixed decode steps and when they have nothing left to play.
    What each gets depends on what all have room for then, and not on the clock.
    """

    numbers = itertools.count()  # of the dealers in this process

    def __init__(self, count: int, signals: "StopSignals"):
        self.count, self.dealt, self.signals = count, 0, signals
        self.number = next(self.numbers)

    def deal(self, room: int) -> range:
        """-> the numbers of the trajectories that this rank gets next. room: how many it can take.
        Raises Terminated if a rank has got a stop signal."""
        # If a signal ended this rank during the exchange, the other ranks would wait for it.
        with self.signals.raised(False):
            rooms = gather([-1 if self.signals.received else room])
            if min(rooms) < 0:
                self.dealt = self.count  # nobody asks again
                raise Terminated
            shares = share_out(self.count - self.dealt, rooms)
            start = self.dealt + sum(shares[: ranks()[0]])
            self.dealt += sum(shares)
        return range(start, start + shares[ranks()[0]])

    def leave(self) -> None:
        """Let the other ranks know that this one has got a stop signal."""
        if self.dealt < self.count:
            gather([-1])


class FirstComeDealer(Dealer):
    """Deals trajectories to a rank when it asks, so that no rank waits for another. Which rank
    plays which trajectory depends on timing. All ranks make their dealers in the same order."""

    def deal(self, room: int) -> range:
        """-> the numbers of the trajectories that this rank gets next. room: how many it can take.
        The first time it gets at most an equal share of all."""
        if not self.dealt:
            room = min(room, -(-self.count // ranks()[1]))
        with self.signals.raised(False):
            # By all ranks so far. The process group's store has a counter for each rollout.
            asked_for = _get_default_store().add(f"dealer {self.number}", room)
        self.dealt = min(self.count, asked_for)
        return range(min(self.count, asked_for - room), self.dealt)

    def leave(self) -> None:
        """Nobody waits for this rank."""


# ---- a sharded model ----


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks: the units that are sharded, and recomputed in a backward
    pass."""
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    return [m for m in model.modules() if type(m).__name__ in names]


def shard(model: nn.Module, device: torch.device, dtype: str = "float32", offload: bool = False,
          weights_dtype: torch.dtype = torch.float32) -> nn.Module:
    """Shard the model over all ranks with FSDP2, in place -> the model.

    Each block is one group of parameters, all others are another. Blocks are gathered and
    computed in `dtype`; weights, sums of gradients and the optimizer's state are `weights_dtype`,
    and buffers stay as they are: the frequencies of rotary embeddings are float32 in every model.
    offload: the shards stay in the CPU's memory and are updated there.

    A whole model is read in the dtype of its files and sharded before its weights are cast: until
    then they are views of the files, mapped into memory. On the CPU a rank copies its own rows
    alone; on a GPU it copies a block at a time. A cast before would copy the whole model on the
    host, once for each rank.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS, store=dist.HashStore(), rank=0, world_size=1)
    compute_dtype = getattr(torch, dtype) if dtype != "float32" else None
    options = dict(mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
                   mp_policy=MixedPrecisionPolicy(compute_dtype, torch.float32),
                   offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for module in [*blocks(model), model]:
        fully_shard(module, **options)
    model._apply(lambda t: t.to(weights_dtype) if isinstance(t, nn.Parameter) else t)
    # A registered forward method runs FSDP's hooks, which gather the parameters. `through` uses it.
    model.call = lambda function: function()
    register_fsdp_forward_method(model, "call")
    return model


def sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds the model's parameters."""
    return isinstance(model, FSDPModule)


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model computes. Offloaded parameters are elsewhere."""
    p = next(model.parameters())
    return torch.device(p.device_mesh.device_type) if hasattr(p, "device_mesh") else p.device


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor of any shape and dtype to the device, without waiting for what a GPU is
    computing. A large copy from memory that is not pinned would wait."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def through(model: nn.Module, function: Callable[..., Any], *args: object) -> Any:
    """Return function(*args). If the model is sharded, FSDP first gathers the parameters outside
    its blocks (embeddings, final norm, head), as it would for model.forward. For functions that
    call the body and the head separately."""
    # FSDP would move arguments of `call` to the GPU, and wait for it.
    return model.call(partial(function, *args)) if sharded(model) else function(*args)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within this context an FSDP model holds all its parameters unsharded, in its compute dtype.
    A forward pass then needs no other rank, so ranks may run different numbers of them. The device
    must have room for a whole copy of the weights. The end of an inner context shards the model for
    the outer one, too.

    FSDP's forward hooks are removed for this time: there is nothing to gather, and they make other
    streams wait for the current one, which a CUDA graph must not record.
    """
    parts = [m for m in model.modules() if sharded(m)]
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in parts]
    for m in parts:
        m.unshard()
        m._forward_pre_hooks, m._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for m, (pre_hooks, post_hooks) in zip(parts, hooks):
            m._forward_pre_hooks, m._forward_hooks = pre_hooks, post_hooks
            m.reshard()


# ---- signals ----


class Terminated(BaseException):
    """A stop signal came during a rollout. The weights are those that the training step began
    with."""


class Output:
    """Standard output or error of a run. If it cannot be written any more (the `tee` of a pipe was
    ended, for example), what is written is dropped, and the process gets SIGHUP, as from a closed
    terminal. Under nohup, which ignores SIGHUP, the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.stream, name)
        return partial(self._try, found) if name in ("write", "flush") else found

    def _try(self, method, *args):
        try:
            return method(*args)
        except OSError:
            # What is still buffered, and all that follows, is dropped.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            signal.raise_signal(signal.SIGHUP)


class StopSignals:
    """Inside `with`, note the first of SIGTERM, SIGINT (Ctrl-C) and SIGHUP that comes, and replace
    standard output and error by an `Output`. Inside `raised`, which surrounds rollouts, a signal
    raises Terminated at once; elsewhere, an update is finished first."""

    def __init__(self) -> None:
        self.received = ""  # the signal's name
        self.is_raised = False

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self._handle)
                         for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
                         if signal.getsignal(number) != signal.SIG_IGN}  # nohup ignores SIGHUP
        # A stream that was closed at the start is None.
        self.previous_streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (s and Output(s) for s in self.previous_streams)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # if Python's own flush at the end fails, the exit code is 120
        sys.stdout, sys.stderr = self.previous_streams
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number, _):
        if not self.received:
            self.received = signal.Signals(number).name
            self._check()

    def _check(self):
        if self.is_raised and self.received:
            raise Terminated

    @contextmanager
    def raised(self, is_raised: bool = True) -> Iterator[None]:
        """Inside, a signal raises Terminated, also one that came before. is_raised=False: a signal
        is only noted until the end of the block."""
        before, self.is_raised = self.is_raised, is_raised
        try:
            self._check()
            yield
        finally:
            self.is_raised = before
        self._check()


# ---- the end of a command ----

# Parts of the error messages of PyTorch, CUDA and Python when memory or threads run out.
LACKS = ("out of memory", "can't allocate memory", "not enough memory", "can't start new thread",
         "ALLOC_FAILED")


def is_lack_of_resources(error: BaseException) -> bool:
    """Whether an exception says that memory or threads have run out.

    >>> is_lack_of_resources(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    True
    >>> is_lack_of_resources(MemoryError()), is_lack_of_resources(RuntimeError("shapes differ"))
    (True, False)
    """
    return isinstance(error, MemoryError) or any(words in str(error) for words in LACKS)


@contextmanager
def user_errors() -> Iterator[None]:
    """A ValueError of this block, which reads the user's inputs, is a UserError."""
    try:
        yield
    except ValueError as e:
        raise UserError(str(e)) from e


def run_command(script: str, parse: Callable[[], Any], command: Callable[[Any], object]) -> None:
    """Call command(parse()). A mistake of the user ends the process with one line on stderr and
    exit code 2: a ValueError of `parse`, a UserError of `command`, too little memory, or an
    OSError, such as that of a full disk. Any other exception is a bug."""
    try:
        with user_errors():
            settings = parse()
        command(settings)
    except (UserError, OSError, MemoryError, SafetensorError) as e:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(5)  # if rank 0 has the same error, torchrun ends this process before
            script += f": rank {rank}"
        with suppress(OSError):  # stderr is full
            print(f"{script}: " + (" ".join(str(e).split()) or type(e).__name__), file=sys.stderr)
        sys.exit(2)
    end_process()
