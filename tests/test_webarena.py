"""WebArena: replies, trees, evaluators, a real browser with its faults, and the user's own sites.

The tests of the embedded sites and of their tasks stand in websites/tests.
"""

import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import requests
from serving import Handler, serving

import eval as evaluation
from config import parse_config
from envs import EnvError, EnvPool, categories, env_options, items, make_env, split_item
from rl import TINY_MODEL
from rollout import rollout
from websites import tasks
from worlds import serve
from worlds.play import play
from worlds.webarena import browser as browsers
from worlds.webarena import env as webarena
from worlds.webarena import evaluators, tree
from worlds.webarena.plans import Follower, solve

NUM_TEMPLATES = len(tasks.TEMPLATES)
HAS_BROWSER = importlib.util.find_spec("playwright") and os.access("/usr/bin/chromium", os.X_OK)
browser = pytest.mark.skipif(not HAS_BROWSER, reason="needs playwright and Chromium")


def item_of(name):
    """The first item of a template: that with seed 0."""
    names = [f"{template.site}.{template.make.__name__}" for template in tasks.TEMPLATES]
    return names.index(name)


# ---- replies, trees, evaluators, plans ----


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
    *((reply, None) for reply in (
        "", "click [12]", "```", "```click [12]", "```click [1]``` and ```click [2]```", "``````",
        "```click```", "```click [a]```", "```click [-1]```", "```click [12] now```",
        "```dance [1]```", "```scroll [left]```", "```go_back [1]```", "```goto []```",
        "```type [1]```", "```python\nclick [1]```", "```click [99999999999]```",
        "```stop [" + "a" * 3000 + "]```", "```CLICK [1]```", "\x00```\x00```")),
])
def test_an_action_stands_between_triple_backticks(reply, action):
    assert webarena.parse(reply) == action


