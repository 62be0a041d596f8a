"""The runs of each study, in the order in which they are trained, listed and drawn."""

import shlex
from typing import NamedTuple

from config import presets
from schedule import parse_rounds

# Studies whose runs are also evaluated during the training, and after which parts of it.
HALF = (0.5,)
QUARTERS = (0.25, 0.5, 0.75)
MIDWAY = {
    "horizon": QUARTERS, "collapse": QUARTERS, "distill": QUARTERS, "credit": HALF,
    "rooms_horizon": HALF, "pretrained_horizon": HALF, "pretrained_rooms": HALF,
    "pretrained_rooms_gpu": HALF, "pretrained_rooms_36k": HALF, "oracle": (1 / 32, 1 / 8, 0.5),
    "ideas": HALF, "pretrained_collapse": (),
}
# Samples of a held-out item after the training, where they are not two.
SAMPLES = {"horizon": 4, "pretrained_horizon": 1, "pretrained_rooms": 1}
# The label that the others are compared with, if it is not "scaling".
BASELINES = dict.fromkeys(("credit", "discount", "distill", "ideas", "oracle", "states"),
                          "grpo") | {"pretrained_lora": "all"}

# Folders of item sets.
SCIWORLD_ITEMS = "runs/items/FNL"
WEBARENA_ITEMS = "runs/items/NAV"
ALL_ITEMS = "runs/items/ALL"  # five worlds: those two, and the sets in data/ of the others
# Studies "algorithms" and "worlds": world -> flags of its runs, horizon in evaluation (0: default).
WORLD_FLAGS = {
    "babyai": ("", 0),
    "textcraft": ("", 0),
    "searchqa": ("--steps 300", 0),
    "sciworld": (f"--steps 40 --data {SCIWORLD_ITEMS}", 0),
    "webarena": (f"--steps 50 --data {WEBARENA_ITEMS} --horizon 3,4", 4),
}
ALGORITHMS = ("grpo", "ppo", "rloo", "reinforce_pp")

# Study "credit": label -> flags besides those of GRPO. "sequence" is a control: the part of
# gspo_turn that does not explain its gain. The flags of the last five showed no gain and were taken
# out; commit 8a0ad8a has them, and can repeat these runs.
CREDITS = {
    "grpo": "",
    "gspo": "--loss gspo --set aggregation=sequence",
    "gspo_turn": "--loss gspo --loss_args per=turn --set aggregation=sequence",
    "sequence": "--set aggregation=sequence",
    "state": "--algo gigpo",
    "cispo": "--loss cispo",
    "turn": "--credit turn",
    "dynamic": "--dynamic_sampling 48",
    "keep_half": "--keep_groups 0.5",
    "frontier": "--sampler frontier",
}
# Study "oracle": label -> flags. "truth": 32 continuations of every prefix.
ORACLES = {
    "grpo": "",
    "rloo": "--algo rloo",
    "discount": "--algo reinforce_pp --algo_args gamma=0.9",
    "vine4": "--algo vine --algo_args continuations=4",
    "truth": "--algo vine --algo_args continuations=32",
}
ORACLE_FLAGS = ("--items_per_step 6 --rollouts_per_item 8 --steps 24 --horizon_schedule fixed "
                "--save_every 1 --set keep=1000 --set min_entropy=0")
# Study "discount": label -> flags. "whitened": REINFORCE++ without a discount. RLOO was added
# after the results of the others.
DISCOUNTS = {
    "grpo": "",
    "rloo": "--algo rloo",
    "whitened": "--algo reinforce_pp --algo_args gamma=1",
    "discount": ORACLES["discount"],
}
# Study "states": label -> flags.
STATES = {"grpo": "", "states": "--algo gagpo --algo_args 'gamma=1 lam=0 normalize=false'"}
# Study "ideas": label -> flags. {data}: the folder of the world's items.
IDEAS = {
    "grpo": "",
    "choose": "--agent choose",
    "few_shot": "--agent few_shot --agent_args 'shots=2 data={data}'",
    "guide": "--agent guide --agent_args fade=20",
    "backward": "--agent backward --agent_args 'share=1.0 mixed=true'",
    "backward_choose": "--agent backward --agent_args 'share=1.0 mixed=true choose=true'",
    "echo": "--loss echo",
}
CREDIT_TURNS = 16_000
CREDIT_WORLDS = {  # of this study and "ideas": flags of all runs, horizon in evaluation
    "babyai": ("--data data/rooms --horizon 3,6 --horizon_steps 20", 10),
    "textcraft": ("", 8),
}

