"""The first hour on a GPU: are the computations exact there, as on CPUs, and how fast are they?

    python experiments/gpu.py [--model NAME] [--lora_rank N] [--out FILE.json]

Prints one line for each check: what, measured, expected, verdict. Exit status 1 if a check fails, 2
without a GPU. The model has random weights and the shape of NAME (see `benches memory`).

check    models/check.py: the engine and the packed update have the log-probs of the model's plain
         forward pass, in float32 and in bfloat16.
decode   tokens/s of the engine with 1, 32 and 256 slots of 1,024 tokens, as a share of the limit
         that the memory sets: the bytes of weights, keys and values that a step reads, over the
         bandwidth of a copy. Whether the steps were CUDA graphs.
slots    a rollout of 128 trajectories in BabyAI, six turns each, replies of 20 to 200 tokens: the
         share of its 32 slots that are fed in a step, and of its time that waits for environments.
update   MFU of forward, backward and AdamW step, with gradient checkpointing and without: 6
         operations per parameter and token and those of attention, over the speed of a large
         matrix product. The head counts for half of the tokens, which are sampled ones; recomputed
         operations are not counted. With --lora_rank 4 operations per parameter, because frozen
         weights have no gradients.
memory   the update's peak over the estimate of `benches memory`, with gradient checkpointing.
ranks    a step of train.py with FSDP2 on two GPUs and on one: the same loss and gradient norm.

The expected shares are goals: docs/gpus.md says what an H100 reaches.
--device cpu --model tiny tries the script itself; shares are not judged then.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

import rl  # noqa: E402
from benches.memory import config_of, estimate  # noqa: E402
from engine import SAMPLED_LAST, Ragged  # noqa: E402
from envs import EnvPool, items  # noqa: E402
from models import check  # noqa: E402
from parallel import blocks, shard  # noqa: E402
from rollout import Episode, rollout  # noqa: E402

# Of the tokens/s that the memory's bandwidth allows, at least, with so many slots.
DECODE_SHARES = {1: 0.5, 32: 0.5, 256: 0.6}
# Of the operations/s of a large matrix product, at least: all weights, LoRA's adapters.
UPDATE_SHARE, LORA_SHARE = 0.45, 0.40
BUSY_SHARE = 0.8  # of the slots, at least
MEMORY_SHARE = 1.1  # of the estimated bytes, at most
RANKS_GAP = 1e-3  # of the loss and, relatively, of the gradient's norm, in float32
TRAIN = ("train.py", "--env", "babyai", "--algo", "grpo", "--model", "tiny", "--steps", "1",
         "--items_per_step", "4", "--rollouts_per_item", "4", "--horizon", "2", "--shard", "true",
         "--horizon_schedule", "fixed", "--max_tokens", "8", "--max_length", "512",
         "--dtype", "float32")


class Line(NamedTuple):
    """One check. passed: None if it was skipped, or if its figure means nothing on this device."""

    what: str
    measured: str
    expected: str
    passed: bool | None


class Setting(NamedTuple):
    """What the checks run on: the sizes of a GPU, or those of a try on a CPU."""

    name: str  # of the model whose shape is taken
    device: torch.device
    dtype: torch.dtype
    slots: tuple[int, ...]
    context: int  # tokens that each slot holds
    steps: int
    tokens: int  # of an update, in rows of at most 4,096
    lora_rank: int  # of the adapters that an update trains; 0: it trains all weights

    def judge(self, passed: bool) -> bool | None:
        return passed if self.device.type == "cuda" else None


def seconds_per_call(device, function, times):
    """Mean seconds of a call, after two calls to warm up."""

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    function()
    function()
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    wait()
    return (time.perf_counter() - begin) / times


def bandwidth(device):
    """Bytes per second that a copy reads and writes."""
    n = 2**30 if device.type == "cuda" else 2**24
    a = torch.ones(n, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * n / seconds_per_call(device, lambda: b.copy_(a), 20)


def matrix_flops(device, dtype):
    """Floating-point operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / seconds_per_call(device, lambda: a @ a, 20)


def random_model(config, device, dtype):
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


# ---- the checks ----


