"""What a run reports: the lines at its start, a bar for a long rollout, a step's row of metrics,
and when training ends, cannot go on or does not learn."""

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trajectory import Trajectory

# ---- what is said while a run goes on ----

# The columns that are shown beside the bar of the training steps.
SHOWN = ("reward", "success", "turns", "horizon", "kl", "entropy", "tokens_per_second")


def banner(run: Any) -> str:
    """Five lines for the start of a training run, a `train.Run`."""
    cfg, policy = run.cfg, run.policy
    num_items = ", ".join(f"{len(items):,} items of {world}" for world, items in run.items.items())
    turns = f" or {cfg.turns:,} turns" if cfg.turns else ""
    return "\n".join([
        f"worlds     {num_items}; horizon {cfg.horizon} ({cfg.horizon_schedule})",
        f"model      {cfg.model}, {policy.num_parameters():,} parameters, trained: "
        f"{policy.num_parameters(only_trainable=True):,}, {cfg.dtype}, {run.device.type}, "
        f"processes: {run.num_ranks}",
        f"training   {cfg.algo}, step {run.step} to {cfg.steps}{turns}, each {cfg.items_per_step} "
        f"items x {cfg.rollouts_per_item} samples, learning rate {cfg.lr:g}",
        f"files      {cfg.out}/: metrics.jsonl, trajectories/, a checkpoint every {cfg.save_every} "
        f"steps; python view.py {cfg.out}",
        "stop       Ctrl-C saves; the same command with --resume goes on"])


def held_out_summary(rows: list[dict], last: dict[str, float]) -> str:
    """The held-out success at the run's first evaluation and after training -> text, one line for
    each world.

    rows: the run's rows of metrics. last: the columns of the last evaluation, "eval/success" or, in
    a mixture, "eval/success/babyai" ...
    """
    lines = []
    for key in columns_of("eval/success", last):
        world = key.removeprefix("eval/success").replace("/", " of ")
        first = next((f"{row[key]:.3f} at step {row['step']}, " for row in rows if key in row), "")
        lines.append(f"held-out success{world}: {first}{last[key]:.3f} after training")
    return "\n".join(lines)


def step_bar(start: int, end: int, rank: int) -> tqdm:
    """The bar of the training steps; without a terminal `show` writes a line a step instead."""
    return tqdm(range(start, end), initial=start, total=end, dynamic_ncols=True,
                disable=rank > 0 or not sys.stderr.isatty())


def show(bar: tqdm, row: dict, rank: int, names: Sequence[str] = SHOWN) -> None:
    """Show some columns of a step's row, and its share of failed environments if there is one."""
    names = [*names, "env_error"] if row.get("env_error") else names
    if not bar.disable:
        bar.set_postfix({name: row[name] for name in names})
    elif rank == 0:
        columns = ", ".join(f"{name} {row[name]:.3g}" for name in names)
        print(f"step {row['step']} of {bar.total}: {columns}", file=sys.stderr, flush=True)


@contextmanager
def rollout_bar(total: int, shown: bool) -> Iterator[Callable]:
    """A progress bar below the training bar during a rollout: finished trajectories, turns, sampled
    tokens per second. -> the function to pass to `rollout` as `on_step`.

    It appears after two seconds and is updated every second, or every minute if stderr is not a
    terminal.
    """
    with tqdm(total=total, desc="rollout", unit="trajectory", position=1, leave=False, delay=2,
              mininterval=1 if sys.stderr.isatty() else 60, miniters=0, dynamic_ncols=True,
              disable=not shown) as bar:

        def on_step(queue):
            played = [*queue.finished.values(), *(e.trajectory for e in queue.alive)]
            speed = queue.stats["busy"] / max(1, bar.format_dict["elapsed"])
            bar.set_postfix_str(f"{sum(t.turns for t in played)} turns {speed:.0f} tok/s",
                                refresh=False)
            bar.update(len(queue.finished) - bar.n)

        yield on_step


