"""TTP: a training job that loses nothing when part of it dies.

The public names are loaded on first use, so that `import ttp.controller` (a process without tensors) does not load torch.
In a worker of ttprun's, `import ttp` has the exception that ends the process recorded; anywhere else it does nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ttp.exchange import error_file
from ttp.version import VERSION

if TYPE_CHECKING:
    from ttp.adopt.protect import Guard as Guard
    from ttp.adopt.protect import protect as protect
    from ttp.checkpoint.find import Checkpoint as Checkpoint
    from ttp.checkpoint.find import open_checkpoint as open_checkpoint
    from ttp.config import Settings as Settings
    from ttp.groups.vacancy import init_process_group as init_process_group
    from ttp.optim.replica_optimizer import ClipNorm as ClipNorm
    from ttp.optim.replica_optimizer import ClipValue as ClipValue
    from ttp.optim.replica_optimizer import LossScale as LossScale
    from ttp.optim.replica_optimizer import StepResult as StepResult
    from ttp.optim.replica_optimizer import TTPOddReplicaOptimizer as TTPOddReplicaOptimizer
    from ttp.optim.replica_optimizer import TTPReplicaOptimizer as TTPReplicaOptimizer
    from ttp.optim.shard_layout.placement import replicas_apart as replicas_apart
    from ttp.persist import ttp_to_persist as ttp_to_persist
    from ttp.runtime.step_copies import CopyOptions as CopyOptions
    from ttp.session import ResumePoint as ResumePoint
    from ttp.session import Session as Session
    from ttp.session import current_session as current_session
    from ttp.session import start as start

_HOMES = {
    "Checkpoint": "ttp.checkpoint.find",
    "ClipNorm": "ttp.optim.replica_optimizer",
    "ClipValue": "ttp.optim.replica_optimizer",
    "LossScale": "ttp.optim.replica_optimizer",
    "StepResult": "ttp.optim.replica_optimizer",
    "TTPReplicaOptimizer": "ttp.optim.replica_optimizer",
    "TTPOddReplicaOptimizer": "ttp.optim.replica_optimizer",
    "init_process_group": "ttp.groups.vacancy",
    "ttp_to_persist": "ttp.persist",
    "CopyOptions": "ttp.runtime.step_copies",
    "ResumePoint": "ttp.session",
    "Session": "ttp.session",
    "Settings": "ttp.config",
    "current_session": "ttp.session",
    "Guard": "ttp.adopt.protect",
    "protect": "ttp.adopt.protect",
    "open_checkpoint": "ttp.checkpoint.find",
    "replicas_apart": "ttp.optim.shard_layout.placement",
    "start": "ttp.session",
}

__all__ = sorted([*_HOMES, "errors"])
__version__ = VERSION

error_file.install_in_worker()


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("ttp.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'ttp' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
