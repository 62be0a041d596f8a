"""The tiny base model, from nothing: `torchrun --nproc_per_node=2 data/make_tiny.py --out FOLDER` (about an hour on two cores).

A causal LM of Qwen2's architecture, its tokenizer and its chat template, as ordinary Hugging Face files. It is a *base*
model: it speaks the worlds' interface and knows nothing of their tasks. It is trained by next-token prediction on
  - transcripts in which a random policy picks among the valid actions: no solver, nothing filtered by success;
  - general language exercises (repeat, say whether a list has a thing, pick from a list what was asked for or anything),
    in no world's format and with no task's solution: what any pretrained model brings along.
What makes copying and comparing form at this size, measured (LOG.md): initial weights of std 1/sqrt(d) instead of 0.02;
heads that start near what copying needs (`wire`); each exercise alone first, the easy ones before the hard (`PHASES`); all
kept in the mixture, else they are forgotten; more weight on the replies' tokens.
The last phase ends by the clock, so two makings are alike, not equal bit for bit. This recipe has not been run whole yet: the
files in data/tiny were made by the earlier one of commit ee36714 (data/tiny/recipe.json).
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from agent import Chat, instructions  # noqa: E402
from envs import make_env  # noqa: E402
from worlds.textcraft import crafting_tree  # noqa: E402

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# What never varies is one token, and so is a thing (" red ball"; TextCraft's " oak planks"), in a mission, in a list and in
# a reply alike: naming it again is copying one token, whichever it is.
PHRASES = [p.replace("\\n", "\n") for p in """user\\n
assistant\\n
In front of you in this room, you can see several objects: There is a
In front of you in this room, you can see several objects:
  There is a
 steps in front of you and
 steps to your left.
 steps to your right.
 right in front of you
 steps away.
  The room has walls around you. You are facing a wall
  The room has walls around you. You are facing a box
  The room has walls around you.
 The room has walls around you. You are facing a wall
 The room has walls around you.
 You are carrying a
 You are not carrying anything.\\nAvailable actions: ["
\\nAvailable actions: ["
", "
", "check available actions"]
turn left
turn right
move forward
check available actions
go to
pickup
pick up
open
toggle and go through
go through
Your goal: 
The action is not recognized. Please check valid actions.
You can take the following actions:
\\n The task is completed.
Crafting commands:
\\n\\nGoal: craft
Could not find enough items to craft
Could not find
Could not execute
Inventory:""".split("\n")] + [f" {n}" for n in range(10)]


def phrases():
    """PHRASES, the sentences of the instructions, and the worlds' names for things."""
    found = PHRASES + [t for n in ("babyai", "textcraft") for t in re.findall(r"\S[^.:\n]+[.:]", make_env(n).prompt)]
    found += [f" {c} {n}" for c in "red green blue purple yellow grey".split() for n in ("ball", "box", "key")]
    return found + sorted({" " + name.replace("_", " ") for name in crafting_tree().items if "_" in name})


COLOURS = "red green blue purple yellow grey white black orange pink brown".split()
NOUNS = """ball box key door cup hat pen lamp stone chair table book shoe coat leaf ring bell boat bird fish horse cow pig
sheep dog cat tree flower apple pear plum nut egg bread cake cheese rope nail knife spoon plate bowl jar brush wheel flag
kite drum coin map letter stamp clock mirror glove scarf boot button candle basket ladder shovel bucket""".split()
NAMES = "Anna Bob Carla David Emma Frank Greta Hugo Ida Jack Karin Leo Mia Noah Olga Paul Rosa Sam Tina Uwe".split()
VERBS = "wash lift paint sell hide clean bring throw wrap weigh draw count fold lend".split()
IDLE = "wait", "sing", "look around", "sit down", "sleep", "say nothing", "dance", "step back"


def thing(rng, words):
    """A thing to name in an order: a word, or a coloured one."""
    few = rng.random() < 0.5  # things that are alike: the same few colours and nouns again and again
    if rng.random() < 0.4:
        return rng.choice(words)
    return f"{rng.choice(COLOURS[:6] if few else COLOURS)} {rng.choice(NOUNS[:4] if few else NOUNS)}"


def wish(rng, words, order):
    """An order in one of several forms; on a line of its own its verb has the token that it has in a reply."""
    return rng.choice(["Please {}.", "We want to {}.", "Task:\n{}", "Now\n{}", f"{rng.choice(words)}:\n{{}}",
                       f"{rng.choice(words)} {rng.choice(words)}\n{{}}"]).format(order)


def lists(rng, count, words, most=8, asks=0.35):
    """An order and `count` lists of deeds to pick what it names from -> [question], [answer]; the order is in the first
    question only. The answer has the tokens of its place in the list, as no space is before it there; where the list has
    nothing of the kind it is an idle deed. A share `asks` only asks whether it is there."""
    things = sorted({thing(rng, words) for _ in range(rng.randint(1, most))})
    rng.shuffle(things)
    verbs = rng.sample(VERBS if rng.random() < 0.6 else words, rng.randint(1, max(1, min(3, most - 1))))
    idle = rng.sample(IDLE, rng.randint(1, max(1, min(3, most - 1))))
    numbers = rng.choice([None, ["1"], "123456789"])
    v, t = rng.choice(verbs), rng.choice(things) if rng.random() < 0.75 else thing(rng, words)
    free = rng.random() < 0.15 and asks < 1
    order = wish(rng, words, "do anything" if free else f"{v} the {t}")
    opening, between, closing = rng.choice([("", "\n", ""), ("<", ">\n<", ">"), ("", "|", ""), ("(", ") (", ")")])
    questions, answers = [], []
    for i in range(count):
        shown = {x: rng.choice(numbers) if numbers else "" for x in things if rng.random() < 0.75}
        deeds = [f"{w} {x} {n}".strip() for w in verbs for x, n in shown.items()]
        if rng.random() < 0.3:
            rng.shuffle(deeds)
        fits = deeds + idle if free else [f"{v} {t} {shown[t]}".strip()] if t in shown else idle
        deeds = idle + deeds if rng.random() < 0.7 else deeds + idle
        text = opening + between.join(deeds) + closing
        if rng.random() < 0.3:  # something that does not matter comes between
            text = " ".join(rng.choices(words, k=rng.randint(1, 5 * most))) + ".\n" + text
        elif rng.random() < 0.5:
            text = " ".join(f"I saw a {x} {rng.randint(1, 9)} days ago." for x in shown) + "\n" + text
        if not free and rng.random() < asks:
            text, fits = text + "\nIs it in the list?", ["yes" if t in shown else "no"]
        questions.append(text if i else f"{order}\n{text}" if count > 1 or rng.random() < 0.8 else f"{text}\n{order}")
        answers.append(rng.choice(fits))
    return questions, answers


def exercise(rng, words):
    """One question about a short text -> (question, answer)."""
    kind = rng.randrange(8)
    if kind == 0:
        said = " ".join(rng.choices(words, k=rng.randint(2, 8)))
        return f"Repeat:\n{said}", said
    if kind == 1:  # who wants what
        wants = {n: f"{rng.randint(1, 9)} {' '.join(rng.choices(words, k=rng.randint(1, 3)))}"
                 for n in rng.sample(NAMES, rng.randint(2, 7))}
        who = rng.choice(list(wants))
        return "\n".join(f"{n} wants\n{w}" for n, w in wants.items()) + f"\n\nWhat does {who} want?", wants[who]
    if kind <= 4:  # an order in short
        verb, what = rng.choice(VERBS if rng.random() < 0.5 else words), thing(rng, words)
        return wish(rng, words, f"{verb} the {what}"), f"{verb} {what}"
    [question], [answer] = lists(rng, 1, words, rng.randint(2, 8))
    return question, answer


def repeating(rng, words):
    """A conversation that only copies."""
    said = [" ".join(rng.choices(words, k=rng.randint(4, 24))) for _ in range(2)]
    return "Repeat what you read.", [(s, s) for s in said]


def there(rng, words):
    """A conversation that asks, in one wording, whether lists have a thing."""
    pairs = []
    for _ in range(5):
        verb, shown = rng.choice(VERBS), rng.sample(words, rng.randint(2, 8))
        what = rng.choice(shown) if rng.random() < 0.5 else rng.choice(words)
        pairs.append((f"Task:\n{verb} the {what}\n" + "\n".join(f"{verb} {x}" for x in shown) + "\nIs it in the list?",
                      "yes" if what in shown else "no"))
    return "Answer the questions.", pairs


def orders(rng, words, asks):
    """A conversation of orders and lists: a new order for each list, or one that stands while the lists change."""
    most, turns = rng.choice([2, 4, 6, 8]), rng.randint(2, 5)
    parts = [lists(rng, 1, words, most, asks) for _ in range(turns)] if rng.random() < 0.6 else [
        lists(rng, turns, words, most, asks)]
    return "Answer the questions.", [pair for questions, answers in parts for pair in zip(questions, answers)]


def play(env, name, item, rng, turns):
    """A random policy's episode -> (instructions, [(observation, action), ...])."""
    observation, pairs = env.reset(item), []
    for _ in range(turns):
        action = random_action(env, name, rng)
        pairs.append((observation, action))
        step = env.step(action)
        observation = step.observation
        if step.done:
            break
    return instructions(env.prompt), pairs


def random_action(env, name, rng):
    """The random policy: uniform over the valid actions; in TextCraft first over the verb (get, craft, inventory), as
    listed ingredients outnumber everything else."""
    actions = env.valid_actions()
    if name == "textcraft":
        verbs = {"craft": 0.47, "get": 0.5, "inventory": 0.03}
        verbs = {v: w for v, w in verbs.items() if any(a.startswith(v) for a in actions)}
        verb = rng.choices(list(verbs), list(verbs.values()))[0]
        actions = [a for a in actions if a.startswith(verb)]
    return rng.choice(actions)


SINGLE_ROOM = [0, 1, 2, 3, 4, 8, 9, 10, 13, 18, 19, 29]  # the levels whose mission stays in one room, half of BabyAI's share


def vocabulary():
    """Single words to practise on: those of TextCraft's items, everyday things, colours, numbers."""
    env = make_env("textcraft")
    return sorted({w for i in range(544) for w in env.reset(i).replace(",", "").split() if w.isalpha()}
                  | set(NOUNS) | set(COLOURS) | set("123456789"))


def conversations(count, seed):
    """`count` conversations as (first message, [(observation, reply), ...]); items from 100,000 seeds on, which no
    item set uses."""
    rng = random.Random(seed)
    envs, words = {name: make_env(name) for name in ("babyai", "textcraft")}, vocabulary()
    for _ in tqdm(range(count), desc="playing", leave=False):
        u = rng.random()
        if u < 0.25:
            questions = [exercise(rng, words) for _ in range(rng.randint(2, 5))]
            yield rng.choice(["Answer the questions.", "Let us practise.", "Some questions for you."]), questions
        elif u < 0.75:
            level = rng.choice(SINGLE_ROOM) if rng.random() < 0.7 else rng.randrange(40)
            item = level + 40 * (100_000 + rng.randrange(10**6))
            yield play(envs["babyai"], "babyai", item, rng, rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 6]))
        else:
            item = rng.randrange(544) + 544 * (100_000 + rng.randrange(10**6))
            yield play(envs["textcraft"], "textcraft", item, rng, rng.choice([1, 2, 3, 4, 6, 8, 12]))


