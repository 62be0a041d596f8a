"""Every flag of a training run: its type, its range, its default, and what it does.

A flag whose default is None takes it from the presets below, by model and by world: the built-in
tiny model needs other settings than a real one. `parse_config` reads the command line, fills in
every default and refuses what cannot work before anything is written. eval.py uses the same presets
and rules.
"""

import importlib.util
import inspect
import json
import math
import os
import re
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, get_type_hints

# Threads that spin while they wait slow other processes down by up to five times where cores are
# shared. PyTorch reads the variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Allocate large CPU tensors in pages of 2 MB. Page faults otherwise take a tenth of an update.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402

import checkpoint  # noqa: E402
import envs  # noqa: E402
import rl  # noqa: E402
import schedule  # noqa: E402
from agent import AGENTS, FORMATS, PARSES, hash_of_sources, load_agent  # noqa: E402
from agent import settings_of  # noqa: E402
from algos import ALGOS, LOSSES  # noqa: E402

# ---- presets: defaults that depend on the model and on the world ----


class HorizonPreset(NamedTuple):
    rounds: tuple[int, ...]  # the horizons, in the order of training
    every: int  # training steps at each horizon but the last
    eval_horizon: int  # the horizon in evaluation


PUBLISHED_HORIZONS = {  # AgentGym-RL's, for real models
    "babyai": HorizonPreset((6, 13, 20), 100, 20),
    "textcraft": HorizonPreset((10, 20, 30), 100, 30),
    "sciworld": HorizonPreset((10, 20, 30), 100, 30),
    "searchqa": HorizonPreset((5, 8, 10), 100, 30),
    "webarena": HorizonPreset((8, 12, 15), 80, 15),
    "textworld": HorizonPreset((5, 10, 15), 100, 15),  # not among AgentGym-RL's worlds
}
TINY_HORIZONS = {  # for the built-in tiny model
    "babyai": HorizonPreset((3, 4), 30, 4),
    "textcraft": HorizonPreset((3, 5, 8), 25, 8),
    "sciworld": HorizonPreset((4, 6), 20, 6),
    "searchqa": HorizonPreset((2, 3, 4), 30, 4),
    "webarena": HorizonPreset((3, 5, 8), 30, 8),
    "textworld": HorizonPreset((4, 8), 20, 8),
}
TINY = dict(
    steps=100, items_per_step=16, rollouts_per_item=8, minibatches=2, lr=4e-4, critic_lr=1e-3,
    max_tokens=32, max_length=4096, kl_coef=0.0, invalid_penalty=0.05, action_format="react",
    microbatch_tokens=8192, slots=128, dtype="float32", gradient_checkpointing=False, env_args="",
)
REAL = dict(
    steps=300, items_per_step=32, rollouts_per_item=4, minibatches=4, lr=1e-6, critic_lr=1e-5,
    max_tokens=512, max_length=10240, kl_coef=0.001, invalid_penalty=0.0, action_format="react",
    microbatch_tokens=16384, slots=32, dtype="bfloat16", gradient_checkpointing=True, env_args="",
)
REAL_ON_CPU = dict(  # without CUDA these win over REAL and WORLD_REAL
    # With these values, training a model of 135M parameters took 10 to 16 GB, KV cache included.
    max_tokens=64, max_length=6144, microbatch_tokens=4096, gradient_checkpointing=False,
)
FAST_BFLOAT16 = {"cuda", "avx512_bf16", "amx_bf16"}  # without any of these REAL's dtype is float32
WORLD_TINY = {  # a world's own defaults win over TINY
    # Few groups succeed here: with a penalty, most of the gradient would come from the penalty.
    "textcraft": dict(steps=90, invalid_penalty=0.0),
    # A Java process holds 32 environments. With more processes, resets were too slow.
    "sciworld": dict(steps=40, slots=32),
    "searchqa": dict(action_format="tags", steps=300),
    "textworld": dict(steps=40, items_per_step=8),
    # Each slot is a browser window. A low window gives short pages.
    "webarena": dict(action_format="backticks", items_per_step=8, rollouts_per_item=8, slots=32,
                     max_length=12288, env_args="webarena.height=240"),
}
WORLD_REAL = {  # a world's own defaults win over REAL
    "textcraft": dict(rollouts_per_item=8, max_length=12288),
    "sciworld": dict(items_per_step=16, rollouts_per_item=8, max_tokens=200),
    "searchqa": dict(action_format="tags"),
    "webarena": dict(action_format="backticks", max_length=16384),
}


def machine(cpuinfo: str | Path = "/proc/cpuinfo") -> set[str]:
    """The flags of this machine's CPU, and "cuda" if there is a GPU."""
    found = set()
    if torch.cuda.is_available():
        found.add("cuda")
    if Path(cpuinfo).exists():
        lines = re.findall(r"^flags\s*:(.*)", Path(cpuinfo).read_text(), re.MULTILINE)
        found.update(*(line.split() for line in lines))
    return found


# Worlds whose own prompts say what a reply looks like: --action_format has no effect there.
OWN_FORMATS = {world for world, own in WORLD_REAL.items() if "action_format" in own}


