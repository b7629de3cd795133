"""What Ctrl-C and SIGTERM do to the harness: the first one ends what runs, and a second one ends the waiting for it.

    with Patience(print) as patience:
        ...                     # the first signal raises here
        patience.ending()       # from here on none does: what was made is taken down undisturbed,
        ...                     # and who waits asks `patience.over`
        patience.ended()        # raises what came meanwhile

Owns the two signals' handlers while it is entered (in the main thread; elsewhere it changes nothing).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ttp.chaos.nodes.namespaces import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Use as a context manager. One that was never entered receives no signal, and is never over."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.say = say
        """Prints for the person who waits."""
        self.over = False
        """The wait was cut short."""
        self._raised = False
        self._ending = False
        self._missed: BaseException | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # a shell's background job does not receive Ctrl-C
                    self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def ending(self) -> None:
        """What runs is ended from here on: no signal raises."""
        self._ending = True

    def ended(self) -> None:
        """Signals raise again. Raises the one that came since `ending`, unless that was ended by one already."""
        self._ending = False
        missed, self._missed = self._missed, None
        if missed is not None:
            self._raised = True
            raise missed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        what = Terminated(signal.Signals(number).name) if number == signal.SIGTERM else KeyboardInterrupt()
        if self._raised:
            self.over = True
        elif self._ending:
            self.over, self._missed = True, what
        else:
            self._raised = True
            raise what
