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

import concurrent.futures
import itertools
import math
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent import AGENTS, FORMATS, PARSES, Agent, Chat, Messages, Play, assistant, load_agent
from agent import user
from engine import Ragged, sample
from envs import ABOVE_0, NOT_NEGATIVE, Env, EnvError, EnvPool, Step, UserError, Worker, flag
from envs import split_item
from models.check import find_paths, plays_alone
from models.lockstep import decode_in_lockstep
from models.packed import common_prefix_length
from parallel import Dealer, device_of, unsharded
from rl import Sampling, compute_paths_of
from trajectory import Status, Trajectory
from worlds.agentgym import LENIENT

# ---- settings ----


@dataclass
class Rollouts(Sampling):
    """how trajectories are played"""

    # how a reply holds its action
    action_format: str = flag("react", tuple(FORMATS))
    # strict: one action, exactly as --action_format has it | lenient: as AgentGym's client of the
    # world reads it
    parse: str = flag("lenient", PARSES)
    # or your own: FILE.py:NAME, module:NAME (docs/agents.md)
    agent: str | Callable = flag("react", AGENTS)
    # settings of the agent, NAME=VALUE: keep=2; plan=true reflect=true
    agent_args: str = flag("")
    # append: earlier replies stay in the prompt as sampled | template: as the chat template writes
    # them, in a new segment where it rewrites them; default: template if it drops thoughts
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
    slots: int = flag(32, ABOVE_0)
    # seconds an environment has to answer
    deadline: float = flag(60.0, ABOVE_0)
    # seconds to create an environment
    create_deadline: float = flag(300.0, ABOVE_0, study=True)
    # hf: the model's own attention, in lockstep (slow; the reference)
    engine: str = flag("ragged", ("ragged", "hf"), study=True)
    # on a GPU, record decode steps as CUDA graphs
    graphs: bool = flag(True, study=True)
    # take environments' answers as they come: faster, and not repeatable bit for bit; default: with
    # --env_url
    arrival_order: bool | None = flag(None, study=True)
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

    def load_agent(self) -> Callable[[Play], Agent]:
        """The agent's function with its settings. Raises ValueError: see `agent.load_agent`."""
        return load_agent(self.agent, self.agent_args)

    def play(self, item: str, env: Env, horizon: int, step: int = 0) -> Play:
        """An episode of `item`, "babyai_17", as its agent sees it."""
        world, _ = split_item(item)
        choose = LENIENT.get(world) if self.parse == "lenient" else None
        return Play(env, item, horizon, self.load_agent(), self.action_format, choose,
                    self.prompt_texts.get(world, {}), step, self.deadline)


# ---- one trajectory while it is played ----


class Answer(NamedTuple):
    """What comes back for a reply. At the start of an episode `reply` is None."""

    reply: str | None  # its text
    turn: Step  # what it earned
    forgets: bool  # what was earned before does not count
    prompt: Messages | None  # to answer next; None: the agent has ended the episode
    new: Messages  # the messages in it, or the last observation, that are new to the model
    ids: list[int]  # the ids up to the next reply
    begins: bool  # they are a whole prompt, which begins a new segment
    state: str | None  # in which the next reply is written


