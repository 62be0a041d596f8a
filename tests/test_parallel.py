"""Micro-batches, processes, shards and interruptions do not change what a training run computes.

The gradient of a batch is the same however the batch is cut and however many processes compute it.
A run that is stopped goes on as if it had not been, also with another number of processes.
"""

import doctest
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT, random_model
from safetensors.torch import load_file
from test_train import ENV, SMALL, metrics, read_jsonl, run
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import parallel
import rl
from checkpoint import read_state, resume
from rollout import rollout

ONE_PROCESS = (sys.executable,)
TWO_PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                 "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")


# ---- the gradient of one batch ----


@pytest.fixture(scope="module")
def trajectory_file(tiny, pool, tmp_path_factory):
    items = ["babyai_50", "babyai_90", "textcraft_3"]  # 173, 170 and 120 tokens
    played = rollout(*tiny, pool, items, 3, max_tokens=8)
    path = tmp_path_factory.mktemp("played") / "t.json"
    path.write_text(json.dumps([asdict(t) for t in played]))
    return path


def one_step(trajectory_file, out, launcher, flags, max_tokens=8192):
    """Run one_step.py -> the weights after the step, its statistics."""
    command = [*launcher, "tests/one_step.py", trajectory_file, out, flags, max_tokens]
    done = subprocess.run([str(word) for word in command], cwd=ROOT,
                          env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors"), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain_step(trajectory_file, tmp_path_factory):
    """The oracle: the model's own forward pass, in one process."""
    out = tmp_path_factory.mktemp("g") / "plain"
    return one_step(trajectory_file, out, ONE_PROCESS, "plain")


@pytest.mark.parametrize("launcher, flags, max_tokens", [
    (ONE_PROCESS, "", 8192),
    (ONE_PROCESS, "", 300),
    (ONE_PROCESS, "padded", 8192),
    (ONE_PROCESS, "recompute", 8192),
    (ONE_PROCESS, "shard,recompute", 300),
    (TWO_PROCESSES, "", 300),
    (TWO_PROCESSES, "shard", 8192),
    # Three micro-batches: one of the ranks computes one again, which must not count.
    (TWO_PROCESSES, "shard,recompute", 200),
    pytest.param(TWO_PROCESSES, "shard,padded", 200, marks=pytest.mark.slow),
])
def test_gradients_are_the_same_however_they_are_computed(
        trajectory_file, plain_step, launcher, flags, max_tokens, tmp_path):
    plain_weights, plain_stats = plain_step
    weights, stats = one_step(trajectory_file, tmp_path / "g", launcher, flags, max_tokens)
    before = load_file(rl.TINY_MODEL / "model.safetensors")
    changes = [(plain_weights[name].float() - before[name].float()).abs().max() for name in before]
    assert max(changes) > 1e-3  # the gradient is not zero
    assert weights.keys() == plain_weights.keys()
    for name, weight in plain_weights.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
    assert stats["tokens"] == plain_stats["tokens"]
    assert abs(stats["loss"] - plain_stats["loss"]) < 1e-5
    assert abs(stats["grad_norm"] - plain_stats["grad_norm"]) < 1e-4
    # Each way has computed what its flags say.
    assert plain_stats["rows"] == 1
    if "padded" not in flags:
        assert stats["rows"] == 1
        assert stats["computed"] <= stats["fed"]
    elif max_tokens == 8192:
        assert stats["rows"] == 3
        assert stats["computed"] > stats["fed"]


@pytest.mark.parametrize("launcher, flags, max_tokens", [
    (ONE_PROCESS, "padded", 300),
    (TWO_PROCESSES, "shard", 300),
])
def test_gradients_over_segments_are_those_of_each_segment_alone(
        tiny, pool, launcher, flags, max_tokens, tmp_path):
    played = rollout(*tiny, pool, ["babyai_50", "babyai_90"], 4, max_tokens=8, agent="window",
                     agent_args="keep=0")
    assert all(len(t.starts) > 1 for t in played)
    (tmp_path / "t.json").write_text(json.dumps([asdict(t) for t in played]))
    plain, _ = one_step(tmp_path / "t.json", tmp_path / "plain", ONE_PROCESS, "plain")
    weights, stats = one_step(tmp_path / "t.json", tmp_path / "g", launcher, flags, max_tokens)
    assert stats["fed"] == sum(len(t.tokens) for t in played)
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, atol=1e-5, rtol=0)


