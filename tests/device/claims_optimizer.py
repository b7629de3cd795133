"""What ttp's optimizers ask of a device."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import ttp
from tests.device import backend
from tests.device.ranks import Rank
from ttp.adopt.adopted_state import computing_device
from ttp.checkpoint import host_copy
from ttp.checkpoint.host_copy import HostCopier
from ttp.checkpoint.write import write_share
from ttp.config import Settings
from ttp.errors import AbortedCollective
from ttp.mindio.job import current_job
from ttp.mindio.modellink import TTPReplicaOptimizer
from ttp.mindio.saving.local_save import LocalSave
from ttp.mindio.saving.publisher import HandlerPublisher
from ttp.proto.messages import Cause, CauseKind, PublishOrder

LONG_S = 30.0
"""What does not wait ends within it, also where this process does not run for a while."""
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


def first_roll_forward_asks_nothing_of_the_device(rank: Rank) -> None:
    """Its kernels are loaded and its memory is there for every bucket: the small one here is in a group of other settings, and in more tensors."""
    torch.manual_seed(rank.seed)
    wide = torch.nn.Linear(64, 64, bias=False).to(rank.device)
    narrow = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(8)]).to(rank.device)
    groups: list[dict[str, Any]] = [
        {"params": [(f"wide.{name}", p) for name, p in wide.named_parameters()]},
        {"params": [(f"narrow.{name}", p) for name, p in narrow.named_parameters()], "amsgrad": True, "maximize": True},
    ]
    optimizer = ttp.TTPReplicaOptimizer(groups, base=torch.optim.Adam, foreach=True, bucket_bytes=4096, compare_every=0)
    shards = optimizer._parts[0].shards
    sim = torch.get_device_module(rank.device)
    sim.synchronize()
    before = backend.counts()
    with optimizer.lane.roll_stream():
        shards.update(0.5, None, optimizer._at_ready, [0.1, 0.1], lambda: None)
    sim.synchronize()
    after = backend.counts()
    assert shards.updated > 1
    assert all(after[name] == before[name] for name in ("segments", "loads")), f"{after} after {before}"
    optimizer.close()
    dist.barrier()


def handlers_of_mindio_run_beside_a_kernel_that_hangs(rank: Rank) -> None:
    """On this rank's device, which is not the first, with the saved step's weights; the training thread's stream waits for a dead peer there."""
    sim, device = torch.get_device_module(rank.device), torch.device(backend.NAME, 1)
    sim.set_device(device)
    model = torch.nn.Linear(8, 8).to(device)
    adam = torch.optim.AdamW(model.parameters())
    optimizer = TTPReplicaOptimizer(adam, 0.0, False, False, False, False, False, torch.float32, None, model)
    job, core = current_job(), optimizer.core
    job.optimizer, job.parts = optimizer, [[0]]
    torch.autograd.backward(model(torch.ones(2, 8, device=device)).square().mean())
    optimizer.reduce_model_grads()
    optimizer.step()
    job.step_done((1, model))
    optimizer.zero_grad()
    weights = model.weight.cpu()
    save = LocalSave(0, core, job)
    held = [tensor for tensors in core.holdings().values() for tensor in tensors]
    share = write_share(rank.folder, "iter_0000001_tmp_1_1_1", 0, held, {}, copier=HostCopier(device))
    seen: dict[str, tuple[int, torch.Tensor]] = {}

    def look(handler: str) -> None:
        seen[handler] = sim.current_device(), model.state_dict()["weight"].cpu()

    job.save_handler = lambda save_rank, step, ranks, args: look("save")
    job.rename_handler = lambda step, args: look("rename")
    cause = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")
    order = PublishOrder(1, 1, str(rank.folder), "iter_0000001_tmp_1_1_1", (share,), cause, None, 1)
    publisher = HandlerPublisher(0, core, job, save)
    with torch.no_grad():
        model.weight.zero_()  # what comes after the step
    backend.hang(sim.current_stream(device))
    before = backend.counts()["streams"]
    thread = threading.Thread(target=publisher.publish, args=(order, {}, lambda count: None), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert sorted(seen) == ["rename", "save"] and backend.counts()["streams"] == before
    assert all(at == 1 and torch.equal(values, weights) for at, values in seen.values()), seen
    thread.join()
    backend.release(1)


def offloaded_parameters_are_protected_on_their_device(rank: Rank) -> None:
    """With the numbers of a step that offloads nothing; the device's generators are seeded, and its communicators asked for an error."""
    sim, seeded, found = torch.get_device_module(rank.device), list[int](), []
    sim.manual_seed_all = seeded.append
    policies: tuple[OffloadPolicy, ...] = (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
    for policy in policies:
        torch.manual_seed(rank.seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(
            rank.device
        )
        fully_shard(model, mesh=init_device_mesh(backend.NAME, (rank.world,)), offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        guard = ttp.protect(
            model, optimizer, clip=ttp.ClipNorm(0.1), save_dirs=[rank.folder / "saves"], settings=Settings(enable=False)
        )
        assert guard._adopted.device == rank.device
        seeded.clear()
        for _ in range(2):
            torch.autograd.backward(model(torch.ones(4, 8, device=rank.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert seeded
        record = guard._adopted.last_record
        assert record is not None
        found.append((record.grad_norm, list(seeded)))
        guard.close()
    assert found[0] == found[1], found
    elsewhere = torch.ones(1, device=torch.device(backend.NAME, 7))  # not the current one
    assert computing_device([torch.ones(1), elsewhere]) == elsewhere.device
    dist.barrier()
    dist.group.WORLD._get_backend(rank.device).abort()  # type: ignore[union-attr]
    try:
        guard._adopted._spanning.check_communicators(3)
    except AbortedCollective:
        return
    raise AssertionError("the aborted communicator was not asked")
