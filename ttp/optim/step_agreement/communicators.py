"""Whether the communicators of an accelerator report an error.

Owns the question only. On the CPU a failed collective raises; on an accelerator an aborted one may return at once, with whatever
is in memory, and the error shows in its communicator alone (`get_error` of torch's ProcessGroupNCCL). Never aborts anything.
"""

from __future__ import annotations

from typing import Any

import torch

from ttp.errors import AbortedCollective
from ttp.groups.device_backends import all_groups, backend_of
from ttp.groups.process_groups import GROUPS

_RAISES = {"gloo", "fake"}
"""Backends of which a failed collective raises, on a device too; and one of which none fails."""


def check_communicators(device: torch.device, step: int) -> None:
    """Raise AbortedCollective naming the first process group whose communicator on `device` reports an error. At once on the CPU."""
    if device.type == "cpu":
        return
    if GROUPS.left:
        raise AbortedCollective(f"step {step}: process groups are being made again: this step is given up")
    for group in all_groups():
        error = _error_of(backend_of(group, device))
        if error:
            raise AbortedCollective(
                f"step {step}: the communicator of process group {group.group_name} reports {error}: its collectives may have"
                " returned wrong values and nothing of this step is committed; look for the rank that failed first"
            )


def silent_backends(device: torch.device) -> tuple[str, ...]:
    """Return the names of the backends of this rank's groups on `device` that cannot be asked for an error and need not raise. None on the CPU."""
    if device.type == "cpu":
        return ()
    backends = [backend for group in all_groups() if (backend := backend_of(group, device)) is not None]
    return tuple(sorted({backend.name() for backend in backends if _error_of(backend) is None} - _RAISES))


def _error_of(backend: Any) -> str | None:
    """Return the name of the error that a communicator reports; empty: none; None: it cannot say (gloo; torch's base class raises)."""
    try:
        error = backend.get_error()
    except (AttributeError, RuntimeError):
        return None
    return "" if error.name == "SUCCESS" else str(error.name)
