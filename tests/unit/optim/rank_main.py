"""One rank of a test world: join, agree on a seed, run the named claims in order, say how it went in a file."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.optim import (
    claims_accumulation,
    claims_divergence,
    claims_faults,
    claims_layout,
    claims_mindio,
    claims_model_parallel,
    claims_nonfinite,
    claims_split,
    claims_training,
)
from tests.unit.optim.material import job


def find_claim(name: str) -> Callable[[], None]:
    """Return the claim of that name from whichever module has it."""
    homes = [
        module
        for module in (
            claims_training,
            claims_faults,
            claims_divergence,
            claims_layout,
            claims_split,
            claims_mindio,
            claims_model_parallel,
            claims_nonfinite,
            claims_accumulation,
        )
        if hasattr(module, name)
    ]
    claim: Callable[[], None] = getattr(homes[0], name)
    return claim


def main(rank: int, world: int, names: tuple[str, ...], folder: str) -> None:
    """Run the claims; leave `done_<rank>` or `error_<rank>` in `folder` (TTP_TEST_SEED repeats a run)."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    job.rank, job.world, job.seed = rank, world, -1
    name = "joining"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        seeds = [random.SystemRandom().randrange(2**31)]
        dist.broadcast_object_list(seeds)
        job.seed = int(os.environ.get("TTP_TEST_SEED", seeds[0]))
        for name in names:
            find_claim(name)()
            dist.barrier()
        dist.destroy_process_group()
        Path(folder, f"done_{rank}").touch()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(
            f"rank {rank} of {world}, {name}, TTP_TEST_SEED={job.seed}:\n{traceback.format_exc()}"
        )
        os._exit(1)  # peers wait in a collective; nothing here may wait for them
