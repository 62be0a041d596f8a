"""The page of a run: complete, small, and data only: what a model wrote never becomes markup. Looked at in a real Chromium where
there is one."""

import base64
import gzip
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from test_train import SMALL, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import metrics
import view

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "evil"
    done = run("--out", str(out), "--env", "babyai,textcraft", *SMALL)
    assert done.returncode == 0, done.stderr
    path = out / "trajectories/step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["error"] = rows[1]["item"] = rows[2]["status"] = EVIL
    evil = AutoTokenizer.from_pretrained(out / "final").encode(EVIL, add_special_tokens=False)
    first = rows[0]["mask"].index(True)
    for name, values in (("tokens", evil), ("mask", [True] * len(evil)), ("logprobs", [-0.5] * len(evil)), ("rewards", [0.0] * len(evil))):
        rows[0][name][first:first] = values  # a model says it, too
    if isinstance(rows[0]["advantage"], list):
        rows[0]["advantage"][first:first] = [1.0] * len(evil)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"horizon": EVIL}))
    view.write_page(out)
    return out


def data_of(page):
    return json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])


def test_the_page_holds_every_trajectory_and_nothing_of_it_as_markup(folder):
    page = (folder / "view.html").read_text()
    data = data_of(page)
    held = [t for chunk in data["chunks"] for t in json.loads(gzip.decompress(base64.b64decode(chunk)))]
    played = [json.loads(line) for file in sorted((folder / "trajectories").glob("*")) for line in file.open()]
    assert [t["ids"] for t in held] == [t["tokens"] for t in played] and len(data["table"]) == len(played) == 48
    assert [row["item"] for row in data["table"]] == [t["item"] for t in played]
    assert all(str(i) in data["vocabulary"] for t in held for i in t["ids"])
    rooms = [t["grids"] for t, p in zip(held, played) if p["env"] == "babyai" and p["item"] != EVIL]
    turns = [p["turns"] for p in played if p["env"] == "babyai" and p["item"] != EVIL]
    assert [len(r) for r in rooms] == [n + 1 for n in turns]
    assert "<img" not in page and page.count("</script>") == 2 and "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert set(data["metrics"]) >= {"success", "success/babyai", "success/textcraft", "kl"} and len(data["metrics"]["kl"]) == 3


def test_many_trajectories_are_thinned_by_whole_groups(folder):
    view.write_page(folder, most=24)
    data = data_of((folder / "view.html").read_text())
    groups = {}
    for row in data["table"]:
        groups.setdefault((row["step"], row["group"]), []).append(row["sample"])
    assert len(data["table"]) <= 24 and all(sorted(g) == [0, 1, 2, 3] for g in groups.values()) and "one group in 2" in data["note"]
    view.write_page(folder)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "view.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_pieces_of_characters_are_kept_as_bytes():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.train_from_iterator(["turn left turn left"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    text = "turn left, \u00e9t\u00e9 \u6f22 \U0001f642"
    pieces = [view.piece(tokenizer, i) for i in tokenizer.encode(text)]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces).decode() == text and any(isinstance(p, list) for p in pieces)

    class SentencePiece:
        def decode(self, ids):
            return {1: "left", 2: "\ufffd"}[ids[0]]

        def convert_ids_to_tokens(self, i):
            return {1: "\u2581left", 2: "<0xE2>"}[i]
    assert [view.piece(SentencePiece(), i) for i in (1, 2)] == [" left", [0xE2]]


def test_a_mixtures_stages_are_those_of_each_world():
    rows = [{"horizon": h, "horizon/babyai": b, "horizon/textcraft": h} for h, b in ((5, 3), (5, 3), (5, 4), (8, 4))]
    assert metrics.stages(rows) == [2, 3] and metrics.stages([{"horizon": 3}] * 2) == []