def ax_node(node_id, role, name, children=(), **properties):
    """A node as Accessibility.getFullAXTree gives it."""
    return {
        "nodeId": node_id, "backendDOMNodeId": int(node_id), "role": {"value": role},
        "name": {"value": name}, "childIds": list(children),
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
    assert tree.find(text, "link", "It's") == 2 and tree.find(text, "link", "It") is None
    assert tree.render([], {}) == ("", {})


def test_only_what_the_window_shows_has_a_rectangle():
    bounds = [[0, 0, 50, 2000], [10, 20, 30, 40], [10, 790, 30, 40], [10, 300, 0, 20]]
    page = {
        "nodes": {"backendNodeId": [7, 8, 9, 10]}, "scrollOffsetX": 0, "scrollOffsetY": 100,
        "layout": {"nodeIndex": [0, 1, 2, 3], "bounds": bounds},
    }
    found = tree.rectangles({"documents": [page]}, 1280, 720)
    assert found == {7: (0, 0, 50, 720), 9: (10, 690, 40, 720)}


@pytest.mark.parametrize("references, right, wrong", [
    ({"exact_match": "Quest Band"}, ["quest band", ' "Quest Band" '],
     ["Quest", "the Quest Band", ""]),
    ({"must_include": ["blue", "12.50"]}, ["Blue, at $12.50"], ["blue", "12.50", ""]),
    ({"must_include": ["0"]}, ["0", "there are 0."], ["10", "zero", ""]),
    # As NLTK's tokenizer splits these.
    ({"must_include": ["5"]}, ["(5)", "$5", "4, 5", "5%", "5: all", "'5'"],
     ["0.5 stars", "1,5", "5/7", "5-6", "2:5", "5.99", "$4.5"]),
    ({"must_include": ["10"]}, ["10 of them"], ["1", ""]),
    ({"fuzzy_match": "N/A"}, ["N/A", "n/a"], ["", "not possible", "N/A because"]),
    ({"fuzzy_match": ["Alice Brown", "12 km"]}, ["12 KM, alice brown."],
     ["Alice", "Alice Browning 12 km", ""]),
])
def test_strings_are_matched_as_in_webarena(references, right, wrong):
    assert all(evaluators.string_match(references, answer) for answer in right)
    assert not any(evaluators.string_match(references, answer) for answer in wrong)


@pytest.mark.parametrize("reference, right, wrong", [
    ("http://g/a/b", ["http://g/a/b", "http://g/a/b/", "http://g/a/b/c?x=1"],
     ["http://g/a", "http://h/a/b"]),
    ("http://g/i?state=opened&sort=asc", ["http://g/i?sort=asc&state=opened&page=2"],
     ["http://g/i", "http://g/i?state=opened", "http://g/i?state=opened&sort=desc"]),
    ("http://g/a |OR| http://g/b", ["http://g/a", "http://g/b/"], ["http://g/c"]),
    ("http://g/i?label_name%5B%5D=x", ["http://g/i?label_name[]=x"], ["http://g/i?label_name=x"]),
])
def test_addresses_are_matched_as_in_webarena(reference, right, wrong):
    assert all(evaluators.url_match(reference, url) for url in right)
    assert not any(evaluators.url_match(reference, url) for url in wrong)


def test_unknown_evaluators_and_helpers_are_errors_and_no_helper_is_run_as_code():
    with pytest.raises(ValueError, match="magic"):
        evaluators.score({"eval": {"eval_types": ["magic"]}}, "", "", None)
    with pytest.raises(ValueError, match="sounds_like"):
        evaluators.string_match({"sounds_like": "a"}, "a")
    for code in ("__import__('os').getcwd()", "reddit_get_post_url(", "print('a')",
                 "shopping_get_latest_order_url('x')"):
        with pytest.raises(ValueError, match="unknown helper"):
            evaluators.call_helper(code, "", "", None)
    for last, address in (("http://r/f/books/59421/a-title?x=1", "http://r/f/books/59421/"),
                          ("http://r/f/books", "http://r/f/books")):
        code = "reddit_get_post_url('__last_url__')"
        assert evaluators.call_helper(code, "", last, None) == address


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


# ---- items and arguments ----


def item_numbers(split):
    return {split_item(item)[1] for item in items("webarena", split)}


def test_held_out_items_are_of_seeds_that_are_not_trained_on():
    train, test = item_numbers("train"), item_numbers("test")
    assert len(test) >= 200
    assert max(map(tasks.seed_of, train)) < tasks.HELD_OUT <= min(map(tasks.seed_of, test))
    for numbers in (train, test):
        assert {number % NUM_TEMPLATES for number in numbers} == set(range(NUM_TEMPLATES))
    for item, category in categories("webarena").items():
        assert tasks.TEMPLATES[split_item(item)[1] % NUM_TEMPLATES].site == category


def test_an_items_answer_is_right_and_no_answer_or_another_one_is_wrong():
    checked = Counter()
    for number in sorted(item_numbers("test") | set(range(5 * NUM_TEMPLATES))):
        task, _, answer = tasks.make(number)
        check = task["eval"]
        checked.update(check["eval_types"])
        if "string_match" in check["eval_types"]:
            right = [evaluators.string_match(check["reference_answers"], said)
                     for said in ("", "something else", answer)]
            assert right == [False, False, True]
        elif "url_match" in check["eval_types"]:
            assert not evaluators.url_match(check["reference_url"], task["start_url"] + "/")
    assert checked["string_match"] and checked["url_match"]


@browser
def test_arguments_are_checked(tmp_path, monkeypatch):
    for name in webarena.PLACES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bad.json").write_text('[{"intent": "a"}]')
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "good.json").write_text(json.dumps([tasks.make(0)[0]]))
    monkeypatch.chdir(tmp_path)
    for given, named in (
        ("chromium=/nowhere", "/nowhere"), ("tasks=bad.json", "bad.json"),
        ("tasks=empty.json", "empty.json"), ("tasks=none.json", "none.json"),
        ("tasks=good.json", "SHOPPING_ADMIN"), ("shopping=http://a", "tasks="),
        ("storage=/nowhere", "storage"), ("depth=1", "depth"), ("height=0", "x 0 pixels"),
    ):
        with pytest.raises(ValueError, match=named):
            make_env("webarena", **env_options(f"webarena.{given}", ["webarena"])["webarena"])


@pytest.mark.skipif(
    importlib.util.find_spec("webarena") is None, reason="PyPI's libwebarena is not on the path"
)
def test_all_official_tasks_are_read_and_every_evaluator_is_known():
    official_tasks = webarena.read_tasks("official")
    assert len(official_tasks) == 812 and "webarena" not in sys.modules
    kinds = Counter()
    for task in official_tasks:
        check = task["eval"]
        kinds.update(check["eval_types"])
        if "string_match" in check["eval_types"]:
            assert not evaluators.string_match(check["reference_answers"], "\x01")
        kinds.update(re.findall(r"'func:(\w+)", str(check["program_html"])))
    assert sum(map(evaluators.needs_judge, official_tasks)) == 82
    assert kinds["shopping_get_latest_order_url"] and kinds["gitlab_get_project_memeber_role"]
    assert {kind for kind in kinds if "_get_" not in kind} == {
        "string_match", "url_match", "program_html"}


# ---- in the browser ----