def presets(model: str, world: str) -> dict:
    """-> flag name -> its default for this model (made of 'tiny', or any other), this world and
    this machine. A model that a run has trained keeps the action format (if a world of the run used
    it), the system message and the arguments of the chat template of that run.

    Besides flags it holds "rounds" (tuple of int), "horizon_steps" and "eval_horizon".
    """
    if first_model(model) == "tiny":
        horizons, values = TINY_HORIZONS, TINY | WORLD_TINY.get(world, {})
    else:
        horizons, values = PUBLISHED_HORIZONS, REAL | WORLD_REAL.get(world, {})
        has = machine()
        is_served = model.startswith("openai:")  # another machine computes it
        if "cuda" not in has and not is_served:
            values |= REAL_ON_CPU
        if not has & FAST_BFLOAT16:
            values["dtype"] = "float32"
    horizon = horizons.get(world, PUBLISHED_HORIZONS["babyai"])
    run = run_of(model)
    uses_format = run and not mixture(run["env"]).keys() <= OWN_FORMATS
    if uses_format and values["action_format"] == "react":
        values["action_format"] = run["action_format"]
    return values | {
        "rounds": horizon.rounds, "horizon_steps": horizon.every,
        "eval_horizon": horizon.eval_horizon,
        "system": run.get("system", ""), "chat_args": run.get("chat_args", ""),
        "parse": "lenient",
    }


RUN_FILE = "run.json"  # in final/: the config.json of its run


def run_of(model: str) -> dict:
    """The settings of the training run that wrote this model folder: its own RUN_FILE, which a copy
    of final/ takes along, or the config.json of the run folder that it lies in.

    {} if there is no such run. Raises ValueError for a file that is not JSON.
    """
    path = Path(model) / RUN_FILE
    if not path.exists():
        folder = Path(model).resolve().parent
        if folder.name == "checkpoints":
            folder = folder.parent
        path = folder / "config.json"
    if not Path(model).is_dir() or not path.exists():
        return {}
    run = read_config_json(path)
    is_run = {"env", "algo", "horizon"} <= set(run)  # otherwise it is some model's config.json
    return run if is_run else {}


def read_config_json(path: Path) -> dict:
    """A config.json. Raises ValueError for one that is damaged."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    older = {"parse": "strict", "prompts": None}  # of runs from before these flags
    return older | found


def first_model(model: str) -> str:
    """The model with which training began, over any number of runs: 'tiny' for everything that was
    made of the tiny model. Raises ValueError for runs that began with each other's models."""
    seen = set()
    while run := run_of(model):
        if "first_model" in run:  # absent in runs of older versions
            return run["first_model"]
        folder = Path(model).resolve()
        if folder in seen:
            raise ValueError(f"{model}: by their config.json, these runs began with each other's "
                             "models: copy the model to another folder")
        seen.add(folder)
        model = run["model"]
    return model


def model_label(model: str) -> list[str]:
    """The model's part of the default run folder's name; [] for "tiny", which is not named.

    >>> model_label("tiny"), model_label("Qwen/Qwen2.5-7B-Instruct"), model_label("runs/warm/final")
    ([], ['qwen2.5-7b-instruct'], ['warm'])
    """
    if model == "tiny":
        return []
    path = Path(model)
    if path.name == "final":
        path = path.parent
    elif path.parent.name == "checkpoints":
        path = path.parent.parent
    return [re.sub(r"[^a-z0-9.]+", "-", path.name.lower())]


def config_json_in(out: str) -> dict:
    """The config.json of the run in this folder; {} if there is none."""
    path = Path(out) / "config.json"
    return read_config_json(path) if path.exists() else {}


def started_with(out: str, world: str) -> dict:
    """Flag -> the value that the run in this folder was started with, for the flags whose defaults
    depend on the machine or have changed between versions. A resumed run keeps these values. {} if
    the folder holds no run."""
    run = config_json_in(out)
    own = run | run.get("worlds", {}).get(world, {})
    return {name: own[name] for name in (*REAL_ON_CPU, "dtype", "parse") if name in own}


# ---- ranges: each rule raises ValueError for a flag's value that makes no sense ----


def positive(name: str, value: float) -> None:
    """Above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"--{name} must be positive, not {value}")


def not_negative(name: str, value: float) -> None:
    """0 or above, and finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"--{name} must not be negative, but is {value}")


def below_one(name: str, value: float) -> None:
    """From 0 on, and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"--{name} must lie in [0, 1), not {value}")


def fraction(name: str, value: float) -> None:
    """Above 0, and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"--{name} must lie in (0, 1], not {value}")


def one_of(*choices: str) -> Callable[[str, str], None]:
    """-> the rule that the value is one of `choices`, which --help shows."""
    def rule(name: str, value: str) -> None:
        if value not in choices:
            raise ValueError(f"unknown --{name} '{value}'; choose from {', '.join(choices)}")
    rule.choices = choices
    return rule


def chat_arguments(name: str, value: str) -> None:
    """Readable as the arguments of a chat template."""
    envs.read_settings(value, "--chat_args")


def check_ranges(cfg: object) -> None:
    """Apply the rule in each field's annotation. Raises ValueError for the first value that breaks
    one."""
    for name, hint in get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        if value is None:
            continue
        for rule in getattr(hint, "__metadata__", ()):
            rule(name, value)


# ---- the flags ----


_headings = [""]  # the last one is the heading of the flags that are being defined


