"""Supervised warm start: cross-entropy on the replies of experts or of recorded trajectories.

    python sft.py --env babyai --model smollm2 --demos 400 --out runs/warm
    python sft.py --env babyai --trajectories played.jsonl --min_reward 1
    python train.py --env babyai --model runs/warm/final

Behavioural cloning, the stage before RL in AgentGym (arXiv 2406.04151). A demonstration is a
`Trajectory` like those of a rollout: its mask is true on the tokens of the replies to learn, and
only there. Packing, micro-batches, ranks, checkpoints and --resume are train.py's.
"""

import math
import random
import sys
import time
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, replace
from json import JSONDecodeError
from pathlib import Path

# config comes before torch: it sets how idle threads wait.
from config import EVAL_ITEMS, RunConfig, check_worlds, fill_in, items_per_world, read_flags
from torch import Tensor
from tqdm import tqdm

import agent
import envs
import metrics
import rl
import schedule
import train
from envs import ABOVE_0, NOT_NEGATIVE, Env, flag, split_item
from parallel import StopSignals, Terminated, gather, of_rank_0, run_command, user_errors
from rollout import Conversation, Rollouts, make_engine
from trajectory import Status, Trajectory, read_checked, read_trajectories, reply_spans
from trajectory import write_trajectories
from update import Batch, collate, map_rows, optimizer_step
from worlds import thing_named
from worlds.agentgym import read_conversation

# ---- flags ----


@dataclass
class SFTConfig(RunConfig):
    """what is learnt"""

    # successful trajectories that the worlds' experts play on training items; several worlds share
    # them by their weights
    demos: int = flag(0, NOT_NEGATIVE)
    # share of turns in which a random action is taken instead of the expert's, a valid or (in
    # TextCraft) a refused one: it is not learnt, the recovery from it is
    noise: float = flag(0.1, NOT_NEGATIVE)
    # learn from this file, too: JSON lines of train.py, eval.py or sft.py, or AgentGym's
    # AgentTraj-L (JSON)
    trajectories: str = flag("")
    # leave out trajectories of --trajectories with a smaller reward
    min_reward: float | None = flag(None)
    # learn trajectories of held-out items, too
    learn_held_out: bool = flag(False, study=True)
    # passes over the trajectories
    epochs: int = flag(2, ABOVE_0)
    # trajectories of an optimizer step
    batch: int = flag(8, ABOVE_0)
    # AdamW's learning rate
    lr: float = flag(2e-4, ABOVE_0)
    # after the warm-up; cosine: to a tenth, over all steps
    lr_schedule: str = flag("cosine", ("constant", "cosine"))
    algo: str = "sft"  # what config.json says


def parse_sft_config(argv: list[str] | None = None) -> SFTConfig:
    """The command line, checked and with every default filled in. Raises ValueError with one clear
    line."""
    given = read_flags(SFTConfig, argv, "sft.py", __doc__.split("\n\n")[0])
    if not given.get("resume"):
        given = {"lr": SFTConfig.lr} | given  # and not that of a preset
    cfg = fill_in(SFTConfig, given)
    if not cfg.demos and not cfg.trajectories:
        raise ValueError("nothing to learn from: give --demos or --trajectories")
    if cfg.min_reward is not None and not cfg.trajectories:
        raise ValueError("--min_reward is for --trajectories: an expert's all succeed")
    if cfg.demos or cfg.eval_every:  # else nothing is played
        check_worlds(cfg, cfg.worlds)
    return cfg


# ---- trajectories of experts ----