class Conversation:
    """A trajectory as its agent leads it, whoever writes the replies: the policy (`Episode`), an
    expert (sft.py) or a model on a server (eval.py).

    `advance` passes a reply on and runs in the environment's thread. It only reads the trajectory,
    because a thread that missed its deadline may still run. `take` records its answer. chat: None
    for a trajectory without tokens.
    """

    def __init__(self, trajectory: Trajectory, horizon: int, config: Rollouts,
                 chat: Chat | None):
        self.trajectory = trajectory
        self.horizon = horizon
        self.config = config
        self.chat = chat
        self.max_length = config.of_world("max_length", trajectory.env)
        self.invalid_penalty = config.of_world("invalid_penalty", trajectory.env)
        self.play: Play | None = None
        self.prompt: Messages = []  # what the model was shown last
        self.tools: list[dict] | None = None  # with what it was shown
        self.sampled: list[tuple[str, list[int]]] = []  # (text, ids) of each reply

    def advance(self, env: Env, reply: str | None = None, ids: Sequence[int] = (),
                closed: bool = True, cut: bool = False) -> Answer:
        """Send a reply to the agent (None: start it), and render what the model is to answer.

        ids: the reply's, as later prompts show it. closed: whether its end-of-turn token was
        written. cut: whether it reached --max_tokens. Raises AgentError for a bug of the agent.
        """
        t = self.trajectory
        if reply is None:
            self.play = self.config.play(t.item, env, self.horizon, t.step)
        else:
            self.sampled.append((reply, list(ids)))
        play = self.play
        prompt = play.send(reply, cut)
        ids, begins = [], False
        while prompt is not None and play.turns < self.horizon and self.chat is not None:
            try:
                ids, begins = self._render(prompt, reply, closed)
                break
            except EnvError:
                raise
            except Exception as e:  # whatever the template's program raises
                wrong = f"cannot render the messages: {type(e).__name__}: {e}"
                prompt = play.throw(ValueError(wrong))
        return Answer(reply, play.turn, play.forgets, prompt, self._new_in(prompt, reply), ids,
                      begins, self._state_of(env) if prompt else None)

    def _render(self, prompt: Messages, reply: str | None,
                closed: bool) -> tuple[list[int], bool]:
        """-> the ids that lead to the next reply, and whether they begin a new segment."""
        if self.chat.history == "append" and reply is not None:
            shown = [*self.prompt, assistant(reply)]
            new = prompt[len(shown):]
            roles = [message["role"] for message in new]
            in_turns = roles == (["user", "assistant"] * len(new))[: len(new)]
            extends = prompt[: len(shown)] == shown and self.play.tools == self.tools
            if extends and new and in_turns:
                return self.chat.turns(new, closed), False
        ids = self.chat.prompt(prompt, self.play.tools, self.sampled)
        held = self.trajectory.segment() if reply is not None else []
        if held and ids[: len(held)] == held:
            return ids[len(held):], False
        return ids, True

    def _new_in(self, prompt: Messages | None, reply: str | None) -> Messages:
        """The messages of a prompt that the model sees for the first time: those after its reply
        or, if the prompt does not show it, those after what it shares with the prompt before."""
        if prompt is None:  # the last observation, which the model is not shown
            last = self.play.turn.observation
            return [user(last)] if last else []
        for place in range(len(prompt), 0, -1):
            if reply is not None and prompt[place - 1] == assistant(reply):
                return prompt[place:]
        return prompt[common_prefix_length(self.prompt, prompt):] or prompt[-1:]

    def _state_of(self, env: Env) -> str | None:
        """The state in which the next reply is written. What is asked for is part of it: a plan and
        the action that follows are written in different states."""
        if self.config.record_states and type(env).state is Env.state:
            raise UserError(f"{self.trajectory.env}{' on a server' * env.remote} does not tell its "
                            "states (Env.state), which --algo needs")
        state = env.state() if self.config.record_states else None
        if state is None or not self.play.kind:
            return state
        return f"{self.play.kind}: {state}"

    def take(self, answer: Answer) -> bool:
        """Record an answer -> whether the trajectory goes on."""
        t = self.trajectory
        if answer.reply is not None:
            t.record_turn(answer.reply, answer.turn, answer.forgets, self.invalid_penalty)
        t.messages += answer.new
        if answer.prompt is None:
            return self.end(Status.DONE)
        if t.turns >= self.horizon:
            return self.end(Status.HORIZON)
        self.prompt, self.tools = answer.prompt, self.play.tools
        if self.chat is None:
            return True
        held = 0 if answer.begins else len(t.segment())
        if held + len(answer.ids) >= self.max_length:  # no room for a single token of a reply
            return self.end(Status.LENGTH)
        if answer.begins:
            t.begin_segment()
        t.append(answer.ids)
        if self.config.record_states:
            t.states.append(answer.state)
        return True

    def end(self, status: Status, error: str = "") -> bool:
        """Record how the trajectory has ended -> False."""
        t = self.trajectory
        t.status = status
        t.error = error
        if t.rewards:
            # An exactly rounded sum: equal rewards must compare equal, in whichever turns they
            # came.
            t.reward = math.fsum(t.rewards)
        return False


    def give_back(self, pool: EnvPool, worker: Worker, broken: bool) -> None:
        """Close the agent, in the thread of its environment, and give the environment back. A
        broken one is dropped, and a hung thread is left behind."""
        if self.play is not None and self.play.agent.gi_frame is not None:  # it has not returned
            worker.call(lambda env: self.play.close())
        if broken:
            pool.drop(worker)
        else:
            pool.give_back(self.trajectory.env, worker)


