"""A run to look at: `python view.py runs/NAME` writes runs/NAME/view.html, and curves.png again.

The page needs no network. Its template is view.html. It has the learning curves, a table of all
trajectories, and each trajectory token by token, with log-probs and advantages. BabyAI's rooms are
drawn by playing the episode again. The page holds trajectories as compressed chunks, which the
browser decompresses when they are looked at. Text written by models and worlds is data in the page,
never markup. Damaged lines, trajectories and numbers are left out, and the page says how many.
"""

import argparse
import base64
import gzip
import json
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent import PLAN, REFLECT, REFLECT_ON_ALL, parse
from envs import Env, make_env
from metrics import all_columns, draw_curves, is_number, read_objects, stages, write_atomically
from rl import checkpoints, location, model_path

CURVES = ("success", "score", "reward", "turns", "entropy", "kl", "kl_behaviour", "grad_norm",
          "valid_actions", "zero_gradient_groups", "tokens_per_second")
SFT_CURVES = ("loss", "held_out_loss", "grad_norm", "lr", "tokens_per_second")
CHUNK = 16  # trajectories in a compressed chunk
MAX_DRAWN = 2000  # about how many trajectories have their rooms drawn
MAX_TOKENS = 10_000_000  # about how many tokens a page holds
TABLE = ("step", "env", "item", "group", "sample", "status", "reward", "success", "turns")
# What a trajectory must have to be in the page. Other fields have a default value.
NEEDED = {"step": int, "env": str, "item": str, "group": int, "status": str,
          "reward": (int, float), "success": (bool, int, float), "turns": int, "tokens": list,
          "mask": list, "logprobs": list, "rewards": list, "advantage": (int, float, list)}
DEFAULTS = {"sample": 0, "score": None, "error": "", "messages": []}

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


def rooms(trajectory: dict, world: Env, action_format: str,
          lenient_as: str = "") -> list[Room]:
    """Play a BabyAI trajectory again -> the room before each reply and after the last one.
    lenient_as: see `agent.parse`."""
    number = int(trajectory["item"].removeprefix("babyai_"))
    world.reset(number)
    drawn = [draw_room(world)]
    messages = trajectory["messages"]
    for observation, reply in zip(messages[2::2], messages[3::2]):
        asked = observation["content"]
        if asked.endswith(REFLECT_ON_ALL):  # after the reflection the episode starts again
            world.reset(number)
        elif not asked.endswith((PLAN, REFLECT)):
            world.step(parse(reply["content"], action_format, lenient_as))
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
    text = json.dumps(trajectories, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode())).decode()


def finite(x: float, digits: int) -> float:
    """x, rounded; 0 if it is not finite, for which JSON has no number."""
    return round(x, digits) if is_number(x) else 0.0


