"""What the page of a run holds: complete, small, and data only. tests/test_page.py opens it in a
browser."""

import base64
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import requests
from conftest import ROOT, run_script
from test_train import SMALL, read_jsonl, run

import rl
import view
from envs import make_env
from page.live import Server, find_in, read_search
from page.replay import Replay
from page.run import piece
from trajectory import Trajectory, reply_spans

EVIL = ("</script><img src=x onerror=\"document.title='owned'\">"
        "<script>document.title='owned'</script>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 48 trajectories, in which a model and a world wrote EVIL. The last step succeeds."""
    out = tmp_path_factory.mktemp("runs") / "evil"
    done = run("--out", str(out), "--env", "babyai,textcraft", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = played_in(out, 1)
    rows[0]["error"] = rows[1]["item"] = rows[2]["status"] = EVIL
    tokens = rl.load_tokenizer("tiny").encode(EVIL, add_special_tokens=False)
    first = rows[0]["mask"].index(True)  # EVIL stands in front of the first reply
    rows[0]["tokens"][first:first] = tokens
    values = {"mask": True, "logprobs": -0.5, "entropies": 0.5, "rewards": 0.0}
    for name, value in values.items():
        rows[0][name][first:first] = [value] * len(tokens)
    write_rows(out, rows, 1)
    write_rows(out, [row | {"success": True} for row in played_in(out, 2)], 2)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"horizon": EVIL}))
    view.write_page(out)
    return out


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the run, which a test may change."""
    return shutil.copytree(folder, tmp_path / "run")


@pytest.fixture
def live(copied):
    """A run that has played one of its three steps, its server, and the lines of its metrics."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text(lines[0])
    with Server([copied], 0) as server:
        threading.Thread(target=server.serve_forever).start()
        yield copied, server, lines
        server.shutdown()


def played_in(folder, step="*"):
    """The trajectories of a run, or of a step of it."""
    files = sorted((folder / "trajectories").glob(f"step_*{step}.jsonl".replace("**", "*")))
    return [row for file in files for row in read_jsonl(file)]


def write_rows(folder, rows, step):
    path = folder / f"trajectories/step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def unpack(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def run_of(page):
    """The first run in the JSON of a page, which ends where a browser would end it. Its table is a
    list of rows, and its chunks are a list of trajectories."""
    begin = '<script id="data" type="application/json">'
    (run, *_) = json.loads(page.read_text().split(begin)[1].split("</script>")[0])["runs"]
    columns = unpack(run["table"])
    return run | {"table": [dict(zip(columns, values)) for values in zip(*columns.values())],
                  "held": [t for chunk in run["chunks"] for t in unpack(chunk)]}


# ---- what the page holds ----


def test_the_page_holds_every_trajectory(folder):
    run, played = run_of(folder / "view.html"), played_in(folder)
    assert len(run["table"]) == len(run["held"]) == 48 and run["left_out"] == []
    for t, row, p in zip(run["held"], run["table"], played, strict=True):
        assert t["ids"] == p["tokens"]
        assert all(t[name] == p[name] for name in ("mask", "rewards", "starts", "entropies"))
        assert row["item"] == p["item"]
        assert row["tokens"] == len(p["tokens"]) and row["reward"] == p["reward"]
        assert row["invalid"] == min(p["invalid_turns"], default=None)
        reply = [m["content"] for m in p["messages"] if m["role"] == "assistant"][-1]
        assert " ".join(reply.split()).endswith(row["last_reply"])
        expected = {"babyai": "GoTo", "textcraft": "depth "}[p["env"]]
        assert row["category"].startswith(expected) or p["item"] == EVIL
    assert len({row["category"] for row in run["table"]}) > 3
    assert all(str(i) in run["vocabulary"] for t in run["held"] for i in t["ids"])
    assert set(run["metrics"]) >= {"success", "success/babyai", "success/textcraft", "kl"}
    assert len(run["metrics"]["kl"]) == 3


