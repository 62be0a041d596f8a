"""SearchQA: invented worlds, exact match, tags, files of one's own, and a retrieval server.

The questions can be answered by searching only. A retrieval server that fails is an EnvError.
"""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import serving

from envs import EnvError, env_options, items, make_env, split_item
from worlds.almanac import ASKS, COMPARE, HELD_OUT, PHRASES, QUESTIONS, almanac
from worlds.searchqa import BM25, SearchQA, split_contents

pytest.importorskip("bm25s")
ONE_HOP = next(n for n, question in enumerate(almanac(0).questions) if question.source == "1_hop")


def world_and_question(item):
    """The world and the question of an item: searchqa_2005 -> (1, question 5 of world 1)."""
    world, number = divmod(split_item(item)[1], QUESTIONS)
    return world, almanac(world).questions[number]


# ---- invented worlds ----


def test_a_world_is_the_same_every_time_and_unlike_others():
    world, again = almanac(3), almanac.__globals__["_almanac"].__wrapped__(3)  # uncached
    assert again is not world
    assert again.articles == world.articles and again.questions == world.questions
    assert world.articles != almanac(4).articles
    titles = {title for title, _ in world.articles}
    assert 9000 < len(world.articles) < 11000 and len(titles) == len(world.articles)
    comparisons = sum(question.source == "comparison" for question in world.questions)
    assert comparisons <= 0.2 * len(world.questions)


def test_held_out_questions_are_of_other_worlds_in_other_words():
    train, test = ({world_and_question(item)[0] for item in items("searchqa", split)}
                   for split in ("train", "test"))
    assert max(train) < HELD_OUT <= min(test) and len(items("searchqa", "test")) >= 200
    for trained, held_out in [*ASKS.values(), *PHRASES.values(), COMPARE]:
        assert not set(trained) & set(held_out)


def test_no_item_of_several_hops_is_answered_by_searching_for_the_question():
    questions = [world_and_question(item) for item in items("searchqa", "test")]
    searched = [pair for pair in questions if pair[1].source in ("2_hops", "3_hops")]
    assert len(searched) > 50
    for world, question in searched:
        text = str(make_env("searchqa")._index(world).search(question.text, 3))
        assert not any(answer in text for answer in question.answers)


# ---- episodes ----


def test_an_episode():
    env = make_env("searchqa")
    with pytest.raises(EnvError, match="before reset"):
        env.step("<search>a</search>")
    for bad in (-1, "1", True):
        with pytest.raises(ValueError, match="searchqa has items"):
            env.reset(bad)
    question = almanac(0).questions[ONE_HOP]
    title = question.titles[0]
    assert env.reset(ONE_HOP) == f"Question: {question.text}"
    step = env.step(f"<think>who</think> <search> {title} </search>")
    assert step.observation.startswith(f"<information>Doc 1(Title: {title}) ")
    assert step.observation.endswith("</information>") and step.observation.count("\nDoc ") == 2
    assert step.valid and not step.done
    for bad in ("", "I do not know", "<search> </search>", "<search> </search><answer>b</answer>",
                "<search>a</answer>", "<answer>cut off", "<think><answer>x</answer></think>",
                "\ud800"):
        step = env.step(bad)
        assert not step.valid and not step.done and step.observation == env.hint
    step = env.step(f"<answer> {question.answers[0].upper()}! </answer>")
    assert step.done and step.success and step.reward == step.score == 1
    assert env.step("<answer>x</answer>").reward == 0 and env.last.done


RIGHT = f"<answer>{almanac(0).questions[ONE_HOP].answers[0]}</answer>"
NOTHING = "<information>Nothing was found.</information>"


@pytest.mark.parametrize("reply, observation, done, success", [
    ("<search>zzzz</search>", NOTHING, False, False),
    (f"<search>zzzz</search> {RIGHT}", NOTHING, False, False),
    ("<answer>\nnobody\n</answer>", "", True, False),
    (f"<think><answer>x</answer></think>{RIGHT}<answer>b</answer>", "", True, True),
    (f"<answer>b</answer>{RIGHT}", "", True, False)])
