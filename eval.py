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
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, UTC
from logging import ERROR, getLogger
from pathlib import Path

# config comes before torch: it sets how idle threads wait.
from config import Setup, check_worlds, presets, read_flags, read_prompts, run_of, servers
import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import envs
import rl
import schedule
from agent import Chat, hash_of_sources, note_history, try_template
from envs import ABOVE_0, NOT_NEGATIVE, EnvError, EnvPool, flag
from models.check import find_paths
from models.served import ModelError, ServedModel, play_served
from rollout import Rollouts, rollout
from trajectory import Status, Trajectory, read_objects, read_trajectories, to_text
from trajectory import write_atomically, write_trajectories
from worlds.wire import WireSession

# ---- flags ----


@dataclass
class EvalConfig(Setup):
    """the evaluation"""

    # trajectories of each item: the k of avg@k and pass@k
    samples: int = flag(1, ABOVE_0, first=True)
    # test (held out) | train
    split: str = flag("test", ("train", "test"))
    # number of items, drawn from the split by --seed; default: all
    items: int | None = flag(None, ABOVE_0)
    # for --model openai:NAME: an OpenAI-compatible server, http://host:port/v1; a key is taken from
    # OPENAI_API_KEY
    base_url: str = flag("")
    # nucleus sampling
    top_p: float = flag(1.0, ABOVE_0)
    # sample from the k likeliest tokens; 0: off
    top_k: int = flag(0, NOT_NEGATIVE)
    # JSON file for the result
    out: str = flag("", first=True)
    # JSON-lines file for the trajectories; in a sweep .hHORIZON is put into its name. An evaluation
    # that was stopped goes on from it, by the same command
    trajectories: str = flag("")


# Settings whose default is the run's; those of `OF_WORLD` only in a world that it was trained on.
OF_RUN = ("parse", "agent", "agent_args", "history", "dtype")
OF_WORLD = ("max_tokens", "max_length", "slots", "data", "action_format")


def parse_eval_config(argv: list[str] | None = None) -> EvalConfig:
    """The command line, checked and with every default filled in: a setting that is not given is
    the run's whose folder holds the model, or else train.py's. Raises ValueError for what would go
    wrong in silence, or after hours of playing, and OSError if a model's server does not answer."""
    given = read_flags(EvalConfig, argv, "eval.py", __doc__.split("\n\n")[0])
    model = given.get("model", EvalConfig.model)
    run = run_of(model)
    trained_on = run.get("worlds", {})
    env = given.get("env") or [*trained_on, EvalConfig.env][0]
    if len(trained_on) > 1 and not given.get("env"):
        raise ValueError(f"the run was trained on {', '.join(trained_on)}: choose --env")
    default = presets(model, env) | {"arrival_order": bool(given.get("env_url"))}
    default["horizon"] = str(default["eval_horizon"])
    default |= {name: run[name] for name in OF_RUN if run}
    env_args = default.get("env_args", "")
    if env in trained_on:
        own = run | trained_on[env]
        default |= {name: own[name] for name in OF_WORLD} | {"horizon": str(own["rounds"][-1])}
        env_args = " ".join(re.findall(rf"(?<!\S){env}\.\S+", own["env_args"]))
    # They are for a world in this process, but OpenEnv's. An empty --env_args drops them.
    if given.get("env_args") == "" or given.get("env_url") and env != "openenv":
        env_args = ""
    given["env_args"] = f"{env_args} {given.get('env_args', '')}".strip()
    if "prompts" in given:
        default["prompt_texts"] = read_prompts(given["prompts"], [env])
    values = default | given | {"env": env}
    cfg = EvalConfig(**{f.name: values[f.name] for f in fields(EvalConfig) if f.name in values})

    out = Path(cfg.out)
    if cfg.out and (out.is_dir() or out.absolute() == Path(cfg.trajectories).absolute()):
        raise ValueError(f"--out {cfg.out} is a folder, or the file of --trajectories")
    if not is_served(cfg) and cfg.base_url:
        raise ValueError("--base_url is for --model openai:NAME")
    if is_served(cfg):
        # The result file contains the URL, so the URL must not contain a password.
        if not cfg.base_url.startswith("http") or "@" in cfg.base_url:
            raise ValueError("openai:NAME needs --base_url http://host:port/v1, without a password")
        if cfg.top_k or cfg.system or cfg.chat_args or cfg.chat_template or cfg.engine == "hf":
            raise ValueError("a served model has no --top_k, --system, --chat_* and engine=hf")
        WireSession().get(cfg.base_url, timeout=5, stream=True).close()
    check_worlds(cfg, [cfg.env])
    return cfg


def is_served(cfg: EvalConfig) -> bool:
    """Whether the model is behind a server (openai:NAME)."""
    return cfg.model.startswith("openai:")


