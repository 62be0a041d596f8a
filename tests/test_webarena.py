"""WebArena: replies, trees, evaluators, embedded sites and their tasks, a real browser with its faults, and sites of one's own."""

import importlib.util
import json
import os
import queue
import re
import shutil
import signal
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
from envs import EnvError, categories, items, make_env, split_item
from rl import TINY
from rollout import EnvPool, rollout
from worlds import webarena
from worlds.websites import evaluate, tasks, tree
from worlds.websites.server import database, sites

CHROMIUM = "/usr/bin/chromium"
MISSING = [] if importlib.util.find_spec("playwright") else ["playwright (pip install -e '.[webarena]')"]
MISSING += [] if os.access(CHROMIUM, os.X_OK) else ["Chromium (apt-get install chromium)"]
browser = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
tasks.load()


def task_of(name):
    """The number of a template: that of item n with seed 0."""
    return next(n for n, t in enumerate(tasks.TEMPLATES) if f"{t.site}.{t.make.__name__}" == name)


# ---- without a browser ----


@pytest.mark.parametrize("reply, action", [
    ("```click [12]```", ("click", ("12",))), ("I look.\n```\nclick[12]\n```", ("click", ("12",))),
    ("```type [3] [a [b] c] [0]```", ("type", ("3", "a [b] c", "0"))),
    ("```type [3] [words]```", ("type", ("3", "words", None))), ("```type [3] []```", ("type", ("3", "", None))),
    ("```press [ctrl+a]```", ("press", ("ctrl+a",))),
    ("```scroll [down]```", ("scroll", ("down",))), ("```scroll up```", ("scroll", ("up",))), ("```tab_focus [0]```", ("tab_focus", ("0",))),
    ("```goto [http://a.localhost/b?c=[1]]```", ("goto", ("http://a.localhost/b?c=[1]",))), ("```stop [N/A]```", ("stop", ("N/A",))),
    ("```stop```", ("stop", (None,))),
    ("```stop []```", ("stop", ("",))), ("```go_back```", ("go_back", ()))])
def test_an_action_stands_between_triple_backticks(reply, action):
    assert webarena.parse(reply) == action


@pytest.mark.parametrize("reply", ["", "click [12]", "```", "```click [12]", "```click [1]``` and ```click [2]```", "``````", "```click```",
                                   "```click [a]```", "```click [-1]```",
                                   "```click [12] now```", "```dance [1]```", "```scroll [left]```", "```go_back [1]```", "```goto []```",
                                   "```type [1]```", "```python\nclick [1]```",
                                   "```click [99999999999]```", "```stop [" + "a" * 3000 + "]```", "```CLICK [1]```", "\x00```\x00```"])
def test_anything_else_is_none(reply):
    assert webarena.parse(reply) is None


def node(key, role, name, children=(), **more):
    return {"nodeId": key, "backendDOMNodeId": int(key), "role": {"value": role}, "name": {"value": name}, "childIds": list(children)} | more


def test_the_tree_is_written_in_webarenas_form():
    nodes = [node("1", "RootWebArea", "Page", ["2", "5", "6", "8", "11"], properties=[{"name": "focused", "value": {"value": True}}]),
             node("2", "generic", "", ["3"]), node("3", "link", "It's", ["4"], properties=[{"name": "url", "value": {"value": "http://x"}}]),
             node("4", "StaticText", "It's"), node("5", "button", "below the window"),
             node("6", "textbox", "Name", ["7"], properties=[{"name": "required", "value": {"value": False}},
                                                             {"name": "editable", "value": {"value": "plaintext"}}]),
             node("7", "StaticText", "Ann"), node("8", "combobox", "Sort", ["9"]), node("9", "MenuListPopup", "", ["10"]),
             node("10", "option", "By price"),
             {"nodeId": "11", "ignored": True, "role": {"value": "none"}, "childIds": ["12", "1"]}, node("12", "InlineTextBox", "x")]
    boxes = {n: (0, 0, 10, 10) for n in (1, 2, 3, 4, 6, 7, 8, 11, 12)}
    text, elements = tree.render(nodes, boxes)
    assert text == ("[1] RootWebArea 'Page' focused: True\n\t[2] link \"It's\"\n\t[3] textbox 'Name' required: False\n\t\t[4] StaticText 'Ann'\n"
                    "\t[5] combobox 'Sort'\n\t\t[6] option 'By price'")
    assert [elements[i].node for i in range(1, 7)] == [1, 3, 6, 7, 8, 10] and elements[3].editable and not elements[2].editable
    assert tree.find(text, "link", "It's") == 2 and tree.find(text, "link", "It") is None
    assert tree.render([], {}) == ("", {})


def test_only_what_the_window_shows_has_a_rectangle():
    page = {"nodes": {"backendNodeId": [7, 8, 9, 10]}, "scrollOffsetX": 0, "scrollOffsetY": 100,
            "layout": {"nodeIndex": [0, 1, 2, 3], "bounds": [[0, 0, 50, 2000], [10, 20, 30, 40], [10, 790, 30, 40], [10, 300, 0, 20]]}}
    assert tree.rectangles({"documents": [page]}, 1280, 720) == {7: (0, 0, 50, 720), 9: (10, 690, 40, 720)}


