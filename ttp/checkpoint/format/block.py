"""A block of a tensor, for tensors that are split over ranks (PURE)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Elements offsets[d] <= i_d < offsets[d] + sizes[d] of a tensor: what a rank has of one that is split over ranks."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
