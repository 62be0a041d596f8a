"""Multi-turn rollouts, token by token, with one KV cache kept across turns.

    for each turn:  feed the new observation -> sample a reply -> step the environment -> append, and on

This is the plain reference: all trajectories take their turns in step. A trajectory's tokens are appended once and never
rebuilt, `mask` is written in the moment a token is appended, and the recorded log-prob is that of the logits the token
was drawn from. Each trajectory draws from a generator of its own, keyed by (seed, step, item, sample).
"""

import math
import os
import queue
import threading
import time
import zlib
from concurrent.futures import Future, TimeoutError
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

import agent
from envs import Env, EnvError, make_env, split_item


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
    error: str = ""  # why, if status is env_error
    messages: list[dict] = field(default_factory=list)  # the text view, for people
    tokens: list[int] = field(default_factory=list)  # everything below is [T], aligned with it
    mask: list[bool] = field(default_factory=list)  # True: sampled by the policy
    logprobs: list[float] = field(default_factory=list)  # of sampled tokens as they were drawn; 0 elsewhere
    rewards: list[float] = field(default_factory=list)  # a turn's reward sits on the turn's last sampled token
    advantage: list[float] | float = 0.0  # set by the trainer: one number, or one a token

    def append(self, ids, logprobs=None):
        """Add prompt or observation tokens, or, with log-probs, tokens that the policy sampled."""
        self.tokens += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.rewards += [0.0] * len(ids)

    def to_json(self) -> dict:
        return asdict(self) | {"logprobs": [round(x, 5) for x in self.logprobs]}


def show(trajectory, tokenizer):
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


# ---- environments: a thread each, so that all think at once and none can hang the rollout ----


class Worker:
    """An environment in a daemon thread. `call` returns a Future; a worker that misses its deadline is abandoned."""

    def __init__(self, make):
        self.inbox = queue.SimpleQueue()
        self.env: Env | None = None
        self.thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self.thread.start()

    def _run(self, make):
        while (job := self.inbox.get()) is not None:
            future, method, args = job
            try:
                if self.env is None:
                    self.env = make()
                future.set_result(getattr(self.env, method)(*args))
            except BaseException as e:  # handed to whoever waits on the future
                future.set_exception(e)
        if self.env is not None:
            self.env.close()

    def call(self, method, *args) -> Future:
        future = Future()
        self.inbox.put((future, method, args))
        return future


class EnvPool:
    """Environments by name, made when first needed and reused by `reset`. `with EnvPool(...) as pool:` closes all of them
    in the end: a server keeps an episode until it is told that it is over."""

    def __init__(self, urls=(), make=make_env):
        """urls: the servers, or world -> its servers; without any a world is played in this process."""
        self.make, self.urls, self.free, self.workers = make, urls, {}, []
        self.made = int(os.environ.get("RANK", 0))  # each process begins at another server

    def take(self, name) -> Worker:
        if self.free.get(name):
            return self.free[name].pop()
        first, self.made = self.made, self.made + 1
        self.workers = [w for w in self.workers if w.thread.is_alive()] + [Worker(lambda: self._make(name, first))]
        return self.workers[-1]

    def _make(self, name, first):
        """On the servers by turns; where one fails, the others get its share by turns."""
        urls = self.urls.get(name) if isinstance(self.urls, dict) else self.urls
        if not urls:
            return self.make(name)
        turn, own = divmod(first, len(urls))
        others = urls[:own] + urls[own + 1:]
        for url in [urls[own], *(others[(turn + i) % len(others)] for i in range(len(others)))]:
            try:
                return self.make(name, url=url)
            except EnvError as e:
                error = e
        raise error

    def give_back(self, name, worker):
        self.free.setdefault(name, []).append(worker)

    def close(self):
        """Close every environment, also one that a rollout left behind; a few seconds at most."""
        for worker in self.workers:
            worker.inbox.put(None)
        until = time.monotonic() + 5
        for worker in self.workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        self.free, self.workers = {}, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _outcome(future, until, deadline):
    """-> (result, "") or (None, what went wrong). Calls that began together share the moment `until`."""
    try:
        return future.result(timeout=max(0.0, until - time.monotonic())), ""
    except TimeoutError:
        return None, f"timeout: no answer within {deadline:g} s"
    except EnvError as e:
        return None, f"fault: {e}"
    except Exception as e:  # a crash inside a world is that episode's env_error, not the end of the run
        return None, f"crash: {type(e).__name__}: {e}"


# ---- sampling ----


