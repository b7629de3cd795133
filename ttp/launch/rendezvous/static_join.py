"""How the launchers of a static job meet: a ticket for each time that one of them joins.

torch's static store keeps its keys from one start to the next, and a launcher that is started again knows nothing of the
starts before. So a launcher that joins hands in a ticket, a new one each time; node 0's launcher, which has the store, answers
every ticket once, when all nodes have handed in a new one. What was meant for another start, or for a launcher that is gone, is
read by nobody.

    ttp/tickets/<node>      the ticket of that node's launcher; one that is started again puts its own in the place
    ttp/answers/<ticket>    the start that the ticket is for
    ttp/starts              how many starts there were

Owns the keys. Every wait is made of short questions, so that a signal to the launcher is not held up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

LOOK_S = 0.2
"""Between two looks for what is waited for."""
_STARTS = "ttp/starts"


class Collected:
    """Node 0's side: remembers which tickets it has answered. Waits up to `timeout_s` for those of a start."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered: dict[int, str] = {}

    def collect(self, store: Store, nodes: int, over: Callable[[], str]) -> list[str]:
        """Return a new ticket of every other node. `over`: why none is to come from one of them; empty while that is not known.

        Raises RendezvousClosedError (with those words), RendezvousTimeoutError (naming the nodes that are missing).
        """
        until_s = time.monotonic() + self._timeout_s
        while True:
            found = {node: ticket for node in range(1, nodes) if (ticket := self._new(store, node))}
            if len(found) == nodes - 1:
                self._answered.update(found)
                return list(found.values())
            if words := over():
                raise RendezvousClosedError(f"not waiting for the other nodes: {words}")
            if time.monotonic() >= until_s:
                missing = ", ".join(str(node) for node in range(1, nodes) if node not in found)
                raise RendezvousTimeoutError(
                    f"of {nodes} nodes these have not joined within {self._timeout_s:.0f} s: {missing}; start ttprun there"
                )
            time.sleep(LOOK_S)

    def _new(self, store: Store, node: int) -> str:
        """Return a node's ticket; empty if there is none that was not answered."""
        key = _ticket(node)
        ticket = str(store.get(key).decode()) if store.check([key]) else ""
        return "" if ticket == self._answered.get(node) else ticket


def count_start(store: Store) -> int:
    """Return the number of the start that begins: 0 for the first."""
    return int(store.add(_STARTS, 1)) - 1


def answer(store: Store, tickets: Sequence[str], text: str) -> None:
    """Tell those that have handed in a ticket of their start."""
    for ticket in tickets:
        store.set(_answer(ticket), text)


def hand_in(store: Store, node: int, timeout_s: float, place: str) -> str:
    """Join as one of the nodes from 1 on, and return node 0's answer. `place`: where the store is, in words.

    Raises RendezvousClosedError (node 0's launcher is gone), RendezvousTimeoutError.
    """
    until_s = time.monotonic() + timeout_s
    ticket = uuid.uuid4().hex
    try:
        store.set(_ticket(node), ticket)
        while not store.check([_answer(ticket)]):
            if time.monotonic() >= until_s:
                raise RendezvousTimeoutError(
                    f"node {node} has joined at {place}, and not all nodes had within {timeout_s:.0f} s: start ttprun on the"
                    " others, or see why node 0 does not start again"
                )
            time.sleep(LOOK_S)
        return str(store.get(_answer(ticket)).decode())
    except DistError as error:
        raise RendezvousClosedError(
            f"node 0's launcher is gone, and the store at {place} with it ({str(error).splitlines()[0]}): a job of the static"
            " backend ends with it. Start ttprun on all nodes again; with --rdzv-backend c10d and several places in"
            " --rdzv-endpoint the nodes that are left go on"
        ) from None


def _ticket(node: int) -> str:
    return f"ttp/tickets/{node}"


def _answer(ticket: str) -> str:
    return f"ttp/answers/{ticket}"
