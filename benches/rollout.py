"""`python bench.py rollout`: ours against (a) Hugging Face's `generate` on the whole history every turn, in lock-step, (b)
`generate` with the cache kept across turns, in lock-step, (c) transformers' continuous batching (`generate_batch`'s manager),
which replaces a request the moment it ends. All get the same conversations: 64 slots, 192 trajectories of 8 turns; a reply ends
after as many tokens as a law and a seed say, never by a token; all sample at temperature 1. Workloads:

    short   replies of 3 to 20 tokens, environments that answer at once
    long    heavy-tailed thoughts: 5 to 300 tokens, log-uniform
    slow    replies of 3 to 20 tokens, environments that take 1 to 500 ms: log-normal, median 30 ms, sigma 1.2, cut

The limit is a loop over the forward passes that ours made (and the copies of common beginnings) with nothing between them.
Lock-step's batches of 64 do not touch each other, so (a) and (b) play one of the three and count three times its time; (c)
plays 16 trajectories in `long`, where without --full everybody plays 6 turns.
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
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StoppingCriteriaList
from transformers import Qwen2Config, Qwen2ForCausalLM

import agent
import rl
import rollout as ro
from engine import Ragged
from envs import Env, Step

SLOTS, TRAJECTORIES, TURNS = 64, 192, 8
TARGETS = {  # workload -> what must be reached, on the tiny model
    "short": {"ratio_reprefill": 4, "ratio_cached": 1.15, "ratio_continuous": 1, "limit_share": 0.85, "occupancy": 0.9},
    "long": {"ratio_reprefill": 10, "ratio_cached": 5, "ratio_continuous": 1, "limit_share": 0.85, "occupancy": 0.9},
    "slow": {"ratio_cached": 3, "ratio_continuous": 1}}
WORDS = "the red ball is left of a grey door and you see one key in this room".split()


@functools.cache
def law(workload, item):
    """-> (reply lengths [TURNS] in tokens, latencies [TURNS] in seconds) of a trajectory."""
    rng = np.random.default_rng([17, item])
    if workload == "long":
        lengths = np.exp(rng.uniform(math.log(5), math.log(301), TURNS))
    else:
        lengths = rng.integers(3, 21, TURNS)
    latencies = np.clip(0.03 * np.exp(1.2 * rng.standard_normal(TURNS)), 0.001, 0.5) if workload == "slow" else np.zeros(TURNS)
    return lengths.astype(int).tolist(), latencies.tolist()


@functools.cache
def says(item, turn):
    return " ".join(np.random.default_rng([18, item, turn]).choice(WORDS, 25))


class Told(Env):
    """A world that says about 25 words a turn, after the law's latency."""
    prompt = "You are in a room. Say what you do. " + " ".join(WORDS * 3)

    def __init__(self, workload):
        self.workload, self.instant = workload, workload != "slow"

    def reset(self, item):
        self.latencies, self.turn, self.item = law(self.workload, item)[1], 0, item
        return says(item, 0)

    def step(self, action):
        if self.workload == "slow":
            time.sleep(self.latencies[self.turn % TURNS])
        self.turn += 1
        return Step(says(self.item, self.turn), 0.0, 0.0, False, False)


def models():
    """-> {name: model}, both with the tiny model's tokenizer, and name' with a copy for continuous batching, which changes it."""
    tiny, tokenizer = rl.load_policy("tiny")
    torch.manual_seed(0)
    size = dict(vocab_size=tiny.config.vocab_size, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=768, tie_word_embeddings=True, max_position_embeddings=8192)
    found = {"tiny": tiny.eval(), "3.7M": Qwen2ForCausalLM(Qwen2Config(**size)).eval()}
    return found | {name + "'": copy.deepcopy(model) for name, model in found.items()}, tokenizer


# ---- ours ----


def ours(model, tokenizer, workload, trajectories=TRAJECTORIES, slots=SLOTS, turns=TURNS, engine=None):
    """-> (seconds, trajectories, stats)."""

    class Scripted(ro.Episode):
        def __init__(self, *args):
            super().__init__(*args)
            self.lengths = law(workload, int(self.t.item.split("_")[1]))[0]

        def complete(self, token):
            return len(self.reply) >= self.lengths[self.t.turns % TURNS]

    before, ro.Episode, stats = ro.Episode, Scripted, {}
    try:
        with ro.EnvPool(make=lambda name: Told(workload)) as pool:
            begin = time.perf_counter()
            played = ro.rollout(model, tokenizer, pool, [f"told_{i}" for i in range(trajectories)], turns, slots=slots,
                                max_length=10**6, action_format="plain", engine=engine or Ragged(model, slots),
                                arrival=workload == "slow", stats=stats)
            return time.perf_counter() - begin, played, stats
    finally:
        ro.Episode = before