# ---- trajectories are dealt to ranks ----


def test_the_doctest_of_the_shares():
    assert doctest.testmod(parallel).failed == 0


# Of 24 trajectories with two slots a rank, most are dealt while others are played.
DEALT = ["--items_per_step", "6", "--rollouts_per_item", "4", "--slots", "2", "--horizon", "3",
         "--horizon_schedule", "fixed", "--steps", "2", "--max_tokens", "8", "--save_every", "1"]


@pytest.fixture(scope="module")
def dealt(tmp_path_factory):
    """The folders of the same run on one and on two processes."""
    folder = tmp_path_factory.mktemp("dealt")
    for name, launcher in (("one", ONE_PROCESS), ("two", TWO_PROCESSES)):
        done = run(*DEALT, "--out", str(folder / name), launcher=(*launcher, "train.py"))
        assert done.returncode == 0, done.stderr
    return folder / "one", folder / "two"


def first_step(folder):
    """The trajectories of a run's first step, without what the last digits change."""
    rows = read_jsonl(folder / "trajectories/step_000000.jsonl")
    return [{key: row[key] for key in ("item", "group", "sample", "tokens", "mask", "rewards")}
            for row in rows]


def test_a_dealt_run_repeats_and_is_that_of_one_process(dealt, tmp_path):
    one, two = dealt
    done = run(*DEALT, "--out", str(tmp_path / "r"), launcher=(*TWO_PROCESSES, "train.py"))
    assert done.returncode == 0, done.stderr
    again = metrics(tmp_path / "r")
    assert again == metrics(two)
    assert first_step(two) == first_step(one)
    assert abs(metrics(two)[0]["loss"] - metrics(one)[0]["loss"]) < 1e-5
    for row in again:
        both = [row["occupancy/rank0"], row["occupancy/rank1"]]
        assert 0.3 < min(both) <= max(both) <= 1
        assert abs(sum(both) / 2 - row["occupancy"]) < 1e-9


def test_trajectories_that_are_dealt_as_ranks_ask_are_those_of_one_process(dealt, tmp_path):
    out = tmp_path / "r"
    # The evaluation before the step has a dealer of its own.
    flags = [*DEALT, "--steps", "1", "--set", "arrival_order=true", "--eval_every", "1"]
    done = run(*flags, "--out", str(out), launcher=(*TWO_PROCESSES, "train.py"))
    assert done.returncode == 0, done.stderr
    assert first_step(out) == first_step(dealt[0])
    assert metrics(out)[0]["eval/turns"] > 0
    assert " after" in done.stdout
    assert min(metrics(out)[0][f"occupancy/rank{rank}"] for rank in range(2)) > 0.3


def test_a_warm_start_on_two_processes_evaluates_held_out_items(tmp_path):
    flags = ["--demos", "8", "--epochs", "1", "--horizon", "2", "--max_tokens", "8",
             "--eval_every", "1", "--out", str(tmp_path / "r")]
    done = run(*flags, launcher=(*TWO_PROCESSES, "sft.py"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "r")[0]["eval/turns"] > 0


@pytest.mark.slow
def test_four_processes_play_what_one_plays(dealt, tmp_path):
    four = [word.replace("=2", "=4") for word in TWO_PROCESSES]
    done = run(*DEALT, "--out", str(tmp_path / "r"), launcher=(*four, "train.py"))
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "r") == first_step(dealt[0])
    assert abs(metrics(tmp_path / "r")[0]["loss"] - metrics(dealt[0])[0]["loss"]) < 1e-5


