"""Multi-turn reinforcement learning of an LLM agent: schedule, rollout, advantage, update, log, save.

    torchrun train.py --env babyai --algo grpo            # the built-in tiny model, two CPU cores, minutes
    torchrun --nproc_per_node=8 train.py --env babyai --algo grpo --model Qwen/Qwen2.5-7B-Instruct --data AgentGym-RL-Data-ID

The training of AgentGym-RL (arXiv 2509.08755) with ScalingInter-RL's horizon schedule. What deviates from the original:
a turn's reward sits on the last token that the policy sampled in it (there it is lost to PPO and REINFORCE++), a loss
has one denominator an optimizer step (there the mean of micro-batch means), and a failed environment leaves the
statistics (there it is a reward of 0).
"""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from config import Config, items_of_a_step, parse_config, servers  # before torch: it says how idle threads wait
import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers.utils import logging

import agent
import envs as worlds
import rl
import schedule
from envs import EnvPool
from metrics import alarm, draw_curves, memory_gb, reporter, rollout_metrics
from parallel import Sigterm, Terminated, gather, gathered, init_distributed, shard
from rollout import make_engine, rollout
from update import advantages_of, shape, update


def items_at(items: list[str], seed: int, step: int, count: int) -> list[str]:
    """The items of a training step: every epoch a new order, a function of (seed, step) alone; none twice in a step."""
    steps_per_epoch = len(items) // count
    epoch, part = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(items))
    return [items[i] for i in order[part * count:(part + 1) * count]]


def write(path: Path, text: str) -> None:
    """The file has its old contents or all of the new, whenever the process is killed."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    os.replace(partial, path)


def train(cfg: Config) -> None:
    """A run from its first or next step to its last, in this process or as one of torchrun's. Leaves by SystemExit where it must stop."""
    with EnvPool(servers(cfg.env_url, cfg.worlds), options=worlds.env_options(cfg.env_args, cfg.worlds)) as pool:  # unless the run is killed outright, its environments are closed
        sigterm = Sigterm()
        try:
            run_training(cfg, pool, sigterm)
        finally:
            sigterm.end()


