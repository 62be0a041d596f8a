"""One SGD step of rate 1 on trajectories from a file: the weights then say the gradient. For test_parallel.py, under torchrun."""

import json
import sys

import torch

import algos
import rl
import update
from parallel import init_distributed, ranks, shard
from rollout import Trajectory

trajectories, out, flags, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])
_, _, device = init_distributed()
torch.set_num_threads(1)
played = [Trajectory(**row) for row in json.load(open(trajectories))]
model, tokenizer = rl.load_policy("tiny")
if "recompute" in flags:
    rl.recompute_blocks(model)
if "shard" in flags:
    shard(model, device)
if "padded" in flags:
    rl.packs = lambda config: False
count = sum(sum(t.mask) for t in played)


def loss_of(batch):
    logp, entropy = rl.token_logprobs(model, batch["ids"], batch["mask"])
    loss = -logp * batch["advantages"] - 0.1 * entropy
    return algos.aggregate(loss, batch["mask"], "token", count), {"tokens": batch["mask"].sum()}


rows = [[0.1 * (i + 1) * m for m in t.mask] for i, t in enumerate(played)]
stats = update.optimizer_step(model, torch.optim.SGD(model.parameters(), lr=1.0), played, {"advantages": rows}, loss_of, max_tokens, 1e9)
rl.save(out, model, tokenizer)
if ranks()[0] == 0:
    print(json.dumps(stats))