# ---- the numbers of a step ----


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Statistics of a step's trajectories. Failed environments are left out; their share is
    `env_error`. If all have failed, the row has only the shares of failures and the number of
    trajectories."""
    total = len(trajectories)
    played = [t for t in trajectories if t.status != "env_error"]
    # timeout | fault | crash
    kinds = Counter(t.error.split(":")[0] for t in trajectories if t.status == "env_error")
    common = {"env_error": kinds.total() / total, "trajectories": total}
    common |= {f"env_error/{kind}": kinds[kind] / total for kind in sorted(kinds)}
    if not played:
        return common

    turns = max(1, sum(t.turns for t in played))
    sampled_tokens = max(1, sum(sum(t.mask) for t in played))
    decided_tokens = max(1, sum(sum(t.decided()) for t in played))
    groups = {t.group for t in played}
    with_gradient = {t.group for t in played if np.any(t.advantage)}
    names = ("success", "score", "turns", "reward")
    row = {name: np.mean([getattr(t, name) for t in played]) for name in names} | {
        # An estimate of the entropy in nats a token: the mean of -log p over the sampled tokens,
        # those that were the only ones allowed left out.
        "entropy": -sum(sum(t.logprobs) for t in played) / decided_tokens,
        "valid_actions": sum(t.valid_actions for t in played) / turns,
        "reply_tokens": sampled_tokens / turns,  # sampled tokens of a reply
        "cut_replies": sum(len(t.cut_turns) for t in played) / turns,  # that reached a limit
        "truncated": np.mean([t.status in ("horizon", "length") for t in played]),
        "truncated/length": np.mean([t.status == "length" for t in played]),
        # Whose advantages are all 0.
        "zero_gradient_groups": np.mean([group not in with_gradient for group in groups]),
    }
    if unclosed := sum(len(t.unclosed_turns) for t in played):
        row["unclosed_thoughts"] = unclosed / turns  # replies that end within a thought
    if any(len(t.starts) > 1 for t in played):
        row["segments"] = np.mean([len(t.starts) for t in played])
    return row | common


def world_metrics(trajectories: Sequence[Trajectory],
                  horizons: dict[str, int]) -> dict[str, dict[str, float]]:
    """World -> the statistics of its own trajectories, and its horizon."""
    return {world: rollout_metrics([t for t in trajectories if t.env == world])
            | {"horizon": horizon} for world, horizon in horizons.items()}


WORLD_METRICS = ("horizon", "success", "score", "turns", "reward", "valid_actions", "env_error",
                 "zero_gradient_groups")
HELD_OUT_METRICS = ("success", "score", "turns", "valid_actions", "env_error")


def world_columns(by_world: dict[str, dict[str, float]],
                  names: Sequence[str] = WORLD_METRICS, prefix: str = "") -> dict[str, float]:
    """Those of the measures `names` that `world_metrics` has found, as columns of a row of metrics:
    "success" for one world, "success/babyai" and so on for several, after a prefix."""
    return {prefix + name + (f"/{world}" if len(by_world) > 1 else ""): row[name]
            for world, row in by_world.items() for name in names if name in row}


def timed(seconds: Counter[str], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), and add the seconds that it took to seconds[name]."""
    began = time.perf_counter()
    result = function(*args)
    seconds[name] += time.perf_counter() - began
    return result


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """1 - Var(return - value) / Var(return) over the sampled tokens [B, T]: 1 for a perfect
    critic, 0 for a constant one or without any variance."""
    pairs = torch.stack([returns[mask], values[mask]], 1).double().numpy()  # [S, 2]
    spread = pairs[:, 0].var() if len(pairs) else 0.0
    return float(1 - (pairs[:, 0] - pairs[:, 1]).var() / spread) if spread else 0.0


def memory_gb(device: torch.device) -> float:
    """The peak so far, in GB: of the GPU's memory, or of this process."""
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (torch.cuda.max_memory_allocated() if device.type == "cuda" else of_process) / 1e9


# ---- when a run ends, or should ----

