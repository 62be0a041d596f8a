"""WebArena's evaluators that need no judge: the "eval" part of a task -> 1.0 or 0.0.

string_match: exact_match, must_include, and as much of fuzzy_match as needs no language model: the
reference "N/A" must be the whole answer; any other reference counts if the answer contains the same
words (lower case, without punctuation), which is stricter than WebArena's judge.
url_match: "GOLD in PRED".
program_html: JavaScript expressions on the last page or another one, and the helper functions that
WebArena's task files name.
"""

import html
import re
from collections import defaultdict
from collections.abc import Callable
from urllib.parse import parse_qs, urlparse

import requests

from envs import EnvError
from worlds.wire import WireSession

API_TIMEOUT = 20  # seconds


# ---- the agent's answer ----


def normalize(answer: str) -> str:
    """Lower case, without spaces around it and without one pair of quotation marks.

    >>> normalize(" 'Blue Kettle' ")
    'blue kettle'
    """
    answer = answer.strip()
    for mark in "'\"":
        if len(answer) > 1 and answer[0] == mark == answer[-1]:
            answer = answer[1:-1]
            break
    return answer.lower()


# What NLTK's word tokenizer splits at: spaces, most punctuation, a comma or colon that no digit
# follows, the full stop at the end, and an apostrophe at the edge of a word.
BETWEEN_WORDS = re.compile(r"""[\s;@#$%&?!()\[\]{}<>"]|[:,](?!\d)|\.(?=[\])}>"'\s]*$)|\.\.+|--"""
                           r"""|'(?!\w)|(?<!\w)'""")


def includes(reference: str, text: str, whole_word: bool = False) -> bool:
    """Whether `text` contains the reference.

    whole_word: a reference of one character must be a word of its own, as NLTK's `word_tokenize`
    splits them: "0.5", "1,234" and "3/4" are one word each.

    >>> includes("Blue", "the blue one"), includes("0", "10 of them")
    (True, True)
    >>> [includes("0", text, whole_word=True) for text in ("10 of them", "0.5 stars", "0 of them")]
    [False, False, True]
    """
    reference = normalize(reference)
    text = normalize(text)
    if whole_word and len(reference) == 1:
        return reference in BETWEEN_WORDS.split(text)
    return reference in text


def _words(text):
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def _fuzzy_match(references, answer):
    if references == "N/A":
        return normalize(answer) == "n/a"
    if isinstance(references, str):
        references = [references]
    return all(_words(text) in _words(answer) for text in references)


def string_match(references: dict, answer: str) -> bool:
    """Whether the answer meets all references. Raises ValueError for an unknown kind.

    references: {"exact_match": text, "must_include": [texts], "fuzzy_match": [texts] or "N/A"}.
    """
    for kind, wanted in references.items():
        if kind == "exact_match":
            right = normalize(wanted) == normalize(answer)
        elif kind == "must_include":
            whole_word = len(wanted) == 1
            right = all(includes(text, answer, whole_word) for text in wanted)
        elif kind == "fuzzy_match":
            right = _fuzzy_match(wanted, answer)
        else:
            raise ValueError(f"webarena: unknown string_match '{kind}'")
        if not right:
            return False
    return True


def needs_judge(task: dict) -> bool:
    """Whether WebArena itself asks a language model about the answer."""
    references = task["eval"].get("reference_answers") or {}
    return references.get("fuzzy_match", "N/A") != "N/A"


# ---- the address of the last page ----


def _split_address(address):
    """-> (host and path, the query's values by name)."""
    parsed = urlparse(address.rstrip("/"))
    return parsed.netloc + parsed.path, parse_qs(parsed.query)


def url_match(reference: str, url: str) -> bool:
    """Whether the address is one of the references ("a |OR| b").

    Its host and path must contain those of one reference. Of each parameter that any reference
    names it must have one of the named values.

    >>> url_match("http://a/b?x=1 |OR| http://a/c", "http://a/c/d?x=1&y=2")
    True
    """
    path, query = _split_address(url)
    path_found = False
    wanted = defaultdict(set)  # parameter -> the values that count
    for one in reference.split(" |OR| "):
        one_path, one_query = _split_address(one)
        path_found |= one_path in path
        for name, values in one_query.items():
            wanted[name].update(values)
    query_found = all(values & set(query.get(name, ())) for name, values in wanted.items())
    return path_found and query_found


# ---- the helper functions that WebArena's files name ----


def reddit_get_post_url(url: str) -> str:
    """The short address of the forum post that `url` shows; other addresses as they are."""
    parsed = urlparse(url)
    parts = parsed.path.split("/")
    if len(parts) < 4 or parts[1] != "f":
        return url
    return f"{parsed.scheme}://{parsed.netloc}/f/{parts[2]}/{parts[3]}/"


MEMBER_ROLE = """(() => {
const names = [...document.querySelectorAll(
    "td[data-label='Account'] span.gl-avatar-labeled-sublabel")];
const i = names.findIndex(e => e.outerText === '@' + %s);
return document.querySelectorAll("td.col-max-role span")[i].outerText; })()"""


