"""NVIDIA's in-process restart: the survivors call the training function again, with fewer ranks, in the same processes.

Rank 0 writes a checkpoint every so many steps, as the system's own example does. The processes are started without torchrun, which would end
all of them at the first death.
"""

import datetime
import os
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

PORT = int(os.environ["MASTER_PORT"])
CHECKPOINT = toy.FOLDER / "checkpoint.pt"
record = toy.Record()


@inprocess.Wrapper(store_kwargs={"port": PORT + 1})
def train(call_wrapper: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045 - the wrapper looks for this annotation
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", PORT + 2 + call_wrapper.iteration, ranks, rank == 0, multi_tenant=True)
    timeout = datetime.timedelta(seconds=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    model = DistributedDataParallel(toy.build())
    optimizer = toy.optimizer_of(model)
    first = 1
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, toy.LAST_STEP + 1):
        toy.train_step(model, optimizer, step, rank)
        record.finished(step, rank, ranks, call_wrapper.iteration)
        call_wrapper.ping()
        if step % toy.SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with call_wrapper.atomic():
                torch.save(state, CHECKPOINT.with_suffix(".new"))
                CHECKPOINT.with_suffix(".new").rename(CHECKPOINT)


train()
