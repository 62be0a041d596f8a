"""The page of a run in a real Chromium, where there is one: what a model wrote never becomes
markup, and whatever the page offers works."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_script
from test_train import read_jsonl
from test_view import EVIL, damaged, played_in, run_of, write_rows
from test_view import copied as copied  # fixtures
from test_view import folder as folder

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


@pytest.fixture
def opened(browser):
    """A function that opens a page. At the end nothing has gone wrong in any of them."""
    wrong, pages = [], []

    def open_page(address, **how):
        page = browser.new_page(**how)
        pages.append(page)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.goto(address if str(address).startswith("http") else f"file://{address}")
        page.wait_for_selector("#head th")
        return page

    yield open_page
    assert not wrong
    for page in pages:
        page.close()


@pytest.fixture
def page(opened, folder):
    return opened(folder / "view.html")


@pytest.fixture(scope="module")
def table(folder):
    return run_of(folder / "view.html")["table"]


def until(page, expression):
    """Wait until a JavaScript expression is true. (Playwright's own wait evaluates text within the
    page, which the page's policy forbids.)"""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def rows_of(page):
    return page.locator("#rows tr")


def heads(page):
    return [text.strip(" ▲▼") for text in page.locator("#head th").all_inner_texts()]


def column(page, name):
    """The texts of a column of the table."""
    place = heads(page).index(name) + 1
    return page.locator(f"#rows td:nth-child({place})").all_inner_texts()


def group_by(page, name):
    page.select_option("select[aria-label='group by']", name)


def wait_for_articles(page, count):
    until(page, f"document.querySelectorAll('article').length == {count}")


def open_first(page, world="babyai"):
    page.fill("input[aria-label=item]", world)
    rows_of(page).first.click()
    wait_for_articles(page, 1)


def open_pair(page):
    """Open the first two trajectories of BabyAI's that are of one group."""
    open_first(page)
    page.locator("article .group button").first.click()
    wait_for_articles(page, 2)


def close_to(text, value):
    return text == "" if value is None else abs(float(text) - value) < 5e-3


# ---- nothing that was written runs ----


def test_evil_text_in_every_field_of_a_run_and_in_a_reply_stays_text(copied, opened, tmp_path):
    rows = played_in(copied, 2)
    for t in rows[:4]:
        t |= {"item": EVIL, "env": EVIL, "status": EVIL, "error": EVIL}
        t["messages"] = [{"role": "assistant", "content": EVIL}] * 5
    write_rows(copied, rows, 2)
    config = json.loads((copied / "config.json").read_text())
    config |= dict.fromkeys(("env", "algo", "seed", "horizon", "env_args"), EVIL)
    (copied / "config.json").write_text(json.dumps(config))
    copied.rename(tmp_path / "<img src=x onerror=document.title=1>")
    page = opened(view.write_page(next(tmp_path.iterdir())))
    page.locator("#distributions summary").click()
    page.fill("input[aria-label=item]", "<img")
    assert rows_of(page).count() == 5  # these four, and the one of the fixture
    for name in ("item", "status", "last_reply", "category", "step", ""):
        group_by(page, name)
    rows_of(page).first.click()
    rows_of(page).last.click(modifiers=["Shift"])
    wait_for_articles(page, 2)
    page.reload()  # by the address alone
    wait_for_articles(page, 2)
    page.fill("input[aria-label=step]", "1")
    page.get_by_role("button", name="sample", exact=True).click()
    rows_of(page).first.click()  # the first of the first group: its error and its reply
    until(page, "document.querySelector('article .dim').textContent.includes('owned')")
    reply = page.locator("article .assistant").first.inner_text()
    assert EVIL.replace(" ", "") in reply.replace(" ", "")
    page.fill("#search", "onerror")  # the search's snippet
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#rows tr').length == 1")
    assert page.title().startswith("<img") and page.locator("img").count() == 0


# ---- the table ----


def as_shown(value):
    """A value of the table: two digits of a float, so that rounding makes no difference."""
    return f"{value:.2g}" if isinstance(value, float) else str(value).lower()


def test_the_table_is_sorted_by_each_column_and_says_so(page, table):
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


def test_the_table_is_filtered(page, table):
    rows = rows_of(page)
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


def test_trajectories_are_grouped_and_a_group_lists_its_own(page, table):
    for name, title in (("category", "category"), ("last_reply", "last reply"), ("step", "step"),
                        ("status", "status"), ("item", "item")):
        group_by(page, name)
        groups = {}
        for row in table:
            groups.setdefault(str(row[name]) or "(none)", []).append(row["success"])
        keys = column(page, title)
        assert sorted(keys) == sorted(groups)
        counts, successes = column(page, "trajectories"), column(page, "success")
        for key, count, success in zip(keys, counts, successes):
            assert int(count) == len(groups[key])
            assert close_to(success, sum(groups[key]) / len(groups[key]))
    rows_of(page).first.click()
    assert set(column(page, "item")) == {keys[0]}
    assert rows_of(page).count() == len(groups[keys[0]])


def test_two_steps_are_compared(copied, opened):
    write_rows(copied, [row | {"success": True} for row in played_in(copied, 2)], 2)
    path = view.write_page(copied)
    page = opened(path)
    table = run_of(path)["table"]
    group_by(page, "category")
    page.fill("input[aria-label=step]", "0, 2")
    names = ("category", "success, 0", "success, 2", "change")
    for key, *texts in zip(*(column(page, name) for name in names), strict=True):
        means = []
        for step in (0, 2):
            held = [row["success"] for row in table
                    if row["category"] == key and row["step"] == step]
            means.append(sum(held) / len(held) if held else None)
        change = means[1] - means[0] if None not in means else None
        assert all(map(close_to, texts, (*means, change)))
    assert any(float(text) > 0 for text in column(page, "change") if text)


def test_search_finds_a_text_in_replies_or_in_the_environments_text(page, table, folder):
    roles = {"anything": ("user", "assistant"), "replies": ("assistant",), "environment": ("user",)}
    for text in ("Grey", "no such text"):
        for where, of in roles.items():
            page.select_option("select[aria-label='search in']", where)
            page.fill("#search", text)
            page.keyboard.press("Enter")
            expected = set()
            for row, t in zip(table, played_in(folder)):
                replies = t["messages"][3::2] if "assistant" in of else []
                # The last observation is not fed to the model: it has no tokens.
                said = t["messages"][0:-1:2] if "user" in of else []
                if any(text.lower() in m["content"].lower() for m in replies + said):
                    expected.add((str(row["step"]), row["item"], str(row["sample"])))
            until(page, "!document.getElementById('count').textContent.includes('searching')"
                        f" && document.querySelectorAll('#rows tr').length == {len(expected)}")
            got = set(zip(column(page, "step"), column(page, "item"), column(page, "sample")))
            assert got == expected
            if expected:
                assert all("grey" in snippet.lower() for snippet in column(page, "found"))


# ---- opened trajectories ----


def test_trajectories_are_opened_by_keyboard_side_by_side(page):
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
    until(page, "document.querySelectorAll('#rows tr')[1].getAttribute('aria-selected') == 'true'")
    page.keyboard.press("Escape")
    wait_for_articles(page, 0)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("?")  # in a field, keys are text
    assert page.input_value("#search") == "?" and page.locator("#help").is_hidden()


def test_the_table_stays_beside_what_is_opened_and_nothing_is_wider_than_the_screen(page):
    page.set_viewport_size({"width": 1400, "height": 900})
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


def test_each_trajectory_has_an_address_and_back_goes_back(page, opened):
    open_pair(page)
    pair = page.url
    page.locator("article .group button").last.click()
    until(page, f"location.href != {pair!r}")
    page.go_back()
    until(page, f"location.href == {pair!r}")
    titles = page.locator("article h3").all_inner_texts()
    other = opened(pair.removeprefix("file://"))
    wait_for_articles(other, 2)
    assert other.locator("article h3").all_inner_texts() == titles


def test_turns_have_their_reward_advantage_and_marks(page, table, folder):
    (row, t) = next((row, t) for row, t in zip(table, played_in(folder))
                    if t["invalid_turns"] and t["item"] != EVIL and t["turns"] > 1)
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


def test_a_segments_border_is_drawn_and_what_is_new_in_it(opened, tmp_path):
    """A window agent: each prompt repeats the instructions and one turn. What is shown beside the
    fold is the message that is new, as in the record's messages."""
    out = tmp_path / "r"
    done = run_script("train.py", "--items_per_step", "2", "--rollouts_per_item", "2", "--steps",
                      "1", "--horizon", "5", "--agent", "window", "--agent_args", "keep=1",
                      "--out", out)
    assert done.returncode == 0, done.stderr
    t = max(played_in(out), key=lambda t: len(t["starts"]))
    assert len(t["starts"]) > 2
    page = opened(view.write_page(out))
    page.goto(f"{page.url}#{t['step']}/{t['item']}/{t['sample']}")
    wait_for_articles(page, 1)
    boxes = page.locator("article .turn.user")
    borders = page.locator("article .turn.segment")
    assert borders.count() == len(t["starts"]) - 1
    instructions = t["messages"][0]["content"][:40]
    new = [message["content"] for message in t["messages"][2::2]]
    for place in range(t["turns"]):
        text = boxes.nth(place).inner_text()
        assert new[place] in text
        if place:  # instructions and earlier observations are folded, or in the segment before
            assert instructions not in text
            assert new[place - 1] not in text or new[place - 1] == new[place]
    page.locator("article .turn.segment summary").first.click()
    assert instructions in borders.first.inner_text()
    assert page.locator("article svg.room").count() >= t["turns"]


def test_tokens_are_coloured_and_say_their_probability_and_entropy(page):
    open_pair(page)
    token = page.locator("article .t.m").first
    title = token.get_attribute("title")
    assert all(name in title for name in ("probability", "log-prob", "entropy", "advantage"))
    token.hover()
    assert page.locator("#readout").inner_text() == title
    colours = ("new Set([...document.querySelectorAll('.t.m')]"
               ".map(e => getComputedStyle(e).backgroundColor)).size")
    assert page.evaluate(colours) == 1  # green letters alone
    page.select_option("#colour", "logprob")
    until(page, f"{colours} > 3")
    page.select_option("#colour", "entropy")
    until(page, f"{colours} > 3")


def test_what_differs_between_two_trajectories_is_marked(page):
    for a, b, expected in (
            ("abcx", "acdx", [[False, True, False, False], [False, False, True, False]]),
            ("pqr", "rpq", [[False, False, True], [True, False, False]]),
            ("", "a", [[], [True]]), ("aa", "a", [[False, True], [False]])):
        assert page.evaluate("([a, b]) => missing([...a], [...b])", [a, b]) == expected
    open_first(page)
    first = page.locator("article").first
    for place in range(first.locator(".group button").count()):
        first.locator(".group button").nth(place).click()
        wait_for_articles(page, 2)
        if page.locator(".differs").count():
            break
    # The first parts, with the same instructions, are pale; the first difference is not.
    assert "same" in first.locator(".turn").first.get_attribute("class")
    page.locator("#first-difference").click()
    here = first.locator(".turn.here")
    assert "same" not in here.get_attribute("class") and here.locator(".differs").count()
    page.keyboard.press("d")
    until(page, "!document.querySelector('.differs')")


def test_textcraft_shows_inventories_and_webarena_the_element_that_was_clicked(page):
    open_first(page, "textcraft")
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
    # The bytes of a character are joined.
    texts = page.evaluate("texts(['a', 'b', 'c', 'a', 'c'], {a: [0xc3], b: [0xa9], c: '!'})")
    assert texts == ["", "\u00e9", "!", "", "\ufffd!"]


def test_the_last_room_is_drawn_and_a_single_step_is_a_dot(copied, opened):
    path = copied / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    page = opened(view.write_page(copied))
    figures = page.locator("#curves figure").count()
    assert page.locator("#curves circle").count() == figures > 5
    open_first(page)
    turns = page.locator("article .assistant").count()
    assert page.locator("article svg.room").count() == turns + 1


def test_a_damaged_run_opens(copied, opened):
    expected = damaged(copied)
    path = view.write_page(copied)
    page = opened(path)
    assert expected[0] in page.locator("#left_out").inner_text()
    table = run_of(path)["table"]
    assert rows_of(page).count() == len(table)
    rows_of(page).nth(column(page, "reward").index("not finite")).click()
    page.wait_for_selector("article .turn")
    text = page.locator("article").inner_text()
    assert "[unknown token 1000000]" in text and "[unknown token -5]" in text
    page.select_option("#colour", "logprob")
    page.fill("input[aria-label=reward]", ">=0")
    assert rows_of(page).count() == sum(row["reward"] is not None for row in table)


# ---- curves, distributions, several runs ----


def test_curves_have_axes_say_their_values_and_choose_steps(page, folder):
    rows = read_jsonl(folder / "metrics.jsonl")
    figure = page.locator("#curves figure").first
    assert figure.locator("b").inner_text() == "success"
    assert {"0", "0.5", "1"} <= set(figure.locator("svg text").all_text_contents())
    box = figure.locator("svg").bounding_box()
    at = {step: {"x": box["width"] * (34 + step / 2 * 260) / 300, "y": 40} for step in (0, 1, 2)}
    for step in (0, 1, 2):
        figure.locator("svg").hover(position=at[step])
        shown = figure.locator("span").first.inner_text()
        assert shown.startswith(f"step {step}: ")
        assert close_to(shown.split(": ")[1], rows[step]["success"])
    figure.locator("svg").click(position=at[1])
    assert set(column(page, "step")) == {"1"}
    figure.locator("svg").click(position=at[2], modifiers=["Shift"])
    assert page.input_value("input[aria-label=step]") == "1, 2"
    assert {"success, 1", "success, 2", "change"} <= set(heads(page))


def test_a_bar_of_a_distribution_filters_the_table(page, table):
    page.locator("#distributions summary").click()
    page.wait_for_selector("#charts figure")

    def chart(name):
        return page.locator("#charts figure", has_text=name).first

    values = sorted({row["turns"] for row in table})
    titles = chart("turns").locator("g title").all_text_contents()
    for value, text in zip(values, titles, strict=True):
        held = [row for row in table if row["turns"] == value]
        succeeded = sum(row["success"] for row in held)
        assert text == f"turns {value}: {len(held)}, {succeeded} of them successful"
    turns = [row["invalid"] for row in table if row["invalid"] is not None]
    label = f"first invalid turn {min(turns)}: {turns.count(min(turns))},"
    assert chart("first invalid").locator("title").all_text_contents()[0].startswith(label)
    chart("turns").locator("g.bar").last.click(position={"x": 5, "y": 60})
    assert set(column(page, "turns")) == {str(values[-1])}
    page.get_by_role("button", name="clear").click()
    chart("success by category").locator("g.bar").first.click()
    assert len(set(column(page, "category"))) == 1


def test_two_runs_are_in_one_page(folder, opened, tmp_path):
    other = shutil.copytree(folder, tmp_path / "b/other")
    rows = read_jsonl(other / "metrics.jsonl")
    (other / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"success": 0.5}) + "\n" for row in rows))
    page = opened(view.write_page([folder, other], out=tmp_path / "both.html"))
    assert rows_of(page).count() == 96 and page.title() == "evil, other"
    figure = page.locator("#curves figure").first
    assert figure.locator("polyline").count() == 2
    figure.locator("svg").hover()
    assert figure.locator(".swatch").all_inner_texts()[1].strip() == "0.500"
    page.select_option("select[aria-label=run]", "other")
    assert rows_of(page).count() == 48 and set(column(page, "run")) == {"other"}
    rows_of(page).first.click()
    until(page, "document.querySelector('article h3')?.textContent.startsWith('other')")
    assert "#1:" in page.url
    page.select_option("select[aria-label=run]", "")
    group_by(page, "run")
    assert sorted(column(page, "run")) == ["evil", "other"]
    # Folders of one name are told apart by their paths.
    namesake = shutil.copytree(folder, tmp_path / "c/other")
    page = opened(view.write_page([other, namesake], out=tmp_path / "both.html"))
    options = page.locator("select[aria-label=run] option").all_inner_texts()
    assert options[1:] == [f"run: {run}" for run in (other, namesake)]


