"""Runs a claim about the device on ranks of its own: processes that have the device, and gloo and simccl between them.

A claim is a function of a module `claims_*.py`. It takes a `Rank`. The test process itself never loads the device: torch would take it for
the accelerator of whatever test comes next.
"""

from __future__ import annotations

import os
import random
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from tests.device import backend
from tests.device.build import extension
from tests.unit.forkserver import fork_server, run_ranks_to_end
from ttp.nccl import set_nccl

DEADLINE_S = 120.0
BACKENDS = f"cpu:gloo,{backend.NAME}:{backend.BACKEND}"


@dataclass(frozen=True)
class Rank:
    """One rank of a claim."""

    number: int
    world: int
    folder: Path
    seed: int

    @property
    def device(self) -> torch.device:
        return torch.device(backend.NAME, self.number % 8)

    def say(self, name: str) -> None:
        """Have the other ranks know that this one has come to a place."""
        (self.folder / f"{name}_{self.number}").touch()

    def await_all(self, name: str, *ranks: int) -> None:
        """Wait until these ranks have said so."""
        deadline = time.monotonic() + DEADLINE_S
        while not all((self.folder / f"{name}_{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, f"ranks {ranks} did not come to {name}"
            time.sleep(0.002)


Claim = Callable[[Rank], None]


def claims_of(module: ModuleType) -> list[str]:
    """Return the names of a module's claims, in their order."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]


def run(
    claim: Claim,
    world: int,
    folder: Path,
    *,
    endings: Mapping[int, int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run a claim on `world` ranks; raises AssertionError with what they raised.

    endings: exit codes of ranks that are to end otherwise. environ: beside what ttprun sets: under torch's own values the watchdog may end a rank
    within 10 ms of an abort.
    """
    extension()  # compiled once, by whoever comes first, and not within a rank's deadline
    seed = int(os.environ.get("TTP_TEST_SEED", random.SystemRandom().randrange(2**31)))
    context = fork_server()
    ranks = [
        context.Process(target=_main, args=(claim, Rank(n, world, folder, seed), dict(environ or {})))
        for n in range(world)
    ]
    run_ranks_to_end(ranks, folder, DEADLINE_S, f"TTP_TEST_SEED={seed}")
    expected = [(endings or {}).get(number, 0) for number in range(world)]
    assert [process.exitcode for process in ranks] == expected, f"TTP_TEST_SEED={seed}"


def begin_ranks(rank: Rank) -> None:
    """Have the device and, with other ranks, the process group of all."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    backend.register()
    backend.set_traits(seed=rank.seed)
    torch.get_device_module(rank.device).set_device(rank.device.index)
    if rank.world > 1:
        dist.init_process_group(
            BACKENDS, init_method=f"file://{rank.folder}/store", rank=rank.number, world_size=rank.world
        )


def _main(claim: Claim, rank: Rank, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    set_nccl(os.environ)
    try:
        begin_ranks(rank)
        claim(rank)
    except BaseException:
        (rank.folder / f"error_{rank.number}").write_text(f"rank {rank.number}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # kernels may hang, and groups may wait for peers
