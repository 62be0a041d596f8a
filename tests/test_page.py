"""The page of a run in a real Chromium, where there is one: what a model wrote never becomes
markup, and whatever the page offers works."""

import json
import math
import re
import shutil
import time

import pytest
from test_train import read_jsonl
from test_view import EVIL, damaged, played_in, run_of, write_rows
from test_view import copied as copied  # fixtures
from test_view import folder as folder
from test_view import live as live

import view
from rollout import rollout
from trajectory import reply_spans

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser():
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"),
                                    args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """A function that opens a page. At the end nothing has gone wrong in any of them."""
    wrong = []

    def open_page(address):
        page = browser.new_page()
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.goto(address if isinstance(address, str) else address.as_uri())
        page.wait_for_selector("#head th")
        return page

    yield open_page
    assert not wrong
    for context in browser.contexts:
        context.close()


@pytest.fixture
def page(opened, folder):
    return opened(folder / "view.html")


@pytest.fixture(scope="module")
def table(folder):
    return run_of(folder / "view.html")["table"]


def rows_of(page):
    return page.locator("#rows tr")


def column(page, name):
    """The texts of a column of the table."""
    heads = [text.strip(" ▲▼") for text in page.locator("#head th").all_inner_texts()]
    return page.locator(f"#rows td:nth-child({heads.index(name) + 1})").all_inner_texts()


def check_column(page, name, values):
    """A column shows these values, numbers to two decimal places, and nothing for None."""
    for text, value in zip(column(page, name), values, strict=True):
        if isinstance(value, float):
            assert abs(float(text) - value) < 5e-3, name
        else:
            assert text.lower() == ("" if value is None else str(value).lower()), name


def filter_by(page, name, text):
    page.fill(f"input[aria-label={name}]", text)


def group_by(page, name):
    page.select_option("select[aria-label='group by']", name)


def search(page, text):
    page.fill("#search", text)
    page.keyboard.press("Enter")
    expect(page.locator("#count")).not_to_contain_text("searching")


def clear(page):
    page.get_by_role("button", name="clear").click()


def wait_for_articles(page, count):
    expect(page.locator("article")).to_have_count(count)


def open_first(page, world="babyai"):
    filter_by(page, "item", world)
    rows_of(page).first.click()
    wait_for_articles(page, 1)


def open_pair(page):
    """Open the first two trajectories of BabyAI's that are of one group."""
    open_first(page)
    page.locator("article .group button").first.click()
    wait_for_articles(page, 2)


def go_to(page, t):
    page.goto(f"{page.url}#{t['step']}/{t['item']}/{t['sample']}")
    wait_for_articles(page, 1)


# ---- nothing that was written runs ----


def test_evil_text_in_every_field_of_a_run_and_in_a_reply_stays_text(copied, opened, tmp_path):
    rows = played_in(copied, 2)
    for t in rows[:4]:
        t |= dict.fromkeys(("item", "env", "status", "error"), EVIL)
        t["messages"] = [{"role": "assistant", "content": EVIL}] * 5
    write_rows(copied, rows, 2)
    config = json.loads((copied / "config.json").read_text())
    config |= dict.fromkeys(("env", "algo", "seed", "horizon", "env_args"), EVIL)
    (copied / "config.json").write_text(json.dumps(config))
    page = opened(view.write_page(copied.rename(tmp_path / "<img src=x onerror=document.title=1>")))
    page.locator("#distributions summary").click()
    filter_by(page, "item", "<img")
    expect(rows_of(page)).to_have_count(5)  # these four, and the one of the fixture
    for name in ("item", "status", "last_reply", "category", "step", ""):
        group_by(page, name)
    rows_of(page).first.click()
    rows_of(page).last.click(modifiers=["Shift"])
    wait_for_articles(page, 2)
    page.reload()  # by the address alone
    wait_for_articles(page, 2)
    filter_by(page, "step", "1")
    page.get_by_role("button", name="sample", exact=True).click()
    rows_of(page).first.click()  # the first of the first group: its error and its reply
    expect(page.locator("article .dim").first).to_contain_text("owned")
    reply = page.locator("article .assistant").first.inner_text()
    assert EVIL.replace(" ", "") in reply.replace(" ", "")
    search(page, "onerror")  # its snippet
    expect(rows_of(page)).to_have_count(1)
    assert page.title().startswith("<img") and page.locator("img").count() == 0


# ---- the table ----


