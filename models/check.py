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
import hashlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import engine
import rl
from parallel import device_of
from trajectory import write_atomically

LARGEST_GAP = 1e-4  # of a log-prob, in float32
LARGEST_GAP_RECURRENT = 5e-4
LARGEST_MEAN_GAP = 0.02  # in the run's own dtype, if rounding to it does not cost more (`try_ways`)
SMALL_WINDOW = 16  # the copy's sliding windows and chunks, so that a short sequence passes them
# Words in the names of model types and layer types.
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "lstm", "falcon_h1")


class Play(NamedTuple):
    """The turns of one trajectory, as a rollout feeds them: first the prompt, then each token of a
    reply by itself, the last one together with the observation that follows."""

    feeds: list[list[int]]

    @property
    def ids(self) -> list[int]:
        return [token for feed in self.feeds for token in feed]

    @property
    def ends(self) -> list[int]:
        """The number of ids up to the end of each feed: the place of the token sampled there."""
        return [sum(map(len, self.feeds[: k + 1])) for k in range(len(self.feeds))]


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
        feeds = [(beginning if len(plays) < 2 else []) + draw(lengths[0])]
        for reply, observation in zip(lengths[1::2], [*lengths[2::2], 0]):
            feeds += [draw(1) for _ in range(reply)]
            feeds[-1] += draw(observation)
        plays.append(Play(feeds))
    return plays


def read(logits: Tensor, plays: list[Play], turns: list[tuple[int, int]],
         found: list[list[float]]) -> None:
    """Add the log-prob of the token that follows feed k of play p to found[p], for each (p, k) of
    `turns`. logits [len(turns), V]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    for row, (number, k) in zip(logprobs, turns):
        play = plays[number]
        found[number].append(float(row[play.ids[play.ends[k]]]))


# ---- the ways ----

# Each gives, for each play, the log-probs of the tokens that follow its feeds but the last.
Way = Callable[[PreTrainedModel, list[Play]], list[list[float]]]


@torch.no_grad()
def plain(model: PreTrainedModel, plays: list[Play]) -> list[list[float]]:
    """The oracle: the model's plain forward pass over each whole sequence."""
    found = [[] for _ in plays]
    for number, play in enumerate(plays):
        ids = torch.tensor([play.ids], device=device_of(model))
        logits = model(input_ids=ids, use_cache=False).logits[0]
        for k, end in enumerate(play.ends[:-1]):
            read(logits[end - 1 : end], plays, [(number, k)], found)
    return found


def ragged(model: PreTrainedModel, plays: list[Play]) -> list[list[float]]:
    """The engine, with fewer slots than plays. A slot begins a step after the one before it, so
    that some slots decode while others prefill, and a common beginning is copied."""
    decoder = engine.Ragged(model, 4)

    def turns_of(slot):
        for number in range(slot, len(plays), decoder.slots):
            for k in range(len(plays[number].feeds) - 1):
                yield number, k

    found = [[] for _ in plays]
    running = {slot: turns_of(slot) for slot in range(decoder.slots)}
    with decoder.attention():
        for step in itertools.count():
            turns = {slot: next(turns, None) for slot, turns in running.items() if slot <= step}
            turns = {slot: turn for slot, turn in turns.items() if turn is not None}
            if not turns:
                return found
            feed = {}
            for slot, (number, k) in turns.items():
                feed[slot] = plays[number].feeds[k]
                if not k:
                    source, length = decoder.best_prefix(feed[slot])
                    feed[slot] = decoder.begin(slot, feed[slot], source, length)
            read(decoder.forward(feed), plays, list(turns.values()), found)


def padded(model: PreTrainedModel, plays: list[Play]) -> list[list[float]]:
    """The model's own attention and cache, all plays in lockstep."""
    cache = engine.Padded(model)
    found = [[] for _ in plays]
    rows = list(range(len(plays)))  # the plays in the cache
    for k in range(max(len(play.feeds) for play in plays) - 1):
        alive = [number for number in rows if k < len(plays[number].feeds) - 1]
        if len(alive) < len(rows) - 1:  # let one wait, and drop two
            cache.keep([rows.index(number) for number in alive])
            rows = alive
        forward = cache.forward if k else cache.start
        logits = forward([plays[number].feeds[k] if number in alive else [] for number in rows])
        places = [rows.index(number) for number in alive]
        read(logits[places], plays, [(number, k) for number in alive], found)
    return found


def alone(model: PreTrainedModel, plays: list[Play]) -> list[list[float]]:
    """The same with one play at a time."""
    return [found for play in plays for found in padded(model, [play])]


@torch.no_grad()
def updated(model: PreTrainedModel, plays: list[Play], packed: bool) -> list[list[float]]:
    """The log-probs that the update computes."""
    width = max(len(play.ids) for play in plays)
    ids = torch.zeros(len(plays), width, dtype=torch.long)
    mask = torch.zeros(len(plays), width, dtype=torch.bool)
    for row, play in enumerate(plays):
        ids[row, : len(play.ids)] = torch.tensor(play.ids)
        mask[row, play.ends[:-1]] = True
    rl.set_compute_paths(model, rl.ComputePaths("padded", "packed" if packed else "padded", {}))
    device = device_of(model)
    logprobs, _ = rl.token_logprobs(model, ids.to(device), mask.to(device))
    return [row[own].tolist() for row, own in zip(logprobs.cpu(), mask)]


