"""The page of a run in a real Chromium, where there is one: what a model wrote never becomes
markup, and whatever the page offers works."""

import json
import math
import re
import shutil
import time

import pytest
from conftest import ROOT
from test_train import read_jsonl
from test_view import EVIL, damaged, played_in, run_of, write_rows
from test_view import copied as copied  # fixtures
from test_view import folder as folder
from test_view import live as live

import rl
import view
from rollout import rollout
from trajectory import Trajectory, reply_spans

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
    expect(page.locator("#search-state")).to_contain_text(re.compile("ended|cannot"))


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


def test_search_takes_several_texts_and_regular_expressions_and_says_its_end(opened, played_run):
    page = opened(played_run / "view.html")
    page.select_option("select[aria-label='search in']", "replies")
    for text, expected in (("pickup & FLY", 2), ("pickup fly", 0), ("/blue (ball|box)/", 3),
                           ("/^action: fly$/ & /b.x/", 1), ("fly & (", 0), (" & ", 0)):
        search(page, text)
        expect(rows_of(page)).to_have_count(expected)
        said = page.locator("#search-state").inner_text()
        assert said == f"search ended: found in {expected} of {len(EPISODES)} trajectories"
    search(page, "/(/")
    assert "cannot be searched" in page.locator("#search-state").inner_text()
    expect(rows_of(page)).to_have_count(len(EPISODES))


def test_a_filter_that_cannot_be_read_and_one_without_a_field_are_said(opened, played_run):
    page = opened(played_run / "view.html")
    forms, field = page.locator("#forms"), page.locator("input[aria-label=turns]")
    for text, wrong in (("x>", "x>"), ("2,", ""), ("2, 1-", "1-"), (">1", "")):
        filter_by(page, "turns", text)
        assert field.get_attribute("aria-invalid") == str(bool(wrong)).lower()
        assert (f'turns: "{wrong}" cannot be read' in forms.inner_text()) == bool(wrong)
        assert "15-25" in forms.inner_text()
    clear(page)
    group_by(page, "goal")
    rows_of(page).filter(has_text=DOOR[1]).click()
    assert set(column(page, "goal")) == {DOOR[1]}
    forms.get_by_role("button", name=f"goal: {DOOR[1]}").click()
    expect(rows_of(page)).to_have_count(len(EPISODES))


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


def test_instructions_and_what_an_observation_repeats_are_folded(opened, played_run):
    """A mark of time that only the newest observation has stays; `o` unfolds all."""
    page = opened(f"{(played_run / 'view.html').as_uri()}#0/{DOOR[0]}/1")
    seen = page.locator("article .turn.user")
    first, second, _ = seen.all_inner_texts()
    assert "Play." not in first and OBSERVATION.strip() in first
    assert "Turn 1." in second and "wall" not in second
    seen.nth(1).locator("summary").click()
    assert seen.nth(1).inner_text().endswith(f"{OBSERVATION}Turn 1.")
    page.keyboard.press("o")
    expect(seen.first).to_contain_text("Play.")
    assert [OBSERVATION.strip() in text for text in seen.all_inner_texts()] == [True] * 3
    assert page.locator("article details").count() == 0


def test_on_a_phone_the_table_comes_first_and_a_touch_has_a_shift(browser, opened, played_run):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True,
                                  is_mobile=True)
    page = context.new_page()
    page.goto((played_run / "view.html").as_uri())
    rows_of(page).first.wait_for()
    heights = [page.locator(f"#{name}").bounding_box()["y"] for name in ("list", "training")]
    assert heights == sorted(heights)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for number, articles in enumerate((1, 1, 2)):
        if number == 2:
            page.locator("#touch").tap()
        rows_of(page).nth(number).tap()
        wait_for_articles(page, articles)
    assert not page.locator("#shift").is_checked()  # it holds for one touch
    assert opened(played_run / "view.html").locator("#touch").is_hidden()  # with a mouse


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
    assert float(details.inner_text().split()[-1]) == pytest.approx(probability, rel=0.01)
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
    page.keyboard.press("o")  # what an observation repeats is not folded
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
    # The reply [8, 9] of the first segment, in a list of actions (after 2) or as a reply (after 5).
    known = """end => segmentsOf({ids: [1, 5, 8, 9, 1, ...end], mask: [0, 0, 1, 1],
                                  starts: [0, 4]}).at(-1).known"""
    assert [page.evaluate(known, end) for end in ([2, 8, 9, 5], [5, 8, 9, 3, 2, 8, 9])] == [5, 7]


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
        begin, shown = figure.locator("span").last.inner_text().split(": ")
        assert begin == f"step {step}" and abs(float(shown) - row["success"]) < 5e-3
    picture.click(position=at[1])
    assert set(column(page, "step")) == {"1"}
    picture.click(position=at[2], modifiers=["Shift"])
    assert page.input_value("input[aria-label=step]") == "1, 2"
    assert column(page, "success, 1") and column(page, "success, 2")


