"""SearchQA: questions that can be answered by searching only, exact match, tags, and a retrieval server with its faults."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envs import EnvError, items, make_env, split_item
from rollout import EnvPool, rollout
from worlds.almanac import HELD_OUT, QUESTIONS, almanac
from worlds.searchqa import BM25, normalise, split_contents

pytest.importorskip("bm25s")


def test_a_world_is_the_same_every_time_and_unlike_others():
    again = almanac.__globals__["_almanac"].__wrapped__(3)
    assert again.articles == almanac(3).articles and again.questions == almanac(3).questions
    assert almanac(3).articles != almanac(4).articles
    assert 9000 < len(almanac(3).articles) < 11000 and len({title for title, _ in almanac(3).articles}) == len(almanac(3).articles)
    sources = [q.source for q in almanac(3).questions]
    assert sources.count("comparison") <= 0.2 * len(sources)


@pytest.mark.parametrize("split", ["train", "test"])
def test_following_titles_leads_to_the_answer(split):
    seen = 0
    for item in items("searchqa", split)[::20 if split == "train" else 1]:
        world, number = divmod(split_item(item)[1], QUESTIONS)
        index, q, read = make_env("searchqa")._index(world), almanac(world).questions[number], ""
        for title in q.titles:
            alias = almanac(world).facts[title].get("alias", "no pen name")
            name = alias if alias in q.text else title
            assert name in q.text or name in read  # it can be known by now
            read += dict(index.search(name, 3))[title]
        assert any(answer in read for answer in q.answers)
        seen += len(q.titles) > 1
    assert seen > 50


def test_held_out_questions_are_of_other_worlds_in_other_words():
    train = {split_item(i)[1] // QUESTIONS for i in items("searchqa", "train")}
    test = {split_item(i)[1] // QUESTIONS for i in items("searchqa", "test")}
    assert max(train) < HELD_OUT <= min(test) and len(items("searchqa", "test")) >= 200
    from worlds.almanac import ASKS, COMPARE, PHRASES
    for trained, held_out in [*ASKS.values(), *PHRASES.values(), COMPARE]:
        assert not set(trained) & set(held_out)


def test_no_item_of_several_hops_is_answered_by_searching_for_the_question():
    for item in items("searchqa", "test"):
        world, number = divmod(split_item(item)[1], QUESTIONS)
        q = almanac(world).questions[number]
        if q.source in ("2_hops", "3_hops"):
            text = str(make_env("searchqa")._index(world).search(q.text, 3))
            assert not any(answer in text for answer in q.answers)


@pytest.mark.parametrize("said, same", [("The Silver Harbour", "silver harbour"), (" A  b-c. ", "bc"), ("an apple, the pear", "apple pear"),
                                        ("Łódź!", "łódź"), ("theatre", "theatre"), ("", "")])
def test_answers_are_compared_as_in_search_r1(said, same):
    assert normalise(said) == same


def test_an_episode():
    env = make_env("searchqa")
    q = next(q for q in almanac(0).questions if q.source == "1_hop")
    item = almanac(0).questions.index(q)
    assert env.reset(item) == f"Question: {q.text}"
    step = env.step(f"<think>who</think> <search> {q.titles[0]} </search>")
    assert step.observation.startswith(f"<information>Doc 1(Title: {q.titles[0]}) ") and step.valid and not step.done
    assert step.observation.endswith("</information>") and step.observation.count("\nDoc ") == 2
    for bad in ("", "I do not know", "<search> </search>", "<answer>a</answer><answer>b</answer>", "<search>a</answer>", "<answer>cut off",
                "<think><answer>x</answer></think>", "\ud800", "<search>a</search> <answer>b</answer>"):
        step = env.step(bad)
        assert not step.valid and not step.done and step.observation == env.hint
    step = env.step(f"<answer> {q.answers[0].upper()}! </answer>")
    assert step.done and step.success and step.reward == step.score == 1
    assert env.step("<answer>x</answer>").reward == 0 and env.last.done
    env.reset(item)
    assert env.step("<search>zzzz</search>").observation == "<information>Nothing was found.</information>"
    step = env.step("<answer>\nnobody\n</answer>")
    assert step.done and not step.success and step.reward == 0
    for bad in (-1, "1", True):
        with pytest.raises(ValueError):
            env.reset(bad)
    with pytest.raises(EnvError):
        make_env("searchqa").step("<search>a</search>")


def test_threads_find_what_one_finds():
    env, titles = make_env("searchqa"), [title for title, _ in almanac(0).articles[::50]]
    index, found = env._index(0), [None] * len(almanac(0).articles[::50])
    alone = [index.search(title, 3) for title in titles]

    def part(at):
        for i in range(at, len(titles), 8):
            found[i] = index.search(titles[i], 3)
    threads = [threading.Thread(target=part, args=(at,)) for at in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == alone


def test_questions_and_a_corpus_of_ones_own(tmp_path):
    rows = [{"id": str(i), "contents": f'"{t}"\n{x}'} for i, (t, x) in enumerate([("Ant", "Ants are small."), ("Bee", "Bees make honey.")])]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "Who makes honey?", "golden_answers": ["bees", "the bee"]}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "How big are ants?", "golden_answers": "small"}) + "\n")
    env = make_env("searchqa", corpus=str(tmp_path / "corpus.jsonl"), questions=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", topk=1)
    assert env.reset(0) == "Question: Who makes honey?"
    assert env.step("<search>honey</search>").observation == "<information>Doc 1(Title: Bee) Bees make honey.</information>"
    assert env.step("<answer>Bee</answer>").success
    env.reset(1)
    assert env.step("<answer>Small.</answer>").success
    with pytest.raises(ValueError, match="items 0 to 1"):
        env.reset(2)
    with pytest.raises(ValueError, match="need corpus"):
        make_env("searchqa", questions=f"{tmp_path}/a.jsonl")
    with pytest.raises(ValueError, match="cannot read"):
        make_env("searchqa", corpus=str(tmp_path / "none.jsonl"))
    for name, text in (("empty", ""), ("null", '{"question": "a", "golden_answers": null}'), ("none", '{"question": "a", "golden_answers": []}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="cannot read"):
            make_env("searchqa", corpus=str(tmp_path / "corpus.jsonl"), questions=str(tmp_path / name))
    with pytest.raises(ValueError, match="topk must be"):
        make_env("searchqa", topk="five")
    with pytest.raises(ValueError, match="takes no argument 'depth'"):
        make_env("searchqa", depth=2)


@contextmanager
def retrieval(answer):
    """A server that speaks Search-R1's protocol: answer(body) -> (status, bytes)"""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status, body = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass

        def log_message(self, *_):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_retrieval_server_is_asked_in_search_r1s_protocol():
    index, seen = BM25(almanac(0).articles), []

    def answer(path, body):
        seen.append((path, body))
        return 200, json.dumps({"result": [[{"document": {"id": "0", "contents": f'"{title}"\n{text}'}, "score": 1.0}
                                            for title, text in index.search(query, body["topk"])] for query in body["queries"]]}).encode()
    with retrieval(answer) as url:
        far, near = make_env("searchqa", retriever=url), make_env("searchqa")
        far.reset(5), near.reset(5)
        ask = f"<search>{almanac(0).questions[5].titles[0]}</search>"
        assert far.step(ask) == near.step(ask)
    assert seen == [("/retrieve", {"queries": [almanac(0).questions[5].titles[0]], "topk": 3, "return_scores": True})]
    assert split_contents('"A "b" c"\ntext\nmore') == ('A "b" c', "text\nmore")


@pytest.mark.parametrize("fault", ["500", "garbage", "other", "slow", "gone"])
def test_a_retrieval_server_that_fails_is_an_env_error(fault, tiny):
    def answer(path, body):
        if fault == "slow":
            time.sleep(3)
        return (500 if fault == "500" else 200), {"garbage": b"\xff{", "other": b'{"result": [[{"score": 1}]]}'}.get(fault, b"{}")

    class Asks:  # the tiny model may not search: the environment is driven as the rollout would
        pass
    with retrieval(answer) as url:
        url = "http://127.0.0.1:9" if fault == "gone" else url
        env = make_env("searchqa", retriever=url)
        env.reset(0)
        env.retriever.timeout = 1.0
        with pytest.raises(EnvError):
            env.step("<search>a</search>")
        from worlds import searchqa

        class Searching(searchqa.SearchQA):
            def step(self, action):
                return super().step("<search>Tavi</search>")

        def make(name):
            world = Searching(retriever=url)
            world.retriever.timeout = 1.0
            return world
        with EnvPool(make=make) as pool:
            (t,) = rollout(*tiny, pool, ["searchqa_0"], 2, max_tokens=4, retries=0)
    assert t.status == "env_error" and "/retrieve" in t.error and t.reward == 0
