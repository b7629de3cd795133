"""Which of the ranks that are still here have nothing left to save, once all is decided: nobody need wait for them.

A stopped process handles neither the controller's word nor SIGTERM. One whose interpreter C code holds looks like any other to the
system, and only the controller knows that it was silent. That all is decided only the controller knows as well: a rank that has lost
it may leave with the same exit code. Owns the question only: ends nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set

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
    """Looks again and again, from the moment when a rank has left on."""

    def __init__(self, ask: Callable[[], frozenset[int] | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`ask()`: which ranks the controller has taken for dead because they were silent; None: it does not say that all is
        decided. May block for a moment."""
        self._ask = ask
        self._clock = clock
        self._asked_s = clock()
        self._asked = False
        self.answered = False
        """All is decided, and those that were silent are known."""

    def among(self, processes: Mapping[int, int], shells: Set[int] = frozenset()) -> dict[int, str]:
        """Return those of these ranks (rank -> process) that are not waited for, each with the reason; none while the controller
        does not say that all is decided: whoever is still here may be needed.

        `shells`: of these ranks only the shells are left that started them, which nobody has heard and nobody has missed.
        """
        due = self._clock() - self._asked_s >= PATIENCE_S
        others = processes.keys() - shells
        if not ((due and others) or ((due or not self._asked) and stopped(processes))):
            return {}
        silent = self._ask()
        self._asked, self._asked_s = True, self._clock()
        if silent is None:
            return {}
        self.answered = due
        named = dict.fromkeys(sorted(silent & others), SILENT) if due else {}
        return named | stopped(processes)
