"""Make the tiny base model from nothing, in an hour on two cores:

    torchrun --nproc_per_node=2 data/make_tiny.py --out FOLDER

A causal LM of Qwen2's architecture, its tokenizer and its chat template, as ordinary Hugging Face
files. It is a *base* model: it speaks the worlds' interface and knows nothing of their tasks. It is
trained by next-token prediction on
  - transcripts of a random policy (`random_policy`). The policy names any one of the things that it
    has read and takes a random valid action on it: no solver, nothing filtered by success. Its
    probabilities are known, so they are the targets;
  - general language exercises (repeat, recall, shorten), in no world's format and with no task's
    solution: what any pretrained model can do.

What makes copying and comparing emerge at this size, as measured: initial weights of
standard deviation 1/sqrt(d) instead of 0.02; heads that start near what copying needs (`wire`);
repeating alone first, and kept in the mixture; a small weight on tokens that the model only reads;
many small steps; and replies that name a thing before they act on it, so that the question whether
the thing is there is asked of the last token, not of one far back.

Training ends by processor time, so two makings are alike, not equal bit for bit.
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
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tokenizers import (
    AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers,
)
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from agent import FIRST_REPLY, Chat, assistant, instructions, user  # noqa: E402
from config import presets  # noqa: E402
from envs import EnvError, env_options, items, make_env, split_item  # noqa: E402
from worlds import almanac  # noqa: E402
from worlds.textcraft import crafting_tree  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# ---- Texts that are one token each ----

# Texts that never vary, of BabyAI and TextCraft. The name of a thing is one token, too (" red
# ball", TextCraft's " oak planks"), and the same in a mission, a list and a reply, so that naming
# it again means copying one token. (But " red door" in a mission is " red closed door" in a list.)
PHRASES = [
    "user\n", "assistant\n",
    "In front of you in this room, you can see several objects: There is a",
    "In front of you in this room, you can see several objects:", "  There is a",
    " steps in front of you and", " steps to your left.", " steps to your right.",
    " right in front of you", " steps away.",
    "  The room has walls around you. You are facing a wall",
    "  The room has walls around you. You are facing a box", "  The room has walls around you.",
    " The room has walls around you. You are facing a wall", " The room has walls around you.",
    " You are carrying a", ' You are not carrying anything.\nAvailable actions: ["',
    '\nAvailable actions: ["', '", "', '", "check available actions"]', "turn left", "turn right",
    "move forward", "check available actions", "go to", "pickup", "pick up", "open",
    "toggle and go through", "go through", "Your goal: ",
    "The action is not recognized. Please check valid actions.",
    "You can take the following actions:", "\n The task is completed.", "Crafting commands:",
    "\n\nGoal: craft", "Could not find enough items to craft", "Could not find",
    "Could not execute", "Inventory:", "Thought:", "\nAction: ", " nothing",
]
PHRASES += [f" {n}" for n in range(10)]

SEARCH = [
    "Question:", "<think>", " </think>\n", "<search>", "<answer>", " </", "search>", "answer>",
    "<information>Doc", "</information>", "\nDoc", "(Title:",
]

WEB = [
    "OBSERVATION:\n", " (current): ", "RootWebArea", "\n\t", "\n\t\t", "\n\t\t\t", " link '",
    " button '", " heading '", " textbox '", " StaticText '", " searchbox '", "\nURL: http://",
    "\nOBJECTIVE:", "\nPREVIOUS ACTION:", ".localhost:", "```click", "```type", "```stop",
    "```scroll", "```go_back```", "required: False", "focused: True", "nothing\n",
]
WEB += [f"[{n}]" for n in range(1, 60)]  # the numbers of a page's elements

SCIENCE = [
    "This room is called the", " In it, you see: \n\tthe agent\n\ta substance called air\n",
    "You also see:\n", "\tA door to the", " (that is closed)", " (that is open)",
    " (containing nothing)", ", which is turned off", " door is closed.", " is: nothing.",
    "\ta substance called", "No known action matches that input.", "The door is now open.",
    "You move to the", "Your task is to", "In your inventory, you see:", "look around", "look at",
    "look in", "go to", "pick up", "put down", "focus on",
]

COLOURS = "red green blue purple yellow grey white black orange pink brown".split()


def phrases(worlds, named):
    """All texts that are one token each.

    PHRASES and those of the worlds, the sentences of the instructions, and the worlds' names for
    things.

    Args:
        worlds: names of worlds.
        named: the names that SciWorld's policy used in its transcripts.
    """
    found = list(PHRASES)
    for name in worlds:
        found += re.findall(r"\S[^.:\n]+[.:]", full_instructions(name, world(name)))
    for colour in COLOURS[:6]:  # BabyAI's
        for kind in ("ball", "box", "key", "door", "open door", "closed door", "locked door"):
            found.append(f" {colour} {kind}")
    crafted = crafting_tree().items
    found += sorted({" " + name.replace("_", " ") for name in crafted if "_" in name})
    if "searchqa" in worlds:
        found += SEARCH + [f" {word}" for word in almanac.WORDS]
    if "webarena" in worlds:
        found += WEB
    if "sciworld" in worlds:
        found += SCIENCE + sorted({" " + name for name in named if " " in name})
    return found


# ---- The worlds as the tiny model plays them ----

# The action format of a world; that of the others is react.
FORM = {"searchqa": "tags", "webarena": "plain"}

# How a reply names a thing before it acts on it; other worlds use react's form.
THOUGHTS = {"searchqa": "<think> {} </think>\n", "webarena": "{}\n"}
REACT_THOUGHT = "Thought: {}\nAction: "

# An action that is most likely refused, on a thing that may not be there.
SLIPS = {
    "babyai": "go to {} 1", "textcraft": "get 1 {}", "sciworld": "pick up {}", "searchqa": " {}",
    "webarena": "click {}",
}


def world(name):
    """The world as the tiny model plays it."""
    options = env_options(presets("tiny", name).get("env_args", ""), [name])
    return make_env(name, **options.get(name, {}))


def full_instructions(name, env):
    """A world's instructions, and the action format where they do not give it themselves."""
    return instructions(env.prompt, FORM.get(name, "react"))