def test_the_table_is_sorted_by_each_column_and_says_so(page, table):
    for name in ("item", "sample", "reward", "success", "turns", "tokens", "category"):
        for order in ("ascending", "descending"):
            page.get_by_role("button", name=name, exact=True).click()
            check_column(page, name,
                         sorted((row[name] for row in table), reverse=order == "descending"))
            head = page.locator("#head th:not([aria-sort=none])")
            assert head.get_attribute("aria-sort") == order


def test_the_table_is_filtered(page, table):
    for name, title in (("env", "world"), ("success", "success"), ("category", "category")):
        value = table[-1][name]
        choice = str(value).lower() if name == "success" else value
        page.select_option(f"select[aria-label={name}]", choice)
        check_column(page, title, [value] * sum(row[name] == value for row in table))
        page.select_option(f"select[aria-label={name}]", "")
    for name, text, passes in (
            ("reward", ">0", lambda x: x > 0), ("reward", "<= 0", lambda x: x <= 0),
            ("reward", "1", lambda x: x == 1), ("step", "1-2", lambda x: 1 <= x <= 2),
            ("step", "0, 2", lambda x: x in (0, 2)), ("turns", ">=2", lambda x: x >= 2),
            ("reward", "-1..0.5", lambda x: -1 <= x <= 0.5),
            ("invalid", "1", lambda x: x == 1), ("turns", ">", lambda x: True)):
        filter_by(page, name, text)
        expected = sum(row[name] is not None and passes(row[name]) for row in table)
        expect(rows_of(page)).to_have_count(expected)
        clear(page)
    expect(rows_of(page)).to_have_count(48)


def test_trajectories_are_grouped_steps_compared_and_a_group_lists_its_own(page, table):
    def success(name, key, steps=(0, 1, 2)):
        held = [row["success"] for row in table
                if (str(row[name]) or "(none)") == key and row["step"] in steps]
        return sum(held) / len(held) if held else None

    for name, title in (("category", "category"), ("last_reply", "last reply"), ("step", "step"),
                        ("status", "status"), ("item", "item")):
        group_by(page, name)
        keys = column(page, title)
        of_rows = [str(row[name]) or "(none)" for row in table]
        assert sorted(keys) == sorted(set(of_rows))
        check_column(page, "trajectories", [of_rows.count(key) for key in keys])
        check_column(page, "success", [success(name, key) for key in keys])
    rows_of(page).first.click()
    check_column(page, "item", [keys[0]] * of_rows.count(keys[0]))
    clear(page)
    group_by(page, "category")
    filter_by(page, "step", "0, 2")
    pairs = [(success("category", key, [0]), success("category", key, [2]))
             for key in column(page, "category")]
    for name, values in zip(("success, 0", "success, 2"), zip(*pairs)):
        check_column(page, name, values)
    changes = [None if None in pair else pair[1] - pair[0] for pair in pairs]
    check_column(page, "change", changes)
    assert any(changes)


def test_search_finds_a_text_in_replies_or_in_the_environments_text(page, table, folder):
    for text in ("Grey", "no such text"):
        for where in ("anything", "replies", "environment"):
            page.select_option("select[aria-label='search in']", where)
            search(page, text)
            expected = set()
            for row, t in zip(table, played_in(folder)):
                replies = t["messages"][3::2] if where != "environment" else []
                # The last observation is not fed to the model: it has no tokens.
                said = t["messages"][0:-1:2] if where != "replies" else []
                if any(text.lower() in m["content"].lower() for m in replies + said):
                    expected.add((str(row["step"]), row["item"], str(row["sample"])))
            expect(rows_of(page)).to_have_count(len(expected))
            got = set(zip(*(column(page, name) for name in ("step", "item", "sample"))))
            assert got == expected
            assert all("grey" in snippet.lower() for snippet in column(page, "found"))
        assert bool(expected) == (text == "Grey")


def test_failed_environments_do_not_count_in_means(copied, opened):
    rows = [t | {"env": "babyai", "status": "done", "reward": 1.0} for t in played_in(copied, 2)]
    for t in rows[::2]:
        t |= {"success": False, "reward": 0.0, "status": "env_error", "error": "timeout: x"}
    write_rows(copied, rows, 2)
    page = opened(view.write_page(copied))
    filter_by(page, "step", "2")
    group_by(page, "step")
    for name in ("success", "reward"):
        check_column(page, name, [1.0])
    page.locator("#distributions summary").click()
    for chart, text in (("[aria-label^='success by']", "success 1 of"),
                        ("[aria-label=reward]", "reward 1:")):
        titles = page.locator(f"svg{chart} title")
        titles.first.wait_for(state="attached")  # the charts are drawn after the click
        assert all(text in title for title in titles.all_text_contents())


# ---- opened trajectories ----


