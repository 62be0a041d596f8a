"""The four sites behind their server: episodes, forms, links, and what a request may contain."""

import html
import itertools
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from websites import shop, shop_tasks
from websites.server import SITES, Websites, database
from websites.templates import Db

FOLDER = Path(__file__).parent.parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")
OK, SEE_OTHER, FORBIDDEN, NOT_FOUND, TOO_LARGE = 200, 303, 403, 404, 413


@pytest.fixture(scope="module")
def server():
    websites = Websites()
    yield websites
    websites.close()


def fetch(server, site, path, form=None, **headers):
    """Send one request without following redirects; a form makes it a POST."""
    method = "GET" if form is None else "POST"
    host = f"{site}.localhost" if site else "localhost"
    headers = {"Host": f"{host}:{server.port}", **headers}
    return requests.request(method, f"http://127.0.0.1:{server.port}{path}", data=form,
                            headers=headers, allow_redirects=False, timeout=10)


@pytest.fixture
def ask(server):
    """ask(site, path, form, headers...) in a new episode."""
    key = server.begin(0)
    yield partial(fetch, server, **{"X-Episode": key})
    server.end(key)


def test_the_same_seed_fills_the_same_database_and_another_seed_another_one():
    one, same, other = (list(database(seed).iterdump()) for seed in (4, 4, 5))
    assert one == same != other


def test_episodes_have_states_of_their_own(server, ask):
    product, name = database(0).execute("select id,name from product where stock>0").fetchone()
    add = {"product": product, "amount": "2"}
    assert ask("shop", "/cart/add", add).headers["Location"] == "/cart"
    assert name in ask("shop", "/cart").text
    same, other = ({"X-Episode": server.begin(seed)} for seed in (0, 5))
    for headers in (same, other):
        assert "is empty" in ask("shop", "/cart", **headers).text
    assert ask("shop", "/").text != ask("shop", "/", **other).text
    server.end(same["X-Episode"])
    for headers in (same, {"X-Episode": "nobody"}):
        assert ask("shop", "/", **headers).status_code == NOT_FOUND


def test_a_persons_browser_carries_the_episode_in_a_cookie(server):
    key = server.begin(0)
    assert "is empty" in fetch(server, "shop", "/cart", Cookie=f"episode={key}").text
    by_link = fetch(server, "shop", f"/?episode={key}")
    assert by_link.status_code == OK and key in by_link.headers["Set-Cookie"]
    home = fetch(server, "", f"/?episode={key}").text
    assert all(f"{server.address(site)}/?episode={key}" in home for site in SITES)
    assert fetch(server, "shop", "/cart").status_code == NOT_FOUND


def test_pages_show_text_as_text(ask):
    evil = "<script>alert(1)</script> '\" & \u202e \x00 é"
    forum, post = database(0).execute("select forum,id from post").fetchone()
    path = f"/f/{forum}/{post}"
    assert ask("forum", f"{path}/comment", {"body": evil}).status_code == SEE_OTHER
    page = ask("forum", path).text
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>" not in ask("shop", "/search?q=%3Cscript%3E%22%27").text


def test_requests_that_no_page_makes_get_a_page_and_change_nothing(ask):
    for path in (
            "/search?q=%25%5C_'%22", "/search?q=" + "a+" * 50, "/product/99999999999999999999",
            "/orders/000000000", "/nowhere", "/search?page=-1&q=a", "/?" + "a=1&" * 300,
            "/product/101?page=99999999999", "/%00", "//evil.example/", "/search?q=%ff%fe",
            "/orders?path=1&text=2"):
        assert ask("shop", path).status_code in (OK, NOT_FOUND), path
    before = ask("admin", "/products/101").text
    bad = {"price": "abc", "stock": "-5", "name": "", "enabled": "7"}
    for path in ("/products/101", "/orders/1/ship", "/reviews/0/approve"):
        assert ask("admin", path, bad).status_code in (SEE_OTHER, NOT_FOUND)
    numbers = {"price": "1e9", "stock": "²", "enabled": "1"}
    assert ask("admin", "/products/101", numbers).status_code == SEE_OTHER
    assert ask("admin", "/products/101").text == before  # what is no number changes nothing

    too_long = {"street": "a" * 100_000}
    assert ask("shop", "/account/edit", too_long).status_code == TOO_LARGE
    elsewhere = ask("shop", "/cart/add", {"product": "101"}, Origin="http://evil.example")
    assert elsewhere.status_code == FORBIDDEN
    assert ask("nosite", "/").status_code == NOT_FOUND


@pytest.mark.parametrize("site", SITES)
def test_every_link_of_every_site_leads_somewhere(ask, site):
    paths = ["/"]
    for path in itertools.islice(paths, 150):  # `paths` grows
        page = ask(site, path)
        assert page.status_code == OK, path
        links = [html.unescape(link) for link in re.findall(r'href="(/[^"]*)"', page.text)]
        paths += dict.fromkeys(link for link in links if link not in paths)
    assert len(paths) > 40


def test_the_sites_import_nothing_but_the_standard_library(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "websites")
    # -S: without installed packages, and started in a folder that holds nothing else.
    command = [sys.executable, "-S", "-c", "import websites.tasks"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readmes_command_shows_the_sites():
    code = re.search(r'^python -i -c "(.*)"$', README, re.MULTILINE)[1].replace("8000", "0")
    # Without -i the program would end at once: here it waits for a line instead.
    command = [sys.executable, "-u", "-c", code + "; input()"]
    with subprocess.Popen(command, cwd=FOLDER.parent, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline()
        port, key = re.search(r"localhost:(\d+)/\?episode=(\w+)", address).groups()
        page = fetch(SimpleNamespace(port=port), "shop", f"/?episode={key}").text
        process.communicate("\n", timeout=20)
    assert "Harbour Market" in page


def test_the_readmes_examples_work(ask, monkeypatch):
    page_example, template_example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.setattr(shop.SITE, "handlers", list(shop.SITE.handlers))
    exec(page_example, dict(vars(shop)))
    (name,) = database(0).execute("select name from product").fetchone()
    page = ask("shop", f"/brand/{name.split()[0]}")
    assert page.status_code == OK and re.search(r"<p>[1-9]\d* products</p>", page.text)

    monkeypatch.setattr(shop_tasks.TASKS, "templates", list(shop_tasks.TASKS.templates))
    exec(template_example, dict(vars(shop_tasks)))
    template = shop_tasks.TASKS.templates[-1]
    rng = random.Random(0)
    _, _, plan, answer = template.make(Db(database(0), rng), rng)
    assert template.kind == "find" and plan and answer > 0
