"""Take a LoRA run to another machine without the weights of its base model.

    python experiments/travel.py pack RUN FILE.tgz      # settings, metrics, the newest checkpoint
    python experiments/travel.py unpack FILE.tgz RUN    # there; then train.py --out RUN --resume

A checkpoint of a LoRA run holds the adapters, their optimizer state, the merged weights and the
tokenizer. Training reads the last two from --model, which must be the same there, byte for byte, so
they stay behind. Of held-out episodes the outcomes travel. RUN must not exist before `unpack`.
docs/gpus.md has the size of a file.
"""

import io
import json
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import checkpoint  # noqa: E402
from config import read_json  # noqa: E402
from parallel import run_command, user_errors  # noqa: E402
from trajectory import read_objects  # noqa: E402

BASE_FILES = ("model.safetensors", "tokenizer.json")
# What travels of the held-out episodes, for effective_horizon.py.
OUTCOME = ("item", "env", "step", "group", "sample", "status", "score", "success", "turns")


def pack(run, file):
    """Write the newest checkpoint of a run, without the merged weights, and what --resume reads."""
    run = Path(run)
    if not read_json(run / "config.json").get("lora_rank"):
        raise ValueError(f"{run} is no run with --lora_rank: its weights cannot stay behind")
    newest, _ = checkpoint.newest(run)
    if newest is None:
        raise ValueError(f"{run} has no checkpoint")
    state = checkpoint.read_state(newest)
    state["sha256"] = {name: own for name, own in state["sha256"].items() if name not in BASE_FILES}
    digest = checkpoint.digest(state)
    with tarfile.open(file, "w:gz") as tar:
        for path in [run / "config.json", run / "metrics.jsonl", *sorted(newest.rglob("*"))]:
            if path.is_file() and path.name not in (*BASE_FILES, "state.json"):
                tar.add(path, path.relative_to(run))
        add(tar, newest.relative_to(run) / "state.json", json.dumps(state | {"own": digest}))
        for path in sorted(run.glob("trajectories/eval_*.jsonl")):
            rows, _ = read_objects(path)
            add(tar, path.relative_to(run), "".join(
                json.dumps({name: row[name] for name in OUTCOME}) + "\n" for row in rows))


def add(tar, name, text):
    """Add a text as a file."""
    entry = tarfile.TarInfo(str(name))
    entry.size = len(text.encode())
    tar.addfile(entry, io.BytesIO(text.encode()))


def unpack(file, run):
    """Make the run's folder from a packed file."""
    try:
        with tarfile.open(file) as tar:
            Path(run).mkdir(parents=True)
            tar.extractall(run, filter="data")
    except tarfile.TarError as e:
        raise ValueError(f"{file} is no packed run") from e


def parse():
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
        sys.exit(__doc__)
    return sys.argv[1:]


def main(words):
    name, *paths = words
    with user_errors():
        {"pack": pack, "unpack": unpack}[name](*paths)


if __name__ == "__main__":
    run_command("travel.py", parse, main)
