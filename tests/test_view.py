"""What the page of a run holds: complete, small, and data only. tests/test_page.py opens it in a
browser."""

import base64
import gzip
import json
import shutil

import pytest
from conftest import run_script
from test_train import SMALL, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import metrics
import view
from envs import make_env
from page.live import LiveRun, find_in
from page.replay import Replay
from page.run import Run, invalid_turns, piece

EVIL = ("</script><img src=x onerror=\"document.title='owned'\">"
        "<script>document.title='owned'</script>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 48 trajectories, in which a model and a world wrote EVIL."""
    out = tmp_path_factory.mktemp("runs") / "evil"
    done = run("--out", str(out), "--env", "babyai,textcraft", *SMALL)
    assert done.returncode == 0, done.stderr
    path = out / "trajectories/step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["error"] = EVIL
    rows[1]["item"] = EVIL
    rows[2]["status"] = EVIL
    write_evil_reply(rows[0], AutoTokenizer.from_pretrained(out / "final"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"horizon": EVIL}))
    view.write_page(out)
    return out


def write_evil_reply(row, tokenizer):
    """Put EVIL in front of a trajectory's first reply."""
    tokens = tokenizer.encode(EVIL, add_special_tokens=False)
    first = row["mask"].index(True)
    values = {"tokens": tokens, "mask": True, "logprobs": -0.5, "rewards": 0.0}
    if isinstance(row["advantage"], list):
        values["advantage"] = 1.0
    for name, value in values.items():
        row[name][first:first] = value if name == "tokens" else [value] * len(tokens)


def run_of(page):
    """The first run in a page's JSON, which ends where a browser would end it. Its table is a list
    of rows."""
    begin = '<script id="data" type="application/json">'
    (run, *_) = json.loads(page.split(begin)[1].split("</script>")[0])["runs"]
    columns = unpack(run["table"])
    return run | {"table": [dict(zip(columns, values)) for values in zip(*columns.values())]}


