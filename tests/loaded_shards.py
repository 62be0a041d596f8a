"""What the ranks of a sharded PPO run with a KL load, as whole tensors.

    loaded_shards.py FOLDER ...

test_parallel.py runs it under torchrun. The parameters and buffers of policy, critic and reference
are written into each model's folder, after gathering them from the ranks' shards.
"""

import sys
from pathlib import Path

from safetensors.torch import save_file

import rl
import train
from config import parse_config
from parallel import end_process, init_distributed, ranks

_, _, device = init_distributed()
train.find_paths = lambda *_: rl.ComputePaths("ragged", "packed", {})  # random models are not exact
for folder in map(Path, sys.argv[1:]):
    cfg = parse_config(["--env", "babyai", "--model", str(folder), "--algo", "ppo", "--shard",
                        "true", "--kl_coef", "0.1", "--dtype", "bfloat16",
                        "--out", str(folder / "run")])
    print("loading", folder.name, file=sys.stderr)
    policy, _, trained, reference, _ = train.load_for_training(cfg, None, device)
    models = {"policy": policy, "critic": trained["critic"][0], "reference": reference}
    for kind, model in models.items():
        whole = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        whole |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        if ranks()[0] == 0:
            save_file(whole, folder / f"{kind}.loaded")
end_process()