def test_babyais_rooms_are_drawn_before_each_reply_and_after_the_last(folder):
    drawn = []
    for t, p in zip(run_of(folder / "view.html")["held"], played_in(folder), strict=True):
        if p["item"] == EVIL:
            assert t["scenes"] is None
        elif p["env"] == "babyai":
            assert len(t["scenes"]) == p["turns"] + 1
            drawn.append([scene["room"] for scene in t["scenes"]])
            for width, cells, (x, y, direction) in drawn[-1]:
                assert cells.startswith("#5" * width)  # a wall
                assert 0 < x < width - 1 and y > 0 and direction in range(4)
    assert any(rooms[0][2] != rooms[-1][2] for rooms in drawn)  # an agent has moved or turned


CONFIG = {"env": "babyai,textcraft", "action_format": "react", "parse": "strict"}


def of_texts(item, turns, *texts):
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return Trajectory(item, item.split("_")[0], messages=messages, turns=turns)


def test_rooms_are_drawn_as_the_replies_were_read_and_not_of_other_tasks():
    world = make_env("babyai")
    room, seen = world.reset(88), world.step("turn right").observation
    t = of_texts("babyai_88", 1, "Play.", "OK", room, "Action: [turn right].")
    for parse, turned in (("strict", False), ("lenient", True)):
        before, after = Replay(CONFIG | {"parse": parse}).scenes(t)
        assert (before != after) == turned
    # What an agent has shown must come out again. An expert's first turns are left out.
    right, replay = ["", "OK", room, "Action: turn right"], Replay(CONFIG | {"agent": "backward"})
    for turns, scenes, *texts in (
            (2, 3, *right, seen, "Action: x"), (1, 2, *right, seen, "Action: x"),
            (1, 0, *right, "A wall."), (1, 0, "", "OK", room, "<<turn right>>", seen),
            (0, 0, "", "OK", "A wall."), (0, 0)):
        assert len(replay.scenes(of_texts("babyai_88", turns, *texts)) or []) == scenes
    # Worlds on servers, and what another program calls item 88.
    replay = Replay(CONFIG | {"env_url": "http://127.0.0.1:1"})
    assert replay.scenes(t) is None and replay.category("babyai_88") == ""
    t.item = "babyai_89"
    assert Replay(CONFIG).scenes(t) is None


