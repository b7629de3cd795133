"""Waiting for operations of process groups so that the wait can be left.

gloo wakes whoever waits for an operation when its connection breaks, except where a message is half way on it: that operation is in none of the
lists that `Pair::signalException` goes through (gloo, transport/tcp/pair.cc: `rx_`, and `tx_` of unbound buffers), and waits for its
group's timeout. So another thread waits, and the training thread looks whether the groups are being left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any

from ttp.errors import AbortedCollective
from ttp.groups.process_groups import GROUPS

SLICE_S = 0.02
"""Between two looks whether the groups are being left."""


class Waiter:
    """A thread that waits in the training thread's place. One that does not come back is given up, with what it waits for."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[list[Any], list[BaseException], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="ttp-waiter", daemon=True).start()

    def wait(self, works: list[Any]) -> bool:
        """Wait for all; False: the groups are being left. Raises what an operation raises."""
        errors: list[BaseException] = []
        done = threading.Event()
        self._orders.put((works, errors, done))
        while not done.wait(SLICE_S):
            if GROUPS.left:
                self._orders.put(None)
                return False
        if errors:
            raise errors[0]
        return True

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            works, errors, done = order
            try:
                for work in works:
                    work.wait()
            except BaseException as error:  # the training thread's
                errors.append(error)
            done.set()
            del order, works, errors, done, work


_waiter: Waiter | None = None


def wait_for(works: Iterable[Any]) -> None:
    """Wait for operations (handles of torch.distributed.Work). Raises what they raise; AbortedCollective: their groups are being left."""
    global _waiter
    under_way = []
    for work in works:
        if GROUPS.pollable and not work.is_completed():  # a point-to-point one never says that it is
            under_way.append(work)
        else:
            work.wait()
    if not under_way:
        return
    if _waiter is None:
        _waiter = Waiter()
    if not _waiter.wait(under_way):
        _waiter = None
        raise AbortedCollective("process groups are being made again: this step is given up")