# Only NaN and max_kl stop such a run. Checkpoints are frequent: one near every number of turns.
TO_THE_END = "--set min_entropy=0 --save_every 5 --set keep=1000"
ROOMS_ROUNDS = (3, 6, 10)

# SmolLM2-135M after a warm start; the commands of these are in docs/warm_start.md.
SMOLLM2 = ("--model runs/{model}/final --slots {slots} --items_per_step {items} "
           "--rollouts_per_item 8 --minibatches 1 --lr {lr} --set warmup_steps=2 --kl_coef 0 "
           "--microbatch_tokens {microbatch} --set min_entropy=0 ")
ROOMS = SMOLLM2 + "--data data/rooms --max_tokens 24 "
ON_GPU = dict(model="rooms_warm", items=16, lr="3e-5", microbatch=16384)
# With --max_length 2048 up to a quarter of the trajectories of a step end before the horizon of 10,
# with 2560 some 1 %. With 112 slots four runs fit into 78 GiB.
LONG_ROOMS = ROOMS + "--invalid_penalty 0.1 --max_length 2560 --save_every 6 --set keep=5 "
ALL_WEIGHTS = LONG_ROOMS.format(slots=112, **ON_GPU)
LORA = LONG_ROOMS.format(slots=112, **ON_GPU | {"lr": "3e-4"}) + "--lora_rank 16 "


class Pretrained(NamedTuple):
    """A study of schedules of the horizon with a pretrained model."""

    world: str
    flags: str  # of all runs
    rounds: tuple
    horizon_steps: int
    turns: int
    labels: tuple = ("scaling", "long")
    seeds: int = 2


PRETRAINED = {
    "pretrained_horizon": Pretrained(
        "searchqa",
        SMOLLM2.format(model="mix_warm", slots=32, items=16, lr="3e-5", microbatch=2048)
        + "--max_tokens 48 --max_length 2048 --save_every 2 --set keep=1000",
        (3, 4, 5), 5, 6_000, ("scaling", "long", "short")),
    "pretrained_rooms": Pretrained(
        "babyai",
        ROOMS.format(model="rooms_warm", slots=32, items=8, lr="5e-5", microbatch=2048)
        + "--max_length 2048 --save_every 4 --set keep=1000", ROOMS_ROUNDS, 10, 8_000),
    "pretrained_rooms_gpu": Pretrained(
        "babyai", ROOMS.format(slots=128, **ON_GPU) + "--invalid_penalty 0.1 --max_length 2048 "
        "--save_every 13 --set keep=1000", ROOMS_ROUNDS, 13, 24_000),
    "pretrained_rooms_36k": Pretrained("babyai", ALL_WEIGHTS, ROOMS_ROUNDS, 13, 36_000),
    # In pieces of ten minutes, by travel.py. 64 held-out items every 40 steps of 128 trajectories.
    "pretrained_collapse": Pretrained("babyai", LORA + "--eval_every 40", ROOMS_ROUNDS, 100,
                                      300_000, ("scaling", "long", "short"), 3),
}
LORA_TURNS = 24_000  # of study "pretrained_lora"

# Study "transfer": the worlds in the order in which one model learns them, and their steps.
TRANSFER_STEPS = {"babyai": 60, "textcraft": 60, "searchqa": 100, "sciworld": 20, "webarena": 30}

# Study "recipe": label -> flags that differ from the default run.
RECIPES = {
    "default": "",
    "lr_2e-4": "--lr 2e-4",
    "lr_8e-4": "--lr 8e-4",
    "8x16": "--items_per_step 8 --rollouts_per_item 16",
    "32x4": "--items_per_step 32 --rollouts_per_item 4",
    "minibatches_1": "--minibatches 1",
    "minibatches_4": "--minibatches 4",
    "kl_0.01": "--kl_coef 0.01",
    "clip_high_0.28": "--loss_args clip_high=0.28",
    "entropy_0.01": "--entropy_coef 0.01",
    "penalty_0": "--invalid_penalty 0",
    "penalty_0.2": "--invalid_penalty 0.2",
    "no_std": "--algo_args normalize_std=false",
    "sequence": "--set aggregation=sequence",
    "horizon_4": "--horizon_schedule fixed --horizon 4",
}

