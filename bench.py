"""Performance figures, each against its baseline in the same run on the same machine.

    python bench.py rollout [--full] [--scale]     multi-turn rollouts against Hugging Face's ways of playing them
    python bench.py update [--full]                the update against padded rows with all their logits
    python bench.py memory                         peak memory of log-probs with vocabularies of 2k to 152k
    python bench.py memory --model Qwen/Qwen2.5-7B-Instruct --gpus 8     what a GPU needs, from the config alone

--out F.json writes the figures. Exit code 1 if a ratio that the project states is missed.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin cost 5x where cores are shared; read by torch
import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 1 if a stated ratio was missed, 2 for bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True, metavar="rollout | update | memory")
    for name in ("rollout", "update", "memory"):
        bench = importlib.import_module(f"benches.{name}")
        part = parts.add_parser(name, description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        part.add_argument("--out", help="JSON file for the figures")
        part.add_argument("--full", action="store_true", help="medians of five, and the 3.7M model too")
        part.add_argument("--threads", type=int, default=1, help="of PyTorch, the same for all")
        part.set_defaults(measure=bench.measure)
        bench.add_flags(part)
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    try:
        found, missed = args.measure(args)
    except ValueError as e:
        print(f"bench.py: {e}", file=sys.stderr)
        return 2
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(missed) or "every stated ratio is reached", file=sys.stderr if missed else sys.stdout)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
