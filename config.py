"""Every flag of a training run, its default by kind of model and by world, and the check that it makes sense.

A flag left at None takes its default from the tables below: what the built-in tiny model needs is not what a real one
needs. The horizons' defaults are in schedule.py. eval.py plays with the same defaults.
"""

import importlib.util
import json
import os
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin cost 5x where cores are shared; read by torch

import torch  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402

import agent  # noqa: E402
import envs as worlds  # noqa: E402
import rl  # noqa: E402
import schedule  # noqa: E402
from worlds.agentgym import PROTOCOLS  # noqa: E402

# What a flag left at None becomes, for the tiny model and for real ones; a world's own line wins. Horizons: schedule.py
TINY = dict(steps=100, items_per_step=16, rollouts_per_item=8, minibatches=2, lr=4e-4, critic_lr=1e-3, max_tokens=32,
            max_length=4096, kl_coef=0.0, invalid_penalty=0.05, action_format="react", microbatch_tokens=8192,
            slots=128, dtype="float32", gradient_checkpointing=False, env_args="")
REAL = dict(steps=300, items_per_step=32, rollouts_per_item=4, minibatches=4, lr=1e-6, critic_lr=1e-5, max_tokens=512,
            max_length=10240, kl_coef=0.001, invalid_penalty=0.0, action_format="react", microbatch_tokens=16384,
            slots=32, dtype="bfloat16", gradient_checkpointing=True, env_args="")
WORLD_TINY = {"textcraft": dict(steps=90, invalid_penalty=0.0),  # few groups succeed: a penalty would be most of what they teach
              "sciworld": dict(steps=40, slots=32),  # 16 houses and a gigabyte a Java process; with more, and so more processes, resets came too late
              "searchqa": dict(action_format="tags", steps=300),
              # a browser's window a slot, and a low one: short pages
              "webarena": dict(action_format="backticks", items_per_step=8, rollouts_per_item=8, slots=32, max_length=12288, env_args="webarena.height=240")}
WORLD_REAL = {"textcraft": dict(rollouts_per_item=8, max_length=12288),
              "sciworld": dict(items_per_step=16, rollouts_per_item=8, max_tokens=200), "searchqa": dict(action_format="tags"),
              "webarena": dict(action_format="backticks", max_length=16384)}
LIMITS = ("max_tokens", "max_length", "invalid_penalty", "horizon_steps")  # which each world of a mixture has for itself
ALGOS = ("ppo", "grpo", "rloo", "reinforce_pp")


def arg(default: object, help: str) -> Any:
    """A flag: a field of a dataclass with its line of --help, which shows a default that is always the same."""
    shown = "" if default is None or default is False or default == "" else f" (default: {default})"
    return field(default=default, metadata={"help": help + shown})


