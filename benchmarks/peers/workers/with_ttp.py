"""TTP in its shortest form for both ways back: `ttp.protect` and a training function that can be entered again; nothing is saved before a fault.

With TTP_IN_PLACE=False every fault costs a restart.
"""

from __future__ import annotations

import os

import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

import ttp

ttp.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(toy.build())
optimizer = toy.optimizer_of(model)
guard = ttp.protect(model, optimizer, save_dirs=[toy.FOLDER / "checkpoints"], in_place=True)
record = toy.Record()


@ttp.ttp_to_persist
def train() -> None:
    attempt = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} after step {guard.step}"  # another after each recovery
    for step in range(guard.step + 1, toy.LAST_STEP + 1):
        toy.train_step(model, optimizer, step, rank)
        record.finished(step, rank, ranks, attempt)


train()
guard.close()
