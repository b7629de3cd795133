"""How often a scheduler takes its step for one update, so that a resume repeats what followed the saved one.

A plain loop calls `step()` once. accelerate's wrapper steps the scheduler within it once for each process: whether the trainer gave the wrapper or what
is within, the count is that of the scheduler within. Owns nothing but the count.
"""

from __future__ import annotations

import warnings
from typing import Any

MAX_TICKS = 1_000_000
"""For one update: more is no count of a job's processes."""


class Ticks:
    """One scheduler, and how far it advances from one update to the next."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.ticks: int | None = None
        """Steps of the scheduler within that follow an update; None: not known yet."""
        inner = scheduler
        while not hasattr(inner, "last_epoch") and hasattr(inner, "scheduler"):
            inner = inner.scheduler
        self._inner = inner
        self._newest: int | None = None
        self._before: int | None = None

    def count(self) -> None:
        """An update is about to be done. The smaller of the two newest counts is taken: one update may be followed by more, where a step between
        was skipped or an epoch ended."""
        now = _advanced(self._inner)
        if now is None:
            return
        if self._newest is not None:
            delta = min(max(now - self._newest, 0), MAX_TICKS)
            self.ticks = delta if self._before is None else min(delta, self._before)
            self._before = delta
        self._newest = now

    def repeat(self) -> None:
        """Do what followed the update whose state was loaded."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no optimizer.step() came before it in this process
            if self.ticks is None:
                self.scheduler.step()
                return
            for _ in range(self.ticks):
                total = getattr(self._inner, "total_steps", None)
                if total is None or self._inner.last_epoch < total:  # OneCycleLR ends there
                    self._inner.step()


def _advanced(scheduler: Any) -> int | None:
    """Return how many steps a scheduler has taken; None where it does not say."""
    while not hasattr(scheduler, "last_epoch") and getattr(scheduler, "_schedulers", None):
        scheduler = scheduler._schedulers[0]  # ChainedScheduler
    count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None
