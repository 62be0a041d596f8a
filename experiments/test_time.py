"""What more samples and more turns are worth at test, before and after RL: `python experiments/test_time.py WORLD [MODEL]`, with the horizons
and 16 samples an item below; MODEL: the folder of a trained model (default runs/study/algorithms/WORLD_grpo_s0/final, which `experiments/study.py
algorithms` leaves). Writes experiments/results/test_time/WORLD.json, and from what is there docs/test_time.png and a table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "experiments/results/test_time"
HORIZONS, SAMPLES = {"babyai": (1, 2, 3, 4, 6, 8, 12), "textcraft": (2, 3, 5, 8, 12, 16)}, 16
SHOWN = {"babyai": 4, "textcraft": 8}  # the horizon of the figure over k: the last in training


def measure(world, model):
    found = {}
    for name, folder in (("before", "tiny"), ("after", model)):
        out = FOLDER / f"{world}.{name}.partial"
        subprocess.run([sys.executable, "eval.py", "--env", world, "--model", str(folder), "--samples", str(SAMPLES), "--horizon",
                        ",".join(map(str, HORIZONS[world])), "--out", str(out)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        sweep = json.loads(out.read_text())["sweep"]
        out.unlink()
        found[name] = {"model_sha256": sweep[0]["config"]["model_sha256"], "horizons": {
            r["config"]["horizon"]: {k: v for k, v in r.items() if k.startswith("pass@") or k in ("success", "turns", "valid_actions")}
            | {"ci95": r["ci95"]["success"]} for r in sweep}}
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{world}.json").write_text(json.dumps(found, indent=1) + "\n")


def draw():
    files = sorted(FOLDER.glob("*.json"))
    figure, axes = plt.subplots(len(files), 2, figsize=(10, 3.6 * len(files)), layout="constrained", squeeze=False)
    print("| world | model | " + "horizon: success | pass@1, 4, 16 |\n|---|---|---|---|")
    for path, (left, right) in zip(files, axes):
        for number, (name, found) in enumerate(json.loads(path.read_text()).items()):
            by_horizon = {int(h): r for h, r in found["horizons"].items()}
            shown = by_horizon[SHOWN[path.stem]]
            ks = [k for k in (1, 2, 4, 8, 16) if f"pass@{k}" in shown]
            left.plot(ks, [shown[f"pass@{k}"] for k in ks], "o-", label=f"{name} RL", color=f"C{number}")
            right.plot(list(by_horizon), [r["success"] for r in by_horizon.values()], "o-", label=f"{name} RL", color=f"C{number}")
            right.fill_between(list(by_horizon), *zip(*(r["ci95"] for r in by_horizon.values())), alpha=0.15, color=f"C{number}", lw=0)
            print(f"| {path.stem} | {name} | " + ", ".join(f"{h}: {r['success']:.3f}" for h, r in by_horizon.items())
                  + " | " + ", ".join(f"{shown[f'pass@{k}']:.3f}" for k in ks if k in (1, 4, 16)) + " |")
        left.set(xlabel="samples k", ylabel="pass@k", title=f"{path.stem}, horizon {SHOWN[path.stem]}", xscale="log", ylim=(0, 1))
        left.set_xticks(ks, map(str, ks))
        right.set(xlabel="turns allowed at test", ylabel="success", title=path.stem, ylim=(0, 1))
        left.legend()
        right.legend()
    figure.savefig(ROOT / "docs/test_time.png", dpi=110)
    print("docs/test_time.png")


if __name__ == "__main__":
    if len(sys.argv) > 3 or len(sys.argv) > 1 and sys.argv[1] not in HORIZONS:
        sys.exit(__doc__)
    if len(sys.argv) > 1:
        model = Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / f"runs/study/algorithms/{sys.argv[1]}_grpo_s0/final").resolve()
        if not model.is_dir():
            sys.exit(f"test_time.py: there is no model {model}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        measure(sys.argv[1], model)
    if not list(FOLDER.glob("*.json")):
        sys.exit("test_time.py: nothing is measured yet: give a world")
    draw()
