"""Claims about the numbers: replicas, parity with DDP, 16 bits, loss scale, clipping, hooks. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.unit.optim.material import (
    assemble,
    assert_replicas_identical,
    backward,
    everyone,
    fingerprints,
    groups,
    job,
    make,
    make_net,
    tokens,
    train,
)
from ttp.errors import CheckpointError, ConfigError
from ttp.optim.replica_optimizer import (
    ClipNorm,
    ClipValue,
    LossScale,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)


def replicas_stay_bit_identical() -> None:
    """Masters, moments and parameters of a shard's holders have the same bits after every step."""
    net = make_net(job.rank)  # ranks start from different values: rank 0's count
    optimizer = make(net, clip=ClipNorm(0.5))
    assert len(optimizer.layout.buckets) > 2
    for step in range(1, 21):
        (result,) = train(optimizer, net, range(step, step + 1))
        assert result.step == optimizer.current_step == step
        assert result.sums == (sum(range(job.world)), job.world) and not result.skipped
        assert len(set(everyone(result))) == 1, "the result differs between ranks"
        assert_replicas_identical(optimizer, net)
    masters = assemble(optimizer, copies=2)
    for name, param in net.named_parameters():
        assert torch.equal(masters[f"model.{name}"].view(param.shape), param), name
    expected = {key: tuple(shape) for key, shape in optimizer.expected_tensors().items()}
    held = {h.key: tuple(h.shape) for part in everyone(optimizer.holdings()) for hs in part.values() for h in hs}
    assert held == expected
    optimizer.close()


def a_rank_without_state_is_filled_by_its_replica() -> None:
    """As a process in a lost one's place: it trains on with the bits that it would have had. What has no replica left is refused, on every rank."""
    net = make_net()
    optimizer = make(net, clip=ClipNorm(0.5))
    train(optimizer, net, range(1, 4))
    host, record, before = optimizer.host_state(), optimizer.last_record, fingerprints(optimizer)
    lost = job.world - 1
    if job.rank == lost:
        for target in optimizer.load_begin():
            target.values.fill_(7.0)
        for param in net.parameters():
            param.data.fill_(-3.0)
    else:
        optimizer.zero_grad()
        net(tokens(9)).backward()  # a step that is given up half way
    dist.barrier()
    optimizer.fill((lost,))
    optimizer.param_groups[0]["weight_decay"] = 0.25  # as the program has set it since
    if job.rank == lost:
        optimizer.load_end(3, host, record)
    else:
        optimizer.keep(3, record)
    assert (optimizer.param_groups[0]["weight_decay"] == 0.25) == (job.rank != lost)
    for group, settings in zip(optimizer.param_groups, host["param_groups"], strict=True):
        group["weight_decay"] = settings["weight_decay"]
    assert optimizer.host_state() == host
    assert optimizer.compare_replicas() == () and fingerprints(optimizer) == before
    assert optimizer.last_record == record and optimizer.current_step == 3
    train(optimizer, net, range(4, 6))
    assert_replicas_identical(optimizer, net)
    plain = make_net()
    undisturbed = make(plain, clip=ClipNorm(0.5))
    train(undisturbed, plain, range(1, 6))
    assert fingerprints(optimizer) == fingerprints(undisturbed)
    holders = optimizer.layout.holders(0)
    try:
        optimizer.fill(holders)
        raise AssertionError("expected that a shard without a holder is refused")
    except CheckpointError as error:
        assert "no rank that stays holds" in str(error)
    optimizer.close()
    undisturbed.close()


