"""Simulated time: callbacks in order of their moment, ties in the order they were asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush

MOST_EVENTS = 200_000
"""Many times more than any simulated job has."""


class Scheduler:
    """Owns the clock of one simulated job. Nothing here is random."""

    def __init__(self) -> None:
        self.now = 0.0
        self.look = False
        """Something may have ended the job: `done` is asked before the next callback."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        heappush(self._heap, (moment if moment > self.now else self.now, next(self._count), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """`delay_s` is not negative."""
        heappush(self._heap, (self.now + delay_s, next(self._count), call))

    def run(self, until_s: float, done: Callable[[], bool]) -> bool:
        """Run until `done`; False when nothing remains to run or `until_s` passes first."""
        heap, pop = self._heap, heappop
        for _ in range(MOST_EVENTS):
            if self.look:
                self.look = False
                if done():
                    return True
            if not heap:
                return False
            entry = pop(heap)
            moment, _, call = entry
            if moment > until_s:
                heappush(heap, entry)
                return False
            self.now = moment
            call()
        raise AssertionError(f"{MOST_EVENTS} events, and the job is not over at {self.now:.6f} s: somebody spins")
