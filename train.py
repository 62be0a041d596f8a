"""Multi-turn RL of an LLM agent: schedule, rollout, advantages, update, log, save.

    python train.py --env babyai --algo grpo        # the built-in tiny model: minutes on two cores
    torchrun --nproc_per_node=8 train.py --env babyai --algo grpo --model Qwen/Qwen2.5-7B-Instruct

The training of AgentGym-RL (arXiv 2509.08755) with ScalingInter-RL's horizon schedule. It deviates
from the original in three points. A turn's reward sits on the last token that the policy sampled in
the turn; the original puts it where the loss mask is 0, so that PPO and REINFORCE++ ignore it. A
loss has one denominator per optimizer step; in the original it is a mean of micro-batch means. An
episode whose environment failed is left out of the statistics; in the original it counts as a
reward of 0.
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
from config import EVAL_ITEMS, RUN_FILE, Config, RunConfig, items_per_world, parse_config, servers
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import agent
import checkpoint
import envs
import rl
import schedule
from engine import Ragged
from envs import EnvPool, UserError
from metrics import alarm, banner, draw_curves, held_out_summary, memory_gb, mixture_columns
from metrics import reporter, rollout_bar, rollout_metrics, world_metrics
from models.check import find_paths
from models.packed import common_prefix_length
from parallel import Dealer, FirstComeDealer, StopSignals, Terminated, gather, init_distributed
from parallel import of_rank_0, run_command, shard, unsharded, user_errors
from rollout import make_engine, rollout
from trajectory import Trajectory, read_objects, write_atomically, write_trajectories
from update import advantages_of, shape_rewards, update

IDLE_STEPS = 5  # so many steps in a row without success and gradient give a warning
SHOWN = ("reward", "success", "turns", "horizon", "kl", "entropy", "tokens_per_second")
MANY_CUT = 0.05  # a larger share of trajectories cut by --max_length in a step gives a warning


@dataclass
class Run:
    """The state of a run in this process. `load` sets the fields without defaults, `start` and
    `prepare` the rest."""

    cfg: RunConfig
    pool: EnvPool
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
    rows: list[dict]  # the metrics of the steps before `step`
    report: Callable[[dict], object] | None = None  # sends a row of metrics to --report_to
    engine: Ragged | str = "hf"
    items: dict[str, list[str]] = field(default_factory=dict)  # world -> its training items
    warned: set[str] = field(default_factory=set)  # the warnings that were given

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out)


def train(cfg: Config) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Environments are closed when it ends, by an exception,
    too. Raises ValueError for broken inputs, SystemExit when training cannot go on.
    """
    with lock_folder(cfg), env_pool(cfg) as pool, StopSignals() as signals:
        if not is_finished(cfg):
            with user_errors():
                run = start(cfg, pool, signals)
            training_loop(run)


def training_loop(run: Run) -> None:
    """Run the steps from `run.step` on and write final/, or after a stop signal a checkpoint."""
    cfg = run.cfg
    policy, optimizer = run.trained["policy"]
    critic, critic_optimizer = run.trained.get("critic", (None, None))
    with tqdm(range(run.step, cfg.steps), initial=run.step, total=cfg.steps,
              disable=run.rank > 0, dynamic_ncols=True) as bar:
        for step in bar:
            run.step = step
            if turns_are_played(cfg, run.rows):
                break

            # Evaluation, now and then.
            held_out = {}
            if cfg.eval_every and step % cfg.eval_every == 0:
                held_out = evaluate_held_out(run)

            # Schedule: the horizon of each world, the items, the learning rates.
            began = time.perf_counter()
            horizons = horizons_at(run, step)
            items = items_of_step(run, step)
            set_learning_rates(run, step, cfg.steps)

            # Rollout: the ranks share the trajectories out while they play.
            trajectories, stats = play_items(run, items, horizons, cfg.rollouts_per_item, step)
            if trajectories is None:  # a stop signal came
                return stop(run)
            check_trajectories(run, trajectories)
            shape_rewards(trajectories, cfg.shaping, cfg.turn_cost)
            decoded = decode_stats(trajectories, stats, cfg.slots)
            seconds_rollout = time.perf_counter() - began

            # Advantages, over the trajectories of all ranks.
            batch = advantages_of(trajectories, cfg, run.device, run.reference, critic, run.models)

            # Update.
            changes = update(trajectories, batch, cfg, step, policy, optimizer, critic,
                             critic_optimizer)
            seconds = time.perf_counter() - began

            # Log.
            by_world = world_metrics(trajectories, horizons)
            row = {"step": step, "env": cfg.env, "horizon": max(horizons.values()),
                   **rollout_metrics(trajectories), **changes, **decoded,
                   "seconds_rollout": seconds_rollout, "seconds_update": seconds - seconds_rollout,
                   "tokens_per_second": decoded["tokens"] / seconds,
                   "memory_gb": memory_gb(run.device), **mixture_columns(by_world), **held_out}
            log_step(run, row, trajectories)
            if run.rank == 0:
                warn(run, row)
            bar.set_postfix({name: row[name] for name in SHOWN})

            # Save, unless training cannot go on.
            if problem := alarm(row, cfg):
                sys.exit(f"train.py: stopped at step {step}, see its trajectories: {problem}")
            advance_adaptive_horizons(run, by_world)
            run.step = step + 1
            if run.step % cfg.save_every == 0:
                save_checkpoint(run)
    finish(run)
    if cfg.eval_every:
        last = evaluate_held_out(run)
        if run.rank == 0 and last:
            print(held_out_summary(run.rows, last))