@pytest.mark.parametrize("references, right, wrong", [
    ({"exact_match": "Quest Band"}, ["quest band", ' "Quest Band" '], ["Quest", "the Quest Band", ""]),
    ({"must_include": ["blue", "12.50"]}, ["Blue, at $12.50"], ["blue", "12.50", ""]),
    ({"must_include": ["0"]}, ["0", "there are 0."], ["10", "zero", ""]),
    ({"must_include": ["10"]}, ["10 of them"], ["1", ""]),
    ({"fuzzy_match": "N/A"}, ["N/A", "n/a"], ["", "not possible", "N/A because"]),
    ({"fuzzy_match": ["Alice Brown", "12 km"]}, ["12 KM, alice brown."], ["Alice", "Alice Browning 12 km", ""])])
def test_strings_are_matched_as_in_webarena(references, right, wrong):
    assert all(evaluate.string_match(references, answer) for answer in right)
    assert not any(evaluate.string_match(references, answer) for answer in wrong)


@pytest.mark.parametrize("reference, right, wrong", [
    ("http://g/a/b", ["http://g/a/b", "http://g/a/b/", "http://g/a/b/c?x=1"], ["http://g/a", "http://h/a/b"]),
    ("http://g/i?state=opened&sort=asc", ["http://g/i?sort=asc&state=opened&page=2"],
     ["http://g/i", "http://g/i?state=opened", "http://g/i?state=opened&sort=desc"]),
    ("http://g/a |OR| http://g/b", ["http://g/a", "http://g/b/"], ["http://g/c"]),
    ("http://g/i?label_name%5B%5D=x", ["http://g/i?label_name[]=x"], ["http://g/i?label_name=x"])])
def test_addresses_are_matched_as_in_webarena(reference, right, wrong):
    assert all(evaluate.url_match(reference, url) for url in right) and not any(evaluate.url_match(reference, url) for url in wrong)


def test_evaluators_that_are_not_known_are_an_error_and_helpers_are_no_code():
    with pytest.raises(ValueError, match="magic"):
        evaluate.score({"eval": {"eval_types": ["magic"]}}, "", "", None)
    with pytest.raises(ValueError, match="unknown string_match"):
        evaluate.string_match({"sounds_like": "a"}, "a")
    for code in ("__import__('os').getcwd()", "reddit_get_post_url(", "print('a')", "shopping_get_latest_order_url('x')"):
        with pytest.raises(ValueError, match="unknown helper"):
            evaluate.call_helper(code, "", "", None)
    assert evaluate.call_helper("reddit_get_post_url('__last_url__')", "", "http://r/f/books/59421/a-title?x=1", None) == "http://r/f/books/59421/"
    assert evaluate.call_helper("reddit_get_post_url('__last_url__')", "", "http://r/f/books", None) == "http://r/f/books"


def test_there_are_templates_of_every_kind_for_every_site():
    count = Counter((t.site, t.kind) for t in tasks.TEMPLATES)
    for site in sites():
        assert sum(n for (s, _), n in count.items() if s == site) >= 10
        for kind, least in {"navigate": 3, "find": 4, "change": 5, "impossible": 2}.items():
            assert count[site, kind] >= least
    assert len({(t.site, t.make.__name__) for t in tasks.TEMPLATES}) == len(tasks.TEMPLATES)


def test_held_out_items_are_of_seeds_that_are_not_trained_on():
    train, test = ({split_item(i)[1] for i in items("webarena", split)} for split in ("train", "test"))
    assert len(test) >= 200 and max(map(tasks.seed_of, train)) < tasks.HELD_OUT <= min(map(tasks.seed_of, test))
    known = categories("webarena")
    for n in test:
        assert known[f"webarena_{n}"] == tasks.TEMPLATES[n % len(tasks.TEMPLATES)].site
    assert {n % len(tasks.TEMPLATES) for n in train} == {n % len(tasks.TEMPLATES) for n in test} == set(range(len(tasks.TEMPLATES)))


def test_every_item_makes_a_task_in_webarenas_json_and_always_the_same():
    keys = {"sites", "task_id", "require_login", "storage_state", "start_url", "geolocation", "intent_template", "instantiation_dict", "intent",
            "require_reset", "eval",
            "intent_template_id"}
    numbers = sorted({split_item(i)[1] for i in items("webarena", "test")}) + list(range(5 * len(tasks.TEMPLATES)))
    for n in numbers:
        task, plan, answer = tasks.make(n)
        assert set(task) == keys and json.loads(json.dumps(task)) == task and plan and "{" not in task["intent"] and "[" not in answer
        assert task["sites"][0] in ("shopping", "reddit", "gitlab", "shopping_admin")
        if "string_match" in task["eval"]["eval_types"]:  # nothing, and something else, are wrong answers; the answer is right
            assert [evaluate.string_match(task["eval"]["reference_answers"], said) for said in ("", "something else", answer)] == [False, False, True]
        elif "url_match" in task["eval"]["eval_types"]:
            assert not evaluate.url_match(task["eval"]["reference_url"], task["start_url"] + "/")
    assert tasks.make(numbers[7])[0] == tasks.make(numbers[7])[0]
    same = sum(tasks.make(n)[0]["intent"] == tasks.make(n + len(tasks.TEMPLATES))[0]["intent"] for n in range(len(tasks.TEMPLATES)))
    assert same < len(tasks.TEMPLATES) / 3


