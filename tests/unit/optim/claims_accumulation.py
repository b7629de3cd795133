"""Claims about gradients that accumulate in shards: the same training, less memory, and the bytes that this takes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.unit.optim.claims_layout import HOSTS, counted_wire
from tests.unit.optim.material import (
    assert_replicas_identical,
    backward,
    fingerprints,
    job,
    make,
    make_net,
    tokens,
    train,
)
from ttp.errors import ConfigError
from ttp.optim.replica_optimizer import ClipNorm, LossScale, TTPReplicaOptimizer

PARTS = 3
"""Backward passes of a step."""


def held_bytes(optimizer: TTPReplicaOptimizer) -> int:
    """Return what the whole gradients of this rank take now."""
    memory = [memory for part in optimizer._parts for memory in part.memory]
    gradients = sum(p.grad.nbytes for entry in optimizer.param_groups for p in entry["params"] if p.grad is not None)
    return int(gradients) + sum(one.grads.untyped_storage().nbytes() for one in memory)


def accumulating_in_shards_trains_the_same() -> None:
    """To round-off: passes are added after ranks in place of before. Twice, and with other hosts, it gives the same bits on all holders;
    ranks differ in what they reach, and what no rank reaches counts as zero."""
    for dtype, away in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        nets = [make_net(dtype=dtype) for _ in range(4)]
        shard: dict[str, Any] = {"gradient_accumulation_shard": True, "clip": ClipNorm(0.5)}
        whole, once, again, turned = (
            make(nets[0], clip=ClipNorm(0.5)),
            make(nets[1], **shard),
            make(nets[2], **shard),
            make(nets[3], hosts=HOSTS.get(job.world), **shard),
        )
        results = [train(o, net, range(1, 5), PARTS) for o, net in zip((whole, once, again, turned), nets, strict=True)]
        for plain, sharded in zip(results[0], results[1], strict=True):
            assert abs(sharded.grad_norm / plain.grad_norm - 1) < away, (dtype, plain, sharded)
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.allclose(a, b, atol=3e-5 if dtype == torch.float32 else 2e-2)
        assert fingerprints(once) == fingerprints(again) and results[1] == results[2]
        for optimizer, net in zip((once, turned), (nets[1], nets[3]), strict=True):
            assert_replicas_identical(optimizer, net)
        for optimizer in (whole, once, again, turned):
            optimizer.close()


def the_sums_are_those_of_all_passes_exactly() -> None:
    """Gradients of small integers have no round-off: whole and in shards the bits are equal, in FP32 and with FP32 sums of BF16."""
    for dtype in (torch.float32, torch.bfloat16):
        held = []
        for shard in (False, True):
            torch.manual_seed(job.seed)
            net = nn.ModuleList(nn.Linear(24, 17, bias=bias) for bias in (True, False, True)).to(dtype)
            optimizer = make(net, gradient_accumulation_shard=shard, bucket_bytes=1024)
            for step in range(1, 4):
                optimizer.zero_grad()
                for part in range(PARTS):
                    last = part == PARTS - 1
                    with contextlib.nullcontext() if last else optimizer.no_sync():
                        generator = torch.Generator().manual_seed(job.seed + 100 * step + 10 * part + job.rank)
                        x = torch.randint(-1, 2, (1, 24), generator=generator).to(dtype)
                        reached = [layer for index, layer in enumerate(net) if (index + part + job.rank) % 3]
                        backward(sum(layer(x).sum() for layer in reached))
                optimizer.step()
            assert_replicas_identical(optimizer, net)
            held.append(fingerprints(optimizer))
            optimizer.close()
        assert held[0] == held[1], dtype


def an_overflow_of_one_pass_skips_the_step() -> None:
    net = make_net(dtype=torch.float16)
    rule = LossScale(64.0, growth_interval=100)
    optimizer = make(net, gradient_accumulation_shard=True, loss_scale=rule)
    before = fingerprints(optimizer)
    optimizer.zero_grad()
    for part in range(PARTS):
        with optimizer.no_sync() if part < PARTS - 1 else contextlib.nullcontext():
            factor = float("inf") if part == 0 and job.rank == job.world - 1 else 1.0
            backward(optimizer.scale_loss(net(tokens(1, part))) * factor)
    result = optimizer.step()
    assert result.skipped and optimizer.loss_scale == 32.0
    moved = {group for group, digest in fingerprints(optimizer).items() if digest != before[group]}
    assert not moved
    optimizer.close()


def no_whole_gradient_exists_between_passes() -> None:
    """Nor at the end of a step; without the option all of it does."""
    torch.manual_seed(job.seed)
    for shard in (False, True):
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(40)))
        optimizer = make(net, gradient_accumulation_shard=shard, bucket_bytes=4096)
        size = sum(p.nbytes for p in net.parameters())
        reduced = sum(row.nbytes for part in optimizer._parts for one in part.memory for row in one.reduced)
        assert reduced * job.world == 2 * size, "accumulators: R/d of the whole"
        between: list[int] = []
        for _ in range(2):
            optimizer.zero_grad()
            for part in range(PARTS):
                with optimizer.no_sync() if part < PARTS - 1 else contextlib.nullcontext():
                    backward(net(torch.ones(2, 32)).sum())
                if part < PARTS - 1:
                    between.append(held_bytes(optimizer))
                dist.barrier()
            optimizer.step()
            between.append(held_bytes(optimizer))
        assert all(held == 0 if shard else held >= size for held in between), (shard, between, size)
        optimizer.close()


def the_wire_carries_one_reduce_scatter_a_pass() -> None:
    """And one exchange and one gather a step, whatever the number of passes; sums that are exchanged are FP32."""
    for dtype in (torch.float32, torch.bfloat16):
        for ring in (False, True) if job.world % 2 == 0 else (True,):
            net = make_net(dtype=dtype)
            optimizer = make(net, ring=ring, gradient_accumulation_shard=True)
            elements = sum(bucket.numel for bucket in optimizer.layout.buckets)
            with counted_wire(optimizer) as sent:
                train(optimizer, net, range(1, 2), PARTS)
            row = job.world if ring else job.world // 2
            expected = {
                "scatter": PARTS * elements * dtype.itemsize * (row - 1) // row,
                "sum": 0 if ring else elements * 4 // row,
                "copy": elements * 4 // row if ring else 0,
                "gather": elements * dtype.itemsize * (row - 1) // row,
                "other": 2 * (job.world - 1) * 10 * 8 // job.world,
            }
            assert sent == expected, (dtype, ring, sent, expected)
            optimizer.close()


def passes_of_parts_of_the_model_are_reduced_each_for_itself() -> None:
    """As a pipeline with several chunks makes them: the last layers' passes come first. Copies accumulate whole, for the caller to sum."""
    found = []
    for shard in (False, True):
        torch.manual_seed(job.seed)
        net = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("front", "back", "tied")})
        optimizer = TTPReplicaOptimizer(
            net.named_parameters(), lr=0.1, span=dist.group.WORLD, copies=["tied.weight"],
            bucket_bytes=1024, gradient_accumulation_shard=shard,
        )  # fmt: skip
        results = []
        for step in range(1, 4):
            optimizer.zero_grad()
            for names in (("back", "tied"), ("front",)):
                chunk = nn.ModuleList(net[name] for name in names)
                for part in range(PARTS):
                    generator = torch.Generator().manual_seed(job.seed + 100 * step + 10 * part + job.rank)
                    x = torch.randint(-1, 2, (1, 16), generator=generator).float()
                    with optimizer.micro_batch(chunk.parameters()):
                        backward(sum(layer(x).sum() for layer in chunk))
            optimizer.gradient("tied.weight").mul_(2.0)
            if shard:
                _refused(lambda o=optimizer: o.gradient("back.weight"), ConfigError, "accumulates in shards")
            results.append(optimizer.step())
        found.append((results, [p.detach().clone() for p in net.parameters()]))
        optimizer.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def _refused(call: Any, kind: type[Exception], words: str) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def passes_out_of_order_are_refused() -> None:
    """Two in one no_sync(), one after the last pass, and one outside its own; a step thrown away in the middle leaves nothing behind."""
    net, twin = make_net(), make_net()
    optimizer, straight = (make(n, gradient_accumulation_shard=True) for n in (net, twin))
    optimizer.zero_grad()
    with contextlib.suppress(RuntimeError), optimizer.no_sync():
        backward(net(tokens(1)))
        _refused(lambda: backward(net(tokens(1))), RuntimeError, "each in one of its own")
        raise RuntimeError("as a trainer would that skips this batch")
    optimizer.zero_grad()
    backward(net(tokens(1)))

    def late() -> None:
        with optimizer.no_sync():
            pass

    _refused(late, RuntimeError, "only the last pass of a step is outside")
    optimizer.zero_grad()
    with optimizer.micro_batch(net.parameters()):
        backward(net(tokens(1)))
    _refused(lambda: backward(net(tokens(1))), RuntimeError, "outside its own passes")
    optimizer.zero_grad()
    train(optimizer, net, range(1, 3), PARTS)
    train(straight, twin, range(1, 3), PARTS)
    assert fingerprints(optimizer) == fingerprints(straight)
    optimizer.close()
    straight.close()
