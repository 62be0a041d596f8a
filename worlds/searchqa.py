"""SearchQA: answer a question by searching, as in Search-R1 (Jin et al., 2025, arXiv 2503.09516)
and AgentGym.

A reply contains either <search> words </search>, which is answered with articles between
<information> and </information>, or <answer> ... </answer>, which ends the episode. The reward is 1
if the answer equals one of the question's answers under Search-R1's exact match, else 0 (`compared`
has one exception). Of several tags in a reply the first one counts, as in AgentGym.

These things differ from AgentGym's server on purpose:

* A wrong answer ends the episode, as in Search-R1. AgentGym's says "try again", so that the reward
  of a long horizon pays for guessing: here a question is answered once.
* Tags between <think> and </think> do not count: thoughts are no actions. A reply ends with its
  first </search> or </answer>, as in Search-R1. If that comes before </think>, the tag counts.
* An empty tag gets a hint. AgentGym's server searches for the empty text.
* The first observation is the question alone; the instructions are in the prompt. AgentGym's
  observation repeats the instructions before the question.

Without arguments, questions and articles come from invented worlds (almanac.py) and BM25 retrieves
the articles. Item n is question n % 2000 of world n // 2000. Training items are of worlds 0 to 3;
held-out items are of worlds 100 and 101, which word their questions differently.

With `questions=FILE.jsonl[,...]` item n is line n of the files, in Search-R1's format:
{"question", "golden_answers"}. They need a source of articles:
* `corpus=FILE.jsonl`, lines of {"id", "contents": "Title\\ntext"}, or
* `retriever=http://host:port`, a server that implements Search-R1's POST /retrieve.
"""

import functools
import json
import re
import string
import threading

import requests

from envs import Env, EnvError, Step
from worlds import almanac, check_item
from worlds.wire import WireSession, read_body

MAX_QUERY = 500  # characters
TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
# A name: two or more capitalised words in a row ("of", "the" or "in" may stand between them), one
# capitalised word inside a sentence, or a number.
_WORD = r"(?:[A-Z][\w'-]*|\d+)"
NAME = re.compile(rf"(?!(?:Of|In|By|On|Since)\b){_WORD}(?: (?:(?:of|the|in) )?{_WORD})+"
                  rf"|(?<=[\w,] ){_WORD}|\d+")


def normalise(answer: str) -> str:
    """The form of an answer that exact match compares.

    It is in lower case, without punctuation, English articles and superfluous space.

    >>> normalise(" The  Silver-Harbour! ")
    'silverharbour'
    """
    answer = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def compared(answer: str) -> str:
    """The form in which answers are compared: normalised, or only in lower case where nothing would
    be left ("A" and "+", which "the" and "?" would then equal).

    >>> compared("The Bee"), compared("A "), compared("+")
    ('bee', 'a', '+')
    """
    return normalise(answer) or answer.strip().lower()


# ---- retrieval ----


class BM25:
    """A BM25 index of (title, text) pairs in this process. It may be searched from any thread.

    Raises ModuleNotFoundError without the package bm25s.
    """

    def __init__(self, articles: list[tuple[str, str]]):
        import bm25s  # an optional package

        self.articles = articles
        self.index = bm25s.BM25(backend="numpy")
        # The title is indexed three times, so that a search for a title finds its article.
        documents = [self._words(f"{title} {title} {title} {text}") for title, text in articles]
        self.index.index(documents, show_progress=False)
        self.known = set(self.index.vocab_dict)

    def _words(self, text):
        return re.findall(r"\w+", text.lower())

    def search(self, query: str, k: int) -> list[tuple[str, str]]:
        """At most k articles, the best first; only those that share a word with the query."""
        words = [word for word in self._words(query) if word in self.known]
        if not words:
            return []
        scores = self.index.get_scores(words)
        best = (-scores).argsort(kind="stable")[:k]
        return [self.articles[i] for i in best if scores[i] > 0]


