"""Small regions, and what describes them."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from ttp.checkpoint.format.types import HeldTensor
from ttp.copies.region import Description, Region, places_of, region_bytes

GROUPS = ("a", "b")


def held(key: str, values: torch.Tensor) -> HeldTensor:
    return HeldTensor(key, (values.numel(),), 0, values)


def described(
    attempt: int, rank: int = 0, facts: dict[str, Any] | None = None, groups: tuple[str, ...] = GROUPS
) -> Description:
    """Return what describes two slots of four floats of group a, and two of b; only what `groups` names."""
    tensors = {"a": [held("model.x", torch.zeros(4))], "b": [held("model.y", torch.zeros(2))]}
    places = places_of({group: tensors[group] for group in groups})
    return Description(rank, attempt, 2, GROUPS, (places, places), facts or {"directories": [], "passed_over": {}})


def empty_region(description: Description) -> Region:
    return Region(memoryview(mmap.mmap(-1, region_bytes(description.slots))))


def region_of(attempt: int, rank: int = 0) -> Region:
    region = empty_region(described(attempt, rank))
    region.describe(described(attempt, rank))
    return region


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