class Recorder(Ragged):
    """Writes down what it is asked for, to be repeated."""

    def __init__(self, *args):
        self.calls = []
        super().__init__(*args)

    def begin(self, *args):
        self.calls.append(args)
        return super().begin(*args)

    def forward(self, feed):
        self.calls.append({slot: list(ids) for slot, ids in feed.items()})
        return super().forward(feed)


def limit(recorder):
    """Seconds of the same forward passes with nothing between them: no sampling, no environments, no text."""
    engine = Ragged(recorder.policy, recorder.slots)
    engine.kv = recorder.kv
    begin = time.perf_counter()
    with engine.attention():
        for call in recorder.calls:
            engine.forward(call) if isinstance(call, dict) else engine.begin(*call)
    return time.perf_counter() - begin


# ---- theirs ----


class Lengths:
    """A stopping criterion of `generate`: each row ends after its own number of new tokens."""

    def __init__(self, start, lengths):
        self.start, self.lengths = start, torch.tensor(lengths)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - self.start >= self.lengths


def padded(rows):
    """Lists of ids -> ids and mask, [B, W], padded on the left."""
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, ids.shape[1] - len(row):], mask[i, ids.shape[1] - len(row):] = torch.tensor(row), 1
    return ids, mask


PAGE = 32
GENERATION = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)


@torch.no_grad()
def lockstep(model, tokenizer, workload, cached, rows=SLOTS, turns=TURNS):
    """`generate` turn by turn, all rows together; environments step in parallel, one thread each. -> (seconds, histories)"""
    chat, worlds = agent.Chat(tokenizer), [Told(workload) for _ in range(rows)]
    laws = [law(workload, i)[0] for i in range(rows)]
    with concurrent.futures.ThreadPoolExecutor(rows) as threads:
        begin = time.perf_counter()
        new = [chat.start(w.prompt, w.reset(i)) for i, w in enumerate(worlds)]
        histories, cache = [list(n) for n in new], DynamicCache(config=model.config)
        ids = mask = torch.zeros(rows, 0, dtype=torch.long)
        for turn in range(turns):
            lengths = [one[turn] for one in laws]
            if cached:
                chunk, real = padded(new)
                ids, mask = torch.cat([ids, chunk], 1), torch.cat([mask, real], 1)
            else:
                ids, mask = padded(histories)
            width = ids.shape[1]
            how = GenerationConfig(max_new_tokens=max(lengths), **GENERATION)
            ids = model.generate(ids, attention_mask=mask, generation_config=how,
                                 stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
                                 **({"past_key_values": cache} if cached else {}))
            mask = torch.cat([mask, (torch.arange(ids.shape[1] - width) < torch.tensor(lengths)[:, None]).long()], 1)
            replies = [row[width:width + n].tolist() for row, n in zip(ids, lengths)]
            texts = [tokenizer.decode(r) for r in replies]
            if workload == "slow":
                steps = [s.result() for s in [threads.submit(w.step, text) for w, text in zip(worlds, texts)]]
            else:
                steps = [w.step(text) for w, text in zip(worlds, texts)]
            new = [chat.turn(s.observation, closed=False) for s in steps]
            for history, reply, observation in zip(histories, replies, new):
                history += reply + observation * (turn < turns - 1)
        return time.perf_counter() - begin, histories


