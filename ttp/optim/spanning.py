"""The spanning collective: the small all-reduce that every rank of the model enters when it is READY.

Owns what goes over it and how it is waited for. Whoever has its result knows that every rank was READY; what follows
from the result, the optimizer decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_POLL_S = 0.0003


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks read after the collective."""

    squares: float
    """Sum of squares of the gradient as it was reduced; counts for nothing after an overflow."""
    overflow: bool
    told_to_leave: bool
    """Some rank was told to leave."""
    sums: tuple[float, ...]


class Spanning:
    """The collective over `span`, and over `barrier` where `span` does not hold all ranks that share the model."""

    def __init__(self, span: Any, barrier: Any, device: torch.device) -> None:
        self._span, self._barrier, self._device = span, barrier, device
        self.abandons: Callable[[int], None] | None = None
        """Called with the step again and again during the wait: whatever it raises ends it."""
        self._left: list[tuple[Any, torch.Tensor]] = []
        """Collectives that were not waited for to the end, with their memory: one may still complete."""

    def agree(
        self, step: int, squares: torch.Tensor, notice: bool, sums: Sequence[float] | torch.Tensor | None
    ) -> Agreed:
        """Sum this rank's squares (FP64, 0-d), its notice and the caller's sums over all ranks (a collective)."""
        extra = torch.as_tensor([] if sums is None else sums, dtype=torch.float64, device=self._device).reshape(-1)
        finite = squares.isfinite()
        told = torch.full_like(squares, float(notice))
        head = torch.stack([torch.where(finite, squares, torch.zeros_like(squares)), (~finite).double(), told])
        vector = torch.cat([head, extra])
        if self._span is not None:
            self._sum(step, vector, self._span)
        if self._barrier is not None:
            # Contributing the group's verdict here, and not before, is what makes this the spanning collective.
            self._sum(step, vector[1:3], self._barrier)
        total, overflow, notices, *summed = vector.tolist()
        return Agreed(total, overflow > 0, notices > 0, tuple(summed))

    def _sum(self, step: int, vector: torch.Tensor, group: Any) -> None:
        if self.abandons is None:
            dist.all_reduce(vector, group=group)
            return
        work = dist.all_reduce(vector, group=group, async_op=True)
        try:
            while not work.is_completed():
                self.abandons(step)
                time.sleep(_POLL_S)
        except BaseException:
            self._left.append((work, vector))
            raise
        work.wait()
