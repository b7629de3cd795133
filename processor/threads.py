"""What the gate waits with, as an interface: locks, events and time.

Owns the real ones, `Threads`. The simulator has others, in which nothing waits and one seed is one order. Never decides anything.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Lock(Protocol):
    """A re-entrant lock, as `threading.RLock` makes it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Event(Protocol):
    """A flag to wait for, as `threading.Event`."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Waits(Protocol):
    """Makes what a gate waits with."""

    def lock(self) -> Lock: ...

    def event(self) -> Event: ...

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Threads:
    """Python's threads and the monotonic clock."""

    def lock(self) -> Lock:
        return threading.RLock()

    def event(self) -> Event:
        return threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


THREADS = Threads()
