"""Signals to the agent: the first starts a graceful shutdown, a later SIGINT or SIGQUIT forces it.

torch's agent installs handlers when it starts workers, and each signal raises an exception wherever the main thread is. ShutdownSignals
replaces them: schedulers send several signals for one shutdown, only a second Ctrl-C means that nothing more is to be saved, and an exception
that a library has swallowed (logging does, within a line) is raised again until the agent shuts down.
Owns the meaning of signals and their names. Never ends a process.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

log = logging.getLogger("ttp.launch")

SAME_S = 0.1
"""Signals that come so soon after the first count as the same: a wrapper forwards what the terminal has sent already."""

REPEAT_S = 0.1
"""So long after the first signal, and again and again, it is seen whether its exception was swallowed: then it is raised again."""

AGAIN_S = 0.002
"""A signal that interrupts the main thread while it takes a lock is sent again after this."""

FORCING = (signal.SIGINT, signal.SIGQUIT)
"""Sent from a terminal. After the first signal they force the shutdown; other signals are ignored then."""

_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def signal_name(signalled: SignalException | KeyboardInterrupt) -> str:
    """Return the name of the signal that an exception came from."""
    return signal.Signals(signalled.sigval).name if isinstance(signalled, SignalException) else "SIGINT"


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Ignore signals during what follows, which must be short: the agent is shutting down already.

    Only the main thread can be interrupted, and only it may change handlers: on another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _HELD_BACK}
    for number in _HELD_BACK:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def without_ignored(names: str) -> str:
    """Return a list of signal names without SIGHUP where it is ignored (`nohup`): torch would end the job on it. A list of SIGHUP only is
    returned unchanged."""
    kept = [name for name in names.split(",") if name.strip() != "SIGHUP"]
    return ",".join(kept) if kept and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else names


class ShutdownSignals:
    """The signals to one agent. The first starts a graceful shutdown; a later SIGINT or SIGQUIT forces it; other signals are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, repeat_s: float = REPEAT_S) -> None:
        self._clock, self._repeat_s = clock, repeat_s
        self._first: signal.Signals | None = None
        self._first_s = 0.0
        self._taken = self._leaving = self._postponed = self._logged = self._forced = False
        self._expected = False
        """An attempt has begun, so the first signal leads to a shutdown."""
        self._repeats = False
        """The next signal of this kind is this class's own: it is seen whether the first one was swallowed."""
        self._queue: SimpleQueue[str | signal.Signals | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The first signal's name; empty: none has come."""
        return self._first.name if self._first is not None else ""

    @property
    def forced(self) -> bool:
        """Return whether SIGINT or SIGQUIT has come after the shutdown had begun."""
        return self._forced

    def install(self) -> None:
        """Replace the handlers that torch has installed: an attempt begins. On a thread other than the main one there are none."""
        self._expected = True
        if threading.current_thread() is not threading.main_thread():
            return
        if self._first is not None:
            self._queue.put(None)  # one that came between two attempts may have been swallowed
        for number in signal.valid_signals():
            if getattr(signal.getsignal(number), "__module__", None) == SignalException.__module__:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ttp-signals", daemon=True)
                    self._thread.start()
                signal.signal(number, self._handle)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Shut down: only a forcing signal interrupts it. A first signal that comes meanwhile raises SignalException at its end."""
        self._taken = self._first is not None
        self._leaving = True  # before all that takes time
        try:
            self.install()
            yield
        except BaseException:
            self._postponed = False
            raise
        finally:
            self._leaving = self._expected = False
        if self._postponed and self._first is not None:
            self._postponed = False
            raise _exception(self._first)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now_s = signal.Signals(number), self._clock()
        if self._repeats and received is self._first:
            self._repeats = False
            if self._is_unanswered() and not _on_its_way() and not _in_a_lock(frame):
                raise _exception(received)
        elif _in_a_lock(frame):
            self._queue.put(received)
        elif self._first is None:
            self._first, self._first_s = received, now_s
            if not self._leaving:
                self._queue.put(None)
                raise _exception(received)
            self._postponed = self._taken = True  # raised when the workers have exited, and the agent ends
            self._log(received)
        elif now_s - self._first_s < SAME_S:
            return
        elif received in FORCING:
            self._forced = self._forced or self._taken or self._leaving
            raise _exception(received)
        elif self._taken or self._leaving:
            self._log(received)
        elif (
            not self._expected and not _on_its_way()
        ):  # between two attempts, or behind the last: this is not seen by itself
            raise _exception(received)

    def _is_unanswered(self) -> bool:
        """Return whether the agent has received its first signal and has not begun to shut down."""
        return self._first is not None and self._expected and not (self._taken or self._leaving)

    def _log(self, received: signal.Signals) -> None:
        """Log it once, on another thread: the main one may be interrupted in the middle of a line."""
        if not self._logged:
            self._logged = True
            self._queue.put(
                f"{received.name} received: the workers are shutting down already. Press Ctrl-C to kill them"
            )

    def _run(self) -> None:
        while True:
            try:
                queued = self._queue.get(timeout=self._repeat_s if self._is_unanswered() else None)
            except Empty:
                if (first := self._first) is not None and self._is_unanswered():
                    self._send(first, repeats=True)
                continue
            if isinstance(queued, signal.Signals):
                time.sleep(AGAIN_S)
                self._send(queued)
            elif queued is not None:  # None: there is a first signal
                log.info("%s", queued)

    def _send(self, number: signal.Signals, repeats: bool = False) -> None:
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(number) == self._handle:
            self._repeats = self._repeats or repeats
            signal.pthread_kill(main, number)


def _in_a_lock(frame: FrameType | None) -> bool:
    """Return whether the interrupted thread enters or leaves one of `threading`'s locks that are written in Python, as Condition's: an
    exception there would leave the lock taken forever."""
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_filename == threading.__file__ and code.co_name in ("__enter__", "__exit__")


def _on_its_way() -> bool:
    """Return whether the interrupted thread handles a signal's exception, or another one that has come of it."""
    exc = sys.exception()
    while exc is not None and not isinstance(exc, SignalException):
        exc = exc.__context__
    return exc is not None


def _exception(received: signal.Signals) -> SignalException:
    return SignalException(f"the agent received signal {received.value} ({received.name})", sigval=received)
