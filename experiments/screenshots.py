"""The page of a run as people see it: python experiments/screenshots.py runs/NAME [FOLDER]. Writes FOLDER/view.png (a desk), view_dark.png
and view_phone.png (default: docs/) in headless Chromium, and prints how heavy a page of 1,000 trajectories and one of 10,000 are and how long they take to open. Shown: a failure
and a success of one group, coloured by advantage (BabyAI). Needs playwright (pip install playwright) and Debian's chromium."""

import re
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))
from view import write_page  # noqa: E402

SIZES = {"view": (1280, 900, "light"), "view_dark": (1280, 900, "dark"), "view_phone": (390, 844, "light")}


def main(run, out="docs"):
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        for most in (1000, 10_000):
            path, page = write_page(run, most).resolve(), browser.new_page()
            begin = time.perf_counter()
            page.goto(f"file://{path}")
            page.wait_for_selector("#rows tr")
            print(f"{page.locator('#count').inner_text()}: {path.stat().st_size / 1e6:.2f} MB, opened in {time.perf_counter() - begin:.2f} s")
        for name, (width, height, scheme) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"file://{path}")
            page.select_option("select[aria-label=success]", "false")
            page.locator("#colour").select_option("advantage")
            for row in page.locator("#rows tr").all()[:200]:  # a failure whose rooms are drawn, and beside it a success of its group
                row.click()
                page.wait_for_selector("article .assistant")
                better = page.locator("article button").filter(has_text=re.compile(": 1$"))
                if page.locator("svg.room").count() and better.count():
                    better.first.click()
                    break
            page.wait_for_function("document.querySelectorAll('article').length == 2")
            page.locator("#pair").scroll_into_view_if_needed()
            page.screenshot(path=f"{out}/{name}.png", full_page=name == "view", **({"clip": {"x": 0, "y": 0, "width": width, "height": 2650}} if name == "view" else {}))
            print(f"{out}/{name}.png")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    main(*sys.argv[1:])
