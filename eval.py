"""How good is a model? Success on held-out items, avg@k and pass@k, by category,
each with a 95 % interval.

    python eval.py --env babyai --model runs/NAME/final --samples 4 --out result.json
    python eval.py --model runs/NAME/final --horizon 2,4,6        # a sweep: a result per horizon
    python eval.py --env textcraft --model openai:NAME --base_url http://localhost:8000/v1

A flag that is not given takes the value of the run whose folder holds the model. Without such a
run it takes the default of train.py for this world and model. All items of the split are played,
at temperature 1. Trajectories whose environment failed, and conversations that a model's server
refused, are left out of the statistics; their share is `env_error`.
"""

import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, Any, NamedTuple

# config comes before torch: it sets how idle threads wait.
from config import LIMITS, arg, chat_arguments, check_ranges, flag_group, fraction
from config import merge_env_args, mixture, not_negative, one_of, positive, presets, read_flags
from config import read_prompts, run_of, servers
import numpy as np
import requests
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import envs
import rl
import schedule
from agent import FORMATS, PARSES, Chat, load_agent, note_history, settings_of, try_template
from envs import EnvPool, split_item
from models.check import find_paths
from rollout import Conversation, RolloutConfig, rollout
from trajectory import Status, Trajectory, write_atomically, write_trajectories
from worlds.agentgym import read_body

# ---- flags ----


@dataclass
class EvalConfig:
    """The flags of eval.py."""

    flag_group("what is evaluated")
    env: str | None = arg(None, f"world: {', '.join(envs.WORLDS)}; default: the run's, else babyai")
    model: str = arg("tiny", "'tiny' (built in), 'smollm2' (made by data/get_smollm2.py), "
                             "a folder such as runs/NAME/final, a GGUF file, a hub id, or "
                             "openai:NAME on the server --base_url")
    chat_template: str = arg("", "file with a chat template (Jinja), for a model that has none")
    system: str | None = arg(None, "text of a system message before the instructions; default: the "
                                   "run's, else none")
    chat_args: Annotated[str | None, chat_arguments] = arg(
        None, "switches of the chat template: enable_thinking=false, several with spaces between "
              "them, or a JSON object; default: the run's")
    base_url: str = arg("", "an OpenAI-compatible server, http://host:port/v1; a key is taken from "
                            "the environment's OPENAI_API_KEY")
    samples: Annotated[int, positive] = arg(
        1, "trajectories of each item: the k of avg@k and pass@k")
    horizon: str = arg("", "largest number of turns; several, as in 2,4,6, are evaluated one after "
                           "the other")
    split: str = arg("test", "test (held out) | train")
    items: Annotated[int | None, positive] = arg(
        None, "number of items, drawn from the split by --seed; default: all")
    data: str | None = arg(None, "folder in the layout of AgentGym-RL-Data-ID; default: the run's, "
                                 "else data/")
    out: str = arg("", "JSON file for the result. An evaluation that was stopped goes on from "
                       "FILE.part, by the same command")
    trajectories: str = arg("", "JSON-lines file for the trajectories; in a sweep .hHORIZON is put "
                                "into its name")
    flag_group("trajectories")
    seed: Annotated[int, not_negative] = arg(0, "every random number follows from it")
    temperature: Annotated[float, not_negative] = arg(
        1.0, "sampling temperature; 0 takes the likeliest token")
    top_p: Annotated[float, fraction] = arg(1.0, "nucleus sampling")
    top_k: Annotated[int, not_negative] = arg(0, "sample from the k likeliest tokens; 0: off")
    max_tokens: Annotated[int | None, positive] = arg(None, "largest reply, tokens")
    max_length: Annotated[int | None, positive] = arg(None, "largest trajectory, tokens")
    action_format: Annotated[str | None, one_of(*FORMATS)] = arg(None, " | ".join(FORMATS))
    parse: Annotated[str | None, one_of(*PARSES)] = arg(
        None, "strict | lenient, see train.py --help; default: the run's, else lenient")
    prompts: str | None = arg(None, "JSON file with other instructions, see train.py --help; "
                                    "default: the run's; '': none")
    agent: str | None = arg(None, "as in train.py --help; default: the run's")
    agent_args: str | None = arg(None, "the agent's settings, NAME=VALUE; default: the run's")
    history: Annotated[str | None, one_of("append", "template")] = arg(
        None, "as in train.py --help; default: the run's")
    plan: bool | None = arg(None, "ask for a plan before the first action; default: the run's")
    reflect: bool | None = arg(None, "ask what went wrong after invalid actions and failed "
                                     "episodes; default: the run's")
    env_args: str | None = arg(None, "keyword arguments of the world in this process: "
                                     "searchqa.topk=5; default: the run's")
    flag_group("how it is computed")
    dtype: Annotated[str | None, one_of("float32", "bfloat16")] = arg(None, "float32 | bfloat16")
    slots: Annotated[int | None, positive] = arg(
        None, "trajectories played at a time; at most 32 with a model on a server")
    engine: Annotated[str, one_of("ragged", "hf")] = arg(
        "ragged", "ragged | hf: the model's own attention, all trajectories in lockstep (slow; the "
                  "reference)")
    graphs: bool = arg(True, "on a GPU, record decode steps as CUDA graphs; false: run them "
                             "eagerly, more slowly")
    arrival_order: bool | None = arg(None, "take environments' answers as they come, so runs are "
                                           "not bit-for-bit repeatable; default: with --env_url")
    env_url: str = arg("", "AgentGym's or OpenEnv's server(s) http://host:port[,...] to play on "
                           "instead of in this process")
    deadline: Annotated[float, positive] = arg(60.0, "seconds an environment has to answer")
    create_deadline: Annotated[float, positive] = arg(
        300.0, "seconds to create an environment; not counted in --deadline")

    prompt_texts: dict[str, dict[str, str]] = field(init=False)  # what --prompts holds


