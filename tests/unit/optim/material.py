"""What every claim about ranks works with: a network, an optimizer for the world at hand, and comparisons across ranks.

`job` is filled in by `rank_main` before any claim runs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttp.checkpoint.format.types import HeldTensor
from ttp.optim.replica_optimizer import (
    StepResult,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)


class Job:
    """Who this process is."""

    rank: int
    world: int
    seed: int


job = Job()


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
    torch.manual_seed(job.seed + seed)
    return Net().to(dtype)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def make(net: nn.Module, world: int | None = None, **kwargs: Any) -> TTPReplicaOptimizer:
    """The optimizer that fits the world, with buckets so small that there are several."""
    odd = (job.world if world is None else world) % kwargs.get("replicas", 2)
    ring = kwargs.pop("ring", False) or odd
    cls = TTPOddReplicaOptimizer if ring else TTPReplicaOptimizer
    return cls(groups(net), **{"lr": 1e-3, "bucket_bytes": 4096, **kwargs})


def backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def tokens(step: int, part: int = 0, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed + 1000 * step + 10 * (job.rank if rank is None else rank) + part)
    return torch.randint(0, 37, (4, 6), generator=generator)


def train(optimizer: TTPReplicaOptimizer, net: Net, steps: range, parts: int = 1) -> list[StepResult]:
    results = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            with optimizer.no_sync() if part < parts - 1 else contextlib.nullcontext():
                backward(optimizer.scale_loss(net(tokens(step, part), detour=(step + job.rank) % 3 == 0)))
        results.append(optimizer.step(sums=[float(job.rank), 1.0]))
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
    answers: list[Any] = [None] * job.world
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
