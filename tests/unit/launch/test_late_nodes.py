"""A node for which the job has no place, or that comes when the job is over: how long it waits, and how it ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from tests.unit.launch.test_multi_endpoint import Bench, Handler, agent, free_place, quick, serve
from tests.unit.launch.test_seated_nodes import RUNS, Job
from tests.unit.launch.test_spare_nodes import job
from tests.waiting import until
from ttp.launch.rendezvous import departures, running_job, store_failover
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores
from ttp.launch.rendezvous.spare_nodes import JOINING, LEFT, RUNNING, SPARE, Entry, Silence
from ttp.launch.rendezvous.store_failover import FailoverRendezvous

__all__ = ["job", "quick"]
"""Fixtures that pytest uses by themselves: a store with two nodes' entries, and short times."""


class Late:
    """A third node's agent, by the test's clock."""

    def __init__(self, place: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.looks, self.came = 0.0, 0, list[RendezvousInfo | Exception]()
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=time.sleep)
        monkeypatch.setattr(store_failover, "time", clock)
        has_all_nodes = running_job.has_all_nodes

        def look(*args: Any, **named: Any) -> bool:
            self.looks += 1
            return has_all_nodes(*args, **named)

        monkeypatch.setattr(running_job, "has_all_nodes", look)
        self.bench = Bench(place, join_timeout_s=60.0)
        self.failover = self.bench.store_failover
        self.failover._max_nodes = 2
        self.failover._silence = Silence(1e9)
        self.thread = threading.Thread(target=self._join, daemon=True)
        self.thread.start()

    def _join(self) -> None:
        try:
            self.came.append(self.failover.next_rendezvous())
        except Exception as error:
            self.came.append(error)

    def pass_time(self) -> None:
        """More than `join_timeout` passes; the agent looks again."""
        self.now_s += 61.0
        seen = self.looks
        until(lambda: self.looks > seen + 2 or bool(self.came))

    def end(self) -> RendezvousInfo | Exception:
        self.thread.join(60)
        self.failover._stores.close()
        (came,) = self.came
        return came


def runs(place: Endpoint, server: TCPStore, *entries: Entry) -> None:
    running_job.publish(server, "job", RUNS)
    for entry in entries:
        entry.renew(server, place, RUNNING)


def test_a_node_waits_longer_than_the_time_to_join_while_the_job_has_all_its_nodes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time to join begins when a place is free."""
    place, server, *entries = job
    runs(place, server, *entries)
    late = Late(place, monkeypatch)
    until(lambda: late.failover._waits_for_place)
    late.pass_time()
    late.pass_time()
    assert late.came == [] and late.bench.made == []
    entries[1].renew(server, place, LEFT)
    until(lambda: bool(late.bench.made) or bool(late.came))
    late.bench.made[0].joined.set()
    assert isinstance(late.end(), RendezvousInfo)


def test_a_node_whose_place_another_took_first_waits_for_the_next(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in torch's rendezvous until its time to join has passed."""
    place, server, *entries = job
    runs(place, server, *entries)
    entries[1].renew(server, place, LEFT)
    late = Late(place, monkeypatch)
    until(lambda: bool(late.bench.made))
    entries[1].renew(server, place, RUNNING)
    late.pass_time()
    assert late.failover._waits_for_place and late.came == []
    departures.publish_success(server, "job", "node-a")
    assert isinstance(late.end(), RendezvousGracefulExitError)


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("succeeded", [False, True])
def test_a_node_that_waits_for_a_place_ends_with_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, failed: bool, succeeded: bool
) -> None:
    """A job that has failed on a node has not succeeded."""
    place, server, *entries = job
    runs(place, server, *entries)
    late = Late(place, monkeypatch)
    until(lambda: late.failover._waits_for_place)
    late.pass_time()
    assert departures.has_waited(server, "job") and late.came == []
    if failed:
        departures.publish_over(server, "job", "node-b: exit code 3")
    if succeeded:
        departures.publish_success(server, "job", "node-a")
    if not failed and not succeeded:
        late.pass_time()
        assert late.came == []
        departures.publish_success(server, "job", "node-a")
    came = late.end()
    assert isinstance(came, RendezvousClosedError if failed else RendezvousGracefulExitError)
    reason = f"the job 'job' is over at {place}: node-b: exit code 3"
    assert str(came) == (reason if failed else "the job 'job' has succeeded")


class Closed(Handler):
    def next_rendezvous(self) -> RendezvousInfo:
        raise RendezvousClosedError


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("was_of_it", [False, True])
def test_a_node_that_joins_when_the_job_has_succeeded_ends_well(
    failed: bool, was_of_it: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was of the job has failed: the others have succeeded without it."""
    place = free_place()
    server = serve(place)
    departures.publish_success(server, "job", "node-a")
    if failed:
        departures.publish_over(server, "job", "node-b: exit code 3")
    late = FailoverRendezvous(agent(place), lambda place, *_: Closed(place), "job", join_timeout_s=60.0)
    if was_of_it:
        late._entry.met(0, 2, 1)
    with pytest.raises((RendezvousClosedError, RendezvousGracefulExitError)) as caught:
        late.next_rendezvous()
    if failed or was_of_it:
        why = "node-b: exit code 3" if failed else "it has succeeded on other nodes, which do not meet this one again"
        assert caught.type is RendezvousClosedError and str(caught.value) == f"the job 'job' is over at {place}: {why}"
    else:
        assert caught.type is RendezvousGracefulExitError
        assert "the job 'job' has succeeded without this node. Give a new job a new --rdzv-id" in caplog.messages


@pytest.mark.parametrize("waits", ["", SPARE, JOINING, "for a place"])
def test_the_store_is_kept_at_the_end_for_nodes_that_wait(monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    """Without one the launcher ends at once, though its own entry may be that of a node that joins."""
    kept: list[Endpoint] = []
    monkeypatch.setattr(Stores, "linger", lambda self, place: kept.append(place))
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    bench.thread.join(30)
    bench.store_failover._stop_polling()
    bench.store_failover._entry.renew(server, place, JOINING)
    if waits in (SPARE, JOINING):
        Entry("job", "node-c").renew(server, place, waits)
    elif waits:
        departures.publish_wait(server, "job")
    bench.store_failover.shutdown()
    assert kept == [place] * bool(waits) and departures.succeeded(server, "job")