def test_inventories_are_drawn_with_a_way_to_the_goal():
    """The way says what the world's own solution gets and crafts."""
    world = make_env("textcraft")
    texts = ["Play.", "OK", world.reset(300)]
    while (action := world.expert()) is not None and not (world.last and world.last.done):
        texts += [f"Action: {action}", world.step(action).observation]
    first, *_, last = Replay(CONFIG).scenes(of_texts("textcraft_300", len(texts) // 2 - 1, *texts))
    assert first["inventory"] == {} and "mossy stone bricks" in last["inventory"]
    assert first["tree"] == ("mossy stone bricks", 1, [
        ("stone bricks", 1, [("stone", 4, [])]), ("vine", 1, [])])
    # A recipe that makes four planks is needed twice for five of them.
    world.reset(125)
    assert world.goal_tree() == ("acacia boat", 1, [("acacia planks", 5, [("acacia logs", 2, [])])])


def test_nothing_that_was_written_is_markup_and_the_page_needs_no_network(folder):
    run = run_of(folder / "view.html")
    assert EVIL in run["about"] and EVIL in {row["item"] for row in run["table"]}
    page = (folder / "view.html").read_text()
    assert "<img" not in page and page.count("</script>") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_all_trajectories_have_a_row_and_whole_groups_have_tokens(copied):
    run = run_of(view.write_page(copied, most=24))
    held = [row for row in run["table"] if row["held"] >= 0]
    assert len(run["table"]) == 48 and 0 < len(held) <= 24
    assert [row["held"] for row in held] == list(range(len(held)))
    assert [row["tokens"] for row in held] == [len(t["ids"]) for t in run["held"]]
    groups = Counter((row["step"], row["group"]) for row in held)
    assert set(groups.values()) == {4} and {step for step, _ in groups} == {0, 1, 2}
    assert f"tokens of {len(held)} of 48" in run["note"]
    undrawn = [row["item"] for row, t in zip(held, run["held"]) if t["scenes"] is None]
    assert undrawn in ([], [EVIL])  # all that can be opened have pictures


def test_the_table_is_of_the_policys_own_replies_and_of_its_own_goal(copied):
    """Of few_shot and backward the messages begin with episodes, or turns, of an expert."""
    rows = played_in(copied, 2)
    for row in rows:
        row["messages"][2:2] = [{"role": "user", "content": "Your goal: find the grey box"},
                                {"role": "assistant", "content": "go forward"}]
    write_rows(copied, rows, 2)
    table = [row for row in run_of(view.write_page(copied))["table"] if row["step"] == 2]
    assert {row["invalid_action"] for row in table} == {""} and all(row["goal"] for row in table)
    assert not any("grey box" in row["goal"] for row in table)


def test_a_supervised_run_has_the_steps_of_its_files_and_counts_learnt_turns_alone(copied):
    """sft.py learns from trajectories of other steps, and not from their random actions."""
    rows = [row | {"step": 0} for row in played_in(copied, 2)]
    several = next(t for t in rows if t["turns"] > 1)
    (first, end), *_ = reply_spans(several["mask"])
    several["mask"][first:end] = [False] * (end - first)
    several["invalid_turns"] = [2]
    write_rows(copied, rows, 2)
    run = run_of(view.write_page(copied))
    assert [row["step"] for row in run["table"][-16:]] == [2] * 16
    held = run["held"][-16:][rows.index(several)]
    assert not held["has_all_turns"] and held["scenes"] is None and held["invalid_turns"] == []
    assert sum(t["has_all_turns"] for t in run["held"]) == 47


def test_pieces_of_characters_are_kept_as_bytes_and_spaces_before_words():
    tokenizer = rl.load_tokenizer("tiny")
    text = "turn left, \u00e9t\u00e9 \u6f22 \U0001f642"
    pieces = [piece(tokenizer, i) for i in tokenizer.encode(text)]
    as_bytes = [p.encode() if isinstance(p, str) else bytes(p) for p in pieces]
    assert b"".join(as_bytes).decode() == text
    sentencepiece = SimpleNamespace(
        decode=lambda ids: {1: "left", 2: "\ufffd"}[ids[0]],
        convert_ids_to_tokens={1: "\u2581left", 2: "<0xE2>"}.get)
    assert [piece(sentencepiece, i) for i in (1, 2)] == [" left", [0xE2]]


# ---- the live page ----


def test_a_live_run_reads_steps_as_they_come_and_anew_if_one_is_played_again(live):
    folder, server, lines = live
    (run,) = server.runs
    generation = run.generation
    assert len(run.rows) == 16
    (folder / "metrics.jsonl").write_text("".join(lines[1:]))  # a deleted row hides nothing
    run.refresh()
    assert len(run.rows) == 48 and len(run.table(16)["step"]) == 32
    played = played_in(folder)
    for number in (0, 17, 47):
        found = run.trajectory(number)
        assert found["ids"] == played[number]["tokens"]
        assert set(found["vocabulary"]) == set(found["ids"])
    write_rows(folder, played_in(folder, 2)[:8], 2)
    assert run.generation == generation
    run.refresh()
    assert len(run.rows) == 40 and run.generation == generation + 1


def test_a_live_page_is_for_this_machine_alone(live, tmp_path, monkeypatch):
    run, server, _ = live
    address = f"http://127.0.0.1:{server.server_port}/"
    page = requests.get(address, timeout=60)
    assert page.status_code == 200 and "connect-src 'self'" in page.text
    for path, host, status in (
            ("", "127.0.0.1", 200), ("", "example.org:80", 403), ("config.json", "localhost", 404),
            ("trajectory?run=0&id=99", "localhost", 400), ("search", "localhost", 400)):
        answer = requests.get(address + path, headers={"Host": host}, timeout=60)
        assert answer.status_code == status, path
    for path, status in (("", 200), ("search?text=a", 403)):  # from a page of another site
        answer = requests.get(address + path, headers={"Sec-Fetch-Site": "cross-site"}, timeout=60)
        assert answer.status_code == status
    assert requests.post(address, timeout=60).status_code == 501

    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)  # of the next ones
    for path, port, code in ((run, 0, 0), (run, server.server_port, 2), (run, 99999999, 2),
                             (tmp_path / "nothing", 0, 2)):
        done = run_script("view.py", "--live", path, "--port", port)
        assert done.returncode == code and "Traceback" not in done.stderr
        assert done.stdout.startswith("http://127.0.0.1:") == (code == 0)


@pytest.mark.parametrize("text, where, found", [
    ("red", "anything", "A Red door."), ("red", "replies", ""), ("go", "replies", "go"),
    ("go", "environment", ""), ("ok", "anything", ""), ("go & red", "anything", "go"),
    ("go & blue", "anything", ""), ("/red|x&y/ & /^A/", "environment", "A Red door."),
    ("a red", "anything", "A Red door."), ("(", "anything", ""), (" & ", "anything", "")])
def test_a_search_says_where_a_text_stands(text, where, found):
    messages = of_texts("babyai_88", 1, "Play.", "OK", "A Red door.", "go").messages
    assert find_in(messages, read_search(text), where) == found


# ---- damaged files ----


@pytest.mark.parametrize("name, text", [("config.json", "{}"), ("metrics.jsonl", "{"),
                                        ("metrics.jsonl", "")])
def test_a_run_without_a_config_or_a_row_is_one_line(copied, name, text):
    (copied / name).write_text(text)
    done = run_script("view.py", copied)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (name if text else "first step") in done.stderr


def damaged(out):
    """Damage a run as a crash, a full disk or another program may -> what the page must say."""
    rows = read_jsonl(out / "metrics.jsonl")
    rows[0] |= {"kl": float("nan"), "entropy": "x"}
    for row in rows:
        row["grad_norm"] = float("inf")  # no value is left
    for name in ("trajectories", "horizon", "turns", "step"):
        del rows[1][name]
    lines = [json.dumps(row) for row in rows]
    (out / "metrics.jsonl").write_text("\n".join([lines[0], "[]", "", lines[1], lines[2][:80]]))

    trajectories = played_in(out, 0)
    no_item, no_mask, other_kind, few_fields, other_ids, large = trajectories[:6]
    del no_item["item"]
    del no_mask["mask"]
    other_kind["tokens"][0] = None
    for name in ("sample", "score", "error", "messages"):  # the page can do without these
        del few_fields[name]
    # An id beyond the vocabulary and two that no tokenizer's integer holds.
    other_ids["tokens"][:3] = [10**6, -5, 10**30]
    # No damage: a policy may sample an id that its tokenizer does not have.
    other_ids["tokens"][other_ids["mask"].index(True)] = 10**6
    other_ids["reward"] = other_ids["rewards"][0] = other_ids["logprobs"][0] = float("nan")
    large["reward"] = 10**400
    write_rows(out, trajectories, 0)
    first, second = (out / f"trajectories/step_00000{step}.jsonl" for step in (1, 2))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-100] + b"\xff")  # inside of the last line
    return ["2 lines of metrics.jsonl that are not JSON objects",
            *(f"{count} values of {name} that are missing or not finite"
              for count, name in ((1, "turns"), (1, "entropy"), (1, "kl"), (2, "grad_norm"))),
            "3 texts of token ids that the tokenizer does not have",
            "4 numbers of trajectories that are not finite",
            *(f"1 trajectories ({why})" for why in (
                "it has no item or no env", "tokens is of another kind",
                "tokens, mask and the like have different lengths")),
            "1 trajectory files that are empty",
            "1 lines of trajectories that are not JSON objects"]


def test_damaged_files_are_left_out_and_the_page_says_what(copied):
    expected = damaged(copied)
    (copied / "curves.png").unlink()
    done = run_script("view.py", copied)
    assert (done.returncode, done.stdout) == (0, f"{copied}/view.html\n"), done.stderr
    run = run_of(copied / "view.html")
    assert sorted(run["left_out"]) == sorted(expected) and "view.py: left out: " in done.stderr
    assert len(run["table"]) == len(run["held"]) == 48 - 16 - 3 - 1
    assert run["metrics"]["kl"][0] is None and len(run["metrics"]["kl"]) == 2
    assert "grad_norm" not in run["metrics"] and run["stages"] == []
    assert (copied / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("locale", [
    {"LC_ALL": "C"}, pytest.param({"LC_ALL": "POSIX", "LANG": "C"}, marks=pytest.mark.slow),
    pytest.param({"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, marks=pytest.mark.slow)])
def test_the_page_is_written_in_any_locale(copied, locale):
    """Without PEP 538 and 540, in which Python takes UTF-8 for these locales."""
    off = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "view.py", str(copied)], cwd=ROOT, text=True,
                          env=os.environ | off | locale, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (copied / "view.html").read_text(encoding="utf-8").startswith("<!")