# ---- items ----


def pick_items(cfg: EvalConfig) -> list[str]:
    """The items of the split; with --items the first of them in an order drawn from --seed. Raises
    ValueError if there are fewer."""
    names = envs.items(cfg.env, cfg.split, cfg.data or None)
    if cfg.items is None:
        return names
    if cfg.items > len(names):
        raise ValueError(f"--items {cfg.items}: the split '{cfg.split}' has only {len(names)}")
    order = np.random.default_rng(cfg.seed).permutation(len(names))
    return [names[i] for i in order[:cfg.items]]


# ---- playing ----


Model = PreTrainedModel | ServedModel
# Flags that may differ when a stopped evaluation goes on: how fast it is played, and where.
MAY_CHANGE = ("slots", "deadline", "create_deadline", "env_url")


class Record:
    """The trajectories played at one horizon, in the file of --trajectories, if it is given.

    In a sweep the file's name has the horizon. The field `evaluation` of each line is a hash of
    what is evaluated. While it is under way each trajectory is appended when it has ended.
    """

    def __init__(self, cfg: EvalConfig, config: dict, horizon: int):
        """Read what an evaluation that was stopped has left.

        config: what it takes to repeat the evaluation. Raises ValueError for a file of an
        evaluation with another one; the flags in MAY_CHANGE may differ.
        """
        settings = {k: v for k, v in config.items() if k not in ("date", *MAY_CHANGE)}
        settings["horizon"] = horizon
        self.evaluation = sha256(json.dumps(settings, sort_keys=True))[:16]
        self.finished: list[Trajectory] = []
        self.path = Path(cfg.trajectories) if cfg.trajectories else None
        if self.path and "," in cfg.horizon:
            self.path = self.path.with_stem(f"{self.path.stem}.h{horizon}")
        if not self.path or not self.path.exists():
            return
        if any(row.get("evaluation") != self.evaluation for row in read_objects(self.path)[0]):
            raise ValueError(f"{self.path} is of an evaluation with another model, items or flags")
        # A sample of an incomplete item may have been played again: its last trajectory counts.
        # One whose environment failed is played again.
        found = {(t.item, t.sample): t for t in read_trajectories(self.path)}
        self.finished = [t for t in found.values() if t.status != Status.ENV_ERROR]
        self.write(self.finished)  # without half a line at the end
        print(f"eval.py: goes on from {len(self.finished)} trajectories in {self.path}",
              file=sys.stderr)

    def add(self, trajectory: Trajectory) -> None:
        """Append a trajectory."""
        if self.path:
            try:
                with self.path.open("a") as f:
                    print(to_text(trajectory.to_json() | {"evaluation": self.evaluation}), file=f)
            except OSError as e:  # of a full disk, it does not name the file
                raise OSError(f"{e}; the whole lines of {self.path} are kept, and the same command "
                              "goes on from them") from e

    def write(self, trajectories: list[Trajectory]) -> None:
        """Replace what the file holds."""
        if self.path:
            write_trajectories(self.path, trajectories, evaluation=self.evaluation)


def load_model(cfg: EvalConfig) -> tuple[Model, PreTrainedTokenizerBase | None]:
    """-> the model and its tokenizer. A served model has no tokenizer here."""
    if is_served(cfg):
        sampling = {name: getattr(cfg, name) for name in ("temperature", "top_p", "max_tokens")}
        return ServedModel(cfg.model.removeprefix("openai:"), cfg.base_url, **sampling), None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = rl.load_tokenizer(cfg.model, cfg.chat_template)
    tokenizer.tried_template = try_template(tokenizer, cfg.system, cfg.chat_args)
    note_history(Chat(tokenizer, cfg.history))
    model = rl.load_model(cfg.model, device, getattr(torch, cfg.dtype))
    find_paths(model, cfg.dtype)
    rl.check_length(model.config, cfg.max_length, cfg.model, len(tokenizer))
    return model, tokenizer


