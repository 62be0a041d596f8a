"""Checkpoints: complete or absent, never trained on if damaged, exact for any optimizer."""

import copy
import json
import shutil

import pytest
import torch
from conftest import random_model
from torch.distributed.checkpoint import CheckpointException

import checkpoint
import rl


def test_a_folder_of_other_files_is_not_replaced_by_a_model(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").write_text("mine")
    with pytest.raises(OSError, match="notes"):
        checkpoint.save(tmp_path / "notes", *tiny)
    assert (tmp_path / "notes/notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        checkpoint.save(tmp_path / "empty", *tiny)  # an empty folder, then one with a model


def trained_once(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    return {"policy": (model, optimizer)}


def test_a_checkpoint_of_several_files_is_resumed_exactly(tiny, tmp_path):
    model = copy.deepcopy(tiny[0])
    trained = trained_once(model)
    checkpoint.save(tmp_path / "step_000001", model, tiny[1], {"step": 1}, trained)
    assert len(list((tmp_path / "step_000001/training").iterdir())) > 1
    again = trained_once(copy.deepcopy(tiny[0]))
    for state in again["policy"][1].state.values():
        state["exp_avg"].zero_()
    checkpoint.resume(tmp_path / "step_000001", again)
    for found, expected in zip(again["policy"][1].state.values(),
                               trained["policy"][1].state.values(), strict=True):
        assert torch.equal(found["exp_avg"], expected["exp_avg"])


def test_checkpoints_are_whole_or_absent(tiny, tmp_path):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        optimizer.step()
    folder = tmp_path / "checkpoints/step_000007"
    checkpoint.save(folder, model, tokenizer, {"step": 7}, {"policy": (model, optimizer)})
    # What a killed run leaves behind.
    (tmp_path / "checkpoints/step_000008.partial").mkdir()
    (tmp_path / "checkpoints/step_000008.partial/state.json").write_text("{}")
    # A copy that the user has made.
    copied = tmp_path / "checkpoints/step_000006_best"
    shutil.copytree(folder, copied)
    assert checkpoint.named(tmp_path) == [folder]
    old = shutil.copytree(folder, tmp_path / "checkpoints/step_000005")
    checkpoint.drop_old(tmp_path, 1)
    assert folder.exists() and copied.exists() and not old.exists()

    loaded, _ = rl.load_policy(str(folder))
    loaded_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.0, weight_decay=0.0)
    assert checkpoint.resume(folder, {"policy": (loaded, loaded_optimizer)})["step"] == 7
    states = list(zip(optimizer.state.values(), loaded_optimizer.state.values(), strict=True))
    assert states
    for saved, resumed in states:
        assert float(saved["step"]) == 2
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[name], resumed[name])
    weights, loaded_weights = model.state_dict(), loaded.state_dict()
    assert weights.keys() == loaded_weights.keys()
    assert all(torch.equal(weights[name], loaded_weights[name]) for name in weights)
    assert list(folder.glob("*.safetensors"))
    assert not list(folder.glob("*.bin"))


@pytest.fixture(scope="module")
def run_folder(tiny, tmp_path_factory):
    """The folder of a run with two checkpoints, of a small model."""
    run = tmp_path_factory.mktemp("runs") / "r"
    model = random_model("qwen2")
    trained = trained_once(model)
    for step in (6, 7):
        state = {"step": step, "horizon": {"babyai": {"stage": 1, "means": [0.1, 1e-7]}}}
        checkpoint.save(run / f"checkpoints/step_{step:06d}", model, tiny[1], state, trained)
    return run


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def delete(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, cut, delete])
def test_a_damaged_file_makes_the_checkpoint_before_the_newest_intact_one(
        run_folder, damage, tmp_path):
    before, newest = sorted((run_folder / "checkpoints").iterdir())
    assert checkpoint.newest(run_folder) == (newest, [])
    files = [path for path in newest.rglob("*") if path.is_file()]
    names = {str(path.relative_to(newest)) for path in files}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json", "chat_template.jinja", "state.json"} < names
    assert any(name.startswith("training/") for name in names)
    for path in files:
        whole = path.read_bytes()
        damage(path)
        intact, (note,) = checkpoint.newest(run_folder)
        path.write_bytes(whole)
        assert intact == before, path
        assert path.name in note and str(newest) in note
    assert checkpoint.newest(run_folder) == (newest, [])


def test_damaged_checkpoints_alone_are_refused_and_none_at_all_are_not(run_folder, tmp_path):
    run = tmp_path / "r"
    shutil.copytree(run_folder, run)
    tokenizer, weights = [
        run / "checkpoints" / name
        for name in ("step_000006/tokenizer.json", "step_000007/model.safetensors")]
    delete(tokenizer)
    flip_a_bit(weights)
    with pytest.raises(ValueError) as refused:
        checkpoint.newest(run)
    assert weights.name in str(refused.value) and tokenizer.name in str(refused.value)

    # Only folders that never got their names: the run was killed before its first checkpoint.
    shutil.rmtree(run / "checkpoints/step_000006")
    (run / "checkpoints/step_000007").rename(run / "checkpoints/step_000007.partial")
    assert checkpoint.newest(run) == (None, [])


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


def test_a_checkpoint_of_an_older_version_names_the_tag_that_reads_it(tmp_path):
    folder = tmp_path / "checkpoints/step_000007"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"step": 7, "horizon": {}, "sha256": {}}')
    with pytest.raises(ValueError, match="before-4050"):
        checkpoint.newest(tmp_path)


OPTIMIZERS = {
    "AdamW": dict(lr=1e-3, weight_decay=0.0, fused=True), "Adam": dict(amsgrad=True),
    "SGD": dict(lr=1.0, momentum=0.9, nesterov=True), "RMSprop": dict(momentum=0.5),
    "Adagrad": {}, "Adadelta": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "ASGD": {}, "Rprop": {},
    "Adafactor": {},
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_exactly_as_if_it_had_not_stopped(tiny, tmp_path, name, steps):
    """The policy and the critic take steps with random gradients; a checkpoint before the first
    step counts, too."""
    def make(module):
        return getattr(torch.optim, name)(module.parameters(), **OPTIMIZERS[name])

    def step(trained, seed):
        torch.manual_seed(seed)
        for module, optimizer in trained.values():
            for p in module.parameters():
                p.grad = torch.randn(p.shape) * 1e-3
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    policy, critic = copy.deepcopy(tiny[0]), rl.Critic("tiny")
    trained = {"policy": (policy, make(policy)), "critic": (critic, make(critic))}
    for seed in range(steps):
        step(trained, seed)
    folder = tmp_path / "checkpoints/step_000003"
    checkpoint.save(folder, policy, tiny[1], {"step": 3}, trained)
    policy, critic = rl.load_policy(str(folder))[0], rl.Critic("tiny")
    again = {"policy": (policy, make(policy)), "critic": (critic, make(critic))}
    assert checkpoint.resume(folder, again)["step"] == 3
    for seed in (7, 8):
        for part in (trained, again):
            step(part, seed)
    for key in trained:
        for p, q in zip(trained[key][0].parameters(), again[key][0].parameters(), strict=True):
            assert torch.equal(p, q)


def test_an_optimizer_that_cannot_be_saved_or_does_not_fit_is_refused(tiny, tmp_path):
    model = copy.deepcopy(tiny[0])
    checkpoint.save(tmp_path / "step_000001", model, tiny[1], {"step": 1}, trained_once(model))
    other = {"policy": (model, torch.optim.Adagrad(model.parameters()))}
    with pytest.raises(CheckpointException, match="optimizer"):
        checkpoint.resume(tmp_path / "step_000001", other)