def flag_group(heading: str) -> None:
    """The flags that follow in the body of a dataclass stand below this heading in --help."""
    _headings.append(heading)


def arg(default: object, help: str) -> Any:
    """A flag: a field of a dataclass with its line of --help, which shows a default other than
    None, False or ""."""
    if default is not None and default is not False and default != "":
        help += f" (default: {default})"
    return field(default=default, metadata={"help": help, "heading": _headings[-1]})


@dataclass
class WorldSettings:
    """What each world of a run has for itself."""

    weight: float  # its share of a step's items, in proportion to the other worlds' weights
    rounds: list[int]  # the horizon's stages
    horizon_steps: int
    max_tokens: int
    max_length: int
    invalid_penalty: float


# If one of these flags is given, it applies to every world of a mixture. Otherwise each world has
# its own default.
LIMITS = ("horizon_steps", "max_tokens", "max_length", "invalid_penalty")
EVAL_ITEMS = 64  # of --eval_every


@dataclass
class RunConfig:
    """The flags that train.py and sft.py share."""

    flag_group("run")
    env: str = arg("babyai", f"world: {', '.join(envs.WORLDS)}; several with weights: "
                             "babyai:2,textcraft:1")
    model: str = arg("tiny", "'tiny' (built in), 'smollm2' (made by data/get_smollm2.py), "
                             "a folder, a GGUF file, or a hub id")
    chat_template: str = arg("", "file with a chat template (Jinja), for a model that has none")
    system: str | None = arg(None, "text of a system message before the instructions; default: "
                                   "that of the run which wrote --model, else none")
    chat_args: Annotated[str | None, chat_arguments] = arg(
        None, "switches of the chat template: enable_thinking=false, several with spaces between "
              "them, or a JSON object; default: those of the run which wrote --model")
    data: str = arg(
        "", "folder in the layout of AgentGym-RL-Data-ID; default: the item sets in data/")
    out: str = arg("", "run folder; default runs/ENV_ALGO_sSEED, with a model other than tiny "
                       "runs/ENV_ALGO_MODEL_sSEED (ALGO of sft.py: sft)")
    resume: bool = arg(False, "continue the run in --out from its newest checkpoint")
    seed: Annotated[int, not_negative] = arg(0, "every random number follows from it")

    flag_group("trajectories")
    horizon: str = arg("", "largest number of turns, by stage: 6,13,20, or per world: "
                           "'babyai=6,13,20 textcraft=10,20,30'")
    max_tokens: Annotated[int | None, positive] = arg(None, "largest reply, tokens")
    max_length: Annotated[int | None, positive] = arg(
        None, "largest segment, tokens: with the agent react the largest trajectory")
    action_format: Annotated[str | None, one_of(*FORMATS)] = arg(None, " | ".join(FORMATS))
    parse: Annotated[str | None, one_of(*PARSES)] = arg(
        None, "strict: a reply holds one action, exactly as --action_format has it | lenient: it "
              "is read as AgentGym's client of the world reads it (docs/worlds.md); default: "
              "lenient")
    agent: str = arg(
        "react", f"{' | '.join(AGENTS)}, or a generator function of your own: FILE.py:NAME or "
                 "module:NAME (docs/agents.md)")
    agent_args: str = arg("", "settings of the agent, NAME=VALUE: keep=2")
    history: Annotated[str | None, one_of("append", "template")] = arg(
        None, "append: earlier replies stay in the prompt as they were sampled | template: as the "
              "chat template writes them, in a new segment where it rewrites them; default: "
              "template if it drops thoughts")
    prompts: str | None = arg(
        None, "JSON file with other instructions: {WORLD: {'prompt': the whole first message, "
              "'reply': the fixed reply to it}, ...} in JSON's double quotes; default: those of "
              "the run which wrote --model; '': none")
    env_args: str | None = arg(None, "keyword arguments of worlds in this process: "
                                     "'searchqa.topk=5 searchqa.corpus=wiki.jsonl'")
    slots: Annotated[int | None, positive] = arg(
        None, "trajectories that each process plays at the same time")
    graphs: bool = arg(True, "on a GPU, record decode steps as CUDA graphs; false: run them "
                             "eagerly, more slowly")

    flag_group("optimization")
    lr: Annotated[float | None, positive] = arg(None, "AdamW's learning rate")
    lr_schedule: Annotated[str, one_of("constant", "cosine")] = arg(
        "constant", "constant | cosine (to a tenth, over all steps), after the warm-up")
    warmup_steps: Annotated[int, not_negative] = arg(
        10, "steps over which the learning rates rise to their values (Adam's first steps are "
            "mostly noise)")
    max_grad_norm: Annotated[float, positive] = arg(1.0, "gradients are clipped to this norm")

    flag_group("memory and precision")
    microbatch_tokens: Annotated[int | None, positive] = arg(
        None, "largest number of tokens in one forward and backward pass")
    dtype: Annotated[str | None, one_of("float32", "bfloat16")] = arg(
        None, "arithmetic of the forward passes: float32 | bfloat16; trained weights are float32")
    gradient_checkpointing: bool | None = arg(
        None, "compute blocks again in the backward pass: a third slower, far less memory")
    lora_rank: Annotated[int, not_negative] = arg(
        0, "0: train all weights; else only LoRA adapters of this rank (needs the extra "
           "lora), merged into the weights in final/")
    shard: bool | None = arg(None, "FSDP2: shard weights, gradients and optimizer states over the "
                                   "ranks; default: on GPUs, without --lora_rank")
    offload: bool = arg(False, "with --shard: keep the shards in CPU memory and update them there")

    flag_group("evaluating, saving, reporting")
    eval_every: Annotated[int, not_negative] = arg(
        0, f"steps between evaluations on {EVAL_ITEMS} held-out items of each world, always the "
           "same; 0: none")
    save_every: Annotated[int, positive] = arg(50, "steps between checkpoints")
    keep: Annotated[int, positive] = arg(2, "checkpoints kept")
    report_to: Annotated[str, one_of("none", "tensorboard", "wandb")] = arg(
        "none", "none | tensorboard | wandb: metrics go there, too (extras of these names)")

    worlds: dict[str, WorldSettings] = field(init=False)  # filled in by `fill_in`
    first_model: str = field(init=False)  # what --model was made of, by `first_model`
    # What --prompts holds, by world. --resume and eval.py take it from the run's config.json.
    prompt_texts: dict[str, dict[str, str]] = field(init=False)
    agent_sha256: str = field(init=False)  # of the agent's source: `agent.hash_of_sources`


