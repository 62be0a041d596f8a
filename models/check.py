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
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

import rl
from engine import Ragged
from models.lockstep import Padded
from parallel import device_of

LARGEST_GAP = 1e-4  # of a log-prob, in float32
LARGEST_GAP_RECURRENT = 5e-4
LARGEST_MEAN_GAP = 0.02  # in the run's own dtype, if rounding to it does not cost more (`try_ways`)
SMALL_WINDOW = 16  # the copy's sliding windows and chunks, so that a short sequence passes them
# Words in the names of model types and layer types.
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "lstm", "falcon_h1")

# The turns of one trajectory, as a rollout feeds them: first the prompt, then each token of a reply
# by itself, the last one together with the observation that follows.
Play = list[list[int]]


def make_plays(vocab_size: int) -> list[Play]:
    """Six plays of two or three turns. The second begins like the first; others end earlier."""
    generator = torch.Generator().manual_seed(0)
    plays = []
    #                  prompt, reply, observation, reply, ...
    for lengths in ((32, 4, 7, 3, 12, 5), (3, 6, 2, 5, 1, 2), (31, 1, 9, 2), (5, 7, 3, 3, 20, 4),
                    (17, 2, 5, 6), (2, 3, 30, 5, 3, 3)):
        sizes = [lengths[0]]  # of the feeds
        for reply, observation in zip(lengths[1::2], [*lengths[2::2], 0]):
            sizes += [1] * (reply - 1) + [1 + observation]
        ids = torch.randint(vocab_size, (sum(sizes),), generator=generator)
        plays.append([feed.tolist() for feed in ids.split(sizes)])
    plays[1][0] = plays[0][0][:23] + plays[1][0]
    return plays


def ends_of(play: Play) -> list[int]:
    """The number of ids up to the end of each feed but the last: the place of the token that is
    sampled there."""
    return list(itertools.accumulate(map(len, play[:-1])))


# ---- the ways ----
# Each computes the log-probs [S] float64 of the tokens that follow the feeds: in the order of the
# plays, and of the feeds within a play.


def next_logprobs(logits: dict[tuple[int, int], Tensor], plays: list[Play]) -> Tensor:
    """logits: (play, feed) -> [V] after this feed, for all feeds but a play's last -> log-probs
    [S]."""
    logprobs = [torch.log_softmax(logits[p, k].float(), -1)[plays[p][k + 1][0]].item()
                for p, k in sorted(logits)]
    return torch.tensor(logprobs, dtype=torch.float64)


@torch.no_grad()
def plain(model: PreTrainedModel, plays: list[Play]) -> Tensor:
    """The oracle: the model's plain forward pass over each whole sequence."""
    logits = {}
    for p, play in enumerate(plays):
        ids = torch.tensor([sum(play, [])], device=device_of(model))
        of_sequence = model(input_ids=ids, use_cache=False).logits[0]
        logits |= {(p, k): of_sequence[end - 1] for k, end in enumerate(ends_of(play))}
    return next_logprobs(logits, plays)


def ragged(model: PreTrainedModel, plays: list[Play]) -> Tensor:
    """The engine, with fewer slots than plays. A slot begins a step after the one before it, so
    that some slots decode while others prefill, and a common beginning is copied."""
    engine = Ragged(model, 4)
    left = [[(p, k) for p in range(slot, len(plays), engine.slots)
             for k in range(len(plays[p]) - 1)] for slot in range(engine.slots)]
    logits = {}
    with engine.attention():
        for step in itertools.count(1):
            feeds = {slot: feeds.pop(0) for slot, feeds in enumerate(left[:step]) if feeds}
            if not feeds:
                return next_logprobs(logits, plays)
            new_ids = {slot: plays[p][k] for slot, (p, k) in feeds.items()}
            for slot, ids in new_ids.items():
                if feeds[slot][1] == 0:
                    new_ids[slot] = engine.begin(slot, ids, *engine.best_prefix(ids))
            logits |= zip(feeds.values(), engine.forward(new_ids))


