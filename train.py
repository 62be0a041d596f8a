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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from parallel import Dealer, FirstComeDealer, StopSignals, Terminated, cast_weights, gather
from parallel import init_distributed, of_rank_0, on_any_rank, run_command, shard, unsharded
from parallel import user_errors
from rollout import make_engine, rollout
from trajectory import Trajectory, read_objects, write_atomically, write_trajectories
from update import advantages_of, shape_rewards, update

IDLE_STEPS = 5  # so many steps in a row without success and gradient give a warning
MANY_CUT = 0.05  # a larger share of trajectories cut by --max_length in a step gives a warning


@dataclass
class Run:
    """The state of a run in this process. `load` sets the fields without defaults, `start` the
    rest."""

    cfg: RunConfig
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
    warned: set[str] = field(default_factory=set)  # the kinds of warnings that were given

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out)


def train(cfg: Config) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Environments are closed when it ends, by an exception,
    too. Raises ValueError for broken inputs, SystemExit when training cannot go on.
    """
    with run_folder(cfg), env_pool(cfg) as pool:
        signals = StopSignals()
        try:
            with user_errors():
                run = start(cfg)
            if run is not None:
                if run.rank == 0:
                    print(banner(run))
                training_loop(run, pool, signals)
        finally:
            signals.end()


def env_pool(cfg: RunConfig) -> EnvPool:
    """The environments of a run."""
    return EnvPool(servers(cfg.env_url, cfg.worlds),
                   options=envs.env_options(cfg.env_args, cfg.worlds))


def training_loop(run: Run, pool: EnvPool, signals: StopSignals) -> None:
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
                held_out = evaluate_held_out(run, pool, signals)

            # Schedule: the horizon of each world, the items, the learning rates.
            began = time.perf_counter()
            horizons = horizons_at(run, step)
            items = items_of_step(run, step)
            set_learning_rates(run, step, cfg.steps)

            # Rollout: the ranks share the trajectories out while they play.
            trajectories, stats = play_items(run, pool, signals, items, horizons,
                                             cfg.rollouts_per_item, step)
            if trajectories is None:  # a stop signal came
                return stop(run, signals)
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
            warn(run, row)
            bar.set_postfix_str(summary(row))

            # Save, unless training cannot go on.
            if problem := alarm(row, cfg):
                sys.exit(f"train.py: stopped at step {step}: {problem}; "
                         f"its trajectories: {trajectory_file(run, step)}")
            advance_adaptive_horizons(run, by_world)
            run.step = step + 1
            if run.step % cfg.save_every == 0:
                save_checkpoint(run)
    if run.saved != run.step:
        save_checkpoint(run)
    finish(run)
    if cfg.eval_every:
        last = evaluate_held_out(run, pool, signals)
        if run.rank == 0 and last:
            print(held_out_summary(run.rows, last))


# ---- the start of a run ----


@contextmanager
def run_folder(cfg: RunConfig) -> Iterator[None]:
    """Make the run folder, and keep other processes out of it. Raises ValueError if one is at work
    in it, or if it holds a run that is not to be resumed."""
    folder = Path(cfg.out)
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(f"another process is at work in {folder}") from e
        except OSError as e:  # the file system has no locks
            print(f"warning: cannot lock {folder} ({e.strerror}): let no other process work in it",
                  file=sys.stderr)
        metrics = folder / "metrics.jsonl"
        has_rows = metrics.exists() and metrics.stat().st_size
        if not cfg.resume and (has_rows or checkpoint.named(folder)):
            raise UserError(f"{folder} holds a run already; add --resume to continue it or choose "
                             "another --out")
        yield


def start(cfg: Config) -> Run | None:
    """Load the models, or the newest checkpoint, and prepare the run folder -> the run; None if it
    is finished. Raises ValueError for broken inputs, before anything is written."""
    run = load(cfg)
    run.items = {world: envs.items(world, "train", cfg.data or None) for world in cfg.worlds}
    items_of_step(run, run.step)  # raises ValueError if there are too few
    if cfg.horizon_schedule == "adaptive":
        run.adaptive = {world: {"stage": 0} for world in cfg.worlds} | run.adaptive
    if is_finished(run, cfg.steps):
        return None
    prepare(run)
    slots = min(cfg.slots, -(-cfg.items_per_step // run.num_ranks) * cfg.rollouts_per_item)
    run.engine = make_engine(run.policy, slots, cfg)
    return run


def load(cfg: RunConfig) -> Run:
    """Load the models, or the newest intact checkpoint. Raises ValueError for a broken model, or
    if all checkpoints are damaged."""
    rank, num_ranks, device = init_distributed()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    newest, notes = checkpoint.newest(cfg.out)
    policy, tokenizer, trained, reference, models = load_for_training(cfg, newest, device)
    state = {"step": 0, "horizon": {}}
    if newest:
        state |= checkpoint.resume(newest, trained)
    step = state["step"]
    if rank == 0 and notes:
        print(f"{'; '.join(notes)}: going on from step {step}", file=sys.stderr)
    metrics = Path(cfg.out) / "metrics.jsonl"
    rows, num_damaged = read_objects(metrics) if metrics.exists() else ([], 0)
    rows = [row for row in rows if row["step"] < step]
    if num_damaged and len(rows) < step:
        raise ValueError(f"a line of {metrics} is damaged: delete it to go on without it")
    return Run(cfg, rank, num_ranks, device, policy, tokenizer, trained, reference, models, step,
               saved=step if newest else None, adaptive=state["horizon"], rows=rows)


def is_finished(run: Run, steps: int) -> bool:
    """Whether the run has taken all its steps; if so, rank 0 says so. Raises ValueError for a run
    that has ended before and has no checkpoint: it would start at step 0 and lose its final/."""
    # A finished run stays finished when its checkpoints are damaged or deleted.
    final = run.folder / "final" / RUN_FILE
    taken = json.loads(final.read_text())["taken"] if final.exists() else -1
    has_ended = taken >= steps or taken >= 0 and turns_are_played(run.cfg, run.rows)
    if taken >= 0 and not has_ended and run.saved is None:
        raise ValueError(f"{run.folder} has ended after {taken} steps and has no checkpoint to go "
                         f"on from: start another run with --model {run.folder}/final")
    if has_ended and run.rank == 0:
        print(f"{run.folder} is finished ({taken} steps)")
    return has_ended


def prepare(run: Run) -> None:
    """Delete what an earlier process wrote after the checkpoint at `run.step`, write config.json,
    and open the --report_to logger."""
    if run.rank > 0:
        return
    if run.cfg.resume and run.saved is None:
        print(f"{run.folder} has no complete checkpoint: starting at step 0", file=sys.stderr)
    (run.folder / "trajectories").mkdir(exist_ok=True)
    checkpoint.tidy(run.folder, run.step)
    write_atomically(run.folder / "config.json", json.dumps(asdict(run.cfg), indent=1))
    for path in (run.folder / "trajectories").glob("step_*.jsonl"):
        if (checkpoint.step_in(path) or 0) >= run.step:
            path.unlink()
    write_atomically(run.folder / "metrics.jsonl",
                     "".join(json.dumps(row) + "\n" for row in run.rows))
    run.report = reporter(run.cfg, run.step)


def load_for_training(
    cfg: RunConfig, newest: Path | None, device: torch.device,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, rl.Trained, PreTrainedModel | None,
           dict[str, PreTrainedModel]]:
    """Load and prepare every model of a run -> policy, tokenizer, `Run.trained`, the reference
    model, or None, and `Run.models`. Raises ValueError for a model that cannot be loaded or
    trained."""
    # Trained weights are float32; LoRA's base and the reference are frozen, and may stay in the
    # compute dtype. What will be sharded is read in the dtype of its files: `shard` says why.
    trained_dtype = "auto" if cfg.shard else torch.float32
    frozen_dtype = "auto" if cfg.shard else getattr(torch, cfg.dtype)
    own_dtype = frozen_dtype if cfg.lora_rank else trained_dtype
    source = cfg.model if cfg.lora_rank else newest or cfg.model

    # The tokenizer and its chat template: before the weights, whose loading may take minutes. A
    # resumed run takes the template, and the time that it shows, from its checkpoint.
    tokenizer = rl.load_tokenizer(str(source), cfg.chat_template)
    saved = checkpoint.read_state(newest) if newest else {}
    tokenizer.tried_template = saved.get("tried_template") or of_rank_0(
        lambda: agent.try_template(tokenizer, cfg.system, cfg.chat_args))
    tokenizer.chat_template = tokenizer.tried_template["of"]
    chat = agent.Chat(tokenizer, cfg.history)
    if os.environ.get("RANK", "0") == "0":
        agent.note_history(chat)

    # What is trained: the policy and, with PPO, the critic, each with its optimizer.
    policy = rl.load_model(str(source), "cpu", own_dtype)
    paths = of_rank_0(lambda: find_paths(policy, cfg.dtype, device))
    rl.set_compute_paths(policy, paths)
    rl.check_length(policy.config, cfg.max_length, cfg.model)
    trained = {"policy": trainable(policy, cfg.lr, cfg, device)}
    policy = trained["policy"][0]
    advantage = getattr(cfg, "advantage", None)  # sft.py has none
    if getattr(advantage, "needs_critic", False):
        critic = rl.Critic(cfg.model, own_dtype)
        rl.set_compute_paths(critic, paths)
        trained["critic"] = trainable(critic, cfg.critic_lr, cfg, device)

    # What is frozen: the reference of the KL, and models that the algorithm names.
    def load_frozen(name):
        model = rl.load_model(name, "cpu", frozen_dtype).eval()
        rl.set_compute_paths(model, of_rank_0(lambda: find_paths(model, cfg.dtype, device)))
        model = placed(model, cfg, device)
        if cfg.shard:
            cast_weights(model, getattr(torch, cfg.dtype))
        return model

    reference = None
    if getattr(cfg, "kl_coef", 0.0):
        # With LoRA the reference is the policy without its adapters.
        reference = policy if cfg.lora_rank else load_frozen(cfg.model)
    models = {}
    for setting in getattr(advantage, "needs_models", ()):
        name = advantage.keywords.get(setting)
        if not name:
            raise ValueError(f"--algo {cfg.algo} needs --algo_args {setting}=MODEL")
        if rl.load_tokenizer(name, cfg.chat_template).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{setting} {name} has another vocabulary than {cfg.model}")
        models[setting] = load_frozen(name)
        rl.check_length(models[setting].config, cfg.max_length, f"{setting} {name}")
    return policy, tokenizer, trained, reference, models


def trainable(model: nn.Module, lr: float, cfg: RunConfig,
              device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model for training in place (LoRA, gradient checkpointing, sharding), and make its
    optimizer."""
    if cfg.lora_rank:
        rl.add_lora(getattr(model, "body", model), cfg.lora_rank, cfg.seed)
    if cfg.gradient_checkpointing:
        rl.recompute_blocks(model)
    model = placed(model, cfg, device)
    if cfg.shard:
        model.float()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)


