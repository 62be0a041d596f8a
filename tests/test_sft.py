"""The command sft.py: what is learnt, from whom, and that it goes on where it was stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_script
from test_train import ENV, metrics, read_jsonl

import agent
import envs
import rl
import sft
from agent import Chat
from envs import EnvError
from trajectory import Trajectory
from update import collate

SMALL = ["--demos", "12", "--epochs", "2", "--batch", "4", "--horizon", "4", "--max_length", "900"]


def config_of(tmp_path, *args):
    return sft.parse_sft_config([*SMALL, "--out", str(tmp_path / "r"), *args])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a small run that was not interrupted."""
    out = tmp_path_factory.mktemp("sft") / "a"
    done = run_script("sft.py", *SMALL, "--out", out, "--save_every", "2", "--eval_every", "3")
    assert done.returncode == 0, done.stderr
    return out


# ---- what is learnt ----


def said(instructions, observation):
    return [agent.user(instructions), agent.assistant("OK"), agent.user(observation)]


def test_an_experts_replies_are_learnt_and_random_ones_are_not(tiny, tmp_path):
    chat = Chat(tiny[1])
    cfg = config_of(tmp_path)
    env = envs.make_env("babyai")
    learnt = {True: 0, False: 0}
    for item in envs.items("babyai", "train")[:30]:
        t = sft.demonstrate(env, item, chat, cfg, 0.5, random.Random(item))
        # Play it again, and ask the expert what it would have done.
        observation = env.reset(int(item.split("_")[1]))
        text = tiny[1].decode(chat.start(agent.instructions(env.prompt, "react"), observation))
        rest = tiny[1].decode(t.tokens)
        assert rest.startswith(text)
        place = len(chat.start(agent.instructions(env.prompt, "react"), observation))
        for reply, answer in zip(t.messages[3::2], t.messages[4::2]):
            action = agent.parse(reply["content"], "react")
            ids = chat.reply(reply["content"])
            assert t.tokens[place : place + len(ids)] == ids
            mask = t.mask[place : place + len(ids)]
            assert all(mask) or not any(mask)
            assert not all(mask) or action == env.expert()
            learnt[mask[0]] += 1
            step = env.step(action)
            assert step.observation == answer["content"]
            place += len(ids)
            if not step.done and answer is not t.messages[-1]:  # a last one has no tokens
                between = chat.turn(step.observation, closed=True)
                assert not any(t.mask[place : place + len(between)])
                place += len(between)
        assert place == len(t.tokens)
    assert min(learnt.values()) > 10


def test_only_trajectories_in_which_the_expert_succeeds_are_kept(tiny, tmp_path):
    found = sft.expert_trajectories(config_of(tmp_path), Chat(tiny[1]), "train", 10, 0.5)
    assert len(found) == 10
    assert all(t.success and t.turns <= 4 for t in found)
    train_items = set(envs.items("babyai", "train"))
    assert all(t.item in train_items for t in found)


def test_a_fault_while_the_expert_plays_costs_one_episode(tiny, tmp_path, monkeypatch):
    demonstrate = sft.demonstrate
    worlds = []

    def breaking(env, *rest):
        worlds.append(env)
        if len(worlds) in faults:
            raise EnvError("the power is out")
        return demonstrate(env, *rest)

    monkeypatch.setattr(sft, "demonstrate", breaking)
    faults = (2, 3)
    found = sft.expert_trajectories(config_of(tmp_path), Chat(tiny[1]), "train", 5, 0.0)
    assert len(found) == 5
    assert worlds[0] is worlds[1] and len(set(map(id, worlds[1:4]))) == 3  # each was made anew
    faults = range(1000)
    with pytest.raises(ValueError, match="only 0 of 6 episodes .* the power is out"):
        sft.expert_trajectories(config_of(tmp_path), Chat(tiny[1]), "train", 2, 0.0)


