"""Chromium through playwright: browser threads, a watchdog, and windows (one for each episode).

Playwright's objects belong to the thread that made them. A `Browser` is therefore a thread with a
queue of jobs, a Chromium of its own and up to `MAX_WINDOWS` windows. The caller waits and watches:
if a job takes longer than `JOB_TIMEOUT` seconds (a crashed page can hang for a minute), the caller
kills Chromium by its process id. The episodes that were open in it get an `EnvError`, and the next
window starts a new Chromium. Only the addresses that a window allows are ever requested: Chromium
finds no other server (`resolver_rules`), whatever leads there.
"""

import atexit
import concurrent.futures
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from envs import EnvError
from worlds.webarena import tree

MAX_WINDOWS = 16  # of a browser
MAX_TABS = 8  # of a window
JOB_TIMEOUT = 20.0  # seconds
# Seconds that a page's scripts have after an action to begin a navigation. For the user's own
# sites only: the embedded sites have no scripts.
GRACE = 0.05
POLL_MS = 5  # milliseconds between two looks at whether a navigation is over

# Without a compositor a page takes a third less work. Nobody looks at it, but no screenshot can be
# taken either.
FLAGS = """
    --no-sandbox --disable-gpu --disable-gpu-compositing --disable-threaded-compositing
    --disable-quic --no-first-run --disable-background-networking --disable-component-update
    --disable-sync --force-webrtc-ip-handling-policy=disable_non_proxied_udp
""".split()
# Parts of Chromium's error names (net::ERR_...) that mean that a site does not answer.
UNANSWERED = (
    "CONNECTION", "NAME_NOT", "EMPTY_RESPONSE", "TIMED_OUT", "ADDRESS", "NETWORK", "INTERNET",
    "SSL",
)
# What an agent may write -> playwright's name. Other names are passed on as they are.
KEYS = {name.lower(): name for name in """
    Control Alt Shift Enter Escape Tab Space Backspace Delete Home End PageUp PageDown ArrowUp
    ArrowDown ArrowLeft ArrowRight
""".split()} | {
    "ctrl": "Control", "meta": "Control", "cmd": "Control", "return": "Enter", "esc": "Escape",
    "up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight",
}
# Runs in every page first. It remembers that a link or a form is about to lead to another page. The
# page knows this at once; the request follows after a time that depends on the machine's load.
PROBE = """(() => {
let last = null;
navigation.addEventListener('navigate', e => {
    if (!e.hashChange && !e.destination.sameDocument && e.downloadRequest === null) last = e;
});
addEventListener('submit', e => { last = e; });
Object.defineProperty(window, '__leaving', {get: () => !!last && !last.defaultPrevented});
})()"""
# Chooses an option of a list: the open list is not part of the page, so it cannot be clicked.
CHOOSE_OPTION = """function() {
    const select = this.closest('select');
    if (!select) { this.click(); return; }
    this.selected = true;
    for (const kind of ['input', 'change'])
        select.dispatchEvent(new Event(kind, {bubbles: true}));
}"""


