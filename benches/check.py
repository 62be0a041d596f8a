"""`python -m benches check --model NAME`: the ways in which a model is computed, and their gaps.

A rollout and an update each have a fast way and slower ones. Each is tried on a copy of the model's
first layers until one has the log-probs of the model's plain forward pass; the gap is the largest
difference, for a bfloat16 run also the mean one. train.py and eval.py make the same check.
Exit status 2 if the model cannot be used.
"""

import torch

import rl
from models import check


def add_flags(parser):
    parser.add_argument("--model", default="tiny", help="as train.py takes it")
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", help="of the run")
    parser.add_argument("--dtype", default="bfloat16" if has_cuda else "float32",
                        choices=("float32", "bfloat16"), help="of the run")


def measure(args):
    """-> (figures for --out, [])"""
    model = rl.load_model(args.model)
    paths = check.find_paths(model, args.dtype, torch.device(args.device))
    for way, gap in paths.gaps.items():
        print(f"{way:26} gap {gap:.1e}")
    print(f"{args.model}: rollout {paths.rollout}, update {paths.update}")
    return paths._asdict(), []