@pytest.fixture(scope="module")
def env():
    """One environment for the tests that begin an episode of their own in it."""
    made = make_env("webarena")
    yield made
    made.close()


def page_of(observation):
    """An observation without the objective and the previous action."""
    return observation.split("OBJECTIVE")[0]


def score_now(env, answer):
    """The score of an episode as it stands, if the agent gave this answer."""

    def look(*arguments):
        return env.browser.call(env.window.look, *arguments)

    env._observe()
    shop = env.places.get("SHOPPING", "")
    return evaluators.score(env.task, answer, env._to_real(env.url), look, shop)


@browser
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_template_is_solved_by_its_plan_and_by_nothing_else(every):
    """Four episodes at a time. Before its plan is played, each is scored as it stands: with no
    answer and with a wrong one."""

    def play(number):
        env = make_env("webarena")
        item = number + NUM_TEMPLATES * (tasks.HELD_OUT + number % 3)
        env.reset(item)
        is_asked = "string_match" in env.task["eval"]["eval_types"]
        answers = ["", "something else"] if is_asked else [""]
        idle_scores = [score_now(env, answer) for answer in answers]
        step = solve(env, item)
        is_lost = "There is no such page" in env._observe()
        env.close()
        assert not any(idle_scores) and not is_lost, (item, env.objective, idle_scores)
        assert step.success and step.reward == step.score == 1, (item, env.objective)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(play, range(0, NUM_TEMPLATES, every)))  # raises what they raise


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
        for turn in range(30):
            step = env.step("```goto [http://localhost/]```" if turn == num_before
                            else env.expert())
            assert env.expert() == env.expert()
            if step.done:
                break
        assert step.success, num_before
    env.close()


@browser
def test_an_episode_from_its_first_page_to_its_reward(env):
    item = item_of("shop.open_product")
    first = env.reset(item)
    assert env.reset(item) == first  # numbers, names, addresses
    assert first.startswith(
        "OBSERVATION:\nTab 0 (current): Harbour Market\n\n[1] RootWebArea 'Harbour Market'")
    assert "\nURL: http://shop.localhost/\n" in first and not re.search(r"localhost:\d", first)
    assert first.endswith(f"OBJECTIVE: {tasks.make(item)[0]['intent']}\nPREVIOUS ACTION: None")

    step = env.step(f"I search. {env.expert()}")
    assert step.valid and "results for" in step.observation
    assert "PREVIOUS ACTION: type [" in step.observation
    step = env.step(env.expert())
    assert "URL: http://shop.localhost/product/" in step.observation
    step = env.step("```stop```")
    assert step.done and step.success and step.reward == step.score == 1
    assert env.step("```go_back```") == replace(step, reward=0)
    env.reset(item)
    step = env.step("```stop [done]```")
    assert (step.done, step.success, step.reward, step.score) == (True, False, 0, 0)


@browser
def test_replies_that_cannot_be_carried_out_are_answered_with_a_hint(env):
    for bad_item in (-1, "1", True):
        with pytest.raises(ValueError, match="webarena has items"):
            env.reset(bad_item)
    with pytest.raises(EnvError, match="before reset"):
        make_env("webarena").step("```go_back```")
    first = env.reset(item_of("shop.open_product"))
    for reply in ("", "click [5]", "```click [5]``` ```click [5]```", "\ud800", "```dance```"):
        step = env.step(reply)
        assert not step.valid and not step.done and step.observation == env.hint
        assert step.reward == step.score == 0
    for action in ("click [500]", "type [2] [a] [1]", "press [nokey]", "press [++]",
                   "press [shift+foo]", "press [a+b+c+dd]", "press [\x00]", "tab_focus [5]",
                   "go_back", "go_forward", "goto [http://]", f"press [{'a' * 1000}]"):
        step = env.step(f"```{action}```")
        assert not step.valid and not step.done and step.observation != env.hint
    step = env.step("```goto [http://shop.localhost/%zz\n\n\x00]```")
    assert "There is no such page" in step.observation
    page = env.step("```go_back```").observation
    assert page_of(page) == page_of(first)
    link = re.search(r"\[(\d+)\] link", page)[1]
    assert env.step(f"```click [{link}]```").valid  # with the shift key still down: in a new tab
    assert env.browser.call(lambda: len(env.window.context.pages)) == 1