class Episode(Conversation):
    """A trajectory while the policy plays it: its environment, its random numbers, its unfed ids.

    `pending`: ids that the model has not been fed yet; the whole of a new segment, if `begins`.
    `future`: the environment's answer; it must come within `seconds_left()`. occurrence: 0 for the
    item's first entry in the step's list, 1 for its second. The constructor starts the reset in the
    environment's thread.
    """

    def __init__(self, trajectory: Trajectory, horizon: int, config: Rollouts,
                 chat: Chat, pool: EnvPool, on_cpu: bool, occurrence: int = 0):
        super().__init__(trajectory, horizon, config, chat)
        self.occurrence = occurrence
        self.pool = pool
        self.on_cpu = on_cpu
        self.max_tokens = config.of_world("max_tokens", trajectory.env)
        self.uniforms = self._uniforms()
        self.pending: list[int] = []
        self.begins = False
        self.drawn: list[tuple[int, float, float]] = []  # (token, log-prob, entropy) of the reply
        self.worker = pool.take(trajectory.env)
        self.future = self.worker.call(self.advance)

    def _uniforms(self) -> Iterator[float]:
        """The trajectory's random numbers: no rank, slot or batch enters the key."""
        t = self.trajectory
        item_key = zlib.crc32(t.item.encode())
        # The samples of an item that is named again are further samples of it.
        sample = self.occurrence * self.config.samples + t.sample
        generator = np.random.default_rng([self.config.seed, t.step, item_key, sample])
        while True:
            yield from generator.random(64).tolist()

    def seconds_left(self) -> float:
        """How long the environment may still take for its answer."""
        return self.worker.seconds_left(self.config.deadline, self.config.create_deadline)

    def answers_at_once(self) -> bool:
        """Whether the answer is taken before the next forward pass. On a GPU it never is: the
        environment computes while the GPU does."""
        is_instant = getattr(self.play.make_agent, "instant", False)
        return self.on_cpu and self.worker.env.instant and is_instant

    def ready(self) -> bool:
        """Whether the environment has answered or missed its deadline."""
        return self.future.done() or self.seconds_left() <= 0

    def add_token(self, token: int, logprob: float, entropy: float) -> bool:
        """Take a token that the policy sampled. -> whether the reply is complete: then the
        environment has been sent it, and `take_answer` must follow."""
        self.drawn.append((token, logprob, entropy))
        self.pending = [token]
        reply, logprobs, entropies = map(list, zip(*self.drawn))
        closed = self.chat.is_ended(reply)
        if not closed and not self.has_to_end(reply):
            return False
        cut = not closed and len(reply) >= self.max_tokens
        self.trajectory.append(reply, logprobs, entropies)
        if cut:
            self.trajectory.cut_turns.append(self.trajectory.turns + 1)
        # Threads of one process take turns at running Python. For an instant world a change of
        # threads costs more than the step itself, so this thread plays it.
        here = self.answers_at_once() and not self.worker.env.remote
        self.future = self.worker.call(self._pass_on, reply, closed, cut, here=here)
        self.drawn = []
        return True

    def _pass_on(self, env: Env, reply: list[int], closed: bool, cut: bool) -> Answer:
        """In the environment's thread, so that the main thread does not tokenize."""
        message = self.chat.final_message(reply[:-1] if closed else reply)
        text = self.chat.tokenizer.decode(message, skip_special_tokens=True)
        return self.advance(env, text, message, closed, cut)

    def has_to_end(self, reply: list[int]) -> bool:
        """Whether a token limit is reached, or the reply has one of the world's stop strings."""
        if len(reply) >= min(self.max_tokens, self.max_length - len(self.trajectory.segment())):
            return True
        stop_strings = self.worker.env.stop
        text = self.chat.tokenizer.decode(self.chat.final_message(reply)) if stop_strings else ""
        return any(s in text for s in stop_strings)

    def take_answer(self) -> bool:
        """Take the environment's answer, waiting for it until its deadline. -> whether the
        trajectory goes on. Raises ItemError if there is no such item."""
        answer, error = self.worker.outcome(self.future, self.config.deadline,
                                            self.config.create_deadline)
        if error:
            self.end(Status.ENV_ERROR, error)
        goes_on = not error and self.take(answer)
        if goes_on:
            self.pending = answer.ids if answer.begins else self.pending + answer.ids
            self.begins = answer.begins
        else:
            self.give_back(self.pool, self.worker, broken=bool(error))
        return goes_on


# ---- all trajectories of a call ----