@pytest.fixture
def ctrl_c():
    """SIGINT as in a terminal. Shells that run jobs in the background let them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_expert_plays_ends_the_run_at_once(tmp_path, monkeypatch, ctrl_c):
    def stopping(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the signal changed nothing")

    monkeypatch.setattr(sft, "demonstrate", stopping)
    with pytest.raises(ValueError, match="SIGINT before the first step: nothing is written"):
        sft.sft(config_of(tmp_path))
    assert not (tmp_path / "r/metrics.jsonl").exists()


def test_the_loss_is_the_mean_over_the_replies_tokens_alone(tiny, tmp_path):
    chat = Chat(tiny[1])
    found = sft.expert_trajectories(config_of(tmp_path), chat, "train", 3, 0.3)
    losses = []  # by the model's own forward pass, one trajectory at a time
    for t in found:
        ids = torch.tensor([t.tokens])
        with torch.no_grad():
            logp = torch.log_softmax(tiny[0](input_ids=ids).logits.float(), -1)[0, :-1]
        losses += [-float(logp[i - 1, t.tokens[i]]) for i, m in enumerate(t.mask) if m]
    expected = sum(losses) / len(losses)

    class Run:
        cfg = sft.SFTConfig()
        policy = tiny[0]
        device = torch.device("cpu")

    Run.cfg.dtype = "float32"
    Run.cfg.microbatch_tokens = 700
    batch = collate(found)
    loss, _ = sft.cross_entropy(Run, int(batch["mask"].sum()), batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sft.mean_loss(Run, found) == pytest.approx(expected, rel=1e-5)


def test_every_epoch_holds_each_trajectory_once_in_an_order_of_its_own(tmp_path):
    cfg = config_of(tmp_path)
    steps = [sft.rows_of_step(10, cfg, step) for step in range(6)]
    assert [len(rows) for rows in steps] == [4, 4, 2, 4, 4, 2]
    first, second = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_run_learns_and_leaves_what_train_py_and_view_py_need(reference):
    rows = metrics(reference)
    assert len(rows) == 6
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 3]
    assert rows[3]["held_out_loss"] < rows[0]["held_out_loss"]
    config = json.loads((reference / "config.json").read_text())
    assert config["algo"] == "sft"
    assert len(read_jsonl(reference / "demos.jsonl")) == 12
    model, _ = rl.load_policy(str(reference / "final"))
    assert model.dtype == torch.float32
    done = run_script("view.py", reference)
    assert done.returncode == 0, done.stderr
    assert (reference / "curves.png").stat().st_size > 10_000


# ---- recorded trajectories ----


def test_trajectories_of_a_run_are_read_as_they_were_written(reference, tiny):
    chat = Chat(tiny[1])
    found = sft.read_demonstrations(reference / "demos.jsonl", chat, None)
    rows = read_jsonl(reference / "demos.jsonl")
    assert [(t.item, t.tokens, t.mask) for t in found] == [
        (row["item"], row["tokens"], row["mask"]) for row in rows]
    with pytest.raises(ValueError, match="no trajectory"):
        sft.read_demonstrations(reference / "demos.jsonl", chat, 1.5)


def test_empty_lines_and_line_separators_in_texts_are_no_damage(reference, tiny, tmp_path):
    lines = (reference / "demos.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["messages"][-1]["content"] += "\u2028end"
    path = tmp_path / "t"
    path.write_text("\n".join([json.dumps(first, ensure_ascii=False), "", *lines[1:], ""]) + "\n")
    found = sft.read_demonstrations(path, Chat(tiny[1]), None)
    assert len(found) == len(lines)
    assert found[0].messages[-1]["content"].endswith("\u2028end")


def test_a_resumed_run_does_not_need_the_file_that_it_began_with(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    flags = ["--trajectories", str(tmp_path / "moved.jsonl"), "--out", str(tmp_path / "run")]
    assert sft.parse_sft_config([*flags, "--resume"]).resume
    with pytest.raises(ValueError, match="there is no file"):
        sft.parse_sft_config(flags)
    # A run that has saved nothing begins anew, and does need it.
    with pytest.raises(ValueError, match="cannot read .*moved.jsonl: No such file"):
        sft.read_demonstrations(tmp_path / "moved.jsonl", Chat(tiny[1]), None)


def test_trajectories_of_another_action_format_are_refused(reference, tiny, tmp_path):
    path, chat = reference / "demos.jsonl", Chat(tiny[1])
    assert sft.read_demonstrations(path, chat, None, "react")
    for other in ("plain", "json"):
        with pytest.raises(ValueError, match=f"played with --action_format react, not {other}"):
            sft.read_demonstrations(path, chat, None, other)
    # A world that takes whole replies has no other format.
    changed = [json.loads(line) | {"env": "searchqa"} for line in path.read_text().splitlines()]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, changed)))
    assert sft.read_demonstrations(tmp_path / "t", chat, None, "plain")


def test_instructions_of_the_users_own_say_nothing_of_the_action_format(monkeypatch):
    own, plain = (sft.Trajectory("babyai_0", "babyai") for _ in range(2))
    own.messages = said("Instructions from a file of --prompts.", "a wall")
    plain.messages = said(envs.make_env("babyai").prompt, "a wall")
    for action_format in ("plain", "react"):
        sft.check_format([own], action_format)
    sft.check_format([plain], "plain")
    with pytest.raises(ValueError, match="played with --action_format plain, not react"):
        sft.check_format([plain], "react")

    def missing(name):
        raise envs.UserError(f"{name} needs the package 'py4j'")

    monkeypatch.setattr(envs, "world_class", missing)
    sft.check_format([own], "react")


def test_worlds_without_an_expert_here_are_learnt_from_trajectories(tmp_path):
    (tmp_path / "t.json").write_text("[]")
    flags = ["--env", "webshop", "--out", str(tmp_path / "r"), "--trajectories"]
    assert list(sft.parse_sft_config([*flags, str(tmp_path / "t.json")]).worlds) == ["webshop"]
    with pytest.raises(ValueError, match="'webshop' cannot be played here"):
        sft.parse_sft_config(["--env", "webshop", "--demos", "4", "--out", str(tmp_path / "r")])


def test_agentgyms_conversations_become_trajectories(tiny, tmp_path):
    chat = Chat(tiny[1])
    said = ["Play.", "OK. I'll play.", "A wall.", "Action: turn left", "A ball.",
            "Action: go to ball 1", "Done."]
    conversations = [{"from": "gpt" if i % 2 else "human", "loss": None, "value": text}
                     for i, text in enumerate(said)]
    conversations[3]["loss"] = False
    path = tmp_path / "traj.json"
    path.write_text(json.dumps([{"item_id": "babyai_7", "conversations": conversations}]))
    (t,) = sft.read_demonstrations(path, chat, None)
    assert (t.item, t.env, t.turns) == ("babyai_7", "babyai", 2)
    ids = chat.start("Play.", "A wall.", reply="OK. I'll play.")
    ids += chat.reply(said[3]) + chat.turn("A ball.", True)
    assert t.tokens[: len(ids)] == ids
    assert not any(t.mask[: len(ids)])
    learnt = [token for token, m in zip(t.tokens, t.mask) if m]
    assert learnt == chat.reply(said[5])


@pytest.mark.parametrize("text, message", [
    ("{", "holds no trajectories"),
    ('[{"item_id": "babyai_1"}]', "holds no trajectories"),
    ("[[]]", "holds no trajectories"),
    ("[" * 100_000, "holds no trajectories"),
    ('{"item": "babyai_1", "env": "babyai", "tokens": [1, 2], "mask": [false, false]}',
     "left to learn"),
    ('{"item": "babyai_1", "env": "babyai", "messages": [{}]}', "1 have no tokens"),
])
def test_a_file_that_cannot_be_learnt_from_is_one_line(tiny, tmp_path, text, message):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match=message):
        sft.read_demonstrations(tmp_path / "t", Chat(tiny[1]), None)


@pytest.mark.parametrize("field, value, message", [
    ("mask", [False, False, True], "different lengths"),
    ("logprobs", [0.0, 0.0], "different lengths"),
    ("mask", [True, False, False, True], "true at the first token"),
    ("tokens", [5, 6, 7, 99999], "not in the vocabulary"),
    ("tokens", [5, 6, 7, -7], "not in the vocabulary"),
    ("tokens", [5, 6, 7, 1.5], "whole numbers"),
    ("reward", "x", "another kind"),
])
def test_a_trajectory_with_a_broken_field_is_one_line(tiny, tmp_path, field, value, message):
    t = Trajectory("babyai_7", "babyai")
    t.append([5, 6, 7])
    t.append([8], [0.0])
    chat = Chat(tiny[1])
    (tmp_path / "t").write_text(json.dumps(t.to_json()))
    assert len(sft.read_demonstrations(tmp_path / "t", chat, 0.0)) == 1
    (tmp_path / "t").write_text(json.dumps(t.to_json() | {field: value}))
    with pytest.raises(ValueError, match=f"babyai_7 has .*{message}"):
        sft.read_demonstrations(tmp_path / "t", chat, 0.0)


def test_trajectories_of_another_tokenizer_are_refused(tiny, tmp_path):
    t = Trajectory("babyai_7", "babyai")
    t.messages = said("Play.", "A wall.")
    t.append([5, 6, 7])
    t.append([8], [0.0])
    (tmp_path / "t").write_text(json.dumps(t.to_json()))
    with pytest.raises(ValueError, match="another tokenizer"):
        sft.read_demonstrations(tmp_path / "t", Chat(tiny[1]), None)


def test_recorded_trajectories_that_are_too_long_are_left_out(reference, tiny, capsys):
    found = sft.read_demonstrations(reference / "demos.jsonl", Chat(tiny[1]), None)
    lengths = sorted(len(t.tokens) for t in found)
    limit = lengths[len(lengths) // 2]
    flags = ["--trajectories", str(reference / "demos.jsonl"), "--out", "runs/never-made"]
    cfg = sft.parse_sft_config([*flags, "--max_length", str(limit)])
    short = sft.drop_long(found, cfg)
    assert [t for t in found if len(t.tokens) <= limit] == short != found
    assert f"{len(found) - len(short)} of {len(found)} trajectories" in capsys.readouterr().err
    cfg = sft.parse_sft_config([*flags, "--max_length", str(lengths[0] - 1)])
    with pytest.raises(ValueError, match="every trajectory .* is longer than --max_length"):
        sft.drop_long(found, cfg)


# ---- stopped, resumed, refused ----


def test_a_killed_run_resumes_exactly(reference, tmp_path):
    out = tmp_path / "b"
    args = [*SMALL, "--out", str(out), "--save_every", "2", "--eval_every", "3"]
    child = subprocess.Popen([sys.executable, "sft.py", *args], cwd=ROOT, env=ENV,
                             stderr=subprocess.DEVNULL)
    while not (out / "checkpoints/step_000002/state.json").exists():
        time.sleep(0.02)
        assert child.poll() is None, "the run ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "final").exists()
    done = run_script("sft.py", *args, "--resume")
    assert done.returncode == 0, done.stderr
    assert without_rates(metrics(out)) == without_rates(metrics(reference))
    weights = "final/model.safetensors"
    assert (out / weights).read_bytes() == (reference / weights).read_bytes()
    again = run_script("sft.py", *args, "--resume")
    assert "finished" in again.stdout


def without_rates(rows):
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


@pytest.mark.parametrize("args, message", [
    (["--demos", "0"], "nothing to learn from"),
    (["--trajectories", "/no/such/file"], "there is no file"),
    (["--min_reward", "1"], "--min_reward is for --trajectories"),
    (["--noise", "1"], "--noise"),
    (["--env", "nowhere"], "unknown environment"),
])
def test_nonsense_is_one_line(tmp_path, args, message):
    done = run_script("sft.py", *SMALL, "--out", tmp_path / "r", *args)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.fixture
def empty_sets(tmp_path):
    for name in ("AgentItemId/babyai_train.json", "AgentEval/babyai/babyai_test.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / "data" / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("script, emptied", [
    (["sft.py", "--demos", "2"], "AgentItemId/babyai_train.json"),
    (["sft.py", "--demos", "2", "--eval_every", "1"], "AgentEval/babyai/babyai_test.json"),
    (["train.py", "--items_per_step", "2", "--rollouts_per_item", "2", "--steps", "1",
      "--eval_every", "1"], "AgentEval/babyai/babyai_test.json")])
def test_an_empty_item_set_is_one_line(empty_sets, script, emptied):
    (empty_sets / emptied).write_text("[]")
    done = run_script(*script, "--data", empty_sets, "--out", empty_sets / "run")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"{emptied} holds no items" in done.stderr


@pytest.mark.parametrize("bug", [KeyError, ValueError])
def test_a_world_that_crashes_while_the_expert_plays_costs_one_episode(
        bug, tiny, tmp_path, monkeypatch):
    step, calls = envs.make_env("babyai").__class__.step, []

    def crashing(self, action):
        calls.append(action)
        if len(calls) == 4:
            raise bug("a bug in the world")
        return step(self, action)

    def close(self):
        raise RuntimeError("another one")

    cfg = sft.parse_sft_config(["--demos", "5", "--out", str(tmp_path / "r")])
    monkeypatch.setattr("worlds.babyai.BabyAI.step", crashing)
    monkeypatch.setattr("worlds.babyai.BabyAI.close", close)
    assert len(sft.expert_trajectories(cfg, Chat(tiny[1]), "train", 5, 0.0)) == 5


def test_a_run_without_its_demonstrations_does_not_end_early(tmp_path):
    flags = ["--demos", "8", "--epochs", "2", "--batch", "4", "--horizon", "4", "--save_every", "1",
             "--out", str(tmp_path / "r")]
    assert run_script("sft.py", *flags).returncode == 0
    shutil.rmtree(tmp_path / "r/checkpoints/step_000004")
    shutil.rmtree(tmp_path / "r/final")  # as if it had been killed in its last step
    (tmp_path / "r/demos.jsonl").unlink()
    done = run_script("sft.py", *flags, "--resume")
    assert done.returncode == 2 and "demos.jsonl" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "r/final").exists()


@pytest.mark.parametrize("roles", ["system human gpt human gpt human".split(),
                                   "human gpt human human gpt".split()])
def test_conversations_in_another_order_are_refused(tiny, tmp_path, roles):
    said = [{"from": role, "value": f"This is number {n}."} for n, role in enumerate(roles)]
    (tmp_path / "t").write_text(json.dumps([{"item_id": "babyai_7", "conversations": said}]))
    with pytest.raises(ValueError, match="babyai_7: .* in turns"):
        sft.read_demonstrations(tmp_path / "t", Chat(tiny[1]), None)


@pytest.mark.parametrize("change", [{"logprobs": [0.0, 0.0, None]}, {"env": ["babyai"]},
                                    {"entropies": ["x"] * 3}])
def test_a_trajectory_that_cannot_be_written_again_is_one_line(tiny, tmp_path, change):
    t = Trajectory("babyai_7", "babyai")
    t.append([5, 6])
    t.append([7], [0.0])
    (tmp_path / "t").write_text(json.dumps(t.to_json() | change))
    with pytest.raises(ValueError, match="babyai_7 has"):
        sft.read_demonstrations(tmp_path / "t", Chat(tiny[1]), None)


def test_a_file_that_is_no_text_is_named(tiny, tmp_path):
    (tmp_path / "t.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match="t.jsonl.gz holds no trajectories"):
        sft.read_demonstrations(tmp_path / "t.jsonl.gz", Chat(tiny[1]), None)