IDLE_STEPS = 5  # so many steps in a row without success and gradient give a warning
MANY_CUT = 0.05  # a larger share of trajectories cut by --max_length in a step gives a warning
# About 1e-6 in float32 and 0.01 in bfloat16. More means that a cache or a mask is wrong.
MAX_LOGPROB_GAP = 0.1


def alarm(row: dict, cfg: Any) -> str:
    """Why training cannot go on after a step with this row of metrics; "" if it can. cfg: has
    min_entropy and max_kl."""
    for name in ("loss", "grad_norm", "kl", "value_loss"):
        if not math.isfinite(row.get(name, 0.0)):
            return f"{name} is {row[name]}"
    if row["logprob_gap"] > MAX_LOGPROB_GAP:
        return f"logprob_gap is {row['logprob_gap']:.2g}: log-probs of rollout and update differ"
    if row["turns"] and row["entropy"] < cfg.min_entropy:  # without a turn there is no entropy
        return f"entropy is {row['entropy']:.2g}, below min_entropy={cfg.min_entropy:g}: collapsed"
    for name in ("kl", "kl_behaviour"):
        if row[name] > cfg.max_kl:
            return f"{name} is {row[name]:.3g}, above max_kl={cfg.max_kl:g}: too large steps"
    return ""


def warn(rows: list[dict]) -> None:
    """Warn of what keeps a run from learning, in the first step that shows it.

    rows: the metrics of all steps so far.
    """
    # Idle steps, among as many as give a warning and the one before them, whose warning was given.
    idle = [not (row["success"] or row["grad_norm"]) for row in rows[-IDLE_STEPS - 1:]]
    if all(idle[-IDLE_STEPS:]) and sum(idle) == IDLE_STEPS:
        tqdm.write(f"warning: {IDLE_STEPS} steps without success and gradient. Try a warm start "
                   "(sft.py), easier items or more --rollouts_per_item", file=sys.stderr)
    many_cut = [row["truncated/length"] > MANY_CUT for row in rows]
    if many_cut[-1] and sum(many_cut) == 1:
        tqdm.write(f"warning: --max_length cut more than {MANY_CUT:.0%} of a step's trajectories "
                   "before the horizon. A larger one takes more memory", file=sys.stderr)


def turns_are_played(cfg: Any, rows: list[dict]) -> bool:
    """Whether `turns` is set and less than half of the last step's environment turns are left.
    cfg: has `turns`."""
    played = [row["turns"] * row["trajectories"] * (1 - row["env_error"])
              + row.get("continued_turns", 0) for row in rows]
    return bool(cfg.turns and played) and cfg.turns - sum(played) < played[-1] / 2


def reporter(cfg: Any, step: int = 0) -> Callable[[dict], object]:
    """-> a function that sends a step's row of metrics to where --report_to says. cfg: the run's
    flags. step: the next one; TensorBoard then hides what an earlier process wrote from there
    on."""
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(f"{cfg.out}/tensorboard", purge_step=step)
        return lambda row: [board.add_scalar(name, value, row["step"])
                            for name, value in row.items() if is_number(value)]
    if cfg.report_to == "wandb":
        import wandb
        wandb.init(project="multiturn-rl", name=Path(cfg.out).name, dir=cfg.out, config=asdict(cfg))
        return lambda row: wandb.log(row, step=row["step"])
    return lambda row: None


def is_number(x: object) -> bool:
    """Whether x is a finite number.

    >>> is_number(0.5), is_number(float("nan")), is_number(None), is_number("1")
    (True, False, False, False)
    """
    return isinstance(x, (int, float)) and abs(x) < 1e300  # false for NaN


def columns_of(name: str, columns: Iterable[str]) -> list[str]:
    """The columns of a measure: "success" for one world, "success/babyai" and so on for several,
    in the same order for every measure."""
    of_worlds = [key for key in columns if key.startswith(f"{name}/")]
    return sorted(of_worlds) or [key for key in [name] if key in columns]