# Flags whose default is the run's value, or else the preset's.
TAKEN_FROM_RUN = ("data", "max_tokens", "max_length", "slots", "action_format", "parse", "agent",
                  "agent_args", "history", "plan", "reflect", "dtype", "system", "chat_args")
MAX_SERVED_SLOTS = 32  # with a model on a server each slot is a thread


def parse_eval_config(argv: list[str] | None = None) -> EvalConfig:
    """The command line, checked and with every default filled in.

    Raises ValueError with one clear line.
    """
    epilog = ("a flag without a default takes the run's value (--data, --max_tokens, --max_length "
              "and --slots only in worlds that the run was trained on), else that of train.py "
              "--help")
    cfg = read_flags(EvalConfig, argv, "eval.py", __doc__.split("\n\n")[0], epilog)

    run = run_of(cfg.model)
    trained_on = list(mixture(run["env"])) if run else []
    if not cfg.env:
        cfg.env = default_world(trained_on)

    # The run's settings and the presets. In a mixture each world has limits of its own. The limits
    # of a run that was not trained on this world are those of other worlds.
    default = presets(cfg.model, cfg.env)
    default |= {"data": "", "agent": "react", "agent_args": "", "history": None, "plan": False,
                "reflect": False}
    own = run | run.get("worlds", {}).get(cfg.env, {})
    if cfg.env not in trained_on:
        own = {name: value for name, value in run.items()
               if name not in (*LIMITS, "slots", "data", "action_format")}

    # Keyword arguments of the world. Those of the preset are for a world in this process. The run's
    # own are taken only if it was trained on this world and changed the preset's.
    preset_env_args = "" if cfg.env_url else default["env_args"]
    run_has_its_own = cfg.env in trained_on and own.get("env_args") != default["env_args"]
    if cfg.env_args is None and run_has_its_own:  # a mixture's may name other worlds, too
        parts = own.get("env_args", preset_env_args).split()
        cfg.env_args = " ".join(part for part in parts if part.startswith(f"{cfg.env}."))
    elif cfg.env_args is None:
        cfg.env_args = preset_env_args
    elif cfg.env_args:  # an empty --env_args drops the preset's, too
        cfg.env_args = merge_env_args(cfg.env_args, preset_env_args)

    for name in TAKEN_FROM_RUN:
        if getattr(cfg, name) is None:
            setattr(cfg, name, own.get(name, default[name]))
    cfg.prompt_texts = run.get("prompt_texts", {})
    if cfg.prompts is not None:
        cfg.prompt_texts = read_prompts(cfg.prompts, [cfg.env])
    if is_served(cfg):
        cfg.slots = min(cfg.slots, MAX_SERVED_SLOTS)
    if cfg.arrival_order is None:
        cfg.arrival_order = bool(cfg.env_url)

    # A run's horizon says something only about the worlds that it was trained on.
    if not cfg.horizon:
        known = cfg.env in trained_on
        cfg.horizon = str(last_horizon(own, cfg.env) if known else default["eval_horizon"])
    check_eval_config(cfg)
    return cfg


def default_world(trained_on: list[str]) -> str:
    """The world that a run was trained on; BabyAI without a run. Raises ValueError for several."""
    if len(trained_on) > 1:
        raise ValueError(f"the run was trained on {', '.join(trained_on)}; "
                         "choose one of them with --env")
    return trained_on[0] if trained_on else "babyai"


def last_horizon(run: dict, world: str) -> int:
    """The horizon that a run's training on this world ends with. run: its config.json, with the
    world's own settings."""
    if "rounds" in run:
        return run["rounds"][-1]
    return schedule.parse_rounds(run["horizon"], world)[-1]  # an older run


def is_served(cfg: EvalConfig) -> bool:
    """Whether the model is behind a server (openai:NAME)."""
    return cfg.model.startswith("openai:")


def options_of_world(cfg: EvalConfig) -> dict[str, str]:
    """The keyword arguments of the evaluated world."""
    return envs.env_options(cfg.env_args, [cfg.env]).get(cfg.env, {})


# ---- what is refused before anything is played; each raises ValueError with one line ----