# ---- Language exercises ----

NOUNS = """ball box key door cup hat pen lamp stone chair table book shoe coat leaf ring bell boat
bird fish horse cow pig sheep dog cat tree flower apple pear plum nut egg bread cake cheese rope
nail knife spoon plate bowl jar brush wheel flag kite drum coin map letter stamp clock mirror glove
scarf boot button candle basket ladder shovel bucket""".split()
NAMES = """Anna Bob Carla David Emma Frank Greta Hugo Ida Jack Karin Leo Mia Noah Olga Paul Rosa
Sam Tina Uwe""".split()
VERBS = "wash lift paint sell hide clean bring throw wrap weigh draw count fold lend".split()


def vocabulary():
    """Words to practise on: names of TextCraft's items, everyday things, colours, digits."""
    names = {name.replace("_", " ") for name in crafting_tree().items}
    return sorted(names | {*NOUNS, *COLOURS, *"123456789"})


def exercise(rng, words):
    """One question about a short text -> (question, answer)."""
    if rng.random() < 0.6:
        thing = f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}"
    else:
        thing = rng.choice(words)
    verb = rng.choice(VERBS)
    kind = rng.randrange(3)
    if kind == 0:  # repeat
        said = " ".join(rng.choices(words, k=rng.randint(2, 8)))
        return f"Repeat:\n{said}", said
    if kind == 1:  # recall who wants what
        wants = {}
        for name in rng.sample(NAMES, rng.randint(2, 7)):
            number = rng.randint(1, 9)
            wants[name] = f"{number} {' '.join(rng.choices(words, k=rng.randint(1, 3)))}"
        who = rng.choice(list(wants))
        text = "\n".join(f"{name} wants\n{wanted}" for name, wanted in wants.items())
        return f"{text}\n\nWhat does {who} want?", wants[who]
    # Shorten.
    form = rng.choice(["Please {}.", "We want to {}.", "Task:\n{}"])
    return form.format(f"{verb} the {thing}"), f"{verb} {thing}"


def repeating(rng, words):
    """A conversation that only copies -> (first message, [(text, same text), ...])."""
    said = [" ".join(rng.choices(words, k=rng.randint(4, 24))) for _ in range(2)]
    return "Repeat what you read.", [(s, s) for s in said]


# ---- The random policy ----
#
# A policy is {thought: (probability, {action: probability})}. The thought is the name of a thing,
# or "nothing".

# Probability of the thought "nothing". BabyAI's is chosen so that the success, 0.25, is below the
# 0.29 of a policy that is uniform over the valid actions.
LOOK = {"babyai": 0.65, "textcraft": 0.03, "sciworld": 0.2, "webarena": 0.45}

THING = re.compile(
    r"(?:(red|green|blue|purple|yellow|grey) )?(?:(?:open|closed|locked) )?(ball|box|key|door)"
)


def draw(policy, rng):
    """A random policy's thought and action."""
    thought = rng.choices(list(policy), [p for p, _ in policy.values()])[0]
    actions = policy[thought][1]
    return thought, rng.choices(list(actions), list(actions.values()))[0]


