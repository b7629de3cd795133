"""A fresh store for each attempt, with every handler."""

from __future__ import annotations

import os
import re
import threading

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from tests.waiting import until
from ttp.errors import ConfigError
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous import fresh_store
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous, StoreNotReached

pytestmark = pytest.mark.usefixtures("agents_in_one_process")


class FixedNodes(RendezvousHandler):
    """A handler whose membership the test sets; `prefixed`: another part of the store each round, as c10d's."""

    def __init__(self, store: Store, rank: int, nodes: int, prefixed: bool = True, rounds: int = 0) -> None:
        self.store, self.rank, self.nodes, self.prefixed, self.rounds = (
            store,
            rank,
            nodes,
            prefixed,
            rounds,
        )
        self.saw_variable: list[str | None] = []
        self.calls: list[str] = []

    def next_rendezvous(self) -> RendezvousInfo:
        self.saw_variable.append(os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE"))
        store = PrefixStore(f"round{self.rounds}", self.store) if self.prefixed else self.store
        self.rounds += 1
        return RendezvousInfo(store, self.rank, self.nodes, RendezvousStoreInfo("unused", 1))

    def get_backend(self) -> str:
        return "fixed"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.calls.append("set_closed")

    def num_nodes_waiting(self) -> int:
        return 3

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        self.calls.append("shutdown")
        return True


def join_all(handlers: list[FreshStoreRendezvous]) -> list[RendezvousInfo]:
    """Let all nodes join at once and return what each got."""
    results: dict[int, RendezvousInfo] = {}

    def join(index: int) -> None:
        results[index] = handlers[index].next_rendezvous()

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[index] for index in range(len(handlers))]


def client(handler: FreshStoreRendezvous) -> TCPStore:
    store = handler.job_store
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


@pytest.mark.parametrize("prefixed", [True, False], ids=["c10d", "static"])
def test_each_round_has_an_empty_store_that_all_nodes_agree_on(prefixed: bool) -> None:
    """What the workers of one attempt wrote is not there for the next."""
    base = HashStore()
    nodes = [
        FreshStoreRendezvous(FixedNodes(base, rank, 2, prefixed), "127.0.0.1", same_keys_every_round=not prefixed)
        for rank in range(2)
    ]
    for number in range(3):
        infos = join_all(nodes)
        assert nodes[0].job_store == nodes[1].job_store
        assert nodes[0].job_store.round_number == number
        addresses = [info.bootstrap_store_info for info in infos]
        assert [(a.master_addr, a.master_port) for a in addresses if a is not None] == [
            ("127.0.0.1", nodes[0].job_store.port)
        ] * 2
        store = client(nodes[1])
        assert not store.check(["gloo/rank0"])
        store.set("gloo/rank0", "address")
    assert nodes[0].use_agent_store


def test_a_new_node_with_rank_zero_goes_on_with_the_count() -> None:
    """A job's start is the first only once, even when its first node is replaced."""
    base = HashStore()
    old = FreshStoreRendezvous(FixedNodes(base, 0, 1), "127.0.0.1", same_keys_every_round=False)
    for _ in range(3):
        old.next_rendezvous()
    inner = FixedNodes(base, 1, 2, rounds=3)
    old._inner = inner
    new = FreshStoreRendezvous(FixedNodes(base, 0, 2, rounds=3), "127.0.0.1", same_keys_every_round=False)
    join_all([new, old])
    assert new.job_store == old.job_store and new.job_store.round_number == 3


