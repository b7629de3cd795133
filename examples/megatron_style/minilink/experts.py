"""Experts in place of an MLP, each token's on one of them, spread over the expert-parallel ranks.

Each rank gathers the tokens of all expert-parallel ranks, runs its own experts on those that chose them, and the outputs are summed back to
where the tokens came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minilink.core import parallel_state
from minilink.layers import MLP


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _own_of_sum(grad)


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _own_of_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _gathered(grad)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    size = parallel_state.get_expert_model_parallel_world_size()
    if size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=parallel_state.get_expert_model_parallel_group())
    return torch.cat(parts)


def _own_of_sum(x: torch.Tensor) -> torch.Tensor:
    size = parallel_state.get_expert_model_parallel_world_size()
    if size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(x, group=parallel_state.get_expert_model_parallel_group())
    return x.chunk(size)[parallel_state.get_expert_model_parallel_rank()]


class SwitchMLP(nn.Module):
    """One expert for each token, by a router that all ranks have alike."""

    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, experts)
        here = experts // parallel_state.get_expert_model_parallel_world_size()
        self.first = here * parallel_state.get_expert_model_parallel_rank()
        made = [MLP(hidden_size) for _ in range(experts)]  # all draw, so that a model is the same however it is split
        self.local_experts = nn.ModuleList(made[self.first : self.first + here])
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            for param in self.local_experts.parameters():
                param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x_BTD).float().softmax(dim=-1)
        weight_BT, choice_BT = probabilities.max(dim=-1)
        everyones_BTD, chosen_BT = _GatherTokens.apply(x_BTD), _gathered(choice_BT)
        out_BTD = torch.zeros_like(everyones_BTD)
        for number, expert in enumerate(self.local_experts, self.first):
            out_BTD = out_BTD + expert(everyones_BTD) * (chosen_BT == number).unsqueeze(-1)
        return _SumBack.apply(out_BTD) * weight_BT.unsqueeze(-1).to(x_BTD.dtype)
