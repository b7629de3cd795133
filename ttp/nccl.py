"""Settings of torch's NCCL watchdog under which it leaves a fault to TTP.

Owns their names, values and reasons. torch's defaults end the process of a survivor, or abort its communicators so that a waiting
collective returns wrong values without an error. torch reads the variables when a process group is made. Never reads os.environ.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "other values end a surviving process (1, 3), or abort its communicators, after which collectives return garbage (1, 2)",
    ),
    "TORCH_NCCL_ENABLE_MONITORING": (
        "0",
        "the monitor ends a process whose watchdog waits in a CUDA call, as survivors' do",
    ),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "a CUDA error that is raised in the watchdog's thread ends the process"),
    "TORCH_NCCL_PROPAGATE_ERROR": ("0", "one rank's error would be taken for an error of every rank"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": (
        "0",
        "a watchdog that has seen an error waits a minute for what other ranks write, and its process group cannot be made again meanwhile",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "a wait that times out aborts the communicator"),
}
"""Variable: (value, why)."""


MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many hardware queues CUDA gives a process (default: 8). Megatron-LM asks for 1, so that kernels start in the order of their launches."""


def set_nccl(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not set, before workers start."""
    for name, (value, _) in NCCL_SETTINGS.items():
        environ.setdefault(name, value)


def nccl_warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each variable that is not as TTP needs it."""
    one_queue = (
        f"{MAX_CONNECTIONS}={environ[MAX_CONNECTIONS]!r}: expected 2 or more, as with one hardware queue the copies of an emergency checkpoint"
        " may wait behind a collective that does not end. Unset it, or try `python -m ttp.selftest` with it"
        if environ.get(MAX_CONNECTIONS) == "1"
        else ""
    )
    settings = tuple(
        f"{name}={environ[name]!r}: expected {value}, as {reason}. Unset it; ttprun sets it"
        if name in environ
        else f"{name} is not set: expected {value}, as {reason}. Set it before the process group is made, or start the job with ttprun"
        for name, (value, reason) in NCCL_SETTINGS.items()
        if environ.get(name) != value
    )
    return (*settings, one_queue) if one_queue else settings