def random_policy(env, name, read):
    """The random policy of a world, given what it has read.

    It names any one of the things that it has read, each with the same probability, and takes a
    random one of the valid actions on it. With probability LOOK it names nothing, and takes an
    action on nothing.

    BabyAI: things in the mission or in view. Where no action is on the thing, an action on nothing.
    TextCraft: things in the crafting commands. Where it can neither craft nor get the thing, a
        valid action on what the thing's own command needs; where there is none, a random `get`.
    SearchQA: names and years. It searches for one as often as it answers with it.
    SciWorld: things whose names it has read word for word. Each verb is equally likely.
    WebArena: see `on_page`.

    Args:
        env: the world, in the state that the policy acts in.
        name: the world's name.
        read: the observations so far, the newest last.
    """
    if name == "searchqa":
        return search_policy(read)
    if name == "webarena":
        return on_page(next(text for text in reversed(read) if text.startswith("OBSERVATION")))
    actions = env.valid_actions()
    if name == "sciworld":
        choices = {"nothing": ["look around", "inventory"]}
        about = science(actions, " ".join(read).lower())
        choices |= {thing: about[thing] for thing in sorted(about)}
        return mixture(LOOK[name], choices, first_word)
    about = {}  # thing -> the actions on it; None: actions on nothing
    for action in actions:
        about.setdefault(thing_of(name, action), []).append(action)
    if name == "babyai":
        choices = babyai_choices(about, read[0])
    else:
        choices = textcraft_choices(about, read[0])
    return mixture(LOOK[name], choices, lambda action: "")


def mixture(look, choices, kind_of):
    """The policy that thinks of "nothing" with probability `look`, and of all things equally often.

    Args:
        choices: {thought: the actions to choose from}.
        kind_of: action -> its kind. All kinds are equally likely, and all actions of a kind.
    """
    things = len(choices) - 1
    if not things:
        look = 1
    policy = {}
    for thought, actions in choices.items():
        p = look if thought == "nothing" else (1 - look) / things
        kinds = Counter(kind_of(action) for action in actions)
        chances = {}
        for action in actions:
            chance = 1 / len(kinds) / kinds[kind_of(action)]
            chances[action] = chances.get(action, 0) + chance
        policy[thought] = p, chances
    return policy


def first_word(action):
    return action.split()[0]


def thing_of(name, text):
    """What an action, a mission or a goal is about: "red ball", "blue door", an item's name.

    None if it is about nothing.
    """
    if name == "babyai":
        found = THING.search(text)
        return found and " ".join(filter(None, found.groups()))
    found = re.search(r"(?:get|craft) (?:\d+ )?([a-z ()]+?)(?: using|\.|$)", text)
    return found and found.group(1)


def actions_on(about, thing):
    """The actions on a thing. "ball" is a ball of any colour, "planks" are of any wood."""
    if thing in about:
        return about[thing]
    kinds = [actions for name, actions in about.items() if name.endswith(f" {thing}")]
    return [action for actions in kinds for action in actions]


def babyai_choices(about, first):
    """Thought -> actions to choose from, given the first observation, which begins with the
    mission."""
    rest = about.pop(None, [])
    mission = first.split("\n")[0]
    named = [" ".join(filter(None, words)) for words in THING.findall(mission)]
    choices = {"nothing": rest}
    for thing in sorted({*about, *named}):
        choices[thing] = actions_on(about, thing) or rest
    return choices


def textcraft_choices(about, first):
    """Thought -> actions to choose from, given the first observation, which holds the crafting
    commands."""
    rest = about.pop(None, [])
    needs = {}  # item -> what its commands need
    for made, used in re.findall(r"craft \d+ (.+) using (.+)", first):
        needs.setdefault(made, []).extend(re.findall(r"\d+ ([^,]+)", used))
    gets = [a for actions in about.values() for a in actions if a.startswith("get")]
    choices = {"nothing": rest or gets}
    for thing in sorted({*needs, *(used for all_used in needs.values() for used in all_used)}):
        ingredients = needs.get(thing, ())
        choices[thing] = (
            about.get(thing)
            or [action for used in ingredients for action in actions_on(about, used)]
            or actions_on(about, thing)
            or gets
            or rest
        )
    return choices


# SearchQA's names, and what is made of several of them, and years.
NAME = f"(?:{'|'.join(sorted(almanac.WORDS, key=len, reverse=True))})\\b"
SPAN = re.compile(rf"(?:The )?{NAME}(?: (?:of )?{NAME})*|\b1[789]\d\d\b")


