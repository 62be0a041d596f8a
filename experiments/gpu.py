"""What one GPU reaches, with random weights of a real model's shape: python experiments/gpu.py decode|update [--model NAME] [--out F.json]

decode: tokens/s of the rollout engine with 1, 32 and 256 slots, each holding --context tokens, against the memory's limit: the bytes
        of weights and of keys and values read each step, over the bandwidth measured here by copying; and against Hugging Face's
        `generate` (the cache kept, all in step).
update: tokens/s, MFU (6 operations a parameter and token, and attention's, over what a large matrix product reaches here and over
        --peak TFLOP/s of the data sheet) and peak memory of forward, backward and AdamW step, with gradient checkpointing, in rows of
        8k and 32k tokens, against `bench.py memory`'s estimate. --lora_rank R for LoRA. --device cpu --model tiny tries the script.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from transformers.utils import logging  # noqa: E402

import rl  # noqa: E402
from benches.memory import config_of, estimate  # noqa: E402
from engine import Ragged  # noqa: E402
from parallel import blocks, shard  # noqa: E402


def clock(device, function, times):
    """Seconds a call, after one to warm up."""
    function()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    wait()
    return (time.perf_counter() - begin) / times


def bandwidth(device):
    """Bytes a second, reading and writing."""
    n = 2**30 if device.type == "cuda" else 2**27
    a = torch.ones(n, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * n / clock(device, lambda: b.copy_(a), 20)


def matrix_flops(device, dtype):
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / clock(device, lambda: a @ a, 20)


def make(config, device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def decode(config, device, dtype, context, slots, steps):
    model, speed = make(config, device, dtype), bandwidth(device)
    read = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        read -= model.get_input_embeddings().weight.nbytes  # looked up, not read
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = []
    for n in slots:
        engine = Ragged(model, n)
        engine.clear(context + 2 * steps + 8)
        with engine.attention():
            for slot in range(n):
                engine.forward({slot: torch.randint(0, config.vocab_size, (context,)).tolist()})
            once = lambda: engine.forward({slot: [7] for slot in range(n)}).argmax(-1).tolist()  # noqa: E731
            seconds = clock(device, once, steps)
        ids = torch.randint(0, config.vocab_size, (n, context), device=device)
        theirs = clock(device, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                                      eos_token_id=-1, max_new_tokens=steps, min_new_tokens=steps), 1)
        prefill = clock(device, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                                       eos_token_id=-1, max_new_tokens=1, min_new_tokens=1), 1)
        cache = n * (context + steps // 2) * len(blocks(model)) * 2 * config.num_key_value_heads * head * 2
        rows.append({"slots": n, "tokens_per_second": n / seconds, "limit_share": (read + cache) / speed / seconds,
                     "ratio_generate": (theirs - prefill) / (steps - 1) / seconds})
        print("  ".join(f"{k} {v:.3g}" for k, v in rows[-1].items()), flush=True)
        engine.clear()
    return {"bandwidth": speed, "rows": rows}


def update(config, device, dtype, lengths, lora, peak):
    model = make(config, device, dtype)
    if lora:
        rl.add_lora(model, lora)
    rl.recompute_blocks(model)
    if not lora:
        shard(model, device, str(dtype).removeprefix("torch.")).float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, count = torch.optim.AdamW(trained, lr=1e-6, fused=True), sum(p.numel() for p in model.parameters())
    reached, rows = matrix_flops(device, dtype), []
    for length in lengths:
        ids = torch.randint(0, config.vocab_size, (max(1, 8192 // length) if length < 8192 else 1, length), device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, : length // 2] = False  # half of it was sampled
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step():
            with rl.compute_in(str(dtype).removeprefix("torch."), device):
                logprobs, _ = rl.token_logprobs(model, ids, mask, entropy_gradient=False)
            logprobs.sum().backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = clock(device, step, 3)
        backward = 1 if lora else 2  # LoRA needs no gradient of the weights, but for what it adapts
        work = (2 + 2 * backward) * count * ids.numel() + 6 * config.num_hidden_layers * config.hidden_size * ids.numel() * length
        guess = estimate(config, 1, positions=ids.numel(), kl=False, lora=lora)
        rows.append({"tokens": ids.numel(), "tokens_per_second": ids.numel() / seconds, "share_of_matmul": work / seconds / reached,
                     "mfu": work / seconds / (peak * 1e12), "estimate_gb": guess["update"] / 1e9,
                     "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")})
        print("  ".join(f"{k} {v:.3g}" for k, v in rows[-1].items()), flush=True)
    return {"matmul_flops": reached, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "update"])
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct", help="whose shape: see bench.py memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--peak", type=float, default=989, help="dense bfloat16 TFLOP/s of the data sheet (H100 and H200: 989)")
    parser.add_argument("--out")
    args = parser.parse_args()
    logging.set_verbosity_error()
    device, config = torch.device(args.device), config_of(args.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config.max_position_embeddings = 2**16
    if args.what == "decode":
        found = decode(config, device, dtype, args.context, args.slots, args.steps)
    else:
        found = update(config, device, dtype, args.lengths, args.lora_rank, args.peak)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    if args.out:
        Path(args.out).write_text(json.dumps({"device": name, "model": args.model, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
