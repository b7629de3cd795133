"""What the shipped gate waits with in a simulated rank: nothing waits, and who would have to is called again later.

A call that would wait raises `Blocked`, with nothing changed; the simulated thread that made it makes it again when the lock is
free, the event is set or its time is over. The gate's methods begin with what may wait, so that a call can be made anew.
"""

from __future__ import annotations

from collections.abc import Callable

from ttp.processor.handler import AT_ONCE_S

TRAINING, BESIDE = "the training thread", "a thread beside it"


class Blocked(Exception):
    """This thread would wait for so long; a negative time: without end."""

    def __init__(self, timeout_s: float, event: Event | None = None) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s
        self.event = event
        """What it would wait for, if it does not wait for a lock."""


class Lock:
    """The training thread takes it without a time, the processor's threads with one."""

    def __init__(self) -> None:
        self.owner = ""
        self.asking = ""
        """The thread that gives it back without knowing whether it has it."""
        self.in_vain = False
        """Whoever asks now has waited long enough."""
        self._when_free: list[Callable[[], None]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        if not self.owner:
            self.owner = TRAINING if timeout < 0 else BESIDE
            return True
        if timeout < 0:
            raise Blocked(timeout)
        if timeout <= AT_ONCE_S or self.in_vain:
            return False
        raise Blocked(timeout)

    def release(self) -> None:
        if not self.owner or (self.asking and self.asking != self.owner):
            raise RuntimeError("cannot release a lock of another thread")
        self.owner = ""

    def when_free(self, call: Callable[[], None]) -> None:
        """Call it as soon as the holder of the lock is done with its update."""
        self._when_free.append(call)

    def freed(self) -> None:
        """Whoever held the lock for longer than a moment has given it back."""
        calls, self._when_free = self._when_free, []
        for call in calls:
            call()


class Event:
    def __init__(self) -> None:
        self._set = False
        self.when_set: Callable[[], None] = lambda: None
        """Goes on with what waits for it; a thread that asks again instead leaves it as it is."""

    def set(self) -> None:
        self._set = True
        self.when_set()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            raise Blocked(-1.0, self)
        return True


class Waits:
    """One simulated rank's. `now` is its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.gates_lock = Lock()

    def lock(self) -> Lock:
        return self.gates_lock

    def event(self) -> Event:
        return Event()

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"a simulated thread would sleep for {seconds} s: it left a step without its update")
