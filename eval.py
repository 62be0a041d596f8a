"""How good is a model? Success on held-out items, avg@k and pass@k, by category, each with a 95 % interval.

    python eval.py --env babyai --model runs/NAME/final --samples 4 --out result.json
    python eval.py --model runs/NAME/final --horizon 2,4,6        # a sweep: one result for each horizon
    python eval.py --env textcraft --model openai:NAME --base_url http://localhost:8000/v1

The settings are those of the run whose folder holds the model, else what train.py takes by default for this world and
model; a flag wins over both. All items of the split are played, at temperature 1. Failed environments, and conversations
that a model's server refuses, are left out of the statistics; their share is `env_error`.
"""

import hashlib
import json
import math
import os
import random
import re
import sys
import threading
import time
import zlib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from config import Parser, arg, merged, presets, servers  # before torch: it says how idle threads wait
import numpy as np
import requests
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import agent
import envs as worlds
import rl
import schedule
from envs import EnvPool, outcome, split_item
from rollout import Trajectory, rollout


@dataclass
class Config:
    env: str | None = arg(None, f"world: {', '.join(worlds.WORLDS)}; default: the run's, else babyai")
    model: str = arg("tiny", "'tiny' (built in), a folder such as runs/NAME/final, a hub id, or openai:NAME on the server --base_url")
    base_url: str = arg("", "an OpenAI-compatible server, http://host:port/v1; a key is taken from the environment's OPENAI_API_KEY")
    samples: int = arg(1, "trajectories of each item: the k of avg@k and pass@k")
    horizon: str = arg("", "largest number of turns; several, as in 2,4,6, are evaluated one after the other")
    split: str = arg("test", "test (held out) | train")
    items: int | None = arg(None, "only so many, the first of the split in an order drawn from --seed; default: all")
    data: str | None = arg(None, "folder in the layout of AgentGym-RL-Data-ID; default: the run's, else data/")
    out: str = arg("", "JSON file for the result")
    trajectories: str = arg("", "JSON-lines file for the trajectories; in a sweep .hHORIZON is put into its name")
    seed: int = arg(0, "every random number follows from it")
    temperature: float = arg(1.0, "of sampling; 0 takes the likeliest token")
    top_p: float = arg(1.0, "nucleus sampling")
    top_k: int = arg(0, "0: off")
    min_p: float = arg(0.0, "leaves out tokens below min_p times the likeliest one's probability; 0: off")
    max_tokens: int | None = arg(None, "largest reply, tokens")
    max_length: int | None = arg(None, "largest trajectory, tokens")
    action_format: str | None = arg(None, " | ".join(agent.FORMATS))
    plan: bool | None = arg(None, "ask for a plan before the first action; default: the run's")
    reflect: bool | None = arg(None, "ask what went wrong after invalid actions and failed episodes; default: the run's")
    env_args: str | None = arg(None, "keyword arguments of the world in this process: searchqa.topk=5; default: the run's")
    dtype: str | None = arg(None, "float32 | bfloat16")
    slots: int | None = arg(None, "trajectories played at a time; 32 at most on a server's model")
    engine: str = arg("ragged", "ragged | hf: the model's own attention, all trajectories in step (slow; the reference)")
    arrival_order: bool | None = arg(None, "take environments' answers as they come, so runs are not bit-for-bit repeatable; default: with --env_url")
    env_url: str = arg("", "AgentGym server(s) http://host:port[,...] to play on instead of in this process")


def run_of(model: str) -> dict:
    """The config.json of the training run that wrote this model folder (final/ or a checkpoint); {} if none did."""
    folder = Path(model).resolve().parent
    path = (folder.parent if folder.name == "checkpoints" else folder) / "config.json"
    if not Path(model).is_dir() or not path.exists():
        return {}
    try:
        run = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: {e}") from e
    return run if {"env", "algo", "horizon"} <= set(run) else {}  # or it is a model's own config.json


