"""Micro-batches, processes, shards and interruptions do not change what a training run computes.

The gradient of a batch is the same however the batch is cut and however many processes compute it.
A run that is stopped goes on as if it had not been, also with another number of processes.
"""

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, random_model
from safetensors.torch import load_file
from test_train import ENV, SMALL, assert_same, begin, completed, metrics, read_jsonl, run
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from two_ranks import one_step

import parallel
import rl
from checkpoint import read_state, resume
from experiments import travel
from rollout import rollout
from trajectory import read_trajectories, write_trajectories

TWO_PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                 "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
LORA = ["--lora_rank", "4", "--lr", "0.01", "--kl_coef", "0.1", "--save_every", "1", *SMALL]
PPO = ["--save_every", "1", "--algo", "ppo", *SMALL, "--agent", "window", "--agent_args", "keep=0"]
# Of 24 trajectories with two slots a rank, most are dealt while others are played.
DEALT = ["--items_per_step", "6", "--rollouts_per_item", "4", "--slots", "2", "--horizon", "3",
         "--horizon_schedule", "fixed", "--steps", "2", "--max_tokens", "8", "--save_every", "1"]
WARM = ["--demos", "8", "--epochs", "1", "--horizon", "2", "--max_tokens", "8", "--eval_every", "1"]
# (trajectories, flags of `one_step`, max_tokens). Of three micro-batches on two ranks, one is
# computed twice, which must not count.
BY_TWO = [("whole", "", 300), ("whole", "shard", 8192), ("whole", "shard,recompute", 200),
          ("whole", "shard,padded", 200), ("segments", "shard", 300)]
