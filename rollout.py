"""Multi-turn rollouts, token by token, with one KV cache kept across turns.

    feed what is new -> sample a token for each trajectory -> a reply that is complete goes to its environment, and on

There is no barrier: a fixed number of slots, each with a trajectory of its own pace; while an environment thinks the others
write on, and a trajectory that ends makes room for the next. A trajectory's tokens are appended once and never rebuilt,
`mask` is written in the moment a token is appended, and the recorded log-prob is that of the logits the token was drawn
from. Each trajectory draws from a generator of its own, keyed by (seed, step, item, sample).
"""

import concurrent.futures
import itertools
import math
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import agent
from engine import Padded, Ragged, common_prefix_length, sample
from envs import EnvPool, ItemError, outcome, split_item
from parallel import device_of, gathered
from rl import columns_count


@dataclass
class Trajectory:
    item: str  # "babyai_17"
    env: str
    step: int = 0  # training step it was sampled at
    group: int = 0  # trajectories of one item in one step share it
    sample: int = 0  # 0, 1, 2 ... within the group
    status: str = "running"  # -> done | horizon (out of turns) | length (out of tokens) | env_error
    reward: float = 0.0  # sum of `rewards`: the return, penalties included
    score: float = 0.0  # the world's own measure, 0..1
    success: bool = False
    turns: int = 0
    valid_actions: int = 0
    cut_replies: int = 0  # that reached max_tokens
    error: str = ""  # why, if status is env_error
    messages: list[dict] = field(default_factory=list)  # the text view, for people
    tokens: list[int] = field(default_factory=list)  # everything below is [T], aligned with it
    mask: list[bool] = field(default_factory=list)  # True: sampled by the policy
    logprobs: list[float] = field(default_factory=list)  # of sampled tokens as they were drawn; 0 elsewhere
    rewards: list[float] = field(default_factory=list)  # a turn's reward sits on the turn's last sampled token
    progress: list[float] = field(default_factory=list)  # [turns]: the world's measure of how far the task has come, after each
    advantage: list[float] | float = 0.0  # set by the trainer: one number, or one a token

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add prompt or observation tokens, or, with log-probs, tokens that the policy sampled."""
        self.tokens += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.rewards += [0.0] * len(ids)

    def to_json(self) -> dict:
        """All fields; log-probs to five digits."""
        return asdict(self) | {"logprobs": [round(x, 5) for x in self.logprobs]}


def show(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a trajectory coloured by its mask: green is what the policy sampled and is trained on, grey all the rest."""
    at = 0
    while at < len(trajectory.tokens):
        end = at
        while end < len(trajectory.mask) and trajectory.mask[end] == trajectory.mask[at]:
            end += 1
        colour = "\033[1;32m" if trajectory.mask[at] else "\033[90m"
        print(colour + tokenizer.decode(trajectory.tokens[at:end]) + "\033[0m", end="")
        at = end
    print(f"\n[{trajectory.status}: {trajectory.turns} turns, reward {trajectory.reward:g}]")


# ---- the loop ----


