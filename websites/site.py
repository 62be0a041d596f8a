"""The framework of the embedded web sites: pieces of HTML, requests, and `Site`, a set of pages.

A site is a module with one `Site`. It gives the SQL schema of the site's tables, a function that
fills them from a random generator, a frame (header and navigation) around every page, and handlers
that are registered with `Site.get` and `Site.post`. Pages are plain HTML without scripts.
"""

import json
import re
from html import escape
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

FOLDER = Path(__file__).parent
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")  # of all pages


def words(site) -> SimpleNamespace:
    """The names and texts that fill a site's tables."""
    lists = json.loads((FOLDER / "words.json").read_text(encoding="utf-8"))[site]
    return SimpleNamespace(**lists)


# ---- pieces of HTML ----


def esc(value) -> str:
    """Text as HTML. Everything that comes from a database or a form must go through `esc`.

    >>> esc("<b>")
    '&lt;b&gt;'
    """
    return escape(str(value), quote=True)


def link(path, text, /, **query):
    """A link to `path` with these query parameters.

    >>> link("/orders", "Orders", page=2)
    '<a href="/orders?page=2">Orders</a>'
    """
    address = esc(path)
    if query:
        address += "?" + esc(urlencode(query))
    return f'<a href="{address}">{esc(text)}</a>'


def links(path, name, options):
    """Links to `path` with other values of the query parameter `name`; options: {text: value}."""
    return " ".join(link(path, text, **{name: value}) for text, value in options.items())


def choose(name, label, options, selected=""):
    """A labelled <select>. `options`: (value, text) pairs, or texts that are also values."""
    items = []
    for option in options:
        value, text = option if isinstance(option, tuple) else (option, option)
        mark = " selected" if str(value) == str(selected) else ""
        items.append(f'<option value="{esc(value)}"{mark}>{esc(text)}</option>')
    box = f'<select name="{esc(name)}">{"".join(items)}</select>'
    return f'<label class="field"><span>{esc(label)}</span>{box}</label>'


def field(name, label, value="", kind="text"):
    """A labelled <input> of this kind, or a <textarea> for kind "area"."""
    # Pages must not change by a byte, so the space before ">" stays.
    if kind == "area":
        box = f'<textarea name="{esc(name)}" rows="4" >{esc(value)}</textarea>'
    else:
        box = f'<input type="{kind}" name="{esc(name)}" value="{esc(value)}" >'
    return f'<label class="field"><span>{esc(label)}</span>{box}</label>'


def form(path, text, *fields):
    """A form of these fields, which a button with this text posts to `path`."""
    return f'<form method="post" action="{path}">{"".join(fields)}<button>{text}</button></form>'


def top_bar(request, title, label, *menu):
    """The header of a site: its title, a search field with this label, and a menu."""
    words = esc(request.query.get("q", ""))
    return (
        f'<header class="top"><div class="bar"><a class="brand" href="/">{title}</a>'
        f'<form action="/search"><input type="search" name="q" aria-label="{label}" '
        f'placeholder="{label}" value="{words}"><button>Search</button></form>'
        f'<nav>{"".join(menu)}</nav></div></header>'
    )


def button(path, text, label="", kind="", **hidden):
    """A form with one button, which posts the `hidden` values to `path`.

    label: the accessible name, needed where a page has several buttons with the same text.
    kind: the button's CSS class.
    """
    inputs = "".join(
        f'<input type="hidden" name="{esc(name)}" value="{esc(value)}">'
        for name, value in hidden.items())
    accessible_name = f' aria-label="{esc(label)}"' if label else ""
    return (
        f'<form method="post" action="{esc(path)}" class="inline">{inputs}'
        f'<button class="{kind}"{accessible_name}>{esc(text)}</button></form>'
    )