BY_ONE = [("whole", "", 8192), ("whole", "", 300), ("whole", "padded", 8192),
          ("whole", "recompute", 8192), ("segments", "padded", 300),
          ("whole", "shard,recompute", 300)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run in segments, in one process, that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "one"
    completed("--out", out, "--set", "keep=3", *PPO)
    return out


@pytest.fixture(scope="module")
def played(tiny, pool, tmp_path_factory):
    """Files of trajectories of one segment each, of 173, 170 and 120 tokens, and of several."""
    folder = tmp_path_factory.mktemp("played")
    whole = rollout(*tiny, pool, ["babyai_50", "babyai_90", "textcraft_3"], 3, max_tokens=8)
    segments = rollout(*tiny, pool, ["babyai_50", "babyai_90"], 4, max_tokens=8, agent="window",
                       agent_args="keep=0")
    assert all(len(t.starts) > 1 for t in segments)
    write_trajectories(folder / "whole", whole)
    write_trajectories(folder / "segments", segments)
    return folder


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """The folder of models whose files FSDP2 loads."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in {
            "tied": random_model("qwen2").bfloat16(),
            "untied": random_model("qwen2", tie_word_embeddings=False),
            "converted": random_model("qwen3_moe", moe_intermediate_size=32, num_experts=4),
    }.items():
        model.save_pretrained(folder / name)
        tiny[1].save_pretrained(folder / name)
    # A dtype in config.json that is not the one of the weights must not round them.
    file = folder / "untied/config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    return folder


@pytest.fixture(scope="module")
def by_two(reference, played, models, tmp_path_factory):
    """The folder of what two processes have done together. They have ended well."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(reference, folder / "to_shards")
    shutil.rmtree(folder / "to_shards/final")
    shutil.rmtree(folder / "to_shards/checkpoints/step_000003")
    jobs = [["one_step", [str(played / file), str(folder / f"step{number}"), flags, max_tokens]]
            for number, (file, flags, max_tokens) in enumerate(BY_TWO)]
    # torchrun passes a signal on to its processes, which get it at different moments.
    child = begin(*DEALT, out=folder / "stopped", launcher=TWO_PROCESSES, stderr=subprocess.PIPE)
    time.sleep(random.Random(2).uniform(0, 0.5))
    child.terminate()
    child.communicate(timeout=300)
    assert not (folder / "stopped/final").exists()
    jobs += [[script, [*flags, "--out", str(folder / name)]] for name, script, flags in (
        ("stopped", "train", [*DEALT, "--resume"]),
        ("dealt", "train", DEALT), ("warm", "sft", WARM),
        ("lora", "train", [*LORA, "--shard", "true"]),
        ("rounded", "train", [*LORA, "--shard", "true", "--dtype", "bfloat16", "--steps", "1"]),
        ("asked", "train", [*DEALT, "--steps", "1", "--set", "arrival_order=true",
                            "--eval_every", "1"]),
        ("from_shards", "train", [*PPO, "--shard", "true", "--steps", "2"]),
        ("to_shards", "train", [*PPO, "--shard", "true", "--resume"]))]
    # Where the interpreter shuts down as usual, about every second try of `end_late` fails.
    jobs += [["load", [str(path) for path in models.iterdir()]], ["end_late", []]]
    (folder / "jobs").write_text(json.dumps(jobs))
    done = subprocess.run([*TWO_PROCESSES, "tests/two_ranks.py", str(folder / "jobs")], cwd=ROOT,
                          env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


# ---- the gradient of one batch ----


@pytest.mark.parametrize("ranks, variant", [*itertools.product([1], BY_ONE),
                                            *itertools.product([2], BY_TWO)])
def test_gradients_are_the_same_however_they_are_computed(played, by_two, ranks, variant, tmp_path):
    """The oracle is the model's own forward pass, segment by segment, in one process."""
    file, flags, max_tokens = variant
    one_step(played / file, tmp_path / "plain", "plain", 0)
    out = by_two / f"step{BY_TWO.index(variant)}" if ranks == 2 else tmp_path / "g"
    if ranks == 1:
        one_step(played / file, out, flags, max_tokens)
        if "shard" in flags:
            torch.distributed.destroy_process_group()
    expected, weights = (load_file(path / "weights") for path in (tmp_path / "plain", out))
    plain, stats = (json.loads((path / "stats.json").read_text())
                    for path in (tmp_path / "plain", out))
    before = load_file(rl.TINY_MODEL / "model.safetensors")
    assert max((expected[name] - before[name].float()).abs().max() for name in before) > 1e-3
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)
    assert stats["tokens"] == plain["tokens"]
    assert abs(stats["loss"] - plain["loss"]) < 1e-5
    assert abs(stats["grad_norm"] - plain["grad_norm"]) < 1e-4
    # Each way has computed what its flags say.
    if "padded" not in flags:
        assert stats["rows"] == 1 and stats["computed"] <= stats["fed"]
    elif max_tokens == 8192:
        assert stats["rows"] == 3 and stats["computed"] > stats["fed"]


# ---- trajectories are dealt to ranks ----


@pytest.fixture(scope="module")
def dealt(tmp_path_factory):
    """The folder of the run on one process that two processes share out."""
    out = tmp_path_factory.mktemp("dealt") / "one"
    completed(*DEALT, "--out", out)
    return out


def first_step(folder):
    """The trajectories of a run's first step, without what the last digits change."""
    rows = read_jsonl(folder / "trajectories/step_000000.jsonl")
    return [{key: row[key] for key in ("item", "group", "sample", "tokens", "mask", "rewards")}
            for row in rows]


def test_a_dealt_run_that_is_stopped_repeats_and_is_that_of_one_process(dealt, by_two):
    again = metrics(by_two / "stopped")
    assert again == metrics(by_two / "dealt")
    assert first_step(by_two / "dealt") == first_step(dealt)
    assert abs(again[0]["loss"] - metrics(dealt)[0]["loss"]) < 1e-5
    for row in again:
        both = [row["occupancy/rank0"], row["occupancy/rank1"]]
        assert 0.3 < min(both) <= max(both) <= 1
        assert abs(sum(both) / 2 - row["occupancy"]) < 1e-9


def test_trajectories_that_are_dealt_as_ranks_ask_are_those_of_one_process(dealt, by_two):
    """The evaluation before the step has a dealer of its own."""
    (row,) = metrics(by_two / "asked")
    assert first_step(by_two / "asked") == first_step(dealt)
    assert row["eval/turns"] > 0
    assert min(row[f"occupancy/rank{rank}"] for rank in range(2)) > 0.3
    assert metrics(by_two / "warm")[0]["eval/turns"] > 0  # sft.py's


@pytest.mark.parametrize("num_ranks, rooms, expected", [
    (8, [24] * 8, [16] * 8), (3, [500] * 3, [43, 43, 42]), (4, [4, 48, 100], [4, 48, 76])])
def test_ranks_that_ask_first_leave_a_share_to_the_others(num_ranks, rooms, expected, monkeypatch):
    """Each room is asked for by a rank of its own, but in the last row by one rank, whose later
    shares are as large as it asks for."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(parallel, "_get_default_store", lambda: store)
    monkeypatch.setattr(parallel, "ranks", lambda: (0, num_ranks))
    monkeypatch.setattr(parallel.FirstComeDealer, "numbers", itertools.repeat(0))
    signals = parallel.StopSignals()
    dealers = [parallel.FirstComeDealer(128, signals) for _ in range(num_ranks)]
    if len(rooms) < num_ranks:
        dealers = [dealers[0]] * num_ranks
    shares = [dealer.deal(room) for dealer, room in zip(dealers, rooms)]
    assert [len(share) for share in shares] == expected
    assert sorted(itertools.chain(*shares)) == list(range(128))


# ---- sharded models ----


def test_an_unsharded_model_is_whole_and_passes_through_no_hook_of_fsdp(monkeypatch):
    """Hooks make streams wait for one another, which a CUDA graph must not record."""
    calls = []

    def counted(hook):
        def count(*args):
            calls.append(hook.__name__)
            return hook(*args)
        return count

    for name in ("_pre_forward", "_post_forward"):
        monkeypatch.setattr(FSDPState, name, counted(getattr(FSDPState, name)))
    model, _ = rl.load_policy("tiny")
    rl.set_compute_paths(model, rl.FASTEST)
    num_parts = 1 + len(parallel.blocks(model))
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[False, False, True, True]])
    try:
        with torch.no_grad():
            expected = model(ids).logits
            parallel.shard(model, torch.device("cpu"))
            for _ in range(2):
                with parallel.unsharded(model), parallel.unsharded(model):  # as in train.py
                    assert torch.equal(model(ids).logits, expected)
                    assert not calls
                assert all(isinstance(p, DTensor) for p in model.parameters())
                assert torch.equal(model(ids).logits, expected)
                assert len(calls) == 2 * num_parts > 2
                calls.clear()
        # A backward pass after it works, with sharded parameters and gradients.
        rl.token_logprobs(model, ids, mask)[0].sum().backward()
        assert calls
        assert all(isinstance(p, DTensor) and p.grad.to_local().any() for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["tied", "untied", "converted"])
@pytest.mark.parametrize("kind", ["policy", "critic", "reference"])
def test_shards_hold_the_weights_that_from_pretrained_reads(by_two, models, name, kind):
    """The oracle: transformers, which loads the whole model in the wanted dtype."""
    dtype = torch.bfloat16 if kind == "reference" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(models / name, dtype=dtype)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    if kind == "critic":
        body = model.base_model
        tensors = dict(body.named_parameters()) | dict(body.named_buffers())
        expected = {f"base_model.{name}": tensor for name, tensor in tensors.items()}
        expected |= {"head.weight": torch.zeros(1, 64), "head.bias": torch.zeros(1)}
    found = load_file(models / name / f"{kind}.loaded")
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


# ---- runs that are stopped and go on ----


def assert_close(out, reference):
    expected, actual = metrics(reference), metrics(out)
    assert len(actual) == len(expected) == 3
    for row, expected_row in zip(actual, expected):
        for key in ("loss", "grad_norm", "reward", "success", "turns", "segments", "entropy",
                    "value_loss", "explained_variance", "weight_change"):
            assert abs(row[key] - expected_row[key]) < 1e-5, (row["step"], key)


def test_a_run_goes_on_with_another_number_of_processes(reference, by_two):
    assert_close(by_two / "to_shards", reference)
    out = by_two / "from_shards"
    assert len(metrics(out)) == 2
    saved = out / "checkpoints/step_000002"
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert set(read_state(saved)["sha256"]) == files - {"state.json"}
    assert "going on" not in run("--out", out, *PPO, "--shard", "false", "--resume").stderr
    assert_close(out, reference)


@pytest.mark.parametrize("how", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), "nobody reads its output"])
def test_a_run_stopped_at_a_random_moment_gives_every_bit_of_one_that_was_not(
        reference, how, tmp_path):
    """test_train.py kills a run, and experiments/kill.py does it with more interruptions."""
    out = tmp_path / "r"
    child = begin(*PPO, "--save_every", "100", out=out, stdout=subprocess.PIPE,
                  stderr=subprocess.STDOUT)
    if isinstance(how, str):
        child.stdout.close()
    else:
        time.sleep(random.Random(1).random())
        child.send_signal(how)
        assert f"{how.name}: saved before step" in child.stdout.read()
    assert child.wait(timeout=300) == 0
    assert list((out / "checkpoints").iterdir()) and not (out / "final").exists()
    completed("--out", out, *PPO, "--resume")
    assert_same(out, reference)


# ---- what a run leaves behind ----


def test_lora_trains_adapters_alone_and_leaves_a_plain_model(tiny, by_two, tmp_path):
    completed("--out", tmp_path, *LORA)
    rows = metrics(tmp_path)
    assert rows[2]["kl"] > 0
    assert rows[0]["logprob_gap"] < 1e-4
    checkpoint = tmp_path / "checkpoints/step_000003"
    tensors = load_file(next((checkpoint / "training").iterdir()))
    assert tensors and all(".lora_" in name for name in tensors)

    model, _ = rl.load_policy("tiny")
    rl.add_lora(model, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    resume(checkpoint, {"policy": (model, optimizer)})
    final, _ = rl.load_policy(str(tmp_path / "final"))
    whole, sharded = (load_file(folder / "final/model.safetensors")
                      for folder in (tmp_path, by_two / "lora"))
    torch.testing.assert_close(sharded, whole, atol=1e-4, rtol=1e-4)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        adapted = model(ids).logits
        original = tiny[0](ids).logits
        torch.testing.assert_close(final(ids).logits, adapted, atol=1e-4, rtol=1e-4)
        assert (adapted - original).abs().max() > 1e-3
        with rl.adapters_off(model):
            torch.testing.assert_close(model(ids).logits, original)

    # It goes on elsewhere from its adapters alone.
    stopped, there = tmp_path / "stopped", tmp_path / "there"
    shutil.copytree(tmp_path, stopped, ignore=shutil.ignore_patterns("final", "step_000003*"))
    episodes = [stopped / f"trajectories/{name}_000000.jsonl" for name in ("step", "eval")]
    shutil.copy(*episodes)
    travel.pack(stopped, tmp_path / "run.tar")
    weights = (tmp_path / "final/model.safetensors").stat().st_size
    assert (tmp_path / "run.tar").stat().st_size < weights
    travel.unpack(tmp_path / "run.tar", there)
    outcomes = [[(t.item, t.turns, t.success) for t in read_trajectories(path)]
                for path in (episodes[0], there / episodes[1].relative_to(stopped))]
    assert outcomes[0] == outcomes[1] and len(outcomes[0]) > 1
    completed("--out", there, *LORA, "--resume")
    for name in ("final/model.safetensors", "trajectories/step_000002.jsonl"):
        assert (there / name).read_bytes() == (tmp_path / name).read_bytes()
    assert metrics(there)[2]["kl"] == rows[2]["kl"]


def test_a_run_in_segments_counts_repeated_prompts_once(reference):
    for row in metrics(reference):
        assert row["segments"] > 1.5 and row["logprob_gap"] < 1e-4
        assert 0.3 < row["forwarded_per_kept"] < 0.5  # not 1: samples of an item share a prompt


def test_final_is_the_last_checkpoint_in_a_plain_folder(reference):
    final, saved = (AutoModelForCausalLM.from_pretrained(reference / name).state_dict()
                    for name in ("final", "checkpoints/step_000003"))
    assert all(torch.equal(saved[name], weight) for name, weight in final.items())
