"""`python -m benches rollout`: our rollouts against three ways of playing with Hugging Face.

    reprefill    `generate` on the whole history in every turn, all rows in lock-step
    cached       `generate` with the KV cache kept across turns, all rows in lock-step
    continuous   transformers' continuous batching (the manager behind `generate_batch`), which
                 replaces a request as soon as it has ended

All play the same conversations: 64 slots, 192 trajectories of 8 turns, sampled at temperature 1.
The number of tokens of each reply is drawn from a seed, and no token ends a reply. Workloads:

    short   replies of 3 to 20 tokens, environments that answer at once
    long    replies with a heavy tail: 5 to 300 tokens, log-uniform
    slow    replies of 3 to 20 tokens, environments that take 1 to 500 ms
            (log-normal, median 30 ms, sigma 1.2, cut)

The limit repeats the forward passes that ours made (and its copies of common prefixes) with
nothing in between. The batches of 64 in lock-step are independent of each other, so reprefill and
cached play one of the three and count three times its time. In `long`, continuous plays 16
trajectories, and without --full all ways play 6 turns.
"""

import concurrent.futures
import copy
import functools
import math
import statistics
import time
from collections import deque
from logging import CRITICAL, getLogger

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (ContinuousBatchingConfig, DynamicCache, GenerationConfig, Qwen2Config,
                          Qwen2ForCausalLM, StoppingCriteriaList)

import agent
import rl
import rollout as ro
from engine import Ragged
from envs import Env, EnvPool, Step

SLOTS, TRAJECTORIES, TURNS = 64, 192, 8
SHARES = {"limit_share": 0.85, "occupancy": 0.9}
TARGETS = {  # workload -> what must be reached, on the tiny model
    "short": {"ratio_reprefill": 4, "ratio_cached": 1.15, "ratio_continuous": 1, **SHARES},
    "long": {"ratio_reprefill": 10, "ratio_cached": 5, "ratio_continuous": 1, **SHARES},
    "slow": {"ratio_cached": 3, "ratio_continuous": 1}}
WORDS = "the red ball is left of a grey door and you see one key in this room".split()


# ---- the conversations ----


@functools.cache
def script(workload, item):
    """-> (reply lengths [TURNS] in tokens, latencies [TURNS] in seconds) of a trajectory."""
    rng = np.random.default_rng([17, item])
    if workload == "long":
        lengths = np.exp(rng.uniform(math.log(5), math.log(301), TURNS))
    else:
        lengths = rng.integers(3, 21, TURNS)
    if workload == "slow":
        latencies = np.clip(0.03 * np.exp(1.2 * rng.standard_normal(TURNS)), 0.001, 0.5)
    else:
        latencies = np.zeros(TURNS)
    return lengths.astype(int).tolist(), latencies.tolist()


@functools.cache
def observation_text(item, turn):
    rng = np.random.default_rng([18, item, turn])
    return " ".join(rng.choice(WORDS, 25))


class ScriptedEnv(Env):
    """A world whose observations have 25 words, after the latency of the script."""

    prompt = "You are in a room. Say what you do. " + " ".join(WORDS * 3)

    def __init__(self, workload):
        self.workload = workload
        self.instant = workload != "slow"

    def reset(self, item):
        _, self.latencies = script(self.workload, item)
        self.turn = 0
        self.item = item
        return observation_text(item, 0)

    def step(self, action):
        if self.workload == "slow":
            time.sleep(self.latencies[self.turn % TURNS])
        self.turn += 1
        return Step(observation_text(self.item, self.turn), 0.0, 0.0, False, False)


def load_models():
    """-> ({name: model}, the tiny model's tokenizer), which all of them use.

    Continuous batching changes a model, so it gets a copy: `name` with an apostrophe.
    """
    tiny, tokenizer = rl.load_policy("tiny")
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=tiny.config.vocab_size, hidden_size=256, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, intermediate_size=768,
                         tie_word_embeddings=True, max_position_embeddings=8192)
    models = {"tiny": tiny.eval(), "3.7M": Qwen2ForCausalLM(config).eval()}
    copies = {name + "'": copy.deepcopy(model) for name, model in models.items()}
    return models | copies, tokenizer


