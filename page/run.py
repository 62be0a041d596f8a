"""A run's files as the page needs them: rows of the table, and trajectories token by token.

Damaged data is left out and counted.
"""

import json
import math
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from checkpoint import named, step_in

from metrics import all_columns, horizon_changes, is_number
from page.replay import Replay
from rl import location, model_path
from trajectory import read_objects

CURVES = ("success", "score", "reward", "turns", "entropy", "kl", "kl_behaviour",
          "grad_norm", "valid_actions", "zero_gradient_groups", "tokens_per_second")
SFT_CURVES = ("loss", "held_out_loss", "grad_norm", "lr", "tokens_per_second")
LAST_REPLY = 100  # characters of the last reply in the table
# The fields that a trajectory must have to be shown. Other fields have default values.
NEEDED = {"step": int, "env": str, "item": str, "group": int, "status": str,
          "reward": (int, float), "success": (bool, int, float), "turns": int, "tokens": list,
          "mask": list, "logprobs": list, "rewards": list, "advantage": (int, float, list)}
DEFAULTS = {"sample": 0, "score": None, "error": "", "messages": [], "starts": [0], "entropies": [],
            "invalid_turns": None, "cut_turns": []}
COPIED = ("step", "env", "item", "group", "sample", "status", "turns")
COLUMNS = (*COPIED, "category", "reward", "success", "tokens", "invalid", "last_reply")

# ---- the files of a run ----


def read_config(run: Path) -> dict:
    """The run's flags. Raises ValueError if the folder holds no run or the file is damaged."""
    if not (run / "config.json").exists():
        raise ValueError(f"{run} has no trajectories; give the folder of a run, runs/NAME")
    try:
        config = json.loads((run / "config.json").read_text())
        if not isinstance(config["model"], str):
            raise ValueError(f"model {config['model']!r}")
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{run}/config.json is damaged: {type(e).__name__}: {e}") from e
    return config


def read_metrics(run: Path) -> tuple[list[dict], list[Path], Counter]:
    """-> the run's rows of metrics, the trajectory files of the same steps, and how many rows are
    left out. Raises ValueError if all of them are damaged."""
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    files = [file for file in files if step_in(file) is not None]
    if not files or not (run / "metrics.jsonl").exists():
        return [], [], Counter()
    rows, damaged = read_objects(run / "metrics.jsonl")
    if damaged and not rows:
        raise ValueError(f"{run}/metrics.jsonl is damaged: none of its lines is a JSON object")
    # The files of complete steps: those up to the last row (some rows may have been deleted by
    # hand), and at least as many as there are rows, because a step's row, which may be damaged, is
    # written last.
    last = max((row["step"] for row in rows if is_number(row.get("step"))), default=-1)
    up_to_last = sum(step_in(file) <= last for file in files)
    return rows, files[:max(up_to_last, len(rows) + damaged)], Counter({
        "lines of metrics.jsonl that are not JSON objects": damaged})