def parse_config(argv: list[str] | None = None) -> Config:
    """The command line, checked and with every default filled in. Raises ValueError with one clear line."""
    parser = Parser(Config, description=__doc__.split("\n\n")[0], allow_abbrev=False,
                          epilog="a flag without a default takes the run's value, else that of train.py --help")
    parser.formatter_class = lambda prog: RawDescriptionHelpFormatter(prog, max_help_position=30)
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]}; python eval.py --help lists all")
    run = run_of(cfg.model)
    trained_on = [part.split(":")[0] for part in run.get("env", "").split(",")]  # a mixture: babyai:2,textcraft:1
    if cfg.env is None and len(trained_on) > 1:
        raise ValueError(f"the run was trained on {', '.join(trained_on)}; choose one of them with --env")
    cfg.env = cfg.env or trained_on[0] or "babyai"
    tiny = "tiny" in (cfg.model, run.get("model"))
    default = presets("tiny" if tiny else cfg.model, cfg.env) | {"data": "", "plan": False, "reflect": False}
    own = run | run.get("worlds", {}).get(cfg.env, {})  # in a mixture each world has its own limits
    mine = "" if cfg.env_url else default["env_args"]  # of this world; a run's are those of the worlds it was trained in
    if cfg.env_args is None and (cfg.env not in trained_on or own.get("env_args") == default["env_args"]):
        own["env_args"] = mine
    cfg.env_args = cfg.env_args and merged(cfg.env_args, mine)
    for name in ("data", "max_tokens", "max_length", "slots", "action_format", "plan", "reflect", "env_args", "dtype"):
        if getattr(cfg, name) is None:
            setattr(cfg, name, own.get(name, default[name]))
    cfg.slots = min(cfg.slots, 32) if remote(cfg) else cfg.slots  # threads
    if cfg.arrival_order is None:
        cfg.arrival_order = bool(cfg.env_url)
    if not cfg.horizon:  # the run's says something about the worlds it was made for only
        known = cfg.env in trained_on
        cfg.horizon = str(schedule.parse_rounds(run["horizon"], cfg.env)[-1] if known else default["horizon"].eval_rounds)
    check(cfg)
    return cfg


def check(cfg: Config) -> None:
    """Everything that can be known to be wrong before anything is played: ValueError, one line."""
    worlds.check_name(cfg.env, servers(cfg.env_url, [cfg.env])[cfg.env])
    for name, allowed in {"action_format": tuple(agent.FORMATS), "dtype": ("float32", "bfloat16"),
                          "engine": ("ragged", "hf")}.items():
        if getattr(cfg, name) not in allowed:
            raise ValueError(f"unknown --{name} '{getattr(cfg, name)}'; choose from {', '.join(allowed)}")
    if cfg.env_url and options(cfg):
        raise ValueError(f"--env_args is for worlds in this process, and {cfg.env} is played on a server: give --env_args ''")
    for name in ("samples", "items", "max_tokens", "max_length", "slots"):
        if getattr(cfg, name) is not None and not getattr(cfg, name) > 0:
            raise ValueError(f"--{name} must be positive, not {getattr(cfg, name)}")
    for name in ("temperature", "top_k", "min_p", "seed"):
        if not 0 <= getattr(cfg, name) < math.inf:
            raise ValueError(f"--{name} must be a number from 0 on, not {getattr(cfg, name)}")
    if cfg.min_p >= 1:
        raise ValueError(f"--min_p must lie in [0, 1), not {cfg.min_p}")
    if not 0 < cfg.top_p <= 1:
        raise ValueError(f"--top_p must lie in (0, 1], not {cfg.top_p}")
    schedule.parse_rounds(cfg.horizon, cfg.env)
    if len(pick_items(cfg)) < (cfg.items or 1):
        raise ValueError(f"--items {cfg.items or 1}: the split '{cfg.split}' has only {len(pick_items(cfg))}")
    if remote(cfg):
        if not cfg.base_url.startswith(("http://", "https://")) or "@" in cfg.base_url:  # it stands in the result
            raise ValueError("--model openai:NAME needs --base_url http://host:port/v1, without a password: a key is taken from OPENAI_API_KEY")
        if cfg.top_k or cfg.min_p or cfg.engine != "ragged":
            raise ValueError("--top_k, --min_p and --engine are for models that run here")
    elif cfg.base_url:
        raise ValueError("--base_url is for --model openai:NAME")
    else:
        rl.model_path(cfg.model)
    for path in (Path(p).absolute() for p in (cfg.out, cfg.trajectories) if p):  # not after hours of playing
        above = next(p for p in path.parents if p.exists())
        if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
            raise ValueError(f"cannot write {path}: {'it' if path.is_dir() else above} is in the way")
    worlds.check_env(cfg.env, servers(cfg.env_url, [cfg.env])[cfg.env], **options(cfg))