# ---- the start of a run ----


def lock_folder(cfg: RunConfig) -> AbstractContextManager:
    """Make the run folder, and keep other processes out of it until the result is closed. Raises
    ValueError if one is at work in it, or if it holds a run that is not to be resumed."""
    folder = Path(cfg.out)
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(f"another process is at work in {folder}") from e
    except OSError as e:  # the file system has no locks
        print(f"warning: cannot lock {folder} ({e.strerror}): let no other process work in it",
              file=sys.stderr)
    has_rows = any(path.stat().st_size for path in folder.glob("metrics.jsonl"))
    if not cfg.resume and (has_rows or checkpoint.named(folder)):
        raise UserError(f"{folder} holds a run: choose another --out, or continue it with --resume")
    return lock


def is_finished(cfg: RunConfig) -> bool:
    """Whether the run has taken all its steps; if so, rank 0 says so. It stays finished when its
    checkpoints are damaged or deleted. Raises ValueError for a run that ended after fewer steps and
    has no checkpoint: it would start at step 0 and lose its final/."""
    final = Path(cfg.out) / "final" / RUN_FILE
    if not final.exists():
        return False
    taken = json.loads(final.read_text())["taken"]
    # sft.py has no --steps: its last step never changes.
    if taken >= getattr(cfg, "steps", 0) or turns_are_played(cfg, rows_before(cfg, taken)):
        if os.environ.get("RANK", "0") == "0":
            print(f"{cfg.out} is finished ({taken} steps)")
        return True
    if not checkpoint.named(cfg.out):
        raise UserError(f"{cfg.out} has ended after {taken} steps and has no checkpoint to go on "
                        f"from: start another run with --model {cfg.out}/final")
    return False


def rows_before(cfg: RunConfig, step: int) -> list[dict]:
    """The run's rows of metrics of the steps before `step`. Raises ValueError if one is damaged."""
    path = Path(cfg.out) / "metrics.jsonl"
    rows, num_damaged = read_objects(path) if path.exists() else ([], 0)
    rows = [row for row in rows if row["step"] < step]
    if num_damaged and len(rows) < step:
        raise UserError(f"a line of {path} is damaged: delete it to go on without it")
    return rows


def env_pool(cfg: RunConfig) -> EnvPool:
    """The environments of a run."""
    return EnvPool(servers(cfg.env_url, cfg.worlds),
                   options=envs.env_options(cfg.env_args, cfg.worlds))


