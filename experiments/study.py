"""Studies of many short runs: `python experiments/study.py NAME [--jobs N] [--only TEXT] [--dry | --draw]`, NAME one of: algorithms, horizon,
collapse, recipe, worlds.

A run (a world, a label, a seed) leaves one file, experiments/results/NAME/RUN.jsonl: a line a training step, and a last one with what it
reached on held-out items, its commands, commit and model. What is there is not run again, what was cut short goes on where it was, so a
study may take days; it wants a checkout that nobody edits meanwhile (git worktree add). A run that train.py stops (--max_kl, nan) is
evaluated at its last checkpoint. Two samples of each held-out item (horizon: four).
--dry lists what is missing and how long it will take; --draw makes docs/study_NAME*.png and the table from the files alone, as every other
call does in the end. Two runs at a time by default, one thread each.

algorithms: PPO, GRPO, RLOO and REINFORCE++ with their defaults in BabyAI and TextCraft, three seeds.
horizon: GRPO with a short, a long, a growing (ScalingInter) and an adaptive horizon; TextCraft with eight seeds, BabyAI, whose items can all be
done within the first stage, as a control with three. All get the same number of environment turns (TURNS), so a short horizon more optimizer
steps; all are evaluated at the longest horizon, also at a quarter, half and three quarters of the turns (one sample an item), and are compared with
ScalingInter seed by seed, at the end and at half of the turns: a difference counts if the 95 % interval of the paired differences (Student's t) leaves out 0. The one that was
named beforehand: TextCraft, scaling against long. Collapsed is a run that ends with less than half of the best that it had on held-out items.
collapse: TextCraft, 250 steps with the long horizon and with the growing one, two seeds: the paper's fixed 10 rounds collapse after about 125.
Evaluated on the way as well.
recipe: the first 40 steps of the default run in BabyAI with one thing changed, two seeds (three learning rates ended alike after 100).
worlds: GRPO in SearchQA, in one task of SciWorld, in WebArena's tasks of one click, and one model for BabyAI and TextCraft; three seeds. Wants
the extras searchqa, sciworld and webarena, and Chromium; the item sets are made in runs/items.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from schedule import TINY, horizon_at  # noqa: E402

TURNS = {"babyai": 25_000, "textcraft": 40_000}  # of the environments, in all of a run of the study "horizon"
SEEDS = {"babyai": 3, "textcraft": 8}  # in that study
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 97.5 %, by the number of pairs
FNL, NAV = "runs/items/FNL", "runs/items/NAV"  # item sets of the study "worlds"
ON_THE_WAY = ("horizon", "collapse")  # studies whose runs are evaluated on the way, too
KEPT = ("step", "horizon", "success", "score", "reward", "turns", "trajectories", "truncated", "valid_actions", "env_error", "entropy", "kl_behaviour")


RECIPES = {"default": "", "lr_2e-4": "--lr 2e-4", "lr_8e-4": "--lr 8e-4", "8x16": "--items_per_step 8 --rollouts_per_item 16",
           "32x4": "--items_per_step 32 --rollouts_per_item 4", "minibatches_1": "--minibatches 1", "minibatches_4": "--minibatches 4",
           "kl_0.01": "--kl_coef 0.01", "clip_high_0.28": "--clip_high 0.28", "entropy_0.01": "--entropy_coef 0.01", "penalty_0": "--invalid_penalty 0",
           "penalty_0.2": "--invalid_penalty 0.2", "no_std": "--normalize_std false", "sequence": "--aggregation sequence",
           "horizon_4": "--horizon_schedule fixed --horizon 4"}


class Run(NamedTuple):
    world: str
    label: str  # what is compared: an algorithm, a schedule; "base": the model before training
    seed: int
    flags: tuple = ()
    turns: int = 0  # of the environments, after which training ends; 0: after the default number of steps
    horizon: int = 0  # in evaluation; 0: the world's

    @property
    def name(self):
        return f"{self.world.replace(',', '+')}_{self.label}_s{self.seed}"


def runs(study):
    found = []
    if study == "recipe":
        return [Run("babyai", "base", 0)] + [Run("babyai", label, seed, ("--steps", "40", *flags.split())) for seed in range(2) for label, flags in RECIPES.items()]
    fixed = lambda n: ("--horizon_schedule", "fixed", "--horizon", str(n))  # noqa: E731
    if study == "worlds":
        for seed in range(3):
            for world, steps, *flags in (("searchqa", "300"), ("sciworld", "40", "--data", FNL), ("babyai,textcraft", "100"),
                                         ("webarena", "50", "--data", NAV, "--horizon", "3,4")):
                horizon = 4 if world == "webarena" else 0
                found += [Run(world, "base", 0, tuple(flags[:2]), 0, horizon)] if seed == 0 and "," not in world else []
                found += [Run(world, "grpo", seed, ("--steps", steps, *flags), 0, horizon)]
        return found
    if study == "collapse":
        kinds = {"long": fixed(TINY["textcraft"].rounds[-1]), "scaling": ()}
        more = ("--min_entropy", "0", "--steps", "250", "--keep", "1000")
        return [Run("textcraft", "base", 0)] + [Run("textcraft", label, seed, flags + more) for seed in range(2) for label, flags in kinds.items()]
    for world in ("babyai", "textcraft"):
        found.append(Run(world, "base", 0))
        if study == "algorithms":
            found += [Run(world, algo, seed, ("--algo", algo)) for seed in range(3) for algo in ("grpo", "ppo", "rloo", "reinforce_pp")]
        else:
            rounds = TINY[world].rounds
            keep = ("--min_entropy", "0", "--save_every", "5", "--keep", "1000")  # nothing but nan and --max_kl stops it; a checkpoint near every turn
            kinds = {"scaling": (), "long": fixed(rounds[-1]), "short": fixed(rounds[0]), "adaptive": ("--horizon_schedule", "adaptive")}
            found += [Run(world, label, seed, flags + keep, TURNS[world]) for seed in range(SEEDS[world]) for label, flags in kinds.items()]
    return found


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def call(*command):
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")


def played(rows):
    return sum(row["turns"] * row["trajectories"] for row in rows)


def train(run, out):
    """-> the rows of metrics. By a number of turns: in pieces, each so short that it cannot have too many (half a step's at most)."""
    command = ["train.py", "--env", run.world, "--seed", run.seed, "--out", out, *([] if run.turns else ["--save_every", 10]), *run.flags]
    if not run.turns:
        call(*command, *["--resume"] * out.exists())
        return read(out / "metrics.jsonl")
    while True:
        rows = read(out / "metrics.jsonl") if (out / "final").exists() else []  # else it was cut short, and goes on
        steps, left, size = len(rows), run.turns - played(rows), rows[-1]["trajectories"] if rows else 128
        if rows and left < played(rows[-1:]) / 2:
            return rows
        while (left := left - size * longest(run, steps)) >= 0 or steps == len(rows):  # one more step cannot have too many turns
            steps += 1
        call(*command, "--steps", steps, *["--resume"] * out.exists())


def longest(run, step):
    """The largest number of turns that a trajectory can have at this step."""
    preset = TINY[run.world]
    if run.label in ("short", "long"):
        return int(run.flags[run.flags.index("--horizon") + 1])
    return horizon_at(step, preset.rounds, preset.every) if run.label == "scaling" else preset.rounds[-1]


def do(study, run, commit):
    """Train and evaluate; the run's file gets its name when it is complete. A mixture is evaluated in each of its worlds."""
    out, path = ROOT / "runs/study" / study / run.name, results(study, run)
    rows, stopped = [], ""
    try:
        rows = train(run, out) if run.label != "base" else []
    except RuntimeError as e:
        if "stopped at step" not in str(e):
            raise
        rows, stopped = read(out / "metrics.jsonl"), str(e).strip().splitlines()[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 4 if study == "horizon" else 2
    model = "tiny" if not rows else out / "final" if not stopped else max(out.glob("checkpoints/step_*"), default="tiny")
    (found, *others), held_out = [evaluated(world, run, model, samples, path) for world in run.world.split(",")], []
    for part in (0.25, 0.5, 0.75) if rows and study in ON_THE_WAY else ():
        near = {abs(played(rows[:int(p.name[5:])]) - part * (run.turns or played(rows))): p for p in out.glob("checkpoints/step_*")}
        if near:
            step = int(near[min(near)].name[5:])
            held_out.append({"turns": round(played(rows[:step])), "seconds": round(seconds(rows[:step])),
                             "success": evaluated(run.world, run, near[min(near)], 1, path)["success"]})
    train_command = f"OMP_NUM_THREADS=1 python train.py --env {run.world} --seed {run.seed} {f'--steps {len(rows)} ' * ('--steps' not in run.flags)}{' '.join(run.flags)}"
    last = held_out_figures(found) | ({"worlds": {f["config"]["env"]: held_out_figures(f) for f in (found, *others)}} if others else {}) | {
            "command": train_command if rows else "", "commit": commit,
            "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
            "stopped": stopped, "model_sha256": found["config"]["model_sha256"], "base_sha256": sha256(ROOT / "data/tiny/model.safetensors"),
            "seconds": round(seconds(rows)), "environment_turns": round(played(rows))}
    if revision() != commit:
        raise RuntimeError("another commit is checked out than at the beginning")
    if rows and study in ON_THE_WAY:
        last["held_out"] = [*held_out, {"turns": round(played(rows)), "seconds": round(seconds(rows)), "success": found["success"]}]
    lines = [{k: round(row[k], 5) for k in KEPT} | {"seconds": round(row["seconds_rollout"] + row["seconds_update"], 2)} for row in rows]
    path.with_suffix(".partial").write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    path.with_suffix(".partial").rename(path)
    for part in ("trajectories", "checkpoints"):
        shutil.rmtree(out / part, ignore_errors=True)


def held_out_figures(found):
    c = found["config"]
    command = f"OMP_NUM_THREADS=1 python eval.py --env {c['env']} --model {Path(c['model']).name} --samples {c['samples']} --horizon {c['horizon']}"
    return {"success": found["success"], "ci95": found["ci95"]["success"], "score": found["score"], "score_ci95": found["ci95"]["score"], "turns": found["turns"],
            "valid_actions": found["valid_actions"], "env_error": found["env_error"], "categories": {name: c["success"] for name, c in found["categories"].items()}, "eval_horizon": c["horizon"],
            "evaluation": command + f" --data {c['data']}" * bool(c["data"])}


def evaluated(world, run, model, samples, path):
    result, data = path.with_suffix(".result"), run.flags[run.flags.index("--data"):][:2] if "--data" in run.flags else ()
    call("eval.py", "--env", world, "--model", model, "--samples", samples, "--horizon", run.horizon or TINY[world].eval_rounds, "--out", result, *data)
    found = json.loads(result.read_text())
    result.unlink()
    return found


def revision():
    """The commit that is checked out. Exits where code or items differ from it."""
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    if changed := git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "data"):
        sys.exit(f"study.py: this checkout is edited, and results name a commit: commit first, or use a clone\n{changed}")
    return git("rev-parse", "--short", "HEAD")


def seconds(rows):
    return sum(row["seconds_rollout"] + row["seconds_update"] for row in rows)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def results(study, run):
    return ROOT / f"experiments/results/{study}/{run.name}.jsonl"


def paired(a, b):
    """Mean of a - b over the pairs, and half the width of its 95 % interval."""
    differences = [x - y for x, y in zip(a, b)]
    half = STUDENT[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
    return statistics.mean(differences), half


def difference(a, b):
    """As text: paired, with its interval."""
    if len(a) < 2:
        return ""
    d, half = paired(a, b)
    return f"{d:+.3f} ± {half:.3f}{'' if abs(d) > half else ', not shown'} ({len(a)} pairs)"


def table(study):
    lines = ["| world | run | seeds | steps | environment turns | min | held-out success | score | turns | valid actions | success in training, mean of all steps |"
             + (" collapsed | difference to scaling, 95 % | at half of the turns | difference |" if study in ON_THE_WAY else ""), "|---" * (15 if study in ON_THE_WAY else 11) + "|"]
    for world in sorted({run.world for run in runs(study)}):
        ends = {}  # label -> seed -> (rows, the last line)
        for run in runs(study):
            if run.world == world and (rows := read(results(study, run))):
                for part, figures in rows[-1].get("worlds", {"": {}}).items():  # of a mixture a line a world
                    ends.setdefault(f"{run.label} {part}".strip(), {})[run.seed] = rows[:-1], rows[-1] | figures
        for label, by_seed in ends.items():
            last = [end for _, end in by_seed.values()]
            success = [end["success"] for end in last]
            mean = lambda key: statistics.mean(end[key] for end in last)  # noqa: E731
            spread = f" ± {statistics.stdev(success):.3f}" if len(success) > 1 else f" [{last[0]['ci95'][0]:.3f}, {last[0]['ci95'][1]:.3f}]"
            score = mean("score") if all("score" in end for end in last) else mean("success")  # rows without one are of worlds where they are the same
            line = (f"| {world} | {label} | {len(last)} | {statistics.mean(len(rows) for rows, _ in by_seed.values()):.0f} | {mean('environment_turns'):.0f} | "
                    f"{mean('seconds') / 60:.1f} | {statistics.mean(success):.3f}{spread} | {score:.3f} | {mean('turns'):.2f} | {mean('valid_actions'):.3f} | ")
            trained = [rows for rows, _ in by_seed.values() if rows]
            line += f"{statistics.mean(statistics.mean(r['success'] for r in rows) for rows in trained):.3f} |" if trained else "|"
            if study in ON_THE_WAY:
                seeds = sorted(by_seed.keys() & ends.get("scaling", {}).keys())
                line += f" {sum(map(collapsed, last))} |" if trained else " |"
                line += f" {difference([by_seed[s][1]['success'] for s in seeds], [ends['scaling'][s][1]['success'] for s in seeds]) if label != 'scaling' else ''} |"
                halves = {name: {s: end["held_out"][1]["success"] for s, (_, end) in ends.get(name, {}).items() if len(end.get("held_out", ())) == 4} for name in (label, "scaling")}
                seeds, of = sorted(halves[label].keys() & halves["scaling"].keys()), [halves[label][s] for s in sorted(halves[label])]
                line += f" {statistics.mean(of):.3f} ± {statistics.stdev(of):.3f} |" if len(of) > 1 else " |"
                line += f" {difference([halves[label][s] for s in seeds], [halves['scaling'][s] for s in seeds]) if label != 'scaling' else ''} |"
            lines.append(line)
    return "\n".join(lines)


def collapsed(end):
    return bool(end["stopped"]) or end["success"] < max(point["success"] for point in end.get("held_out", [end])) / 2


def draw(study):
    """A picture of all worlds, of the horizons one a world."""
    worlds = sorted({run.world for run in runs(study) if results(study, run).exists()})
    for name, shown in ((f"{study}_{world}", [world]) for world in worlds) if study == "horizon" else [(study, worlds)]:
        (sweep if study == "recipe" else picture)(study, shown, ROOT / f"docs/study_{name}.png")


def sweep(study, worlds, path):
    """A line a setting, a dot a seed: what it reached on held-out items, and how soon, as success in the first twenty steps of training."""
    found = {}  # label -> the rows of each seed
    for run in runs(study):
        if run.label != "base" and (rows := read(results(study, run))):
            found.setdefault(run.label, []).append(rows)
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 1 + 0.3 * len(found)), layout="constrained", sharey=True)
    for ax, title, value in ((axes[0], "held-out success after training", lambda rows: rows[-1]["success"]),
                             (axes[1], "success in the first 20 steps of training", lambda rows: statistics.mean(r["success"] for r in rows[:20]))):
        for y, seeds in enumerate(found.values()):
            values = [value(rows) for rows in seeds]
            ax.plot(values, [y] * len(values), "o", color="C0", alpha=0.6)
            ax.plot(statistics.mean(values), y, "|", color="black", ms=14)
        ax.axvline(statistics.mean(map(value, found["default"])), color="grey", ls=":", label="default")
        ax.set_title(f"{', '.join(worlds)}: {title}", fontsize=10)
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(found)), [f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})" for label, seeds in found.items()])
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(path)


