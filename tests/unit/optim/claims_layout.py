"""Claims about who holds what: placement, bytes on the wire and in memory, another size. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.unit.optim.material import (
    assemble,
    assert_replicas_identical,
    backward,
    everyone,
    fill,
    fingerprints,
    job,
    make,
    make_net,
    params_digest,
    tokens,
    train,
)
from ttp.errors import LayoutError
from ttp.optim import collectives
from ttp.optim.replica_optimizer import (
    ClipNorm,
    LossScale,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)


def ranks_that_disagree_raise() -> None:
    """A parameter too many on one rank is an error on every rank, not a hang."""
    net = make_net()
    named = list(net.named_parameters())[: 4 if job.rank == job.world - 1 else 5]
    try:
        cls = TTPOddReplicaOptimizer if job.world % 2 else TTPReplicaOptimizer
        cls(named)
        raise AssertionError("the ranks disagree about the parameters")
    except LayoutError as error:
        assert f"ranks [{job.world - 1}] cut" in str(error)


def every_row_order_trains_the_same() -> None:
    """Hosts that turn a row's order around change nothing but who holds what."""
    hosts = HOSTS[job.world]
    net, twin = make_net(), make_net()
    optimizer, straight = make(net, hosts=hosts), make(twin)
    if job.world % 2 == 0:
        assert any(list(row) != sorted(row) for row in optimizer.layout.rows)
    else:
        assert optimizer.layout.successor != straight.layout.successor
    for shard in range(optimizer.layout.shards):
        assert len({hosts[rank] for rank in optimizer.layout.holders(shard)}) == 2
    train(optimizer, net, range(1, 6))
    train(straight, twin, range(1, 6))
    assert_replicas_identical(optimizer, net)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    optimizer.close()
    straight.close()


HOSTS = {5: "aabbc", 6: "cdcbbc"}


@contextlib.contextmanager
def counted_wire(optimizer: TTPReplicaOptimizer) -> Iterator[dict[str, int]]:
    """Count the bytes that this rank sends, per kind of transfer: point to point what there is, of collectives the least (payload)."""
    sent = {"scatter": 0, "sum": 0, "copy": 0, "gather": 0, "other": 0}
    patched: Any = dist
    kept: tuple[Any, ...] = (collectives.all_gather, dist.all_reduce, dist.batch_isend_irecv, dist.all_to_all_single)
    ring = {id(getattr(part.wires, "_ring", None)) for part in optimizer._parts}
    point = [""]
    optimizer.on_point = lambda name, step: point.__setitem__(0, name)

    def gather(slots: list[torch.Tensor], own: torch.Tensor, flat: torch.Tensor, group: Any) -> Any:
        sent["gather" if point[0] == "done" else "sum"] += (group.size() - 1) * own.nbytes
        return kept[0](slots, own, flat, group)

    def reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sent["sum" if async_op else "other"] += 2 * (group.size() - 1) * tensor.nbytes // group.size()
        return kept[1](tensor, group=group, async_op=async_op)

    def pairs(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                sent["copy" if id(op.group) in ring else "scatter"] += op.tensor.nbytes
        return kept[2](ops)

    def everyone_to_everyone(output: torch.Tensor, given: torch.Tensor, group: Any, async_op: bool) -> Any:
        sent["scatter"] += given.nbytes * (group.size() - 1) // group.size()
        return kept[3](output, given, group=group, async_op=async_op)

    collectives.all_gather = gather  # type: ignore[assignment]
    patched.all_reduce, patched.batch_isend_irecv = reduce, pairs
    patched.all_to_all_single = everyone_to_everyone
    try:
        yield sent
    finally:
        collectives.all_gather, patched.all_reduce, patched.batch_isend_irecv, patched.all_to_all_single = kept


def the_wire_carries_what_theory_says() -> None:
    """Gradients: as much as they are large, once. Parameters back: (1 - 1/shards). Else: four of proof, squares, three counts, two sums."""
    for dtype in (torch.float32, torch.bfloat16):
        for ring in (False, True) if job.world % 2 == 0 else (True,):
            net = make_net(dtype=dtype)
            optimizer = make(net, ring=ring)
            train(optimizer, net, range(1, 2))
            total = sum(bucket.numel for bucket in optimizer.layout.buckets) * dtype.itemsize
            with counted_wire(optimizer) as sent:
                train(optimizer, net, range(2, 3))
            row = job.world if ring else job.world // 2
            expected = {
                "scatter": total * (row - 1) // row,
                "sum": 0 if ring else total // row,
                "copy": total // row if ring else 0,
                "gather": total * (row - 1) // row,
                "other": 2 * (job.world - 1) * 10 * 8 // job.world,
            }
            assert sent == expected, (dtype, ring, sent, expected)
            assert sent["scatter"] + sent["sum"] + sent["copy"] == total
            optimizer.close()


def memory_is_what_theory_says() -> None:
    """BF16: 2 + 2 for parameter and gradient, 16 R/d for master, two moments and the FP32 gradient shard. FP32: 4 + 4 and 8 R/d for
    the moments, for parameters are their own masters and gradients are reduced in place; the ring's second shard has a master."""
    torch.manual_seed(0)
    for dtype, apart in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        net = nn.ModuleList([nn.Linear(256, 333), nn.LayerNorm(333), nn.Linear(333, 128)]).to(dtype)
        named = list(net.named_parameters())
        count = sum(p.numel() for p in net.parameters())
        for ring in (False, True) if job.world % 2 == 0 else (True,):
            cls = TTPOddReplicaOptimizer if ring else TTPReplicaOptimizer
            optimizer = cls(named, bucket_bytes=2**16 * dtype.itemsize, masters_apart=apart)
            kept = [*net.parameters(), *(optimizer.gradient(name) for name, _ in named)]
            steps = 4 * sum(1 for _ in optimizer.layout.segments(job.rank))
            used = storage_bytes(kept) + optimizer._parts[0].shards.bytes_held() - steps
            padded = sum(bucket.numel for bucket in optimizer.layout.buckets)
            masters = 0 if dtype == torch.float32 and not apart else 4 * 2
            masters = 4 if ring and not masters else masters
            share = (masters + (8 + 4 * (dtype != torch.float32)) * 2) / job.world
            each = 2 * dtype.itemsize + share
            assert count * each <= used <= padded * each, (dtype, ring, used / count, each)
            assert padded < 1.02 * count
            optimizer.zero_grad()
            assert all(p.grad is None for p in net.parameters()), "backward brings the first gradient"
            if masters == 4 * 2:
                twelve = storage_bytes([t.values for t in optimizer.load_begin()]) - steps
                assert count * 12 * 2 / job.world * 0.98 <= twelve <= padded * 12 * 2 / job.world, "masters and moments"
            optimizer.close()


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def parameters_in_fp32_are_their_own_masters() -> None:
    """What this rank gathers for the others is one memory with the state; with masters apart nothing is. The bits are the same, and
    so are they when somebody has written into the model and said so."""
    results = []
    for apart in (False, True):
        net = make_net()
        optimizer = make(net, masters_apart=apart, clip=ClipNorm(0.5), local_copy=True)
        where = {p.untyped_storage().data_ptr() for p in net.parameters()}
        own, *second = optimizer.layout.held(job.rank)
        views = {shard: [t for t in optimizer._parts[0].shards.held_tensors(shard, False)] for shard in (own, *second)}
        inside = {
            shard: {t.values.untyped_storage().data_ptr() in where for t in held if t.key.startswith("model.")}
            for shard, held in views.items()
        }
        assert inside == {own: {not apart}} | {shard: {False} for shard in second}, inside
        reported = [(r.grad_norm, r.clip_factor) for r in train(optimizer, net, range(1, 8), parts=2)]
        before = fingerprints(optimizer, 6)
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)
        optimizer.masters_from_params()
        assert fingerprints(optimizer, 6) == before, "the copy of the step before is not the model's memory"
        train(optimizer, net, range(8, 10))
        assert_replicas_identical(optimizer, net)
        results.append((reported, before, fingerprints(optimizer), params_digest(net)))
        optimizer.close()
    assert results[0] == results[1]


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def a_process_does_not_grow() -> None:
    """What the collectives allocate is given back: 60 steps with 3.2 MiB of gradients cost less than half of 60 copies."""
    net = torch.nn.Sequential(*[torch.nn.Linear(460, 460) for _ in range(4)])
    optimizer = TTPReplicaOptimizer(net.named_parameters(), lr=1e-3)
    before = 0
    for step in range(1, 91):
        optimizer.zero_grad()
        net(torch.ones(4, 460)).square().mean().backward()
        optimizer.step()
        before = resident_mib() if step == 30 else before
    assert resident_mib() - before < 90, (before, resident_mib())
    optimizer.close()


