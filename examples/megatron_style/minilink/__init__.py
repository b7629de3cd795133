"""The trainer's package. As in Megatron, the arguments are one namespace that everybody asks for."""

from __future__ import annotations

import torch.distributed as dist

from minilink.arguments import get_args

from .utils import get_ttp_switch  # TTP

__all__ = ["get_args", "get_ttp_switch", "print_rank_0", "print_rank_last"]


def print_rank_0(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: str) -> None:
    """Print on the first rank of the last stage, which knows the loss."""
    world_size = dist.get_world_size()
    if dist.get_rank() == world_size - world_size // get_args().pipeline_model_parallel_size:
        print(message, flush=True)
