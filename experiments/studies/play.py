"""Train and evaluate one run of a study."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from config import presets
from experiments.effective_horizon import effective_horizon
from experiments.studies import rows
from experiments.studies.runs import MIDWAY, SAMPLES
from trajectory import read_trajectories

ROOT = Path(__file__).parent.parent.parent

# What a row of results keeps of a row of metrics.jsonl.
KEPT = (
    "step", "horizon", "success", "score", "reward", "turns", "trajectories", "truncated",
    "valid_actions", "env_error", "entropy", "kl_behaviour", "reply_tokens",
    "zero_gradient_groups", "truncated/length", "continued_turns",
)
MOST_STEPS = 100_000  # of a run that its turns end

# The largest share of an evaluation's episodes whose environment may fail. They are left out of its
# figures.
MOST_FAILED = 0.02


def do(study, run, commit):
    """Train and evaluate `run`, then keep its rows.

    A run that train.py stops (max_kl, nan) is evaluated at its last checkpoint. A mixture is
    evaluated in each of its worlds, a run with `measured` in those.

    Raises:
        RuntimeError: a command failed, or another commit than `commit` is checked out.
    """
    out = ROOT / "runs/study" / study / run.name
    out.parent.mkdir(parents=True, exist_ok=True)
    metrics, stopped = train(run, out) if run.label != "base" else ([], "")

    # The last model, and checkpoints on the way.
    model = out / "final"
    if not metrics or stopped:
        start = flag(run, "--model", "tiny")
        model = max(out.glob("checkpoints/step_*"), default=start)
    samples = SAMPLES.get(study, 2)
    worlds = run.measured or run.world.split(",")
    evaluations = [evaluate(world, run, model, samples, out) for world in worlds]
    summary = summarize(run, metrics, evaluations, commit, stopped)
    if metrics and study in MIDWAY:
        midway = evaluate_midway(run, out, metrics, MIDWAY[study])
        summary["held_out"] = [*midway, point(metrics, summary, out)]

    if revision() != commit:
        raise RuntimeError("another commit is checked out than at the beginning")
    rows.keep(study, {run.name: [*map(training_row, metrics), summary]})
    for part in ("trajectories", "checkpoints"):
        shutil.rmtree(out / part, ignore_errors=True)


def train(run, out):
    """Train, or continue what an interrupted training left in `out`.

    -> rows of metrics.jsonl, and the message with which train.py stopped by itself, or "".

    Raises:
        RuntimeError: train.py failed, or a signal stopped it.
    """
    limit = ["--save_every", 10]
    if run.turns:
        limit = ["--set", f"turns={run.turns}", "--steps", MOST_STEPS]
    resume = ["--resume"] if out.exists() else []  # refuses other flags than before
    stopped = ""
    try:
        call("train.py", "--env", run.world, "--seed", run.seed, "--out", out, *limit, *run.flags,
             *resume)
    except RuntimeError as e:
        if "stopped at step" not in str(e):
            raise
        stopped = str(e).strip().splitlines()[-1]
    if not stopped and not (out / "final").exists():
        raise RuntimeError("train.py was stopped: run the study again")
    return rows.read_lines(out / "metrics.jsonl"), stopped


def flags_of(config_class, settings, left_out=()):
    """The words of a command line that gives these settings, of a run's config.json, to a command
    whose settings are `config_class`. Those in `left_out` are not given, nor defaults that differ
    between the worlds of a mixture."""
    words = []
    worlds = settings["worlds"].values()
    for field in fields(config_class):
        value = settings.get(field.name)
        is_given = value is not None and not (value == "" and field.metadata.get("choices"))
        is_default = len({own.get(field.name) for own in worlds}) > 1
        if not field.metadata or field.name in left_out or not is_given or is_default:
            continue
        is_study = field.metadata.get("study")
        words += ["--set", f"{field.name}={value}"] if is_study else [f"--{field.name}", str(value)]
    return words


def flag(run, name, default):
    """The value of a flag of train.py in this run."""
    return run.flags[run.flags.index(name) + 1] if name in run.flags else default


def evaluate(world, run, model, samples, out):
    """Play the held-out items with eval.py -> what it writes to --out, as a dict.

    Raises:
        RuntimeError: more than MOST_FAILED of the episodes failed, so that the rest says little.
    """
    data = flag(run, "--data", "")
    horizon = run.horizon or presets("tiny", world)["horizon"].split(",")[-1]
    # A file for each evaluation: eval.py continues one that was interrupted.
    result = out.with_name(f"{out.name}.{world}_{Path(model).name}_{samples}.result")
    call("eval.py", "--env", world, "--model", model, "--samples", samples, "--horizon", horizon,
         "--out", result, "--trajectories", result.with_suffix(".played"),
         *(["--data", data] if data else []))
    found = json.loads(result.read_text())
    result.unlink()
    result.with_suffix(".played").unlink(missing_ok=True)
    if found["env_error"] > MOST_FAILED:
        share = f"{found['env_error']:.0%}"
        raise RuntimeError(f"{share} of the episodes in {world} failed: run the study again")
    return found


def evaluate_midway(run, out, metrics, parts):
    """Evaluate the checkpoints that are nearest to these parts of the environment turns, one sample
    per item -> what `point` gives for each, after the evaluations of --eval_every."""
    steps = {folder: int(folder.name[5:]) for folder in out.glob("checkpoints/step_*")}
    total = run.turns or turns_played(metrics)
    # With the weights before the row's step.
    points = [point(metrics[:n], {"success": row["eval/success"], "items": {}}, out)
              for n, row in enumerate(metrics) if "eval/success" in row]
    for part in parts if steps else ():
        distance = {folder: abs(turns_played(metrics[:step]) - part * total)
                    for folder, step in steps.items()}
        nearest = min(distance, key=distance.get)
        found = evaluate(run.world, run, nearest, 1, out)
        points.append(point(metrics[: steps[nearest]], found, out))
    return points


def point(metrics, found, out):
    """Held-out success, that of each item, what the training up to there took and, if --eval_every
    has played then, the effective horizon."""
    file = out / f"trajectories/eval_{len(metrics):06d}.jsonl"
    held_out = {"turns": round(turns_played(metrics)), "seconds": round(seconds(metrics)),
                "success": found["success"], "items": found["items"]}
    if file.exists():
        held_out["effective_horizon"] = effective_horizon(read_trajectories(file))
    return held_out


def training_row(row):
    """What is kept of a row of metrics.jsonl."""
    kept = {key: round(row[key], 5) for key in KEPT if key in row}
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
    return summary | {
        "command": train_command(run, len(metrics)) if metrics else "",
        "commit": commit, "seed": run.seed, "stopped": stopped,
        "machine": machine(), "processor": processor(),
        "model_sha256": first["config"]["model_sha256"], "base_sha256": base_sha256(),
        "seconds": round(seconds(metrics)),
        "environment_turns": round(turns_played(metrics)),
    }


def machine():
    """What computes: the GPU if there is one, or the CPU's number of cores and their kind."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def processor():
    """What the bits of a run on the CPU depend on besides its command and commit: vendor, family
    and model of the CPU, the instructions that PyTorch uses, and PyTorch's version."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    cpu = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (.*)", text, re.MULTILINE)[:3]
    instructions = torch.backends.cpu.get_cpu_capability()
    return " ".join([*cpu, instructions, f"PyTorch {torch.__version__}"])


def train_command(run, steps):
    """The command that repeats the training in one piece."""
    limit = "" if "--steps" in run.flags else f" --steps {steps}"
    return (f"OMP_NUM_THREADS=1 python train.py --env {run.world} --seed {run.seed}{limit} "
            f"{shlex.join(run.flags)}")


def held_out_figures(found):
    """Of what eval.py writes: the figures that are kept, and its command."""
    config = found["config"]
    names = "agent", "agent_args", "action_format", "max_tokens", "data"
    more = [word for name in names if config.get(name) for word in (f"--{name}", str(config[name]))]
    same = ("success", "score", "turns", "valid_actions", "env_error", "items")
    return {name: found[name] for name in same} | {
        "ci95": found["ci95"]["success"],
        "score_ci95": found["ci95"]["score"],
        "categories": {name: c["success"] for name, c in found["categories"].items()},
        "eval_horizon": config["horizon"],
        "evaluation": f"OMP_NUM_THREADS=1 python eval.py --env {config['env']} "
                      f"--model {Path(config['model']).name} --samples {config['samples']} "
                      f"--horizon {config['horizon']} --items {len(found['items'])} "
                      f"{shlex.join(more)}",
    }


def turns_played(metrics):
    """Environment turns in all of these steps, those of continuations included."""
    return sum(row["turns"] * row["trajectories"] * (1 - row.get("env_error", 0))
               + row.get("continued_turns", 0) for row in metrics)


def seconds(metrics):
    """Seconds of rollouts and updates in all of these steps."""
    return sum(row["seconds_rollout"] + row["seconds_update"] for row in metrics)


def call(*command):
    """Run one of this repository's scripts with one thread -> what it wrote to stdout.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to stderr.
    """
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}\n{done.stderr[-2000:]}")
    return done.stdout


def revision():
    """The commit that is checked out. Exits where code or items differ from it."""

    def git(*args):
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "data")
    if changed:
        sys.exit(f"this checkout is edited, and results name a commit: commit first, or use a "
                 f"clone\n{changed}")
    return git("rev-parse", "--short", "HEAD")


def base_sha256():
    """Of the built-in model's weights."""
    return hashlib.sha256((ROOT / "data/tiny/model.safetensors").read_bytes()).hexdigest()


def check_base(study, results):
    """Exit if the finished runs of a study start from another built-in model than today's."""
    if {run_rows[-1]["base_sha256"] for run_rows in results.values()} - {base_sha256()}:
        sys.exit(f"study.py: the rows of {study} in {rows.RESULTS} are of another built-in model")
