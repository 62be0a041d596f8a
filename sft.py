"""Supervised warm start: cross-entropy on the replies of experts or of recorded trajectories.

    python sft.py --env babyai --model smollm2 --demos 400 --out runs/warm
    python sft.py --env babyai --trajectories played.jsonl --min_reward 1
    python train.py --env babyai --model runs/warm/final

Behavioural cloning, the stage before RL in AgentGym (arXiv 2406.04151). A demonstration is a
`Trajectory` like those of a rollout: its mask is true on the tokens of the replies to learn, and
only there. Packing, micro-batches, ranks, checkpoints and --resume are train.py's.
"""

import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# config comes before torch: it sets how idle threads wait.
from config import EVAL_ITEMS, RunConfig, check_worlds, fill_in, items_per_world, read_flags
import numpy as np
from torch import Tensor
from tqdm import tqdm

import agent
import envs
import rl
import train
from agent import Chat
from envs import ABOVE_0, NOT_NEGATIVE, Env, EnvPool, flag, split_item
from metrics import memory_gb
from parallel import StopSignals, Terminated, of_rank_0, on_any_rank, run_command, user_errors
from rollout import Conversation, make_engine
from train import Run
from trajectory import Status, Trajectory, read_trajectories, write_trajectories
from update import Batch, collate, map_rows, optimizer_step

# ---- flags ----


@dataclass
class SFTConfig(RunConfig):
    """what is learnt"""

    demos: int = flag(0, "successful trajectories that the worlds' experts play on training items; "
                         "several worlds share them by their weights", NOT_NEGATIVE)
    noise: float = flag(0.1, "share of turns in which a random action is taken instead of the "
                             "expert's, a valid or (in TextCraft) a refused one: it is not learnt, "
                             "the recovery from it is", NOT_NEGATIVE)
    trajectories: str = flag("", "learn from this file, too: JSON lines of train.py, eval.py or "
                                 "sft.py, or AgentGym's AgentTraj-L (JSON)")
    min_reward: float | None = flag(None, "leave out trajectories of --trajectories with a smaller "
                                          "reward")
    epochs: int = flag(2, "passes over the trajectories", ABOVE_0)
    batch: int = flag(8, "trajectories of an optimizer step", ABOVE_0)
    lr: float = flag(2e-4, "AdamW's learning rate", ABOVE_0)
    lr_schedule: str = flag("cosine", "after the warm-up; cosine: to a tenth, over all steps",
                            ("constant", "cosine"))
    algo: str = "sft"  # what config.json says


def parse_sft_config(argv: list[str] | None = None) -> SFTConfig:
    """The command line, checked and with every default filled in. Raises ValueError with one clear
    line."""
    given = read_flags(SFTConfig, argv, "sft.py", __doc__.split("\n\n")[0])
    if not given.get("resume"):
        given = {"lr": SFTConfig.lr} | given  # and not that of a preset
    cfg = fill_in(SFTConfig, given, "sft")
    if not cfg.demos and not cfg.trajectories:
        raise ValueError("nothing to learn from: give --demos or --trajectories")
    if cfg.min_reward is not None and not cfg.trajectories:
        raise ValueError("--min_reward is for --trajectories; of an expert's trajectories only "
                         "those that succeed are kept")
    if cfg.demos or cfg.eval_every:  # else nothing is played
        check_worlds(cfg, cfg.worlds)
    return cfg


# ---- trajectories of experts ----


def expert_trajectories(cfg: SFTConfig, chat: Chat, split: str, count: int,
                        noise: float) -> list[Trajectory]:
    """`count` successful trajectories of the worlds' experts on items of the split, shared among
    the worlds by weight."""
    found = []
    with tqdm(total=count, desc="expert", unit="trajectory", dynamic_ncols=True) as bar:
        for world, wanted in items_per_world(cfg, count).items():
            for t in trajectories_of_world(cfg, world, chat, split, wanted, noise):
                found.append(t)
                bar.update()
    return found


