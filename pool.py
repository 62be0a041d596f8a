"""Environments in threads of their own, so that all think at once and none can hang the rollout."""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Any

from envs import Env, EnvError, make_env


class Worker:
    """An environment in a daemon thread. `call` returns a Future; a worker that misses its deadline is abandoned."""

    def __init__(self, make: Callable[[], Env]):
        self.make, self.inbox = make, queue.SimpleQueue()
        self.env: Env | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while (job := self.inbox.get()) is not None:
            self._do(*job)
        if self.env is not None:
            self.env.close()

    def _do(self, future, function, args):
        try:
            if self.env is None:
                self.env = self.make()
            future.set_result(function(self.env, *args))
        except Exception as e:  # handed to whoever waits on the future
            future.set_exception(e)
        except SystemExit as e:  # a world must not end the run; Ctrl-C and SIGTERM, which may come while it is played here, do
            future.set_exception(RuntimeError(repr(e)))

    def call(self, function: Callable[..., Any], *args: object, here: bool = False) -> Future:
        """function(environment, *args), in the environment's thread; `here`: at once in the caller's, while the other has nothing to do."""
        future = Future()
        if here:
            self._do(future, function, args)
            return future
        self.inbox.put((future, function, args))
        if not self.thread.ident:
            self.thread.start()
        return future


class EnvPool:
    """Environments by name, made when first needed and reused by `reset`. `with EnvPool(...) as pool:` closes all of them
    in the end: a server keeps an episode until it is told that it is over."""

    def __init__(self, urls: Sequence[str] | dict[str, list[str]] = (), make: Callable[..., Env] = make_env,
                 options: dict[str, dict] | None = None):
        """urls: the servers, or world -> its servers; without any a world is played in this process.
        options: world -> keyword arguments of its class there."""
        self.make, self.urls, self.options, self.free, self.workers, self.dropped = make, urls, options or {}, {}, [], []
        self.made = int(os.environ.get("RANK", 0))  # each process begins at another server

    def take(self, name: str) -> Worker:
        """A free one, else a new one: it is made in its thread, with its first call."""
        try:
            return self.free[name].pop()
        except (KeyError, IndexError):  # none is free, or another thread was faster
            pass
        first, self.made = self.made, self.made + 1
        self.workers.append(Worker(lambda: self._make(name, first)))  # its thread starts with the first call: none can get lost
        return self.workers[-1]

    def drop(self, worker: Worker) -> None:
        """Of a worker that is not to be trusted any more: its environment is closed, unless it hangs."""
        worker.inbox.put(None)
        self.workers.remove(worker)
        self.dropped = [w for w in self.dropped if w.thread.is_alive()] + [worker]

    def _make(self, name, first):
        """On the servers by turns; where one fails, the others get its share by turns."""
        urls = self.urls.get(name) if isinstance(self.urls, dict) else self.urls
        if not urls:
            return self.make(name, **self.options.get(name, {}))
        turn, own = divmod(first, len(urls))
        others = urls[:own] + urls[own + 1:]
        for url in [urls[own], *(others[(turn + i) % len(others)] for i in range(len(others)))]:
            try:
                return self.make(name, url=url)
            except EnvError as e:
                error = e
        raise error

    def give_back(self, name: str, worker: Worker) -> None:
        """It is free for the next episode of this world."""
        self.free.setdefault(name, []).append(worker)

    def close(self) -> None:
        """Close every environment, also one that a rollout left behind; a few seconds at most."""
        for worker in self.workers:
            worker.inbox.put(None)
        until = time.monotonic() + 5
        for worker in self.workers + self.dropped:
            if worker.thread.ident:
                worker.thread.join(max(0.0, until - time.monotonic()))
        self.free, self.workers, self.dropped = {}, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def outcome(future: Future, until: float, deadline: float) -> tuple[Any, str]:
    """-> (result, "") or (None, what went wrong). Calls that began together share the moment `until`."""
    try:
        return future.result(timeout=max(0.0, until - time.monotonic())), ""
    except TimeoutError as e:
        return None, f"crash: {type(e).__name__}: {e}" if future.done() else f"timeout: no answer within {deadline:g} s"  # or the world's own
    except EnvError as e:
        return None, f"fault: {e}"
    except Exception as e:  # a crash inside a world is that episode's env_error, not the end of the run
        return None, f"crash: {type(e).__name__}: {e}"
