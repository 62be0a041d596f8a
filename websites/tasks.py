"""The tasks of the embedded sites, in WebArena's JSON, each with a plan that fulfils it.

Item n is made by template n % T with seed n // T, where T is the number of templates. The seed
fills the databases; the item number draws what the task is about.
"""

import random
import re
import sqlite3

from websites import admin_tasks, code_tasks, forum_tasks, shop_tasks
from websites.server import database
from websites.templates import Db

# WebArena's placeholders for the addresses of the sites.
PLACE = {
    "shop": "__SHOPPING__", "forum": "__REDDIT__", "code": "__GITLAB__",
    "admin": "__SHOPPING_ADMIN__",
}
HELD_OUT = 1000  # seeds from here on are for evaluation

# The order and the length of this list number the items. A new template renumbers all of them:
# the item sets must then be made anew.
TEMPLATES = [
    *shop_tasks.TASKS.templates, *forum_tasks.TASKS.templates, *code_tasks.TASKS.templates,
    *admin_tasks.TASKS.templates,
]


def seed_of(item: int) -> int:
    """The seed of the databases that an item is played on."""
    return item // len(TEMPLATES)


def make(item: int) -> tuple[dict, list, str]:
    """Make an item -> (the task in WebArena's JSON, a plan, the answer or "").

    Raises RuntimeError, with the template's name and the seed, where a template fails.
    """
    number = item % len(TEMPLATES)
    seed = seed_of(item)
    template = TEMPLATES[number]
    db = database(seed)
    rows_rng = random.Random(f"task {item}")
    rng = random.Random(f"task {item} more")
    try:
        values, check, plan, *answer = template.make(Db(db, rows_rng), rng)
    except (sqlite3.Error, IndexError, TypeError) as error:
        name = template.make.__name__
        raise RuntimeError(f"template {name} with seed {seed}: {error}") from error
    finally:
        db.close()
    place = PLACE[template.site]
    task = {
        "sites": [place.strip("_").lower()],
        "task_id": item,
        "require_login": True,
        "storage_state": None,
        "start_url": place,
        "geolocation": None,
        "intent_template": re.sub(r"\{(\w+)\}", r"{{\1}}", template.sentence),
        "instantiation_dict": values,
        "intent": template.sentence.format(**values),
        "require_reset": True,
        "eval": check,
        "intent_template_id": number,
    }
    return task, plan, str(answer[0]) if answer else ""
