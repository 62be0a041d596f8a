"""`python bench.py memory`: the peak memory of log-probs (forward and backward pass through the head) of 16,384 sampled tokens with
vocabularies from 2k to 152k, weights and their gradients taken off; each in a process of its own (whose malloc gives back what
is freed: else its heap, in pieces, is what grows). `all logits` is the same with
[tokens, vocabulary] at once.

`python bench.py memory --model NAME --gpus N`: what training needs on each GPU, from the config alone (no weights are read):
a folder, a hub id, or one of the names that it lists. An estimate, not a measurement.
"""

import multiprocessing
import os
import resource
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

import rl
from config import REAL
from parallel import blocks

VOCABULARIES, TOKENS = (2_000, 8_000, 32_000, 152_000), 16_384
TARGET = 1.2  # largest over smallest peak
KNOWN = {  # published configs: class, layers, hidden, intermediate, heads, key-value heads, vocabulary, tied, more
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 24, 896, 4864, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 28, 1536, 8960, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (Qwen2Config, 36, 2048, 11008, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, 28, 3584, 18944, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B-Instruct": (Qwen2Config, 48, 5120, 13824, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B-Instruct": (Qwen2Config, 64, 5120, 27648, 40, 8, 152064, False),
    "Qwen/Qwen3-4B": (Qwen3Config, 36, 2560, 9728, 32, 8, 151936, True),
    "Qwen/Qwen3-8B": (Qwen3Config, 36, 4096, 12288, 32, 8, 151936, False),
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, 32, 4096, 14336, 32, 8, 128256, False)}


# ---- measured ----


def peak(vocabulary, whole, answer):
    """In a fresh process: bytes that the log-probs of TOKENS tokens need at their peak, over what stands before and after."""
    torch.set_num_threads(1)
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                         intermediate_size=64, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if whole:
        rl.LOGITS[model.device.type] = 10**12
    ids = torch.randint(0, vocabulary, (64, TOKENS // 64 + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # noqa: E731
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    rl.token_logprobs(model, ids, mask, entropy_gradient=False)[0].sum().backward()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    answer.put(int(lines["VmHWM"].split()[0]) * 1024 - before)


def measured():
    found, spawn = [], multiprocessing.get_context("spawn")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"  # what is freed goes back at once, so that the peak is what is held
    for vocabulary in tqdm(VOCABULARIES, desc="memory", unit="vocabulary"):
        row = {"vocabulary": vocabulary}
        for name, whole in (("ours", False), ("all_logits", True)):
            if whole and 24 * vocabulary * TOKENS > 4e9:
                continue  # more than this machine should be asked for
            answer = spawn.Queue()
            child = spawn.Process(target=peak, args=(vocabulary, whole, answer))
            child.start()
            row[name] = answer.get(timeout=600)
            child.join()
        found.append(row)
        tqdm.write(f"vocabulary {vocabulary:7}" + "".join(f"  {k} {row[k] / 1e6:.0f} MB" for k in ("ours", "all_logits") if k in row))
    ours = [row["ours"] for row in found]
    missed = [f"the peak grows {max(ours) / min(ours):.2f} times, not {TARGET}"] if max(ours) / min(ours) > TARGET else []
    return {"tokens": TOKENS, "rows": found, "largest_over_smallest": max(ours) / min(ours)}, missed


# ---- reckoned ----


def config_of(name):
    if name in KNOWN:
        kind, layers, hidden, inner, heads, shared, vocabulary, tied = KNOWN[name]
        head = {"head_dim": 128} if kind is Qwen3Config else {}
        return kind(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
                    num_key_value_heads=shared, vocab_size=vocabulary, tie_word_embeddings=tied, **head)
    try:
        return AutoConfig.from_pretrained(rl.model_path(name))
    except (OSError, ValueError) as e:
        raise ValueError(f"no config of '{name}': {str(e).splitlines()[0]}; known without one: {', '.join(KNOWN)}") from e


def estimate(config, gpus, slots=REAL["slots"], length=REAL["max_length"], positions=REAL["microbatch_tokens"], kl=True,
             lora=0, offload=False):
    """Bytes on each GPU, bfloat16 arithmetic, gradient checkpointing -> {part: bytes, ..., "rollout", "update": sums}."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if lora:
            rl.add_lora(model, lora)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    block = max(sum(p.numel() for p in b.parameters()) for b in blocks(model))
    rest = count - block * len(blocks(model))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = 0 if offload else 1 / gpus
    parts = {"parameters": count, "trained": trained}
    if lora:  # whole on each GPU: the base in bfloat16, adapters in float32 with gradients and two moments
        parts["weights"], parts["gradients"], parts["optimizer"] = 2 * (count - trained) + 4 * trained, 4 * trained, 8 * trained
        parts["reference"] = parts["gathered_rollout"] = parts["gathered_update"] = 0
    else:
        parts["weights"], parts["gradients"], parts["optimizer"] = (int(n * count * share) for n in (4, 4, 8))
        parts["reference"] = int(2 * count * share) if kl else 0
        parts["gathered_rollout"] = 2 * count
        # the block at work and the next one, the rest, and one block's and the rest's gradients on their way to their owners
        parts["gathered_update"] = 2 * (2 * block + rest) + 6 * block + 6 * rest
    parts["cache"] = slots * length * len(blocks(model)) * 2 * config.num_key_value_heads * head * 2
    parts["activations"] = positions * (2 * config.hidden_size * len(blocks(model))  # what is remembered, a block's input
                                        + 2 * (8 * config.hidden_size + 4 * config.intermediate_size))  # one block's insides
    parts["logits"] = 4 * 4 * rl.LOGITS["cuda"]
    parts["rollout"] = sum(parts[k] for k in ("weights", "optimizer", "reference", "gathered_rollout", "cache"))
    parts["update"] = sum(parts[k] for k in ("weights", "gradients", "optimizer", "reference", "gathered_update", "activations", "logits"))
    return parts


def add_flags(parser):
    parser.add_argument("--model", default="", help="a folder, a hub id or a known name: estimate instead of measuring")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--slots", type=int, default=REAL["slots"], help="of train.py: trajectories at a time on each GPU")
    parser.add_argument("--max_length", type=int, default=REAL["max_length"], help="of train.py")
    parser.add_argument("--microbatch_tokens", type=int, default=REAL["microbatch_tokens"], help="of train.py")
    parser.add_argument("--kl_coef", type=float, default=REAL["kl_coef"], help="of train.py; 0: no reference model")
    parser.add_argument("--lora_rank", type=int, default=0, help="of train.py")
    parser.add_argument("--offload", action="store_true", help="of train.py")


def measure(args):
    if not args.model:
        return measured()
    parts = estimate(config_of(args.model), args.gpus, args.slots, args.max_length, args.microbatch_tokens, args.kl_coef > 0,
                     args.lora_rank, args.offload)
    print(f"{args.model}: {parts['parameters'] / 1e9:.2f}B parameters, {parts['trained'] / 1e9:.3f}B of them trained, on {args.gpus} GPUs, GB each")
    for name, size in parts.items():
        if name not in ("parameters", "trained"):
            print(f"  {name:17} {size / 1e9:7.1f}")
    return parts, []
