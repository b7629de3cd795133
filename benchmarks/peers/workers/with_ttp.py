"""TTP in its shortest form: `ttp.protect` and the step to begin at; nothing is saved before a fault."""

from __future__ import annotations

import os

import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

import ttp

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(toy.build())
optimizer = toy.optimizer_of(model)
guard = ttp.protect(model, optimizer, save_dirs=[toy.FOLDER / "checkpoints"])
record = toy.Record()
for step in range(guard.step + 1, toy.LAST_STEP + 1):
    toy.train_step(model, optimizer, step, rank)
    record.finished(step, rank, ranks, os.environ["TORCHELASTIC_RESTART_COUNT"])
guard.close()
