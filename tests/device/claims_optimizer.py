"""What ttp's optimizers ask of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

import ttp
from tests.device import backend
from tests.device.ranks import Rank
from ttp.checkpoint import host_copy
from ttp.checkpoint.host_copy import HostCopier

SYNCS = 2
"""A step waits for the device when its gradients are reduced, before it says so, and for the result of its collective."""


def step_waits_twice(rank: Rank) -> None:
    """However many buckets there are, with sums on the host and on the device, in both layouts."""
    for ring in (False, True):
        kind = ttp.TTPOddReplicaOptimizer if ring else ttp.TTPReplicaOptimizer
        torch.manual_seed(rank.seed)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)).to(rank.device)
        optimizer = kind(model.named_parameters(), bucket_bytes=256, clip=ttp.ClipNorm(0.1), compare_every=0)
        for sums in ([1.0], torch.ones(1, device=rank.device)):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(4, 16, device=rank.device)).square().mean())
            before = backend.counts()
            result = optimizer.step(sums=sums)
            after = backend.counts()
            assert after["syncs"] - before["syncs"] == SYNCS, f"{after} after {before}"
            assert after["fallback_waits"] == before["fallback_waits"]
            assert result.sums == (float(rank.world),)
        optimizer.close()
    dist.barrier()


def dump_asks_nothing_of_the_device_but_copies(rank: Rank) -> None:
    """No memory, no stream, no kernel; beside kernels that hang, one of them on the current stream. Larger than its staging memory, and
    of no round size."""
    host_copy.STAGING_BYTES = 4096
    copier = HostCopier(rank.device)
    shapes = ((10_007, torch.float32), (5, torch.bfloat16), (1, torch.int64), (0, torch.float32), (2048, torch.uint8))
    expected = [torch.randint(100, (numel,)).to(dtype) for numel, dtype in shapes]
    held = [values.to(rank.device) for values in expected]
    sim = torch.get_device_module(rank.device)
    sim.synchronize()
    backend.set_traits(alloc_syncs=1, lazy_load=1, delay_us=300)
    backend.hang()
    before = backend.counts()
    copied = [copier(values) for values in held]
    assert all(torch.equal(a, b) for a, b in zip(copied, expected, strict=True))
    after = backend.counts()
    assert all(after[name] == before[name] for name in ("segments", "streams", "loads")), f"{after} after {before}"
    backend.release(rank.device.index)