def test_trajectories_are_opened_by_keyboard_side_by_side(page):
    def press(*keys, articles, selected=None):
        for key in keys:
            page.keyboard.press(key)
        wait_for_articles(page, articles)
        if selected is not None:
            expect(rows_of(page).nth(selected)).to_have_attribute("aria-selected", "true")

    filter_by(page, "item", "babyai")
    rows_of(page).first.focus()
    press("ArrowDown", "Enter", articles=1, selected=1)
    press("ArrowDown", "b", articles=2, selected=2)
    press("j", articles=1, selected=2)  # the one after the first of the two
    press("k", articles=1, selected=1)
    press("Escape", "?", articles=0)
    assert page.locator("#help").is_visible()
    press("Escape", "/", "?", articles=0)  # in a field, keys are text
    assert page.input_value("#search") == "?" and page.locator("#help").is_hidden()


def test_the_table_stays_beside_what_is_opened_on_any_screen_by_day_and_by_night(page):
    page.set_viewport_size({"width": 1400, "height": 900})
    open_pair(page)
    page.locator("article .turn").last.scroll_into_view_if_needed()
    boxes = [box.bounding_box() for box in page.locator(".scroll, article").all()]
    for left, right in zip(boxes, boxes[1:]):
        assert left["x"] + left["width"] <= right["x"]
    assert len(boxes) == 3
    assert 0 <= boxes[0]["y"] < 900  # in the window although the page was scrolled
    for width in (1400, 1000, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]


def test_each_trajectory_has_an_address_and_back_goes_back(page, opened):
    open_pair(page)
    pair = page.url
    titles = page.locator("article h3").all_inner_texts()
    page.locator("article .group button").last.click()
    expect(page).not_to_have_url(pair)
    page.go_back()
    for shown in (page, opened(pair)):
        expect(shown.locator("article h3")).to_have_text(titles)


def test_turns_have_their_reward_advantage_marks_and_rooms(page, folder):
    t = next(t for t in played_in(folder)
             if t["invalid_turns"] and t["item"].startswith("babyai") and t["turns"] > 1)
    go_to(page, t)
    labels = page.locator("article .assistant .who").all_inner_texts()
    assert page.locator("article svg.room").count() == t["turns"] + 1  # and one at the end
    rewards = [t["rewards"][end - 1] for _, end in reply_spans(t["mask"])]
    for turn, (label, reward) in enumerate(zip(labels, rewards, strict=True), 1):
        assert ("invalid" in label) == (turn in t["invalid_turns"])
        assert ("penalised" in label) == (turn in t["invalid_turns"] and reward < 0)
        assert label.endswith("cut") == (turn in t["cut_turns"])
        begin, shown, _ = label.split(", ")
        assert begin == f"turn {turn}: reply" and float(shown.split()[1]) == pytest.approx(reward)


def test_a_reply_says_what_it_was_chosen_among(copied, opened, tiny, pool):
    played = rollout(*tiny, pool, ["babyai_8"], 2, samples=2, step=2, agent="choose",
                     max_length=4096, action_format="plain")
    write_rows(copied, [t.to_json() for t in played], 2)
    view.main([str(copied)])
    page = opened(f"{(copied / 'view.html').as_uri()}#2/babyai_8/0")
    (start, end), *_ = reply_spans(played[0].mask)
    details = page.locator("article .turn.assistant details").first
    probability = math.exp(sum(played[0].logprobs[start:end]))
    assert f"among {len(played[0].choices[start])}, " in details.inner_text()
    shown = float(details.inner_text().split()[-1])
    assert shown == pytest.approx(probability, rel=0.01)
    details.locator("summary").click()
    texts = details.locator("li").all_inner_texts()
    reply = tiny[1].decode(played[0].tokens[start:end])
    assert details.locator("li.held").all_inner_texts() == [reply] and reply in texts
    assert "turn left<|im_end|>" in texts and len(texts) == len({*texts}) > 3


def test_a_segments_border_is_drawn_and_what_is_new_in_it(copied, opened, tiny, pool):
    """A window agent: each prompt repeats the instructions and one turn. What is shown beside the
    fold is the message that is new, as in the record's messages."""
    played = rollout(*tiny, pool, ["babyai_8"], 5, samples=4, step=2, agent="window",
                     agent_args="keep=1")
    write_rows(copied, [t.to_json() for t in played], 2)
    t = max(played_in(copied, 2), key=lambda t: len(t["starts"]))
    assert len(t["starts"]) > 2
    page = opened(view.write_page(copied))
    go_to(page, t)
    borders = page.locator("article .turn.segment")
    assert borders.count() == len(t["starts"]) - 1
    instructions = t["messages"][0]["content"][:40]
    new = [message["content"] for message in t["messages"][2::2]]
    for place in range(t["turns"]):
        text = page.locator("article .turn.user").nth(place).inner_text()
        assert new[place] in text
        if place:  # instructions and earlier observations are folded, or in the segment before
            assert instructions not in text
            assert new[place - 1] not in text or new[place - 1] == new[place]
            assert t["messages"][2 * place + 1]["content"] not in text  # the reply before
    borders.first.locator("summary").click()
    assert instructions in borders.first.inner_text()


