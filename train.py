"""Multi-turn RL of an LLM agent: schedule, rollout, advantages, update, log, save.

    python train.py --env babyai --algo grpo        # the built-in tiny model: minutes on two cores
    torchrun --nproc_per_node=8 train.py --env babyai --algo grpo --model Qwen/Qwen2.5-7B-Instruct

The training of AgentGym-RL (arXiv 2509.08755) with ScalingInter-RL's horizon schedule. It deviates
from the original (docs/comparison.md), above all in three points. A turn's reward sits on the last
token that the policy sampled in the turn; the original puts it where the loss mask is 0, so that
PPO and REINFORCE++ ignore it. A loss has one denominator per optimizer step; in the original it is
a mean of micro-batch means. An episode whose environment failed is left out of the statistics; in
the original it counts as a reward of 0.
"""

import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

# config comes before torch: it sets how idle threads wait.
from config import EVAL_ITEMS, RUN_FILE, Config, RunConfig, items_per_world, parse_config, run_of
from config import servers
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

import agent
import checkpoint
import envs
import metrics
import rl
import schedule
from engine import Ragged
from models.check import find_paths
from models.packed import common_prefix_length
from page.curves import draw_curves
from parallel import Dealer, FirstComeDealer, StopSignals, Terminated, gather, init_distributed
from parallel import of_rank_0, run_command, shard, unsharded, user_errors
from rollout import Episode, make_engine, rollout
from trajectory import Trajectory, read_objects, to_text, write_atomically, write_trajectories
from update import advantages_of, shape_rewards, update


@dataclass
class Run:
    """The state of a run in this process. `load` sets the fields without defaults, `start` and
    `prepare` the rest."""

    cfg: RunConfig
    folder: Path
    pool: envs.EnvPool
    signals: StopSignals
    rank: int
    num_ranks: int
    device: torch.device
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trained: rl.Trained  # "policy" and, with PPO, "critic" -> (module, its optimizer)
    reference: PreTrainedModel | None  # the model that the KL refers to
    models: dict[str, PreTrainedModel]  # those that a setting of the algorithm names
    step: int  # the next training step
    saved: int | None  # the step of the newest checkpoint
    adaptive: dict[str, dict]  # world -> the adaptive schedule's state; {} with another schedule
    items_sha256: str  # of `items`, of a resumed run
    rows: list[dict]  # the metrics of the steps before `step`
    report: Callable[[dict], object] | None = None  # sends a row of metrics to --report_to
    engine: Ragged | str = "hf"
    items: dict[str, list[str]] = field(default_factory=dict)  # world -> its training items