@contextmanager
def an_episode(seed=0):
    at = webarena.websites()
    key = at.begin(seed)

    def ask(site, path, form=None, **headers):
        headers = {"Host": f"{site}.localhost:{at.port}", "X-Episode": key} | {k.replace("_", "-"): v for k, v in headers.items()}
        headers = {k: v for k, v in headers.items() if v is not None}
        return requests.request("POST" if form is not None else "GET", f"http://127.0.0.1:{at.port}{path}", data=form, headers=headers, timeout=10,
                                allow_redirects=False)
    try:
        yield key, ask
    finally:
        at.end(key)


def test_episodes_have_states_of_their_own():
    with an_episode() as (_, one), an_episode() as (key, other), an_episode(5) as (_, third):
        assert one("shop", "/cart/add", {"product": "103", "amount": "2"}).status_code in (303, 404)
        product = database(0).execute("select id,name from product where stock>0").fetchone()
        assert one("shop", "/cart/add", {"product": product[0], "amount": "2"}).headers["Location"] == "/cart"
        assert product[1] in one("shop", "/cart").text and "is empty" in other("shop", "/cart").text and "is empty" in third("shop", "/cart").text
        assert one("shop", "/").text != third("shop", "/").text
        assert other("shop", "/", X_Episode="nobody").status_code == 404
        assert "is empty" in other("shop", "/cart", X_Episode=None, Cookie=f"episode={key}").text  # a person's browser
        assert key in other("shop", f"/?episode={key}", X_Episode=None).headers["Set-Cookie"]
        assert f"episode={key}" in other("", f"/?episode={key}", X_Episode=None, Host="localhost").text
    assert other("shop", "/").status_code == 404  # it has ended


def test_pages_do_what_forms_say_and_show_text_as_text():
    with an_episode() as (_, ask):
        evil = "<script>alert(1)</script> '\" & \u202e \x00 é"
        post = database(0).execute("select forum,id from post").fetchone()
        assert ask("forum", "/f/{}/{}/comment".format(*post), {"body": evil}).status_code == 303
        page = ask("forum", "/f/{}/{}".format(*post)).text
        assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert "<script>" not in ask("shop", "/search?q=%3Cscript%3E%22%27").text
        for path in ("/search?q=%25%5C_'%22", "/search?q=" + "a+" * 50, "/product/999999999", "/product/99999999999999999999", "/orders/000000000",
                     "/nowhere", "/search?page=-1&q=a",
                     "/category/x", "/?" + "a=1&" * 300, "/product/101?page=99999999999", "/%00", "//evil.example/", "/search?q=%ff%fe"):
            assert ask("shop", path).status_code in (200, 404), path
        for path in ("/products/101", "/orders/1/ship", "/reviews/0/approve"):
            assert ask("admin", path, {"price": "abc", "stock": "-5", "name": "", "enabled": "7"}).status_code in (303, 404)
        assert ask("admin", "/products/101", {"price": "1e9", "stock": "²"}).status_code == 303
        assert ask("shop", "/account/edit", {"street": "a" * 100_000}).status_code == 413
        assert ask("shop", "/cart/add", {"product": "101"}, Origin="http://evil.example").status_code == 403
        assert ask("nosite", "/").status_code == 404


def test_every_link_of_every_site_leads_somewhere():
    with an_episode(3) as (_, ask):
        for site in sites():
            seen, todo = set(), ["/"]
            while todo and len(seen) < 150:
                path = todo.pop(0)
                page = ask(site, path)
                assert page.status_code == 200, (site, path)
                for found in re.findall(r'href="(/[^"]*)"', page.text):
                    found = found.replace("&amp;", "&")
                    if found not in seen:
                        seen.add(found)
                        todo.append(found)
            assert len(seen) > 40


def test_arguments_are_checked(tmp_path, monkeypatch):
    for name in webarena.PLACES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bad.json").write_text('[{"intent": "a"}]')
    (tmp_path / "good.json").write_text(json.dumps([tasks.make(0)[0]]))
    playwright = importlib.util.find_spec("playwright") is not None
    for kw, says in ((dict(chromium="/nowhere"), "apt-get install chromium"),
                     (dict(tasks=f"{tmp_path}/bad.json", chromium=sys.executable), "no tasks in WebArena's form"),
                     (dict(tasks=f"{tmp_path}/none.json", chromium=sys.executable), "none.json"),
                     (dict(tasks=f"{tmp_path}/good.json", chromium=sys.executable), "SHOPPING_ADMIN"),
                     (dict(shopping="http://a", chromium=sys.executable), "need tasks="),
                     (dict(storage="/nowhere", chromium=sys.executable), "storage-state"),
                     (dict(depth=1), "takes no argument 'depth'"), (dict(height=0, chromium=sys.executable), "pixels")):
        with pytest.raises(ValueError, match=re.escape(says) if playwright or "depth" in kw else "playwright"):
            make_env("webarena", **kw)
    with pytest.raises(ValueError, match=re.escape('pip install -e ".[webarena]"')):
        with monkeypatch.context() as m:
            m.setattr(importlib.util, "find_spec", lambda name: None)
            make_env("webarena")


