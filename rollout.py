"""Multi-turn rollouts, token by token, with one KV cache that is kept across turns.

    feed new ids -> sample a token for each trajectory -> send complete replies to environments

There is no barrier between trajectories. Each of a fixed number of slots holds one trajectory,
which advances at its own pace. While an environment computes its answer, the other slots keep
decoding. When a trajectory ends, its slot is given to the next one.

Tokens are canonical. A trajectory's tokens are appended once and never rebuilt from text. `mask` is
written when a token is appended, and the recorded log-prob comes from the very logits that the
token was drawn from. Each trajectory draws from its own generator, keyed by (seed, step, item,
sample).

A trajectory is one segment or several, one after the other. Within a segment every prompt extends
the previous one. Where the agent shows the model something else (a window, a summary), a new
segment begins with the whole new prompt. A token is sampled, and trained on, in one segment only.
"""

import itertools
import math
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent import AGENTS, FORMATS, Chat, Messages, Play, answer_of, assistant, load_agent, user
from engine import SAMPLED_LAST, Ragged, sample
from envs import ABOVE_0, NOT_NEGATIVE, Env, EnvError, EnvPool, UserError, Worker, flag, split_item
from metrics import timed
from models.check import find_paths, plays_alone
from models.lockstep import decode_in_lockstep
from models.packed import common_prefix_length
from parallel import Dealer, device_of, unsharded
from rl import Sampling, compute_paths_of
from trajectory import Status, Trajectory, next_ids
from worlds.agentgym import LENIENT

# ---- settings ----


@dataclass
class Rollouts(Sampling):
    """how trajectories are played"""

    # how a reply holds its action
    action_format: str = flag("react", tuple(FORMATS))
    # strict: one action, exactly as --action_format has it | lenient: as AgentGym's client of the
    # world reads it
    parse: str = flag("lenient", ("strict", "lenient"))
    # or a file of ideas/, as choose; or your own: FILE.py:NAME, module:NAME (docs/agents.md)
    agent: str | Callable = flag("react", AGENTS)
    # settings of the agent, NAME=VALUE: keep=2; plan=true reflect=true
    agent_args: str = flag("")
    # append: earlier replies stay in the prompt as sampled | template: as the chat template writes
    # them, in a new segment where it rewrites them; default: template where both differ
    history: str = flag("", ("append", "template"))
    # a system message; default: that of the run which wrote --model
    system: str = flag("")
    # switches of the chat template: enable_thinking=false, or a JSON object; default: those of the
    # run which wrote --model
    chat_args: str = flag("")
    # largest reply, tokens
    max_tokens: int = flag(512, ABOVE_0)
    # largest segment, tokens
    max_length: int = flag(10240, ABOVE_0)
    # taken off the reward of an invalid action
    invalid_penalty: float = flag(0.0, NOT_NEGATIVE)
    # trajectories that each process plays at the same time
    slots: int = flag(32, ABOVE_0, may_change=True)
    # seconds an environment has to answer
    deadline: float = flag(60.0, ABOVE_0, may_change=True)
    # seconds to create an environment
    create_deadline: float = flag(300.0, ABOVE_0, study=True, may_change=True)
    # hf: the model's own attention, in lockstep (slow; the reference)
    engine: str = flag("ragged", ("ragged", "hf"), study=True)
    # on a GPU, record decode steps as CUDA graphs
    graphs: bool = flag(True, study=True, may_change=True)
    # take environments' answers as they come: faster, and not repeatable bit for bit; default: with
    # --env_url
    arrival_order: bool | None = flag(None, study=True, may_change=True)
    top_p: float = 1.0  # nucleus sampling, in evaluation
    top_k: int = 0  # sample from the k likeliest tokens, in evaluation; 0: off
    samples: int = 1  # trajectories of each item
    retries: int = 2  # how often an episode is played again after its environment failed
    record_states: bool = False  # ask the environments for `Trajectory.states`
    # World -> {"prompt", "reply"}, in the place of its own instructions: see `agent.Play`.
    prompt_texts: dict[str, dict[str, str]] = field(default_factory=dict)
    worlds: dict[str, Any] = field(default_factory=dict)  # world -> its own max_tokens and so on

    def of_world(self, name: str, world: str) -> Any:
        """A setting's value in `world`: its own if it has one."""
        return getattr(self.worlds.get(world, self), name)

    def play(self, item: str, env: Env, horizon: int, step: int = 0) -> Play:
        """An episode of `item`, "babyai_17", as its agent sees it. Raises UserError for an agent
        that cannot be loaded."""
        world, _ = split_item(item)
        choose = LENIENT.get(world) if self.parse == "lenient" else None
        return Play(env, item, horizon, load_agent(self.agent, self.agent_args), self.action_format,
                    choose, self.prompt_texts.get(world, {}), step, self.seed, self.deadline)


