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
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import engine
import rl
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
LogProbs = dict[tuple[int, int], float]  # (play, feed) -> of the token that follows the feed
Way = Callable[[PreTrainedModel, list[Play]], LogProbs]


def make_plays(vocab_size: int) -> list[Play]:
    """Six plays of two or three turns. The second begins like the first; others end earlier."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    beginning = draw(23)
    plays = []
    #                  prompt, reply, observation, reply, ...
    for lengths in ((9, 4, 7, 3, 12, 5), (3, 6, 2, 5, 1, 2), (31, 1, 9, 2), (5, 7, 3, 3, 20, 4),
                    (17, 2, 5, 6), (2, 3, 30, 5, 3, 3)):
        play = [(beginning if len(plays) < 2 else []) + draw(lengths[0])]
        for reply, observation in zip(lengths[1::2], [*lengths[2::2], 0]):
            play += [draw(1) for _ in range(reply)]
            play[-1] += draw(observation)
        plays.append(play)
    return plays


def ends_of(play: Play) -> list[int]:
    """The number of ids up to the end of each feed but the last: the place of the token that is
    sampled there."""
    return list(itertools.accumulate(map(len, play[:-1])))


def next_logprobs(logits: Tensor, plays: list[Play], feeds: list[tuple[int, int]]) -> LogProbs:
    """The log-probs of the tokens that follow feed k of play p, for each (p, k) of `feeds`.
    logits [len(feeds), V]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    return {(p, k): float(row[plays[p][k + 1][0]]) for row, (p, k) in zip(logprobs, feeds)}


# ---- the ways ----


@torch.no_grad()
def plain(model: PreTrainedModel, plays: list[Play]) -> LogProbs:
    """The oracle: the model's plain forward pass over each whole sequence."""
    found = {}
    for p, play in enumerate(plays):
        ids = torch.tensor([sum(play, [])], device=device_of(model))
        logits = model(input_ids=ids, use_cache=False).logits[0]
        last = [end - 1 for end in ends_of(play)]
        found |= next_logprobs(logits[last], plays, [(p, k) for k in range(len(last))])
    return found


def ragged(model: PreTrainedModel, plays: list[Play]) -> LogProbs:
    """The engine, with fewer slots than plays. A slot begins a step after the one before it, so
    that some slots decode while others prefill, and a common beginning is copied."""
    decoder = engine.Ragged(model, 4)
    running = [[(p, k) for p in range(slot, len(plays), decoder.slots)
                for k in range(len(plays[p]) - 1)] for slot in range(decoder.slots)]
    found = {}
    with decoder.attention():
        for step in itertools.count():
            feeds = {slot: left.pop(0) for slot, left in enumerate(running[: step + 1]) if left}
            if not feeds:
                return found
            new_ids = {slot: plays[p][k] for slot, (p, k) in feeds.items()}
            for slot, (_, k) in feeds.items():
                if k == 0:
                    prefix = decoder.best_prefix(new_ids[slot])
                    new_ids[slot] = decoder.begin(slot, new_ids[slot], *prefix)
            found |= next_logprobs(decoder.forward(new_ids), plays, list(feeds.values()))


def padded(model: PreTrainedModel, plays: list[Play]) -> LogProbs:
    """The model's own attention and cache, all plays in lockstep."""
    cache = Padded(model)
    found = {}
    rows = list(range(len(plays)))  # the plays in the cache
    for k in range(max(map(len, plays)) - 1):
        alive = [p for p in rows if k < len(plays[p]) - 1]
        if len(alive) < len(rows) - 1:  # let one wait, and drop two
            cache.keep([rows.index(p) for p in alive])
            rows = alive
        forward = cache.forward if k else cache.start
        logits = forward([plays[p][k] if p in alive else [] for p in rows])
        places = [rows.index(p) for p in alive]
        found |= next_logprobs(logits[places], plays, [(p, k) for p in alive])
    return found


def alone(model: PreTrainedModel, plays: list[Play]) -> LogProbs:
    """The same with one play at a time."""
    return {(p, k): logprob for p, play in enumerate(plays)
            for (_, k), logprob in padded(model, [play]).items()}


@torch.no_grad()
def updated(model: PreTrainedModel, plays: list[Play], way: str) -> LogProbs:
    """The log-probs that the update computes."""
    rows = [torch.tensor(sum(play, [])) for play in plays]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device_of(model))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for p, play in enumerate(plays):
        mask[p, ends_of(play)] = True
    rl.set_compute_paths(model, rl.ComputePaths("padded", way, {}))
    logprobs = rl.token_logprobs(model, ids, mask)[0].tolist()
    return {(p, k): logprobs[p][end] for p, play in enumerate(plays)
            for k, end in enumerate(ends_of(play))}


WAYS: dict[str, dict[str, Way]] = {
    "rollout": {"ragged": ragged, "padded": padded, "alone": alone},
    "update": {way: partial(updated, way=way) for way in ("packed", "padded")}}


def differences(way: Way, model: PreTrainedModel, plays: list[Play],
                oracle: LogProbs) -> list[float]:
    """The differences of a way's log-probs from the oracle's; [inf] if the way fails."""
    try:
        found = way(model, plays)
    except Exception as e:  # what a model's code raises when it is used in a way not made for it
        if rl.is_lack_of_resources(e):  # which says nothing about the way
            raise
        return [math.inf]
    gaps = [abs(found[feed] - oracle[feed]) for feed in oracle]
    return gaps if math.isfinite(sum(gaps)) else [math.inf]


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
    plays = make_plays(model.config.get_text_config().vocab_size)
    model.eval()
    oracle = plain(model, plays)
    if not math.isfinite(sum(oracle.values())):
        raise ValueError("the model's log-probs are not finite: its weights are damaged")
    limit = LARGEST_GAP_RECURRENT if is_recurrent(model.config) else LARGEST_GAP
    comparisons = [("float32", oracle, max, limit)]
    if dtype != "float32":
        with rl.compute_in(dtype, device_of(model)):
            rounded = plain(model, plays)
        rounding = statistics.mean(abs(rounded[feed] - oracle[feed]) for feed in oracle)
        comparisons.append((dtype, rounded, statistics.mean, max(LARGEST_MEAN_GAP, rounding)))
    gaps = {}

    def is_exact(what, name):
        for in_dtype, expected, measure, limit in comparisons:
            with rl.compute_in(in_dtype, device_of(model)):
                gap = measure(differences(WAYS[what][name], model, plays, expected))
            gaps[f"{what} {name}" + (f" {dtype}" if expected is not oracle else "")] = gap
            if gap > limit:
                return False
        return True

    exact = [next((name for name in ways if is_exact(what, name)), "")
             for what, ways in WAYS.items()]
    return rl.ComputePaths(*exact, gaps)


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether some layers keep a state, and not keys and values."""
    kinds = [config.model_type, *(getattr(config.get_text_config(), "layer_types", None) or [])]
    return any(word in kind for word in RECURRENT for kind in kinds)


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
    text.num_hidden_layers = count = min(depth, 1 + max(firsts))
    for name, kinds in lists.items():
        setattr(text, name, kinds[:count])
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, SMALL_WINDOW)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name, own in small.state_dict().items()
                           if name in weights and weights[name].shape == own.shape}, strict=False)
    return small.eval()