def trajectories_of_world(cfg: SFTConfig, world: str, chat: Chat, split: str, wanted: int,
                          noise: float) -> Iterator[Trajectory]:
    """`wanted` successful trajectories of one world's expert, no longer than --max_length.

    The result depends on the seed alone, unless an environment fails: its episode is dropped, and a
    new environment is made. Raises ValueError if 3 * wanted episodes do not yield enough.
    """
    options = envs.env_options(cfg.env_args, cfg.worlds).get(world, {})
    names = envs.items(world, split, cfg.data or None)
    random.Random(cfg.seed).shuffle(names)
    env, found, fault = None, 0, "none"
    for attempt in range(3 * wanted):
        if found == wanted:
            break
        epoch, place = divmod(attempt, len(names))
        rng = random.Random(f"{cfg.seed} {names[place]} {epoch}")
        try:
            env = env or envs.make_env(world, **options)
            t = demonstrate(env, names[place], chat, cfg, noise, rng)
        except (envs.UserError, envs.AgentError):
            raise
        except Exception as e:  # a world's crash costs one episode, as in a rollout
            fault = f"{type(e).__name__}: {e}"
            if env:
                envs.close_quietly(env)
            env = None
            continue
        if t.success and any(t.mask) and longest_segment(t) <= cfg.worlds[world].max_length:
            t.sample = epoch
            found += 1
            yield t
    if env:
        envs.close_quietly(env)
    if found < wanted:
        raise ValueError(f"only {found} of {3 * wanted} episodes of {world}'s expert could be used "
                         "(success, at most --max_length tokens, a reply to learn); "
                         f"{wanted} are needed; the last fault of an environment: {fault}")


def demonstrate(env: Env, item: str, chat: Chat, cfg: SFTConfig, noise: float,
                rng: random.Random) -> Trajectory:
    """One episode of the world's expert, at most as many turns as the horizon. A random action,
    valid or refused, takes the place of the expert's with probability `noise`, in worlds that list
    them; its tokens are masked out."""
    world, _ = split_item(item)
    own = cfg.worlds[world]
    t = Trajectory(item, world)
    config = replace(cfg, max_length=own.max_length, invalid_penalty=0.0, worlds={})
    episode = Conversation(t, own.rounds[-1], config, chat)
    answer = episode.advance(env)
    while episode.take(answer):
        if episode.play.kind:
            raise envs.UserError(f"agent {cfg.agent} asks for {episode.play.kind}, and an expert "
                                 "only acts")
        action = env.expert()
        if action is None:
            episode.end(Status.HORIZON)
            break
        is_random = rng.random() < noise
        random_actions = env.valid_actions() + env.refused_actions() if is_random else []
        if random_actions:
            action = rng.choice(random_actions)
        text = action
        if not env.whole_reply:
            text = agent.reply_with(action, cfg.action_format, thing_named(action))
        ids = chat.reply(text)
        t.append(ids, None if random_actions else [0.0] * len(ids))
        answer = episode.advance(env, text, chat.final_message(ids[:-1]))
    episode.play.close()
    return t


# An action's verb, amount, thing, number or ingredients.
ACTION = re.compile(r"(?:toggle and go through|go through|go to|pick ?up|focus on|look at|\w+)"
                    r"(?: \d+)? (?!left|right|forward|available)(.+?)(?: \d+| using .*)?")


def thing_named(action: str) -> str:
    """The object of an action, which is the thought in an expert's reply.

    >>> thing_named("go to red ball 1"), thing_named("craft 4 oak planks using 1 oak log")
    ('red ball', 'oak planks')
    >>> thing_named("turn left")
    'nothing'
    """
    match = ACTION.fullmatch(action)
    return match[1] if match else "nothing"


# ---- recorded trajectories ----


def read_demonstrations(path: str | Path, chat: Chat, min_reward: float = -math.inf,
                        action_format: str = "") -> list[Trajectory]:
    """The trajectories of a file: JSON lines as train.py, eval.py and sft.py write them, or a JSON
    list of AgentGym's conversations. Those whose environment failed, that have a reward below
    `min_reward` or no reply to learn are left out. Raises ValueError for a file of another kind,
    tokenizer or, if it is given, action format."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip()[:1] == "[":
            found = [from_conversation(entry, chat) for entry in json.loads(text)]
        else:
            found = read_trajectories(path)
        for t in found:
            check_demonstration(t, chat, action_format)
        found = [t for t in found if any(t.mask) and t.reward >= min_reward
                 and t.status != Status.ENV_ERROR]
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} holds no trajectories: {e}") from e
    if not found:
        raise ValueError(f"no trajectory of {path} is left to learn from: each has a smaller "
                         "reward, a failed environment or no tokens of a reply")
    return found


def check_demonstration(t: Trajectory, chat: Chat, action_format: str) -> None:
    """Raise ValueError unless a trajectory was played with this tokenizer and chat template, and
    with instructions for this action format, if both are known."""
    if not t.tokens or not t.messages:
        return
    if min(t.tokens) < 0 or max(t.tokens) >= len(chat.tokenizer):
        raise ValueError(f"{t.item} has tokens that are not in the vocabulary")
    roles = [message["role"] for message in t.messages]
    has_fixed_reply = roles[:3] == ["user", "assistant", "user"]
    start = chat.prompt(t.messages[: 3 if has_fixed_reply else roles.index("assistant")])
    if t.tokens[: len(start)] != start:
        raise ValueError(f"{t.item} was written with another tokenizer or chat template")
    instructions = t.messages[0]["content"]
    described = [name for name, words in agent.FORMATS.items()
                 if words and words.strip() in instructions]
    if action_format and described and action_format not in described:
        raise ValueError(f"{t.item} was played with --action_format {described[0]}, not "
                         f"{action_format}")


def longest_segment(t: Trajectory) -> int:
    """The number of tokens of a trajectory's longest segment."""
    return max((end - start for start, end in t.spans()), default=0)


