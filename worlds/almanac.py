"""Invented worlds for SearchQA: each an encyclopedia of about 9,400 short articles, and questions.

`almanac(seed)` returns a world of people, works, organisations, towns, regions and rivers, all of
them invented. The seed determines its facts, articles and questions.

Names are combined from the word lists below, so that many names share a word ("Tavi Morwen" and
"Tavi Oslind", "The Silver Harbour" and "The Silver Orchard"). One person in ten has a pen name, and
a question may use the pen name. Some articles mention another subject of the same kind, as a
distraction. A question either follows one to three facts ("hops"), or names two works and asks for
the year of the earlier or the later one.
Worlds from number `HELD_OUT` on word their questions in ways that no other world uses.
"""

import functools
import random
import threading
from dataclasses import dataclass

HELD_OUT = 100  # the first world with held-out wording
QUESTIONS = 2000  # number of questions in each world

# ---- word lists ----

FIRST = """
Abel Adira Alwin Anwen Arlo Bastia Belor Brenna Cador Calla Corin Dalia Darro Della Edric Elowen
Emrys Fenna Galen Gwill Halva Hestor Idra Ilan Jorah Joss Kaela Keld Lavra Lorin Maelis Marek Mirra
Nadir Neva Odrin Orla Perrin Petra Quill Ravel Rhosa Sabra Selwyn Sorrel Tamsin Tavi Torben Ulla
Varro Veska Wendel Wyn Xara Yara Yorick Zella Zoran
""".split()
LAST = """
Abrel Ambry Arkwell Ashlorn Bardoc Belmar Birkoth Brandel Calder Carvin Corvane Crathe Dalmer
Darnoth Delvin Dorvale Eastrel Eldmar Embrow Estrin Falk Farrow Fenwick Gallorn Garnel Glanvil Grell
Hadrow Halmek Harbin Hollin Ingram Istvane Jarrow Jesmond Kastel Kelmor Kirwan Korvell Lanthe Larkin
Lomax Lorvane Maddoc Malvorn Marsten Morwen Nairn Nasmith Norvell Oakden Olveth Ormond Oslind Padrel
Pellow Pendrake Quarrel Quennel Radnor Ravelin Rothwin Ruskel Sarden Selkarn Severl Stavrin Talmadge
Tarrin Tolliver Trevane Ulmer Umbrel Vandor Varley Velden Vossler Wardell Wexley Winslade Wyvern
Yarrow Yelland Zander Zimmel
""".split()
STEMS = """
Aldmoor Amberlock Ashwick Barrowick Beckholm Brackmoor Brinmore Carrow Clunbury Colmere Cragfell
Dunmere Eastham Elmlock Farlock Fernhill Foxley Glenrow Greyholt Hartlock Hawkmere Helmsby Ironford
Kelsom Kirkvale Langmere Larkhill Linholt Lochmere Marlock Maywick Norwell Oakmere Otterby Penrick
Quarley Ravenby Redmere Rowanby Sandmere Selmere Stanmoor Stowick Thornby Tilmoor Umberlow Waymoor
Westmere Whitmar Windermoor Wolfhill Yarmoor
""".split()
BEFORE = "New Old Port Upper Lower Great Little North South".split()
REGIONS = """
Ardland Borovia Caledor Dravia Estmark Fenlund Galdria Hestovia Ithland Jurmark Kalvia Lorraden
Mardovia Norrland Ostravia Palmark Quessland Rethia Sundmark Tarvia Ulmland Vestria Wendovia Zalmark
""".split()
RIVERS = """
Adel Brona Calm Derra Eska Fyne Gada Hule Isen Jora Kell Luno Mersa Nidd Orra Pada Rhee Saver Tane
Urel Vane Wyl Yarl Zenn
""".split()
ADJECTIVES = """
Silent Silver Golden Broken Hidden Distant Crimson Burning Frozen Hollow Crooked Patient Restless
Scarlet Sleeping Narrow Weary Bitter Gentle Wandering Forgotten Painted Sunken Velvet Winter Copper
Lonely Secret Drifting Northern
""".split()
THINGS = """
Harbour Orchard Lantern Garden Mirror River Tower Meadow Compass Window Feather Island Kingdom
Letter Bridge Forest Candle Mountain Shadow Anchor Voyage Castle Saddle Sparrow Thread Valley Clock
Staircase Horizon Library Market Ocean Portrait Quarry Ribbon Stranger Temple Umbrella Violin Well
""".split()
KINDS = """
Institute Society Works Press College Museum Theatre Bank Foundry Observatory Trust Brothers
Laboratory Shipyard
""".split()
BOOKS = ["a novel", "a play", "an opera", "a poem", "a film"]
JOBS = [
    "a painter", "a chemist", "an architect", "a composer", "a botanist", "an engineer",
    "a historian", "an astronomer", "a sculptor", "a surgeon",
]
# Every word of which names are made.
WORDS = sorted({*FIRST, *LAST, *STEMS, *BEFORE, *REGIONS, *RIVERS, *ADJECTIVES, *THINGS, *KINDS})