@dataclass(eq=False)
class TrajectoryQueue:
    """The trajectories of one call of `rollout`: to be played, being played, finished. With a
    dealer they are shared out among ranks while they play."""

    items: list[str]
    step: int
    slots: int
    make_episode: Callable[[Trajectory], Episode]
    config: Rollouts
    stats: dict[str, int]
    on_end: Callable[[Trajectory], object] | None
    on_step: Callable[["TrajectoryQueue"], object] | None
    dealer: Dealer | None

    def __post_init__(self):
        self.keys = [(g, k) for g in range(len(self.items)) for k in range(self.config.samples)]
        self.todo: deque[Trajectory] = deque()
        self.tries = dict.fromkeys(self.keys, 0)
        self.finished: dict[tuple[int, int], Trajectory] = {}
        self.alive: set[Episode] = set()
        if self.dealer is None:
            self.take(range(len(self.keys)))

    def _fresh(self, group: int, k: int) -> Trajectory:
        item = self.items[group]
        return Trajectory(item, split_item(item)[0], self.step, group, k)

    def take(self, numbers: range) -> None:
        """Add trajectories, by their places in `keys`, to those that are to be played."""
        self.todo += [self._fresh(*self.keys[number]) for number in numbers]

    def is_dealt(self) -> bool:
        """Whether every trajectory has been given to a rank."""
        return self.dealer is None or self.dealer.dealt == len(self.keys)

    def deal(self, room: int) -> None:
        """Get more trajectories from the dealer, together with all other ranks. room: how many this
        rank can take."""
        if not self.is_dealt():
            self.take(self.dealer.deal(room))

    def begin(self) -> Episode:
        """Start the next trajectory: its environment is being reset from now on."""
        episode = self.make_episode(self.todo.popleft())
        self.alive.add(episode)
        return episode

    def end(self, episode: Episode) -> None:
        """Keep a trajectory that has ended, or play it again if its environment failed."""
        self.alive.remove(episode)
        t = episode.trajectory
        key = (t.group, t.sample)
        self.tries[key] += 1
        if t.status == Status.ENV_ERROR and self.tries[key] <= self.config.retries:
            self.todo.append(self._fresh(*key))
            return
        self.finished[key] = t
        if self.on_end is not None:
            self.on_end(t)

    def draw_tokens(self, logits: Tensor,
                    episodes: list[Episode]) -> list[tuple[int, float, float]]:
        """Sample a token for each of n episodes, and report the decode step.

        logits [n, V] -> n tuples (token, log-prob, entropy). Each episode uses its own random
        number. Raises FloatingPointError if the logits are not finite.
        """
        uniforms = torch.tensor([next(e.uniforms) for e in episodes], dtype=torch.float64)
        c = self.config
        drawn = sample(logits, uniforms.to(logits.device), c.temperature, c.top_p, c.top_k)
        tokens, logprobs, entropies = (column.tolist() for column in drawn)
        if not math.isfinite(sum(logprobs)):
            raise FloatingPointError("the policy's logits are not finite")
        self._report_step(len(tokens))
        return list(zip(tokens, logprobs, entropies))

    def _report_step(self, busy: int) -> None:
        """Count a decode step that fed `busy` slots in `stats`, and call `on_step`."""
        usable = self.slots  # trajectories that are not dealt yet could fill every slot
        if self.is_dealt():
            usable = min(self.slots, len(self.todo) + len(self.alive))
        for name, count in (("steps", 1), ("busy", busy), ("usable", usable)):
            self.stats[name] = self.stats.get(name, 0) + count
        if self.on_step is not None:
            self.on_step(self)


def make_engine(policy: PreTrainedModel, slots: int, settings: Rollouts) -> Ragged | str:
    """-> a `Ragged` engine or, if it is not exact for this model or the settings say so, "hf".
    Raises ValueError for a model that no engine plays exactly."""
    paths = compute_paths_of(policy) or find_paths(policy)
    if settings.engine == "hf":
        return "hf"
    if paths.rollout == "ragged":
        return Ragged(policy, slots, settings.graphs)
    how = "all in lockstep" if paths.rollout == "padded" else "one at a time"
    print(f"rollout: model type {policy.config.model_type}: trajectories are played on the model's "
          f"own attention, {how}", file=sys.stderr)
    return "hf"