def search_policy(read):
    """SearchQA's random policy."""
    spans = sorted(set(SPAN.findall(" ".join(read))))
    policy = {}
    for span in spans:
        actions = {f"<{tag}> {span} </{tag}>": 0.5 for tag in ("search", "answer")}
        policy[span] = 1 / len(spans), actions
    return policy


PAIRS = re.compile(r"(?:connect|move|pour|dunk|use) (.+) (?:to|in|into|on) (.+)")
SINGLES = re.compile(r"(?:go to|pick up|put down|focus on|look at|look in|\w+) (.+)")


def science(actions, read):
    """SciWorld's valid actions on things whose names stand in the text `read` -> {thing: actions}.

    An action on two things counts for the first of them.
    """
    focus = "focus on "  # every thing can be focused on, so these actions list all names
    names = {a.removeprefix(focus) for a in actions if a.startswith(focus)}
    names = {name for name in names if re.search(rf"\b{re.escape(name)}\b", read)}
    about = {}
    for action in actions:
        pair = PAIRS.fullmatch(action)
        single = SINGLES.fullmatch(action)
        if pair and pair[1] in names and pair[2] in names:
            about.setdefault(pair[1], []).append(action)
        elif single and single[1] in names:
            about.setdefault(single[1], []).append(action)
    return about


# An element of a page: [number] role 'name'.
ELEMENT = re.compile(r"\[(\d+)\] (\w+) ('(?:[^'\\]|\\.)*'|\"[^\"]*\")")
FIELDS = ("textbox", "searchbox", "spinbutton")
CLICKABLE = ("link", "button", "option", "checkbox", "radio", "menuitem", "tab", "gridcell")


def on_page(page):
    """WebArena's random policy on one observation.

    It names any element that the window shows. It clicks links, buttons and the like, and writes up
    to three words of the task into a field. A text is named a quarter as often, and given as the
    answer. With probability LOOK it names nothing, and stops without an answer, scrolls, goes back,
    or says that the task cannot be done.
    """
    elements = {}  # name -> (number, role); the first one of several with the same name
    for number, role, quoted in ELEMENT.findall(page):
        name = quoted[1:-1].strip()
        is_short = 0 < len(name) < 80
        if is_short and role not in ("RootWebArea", "combobox") and "`" not in name:
            elements.setdefault(name, (number, role))

    words = re.search("OBJECTIVE: (.*)", page)[1].split()
    spans = {" ".join(words[i : i + n]).strip('".,?')  # up to three words of the task
             for n in (1, 2, 3) for i in range(len(words) - n + 1)}

    weights = {}
    actions = {}
    for name, (number, role) in elements.items():
        weights[name] = 1.0
        if role in FIELDS:
            actions[name] = {}
            for span in sorted(spans):
                for enter in (0, 1):
                    actions[name][f"```type [{number}] [{span}] [{enter}]```"] = 0.5 / len(spans)
        elif role in CLICKABLE:
            actions[name] = {f"```click [{number}]```": 0.95, f"```stop [{name}]```": 0.05}
        else:
            weights[name] = 0.25
            actions[name] = {f"```stop [{name}]```": 1.0}

    look = LOOK["webarena"] if elements else 1
    total = sum(weights.values())
    policy = {name: ((1 - look) * weights[name] / total, actions[name]) for name in elements}
    policy["nothing"] = look, {
        "```stop []```": 0.6, "```scroll [down]```": 0.2, "```go_back```": 0.1,
        "```stop [N/A]```": 0.1,
    }
    return policy


# ---- Conversations ----

# World -> (share of the conversations, numbers of turns to choose from).
SHARES = {
    "babyai": (0.45, [1, 1, 1, 2, 2, 3, 4, 5, 6]), "textcraft": (0.45, [1, 2, 3, 4, 6, 8, 12]),
    "sciworld": (0.06, [1, 2, 3, 4, 6]), "searchqa": (0.25, [1, 1, 2, 2, 3, 4]),
    "webarena": (0.03, [1, 2, 3, 4, 6]),
}
# How often each conversation of a world is used, where not once. These two worlds take 30 to 100
# times as long to play as the others.
TIMES = {"sciworld": 3, "webarena": 3}

TEMPLATES = 76  # of WebArena's tasks
# BabyAI's levels whose mission stays in one room: four fifths of its share.
SINGLE_ROOM = [0, 1, 2, 3, 4, 8, 9, 10, 13, 18, 19, 29]