@dataclass
class Config:
    env: str = arg("babyai", f"world: {', '.join(worlds.WORLDS)}; with --env_url any of {', '.join(PROTOCOLS)}; "
                             "several with weights: babyai:2,textcraft:1")
    algo: str = arg("grpo", "ppo | grpo | rloo | reinforce_pp")
    model: str = arg("tiny", "'tiny' (built in), a folder, or a hub id")
    env_url: str = arg("", "AgentGym server(s) http://host:port[,...] to play on instead of in this process; of several worlds: "
                           "'babyai=http://host:port textcraft=http://host:port'")
    data: str = arg("", "folder in the layout of AgentGym-RL-Data-ID; default: the item sets in data/")
    out: str = arg("", "run folder; default runs/ENV_ALGO_sSEED")
    resume: bool = arg(False, "continue the run in --out from its newest checkpoint")
    seed: int = arg(0, "every random number follows from it")
    steps: int | None = arg(None, "training steps")
    items_per_step: int | None = arg(None, "different items a step; a mixture's default is as many for each world as it has alone")
    rollouts_per_item: int | None = arg(None, "trajectories of each item: the group of GRPO and RLOO")
    minibatches: int | None = arg(None, "optimizer steps an epoch")
    epochs: int = arg(1, "passes over a step's trajectories")
    horizon: str = arg("", "largest number of turns, by stage: 6,13,20, or per world: 'babyai=6,13,20 textcraft=10,20,30'")
    horizon_steps: int | None = arg(None, "training steps a stage lasts; adaptive: at least two halves (rounded down), whose means it compares")
    horizon_schedule: str = arg("scaling_inter", "scaling_inter | fixed (one horizon throughout) | adaptive (a stage ends when success levels off)")
    max_tokens: int | None = arg(None, "largest reply, tokens")
    max_length: int | None = arg(None, "largest trajectory, tokens")
    temperature: float = arg(1.0, "of sampling")
    top_p: float = arg(1.0, "nucleus sampling; truncation makes training off-policy")
    top_k: int = arg(0, "0: off; truncation makes training off-policy")
    min_p: float = arg(0.0, "0: off; leaves out tokens below min_p times the likeliest one's probability; as above")
    slots: int | None = arg(None, "trajectories played at a time on each process")
    engine: str = arg("ragged", "ragged | hf: the model's own attention, all trajectories in step (slow; the reference)")
    arrival_order: bool | None = arg(None, "take environments' answers as they come, so runs are not bit-for-bit repeatable; default: with --env_url")
    deadline: float = arg(60.0, "seconds an environment has to answer")
    action_format: str | None = arg(None, " | ".join(agent.FORMATS))
    plan: bool = arg(False, "ask for a plan before the first action")
    reflect: bool = arg(False, "after an invalid action, and after a failed episode that is then tried again, ask what went wrong")
    env_args: str | None = arg(None, "keyword arguments of worlds in this process: 'searchqa.topk=5 searchqa.corpus=wiki.jsonl'")
    invalid_penalty: float | None = arg(None, "subtracted from the reward of a turn with an invalid action")
    turn_cost: float = arg(0.0, "taken off the reward of every turn")
    shaping: str = arg("none", "none | potential: pay progress as it comes, take it back at the end | progress: pay for it (textcraft, sciworld)")
    lr: float | None = arg(None, "AdamW's learning rate")
    critic_lr: float | None = arg(None, "the same for PPO's critic")
    lr_schedule: str = arg("constant", "constant | cosine (to a tenth, over --steps), after the warm-up")
    warmup_steps: int = arg(10, "steps over which the learning rates rise to their values (Adam's first steps are mostly noise)")
    gamma: float = arg(1.0, "discount a sampled token (ppo, reinforce_pp)")
    lam: float = arg(1.0, "lambda of GAE (ppo)")
    clip_low: float = arg(0.2, "the ratio is clipped below 1 - clip_low")
    clip_high: float = arg(0.2, "and above 1 + clip_high")
    value_clip: float = arg(0.5, "how far a value may move in one step (ppo)")
    kl_coef: float | None = arg(None, "weight of the KL to the starting model; 0: no reference model at all")
    kl_type: str = arg("k3", "k1 | abs | k2 | k3; k1 is for --kl_in reward only")
    kl_in: str = arg("loss", "loss | reward")
    entropy_coef: float = arg(0.0, "weight of an entropy bonus")
    normalize_std: bool = arg(True, "grpo: divide by the group's standard deviation, so that small differences count as much as large")
    aggregation: str = arg("token", "token | sequence: mean of the loss over tokens, or over trajectories' means")
    max_grad_norm: float = arg(1.0, "gradients are clipped to this norm")
    microbatch_tokens: int | None = arg(None, "positions in one forward and backward pass")
    dtype: str | None = arg(None, "arithmetic of the forward passes: float32 | bfloat16; trained weights are float32")
    gradient_checkpointing: bool | None = arg(None, "compute blocks again in the backward pass: a third slower, far less memory")
    lora_rank: int = arg(0, "0: train all weights; else LoRA's adapters of this rank alone (the extra lora), merged in final/")
    shard: bool | None = arg(None, "FSDP2: share out weights, gradients and optimizer; default: on GPUs, without --lora_rank")
    offload: bool = arg(False, "with --shard: keep the shares in the CPU's memory and update them there")
    min_entropy: float = arg(1e-4, "stop when the policy's entropy, nats a token, falls below this")
    max_kl: float = arg(10.0, "stop when `kl` or `kl_behaviour`, nats a token, rises above this")
    save_every: int = arg(50, "steps between checkpoints")
    keep: int = arg(2, "checkpoints kept")
    report_to: str = arg("none", "none | tensorboard | wandb: metrics go there, too (extras of these names)")
    worlds: dict = field(init=False)  # world -> its weight and its own limits: LIMITS, where no flag says otherwise


