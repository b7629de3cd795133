"""Which of the ranks that are still here have nothing left to save, once all is decided: nobody need wait for them.

A stopped process handles neither the controller's word nor SIGTERM. One whose interpreter C code holds looks like any other to the
system, and only the controller knows that it was silent. Owns the question only: ends nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ttp.launch.processes import is_stopped

PATIENCE_S = 1.0
"""How long ranks that are to leave do so by themselves before the controller is asked about them, and between two such questions:
most are gone by then, and a controller with thousands of ranks is asked by few launchers."""

STOPPED = "stopped"
SILENT = "silent"


def stopped(processes: Mapping[int, int]) -> dict[int, str]:
    """Return those of these ranks (rank -> process) that are stopped now, each with the reason."""
    return {rank: STOPPED for rank, pid in processes.items() if is_stopped(pid)}


class GivenUp:
    """Looks again and again, from the moment when all is decided on."""

    def __init__(self, ask: Callable[[], frozenset[int]], clock: Callable[[], float] = time.monotonic) -> None:
        """`ask()`: which ranks the controller has taken for dead because they were silent; may block for a moment."""
        self._ask = ask
        self._clock = clock
        self._asked_s = clock()

    def among(self, processes: Mapping[int, int]) -> dict[int, str]:
        """Return those of these ranks (rank -> process) that are not waited for, each with the reason."""
        found = stopped(processes)
        others = processes.keys() - found.keys()
        if others and self._clock() - self._asked_s >= PATIENCE_S:
            found |= dict.fromkeys(sorted(self._ask() & others), SILENT)
            self._asked_s = self._clock()
        return found