def expert_trajectories(cfg: SFTConfig, chat: agent.Chat, split: str, count: int,
                        noise: float) -> list[Trajectory]:
    """`count` successful trajectories of the worlds' experts on items of the split, no longer than
    --max_length, shared among the worlds by weight.

    The result depends on the seed alone, unless an environment fails: its episode is dropped, and a
    new environment is made. Raises ValueError if three times as many episodes do not yield enough.
    """
    trajectories = []
    for world, wanted in items_per_world(cfg, count).items():
        options = envs.env_options(cfg.env_args, cfg.worlds).get(world, {})
        names = envs.items(world, split, cfg.data or None)
        random.Random(cfg.seed).shuffle(names)
        if envs.world_class(world).expert is Env.expert:
            raise ValueError(f"{world} has no expert (Env.expert): give --trajectories")
        env, found, fault = None, [], "none"
        for attempt in tqdm(range(3 * wanted), f"{world}'s expert", unit="episode", leave=False):
            if len(found) == wanted:
                break
            epoch, place = divmod(attempt, len(names))
            rng = random.Random(f"{cfg.seed} {names[place]} {epoch}")
            try:
                env = env or envs.make_env(world, **options)
                t = demonstrate(env, names[place], chat, cfg, noise, rng)
            except envs.EnvError as e:  # a failed environment costs one episode, as in a rollout
                env, fault = None, e
                continue
            if t.success and any(t.mask) and t.longest_segment() <= cfg.worlds[world].max_length:
                t.sample = epoch
                found.append(t)
        if env:
            envs.close_quietly(env)
        if len(found) < wanted:
            raise ValueError(f"{world}'s expert succeeded within --max_length in {len(found)} of "
                             f"{3 * wanted} episodes, {wanted} are needed; last fault: {fault}")
        trajectories += found
    return trajectories


def demonstrate(env: Env, item: str, chat: agent.Chat, cfg: SFTConfig, noise: float,
                rng: random.Random) -> Trajectory:
    """One episode of the world's expert, at most as many turns as the horizon. A random action,
    valid or refused, takes the place of the expert's with probability `noise`, in worlds that list
    them; its tokens are masked out."""
    t = Trajectory(item, split_item(item)[0])
    own = cfg.worlds[t.env]
    config = replace(cfg, max_length=own.max_length, invalid_penalty=0.0, worlds={})
    episode = Conversation(t, own.rounds[-1], config, chat)
    episode.advance(env)
    while episode.take():
        if episode.play.kind:
            raise envs.UserError(f"an expert has no {episode.play.kind} for agent {cfg.agent}")
        action = env.expert()
        if action is None:
            episode.end(Status.HORIZON)
            break
        is_random = rng.random() < noise
        random_actions = env.valid_actions() + env.refused_actions() if is_random else []
        if random_actions:
            action = rng.choice(random_actions)
        text = action if env.whole_reply else agent.reply_with(action, cfg.action_format,
                                                               thing_named(action))
        ids = chat.reply(text)
        t.append(ids, None if random_actions else [0.0] * len(ids))
        episode.advance(env, text, chat.final_message(ids[:-1]))
    episode.play.close()
    return t


# ---- recorded trajectories ----


def read_demonstrations(path: Path, chat: agent.Chat, cfg: SFTConfig) -> list[Trajectory]:
    """The trajectories of a file: JSON lines as train.py, eval.py and sft.py write them, or
    conversations, as a JSON list or as JSON lines (see `from_conversation`).

    Those whose environment failed, that have no reply to learn or ids that the tokenizer does not
    have, with less than --min_reward or with more than --max_length are left out. Raises ValueError
    for a file of another kind, tokenizer or action format, and for items that are held out."""
    def read(row):
        return from_conversation(row, chat) if "item_id" in row else read_checked(row)

    longest = max(own.max_length for own in cfg.worlds.values())
    try:
        found = read_trajectories(path, read)
        kept = [t for t in found if any(t.mask) and t.status != Status.ENV_ERROR
                and (cfg.min_reward is None or t.reward >= cfg.min_reward)
                and t.longest_segment() <= longest and max(t.tokens) < len(chat.tokenizer)]
        for t in kept:
            check_demonstration(t, chat, cfg.action_format)
    except (LookupError, TypeError, AttributeError, RecursionError, JSONDecodeError) as e:
        raise ValueError(f"{path} holds no trajectories: {e}") from e
    if not kept:
        raise ValueError(f"no trajectory of {path} is left to learn from")
    held_out = set()
    for world in {split_item(t.item)[0] for t in kept}:
        with suppress(envs.UserError):  # a world without a list of them
            held_out.update(envs.items(world, "test", cfg.data or None))
    learnt = held_out.intersection(t.item for t in kept)
    if learnt and not cfg.learn_held_out:
        raise ValueError(f"{path} has held-out items, such as {min(learnt)}: an evaluation would "
                         "measure what was learnt; --set learn_held_out=true learns them")
    print(f"{path}: {len(kept)} of {len(found)} trajectories are learnt", file=sys.stderr)
    return kept


