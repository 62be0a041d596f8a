"""The policy as a module to train: loading, LoRA, the critic, token log-probs.

Log-probs are computed on packed rows where the model allows it: trajectories stand one after the
other in one row, without padding, and each attends to itself alone.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import algos
from envs import NOT_NEGATIVE, flag
from models.packed import pack, use_attention
from parallel import blocks, device_of, is_lack_of_resources, ranks, sent, sharded, through

TINY_MODEL = Path(__file__).parent / "data" / "tiny"
SMOLLM2_MODEL = Path(__file__).parent / "data" / "smollm2"  # made by data/get_smollm2.py
MAX_LOGITS = {"cpu": 2**24, "cuda": 2**27}  # at a time: in float32 64 MB and half a gigabyte
LORA_SCALE = 2.0  # alpha / rank

# On H100 and newer GPUs PyTorch tries cuDNN's attention first. It builds a plan for every new
# shape, and in a rollout nearly every call has a new one.
torch.backends.cuda.enable_cudnn_sdp(False)

# "policy" and, with PPO, "critic" -> (module, its optimizer)
Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]

# ---- models ----


def model_path(name: str) -> str:
    """"tiny" and "smollm2" -> their folders; a folder, a GGUF file or a hub id stays as it is.
    Raises ValueError if there is no such folder or file."""
    path = {"tiny": TINY_MODEL, "smollm2": SMOLLM2_MODEL}.get(name, Path(name))
    is_hub_id = name.count("/") == 1 and not path.parent.is_dir()
    if not path.exists() and not is_hub_id or (path / "metrics.jsonl").exists():
        raise ValueError(f"no model '{name}': give 'tiny', 'smollm2' (of data/get_smollm2.py), the "
                         "folder of a model such as RUN/final, a GGUF file, or a hub id")
    return str(path)


def location(path: str | Path) -> dict[str, str | bool | None]:
    """A path from `model_path` -> the arguments with which `from_pretrained` reads it. Code in a
    model folder is never run."""
    path = Path(path)
    is_gguf = path.suffix == ".gguf"
    return {"pretrained_model_name_or_path": str(path.parent if is_gguf else path),
            "gguf_file": path.name if is_gguf else None, "trust_remote_code": False}


@contextmanager
def one_line_error(what: str) -> Iterator[None]:
    """Re-raise an exception in the block as a ValueError whose message is one line, `what` first:
    transformers raises exceptions of many kinds for a broken file. Those for a lack of memory or
    threads are re-raised unchanged."""
    try:
        yield
    except Exception as e:
        if is_lack_of_resources(e):
            raise
        first_line = str(e).partition("\n")[0]
        raise ValueError(f"{what}: {type(e).__name__}: {first_line}") from e


def load_policy(name: str = "tiny", device: str | torch.device = "cpu",
                dtype: str | torch.dtype = torch.float32,
                ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """-> (causal LM, tokenizer). Weights are read from safetensors or GGUF only."""
    tokenizer = load_tokenizer(name)
    return load_model(name, device, dtype), tokenizer


def load_tokenizer(name: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer of `load_policy`. A GGUF file is checked first. chat_template: a file with a
    template that takes the place of the model's own. Raises ValueError for a file that cannot be
    read, and for a tokenizer that transformers made up or numbered anew."""
    path = model_path(name)
    file = Path(path, "tokenizer.json")
    with one_line_error(f"cannot load the tokenizer of the model '{name}'"):
        split = gguf_split(path) if path.endswith(".gguf") else None
        added = json.loads(file.read_bytes())["added_tokens"] if file.exists() else []
        if len(added) > 10_000:  # which may take minutes
            print(f"reading the {len(added)} added tokens of {name} ...", file=sys.stderr)
        tokenizer = AutoTokenizer.from_pretrained(**location(path))
        # Further tokens that end a reply. A GGUF file has none; the folder that it lies in may have
        # those of another model.
        tokenizer.generation_eos_ids = generation_eos_ids(path) if split is None else []
    if split == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
    sentence = "go to the red ball and open 2 doors"
    ids = tokenizer.encode(sentence, add_special_tokens=False)
    if tokenizer.decode(ids).strip() != sentence:
        raise ValueError(f"the tokenizer of {name} makes {tokenizer.decode(ids)!r} of {sentence!r}:"
                         " are its files complete?")
    if moved := [token["content"] for token in added
                 if tokenizer.convert_tokens_to_ids(token["content"]) != token["id"]]:
        raise ValueError(f"{file} gives an added token an id that is another's: {moved[0]!r}")
    if chat_template:
        tokenizer.chat_template = Path(chat_template).read_text("utf-8")
    return tokenizer