class Episode:
    """A trajectory while it is played: its environment, its random numbers, and the ids that the model has not seen."""

    def __init__(self, t: Trajectory, pool: EnvPool, how: SimpleNamespace):
        self.t, self.pool, self.how = t, pool, how
        self.horizon, self.max_tokens, self.max_length, self.penalty = (
            limit[t.env] if isinstance(limit, dict) else limit
            for limit in (how.horizon, how.max_tokens, how.max_length, how.invalid_penalty))
        draws = np.random.default_rng([how.seed, t.step, zlib.crc32(t.item.encode()), t.sample])
        self.uniforms = (u for _ in itertools.count() for u in draws.random(64).tolist())
        self.pending, self.reply, self.logprobs = [], [], []
        self.talk = agent.Dialogue(split_item(t.item)[1], self.horizon, how.action_format, how.plan, how.reflect)
        self.worker = pool.take(t.env)
        self._ask(self._reset)

    def _ask(self, function, *args, here=False):
        self.future, self.until = self.worker.call(function, *args, here=here), time.monotonic() + self.how.deadline

    def _reset(self, env):  # these two have all that is text, and run in the environment's thread (but for an instant world's step)
        first, observation = self.talk.begin(env)
        return first, observation, self.how.chat.start(first, observation)

    def _step(self, env, ids, closed):
        text = self.how.chat.tokenizer.decode(ids[:-1] if closed else ids, skip_special_tokens=True)
        step = self.talk.reply(env, text)
        return text, step, self.how.chat.turn(step.observation, closed)

    def at_once(self) -> bool:
        """Whether the answer is taken before the next forward pass; else after it: there is something to do meanwhile."""
        return self.how.on_cpu and self.worker.env.instant

    def ready(self) -> bool:
        return self.future.done() or time.monotonic() >= self.until

    def sampled(self, token: int, logprob: float) -> bool:
        """Takes a token that the policy sampled. True: the reply is complete, and its environment thinks."""
        t = self.t
        self.reply.append(token)
        self.logprobs.append(logprob)
        self.pending = [token]
        if not self.complete(token):
            return False
        closed = token == self.how.chat.end_id
        t.append(self.reply, self.logprobs)
        t.cut_replies += not closed and len(self.reply) >= self.max_tokens
        # Python in another thread would take turns with ours for the interpreter, and each turn costs more than such a step; a GPU works meanwhile
        self._ask(self._step, self.reply, closed, here=self.at_once() and not self.worker.env.remote)
        self.reply, self.logprobs = [], []
        return True

    def complete(self, token: int) -> bool:
        """Whether the reply ends with this token."""
        if (token == self.how.chat.end_id or len(self.reply) >= self.max_tokens
                or len(self.t.tokens) + len(self.reply) >= self.max_length):
            return True
        stop = self.worker.env.stop
        text = self.how.chat.tokenizer.decode(self.reply) if stop else ""
        return any(s in text for s in stop)

    def answer(self) -> bool:
        """Takes what the environment says, waiting for it until its deadline. False: the trajectory has ended."""
        t = self.t
        result, error = outcome(self.future, self.until, self.how.deadline)
        if error:
            if not t.messages and self.future.done() and type(self.future.exception()) is ValueError:  # not of its subclasses, such as a page that is no JSON
                raise ItemError(str(self.future.exception())) from self.future.exception()
            return self._end("env_error", error)
        if not t.messages:
            first, observation, new = result
            t.messages = [{"role": "user", "content": first}, {"role": "assistant", "content": "OK"},
                          {"role": "user", "content": observation}]
        else:
            text, step, new = result
            t.turns += 1
            t.valid_actions += step.valid
            t.score, t.success = step.score, step.success
            if self.talk.aside == "reflection on all":  # what the first attempt earned does not count beside the second
                t.rewards = [0.0] * len(t.rewards)
            else:
                t.rewards[-1] = step.reward - (0.0 if step.valid else self.penalty)
            t.progress.append(step.progress)
            t.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]
            if step.done:
                return self._end("done")
            if t.turns >= self.horizon:
                return self._end("horizon")
        if len(t.tokens) + len(new) >= self.max_length:  # no room for a single reply
            return self._end("length")
        t.append(new)
        self.pending += new
        return True

    def _end(self, status, error=""):
        self.t.status, self.t.error = status, error
        self.t.reward = math.fsum(self.t.rewards)  # exact: equal rewards must compare equal
        self.leave(broken=bool(error))
        return False

    def leave(self, broken: bool = True) -> None:
        """Gives the environment back; a broken one is not to be trusted any more, and a hung thread is left behind."""
        if broken:
            self.pool.drop(self.worker)
        else:
            self.pool.give_back(self.t.env, self.worker)


def make_engine(policy: PreTrainedModel, slots: int) -> Ragged | str:
    """-> `Ragged`, or "hf" for a model that it does not support: then a line says so."""
    if lacks := Ragged.lacks(policy):
        print(f"rollout: {lacks}: played on the model's own attention, all trajectories in step", file=sys.stderr)
        return "hf"
    return Ragged(policy, slots)


