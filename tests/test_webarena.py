"""WebArena: replies, trees, evaluators, a real browser with its faults, and the user's own sites.

The tests of the embedded sites and of their tasks stand in websites/tests.
"""

import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from conftest import ROOT

import eval as evaluation
from config import parse_config
from envs import EnvError, EnvPool, categories, items, make_env, split_item
from rl import TINY_MODEL
from rollout import rollout
from websites import tasks
from worlds.webarena import browser as browsers
from worlds.webarena import env as webarena
from worlds.webarena import evaluators, tree
from worlds.webarena.plans import Follower, solve

CHROMIUM = "/usr/bin/chromium"
NUM_TEMPLATES = len(tasks.TEMPLATES)
MISSING = []
if not importlib.util.find_spec("playwright"):
    MISSING.append("playwright (pip install -e '.[webarena]')")
if not os.access(CHROMIUM, os.X_OK):
    MISSING.append("Chromium (apt-get install chromium)")
browser = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


def item_of(name):
    """The first item of a template: that with seed 0."""
    for number, template in enumerate(tasks.TEMPLATES):
        if f"{template.site}.{template.make.__name__}" == name:
            return number
    raise ValueError(name)


# ---- replies ----


@pytest.mark.parametrize("reply, action", [
    ("```click [12]```", ("click", ("12",))),
    ("I look.\n```\nclick[12]\n```", ("click", ("12",))),
    ("```type [3] [a [b] c] [0]```", ("type", ("3", "a [b] c", "0"))),
    ("```type [3] [words]```", ("type", ("3", "words", None))),
    ("```type [3] []```", ("type", ("3", "", None))),
    ("```press [ctrl+a]```", ("press", ("ctrl+a",))),
    ("```scroll [down]```", ("scroll", ("down",))),
    ("```scroll up```", ("scroll", ("up",))),
    ("```tab_focus [0]```", ("tab_focus", ("0",))),
    ("```goto [http://a.localhost/b?c=[1]]```", ("goto", ("http://a.localhost/b?c=[1]",))),
    ("```stop [N/A]```", ("stop", ("N/A",))),
    ("```stop```", ("stop", (None,))),
    ("```stop []```", ("stop", ("",))),
    ("```go_back```", ("go_back", ())),
])
def test_an_action_stands_between_triple_backticks(reply, action):
    assert webarena.parse(reply) == action


@pytest.mark.parametrize("reply", [
    "",
    "click [12]",
    "```",
    "```click [12]",
    "```click [1]``` and ```click [2]```",
    "``````",
    "```click```",
    "```click [a]```",
    "```click [-1]```",
    "```click [12] now```",
    "```dance [1]```",
    "```scroll [left]```",
    "```go_back [1]```",
    "```goto []```",
    "```type [1]```",
    "```python\nclick [1]```",
    "```click [99999999999]```",
    "```stop [" + "a" * 3000 + "]```",
    "```CLICK [1]```",
    "\x00```\x00```",
])
def test_anything_else_is_none(reply):
    assert webarena.parse(reply) is None


# ---- trees ----


def ax_node(node_id, role, name, children=(), **properties):
    """A node as Accessibility.getFullAXTree gives it."""
    return {
        "nodeId": node_id,
        "backendDOMNodeId": int(node_id),
        "role": {"value": role},
        "name": {"value": name},
        "childIds": list(children),
        "properties": [{"name": key, "value": {"value": v}} for key, v in properties.items()],
    }


def test_the_tree_is_written_in_webarenas_form():
    nodes = [
        ax_node("1", "RootWebArea", "Page", ["2", "5", "6", "8", "11"], focused=True),
        ax_node("2", "generic", "", ["3"]),
        ax_node("3", "link", "It's", ["4"], url="http://x"),
        ax_node("4", "StaticText", "It's"),
        ax_node("5", "button", "below the window"),
        ax_node("6", "textbox", "Name", ["7"], required=False, editable="plaintext"),
        ax_node("7", "StaticText", "Ann"),
        ax_node("8", "combobox", "Sort", ["9"]),
        ax_node("9", "MenuListPopup", "", ["10"]),
        ax_node("10", "option", "By price"),
        {"nodeId": "11", "ignored": True, "role": {"value": "none"}, "childIds": ["12", "1"]},
        ax_node("12", "InlineTextBox", "x"),
    ]
    boxes = {node: (0, 0, 10, 10) for node in (1, 2, 3, 4, 6, 7, 8, 11, 12)}
    text, elements = tree.render(nodes, boxes)
    assert text == (
        "[1] RootWebArea 'Page' focused: True\n"
        "\t[2] link \"It's\"\n"
        "\t[3] textbox 'Name' required: False\n"
        "\t\t[4] StaticText 'Ann'\n"
        "\t[5] combobox 'Sort'\n"
        "\t\t[6] option 'By price'"
    )
    assert [elements[number].node for number in range(1, 7)] == [1, 3, 6, 7, 8, 10]
    assert elements[3].editable and not elements[2].editable
    assert tree.find(text, "link", "It's") == 2
    assert tree.find(text, "link", "It") is None
    assert tree.render([], {}) == ("", {})


def test_only_what_the_window_shows_has_a_rectangle():
    bounds = [[0, 0, 50, 2000], [10, 20, 30, 40], [10, 790, 30, 40], [10, 300, 0, 20]]
    page = {
        "nodes": {"backendNodeId": [7, 8, 9, 10]},
        "scrollOffsetX": 0,
        "scrollOffsetY": 100,
        "layout": {"nodeIndex": [0, 1, 2, 3], "bounds": bounds},
    }
    found = tree.rectangles({"documents": [page]}, 1280, 720)
    assert found == {7: (0, 0, 50, 720), 9: (10, 690, 40, 720)}


# ---- evaluators ----


