"""The update: one denominator however the batch is cut, log-probs by an oracle, checkpoints that are whole."""

import copy
import doctest

import pytest
import torch

import algos
import rl
import update
from rollout import Trajectory, rollout
from test_engine import other


@pytest.fixture(scope="module")
def trajectories(tiny, pool):
    return rollout(*tiny, pool, ["babyai_8", "babyai_50", "textcraft_3"], 3, samples=2, max_tokens=8)


def test_token_logprobs_and_entropies_against_a_plain_loop(tiny, trajectories):
    model = tiny[0]
    batch = update.collate(trajectories)
    logprobs, entropies = rl.token_logprobs(model, batch["ids"], batch["mask"], temperature=0.8)
    for b, t in enumerate(trajectories):
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([t.tokens])).logits[0] / 0.8, -1)  # [T, V]
        for i, token in enumerate(t.tokens):
            expected = (logp[i - 1, token], -(logp[i - 1].exp() * logp[i - 1]).sum()) if t.mask[i] else (0.0, 0.0)
            assert abs(logprobs[b, i] - expected[0]) < 1e-4 and abs(entropies[b, i] - expected[1]) < 1e-4
    assert (logprobs[~batch["mask"]] == 0).all()


@pytest.mark.parametrize("family, scale", [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.0625}), ("mistral", {})])
def test_log_probs_of_other_families_are_those_of_their_own_forward(trajectories, family, scale):
    """Some scale their logits. A trajectory without tokens, of an environment that failed at once, stands alone in its batch."""
    model, t = other(family, pad_token_id=0, eos_token_id=0, bos_token_id=0, **scale), trajectories[0]
    with torch.no_grad():
        logprobs, _ = rl.token_logprobs(model, torch.tensor([t.tokens]), torch.tensor([t.mask]))
        expected = torch.log_softmax(model(torch.tensor([t.tokens])).logits[0], -1)
        for i in (i for i, sampled in enumerate(t.mask) if sampled):
            assert abs(logprobs[0, i] - expected[i - 1, t.tokens[i]]) < 1e-4
        empty = update.collate([Trajectory("babyai_0", "babyai")])
        assert not rl.token_logprobs(model, empty["ids"], empty["mask"])[0].any()


def test_lengths_at_which_rotary_embeddings_change_are_known():
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    phi = other("phi3", pad_token_id=0, max_position_embeddings=200, original_max_position_embeddings=40, rope_parameters=factors)
    assert rl.steady_length(phi.config) == 40 and rl.steady_length(other("mistral").config) == float("inf")
    ids, rows = torch.randint(1, 100, (2, 40)), torch.ones(2, 40, dtype=torch.bool)
    rows[:, 0] = rows[0, 30:] = False
    with torch.no_grad():
        assert torch.allclose(rl.token_logprobs(phi, ids, rows)[0][0, :30], rl.token_logprobs(phi, ids[:1, :30], rows[:1, :30])[0][0], atol=1e-5)


