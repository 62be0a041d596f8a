"""A run's files as the page needs them: rows of the table, and trajectories token by token.

Damaged data is left out and counted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import compress
from pathlib import Path
from statistics import fmean
from types import UnionType
from typing import Any, get_args, get_origin

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from checkpoint import named, step_in
from metrics import is_number
from page.curves import all_columns, horizon_changes
from page.replay import Replay
from rl import location, model_path
from trajectory import Trajectory, read_objects, reply_spans
from worlds import goal_line

CURVES = ("success", "score", "reward", "turns", "entropy", "kl", "kl_behaviour",
          "grad_norm", "valid_actions", "zero_gradient_groups", "tokens_per_second")
SFT_CURVES = ("loss", "held_out_loss", "grad_norm", "lr", "tokens_per_second")
LAST_REPLY = 100  # characters of the last reply in the table
COPIED = ("step", "env", "item", "group", "sample", "status", "turns")
COLUMNS = (*COPIED, "category", "reward", "success", "tokens", "invalid", "invalid_action",
           "invalid_count", "advantage", "invalid_advantage", "logprob", "goal", "colour",
           "last_reply")
COLOURS = re.compile(r"\b(red|green|blue|purple|yellow|gr[ea]y|orange|pink|black|white|brown)\b")

# ---- the files of a run ----


def read_config(run: Path) -> dict:
    """The run's flags. Raises ValueError if the folder holds no run or the file is damaged."""
    if not (run / "config.json").exists():
        raise ValueError(f"{run} has no config.json; give the folder of a run, runs/NAME")
    try:
        config = json.loads((run / "config.json").read_text("utf-8"))
        return config | {"model": str(config["model"])}
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{run}/config.json is damaged: {type(e).__name__}: {e}") from e


def read_metrics(run: Path) -> tuple[list[dict], list[Path], int]:
    """-> the run's rows of metrics, the trajectory files of the same steps, and how many rows are
    left out. Raises ValueError if all of them are damaged."""
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    files = [file for file in files if step_in(file) >= 0]
    if not files or not (run / "metrics.jsonl").exists():
        return [], [], 0
    rows, damaged = read_objects(run / "metrics.jsonl")
    if damaged and not rows:
        raise ValueError(f"{run}/metrics.jsonl is damaged: none of its lines is a JSON object")
    # The files of complete steps: those up to the last row (some rows may have been deleted by
    # hand), and at least as many as there are rows, because a step's row, which may be damaged, is
    # written last.
    last = max((row["step"] for row in rows if is_number(row.get("step"))), default=-1)
    up_to_last = sum(step_in(file) <= last for file in files)
    return rows, files[:max(up_to_last, len(rows) + damaged)], damaged


def read_trajectory(row: dict, file: Path) -> Trajectory:
    """The trajectory of a line, with the step of its file: a supervised run learns from
    trajectories that were played at other steps. Raises ValueError if it cannot be shown."""
    for field in fields(Trajectory):
        if field.name in row and not is_of_kind(row[field.name], field.type):
            raise ValueError(f"{field.name} is of another kind")
    t = Trajectory.from_json(row)
    if not isinstance(t.advantage, list):  # some algorithms give one number to all sampled tokens
        t.advantage = [t.advantage * sampled for sampled in t.mask]
    if len(t.advantage) != len(t.tokens):
        raise ValueError("tokens and advantage have different lengths")
    t.step = step_in(file)
    return t