def picture(study, worlds, path):
    """Mean and standard deviation over the seeds: success in training, at the step's horizon, and what was measured on held-out items on the way."""
    columns = 4 if study in ON_THE_WAY else 2
    figure, axes = plt.subplots(len(worlds) * columns // 2, 2, figsize=(9.2, 1.8 * columns * len(worlds)), layout="constrained", squeeze=False)
    for world, line in zip(worlds, axes.reshape(len(worlds), columns)):
        by_label = {}
        for run in runs(study):
            if run.world == world and len(rows := read(results(study, run))) > 1:
                by_label.setdefault(run.label, []).append(rows)
        turns, minutes = (lambda r: r["turns"] * r["trajectories"] / 1000), (lambda r: r["seconds"] / 60)
        unit = "thousands of environment turns"
        what = "score" if study == "worlds" else "success"  # in SciWorld success is 0 throughout
        views = [(unit, turns, what), (unit, turns, "horizon") if study in ON_THE_WAY else ("minutes", minutes, what)]
        machines = {rows[-1].get("machine", "not said") for seeds in by_label.values() for rows in seeds}
        for (unit, cost, what), ax in zip(views, line):
            if unit == "minutes" and len(machines) > 1:
                ax.text(0.5, 0.5, "rows of different machines:\nno minutes to compare", ha="center", transform=ax.transAxes)
                ax.set_axis_off()
                continue
            for number, (label, seeds) in enumerate(by_label.items()):
                costs = [np.cumsum([cost(r) for r in rows[:-1]]) for rows in seeds]
                grid = np.linspace(0, max(c[-1] for c in costs), 100)
                wide = 1 if what == "horizon" else 5  # steps that are shown as their mean
                smooth = [np.convolve(np.pad([r[what] for r in rows[:-1]], wide // 2, mode="edge"), np.ones(wide) / wide, "valid") for rows in seeds]
                values = np.array([np.interp(grid, c, s, right=np.nan) for c, s in zip(costs, smooth)])
                seen = 2 * np.isfinite(values).sum(0) > len(values)  # as long as more than half of the seeds go on
                grid, mean, spread = grid[seen], np.nanmean(values[:, seen], 0), np.nanstd(values[:, seen], 0, ddof=min(1, len(values) - 1))
                ax.plot(grid, mean, label=f"{label} ({len(seeds)} seeds)", color=f"C{number}")
                low, high = values[:, seen].min(0), values[:, seen].max(0)  # the band ends where the seeds do
                ax.fill_between(grid, np.maximum(mean - spread, low), np.minimum(mean + spread, high), alpha=0.15, color=f"C{number}", lw=0)
            ax.set_xlabel(unit)
            ax.set_title(f"{world}: {what}{' in training, at its own horizon' if what != 'horizon' else ''}")
        if study in ON_THE_WAY:
            for number, (label, seeds) in enumerate(by_label.items()):
                points = [[(p["turns"] / 1000, p["seconds"] / 60, p["success"]) for p in rows[-1]["held_out"]] for rows in seeds if len(rows[-1]["held_out"]) == 4]
                mean, spread = np.mean(points, 0), np.std(points, 0, ddof=min(1, len(points) - 1))
                for column, ax in enumerate(line[2:]):
                    ax.errorbar(mean[:, column], mean[:, 2], spread[:, 2], fmt="o-", capsize=3, color=f"C{number}", label=f"{label} ({len(seeds)} seeds)")
            for name, ax in zip((unit, "minutes"), line[2:]):
                ax.set(xlabel=name, title=f"{world}: held-out success, horizon {TINY[world].eval_rounds}")
                if base := read(results(study, Run(world, "base", 0))):
                    ax.axhline(base[-1]["success"], color="grey", ls=":", label="built-in model")
        for ax in line[:columns]:
            if ax.has_data():
                ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["algorithms", "horizon", "collapse", "recipe", "worlds"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="runs whose name holds this text: babyai, ppo, _s0")
    parser.add_argument("--dry", action="store_true", help="say what is missing and how long it will take")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    args = parser.parse_args()
    missing = [run for run in runs(args.study) if args.only in run.name and not results(args.study, run).exists()]
    known = {}  # world -> minutes of the runs that are there
    for run in runs(args.study):
        if run.label != "base" and (rows := read(results(args.study, run))):
            known.setdefault(run.world, []).append(rows[-1]["seconds"] / 60)
    minutes = sum(1 if run.label == "base" else 2 + statistics.mean(known.get(run.world, [4])) for run in missing) / args.jobs
    print(f"{len(missing)} of {len(runs(args.study))} runs are missing: about {minutes:.0f} minutes, {args.jobs} at a time")
    if args.dry:
        print("\n".join(run.name for run in missing))
        return
    failed = []
    if not args.draw and missing:
        commit, lock = revision(), begin(args.study)  # noqa: F841 (held until the end)
        for command in (("experiments/sciworld_tasks.py", FNL, "find-non-living-thing"), ("experiments/web.py", "navigate", NAV)) * (args.study == "worlds"):
            if not any((ROOT / word).is_dir() for word in command):
                call(*command)

        def attempt(run):
            try:
                do(args.study, run, commit)
            except (RuntimeError, OSError, ValueError) as e:
                failed.append(f"{run.name}: {e}")
                tqdm.write(failed[-1])
        with ThreadPoolExecutor(args.jobs) as threads:
            list(tqdm(threads.map(attempt, missing), total=len(missing), unit="run"))
    draw(args.study)
    print(table(args.study))
    if failed:
        sys.exit(f"study.py: {len(failed)} runs failed")


def begin(study):
    """One study at a time, and of one built-in model. -> an open file"""
    folder = ROOT / "runs/study" / study
    folder.mkdir(parents=True, exist_ok=True)
    lock, base = (folder / "base_sha256").open("a+"), sha256(ROOT / "data/tiny/model.safetensors")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"study.py: another one is at work in {folder}")
    lock.seek(0)
    others = {lock.read().strip() or base} | {rows[-1]["base_sha256"] for run in runs(study) if (rows := read(results(study, run)))}
    if others != {base}:
        sys.exit(f"study.py: {folder} or experiments/results/{study} is of another built-in model: move both away")
    lock.seek(0)
    lock.truncate()
    lock.write(base)
    lock.flush()
    return lock


if __name__ == "__main__":
    main()