def flaw(trajectory: dict) -> str:
    """Why a trajectory cannot be shown; "" if it can."""
    for name, kind in NEEDED.items():
        if name not in trajectory:
            return f"no field '{name}'"
        if not isinstance(trajectory[name], kind):
            return f"a '{name}' of another kind"
    for name in ("tokens", "mask"):
        if not all(isinstance(x, int) for x in trajectory[name]):
            return f"a '{name}' of another kind"
    lists = [trajectory[name] for name in ("tokens", "mask", "logprobs", "rewards", "advantage")]
    if len({len(values) for values in lists if isinstance(values, list)}) > 1:
        return "lists of different lengths"
    return ""


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
        self.unknown: set[int] = set()  # token ids that the tokenizer does not have
        self.chunk: list[dict] = []  # the trajectories of the next chunk
        self.left_out: Counter[str] = Counter()  # what -> how many

    def add(self, trajectory: dict, drawn: list[Room] | None) -> None:
        """Add a trajectory, and its rooms if they are drawn."""
        tokens = trajectory["tokens"]
        for token in tokens:
            if token in self.unknown:
                self.left_out["texts of token ids that the tokenizer does not have"] += 1
            elif token not in self.vocabulary:
                self.add_to_vocabulary(token)
        per_token = (trajectory["logprobs"], trajectory["rewards"], advantages(trajectory))
        for values in (*per_token, (trajectory["reward"],)):
            for value in values:
                if not is_number(value):
                    self.left_out["numbers of trajectories that are not finite"] += 1
        row = {name: trajectory[name] for name in TABLE}
        for name in ("reward", "success"):
            row[name] = number_or_none(row[name])
        self.table.append({"id": len(self.table), "tokens": len(tokens)} | row)
        self.chunk.append({
            "ids": tokens,
            "mask": [int(sampled) for sampled in trajectory["mask"]],
            "logprobs": [finite(x, 5) for x in trajectory["logprobs"]],
            "rewards": [x if is_number(x) else 0.0 for x in trajectory["rewards"]],
            "advantage": [finite(x, 4) for x in advantages(trajectory)],
            "score": number_or_none(trajectory["score"]),
            "error": str(trajectory["error"] or ""),
            "grids": drawn,
        })
        if len(self.chunk) == CHUNK:
            self.end_chunk()

    def add_to_vocabulary(self, token: int) -> None:
        """Add the text of a token. The page shows the number of a token without a text."""
        if 0 <= token < 2**31 and self.tokenizer.convert_ids_to_tokens(token) is not None:
            self.vocabulary[token] = piece(self.tokenizer, token)
        else:
            self.unknown.add(token)
            self.left_out["texts of token ids that the tokenizer does not have"] += 1

    def end_chunk(self) -> None:
        """Compress what has been added since the last chunk."""
        if self.chunk:
            self.chunks.append(compress(self.chunk))
            self.chunk = []


# ---- the page ----


def read_run(run: Path) -> tuple[dict, list[dict], list[Path], Counter]:
    """-> the run's config, its rows of metrics, the trajectory files of the same steps, and how
    many rows are left out.

    Raises ValueError if the folder holds no run, or one without a complete step.
    """
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    if not files or not (run / "config.json").exists():
        raise ValueError(f"{run} has no trajectories; give the folder of a run, runs/NAME")
    try:
        config = json.loads((run / "config.json").read_text())
        model_path(config["model"])
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{run}/config.json is damaged: {type(e).__name__}: {e}") from e
    rows, damaged = read_objects(run / "metrics.jsonl")
    if not rows and not damaged:
        raise ValueError(f"{run} has not ended its first step")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl is damaged: none of its lines is a JSON object")
    # A step's row is written last: a damaged one shows that its trajectories are there, too.
    return config, rows, files[:len(rows) + damaged], Counter({
        "lines of metrics.jsonl that are no JSON object": damaged})