# ---- ours ----


def play_ours(model, tokenizer, workload, trajectories=TRAJECTORIES, slots=SLOTS, turns=TURNS,
              engine=None):
    """-> (seconds, trajectories, stats)."""

    class ScriptedEpisode(ro.Episode):
        """Replies end after the script's number of tokens."""

        def __init__(self, *args):
            super().__init__(*args)
            item = int(self.trajectory.item.split("_")[1])
            self.lengths, _ = script(workload, item)
            self.chat = copy.copy(self.chat)
            self.chat.is_ended = lambda reply: False

        def has_to_end(self, reply):
            return len(reply) >= self.lengths[self.trajectory.turns % TURNS]

    if engine is None:
        engine = Ragged(model, slots)
    items = [f"told_{i}" for i in range(trajectories)]
    stats = {}
    usable = []  # in each step: slots that could have been fed

    def on_step(queue):
        usable.append(min(engine.slots, len(queue.todo) + len(queue.alive)))

    with EnvPool(make=lambda name: ScriptedEnv(workload)) as pool:
        start = time.perf_counter()
        played = ro.rollout(model, tokenizer, pool, items, turns, slots=slots, max_length=10**6,
                            action_format="plain", engine=engine, episode_class=ScriptedEpisode,
                            arrival_order=workload == "slow", stats=stats, on_step=on_step)
        seconds = time.perf_counter() - start
    stats["usable"] = sum(usable)
    for i, t in enumerate(played):
        lengths, _ = script(workload, i)
        assert t.mask.count(True) == sum(lengths[k % TURNS] for k in range(t.turns))
    return seconds, played, stats


class RecordingEngine(Ragged):
    """An engine that records the calls that compute, so that they can be repeated."""

    def __init__(self, *args):
        self.calls = []  # arguments of `begin` (tuples) and of `forward` (dictionaries)
        super().__init__(*args)

    def begin(self, *args):
        self.calls.append(args)
        return super().begin(*args)

    def forward(self, feed):
        self.calls.append({slot: list(ids) for slot, ids in feed.items()})
        return super().forward(feed)


def replay_seconds(recorder):
    """The limit: the same forward passes without sampling, environments and text."""
    engine = Ragged(recorder.policy, recorder.slots)
    engine.kv_cache = recorder.kv_cache
    start = time.perf_counter()
    with engine.attention():
        for call in recorder.calls:
            if isinstance(call, dict):
                engine.forward(call)
            else:
                engine.begin(*call)
    return time.perf_counter() - start


# ---- Hugging Face's ways ----

PAGE = 32
GENERATION = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1,
                  pad_token_id=0)


class ReplyLengths:
    """A stopping criterion of `generate`: each row ends after its own number of new tokens."""

    def __init__(self, start, lengths):
        self.start = start
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - self.start >= self.lengths


def pad_left(rows):
    """Lists of ids -> ids and mask, [B, W] long, padded on the left."""
    rows = [torch.tensor(row) for row in rows]
    return [pad_sequence(tensors, batch_first=True, padding_side="left")
            for tensors in (rows, [torch.ones_like(row) for row in rows])]


def step_all(worlds, texts, workload, threads):
    """Step each environment; those of the slow workload in parallel, one thread each."""
    if workload == "slow":
        futures = [threads.submit(world.step, text) for world, text in zip(worlds, texts)]
        return [future.result() for future in futures]
    return [world.step(text) for world, text in zip(worlds, texts)]


def first_prompt(chat, world, i):
    """Ids of the instructions, the fixed reply to them and the first observation of item i."""
    return chat.prompt([agent.user(world.prompt), agent.assistant(agent.FIRST_REPLY),
                        agent.user(world.reset(i))])


