"""A run to look at: `python view.py runs/NAME` writes runs/NAME/view.html, and curves.png again.

The page needs no network. Its template is view.html. It has the learning curves, a table of all
trajectories, and each trajectory token by token, with log-probs and advantages. BabyAI's rooms are
drawn by playing the episode again. The page holds trajectories as compressed chunks, which the
browser decompresses when they are looked at. Text written by models and worlds is data in the page,
never markup.
"""

import argparse
import base64
import gzip
import json
import math
import sys
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent import PLAN, REFLECT, REFLECT_ON_ALL, parse
from envs import Env, make_env
from metrics import draw_curves, stages, write_atomically
from rl import checkpoints, location, model_path

CURVES = ("success", "score", "reward", "turns", "entropy", "kl", "kl_behaviour", "grad_norm",
          "valid_actions", "zero_gradient_groups", "tokens_per_second")
SFT_CURVES = ("loss", "held_out_loss", "grad_norm", "lr", "tokens_per_second")
CHUNK = 16  # trajectories in a compressed chunk
MAX_DRAWN = 2000  # about how many trajectories have their rooms drawn
MAX_TOKENS = 10_000_000  # about how many tokens a page holds
TABLE = ("step", "env", "item", "group", "sample", "status", "reward", "success", "turns")

# ---- BabyAI's rooms ----

# A cell as the simulator encodes it is (kind of object, colour, state).
DOOR = 4
LETTERS = {2: "#", 5: "k", 6: "o", 7: "b"}  # wall, key, ball, box; other kinds are a space
DOOR_LETTERS = "dcl"  # by state: open, closed, locked

Room = tuple[int, str, tuple[int, int, int]]  # width, cells, (x, y, direction) of the agent


def draw_room(world: Env) -> Room:
    """The room from above, two characters a cell, row by row: a letter and the colour's number."""
    env = world.env.unwrapped
    cells = env.grid.encode().transpose(1, 0, 2).reshape(-1, 3).tolist()  # [H * W, 3]
    drawn = []
    for kind, colour, state in cells:
        letter = DOOR_LETTERS[state] if kind == DOOR else LETTERS.get(kind, " ")
        drawn.append(letter + str(colour))
    x, y = env.agent_pos
    return env.grid.width, "".join(drawn), (int(x), int(y), int(env.agent_dir))


def rooms(trajectory: dict, world: Env, action_format: str) -> list[Room]:
    """Play a BabyAI trajectory again -> the room before each reply and after the last one."""
    number = int(trajectory["item"].removeprefix("babyai_"))
    world.reset(number)
    drawn = [draw_room(world)]
    messages = trajectory["messages"]
    for observation, reply in zip(messages[2::2], messages[3::2]):
        asked = observation["content"]
        if asked.endswith(REFLECT_ON_ALL):  # after the reflection the episode starts again
            world.reset(number)
        elif not asked.endswith((PLAN, REFLECT)):
            world.step(parse(reply["content"], action_format))
        drawn.append(draw_room(world))
    return drawn


# ---- tokens and trajectories as the page holds them ----


def piece(tokenizer: PreTrainedTokenizerBase, token: int) -> str | list[int]:
    """The text of a token; for a token that is a part of a character its bytes, which the page
    joins with those of its neighbours."""
    text = tokenizer.decode([token])
    written = tokenizer.convert_ids_to_tokens(token) or ""
    if "\ufffd" in text:  # the replacement character: incomplete UTF-8
        if len(written) == 6 and written.startswith("<0x"):  # SentencePiece writes <0xE2>
            return [int(written[3:5], 16)]
        # Byte-level BPE writes each byte as a character of its own.
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        if all(character in byte_of for character in written):
            return [byte_of[character] for character in written]
    # SentencePiece's space before a word is lost where a token is decoded alone.
    if written.startswith("\u2581") and not text.startswith(" "):
        return " " + text
    return text


def compress(trajectories: list[dict]) -> str:
    """JSON, compressed, in base64."""
    text = json.dumps(trajectories, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode())).decode()


def finite(x: float, digits: int) -> float:
    """x, rounded; 0 if it is not finite, for which JSON has no number."""
    return round(x, digits) if math.isfinite(x) else 0.0


def advantages(trajectory: dict) -> list[float]:
    """One advantage a token. Some algorithms record one number for all sampled tokens."""
    advantage = trajectory["advantage"]
    if isinstance(advantage, list):
        return advantage
    return [advantage * sampled for sampled in trajectory["mask"]]