class Retriever:
    """A client of Search-R1's retrieval server at `url`.

    url: the server's address, without "/retrieve". timeout: seconds for one request.
    """

    def __init__(self, url: str, timeout: float = 30.0):
        self.url = url.rstrip("/") + "/retrieve"
        self.timeout = timeout
        self.session = WireSession()

    def search(self, query: str, k: int) -> list[tuple[str, str]]:
        """As `BM25.search`. Raises EnvError if the server fails or its reply is malformed."""
        body = {"queries": [query], "topk": k, "return_scores": True}
        malformed = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
        try:
            with self.session.post(self.url, json=body, timeout=self.timeout,
                                   stream=True) as response:
                response.raise_for_status()
                data = read_body(response, self.url)
            results = json.loads(data)["result"][0]
            return [split_contents(entry["document"]["contents"]) for entry in results]
        except (requests.RequestException, *malformed) as e:
            raise EnvError(f"{self.url}: {type(e).__name__}: {str(e)[:200]}") from e


def split_contents(contents: str) -> tuple[str, str]:
    """Split a document of Search-R1 (quoted title, line break, text) -> (title, text)."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def _index(source):
    """The index of a world (its number) or of a corpus file (its path), shared by all episodes."""
    if isinstance(source, int):
        return BM25(almanac.almanac(source).articles)
    rows = _read_rows(source, contents=str)
    return BM25([split_contents(contents) for (contents,) in rows])


# ---- files ----


def _read_rows(path, **kinds):
    """Read a JSONL file -> for each line the tuple of its values under the keys of `kinds`.

    kinds: key -> the type, or tuple of types, that its value must have. A list must be a non-empty
    list of strings. Raises ValueError for any other value, and for a file without lines.
    """
    try:
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
        for number, row in enumerate(rows, 1):
            for key, kind in kinds.items():
                if not _is_of_kind(row[key], kind):
                    raise TypeError(f"'{key}' of line {number} is {row[key]!r:.40}")
        if not rows:
            raise ValueError("it is empty")
        return [tuple(row[key] for key in kinds) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"searchqa: cannot read {path}: {type(e).__name__}: {e}") from e


def _is_of_kind(value, kind):
    if not isinstance(value, kind):
        return False
    if isinstance(value, list):
        return len(value) > 0 and all(isinstance(element, str) for element in value)
    return True


# ---- the environment ----


class SearchQA(Env):
    """One question at a time. Any number of environments, in any threads, share the indices.

    corpus: a JSONL file of articles.
    questions: JSONL files of questions, separated by commas.
    retriever: the address of a retrieval server.
    topk: how many articles a search returns.
    names: what an agent that chooses is offered: to search for a name (`NAME`) of the question or
        of an article that was found, or to answer with a name of such an article that is not in the
        question. A question without a name may be searched for as it is. Without this argument: a
        search or an answer, whose words are free.

    Raises ValueError for wrong arguments or a file that cannot be read, ModuleNotFoundError without
    the package bm25s.
    """

    tiny = dict(horizon="2,3,4", horizon_steps=30, action_format="tags", steps=300)
    real = dict(horizon="5,8,10", eval_horizon=30, action_format="tags")

    instant = True
    whole_reply = True
    stop = ("</search>", "</answer>")
    prompt = (
        "Answer a question. You can look things up: write <search> words </search>, and what is "
        "found comes back between <information> and </information>. Search as often as you need. "
        "Think first, between <think> and </think>. When you know the answer, write <answer> a few "
        "words </answer>, nothing but the answer."
    )
    hint = (
        "That was neither a search nor an answer. Write one <search> words </search> to look "
        "something up, or one <answer> a few words </answer> to answer."
    )

    def __init__(self, corpus: str = "", questions: str = "", retriever: str = "", topk: int = 3,
                 names: bool = False):
        if not isinstance(topk, int) or topk < 1:
            raise ValueError(f"searchqa: topk must be a number from 1 on, not {topk!r}")
        if questions and not (corpus or retriever):
            raise ValueError(
                "searchqa: questions of your own need corpus=FILE.jsonl or "
                "retriever=http://host:port"
            )
        self.topk = topk
        self.names = names
        self.corpus = corpus
        self.last = None  # the last Step of this episode
        self.queries = set()  # the searches of this episode
        self.read = set()  # the titles of the articles that they have returned
        self.seen = {}  # a name in the question or these articles -> whether the question lacks it
        self.own = None  # (question, answers) of the user's own files, if there are any
        if questions:
            self.own = []
            for path in questions.split(","):
                self.own += _read_rows(path, question=str, golden_answers=(str, list))
        self.retriever = Retriever(retriever) if retriever else None
        self.instant = not retriever  # a server may be slow or hang
        if corpus:
            self._index(corpus)
        elif not retriever:
            # Fail now, not at the first reset, if the package is missing.
            import bm25s  # noqa: F401

    def _index(self, source):
        with _LOCK:
            return _index(source)

    def reset(self, item: int) -> str:
        """Start item `item` -> its question. Raises ItemError for an item that does not exist."""
        check_item("searchqa", item, None if self.own is None else len(self.own))
        if self.own is not None:
            question, answers = self.own[item]
            if isinstance(answers, str):
                answers = [answers]
            source = self.corpus
        else:
            world, number = divmod(item, almanac.QUESTIONS)
            self.question = almanac.almanac(world).questions[number]
            question = self.question.text
            answers = self.question.answers
            source = self.corpus or world
        self.articles = self.retriever or self._index(source)
        self.answers = {compared(answer) for answer in answers}
        self.last = Step("")
        self.queries = set()
        self.read = set()
        self.seen = dict.fromkeys(NAME.findall(question) or [question], False)
        return f"Question: {question}"

    @staticmethod
    def category(item: int) -> str:
        """The source of the item's question in the almanac: "2_hops"."""
        world, number = divmod(item, almanac.QUESTIONS)
        return almanac.almanac(world).questions[number].source

    def step(self, action: str) -> Step:
        """Take a reply with a search or an answer; of several the first one.

        A reply without either, or whose first one is empty, gets a hint and valid=False. After the
        end of the episode the last step is returned again with reward 0. Raises EnvError before the
        first reset and when the retrieval server fails.
        """
        if self.last is None:
            raise EnvError("searchqa: step before reset")
        if self.last.done:
            return Step(self.last.observation, 0.0, self.last.score, True, self.last.success)
        action = re.sub(r"<think>.*?</think>", "", action, flags=re.DOTALL)
        # Lone surrogates become "?", as they cannot be encoded.
        action = action.encode("utf-8", "replace").decode("utf-8")
        found = TAGS.search(action)
        if found is None or not found[2].strip():
            self.last = Step(self.hint, valid=False)
            return self.last
        tag, text = found.groups()
        self.last = self._answer(text) if tag == "answer" else self._search(text)
        return self.last

    def _answer(self, answer):
        right = compared(answer) in self.answers
        reward = float(right)
        return Step("Right." if right else "Wrong.", reward, reward, True, right)

    def _search(self, query):
        query = query.strip()[:MAX_QUERY]
        articles = self.articles.search(query, self.topk)
        self.queries.add(query)
        self.read.update(title for title, _ in articles)
        lines = [f"Doc {i}(Title: {title}) {text}" for i, (title, text) in enumerate(articles, 1)]
        for title, text in articles:
            for name in filter(None, (title, *NAME.findall(text))):
                self.seen.setdefault(name, True)
        text = "\n".join(lines) or "Nothing was found."
        return Step(f"<information>{text}</information>")

    def choices(self) -> tuple[list[str], list[str]]:
        """A search or an answer, whose words are free without `names`."""
        if self.names:
            found = [name for name, is_new in self.seen.items() if is_new]
            return [*(f"<search> {name} </search>" for name in self.seen),
                    *(f"<answer> {name} </answer>" for name in found)], []
        return [], ["<search>", "<answer>"]

    def state(self) -> str | None:
        """The titles of the articles that have been found so far."""
        return None if self.last is None else ", ".join(sorted(self.read))

    def expert(self) -> str | None:
        """The expert's next reply, with a thought that names its subject.

        It searches for those articles that lead to the answer and were not found yet, and answers.
        None: two searches do not find an article, or the question is one of the user's own.
        """
        if self.last is None or self.last.done or self.own is not None:
            return None
        for title, name in zip(self.question.titles, self.question.names):
            if title not in self.read:
                return self._search_for(name)
        answer = self.question.answers[0]
        return f"<think> {answer} </think>\n<answer> {answer} </answer>"

    def _search_for(self, name):
        # A person is often not found by a pen name, because titles count three times. The second
        # query uses the words of the sentence that gives the pen name.
        for query in (name, f"{name} also writes as {name}"):
            if query not in self.queries:
                return f"<think> {name} </think>\n<search> {query} </search>"
        return None