# ---- one trajectory while it is played ----


class Conversation:
    """A trajectory as its agent leads it, whoever writes the replies: the policy (`Episode`), an
    expert (sft.py) or a model on a server (eval.py).

    `advance` passes a reply on and renders what the model is to answer. It runs in the
    environment's thread and only reads the trajectory, because a thread that missed its deadline
    may still run. `take` then records what came back. chat: None for a trajectory without tokens.

    What `advance` leaves for `take`: `prompt`, the messages to answer next (None: the agent has
    ended the episode), `new_messages`, those of them that are new to the model, or the last
    observation, `new_ids`, the ids up to the next reply, `begins`, whether they are a whole prompt
    and begin a new segment, and `state`, in which the next reply is written.
    """

    def __init__(self, trajectory: Trajectory, horizon: int, config: Rollouts,
                 chat: Chat | None):
        self.trajectory = trajectory
        self.horizon = horizon
        self.config = config
        self.chat = chat
        self.max_length = config.of_world("max_length", trajectory.env)
        self.play: Play | None = None
        self.prompt: Messages | None = []
        self.new_options: list[list[int | None]] = []  # the replies that are allowed, if not all
        self.tools: list[dict] | None = None  # with what `prompt` was shown
        self.sampled: list[tuple[str, list[int]]] = []  # (text, ids) of each reply

    def advance(self, env: Env, reply: str | None = None, ids: Sequence[int] = (),
                closed: bool = True, cut: bool = False) -> None:
        """Send a reply to the agent (None: start it), and render what the model is to answer.

        ids: the reply's, as later prompts show it. closed: whether its end-of-turn token was
        written. cut: whether it reached --max_tokens. Raises AgentError for a bug of the agent.
        """
        if reply is None:
            t = self.trajectory
            self.play = self.config.play(t.item, env, self.horizon, t.step)
        else:
            self.sampled.append((reply, list(ids)))
        prompt = self.play.send(reply, cut)
        if self.play.choices and self.chat is None:
            raise UserError("an agent that chooses among texts needs the model's own tokens")
        while prompt is not None and self.play.turns < self.horizon and self.chat is not None:
            try:
                self.new_ids, self.begins = self._render(prompt, reply, closed)
                self.new_options = self.chat.options(self.play.choices)
                break
            except EnvError:
                raise
            except Exception as e:  # whatever the template's program raises
                prompt = self.play.send(error=ValueError(f"cannot render the messages: {e!r}"))
        self.new_messages = self._new_in(prompt, reply)
        if self.config.record_states and type(env).state is Env.state:
            raise UserError(f"{self.trajectory.env} does not tell its states, which --algo needs")
        self.state = env.state() if prompt and self.config.record_states else None
        # What is asked for is part of the state: a plan and the action that follows are written in
        # different states.
        if self.state is not None and self.play.kind:
            self.state = f"{self.play.kind}: {self.state}"
        self.prompt, self.tools = prompt, self.play.tools

    def _render(self, prompt: Messages, reply: str | None,
                closed: bool) -> tuple[list[int], bool]:
        """-> the ids that lead to the next reply, and whether they begin a new segment."""
        shown = [*self.prompt, assistant(reply)]
        new = prompt[len(shown):]
        extends = prompt[: len(shown)] == shown and self.play.tools == self.tools
        by_turns = all(m["role"] == ("user", "assistant")[n % 2] for n, m in enumerate(new))
        if self.chat.history == "append" and extends and by_turns:
            return self.chat.turns(new, closed), False
        ids = self.chat.prompt(prompt, self.play.tools, self.sampled)
        held = [] if reply is None else self.trajectory.segment()
        begins = not held or ids[: len(held)] != held
        return ids if begins else ids[len(held):], begins

    def _new_in(self, prompt: Messages | None, reply: str | None) -> Messages:
        """The messages of a prompt that the model sees for the first time: those after its reply
        or, if the prompt does not show it, those after what it shares with the prompt before."""
        if prompt is None:  # the last observation, which the model is not shown
            last = self.play.turn.observation
            return [user(last)] if last else []
        shown = [place for place, message in enumerate(prompt) if message == assistant(reply)]
        start = shown[-1] + 1 if shown else common_prefix_length(self.prompt, prompt)
        return prompt[start:] or prompt[-1:]

    def take(self) -> bool:
        """Record what `advance` has brought -> whether the trajectory goes on."""
        t = self.trajectory
        if self.play.turns:
            reply, _ = self.sampled[-1]
            penalty = self.config.of_world("invalid_penalty", t.env)
            t.record_turn(reply, self.play.turn, self.play.forgets, penalty)
            t.unclosed_turns += [t.turns] * (answer_of(reply) is None)
        t.messages += self.new_messages
        if self.prompt is None:
            return self.end(Status.DONE)
        if t.turns >= self.horizon:
            return self.end(Status.HORIZON)
        if self.chat is None:
            return True
        held = 0 if self.begins else len(t.segment())
        if held + len(self.new_ids) >= self.max_length:  # no room for a single token of a reply
            return self.end(Status.LENGTH)
        if self.begins:
            t.begin_segment()
        t.append(self.new_ids)
        if self.new_options:
            t.choices[len(t.tokens)] = self.new_options
        if self.config.record_states:
            t.states.append(self.state)
        return True

    def end(self, status: Status, error: str = "") -> bool:
        """Record how the trajectory has ended -> False."""
        t = self.trajectory
        t.status, t.error = status, error
        if t.rewards:  # it was not played as text
            # An exactly rounded sum: equal rewards must compare equal, in whichever turns they
            # came.
            t.reward = round(math.fsum(t.rewards), 9)
        return False

    def give_back(self, pool: EnvPool, worker: Worker) -> None:
        """Close the agent, in the thread of its environment, and give the environment back. One
        that has failed, or whose episode has not ended, is dropped, and a hung thread is left
        behind."""
        if self.play is not None:
            worker.call(lambda env: self.play.close())
        if self.trajectory.status in (Status.ENV_ERROR, Status.RUNNING):
            pool.drop(worker)
        else:
            pool.give_back(self.trajectory.env, worker)


