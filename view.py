"""A run to look at: `python view.py runs/NAME` writes runs/NAME/view.html, one page that needs no network, and curves.png again.

The page (view.html is its template) has the learning curves, a table of all trajectories, and each of them token by token, with
log-probs and advantages; BabyAI's rooms are drawn by playing the episode again. Trajectories stand in it as compressed pieces that
the browser opens when they are looked at. What models and worlds wrote is data there, never markup.
"""

import argparse
import base64
import gzip
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from metrics import draw_curves, stages

CURVES = "success score reward turns entropy kl kl_behaviour grad_norm valid_actions zero_gradient_groups tokens_per_second".split()
CHUNK, ROOMS = 16, 2000  # trajectories in a compressed piece; about how many have their rooms drawn
TOKENS = 10_000_000  # a page holds no more


def rooms(trajectory: dict, world: Any, action_format: str) -> list[tuple[int, str, tuple[int, int, int]]]:
    """BabyAI from above, before each reply and after the last -> [(width, two characters a cell, (x, y, direction)), ...]"""
    from agent import PLAN, REFLECT, REFLECT_ON_ALL, parse
    letters = {2: "#", 5: "k", 6: "o", 7: "b"}

    def look():
        env = world.env.unwrapped
        cells = env.grid.encode().transpose(1, 0, 2).reshape(-1, 3).tolist()  # [H * W, (kind, colour, state)]
        drawn = "".join(("dcl"[state] if kind == 4 else letters.get(kind, " ")) + str(colour) for kind, colour, state in cells)
        return env.grid.width, drawn, (int(env.agent_pos[0]), int(env.agent_pos[1]), int(env.agent_dir))

    world.reset(int(trajectory["item"].removeprefix("babyai_")))
    seen = [look()]
    for asked, reply in zip(trajectory["messages"][2::2], trajectory["messages"][3::2]):
        if asked["content"].endswith(REFLECT_ON_ALL):
            world.reset(int(trajectory["item"].removeprefix("babyai_")))
        elif not asked["content"].endswith((PLAN, REFLECT)):
            world.step(parse(reply["content"], action_format))
        seen.append(look())
    return seen


def piece(tokenizer: Any, token: int) -> str | list[int]:
    """What a token adds to a text; as bytes where it is a part of a character (the page puts them together)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    text, written = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token) or ""
    if "\ufffd" in text:
        known = {c: b for b, c in bytes_to_unicode().items()}  # byte-level BPE's
        if len(written) == 6 and written.startswith("<0x"):  # SentencePiece's
            return [int(written[3:5], 16)]
        if all(c in known for c in written):
            return [known[c] for c in written]
    return " " + text if written.startswith("\u2581") and not text.startswith(" ") else text


def packed(trajectories: list[dict]) -> str:
    """JSON, compressed, in base64."""
    return base64.b64encode(gzip.compress(json.dumps(trajectories, separators=(",", ":")).encode())).decode()


def write_page(run: str | Path, most: int = 10_000) -> Path:
    """runs/NAME -> runs/NAME/view.html, of about `most` trajectories (whole groups, evenly spread over the steps).
    Raises ValueError if the folder holds no run."""
    from transformers import AutoTokenizer

    from envs import make_env
    from rl import checkpoints, model_path
    run = Path(run)
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    if not files or not (run / "config.json").exists():
        raise ValueError(f"{run} has no trajectories; give the folder of a run, runs/NAME")
    config = json.loads((run / "config.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not rows:
        raise ValueError(f"{run} has not ended its first step")
    files = files[:len(rows)]  # a step's row is written last
    folder = next((p for p in (run / "final", *reversed(checkpoints(run))) if (p / "tokenizer.json").exists()), None)
    tokenizer = AutoTokenizer.from_pretrained(folder or model_path(config["model"]))
    if most < 1:
        raise ValueError(f"--most must be positive, not {most}")
    total, finite = sum(row["trajectories"] for row in rows), lambda x, digits: round(x, digits) if math.isfinite(x) else 0.0
    every = max(1, -(-total // most), -(-sum(row.get("tokens", 0) for row in rows) // TOKENS))
    draw = max(1, -(-total // every // ROOMS))  # of so many groups one has its rooms drawn
    table, chunks, vocabulary, current, world = [], [], {}, [], make_env("babyai") if "babyai" in config["env"] else None
    for file in tqdm(files, desc="view", unit="step"):
        for line in file.open():
            t = json.loads(line)
            if (t["group"] + t["step"]) % every:
                continue
            for token in t["tokens"]:
                if token not in vocabulary:
                    vocabulary[token] = piece(tokenizer, token)
            advantage = t["advantage"] if isinstance(t["advantage"], list) else [t["advantage"] * m for m in t["mask"]]
            known = world and t["item"].removeprefix("babyai_").isdecimal() and t["messages"] and (t["group"] + t["step"]) // every % draw == 0
            drawn = rooms(t, world, config["action_format"]) if known else None
            table.append({"id": len(table), "tokens": len(t["tokens"])} | {k: t[k] for k in (
                "step", "env", "item", "group", "sample", "status", "reward", "success", "turns")})
            current.append({"ids": t["tokens"], "mask": [int(m) for m in t["mask"]], "logprobs": [finite(x, 5) for x in t["logprobs"]], "rewards": t["rewards"],
                            "advantage": [finite(a, 4) for a in advantage], "score": t["score"], "error": t["error"], "grids": drawn})
            if len(current) == CHUNK:
                chunks.append(packed(current))
                current = []
    chunks += [packed(current)] if current else []
    names = [k for k in CURVES if k in rows[0]] + [k for k in rows[0] if k.startswith("success/")]
    about = f"{config['algo']} on {config['env']}, {config['model']}, horizon {config['horizon']}, seed {config['seed']}, {len(rows)} steps"
    data = {"name": run.name, "about": about,
            "curves": names, "metrics": {name: [row[name] if math.isfinite(row[name]) else None for row in rows] for name in names},
            "stages": stages(rows),
            "table": table, "chunk": CHUNK, "chunks": chunks, "vocabulary": vocabulary,
            "note": f" (of {total} played: one group in {every})" if every > 1 else ""}
    # "</script>" in a string would end the element; < is as good as "<" in JSON
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = (Path(__file__).parent / "view.html").read_text().replace("/*DATA*/", text)
    (run / "view.html.tmp").write_text(page)
    os.replace(run / "view.html.tmp", run / "view.html")
    return run / "view.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run: runs/NAME")
    parser.add_argument("--most", type=int, default=10_000, help="trajectories in the page")
    args = parser.parse_args()
    try:
        print(write_page(args.run, args.most))
        draw_curves(args.run)
    except (ValueError, OSError) as e:
        print(f"view.py: {e}", file=sys.stderr)
        sys.exit(2)
