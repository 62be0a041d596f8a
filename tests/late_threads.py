"""A sharded rank whose last act is a message, and whose Gloo threads are slow to clean up after it.

test_parallel.py runs it under torchrun. All ranks use one core, and the threads have the lowest
priority, so that they free the message's tensors while the main thread ends.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from parallel import end_process

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(64, 64))
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().startswith("pt_gloo"):
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
for p in model.parameters():
    p.full_tensor()
end_process()