class Episode(Conversation):
    """A trajectory while the policy plays it: its environment, its random numbers, its unfed ids.

    `pending`: ids that the model has not been fed yet; the whole of a new segment, if `begins`.
    `future`: done when the environment has answered. key: of the trajectory's random numbers. The
    constructor starts the reset in the environment's thread.
    """

    def __init__(self, trajectory: Trajectory, horizon: int, config: Rollouts, chat: Chat,
                 pool: EnvPool, on_cpu: bool, key: list[int]):
        super().__init__(trajectory, horizon, config, chat)
        self.pool, self.on_cpu = pool, on_cpu
        self.max_tokens = config.of_world("max_tokens", trajectory.env)
        # Its random numbers, and those of them that were drawn for tokens that are dropped.
        self.numbers, self.unused = np.random.default_rng(key), []
        self.pending, self.reply = [], []  # `reply`: the tokens of the newest reply
        # The rest of each reply that may be written, and the ids that may come next; None: any, to
        # the end of the reply.
        self.rest, self.allowed = [], None
        self.deadlines = (config.deadline, config.create_deadline)
        self.worker = pool.take(trajectory.env)
        self.future = self.worker.call(self.advance)

    def ready(self) -> bool:
        """Whether the environment has answered or missed its deadline."""
        return self.future.done() or bool(self.worker.late(*self.deadlines))

    def add_token(self, token: int, logprob: float, entropy: float) -> bool:
        """Append a token that the policy sampled. -> whether the reply is complete: then the
        environment has been sent it, and `take_answer` must follow."""
        self.pending = []
        while True:
            self.trajectory.append([token], [logprob], [entropy])
            self.pending.append(token)
            self.reply.append(token)
            if self.allowed is not None:
                self.rest = [o[1:] for o in self.rest if o[:1] == [token]]
                self.allowed = next_ids(self.rest)
            if self.has_to_end(self.reply):
                self.send_reply()
                return True
            # A token that is the only one allowed next needs no forward pass of its own.
            if self.allowed is None or len(self.allowed) > 1:
                return False
            token, logprob, entropy = self.allowed[0], 0.0, 0.0

    def send_reply(self) -> None:
        """Send the complete reply to the environment."""
        t = self.trajectory
        closed = self.chat.is_ended(self.reply)
        is_full = len(self.reply) >= self.max_tokens or len(t.segment()) >= self.max_length
        cut = is_full and not closed
        t.cut_turns += [t.turns + 1] * cut
        env, agent = self.worker.env, self.play.make_agent
        # Whether the answer is taken before the next forward pass. On a GPU it never is: the
        # environment computes while the GPU does.
        self.instant = self.on_cpu and env.instant and getattr(agent, "instant", False)
        # Threads of one process take turns at running Python. For an instant world a change of
        # threads costs more than the step itself, so this thread plays it.
        here = self.instant and not env.remote
        self.future = self.worker.call(self._pass_on, self.reply, closed, cut, here=here)

    def has_to_end(self, reply: list[int]) -> bool:
        """Whether the last token ends the reply, a token limit is reached, or the reply has one of
        the world's stop strings."""
        t = self.trajectory
        has_room = len(reply) < self.max_tokens and len(t.tokens) - t.starts[-1] < self.max_length
        if self.chat.is_ended(reply) or not has_room:
            return True
        stop_strings = self.worker.env.stop
        text = self.chat.tokenizer.decode(self.chat.final_message(reply)) if stop_strings else ""
        return any(s in text for s in stop_strings)

    def _pass_on(self, env: Env, reply: list[int], closed: bool, cut: bool) -> None:
        """In the environment's thread, so that the main thread does not tokenize."""
        message = self.chat.final_message(reply[:-1] if closed else reply)
        text = self.chat.tokenizer.decode(message, skip_special_tokens=True)
        # What the prompt began has no end. A header that `final_message` has left out may end it.
        if self.chat.opens_thought and "</think>" not in self.chat.tokenizer.decode(reply):
            text, message = "<think>\n" + text, []
        self.advance(env, text, message, closed, cut)

    def take_answer(self) -> bool:
        """Take the environment's answer, waiting for it until its deadline. -> whether the
        trajectory goes on. Raises ItemError if there is no such item."""
        if error := self.worker.failure(self.future, *self.deadlines):
            self.end(Status.ENV_ERROR, error)
        elif self.take():
            self.pending = self.new_ids if self.begins else self.pending + self.new_ids
            self.reply, self.rest, self.allowed = [], self.new_options, next_ids(self.new_options)
            return True
        self.give_back(self.pool, self.worker)
        return False


