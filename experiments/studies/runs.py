"""The runs of each study, in the order in which they are trained, listed and drawn."""

from typing import NamedTuple

from config import TINY_HORIZONS

# Study "horizon": environment turns in all of a run, and the number of seeds.
TURNS = {"babyai": 25_000, "textcraft": 40_000}
SEEDS = {"babyai": 3, "textcraft": 8}

# Study "credit": label -> flags besides those of GRPO; for each world the flags of all its runs and
# the horizon in evaluation.
CREDITS = {
    "grpo": "",
    "gspo": "--loss gspo --aggregation sequence",
    "gspo_turn": "--loss gspo --loss_args per=turn --aggregation sequence",
    "state": "--algo gigpo",
}
# Flags that showed no gain and were taken out. Commit 8a0ad8a has them, and can repeat these runs.
CREDITS_TAKEN_OUT = {
    "cispo": "--loss cispo",
    "turn": "--credit turn",
    "dynamic": "--dynamic_sampling 48",
    "keep_half": "--keep_groups 0.5",
    "frontier": "--sampler frontier",
}
# Control: the part of gspo_turn that does not explain its gain.
CREDIT_CONTROLS = {"babyai": {"sequence": "--aggregation sequence"}}
CREDIT_TURNS = 16_000
CREDIT_WORLDS = {
    "babyai": ("--data data/rooms --horizon 3,6 --horizon_steps 20", 10),
    "textcraft": ("", 8),
}

# Studies whose runs are also evaluated at a quarter, half and three quarters of the training.
EVALUATED_MIDWAY = (
    "horizon", "rooms_horizon", "pretrained_horizon", "pretrained_rooms", "pretrained_rooms_gpu",
    "pretrained_rooms_36k", "collapse", "credit", "distill",
)
# Those evaluated at other parts of the training.
MIDWAY_PARTS = dict.fromkeys(
    ("credit", "rooms_horizon", "pretrained_horizon", "pretrained_rooms", "pretrained_rooms_gpu",
     "pretrained_rooms_36k"),
    (0.5,),
)
# Samples of a held-out item after the training, where they are not two.
SAMPLES = {"horizon": 4, "pretrained_horizon": 1, "pretrained_rooms": 1}
# The label that the others are compared with.
BASELINES = {"horizon": "scaling", "rooms_horizon": "scaling", "pretrained_horizon": "scaling",
             "pretrained_rooms": "scaling", "pretrained_rooms_gpu": "scaling",
             "pretrained_rooms_36k": "scaling", "collapse": "scaling", "credit": "grpo",
             "distill": "grpo"}

# Studies "algorithms", "worlds" and "transfer": folders of item sets.
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

# Studies "horizon" and "rooms_horizon": only NaN and --max_kl stop a run. Checkpoints are frequent:
# one near every number of turns.
TO_THE_END = ("--min_entropy", "0", "--save_every", "5", "--keep", "1000")
ROOMS_ROUNDS = (3, 6, 10)
ROOMS_TURNS = 50_000

# Study "pretrained_horizon": SmolLM2-135M after the warm start in four worlds (docs/warm_start.md).
PRETRAINED = (
    "--model runs/mix_warm/final --slots 32 --items_per_step 16 --rollouts_per_item 8 "
    "--max_tokens 48 --max_length 2048 --minibatches 1 --lr 3e-5 --warmup_steps 2 --kl_coef 0 "
    "--microbatch_tokens 2048 --min_entropy 0 --save_every 2 --keep 1000"
)
PRETRAINED_ROUNDS = (3, 4, 5)
PRETRAINED_TURNS = 6_000

# Study "pretrained_rooms": SmolLM2-135M after the warm start in BabyAI's rooms.
PRETRAINED_ROOMS = (
    "--model runs/rooms_warm/final --data data/rooms --slots 32 --items_per_step 8 "
    "--rollouts_per_item 8 --max_tokens 24 --max_length 2048 --minibatches 1 --lr 5e-5 "
    "--warmup_steps 2 --kl_coef 0 --microbatch_tokens 2048 --min_entropy 0 --save_every 4 "
    "--keep 1000"
)
PRETRAINED_ROOMS_TURNS = 8_000