@torch.no_grad()
def play_lockstep(model, tokenizer, workload, cached, rows=SLOTS, turns=TURNS):
    """`generate` turn by turn, all rows together -> (seconds, histories).

    cached: keep the KV cache across turns; else each turn starts from the whole history.
    """
    chat = agent.Chat(tokenizer)
    worlds = [ScriptedEnv(workload) for _ in range(rows)]
    reply_lengths = [script(workload, i)[0] for i in range(rows)]
    with concurrent.futures.ThreadPoolExecutor(rows) as threads:
        start = time.perf_counter()
        new = [first_prompt(chat, world, i) for i, world in enumerate(worlds)]
        histories = [list(ids) for ids in new]
        cache_argument = {"past_key_values": DynamicCache(config=model.config)} if cached else {}
        ids = mask = torch.zeros(rows, 0, dtype=torch.long)
        for turn in range(turns):
            # The prompts of this turn.
            if cached:
                new_ids, new_mask = pad_left(new)
                ids = torch.cat([ids, new_ids], 1)
                mask = torch.cat([mask, new_mask], 1)
            else:
                ids, mask = pad_left(histories)

            # The replies, until the longest is complete.
            width = ids.shape[1]
            lengths = [of_turns[turn] for of_turns in reply_lengths]
            ids = model.generate(
                ids, attention_mask=mask, **cache_argument,
                generation_config=GenerationConfig(max_new_tokens=max(lengths), **GENERATION),
                stopping_criteria=StoppingCriteriaList([ReplyLengths(width, lengths)]))
            in_reply = torch.arange(ids.shape[1] - width) < torch.tensor(lengths)[:, None]
            mask = torch.cat([mask, in_reply.long()], 1)
            replies = [row[width : width + n].tolist() for row, n in zip(ids, lengths)]

            # The environments' observations.
            texts = [tokenizer.decode(reply) for reply in replies]
            steps = step_all(worlds, texts, workload, threads)
            new = [chat.turns([agent.user(step.observation)], closed=False) for step in steps]
            for history, reply, observation in zip(histories, replies, new):
                history += reply
                if turn < turns - 1:
                    history += observation
        return time.perf_counter() - start, histories


@torch.no_grad()
def play_continuous(model, tokenizer, workload, trajectories=TRAJECTORIES, slots=SLOTS,
                    turns=TURNS):
    """Continuous batching: every turn is a request with the whole history.

    -> (seconds, histories)
    """
    chat = agent.Chat(tokenizer)
    threads = concurrent.futures.ThreadPoolExecutor(slots)
    waiting = deque(range(trajectories))  # trajectories that have not started
    histories = {}  # trajectory -> its ids
    worlds = {}  # running trajectory -> its environment
    turn = {}  # trajectory -> number of its current turn
    steps = {}  # trajectory -> future of its environment's step
    # Small pages, so that a turn finds most keys and values of its history in shared pages.
    pages = ContinuousBatchingConfig(page_size=PAGE, num_blocks=slots * 3072 // PAGE,
                                     max_batch_tokens=1024, seed=0)
    context = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(max_new_tokens=1, **GENERATION),
        continuous_batching_config=pages, block=True, timeout=5)
    with context as manager:
        start = time.perf_counter()  # after the manager's warm-up

        def request_reply(i):
            lengths, _ = script(workload, i)
            manager.add_request(histories[i], request_id=str(i), max_new_tokens=lengths[turn[i]])

        while waiting or worlds:
            # Start trajectories while there are free slots.
            while waiting and len(worlds) < slots:
                i = waiting.popleft()
                worlds[i] = ScriptedEnv(workload)
                turn[i] = 0
                histories[i] = first_prompt(chat, worlds[i], i)
                request_reply(i)

            # Collect observations, and request the next replies.
            for i in [i for i, step in steps.items() if step.done()]:
                observation = steps.pop(i).result().observation
                turn[i] += 1
                if turn[i] == turns:
                    del worlds[i]
                else:
                    histories[i] = histories[i] + chat.turns([agent.user(observation)], False)
                    request_reply(i)

            # Give a complete reply to its environment.
            result = manager.get_result(timeout=0.001)
            if result is not None and result.is_finished():
                i = int(result.request_id)
                histories[i] = histories[i] + list(result.generated_tokens)
                text = tokenizer.decode(result.generated_tokens)
                steps[i] = threads.submit(worlds[i].step, text)
        seconds = time.perf_counter() - start
    threads.shutdown()
    return seconds, [histories[i] for i in range(trajectories)]


# ---- the table ----


def median_of(repeats, function):
    return statistics.median(function() for _ in range(repeats))


