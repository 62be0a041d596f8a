"""The tiny base model, from nothing: `torchrun --nproc_per_node=2 data/make_tiny.py --out FOLDER` (an hour on two cores).

A causal LM of Qwen2's architecture, its tokenizer and its chat template, as ordinary Hugging Face files. It is a *base*
model: it speaks the worlds' interface and knows nothing of their tasks. It is trained by next-token prediction on
  - transcripts of a random policy (`random_policy`) that names something it has read, whichever, and takes a random valid
    action on it: no solver, nothing filtered by success. As the policy's probabilities are known, they are the targets;
  - general language exercises (repeat, recall, say in short), in no world's format and with no task's solution: what any
    pretrained model brings along.
What makes copying and comparing form at this size, measured (LOG.md): initial weights of std 1/sqrt(d) instead of 0.02;
heads that start near what copying needs (`wire`); repeating alone first, and kept in the mixture; little weight on what
the model only reads; many small steps; and replies that name a thing before they act on it, so that "is it there?" is asked
of the last token, not of one far back. Training ends by the processor's clock, so two makings are alike, not equal bit for bit.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
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
from config import presets  # noqa: E402
from envs import EnvError, env_options, items, make_env, split_item  # noqa: E402
from worlds import almanac  # noqa: E402
from worlds.textcraft import crafting_tree  # noqa: E402

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# What never varies is one token, and so is a thing (" red ball"; TextCraft's " oak planks"), in a mission, in a list and in
# a reply alike (but " red door" in a mission is " red closed door" in a list): naming it again is copying one token.
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
Inventory:
Thought:
\\nAction: 
 nothing""".split("\n")] + [f" {n}" for n in range(10)]


def phrases(worlds, named):
    """PHRASES, the sentences of the instructions, and the worlds' names for things; `named`: what SciWorld's policy thought of."""
    told = [told_by(name, world(name)) for name in worlds]
    found = PHRASES + [sentence for text in told for sentence in re.findall(r"\S[^.:\n]+[.:]", text)]
    kinds = "ball", "box", "key", "door", "open door", "closed door", "locked door"
    found += [f" {colour} {kind}" for colour in COLOURS[:6] for kind in kinds]
    found += sorted({" " + name.replace("_", " ") for name in crafting_tree().items if "_" in name})
    found += SEARCH + [f" {word}" for word in almanac.WORDS] if "searchqa" in worlds else []
    found += WEB if "webarena" in worlds else []
    return found + (SCIENCE + sorted({" " + name for name in named if " " in name}) if "sciworld" in worlds else [])


def world(name):
    """The world as the tiny model plays it."""
    return make_env(name, **env_options(presets("tiny", name)["env_args"], [name]).get(name, {}))


def told_by(name, env):
    """The instructions of a world, with how to answer where it does not say so itself."""
    return instructions(env.prompt, FORM.get(name, "react"))


SEARCH = [p.replace("\\n", "\n") for p in """Question:
<think>
 </think>\\n
<search>
<answer>
 </
search>
answer>
<information>Doc
</information>
\\nDoc
(Title:""".split("\n")]
WEB = [p.replace("\\n", "\n").replace("\\t", "\t") for p in """OBSERVATION:\\n
 (current): 
RootWebArea
\\n\\t
\\n\\t\\t
\\n\\t\\t\\t
 link '
 button '
 heading '
 textbox '
 StaticText '
 searchbox '
\\nURL: http://
\\nOBJECTIVE:
\\nPREVIOUS ACTION:
.localhost:
```click
```type
```stop
```scroll
```go_back```
required: False
focused: True
nothing\\n""".split("\n")] + [f"[{n}]" for n in range(1, 60)]
FORM = {"searchqa": "tags", "webarena": "plain"}  # the action format; the others' is react