def play(env, name, item, rng, turns):
    """An episode of the random policy -> (instructions, [(observation, reply, levels), ...]).

    `levels` are two dicts {text: probability}: what the policy could have thought, and what it
    could have done then. Now and then the policy slips: that reply is most likely refused. A slip
    has no levels, which makes it no target but a text that is only read. What follows it is a
    target again.
    """
    read = [env.reset(item)]
    form = THOUGHTS.get(name, REACT_THOUGHT)
    turns_played = []
    for turn in range(turns):
        policy = random_policy(env, name, read)
        if turn < turns - 1 and rng.random() < 0.04:
            if name == "babyai":
                thought = f"{rng.choice(COLOURS[:6])} {rng.choice(NOUNS[:4])}"
            else:
                thought = rng.choice(NOUNS)
            action = SLIPS[name].format(thought)
            levels = ()
        else:
            thought, action = draw(policy, rng)
            thoughts = {form.format(t): p for t, (p, _) in policy.items()}
            levels = thoughts, policy[thought][1]
        reply = form.format(thought) + action
        turns_played.append((read[-1], reply, levels))
        step = env.step(reply if env.whole_reply else action)
        read.append(step.observation)
        if step.done:
            break
    return full_instructions(name, env), turns_played


def task(observation):
    """What is held out, read from a first observation: in TextCraft the goal, in BabyAI all."""
    return observation.split("Goal:")[-1]


def training_items(env):
    """SciWorld's items of the package's training variations, of all tasks."""
    from worlds.sciworld import ENDS, TASKS  # an extra, and Java

    found = []
    for count, end in zip(TASKS.values(), ENDS):
        env.reset(end - count)
        found += [end - count + n for n in env.variations("train")]
    return found


def random_item(name, rng, sciworld_items):
    """A random item that may be trained on.

    BabyAI's and TextCraft's have seeds from 100,000 on, which no item set uses. SciWorld's are the
    package's training variations (the held-out ones are its test variations). SearchQA's are of
    worlds 10 to 17. WebArena's have seeds 500 to 899; those of the item sets are below 100 and from
    1000 on.
    """
    if name == "babyai":
        level = rng.choice(SINGLE_ROOM) if rng.random() < 0.7 else rng.randrange(40)
        return level + 40 * (100_000 + rng.randrange(10**6))
    if name == "textcraft":
        return 544 * 100_000 + rng.randrange(544 * 10**6)
    if name == "searchqa":
        return rng.randrange(10 * almanac.QUESTIONS, 18 * almanac.QUESTIONS)
    if name == "webarena":
        return TEMPLATES * 500 + rng.randrange(TEMPLATES * 400)
    return rng.choice(sciworld_items)


def conversations(count, seed, worlds=("babyai", "textcraft")):
    """Yield `count` conversations (first message, [(observation, reply, levels), ...]).

    A tenth of them are exercises, whose turns have no levels. The others are the random policy's,
    on items as `random_item` draws them, none of them with a held-out `task`. The conversations of
    worlds in TIMES are yielded several times and count once.
    """
    rng = random.Random(seed)
    words = vocabulary()
    envs = {name: world(name) for name in worlds}
    with_held_out_tasks = [name for name in worlds if name in ("babyai", "textcraft")]
    held_out = set()
    for name in with_held_out_tasks:
        for item in items(name, "test"):
            held_out.add(task(envs[name].reset(split_item(item)[1])))
    sciworld_items = training_items(envs["sciworld"]) if "sciworld" in worlds else []

    for _ in tqdm(range(count), desc="playing", leave=False):
        if rng.random() < 0.1:
            questions = [exercise(rng, words) for _ in range(rng.randint(2, 5))]
            openings = ["Answer the questions.", "Let us practise.", "Some questions for you."]
            yield rng.choice(openings), questions
            continue
        name = rng.choices(list(worlds), [SHARES[w][0] for w in worlds])[0]
        item = random_item(name, rng, sciworld_items)
        while name in with_held_out_tasks and task(envs[name].reset(item)) in held_out:
            item = random_item(name, rng, sciworld_items)
        try:
            conversation = play(envs[name], name, item, rng, rng.choice(SHARES[name][1]))
        except EnvError as e:  # a browser or a JVM died; the world starts a new one
            tqdm.write(f"{name} {item}: {e}")
            continue
        for _ in range(TIMES.get(name, 1)):
            yield conversation
    for env in envs.values():
        env.close()


# ---- The tokenizer, and tokens as training data ----

