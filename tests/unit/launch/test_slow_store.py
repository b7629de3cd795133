"""A store that answers late is not lost: the agents stay with it, and no spare takes the place of the node that serves it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo

from tests.unit.launch.test_multi_endpoint import Bench, agent, free_place, quick, serve
from tests.unit.launch.test_spare_nodes import Waits
from tests.waiting import until
from ttp.launch.rendezvous import multi_endpoint, store_failover, waiting_spare
from ttp.launch.rendezvous.multi_endpoint import BACK_S, Endpoint, epoch_key
from ttp.launch.rendezvous.spare_nodes import JOINING, RUNNING, SPARE, Entry, PlaceTaken, read_agents

__all__ = ["quick"]
"""A fixture that pytest uses by itself: short times."""


class StoreProcess:
    """A store in a process of its own, which can be paused: its host accepts connections for it, and they get no answer."""

    def __init__(self) -> None:
        self.place = free_place()
        command = [sys.executable, "-m", "ttp.launch.stores", "--port", str(self.place.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def apart() -> Iterator[StoreProcess]:
    store = StoreProcess()
    with store.process:
        yield store
        store.process.kill()


def test_agents_stay_with_a_store_that_has_left_two_polls_without_an_answer_and_answers_now(
    apart: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer takes longer than that of an endpoint that is back."""
    other = serve(second := free_place())
    bench = Bench(apart.place, second)
    failover = bench.store_failover
    bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    bench.thread.join(30)
    waiting = failover._waiting
    assert waiting is not None
    with monkeypatch.context() as short:
        short.setattr(multi_endpoint, "ANSWER_S", 0.3)
        short.setattr(multi_endpoint, "LEAST_S", 0.3)
        apart.pause()
        until(lambda: waiting.unanswered > 1)
    late = threading.Timer(5 * BACK_S, apart.go_on)
    late.start()
    came = bench.join()
    until(lambda: came or len(bench.made) == 2)  # a handler is dropped after three polls
    bench.made[-1].joined.set()
    bench.thread.join(30)
    assert (failover._place, failover._stores.epoch) == (apart.place, 1) and other
    failover.shutdown()


@pytest.mark.parametrize("paused", [False, True])
def test_after_a_move_a_spare_takes_the_place_of_the_node_that_served_the_store_once_that_is_lost(
    paused: bool, apart: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen in the first store whose that was. While that accepts connections, who has moved may be wrong, and node-b on its way."""
    monkeypatch.setattr(waiting_spare, "ROUND_S", 0.02)
    monkeypatch.setattr(waiting_spare, "LOST_S", 1e9)
    monkeypatch.setattr(multi_endpoint, "ANSWER_S", 1.0)
    store = TCPStore(apart.place.host, apart.place.port, is_master=False)
    store.set(epoch_key(""), "1")
    one, two = Entry("job", "node-a"), Entry("job", "node-b", lambda place: place == apart.place)
    for entry in (one, two):
        entry.met(0, 2, 1)
        entry.renew(store, apart.place, RUNNING)
    moved = serve(second := free_place())
    waits = Waits(agent(apart.place, second))
    until(lambda: beats_of_spare(store) > 1)
    if paused:
        apart.pause()
    one.renew(moved, second, JOINING)
    moved.set(epoch_key(""), "2")
    until(lambda: beats_of_spare(moved) > 20 or not waits.thread.is_alive())
    assert waits.taken == [] and waits.thread.is_alive()
    apart.process.kill()
    waits.end()
    assert waits.taken == [PlaceTaken("node-c", "node-b")], "the store is lost now"


def beats_of_spare(store: TCPStore) -> int:
    return max((each.beat for each in read_agents(store, "job") if each.state == SPARE), default=0)


def test_an_agent_pauses_between_looks_for_a_store_that_ended_as_a_meeting_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joins that meeting at once, without a pause; when the store is not there any more, it looks for one once a round."""
    place = free_place()
    servers = [serve(place)]
    bench = Bench(place)
    failover = bench.store_failover
    join, find = failover._join, failover._stores.find
    order: list[str] = []

    def joins(at: Endpoint, left_s: float) -> RendezvousInfo | None:
        joined = join(at, left_s)
        if failover._anew:
            servers.clear()
        return joined

    def finds(*arguments: Any) -> Endpoint | None:
        found = find(*arguments)
        order.append("nothing" if found is None else "found")
        return found

    def sleeps(pause_s: float) -> None:
        order.append("pause")
        time.sleep(pause_s)

    monkeypatch.setattr(failover, "_join", joins)
    monkeypatch.setattr(failover._stores, "find", finds)
    monkeypatch.setattr(store_failover, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleeps))
    bench.join()
    until(lambda: len(bench.made) == 1)
    servers[0].set(epoch_key(""), "2")
    until(lambda: order.count("nothing") > 5)
    servers.append(serve(place))
    until(lambda: len(bench.made) == 2)
    bench.made[1].joined.set()
    bench.thread.join(30)
    failover.shutdown()
    looks = order[1 : order.index("found", 1)]
    assert looks == ["nothing", "pause"] * (len(looks) // 2) and len(looks) > 10, order