# Study "speedrun": entry -> its world, its target (mean success over the seeds), and the flags of
# its two runs; docs/speedrun.md.
SPEEDRUNS = {
    "steps_12": ("babyai", 0.90, "--steps 12"),
    "steps_16": ("babyai", 0.90, "--steps 16"),
    "smollm2_130": (
        "babyai", 0.85,  # README's command
        "--model smollm2 --agent choose --agent_args 'keep=0 task=true' --action_format plain "
        "--horizon 4 --horizon_schedule fixed --set lr_schedule=cosine --entropy_coef 0.05 "
        "--max_tokens 24 --max_length 2048 --microbatch_tokens 1536 --steps 130"),
    "gigpo_50": ("textcraft", 0.25, "--algo gigpo --steps 50"),
    "gigpo_60": ("textcraft", 0.25, "--algo gigpo --steps 60"),
}


class Run(NamedTuple):
    world: str  # a world, or several of them with commas
    label: str  # what is compared: an algorithm, a schedule; "base": the model before training
    seed: int
    flags: tuple = ()  # of train.py
    turns: int = 0  # environment turns after which training ends; 0: the default number of steps
    horizon: int = 0  # in evaluation; 0: the world's default
    measured: tuple = ()  # worlds of the evaluation; none: those of the training

    @property
    def name(self):
        return f"{self.world.replace(',', '+')}_{self.label}_s{self.seed}"


def run(world, label, seed=0, flags="", **rest):
    return Run(world, label, seed, tuple(shlex.split(flags)), **rest)


def algorithms():
    found = []
    for world, (flags, horizon) in WORLD_FLAGS.items():
        found.append(run(world, "base", flags=flags, horizon=horizon))
        for seed in range(3):
            found += [run(world, algo, seed, f"--algo {algo} {flags}", horizon=horizon)
                      for algo in ALGORITHMS]
    return found


def rounds_of(world):
    """The tiny model's horizons in a world."""
    return parse_rounds(presets("tiny", world)["horizon"], [world])[world]


def schedules(rounds, growing=""):
    """The four schedules of the horizon: label -> flags. growing: the flags that set `rounds`."""
    return {
        "scaling": growing,
        "long": f"--horizon_schedule fixed --horizon {rounds[-1]}",
        "short": f"--horizon_schedule fixed --horizon {rounds[0]}",
        "adaptive": f"--horizon_schedule adaptive {growing}",
    }


def horizon():
    found = []
    for world, turns, seeds in (("babyai", 25_000, 3), ("textcraft", 40_000, 8)):
        found.append(run(world, "base"))
        for seed in range(seeds):
            found += [run(world, label, seed, f"{flags} {TO_THE_END}", turns=turns)
                      for label, flags in schedules(rounds_of(world)).items()]
    return found


def rooms_horizon():
    rooms = "--data data/rooms"
    last = ROOMS_ROUNDS[-1]
    found = [run("babyai", "base", flags=rooms, horizon=last)]
    for seed in range(5):
        found += [run("babyai", label, seed, f"{flags} {rooms} {TO_THE_END}", turns=50_000,
                      horizon=last)
                  for label, flags in schedules(ROOMS_ROUNDS, "--horizon 3,6,10").items()]
    return found


def pretrained(name):
    study = PRETRAINED[name]
    last = study.rounds[-1]
    rounds = ",".join(map(str, study.rounds))
    growing = f"--horizon {rounds} --horizon_steps {study.horizon_steps}"
    # An evaluation on the way is at the last horizon: this one is never reached.
    short = f"--horizon {study.rounds[0]},{last} --horizon_steps 1000000"
    schedule = schedules(study.rounds, growing) | {"short": short}
    found = [run(study.world, "base", flags=study.flags, horizon=last)]
    for seed in range(study.seeds):
        found += [run(study.world, label, seed, f"{schedule[label]} {study.flags}",
                      turns=study.turns, horizon=last) for label in study.labels]
    return found


