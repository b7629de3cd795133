"""Signals to the launcher itself: their names, and a short while in which they must not interrupt.

Once torch's agent has installed its handlers, a signal comes out as an exception wherever the main thread is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import SignalException

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
