"""The four sites behind their server: episodes, forms, links, and what a request may contain."""

import html
import itertools
import random
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
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


def fetch(server, host, path, form=None, **headers):
    """Send one request without following redirects; a form makes it a POST."""
    method = "GET" if form is None else "POST"
    headers = {"Host": f"{host}:{server.port}", **headers}
    return requests.request(method, f"http://127.0.0.1:{server.port}{path}", data=form,
                            headers=headers, allow_redirects=False, timeout=10)


@contextmanager
def episode(server, seed=0):
    """-> (the key of a new episode, ask(site, path, form, headers...) in this episode)"""
    key = server.begin(seed)

    def ask(site, path, form=None, **headers):
        headers = {"X-Episode": key, **headers}
        return fetch(server, f"{site}.localhost", path, form, **headers)

    try:
        yield key, ask
    finally:
        server.end(key)


def test_the_same_seed_fills_the_same_database_and_another_seed_another_one():
    one, same, other = (list(database(seed).iterdump()) for seed in (4, 4, 5))
    assert one == same != other


def test_episodes_have_states_of_their_own(server):
    query = "select id,name from product where stock>0"
    product, name = database(0).execute(query).fetchone()
    order = {"product": product, "amount": "2"}
    with (
        episode(server) as (_, ask_one), episode(server) as (_, ask_other),
        episode(server, seed=5) as (_, ask_third),
    ):
        assert ask_one("shop", "/cart/add", order).headers["Location"] == "/cart"
        assert name in ask_one("shop", "/cart").text
        assert "is empty" in ask_other("shop", "/cart").text
        assert "is empty" in ask_third("shop", "/cart").text
        assert ask_one("shop", "/").text != ask_third("shop", "/").text
        assert ask_other("shop", "/", **{"X-Episode": "nobody"}).status_code == NOT_FOUND
    assert ask_other("shop", "/").status_code == NOT_FOUND  # the episode has ended


def test_a_persons_browser_carries_the_episode_in_a_cookie(server):
    with episode(server) as (key, _):
        with_cookie = fetch(server, "shop.localhost", "/cart", Cookie=f"episode={key}")
        assert "is empty" in with_cookie.text
        by_link = fetch(server, "shop.localhost", f"/?episode={key}")
        assert by_link.status_code == OK and key in by_link.headers["Set-Cookie"]
        home = fetch(server, "localhost", f"/?episode={key}")
        for site in SITES:
            assert f"{server.address(site)}/?episode={key}" in home.text
        assert fetch(server, "shop.localhost", "/cart").status_code == NOT_FOUND


def test_pages_show_text_as_text(server):
    with episode(server) as (_, ask):
        evil = "<script>alert(1)</script> '\" & \u202e \x00 é"
        forum, post = database(0).execute("select forum,id from post").fetchone()
        path = f"/f/{forum}/{post}"
        assert ask("forum", f"{path}/comment", {"body": evil}).status_code == SEE_OTHER
        page = ask("forum", path).text
        assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert "<script>" not in ask("shop", "/search?q=%3Cscript%3E%22%27").text


def test_requests_that_no_page_makes_get_a_page_and_change_nothing(server):
    with episode(server) as (_, ask):
        for path in (
            "/search?q=%25%5C_'%22", "/search?q=" + "a+" * 50, "/product/999999999",
            "/product/99999999999999999999", "/orders/000000000", "/nowhere",
            "/search?page=-1&q=a", "/category/x", "/?" + "a=1&" * 300,
            "/product/101?page=99999999999", "/%00", "//evil.example/", "/search?q=%ff%fe",
            "/orders?path=1&text=2",
        ):
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
        reply = ask("shop", "/cart/add", {"product": "101"}, Origin="http://evil.example")
        assert reply.status_code == FORBIDDEN
        assert ask("nosite", "/").status_code == NOT_FOUND


@pytest.mark.parametrize("site", SITES)
def test_every_link_of_every_site_leads_somewhere(server, site):
    with episode(server, seed=3) as (_, ask):
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
        shown = SimpleNamespace(port=port)
        page = fetch(shown, "shop.localhost", "/", **{"X-Episode": key}).text
        process.communicate("\n", timeout=20)
    assert "Harbour Market" in page


def test_the_readmes_examples_work(server, monkeypatch):
    page_example, template_example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.setattr(shop.SITE, "handlers", list(shop.SITE.handlers))
    exec(page_example, dict(vars(shop)))
    with episode(server) as (_, ask):
        name = database(0).execute("select name from product").fetchone()[0]
        page = ask("shop", f"/brand/{name.split()[0]}")
        assert page.status_code == OK and re.search(r"<p>[1-9]\d* products</p>", page.text)

    monkeypatch.setattr(shop_tasks.TASKS, "templates", list(shop_tasks.TASKS.templates))
    exec(template_example, dict(vars(shop_tasks)))
    template = shop_tasks.TASKS.templates[-1]
    rng = random.Random(0)
    _, _, plan, answer = template.make(Db(database(0), rng), rng)
    assert template.kind == "find" and plan and answer > 0
