"""The page of a run: complete, small, and data only: what a model wrote never becomes markup.
Some tests open it in a real Chromium, where there is one."""

import base64
import gzip
import json
import shutil

import pytest
from conftest import run_script
from test_train import SMALL, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import metrics
import view
from envs import make_env

EVIL = ("</script><img src=x onerror=\"document.title='owned'\">"
        "<script>document.title='owned'</script>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 48 trajectories, in which a model and a world wrote EVIL."""
    out = tmp_path_factory.mktemp("runs") / "evil"
    done = run("--out", str(out), "--env", "babyai,textcraft", *SMALL)
    assert done.returncode == 0, done.stderr
    path = out / "trajectories/step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["error"] = EVIL
    rows[1]["item"] = EVIL
    rows[2]["status"] = EVIL
    write_evil_reply(rows[0], AutoTokenizer.from_pretrained(out / "final"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"horizon": EVIL}))
    view.write_page(out)
    return out


def write_evil_reply(row, tokenizer):
    """Put EVIL in front of a trajectory's first reply."""
    tokens = tokenizer.encode(EVIL, add_special_tokens=False)
    first = row["mask"].index(True)
    values = {"tokens": tokens, "mask": True, "logprobs": -0.5, "rewards": 0.0}
    if isinstance(row["advantage"], list):
        values["advantage"] = 1.0
    for name, value in values.items():
        row[name][first:first] = value if name == "tokens" else [value] * len(tokens)


def data_of(page):
    """The JSON in a page, which ends where a browser would end it."""
    begin = '<script id="data" type="application/json">'
    return json.loads(page.split(begin)[1].split("</script>")[0])


def trajectories_of(data):
    """The trajectories in the chunks of a page's data."""
    chunks = [gzip.decompress(base64.b64decode(chunk)) for chunk in data["chunks"]]
    return [trajectory for chunk in chunks for trajectory in json.loads(chunk)]


def played_in(folder):
    """The trajectories of a run, as JSON lines."""
    files = sorted((folder / "trajectories").glob("*"))
    return [line for file in files for line in file.read_text().splitlines(keepends=True)]


# ---- what the page holds ----


def test_the_page_holds_every_trajectory(folder):
    data = data_of((folder / "view.html").read_text())
    held = trajectories_of(data)
    played = [json.loads(line) for line in played_in(folder)]
    assert len(data["table"]) == len(played) == 48
    assert [t["ids"] for t in held] == [t["tokens"] for t in played]
    assert [t["mask"] for t in held] == [t["mask"] for t in played]
    assert [t["rewards"] for t in held] == [t["rewards"] for t in played]
    assert [row["item"] for row in data["table"]] == [t["item"] for t in played]
    assert all(str(i) in data["vocabulary"] for t in held for i in t["ids"])
    assert set(data["metrics"]) >= {"success", "success/babyai", "success/textcraft", "kl"}
    assert len(data["metrics"]["kl"]) == 3


def test_babyais_rooms_are_drawn_before_each_reply_and_after_the_last(folder):
    held = trajectories_of(data_of((folder / "view.html").read_text()))
    played = [json.loads(line) for line in played_in(folder)]
    drawn = 0
    for t, p in zip(held, played, strict=True):
        if p["env"] != "babyai" or p["item"] == EVIL:
            assert t["grids"] is None
            continue
        drawn += 1
        assert len(t["grids"]) == p["turns"] + 1
        for width, cells, (x, y, direction) in t["grids"]:
            assert cells.startswith("#5" * width)  # a wall
            assert 0 < x < width - 1 and y > 0 and direction in range(4)
    assert drawn > 12
    # Some agent has moved or turned.
    assert any(grids[0][2] != grids[-1][2] for grids in (t["grids"] for t in held) if grids)


def test_rooms_are_drawn_as_the_replies_were_read():
    said = ["Play.", "OK", "A room.", "Action: [turn right].", "A wall."]
    trajectory = {"item": "babyai_88", "messages": [{"content": text} for text in said]}
    for lenient_as, turned in (("", False), ("babyai", True)):
        before, after = view.rooms(trajectory, make_env("babyai"), "react", lenient_as)
        assert (before != after) == turned


