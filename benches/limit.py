"""`python -m benches limit`: rollouts and updates against a bare loop of their matrix products.

The bare loop repeats all matrix products and attention calls of a rollout or an update, in their
order and on tensors of the same shapes and strides, with nothing in between. It reads the same
weights and the same cache. Its time is what the arithmetic alone costs with PyTorch's kernels.

    rollout   16 or 64 slots, replies of 3 to 20 tokens, as in `benches rollout`
    update    one optimizer step on trajectories of that rollout, without its optimizer

Models: the built-in one, and with --full random weights in the shape of SmolLM2-135M. `share` is
the processor time of the bare loop divided by ours, the median of three alternating pairs. `memory`
is the share of the bare loop's time that reading its weights and its cache from memory takes, at
the speed at which this machine reads a large tensor (`gb_a_second`). Near 1 the memory is the
limit.
"""

import statistics
import time

import torch
from tqdm import tqdm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM

import rl
from benches.rollout import load_models, play_ours
from benches.update import step_ours, with_advantages
from engine import Ragged
from models.check import find_paths
from update import Loss

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward}
REPEATS = 3


class Recorder(TorchDispatchMode):
    """Records the calls of matrix products and attention.

    kept: tensors that live on, such as weights and the cache. Repeated calls read them again. All
    other tensors are replaced by shared memory of the same shape and strides.
    """

    def __init__(self, kept):
        super().__init__()
        self.kept = {x.untyped_storage().data_ptr() for x in kept}
        self.calls = []
        self.bytes_read = 0  # by the recorded calls, of the tensors that are kept
        self.memory = {}  # (dtype, number of the argument) -> flat tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket in PRODUCTS:
            self.calls.append((function, tree_map(self.describe, args),
                               tree_map(self.describe, kwargs)))
        return function(*args, **kwargs)

    def describe(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.untyped_storage().data_ptr() in self.kept:
            self.bytes_read += x.numel() * x.element_size()
            return x.detach()
        return Shape(x)

    def loop(self):
        """-> a function that repeats the calls."""
        prepared = []
        for function, args, kwargs in self.calls:
            args = [self.tensor_for(x, place) for place, x in enumerate(args)]
            kwargs = {name: self.tensor_for(x, name) for name, x in kwargs.items()}
            prepared.append((function, args, kwargs))

        @torch.no_grad()
        def repeat():
            for function, args, kwargs in prepared:
                function(*args, **kwargs)
        return repeat

    def tensor_for(self, x, place):
        if not isinstance(x, Shape):
            return x
        flat = self.memory.get((x.dtype, place))
        if flat is None or len(flat) < x.extent:
            flat = torch.zeros(x.extent, dtype=x.dtype)
            if x.dtype.is_floating_point:
                flat.normal_(std=0.02)
            self.memory[x.dtype, place] = flat
        return flat.as_strided(x.size, x.strides)


class Shape:
    """Shape, strides and type of a tensor, without its values."""

    def __init__(self, x):
        self.size, self.strides, self.dtype = x.shape, x.stride(), x.dtype
        self.extent = 1 + sum((n - 1) * stride for n, stride in zip(self.size, self.strides))


def big_model(words=49152, layers=30):
    """Random weights in the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=words, hidden_size=576, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=1536, tie_word_embeddings=True,
        max_position_embeddings=8192))


def cpu_seconds(function):
    """Processor time, which other jobs on the machine change less than the time of the clock."""
    start = time.process_time()
    function()
    return time.process_time() - start


def memory_bandwidth():
    """-> bytes a second at which all threads read a tensor of 1 GB, the best of five."""
    x = torch.ones(2**28)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - start)
    return x.numel() * x.element_size() / min(seconds)


def compare(ours, recorder):
    """Time the function `ours` and the bare loop alternately -> figures."""
    with recorder:
        ours()
    repeat = recorder.loop()
    repeat()
    seconds, limit = [], []
    for _ in range(REPEATS):
        seconds.append(cpu_seconds(ours))
        limit.append(cpu_seconds(repeat))
    bandwidth = memory_bandwidth()
    loop_seconds = statistics.median(limit) / torch.get_num_threads()  # by the clock
    return {"seconds": statistics.median(seconds), "limit": statistics.median(limit),
            "share": statistics.median(b / a for a, b in zip(seconds, limit)),
            "products": len(recorder.calls), "gb_a_second": bandwidth / 1e9,
            "memory": recorder.bytes_read / bandwidth / loop_seconds}


def rollout_figures(model, tokenizer, dtype, slots, trajectories, turns):
    """-> (figures, the trajectories)"""
    engine = Ragged(model, slots)

    def play():
        with rl.compute_in(dtype, engine.device):
            return play_ours(model, tokenizer, "short", trajectories, slots, turns, engine)

    _, played, _ = play()  # the engine allocates its cache
    cache = [x for pair in engine.kv_cache.values() for x in pair]
    return compare(play, Recorder([*model.parameters(), *cache])), played


def update_figures(model, trajectories, settings):
    """Forward and backward passes of one optimizer step -> figures."""
    batch = with_advantages(trajectories)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        step_ours(model, optimizer, batch, settings)

    step()
    return compare(step, Recorder(model.parameters()))


def add_flags(parser):
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")


def measure(args):
    """-> (figures for --out, one line for each target that was missed)"""
    models, tokenizer = load_models()
    jobs = [("tiny", models["tiny"], 64, 192, 8, 8192)]
    if args.full:
        jobs.append(("135M", big_model(), 16, 16, 3, 2048))
    figures = {}
    for name, model, slots, trajectories, turns, positions in tqdm(jobs, desc="limit"):
        find_paths(model)
        model.eval()
        settings = Loss(kl_coef=0.0, dtype=args.dtype, microbatch_tokens=positions)
        row, played = rollout_figures(model, tokenizer, args.dtype, slots, trajectories, turns)
        figures[name] = {"rollout": row,
                         "update": update_figures(model, played, settings)}
        for what, row in figures[name].items():
            tqdm.write(f"{name:5} {what:8}" + "".join(f"  {k} {v:.3g}" for k, v in row.items()))
    return figures, []