def generation_eos_ids(path: str) -> list[int]:
    """The end-of-sequence tokens in a model's generation_config.json; [] without that file."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        if Path(path, "generation_config.json").exists():  # it cannot be read
            raise
        return []
    return [ids] if isinstance(ids, int) else ids or []


def gguf_split(path: str) -> str:
    """Read the name of a GGUF file's pre-tokenizer, "" for SentencePiece. Raises ValueError for a
    file that transformers would read wrongly without an error: it ignores scaled rotary embeddings
    and, but for Qwen2, biases, and takes GPT-2's pre-tokenizer for one that it does not know."""
    from gguf import GGUFReader
    reader = GGUFReader(path)

    def value(key):
        return reader.fields[key].contents() if key in reader.fields else ""

    family = value("general.architecture")
    split = value("tokenizer.ggml.pre") if value("tokenizer.ggml.model") == "gpt2" else ""
    names = " ".join(tensor.name for tensor in reader.tensors)
    is_scaled = value(f"{family}.rope.scaling.type") not in ("", "none") or "rope_freqs" in names
    if (family != "qwen2" and (family not in ("llama", "qwen3") or ".bias" in names) or is_scaled
            or split not in ("", "gpt-2", "qwen2", "smollm")):
        raise ValueError(f"{path} is not supported: architecture {family}, pre-tokenizer {split}, "
                         f"scaled rotary embeddings: {is_scaled}, biases: {'.bias' in names}")
    return split


def load_model(name: str, device: str | torch.device = "cpu",
               dtype: str | torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal LM of `load_policy`; `load_tokenizer` has checked a GGUF file, whose weights are
    de-quantised. dtype "auto": the one of the weights in the files, float32 for a GGUF file. Raises
    ValueError if the files lack a weight: transformers would fill it with random numbers."""
    source = location(model_path(name))
    is_gguf = source["gguf_file"] is not None
    with one_line_error(f"cannot load the model '{name}'"):
        if dtype == "auto" and not is_gguf:
            # transformers would prefer the dtype in config.json, and cast the weights to it.
            source["config"] = AutoConfig.from_pretrained(**source)
            source["config"].dtype = None
        model, found = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, use_safetensors=True, output_loading_info=True)
    if missing := found["missing_keys"]:
        raise ValueError(f"the files of {name} lack {len(missing)} of the model's weights: "
                         f"{min(missing)} ...")
    # Files that hold a head of their own are read untied, whatever the config says.
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    if is_gguf:  # a model that is marked as quantised can be neither cast nor saved
        model.hf_quantizer.remove_quantization_config(model)
    return model.to(device)


@dataclass
class Sampling:
    """how tokens are drawn: the rollout and the update must agree on it"""

    # every random number follows from it
    seed: int = flag(0, NOT_NEGATIVE, first=True)
    # sampling temperature; 0 (in evaluation): the likeliest token
    temperature: float = flag(1.0, NOT_NEGATIVE)
    # arithmetic of the forward passes; trained weights are float32
    dtype: str = flag("float32", ("float32", "bfloat16"))


def compute_in(dtype: str, device: str | torch.device) -> torch.autocast:
    """The context of a forward pass: float32 weights, arithmetic in `dtype`. Weights kept in
    bfloat16 would not learn: an optimizer step of 1e-6 is far below their resolution."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Add LoRA's adapters to all linear layers but the head, in place; nothing else is trained.
    Adapters are float32 and change nothing at first. Needs the package peft."""
    from peft import LoraConfig, inject_adapter_in_model
    names = model.state_dict().keys()
    config = LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    if without_adapters(model.state_dict()).keys() != names:
        raise ValueError("--lora_rank: the adapters of this model could not be saved")
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the adapters are off: the model is the one that training started from."""
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    # Not by `enable_adapters`, which also sets requires_grad: FSDP reads that in the first forward
    # pass, and would find nothing to train.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def recompute_blocks(model: nn.Module) -> None:
    """Gradient checkpointing, in place: a block keeps its input only, and is computed again in the
    backward pass."""
    def run(forward, *args, **kwargs):
        # The model's attention function may have changed by the time of the backward pass.
        same_attention = use_attention(model.config, model.config._attn_implementation)
        return checkpoint(forward, *args, use_reentrant=False,
                          context_fn=lambda: (nullcontext(), same_attention), **kwargs)

    for block in blocks(model):
        block.forward = partial(run, block.forward)


def compile_model(model: nn.Module) -> None:
    """Compile the transformer blocks, in place, before `recompute_blocks`; and what follows the
    head. All blocks share the compiled code, for any number of tokens."""
    torch._dynamo.config.recompile_limit = 64  # with and without gradients, a decode step, ...
    for block in blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)
    model.base_model.scores = torch.compile(scores, dynamic=True)