@pytest.mark.skipif(importlib.util.find_spec("webarena") is None, reason="PyPI's libwebarena is not on the path")
def test_all_official_tasks_are_read_and_every_evaluator_is_known():
    official, kinds = webarena.read_tasks("official"), Counter()
    assert len(official) == 812 and "webarena" not in sys.modules
    for task in official:
        check = task["eval"]
        assert set(check["eval_types"]) <= {"string_match", "url_match", "program_html"}
        kinds.update(check["eval_types"])
        if "string_match" in check["eval_types"]:
            assert not evaluate.string_match(check["reference_answers"], "\x01")
            kinds.update(check["reference_answers"].keys())
        for target in check["program_html"] if "program_html" in check["eval_types"] else ():
            for code in (target["url"], target["locator"]):
                if code.startswith("func:"):
                    kinds[re.match(r"func:(\w+)", code)[1]] += 1
    assert sum(map(evaluate.needs_judge, official)) == 82 and kinds["shopping_get_latest_order_url"] and kinds["gitlab_get_project_memeber_role"]


# ---- in the browser ----


@pytest.fixture
def env():
    made = make_env("webarena")
    yield made
    made.close()


def look(env):
    return lambda *a: env.browser.call(env.window.look, *a)


@browser
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_template_is_solved_by_its_plan_and_by_nothing_else(every):
    """Four episodes at a time. Before its plan is played each is scored as it stands: with no answer and with a wrong one."""
    todo, wrong, solved = queue.SimpleQueue(), [], Counter()
    for n in range(0, len(tasks.TEMPLATES), every):
        todo.put(n + len(tasks.TEMPLATES) * (tasks.HELD_OUT + n % 3))

    def work():
        env = make_env("webarena")
        while not todo.empty():
            item = todo.get()
            try:
                env.reset(item)
                at = env._real(re.search("URL: (.*)", env._observe())[1])
                idle = [evaluate.score(env.task, said, at, look(env))
                        for said in (("", "something else") if "string_match" in env.task["eval"]["eval_types"] else ("",))]
                step = tasks.solve(env, item)
                lost = "There is no such page" in env._observe()
                if any(idle) or lost or not (step.done and step.success and step.reward == step.score == 1):
                    wrong.append((item, env.objective, idle, step))
                solved[tasks.TEMPLATES[item % len(tasks.TEMPLATES)].site] += 1
            except Exception as e:
                wrong.append((item, repr(e)))
        env.close()
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong and sum(solved.values()) == len(range(0, len(tasks.TEMPLATES), every)), wrong


@browser
def test_an_episode_from_its_first_page_to_its_reward(env):
    with pytest.raises(EnvError, match="before reset"):
        env.step("```go_back```")
    item = task_of("shop.open_product")
    first, plan = env.reset(item), tasks.make(item)[1]
    assert env.reset(item) == first  # the same item is the same episode: numbers, names, addresses
    assert first.startswith("OBSERVATION:\nTab 0 (current): Harbour Market\n\n[1] RootWebArea 'Harbour Market'")
    assert "\nURL: http://shop.localhost/\n" in first
    assert first.endswith(f"OBJECTIVE: {tasks.make(item)[0]['intent']}\nPREVIOUS ACTION: None") and not re.search(r"localhost:\d", first)
    for bad in ("", "click [5]", "```click [5]``` ```click [5]```", "```click [5]", "\ud800", "```dance```"):
        step = env.step(bad)
        assert not step.valid and not step.done and step.observation == env.hint and step.reward == step.score == 0
    for bad in ("```click [500]```", "```type [2] [a] [1]```", "```press [nokey]```", "```press [++]```", "```press [a+b+c+dd]```",
                "```press [\x00]```", "```tab_focus [5]```", "```go_back```", "```go_forward```", "```goto [http://]```",
                "```press [" + "a" * 1000 + "]```"):
        step = env.step(bad)
        assert not step.valid and not step.done and step.observation != env.hint
    assert "There is no such page" in env.step("```goto [http://shop.localhost/%zz\n\n\x00]```").observation
    assert env.step("```go_back```").observation.split("OBJECTIVE")[0] == first.split("OBJECTIVE")[0]
    seen = env.step(f"I search. ```{tasks.next_action(plan[0], first)[0]}```")
    assert seen.valid and "results for" in seen.observation and "PREVIOUS ACTION: type [" in seen.observation
    step = env.step(f"```{tasks.next_action(plan[1], seen.observation)[0]}```")
    assert "URL: http://shop.localhost/product/" in step.observation
    step = env.step("```stop```")
    assert step.done and step.success and step.reward == step.score == 1
    again = env.step("```go_back```")
    assert again.done and again.success and again.reward == 0
    env.reset(item)
    step = env.step("```stop [done]```")
    assert step.done and not step.success and step.reward == step.score == 0
    for bad in (-1, "1", True):
        with pytest.raises(ValueError):
            env.reset(bad)