def restricted(logits: Tensor, allowed: list[list[int] | None]) -> Tensor:
    """logits [n, V], with -inf for the ids that are not among a row's allowed ones (None: all)."""
    if not any(allowed):
        return logits
    rows, columns = zip(*((row, i) for row, ids in enumerate(allowed) for i in ids or ()))
    is_limited = torch.tensor([[ids is not None] for ids in allowed], device=logits.device)
    is_left_out = is_limited.repeat(1, logits.shape[1])
    is_left_out[rows, columns] = False
    return logits.masked_fill(is_left_out, -math.inf)


# ---- all trajectories of a call ----


# What a decode step samples for n episodes: the random number of each; tokens, log-probs and
# entropies, [3, n] float64. On a GPU these may still be computed.
Draw = tuple[dict[Episode, float], Tensor]


@dataclass(eq=False)
class TrajectoryQueue:
    """The trajectories of one call of `rollout`: to be played, being played, finished. With a
    dealer they are shared out among ranks while they play."""

    trajectories: list[Trajectory]  # of all ranks
    make_episode: Callable[[Trajectory], Episode]
    config: Rollouts
    on_end: Callable[[Trajectory], object]
    on_step: Callable[["TrajectoryQueue"], object]
    dealer: Dealer | None

    def __post_init__(self):
        self.todo = deque([] if self.dealer else self.trajectories)
        self.alive: set[Episode] = set()
        self.finished: dict[tuple[int, int], Trajectory] = {}
        self.tries, self.stats = Counter(), Counter()

    def is_dealt(self) -> bool:
        """Whether every trajectory has been given to a rank."""
        return self.dealer is None or self.dealer.dealt == len(self.trajectories)

    def deal(self, room: int) -> None:
        """Get more trajectories from the dealer, together with all other ranks. room: how many this
        rank can take, if it is positive."""
        if not self.is_dealt():
            self.todo += [self.trajectories[i] for i in self.dealer.deal(max(0, room))]

    def begin(self) -> Episode:
        """Start the next trajectory: its environment is being reset from now on."""
        episode = self.make_episode(self.todo.popleft())
        self.alive.add(episode)
        return episode

    def draw(self, logits: Tensor, episodes: list[Episode]) -> Draw:
        """Sample a token for each of n episodes from logits [n, V], with a random number of its
        own. Nothing waits for a GPU."""
        uniforms = [e.unused.pop() if e.unused else e.numbers.random() for e in episodes]
        logits = restricted(logits, [e.allowed for e in episodes])
        on_device = torch.tensor(uniforms, dtype=torch.float64).to(logits.device)
        c = self.config
        drawn = sample(logits, on_device, c.temperature, c.top_p, c.top_k)
        return dict(zip(episodes, uniforms)), torch.stack([column.double() for column in drawn])

    def take(self, draw: Draw, dropped: set[Episode] = frozenset()) -> dict[Episode, bool]:
        """Give the tokens of a decode step to their episodes, except the dropped ones -> for each
        whether its reply is complete, and so was sent to its environment. Raises
        FloatingPointError if the logits were not finite."""
        episodes, columns = draw
        kept = {e: row for e, row in zip(episodes, zip(*columns.tolist())) if e not in dropped}
        if not math.isfinite(sum(logprob for _, logprob, _ in kept.values())):
            raise FloatingPointError("the policy's logits are not finite")
        self.stats.update(steps=1, busy=len(kept))
        self.on_step(self)
        return timed(self.stats, "seconds_replies", lambda: {
            e: e.add_token(int(i), logprob, entropy) for e, (i, logprob, entropy) in kept.items()})

    def take_answer(self, episode: Episode) -> bool:
        """Take the answer of an episode's environment -> whether the trajectory goes on. One that
        has ended is kept, or played again if its environment failed."""
        if timed(self.stats, "seconds_waiting", episode.take_answer):
            return True
        self.alive.remove(episode)
        t = episode.trajectory
        key = (t.group, t.sample)
        self.tries[key] += 1
        if t.status == Status.ENV_ERROR and self.tries[key] <= self.config.retries:
            self.todo.append(Trajectory(t.item, t.env, t.step, *key))
        else:
            self.finished[key] = t
            self.on_end(t)
        return False