SCIENCE = [p.replace("\\n", "\n").replace("\\t", "\t") for p in """This room is called the
 In it, you see: \\n\\tthe agent\\n\\ta substance called air\\n
You also see:\\n
\\tA door to the
 (that is closed)
 (that is open)
 (containing nothing)
, which is turned off
 door is closed.
 is: nothing.
\\ta substance called
No known action matches that input.
The door is now open.
You move to the
Your task is to
In your inventory, you see:
look around
look at
look in
go to
pick up
put down
focus on""".split("\n")]


COLOURS = "red green blue purple yellow grey white black orange pink brown".split()
NOUNS = """ball box key door cup hat pen lamp stone chair table book shoe coat leaf ring bell boat bird fish horse cow pig
sheep dog cat tree flower apple pear plum nut egg bread cake cheese rope nail knife spoon plate bowl jar brush wheel flag
kite drum coin map letter stamp clock mirror glove scarf boot button candle basket ladder shovel bucket""".split()
NAMES = "Anna Bob Carla David Emma Frank Greta Hugo Ida Jack Karin Leo Mia Noah Olga Paul Rosa Sam Tina Uwe".split()
VERBS = "wash lift paint sell hide clean bring throw wrap weigh draw count fold lend".split()


def exercise(rng, words):
    """One question about a short text -> (question, answer)."""
    thing = f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}" if rng.random() < 0.6 else rng.choice(words)
    verb = rng.choice(VERBS)
    kind = rng.randrange(3)
    if kind == 0:
        said = " ".join(rng.choices(words, k=rng.randint(2, 8)))
        return f"Repeat:\n{said}", said
    if kind == 1:  # who wants what
        wants = {n: f"{rng.randint(1, 9)} {' '.join(rng.choices(words, k=rng.randint(1, 3)))}"
                 for n in rng.sample(NAMES, rng.randint(2, 7))}
        who = rng.choice(list(wants))
        return "\n".join(f"{n} wants\n{w}" for n, w in wants.items()) + f"\n\nWhat does {who} want?", wants[who]
    return rng.choice(["Please {}.", "We want to {}.", "Task:\n{}"]).format(f"{verb} the {thing}"), f"{verb} {thing}"


def repeating(rng, words):
    """A conversation that only copies."""
    said = [" ".join(rng.choices(words, k=rng.randint(4, 24))) for _ in range(2)]
    return "Repeat what you read.", [(s, s) for s in said]


def play(env, name, item, rng, turns):
    """A random policy's episode -> (instructions, [(observation, reply, levels)]); levels: what it could have thought, and what it
    could have done then, {text: probability} each. Now and then it slips: that reply is most likely refused. It is no target (it
    counts as text that is read); what follows is."""
    read, turns_played = [env.reset(item)], []
    before = {"searchqa": "<think> {} </think>\n", "webarena": "{}\n"}.get(name, "Thought: {}\nAction: ")
    for turn in range(turns):
        policy = random_policy(env, name, read)
        if turn < turns - 1 and rng.random() < 0.04:
            thought = f"{rng.choice(COLOURS[:6])} {rng.choice(NOUNS[:4])}" if name == "babyai" else rng.choice(NOUNS)
            action, levels = SLIPS[name].format(thought), ()
        else:
            thought, action = draw(policy, rng)
            levels = {before.format(t): p for t, (p, _) in policy.items()}, policy[thought][1]
        reply = before.format(thought) + action
        turns_played.append((read[-1], reply, levels))
        step = env.step(reply if env.whole_reply else action)
        read.append(step.observation)
        if step.done:
            break
    return told_by(name, env), turns_played


SLIPS = {"babyai": "go to {} 1", "textcraft": "get 1 {}", "sciworld": "pick up {}", "searchqa": " {}", "webarena": "click {}"}


THING = re.compile(r"(?:(red|green|blue|purple|yellow|grey) )?(?:(?:open|closed|locked) )?(ball|box|key|door)")


def thing_of(name, text):
    """What an action, a mission or a goal is about: "red ball", "blue door", an item's name; None if about nothing."""
    if name == "babyai":
        found = THING.search(text)
        return found and " ".join(filter(None, found.groups()))
    found = re.search(r"(?:get|craft) (?:\d+ )?([a-z ()]+?)(?: using|\.|$)", text)
    return found and found.group(1)