def test_nothing_that_was_written_is_markup_and_the_page_needs_no_network(folder):
    page = (folder / "view.html").read_text()
    data = data_of(page)
    assert EVIL in data["about"]
    assert EVIL in {row["item"] for row in data["table"]}
    assert EVIL in {row["status"] for row in data["table"]}
    assert "<img" not in page and page.count("</script>") == 2
    for harmless in ("http://www.w3.org/2000/svg", "http-equiv"):
        page = page.replace(harmless, "")
    assert "http" not in page


def test_many_trajectories_are_thinned_by_whole_groups(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    data = data_of(view.write_page(tmp_path / "run", most=24).read_text())
    groups = {}  # (step, group) -> the samples that are in the page
    for row in data["table"]:
        groups.setdefault((row["step"], row["group"]), []).append(row["sample"])
    assert 0 < len(data["table"]) <= 24
    assert all(sorted(samples) == [0, 1, 2, 3] for samples in groups.values())
    assert {step for step, _ in groups} == {0, 1, 2}
    assert "one group in 2" in data["note"]


def test_pieces_of_characters_are_kept_as_bytes():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["turn left turn left"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    text = "turn left, \u00e9t\u00e9 \u6f22 \U0001f642"
    pieces = [view.piece(tokenizer, i) for i in tokenizer.encode(text)]
    as_bytes = [p.encode() if isinstance(p, str) else bytes(p) for p in pieces]
    assert b"".join(as_bytes).decode() == text
    assert any(isinstance(p, list) for p in pieces)


def test_sentencepieces_spaces_and_bytes_are_kept():
    class SentencePiece:
        def decode(self, ids):
            return {1: "left", 2: "\ufffd"}[ids[0]]

        def convert_ids_to_tokens(self, i):
            return {1: "\u2581left", 2: "<0xE2>"}[i]

    assert [view.piece(SentencePiece(), i) for i in (1, 2)] == [" left", [0xE2]]


def test_a_mixtures_stages_are_those_of_each_world():
    horizons = [(5, 3), (5, 3), (5, 4), (8, 4)]
    rows = [{"horizon": h, "horizon/babyai": b, "horizon/textcraft": h} for h, b in horizons]
    assert metrics.stages(rows) == [2, 3]
    assert metrics.stages([{"horizon": 3}] * 2) == []


# ---- the command ----


def command(folder, *flags):
    return run_script("view.py", folder, *flags)


def test_the_command_writes_the_page_and_the_curves(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    for name in ("view.html", "curves.png"):
        (tmp_path / "run" / name).unlink()
    done = command(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/run/view.html\n"
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert len(data_of((tmp_path / "run/view.html").read_text())["table"]) == 48
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_folder_without_a_run_is_one_line(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_a_run_without_a_step_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("")
    done = command(tmp_path / "run")
    assert done.returncode == 2 and "first step" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_number_of_trajectories_that_is_none_is_one_line(folder):
    done = command(folder, "--most", "0")
    assert done.returncode == 2 and "--most must be positive" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- damaged files ----

# The fields of a trajectory that the page cannot do without.
NEEDED = ("step", "env", "item", "group", "status", "reward", "success", "turns", "tokens", "mask",
          "logprobs", "rewards", "advantage")


def damaged(folder, tmp_path):
    """A copy of the run with what a crash, a full disk or another program may leave.

    -> (the copy, the lines about it that the page must have)
    """
    out = tmp_path / "damaged"
    shutil.copytree(folder, out)
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"kl": float("nan"), "success": None, "entropy": "x"}
    for row in rows:
        row["grad_norm"] = float("inf")  # no value is left
    for name in ("trajectories", "horizon", "turns", "step"):
        del rows[1][name]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([lines[0], "[]", "", lines[1], lines[2][:80]]))

    files = sorted((out / "trajectories").glob("*"))
    trajectories = [json.loads(line) for line in files[0].read_text().splitlines()]
    for t, name in zip(trajectories, NEEDED):
        del t[name]
    other = trajectories[len(NEEDED)]
    for name in ("sample", "score", "error", "messages"):  # the page can do without these
        del other[name]
    # An id beyond the vocabulary and two that no tokenizer's integer holds.
    other["tokens"][:3] = [10**6, -5, 10**30]
    other["reward"] = other["rewards"][0] = other["logprobs"][0] = float("nan")
    trajectories[len(NEEDED) + 1]["logprobs"].pop()
    trajectories[len(NEEDED) + 2]["tokens"][0] = None
    files[0].write_text("".join(json.dumps(t) + "\n" for t in trajectories))
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes()[:-100] + b"\xff")  # inside of the last line

    expected = [f"1 trajectories with no field '{name}'" for name in NEEDED]
    expected += [
        "2 lines of metrics.jsonl that are no JSON object",
        "1 values of success that are missing or not finite",
        "1 values of turns that are missing or not finite",
        "1 values of entropy that are missing or not finite",
        "1 values of kl that are missing or not finite",
        "2 values of grad_norm that are missing or not finite",
        "3 texts of token ids that the tokenizer does not have",
        "3 numbers of trajectories that are not finite",
        "1 trajectories with lists of different lengths",
        "1 trajectories with a 'tokens' of another kind",
        "1 trajectory files that are empty",
        "1 lines of trajectories that are no JSON object",
    ]
    return out, expected


def test_damaged_files_are_left_out_and_the_page_says_what(folder, tmp_path):
    out, expected = damaged(folder, tmp_path)
    done = command(out)
    assert done.returncode == 0, done.stderr
    data = data_of((out / "view.html").read_text())
    assert sorted(data["left_out"]) == sorted(expected)
    said = [line for line in done.stderr.splitlines() if line.startswith("view.py: left out: ")]
    assert len(said) == 1 and "Traceback" not in done.stderr
    assert len(data["table"]) == len(trajectories_of(data)) == 48 - 16 - len(NEEDED) - 2 - 1
    assert data["metrics"]["kl"][0] is None and len(data["metrics"]["kl"]) == 2
    assert "grad_norm" not in data["curves"] and data["stages"] == []
    assert (out / "curves.png").stat().st_size > 10_000


def test_an_undamaged_run_leaves_nothing_out(folder):
    assert data_of((folder / "view.html").read_text())["left_out"] == []


@pytest.mark.parametrize("name, text", [
    ("config.json", "{"), ("config.json", "[]"), ("config.json", "{}"), ("metrics.jsonl", "{"),
])
def test_a_run_without_a_config_or_a_row_is_one_line_that_names_the_file(
        folder, tmp_path, name, text):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        view.write_page(tmp_path / "run")


# ---- in a browser ----


@pytest.fixture
def browser():
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"),
                                    args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser, path, **how):
    """-> the page, and a list of whatever goes wrong in it"""
    page = browser.new_page(**how)
    wrong = []
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.goto(f"file://{path}")
    return page, wrong


def test_in_a_browser_nothing_runs_that_a_model_wrote(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = page.locator("#rows tr")
    page.fill("input[aria-label=item]", "<img")
    assert rows.count() == 1 and EVIL in rows.inner_text()
    rows.click()
    page.wait_for_selector("article .assistant")
    page.fill("input[aria-label=item]", "")
    page.get_by_role("button", name="sample", exact=True).click()
    page.select_option("select[aria-label=step]", "1")
    rows.first.click()  # the first of the first group: its error and its reply
    page.wait_for_function("document.querySelector('article .dim').textContent.includes('owned')")
    assert EVIL in page.locator("article .dim").first.inner_text()
    reply = page.locator("article .assistant").first.inner_text()
    assert EVIL.replace(" ", "") in reply.replace(" ", "")
    assert page.title() == "evil" and not wrong and page.locator("img").count() == 0


def as_shown(value):
    """A value of the table: two digits of a float, so that rounding makes no difference."""
    return f"{value:.2g}" if isinstance(value, float) else str(value).lower()


def test_in_a_browser_the_table_is_sorted_by_each_column(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    table = data_of((folder / "view.html").read_text())["table"]
    for name in ("step", "env", "item", "sample", "reward", "success", "turns", "tokens"):
        for descending in (False, True):
            page.get_by_role("button", name=name, exact=True).click()
            expected = sorted((row[name] for row in table), reverse=descending)
            got = column(page, name)
            if isinstance(expected[0], float):
                got = [as_shown(float(text)) for text in got]
            assert got == [as_shown(value) for value in expected], name
    assert not wrong


def column(page, name):
    """The texts of a column of the table."""
    place = page.locator("#head th").all_inner_texts().index(name) + 1
    return page.locator(f"#rows td:nth-child({place})").all_inner_texts()


def test_in_a_browser_the_table_is_filtered(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = page.locator("#rows tr")
    table = data_of((folder / "view.html").read_text())["table"]
    assert rows.count() == 48
    for name in ("step", "env", "success", "turns"):
        value = str(table[-1][name]).lower()
        page.select_option(f"select[aria-label={name}]", value)
        assert rows.count() == sum(str(row[name]).lower() == value for row in table)
        assert set(column(page, name)) == {value}
        page.select_option(f"select[aria-label={name}]", "")
    for text, passes in ((">0", lambda r: r > 0), ("<= 0", lambda r: r <= 0),
                         ("1", lambda r: r == 1)):
        page.fill("input[aria-label=reward]", text)
        assert rows.count() == sum(passes(row["reward"]) for row in table)
    assert not wrong


def test_in_a_browser_a_damaged_run_opens(folder, browser, tmp_path):
    out, expected = damaged(folder, tmp_path)
    page, wrong = opened(browser, view.write_page(out))
    assert expected[0] in page.locator("#left_out").inner_text()
    rows = page.locator("#rows tr")
    table = data_of((out / "view.html").read_text())["table"]
    assert rows.count() == len(table)
    rows.nth(column(page, "reward").index("not finite")).click()
    page.wait_for_selector("article .turn")
    text = page.locator("article").inner_text()
    assert "[unknown token 1000000]" in text and "[unknown token -5]" in text
    page.select_option("#colour", "logprob")
    page.fill("input[aria-label=reward]", ">=0")
    assert rows.count() == len(table) - 1
    assert not wrong


def test_in_a_browser_trajectories_are_opened_by_keyboard_side_by_side(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = page.locator("#rows tr")
    page.fill("input[aria-label=item]", "babyai")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("svg.room")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("b")
    page.wait_for_function("document.querySelectorAll('article').length == 2")
    rows.first.click()
    page.wait_for_function("document.querySelectorAll('article').length == 1")
    page.locator("article button").first.click()  # another of its group
    page.wait_for_function("document.querySelectorAll('article').length == 2")
    for width in (1280, 390):  # a desk, a phone: nothing is wider than the screen
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not wrong


def test_in_a_browser_tokens_are_coloured(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows = page.locator("#rows tr")
    page.fill("input[aria-label=item]", "babyai")
    rows.first.click()
    page.wait_for_function("document.querySelectorAll('article').length == 1")
    page.locator("article button").first.click()  # another of its group
    page.wait_for_function("document.querySelectorAll('article').length == 2")
    colours = ("new Set([...document.querySelectorAll('.t.m')]"
               ".map(e => getComputedStyle(e).backgroundColor)).size")
    assert page.evaluate(colours) == 1  # green letters alone
    page.select_option("#colour", "logprob")
    page.wait_for_function(f"{colours} > 3")
    seen = page.evaluate(colours)
    page.select_option("#colour", "advantage")
    page.wait_for_function(f"{colours} < {seen}")
    assert not wrong


def test_in_a_browser_the_bytes_of_a_character_are_joined(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    page.evaluate("data.vocabulary.a = [0xc3], data.vocabulary.b = [0xa9], "
                  "data.vocabulary.c = '!'")
    texts = page.evaluate("texts(['a', 'b', 'c', 'a', 'c'])")
    assert texts == ["", "\u00e9", "!", "", "\ufffd!"]
    assert not wrong


def test_in_a_browser_a_thousand_trajectories_weigh_little_and_open_by_day_and_by_night(
        folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    trajectories = [json.loads(line) for line in played_in(folder)]
    first_row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    rows = []
    for step in range(21):  # the same 48 trajectories in each step: more than a chunk holds
        lines = [json.dumps(t | {"step": step}) + "\n" for t in trajectories]
        (tmp_path / f"run/trajectories/step_{step:06d}.jsonl").write_text("".join(lines))
        rows.append(first_row | {"step": step, "trajectories": 48, "horizon": 3 + step // 10})
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = view.write_page(tmp_path / "run")
    assert path.stat().st_size < 10e6
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, wrong = opened(browser, path, color_scheme=scheme)
        page.wait_for_selector("#rows tr")
        assert page.locator("#count").inner_text().startswith("1008 of 1008") and not wrong
        assert "at step 10, 20" in page.locator("#stages").inner_text()
        assert page.locator("#curves svg").first.locator("line").count() == 2
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
