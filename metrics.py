"""What a run reports: the lines at its start, a bar for a long rollout, a step's row of metrics,
the curves of a run, and when training cannot go on."""

import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from trajectory import Trajectory, read_objects

if TYPE_CHECKING:
    from config import Config
    from rollout import TrajectoryQueue
    from train import Run

# ---- what is said while a run goes on ----


def banner(run: "Run") -> str:
    """Five lines for the start of a training run."""
    cfg = run.cfg
    worlds = []
    for world, settings in cfg.worlds.items():
        rounds = ", ".join(map(str, settings.rounds))
        worlds.append(f"{world}, {len(run.items[world]):,} items, horizon {rounds}")
    parameters = sum(p.numel() for p in run.policy.parameters())
    trained = sum(p.numel() for p in run.policy.parameters() if p.requires_grad)
    size = f"{parameters / 1e6:,.1f}M parameters"
    if trained < parameters:
        size += f", {trained / 1e6:,.1f}M of them trained"
    processes = f"{run.num_ranks} process" + ("es" if run.num_ranks > 1 else "")
    trajectories = cfg.items_per_step * cfg.rollouts_per_item
    turns = f" or {cfg.turns:,} turns" if cfg.turns else ""
    return "\n".join([
        f"worlds     {'; '.join(worlds)} ({cfg.horizon_schedule})",
        f"model      {cfg.model}, {size}, {cfg.dtype}, {run.device.type}, {processes}",
        f"training   {cfg.algo}, step {run.step} to {cfg.steps}{turns}, each "
        f"{cfg.items_per_step} items x {cfg.rollouts_per_item} samples = {trajectories} "
        f"trajectories, learning rate {cfg.lr:g}",
        f"files      {cfg.out}/: metrics.jsonl, trajectories/, a checkpoint every {cfg.save_every} "
        f"steps; python view.py {cfg.out}",
        "stop       Ctrl-C saves; the same command with --resume goes on",
    ])


def held_out_summary(rows: list[dict], last: dict[str, float]) -> str:
    """The held-out success at the run's first evaluation and after training -> text, one line for
    each world.

    rows: the run's rows of metrics. last: the columns of the last evaluation, "eval/success" or, in
    a mixture, "eval/success/babyai" ...
    """
    lines = []
    for key in columns_of("eval/success", list(last)):
        world = key.removeprefix("eval/success").replace("/", " of ")
        first = ""
        for row in rows:
            if key in row:
                when = f"at step {row['step']}" if row["step"] else "before"
                first = f"{row[key]:.3f} {when}, "
                break
        lines.append(f"held-out success{world}: {first}{last[key]:.3f} after")
    return "\n".join(lines)


@contextmanager
def rollout_bar(total: int, shown: bool) -> Iterator[Callable[["TrajectoryQueue"], object]]:
    """A progress bar below the training bar during a rollout: finished trajectories, turns, sampled
    tokens per second. -> the function to pass to `rollout` as `on_step`.

    It appears after two seconds and is updated every second, or every minute if stderr is not a
    terminal.
    """
    began = time.monotonic()
    due = began + 2
    interval = 1 if sys.stderr.isatty() else 60
    with tqdm(total=total, desc="rollout", unit="trajectory", position=1, leave=False, delay=2,
              dynamic_ncols=True, disable=not shown) as bar:

        def on_step(queue):
            nonlocal due
            now = time.monotonic()
            if now < due or not shown:
                return
            due = now + interval
            playing = [episode.trajectory for episode in queue.alive]
            turns = sum(t.turns for t in [*queue.finished.values(), *playing])
            bar.n = len(queue.finished)
            bar.set_postfix_str(f"{turns} turns {queue.stats['busy'] / (now - began):.0f} tok/s")

        yield on_step


# ---- the numbers of a step ----