def sample(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0):
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    logits [B, V], uniforms [B] float64 in [0, 1) -> tokens [B] long, logprobs [B] float32: log_softmax(logits / temperature) at
    the token, without truncation by top_p / top_k. temperature 0 takes the argmax (log-probs as at temperature 1).
    """
    logits = logits.float()
    logp = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)  # [B, V]
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        probs = logp.exp()
        if top_k:
            probs = probs.masked_fill(probs < probs.topk(min(top_k, probs.shape[-1]), dim=-1).values[:, -1:], 0.0)
        if top_p < 1.0:
            ordered, order = probs.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True)] = 0.0
            probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        cdf = probs.double().cumsum(-1)  # [B, V]; double, so that the last step of a long sum is not lost
        tokens = torch.searchsorted(cdf, uniforms.double()[:, None] * cdf[:, -1:], right=True).squeeze(1)
        tokens = tokens.clamp(max=probs.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(1)


class _Layer(DynamicLayer):
    """Appends in place to a buffer that doubles; DynamicLayer's torch.cat would copy all of it for every token."""

    buffer = None  # [keys and values: 2, B, heads, capacity, D]

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old, new = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if self.buffer is None or new > self.buffer.shape[3]:
            B, H, _, D = key_states.shape
            buffer = value_states.new_empty(2, B, H, new + new // 2 + 64, D)
            if old:
                buffer[0, :, :, :old], buffer[1, :, :, :old] = self.keys, self.values
            self.buffer = buffer
        self.buffer[0, :, :, old:new], self.buffer[1, :, :, old:new] = key_states, value_states
        self.keys, self.values = self.buffer[0, :, :, :new], self.buffer[1, :, :, :new]
        return self.keys, self.values

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.buffer = None


class _Cache:
    """The KV cache of the running rows. Each chunk of new tokens is padded on the left to one width; the 2-D `seen` mask
    over all columns keeps the padding out of the attention, and positions count real tokens only."""

    def __init__(self, policy):
        self.policy, self.kv, self.device = policy, Cache(layer_class_to_replicate=_Layer), policy.device
        self.seen, self.length, self.forwarded = None, None, 0  # seen [B, C] bool, length [B] long

    def start(self, chunks):
        """The first forward: rows that begin alike (the samples of one item) are computed once and copied."""
        place = {}
        for chunk in chunks:
            place.setdefault(tuple(chunk), len(place))
        logits = self.forward([list(chunk) for chunk in place])
        if not logits.isfinite().all():
            raise FloatingPointError("the policy's logits are not finite")
        rows = [place[tuple(chunk)] for chunk in chunks]
        self.keep(rows)
        return logits[rows]

    def forward(self, chunks):
        """chunks: B lists of ids, [] for a row that waits -> logits [B, V] after each row's last id."""
        B, W = len(chunks), max(map(len, chunks))
        ids, real = torch.zeros(B, W, dtype=torch.long), torch.zeros(B, W, dtype=torch.bool)
        for row, chunk in enumerate(chunks):
            if chunk:
                ids[row, W - len(chunk):], real[row, W - len(chunk):] = torch.tensor(chunk), True
        ids, real = ids.to(self.device), real.to(self.device)
        if self.seen is None:
            self.seen = real[:, :0]
            self.length = torch.zeros(B, dtype=torch.long, device=self.device)
        self.seen = torch.cat([self.seen, real], dim=1)  # [B, C + W]
        positions = (self.length[:, None] + real.cumsum(1) - 1).clamp(min=0)  # [B, W]
        self.length = self.length + real.sum(1)
        self.forwarded += B * W
        out = self.policy(input_ids=ids, attention_mask=self.seen.long(), position_ids=positions,
                          past_key_values=self.kv, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def keep(self, rows):
        rows = torch.tensor(rows, device=self.device)
        self.kv.batch_select_indices(rows)
        self.seen, self.length = self.seen[rows], self.length[rows]


# ---- the loop ----


@torch.no_grad()
def rollout(policy, tokenizer, envs, items, horizon, *, samples=1, seed=0, step=0, slots=128, max_tokens=512,
            max_length=8192, temperature=1.0, top_p=1.0, top_k=0, action_format="react", invalid_penalty=0.0,
            deadline=60.0, retries=2, stats=None, progress=None):
    """Play every item `samples` times, at most `horizon` turns each.

    policy: a causal LM; envs: an `EnvPool`; items: ids such as "babyai_17". Of several worlds each may have its own horizon,
    max_tokens, max_length and invalid_penalty: {"babyai": 4, "textcraft": 8}. A turn ends with the template's end-of-turn
    token or after `max_tokens`; a trajectory ends when the world says so, at `horizon` turns, or when `max_length` tokens
    are full. An environment that fails or misses `deadline` seconds is played again up to `retries` times, then the
    trajectory has status "env_error". `stats` (a dict) receives "forwarded": computed token positions, padding included.
    -> list[Trajectory], in the order of items, the samples of an item side by side. Raises ValueError for a bad item.
    """
    chat = agent.Chat(tokenizer)
    policy.eval()
    todo = [Trajectory(item, split_item(item)[0], step, group, k)
            for group, item in enumerate(items) for k in range(samples)]
    done, play = {}, dict(
        horizon=horizon, seed=seed, max_tokens=max_tokens, max_length=max_length, temperature=temperature, top_p=top_p,
        top_k=top_k, action_format=action_format, invalid_penalty=invalid_penalty, deadline=deadline, progress=progress)
    order = [(t.group, t.sample) for t in todo]
    for attempt in range(retries + 1):
        for i in range(0, len(todo), slots):
            forwarded = _play(policy, chat, envs, todo[i:i + slots], **play)
            if stats is not None:
                stats["forwarded"] = stats.get("forwarded", 0) + forwarded
        done.update({(t.group, t.sample): t for t in todo})
        todo = [Trajectory(t.item, t.env, step, t.group, t.sample) for t in todo if t.status == "env_error"]
        if not todo:
            break
    return [done[key] for key in order]


def _own(limit, t):
    """A limit for trajectory t: one number for all, or one for each world."""
    return limit[t.env] if isinstance(limit, dict) else limit


def _play(policy, chat, envs, trajectories, *, horizon, seed, max_tokens, max_length, temperature, top_p, top_k,
          action_format, invalid_penalty, deadline, progress):
    """Play these trajectories to their ends, turn by turn; -> number of token positions computed."""
    workers = [envs.take(t.env) for t in trajectories]
    draws = [np.random.default_rng([seed, t.step, zlib.crc32(t.item.encode()), t.sample]) for t in trajectories]
    pending = [[] for _ in trajectories]  # ids not yet fed to the model
    cache = _Cache(policy)

    def end(i, status, error=""):
        trajectories[i].status, trajectories[i].error = status, error
        trajectories[i].reward = math.fsum(trajectories[i].rewards)  # exact: equal rewards must compare equal
        if error:  # not to be trusted any more; a hung thread is left behind
            workers[i].inbox.put(None)
        else:
            envs.give_back(trajectories[i].env, workers[i])
        if progress is not None:
            progress.update(1)

    rows = []  # indices of the running trajectories, in the order of the cache's rows
    resets = [w.call("reset", split_item(t.item)[1]) for w, t in zip(workers, trajectories)]
    until = time.monotonic() + deadline
    for i, (t, future) in enumerate(zip(trajectories, resets)):
        observation, error = _outcome(future, until, deadline)
        if error and future.done() and isinstance(future.exception(), ValueError):
            raise future.exception()  # an item that does not exist is the caller's mistake
        if error:
            end(i, "env_error", error)
            continue
        first = agent.instructions(workers[i].env.prompt, action_format)
        pending[i] = chat.start(first, observation)
        t.messages = [{"role": "user", "content": first}, {"role": "assistant", "content": "OK"},
                      {"role": "user", "content": observation}]
        if len(pending[i]) >= _own(max_length, t):
            end(i, "length")  # no room for a single reply
            continue
        t.append(pending[i])
        rows.append(i)

    while rows:
        replies = _sample_replies(cache, chat, rows, trajectories, pending, draws,
                                  max_tokens, max_length, temperature, top_p, top_k)
        steps = {}
        for i in rows:
            text = chat.tokenizer.decode(replies[i], skip_special_tokens=True)
            trajectories[i].messages.append({"role": "assistant", "content": text})
            action = text if workers[i].env.whole_reply else agent.parse(text, action_format)
            steps[i] = workers[i].call("step", action)
        until = time.monotonic() + deadline
        keep = []  # places in `rows` (= rows of the cache) that go on
        for place, i in enumerate(rows):
            t = trajectories[i]
            result, error = _outcome(steps[i], until, deadline)
            if error:
                end(i, "env_error", error)
                continue
            t.turns += 1
            t.valid_actions += result.valid
            t.score, t.success = result.score, result.success
            t.rewards[-1] = result.reward - (0.0 if result.valid else _own(invalid_penalty, t))
            t.messages.append({"role": "user", "content": result.observation})
            new = chat.turn(result.observation, closed=t.tokens[-1] == chat.end_id)
            if result.done:
                end(i, "done")
            elif t.turns >= _own(horizon, t):
                end(i, "horizon")
            elif len(t.tokens) + len(new) >= _own(max_length, t):
                end(i, "length")
            else:
                t.append(new)
                pending[i] += new
                keep.append(place)
        if keep and len(keep) < len(rows):
            cache.keep(keep)
        rows = [rows[place] for place in keep]
    return cache.forwarded


def _sample_replies(cache, chat, rows, trajectories, pending, draws, max_tokens, max_length, temperature, top_p, top_k):
    """Feed what is pending and sample one reply for each running row; -> {index: reply ids without the end-of-turn}.
    The last sampled token of each reply stays pending: it is fed together with what follows it."""
    logits = (cache.forward if cache.forwarded else cache.start)([pending[i] for i in rows])
    replies, open_rows = {i: [] for i in rows}, set(rows)
    while True:
        uniforms = torch.tensor([draws[i].random() if i in open_rows else 0.0 for i in rows],
                                dtype=torch.float64, device=logits.device)
        tokens, logprobs = sample(logits, uniforms, temperature, top_p, top_k)
        for i, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
            if i not in open_rows:
                continue
            t = trajectories[i]
            t.append([token], [logprob])
            pending[i] = [token]
            if token != chat.end_id:
                replies[i].append(token)
            if token == chat.end_id or len(replies[i]) >= _own(max_tokens, t) or len(t.tokens) >= _own(max_length, t):
                open_rows.discard(i)
        if not open_rows:
            return replies
        logits = cache.forward([pending[i] if i in open_rows else [] for i in rows])