@browser
def test_every_action_does_what_it_says(env):
    def do(action):
        step = env.step(f"```{action}```")
        assert step.valid, step
        return step.observation

    def find(role, name):
        return tree.find(env.page, role, name)

    # Links and the history.
    audio, forums = "http://shop.localhost/category/audio", "http://forum.localhost/forums"
    env.reset(item_of("shop.category"))
    for action, url in ((f"click [{find('link', 'Audio')}]", audio),
                        ("go_back", "http://shop.localhost/"), ("go_forward", audio),
                        ("hover [5]", audio)):
        assert f"\nURL: {url}\n" in do(action)

    # Scrolling.
    assert "Next page" not in do("goto [http://forum.localhost/]")
    text = do("scroll [down]")
    assert "Next page" in text and "link 'Commonplace'" not in text
    assert "Next page" not in do("scroll [up]")
    do("go_back")

    # Tabs.
    assert "Tab 0: Audio | Tab 1 (current): " in do("new_tab")
    assert "Tab 0: Audio | Tab 1 (current): Forums" in do(f"goto [{forums}]") and env.url == forums
    # An evaluator that reads another page leaves the current tab as it is.
    for address, title in ((env._to_real(audio), "Audio"), ("last", "Forums")):
        assert title in env.browser.call(env.window.look, address, "document.title")
    assert f"URL: {audio}\n" in do("tab_focus [0]")
    text = do("close_tab")
    assert "Tab 0 (current): Forums" in text and "Tab 1" not in text

    # Writing and keys.
    text = do(f"type [{find('searchbox', 'Search posts')}] [trouble] [0]")
    assert env.url == forums and "StaticText 'trouble'" in text
    assert "URL: http://forum.localhost/search?q=trouble\n" in do("press [Enter]")
    do("goto [shop.localhost/account/edit]")
    text = do(f"type [{find('textbox', 'City')}] [Somewhere [New]] [0]")
    assert "StaticText 'Somewhere [New]'" in text
    env.window.append = True
    text = do(f"type [{find('textbox', 'City')}] [+] [0]")
    env.window.append = False
    assert re.search(r"StaticText '.*\+.*'", text) and "Somewhere" in text

    # Lists.
    do("goto [http://shop.localhost/product/101/review]")
    text = do(f"click [{find('option', '2 stars')}]")
    assert re.search(r"option '2 stars'.* selected: True", text)

    # There is an end to the tabs.
    for _ in range(browsers.MAX_TABS - 1):
        do("new_tab")
    assert not env.step("```new_tab```").valid


@browser
def test_two_episodes_in_one_browser_do_not_meet(env):
    one, other = make_env("webarena"), env
    item = item_of("shop.move")
    assert one.reset(item) == other.reset(item) and one.browser is other.browser
    assert solve(one, item).success
    account = "```goto [http://shop.localhost/account]```"
    assert "Lane" in one.task["intent"]  # the street of the new address
    assert "Lane" not in page_of(other.step(account).observation)
    assert other.step("```stop```").reward == 0

    # Nor does an episode meet the one before it in the same window.
    one.reset(item)
    assert "Lane" not in page_of(one.step(account).observation)
    assert not one.step("```tab_focus [1]```").valid
    history = one.browser.call(lambda: one.window._cdp("Page.getNavigationHistory"))
    assert {entry["url"] for entry in history["entries"][:-2]} <= {"about:blank"}
    one.close()


@browser
def test_a_browser_that_is_killed_costs_its_episodes_and_nothing_else(env):
    one, other = make_env("webarena"), env
    one.reset(0)
    other.reset(1)
    pid = one.browser.pid
    os.kill(pid, signal.SIGKILL)
    for each in (one, other):
        with pytest.raises(EnvError, match="browser"):
            each.step("```click [3]```")
        with pytest.raises(EnvError, match="before reset"):
            each.step("```click [3]```")
    assert solve(one, 0).success and one.browser.pid != pid
    assert solve(other, 1).success
    one.close()


@browser
def test_a_page_that_hangs_is_ended_by_the_watchdog(env, monkeypatch):
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


# ---- the tiny model and the commands ----


@browser
def test_the_tiny_model_plays_and_a_seed_repeats(tiny):
    def play():
        names = [f"webarena_{number}" for number in range(76_000, 76_040, 20)]
        with EnvPool(options={"webarena": {"height": 240}}) as pool:
            return rollout(*tiny, pool, names, 2, samples=2, max_tokens=32, seed=3)

    one, two = play(), play()
    assert one and all(t.status in ("done", "horizon") for t in one)
    assert sum(t.valid_actions for t in one) > 0.75 * sum(t.turns for t in one)
    assert [(t.tokens, t.logprobs) for t in one] == [(t.tokens, t.logprobs) for t in two]