def train(cfg: Config) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Environments are closed when it ends, by an exception,
    too. Raises ValueError for broken inputs, SystemExit when training cannot go on.
    """
    with lock_folder(cfg), env_pool(cfg) as pool, StopSignals() as signals:
        if is_finished(cfg):
            return
        with user_errors():
            run = start(cfg, pool, signals)
        until_stopped(run, training_loop)


def training_loop(run: Run) -> None:
    """Run the steps from `run.step` on, and write final/. Raises Terminated, on every rank, if a
    stop signal comes during a rollout."""
    cfg = run.cfg
    critic = run.trained.get("critic", (None, None))  # and its optimizer
    with metrics.step_bar(run.step, cfg.steps, run.rank) as bar:
        for step in bar:
            run.step = step
            if metrics.turns_are_played(cfg, run.rows):
                break

            # Evaluation, now and then.
            is_due = cfg.eval_every and step % cfg.eval_every == 0
            held_out = evaluate_held_out(run) if is_due else {}

            # Schedule: the horizon of each world, the items, the learning rates.
            began = time.perf_counter()
            horizons = horizons_at(run, step)
            items = items_of_step(run, step)
            lr = set_learning_rates(run, step, cfg.steps)

            # Rollout: the ranks share the trajectories out while they play.
            trajectories, decoded = play_items(run, horizons, step, items, cfg.rollouts_per_item)
            if all(t.status == "env_error" for t in trajectories):
                if step:
                    save_checkpoint(run)
                sys.exit(f"train.py: every environment failed at step {step}; --resume repeats "
                         f"this step; the first error: {trajectories[0].error}")
            shape_rewards(trajectories, cfg.shaping, cfg.turn_cost)
            seconds_rollout = time.perf_counter() - began

            # Advantages, over the trajectories of all ranks. Some algorithms play more episodes.
            batch = advantages_of(
                trajectories, cfg, run.device, run.reference, critic[0], models=run.models,
                columns=decoded, play=lambda *args: shape_rewards(
                    play_items(run, horizons, step, *args)[0], cfg.shaping, cfg.turn_cost))
            decoded["seconds_advantages"] = time.perf_counter() - began - seconds_rollout

            # Update.
            changes = update(trajectories, batch, cfg, step, *run.trained["policy"], *critic)
            seconds = time.perf_counter() - began

            # Log.
            by_world = metrics.world_metrics(trajectories, horizons)
            row = {"step": step, "env": cfg.env, "horizon": max(horizons.values()), "lr": lr,
                   **metrics.rollout_metrics(trajectories), **changes, **decoded, **held_out,
                   "seconds_rollout": seconds_rollout, "seconds_update": seconds - seconds_rollout,
                   "tokens_per_second": decoded["tokens"] / seconds,
                   "memory_gb": metrics.memory_gb(run.device), **metrics.world_columns(by_world)}
            log_step(run, row, trajectories)
            if run.rank == 0:
                metrics.warn(run.rows)
            metrics.show(bar, row, run.rank)

            # Save, unless training cannot go on.
            if problem := metrics.alarm(row, cfg):
                sys.exit(f"train.py: stopped at step {step}, see its trajectories: {problem}")
            advance_adaptive_horizons(run, by_world)
            run.step = step + 1
            if run.step % cfg.save_every == 0:
                save_checkpoint(run)
    last = evaluate_held_out(run) if cfg.eval_every else {}
    finish(run)
    if last:
        of_rank_0(lambda: print(metrics.held_out_summary(run.rows, last)))


# ---- the start of a run ----


def lock_folder(cfg: RunConfig) -> AbstractContextManager:
    """Make the run folder, and keep other processes out of it until the result is closed. Raises
    ValueError if one is at work in it, or if it holds a run that is not to be resumed."""
    folder = Path(cfg.out)
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise envs.UserError(f"another process is at work in {folder}") from e
    except OSError:  # the file system has no locks
        print(f"warning: cannot lock {folder}: let no other process work in it", file=sys.stderr)
    has_rows = any(path.stat().st_size for path in folder.glob("metrics.jsonl"))
    if not cfg.resume and (has_rows or checkpoint.named(folder)):
        raise envs.UserError(f"{folder} holds a run: choose another --out, or give --resume")
    return lock


def is_finished(cfg: RunConfig) -> bool:
    """Whether the run has taken all its steps; if so, rank 0 says so. It stays finished when its
    checkpoints are damaged or deleted. Raises ValueError for a run that ended after fewer steps and
    has no checkpoint: it would start at step 0 and lose its final/."""
    final = run_of(f"{cfg.out}/final")
    if (taken := final.get("taken")) is None:
        return False
    if final.get("run_id", "") != cfg.run_id:
        raise envs.UserError(f"{cfg.out}/final is of another run")
    # sft.py has no --steps: its last step never changes.
    if taken >= getattr(cfg, "steps", 0) or metrics.turns_are_played(cfg, rows_before(cfg, taken)):
        if os.environ.get("RANK", "0") == "0":
            print(f"{cfg.out} is finished ({taken} steps)")
        return True
    if not checkpoint.named(cfg.out):
        raise envs.UserError(f"{cfg.out} has no checkpoint: start from --model {cfg.out}/final")
    return False


def rows_before(cfg: RunConfig, step: int) -> list[dict]:
    """The run's rows of metrics of the steps before `step`. Raises ValueError if one is damaged."""
    path = Path(cfg.out) / "metrics.jsonl"
    rows, num_damaged = read_objects(path) if path.exists() else ([], 0)
    rows = [row for row in rows if row["step"] < step]
    if num_damaged and len(rows) < step:
        raise envs.UserError(f"a line of {path} is damaged: delete it to go on without it")
    return rows


def env_pool(cfg: RunConfig) -> envs.EnvPool:
    """The environments of a run."""
    return envs.EnvPool(servers(cfg.env_url, cfg.worlds),
                   options=envs.env_options(cfg.env_args, cfg.worlds))