@pytest.mark.parametrize("references, right, wrong", [
    (
        {"exact_match": "Quest Band"},
        ["quest band", ' "Quest Band" '],
        ["Quest", "the Quest Band", ""],
    ),
    ({"must_include": ["blue", "12.50"]}, ["Blue, at $12.50"], ["blue", "12.50", ""]),
    ({"must_include": ["0"]}, ["0", "there are 0."], ["10", "zero", ""]),
    # As NLTK's tokenizer splits these.
    ({"must_include": ["5"]}, ["(5)", "$5", "4, 5", "5%", "5: all", "'5'"],
     ["0.5 stars", "1,5", "5/7", "5-6", "2:5", "5.99", "$4.5"]),
    ({"must_include": ["10"]}, ["10 of them"], ["1", ""]),
    ({"fuzzy_match": "N/A"}, ["N/A", "n/a"], ["", "not possible", "N/A because"]),
    (
        {"fuzzy_match": ["Alice Brown", "12 km"]},
        ["12 KM, alice brown."],
        ["Alice", "Alice Browning 12 km", ""],
    ),
])
def test_strings_are_matched_as_in_webarena(references, right, wrong):
    for answer in right:
        assert evaluators.string_match(references, answer)
    for answer in wrong:
        assert not evaluators.string_match(references, answer)


@pytest.mark.parametrize("reference, right, wrong", [
    (
        "http://g/a/b",
        ["http://g/a/b", "http://g/a/b/", "http://g/a/b/c?x=1"],
        ["http://g/a", "http://h/a/b"],
    ),
    (
        "http://g/i?state=opened&sort=asc",
        ["http://g/i?sort=asc&state=opened&page=2"],
        ["http://g/i", "http://g/i?state=opened", "http://g/i?state=opened&sort=desc"],
    ),
    ("http://g/a |OR| http://g/b", ["http://g/a", "http://g/b/"], ["http://g/c"]),
    ("http://g/i?label_name%5B%5D=x", ["http://g/i?label_name[]=x"], ["http://g/i?label_name=x"]),
])
def test_addresses_are_matched_as_in_webarena(reference, right, wrong):
    for url in right:
        assert evaluators.url_match(reference, url)
    for url in wrong:
        assert not evaluators.url_match(reference, url)


def test_unknown_evaluators_are_an_error():
    with pytest.raises(ValueError, match="magic"):
        evaluators.score({"eval": {"eval_types": ["magic"]}}, "", "", None)
    with pytest.raises(ValueError, match="unknown string_match"):
        evaluators.string_match({"sounds_like": "a"}, "a")


def test_helpers_are_looked_up_and_never_run_as_code():
    for code in (
        "__import__('os').getcwd()",
        "reddit_get_post_url(",
        "print('a')",
        "shopping_get_latest_order_url('x')",
    ):
        with pytest.raises(ValueError, match="unknown helper"):
            evaluators.call_helper(code, "", "", None)
    code = "reddit_get_post_url('__last_url__')"
    last = "http://r/f/books/59421/a-title?x=1"
    assert evaluators.call_helper(code, "", last, None) == "http://r/f/books/59421/"
    assert evaluators.call_helper(code, "", "http://r/f/books", None) == "http://r/f/books"


# ---- plans ----


def test_a_plan_is_followed_by_scrolling_until_the_page_ends():
    first, second, last = "[1] link 'A'", "[1] link 'B'", "[1] link 'C'"
    url = "http://a.localhost/"
    follower = Follower([("click", "link", "C")], "42", first, url)
    for page in (second, last):
        assert follower.reply() == "nothing\n```scroll [down]```"
        follower.take(True, page, url)
    assert follower.reply() == "C\n```click [1]```"
    follower.take(True, first, url + "c")
    assert follower.reply() == "42\n```stop [42]```"

    follower = Follower([("click", "link", "C")], "", first, url)
    follower.take(True, first, url)  # the window does not move
    assert follower.reply() is None


# ---- item sets ----


def item_numbers(split):
    return {split_item(item)[1] for item in items("webarena", split)}


def test_held_out_items_are_of_seeds_that_are_not_trained_on():
    train = item_numbers("train")
    test = item_numbers("test")
    assert len(test) >= 200
    assert max(map(tasks.seed_of, train)) < tasks.HELD_OUT <= min(map(tasks.seed_of, test))
    category_of = categories("webarena")
    for number in test:
        site = tasks.TEMPLATES[number % NUM_TEMPLATES].site
        assert category_of[f"webarena_{number}"] == site
    all_templates = set(range(NUM_TEMPLATES))
    assert {number % NUM_TEMPLATES for number in train} == all_templates
    assert {number % NUM_TEMPLATES for number in test} == all_templates


def test_an_items_answer_is_right_and_no_answer_or_another_one_is_wrong():
    checked = Counter()
    for number in sorted(item_numbers("test") | set(range(5 * NUM_TEMPLATES))):
        task, _, answer = tasks.make(number)
        check = task["eval"]
        if "string_match" in check["eval_types"]:
            references = check["reference_answers"]
            assert not evaluators.string_match(references, "")
            assert not evaluators.string_match(references, "something else")
            assert evaluators.string_match(references, answer)
            checked["string_match"] += 1
        elif "url_match" in check["eval_types"]:
            assert not evaluators.url_match(check["reference_url"], task["start_url"] + "/")
            checked["url_match"] += 1
    assert checked["string_match"] and checked["url_match"]


# ---- arguments and task files ----


def test_arguments_are_checked(tmp_path, monkeypatch):
    for name in webarena.PLACES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bad.json").write_text('[{"intent": "a"}]')
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "good.json").write_text(json.dumps([tasks.make(0)[0]]))
    has_playwright = importlib.util.find_spec("playwright") is not None
    for arguments, message in (
        ({"chromium": "/nowhere"}, "apt-get install chromium"),
        ({"tasks": f"{tmp_path}/bad.json"}, "no tasks in WebArena's form"),
        ({"tasks": f"{tmp_path}/empty.json"}, "no list of tasks"),
        ({"tasks": f"{tmp_path}/none.json"}, "none.json"),
        ({"tasks": f"{tmp_path}/good.json"}, "SHOPPING_ADMIN"),
        ({"shopping": "http://a"}, "need tasks="),
        ({"storage": "/nowhere"}, "storage-state"),
        ({"depth": 1}, "'depth'"),
        ({"height": 0}, "pixels"),
    ):
        if not has_playwright and "depth" not in arguments:
            message = "playwright"
        # Any program stands for Chromium: none is started.
        arguments = {"chromium": sys.executable, **arguments}
        with pytest.raises(ValueError, match=re.escape(message)):
            make_env("webarena", **arguments)