def test_a_signal_while_trajectories_are_dealt_loses_nothing(dealt, tmp_path):
    """torchrun passes a signal on to its processes, which get it at different moments."""
    out = tmp_path / "r"
    ended, _ = interrupt(signal.SIGTERM, 1, (0, 0.5), [*DEALT, "--out", str(out)], out,
                         random.Random(2), TWO_PROCESSES)
    assert ended
    assert metrics(out) == metrics(dealt[1])


def test_a_rank_that_leaves_tells_those_who_would_wait_for_it(monkeypatch):
    told = []
    monkeypatch.setattr(parallel.Dealer, "_exchange", lambda self, number: told.append(number))
    dealer = parallel.Dealer(4, signals=None)
    dealer.dealt = 2
    dealer.leave()
    assert told == [-1]
    # Nobody waits when all trajectories are dealt, or when all ranks know of the signal.
    dealer.stopped = True
    dealer.leave()
    dealer.stopped, dealer.dealt = False, 4
    dealer.leave()
    assert told == [-1]


@pytest.mark.parametrize("num_ranks, count, room", [(8, 128, 24), (4, 128, 48), (3, 128, 500)])
def test_the_first_ranks_to_ask_leave_a_share_to_the_others(num_ranks, count, room, monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(parallel, "_get_default_store", lambda: store)
    monkeypatch.setattr(parallel, "ranks", lambda: (0, num_ranks))
    monkeypatch.setattr(parallel.FirstComeDealer, "numbers", itertools.repeat(0))
    signals = parallel.StopSignals()
    dealers = [parallel.FirstComeDealer(count, signals) for _ in range(num_ranks)]
    shares = [dealer.deal(room) for dealer in dealers]
    assert max(map(len, shares)) - min(map(len, shares)) <= num_ranks - 1
    assert min(map(len, shares)) > 0
    assert sum(map(len, shares)) == count
    signals.end()


def test_later_shares_are_as_large_as_asked_for(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(parallel, "_get_default_store", lambda: store)
    monkeypatch.setattr(parallel, "ranks", lambda: (0, 4))
    signals = parallel.StopSignals()
    dealer = parallel.FirstComeDealer(128, signals)
    assert [len(dealer.deal(room)) for room in (4, 48, 100)] == [4, 48, 76]
    signals.end()


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
                with parallel.unsharded(model):
                    assert torch.equal(model(ids).logits, expected)
                    assert not calls
                assert torch.equal(model(ids).logits, expected)
                assert len(calls) == 2 * num_parts > 2
                calls.clear()
        # A backward pass after it works, with sharded parameters and gradients.
        rl.token_logprobs(model, ids, mask)[0].sum().backward()
        assert calls
        assert all(isinstance(p, DTensor) and p.grad.to_local().any() for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="it lowers the priority of threads")
def test_gloo_threads_that_clean_up_late_abort_no_rank():
    """Where the interpreter shuts down as usual, about every second try of this test fails."""
    done = subprocess.run([*TWO_PROCESSES, "tests/late_threads.py"], cwd=ROOT, text=True,
                          env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- loading ----


def test_shards_hold_the_weights_that_from_pretrained_reads(tiny, tmp_path):
    """The oracle: transformers, which loads the whole model in the wanted dtype."""
    models = {
        "tied": random_model("qwen2").bfloat16(),
        "untied": random_model("qwen2", tie_word_embeddings=False),
        "converted": random_model("qwen3_moe", moe_intermediate_size=32, num_experts=4),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tiny[1].save_pretrained(tmp_path / name)
    # A dtype in config.json that is not the one of the weights must not round them.
    file = tmp_path / "untied/config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    folders = [tmp_path / name for name in models]
    command = [*TWO_PROCESSES, "tests/loaded_shards.py", *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, env=ENV | {"PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for folder in folders:
        for kind in ("policy", "critic", "reference"):
            dtype = torch.bfloat16 if kind == "reference" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            expected = dict(model.named_parameters()) | dict(model.named_buffers())
            if kind == "critic":
                body = model.base_model
                tensors = dict(body.named_parameters()) | dict(body.named_buffers())
                expected = {f"body.{name}": tensor for name, tensor in tensors.items()}
                expected["head.weight"] = torch.zeros(1, 64)
                expected["head.bias"] = torch.zeros(1)
            found = load_file(folder / f"{kind}.loaded")
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype, (folder.name, kind, name)
                assert torch.equal(found[name], tensor), (folder.name, kind, name)
    # Only weights that transformers computes while it reads them are whole in every process.
    before, after = done.stderr.split("loading converted\n", 1)
    assert "a whole copy" not in before
    assert "a whole copy" in after


# ---- runs that are stopped and go on ----


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run in one process that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "one"
    done = run("--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("first, second", [
    ((*TWO_PROCESSES, "train.py", "--shard", "true"), (*ONE_PROCESS, "train.py")),
    pytest.param((*ONE_PROCESS, "train.py"), (*TWO_PROCESSES, "train.py", "--shard", "true"),
                 marks=pytest.mark.slow),
])
def test_a_run_goes_on_with_another_number_of_processes(reference, first, second, tmp_path):
    args = ["--out", str(tmp_path / "r"), "--save_every", "1", "--algo", "ppo", *SMALL]
    done = run(*args, "--steps", "2", launcher=first)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "r")) == 2
    saved = tmp_path / "r/checkpoints/step_000002"
    hashes = read_state(saved)["sha256"]
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert set(hashes) == files - {"state.json"}
    done = run(*args, "--resume", launcher=second)
    assert done.returncode == 0, done.stderr
    assert "going on" not in done.stderr
    expected, actual = metrics(reference), metrics(tmp_path / "r")
    assert len(actual) == len(expected) == 3
    for row, expected_row in zip(actual, expected):
        for key in ("loss", "grad_norm", "reward", "success", "turns", "entropy", "value_loss",
                    "explained_variance", "weight_change"):
            assert abs(row[key] - expected_row[key]) < 1e-5, (row["step"], key)


def interrupt(how, tries, between, args, folder, rng, launcher=ONE_PROCESS):
    """Run train.py and end it `tries` times at random moments, resuming it each time.

    how: the signal. between: (least, most) seconds from the first file of metrics to the signal.
    -> how often the run was ended, what it printed.
    """
    ended = 0
    printed = ""
    while True:
        resume = ["--resume"] if (folder / "config.json").exists() else []
        # nohup and shells that run jobs in the background let them ignore SIGHUP and SIGINT.
        child = subprocess.Popen([*launcher, "train.py", *args, *resume], cwd=ROOT, env=ENV,
                                 stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 preexec_fn=lambda: how != signal.SIGKILL
                                 and signal.signal(how, signal.SIG_DFL))
        if ended < tries:
            while not (folder / "metrics.jsonl").exists() and child.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(*between))
            child.send_signal(how)
        out, errors = child.communicate(timeout=300)
        printed += out
        # Before the run has begun, SIGTERM ends the process as SIGKILL does.
        expected_codes = (0, -how) if ended < tries else (0,)
        if launcher != ONE_PROCESS and ended < tries:
            expected_codes = (0, 1, -how)  # 1: torchrun's own
        assert child.returncode in expected_codes, errors
        if ended >= tries or (folder / "final").exists():
            return ended, printed
        ended += 1


@pytest.mark.parametrize("how, tries, between", [
    (signal.SIGKILL, 2, (0, 3)),
    (signal.SIGTERM, 1, (0, 1)),
    pytest.param(signal.SIGINT, 1, (0, 1), marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, 1, (0, 1), marks=pytest.mark.slow),
])
def test_a_run_ended_at_random_moments_gives_every_bit_of_one_that_was_not(
        reference, how, tries, between, tmp_path):
    """experiments/kill.py does it with more interruptions."""
    out = tmp_path / "r"
    args = ["--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL]
    ended, printed = interrupt(how, tries, between, args, out, random.Random(1))
    assert ended
    assert metrics(out) == metrics(reference)
    assert how == signal.SIGKILL or f"{how.name}: saved before step" in printed
    weights = "final/model.safetensors"
    assert (out / weights).read_bytes() == (reference / weights).read_bytes()
    assert not list(out.glob("**/*.partial"))


def test_a_run_whose_output_nobody_reads_any_more_saves_and_can_be_resumed(reference, tmp_path):
    out = tmp_path / "r"
    args = ["train.py", "--out", str(out), "--save_every", "100", "--algo", "ppo", *SMALL]
    # Output into a pipe is buffered, if not asked otherwise. nohup lets children ignore SIGHUP.
    child = subprocess.Popen([*ONE_PROCESS, *args], cwd=ROOT, env=ENV | {"PYTHONUNBUFFERED": ""},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    while not (out / "metrics.jsonl").exists() and child.poll() is None:
        time.sleep(0.01)
    child.stdout.close()
    assert child.wait(timeout=300) == 0
    assert list(out.glob("checkpoints/step_*")) and not (out / "final").exists()
    done = run(*args[1:], "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(reference)


def test_a_broken_checkpoint_is_one_line(reference, tmp_path):
    out = tmp_path / "r"
    shutil.copytree(reference, out)
    shutil.rmtree(out / "final")
    files = list((out / "checkpoints/step_000003/training").iterdir())
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:1000])
    shutil.rmtree(out / "checkpoints/step_000002")
    done = run("--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL, "--resume")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is damaged" in done.stderr


# ---- what a run leaves behind ----


def test_lora_trains_adapters_alone_and_leaves_a_plain_model(tiny, tmp_path):
    out = tmp_path / "r"
    done = run("--out", str(out), "--lora_rank", "4", "--lr", "0.01", "--kl_coef", "0.1",
               "--save_every", "1", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = metrics(out)
    assert rows[2]["kl"] > 0
    assert rows[0]["logprob_gap"] < 1e-4
    checkpoint = out / "checkpoints/step_000003"
    tensors = load_file(next((checkpoint / "training").iterdir()))
    assert tensors
    assert all(".lora_" in name for name in tensors)

    model, _ = rl.load_policy("tiny")
    rl.add_lora(model, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    resume(checkpoint, {"policy": (model, optimizer)})
    final, _ = rl.load_policy(str(out / "final"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        adapted = model(ids).logits
        original = tiny[0](ids).logits
        torch.testing.assert_close(final(ids).logits, adapted, atol=1e-4, rtol=1e-4)
        assert (adapted - original).abs().max() > 1e-3
        with rl.adapters_off(model):
            torch.testing.assert_close(model(ids).logits, original)


def test_final_plays_as_the_last_checkpoint_does(reference, pool):
    """Greedy trajectories of the two are equal, loaded as any Hugging Face folder is."""
    plays = []
    for name in ("final", "checkpoints/step_000003"):
        policy, tokenizer = rl.load_policy(str(reference / name))
        plays.append(rollout(policy, tokenizer, pool, ["babyai_8", "babyai_50"], 3, max_tokens=12,
                             temperature=0))
    assert [t.tokens for t in plays[0]] == [t.tokens for t in plays[1]]


def test_more_processes_than_gpus_is_one_line(monkeypatch):
    """Two ranks on one GPU would wait for each other without end."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    expected = r"more processes here \(2\) than PyTorch finds GPUs \(1\)"
    with pytest.raises(ValueError, match=expected):
        parallel.init_distributed()