@browser
def test_every_action_does_what_it_says(env):
    def do(action):
        step = env.step(f"```{action}```")
        assert step.valid, step
        return step.observation

    def url(text):
        return re.search("URL: (.*)", text)[1]
    text = env.reset(task_of("shop.category"))
    text = do(f"click [{tree.find(text, 'link', 'Audio')}]")
    assert url(text) == "http://shop.localhost/category/audio"
    assert url(do("go_back")) == "http://shop.localhost/" and url(do("go_forward")) == "http://shop.localhost/category/audio"
    assert "URL: http://shop.localhost/category/audio" in do("hover [5]")
    assert "Next page" not in do("goto [http://forum.localhost/]")
    text = do("scroll [down]")
    assert "Next page" in text and "link 'Commonplace'" not in text and "Next page" not in do("scroll [up]")
    do("go_back")
    text = do("new_tab")
    assert "Tab 0: Audio | Tab 1 (current): " in text
    text = do("goto [http://forum.localhost/forums]")
    assert "Tab 0: Audio | Tab 1 (current): Forums" in text and url(text) == "http://forum.localhost/forums"
    assert url(do("tab_focus [0]")) == "http://shop.localhost/category/audio"
    text = do("close_tab")
    assert "Tab 0 (current): Forums" in text and "Tab 1" not in text
    text = do(f"type [{tree.find(text, 'searchbox', 'Search posts')}] [trouble] [0]")
    assert url(text) == "http://forum.localhost/forums" and "StaticText 'trouble'" in text
    assert url(do("press [Enter]")) == "http://forum.localhost/search?q=trouble"
    text = do("goto [shop.localhost/account/edit]")
    text = do(f"type [{tree.find(text, 'textbox', 'City')}] [Somewhere [New]] [0]")
    assert "StaticText 'Somewhere [New]'" in text
    env.window.append = True
    text = do(f"type [{tree.find(text, 'textbox', 'City')}] [+] [0]")
    assert re.search(r"StaticText '.*\+.*'", text) and "Somewhere" in text
    text = do("goto [http://shop.localhost/product/101/review]")
    text = do(f"click [{tree.find(text, 'option', '2 stars')}]")
    assert re.search(r"option '2 stars'.* selected: True", text)
    for _ in range(8):
        step = env.step("```new_tab```")
    assert not step.valid


@browser
def test_nothing_but_the_sites_can_be_requested(env):
    seen = []

    class Bystander(BaseHTTPRequestHandler):  # another server on this machine, as there may be
        def do_GET(self):
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
        do_POST = do_GET

        def log_message(self, *_):
            pass
    other = ThreadingHTTPServer(("127.0.0.1", 0), Bystander)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    env.reset(0)
    at = webarena.websites()
    for address in ("file:///etc/passwd", "http://example.com/", "https://shop.localhost/", "chrome://version", "javascript:alert(1)",
                    "data:text/html,hi", "about:blank", "view-source:http://a/",
                    f"http://localhost:{other.server_port}/", f"http://127.0.0.1:{at.port}/", f"http://shop.localhost:{other.server_port}/",
                    "http://shop.localhost@example.com/",
                    f"http://shop.localhost:{at.port}@example.com/", "http://shop.localhost.example.com/", "//example.com", "\\\\example.com",
                    f"http://shop.localhost:{at.port}0/"):
        step = env.step(f"```goto [{address}]```")
        assert not step.valid and "root:" not in step.observation and step.observation == "That address is not part of these sites.", address
    # nor by what a page says: links, forms, pictures, scripts, redirects
    page = "".join(f"<a href='{a}'>go {i}</a> " for i, a in enumerate((f"http://localhost:{other.server_port}/link", "file:///etc/passwd",
                                                                       "http://example.com/")))
    page += f"<img src='http://localhost:{other.server_port}/img'><iframe src='http://localhost:{other.server_port}/frame'></iframe>"
    env.browser.call(lambda: env.window.page.evaluate("html => { document.body.innerHTML = html }", page))
    for script in (f"fetch('http://localhost:{other.server_port}/fetch', {{mode: 'no-cors'}}).catch(() => 0)",
                   f"try {{ new WebSocket('ws://localhost:{other.server_port}/socket') }} catch (e) {{}}"):
        env.browser.call(lambda code=script: env.window.page.evaluate(f"() => {{ {code} }}"))
    text = env._observe()
    for i in range(3):
        number = tree.find(text, "link", f"go {i}")
        step = env.step(f"```click [{number}]```")
        assert "root:" not in step.observation
        if "go 0" not in step.observation:  # a page that says that it was blocked
            env.step("```goto [http://shop.localhost/]```")
            env.browser.call(lambda: env.window.page.evaluate("html => { document.body.innerHTML = html }", page))
            text = env._observe()
    time.sleep(0.3)
    other.shutdown()
    assert seen == []