# ---- wording ----

# Fact -> the sentences that an article may use for it. {x} is the article's subject, {y} the value.
SAYS = {
    "kind": ["{x} is {y}.", "{x} is known as {y}."],
    "job": ["{x} is {y}.", "{x} became known as {y}."],
    "author": ["It was written by {y}.", "Its author is {y}.", "It is a work of {y}."],
    "published": ["It was published in {y}.", "It appeared in {y}.", "It came out in {y}."],
    "birthplace": ["{x} was born in {y}.", "{x} is a native of {y}.", "{x} comes from {y}."],
    "born": ["The year of birth is {y}.", "The birth fell in {y}."],
    "employer": ["{x} works for {y}.", "{x} has a post at {y}.", "{x} is employed by {y}."],
    "founder": ["{x} was founded by {y}.", "The founder of {x} is {y}.", "{x} was set up by {y}."],
    "founded": ["It has existed since {y}.", "It dates from {y}.", "It opened in {y}."],
    "seat": ["Its seat is in {y}.", "It is based in {y}.", "It has its offices in {y}."],
    "region": ["{x} is a town in {y}.", "{x} lies in {y}.", "{x} belongs to {y}."],
    "river": ["It stands on the river {y}.", "The river {y} runs through it."],
    "capital": ["The capital of {x} is {y}.", "{x} is governed from {y}."],
    "alias": ["{x} also writes as {y}.", "Some know {x} as {y}."],
    "other": ["It is often mistaken for {y}.", "Compare {y}.", "See also {y}."],
}
# Fact -> (questions for it in training worlds, questions for it in held-out worlds).
ASKS = {
    "author": (
        ["Who wrote {x}?", "Who is the author of {x}?", "Whose work is {x}?"],
        ["By whom was {x} written?", "Name the writer of {x}."],
    ),
    "published": (
        ["When was {x} published?", "In what year did {x} appear?"],
        ["What is the year of publication of {x}?", "{x} came out in which year?"],
    ),
    "birthplace": (
        ["Where was {x} born?", "In which town was {x} born?"],
        ["What is the birthplace of {x}?", "Which town does {x} come from?"],
    ),
    "born": (
        ["When was {x} born?", "In what year was {x} born?"],
        ["What is the year of birth of {x}?", "{x} was born in which year?"],
    ),
    "employer": (
        ["Who does {x} work for?", "Where does {x} have a post?"],
        ["Which organisation employs {x}?", "Who is the employer of {x}?"],
    ),
    "founder": (
        ["Who founded {x}?", "Who is the founder of {x}?"],
        ["By whom was {x} founded?", "Who set up {x}?"],
    ),
    "founded": (
        ["When was {x} founded?", "Since when has {x} existed?"],
        ["In which year did {x} open?", "What year does {x} date from?"],
    ),
    "seat": (
        ["Where is {x} based?", "In which town is the seat of {x}?"],
        ["Where does {x} have its offices?", "Which town is home to {x}?"],
    ),
    "region": (
        ["In which region is {x}?", "Which region does {x} belong to?"],
        ["What is the region of {x}?", "{x} lies in which region?"],
    ),
    "river": (
        ["Which river runs through {x}?", "On which river does {x} stand?"],
        ["What is the river of {x}?", "{x} stands on which river?"],
    ),
}
# Fact -> how a question refers to its value: (in training worlds, in held-out worlds).
PHRASES = {
    "author": (["the author of {x}", "the person who wrote {x}"], ["the writer of {x}"]),
    "birthplace": (
        ["the town where {x} was born", "the birthplace of {x}"],
        ["the town that {x} comes from"],
    ),
    "employer": (
        ["the employer of {x}", "the organisation that {x} works for"],
        ["the place where {x} has a post"],
    ),
    "founder": (
        ["the founder of {x}", "the person who founded {x}"],
        ["the person who set up {x}"],
    ),
    "seat": (["the town where {x} is based", "the seat of {x}"], ["the town that is home to {x}"]),
}
# The comparison questions: (in training worlds, in held-out worlds).
COMPARE = (
    ["When was the {which} of {a} and {b} published?"],
    ["Of {a} and {b}, in which year did the {which} one appear?"],
)
# Number of hops -> (kind of the first subject, the facts to follow from it, in order).
CHAINS = {
    1: [
        ("work", "author"), ("work", "published"), ("person", "birthplace"), ("person", "born"),
        ("person", "employer"), ("org", "founder"), ("org", "founded"), ("org", "seat"),
        ("town", "region"), ("town", "river"),
    ],
    2: [
        ("work", "author birthplace"), ("work", "author born"), ("work", "author employer"),
        ("org", "founder birthplace"), ("org", "founder born"), ("person", "birthplace region"),
        ("person", "birthplace river"), ("person", "employer founder"), ("person", "employer seat"),
        ("person", "employer founded"), ("org", "seat region"), ("org", "seat river"),
    ],
    3: [
        ("work", "author birthplace region"), ("work", "author birthplace river"),
        ("work", "author employer seat"), ("work", "author employer founder"),
        ("work", "author employer founded"), ("org", "founder birthplace region"),
        ("org", "founder birthplace river"), ("person", "employer seat region"),
        ("person", "employer founder birthplace"),
    ],
}
# Source of a question -> the probability of drawing it.
SHARES = {"1_hop": 0.4, "2_hops": 0.3, "3_hops": 0.15, "comparison": 0.15}


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
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    works = [f"The {adjective} {thing}" for adjective in ADJECTIVES for thing in THINGS]
    works += [f"The {thing} of {stem}" for thing in THINGS for stem in STEMS]
    orgs = [f"{owner} {kind}" for owner in (*LAST, *STEMS) for kind in KINDS]
    towns = [f"{before} {stem}" for before in BEFORE for stem in STEMS]
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
            "is": "person", "job": rng.choice(JOBS), "birthplace": rng.choice(towns),
            "born": str(rng.randint(1750, 1979)), "employer": rng.choice(orgs),
        }
    for person, alias in zip(rng.sample(people, len(pen_names)), pen_names):
        facts[person]["alias"] = alias
    for work in works:
        facts[work] = {
            "is": "work", "kind": rng.choice(BOOKS), "author": rng.choice(people),
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
    num_hops = int(source[0])
    return _chain(rng, facts, subjects, wording, source, num_hops)


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


def _chain(rng, facts, subjects, wording, source, num_hops):
    """A question that follows `num_hops` facts.

    Returns None for a question of several hops whose first article or own text already contains
    the answer, or that comes back to an article.
    """
    kind, chain = rng.choice(CHAINS[num_hops])
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