def pretrained_lora():
    growing = "--horizon 3,6,10 --horizon_steps 13"
    last = ROOMS_ROUNDS[-1]
    return [run("babyai", label, 0, f"{growing} {own}", turns=LORA_TURNS, horizon=last)
            for label, own in (("all", ALL_WEIGHTS), ("lora", LORA))]


def collapse():
    schedule = schedules(rounds_of("textcraft"))
    flags = "--set min_entropy=0 --steps 250 --set keep=1000"
    return [run("textcraft", "base")] + [
        run("textcraft", label, seed, f"{schedule[label]} {flags}")
        for seed in range(2) for label in ("long", "scaling")]


def recipe():
    return [run("babyai", "base")] + [
        run("babyai", label, seed, f"--steps 40 {flags}")
        for seed in range(2) for label, flags in RECIPES.items()]


def worlds():
    found = []
    for seed in range(3):
        for world in ("searchqa", "sciworld", "babyai,textcraft", "webarena"):
            flags, horizon = WORLD_FLAGS.get(world, ("--steps 100", 0))
            if seed == 0 and world in WORLD_FLAGS:
                found.append(run(world, "base", flags=flags, horizon=horizon))
            found.append(run(world, "grpo", seed, flags, horizon=horizon))
    return found


def credit(labels=CREDITS):
    found = [run(world, "base", flags=flags, horizon=horizon)
             for world, (flags, horizon) in CREDIT_WORLDS.items()]
    for seed in range(5):
        for world, (flags, horizon) in CREDIT_WORLDS.items():
            own_data = "data/rooms" if "data/rooms" in flags else "data"
            found += [run(world, label, seed, f"{flags} {own.format(data=own_data)} --save_every 5 "
                          "--set keep=1000", turns=CREDIT_TURNS, horizon=horizon)
                      for label, own in labels.items()
                      if (world, label) != ("textcraft", "sequence")]
    return found


def arms(world, labels, flags, horizon=0):
    return [run(world, label, seed, f"{own} {flags}", horizon=horizon)
            for seed in range(5) for label, own in labels.items()]


def oracle():
    return [*arms("babyai", ORACLES, f"--data data/rooms --horizon 6 {ORACLE_FLAGS}", 6),
            *arms("textcraft", ORACLES, f"--horizon 6 {ORACLE_FLAGS}", 6)]


def distill():
    found = [run("babyai", "base")]
    keep = "--save_every 5 --set keep=1000"
    for seed in range(3):
        teacher = f"runs/study/distill/babyai_grpo_s{seed}/final"
        found.append(run("babyai", "grpo", seed, keep))
        found.append(run("babyai", "distill", seed,
                         f"--algo distill --algo_args teacher={teacher} {keep}"))
    return found


def transfer():
    every = tuple(TRANSFER_STEPS)
    data = f"--data {ALL_ITEMS}"
    found = [run("babyai", "base", flags=data, measured=every)]
    before = ""
    for world, steps in TRANSFER_STEPS.items():
        flags = f"--steps {steps} {data}"
        found.append(run(world, "alone", flags=flags, measured=every))
        if before:  # the first of them is the run above
            model = f"--model runs/study/transfer/{before}/final"
            found.append(run(world, "next", flags=f"{flags} {model}", measured=every))
        before = found[-1].name
    mixture = ",".join(every)
    return [*found, run(mixture, "mixture", flags=f"--steps 60 {data}", measured=every)]


def speedrun():
    return [run(world, label, seed, flags)
            for label, (world, _, flags) in SPEEDRUNS.items() for seed in range(2)]


STUDIES = {
    "algorithms": algorithms, "horizon": horizon, "rooms_horizon": rooms_horizon,
    **dict.fromkeys(PRETRAINED, pretrained), "collapse": collapse, "recipe": recipe,
    "pretrained_lora": pretrained_lora, "worlds": worlds, "transfer": transfer, "credit": credit,
    "distill": distill, "ideas": lambda: credit(IDEAS), "oracle": oracle, "speedrun": speedrun,
    "states": lambda: arms("searchqa", STATES, "--steps 300"),
    "discount": lambda: arms("babyai", DISCOUNTS, f"--data data/rooms --horizon 20 {ORACLE_FLAGS}",
                             20),
}


def runs_of(study):
    """The runs of a study -> [Run, ...]."""
    return STUDIES[study](study) if study in PRETRAINED else STUDIES[study]()