def check_demonstration(t: Trajectory, chat: agent.Chat, action_format: str) -> None:
    """Raise ValueError unless a trajectory was played with this tokenizer and chat template, and
    with instructions for this action format, if they are for one; and unless its tokens are those
    of its messages, and its mask covers replies."""
    def flat(text):  # some tokenizers change white space, and letters to equal ones
        return " ".join(unicodedata.normalize("NFKC", text).split())

    roles = [message["role"] for message in t.messages]
    has_fixed_reply = roles[:3] == ["user", "assistant", "user"]
    start = chat.prompt(t.messages[: 3 if has_fixed_reply else roles.index("assistant")])
    if t.tokens[: len(start)] != start:
        raise ValueError(f"{t.item} was written with another tokenizer or chat template")
    described = [name for name, words in agent.FORMATS.items()
                 if words and words.strip() in t.messages[0]["content"]]
    if described and action_format not in described:
        raise ValueError(f"{t.item} was played with --action_format {described[0]}")
    decode, shown = chat.tokenizer.decode, flat(chat.tokenizer.decode(t.tokens))
    if any(m["role"] == "user" and flat(m["content"]) not in shown for m in t.messages[:-1]):
        raise ValueError(f"{t.item}: a message is not among its tokens")
    said = [flat(m["content"]) for m in t.messages if m["role"] == "assistant"][has_fixed_reply:]
    for start, end in reply_spans(t.mask):
        ids = t.tokens[start : end - chat.is_ended(t.tokens[start:end])]
        text = flat(decode(chat.final_message(ids), skip_special_tokens=True))
        text = text if text in said else f"<think> {text}"  # which the prompt had begun
        if text in said:
            del said[: said.index(text) + 1]
        elif said or end < len(t.tokens):  # the last reply may lack an answer
            raise ValueError(f"{t.item}: its mask does not cover one reply from {start} to {end}")


def from_conversation(entry: dict, chat: agent.Chat) -> Trajectory:
    """The trajectory of an entry of AgentTraj-L: see `worlds.agentgym.read_conversation`."""
    messages, learnt, reward, success = read_conversation(entry)
    places = range(3, len(messages), 2)

    def recorded(play):
        for place in places:
            yield messages[:place]

    t = Trajectory(entry["item_id"], split_item(entry["item_id"])[0])
    talk = Conversation(t, len(messages), Rollouts(agent=recorded, max_length=sys.maxsize), chat)
    talk.advance(Env())
    for place in places:
        talk.take()
        text = messages[place]["content"]
        ids = chat.reply(text)
        t.append(ids, [0.0] * len(ids) if learnt[place] else None)
        talk.advance(Env(), text, chat.final_message(ids[:-1]))
    talk.take()
    t.messages += messages[len(t.messages):]  # what follows the last reply
    t.reward, t.score, t.success = reward, min(max(reward, 0.0), 1.0), success
    return t


# ---- training ----


def sft(cfg: SFTConfig) -> None:
    """Train from the first step, or the next one of a resumed run, to the last.

    Under torchrun every process calls it. Raises ValueError for a model or file that cannot be
    loaded, SystemExit when training cannot go on.
    """
    with train.lock_folder(cfg), train.env_pool(cfg) as pool:
        if train.is_finished(cfg):
            return
        with user_errors():
            run = train.load(cfg, pool, StopSignals())
            demos, held_out = of_rank_0(lambda: collect_demos(run))
        with run.signals:
            if run.rank == 0:
                train.prepare(run)
                write_trajectories(run.folder / "demos.jsonl", demos)
                write_trajectories(run.folder / "held_out.jsonl", held_out)
            run.engine = make_engine(run.policy, cfg.slots, cfg)
            train.until_stopped(run, training_loop, demos, held_out)