def check_eval_config(cfg: EvalConfig) -> None:
    """Everything that can be known to be wrong before anything is played."""
    urls = servers(cfg.env_url, [cfg.env])[cfg.env]
    envs.check_name(cfg.env, urls)
    check_ranges(cfg)
    options = options_of_world(cfg)
    schedule.parse_rounds(cfg.horizon, cfg.env)
    load_agent(cfg.agent, settings_of(cfg.agent_args, cfg.plan, cfg.reflect))
    check_item_count(cfg)
    check_model_flags(cfg)
    check_output_files(cfg)
    if is_served(cfg):
        check_served(cfg.base_url)
    envs.check_env(cfg.env, urls, **options)  # last, as it may take a while


def check_item_count(cfg: EvalConfig) -> None:
    """The split has as many items as --items says, or at least one."""
    wanted = cfg.items or 1
    count = len(pick_items(cfg))
    if count < wanted:
        raise ValueError(f"--items {wanted}: the split '{cfg.split}' has only {count}")


def check_model_flags(cfg: EvalConfig) -> None:
    """--model, and the flags that belong to models here or to models on a server."""
    if not is_served(cfg):
        if cfg.base_url:
            raise ValueError("--base_url is for --model openai:NAME")
        rl.model_path(cfg.model)
        return
    # The result file contains the URL, so the URL must not contain a password.
    if not cfg.base_url.startswith(("http://", "https://")) or "@" in cfg.base_url:
        raise ValueError("--model openai:NAME needs --base_url http://host:port/v1, without a "
                         "password: a key is taken from OPENAI_API_KEY")
    flags = ("top_k", "system", "chat_args", "chat_template")
    if any(getattr(cfg, flag) for flag in flags) or cfg.engine != "ragged" or not cfg.graphs:
        raise ValueError("--top_k, --engine, --graphs, --system, --chat_args and "
                         "--chat_template are for models that run here")


def check_served(base_url: str) -> None:
    """A server answers at --base_url, whatever it says. Raises ValueError, after 10 s at most, if
    there is none, and for a key that cannot be sent."""
    ServedModel("", base_url)
    try:
        requests.get(base_url, timeout=(5, 5), stream=True).close()
    except (requests.RequestException, ValueError) as e:
        raise ValueError(f"no server answers at {base_url} ({type(e).__name__})") from e


def check_output_files(cfg: EvalConfig) -> None:
    """--out and --trajectories can be written: better known now than after hours of playing."""
    for name in (cfg.out, cfg.trajectories):
        if not name:
            continue
        path = Path(name).absolute()
        if path.is_dir():
            raise ValueError(f"cannot write {path}: it is in the way")
        above = next(parent for parent in path.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise ValueError(f"cannot write {path}: {above} is in the way")
    if cfg.out and cfg.trajectories:
        taken = [Path(name).absolute() for name in (cfg.out, cfg.out + ".part")]
        if Path(cfg.trajectories).absolute() in taken:
            raise ValueError(f"--trajectories {cfg.trajectories} is the file of --out; "
                             "give it another name")


# ---- items ----


def pick_items(cfg: EvalConfig) -> list[str]:
    """The items of the split; with --items the first of them in an order drawn from --seed."""
    names = envs.items(cfg.env, cfg.split, cfg.data or None)
    if cfg.items is None:
        return names
    order = np.random.default_rng(cfg.seed).permutation(len(names))
    return [names[i] for i in order[:cfg.items]]


# ---- playing ----


# Flags that may differ when a stopped evaluation goes on: how fast it is played, and where.
MAY_CHANGE = ("slots", "deadline", "create_deadline", "env_url")


class PartFile:
    """The finished trajectories of an evaluation that is under way, in the file OUT.part.

    Its first line says what is evaluated, each of the others is a horizon and a trajectory.
    """

    def __init__(self, cfg: EvalConfig, config: dict):
        """Read what an evaluation that was stopped has left. Without --out nothing is kept.

        config: what it takes to repeat the evaluation. Raises ValueError if the file belongs to an
        evaluation with another one; the flags in MAY_CHANGE may differ.
        """
        self.path = Path(cfg.out + ".part") if cfg.out else None
        self.horizons = schedule.parse_rounds(cfg.horizon, cfg.env)
        self.played: dict[int, list[Trajectory]] = {horizon: [] for horizon in self.horizons}
        settings = {k: v for k, v in config.items() if k not in ("date", *MAY_CHANGE)}
        self.head = json.dumps(settings | {"horizon": self.horizons}) + "\n"
        if self.path and self.path.exists():
            self._read()

    def _read(self):
        lines = self.path.read_text().splitlines(keepends=True)
        if lines[:1] != [self.head]:
            raise ValueError(f"{self.path} is of an evaluation with another model, other items or "
                             "flags: remove it, or give another --out")
        # A sample of an incomplete item may have been played again: its last trajectory counts.
        played = {horizon: {} for horizon in self.horizons}
        if not lines[-1].endswith("\n"):  # the process ended while it wrote this line
            self.path.write_text("".join(lines[:-1]))
        for number, line in enumerate(lines[1:], 2):
            if not line.endswith("\n"):
                break
            try:
                row = json.loads(line)
                t = Trajectory(**row["trajectory"])
                played[row["horizon"]][t.item, t.sample] = t
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"line {number} of {self.path} is damaged: delete it") from e
        self.played = {horizon: list(own.values()) for horizon, own in played.items()}
        count = sum(map(len, self.played.values()))
        print(f"eval.py: goes on from {count} trajectories in {self.path}", file=sys.stderr)

    def add(self, horizon: int, trajectory: Trajectory) -> None:
        """Append a trajectory. One whose environment failed is left out: it will be tried again.
        So is one whose first prompt does not fit."""
        if not self.path or trajectory.status == Status.ENV_ERROR or not trajectory.turns:
            return
        if not self.path.exists():
            write_file(self.path, self.head)
        with self.path.open("a") as f:
            f.write(json.dumps({"horizon": horizon, "trajectory": trajectory.to_json()}) + "\n")

    def remove(self) -> None:
        """Delete the file: the evaluation is complete."""
        if self.path:
            self.path.unlink(missing_ok=True)


