"""Play on a model behind any OpenAI-compatible server: the same items, horizon, prompts and worlds, text instead of tokens.

    OPENAI_API_KEY=... python eval.py --env textcraft --model openai:gpt-4o --base_url https://api.openai.com/v1
    python eval.py --env textcraft --model openai:Qwen/Qwen2.5-7B-Instruct --base_url http://localhost:8000/v1     # vllm serve, and the like

What such a server does not give, token ids and log-probs under our own distribution, an evaluation does not need. The key is
read from the environment and goes nowhere but into the request's header.
"""

import math
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import requests

import agent
from envs import split_item
from pool import outcome
from rollout import Trajectory


class ModelError(RuntimeError):
    """The model's server failed: nothing is known about the model, so the evaluation ends."""


class TooLong(RuntimeError):
    """The server takes no conversation of this length."""


class Model:
    """model(messages) -> (reply, whether it was cut at max_tokens, tokens of the conversation or 0 where the server does not say).
    Raises ModelError after `tries` failures; a server that is busy (429) or fails (5xx) is asked again after a while. `stop`, an
    Event, ends that at once. Raises TooLong where the server refuses a conversation of several turns (400, 413)."""

    def __init__(self, name, base_url, temperature=1.0, top_p=1.0, max_tokens=512, timeout=300.0, tries=6):
        self.url, self.timeout, self.tries = base_url.rstrip("/") + "/chat/completions", timeout, tries
        self.body = {"model": name, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.stop = threading.Event()

    def __call__(self, messages, seed=0):
        for attempt in range(1, self.tries + 1):
            status = 0
            try:
                response = requests.post(self.url, json=self.body | {"messages": messages, "seed": seed}, headers=self.headers,
                                         timeout=(10, self.timeout))
                status = response.status_code
                if status == 200:
                    reply = response.json()
                    choice = reply["choices"][0]
                    text = choice["message"]["content"] or ""
                    if not isinstance(text, str):
                        raise TypeError(f"the content is no text: {text!r:.80}")
                    return (text, choice.get("finish_reason") == "length",
                            int((reply.get("usage") or {}).get("total_tokens") or 0))
                why = f"status {status} {response.text[:200]}"
            except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as e:
                why = f"{type(e).__name__}: {str(e)[:200]}"
            if status in (400, 413) and len(messages) > 3:
                raise TooLong(why)
            if 400 <= status < 500 and status not in (408, 429) or attempt == self.tries:
                raise ModelError(f"{self.url}: {why}")
            if self.stop.wait(min(30.0, 0.5 * 2 ** attempt * random.uniform(0.5, 1.5))):
                raise ModelError("the evaluation has ended")


def play(model, pool, items, horizon, samples=1, seed=0, slots=16, max_length=math.inf, action_format="react", plan=False, reflect=False,
         deadline=60.0, retries=2, progress=None) -> list[Trajectory]:
    """As `rollout.rollout`, with a `Model`: every item `samples` times, `slots` at once, in the order of items. Trajectories have
    messages, but no tokens. Raises ModelError if the model's server fails, ValueError for an item that does not exist."""
    how = dict(action_format=action_format, plan=plan, reflect=reflect)

    def one(group, sample):
        for _ in range(retries + 1):
            t = Trajectory(items[group], split_item(items[group])[0], group=group, sample=sample)
            try:
                _episode(t, model, pool, horizon, max_length, deadline, seed, how)
            except ModelError:
                model.stop.set()  # at once: whoever waits for the episodes does so in their order
                raise
            if t.status != "env_error" or model.stop.is_set():
                break
        if progress is not None:
            progress(t)
        return t

    executor = ThreadPoolExecutor(slots)
    try:
        futures = [executor.submit(one, group, sample) for group in range(len(items)) for sample in range(samples)]
        return [future.result() for future in futures]
    except BaseException:
        model.stop.set()  # episodes under way end with their next turn: nobody waits for them, and the server may cost money
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _episode(t, model, pool, horizon, max_length, deadline, seed, how):
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
        if model.stop.is_set():
            t.error = "the evaluation has ended"
            break
        try:
            text, cut, tokens = model(t.messages, seed + t.sample)
        except TooLong:
            t.status = "length"
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
