"""Checkpoints: complete or absent, never trained on if damaged, exact for any optimizer."""

import json
import shutil

import pytest
import torch
from conftest import random_model

import checkpoint
import rl

OPTIMIZERS = {
    "AdamW": dict(lr=1e-3, weight_decay=0.0, fused=True), "Adam": dict(amsgrad=True),
    "SGD": dict(lr=1.0, momentum=0.9, nesterov=True), "RMSprop": dict(momentum=0.5),
    "Adagrad": {}, "Adadelta": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "ASGD": {}, "Rprop": {},
    "Adafactor": {}}


def trainable(name="AdamW"):
    """A small policy and a critic, each with its optimizer."""
    modules = {"policy": random_model("qwen2"), "critic": rl.Critic("tiny")}
    return {key: (module, getattr(torch.optim, name)(module.parameters(), **OPTIMIZERS[name]))
            for key, module in modules.items()}


def take_step(trained, seed):
    """An optimizer step with random gradients."""
    torch.manual_seed(seed)
    for module, optimizer in trained.values():
        for p in module.parameters():
            p.grad = torch.randn(p.shape) * 1e-3
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def save(folder, trained, tokenizer, **state):
    checkpoint.save(folder, trained["policy"][0], tokenizer, state, trained)


def assert_equal(trained, again):
    for key in trained:
        for p, q in zip(trained[key][0].parameters(), again[key][0].parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_exactly_as_if_it_had_not_stopped(tiny, tmp_path, name, steps):
    """A checkpoint before the first step counts, too."""
    trained, again = trainable(name), trainable(name)
    for seed in range(steps):
        take_step(trained, seed)
    save(tmp_path / "c", trained, tiny[1], step=3)
    assert len(list((tmp_path / "c/training").iterdir())) > (1 if steps else 0)
    again["policy"][0].load_state_dict(rl.load_policy(str(tmp_path / "c"))[0].state_dict())
    assert checkpoint.resume(tmp_path / "c", again)["step"] == 3
    for seed in (7, 8):
        take_step(trained, seed)
        take_step(again, seed)
    assert_equal(trained, again)


def test_another_optimizer_than_the_one_that_was_saved_is_refused(tiny, tmp_path):
    trained = trainable()
    take_step(trained, 0)
    save(tmp_path / "c", trained, tiny[1])
    with pytest.raises(BaseException, match="Missing key"):
        checkpoint.resume(tmp_path / "c", trainable("Adagrad"))


def test_a_folder_of_other_files_is_not_replaced_by_a_model(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").write_text("mine")
    with pytest.raises(OSError, match="notes"):
        checkpoint.save(tmp_path / "notes", *tiny)
    assert (tmp_path / "notes/notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        checkpoint.save(tmp_path / "empty", *tiny)  # an empty folder, then one with a model


def test_a_file_that_another_process_cannot_see_makes_no_checkpoint(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.dcp, "save",
                        lambda *args, **kw: shutil.rmtree(tmp_path / "c.partial"))
    with pytest.raises(OSError, match="a file system that all machines share"):
        save(tmp_path / "c", trainable(), tiny[1])
    assert not (tmp_path / "c").exists()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """The folder of a run with two checkpoints."""
    run = tmp_path_factory.mktemp("runs") / "r"
    trained = trainable()
    take_step(trained, 0)
    for step in (6, 7):
        save(run / f"checkpoints/step_{step:06d}", trained, tiny[1], step=step,
             horizon={"babyai": {"stage": 1, "means": [0.1, 1e-7]}})
    return run


def test_what_a_killed_run_leaves_behind_is_no_checkpoint(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "r")
    before, newest = checkpoint.named(run)
    (run / "checkpoints/step_000008.partial").mkdir()
    shutil.copytree(newest, run / "checkpoints/step_000006_best")  # a copy that the user has made
    assert checkpoint.named(run) == [before, newest]
    assert checkpoint.newest(run) == (newest, [])
    checkpoint.drop_old(run, 1)
    checkpoint.tidy(run, 7)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "step_000007", "step_000006_best"}
    # Going on before a checkpoint, which was found damaged, sets it aside.
    checkpoint.tidy(run, 6)
    assert checkpoint.newest(run) == (None, [])
    assert (run / "checkpoints/damaged_step_000007").exists()


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def delete(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, cut, delete])
def test_a_damaged_file_makes_the_checkpoint_before_the_newest_intact_one(saved, damage):
    before, newest = checkpoint.named(saved)
    files = [path for path in newest.rglob("*") if path.is_file()]
    names = {str(path.relative_to(newest)) for path in files}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json", "chat_template.jinja", "state.json"} < names
    assert any(name.startswith("training/") for name in names)
    for path in files:
        whole = path.read_bytes()
        damage(path)
        intact, (note,) = checkpoint.newest(saved)
        path.write_bytes(whole)
        assert intact == before, path
        assert str(newest) in note
    assert checkpoint.newest(saved) == (newest, [])


def test_damaged_checkpoints_alone_are_refused(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "r")
    delete(run / "checkpoints/step_000006/tokenizer.json")
    flip_a_bit(run / "checkpoints/step_000007/model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors.*damaged.*tokenizer\.json"):
        checkpoint.newest(run)
    # One of an older version names the tag that reads it.
    shutil.rmtree(run / "checkpoints/step_000006")
    (run / "checkpoints/step_000007/state.json").write_text('{"step": 7, "sha256": {}}')
    with pytest.raises(ValueError, match="3fc98f8"):
        checkpoint.newest(run)


def test_no_flipped_bit_of_state_json_goes_unseen(tmp_path):
    state = {"step": 7, "horizon": {}, "optimizers": {"policy.lr": 3.0}, "sha256": {"a": "f0"}}
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state | {"own": checkpoint.digest(state)}))
    whole = path.read_bytes()
    assert checkpoint.read_state(tmp_path) == state
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(ValueError):
            checkpoint.read_state(tmp_path)