def check_exact(setting: Setting) -> Iterator[Line]:
    model = random_model(config_of(setting.name), setting.device, setting.dtype)
    small = check.first_layers(model, setting.device)
    paths = check.try_ways(small, "bfloat16")
    for what, best in (("rollout", "ragged"), ("update", "packed")):
        for suffix, limit in (("", check.LARGEST_GAP), (" bfloat16", check.LARGEST_MEAN_GAP)):
            gap = paths.gaps.get(f"{what} {best}{suffix}", float("inf"))
            yield Line(f"check, {what}{suffix or ' float32'}", f"{best}, gap {gap:.1e}",
                       f"<= {limit:g}", gap <= limit)


@torch.no_grad()
def check_decode(setting: Setting) -> Iterator[Line]:
    config, device = config_of(setting.name), setting.device
    model = random_model(config, device, setting.dtype)
    if device.type == "cuda":
        rl.compile_model(model)
    speed = bandwidth(device)

    # Bytes of weights that a decode step reads. Of an input embedding it looks up single rows.
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        weight_bytes -= model.get_input_embeddings().weight.nbytes
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    # Keys and values of all layers.
    numbers_per_token = len(blocks(model)) * 2 * config.num_key_value_heads * head_size
    bytes_per_token = numbers_per_token * setting.dtype.itemsize

    are_graphs = True
    for n in setting.slots:
        engine = Ragged(model, n)
        engine.clear(setting.context + 2 * setting.steps + 8)
        with engine.attention():
            for slot in range(n):
                prompt = torch.randint(config.vocab_size, (setting.context,)).tolist()
                engine.forward({slot: prompt})

            engine.reads_late = True
            before = [torch.zeros(n)]

            def one_step():  # as in a rollout, the tokens are read while the next step runs
                logits = engine.forward({slot: [SAMPLED_LAST] for slot in range(n)})
                before.append(logits.argmax(-1))
                engine.sampled[engine.fed] = before[1]
                return before.pop(0).tolist()

            seconds = seconds_per_call(device, one_step, setting.steps)
        are_graphs = are_graphs and engine.use_graphs
        cache_bytes = n * (setting.context + setting.steps // 2) * bytes_per_token
        share = (weight_bytes + cache_bytes) / speed / seconds
        yield Line(f"decode, {n} slots", f"{n / seconds:.0f} tokens/s, {share:.2f} of the limit",
                   f">= {DECODE_SHARES.get(n)}", setting.judge(share >= DECODE_SHARES.get(n, 1)))
        engine.clear()
    yield Line("decode steps", "CUDA graphs" if are_graphs else "eager", "CUDA graphs",
               setting.judge(are_graphs))


class Told(Episode):
    """Its replies end after numbers of tokens that are drawn from its item and its sample."""

    def has_to_end(self, reply):
        t = self.trajectory
        rng = random.Random(f"{t.item} {t.sample} {t.turns}")
        return len(reply) >= rng.randint(self.max_tokens // 10, self.max_tokens)


def check_slots(setting: Setting) -> Iterator[Line]:
    model = random_model(config_of(setting.name), setting.device, setting.dtype)
    rl.set_compute_paths(model, rl.FASTEST)
    if setting.device.type == "cuda":
        rl.compile_model(model)
    slots = setting.slots[1]
    with EnvPool() as pool:
        for samples in (1, 4):  # the first rollout compiles
            stats, begin = {}, time.perf_counter()
            rollout(model, rl.load_tokenizer("tiny"), pool, items("babyai", "train")[:slots], 6,
                    samples=samples, slots=slots, max_tokens=3 * setting.steps + 8,
                    episode_class=Told, stats=stats)
    share = stats["busy"] / stats["steps"] / slots
    waiting = stats["seconds_waiting"] / (time.perf_counter() - begin)
    yield Line("slots", f"{share:.2f} busy, {waiting:.2f} of the time waiting", f">= {BUSY_SHARE}",
               setting.judge(share >= BUSY_SHARE))


def check_update(setting: Setting) -> Iterator[Line]:
    for recomputes in [True] if setting.lora_rank else [True, False]:
        yield from update(setting, recomputes)
        gc.collect()


def update(setting, recomputes):
    config, device, lora = config_of(setting.name), setting.device, setting.lora_rank
    estimated = estimate(config, 1, positions=setting.tokens, kl=False, lora=lora)["update"]
    reached = matrix_flops(device, setting.dtype)
    dtype_name = str(setting.dtype).removeprefix("torch.")
    model = random_model(config, device, setting.dtype)
    # Weights of products with every token, and of the head, which half of the tokens need.
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head * (2 - config.tie_word_embeddings)
    rl.set_compute_paths(model, rl.FASTEST)
    if lora:
        rl.add_lora(model.requires_grad_(False).base_model, lora)
    if device.type == "cuda":
        rl.compile_model(model)
    if recomputes:
        rl.recompute_blocks(model)
    if not lora:  # on one GPU train.py shards no model with adapters
        shard(model, device, dtype_name).float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    length = min(4096, setting.tokens)
    ids = torch.randint(config.vocab_size, (setting.tokens // length, length))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, : length // 2] = False  # half of the tokens count as sampled

    def step():
        with rl.compute_in(dtype_name, device):
            logprobs, _ = rl.token_logprobs(model, ids, mask, entropy_gradient=False)
        logprobs.sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_per_call(device, step, 3)
    per_token = (4 if lora else 6) * (body + head / 2)
    per_token += 6 * config.num_hidden_layers * config.hidden_size * length  # attention
    share, goal = per_token * ids.numel() / seconds / reached, LORA_SHARE if lora else UPDATE_SHARE
    yield Line("update" if recomputes else "update, not recomputed",
               f"{ids.numel() / seconds:.0f} tokens/s, MFU {share:.2f}",
               f">= {goal}", setting.judge(share >= goal))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if recomputes:
        yield Line("memory", f"{peak / 1e9:.1f} GB of {estimated / 1e9:.1f} estimated",
                   f"<= {MEMORY_SHARE} of them", setting.judge(peak <= MEMORY_SHARE * estimated))


def check_ranks(setting: Setting) -> Iterator[Line]:
    env = dict(os.environ)
    if setting.device.type == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.device_count() < 2:
        yield Line("two ranks, one", "skipped: this machine has one GPU", "", None)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            out = Path(folder) / str(ranks)
            command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
                       "--rdzv-endpoint=127.0.0.1:0", f"--nproc_per_node={ranks}", *TRAIN]
            done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, env=env,
                                  capture_output=True, text=True, timeout=900)
            if done.returncode:
                raise RuntimeError(f"{ranks} ranks: {done.stderr[-2000:]}")
            rows.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[0]))
    one, two = rows
    gap = abs(one["loss"] - two["loss"])
    norm_gap = abs(one["grad_norm"] / two["grad_norm"] - 1)
    yield Line("two ranks, one", f"loss differs by {gap:.1e}, gradient by {norm_gap:.1e}",
               f"<= {RANKS_GAP:g}", max(gap, norm_gap) <= RANKS_GAP)


