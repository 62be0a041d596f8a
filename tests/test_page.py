"""The page of a run in a real Chromium, where there is one: what a model wrote never becomes
markup, and whatever the page offers works."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_script
from test_view import EVIL, damaged, played_in, run_of
from test_view import folder as folder  # a fixture

import view


@pytest.fixture(scope="module")
def browser():
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"),
                                    args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser, address, **how):
    """-> the page, and a list of whatever goes wrong in it"""
    page = browser.new_page(**how)
    wrong = []
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.goto(address if str(address).startswith("http") else f"file://{address}")
    page.wait_for_selector("#head th")
    return page, wrong


def until(page, expression):
    """Wait until a JavaScript expression is true. (Playwright's own wait evaluates text within the
    page, which the page's policy forbids.)"""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def rows_of(page):
    return page.locator("#rows tr")


def column(page, name):
    """The texts of a column of the table."""
    names = [text.strip(" ▲▼") for text in page.locator("#head th").all_inner_texts()]
    place = names.index(name) + 1
    return page.locator(f"#rows td:nth-child({place})").all_inner_texts()


def wait_for_articles(page, count):
    until(page, f"document.querySelectorAll('article').length == {count}")


def open_pair(page):
    """Open the first two trajectories of BabyAI's that are of one group."""
    page.fill("input[aria-label=item]", "babyai")
    rows_of(page).first.click()
    wait_for_articles(page, 1)
    page.locator("article .group button").first.click()
    wait_for_articles(page, 2)


# ---- nothing that was written runs ----


def test_nothing_runs_that_a_model_wrote(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    page.fill("input[aria-label=item]", "<img")
    assert rows_of(page).count() == 1 and EVIL in rows_of(page).inner_text()
    rows_of(page).click()
    page.wait_for_selector("article .assistant")
    page.locator("button", has_text="clear").click()
    page.fill("input[aria-label=step]", "1")
    page.get_by_role("button", name="sample", exact=True).click()
    rows_of(page).first.click()  # the first of the first group: its error and its reply
    until(page, "document.querySelector('article .dim').textContent.includes('owned')")
    assert EVIL in page.locator("article .dim").first.inner_text()
    reply = page.locator("article .assistant").first.inner_text()
    assert EVIL.replace(" ", "") in reply.replace(" ", "")
    # The search's snippet, groups' names and the distributions are text, too.
    page.locator("#distributions summary").click()
    page.fill("#search", "onerror")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#rows tr').length == 1")
    for name in ("item", "status", "last_reply", "category"):
        page.select_option("select[aria-label='group by']", name)
        assert rows_of(page).count() == 1
    assert page.title() == "evil" and not wrong and page.locator("img").count() == 0


def test_evil_text_in_every_field_of_a_run_stays_text(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run/trajectories/step_000002.jsonl"
    trajectories = [json.loads(line) for line in path.read_text().splitlines()]
    for t in trajectories[:4]:
        t |= {"item": EVIL, "env": EVIL, "status": EVIL, "error": EVIL,
              "invalid_turns": [1, EVIL], "cut_turns": [1, EVIL]}
        t["messages"] = [{"role": "assistant", "content": EVIL}] * 5
    path.write_text("".join(json.dumps(t) + "\n" for t in trajectories))
    config = json.loads((tmp_path / "run/config.json").read_text())
    config |= dict.fromkeys(("env", "algo", "seed", "horizon", "env_args"), EVIL)
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    (tmp_path / "run").rename(tmp_path / "<img src=x onerror=document.title=1>")
    page, wrong = opened(browser, view.write_page(next(tmp_path.iterdir())))
    page.locator("#distributions summary").click()
    page.fill("input[aria-label=item]", "<img")
    assert rows_of(page).count() == 5  # these four, and the one of the fixture
    for name in ("item", "status", "last_reply", "step", ""):
        page.select_option("select[aria-label='group by']", name)
    rows_of(page).first.click()
    rows_of(page).last.click(modifiers=["Shift"])
    wait_for_articles(page, 2)
    assert page.locator("article .badge").count() >= 2
    page.reload()  # by the address alone
    wait_for_articles(page, 2)
    assert page.title().startswith("<img") and not wrong and page.locator("img").count() == 0


# ---- the table ----


def as_shown(value):
    """A value of the table: two digits of a float, so that rounding makes no difference."""
    return f"{value:.2g}" if isinstance(value, float) else str(value).lower()


def test_the_table_is_sorted_by_each_column_and_says_so(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    table = run_of((folder / "view.html").read_text())["table"]
    for name in ("item", "sample", "reward", "success", "turns", "tokens", "category"):
        for descending in (False, True):
            page.get_by_role("button", name=name, exact=True).click()
            expected = sorted((row[name] for row in table), reverse=descending)
            got = column(page, name)
            if isinstance(expected[0], float):
                got = [as_shown(float(text)) for text in got]
            assert got == [as_shown(value) if not isinstance(value, str) else value
                           for value in expected], name
            (head,) = page.locator("#head th:not([aria-sort=none])").all()
            assert head.get_attribute("aria-sort") == ("descending" if descending else "ascending")
            assert head.inner_text().split() == [name, "▼" if descending else "▲"]
    assert not wrong


def test_the_table_is_filtered(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    table = run_of((folder / "view.html").read_text())["table"]
    rows = rows_of(page)
    assert rows.count() == 48
    for name, title in (("env", "world"), ("success", "success"), ("category", "category")):
        value = as_shown(table[-1][name]) if name == "success" else table[-1][name]
        page.select_option(f"select[aria-label={name}]", value)
        assert rows.count() == sum(row[name] == table[-1][name] for row in table)
        assert set(column(page, title)) == {value}
        page.select_option(f"select[aria-label={name}]", "")
    for name, text, passes in (
            ("reward", ">0", lambda x: x > 0), ("reward", "<= 0", lambda x: x <= 0),
            ("reward", "1", lambda x: x == 1), ("step", "1-2", lambda x: 1 <= x <= 2),
            ("step", "0, 2", lambda x: x in (0, 2)), ("turns", ">=2", lambda x: x >= 2),
            ("reward", "-1..0.5", lambda x: -1 <= x <= 0.5),
            ("invalid", "1", lambda x: x == 1), ("turns", ">", lambda x: True)):
        page.fill(f"input[aria-label={name}]", text)
        assert rows.count() == sum(row[name] is not None and passes(row[name]) for row in table)
        page.fill(f"input[aria-label={name}]", "")
    page.fill("input[aria-label=step]", "1")
    page.get_by_role("button", name="clear").click()
    assert rows.count() == 48
    assert not wrong


def test_trajectories_are_grouped_and_a_group_lists_its_own(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    table = run_of((folder / "view.html").read_text())["table"]
    for name, title in (("item", "item"), ("category", "category"), ("last_reply", "last reply"),
                        ("step", "step")):
        page.select_option("select[aria-label='group by']", name)
        groups = {}
        for row in table:
            groups.setdefault(str(row[name]) or "(none)", []).append(row["success"])
        keys = column(page, title)
        assert sorted(keys) == sorted(groups)
        for key, count, success in zip(keys, column(page, "trajectories"),
                                       column(page, "success")):
            assert int(count) == len(groups[key])
            assert abs(float(success) - sum(groups[key]) / len(groups[key])) < 5e-3
    page.select_option("select[aria-label='group by']", "item")
    key = column(page, "item")[0]
    rows_of(page).first.click()
    assert set(column(page, "item")) == {key}
    assert rows_of(page).count() == sum(row["item"] == key for row in table)
    assert not wrong


def test_two_steps_are_compared(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run/trajectories/step_000002.jsonl"
    lines = [json.loads(line) | {"success": True} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = view.write_page(tmp_path / "run")
    page, wrong = opened(browser, path)
    table = run_of(path.read_text())["table"]
    page.select_option("select[aria-label='group by']", "category")
    page.fill("input[aria-label=step]", "0, 2")
    keys = column(page, "category")
    shown = zip(keys, column(page, "success, 0"), column(page, "success, 2"),
                column(page, "change"))
    for key, *texts in shown:
        means = []
        for step in (0, 2):
            held = [row["success"] for row in table
                    if row["category"] == key and row["step"] == step]
            means.append(sum(held) / len(held) if held else None)
        before, after = means
        change = after - before if None not in means else None
        for text, value in zip(texts, (before, after, change)):
            assert text == "" if value is None else abs(float(text) - value) < 5e-3
    assert any(float(text) > 0 for text in column(page, "change") if text)
    assert len(keys) > 3 and not wrong


def test_search_finds_a_text_in_replies_or_in_the_environments_text(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    played = [json.loads(line) for line in played_in(folder)]
    table = run_of((folder / "view.html").read_text())["table"]
    roles = {"anything": ("user", "assistant"), "replies": ("assistant",), "environment": ("user",)}
    for text in ("Grey", "no such text"):
        for where, of in roles.items():
            page.select_option("select[aria-label='search in']", where)
            page.fill("#search", text)
            page.keyboard.press("Enter")
            expected = set()
            for row, t in zip(table, played):
                replies = t["messages"][3::2] if "assistant" in of else []
                # The last observation is not fed to the model: it has no tokens.
                said = t["messages"][0:-1:2] if "user" in of else []
                if any(text.lower() in m["content"].lower() for m in replies + said):
                    expected.add((str(row["step"]), row["item"], str(row["sample"])))
            until(page,
                f"!document.getElementById('count').textContent.includes('searching')"
                f" && document.querySelectorAll('#rows tr').length == {len(expected)}")
            got = set(zip(column(page, "step"), column(page, "item"), column(page, "sample")))
            assert got == expected
            if expected:
                assert all("grey" in snippet.lower() for snippet in column(page, "found"))
    assert not wrong


# ---- opened trajectories ----


def test_trajectories_are_opened_by_keyboard_side_by_side(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = rows_of(page)
    page.fill("input[aria-label=item]", "babyai")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("svg.room")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("b")
    wait_for_articles(page, 2)
    page.keyboard.press("j")  # the one after the first of the two
    wait_for_articles(page, 1)
    assert rows.nth(2).get_attribute("aria-selected") == "true"
    page.keyboard.press("k")
    until(page,
        "document.querySelectorAll('#rows tr')[1].getAttribute('aria-selected') == 'true'")
    page.keyboard.press("Escape")
    wait_for_articles(page, 0)
    assert page.locator("#side").is_hidden()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    page.keyboard.press("/")
    page.keyboard.type("?")  # in a field, keys are text
    assert page.input_value("#search") == "?" and page.locator("#help").is_hidden()
    assert not wrong


def test_the_table_stays_beside_what_is_opened_and_nothing_is_wider_than_the_screen(
        folder, browser):
    page, wrong = opened(browser, folder / "view.html", viewport={"width": 1400, "height": 900})
    open_pair(page)
    page.locator("article .turn").last.scroll_into_view_if_needed()
    table = page.locator(".scroll").bounding_box()
    first, second = (article.bounding_box() for article in page.locator("article").all())
    assert table["x"] + table["width"] <= first["x"]
    assert first["x"] + first["width"] <= second["x"]
    assert 0 <= table["y"] < 900  # in the window although the page was scrolled
    for width in (1400, 1000, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not wrong


def test_each_trajectory_has_an_address_and_back_goes_back(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    open_pair(page)
    pair = page.url
    page.locator("article .group button").last.click()
    until(page, f"location.href != {pair!r}")
    page.go_back()
    until(page, f"location.href == {pair!r}")
    titles = page.locator("article h3").all_inner_texts()
    page.go_forward()
    until(page, f"location.href != {pair!r}")
    other, other_wrong = opened(browser, pair.removeprefix("file://"))
    wait_for_articles(other, 2)
    assert other.locator("article h3").all_inner_texts() == titles
    # A click with Shift opens a trajectory beside the one that is open.
    rows_of(other).first.click()
    wait_for_articles(other, 1)
    rows_of(other).last.click(modifiers=["Shift"])
    wait_for_articles(other, 2)
    assert not wrong and not other_wrong


def test_turns_have_their_reward_advantage_and_marks(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    played = [json.loads(line) for line in played_in(folder)]
    table = run_of((folder / "view.html").read_text())["table"]
    (place, t) = next((k, t) for k, t in enumerate(played)
                      if t["invalid_turns"] and t["item"] != EVIL and t["turns"] > 1)
    row = table[place]
    page.goto(f"{page.url}#{row['step']}/{row['item']}/{row['sample']}")
    wait_for_articles(page, 1)
    labels = page.locator("article .assistant .who").all_inner_texts()
    assert len(labels) == t["turns"]
    rewards = iter(r for r, (m, after) in zip(t["rewards"], zip(t["mask"], [*t["mask"][1:], False]))
                   if m and not after)
    for turn, (label, reward) in enumerate(zip(labels, rewards), 1):
        assert ("invalid" in label) == (turn in t["invalid_turns"])
        assert ("penalised" in label) == (turn in t["invalid_turns"] and reward < 0)
        assert label.endswith("cut") == (turn in t["cut_turns"])
        assert f"turn {turn}: reply, reward {reward:g}, advantage" in label
    assert not wrong


def test_a_segments_border_is_drawn_and_what_is_new_in_it(browser, tmp_path):
    """A window agent: each prompt repeats the instructions and one turn. What is shown beside the
    fold is the message that is new, as in the record's messages."""
    out = tmp_path / "r"
    done = run_script("train.py", "--items_per_step", "2", "--rollouts_per_item", "2", "--steps",
                      "1", "--horizon", "5", "--agent", "window", "--agent_args", "keep=1",
                      "--out", out)
    assert done.returncode == 0, done.stderr
    assert run_script("view.py", out).returncode == 0
    played = [json.loads(line) for line in played_in(out)]
    t = max(played, key=lambda t: len(t["starts"]))
    assert len(t["starts"]) > 2
    page, wrong = opened(browser, out / "view.html")
    page.goto(f"{page.url}#{t['step']}/{t['item']}/{t['sample']}")
    wait_for_articles(page, 1)
    boxes = page.locator("article .turn.user")
    borders = page.locator("article .turn.segment")
    assert borders.count() == len(t["starts"]) - 1
    new = [message["content"] for message in t["messages"][2::2]]
    for place in range(t["turns"]):
        text = boxes.nth(place).inner_text()
        assert new[place] in text
        if place:  # instructions and earlier observations are folded, or in the segment before
            assert t["messages"][0]["content"][:40] not in text
            assert new[place - 1] not in text or new[place - 1] == new[place]
    page.locator("article .turn.segment summary").first.click()
    assert t["messages"][0]["content"][:40] in borders.first.inner_text()
    assert page.locator("article svg.room").count() >= t["turns"]
    assert not wrong


def test_a_token_says_its_probability_and_entropy(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    open_pair(page)
    token = page.locator("article .t.m").first
    title = token.get_attribute("title")
    assert all(name in title for name in ("probability", "log-prob", "entropy", "advantage"))
    token.hover()
    assert page.locator("#readout").inner_text() == title
    assert not wrong


def test_tokens_are_coloured(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    open_pair(page)
    colours = ("new Set([...document.querySelectorAll('.t.m')]"
               ".map(e => getComputedStyle(e).backgroundColor)).size")
    assert page.evaluate(colours) == 1  # green letters alone
    page.select_option("#colour", "logprob")
    until(page, f"{colours} > 3")
    seen = page.evaluate(colours)
    page.select_option("#colour", "advantage")
    until(page, f"{colours} < {seen}")
    page.select_option("#colour", "entropy")
    until(page, f"{colours} > 3")
    assert not wrong


def test_what_differs_between_two_trajectories_is_marked(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    assert page.evaluate("missing(['a','b','c','x'], ['a','c','d','x'])") == [
        [False, True, False, False], [False, False, True, False]]
    assert page.evaluate("missing(['p','q','r'], ['r','p','q'])") == [
        [False, False, True], [True, False, False]]
    assert page.evaluate("missing([], ['a'])") == [[], [True]]
    assert page.evaluate("missing(['a','a'], ['a'])") == [[False, True], [False]]
    page.fill("input[aria-label=item]", "babyai")
    rows_of(page).first.click()
    wait_for_articles(page, 1)
    others = page.locator("article .group button")
    for place in range(others.count()):
        others = page.locator("article").first.locator(".group button")
        others.nth(place).click()
        wait_for_articles(page, 2)
        if page.locator(".differs").count():
            break
    assert page.locator(".differs").count()
    # The first parts, with the same instructions, are pale; the first difference is not.
    first = page.locator("article").first.locator(".turn")
    assert "same" in first.first.get_attribute("class")
    page.locator("#first-difference").click()
    here = page.locator("article").first.locator(".turn.here")
    assert "same" not in here.get_attribute("class") and here.locator(".differs").count()
    page.keyboard.press("d")
    until(page, "!document.querySelector('.differs')")
    assert not wrong


def test_textcraft_shows_inventories_and_webarena_the_element_that_was_clicked(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    page.fill("input[aria-label=item]", "textcraft")
    rows_of(page).first.click()
    page.wait_for_selector("article .state ul")
    assert "inventory: empty" in page.locator("article .state").first.inner_text()
    tree = "Tab\n[1] link 'home'\n\t[12] button 'buy <b>'\n\t[2] text"
    parts = page.evaluate(
        "tree => withElement('webarena', tree, 'buy\\n```click [12]```')"
        ".map(part => part.outerHTML ?? part)", tree)
    assert parts == ["Tab\n[1] link 'home'\n", "<mark>\t[12] button 'buy &lt;b&gt;'</mark>",
                     "\n\t[2] text"]
    for env, reply in (("webarena", "```go_back```"), ("webarena", "```click [77]```"),
                       ("babyai", "click [1]")):
        assert page.evaluate("args => withElement(...args)", [env, tree, reply]) == [tree]
    assert not wrong


def test_the_bytes_of_a_character_are_joined(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    texts = page.evaluate(
        "texts(['a', 'b', 'c', 'a', 'c'], {a: [0xc3], b: [0xa9], c: '!'})")
    assert texts == ["", "\u00e9", "!", "", "\ufffd!"]
    assert not wrong


def test_the_last_room_is_drawn_and_a_single_step_is_a_dot(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    page, wrong = opened(browser, view.write_page(tmp_path / "run"))
    figures = page.locator("#curves figure").count()
    assert page.locator("#curves circle").count() == figures > 5
    page.fill("input[aria-label=item]", "babyai")
    rows_of(page).first.click()
    wait_for_articles(page, 1)
    turns = page.locator("article .assistant").count()
    assert page.locator("article svg.room").count() == turns + 1
    assert not wrong


def test_a_damaged_run_opens(folder, browser, tmp_path):
    out, expected = damaged(folder, tmp_path)
    page, wrong = opened(browser, view.write_page(out))
    assert expected[0] in page.locator("#left_out").inner_text()
    table = run_of((out / "view.html").read_text())["table"]
    assert rows_of(page).count() == len(table)
    rows_of(page).nth(column(page, "reward").index("not finite")).click()
    page.wait_for_selector("article .turn")
    text = page.locator("article").inner_text()
    assert "[unknown token 1000000]" in text and "[unknown token -5]" in text
    page.select_option("#colour", "logprob")
    page.fill("input[aria-label=reward]", ">=0")
    assert rows_of(page).count() == len(table) - 1
    assert not wrong


# ---- curves, distributions, several runs ----


def test_curves_have_axes_say_their_values_and_choose_steps(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure = page.locator("#curves figure").first
    assert figure.locator("b").inner_text() == "success"
    assert {"0", "0.5", "1"} <= set(figure.locator("svg text").all_text_contents())
    box = figure.locator("svg").bounding_box()
    at = {step: {"x": box["width"] * (34 + step / 2 * 260) / 300, "y": 40} for step in (0, 1, 2)}
    for step in (0, 1, 2):
        figure.locator("svg").hover(position=at[step])
        shown = figure.locator("span").first.inner_text()
        assert shown.startswith(f"step {step}: ")
        assert abs(float(shown.split(": ")[1]) - rows[step]["success"]) < 5e-3
    figure.locator("svg").click(position=at[1])
    assert set(column(page, "step")) == {"1"}
    figure.locator("svg").click(position=at[2], modifiers=["Shift"])
    assert page.input_value("input[aria-label=step]") == "1, 2"
    assert {"success, 1", "success, 2", "change"} <= {
        text.strip(" ▲▼") for text in page.locator("#head th").all_inner_texts()}
    assert not wrong


def test_a_bar_of_a_distribution_filters_the_table(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    table = run_of((folder / "view.html").read_text())["table"]
    page.locator("#distributions summary").click()
    page.wait_for_selector("#charts figure")
    turns = page.locator("#charts figure", has_text="turns").first
    titles = turns.locator("g title").all_text_contents()
    values = sorted({row["turns"] for row in table})
    for value, text in zip(values, titles, strict=True):
        held = [row for row in table if row["turns"] == value]
        succeeded = sum(row["success"] for row in held)
        assert text == f"turns {value}: {len(held)}, {succeeded} of them successful"
    turns.locator("g.bar").last.click(position={"x": 5, "y": 60})
    assert set(column(page, "turns")) == {str(values[-1])}
    page.get_by_role("button", name="clear").click()
    tokens = page.locator("#charts figure", has_text="tokens").first.locator("g.bar").last
    low, high = re.match(r"tokens (\d+) to (\d+):", tokens.locator("title").text_content()).groups()
    tokens.click(position={"x": 5, "y": 60})
    assert 0 < rows_of(page).count() < len(table)
    assert all(int(low) <= int(value) <= int(high) for value in column(page, "tokens"))
    page.get_by_role("button", name="clear").click()
    page.locator("#charts figure", has_text="success by category").locator("g.bar").first.click()
    assert len(set(column(page, "category"))) == 1
    assert not wrong


def test_two_runs_are_in_one_page(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other/metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"success": 0.5}) + "\n" for row in rows))
    page, wrong = opened(browser, view.write_page([folder, tmp_path / "other"],
                                                  out=tmp_path / "both.html"))
    assert rows_of(page).count() == 96 and page.title() == "evil, other"
    figure = page.locator("#curves figure").first
    assert figure.locator("polyline").count() == 2
    figure.locator("svg").hover()
    assert figure.locator(".swatch").all_inner_texts()[1].strip() == "0.500"
    page.select_option("select[aria-label=run]", "other")
    assert rows_of(page).count() == 48 and set(column(page, "run")) == {"other"}
    page.select_option("select[aria-label=run]", "")
    rows_of(page).first.click()
    wait_for_articles(page, 1)
    first = page.url
    page.select_option("select[aria-label=run]", "other")
    rows_of(page).first.click()
    until(page, f"location.href != {first!r}")
    assert "#0:" in first and "#1:" in page.url
    until(page, "document.querySelector('article h3').textContent.startsWith('other')")
    page.select_option("select[aria-label=run]", "")
    page.select_option("select[aria-label='group by']", "run")
    assert sorted(column(page, "run")) == ["evil", "other"]
    assert not wrong


def test_runs_whose_folders_have_one_name_are_told_apart_by_their_paths(
        folder, browser, tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(folder, tmp_path / parent / "run")
    runs = [tmp_path / parent / "run" for parent in ("a", "b")]
    page, wrong = opened(browser, view.write_page(runs, out=tmp_path / "both.html"))
    options = page.locator("select[aria-label=run] option").all_inner_texts()
    assert options[1:] == [f"run: {run}" for run in runs] and not wrong


# ---- the ten questions of docs/view.md ----


class Clicks:
    """Counts what a person does; a choice in a menu is one click."""

    def __init__(self, page):
        self.page = page
        self.count = 0

    def click(self, selector, **how):
        self.page.locator(selector).first.click(**how)
        self.count += 1

    def choose(self, menu, value):
        self.page.select_option(f"select[aria-label='{menu}']", value)
        self.count += 1

    def head(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()
        self.count += 1


def ask_items(c, table):
    c.choose("group by", "item")
    successes = {}
    for row in table:
        successes.setdefault(row["item"], []).append(row["success"])
    never = {item for item, found in successes.items() if not any(found)}
    assert set(column(c.page, "item")[:len(never)]) == never


def ask_categories(c, table):
    c.click("#distributions summary")
    c.page.wait_for_selector("#charts figure")
    texts = c.page.locator("#charts figure", has_text="success by category").locator("title")
    hardest = texts.all_text_contents()[-1].split(":")[0]
    held = [row["success"] for row in table if row["category"] == hardest]
    assert sum(held) / len(held) <= sum(row["success"] for row in table) / len(table)


def ask_first_invalid(c, table):
    c.click("#distributions summary")
    c.page.wait_for_selector("#charts figure")
    texts = c.page.locator("#charts figure", has_text="first invalid").locator("title")
    turns = [row["invalid"] for row in table if row["invalid"] is not None]
    label = f"first invalid turn {min(turns)}: {turns.count(min(turns))},"
    assert texts.all_text_contents()[0].startswith(label)


def ask_last_reply(c, table):
    c.choose("success", "false")
    c.choose("group by", "last_reply")
    c.head("trajectories")
    c.head("trajectories")
    said = [row["last_reply"] for row in table if not row["success"]]
    assert int(column(c.page, "trajectories")[0]) == max(said.count(text) for text in said)


def ask_change(c, table):
    box = c.page.locator("#curves svg").first.bounding_box()
    at = [{"x": box["width"] * (34 + step / 2 * 260) / 300, "y": 40} for step in (0, 2)]
    c.click("#curves svg", position=at[0])
    c.click("#curves svg", position=at[1], modifiers=["Shift"])
    c.head("change")
    changes = [float(text) for text in column(c.page, "change") if text]
    assert changes == sorted(changes) and changes


def ask_why(c, table):
    c.click("#rows tr")
    wait_for_articles(c.page, 1)
    c.click("article .group button")
    wait_for_articles(c.page, 2)
    c.click("#first-difference")
    assert c.page.locator(".turn.here").count() or not c.page.locator(".differs").count()


def ask_unsure(c, table):
    c.click("#rows tr")
    wait_for_articles(c.page, 1)
    c.choose("colour of tokens", "entropy")
    c.page.locator("article .t.m").first.hover()
    assert "nats" in c.page.locator("#readout").inner_text()


def ask_status(c, table):
    c.choose("group by", "status")
    counts = dict(zip(column(c.page, "status"), column(c.page, "trajectories")))
    assert int(counts["horizon"]) == sum(row["status"] == "horizon" for row in table)


def ask_search(c, table):
    c.choose("search in", "replies")
    c.page.fill("#search", "turn left")
    c.page.keyboard.press("Enter")
    until(c.page, "[...document.querySelectorAll('#head th')].some("
                  "th => th.textContent == 'found')")
    assert all("turn left" in text.lower() for text in column(c.page, "found"))


def ask_runs(c, table):
    c.choose("run", "other")
    c.choose("group by", "category")
    assert sum(map(int, column(c.page, "trajectories"))) == len(table)


@pytest.mark.parametrize("ask", [
    ask_items, ask_categories, ask_first_invalid, ask_last_reply, ask_change, ask_why, ask_unsure,
    ask_status, ask_search, ask_runs])
def test_a_question_is_answered_within_four_clicks(folder, browser, two_runs, ask):
    page, wrong = opened(browser, two_runs if ask is ask_runs else folder / "view.html")
    clicks = Clicks(page)
    ask(clicks, run_of((folder / "view.html").read_text())["table"])
    assert 1 <= clicks.count <= 4 and not wrong


@pytest.fixture(scope="module")
def two_runs(folder, tmp_path_factory):
    """The page of the run and a copy of it, "other"."""
    out = tmp_path_factory.mktemp("two")
    shutil.copytree(folder, out / "other")
    return view.write_page([folder, out / "other"], out=out / "both.html")


# ---- size, and a live run ----


def repeated(folder, out, steps):
    """A run of 48 trajectories a step, those of `folder`, in `out`."""
    shutil.copytree(folder, out)
    trajectories = [json.loads(line) for line in played_in(folder)]
    first_row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    rows = []
    for step in range(steps):
        lines = [json.dumps(t | {"step": step, "group": k // 4, "sample": k % 4}) + "\n"
                 for k, t in enumerate(trajectories)]
        (out / f"trajectories/step_{step:06d}.jsonl").write_text("".join(lines))
        rows.append(first_row | {"step": step, "trajectories": 48, "horizon": 3 + step // 10})
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_a_thousand_trajectories_weigh_little_and_open_by_day_and_by_night(
        folder, browser, tmp_path):
    path = view.write_page(repeated(folder, tmp_path / "run", 21))
    assert path.stat().st_size < 10e6
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, wrong = opened(browser, path, color_scheme=scheme)
        assert page.locator("#count").inner_text().startswith("1008 of 1008") and not wrong
        assert "at step 10, 20" in page.locator("#stages").inner_text()
        assert page.locator("#curves svg").first.locator(".stage").count() == 2
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


@pytest.mark.slow
def test_twenty_thousand_trajectories_open_within_two_seconds(folder, browser, tmp_path):
    path = view.write_page(repeated(folder, tmp_path / "run", 417), most=2000)
    assert path.stat().st_size < 10e6
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        page, wrong = opened(browser, path)
        seconds.append(time.perf_counter() - begin)
        assert page.locator("#count").inner_text().startswith("20016 of 20016") and not wrong
        page.close()
    print(f"{path.stat().st_size / 1e6:.1f} MB, {sorted(seconds)[1]:.2f} s")
    assert sorted(seconds)[1] < 2


@pytest.fixture
def live(folder, tmp_path):
    """A run that has played one of its three steps, and the address at which it is served."""
    shutil.copytree(folder, tmp_path / "run")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/metrics.jsonl").write_text(lines[0])
    server = subprocess.Popen(
        [sys.executable, "view.py", "--live", str(tmp_path / "run"), "--port", "0"], cwd=ROOT,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    address = server.stdout.readline().split()[0]
    yield tmp_path / "run", address, lines
    server.terminate()
    server.wait()


def test_a_live_page_follows_its_run(live, browser):
    run, address, lines = live
    page, wrong = opened(browser, address)
    assert rows_of(page).count() == 16
    until(page, "document.getElementById('live').textContent == 'live: 1 of 3 steps'")
    rows_of(page).first.click()
    page.wait_for_selector("article .assistant")
    where = page.url
    page.focus("input[aria-label=item]")
    (run / "metrics.jsonl").write_text("".join(lines))
    until(page, "document.querySelectorAll('#rows tr').length == 48")
    assert page.evaluate("document.activeElement.ariaLabel") == "item"  # typing goes on
    assert "3 of 3" in page.locator("#live").inner_text()
    assert page.url == where and page.locator("article").count() == 1  # still open
    page.fill("#search", "onerror")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#rows tr').length < 48")
    page.get_by_role("button", name="clear").click()
    for place in (0, 20, 47):  # every trajectory can be opened
        rows_of(page).nth(place).click()
        until(page, "document.querySelectorAll('article .assistant').length > 0")
    # A step that is played again: the page starts anew.
    file = run / "trajectories/step_000002.jsonl"
    with page.expect_navigation(timeout=60_000):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:8]))
    until(page, "document.querySelectorAll('#rows tr').length == 40")
    assert not wrong


def test_a_live_page_is_for_this_machine_alone(live):
    import requests
    _, address, _ = live
    page = requests.get(address, timeout=60)
    assert page.status_code == 200 and "connect-src 'self'" in page.text
    foreign = requests.get(address, headers={"Host": "example.org:80"}, timeout=60)
    assert foreign.status_code == 403 and len(foreign.text) < 100
    without_port = requests.get(address, headers={"Host": "127.0.0.1"}, timeout=60)  # port 80
    assert without_port.status_code == 200
    for path in ("trajectory?run=0&id=99", "trajectory?run=0&id=-1", "trajectory?run=5&id=0",
                 "trajectory", "update?generation=0&rows=x", "search"):
        assert requests.get(address + path, timeout=60).status_code == 400, path
    assert requests.get(address + "config.json", timeout=60).status_code == 404
    assert requests.post(address, timeout=60).status_code == 501


def test_a_live_page_of_no_run_or_at_a_port_in_use_is_one_line(live, tmp_path):
    run, address, _ = live
    used = address.rstrip("/").rpartition(":")[2]
    for path, port in ((tmp_path / "nothing", "0"), (run, used)):
        done = run_script("view.py", "--live", path, "--port", port)
        assert done.returncode == 2, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("view.py:")]
        assert len(said) == 1 and "Traceback" not in done.stderr


def test_failed_environments_do_not_count_in_means(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    for path in (tmp_path / "run/trajectories").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, t in enumerate(rows):
            t |= {"env": "babyai", "success": True, "reward": 1.0, "status": "done"}
            if number % 2:
                t |= {"success": False, "reward": 0.0, "status": "env_error", "error": "timeout: x"}
        path.write_text("".join(json.dumps(t) + "\n" for t in rows))
    page, wrong = opened(browser, view.write_page(tmp_path / "run").resolve())
    page.select_option("select[aria-label='group by']", "step")
    assert column(page, "success") == ["1"] * 3
    assert column(page, "reward") == ["1"] * 3
    page.locator("#distributions summary").click()
    bars = page.locator("svg[aria-label^='success by'] title")
    bars.first.wait_for(state="attached")  # the charts are drawn after the click
    titles = bars.all_text_contents()
    assert titles and all("success 1 of" in title for title in titles), titles
    titles = page.locator("svg[aria-label=reward] title").all_text_contents()
    assert titles and all(title.startswith("reward 1:") for title in titles), titles
    assert not wrong