def evaluate(policy: Model, tokenizer: PreTrainedTokenizerBase | None, pool: EnvPool,
             items: list[str], horizon: int, config: Rollouts,
             finished: Sequence[Trajectory] = (),
             save: Callable[[Trajectory], None] = lambda t: None) -> list[Trajectory]:
    """Play every item `config.samples` times under a progress bar.

    tokenizer: None for a `ServedModel`.
    finished: trajectories played before; an item that has all of its samples is not played again.
    save: called with each new trajectory. -> the trajectories in the order of items; `group` is the
    item's place. Raises ValueError for a bad item, ModelError if the model's server fails.
    """
    samples_of = Counter(t.item for t in finished)
    kept = [t for t in finished if samples_of[t.item] == config.samples]
    wins = [t.success for t in kept]
    played = []
    missing = [item for item in items if samples_of[item] < config.samples]
    with tqdm(total=len(items) * config.samples, initial=len(kept), desc=f"horizon {horizon}",
              delay=1, leave=False, dynamic_ncols=True) as bar:
        def on_end(t):
            t.group = items.index(t.item)
            save(t)
            if t.status != Status.ENV_ERROR:
                wins.append(t.success)
                bar.set_postfix_str(f"success {np.mean(wins):.2f}", refresh=False)
            bar.update()

        if isinstance(policy, ServedModel):
            policy.has_replied |= bool(finished)
            played = play_served(policy, pool, missing, horizon, config, on_end)
        elif missing:
            played = rollout(policy, tokenizer, pool, missing, horizon, config, on_end=on_end)
    return sorted([*kept, *played], key=lambda t: (t.group, t.sample))


# ---- statistics ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples succeeds, estimated without bias from c
    successes in n >= k samples: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    # Integers up to the one division, so that the result is exact for many samples, too.
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def bootstrap(values: Sequence[float] | np.ndarray, seed: int, resamples: int = 10_000,
              is_share: bool = True) -> list[float]:
    """The 95 % interval of the mean of `values`, which has one value an item: the percentiles 2.5
    and 97.5 of the means of resampled items. resamples: a multiple of 1000.

    It is a little too narrow for a handful of values. Where all are equal, resampling would give no
    width: there it is Wilson's interval, if the values are shares. is_share: False for a count,
    such as turns, which may be 1 for every item without being a share.
    """
    values = np.asarray(values, float)
    if is_share and values.min() == values.max() and 0 <= values[0] <= 1:
        p, z2 = values[0], 1.96**2 / len(values)
        half = (p * (1 - p) * z2 + z2**2 / 4) ** 0.5
        return [(p + z2 / 2 + side) / (1 + z2) for side in (-half, half)]
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples // 1000):  # a thousand at a time, to bound the memory
        means += values[rng.integers(0, len(values), (1000, len(values)))].mean(1).tolist()
    return np.percentile(means, [2.5, 97.5]).tolist()


def summarise(trajectories: list[Trajectory], categories: dict[str, str], samples: int,
              seed: int) -> dict:
    """-> {"success", "score", "turns", "valid_actions", "env_error", "avg@1", "avg@k",
    "pass@1" ... "pass@k", "ci95": {name: [low, high]},
    "categories": {category: {"items", "success", "score", "turns", "ci95"}},
    "items": {item: its success}}.

    categories: item -> category. Every number is a mean over items of the mean over the item's
    samples. Trajectories whose environment failed are left out, and so is an item that has no
    others; only env_error, their share, counts them. Raises EnvError if there are no others at
    all.

    valid_actions: the share of a trajectory's actions that were valid. avg@k: the mean success of k
    samples. Its expected value is the same for every k, so avg@1 and avg@k (k: `samples`) are both
    `success`, over all samples. pass@k, for powers of two and `samples`: over the items with at
    least k samples; None if there is none.
    """
    failed = defaultdict(list)  # item -> for each of its trajectories, whether the world failed
    played = defaultdict(list)  # item -> its other trajectories
    for t in trajectories:
        failed[t.item].append(t.status == Status.ENV_ERROR)
        if t.status != Status.ENV_ERROR:
            played[t.item].append(t)
    if not played:
        raise EnvError(f"every environment failed; the first: {trajectories[0].error}")

    measures = {"success": lambda t: t.success, "score": lambda t: t.score,
                "turns": lambda t: t.turns,
                "valid_actions": lambda t: t.valid_actions / max(1, t.turns)}
    columns = {name: [float(np.mean([*map(measure, ts)])) for ts in played.values()]
               for name, measure in measures.items()}
    columns["env_error"] = [np.mean(flags) for flags in failed.values()]
    columns |= {f"avg@{k}": columns["success"] for k in (1, samples)}
    for k in sorted({2 ** i for i in range(samples.bit_length())} | {samples}):
        columns[f"pass@{k}"] = [pass_at_k(len(ts), sum(t.success for t in ts), k)
                                for ts in played.values() if len(ts) >= k]

    result = {name: float(np.mean(values)) if values else None for name, values in columns.items()}
    result["ci95"] = {name: bootstrap(values, seed, is_share=name != "turns") if values else None
                      for name, values in columns.items()}
    result["categories"] = {}
    kinds = [categories.get(item) for item in played]
    for category in sorted({*kinds} - {None}):
        part = {name: [x for x, kind in zip(columns[name], kinds) if kind == category]
                for name in ("success", "score", "turns")}
        means = {name: float(np.mean(values)) for name, values in part.items()}
        interval = {"success": bootstrap(part["success"], seed)}
        result["categories"][category] = {"items": len(part["turns"]), **means, "ci95": interval}
    result["items"] = dict(zip(played, columns["success"]))
    return result