@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_gradient_is_the_same_however_the_batch_is_cut(tiny, trajectories, mode):
    advantages = [[float(i - 2.3)] * len(t.tokens) for i, t in enumerate(trajectories)]
    count = sum(sum(t.mask) for t in trajectories) if mode == "token" else len(trajectories)
    results = []
    for max_tokens in (10**9, 1500, 1):  # one micro-batch, a few, one a trajectory
        model = copy.deepcopy(tiny[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def loss_of(batch):
            logp, _ = rl.token_logprobs(model, batch["ids"], batch["mask"])
            loss, stats = algos.policy_loss(logp, batch["old_logprobs"], batch["advantages"], batch["mask"])
            return algos.aggregate(loss, batch["mask"], mode, count), stats
        stats = update.optimizer_step(model, optimizer, trajectories, {"advantages": advantages}, loss_of, max_tokens)
        results.append((stats, torch.cat([p.detach().flatten() for p in model.parameters()])))
    for stats, weights in results[1:]:
        assert abs(stats["loss"] - results[0][0]["loss"]) < 1e-6
        assert abs(stats["grad_norm"] / results[0][0]["grad_norm"] - 1) < 1e-5
        assert (weights - results[0][1]).abs().max() < 1e-5
    assert results[0][0]["grad_norm"] > 0
    assert all(stats["padded"] == stats["unpadded"] for stats, _ in results)


@pytest.mark.parametrize("family", ["tiny", "qwen3", "llama"])
def test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient(tiny, trajectories, family, monkeypatch):
    """The oracle: rows padded to one length, through the model's own attention, and the head at once."""
    results = []
    for packs, logits in ((rl.packs, 2**27), (rl.packs, 50_000), (lambda config: False, 2**27)):
        monkeypatch.setattr(rl, "packs", packs)
        monkeypatch.setitem(rl.LOGITS, "cpu", logits)
        model = copy.deepcopy(tiny[0]) if family == "tiny" else other(family)
        batch = update.collate(trajectories)
        batch["mask"][1] = False  # nothing sampled
        logp, ent = rl.token_logprobs(model, batch["ids"], batch["mask"], temperature=0.8)
        loss = -(logp * torch.linspace(0.5, 2, logp.shape[1])).sum() / 100 - 0.01 * ent.sum()
        loss.backward()
        results.append((logp.detach(), ent.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for columns in results[:2]:
        for ours, theirs in zip(columns, results[2]):
            assert torch.allclose(ours, theirs, atol=1e-5 * max(1, theirs.abs().max()))


def test_a_step_without_a_usable_trajectory_changes_nothing(tiny):
    model = copy.deepcopy(tiny[0])
    before = copy.deepcopy(model.state_dict())
    stats = update.optimizer_step(model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0), [], {}, None, 100)
    assert stats["grad_norm"] == 0.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_critic_values_only_look_back(tiny, trajectories):
    """A value belongs to the state before its token: it must not change with that token or any later one."""
    critic = rl.Critic("tiny").eval()
    torch.nn.init.normal_(critic.head.weight)
    t = trajectories[0]
    ids, mask = torch.tensor([t.tokens]), torch.tensor([t.mask])
    at = t.mask.index(True)
    with torch.no_grad():
        values = critic(ids, mask)
        changed = ids.clone()
        changed[0, at:] = 5
        assert torch.allclose(critic(changed, mask)[0, at], values[0, at], atol=1e-6)
        changed = ids.clone()
        changed[0, at - 1] = 5
        assert not torch.allclose(critic(changed, mask)[0, at], values[0, at], atol=1e-4)
    assert (values[~mask] == 0).all()
    with torch.no_grad(), rl.compute_in("bfloat16", "cpu"):
        values = critic(ids, mask)
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())  # the head is finer than the body


def test_map_trajectories_keeps_the_order(tiny, trajectories):
    rows = update.map_trajectories(lambda model, ids, mask: ids.float(), tiny[0], trajectories, 700)
    assert rows == [[float(x) for x in t.tokens] for t in trajectories]


def test_checkpoints_are_whole_or_absent(tiny, tmp_path):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        optimizer.step()
    folder = tmp_path / "checkpoints/step_000007"
    rl.save(folder, model, tokenizer, {"step": 7}, {"policy": (model, optimizer)})
    (tmp_path / "checkpoints/step_000008.partial").mkdir()  # what a kill leaves behind
    (tmp_path / "checkpoints/step_000008.partial/state.json").write_text("{}")
    (tmp_path / "checkpoints/step_000009").mkdir()
    assert rl.checkpoints(tmp_path) == [folder]
    again, _ = rl.load_policy(str(folder))
    other = torch.optim.AdamW(again.parameters(), lr=0.0, weight_decay=0.0)
    assert rl.resume(folder, {"policy": (again, other)})["step"] == 7
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert float(a["step"]) == 2 and all(torch.equal(a[k], b[k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin"))


@pytest.mark.parametrize("name", ["/nowhere/model", "./missing", "missing"])
def test_a_missing_model_folder_is_one_clear_line(name):
    with pytest.raises(ValueError, match="no model folder"):
        rl.load_policy(name)


def test_doctests():
    assert doctest.testmod(rl).failed == 0 and doctest.testmod(update).failed == 0
