"""The page as one HTML file, and what it holds of a run.

Data stands in the page as JSON; that of trajectories is compressed.
"""

import base64
import gzip
import json
from pathlib import Path

from tqdm import tqdm

from metrics import is_number
from page.run import Run, shown_ids

PAGE = Path(__file__).parent
SCRIPTS = ("elements", "data", "curves", "table", "trajectory", "scenes", "main")
CHUNK = 16  # trajectories in a compressed chunk
MAX_TOKENS = 5_000_000  # about how many tokens a page holds of a run


def compress(value: object) -> str:
    """JSON, compressed, in base64."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def choose_groups(rows: list[dict], most: int) -> int:
    """-> every: the tokens of one group in `every` are in the page.

    rows: of metrics. most: about how many trajectories the page may hold. Raises ValueError if it
    is not positive.
    """
    if most < 1:
        raise ValueError(f"--most must be positive, not {most}")
    trajectories, tokens = (int(sum(row[name] for row in rows if is_number(row.get(name))))
                            for name in ("trajectories", "tokens"))
    return max(1, -(-trajectories // most), -(-tokens // MAX_TOKENS))


def contents(folder: str | Path, most: int) -> dict:
    """What a page holds of a run: the rows of all trajectories, and the tokens of about `most`:
    whole groups, evenly spread over the steps.

    Raises ValueError if the folder holds no run, or one without a complete step.
    """
    run = Run(folder)
    run.find_files()
    if not run.unread:
        raise ValueError(f"{folder} has not ended its first step")
    every = choose_groups(run.metrics, most)
    chunks, chunk = [], []
    held = 0
    vocabulary = {}
    for file in tqdm(run.unread, desc="view", unit="step"):
        first = len(run.rows)
        for row, t in enumerate(run.read_file(file), first):
            if (t.group + t.step) % every:
                run.rows[row]["held"] = -1
                continue
            run.rows[row]["held"] = held
            held += 1
            chunk.append(run.tokens_of(t))
            run.add_pieces(shown_ids(t), vocabulary)
            # A policy may sample ids that its tokenizer does not have: some models have more.
            run.left_out["texts of token ids that the tokenizer does not have"] += sum(
                token not in vocabulary and not sampled for token, sampled in zip(t.tokens, t.mask))
            if len(chunk) == CHUNK:
                chunks.append(compress(chunk))
                chunk = []
    if chunk:
        chunks.append(compress(chunk))
    found = run.about() | {"table": compress(run.table()), "chunk": CHUNK, "chunks": chunks,
                           "vocabulary": vocabulary}
    if held < len(run.rows):
        found["note"] += (f"; tokens of {held} of {len(run.rows)} trajectories: one group in "
                          f"{every} (--most, or --live for all)")
    return found


def render(data: dict) -> str:
    """Data -> the page, one HTML file."""
    # "</script>" in a string would end the element. JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = "\n".join((PAGE / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    page = (PAGE / "page.html").read_text("utf-8")
    for mark, part in (("/*CONNECT*/", "; connect-src 'self'" if data["live"] else ""),
                       ("/*STYLE*/", (PAGE / "style.css").read_text("utf-8")),
                       ("/*SCRIPT*/", script), ("/*DATA*/", text)):
        page = page.replace(mark, part)
    return page
