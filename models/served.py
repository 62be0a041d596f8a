"""A model on a server with OpenAI's chat API, and the episodes that it plays.

urllib3 repeats a request if the server is busy, fails or is not there.
"""

import json
import os
import re
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from urllib3.util import Retry

from envs import EnvPool, split_item
from rollout import Conversation, Rollouts
from trajectory import Status, Trajectory
from worlds.wire import WireSession, read_body

MAX_THREADS = 32  # each plays a trajectory
REFUSED = "the model's server refused: "  # how the error of a refused conversation begins
# Parameters that some servers do not know -> their newer names ("": there is none).
PARAMETERS = {"max_tokens": "max_completion_tokens", "seed": ""}
# What a server says about a long conversation (it may quote "max_tokens"), and about a parameter.
ABOUT_LENGTH = r"context.(length|window|size)|too long|\btokens\b"
ABOUT_SUPPORT = r"support|permit|forbid|extra|un(known|recogni)"


class AudibleRetry(Retry):
    """A Retry that says once that it has to repeat a request."""

    has_spoken = False

    def increment(self, method: str | None = None, url: str | None = None, response: Any = None,
                  error: Exception | None = None, **rest: Any) -> Retry:
        """See urllib3."""
        if not AudibleRetry.has_spoken:
            AudibleRetry.has_spoken = True
            why = f"status {response.status}" if response else type(error).__name__
            print(f"the model's server: {why}; asking it again", file=sys.stderr)
        return super().increment(method, url, response, error, **rest)


class ModelError(RuntimeError):
    """The model's server failed. Nothing is known about the model, so the evaluation ends."""


class ConversationRefused(RuntimeError):
    """The server turns down one conversation. Its arguments: how the episode ends, and why."""


class ServedModel:
    """A model's name on a server, and how to sample from it.

    base_url: http://host:port/v1. timeout: seconds that the server has for a reply. tries: how
    often a failing server is asked before it is given up (8: two minutes). sampling: temperature,
    top_p, max_tokens. Raises ValueError for a key in OPENAI_API_KEY that cannot be sent.
    """

    def __init__(self, name: str, base_url: str, timeout: float = 300.0, tries: int = 8,
                 **sampling: float):
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.timeout = timeout
        self.settings = {"model": name, **sampling}
        self.renamed: dict[str, str] = {}  # parameters that this server has turned down
        self.has_replied = False  # so the form of the requests is right
        self.empty: list[str] = []  # the finish_reason of each reply without a text
        retry = AudibleRetry(
            tries - 1, allowed_methods=None, raise_on_status=False, backoff_factor=1,
            status_forcelist=[408, 429, *range(500, 600)], backoff_jitter=1, retry_after_max=120)
        self.session = WireSession(pool_maxsize=MAX_THREADS, max_retries=retry)
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("OPENAI_API_KEY holds a character that no key has")
        if self.key:
            self.session.headers["Authorization"] = f"Bearer {self.key}"

    def __call__(self, messages: list[dict[str, str]], seed: int = 0) -> tuple[str, bool, int]:
        """-> the reply to a conversation, whether it was cut at max_tokens, and the tokens of the
        whole conversation (0: the server does not say).

        Raises ModelError if the server fails or calls the request wrong, ConversationRefused if it
        calls a request wrong after it has replied to others."""
        renamed = self.renamed
        sent = self.settings | {"messages": messages, "seed": seed}
        body = {renamed.get(name, name): value for name, value in sent.items()}
        body.pop("", None)
        status, answer = self._post(body)
        if status == 200:
            self.has_replied = True
            text, reason, tokens = answer
            if reason == "content_filter":
                raise ConversationRefused(Status.ENV_ERROR, REFUSED + reason)
            self.empty += [reason] * (not text.strip())
            return text, reason == "length", tokens
        reason = f"status {status} {answer[:200]}"
        if not self.has_replied and re.search(ABOUT_SUPPORT, answer, re.I):
            self.renamed = self.renamed | {old: new for old, new in PARAMETERS.items()
                                           if old in answer}
        if self.renamed != renamed:  # by this answer, or by another thread in the meantime
            return self(messages, seed)
        if not self.has_replied or status not in (400, 413, 422):
            raise ModelError(f"{self.url}: {reason}")
        if status == 413 or re.search(ABOUT_LENGTH, answer, re.I):
            raise ConversationRefused(Status.LENGTH, "")
        raise ConversationRefused(Status.ENV_ERROR, REFUSED + reason)

    def _post(self, body: dict) -> tuple[int, str | tuple[str, str, int]]:
        """Send a request -> the status and, for 200, the reply, its finish_reason and the tokens of
        the whole conversation, else the text of the answer, which may quote the key."""
        try:
            with self.session.post(self.url, json=body, timeout=(10, self.timeout),
                                   stream=True) as response:
                data = read_body(response, self.url)
            if response.status_code != 200:
                text = data.decode(errors="replace")
                return response.status_code, text.replace(self.key or "\0", "***")
            answer = json.loads(data)
            choice = answer["choices"][0]
            text = "".join(choice["message"].get("content") or "")  # TypeError: it is no text
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
            return 200, (text, str(choice.get("finish_reason")), tokens)
        except Exception as e:  # no connection, no JSON, JSON of any other form
            raise ModelError(f"{self.url}: {type(e).__name__}: {e}") from e