@dataclass
class Config(RunConfig):
    """The flags of train.py."""

    flag_group("run")
    env: str = arg("babyai", f"world: {', '.join(envs.WORLDS)}; with --env_url any of "
                             f"{', '.join(envs.server_worlds())}; several with "
                             "weights: babyai:2,textcraft:1")
    algo: str = arg(
        "grpo", f"{' | '.join(ALGOS)}, or the name of a file in ideas/, FILE.py:NAME, "
                "module:NAME")
    algo_args: str = arg("", "settings of the algorithm, NAME=VALUE: gamma=0.99 lam=0.95")
    env_url: str = arg(
        "", "AgentGym's or OpenEnv's server(s) http://host:port[,...] to play on instead of in "
            "this process; of several worlds: 'babyai=http://host:port textcraft=http://host:port'")

    flag_group("how much is played and trained")
    steps: Annotated[int | None, positive] = arg(None, "training steps")
    turns: Annotated[int, not_negative] = arg(
        0, "end before --steps when less than half of the last step's environment turns are left "
           "of this many; 0: no limit")
    items_per_step: Annotated[int | None, positive] = arg(
        None, "distinct items per step; default for several worlds: that of the first world, times "
              "their number")
    rollouts_per_item: Annotated[int | None, positive] = arg(
        None, "trajectories of each item: the group of GRPO and RLOO")
    minibatches: Annotated[int | None, positive] = arg(None, "optimizer steps an epoch")
    epochs: Annotated[int, positive] = arg(1, "passes over a step's trajectories")

    flag_group("horizon")
    horizon_steps: int | None = arg(
        None, "training steps of a stage; adaptive: success is averaged over windows of half as "
              "many steps")
    horizon_schedule: Annotated[str, one_of("scaling_inter", "fixed", "adaptive")] = arg(
        "scaling_inter", "scaling_inter | fixed (one horizon throughout) | adaptive (a stage ends "
                         "when success levels off)")

    flag_group("trajectories")
    temperature: Annotated[float, positive] = arg(1.0, "sampling temperature")
    engine: Annotated[str, one_of("ragged", "hf")] = arg(
        "ragged", "ragged | hf: the model's own attention, all trajectories in lockstep (slow; the "
                  "reference)")
    arrival_order: bool | None = arg(
        None, "take environments' answers as they come, and deal trajectories to processes as they "
              "ask, so runs are not bit-for-bit repeatable; default: true with --env_url, else "
              "false")
    deadline: Annotated[float, positive] = arg(60.0, "seconds an environment has to answer")
    create_deadline: Annotated[float, positive] = arg(
        300.0, "seconds to create an environment; not counted in --deadline")
    plan: bool = arg(False, "agent react: ask for a plan before the first action")
    reflect: bool = arg(False, "agent react: ask what went wrong after an invalid action, and "
                               "after a failed episode, which is then tried again")

    flag_group("rewards")
    invalid_penalty: Annotated[float | None, not_negative] = arg(
        None, "subtracted from the reward of a turn with an invalid action")
    turn_cost: Annotated[float, not_negative] = arg(0.0, "subtracted from each turn's reward")
    shaping: Annotated[str, one_of("none", "potential", "progress")] = arg(
        "none", "none | potential: reward progress, and subtract the sum of these rewards at the "
                "end | progress: reward progress (textcraft, sciworld, textworld)")

    flag_group("optimization")
    critic_lr: Annotated[float | None, positive] = arg(
        None, "AdamW's learning rate for PPO's critic")
    loss: str = arg(
        "ppo", f"{' | '.join(LOSSES)}, or the name of a file in ideas/, FILE.py:NAME, "
               "module:NAME")
    loss_args: str = arg("", "settings of the loss, NAME=VALUE: clip_low=0.2 clip_high=0.28")
    value_clip: Annotated[float, positive] = arg(
        0.5, "clip range of the critic's values around those before the update (ppo)")
    kl_coef: Annotated[float | None, not_negative] = arg(
        None, "weight of the KL to the starting model; 0: no reference model at all")
    kl_type: Annotated[str, one_of("k1", "abs", "k2", "k3")] = arg(
        "k3", "KL estimator (see algos.kl); k1 only with --kl_in reward")
    kl_in: Annotated[str, one_of("loss", "reward")] = arg(
        "loss", "add the KL to the loss, or subtract it from the rewards")
    entropy_coef: Annotated[float, not_negative] = arg(0.0, "weight of an entropy bonus")
    aggregation: Annotated[str, one_of("token", "sequence")] = arg(
        "token", "token | sequence: mean of the loss over tokens, or over trajectories' means")

    flag_group("stopping")
    min_entropy: Annotated[float, not_negative] = arg(
        1e-4, "stop when the policy's entropy, nats a token, falls below this")
    max_kl: Annotated[float, not_negative] = arg(
        10.0, "stop when `kl` or `kl_behaviour`, nats a token, rises above this")

    @property
    def advantage(self) -> Callable[..., Any]:
        """The function of --algo with its settings. Raises ValueError."""
        return envs.load_function(self.algo, ALGOS, "advantage", self.algo_args)