def mean(values: Sequence[float]) -> float:
    """The mean, 0 for no values."""
    return float(np.mean(values)) if len(values) else 0.0


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Statistics of a step's trajectories. Failed environments are left out; their share is
    `env_error`. If all have failed, the row has only the shares of failures and the number of
    trajectories."""
    played = [t for t in trajectories if t.status != "env_error"]
    failed = [t for t in trajectories if t.status == "env_error"]
    common = {"env_error": len(failed) / len(trajectories), "trajectories": len(trajectories)}
    kinds = Counter(t.error.split(":")[0] for t in failed)  # timeout | fault | crash
    for kind, count in sorted(kinds.items()):
        common[f"env_error/{kind}"] = count / len(trajectories)
    if not played:
        return common

    turns = max(1, sum(t.turns for t in played))
    sampled_tokens = max(1, sum(sum(t.mask) for t in played))
    rewards_of_group = {}
    for t in played:
        rewards_of_group.setdefault(t.group, []).append(t.reward)
    row = {
        "success": mean([t.success for t in played]),
        "score": mean([t.score for t in played]),
        "turns": mean([t.turns for t in played]),
        "reward": mean([t.reward for t in played]),
        # An estimate of the entropy in nats a token: the mean of -log p over the sampled tokens.
        "entropy": -sum(sum(t.logprobs) for t in played) / sampled_tokens,
        "valid_actions": sum(t.valid_actions for t in played) / turns,
        "reply_tokens": sampled_tokens / turns,  # sampled tokens of a reply
        "cut_replies": sum(len(t.cut_turns) for t in played) / turns,  # that reached max_tokens
        "truncated": mean([t.status in ("horizon", "length") for t in played]),
        "truncated/length": mean([t.status == "length" for t in played]),
        "zero_gradient_groups": mean([max(g) == min(g) for g in rewards_of_group.values()]),
    }
    if any(len(t.starts) > 1 for t in played):
        row["segments"] = mean([len(t.starts) for t in played])
    return row | common


WORLD_METRICS = ("horizon", "success", "score", "turns", "reward", "valid_actions", "env_error",
                 "zero_gradient_groups")


def world_metrics(trajectories: Sequence[Trajectory],
                  horizons: dict[str, int]) -> dict[str, dict[str, float]]:
    """World -> the statistics of its own trajectories, and its horizon."""
    return {world: rollout_metrics([t for t in trajectories if t.env == world])
            | {"horizon": horizon} for world, horizon in horizons.items()}


def mixture_columns(by_world: dict[str, dict[str, float]]) -> dict[str, float]:
    """"success/babyai" and so on, for a run of several worlds; {} for one."""
    if len(by_world) == 1:
        return {}
    return {f"{name}/{world}": row[name]
            for world, row in by_world.items() for name in WORLD_METRICS if name in row}


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """1 - Var(return - value) / Var(return) over the sampled tokens [B, T]: 1 for a perfect
    critic, 0 for a constant one or without any variance."""
    pairs = torch.stack([returns[mask], values[mask]], 1).double().numpy()  # [S, 2]
    spread = pairs[:, 0].var() if len(pairs) else 0.0
    return float(1 - (pairs[:, 0] - pairs[:, 1]).var() / spread) if spread else 0.0


def memory_gb(device: torch.device) -> float:
    """The peak so far, in GB: of the GPU's memory, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# About 1e-6 in float32 and 0.01 in bfloat16. More means that a cache or a mask is wrong.
MAX_LOGPROB_GAP = 0.1


def alarm(row: dict, cfg: "Config") -> str:
    """Why training cannot go on after a step with this row of metrics; "" if it can."""
    for name in ("loss", "grad_norm", "kl", "value_loss"):
        if not math.isfinite(row.get(name, 0.0)):
            return f"{name} is {row[name]}"
    if row["logprob_gap"] > MAX_LOGPROB_GAP:
        return (f"logprob_gap is {row['logprob_gap']:.2g} nats a token, above {MAX_LOGPROB_GAP:g}: "
                "this model's rollout and update compute different log-probs")
    if row["turns"] and row["entropy"] < cfg.min_entropy:  # without a turn there is no entropy
        return (f"the entropy is {row['entropy']:.2g} nats a token, "
                f"below --min_entropy {cfg.min_entropy:g}: the policy has collapsed")
    name = max("kl", "kl_behaviour", key=row.get)
    if row[name] > cfg.max_kl:
        return f"{name} is {row[name]:.3g}, above --max_kl {cfg.max_kl:g}: the steps are too large"
    return ""


def reporter(cfg: "Config", step: int = 0) -> Callable[[dict], object]:
    """-> a function that sends a step's row of metrics to where --report_to says. step: the next
    one; TensorBoard then hides what an earlier process wrote from there on."""
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(f"{cfg.out}/tensorboard", purge_step=step)

        def report(row):
            for name, value in row.items():
                if isinstance(value, (int, float)):
                    board.add_scalar(name, value, row["step"])
        return report
    if cfg.report_to == "wandb":
        import wandb
        wandb.init(project="multiturn-rl", name=Path(cfg.out).name, dir=cfg.out, config=asdict(cfg))
        return lambda row: wandb.log(row, step=row["step"])
    return lambda row: None


# ---- files ----


def is_number(x: object) -> bool:
    """Whether x is a finite number.

    >>> is_number(0.5), is_number(float("nan")), is_number(None), is_number("1")
    (True, False, False, False)
    """
    return isinstance(x, (int, float)) and abs(x) < 1e300  # false for NaN


# ---- curves ----

PLOTS = (["success"], ["reward"], ["turns", "horizon"], ["entropy"], ["kl"], ["valid_actions"])
SFT_PLOTS = (["loss"], ["held_out_loss"], ["grad_norm"], ["eval/success"], ["eval/valid_actions"],
             ["eval/turns"])
