"""Episodes that begin with recorded turns: a trajectory is cut before one of its replies, its
environment is replayed to there, and the policy plays on.

    rollout(..., [t.item for t, _ in after], episode_class=partial(Continuation, after))
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from envs import UserError
from rollout import Episode
from trajectory import Status, Trajectory, reply_spans
from update import Gathered

Prefix = tuple[str, tuple[int, ...]]  # an item, and the tokens before a reply


class Continuation(Episode):
    """An episode that begins with recorded turns: their replies are replayed, with the recorded
    ids, log-probs and entropies. An environment that answers otherwise has failed.

    after: for each item a recorded trajectory of it and a number of its turns. args: see `Episode`;
    the last one is the key of the random numbers, which are others than those of an episode.
    """

    def __init__(self, after: Sequence[tuple[Trajectory, int]], trajectory: Trajectory,
                 *args: Any):
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
            self.begins |= self.trajectory.turns == self.num_replayed  # its tokens are in no cache
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


def play_on(step: Gathered, after: Sequence[tuple[Trajectory, int]],
            samples: int) -> list[list[Trajectory]]:
    """Play on `samples` times after so many turns of each recorded trajectory -> for each of them
    the trajectories whose environment did not fail."""
    if step.rewards is not step.batch["rewards"]:
        raise UserError("--kl_in reward does not reach the turns that are played on: use loss")
    found: list[list[Trajectory]] = [[] for _ in after]
    turns, played = 0, len(after) * samples
    for t in step.play([t.item for t, _ in after], samples, partial(Continuation, after)):
        turns += max(0, t.turns - after[t.group][1])
        if t.status != Status.ENV_ERROR:
            found[t.group].append(t)
    failed = played - sum(map(len, found))
    step.columns |= {"continued_turns": turns, "continued_env_error": failed / max(1, played)}
    return found


def continuations_of(step: Gathered, samples: int) -> dict[Prefix, list[Trajectory]]:
    """Play on before every reply -> the trajectories that begin with each prefix. Trajectories that
    begin alike are played on together."""
    after = {prefix: (t, k) for t in step.trajectories for k, prefix in enumerate(prefixes(t))}
    return dict(zip(after, play_on(step, list(after.values()), samples)))
