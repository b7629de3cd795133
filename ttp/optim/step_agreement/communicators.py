"""Whether the communicators of an accelerator report an error.

Owns the question only. On the CPU a failed collective raises; on an accelerator an aborted one may return at once, with whatever
is in memory, and the error shows in its communicator alone (`get_error` of torch's ProcessGroupNCCL). Never aborts anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ttp.errors import AbortedCollective


def check_communicators(device: torch.device, step: int) -> None:
    """Raise AbortedCollective naming the first process group whose communicator on `device` reports an error. At once on the CPU."""
    if device.type == "cpu" or not dist.is_initialized():
        return
    for group in _process_groups():
        error = _error_of(group, device)
        if error:
            raise AbortedCollective(
                f"step {step}: the communicator of process group {group.group_name} reports {error}: its collectives may have"
                " returned wrong values and nothing of this step is committed; look for the rank that failed first"
            )


def _process_groups() -> list[Any]:
    """Return this rank's process groups, the user's as well. torch lists them in a private name only."""
    return list(dist.distributed_c10d._world.pg_map)


def _error_of(group: Any, device: torch.device) -> str:
    """Return the name of the error that a group's communicator reports; empty: none, or it cannot say (gloo)."""
    try:
        error = group._get_backend(device).get_error()
    except (AttributeError, RuntimeError):  # the group has no communicator on this device, or one that cannot say
        return ""
    return "" if error.name == "SUCCESS" else str(error.name)
