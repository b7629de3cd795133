"""Which steps this rank has finished, how long each took, and how much of it this rank waited for others (PURE).

Owns the measuring only: what a standstill is, and which rank is slow, the controller decides. The training thread calls `finish`, `pause`,
`resume`, `wait` and `go_on`, the processor's thread `discard`, `done` and `take_shares`. Never counts time in which the rank did something
else than steps and said so.
"""

from __future__ import annotations

from collections import deque

KEPT = 32
"""Step times kept for a controller that takes over: enough to know the slow ones, and 256 bytes of a registration."""
REPORTED_STEPS = 8
"""Step times that a heartbeat carries at most: as many as the controller needs to judge the job."""
MOST_SHARED = 256
"""Steps between two heartbeats of which the medians are made; of more the newest."""


class StepTimes:
    """Finished steps, with the time of each from the end of the one before to its own."""

    def __init__(self) -> None:
        self.done: tuple[int, tuple[float, ...]] = (0, ())
        """How many steps are finished, and seconds of the newest ones in a row, oldest first. Replaced as a whole."""
        self._began: float | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._discarded = False
        self._waits_since: float | None = None
        self._waited_s = 0.0
        self._shares: deque[tuple[float, float]] = deque(maxlen=MOST_SHARED)
        """(own, waited) seconds of the steps finished since `take_shares`, oldest first."""

    def finish(self, now: float) -> None:
        """A step is finished."""
        steps, times_s = self.done
        if self._discarded:
            self._discarded, times_s = False, ()
        elif self._began is not None:
            whole_s = max(0.0, now - self._began - self._paused_s)
            times_s = (*times_s, whole_s)[-KEPT:]
            waited_s = min(self._waited_s, whole_s)
            self._shares.append((whole_s - waited_s, waited_s))
        self._began, self._paused_s, self._waited_s = now, 0.0, 0.0
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

    def wait(self, now: float) -> None:
        """The training thread begins to wait for other ranks; said again, the wait begins only now."""
        self._waits_since = now

    def go_on(self, now: float) -> None:
        """That wait is over. One within a pause does not count, as the pause does not."""
        if self._waits_since is not None and self._paused_at is None:
            self._waited_s += now - self._waits_since
        self._waits_since = None

    def take_shares(self) -> tuple[float, float] | None:
        """Return the medians, over the steps finished since the last call, of this rank's own time and of its wait for others, in seconds;
        None: no step was finished whose time is known."""
        taken = []
        while self._shares:
            taken.append(self._shares.popleft())
        if not taken:
            return None
        return _median([own for own, _ in taken]), _median([waited for _, waited in taken])

    def discard(self) -> None:
        """The step in progress was held up by a freeze: neither its time nor those before it are reported any more."""
        self._discarded = True


def _median(values: list[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
