"""Calls with a time limit: a call to a store behind a broken network may never return, so it runs in a thread.

Owns those threads, and the process's exit despite them: when the interpreter ends it unwinds such a thread within torch's C++, which aborts the
process. Never ends such a call: its thread is abandoned.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_MAY_HANG = (
    "ttp-rendezvous",
    "ttp-waiting-nodes",
    "ttp-waiting-log",
    "ttp-controller-search",
    "ttp-peer-agents",
    "RendezvousKeepAlive",
)
"""The first letters of the names of threads that call a store or a name server: the agent's own, and torch's heartbeats to a rendezvous. Not
those that only wait, as the thread for signals does."""


class BoundedCall(Generic[T]):
    """A call in a thread, which is abandoned when it hangs."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._over = threading.Event()
        self._value: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="ttp-rendezvous", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except Exception as error:
            self._error = error
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s)

    @property
    def succeeded(self) -> bool:
        return self._over.is_set() and self._error is None

    def raised(self, kind: type[Exception]) -> bool:
        return self._over.is_set() and isinstance(self._error, kind)

    @property
    def trouble(self) -> str:
        """The call's error in one line; empty while it is under way, and when it has not failed."""
        return (str(self._error) or type(self._error).__name__).splitlines()[0] if self._error is not None else ""

    def result(self) -> T:
        """Return what the call returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]


def calls_under_way() -> bool:
    """Return whether a call may still be under way in another thread."""
    return any(thread.daemon and thread.name.startswith(_MAY_HANG) for thread in threading.enumerate())


def end_despite_calls(code: int) -> None:
    """End the process at once, with this code, if a call may still be under way in another thread; else return."""
    if not calls_under_way():
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or without a reader: the exit code still counts
            continue
    os._exit(code)