def test_tokens_are_coloured_and_say_their_probability_and_entropy(page):
    open_pair(page)
    token = page.locator("article .t.m").first
    title = token.get_attribute("title")
    assert all(name in title for name in ("probability", "log-prob", "entropy", "advantage"))
    token.hover()
    assert page.locator("#readout").inner_text() == title
    assert page.locator(".t.m[style]").count() == 0  # green letters alone
    page.select_option("#colour", "entropy")
    page.locator(".t.m[style]").first.wait_for()
    backgrounds = "all => all.map(token => getComputedStyle(token).backgroundColor)"
    assert len(set(page.locator(".t.m").evaluate_all(backgrounds))) > 3


def test_what_differs_between_two_trajectories_is_marked(page):
    for a, b, expected in (
            ("abcx", "acdx", [[False, True, False, False], [False, False, True, False]]),
            ("pqr", "rpq", [[False, False, True], [True, False, False]]), ("", "a", [[], [True]])):
        assert page.evaluate("([a, b]) => missing([...a], [...b])", [a, b]) == expected
    open_pair(page)
    first = page.locator("article").first
    # The first parts, with the same instructions, are pale; the first difference is not.
    assert "same" in first.locator(".turn").first.get_attribute("class")
    page.locator("#first-difference").click()
    here = first.locator(".turn.here")
    assert "same" not in here.get_attribute("class") and here.locator(".differs").count()
    page.keyboard.press("d")
    expect(page.locator(".differs")).to_have_count(0)


def test_textcraft_shows_inventories_and_webarena_the_element_that_was_clicked(page):
    open_first(page, "textcraft")
    expect(page.locator("article .state").first).to_contain_text("inventory: empty")
    tree = "Tab\n[1] link 'home'\n\t[12] button 'buy <b>'\n\t[2] text"
    clicked = ["Tab\n[1] link 'home'\n", "<mark>\t[12] button 'buy &lt;b&gt;'</mark>",
               "\n\t[2] text"]
    for env, reply, expected in (
            ("webarena", "buy\n```click [12]```", clicked), ("webarena", "```go_back```", [tree]),
            ("webarena", "```click [77]```", [tree]), ("babyai", "click [1]", [tree])):
        parts = "args => withElement(...args).map(part => part.outerHTML ?? part)"
        assert page.evaluate(parts, [env, tree, reply]) == expected
    # The bytes of a character are joined.
    texts = page.evaluate("texts(['a', 'b', 'c', 'a', 'c'], {a: [0xc3], b: [0xa9], c: '!'})")
    assert texts == ["", "\u00e9", "!", "", "\ufffd!"]


def test_a_damaged_run_opens(copied, opened):
    expected = damaged(copied)
    page = opened(view.write_page(copied))
    assert expected[0] in page.locator("#left_out").inner_text()
    rows_of(page).nth(column(page, "reward").index("not finite")).click()
    expect(page.locator("article")).to_contain_text(
        re.compile(r"\[unknown token 1000000\].*\[unknown token -5\]", re.DOTALL))
    page.select_option("#colour", "logprob")
    number = rows_of(page).count()
    filter_by(page, "reward", ">=-9")
    expect(rows_of(page)).to_have_count(number - 2)  # two rewards are not finite


# ---- curves, distributions, several runs ----


def test_curves_have_axes_say_their_values_and_choose_steps(page, folder):
    figure = page.locator("#curves figure").first
    picture = figure.locator("svg")
    assert figure.locator("b").inner_text() == "success"
    assert {"0", "0.5", "1"} <= set(picture.locator("text").all_text_contents())
    assert page.locator("#stages").inner_text().endswith("the horizon changes, at step 2")
    width = picture.bounding_box()["width"]
    at = [{"x": width * (34 + step / 2 * 260) / 300, "y": 40} for step in (0, 1, 2)]
    for step, row in enumerate(read_jsonl(folder / "metrics.jsonl")):
        picture.hover(position=at[step])
        begin, shown = figure.locator("span").first.inner_text().split(": ")
        assert begin == f"step {step}" and abs(float(shown) - row["success"]) < 5e-3
    picture.click(position=at[1])
    assert set(column(page, "step")) == {"1"}
    picture.click(position=at[2], modifiers=["Shift"])
    assert page.input_value("input[aria-label=step]") == "1, 2"
    assert column(page, "success, 1") and column(page, "success, 2")