def count_earlier(items: list[str]) -> list[int]:
    """How often each item occurs earlier in the list. `Episode` needs it, because the samples of an
    item that is listed twice must differ, whichever rank plays them.

    >>> count_earlier(["babyai_3", "babyai_8", "babyai_3"])
    [0, 0, 1]
    """
    seen = Counter()
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def rollout(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, envs: EnvPool,
            items: list[str], horizon: int | dict[str, int],
            config: Rollouts | None = None, *, step: int = 0,
            engine: str | Ragged | None = None, stats: dict[str, int] | None = None,
            on_end: Callable[[Trajectory], object] | None = None,
            on_step: Callable[[TrajectoryQueue], object] | None = None,
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
    stats: these counts are added to it: "forwarded" (token positions computed, padding included),
        "steps" (forward passes that were sampled from), "busy" (slots fed, over all steps) and
        "usable" (slots that could have been fed: at most the unfinished trajectories).
    on_end: called with each trajectory when it has ended.
    on_step: called in each decode step with the `TrajectoryQueue`.
    dealer: deals the trajectories to the ranks of a process group, which all call `rollout` with
        the same items.

    -> the trajectories in the order of items, the samples of an item side by side; with a dealer
    those that this rank has played. Raises ValueError for a bad item, AgentError for a bug of the
    agent, FloatingPointError if the policy's logits are not finite.
    """
    config = replace(config or Rollouts(), **changes)
    config.load_agent()  # before any episode: it may not exist
    shortest = min(horizon.values()) if isinstance(horizon, dict) else horizon
    if shortest < 1:
        raise ValueError(f"a horizon is at least 1, not {shortest}")
    stats = {} if stats is None else stats
    occurrences = count_earlier(items)
    chat = Chat(tokenizer, config.history)
    on_cpu = device_of(policy).type == "cpu"
    policy.eval()

    def make_episode(t: Trajectory) -> Episode:
        limit = horizon[t.env] if isinstance(horizon, dict) else horizon
        return Episode(t, limit, config, chat, envs, on_cpu, occurrences[t.group])

    if engine is None:
        engine = make_engine(policy, min(config.slots, len(items) * config.samples), config)
    slots = config.slots if engine == "hf" else engine.slots
    queue = TrajectoryQueue(items, step, slots, make_episode, config, stats, on_end, on_step,
                            dealer)
    try:
        with unsharded(policy):
            if engine == "hf":
                forwarded = decode_in_lockstep(policy, queue, 1 if plays_alone(policy) else slots)
            else:
                engine.clear(max(config.of_world("max_length", split_item(i)[0]) for i in items))
                forwarded = Decoder(engine, queue, any(envs.urls.values())).run()
                engine.clear()
    finally:
        for episode in queue.alive:  # left over only if the rollout was interrupted
            episode.give_back(envs, episode.worker, broken=True)
    stats["forwarded"] = stats.get("forwarded", 0) + forwarded
    return [queue.finished[key] for key in queue.keys if key in queue.finished]


# ---- the decode loop ----

# A decode step starts no more trajectories once those it has started bring this many new ids.
MAX_NEW_IDS = 8192
# With several ranks: a rank asks for slots // SLOTS_PER_SPARE trajectories beyond its free slots.
SLOTS_PER_SPARE = 2
# With several ranks: the number of decode steps between two exchanges with the dealer.
DEAL_EVERY = 8
# If two new trajectories share more than this many ids beyond the prefix in the cache, the second
# one starts a step later and copies them.
MIN_PREFIX_GAIN = 16


class Decoder:
    """Continuous decoding on the `Ragged` engine: every decode step feeds each slot what is new
    there.

    playing: slot -> its episode. waiting: slot -> the decode step at which its environment's answer
    is collected. starting: episodes that get the next free slots; their environments are being
    reset.
    """

    def __init__(self, engine: Ragged, queue: TrajectoryQueue, on_servers: bool):
        self.engine = engine
        self.queue = queue
        self.arrival_order = queue.config.arrival_order
        # Resets take time, so up to 8 more than there are free slots may be under way. A server may
        # allow only as many episodes as there are slots, so with `arrival_order` no reset runs
        # ahead on a server. Without it resets run ahead there, too, because the batches must not
        # depend on where a world runs.
        no_spare_episodes = on_servers and self.arrival_order
        self.resets_ahead = 0 if no_spare_episodes else min(8, engine.slots // 4)
        self.free = list(range(engine.slots))
        self.starting: list[Episode] = []
        self.playing: dict[int, Episode] = {}
        self.waiting: dict[int, int] = {}

    def run(self) -> int:
        """Decode until every episode has ended -> number of token positions computed.

        An environment's answer is collected at a fixed decode step (instant worlds on a CPU: the
        next one; others: the one after), waiting if necessary, so that the batches never depend on
        timing. With `arrival_order` it is collected as soon as it is ready.
        """
        with self.engine.attention():
            for now in itertools.count():
                new_ids = 0  # of segments that begin
                for slot in self.answered_slots(now):
                    if new_ids < MAX_NEW_IDS:
                        new_ids += self.collect(slot)
                    else:
                        self.waiting[slot] = now + 1
                idle = not (self.playing or self.starting or self.queue.todo)
                if idle or now % DEAL_EVERY == 0:
                    self.queue.deal(self.room())
                num_resets = len(self.free) + self.resets_ahead
                while self.queue.todo and len(self.starting) < num_resets:
                    self.starting.append(self.queue.begin())
                if not self.playing and not self.starting and self.queue.is_dealt():
                    return self.engine.forwarded
                self.fill_free_slots()
                self.decode_step(now)

    def answered_slots(self, now: int) -> list[int]:
        """The slots whose answers are collected before the decode step `now`."""
        all_wait = self.playing.keys() == self.waiting.keys()
        if self.arrival_order:
            if all_wait:
                self.sleep_until_an_answer()
            return [slot for slot in self.waiting if self.playing[slot].ready()]
        last_due = now
        if all_wait:  # nothing can be decoded before the first answer that is due
            last_due = max(now, min(self.waiting.values(), default=now))
        return [slot for slot, due in self.waiting.items() if due <= last_due]

    def sleep_until_an_answer(self) -> None:
        """Return at the first answer or deadline, or at once if there is something else to do.
        After a second at most, because a deadline moves when an environment has been made."""
        can_start = self.free and any(e.pending for e in self.starting)
        if can_start or not (self.playing or self.starting):
            return
        episodes = [self.playing[slot] for slot in self.waiting]
        if self.free:
            episodes += self.starting
        timeout = min(1.0, max(0.0, min(e.seconds_left() for e in episodes)))
        concurrent.futures.wait([e.future for e in episodes], timeout,
                                return_when=concurrent.futures.FIRST_COMPLETED)

    def collect(self, slot: int) -> int:
        """Take the answer for the episode in `slot`, which frees the slot if the trajectory ends.
        -> the number of new ids, if a segment begins."""
        del self.waiting[slot]
        episode = self.playing[slot]
        if not episode.take_answer():
            self.queue.end(self.playing.pop(slot))
            self.free.append(slot)
        elif episode.begins:
            ids = episode.pending
            episode.pending = self.engine.begin(slot, ids, *self.engine.best_prefix(ids, slot))
            return len(episode.pending)
        return 0

    def room(self) -> int:
        """How many more trajectories this rank can take: some in advance, for slots that become
        free before the next exchange."""
        reserve = max(1, self.engine.slots // SLOTS_PER_SPARE)
        taken = len(self.starting) + len(self.queue.todo)
        return max(0, len(self.free) + reserve - taken)

    def fill_free_slots(self) -> None:
        """Give free slots to starting episodes. Each copies the longest prefix that a slot
        holds."""
        new_ids = 0
        started = []  # the ids of the episodes that start in this decode step
        for episode in list(self.starting):
            if not self.free or new_ids >= MAX_NEW_IDS:
                break
            if self.arrival_order and not episode.ready():
                continue
            # Its reset failed, or its first prompt does not fit.
            if not episode.pending and not episode.take_answer():
                self.starting.remove(episode)
                self.queue.end(episode)
                continue
            ids = episode.pending
            source, n = self.engine.best_prefix(ids)
            # Another episode that starts in this step computes a longer prefix of these ids: wait
            # for the next step, and copy it then.
            if any(common_prefix_length(ids, other, n + MIN_PREFIX_GAIN) for other in started):
                continue
            started.append(ids)
            slot = self.free.pop(0)
            episode.pending = self.engine.begin(slot, ids, source, n)
            new_ids += len(episode.pending)
            self.playing[slot] = episode
            self.starting.remove(episode)

    def decode_step(self, now: int) -> None:
        """One forward pass over all slots that have something new, and a token for each of them."""
        feed = {slot: e.pending for slot, e in self.playing.items() if slot not in self.waiting}
        if not feed:
            return
        logits = self.engine.forward(feed)
        episodes = [self.playing[slot] for slot in feed]
        sampled = self.queue.draw_tokens(logits, episodes)
        for slot, episode, draw in zip(feed, episodes, sampled):
            if episode.add_token(*draw):
                self.waiting[slot] = now + 1 if episode.answers_at_once() else now + 2
