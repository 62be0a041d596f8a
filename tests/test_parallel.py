"""However the update is cut, over however many processes, it is one: the same gradients, and runs that go on as another number."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_train import ENV, SMALL, metrics, run

import rl
import update
from rollout import rollout

TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")


@pytest.fixture(scope="module")
def played(tiny, pool, tmp_path_factory):
    path = tmp_path_factory.mktemp("played") / "t.json"
    path.write_text(json.dumps([asdict(t) for t in rollout(*tiny, pool, ["babyai_8", "babyai_50", "textcraft_3"], 3, max_tokens=8)]))
    return path


def gradients(played, out, launcher, flags="", max_tokens=8192):
    done = subprocess.run([*launcher, "tests/one_step.py", str(played), str(out), flags, str(max_tokens)], cwd=ROOT,
                          env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors"), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(played, tmp_path_factory):
    return gradients(played, tmp_path_factory.mktemp("g") / "plain", (sys.executable,), "padded")


@pytest.mark.parametrize("launcher, flags, max_tokens", [
    ((sys.executable,), "", 8192), ((sys.executable,), "", 900), ((sys.executable,), "recompute", 8192),
    ((sys.executable,), "shard,recompute", 900), (TWO, "", 900), (TWO, "shard", 8192), (TWO, "shard,recompute", 600),
    pytest.param(TWO, "shard,padded", 600, marks=pytest.mark.slow)])
def test_gradients_are_the_same_however_they_are_computed(played, plain, launcher, flags, max_tokens, tmp_path):
    weights, stats = gradients(played, tmp_path / "g", launcher, flags, max_tokens)
    before = load_file(rl.TINY / "model.safetensors")
    assert max((plain[0][name].float() - before[name].float()).abs().max() for name in before) > 1e-3  # there is one
    for name, weight in plain[0].items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
    assert stats["tokens"] == plain[1]["tokens"] and abs(stats["loss"] - plain[1]["loss"]) < 1e-5
    assert abs(stats["grad_norm"] - plain[1]["grad_norm"]) < 1e-4


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_everything_once_and_are_as_many_for_each_rank(packed):
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(0, 300) for _ in range(rng.randint(0, 40))]
        ranks, most = rng.randint(1, 5), rng.randint(50, 1000)
        cuts = update.micro_batches(lengths, most, ranks, packed)
        assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths))) and len(cuts) % ranks == 0
        size = (lambda c: sum(lengths[i] for i in c)) if packed else lambda c: len(c) * max((lengths[i] for i in c), default=0)
        assert all(size(cut) <= max(most, max(lengths, default=0)) for cut in cuts if cut)
        if packed and len(lengths) > 4 * ranks and cuts:
            shares = [sum(size(cut) for cut in cuts[r::ranks]) for r in range(ranks)]
            assert max(shares) - min(shares) <= max(lengths) * len(cuts) / ranks
    assert len(update.micro_batches([6, 6, 6], 10, 1, packed)) == 3  # none beside another


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    done = run("--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("first, second", [((*TWO, "train.py", "--shard", "true"), (sys.executable, "train.py")),
                                           pytest.param((sys.executable, "train.py"), (*TWO, "train.py", "--shard", "true"),
                                                        marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_processes(reference, first, second, tmp_path):
    args = ["--out", str(tmp_path / "r"), "--save_every", "1", "--algo", "ppo", *SMALL]
    done = run(*args, "--steps", "2", launcher=first)
    assert done.returncode == 0, done.stderr
    done = run(*args, "--resume", launcher=second)
    assert done.returncode == 0, done.stderr
    one, other = metrics(reference), metrics(tmp_path / "r")
    assert len(other) == 3
    for a, b in zip(one, other):
        for key in ("loss", "grad_norm", "reward", "success", "turns", "entropy", "value_loss", "explained_variance"):
            assert abs(a[key] - b[key]) < 1e-5, (a["step"], key)


def interrupt(how, tries, between, args, folder, rng):
    """Start the run, end it at a random moment by signal `how`, resume ... -> how often it was ended, and what it said."""
    ended, said = 0, ""
    while True:
        resume = ["--resume"] if folder.exists() and (folder / "config.json").exists() else []
        child = subprocess.Popen([sys.executable, "train.py", *args, *resume], cwd=ROOT, env=ENV, stderr=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        if ended < tries:
            while not (folder / "metrics.jsonl").exists() and child.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(*between))
            child.send_signal(how)
        out, wrong = child.communicate(timeout=300)
        said += out
        assert child.returncode in (0, -how if ended < tries else 0), wrong  # -SIGTERM: before the run had begun
        if ended >= tries or (folder / "final").exists():
            return ended, said
        ended += 1


@pytest.mark.parametrize("how, tries, between", [(signal.SIGKILL, 3, (0, 3)), (signal.SIGTERM, 1, (0, 1))])
def test_a_run_ended_at_random_moments_gives_every_bit_of_one_that_was_not(reference, how, tries, between, tmp_path):
    """At length: experiments/kill.py."""
    out = tmp_path / "r"
    ended, said = interrupt(how, tries, between, ["--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL], out,
                            random.Random(1))
    assert ended and metrics(out) == metrics(reference)
    assert how == signal.SIGKILL or "SIGTERM: saved before step" in said
    assert (out / "final/model.safetensors").read_bytes() == (reference / "final/model.safetensors").read_bytes()
    assert not list(out.glob("**/*.partial"))


def test_lora_trains_adapters_alone_and_leaves_a_plain_model(tiny, tmp_path):
    out = tmp_path / "r"
    done = run("--out", str(out), "--lora_rank", "4", "--lr", "0.01", "--kl_coef", "0.1", "--save_every", "1", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = metrics(out)
    assert rows[2]["kl"] > 0 and rows[0]["logprob_gap"] < 1e-4
    held = load_file(next((out / "checkpoints/step_000003/training").iterdir()))
    assert held and all(".lora_" in name for name in held)
    model, _ = rl.load_policy("tiny")
    rl.add_lora(model, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rl.resume(out / "checkpoints/step_000003", {"policy": (model, optimizer)})
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        adapted = model(ids).logits
        torch.testing.assert_close(rl.load_policy(str(out / "final"))[0](ids).logits, adapted, atol=1e-4, rtol=1e-4)
        assert (adapted - tiny[0](ids).logits).abs().max() > 1e-3
        with rl.adapters_off(model):
            torch.testing.assert_close(model(ids).logits, tiny[0](ids).logits)


def test_final_plays_as_the_run_did(reference, pool):
    """final/, loaded as any Hugging Face folder is, and the last checkpoint: greedy trajectories are equal."""
    plays = [rollout(*rl.load_policy(str(folder)), pool, ["babyai_8", "babyai_50"], 3, max_tokens=12, temperature=0)
             for folder in (reference / "final", reference / "checkpoints/step_000003")]
    assert [t.tokens for t in plays[0]] == [t.tokens for t in plays[1]]


def test_a_broken_checkpoint_is_one_line(reference, tmp_path):
    import shutil
    out = tmp_path / "r"
    shutil.copytree(reference, out)
    shutil.rmtree(out / "final")
    for file in (out / "checkpoints/step_000003/training").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    done = run("--out", str(out), "--save_every", "1", "--algo", "ppo", *SMALL, "--resume")
    assert done.returncode == 2 and "is broken" in done.stderr.splitlines()[-1]
