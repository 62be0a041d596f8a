"""One episode as tokens, and the files of JSON lines that hold episodes.

A leaf: it imports no other file of the project.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


class Status(str, Enum):
    """How a trajectory ended. A member is equal to its text, which is what JSON files hold."""

    RUNNING = "running"
    DONE = "done"  # the environment ended the episode
    HORIZON = "horizon"  # out of turns
    LENGTH = "length"  # out of tokens
    ENV_ERROR = "env_error"  # the environment failed

    __str__ = str.__str__


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
    # Numbers (from 1) of the turns whose reply reached max_tokens.
    cut_turns: list[int] = field(default_factory=list)
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
        if not turn.valid:
            self.invalid_turns.append(self.turns)
        self.score = turn.score
        self.success = turn.success
        self.progress.append(turn.progress)
        self.messages.append({"role": "assistant", "content": reply})
        if forgets:
            self.rewards = [0.0] * len(self.rewards)
            self.reward = 0.0
        reward = turn.reward
        if not turn.valid and not forgets:
            reward -= invalid_penalty
        self.reward += reward
        if self.rewards:  # a trajectory that was played as text has no tokens
            self.rewards[-1] = reward

    def to_json(self) -> dict:
        """All fields; log-probs are rounded to five decimals, entropies to three."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"logprobs": [round(x, 5) for x in self.logprobs],
                         "entropies": [round(x, 3) for x in self.entropies]}


def reply_spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of sampled tokens in a mask [T] -> (start, end) of each, `end` excluded.

    >>> reply_spans([False, True, True, False, True])
    [(1, 3), (4, 5)]
    """
    edges = np.diff(np.array([False, *mask, False]).astype(int))
    starts = (edges == 1).nonzero()[0]
    ends = (edges == -1).nonzero()[0]
    return list(zip(starts.tolist(), ends.tolist()))


def show(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a trajectory coloured by its mask: sampled (trained on) in green, the rest in grey."""
    green, grey, reset = "\033[1;32m", "\033[90m", "\033[0m"
    pairs = zip(trajectory.mask, trajectory.tokens)
    for sampled, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run])
        print((green if sampled else grey) + text + reset, end="")
    print(f"\n[{trajectory.status}: {trajectory.turns} turns, reward {trajectory.reward:g}]")


# ---- files ----


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content by `text`. If the process is killed, the file is either unchanged
    or complete."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    os.replace(partial, path)


def _lines(path: str | Path) -> Iterator[tuple[int, dict | None, str]]:
    """(number, object, what is wrong) of each line of a .jsonl file that is not empty."""
    # Not splitlines(), which also splits at characters that may stand inside a JSON string.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                value, wrong = json.loads(line.decode()), "no JSON object"
            except (ValueError, RecursionError) as e:
                value, wrong = None, str(e)
            yield number, value if isinstance(value, dict) else None, wrong


def read_objects(path: Path) -> tuple[list[dict], int]:
    """The JSON objects of a .jsonl file, one a line -> (objects, number of lines that hold none).

    A process that was killed may have left half a line. Empty lines are not counted.
    """
    rows = [row for _, row, _ in _lines(path)]
    found = [row for row in rows if row is not None]
    return found, len(rows) - len(found)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file with one trajectory a line."""
    write_atomically(path, "".join(json.dumps(t.to_json()) + "\n" for t in trajectories))


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, one a line; fields that it lacks have their defaults. Raises
    ValueError, which names the line, for one that is damaged, but not for half a line at the end,
    which a killed process leaves."""
    found = []
    last = Path(path).read_bytes().count(b"\n") + 1  # the number of a line without its end
    for number, row, wrong in _lines(path):
        if row is None and number == last > 1:
            break
        if row is None or not {"item", "env"} <= row.keys():
            wrong = wrong if row is None else "no item or env"
            raise ValueError(f"line {number} of {path} holds no trajectory: {wrong}")
        t = Trajectory(**{f.name: row[f.name] for f in fields(Trajectory) if f.name in row})
        t.starts = t.starts or [0] * bool(t.tokens)  # one segment, in older files
        t.logprobs = t.logprobs or [0.0] * len(t.tokens)  # nothing that is learnt needs them
        if wrong := flaw(vars(t)):
            raise ValueError(f"line {number} of {path}: {t.item} has {wrong}")
        found.append(t)
    return found


KINDS = {  # field -> what it is in a file
    list: ("tokens", "mask", "logprobs", "starts", "rewards", "entropies", "messages"),
    (int, float): ("reward", "score"), int: ("step", "group", "sample", "turns"),
    str: ("item", "env", "status"),
}


def flaw(row: dict) -> str:
    """What makes a trajectory's fields unusable; "" if nothing does."""
    for kind, names in KINDS.items():
        for name in names:
            if not isinstance(row[name], kind) or type(row[name]) is bool:
                return f"a {name} of another kind"
    tokens, mask, starts = row["tokens"], row["mask"], row["starts"]
    if {*map(type, tokens), *map(type, starts)} - {int}:
        return "tokens or starts that are not whole numbers"
    if {*map(type, row["logprobs"]), *map(type, row["entropies"])} - {int, float}:
        return "logprobs or entropies that are not numbers"
    if not len(tokens) == len(mask) == len(row["logprobs"]):
        return "tokens, mask and logprobs of different lengths"
    if tokens and (starts != sorted({0, *starts}) or starts[-1] >= len(tokens)):
        return "starts that do not cut its tokens into segments"
    if any(mask[start] for start in starts):
        return "a mask that is true at the first token of a segment"
    return ""
