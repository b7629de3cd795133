"""Claims about models that are split over ranks: tensor parallel by DTensor, stages, experts. Each function runs on every rank
of a world of 4, and compares with the same model trained by plain AdamW in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.unit.optim.material import backward, everyone, job
from ttp.checkpoint.format.tiling import boxes_of
from ttp.optim.replica_optimizer import ClipNorm, TTPReplicaOptimizer

STEPS = 8
WIDTH = 16
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
"""With an eps so large that a gradient near zero, which another order of summing changes, moves nothing far."""


class Layer(nn.Module):
    """x + down(tanh(up(norm(x)))): column-wise, row-wise, and a norm that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(job.seed + seed)
    return nn.Sequential(Layer(), Layer())


def batch(step: int, dp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed + 100 * step + dp_rank)
    return torch.randn(4, 6, WIDTH, generator=generator)


def split(net: nn.Module, tp: DeviceMesh) -> None:
    """Make tensor- and sequence-parallel layers: in and out goes this rank's part of the sequence."""
    for layer in net.children():
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp, plan)


def reference(steps: int, dp: int) -> tuple[nn.Module, list[float]]:
    """Train the whole model in one process on the batches of all data-parallel ranks; return it and the norms."""
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters(), **ADAM)
    norms = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for rank in range(dp):
            backward(net(batch(step, rank)).square().mean() / dp)
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
    return net, norms


def whole(held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Put together what all ranks hold of the masters and moments; every element is there `copies` times, with equal bits."""
    pieces = [
        (
            tensor.key,
            tuple(tensor.shape),
            box.offsets,
            box.sizes,
            tensor.values[box.start - tensor.start :][: box.numel],
        )
        for tensors in held.values()
        for tensor in tensors
        for box in boxes_of(tensor)
    ]
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for reported in everyone([(key, shape, at, of, values.clone()) for key, shape, at, of, values in pieces]):
        for key, shape, at, of, values in reported:
            into = found.setdefault(key, torch.full(shape, float("nan")))
            count = times.setdefault(key, torch.zeros(shape))
            where = tuple(slice(a, a + n) for a, n in zip(at, of, strict=True))
            known, values = into[where], values.view(of)
            assert bool((known.isnan() | (known == values)).all()), f"replicas of {key} differ"
            into[where] = values
            count[where] += 1
    for key, count in times.items():
        assert bool((count == 2).all()), f"{key}: its elements are held {sorted(set(count.flatten().tolist()))} times"
    return found


def a_tensor_parallel_model_trains_as_the_whole_one() -> None:
    """dp2 x tp2: norm, weights and moments are those of one process; every element is held twice, and nothing counts twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank()
    net = stack()
    split(net, mesh["tp"])
    optimizer = TTPReplicaOptimizer(
        net.named_parameters(), **ADAM, group=mesh["dp"].get_group(), span=dist.group.WORLD,
        clip=ClipNorm(0.5), bucket_bytes=2048,
    )  # fmt: skip
    plain, norms = reference(STEPS, dp=2)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        tokens = batch(step, dp_rank)
        mine = tokens.chunk(2, dim=1)[mesh["tp"].get_local_rank()]
        backward(net(mine).square().sum() / tokens.numel())
        result = optimizer.step(sums=[1.0])
        assert abs(result.grad_norm - norms[step - 1]) < 1e-5 * norms[step - 1], (
            step,
            result.grad_norm,
            norms[step - 1],
        )
        assert result.sums == (4.0,)
    held = whole(optimizer.holdings())
    for name, param in plain.named_parameters():
        torch.testing.assert_close(held[f"model.{name}"], param.detach(), rtol=0, atol=2e-5)
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), held[f"model.{name}"]), name
    expected = {key: shape for key, shape in optimizer.expected_tensors().items() if shape}
    assert {key: tuple(value.shape) for key, value in held.items() if value.dim()} == expected
    optimizer.close()