def test_curves_that_are_equal_are_shown_once(opened, played_run):
    titles = opened(played_run / "view.html").locator("#curves figure").all_inner_texts()
    assert [title[:17] for title in titles if "kl" in title] == ["kl\n= kl behaviour"]


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


# ---- questions of a newcomer ----

OBSERVATION = "You see a wall. There is a key. "
# What was played: (step, item, goal, actions, reward, numbers of the invalid turns, advantage of
# the valid turns and of the others, log-prob of each token).
BALL, DOOR = ("babyai_0", "go to the red ball"), ("babyai_9", "go to the grey door")
EPISODES = [
    (0, *BALL, ["go to red ball 1"], 1.0, [], 0.5, 0, -.1),
    (0, *DOOR, ["turn left", "turn left", "go to grey door 1"], 1.0, [], 0.5, 0, -.1),
    (30, *BALL, ["go to red ball 1"], 1.0, [], 0.5, 0, -.1),
    (30, *BALL, ["turn left", "go to red ball 1"], 1.0, [], 0.5, 0, -.1),
    (30, *DOOR, ["turn left", "go to grey door 1"], 1.0, [], 0.5, 0, -.1),
    (30, *DOOR, ["go to red door 1", "turn left"], 0.0, [], -0.5, 0, -.1),
    (40, *BALL, ["pickup blue ball 1", "go to red ball 1"], 1.0, [1], 0.5, -2, -.1),
    (40, *BALL, ["pickup blue ball 1", "fly"], 0.25, [2], 0.5, -2, -3.0),
    (40, *DOOR, ["turn left", "turn right"], 0.0, [], 0.5, 0, -.1),
    (90, *BALL, ["fly", "pickup blue box 1"], 0.0, [1, 2], 0.5, -1, -.1),
    (90, *BALL, ["fly", "fly"], 0.0, [1, 2], 0.5, -1, -.1),
    (90, *DOOR, ["go to grey door 1"], 1.0, [], 0.5, 0, -.1),
    (90, *DOOR, ["go to red door 1"], 0.0, [], 0.5, 0, -.1)]
KL = {0: .01, 30: .02, 40: .09, 90: .01}


@pytest.fixture(scope="module")
def played_run(folder, tmp_path_factory):
    """A run whose answers are known, its page written."""
    out = tmp_path_factory.mktemp("runs") / "asked"
    shutil.copytree(folder, out, ignore=lambda *_: ["trajectories", "view.html"])
    (out / "trajectories").mkdir()
    (row, *_), encode = read_jsonl(out / "metrics.jsonl"), rl.load_tokenizer("tiny").encode
    played = [episode(encode, number, *values) for number, values in enumerate(EPISODES)]
    lines = []
    for step, kl in KL.items():
        held = [t for t in played if t.step == step]
        write_rows(out, [t.to_json() for t in held], step)
        lines.append(row | {"step": step, "kl": kl, "kl_behaviour": kl, "horizon": 3,
                            "success": sum(t.success for t in held) / len(held)})
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    view.write_page(out)
    return out


def episode(encode, number, step, item, goal, actions, reward, invalid, valid, other, logprob):
    t = Trajectory(item, "babyai", step, int(item == DOOR[0]), number, reward=reward,
                   success=reward == 1, status="done" if reward == 1 else "horizon",
                   invalid_turns=invalid, advantage=[])
    observations = [f"Your goal: {goal}\n{OBSERVATION}", *(OBSERVATION + f"Turn {k}."
                    for k, _ in enumerate(actions, 1))]
    t.messages = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "OK"}]
    t.append(encode("Play. "))
    for turn, action in enumerate(actions, 1):
        reply = f"Action: {action}"
        t.messages += [{"role": "user", "content": observations[turn - 1]},
                       {"role": "assistant", "content": reply}]
        t.append(encode(observations[turn - 1]))
        t.advantage += [0.0] * (len(t.tokens) - len(t.advantage))
        t.append(encode(reply), [logprob] * len(encode(reply)), [.1] * len(encode(reply)))
        t.advantage += [other if turn in invalid else valid] * len(encode(reply))
    t.turns = len(actions)
    return t


