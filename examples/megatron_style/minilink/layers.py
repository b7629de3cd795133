"""Layers that are split over the tensor-parallel ranks, and the collectives around them.

Every layer draws its whole weight and keeps its slice, so that a model is the same however it is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from minilink.core import parallel_state


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _summed(grad)


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _slice(grad, -1).contiguous()


def _summed(x: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return x
    x = x.clone()
    torch.distributed.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
    return x


def _slice(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's share of a tensor along a dimension."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(size, dim=dim)[parallel_state.get_tensor_model_parallel_rank()]


def _split_parameter(whole: torch.Tensor, dim: int) -> nn.Parameter:
    param = nn.Parameter(_slice(whole, dim).detach().clone())
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    return param


class ColumnParallelLinear(nn.Module):
    """Each rank has some of the outputs. groups: the outputs are so many matrices side by side (q, k, v), each split."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight = _split_parameter(whole.weight.view(groups, -1, inputs), 1)
        self.bias = _split_parameter(whole.bias.view(groups, -1), 1)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.linear(_CopyToRegion.apply(x_BTD), self.weight.flatten(0, 1), self.bias.flatten())


class RowParallelLinear(nn.Module):
    """Each rank has some of the inputs; the outputs are summed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight = _split_parameter(whole.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return _ReduceFromRegion.apply(F.linear(x_BTD, self.weight)) + self.bias


class MLP(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden_size, 4 * hidden_size)
        self.down = RowParallelLinear(4 * hidden_size, hidden_size)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class VocabParallelEmbedding(nn.Module):
    """Each rank has some of the words."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.weight = _split_parameter(nn.Embedding(words, size).weight, 0)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        here = len(self.weight)
        local_BT = tokens_BT - parallel_state.get_tensor_model_parallel_rank() * here
        mask_BT = (local_BT >= 0) & (local_BT < here)
        x_BTD = F.embedding(local_BT.clamp(0, here - 1), self.weight) * mask_BT.unsqueeze(-1)
        return _ReduceFromRegion.apply(x_BTD)


def parallel_logits(x_BTD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits of all words, from a weight of which each rank has some."""
    return _GatherFromRegion.apply(_CopyToRegion.apply(x_BTD) @ weight.t())
