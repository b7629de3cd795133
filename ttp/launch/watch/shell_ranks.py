"""Ranks behind a shell: `ttprun --no-python ./wrap.sh`, without `exec`. The worker is the shell, and the rank a process in its session.

Owns which process each such rank is, as the ranks publish it (`ttp.exchange.discovery.process_key`). Never signals a process without proof that
it is the published one, in its worker's session.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ttp.exchange.discovery import process_text
from ttp.launch.watch.processes import read_stat, wait_until_gone

log = logging.getLogger("ttp.launch")


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's own process; `text` distinguishes it from a later one with the same pid."""

    worker: int
    pid: int
    text: str

    def proven(self) -> bool:
        stat = read_stat(self.pid)
        return stat is not None and stat.session == self.worker and process_text(self.pid) == self.text

    def replaced(self) -> bool:
        return not self.proven()


class ShellRanks:
    """The ranks of one attempt on this node whose worker is a shell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _found
        self._found: dict[int, _Rank] = {}

    @property
    def pids(self) -> dict[int, int]:
        """Return the ranks' own processes, by rank."""
        return {rank: each.pid for rank, each in self._ranks().items()}

    def running(self) -> dict[int, int]:
        """Return those of them that have not ended, by rank."""
        stats = {rank: read_stat(each.pid) for rank, each in self._ranks().items() if each.proven()}
        return {rank: stat.pid for rank, stat in stats.items() if stat is not None and not stat.gone}

    def _ranks(self) -> dict[int, _Rank]:
        with self._lock:
            return self._found

    def add(self, workers: Mapping[int, int], published: Mapping[int, str]) -> dict[int, int]:
        """Add the process that each rank has published, and return those that are not their workers. A pid of another pid namespace (a
        container's) is not in the worker's session, and is skipped."""
        ranks = {rank: _Rank(workers[rank], int(text.split()[0]), text) for rank, text in published.items() if text}
        found = {rank: each for rank, each in ranks.items() if each.pid != each.worker and each.proven()}
        with self._lock:
            self._found = found
        for rank, each in sorted(found.items()):
            log.info("rank %d is process %d, started by its worker (pid %d)", rank, each.pid, each.worker)
        return self.pids

    def signal(self, ranks: Iterable[int], number: signal.Signals) -> list[int]:
        """Send a signal to the processes of these ranks, not to their shells; return the ranks that received it."""
        found, signalled = self._ranks(), []
        for rank in ranks:
            if rank in found and found[rank].proven():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(found[rank].pid, number)
                    signalled.append(rank)
        return signalled

    def wait(self, ranks: Iterable[int], until_monotonic_s: float) -> None:
        """Wait for the processes of these ranks to end."""
        found = self._ranks()
        for each in [found[rank] for rank in ranks if rank in found]:
            wait_until_gone(each.pid, max(0.0, until_monotonic_s - time.monotonic()), each.replaced)