def padded(model: PreTrainedModel, plays: list[Play]) -> Tensor:
    """The model's own attention and cache, all plays in lockstep."""
    cache = Padded(model)
    logits = {}
    rows = list(range(len(plays)))  # the plays in the cache
    for k in range(max(map(len, plays)) - 1):
        alive = [p for p in rows if k < len(plays[p]) - 1]
        if len(alive) < len(rows) - 1:  # let one wait, and drop two
            cache.keep([rows.index(p) for p in alive])
            rows = alive
        forward = cache.forward if k else cache.start
        of_rows = forward([plays[p][k] if p in alive else [] for p in rows])
        logits |= {(p, k): of_rows[rows.index(p)] for p in alive}
    return next_logprobs(logits, plays)


def alone(model: PreTrainedModel, plays: list[Play]) -> Tensor:
    """The same with one play at a time."""
    return torch.cat([padded(model, [play]) for play in plays])


@torch.no_grad()
def updated(model: PreTrainedModel, plays: list[Play], way: str) -> Tensor:
    """The log-probs that the update computes."""
    ids = pad_sequence([torch.tensor(sum(play, [])) for play in plays], batch_first=True)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, play in zip(mask, plays):
        row[ends_of(play)] = True
    rl.set_compute_paths(model, rl.ComputePaths("padded", way, {}))
    device = device_of(model)
    return rl.token_logprobs(model, ids.to(device), mask.to(device))[0].cpu()[mask].double()


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
    plays = make_plays(text.vocab_size)
    oracle = plain(model, plays)
    if not oracle.isfinite().all():
        raise ValueError("the model's log-probs are not finite: its weights are damaged")
    kinds = f"{model.config.model_type} {getattr(text, 'layer_types', '')}"
    is_recurrent = any(word in kinds for word in RECURRENT)
    limit = LARGEST_GAP_RECURRENT if is_recurrent else LARGEST_GAP
    with rl.compute_in(dtype, device_of(model)):
        rounded = plain(model, plays)
    mean_limit = max(LARGEST_MEAN_GAP, (rounded - oracle).abs().mean())
    gaps = {}

    def is_exact(what, name):
        gap = differences(WAYS[what][name], model, plays, oracle).max().item()
        gaps[f"{what} {name}"] = gap
        if gap > limit or dtype == "float32":
            return gap <= limit
        with rl.compute_in(dtype, device_of(model)):
            gap = differences(WAYS[what][name], model, plays, rounded).mean().item()
        gaps[f"{what} {name} {dtype}"] = gap
        return gap <= mean_limit

    exact = [next((name for name in ways if is_exact(what, name)), "")
             for what, ways in WAYS.items()]
    return rl.ComputePaths(*exact, gaps)


def differences(way: Callable, model: PreTrainedModel, plays: list[Play],
                oracle: Tensor) -> Tensor:
    """The differences [S] of a way's log-probs from the oracle's; [inf] if the way fails."""
    try:
        return (way(model, plays) - oracle).abs().nan_to_num(math.inf, math.inf)
    except Exception as e:  # what a model's code raises when it is used in a way not made for it
        if rl.is_lack_of_resources(e):  # which says nothing about the way
            raise
        return torch.tensor([math.inf])


def first_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A float32 copy, on `device`, of the model with its first layers only: two, or as many as show
    each kind of layer. Its sliding windows are short, so that short sequences are longer."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    # Lists with an entry a layer say of which kind each layer is.
    lists = {name: value for name, value in vars(text).items()
             if isinstance(value, list) and len(value) == depth}
    firsts = [kinds.index(kind) for kinds in lists.values() for kind in kinds]
    firsts += [1, getattr(text, "first_k_dense_replace", 0) or 0]
    count = min(depth, 1 + max(firsts))
    text.update({"num_hidden_layers": count}
                | {name: kinds[:count] for name, kinds in lists.items()}
                | {name: SMALL_WINDOW for name in ("sliding_window", "attention_chunk_size")
                   if getattr(text, name, None)})
    with torch.random.fork_rng(devices=[]), device:  # no result depends on a GPU's generator
        small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name, own in small.state_dict().items()
                           if name in weights and weights[name].shape == own.shape}, strict=False)
    return small.eval()