def test_a_missing_playwright_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape('pip install -e ".[webarena]"')):
        make_env("webarena")


@pytest.mark.skipif(
    importlib.util.find_spec("webarena") is None, reason="PyPI's libwebarena is not on the path"
)
def test_all_official_tasks_are_read_and_every_evaluator_is_known():
    official_tasks = webarena.read_tasks("official")
    assert len(official_tasks) == 812
    assert "webarena" not in sys.modules
    kinds = Counter()
    for task in official_tasks:
        check = task["eval"]
        assert set(check["eval_types"]) <= {"string_match", "url_match", "program_html"}
        kinds.update(check["eval_types"])
        if "string_match" in check["eval_types"]:
            assert not evaluators.string_match(check["reference_answers"], "\x01")
            kinds.update(check["reference_answers"].keys())
        if "program_html" in check["eval_types"]:
            for target in check["program_html"]:
                for code in (target["url"], target["locator"]):
                    if code.startswith("func:"):
                        kinds[re.match(r"func:(\w+)", code)[1]] += 1
    assert sum(map(evaluators.needs_judge, official_tasks)) == 82
    assert kinds["shopping_get_latest_order_url"]
    assert kinds["gitlab_get_project_memeber_role"]


# ---- in the browser ----


@pytest.fixture
def env():
    made = make_env("webarena")
    yield made
    made.close()


def current_url(observation):
    return re.search("URL: (.*)", observation)[1]


def page_of(observation):
    """An observation without the objective and the previous action."""
    return observation.split("OBJECTIVE")[0]


def score_now(env, answer):
    """The score of an episode as it stands, if the agent gave this answer."""

    def look(*arguments):
        return env.browser.call(env.window.look, *arguments)

    url = env._to_real(current_url(env._observe()))
    return evaluators.score(env.task, answer, url, look)


@browser
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_template_is_solved_by_its_plan_and_by_nothing_else(every):
    """Four episodes at a time.

    Before its plan is played, each episode is scored as it stands: with no answer and with a wrong
    one.
    """
    numbers = range(0, NUM_TEMPLATES, every)
    todo = queue.SimpleQueue()
    for number in numbers:
        todo.put(number + NUM_TEMPLATES * (tasks.HELD_OUT + number % 3))
    wrong = []
    solved = Counter()  # by site

    def play(env, item):
        env.reset(item)
        answers = [""]
        if "string_match" in env.task["eval"]["eval_types"]:
            answers.append("something else")
        idle_scores = [score_now(env, answer) for answer in answers]
        step = solve(env, item)
        is_lost = "There is no such page" in env._observe()
        is_won = step.done and step.success and step.reward == step.score == 1
        if any(idle_scores) or is_lost or not is_won:
            wrong.append((item, env.objective, idle_scores, step))
        solved[tasks.TEMPLATES[item % NUM_TEMPLATES].site] += 1

    def work():
        env = make_env("webarena")
        while True:
            try:
                item = todo.get_nowait()
            except queue.Empty:
                break
            try:
                play(env, item)
            except Exception as error:
                wrong.append((item, repr(error)))
        env.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(solved.values()) == len(numbers)


@browser
@pytest.mark.parametrize("name, height", [
    ("shop.to_cart", 720),  # what is done twice gives twice the amount
    ("shop.move", 240),  # a form of several fields, which does not fit in the window
])
def test_the_expert_comes_back_to_its_plan_after_another_action(name, height):
    """The agent goes astray once: before or after the last click."""
    env = make_env("webarena", height=height)
    item = item_of(name)
    env.reset(item)
    num_replies = 0
    while not env.step(env.expert()).done:
        num_replies += 1
    for num_before in (num_replies - 1, num_replies):
        env.reset(item)
        for _ in range(num_before):
            env.step(env.expert())
        env.step("```goto [http://localhost/]```")
        assert env.expert() == env.expert()
        step = play_on_by_expert(env)
        assert step.done and step.success, num_before
    env.close()


def play_on_by_expert(env):
    """-> the last step of at most 30"""
    for _ in range(30):
        step = env.step(env.expert())
        if step.done:
            break
    return step


@browser
def test_an_item_begins_the_same_episode_every_time(env):
    item = item_of("shop.open_product")
    first = env.reset(item)
    assert env.reset(item) == first  # numbers, names, addresses
    assert first.startswith(
        "OBSERVATION:\nTab 0 (current): Harbour Market\n\n[1] RootWebArea 'Harbour Market'"
    )
    assert "\nURL: http://shop.localhost/\n" in first
    intent = tasks.make(item)[0]["intent"]
    assert first.endswith(f"OBJECTIVE: {intent}\nPREVIOUS ACTION: None")
    assert not re.search(r"localhost:\d", first)
    for bad_item in (-1, "1", True):
        with pytest.raises(ValueError):
            env.reset(bad_item)


@browser
def test_replies_that_cannot_be_carried_out_are_answered_with_a_hint(env):
    with pytest.raises(EnvError, match="before reset"):
        env.step("```go_back```")
    first = env.reset(item_of("shop.open_product"))
    for reply in (
        "",
        "click [5]",
        "```click [5]``` ```click [5]```",
        "```click [5]",
        "\ud800",
        "```dance```",
    ):
        step = env.step(reply)
        assert not step.valid and not step.done
        assert step.observation == env.hint
        assert step.reward == step.score == 0
    for reply in (
        "```click [500]```",
        "```type [2] [a] [1]```",
        "```press [nokey]```",
        "```press [++]```",
        "```press [a+b+c+dd]```",
        "```press [\x00]```",
        "```tab_focus [5]```",
        "```go_back```",
        "```go_forward```",
        "```goto [http://]```",
        "```press [" + "a" * 1000 + "]```",
    ):
        step = env.step(reply)
        assert not step.valid and not step.done
        assert step.observation != env.hint
    step = env.step("```goto [http://shop.localhost/%zz\n\n\x00]```")
    assert "There is no such page" in step.observation
    assert page_of(env.step("```go_back```").observation) == page_of(first)