def play_horizons(cfg: EvalConfig, items: list[str],
                  part: PartFile) -> dict[int, list[Trajectory]]:
    """Play the items at each horizon of --horizon -> horizon -> its trajectories.

    Raises ValueError if nothing can be played with these settings, ModelError if the model's server
    fails, AllFailed if every environment fails. After the first two, trajectories that were
    complete are in --trajectories.
    """
    policy, tokenizer = load_model(cfg)
    if is_served(cfg) and any(part.played.values()):
        policy.has_replied = True  # before this evaluation was stopped
    config = RolloutConfig.from_flags(cfg)
    urls = servers(cfg.env_url, [cfg.env])
    played = {}
    with EnvPool(urls, options={cfg.env: options_of_world(cfg)}) as pool:
        for horizon in part.horizons:
            try:
                trajectories = evaluate(policy, tokenizer, pool, items, horizon, config, cfg.engine,
                                        part.played[horizon], partial(part.add, horizon))
            except (ValueError, ModelError) as e:
                complete = getattr(e, "played", [])
                if complete:  # a server's replies may have cost money
                    both = {(t.item, t.sample): t for t in [*part.played[horizon], *complete]}
                    complete = list(both.values())
                    save_trajectories(cfg, played | {horizon: complete}, keep_older=True)
                raise
            if all(t.status == Status.ENV_ERROR for t in trajectories):
                raise AllFailed("nothing to report, every environment failed; the first: "
                                + trajectories[0].error)
            if not any(t.turns for t in trajectories):
                raise ValueError(f"--max_length is {cfg.max_length}: no first prompt fits")
            played[horizon] = trajectories
    return played


class AllFailed(RuntimeError):
    """Every environment failed, so there is no result."""


def load_model(
    cfg: EvalConfig,
) -> "tuple[PreTrainedModel | ServedModel, PreTrainedTokenizerBase | None]":
    """-> the model and its tokenizer. A served model has no tokenizer here."""
    if is_served(cfg):
        name = cfg.model.removeprefix("openai:")
        return ServedModel(name, cfg.base_url, cfg.temperature, cfg.top_p, cfg.max_tokens), None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = rl.load_tokenizer(cfg.model, cfg.chat_template)
    tokenizer.tried_template = try_template(tokenizer, cfg.system, cfg.chat_args)
    note_history(Chat(tokenizer, cfg.history))
    model = rl.load_model(cfg.model, device, getattr(torch, cfg.dtype))
    find_paths(model, cfg.dtype)
    rl.check_length(model.config, cfg.max_length, cfg.model)
    return model, tokenizer


def evaluate(policy: "PreTrainedModel | ServedModel", tokenizer: PreTrainedTokenizerBase | None,
             pool: EnvPool, items: list[str], horizon: int, config: RolloutConfig,
             engine: str = "ragged", finished: Sequence[Trajectory] = (),
             save: Callable[[Trajectory], None] | None = None) -> list[Trajectory]:
    """Play every item `config.samples` times under a progress bar.

    tokenizer: None for a `ServedModel`. engine: "ragged" or "hf", for models that run here.
    finished: trajectories played before; an item that has all of its samples is not played again.
    save: called with each new trajectory. -> the trajectories in the order of items; `group` is the
    item's place. Raises ValueError for a bad item, ModelError if the model's server fails.
    """
    samples_of = Counter(t.item for t in finished)
    kept = [t for t in finished if samples_of[t.item] == config.samples]
    wins = [t.success for t in kept]
    places = {item: place for place, item in enumerate(items)}
    items = [item for item in items if samples_of[item] < config.samples]
    played = []
    total = len(places) * config.samples
    with tqdm(total=total, initial=len(kept), desc=f"horizon {horizon}", delay=1, leave=False,
              dynamic_ncols=True) as bar:
        def on_end(t):
            t.group = places[t.item]
            if save:
                save(t)
            if t.status != Status.ENV_ERROR:
                wins.append(t.success)
                bar.set_postfix_str(f"success {np.mean(wins):.2f}", refresh=False)
            bar.update()

        if isinstance(policy, ServedModel):
            played = play_served(policy, pool, items, horizon, config, on_end)
        elif items:
            played = rollout(policy, tokenizer, pool, items, horizon, config,
                             engine=engine, on_end=on_end)
    return sorted([*kept, *played], key=lambda t: (places[t.item], t.sample))


