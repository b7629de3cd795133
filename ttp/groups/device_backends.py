"""What process groups have on an accelerator: aborted, so that a thread that waits for one of their collectives comes out.

An aborted collective returns without an error, and its memory holds whatever was there: whoever asks for an abort says so first
(`ProcessGroups.left`), and what was waited for is not believed.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

_CLOSED_BY_CONNECTIONS = ("gloo", "fake")


def all_groups() -> list[Any]:
    """Return this rank's process groups, the user's as well, in the order in which they were made. torch lists them in a private name only."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def backend_of(group: Any, device: torch.device) -> Any:
    """Return what a group has on `device`; None: nothing."""
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):
        return None


def device_backends() -> list[tuple[torch.device, Any]]:
    """Return device type and backend of each process group's part on an accelerator, those made last first; none on the CPU."""
    pairs = [(kind, group) for group in reversed(all_groups()) for kind in group._device_types if kind.type != "cpu"]
    found = [(kind, backend) for kind, group in pairs if (backend := backend_of(group, kind)) is not None]
    return [(kind, backend) for kind, backend in found if backend.name() not in _CLOSED_BY_CONNECTIONS]


def without_abort() -> tuple[str, ...]:
    """Return the names of those that cannot be aborted."""
    return tuple(backend.name() for _, backend in device_backends() if not hasattr(backend, "abort"))


def abort_all() -> None:
    """Abort all of them at the same time: an abort frees memory, for which the driver waits until the kernels of all others have ended, too
    (pytorch issue 119797)."""
    aborts = [threading.Thread(target=backend.abort, daemon=True) for _, backend in device_backends()]
    for abort in aborts:
        abort.start()
    for abort in aborts:
        abort.join()


def await_kernels() -> None:
    """Block until the devices have done all that was started on them: a collective that was aborted writes no more."""
    for kind in {kind.type for kind, _ in device_backends()}:
        torch.get_device_module(kind).synchronize()
