"""Token log-probs against the model's own forward pass, the critic, loading, and checkpoints."""

import copy
import itertools
import json
import shutil

import pytest
import torch
from conftest import plain_logprobs, random_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import checkpoint
import rl
import update
from trajectory import Trajectory

EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ADAPTED = {  # GPT-2 keeps its weights as [in, out], a mixture those of all experts in one tensor
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=20, n_embd=8, n_layer=1, n_head=2)),
    "qwen2": lambda: random_model("qwen2"), "untied": lambda: random_model(
        "llama", tie_word_embeddings=False),
    "qwen3_moe": lambda: random_model("qwen3_moe", **EXPERTS),
    "mixtral": lambda: random_model("mixtral", **EXPERTS)}


@pytest.mark.parametrize("family", ADAPTED)
def test_lora_is_merged_into_weights_of_any_layout(family):
    torch.manual_seed(0)
    model = ADAPTED[family]().eval()
    plain = copy.deepcopy(model)
    rl.add_lora(model, 2)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.data.normal_()
    missing, unknown = plain.load_state_dict(rl.full_state_dict(model), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
        with rl.adapters_off(model):
            assert (plain(ids).logits - model(ids).logits).abs().max() > 0.1


# ---- loading ----


@pytest.fixture
def folder(tmp_path):
    """A copy of the built-in model, to be broken."""
    return shutil.copytree(rl.TINY_MODEL, tmp_path / "model")


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize("wrong", [
    lambda weights: {n: w for n, w in weights.items() if "layers.1.mlp.down_proj" not in n},
    lambda weights: {f"base.{name}": w for name, w in weights.items()}])
def test_weights_that_the_files_lack_are_not_filled_with_random_numbers(folder, wrong):
    change_weights(folder, wrong)
    with pytest.raises(ValueError, match="lack [0-9]+ of the model's weights"):
        rl.load_policy(str(folder))
    with pytest.raises(ValueError, match="lack"):
        rl.Critic(str(folder))


@pytest.mark.parametrize("name, text", [
    ("tokenizer.json", "{}"), ("generation_config.json", "["), ("model.safetensors", "cut"),
    ("tokenizer.json", "[]"), ("tokenizer.json", '{"added_tokens": null}'),
    ("model.safetensors", "\x7f" * 8 + "{}"),
    ("config.json", '{"model_type": "qwen2", "hidden_act": "nope"}')])
def test_a_broken_file_of_a_model_is_one_line(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=r"\Acannot load the .*model '.*/model': .+\Z"):
        rl.load_policy(str(folder))


@pytest.mark.parametrize("count, is_said", [(10_001, True), (10, False)])
def test_many_added_tokens_are_said_before_they_are_read(folder, count, is_said, capsys):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    last = content["added_tokens"][-1]
    first = max(last["id"], *content["model"]["vocab"].values()) + 1
    content["added_tokens"] += [last | {"id": number, "content": f"<|{number}|>"}
                                for number in range(first, first + count)]
    file.write_text(json.dumps(content))
    rl.load_tokenizer(str(folder))
    assert (f"{len(content['added_tokens'])} added tokens" in capsys.readouterr().err) == is_said


def test_a_head_of_its_own_is_saved_though_the_config_calls_it_tied(folder, tmp_path):
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    change_weights(folder, lambda weights: weights | {
        "lm_head.weight": weights["model.embed_tokens.weight"] * 2})
    model, tokenizer = rl.load_policy(str(folder))
    checkpoint.save(tmp_path / "saved", model, tokenizer)
    again, _ = rl.load_policy(str(tmp_path / "saved"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


# ---- token log-probs ----


@pytest.mark.parametrize("mask", [[[0, 1, 1]], [[True, True, False]]])
def test_a_mask_of_another_kind_is_refused(mask, tiny):
    with pytest.raises(ValueError, match="mask must be bool"):
        rl.token_logprobs(tiny[0], torch.tensor([[1, 2, 3]]), torch.tensor(mask))


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_trajectory_without_tokens_may_stand_alone_in_its_batch(family):
    """Its environment failed at once."""
    model = random_model(family, pad_token_id=0, eos_token_id=0, bos_token_id=0)
    empty = update.collate([Trajectory("babyai_0", "babyai")])
    logprobs, entropies = rl.token_logprobs(model, empty["ids"], empty["mask"])
    assert logprobs.shape == entropies.shape == empty["ids"].shape
    assert not logprobs.any() and not entropies.any()


def test_a_length_beyond_a_models_position_embeddings_is_refused_and_one_beyond_its_training_named(
        capsys):
    gpt2 = random_model("gpt2", n_positions=64).config
    mistral = random_model("mistral", max_position_embeddings=64).config
    capsys.readouterr()  # the first model that this process loads shows a progress bar
    for config, length, named in ((gpt2, 64, ""), (mistral, 64, ""), (mistral, 65, "the 64 ")):
        rl.check_length(config, length, "it")
        warned = capsys.readouterr().err
        assert bool(warned) == bool(named) and named in warned
    with pytest.raises(ValueError, match="--max_length 65 is too long for it"):
        rl.check_length(gpt2, 65, "it")
    with pytest.raises(ValueError, match=f"{gpt2.vocab_size + 1} tokens"):
        rl.check_length(gpt2, 10, "it", gpt2.vocab_size + 1)


def test_lengths_at_which_rotary_embeddings_change_are_known():
    factors = {"rope_type": "longrope", "rope_theta": 1e4,
               "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    phi = random_model("phi3", pad_token_id=0, max_position_embeddings=200,
                       original_max_position_embeddings=40, rope_parameters=factors)
    rl.check_length(phi.config, 40, "phi")
    with pytest.raises(ValueError, match="41 is too long for phi.* 40 "):
        rl.check_length(phi.config, 41, "phi")

    ids = torch.randint(1, 100, (2, 60))
    mask = torch.arange(60).expand(2, 60).bool() & (torch.arange(60) < torch.tensor([[30], [60]]))
    with torch.no_grad():  # the log-probs of the first 30 tokens in batches of so many columns
        alone, known, changed = (rl.token_logprobs(phi, ids[:, :n], mask[:, :n])[0][0, :30]
                                 for n in (30, 40, 60))
    assert torch.allclose(known, alone, atol=1e-5)
    assert not torch.allclose(changed, alone, atol=1e-3)


SCALED = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625},
          "gemma2": {"final_logit_softcapping": 2.0}}  # families that scale their logits


@pytest.mark.parametrize("family, way", [
    *itertools.product(["tiny", "qwen3", "llama"], ["packed", "packed, the head in parts"]),
    ("tiny", "padded"), *((family, "padded") for family in SCALED)])
def test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient(
        tiny, trajectories, family, way, monkeypatch):
    ends = dict(pad_token_id=0, eos_token_id=0, bos_token_id=0)
    model = (copy.deepcopy(tiny[0]) if family == "tiny"
             else random_model(family, **SCALED.get(family, {}), **ends))
    padded = rl.ComputePaths("padded", "padded", {})
    rl.set_compute_paths(model, rl.FASTEST if "packed" in way else padded)
    batch = update.collate(trajectories)
    ids, mask = batch["ids"], batch["mask"]
    mask[1] = False  # a row in which nothing was sampled

    def results(logprobs_of):
        logprobs, entropies = logprobs_of(model, ids, mask, 0.8)
        weights = torch.linspace(0.5, 2, ids.shape[1])
        loss = -(logprobs * weights).sum() / 100 - 0.01 * entropies.sum()
        model.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        return logprobs.detach(), entropies.detach(), gradient

    expected = results(plain_logprobs)
    max_logits = 50_000 if "parts" in way else 2**27
    monkeypatch.setitem(rl.MAX_LOGITS, "cpu", max_logits)
    assert ("parts" in way) == (mask.sum() * model.config.vocab_size > max_logits)
    fed = []  # the shapes of the ids that the model's body is given
    model.base_model.register_forward_pre_hook(
        lambda body, args, kwargs: fed.append(kwargs["input_ids"].shape), with_kwargs=True)

    actual = results(rl.token_logprobs)
    ((rows, columns),) = fed
    assert rows == (len(trajectories) if way == "padded" else 1)
    assert columns == ids.shape[1] - 1 if way == "padded" else columns < ids.numel()
    for ours, plain in zip(actual, expected, strict=True):
        assert plain.abs().max() > 0
        assert torch.allclose(ours, plain, atol=1e-5 * max(1, plain.abs().max()))


# ---- the critic ----


@pytest.fixture
def critic():
    critic = rl.Critic("tiny").eval()
    rl.set_compute_paths(critic, rl.FASTEST)
    torch.nn.init.normal_(critic.head.weight)
    return critic


@torch.no_grad()
def test_critic_values_only_look_back(critic, trajectories):
    """A value belongs to the state before its token.

    It must not change with that token or with any later one.
    """
    t = trajectories[0]
    ids, mask, at = torch.tensor([t.tokens]), torch.tensor([t.mask]), t.mask.index(True)
    values = critic(ids, mask)
    assert (values[~mask] == 0).all()
    for first, changes in ((at, False), (at - 1, True)):
        changed = ids.clone()
        changed[0, first:] = 5
        again = critic(changed, mask)
        assert torch.allclose(again[0, at], values[0, at], atol=1e-6) != changes


@torch.no_grad()
def test_the_critics_head_computes_in_float32_where_its_body_computes_in_bfloat16(
        critic, trajectories):
    t = trajectories[0]
    with rl.compute_in("bfloat16", "cpu"):
        values = critic(torch.tensor([t.tokens]), torch.tensor([t.mask]))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
