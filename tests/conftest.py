"""What tests share: the built-in model, a pool of environments, models of other families."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may download anything
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def tiny():
    """The built-in model and its tokenizer."""
    import rl
    return rl.load_policy("tiny")


@pytest.fixture(scope="session")
def pool():
    from envs import EnvPool
    return EnvPool()


def random_model(family, **config):
    """A small causal LM of another family, with random weights and the tiny model's vocabulary.

    Two query heads share a key, and the head has the weights of the embedding, unless `config`
    says otherwise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import rl
    torch.manual_seed(0)
    _, tokenizer = rl.load_policy("tiny")
    size = dict(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, head_dim=16, initializer_range=0.3,
        tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size | config)).eval()
