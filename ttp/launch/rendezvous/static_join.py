"""The rendezvous of a static job's agents: each join has a ticket of its own.

torch's static store keeps its keys from one attempt to the next, and a restarted agent does not know the earlier attempts. So a joining agent
writes a new ticket each time. Node 0's agent, which has the store, answers every ticket once, when all nodes have written a new one. An answer for
another attempt, or for an agent that has exited, is not read.

    ttp/tickets/<node>      the ticket of that node's agent; a restarted one replaces it
    ttp/answers/<ticket>    the attempt that the ticket is for

Owns the keys. Never blocks in one long call: each wait polls, so that a signal to the agent is handled.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

LOOK_S = 0.2
"""Between two polls."""


class Collected:
    """Node 0's side, with the tickets that it has answered. Waits up to `timeout_s` for those of an attempt."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered: set[str] = set()

    def collect(self, store: Store, nodes: int, over: Callable[[], str]) -> list[str]:
        """Return a new ticket of every other node. `over`: why a node will not join; empty while that is not known.

        Raises RendezvousClosedError (with that reason), RendezvousTimeoutError (naming the missing nodes).
        """
        until_s = time.monotonic() + self._timeout_s
        while True:
            found = {node: ticket for node in range(1, nodes) if (ticket := self._new(store, node))}
            if len(found) == nodes - 1:
                self._answered.update(found.values())
                return list(found.values())
            if why := over():
                raise RendezvousClosedError(f"not waiting for the other nodes: {why}")
            if time.monotonic() >= until_s:
                missing = ", ".join(str(node) for node in range(1, nodes) if node not in found)
                raise RendezvousTimeoutError(
                    f"nodes {missing} of {nodes} have not joined within {self._timeout_s:.0f} s. Start ttprun there"
                )
            time.sleep(LOOK_S)

    def _new(self, store: Store, node: int) -> str:
        """Return a node's ticket that is not answered yet; empty: there is none."""
        key = _ticket(node)
        ticket = str(store.get(key).decode()) if store.check([key]) else ""
        return "" if ticket in self._answered else ticket


def answer(store: Store, tickets: Sequence[str], text: str) -> None:
    """Publish the attempt's store for those that have written a ticket."""
    for ticket in tickets:
        store.set(_answer(ticket), text)


def hand_in(store: Store, node: int, timeout_s: float, place: str) -> str:
    """Join as a node other than 0, and return node 0's answer. `place`: the store's address, for messages.

    Raises RendezvousClosedError (node 0's agent is lost), RendezvousTimeoutError.
    """
    until_s = time.monotonic() + timeout_s
    ticket = uuid.uuid4().hex
    try:
        store.set(_ticket(node), ticket)
        while not store.check([_answer(ticket)]):
            if time.monotonic() >= until_s:
                raise RendezvousTimeoutError(
                    f"node {node} joined at {place}, but not all nodes did within {timeout_s:.0f} s. Start ttprun on the others, or check"
                    " why node 0 does not restart"
                )
            time.sleep(LOOK_S)
        return str(store.get(_answer(ticket)).decode())
    except DistError as error:
        raise RendezvousClosedError(
            f"lost node 0's agent and the store at {place} ({str(error).splitlines()[0]}): a job with the static backend ends with it. Start"
            " ttprun on all nodes again, or use --rdzv-backend c10d with several endpoints in --rdzv-endpoint: then the remaining nodes"
            " continue"
        ) from None


def _ticket(node: int) -> str:
    return f"ttp/tickets/{node}"


def _answer(ticket: str) -> str:
    return f"ttp/answers/{ticket}"