# What may differ between a run and its continuation by --resume. `worlds` is compared entry by
# entry.
MAY_CHANGE = {
    "resume", "out", "steps", "turns", "eval_every", "save_every", "keep", "env_url",
    "env_args", "deadline", "create_deadline", "worlds", "arrival_order", "shard", "offload",
    "gradient_checkpointing", "report_to", "min_entropy", "max_kl", "graphs",
    "slots", "microbatch_tokens", "first_model",
}


# ---- reading a command line ----


def shown_values(hint: Any) -> str:
    """What --help shows as the values of a flag with this type: its choices, or their kind."""
    for rule in getattr(hint, "__metadata__", ()):
        if hasattr(rule, "choices"):
            return "|".join(rule.choices)
    own_type = hint.__origin__ if hasattr(hint, "__metadata__") else hint  # of Annotated
    for kind, shown in (("bool", "true|false"), ("int", "N"), ("float", "X")):
        if kind in str(own_type):
            return shown
    return "TEXT"


class Parser(HfArgumentParser):
    """An ArgumentParser over a dataclass's fields that raises ValueError instead of leaving the
    process. Its --help has the flags in groups."""

    def __init__(self, config_class: type, program: str, **kw: Any) -> None:
        self.groups = {}  # heading -> the group of its flags
        self.hints = get_type_hints(config_class, include_extras=True)  # flag -> its type
        super().__init__(config_class, allow_abbrev=False, usage=f"{program} [--FLAG VALUE] ...",
                         **kw)
        self.formatter_class = lambda prog: RawDescriptionHelpFormatter(prog, max_help_position=30)

    def add_argument(self, *names: str, heading: str = "", **kw: Any) -> Action:
        """HfArgumentParser calls it for each field, with the field's metadata."""
        if not heading:
            return super().add_argument(*names, **kw)
        if heading not in self.groups:
            self.groups[heading] = self.add_argument_group(heading)
        action = self.groups[heading].add_argument(*names, **kw)
        if names[0].startswith("--no_"):  # HfArgumentParser gives it the help of --FLAG
            action.help = f"the same as --{names[0].removeprefix('--no_')} false"
        else:
            action.option_strings = [names[0]]  # --max-tokens is accepted, and not shown
            action.metavar = shown_values(self.hints[action.dest])
        return action

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_flags(config_class: type, argv: list[str] | None, program: str, description: str,
               epilog: str) -> Any:
    """argv (default: sys.argv) -> an instance of `config_class`. Raises ValueError for an unknown
    flag."""
    parser = Parser(config_class, program, description=description, epilog=epilog)
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]}; python {program} --help lists all")
    return cfg


def servers(env_url: str, names: Iterable[str]) -> dict[str, list[str]]:
    """World -> its servers in --env_url, [] for a world that is played in this process. Raises
    ValueError if --env_url cannot be read.

    >>> servers("babyai=http://a:1,http://b:1", ["babyai", "textcraft"])
    {'babyai': ['http://a:1', 'http://b:1'], 'textcraft': []}
    """
    names = list(names)
    if "=" in env_url or len(names) > 1:  # a server has one world, so each entry names its world
        parts = [part.partition("=") for part in env_url.split()]
    else:
        parts = [(names[0], "=", env_url)]
    for name, equals, _ in parts:
        if not equals or name not in names:
            example = " ".join(f"{n}=http://host:port" for n in names)
            raise ValueError(f"cannot read --env_url '{env_url}'; write '{example}'")
    lists = {}
    for name, _, urls in parts:
        if env_url and not urls.strip(","):
            raise ValueError(f"--env_url '{env_url}' has no address for {name}")
        if name in lists:
            raise ValueError(f"--env_url '{env_url}' names {name} twice: put a comma between its "
                             "servers")
        lists[name] = urls
    return {name: [url for url in lists.get(name, "").split(",") if url] for name in names}


