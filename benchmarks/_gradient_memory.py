"""What the gradients of a rank take, counted in tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import ttp


def held(optimizer: ttp.TTPReplicaOptimizer, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the bytes of gradients that this rank keeps now: in buckets, in shards of their own, and outside both."""
    kept = {}
    tensors = [
        tensor for part in optimizer._parts for memory in part.memory for tensor in (memory.grads, *memory.reduced)
    ]
    for tensor in [*tensors, *(param.grad for param in parameters if param.grad is not None)]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
    return sum(kept.values())
