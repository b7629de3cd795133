"""Which steps this rank has finished, and how long each took: what a hang is measured against (PURE).

Owns the measuring only: what a standstill is, the controller decides. The training thread calls `finish`, `pause` and `resume`,
the processor's thread `discard` and `done`. Never counts time in which the rank did something else than steps and said so.
"""

from __future__ import annotations

KEPT = 32
"""Step times kept for a controller that takes over: enough to know the slow ones, and 256 bytes of a registration."""
REPORTED_STEPS = 8
"""Step times that a heartbeat carries at most: as many as the controller needs to judge the job."""


class StepTimes:
    """Finished steps, with the time of each from the end of the one before to its own."""

    def __init__(self) -> None:
        self.done: tuple[int, tuple[float, ...]] = (0, ())
        """How many steps are finished, and seconds of the newest ones in a row, oldest first. Replaced as a whole."""
        self._began: float | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._discarded = False

    def finish(self, now: float) -> None:
        """A step is finished."""
        steps, times_s = self.done
        if self._discarded:
            self._discarded, times_s = False, ()
        elif self._began is not None:
            times_s = (*times_s, max(0.0, now - self._began - self._paused_s))[-KEPT:]
        self._began, self._paused_s = now, 0.0
        self.done = (steps + 1, times_s)

    def pause(self, now: float) -> None:
        """The training thread does something else than steps, in this pause or in one around it."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """The training thread goes on with steps."""
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def discard(self) -> None:
        """The step in progress was held up by a freeze: neither its time nor those before it are reported any more."""
        self._discarded = True