def a_state_moves_to_another_size() -> None:
    """Whole tensors put together from one layout's holdings fill another's; parameters follow, training continues."""
    net = make_net()
    optimizer = make(net, clip=ClipNorm(1.0), loss_scale=LossScale(64.0, growth_interval=2))
    train(optimizer, net, range(1, 6))
    whole, host = assemble(optimizer), optimizer.host_state()
    whole = everyone(whole)[0]
    train(optimizer, net, range(6, 7))
    onward = [p.detach().clone() for p in net.parameters()]
    for size in (job.world, job.world - 1, 2):
        group = dist.new_group(list(range(size)))
        if size > job.rank:
            other = make_net(5)
            moved = make(other, world=size, group=group, loss_scale=LossScale(1.0, growth_interval=2), lr=7.0)
            fill(moved, whole)
            moved.load_end(5, host)
            assert moved.current_step == 5 and moved.loss_scale == 256.0
            assert [g["lr"] for g in moved.param_groups] == [1e-3, 2e-3]
            for name, param in other.named_parameters():
                assert torch.equal(param.view(-1), whole[f"model.{name}"]), name
            moved.clip = ClipNorm(1.0)
            # The same global batch: those who remain take over the others' parts.
            moved.gradient_divisor = float(job.world)
            moved.zero_grad()
            mine = [r for r in range(job.world) if r % size == job.rank]
            for r in mine:
                with moved.no_sync() if r != mine[-1] else contextlib.nullcontext():
                    backward(moved.scale_loss(other(tokens(6, rank=r), detour=(6 + r) % 3 == 0)))
            result = moved.step()
            assert result.step == 6
            for a, b in zip(other.parameters(), onward, strict=True):
                assert torch.equal(a, b) if size == job.world else torch.allclose(a, b, atol=3e-5), (
                    size,
                    (a - b).abs().max(),
                )
            if size == job.world:
                assert fingerprints(moved) == fingerprints(optimizer)
            moved.close()
        dist.barrier()
    optimizer.close()