def mixture(env: str) -> dict[str, float]:
    """The worlds of --env and their weights. Raises ValueError for what cannot be read.

    >>> mixture("babyai:2,textcraft")
    {'babyai': 2.0, 'textcraft': 1.0}
    """
    weights = {}
    for part in env.split(","):
        name, _, weight = part.strip().partition(":")
        is_number = re.fullmatch(r"(\d+(\.\d+)?)?", weight)
        if not is_number or not float(weight or 1) or name in weights:
            raise ValueError(f"cannot read --env '{env}'; "
                             "write babyai, or babyai:2,textcraft:1 with weights above 0")
        weights[name] = float(weight or 1)
    return weights


def merge_env_args(env_args: str | None, *defaults: str) -> str:
    """--env_args, preceded by the defaults that it does not name.

    >>> merge_env_args("searchqa.topk=5", "webarena.height=240")
    'webarena.height=240 searchqa.topk=5'
    >>> merge_env_args("webarena.height=720", "webarena.height=240"), merge_env_args(None, "", "")
    ('webarena.height=720', '')
    """
    given = (env_args or "").split()
    named = {part.split("=")[0] for part in given}
    parts = [part for default in defaults for part in default.split()]
    added = [part for part in parts if part.split("=")[0] not in named]
    return " ".join(added + given)


def written_flags(values: dict[str, Any]) -> str:
    """Flags and their values, without those whose value is "".

    >>> written_flags({"steps": 90, "env_args": "", "lr": 1e-6})
    'steps 90, lr 1e-06'
    """
    return ", ".join(f"{flag} {value}" for flag, value in values.items() if value != "")


def preset_tables() -> str:
    """The presets as text, for the end of --help."""
    lines = ["default horizons by --model:"]
    for name, horizons in (("tiny", TINY_HORIZONS), ("others", PUBLISHED_HORIZONS)):
        stages = [f"{world} {','.join(map(str, preset.rounds))} (a stage {preset.every} steps)"
                  for world, preset in horizons.items()]
        lines.append(f"  {name:9} " + ", ".join(stages))
    lines.append("other defaults by --model:")
    for name, table, own in (("tiny", TINY, WORLD_TINY), ("others", REAL, WORLD_REAL)):
        lines.append(f"  {name:9} " + written_flags(table))
        for world, values in own.items():
            label = "  " + world
            lines.append(f"  {label:9} " + written_flags(values))
    lines.append("others, in all worlds, on a machine without CUDA:\n  "
                 + written_flags(REAL_ON_CPU)
                 + ", dtype float32 (bfloat16 if the CPU has the flag avx512_bf16 or amx_bf16)")
    return "\n".join(lines)


def parse_config(argv: list[str] | None = None) -> Config:
    """train.py's command line, checked and with every default filled in. Raises ValueError with one
    clear line."""
    description = ("Multi-turn reinforcement learning of an LLM agent: "
                   "torchrun train.py --env babyai --algo grpo")
    cfg = read_flags(Config, argv, "train.py", description, preset_tables())
    weights = mixture(cfg.env)
    urls = servers(cfg.env_url, weights)
    for world in weights:
        envs.check_name(world, urls[world])
    if cfg.items_per_step is None:
        first = next(iter(weights))
        cfg.items_per_step = presets(cfg.model, first)["items_per_step"] * len(weights)
    if cfg.arrival_order is None:
        cfg.arrival_order = bool(cfg.env_url)
    envs.load_function(cfg.loss, LOSSES, "loss", cfg.loss_args)
    label = cfg.advantage and re.sub(r"\W+", "_", cfg.algo)
    fill_in(cfg, weights, [world for world in weights if not urls[world]], label)
    check(cfg)
    return cfg


def fill_in(cfg: RunConfig, weights: dict[str, float], in_this_process: list[str],
            algo: str) -> None:
    """Fill in the flags that were not given, in place. weights: world -> weight. in_this_process:
    the worlds that are not on servers. algo: for the name of the run folder."""
    if not cfg.out:
        names = [re.sub(r"[^a-z0-9.]+", "_", cfg.env), algo, *model_label(cfg.model)]
        cfg.out = f"runs/{'_'.join(names)}_s{cfg.seed}"
    cfg.first_model = first_model(cfg.model)
    default = {world: presets(cfg.model, world) for world in weights}
    if cfg.resume:  # the run keeps the values that it was started with
        if cfg.env_args is None:
            cfg.env_args = config_json_in(cfg.out).get("env_args")
        default = {world: own | started_with(cfg.out, world) for world, own in default.items()}

    # What each world has for itself. The run's own value is the largest of them: train.py checks
    # --max_length against the model's limit.
    rounds = {world: rounds_of(cfg, world, default[world]) for world in weights}
    for name in re.findall(r"(\w+)=", cfg.horizon or ""):
        if name not in weights:
            raise ValueError(f"--horizon names {name}, which is not in --env {cfg.env}")
    given = {name: getattr(cfg, name) for name in LIMITS if getattr(cfg, name, None) is not None}
    limits = {world: {name: default[world][name] for name in LIMITS} | given for world in weights}
    cfg.worlds = {world: WorldSettings(weight, rounds[world], **limits[world])
                  for world, weight in weights.items()}
    flags = {f.name for f in fields(cfg)}
    for name in flags & set(LIMITS):
        setattr(cfg, name, max(own[name] for own in limits.values()))
    cfg.env_args = merge_env_args(cfg.env_args,
                                  *(default[world]["env_args"] for world in in_this_process))

    # What the whole run shares: the first world's defaults, and in a mixture the action format of
    # the first world that uses one.
    if cfg.action_format is None and len(weights) > 1:
        others = [default[w]["action_format"] for w in weights if w not in OWN_FORMATS]
        cfg.action_format = others[0] if others else None
    if cfg.slots is None:  # as few as the world whose environments cost the most
        cfg.slots = min(own["slots"] for own in default.values())
    for name, value in default[next(iter(weights))].items():
        if name in flags and getattr(cfg, name) is None:
            setattr(cfg, name, value)
    if not cfg.horizon:
        cfg.horizon = written_rounds(rounds)
    cfg.prompt_texts = prompt_texts_of(cfg, weights)
    settings = settings_of(cfg.agent_args, getattr(cfg, "plan", False),
                           getattr(cfg, "reflect", False))
    load_agent(cfg.agent, settings)
    cfg.agent_sha256 = hash_of_sources(cfg.agent, settings)
    if cfg.shard is None:
        cfg.shard = torch.cuda.is_available() and not cfg.lora_rank