# Study "pretrained_rooms_gpu": the same with more and larger steps.
PRETRAINED_ROOMS_GPU = (
    "--model runs/rooms_warm/final --data data/rooms --slots 128 --items_per_step 16 "
    "--rollouts_per_item 8 --max_tokens 24 --max_length 2048 --minibatches 1 --lr 3e-5 "
    "--invalid_penalty 0.1 --warmup_steps 2 --kl_coef 0 --microbatch_tokens 16384 "
    "--min_entropy 0 --save_every 13 --keep 1000"
)
PRETRAINED_ROOMS_GPU_TURNS = 24_000

# Study "pretrained_rooms_36k": with --max_length 2048 up to a quarter of the trajectories of a step
# end before the horizon of 10, with 2560 some 1 %. With 112 slots four runs fit into 78 GiB.
PRETRAINED_ROOMS_36K = (
    "--model runs/rooms_warm/final --data data/rooms --slots 112 --items_per_step 16 "
    "--rollouts_per_item 8 --max_tokens 24 --max_length 2560 --minibatches 1 --lr 3e-5 "
    "--invalid_penalty 0.1 --warmup_steps 2 --kl_coef 0 --microbatch_tokens 16384 "
    "--min_entropy 0 --save_every 6 --keep 5"
)
PRETRAINED_ROOMS_36K_TURNS = 36_000

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
    "sequence": "--aggregation sequence",
    "horizon_4": "--horizon_schedule fixed --horizon 4",
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


def fixed(horizon):
    return ("--horizon_schedule", "fixed", "--horizon", str(horizon))


def algorithms():
    found = []
    for world, (flags, horizon) in WORLD_FLAGS.items():
        flags = tuple(flags.split())
        found.append(Run(world, "base", 0, flags, horizon=horizon))
        for seed in range(3):
            for algo in ("grpo", "ppo", "rloo", "reinforce_pp"):
                found.append(Run(world, algo, seed, ("--algo", algo, *flags), horizon=horizon))
    return found


def schedules(rounds, growing=()):
    """The four schedules of the horizon: label -> flags. growing: the flags that set `rounds`."""
    return {
        "scaling": growing,
        "long": fixed(rounds[-1]),
        "short": fixed(rounds[0]),
        "adaptive": ("--horizon_schedule", "adaptive", *growing),
    }


def horizon():
    found = []
    for world in ("babyai", "textcraft"):
        found.append(Run(world, "base", 0))
        labels = schedules(TINY_HORIZONS[world].rounds)
        for seed in range(SEEDS[world]):
            for label, schedule in labels.items():
                found.append(Run(world, label, seed, schedule + TO_THE_END, TURNS[world]))
    return found


def rooms_horizon():
    rooms = ("--data", "data/rooms")
    labels = schedules(ROOMS_ROUNDS, ("--horizon", ",".join(map(str, ROOMS_ROUNDS))))
    last = ROOMS_ROUNDS[-1]
    found = [Run("babyai", "base", 0, rooms, horizon=last)]
    for seed in range(5):
        for label, schedule in labels.items():
            flags = schedule + rooms + TO_THE_END
            found.append(Run("babyai", label, seed, flags, ROOMS_TURNS, last))
    return found


def pretrained_horizon():
    return horizons_of_pretrained(
        "searchqa", PRETRAINED, PRETRAINED_ROUNDS, 5, PRETRAINED_TURNS, ("scaling", "long", "short")
    )


def pretrained_rooms():
    return horizons_of_pretrained(
        "babyai", PRETRAINED_ROOMS, ROOMS_ROUNDS, 10, PRETRAINED_ROOMS_TURNS
    )


def pretrained_rooms_gpu():
    return horizons_of_pretrained(
        "babyai", PRETRAINED_ROOMS_GPU, ROOMS_ROUNDS, 13, PRETRAINED_ROOMS_GPU_TURNS
    )


def pretrained_rooms_36k():
    return horizons_of_pretrained(
        "babyai", PRETRAINED_ROOMS_36K, ROOMS_ROUNDS, 13, PRETRAINED_ROOMS_36K_TURNS
    )