def make_tokenizer(texts, vocab_size):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    # Qwen2's own split (words with the space before them, single digits): loaders pick it by the model's type
    split = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                  r"|\s+(?!\S)|\s+")
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_tokens([AddedToken(p, normalized=False) for p in phrases()])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=TEMPLATE, model_max_length=8192)


def encode(chat, conversation):
    """-> ids [T] int16, reply mask [T] bool."""
    first, pairs = conversation
    ids, mask = [], []
    for i, (observation, reply) in enumerate(pairs):
        new = chat.start(first, observation) if i == 0 else chat.turn(observation, closed=True)
        said = chat.tokenizer.encode(reply, add_special_tokens=False) + [chat.end_id]
        ids += new + said
        mask += [False] * len(new) + [True] * len(said)
    return np.array(ids, np.int16), np.array(mask)


def batches(data, tokens, rng):
    """Endless shuffled batches of similar length, at most `tokens` tokens each, padded right."""
    while True:
        order = sorted(range(len(data)), key=lambda i: (len(data[i][0]) + rng.random() * 40))
        groups, group = [], []
        for i in order:
            if group and (len(group) + 1) * len(data[i][0]) > tokens:
                groups.append(group)
                group = []
            group.append(i)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(data[i][0]) for i in group)
            ids, kind = torch.zeros(2, len(group), width, dtype=torch.long)  # kind: 0 padding, 1 context, 2 reply
            for row, i in enumerate(group):
                n = len(data[i][0])
                ids[row, :n] = torch.from_numpy(data[i][0].astype(np.int64))
                kind[row, :n] = torch.from_numpy(data[i][1] + 1)
            yield ids, kind


