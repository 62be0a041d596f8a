"""The templates and the tasks that they make."""

import hashlib
import json
from collections import Counter

from websites import tasks
from websites.server import SITES

NUM_TEMPLATES = len(tasks.TEMPLATES)
ITEMS_HASH = "a047d25a95a8f76d524b23c56112e510efe8c872a6b9e1d7eba998f340be886a"
TASK_KEYS = set("""sites task_id require_login storage_state start_url geolocation intent_template
instantiation_dict intent require_reset eval intent_template_id""".split())


def test_there_are_templates_of_every_kind_for_every_site():
    count = Counter((template.site, template.kind) for template in tasks.TEMPLATES)
    at_least = {"navigate": 3, "find": 4, "change": 5, "impossible": 2}
    for site in SITES:
        assert sum(n for (of_site, _), n in count.items() if of_site == site) >= 10
        for kind, least in at_least.items():
            assert count[site, kind] >= least
    assert {template.kind for template in tasks.TEMPLATES} == set(at_least)
    names = {(template.site, template.make.__name__) for template in tasks.TEMPLATES}
    assert len(names) == NUM_TEMPLATES


def test_every_item_makes_a_task_in_webarenas_json():
    training = range(5 * NUM_TEMPLATES)
    first_held_out = tasks.HELD_OUT * NUM_TEMPLATES
    held_out = range(first_held_out, first_held_out + 3 * NUM_TEMPLATES)
    for item in [*training, *held_out]:
        task, plan, answer = tasks.make(item)
        assert set(task) == TASK_KEYS
        assert json.loads(json.dumps(task)) == task
        assert task["sites"][0] in ("shopping", "reddit", "gitlab", "shopping_admin")
        assert task["task_id"] == item == tasks.seed_of(item) * NUM_TEMPLATES + (
            task["intent_template_id"])
        assert "{" not in task["intent"]
        assert plan
        assert "[" not in answer  # it would end "stop [answer]"


def test_an_item_is_always_the_same_and_another_seed_asks_something_else():
    num_same = 0
    for item in range(NUM_TEMPLATES):
        task = tasks.make(item)
        assert tasks.make(item) == task
        other_seed = tasks.make(item + NUM_TEMPLATES)
        num_same += task[0]["intent"] == other_seed[0]["intent"]
    assert num_same < NUM_TEMPLATES / 3


def test_the_item_numbers_mean_what_they_meant_when_the_item_sets_were_made():
    """A change of a template, a page's data or the templates' order changes this hash.

    Then the item sets must be made anew, and earlier results cannot be compared any more.
    """
    items = [tasks.make(item) for item in range(NUM_TEMPLATES)]
    assert hashlib.sha256(json.dumps(items).encode()).hexdigest() == ITEMS_HASH
