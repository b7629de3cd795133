"""Signals to the launcher itself: what they mean, their names, and a short while in which they must not interrupt.

torch's agent installs handlers as it starts workers, from which every signal comes out as an exception wherever the main thread is.
Notices takes their place: schedulers send several signals for one end, and only a person who presses Ctrl-C again wants no more to be saved.
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
"""Signals that come so soon after the first are the same notice: a wrapper hands on what the terminal has sent already."""

TAKEN_S = 1.0
"""So soon after the first signal the launcher has begun to end, unless somebody has caught the exception: then the next raises again."""

AGAIN_S = 0.002
"""A signal that finds the main thread half way into a lock comes again after this."""

INSISTENT = (signal.SIGINT, signal.SIGQUIT)
"""What a person at a terminal sends. After a notice they end all at once; any other signal is the same notice once more."""

_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def signal_name(signalled: SignalException | KeyboardInterrupt) -> str:
    """Return the name of the signal that an exception came from."""
    return signal.Signals(signalled.sigval).name if isinstance(signalled, SignalException) else "SIGINT"


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Let no further signal interrupt what follows, which must be short: the launcher is ending already.

    Only the main thread can be interrupted, and only it may change handlers: elsewhere this does nothing.
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
    """Return a list of signals' names without SIGHUP where it is ignored (`nohup`): torch would have it end the job. One that names nothing
    else is left as it is."""
    kept = [name for name in names.split(",") if name.strip() != "SIGHUP"]
    return ",".join(kept) if kept and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else names


class ShutdownSignals:
    """The signals to one launcher: the first is a notice, SIGINT or SIGQUIT after it insists, and any other changes nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: signal.Signals | None = None
        self._first_s = 0.0
        self._taken = self._leaving = self._postponed = self._said = self._insisted = False
        self._words: SimpleQueue[str | signal.Signals] = SimpleQueue()
        self._speaker: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The first signal's name; empty: none has come."""
        return self._first.name if self._first is not None else ""

    @property
    def insisted(self) -> bool:
        """Say whether SIGINT or SIGQUIT has come after a notice that the launcher obeys already."""
        return self._insisted

    def install(self) -> None:
        """Take the place of torch's handlers, whichever it has installed. On another thread there are none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            if getattr(signal.getsignal(number), "__module__", None) == SignalException.__module__:
                if self._speaker is None:
                    self._speaker = threading.Thread(target=self._speak, name="ttp-signals", daemon=True)
                    self._speaker.start()
                signal.signal(number, self._handle)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Let the workers leave: only who insists interrupts that. A first notice that comes meanwhile raises SignalException when
        they have left."""
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
        told, now_s = signal.Signals(number), self._clock()
        if _in_a_lock(frame):
            self._words.put(told)
        elif self._first is None:
            self._first, self._first_s = told, now_s
            if not self._leaving:
                raise _exception(told)
            self._postponed = self._taken = True  # it comes out when they have left, and the launcher ends
            self._say(told)
        elif now_s - self._first_s < SAME_S:
            return
        elif told in INSISTENT:
            self._insisted = self._insisted or self._taken or self._leaving
            raise _exception(told)
        elif self._taken or self._leaving:
            self._say(told)
        elif now_s - self._first_s >= TAKEN_S:
            raise _exception(told)

    def _say(self, told: signal.Signals) -> None:
        """Have it logged, once, by another thread: the main one may be interrupted in the middle of a line."""
        if not self._said:
            self._said = True
            self._words.put(
                f"{told.name}: noted; the workers leave already, and keep their time. Ctrl-C ends all at once"
            )

    def _speak(self) -> None:
        while True:
            said = self._words.get()
            if isinstance(said, signal.Signals):
                time.sleep(AGAIN_S)
                if (main := threading.main_thread().ident) is not None:
                    signal.pthread_kill(main, said)
            else:
                log.info("%s", said)


def _in_a_lock(frame: FrameType | None) -> bool:
    """Say whether the interrupted thread enters or leaves one of `threading`'s locks that are written in Python, as Condition's: an
    exception there leaves it taken for good, and the threads that want it stand still, as does who waits for them."""
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_filename == threading.__file__ and code.co_name in ("__enter__", "__exit__")


def _exception(told: signal.Signals) -> SignalException:
    return SignalException(f"the launcher got signal: {told.value} ({told.name})", sigval=told)