def make_engine(policy: PreTrainedModel, slots: int, settings: Rollouts) -> Ragged | str:
    """-> a `Ragged` engine or, if it is not exact for this model or the settings say so, "hf".
    Raises ValueError for a model that no engine plays exactly."""
    paths = compute_paths_of(policy) or find_paths(policy)
    if settings.engine == "ragged":
        if paths.rollout == "ragged":
            return Ragged(policy, slots, settings.graphs)
        how = "all in lockstep" if paths.rollout == "padded" else "one at a time"
        print(f"rollout: model type {policy.config.model_type}: trajectories are played on the "
              f"model's own attention, {how}", file=sys.stderr)
    return "hf"


def rollout(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, envs: EnvPool,
            items: list[str], horizon: int | dict[str, int], config: Rollouts | None = None, *,
            step: int = 0, engine: str | Ragged | None = None,
            stats: dict[str, float] | None = None, episode_class: Callable[..., Episode] = Episode,
            on_end: Callable[[Trajectory], object] = lambda t: None,
            on_step: Callable[[TrajectoryQueue], object] = lambda queue: None,
            dealer: Dealer | None = None, **changes: object) -> list[Trajectory]:
    """Play every item `samples` times, at most `horizon` turns each.

    A reply ends with the chat template's end-of-turn token, with one of the world's stop strings,
    or at `max_tokens` or `max_length`. A trajectory ends when its agent returns, after `horizon`
    turns, or when `max_length` leaves no room for another reply. An episode whose environment fails
    or misses its deadline is played again up to `retries` times; then the trajectory has status
    "env_error". Environments' answers are collected at fixed decode steps, so a seeded run repeats
    bit for bit. With `arrival_order` they are collected as they come, and it does not.

    policy: a causal LM; it is put into eval mode.
    items: ids such as "babyai_17".
    horizon: one number, or one for each world: {"babyai": 4, "textcraft": 8}.
    config: see `Rollouts`. Its fields may also be given as keywords: rollout(..., samples=8).
    step: the training step, part of the key of each trajectory's random numbers.
    engine: of `make_engine`, for this policy: its memory is reused.
    episode_class: a class that inherits from `Episode`, to play in another way.
    stats: gets these sums: "forwarded" (token positions computed, padding included), "steps"
        (forward passes that were sampled from), "busy" (slots fed, over all steps),
        "seconds_waiting" (for environments' answers) and "seconds_replies" (spent on what was
        sampled: its text, and the steps of instant worlds).
    on_end: called with each trajectory when it has ended.
    on_step: called in each decode step with the `TrajectoryQueue`.
    dealer: deals the trajectories to the ranks of a process group, which all call `rollout` with
        the same items.

    -> the trajectories in the order of items, the samples of an item side by side; with a dealer
    those that this rank has played. Raises ValueError for a bad item, AgentError for a bug of the
    agent, FloatingPointError if the policy's logits are not finite.
    """
    config = replace(config or Rollouts(), **changes)
    # Once, before threads do.
    chooses = getattr(load_agent(config.agent, config.agent_args), "chooses", False)
    chat = Chat(tokenizer, config.history)
    on_cpu = device_of(policy).type == "cpu"
    policy.eval()
    trajectories = [Trajectory(item, split_item(item)[0], step, group, k)
                    for group, item in enumerate(items) for k in range(config.samples)]

    horizons = horizon if isinstance(horizon, dict) else {t.env: horizon for t in trajectories}
    if min(horizons.values()) < 1:
        raise ValueError("a horizon is at least 1")

    def make_episode(t: Trajectory) -> Episode:
        # The key of its random numbers: no rank, slot, batch or thread. The samples of an item that
        # is named again are further samples of it.
        sample = items[: t.group].count(t.item) * config.samples + t.sample
        key = [config.seed, step, zlib.crc32(t.item.encode()), sample]
        return episode_class(t, horizons[t.env], config, chat, envs, on_cpu, key)

    engine = engine or make_engine(policy, min(config.slots, len(trajectories)), config)
    queue = TrajectoryQueue(trajectories, make_episode, config, on_end, on_step, dealer)
    try:
        with unsharded(policy):
            if engine == "hf":
                forwarded = decode_in_lockstep(
                    policy, queue, 1 if plays_alone(policy) else config.slots)
            else:
                engine.clear(max(config.of_world("max_length", t.env) for t in trajectories))
                engine.reads_late &= not chooses  # the ids that are allowed depend on the last one
                with engine.attention():
                    forwarded = decode(engine, queue, any(envs.urls.values()))
                engine.clear()
    finally:
        for episode in queue.alive:  # left over only if the rollout was interrupted
            episode.give_back(envs, episode.worker)
    (Counter() if stats is None else stats).update(queue.stats, forwarded=forwarded)
    return [queue.finished[key] for key in sorted(queue.finished)]


