"""Train and evaluate one run of a study."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from experiments.studies import rows
from experiments.studies.runs import EVALUATED_MIDWAY, MIDWAY_PARTS, SAMPLES
from config import TINY_HORIZONS

ROOT = Path(__file__).parent.parent.parent

# What a row of results keeps of a row of metrics.jsonl.
KEPT = (
    "step", "horizon", "success", "score", "reward", "turns", "trajectories", "truncated",
    "valid_actions", "env_error", "entropy", "kl_behaviour", "reply_tokens",
    "zero_gradient_groups",
)
KEPT_IF_THERE = ("truncated/length",)

MOST_STEPS = 100_000  # of a run that --turns ends

# The largest share of an evaluation's episodes whose environment may fail. They are left out of its
# figures.
MOST_FAILED = 0.02


def do(study, run, commit):
    """Train and evaluate `run`, then write its file of rows.

    A run that train.py stops (--max_kl, nan) is evaluated at its last checkpoint. A mixture is
    evaluated in each of its worlds, a run with `measured` in those. The file gets its name only
    when it is complete.

    Raises:
        RuntimeError: a command failed, or another commit than `commit` is checked out.
    """
    out = ROOT / "runs/study" / study / run.name
    path = rows.run_path(study, run.name)
    path.parent.mkdir(parents=True, exist_ok=True)

    # Training.
    metrics = []
    stopped = ""
    try:
        if run.label != "base":
            metrics = train(run, out)
    except RuntimeError as e:
        if "stopped at step" not in str(e):
            raise
        metrics = rows.read_lines(out / "metrics.jsonl")
        stopped = str(e).strip().splitlines()[-1]

    # Evaluation of the last model, and of checkpoints on the way.
    start = flag(run, "--model", "tiny")
    if not metrics:
        model = start
    elif stopped:
        model = max(out.glob("checkpoints/step_*"), default=start)
    else:
        model = out / "final"
    samples = SAMPLES.get(study, 2)
    worlds = run.measured or run.world.split(",")
    evaluations = [evaluate(world, run, model, samples, path) for world in worlds]
    midway = []
    if metrics and study in EVALUATED_MIDWAY:
        parts = MIDWAY_PARTS.get(study, (0.25, 0.5, 0.75))
        midway = evaluate_midway(run, out, metrics, path, parts)

    # The last row.
    if revision() != commit:
        raise RuntimeError("another commit is checked out than at the beginning")
    summary = summarize(run, metrics, evaluations, commit, stopped)
    if metrics and study in EVALUATED_MIDWAY:
        summary["held_out"] = [*midway, point(metrics, summary)]

    # Writing.
    lines = [json.dumps(row) + "\n" for row in [*map(training_row, metrics), summary]]
    path.with_suffix(".partial").write_text("".join(lines))
    path.with_suffix(".partial").rename(path)
    for part in ("trajectories", "checkpoints"):
        shutil.rmtree(out / part, ignore_errors=True)


def train(run, out):
    """Train, or go on with what an interrupted training left in `out` -> rows of metrics.jsonl.

    Raises:
        RuntimeError: train.py failed, or a signal stopped it.
    """
    limit = ["--turns", run.turns, "--steps", MOST_STEPS] if run.turns else ["--save_every", 10]
    resume = ["--resume"] if out.exists() else []  # refuses other flags than before
    call("train.py", "--env", run.world, "--seed", run.seed, "--out", out, *limit, *run.flags,
         *resume)
    if not (out / "final").exists():
        raise RuntimeError("train.py was stopped: run the study again")
    return rows.read_lines(out / "metrics.jsonl")


def flag(run, name, default):
    """The value of a flag of train.py in this run."""
    return run.flags[run.flags.index(name) + 1] if name in run.flags else default


def evaluate(world, run, model, samples, path):
    """Play the held-out items with eval.py -> what it writes to --out, as a dict.

    Raises:
        RuntimeError: more than MOST_FAILED of the episodes failed, so that the rest says little.
    """
    data = ()
    if "--data" in run.flags:
        begin = run.flags.index("--data")
        data = run.flags[begin : begin + 2]
    horizon = run.horizon or TINY_HORIZONS[world].eval_horizon
    # Files for each evaluation: eval.py goes on from the trajectories of one that was interrupted.
    result = path.with_suffix(f".{world}_{Path(model).name}_{samples}.result")
    trajectories = result.with_suffix(".played")
    call(
        "eval.py", "--env", world, "--model", model, "--samples", samples, "--horizon", horizon,
        "--out", result, "--trajectories", trajectories, *data,
    )
    found = json.loads(result.read_text())
    result.unlink()
    trajectories.unlink(missing_ok=True)
    if found["env_error"] > MOST_FAILED:
        share = f"{found['env_error']:.0%}"
        raise RuntimeError(f"{share} of the episodes in {world} failed: run the study again")
    return found


def evaluate_midway(run, out, metrics, path, parts):
    """Evaluate the checkpoints that are nearest to these parts of the environment turns, one sample
    per item -> [{"turns", "seconds", "success", "items"}, ...]."""
    steps = {folder: int(folder.name[5:]) for folder in out.glob("checkpoints/step_*")}
    if not steps:
        return []
    total = run.turns or turns_played(metrics)
    points = []
    for part in parts:
        distance = {
            folder: abs(turns_played(metrics[:step]) - part * total)
            for folder, step in steps.items()
        }
        nearest = min(distance, key=distance.get)
        found = evaluate(run.world, run, nearest, 1, path)
        points.append(point(metrics[: steps[nearest]], found))
    return points


def point(metrics, found):
    """Held-out success, that of each item, and what the training up to there took."""
    return {
        "turns": round(turns_played(metrics)),
        "seconds": round(seconds(metrics)),
        "success": found["success"],
        "items": found["items"],
    }


def training_row(row):
    """What is kept of a row of metrics.jsonl."""
    keys = [*KEPT, *(key for key in KEPT_IF_THERE if key in row)]
    kept = {key: round(row[key], 5) for key in keys}
    kept["seconds"] = round(row["seconds_rollout"] + row["seconds_update"], 2)
    return kept


def summarize(run, metrics, evaluations, commit, stopped):
    """The last row: the figures on held-out items, and all that is needed to repeat the run.

    Args:
        metrics: rows of metrics.jsonl; none for the model before training.
        evaluations: what eval.py wrote, one dict for each world of the run.
        commit: the commit that is checked out.
        stopped: the message with which train.py stopped by itself, or "".
    """
    first = evaluations[0]
    summary = held_out_figures(first)
    if len(evaluations) > 1:
        summary["worlds"] = {e["config"]["env"]: held_out_figures(e) for e in evaluations}
    summary |= {
        "command": train_command(run, len(metrics)) if metrics else "",
        "commit": commit,
        "seed": run.seed,
        "machine": machine(),
        "stopped": stopped,
        "model_sha256": first["config"]["model_sha256"],
        "base_sha256": sha256(ROOT / "data/tiny/model.safetensors"),
        "seconds": round(seconds(metrics)),
        "environment_turns": round(turns_played(metrics)),
    }
    return summary


def machine():
    """What computes: the GPU if there is one, or the CPU's number of cores and their kind."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def train_command(run, steps):
    """The command that repeats the training in one piece."""
    words = ["OMP_NUM_THREADS=1 python train.py --env", run.world, "--seed", run.seed]
    if "--steps" not in run.flags:
        words += ["--steps", steps]
    # Joined with flags by one more space, even where there are none.
    return " ".join(map(str, words)) + " " + " ".join(run.flags)


