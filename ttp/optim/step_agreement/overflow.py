"""Warnings of steps that are skipped because a gradient is not finite: the first one, and then the 10th, the 100th and so on.

Owns which of them are reported and by which rank. Never decides what is skipped. With a dynamic loss scale an overflow is ordinary until the
scale cannot be the cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ttp.optim.step_agreement.spanning import Agreed
from ttp.optim.step_agreement.step_result import LossScale

log = logging.getLogger("ttp")

SPEAKERS = 4
"""Where the shards of more ranks are not finite, rank 0 alone reports it for all."""


class SkippedSteps:
    """Counts the skipped steps of one rank."""

    def __init__(self, rule: LossScale | None) -> None:
        self._rule = rule
        self._count = 0

    def note(
        self,
        step: int,
        scale: float,
        squares: torch.Tensor,
        sums: Sequence[float] | torch.Tensor | None,
        agreed: Agreed,
    ) -> None:
        """A step is agreed on. `squares`, `sums`: what this rank gave to the collective; `scale`: the loss scale."""
        rule = self._rule
        if not agreed.overflow or (rule is not None and rule.dynamic and scale > max(1.0, rule.least)):
            return
        self._count += 1
        if not _is_power_of_ten(self._count) or not (what := _what(squares, sums, agreed)):
            return
        log.warning(
            "step %d: %s: expected finite numbers. The step is skipped on all ranks; %d skipped so far. Look at the data and the learning rate of"
            " that step",
            step, what, self._count,
        )  # fmt: skip


def _what(squares: torch.Tensor, sums: Sequence[float] | torch.Tensor | None, agreed: Agreed) -> str:
    """Return what this rank has to report; empty: another one reports it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not all(map(math.isfinite, agreed.sums)):
        own = torch.as_tensor(sums, dtype=torch.float64)
        return "" if own.isfinite().all() else f"the sums given to step() by rank {rank} are {own.flatten().tolist()}"
    if agreed.overflow > SPEAKERS:
        return f"the gradient is not finite in the shards of {agreed.overflow} ranks" if rank == 0 else ""
    return "" if squares.isfinite() else f"the gradient is not finite in the shards of rank {rank}"


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
