"""Several jobs for one group of processes: starting processes takes longer than most of the jobs.

    two_ranks.py JOBS    # a file with a JSON list of ["train", [ARGUMENT, ...]] and the like

test_parallel.py runs it under torchrun, and calls `one_step` itself, too. A job leaves its results
in files.
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from conftest import plain_logprobs
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

import algos
import checkpoint
import config
import rl
import sft
import train
import update
from parallel import end_process, init_distributed, ranks, shard
from trajectory import read_trajectories


def one_step(trajectory_file, out, flags, max_tokens):
    """One SGD step with learning rate 1 on trajectories from a file, so that the weights, which are
    written into the folder `out` with the statistics, give the gradient.

    flags, separated by commas:
        plain       the oracle: the model's own forward pass over each segment, without update.py
        padded      update.py without packed rows
        shard       FSDP2
        recompute   gradient checkpointing
    The statistics have "rows": the largest number of rows that the model was given at once.
    """
    played = read_trajectories(trajectory_file)
    model, _ = rl.load_policy("tiny")
    if "recompute" in flags:
        rl.recompute_blocks(model)
    if "shard" in flags:
        shard(model, torch.device("cpu"))
    paths = rl.ComputePaths("padded", "padded", {}) if "padded" in flags else rl.FASTEST
    rl.set_compute_paths(model, paths)
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

    if "plain" in flags:
        stats = plain_step(model, optimizer, played, advantages, denominator)
    else:
        stats = update.optimizer_step(model, optimizer, batch, range(len(played)), loss_of,
                                      max_tokens, max_grad_norm=1e9)
    weights = rl.full_state_dict(model)
    if ranks()[0] == 0:
        Path(out).mkdir()
        save_file(weights, Path(out) / "weights")
        (Path(out) / "stats.json").write_text(json.dumps(stats | {"rows": max(rows_fed)}))


def plain_step(model, optimizer, played, advantages, denominator):
    """The same step as by `optimizer_step`, with the logits of all positions."""
    loss = 0.0
    for t, advantage in zip(played, advantages):
        for start, end in t.spans():
            ids, mask = (torch.tensor([values[start:end]]) for values in (t.tokens, t.mask))
            logp, entropy = plain_logprobs(model, ids, mask)
            weighted = logp * torch.tensor([advantage[start:end]]) + 0.1 * entropy
            loss -= weighted.sum() / denominator
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    optimizer.step()
    return {"tokens": denominator, "loss": loss.item(), "grad_norm": norm}


def load(*folders):
    """Write what the ranks of a sharded PPO run with a KL load, as whole tensors, into each model's
    folder: the parameters and buffers of policy, critic and reference."""
    for folder in folders:
        flags = f"--model {folder} --algo ppo --shard --kl_coef 0.1 --dtype bfloat16 --out /none"
        paths = rl.ComputePaths("ragged", "packed", {})  # random models are not exact
        with patch.object(train, "find_paths", return_value=paths):
            run = train.load(config.parse_config(flags.split()), None, None)
        models = {"policy": run.policy, "critic": run.trained["critic"][0],
                  "reference": run.reference}
        for kind, model in models.items():
            whole = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
            whole |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            if ranks()[0] == 0:
                save_file(whole, Path(folder) / f"{kind}.loaded")


def end_late():
    """End with a message whose tensors Gloo's threads free while the main thread ends: all ranks
    use one core, and the threads have the lowest priority."""
    core = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().startswith("pt_gloo"):
            os.sched_setaffinity(int(thread.name), core)
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    for p in fully_shard(torch.nn.Linear(64, 64)).parameters():
        p.full_tensor()


JOBS = {
    "one_step": one_step, "load": load, "end_late": end_late,
    "train": lambda *argv: train.train(config.parse_config(list(argv))),
    "sft": lambda *argv: sft.sft(sft.parse_sft_config(list(argv)))}

if __name__ == "__main__":
    rank, *_ = init_distributed()
    if rank == 1:  # it returns late from saving, and must not find that the folder was renamed
        save = checkpoint.dcp.save
        checkpoint.dcp.save = lambda *args, **kw: (save(*args, **kw), time.sleep(0.2))
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()):
        dist.barrier()
        JOBS[name](*arguments)
    end_process()
