"""L2 norms that all ranks sum up together, and clipping by one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from minilink import get_ttp_switch
from minilink.core import parallel_state

enable_ttp = get_ttp_switch()  # TTP
if enable_ttp:  # TTP
    from ttp.mindio.modellink.os_shard_parallel import get_os_shard_group


def counted(params: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that no other model part counts: not the copies of tensor-parallel ranks, nor of tied embeddings."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return [
        param
        for param in params
        if (first or getattr(param, "tensor_model_parallel", False)) and not getattr(param, "shared", False)
    ]


def params_norm_fp32(params: Iterable[torch.nn.Parameter]) -> float:
    """Return the norm of the whole model's parameters (all ranks call)."""
    mine = counted(params)
    experts = [param for param in mine if not getattr(param, "allreduce", True)]
    return l2_norm_fp32([param for param in mine if getattr(param, "allreduce", True)], experts)


@torch.no_grad()
def l2_norm_fp32(tensors: Iterable[torch.Tensor], experts: Sequence[torch.Tensor] = ()) -> float:
    """Return the norm of tensors that the data-parallel ranks have alike: each rank of the group squares its part of them (all ranks
    call). experts: tensors that are others on each expert-parallel rank."""
    group = get_os_shard_group() if enable_ttp else parallel_state.get_data_parallel_group()  # TTP
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parts = [tensor.flatten().tensor_split(size)[rank].float() for tensor in tensors]
    total_norm = torch.stack([part.square().sum() for part in parts]).sum()
    torch.distributed.all_reduce(
        total_norm,
        op=torch.distributed.ReduceOp.SUM,
        group=get_os_shard_group() if enable_ttp else parallel_state.get_data_parallel_group(),  # TTP
    )
    if experts:
        of_experts = torch.stack([tensor.float().square().sum() for tensor in experts]).sum()
        torch.distributed.all_reduce(of_experts, group=parallel_state.get_expert_model_parallel_group())
        total_norm += of_experts
    # Sum across all model-parallel ranks.
    torch.distributed.all_reduce(
        total_norm, op=torch.distributed.ReduceOp.SUM, group=parallel_state.get_model_parallel_group()
    )
    return total_norm.sqrt().item()


@torch.no_grad()
def clip_grad_norm_fp32(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the reduced gradients down to `max_norm` together; return their norm before (all ranks call)."""
    grads = [param.grad for param in parameters if param.grad is not None]
    total_norm = l2_norm_fp32([param.grad for param in counted(parameters) if param.grad is not None])
    clip_coeff = max_norm / (total_norm + 1.0e-6)
    if clip_coeff < 1.0:
        torch._foreach_mul_(grads, clip_coeff)
    return total_norm