def held_out_figures(found):
    """Of what eval.py writes: the figures that are kept, and its command."""
    config = found["config"]
    model = Path(config["model"]).name
    evaluation = (
        f"OMP_NUM_THREADS=1 python eval.py --env {config['env']} --model {model} "
        f"--samples {config['samples']} --horizon {config['horizon']}"
    )
    if config["data"]:
        evaluation += f" --data {config['data']}"
    return {
        "success": found["success"],
        "ci95": found["ci95"]["success"],
        "score": found["score"],
        "score_ci95": found["ci95"]["score"],
        "turns": found["turns"],
        "valid_actions": found["valid_actions"],
        "env_error": found["env_error"],
        "categories": {name: c["success"] for name, c in found["categories"].items()},
        "items": found["items"],
        "eval_horizon": config["horizon"],
        "evaluation": evaluation,
    }


def turns_played(metrics):
    """Environment turns in all of these steps."""
    return sum(row["turns"] * row["trajectories"] for row in metrics)


def seconds(metrics):
    """Seconds of rollouts and updates in all of these steps."""
    return sum(row["seconds_rollout"] + row["seconds_update"] for row in metrics)


def call(*command):
    """Run one of this repository's scripts with one thread -> what it wrote to stdout.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def revision():
    """The commit that is checked out. Exits where code or items differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "data")
    if changed:
        sys.exit(
            f"{Path(sys.argv[0]).name}: this checkout is edited, and results name a commit: "
            f"commit first, or use a clone\n{changed}"
        )
    return git("rev-parse", "--short", "HEAD")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begin(study, results):
    """Take the study's lock and check the built-in model -> an open file, the lock until closed.

    Only one process may work at a study, and all runs of a study start from one built-in model.
    Exits otherwise.

    Args:
        results: rows of the finished runs, {run name: [row, ...]}.
    """
    folder = ROOT / "runs/study" / study
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "base_sha256").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"study.py: another one is at work in {folder}")

    base = sha256(ROOT / "data/tiny/model.safetensors")
    lock.seek(0)
    used = {lock.read().strip() or base}
    used |= {run_rows[-1]["base_sha256"] for run_rows in results.values()}
    if used != {base}:
        sys.exit(
            f"study.py: {folder} or experiments/results/{study}* is of another built-in model: "
            "move both away"
        )
    lock.seek(0)
    lock.truncate()
    lock.write(base)
    lock.flush()
    return lock