class Asker:
    """Answers a question on a newly opened page, and counts the clicks: a choice in a menu is a
    click, and so is a text that is written into a field."""

    def __init__(self, page):
        self.page, self.clicks = page, 0

    def click(self, target, **how):
        (self.page.locator(target) if isinstance(target, str) else target).click(**how)
        self.clicks += 1

    def head(self, name):
        self.click(self.page.get_by_role("button", name=name, exact=True))

    def choose(self, menu, value):
        self.page.select_option(f"select[aria-label='{menu}']", value)
        self.clicks += 1

    def write(self, field, text):
        self.page.fill(f"input[aria-label={field}]", text)
        self.clicks += 1

    def curve(self, name, step, **how):
        """Click on a step of a curve of the run, whose steps go from 0 to 90."""
        picture = self.page.locator("#curves figure", has_text=name).first.locator("svg")
        width = picture.bounding_box()["width"]
        place = {"x": width * (34 + step / 90 * 260) / 300, "y": 40}
        self.click(picture, position=place, **how)

    def chart(self, title):
        """The titles of a distribution's bars."""
        titles = self.page.locator(f"#charts figure:has(b:text-is('{title}')) title")
        titles.first.wait_for(state="attached")
        return titles.all_text_contents()

    def lines(self):
        """What the picture of the groups says, and the values of each of its lines."""
        picture = self.page.locator("#group-curves svg")
        texts = picture.locator("text[text-anchor=end]")
        (low, top), *_, (high, bottom) = [(float(t.text_content()), float(t.get_attribute("y")))
                                          for t in texts.all()]
        points = [p.get_attribute("points").split() for p in picture.locator("polyline").all()]
        return picture.get_attribute("aria-label"), [
            [low + (float(p.split(",")[1]) - top + 3) / (bottom - top) * (high - low) for p in line]
            for line in points]


@pytest.fixture
def ask(opened, played_run):
    asker = Asker(opened(played_run / "view.html"))
    yield asker
    assert 0 < asker.clicks <= 4


def test_the_first_ten_questions(opened, played_run, copied):
    """Of each, the clicks of docs/view.md and what shows the answer."""
    asks = [Asker(opened((played_run / "view.html").as_uri())) for _ in range(9)]
    items, hard, first_wrong, says, changed, other, unsure, out_of_turns, ever = asks
    items.choose("group by", "item")
    assert column(items.page, "item")[0] == DOOR[0]
    hard.click("#distributions summary")
    assert hard.chart("success by category")[0].startswith("GoToRedBallGrey: success 0.571 of 7")
    first_wrong.click("#distributions summary")
    assert first_wrong.chart("first invalid turn")[0].startswith("first invalid turn 1: 3")
    says.choose("success", "false")
    says.choose("group by", "last_reply")
    assert column(says.page, "trajectories")[0] == "2" != column(says.page, "trajectories")[1]
    changed.curve("success", 0)
    changed.curve("success", 90, modifiers=["Shift"])
    assert column(changed.page, "change") == ["-1", "-0.500"]
    other.click(rows_of(other.page).first)
    other.click(other.page.locator("article .group button").first)
    wait_for_articles(other.page, 2)
    other.click("#first-difference")
    assert other.page.locator(".turn.here .differs").count()
    unsure.click(rows_of(unsure.page).first)
    unsure.choose("colour of tokens", "entropy")
    unsure.page.locator(".t.m[style]").first.wait_for()
    out_of_turns.choose("group by", "status")
    assert "horizon" in column(out_of_turns.page, "status")
    ever.choose("search in", "replies")
    ever.write("search", "toggle")
    ever.page.keyboard.press("Enter")
    expect(ever.page.locator("#search-state")).to_contain_text("found in 0 of")
    better = Asker(opened(view.write_page([played_run, copied])))
    better.choose("run", "asked")
    better.choose("group by", "category")
    assert column(better.page, "category") == ["GoToDoor", "GoToRedBallGrey"]
    assert all(0 < asker.clicks <= 4 for asker in [*asks, better])


def test_question_share_of_failures_by_a_wrong_colour(ask):
    ask.choose("success", "false")
    ask.choose("group by", "colour")
    rows = list(zip(column(ask.page, "colour of the last action"), column(ask.page, "share")))
    assert rows == [("wrong", "0.667"), ("(none)", "0.333")]