@browser
def test_an_episode_from_its_first_page_to_its_reward(env):
    item = item_of("shop.open_product")
    env.reset(item)
    step = env.step(f"I search. {env.expert()}")
    assert step.valid and "results for" in step.observation
    assert "PREVIOUS ACTION: type [" in step.observation
    step = env.step(env.expert())
    assert "URL: http://shop.localhost/product/" in step.observation
    step = env.step("```stop```")
    assert step.done and step.success and step.reward == step.score == 1
    again = env.step("```go_back```")
    assert again.done and again.success and again.reward == 0
    env.reset(item)
    step = env.step("```stop [done]```")
    assert step.done and not step.success and step.reward == step.score == 0


@browser
def test_every_action_does_what_it_says(env):
    def do(action):
        step = env.step(f"```{action}```")
        assert step.valid, step
        return step.observation

    # Links and the history.
    text = env.reset(item_of("shop.category"))
    text = do(f"click [{tree.find(text, 'link', 'Audio')}]")
    audio = "http://shop.localhost/category/audio"
    assert current_url(text) == audio
    assert current_url(do("go_back")) == "http://shop.localhost/"
    assert current_url(do("go_forward")) == audio
    assert current_url(do("hover [5]")) == audio

    # Scrolling.
    assert "Next page" not in do("goto [http://forum.localhost/]")
    text = do("scroll [down]")
    assert "Next page" in text and "link 'Commonplace'" not in text
    assert "Next page" not in do("scroll [up]")
    do("go_back")

    # Tabs.
    assert "Tab 0: Audio | Tab 1 (current): " in do("new_tab")
    forums = "http://forum.localhost/forums"
    text = do(f"goto [{forums}]")
    assert "Tab 0: Audio | Tab 1 (current): Forums" in text
    assert current_url(text) == forums
    # An evaluator that reads another page leaves the current tab as it is.
    for address, title in ((env._to_real(audio), "Audio"), ("last", "Forums")):
        assert title in env.browser.call(env.window.look, address, "document.title")
    assert current_url(do("tab_focus [0]")) == audio
    text = do("close_tab")
    assert "Tab 0 (current): Forums" in text and "Tab 1" not in text

    # Writing and keys.
    text = do(f"type [{tree.find(text, 'searchbox', 'Search posts')}] [trouble] [0]")
    assert current_url(text) == forums and "StaticText 'trouble'" in text
    assert current_url(do("press [Enter]")) == "http://forum.localhost/search?q=trouble"
    text = do("goto [shop.localhost/account/edit]")
    text = do(f"type [{tree.find(text, 'textbox', 'City')}] [Somewhere [New]] [0]")
    assert "StaticText 'Somewhere [New]'" in text
    env.window.append = True
    text = do(f"type [{tree.find(text, 'textbox', 'City')}] [+] [0]")
    assert re.search(r"StaticText '.*\+.*'", text) and "Somewhere" in text

    # Lists.
    text = do("goto [http://shop.localhost/product/101/review]")
    text = do(f"click [{tree.find(text, 'option', '2 stars')}]")
    assert re.search(r"option '2 stars'.* selected: True", text)

    # There is an end to the tabs.
    for _ in range(browsers.MAX_TABS - 1):
        do("new_tab")
    assert not env.step("```new_tab```").valid


class SilentHandler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def http_server(handler):
    """A server on a free port of this machine -> the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


SECRET = "what another server of this machine says"


@contextmanager
def bystander():
    """Another server on this machine, as there may be -> (its port, what it was asked for).

    A connection without a request counts too.
    """
    seen = []

    class Bystander(SilentHandler):
        def handle(self):
            seen.append("connection")
            super().handle()

        def do_GET(self):
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(f"<title>{SECRET}</title><p>{SECRET}</p>".encode())

        do_POST = do_GET

    with http_server(Bystander) as port:
        yield port, seen


@browser
def test_a_refused_combination_of_keys_leaves_no_key_down(env):
    page = env.reset(0)
    link = re.search(r"\[(\d+)\] link", page)[1]
    step = env.step("```press [shift+foo]```")
    assert not step.valid and "There is no key 'shift+foo'" in step.observation
    assert env.step(f"```click [{link}]```").valid
    # With the shift key down the link would have opened in another tab.
    assert env.browser.call(lambda: len(env.window.context.pages)) == 1


@browser
def test_no_other_address_can_be_opened(env):
    env.reset(0)
    sites_port = webarena.embedded_websites().port
    with bystander() as (port, seen):
        for address in (
            "file:///etc/passwd",
            "http://example.com/",
            "https://shop.localhost/",
            "chrome://version",
            "javascript:alert(1)",
            "data:text/html,hi",
            "about:blank",
            "view-source:http://a/",
            f"http://localhost:{port}/",
            f"http://127.0.0.1:{sites_port}/",
            f"http://shop.localhost:{port}/",
            "http://shop.localhost@example.com/",
            f"http://shop.localhost:{sites_port}@example.com/",
            "http://shop.localhost.example.com/",
            "//example.com",
            "\\\\example.com",
            f"http://shop.localhost:{sites_port}0/",
        ):
            step = env.step(f"```goto [{address}]```")
            assert not step.valid, address
            assert step.observation == "That address is not part of these sites.", address
        assert seen == []


@browser
def test_no_page_makes_the_browser_request_another_address(env):
    def evaluate(script, *arguments):
        env.browser.call(lambda: env.window.page.evaluate(script, *arguments))

    env.reset(0)
    with bystander() as (port, seen):
        other = f"http://localhost:{port}"
        links = (f"{other}/link", "file:///etc/passwd", "http://example.com/")
        page = "".join(f"<a href='{link}'>go {i}</a> " for i, link in enumerate(links))
        page += f"<img src='{other}/img'><iframe src='{other}/frame'></iframe>"
        set_page = "html => { document.body.innerHTML = html }"

        evaluate(set_page, page)
        fetch = f"fetch('{other}/fetch', {{mode: 'no-cors'}}).catch(() => 0)"
        socket = f"try {{ new WebSocket('ws://localhost:{port}/socket') }} catch (e) {{}}"
        for script in (fetch, socket):
            evaluate(f"() => {{ {script} }}")

        text = env._observe()
        for i in range(len(links)):
            number = tree.find(text, "link", f"go {i}")
            assert number is not None
            step = env.step(f"```click [{number}]```")
            assert "root:" not in step.observation
            if "go 0" not in step.observation:  # Chromium's page about a blocked address
                env.step("```goto [http://shop.localhost/]```")
                evaluate(set_page, page)
                text = env._observe()
        time.sleep(0.3)  # a request that was let through would arrive by now
        assert seen == []


def pages_before_the_first(env):
    """The addresses in the tab's history before the first page of this episode."""
    history = env.browser.call(lambda: env.window._cdp("Page.getNavigationHistory"))
    urls = [entry["url"] for entry in history["entries"][:-2]]
    return [url for url in urls if url != "about:blank"]


