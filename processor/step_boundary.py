"""The wait behind a finished step, where some rank has a preemption notice, for the end of the process.

Owns that wait and who ends it. Never reads or changes the state.
"""

from __future__ import annotations

from collections.abc import Callable

from ttp.processor.threads import Waits


class StepBoundary:
    """One rank's. Training thread: `wait`. Processor's threads: `leave`, `release`."""

    __slots__ = ("_gone_on", "_released", "on_reached", "on_unled")

    def __init__(self, waits: Waits) -> None:
        self._gone_on = waits.event()
        self._released = False
        self.on_reached: Callable[[int], None] | None = None
        """Called on the training thread, with the step, when it begins to wait."""
        self.on_unled: Callable[[int], None] | None = None
        """The same, where no rank has a controller: saves the step together with all other ranks, and has this process exit."""

    def wait(self, step: int, unled: bool) -> None:
        """Wait behind `step`. `unled`: no rank has a controller, as all ranks have read.

        A thaw does not end the wait: every other rank waits behind the same step, and the one with the preemption notice is
        about to say so.
        """
        self._gone_on.clear()
        if self._released:
            self._gone_on.set()
        reached = self.on_unled if unled else self.on_reached
        if reached is not None:
            reached(step)
        self._gone_on.wait()

    def leave(self) -> None:
        """The wait that has begun ends: training continues behind that step."""
        self._gone_on.set()

    def release(self) -> None:
        """No processor will end this process any more: `wait` returns at once from now on."""
        self._released = True
        self._gone_on.set()
