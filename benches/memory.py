"""`python -m benches memory`: peak memory of log-probs with vocabularies from 2k to 152k tokens.

It measures the forward and backward pass through the head, for 16,384 sampled tokens, without the
weights and their gradients. `all_logits` is the same with all [tokens, vocabulary] logits at once.
Each measurement runs in a process of its own, whose malloc returns freed memory to the system at
once. Otherwise a fragmented heap would grow, and not the memory in use.

`python -m benches memory --model NAME --gpus N`: what training needs on each GPU, from the config
alone (no weights are read). NAME is a folder, a hub id, or one of the names that it lists. An
estimate, not a measurement.
"""

import multiprocessing
import os
import resource
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config)

import rl
from config import Config
from parallel import blocks

VOCABULARIES, TOKENS = (2_000, 8_000, 32_000, 152_000), 16_384
TARGET = 1.2  # largest over smallest peak
LARGEST_MEASUREMENT = 4e9  # bytes
BYTES_PER_LOGIT = 24  # about, with all logits at once: their copies and gradients included

# Published configs: class, layers, hidden size, intermediate size, heads, key-value heads,
# vocabulary, whether the input and output embeddings are tied.
KNOWN = {
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


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident_bytes():
    """The peak since 5 was last written to /proc/self/clear_refs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    kibibytes = int(fields["VmHWM"].split()[0])
    return kibibytes * 1024


def put_peak(vocabulary, all_logits, answer):
    """Put into the queue `answer` the bytes that the log-probs of TOKENS tokens add at their peak.

    Runs in a fresh process.
    """
    torch.set_num_threads(1)
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
                         tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config)
    rl.set_compute_paths(model, rl.FASTEST)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if all_logits:
        rl.MAX_LOGITS[model.device.type] = 10**12
    shape = (64, TOKENS // 64 + 1)
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False

    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    logprobs, _ = rl.token_logprobs(model, ids, mask, entropy_gradient=False)
    logprobs.sum().backward()
    answer.put(peak_resident_bytes() - before)


def measure_peak(vocabulary, all_logits):
    """Run `put_peak` in a new process -> bytes."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    child = spawn.Process(target=put_peak, args=(vocabulary, all_logits, answer))
    child.start()
    peak = answer.get(timeout=600)
    child.join()
    return peak


def measure_log_probs():
    """-> (figures, one line for each target that was missed)"""
    # The children's malloc returns blocks of 1 MiB or more to the system as soon as they are freed.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    rows = []
    for vocabulary in tqdm(VOCABULARIES, desc="memory", unit="vocabulary"):
        row = {"vocabulary": vocabulary, "ours": measure_peak(vocabulary, all_logits=False)}
        if BYTES_PER_LOGIT * vocabulary * TOKENS <= LARGEST_MEASUREMENT:
            row["all_logits"] = measure_peak(vocabulary, all_logits=True)
        rows.append(row)
        peaks = {key: value for key, value in row.items() if key != "vocabulary"}
        columns = "".join(f"  {key} {peak / 1e6:.0f} MB" for key, peak in peaks.items())
        tqdm.write(f"vocabulary {vocabulary:7}{columns}")
    ours = [row["ours"] for row in rows]
    growth = max(ours) / min(ours)
    missed = [f"the peak grows {growth:.2f} times, not {TARGET}"] if growth > TARGET else []
    return {"tokens": TOKENS, "rows": rows, "largest_over_smallest": growth}, missed


# ---- estimated ----


def config_of(name):
    """The config of a model in KNOWN, a folder or a hub id. Raises ValueError if there is none."""
    if name in KNOWN:
        config_class, layers, hidden, intermediate, heads, kv_heads, vocabulary, tied = KNOWN[name]
        more = {"head_dim": 128} if config_class is Qwen3Config else {}
        return config_class(num_hidden_layers=layers, hidden_size=hidden,
                            intermediate_size=intermediate, num_attention_heads=heads,
                            num_key_value_heads=kv_heads, vocab_size=vocabulary,
                            tie_word_embeddings=tied, **more)
    try:
        return AutoConfig.from_pretrained(**rl.location(rl.model_path(name)))
    except (OSError, ValueError) as e:
        raise ValueError(f"no config of '{name}': {str(e).splitlines()[0]}; known without one: "
                         f"{', '.join(KNOWN)}") from e


def count_parameters(parameters):
    return sum(p.numel() for p in parameters)


def estimate(config, gpus, slots=Config.slots, length=Config.max_length,
             positions=Config.microbatch_tokens, kl=True, lora=0, offload=False, ppo=False):
    """Bytes on each GPU, with bfloat16 arithmetic and gradient checkpointing.

    slots: trajectories at a time on each GPU; length: tokens of a trajectory; positions: of a
    micro-batch; kl: with a reference model; lora: its rank, 0 without; ppo: with a critic.
    -> {part: bytes}, with the sums "rollout" and "update" and, as numbers of parameters,
    "parameters" and "trained".
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if lora:
            rl.add_lora(model, lora)
    count = count_parameters(model.parameters())
    trained = count_parameters(p for p in model.parameters() if p.requires_grad)
    num_blocks = len(blocks(model))
    block = max(count_parameters(b.parameters()) for b in blocks(model))
    rest = count - block * num_blocks  # embeddings, the final norm, the head
    config = config.get_text_config()
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    parts = {"parameters": count, "trained": trained}

    # The weights and what stands beside them: AdamW has two moments.
    if lora:
        # Each GPU holds the whole model: the base in bfloat16, the adapters in float32.
        parts |= {"weights": 2 * (count - trained) + 4 * trained, "gradients": 4 * trained,
                  "optimizer": 8 * trained, "reference": 0, "gathered_rollout": 0,
                  "gathered_update": 0}
    else:
        # Each GPU holds its share in float32, and gathers in bfloat16 what it computes with.
        share = 0 if offload else 1 / gpus
        parts |= {"weights": int(4 * count * share), "gradients": int(4 * count * share),
                  "optimizer": int(8 * count * share), "gathered_rollout": 2 * count,
                  "reference": int(2 * count * share) if kl else 0}
        # The weights of the current block, the next block and the rest, and the gradients of one
        # block and the rest on their way to the GPUs that own them.
        parts["gathered_update"] = 2 * (2 * block + rest) + 6 * block + 6 * rest

    # The critic's weights and moments. It has the policy's body, and is updated after the policy:
    # gradients and activations count once.
    parts["critic"] = 0
    if ppo:
        body = count_parameters(model.base_model.parameters())
        parts["critic"] = 2 * (body - trained) + 12 * trained if lora else int(12 * body * share)

    # Keys and values of all slots, in bfloat16.
    parts["cache"] = slots * length * num_blocks * 2 * config.num_key_value_heads * head_dim * 2

    # A micro-batch: the saved input of each block, the activations inside one block, the logits.
    block_inputs = 2 * hidden * num_blocks
    inside_a_block = 2 * (8 * hidden + 4 * config.intermediate_size)
    parts["activations"] = positions * (block_inputs + inside_a_block)
    parts["logits"] = 4 * 4 * rl.MAX_LOGITS["cuda"]

    always = parts["weights"] + parts["optimizer"] + parts["reference"] + parts["critic"]
    parts["rollout"] = always + parts["gathered_rollout"] + parts["cache"]
    update_only = ("gradients", "gathered_update", "activations", "logits")
    parts["update"] = always + sum(parts[name] for name in update_only)
    return parts


def add_flags(parser):
    add = parser.add_argument
    add("--model", default="", help="a folder, a hub id or a known name: estimate, do not measure")
    add("--gpus", type=int, default=1)
    for name in ("slots", "max_length", "microbatch_tokens", "kl_coef", "lora_rank"):
        default = getattr(Config, name)
        add(f"--{name}", type=type(default), default=default, help="of train.py")
    add("--offload", action="store_true", help="of train.py")
    add("--ppo", action="store_true", help="--algo ppo, which has a critic")


def measure(args):
    """-> (figures for --out, one line for each target that was missed)"""
    if not args.model:
        return measure_log_probs()
    parts = estimate(config_of(args.model), args.gpus, args.slots, args.max_length,
                     args.microbatch_tokens, args.kl_coef > 0, args.lora_rank, args.offload,
                     args.ppo)
    print(f"{args.model}: {parts['parameters'] / 1e9:.2f}B parameters, "
          f"{parts['trained'] / 1e9:.3f}B of them trained, on {args.gpus} GPUs, GB each")
    for name, size in parts.items():
        if name not in ("parameters", "trained"):
            print(f"  {name:17} {size / 1e9:7.1f}")
    return parts, []
