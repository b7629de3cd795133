"""A keeper's certificate in an attempt of days: its agent renews it, and gives it to a keeper that begins later as well."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.unit.copies.conftest import HOST, SECRET
from tests.unit.copies.test_transfer import of_rank, secure
from tests.waiting import until
from ttp.copies.keeper import Keeper
from ttp.copies.memory import received
from ttp.identity.authority import LIFETIME_S, SKEW_S, Authority
from ttp.launch.attempts import copies as agent_copies
from ttp.launch.attempts.copies import Copies

EXPIRED_S = LIFETIME_S + SKEW_S + 1.0


class Clock:
    """The agents'. Certificates are made by it, and checked by the system's."""

    behind_s = 0.0

    def __call__(self) -> float:
        return time.time() - self.behind_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agent_copies, "Authority", partial(Authority, clock=clock))
    return clock


class Node:
    """An agent, and its keeper on threads of this process."""

    def __init__(self, store: HashStore, node: int, closing: ExitStack) -> None:
        self._closing = closing
        self.agent = Copies()
        self.keeper = self.new_keeper()
        closing.callback(self.agent.close)
        self.begin = partial(self.agent.begin, "job/0", 0, store, node, 2, HOST, ranks=[node])

    def new_keeper(self) -> Keeper:
        """Return one that carries out the agent's orders, and has not begun."""
        if self.agent._orders is not None:
            self.agent._orders.close()
        self.agent._orders, orders = socket.socketpair()
        memory, keepers = socket.socketpair()
        giving = threading.Thread(target=self.agent._give_memory, args=(memory,))
        giving.start()
        self._closing.callback(giving.join)
        self._closing.callback(keepers.close)
        keeper = Keeper(keepers)

        def serve() -> None:
            with orders:
                try:
                    keeper.serve_agent(orders)
                except EOFError:
                    if keeper._listener is not None:
                        keeper._listener.shutdown(socket.SHUT_RDWR)
                        keeper._listener.close()

        threading.Thread(target=serve).start()
        return keeper


@contextmanager
def two_nodes(secured: bool = True) -> Iterator[tuple[Node, Node]]:
    """In one attempt, and each knows the other's address."""
    store = HashStore()
    with ExitStack() as closing:
        nodes = Node(store, 0, closing), Node(store, 1, closing)
        for each in nodes:
            each.begin(secret=SECRET if secured else None)

        def all_known() -> bool:
            for each in nodes:
                each.agent.look(None)
            return all(each.agent._peer for each in nodes)

        until(all_known)
        yield nodes


def await_renewal(node: Node, clock: Clock) -> None:
    """Have the agent make another certificate, of today; it has not given it to its keeper."""
    clock.behind_s = 0.0
    credentials = node.agent._credentials
    assert credentials is not None
    until(lambda: credentials().renew_unix_s > time.time(), "another certificate")


def test_keepers_connect_anew_when_their_first_certificates_have_expired(clock: Clock) -> None:
    clock.behind_s = EXPIRED_S
    with two_nodes() as (sender, receiver):
        region = of_rank(sender.keeper, attempt=0)
        assert "certificate has expired" in secure(sender.keeper, region)
        await_renewal(sender, clock)
        sender.agent.look(None)
        assert "certificate has expired" in secure(sender.keeper, region), "the other one's"
        await_renewal(receiver, clock)
        receiver.agent.look(None)
        assert secure(sender.keeper, region) == "" and receiver.keeper._region(received(0), 1, 5)


def test_a_certificate_is_given_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[object] = []
    clock.behind_s = EXPIRED_S
    with two_nodes() as (node, _):
        carry_out = node.agent._order

        def order(given: Mapping[str, Any]) -> dict[str, Any]:
            orders.append(given["do"])
            return carry_out(given)

        monkeypatch.setattr(node.agent, "_order", order)
        await_renewal(node, clock)
        node.agent.look(None)
        node.agent.look(None)
        assert orders == ["credentials"]


def test_a_keeper_that_is_started_late_begins_with_the_newest_certificate(clock: Clock) -> None:
    clock.behind_s = EXPIRED_S
    with two_nodes() as (sender, receiver):
        for each in (sender, receiver):
            await_renewal(each, clock)
        receiver.agent.look(None)
        late = sender.new_keeper()
        assert sender.agent._orders is not None
        sender.agent._begin_keeper(sender.agent._orders)
        sender.agent._has_begun(sender.agent._orders)
        late._set_peer({"address": sender.agent._peer})
        assert secure(late, of_rank(late, attempt=0)) == "" and receiver.keeper._region(received(0), 1, 5)
        given = sender.agent._given
        sender.agent.look(None)
        assert sender.agent._given is given


def test_a_keeper_that_could_not_take_a_certificate_is_given_it_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no descriptor for a moment."""
    clock.behind_s = EXPIRED_S

    def no_room(*_: object) -> int:
        raise OSError("Too many open files")

    with two_nodes() as (node, _):
        await_renewal(node, clock)
        old = node.keeper._server
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", no_room)
            node.agent.look(None)
        assert node.keeper._server is old
        node.agent.look(None)
        assert node.keeper._server is not old


def test_a_keeper_may_be_lost_as_it_is_given_a_certificate(clock: Clock) -> None:
    clock.behind_s = EXPIRED_S
    with two_nodes() as (node, _):
        await_renewal(node, clock)
        assert node.agent._orders is not None
        node.agent._orders.shutdown(socket.SHUT_RDWR)
        node.agent.look(None)
        assert node.agent._orders is None


def test_without_certificates_there_is_nothing_to_renew() -> None:
    with two_nodes(secured=False) as (sender, receiver):
        sender.agent.look(None)
        assert secure(sender.keeper, of_rank(sender.keeper, attempt=0)) == ""
        assert receiver.keeper._region(received(0), 1, 5) and sender.agent._orders is not None


def test_an_attempt_of_one_node_needs_no_certificate() -> None:
    with two_nodes() as (node, _):
        assert node.keeper._client is not None
        node.agent.begin("job/0", 0, HashStore(), 0, 1, HOST, SECRET, [0])
        assert node.keeper._client is None