def _one_line(error):
    """An error's message in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


# ---- browsers ----


# Playwright's words if another navigation of the tab interrupts the one that was asked for.
INTERRUPTED = "is interrupted by another navigation"


def resolver_rules(roots: Sequence[str]) -> str:
    """Chromium's --host-resolver-rules with which it finds the servers of `roots` and no other.

    Chromium looks up the host and port of every connection, numeric addresses too. The rules thus
    hold for redirects, workers, sockets, preconnections and WebRTC, which playwright's handlers do
    not see. The first rule that matches counts; no host can have the name "^NOTFOUND".

    >>> resolver_rules(["http://a.localhost:80", "https://b.org"])
    'MAP a.localhost:80 a.localhost:80, MAP b.org:443 b.org:443, MAP * ^NOTFOUND'
    """
    rules = []
    for root in roots:
        parts = urlsplit(root)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        rules.append(f"MAP {host}:{port} {host}:{port}")
    return ", ".join([*rules, "MAP * ^NOTFOUND"])


class Browser:
    """A thread with a Chromium, which is started with the first window and again after it died."""

    def __init__(self, executable: str, roots: Sequence[str]) -> None:
        """roots: the servers that may be connected to ("http://shop.localhost:8000")."""
        self.executable = executable
        self.resolver_rules = resolver_rules(roots)
        self.num_windows = 0
        # Jobs: (future, function, arguments). None ends the thread.
        self.inbox = queue.SimpleQueue()
        self.job_start = None  # time.monotonic() of the running job's start
        self.broken = False  # the thread hangs and is given up
        self.driver = None
        self.chromium = None
        self.pid = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while True:
            job = self.inbox.get()
            if job is None or self.broken:
                break
            future, function, args = job
            if not future.set_running_or_notify_cancel():
                continue
            self.job_start = time.monotonic()
            try:
                future.set_result(function(*args))
            except EnvError as error:
                future.set_exception(error)
            except Exception as error:  # playwright's errors and others count as the environment's
                message = f"browser: {type(error).__name__}: {_one_line(error)}"
                future.set_exception(EnvError(message))
            self.job_start = None
        with suppress(Exception):  # Chromium may be gone already
            if self.chromium:
                self.chromium.close()
            if self.driver:
                self.driver.stop()

    def call(self, function: Callable, *args: Any) -> Any:
        """Run function(*args) in the browser's thread.

        Raises EnvError if it fails or takes longer than JOB_TIMEOUT.
        """
        future = Future()
        killed = False
        self.inbox.put((future, function, args))
        while not concurrent.futures.wait([future], 0.5).done:
            now = time.monotonic()
            seconds = now - (self.job_start or now)
            if seconds > JOB_TIMEOUT and not killed and future.running():
                killed = True
                self.kill()
            if seconds > JOB_TIMEOUT + 10:  # killing Chromium did not help: give the thread up
                self.broken = True
                self.end()  # if the job ends after all, so does its Chromium
            if self.broken:
                raise EnvError(f"browser: no answer within {JOB_TIMEOUT:g} s")
        return future.result()

    def kill(self) -> None:
        """Kill Chromium by its process id."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _is_alive(self):
        if self.chromium and self.chromium.is_connected():
            with suppress(ProcessLookupError):
                os.kill(self.pid, 0)  # raises if there is no such process
                return True
        return False

    def _launch(self):
        from playwright.sync_api import sync_playwright

        self.pid = None
        if not self.driver:
            self.driver = sync_playwright().start()
        self.chromium = self.driver.chromium.launch(
            executable_path=self.executable,
            headless=True,
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            args=[*FLAGS, f"--host-resolver-rules={self.resolver_rules}"],
        )
        session = self.chromium.new_browser_cdp_session()
        processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
        self.pid = next(p["id"] for p in processes if p["type"] == "browser")

    def context(self, **options: Any) -> Any:
        """A new browser context; starts Chromium if needed. For the browser's thread only."""
        if not self._is_alive():
            self._launch()
        try:
            return self.chromium.new_context(**options)
        except Exception:
            self.chromium = None  # it died a moment ago; the next try starts another one
            raise

    def end(self) -> None:
        """End the thread and Chromium after the waiting jobs."""
        self.inbox.put(None)


_LOCK = threading.Lock()
_BROWSERS = {}  # (executable, roots) -> list of browsers


def take(executable: str, roots: tuple) -> Browser:
    """A browser with room for a window. Give it back with `leave`."""
    with _LOCK:
        browsers = [b for b in _BROWSERS.get((executable, roots), []) if not b.broken]
        _BROWSERS[executable, roots] = browsers
        browser = next((b for b in browsers if b.num_windows < MAX_WINDOWS), None)
        if browser is None:
            browser = Browser(executable, roots)
            browsers.append(browser)
        browser.num_windows += 1
        return browser


def leave(browser: Browser) -> None:
    """Give a browser back that `take` gave."""
    with _LOCK:
        browser.num_windows -= 1


@atexit.register
def _end_all():
    browsers = [browser for found in _BROWSERS.values() for browser in found]
    for browser in browsers:
        browser.end()
    for browser in browsers:
        browser.thread.join(3)


# ---- windows ----


