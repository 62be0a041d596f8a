"""Performance figures, each against its baseline in the same run on the same machine.

    python -m benches rollout [--full]            multi-turn rollouts against Hugging Face's ways
    python -m benches update [--full]             the update against padded rows with all logits
    python -m benches limit [--full]              the share of a bare loop of matrix products
    python -m benches growth [--full]             how cost grows: turns, slots, vocabulary ...
    python -m benches memory                      peak memory of log-probs, vocabularies 2k to 152k
    python -m benches memory --model Qwen/Qwen2.5-7B-Instruct --gpus 8
                                                 what a GPU needs, from the config alone
    python -m benches check --model NAME          the ways in which a model is computed
    python -m benches peers                       the same training job in other programs, on a CPU

--out F.json writes the figures. Exit code 1 if a ratio that the project states is missed.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

# As in config.py. torch reads these variables when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

from envs import CommandParser  # noqa: E402

BENCHES = ("rollout", "update", "limit", "growth", "memory", "check", "peers")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The flags; `measure` is the function of benches/ that the command names."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = CommandParser("python -m benches", description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="what", required=True, metavar=" | ".join(BENCHES))
    for name in BENCHES:
        bench = importlib.import_module(f"benches.{name}")
        command = commands.add_parser(name, description=bench.__doc__, formatter_class=as_written)
        command.add_argument("--out", help="JSON file for the figures")
        command.add_argument("--full", action="store_true",
                             help="more: see above (rollout, update: medians of five, and a 3.7M "
                                  "model)")
        command.add_argument("--threads", type=int, default=1, help="of PyTorch, the same for all")
        command.set_defaults(measure=bench.measure)
        bench.add_flags(command)
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error("--threads must be positive")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    return args


def states_a_ratio(args: argparse.Namespace) -> bool:
    """Whether the project states a ratio for this benchmark, which a measurement can miss."""
    return args.what in ("rollout", "update") or args.what == "memory" and not args.model


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark -> exit code: 1 if a stated ratio was missed, 2 for bad usage."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        args = parse_args(argv)
        torch.set_num_threads(args.threads)
        figures, missed = args.measure(args)
    except ValueError as e:
        print("benches:", " ".join(str(e).split()), file=sys.stderr)
        return 2
    if args.out:
        Path(args.out).write_text(json.dumps(figures, indent=1) + "\n")
    if missed:
        print("\n".join(missed), file=sys.stderr)
        return 1
    if states_a_ratio(args):
        print("every stated ratio is reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