def remote(cfg: Config) -> bool:
    """Whether the model is behind a server (openai:NAME)."""
    return cfg.model.startswith("openai:")


def options(cfg: Config) -> dict[str, int | str]:
    """The keyword arguments of the world that is evaluated; a mixture's --env_args may name others."""
    named = {part.split(".")[0] for part in cfg.env_args.split()}
    return worlds.env_options(cfg.env_args, [cfg.env, *named]).get(cfg.env, {})


def pick_items(cfg: Config) -> list[str]:
    """The items of the split; with --items the first of them in an order drawn from --seed."""
    names = worlds.items(cfg.env, cfg.split, cfg.data or None)
    order = np.random.default_rng(cfg.seed).permutation(len(names))[:cfg.items]
    return names if cfg.items is None else [names[i] for i in order]


def evaluate(policy: "PreTrainedModel | ServedModel", tokenizer: PreTrainedTokenizerBase | None, pool: EnvPool, items: list[str], horizon: int,
             samples: int, **how: Any) -> list[Trajectory]:
    """Play every item `samples` times under a progress bar; `how` (slots, seed, temperature ...) is `rollout`'s. Without a tokenizer
    the policy is an `ServedModel`, and `how` is `play_served`'s.
    -> list[Trajectory], in the order of items, `group` being the item's place. Raises ValueError for a bad item."""
    wins = []
    with tqdm(total=len(items) * samples, desc=f"horizon {horizon}", delay=1, leave=False, dynamic_ncols=True) as bar:
        def progress(t):
            wins.append(t.success)
            bar.set_postfix_str(f"success {np.mean(wins):.2f}", refresh=False)
            bar.update()

        if tokenizer is None:
            return play_served(policy, pool, items, horizon, samples=samples, progress=progress, **how)
        return rollout(policy, tokenizer, pool, items, horizon, samples=samples, progress=progress, **how)


# ---- statistics ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples or more succeeds, estimated without bias from c successes in n >= k samples:
    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)  # whole numbers up to the one division


def powers(samples: int) -> list[int]:
    """The k of pass@k: powers of two and the number of samples: 6 -> [1, 2, 4, 6]."""
    return sorted({2 ** i for i in range(samples.bit_length())} | {samples})


