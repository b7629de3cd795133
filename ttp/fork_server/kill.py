"""Ends child processes by SIGKILL, and waits a bounded time for their ends.

Owns that time and the warning about a process that not even SIGKILL ends. Used for executed processes and for forked ones.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("ttp.launch")

KILL_WAIT_S = 30.0
"""From SIGKILL until a process that has not ended (uninterruptible sleep, or gigabytes to free) is given up."""


class Child(Protocol):
    """A `subprocess.Popen` or a `ForkedChild`."""

    pid: int

    def send_signal(self, number: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def kill_and_wait(what: str, children: Sequence[Child]) -> None:
    """Send SIGKILL to all, and wait until they have ended, KILL_WAIT_S for all together; a warning names those that have not.

    what: what they are, for the warning.
    """
    for child in children:
        child.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + KILL_WAIT_S
    stuck = []
    for child in children:
        try:
            child.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.append(str(child.pid))
    if stuck:
        log.warning(
            "%s (pid%s %s) did not end within %g s after SIGKILL; no longer waiting. Such a process waits for a device or a file system: see dmesg",
            what, "s" if len(stuck) > 1 else "", ", ".join(stuck), KILL_WAIT_S,
        )  # fmt: skip