@torch.no_grad()
def wire(model, offsets=(1, 2), strength=10.0, fast=5, out=0.05, write=4.0, copy=1.0, alike=4.0):
    """Start the attention heads near what copying needs; training may change it.
    First layer, heads 0 and 1 look at the token one and two back, by the biases of query and key alone: under RoPE two
    constant vectors score by distance, highest (by `strength`) where their phases cancel. What they saw is written to the
    residual by a random matrix, which the keys of heads 0 and 1 of the later layers undo: there "what came after the last
    token like this one" (induction heads, arXiv 2209.11895). All other heads look at tokens like their own: query and key start alike
    (mimetic initialisation, arXiv 2305.09828). Contents are compared on the slow rotations only. What layers add to the
    residual starts small (`out`), so that a token is still itself in the later layers."""
    config = model.config
    width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))  # rotations, radians a token
    c = math.sqrt(strength * math.sqrt(size))
    slow = (theta < 0.05).repeat(2)[:, None]
    reads, writes = [], []
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight *= out
        layer.mlp.down_proj.weight *= out
        for head in range(config.num_attention_heads):
            rows = slice(head * size, (head + 1) * size)
            if number == 0 and head < len(offsets):
                phase = offsets[head] * theta[:fast]
                attention.k_proj.bias[rows][:fast] = c
                attention.q_proj.bias[rows][:fast] = c * torch.cos(phase)
                attention.q_proj.bias[rows][size // 2:size // 2 + fast] = -c * torch.sin(phase)
                attention.o_proj.weight[:, rows] *= write
                reads.append(attention.v_proj.weight[rows].clone())
                writes.append(attention.o_proj.weight[:, rows].clone())
            elif alike:
                query = key = torch.randn(size, width) / math.sqrt(width)
                if head < len(offsets):  # an induction head
                    query, key = reads[head], writes[head].T / writes[head].norm() * math.sqrt(size)
                    attention.o_proj.weight[:, rows] = attention.v_proj.weight[rows].T * copy
                for proj, start in ((attention.q_proj, query), (attention.k_proj, key)):
                    proj.weight[rows] = torch.where(slow, alike * start, proj.weight[rows])


# (steps, learning rate, {source: share}, weight of what is not a reply); the last phase lasts until the time is over
PHASES = [(120, 3e-3, {"copies": 1}, 0.05),
          (900, 3e-3, {"copies": 1, "mixture": 4}, 1.0),
          (450, 1e-3, {"there": 1}, 0.02),
          (300, 1e-3, {"asked": 1}, 0.02),
          (500, 1e-3, {"picked": 3, "asked": 1}, 0.02),
          (10**9, 2e-3, {"mixture": 4, "picked": 2, "asked": 1, "copies": 1}, 0.5)]


def train(model, tokenizer, args, rank, ranks):
    """Next-token prediction, phase by phase. In the last one the learning rate falls to 0. -> (steps, tokens)."""
    rng, words, chat = random.Random(args.seed + rank), vocabulary(), Chat(tokenizer)
    data = [encode(chat, t) for t in conversations(args.conversations, args.seed + rank)]
    held, data = data[:300], data[300:]
    drills = {"copies": repeating, "there": there, "asked": lambda *a: orders(*a, 1), "picked": lambda *a: orders(*a, 0.2)}
    sources = {name: batches([encode(chat, make(rng, words)) for _ in range(10_000)], args.batch_tokens, rng)
               for name, make in drills.items()} | {"mixture": batches(data, args.batch_tokens, rng)}
    tests = {name: [encode(chat, make(rng, words)) for _ in range(60)] for name, make in drills.items()}
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.05},
                                   {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))

    def loss_of(ids, kind):
        logits = model(ids[:, :-1]).logits  # right padding and a causal mask: pads reach nothing that counts
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return loss, kind[:, 1:].flatten()

    def right(talks):
        """Share of replies that are right, token by token, read with the right ones before them."""
        found = []
        for ids, mask in talks:
            ids = torch.from_numpy(ids.astype(np.int64))[None]
            hit = (model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:])[0, torch.from_numpy(mask[1:])]
            ends = (ids[0, 1:][torch.from_numpy(mask[1:])] == chat.end_id).nonzero().flatten().tolist()
            found += [bool(hit[a:b].all()) for a, b in zip([0] + [e + 1 for e in ends], ends)]
        return round(sum(found) / len(found), 2)

    begin, seen, last, bar = time.time(), 0, None, tqdm(total=100, desc="training", unit="%", disable=rank > 0)
    for step in range(10**9):
        clock = torch.tensor([time.time() - begin])
        if ranks > 1:
            dist.broadcast(clock, 0)  # every rank stops at the same step
        done = min(1.0, clock.item() / 60 / args.minutes)
        phase = next(i for i in range(len(PHASES)) if step < sum(p[0] for p in PHASES[:i + 1]))
        _, lr, shares, rest_weight = PHASES[phase]
        if phase == len(PHASES) - 1:
            last = done if last is None else last
            lr *= min(1, (1 - done) / (1 - last) / 0.7)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 40)
        ids, kind = next(sources[rng.choices(list(shares), list(shares.values()))[0]])
        loss, kind = loss_of(ids, kind)
        weight = torch.tensor([0.0, rest_weight, args.reply_weight])[kind]
        ((loss * weight).sum() / weight.sum()).backward()
        seen += ranks * int((kind > 0).sum())
        if ranks > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.grad = g.view_as(p) / ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 150 == 149 or done >= 1):
            with torch.no_grad():
                pairs = [loss_of(*b) for b, _ in zip(batches(held, args.batch_tokens, random.Random(0)), range(10))]
                said, rest = (torch.cat([loss[kind == k] for loss, kind in pairs]).mean() for k in (2, 1))
                scores = "  ".join(f"{name} {right(talks)}" for name, talks in tests.items())
            tqdm.write(f"step {step + 1}  phase {phase + 1}  {seen / 1e6:.1f}M tokens  {clock.item() / 60:.1f} min  held-out loss: "
                       f"replies {said:.4f}, rest {rest:.4f}  right: {scores}")
            model.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            bar.update(int(100 * done) - bar.n)
        if done >= 1:
            return step + 1, seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "tiny"))
    parser.add_argument("--minutes", type=float, default=60, help="time for the training")
    parser.add_argument("--conversations", type=int, default=40_000, help="played by each process")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="a step, in each process")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--reply_weight", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    talks = conversations(8000, args.seed)
    tokenizer = make_tokenizer([t for first, pairs in talks for t in [first, *(x for pair in pairs for x in pair)]], 1200)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, intermediate_size=3 * args.hidden,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
        initializer_range=1 / math.sqrt(args.hidden),
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    wire(model)
    if rank == 0:
        print(f"{len(tokenizer)} tokens in the vocabulary, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    steps, tokens = train(model, tokenizer, args, rank, ranks)
    if rank == 0:
        recipe = {k: v for k, v in vars(args).items() if k != "out"} | {"processes": ranks, "steps": steps, "tokens": tokens}
        (Path(args.out) / "recipe.json").write_text(json.dumps(recipe, indent=1))


if __name__ == "__main__":
    main()
