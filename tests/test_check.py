"""The ways in which a model is computed: the fastest exact one, or a refusal."""

import json
import math

import pytest
import torch
from conftest import plain_logprobs, random_model, run_script

import rl
from experiments.families import tiny_model
from models import check, packed
from rollout import Rollouts, rollout

# One of each kind: plain, windows, soft caps, sinks and experts, nested configuration, keys and
# values of different sizes; not through attention functions; recurrent layers.
EXPECTED = dict.fromkeys(
    ["llama", "mistral, window", "gemma2, strong caps", "gpt_oss", "gemma3, nested", "deepseek_v3"],
    ("ragged", "packed")) | {
        "stablelm": ("padded", "padded"), "mpt": ("alone", "padded"), "lfm2": ("alone", "padded")}


def test_a_lack_of_memory_says_nothing_of_a_way(monkeypatch):
    model, _ = tiny_model("llama")

    def gap_of(message):
        def way(*_):
            raise RuntimeError(message)
        monkeypatch.setitem(check.WAYS["rollout"], "ragged", way)
        return check.try_ways(model).gaps["rollout ragged"]

    assert gap_of("shapes differ") == math.inf
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        gap_of("CUBLAS_STATUS_ALLOC_FAILED")


def check_rollout(model, tokenizer, *args, **settings):
    """The rollout and the update have the log-probs of the model's own forward pass."""
    for t in rollout(model, tokenizer, *args, **settings):
        ids, mask = torch.tensor([t.tokens]), torch.tensor([t.mask])
        expected, _ = plain_logprobs(model, ids, mask)
        again = rl.token_logprobs(model, ids, mask)[0]
        torch.testing.assert_close(torch.tensor([t.logprobs]), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_family_is_computed_in_the_fastest_exact_way(name, pool):
    model, tokenizer = tiny_model(name)
    paths = check.find_paths(model)
    assert (paths.rollout, paths.update) == EXPECTED[name]
    check_rollout(model, tokenizer, pool, ["babyai_8", "babyai_50"], 3, max_tokens=7)


@pytest.mark.parametrize("name", ["mpt", "mistral, window"])
def test_the_engine_hf_plays_a_model_that_was_not_checked_in_its_exact_way(name, pool):
    model, tokenizer = tiny_model(name)  # padding would change its log-probs
    items = ["babyai_8", "textcraft_3", "babyai_50", "textcraft_0"]
    short = {"babyai": Rollouts(max_tokens=5)}
    check_rollout(model, tokenizer, pool, items, 3, max_tokens=17, engine="hf", worlds=short)


def test_a_way_that_is_not_exact_is_not_used(monkeypatch):
    model, _ = tiny_model("gemma3_text")
    small = check.first_layers(model, torch.device("cpu"))
    assert small.config.sliding_window == check.SMALL_WINDOW
    assert check.try_ways(small)[:2] == ("ragged", "packed")
    begin = check.Ragged.begin
    with monkeypatch.context() as patch:  # a common beginning is not copied
        patch.setattr(check.Ragged, "begin", lambda self, slot, ids, source_slot, length:
                      begin(self, slot, ids, slot, length))
        assert check.try_ways(small)[:2] == ("alone", "packed")
    seen_keys = packed.seen_keys
    monkeypatch.setattr(packed, "seen_keys", lambda last_keys, width, window, like:
                        seen_keys(last_keys, width, None, like))
    paths = check.try_ways(small)
    assert paths[:2] == ("ragged", "padded")
    assert paths.gaps["update packed"] > 0.01


def test_in_bfloat16_the_mean_gap_counts_too(monkeypatch):
    model, _ = tiny_model("llama")
    paths = check.find_paths(model, "bfloat16")
    assert paths[:2] == ("ragged", "packed")
    assert 0 < paths.gaps["rollout ragged bfloat16"] <= check.LARGEST_MEAN_GAP
    ragged = check.WAYS["rollout"]["ragged"]

    def wrong_in_bfloat16(*args):
        return ragged(*args) + 0.1 * torch.is_autocast_enabled("cpu")

    small = check.first_layers(model, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setitem(check.WAYS["rollout"], "ragged", wrong_in_bfloat16)
        paths = check.try_ways(small, "bfloat16")
    assert paths.rollout == "padded"
    assert paths.gaps["rollout ragged"] <= check.LARGEST_GAP
    assert 0.05 < paths.gaps["rollout ragged bfloat16"] < 0.15
    # A gap that rounding alone explains is allowed: the check's tokens are unlikely ones.
    monkeypatch.setattr(check, "LARGEST_MEAN_GAP", 1e-5)
    paths = check.try_ways(small, "bfloat16")
    assert paths[:2] == ("ragged", "packed")
    assert paths.gaps["rollout ragged bfloat16"] > check.LARGEST_MEAN_GAP


def test_the_copy_has_the_models_first_layers_and_one_of_each_kind():
    model = random_model("olmo3", num_hidden_layers=9)
    small = check.first_layers(model, torch.device("cpu"))
    assert small.config.num_hidden_layers == 4  # the first with full attention
    assert small.config.layer_types == model.config.layer_types[:4]
    own = model.state_dict()
    assert all(torch.equal(weight, own[name]) for name, weight in small.state_dict().items())


def test_a_model_that_no_way_computes_exactly_is_refused(tmp_path):
    model, tokenizer = tiny_model("mamba")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for command in (["train.py", "--out", tmp_path / "run"], ["eval.py", "--items", "4"]):
        done = run_script(*command, "--env", "babyai", "--model", tmp_path / "model")
        assert done.returncode == 2
        assert "models of the type mamba cannot be used" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "run").rglob("*.json*"))


def test_models_of_one_configuration_are_checked_once_unless_they_are_refused(monkeypatch):
    monkeypatch.setattr(check, "known", {})
    broken = random_model("qwen3")
    next(broken.model.layers[0].parameters()).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        check.find_paths(broken)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot be used"):
        patch.setitem(check.WAYS, "rollout", {})  # no way is exact
        check.find_paths(random_model("qwen3"))
    found = check.find_paths(random_model("qwen3"))
    assert found.rollout == "ragged"
    monkeypatch.setattr(check, "try_ways", None)
    again = random_model("qwen3")
    assert check.find_paths(again) == found == rl.compute_paths_of(again)
    with pytest.raises(TypeError):
        check.find_paths(random_model("qwen2"))


def test_the_command_writes_the_gaps(tmp_path):
    done = run_script("benches/__main__.py", "check", "--out", tmp_path / "check.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "check.json").read_text())
    assert figures["rollout"] == "ragged"
    assert 0 < figures["gaps"]["rollout ragged"] <= check.LARGEST_GAP
