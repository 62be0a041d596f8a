"""Play on a model behind any OpenAI-compatible server: the same items, horizon, prompts and worlds, text instead of tokens.

    OPENAI_API_KEY=... python eval.py --env textcraft --model openai:gpt-4o --base_url https://api.openai.com/v1
    python eval.py --env textcraft --model openai:Qwen/Qwen2.5-7B-Instruct --base_url http://localhost:8000/v1     # vllm serve, and the like

What such a server does not give, token ids and log-probs under our own distribution, an evaluation does not need. The key is
read from the environment and goes nowhere but into the request's header.
"""

import math
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import requests

import agent
from envs import split_item
from pool import outcome
from rollout import EnvPool, Trajectory


REFUSED = "the model's server refused: "  # such a trajectory's error


class ModelError(RuntimeError):
    """The model's server failed: nothing is known about the model, so the evaluation ends. `played`: the trajectories that were complete."""


class Refused(RuntimeError):
    """The server does not go on with this conversation (a content filter, say)."""


class TooLong(Refused):
    """The server takes no conversation of this length."""


class Model:
    """A model's name on a server, and how to sample from it. `base_url`: http://host:port/v1; `timeout` in seconds.

    model(messages) -> (reply, whether it was cut at max_tokens, tokens of the conversation or 0 where the server does not say).
    A server that is busy (429) or fails (5xx) is asked again after a while, not before the time in Retry-After; ModelError after
    `tries` failures (two minutes), or once the Event `stop` is set. Refused or TooLong where it turns down a conversation of several turns."""

    def __init__(self, name: str, base_url: str, temperature: float = 1.0, top_p: float = 1.0, max_tokens: int = 512, timeout: float = 300.0,
                 tries: int = 8):
        self.url, self.timeout, self.tries = base_url.rstrip("/") + "/chat/completions", timeout, tries
        self.body = {"model": name, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("OPENAI_API_KEY holds a character that no key has")
        self.headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.unknown = set()  # parameters that this server has turned down

    def __call__(self, messages: list[dict[str, str]], seed: int = 0, stop: threading.Event | None = None) -> tuple[str, bool, int]:
        attempt, stop = 0, stop or threading.Event()
        while not stop.is_set():
            attempt, status, wait = attempt + 1, 0, 0.0
            body = self.body | {"messages": messages, "seed": seed}
            for name in self.unknown:
                value = body.pop(name)
                body |= {"max_completion_tokens": value} if name == "max_tokens" else {}
            try:
                response = requests.post(self.url, json=body, headers=self.headers, timeout=(10, self.timeout))
                status, after, said = response.status_code, response.headers.get("Retry-After", ""), self._without_key(response.text)
                if status == 200:
                    reply = response.json()
                    choice = reply["choices"][0]
                    text = choice["message"].get("content") or ""
                    if not isinstance(text, str):
                        raise TypeError("the content is no text")
                    return (text, choice.get("finish_reason") == "length",
                            int((reply.get("usage") or {}).get("total_tokens") or 0))
                why, wait = f"status {status} {said[:200]}", float(after) if after.isdecimal() else 0.0
            except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as e:
                why = f"{type(e).__name__}: {self._without_key(str(e))[:200]}"
            if status in (400, 413, 422) and len(messages) > 3:
                raise (TooLong if status == 413 or re.search("context.(length|window|size)|too long|tokens", said, re.I) else Refused)(why)
            # a first request: newer models of OpenAI's call max_tokens max_completion_tokens, other servers know no seed
            refused = {k for k in ("max_tokens", "seed") if k in body and k in said} if status in (400, 422) else set()
            if refused and re.search("support|permit|forbid|extra|un(known|recogni)", said, re.I):
                self.unknown, attempt = self.unknown | refused, attempt - 1
                continue
            if 400 <= status < 500 and status not in (408, 429) or attempt == self.tries:
                raise ModelError(f"{self.url}: {why}")
            stop.wait(min(wait, 300.0) + min(60.0, 0.5 * 2 ** attempt) * random.uniform(0.5, 1.5))
        raise ModelError("the evaluation has ended")

    def _without_key(self, text):  # servers and libraries say what they were sent
        return text.replace(self.key, "***") if self.key else text


def play(model: Model, pool: EnvPool, items: list[str], horizon: int, samples: int = 1, seed: int = 0, slots: int = 16, max_length: float = math.inf,
         action_format: str = "react", plan: bool = False, reflect: bool = False, deadline: float = 60.0, retries: int = 2,
         progress: Callable[[Trajectory], None] | None = None) -> list[Trajectory]:
    """As `rollout.rollout`, with a `Model`: every item `samples` times, `slots` at once, in the order of items. Trajectories have
    messages, but no tokens; status env_error, too, for a conversation that the server refuses. Raises ModelError if the model's server fails, ValueError for an item that does not exist."""
    how, stop, failed, played = dict(action_format=action_format, plan=plan, reflect=reflect), threading.Event(), [], []

    def one(group, sample):
        try:
            for _ in range(retries + 1):
                t = Trajectory(items[group], split_item(items[group])[0], group=group, sample=sample)
                _episode(t, model, pool, horizon, max_length, deadline, seed, how, stop)
                if t.status != "env_error" or t.error.startswith(REFUSED):
                    break
        except BaseException as e:  # told at once: whoever waits for the episodes does so in their order
            failed.append(e)
            stop.set()
            raise
        played.append(t)
        if progress is not None:
            progress(t)
        return t

    executor = ThreadPoolExecutor(slots)
    try:
        futures = [executor.submit(one, group, sample) for group in range(len(items)) for sample in range(samples)]
        return [future.result() for future in futures]
    except BaseException as e:
        first = failed[0] if failed else e
        stop.set()  # episodes under way end with their next request: the server may cost money
        executor.shutdown(cancel_futures=True)
        first.played = played
        raise first from None
    finally:
        executor.shutdown()


def _episode(t, model, pool, horizon, max_length, deadline, seed, how, stop):
    worker, talk = pool.take(t.env), agent.Dialogue(split_item(t.item)[1], horizon, **how)

    def ask(function, *args):
        future = worker.call(function, *args)
        result, error = outcome(future, time.monotonic() + deadline, deadline)
        if error and future.done() and not t.messages and isinstance(future.exception(), ValueError):
            raise future.exception()
        t.error = error
        return result

    first, t.status = ask(talk.begin), ""
    if not t.error:
        t.messages = [{"role": "user", "content": first[0].strip()}, {"role": "assistant", "content": "OK"},
                      {"role": "user", "content": first[1].strip()}]
    while not (t.status or t.error):
        try:  # a seed of its own for each turn: servers draw the same random numbers for the same seed
            text, cut, tokens = model(t.messages, zlib.crc32(f"{seed} {t.item} {t.sample} {t.turns}".encode()) >> 1, stop)
        except TooLong:
            t.status = "length"
            break
        except Refused as e:  # nothing about the model: left out of the statistics, its share is in the result
            t.error = f"{REFUSED}{e}"
            break
        for end in worker.env.stop:  # a server's own stop strings would be missing from the reply
            text = text.partition(end)[0] + end if end in text else text
        step = ask(talk.reply, text)
        if t.error:
            break
        t.turns, t.cut_replies, t.valid_actions = t.turns + 1, t.cut_replies + cut, t.valid_actions + step.valid
        t.score, t.success, t.reward = step.score, step.success, 0.0 if talk.aside == "reflection on all" else t.reward + step.reward
        t.progress.append(step.progress)
        t.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation.strip()}]
        t.status = "done" if step.done else "horizon" if t.turns >= horizon else "length" if tokens >= max_length else ""
    if t.error:
        t.status = "env_error"
        pool.drop(worker)
    else:
        pool.give_back(t.env, worker)