def unpack(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def trajectories_of(run):
    """The trajectories in the chunks of a page's run."""
    return [trajectory for chunk in run["chunks"] for trajectory in unpack(chunk)]


def played_in(folder):
    """The trajectories of a run, as JSON lines."""
    files = sorted((folder / "trajectories").glob("*"))
    return [line for file in files for line in file.read_text().splitlines(keepends=True)]


# ---- what the page holds ----


def test_the_page_holds_every_trajectory(folder):
    run = run_of((folder / "view.html").read_text())
    held = trajectories_of(run)
    played = [json.loads(line) for line in played_in(folder)]
    assert len(run["table"]) == len(played) == 48
    assert [t["ids"] for t in held] == [t["tokens"] for t in played]
    assert [t["mask"] for t in held] == [t["mask"] for t in played]
    assert [t["rewards"] for t in held] == [t["rewards"] for t in played]
    assert [row["item"] for row in run["table"]] == [t["item"] for t in played]
    assert all(str(i) in run["vocabulary"] for t in held for i in t["ids"])
    assert set(run["metrics"]) >= {"success", "success/babyai", "success/textcraft", "kl"}
    assert len(run["metrics"]["kl"]) == 3


def test_babyais_rooms_are_drawn_before_each_reply_and_after_the_last(folder):
    held = trajectories_of(run_of((folder / "view.html").read_text()))
    played = [json.loads(line) for line in played_in(folder)]
    drawn = []
    for t, p in zip(held, played, strict=True):
        if p["item"] == EVIL:
            assert t["scenes"] is None
        if p["env"] != "babyai" or p["item"] == EVIL:
            continue
        assert len(t["scenes"]) == p["turns"] + 1
        drawn.append([scene["room"] for scene in t["scenes"]])
        for width, cells, (x, y, direction) in drawn[-1]:
            assert cells.startswith("#5" * width)  # a wall
            assert 0 < x < width - 1 and y > 0 and direction in range(4)
    assert len(drawn) > 12
    # Some agent has moved or turned.
    assert any(rooms[0][2] != rooms[-1][2] for rooms in drawn)


CONFIG = {"env": "babyai,textcraft", "action_format": "react", "parse": "strict"}


def test_rooms_are_drawn_as_the_replies_were_read():
    room = make_env("babyai").reset(88)
    said = ["Play.", "OK", room, "Action: [turn right].", "A wall."]
    trajectory = {"env": "babyai", "item": "babyai_88",
                  "messages": [{"content": text} for text in said]}
    for parse, turned in (("strict", False), ("lenient", True)):
        before, after = Replay(CONFIG | {"parse": parse}).scenes(trajectory)
        assert (before != after) == turned


def test_inventories_are_drawn_with_a_way_to_the_goal():
    """The way says what the world's own solution gets and crafts."""
    world = make_env("textcraft")
    messages = [{"content": "Play."}, {"content": "OK"}, {"content": world.reset(300)}]
    while (action := world.expert()) is not None and not (world.last and world.last.done):
        messages += [{"content": f"Action: {action}"}, {"content": world.step(action).observation}]
    trajectory = {"env": "textcraft", "item": "textcraft_300", "messages": messages}
    first, *_, last = Replay(CONFIG).scenes(trajectory)
    assert first["inventory"] == {} and "mossy stone bricks" in last["inventory"]
    assert first["tree"] == ("mossy stone bricks", 1, [
        ("stone bricks", 1, [("stone", 4, [])]), ("vine", 1, [])])
    # A recipe that makes four planks is needed twice for five of them.
    world.reset(125)
    assert world.goal_tree() == (
        "acacia boat", 1, [("acacia planks", 5, [("acacia logs", 2, [])])])


def test_nothing_is_drawn_of_worlds_on_servers():
    room = make_env("babyai").reset(88)
    messages = [{"content": "Play."}, {"content": "OK"}, {"content": room}]
    trajectory = {"env": "babyai", "item": "babyai_88", "messages": messages}
    assert Replay(CONFIG).scenes(trajectory)
    # Nor of what another program calls item 88.
    assert Replay(CONFIG).scenes(trajectory | {"item": "babyai_89"}) is None
    replay = Replay(CONFIG | {"env_url": "http://127.0.0.1:1"})
    assert replay.scenes(trajectory) is None and replay.category("babyai_88") == ""


def test_the_table_says_of_each_trajectory_what_it_was_and_how_it_ended(folder):
    table = run_of((folder / "view.html").read_text())["table"]
    played = [json.loads(line) for line in played_in(folder)]
    for row, p in zip(table, played, strict=True):
        assert row["tokens"] == len(p["tokens"]) and row["reward"] == p["reward"]
        assert row["invalid"] == min(p["invalid_turns"], default=None)
        reply = [m["content"] for m in p["messages"] if m["role"] == "assistant"][-1]
        assert " ".join(reply.split()).endswith(row["last_reply"])
        expected = {"babyai": "GoTo", "textcraft": "depth "}[p["env"]]
        assert row["category"].startswith(expected) or p["item"] == EVIL
    assert len({row["category"] for row in table}) > 3


def test_runs_that_did_not_record_invalid_turns_show_those_with_a_negative_reward():
    trajectory = {"invalid_turns": None, "mask": [0, 1, 1, 0, 1, 1, 0, 1],
                  "rewards": [0, 0, -0.05, 0, 0, 0.5, 0, -0.05]}
    assert invalid_turns(trajectory) == [1, 3]
    assert invalid_turns(trajectory | {"invalid_turns": [2]}) == [2]


def test_entropies_are_in_the_page_where_they_were_recorded(folder, tmp_path):
    held = trajectories_of(run_of((folder / "view.html").read_text()))
    played = [json.loads(line) for line in played_in(folder)]
    assert sum("entropies" in t for t in held) > 40
    for t, p in zip(held, played, strict=True):
        if "entropies" in t:
            assert t["entropies"] == p["entropies"]
    shutil.copytree(folder, tmp_path / "run")
    for file in (tmp_path / "run/trajectories").glob("*"):
        older = [json.loads(line) for line in file.read_text().splitlines()]
        for t in older:
            del t["entropies"], t["invalid_turns"], t["cut_turns"]
        file.write_text("".join(json.dumps(t) + "\n" for t in older))
    held = trajectories_of(run_of(view.write_page(tmp_path / "run").read_text()))
    assert len(held) == 48 and not any("entropies" in t for t in held)


def test_nothing_that_was_written_is_markup_and_the_page_needs_no_network(folder):
    page = (folder / "view.html").read_text()
    run = run_of(page)
    assert EVIL in run["about"]
    assert EVIL in {row["item"] for row in run["table"]}
    assert EVIL in {row["status"] for row in run["table"]}
    assert "<img" not in page and page.count("</script>") == 2
    for harmless in ("http://www.w3.org/2000/svg", "http-equiv"):
        page = page.replace(harmless, "")
    assert "http" not in page


def test_all_trajectories_have_a_row_and_whole_groups_have_tokens(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    run = run_of(view.write_page(tmp_path / "run", most=24).read_text())
    held = [row for row in run["table"] if row["held"] >= 0]
    groups = {}  # (step, group) -> the samples whose tokens are in the page
    for row in held:
        groups.setdefault((row["step"], row["group"]), []).append(row["sample"])
    assert len(run["table"]) == 48 and 0 < len(held) <= 24
    assert [row["held"] for row in held] == list(range(len(held)))
    assert [row["tokens"] for row in held] == [len(t["ids"]) for t in trajectories_of(run)]
    assert all(sorted(samples) == [0, 1, 2, 3] for samples in groups.values())
    assert {step for step, _ in groups} == {0, 1, 2}
    assert f"tokens of {len(held)} of 48" in run["note"] and "one group in 2" in run["note"]


def test_a_supervised_run_has_the_steps_of_its_files_and_counts_learnt_turns_alone(
        folder, tmp_path):
    """sft.py learns from trajectories of other steps, and not from their random actions."""
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run/trajectories/step_000002.jsonl"
    lines = [json.loads(line) | {"step": 0} for line in file.read_text().splitlines()]
    several = next(t for t in lines if t["turns"] > 1)
    first = several["mask"].index(True)
    end = several["mask"].index(False, first)
    several["mask"][first:end] = [False] * (end - first)
    several["invalid_turns"] = [2]
    file.write_text("".join(json.dumps(t) + "\n" for t in lines))
    run = run_of(view.write_page(tmp_path / "run").read_text())
    assert [row["step"] for row in run["table"][-16:]] == [2] * 16
    held = trajectories_of(run)[-16:][lines.index(several)]
    assert not held["has_all_turns"] and held["scenes"] is None and held["invalid_turns"] == []
    assert sum(t["has_all_turns"] for t in trajectories_of(run)) == 47


def test_fields_of_another_kind_do_not_stop_the_page(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run/trajectories/step_000002.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    odd = ({"invalid_turns": [1, "a", float("nan")]}, {"cut_turns": None}, {"sample": "x"},
           {"reward": 10**400}, {"entropies": [None]}, {"messages": [1]})
    for t, change in zip(lines, odd):
        t |= change
    file.write_text("".join(json.dumps(t) + "\n" for t in lines))
    run = run_of(view.write_page(tmp_path / "run").read_text())
    assert set(run["left_out"]) == {"1 trajectories with a 'sample' of another kind",
                                    "1 numbers of trajectories that are not finite"}
    assert len(run["table"]) == 47 and run["table"][32]["invalid"] == 1


def test_the_page_says_for_how_many_trajectories_states_are_drawn(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(view, "MAX_DRAWN", 24)
    run = run_of(view.write_page(folder, out=tmp_path / "view.html").read_text())
    drawn = [t for t in trajectories_of(run) if t["scenes"]]
    assert 0 < len(drawn) < 40
    # One trajectory of a group that is drawn has a damaged item.
    assert f"states drawn for {len(drawn)} " in run["note"] or (
        f"states drawn for {len(drawn) + 1} " in run["note"])


def test_several_runs_make_one_page(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    done = run_script("view.py", folder, tmp_path / "other", "--out", tmp_path / "both.html")
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/both.html\n", done.stderr
    text = (tmp_path / "both.html").read_text()
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["evil", "other"]


def test_pieces_of_characters_are_kept_as_bytes():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["turn left turn left"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    text = "turn left, \u00e9t\u00e9 \u6f22 \U0001f642"
    pieces = [piece(tokenizer, i) for i in tokenizer.encode(text)]
    as_bytes = [p.encode() if isinstance(p, str) else bytes(p) for p in pieces]
    assert b"".join(as_bytes).decode() == text
    assert any(isinstance(p, list) for p in pieces)


def test_sentencepieces_spaces_and_bytes_are_kept():
    class SentencePiece:
        def decode(self, ids):
            return {1: "left", 2: "\ufffd"}[ids[0]]

        def convert_ids_to_tokens(self, i):
            return {1: "\u2581left", 2: "<0xE2>"}[i]

    assert [piece(SentencePiece(), i) for i in (1, 2)] == [" left", [0xE2]]


def test_a_mixtures_stages_are_those_of_each_world():
    horizons = [(5, 3), (5, 3), (5, 4), (8, 4)]
    rows = [{"horizon": h, "horizon/babyai": b, "horizon/textcraft": h} for h, b in horizons]
    assert metrics.horizon_changes(rows) == [2, 3]
    assert metrics.horizon_changes([{"horizon": 3}] * 2) == []


# ---- the command ----


def command(folder, *flags):
    return run_script("view.py", folder, *flags)


def test_the_command_writes_the_page_and_the_curves(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    for name in ("view.html", "curves.png"):
        (tmp_path / "run" / name).unlink()
    done = command(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/run/view.html\n"
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert len(run_of((tmp_path / "run/view.html").read_text())["table"]) == 48
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_folder_without_a_run_is_one_line(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_a_run_without_a_step_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("")
    done = command(tmp_path / "run")
    assert done.returncode == 2 and "first step" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_number_of_trajectories_that_is_none_is_one_line(folder):
    done = command(folder, "--most", "0")
    assert done.returncode == 2 and "--most must be positive" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- the live page's run ----


def test_a_live_run_reads_steps_as_they_come_and_anew_if_one_is_played_again(
        folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    metrics_file = tmp_path / "run/metrics.jsonl"
    lines = metrics_file.read_text().splitlines(keepends=True)
    metrics_file.write_text(lines[0])
    run = LiveRun(tmp_path / "run")
    run.refresh()
    generation = run.generation
    assert len(run.rows) == 16
    metrics_file.write_text("".join(lines))
    run.refresh()
    assert len(run.rows) == 48 and len(run.table(16)["step"]) == 32
    played = [json.loads(line) for line in played_in(folder)]
    for number in (0, 17, 47):
        found = run.trajectory(number)
        assert found["ids"] == played[number]["tokens"]
        assert set(found["vocabulary"]) == set(found["ids"])
    file = tmp_path / "run/trajectories/step_000002.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:8]))
    assert run.generation == generation
    run.refresh()
    assert len(run.rows) == 40 and run.generation == generation + 1


def test_a_search_says_where_a_text_stands():
    messages = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "OK"},
                {"role": "user", "content": "A Red door."}, {"role": "assistant", "content": "go"}]
    assert find_in(messages, "red", "anything") == "A Red door."
    assert find_in(messages, "red", "replies") == "" and find_in(messages, "go", "replies") == "go"
    assert find_in(messages, "go", "environment") == ""
    assert find_in([{"role": 1}, "x"], "x", "anything") == "" == find_in("x", "x", "replies")


# ---- damaged files ----

# The fields of a trajectory that the page cannot do without.
NEEDED = ("step", "env", "item", "group", "status", "reward", "success", "turns", "tokens", "mask",
          "logprobs", "rewards", "advantage")


def damaged(folder, tmp_path):
    """A copy of the run with what a crash, a full disk or another program may leave.

    -> (the copy, the lines about it that the page must have)
    """
    out = tmp_path / "damaged"
    shutil.copytree(folder, out)
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"kl": float("nan"), "success": None, "entropy": "x"}
    for row in rows:
        row["grad_norm"] = float("inf")  # no value is left
    for name in ("trajectories", "horizon", "turns", "step"):
        del rows[1][name]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([lines[0], "[]", "", lines[1], lines[2][:80]]))

    files = sorted((out / "trajectories").glob("*"))
    trajectories = [json.loads(line) for line in files[0].read_text().splitlines()]
    for t, name in zip(trajectories, NEEDED):
        del t[name]
    other = trajectories[len(NEEDED)]
    for name in ("sample", "score", "error", "messages"):  # the page can do without these
        del other[name]
    # An id beyond the vocabulary and two that no tokenizer's integer holds.
    other["tokens"][:3] = [10**6, -5, 10**30]
    # No damage: a policy may sample an id that its tokenizer does not have.
    other["tokens"][other["mask"].index(True)] = 10**6
    other["reward"] = other["rewards"][0] = other["logprobs"][0] = float("nan")
    trajectories[len(NEEDED) + 1]["logprobs"].pop()
    trajectories[len(NEEDED) + 2]["tokens"][0] = None
    files[0].write_text("".join(json.dumps(t) + "\n" for t in trajectories))
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes()[:-100] + b"\xff")  # inside of the last line

    expected = [f"1 trajectories with no field '{name}'" for name in NEEDED]
    expected += [
        "2 lines of metrics.jsonl that are not JSON objects",
        "1 values of success that are missing or not finite",
        "1 values of turns that are missing or not finite",
        "1 values of entropy that are missing or not finite",
        "1 values of kl that are missing or not finite",
        "2 values of grad_norm that are missing or not finite",
        "3 texts of token ids that the tokenizer does not have",
        "3 numbers of trajectories that are not finite",
        "1 trajectories with lists of different lengths",
        "1 trajectories with a 'tokens' of another kind",
        "1 trajectory files that are empty",
        "1 lines of trajectories that are not JSON objects",
    ]
    return out, expected


def test_damaged_files_are_left_out_and_the_page_says_what(folder, tmp_path):
    out, expected = damaged(folder, tmp_path)
    done = command(out)
    assert done.returncode == 0, done.stderr
    run = run_of((out / "view.html").read_text())
    assert sorted(run["left_out"]) == sorted(expected)
    said = [line for line in done.stderr.splitlines() if line.startswith("view.py: left out: ")]
    assert len(said) == 1 and "Traceback" not in done.stderr
    assert len(run["table"]) == len(trajectories_of(run)) == 48 - 16 - len(NEEDED) - 2 - 1
    assert run["metrics"]["kl"][0] is None and len(run["metrics"]["kl"]) == 2
    assert "grad_norm" not in run["metrics"] and run["stages"] == []
    assert (out / "curves.png").stat().st_size > 10_000


def test_an_undamaged_run_leaves_nothing_out(folder):
    assert run_of((folder / "view.html").read_text())["left_out"] == []


@pytest.mark.parametrize("name, text", [
    ("config.json", "{"), ("config.json", "[]"), ("config.json", "{}"), ("metrics.jsonl", "{"),
])
def test_a_run_without_a_config_or_a_row_is_one_line_that_names_the_file(
        folder, tmp_path, name, text):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        view.write_page(tmp_path / "run")


def test_a_deleted_row_of_metrics_hides_no_trajectories(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    run = Run(tmp_path / "run")
    run.find_files()
    files = [file.name for file in run.unread]
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/metrics.jsonl").write_text("".join(rows[1:]))
    run = Run(tmp_path / "run")
    run.find_files()
    assert len(files) == len(rows) and [file.name for file in run.unread] == files


def test_a_port_that_is_none_is_one_line(folder):
    done = run_script("view.py", "--live", folder, "--port", "99999999")
    assert done.returncode == 2 and "port" in done.stderr.splitlines()[-1]
