"""The devices this trainer runs on: one table, and the few calls that differ between them.

Owns every mention of a device's name, its torch plug-in and its collective backend. A new device is a new row.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceKind:
    name: str
    """torch's device type."""
    backend: str
    """Collective backend of tensors on it."""
    plugin: str | None = None
    """Module that brings the device to torch; None: torch has it."""


DEVICES = {
    kind.name: kind
    for kind in (
        DeviceKind("cuda", "nccl"),
        DeviceKind("npu", "hccl", plugin="torch_npu"),
        DeviceKind("musa", "mccl", plugin="torch_musa"),
        DeviceKind("cpu", "gloo"),
    )
}
"""In the order that `auto` tries them."""


def choose_device(name: str) -> DeviceKind:
    """Return the device called `name`, or the first one present for `auto`. Raises ConfigError when it is not there."""
    if name == "auto":
        return next(kind for kind in DEVICES.values() if _missing(kind) is None)
    kind = DEVICES[name]
    reason = _missing(kind)
    if reason is not None:
        raise ConfigError(f"training_config.device is {name!r}: {reason}; install it, or use device: auto or cpu")
    return kind


def bind(kind: DeviceKind, local_rank: int) -> torch.device:
    """Make the device of this local rank the current one and return it. Raises ConfigError when the host has too few."""
    if kind.name == "cpu":
        return torch.device("cpu")
    count = int(_module(kind).device_count())
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no {kind.name} device of its own: this host has {count}; start at most {count} ranks"
            " here, or use --training_config.device cpu"
        )
    _module(kind).set_device(local_rank)
    return torch.device(kind.name, local_rank)


def make_deterministic() -> None:
    """Let torch choose, for the rest of this process, only kernels that give the same bits every time, or raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a write of every new tensor (a property of the module itself, hence setattr).
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def seed_all(seed: int) -> None:
    """Seed the random numbers of the CPU and of every device of this process (plug-ins hook into the same call)."""
    torch.manual_seed(seed)


def _missing(kind: DeviceKind) -> str | None:
    """Return why this process cannot use the device, or None."""
    if kind.name == "cpu":
        return None
    if kind.plugin is not None:
        if importlib.util.find_spec(kind.plugin) is None:
            return f"the torch plug-in {kind.plugin} is not installed"
        importlib.import_module(kind.plugin)
    module = getattr(torch, kind.name, None)
    if module is None or not module.is_available():
        return f"torch {torch.__version__} finds no {kind.name} device on this host"
    return None


def _module(kind: DeviceKind) -> Any:
    return getattr(torch, kind.name)