ROLLOUT: dict[str, Way] = {"ragged": ragged, "padded": padded, "alone": alone}
UPDATE: dict[str, Way] = {"packed": partial(updated, packed=True),
                          "padded": partial(updated, packed=False)}


def differences(way: Way, model: PreTrainedModel, plays: list[Play],
                oracle: list[list[float]]) -> list[float]:
    """The differences of a way's log-probs from the oracle's; [inf] if the way fails."""
    try:
        found = way(model, plays)
    except Exception as e:  # what a model's code raises when it is used in a way not made for it
        if rl.is_lack_of_resources(e):  # which says nothing about the way
            raise
        return [math.inf]
    both = zip(itertools.chain(*found), itertools.chain(*oracle), strict=True)
    gaps = [abs(a - b) for a, b in both]
    return gaps if math.isfinite(sum(gaps)) else [math.inf]


# ---- the check ----


def find_paths(model: PreTrainedModel, dtype: str = "float32",
               device: torch.device | None = None) -> rl.ComputePaths:
    """Find the fastest exact way of a rollout and of an update, and let `model` use them.

    dtype, device: the run's; None is the model's device. The largest difference allowed is
    LARGEST_GAP in float32, LARGEST_GAP_RECURRENT where layers are recurrent; in another `dtype` the
    mean one is also limited (see `try_ways`). Raises ValueError if no way is exact, or if the
    model's log-probs are not finite. The ways are kept for models of the same configuration in
    ~/.cache/multiturn_rl.
    """
    device = device or device_of(model)
    kept = cache_file(model, dtype, device)
    try:
        paths = rl.ComputePaths(**json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):
        paths = try_ways(first_layers(model, device), dtype)
        if paths.rollout and paths.update:  # a refusal may be due to these weights alone
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, json.dumps(paths._asdict()))
    rl.set_compute_paths(model, paths)
    if not paths.rollout or not paths.update:
        what = "rollout" if not paths.rollout else "update"
        gaps = ", ".join(f"{name.removeprefix(what).strip()} {gap:.2g}"
                         for name, gap in paths.gaps.items() if name.startswith(what))
        raise ValueError(f"models of the type {model.config.model_type} cannot be used: no {what} "
                         f"has the log-probs of the model's own forward pass (gaps: {gaps})")
    return paths


def try_ways(model: PreTrainedModel, dtype: str = "float32") -> rl.ComputePaths:
    """Try the ways in turn, the fastest first, until one is exact -> the exact ones, "" if none
    is.

    In another `dtype` than float32 a way is compared with the plain forward pass in that dtype. The
    mean gap may be LARGEST_MEAN_GAP, or as large as the mean gap between the plain pass in that
    dtype and in float32: log-probs of unlikely tokens are large numbers, and rounding them alone
    may cost more than LARGEST_MEAN_GAP.
    """
    limit = LARGEST_GAP_RECURRENT if is_recurrent(model.config) else LARGEST_GAP
    plays = make_plays(model.config.get_text_config().vocab_size)
    model.eval()
    oracle = plain(model, plays)
    if not math.isfinite(sum(map(sum, oracle))):
        raise ValueError("the model's log-probs are not finite: its weights are damaged")
    if dtype != "float32":
        with rl.compute_in(dtype, device_of(model)):
            oracle_of_dtype = plain(model, plays)
            rounding = statistics.mean(differences(plain, model, plays, oracle))
    found = {"rollout": "", "update": ""}
    gaps = {}
    for what, ways in (("rollout", ROLLOUT), ("update", UPDATE)):
        for name, way in ways.items():
            gap = max(differences(way, model, plays, oracle))
            gaps[f"{what} {name}"] = gap
            is_exact = gap <= limit
            if is_exact and dtype != "float32":
                with rl.compute_in(dtype, device_of(model)):
                    of_dtype = differences(way, model, plays, oracle_of_dtype)
                gaps[f"{what} {name} {dtype}"] = statistics.mean(of_dtype)
                is_exact = statistics.mean(of_dtype) <= max(LARGEST_MEAN_GAP, rounding)
            if is_exact:
                found[what] = name
                break
    return rl.ComputePaths(**found, gaps=gaps)


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
    count = max([2, *(1 + kinds.index(kind) for kinds in lists.values() for kind in kinds)])
    count = min(depth, max(count, 1 + (getattr(text, "first_k_dense_replace", 0) or 0)))
    for name, kinds in lists.items():
        setattr(text, name, kinds[:count])
    text.num_hidden_layers = count
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


def cache_file(model: PreTrainedModel, dtype: str, device: torch.device) -> Path:
    """Where the result for such a model is kept: a name for its configuration, dtype and device,
    and for the code that computes it."""
    parts = [model.config.to_json_string(), dtype, device.type, torch.__version__,
             transformers.__version__]
    parts += [Path(module.__file__).read_text() for module in (rl, engine)]
    parts.append(Path(__file__).read_text())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "multiturn_rl" / f"{key}.json"