@browser
def test_the_tiny_model_gets_short_pages_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/
    short, narrow = "webarena.height=240", "webarena.width=900"
    for worlds, given, expected in (
        ("webarena", [], short),
        ("babyai,webarena", ["--env_args", narrow], f"{short} {narrow}"),
        ("babyai", [], ""),
        ("webarena", ["--model", str(TINY_MODEL)], ""),
    ):
        arguments = ["--out", "runs/never-made", "--env", worlds, *given]
        assert parse_config(arguments).env_args == expected
    assert evaluation.parse_eval_config(["--env", "webarena"]).env_args == short


@browser
def test_a_person_is_told_where_the_sites_are(env, monkeypatch, capsys):
    replies = ["```goto [http://shop.localhost/category/kitchen]```", "```stop```"]

    def reply(prompt):
        if len(replies) == 2:
            address = re.search(r"http://localhost:(\d+)/\?episode=\w+", capsys.readouterr().out)
            home = requests.get(address[0].replace("localhost", "127.0.0.1"), timeout=10).text
            shop = re.search(r'href="(http://shop.localhost:\d+/\?episode=\w+)"', home)[1]
            # Names under localhost resolve in every browser, but not for every other program.
            url = shop.replace("shop.localhost", "127.0.0.1")
            headers = {"Host": f"shop.localhost:{address[1]}"}
            page = requests.get(url, headers=headers, timeout=10)
            assert page.status_code == 200 and "Harbour Market" in page.text
        return replies.pop(0)

    monkeypatch.setattr("builtins.input", reply)
    play("webarena", 0)
    assert "You did it." in capsys.readouterr().out