def bootstrap(values: Sequence[float] | np.ndarray, seed: int, resamples: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the mean of `values` (one an item): percentiles 2.5 and 97.5 of the means of resampled
    items. It has no width where all values are equal, and is a little narrow for a handful of them."""
    values, rng = np.asarray(values, float), np.random.default_rng(seed)
    rows = [min(1000, resamples - at) for at in range(0, resamples, 1000)]  # a thousand at a time bounds the memory
    means = np.concatenate([values[rng.integers(0, len(values), (r, len(values)))].mean(1) for r in rows])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarise(trajectories: list[Trajectory], categories: dict[str, str], ks: list[int], seed: int) -> dict:
    """-> {"success", "score", "turns", "valid_actions", "env_error", "avg@1", "avg@k", "pass@1" ... "pass@k",
    "ci95": {name: [low, high]}, "categories": {category: {"items", "success", "score", "turns", "ci95"}}}.

    categories: item -> category. Every number is a mean over items of the mean over the item's samples, failed
    environments left out (but for env_error, their share) and with them an item that has nothing else.
    valid_actions: the valid share of a trajectory's actions. avg@k is the mean success of k samples. Its expected
    value is the same for every k, so avg@1 and avg@k (the largest of ks) are both `success`, over all samples.
    pass@k: over items with k samples or more; None if there is none. Raises ValueError if every environment failed.
    """
    played, failed = {}, {}  # item -> its usable trajectories; item -> whether each of its trajectories failed
    for t in trajectories:
        failed.setdefault(t.item, []).append(t.status == "env_error")
        if t.status != "env_error":
            played.setdefault(t.item, []).append(t)
    if not played:
        raise ValueError("nothing to summarise: every environment failed")

    def means(name, part):
        return [float(np.mean([getattr(t, name) for t in ts])) for ts in part.values()]

    basic = ("success", "score", "turns")
    columns = {name: means(name, played) for name in basic}  # name -> one value an item
    columns["valid_actions"] = [np.mean([t.valid_actions / max(1, t.turns) for t in ts]) for ts in played.values()]
    columns["env_error"] = [np.mean(flags) for flags in failed.values()]
    columns |= {f"avg@{k}": columns["success"] for k in sorted({1, max(ks)})}
    columns |= {f"pass@{k}": [pass_at_k(len(ts), sum(t.success for t in ts), k) for ts in played.values()
                              if len(ts) >= k] for k in ks}
    result = {name: float(np.mean(column)) if column else None for name, column in columns.items()}
    result["ci95"] = {name: list(bootstrap(column, seed)) if column else None for name, column in columns.items()}
    result["categories"] = {}
    for category in sorted({categories[item] for item in played if item in categories}):
        part = {item: ts for item, ts in played.items() if categories.get(item) == category}
        result["categories"][category] = {
            "items": len(part), **{name: float(np.mean(means(name, part))) for name in basic},
            "ci95": {"success": list(bootstrap(means("success", part), seed))}}
    return result


# ---- models behind OpenAI-compatible servers ----


REFUSED = "the model's server refused: "  # such a trajectory's error


class ModelError(RuntimeError):
    """The model's server failed: nothing is known about the model, so the evaluation ends. `played`: the trajectories that were complete."""


class ConversationRefused(RuntimeError):
    """The server does not go on with this conversation (a content filter, say)."""


class TooLong(ConversationRefused):
    """The server takes no conversation of this length."""


class ServedModel:
    """A model's name on a server, and how to sample from it. `base_url`: http://host:port/v1; `timeout` in seconds.

    model(messages) -> (reply, whether it was cut at max_tokens, tokens of the conversation or 0 where the server does not say).
    A server that is busy (429) or fails (5xx) is asked again after a while, not before the time in Retry-After; ModelError after
    `tries` failures (two minutes), or once the Event `stop` is set. ConversationRefused or TooLong where it turns down a conversation of several turns."""

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
                raise (TooLong if status == 413 or re.search("context.(length|window|size)|too long|tokens", said, re.I) else ConversationRefused)(why)
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


def play_served(model: ServedModel, pool: EnvPool, items: list[str], horizon: int, samples: int = 1, seed: int = 0, slots: int = 16, max_length: float = math.inf,
         action_format: str = "react", plan: bool = False, reflect: bool = False, deadline: float = 60.0, retries: int = 2,
         progress: Callable[[Trajectory], None] | None = None) -> list[Trajectory]:
    """As `rollout.rollout`, with a `ServedModel`: every item `samples` times, `slots` at once, in the order of items. Trajectories have
    messages, but no tokens; status env_error, too, for a conversation that the server refuses. Raises ModelError if the model's server fails, ValueError for an item that does not exist."""
    how, stop, failed, played = dict(action_format=action_format, plan=plan, reflect=reflect), threading.Event(), [], []

    def one(group, sample):
        try:
            for _ in range(retries + 1):
                t = Trajectory(items[group], split_item(items[group])[0], group=group, sample=sample)
                _play_episode(t, model, pool, horizon, max_length, deadline, seed, how, stop)
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


def _play_episode(t, model, pool, horizon, max_length, deadline, seed, how, stop):
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
        except ConversationRefused as e:  # nothing about the model: left out of the statistics, its share is in the result
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


# ---- the command ----


def tables(results: list[dict]) -> str:
    """For people: one result in full, or a line for each of several."""
    def cell(x):
        if isinstance(x, list):
            return f"{x[0]:.3f} .. {x[1]:.3f}"
        return "-" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)

    def table(*rows):
        rows = [[cell(x) for x in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "".join("\n" + "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])])
                       for first, *rest in rows)

    result, c = results[0], results[0]["config"]
    title = f"{c['model']} on {c['env']} {c['split']}, {c['items']} items x {c['samples']}"
    if len(results) > 1:
        names = ["score", "turns", "valid_actions", "env_error", f"pass@{c['samples']}"]
        return title + table(["horizon", "success", "95 % interval", *names],
                             *([r["config"]["horizon"], r["success"], r["ci95"]["success"], *(r[n] for n in names)]
                               for r in results))
    text = f"{title}, horizon {c['horizon']}" + table(
        ["", "mean", "95 % interval"], *([name, result[name], interval] for name, interval in result["ci95"].items()))
    return text + ("\n" + table(["category", "items", "success", "95 % interval", "score", "turns"], *(
        [name, c["items"], c["success"], c["ci95"]["success"], c["score"], c["turns"]]
        for name, c in result["categories"].items())) if result["categories"] else "")


def write(path: Path, text: str) -> None:
    """All or nothing: the file gets its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def save(cfg: Config, played: dict[int, list[Trajectory]]) -> None:
    """Trajectories by horizon -> --trajectories, if it is given; in a sweep a file each."""
    for horizon, trajectories in played.items() if cfg.trajectories else ():
        path = Path(cfg.trajectories)
        path = path.with_name(f"{path.stem}.h{horizon}{path.suffix}") if "," in cfg.horizon else path
        write(path, "".join(json.dumps(t.to_json()) + "\n" for t in trajectories))


def pins(cfg: Config, names: list[str]) -> dict:
    """What it takes to repeat the evaluation of the items `names`: `config` in the result, but for the horizon."""
    weights = hashlib.sha256()
    files = [] if remote(cfg) else sorted(Path(rl.model_path(cfg.model)).glob("model*.safetensors"))  # one; several are hashed as one
    for path in files:
        weights.update(path.read_bytes())
    return {k: v for k, v in asdict(cfg).items() if k not in ("out", "trajectories", "horizon")} | {
        "model_sha256": weights.hexdigest() if files else None,  # of a local model
        "items": len(names), "items_sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 for bad usage, 1 if every environment failed or the model's server; one line on stderr says why."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)  # it tells of every attempt to reach a hub that is not there
    played = {}  # horizon -> trajectories
    try:
        cfg = parse_config(argv)
        names, config = pick_items(cfg), pins(cfg, pick_items(cfg))
        categories = worlds.categories(cfg.env, cfg.data or None) if cfg.split == "test" else {}
        how = {k: getattr(cfg, k) for k in ("slots", "seed", "max_length", "action_format", "plan", "reflect")}
        if remote(cfg):
            policy, tokenizer = ServedModel(cfg.model.removeprefix("openai:"), cfg.base_url, cfg.temperature, cfg.top_p, cfg.max_tokens), None
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            policy, tokenizer = rl.load_policy(cfg.model, device, getattr(torch, cfg.dtype))
            how |= {k: getattr(cfg, k) for k in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "engine")}
            how["arrival"] = cfg.arrival_order
        with EnvPool(servers(cfg.env_url, [cfg.env]), options={cfg.env: options(cfg)}) as pool:
            for horizon in schedule.parse_rounds(cfg.horizon, cfg.env):
                played[horizon] = evaluate(policy, tokenizer, pool, names, horizon, cfg.samples, **how)
                if all(t.status == "env_error" for t in played[horizon]):
                    print(f"eval.py: nothing to report, every environment failed; the first: "
                          f"{' '.join(played[horizon][0].error.split())}", file=sys.stderr)
                    return 1
                if not any(t.turns for t in played[horizon]):
                    raise ValueError(f"--max_length is {cfg.max_length}: no first prompt fits")
    except (ValueError, ModelError) as e:
        print(f"eval.py: {' '.join(str(e).split())}", file=sys.stderr)
        if done := getattr(e, "played", []):  # they may have cost money
            save(cfg, played | {horizon: done})
        return 2 if isinstance(e, ValueError) else 1
    results = [summarise(trajectories, categories, powers(cfg.samples), cfg.seed)
               | {"config": config | {"horizon": horizon}} for horizon, trajectories in played.items()]
    sweep = {"sweep": results, "config": config | {"horizon": list(played)}}
    if cfg.out:
        write(Path(cfg.out), json.dumps(sweep if len(played) > 1 else results[0], indent=1) + "\n")
    save(cfg, played)
    print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
