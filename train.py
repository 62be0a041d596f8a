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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

# config comes before torch: it sets how idle threads wait.
from config import EVAL_ITEMS, RUN_FILE, Config, RunConfig, items_per_world, parse_config, servers
import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import agent
import checkpoint
import envs
import rl
import schedule
from engine import Ragged
from envs import EnvPool
from metrics import alarm, banner, draw_curves, held_out_summary, memory_gb, mixture_columns
from metrics import reporter, rollout_bar, rollout_metrics, world_metrics
from models.check import find_paths
from models.packed import common_prefix_length
from parallel import Dealer, FirstComeDealer, StopSignals, Terminated, cast_weights, gather
from parallel import end_process, init_distributed, is_mapped, of_rank_0, on_any_rank
from parallel import ranks, shard, unsharded
from rollout import RolloutConfig, make_engine, rollout
from trajectory import Trajectory, read_objects, write_atomically, write_trajectories
from update import advantages_of, shape_rewards, update

IDLE_STEPS = 5  # so many steps in a row without success and gradient give a warning
MANY_CUT = 0.05  # a larger share of trajectories cut by --max_length in a step gives a warning


@dataclass
class Run:
    """A run in this process. `load` fills in the fields without a default, `start` the others (for
    sft.py: `prepare` and `prepare_rollouts`)."""

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
    notes: list[str]  # what is wrong with the newest checkpoints
    found: list[Path]  # the checkpoints that were there before the models were loaded
    lock: TextIO | None = None  # rank 0's, on the run folder
    report: Callable[[dict], object] | None = None  # sends a row of metrics to --report_to
    engine: Ragged | str = "hf"
    rollout_config: RolloutConfig | None = None
    items: dict[str, list[str]] | None = None  # world -> its training items
    idle_steps: int = 0  # number of newest steps in a row without success and gradient
    warned_of_cuts: bool = False
    turns: list[float] = field(default_factory=list)  # environment turns of each step taken

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out)


