"""What more samples and more turns are worth at test, before and after RL: `python experiments/test_time.py WORLD [MODEL...]`; MODEL: folders of
trained models, one a seed (default runs/study/horizon/WORLD_scaling_s*/final, which `experiments/study.py horizon` leaves).

Every held-out item is played 16 times with the longest of the horizons below. As no prompt tells the horizon and a trajectory draws the same random
numbers whatever it is, what would have been reached within fewer turns can be read off: the successes that took no more. avg@16 is the mean
success, pass@k the chance that one of k samples succeeds (the unbiased estimate). Writes experiments/results/test_time/WORLD.json, and from what is
there docs/test_time.png and a table."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from eval import bootstrap, pass_at_k  # noqa: E402
from study import revision  # noqa: E402

FOLDER = ROOT / "experiments/results/test_time"
HORIZONS, SAMPLES = {"babyai": (1, 2, 3, 4, 6, 8), "textcraft": (2, 3, 5, 8, 12)}, 16
SHOWN = {"babyai": 4, "textcraft": 8}  # the horizon of the figure over k: the last in training
KS = (1, 2, 4, 8, 16)


def within(trajectories, horizon, ks=KS):
    """What these trajectories would have reached with `horizon` turns: {"success", "ci95", "pass@k"}."""
    by_item = {}
    for t in trajectories:
        if t["status"] != "env_error":
            by_item.setdefault(t["item"], []).append(t["success"] and t["turns"] <= horizon)
    rates = [statistics.mean(wins) for wins in by_item.values()]
    return {"success": statistics.mean(rates), "ci95": bootstrap(rates, 0)} | {
        f"pass@{k}": statistics.mean(pass_at_k(len(wins), sum(wins), k) for wins in by_item.values() if len(wins) >= k) for k in ks}


def measure(world, models):
    found, commit = {}, revision()
    for name, folder in [("before", Path("tiny")), *((f"after, {model.parent.name}", model) for model in models)]:
        out, result = FOLDER / f"{world}.partial", FOLDER / f"{world}.result"
        command = ["eval.py", "--env", world, "--model", str(folder), "--samples", str(SAMPLES), "--horizon", str(HORIZONS[world][-1])]
        subprocess.run([sys.executable, *command, "--out", str(result), "--trajectories", str(out)], cwd=ROOT,
                       env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        with out.open() as lines:
            trajectories = [{k: t[k] for k in ("item", "status", "success", "turns")} for t in map(json.loads, lines)]
        found[name] = {"model_sha256": json.loads(result.read_text())["config"]["model_sha256"], "commit": commit,
                       "command": f"OMP_NUM_THREADS=1 python {' '.join(command)}".replace(f"{folder.parent.parent}/", ""), "horizons": {h: within(trajectories, h) for h in HORIZONS[world]}}
        out.unlink()
        result.unlink()
    (FOLDER / f"{world}.json").write_text(json.dumps(found, indent=1) + "\n")


def draw():
    files = sorted(FOLDER.glob("*.json"))
    figure, axes = plt.subplots(len(files), 2, figsize=(10, 3.6 * len(files)), layout="constrained", squeeze=False)
    print("| world | model | turns allowed: success (avg@16) | pass@1, 4, 16 |\n|---|---|---|---|")
    for path, (left, right) in zip(files, axes):
        for number, (name, found) in enumerate(json.loads(path.read_text()).items()):
            line = dict(color=f"C{min(number, 1)}", label=("before RL", "after RL, each seed", None)[min(number, 2)])
            by_horizon = {int(h): r for h, r in found["horizons"].items()}
            shown = by_horizon[SHOWN[path.stem]]
            left.plot(KS, [shown[f"pass@{k}"] for k in KS], "o-", **line)
            right.plot(list(by_horizon), [r["success"] for r in by_horizon.values()], "o-", **line)
            right.fill_between(list(by_horizon), *zip(*(r["ci95"] for r in by_horizon.values())), alpha=0.15, color=line["color"], lw=0)
            print(f"| {path.stem} | {name} | " + ", ".join(f"{h}: {r['success']:.3f}" for h, r in by_horizon.items())
                  + " | " + ", ".join(f"{shown[f'pass@{k}']:.3f}" for k in (1, 4, 16)) + " |")
        left.set(xlabel="samples k", ylabel="pass@k", title=f"{path.stem}, horizon {SHOWN[path.stem]}", xscale="log", ylim=(0, None))
        left.set_xticks(KS, map(str, KS))
        left.minorticks_off()
        right.set(xlabel="turns allowed at test", ylabel="success", title=path.stem, ylim=(0, None))
        left.legend()
        right.legend()
    figure.savefig(ROOT / "docs/test_time.png", dpi=110)
    print("docs/test_time.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if sys.argv[1] not in HORIZONS:
            sys.exit(__doc__)
        given = sys.argv[2:] or sorted((ROOT / "runs/study/horizon").glob(f"{sys.argv[1]}_scaling_s*/final"))
        if not given or not all(Path(folder).is_dir() for folder in given):
            sys.exit(f"test_time.py: there is no trained model {', '.join(map(str, given))}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        measure(sys.argv[1], [Path(folder).resolve() for folder in given])
    if not list(FOLDER.glob("*.json")):
        sys.exit("test_time.py: nothing is measured yet: give a world")
    draw()
