"""What a fork server imports before it forks, and which environment variables those imports read.

Owns the lists. Never imports anything itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

WORKERS = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "numpy",
    "grpc.experimental",
    "tabulate",
    "rich.table",
    "ttp.session",
    "ttp.persist",
    "ttp.optim.replica_optimizer",
    "ttp.processor.core.machine",
    "ttp.controller.agent_link",
)
"""Imported for the workers of every job. A module that is not installed is passed over."""

WITHOUT_ACCELERATOR = ("torch._dynamo",)
"""Imported as well on a node without one, as it is not known what that does to a device: torch imports it when the first optimizer is made, a second of
processor time in each rank."""

NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables of the server alone, where the job sets no others: pyarrow's jemalloc starts a thread as it is loaded, and nothing could be forked then."""

CONTROLLERS = ("ttp.controller.__main__",)
"""Imported for controllers."""

BY_PROGRAM = {
    "ttp.trainer": ("ttp.trainer.train",),
}
"""Imported when the workers run `-m` with this module."""

BY_INTERPRETER = ("LD_", "PYTHON")
"""Beginnings of names that are read as an interpreter begins: a script that sets one means it for its children."""

READ_BY_COMPILER = ("TORCH_COMPILE_", "TORCH_DYNAMO_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
"""Beginnings of the names of variables that `torch._dynamo` reads once, when it is loaded, and not torch before."""

READ_AT_IMPORT = (
    *BY_INTERPRETER,
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "GRPC_ENABLE_FORK_SUPPORT"),
    *(
        "TORCH_LOGS",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_SHOW_CPP_STACKTRACES",
    ),
    *READ_BY_COMPILER,
    *("PYTORCH_JIT", "ATEN_CPU_CAPABILITY"),
)
"""Beginnings of the names of variables that Python, torch, gRPC and the libraries below read once, when they are loaded."""

_WORKERS_OWN = ("TTP_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_")

READ_LATER = ("TORCHINDUCTOR_CACHE_DIR",)
"""Not these: torch sets them itself."""
ACCELERATORS = (
    "/dev/nvidiactl",
    "/dev/davinci_manager",
    "/dev/kfd",
    "/dev/mtgpu.0",
    "/dev/mtgpu0",
    "/dev/cambricon_ctl",
)
"""Device files of drivers that a training job may use. A display's alone (/dev/dri) says nothing."""


def is_read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


def was_read(name: str) -> bool:
    """Say whether what reads this variable has been imported in a process that began with torch."""
    return is_read_at_import(name) and (not name.startswith(READ_BY_COMPILER) or "torch._dynamo" in sys.modules)


def read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when modules are loaded: workers that differ in them need another fork server."""
    return {name: value for name, value in environ.items() if is_read_at_import(name)}


def without_workers_own(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that differ from worker to worker or from attempt to attempt."""
    return {name: value for name, value in environ.items() if not name.startswith(_WORKERS_OWN)}


def shadowing(folder: str, origins: Mapping[str, str]) -> str:
    """Return the name of a module in the first folder of a worker's path that hides one that was preloaded; empty: none does.

    `origins`: top-level name -> file of each preloaded module.
    """
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return ""
    for name in names:
        top = name.removesuffix(".py")
        if (top != name or top.isidentifier()) and top in origins:
            path = os.path.join(folder, name)
            own = path if top != name else os.path.join(path, "__init__.py")
            if os.path.isfile(own) and os.path.realpath(own) != os.path.realpath(origins[top]):
                return name
    return ""


def for_workers() -> tuple[str, ...]:
    """Return what is imported for the workers of every job on this node."""
    return WORKERS if has_accelerator() else (*WORKERS, *WITHOUT_ACCELERATOR)


def has_accelerator() -> bool:
    """Say whether this node has an accelerator, by its device files: nothing is asked of a driver."""
    return any(os.path.exists(path) for path in ACCELERATORS)
