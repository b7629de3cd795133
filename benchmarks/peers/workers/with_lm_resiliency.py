"""lm-resiliency: checkpoints in memory every step, each copied to a peer; its rendezvous backend restarts the workers.

`enable_resiliency` loads the newest checkpoint, and captures at the end of `optimizer.step()`.
"""

from __future__ import annotations

import os

import torch.distributed as dist
import toy
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(toy.build())
optimizer = toy.optimizer_of(model)
handle = enable_resiliency(
    model,
    optimizer,
    interval=1,
    enable_detection=False,
    group=dist.group.WORLD,
    nccl_group=dist.group.WORLD,
    checkpoint=InMemoryCkptConfig(
        enable=True, replication_jump=1, disk_flush_interval=0, disk_folder=str(toy.FOLDER / "gemini"), pin_memory=False
    ),
)
record = toy.Record()
for step in range(handle.step_count + 1, toy.LAST_STEP + 1):
    toy.train_step(model, optimizer, step, rank)
    record.finished(step, rank, ranks, os.environ["TORCHELASTIC_RESTART_COUNT"])