def prompt_texts_of(cfg: RunConfig, worlds: Iterable[str]) -> dict[str, dict[str, str]]:
    """World -> {"prompt", "reply"}: what the file --prompts holds. A resumed run has the texts that
    it was started with, whatever has become of the file."""
    if cfg.resume and (run := config_json_in(cfg.out)):
        return run.get("prompt_texts", {})
    if cfg.prompts is not None:
        return read_prompts(cfg.prompts, worlds)
    return run_of(cfg.model).get("prompt_texts", {})


def read_prompts(path: str, worlds: Iterable[str]) -> dict[str, dict[str, str]]:
    """The file --prompts: world -> {"prompt": str, "reply": str}; {} for the path "".

    worlds: those that are played. Raises ValueError for a file that cannot be read, that is of
    another form, or that has no texts for any of `worlds`.
    """
    if not path:
        return {}
    try:
        texts = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(texts, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"--prompts: cannot read {path}: {e}") from e
    if not isinstance(texts, dict):
        raise ValueError(f"--prompts: {path} holds no object")
    known = envs.server_worlds()
    for world, own in texts.items():
        if world not in known:
            raise ValueError(f"--prompts: {path} names the unknown world '{world}'; choose from "
                             f"{', '.join(known)}")
        is_pair = isinstance(own, dict) and own.keys() == {"prompt", "reply"}
        if not is_pair or not all(isinstance(text, str) and text for text in own.values()):
            raise ValueError(f"--prompts: '{world}' in {path} should be "
                             '{"prompt": a text, "reply": a text}')
    if not texts.keys() & set(worlds):
        raise ValueError(f"--prompts: {path} has no texts for {', '.join(worlds)}")
    return texts


def rounds_of(cfg: RunConfig, world: str, default: dict) -> list[int]:
    """The horizons of `world`: those of --horizon, else of the preset. From the preset a fixed
    schedule takes the last one, and sft.py the horizon of evaluation."""
    if cfg.horizon:
        return list(schedule.parse_rounds(cfg.horizon, world))
    if not isinstance(cfg, Config):
        return [default["eval_horizon"]]
    if cfg.horizon_schedule == "fixed":
        return [default["rounds"][-1]]
    return list(default["rounds"])