@pytest.mark.parametrize("before", [None, "0"])
def test_the_wrapped_handler_makes_no_store_and_the_environment_is_as_before(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers inherit the launcher's environment: nothing of ours may stay in it."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    inner = FixedNodes(HashStore(), 0, 1)
    FreshStoreRendezvous(inner, "127.0.0.1", same_keys_every_round=False).next_rendezvous()
    assert inner.saw_variable == ["1"]
    assert os.environ.get(name) == before


def test_everything_else_is_the_wrapped_handlers() -> None:
    """Membership, names and shutdown are untouched."""
    inner = FixedNodes(HashStore(), 0, 1)
    handler = FreshStoreRendezvous(inner, "127.0.0.1", same_keys_every_round=False)
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("fixed", "run", 3)
    assert handler.is_closed() is False and handler.shutdown() is True
    handler.set_closed()
    assert inner.calls == ["shutdown", "set_closed"]


def test_there_is_no_store_before_the_first_rendezvous() -> None:
    """A use out of order says so."""
    handler = FreshStoreRendezvous(FixedNodes(HashStore(), 0, 1), "127.0.0.1", same_keys_every_round=False)
    with pytest.raises(RuntimeError, match="no rendezvous yet"):
        _ = handler.job_store


def static_node(base: Store, rank: int, nodes: int = 2, join_timeout_s: float = 60.0) -> FreshStoreRendezvous:
    inner = FixedNodes(base, rank, nodes, prefixed=False)
    return FreshStoreRendezvous(inner, "127.0.0.1", same_keys_every_round=True, join_timeout_s=join_timeout_s)


def test_a_static_launcher_that_is_started_again_joins_the_attempt_that_begins() -> None:
    """It counts nothing by itself, and the attempts before, whose stores are gone, are not for it."""
    base = HashStore()
    first, second = static_node(base, 0), static_node(base, 1)
    for _ in range(6):
        join_all([first, second])
    again = static_node(base, 1)
    join_all([again, first])
    assert again.job_store == first.job_store and again.job_store.round_number == 6
    assert client(again).check(["nothing"]) is False, "its store is there"
    join_all([first, again])
    assert again.job_store == first.job_store and again.job_store.round_number == 7


def test_a_static_attempts_agents_find_no_key_of_an_earlier_one() -> None:
    """A launcher that is started again with another number of workers is not given the ranks of its forerunner."""
    base = HashStore()
    nodes = [static_node(base, 0), static_node(base, 1)]
    for info in join_all(nodes):
        info.store.set("torchelastic/assigned_ranks/1", "old")
    stores = [info.store for info in join_all(nodes)]
    assert not stores[0].check(["torchelastic/assigned_ranks/1"])
    stores[0].set("word", "new")
    assert stores[1].get("word") == b"new"


def test_a_static_node_0s_restart_reaches_a_node_that_has_succeeded() -> None:
    """The last attempt's store is there until all have joined: the other launcher looks into it now and then only, and joins
    when it has learned of it."""
    base = HashStore()
    first, second = static_node(base, 0), static_node(base, 1)
    join_all([first, second])
    there = PeerAgents(second.job_store, 1, 2, look_s=0.5)
    there.start()
    here = PeerAgents(first.job_store, 0, 2, look_s=0.5)
    here.start()
    there.publish_succeeded()
    until(lambda: client(first).check(["ttp/nodes/succeeded/1"]), "success")
    here.publish_restart("node 0 failed and restarts")
    here.close()
    joining = threading.Thread(target=first.next_rendezvous)
    joining.start()
    until(lambda: there.restarts or there.over, "word of node 0")
    assert (there.restarts, there.over) == ("node 0 failed and restarts", "")
    there.close()
    second.next_rendezvous()
    joining.join(30)
    assert first.job_store == second.job_store and first.job_store.round_number == 1


def test_a_static_node_0_does_not_wait_for_one_that_cannot_start_again() -> None:
    """It has said so in the last attempt's store; its words are the reason."""
    base = HashStore()
    first, second = static_node(base, 0), static_node(base, 1)
    join_all([first, second])
    there = PeerAgents(second.job_store, 1, 2)
    there.start()
    there.publish_failed("node-b has failed (exit code 2)")
    there.close()
    with pytest.raises(RendezvousClosedError, match=re.escape("node-b has failed (exit code 2)")):
        first.next_rendezvous()


def test_an_unreachable_store_of_a_later_attempt_is_not_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2 says that nothing was started."""
    handler = FreshStoreRendezvous(FixedNodes(HashStore(), 0, 1), "127.0.0.1", same_keys_every_round=False)

    def unreached(*arguments: object, **named: object) -> TCPStore:
        raise DistNetworkError("no route")

    with monkeypatch.context() as patched:
        patched.setattr(fresh_store, "serve", unreached)
        with pytest.raises(ConfigError, match="--local-addr"):
            handler.next_rendezvous()
    handler.next_rendezvous()
    monkeypatch.setattr(fresh_store, "serve", unreached)
    with pytest.raises(StoreNotReached, match="--local-addr"):
        handler.next_rendezvous()


def test_a_known_problem_is_logged_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason once, whatever comes between; what is waited for now and then."""
    monkeypatch.setattr(fresh_store, "FIRST_LOG_S", 0.01)
    caplog.set_level("INFO", "ttp.launch")
    reasons = iter(["", "a: connection refused", "a: connection refused", "a: no route", "a: connection refused"])
    asked = threading.Event()

    def trouble() -> str:
        reason = next(reasons, None)
        if reason is None:
            asked.set()
        return reason or ""

    with fresh_store.log_while_waiting("2 nodes", trouble):
        assert asked.wait(30)
    lines = [re.sub(r"[\d.]+ s so far", "0 s so far", line) for line in caplog.messages]
    assert lines == [
        f"waiting for 2 nodes (0 s so far){why}" for why in ("", "; a: connection refused", "; a: no route")
    ]


class NeverMeets(FixedNodes):
    """A handler that fails to meet anybody."""

    def __init__(self, error: Exception) -> None:
        super().__init__(HashStore(), 0, 2)
        self.error = error

    def next_rendezvous(self) -> RendezvousInfo:
        raise self.error


@pytest.mark.parametrize(
    ("error", "static", "kind", "words"),
    [
        (
            RendezvousTimeoutError(),
            False,
            RendezvousTimeoutError,
            r"timed out: this node waited for 2 nodes \(a: no route\)",
        ),
        (RendezvousTimeoutError("too few"), False, RendezvousTimeoutError, "^too few$"),
        (
            DistNetworkError("no"),
            True,
            RendezvousConnectionError,
            r"timed out: this node waited for 2 nodes \(a: no route\)",
        ),
        (DistNetworkError("no"), False, DistNetworkError, "^no$"),
    ],
)
def test_nodes_that_do_not_meet_end_with_a_message(
    error: Exception, static: bool, kind: type[Exception], words: str
) -> None:
    """torch's own timeout has none. An unreachable store of a static job is not retried."""
    handler = FreshStoreRendezvous(
        NeverMeets(error), "127.0.0.1", same_keys_every_round=static, waits_for="2 nodes", trouble=lambda: "a: no route"
    )
    with pytest.raises(kind, match=words):
        handler.next_rendezvous()