def draw(policy, rng):
    """A random policy's thought and action."""
    thought = rng.choices(list(policy), [p for p, _ in policy.values()])[0]
    actions = policy[thought][1]
    return thought, rng.choices(list(actions), list(actions.values()))[0]


def random_policy(env, name, read):
    """The random policy: it names something that it has read (`read`: the observations so far), whichever, and takes a random one of
    the valid actions on it; in LOOK of its turns it names nothing, and takes one on nothing.
    BabyAI: any thing in the mission or in view; where there is no action on it, one on nothing. TextCraft: any thing in the
    commands; where it can neither craft nor get it, a valid action on what its own command asks for; where that has none, a
    random `get`. SearchQA: any name or year; it searches for it as often as it answers with it. SciWorld: any thing whose name it has read word for word; of the verbs as often one as another.
    -> {thought: (probability, {action: probability})}"""
    if name == "searchqa":
        spans = sorted(set(SPAN.findall(" ".join(read))))
        return {s: (1 / len(spans), {f"<{tag}> {s} </{tag}>": 0.5 for tag in ("search", "answer")}) for s in spans}
    if name == "webarena":
        return on_page(next(text for text in reversed(read) if text.startswith("OBSERVATION")))
    about = {}  # thing -> the actions on it
    actions = env.valid_actions()
    for action in actions if name != "sciworld" else ():
        about.setdefault(thing_of(name, action), []).append(action)
    rest, needs, gets, things = about.pop(None, None), {}, [], set()
    if name == "babyai":
        things = {*about, *(" ".join(filter(None, m)) for m in THING.findall(read[0].split("\n")[0]))}
    elif name == "textcraft":
        for made, used in re.findall(r"craft \d+ (.+) using (.+)", read[0]):
            needs.setdefault(made, []).extend(re.findall(r"\d+ ([^,]+)", used))
        things = {*needs, *(n for used in needs.values() for n in used)}
        gets = [a for acts in about.values() for a in acts if a.startswith("get")]
    else:
        rest, about = ["look around", "inventory"], science(actions, " ".join(read).lower())
        things = set(about)

    def on(thing):  # "ball" is a ball of any colour, "planks" are of any wood
        return about.get(thing) or [a for t, acts in about.items() for a in acts if t.endswith(f" {thing}")]

    look, found = LOOK[name] if things else 1, {}
    for thing in ("nothing", *sorted(things)):
        acts = rest if thing == "nothing" else about.get(thing) or [a for n in needs.get(thing, ()) for a in on(n)] or on(thing)
        acts, p = acts or gets or rest, look if thing == "nothing" else (1 - look) / len(things)
        verbs = Counter(a.split()[0] if name == "sciworld" else "" for a in acts)
        found[thing] = p, {}
        for a in acts:
            found[thing][1][a] = found[thing][1].get(a, 0) + 1 / len(verbs) / verbs[a.split()[0] if name == "sciworld" else ""]
    return found


ELEMENT = re.compile(r"\[(\d+)\] (\w+) ('(?:[^'\\]|\\.)*'|\"[^\"]*\")")