def test_the_first_tag_of_a_reply_counts(reply, observation, done, success):
    env = make_env("searchqa")
    env.reset(ONE_HOP)
    step = env.step(reply)
    assert step.observation == observation or done
    assert (step.valid, step.done, step.success, step.reward) == (True, done, success, success)


def test_the_state_is_which_articles_were_found_in_any_order():
    env = make_env("searchqa")
    assert env.state() is None  # before the first reset
    titles = [question.titles[0] for question in almanac(0).questions[:40:13]]
    ends = set()
    for order in (titles, titles[::-1]):
        env.reset(0)
        assert env.state() == ""
        found = set()
        for title in order:
            before = env.state()
            text = env.step(f"<search> {title} </search>").observation
            found |= set(re.findall(r"Doc \d+\(Title: (.*?)\) ", text))
            assert env.state() == ", ".join(sorted(found)) != before
        for idle in (f"<search> {order[0]} </search>", "no tag at all"):
            env.step(idle)
        ends.add(env.state())
    assert len(ends) == 1


def test_threads_find_what_one_finds():
    titles = [title for title, _ in almanac(0).articles[::50]]
    index = make_env("searchqa")._index(0)
    alone = [index.search(title, 3) for title in titles]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda title: index.search(title, 3), titles)) == alone


# ---- the expert ----


@pytest.mark.parametrize("split, every", [("train", 20), ("test", 1)])
def test_the_expert_searches_for_names_that_it_has_read_and_finds_the_answer(split, every):
    env = make_env("searchqa", names=True)
    of_several_articles = 0
    for item in items("searchqa", split)[::every]:
        read = env.reset(split_item(item)[1])
        while not env.last.done:
            action = env.expert()
            name = re.match(r"<think> (.+) </think>\n<(search|answer)> \1 </\2>$", action)[1]
            assert name in read and action.split("\n")[1] in env.choices()[0]
            read += env.step(action).observation
        assert env.last.success and len(env.queries) == len(world_and_question(item)[1].titles)
        of_several_articles += len(env.queries) > 1
    assert of_several_articles > 50


def test_the_expert_goes_on_from_what_was_found_before():
    env = make_env("searchqa")
    number = next(n for n, q in enumerate(almanac(0).questions) if q.source == "3_hops")
    first, second, third = almanac(0).questions[number].titles
    env.reset(number)
    env.step("I look around.")
    env.step(f"<search> {second} </search>")
    for title in (first, third):
        action = env.expert()
        assert action == env.expert() == f"<think> {title} </think>\n<search> {title} </search>"
        env.step(action)
    assert env.step(env.expert()).success
    assert env.expert() is None


def test_the_expert_gives_up_what_two_searches_do_not_find(corpus):
    env = make_env("searchqa", corpus=corpus)  # not the articles that the questions are about
    assert env.expert() is None
    env.reset(ONE_HOP)
    for _ in range(2):
        env.step(env.expert())
    assert env.expert() is None
    title = almanac(0).questions[ONE_HOP].titles[0]
    assert len(env.queries) == 2 and all(title in query for query in env.queries)


# ---- files ----


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def asked(question, answers):
    return {"question": question, "golden_answers": answers}


@pytest.fixture
def corpus(tmp_path):
    """The path of a corpus of two articles. Its name is a number."""
    rows = [{"id": "0", "contents": '"Ant"\nAnts are small.'},
            {"id": "1", "contents": '"Bee"\nBees make honey.'}]
    return write_rows(tmp_path / "2018", rows)


