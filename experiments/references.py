"""Figures that trained models are compared with, each with a row.

    python experiments/references.py [--only TEXT] [--show]

What random policies and experts reach, the built-in model on all tasks of a world, and warm starts
of the built-in model. Each entry of REFERENCES leaves a row in
experiments/results/references.jsonl.gz: its commands, the commit, the machine, the hash of the
model (if one plays) and the figures. An entry whose row has the same commands is not run again;
remove the row to repeat it. --show prints the kept rows and runs nothing.

Measuring needs a checkout that nobody edits, the extras sciworld, textworld and webarena, and
Chromium. One entry at a time, one thread. The policies take half an hour, trainings 45 minutes.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from experiments.studies import play, rows  # noqa: E402
from experiments.studies.runs import SCIWORLD_ITEMS, WEBARENA_ITEMS  # noqa: E402

STUDY = "references"
FIND_ITEMS = "runs/items/FIND"
# Folder of item sets -> the command that writes it, and its last file.
MADE_ITEMS = {
    SCIWORLD_ITEMS: (f"experiments/sciworld_tasks.py {SCIWORLD_ITEMS} find-non-living-thing",
                     "AgentItemId/sciworld_train.json"),
    FIND_ITEMS: (f"experiments/sciworld_tasks.py {FIND_ITEMS} find-living-thing "
                 "find-non-living-thing find-plant find-animal",
                 "AgentItemId/sciworld_train.json"),
    WEBARENA_ITEMS: (f"experiments/web.py navigate {WEBARENA_ITEMS}",
                     "AgentEval/webarena/admin.json"),
}


def policies(arguments):
    return [f"experiments/policies.py {arguments} --out {{out}}"]


def evaluation(flags):
    return [f"eval.py --model tiny --out {{out}} {flags}"]


def coin(model, *training):
    """Train the built-in model in TextWorld's coin game, then evaluate {run}/`model`."""
    return [
        "sft.py --env textworld --data data/coin --demos 150 --horizon 8 --out {run}/warm",
        *training,
        f"eval.py --env textworld --data data/coin --model {{run}}/{model}/final --horizon 8 "
        "--samples 2 --out {out}",
    ]


def warm_start(world, demos, epochs, horizon, data=""):
    """Train the built-in model on demonstrations, then evaluate it."""
    items = f"--data {data} " if data else ""
    return [
        f"sft.py --env {world} {items}--model tiny --horizon {horizon} --demos {demos} "
        f"--epochs {epochs} --batch 16 --lr 1e-3 --seed 0 --out {{run}}",
        f"eval.py --env {world} {items}--model {{run}}/final --horizon {horizon} --samples 2 "
        "--out {out}",
    ]


# name -> commands. {run}: the folder of a model that an earlier one writes. The last one writes its
# figures to {out}; what it prints is kept where it has no {out}.
REFERENCES = {
    "policies_babyai": policies("babyai 4 4"),
    "policies_babyai_once": policies("babyai 1 4"),
    "policies_rooms": policies("babyai 4 10 data/rooms"),
    "policies_levels": policies("babyai 1 20 data/levels"),
    "policies_levels_four": policies("babyai 4 20 data/levels"),
    "policies_textcraft": policies("textcraft 4 8"),
    "policies_textcraft_20": policies("textcraft 1 20"),
    "policies_textcraft_30": policies("textcraft 1 30"),
    "policies_searchqa": policies("searchqa 4 4"),
    "policies_searchqa_5": policies("searchqa 4 5"),
    "policies_searchqa_10": policies("searchqa 1 10"),
    "policies_sciworld": policies("sciworld 1 6 '' uniform"),
    "policies_sciworld_imitated": policies("sciworld 1 6 '' imitated"),
    "policies_sciworld_one_task": policies(f"sciworld 1 6 {SCIWORLD_ITEMS}"),
    "policies_sciworld_find": policies(f"sciworld 1 20 {FIND_ITEMS}"),
    "policies_webarena": policies("webarena 1 15 '' expert"),
    "policies_webarena_one_click": policies(f"webarena 1 4 {WEBARENA_ITEMS}"),
    "policies_textworld": policies("textworld 1 15"),
    "policies_textworld_8": policies("textworld 1 8 '' expert"),
    "policies_coin": policies("textworld 2 8 data/coin"),
    "fixed_actions_babyai": ["data/make_items.py --check"],
    "fixed_link_webarena": [f"experiments/web.py fixed_link {WEBARENA_ITEMS}"],
    "tiny_sciworld": evaluation("--env sciworld --samples 1"),
    "tiny_webarena": evaluation("--env webarena --samples 1"),
    "tiny_textworld": evaluation("--env textworld --horizon 15 --samples 1"),
    "tiny_crafts": evaluation("--env textcraft --data data/crafts --horizon 20 --samples 2"),
    "tiny_levels": evaluation("--env babyai --data data/levels --horizon 16 --samples 2"),
    "warm_crafts_800": warm_start("textcraft", 800, 2, 20, "data/crafts"),
    "warm_crafts_4000": warm_start("textcraft", 4000, 3, 20, "data/crafts"),
    "warm_searchqa": warm_start("searchqa", 1500, 2, 4),
    "warm_levels": warm_start("babyai", 800, 2, 16, "data/levels"),
    "warm_coin": coin("warm"),
    "grpo_coin": coin("grpo", "train.py --env textworld --data data/coin --algo grpo "
                      "--model {run}/warm/final --out {run}/grpo"),
}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="entries whose name holds this text")
    parser.add_argument("--show", action="store_true", help="print the kept rows, run nothing")
    args = parser.parse_args()
    if not any(args.only in name for name in REFERENCES):
        parser.error(f"no entry has '{args.only}' in its name: {', '.join(REFERENCES)}")
    return args


