"""What a run is told: its flags, their defaults by model and world, and what --resume keeps.

A setting is declared once, with its help, in the dataclass of its concept: `Sampling` (rl.py),
`Rollouts` (rollout.py), `Horizon` (schedule.py), `Optim` and `Loss` (update.py), and those here.
`Config` inherits from all of them: it can be passed wherever one of them is taken.
The defaults of the classes are for a real model on a GPU. `presets` changes them for the tiny
model, for a CPU and by world. A resumed run has the settings that it was started with; flags that
are given win, where they may change.
"""

import argparse
import inspect
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

# Threads that spin while they wait slow other processes down by up to five times where cores are
# shared. PyTorch reads the variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Allocate large CPU tensors in pages of 2 MB. Page faults otherwise take a tenth of an update.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # noqa: E402
from transformers.hf_argparser import string_to_bool  # noqa: E402

import envs  # noqa: E402
from agent import hash_of_sources, load_agent  # noqa: E402
from envs import ABOVE_0, NOT_NEGATIVE, CommandParser, flag  # noqa: E402
from rollout import Rollouts  # noqa: E402
from schedule import Horizon, horizon_at, parse_rounds  # noqa: E402
from update import Loss, Optim  # noqa: E402

RUN_FILE = "run.json"  # in final/: the config.json of its run
EVAL_ITEMS = 64  # of --eval_every


@dataclass
class WorldSettings:
    """What each world of a run has for itself."""

    weight: float  # its share of a step's items, in proportion to the other worlds' weights
    rounds: list[int]  # the horizon's stages
    horizon_steps: int
    max_tokens: int
    max_length: int
    invalid_penalty: float


# The comment above a field of a dataclass, and the field's name.
COMMENT_AND_FIELD = re.compile(r"^((?:    #.*\n)*)    (\w+):", re.MULTILINE)
# A world's own, in a mixture, unless the flag is given: then it applies to all worlds.
LIMITS = ("horizon_steps", "max_tokens", "max_length", "invalid_penalty")


@dataclass
class Setup(Rollouts):
    """what is played, and by which model"""

    # or with --env_url a world of a server (docs/worlds.md); several with weights:
    # babyai:2,textcraft:1
    env: str = flag("babyai", envs.WORLDS, first=True)
    # 'tiny' (built in), 'smollm2' (made by data/get_smollm2.py), a folder, a GGUF file, or a hub id
    model: str = flag("tiny", first=True)
    # largest number of turns, by stage: 6,13,20, or per world: 'babyai=6,13,20 textcraft=10,20,30';
    # eval.py plays each
    horizon: str = flag("6,13,20", first=True)
    # file with a chat template (Jinja), for a model that has none
    chat_template: str = flag("")
    # folder in the layout of AgentGym-RL-Data-ID; default: data/
    data: str = flag("")
    # keyword arguments of worlds in this process: 'searchqa.topk=5 searchqa.corpus=wiki.jsonl'
    env_args: str = flag("", may_change=True)
    # AgentGym's or OpenEnv's servers http://host:port[,...] to play on; of several worlds:
    # 'babyai=http://host:port textcraft=http://host:port'
    env_url: str = flag("", may_change=True)
    # JSON file with other instructions: {WORLD: {'prompt': the whole first message, 'reply': the
    # fixed reply to it}, ...}; 'none': the world's own; default: those of the run which wrote
    # --model
    prompts: str = flag("")


@dataclass
class RunConfig(Setup, Optim):
    """the run"""

    # run folder; default runs/ENV_ALGO_sSEED, with a model other than tiny
    # runs/ENV_ALGO_MODEL_sSEED (ALGO of sft.py: sft)
    out: str = flag("", may_change=True, first=True)
    # continue the run in --out from its newest checkpoint
    resume: bool = flag(False, may_change=True, first=True)
    # steps between evaluations on 64 held-out items of each world, always the same; 0: none
    eval_every: int = flag(0, NOT_NEGATIVE, may_change=True)
    # steps between checkpoints
    save_every: int = flag(50, ABOVE_0, may_change=True)
    # checkpoints kept
    keep: int = flag(2, ABOVE_0, study=True, may_change=True)
    # metrics go there, too (extras of these names)
    report_to: str = flag("none", ("none", "tensorboard", "wandb"), may_change=True)
    worlds: dict[str, WorldSettings] = field(default_factory=dict)
    first_model: str = ""  # what --model was made of, over any number of runs
    # random; its checkpoints and final/ have it, too
    run_id: str = field(default="", compare=False)
    agent_sha256: str = ""  # of the files of its agent, algorithm and loss


