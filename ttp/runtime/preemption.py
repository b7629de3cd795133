"""SIGTERM as a preemption notice: the process is about to be ended, with time to save.

Python runs signal handlers on the main thread between two bytecodes; a thread that is stuck in a collective never gets
there. So the interpreter's C handler writes the signal's number to a pipe (`signal.set_wakeup_fd`) and a thread reads it.
A handler that the user had installed is still called, on the main thread, as ever; so is another reader of the pipe
(asyncio). Owns both registrations from `listen` to `close`, and takes them out of forked children, whose SIGTERM (a data
loader ending its workers) is not a notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("ttp")

_listening: weakref.WeakSet[Notice] = weakref.WeakSet()


class Notice:
    """Calls `on_notice("SIGTERM")` on a thread of its own, for each SIGTERM."""

    def __init__(self, on_notice: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._previous: Any = None
        self._previous_fd = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread = threading.Thread(target=self._run, name="ttp-notice", daemon=True)

    def listen(self) -> bool:
        """Begin (main thread only); say whether SIGTERM is a notice now. A process that ignores SIGTERM goes on to."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("ttp.start was not called on the main thread: SIGTERM ends this rank as any other process")
            return False
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous is signal.SIG_IGN or self._previous is None:  # None: a handler that Python did not install
            return False
        self._ends = socket.socketpair()
        self._ends[1].setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        _listening.add(self)
        self._thread.start()
        return True

    def close(self) -> None:
        """Put everything back as it was (main thread); what others have installed since stays."""
        if self._ends is None:
            return
        _listening.discard(self)
        self._restore()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for end in self._ends:
            end.close()
        self._ends = None

    def _restore(self) -> None:
        assert self._ends is not None
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._previous_fd if current == self._ends[1].fileno() else current)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, when it gets to it: the user's own handler."""
        if callable(self._previous):
            self._previous(number, frame)

    def _run(self) -> None:
        assert self._ends is not None
        while numbers := self._ends[0].recv(64):
            if self._previous_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._previous_fd, numbers)
            for _ in range(numbers.count(signal.SIGTERM)):
                self._on_notice("SIGTERM")

    def forget_in_child(self) -> None:
        """A forked child is no rank: SIGTERM does to it what it did before."""
        self._restore()


def _after_fork() -> None:
    for notice in list(_listening):
        notice.forget_in_child()
    _listening.clear()


os.register_at_fork(after_in_child=_after_fork)