@browser
def test_two_episodes_in_one_browser_do_not_meet():
    a, b = make_env("webarena"), make_env("webarena")
    item = task_of("shop.move")
    first = [e.reset(item) for e in (a, b)]
    assert first[0] == first[1] and a.browser is b.browser
    assert tasks.solve(a, item).success
    assert b.step("```goto [http://shop.localhost/account]```").observation.split("OBJECTIVE")[0].count("Lane") == 0
    assert b.step("```stop```").reward == 0
    a.reset(item)  # nor does an episode meet the one before it
    text = a.step("```goto [http://shop.localhost/account]```").observation
    assert "Lane" not in text.split("OBJECTIVE")[0] and not a.step("```tab_focus [1]```").valid
    assert not env_history(a)
    a.close(), b.close()


def env_history(env):
    """Pages before the first one of this episode."""
    entries = env.browser.call(lambda: env.window._cdp("Page.getNavigationHistory"))["entries"]
    return [e["url"] for e in entries[:-2] if e["url"] != "about:blank"]


@browser
def test_a_browser_that_is_killed_costs_its_episodes_and_nothing_else(tiny):
    victim, bystander = make_env("webarena"), make_env("webarena")
    victim.reset(0), bystander.reset(1)
    pid = victim.browser.pid
    os.kill(pid, signal.SIGKILL)
    for e in (victim, bystander):
        with pytest.raises(EnvError, match="browser"):
            e.step("```click [3]```")
        with pytest.raises(EnvError, match="before reset"):
            e.step("```click [3]```")
    assert tasks.solve(victim, 0).success and victim.browser.pid != pid
    assert tasks.solve(bystander, 1).success
    victim.close(), bystander.close()

    class Doomed(webarena.WebArena):  # its browser is killed in the second turn
        turn = 0

        def step(self, action):
            self.turn += 1
            if self.turn == 2:
                os.kill(self.browser.pid, signal.SIGKILL)
            return super().step("```scroll [down]```")
    made = []
    with EnvPool(make=lambda name: made.append(Doomed() if not made else webarena.WebArena()) or made[-1]) as pool:
        one, two = rollout(*tiny, pool, ["webarena_0", "webarena_1"], 3, max_tokens=4, retries=0, slots=1)
    assert one.status == "env_error" and "browser" in one.error and one.reward == 0
    assert two.status == "horizon" and two.turns == 3


@browser
def test_a_page_that_hangs_is_ended_by_the_watchdog(monkeypatch):
    from worlds.websites import browser as browsers
    monkeypatch.setattr(browsers, "PATIENCE", 2.0)
    env = make_env("webarena", width=1200)
    env.reset(0)
    env.browser.call(lambda: env.window.page.evaluate("() => { setTimeout(() => { while (true) {} }, 50) }"))
    time.sleep(0.3)
    start = time.monotonic()
    with pytest.raises(EnvError):
        env.step("```click [3]```")
    assert time.monotonic() - start < 15
    monkeypatch.undo()  # the browser starts anew: on a busy machine more than two seconds
    assert tasks.solve(env, 0).success
    env.close()


@browser
def test_the_tiny_model_plays_and_a_seed_repeats(tiny):
    def play():
        with EnvPool(options={"webarena": {"height": 240}}) as pool:
            return rollout(*tiny, pool, [f"webarena_{n}" for n in range(76_000, 76_060, 10)], 2, samples=2, max_tokens=32, seed=3)
    one, two = play(), play()
    assert all(t.status in ("done", "horizon") for t in one)
    assert sum(t.valid_actions for t in one) > 0.75 * sum(t.turns for t in one)
    assert [t.tokens for t in one] == [t.tokens for t in two] and [t.logprobs for t in one] == [t.logprobs for t in two]


@browser
def test_the_tiny_model_gets_short_pages_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/
    assert parse_config(["--env", "webarena"]).env_args == "webarena.height=240"
    assert parse_config(["--env", "babyai,webarena"]).env_args == "webarena.height=240"
    assert parse_config(["--env", "webarena", "--env_args", "webarena.height=720"]).env_args == "webarena.height=720"
    assert parse_config(["--env", "babyai,webarena", "--env_args", "webarena.width=900"]).env_args == "webarena.height=240 webarena.width=900"
    assert evaluation.parse_config(["--env", "webarena", "--env_args", "webarena.width=900"]).env_args == "webarena.height=240 webarena.width=900"
    assert parse_config(["--env", "babyai"]).env_args == ""
    assert parse_config(["--env", "webarena", "--model", str(TINY)]).env_args == ""
    assert evaluation.parse_config(["--env", "webarena"]).env_args == "webarena.height=240"
    run = tmp_path / "run"  # an agent that was trained in another world
    shutil.copytree(TINY, run / "final")
    (run / "config.json").write_text(json.dumps({"env": "babyai", "algo": "grpo", "model": "tiny", "env_args": "", "horizon": "3,4"}))
    assert evaluation.parse_config(["--env", "webarena", "--model", str(run / "final")]).env_args == "webarena.height=240"