@torch.no_grad()
def continuous(model, tokenizer, workload, trajectories=TRAJECTORIES, slots=SLOTS, turns=TURNS):
    """Continuous batching: every turn is a request with the whole history. -> (seconds, histories)"""
    chat, queue, histories, done = agent.Chat(tokenizer), deque(range(trajectories)), {}, {}
    threads, thinking, worlds, turn = concurrent.futures.ThreadPoolExecutor(slots), {}, {}, {}
    # small pages, so that a turn may find most of the history's keys and values in pages that are shared
    pages = ContinuousBatchingConfig(page_size=PAGE, num_blocks=slots * 3072 // PAGE, max_batch_tokens=1024, seed=0)
    with model.continuous_batching_context_manager(generation_config=GenerationConfig(max_new_tokens=1, **GENERATION),
                                                   continuous_batching_config=pages, block=True, timeout=5) as manager:
        begin = time.perf_counter()  # once it is warm

        def ask(i):
            manager.add_request(histories[i], request_id=str(i), max_new_tokens=law(workload, i)[0][turn[i]])

        while len(done) < trajectories:
            while queue and len(worlds) < slots:
                i = queue.popleft()
                worlds[i], turn[i] = Told(workload), 0
                histories[i] = chat.start(worlds[i].prompt, worlds[i].reset(i))
                ask(i)
            for i in [i for i, step in thinking.items() if step.done()]:
                observation = thinking.pop(i).result().observation
                turn[i] += 1
                if turn[i] == turns:
                    done[i] = worlds.pop(i)
                else:
                    histories[i] = histories[i] + chat.turn(observation, closed=False)
                    ask(i)
            result = manager.get_result(timeout=0.001)
            if result is not None and result.is_finished():
                i = int(result.request_id)
                histories[i] = histories[i] + list(result.generated_tokens)
                thinking[i] = threads.submit(worlds[i].step, tokenizer.decode(result.generated_tokens))
        seconds = time.perf_counter() - begin
    threads.shutdown()
    return seconds, [histories[i] for i in range(trajectories)]


# ---- the table ----


def rollouts(full, names, workloads=("short", "long", "slow")):
    """-> {model: {workload: figures}}"""
    found, (nets, tokenizer) = {}, models()
    median = lambda f: statistics.median(f() for _ in range(5 if full else 1))  # noqa: E731
    jobs = [(name, workload) for name in names for workload in workloads]
    for name, workload in tqdm(jobs, desc="rollout", unit="workload"):
        net, few = nets[name], TRAJECTORIES if workload != "long" else 16
        turns = TURNS if full or workload != "long" else 6
        for item in range(TRAJECTORIES):  # what is said is made once, in nobody's time
            for turn in range(turns + 1):
                says(item, turn), law(workload, item)
        recorder = Recorder(net, SLOTS)
        ours(net, tokenizer, workload, SLOTS, turns=2, engine=recorder)  # its memory, as from the second training step on
        lockstep(net, tokenizer, workload, True, turns=1)

        def play():
            recorder.calls = []
            seconds, play.trajectories, play.stats = ours(net, tokenizer, workload, turns=turns, engine=recorder)
            return seconds

        both = [(play(), limit(recorder)) for _ in range(5 if full else 1 if workload == "long" else 3)]  # in turns: what else the machine does falls on both
        row = {"ours": statistics.median(pair[0] for pair in both), "limit": statistics.median(pair[1] for pair in both),
               "reprefill": 3 * median(lambda: lockstep(net, tokenizer, workload, False, turns=turns)[0]),
               "cached": 3 * median(lambda: lockstep(net, tokenizer, workload, True, turns=turns)[0])}
        alone = row["ours"] if few == TRAJECTORIES else ours(net, tokenizer, workload, few, few, turns)[0]
        row["continuous"] = row["ours"] / alone * continuous(nets[name + "'"], tokenizer, workload, few, turns=turns)[0]
        kept = sum(len(t.tokens) for t in play.trajectories)
        found.setdefault(name, {})[workload] = row | {
            **{f"ratio_{k}": row[k] / row["ours"] for k in ("reprefill", "cached", "continuous")},
            "limit_share": statistics.median(pair[1] / pair[0] for pair in both), "occupancy": play.stats["busy"] / play.stats["room"],
            "forwarded_per_kept": play.stats["forwarded"] / kept, "tokens": kept, "tokens_per_second": kept / row["ours"]}
        line = found[name][workload]
        tqdm.write(f"{name:5} {workload:6}" + "".join(f"  {k} {line[k]:.2f}" for k in (
            "ours", "ratio_reprefill", "ratio_cached", "ratio_continuous", "limit_share", "occupancy", "forwarded_per_kept"))
            + f"  {line['tokens_per_second']:.0f} tokens/s")
    return found


def scale(net, tokenizer):
    """More trajectories, and more turns, in 16 slots: what a trajectory and a token cost. -> rows for the table"""
    engine, rows = Ragged(net, 16), []
    ours(net, tokenizer, "short", 16, 16, 80, engine)  # its memory
    for trajectories, turns in [(16, 8), (64, 8), (512, 8), (32, 5), (32, 20), (32, 80)]:
        runs = [ours(net, tokenizer, "short", trajectories, 16, turns, engine) for _ in range(3 if trajectories > 64 or turns > 20 else 9)]
        seconds, played = statistics.median(run[0] for run in runs), runs[0][1]
        tokens = sum(len(t.tokens) for t in played)
        rows.append({"trajectories": trajectories, "turns": turns, "ms_per_trajectory": 1000 * seconds / trajectories,
                     "us_per_token": 1e6 * seconds / tokens, "tokens_per_trajectory": tokens / trajectories})
        tqdm.write("  ".join(f"{k} {v:.0f}" for k, v in rows[-1].items()))
    return rows


def add_flags(parser):
    parser.add_argument("--scale", action="store_true", help="only: time a trajectory with 16 to 512 of them, and with 5 to 80 turns")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["short", "long", "slow"])


def measure(args):
    """-> what goes into --out, and the ratios that were missed"""
    getLogger("ContinuousBatchingLogger").setLevel(CRITICAL)  # it misses psutil, which it needs on GPUs only
    if args.scale:
        nets, tokenizer = models()
        return scale(nets["tiny"], tokenizer), []
    found = rollouts(args.full, ["tiny", "3.7M"] if args.full else ["tiny"], args.workloads)
    return found["tiny"] | {"models": found}, [
        f"{w}: {k} is {found['tiny'][w][k]:.2f}, not {least}" for w in args.workloads for k, least in TARGETS[w].items()
        if found["tiny"][w][k] < least]