def is_of_kind(value: object, kind: Any) -> bool:
    """Whether a value that was read from JSON is of a field's kind.

    >>> is_of_kind([0, 1.5], list[float]), is_of_kind([0, 1.5], list[int] | str)
    (True, False)
    """
    if isinstance(kind, UnionType):
        return any(is_of_kind(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        allowed = {float: {float, int}, bool: {bool, int}}.get(inner, {inner, *get_args(inner)})
        return isinstance(value, list) and set(map(type, value)) <= allowed
    kind = get_origin(kind) or kind
    return isinstance(value, (int, float) if kind in (float, bool) else kind)


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


def rounded(values: list, digits: int) -> list[float | None]:
    """The values, rounded; None for those that are not finite, for which JSON has no number."""
    return [round(x, digits) if is_number(x) else None for x in values]


def curves_of(rows: list[dict], left_out: Counter) -> dict[str, list[float | None]]:
    """Name of a curve -> its value in each row, None where there is no finite number.

    `left_out` counts these values, except those of held-out items, which not every row has.
    """
    columns = all_columns(rows)
    names = CURVES if "success" in columns else SFT_CURVES
    curves = [key for key in names if key in columns]
    curves += [key for key in columns if key.startswith(("success/", "eval/success"))]
    metrics = {key: [number_or_none(row.get(key)) for row in rows] for key in curves}
    for key, values in metrics.items():
        if not key.startswith(("eval/", "held_out")):
            left_out[f"values of {key} that are missing or not finite"] += values.count(None)
    return {key: values for key, values in metrics.items() if set(values) != {None}}


# ---- trajectories ----


def mean_of(values: list) -> float | None:
    """The mean; None of no values, or if one is not finite."""
    return round(fmean(values), 4) if values and all(map(is_number, values)) else None


def first_observation(messages: list[dict]) -> str:
    """What the agent was shown after the instructions; "" if there is no such message."""
    return str(messages[2].get("content")).strip() if len(messages) > 2 else ""


def goal_of(observation: str) -> str:
    """What stands after the colon in the line of an observation that names its goal, else the line.

    >>> goal_of("Your goal: go to the red ball\\nA wall."), goal_of("Your task is to boil it.")
    ('go to the red ball', 'Your task is to boil it.')
    """
    line = goal_line(observation)
    return (line.partition(":")[2].strip() or line)[:LAST_REPLY]


def compare_colours(goal: str, actions: Iterable[str]) -> str:
    """Whether the goal names the colours of the last action that names one: "right" or "wrong"; ""
    if the goal or all actions name none.

    >>> compare_colours("go to the red ball", ["go to blue key 1", "turn left"])
    'wrong'
    """
    wanted = {*COLOURS.findall(goal)}
    named = ({*COLOURS.findall(action)} for action in reversed([*actions]))
    last = next(filter(None, named), set()) if wanted else set()
    return "" if not last else "right" if last <= wanted else "wrong"


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
        self.damaged_rows = 0  # of the metrics
        self.unread: list[Path] = []  # files of complete steps whose trajectories are not in `rows`
        self.read: list[Path] = []
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def find_files(self) -> None:
        """Read the metrics, and note new files. Raises ValueError as `read_metrics`."""
        self.metrics, files, self.damaged_rows = read_metrics(self.folder)
        self.unread = files[len(self.read):]

    def read_file(self, file: Path) -> list[Trajectory]:
        """The trajectories of a file that can be shown; their rows are added to `rows`."""
        lines, damaged = read_objects(file)
        self.left_out["lines of trajectories that are not JSON objects"] += damaged
        self.left_out["trajectory files that are empty"] += not lines and not damaged
        shown = []
        for line in lines:
            try:
                shown.append(read_trajectory(line, file))
            except ValueError as e:
                self.left_out[f"trajectories ({e})"] += 1
                continue
            self.rows.append(self._row(shown[-1]))
        self.read.append(file)
        return shown

    def _row(self, t: Trajectory) -> dict:
        numbers = [t.reward, *t.logprobs, *t.rewards, *t.advantage]
        self.left_out["numbers of trajectories that are not finite"] += (
            len(numbers) - sum(map(is_number, numbers)))
        replies = [str(m.get("content")) for m in t.messages[3:] if m.get("role") == "assistant"]
        spans, chosen = reply_spans(t.mask), t.decided()
        others = len(replies) - len(spans)  # replies that the policy did not give, as an expert's
        actions = [self.replay.action(t.env, reply) for reply in replies if not others]
        turns = [mean_of([*compress(t.advantage[i:j], chosen[i:j])]) for i, j in spans[:t.turns]]
        invalid = [turn for turn in t.invalid_turns if 0 < turn <= len(replies)]
        shown = [str(m.get("content")) for m in t.messages[2:] if m.get("role") == "user"]
        goal = goal_of(next(filter(goal_line, shown[max(0, others)::-1]), ""))
        return {name: getattr(t, name) for name in COPIED} | {
            "category": self.replay.category(t.item),
            "reward": number_or_none(t.reward),
            "success": t.success,
            "tokens": len(t.tokens),
            "invalid": min(t.invalid_turns, default=None),
            "invalid_action": (actions[min(invalid) - 1] or "(no action)"
                               if actions and invalid else ""),
            "invalid_count": len(invalid),
            "advantage": mean_of([x for x in turns if x is not None]),
            "invalid_advantage": (
                mean_of([turns[k - 1] for k in invalid]) if len(turns) == t.turns else None),
            "logprob": mean_of([*compress(t.logprobs, chosen)] if any(t.logprobs) else []),
            "goal": goal,
            "colour": compare_colours(goal, actions),
            "last_reply": " ".join(replies[-1].split())[-LAST_REPLY:] if replies else "",
        }

    def about(self) -> dict:
        """What the page says about the run: its name, its flags in a line, its curves."""
        left_out = Counter({"lines of metrics.jsonl that are not JSON objects": self.damaged_rows})
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

    def tokens_of(self, t: Trajectory) -> dict:
        """A trajectory as the page shows it, with the states that its world can draw."""
        # Replies that are not learnt (sft.py's random actions) are not told from the environment's
        # text. The turns of such a trajectory cannot be numbered.
        replies = sum(bool(b) and not a for a, b in zip([0, *t.mask], t.mask))
        has_all_turns = replies in (t.turns, t.turns + 1)
        found = {
            "ids": t.tokens,
            "first": first_observation(t.messages)[:80],  # where the instructions end
            "starts": t.starts or [0],
            "mask": [int(sampled) for sampled in t.mask],
            "logprobs": rounded(t.logprobs, 5),
            "rewards": [x if is_number(x) else 0.0 for x in t.rewards],
            "advantage": rounded(t.advantage, 4),
            "score": number_or_none(t.score),
            "error": t.error,
            "invalid_turns": t.invalid_turns if has_all_turns else [],
            "cut_turns": t.cut_turns if has_all_turns else [],
            "scenes": self.replay.scenes(t) if has_all_turns else None,
            "has_all_turns": has_all_turns,
        }
        if t.choices:  # where a reply begins -> the ids of each that was allowed; None: then any
            found["choices"] = t.choices
        return found | ({"entropies": rounded(t.entropies, 3)} if any(t.entropies) else {})

    def add_pieces(self, ids: Iterable[int], pieces: dict[int, str | list[int]]) -> None:
        """Add the texts of tokens to `pieces`. The page shows the number of a token that the
        tokenizer does not have."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.folder, self.config)
        for token in set(ids) - pieces.keys():
            if 0 <= token < 2**31 and self.tokenizer.convert_ids_to_tokens(token) is not None:
                pieces[token] = piece(self.tokenizer, token)


def shown_ids(t: Trajectory) -> set[int]:
    """The ids of a trajectory's tokens, and of the replies that were allowed."""
    return {*t.tokens, *(i for options in t.choices.values() for ids in options for i in ids
                         if i is not None)}


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