def train(cfg: Config) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Environments are closed when it ends, by an exception,
    too. Raises SystemExit for bad usage, and when training cannot go on.
    """
    options = envs.env_options(cfg.env_args, cfg.worlds)
    with EnvPool(servers(cfg.env_url, cfg.worlds), options=options) as pool:
        signals = StopSignals()
        run = None
        try:
            with exit_on_system_error(cfg, "train.py"):
                run = start(cfg)
                if run is not None:
                    if run.rank == 0:
                        print(banner(run))
                    training_loop(run, pool, signals)
        except envs.UserError as e:
            usage_error(e, of_one_rank=True)
        except FloatingPointError as e:
            sys.exit(f"train.py: stopped at step {run.step}: {e}; "
                     f"the last step's trajectories and checkpoints are in {run.folder}")
        finally:
            signals.end()
            release(run)


def training_loop(run: Run, pool: EnvPool, signals: StopSignals) -> None:
    """Run the steps from `run.step` on and write final/, or after a stop signal a checkpoint."""
    cfg = run.cfg
    policy, optimizer = run.trained["policy"]
    critic, critic_optimizer = run.trained.get("critic", (None, None))
    taken = run.step  # number of steps
    with tqdm(range(run.step, cfg.steps), initial=run.step, total=cfg.steps,
              disable=run.rank > 0, dynamic_ncols=True) as bar:
        for step in steps_to_take(run, bar):
            run.step = step

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
                stop(run, signals)
                break
            check_trajectories(run, trajectories)
            shape_rewards(trajectories, cfg.shaping, cfg.turn_cost)
            decoded = decode_stats(trajectories, stats, run.rollout_config.slots)
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
            run.turns.append(turns_played(row))
            taken = step + 1
            if taken % cfg.save_every == 0:
                save_checkpoint(run, taken)
        else:  # all steps are done: no stop signal ended the loop
            if run.saved != taken:
                save_checkpoint(run, taken)
            finish(run)
            if cfg.eval_every:
                print_held_out(run, evaluate_held_out(run, pool, signals))


# ---- the start of a run ----


def start(cfg: Config) -> Run | None:
    """Load the models, or the newest checkpoint, and prepare the run folder -> the run; None if it
    is finished. All inputs that may be broken are read before anything is written."""
    try:
        run = load(cfg)
        if is_finished(run, cfg.steps):
            return None
        if cfg.horizon_schedule == "adaptive":
            run.adaptive = {world: {"stage": 0} for world in cfg.worlds} | run.adaptive
        run.items = {world: envs.items(world, "train", cfg.data or None) for world in cfg.worlds}
        if cfg.turns:
            run.turns = of_rank_0(lambda: turns_before(run))
        prepare(run)
    except ValueError as e:
        usage_error(e)
    trajectories_of_a_rank = -(-cfg.items_per_step // run.num_ranks) * cfg.rollouts_per_item
    prepare_rollouts(run, cfg.engine, min(cfg.slots, trajectories_of_a_rank))
    return run


def load(cfg: RunConfig) -> Run:
    """Load the models, or the newest intact checkpoint. Raises ValueError for a broken model, or
    if all checkpoints are damaged."""
    rank, num_ranks, device = init_distributed()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = of_rank_0(lambda: checkpoint.named(cfg.out))
    newest, notes = checkpoint.newest(cfg.out)
    policy, tokenizer, trained, reference, models = load_for_training(cfg, newest, device)
    state = {"step": 0, "horizon": {}}
    if newest:
        state |= checkpoint.resume(newest, trained)
    return Run(cfg, rank, num_ranks, device, policy, tokenizer, trained, reference, models,
               state["step"], saved=state["step"] if newest else None,
               adaptive=state["horizon"], notes=notes, found=found)


def is_finished(run: Run, steps: int) -> bool:
    """Whether the run has taken all its steps; if so, rank 0 says so. Raises ValueError if a run
    with a final/ is to take more steps but has no checkpoint: it would start at step 0 and lose
    final/."""
    # A finished run stays finished when its checkpoints are damaged or deleted.
    final = run.folder / "final" / RUN_FILE
    if not final.exists():
        return False
    taken = json.loads(final.read_text())["taken"]
    has_ended = taken >= steps
    metrics = run.folder / "metrics.jsonl"
    rows = read_objects(metrics)[0][:taken] if metrics.exists() else []
    limit = getattr(run.cfg, "turns", 0)  # sft.py has none
    if limit and rows:
        has_ended = has_ended or turns_reached(limit, [turns_played(row) for row in rows])
    if not has_ended and run.saved is None:
        raise ValueError(f"{run.folder} has ended after {taken} steps and has no checkpoint to go "
                         f"on from: start another run with --model {run.folder}/final")
    if has_ended and run.rank == 0:
        print(f"{run.folder} is finished ({taken} steps)")
    return has_ended


def prepare(run: Run) -> None:
    """Lock and prepare the run folder, and open the --report_to logger. Raises ValueError if
    another process works in the folder, or has worked in it since the models were loaded."""
    # Returns None, because `of_rank_0` sends the result to all ranks, and an open file cannot be
    # sent.
    def take_folder():
        run.lock = lock_folder(run.folder)
        if checkpoint.named(run.folder) != run.found:
            release(run)
            raise ValueError(f"another process has saved a checkpoint in {run.folder} just now: "
                             "start again with --resume")

    of_rank_0(take_folder)
    if run.rank > 0:
        return
    if run.cfg.resume and run.saved is None:
        print(f"{run.folder} has no complete checkpoint: starting at step 0", file=sys.stderr)
    if run.notes:
        print(f"{'; '.join(run.notes)}: going on from step {run.step}", file=sys.stderr)
    prepare_folder(run.cfg, run.folder, run.step)
    run.report = reporter(run.cfg, run.step)


def prepare_rollouts(run: Run, engine: str, slots: int) -> None:
    """Make `run.engine` and `run.rollout_config`, which every call of `rollout` takes."""
    run.engine = engine
    if engine == "ragged":
        run.engine = make_engine(run.policy, slots, run.cfg.graphs)
    limits = {name: {world: getattr(settings, name) for world, settings in run.cfg.worlds.items()}
              for name in ("max_tokens", "max_length", "invalid_penalty")}
    run.rollout_config = RolloutConfig.from_flags(
        run.cfg, record_states=needs(run.cfg, "states"), **limits)


def load_for_training(
    cfg: RunConfig, newest: Path | None, device: torch.device,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, rl.Trained, PreTrainedModel | None,
           dict[str, PreTrainedModel]]:
    """Load and prepare every model of a run -> policy, tokenizer, `Run.trained`, the reference
    model, or None, and `Run.models`. Raises ValueError for a model that cannot be
    loaded or trained."""
    compute_dtype = getattr(torch, cfg.dtype)
    # Trained weights are float32; LoRA's base and the reference are frozen, and may stay in the
    # compute dtype. What will be sharded is read in the dtype of its files: `shard` says why.
    trained_dtype = "auto" if cfg.shard else torch.float32
    frozen_dtype = "auto" if cfg.shard else compute_dtype
    source = cfg.model if cfg.lora_rank else newest or cfg.model

    # The tokenizer and its chat template: before the weights, whose loading may take minutes.
    tokenizer = rl.load_tokenizer(str(source), cfg.chat_template)
    freeze_chat_template(tokenizer, newest, cfg)

    # The policy's weights, and the fastest exact ways of computing it.
    policy = rl.load_model(str(source), "cpu", frozen_dtype if cfg.lora_rank else trained_dtype)
    if cfg.shard and ranks()[0] == 0 and not is_mapped(policy):
        print("warning: transformers converts this model's weights: while it is loaded, every "
              "process holds a whole copy in the host's memory", file=sys.stderr)
    paths = of_rank_0(lambda: find_paths(policy, cfg.dtype, device))
    rl.set_compute_paths(policy, paths)
    rl.check_length(policy.config, cfg.max_length, cfg.model)

    # What is trained: the policy and, with PPO, the critic, each with its optimizer.
    trained = {"policy": trainable(policy, cfg.lr, cfg, device)}
    policy = trained["policy"][0]
    if needs(cfg, "critic"):
        critic = rl.Critic(cfg.model, "cpu", frozen_dtype if cfg.lora_rank else trained_dtype)
        rl.set_compute_paths(critic, paths)
        trained["critic"] = trainable(critic, cfg.critic_lr, cfg, device)

    # What is frozen: the reference of the KL, and models that the algorithm names.
    def load_frozen(name):
        model = rl.load_model(name, "cpu", frozen_dtype).eval()
        model_paths = paths
        if model.config.model_type != policy.config.model_type:
            model_paths = of_rank_0(lambda: find_paths(model, cfg.dtype, device))
        rl.set_compute_paths(model, model_paths)
        model = placed(model, cfg, device)
        if cfg.shard:
            cast_weights(model, compute_dtype)
        return model

    reference = None
    kl_coef = getattr(cfg, "kl_coef", 0.0)
    if kl_coef:
        # With LoRA the reference is the policy without its adapters.
        reference = policy if cfg.lora_rank else load_frozen(cfg.model)
    models = {}
    for setting, name in named_models(cfg).items():
        if rl.load_tokenizer(name, cfg.chat_template).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{setting} {name} has another vocabulary than {cfg.model}")
        models[setting] = load_frozen(name)
        rows, wanted = (len(model.get_input_embeddings().weight)
                        for model in (models[setting], policy))
        if rows < wanted:
            raise ValueError(f"{setting} {name} has {rows} embeddings, the policy {wanted}: the "
                             f"policy may sample tokens that the {setting} does not know")
        rl.check_length(models[setting].config, cfg.max_length, f"{setting} {name}")
    return policy, tokenizer, trained, reference, models


def needs(cfg: RunConfig, what: str) -> bool:
    """Whether the run's algorithm needs a "critic" or "states"."""
    return isinstance(cfg, Config) and getattr(cfg.advantage, f"needs_{what}", False)


