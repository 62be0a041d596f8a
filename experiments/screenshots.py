"""Pictures of the page of runs: `python experiments/screenshots.py RUN OTHER_RUN [FOLDER]`.

RUN and OTHER_RUN are folders of finished BabyAI runs. Writes into FOLDER (default: shots/), at
1400x900 and 390x844, light and dark: a failing group, a failure beside a success of its group
("differences"), a search, both runs in one page, and a run of ten steps that is going on, after
its third and its tenth step. Prints the size of RUN's page and how long it takes to open. Needs
playwright (pip install playwright) and Debian's chromium. Takes two minutes.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from view import write_page  # noqa: E402

SIZES = {"desk": (1400, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
LIVE_STEPS = 10


def main(run, other, out="shots"):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p, tempfile.TemporaryDirectory() as folder:
        browser = p.chromium.launch(executable_path="/usr/bin/chromium",
                                    args=["--no-sandbox", "--disable-gpu"])
        page = write_page(run).resolve()
        both = write_page([run, other], out=Path(folder) / "both.html").resolve()
        measure(browser, page)
        for name, path, show in (("failing_group", page, show_failing_group),
                                 ("differences", page, show_differences),
                                 ("search", page, show_search),
                                 ("two_runs", both, show_two_runs)):
            for shot, tab in tabs(browser, f"file://{path}"):
                show(tab)
                save(tab, out / f"{name}_{shot}.png")
        follow_a_run(browser, Path(folder) / "run", out)
        browser.close()


def tabs(browser, address):
    """-> (name of size and scheme, a tab with the page) for each of both."""
    for size, (width, height) in SIZES.items():
        for scheme in SCHEMES:
            tab = browser.new_page(viewport={"width": width, "height": height},
                                   color_scheme=scheme)
            tab.goto(address)
            tab.wait_for_selector("#rows tr")
            yield f"{size}_{scheme}", tab


def save(tab, path):
    """Take the picture, and close the tab."""
    tab.wait_for_timeout(300)
    tab.screenshot(path=path)
    tab.close()
    print(path)


def measure(browser, path):
    """Print the size of the page and how long it takes to open."""
    tab = browser.new_page()
    begin = time.perf_counter()
    tab.goto(f"file://{path}")
    tab.wait_for_selector("#rows tr")
    seconds = time.perf_counter() - begin
    count = tab.locator("#count").inner_text()
    print(f"{count}: {path.stat().st_size / 1e6:.2f} MB, opened in {seconds:.2f} s")


def show_failing_group(tab):
    """The items that succeed least, and a failure with its rooms."""
    tab.select_option("select[aria-label=success]", "false")
    open_one(tab, lambda: tab.locator("svg.room").count() and tab.locator(".badge").count())
    tab.locator(".badge").first.scroll_into_view_if_needed()


def show_differences(tab):
    """A failure beside a success of its group, from the first turn in which they differ."""
    tab.select_option("select[aria-label=success]", "false")
    success = tab.locator("article .group button").filter(has_text=re.compile(": [1-9]"))
    open_one(tab, lambda: tab.locator("svg.room").count() and success.count())
    success.first.click()
    tab.wait_for_selector("article:nth-child(2) .turn")
    tab.locator("#colour").select_option("logprob")
    tab.wait_for_timeout(300)
    tab.locator("#first-difference").click()


def open_one(tab, suits):
    """Open the first trajectory of the run that is listed and suits."""
    tab.get_by_role("button", name="step", exact=True).click()
    for row in tab.locator("#rows tr:not(.dim)").all()[:200]:
        row.click(position={"x": 20, "y": 8})
        tab.wait_for_selector("article .assistant")
        tab.wait_for_timeout(100)
        if suits():
            return


def show_search(tab):
    """Replies that name a yellow door, by category."""
    tab.select_option("select[aria-label='search in']", "replies")
    tab.fill("#search", "yellow door")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("th:has-text('found')")
    tab.locator("#rows tr").first.click(position={"x": 20, "y": 8})
    tab.wait_for_selector("article .assistant")


def show_two_runs(tab):
    """The curves of both, and the success of each by category."""
    tab.select_option("select[aria-label='group by']", "category")
    tab.locator("#distributions summary").click()
    tab.evaluate("scrollTo(0, 0)")


def follow_a_run(browser, run, out):
    """Train for a few steps while the page is served, and take pictures on the way."""
    flags = ["--env", "babyai", "--algo", "grpo", "--steps", str(LIVE_STEPS), "--out", str(run)]
    training = subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (run / "config.json").exists():
        time.sleep(0.1)
    serve = [sys.executable, "view.py", "--live", str(run), "--port", "0"]
    server = subprocess.Popen(serve, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
    try:
        address = server.stdout.readline().split()[0]
        for steps in (3, LIVE_STEPS):
            tab = browser.new_page()
            tab.goto(address)
            while int(re.search(r"\d+|$", tab.locator("#live").inner_text())[0] or 0) < steps:
                tab.wait_for_timeout(100)
            tab.close()
            for shot, tab in tabs(browser, address):
                tab.locator("#rows tr").first.click()
                tab.wait_for_selector("article .assistant")
                tab.evaluate("scrollTo(0, 0)")
                save(tab, out / f"live_{steps}_steps_{shot}.png")
    finally:
        server.terminate()
        training.wait()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or not all(Path(run).is_dir() for run in sys.argv[1:3]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
