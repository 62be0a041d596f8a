"""One SGD step with learning rate 1 on trajectories from a file, so that the weights give the
gradient.

    one_step.py TRAJECTORIES OUT FLAGS MAX_TOKENS

test_parallel.py runs it alone or under torchrun. FLAGS, separated by commas:
    plain       the oracle: the model's own forward pass over padded rows and one backward pass,
                without update.py
    padded      update.py without packed rows
    shard       FSDP2
    recompute   gradient checkpointing
It prints the statistics of the step as JSON, with "rows": the largest number of rows that the model
was given at once.
"""

import json
import sys

import torch

import algos
import checkpoint
import rl
import update
from parallel import end_process, init_distributed, ranks, shard
from trajectory import Trajectory

trajectory_file, out = sys.argv[1:3]
flags = sys.argv[3].split(",")
max_tokens = int(sys.argv[4])
_, _, device = init_distributed()
torch.set_num_threads(1)
with open(trajectory_file) as f:
    played = [Trajectory(**row) for row in json.load(f)]
model, tokenizer = rl.load_policy("tiny")
if "recompute" in flags:
    rl.recompute_blocks(model)
if "shard" in flags:
    shard(model, device)
padded = rl.ComputePaths("padded", "padded", {})
rl.set_compute_paths(model, padded if "padded" in flags else rl.FASTEST)

rows_fed = []
model.base_model.register_forward_pre_hook(
    lambda body, args, kwargs: rows_fed.append(len(kwargs["input_ids"])), with_kwargs=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
advantages = [[0.1 * (i + 1) * sampled for sampled in t.mask] for i, t in enumerate(played)]
batch = update.collate(played, advantages=advantages)
denominator = int(batch["mask"].sum())


def loss_of(part):
    logp, entropy = rl.token_logprobs(model, part["ids"], part["mask"])
    loss = -logp * part["advantages"] - 0.1 * entropy
    stats = {"tokens": part["mask"].sum()}
    return algos.aggregate(loss, part["mask"], "token", denominator), stats


def plain_step():
    """The same step as by `optimizer_step`, with the logits of all positions, segment by
    segment."""
    losses = []
    for t, advantage in zip(played, advantages):
        for start, end in t.spans():
            ids = torch.tensor([t.tokens[start:end]])
            mask = torch.tensor([t.mask[start + 1:end]])
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
            entropy = -(logp.exp() * logp).sum(-1)
            chosen = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
            loss = -chosen * torch.tensor([advantage[start + 1:end]]) - 0.1 * entropy
            losses.append(loss[mask].sum())
    loss = sum(losses) / denominator
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    optimizer.step()
    return {"tokens": denominator, "loss": float(loss), "grad_norm": norm}


if "plain" in flags:
    stats = plain_step()
else:
    stats = update.optimizer_step(model, optimizer, batch, range(len(played)), loss_of, max_tokens,
                                  max_grad_norm=1e9)
checkpoint.save(out, model, tokenizer)
if ranks()[0] == 0:
    print(json.dumps(stats | {"rows": max(rows_fed)}))
end_process()
