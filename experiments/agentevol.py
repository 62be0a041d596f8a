"""AgentEvol (arXiv 2406.04151) as a loop over eval.py and sft.py.

    python experiments/agentevol.py --warm runs/warm --turns 6000 --out runs/evol

--warm: the folder of an sft.py run, which gives the world, the demonstrations and the model to
start from. In each iteration the current model plays training items (explore), the trajectories
that succeed are added to those kept so far, and the run's first model is trained anew on all of
them together with the demonstrations (learn). The loop ends when the environments have taken
--turns turns; --compare runs/NAME sets the limit to the turns of this RL run, so that both are
compared at equal turns.

Writes OUT/rows.jsonl, a row an iteration: turns so far, share of the explored trajectories that
succeeded, trajectories learnt, held-out success with its interval. An iteration that is complete is
not run again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments.studies.play import flags_of, turns_played  # noqa: E402
from experiments.studies.rows import read_lines  # noqa: E402
from sft import SFTConfig  # noqa: E402

# Flags of sft.py that do not take the values of the warm start.
OWN_FLAGS = ("env", "out", "resume", "demos", "noise", "trajectories", "min_reward")


def command(script: str, *flags: object) -> None:
    """Run a command of the top level; its progress bars are shown."""
    subprocess.run([sys.executable, ROOT / script, *map(str, flags)], check=True)


def write_lines(path: Path, trajectories: list[dict]) -> None:
    path.write_text("".join(json.dumps(t) + "\n" for t in trajectories))


def explore(args: argparse.Namespace, model: Path, iteration: int, folder: Path) -> list[dict]:
    """Let the model play training items -> the trajectories."""
    path = folder / "explored.jsonl"
    command("eval.py", "--env", args.env, "--model", model, "--split", "train",
            "--items", args.items, "--samples", args.samples, "--seed", 1000 + iteration,
            "--trajectories", path)
    return read_lines(path)


def learn(args: argparse.Namespace, learnt: list[dict], folder: Path) -> Path:
    """Train the first model on these trajectories -> the folder of the new model."""
    path = folder / "learnt.jsonl"
    write_lines(path, learnt)
    settings = json.loads((args.warm / "config.json").read_text())
    flags = flags_of(SFTConfig, settings, OWN_FLAGS)
    if (folder / "sft/metrics.jsonl").exists():  # it was interrupted
        flags.append("--resume")
    command("sft.py", "--env", args.env, "--trajectories", path, "--out", folder / "sft", *flags)
    return folder / "sft/final"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=Path, required=True, help="folder of an sft.py run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--turns", type=int, default=0, help="environment turns in all")
    parser.add_argument("--compare", type=Path, help="folder of a train.py run: its turns")
    parser.add_argument("--items", type=int, default=200, help="items explored an iteration")
    parser.add_argument("--samples", type=int, default=4, help="trajectories of each")
    args = parser.parse_args()
    args.env = json.loads((args.warm / "config.json").read_text())["env"]
    budget = args.turns
    if args.compare:
        budget = round(turns_played(read_lines(args.compare / "metrics.jsonl")))

    rows_file = args.out / "rows.jsonl"
    rows = read_lines(rows_file)
    learnt = read_lines(args.warm / "demos.jsonl")
    for row in rows:
        learnt += read_lines(args.out / f"iteration_{row['iteration']}/kept.jsonl")
    model = args.out / f"iteration_{len(rows) - 1}/sft/final" if rows else args.warm / "final"
    while not rows or rows[-1]["turns"] < budget:
        iteration = len(rows)
        folder = args.out / f"iteration_{iteration}"
        folder.mkdir(parents=True, exist_ok=True)
        explored = explore(args, model, iteration, folder)
        played = [t for t in explored if t["status"] != "env_error"]
        kept = [t for t in played if t["success"]]
        write_lines(folder / "kept.jsonl", kept)
        learnt += kept
        model = learn(args, learnt, folder)
        command("eval.py", "--env", args.env, "--model", model, "--samples", 2,
                "--out", folder / "eval.json")
        result = json.loads((folder / "eval.json").read_text())
        turns = (rows[-1]["turns"] if rows else 0) + sum(t["turns"] for t in explored)
        rows.append({
            "iteration": iteration, "turns": turns, "explored": len(explored),
            "explored_success": len(kept) / max(1, len(played)), "learnt": len(learnt),
            "success": result["success"], "ci95": result["ci95"]["success"],
            "model_sha256": result["config"]["model_sha256"],
        })
        write_lines(rows_file, rows)
        print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