def test_failed_environments_do_not_count_in_means(copied, opened):
    for step in range(3):
        rows = played_in(copied, step)
        for number, t in enumerate(rows):
            t |= {"env": "babyai", "success": True, "reward": 1.0, "status": "done"}
            if number % 2:
                t |= {"success": False, "reward": 0.0, "status": "env_error", "error": "timeout: x"}
        write_rows(copied, rows, step)
    page = opened(view.write_page(copied))
    group_by(page, "step")
    assert column(page, "success") == ["1"] * 3
    assert column(page, "reward") == ["1"] * 3
    page.locator("#distributions summary").click()
    bars = page.locator("svg[aria-label^='success by'] title")
    bars.first.wait_for(state="attached")  # the charts are drawn after the click
    titles = bars.all_text_contents()
    assert titles and all("success 1 of" in title for title in titles), titles
    titles = page.locator("svg[aria-label=reward] title").all_text_contents()
    assert titles and all(title.startswith("reward 1:") for title in titles), titles


# ---- size, and a live run ----


@pytest.mark.parametrize("steps, most", [
    (21, 20_000), pytest.param(417, 2000, marks=pytest.mark.slow)])
def test_many_trajectories_weigh_little_and_open_quickly_by_day_and_by_night(
        copied, opened, steps, most):
    played = [t | {"group": k // 4, "sample": k % 4} for k, t in enumerate(played_in(copied))]
    row = read_jsonl(copied / "metrics.jsonl")[0] | {"trajectories": 48}
    with (copied / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            write_rows(copied, played, step)
            metrics.write(json.dumps(row | {"step": step, "horizon": 3 + step // 10}) + "\n")
    path = view.write_page(copied, most)
    assert path.stat().st_size < 10e6
    seconds, backgrounds = [], set()
    for scheme in ("light", "dark", "light"):
        begin = time.perf_counter()
        page = opened(path, color_scheme=scheme)
        seconds.append(time.perf_counter() - begin)
        assert page.locator("#count").inner_text().startswith(f"{48 * steps} of {48 * steps}")
        assert "at step 10, 20" in page.locator("#stages").inner_text()
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    assert sorted(seconds)[1] < 2 or steps < 400


@pytest.fixture
def live(copied):
    """A run that has played one of its three steps, and the address at which it is served."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text(lines[0])
    server = subprocess.Popen(
        [sys.executable, "view.py", "--live", str(copied), "--port", "0"], cwd=ROOT,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    address = server.stdout.readline().split()[0]
    yield copied, address, lines
    server.terminate()
    server.wait()


def test_a_live_page_follows_its_run(live, opened):
    run, address, lines = live
    page = opened(address)
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
    with page.expect_navigation(timeout=60_000):
        write_rows(run, played_in(run, 2)[:8], 2)
    until(page, "document.querySelectorAll('#rows tr').length == 40")


def test_a_live_page_is_for_this_machine_alone(live, tmp_path):
    import requests
    run, address, _ = live
    page = requests.get(address, timeout=60)
    assert page.status_code == 200 and "connect-src 'self'" in page.text
    for host, status in (("example.org:80", 403), ("127.0.0.1", 200)):
        assert requests.get(address, headers={"Host": host}, timeout=60).status_code == status
    for path in ("trajectory?run=0&id=99", "trajectory?run=5&id=0", "trajectory",
                 "update?generation=0&rows=x", "search"):
        assert requests.get(address + path, timeout=60).status_code == 400, path
    assert requests.get(address + "config.json", timeout=60).status_code == 404
    assert requests.post(address, timeout=60).status_code == 501
    used = address.rstrip("/").rpartition(":")[2]
    for path, port in ((tmp_path / "nothing", "0"), (run, used), (run, "99999999")):
        done = run_script("view.py", "--live", path, "--port", port)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr and "view.py:" in done.stderr
