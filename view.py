"""The page of a run: `python view.py runs/NAME` writes runs/NAME/view.html, and curves.png again.

    python view.py runs/A runs/B            # several runs in one page: runs/A/compare.html
    python view.py --live runs/NAME         # serve the page on this machine, and follow the run

The page (folder page/) needs no network. It has the learning curves, distributions, a table of all
trajectories, and trajectories token by token, with probabilities, entropies and advantages.
BabyAI's rooms and TextCraft's inventories are drawn by playing the episodes again. The page holds
the tokens of about --most trajectories of a run, as compressed chunks; with --live those of all.
Text written by models and worlds is data in the page, never markup. Damaged lines, trajectories and
numbers are left out, and the page says how many.
"""

import argparse
import base64
import gzip
import json
import sys
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from envs import CommandParser
from metrics import draw_curves, is_number
from page.live import HOST, Server
from page.run import Run, shown_ids
from trajectory import write_atomically

PAGE = Path(__file__).parent / "page"
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


def write_page(folders: str | Path | list, most: int = 20_000,
               out: str | Path | None = None) -> Path:
    """runs/NAME -> runs/NAME/view.html, with the tokens of about `most` trajectories.

    folders: one run or a list of several, whose page is compare.html in the first one's folder.
    out: another file. What is left out is said in the page and on stderr.
    Raises ValueError if a folder holds no run.
    """
    folders = folders if isinstance(folders, list) else [folders]
    name = "view.html" if len(folders) == 1 else "compare.html"
    out = Path(out or Path(folders[0]) / name)
    data = {"live": False, "runs": [contents(folder, most) for folder in folders]}
    for run in data["runs"]:
        if run["left_out"]:
            print(f"view.py: left out: {'; '.join(run['left_out'])}", file=sys.stderr)
    write_atomically(out, render(data))
    return out


def serve(folders: list[str], port: int) -> None:
    """Serve the page of runs on this machine until Ctrl-C."""
    with Server(folders, port, render) as server, suppress(KeyboardInterrupt):
        print(f"http://{HOST}:{server.server_port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """The command. argv: its arguments, by default those of the process. Raises ValueError or
    OSError for what cannot be shown or written."""
    parser = CommandParser(description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="the folder of a run: runs/NAME; or several")
    parser.add_argument("--most", type=int, default=20_000,
                        help="trajectories of a run whose tokens are in the file (default: 20,000)")
    parser.add_argument("--out", help="the file to write")
    parser.add_argument("--live", action="store_true",
                        help="write no file: serve the page on this machine, and follow the runs")
    parser.add_argument("--port", type=int, default=8000, help="of --live; 0: any free one")
    args = parser.parse_args(argv)
    if args.live:
        serve(args.run, args.port)
        return
    print(write_page(args.run, args.most, args.out))
    for folder in args.run:
        draw_curves(folder)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, OverflowError) as e:
        print(f"view.py: {e}", file=sys.stderr)
        sys.exit(2)