@browser
def test_two_episodes_in_one_browser_do_not_meet():
    one, other = make_env("webarena"), make_env("webarena")
    item = item_of("shop.move")
    assert one.reset(item) == other.reset(item)
    assert one.browser is other.browser
    assert solve(one, item).success
    account = "```goto [http://shop.localhost/account]```"
    assert "Lane" in one.task["intent"]  # the street of the new address
    assert "Lane" not in page_of(other.step(account).observation)
    assert other.step("```stop```").reward == 0

    # Nor does an episode meet the one before it in the same window.
    one.reset(item)
    assert "Lane" not in page_of(one.step(account).observation)
    assert not one.step("```tab_focus [1]```").valid
    assert not pages_before_the_first(one)
    one.close()
    other.close()


@browser
def test_a_browser_that_is_killed_costs_its_episodes_and_nothing_else():
    one, other = make_env("webarena"), make_env("webarena")
    one.reset(0)
    other.reset(1)
    pid = one.browser.pid
    os.kill(pid, signal.SIGKILL)
    for env in (one, other):
        with pytest.raises(EnvError, match="browser"):
            env.step("```click [3]```")
        with pytest.raises(EnvError, match="before reset"):
            env.step("```click [3]```")
    assert solve(one, 0).success and one.browser.pid != pid
    assert solve(other, 1).success
    one.close()
    other.close()


class Doomed(webarena.WebArena):
    """Its browser is killed in the second turn."""

    turn = 0

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            os.kill(self.browser.pid, signal.SIGKILL)
        return super().step("```scroll [down]```")


@browser
def test_a_rollout_outlives_a_browser_that_is_killed(tiny):
    made = []

    def make(_):
        made.append(webarena.WebArena() if made else Doomed())
        return made[-1]

    with EnvPool(make=make) as pool:
        names = ["webarena_0", "webarena_1"]
        one, two = rollout(*tiny, pool, names, 3, max_tokens=4, retries=0, slots=1)
    assert one.status == "env_error" and "browser" in one.error and one.reward == 0
    assert two.status == "horizon" and two.turns == 3


@browser
def test_a_page_that_hangs_is_ended_by_the_watchdog(monkeypatch):
    env = make_env("webarena", width=1200)
    env.reset(0)
    hang = "() => { setTimeout(() => { while (true) {} }, 50) }"
    env.browser.call(lambda: env.window.page.evaluate(hang))
    time.sleep(0.3)
    monkeypatch.setattr(browsers, "JOB_TIMEOUT", 2.0)
    start = time.monotonic()
    with pytest.raises(EnvError):
        env.step("```click [3]```")
    assert time.monotonic() - start < 15
    monkeypatch.undo()  # on a busy machine a new browser takes more than two seconds
    assert solve(env, 0).success
    env.close()


def test_a_browser_thread_that_was_given_up_ends_with_its_job(monkeypatch):
    """Else its Chromium, started late on a busy machine, would stay for ever."""
    monkeypatch.setattr(browsers, "JOB_TIMEOUT", -9.5)  # the thread is given up 10 seconds later
    browser = browsers.Browser("no program", [])
    late = threading.Event()
    with pytest.raises(EnvError, match="no answer"):
        browser.call(late.wait)
    assert browser.thread.is_alive()
    late.set()
    browser.thread.join(30)
    assert not browser.thread.is_alive()


# ---- the tiny model ----


@browser
def test_the_tiny_model_plays_and_a_seed_repeats(tiny):
    def play():
        names = [f"webarena_{number}" for number in range(76_000, 76_060, 20)]
        with EnvPool(options={"webarena": {"height": 240}}) as pool:
            return rollout(*tiny, pool, names, 2, samples=2, max_tokens=32, seed=3)

    one, two = play(), play()
    assert one and all(t.status in ("done", "horizon") for t in one)
    assert sum(t.valid_actions for t in one) > 0.75 * sum(t.turns for t in one)
    assert [t.tokens for t in one] == [t.tokens for t in two]
    assert [t.logprobs for t in one] == [t.logprobs for t in two]


@browser
def test_the_tiny_model_gets_short_pages_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/

    def training(*arguments):
        return parse_config(["--out", "runs/never-made", "--env", *arguments]).env_args

    def evaluating(*arguments):
        return evaluation.parse_eval_config(["--env", *arguments]).env_args

    short = "webarena.height=240"
    assert training("webarena") == short
    assert training("babyai,webarena") == short
    assert training("babyai") == ""
    tall = "webarena.height=720"
    assert training("webarena", "--env_args", tall) == tall
    narrow = "webarena.width=900"
    assert training("babyai,webarena", "--env_args", narrow) == f"{short} {narrow}"
    assert evaluating("webarena", "--env_args", narrow) == f"{short} {narrow}"
    assert training("webarena", "--model", str(TINY_MODEL)) == ""
    assert evaluating("webarena") == short

    run = tmp_path / "run"  # of an agent that was trained in another world
    shutil.copytree(TINY_MODEL, run / "final")
    flags = {"env": "babyai", "algo": "grpo", "model": "tiny", "env_args": "", "horizon": "3,4"}
    (run / "config.json").write_text(json.dumps(flags))
    assert evaluating("webarena", "--model", str(run / "final")) == short


# ---- the commands ----