def rollout(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, envs: EnvPool, items: list[str], horizon: int | dict[str, int], *,
            samples: int = 1, seed: int = 0, step: int = 0, slots: int = 128, max_tokens: int | dict[str, int] = 512,
            max_length: int | dict[str, int] = 8192, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0,
            action_format: str = "react", invalid_penalty: float | dict[str, float] = 0.0, plan: bool = False, reflect: bool = False,
            deadline: float = 60.0, retries: int = 2, engine: str | Ragged = "ragged", arrival: bool = False,
            stats: dict[str, int] | None = None, progress: Callable[[Trajectory], object] | None = None) -> list[Trajectory]:
    """Play every item `samples` times, at most `horizon` turns each, `slots` trajectories at a time.

    policy: a causal LM; envs: an `EnvPool`; items: ids such as "babyai_17". Of several worlds each may have its own horizon,
    max_tokens, max_length and invalid_penalty: {"babyai": 4, "textcraft": 8}. A turn ends with the template's end-of-turn
    token, with one of the world's stop strings or after `max_tokens`. plan: the agent is asked for a plan first, reflect: what went
    wrong after an invalid action, and after a failed episode, which it may then try once more; such a reply is a turn like any other,
    and is asked for only while there is a turn left to act in. A trajectory ends when the world says so, at `horizon`
    turns, or when `max_length` tokens are full. An environment that fails or misses `deadline` seconds is played again up
    to `retries` times, then the trajectory has status "env_error". engine: "ragged"; a `Ragged` of this policy, to use its memory
    again; or "hf": all in step on the model's own attention. arrival: take environments' answers as they come, which repeats no
    bit; else at a fixed point of the decode order, waiting for them there. `stats` (a dict) receives "forwarded" (token positions
    computed, padding included), "steps" (forward passes), "busy" (slots that were fed, summed over the steps) and "room" (slots that could be: no more than
    trajectories that have not ended). `progress` is called with each trajectory that has ended.
    -> list[Trajectory], in the order of items, the samples of an item side by side. Raises ValueError for a bad item.
    """
    how = SimpleNamespace(chat=agent.Chat(tokenizer), horizon=horizon, max_tokens=max_tokens, max_length=max_length, seed=seed,
                          invalid_penalty=invalid_penalty, action_format=action_format, plan=plan, reflect=reflect, deadline=deadline,
                          on_cpu=device_of(policy).type == "cpu")
    policy.eval()
    order = [(group, k) for group in range(len(items)) for k in range(samples)]
    fresh = lambda group, k: Trajectory(items[group], split_item(items[group])[0], step, group, k)  # noqa: E731
    todo, tries, done, stats = deque(fresh(*key) for key in order), dict.fromkeys(order, 0), {}, {} if stats is None else stats
    alive = set()  # episodes that have not ended

    def begin():
        e = Episode(todo.popleft(), envs, how)
        alive.add(e)
        return e

    def ended(e):
        alive.remove(e)
        key = e.t.group, e.t.sample
        tries[key] += 1
        if e.t.status == "env_error" and tries[key] <= retries:
            todo.append(fresh(*key))
        else:
            done[key] = e.t
            if progress is not None:
                progress(e.t)

    def draw(logits, episodes):
        """-> a token and its log-prob for each of these episodes"""
        uniforms = torch.tensor([next(e.uniforms) for e in episodes], dtype=torch.float64).to(logits.device)
        tokens, logprobs = (x.tolist() for x in sample(logits, uniforms, temperature, top_p, top_k, min_p))
        if not math.isfinite(sum(logprobs)):
            raise FloatingPointError("the policy's logits are not finite")
        for name, n in (("steps", 1), ("busy", len(tokens)), ("room", min(room, len(order) - len(done)))):
            stats[name] = stats.get(name, 0) + n
        return zip(tokens, logprobs)

    if engine == "ragged":
        engine = make_engine(policy, min(slots, len(todo)))
    room = slots if engine == "hf" else engine.slots
    try:
        with gathered(policy):
            if engine == "hf":
                forwarded = _play_in_step(policy, todo, begin, ended, draw, 1 if columns_count(policy.config) else slots)
            else:
                engine.clear(max(max_length.values()) if isinstance(max_length, dict) else max_length)
                forwarded = _play(engine, todo, begin, ended, draw, arrival)
                engine.clear()
    finally:
        for e in alive:  # interrupted
            e.leave()
    stats["forwarded"] = stats.get("forwarded", 0) + forwarded
    return [done[key] for key in order]


