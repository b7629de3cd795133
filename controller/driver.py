"""Runs the controller: `Handler` on one thread, with a queue before it.

Streams only enqueue (`ControllerInbox`), so the machine needs no lock. `handler.py` says what is done with an item.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from .core.facts.events import ControllerSettings
from .core.facts.state import Stage
from .handler import Handler, Item
from .journal import Journal

LEAST_WAIT_S = 0.002
"""A machine that is due all the time is asked so often, not at full speed."""


class Driver:
    """Any thread may `put`; everything else happens on the driver's thread, until `on_finish(reason)` is called on it."""

    def __init__(
        self,
        settings: ControllerSettings,
        journal: Journal,
        on_finish: Callable[[str], None],
        *,
        look_for: Callable[[str], None] = lambda address: None,
        supersede: Callable[[str, int, int], None] = lambda address, generation, look: None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`look_for(address)`: put `EarlierLives` once the controller there answers, if there is one. `supersede(address, generation, look)`: tell it that
        this one takes over, with a rank of that generation, as it has answered that question. Neither may block."""
        self._journal = journal
        self._on_finish = on_finish
        self._clock = clock
        self._handler = Handler(
            settings, journal, look_for=look_for, supersede=supersede, clock=clock, unix_clock=unix_clock
        )
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Item) -> None:
        self._queue.put(item)

    @property
    def leads(self) -> bool:
        """Whether this controller leads ranks, or waits for the first ones of its attempt."""
        return self._handler.state is not None and self._handler.state.stage not in (Stage.STANDBY, Stage.GATHERING)

    @property
    def finished(self) -> bool:
        return bool(self._handler.finished)

    @property
    def generation(self) -> int:
        """The newest generation that is whole, as far as this controller knows."""
        return self._handler.state.generation if self._handler.state is not None else 0

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        handler = self._handler
        handler.begin()
        while not handler.finished:
            due = handler.due(self._clock() + LEAST_WAIT_S)
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=max(0.0, due - self._clock()))
                self._journal.driver_busy()
                handler.take(item)
            handler.advance(due)
            if self._queue.empty():
                self._journal.driver_idle()
        self._journal.driver_idle()
        self._on_finish(handler.finished)