def main():
    args = parse()
    names = [name for name in REFERENCES if args.only in name]
    if not args.show:
        commit = play.revision()
        for name in names:
            kept = rows.load(STUDY)
            if name not in kept or kept[name][0]["command"] != command_line(name):
                print(name, flush=True)
                rows.save(STUDY, kept | {name: [measure(name, commit)]})
    kept = rows.load(STUDY)
    print("\n".join(table(name, kept[name][0]) for name in names if name in kept))


def command_line(name):
    """What repeats an entry, item sets included."""
    made = [make for folder, (make, _) in MADE_ITEMS.items() if uses(name, folder)]
    shown = {"out": "OUT.json", "run": f"runs/{name}"}
    commands = [command.format(**shown) for command in REFERENCES[name]]
    return " && ".join(f"OMP_NUM_THREADS=1 python {command}" for command in made + commands)


def uses(name, folder):
    return any(folder in shlex.split(command) for command in REFERENCES[name])


def measure(name, commit):
    """Run the commands of an entry -> its row.

    Raises:
        RuntimeError: a command failed, or another commit than `commit` is checked out.
    """
    for folder, (make, last_file) in MADE_ITEMS.items():
        if uses(name, folder) and not (ROOT / folder / last_file).exists():
            play.call(*shlex.split(make))

    folder = ROOT / "runs/references" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted call
    folder.mkdir(parents=True)
    out = folder / "figures.json"
    begin = time.monotonic()
    for command in REFERENCES[name]:
        words = shlex.split(command)
        printed = play.call(*(word.format(out=out, run=folder / "run") for word in words))
    if play.revision() != commit:
        raise RuntimeError("another commit is checked out than at the beginning")

    found = json.loads(out.read_text()) if out.exists() else {"printed": printed.splitlines()}
    is_model = "config" in found  # written by eval.py
    return {
        "command": command_line(name),
        "commit": commit,
        "machine": play.machine(),
        "seed": 0,
        "model_sha256": found["config"]["model_sha256"] if is_model else "",
        "seconds": round(time.monotonic() - begin),
        "figures": play.held_out_figures(found) if is_model else found,
    }


def table(name, row):
    """Lines of text: one for each model or policy, or what a command printed."""
    figures = row["figures"]
    if "printed" in figures:
        return "\n".join(f"{name:28} {line}" for line in figures["printed"])
    if row["model_sha256"]:
        low, high = figures["ci95"]
        return (f"{name:28} {'model':9} success {figures['success']:.3f} [{low:.3f}, {high:.3f}], "
                f"score {figures['score']:.3f}, turns {figures['turns']:.2f}, "
                f"valid {figures['valid_actions']:.3f}")
    lines = []
    for label, found in figures.items():
        low, high = found["ci95"]["success"]
        lines.append(f"{name:28} {label:9} success {found['success']:.3f} [{low:.3f}, {high:.3f}], "
                     f"score {found['score']:.3f}, turns {found['turns']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