def collect_demos(run: train.Run) -> tuple[list[Trajectory], list[Trajectory]]:
    """-> the trajectories to learn, and held-out ones if --eval_every asks for their loss. A
    resumed run reads those that it began with."""
    if run.saved is not None:
        demos, held_out = (read_trajectories(run.folder / f"{name}.jsonl")
                           for name in ("demos", "held_out"))
        if not demos:
            raise ValueError(f"{run.folder}/demos.jsonl is empty")
        return demos, held_out
    cfg, chat = run.cfg, agent.Chat(run.tokenizer, run.cfg.history)
    demos, held_out = [], []
    if cfg.trajectories:
        demos += read_demonstrations(Path(cfg.trajectories), chat, cfg)
    if cfg.demos:
        demos += expert_trajectories(cfg, chat, "train", cfg.demos, cfg.noise)
    if cfg.demos and cfg.eval_every:
        held_out = expert_trajectories(cfg, chat, "test", EVAL_ITEMS, noise=0.0)
    for number, t in enumerate([*demos, *held_out]):
        t.group, t.choices = number, {}  # all tokens are learnt, those that were forced, too
    return demos, held_out


def training_loop(run: train.Run, demos: list[Trajectory], held_out: list[Trajectory]) -> None:
    """Run the training steps from `run.step` on, and write final/. Raises Terminated, on every
    rank, after a stop signal."""
    cfg = run.cfg
    policy, optimizer = run.trained["policy"]
    per_epoch = -(-len(demos) // cfg.batch)
    steps = cfg.epochs * per_epoch
    with metrics.step_bar(run.step, steps, run.rank) as bar:
        for step in bar:
            # Evaluation, now and then.
            run.step = step
            row = {"step": step, "epoch": step // per_epoch, "env": cfg.env}
            if cfg.eval_every and step % cfg.eval_every == 0:
                row |= train.evaluate_held_out(run)
                if held_out:
                    row["held_out_loss"] = mean_loss(run, held_out)
            if any(gather([bool(run.signals.received)])):
                raise Terminated

            # Update.
            began = time.perf_counter()
            train.set_learning_rates(run, step, steps)
            part = [demos[i] for i in schedule.rows_of_step(len(demos), cfg.batch, cfg.seed, step)]
            batch = collate(part)
            tokens = int(batch["mask"].sum())
            stats = optimizer_step(policy, optimizer, batch, range(len(part)),
                                   lambda rows: cross_entropy(run, tokens, rows),
                                   cfg.microbatch_tokens, cfg.max_grad_norm)
            seconds = time.perf_counter() - began

            # Log, save.
            row |= {"loss": stats["loss"], "grad_norm": stats["grad_norm"],
                    "lr": optimizer.param_groups[0]["lr"], "trajectories": len(part),
                    "tokens": sum(len(t.tokens) for t in part), "learnt_tokens": tokens,
                    "computed_per_fed": stats["computed"] / stats["fed"], "seconds_update": seconds,
                    "tokens_per_second": stats["fed"] / seconds,
                    "memory_gb": metrics.memory_gb(run.device)}
            train.log_step(run, row, part)
            metrics.show(bar, row, run.rank, ("loss", "tokens_per_second"))
            if not math.isfinite(row["loss"] + row["grad_norm"]):
                sys.exit(f"sft.py: stopped at step {step}: loss or grad_norm is not finite")
            run.step = step + 1
            if run.step % cfg.save_every == 0:
                train.save_checkpoint(run)
    train.finish(run)


def cross_entropy(run: train.Run, denominator: int, part: Batch) -> tuple[Tensor, dict]:
    """The sum of -log p over a micro-batch's learnt tokens, divided by `denominator`, the number of
    them in the step -> loss, no stats."""
    with rl.compute_in(run.cfg.dtype, run.device):
        logp, _ = rl.token_logprobs(run.policy, part["ids"], part["mask"], entropy_gradient=False)
    return -logp.sum() / denominator, {}


def mean_loss(run: train.Run, trajectories: list[Trajectory]) -> float:
    """The mean of -log p over the tokens at which the trajectories' masks are True."""
    batch = collate(trajectories)
    with rl.compute_in(run.cfg.dtype, run.device):
        logp = map_rows(lambda model, part: rl.token_logprobs(model, part["ids"], part["mask"])[0],
                        run.policy, batch, run.cfg.microbatch_tokens)
    return float(-logp.sum() / batch["mask"].sum())


if __name__ == "__main__":
    run_command("sft.py", parse_sft_config, sft)