def test_a_bar_of_a_distribution_filters_the_table(page, table):
    page.locator("#distributions summary").click()

    def chart(name):
        return page.locator("#charts figure", has_text=name).first

    values = sorted({row["turns"] for row in table})
    held = [[row["success"] for row in table if row["turns"] == value] for value in values]
    expect(chart("turns").locator("g title")).to_have_text(
        [f"turns {value}: {len(successes)}, {sum(successes)} of them successful"
         for value, successes in zip(values, held)])
    turns = [row["invalid"] for row in table if row["invalid"] is not None]
    label = f"first invalid turn {min(turns)}: {turns.count(min(turns))},"
    assert chart("first invalid").locator("title").all_text_contents()[0].startswith(label)
    chart("turns").locator("g.bar").last.click(position={"x": 5, "y": 60})
    assert set(column(page, "turns")) == {str(values[-1])}
    clear(page)
    chart("success by category").locator("g.bar").first.click()
    assert len(set(column(page, "category"))) == 1


def test_two_runs_are_in_one_page_and_those_of_one_name_are_told_apart(folder, copied, opened):
    other = shutil.copytree(folder, copied / "b/run")
    rows = read_jsonl(other / "metrics.jsonl")
    (other / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"success": 0.5}) + "\n" for row in rows))
    page = opened(view.write_page([copied, other]))
    assert rows_of(page).count() == 96 and page.title() == f"{copied}, {other}"
    figure = page.locator("#curves figure").first
    assert figure.locator("polyline").count() == 2
    figure.locator("svg").hover()
    assert figure.locator(".swatch").all_inner_texts()[1].strip() == "0.500"
    page.select_option("select[aria-label=run]", str(other))
    check_column(page, "run", [other] * 48)
    rows_of(page).first.click()
    expect(page.locator("article h3")).to_contain_text(str(other))
    assert "#1:" in page.url
    clear(page)
    group_by(page, "run")
    assert column(page, "run") == [str(copied), str(other)]


# ---- size, and a live run ----


@pytest.mark.slow
def test_20_000_trajectories_weigh_little_and_open_quickly(copied, opened):
    played = [t | {"group": k // 4, "sample": k % 4} for k, t in enumerate(played_in(copied))]
    row = read_jsonl(copied / "metrics.jsonl")[0] | {"trajectories": 48}
    with (copied / "metrics.jsonl").open("w") as metrics:
        for step in range(417):
            write_rows(copied, played, step)
            metrics.write(json.dumps(row | {"step": step}) + "\n")
    path = view.write_page(copied, most=2000)
    assert path.stat().st_size < 10e6
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        page = opened(path)
        seconds.append(time.perf_counter() - begin)
    assert page.locator("#count").inner_text().startswith("20016 of 20016")
    assert sorted(seconds)[1] < 2


def test_a_live_page_follows_its_run(live, opened):
    run, server, lines = live
    page = opened(f"http://127.0.0.1:{server.server_port}/")
    expect(rows_of(page)).to_have_count(16)
    expect(page.locator("#live")).to_have_text("live: 1 of 3 steps")
    # A curve of one step is a dot.
    assert page.locator("#curves circle").count() == page.locator("#curves figure").count() > 5
    rows_of(page).first.click()
    page.wait_for_selector("article .assistant")
    where = page.url
    page.focus("input[aria-label=item]")
    (run / "metrics.jsonl").write_text("".join(lines))
    expect(rows_of(page)).to_have_count(48)
    expect(page.locator("input[aria-label=item]")).to_be_focused()  # typing goes on
    assert "3 of 3" in page.locator("#live").inner_text()
    assert page.url == where and page.locator("article").count() == 1  # still open
    search(page, "onerror")
    expect(rows_of(page)).not_to_have_count(48)
    clear(page)
    for place in (0, 20, 47):  # every trajectory can be opened
        rows_of(page).nth(place).click()
        expect(rows_of(page).nth(place)).to_have_attribute("aria-selected", "true")
        page.wait_for_selector("article .assistant")
    # A step that is played again: the page starts anew.
    with page.expect_navigation(timeout=60_000):
        write_rows(run, played_in(run, 2)[:8], 2)
    expect(rows_of(page)).to_have_count(40)