def load_tokenizer(run: Path, config: dict) -> PreTrainedTokenizerBase:
    """The tokenizer of final/ or of the newest checkpoint, else that of the run's first model."""
    for folder in (run / "final", *reversed(checkpoints(run))):
        if (folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(**location(folder))
    return AutoTokenizer.from_pretrained(**location(model_path(config["model"])))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def total(rows: list[dict], name: str) -> int:
    """The sum of a column of counts; rows without a number there count as 0."""
    return int(sum(row[name] for row in rows if is_number(row.get(name))))


def choose_groups(rows: list[dict], most: int) -> tuple[int, int]:
    """-> (every, every_drawn): one group in `every` is in the page, and of those one in
    `every_drawn` has its rooms drawn.

    most: about how many trajectories the page may hold. Raises ValueError if it is not positive.
    """
    if most < 1:
        raise ValueError(f"--most must be positive, not {most}")
    trajectories = total(rows, "trajectories")
    tokens = total(rows, "tokens")
    every = max(1, ceil_div(trajectories, most), ceil_div(tokens, MAX_TOKENS))
    every_drawn = max(1, ceil_div(ceil_div(trajectories, every), MAX_DRAWN))
    return every, every_drawn


def collect(files: list[Path], config: dict, tokenizer: PreTrainedTokenizerBase, every: int,
            every_drawn: int) -> Contents:
    """Read the trajectories of the chosen groups: whole groups, evenly spread over the steps."""
    contents = Contents(tokenizer)
    # The rooms are drawn by playing again, which needs the way in which replies were read.
    has_rooms = "babyai" in str(config.get("env")) and "action_format" in config
    upstream = int("babyai.upstream=1" in str(config.get("env_args")))
    world = make_env("babyai", upstream=upstream) if has_rooms else None
    lenient_as = "babyai" if config.get("parse") == "lenient" else ""
    for file in tqdm(files, desc="view", unit="step"):
        trajectories, damaged = read_objects(file)
        contents.left_out["lines of trajectories that are no JSON object"] += damaged
        contents.left_out["trajectory files that are empty"] += not trajectories and not damaged
        for trajectory in trajectories:
            why = flaw(trajectory)
            if why:
                contents.left_out[f"trajectories with {why}"] += 1
                continue
            trajectory = DEFAULTS | trajectory
            number = trajectory["group"] + trajectory["step"]
            if number % every:
                continue
            drawn = None
            if (number // every) % every_drawn == 0 and can_be_drawn(trajectory, world):
                drawn = rooms(trajectory, world, config["action_format"], lenient_as)
            contents.add(trajectory, drawn)
    contents.end_chunk()
    return contents


def can_be_drawn(trajectory: dict, world: Env | None) -> bool:
    """Whether it is a BabyAI trajectory that has begun. world: BabyAI, if the run has played it."""
    messages = trajectory["messages"]
    if world is None or not messages or not isinstance(messages, list):
        return False
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return False
    return trajectory["item"].removeprefix("babyai_").isdecimal()


def number_or_none(value: float | None) -> float | None:
    """A value that JSON can hold; None for one that is missing or not finite."""
    return value if is_number(value) else None


def curves_of(rows: list[dict], left_out: Counter) -> dict[str, list[float | None]]:
    """Name of a curve -> its value in each row, None where there is no finite number.

    `left_out` is told of these values, except those of held-out items, which few rows have.
    """
    columns = all_columns(rows)
    names = CURVES if "success" in columns else SFT_CURVES
    curves = [key for key in names if key in columns]
    curves += [key for key in columns if key.startswith(("success/", "eval/success"))]
    metrics = {}
    for key in curves:
        values = [number_or_none(row.get(key)) for row in rows]
        is_sparse = key.startswith(("eval/", "held_out"))
        if not is_sparse:
            left_out[f"values of {key} that are missing or not finite"] += values.count(None)
        if any(value is not None for value in values):
            metrics[key] = values
    return metrics


def page_data(name: str, config: dict, rows: list[dict], contents: Contents, every: int,
              left_out: Counter) -> dict:
    """What the page's script reads. name: the run's."""
    metrics = curves_of(rows, left_out)
    left_out = left_out + contents.left_out  # without those of which there is none
    algo, env, model, horizon, seed = (
        config.get(key, "?") for key in ("algo", "env", "model", "horizon", "seed"))
    about = f"{algo} on {env}, {model}, horizon {horizon}, seed {seed}, {len(rows)} steps"
    note = ""
    if every > 1:
        note = f" (of {total(rows, 'trajectories')} played: one group in {every})"
    return {
        "name": name,
        "about": about,
        "left_out": [f"{count} {what}" for what, count in left_out.items()],
        "curves": list(metrics),
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

    What is left out is said in the page and on stderr.
    Raises ValueError if the folder holds no run.
    """
    run = Path(run)
    config, rows, files, left_out = read_run(run)
    tokenizer = load_tokenizer(run, config)
    every, every_drawn = choose_groups(rows, most)
    contents = collect(files, config, tokenizer, every, every_drawn)
    data = page_data(run.name, config, rows, contents, every, left_out)
    if data["left_out"]:
        print(f"view.py: left out: {'; '.join(data['left_out'])}", file=sys.stderr)

    # "</script>" in a string would end the element. JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
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
