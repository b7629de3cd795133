"""DDP under torchrun with DCP checkpoints every so many steps: synchronous, asynchronous (PEERS_SAVE=async), or none (PEERS_SAVE=none).

`train` takes a function to call after each step, for launchers that want a heartbeat.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import toy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

SAVE = os.environ.get("PEERS_SAVE", "sync")
CHECKPOINTS = toy.FOLDER / "checkpoints"


def complete() -> list[int]:
    """Return the steps of the checkpoints whose metadata is written, oldest first."""
    return sorted(int(path.parent.name) for path in CHECKPOINTS.glob("*/.metadata"))


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load_newest(model: Any, optimizer: Any) -> int:
    step = complete()[-1] if complete() else 0
    if step:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(CHECKPOINTS / str(step)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def train(after_step: Callable[[], None] = lambda: None) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(toy.build())
    optimizer = toy.optimizer_of(model)
    record = toy.Record()
    saving = dist.new_group(backend="gloo") if SAVE == "async" else None  # a group of its own: it runs beside DDP's
    pending = None
    for step in range(load_newest(model, optimizer) + 1, toy.LAST_STEP + 1):
        toy.train_step(model, optimizer, step, rank)
        record.finished(step, rank, ranks, os.environ["TORCHELASTIC_RESTART_COUNT"])
        after_step()
        if SAVE == "none" or step % toy.SAVE_EVERY:
            continue
        target = str(CHECKPOINTS / str(step))
        if SAVE == "sync":
            dcp.save(state_of(model, optimizer), checkpoint_id=target)
        else:
            if pending is not None:
                pending.result()
            pending = dcp.async_save(state_of(model, optimizer), checkpoint_id=target, process_group=saving)
        if rank == 0:
            for old in complete()[:-2]:
                shutil.rmtree(CHECKPOINTS / str(old))


if __name__ == "__main__":
    train()
