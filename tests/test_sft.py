"""The command sft.py: what is learnt, from whom, and that it goes on where it was stopped."""

import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from test_train import begin, completed, metrics, read_jsonl, refused

import agent
import envs
import rl
import schedule
import sft
from agent import Chat
from envs import EnvError
from experiments.effective_horizon import effective_horizon
from trajectory import Trajectory, read_trajectories
from update import collate

SMALL = ["--demos", "12", "--epochs", "2", "--batch", "4", "--horizon", "4", "--max_length", "900"]


def config_of(tmp_path, *args):
    return sft.parse_sft_config([*SMALL, "--out", str(tmp_path / "r"), *args])


def run_at_its_start(tiny):
    return SimpleNamespace(policy=tiny[0], device=torch.device("cpu"),
                           cfg=SimpleNamespace(dtype="float32", microbatch_tokens=700))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a small run that was not interrupted."""
    out = tmp_path_factory.mktemp("sft") / "a"
    completed(*SMALL, "--out", out, "--save_every", "2", "--eval_every", "3", script="sft.py")
    return out


# ---- what is learnt ----


def test_an_experts_replies_are_learnt_and_random_ones_are_not(tiny, tmp_path):
    chat = Chat(tiny[1])
    cfg = config_of(tmp_path)
    env = envs.make_env("babyai")
    learnt = {True: 0, False: 0}
    for item in envs.items("babyai", "train")[:30]:
        t = sft.demonstrate(env, item, chat, cfg, 0.5, random.Random(item))
        # Play it again, and ask the expert what it would have done.
        observation = env.reset(int(item.split("_")[1]))
        ids = chat.prompt([agent.user(agent.instructions(env.prompt, "react")),
                           agent.assistant("OK"), agent.user(observation)])
        assert t.tokens[: len(ids)] == ids
        place = len(ids)
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
                between = chat.turns([agent.user(step.observation)], True)
                assert not any(t.mask[place : place + len(between)])
                place += len(between)
        assert place == len(t.tokens)
    assert min(learnt.values()) > 10


def test_an_expert_that_chooses_teaches_all_its_tokens(tmp_path):
    def learnt(name):
        flags = ["--demos", "4", "--batch", "4", "--epochs", "1", "--agent", name]
        completed(*SMALL, *flags, "--eval_every", "1", "--out", tmp_path / name, script="sft.py")
        row = read_jsonl(tmp_path / name / "metrics.jsonl")[0]
        return row["learnt_tokens"], row["held_out_loss"]

    assert learnt("choose") == learnt("react")


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
    with pytest.raises(ValueError, match="0 of 6 episodes.*the power is out"):
        sft.expert_trajectories(config_of(tmp_path), Chat(tiny[1]), "train", 2, 0.0)


def test_the_loss_is_the_mean_over_the_replies_tokens_alone(tiny, tmp_path):
    found = sft.expert_trajectories(config_of(tmp_path), Chat(tiny[1]), "train", 3, 0.3)
    losses = []  # by the model's own forward pass, one trajectory at a time
    for t in found:
        ids = torch.tensor([t.tokens])
        with torch.no_grad():
            logp = torch.log_softmax(tiny[0](input_ids=ids).logits.float(), -1)[0, :-1]
        losses += [-float(logp[i - 1, t.tokens[i]]) for i, m in enumerate(t.mask) if m]
    expected = sum(losses) / len(losses)
    run = run_at_its_start(tiny)
    batch = collate(found)
    loss, _ = sft.cross_entropy(run, int(batch["mask"].sum()), batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sft.mean_loss(run, found) == pytest.approx(expected, rel=1e-5)


def test_every_epoch_holds_each_trajectory_once_in_an_order_of_its_own():
    steps = [schedule.rows_of_step(10, 4, 0, step) for step in range(6)]
    assert [len(rows) for rows in steps] == [4, 4, 2, 4, 4, 2]
    first, second = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_run_learns_and_leaves_what_train_py_and_view_py_need(reference, tiny):
    rows = metrics(reference)
    assert len(rows) == 6
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 3]
    assert rows[3]["held_out_loss"] < rows[0]["held_out_loss"]
    held_out = read_trajectories(reference / "held_out.jsonl")
    assert rows[0]["held_out_loss"] == pytest.approx(
        sft.mean_loss(run_at_its_start(tiny), held_out), rel=1e-5)
    assert effective_horizon(held_out) == 1
    held_out[0].turns, held_out[1].success = held_out[0].turns + 3, False
    total = sum(t.turns for t in held_out if t.success)
    assert effective_horizon(held_out) == total / (total - 3)
    assert json.loads((reference / "config.json").read_text())["algo"] == "sft"
    for name, split in (("demos", "train"), ("held_out", "test")):
        played = read_jsonl(reference / f"{name}.jsonl")
        assert {t["item"] for t in played} <= set(envs.items("babyai", split))
    assert len(read_jsonl(reference / "demos.jsonl")) == 12
    assert rl.load_policy(str(reference / "final"))[0].dtype == torch.float32
    completed(reference, script="view.py")
    assert (reference / "curves.png").stat().st_size > 10_000


# ---- recorded trajectories ----


def test_trajectories_of_a_run_are_read_as_they_were_written(reference, tiny, tmp_path, capsys):
    path, chat = reference / "demos.jsonl", Chat(tiny[1])

    def read(*flags, path=path):
        return sft.read_demonstrations(path, chat, config_of(tmp_path, "--trajectories", str(path),
                                                             *flags))

    rows = read_jsonl(path)
    found = read()
    assert [(t.item, t.tokens, t.mask) for t in found] == [
        (row["item"], row["tokens"], row["mask"]) for row in rows]
    # Empty lines, and line separators in texts, are no damage.
    rows[0]["messages"][-1]["content"] += "\u2028end"
    (tmp_path / "t").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    again = read(path=tmp_path / "t")
    assert again[0].messages[-1]["content"].endswith("\u2028end") and again[1:] == found[1:]

    # What the flags leave out.
    lengths = sorted(len(t.tokens) for t in found)
    short = read("--max_length", str(lengths[5]))
    assert [t for t in found if len(t.tokens) <= lengths[5]] == short != found
    assert f"{len(short)} of {len(found)} trajectories" in capsys.readouterr().err
    for flags in (["--max_length", str(lengths[0] - 1)], ["--min_reward", "1.5"]):
        with pytest.raises(ValueError, match="no trajectory"):
            read(*flags)
    for other in ("tags", "json"):
        with pytest.raises(ValueError, match="played with --action_format react"):
            read("--action_format", other)


BROKEN = [{"score": math.nan}, {"score": 1e308}, {"score": -0.5}, {"reward": math.inf},
          {"turns": -7}, {"turns": 2.0}, {"valid_actions": 9}, {"success": "yes"}, {"success": 1},
          {"status": "won"}, {"item": 7}, {"messages": "Play."}, {"step": None},
          {"messages": [{"role": "user", "content": 3}]}, {"rewards": [[]]}, {"logprobs": ["0"]},
          {"invalid_turns": [True]}, {"states": 3}, {"tokens": 3}, {"mask": [1]}]


@pytest.mark.parametrize("change, message", [
    (lambda row: {"mask": [place > 20 for place in range(len(row["mask"]))]}, "mask"),
    (lambda row: {"mask": [*[False] * (len(row["mask"]) - 2), True, True]}, "mask"),
    (lambda row: {"messages": [*row["messages"][:3], agent.assistant("stay"),
                               *row["messages"][4:]]}, "mask"),
    (lambda row: {"messages": [*row["messages"][:4], agent.user("A red ball.")] * 2}, "message"),
    (lambda row: {"tokens": [*row["tokens"][:-20], *[9] * 20]}, "message"),
])
def test_tokens_and_mask_are_those_of_the_messages(tiny, tmp_path, change, message):
    chat, path, cfg = Chat(tiny[1]), tmp_path / "t", config_of(tmp_path)
    item = envs.items("babyai", "train")[0]
    t = sft.demonstrate(envs.make_env("babyai"), item, chat, cfg, 0.0, random.Random(0))
    path.write_text(json.dumps(t.to_json()))
    assert sft.read_demonstrations(path, chat, cfg) == [t]
    path.write_text(f"{json.dumps(t.to_json())}\n" * 2, "utf-16")
    with pytest.raises(ValueError, match="line 1 of"):
        sft.read_demonstrations(path, chat, cfg)
    path.write_text(json.dumps(t.to_json() | change(t.to_json())))
    with pytest.raises(ValueError, match=message):
        sft.read_demonstrations(path, chat, cfg)


@pytest.mark.parametrize("change, message", [
    (lambda row: {"mask": row["mask"][1:]}, "lengths"), (lambda row: {"starts": [1]}, "segments"),
    (lambda row: {"tokens": [9, *row["tokens"][1:]]}, "another tokenizer"),
    (lambda row: {"tokens": [*row["tokens"][:-1], 99999]}, "is left to learn from"),
    (lambda row: {"mask": [False] * len(row["mask"])}, "left to learn"),
    (lambda row: {"status": "env_error"}, "left to learn"),
    # A held-out item by another name, or as another world's.
    *((lambda row, item=item: {"item": item}, "item id")
      for item in ("babyai_08", "babyai_8\n", "babyai_\u0668")),
    (lambda row: {"item": "babyai_8", "env": "textcraft"}, "held-out items"),
    *((lambda row, broken=broken: broken, "line 1 of") for broken in BROKEN),
])
def test_a_trajectory_with_a_broken_field_is_one_line(tiny, tmp_path, change, message):
    chat, path = Chat(tiny[1]), tmp_path / "t"
    t = Trajectory("babyai_7", "babyai")
    t.messages = [agent.user("Play."), agent.assistant("OK"), agent.user("A wall.")]
    t.append(chat.prompt(t.messages))
    t.append([8], [0.0])
    path.write_text(json.dumps(t.to_json()))
    cfg = config_of(tmp_path, "--trajectories", str(path), "--min_reward", "0")
    assert sft.read_demonstrations(path, chat, cfg) == [t]
    path.write_text(json.dumps(t.to_json() | change(t.to_json())))
    with pytest.raises(ValueError, match=message):
        sft.read_demonstrations(path, chat, cfg)


@pytest.mark.parametrize("data, message", [
    (b"[" * 100_000, "holds no"), (b'[{"item": "babyai_8"', "holds no"),
    (b"{", "line 1"), (b"[[]]", "holds no"), (b"\x1f\x8b\x08\x00", "holds no"),
    (b'[{"item_id": "babyai_1", "conversations": [{"from": "system", "value": "x"}]}]', "system"),
    (b'{"item_id": "babyai_1", "messages": [], "rewards": 1}', "rewards"),
    *[(json.dumps([{"item_id": "babyai_1", "messages": [
        {"role": role, "content": "x"} for role in ("user", "assistant", "user")] + [
            {"role": "assistant", "content": "y"} | wrong]}]).encode(), named)
      for wrong, named in (({"loss": "false"}, "loss"), ({"loss": 2}, "loss"),
                           ({"weight": 0}, "weight"), ({"content": ["y"]}, "no text"),
                           ({"role": "user"}, "take turns"))],
])
def test_a_file_that_cannot_be_learnt_from_is_named(tiny, tmp_path, data, message):
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=rf"t\.jsonl.*{message}"):
        sft.read_demonstrations(tmp_path / "t.jsonl", Chat(tiny[1]), config_of(tmp_path))


def test_agentgyms_conversations_become_trajectories(tiny, tmp_path):
    chat = Chat(tiny[1])
    said = ["Play.", "OK. I'll play.", "A wall.", "Action: turn left", "A ball.",
            "Action: go to ball 1", "Done."]
    conversations = [{"from": "gpt" if i % 2 else "human", "loss": None, "value": text}
                     for i, text in enumerate(said)]
    conversations[3]["loss"] = False
    path = tmp_path / "traj.json"
    path.write_text(json.dumps([{"item_id": "babyai_7", "conversations": conversations}]))
    (t,) = sft.read_demonstrations(path, chat, config_of(tmp_path))
    assert (t.item, t.env, t.turns) == ("babyai_7", "babyai", 2)
    assert [message["content"] for message in t.messages] == said
    ids = chat.prompt(t.messages[:3]) + chat.reply(said[3]) + chat.turns(t.messages[4:5], True)
    assert t.tokens[: len(ids)] == ids
    assert not any(t.mask[: len(ids)])
    assert [token for token, m in zip(t.tokens, t.mask) if m] == chat.reply(said[5])
    # Other ways to write the same.
    entry = {"item_id": "babyai_7", "reward": 0.5, "success": False, "messages": [
        {"role": m["role"], "content": m["content"]} for m in t.messages]}
    entry["messages"][3]["loss"] = 0
    path.write_text("\ufeff" + json.dumps(entry) + "\n", encoding="utf-8")
    (other,) = sft.read_demonstrations(path, chat, config_of(tmp_path))
    assert (other.tokens, other.mask, other.messages) == (t.tokens, t.mask, t.messages)
    assert (other.reward, other.success, t.reward, t.success) == (0.5, False, 1.0, True)
    # Held-out items are learnt only if they are asked for.
    path.write_text(json.dumps(entry | {"item_id": "babyai_8"}))
    with pytest.raises(ValueError, match="babyai_8"):
        sft.read_demonstrations(path, chat, config_of(tmp_path))
    assert sft.read_demonstrations(path, chat, config_of(tmp_path, "--set", "learn_held_out=true"))


# ---- stopped and resumed ----


def without_rates(rows):
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def test_a_killed_run_resumes_exactly(reference, tmp_path):
    out = tmp_path / "b"
    args = ["--out", str(out), *SMALL, "--save_every", "2", "--eval_every", "3"]
    child = begin(*args[2:], out=out, until="checkpoints/step_000002/state.json", script="sft.py")
    child.kill()
    child.wait()
    assert not (out / "final").exists()
    completed(*args, "--resume", script="sft.py")
    assert without_rates(metrics(out)) == without_rates(metrics(reference))
    weights = "final/model.safetensors"
    assert (out / weights).read_bytes() == (reference / weights).read_bytes()
    assert "finished" in completed(*args, "--resume", script="sft.py")


def test_a_run_without_its_demonstrations_does_not_end_early(reference, tmp_path):
    out = shutil.copytree(reference, tmp_path / "r")
    shutil.rmtree(out / "final")  # as if it had been killed
    (out / "demos.jsonl").unlink()
    flags = [*SMALL, "--out", out, "--eval_every", "3", "--resume"]
    assert "demos.jsonl" in refused(*flags, script="sft.py")
    (out / "demos.jsonl").touch()  # as an interrupted power supply may leave it
    assert "demos.jsonl is empty" in refused(*flags, script="sft.py")
    assert not (out / "final").exists()
