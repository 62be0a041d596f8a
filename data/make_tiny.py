"""The tiny base model, from nothing: `python data/make_tiny.py` (about 90 minutes on two cores) writes data/tiny/.

A causal LM of Qwen2's architecture, its tokenizer and its chat template, as ordinary Hugging Face files. It is a *base*
model: it speaks the worlds' interface and knows nothing of their tasks. It is trained by next-token prediction on
  - transcripts in which a random policy picks among the valid actions: no solver, nothing filtered by success;
  - general language exercises (repeat, recall who wants what, do what was asked for or anything from a list), in no
    world's format and with no task's solution: what any pretrained model brings along.
What makes copying from the context work at this size, measured (LOG.md): initial weights of std 1/sqrt(d) instead of
0.02; two heads that look at the previous tokens from the start (`look_back`); nothing but repeating words for the first
600 steps, then picking from lists, both kept in the mixture, else they are forgotten; more weight on the replies' tokens.
The shipped files were made leg by leg (recipe.json); the whole in one go has not been run yet. Legs end by the clock, so two makings are alike, not equal bit for bit.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from agent import Chat, instructions  # noqa: E402
from envs import make_env  # noqa: E402

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Phrases that never vary are one token each; every word that does (a colour, a thing, a number) is its own, so that
# what is learned about "red" in one action holds in all of them. An action has the same tokens in a list and in a reply.
PHRASES = [p.replace("\\n", "\n") for p in """user\\n
assistant\\n
In front of you in this room, you can see several objects:
 There is a
  There is a
 steps in front of you and
 steps to your left.
 steps to your right.
 right in front of you
 steps away.
  The room has walls around you.
 The room has walls around you.
 You are facing a wall
 You are facing a box
 You are carrying a
 You are not carrying anything.