TITLES = {
    "success": "success (share of trajectories)",
    "reward": "reward of a trajectory",
    "turns": "turns of a trajectory; grey: horizon",
    "entropy": "entropy (nats a token)",
    "kl": "KL divergence (nats a token)",
    "valid_actions": "valid actions (share of turns)",
    "loss": "loss (nats a token)",
    "held_out_loss": "held-out loss (nats a token)",
    "grad_norm": "gradient norm",
    "eval/success": "held-out success (share of trajectories)",
    "eval/valid_actions": "held-out valid actions (share of turns)",
    "eval/turns": "held-out turns of a trajectory",
}


def horizon_changes(rows: list[dict]) -> list[int]:
    """The indices of those rows of metrics whose horizon differs from that of the row before (in a
    mixture: the horizon of any world). A missing horizon counts as unchanged."""
    changed = []
    last = {}  # name of a horizon -> its last value
    for i, row in enumerate(rows):
        horizons = {key: value for key, value in row.items()
                    if key.split("/")[0] == "horizon" and is_number(value)}
        if any(last.get(key, value) != value for key, value in horizons.items()):
            changed.append(i)
        last |= horizons
    return changed


def draw_curves(run: str | Path) -> None:
    """Draw runs/NAME/curves.png from its metrics.jsonl. The worlds of a mixture have a colour
    each; measures on held-out items are drawn as dots. Axes of values that are not negative start
    at 0. Rows without a step are left out."""
    run = Path(run)
    rows = [row for row in read_objects(run / "metrics.jsonl")[0] if is_number(row.get("step"))]
    names_of_columns = all_columns(rows)
    is_sft = "success" not in names_of_columns
    plots = [names for names in (SFT_PLOTS if is_sft else PLOTS)
             if columns_of(names[0], names_of_columns)]
    if not plots:
        raise ValueError(f"{run}/metrics.jsonl holds no row to draw")
    figure = Figure(figsize=(10.5, 5.8), layout="constrained")
    shape = (1 if len(plots) <= 3 else 2, min(3, len(plots)))
    axes = list(figure.subplots(*shape, sharex=True, squeeze=False).flat)
    for ax, names in zip(axes, plots):
        for name in names:
            draw_column(ax, rows, name)
        if names == ["success"]:
            draw_column(ax, rows, "eval/success")
        for i in horizon_changes(rows):
            ax.axvline(rows[i]["step"], color="0.8", lw=1, zorder=0)
        if ax is axes[0] and ax.get_legend_handles_labels()[0]:
            ax.legend()
        ax.set_title(TITLES[names[0]], fontsize=11)
        if ax.dataLim.ymin >= 0:
            ax.set_ylim(bottom=0)
    for ax in axes[-shape[1]:]:
        ax.set_xlabel("training step")
    for ax in axes[len(plots):]:
        ax.remove()
    caption = "dark: mean of 5 steps; light: each step"
    if any(key.startswith("eval/") for key in names_of_columns):
        caption += "; dots: held-out items"
    if not is_sft:
        caption = f"training trajectories; {caption}; vertical lines: the horizon changes"
    figure.suptitle(f"{run.name}: {caption}", fontsize=11)
    figure.savefig(run / "curves.png.tmp", format="png", dpi=110)
    os.replace(run / "curves.png.tmp", run / "curves.png")


def all_columns(rows: list[dict]) -> list[str]:
    """The names of the columns that any row of metrics has, in the order of their appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def columns_of(name: str, columns: Sequence[str]) -> list[str]:
    """Those columns that belong to a measure: "success" for one world, "success/babyai" and so on
    for several."""
    of_worlds = [key for key in columns if key.startswith(f"{name}/")]
    return of_worlds or [key for key in [name] if key in columns]


def draw_column(ax: Axes, rows: list[dict], name: str) -> None:
    """One measure, with a curve for each world."""
    for i, key in enumerate(columns_of(name, all_columns(rows))):
        world = key.removeprefix(name).strip("/")
        draw_curve(ax, rows, key, f"C{i}", label=world or None)


def draw_curve(ax: Axes, rows: list[dict], key: str, colour: str, label: str | None) -> None:
    """One column of metrics: each step in a light colour, and the mean of five steps in a dark
    one. A column that only some rows have is drawn as dots."""
    rows = [row for row in rows if key in row]
    steps = [row["step"] for row in rows]
    values = np.array([row[key] if is_number(row[key]) else math.nan for row in rows])
    if key.startswith(("eval/", "held_out")):
        ax.plot(steps, values, "o-", color=colour, ms=4, lw=0.8)
        return
    if key.split("/")[0] == "horizon":
        of_one_world = label is not None
        colour, style = (colour, ":") if of_one_world else ("0.6", "-")
        ax.plot(steps, values, color=colour, ls=style, drawstyle="steps-post")
        return
    if len(values) < 5:
        ax.plot(steps, values, color=colour, label=label)
        return
    ax.plot(steps, values, color=colour, alpha=0.3)
    smooth = np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, "valid")
    ax.plot(steps, smooth, color=colour, label=label)