def placed(model: nn.Module, cfg: RunConfig, device: torch.device) -> nn.Module:
    """Shard the model over the ranks, or move the whole model to `device` -> the model."""
    return shard(model, device, cfg.dtype, cfg.offload) if cfg.shard else model.to(device)


# ---- the parts of a training step ----


def turns_are_played(cfg: RunConfig, rows: list[dict]) -> bool:
    """Whether `turns` is set and less than half of the last step's environment turns are left."""
    played = [row["turns"] * row["trajectories"] for row in rows if "turns" in row]
    limit = getattr(cfg, "turns", 0)  # sft.py has none
    return bool(limit and played) and limit - sum(played) < played[-1] / 2


def horizons_at(run: Run, step: int) -> dict[str, int]:
    """World -> its horizon at this step."""
    horizons = {}
    for world, settings in run.cfg.worlds.items():
        if run.adaptive:
            horizons[world] = settings.rounds[run.adaptive[world]["stage"]]
        else:
            horizons[world] = schedule.horizon_at(step, settings.rounds, settings.horizon_steps,
                                                  run.cfg.horizon_schedule)
    return horizons


def items_of_step(run: Run, step: int) -> list[str]:
    """The items of this step, world by world."""
    items = []
    for world, count in items_per_world(run.cfg, run.cfg.items_per_step).items():
        items += schedule.items_at(run.items[world], run.cfg.seed, step, count)
    return items


