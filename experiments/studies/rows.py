"""The rows of finished runs: experiments/results/NAME.jsonl.gz, one compressed file per study.

Each line of the file is a JSON object {"run": RUN, ...row}. The lines of a run stand together and
in order: one row per training step, then a row with the evaluation. `zcat` shows them.

The rows of a run have among them its command ("" for a model before training, see `evaluation`),
commit, model_sha256 ("" where no model plays), seed and machine. If the trained weights were not
kept, model_sha256 is null, and start_sha256 is of the weights that the training began with.
added_later: the fields that older rows got afterwards, from recorded flags and the docs.

While a study runs, each finished run is a plain file, experiments/results/NAME/RUN.jsonl, with one
row per line. `pack` moves the plain files into the compressed file. `load` reads both.
"""

import gzip
import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results"


def packed_path(study):
    return RESULTS / f"{study}.jsonl.gz"


def run_path(study, run_name):
    """The plain file of a run whose study is not packed yet."""
    return RESULTS / study / f"{run_name}.jsonl"


def plain_files(study):
    return sorted((RESULTS / study).glob("*.jsonl"))


def read_lines(path):
    """The JSON objects of a plain .jsonl file, one per line. No file: no rows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(study):
    """The rows of every finished run of a study -> {run name: [row, ...]}."""
    runs = {}
    if packed_path(study).exists():
        with gzip.open(packed_path(study), "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                runs.setdefault(row.pop("run"), []).append(row)
    for path in plain_files(study):
        runs[path.stem] = read_lines(path)
    return runs


def save(study, runs):
    """Write {run name: [row, ...]} to the compressed file. The same rows give the same bytes."""
    lines = []
    for run_name in sorted(runs):
        for row in runs[run_name]:
            lines.append(json.dumps({"run": run_name, **row}) + "\n")
    # A time of 0 and no file name in the header: the bytes depend on the rows alone.
    data = gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0)
    RESULTS.mkdir(parents=True, exist_ok=True)
    partial = packed_path(study).with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(packed_path(study))


def pack(study):
    """Move the plain files of finished runs into the compressed file."""
    plain = plain_files(study)
    if not plain:
        return
    save(study, load(study))
    for path in plain:
        path.unlink()
    if not any((RESULTS / study).iterdir()):
        (RESULTS / study).rmdir()
