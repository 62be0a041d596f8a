"""Invented worlds for SearchQA: each an encyclopedia of about 9,400 short articles, and questions.

`almanac(seed)` returns a world of people, works, organisations, towns, regions and rivers, all of
them invented. The seed determines its facts, articles and questions.

Names are combined from the word lists in almanac.json, so that many names share a word ("Tavi
Morwen" and "Tavi Oslind", "The Silver Harbour" and "The Silver Orchard"). One person in ten has a
pen name, and a question may use the pen name. Some articles mention another subject of the same
kind, as a distraction. A question either follows one to three facts ("hops"), or names two works
and asks for the year of the earlier or the later one.
Worlds from number `HELD_OUT` on word their questions in ways that no other world uses.
"""

import functools
import json
import random
import threading
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 100  # the first world with held-out wording
QUESTIONS = 2000  # number of questions in each world

DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
REGIONS, RIVERS = DATA["regions"], DATA["rivers"]
WORD_LISTS = "first last stems before regions rivers adjectives things kinds".split()
# Every word of which names are made.
WORDS = sorted({word for name in WORD_LISTS for word in DATA[name]})
# Fact -> the sentences that an article may use for it. {x} is the article's subject, {y} the value.
SAYS = DATA["says"]
# Fact -> (questions for it in training worlds, questions for it in held-out worlds).
ASKS = DATA["asks"]
# Fact -> how a question refers to its value: (in training worlds, in held-out worlds).
PHRASES = DATA["phrases"]
# The comparison questions: (in training worlds, in held-out worlds).
COMPARE = DATA["compare"]
# Source of a question -> (kind of the first subject, the facts to follow from it, in order).
CHAINS = DATA["chains"]
# Source of a question -> the probability of drawing it.
SHARES = DATA["shares"]


@dataclass
class Question:
    text: str
    answers: list[str]  # each of these is right
    source: str  # "1_hop" | "2_hops" | "3_hops" | "comparison"
    titles: list[str]  # the articles that lead to the answer, in order
    names: list[str]  # the name by which each of them is known before it is read


@dataclass
class Almanac:
    facts: dict  # title -> {"is": kind of subject, fact: value}; some values are titles themselves
    articles: list  # (title, text)
    questions: list  # of `Question`; there are `QUESTIONS` of them


_LOCK = threading.Lock()


def almanac(seed: int) -> Almanac:
    """World number `seed`. All threads get the same object, which must not be changed."""
    with _LOCK:
        return _almanac(seed)


@functools.lru_cache(maxsize=16)
def _almanac(seed):
    rng = random.Random(f"almanac {seed}")
    people, works, orgs, towns = _names(rng)
    people, pen_names = people[:4000], people[4000:]
    facts = _facts(rng, people, pen_names, works, orgs, towns)
    articles = [(title, _article(rng, title, own)) for title, own in facts.items()]

    subjects = {"work": works, "person": people, "org": orgs, "town": towns}
    questions = []
    texts = set()
    while len(questions) < QUESTIONS:
        question = _question(rng, facts, subjects, seed >= HELD_OUT)
        if question is not None and question.text not in texts:
            texts.add(question.text)
            questions.append(question)
    return Almanac(facts, articles, questions)


def _names(rng):
    """Draw the names of people, works, organisations and towns; within each list all differ."""
    first, last, stems, before, _, _, adjectives, things, kinds = map(DATA.get, WORD_LISTS)
    people = [f"{name} {surname}" for name in first for surname in last]
    works = [f"The {adjective} {thing}" for adjective in adjectives for thing in things]
    works += [f"The {thing} of {stem}" for thing in things for stem in stems]
    orgs = [f"{owner} {kind}" for owner in (*last, *stems) for kind in kinds]
    towns = [f"{word} {stem}" for word in before for stem in stems]
    most = [(people, 4400), (works, 3200), (orgs, 1800), (towns, 400)]
    return [rng.sample(names, min(len(names), count)) for names, count in most]