@dataclass
class Config(RunConfig, Horizon, Loss):
    """how much is played and trained"""

    # training steps
    steps: int = flag(300, ABOVE_0, may_change=True, first=True)
    # end before --steps when less than half of the last step's environment turns are left of this
    # many; 0: no limit
    turns: int = flag(0, NOT_NEGATIVE, study=True, may_change=True)
    # distinct items per step; default for several worlds: that of the first world, times their
    # number
    items_per_step: int = flag(32, ABOVE_0)
    # trajectories of each item: the group of GRPO and RLOO
    rollouts_per_item: int = flag(4, ABOVE_0, first=True)
    # stop when the policy's entropy, nats a token, falls below this
    min_entropy: float = flag(1e-4, study=True, may_change=True)
    # stop when `kl` or `kl_behaviour`, nats a token, rises above this
    max_kl: float = flag(10.0, study=True, may_change=True)


# ---- presets: defaults that depend on the model, the machine and the world ----

TINY = dict(
    steps=100, items_per_step=16, rollouts_per_item=8, minibatches=2, lr=4e-4, critic_lr=1e-3,
    max_tokens=32, max_length=4096, kl_coef=0.0, invalid_penalty=0.05, microbatch_tokens=8192,
    slots=128, gradient_checkpointing=False)
# For 135M parameters: what worked in docs/ideas.md. It took 10 to 16 GB of memory.
ON_CPU = dict(items_per_step=8, rollouts_per_item=8, minibatches=1, lr=2e-5, kl_coef=0.0,
              max_tokens=64, max_length=6144, microbatch_tokens=4096, gradient_checkpointing=False)


def has_bfloat16(cpuinfo: str | Path = "/proc/cpuinfo") -> bool:
    """Whether this machine computes bfloat16 faster than float32."""
    flags = Path(cpuinfo).read_text("utf-8").split() if Path(cpuinfo).exists() else []
    return torch.cuda.is_available() or "avx512_bf16" in flags or "amx_bf16" in flags


def class_of(world: str) -> type[envs.Env]:
    """The class of a world; `Env` if it can only be played on a server: it is not among ours, or
    its package is missing."""
    with suppress(envs.UserError):
        return envs.world_class(world)
    return envs.Env


def has_own_format(world: str) -> bool:
    """Whether the world's own prompt says what a reply looks like."""
    return "action_format" in class_of(world).real


def presets(model: str, world: str) -> dict[str, Any]:
    """-> setting -> its default for this model (made of "tiny", or any other), this world and this
    machine, where it is not the class's; "eval_horizon" is the horizon of an evaluation. What a
    model was trained with is among them: the action format, the system message, the arguments of
    the chat template, the texts of --prompts; in a world of that run its limits and item lists."""
    run = run_of(model)
    if run.get("first_model", model) == "tiny":
        values = TINY | class_of(world).tiny
    else:
        values = class_of(world).real | {"dtype": "bfloat16" if has_bfloat16() else "float32"}
        # The kernels of a compiled model are started by C code.
        values["compile"] = torch.cuda.is_available() and shutil.which("gcc") is not None
        if not torch.cuda.is_available() and not model.startswith("openai:"):  # not computed here
            values |= ON_CPU
    values.setdefault("eval_horizon", values.get("horizon", Setup.horizon).split(",")[-1])
    kept = ["system", "chat_args", "prompt_texts"]
    if own := run.get("worlds", {}).get(world):
        values |= {"max_tokens": own["max_tokens"], "max_length": own["max_length"]}
        kept.append("data")
    # The prompts of some worlds say what a reply looks like: --action_format has no effect there.
    if not has_own_format(world) and not all(map(has_own_format, run.get("worlds", []))):
        kept.append("action_format")
    return values | {name: run[name] for name in kept if name in run}


