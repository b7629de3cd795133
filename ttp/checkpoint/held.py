"""A piece of a tensor that this rank holds, with its global address."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A flat run of elements of one tensor.

    `key` is the checkpoint's name (`model.layers.0.wq.weight`, `optim.state.layers.0.wq.weight.exp_avg`); `shape` the
    whole tensor's shape; the run is elements [start, start + values.numel()) of the tensor laid out row-major; `values`
    is 1-D, contiguous, and may live on any device (a view of the optimizer's own memory: never written by a saver).
    A tensor that every replica holds whole has start 0 and all elements; a 0-d tensor has shape () and one element.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
