"""A process that takes the place of one that was lost, until it is given the state of the job.

The others train, or wait for it: none of them takes part in what this process does as it starts. So its process groups have no peers (torch's
fake backend: every collective returns at once, what others would give being this rank's own), and what ranks agree on at the start
comes from the first start (`ttp.exchange.agreed`). `ProcessGroups.make_again` then makes the groups for real.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ttp.config import in_place_on_devices, launched_place, replaces
from ttp.groups.process_groups import GROUPS


def vacant() -> int:
    """Return the number of the fault in which this process was started in another's place; 0: it was not, or has been given the state."""
    return 0 if GROUPS.recovery else replaces()


def init_process_group(backend: str | None = None, **arguments: Any) -> None:
    """Do what `torch.distributed.init_process_group` does. In a process that takes a lost one's place the groups have no peers until
    `session.resume()`. With TTP_IN_PLACE=cuda it leaves out `device_id`: groups that are bound to a device cannot be made again."""
    GROUPS.replaceable = True
    if in_place_on_devices():
        arguments.pop("device_id", None)
    if not vacant():
        dist.init_process_group(backend, **arguments)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, size = launched_place()
    GROUPS.backend, GROUPS.timeout = backend or "gloo", arguments.get("timeout")
    kinds = [part.partition(":")[0] for part in GROUPS.backend.split(",") if ":" in part]
    fake = ",".join(f"{kind}:fake" for kind in kinds) or "fake"
    dist.init_process_group(fake, store=FakeStore(), rank=rank, world_size=size)
