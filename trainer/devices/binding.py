"""Finding and binding the device that a rank runs on: the few calls that differ between the devices of `device_table`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist

from ttp.errors import ConfigError

from .device_table import DEVICES, HOST, PLUGIN, DeviceKind


def choose_device(name: str, asked_by: str = "training_config.device") -> DeviceKind:
    """Return the device called `name`, or the first one present for `auto`. `asked_by`: the key or option that names it. Raises
    ConfigError when the table has no such device, or this host."""
    if name == "auto":
        return next(_named(kind) for kind in DEVICES.values() if _missing(kind) is None)
    if name not in DEVICES:
        raise ConfigError(f"{asked_by}: got {name!r}, expected auto, {', '.join(DEVICES)}")
    kind = DEVICES[name]
    reason = _missing(kind)
    if reason is not None:
        raise ConfigError(f"{asked_by} is {name!r}: {reason} use {HOST} or auto")
    return _named(kind)


def bind(kind: DeviceKind, local_rank: int, asked_by: str = "--training_config.device") -> torch.device:
    """Make the device of this local rank the current one and return it. Raises ConfigError when the host has too few."""
    if kind.is_host:
        return torch.device(kind.name)
    count = int(_module(kind).device_count())
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no {kind.name} device of its own: this host has {count}; start at most {count} ranks"
            f" here, or use {asked_by} {HOST}"
        )
    _module(kind).set_device(local_rank)
    return torch.device(kind.name, local_rank)


def bind_shared(kind: DeviceKind, rank: int) -> torch.device:
    """Make this host's first device the current one, for every rank of the host, and return it: for tests on a host with one device. Called before
    the process group is made: to its backend each rank is on a host of its own, so that messages go over TCP."""
    if kind.host_variable is not None:
        os.environ.setdefault(kind.host_variable, f"rank {rank}")
    return bind(kind, 0)


def synchronize(kind: DeviceKind) -> None:
    """Wait until the current device has done all that was started on it."""
    if not kind.is_host:
        _module(kind).synchronize()


def make_deterministic() -> None:
    """Let torch choose, for the rest of this process, only kernels that give the same bits every time, or raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a write of every new tensor (a property of the module itself, hence setattr).
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def seed_all(seed: int) -> None:
    """Seed the random numbers of the CPU and of every device of this process (plug-ins hook into the same call)."""
    torch.manual_seed(seed)


def _named(kind: DeviceKind) -> DeviceKind:
    """Return the kind itself, or, of a plug-in's device, what torch knows of it."""
    if kind.name != PLUGIN:
        return kind
    name = torch._C._get_privateuse1_backend_name()  # torch has no public name for it
    return DeviceKind(name, dist.get_default_backend_for_device(name))


def _missing(kind: DeviceKind) -> str | None:
    """Return why this process cannot use the device, up to what else to use, or None."""
    if kind.is_host:
        return None
    if kind.name == PLUGIN:
        module = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
        if module is None or not module.is_available():
            return "no plug-in has brought a device to torch: install one with an entry point `torch.backends`,"
        return None
    if kind.plugin is not None:
        if importlib.util.find_spec(kind.plugin) is None:
            return f"the torch plug-in {kind.plugin} is not installed: install it, or"
        importlib.import_module(kind.plugin)
    module = getattr(torch, kind.name, None)
    if module is None or not module.is_available():
        return f"torch {torch.__version__} finds no {kind.name} device on this host:"
    return None


def _module(kind: DeviceKind) -> Any:
    return getattr(torch, kind.name)
