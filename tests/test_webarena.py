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
from serving import Handler, our_server, serving

import envs
import eval as evaluation
from config import parse_config
from envs import EnvError, EnvPool, categories, env_options, items, make_env, split_item
from rl import TINY_MODEL
from rollout import rollout
from websites import tasks
from worlds.play import play
from worlds.webarena import browser as browsers
from worlds.webarena import env as webarena
from worlds.webarena import evaluators, tree
from worlds.webarena.plans import Follower, solve

NUM_TEMPLATES = len(tasks.TEMPLATES)
HAS_BROWSER = importlib.util.find_spec("playwright") and os.access("/usr/bin/chromium", os.X_OK)
browser = pytest.mark.skipif(not HAS_BROWSER, reason="needs playwright and Chromium")


# The first items of templates: those with seed 0.
FIRST_ITEM = {f"{t.site}.{t.make.__name__}": n for n, t in enumerate(tasks.TEMPLATES)}


# ---- replies, trees, evaluators, plans ----


@pytest.mark.parametrize("reply, action", [
    ("```click [12]```", ("click", ("12",))),
    ("I look.\n```\nclick[12]\n```", ("click", ("12",))),
    ("```type [3] [a [b] c] [0]```", ("type", ("3", "a [b] c", "0"))),
    ("```type [3] []```", ("type", ("3", "", None))),
    ("```press [ctrl+a]```", ("press", ("ctrl+a",))),
    ("```scroll up```", ("scroll", ("up",))),
    ("```goto [http://a.localhost/b?c=[1]]```", ("goto", ("http://a.localhost/b?c=[1]",))),
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


def ax_node(number, role, name, *children, **properties):
    """A node as Accessibility.getFullAXTree gives it."""
    return {
        "nodeId": str(number), "backendDOMNodeId": number, "role": {"value": role},
        "name": {"value": name}, "childIds": [str(child) for child in children],
        "properties": [{"name": key, "value": {"value": v}} for key, v in properties.items()]}


def test_the_tree_is_written_in_webarenas_form():
    nodes = [
        ax_node(1, "RootWebArea", "Page", 2, 5, 6, 8, 11, focused=True),
        ax_node(2, "generic", "", 3),
        ax_node(3, "link", "It's", 4, url="http://x"),
        ax_node(4, "StaticText", "It's"),
        ax_node(5, "button", "below the window"),
        ax_node(6, "textbox", "Name", 7, required=False, editable="plaintext"),
        ax_node(7, "StaticText", "Ann"),
        ax_node(8, "combobox", "Sort", 9),
        ax_node(9, "MenuListPopup", "", 10),
        ax_node(10, "option", "By price"),
        {"nodeId": "11", "ignored": True, "role": {"value": "none"}, "childIds": ["12", "1"]},
        ax_node(12, "InlineTextBox", "x")]
    boxes = {node: (0, 0, 10, 10) for node in (1, 2, 3, 4, 6, 7, 8, 11, 12)}
    text, elements = tree.render(nodes, boxes)
    assert text.split("\n") == [
        "[1] RootWebArea 'Page' focused: True", "\t[2] link \"It's\"",
        "\t[3] textbox 'Name' required: False", "\t\t[4] StaticText 'Ann'",
        "\t[5] combobox 'Sort'", "\t\t[6] option 'By price'"]
    assert [elements[number].node for number in range(1, 7)] == [1, 3, 6, 7, 8, 10]
    assert elements[3].editable and not elements[2].editable
    assert tree.find(text, "link", "It's") == 2 and tree.find(text, "link", "It") is None
    assert tree.render([], {}) == ("", {})


def test_only_what_the_window_shows_has_a_rectangle():
    bounds = [[0, 0, 50, 2000], [10, 20, 30, 40], [10, 790, 30, 40], [10, 300, 0, 20]]
    page = {"nodes": {"backendNodeId": [7, 8, 9, 10]}, "scrollOffsetX": 0, "scrollOffsetY": 100,
            "layout": {"nodeIndex": [0, 1, 2, 3], "bounds": bounds}}
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
    assert evaluators.call_helper("reddit_get_post_url('__last_url__')", "", "http://r/f/books",
                                  None) == "http://r/f/books"  # no post


def test_a_plan_is_followed_by_scrolling_until_the_page_ends():
    pages = [f"[1] link '{name}'" for name in "ABC"]
    url = "http://a.localhost/"
    follower = Follower([("click", "link", "C")], "42", pages[0], url)
    for page in pages[1:]:
        assert follower.reply() == "nothing\n```scroll [down]```"
        follower.take(True, page, url)
    assert follower.reply() == "C\n```click [1]```"
    follower.take(True, pages[0], url + "c")
    assert follower.reply() == "42\n```stop [42]```"

    follower = Follower([("click", "link", "C")], "", pages[0], url)
    follower.take(True, pages[0], url)  # the window does not move
    assert follower.reply() is None


# ---- items and arguments ----


def test_held_out_items_are_of_seeds_that_are_not_trained_on_and_have_one_answer():
    """No answer and another one are wrong."""
    numbers = {split: {split_item(item)[1] for item in items("webarena", split)}
               for split in ("train", "test")}
    assert len(numbers["test"]) >= 200
    assert max(map(tasks.seed_of, numbers["train"])) < tasks.HELD_OUT
    assert min(map(tasks.seed_of, numbers["test"])) >= tasks.HELD_OUT
    templates = {number % NUM_TEMPLATES for number in numbers["train"] | numbers["test"]}
    assert templates == set(range(NUM_TEMPLATES))
    for item, category in categories("webarena").items():
        assert tasks.TEMPLATES[split_item(item)[1] % NUM_TEMPLATES].site == category

    for number in sorted(numbers["test"] | set(range(5 * NUM_TEMPLATES))):
        task, _, answer = tasks.make(number)
        check = task["eval"]
        if "string_match" in check["eval_types"]:
            right = [evaluators.string_match(check["reference_answers"], said)
                     for said in ("", "something else", answer)]
            assert right == [False, False, True]
        elif "url_match" in check["eval_types"]:
            assert not evaluators.url_match(check["reference_url"], task["start_url"] + "/")


@browser
@pytest.mark.parametrize("given, named", [
    ("chromium=/nowhere", "/nowhere"), ("tasks=bad.json", "bad.json"),
    ("tasks=empty.json", "empty.json"), ("tasks=none.json", "none.json"),
    ("tasks=good.json", "SHOPPING_ADMIN"), ("shopping=http://a", "tasks="),
    ("storage=/nowhere", "storage"), ("depth=1", "depth"), ("height=0", "x 0 pixels"),
])
def test_arguments_are_checked(given, named, tmp_path, monkeypatch):
    for name in webarena.PLACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, found in (("bad", [{"intent": "a"}]), ("empty", []), ("good", [tasks.make(0)[0]])):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=named):
        make_env("webarena", **env_options(f"webarena.{given}", ["webarena"])["webarena"])


@pytest.mark.skipif(
    importlib.util.find_spec("webarena") is None, reason="PyPI's libwebarena is not on the path")
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
    env.reset(FIRST_ITEM[name])
    num_replies = 0
    while not env.step(env.expert()).done:
        num_replies += 1
    for astray in (num_replies - 1, num_replies):
        env.reset(FIRST_ITEM[name])
        for turn in range(30):
            reply = env.expert()
            assert env.expert() == reply
            step = env.step("```goto [http://localhost/]```" if turn == astray else reply)
            if step.done:
                break
        assert step.success, astray
    env.close()


@browser
def test_an_episode_from_its_first_page_to_its_reward(env):
    item = FIRST_ITEM["shop.open_product"]
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
    first = env.reset(FIRST_ITEM["shop.open_product"])
    unread = ["", "click [5]", "```click [5]``` ```click [5]```", "\ud800", "```dance```"]
    impossible = [f"```{action}```" for action in (
        "click [500]", "type [2] [a] [1]", "press [nokey]", "press [++]", "press [shift+foo]",
        "press [a+b+c+dd]", "press [\x00]", "tab_focus [5]", "go_back", "go_forward",
        "goto [http://]", f"press [{'a' * 1000}]")]
    for reply in unread + impossible:
        step = env.step(reply)
        assert not step.valid and not step.done and step.reward == step.score == 0
        assert (step.observation == env.hint) == (reply in unread)
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
    env.reset(FIRST_ITEM["shop.category"])
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
@pytest.mark.parametrize("item", list(FIRST_ITEM.values())[::9])
def test_what_the_expert_does_is_among_the_choices(env, item):
    step, turns = envs.Step(env.reset(item)), 0
    while not step.done:
        actions, beginnings = env.choices()
        assert all(map(webarena.parse, actions)) and len({*actions}) == len(actions) > 3
        reply = env.expert()
        action = reply[reply.index("```"):]
        assert action in actions or action.startswith(tuple(beginnings)), action
        step, turns = env.step(reply), turns + 1
    assert step.success and turns > 1


@browser
def test_two_episodes_in_one_browser_do_not_meet(env):
    one, other = make_env("webarena"), env
    item = FIRST_ITEM["shop.move"]
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
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_browser_that_is_killed_or_hangs_costs_its_episodes_and_nothing_else(
        is_killed, env, monkeypatch):
    one, other = make_env("webarena"), env
    one.reset(0)
    other.reset(1)
    pid = one.browser.pid
    if is_killed:
        os.kill(pid, signal.SIGKILL)
    else:
        hang = "() => { setTimeout(() => { while (true) {} }, 50) }"
        one.browser.call(lambda: one.window.page.evaluate(hang))
        time.sleep(0.3)
        monkeypatch.setattr(browsers, "JOB_TIMEOUT", 2.0)  # of the watchdog
    start = time.monotonic()
    for each in (one, other):
        with pytest.raises(EnvError, match="browser"):
            each.step("```click [3]```")
        with pytest.raises(EnvError, match="before reset"):
            each.step("```click [3]```")
    assert time.monotonic() - start < 10  # after 12 s the browser's thread is given up
    monkeypatch.undo()  # on a busy machine a new browser takes more than two seconds
    assert solve(one, 0).success and one.browser.pid != pid
    assert solve(other, 1).success
    one.close()


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
@pytest.mark.parametrize("flags, expected", [
    ("--env webarena", "webarena.height=240"),
    ("--env babyai,webarena --env_args webarena.width=900",
     "webarena.height=240 webarena.width=900"),
    ("--env babyai", ""), (f"--env webarena --model {TINY_MODEL}", ""),
])
def test_the_tiny_model_gets_short_pages_and_others_do_not(flags, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/
    assert parse_config(["--out", "runs/never-made", *flags.split()]).env_args == expected
    if "," not in flags:
        assert evaluation.parse_eval_config(flags.split()).env_args == expected


@browser
def test_a_person_is_told_where_the_sites_are(monkeypatch, capsys):
    replies = iter(["```goto [http://shop.localhost/category/kitchen]```", "```stop```"])
    printed = []

    def reply(prompt):
        printed.append(capsys.readouterr().out)
        if len(printed) == 1:
            port, path = re.search(r"http://localhost:(\d+)(/\?episode=\w+)", printed[0]).groups()
            # Names under localhost resolve in every browser, but not for every other program.
            for host, says in (("localhost", "http://shop.localhost"),
                               ("shop.localhost", "Harbour Market")):
                page = requests.get(f"http://127.0.0.1:{port}{path}", timeout=10,
                                    headers={"Host": f"{host}:{port}"})
                assert page.status_code == 200 and says in page.text
        return next(replies)

    monkeypatch.setattr("builtins.input", reply)
    play("webarena", 0)
    assert "You did it." in capsys.readouterr().out


@browser
def test_our_server_speaks_webarenas_bodies(env):
    pytest.importorskip("uvicorn")
    with our_server("webarena") as (url, _):
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
        observation = requests.get(f"{url}/observation?env_idx={env_idx}", timeout=60).json()
        assert observation == step["observation"]
        assert call("step", env_idx=env_idx, action="```stop```")["terminated"] is True

        # A client of the server and an environment in this process are the same.
        far = make_env("webarena", url=url)
        assert far.whole_reply and far.prompt == env.prompt
        assert far.reset(3) == env.reset(3)
        for reply in ("nonsense", "```click [500]```", "```scroll [down]```", "```stop [x]```"):
            far.socket.shutdown(socket.SHUT_RDWR)  # as after a pause
            assert far.step(reply) == env.step(reply)
        far.close()


# ---- other servers on this machine ----


SECRET = "what another server of this machine says"


@contextmanager
def bystander():
    """Another server on this machine, as there may be -> (its port, what it was asked for).

    A connection without a request counts too.
    """
    seen = []

    def answer(request):
        return 200, {"Access-Control-Allow-Origin": "*"}, f"<title>{SECRET}</title><p>{SECRET}</p>"

    def handle(request):
        seen.append("connection")
        Handler.handle(request)
        seen.append(getattr(request, "path", None))

    with serving(answer, handle=handle) as port:
        yield port, seen


@browser
def test_no_other_address_can_be_opened(env):
    env.reset(0)
    ours = webarena.embedded_websites().port
    with bystander() as (port, seen):
        for address in (
            "file:///etc/passwd", "http://example.com/", "https://shop.localhost/",
            "chrome://version", "javascript:alert(1)", "data:text/html,hi", "about:blank",
            "view-source:http://a/", "//example.com", "\\\\example.com",
            f"http://localhost:{port}/", f"http://127.0.0.1:{ours}/",
            f"http://shop.localhost:{port}/", f"http://shop.localhost:{ours}0/",
            f"http://shop.localhost:{ours}@example.com/", "http://shop.localhost@example.com/",
            "http://shop.localhost.example.com/",
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
             "document.querySelector('input').value = 'Light'\">Change</button>"}
REST = {
    "/rest/V1/orders": {"items": [{"increment_id": "000000187"}]},
    "/rest/V1/products/B00A/reviews": [{"nickname": "x", "ratings": [{"percent": 20}]},
                                       {"nickname": "Emma", "ratings": [{"percent": 100}]}],
    "/rest/V1/products/B00B/reviews": []}


def official(intent, start="__SHOPPING__", **check):
    """A task as in WebArena's own file."""
    nothing = {"reference_answers": None, "reference_url": None, "program_html": None}
    return {"sites": ["shopping"], "task_id": 0, "require_login": True, "intent": intent,
            "storage_state": "./.auth/shopping_state.json", "start_url": start,
            "eval": {"eval_types": [], **nothing, **check}}


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
A_POST = "/f/books/59421/a-title"
OFFICIAL = [  # task, the path to open first; the answer is "Roots"
    (official("either of two", eval_types=["string_match", "url_match"],
              reference_answers={"must_include": ["roots"]}, url_note="GOLD in PRED",
              reference_url=f"{WISHES} |OR| __SHOPPING__/nowhere"), "/wishlist/"),
    (on_page("the wish list", WISHES, ".products-grid.wishlist",
             must_include=["2 Orchid Roots & Bulbs |OR| nothing"]), "/"),
    (on_page("a number that is 0", WISHES, "document.querySelectorAll('table').length",
             exact_match="0"), "/"),
    (on_page("the whole page", "last", "", must_include=["long form"]), A_POST),
    (on_page("a post", "func:reddit_get_post_url('__last_url__')", ".submission__inner",
             exact_match="What is the recommended console"), A_POST),
    (on_page("a role", MEMBERS, ROLE.format("bob"), must_include=["Guest"]), "/"),
    (on_page("the last order", "func:shopping_get_latest_order_url()", ".order-details-items",
             must_include=["Canon photo printer"]), "/"),
    (on_page("an author", "last", AUTHOR.format("B00A"), exact_match="Emma"), "/"),
    (on_page("a rating", "last", RATING.format("B00A"), exact_match="100"), "/"),
    (on_page("prepared", "__SHOPPING__/form", "document.querySelector('[name=\"title\"]').value",
             prepare=["document.querySelector('button').click()"], exact_match="Light"), "/")]
NEVER = [  # these fail whatever is done
    on_page("another role", MEMBERS, ROLE.format("ann"), must_include=["Guest"]),
    on_page("nobody", MEMBERS, ROLE.format("eve"), must_include=["Guest"]),
    on_page("no such part", "last", ".none", exact_match="x"),
    on_page("no review", "last", AUTHOR.format("B00B"), exact_match="Emma"),
    on_page("one is missing", "last", "", must_include=["One Stop", "no such words"])]


@browser
def test_official_tasks_are_played_on_sites_of_the_users_own(tmp_path, monkeypatch):
    asked = []  # the path and the headers of the requests

    def answer(request):
        asked.append(f"{request.path}\n{request.headers}")
        path = request.path.partition("?")[0]
        if request.command == "POST":
            return 200, {}, '"token"'
        if path in REST:
            return 200, {"Content-Type": "application/json"}, json.dumps(REST[path])
        return 200 if path in PAGES else 404, {}, PAGES.get(path, "")

    all_tasks = [task for task, _ in OFFICIAL] + NEVER + [official("elsewhere", "__MAP__")]
    (tmp_path / "tasks.json").write_text(json.dumps(all_tasks))
    cookie = {"name": "login", "value": "emma", "domain": "127.0.0.1", "path": "/", "expires": -1,
              "httpOnly": False, "secure": False, "sameSite": "Lax"}
    state = json.dumps({"cookies": [cookie], "origins": []})
    (tmp_path / "shopping_state.json").write_text(state)
    with serving(answer) as port:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("SHOPPING", url)
        env = make_env("webarena", tasks=f"{tmp_path}/tasks.json", gitlab=url,
                       storage=str(tmp_path))

        # Every task is solved by what it asks for, and by nothing else.
        for item, (task, path) in enumerate(OFFICIAL):
            seen = env.reset(item)
            assert "URL: http://onestopmarket.com/" in seen and url not in seen
            assert f"OBJECTIVE: {task['intent']}" in seen
            if path != "/":
                assert env.step(f"```goto [http://onestopmarket.com{path}]```").valid
            if "string_match" in task["eval"]["eval_types"]:
                assert score_now(env, "leaves") == 0
            step = env.step("```stop [Roots]```")
            assert step.success and step.reward == 1, task["intent"]
        for item, task in enumerate(NEVER, len(OFFICIAL)):
            env.reset(item)
            assert env.step("```stop [Roots]```").reward == 0, task["intent"]

        # The cookie of the storage-state file and the token of the REST interface were sent.
        assert "Cookie: login=emma" in str(asked) and "Authorization: Bearer token" in str(asked)

        # Other sites are not part of the world.
        env.step(f"```click [{tree.find(env.reset(0), 'link', 'outside')}]```")
        assert "outside.example" not in str(asked)
        assert not env.step("```goto [http://outside.example/]```").valid
        for item, named in ((len(all_tasks) - 1, "MAP"), (10_000, "items 0 to")):
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
    "<object data='/302'></object><embed src='/302'><video src='/302'></video>"
    "<link rel='preconnect' href='OTHER'><link rel='prefetch' href='/302'>"
    "<link rel='preload' as='script' href='/302'><link rel='dns-prefetch' href='OTHER'>"
    "<script type='speculationrules'>{\"prerender\": [{\"urls\": [\"/302\"]}]}</script>",
    "/scripts": "<p id='out'></p><script>fetch('/302').then(r => r.text()).then(text => "
    "{ document.querySelector('#out').innerText = text }).catch(() => 0);"
    "fetch('OTHER/fetch', {mode: 'no-cors'}).catch(() => 0);"
    "navigator.sendBeacon('/307', 'x'); new EventSource('/302');"
    "const x = new XMLHttpRequest(); x.open('POST', '/308'); x.send('x');"
    "new WebSocket('ws://HOST/socket'); new WebSocket('/302')</script>",
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
    "/written": "<button onclick=\"window.open().location = 'OTHER/written'\">Go</button>",
    "/form": "<form action='OTHER/form' method='post'><button>Go</button></form>",
    "/form307": "<form action='/307' method='post'><button>Go</button></form>"}


@pytest.fixture(scope="module")
def led_away(tmp_path_factory):
    """-> (an environment whose only site serves WAYS, redirects to a bystander and a worker; the
    bystander's port; what it was asked for)"""
    tasks_file = tmp_path_factory.mktemp("led") / "tasks.json"
    tasks_file.write_text(json.dumps([official("look around")]))
    with bystander() as (port, seen):
        other = f"127.0.0.1:{port}"
        special = {  # path -> status, headers
            "/chain": (302, {"Location": "/chain2"}),
            "/chain2": (307, {"Location": "/308"}),
            "/header": (200, {"Refresh": f"0; url=http://{other}/header"}),
            "/worker.js": (200, {"Content-Type": "text/javascript"}),
            "/local": (302, {"Location": f"http://localhost:{port}/302"}),
            **{f"/{code}": (code, {"Location": f"http://{other}/{code}"}) for code in CODES},
        }

        def answer(request):
            path = request.path.partition("?")[0]
            page = f"<title>{path}</title><p>here</p>{WAYS.get(path, '')}"
            page = WORKER if path == "/worker.js" else page
            page = page.replace("OTHER", f"http://{other}").replace("HOST", other)
            return *special.get(path, (200, {})), page

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
def test_a_redirect_to_another_server_is_said_and_the_episode_goes_on(led_away):
    env, port, seen = led_away
    env.reset(0)
    step = env.step("```goto [http://onestopmarket.com/local]```")
    assert not step.valid and "not part of these sites" in step.observation
    step = env.step("```goto [http://onestopmarket.com/link_local]```")
    assert step.valid
    step = env.step(f"```click [{tree.find(step.observation, 'link', 'Go')}]```")
    assert step.valid and SECRET not in step.observation
    env.step("```go_back```")
    deadline = time.monotonic() + 30  # a busy machine shows the page before it is loaded
    while "here" not in env._observe():
        assert time.monotonic() < deadline
        time.sleep(0.1)

    # Where a task begins with such a redirect, the addresses are wrong, not the agent.
    env.own_tasks[0]["start_url"] = "__SHOPPING__/local"
    with pytest.raises(EnvError, match=f"leads to http://localhost:{port}/302"):
        env.reset(0)
    assert seen == []
