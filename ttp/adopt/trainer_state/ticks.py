"""How often a scheduler takes its step between an update and the next forward pass, so that a resume repeats what followed the saved update.

A plain loop calls `step()` once there. accelerate's wrapper steps the scheduler within it once for each process: whether the trainer gave the wrapper or
what is within, the count is that of the scheduler within. What is called behind a forward pass (once for each of several passes of a step, or in front of
the update), or at the begin of the loop's body, the trainer calls again by itself. Owns nothing but the count.
"""

from __future__ import annotations

import warnings
from typing import Any

MAX_TICKS = 1_000_000
"""For one update: a larger number is not a count of a job's processes."""


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
        self.early = False
        """The trainer calls it in front of its first forward pass: at the begin of the loop's body. Belongs to the run."""
        self.begin(None, early=False)

    def begin(self, ticks: int | None, early: bool) -> None:
        """The scheduler was given a state back; this is what was known of it then."""
        self.ticks, self.early, self._start = ticks, early, _advanced(self._inner)
        self._first_pass: int | None = None
        """The count at the first forward pass of the step in flight; None: no pass was seen."""
        self._newest_pass: int | None = None
        self._newest: int | None = None
        """The count at the newest update; None: none was seen since the state was given back."""
        self._before: int | None = None

    def begin_pass(self) -> None:
        """A forward pass is about to begin."""
        now = _advanced(self._inner)
        if now is None or self._start is None:
            return
        if self._newest_pass is None and self._newest is None and self.ticks is None:  # the run's first
            self.early = now > self._start
        self._first_pass = now if self._first_pass is None else self._first_pass
        self._newest_pass = now

    def count(self) -> None:
        """An update is about to be done. The smaller of the two newest counts is taken: one update may be followed by more, where a step between
        was skipped or an epoch ended."""
        now = _advanced(self._inner)
        if now is None:
            return
        if self._newest is not None:
            follows = now if self._first_pass is None else self._first_pass
            delta = min(max(follows - self._newest, 0), MAX_TICKS)
            self.ticks = delta if self._before is None else min(delta, self._before)
            self._before = delta
        elif self.ticks is None and self._newest_pass is not None and now > self._newest_pass:
            self.ticks = 0  # called between the forward pass and the update
        if self.early:
            self.ticks = 0
        self._newest, self._first_pass = now, None

    def repeat(self) -> None:
        """Do what followed the update whose state was loaded."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no optimizer.step() came before it in this process
            if self.ticks is None:
                self.scheduler.step()
            for _ in range(self.ticks or 0):
                total = getattr(self._inner, "total_steps", None)
                if total is None or self._inner.last_epoch < total:  # OneCycleLR ends there
                    self._inner.step()
        self._start = _advanced(self._inner)


def _advanced(scheduler: Any) -> int | None:
    """Return how many steps a scheduler has taken; None where it does not say."""
    while not hasattr(scheduler, "last_epoch") and getattr(scheduler, "_schedulers", None):
        scheduler = scheduler._schedulers[0]  # ChainedScheduler
    count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None