def test_questions_and_a_corpus_of_ones_own(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", [asked("Who makes honey?", ["bees", "the bee"])])
    write_rows(tmp_path / "b.jsonl", [asked("How big are ants?", "small")])
    text = "searchqa.corpus=2018 searchqa.questions=a.jsonl,b.jsonl searchqa.topk=2"
    env = make_env("searchqa", **env_options(text, ["searchqa"])["searchqa"])
    assert env.reset(0) == "Question: Who makes honey?" and env.expert() is None
    found = "<information>Doc 1(Title: Bee) Bees make honey.</information>"
    assert env.step("<search>honey</search>").observation == found
    for number, answer in enumerate(("Bee", "Small.")):
        env.reset(number)
        assert env.step(f"<answer>{answer}</answer>").success
    with pytest.raises(ValueError, match="items 0 to 1"):
        env.reset(2)


@pytest.mark.parametrize("golden, right, wrong", [
    ("The Silver Harbour!", [" silver  HARBOUR"], ["silver"]), ("Łódź", ["a łódź."], ["lodz"]),
    ("theatre", ["theatre"], ["atre"]), ("bee", ["the bee"], ["the"]),
    # What normalises to nothing is compared as it is.
    ("A", ["a"], ["the", "?"]), ("The The", [" the the "], ["the"]), ("+", ["+"], ["-"]),
    ("", [], ["?"])])
def test_answers_are_compared_as_in_search_r1(tmp_path, corpus, golden, right, wrong):
    questions = write_rows(tmp_path / "questions.jsonl", [asked("Which one?", [golden])])
    env = make_env("searchqa", corpus=corpus, questions=questions)
    for said in right + wrong:
        env.reset(0)
        assert env.step(f"<answer>{said}</answer>").success is (said in right)


@pytest.mark.parametrize("options, named", [
    ({"questions": "a.jsonl"}, "corpus"), ({"topk": 0}, "topk"), ({"depth": 2}, "depth"),
    ({"corpus": "none.jsonl"}, "none.jsonl")])
def test_wrong_arguments_are_value_errors(options, named):
    with pytest.raises(ValueError, match=named):
        make_env("searchqa", **options)


@pytest.mark.parametrize("text", ["", "[" * 100_000, json.dumps(asked("a", None)),
                                  json.dumps(asked("a", []))])
def test_a_file_without_questions_is_named(tmp_path, corpus, text):
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="questions.jsonl"):
        make_env("searchqa", corpus=corpus, questions=str(path))


# ---- retrieval servers ----


def test_a_retrieval_server_is_asked_in_search_r1s_protocol():
    index = BM25(almanac(0).articles)
    seen = []

    def answer(request):
        body = json.loads(request.body)
        seen.append((request.path, body))
        result = [{"document": {"id": "0", "contents": f'"{title}"\n{text}'}, "score": 1.0}
                  for title, text in index.search(*body["queries"], body["topk"])]
        return 200, {}, json.dumps({"result": [result]})

    title = almanac(0).questions[5].titles[0]
    with serving(answer) as port:
        steps = []
        for options in ({"retriever": f"http://127.0.0.1:{port}"}, {}):
            env = make_env("searchqa", **options)
            env.reset(5)
            steps.append(env.step(f"<search>{title}</search>"))
    assert steps[0] == steps[1]
    assert seen == [("/retrieve", {"queries": [title], "topk": 3, "return_scores": True})]
    assert split_contents('"A "b" c"\ntext\nmore') == ('A "b" c', "text\nmore")


@pytest.mark.parametrize("status, body", [
    (500, b'{"result": [[]]}'), (200, b"\xff{"), (200, b'{"result": [[{"score": 1}]]}'),
    (200, b"[" * 100_000), ("slow", b"{}"), ("gone", b"{}")])
def test_a_retrieval_server_that_fails_is_an_env_error(status, body):
    def answer(request):
        time.sleep(0.6 if status == "slow" else 0)
        return 200 if status == "slow" else status, {}, body

    with serving(answer) as port:
        port = 9 if status == "gone" else port
        env = SearchQA(retriever=f"http://127.0.0.1:{port}")
        env.retriever.timeout = 0.3
        env.reset(0)
        with pytest.raises(EnvError, match="/retrieve"):
            env.step("<search>Tavi</search>")