def start(cfg: Config, pool: EnvPool, signals: StopSignals) -> Run:
    """Load the models, or the newest checkpoint, and prepare the run folder. Raises ValueError for
    broken inputs, before anything is written."""
    run = load(cfg, pool, signals)
    run.items = {world: envs.items(world, "train", cfg.data or None) for world in cfg.worlds}
    items_of_step(run, run.step)  # raises ValueError if there are too few
    if cfg.horizon_schedule == "adaptive":
        run.adaptive = {world: {"stage": 0} for world in cfg.worlds} | run.adaptive
    prepare(run)
    slots = min(cfg.slots, -(-cfg.items_per_step // run.num_ranks) * cfg.rollouts_per_item)
    run.engine = make_engine(run.policy, slots, cfg)
    if run.rank == 0:
        print(banner(run))
    return run


def load(cfg: RunConfig, pool: EnvPool, signals: StopSignals) -> Run:
    """Load every model of a run, or of its newest intact checkpoint, and prepare the models for
    training. Raises ValueError for a model that cannot be loaded or trained, or if all checkpoints
    are damaged."""
    rank, num_ranks, device = init_distributed()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    newest, notes = checkpoint.newest(cfg.out)

    # The tokenizer and its chat template: before the weights, whose loading may take minutes. A
    # resumed run takes the template, and the time that it shows, from its checkpoint.
    source = str(cfg.model if cfg.lora_rank else newest or cfg.model)
    tokenizer = rl.load_tokenizer(source, cfg.chat_template)
    state = checkpoint.read_state(newest) if newest else {"step": 0, "horizon": {}}
    tokenizer.tried_template = state.get("tried_template") or of_rank_0(
        lambda: agent.try_template(tokenizer, cfg.system, cfg.chat_args))
    tokenizer.chat_template = tokenizer.tried_template["of"]
    if rank == 0:
        agent.note_history(agent.Chat(tokenizer, cfg.history))

    def load_model(name, dtype):
        model = rl.load_model(name, "cpu", dtype)
        rl.check_length(model.config, cfg.max_length, name)
        rl.set_compute_paths(model, of_rank_0(lambda: find_paths(model, cfg.dtype, device)))
        return model

    # What is trained: the policy and, with PPO, the critic, each with its optimizer. Trained
    # weights are float32; LoRA's base and the reference are frozen, and may stay in the compute
    # dtype. What will be sharded is read in the dtype of its files: `shard` says why.
    frozen_dtype = "auto" if cfg.shard else getattr(torch, cfg.dtype)
    own_dtype = frozen_dtype if cfg.shard or cfg.lora_rank else torch.float32
    policy = load_model(source, own_dtype)
    trained = {"policy": trainable(policy, cfg.lr, cfg, device)}
    advantage = getattr(cfg, "advantage", None)  # sft.py has none
    if getattr(advantage, "needs_critic", False):
        critic = rl.Critic(cfg.model, own_dtype)
        rl.set_compute_paths(critic, rl.compute_paths_of(policy))
        trained["critic"] = trainable(critic, cfg.critic_lr, cfg, device)

    # What is frozen: the reference of the KL, and models that the algorithm names.
    def load_frozen(name):
        model = load_model(name, frozen_dtype).eval()
        return placed(model, cfg, device, getattr(torch, cfg.dtype))

    reference, models = None, {}
    if getattr(cfg, "kl_coef", 0.0):
        # With LoRA the reference is the policy without its adapters.
        reference = policy if cfg.lora_rank else load_frozen(cfg.model)
    for setting in getattr(advantage, "needs_models", ()):
        name = advantage.keywords.get(setting)
        if not name:
            raise ValueError(f"--algo {cfg.algo} needs --algo_args {setting}=MODEL")
        if rl.load_tokenizer(name, cfg.chat_template).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{setting} {name} has another vocabulary than {cfg.model}")
        models[setting] = load_frozen(name)

    # A resumed run goes on from its newest checkpoint.
    step = state["step"]
    if newest:
        checkpoint.resume(newest, trained)
    if rank == 0 and notes:
        print(f"{'; '.join(notes)}: going on from step {step}", file=sys.stderr)
    return Run(cfg, pool, signals, rank, num_ranks, device, policy, tokenizer, trained, reference,
               models, step, saved=step if newest else None, adaptive=state["horizon"],
               rows=rows_before(cfg, step))


def trainable(model: nn.Module, lr: float, cfg: RunConfig,
              device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model for training in place (LoRA, gradient checkpointing, sharding), and make its
    optimizer."""
    if cfg.lora_rank:
        rl.add_lora(model.base_model, cfg.lora_rank, cfg.seed)
    if cfg.gradient_checkpointing:
        rl.recompute_blocks(model)
    model = placed(model, cfg, device, torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)


def placed(model: nn.Module, cfg: RunConfig, device: torch.device,
           dtype: torch.dtype) -> nn.Module:
    """Shard the model over the ranks, with weights in `dtype`, or move the whole model to `device`
    -> the model."""
    return shard(model, device, cfg.dtype, cfg.offload, dtype) if cfg.shard else model.to(device)


def prepare(run: Run) -> None:
    """Delete what an earlier process wrote after the checkpoint at `run.step`, write config.json,
    and open the --report_to logger."""
    if run.rank > 0:
        return
    (run.folder / "trajectories").mkdir(exist_ok=True)
    checkpoint.tidy(run.folder, run.step)
    write_atomically(run.folder / "config.json", json.dumps(asdict(run.cfg), indent=1))
    write_atomically(run.folder / "metrics.jsonl",
                     "".join(json.dumps(row) + "\n" for row in run.rows))
    run.report = reporter(run.cfg, run.step)


# ---- the parts of a training step ----


def turns_are_played(cfg: Config, rows: list[dict]) -> bool:
    """Whether `turns` is set and less than half of the last step's environment turns are left."""
    played = [row["turns"] * row["trajectories"] for row in rows]
    return bool(cfg.turns and played) and cfg.turns - sum(played) < played[-1] / 2


def horizons_at(run: Run, step: int) -> dict[str, int]:
    """World -> its horizon at this step."""
    kind, worlds = run.cfg.horizon_schedule, run.cfg.worlds
    if kind == "adaptive":
        return {world: own.rounds[run.adaptive[world]["stage"]] for world, own in worlds.items()}
    return {world: schedule.horizon_at(step, own.rounds, own.horizon_steps, kind)
            for world, own in worlds.items()}


def items_of_step(run: Run, step: int) -> list[str]:
    """The items of this step, world by world."""
    counts = items_per_world(run.cfg, run.cfg.items_per_step)
    return [item for world, count in counts.items()
            for item in schedule.items_at(run.items[world], run.cfg.seed, step, count)]


def set_learning_rates(run: Run, step: int, num_steps: int) -> None:
    """Set the learning rates of the policy and the critic to their values at this step."""
    factor = schedule.lr_factor_at(step, num_steps, run.cfg.warmup_steps, run.cfg.lr_schedule)
    for name, (_, optimizer) in run.trained.items():
        lr = run.cfg.lr if name == "policy" else run.cfg.critic_lr
        for group in optimizer.param_groups:
            group["lr"] = lr * factor


def play_items(run: Run, items: list[str], horizons: dict[str, int], samples: int,
               step: int) -> tuple[list[Trajectory] | None, list[Counter]]:
    """Play the items on all ranks -> the trajectories of all ranks, in the order of items, and the
    stats of `rollout` on each rank. None in place of the trajectories if a stop signal came on any
    rank."""
    own, stats, dealer = [], Counter(), None
    if run.num_ranks > 1:
        kind = FirstComeDealer if run.cfg.arrival_order else Dealer
        dealer = kind(len(items) * samples, run.signals)
    try:
        # The parameters are gathered outside of the signals' block: no rank may leave while others
        # gather.
        with unsharded(run.policy), run.signals.raised(), \
                rl.compute_in(run.cfg.dtype, run.device), \
                rollout_bar(len(items) * samples // run.num_ranks, run.rank == 0) as on_step:
            own = rollout(run.policy, run.tokenizer, run.pool, items, horizons, run.cfg,
                          samples=samples, step=step, engine=run.engine, stats=stats,
                          on_step=on_step, dealer=dealer)
    except Terminated:
        if dealer:
            dealer.leave()
    if any(gather([bool(run.signals.received)])):
        return None, []
    return sorted(gather(own), key=lambda t: (t.group, t.sample)), gather([stats])


def decode_stats(trajectories: list[Trajectory], stats: list[Counter],
                 slots: int) -> dict[str, float]:
    """The columns of a row of metrics that describe decoding.

    stats: for each rank, the `stats` of `rollout`. slots: how many each rank has (--slots).
    """
    tokens = sum(len(t.tokens) for t in trajectories)
    segments = [[t.tokens[start:end] for start, end in t.spans()] for t in trajectories]
    # Tokens with which a segment begins as the one before it does.
    repeated = sum(common_prefix_length(*pair) for own in segments for pair in pairwise(own))
    forwarded = sum(counts["forwarded"] for counts in stats)
    # A rank that finishes early waits for the others, so its slots count in their steps, too.
    slot_steps = max(1, slots * max(counts["steps"] for counts in stats))
    shares = {f"occupancy/rank{rank}": counts["busy"] / slot_steps
              for rank, counts in enumerate(stats)}
    return {"tokens": tokens, "forwarded_per_kept": forwarded / max(1, tokens - repeated),
            "occupancy": sum(shares.values()) / len(shares),
            **(shares if len(shares) > 1 else {})}


def evaluate_held_out(run: Run) -> dict[str, float]:
    """Play EVAL_ITEMS held-out items of each world once, at its last horizon -> "eval/success" and
    so on, for several worlds "eval/success/babyai" ...; {} if a stop signal came.

    Every evaluation of a run plays the same items with the same random numbers.
    """
    worlds = run.cfg.worlds
    items = [item for world in worlds
             for item in envs.held_out(world, EVAL_ITEMS, run.cfg.data or None)]
    horizons = {world: own.rounds[-1] for world, own in worlds.items()}
    played, _ = play_items(run, items, horizons, samples=1, step=0)
    if played is None:
        return {}
    names = ("success", "score", "turns", "valid_actions", "env_error")
    return {f"eval/{name}/{world}" if len(worlds) > 1 else f"eval/{name}": own[name]
            for world, own in world_metrics(played, horizons).items()
            for name in names if name in own}


def check_trajectories(run: Run, trajectories: list[Trajectory]) -> None:
    """Raise SystemExit, after saving a checkpoint, if every environment failed."""
    if all(t.status == "env_error" for t in trajectories):
        if run.step:
            save_checkpoint(run)
        sys.exit(f"train.py: every environment failed at step {run.step}; --resume repeats this "
                 f"step; the first error: {trajectories[0].error}")


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
            f.write(json.dumps(row) + "\n")
        run.report(row)


def warn(run: Run, row: dict) -> None:
    """Warn, once for each kind, of what keeps a run from learning."""
    newest = run.rows[-IDLE_STEPS:]
    found = set()
    if len(newest) == IDLE_STEPS and not any(r["success"] or r["grad_norm"] for r in newest):
        found.add(f"{IDLE_STEPS} steps without success and gradient: equal rewards give no "
                  "advantage. Try a warm start (sft.py), easier items or more --rollouts_per_item")
    if row["truncated/length"] > MANY_CUT:
        found.add(f"--max_length cut more than {MANY_CUT:.0%} of a step's trajectories before the "
                  "horizon. A larger one takes more memory")
    for text in sorted(found - run.warned):
        tqdm.write(f"warning: {text}", file=sys.stderr)
    run.warned |= found


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint from which training continues at `run.step`, unless there is one, and
    redraw the curves."""
    if run.saved == run.step:
        return
    run.saved = run.step
    state = {"step": run.step, "tried_template": run.tokenizer.tried_template,
             "horizon": run.adaptive}
    checkpoint.save(run.folder / f"checkpoints/step_{run.step:06d}", run.policy, run.tokenizer,
                    state, run.trained)
    if run.rank == 0:
        checkpoint.drop_old(run.folder, run.cfg.keep)
        if run.rows:  # none if stopped in the first step
            draw_curves(run.folder)


def stop(run: Run) -> None:
    """After a stop signal: write a checkpoint from which the interrupted step starts again."""
    save_checkpoint(run)
    if run.rank == 0:
        came = run.signals.received or "a signal"
        print(f"{came}: saved before step {run.step}; --resume goes on")


def finish(run: Run) -> None:
    """Write the last checkpoint, and final/, a plain Hugging Face folder in the compute dtype, with
    the run's settings and the number of steps taken."""
    save_checkpoint(run)
    final = run.folder / "final"
    checkpoint.save(final, run.policy, run.tokenizer, dtype=getattr(torch, run.cfg.dtype))
    if run.rank == 0:
        settings = asdict(run.cfg) | {"taken": run.step}
        write_atomically(final / RUN_FILE, json.dumps(settings, indent=1))
        world, *_ = run.cfg.worlds
        print(f"done: {final}; next: python eval.py --env {world} --model {final}")


if __name__ == "__main__":
    run_command("train.py", parse_config, train)