def _facts(rng, people, pen_names, works, orgs, towns):
    """Draw the facts of every subject -> {title: {"is": kind, fact: value}}.

    The order of the draws, of the subjects and of each subject's facts is part of the world: a
    change would give every seed another world.
    """
    facts = {}
    for town in towns:
        facts[town] = {
            "is": "town", "region": rng.choice(REGIONS), "river": rng.choice(RIVERS),
            "other": rng.choice(towns),
        }
    for region in REGIONS:
        facts[region] = {"is": "region", "capital": rng.choice(towns)}
    for org in orgs:
        facts[org] = {
            "is": "org", "founder": rng.choice(people), "founded": str(rng.randint(1750, 1999)),
            "seat": rng.choice(towns), "other": rng.choice(orgs),
        }
    for person in people:
        facts[person] = {
            "is": "person", "job": rng.choice(DATA["jobs"]), "birthplace": rng.choice(towns),
            "born": str(rng.randint(1750, 1979)), "employer": rng.choice(orgs),
        }
    for person, alias in zip(rng.sample(people, len(pen_names)), pen_names):
        facts[person]["alias"] = alias
    for work in works:
        facts[work] = {
            "is": "work", "kind": rng.choice(DATA["books"]), "author": rng.choice(people),
            "published": str(rng.randint(1800, 1999)), "other": rng.choice(works),
        }
    return facts


def _article(rng, title, own):
    """The text of one article: a sentence for each fact, all but the first in random order."""
    sentences = []
    for fact, value in own.items():
        if fact == "is":
            continue
        # Half of the articles leave out the mention of another subject.
        if fact == "other" and rng.random() < 0.5:
            continue
        sentences.append(rng.choice(SAYS[fact]).format(x=title, y=value))
    first, rest = sentences[:1], sentences[1:]
    rng.shuffle(rest)
    return " ".join(first + rest)


def _question(rng, facts, subjects, held_out):
    """Draw one question -> Question, or None where the drawn one would be too easy or unclear."""
    wording = int(held_out)  # index into the pairs of `ASKS`, `PHRASES` and `COMPARE`
    source = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if source == "comparison":
        return _comparison(rng, facts, subjects["work"], wording)
    return _chain(rng, facts, subjects, wording, source)


def _comparison(rng, facts, works, wording):
    """A question for the year of the earlier or later of two works; None if the years are equal."""
    a, b = rng.sample(works, 2)
    years = [facts[a]["published"], facts[b]["published"]]
    which = rng.choice(["earlier", "later"])
    if years[0] == years[1]:
        return None
    text = rng.choice(COMPARE[wording]).format(a=a, b=b, which=which)
    answer = min(years) if which == "earlier" else max(years)
    return Question(text, [answer], "comparison", [a, b], [a, b])


def _chain(rng, facts, subjects, wording, source):
    """A question that follows the facts of one of `CHAINS`.

    Returns None for a question of several hops whose first article or own text already contains
    the answer, or that comes back to an article.
    """
    kind, chain = rng.choice(CHAINS[source])
    title = rng.choice(subjects[kind])
    titles = [title]
    phrase = title  # how the question refers to `title`
    if kind == "person" and "alias" in facts[title] and rng.random() < 0.5:
        phrase = facts[title]["alias"]
    names = [phrase]

    # Follow all facts but the last one, which is the one to ask for.
    *through, last = chain.split()
    for fact in through:
        phrase = rng.choice(PHRASES[fact][wording]).format(x=phrase)
        title = facts[title][fact]
        titles.append(title)
        names.append(title)
    answer = facts[title][last]

    if through:
        in_first_article = answer in facts[titles[0]].values()
        in_question = answer in phrase
        article_twice = len(set(titles)) < len(titles)
        if in_first_article or in_question or article_twice:
            return None
    text = rng.choice(ASKS[last][wording]).format(x=phrase)
    text = text[0].upper() + text[1:]
    answers = [answer]
    alias = facts.get(answer, {}).get("alias")
    if alias:
        answers.append(alias)
    return Question(text, answers, source, titles, names)