\\nAvailable actions: ["
", "
"]
turn left
turn right
move forward
toggle and go through
go through
go to
check available actions
Your goal:
The action is not recognized. Please check valid actions.
You can take the following actions:
\\n The task is completed.
Crafting commands:
\\n\\nGoal: craft
Could not find enough items to craft
Could not find
Could not execute
Inventory:""".split("\n")] + [f" {n}" for n in range(1, 10)]

COLOURS = "red green blue purple yellow grey white black orange pink brown".split()
NOUNS = """ball box key door cup hat pen lamp stone chair table book shoe coat leaf ring bell boat bird fish horse cow pig
sheep dog cat tree flower apple pear plum nut egg bread cake cheese rope nail knife spoon plate bowl jar brush wheel flag
kite drum coin map letter stamp clock mirror glove scarf boot button candle basket ladder shovel bucket""".split()
NAMES = "Anna Bob Carla David Emma Frank Greta Hugo Ida Jack Karin Leo Mia Noah Olga Paul Rosa Sam Tina Uwe".split()


VERBS = "wash lift paint sell hide clean bring throw wrap weigh draw count fold lend".split()


def lists(rng, count, words):
    """An order and `count` lists of deeds to pick what it names from -> [question], [answer]; the order is in the first
    question only. The answer has the tokens of its place in the list, as no space is before it there; "none" where there
    is nothing of the kind."""
    colours, nouns = COLOURS[:rng.choice([3, 6, 11])], NOUNS[:rng.choice([4, 8, 60])]
    things = sorted({(rng.choice(colours), rng.choice(nouns)) for _ in range(rng.randint(1, 8))})
    rng.shuffle(things)
    verbs = rng.sample(VERBS, rng.randint(1, 3))
    deeds = [(v, *t) for v in verbs for t in things]
    if rng.random() < 0.3:
        rng.shuffle(deeds)
    v, c, n = rng.choice(deeds) if rng.random() < 0.8 else map(rng.choice, (verbs, colours, nouns))
    order, fits = rng.choice([(f"{v} the {c} {n}", lambda d: d == (v, c, n))] * 5 + [
        (f"{v} a {n}", lambda d: d[0] == v and d[2] == n),
        (f"{v} something {c}", lambda d: d[0] == v and d[1] == c),
        (f"do something with the {c} {n}", lambda d: d[1:] == (c, n))] + [("do anything", lambda d: True)] * 4)
    order = rng.choice(["Please {}.", "You should {}.", "Task: {}", "Now {}!", "We want to {}."]).format(order)
    opening, between, closing = rng.choice([("", "\n", ""), ("<", ">\n<", ">"), ("", "|", "")])
    questions, answers = [], []
    for i in range(count):
        shown = [d for d in deeds if rng.random() < (0.9 if count == 1 else 0.6)]
        text = opening + between.join(map(" ".join, shown)) + closing
        if rng.random() < 0.5:  # something that does not matter comes between
            text = " ".join(rng.choices(words, k=rng.randint(1, 40))) + ".\n" + text
        questions.append(text if i else f"{order}\n{text}" if count > 1 or rng.random() < 0.7 else f"{text}\n{order}")
        found = [" ".join(d) for d in shown if fits(d)]
        answers.append(rng.choice(found) if found else "none")
    return questions, answers


def exercise(rng, words):
    """One question about a short text -> (question, answer)."""
    kind = rng.randrange(6)
    if kind == 0:
        said = " ".join(rng.choices(words, k=rng.randint(2, 8)))
        return f"Repeat:\n{said}", said
    if kind <= 2:  # who wants what
        wants = {n: f"{rng.randint(1, 9)} {' '.join(rng.choices(words, k=rng.randint(1, 3)))}"
                 for n in rng.sample(NAMES, rng.randint(2, 7))}
        who = rng.choice(list(wants))
        return "\n".join(f"{n} wants\n{w}" for n, w in wants.items()) + f"\n\nWhat does {who} want?", wants[who]
    [question], [answer] = lists(rng, 1, words)
    return question, answer


def drill(rng, words, repeats):
    """A conversation that practises copying, or picking from a list what was asked for: at once, or in several lists
    after the order was given -> (first message, [(observation, reply)])."""
    if rng.random() < repeats:
        said = [" ".join(rng.choices(words, k=rng.randint(4, 24))) for _ in range(2)]
        return "Repeat what you read.", [(s, s) for s in said]
    parts = [lists(rng, 1, words) for _ in range(rng.randint(2, 4))] if rng.random() < 0.5 else [
        lists(rng, rng.randint(2, 4), words)]  # the order stands, the lists change
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
        elif u < 0.7:
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
    tok.add_tokens([AddedToken(p, normalized=False) for p in PHRASES])
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
def look_back(model, offsets=(1, 2), strength=6.0, pairs=5):
    """Start head h of the first layer looking at the token offsets[h] back, by the biases of its query and key alone:
    under RoPE two constant vectors score by distance, highest (by `strength`) where their phases cancel. Training may
    change it; it is the half of an induction head that is slow to form."""
    attention, config = model.model.layers[0].self_attn, model.config
    size = config.hidden_size // config.num_attention_heads
    theta = 10_000.0 ** (-torch.arange(pairs) / (size // 2))  # the fastest rotations, radians a token
    c = math.sqrt(strength * math.sqrt(size))
    for head, offset in enumerate(offsets):
        at = head * size
        attention.k_proj.bias[at:at + pairs] = c
        attention.q_proj.bias[at:at + pairs] = c * torch.cos(offset * theta)
        attention.q_proj.bias[at + size // 2:at + size // 2 + pairs] = -c * torch.sin(offset * theta)


def train(model, tokenizer, args, first):
    """One leg: the first forms copying and matching and then learns the interface; the second, on new conversations, with
    larger batches, a falling learning rate and more weight on the replies, makes it accurate. -> (steps, tokens)."""
    seed = args.seed + (0 if first else 1)
    rng, words, chat = random.Random(seed), vocabulary(), Chat(tokenizer)
    minutes, batch_tokens, reply_weight = (args.minutes, 4096, 5.0) if first else (args.more_minutes, 8192, 25.0)
    data = [encode(chat, t) for t in conversations(args.conversations, seed)]
    held, data = data[:300], data[300:]
    drills = [[encode(chat, drill(rng, words, repeats)) for _ in range(15_000)] for repeats in (1.0, 0.4)]
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.05},
                                   {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))

    def loss_of(ids, kind):
        logits = model(ids[:, :-1]).logits  # right padding and a causal mask: pads reach nothing that counts
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return loss, kind[:, 1:].flatten()

    begin, seen, bar = time.time(), 0, tqdm(total=100, desc="training", unit="%")
    repeating, picking = (batches(d, batch_tokens // 2, rng) for d in drills)
    mixture = batches(data, batch_tokens, rng)
    for step in range(10**9):
        done = min(1.0, (time.time() - begin) / 60 / minutes)
        parts = [(mixture, 1.0)] + [(picking, 0.5)] * (step % 2)
        lr = args.lr * min(1, (1 - done) / 0.6 + 0.02) if first else args.more_lr * min(1, (step + 1) / 40) * (1 - done)
        if first and step < args.repeat_steps:
            parts, lr = [(repeating, 1.0)], args.drill_lr * min(1, (step + 1) / 40)
        elif first and step < args.repeat_steps + args.pick_steps:
            parts = [(picking, 1.0)]
        for group in optimizer.param_groups:
            group["lr"] = lr
        for source, share in parts:
            ids, kind = next(source)
            loss, kind = loss_of(ids, kind)
            weight = torch.tensor([0.0, 1.0, reply_weight])[kind]
            (share * (loss * weight).sum() / weight.sum()).backward()
            seen += int((kind > 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 249 or done >= 1:
            with torch.no_grad():
                pairs = [loss_of(*b) for b, _ in zip(batches(held, batch_tokens, random.Random(0)), range(10))]
            said, rest = (torch.cat([loss[kind == k] for loss, kind in pairs]).mean() for k in (2, 1))
            tqdm.write(f"step {step + 1}  {seen / 1e6:.1f}M tokens  {(time.time() - begin) / 60:.1f} min  "
                       f"held-out loss: replies {said:.4f}, rest {rest:.4f}")
            model.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            bar.update(int(100 * done) - bar.n)
        if done >= 1:
            return step + 1, seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "tiny"))
    parser.add_argument("--start", default="", help="do the second leg only, from the model in this folder")
    parser.add_argument("--minutes", type=float, default=36, help="time for the first leg's training")
    parser.add_argument("--more_minutes", type=float, default=43, help="time for the second's")
    parser.add_argument("--conversations", type=int, default=50_000, help="played for each leg")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeat_steps", type=int, default=600)
    parser.add_argument("--pick_steps", type=int, default=1500)
    parser.add_argument("--drill_lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--more_lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    if args.start:
        model, tokenizer = Qwen2ForCausalLM.from_pretrained(args.start), AutoTokenizer.from_pretrained(args.start)
    else:
        talks = conversations(8000, args.seed)
        tokenizer = make_tokenizer([t for first, pairs in talks for t in [first, *(x for pair in pairs for x in pair)]], 1900)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=args.hidden, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, num_key_value_heads=args.heads, intermediate_size=3 * args.hidden,
            max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=1 / math.sqrt(args.hidden),
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
        look_back(model)
    print(f"{len(tokenizer)} tokens in the vocabulary, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    legs = [train(model, tokenizer, args, first) for first in ((False,) if args.start else (True, False))]
    recipe = {k: v for k, v in vars(args).items() if k not in ("out", "start")}
    (Path(args.out) / "recipe.json").write_text(json.dumps(recipe | {"steps_and_tokens": legs}, indent=1))


if __name__ == "__main__":
    main()
