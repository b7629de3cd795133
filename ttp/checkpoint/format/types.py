"""A run of a tensor's elements that this rank holds, with its global address."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ttp.checkpoint.format.block import Block


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A flat run of elements of one tensor, or of a block of it.

    `key` is the checkpoint's name (`model.layers.0.wq.weight`, `optim.state.layers.0.wq.weight.exp_avg`); `shape` the
    whole tensor's shape; the run is elements [start, start + values.numel()) of the block laid out row-major, which is the
    tensor itself unless `block` says otherwise; `values` is 1-D, contiguous, and may live on any device (a view of the
    optimizer's own memory: never written by a saver). A tensor that every replica holds whole has start 0 and all
    elements; a 0-d tensor has shape () and one element.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    block: Block | None = None

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape that `start` counts in."""
        return self.shape if self.block is None else self.block.sizes

    @property
    def origin(self) -> tuple[int, ...]:
        """Where the block begins in the whole tensor."""
        return (0,) * len(self.shape) if self.block is None else self.block.offsets
