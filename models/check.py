"""Which ways of computing a model are exact: tried, not listed.

A rollout computes log-probs step by step with a KV cache, the update computes them again in one
pass. Both have a fast way, for models whose attention function can be replaced, and a slow one, for
others:

    rollout   "ragged"   the engine, every trajectory at its own pace
              "padded"   the model's own attention and cache, trajectories in lockstep
              "alone"    the same, one trajectory at a time
    update    "packed"   trajectories one after the other in one row
              "padded"   a row each

`find_paths` plays the same few turns of uneven length in each of them, on a float32 copy of the
model's first layers, and compares the log-probs with the model's plain forward pass. The fastest
exact way is used. A model without an exact way is refused.
"""

import copy
import itertools
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

import rl
from engine import Ragged
from models.lockstep import Padded
from parallel import device_of, is_lack_of_resources

LARGEST_GAP = 1e-4  # of a log-prob, in float32
LARGEST_GAP_RECURRENT = 5e-4
LARGEST_MEAN_GAP = 0.02  # in the run's own dtype, if rounding to it does not cost more (`try_ways`)
SMALL_WINDOW = 16  # the copy's sliding windows and chunks, so that a short sequence passes them
# Words in the names of model types and layer types.
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "lstm", "falcon_h1")

def make_plays(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Six plays of two or three turns. The second begins like the first; others end earlier.

    -> ids [B, T] long, and mask [B, T] bool, True: sampled. The last token of a play is sampled.
    """
    generator = torch.Generator().manual_seed(0)
    ids, mask = [], []
    #                  prompt, reply, observation, reply, ...
    for lengths in ((32, 4, 7, 3, 12, 5), (26, 6, 2, 5, 1, 2), (31, 1, 9, 2), (5, 7, 3, 3, 20, 4),
                    (17, 2, 5, 6), (2, 3, 30, 5, 3, 3)):
        ids.append(torch.randint(vocab_size, (sum(lengths),), generator=generator))
        mask.append(torch.tensor(sum(([k % 2 == 1] * n for k, n in enumerate(lengths)), [])))
    ids[1][:23] = ids[0][:23]
    return tuple(pad_sequence(rows, batch_first=True).to(device) for rows in (ids, mask))


def feeds_of(ids: Tensor, mask: Tensor) -> list[list[list[int]]]:
    """What a rollout feeds in each play, before each sampled token: first the prompt, then each
    token of a reply by itself, the last one together with the observation that follows."""
    return [[feed.tolist() for feed in row.tensor_split(sampled.nonzero()[:, 0])[:-1]]
            for row, sampled in zip(ids.cpu(), mask.cpu())]


# ---- the ways ----
# Each computes the log-probs [S] float64 of the sampled tokens, in the order of the mask.


def logprobs_of(logits: list[list[Tensor]], ids: Tensor, mask: Tensor) -> Tensor:
    """logits: of each play, [V] before each sampled token -> log-probs [S]."""
    rows = torch.stack(sum(logits, [])).float()
    return torch.log_softmax(rows, -1).gather(1, ids[mask][:, None])[:, 0].cpu().double()


@torch.no_grad()
def plain(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The oracle: the model's plain forward pass over each whole sequence."""
    logits = []
    for row, sampled in zip(ids, mask):
        places = sampled.nonzero()[:, 0]
        of_row = model(input_ids=row[None, : places[-1]], use_cache=False).logits[0]
        logits.append([*of_row[places - 1]])
    return logprobs_of(logits, ids, mask)


def ragged(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The engine, with fewer slots than plays. A slot begins a step after the one before it, so
    that some slots decode while others prefill, and a common beginning is copied."""
    engine, feeds, logits = Ragged(model, 4), feeds_of(ids, mask), [[] for _ in ids]
    with engine.attention():
        for step in itertools.count():
            # In each slot the first of its plays that is not complete.
            playing = {p % engine.slots: p for p in reversed(range(len(ids)))
                       if p % engine.slots <= step and len(logits[p]) < len(feeds[p])}
            if not playing:
                return logprobs_of(logits, ids, mask)
            feed = {slot: feeds[p][len(logits[p])] for slot, p in playing.items()}
            for slot, p in playing.items():
                if not logits[p]:
                    feed[slot] = engine.begin(slot, feed[slot], *engine.best_prefix(feed[slot]))
            for p, row in zip(playing.values(), engine.forward(feed)):
                logits[p].append(row)


def padded(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own attention and cache, all plays in lockstep."""
    cache, feeds, logits = Padded(model), feeds_of(ids, mask), [[] for _ in ids]
    rows = list(range(len(ids)))  # the plays in the cache
    for k in range(max(map(len, feeds))):
        alive = [p for p in rows if k < len(feeds[p])]
        if len(alive) < len(rows) - 1:  # let one wait, and drop two
            cache.keep([rows.index(p) for p in alive])
            rows = alive
        of_rows = cache.forward([feeds[p][k] if p in alive else [] for p in rows])
        for p in alive:
            logits[p].append(of_rows[rows.index(p)])
    return logprobs_of(logits, ids, mask)


def alone(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The same with one play at a time."""
    return torch.cat([padded(model, *play) for play in zip(ids.split(1), mask.split(1))])


@torch.no_grad()
def updated(model: PreTrainedModel, ids: Tensor, mask: Tensor, way: str) -> Tensor:
    """The log-probs that the update computes."""
    rl.set_compute_paths(model, rl.ComputePaths("padded", way, {}))
    return rl.token_logprobs(model, ids, mask)[0][mask].cpu().double()


WAYS = {"rollout": {"ragged": ragged, "padded": padded, "alone": alone},
        "update": {way: partial(updated, way=way) for way in ("packed", "padded")}}


# ---- the check ----

known: dict[tuple[str, str, str], rl.ComputePaths] = {}  # (configuration, dtype, device) -> paths


def find_paths(model: PreTrainedModel, dtype: str = "float32",
               device: torch.device | None = None) -> rl.ComputePaths:
    """Find the fastest exact way of a rollout and of an update, and let `model` use them.

    dtype, device: the run's; None is the model's device. The largest difference allowed is
    LARGEST_GAP in float32, LARGEST_GAP_RECURRENT where layers are recurrent; in another `dtype` the
    mean one is also limited (see `try_ways`). Raises ValueError if no way is exact, or if the
    model's log-probs are not finite. This process tries each configuration once.
    """
    device = device or device_of(model)
    key = (model.config.to_json_string(), dtype, device.type)
    paths = known.get(key) or try_ways(first_layers(model, device), dtype)
    rl.set_compute_paths(model, paths)
    if not paths.rollout or not paths.update:
        raise ValueError(f"models of the type {model.config.model_type} cannot be used: no way has "
                         f"the log-probs of the model's own forward pass: {paths}")
    known[key] = paths  # not a refusal, which may be due to these weights alone
    return paths


def plays_alone(model: PreTrainedModel) -> bool:
    """Whether padding would change the model's results, so that on its own attention it plays one
    trajectory at a time."""
    paths = rl.compute_paths_of(model) or find_paths(model)
    return paths.rollout == "alone" or rl.depends_on_length(model.config)


def try_ways(model: PreTrainedModel, dtype: str = "float32") -> rl.ComputePaths:
    """Try the ways in turn, the fastest first, until one is exact -> the exact ones, "" if none
    is.

    In another `dtype` than float32 a way is also compared with the plain forward pass in that
    dtype. The mean gap may be LARGEST_MEAN_GAP, or as large as the mean gap between the plain pass
    in that dtype and in float32: log-probs of unlikely tokens are large numbers, and rounding them
    alone may cost more than LARGEST_MEAN_GAP.
    """
    text = model.config.get_text_config()
    plays = make_plays(text.vocab_size, device_of(model))
    oracle = plain(model, *plays)
    if not oracle.isfinite().all():
        raise ValueError("the model's log-probs are not finite: its weights are damaged")
    kinds = f"{model.config.model_type} {getattr(text, 'layer_types', '')}"
    limit = LARGEST_GAP_RECURRENT if any(word in kinds for word in RECURRENT) else LARGEST_GAP
    # (suffix of the gap's name, dtype, expected log-probs, which gap, its limit)
    checks = [("", "float32", oracle, Tensor.max, limit)]
    if dtype != "float32":
        with rl.compute_in(dtype, device_of(model)):
            rounded = plain(model, *plays)
        limit = max(LARGEST_MEAN_GAP, (rounded - oracle).abs().mean())
        checks.append((f" {dtype}", dtype, rounded, Tensor.mean, limit))
    gaps = {}

    def is_exact(what, name):
        for suffix, in_dtype, expected, summary, limit in checks:
            try:
                with rl.compute_in(in_dtype, device_of(model)):
                    found = WAYS[what][name](model, *plays)
            except Exception as e:  # what a model's code raises when it is not made for this way
                if is_lack_of_resources(e):  # which says nothing about the way
                    raise
                found = oracle * math.nan
            gap = summary((found - expected).abs().nan_to_num(math.inf, math.inf)).item()
            gaps[f"{what} {name}{suffix}"] = gap
            if gap > limit:
                return False
        return True

    exact = [next((name for name in ways if is_exact(what, name)), "")
             for what, ways in WAYS.items()]
    return rl.ComputePaths(*exact, gaps)


def first_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A float32 copy, on `device`, of the model with its first layers only: two, or as many as show
    each kind of layer. Its sliding windows, and the blocks of keys that it selects, are short, so
    that short sequences are longer."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    # Lists with an entry a layer say of which kind each layer is.
    lists = {name: value for name, value in vars(text).items()
             if isinstance(value, list) and len(value) == depth}
    firsts = [kinds.index(kind) for kinds in lists.values() for kind in kinds]
    firsts += [1, getattr(text, "first_k_dense_replace", 0) or 0]
    count = min(depth, 1 + max(firsts))
    text.update({"num_hidden_layers": count, "index_topk_blocks": 1}
                | {name: kinds[:count] for name, kinds in lists.items()}
                | {key: SMALL_WINDOW for key in ("sliding_window", "attention_chunk_size",
                                                  "index_block_size") if getattr(text, key, None)})
    with torch.random.fork_rng(devices=[]), device:  # no result depends on a GPU's generator
        small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name, own in small.state_dict().items()
                           if name in weights and weights[name].shape == own.shape}, strict=False)
    return small.eval()