def set_learning_rates(run: Run, step: int, num_steps: int) -> None:
    """Set the learning rates of the policy and the critic to their values at this step."""
    factor = schedule.lr_factor_at(step, num_steps, run.cfg.warmup_steps, run.cfg.lr_schedule)
    for name, flag in (("policy", "lr"), ("critic", "critic_lr")):
        if name in run.trained:
            for group in run.trained[name][1].param_groups:
                group["lr"] = getattr(run.cfg, flag) * factor


def play_items(run: Run, pool: EnvPool, signals: StopSignals, items: list[str],
               horizons: dict[str, int], samples: int,
               step: int) -> tuple[list[Trajectory] | None, list[dict[str, int]]]:
    """Play the items on all ranks -> the trajectories of all ranks, in the order of items, and the
    stats of `rollout` on each rank. None in place of the trajectories if a stop signal came on any
    rank."""
    own: list[Trajectory] = []
    stats: dict[str, int] = {}
    dealer = None
    if run.num_ranks > 1:
        kind = FirstComeDealer if run.cfg.arrival_order else Dealer
        dealer = kind(len(items) * samples, signals)
    try:
        # The parameters are gathered outside `signals`: no rank may leave while others gather.
        with unsharded(run.policy), signals, rl.compute_in(run.cfg.dtype, run.device), \
                rollout_bar(len(items) * samples // run.num_ranks, run.rank == 0) as on_step:
            own = rollout(run.policy, run.tokenizer, pool, items, horizons, run.cfg,
                          samples=samples, step=step, engine=run.engine, stats=stats,
                          on_step=on_step, dealer=dealer)
    except Terminated:
        if dealer:
            dealer.leave()
    if on_any_rank(bool(signals.received)):
        return None, []
    return sorted(gather(own), key=lambda t: (t.group, t.sample)), gather([stats])


def decode_stats(trajectories: list[Trajectory], stats: list[dict[str, int]],
                 slots: int) -> dict[str, float]:
    """The columns of a row of metrics that describe decoding.

    stats: for each rank, the `stats` of `rollout`. slots: how many each rank has (--slots).
    """
    kept = 0  # tokens, without those that a segment begins with as the one before it does
    for t in trajectories:
        segments = [t.tokens[start:end] for start, end in t.spans()]
        kept += len(t.tokens) - sum(map(common_prefix_length, segments, segments[1:]))
    # A rank that finishes early waits for the others, so its slots count in their steps, too.
    slot_steps = max(1, slots * max(counts.get("steps", 0) for counts in stats))
    occupancies = [counts.get("busy", 0) / slot_steps for counts in stats]
    row = {"forwarded_per_kept": sum(c.get("forwarded", 0) for c in stats) / max(1, kept),
           "occupancy": sum(occupancies) / len(occupancies),
           "tokens": sum(len(t.tokens) for t in trajectories)}
    if len(occupancies) > 1:
        row |= {f"occupancy/rank{rank}": share for rank, share in enumerate(occupancies)}
    return row


def evaluate_held_out(run: Run, pool: EnvPool, signals: StopSignals) -> dict[str, float]:
    """Play EVAL_ITEMS held-out items of each world once, at its last horizon -> "eval/success" and
    so on, for several worlds "eval/success/babyai" ...; {} if a stop signal came.

    Every evaluation of a run plays the same items with the same random numbers.
    """
    worlds = run.cfg.worlds
    items = [item for world in worlds
             for item in envs.held_out(world, EVAL_ITEMS, run.cfg.data or None)]
    horizons = {world: settings.rounds[-1] for world, settings in worlds.items()}
    played, _ = play_items(run, pool, signals, items, horizons, samples=1, step=0)
    if played is None:
        return {}
    row = {}
    for world, own in world_metrics(played, horizons).items():
        suffix = f"/{world}" if len(worlds) > 1 else ""
        row |= {f"eval/{name}{suffix}": own[name]
                for name in ("success", "score", "turns", "valid_actions", "env_error")
                if name in own}
    return row


def check_trajectories(run: Run, trajectories: list[Trajectory]) -> None:
    """Raise SystemExit if every environment failed, after saving a checkpoint, or if in the first
    step no trajectory of a world had room for a first turn."""
    if all(t.status == "env_error" for t in trajectories):
        if run.saved != run.step and run.step:
            save_checkpoint(run)
        sys.exit(f"train.py: every environment failed at step {run.step}; --resume repeats this "
                 f"step; the first error: {trajectories[0].error}")
    for world, settings in run.cfg.worlds.items():
        turns = [t.turns for t in trajectories if t.env == world and t.status != "env_error"]
        if turns and not any(turns) and not run.step:
            sys.exit(f"train.py: --max_length is {settings.max_length}: "
                     f"no first prompt of {world} fits")


def advance_adaptive_horizons(run: Run, by_world: dict[str, dict[str, float]]) -> None:
    """Update each world's adaptive schedule, if there is one, with this step's metrics. A world
    whose environments all failed is skipped. --max_length's cuts do not call for more turns."""
    for world, state in run.adaptive.items():
        own, settings = by_world[world], run.cfg.worlds[world]
        if own["env_error"] < 1:
            run.adaptive[world] = schedule.adaptive_horizon(
                state, own["success"], own["truncated"] - own["truncated/length"],
                len(settings.rounds), window=max(2, settings.horizon_steps // 2))


# ---- what is written ----


def trajectory_file(run: Run, step: int) -> Path:
    """Where the trajectories of a step are kept, one a line."""
    return run.folder / f"trajectories/step_{step:06d}.jsonl"


def log_step(run: Run, row: dict, trajectories: list[Trajectory]) -> None:
    """Write the trajectories, then the row of metrics: a step with a row is complete."""
    run.rows.append(row)
    if run.rank == 0:
        write_trajectories(trajectory_file(run, row["step"]), trajectories)
        with (run.folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
        run.report(row)


def warn(run: Run, row: dict) -> None:
    """Warn, once for each kind, of what keeps a run from learning."""
    newest = run.rows[-IDLE_STEPS:]
    is_idle = all(r["success"] == r["grad_norm"] == 0 for r in newest)
    for kind, is_so, text in (
        ("idle", is_idle and len(newest) == IDLE_STEPS,
         f"the last {IDLE_STEPS} steps had no success and no gradient, because equal rewards give "
         "no advantage. Try a warm start (sft.py), easier items or more --rollouts_per_item"),
        ("cut", row["truncated/length"] > MANY_CUT,
         f"--max_length cut {row['truncated/length']:.0%} of this step's trajectories before the "
         "horizon. A larger one takes more memory"),
    ):
        if is_so and kind not in run.warned and run.rank == 0:
            run.warned.add(kind)
            tqdm.write(f"warning: {text}", file=sys.stderr)


def summary(row: dict) -> str:
    """A row of metrics in short, for the progress bar."""
    return (f"reward {row['reward']:.2f} success {row['success']:.2f} "
            f"turns {row['turns']:.1f}/{row['horizon']} kl {row['kl']:.4f} "
            f"entropy {row['entropy']:.2f} {row['tokens_per_second']:.0f} tok/s")


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint from which training continues at `run.step`, and redraw the curves."""
    run.saved = run.step
    state = {"step": run.step, "tried_template": run.tokenizer.tried_template,
             "horizon": run.adaptive}
    checkpoint.save(run.folder / f"checkpoints/step_{run.step:06d}", run.policy, run.tokenizer,
                    state, run.trained)
    if run.rank == 0:
        checkpoint.drop_old(run.folder, run.cfg.keep)
        if run.rows:  # none if stopped in the first step
            draw_curves(run.folder)


def stop(run: Run, signals: StopSignals) -> None:
    """After a stop signal: write a checkpoint from which the interrupted step starts again."""
    if run.saved != run.step:
        save_checkpoint(run)
    if run.rank == 0:
        print(f"{signals.received or 'a signal'}: saved before step {run.step}; --resume goes on")


def finish(run: Run) -> None:
    """Write final/, a plain Hugging Face folder in the compute dtype, with the run's settings and
    the number of steps taken."""
    checkpoint.save(run.folder / "final", run.policy, run.tokenizer,
                    dtype=getattr(torch, run.cfg.dtype))
    if run.rank == 0:
        write_atomically(run.folder / "final" / RUN_FILE,
                         json.dumps(asdict(run.cfg) | {"taken": run.saved}, indent=1))
        world = next(iter(run.cfg.worlds))
        urls = servers(run.cfg.env_url, run.cfg.worlds)[world]
        played = f" --env_url {','.join(urls)}" if urls else ""
        print(f"done: {run.folder}/final; "
              f"next: python eval.py --env {world}{played} --model {run.folder}/final")


if __name__ == "__main__":
    run_command("train.py", parse_config, train)