def named_models(cfg: RunConfig) -> dict[str, str]:
    """Setting of the algorithm -> the model that it names."""
    if not isinstance(cfg, Config):
        return {}
    given = cfg.advantage.keywords
    return {name: given[name] for name in getattr(cfg.advantage, "needs_models", ())
            if given.get(name)}


def freeze_chat_template(tokenizer: PreTrainedTokenizerBase, newest: Path | None,
                         cfg: RunConfig) -> None:
    """Try the chat template once for the whole run: a resumed run takes the template, and the time
    that it shows, from its checkpoint. Raises ValueError for a template that cannot be used."""
    saved = checkpoint.read_state(newest) if newest else {}
    tokenizer.tried_template = saved.get("tried_template") or of_rank_0(
        lambda: agent.try_template(tokenizer, cfg.system, cfg.chat_args))
    tokenizer.chat_template = tokenizer.tried_template["of"]
    chat = agent.Chat(tokenizer, cfg.history)
    if ranks()[0] == 0:
        agent.note_history(chat)


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


def lock_folder(folder: Path) -> TextIO:
    """Lock the run folder -> an open file, which holds the lock until it is closed or the process
    ends. Raises ValueError if another process holds it, or if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as e:
        raise ValueError(f"cannot write the run folder {folder}: {e.strerror}") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        lock.close()
        raise ValueError(f"another process is at work in {folder}") from e
    except OSError as e:  # the file system has no locks
        print(f"warning: cannot lock {folder} ({e.strerror}): let no other process work in it",
              file=sys.stderr)
    return lock


def release(run: Run | None) -> None:
    """Release the lock on the run folder."""
    if run is not None and run.lock is not None:
        run.lock.close()


def prepare_folder(cfg: RunConfig, folder: Path, step: int) -> None:
    """Make the run folder, and delete what an earlier process wrote after the checkpoint at `step`.
    Raises ValueError, before anything is deleted, if the metrics of an earlier step are damaged."""
    rows = rows_before(folder / "metrics.jsonl", step)
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    checkpoint.tidy(folder, step)
    write_atomically(folder / "config.json", json.dumps(asdict(cfg), indent=1))
    for path in (folder / "trajectories").glob("step_*.jsonl"):
        step_of_file = checkpoint.step_in(path)
        if step_of_file is not None and step_of_file >= step:
            path.unlink()
    write_atomically(folder / "metrics.jsonl", "".join(row + "\n" for row in rows))


def rows_before(metrics: Path, step: int) -> list[str]:
    """The lines of metrics.jsonl for the steps before `step`. Raises ValueError, which names the
    line, if one of them cannot be read."""
    lines = []
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    damaged = 0  # number of the last line that cannot be read: a killed process leaves such a line
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] < step:
                rows.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged = number
    if damaged and len(rows) < step:
        raise ValueError(f"line {damaged} of {metrics} is damaged: delete it to go on without it")
    return rows


def turns_before(run: Run) -> list[float]:
    """The environment turns of each step before `run.step`, from metrics.jsonl. Raises ValueError
    if steps are missing there."""
    metrics = run.folder / "metrics.jsonl"
    turns = [turns_played(json.loads(row)) for row in rows_before(metrics, run.step)]
    if len(turns) != run.step:
        raise ValueError(f"--turns counts the turns of {run.step} steps, but {metrics} has "
                         f"{len(turns)}: resume without --turns")
    return turns


# ---- the parts of a training step ----


def steps_to_take(run: Run, steps: Iterable[int]) -> Iterator[int]:
    """The steps, up to the one with which --turns is reached."""
    for step in steps:
        if run.cfg.turns and run.turns and turns_reached(run.cfg.turns, run.turns):
            return
        yield step


def turns_reached(limit: int, turns: list[float]) -> bool:
    """Whether less than half of the last step's turns are left. turns: those of each step."""
    return limit - sum(turns) < turns[-1] / 2