# ---- the decode loop ----

# A decode step starts no more trajectories once those it has started bring this many new ids.
MAX_NEW_IDS = 8192
# With several ranks: the number of decode steps between two exchanges with the dealer.
DEAL_EVERY = 8
# If two new trajectories share more than this many ids beyond the prefix in the cache, the second
# one starts a step later and copies them.
MIN_PREFIX_GAIN = 16


def decode(engine: Ragged, queue: TrajectoryQueue, on_servers: bool) -> int:
    """Play all trajectories on the `Ragged` engine: every decode step feeds each slot what is new
    there. -> number of token positions computed.

    An environment's answer is taken at a fixed decode step (instant worlds on a CPU: the next one;
    others: the one after), waiting if necessary, so that the batches never depend on timing. With
    `arrival_order` it is taken as soon as it is there. on_servers: environments are on servers.
    """
    arrival_order = queue.config.arrival_order
    # Resets take time, so up to 8 more than there are free slots may be under way. A server may
    # allow only as many episodes as there are slots, so with `arrival_order` no reset runs ahead on
    # a server. Without it resets run ahead there, too, because the batches must not depend on where
    # a world runs.
    resets_ahead = 0 if on_servers and arrival_order else min(8, engine.slots // 4)
    starting: list[Episode] = []  # they get the next free slots; their environments are being reset
    free = list(range(engine.slots))
    playing: dict[int, Episode] = {}  # slot -> its episode
    running: Draw | None = None  # on a GPU: of the step whose tokens are not read yet
    ended: set[Episode] = set()  # whose tokens of that step are dropped
    waiting: dict[int, int] = {}  # slot -> the decode step at which its environment's answer is due

    for now in itertools.count():  # decode steps
        # Take the answers of environments. Slots whose trajectories have ended become free.
        all_wait = playing.keys() == waiting.keys()
        if arrival_order and all_wait:  # sleep; a missed deadline may be noticed 0.1 s late
            episodes = [*playing.values(), *(starting if free else [])]
            futures = [episode.future for episode in episodes]
            timed(queue.stats, "seconds_waiting", wait, futures, 0.1, FIRST_COMPLETED)
        # If all wait, nothing can be decoded before the first answer that is due.
        last_due = max(now, min(waiting.values(), default=now)) if all_wait else now
        new_ids = 0  # of segments that begin
        for slot, due in list(waiting.items()):
            episode = playing[slot]
            is_due = episode.ready() if arrival_order else due <= last_due
            if not is_due or new_ids >= MAX_NEW_IDS:
                continue
            del waiting[slot]
            if not queue.take_answer(episode):
                del playing[slot]
                free.append(slot)
            elif episode.begins:
                source = engine.best_prefix(episode.pending, slot)
                episode.pending = engine.begin(slot, episode.pending, *source)
                new_ids += len(episode.pending)

        # Get more trajectories from the dealer, half as many as there are slots for those that
        # become free before the next exchange, and reset their environments.
        if now % DEAL_EVERY == 0 or not (playing or starting or queue.todo):
            spare = max(1, engine.slots // 2)
            queue.deal(len(free) + spare - len(starting) - len(queue.todo))
        while queue.todo and len(starting) < len(free) + resets_ahead:
            starting.append(queue.begin())
        if not playing and not starting and queue.is_dealt():
            return engine.forwarded

        # Give free slots to episodes. Each copies the longest prefix that a slot holds.
        started = []  # the ids of the episodes that start in this decode step
        new_ids = 0
        for episode in list(starting):
            if not free or new_ids >= MAX_NEW_IDS:
                break
            if arrival_order and not episode.ready():
                continue
            # Its reset failed, or its first prompt does not fit.
            if not episode.pending and not queue.take_answer(episode):
                starting.remove(episode)
                continue
            ids = episode.pending
            source, n = engine.best_prefix(ids)
            # Another episode that starts in this step computes a longer prefix of these ids: wait
            # for the next step, and copy it then.
            if any(common_prefix_length(ids, other, n + MIN_PREFIX_GAIN) for other in started):
                continue
            slot = free.pop(0)
            episode.pending = engine.begin(slot, ids, source, n)
            started.append(ids)
            new_ids += len(episode.pending)
            starting.remove(episode)
            playing[slot] = episode

        # One forward pass, and a token for each slot.
        feed = {slot: e.pending for slot, e in playing.items() if slot not in waiting}
        draw = feed and queue.draw(engine.forward(feed), [playing[slot] for slot in feed])
        if engine.reads_late:
            # Read the tokens of the step before while this one runs, which has been fed them. Where
            # one was the last of a reply, the next token is dropped.
            if draw:
                engine.sampled[engine.fed] = draw[1][0].long()
            for slot in feed:
                playing[slot].pending = [SAMPLED_LAST]
            draw, running = running, draw

        # Complete replies go to the environments.
        complete = queue.take(draw, ended) if draw else {}
        ended = {e for e, is_complete in complete.items() if is_complete and running}
        for slot, episode in playing.items():
            if running and episode in complete:
                engine.ids[slot][-1] = episode.reply[-1]  # in the place of SAMPLED_LAST
                episode.pending = [] if episode in ended else [SAMPLED_LAST]
            if episode in ended:
                episode.unused.append(running[0][episode])
            if complete.get(episode):
                waiting[slot] = now + 1 if episode.instant else now + 2