def _play(engine, todo, begin, ended, draw, arrival, gain=16, most=8192):
    """The engine's loop; -> number of token positions computed. An answer is taken a step after the next (an instant
    world's: in the next), and waited for if need be (with `arrival`: when it is there), so that what is forwarded together never
    hangs on the clock.
    No more trajectories start in a step than bring `most` new ids; one waits for another that shares `gain` ids with it."""
    free, ahead, playing = list(range(engine.slots)), [], {}  # ahead: episodes that start next, their resets under way
    thinking = {}  # slot -> the step at which its environment's answer is taken
    with engine.attention():
        for now in itertools.count():
            if arrival:
                if playing.keys() == thinking.keys() and (playing or ahead) and not (free and any(e.pending for e in ahead)):
                    waiting = [playing[slot] for slot in thinking] + (ahead if free else [])
                    concurrent.futures.wait([e.future for e in waiting], max(0, min(e.until for e in waiting) - time.monotonic()),
                                            return_when=concurrent.futures.FIRST_COMPLETED)
                back = [slot for slot in thinking if playing[slot].ready()]
            else:
                first = now if playing.keys() != thinking.keys() else max(now, min(thinking.values(), default=now))
                back = [slot for slot, due in thinking.items() if due <= first]
            for slot in back:
                del thinking[slot]
                if not playing[slot].answer():
                    ended(playing.pop(slot))
                    free.append(slot)
            while todo and len(ahead) < len(free) + min(8, engine.slots // 4):
                ahead.append(begin())
            if not (playing or ahead):
                return engine.forwarded
            starting, new = [], 0
            for e in list(ahead):
                if not free or new >= most:
                    break
                if arrival and not e.ready():
                    continue
                if not e.pending and not e.answer():
                    ended(e)
                else:
                    source, n = engine.best_prefix(e.pending)
                    if any(common_prefix_length(e.pending, other, n + gain) for other in starting):
                        continue  # another's beginning is forwarded in this very step: worth waiting for
                    starting.append(e.pending)
                    slot = free.pop(0)
                    playing[slot], e.pending = e, engine.begin(slot, e.pending, source, n)
                    new += len(e.pending)
                ahead.remove(e)
            feed = {slot: e.pending for slot, e in playing.items() if slot not in thinking}
            if feed:
                logits = engine.forward(feed)
                for slot, (token, logprob) in zip(feed, draw(logits, [playing[slot] for slot in feed])):
                    if playing[slot].sampled(token, logprob):
                        thinking[slot] = now + 1 + (not playing[slot].at_once())


def _play_in_step(policy, todo, begin, ended, draw, slots):
    """The reference: `slots` trajectories take their turns together, and wait for the slowest of them."""
    forwarded = 0
    while todo:
        cache, rows = Padded(policy), []
        for e in [begin() for _ in range(min(slots, len(todo)))]:
            rows.append(e) if e.answer() else ended(e)
        while rows:
            logits, writing = (cache.forward if cache.forwarded else cache.start)([e.pending for e in rows]), list(rows)
            while True:
                places = [place for place, e in enumerate(rows) if e in writing]
                writing = [e for e, said in zip(writing, draw(logits[places], writing)) if not e.sampled(*said)]
                if not writing:
                    break
                logits = cache.forward([e.pending if e in writing else [] for e in rows])
            keep = []  # places in `rows` (= rows of the cache) that go on
            for place, e in enumerate(rows):
                keep.append(place) if e.answer() else ended(e)
            if keep and len(keep) < len(rows):
                cache.keep(keep)
            rows = [rows[place] for place in keep]
        forwarded += cache.forwarded
    return forwarded