def compare(models, tokenizer, name, workload, full):
    """Time all ways on one model and workload -> figures."""
    model = models[name]
    turns = 6 if workload == "long" and not full else TURNS
    our_repeats = their_repeats = 5 if full else 1
    if not full and workload != "long":
        our_repeats = 3

    # Fill the caches of the conversations, warm up, and let the engine allocate its memory: it
    # keeps it, as it does from the second training step on.
    for item in range(TRAJECTORIES):
        script(workload, item)
        for turn in range(turns + 1):
            observation_text(item, turn)
    recorder = RecordingEngine(model, SLOTS)
    play_ours(model, tokenizer, workload, SLOTS, turns=2, engine=recorder)
    play_lockstep(model, tokenizer, workload, True, turns=1)

    # Ours and the limit take turns, so that other load on the machine slows both.
    our_seconds, limit_seconds = [], []
    for _ in range(our_repeats):
        recorder.calls = []
        seconds, trajectories, stats = play_ours(model, tokenizer, workload, turns=turns,
                                                 engine=recorder)
        our_seconds.append(seconds)
        limit_seconds.append(replay_seconds(recorder))
    row = {"ours": statistics.median(our_seconds), "limit": statistics.median(limit_seconds)}

    def lockstep_seconds(cached):
        return play_lockstep(model, tokenizer, workload, cached, turns=turns)[0]

    num_batches = TRAJECTORIES // SLOTS
    row["reprefill"] = num_batches * median_of(their_repeats, lambda: lockstep_seconds(False))
    row["cached"] = num_batches * median_of(their_repeats, lambda: lockstep_seconds(True))

    # Continuous batching plays only 16 of the `long` trajectories. Its time for all of them is
    # scaled by ours: all trajectories over these 16.
    few = 16 if workload == "long" else TRAJECTORIES
    ours_on_few = row["ours"]
    if few != TRAJECTORIES:
        ours_on_few = play_ours(model, tokenizer, workload, few, few, turns)[0]
    continuous_on_few = play_continuous(models[name + "'"], tokenizer, workload, few, turns=turns)
    row["continuous"] = row["ours"] / ours_on_few * continuous_on_few[0]

    for way in ("reprefill", "cached", "continuous"):
        row[f"ratio_{way}"] = row[way] / row["ours"]
    limit_shares = [limit / ours for ours, limit in zip(our_seconds, limit_seconds)]
    num_tokens = sum(len(t.tokens) for t in trajectories)
    return row | {"limit_share": statistics.median(limit_shares),
                  "occupancy": stats["busy"] / stats["usable"],
                  "forwarded_per_kept": stats["forwarded"] / num_tokens, "tokens": num_tokens,
                  "tokens_per_second": num_tokens / row["ours"]}


PRINTED = ("ours", "ratio_reprefill", "ratio_cached", "ratio_continuous", "limit_share",
           "occupancy", "forwarded_per_kept")


def add_flags(parser):
    parser.add_argument("--workloads", type=lambda text: text.split(","),
                        default=["short", "long", "slow"])


def measure(args):
    """-> (figures for --out, one line for each target that was missed)"""
    # It warns that psutil is missing, which it needs on GPUs only.
    getLogger("ContinuousBatchingLogger").setLevel(CRITICAL)
    models, tokenizer = load_models()
    figures = {}
    jobs = [(name, workload) for name in (["tiny", "3.7M"] if args.full else ["tiny"])
            for workload in args.workloads]
    for name, workload in tqdm(jobs, desc="rollout", unit="workload"):
        row = compare(models, tokenizer, name, workload, args.full)
        figures.setdefault(name, {})[workload] = row
        columns = "".join(f"  {key} {row[key]:.2f}" for key in PRINTED)
        tqdm.write(f"{name:5} {workload:6}{columns}  {row['tokens_per_second']:.0f} tokens/s")
    missed = []
    for workload in args.workloads:
        for key, target in TARGETS[workload].items():
            value = figures["tiny"][workload][key]
            if value < target:
                missed.append(f"{workload}: {key} is {value:.2f}, not {target}")
    return figures["tiny"] | {"models": figures}, missed
