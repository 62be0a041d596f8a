"""One episode as tokens, and the files of JSON lines that hold episodes.

A leaf: it imports no other file of the project.
"""

import codecs
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
from transformers import PreTrainedTokenizerBase


class Status(StrEnum):
    """How a trajectory ended. A member is equal to its text, which is what JSON files hold."""

    RUNNING = "running"
    DONE = "done"  # the environment ended the episode
    HORIZON = "horizon"  # out of turns
    LENGTH = "length"  # out of tokens
    ENV_ERROR = "env_error"  # the environment failed


# The type of a field, or of the elements of a list -> the types of its values in a JSON file.
JSON_TYPES = {str: {str, Status}, int: {int}, float: {int, float}, bool: {bool}, dict: {dict}}


@dataclass
class Trajectory:
    """One episode as tokens, and what happened in it. T: its number of tokens.

    The tokens are those of one segment or of several, side by side. A segment is a prompt, a reply,
    what extends them, a reply ...; the next one begins with a whole new prompt.

    `mask`, `logprobs`, `entropies` and `rewards` have one entry per token. Log-probs and entropies
    are in nats, of softmax(logits / temperature), and 0 where `mask` is False.
    """

    item: str  # "babyai_17"
    env: str
    step: int = 0  # training step it was sampled at
    group: int = 0  # trajectories of one item in one step share it
    sample: int = 0  # 0, 1, 2 ... within the group
    status: str = Status.RUNNING
    reward: float = 0.0  # sum of `rewards`: the return, penalties included
    score: float = 0.0  # the world's own measure, 0..1
    success: bool = False
    turns: int = 0
    valid_actions: int = 0
    # Numbers (from 1) of the turns whose action was not valid.
    invalid_turns: list[int] = field(default_factory=list)
    # Numbers (from 1) of the turns whose reply reached max_tokens or max_length.
    cut_turns: list[int] = field(default_factory=list)
    # Numbers (from 1) of the turns whose reply ends within a thought.
    unclosed_turns: list[int] = field(default_factory=list)
    error: str = ""  # the reason, if status is env_error
    # The text view, for people: of a new segment only the messages that were not shown before.
    messages: list[dict] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # [T], of all segments
    starts: list[int] = field(default_factory=list)  # where in `tokens` each segment begins: 0 ...
    mask: list[bool] = field(default_factory=list)  # [T], True: sampled by the policy
    logprobs: list[float] = field(default_factory=list)  # [T], of each sampled token
    # [T], of softmax(logits / temperature) where each token was sampled.
    entropies: list[float] = field(default_factory=list)
    # [T], a turn's reward stands on its last sampled token.
    rewards: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)  # [turns]: `Step.progress` after each turn
    states: list[str | None] = field(default_factory=list)  # `Env.state` before each reply, or []
    # Where a reply begins -> the ids of each reply that was allowed there; None: then any ids.
    choices: dict[int, list[list[int | None]]] = field(default_factory=dict)
    advantage: list[float] | float = 0.0  # set by the trainer: one number, or one a token

    def append(self, ids: list[int], logprobs: list[float] | None = None,
               entropies: list[float] | None = None) -> None:
        """Append prompt or observation tokens or, with `logprobs`, tokens that the policy sampled.
        The lists have one entry for each of `ids`."""
        zeros = [0.0] * len(ids)
        self.starts = self.starts or [0]
        self.tokens += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += zeros if logprobs is None else logprobs
        self.entropies += zeros if entropies is None else entropies
        self.rewards += zeros

    def begin_segment(self) -> None:
        """Let the tokens that are appended next begin a new segment."""
        self.starts.append(len(self.tokens))

    def segment(self) -> list[int]:
        """The tokens of the newest segment."""
        return self.tokens[self.starts[-1] :]

    def observed(self) -> list[bool]:
        """[T], True: appended after a reply of the same segment, and not sampled: what the
        environment said, and the template around it."""
        found, replied = [], False
        for place, sampled in enumerate(self.mask):
            replied = sampled or (replied and place not in self.starts)
            found.append(replied and not sampled)
        return found

    def longest_segment(self) -> int:
        """The number of tokens of the longest segment."""
        return max((end - start for start, end in self.spans()), default=0)

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each segment in `tokens`, `end` excluded."""
        return list(zip(self.starts, [*self.starts[1:], len(self.tokens)]))

    def record_turn(self, reply: str, turn: Any, forgets: bool = False,
                    invalid_penalty: float = 0.0) -> None:
        """Credit what a reply has earned to it.

        turn: an `envs.Step`. Its reward goes to the last token in `rewards`, which is the last
        token sampled in the turn. forgets: what was earned so far does not count.
        """
        self.turns += 1
        self.valid_actions += turn.valid
        self.score, self.success = turn.score, turn.success
        self.progress.append(turn.progress)
        self.messages.append({"role": "assistant", "content": reply})
        self.invalid_turns += [self.turns] * (not turn.valid)
        reward = turn.reward
        if forgets:  # the turn that loses it is to blame
            reward -= math.fsum(self.rewards) if self.rewards else self.reward
        elif not turn.valid:
            reward -= invalid_penalty
        self.reward += reward
        if self.rewards:  # a trajectory that was played as text has no tokens
            self.rewards[-1] = reward

    def allowed(self) -> list[list[int] | None]:
        """[T]: the ids among which each token was sampled; None: among all, or it was not."""
        found: list[list[int] | None] = [None] * len(self.tokens)
        for place, options in self.choices.items():
            while place < len(self.tokens) and self.mask[place] and (ids := next_ids(options)):
                found[place] = ids
                options = [o[1:] for o in options if o[:1] == [self.tokens[place]]]
                place += 1
        return found

    def decided(self) -> list[bool]:
        """[T]: `mask` without the tokens that were the only ones allowed."""
        return [sampled and (ids is None or len(ids) > 1)
                for sampled, ids in zip(self.mask, self.allowed())]

    def credited(self) -> list[float]:
        """[T]: `rewards`, each moved to the last decided token before it, if there is one."""
        rewards, last = list(self.rewards), None
        for place, is_decided in enumerate(self.decided()):
            last = place if is_decided else last
            if rewards[place] and last not in (place, None):
                rewards[last] += rewards[place]
                rewards[place] = 0.0
        return rewards

    def to_json(self) -> dict:
        """All fields; log-probs are rounded to five decimals, entropies to three."""
        return vars(self) | {"logprobs": [round(x, 5) for x in self.logprobs],
                             "entropies": [round(x, 3) for x in self.entropies]}

    @classmethod
    def from_json(cls, row: dict) -> "Trajectory":
        """The trajectory of a line of a file. Fields that it lacks have their defaults. Raises
        ValueError for fields that cannot be used."""
        if not {"item", "env"} <= row.keys():
            raise ValueError("it has no item or no env")
        t = cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})
        t.choices = {int(place): options for place, options in dict(t.choices).items()}
        count = len(t.tokens)
        t.starts = t.starts or [0] * bool(count)
        for name in ("logprobs", "entropies", "rewards"):
            setattr(t, name, getattr(t, name) or [0.0] * count)
        if {count} != {len(t.mask), len(t.logprobs), len(t.entropies), len(t.rewards)}:
            raise ValueError("tokens, mask and the like have different lengths")
        if count and (t.starts[0] or t.starts != sorted({*t.starts}) or t.starts[-1] >= count
                      or any(t.mask[start] for start in t.starts)):
            raise ValueError("starts do not cut the tokens into segments that begin with a prompt")
        return t

    def check(self) -> "Trajectory":
        """Raise ValueError if a field has a value that no episode gives it. -> itself"""
        for f in fields(self):
            value, kind = getattr(self, f.name), (get_args(f.type) or [f.type])[-1]  # or its list's
            values = value if isinstance(value, list) and kind != f.type else [value]
            if (get_origin(f.type) is list and value is not values
                    or kind in JSON_TYPES and set(map(type, values)) - JSON_TYPES[kind]
                    or kind is float and not all(abs(x) < 1e9 for x in values)):  # nan is not
                raise ValueError(f"{f.name} is {value!r:.80}")
        if (self.status not in [*Status] or not 0 <= self.score <= 1
                or not 0 <= self.valid_actions <= self.turns or any(
                    {type(m.get("role")), type(m.get("content"))} != {str} for m in self.messages)):
            raise ValueError("its status, score, turns, valid_actions or messages are impossible")
        return self


def next_ids(options: list[list[int | None]]) -> list[int] | None:
    """The ids that may come next; None: any. options: the rest of each reply that may be written,
    in ids, None in it: from there on any ids."""
    ids = {option[0] for option in options if option}
    return None if None in ids or not ids else sorted(ids)


def reply_spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of sampled tokens in a mask [T] -> (start, end) of each, `end` excluded.

    >>> reply_spans([False, True, True, False, True])
    [(1, 3), (4, 5)]
    """
    edges = np.diff(np.array([False, *mask, False]).astype(int))
    return list(zip((edges == 1).nonzero()[0].tolist(), (edges == -1).nonzero()[0].tolist()))


