"""What is said of a training step, where it goes, and when it says that training cannot go on."""

import json
import math
import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from config import Config
    from rollout import Trajectory


def rollout_metrics(trajectories: "list[Trajectory]") -> dict[str, float]:
    """What a step's trajectories say, failed environments left out (their share is `env_error`)."""
    ok = [t for t in trajectories if t.status != "env_error"]
    mean = lambda values: float(np.mean(values)) if len(values) else 0.0  # noqa: E731
    groups = {}
    for t in ok:
        groups.setdefault(t.group, []).append(t.reward)
    sampled = sum(sum(t.mask) for t in ok)
    kinds = Counter(t.error.split(":")[0] for t in trajectories if t.status == "env_error")  # timeout | fault | crash
    return {
        "success": mean([t.success for t in ok]), "score": mean([t.score for t in ok]), "turns": mean([t.turns for t in ok]),
        "reward": mean([t.reward for t in ok]),
        "entropy": -sum(sum(t.logprobs) for t in ok) / max(1, sampled),  # mean -log p of what was sampled, nats a token
        "valid_actions": sum(t.valid_actions for t in ok) / max(1, sum(t.turns for t in ok)),
        "cut_replies": sum(t.cut_replies for t in ok) / max(1, sum(t.turns for t in ok)),  # at max_tokens
        "env_error": 1 - len(ok) / len(trajectories), "truncated": mean([t.status in ("horizon", "length") for t in ok]),
        "truncated/length": mean([t.status == "length" for t in ok]),
        "zero_gradient_groups": mean([max(g) == min(g) for g in groups.values()]), "trajectories": len(trajectories),
        **{f"env_error/{kind}": n / len(trajectories) for kind, n in sorted(kinds.items())}}


def explained_variance(trajectories: "list[Trajectory]", columns: dict[str, list[list[float]]]) -> float:
    """1 - Var(return - value) / Var(return) over sampled tokens: 1 for a perfect critic, 0 for a constant one."""
    pairs = np.array([(r, v) for t, returns, values in zip(trajectories, columns["returns"], columns["old_values"])
                      if t.status != "env_error" for r, v, m in zip(returns, values, t.mask) if m]).reshape(-1, 2)
    spread = pairs[:, 0].var() if len(pairs) else 0.0
    return float(1 - (pairs[:, 0] - pairs[:, 1]).var() / spread) if spread else 0.0


def memory_gb(device: torch.device) -> float:
    """The peak so far, in GB: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def alarm(row: dict, cfg: "Config") -> str:
    """What is wrong with a step whose training cannot go on; "" if nothing is."""
    bad = [name for name in ("loss", "grad_norm", "kl") if not math.isfinite(row[name])]
    if bad:
        return f"{bad[0]} is {row[bad[0]]}"
    if row["entropy"] < cfg.min_entropy:
        return f"the entropy is {row['entropy']:.2g} nats a token, below --min_entropy {cfg.min_entropy:g}: the policy has collapsed"
    name = max("kl", "kl_behaviour", key=row.get)
    return f"{name} is {row[name]:.3g}, above --max_kl {cfg.max_kl:g}: the steps are too large" if row[name] > cfg.max_kl else ""


def reporter(cfg: "Config") -> Callable[[dict], object]:
    """-> a function that takes each step's row of metrics to where --report_to says."""
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(f"{cfg.out}/tensorboard")
        return lambda row: [board.add_scalar(k, v, row["step"]) for k, v in row.items() if isinstance(v, (int, float))]
    if cfg.report_to == "wandb":
        import wandb
        wandb.init(project="multiturn-rl", name=Path(cfg.out).name, dir=cfg.out, config=asdict(cfg))
        return lambda row: wandb.log(row, step=row["step"])
    return lambda row: None


# ---- curves ----


def stages(rows: list[dict]) -> list[int]:
    """Which rows of metrics begin with another horizon than the row before (in a mixture: of any world)."""
    horizons = [[v for k, v in row.items() if k.split("/")[0] == "horizon"] for row in rows]
    return [i for i in range(1, len(rows)) if horizons[i] != horizons[i - 1]]


def draw_curves(run: str | Path) -> None:
    """runs/NAME -> runs/NAME/curves.png from its metrics.jsonl, written whole or not at all. A mixture's worlds have a colour each."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in rows]
    worlds = [key.removeprefix("success/") for key in (rows[0] if rows else ()) if key.startswith("success/")]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for ax, names in zip(axes.flat, (["success"], ["reward"], ["turns", "horizon"], ["entropy"], ["kl"], ["valid_actions"])):
        for name in names:
            own = [f"{name}/{w}" for w in worlds if f"{name}/{w}" in rows[0]]
            for i, key in enumerate(own or [name]):
                values, colour = np.array([r[key] for r in rows], float), f"C{i}"
                if name == "horizon":
                    ax.plot(steps, values, color=colour if own else "0.6", ls=":" if own else "-", drawstyle="steps-post")
                    continue
                smooth = len(values) >= 5
                ax.plot(steps, values, color=colour, alpha=0.3 if smooth else 1, label=None if smooth or not own else worlds[i])
                if smooth:
                    ax.plot(steps, np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, "valid"), color=colour,
                            label=worlds[i] if own else None)
        for i in stages(rows):
            ax.axvline(steps[i], color="0.8", lw=1, zorder=0)
        if worlds and ax is axes[0, 0]:
            ax.legend()
        ax.set_title(" and ".join(n.replace("_", " ") for n in names))
        ax.set_xlabel("training step")
    figure.suptitle(f"{Path(run).name}: training trajectories; dark: mean of 5 steps; light: each step; upright lines: the horizon grows")
    figure.savefig(Path(run) / "curves.png.tmp", format="png", dpi=110)
    os.replace(Path(run) / "curves.png.tmp", Path(run) / "curves.png")