def horizons_of_pretrained(
    world, flags, rounds, horizon_steps, turns, labels=("scaling", "long")
):
    """Some schedules of the horizon for a pretrained model, two seeds. flags: of all runs."""
    flags = tuple(flags.split())
    growing = ("--horizon", ",".join(map(str, rounds)), "--horizon_steps", str(horizon_steps))
    schedule = schedules(rounds, growing)
    found = [Run(world, "base", 0, flags, horizon=rounds[-1])]
    for seed in range(2):
        for label in labels:
            found.append(Run(world, label, seed, schedule[label] + flags, turns, rounds[-1]))
    return found


def collapse():
    flags = ("--min_entropy", "0", "--steps", "250", "--keep", "1000")
    schedules = {"long": fixed(TINY_HORIZONS["textcraft"].rounds[-1]), "scaling": ()}
    found = [Run("textcraft", "base", 0)]
    for seed in range(2):
        for label, schedule in schedules.items():
            found.append(Run("textcraft", label, seed, schedule + flags))
    return found


def recipe():
    found = [Run("babyai", "base", 0)]
    for seed in range(2):
        for label, flags in RECIPES.items():
            found.append(Run("babyai", label, seed, ("--steps", "40", *flags.split())))
    return found


def worlds():
    found = []
    for seed in range(3):
        for world in ("searchqa", "sciworld", "babyai,textcraft", "webarena"):
            flags, horizon = WORLD_FLAGS.get(world, ("--steps 100", 0))
            flags = tuple(flags.split())
            if seed == 0 and world in WORLD_FLAGS:
                found.append(Run(world, "base", 0, flags, horizon=horizon))
            found.append(Run(world, "grpo", seed, flags, horizon=horizon))
    return found


def credit():
    found = []
    for world, (flags, horizon) in CREDIT_WORLDS.items():
        found.append(Run(world, "base", 0, tuple(flags.split()), horizon=horizon))
    keep = "--save_every 5 --keep 1000"
    for seed in range(5):
        for world, (flags, horizon) in CREDIT_WORLDS.items():
            labels = CREDITS | CREDITS_TAKEN_OUT | CREDIT_CONTROLS.get(world, {})
            for label, own in labels.items():
                flags_of_run = tuple(f"{flags} {own} {keep}".split())
                found.append(Run(world, label, seed, flags_of_run, CREDIT_TURNS, horizon))
    return found


def distill():
    found = [Run("babyai", "base", 0)]
    keep = ("--save_every", "5", "--keep", "1000")
    for seed in range(3):
        teacher = f"runs/study/distill/babyai_grpo_s{seed}/final"
        found.append(Run("babyai", "grpo", seed, keep))
        found.append(Run("babyai", "distill", seed,
                         ("--algo", "distill", "--algo_args", f"teacher={teacher}", *keep)))
    return found


def transfer():
    every = tuple(TRANSFER_STEPS)
    data = ("--data", ALL_ITEMS)
    found = [Run("babyai", "base", 0, data, measured=every)]
    before = ""
    for world, steps in TRANSFER_STEPS.items():
        flags = ("--steps", str(steps), *data)
        found.append(Run(world, "alone", 0, flags, measured=every))
        if before:  # the first of them is the run above
            model = f"runs/study/transfer/{before}/final"
            found.append(Run(world, "next", 0, (*flags, "--model", model), measured=every))
        before = found[-1].name
    mixture = ",".join(every)
    found.append(Run(mixture, "mixture", 0, ("--steps", "60", *data), measured=every))
    return found


STUDIES = {
    "credit": credit,
    "distill": distill,
    "algorithms": algorithms,
    "horizon": horizon,
    "rooms_horizon": rooms_horizon,
    "pretrained_horizon": pretrained_horizon,
    "pretrained_rooms": pretrained_rooms,
    "pretrained_rooms_gpu": pretrained_rooms_gpu,
    "pretrained_rooms_36k": pretrained_rooms_36k,
    "transfer": transfer,
    "collapse": collapse,
    "recipe": recipe,
    "worlds": worlds,
}


def runs_of(study):
    """The runs of a study -> [Run, ...]."""
    return STUDIES[study]()
