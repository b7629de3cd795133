"""Non-blocking logging: records are queued here and emitted by a background thread.

A logging handler has a lock, and the training thread may be stuck while it holds it (a full pipe, a hung file system).
The processor's threads must continue all the same.
"""

from __future__ import annotations

import logging
import queue
import threading

log = logging.getLogger("ttp.processor")


class AsyncLog:
    """Writes lines on the logger `ttp.processor`, each with the rank; any thread may call `log`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def log(self, level: int, text: str) -> None:
        self._lines.put((level, text))

    def stop(self, timeout_s: float) -> None:
        """Say what is queued and end, or give up after `timeout_s`."""
        self._lines.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            log.log(line[0], "rank %d: %s", self._rank, line[1])