def show(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a trajectory coloured by its mask: sampled (trained on) in green, the rest in grey."""
    pairs = zip(trajectory.mask, trajectory.tokens)
    for sampled, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        colour = "\033[1;32m" if sampled else "\033[90m"
        print(colour + tokenizer.decode([token for _, token in run]) + "\033[0m", end="")
    print(f"\n[{trajectory.status}: {trajectory.turns} turns, reward {trajectory.reward:g}]")


# ---- files ----


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content by `text`. If the process is killed, the file is either unchanged
    or complete."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def to_text(value: object, indent: int | None = None) -> str:
    """A JSON text. In the place of a number that is not finite, which JSON lacks, it has null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        value = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(value, indent=indent)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], **marks: str) -> None:
    """Write a file with one trajectory a line. marks: more fields of every line."""
    write_atomically(path, "".join(to_text(t.to_json() | marks) + "\n" for t in trajectories))


def _lines(path: str | Path) -> Iterator[tuple[int, dict | str]]:
    """The lines of a .jsonl file that are not empty -> (number, its object or what is wrong)."""
    # Not splitlines(), which also splits at characters that may stand inside a JSON string.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as e:
                value = str(e)
            yield number, value if isinstance(value, (dict, str)) else "no JSON object"


def read_objects(path: str | Path) -> tuple[list[dict], int]:
    """The JSON objects of a .jsonl file, one a line -> (objects, number of lines that hold none).

    A process that was killed may have left half a line. Empty lines are not counted.
    """
    values = [value for _, value in _lines(path)]
    found = [value for value in values if isinstance(value, dict)]
    return found, len(values) - len(found)


def read_checked(row: dict) -> Trajectory:
    """The trajectory of a line, checked: to go on from it, or to learn it."""
    return Trajectory.from_json(row).check()


def read_trajectories(path: str | Path,
                      read: Callable[[dict], Trajectory] = read_checked) -> list[Trajectory]:
    """The trajectories of a file, one a line, or of a JSON list. Raises ValueError, which names the
    line or entry, for one that is damaged, but not for the last of several lines, of which a killed
    process may have written half. read: makes a trajectory of an entry."""
    content, kind = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), "line"
    if content.lstrip()[:1] == b"[":
        kind, lines = "entry", list(enumerate(json.loads(content), 1))
    else:
        lines = list(_lines(path))
        if len(lines) > 1 and isinstance(lines[-1][1], str):
            lines.pop()
    found = []
    for number, value in lines:
        try:
            if not isinstance(value, dict):
                raise ValueError(value)
            found.append(read(value))
        except (ValueError, TypeError) as e:
            raise ValueError(f"{kind} {number} of {path} holds no trajectory: {e}") from e
    return found
