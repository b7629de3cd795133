"""Signals to the agent: the first starts a graceful shutdown, a later SIGINT or SIGQUIT forces it.

torch's agent installs handlers when it starts workers, and each signal raises an exception wherever the main thread is. ShutdownSignals
replaces them: schedulers send several signals for one shutdown, and only a second Ctrl-C means that nothing more is to be saved.
Owns the meaning of signals and their names. Never ends a process.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

log = logging.getLogger("ttp.launch")

SAME_S = 0.1
"""Signals that come so soon after the first count as the same: a wrapper forwards what the terminal has sent already."""

TAKEN_S = 1.0
"""So soon after the first signal the agent has begun to shut down. If it has not, the exception was caught, and the next signal raises again."""

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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: signal.Signals | None = None
        self._first_s = 0.0
        self._taken = self._leaving = self._postponed = self._logged = self._forced = False
        self._queue: SimpleQueue[str | signal.Signals] = SimpleQueue()
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
        """Replace the handlers that torch has installed. On a thread other than the main one there are none."""
        if threading.current_thread() is not threading.main_thread():
            return
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
            self._leaving = False
        if self._postponed and self._first is not None:
            self._postponed = False
            raise _exception(self._first)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now_s = signal.Signals(number), self._clock()
        if _in_a_lock(frame):
            self._queue.put(received)
        elif self._first is None:
            self._first, self._first_s = received, now_s
            if not self._leaving:
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
        elif now_s - self._first_s >= TAKEN_S:
            raise _exception(received)

    def _log(self, received: signal.Signals) -> None:
        """Log it once, on another thread: the main one may be interrupted in the middle of a line."""
        if not self._logged:
            self._logged = True
            self._queue.put(
                f"{received.name} received: the workers are shutting down already. Press Ctrl-C to kill them"
            )

    def _run(self) -> None:
        while True:
            queued = self._queue.get()
            if isinstance(queued, signal.Signals):
                time.sleep(AGAIN_S)
                if (main := threading.main_thread().ident) is not None:
                    signal.pthread_kill(main, queued)
            else:
                log.info("%s", queued)


def _in_a_lock(frame: FrameType | None) -> bool:
    """Return whether the interrupted thread enters or leaves one of `threading`'s locks that are written in Python, as Condition's: an
    exception there would leave the lock taken forever."""
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_filename == threading.__file__ and code.co_name in ("__enter__", "__exit__")


def _exception(received: signal.Signals) -> SignalException:
    return SignalException(f"the agent received signal {received.value} ({received.name})", sigval=received)
