"""The host memory that a rank needs to load sharded models.

    python experiments/loading.py RANKS [MILLIONS] [resume]

A random Qwen2 of MILLIONS (192) parameters is written to a temporary folder, once in bfloat16 and
once in float32. From each, RANKS processes on the CPU load what a sharded PPO run with a KL holds:
policy, critic and reference. With `resume` they save a checkpoint and load it, without a critic.

Prints two sizes in MiB: their largest values over the ranks and the time of loading, less those
before it. resident: all pages. own: those that are not pages of a mapped file, which other
processes would share and the kernel may drop. "after" is what stays: the shards themselves, and
freed memory that malloc keeps.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import parse_config  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import rl  # noqa: E402
import train  # noqa: E402
from checkpoint import save  # noqa: E402
from parallel import end_process, gather, init_distributed, ranks  # noqa: E402

PARAMETERS_OF_A_LAYER = 15.7e6  # of `make_model`
FIELDS = {"VmRSS": "resident", "RssAnon": "own"}


def memory() -> dict[str, int]:
    """MiB that this process holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[field].split()[0]) // 1024 for field, name in FIELDS.items()}


class Peak:
    """Inside `with`, the largest memory is noted every 2 ms."""

    def __enter__(self):
        self.largest = self.before = memory()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.ended.wait(0.002):
            now = memory()
            self.largest = {name: max(now[name], most) for name, most in self.largest.items()}

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        after = memory()
        self.grown = {f"peak, {name}": self.largest[name] - self.before[name] for name in after}
        self.grown |= {f"after, {name}": after[name] - self.before[name] for name in after}


def make_model(folder: Path, millions: float, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(str(rl.TINY_MODEL))
    config.hidden_size, config.intermediate_size = 1024, 4096
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    config.num_hidden_layers = round(millions * 1e6 / PARAMETERS_OF_A_LAYER)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    rl.load_tokenizer("tiny").save_pretrained(folder)


def load_in_this_rank(folder: Path, resume: bool) -> None:
    """One of the processes: load, and let rank 0 print the largest figures of all."""
    torch.set_num_threads(1)
    init_distributed()
    os.environ["XDG_CACHE_HOME"] = str(folder)  # the check of the model is part of its loading
    more = [] if resume else ["--algo", "ppo"]
    cfg = parse_config(["--env", "babyai", "--model", str(folder), "--shard", "true",
                        "--kl_coef", "0.1", "--dtype", "bfloat16", "--out", str(folder / "run"),
                        *more])
    checkpoint = folder / "run/checkpoints/step_000001"
    if resume:
        run = train.load(cfg)
        save(checkpoint, run.policy, run.tokenizer, {"step": 1, "horizon": {}}, run.trained)
        del run
    with Peak() as peak:
        run = train.load(cfg)
        time.sleep(0.01)
    for name in peak.grown:
        figures = gather([peak.grown[name]])
        if ranks()[0] == 0:
            print(f"  {name:15} {max(figures):6} MiB")
    end_process()


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "resume"]
    if not 1 <= len(words) <= 2:
        sys.exit(__doc__)
    num_ranks = words[0]
    millions = float(words[1]) if len(words) == 2 else 192.0
    resume = ["resume"] if "resume" in sys.argv else []
    for dtype in (torch.bfloat16, torch.float32):
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), millions, dtype)
            print(f"{dtype}, {num_ranks} ranks", flush=True)
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node",
                            num_ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
                            __file__, "rank", folder, *resume], check=True)


if sys.argv[1:2] == ["rank"]:
    load_in_this_rank(Path(sys.argv[2]), "resume" in sys.argv)
else:
    main()