def on_page(page):
    """WebArena's random policy on one observation. It names any element that the window shows: a link, a button and the like it clicks, in a
    field it writes up to three words of the task; a text, which it names a quarter as often, it takes for the answer. In LOOK of its turns it
    names nothing, and stops without an answer, scrolls, goes back or says that it cannot be done."""
    elements = {}  # name -> number, role; of several with one name the first
    for number, role, name in ELEMENT.findall(page):
        if (name := name[1:-1].strip()) and role not in ("RootWebArea", "combobox") and "`" not in name and len(name) < 80:
            elements.setdefault(name, (number, role))
    words = re.search("OBJECTIVE: (.*)", page)[1].split()
    spans = sorted({" ".join(words[i:i + n]).strip('".,?') for n in (1, 2, 3) for i in range(len(words) - n + 1)})
    found = {}
    for name, (number, role) in elements.items():
        if role in ("textbox", "searchbox", "spinbutton"):
            found[name] = 1.0, {f"```type [{number}] [{span}] [{enter}]```": 0.5 / len(spans) for span in spans for enter in (0, 1)}
        elif role in ("link", "button", "option", "checkbox", "radio", "menuitem", "tab", "gridcell"):
            found[name] = 1.0, {f"```click [{number}]```": 0.95, f"```stop [{name}]```": 0.05}
        else:
            found[name] = 0.25, {f"```stop [{name}]```": 1.0}
    total = sum(p for p, _ in found.values())
    rest = {"```stop []```": 0.6, "```scroll [down]```": 0.2, "```go_back```": 0.1, "```stop [N/A]```": 0.1}
    return {name: ((1 - LOOK["webarena"]) * p / total, actions) for name, (p, actions) in found.items()} | {
        "nothing": (LOOK["webarena"] if found else 1, rest)}


NAME = f"(?:{'|'.join(sorted(almanac.WORDS, key=len, reverse=True))})\\b"  # and what is made of such names
SPAN = re.compile(rf"(?:The )?{NAME}(?: (?:of )?{NAME})*|\b1[789]\d\d\b")
PAIRS = re.compile(r"(?:connect|move|pour|dunk|use) (.+) (?:to|in|into|on) (.+)")


def science(actions, read):
    """SciWorld's valid actions on things whose names stand in `read`: {thing: actions}; of two things by the first."""
    names = {a.removeprefix("focus on ") for a in actions if a.startswith("focus on ")}  # anything can be focused on
    names = {n for n in names if re.search(rf"\b{re.escape(n)}\b", read)}
    about = {}
    for action in actions:
        pair = PAIRS.fullmatch(action)
        one = re.fullmatch(r"(?:go to|pick up|put down|focus on|look at|look in|\w+) (.+)", action)
        if pair and pair[1] in names and pair[2] in names:
            about.setdefault(pair[1], []).append(action)
        elif one and one[1] in names:
            about.setdefault(one[1], []).append(action)
    return about


# BabyAI's chosen so that the success, 0.25, is below the 0.29 of a policy uniform over the valid actions
LOOK = {"babyai": 0.65, "textcraft": 0.03, "sciworld": 0.2, "webarena": 0.45}


TEMPLATES = 76  # of WebArena's tasks
SINGLE_ROOM = [0, 1, 2, 3, 4, 8, 9, 10, 13, 18, 19, 29]  # the levels whose mission stays in one room: four fifths of BabyAI's share


def vocabulary():
    """Words to practise on: the names of TextCraft's items, everyday things, colours, numbers."""
    return sorted({name.replace("_", " ") for name in crafting_tree().items} | {*NOUNS, *COLOURS, *"123456789"})


def task(observation):
    """What is held out, as a first observation tells it: TextCraft's goal, in BabyAI all of it."""
    return observation.split("Goal:")[-1]


