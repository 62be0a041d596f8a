"""The page of runs that are still going on: a small server on this machine alone.

It only reads the runs' folders. The page requests new rows, the trajectories that are opened, and
the hits of searches.
"""

import json
import re
import secrets
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tqdm import tqdm

from page.build import render
from page.run import Run, read_trajectory, shown_ids
from trajectory import Trajectory, read_objects

HOST = "127.0.0.1"
LOCAL_NAMES = ("127.0.0.1", "localhost")
MAX_HITS = 5000  # trajectories of a run that a search finds at most


class LiveRun(Run):
    """A run, and where each row's trajectory is: (file, place among those that can be shown)."""

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self.places: list[tuple[Path, int]] = []
        self.stamps: dict[Path, tuple[int, int]] = {}  # file -> its size and time when it was read
        # Rows of different generations, or of different servers, must not be mixed.
        self.generation = secrets.randbelow(2**40)

    def refresh(self) -> None:
        """Read new files. If a step was played again, everything is read again, and a new
        generation begins."""
        changed = any(not file.exists() or stamp(file) != self.stamps[file] for file in self.read)
        if changed:
            self.generation += 1
            self.rows.clear()
            self.places.clear()
            self.read.clear()
            self.left_out.clear()
        self.find_files()
        for file in tqdm(self.unread, desc=self.folder.name, unit="step", disable=None):
            self.stamps[file] = stamp(file)
            self.places += [(file, place) for place in range(len(self.read_file(file)))]

    def trajectory(self, number: int) -> dict:
        """The trajectory of a row, with the texts of its tokens. Raises IndexError if there is
        none."""
        file, place = self.places[number]
        t = shown_in(file)[place]
        found = self.tokens_of(t)
        found["vocabulary"] = {}
        self.add_pieces(shown_ids(t), found["vocabulary"])
        return found

    def search(self, text: str, where: str) -> list[tuple[int, str]]:
        """-> (number of the row, what stands around the first term) for each trajectory whose
        messages have all terms of `text`. where: "replies", "environment" or "anything". Raises
        re.error for a regular expression that cannot be read."""
        terms = read_search(text)
        found = (find_in(t.messages, terms, where)
                 for file in self.read for t in shown_in(file))
        return [(number, snippet) for number, snippet in enumerate(found) if snippet][:MAX_HITS]


def stamp(file: Path) -> tuple[int, int]:
    """What changes when a file is written again."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def shown_in(file: Path) -> list[Trajectory]:
    """The trajectories of a file that can be shown."""
    shown = []
    for line in read_objects(file)[0]:
        with suppress(ValueError):
            shown.append(read_trajectory(line, file))
    return shown


def read_search(text: str) -> list[re.Pattern]:
    """The terms of a search, with "&" between them: texts, or regular expressions between slashes.

    >>> [term.pattern for term in read_search("go & /red|b&w/")]
    ['go', 'red|b&w']
    """
    terms = map(str.strip, re.findall(r"\s*/(?:\\.|[^/\\])+/\s*(?=&|$)|[^&]+", text))
    return [re.compile(term[1:-1] if re.fullmatch("/.+/", term) else re.escape(term), re.IGNORECASE)
            for term in terms if term]


def find_in(messages: list[dict], terms: list[re.Pattern], where: str) -> str:
    """What stands around the first term in the messages; "" if they lack a term."""
    roles = {"replies": ("assistant",), "environment": ("user",)}.get(where, ("assistant", "user"))
    # Without the fixed reply to the instructions.
    texts = [str(m.get("content")) for m in messages[:1] + messages[2:] if m.get("role") in roles]
    found = [next(filter(None, map(term.search, texts)), None) for term in terms]
    if not found or None in found:
        return ""
    start, end = found[0].span()
    return found[0].string[max(0, start - 30):end + 50] or " "


class Server(ThreadingHTTPServer):
    """Serves the page of `runs` on `HOST`."""

    daemon_threads = True

    def __init__(self, folders: list[str], port: int):
        self.runs = [LiveRun(folder) for folder in folders]
        self.lock = threading.Lock()  # requests come in threads; the runs are read by one
        self.refresh()
        super().__init__((HOST, port), Handler)

    def refresh(self) -> None:
        """Read the new files of all runs."""
        for run in self.runs:
            run.refresh()

    def generation(self) -> int:
        """Changes when a step was played again."""
        return sum(run.generation for run in self.runs)

    def state(self, first: list[int]) -> dict:
        """What the page shows; of each run the rows from number `first[k]` on."""
        pairs = zip(self.runs, first)
        return {"live": True, "generation": self.generation(),
                "runs": [run.about() | {"table": run.table(start)} for run, start in pairs]}


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests of pages on this machine."""

    def do_GET(self):
        # DNS rebinding: a site whose name points to this machine must not read the runs.
        name = (self.headers.get("Host") or "").partition(":")[0]  # port 80 is left out
        address = urlsplit(self.path)
        # Nor may it make this process search: a regular expression may take long.
        is_foreign = self.headers.get("Sec-Fetch-Site") == "cross-site" and address.path != "/"
        if name not in LOCAL_NAMES or is_foreign:
            self.reply(403, "text/plain", "open this page under 127.0.0.1")
            return
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        answers = {"/": self.page, "/update": self.update, "/trajectory": self.trajectory,
                   "/search": self.search}
        if address.path not in answers:
            self.reply(404, "text/plain", "not found")
            return
        try:
            with self.server.lock:
                kind, text = answers[address.path](query)
        except Exception as e:  # a damaged file must not end the thread without an answer
            self.reply(400, "text/plain", f"{type(e).__name__}: {e}")
            return
        self.reply(200, kind, text)

    def page(self, query):
        self.server.refresh()
        return "text/html", render(self.server.state([0] * len(self.server.runs)))

    def update(self, query):
        self.server.refresh()
        first = [max(0, int(number)) for number in query["rows"].split(",")]
        if int(query["generation"]) != self.server.generation():
            first = [0] * len(self.server.runs)
        return as_json(self.server.state(first))

    def trajectory(self, query):
        run = self.server.runs[int(query["run"])]
        return as_json(run.trajectory(int(query["id"])))

    def search(self, query):
        hits = [(number, *hit) for number, run in enumerate(self.server.runs)
                for hit in run.search(query["text"], query.get("where", "anything"))]
        return as_json(hits)

    def reply(self, status: int, kind: str, text: str) -> None:
        """Send an answer."""
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with suppress(ConnectionError):  # the tab was closed or reloaded
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        """Log nothing."""


def as_json(value: object) -> tuple[str, str]:
    """-> content type and text."""
    return "application/json", json.dumps(value, separators=(",", ":"), allow_nan=False)