def run_of(model: str) -> dict[str, Any]:
    """The settings of the training run that wrote this model folder: its own RUN_FILE, which a copy
    of final/ takes along, or the config.json of the run folder that it lies in; {} if there is no
    such run. Raises ValueError for a damaged file."""
    folder = Path(model).resolve().parent
    folder = folder.parent if folder.name == "checkpoints" else folder
    files = [file for file in (Path(model) / RUN_FILE, folder / "config.json") if file.exists()]
    run = read_json(files[0]) if Path(model).is_dir() and files else {}
    return run if {"env", "algo", "horizon"} <= run.keys() else {}  # else some model's config.json


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError for a damaged one, and for the settings of a run
    of an earlier version."""
    try:
        found = dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if "plan" in found or "lam" in found:
        raise ValueError(f"{path} is of an earlier version: `git checkout 3fc98f8` reads it")
    return found


# ---- reading a command line ----


def read_flags(config_class: type, argv: list[str] | None, program: str,
               description: str) -> dict[str, Any]:
    """argv (default: sys.argv) -> the flags that it gives, and their values. Raises ValueError for
    an unknown one. --help has a group of flags for each class that `config_class` inherits from,
    after the flags that are marked as those to know first."""
    of_worlds = [f"{world}: {class_of(world).real}; tiny: {class_of(world).tiny}"
                 for world in envs.WORLDS if class_of(world).real or class_of(world).tiny]
    parser = CommandParser(
        usage=f"python {program} [--FLAG VALUE] ... [--set FIELD=VALUE ...]", allow_abbrev=False,
        description=f"{description}\n\nDefaults: for a real model on a GPU; the end lists others.",
        epilog="\n  ".join(["other defaults:", f"tiny: {TINY}", f"on CPUs: {ON_CPU}", *of_worlds]),
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    to_know_first = parser.add_argument_group("the flags to know first")
    groups = {c: parser.add_argument_group(c.__doc__) for c in config_class.__mro__[:-1]}
    of_studies = parser.add_argument_group("for studies")
    of_studies.add_argument("--set", nargs="+", action="extend", metavar="FIELD=VALUE")
    flags = {f.name: f for f in fields(config_class) if f.metadata}
    for owner, group in groups.items():
        for comment, name in COMMENT_AND_FIELD.findall(inspect.getsource(owner)):
            if not (f := flags.pop(name, None)):  # no flag, or one that a subclass declares anew
                continue
            choices, help_text = f.metadata["choices"], " ".join(re.findall("# (.*)", comment))
            default = "" if f.default in (None, False, "") else f" (default: {f.default})"
            kind = (get_args(f.type) or [f.type])[0]  # of "int | None": int
            own_group = to_know_first if f.metadata.get("first") else group
            where, prefix = (of_studies, "--set ") if f.metadata.get("study") else (own_group, "--")
            where.add_argument(
                prefix + name, dest=name, type=string_to_bool if kind is bool else kind,
                help=help_text + default + f" (tiny: {TINY.get(name)})" * (name in TINY),
                choices=None if isinstance(choices, dict) else choices,  # a table allows others
                metavar="|".join(choices or [kind.__name__]),
                **dict(nargs="?", const=True) if kind is bool else {})

    given = parser.parse_args(argv)
    words = " ".join(vars(given).pop("set", [])).split()
    return vars(parser.parse_args([f"--set {word}" for word in words], given))


def parse_config(argv: list[str] | None = None) -> Config:
    """train.py's command line, checked and with every default filled in. Raises ValueError with one
    clear line, also for combinations that run, but do not do what they seem to."""
    given = read_flags(Config, argv, "train.py", "Multi-turn RL of an LLM agent")
    cfg = fill_in(Config, given)
    advantage, _ = cfg.advantage, cfg.loss_function
    cfg.record_states = getattr(advantage, "needs_states", False)
    gamma = inspect.signature(advantage, follow_wrapped=False).parameters.get("gamma")
    gives_progress = any(class_of(w).has_progress or w not in envs.WORLDS for w in cfg.worlds)
    # The setting with which an algorithm does not divide by the group's standard deviation.
    setting, value = getattr(advantage, "divides_unless", ("", ""))
    for is_wrong, why in (
        (cfg.kl_in == "loss" and cfg.kl_type == "k1",
         "kl_type=k1 has no expected gradient as a loss: use k3, or --kl_in reward"),
        # Where the rewards are equal, the deviation is that of the KL, and rounding decides.
        (cfg.kl_in == "reward" and cfg.kl_coef and advantage.keywords.get(setting, "") != value,
         f"--kl_in reward with --algo {cfg.algo} needs --algo_args {setting}={value}"),
        (getattr(advantage, "compares_samples", False) and cfg.rollouts_per_item < 2,
         f"--algo {cfg.algo} compares the rollouts of an item: --rollouts_per_item 2 or more"),
        (cfg.shaping != "none" and not gives_progress,
         f"--shaping {cfg.shaping}: no world of {cfg.env} gives its progress (Env.has_progress)"),
        # A long reply's last token would get gamma^-length of the potential.
        (cfg.shaping != "none" and gamma is not None and gamma.default < 1,
         "--shaping needs --algo_args gamma=1"),
    ):
        if is_wrong:
            raise ValueError(why)
    for name, has_effect in {
        **dict.fromkeys(["critic_lr", "value_clip"], getattr(advantage, "needs_critic", False)),
        **dict.fromkeys(["kl_in", "kl_type"], cfg.kl_coef),
        "offload": cfg.shard and torch.cuda.is_available(),
        "horizon_steps": cfg.horizon_schedule != "fixed",
        # The rewards that it adds to a trajectory sum to 0.
        "shaping": cfg.shaping != "potential" or not getattr(advantage, "sums_rewards", False),
    }.items():
        if name in given and not has_effect and not given.get("resume"):
            raise ValueError(f"{name}={given[name]} has no effect, see --help: --algo {cfg.algo}, "
                             f"kl_coef={cfg.kl_coef:g}, --horizon_schedule {cfg.horizon_schedule}")
    check_worlds(cfg, cfg.worlds)
    return cfg


def check_worlds(cfg: Setup, worlds: Collection[str]) -> None:
    """Each world can be played: it is made once, or its servers answer."""
    options = envs.env_options(cfg.env_args, worlds)
    for world, urls in servers(cfg.env_url, worlds).items():
        envs.check_env(world, urls, **options.get(world, {}))


def fill_in(config_class: type[RunConfig], given: dict[str, Any]) -> Any:
    """-> the settings of a run. A setting has the value that is given, or else the preset of its
    world and model, or else the class's default; a resumed run has what it was started with.
    Raises ValueError."""
    model = given.get("model", RunConfig.model)
    env = given.get("env") or run_of(model).get("env", RunConfig.env)
    given = given | {"env": env}
    label = "" if model == "tiny" else Path(re.sub("/(final|checkpoints/[^/]*)/?$", "", model)).name
    name = f"{env}_{given.get('algo', config_class.algo)}_{label}_s{given.get('seed', 0)}".lower()
    out = given.get("out") or f"runs/{re.sub('[^a-z0-9.-]+', '_', name)}"
    if given.get("resume"):
        return resumed(config_class, given, out)
    weights = mixture(env)
    if "prompts" in given:
        given = given | {"prompt_texts": read_prompts(given["prompts"], weights)}

    # Each world's settings. sft.py plays as long as an evaluation.
    own = {world: vars(Config()) | vars(config_class()) | presets(model, world) | given
           for world in weights}
    run = own[[*weights][0]]
    horizon = "horizon" if config_class is Config else "eval_horizon"
    text = " ".join(f"{world}={values[horizon]}" for world, values in own.items())
    rounds = parse_rounds(given.get("horizon", text), weights)
    if "horizon" not in given and run["horizon_schedule"] == "fixed":
        rounds = {world: stages[-1:] for world, stages in rounds.items()}
    worlds = {}
    for world, weight in weights.items():
        worlds[world] = WorldSettings(weight, rounds[world], *(own[world][x] for x in LIMITS))
        horizon_at(0, rounds[world], worlds[world].horizon_steps, run["horizon_schedule"])

    # The run's: what is given, or else follows from those of all worlds, or else the first world's.
    urls = servers(run["env_url"], weights)
    env_args = [presets(model, world).get("env_args", "") for world in weights if not urls[world]]
    run = run | {name: max(values[name] for values in own.values()) for name in LIMITS} | {
        "action_format": own[min(own, key=has_own_format)]["action_format"],
        "arrival_order": bool(run["env_url"]),
        "horizon": " ".join(f"{world}={','.join(map(str, stages))}"
                            for world, stages in rounds.items()),
        "items_per_step": run["items_per_step"] * len(weights),
        "shard": torch.cuda.is_available() and not run["lora_rank"],
        "slots": min(values["slots"] for values in own.values()),
    } | given | {
        "agent_sha256": hash_of_sources(run),
        "env_args": " ".join([*env_args, given.get("env_args", "")]).strip(),  # the last one wins
        "first_model": run_of(model).get("first_model", model),
        "out": out, "run_id": os.urandom(8).hex(), "worlds": worlds,
    }
    load_agent(run["agent"], run["agent_args"])  # raises ValueError
    return config_class(**{f.name: run[f.name] for f in fields(config_class)})


def resumed(config_class: type[RunConfig], given: dict[str, Any], out: str) -> Any:
    """The settings of the run in `out`, and those of `given` that may change. Raises ValueError for
    one that may not."""
    saved = read_json(f"{out}/config.json")
    given = given | {"agent_sha256": hash_of_sources(saved)}
    for f in fields(config_class):
        for own in saved["worlds"].values():
            started = (saved | own).get(f.name)
            if not f.metadata.get("may_change") and given.get(f.name, started) != started:
                name = f"--{f.name}" if f.metadata else "agent_sha256 (of its agent, algo or loss)"
                raise ValueError(f"{out} was started with {name} {started}, not {given[f.name]}")
    if given.get("env_url") and not saved["env_url"]:
        raise ValueError(f"{out} was started without --env_url")
    worlds = {world: WorldSettings(**settings) for world, settings in saved["worlds"].items()}
    env_args = f"{saved['env_args']} {given.get('env_args', '')}".strip()  # the last one wins
    run = {"run_id": ""} | saved | given | {"out": out, "worlds": worlds, "env_args": env_args}
    return config_class(**{f.name: run[f.name] for f in fields(config_class)})


# ---- the parts of --env, --env_url, --env_args, --horizon, --prompts, --model ----


def servers(env_url: str, names: Iterable[str]) -> dict[str, list[str]]:
    """World -> its servers in --env_url, [] for a world that is played in this process. Raises
    ValueError if --env_url cannot be read.

    >>> servers("babyai=http://a:1,http://b:1", ["babyai", "textcraft"])
    {'babyai': ['http://a:1', 'http://b:1'], 'textcraft': []}
    """
    found = {name: [] for name in names}
    for part in env_url.split():
        world, _, urls = part.rpartition("=")
        world = world or "".join(found)  # one world need not be named
        if found.get(world) != [] or not urls.strip(","):
            raise ValueError(f"cannot read --env_url '{part}'; write WORLD=http://host:port")
        found[world] = urls.strip(",").split(",")
    return found


def mixture(env: str) -> dict[str, float]:
    """The worlds of --env and their weights. Raises ValueError for what cannot be read.

    >>> mixture("babyai:2,textcraft")
    {'babyai': 2.0, 'textcraft': 1.0}
    """
    parts = [re.fullmatch(r"(\w+)(?::(\d+(?:\.\d+)?))?", part.strip()) for part in env.split(",")]
    weights = {part[1]: float(part[2] or 1) for part in parts if part}
    if len(weights) < len(parts) or not all(weights.values()):
        raise ValueError(f"--env '{env}': write babyai:2,textcraft; `envs.py new` adds a world")
    return weights


def items_per_world(cfg: RunConfig, total_items: int) -> dict[str, int]:
    """World -> how many of `total_items` items are its own: in proportion to the weights, rounded
    down; the items that are left over go to the first worlds, one each."""
    total_weight = sum(own.weight for own in cfg.worlds.values())
    # A millionth more: in floating point 16 * 0.3 / (0.1 + 0.3) is below 12.
    counts = {world: int(total_items * own.weight / total_weight + 1e-6)
              for world, own in cfg.worlds.items()}
    for world in [*counts][:total_items - sum(counts.values())]:
        counts[world] += 1
    return counts


def read_prompts(path: str, worlds: Iterable[str]) -> dict[str, dict[str, str]]:
    """The file --prompts: world -> {"prompt": str, "reply": str}; {} for "" and "none". Raises
    ValueError for a file of another form, or without texts for any of `worlds`."""
    texts = {} if path in ("", "none") else read_json(path)
    is_read = all(sorted(own) == ["prompt", "reply"] for own in texts.values())
    if path not in ("", "none") and not (is_read and texts.keys() & set(worlds)):
        raise ValueError(f'{path}: write {{WORLD: {{"prompt": a text, "reply": a text}}}} for '
                         f"{' or '.join(worlds)}")
    return texts