def conversations(count, seed, worlds=("babyai", "textcraft")):
    """`count` conversations as (first message, [(observation, reply, levels), ...]), a tenth of them exercises.
    Items: BabyAI's and TextCraft's from seeds of 100,000 on, which no item set uses, and none whose `task` is held out; SciWorld's are
    the package's training variations (those held out are of its test variations), SearchQA's of worlds 10 to 17, WebArena's of seeds 500 to 899."""
    rng, words = random.Random(seed), vocabulary()
    envs = {name: world(name) for name in worlds}
    held = {task(envs[name].reset(split_item(i)[1])) for name in worlds if name in ("babyai", "textcraft") for i in items(name, "test")}
    science = training_items(envs["sciworld"]) if "sciworld" in worlds else []

    def draw_item(name):
        if name == "babyai":
            level = rng.choice(SINGLE_ROOM) if rng.random() < 0.7 else rng.randrange(40)
            return level + 40 * (100_000 + rng.randrange(10**6))
        if name == "searchqa":
            return rng.randrange(10 * almanac.QUESTIONS, 18 * almanac.QUESTIONS)
        if name == "webarena":
            return TEMPLATES * 500 + rng.randrange(TEMPLATES * 400)  # no item set's: theirs have seeds below 100 and from 1000 on
        return 544 * 100_000 + rng.randrange(544 * 10**6) if name == "textcraft" else rng.choice(science)

    for _ in tqdm(range(count), desc="playing", leave=False):
        if rng.random() < 0.1:
            questions = [exercise(rng, words) for _ in range(rng.randint(2, 5))]
            yield rng.choice(["Answer the questions.", "Let us practise.", "Some questions for you."]), questions
            continue
        name = rng.choices(list(worlds), [SHARES[w][0] for w in worlds])[0]
        item = draw_item(name)
        while name in ("babyai", "textcraft") and task(envs[name].reset(item)) in held:
            item = draw_item(name)
        try:
            yield from [play(envs[name], name, item, rng, rng.choice(SHARES[name][1]))] * TIMES.get(name, 1)
        except EnvError as e:  # a browser or a JVM that died: the world makes itself anew
            tqdm.write(f"{name} {item}: {e}")
    for env in envs.values():
        env.close()


# world -> (share of the conversations, numbers of turns)
SHARES = {"babyai": (0.45, [1, 1, 1, 2, 2, 3, 4, 5, 6]), "textcraft": (0.45, [1, 2, 3, 4, 6, 8, 12]), "sciworld": (0.06, [1, 2, 3, 4, 6]),
          "searchqa": (0.25, [1, 1, 2, 2, 3, 4]), "webarena": (0.03, [1, 2, 3, 4, 6])}
TIMES = {"sciworld": 3, "webarena": 3}  # these take 30 to 100 times as long to play as the others': each is read three times as often


def training_items(env):
    """The items of the package's training variations, of all tasks."""
    from worlds.sciworld import ENDS, TASKS  # an extra, and Java: for those who want this world
    found = []
    for count, end in zip(TASKS.values(), ENDS):
        env.reset(end - count)
        found += [end - count + n for n in env.variations("train")]
    return found


def make_tokenizer(texts, vocab_size, added):
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
    tok.add_tokens([AddedToken(p, normalized=False) for p in added])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=TEMPLATE, model_max_length=8192)


def encode(chat, conversation):
    """-> ids [T] int16, reply mask [T] bool, targets [N, 3] float32: (position, token, probability) for the tokens of
    replies; the policy's own probabilities where it is known, else 1 for the token said."""
    first, turns = conversation
    ids, mask, targets = [], [], []
    tokens = lambda text: tuple(chat.tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    for i, (observation, reply, *levels) in enumerate(turns):
        new = chat.start(first, observation) if i == 0 else chat.turn(observation, closed=True)
        said, levels = (*tokens(reply), chat.end_id), levels[0] if levels else ({reply: 1.0},)
        ids += new
        mask += [False] * len(new) + [bool(levels)] * len(said)
        k = 0
        for level, options in enumerate(levels):  # first the thought, then the action after it
            end = (chat.end_id,) * (level == len(levels) - 1)
            fits = {(*tokens(text), *end): p for text, p in options.items()}
            begin = k
            while any(len(f) > k - begin for f in fits):
                total, following = sum(fits.values()), {}
                for f, p in fits.items():
                    following[f[k - begin]] = following.get(f[k - begin], 0) + p / total
                targets += [(len(ids) + k, t, p) for t, p in following.items()]
                fits = {f: p for f, p in fits.items() if f[k - begin] == said[k]}
                k += 1
        ids += said
    return np.array(ids, np.int16), np.array(mask), np.array(targets, np.float32).reshape(-1, 3)


def batches(data, tokens, rng):
    """Endless shuffled batches of similar length, about `tokens` tokens each, padded right."""
    while True:
        order = sorted(range(len(data)), key=lambda i: (len(data[i][0]) + rng.random() * 40))
        groups, group = [], []
        for i in order:
            if group and (len(group) + 1) * len(data[i][0]) > tokens:
                groups.append(group)
                group = []
            group.append(i)
        groups.append(group)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(data[i][0]) for i in group)
            ids, kind = torch.zeros(2, len(group), width, dtype=torch.long)  # kind: 0 padding, 1 context, 2 reply
            targets = []
            for row, i in enumerate(group):
                n = len(data[i][0])
                ids[row, :n] = torch.from_numpy(data[i][0].astype(np.int64))
                kind[row, :n] = torch.from_numpy(data[i][1] + 1)
                targets.append(data[i][2] + np.array([row * (width - 1) - 1, 0, 0], np.float32))
            yield ids, kind, torch.from_numpy(np.concatenate(targets))