class Critic(nn.Module):
    """PPO's value function: a separate model, initialised with the weights of the model `name`,
    with a linear head initialised to 0."""

    def __init__(self, name: str, dtype: str | torch.dtype = torch.float32):
        super().__init__()
        self.base_model = load_model(name, dtype=dtype).base_model
        self.config = self.base_model.config
        self.head = nn.Linear(self.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids [B, T] long, mask [B, T] bool -> values [B, T] float32 of the states in which the
        tokens with mask True were sampled (the states before them); zero elsewhere."""
        # [S, D], S sampled tokens
        hidden, places = hidden_before(self.base_model, ids.cpu(), mask.cpu())
        values = torch.zeros(mask.shape, device=hidden.device)
        # The head is float32: in bfloat16 values near 1 would be multiples of 0.004.
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.head.weight.float(), self.head.bias.float()
            values[places] = nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)
        return values


# ---- token log-probs ----


def token_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, temperature: float = 1.0,
                   entropy_gradient: bool = True, allowed: Tensor | None = None,
                   ) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens under `model`.

    ids [B, T] long, padded on the right (under a causal mask the padding reaches no other token);
    mask [B, T] bool, never True in the first column -> logprobs [B, T], entropies [B, T] float32,
    zero outside the mask. logprobs[b, t] = log_softmax(logits[b, t - 1] / temperature)[ids[b, t]],
    as the rollout records it. Only positions before a sampled token go through the head, and at
    most MAX_LOGITS logits exist at a time. entropy_gradient: whether the entropies can be
    differentiated. allowed [B, T, A] long: the ids among which each token was sampled plus one, 0
    for none; among all if there are only zeros. Raises ValueError for a mask of another dtype, or
    True in the first column.

    If ids, mask and allowed are on the CPU, and the model's sequences are packed, nothing here
    waits for the GPU, which may still be computing the micro-batch before.
    """
    if mask.dtype != torch.bool or mask[:, 0].any():
        raise ValueError("mask must be bool, and False in its first column: no logits precede it")
    ids, mask, allowed = ids.cpu(), mask.cpu(), None if allowed is None else allowed.cpu()
    return through(model, _token_logprobs, model, ids, mask, temperature, entropy_gradient, allowed)


def _token_logprobs(model, ids, mask, temperature, entropy_gradient, allowed):
    score = getattr(model.base_model, "scores", scores)
    config, embeddings = model.config.get_text_config(), model.get_output_embeddings()

    def head(hidden, sampled, columns):
        if not columns.shape[1]:
            logits, unused = embeddings(hidden), None
        else:  # only the allowed columns of the head
            rows, unused = (columns - 1).clamp(min=0), columns == 0
            # Not weight[rows]: with several threads its gradient would not repeat bit for bit.
            logits = (nn.functional.embedding(rows, embeddings.weight) @ hidden[..., None])[..., 0]
            if embeddings.bias is not None:
                logits = logits + embeddings.bias[rows]
            sampled = (columns == sampled[:, None] + 1).long().argmax(1)
        return score(logits, sampled, unused, config, temperature, entropy_gradient)

    hidden, places = hidden_before(model.base_model, ids, mask)  # [S, D], S sampled tokens
    on_device = partial(sent, device=hidden.device)
    # [S, A]. First come the tokens that were sampled among all, then those among some.
    columns = ids.new_zeros(len(hidden), 0) if allowed is None else allowed[mask]
    is_free = (columns == 0).all(1)
    free, limited = is_free.nonzero()[:, 0], (~is_free).nonzero()[:, 0]
    size = max(config.vocab_size, columns.shape[1] * hidden.shape[1])
    chunk = max(1, MAX_LOGITS[hidden.device.type] // size)
    parts = [part for rows, own in ((free, columns[free, :0]), (limited, columns[limited]))
             for part in zip(*(x.split(chunk) for x in (
                 hidden[on_device(rows)], on_device(ids[mask][rows]), on_device(own))))]
    parts = [part for part in parts if len(part[0])] or parts[:1]
    # The logits of several parts are computed again in the backward pass.
    head = partial(checkpoint, head, use_reentrant=False) if len(parts) > 1 else head
    logprobs, entropies = (torch.zeros(mask.shape, device=hidden.device) for _ in range(2))
    places = tuple(x[on_device(torch.cat([free, limited]))] for x in places)
    logprobs[places], entropies[places] = map(torch.cat, zip(*(head(*part) for part in parts)))
    return logprobs, entropies


def scores(logits: Tensor, sampled: Tensor, unused: Tensor | None, config: PreTrainedConfig,
           temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """The head's logits [S, V] -> log-probs of the sampled tokens [S] and entropies [S]. sampled
    [S]: their columns; unused [S, V] bool: columns that do not count."""
    logits = scaled_logits(logits.float(), config)
    if temperature != 1:
        logits = logits / temperature
    if unused is not None:
        logits = logits.masked_fill(unused, -math.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    logp = logprobs.gather(-1, sampled[:, None]).squeeze(1)
    # Without a gradient of the entropy, autograd does not keep two more [S, V] tensors.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logp, algos.entropy(logprobs)


def scaled_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Logits as the model's own forward pass scales them."""
    # (name in the config, whether logits are multiplied or divided): Cohere, Falcon-H1, Granite
    for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        if factor := getattr(config, name, None):
            logits = logits * factor ** power
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


def hidden_before(body: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, tuple]:
    """The last hidden states at the positions before the sampled tokens.

    ids [B, T] long, mask [B, T] bool, on the CPU, never True in the first column -> [S, D], the S
    sampled tokens in the order of the mask, and their rows and columns, [S] long each; all on the
    model's device. If `packs(body)`, the B sequences are laid out in one row without padding, each
    up to its last sampled token, and a prefix that several of them share is computed once.
    """
    on_device = partial(sent, device=device_of(body))
    row, column = places = tuple(map(on_device, mask.nonzero(as_tuple=True)))
    if not packs(body):
        hidden = body(input_ids=on_device(ids[:, :-1]), use_cache=False).last_hidden_state
        return hidden[row, column - 1], places
    # The last sampled token is not fed.
    lengths = (torch.arange(ids.shape[1]) * mask).amax(1).clamp(min=1).tolist()
    rows = [row[:length] for row, length in zip(ids.tolist(), lengths)]
    (packed, positions), parts, index = pack(rows, ids.shape[1], device_of(body))
    with use_attention(body.config, "within"):
        out = body(input_ids=packed[None], position_ids=positions[None], use_cache=False,
                   parts=parts)
    return out.last_hidden_state[0][on_device(index[mask.roll(-1, 1)])], places


# ---- lengths, and the ways in which a model is computed ----


def changing_rotary_embeddings(config: PreTrainedConfig) -> list[dict]:
    """The parameters of a model's rotary embeddings that change with the length."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    return [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether the number of columns of a batch changes the model's result, as padding would."""
    text = config.get_text_config()
    windows = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(windows or kinds - {"full_attention"} or changing_rotary_embeddings(config))


def check_length(config: PreTrainedConfig, max_length: int, name: str, tokens: int = 0) -> None:
    """Raise ValueError if the model `name` has no position embeddings for `max_length` tokens, or
    if its rotary embeddings change within them: the cached keys, and with them the log-probs of
    earlier tokens, would differ from those of a fresh forward pass. Raise it, too, if its tokenizer
    has more `tokens` than its embedding. Warn of more tokens than it was trained for."""
    text = config.get_text_config()
    trained_length = getattr(text, "max_position_embeddings", None) or math.inf
    if tokens > text.vocab_size:
        raise ValueError(f"{name} embeds {text.vocab_size} of its tokenizer's {tokens} tokens")
    limits = [kind.get("original_max_position_embeddings", trained_length)
              for kind in changing_rotary_embeddings(config)]
    if not getattr(text, "rope_parameters", None):
        limits.append(trained_length)
    if limits and max_length > min(limits):
        raise ValueError(f"--max_length {max_length} is too long for {name}: its position "
                         f"embeddings end or change beyond {min(limits)} tokens")
    if ranks()[0] == 0 and max_length > trained_length:
        print(f"warning: --max_length {max_length} is beyond the {trained_length} tokens that "
              f"{name} was trained for (max_position_embeddings in its config.json)",
              file=sys.stderr)


class ComputePaths(NamedTuple):
    """The fastest exact ways of computing a model. `models/check.py` tries them and explains
    them."""

    rollout: str  # "ragged", "padded" or "alone"; "": none is exact
    update: str  # "packed" or "padded"; "": none is exact
    gaps: dict[str, float]  # of each way tried: the largest difference of a log-prob


FASTEST = ComputePaths("ragged", "packed", {})


def set_compute_paths(model: PreTrainedModel, paths: ComputePaths) -> None:
    """Record how a model is to be computed; `compute_paths_of` returns it."""
    model.base_model.paths = paths


def compute_paths_of(model: "PreTrainedModel | Critic") -> ComputePaths | None:
    """The compute paths of a model; None if `set_compute_paths` was not called."""
    return getattr(model.base_model, "paths", None)


def packs(model: "PreTrainedModel | Critic") -> bool:
    """Whether the update packs sequences into one row. False if the model was not checked."""
    return getattr(compute_paths_of(model), "update", "") == "packed"


# ---- the weights of a policy ----


def full_state_dict(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A causal LM's state dict on rank 0's CPU, LoRA's adapters merged into the weights that they
    adapt; {} on the other ranks. Called by all ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = without_adapters(get_model_state_dict(model, options=options))
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):  # peft wraps a layer, or a tensor of all experts
            key = f"{name}.{getattr(layer, 'parameter_name', 'weight')}".replace(".base_layer", "")
            change = layer.get_delta_weight("default").detach()
            change = change.full_tensor() if sharded(model) else change
            if state:
                state[key] = (state[key].float() + change.cpu()).to(state[key].dtype)
    if getattr(model.config, "tie_word_embeddings", False):
        for name in getattr(model, "_tied_weights_keys", None) or ():
            state.pop(name, None)
    return {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in state.items()}


def without_adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without LoRA's adapters, and with the names that it had before them."""
    return {name.replace(".base_layer", ""): tensor for name, tensor in state.items()
            if ".lora_" not in name}