# ---- playing with a model behind an OpenAI-compatible server ----

REFUSED = "the model's server refused: "  # how the error of a refused conversation begins


class ModelError(RuntimeError):
    """The model's server failed. Nothing is known about the model, so the evaluation ends."""


class ConversationRefused(RuntimeError):
    """The server refuses to continue this conversation (because of a content filter, say)."""


class TooLong(ConversationRefused):
    """The server takes no conversation of this length."""


class Reply(NamedTuple):
    """What a served model wrote."""

    text: str | None = None  # None: there is no reply yet
    cut: bool = False  # whether it ended at max_tokens
    tokens: int = 0  # of the whole conversation; 0 if the server does not say


class Failure(NamedTuple):
    """Why a request brought no reply."""

    reason: str
    status: int = 0  # the HTTP status; 0 if no answer came
    body: str = ""  # the answer's text
    retry_after: float = 0.0  # seconds that the server asks to wait

    @property
    def is_permanent(self) -> bool:
        """Whether the same request would fail again: the server says that the request is wrong."""
        timeout_or_busy = (408, 429)
        return 400 <= self.status < 500 and self.status not in timeout_or_busy


class ServedModel:
    """A model's name on a server, and how to sample from it.

    base_url: http://host:port/v1. timeout: seconds that the server has for a reply. tries: how
    often a failing server is asked before it is given up (8: two minutes).
    Raises ValueError for a key in OPENAI_API_KEY that cannot be sent.
    """

    def __init__(self, name: str, base_url: str, temperature: float = 1.0, top_p: float = 1.0,
                 max_tokens: int = 512, timeout: float = 300.0, tries: int = 8):
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.timeout = timeout
        self.tries = tries
        self.settings = {"model": name, "temperature": temperature, "top_p": top_p,
                         "max_tokens": max_tokens}
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("OPENAI_API_KEY holds a character that no key has")
        self.headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.unknown: set[str] = set()  # parameters that this server has turned down
        self.has_replied = False  # so the form of the requests is right

    def __call__(self, messages: list[dict[str, str]], seed: int = 0,
                 cancelled: threading.Event | None = None) -> Reply:
        """The model's reply to a conversation.

        A server that is busy (429) or fails (5xx) is asked again after a pause. Raises ModelError
        after `tries` failures, at once for a request that the server calls wrong, and when
        `cancelled` is set. Raises TooLong or ConversationRefused if the server turns down a
        conversation that it has taken so far.
        """
        cancelled = cancelled or threading.Event()
        failures = 0
        while not cancelled.is_set():
            body = self._request_body(messages, seed)
            answer = self._request(body)
            if isinstance(answer, Reply):
                self.has_replied = True
                return answer
            self._raise_if_refused(answer)
            turned_down = self._unknown_parameters(answer, body)
            if turned_down:
                self.unknown = self.unknown | turned_down
                continue
            failures += 1
            if answer.is_permanent or failures == self.tries:
                raise ModelError(f"{self.url}: {answer.reason}")
            cancelled.wait(self._pause(answer, failures))
        raise ModelError("the evaluation has ended")

    def _request_body(self, messages: list[dict[str, str]], seed: int) -> dict[str, Any]:
        """The parameters of a request, without those that the server does not know."""
        body = self.settings | {"messages": messages, "seed": seed}
        for name in self.unknown:
            value = body.pop(name)
            if name == "max_tokens":  # newer models of OpenAI's have another name for it
                body["max_completion_tokens"] = value
        return body

    def _request(self, body: dict[str, Any]) -> Reply | Failure:
        """Send one request and wait for the answer."""
        try:
            deadline = time.monotonic() + self.timeout
            with requests.post(self.url, json=body, headers=self.headers,
                               timeout=(10, self.timeout), stream=True) as response:
                data = read_body(response, self.url, deadline)
            text = self._without_key(data.decode(errors="replace"))
        except (requests.RequestException, envs.EnvError, OSError, ValueError) as e:
            return Failure(self._describe(e))
        status = response.status_code
        if status != 200:
            after = response.headers.get("Retry-After", "")  # seconds, or a date, which is ignored
            seconds = float(after) if after.isdecimal() else 0.0
            return Failure(f"status {status} {text[:200]}", status, text, seconds)
        try:
            return self._read_reply(data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            return Failure(self._describe(e), status, text)

    def _read_reply(self, data: bytes) -> Reply:
        """The reply in an answer. Raises one of many exceptions for JSON of another form."""
        answer = json.loads(data)
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError("the content is not text")
        usage = answer.get("usage") or {}
        cut = choice.get("finish_reason") == "length"
        return Reply(text, cut, int(usage.get("total_tokens") or 0))

    def _raise_if_refused(self, answer: Failure) -> None:
        """Raise TooLong or ConversationRefused if the server turned down this conversation. A
        server that has replied before accepts the form of the requests."""
        if not self.has_replied or answer.status not in (400, 413, 422):
            return
        # A refusal may quote the request, which holds "max_tokens".
        about_length = r"context.(length|window|size)|too long|\btokens\b"
        if answer.status == 413 or re.search(about_length, answer.body, re.I):
            raise TooLong(answer.reason)
        raise ConversationRefused(answer.reason)

    def _unknown_parameters(self, answer: Failure, body: dict[str, Any]) -> set[str]:
        """The parameters that the server turned down. Newer models of OpenAI's call max_tokens
        max_completion_tokens; other servers know no seed."""
        if answer.status not in (400, 422):
            return set()
        about_support = "support|permit|forbid|extra|un(known|recogni)"
        if not re.search(about_support, answer.body, re.I):
            return set()
        return {name for name in ("max_tokens", "seed") if name in body and name in answer.body}

    def _pause(self, answer: Failure, failures: int) -> float:
        """Seconds until the next try: twice as long after each failure, at random, so that threads
        do not all come back together, and never before the time in Retry-After."""
        backoff = min(60.0, 0.5 * 2 ** failures) * random.uniform(0.5, 1.5)
        return min(answer.retry_after, 300.0) + backoff

    def _describe(self, e: Exception) -> str:
        return f"{type(e).__name__}: {self._without_key(str(e))[:200]}"

    def _without_key(self, text: str) -> str:
        """The text with the key replaced: servers and libraries quote what they were sent."""
        return text.replace(self.key, "***") if self.key else text


def play_text(t: Trajectory, model: ServedModel, pool: EnvPool, horizon: int,
              config: RolloutConfig, cancelled: threading.Event) -> None:
    """Let a served model play a trajectory, in the calling thread, until its status says how it
    ended. It has messages but no tokens. When `cancelled` is set, the next request raises
    ModelError. Raises ModelError if the server fails, ValueError for an item that does not exist.
    """
    worker = pool.take(t.env)
    episode = Conversation(t, horizon, config, chat=None)
    reply = Reply()
    try:
        while t.status == Status.RUNNING:
            future = worker.call(episode.advance, reply.text, (), True, reply.cut)
            answer, error = worker.outcome(future, config.deadline, config.create_deadline)
            if error:
                episode.end(Status.ENV_ERROR, error)
            elif not episode.take(answer):
                pass
            elif reply.tokens >= episode.max_length:
                episode.end(Status.LENGTH)
            else:
                reply = next_reply(episode, model, worker.env.stop, cancelled)
    finally:
        episode.give_back(pool, worker, broken=t.status in (Status.ENV_ERROR, Status.RUNNING))


def next_reply(episode: Conversation, model: ServedModel, stop: Sequence[str],
               cancelled: threading.Event) -> Reply:
    """The model's reply, up to the world's stop strings. If the server refuses the conversation,
    the trajectory's status says so."""
    t = episode.trajectory
    # A server draws the same random numbers for the same seed, so each turn has its own seed.
    seed = zlib.crc32(f"{episode.config.seed} {t.item} {t.sample} {t.turns}".encode()) >> 1
    try:
        reply = model(episode.prompt, seed, cancelled)
    except TooLong:
        episode.end(Status.LENGTH)
        return Reply()
    except ConversationRefused as e:  # it says nothing about the model
        episode.end(Status.ENV_ERROR, f"{REFUSED}{e}")
        return Reply()
    # The world's stop string belongs to the reply. A server would leave out its own.
    text = reply.text
    for end in stop:
        if end in text:
            text = text.partition(end)[0] + end
    if reply.cut:
        t.cut_turns.append(t.turns + 1)
    return reply._replace(text=text)


def play_served(model: ServedModel, pool: EnvPool, items: list[str], horizon: int,
                config: RolloutConfig, on_end: Callable[[Trajectory], None] | None = None,
                ) -> list[Trajectory]:
    """As `rollout.rollout`, with a `ServedModel`: `config.slots` trajectories at a time, a thread
    each. How replies are sampled is the model's; `config` says the rest.

    -> the trajectories in the order of items. They have messages, but no tokens. Status "env_error"
    is also that of a conversation that the server refused. Raises ModelError if the model's server
    fails, ValueError for an item that does not exist. The exception's `played` has the trajectories
    that were complete.
    """
    cancelled = threading.Event()  # set when the evaluation ends early
    failures = []  # exceptions, the earliest first
    played = []
    reporting = threading.Lock()  # `on_end` writes files: one thread at a time

    def play_item(group: int, sample: int) -> Trajectory:
        try:
            t = play_with_retries(model, pool, items[group], group, sample, horizon, config,
                                  cancelled)
        except BaseException as e:
            # Cancel now: the caller waits in the order of items and would see this failure late.
            failures.append(e)
            cancelled.set()
            raise
        played.append(t)
        if on_end is not None:
            with reporting:
                on_end(t)
        return t

    executor = ThreadPoolExecutor(config.slots)
    try:
        futures = [executor.submit(play_item, group, sample)
                   for group in range(len(items)) for sample in range(config.samples)]
        return [future.result() for future in futures]
    except BaseException as e:
        cancelled.set()  # episodes under way end with their next request: the server may cost money
        first = failures[0] if failures else e
        executor.shutdown(cancel_futures=True)
        first.played = played
        raise first from None
    finally:
        executor.shutdown()


def play_with_retries(model: ServedModel, pool: EnvPool, item: str, group: int, sample: int,
                      horizon: int, config: RolloutConfig,
                      cancelled: threading.Event) -> Trajectory:
    """Play one trajectory, and again if its environment fails, `config.retries` times at most.
    A conversation that the server refused is not begun again."""
    for _ in range(config.retries + 1):
        t = Trajectory(item, split_item(item)[0], group=group, sample=sample)
        play_text(t, model, pool, horizon, config, cancelled)
        if t.status != Status.ENV_ERROR or t.error.startswith(REFUSED):
            break
    return t


# ---- statistics ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples succeeds, estimated without bias from c
    successes in n >= k samples: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    # Integers up to the one division, so that the result is exact for many samples, too.
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def powers(samples: int) -> list[int]:
    """The k of pass@k: powers of two and the number of samples: 6 -> [1, 2, 4, 6]."""
    return sorted({2 ** i for i in range(samples.bit_length())} | {samples})


def bootstrap(values: Sequence[float] | np.ndarray, seed: int,
              resamples: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the mean of `values`, which has one value an item: the percentiles 2.5
    and 97.5 of the means of resampled items.

    It has no width if all values are equal, and is a little too narrow for a handful of values.
    """
    values = np.asarray(values, float)
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, 1000):  # a thousand at a time, to bound the memory
        rows = min(1000, resamples - start)
        drawn = rng.integers(0, len(values), (rows, len(values)))
        means.append(values[drawn].mean(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


BASIC_MEASURES = ("success", "score", "turns")


def summarise(trajectories: list[Trajectory], categories: dict[str, str], ks: list[int],
              seed: int) -> dict:
    """-> {"success", "score", "turns", "valid_actions", "env_error", "avg@1", "avg@k",
    "pass@1" ... "pass@k", "ci95": {name: [low, high]},
    "categories": {category: {"items", "success", "score", "turns", "ci95"}},
    "items": {item: its success}}.

    categories: item -> category. ks: the k of pass@k. Every number is a mean over items of the mean
    over the item's samples. Trajectories whose environment failed are left out, and so is an item
    that has no others; only env_error, their share, counts them.

    valid_actions: the share of a trajectory's actions that were valid. avg@k: the mean success of k
    samples. Its expected value is the same for every k, so avg@1 and avg@k (k: the largest of ks)
    are both `success`, over all samples. pass@k: over the items with at least k samples; None if
    there is none. Raises ValueError if every environment failed.
    """
    played = {}  # item -> its trajectories whose environment did not fail
    failed = {}  # item -> for each of its trajectories, whether the environment failed
    for t in trajectories:
        has_failed = t.status == Status.ENV_ERROR
        failed.setdefault(t.item, []).append(has_failed)
        if not has_failed:
            played.setdefault(t.item, []).append(t)
    if not played:
        raise ValueError("nothing to summarise: every environment failed")

    columns = {name: means_of_items(name, played) for name in BASIC_MEASURES}
    columns["valid_actions"] = [np.mean([t.valid_actions / max(1, t.turns) for t in ts])
                                for ts in played.values()]
    columns["env_error"] = [np.mean(flags) for flags in failed.values()]
    for k in sorted({1, max(ks)}):
        columns[f"avg@{k}"] = columns["success"]
    for k in ks:
        columns[f"pass@{k}"] = [pass_at_k(len(ts), sum(t.success for t in ts), k)
                                for ts in played.values() if len(ts) >= k]

    result = {name: float(np.mean(column)) if column else None for name, column in columns.items()}
    result["ci95"] = {name: list(bootstrap(column, seed)) if column else None
                      for name, column in columns.items()}
    result["categories"] = summarise_categories(played, categories, seed)
    result["items"] = dict(zip(played, columns["success"]))
    return result


def summarise_categories(played: dict[str, list[Trajectory]], categories: dict[str, str],
                         seed: int) -> dict[str, dict]:
    """Category -> the number of its items that were played, and their means and interval."""
    result = {}
    for category in sorted({categories[item] for item in played if item in categories}):
        part = {item: ts for item, ts in played.items() if categories.get(item) == category}
        means = {name: float(np.mean(means_of_items(name, part))) for name in BASIC_MEASURES}
        interval = list(bootstrap(means_of_items("success", part), seed))
        result[category] = {"items": len(part), **means, "ci95": {"success": interval}}
    return result


def means_of_items(name: str, played: dict[str, list[Trajectory]]) -> list[float]:
    """For each item the mean of a trajectory's field."""
    return [float(np.mean([getattr(t, name) for t in ts])) for ts in played.values()]


# ---- the command ----


def result_config(cfg: EvalConfig, items: list[str]) -> dict:
    """What it takes to repeat the evaluation of `items`: the result's `config`, but for the
    horizon."""
    flags = {name: value for name, value in asdict(cfg).items()
             if name not in ("out", "trajectories", "horizon")}
    model_sha256 = template_sha256 = None  # of a served model nothing is known
    if not is_served(cfg):
        template = rl.load_tokenizer(cfg.model, cfg.chat_template).chat_template
        template_sha256 = hashlib.sha256(json.dumps(template).encode()).hexdigest()
        path = Path(rl.model_path(cfg.model))
        files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
        weights = hashlib.sha256()  # of all files, one after the other
        for path in files:
            with path.open("rb") as f:
                while block := f.read(2**20):
                    weights.update(block)
        model_sha256 = weights.hexdigest() if files else None
    return flags | {
        "model_sha256": model_sha256,
        "chat_template_sha256": template_sha256,
        "items": len(items),
        "items_sha256": hashlib.sha256("\n".join(items).encode()).hexdigest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_file(path: Path, text: str) -> None:
    """Write a file all at once. Its folder is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def save_trajectories(cfg: EvalConfig, played: dict[int, list[Trajectory]],
                      keep_older: bool = False) -> None:
    """Write the trajectories of each horizon to --trajectories, if it is given. A sweep has a file
    for each horizon. keep_older: a file that is there already gets another name, NAME.1 and so
    on."""
    if not cfg.trajectories:
        return
    for horizon, trajectories in played.items():
        path = Path(cfg.trajectories)
        if "," in cfg.horizon:
            path = path.with_name(f"{path.stem}.h{horizon}{path.suffix}")
        if keep_older and path.exists():
            names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trajectories(path, trajectories)


def tables(results: list[dict]) -> str:
    """For people: one result in full, or a line for each of several."""
    config = results[0]["config"]
    title = (f"{config['model']} on {config['env']} {config['split']}, "
             f"{config['items']} items x {config['samples']}")
    if len(results) > 1:
        return title + "\n" + sweep_table(results)

    result = results[0]
    rows = [["", "mean", "95 % interval"]]
    for name, interval in result["ci95"].items():
        rows.append([name, result[name], interval])
    text = f"{title}, horizon {config['horizon']}\n" + table(rows)
    if not result["categories"]:
        return text
    rows = [["category", "items", "success", "95 % interval", "score", "turns"]]
    for name, c in result["categories"].items():
        rows.append([name, c["items"], c["success"], c["ci95"]["success"], c["score"], c["turns"]])
    return f"{text}\n\n{table(rows)}"


def sweep_table(results: list[dict]) -> str:
    """A line for each horizon."""
    samples = results[0]["config"]["samples"]
    names = ["score", "turns", "valid_actions", "env_error", f"pass@{samples}"]
    rows = [["horizon", "success", "95 % interval", *names]]
    for r in results:
        measures = [r[name] for name in names]
        rows.append([r["config"]["horizon"], r["success"], r["ci95"]["success"], *measures])
    return table(rows)


def table(rows: list[list]) -> str:
    """Columns with two spaces between them: the first flush left, the others flush right."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(*cells)]
    lines = []
    for first, *rest in cells:
        others = [text.rjust(width) for text, width in zip(rest, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *others]))
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as text: an interval, a number, a word, or a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        low, high = value
        return f"{low:.3f} .. {high:.3f}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def quieten_libraries() -> None:
    """Let transformers and its hub client report errors only."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # It reports every attempt to reach a hub that is not there.
    getLogger("huggingface_hub").setLevel(ERROR)


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 for bad usage, 1 if every environment, the model, its server
    or the disk failed. One line on stderr says why."""
    quieten_libraries()
    try:
        cfg = parse_eval_config(argv)
        items = pick_items(cfg)
        shared_config = result_config(cfg, items)
        categories = envs.categories(cfg.env, cfg.data or None) if cfg.split == "test" else {}
        part = PartFile(cfg, shared_config)
        played = play_horizons(cfg, items, part)
        results = results_of(cfg, played, categories, shared_config)
        write_results(cfg, results, played)
        part.remove()
    except (ValueError, ModelError, AllFailed, FloatingPointError, OSError) as e:
        print("eval.py: " + " ".join(str(e).split()), file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    except (MemoryError, RuntimeError) as e:
        if not rl.is_lack_of_resources(e):
            raise
        print("eval.py: no memory or no thread left: " + " ".join(str(e).split())
              + "; a smaller --slots takes less", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = ": the same command goes on" if cfg.out else ", and nothing is kept without --out"
        print(f"eval.py: stopped{again}", file=sys.stderr)
        return 130
    print(tables(results))
    return 0


def results_of(cfg: EvalConfig, played: dict[int, list[Trajectory]], categories: dict[str, str],
               shared_config: dict) -> list[dict]:
    """A result for each horizon."""
    results = []
    for horizon, trajectories in played.items():
        statistics = summarise(trajectories, categories, powers(cfg.samples), cfg.seed)
        results.append(statistics | {"config": shared_config | {"horizon": horizon}})
    return results


def write_results(cfg: EvalConfig, results: list[dict],
                  played: dict[int, list[Trajectory]]) -> None:
    """Write --out and --trajectories, where they are given."""
    if cfg.out:
        result = results[0]
        if len(results) > 1:
            config = results[0]["config"] | {"horizon": list(played)}
            result = {"sweep": results, "config": config}
        write_file(Path(cfg.out), json.dumps(result, indent=1) + "\n")
    save_trajectories(cfg, played)


if __name__ == "__main__":
    sys.exit(main())
