"""What templates of tasks are made of: registration, reading a database, evaluators, and plans.

A template is a function (db, rng) -> (values, check, plan[, answer]):
    values: what fills the blanks of the template's sentence
    check: the "eval" part of the task's JSON, made with `says`, `exactly`, `at`, `shows` ...
    plan: a list of steps that fulfil the task, made with `click`, `write` and `pick`
    answer: what the agent must say at the end; left out where nothing needs to be said
`db` reads the state that the episode starts from, so every answer follows from the database.
"""

from collections.abc import Callable
from typing import NamedTuple


class Template(NamedTuple):
    site: str
    kind: str  # navigate | find | change | impossible
    sentence: str  # "Open the category {category}."
    make: Callable


class SiteTemplates:
    """The templates of one site, in the order in which its module registers them."""

    def __init__(self, site):
        self.site = site
        self.templates = []

    def add(self, kind, sentence):
        """Register a template: a decorator for functions (db, rng)."""

        def register(function):
            self.templates.append(Template(self.site, kind, sentence, function))
            return function

        return register


class Db:
    """Reads the state that a task is made from. `rng` draws what the task is about."""

    def __init__(self, db, rng):
        self.db = db
        self.rng = rng

    def rows(self, sql, *values):
        """All rows of a query."""
        return self.db.execute(sql, values).fetchall()

    def value(self, sql, *values):
        """The first column of the first row."""
        return self.db.execute(sql, values).fetchone()[0]

    def any(self, sql, *values):
        """A random row."""
        return self.rng.choice(self.rows(sql, *values))


# ---- the evaluators' part of a task, in WebArena's JSON ----


def _string_match(answers):
    return {
        "eval_types": ["string_match"], "reference_answers": answers, "reference_url": "",
        "program_html": [],
    }


def says(*texts):
    """The answer must contain all of these texts."""
    return _string_match({"must_include": list(texts)})


def exactly(text):
    """The answer must be this text."""
    return _string_match({"exact_match": str(text)})


def impossible(why):
    """The task cannot be done, and the answer must be "N/A"."""
    return {**_string_match({"fuzzy_match": "N/A"}), "string_note": why}


def at(url):
    """The agent must end on this address."""
    return {
        "eval_types": ["url_match"], "reference_answers": None, "reference_url": url,
        "program_html": [], "url_note": "GOLD in PRED",
    }


def page_holds(*targets):
    """Pages must hold texts; targets: (address, JavaScript expression of a text, texts) triples."""
    return {
        "eval_types": ["program_html"],
        "reference_answers": None,
        "reference_url": "",
        "program_html": [
            {"url": url, "locator": locator, "required_contents": {"must_include": list(texts)}}
            for url, locator, texts in targets
        ],
    }


def shows(*targets):
    """Parts of pages must hold texts; targets: (address, CSS selector of the part, texts)."""
    return page_holds(
        *((url, f"document.querySelector('{css}').outerText", texts) for url, css, texts in targets)
    )


# ---- the steps of a plan ----


def click(role, name):
    """Click the element with this role and name."""
    return "click", role, name


def write(name, text, enter=0, role="textbox"):
    """Write a text into the field with this name; enter=1: press Enter afterwards."""
    return "type", role, name, text, enter


def pick(option):
    """Choose an option of a list."""
    return "click", "option", option