def play_served(model: ServedModel, pool: EnvPool, items: list[str], horizon: int,
                config: Rollouts, on_end: Callable = lambda t: None) -> list[Trajectory]:
    """As `rollout.rollout`, with a `ServedModel`: `config.slots` trajectories at a time, a thread
    each, and at most MAX_THREADS. How replies are sampled is the model's; `config` says the rest.

    -> the trajectories in the order of items. They have messages, but no tokens. Status "env_error"
    is also that of a conversation that the server refused, which is not begun again. Raises
    ModelError if the model's server fails, ValueError for an item that does not exist.
    """
    cancelled = threading.Event()

    def play(group: int, sample: int, retries: int = config.retries) -> Trajectory:
        t = Trajectory(items[group], split_item(items[group])[0], group=group, sample=sample)
        worker = pool.take(t.env)
        episode = Conversation(t, horizon, config, chat=None)
        reply, cut, tokens = None, False, 0
        try:
            while True:
                future = worker.call(episode.advance, reply, (), True, cut)
                error = worker.failure(future, config.deadline, config.create_deadline)
                if error:
                    episode.end(Status.ENV_ERROR, error)
                elif episode.take() and tokens >= episode.max_length:
                    episode.end(Status.LENGTH)
                if t.status != Status.RUNNING or cancelled.is_set():
                    break
                # A server draws the same random numbers for the same seed: each turn has its own.
                seed = zlib.crc32(f"{config.seed} {t.item} {t.sample} {t.turns}".encode()) >> 1
                reply, cut, tokens = model(episode.prompt, seed)
                for end in worker.env.stop:  # it belongs to the reply; a server leaves out its own
                    before, end_found, _ = reply.partition(end)
                    reply = before + end_found
                t.cut_turns += [t.turns + 1] * cut
        except ConversationRefused as e:
            episode.end(*e.args)
        finally:
            episode.give_back(pool, worker)
        if t.status == Status.ENV_ERROR and retries and not t.error.startswith(REFUSED):
            return play(group, sample, retries - 1)
        return t

    with ThreadPoolExecutor(min(config.slots, MAX_THREADS)) as executor:
        futures = [executor.submit(play, group, sample)
                   for group in range(len(items)) for sample in range(config.samples)]
        try:
            for future in as_completed(futures):
                on_end(future.result())  # in this thread alone, because it writes a file
        finally:
            cancelled.set()  # episodes under way end with their next request, which may cost money
            executor.shutdown(cancel_futures=True)
    if model.empty:
        reasons = ", ".join(f"{name}: {count}" for name, count in Counter(model.empty).items())
        print(f"{len(model.empty)} replies were empty (finish_reason {reasons})", file=sys.stderr)
    return [future.result() for future in futures]
