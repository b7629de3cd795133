"""torchft: each rank is a replica group of its own, under a torchrun of its own; a lighthouse counts who takes part in a step."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import toy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

replica = int(os.environ["REPLICA_GROUP_ID"])
net = toy.build()
inner = toy.optimizer_of(net)


def state_dict() -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": inner.state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    net.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"toy_{replica}",
    timeout=timedelta(seconds=30),
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, inner)
record = toy.Record()
while manager.current_step() < toy.LAST_STEP:
    before = manager.current_step()
    toy.train_step(model, optimizer, before + 1, replica)
    if manager.current_step() == before + 1 and manager.is_participating():
        record.finished(before + 1, replica, manager.num_participants(), "")
