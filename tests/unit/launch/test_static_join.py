"""How the launchers of a static job meet: whose ticket is answered, and what one that waits in vain says."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from tests.waiting import until
from ttp.launch.rendezvous.static_join import Collected, answer, hand_in


def nothing() -> str:
    return ""


class Joining:
    """A launcher that joins, on a thread of its own."""

    def __init__(self, store: Store, node: int) -> None:
        self.answer = ""
        self.ticket = ""
        before = ticket_of(store, node)
        self._thread = threading.Thread(target=self._run, args=(store, node), daemon=True)
        self._thread.start()
        until(lambda: ticket_of(store, node) not in ("", before), "ticket")
        self.ticket = ticket_of(store, node)

    def _run(self, store: Store, node: int) -> None:
        self.answer = hand_in(store, node, 60.0, "here")

    def asked(self) -> str:
        self._thread.join(30)
        return self.answer


def ticket_of(store: Store, node: int) -> str:
    key = f"ttp/tickets/{node}"
    return store.get(key).decode() if store.check([key]) else ""


def test_a_ticket_is_answered_once_and_the_newest_one_of_a_node_counts() -> None:
    """A launcher that was killed while it waited has left one behind; what answers another one is not read."""
    store, collected = HashStore(), Collected(60.0)
    killed = Joining(store, 1)
    again = Joining(store, 1)
    other = Joining(store, 2)
    assert collected.collect(store, 3, nothing) == [again.ticket, other.ticket]
    answer(store, [again.ticket, other.ticket], "start 0")
    assert (again.asked(), other.asked(), killed.answer) == ("start 0", "start 0", "")
    with pytest.raises(RendezvousClosedError, match="no new ticket"):
        collected.collect(store, 3, lambda: "no new ticket")
    answer(store, [killed.ticket], "over")


def test_only_the_missing_nodes_are_named() -> None:
    """The operator is to start those."""
    store = HashStore()
    store.set("ttp/tickets/1", "a")
    with pytest.raises(RendezvousTimeoutError, match=r"nodes 2, 3 of 4 have not joined within 0 s\. Start ttprun"):
        Collected(0.0).collect(store, 4, nothing)


def test_a_node_that_cannot_come_is_not_waited_for() -> None:
    """Node 0 ends with that node's words."""
    with pytest.raises(RendezvousClosedError, match="not waiting for the other nodes: b has failed"):
        Collected(60.0).collect(HashStore(), 2, lambda: "b has failed")


def test_one_that_is_not_answered_says_what_to_look_at() -> None:
    """Where it has joined, and for how long it has waited."""
    with pytest.raises(RendezvousTimeoutError, match=r"node 1 joined at a:1, but not all nodes did within 0 s"):
        hand_in(HashStore(), 1, 0.0, "a:1")


def test_the_loss_of_node_0s_launcher_ends_the_wait(capfd: pytest.CaptureFixture[str]) -> None:
    """At once, with what was lost and what to do."""
    server: list[TCPStore] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    store = TCPStore("127.0.0.1", server[0].port, is_master=False, wait_for_workers=False)
    said: list[str] = []

    def join() -> None:
        with pytest.raises(RendezvousClosedError) as closed:
            hand_in(store, 1, 60.0, "node-a:6000")
        said.append(str(closed.value))

    waiting = threading.Thread(target=join)
    waiting.start()
    until(lambda: ticket_of(server[0], 1), "ticket")
    server.clear()
    waiting.join(30)
    assert "lost node 0's agent and the store at node-a:6000 (" in said[0]
    assert "Start ttprun on all nodes again" in said[0] and "--rdzv-backend c10d" in said[0]
