"""What tests share: the built-in model, a pool of environments, commands, other models."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several files are tested at a time
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may download anything
import torch  # noqa: E402: it reads these variables

HAS_GPU = torch.cuda.is_available()
CACHE = tempfile.TemporaryDirectory()  # what is known of models from other times is not used
os.environ["XDG_CACHE_HOME"] = CACHE.name
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# The project's Python files: those that git knows, so not a user's own, nor a virtual environment.
KNOWN = subprocess.run("git ls-files '*.py'", shell=True, cwd=ROOT, capture_output=True, text=True)
FILES = [ROOT / name for name in KNOWN.stdout.split() if (ROOT / name).exists()]
FILES = FILES or [*ROOT.glob("*.py"), *ROOT.glob("[!.r]*/**/*.py")]  # without git: nor runs

# Files that take minutes are tested first: the last one would keep one core waiting.
LONG_FILES = ["test_train.py", "test_parallel.py", "test_ideas.py", "test_webarena.py",
              "test_eval.py"]


def pytest_configure(config):
    """Only tests marked "gpu" see a GPU: elsewhere figures are compared bit for bit with those of a
    CPU, and two ranks would need two GPUs. With -n this process only starts the others, which
    inherit its environment: it hides nothing."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("tx", None)
    if HAS_GPU and runs_tests:
        torch.cuda.init()
        torch.cuda.device_count()  # from here on remembered
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that tests start
        torch.cuda.is_available = lambda: False


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def run_script(name, *args):
    """Run a command of the top level, such as train.py, in this process, whose imports take no
    second time. -> what subprocess.run gives: returncode, stdout, stderr."""
    out, errors = io.StringIO(), io.StringIO()
    code = 0
    with (pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(errors)):
        patch.setattr(sys, "argv", [name, *map(str, args)])
        patch.chdir(ROOT)
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as e:
            code = e.code or 0
    if isinstance(code, str):
        errors.write(code + "\n")
        code = 1
    return subprocess.CompletedProcess(args, code, out.getvalue(), errors.getvalue())


@pytest.fixture(autouse=True)
def gpu(request, monkeypatch):
    if "gpu" in request.keywords:
        if not HAS_GPU:
            pytest.skip("needs a GPU")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture(scope="session")
def tiny():
    """The built-in model, computed in the fastest ways, and its tokenizer."""
    import rl
    model, tokenizer = rl.load_policy("tiny")
    rl.set_compute_paths(model, rl.FASTEST)
    return model, tokenizer


@pytest.fixture(scope="session")
def pool():
    from envs import EnvPool
    return EnvPool()


@pytest.fixture(scope="module")
def trajectories(tiny, pool):
    """Two of each of three items. A test that changes them takes a copy."""
    from rollout import rollout
    return rollout(*tiny, pool, ["babyai_8", "babyai_50", "textcraft_3"], 3, samples=2,
                   max_tokens=8)


# A template with channels, like GPT-OSS's and shorter.
CHANNELS = (
    "<|start|>system<|message|>Channels: analysis, final.<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")


@pytest.fixture(scope="session")
def channels():
    """The built-in model with a template with channels, its tokenizer. The new tokens' weights are
    random."""
    import rl
    model, tokenizer = rl.load_policy("tiny")
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    tokenizer.add_special_tokens({"eos_token": "<|return|>", "additional_special_tokens": names})
    tokenizer.chat_template = CHANNELS
    tokenizer.generation_eos_ids = []
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def random_model(family, **config):
    """A small causal LM of another family, with random weights and the tiny model's vocabulary.

    Two query heads share a key, and the head has the weights of the embedding, unless `config`
    says otherwise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import rl
    vocab_size = len(rl.load_tokenizer("tiny"))
    torch.manual_seed(0)
    size = dict(vocab_size=vocab_size, hidden_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, head_dim=16,
                initializer_range=0.3, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size | config)).eval()


def plain_logprobs(model, ids, mask, temperature=1.0):
    """An oracle for `rl.token_logprobs`: the model's own forward pass over padded rows, all
    positions' logits at once."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1] / temperature
    logp = torch.log_softmax(logits, -1)
    found = logp.gather(-1, ids[:, 1:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
    return tuple(torch.nn.functional.pad(x, (1, 0)) * mask for x in found)