@browser
def test_a_person_is_told_where_the_sites_are():
    done = subprocess.Popen([sys.executable, "envs.py", "play", "--env", "webarena", "--item", "0"], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)
    address = ""
    for line in done.stdout:
        if match := re.search(r"http://localhost:\d+/\?episode=\w+", line):
            address = match[0]
            break
    port = re.search(r":(\d+)", address)[1]
    home = requests.get(address.replace("localhost", "127.0.0.1"), timeout=10).text
    shop = re.search(r'href="(http://shop.localhost:\d+/\?episode=\w+)"', home)[1]
    with requests.Session() as person:  # names under localhost resolve in browsers, not everywhere
        page = person.get(shop.replace("shop.localhost", "127.0.0.1"), headers={"Host": f"shop.localhost:{port}"}, timeout=10)
        assert page.status_code == 200 and "Harbour Market" in page.text
    rest, _ = done.communicate("```goto [http://shop.localhost/category/kitchen]```\n```stop```\n", timeout=60)
    assert done.returncode == 0 and "You did it." in rest


@browser
def test_our_server_speaks_webarenas_bodies():
    pytest.importorskip("fastapi")
    server = subprocess.Popen([sys.executable, "envs.py", "serve", "--env", "webarena", "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search("http://.*", server.stdout.readline())[0].strip()
        call = lambda path, body: requests.post(f"{url}/{path}", json=body, timeout=60).json()  # noqa: E731
        n = call("create", {})["env_idx"]
        first = call("reset", {"env_idx": n, "seed": 0, "idx": 0})
        assert first["sites"] == ["shopping"] and first["object"] in first["observation"] and set(first) == {"observation", "sites", "object"}
        step = call("step", {"env_idx": n, "action": "```goto [http://shop.localhost/category/kitchen]```"})
        assert step["terminated"] is step["truncated"] is False and step["reward"] == 0 and "info" in step
        assert requests.get(f"{url}/observation", params={"env_idx": n}, timeout=60).json() == step["observation"]
        assert call("step", {"env_idx": n, "action": "```stop```"})["terminated"] is True
        far, near = make_env("webarena", url=url), make_env("webarena")
        assert far.whole_reply and far.prompt == near.prompt and far.reset(3) == near.reset(3)
        for reply in ("nonsense", "```click [500]```", "```scroll [down]```", "```stop [x]```"):
            assert far.step(reply) == near.step(reply)
        far.close(), near.close()
    finally:
        server.terminate()
        assert server.wait(10) == 0


# ---- sites of one's own: small pages as WebArena's sites have them ----

PAGES = {
    "/": "<title>One Stop Market</title><a href='/wishlist/'>Wish list</a> <a href='/f/books/59421/a-title'>A post</a> "
         "<a href='/project/-/members'>Members</a>"
         "<a href='http://outside.example/'>outside</a>",
    "/wishlist/": "<title>Wish list</title><div class='products-grid wishlist'>2 Orchid Roots &amp; Bulbs</div>",
    "/f/books/59421/a-title": "<title>A post</title><p>in the long form</p>",
    "/f/books/59421/": "<title>A post</title><div class='submission__inner'>what is the recommended console</div>",
    "/project/-/members": "<title>Members</title><table><tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@ann</span></td>"
                          "<td class='col-max-role'><span>Owner</span></td></tr>"
                          "<tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@bob</span></td><td class='col-max-role'><span>Guest"
                          "</span></td></tr></table>",
    "/sales/order/view/order_id/187/": "<title>Order</title><div class='order-details-items'>Canon photo printer</div>",
    "/form": "<title>Form</title><input name='title' value='Dark Mode'><button onclick=\"document.querySelector('input').value = 'Light'\">Change"
             "</button>"}
REST = {"/rest/V1/orders": {"items": [{"increment_id": "000000187"}]},
        "/rest/V1/products/B00A/reviews": [{"nickname": "x", "ratings": [{"percent": 20}]},
        {"nickname": "Emma", "ratings": [{"percent": 100}]}], "/rest/V1/products/B00B/reviews": []}


def official(intent, start="__SHOPPING__", **check):
    return {"sites": ["shopping"], "task_id": 0, "require_login": True, "storage_state": "./.auth/shopping_state.json", "start_url": start,
            "geolocation": None, "intent_template": intent,
            "instantiation_dict": {}, "intent": intent, "require_reset": False, "intent_template_id": 0,
            "eval": {"eval_types": [], "reference_answers": None, "reference_url": None, "program_html": None} | check}


def on_page(url, locator, **contents):
    return dict(eval_types=["program_html"], program_html=[{"url": url, "locator": locator, "required_contents": contents}])


ROLE = "func:gitlab_get_project_memeber_role(__page__, '{}')"
LATEST, DETAILS = "func:shopping_get_latest_order_url()", "document.querySelector(\".order-details-items\").outerText"
OFFICIAL = [  # task, what to open first, right answer or None, what fails
    (official("exact", eval_types=["string_match"], reference_answers={"exact_match": "12"}), "/", "12", "13"),
    (official("either of two", eval_types=["string_match", "url_match"], reference_answers={"must_include": ["roots"]},
              reference_url="__SHOPPING__/wishlist/", url_note="GOLD in PRED"), "/wishlist/", "Roots", "leaves"),
    (official("go there", eval_types=["url_match"], reference_url="__SHOPPING__/wishlist |OR| __SHOPPING__/nowhere"), "/wishlist/", "", None),
    (official("unachievable", eval_types=["string_match"], reference_answers={"fuzzy_match": "N/A"}, string_note="no such thing"), "/", "N/A", "yes"),
    (official("the wish list", **on_page("__SHOPPING__/wishlist/", "document.querySelector('.products-grid.wishlist').outerText",
                                         must_include=["2 Orchid Roots & Bulbs |OR| nothing"])), "/", "", None),
    (official("the whole page", **on_page("last", "", must_include=["long form"])), "/f/books/59421/a-title", "", None),
    (official("a post", **on_page("func:reddit_get_post_url('__last_url__')", "document.querySelector('.submission__inner').outerText",
                                  exact_match="What is the recommended console")),
     "/f/books/59421/a-title", "", None),
    (official("a role", **on_page("__GITLAB__/project/-/members", ROLE.format("bob"), must_include=["Guest"])), "/", "", None),
    (official("the last order", **on_page(LATEST, DETAILS, must_include=["Canon photo printer"])), "/", "", None),
    (official("a review's author", **on_page("last", "func:shopping_get_sku_latest_review_author('B00A')", exact_match="Emma")), "/", "", None),
    (official("a review's rating", **on_page("last", "func:shopping_get_sku_latest_review_rating('B00A')", exact_match="100")), "/", "", None),
    (official("prepared", **{"eval_types": ["program_html"],
                             "program_html": [{"url": "__SHOPPING__/form", "prep_actions": ["document.querySelector('button').click()"],
     "locator": "document.querySelector('input[name=\"title\"]').value", "required_contents": {"exact_match": "Light"}}]}), "/", "", None),
]
NEVER = [  # these fail whatever is done
    official("another role", **on_page("__GITLAB__/project/-/members", ROLE.format("ann"), must_include=["Guest"])),
    official("nobody", **on_page("__GITLAB__/project/-/members", ROLE.format("eve"), must_include=["Guest"])),
    official("no such part", **on_page("last", "document.querySelector('.none').outerText", exact_match="x")),
    official("no review", **on_page("last", "func:shopping_get_sku_latest_review_author('B00B')", exact_match="Emma")),
    official("one of two is missing", **on_page("last", "", must_include=["Wish list", "no such words"]))]


@contextmanager
def own_sites(folder):
    asked = []

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Cookie"), self.headers.get("Authorization")))
            path = self.path.partition("?")[0]
            data = json.dumps(REST[path]) if path in REST else PAGES.get(path, "")
            self.send_response(200 if data else 404)
            self.send_header("Content-Type", "application/json" if path in REST else "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(data.encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"token"')

        def log_message(self, *_):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    (folder / "tasks.json").write_text(json.dumps([task for task, *_ in OFFICIAL] + NEVER + [official("elsewhere", start="__MAP__")]))
    (folder / "auth").mkdir()
    state = {"cookies": [{"name": "login", "value": "emma", "domain": "127.0.0.1", "path": "/", "expires": -1, "httpOnly": False, "secure": False,
                          "sameSite": "Lax"}], "origins": []}
    (folder / "auth/shopping_state.json").write_text(json.dumps(state))
    try:
        yield url, asked
    finally:
        server.shutdown()
        server.server_close()


@browser
def test_official_tasks_are_played_on_sites_of_ones_own(tmp_path, monkeypatch):
    with own_sites(tmp_path) as (url, asked):
        monkeypatch.setenv("SHOPPING", url)
        env = make_env("webarena", tasks=f"{tmp_path}/tasks.json", gitlab=url, storage=f"{tmp_path}/auth")
        for n, (task, path, answer, wrong) in enumerate(OFFICIAL):
            seen = env.reset(n)
            assert "URL: http://onestopmarket.com/" in seen and url not in seen and f"OBJECTIVE: {task['intent']}" in seen
            if path != "/":
                assert env.step(f"```goto [http://onestopmarket.com{path}]```").valid
            step = env.step(f"```stop [{answer}]```")
            assert step.success and step.reward == 1, task["intent"]
            if wrong is not None:
                env.reset(n)
                assert env.step(f"```stop [{wrong}]```").reward == 0
            elif "url_match" in task["eval"]["eval_types"]:
                env.reset(n)
                assert env.step("```stop []```").reward == 0
        for n, task in enumerate(NEVER, len(OFFICIAL)):
            env.reset(n)
            assert env.step("```stop [x]```").reward == 0, task["intent"]
        assert any(cookie == "login=emma" for _, cookie, _ in asked) and any(auth == "Bearer token" for _, _, auth in asked)
        text = env.reset(0)
        step = env.step(f"```click [{tree.find(text, 'link', 'outside')}]```")
        assert "outside.example" not in str(asked) and not env.step("```goto [http://outside.example/]```").valid
        with pytest.raises(ValueError, match="MAP"):
            env.reset(len(OFFICIAL) + len(NEVER))
        with pytest.raises(ValueError, match="items 0 to"):
            env.reset(10_000)
        env.close()
    with pytest.raises(EnvError):  # the site is gone
        gone = make_env("webarena", tasks=f"{tmp_path}/tasks.json")
        try:
            gone.reset(0)
        finally:
            gone.close()