def turns_played(row: dict) -> float:
    """Environment turns of a step, by its row of metrics."""
    return row["turns"] * row["trajectories"]


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
        kind = FirstComeDealer if run.rollout_config.arrival_order else Dealer
        dealer = kind(len(items) * samples, signals)
    try:
        # The parameters are gathered outside `signals`: no rank may leave while others gather.
        with unsharded(run.policy), signals, rl.compute_in(run.cfg.dtype, run.device), \
                rollout_bar(len(items) * samples // run.num_ranks, run.rank == 0) as on_step:
            own = rollout(run.policy, run.tokenizer, pool, items, horizons, run.rollout_config,
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
    tokens = sum(len(t.tokens) for t in trajectories)
    kept = sum(num_distinct(t) for t in trajectories)
    forwarded = sum(counts.get("forwarded", 0) for counts in stats)
    # A rank that finishes early waits for the others, so its slots count in their steps, too.
    slot_steps = max(1, slots * max(counts.get("steps", 0) for counts in stats))
    occupancies = [counts.get("busy", 0) / slot_steps for counts in stats]
    row = {"forwarded_per_kept": forwarded / max(1, kept),
           "occupancy": sum(occupancies) / len(occupancies), "tokens": tokens}
    if len(occupancies) > 1:
        row |= {f"occupancy/rank{rank}": share for rank, share in enumerate(occupancies)}
    return row


def num_distinct(t: Trajectory) -> int:
    """The number of a trajectory's tokens, without those that a segment begins with as the one
    before it does."""
    segments = [t.tokens[start:end] for start, end in t.spans()]
    shared = sum(map(common_prefix_length, segments, segments[1:]))
    return len(t.tokens) - shared


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
            save_checkpoint(run, run.step)
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
    if run.rank > 0:
        return
    write_trajectories(trajectory_file(run, row["step"]), trajectories)
    with (run.folder / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(row) + "\n")
    run.report(row)


def warn(run: Run, row: dict) -> None:
    """Warn of what keeps a run from learning."""
    warn_without_signal(run, row)
    warn_of_cuts(run, row)


def warn_without_signal(run: Run, row: dict) -> None:
    """Warn once if IDLE_STEPS steps in a row have neither a success nor a gradient."""
    is_idle = row["success"] == 0 and row["grad_norm"] == 0
    run.idle_steps = run.idle_steps + 1 if is_idle else 0
    if run.idle_steps == IDLE_STEPS and run.rank == 0:
        tqdm.write(f"warning: the last {IDLE_STEPS} steps had no success and no gradient, because "
                   "equal rewards give no advantage. Try a warm start (sft.py), easier items or "
                   "more --rollouts_per_item", file=sys.stderr)


def warn_of_cuts(run: Run, row: dict) -> None:
    """Warn once, in this process, if --max_length cuts many trajectories of a step."""
    if row["truncated/length"] <= MANY_CUT or run.warned_of_cuts or run.rank != 0:
        return
    run.warned_of_cuts = True
    tqdm.write(f"warning: --max_length cut {row['truncated/length']:.0%} of this step's "
               "trajectories before the horizon. A larger one takes more memory",
               file=sys.stderr)


def summary(row: dict) -> str:
    """A row of metrics in short, for the progress bar."""
    return (f"reward {row['reward']:.2f} success {row['success']:.2f} "
            f"turns {row['turns']:.1f}/{row['horizon']} kl {row['kl']:.4f} "
            f"entropy {row['entropy']:.2f} {row['tokens_per_second']:.0f} tok/s")


def save_checkpoint(run: Run, step: int) -> None:
    """Write a checkpoint from which training continues at `step`, and redraw the curves."""
    run.saved = step
    checkpoint.save(run.folder / f"checkpoints/step_{step:06d}", run.policy, run.tokenizer,
            {"step": step, "tried_template": run.tokenizer.tried_template,
             "horizon": run.adaptive}, run.trained)
    if run.rank == 0:
        checkpoint.drop_old(run.folder, run.cfg.keep)
        if (run.folder / "metrics.jsonl").stat().st_size:  # empty if stopped in the first step
            draw_curves(run.folder)


def stop(run: Run, signals: StopSignals) -> None:
    """After a stop signal: write a checkpoint from which the interrupted step starts again."""
    if run.saved != run.step:
        save_checkpoint(run, run.step)
    if run.rank == 0:
        print(f"{signals.received or 'a signal'}: saved before step {run.step}; --resume goes on")


def finish(run: Run) -> None:
    """Write final/, a plain Hugging Face folder in the compute dtype, with the run's settings and
    the number of steps taken."""
    checkpoint.save(run.folder / "final", run.policy, run.tokenizer,
                    dtype=getattr(torch, run.cfg.dtype))
    if run.rank == 0:
        settings = json.loads((run.folder / "config.json").read_text())
        write_atomically(run.folder / "final" / RUN_FILE,
                         json.dumps(settings | {"taken": run.saved}, indent=1))
        world = next(iter(run.cfg.worlds))
        urls = servers(getattr(run.cfg, "env_url", ""), run.cfg.worlds)[world]
        played = f" --env_url {','.join(urls)}" if urls else ""
        print(f"done: {run.folder}/final; "
              f"next: python eval.py --env {world}{played} --model {run.folder}/final")


def print_held_out(run: Run, last: dict[str, float]) -> None:
    """Print the held-out success before and after training. last: of `evaluate_held_out`."""
    if run.rank == 0 and last:
        rows, _ = read_objects(run.folder / "metrics.jsonl")
        print(held_out_summary(rows, last))


@contextmanager
def exit_on_system_error(cfg: RunConfig, script: str) -> Iterator[None]:
    """End the process with one line and exit code 2 if the block raises an error of the file system
    or of a checkpoint's format, or runs out of memory or threads. Other RuntimeErrors pass."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, SafetensorError, CheckpointException) as e:
        cause = e
        if isinstance(e, CheckpointException):
            cause = next(iter(e.failures.values()))[0]  # of the first rank that failed
        lacks_resources = rl.is_lack_of_resources(cause)
        if isinstance(e, RuntimeError) and not lacks_resources:
            raise
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        if lacks_resources:
            reason = (f"no memory or no thread left: {reason}; a smaller --microbatch_tokens or "
                      "--slots takes less")
        message = f"{reason}; {cfg.out} is kept, --resume goes on from its newest checkpoint"
        usage_error(ValueError(message), script, of_one_rank=True)


def usage_error(e: Exception, script: str = "train.py", of_one_rank: bool = False) -> NoReturn:
    """Print one line on stderr and exit with code 2. Only the first process of each machine prints.
    of_one_rank: the error may exist on one rank only, so every rank that has it prints."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", rank) == "0" or of_one_rank:
        at = f"rank {rank}: " if rank != "0" else ""
        print(f"{script}: {at}" + " ".join(str(e).split()), file=sys.stderr)
    else:
        time.sleep(5)  # torchrun ends every rank once one has ended: the one that prints goes first
    sys.exit(2)


if __name__ == "__main__":
    try:
        config = parse_config()
    except (ValueError, OSError) as e:
        usage_error(e)
    train(config)
    end_process()