# Qwen2's own pattern (words with the space before them, single digits): loaders choose it by the
# model's type.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(texts, vocab_size, added):
    """A byte-level BPE tokenizer, trained on `texts`, with the texts `added` as one token each."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(texts, trainer)
    tok.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE, model_max_length=8192,
    )


def encode(chat, conversation):
    """The tokens of a conversation and their targets.

    -> ids [T] int16; reply mask [T] bool; targets [N, 3] float32, each a (position, token,
    probability) of a reply. Where the policy is known, the probabilities are the policy's own; else
    the token that was said has probability 1. Replies with no levels (slips) are masked out.
    """
    first, turns = conversation
    ids = []
    mask = []
    targets = []

    def tokens(text):
        return tuple(chat.tokenizer.encode(text, add_special_tokens=False))

    for i, (observation, reply, *known) in enumerate(turns):
        levels = known[0] if known else ({reply: 1.0},)
        if i == 0:
            new = chat.prompt([user(first), assistant(FIRST_REPLY), user(observation)])
        else:
            new = chat.turns([user(observation)], closed=True)
        said = (*tokens(reply), chat.end_id)
        ids += new
        mask += [False] * len(new) + [bool(levels)] * len(said)
        options = [{tokens(text): p for text, p in level.items()} for level in levels]
        if options:  # the turn ends after the last level's text
            options[-1] = {(*text, chat.end_id): p for text, p in options[-1].items()}
        for offset, token, p in token_probabilities(said, options):
            targets.append((len(ids) + offset, token, p))
        ids += said
    targets = np.array(targets, np.float32).reshape(-1, 3)
    return np.array(ids, np.int16), np.array(mask), targets


def token_probabilities(said, levels):
    """The policy's distribution of each token of a reply, given the tokens before it.

    Args:
        said: the tokens of the reply.
        levels: for each part of the reply, the thought and the action after it, what could have
            been said: {tokens: probability}.

    -> [(offset in the reply, token, probability), ...]
    """
    found = []
    offset = 0
    for options in levels:
        begin = offset
        fits = options  # those that agree with what was said so far
        while any(len(text) > offset - begin for text in fits):
            total = sum(fits.values())
            following = {}  # next token -> probability
            for text, p in fits.items():
                token = text[offset - begin]
                following[token] = following.get(token, 0) + p / total
            found += [(offset, token, p) for token, p in following.items()]
            fits = {text: p for text, p in fits.items() if text[offset - begin] == said[offset]}
            offset += 1
    return found


def batches(data, tokens, rng):
    """Endless shuffled batches of similar length, about `tokens` tokens each, padded right.

    Yields ids [B, T] int64; kinds [B, T] int64 (0 padding, 1 read, 2 reply); targets [N, 3]
    float32. The positions of the targets count in the flattened [B, T - 1] predictions.
    """
    while True:
        # Noise in the lengths mixes the groups anew each time.
        order = sorted(range(len(data)), key=lambda i: len(data[i][0]) + rng.random() * 40)
        groups = []
        group = []
        for i in order:
            if group and (len(group) + 1) * len(data[i][0]) > tokens:
                groups.append(group)
                group = []
            group.append(i)
        groups.append(group)
        rng.shuffle(groups)
        for group in groups:
            yield collate([data[i] for i in group])


def collate(group):
    """Encoded conversations -> ids, kinds, targets, as `batches` yields them."""
    ids, masks, targets = zip(*group)
    batch_ids = pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in ids], True)
    batch_kinds = pad_sequence([torch.from_numpy(mask + 1) for mask in masks], True)
    width = batch_ids.shape[1]
    # A token is predicted at the position before it.
    shifted = [rows + np.array([n * (width - 1) - 1, 0, 0], np.float32)
               for n, rows in enumerate(targets)]
    return batch_ids, batch_kinds, torch.from_numpy(np.concatenate(shifted))


# ---- The model ----


def make_model(tokenizer, args):
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        intermediate_size=3 * args.hidden,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=1 / math.sqrt(args.hidden),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    wire(model)
    return model


@torch.no_grad()
def wire(model, offsets=(1, 2), strength=10.0, fast=5, out=0.05, write=4.0, alike=4.0, free=0.5):
    """Start the attention heads near what copying needs. Training may change all of it.

    First layer, heads 0 and 1: they look at the token one and two back, by the biases of query and
    key alone. Under RoPE two constant vectors score by distance, and score highest (by `strength`)
    where their phases cancel. A random matrix writes what these heads saw into the residual stream.

    Later layers, heads 0 and 1: their keys undo that matrix. They find what came after the last
    token like this one (induction heads, arXiv 2209.11895).

    Last layer, other heads: they may look anywhere (small queries and keys).

    All other heads look at tokens like their own: query and key start equal (mimetic
    initialisation, arXiv 2305.09828).

    The outputs of the induction heads and of the last layer undo their values, so these heads say
    what they see. Contents are compared on the slow rotations only. Everything else that layers add
    to the residual stream starts small (`out`), so that a token is still itself in later layers.
    """
    config = model.config
    width = config.hidden_size
    size = width // config.num_attention_heads
    half = size // 2
    rotations = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # rad a token
    slow = (rotations < 0.05).repeat(2)[:, None]
    bias = math.sqrt(strength * math.sqrt(size))
    reads = []  # the value matrices of the first layer's heads 0 and 1
    writes = []  # their output matrices
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight *= out
        layer.mlp.down_proj.weight *= out
        for head in range(config.num_attention_heads):
            rows = slice(head * size, (head + 1) * size)
            is_first_two = head < len(offsets)

            # Heads that look a fixed number of tokens back.
            if number == 0 and is_first_two:
                phase = offsets[head] * rotations[:fast]
                attention.k_proj.bias[rows][:fast] = bias
                attention.q_proj.bias[rows][:fast] = bias * torch.cos(phase)
                attention.q_proj.bias[rows][half : half + fast] = -bias * torch.sin(phase)
                attention.o_proj.weight[:, rows] *= write
                reads.append(attention.v_proj.weight[rows].clone())
                writes.append(attention.o_proj.weight[:, rows].clone())
                continue

            # Heads that say what they see.
            is_induction = number > 0 and is_first_two
            is_last = number == config.num_hidden_layers - 1
            if is_induction or is_last:
                attention.o_proj.weight[:, rows] = attention.v_proj.weight[rows].T

            # Where the other heads look.
            if is_last and not is_induction:
                attention.q_proj.weight[rows] *= free
                attention.k_proj.weight[rows] *= free
                continue
            if is_induction:
                query = reads[head]
                key = writes[head].T / writes[head].norm() * math.sqrt(size)
            else:
                query = key = torch.randn(size, width) / math.sqrt(width)
            for proj, start in ((attention.q_proj, query), (attention.k_proj, key)):
                proj.weight[rows] = torch.where(slow, alike * start, proj.weight[rows])


# ---- Training ----

# (steps, learning rate, {source: share}, weight of tokens that are not replies). The second phase
# lasts until the time is over.
PHASES = [(200, 2e-3, {"copies": 1}, 0.01), (10**9, 2e-3, {"copies": 1, "mixture": 8}, 0.1)]


def train(model, tokenizer, talks, args, rank, ranks):
    """Next-token prediction, phase by phase. In the last phase the learning rate falls to 0.

    -> (steps, tokens)
    """
    # Data.
    rng = random.Random(args.seed + rank)
    words = vocabulary()
    chat = Chat(tokenizer)
    data = [encode(chat, talk) for talk in talks]
    held_out = data[:300]
    data = data[300:]
    copies = [encode(chat, repeating(rng, words)) for _ in range(10_000)]
    sources = {
        "copies": batches(copies, args.batch_tokens, rng),
        "mixture": batches(data, args.batch_tokens, rng),
    }
    tests = [encode(chat, repeating(rng, words)) for _ in range(60)]

    optimizer = make_optimizer(model)
    begin = time.process_time()
    seen = 0  # tokens, of all ranks
    last_phase_begin = None  # as a share of the time
    bar = tqdm(total=100, desc="training", unit="%", disable=rank > 0)
    for step in range(10**9):
        # Processor time: what else runs on the machine costs no quality.
        clock = torch.tensor([time.process_time() - begin])
        if ranks > 1:
            dist.broadcast(clock, 0)  # every rank stops at the same step
        done = min(1.0, clock.item() / 60 / args.minutes)

        # The phase and its learning rate.
        phase = int(step >= PHASES[0][0])
        _, lr, shares, read_weight = PHASES[phase]
        if phase == len(PHASES) - 1:
            if last_phase_begin is None:
                last_phase_begin = done
            lr *= min(1, (1 - done) / max(1e-9, 1 - last_phase_begin) / 0.7)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 40)

        # One step.
        source = rng.choices(list(shares), list(shares.values()))[0]
        batch = next(sources[source])
        reply_loss, read_loss = losses(model, *batch)
        (reply_loss + read_weight * read_loss).backward()
        seen += ranks * int((batch[1] > 0).sum())
        if ranks > 1:
            average_gradients(model, ranks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # Report and save.
        if rank == 0 and (step % 500 == 499 or done >= 1):
            reply_loss, read_loss = held_out_losses(model, held_out)
            tqdm.write(
                f"step {step + 1}  phase {phase + 1}  {seen / 1e6:.1f}M tokens  "
                f"{clock.item() / 60:.1f} min  held-out loss: replies {reply_loss:.4f}, "
                f"rest {read_loss:.4f}  copied {share_right(model, tests, chat.end_id)}"
            )
            model.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            bar.update(int(100 * done) - bar.n)
        if done >= 1:
            return step + 1, seen


def make_optimizer(model):
    """AdamW, with weight decay on matrices only."""
    groups = [{"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
              for ndim, decay in ((2, 0.05), (1, 0.0))]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def losses(model, ids, kinds, targets):
    """Mean cross entropies (nats) of a batch -> (of replies, of what is only read).

    Replies are compared with the policy's distribution, other tokens with the text itself. Of the
    latter a random eighth is used.
    """
    # Padding stands on the right, so it reaches no token that counts.
    hidden = model.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)
    kinds = kinds[:, 1:].flatten()
    following = ids[:, 1:].flatten()

    replies = (kinds == 2).nonzero().flatten()
    logprobs = model.lm_head(hidden[replies]).log_softmax(-1)
    place = torch.searchsorted(replies, targets[:, 0].long())
    token = targets[:, 1].long()
    p = targets[:, 2]
    reply_loss = -(logprobs[place, token] * p).sum() / max(1, len(replies))

    read = (kinds == 1).nonzero().flatten()[random.randrange(8) :: 8]
    read_loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[read]), following[read])
    return reply_loss, read_loss


@torch.no_grad()
def held_out_losses(model, data):
    """Means of `losses` over the first ten batches of `data`."""
    first = islice(batches(data, 4096, random.Random(0)), 10)
    pairs = [losses(model, *batch) for batch in first]
    reply_losses, read_losses = zip(*pairs)
    return sum(reply_losses) / len(pairs), sum(read_losses) / len(pairs)


@torch.no_grad()
def share_right(model, talks, end_id):
    """Share of replies of which every token is the most likely one, after the right ones before."""
    found = []
    for ids, mask, _ in talks:
        ids = torch.from_numpy(ids.astype(np.int64))[None]
        is_reply = torch.from_numpy(mask[1:])
        hit = (model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:])[0, is_reply]
        ends = (ids[0, 1:][is_reply] == end_id).nonzero().flatten().tolist()
        begins = [0] + [end + 1 for end in ends]
        for begin, end in zip(begins, ends):
            found.append(bool(hit[begin:end].all()))
    return round(sum(found) / len(found), 2)


def average_gradients(model, ranks):
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = gradient.view_as(p) / ranks


# ---- The command ----

VOCABULARY_SIZES = {"sciworld": 300, "searchqa": 200, "webarena": 250}  # tokens added to 1,200


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", required=True, help="folder to write (what ships is in data/tiny)")
    add("--worlds", type=lambda text: text.split(","), default=list(SHARES),
        help="separated by commas; default: all (the last three need their extras)")
    add("--minutes", type=float, default=50, help="processor time for the training")
    add("--conversations", type=int, default=26_000, help="played by each process")
    add("--batch_tokens", type=int, default=1024, help="a step, in each process")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--seed", type=int, default=0)
    return parser.parse_args()


def save_tokenizer(talks, args):
    """Train the tokenizer on the first 8,000 conversations, and save it."""
    texts = []
    for first, turns in talks[:8000]:
        texts.append(first)
        for observation, reply, *_ in turns:
            texts += [observation, reply]
    named = set()  # what SciWorld's policy thought of
    for first, turns in talks:
        if "science" in first:
            for _, reply, *_ in turns:
                thought = re.match("Thought: (.+)\n", reply)
                if thought:
                    named.add(thought[1])
    size = 1200 + sum(VOCABULARY_SIZES.get(name, 0) for name in set(args.worlds))
    make_tokenizer(texts, size, phrases(args.worlds, named)).save_pretrained(args.out)


def main():
    args = parse()
    logging.disable_progress_bar()
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    talks = list(conversations(args.conversations, args.seed + rank, args.worlds))
    if rank == 0:
        save_tokenizer(talks, args)
    if ranks > 1:
        dist.barrier()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    model = make_model(tokenizer, args)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{len(tokenizer)} tokens in the vocabulary, {parameters / 1e6:.2f}M parameters")
    steps, tokens = train(model, tokenizer, talks, args, rank, ranks)
    if rank == 0:
        recipe = {key: value for key, value in vars(args).items() if key != "out"}
        recipe |= {"processes": ranks, "steps": steps, "tokens": tokens}
        (Path(args.out) / "recipe.json").write_text(json.dumps(recipe, indent=1))


if __name__ == "__main__":
    main()