@torch.no_grad()
def wire(model, offsets=(1, 2), strength=10.0, fast=5, out=0.05, write=4.0, alike=4.0, free=0.5):
    """Start the attention heads near what copying needs; training may change it.
    First layer, heads 0 and 1 look at the token one and two back, by the biases of query and key alone: under RoPE two
    constant vectors score by distance, highest (by `strength`) where their phases cancel. What they saw is written to the
    residual by a random matrix, which the keys of heads 0 and 1 of the later layers undo: there "what came after the last
    token like this one" (induction heads, arXiv 2209.11895). The last layer's others may look anywhere (small queries and
    keys); all the rest look at tokens like their own: query and key start alike (mimetic initialisation, arXiv 2305.09828).
    Induction heads and the last layer say what they see (their output undoes their values). Contents are compared on the
    slow rotations only. What else layers add to the residual starts small (`out`): a token is still itself later."""
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
                continue
            induction, last = number > 0 and head < len(offsets), number == config.num_hidden_layers - 1
            if induction or last:
                attention.o_proj.weight[:, rows] = attention.v_proj.weight[rows].T
            if last and not induction:
                attention.q_proj.weight[rows] *= free
                attention.k_proj.weight[rows] *= free
            else:
                query = key = torch.randn(size, width) / math.sqrt(width)
                if induction:
                    query, key = reads[head], writes[head].T / writes[head].norm() * math.sqrt(size)
                for proj, start in ((attention.q_proj, query), (attention.k_proj, key)):
                    proj.weight[rows] = torch.where(slow, alike * start, proj.weight[rows])


# (steps, learning rate, {source: share}, weight of what is not a reply); the last phase lasts until the time is over
PHASES = [(200, 2e-3, {"copies": 1}, 0.01),
          (10**9, 2e-3, {"copies": 1, "mixture": 8}, 0.1)]