def written_rounds(rounds: dict[str, list[int]]) -> str:
    """Horizons by world, in the form of --horizon.

    >>> written_rounds({"babyai": [6, 13]}), written_rounds({"babyai": [6, 13], "textcraft": [8]})
    ('6,13', 'babyai=6,13 textcraft=8')
    """
    texts = {world: ",".join(map(str, own)) for world, own in rounds.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{world}={text}" for world, text in texts.items())


def items_per_world(cfg: RunConfig, total_items: int) -> dict[str, int]:
    """World -> how many of `total_items` items are its own: in proportion to the weights, rounded
    down; the items that are left over go to the first worlds, one each."""
    # Fractions: in floating point 16 * 0.3 / (0.1 + 0.3) is below 12.
    weights = {world: Fraction(str(own.weight)) for world, own in cfg.worlds.items()}
    total_weight = sum(weights.values())
    counts = {world: int(total_items * weight / total_weight) for world, weight in weights.items()}
    left_over = total_items - sum(counts.values())
    for world in list(counts)[:left_over]:
        counts[world] += 1
    return counts


# ---- what is refused before anything is written; each raises ValueError with one line ----


def check(cfg: Config) -> None:
    """Everything that can be known to be wrong before anything is written."""
    check_run(cfg)
    check_combinations(cfg)
    check_items(cfg)
    # Last, as these may take a while: each server is asked once.
    options = envs.env_options(cfg.env_args, cfg.worlds)
    for world, urls in servers(cfg.env_url, cfg.worlds).items():
        envs.check_env(world, urls, **options.get(world, {}))


def check_run(cfg: RunConfig) -> None:
    """What train.py and sft.py have in common: ranges, extras, the model, the run folder."""
    check_ranges(cfg)
    extras = {"peft": ("lora", cfg.lora_rank > 0),
              "tensorboard": ("tensorboard", cfg.report_to == "tensorboard"),
              "wandb": ("wandb", cfg.report_to == "wandb")}
    for package, (extra, needed) in extras.items():
        if needed and importlib.util.find_spec(package) is None:
            raise ValueError(f'{package} is missing: pip install -e ".[{extra}]"')
    if cfg.offload and not (cfg.shard and torch.cuda.is_available()):
        raise ValueError("--offload needs --shard and a GPU")
    rl.model_path(cfg.model)
    check_run_folder(cfg)


def check_combinations(cfg: Config) -> None:
    """Flags that do not go together."""
    if cfg.turns and cfg.lr_schedule == "cosine":
        raise ValueError("--lr_schedule cosine falls until --steps, and --turns may end the run "
                         "before: give only one of them")
    if cfg.kl_in == "loss" and cfg.kl_type == "k1":
        raise ValueError("--kl_type k1 has no expected gradient as a loss; "
                         "use k3, or --kl_in reward")
    settings = cfg.advantage.keywords
    # Where the rewards are equal, the deviation is that of the KL, and rounding decides.
    if cfg.algo == "grpo" and cfg.kl_in == "reward" and cfg.kl_coef and (
            settings.get("normalize_std", True)):
        raise ValueError("--algo grpo divides by the deviation of a group's rewards, so the KL "
                         "must not be part of them: give --kl_in loss or --algo_args "
                         "normalize_std=false")
    if getattr(cfg.advantage, "compares_samples", False) and cfg.rollouts_per_item < 2:
        raise ValueError(f"--algo {cfg.algo} compares the rollouts of an item: "
                         "--rollouts_per_item must be at least 2")
    for name in getattr(cfg.advantage, "needs_models", ()):
        if not settings.get(name):
            raise ValueError(f"--algo {cfg.algo} needs --algo_args {name}=MODEL")
    if getattr(cfg.advantage, "needs_states", False):
        for world, urls in servers(cfg.env_url, cfg.worlds).items():
            if urls or not envs.has_states(world):
                where = "on a server" if urls else "in this process"
                raise ValueError(f"--algo {cfg.algo}: {world}, {where}, does not tell its states "
                                 "(Env.state)")
    if cfg.shaping != "none":
        by_world = servers(cfg.env_url, cfg.worlds)
        # A world on a server may give its progress.
        if not any(urls or envs.has_progress(world) for world, urls in by_world.items()):
            raise ValueError(f"--shaping {cfg.shaping}: {', '.join(by_world)} in this process: no "
                             "world gives its progress (Env.has_progress)")
    # With gamma < 1 a long reply's last token would get gamma^-length of the potential, or the
    # rewards of --shaping potential would not cancel out.
    signature = inspect.signature(cfg.advantage, follow_wrapped=False)  # with its settings
    gamma = signature.parameters.get("gamma")
    if cfg.shaping != "none" and gamma is not None and gamma.default < 1:
        raise ValueError("--shaping needs --algo_args gamma=1")


def check_items(cfg: Config) -> None:
    """Horizons and training items of each world."""
    for world, count in items_per_world(cfg, cfg.items_per_step).items():
        own = cfg.worlds[world]
        kind = "scaling_inter" if cfg.horizon_schedule == "adaptive" else cfg.horizon_schedule
        schedule.horizon_at(0, own.rounds, own.horizon_steps, kind)
        if own.rounds != sorted(own.rounds):
            raise ValueError(f"--horizon of {world} must not fall from one stage to the next, "
                             f"but is {','.join(map(str, own.rounds))}")
        items = envs.items(world, "train", cfg.data or None)
        if not count:
            raise ValueError(f"--items_per_step is {cfg.items_per_step}, "
                             f"which leaves none for {world}")
        if cfg.eval_every:
            envs.items(world, "test", cfg.data or None)
        if len(items) < count:
            raise ValueError(f"a step takes {count} items of {world} (--items_per_step), "
                             f"but the training set has {len(items)}")


def check_run_folder(cfg: RunConfig) -> None:
    """--out can be written, and --resume continues the run that it names with the same flags."""
    out = Path(cfg.out)
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if out.is_file() or not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"cannot make the run folder {out}")
    if not cfg.resume:
        metrics = out / "metrics.jsonl"
        if checkpoint.named(out) or metrics.exists() and metrics.stat().st_size:
            raise ValueError(f"{out} holds a run already; "
                             "add --resume to continue it or choose another --out")
        return
    if not out.is_dir():
        raise ValueError(f"nothing to resume: there is no folder {out}")
    before, now = config_json_in(cfg.out), asdict(cfg)
    if before.get("env_url") and not now["env_url"]:
        raise ValueError(f"{out} was started with --env_url {before['env_url']}: give it again, "
                         "or the address of another such server")
    if before.get("agent_sha256", "") != now["agent_sha256"]:
        raise ValueError(f"{out} was started with another source of agent {cfg.agent}")
    for name, value in now.items():
        if name not in MAY_CHANGE and before.get(name, value) != value:
            raise ValueError(f"{out} was started with --{name} {before[name]}, not {value}")
    for world, own in before.get("worlds", {}).items():
        for name, value in own.items():
            if value != now["worlds"][world].get(name):
                raise ValueError(f"{out} was started with --{name} {value} for {world}, "
                                 f"not {now['worlds'][world].get(name)}")