@browser
def test_a_person_is_told_where_the_sites_are():
    command = [sys.executable, "envs.py", "play", "--env", "webarena", "--item", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = None
    for line in process.stdout:
        address = re.search(r"http://localhost:(\d+)/\?episode=\w+", line)
        if address:
            break
    port = address[1]
    home = requests.get(address[0].replace("localhost", "127.0.0.1"), timeout=10).text
    shop = re.search(r'href="(http://shop.localhost:\d+/\?episode=\w+)"', home)[1]
    # Names under localhost resolve in every browser, but not for every other program.
    url = shop.replace("shop.localhost", "127.0.0.1")
    page = requests.get(url, headers={"Host": f"shop.localhost:{port}"}, timeout=10)
    assert page.status_code == 200 and "Harbour Market" in page.text
    replies = "```goto [http://shop.localhost/category/kitchen]```\n```stop```\n"
    rest, _ = process.communicate(replies, timeout=60)
    assert process.returncode == 0 and "You did it." in rest


@browser
def test_our_server_speaks_webarenas_bodies():
    pytest.importorskip("fastapi")
    command = [sys.executable, "envs.py", "serve", "--env", "webarena", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search("http://.*", server.stdout.readline())[0].strip()

        def call(path, **body):
            return requests.post(f"{url}/{path}", json=body, timeout=60).json()

        def act(action):
            return call("step", env_idx=env_idx, action=action)

        # The bodies of one episode.
        env_idx = call("create")["env_idx"]
        first = call("reset", env_idx=env_idx, seed=0, idx=0)
        assert set(first) == {"observation", "sites", "object"}
        assert first["sites"] == ["shopping"] and first["object"] in first["observation"]
        step = act("```goto [http://shop.localhost/category/kitchen]```")
        assert step["terminated"] is step["truncated"] is False
        assert step["reward"] == 0 and "info" in step
        observation = requests.get(f"{url}/observation", params={"env_idx": env_idx}, timeout=60)
        assert observation.json() == step["observation"]
        assert act("```stop```")["terminated"] is True

        # A client of the server and an environment in this process are the same.
        far, near = make_env("webarena", url=url), make_env("webarena")
        assert far.whole_reply and far.prompt == near.prompt
        assert far.reset(3) == near.reset(3)
        for reply in ("nonsense", "```click [500]```", "```scroll [down]```", "```stop [x]```"):
            far.socket.shutdown(socket.SHUT_RDWR)  # as after a pause
            assert far.step(reply) == near.step(reply)
        far.close()
        near.close()
    finally:
        server.terminate()
        assert server.wait(10) == 0


# ---- sites of the user's own: small pages as WebArena's sites have them ----

MEMBERS_PAGE = """<title>Members</title><table>
<tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@ann</span></td>
<td class='col-max-role'><span>Owner</span></td></tr>
<tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@bob</span></td>
<td class='col-max-role'><span>Guest</span></td></tr></table>"""
PAGES = {
    "/": (
        "<title>One Stop Market</title><a href='/wishlist/'>Wish list</a> "
        "<a href='/f/books/59421/a-title'>A post</a> "
        "<a href='/project/-/members'>Members</a>"
        "<a href='http://outside.example/'>outside</a>"
    ),
    "/wishlist/": (
        "<title>Wish list</title>"
        "<div class='products-grid wishlist'>2 Orchid Roots &amp; Bulbs</div>"
    ),
    "/f/books/59421/a-title": "<title>A post</title><p>in the long form</p>",
    "/f/books/59421/": (
        "<title>A post</title>"
        "<div class='submission__inner'>what is the recommended console</div>"
    ),
    "/project/-/members": MEMBERS_PAGE,
    "/sales/order/view/order_id/187/": (
        "<title>Order</title><div class='order-details-items'>Canon photo printer</div>"
    ),
    "/form": (
        "<title>Form</title><input name='title' value='Dark Mode'>"
        "<button onclick=\"document.querySelector('input').value = 'Light'\">Change</button>"
    ),
}
REST = {
    "/rest/V1/orders": {"items": [{"increment_id": "000000187"}]},
    "/rest/V1/products/B00A/reviews": [
        {"nickname": "x", "ratings": [{"percent": 20}]},
        {"nickname": "Emma", "ratings": [{"percent": 100}]},
    ],
    "/rest/V1/products/B00B/reviews": [],
}


def official(intent, start="__SHOPPING__", **check):
    """A task as in WebArena's own file."""
    return {
        "sites": ["shopping"],
        "task_id": 0,
        "require_login": True,
        "storage_state": "./.auth/shopping_state.json",
        "start_url": start,
        "geolocation": None,
        "intent_template": intent,
        "instantiation_dict": {},
        "intent": intent,
        "require_reset": False,
        "intent_template_id": 0,
        "eval": {
            "eval_types": [],
            "reference_answers": None,
            "reference_url": None,
            "program_html": None,
            **check,
        },
    }


def says(intent, **references):
    """A task whose answer is checked."""
    return official(intent, eval_types=["string_match"], reference_answers=references)


def on_page(intent, url, locator, prepare=(), **contents):
    """A task that is checked by what a page holds."""
    target = {"url": url, "locator": locator, "required_contents": contents}
    if prepare:
        target["prep_actions"] = list(prepare)
    return official(intent, eval_types=["program_html"], program_html=[target])


MEMBERS = "__GITLAB__/project/-/members"
ROLE = "func:gitlab_get_project_memeber_role(__page__, '{}')"
AUTHOR = "func:shopping_get_sku_latest_review_author('{}')"
RATING = "func:shopping_get_sku_latest_review_rating('{}')"
POST_URL = "func:reddit_get_post_url('__last_url__')"
LATEST_ORDER = "func:shopping_get_latest_order_url()"


def outer_text(selector):
    return f"document.querySelector('{selector}').outerText"


EITHER = official(
    "either of two",
    eval_types=["string_match", "url_match"],
    reference_answers={"must_include": ["roots"]},
    reference_url="__SHOPPING__/wishlist/",
    url_note="GOLD in PRED",
)
GO_THERE = official(
    "go there",
    eval_types=["url_match"],
    reference_url="__SHOPPING__/wishlist |OR| __SHOPPING__/nowhere",
)
WISH_LIST = on_page(
    "the wish list",
    "__SHOPPING__/wishlist/",
    outer_text(".products-grid.wishlist"),
    must_include=["2 Orchid Roots & Bulbs |OR| nothing"],
)
NO_TABLE = on_page(
    "a number that is 0",
    "__SHOPPING__/wishlist/",
    "document.querySelectorAll('table').length",
    exact_match="0",
)
THE_POST = on_page(
    "a post",
    POST_URL,
    outer_text(".submission__inner"),
    exact_match="What is the recommended console",
)
THE_ORDER = on_page(
    "the last order",
    LATEST_ORDER,
    outer_text(".order-details-items"),
    must_include=["Canon photo printer"],
)
PREPARED = on_page(
    "prepared",
    "__SHOPPING__/form",
    "document.querySelector('input[name=\"title\"]').value",
    prepare=["document.querySelector('button').click()"],
    exact_match="Light",
)
A_POST = "/f/books/59421/a-title"
OFFICIAL = [  # task, the path to open first, the right answer, a wrong answer or None
    (says("exact", exact_match="12"), "/", "12", "13"),
    (EITHER, "/wishlist/", "Roots", "leaves"),
    (GO_THERE, "/wishlist/", "", None),
    (says("unachievable", fuzzy_match="N/A"), "/", "N/A", "yes"),
    (WISH_LIST, "/", "", None),
    (NO_TABLE, "/", "", None),
    (on_page("the whole page", "last", "", must_include=["long form"]), A_POST, "", None),
    (THE_POST, A_POST, "", None),
    (on_page("a role", MEMBERS, ROLE.format("bob"), must_include=["Guest"]), "/", "", None),
    (THE_ORDER, "/", "", None),
    (on_page("an author", "last", AUTHOR.format("B00A"), exact_match="Emma"), "/", "", None),
    (on_page("a rating", "last", RATING.format("B00A"), exact_match="100"), "/", "", None),
    (PREPARED, "/", "", None),
]
NEVER = [  # these fail whatever is done
    on_page("another role", MEMBERS, ROLE.format("ann"), must_include=["Guest"]),
    on_page("nobody", MEMBERS, ROLE.format("eve"), must_include=["Guest"]),
    on_page("no such part", "last", outer_text(".none"), exact_match="x"),
    on_page("no review", "last", AUTHOR.format("B00B"), exact_match="Emma"),
    on_page("one is missing", "last", "", must_include=["Wish list", "no such words"]),
]


@contextmanager
def own_sites(folder):
    """Serve PAGES and REST -> (the address, the list of requests).

    `folder` gets tasks.json and auth/, with a cookie that logs in.
    """
    asked = []  # (path, cookie, authorization)

    class Pages(SilentHandler):
        def do_GET(self):
            headers = self.headers
            asked.append((self.path, headers.get("Cookie"), headers.get("Authorization")))
            path = self.path.partition("?")[0]
            if path in REST:
                data, kind = json.dumps(REST[path]), "application/json"
            else:
                data, kind = PAGES.get(path, ""), "text/html; charset=utf-8"
            self.send_response(200 if data else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data.encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"token"')

    all_tasks = [task for task, *_ in OFFICIAL] + NEVER + [official("elsewhere", "__MAP__")]
    (folder / "tasks.json").write_text(json.dumps(all_tasks))
    cookie = {
        "name": "login",
        "value": "emma",
        "domain": "127.0.0.1",
        "path": "/",
        "expires": -1,
        "httpOnly": False,
        "secure": False,
        "sameSite": "Lax",
    }
    (folder / "auth").mkdir()
    state = {"cookies": [cookie], "origins": []}
    (folder / "auth/shopping_state.json").write_text(json.dumps(state))
    with http_server(Pages) as port:
        yield f"http://127.0.0.1:{port}", asked


@browser
def test_official_tasks_are_played_on_sites_of_the_users_own(tmp_path, monkeypatch):
    with own_sites(tmp_path) as (url, asked):
        monkeypatch.setenv("SHOPPING", url)
        env = make_env(
            "webarena", tasks=f"{tmp_path}/tasks.json", gitlab=url, storage=f"{tmp_path}/auth"
        )

        # Every task is solved by what it asks for, and by nothing else.
        for item, (task, path, answer, wrong) in enumerate(OFFICIAL):
            seen = env.reset(item)
            assert "URL: http://onestopmarket.com/" in seen and url not in seen
            assert f"OBJECTIVE: {task['intent']}" in seen
            if path != "/":
                assert env.step(f"```goto [http://onestopmarket.com{path}]```").valid
            step = env.step(f"```stop [{answer}]```")
            assert step.success and step.reward == 1, task["intent"]
            if wrong is not None:
                env.reset(item)
                assert env.step(f"```stop [{wrong}]```").reward == 0
            elif "url_match" in task["eval"]["eval_types"]:
                env.reset(item)
                assert env.step("```stop []```").reward == 0
        for item, task in enumerate(NEVER, len(OFFICIAL)):
            env.reset(item)
            assert env.step("```stop [x]```").reward == 0, task["intent"]

        # The cookie of the storage-state file and the token of the REST interface were sent.
        assert any(cookie == "login=emma" for _, cookie, _ in asked)
        assert any(authorization == "Bearer token" for _, _, authorization in asked)

        # Other sites are not part of the world.
        number = tree.find(env.reset(0), "link", "outside")
        assert number is not None
        env.step(f"```click [{number}]```")
        assert "outside.example" not in str(asked)
        assert not env.step("```goto [http://outside.example/]```").valid

        with pytest.raises(ValueError, match="MAP"):
            env.reset(len(OFFICIAL) + len(NEVER))
        with pytest.raises(ValueError, match="items 0 to"):
            env.reset(10_000)
        env.close()

    gone = make_env("webarena", tasks=f"{tmp_path}/tasks.json")
    with pytest.raises(EnvError):  # the site does not answer any more
        gone.reset(0)
    gone.close()


# ---- ways from an allowed site to another server ----

CODES = (301, 302, 303, 307, 308)
WORKER = """fetch('/302', {mode: 'no-cors'}).catch(() => 0);
fetch('OTHER/worker', {mode: 'no-cors'}).catch(() => 0);
new WebSocket('ws://HOST/worker');
try { importScripts('/302') } catch (e) {}"""
WAYS = {  # path -> a page that leads to another server at once, or when its button is clicked
    "/refresh": "<meta http-equiv='refresh' content='0; url=OTHER/refresh'>",
    "/location": "<script>location.href = 'OTHER/location'</script>",
    "/replace": "<script>location.replace('/302')</script>",
    "/frame": "<iframe src='/302'></iframe><iframe src='OTHER/frame'></iframe>",
    "/nested": "<iframe src='/frame'></iframe><iframe srcdoc=\"<img src='/302'>\"></iframe>",
    "/parts": "<img src='/302'><script src='/307'></script><link rel='stylesheet' href='/301'>"
    "<object data='/302'></object><embed src='/302'><video src='/302'></video>",
    "/early": "<link rel='preconnect' href='OTHER'><link rel='prefetch' href='/302'>"
    "<link rel='preload' as='script' href='/302'><link rel='dns-prefetch' href='OTHER'>"
    "<script type='speculationrules'>{\"prerender\": [{\"urls\": [\"/302\"]}]}</script>",
    "/fetch": "<p id='out'></p><script>fetch('/302').then(r => r.text()).then(text => "
    "{ document.querySelector('#out').innerText = text }).catch(() => 0)</script>",
    "/beacon": "<script>navigator.sendBeacon('/307', 'x'); new EventSource('/302');"
    "const x = new XMLHttpRequest(); x.open('POST', '/308'); x.send('x')</script>",
    "/sockets": "<script>new WebSocket('ws://HOST/socket'); new WebSocket('/302')</script>",
    "/worker": "<script>new Worker('/worker.js'); new SharedWorker('/worker.js')</script>",
    "/turn": "<script>const c = new RTCPeerConnection({iceServers: [{username: 'a', "
    "credential: 'b', urls: 'turn:HOST?transport=tcp'}]}); c.createDataChannel('a');"
    "c.createOffer().then(offer => c.setLocalDescription(offer))</script>",
    "/blank": "<script>window.open('/302')</script>",
    "/link": "<a href='/302'>Go</a>",
    "/ping": "<a href='/refresh' ping='/307 OTHER/ping'>Go</a>",
    "/popup": "<a href='/302' target='_blank'>Go</a>",
    "/opened": "<button onclick=\"window.open('/302')\">Go</button>",
    "/written": "<button onclick=\"window.open().location = 'OTHER/written'\">Go</button>",
    "/form": "<form action='OTHER/form' method='post'><button>Go</button></form>",
    "/form302": "<form action='/302' method='post'><button>Go</button></form>",
    "/form307": "<form action='/307' method='post'><button>Go</button></form>",
    "/form308": "<form action='/308'><button>Go</button></form>",
}


@contextmanager
def leading_site(folder, other):
    """Serve WAYS, redirects to `other` (host:port) and a worker -> the address of the site."""

    class Leading(SilentHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            code, headers, page = 200, {"Content-Type": "text/html"}, ""
            if path.strip("/").isdecimal():
                code = int(path.strip("/"))
                headers["Location"] = f"http://{other}{path}"
            elif path == "/chain":
                code, headers["Location"] = 302, "/chain2"
            elif path == "/chain2":
                code, headers["Location"] = 307, "/308"
            elif path == "/header":
                headers["Refresh"] = f"0; url=http://{other}/header"
            elif path == "/worker.js":
                headers["Content-Type"], page = "text/javascript", WORKER
            elif path in WAYS:
                page = f"<title>{path}</title><p>here</p>{WAYS[path]}"
            else:
                page = "<title>home</title>"
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            page = page.replace("OTHER", f"http://{other}").replace("HOST", other)
            self.wfile.write(page.encode())

        do_POST = do_GET

    (folder / "tasks.json").write_text(json.dumps([official("look around")]))
    with http_server(Leading) as port:
        yield f"http://127.0.0.1:{port}"


@browser
def test_nothing_leads_from_a_site_to_another_server(tmp_path, monkeypatch):
    paths = [*(f"/{code}" for code in CODES), "/chain", "/header", *WAYS]
    with bystander() as (port, seen), leading_site(tmp_path, f"127.0.0.1:{port}") as site:
        monkeypatch.setenv("SHOPPING", site)
        env = make_env("webarena", tasks=f"{tmp_path}/tasks.json")
        env.reset(0)
        for path in paths:
            has_button = ">Go</" in WAYS.get(path, "")
            for _ in range(10):
                text = env.step(f"```goto [http://onestopmarket.com{path}]```").observation
                assert SECRET not in text, path
                number = tree.find(text, "link", "Go") or tree.find(text, "button", "Go")
                if number is not None or not has_button:
                    break  # else a window of the page before has opened just now, in front
            assert (number is not None) == has_button, path
            if has_button:
                assert SECRET not in env.step(f"```click [{number}]```").observation, path
            time.sleep(0.2)  # a request that was let through would arrive by now
            assert seen == [], path
        assert SECRET not in env._observe()
        env.close()


@browser
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_redirect_to_another_server_is_said_and_the_episode_goes_on(
        tmp_path, monkeypatch, host):
    with bystander() as (port, seen), leading_site(tmp_path, f"{host}:{port}") as site:
        monkeypatch.setenv("SHOPPING", site)
        env = make_env("webarena", tasks=f"{tmp_path}/tasks.json")
        env.reset(0)
        step = env.step("```goto [http://onestopmarket.com/302]```")
        assert not step.valid and "not part of these sites" in step.observation
        step = env.step("```goto [http://onestopmarket.com/link]```")
        assert step.valid
        number = tree.find(step.observation, "link", "Go")
        step = env.step(f"```click [{number}]```")
        assert step.valid and SECRET not in step.observation
        env.step("```go_back```")
        deadline = time.monotonic() + 30  # a busy machine shows the page before it is loaded
        while "here" not in env._observe():
            assert time.monotonic() < deadline
            time.sleep(0.1)

        # Where a task begins with such a redirect, the addresses are wrong, not the agent.
        env.own_tasks[0]["start_url"] = "__SHOPPING__/302"
        message = f"leads to http://{host}:{port}/302, which is none of the sites"
        with pytest.raises(EnvError, match=message):
            env.reset(0)
        assert seen == []
        env.close()
