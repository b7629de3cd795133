"""The ranks of one start on this node that are still here when all is decided: seen off, and ended at once where they cannot leave.

Owns their end by SIGKILL, and that they say where they stand before it. Never judges whether all is decided: the round does.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping

from ttp.launch.courier import Courier
from ttp.launch.deathwatch import DeathWatch
from ttp.launch.given_up import GivenUp, stopped
from ttp.launch.hang_stacks import ask
from ttp.launch.processes import is_stopped, signal_workers
from ttp.launch.shells import BehindShells
from ttp.launch.story import ranks_text

log = logging.getLogger("ttp.launch")

LOOK_S = 0.25
"""Between two looks who is still here."""


class Stragglers:
    """Made with its round, and asked by it alone."""

    def __init__(
        self, pids: Mapping[int, int], behind_shells: BehindShells, watch: DeathWatch, courier: Courier, ended: set[int]
    ) -> None:
        """`pids`: the workers, by rank. `ended`: the ranks that the launcher has ended, which the round keeps too."""
        self._pids = dict(pids)
        self._behind_shells = behind_shells
        self._watch = watch
        self._courier = courier
        self._ended = ended

    def see_off(self, grace_s: float) -> bool:
        """Let the ranks leave: all is decided. Those that cannot are ended at once. Say whether all have ended in time."""
        given_up = GivenUp(self._courier.given_up)
        until_s = time.monotonic() + grace_s
        while not self._watch.wait_all(min(LOOK_S, max(0.0, until_s - time.monotonic()))):
            if time.monotonic() >= until_s:
                return False
            self._end(given_up.among(self._standing()))
        return True

    def end_stopped(self) -> None:
        """End those that are stopped: no signal but SIGKILL reaches them."""
        self._end(stopped(self._standing()))

    def ask_for_stacks(self, ranks: Iterable[int]) -> None:
        """Have these say where they stand, before they are ended."""
        if (log_dir := self._courier.log_dir) is not None:
            processes = self._pids | self._behind_shells.pids
            ask(log_dir, {rank: processes[rank] for rank in ranks})

    def _standing(self) -> dict[int, int]:
        """By rank that has neither ended altogether nor been ended: its own process, or the shell's whose rank has ended."""
        processes = self._pids | self._behind_shells.running()
        return {rank: processes[rank] for rank in self._watch.living() if rank not in self._ended}

    def _end(self, reasons: Mapping[int, str]) -> None:
        """End ranks that have nothing left to save, each for a reason. A shell that started one sees it end, and leaves, unless it
        is stopped as well."""
        if not reasons:
            return
        self.ask_for_stacks(reasons)
        told = "; ".join(
            f"{ranks_text(rank for rank in reasons if reasons[rank] == reason)}: {reason}"
            for reason in dict.fromkeys(reasons.values())
        )
        log.warning("%s, and can save nothing any more: killed", told)
        self._ended.update(reasons)
        behind = self._behind_shells.running()
        self._behind_shells.signal([rank for rank in reasons if rank in behind], signal.SIGKILL)
        alone = [rank for rank in reasons if rank not in behind or is_stopped(self._pids[rank])]
        signal_workers((self._pids[rank] for rank in alone), signal.SIGKILL)