def load_tokenizer(run: Path, config: dict) -> PreTrainedTokenizerBase:
    """The tokenizer of final/ or of the newest checkpoint, else that of the run's first model."""
    for folder in (run / "final", *reversed(named(run))):
        if (folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(**location(folder))
    return AutoTokenizer.from_pretrained(**location(model_path(config["model"])))


# ---- numbers ----


def number_or_none(value: float | None) -> float | None:
    """A value that JSON can hold; None for one that is missing or not finite."""
    return value if is_number(value) else None


def count_bad(values: list) -> int:
    """How many of the values are no finite numbers."""
    try:
        if math.isfinite(sum(values)):
            return 0
    except (TypeError, OverflowError):  # one of them is no number, or a huge one
        pass
    return sum(not is_number(value) for value in values)


def rounded(values: list, digits: int) -> list[float | None]:
    """The values, rounded; None for those that are not finite, for which JSON has no number."""
    return [round(x, digits) if is_number(x) else None for x in values]


def whole_numbers(values: object) -> list[int]:
    """Those of a list that are whole numbers; none of anything else."""
    return [x for x in values if type(x) is int] if isinstance(values, list) else []


def curves_of(rows: list[dict], left_out: Counter) -> dict[str, list[float | None]]:
    """Name of a curve -> its value in each row, None where there is no finite number.

    `left_out` counts these values, except those of held-out items, which not every row has.
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


# ---- trajectories ----


def flaw(trajectory: dict) -> str:
    """Why a trajectory cannot be shown; "" if it can."""
    for name, kind in NEEDED.items():
        if name not in trajectory:
            return f"no field '{name}'"
        if not isinstance(trajectory[name], kind):
            return f"a '{name}' of another kind"
    if not isinstance(trajectory.get("sample", 0), int):
        return "a 'sample' of another kind"
    for name in ("tokens", "mask"):
        if not set(map(type, trajectory[name])) <= {int, bool}:
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


def invalid_turns(trajectory: dict) -> list[int]:
    """The turns whose action was not valid. In runs that did not record it: those with a reward
    below zero."""
    if trajectory["invalid_turns"] is not None:
        return whole_numbers(trajectory["invalid_turns"])
    found = []
    turn = 1
    mask = trajectory["mask"]
    for place, (sampled, reward) in enumerate(zip(mask, trajectory["rewards"])):
        if sampled and is_number(reward) and reward < 0:
            found.append(turn)
        is_last_of_reply = sampled and not (place + 1 < len(mask) and mask[place + 1])
        turn += is_last_of_reply
    return found


def last_reply(trajectory: dict) -> str:
    """The end of the last message of the agent; "" if there is none."""
    messages = trajectory["messages"] if isinstance(trajectory["messages"], list) else []
    replies = [m["content"] for m in messages[3:] if isinstance(m, dict)
               and m.get("role") == "assistant" and isinstance(m.get("content"), str)]
    return " ".join(replies[-1].split())[-LAST_REPLY:] if replies else ""


def complete(trajectory: dict, file: Path) -> dict:
    """A trajectory with all fields, and the step of its file: a supervised run learns from
    trajectories that were played at other steps."""
    digits = file.stem.removeprefix("step_")
    step = int(digits) if digits.isdecimal() else trajectory["step"]
    return DEFAULTS | trajectory | {"step": step}


class Run:
    """A run whose files are read as they come: `rows` has the columns of each trajectory."""

    def __init__(self, folder: str | Path):
        """Raises ValueError if the folder holds no run."""
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.replay = Replay(self.config)
        self.metrics: list[dict] = []
        self.rows: list[dict] = []
        self.left_out: Counter[str] = Counter()  # what -> how many
        self.damaged_rows: Counter[str] = Counter()  # the same, of the metrics as last read
        self.unread: list[Path] = []  # files of complete steps whose trajectories are not in `rows`
        self.read: list[Path] = []
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def find_files(self) -> None:
        """Read the metrics, and note new files. Raises ValueError as
        `read_metrics`."""
        self.metrics, files, self.damaged_rows = read_metrics(self.folder)
        self.unread = files[len(self.read):]

    def read_file(self, file: Path) -> list[dict]:
        """The trajectories of a file that can be shown; their rows are added to `rows`."""
        trajectories, damaged = read_objects(file)
        self.left_out["lines of trajectories that are not JSON objects"] += damaged
        self.left_out["trajectory files that are empty"] += not trajectories and not damaged
        kept = []
        for trajectory in trajectories:
            why = flaw(trajectory)
            if why:
                self.left_out[f"trajectories with {why}"] += 1
                continue
            kept.append(complete(trajectory, file))
            self.rows.append(self._row(kept[-1]))
        self.read.append(file)
        return kept

    def _row(self, trajectory: dict) -> dict:
        per_token = (trajectory["logprobs"], trajectory["rewards"], advantages(trajectory))
        for values in (*per_token, [trajectory["reward"]]):
            self.left_out["numbers of trajectories that are not finite"] += count_bad(values)
        return {name: trajectory[name] for name in COPIED} | {
            "category": self.replay.category(trajectory["item"]),
            "reward": number_or_none(trajectory["reward"]),
            "success": number_or_none(trajectory["success"]),
            "tokens": len(trajectory["tokens"]),
            "invalid": min(invalid_turns(trajectory), default=None),
            "last_reply": last_reply(trajectory),
        }

    def about(self) -> dict:
        """What the page says about the run: its name, its flags in a line, its curves."""
        left_out = Counter(self.damaged_rows)
        metrics = curves_of(self.metrics, left_out)
        left_out = left_out + self.left_out  # without those of which there is none
        algo, env, model, horizon, seed = (
            self.config.get(key, "?") for key in ("algo", "env", "model", "horizon", "seed"))
        steps = [row["step"] if is_number(row.get("step")) else place
                 for place, row in enumerate(self.metrics)]
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "about": f"{algo} on {env}, {model}, horizon {horizon}, seed {seed}, "
                     f"{len(self.metrics)} steps",
            "note": "",
            "left_out": [f"{count} {what}" for what, count in left_out.items()],
            "metrics": metrics,
            "steps": steps,
            "total_steps": self.config.get("steps") or len(steps),
            "stages": [steps[place] for place in horizon_changes(self.metrics)],
            "invalid_penalty": number_or_none(self.config.get("invalid_penalty")),
        }

    def table(self, first: int = 0) -> dict[str, list]:
        """The rows from number `first` on, as columns."""
        names = (*COLUMNS, "held") if self.rows and "held" in self.rows[0] else COLUMNS
        return {name: [row[name] for row in self.rows[first:]] for name in names}

    def tokens_of(self, trajectory: dict, draws: bool = True) -> dict:
        """A trajectory as the page shows it. draws: with the states that its world can draw."""
        entropies = trajectory["entropies"]
        has_entropies = isinstance(entropies, list) and any(entropies) and (
            len(entropies) == len(trajectory["tokens"]))
        # Replies that are not learnt (sft.py's random actions) are not told from the environment's
        # text. The turns of such a trajectory cannot be numbered.
        mask = trajectory["mask"]
        replies = sum(bool(b) and not a for a, b in zip([0, *mask], mask))
        has_all_turns = replies in (trajectory["turns"], trajectory["turns"] + 1)
        found = {
            "ids": trajectory["tokens"],
            "starts": whole_numbers(trajectory["starts"]) or [0],
            "mask": [int(sampled) for sampled in trajectory["mask"]],
            "logprobs": rounded(trajectory["logprobs"], 5),
            "rewards": [x if is_number(x) else 0.0 for x in trajectory["rewards"]],
            "advantage": rounded(advantages(trajectory), 4),
            "score": number_or_none(trajectory["score"]),
            "error": str(trajectory["error"] or ""),
            "invalid_turns": invalid_turns(trajectory) if has_all_turns else [],
            "cut_turns": whole_numbers(trajectory["cut_turns"]) if has_all_turns else [],
            "scenes": self.replay.scenes(trajectory) if draws and has_all_turns else None,
            "has_all_turns": has_all_turns,
        }
        if has_entropies:
            found["entropies"] = rounded(entropies, 3)
        return found

    def add_pieces(self, ids: list[int], pieces: dict[int, str | list[int]]) -> None:
        """Add the texts of tokens to `pieces`. The page shows the number of a token that the
        tokenizer does not have."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.folder, self.config)
        for token in set(ids) - pieces.keys():
            known = 0 <= token < 2**31 and self.tokenizer.convert_ids_to_tokens(token) is not None
            if known:
                pieces[token] = piece(self.tokenizer, token)


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