class Contents:
    """The trajectories of a page: `table` has a row for each, `chunks` the tokens of `CHUNK` at a
    time, `vocabulary` the text of each token that occurs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.table: list[dict] = []
        self.chunks: list[str] = []
        self.vocabulary: dict[int, str | list[int]] = {}
        self.chunk: list[dict] = []  # the trajectories of the next chunk

    def add(self, trajectory: dict, drawn: list[Room] | None) -> None:
        """Add a trajectory, and its rooms if they are drawn."""
        tokens = trajectory["tokens"]
        for token in tokens:
            if token not in self.vocabulary:
                self.vocabulary[token] = piece(self.tokenizer, token)
        row = {name: trajectory[name] for name in TABLE}
        self.table.append({"id": len(self.table), "tokens": len(tokens)} | row)
        self.chunk.append({
            "ids": tokens,
            "mask": [int(sampled) for sampled in trajectory["mask"]],
            "logprobs": [finite(x, 5) for x in trajectory["logprobs"]],
            "rewards": trajectory["rewards"],
            "advantage": [finite(x, 4) for x in advantages(trajectory)],
            "score": trajectory["score"],
            "error": trajectory["error"],
            "grids": drawn,
        })
        if len(self.chunk) == CHUNK:
            self.end_chunk()

    def end_chunk(self) -> None:
        """Compress what has been added since the last chunk."""
        if self.chunk:
            self.chunks.append(compress(self.chunk))
            self.chunk = []


# ---- the page ----


def read_run(run: Path) -> tuple[dict, list[dict], list[Path]]:
    """-> the run's config, its rows of metrics, and the trajectory files of the same steps.

    Raises ValueError if the folder holds no run, or one without a complete step.
    """
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    if not files or not (run / "config.json").exists():
        raise ValueError(f"{run} has no trajectories; give the folder of a run, runs/NAME")
    config = json.loads((run / "config.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not rows:
        raise ValueError(f"{run} has not ended its first step")
    return config, rows, files[:len(rows)]  # a step's row is written last


def load_tokenizer(run: Path, config: dict) -> PreTrainedTokenizerBase:
    """The tokenizer of final/ or of the newest checkpoint, else that of the run's first model."""
    for folder in (run / "final", *reversed(checkpoints(run))):
        if (folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(**location(folder))
    return AutoTokenizer.from_pretrained(**location(model_path(config["model"])))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def choose_groups(rows: list[dict], most: int) -> tuple[int, int]:
    """-> (every, every_drawn): one group in `every` is in the page, and of those one in
    `every_drawn` has its rooms drawn.

    most: about how many trajectories the page may hold. Raises ValueError if it is not positive.
    """
    if most < 1:
        raise ValueError(f"--most must be positive, not {most}")
    trajectories = sum(row["trajectories"] for row in rows)
    tokens = sum(row.get("tokens", 0) for row in rows)
    every = max(1, ceil_div(trajectories, most), ceil_div(tokens, MAX_TOKENS))
    every_drawn = max(1, ceil_div(ceil_div(trajectories, every), MAX_DRAWN))
    return every, every_drawn


def collect(files: list[Path], config: dict, tokenizer: PreTrainedTokenizerBase, every: int,
            every_drawn: int) -> Contents:
    """Read the trajectories of the chosen groups: whole groups, evenly spread over the steps."""
    contents = Contents(tokenizer)
    world = make_env("babyai") if "babyai" in config["env"] else None
    for file in tqdm(files, desc="view", unit="step"):
        with file.open() as lines:
            for line in lines:
                trajectory = json.loads(line)
                number = trajectory["group"] + trajectory["step"]
                if number % every:
                    continue
                drawn = None
                if (number // every) % every_drawn == 0 and can_be_drawn(trajectory, world):
                    drawn = rooms(trajectory, world, config["action_format"])
                contents.add(trajectory, drawn)
    contents.end_chunk()
    return contents


def can_be_drawn(trajectory: dict, world: Env | None) -> bool:
    """Whether it is a BabyAI trajectory that has begun. world: BabyAI, if the run has played it."""
    if world is None or not trajectory["messages"]:
        return False
    return trajectory["item"].removeprefix("babyai_").isdecimal()


def number_or_none(value: float | None) -> float | None:
    """A value that JSON can hold; None for one that is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None


def page_data(name: str, config: dict, rows: list[dict], contents: Contents, every: int) -> dict:
    """What the page's script reads. name: the run's."""
    names = CURVES if "success" in rows[0] else SFT_CURVES
    curves = [key for key in names if key in rows[0]]
    curves += [key for key in rows[0] if key.startswith(("success/", "eval/success"))]
    metrics = {key: [number_or_none(row.get(key)) for row in rows] for key in curves}
    about = (f"{config['algo']} on {config['env']}, {config['model']}, "
             f"horizon {config['horizon']}, seed {config['seed']}, {len(rows)} steps")
    note = ""
    if every > 1:
        total = sum(row["trajectories"] for row in rows)
        note = f" (of {total} played: one group in {every})"
    return {
        "name": name,
        "about": about,
        "curves": curves,
        "metrics": metrics,
        "stages": stages(rows),
        "table": contents.table,
        "chunk": CHUNK,
        "chunks": contents.chunks,
        "vocabulary": contents.vocabulary,
        "note": note,
    }


def write_page(run: str | Path, most: int = 10_000) -> Path:
    """runs/NAME -> runs/NAME/view.html, with about `most` trajectories.

    Raises ValueError if the folder holds no run.
    """
    run = Path(run)
    config, rows, files = read_run(run)
    tokenizer = load_tokenizer(run, config)
    every, every_drawn = choose_groups(rows, most)
    contents = collect(files, config, tokenizer, every, every_drawn)
    data = page_data(run.name, config, rows, contents, every)

    # "</script>" in a string would end the element. JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = (Path(__file__).parent / "view.html").read_text()
    write_atomically(run / "view.html", template.replace("/*DATA*/", text))
    return run / "view.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run: runs/NAME")
    parser.add_argument("--most", type=int, default=10_000, help="trajectories in the page")
    args = parser.parse_args()
    try:
        print(write_page(args.run, args.most))
        draw_curves(args.run)
    except (ValueError, OSError) as e:
        print(f"view.py: {e}", file=sys.stderr)
        sys.exit(2)