def _shop_api(shop, path, **parameters):
    """Ask Magento's REST interface, with the password of WebArena's own shop. Raises EnvError."""
    login = {"username": "admin", "password": "admin1234"}
    url = f"{shop}/rest/V1/{path}"
    try:
        token = WireSession().post(
            f"{shop}/rest/default/V1/integration/admin/token", timeout=API_TIMEOUT, json=login
        ).json()
        headers = {"Authorization": f"Bearer {token}"}
        reply = WireSession().get(url, params=parameters, headers=headers, timeout=API_TIMEOUT)
        reply.raise_for_status()
        return reply.json()
    except (requests.RequestException, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise EnvError(f"webarena: {url}: {reason}") from error


def _latest_order_url(shop):
    newest_first = {
        "searchCriteria[sortOrders][0][field]": "created_at",
        "searchCriteria[sortOrders][0][direction]": "DESC",
        "searchCriteria[pageSize]": "1",
    }
    order = _shop_api(shop, "orders", **newest_first)["items"][0]
    return f"{shop}/sales/order/view/order_id/{int(order['increment_id'])}/"


def _latest_review(shop, sku):
    """The newest review of a product, or None."""
    reviews = _shop_api(shop, f"products/{sku}/reviews")
    return reviews[-1] if reviews else None


def _parse_call(code):
    """name('argument', ...) -> (name, the arguments' texts); ("", []) for anything else."""
    match = re.fullmatch(r"(\w+)\((.*)\)", code.strip())
    if not match:
        return "", []
    found = re.findall(r"'([^']*)'|\"([^\"]*)\"|(__\w+__)", match[2])
    return match[1], [single or double or name for single, double, name in found]


def call_helper(code: str, shop: str, last: str, look: Callable) -> str:
    """Call a helper function as the task files write it: name('argument', ...).

    The function is looked up here; `code` is never run. last: the address of the last page.
    Raises ValueError for an unknown function or a wrong number of arguments.
    """
    name, arguments = _parse_call(code)
    signature = (name, len(arguments))
    if signature == ("reddit_get_post_url", 1):
        return reddit_get_post_url(arguments[0].replace("__last_url__", last))
    if signature == ("gitlab_get_project_memeber_role", 2):
        return look("last", MEMBER_ROLE % repr(arguments[1]))
    if signature == ("shopping_get_latest_order_url", 0):
        return _latest_order_url(shop)
    if signature == ("shopping_get_sku_latest_review_author", 1):
        review = _latest_review(shop, arguments[0])
        return review["nickname"] if review else ""
    if signature == ("shopping_get_sku_latest_review_rating", 1):
        review = _latest_review(shop, arguments[0])
        return str(review["ratings"][0]["percent"]) if review else ""
    raise ValueError(f"webarena: unknown helper '{code}'")


# ---- what pages hold ----


def _target_text(target, url, look, shop):
    """The text that a target of program_html is about."""
    address = target["url"]
    if address.startswith("func:"):
        address = call_helper(address.removeprefix("func:"), shop, url, look)

    locator = target["locator"]
    if not locator.startswith("func:"):
        return look(address, locator, tuple(target.get("prep_actions", ())))

    def look_at_target(_, code):  # the helper means the target's page by "last"
        return look(address, code)

    return call_helper(locator.removeprefix("func:"), shop, url, look_at_target)


def _holds(text, wanted):
    """Whether a text meets a target's "required_contents"."""
    if "exact_match" in wanted:
        return normalize(wanted["exact_match"]) == normalize(text)
    if "must_include" in wanted:
        return all(
            any(includes(option, text) for option in content.split(" |OR| "))
            for content in wanted["must_include"]
        )
    raise ValueError(f"webarena: unknown required_contents {list(wanted)}")


def program_html(targets: list, url: str, look: Callable, shop: str = "") -> bool:
    """Whether all targets are met.

    targets: a task's program_html. url: of the last page. shop: the address of the shop, for
    the helper functions. look(address, locator, prepare) -> text: see `browser.Window.look`.
    """
    for target in targets:
        text = html.unescape(_target_text(target, url, look, shop))
        if not _holds(text, target["required_contents"]):
            return False
    return True


# ---- a task ----


def score(task: dict, answer: str, url: str, look: Callable, shop: str = "") -> float:
    """1.0 if every evaluator of the task is satisfied, else 0.0.

    answer: what the agent said. url, look, shop: see `program_html`.
    Raises ValueError for an unknown evaluator.
    """
    check = task["eval"]
    evaluators = {
        "string_match": lambda: string_match(check["reference_answers"], answer),
        "url_match": lambda: url_match(check["reference_url"], url),
        "program_html": lambda: program_html(check["program_html"], url, look, shop),
    }
    unknown = set(check["eval_types"]) - set(evaluators)
    if unknown:
        raise ValueError(f"webarena: unknown evaluator '{min(unknown)}'")
    return float(all(evaluators[kind]() for kind in check["eval_types"]))
