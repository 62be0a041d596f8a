"""Pictures of a run's page: `python experiments/screenshots.py runs/NAME [FOLDER]`.

Writes FOLDER/view.png (a desk), view_dark.png and view_phone.png (default: docs/) with headless
Chromium. Prints the size of a page of 1,000 trajectories and of one of 10,000, and how long they
take to open. Shown: a failure and a success of one group, coloured by advantage (BabyAI). Needs
playwright (pip install playwright) and Debian's chromium.
"""

import re
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))
from view import write_page  # noqa: E402

SIZES = {
    "view": (1280, 900, "light"),
    "view_dark": (1280, 900, "dark"),
    "view_phone": (390, 844, "light"),
}


def main(run, out="docs"):
    with sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for most in (1000, 10_000):
            path = write_page(run, most).resolve()
            measure(browser, path)
        for name, (width, height, scheme) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(f"file://{path}")
            show_pair(page)
            options = {}
            if name == "view":  # higher than the window
                clip = {"x": 0, "y": 0, "width": width, "height": 2650}
                options = {"full_page": True, "clip": clip}
            page.screenshot(path=f"{out}/{name}.png", **options)
            print(f"{out}/{name}.png")
        browser.close()


def measure(browser, path):
    """Print the size of the page and how long it takes to open."""
    page = browser.new_page()
    begin = time.perf_counter()
    page.goto(f"file://{path}")
    page.wait_for_selector("#rows tr")
    count = page.locator("#count").inner_text()
    seconds = time.perf_counter() - begin
    print(f"{count}: {path.stat().st_size / 1e6:.2f} MB, opened in {seconds:.2f} s")


def show_pair(page):
    """Open a failure whose rooms are drawn, and beside it a success of its group."""
    page.select_option("select[aria-label=success]", "false")
    page.locator("#colour").select_option("advantage")
    for row in page.locator("#rows tr").all()[:200]:
        row.click()
        page.wait_for_selector("article .assistant")
        successes = page.locator("article button").filter(has_text=re.compile(": 1$"))
        if page.locator("svg.room").count() and successes.count():
            successes.first.click()
            break
    page.wait_for_function("document.querySelectorAll('article').length == 2")
    page.locator("#pair").scroll_into_view_if_needed()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    main(*sys.argv[1:])
