"""Forked processes, used as `subprocess.Popen` is: a worker, whose parent is the agent, and a controller, whose parent is init.

Both offer `pid`, `poll`, `wait`, `send_signal` and `terminate`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.05


class ForkedChild:
    """A process whose parent this one has become."""

    def __init__(self, pid: int, args: Sequence[str], returncode: int | None = None) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode = returncode

    def poll(self) -> int | None:
        """Return the status once the process has ended (negative: a signal's number), None before."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it, and Popen says this then
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the status. Raises subprocess.TimeoutExpired."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        look_s = _FIRST_LOOK_S
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal; a process that has ended gets none."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedOrphan:
    """A process that is not a child of this one: its end is seen, its exit status is not (Linux 5.3)."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        """Raises OSError: it has ended, or the system has no such descriptors."""
        self.pid = pid
        self.args = list(args)
        self._descriptor = os.pidfd_open(pid)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def poll(self) -> int | None:
        """Return 0 once the process has ended, None before."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return 0. Raises subprocess.TimeoutExpired."""
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal; a process that has ended gets none."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return 0 if poll.poll(None if timeout_s is None else 1000.0 * timeout_s) else None
