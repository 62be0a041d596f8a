"""What one GPU reaches, with random weights of a real model's shape.

    python experiments/gpu.py decode|update [--model NAME] [--out FILE.json]

decode: tokens/s of the rollout engine with 1, 32 and 256 slots, each holding --context tokens.
    Compared with the limit that memory sets (the bytes of weights, keys and values that a step
    reads, over the bandwidth measured here by copying), and with Hugging Face's `generate` (which
    keeps the cache and decodes all sequences in step).
update: tokens/s, MFU and peak memory of forward, backward and AdamW step with gradient
    checkpointing, in rows of 8k and 32k tokens. MFU counts 6 operations per parameter and token and
    those of attention, over what a large matrix product reaches here and over the data sheet's
    --peak TFLOP/s. The memory is compared with the estimate of `bench.py memory`. --lora_rank R for
    LoRA.

--device cpu --model tiny tries the script.
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


def seconds_per_call(device, function, times):
    """Mean seconds of a call, after one call to warm up."""

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    function()
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    wait()
    return (time.perf_counter() - begin) / times


def bandwidth(device):
    """Bytes per second that a copy reads and writes."""
    n = 2**30 if device.type == "cuda" else 2**27
    a = torch.ones(n, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * n / seconds_per_call(device, lambda: b.copy_(a), 20)


def matrix_flops(device, dtype):
    """Floating-point operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / seconds_per_call(device, lambda: a @ a, 20)


def random_model(config, device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)


def say(row):
    print("  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)


@torch.no_grad()
def decode(config, device, dtype, context, slots, steps):
    """Measure a decode step with each number of slots.

    -> {"bandwidth": bytes/s, "rows": [{"slots", "tokens_per_second", "limit_share",
    "ratio_generate"}, ...]}
    """
    model = random_model(config, device, dtype)
    speed = bandwidth(device)

    # Bytes of weights that a decode step reads. Of an input embedding it looks up single rows.
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        weight_bytes -= model.get_input_embeddings().weight.nbytes
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    # Keys and values of all layers, two bytes a number.
    bytes_per_token = len(blocks(model)) * 2 * config.num_key_value_heads * head_size * 2

    rows = []
    for n in slots:
        engine = Ragged(model, n)
        engine.clear(context + 2 * steps + 8)
        with engine.attention():
            for slot in range(n):
                prompt = torch.randint(0, config.vocab_size, (context,)).tolist()
                engine.forward({slot: prompt})

            def one_step():
                return engine.forward({slot: [7] for slot in range(n)}).argmax(-1).tolist()

            seconds = seconds_per_call(device, one_step, steps)

        ids = torch.randint(0, config.vocab_size, (n, context), device=device)
        whole = seconds_of_generate(model, ids, steps)
        prefill = seconds_of_generate(model, ids, 1)
        generate = (whole - prefill) / (steps - 1)
        cache_bytes = n * (context + steps // 2) * bytes_per_token
        rows.append({
            "slots": n,
            "tokens_per_second": n / seconds,
            "limit_share": (weight_bytes + cache_bytes) / speed / seconds,
            "ratio_generate": generate / seconds,
        })
        say(rows[-1])
        engine.clear()
    return {"bandwidth": speed, "rows": rows}


def seconds_of_generate(model, ids, new_tokens):
    """Seconds in which Hugging Face's `generate` samples `new_tokens` for each row of ids."""

    def generate():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )

    return seconds_per_call(ids.device, generate, 1)


def update(config, device, dtype, lengths, lora_rank, peak):
    """Measure a training step with rows of each length.

    -> {"matmul_flops": operations/s, "rows": [{"tokens", "tokens_per_second", "share_of_matmul",
    "mfu", "estimate_gb", "peak_gb"}, ...]}
    """
    dtype_name = str(dtype).removeprefix("torch.")
    model = random_model(config, device, dtype)
    if lora_rank:
        rl.add_lora(model, lora_rank)
    rl.recompute_blocks(model)
    if not lora_rank:
        shard(model, device, dtype_name).float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    parameters = sum(p.numel() for p in model.parameters())
    reached = matrix_flops(device, dtype)

    rows = []
    for length in lengths:
        ids = torch.randint(0, config.vocab_size, (max(1, 8192 // length), length), device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, : length // 2] = False  # half of the tokens count as sampled
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step():
            with rl.compute_in(dtype_name, device):
                logprobs, _ = rl.token_logprobs(model, ids, mask, entropy_gradient=False)
            logprobs.sum().backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = seconds_per_call(device, step, 3)
        tokens = ids.numel()
        # The backward pass needs the gradients of the activations, and those of the weights, which
        # LoRA's frozen weights do not need: twice or once the operations of the forward pass.
        backward = 1 if lora_rank else 2
        weight_operations = (2 + 2 * backward) * parameters * tokens
        attention_operations = 6 * config.num_hidden_layers * config.hidden_size * tokens * length
        flops = (weight_operations + attention_operations) / seconds
        guess = estimate(config, 1, positions=tokens, kl=False, lora=lora_rank)
        peak_bytes = float("nan")
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
        rows.append({
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "share_of_matmul": flops / reached,
            "mfu": flops / (peak * 1e12),
            "estimate_gb": guess["update"] / 1e9,
            "peak_gb": peak_bytes / 1e9,
        })
        say(rows[-1])
    return {"matmul_flops": reached, "rows": rows}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=["decode", "update"])
    add("--model", default="Qwen/Qwen2.5-7B-Instruct", help="whose shape: see bench.py memory")
    add("--device", default="cuda")
    add("--context", type=int, default=1024)
    add("--slots", type=int, nargs="+", default=[1, 32, 256])
    add("--lengths", type=int, nargs="+", default=[8192, 32768])
    add("--steps", type=int, default=64)
    add("--lora_rank", type=int, default=0)
    peak_help = "dense bfloat16 TFLOP/s of the data sheet (H100 and H200: 989)"
    add("--peak", type=float, default=989, help=peak_help)
    add("--out")
    return parser.parse_args()


def main():
    args = parse()
    logging.set_verbosity_error()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = config_of(args.model)
    config.max_position_embeddings = 2**16
    if args.what == "decode":
        found = decode(config, device, dtype, args.context, args.slots, args.steps)
    else:
        found = update(config, device, dtype, args.lengths, args.lora_rank, args.peak)
    if args.out:
        name = f"{os.cpu_count()} CPU cores"
        if device.type == "cuda":
            name = torch.cuda.get_device_name()
        result = {"device": name, "model": args.model, **found}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