class Window:
    """An episode's tabs. All methods but the constructor run in the browser's thread.

    The methods that carry out actions return "", or what to tell the agent about an action that
    cannot be done.
    """

    def __init__(
        self, browser: Browser, allowed: str, width: int = 1280, height: int = 720,
        append: bool = False, grace: float = GRACE,
    ) -> None:
        """allowed: a regular expression of the addresses that may be requested.

        width, height: pixels. append: `type` adds to what a field holds, as in WebArena's own
        code, instead of replacing it. grace: seconds, see GRACE.
        """
        self.browser = browser
        self.width = width
        self.height = height
        self.append = append
        self.grace = grace
        self.storage = None  # a storage-state file, for the next `begin`

        self.allowed = re.compile(allowed)
        # Playwright wants patterns of what to stop. It asks about first requests, not about the
        # redirects that follow: those to other servers fail by `resolver_rules`.
        self.refused = re.compile(f"^(?!{allowed}|about:blank|data:|blob:)")
        sockets = allowed.replace("https:", "wss:").replace("http:", "ws:")
        self.refused_sockets = re.compile(f"^(?!{sockets})")

        self.context = None
        self.page = None  # the current tab
        self.elements = {}  # number -> tree.Element of the last observation
        self.sessions = {}  # page -> its session of the debugging protocol
        self.crashed = False
        self.requested = 0  # navigations that were requested
        self.destination = ""  # the address of the last one, after redirects
        self.loaded = 0  # the value of `requested` when the last page was loaded

    # -- the context and its tabs --

    def begin(self, headers: dict, addresses: Sequence[str], fresh: bool = False) -> None:
        """Open these addresses, a tab each, in a window without a history.

        headers: sent with every request. fresh: make a new context; otherwise the old one is used
        again, which takes a quarter of the time.
        """
        reuse = self.context and not fresh and not self.crashed
        old_pages = list(self.context.pages) if reuse else []
        if not old_pages:
            self._new_context()
        self.crashed = False
        if self.storage is None:
            self.context.clear_cookies()
        self.context.set_extra_http_headers(headers)
        for address in addresses:  # in new tabs, because the old ones have a history
            self.page = self.context.new_page()
            self._open(address)
        for page in old_pages:
            page.close()
        self.page = self.context.pages[0]

    def _open(self, address):
        """Open an address in the current tab. A redirect to another server is an EnvError."""
        from playwright.sync_api import Error

        self.destination = address
        try:
            self.page.goto(address, wait_until="load")
        except Error as error:
            if not self._left_the_sites():
                raise
            raise EnvError(
                f"browser: {address} leads to {self.destination}, which is none of the sites"
            ) from error

    def _left_the_sites(self):
        """Whether the last navigation was to another server, where nothing is requested."""
        return not self.allowed.match(self.destination)

    def _new_context(self):
        with suppress(Exception):  # the browser of the old context may be gone, and the context too
            self.close()
        self.context = self.browser.context(
            viewport={"width": self.width, "height": self.height},
            accept_downloads=False,
            storage_state=self.storage,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(1000 * JOB_TIMEOUT / 2)
        self.context.route(self.refused, lambda route: route.abort("blockedbyclient"))
        self.context.route_web_socket(self.refused_sockets, lambda socket: socket.close())
        self.context.add_init_script(PROBE)
        self.context.on("page", self._on_page)

    def _on_page(self, page):
        """A tab was opened, by us or by a link: it becomes the current one."""
        page.on("crash", self._on_crash)
        page.on("load", self._on_load)
        page.on("request", self._on_request)
        page.on("requestfailed", self._on_request_failed)
        page.on("close", lambda closed: self.sessions.pop(closed, None))
        self.page = page

    def _on_crash(self, _):
        self.crashed = True

    def _on_load(self, _):
        self.loaded = self.requested

    def _on_request(self, request):
        if self._is_navigation(request):
            self.requested += 1
            self.destination = request.url

    def _on_request_failed(self, request):
        if self._is_navigation(request):
            self.loaded = self.requested

    def _is_navigation(self, request):
        """Whether the request is for a tab's page, not for a part of one."""
        try:
            return request.is_navigation_request() and request.frame.parent_frame is None
        except Exception:  # the frame is not there yet, or no more
            return False

    def close(self) -> None:
        """Close all tabs."""
        if self.context:
            try:
                self.context.close()
            finally:
                self.context = None
                self.page = None
                self.elements = {}
                self.sessions = {}

    def _cdp(self, method, **parameters):
        """Call the debugging protocol for the current tab."""
        if self.crashed:
            raise EnvError("browser: the page crashed")
        if self.page not in self.sessions:
            self.sessions[self.page] = self.context.new_cdp_session(self.page)
        return self.sessions[self.page].send(method, parameters)

    # -- what the agent and the evaluators see --

    def observe(self) -> tuple[str, str]:
        """-> (the open tabs and the current page's tree, as WebArena writes them; the address)"""
        for attempt in range(3):
            try:
                nodes = self._cdp("Accessibility.getFullAXTree")["nodes"]
                snapshot = self._cdp("DOMSnapshot.captureSnapshot", computedStyles=[])
                titles = [(page.title(), page is self.page) for page in self.context.pages]
                break
            except EnvError:
                raise
            except Exception:  # the page was on its way to another one
                if attempt == 2:
                    raise
                time.sleep(0.2)
        boxes = tree.rectangles(snapshot, self.width, self.height)
        text, self.elements = tree.render(nodes, boxes)
        tabs = []
        for index, (title, is_current) in enumerate(titles):
            mark = " (current)" if is_current else ""
            tabs.append(f"Tab {index}{mark}: {title}")
        return " | ".join(tabs) + "\n\n" + text, self.page.url

    def look(self, address: str, locator: str, prepare: Sequence[str] = ()) -> str:
        """What an evaluator reads of the current page (address "last") or of another page.

        locator: a JavaScript expression, which gives "" where it fails; "" stands for all HTML.
        prepare: expressions to run first.
        """
        is_last = address == "last"
        before = self.page
        page = before if is_last else self.context.new_page()
        try:
            if not is_last:
                page.goto(address, wait_until="load")
            for expression in prepare:
                self._evaluate(page, f"() => {expression}")
            if not locator.strip():
                return page.content()
            found = self._evaluate(page, f"() => {locator}")
            return "" if found is None else str(found)  # the number 0 is "0"
        finally:
            if not is_last:
                page.close()
                self.page = before

    def _evaluate(self, page, code):
        """Run JavaScript. A script's own error gives None, as in WebArena's code."""
        from playwright.sync_api import Error

        try:
            return page.evaluate(code)
        except Error as error:
            self._raise_if_lost(error)
            return None

    def _raise_if_lost(self, error):
        """Raise EnvError if the error means that the page, the browser or the site is gone."""
        from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

        chromium = self.browser.chromium
        is_gone = self.crashed or self.page.is_closed()
        is_gone = is_gone or not chromium or not chromium.is_connected()
        is_late = isinstance(error, PlaywrightTimeoutError)
        is_unanswered = any(f"net::ERR_{reason}" in str(error) for reason in UNANSWERED)
        if is_gone or is_late or is_unanswered:
            raise EnvError(f"browser: {_one_line(error)}") from error

    # -- waiting for navigations --

    def _before_action(self):
        """Forget navigations that are not loaded by now: nobody waits for them again."""
        self.loaded = self.requested

    def _after_action(self, navigates=False):
        """Wait until a navigation that the last action began is over.

        navigates: the action has certainly begun one. Playwright's `wait_for_load_state` would not
        do: it would still see the old page.
        """
        start = time.monotonic()
        before = self.loaded
        expected = navigates
        if not expected and self.requested == before:
            # None means that the script failed, because the page is being left.
            expected = self._evaluate(self.page, "() => !!window.__leaving") is not False
        patience = JOB_TIMEOUT / 10 if expected else self.grace

        while not self.crashed:
            seconds = time.monotonic() - start
            if self.requested > before:  # a navigation has begun
                waiting = self.requested > self.loaded
            else:
                waiting = seconds < patience
            if not waiting or seconds > JOB_TIMEOUT / 2 or self.page.is_closed():
                return
            self.page.wait_for_timeout(POLL_MS)
        raise EnvError("browser: the page crashed")

    # -- actions on elements --

    def _missing(self, number):
        """What to tell the agent if there is no such element, else ""."""
        if number in self.elements:
            return ""
        return f"There is no element [{number}] on this page."

    def _middle(self, element):
        left, top, right, bottom = element.box
        return (left + right) / 2, (top + bottom) / 2

    def click(self, number: int) -> str:
        """Click an element; choose an option of a list."""
        problem = self._missing(number)
        if problem:
            return problem
        element = self.elements[number]
        self._before_action()
        if element.role == "option":
            resolved = self._cdp("DOM.resolveNode", backendNodeId=element.node)
            self._cdp(
                "Runtime.callFunctionOn", objectId=resolved["object"]["objectId"],
                functionDeclaration=CHOOSE_OPTION,
            )
        elif element.role == "combobox":
            # A click would open the list outside the page, where it is only in the way.
            self._cdp("DOM.focus", backendNodeId=element.node)
        else:
            self.page.mouse.click(*self._middle(element))
        self._after_action()
        return ""

    def hover(self, number: int) -> str:
        """Move the mouse over an element."""
        problem = self._missing(number)
        if not problem:
            self.page.mouse.move(*self._middle(self.elements[number]))
        return problem

    def type(self, number: int, text: str, enter: bool) -> str:
        """Write into a field; enter: press Enter afterwards."""
        problem = self._missing(number)
        if problem:
            return problem
        element = self.elements[number]
        if not element.editable:
            return f"Element [{number}] takes no text."
        self._before_action()
        keyboard = self.page.keyboard
        self.page.mouse.click(*self._middle(element))
        if not self.append:
            keyboard.press("Control+a")
            keyboard.press("Delete")
        text = " ".join(text.splitlines())
        if len(text) < 200:
            keyboard.type(text)
        else:
            keyboard.insert_text(text)
        if enter:
            keyboard.press("Enter")
        self._after_action()
        return ""

    def press(self, keys: str) -> str:
        """Press a key or a combination such as "ctrl+a"."""
        from playwright.sync_api import Error

        parts = [KEYS.get(part.strip().lower(), part.strip()) for part in keys.split("+")]
        self._before_action()
        try:
            self.page.keyboard.press("+".join(parts))
        except Error as error:
            self._raise_if_lost(error)
            for part in parts:  # the keys before the unknown one are still down
                with suppress(Error):
                    self.page.keyboard.up(part)
            return f"There is no key '{keys[:40]}'."
        self._after_action()
        return ""

    def scroll(self, direction: str) -> str:
        """Scroll by the height of the window; direction: "up" or "down"."""
        pixels = self.height if direction == "down" else -self.height
        self.page.evaluate(f"() => window.scrollBy({{top: {pixels}, behavior: 'instant'}})")
        return ""

    # -- actions on tabs and addresses --

    def new_tab(self) -> str:
        """Open an empty tab and make it the current one."""
        if len(self.context.pages) >= MAX_TABS:
            return f"There are {MAX_TABS} tabs open already."
        self.page = self.context.new_page()
        return ""

    def tab_focus(self, index: int) -> str:
        """Make another tab the current one; the first has index 0."""
        if index >= len(self.context.pages):
            return f"There is no tab {index}."
        self.page = self.context.pages[index]
        self.page.bring_to_front()
        return ""

    def close_tab(self) -> str:
        """Close the current tab; the one before it becomes the current one."""
        pages = self.context.pages
        index = pages.index(self.page)
        if len(pages) == 1:
            self.context.new_page()
        pages[index].close()
        self.page = self.context.pages[max(0, index - 1)]
        return ""

    def goto(self, address: str) -> str:
        """Open an address in the current tab."""
        from playwright.sync_api import Error

        if not self.allowed.match(address):
            return "That address is not part of these sites."
        self._before_action()
        self.destination = address
        try:
            self._goto(address)
        except Error as error:
            if self._left_the_sites():
                problem = "That address leads to a page that is not part of these sites."
            else:
                self._raise_if_lost(error)
                problem = "That address could not be opened."
            self._await_error_page()
            return problem
        return ""

    def _goto(self, address):
        """Open an address. The error page of the navigation before may arrive late and interrupt
        this one, which is then tried again."""
        from playwright.sync_api import Error

        for pause in (0.1, 0.3, 1.0, None):
            try:
                self.page.goto(address, wait_until="load")
                return
            except Error as error:
                if pause is None or INTERRUPTED not in str(error):
                    raise
            self.page.wait_for_timeout(1000 * pause)

    def _await_error_page(self):
        """Wait for the error page that Chromium shows a moment after a failed navigation."""
        from playwright.sync_api import Error

        with suppress(Error):  # some failures, such as a download, do not change the page
            self.page.wait_for_url("chrome-error:**", timeout=2000)

    def go_back(self) -> str:
        """Go to the page before this one in the tab's history."""
        return "" if self._travel(-1) else "There is no page to go back to."

    def go_forward(self) -> str:
        """Go to the page after this one in the tab's history."""
        return "" if self._travel(1) else "There is no page to go forward to."

    def _travel(self, by):
        """Move in the tab's history; False if there is no such page."""
        history = self._cdp("Page.getNavigationHistory")
        entries = history["entries"]
        index = history["currentIndex"]
        target = index + by
        if not 0 <= target < len(entries):
            return False
        if by < 0 and entries[target]["url"] == "about:blank":
            return False
        self._before_action()
        self._cdp("Page.navigateToHistoryEntry", entryId=entries[target]["id"])
        here = entries[index]["url"].partition("#")[0]
        there = entries[target]["url"].partition("#")[0]
        self._after_action(navigates=here != there)
        return True