def train(model, tokenizer, talks, args, rank, ranks):
    """Next-token prediction, phase by phase. In the last one the learning rate falls to 0. -> (steps, tokens)."""
    rng, words, chat = random.Random(args.seed + rank), vocabulary(), Chat(tokenizer)
    data = [encode(chat, t) for t in talks]
    held, data = data[:300], data[300:]
    copies = [encode(chat, repeating(rng, words)) for _ in range(10_000)]
    sources = {"copies": batches(copies, args.batch_tokens, rng), "mixture": batches(data, args.batch_tokens, rng)}
    tests = [encode(chat, repeating(rng, words)) for _ in range(60)]
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.05},
                                   {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))

    def loss_of(ids, kind, targets):
        """-> mean cross entropy (nats) of the replies' tokens to the policy's distribution, of the others to the text"""
        hidden = model.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)  # pads on the right reach nothing that counts
        kind, following = kind[:, 1:].flatten(), ids[:, 1:].flatten()
        replies = (kind == 2).nonzero().flatten()
        logprobs = model.lm_head(hidden[replies]).log_softmax(-1)
        place, token, p = torch.searchsorted(replies, targets[:, 0].long()), targets[:, 1].long(), targets[:, 2]
        some = (kind == 1).nonzero().flatten()[random.randrange(8)::8]  # of what it only reads an eighth is enough
        rest = torch.nn.functional.cross_entropy(model.lm_head(hidden[some]), following[some])
        return -(logprobs[place, token] * p).sum() / max(1, len(replies)), rest

    def right(talks):
        """Share of replies that are right, token by token, read with the right ones before them."""
        found = []
        for ids, mask, _ in talks:
            ids = torch.from_numpy(ids.astype(np.int64))[None]
            hit = (model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:])[0, torch.from_numpy(mask[1:])]
            ends = (ids[0, 1:][torch.from_numpy(mask[1:])] == chat.end_id).nonzero().flatten().tolist()
            found += [bool(hit[a:b].all()) for a, b in zip([0] + [e + 1 for e in ends], ends)]
        return round(sum(found) / len(found), 2)

    begin, seen, last, bar = time.process_time(), 0, None, tqdm(total=100, desc="training", unit="%", disable=rank > 0)
    for step in range(10**9):
        clock = torch.tensor([time.process_time() - begin])  # of the processor: what else runs on the machine costs no quality
        if ranks > 1:
            dist.broadcast(clock, 0)  # every rank stops at the same step
        done = min(1.0, clock.item() / 60 / args.minutes)
        phase = next(i for i in range(len(PHASES)) if step < sum(p[0] for p in PHASES[:i + 1]))
        _, lr, shares, rest_weight = PHASES[phase]
        if phase == len(PHASES) - 1:
            last = done if last is None else last
            lr *= min(1, (1 - done) / max(1e-9, 1 - last) / 0.7)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 40)
        batch = next(sources[rng.choices(list(shares), list(shares.values()))[0]])
        said, rest = loss_of(*batch)
        (said + rest_weight * rest).backward()
        seen += ranks * int((batch[1] > 0).sum())
        if ranks > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.grad = g.view_as(p) / ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 500 == 499 or done >= 1):
            with torch.no_grad():
                pairs = [loss_of(*b) for b, _ in zip(batches(held, 4096, random.Random(0)), range(10))]
                said, rest = (sum(x) / len(x) for x in zip(*pairs))
            tqdm.write(f"step {step + 1}  phase {phase + 1}  {seen / 1e6:.1f}M tokens  {clock.item() / 60:.1f} min  held-out loss: "
                       f"replies {said:.4f}, rest {rest:.4f}  copied {right(tests)}")
            model.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            bar.update(int(100 * done) - bar.n)
        if done >= 1:
            return step + 1, seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write (what ships is in data/tiny)")
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=["babyai", "textcraft", "sciworld", "searchqa", "webarena"],
                        help="separated by commas; default: all (the last three need their extras)")
    parser.add_argument("--minutes", type=float, default=50, help="processor time for the training")
    parser.add_argument("--conversations", type=int, default=26_000, help="played by each process")
    parser.add_argument("--batch_tokens", type=int, default=1024, help="a step, in each process")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    talks = list(conversations(args.conversations, args.seed + rank, args.worlds))
    if rank == 0:
        texts = [text for first, turns in talks[:8000] for text in (first, *(x for turn in turns for x in turn[:2]))]
        named = {m[1] for first, turns in talks if "science" in first for _, reply, *_ in turns
                 if (m := re.match("Thought: (.+)\n", reply))}
        make_tokenizer(texts, 1200 + 300 * ("sciworld" in args.worlds) + 200 * ("searchqa" in args.worlds)
                       + 250 * ("webarena" in args.worlds), phrases(args.worlds, named)).save_pretrained(args.out)
    if ranks > 1:
        dist.barrier()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, intermediate_size=3 * args.hidden,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
        initializer_range=1 / math.sqrt(args.hidden),
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    wire(model)
    if rank == 0:
        print(f"{len(tokenizer)} tokens in the vocabulary, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    steps, tokens = train(model, tokenizer, talks, args, rank, ranks)
    if rank == 0:
        recipe = {k: v for k, v in vars(args).items() if k != "out"} | {"processes": ranks, "steps": steps, "tokens": tokens}
        (Path(args.out) / "recipe.json").write_text(json.dumps(recipe, indent=1))


if __name__ == "__main__":
    main()