def test_question_when_invalid_actions_grow_and_which(ask):
    ask.choose("group by", "invalid_action")
    assert column(ask.page, "first invalid action") == ["(none)", "fly", "pickup blue ball 1"]
    label, lines = ask.lines()
    assert label.startswith("trajectories by first invalid action")
    assert lines == [pytest.approx(line) for line in ([0, 0, 2, 2], [0, 0, 1, 2], [0, 0, 1, 0])]


def test_question_the_longest_success(ask):
    ask.choose("success", "true")
    ask.head("turns")
    ask.head("turns")
    assert column(ask.page, "turns")[:2] == ["3", "2"] and column(ask.page, "item")[0] == DOOR[0]


def test_question_which_items_flip_between_two_steps(ask):
    ask.write("step", "30, 90")
    ask.choose("group by", "item")
    check_column(ask.page, "item", [BALL[0], DOOR[0]])  # what made the drop first
    check_column(ask.page, "change", [-1, 0])


def test_question_rewards_in_a_step(ask):
    """The bars stand where their rewards are: 0.25 is a quarter of the way from 0 to 1."""
    ask.write("step", "40")
    ask.click("#distributions summary")
    assert [title.split(",")[0] for title in ask.chart("reward")] == [
        "reward 0: 1", "reward 0.250: 1", "reward 1: 1"]
    bars = ask.page.locator("svg[aria-label=reward] g.bar rect:first-of-type")
    first, second, third = (float(bar.get_attribute("x")) for bar in bars.all())
    assert (second - first) / (third - first) == pytest.approx(.25)


def test_question_advantage_of_a_turn_against_validity(ask):
    ask.click("#distributions summary")
    assert ask.chart("advantage of a turn") == [
        "17 valid: advantage 0.382 of 17", "6 invalid: advantage -1.33 of 6"]


def test_question_who_replied_a_text(ask):
    ask.choose("search in", "replies")
    ask.write("search", "pickup blue")
    ask.page.keyboard.press("Enter")
    expect(rows_of(ask.page)).to_have_count(3)
    assert ask.page.locator("td.found mark").all_inner_texts() == ["pickup blue"] * 3


def test_question_what_made_the_peak_of_the_kl(ask):
    ask.curve("kl", 40)
    assert set(column(ask.page, "KL")) == {"0.0900"}
    ask.head("log-prob")  # the least probable replies first
    assert column(ask.page, "log-prob")[0] == "-3" and column(ask.page, "reward")[0] == "0.250"


def test_question_which_category_made_a_drop(ask):
    ask.curve("success", 30)
    ask.curve("success", 90, modifiers=["Shift"])
    check_column(ask.page, "category", ["GoToRedBallGrey", "GoToDoor"])
    check_column(ask.page, "part of the change", [-.5, 0])  # of a drop from 3/4 to 1/4


def test_question_success_by_category_over_time(ask):
    ask.choose("group by", "category")
    assert column(ask.page, "category") == ["GoToDoor", "GoToRedBallGrey"]
    label, lines = ask.lines()
    assert label.endswith("Door: 1 at first, 0.500 at last; GoToRedBallGrey: 1 at first, 0 at last")
    assert lines == [pytest.approx([1, .5, 0, .5]), pytest.approx([1, 1, .5, 0])]
    ask.choose("smoothing", "5")  # two steps on each side; a step counts as it has trajectories
    assert ask.lines()[1] == [*lines, pytest.approx([2 / 4, 3 / 6, 3 / 6, 2 / 5]),
                              pytest.approx([4 / 5, 4 / 7, 4 / 7, 3 / 6])]


def test_the_questions_of_the_documentation_are_tested():
    """A row of the table for each test, and every test is in it."""
    text = (ROOT / "docs/view.md").read_text().split("## Ten more questions")[1].split("##")[0]
    asked = [name for name in globals() if name.startswith("test_question_")]
    assert len(re.findall(r"^\| .*\? \|", text, re.MULTILINE)) == len(asked) == 10


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
    search(page, "/on(error)/ & img")
    expect(rows_of(page)).not_to_have_count(48)
    search(page, "/(/")
    assert "cannot" in page.locator("#search-state").inner_text()
    clear(page)
    for place in (0, 20, 47):  # every trajectory can be opened
        rows_of(page).nth(place).click()
        expect(rows_of(page).nth(place)).to_have_attribute("aria-selected", "true")
        page.wait_for_selector("article .assistant")
    # A step that is played again: the page starts anew.
    with page.expect_navigation(timeout=60_000):
        write_rows(run, played_in(run, 2)[:8], 2)
    expect(rows_of(page)).to_have_count(40)
