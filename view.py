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
import sys
from contextlib import suppress
from pathlib import Path

from envs import CommandParser
from page.build import contents, render
from page.curves import draw_curves
from page.live import HOST, Server
from trajectory import write_atomically


def write_page(folders: str | Path | list, most: int = 20_000,
               out: str | Path | None = None) -> Path:
    """runs/NAME -> runs/NAME/view.html, with the tokens of about `most` trajectories.

    folders: one run or a list of several, whose page is compare.html in the first one's folder.
    out: another file. What is left out is said in the page and on stderr.
    Raises ValueError if a folder holds no run.
    """
    folders = folders if isinstance(folders, list) else [folders]
    out = Path(out or Path(folders[0], "view.html" if len(folders) == 1 else "compare.html"))
    data = {"live": False, "runs": [contents(folder, most) for folder in folders]}
    for run in data["runs"]:
        if run["left_out"]:
            print(f"view.py: left out: {'; '.join(run['left_out'])}", file=sys.stderr)
    write_atomically(out, render(data))
    return out


def serve(folders: list[str], port: int) -> None:
    """Serve the page of runs on this machine until Ctrl-C."""
    with Server(folders, port) as server, suppress(KeyboardInterrupt):
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
