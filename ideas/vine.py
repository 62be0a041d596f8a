"""The advantage of each turn by playing on: every prefix of a trajectory is continued N times.

    V(prefix) = mean of the N returns from there on
    A_k = r_k + V(prefix_{k+1}) - V(prefix_k),    V = 0 after the last turn

VinePPO (arXiv 2410.01679), at the borders of turns. The environment is replayed to the
prefix, with the recorded replies. A prefix that several trajectories share is continued N times in
all. The continuations are not trained on. Their turns count: `continued_turns` in metrics.jsonl.

    python train.py --env babyai --algo vine --algo_args continuations=4
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rollout import Episode
from trajectory import Status, Trajectory, reply_spans

Prefix = tuple[str, tuple[int, ...]]  # an item, and the tokens before a reply


class Continuation(Episode):
    """An episode that begins with recorded turns: their replies are replayed, with the recorded
    ids, log-probs and entropies. An environment that answers otherwise has failed.

    after: for each item a recorded trajectory of it and a number of its turns. args: see `Episode`;
    the last one is the key of the random numbers, which are others than those of an episode.
    """

    def __init__(self, after: Sequence[tuple[Trajectory, int]], trajectory: Trajectory, *args):
        self.recorded, self.num_replayed = after[trajectory.group]
        super().__init__(trajectory, *args[:-1], [*args[-1], 1])

    def take(self) -> bool:
        """See `Conversation`."""
        goes_on, turns = super().take(), self.trajectory.turns
        if turns <= self.num_replayed and not self._is_as_recorded():
            return self.end(Status.ENV_ERROR, f"what follows turn {turns} is not as recorded")
        return goes_on

    def take_answer(self) -> bool:
        """See `Episode`."""
        if not super().take_answer():
            return False
        if self.trajectory.turns >= self.num_replayed:
            return True
        # Append the next recorded reply.
        own = slice(*reply_spans(self.recorded.mask)[self.trajectory.turns])
        self.reply = self.recorded.tokens[own]
        self.trajectory.append(self.reply, self.recorded.logprobs[own],
                               self.recorded.entropies[own])
        self.pending = self.pending + self.reply
        self.send_reply()
        return self.take_answer()

    def _is_as_recorded(self) -> bool:
        """Whether the tokens are those of the recorded trajectory up to its next reply or, if it
        has no further reply, to its end. From there on a longer horizon may bring more."""
        recorded, tokens = self.recorded, self.trajectory.tokens
        spans = reply_spans(recorded.mask)
        if self.trajectory.turns == len(spans):
            return tokens[: len(recorded.tokens)] == recorded.tokens
        start, _ = spans[self.trajectory.turns]
        return tokens == recorded.tokens[:start]


def prefixes(t: Trajectory) -> list[Prefix]:
    """What stands before the reply of each turn."""
    return [(t.item, tuple(t.tokens[:start])) for start, _ in reply_spans(t.mask)[: t.turns]]


def play_on(trajectories: Sequence[Trajectory], play: Callable[..., list[Trajectory]],
            samples: int) -> tuple[dict[Prefix, list[Trajectory]], int]:
    """Play on `samples` times before every reply -> the trajectories that begin with each prefix,
    without those whose environment failed, and the number of turns that were played. Trajectories
    that begin alike are played on together. play: see `update.Gathered`."""
    after = {prefix: (t, k) for t in trajectories for k, prefix in enumerate(prefixes(t))}
    keys, ends = list(after), list(after.values())
    found = {key: [] for key in keys}
    turns = 0
    for t in play([item for item, _ in keys], samples, partial(Continuation, ends)):
        turns += max(0, t.turns - ends[t.group][1])
        if t.status != Status.ENV_ERROR:
            found[keys[t.group]].append(t)
    return found, turns


def advantage(step, continuations: int = 4) -> Tensor:
    """step: see `update.Gathered`. continuations: N, of each prefix. A turn whose prefix could not
    be continued has advantage 0. -> [B, T]"""
    found, turns = play_on(step.trajectories, step.play, continuations)
    step.columns["continued_turns"] = turns
    values = {}
    for (item, tokens), played in found.items():
        if played:
            returns = [sum(t.rewards[len(tokens):]) for t in played]
            values[item, tokens] = sum(returns) / len(returns)

    advantages = torch.zeros(step.mask.shape)
    for b, t in enumerate(step.trajectories):
        known = [*map(values.get, prefixes(t)), 0.0]
        for k, (start, end) in enumerate(reply_spans(t.mask)[: t.turns]):
            if None not in known[k : k + 2]:
                reward = sum(t.rewards[start:end])
                advantages[b, start:end] = reward + known[k + 1] - known[k]
    return advantages * step.mask