def run_training(cfg: Config, pool: EnvPool, sigterm: Sigterm) -> None:
    """The loop itself."""
    rank, world, device = init_distributed()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run = Path(cfg.out)
    newest = rl.checkpoints(run)[-1] if rl.checkpoints(run) else None
    arithmetic, reference, critic, critic_optimizer = getattr(torch, cfg.dtype), None, None, None
    try:  # all that can fail for a broken model or checkpoint, before anything is written
        # what LoRA leaves as it is needs no more precision than the arithmetic has, nor does the reference
        policy, tokenizer = rl.load_policy(str(newest or cfg.model) if not cfg.lora_rank else cfg.model, "cpu",
                                           arithmetic if cfg.lora_rank and not cfg.shard else "auto" if cfg.shard else torch.float32)
        agent.Chat(tokenizer)
        if cfg.max_length > (most := rl.steady_length(policy.config)):
            raise ValueError(f"beyond {most} tokens this model's rotary embeddings change with the length, and so what it said before: give --max_length {most}")
        policy, optimizer = trainable(policy, cfg.lr, cfg, device)
        trained = {"policy": (policy, optimizer)}
        if cfg.algo == "ppo":
            critic, critic_optimizer = trained["critic"] = trainable(rl.Critic(cfg.model), cfg.critic_lr, cfg, device)
        if cfg.kl_coef:  # else there is none
            reference = policy if cfg.lora_rank else placed(rl.load_policy(cfg.model, "cpu", arithmetic)[0].eval(), cfg, device)
        state = {"step": 0, "horizon": {}} | (rl.resume(newest, trained) if newest else {})
    except ValueError as e:
        usage_error(e)
    start = state["step"]
    if cfg.resume and not newest and rank == 0:
        print(f"{run} has no complete checkpoint: starting at step 0", file=sys.stderr)
    if start >= cfg.steps and (run / "final").exists():
        if rank == 0:
            print(f"{run} is finished ({start} steps)")
        return
    metrics = run / "metrics.jsonl"
    if rank == 0:
        (run / "trajectories").mkdir(parents=True, exist_ok=True)
        rl.clean(run)
        shutil.rmtree(run / "final", ignore_errors=True)  # of fewer --steps
        write(run / "config.json", json.dumps(asdict(cfg), indent=1))
        for path in (run / "trajectories").glob("step_*.jsonl"):  # of a run that was killed after its last checkpoint
            if int(path.stem.removeprefix("step_")) >= start:
                path.unlink()
        old = metrics.read_text().splitlines(keepends=True)[:start] if newest and metrics.exists() else []  # one row a step
        write(metrics, "".join(old))
        if cfg.top_p < 1 or cfg.top_k or cfg.min_p:
            print("warning: truncated sampling makes training off-policy", file=sys.stderr)
    counts = items_of_a_step(cfg)  # world -> items a step; a mixture's worlds have horizons and limits of their own
    items = {w: worlds.items(w, "train", cfg.data or None) for w in counts}
    rounds = {w: schedule.parse_rounds(cfg.horizon, w) for w in counts}
    adaptive = {w: state["horizon"].get(w) or schedule.adaptive_start(rounds[w], max(2, cfg.worlds[w]["horizon_steps"] // 2))
                for w in counts if cfg.horizon_schedule == "adaptive"}  # world -> its state
    limits = {name: {w: own[name] for w, own in cfg.worlds.items()} for name in ("max_tokens", "max_length", "invalid_penalty")}
    most = -(-cfg.items_per_step // world) * cfg.rollouts_per_item  # trajectories of a rank
    engine = make_engine(policy, min(cfg.slots, most)) if cfg.engine == "ragged" else cfg.engine
    report = reporter(cfg) if rank == 0 else None

    saved = start if newest else None

    def save(step):
        nonlocal saved
        saved = step
        rl.save(run / f"checkpoints/step_{step:06d}", policy, tokenizer, {"step": step, "horizon": adaptive}, trained)
        if rank == 0:
            rl.drop_old(run, cfg.keep)
            if metrics.stat().st_size:
                draw_curves(run)

    bar = tqdm(range(start, cfg.steps), initial=start, total=cfg.steps, disable=rank > 0, dynamic_ncols=True)
    for step in bar:
        horizon = {w: rounds[w][adaptive[w]["stage"]] if adaptive else
                   schedule.horizon_at(step, rounds[w], cfg.worlds[w]["horizon_steps"], cfg.horizon_schedule) for w in counts}
        names = [name for w, count in counts.items() for name in items_at(items[w], cfg.seed, step, count)]

        clock, stats, K = time.perf_counter(), {}, cfg.rollouts_per_item
        try:
            with gathered(policy), sigterm, rl.compute_in(cfg.dtype, device):  # no rank may leave while others gather weights
                mine = rollout(policy, tokenizer, pool, names[rank::world], horizon, samples=K, seed=cfg.seed, step=step,
                               slots=cfg.slots, temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k,
                               min_p=cfg.min_p, action_format=cfg.action_format, plan=cfg.plan, reflect=cfg.reflect,
                               deadline=cfg.deadline, engine=engine, arrival=cfg.arrival_order, stats=stats, **limits)
        except Terminated:
            pass
        except worlds.ItemError as e:
            bar.close()
            usage_error(e)
        except FloatingPointError as e:
            sys.exit(f"train.py: {e} at step {step}; the last step's trajectories and checkpoints are in {run}")
        if any(gather([sigterm.came])):
            if saved != step:
                save(step)
            bar.close()
            if rank == 0:
                print(f"SIGTERM: saved before step {step}; --resume goes on")
            break
        groups = gather([mine[i:i + K] for i in range(0, len(mine), K)])
        trajectories = [t for group in groups for t in group]
        for i, t in enumerate(trajectories):
            t.group = i // K
        if all(t.status == "env_error" for t in trajectories):
            sys.exit(f"train.py: every environment failed at step {step}; the first: {trajectories[0].error}")
        for w in counts:
            of_world = [t.turns for t in trajectories if t.env == w and t.status != "env_error"]
            if of_world and not any(of_world):
                sys.exit(f"train.py: --max_length is {limits['max_length'][w]}: no first prompt of {w} fits")
        forwarded, busy, room = (sum(gather([stats.get(name, 0)])) for name in ("forwarded", "busy", "room"))
        seconds_rollout = time.perf_counter() - clock

        for o, lr in ((optimizer, cfg.lr), (critic_optimizer, cfg.critic_lr)):
            for group in o.param_groups if o else ():
                group["lr"] = lr * schedule.lr_at(step, cfg.steps, cfg.warmup_steps, cfg.lr_schedule)
        shape(trajectories, cfg.shaping, cfg.turn_cost, cfg.gamma)
        columns = advantages_of(trajectories, cfg, device, reference, critic)
        changes = update(trajectories, columns, cfg, step, policy, optimizer, critic, critic_optimizer)
        seconds = time.perf_counter() - clock

        kept = sum(len(t.tokens) for t in trajectories)
        row = {"step": step, "env": cfg.env, "horizon": max(horizon.values()), **rollout_metrics(trajectories), **changes,
               "forwarded_per_kept": forwarded / kept, "occupancy": busy / max(1, room), "tokens": kept, "seconds_rollout": seconds_rollout,
               "seconds_update": seconds - seconds_rollout, "tokens_per_second": kept / seconds, "memory_gb": memory_gb(device)}
        for w in counts:
            own = rollout_metrics([t for t in trajectories if t.env == w]) | {"horizon": horizon[w]}
            if adaptive and own["env_error"] < 1:
                _, adaptive[w] = schedule.adaptive_horizon(adaptive[w], own)
            row |= {f"{name}/{w}": own[name] for name in ("horizon", "success", "score", "turns", "reward", "valid_actions",
                                                          "env_error", "zero_gradient_groups") if len(counts) > 1}
        if rank == 0:
            write(run / f"trajectories/step_{step:06d}.jsonl", "".join(json.dumps(t.to_json()) + "\n" for t in trajectories))
            with metrics.open("a") as f:
                f.write(json.dumps(row) + "\n")
            report(row)
            bar.set_postfix_str(f"reward {row['reward']:.2f} success {row['success']:.2f} turns {row['turns']:.1f}/{row['horizon']} "
                                f"kl {row['kl']:.4f} entropy {row['entropy']:.2f} {row['tokens_per_second']:.0f} tok/s")
        if wrong := alarm(row, cfg):
            sys.exit(f"train.py: stopped at step {step}: {wrong}; its trajectories: {run}/trajectories/step_{step:06d}.jsonl")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            save(step + 1)
    else:
        rl.save(run / "final", policy, tokenizer, dtype=arithmetic)
        if rank == 0:
            print(f"done: {run}/final; next: python eval.py --env {next(iter(counts))} --model {run}/final")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def placed(model: nn.Module, cfg: Config, device: torch.device) -> nn.Module:
    """The model where it computes: shared out over the ranks, or whole on each."""
    return shard(model, device, cfg.dtype, cfg.offload) if cfg.shard else model.to(device)


def trainable(model: nn.Module, lr: float, cfg: Config, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """-> the model as the flags want it trained (in place), and its optimizer"""
    if cfg.lora_rank:
        rl.add_lora(getattr(model, "body", model), cfg.lora_rank, cfg.seed)
    if cfg.gradient_checkpointing:
        rl.recompute_blocks(model)
    model = placed(model, cfg, device)
    if cfg.shard:
        model.float()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0, fused=True)


def usage_error(e: Exception) -> NoReturn:
    """One line on stderr, exit code 2."""
    print("train.py: " + " ".join(str(e).split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        config = parse_config()
    except ValueError as e:
        usage_error(e)
    train(config)