def test_a_run_without_a_step_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("")
    done = subprocess.run([sys.executable, "view.py", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "first step" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture
def browser():
    if not shutil.which("chromium"):
        pytest.skip("needs Debian's chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser, path, **how):
    """-> the page, and a list of whatever goes wrong in it"""
    page, wrong = browser.new_page(**how), []
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
    assert EVIL in page.locator("article .dim").first.inner_text() and EVIL.replace(" ", "") in page.locator("article .assistant").first.inner_text().replace(" ", "")
    assert page.title() == "evil" and not wrong and page.locator("img").count() == 0


def test_in_a_browser_the_table_is_sorted_and_filtered(folder, browser):
    page, wrong = opened(browser, folder / "view.html")
    rows, table = page.locator("#rows tr"), data_of((folder / "view.html").read_text())["table"]
    assert rows.count() == 48

    def column(name):
        at = page.locator("#head th").all_inner_texts().index(name) + 1
        return page.locator(f"#rows td:nth-child({at})").all_inner_texts()
    for name in ("step", "env", "item", "sample", "reward", "success", "turns", "tokens"):
        for sign in (1, -1):
            page.get_by_role("button", name=name, exact=True).click()
            expected = sorted((row[name] for row in table), reverse=sign < 0)
            got = column(name)
            assert [str(v).lower() if not isinstance(v, float) else f"{float(v):.2g}" for v in expected] == [
                v if not isinstance(expected[0], float) else f"{float(v):.2g}" for v in got], name
    for name in ("step", "env", "success", "turns"):
        value = str(table[-1][name]).lower()
        page.select_option(f"select[aria-label={name}]", value)
        assert rows.count() == sum(str(row[name]).lower() == value for row in table) and set(column(name)) == {value}
        page.select_option(f"select[aria-label={name}]", "")
    for text, keep in ((">0", lambda r: r > 0), ("<= 0", lambda r: r <= 0), ("1", lambda r: r == 1)):
        page.fill("input[aria-label=reward]", text)
        assert rows.count() == sum(keep(row["reward"]) for row in table)
    assert not wrong


def test_in_a_browser_trajectories_are_seen_by_keyboard_side_by_side_and_coloured(folder, browser):
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
    colours = "new Set([...document.querySelectorAll('.t.m')].map(e => getComputedStyle(e).backgroundColor)).size"
    assert page.evaluate(colours) == 1  # green letters alone
    page.select_option("#colour", "logprob")
    page.wait_for_function(f"{colours} > 3")
    seen = page.evaluate(colours)
    page.select_option("#colour", "advantage")
    page.wait_for_function(f"{colours} < {seen}")
    assert page.evaluate("data.vocabulary.a = [0xc3], data.vocabulary.b = [0xa9], data.vocabulary.c = '!', texts(['a', 'b', 'c', 'a', 'c'])") == [
        "", "\u00e9", "!", "", "\ufffd!"]
    for width in (1280, 390):  # a desk, a phone: nothing is wider than the screen
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not wrong


def test_in_a_browser_a_thousand_trajectories_weigh_little_and_open_by_day_and_by_night(folder, browser, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    lines = [line for file in sorted((folder / "trajectories").glob("*")) for line in file.open()]
    row = (folder / "metrics.jsonl").read_text().splitlines()[0]
    for step in range(21):  # the same 48 in each, more than a compressed piece holds
        (tmp_path / f"run/trajectories/step_{step:06d}.jsonl").write_text("".join(json.dumps(json.loads(line) | {"step": step}) + "\n" for line in lines))
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(json.loads(row) | {"step": n, "trajectories": 48, "horizon": 3 + n // 10}) + "\n" for n in range(21)))
    path = view.write_page(tmp_path / "run")
    assert path.stat().st_size < 10e6
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, wrong = opened(browser, path, color_scheme=scheme)
        page.wait_for_selector("#rows tr")
        assert page.locator("#count").inner_text().startswith("1008 of 1008") and not wrong
        assert "at step 10, 20" in page.locator("#stages").inner_text() and page.locator("#curves svg").first.locator("line").count() == 2
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
