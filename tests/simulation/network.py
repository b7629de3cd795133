"""Simulated streams: FIFO within one, no order between two, and ways to break."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.simulation.controllers import Controller


class Stream:
    """One rank's bidirectional stream to a controller."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, slowest_s: float, controller: Controller) -> None:
        self.controller = controller
        self._scheduler = scheduler
        self._rng = rng
        self._slowest_s = slowest_s
        self._last = {"up": 0.0, "down": 0.0}
        self._held_until = 0.0
        self.broken = False

    def carry(self, way: str, deliver: Callable[[Any], None], message: object) -> None:
        """Deliver after a random delay, behind what was sent before; lost when the stream breaks first."""
        if self.broken:
            return
        moment = max(self._scheduler.now, self._held) + self._rng.uniform(0.0001, self._slowest_s)
        self._last[way] = max(moment, self._last[way])

        def arrive() -> None:
            if self.broken:
                return
            if self._scheduler.now < self._held:  # held while under way
                self._last[way] = max(self._last[way], self._held)
                self._scheduler.at(self._held, arrive)
            else:
                deliver(message)

        self._scheduler.at(self._last[way], arrive)

    @property
    def _held(self) -> float:
        return max(self._held_until, self.controller.cut_until)

    def hold(self, seconds: float) -> None:
        """Nothing arrives for a while, and then all of it (a route that flaps)."""
        self._held_until = max(self._held_until, self._scheduler.now + seconds)
        for way in self._last:
            self._last[way] = max(self._last[way], self._held_until)