def table(heads, rows, kind=""):
    """A table. `heads` are texts; `rows` are lists of cells that are HTML already."""
    head = "".join(f"<th>{esc(text)}</th>" for text in heads)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return (f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def money(cents):
    """An amount in dollars.

    >>> money(123456)
    '$1,234.56'
    """
    return f"${cents / 100:,.2f}"


def pager(request, count, size):
    """Links to the previous and the next page of a list of `count` entries, `size` on a page.

    ?page=N counts from 1. There are no links where everything is on one page.
    """
    last = max(1, -(-count // size))
    if last == 1:
        return ""
    now = request.page
    query = {name: value for name, value in request.query.items() if name != "page"}
    links = []
    if now > 1:
        links.append(link(request.path, "Previous page", **query, page=now - 1))
    if now < last:
        links.append(link(request.path, "Next page", **query, page=now + 1))
    return f'<p class="pager"><span>Page {now} of {last}</span> {" ".join(links)}</p>'


# ---- requests ----


class Redirect(Exception):
    """Raised by `Site.answer` after a form was handled: the browser goes to this path next."""


class NotFound(Exception):
    """Raised by a handler when the address names nothing that exists."""


class Request:
    """A request as a handler sees it.

    path: without the query. query, form: dicts of texts. db: the episode's SQLite connection, which
    no other thread uses while the request is handled. page: the number in ?page=N, 1 by default.
    """

    def __init__(self, path, query, form, db):
        self.path = path
        self.query = query
        self.form = form
        self.db = db
        number = query.get("page", "1")
        is_number = number.isdecimal() and number.isascii()
        self.page = max(1, int(number[:6])) if is_number else 1

    def rows(self, sql, *values):
        """All rows of a query."""
        return self.db.execute(sql, values).fetchall()

    def page_of(self, sql, size, *values):
        """The rows of a query on this page of `size` rows."""
        return self.rows(f"{sql} limit ? offset ?", *values, size, size * (self.page - 1))

    def change(self, sql, *values):
        """Run a statement that changes rows -> the number of rows that it has changed."""
        return self.db.execute(sql, values).rowcount

    def row(self, sql, *values):
        """The first row of a query. Raises NotFound if there is none."""
        row = self.db.execute(sql, values).fetchone()
        if row is None:
            raise NotFound
        return row

    def value(self, sql, *values):
        """The first column of the first row. Raises NotFound if there is no row."""
        return self.row(sql, *values)[0]

    def text(self, name, most=2000):
        """A form's text, with single spaces, cut to `most` characters."""
        return " ".join(self.form.get(name, "").split())[:most]

    def number(self, name, default=0, most=10_000):
        """A form's whole number from 0 to `most`, or `default` where the text is not a number."""
        text = self.form.get(name, "").strip()
        if text.isdecimal() and text.isascii():
            return min(most, int(text[:9]))
        return default


# ---- sites ----


class Site:
    """The pages of one site.

    schema: SQL statements separated by ";". fill(db, rng): fills the tables.
    frame(request, title, body): the content of <body>, with the site's header and navigation.
    """

    def __init__(self, name, title, schema, fill, frame):
        self.name = name
        self.title = title
        self.schema = schema
        self.fill = fill
        self.frame = frame
        self.handlers = []  # (method, compiled pattern of the path, function)

    def _register(self, method, pattern):
        def register(function):
            self.handlers.append((method, re.compile(pattern), function))
            return function

        return register

    def get(self, pattern):
        """Register a page: function(request, *groups of the path) -> (title, HTML)."""
        return self._register("GET", pattern)

    def post(self, pattern):
        """Register a form's target: function(request, *groups of the path) -> the path to go to."""
        return self._register("POST", pattern)

    def answer(self, method, request) -> tuple[int, str]:
        """Handle a request -> (HTTP status, page). Raises Redirect after a form was handled."""
        for known_method, pattern, function in self.handlers:
            match = pattern.fullmatch(request.path)
            if known_method != method or not match:
                continue
            try:
                result = function(request, *match.groups())
            except NotFound:
                break
            if method == "POST":
                raise Redirect(result)
            title, body = result
            return 200, self.document(request, title, body)
        body = "<h1>There is no such page</h1><p>The address leads nowhere.</p>"
        return 404, self.document(request, "Not found", body)

    def document(self, request, title, body):
        """A whole HTML document around the page's own HTML."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<title>{esc(title)}</title><link rel="icon" href="data:,">'
            f"<style>{STYLE}</style></head>"
            f"<body class={self.name}>{self.frame(request, title, body)}</body></html>"
        )
