"""The embedded web sites as one HTTP server on loopback, with a database for every episode.

    shop.localhost:PORT   forum.localhost:PORT   code.localhost:PORT   admin.localhost:PORT
    localhost:PORT (links to the four)

Names that end in ".localhost" resolve to this machine in every browser. An episode is a SQLite
database in memory that is filled from a seed. A request names its episode by the header X-Episode
(the agent's browser) or by a cookie, which a link with ?episode=KEY sets (a person's browser).
"""

import functools
import random
import secrets
import sqlite3
import threading
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, urlsplit

from websites import admin, code, forum, shop
from websites.site import STYLE, Redirect, Request, esc

SITES = {site.name: site for site in (shop.SITE, forum.SITE, code.SITE, admin.SITE)}
LARGEST_FORM = 1 << 16  # bytes
MAX_FIELDS = 100  # of a query or a form


# ---- databases ----


def _connect():
    return sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)


@functools.lru_cache(maxsize=16)
def _filled(seed):
    db = _connect()
    db.execute("begin")
    for site in SITES.values():
        for statement in site.schema.split(";"):
            db.execute(statement)
        site.fill(db, random.Random(f"{site.name} {seed}"))
    db.execute("commit")
    return db


_FILLING = threading.Lock()


def database(seed):
    """A new database of all sites, filled from `seed`. The same seed gives the same content."""
    with _FILLING:
        db = _connect()
        _filled(seed).backup(db)
    return db


# ---- the server ----


class Websites:
    """The server, in a thread of its own. Any thread may begin and end episodes.

    port: 0 takes a free one.
    """

    def __init__(self, port=0):
        self.episodes = {}  # key -> (database, the lock that a request holds)
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.websites = self  # where the handlers find the episodes
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def address(self, name=""):
        """The address of a site, or of the page with links to all sites."""
        host = f"{name}.localhost" if name else "localhost"
        return f"http://{host}:{self.port}"

    def begin(self, seed) -> str:
        """Begin an episode with a database of its own -> its key, which cannot be guessed."""
        key = secrets.token_hex(16)
        db = database(seed)
        with self.lock:
            self.episodes[key] = db, threading.Lock()
        return key

    def end(self, key):
        """End an episode and close its database. An unknown key is ignored."""
        with self.lock:
            db, lock = self.episodes.pop(key, (None, None))
        if db is not None:
            with lock:
                db.close()

    def close(self):
        """Stop the server."""
        self.server.shutdown()
        self.server.server_close()


def _parse_fields(text, keep_blank=False):
    """A query or a form as a dict; {} where it has too many fields."""
    try:
        pairs = parse_qsl(text, keep_blank_values=keep_blank, max_num_fields=MAX_FIELDS)
    except ValueError:
        return {}
    return dict(pairs)


class Handler(BaseHTTPRequestHandler):
    """Finds the site and the episode of a request and sends the site's answer."""

    timeout = 20  # seconds a connection may be silent: browsers open connections ahead of need

    def do_GET(self):
        self._answer("GET", {})

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_FORM:
            return self._send(413, "too long")
        body = self.rfile.read(int(length)).decode("utf-8", "replace")
        form = _parse_fields(body, keep_blank=True)
        # In a person's browser a page of another host could send a form here: refuse it.
        origin = self.headers.get("Origin")
        if origin not in (None, "null") and urlsplit(origin).netloc != self.headers.get("Host"):
            return self._send(403, "not from here")
        self._answer("POST", form)

    def _answer(self, method, form):
        websites = self.server.websites
        parts = urlsplit(self.path)
        query = _parse_fields(parts.query)

        # Whose request is it?
        cookie_key = self._cookie_key()
        header_key = self.headers.get("X-Episode")
        query_key = "" if header_key else query.pop("episode", "")
        key = header_key or query_key or cookie_key
        db, lock = websites.episodes.get(key, (None, None))

        # Which site is asked for?
        host = self.headers.get("Host", "").partition(":")[0].lower()
        if host in ("localhost", "127.0.0.1"):
            return self._send(200, home(websites, key if db else ""))
        site = SITES.get(host.removesuffix(".localhost"))
        if site is None:
            return self._send(404, "No such site.")
        if db is None:
            return self._send(
                404, "No episode: python envs.py play --env webarena prints an address."
            )

        # A person's browser keeps the key in a cookie.
        cookie = ""
        if key != cookie_key and "X-Episode" not in self.headers:
            cookie = f"episode={key}; HttpOnly; SameSite=Lax"

        with lock:
            try:
                status, page = site.answer(method, Request(parts.path, query, form, db))
                self._send(status, page, cookie=cookie)
            except Redirect as redirect:
                self._send(303, "", location=str(redirect), cookie=cookie)
            except sqlite3.ProgrammingError:  # the episode has ended meanwhile
                self._send(410, "This episode has ended.")

    def _cookie_key(self):
        """The episode's key in the cookie, or ""."""
        cookie = SimpleCookie()
        try:
            cookie.load(self.headers.get("Cookie", ""))
        except CookieError:
            pass  # a malformed cookie counts as no cookie
        return cookie["episode"].value if "episode" in cookie else ""

    def _send(self, status, text, location="", cookie=""):
        data = text.encode("utf-8", "replace")
        headers = {
            "Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(data)),
            "Cache-Control": "no-store", "Location": quote(location, safe="/?&=%#+"),
            "Set-Cookie": cookie,
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the browser has closed the connection

    def log_message(self, *_):
        """Log nothing."""


def home(websites, key):
    """The page with links to the four sites, in the episode `key` where it is given."""
    episode = f"?episode={key}" if key else ""
    cards = "".join(
        f'<a class="card" href="{websites.address(site.name)}/{episode}">'
        f"<h2>{esc(site.title)}</h2><p>{site.name}.localhost</p></a>"
        for site in SITES.values())
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Homepage</title>"
        f"<style>{STYLE}</style></head><body class=shop>"
        f'<main><h1>Four web sites</h1><div class="grid">{cards}</div></main></body></html>'
    )