class Parser(HfArgumentParser):
    """Says what is wrong by a ValueError."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        for action in self._actions:  # it gives --no_FLAG the help of --FLAG
            if (name := action.option_strings[0]).startswith("--no_"):
                action.help = f"the same as --{name.removeprefix('--no_')} false"

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def servers(env_url: str, names: Iterable[str]) -> dict[str, list[str]]:
    """World -> its servers in --env_url; none is this process. Raises ValueError for what cannot be read.

    >>> servers("babyai=http://a:1,http://b:1", ["babyai", "textcraft"])
    {'babyai': ['http://a:1', 'http://b:1'], 'textcraft': []}
    """
    names = list(names)
    parts = [part.partition("=") for part in env_url.split()] if "=" in env_url or len(names) > 1 else [(names[0], "=", env_url)]
    for name, equals, _ in parts:  # a server has one world
        if not equals or name not in names:
            raise ValueError(f"cannot read --env_url '{env_url}'; write '" + " ".join(f"{n}=http://host:port" for n in names) + "'")
    lists = {name: urls for name, _, urls in parts}
    return {name: [url for url in lists.get(name, "").split(",") if url] for name in names}


def mixture(env: str) -> dict[str, float]:
    """The worlds of --env and their weights. Raises ValueError for what cannot be read.

    >>> mixture("babyai:2,textcraft")
    {'babyai': 2.0, 'textcraft': 1.0}
    """
    found = {}
    for part in env.split(","):
        name, _, weight = part.strip().partition(":")
        if not re.fullmatch(r"(\d+(\.\d+)?)?", weight) or not float(weight or 1) or name in found:
            raise ValueError(f"cannot read --env '{env}'; write babyai, or babyai:2,textcraft:1 with weights above 0")
        found[name] = float(weight or 1)
    return found


def merged(env_args: str | None, *defaults: str) -> str:
    """--env_args, before it the defaults that it does not name.

    >>> merged("searchqa.topk=5", "webarena.height=240"), merged("webarena.height=720", "webarena.height=240"), merged(None, "", "")
    ('webarena.height=240 searchqa.topk=5', 'webarena.height=720', '')
    """
    given = (env_args or "").split()
    named = {part.split("=")[0] for part in given}
    return " ".join([part for default in defaults for part in default.split() if part.split("=")[0] not in named] + given)


def presets(model: str, world: str) -> dict:
    """What flags left at None become for this model ('tiny' or any other) and this world."""
    horizons, table, own = (schedule.TINY, TINY, WORLD_TINY) if model == "tiny" else (schedule.UPSTREAM, REAL, WORLD_REAL)
    horizon = horizons.get(world, schedule.UPSTREAM["babyai"])
    return table | own.get(world, {}) | {"horizon": horizon, "horizon_steps": horizon.every}


def parse_config(argv: list[str] | None = None) -> Config:
    """The command line, checked and with every default filled in. Raises ValueError with one clear line."""
    tables = "\n".join(f"  {name:9} " + ", ".join(f"{w} {','.join(map(str, p.rounds))} (a stage {p.every} steps)"
                                                   for w, p in table.items())
                       for name, table in (("tiny", schedule.TINY), ("others", schedule.UPSTREAM)))
    defaults = "\n".join(f"  {name:9} " + ", ".join(f"{k} {v}" for k, v in table.items() if v != "") for name, table in
                         (("tiny", TINY), *(("  " + w, t) for w, t in WORLD_TINY.items()),
                          ("others", REAL), *(("  " + w, t) for w, t in WORLD_REAL.items())))
    parser = Parser(Config, description="Multi-turn reinforcement learning of an LLM agent: torchrun train.py --env babyai --algo grpo", allow_abbrev=False,
                    epilog=f"default horizons by --model:\n{tables}\nother defaults by --model:\n{defaults}")
    parser.formatter_class = lambda prog: RawDescriptionHelpFormatter(prog, max_help_position=30)
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]}; python train.py --help lists all")
    weights = mixture(cfg.env)
    for world, urls in servers(cfg.env_url, weights).items():
        worlds.check_name(world, urls)
    default = {world: presets(cfg.model, world) for world in weights}
    cfg.worlds = {world: {"weight": weight} | {name: default[world][name] if getattr(cfg, name) is None else getattr(cfg, name)
                                               for name in LIMITS} for world, weight in weights.items()}
    for name in LIMITS:  # of a mixture the largest, to be read; the worlds' own count
        setattr(cfg, name, max(own[name] for own in cfg.worlds.values()))
    cfg.env_args = merged(cfg.env_args, *(d["env_args"] for w, d in default.items() if not servers(cfg.env_url, weights)[w]))
    own_form = ("searchqa", "webarena")  # what a reply looks like there is the world's, whatever the flag says
    if cfg.action_format is None and len(weights) > 1:
        cfg.action_format = next((default[w]["action_format"] for w in weights if w not in own_form), None)
    for name, value in default[next(iter(weights))].items():  # for the whole run the first world's
        if getattr(cfg, name) is None:
            setattr(cfg, name, value * len(weights) if name == "items_per_step" else value)
    if cfg.arrival_order is None:
        cfg.arrival_order = bool(cfg.env_url)
    if cfg.shard is None:
        cfg.shard = torch.cuda.is_available() and not cfg.lora_rank
    last = cfg.horizon_schedule == "fixed"
    rounds = {w: ",".join(map(str, d["horizon"].rounds[-1 if last else 0:])) for w, d in default.items()}
    cfg.horizon = cfg.horizon or (" ".join(f"{w}={r}" for w, r in rounds.items()) if len(rounds) > 1 else next(iter(rounds.values())))
    cfg.out = cfg.out or f"runs/{re.sub(r'[^a-z0-9.]+', '_', cfg.env)}_{cfg.algo}_s{cfg.seed}"
    check(cfg)
    return cfg


def check(cfg: Config) -> None:
    """Everything that can be known to be wrong before anything is written: ValueError, one line."""
    choices = {"algo": ALGOS, "kl_type": ("k1", "abs", "k2", "k3"), "kl_in": ("loss", "reward"),
               "aggregation": ("token", "sequence"), "action_format": tuple(agent.FORMATS),
               "dtype": ("float32", "bfloat16"), "engine": ("ragged", "hf"), "lr_schedule": ("constant", "cosine"),
               "report_to": ("none", "tensorboard", "wandb"), "shaping": ("none", "potential", "progress")}
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            raise ValueError(f"unknown --{name} '{getattr(cfg, name)}'; choose from {', '.join(allowed)}")
    for name in ("steps", "items_per_step", "rollouts_per_item", "minibatches", "epochs", "max_tokens", "max_length", "slots",
                 "deadline", "temperature", "lr", "critic_lr", "microbatch_tokens", "save_every", "keep", "max_grad_norm"):
        if not 0 < getattr(cfg, name) < float("inf"):
            raise ValueError(f"--{name} must be positive, not {getattr(cfg, name)}")
    for name in ("kl_coef", "entropy_coef", "invalid_penalty", "turn_cost", "warmup_steps", "clip_low", "clip_high", "seed", "top_k",
                 "value_clip", "lora_rank", "min_entropy", "max_kl"):
        if not 0 <= getattr(cfg, name) < float("inf"):
            raise ValueError(f"--{name} must not be negative, but is {getattr(cfg, name)}")
    if not 0 <= cfg.min_p < 1:
        raise ValueError(f"--min_p must lie in [0, 1), not {cfg.min_p}")
    for name in ("gamma", "lam", "top_p"):
        if not 0 < getattr(cfg, name) <= 1:
            raise ValueError(f"--{name} must lie in (0, 1], not {getattr(cfg, name)}")
    if cfg.kl_in == "loss" and cfg.kl_type == "k1":
        raise ValueError("--kl_type k1 has no expected gradient as a loss; use k3, or --kl_in reward")
    if cfg.algo in ("grpo", "rloo") and cfg.rollouts_per_item < 2:
        raise ValueError(f"--algo {cfg.algo} compares the rollouts of an item: --rollouts_per_item must be at least 2")
    for flag, package, extra in ((cfg.lora_rank, "peft", "lora"), (cfg.report_to == "tensorboard", "tensorboard", "tensorboard"),
                                 (cfg.report_to == "wandb", "wandb", "wandb")):
        if flag and importlib.util.find_spec(package) is None:
            raise ValueError(f'{package} is missing: pip install -e ".[{extra}]"')
    if cfg.shaping != "none" and cfg.gamma < 1:
        raise ValueError("--shaping is for --gamma 1")  # else a long reply's last token gets gamma^-length of the potential
    if cfg.offload and not (cfg.shard and torch.cuda.is_available()):
        raise ValueError("--offload keeps in the CPU's memory what --shard shares out among GPUs")
    for world, count in items_of_a_step(cfg).items():
        rounds, every = schedule.parse_rounds(cfg.horizon, world), cfg.worlds[world]["horizon_steps"]
        schedule.horizon_at(0, rounds, every, "scaling_inter" if cfg.horizon_schedule == "adaptive" else cfg.horizon_schedule)
        items = worlds.items(world, "train", cfg.data or None)
        for item in items:
            if worlds.split_item(item)[0] != world:
                raise ValueError(f"the training set of {world} holds the item '{item}'")
        if not count:
            raise ValueError(f"--items_per_step is {cfg.items_per_step}, which leaves none for {world}")
        if len(items) < count:
            raise ValueError(f"a step takes {count} items of {world} (--items_per_step), but the training set has {len(items)}")
    rl.model_path(cfg.model)
    out = Path(cfg.out)
    above = next(p for p in out.absolute().parents if p.exists())
    if out.is_file() or not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"cannot make the run folder {out}")
    if cfg.resume and not out.is_dir():
        raise ValueError(f"nothing to resume: there is no folder {out}")
    if cfg.resume and (out / "config.json").exists():
        was, may_change = json.loads((out / "config.json").read_text()), {"resume", "out", "steps", "save_every", "keep",
                                                                          "env_url", "env_args", "deadline", "worlds", "arrival_order", "shard", "offload",
                                                                          "gradient_checkpointing", "report_to", "min_entropy", "max_kl"}
        for name in [f.name for f in fields(cfg) if f.name not in may_change]:
            if was.get(name, getattr(cfg, name)) != getattr(cfg, name):
                raise ValueError(f"{out} was started with --{name} {was[name]}, not {getattr(cfg, name)}")
        for world, name in [(w, n) for w, own in was.get("worlds", {}).items() for n in own if own[n] != cfg.worlds[w].get(n)]:
            raise ValueError(f"{out} was started with --{name} {was['worlds'][world][name]} for {world}, not {cfg.worlds[world].get(name)}")
    if not cfg.resume and rl.checkpoints(out):
        raise ValueError(f"{out} holds a run already; add --resume to continue it or choose another --out")
    for world, urls in servers(cfg.env_url, cfg.worlds).items():
        if urls and worlds.env_options(cfg.env_args, cfg.worlds).get(world):
            raise ValueError(f"--env_args is for worlds in this process, and {world} is played on a server")
        worlds.check_env(world, urls, **worlds.env_options(cfg.env_args, cfg.worlds).get(world, {}))


def items_of_a_step(cfg: Config) -> dict[str, int]:
    """How many of a step's items are of each world: in proportion to the weights, what is left over to the first ones."""
    total = sum(own["weight"] for own in cfg.worlds.values())
    counts = {world: int(cfg.items_per_step * own["weight"] / total) for world, own in cfg.worlds.items()}
    for world in list(counts)[:cfg.items_per_step - sum(counts.values())]:
        counts[world] += 1
    return counts
