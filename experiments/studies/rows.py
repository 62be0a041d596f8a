"""The rows of all finished runs: experiments/results.jsonl.gz.

Each line is a JSON object {"study": STUDY, "run": RUN, ...row}. The lines of a run stand together
and in order: one row per training step, then a row with the evaluation. `zcat` shows them.

The rows of a run have among them its command ("" for a model before training, see `evaluation`),
commit, model_sha256 ("" where no model plays), seed and machine. If the trained weights were not
kept, model_sha256 is null, and start_sha256 is of the weights that the training began with.
added_later: the fields that older rows got afterwards, from recorded flags and the docs.
"""

import fcntl
import gzip
import json
import os
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results.jsonl.gz"


def load(study):
    """The rows of every finished run of a study -> {run name: [row, ...]}."""
    runs = {}
    beginning = f'{{"study": "{study}", '
    for line in lines():
        if line.startswith(beginning):
            row = json.loads(line)
            del row["study"]
            runs.setdefault(row.pop("run"), []).append(row)
    return runs


def studies():
    """The names of the studies that have rows."""
    return sorted({json.loads(line)["study"] for line in lines()})


def lines():
    if not RESULTS.exists():
        return []
    return gzip.decompress(RESULTS.read_bytes()).decode().splitlines(keepends=True)


def keep(study, runs):
    """Write the rows of these runs, {run name: [row, ...]}, in place of what they had before.

    The other runs stay. Several processes and threads may call this at the same time.
    """
    new = {(study, run): [json.dumps({"study": study, "run": run, **row}) + "\n" for row in rows]
           for run, rows in runs.items()}
    folder = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = {}  # (study, run) -> its lines
        for line in lines():
            row = json.loads(line)
            kept.setdefault((row["study"], row["run"]), []).append(line)
        kept |= new
        text = "".join(line for key in sorted(kept) for line in kept[key])
        # A time of 0 and no file name in the header: the bytes depend on the rows alone.
        partial = RESULTS.with_suffix(".partial")
        partial.write_bytes(gzip.compress(text.encode(), mtime=0))
        partial.rename(RESULTS)
    finally:
        os.close(folder)


def read_lines(path):
    """The JSON objects of a plain .jsonl file, one per line. No file: no rows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