CHECKS = (check_exact, check_decode, check_slots, check_update, check_ranks)


def all_lines(setting: Setting) -> Iterator[Line]:
    """Those of all checks, whatever goes wrong in one of them."""
    for run_check in CHECKS:
        try:
            yield from run_check(setting)
        except Exception as e:
            what = run_check.__name__.removeprefix("check_")
            reason = (str(e).strip().splitlines() or [""])[-1]
            yield Line(what, f"{type(e).__name__}: {reason}", "no error", False)
        gc.collect()  # the model's memory is free for the next check
        if torch.distributed.is_initialized():  # by `shard`
            torch.distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Run all checks -> the exit status."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", help="whose shape")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--lora_rank", type=int, default=0, help="the update trains adapters")
    parser.add_argument("--out", help="JSON file for the lines")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: this machine has no GPU that PyTorch can use", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    device = torch.device(args.device)
    name = f"{os.cpu_count()} CPU cores; shares are not judged"
    setting = Setting(args.model, device, torch.float32, (1, 3), 20, 4, 128, args.lora_rank)
    if args.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        setting = Setting(args.model, device, torch.bfloat16, (1, 32, 256), 1024, 64, 16384,
                          args.lora_rank)
    print(f"{name}; PyTorch {torch.__version__}; {args.model}", flush=True)

    lines = []
    for line in all_lines(setting):
        verdict = {True: "ok", False: "FAILED", None: "not judged"}[line.passed]
        print(f"{line.what:24} {line.measured:44} {line.expected:20} {verdict}", flush=True)
        lines.append(line)
    if args.out:
        result = {"device": name, "model": args.model, "lines": [x._asdict() for x in lines]}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return int(any(line.passed is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