# ---- the command ----


def result_config(cfg: EvalConfig, items: list[str]) -> dict:
    """What it takes to repeat the evaluation of `items`: the result's `config`, but for the
    horizon."""
    flags = {name: value for name, value in asdict(cfg).items()
             if name not in ("out", "trajectories", "horizon")}
    model_sha256 = template_sha256 = None  # of a served model nothing is known
    if not is_served(cfg):
        template = rl.load_tokenizer(cfg.model, cfg.chat_template).chat_template
        template_sha256 = sha256(json.dumps(template))
        path = Path(rl.model_path(cfg.model))
        files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
        weights = hashlib.sha256()  # of all files, one after the other
        for path in files:
            weights.update(np.memmap(path, mode="r"))
        model_sha256 = weights.hexdigest() if files else None
    return flags | {
        "model_sha256": model_sha256, "chat_template_sha256": template_sha256,
        "agent_sha256": hash_of_sources(vars(cfg)),
        "items": len(items), "items_sha256": sha256("\n".join(items)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def sha256(text: str) -> str:
    """Of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def tables(results: list[dict]) -> str:
    """For people: one result in full, or a line for each of several horizons."""
    config = results[0]["config"]
    title = "{model} on {env} {split}, {items} items x {samples}".format(**config)
    if len(results) > 1:
        names = ["score", "turns", "valid_actions", "env_error", f"pass@{config['samples']}"]
        rows = [["horizon", "success", "95 % interval", *names],
                *([r["config"]["horizon"], r["success"], r["ci95"]["success"], *map(r.get, names)]
                  for r in results)]
        return f"{title}\n{table(rows)}"

    (result,) = results
    rows = [["", "mean", "95 % interval"],
            *([name, result[name], interval] for name, interval in result["ci95"].items())]
    text = f"{title}, horizon {config['horizon']}\n{table(rows)}"
    rows = [["category", "items", "success", "95 % interval", "score", "turns"],
            *([name, c["items"], c["success"], c["ci95"]["success"], c["score"], c["turns"]]
              for name, c in result["categories"].items())]
    return f"{text}\n\n{table(rows)}" if result["categories"] else text


def table(rows: list[list]) -> str:
    """Columns with two spaces between them: the first flush left, the others flush right. An
    interval is a list, a dash stands for None."""
    def cell(value):
        if isinstance(value, list):
            return " .. ".join(map(cell, value))
        return f"{value:.3f}" if isinstance(value, float) else str("-" if value is None else value)

    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                     for row in cells)


def run(cfg: EvalConfig) -> list[dict]:
    """Play the items at each horizon of --horizon, and write --out -> a result for each horizon."""
    items = pick_items(cfg)
    config = result_config(cfg, items)
    records = {horizon: Record(cfg, config, horizon)
               for horizon in schedule.parse_rounds(cfg.horizon, [cfg.env])[cfg.env]}
    categories = envs.categories(cfg.env, cfg.data or None) if cfg.split == "test" else {}
    policy, tokenizer = load_model(cfg)
    options = envs.env_options(cfg.env_args, [cfg.env])
    for path in (cfg.out, cfg.trajectories):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    results = []
    with EnvPool(servers(cfg.env_url, [cfg.env]), options=options) as pool:
        for horizon, record in records.items():
            played = evaluate(policy, tokenizer, pool, items, horizon, cfg, record.finished,
                              record.add)
            statistics = summarise(played, categories, cfg.samples, cfg.seed)
            if not any(t.turns for t in played):
                raise ValueError(f"--max_length is {cfg.max_length}: no first prompt fits")
            record.write(played)
            results.append(statistics | {"config": config | {"horizon": horizon}})
    if cfg.out:
        sweep = {"sweep": results, "config": config | {"horizon": list(records)}}
        result = sweep if len(results) > 1 else results[0]
        write_atomically(Path(cfg.out), to_text(result, indent=1) + "\n")
    return results


def main(argv: list[str] | None = None) -> int:
    """The command -> its exit code: 2 for bad usage, 1 if every environment, the model, its server
    or the disk failed. One line on stderr says why."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in ("huggingface_hub", "urllib3"):  # they report every attempt to reach a server
        getLogger(name).setLevel(ERROR)
    try:
        print(tables(run(parse_eval_config(argv))))
        return 0
    except (ValueError, ModelError, EnvError, FloatingPointError, OSError, MemoryError) as e:
        print("eval.py: " + (" ".join(str(e).split()) or type(e).__name__), file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    except KeyboardInterrupt:
        print("eval.py: stopped; with --trajectories the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