def start(cfg: Config, pool: envs.EnvPool, signals: StopSignals) -> Run:
    """Load the models, or the newest checkpoint, and prepare the run folder. Raises ValueError for
    broken inputs, before anything is written."""
    run = load(cfg, pool, signals)
    run.items = {world: envs.items(world, "train", cfg.data or None) for world in cfg.worlds}
    items_of_step(run, run.step)  # raises ValueError if there are too few
    base = checkpoint.hashes(Path(cfg.model)) if run.reference or cfg.lora_rank else {}
    digest = checkpoint.digest(run.items | base)
    if run.items_sha256 not in ("", digest):
        raise ValueError(f"{cfg.out} was started with other items, or another --model")
    run.items_sha256 = digest
    if cfg.horizon_schedule == "adaptive":
        run.adaptive = {world: {"stage": 0} for world in cfg.worlds} | run.adaptive
    if run.rank == 0:
        prepare(run)
        print(metrics.banner(run))
    slots = min(cfg.slots, -(-cfg.items_per_step // run.num_ranks) * cfg.rollouts_per_item)
    run.engine = make_engine(run.policy, slots, cfg)
    return run


def load(cfg: RunConfig, pool: envs.EnvPool, signals: StopSignals) -> Run:
    """Load every model of a run, or of its newest intact checkpoint, and prepare the models for
    training. Raises ValueError for a model that cannot be loaded or trained, or if all checkpoints
    are damaged."""
    rank, num_ranks, device = init_distributed()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    newest, notes = of_rank_0(lambda: checkpoint.newest(cfg.out))

    # The tokenizer and its chat template: before the weights, whose loading may take minutes. A
    # resumed run takes the template, and the time that it shows, from its checkpoint.
    source = str(cfg.model if cfg.lora_rank else newest or cfg.model)
    tokenizer = rl.load_tokenizer(source, cfg.chat_template)
    state = checkpoint.read_state(newest) if newest else {"step": 0, "horizon": {}}
    if newest and state.get("run_id", "") != cfg.run_id:
        raise ValueError(f"{newest} is of another run than {cfg.out}/config.json")
    tokenizer.tried_template = state.get("tried_template") or of_rank_0(
        lambda: agent.try_template(tokenizer, cfg.system, cfg.chat_args))
    tokenizer.chat_template = tokenizer.tried_template["of"]
    of_rank_0(lambda: agent.note_history(agent.Chat(tokenizer, cfg.history)))

    def load_model(name, dtype):
        model = rl.load_model(name, "cpu", dtype)
        rl.check_length(model.config, cfg.max_length, name, len(tokenizer))
        rl.set_compute_paths(model, of_rank_0(lambda: find_paths(model, cfg.dtype, device)))
        return model

    # Shard a model over the ranks, with weights in `dtype`, or move the whole model to `device`.
    def place(model, dtype):
        return (shard(model, device, cfg.dtype, cfg.offload, dtype) if cfg.shard
                else model.to(device))

    # Prepare a model for training, in place, and make its optimizer.
    def trainable(model, lr):
        if cfg.lora_rank:
            rl.add_lora(model.base_model, cfg.lora_rank, cfg.seed)
        if cfg.compile and rl.packs(model):
            rl.compile_model(model)
        if cfg.gradient_checkpointing:
            rl.recompute_blocks(model)
        parameters = [p for p in place(model, torch.float32).parameters() if p.requires_grad]
        return model, torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)

    # What is trained: the policy and, with PPO, the critic, each with its optimizer. Trained
    # weights are float32; LoRA's base, an untied head included, is frozen, and may stay in the
    # compute dtype. What will be sharded is read in the dtype of its files: `shard` says why.
    own_dtype = "auto" if cfg.shard else getattr(torch, cfg.dtype if cfg.lora_rank else "float32")
    policy = load_model(source, own_dtype).requires_grad_(not cfg.lora_rank)
    trained = {"policy": trainable(policy, cfg.lr)}
    advantage = getattr(cfg, "advantage", None)  # sft.py has none
    if getattr(advantage, "needs_critic", False):
        critic = rl.Critic(cfg.model, own_dtype)
        rl.set_compute_paths(critic, rl.compute_paths_of(policy))
        trained["critic"] = trainable(critic, cfg.critic_lr)

    # What is frozen: the reference of the KL, and models that the algorithm names. They are
    # computed as the policy is, or a KL would begin above 0.
    def load_frozen(name):
        return place(load_model(name, own_dtype), getattr(torch, cfg.dtype))

    reference, models = None, {}
    if getattr(cfg, "kl_coef", 0.0):
        # With LoRA the reference is the policy without its adapters.
        reference = policy if cfg.lora_rank else load_frozen(cfg.model)
    for setting in getattr(advantage, "needs_models", ()):
        if not (name := advantage.keywords.get(setting)):
            raise ValueError(f"--algo {cfg.algo} needs --algo_args {setting}=MODEL")
        if rl.load_tokenizer(name, cfg.chat_template).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{setting} {name} has another vocabulary than {cfg.model}")
        models[setting] = load_frozen(name)

    # A resumed run goes on from its newest checkpoint.
    if newest:
        checkpoint.resume(newest, trained)
    if rank == 0 and notes:
        print(f"{'; '.join(notes)}: going on from step {state['step']}", file=sys.stderr)
    return Run(cfg, Path(cfg.out), pool, signals, rank, num_ranks, device, policy, tokenizer,
               trained, reference, models, state["step"], saved=newest and state["step"],
               adaptive=state["horizon"], items_sha256=state.get("items", ""),
               rows=rows_before(cfg, state["step"]))


def prepare(run: Run) -> None:
    """On rank 0, delete what an earlier process wrote after the checkpoint at `run.step`, write
    config.json, and open the --report_to logger."""
    checkpoint.tidy(run.folder, run.step)
    write_atomically(run.folder / "config.json", json.dumps(asdict(run.cfg), indent=1))
    write_atomically(run.folder / "metrics.jsonl", "".join(to_text(row) + "\n" for row in run.rows))
    run.report = metrics.reporter(run.cfg, run.step)


# ---- the parts of a training step ----


def horizons_at(run: Run, step: int) -> dict[str, int]:
    """World -> its horizon at this step."""
    return {world: own.rounds[run.adaptive[world]["stage"]] if run.adaptive
            else schedule.horizon_at(step, own.rounds, own.horizon_steps)
            for world, own in run.cfg.worlds.items()}


def items_of_step(run: Run, step: int) -> list[str]:
    """The items of this step, world by world."""
    return [item for world, count in items_per_world(run.cfg, run.cfg.items_per_step).items()
            for item in schedule.items_at(run.items[world], run.cfg.seed, step, count)]


def set_learning_rates(run: Run, step: int, num_steps: int) -> float:
    """Set the learning rates of the policy and the critic to their values at this step. -> the
    policy's"""
    factor = schedule.lr_factor_at(step, num_steps, run.cfg.warmup_steps, run.cfg.lr_schedule)
    for name, (_, optimizer) in run.trained.items():
        lr = run.cfg.lr if name == "policy" else run.cfg.critic_lr
        optimizer.param_groups[0]["lr"] = lr * factor
    return run.cfg.lr * factor


def play_items(run: Run, horizons: dict[str, int], step: int, items: list[str], samples: int,
               episode_class: Callable[..., Episode] = Episode) -> tuple[list[Trajectory], dict]:
    """Play the items on all ranks -> the trajectories of all ranks, in the order of items, and the
    columns of a row of metrics that describe decoding. episode_class: see `rollout`. Raises
    Terminated, on every rank, if a stop signal came on any."""
    own, stats, count = [], Counter(), len(items) * samples
    kind = FirstComeDealer if run.cfg.arrival_order else Dealer
    dealer = kind(count, run.signals) if run.num_ranks > 1 else None
    try:
        # The parameters are gathered outside of the signals' block: no rank may leave while others
        # gather.
        with unsharded(run.policy), run.signals.raised(), \
                rl.compute_in(run.cfg.dtype, run.device), \
                metrics.rollout_bar(count // run.num_ranks, run.rank == 0) as on_step:
            own = rollout(run.policy, run.tokenizer, run.pool, items, horizons, run.cfg,
                          samples=samples, step=step, engine=run.engine, stats=stats,
                          episode_class=episode_class, on_step=on_step, dealer=dealer)
    except Terminated:
        if dealer:
            dealer.leave()
    if any(gather([bool(run.signals.received)])):
        raise Terminated

    trajectories = sorted(gather(own), key=lambda t: (t.group, t.sample))
    stats = gather([stats])  # of each rank
    tokens = sum(len(t.tokens) for t in trajectories)
    # Tokens with which a segment begins as the one before it does.
    repeated = sum(common_prefix_length(t.tokens[start:middle], t.tokens[middle:end])
                   for t in trajectories for (start, middle), (_, end) in pairwise(t.spans()))
    # A rank that finishes early waits for the others, so its slots count in their steps, too.
    slot_steps = max(1, run.cfg.slots * max(counts["steps"] for counts in stats))
    shares = {f"occupancy/rank{rank}": counts["busy"] / slot_steps
              for rank, counts in enumerate(stats)}
    return trajectories, {
        "tokens": tokens, "occupancy": sum(shares.values()) / len(shares),
        "forwarded_per_kept": sum(each["forwarded"] for each in stats) / max(1, tokens - repeated),
        **{name: stats[0][name] for name in ("seconds_waiting", "seconds_replies")},
        **(shares if len(shares) > 1 else {})}


def evaluate_held_out(run: Run) -> dict[str, float]:
    """Play EVAL_ITEMS held-out items of each world once, at its last horizon -> "eval/success" and
    so on, for several worlds "eval/success/babyai" ...

    Every evaluation of a run plays the same items with the same random numbers. Its trajectories
    are written to trajectories/eval_000040.jsonl and so on.
    """
    horizons = {world: own.rounds[-1] for world, own in run.cfg.worlds.items()}
    items = [item for world in horizons
             for item in envs.held_out(world, EVAL_ITEMS, run.cfg.data or None)]
    played, _ = play_items(run, horizons, 0, items, samples=1)
    of_rank_0(write_trajectories, run.folder / f"trajectories/eval_{run.step:06d}.jsonl", played)
    by_world = metrics.world_metrics(played, horizons)
    return metrics.world_columns(by_world, metrics.HELD_OUT_METRICS, "eval/")


def advance_adaptive_horizons(run: Run, by_world: dict[str, dict[str, float]]) -> None:
    """Update each world's adaptive schedule, if there is one, with this step's metrics. A world
    whose environments all failed is skipped. --max_length's cuts do not call for more turns."""
    for world, state in run.adaptive.items():
        row, own = by_world[world], run.cfg.worlds[world]
        if row["env_error"] < 1:
            run.adaptive[world] = schedule.adaptive_horizon(
                state, row["success"], row["truncated"] - row["truncated/length"],
                len(own.rounds), window=max(2, own.horizon_steps // 2))


# ---- what is written ----


def log_step(run: Run, row: dict, trajectories: list[Trajectory]) -> None:
    """Write the trajectories, then the row of metrics: a step with a row is complete."""
    run.rows.append(row)
    if run.rank == 0:
        write_trajectories(run.folder / f"trajectories/step_{row['step']:06d}.jsonl", trajectories)
        with (run.folder / "metrics.jsonl").open("a") as f:
            f.write(to_text(row) + "\n")
        run.report(row)


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint from which training continues at `run.step`, unless there is one, and
    redraw the curves."""
    if run.saved == run.step:
        return
    run.saved = run.step
    checkpoint.save(run.folder / f"checkpoints/step_{run.step:06d}", run.policy, run.tokenizer,
                    {"step": run.step, "tried_template": run.tokenizer.tried_template,
                     "horizon": run.adaptive, "items": run.items_sha256,
                     "run_id": run.cfg.run_id}, run.trained)
    if run.rank == 0:
        checkpoint.drop_old(run.folder, run.cfg.keep)
        draw_curves(run.folder)


def until_stopped(run: Run, loop: Callable, *args: object) -> None:
    """Call loop(run, *args). After a stop signal, write a checkpoint from which the interrupted
    step starts again."""
    try:
        loop(run, *args)
    except Terminated:
        save_checkpoint(run)
        if run.rank == 0:
            print(f"{run.signals.received or 'a signal'}: saved before step {run.step}; "
                  "--resume goes on")


def finish(run: Run) -> None:
    """Write the last checkpoint, and final/, a plain Hugging Face folder in the compute dtype, with
    the run's settings and the number of steps taken."""
    save_checkpoint(run)
    final = run.folder / "final"
    checkpoint.save(final, run.policy, run.tokenizer, dtype=getattr(torch, run.cfg.dtype))
    if run.rank == 0:
        settings = asdict(run.cfg) | {"taken": run.step}
        write_atomically(final / RUN_FILE, json.dumps(settings, indent=1))
        print(f"done: {final}; next: python eval.py --env {[*run.cfg.worlds][0]} --model {final}")


if __name__ == "__main__":
    run_command("train.py", parse_config, train)
