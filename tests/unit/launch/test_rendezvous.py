"""A fresh store for each start, whichever handler makes the membership."""

from __future__ import annotations

import os
import threading

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ttp.launch.rendezvous import FreshStoreRendezvous


class FixedNodes(RendezvousHandler):
    """A handler whose membership the test sets; `prefixed`: another part of the store each round, as c10d's."""

    def __init__(self, store: Store, rank: int, nodes: int, prefixed: bool = True, rounds: int = 0) -> None:
        self.store, self.rank, self.nodes, self.prefixed, self.rounds = store, rank, nodes, prefixed, rounds
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
        thread.join(30)
    return [results[index] for index in range(len(handlers))]


def client(handler: FreshStoreRendezvous) -> TCPStore:
    store = handler.job_store
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


@pytest.mark.parametrize("prefixed", [True, False], ids=["c10d", "static"])
def test_each_round_has_an_empty_store_that_all_nodes_agree_on(prefixed: bool) -> None:
    """What the workers of one start wrote is not there for the next."""
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
