"""Sums over the bits of tensors, on the device where they lie, for telling replicas apart.

Owns the arithmetic: a weighted sum of 32-bit words, modulo 2**64. The weights are odd, so that any one altered word alters
the sum. No cryptography: it finds accidents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK = {"cpu": 1 << 16}
"""Elements at a time: what stays in a processor's cache."""
_CHUNK_ELSEWHERE = 1 << 22
_MIX = 1_000_003
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sums_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one int64 for each 1-D contiguous tensor, on their device; nothing waits for the device."""
    device = tensors[0].device
    size = _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
    longest = min(size, max(2 * tensor.numel() for tensor in tensors))
    weights = torch.arange(longest, dtype=torch.int32, device=device) * 2 + 1
    # A step counter may be on the host although all else is on a device.
    return torch.stack([_sum_of(tensor.to(device), size, weights) for tensor in tensors])


def mixed(sums: torch.Tensor) -> torch.Tensor:
    """Return one int64 (0-d) that depends on all of `sums` and their order."""
    total = torch.zeros((), dtype=torch.int64, device=sums.device)
    for value in sums:
        total = total * _MIX + value
    return total


def _sum_of(tensor: torch.Tensor, size: int, weights: torch.Tensor) -> torch.Tensor:
    words = tensor.view(_WORDS.get(tensor.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(words, size):
        total = total * _MIX + (chunk.to(torch.int32) * weights[: chunk.numel()]).sum(dtype=torch.int64)
    return total