def drop_long(trajectories: list[Trajectory], cfg: SFTConfig) -> list[Trajectory]:
    """The trajectories of at most --max_length tokens. A line on stderr says how many are longer.
    Raises ValueError if all are."""
    limits = {world: own.max_length for world, own in cfg.worlds.items()}
    found = [t for t in trajectories
             if longest_segment(t) <= limits.get(t.env, max(limits.values()))]
    if not found:
        raise ValueError(f"every trajectory of {cfg.trajectories} is longer than --max_length")
    if len(found) < len(trajectories):
        print(f"sft.py: {len(trajectories) - len(found)} of {len(trajectories)} trajectories of "
              f"{cfg.trajectories} are longer than --max_length and left out", file=sys.stderr)
    return found


def from_conversation(entry: dict, chat: Chat) -> Trajectory:
    """An entry of AgentTraj-L, {"item_id", "conversations": [{"from", "value", "loss"}, ...]},
    whose first three messages are the instructions, a fixed reply and the first observation. It has
    no rewards: all of its trajectories count as successes."""
    item, parts = entry["item_id"], entry["conversations"]
    t = Trajectory(item, split_item(item)[0], reward=1.0, score=1.0, success=True,
                   status=Status.DONE)
    for place, part in enumerate(parts):
        is_reply = place % 2 == 1
        if part["from"] != ("gpt" if is_reply else "human"):
            raise ValueError(f"{item}: its messages should be from human and gpt in turns")
        text = part["value"]
        t.messages.append(agent.assistant(text) if is_reply else agent.user(text))
        if place == 2:
            t.append(chat.start(parts[0]["value"], text, reply=parts[1]["value"]))
        elif place > 2 and is_reply:
            ids = chat.reply(text)
            t.append(ids, None if part.get("loss") is False else [0.0] * len(ids))
            t.turns += 1
        elif place > 2:
            t.append(chat.turn(text, closed=True))
    return t


# ---- training ----