def equals_adamw_under_ddp() -> None:
    """100 steps with accumulation, clipping, weight-decay groups and a schedule end where DDP + AdamW ends."""
    net = make_net()
    plain = copy.deepcopy(net)
    optimizer = make(net, micro_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    reference = torch.optim.AdamW(
        [{**g, "params": [p for _, p in g["params"]]} for g in groups(plain)], lr=1e-3, foreach=False
    )
    curves = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 10) * 0.98**t) for o in (optimizer, reference)
    ]
    clipped = 0
    for step in range(1, 101):
        optimizer.zero_grad()
        reference.zero_grad(set_to_none=False)
        for part in range(2):
            last = part == 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                backward(net(tokens(step, part), detour=part == 0))
            with contextlib.nullcontext() if last else ddp.no_sync():
                # DDP finds parameters unused in the synchronised pass by itself.
                backward(ddp(tokens(step, part), detour=part == 0) / 2)
        limit = 0.5 if step % 2 else 1000.0
        optimizer.clip = ClipNorm(limit)
        result = optimizer.step()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        assert abs(result.grad_norm - norm.item()) < 1e-5 * norm.item(), (step, result.grad_norm, norm)
        clipped += result.clip_factor < 1
        reference.step()
        for curve in curves:
            curve.step()
    assert clipped == 50, "every other step is clipped, by its tight limit"
    worst = max((a - b).abs().max().item() for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    print(
        f"seed {job.seed}, world {job.world}: largest difference from DDP + AdamW after 100 steps {worst:.3g}, clipped {clipped}"
    )
    moved = max((a - b).abs().max().item() for a, b in zip(net.parameters(), make_net().parameters(), strict=True))
    assert worst < 2e-6 < moved / 1000, (worst, moved)
    optimizer.close()


def parameters_of_16_bits_are_rounded_masters() -> None:
    """Gradients travel in 16 bits; their sum with the partners', the masters and the moments are FP32."""
    for dtype in (torch.bfloat16, torch.float16):
        masters_follow_exact_gradients(dtype)


def masters_follow_exact_gradients(dtype: torch.dtype) -> None:
    """Feed gradients whose sums are exact in `dtype`: masters equal AdamW's in FP32, parameters are their rounding."""
    net = make_net(dtype=dtype)
    optimizer = make(net, fused=False)
    masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
    cut = {id(p): m for p, m in zip(net.parameters(), masters, strict=True)}
    reference = torch.optim.AdamW(
        [{**g, "params": [cut[id(p)] for _, p in g["params"]]} for g in groups(net)], lr=1e-3, foreach=False
    )
    for step in range(1, 8):
        generator = torch.Generator().manual_seed(job.seed + step)
        # Small integers: every sum is exact in 16 bits, whatever its order.
        weights = [
            [torch.randint(-3, 4, p.shape, generator=generator).float() for p in masters] for _ in range(job.world)
        ]
        optimizer.zero_grad()
        mine = [(p * w.to(dtype)).sum() for p, w in zip(net.parameters(), weights[job.rank], strict=True)]
        backward(torch.stack(mine).sum())
        result = optimizer.step()
        for index, master in enumerate(masters):
            master.grad = sum((w[index] for w in weights), torch.zeros_like(master)) * (1.0 / job.world)
        exact = torch.stack([m.grad.double().square().sum() for m in masters if m.grad is not None]).sum().sqrt()
        assert abs(result.grad_norm - exact.item()) < 1e-6 * exact.item()
        reference.step()
        whole = assemble(optimizer)
        for (name, param), master in zip(net.named_parameters(), masters, strict=True):
            assert torch.equal(whole[f"model.{name}"], master.detach().view(-1)), (step, name)
            assert torch.equal(param, master.detach().to(dtype)), (step, name)
    assert_replicas_identical(optimizer, net)
    optimizer.close()


def fp32_gradients_of_bf16_parameters_accumulate_in_fp32() -> None:
    """With grad_dtype FP32 many small gradients add up that BF16 would lose."""
    param = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    cls = TTPOddReplicaOptimizer if job.world % 2 else TTPReplicaOptimizer
    optimizer = cls([("w", param)], torch.optim.SGD, lr=1.0, grad_dtype=torch.float32, bucket_bytes=512)
    optimizer.gradient_divisor = 1.0
    optimizer.zero_grad()
    for part in range(101):
        with optimizer.no_sync() if part < 100 else contextlib.nullcontext():
            backward((param * (2.0**-10 if part else 1.0)).sum())
    assert param.grad is None
    optimizer.step()
    expected = 1.0 - job.world * (1.0 + 100 * 2.0**-10)
    assert torch.equal(assemble(optimizer)["model.w"], torch.full((300,), expected)), expected
    optimizer.close()


def overflow_skips_the_step_everywhere_and_lowers_the_scale() -> None:
    """One rank's inf: the step changes nothing but step and scale; the scale grows again after good steps."""
    net = make_net()
    optimizer = make(net, loss_scale=LossScale(1024.0, growth_interval=3))
    plain_net = make_net()
    plain = make(plain_net)
    train(optimizer, net, range(1, 3))
    train(plain, plain_net, range(1, 3))
    before = fingerprints(optimizer)
    assert before == fingerprints(plain), "a scale that is a power of two changes no bit"
    optimizer.zero_grad()
    loss = optimizer.scale_loss(net(tokens(3)))
    backward(loss * float("inf") if job.rank == job.world - 1 else loss)
    result = optimizer.step(sums=[1.0])
    assert result.skipped and result.step == 3 and result.loss_scale == 1024.0 and result.sums == (job.world,)
    assert optimizer.loss_scale == 512.0 and optimizer.current_step == 3
    assert fingerprints(optimizer) == before
    assert_replicas_identical(optimizer, net)
    scales = [r.loss_scale for r in train(optimizer, net, range(4, 11))]
    assert scales == [512.0] * 3 + [1024.0] * 3 + [2048.0]
    assert optimizer.host_state()["loss_scale"] == {"scale": 2048.0, "good_steps": 1}
    optimizer.close()
    plain.close()


def clip_by_value_clamps_the_average() -> None:
    """ClipValue clamps the averaged gradient's elements and leaves the reported norm unclipped."""
    param = nn.Parameter(torch.zeros(200))
    cls = TTPOddReplicaOptimizer if job.world % 2 else TTPReplicaOptimizer
    optimizer = cls([("w", param)], torch.optim.SGD, lr=1.0, clip=ClipValue(0.5), bucket_bytes=256)
    weight = torch.linspace(-1, 1, 200)
    optimizer.zero_grad()
    backward((param * weight * (job.rank + 1)).sum())
    result = optimizer.step()
    mean = weight * (job.world + 1) / 2
    assert torch.allclose(param.detach(), -mean.clamp(-0.5, 0.5), atol=1e-6)
    assert abs(result.grad_norm - mean.norm().item()) < 1e-4 and result.clip_factor == 1.0
    optimizer.close()


def gradients_survive_careless_clearing() -> None:
    """model.zero_grad, no zero_grad at all, an abandoned backward, a backward twice: right sums or a clear error."""
    net, twin = make_net(), make_net()
    optimizer, straight = make(net), make(twin)
    train(straight, twin, range(1, 5))
    for step in range(1, 5):
        if step == 2:
            net.zero_grad(set_to_none=True)
        elif step == 3:
            optimizer.zero_grad()
            backward(net(tokens(99), detour=True))  # thrown away, although buckets were launched
            optimizer.zero_grad()
        elif step == 4:
            net.zero_grad(set_to_none=False)
        backward(net(tokens(step), detour=(step + job.rank) % 3 == 0))
        optimizer.step(sums=[0.0])
    assert fingerprints(optimizer) == fingerprints(straight)
    optimizer.zero_grad()
    backward(net(tokens(5), detour=True))
    try:
        backward(net(tokens(6), detour=True))
        raise AssertionError("a second synchronised backward went unnoticed")
    except RuntimeError as error:
        assert "no_sync" in str(error)
    try:
        optimizer.step()
        raise AssertionError("what the second backward added to was updated with")
    except ConfigError as error:
        assert "was changed between backward and step" in str(error)
    for of, own in ((optimizer, net), (straight, twin)):
        train(of, own, range(5, 6))
    assert fingerprints(optimizer) == fingerprints(straight), "nothing of the refused step"
    optimizer.close()
    straight.close()


class _Meeting(torch.autograd.Function):
    """A layer whose backward pass is a collective, as that of experts or of a tensor that is split."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def backward_waits_for_no_peer_and_received_slots_have_room_for_three_buckets() -> None:
    """Rank 1 does not reach the parameters of the first buckets: it launches all of them at the end, behind a collective of its backward."""
    torch.manual_seed(job.seed)
    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(10))
    optimizer = TTPReplicaOptimizer(layers.named_parameters(), torch.optim.SGD, replicas=1, bucket_bytes=1024, lr=0.1)
    assert len(optimizer.layout.buckets) == 10
    for _ in range(2):
        optimizer.zero_grad()
        x = _Meeting.apply(layers[0](torch.ones(2, 16)))  # type: ignore[no-untyped-call]
        for layer in layers[1 : 10 if job.rank == 0 else 9]:
            x = layer(x)
        backward(x.sum())
        optimizer.step()
    (part,) = optimizer._parts
    spare = part.wires._row._spare  # type: ignore[attr-defined]
    assert sum(tensor.nbytes for tensor in spare) <= 3 * 1024 * (job.world - 1) // job.world
    optimizer.close()


def three_replicas_are_identical() -> None:
    """R = 3 keeps three identical copies, in FP32 and in BF16."""
    for dtype in (torch.float32, torch.bfloat16):
        net = make_net(dtype=dtype)
        optimizer = make(net, replicas=3)
        train(optimizer, net, range(1, 6))
        assert_replicas_identical(optimizer, net)
        optimizer.close()
