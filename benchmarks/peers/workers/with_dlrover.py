"""DLRover's flash checkpoint: a copy in shared memory after every step, loaded from there after a restart by `dlrover-run`."""

from __future__ import annotations

import os

import torch.distributed as dist
import toy
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(toy.build())
optimizer = toy.optimizer_of(model)
checkpointer = DdpCheckpointer(str(toy.FOLDER / "checkpoints"))
state = checkpointer.load_checkpoint()
if state:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
record = toy.Record()
for step in range(state.get("step", 0) + 1, toy.LAST_STEP + 1):
    toy.train_step(model, optimizer, step, rank)
    record.finished(step, rank, ranks, os.environ["TORCHELASTIC_RESTART_COUNT"])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
