"""What the ranks of test_ranks.py do. Each function is one claim, run on every rank of one gloo world (`run_ranks`).

Run by path in a forked process, with JOB = (rank, world, names, folder) among its globals.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttp.checkpoint.held import HeldTensor
from ttp.errors import CheckpointError, LayoutError, ProtocolError
from ttp.optim import wires
from ttp.optim.replica_optimizer import (
    ClipNorm,
    ClipValue,
    LossScale,
    StepResult,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)
from ttp.proto.messages import CommitRecord
from ttp.tracking import NullTracker

RANK: int
WORLD: int
SEED: int

# --- material ---


class Net(nn.Module):
    """A small network with odd shapes, a tied weight and a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, 13)
        self.up = nn.Linear(13, 71)
        self.norm = nn.LayerNorm(71)
        self.down = nn.Linear(71, 13, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.detour = nn.Linear(13, 13)

    def forward(self, tokens: torch.Tensor, detour: bool = False) -> torch.Tensor:
        x = self.emb(tokens)
        if detour:
            x = x + self.detour(x)
        x = x + self.down(torch.tanh(self.norm(self.up(x)))) * self.scale
        return nn.functional.cross_entropy((x @ self.emb.weight.t()).flatten(0, 1).float(), (tokens.flatten() + 1) % 37)


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(SEED + seed)
    return Net().to(dtype)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def make(net: nn.Module, world: int | None = None, **kwargs: Any) -> TTPReplicaOptimizer:
    """The optimizer that fits the world, with buckets so small that there are several."""
    odd = (WORLD if world is None else world) % kwargs.get("replicas", 2)
    ring = kwargs.pop("ring", False) or odd
    cls = TTPOddReplicaOptimizer if ring else TTPReplicaOptimizer
    return cls(groups(net), **{"lr": 1e-3, "bucket_bytes": 4096, **kwargs})


def backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def tokens(step: int, part: int = 0, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + 1000 * step + 10 * (RANK if rank is None else rank) + part)
    return torch.randint(0, 37, (4, 6), generator=generator)


def train(optimizer: TTPReplicaOptimizer, net: Net, steps: range, parts: int = 1) -> list[StepResult]:
    results = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            with optimizer.no_sync() if part < parts - 1 else contextlib.nullcontext():
                backward(optimizer.scale_loss(net(tokens(step, part), detour=(step + RANK) % 3 == 0)))
        results.append(optimizer.step(sums=[float(RANK), 1.0]))
    return results


def fingerprint(tensors: Sequence[HeldTensor]) -> str:
    digest = hashlib.sha256()
    for held in tensors:
        digest.update(f"{held.key} {held.shape} {held.start} {held.values.numel()}".encode())
        digest.update(held.values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprints(optimizer: TTPReplicaOptimizer, step: int | None = None) -> dict[str, str]:
    return {group: fingerprint(tensors) for group, tensors in optimizer.holdings(step).items()}


def everyone(value: Any) -> list[Any]:
    answers: list[Any] = [None] * WORLD
    dist.all_gather_object(answers, value)
    return answers


def assert_replicas_identical(optimizer: TTPReplicaOptimizer, net: nn.Module) -> None:
    seen: dict[str, set[str]] = {}
    count: dict[str, int] = {}
    for answer in everyone(fingerprints(optimizer)):
        for group, digest in answer.items():
            seen.setdefault(group, set()).add(digest)
            count[group] = count.get(group, 0) + 1
    assert all(len(digests) == 1 for digests in seen.values()), seen
    assert set(count.values()) == {optimizer.layout.replicas}, count
    assert len(set(everyone(params_digest(net)))) == 1, "parameters differ between ranks"


def params_digest(net: nn.Module) -> str:
    flat = [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in net.parameters()]
    return hashlib.sha256(b"".join(flat)).hexdigest()


def assemble(optimizer: TTPReplicaOptimizer, ranks: int | None = None, copies: int = 1) -> dict[str, torch.Tensor]:
    """Put whole tensors together from everybody's holdings; every element must be there `copies` times at least."""
    mine = [(h.key, h.shape, h.start, h.values.clone()) for part in optimizer.holdings().values() for h in part]
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for answer in everyone(mine)[:ranks]:
        for key, shape, start, values in answer:
            target = whole.setdefault(key, torch.zeros(shape, dtype=values.dtype).view(-1))
            target[start : start + values.numel()] = values
            filled.setdefault(key, torch.zeros(target.numel(), dtype=torch.int32))[start : start + values.numel()] += 1
    assert all(int(times.min()) >= copies for times in filled.values())
    return whole


def fill(optimizer: TTPReplicaOptimizer, whole: dict[str, torch.Tensor]) -> None:
    for target in optimizer.load_begin():
        target.values.copy_(whole[target.key][target.start : target.start + target.values.numel()])


# --- claims: any world ---


def replicas_stay_bit_identical() -> None:
    """Masters, moments and parameters of a shard's holders have the same bits after every step."""
    net = make_net(RANK)  # ranks start from different values: rank 0's count
    optimizer = make(net, clip=ClipNorm(0.5))
    assert len(optimizer.layout.buckets) > 2
    for step in range(1, 21):
        (result,) = train(optimizer, net, range(step, step + 1))
        assert result.step == optimizer.current_step == step
        assert result.sums == (sum(range(WORLD)), WORLD) and not result.skipped
        assert len(set(everyone(result))) == 1, "the result differs between ranks"
        assert_replicas_identical(optimizer, net)
    masters = assemble(optimizer, copies=2)
    for name, param in net.named_parameters():
        assert torch.equal(masters[f"model.{name}"].view(param.shape), param), name
    expected = {key: tuple(shape) for key, shape in optimizer.expected_tensors().items()}
    held = {h.key: tuple(h.shape) for part in everyone(optimizer.holdings()) for hs in part.values() for h in hs}
    assert held == expected
    optimizer.close()


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
        f"seed {SEED}, world {WORLD}: largest difference from DDP + AdamW after 100 steps {worst:.3g}, clipped {clipped}"
    )
    moved = max((a - b).abs().max().item() for a, b in zip(net.parameters(), make_net().parameters(), strict=True))
    assert worst < 2e-5 < moved / 100, (worst, moved)
    optimizer.close()


def bf16_parameters_are_rounded_masters() -> None:
    """BF16 gradients travel in 16 bits, their sum with the partners', masters and moments are FP32."""
    net = make_net(dtype=torch.bfloat16)
    optimizer = make(net, fused=False)
    masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
    cut = {id(p): m for p, m in zip(net.parameters(), masters, strict=True)}
    reference = torch.optim.AdamW(
        [{**g, "params": [cut[id(p)] for _, p in g["params"]]} for g in groups(net)], lr=1e-3, foreach=False
    )
    for step in range(1, 8):
        generator = torch.Generator().manual_seed(SEED + step)
        # Small whole numbers: every sum is exact in BF16, whatever its order.
        weights = [[torch.randint(-3, 4, p.shape, generator=generator).float() for p in masters] for _ in range(WORLD)]
        optimizer.zero_grad()
        mine = [(p * w.bfloat16()).sum() for p, w in zip(net.parameters(), weights[RANK], strict=True)]
        backward(torch.stack(mine).sum())
        result = optimizer.step()
        for index, master in enumerate(masters):
            master.grad = sum((w[index] for w in weights), torch.zeros_like(master)) * (1.0 / WORLD)
        exact = torch.stack([m.grad.double().square().sum() for m in masters if m.grad is not None]).sum().sqrt()
        assert abs(result.grad_norm - exact.item()) < 1e-6 * exact.item()
        reference.step()
        whole = assemble(optimizer)
        for (name, param), master in zip(net.named_parameters(), masters, strict=True):
            assert torch.equal(whole[f"model.{name}"], master.detach().view(-1)), (step, name)
            assert torch.equal(param, master.detach().bfloat16()), (step, name)
    assert_replicas_identical(optimizer, net)
    optimizer.close()


def fp32_gradients_of_bf16_parameters_accumulate_in_fp32() -> None:
    """With grad_dtype FP32 many small gradients add up that BF16 would lose."""
    param = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    cls = TTPOddReplicaOptimizer if WORLD % 2 else TTPReplicaOptimizer
    optimizer = cls([("w", param)], torch.optim.SGD, lr=1.0, grad_dtype=torch.float32, bucket_bytes=512)
    optimizer.gradient_divisor = 1.0
    optimizer.zero_grad()
    for part in range(101):
        with optimizer.no_sync() if part < 100 else contextlib.nullcontext():
            backward((param * (2.0**-10 if part else 1.0)).sum())
    assert param.grad is None
    optimizer.step()
    wanted = 1.0 - WORLD * (1.0 + 100 * 2.0**-10)
    assert torch.equal(assemble(optimizer)["model.w"], torch.full((300,), wanted)), wanted
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
    backward(loss * float("inf") if RANK == WORLD - 1 else loss)
    result = optimizer.step(sums=[1.0])
    assert result.skipped and result.step == 3 and result.loss_scale == 1024.0 and result.sums == (WORLD,)
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
    cls = TTPOddReplicaOptimizer if WORLD % 2 else TTPReplicaOptimizer
    optimizer = cls([("w", param)], torch.optim.SGD, lr=1.0, clip=ClipValue(0.5), bucket_bytes=256)
    weight = torch.linspace(-1, 1, 200)
    optimizer.zero_grad()
    backward((param * weight * (RANK + 1)).sum())
    result = optimizer.step()
    mean = weight * (WORLD + 1) / 2
    assert torch.allclose(param.detach(), -mean.clamp(-0.5, 0.5), atol=1e-6)
    assert abs(result.grad_norm - mean.norm().item()) < 1e-4 and result.clip_factor == 1.0
    optimizer.close()


class Interrupted(Exception):
    pass


class LosesTheLastStep(NullTracker):
    """Raises in begin_update of `step`: the rank stands READY and its training thread is gone."""

    def __init__(self, step: int) -> None:
        self.step, self.record = step, None

    record: CommitRecord | None

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        if step == self.step:
            self.record = record
            raise Interrupted


def in_thread(function: Any, *args: Any) -> Any:
    """Run on another thread, with grad mode and autocast of its own, and return or raise what it did."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((function(*args), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def roll_forward_gives_the_bits_of_the_main_path() -> None:
    """A side thread with the record ends where the training thread would have, whatever the scheduler did since."""
    kwargs: dict[str, Any] = {"clip": ClipNorm(0.3), "loss_scale": LossScale(256.0, growth_interval=4)}
    net, twin = make_net(), make_net()
    optimizer, straight = make(net, **kwargs), make(twin, **kwargs)
    tracker = LosesTheLastStep(4)
    optimizer.attach(tracker)
    train(straight, twin, range(1, 5))
    try:
        train(optimizer, net, range(1, 5))
        raise AssertionError("the tracker did not interrupt")
    except Interrupted:
        pass
    record = tracker.record
    assert record is not None and record == straight.last_record
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 9.0, 9.0, (0.0, 0.0)
    optimizer.gradient_divisor = 77.0
    for wrong in (record.step - 1, record.step + 1):
        try:
            in_thread(optimizer.roll_forward, dataclasses.replace(record, step=wrong))
            raise AssertionError("rolled forward to a step that is not ready")
        except ProtocolError as error:
            assert "wanted state" in str(error)
    assert fingerprints(optimizer) != fingerprints(straight)
    assert in_thread(optimizer.roll_forward, record) == 4
    assert fingerprints(optimizer) == fingerprints(straight)
    assert optimizer.host_state() == straight.host_state() and optimizer.loss_scale == straight.loss_scale == 512.0
    try:
        in_thread(optimizer.roll_forward, record)
        raise AssertionError("rolled forward twice")
    except ProtocolError:
        pass
    optimizer.close()
    straight.close()


def a_step_rolled_forward_at_the_gate_is_not_applied_twice() -> None:
    """The main thread finds the update done when the gate lets it in, and goes on to gather."""
    net, twin = make_net(), make_net()
    optimizer, straight = make(net), make(twin)

    class RollsForward(NullTracker):
        def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
            in_thread(optimizer.roll_forward, record)

    optimizer.attach(RollsForward())
    train(optimizer, net, range(1, 4))
    train(straight, twin, range(1, 4))
    assert fingerprints(optimizer) == fingerprints(straight) and params_digest(net) == params_digest(twin)
    optimizer.close()
    straight.close()


class Journal(NullTracker):
    """Writes down what the optimizer says, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def computing(self, step: int) -> None:
        self.lines.append(f"computing {step}")

    def ready(self, step: int) -> None:
        self.lines.append(f"ready {step}")

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        self.lines.append(f"begin {step} backup {backup_step}")

    def end_update(self, step: int) -> None:
        self.lines.append(f"end {step}")

    def fail_update(self, step: int) -> None:
        self.lines.append(f"fail {step}")


def the_phases_are_told_in_order() -> None:
    """Tracker calls and points interleave as documented; an update that raises is failed, not ended."""
    net = make_net()
    optimizer = make(net, local_copy=True)
    journal = Journal()
    optimizer.attach(journal)
    optimizer.on_point = lambda name, step: journal.lines.append(f"point {name} {step}")
    train(optimizer, net, range(1, 3))
    for step in (1, 2):
        assert journal.lines[:9] == [
            f"computing {step}",
            f"point backward {step}",
            f"ready {step}",
            f"point ready {step}",
            f"point record {step}",
            f"begin {step} backup {step - 1}",
            f"point updating {step}",
            f"end {step}",
            f"point done {step}",
        ], journal.lines
        assert journal.lines[9] == f"point gathering {step}"
        del journal.lines[:10]
    assert not journal.lines

    def explode(name: str, step: int) -> None:
        if name == "updating":
            raise Interrupted

    optimizer.on_point = explode
    try:
        train(optimizer, net, range(3, 4))
        raise AssertionError("the injected exception vanished")
    except Interrupted:
        assert journal.lines == ["computing 3", "ready 3", "begin 3 backup 2", "fail 3"]
    optimizer.close()


def the_local_copy_is_the_step_before() -> None:
    """holdings(t - 1) has the bits of the state before the newest update, also when that update tore."""
    net = make_net()
    optimizer = make(net, local_copy=True, loss_scale=LossScale(8.0, growth_interval=2))
    states, hosts = {0: fingerprints(optimizer)}, {0: optimizer.host_state()}
    for step in range(1, 5):
        train(optimizer, net, range(step, step + 1))
        states[step], hosts[step] = fingerprints(optimizer), optimizer.host_state()
        assert fingerprints(optimizer, step - 1) == states[step - 1] != states[step]
        assert optimizer.host_state(step - 1) == hosts[step - 1] != hosts[step]
        try:
            optimizer.holdings(step - 2)
            raise AssertionError("a step that nobody kept")
        except CheckpointError as error:
            assert f"local copy of step {step - 1}" in str(error)

    def explode(name: str, step: int) -> None:
        if name == "updating":
            raise Interrupted

    optimizer.on_point = explode
    with contextlib.suppress(Interrupted):
        train(optimizer, net, range(5, 6))
    assert fingerprints(optimizer, 4) == states[4]
    for torn in (None, 5):
        try:
            optimizer.holdings(torn)
            raise AssertionError("a torn state was handed out")
        except CheckpointError as error:
            assert "in the middle of the update of step 5" in str(error)
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
        backward(net(tokens(step), detour=(step + RANK) % 3 == 0))
        optimizer.step(sums=[0.0])
    assert fingerprints(optimizer) == fingerprints(straight)
    optimizer.zero_grad()
    backward(net(tokens(5), detour=True))
    try:
        backward(net(tokens(6), detour=True))
        raise AssertionError("a second synchronised backward went unnoticed")
    except RuntimeError as error:
        assert "no_sync" in str(error)
    optimizer.step()
    optimizer.close()
    straight.close()


def ranks_that_disagree_are_told_so() -> None:
    """A parameter too many on one rank is an error on every rank, not a hang."""
    net = make_net()
    named = list(net.named_parameters())[: 4 if RANK == WORLD - 1 else 5]
    try:
        cls = TTPOddReplicaOptimizer if WORLD % 2 else TTPReplicaOptimizer
        cls(named)
        raise AssertionError("the ranks disagree about the parameters")
    except LayoutError as error:
        assert f"ranks [{WORLD - 1}] cut" in str(error)


def every_row_order_trains_the_same() -> None:
    """Hosts that turn a row's order around change nothing but who holds what."""
    hosts = HOSTS[WORLD]
    net, twin = make_net(), make_net()
    optimizer, straight = make(net, hosts=hosts), make(twin)
    if WORLD % 2 == 0:
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

# --- claims: bytes ---


@contextlib.contextmanager
def counted_wire(optimizer: TTPReplicaOptimizer) -> Iterator[dict[str, int]]:
    """Count the bytes that this rank must send at least, per kind of collective (payload, bandwidth-optimal)."""
    sent = {"scatter": 0, "sum": 0, "copy": 0, "gather": 0, "other": 0}
    kept: tuple[Any, ...] = (wires._reduce_scatter, wires._all_gather, dist.all_reduce, dist.batch_isend_irecv)
    point = [""]
    optimizer.on_point = lambda name, step: point.__setitem__(0, name)

    def scatter(out: torch.Tensor, flat: torch.Tensor, group: Any, async_op: bool) -> Any:
        sent["scatter"] += (group.size() - 1) * out.nbytes
        return kept[0](out, flat, group=group, async_op=async_op)

    def gather(flat: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool) -> Any:
        sent["gather" if point[0] == "done" else "sum"] += (group.size() - 1) * own.nbytes
        return kept[1](flat, own, group=group, async_op=async_op)

    def reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        kind = "sum" if async_op else "other"
        sent[kind] += 2 * (group.size() - 1) * tensor.nbytes // group.size()
        return kept[2](tensor, group=group, async_op=async_op)

    def copies(ops: list[Any]) -> Any:
        sent["copy"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return kept[3](ops)

    patched: Any = dist
    wires._reduce_scatter, wires._all_gather = scatter, gather
    patched.all_reduce, patched.batch_isend_irecv = reduce, copies
    try:
        yield sent
    finally:
        wires._reduce_scatter, wires._all_gather, patched.all_reduce, patched.batch_isend_irecv = kept


def the_wire_carries_what_theory_says() -> None:
    """Gradients: as much as they are large, once. Parameters back: (1 - 1/shards). Else: squares, flag and sums."""
    for dtype in (torch.float32, torch.bfloat16):
        for ring in (False, True) if WORLD % 2 == 0 else (True,):
            net = make_net(dtype=dtype)
            optimizer = make(net, ring=ring)
            train(optimizer, net, range(1, 2))
            total = sum(bucket.numel for bucket in optimizer.layout.buckets) * dtype.itemsize
            with counted_wire(optimizer) as sent:
                train(optimizer, net, range(2, 3))
            row = WORLD if ring else WORLD // 2
            wanted = {
                "scatter": total * (row - 1) // row,
                "sum": 0 if ring else total // row,
                "copy": total // row if ring else 0,
                "gather": total * (row - 1) // row,
                "other": 2 * (WORLD - 1) * 4 * 8 // WORLD,
            }
            assert sent == wanted, (dtype, ring, sent, wanted)
            assert sent["scatter"] + sent["sum"] + sent["copy"] == total
            optimizer.close()


def memory_is_four_plus_sixteen_r_over_d() -> None:
    """BF16 parameters: 2 + 2 for parameter and gradient, 16 R/d for master, two moments and the FP32 gradient shard."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(256, 333), nn.LayerNorm(333), nn.Linear(333, 128)]).to(torch.bfloat16)
    named = list(net.named_parameters())
    count = sum(p.numel() for p in net.parameters())
    for ring in (False, True) if WORLD % 2 == 0 else (True,):
        cls = TTPOddReplicaOptimizer if ring else TTPReplicaOptimizer
        optimizer = cls(named, bucket_bytes=2**17)
        optimizer.zero_grad()
        kept = [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)]
        whole = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        steps = 4 * sum(1 for _ in optimizer.layout.segments(RANK))
        used = sum(whole.values()) + optimizer._shards.bytes_held() - steps
        padded = sum(bucket.numel for bucket in optimizer.layout.buckets)
        share = 16 * 2 / WORLD
        assert count * (4 + share) <= used <= padded * (4 + share), (ring, used / count)
        assert padded < 1.02 * count
        storages = {
            t.values.untyped_storage().data_ptr(): t.values.untyped_storage().nbytes() for t in optimizer.load_begin()
        }
        twelve = sum(storages.values()) - steps
        assert count * 12 * 2 / WORLD * 0.98 <= twelve <= padded * 12 * 2 / WORLD, "masters and moments"
        optimizer.close()


# --- claims: loading at another size ---


def a_state_moves_to_another_size() -> None:
    """Whole tensors put together from one layout's holdings fill another's; parameters follow, training goes on."""
    net = make_net()
    optimizer = make(net, clip=ClipNorm(1.0), loss_scale=LossScale(64.0, growth_interval=2))
    train(optimizer, net, range(1, 6))
    whole, host = assemble(optimizer), optimizer.host_state()
    whole = everyone(whole)[0]
    train(optimizer, net, range(6, 7))
    onward = [p.detach().clone() for p in net.parameters()]
    for size in (WORLD, WORLD - 1, 2):
        group = dist.new_group(list(range(size)))
        if size > RANK:
            other = make_net(5)
            moved = make(other, world=size, group=group, loss_scale=LossScale(1.0, growth_interval=2), lr=7.0)
            fill(moved, whole)
            moved.load_end(5, host)
            assert moved.current_step == 5 and moved.loss_scale == 256.0
            assert [g["lr"] for g in moved.param_groups] == [1e-3, 2e-3]
            for name, param in other.named_parameters():
                assert torch.equal(param.view(-1), whole[f"model.{name}"]), name
            moved.clip = ClipNorm(1.0)
            # The same global batch: those who are left take over the others' parts.
            moved.gradient_divisor = float(WORLD)
            moved.zero_grad()
            mine = [r for r in range(WORLD) if r % size == RANK]
            for r in mine:
                with moved.no_sync() if r != mine[-1] else contextlib.nullcontext():
                    backward(moved.scale_loss(other(tokens(6, rank=r), detour=(6 + r) % 3 == 0)))
            result = moved.step()
            assert result.step == 6
            for a, b in zip(other.parameters(), onward, strict=True):
                assert torch.equal(a, b) if size == WORLD else torch.allclose(a, b, atol=3e-5), (
                    size,
                    (a - b).abs().max(),
                )
            if size == WORLD:
                assert fingerprints(moved) == fingerprints(optimizer)
            moved.close()
        dist.barrier()
    optimizer.close()


def three_replicas_are_identical() -> None:
    """R = 3 keeps three identical copies, in FP32 and in BF16."""
    for dtype in (torch.float32, torch.bfloat16):
        net = make_net(dtype=dtype)
        optimizer = make(net, replicas=3)
        train(optimizer, net, range(1, 6))
        assert_replicas_identical(optimizer, net)
        optimizer.close()


# --- the rank's main ---


def main() -> None:
    global RANK, WORLD, SEED
    RANK, WORLD, names, folder = globals()["JOB"]
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    name = "start"
    try:
        store = torch._C._distributed_c10d.FileStore(os.path.join(folder, "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
        seeds = [random.SystemRandom().randrange(2**31)]
        dist.broadcast_object_list(seeds)
        SEED = int(os.environ.get("TTP_TEST_SEED", seeds[0]))
        for name in names:
            globals()[name]()
            dist.barrier()
        dist.destroy_process_group()
        Path(folder, f"done_{RANK}").touch()
    except BaseException:
        seed = globals().get("SEED")
        Path(folder, f"error_{RANK}").write_text(
            f"rank {RANK} of {WORLD}, {name}, TTP_TEST_SEED={seed}:\n{traceback.format_exc()}"
        )
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