def stages_and_tied_copies_count_once() -> None:
    """dp2 x pp2: each stage has a layer, and both have the tied weight, which only the first counts. The norm is the whole
    model's, an overflow in one stage skips the step in both, and any rank knows all tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    net = stack()
    tied = nn.Parameter(torch.linspace(-1, 1, WIDTH))
    mine = [(f"{stage}.{name}", param) for name, param in net[stage].named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": mine},
        {"params": [("tied", tied)], "weight_decay": 0.0},
    ]
    optimizer = TTPReplicaOptimizer(
        groups, **ADAM, group=mesh["dp"].get_group(), span=dist.group.WORLD, clip=ClipNorm(0.5),
        copies=["tied"] if stage else (),
    )  # fmt: skip

    def loss_of(layers: nn.Module, part: int, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (layers(tokens) * weight).square().mean() * (1 + part)
        return loss

    whole_net = stack()
    whole_tied = nn.Parameter(tied.detach().clone())
    whole_groups: list[dict[str, Any]] = [
        {"params": list(whole_net.parameters())},
        {"params": [whole_tied], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(whole_groups, **ADAM)
    for step in range(1, STEPS + 1):
        plain.zero_grad()
        for rank in range(2):
            for part in range(2):
                backward(loss_of(whole_net[part], part, whole_tied, batch(step, rank)) / 2)
        norm = float(nn.utils.clip_grad_norm_([*whole_net.parameters(), whole_tied], 0.5))
        plain.step()
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(loss_of(net[stage], stage, tied, batch(step, dp_rank)))
        dist.all_reduce(
            optimizer.gradient("tied"), group=mesh["pp"].get_group()
        )  # as a pipeline does for tied embeddings
        result = optimizer.step()
        assert abs(result.grad_norm - norm) < 1e-5 * norm, (step, result.grad_norm, norm)
    held = whole(optimizer.holdings())
    for name, param in [*whole_net.named_parameters(), ("tied", whole_tied)]:
        torch.testing.assert_close(held[f"model.{name}"], param.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(tied.detach(), held["model.tied"], rtol=0, atol=0)
    assert {key for key, shape in optimizer.expected_tensors().items() if shape} == {
        k for k, v in held.items() if v.dim()
    }
    assert optimizer.param_names(1) == ["tied"] and len(optimizer.param_names(0)) == len(list(whole_net.parameters()))
    optimizer.zero_grad()
    backward(mine[0][1].sum() * (float("inf") if job.rank == 3 else 1.0))
    assert optimizer.step().skipped, "an overflow in one stage"
    optimizer.close()


def experts_have_replicas_of_their_own() -> None:
    """dp4 x ep2: the experts of a rank are held by the two ranks that have the same ones, and by no other rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    ep_rank = mesh["ep"].get_local_rank()
    pair = [rank for rank in range(4) if rank // 2 == job.rank // 2]
    net = stack()
    shared, experts = net[0], stack(seed=1)
    mine = experts[ep_rank]
    groups: list[dict[str, Any]] = [
        {"params": [(f"shared.{name}", param) for name, param in shared.named_parameters()]},
        {
            "params": [(f"experts.{ep_rank}.{name}", param) for name, param in mine.named_parameters()],
            "process_group": mesh["edp"].get_group(),
        },
    ]
    optimizer = TTPReplicaOptimizer(groups, **ADAM, clip=ClipNorm(0.5), bucket_bytes=2048)
    whole_net, whole_experts = stack()[0], stack(seed=1)
    params = list(nn.ModuleList([whole_net, whole_experts]).parameters())
    plain = torch.optim.AdamW(params, **ADAM)
    for step in range(1, STEPS + 1):
        plain.zero_grad()
        for rank in range(4):
            for part in range(2):
                backward(whole_experts[part](whole_net(batch(step, rank)).detach()).square().mean() / 4)
            backward(whole_net(batch(step, rank)).square().mean() / 4)
        norm = float(nn.utils.clip_grad_norm_(params, 0.5))
        plain.step()
        optimizer.zero_grad()
        with optimizer.no_sync():
            for rank in pair:  # the tokens of both ranks of a pair come to each expert
                backward(mine(shared(batch(step, rank)).detach()).square().mean())
        # The experts' gradients were accumulated without a reduction; the last pass reduces them with the others.
        backward(shared(batch(step, job.rank)).square().mean() + 0.0 * sum(p.sum() for p in mine.parameters()))
        result = optimizer.step()
        assert abs(result.grad_norm - norm) < 1e-5 * norm, (step, result.grad_norm, norm)
    held = whole(optimizer.holdings())
    for name, param in whole_experts.named_parameters():
        torch.testing.assert_close(held[f"model.experts.{name}"], param.detach(), rtol=0, atol=2e-5)
    assert any(key.startswith("model.experts.1.") for key in optimizer.expected_tensors())
    assert any(key.startswith("model.experts.0.") for key in optimizer.expected_tensors())
    optimizer.close()
