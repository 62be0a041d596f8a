"""SearchQA: answer a question by searching, in the way of Search-R1 (Jin et al., 2025, arXiv 2503.09516) and AgentGym.

A reply holds <search> words </search>, which brings articles between <information> and </information>, or <answer> ... </answer>,
which ends the episode: reward 1 if it is one of the question's answers by Search-R1's exact match, else 0.

Out of the box questions and articles are of invented worlds (almanac.py), retrieved by BM25: item n is question n % 2000 of world
n // 2000; training items are of worlds 0 to 3, held-out ones of worlds 100 and 101, which ask in other words. With
`questions=FILE.jsonl[,...]` item n is line n of the files ({"question", "golden_answers"}: Search-R1's); they need `corpus=FILE.jsonl`
({"id", "contents": "Title\\ntext"}) or `retriever=http://host:port`, a server that speaks Search-R1's POST /retrieve.
"""

import functools
import json
import re
import string
import threading

import requests

from envs import Env, EnvError, Step
from worlds import almanac

MAX_QUERY = 500  # characters
TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def normalise(answer: str) -> str:
    """An answer as exact match compares it: lower case, without punctuation, articles and superfluous space.

    >>> normalise(" The  Silver-Harbour! ")
    'silverharbour'
    """
    answer = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


class BM25:
    """An index of articles in this process: (title, text) pairs -> the best for a query. Any threads may ask."""

    def __init__(self, articles: list[tuple[str, str]]):
        import bm25s  # an extra
        self.articles, self.index = articles, bm25s.BM25(backend="numpy")
        # a title counts as if it stood in the text three times: an article is found by it
        self.index.index([self._words(f"{title} {title} {title} {text}") for title, text in articles], show_progress=False)
        self.known = set(self.index.vocab_dict)

    def _words(self, text):
        return re.findall(r"\w+", text.lower())

    def search(self, query: str, k: int) -> list[tuple[str, str]]:
        """The k best articles or fewer, the best first; none without a word in common."""
        words = [w for w in self._words(query) if w in self.known]
        if not words:
            return []
        scores = self.index.get_scores(words)
        return [self.articles[i] for i in (-scores).argsort(kind="stable")[:k] if scores[i] > 0]


class Retriever:
    """Search-R1's retrieval server at `url`. What is wrong with it or its reply raises EnvError."""

    def __init__(self, url: str, timeout: float = 30.0):
        self.url, self.timeout, self.session = url.rstrip("/") + "/retrieve", timeout, requests.Session()

    def search(self, query: str, k: int) -> list[tuple[str, str]]:
        """As `BM25.search`."""
        try:
            response = self.session.post(self.url, json={"queries": [query], "topk": k, "return_scores": True}, timeout=self.timeout)
            response.raise_for_status()
            documents = [entry["document"]["contents"] for entry in response.json()["result"][0]]
            return [split_contents(text) for text in documents]
        except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as e:
            raise EnvError(f"{self.url}: {type(e).__name__}: {str(e)[:200]}") from e


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of a document in Search-R1's form: the title in quotation marks, a line break, the text."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()


def _lines(path, **kinds):
    """The values of these keys in each line of a JSONL file; what has another type is a ValueError, as is a file without a line."""
    try:
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
        for number, row in enumerate(rows, 1):
            for key, kind in kinds.items():
                value = row[key]
                if not isinstance(value, kind) or isinstance(value, list) and not (value and all(isinstance(v, str) for v in value)):
                    raise TypeError(f"'{key}' of line {number} is {value!r:.40}")
        if not rows:
            raise ValueError("it is empty")
        return [tuple(row[key] for key in kinds) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"searchqa: cannot read {path}: {type(e).__name__}: {e}") from e


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def _index(source):
    """The index of a world's number or of a corpus file; shared by all episodes of the process."""
    if isinstance(source, int):
        return BM25(almanac.almanac(source).articles)
    return BM25([split_contents(contents) for contents, in _lines(source, contents=str)])


class SearchQA(Env):
    """One question at a time; any number of these, in any threads, share the indices.
    corpus, questions: JSONL files (several files of questions separated by commas); retriever: a server's address; topk: articles a
    search brings. Raises ValueError for a file that cannot be read, ModuleNotFoundError without the package bm25s."""

    whole_reply = True
    stop = ("</search>", "</answer>")
    prompt = (
        "Answer a question. You can look things up: write <search> words </search>, and what is found comes back between <information> "
        "and </information>. Search as often as you need. Think first, between <think> and </think>. When you know the answer, "
        "write <answer> a few words </answer>, nothing but the answer."
    )
    hint = ("That was neither a search nor an answer. Write one <search> words </search> to look something up, or one "
            "<answer> a few words </answer> to answer.")

    instant = True

    def __init__(self, corpus: str = "", questions: str = "", retriever: str = "", topk: int = 3):
        if not isinstance(topk, int) or topk < 1:
            raise ValueError(f"searchqa: topk must be a number from 1 on, not {topk!r}")
        if questions and not (corpus or retriever):
            raise ValueError("searchqa: questions of your own need corpus=FILE.jsonl or retriever=http://host:port")
        self.topk, self.corpus, self.own, self.last = topk, corpus, None, None
        if questions:
            self.own = [row for path in questions.split(",") for row in _lines(path, question=str, golden_answers=(str, list))]
        self.retriever = Retriever(retriever) if retriever else None
        self.instant = not retriever
        if corpus:
            self._index(corpus)
        elif not retriever:
            import bm25s  # noqa: F401 (says at once that it is missing)

    def _index(self, source):
        with _LOCK:
            return _index(source)

    def reset(self, item: int) -> str:
        """Starts item `item`, whose question it returns. Raises ValueError for an item that does not exist."""
        if not isinstance(item, int) or isinstance(item, bool) or item < 0 or (self.own is not None and item >= len(self.own)):
            raise ValueError(f"searchqa has items 0 to {'...' if self.own is None else len(self.own) - 1}, not {item!r}")
        if self.own is not None:
            question, answers = self.own[item]
            self.articles = self.retriever or self._index(self.corpus)
        else:
            world, number = divmod(item, almanac.QUESTIONS)
            self.question = almanac.almanac(world).questions[number]
            question, answers = self.question.text, self.question.answers
            self.articles = self.retriever or self._index(self.corpus or world)
        self.answers, self.last = {normalise(a) for a in ([answers] if isinstance(answers, str) else answers)}, Step("")
        return f"Question: {question}"

    def step(self, action: str) -> Step:
        """Takes a reply with one search or one answer; any other is answered with a hint, valid=False. After the end the last step
        comes again with reward 0. Raises EnvError before the first reset and when a retrieval server fails."""
        if self.last is None:
            raise EnvError("searchqa: step before reset")
        if self.last.done:
            return Step(self.last.observation, 0.0, self.last.score, True, self.last.success)
        action = re.sub(r"<think>.*?</think>", "", action, flags=re.DOTALL)
        found = TAGS.findall(action.encode("utf-8", "replace").decode("utf-8"))
        if len(found) != 1 or not found[0][1].strip():
            self.last = Step(self.hint, valid=False)
        elif found[0][0] == "answer":
            right = normalise(found[0][1]) in self.answers
            self.last = Step("Right." if right else "Wrong.", float(right), float(right), True, right)
        else:
            articles = self.articles.search(found[0][1].strip()[:MAX_QUERY], self.topk)
            text = "\n".join(f"Doc {i}(Title: {title}) {text}" for i, (title, text) in enumerate(articles, 1))
            self.last = Step(f"<information>{text or 'Nothing was found.'}</information>")
        return self.last