def sft(cfg: SFTConfig) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Raises ValueError for a model or file that cannot be
    loaded, SystemExit when training cannot go on.
    """
    with train.run_folder(cfg), train.env_pool(cfg) as pool:
        signals = StopSignals()
        try:
            with user_errors():
                run = train.load(cfg)
                demos, held_out = of_rank_0(partial(collect_demos, run, signals))
            steps = cfg.epochs * steps_per_epoch(len(demos), cfg)
            if not train.is_finished(run, steps):
                train.prepare(run)
                for name, part in zip(DEMO_FILES, (demos, held_out)):  # for --resume
                    if run.rank == 0 and part:
                        write_trajectories(run.folder / name, part)
                run.engine = make_engine(run.policy, cfg.slots, cfg)
                training_loop(run, demos, held_out, steps, pool, signals)
        finally:
            signals.end()


DEMO_FILES = ("demos.jsonl", "held_out.jsonl")


def collect_demos(run: Run, signals: StopSignals) -> tuple[list[Trajectory], list[Trajectory]]:
    """-> the trajectories to learn, and held-out ones if --eval_every asks for their loss. A
    resumed run reads those that it began with. Raises ValueError if a stop signal comes."""
    cfg, chat = run.cfg, Chat(run.tokenizer)
    if run.saved is not None:
        learnt, held_out = (run.folder / name for name in DEMO_FILES)
        return (read_demonstrations(learnt, chat),
                read_demonstrations(held_out, chat) if held_out.exists() else [])
    demos, held_out = [], []
    if cfg.trajectories:
        least = -math.inf if cfg.min_reward is None else cfg.min_reward
        recorded = read_demonstrations(cfg.trajectories, chat, least, cfg.action_format)
        demos += drop_long(recorded, cfg)
    try:
        with signals:
            if cfg.demos:
                demos += expert_trajectories(cfg, chat, "train", cfg.demos, cfg.noise)
            if cfg.eval_every and cfg.demos:
                held_out = expert_trajectories(cfg, chat, "test", EVAL_ITEMS, noise=0.0)
    except Terminated:
        raise ValueError(f"{signals.received} before the first step: nothing is written") from None
    for number, t in enumerate(demos):
        t.group = number
    return demos, held_out


def training_loop(run: Run, demos: list[Trajectory], held_out: list[Trajectory], steps: int,
                  pool: EnvPool, signals: StopSignals) -> None:
    """Run the training steps from `run.step` on, and write final/. After a stop signal write a
    checkpoint instead."""
    cfg = run.cfg
    policy, optimizer = run.trained["policy"]
    with tqdm(range(run.step, steps), initial=run.step, total=steps, disable=run.rank > 0,
              dynamic_ncols=True) as bar:
        for step in bar:
            # Evaluation, now and then.
            run.step = step
            row = {"step": step, "epoch": step // steps_per_epoch(len(demos), cfg), "env": cfg.env}
            if cfg.eval_every and step % cfg.eval_every == 0:
                row |= train.evaluate_held_out(run, pool, signals)
                if held_out:
                    row["held_out_loss"] = mean_loss(run, held_out)
            if on_any_rank(bool(signals.received)):
                train.stop(run, signals)
                break

            # Update.
            began = time.perf_counter()
            train.set_learning_rates(run, step, steps)
            part = [demos[i] for i in rows_of_step(len(demos), cfg, step)]
            batch = collate(part)
            tokens = int(batch["mask"].sum())
            objective = partial(cross_entropy, run, tokens)
            stats = optimizer_step(policy, optimizer, batch, range(len(part)), objective,
                                   cfg.microbatch_tokens, cfg.max_grad_norm)
            seconds = time.perf_counter() - began

            # Log, save.
            row |= {"loss": stats["loss"], "grad_norm": stats["grad_norm"],
                    "lr": optimizer.param_groups[0]["lr"], "trajectories": len(part),
                    "tokens": sum(len(t.tokens) for t in part), "learnt_tokens": tokens,
                    "computed_per_fed": stats["computed"] / stats["fed"],
                    "seconds_update": seconds, "tokens_per_second": stats["fed"] / seconds,
                    "memory_gb": memory_gb(run.device)}
            train.log_step(run, row, part)
            bar.set_postfix_str(f"loss {row['loss']:.3f} {row['tokens_per_second']:.0f} tok/s")
            for name in ("loss", "grad_norm"):
                if not np.isfinite(row[name]):
                    sys.exit(f"sft.py: stopped at step {step}: {name} is {row[name]}")
            run.step = step + 1
            if run.step % cfg.save_every == 0 or run.step == steps:
                train.save_checkpoint(run)
        else:  # all steps are done: no stop signal ended the loop
            train.finish(run)


def steps_per_epoch(count: int, cfg: SFTConfig) -> int:
    """The number of optimizer steps in which `count` trajectories are learnt once."""
    return -(-count // cfg.batch)


def rows_of_step(count: int, cfg: SFTConfig, step: int) -> list[int]:
    """The indices, below `count`, of the trajectories of a step. Each epoch has a new order, which
    is a function of (seed, epoch)."""
    epoch, place = divmod(step, steps_per_epoch(count, cfg))
    order = np.random.default_rng([cfg.seed, epoch, 2]).permutation(count)
    return order[place * cfg.batch : (place + 1) * cfg.batch].tolist()


def cross_entropy(run: Run, denominator: int, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of -log p over a micro-batch's learnt tokens, divided by `denominator`, the number of
    them in the step -> loss, no stats."""
    with rl.compute_in(run.cfg.dtype, run.device):
        logp, _ = rl.token_logprobs(run.policy, part["ids"], part["mask"], entropy_gradient=False)
    return -logp.sum() / denominator, {}


def mean_loss(run: Run, trajectories: list[Trajectory]) -> float:
    """The mean of -log p over the tokens at which the trajectories' masks are True."""
    def logprobs(model, ids, mask):
        return rl.token_logprobs(model, ids, mask)[0]

    batch = collate(trajectories)
    with rl.compute_in(run.cfg.dtype, run.device):
        logp = map_rows(logprobs, run.policy, batch, run.cfg.microbatch_tokens)
    return float(-logp.sum() / batch["mask"].sum())


if __name__ == "__main__":
    run_command("sft.py", parse_sft_config, sft)
