import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing may be downloaded
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def tiny():
    """The built-in model and its tokenizer."""
    import rl
    return rl.load_policy("tiny")


@pytest.fixture(scope="session")
def pool():
    from rollout import EnvPool
    return EnvPool()
