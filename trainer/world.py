"""This rank's place among the ranks: reads the launcher's environment, joins the process group and leaves it.

Owns the start and the end of `torch.distributed`; the only reader of the launcher's variables in the trainer. Its one
collective is the agreement at the start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ttp
from ttp.errors import ConfigError

from .devices.device_table import DeviceKind


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    local_rank: int
    launched: bool
    """False: started alone, without torchrun or ttprun."""


def world_from_env(environ: Mapping[str, str] = os.environ) -> World:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; without them this process is a world of one. Raises ConfigError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return World(0, 1, 0, launched=False)
    if missing:
        raise ConfigError(
            f"environment: {', '.join(missing)} not set, though others are; start ranks with ttprun or torchrun"
        )
    try:
        rank, size, local_rank = (int(environ[name]) for name in names)
    except ValueError:
        given = ", ".join(f"{name}={environ[name]}" for name in names)
        raise ConfigError(f"environment: got {given}, expected integers; start ranks with ttprun or torchrun") from None
    if not 0 <= rank < size:
        raise ConfigError(f"environment: got RANK={rank}, expected 0 to {size - 1}, as WORLD_SIZE is {size}")
    return World(rank, size, local_rank, launched=True)


@contextmanager
def joined(world: World, kind: DeviceKind, device: torch.device) -> Iterator[None]:
    """Hold the process group of the whole world open (all ranks). A lone process uses no port."""
    backend = kind.backends
    store = None if world.launched else dist.HashStore()  # type: ignore[attr-defined]
    bound = None if kind.is_host else device
    if store is None:
        ttp.init_process_group(backend, device_id=bound)
    else:
        ttp.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, device_id=bound)
    yield
    dist.destroy_process_group()  # not after an exception: with a collective in flight it would wait for dead peers


def check_agreement(what: str, fingerprint: str, device: torch.device) -> None:
    """Raise ConfigError on every rank when ranks differ in `fingerprint` (all ranks call, once, at the start)."""
    mine = torch.tensor([int.from_bytes(hashlib.sha256(fingerprint.encode()).digest()[:7], "little")], device=device)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    values = [int(value) for value in everyone]
    differing = [rank for rank, value in enumerate(values) if value != values[0]]
    if differing:
        raise ConfigError(f"ranks {differing} were started with another {what} than rank 0: all ranks need the same")