@browser
def test_our_server_speaks_webarenas_bodies(env):
    uvicorn = pytest.importorskip("uvicorn")
    store = serve.EpisodeStore("webarena")
    server = uvicorn.Server(uvicorn.Config(serve.build_app(store, 8), log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()

    def call(path, **body):
        return requests.post(f"{url}/{path}", json=body, timeout=60).json()

    # The bodies of one episode.
    env_idx = call("create")["env_idx"]
    first = call("reset", env_idx=env_idx, seed=0, idx=0)
    assert set(first) == {"observation", "sites", "object"}
    assert first["sites"] == ["shopping"] and first["object"] in first["observation"]
    goto = "```goto [http://shop.localhost/category/kitchen]```"
    step = call("step", env_idx=env_idx, action=goto)
    assert step["terminated"] is step["truncated"] is False
    assert step["reward"] == 0 and "info" in step
    observation = requests.get(f"{url}/observation", params={"env_idx": env_idx}, timeout=60)
    assert observation.json() == step["observation"]
    assert call("step", env_idx=env_idx, action="```stop```")["terminated"] is True

    # A client of the server and an environment in this process are the same.
    far = make_env("webarena", url=url)
    assert far.whole_reply and far.prompt == env.prompt
    assert far.reset(3) == env.reset(3)
    for reply in ("nonsense", "```click [500]```", "```scroll [down]```", "```stop [x]```"):
        far.socket.shutdown(socket.SHUT_RDWR)  # as after a pause
        assert far.step(reply) == env.step(reply)
    far.close()
    server.should_exit = True
    thread.join(20)
    store.close_envs()
    assert not thread.is_alive()


# ---- other servers on this machine ----


SECRET = "what another server of this machine says"


@contextmanager
def bystander():
    """Another server on this machine, as there may be -> (its port, what it was asked for).

    A connection without a request counts too.
    """
    seen = []

    def answer(request):
        seen.append(request.path)
        return 200, {"Access-Control-Allow-Origin": "*"}, f"<title>{SECRET}</title><p>{SECRET}</p>"

    def handle(request):
        seen.append("connection")
        Handler.handle(request)

    with serving(answer, handle=handle) as port:
        yield port, seen


@browser
def test_no_other_address_can_be_opened(env):
    env.reset(0)
    sites_port = webarena.embedded_websites().port
    with bystander() as (port, seen):
        for address in (
            "file:///etc/passwd", "http://example.com/", "https://shop.localhost/",
            "chrome://version", "javascript:alert(1)", "data:text/html,hi", "about:blank",
            "view-source:http://a/", f"http://localhost:{port}/",
            f"http://127.0.0.1:{sites_port}/", f"http://shop.localhost:{port}/",
            "http://shop.localhost@example.com/",
            f"http://shop.localhost:{sites_port}@example.com/",
            "http://shop.localhost.example.com/", "//example.com", "\\\\example.com",
            f"http://shop.localhost:{sites_port}0/",
        ):
            step = env.step(f"```goto [{address}]```")
            assert not step.valid and "not part of these sites" in step.observation, address
        assert seen == []


# ---- sites of the user's own: small pages as WebArena's sites have them ----


MEMBER = ("<tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@{}</span></td>"
          "<td class='col-max-role'><span>{}</span></td></tr>")
PAGES = {
    "/": "<title>One Stop Market</title><a href='/wishlist/'>Wish list</a> "
         "<a href='http://outside.example/'>outside</a>",
    "/wishlist/": "<title>Wish list</title>"
                  "<div class='products-grid wishlist'>2 Orchid Roots &amp; Bulbs</div>",
    "/f/books/59421/a-title": "<title>A post</title><p>in the long form</p>",
    "/f/books/59421/": "<title>A post</title>"
                       "<div class='submission__inner'>what is the recommended console</div>",
    "/project/-/members": "<title>Members</title><table>"
                          + MEMBER.format("ann", "Owner") + MEMBER.format("bob", "Guest"),
    "/sales/order/view/order_id/187/":
        "<title>Order</title><div class='order-details-items'>Canon photo printer</div>",
    "/form": "<title>Form</title><input name='title' value='Dark Mode'><button onclick=\""
             "document.querySelector('input').value = 'Light'\">Change</button>",
}
REST = {
    "/rest/V1/orders": {"items": [{"increment_id": "000000187"}]},
    "/rest/V1/products/B00A/reviews": [{"nickname": "x", "ratings": [{"percent": 20}]},
                                       {"nickname": "Emma", "ratings": [{"percent": 100}]}],
    "/rest/V1/products/B00B/reviews": [],
}


def official(intent, start="__SHOPPING__", **check):
    """A task as in WebArena's own file."""
    check = {"eval_types": [], "reference_answers": None, "reference_url": None,
             "program_html": None, **check}
    return {"sites": ["shopping"], "task_id": 0, "require_login": True,
            "storage_state": "./.auth/shopping_state.json", "start_url": start,
            "geolocation": None, "intent_template": intent, "instantiation_dict": {},
            "intent": intent, "require_reset": False, "intent_template_id": 0, "eval": check}


def on_page(intent, url, locator, prepare=(), **contents):
    """A task that is checked by what a page holds. locator: a CSS selector, or JavaScript."""
    if locator.startswith("."):
        locator = f"document.querySelector('{locator}').outerText"
    target = {"url": url, "locator": locator, "required_contents": contents}
    if prepare:
        target["prep_actions"] = list(prepare)
    return official(intent, eval_types=["program_html"], program_html=[target])


WISHES = "__SHOPPING__/wishlist/"
MEMBERS = "__GITLAB__/project/-/members"
ROLE = "func:gitlab_get_project_memeber_role(__page__, '{}')"
AUTHOR = "func:shopping_get_sku_latest_review_author('{}')"
RATING = "func:shopping_get_sku_latest_review_rating('{}')"
EITHER = official(
    "either of two", eval_types=["string_match", "url_match"],
    reference_answers={"must_include": ["roots"]},
    reference_url=f"{WISHES} |OR| __SHOPPING__/nowhere", url_note="GOLD in PRED")
A_POST = "/f/books/59421/a-title"
OFFICIAL = [  # task, the path to open first, the right answer, a wrong answer or None
    (EITHER, "/wishlist/", "Roots", "leaves"),
    (on_page("the wish list", WISHES, ".products-grid.wishlist",
             must_include=["2 Orchid Roots & Bulbs |OR| nothing"]), "/", "", None),
    (on_page("a number that is 0", WISHES, "document.querySelectorAll('table').length",
             exact_match="0"), "/", "", None),
    (on_page("the whole page", "last", "", must_include=["long form"]), A_POST, "", None),
    (on_page("a post", "func:reddit_get_post_url('__last_url__')", ".submission__inner",
             exact_match="What is the recommended console"), A_POST, "", None),
    (on_page("a role", MEMBERS, ROLE.format("bob"), must_include=["Guest"]), "/", "", None),
    (on_page("the last order", "func:shopping_get_latest_order_url()", ".order-details-items",
             must_include=["Canon photo printer"]), "/", "", None),
    (on_page("an author", "last", AUTHOR.format("B00A"), exact_match="Emma"), "/", "", None),
    (on_page("a rating", "last", RATING.format("B00A"), exact_match="100"), "/", "", None),
    (on_page("prepared", "__SHOPPING__/form", "document.querySelector('[name=\"title\"]').value",
             prepare=["document.querySelector('button').click()"], exact_match="Light"),
     "/", "", None),
]
NEVER = [  # these fail whatever is done
    on_page("another role", MEMBERS, ROLE.format("ann"), must_include=["Guest"]),
    on_page("nobody", MEMBERS, ROLE.format("eve"), must_include=["Guest"]),
    on_page("no such part", "last", ".none", exact_match="x"),
    on_page("no review", "last", AUTHOR.format("B00B"), exact_match="Emma"),
    on_page("one is missing", "last", "", must_include=["One Stop", "no such words"]),
]


@browser
def test_official_tasks_are_played_on_sites_of_the_users_own(tmp_path, monkeypatch):
    asked = []  # the headers of the requests

    def answer(request):
        asked.append((request.path, request.headers.get("Cookie"),
                      request.headers.get("Authorization")))
        path = request.path.partition("?")[0]
        if request.command == "POST":
            return 200, {}, '"token"'
        if path in REST:
            return 200, {"Content-Type": "application/json"}, json.dumps(REST[path])
        return 200 if path in PAGES else 404, {}, PAGES.get(path, "")

    all_tasks = [task for task, *_ in OFFICIAL] + NEVER + [official("elsewhere", "__MAP__")]
    (tmp_path / "tasks.json").write_text(json.dumps(all_tasks))
    (tmp_path / "auth").mkdir()
    cookie = {"name": "login", "value": "emma", "domain": "127.0.0.1", "path": "/", "expires": -1,
              "httpOnly": False, "secure": False, "sameSite": "Lax"}
    state = {"cookies": [cookie], "origins": []}
    (tmp_path / "auth/shopping_state.json").write_text(json.dumps(state))
    with serving(answer) as port:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("SHOPPING", url)
        env = make_env(
            "webarena", tasks=f"{tmp_path}/tasks.json", gitlab=url, storage=f"{tmp_path}/auth")

        # Every task is solved by what it asks for, and by nothing else.
        for item, (task, path, right, wrong) in enumerate(OFFICIAL):
            seen = env.reset(item)
            assert "URL: http://onestopmarket.com/" in seen and url not in seen
            assert f"OBJECTIVE: {task['intent']}" in seen
            if path != "/":
                assert env.step(f"```goto [http://onestopmarket.com{path}]```").valid
            assert wrong is None or score_now(env, wrong) == 0
            step = env.step(f"```stop [{right}]```")
            assert step.success and step.reward == 1, task["intent"]
        for item, task in enumerate(NEVER, len(OFFICIAL)):
            env.reset(item)
            assert env.step("```stop [x]```").reward == 0, task["intent"]

        # The cookie of the storage-state file and the token of the REST interface were sent.
        assert any(cookie == "login=emma" for _, cookie, _ in asked)
        assert any(authorization == "Bearer token" for _, _, authorization in asked)

        # Other sites are not part of the world.
        number = tree.find(env.reset(0), "link", "outside")
        env.step(f"```click [{number}]```")
        assert "outside.example" not in str(asked)
        assert not env.step("```goto [http://outside.example/]```").valid
        for item, named in ((len(OFFICIAL) + len(NEVER), "MAP"), (10_000, "items 0 to")):
            with pytest.raises(ValueError, match=named):
                env.reset(item)
    with pytest.raises(EnvError):  # the site does not answer any more
        env.reset(0)
    env.close()


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
    "/parts": "<img src='/302'><img src='OTHER/img'><script src='/307'></script>"
    "<link rel='stylesheet' href='/301'>"
    "<object data='/302'></object><embed src='/302'><video src='/302'></video>",
    "/early": "<link rel='preconnect' href='OTHER'><link rel='prefetch' href='/302'>"
    "<link rel='preload' as='script' href='/302'><link rel='dns-prefetch' href='OTHER'>"
    "<script type='speculationrules'>{\"prerender\": [{\"urls\": [\"/302\"]}]}</script>",
    "/fetch": "<p id='out'></p><script>fetch('/302').then(r => r.text()).then(text => "
    "{ document.querySelector('#out').innerText = text }).catch(() => 0);"
    "fetch('OTHER/fetch', {mode: 'no-cors'}).catch(() => 0)</script>",
    "/beacon": "<script>navigator.sendBeacon('/307', 'x'); new EventSource('/302');"
    "const x = new XMLHttpRequest(); x.open('POST', '/308'); x.send('x')</script>",
    "/sockets": "<script>new WebSocket('ws://HOST/socket'); new WebSocket('/302')</script>",
    "/worker": "<script>new Worker('/worker.js'); new SharedWorker('/worker.js')</script>",
    "/turn": "<script>const c = new RTCPeerConnection({iceServers: [{username: 'a', "
    "credential: 'b', urls: 'turn:HOST?transport=tcp'}]}); c.createDataChannel('a');"
    "c.createOffer().then(offer => c.setLocalDescription(offer))</script>",
    "/blank": "<script>window.open('/302')</script>",
    "/link": "<a href='/302'>Go</a>",
    "/link_local": "<a href='/local'>Go</a>",
    "/direct": "<a href='OTHER/direct'>Go</a>",
    "/file": "<a href='file:///etc/passwd'>Go</a>",
    "/ping": "<a href='/refresh' ping='/307 OTHER/ping'>Go</a>",
    "/popup": "<a href='/302' target='_blank'>Go</a>",
    "/opened": "<button onclick=\"window.open('/302')\">Go</button>",
    "/written": "<button onclick=\"window.open().location = 'OTHER/written'\">Go</button>",
    "/form": "<form action='OTHER/form' method='post'><button>Go</button></form>",
    "/form302": "<form action='/302' method='post'><button>Go</button></form>",
    "/form307": "<form action='/307' method='post'><button>Go</button></form>",
    "/form308": "<form action='/308'><button>Go</button></form>",
}


@pytest.fixture(scope="module")
def led_away(tmp_path_factory):
    """-> (an environment whose only site serves WAYS, redirects to a bystander and a worker; the
    bystander's port; what it was asked for)"""
    tasks_file = tmp_path_factory.mktemp("led") / "tasks.json"
    tasks_file.write_text(json.dumps([official("look around")]))
    with bystander() as (port, seen):
        other = f"127.0.0.1:{port}"
        headers_of = {
            "/chain": (302, {"Location": "/chain2"}),
            "/chain2": (307, {"Location": "/308"}),
            "/header": (200, {"Refresh": f"0; url=http://{other}/header"}),
            "/worker.js": (200, {"Content-Type": "text/javascript"}),
            "/local": (302, {"Location": f"http://localhost:{port}/302"}),
            **{f"/{code}": (code, {"Location": f"http://{other}/{code}"}) for code in CODES},
        }

        def answer(request):
            path = request.path.partition("?")[0]
            status, headers = headers_of.get(path, (200, {}))
            page = f"<title>{path}</title><p>here</p>{WAYS.get(path, '')}"
            if path == "/worker.js":
                page = WORKER
            return status, headers, page.replace("OTHER", f"http://{other}").replace("HOST", other)

        with serving(answer) as site:
            env = make_env("webarena", tasks=str(tasks_file), shopping=f"http://127.0.0.1:{site}")
            env.reset(0)
            yield env, port, seen
            env.close()


@browser
def test_nothing_leads_from_a_site_to_another_server(led_away):
    env, _, seen = led_away
    for path in (*(f"/{code}" for code in CODES), "/chain", "/header", *WAYS):
        has_button = ">Go</" in WAYS.get(path, "")
        for _ in range(10):
            text = env.step(f"```goto [http://onestopmarket.com{path}]```").observation
            number = tree.find(text, "link", "Go") or tree.find(text, "button", "Go")
            if number is not None or not has_button:
                break  # else a window of the page before has opened just now, in front
        assert (number is not None) == has_button, path
        if has_button:
            text += env.step(f"```click [{number}]```").observation
        assert SECRET not in text and "root:" not in text, path
        time.sleep(0.2)  # a request that was let through would arrive by now
        assert seen == [], path
    assert SECRET not in env._observe()


@browser
@pytest.mark.parametrize("host, path, link", [("127.0.0.1", "/302", "/link"),
                                              ("localhost", "/local", "/link_local")])
def test_a_redirect_to_another_server_is_said_and_the_episode_goes_on(led_away, host, path, link):
    env, port, seen = led_away
    env.own_tasks[0]["start_url"] = "__SHOPPING__"
    env.reset(0)
    step = env.step(f"```goto [http://onestopmarket.com{path}]```")
    assert not step.valid and "not part of these sites" in step.observation
    step = env.step(f"```goto [http://onestopmarket.com{link}]```")
    assert step.valid
    step = env.step(f"```click [{tree.find(step.observation, 'link', 'Go')}]```")
    assert step.valid and SECRET not in step.observation
    env.step("```go_back```")
    deadline = time.monotonic() + 30  # a busy machine shows the page before it is loaded
    while "here" not in env._observe():
        assert time.monotonic() < deadline
        time.sleep(0.1)

    # Where a task begins with such a redirect, the addresses are wrong, not the agent.
    env.own_tasks[0]["start_url"] = f"__SHOPPING__{path}"
    with pytest.raises(EnvError, match=f"leads to http://{host}:{port}/302"):
        env.reset(0)
    assert seen == []
