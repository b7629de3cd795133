"""A node that was lost while the others trained on: its agent learns that another one has its place, and ends, waits and publishes as one without."""

from __future__ import annotations

import functools
import threading

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.test_multi_endpoint import Bench, free_place, quick
from tests.unit.launch.test_seated_nodes import ORDER, RUNS, Given, Job
from tests.unit.launch.test_spare_nodes import job
from tests.waiting import until
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous import departures, running_job
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores
from ttp.launch.rendezvous.running_job import WasReplaced
from ttp.launch.rendezvous.spare_nodes import (
    LEFT,
    RUNNING,
    SPARE,
    Entry,
    Silence,
    read_agents,
    seated,
    sit_down,
)
from ttp.launch.rendezvous.store_failover import FailoverRendezvous
from ttp.launch.rendezvous.waiting_spare import PlaceGiven

__all__ = ["job", "quick"]
"""Fixtures that pytest uses by themselves: a store with two nodes' entries, and short times."""


def bench_of(place: Endpoint, server: TCPStore, met: int = 0) -> FailoverRendezvous:
    """The rendezvous of node-b's agent, which has met the others as node 1 of that attempt."""
    failover = Bench(place).store_failover
    failover._entry = Entry("job", "node-b")
    failover._entry._numbers[place] = 2
    failover._entry.met(met, 2, 1)
    failover._anew_meeting.met(place, 1)
    failover._place = place
    assert failover._stores.find_in_use() == place and server
    return failover


@pytest.mark.parametrize(
    ("start", "number", "agent", "replaced"),
    [(0, 1, "3", True), (0, 1, "2", False), (0, 0, "3", False), (1, 1, "3", False)],
    ids=["by another", "by itself, later", "another node's place", "in another attempt"],
)
def test_an_agent_reads_that_its_place_was_taken(job: Job, start: int, number: int, agent: str, replaced: bool) -> None:
    place, server, *_ = job
    failover = bench_of(place, server)
    sit_down(server, "job", start, number, "", 3 if agent == "3" else 2)
    assert failover._was_replaced() is replaced
    failover._entry.met(-1, 0, 0)
    assert not failover._was_replaced(), "it is of no attempt"


def test_a_place_is_taken_from_the_agent_that_was_known_to_have_it_only(job: Job) -> None:
    """A store that is back after a while has been written to by others."""
    _, server, *_ = job
    assert seated(server, "job", 0, 1) == ""
    sit_down(server, "job", 0, 1, "", 3)
    sit_down(server, "job", 0, 1, "", 4)
    assert seated(server, "job", 0, 1) == "3"
    sit_down(server, "job", 0, 1, "3", 4)
    assert (seated(server, "job", 0, 1), seated(server, "job", 0, 0), seated(server, "job", 1, 1)) == ("4", "", "")


def test_a_node_whose_place_was_taken_does_not_join(job: Job) -> None:
    """The others would make room for it. It waits as a spare node, and may be given its own place again."""
    place, server, *_ = job
    failover = bench_of(place, server)
    sit_down(server, "job", 0, 1, "", 3)
    with pytest.raises(WasReplaced, match="another node has the place of node-b"):
        failover.next_rendezvous()
    failover.become_spare()
    given, came = Given(), []
    thread = threading.Thread(target=lambda: came.append(failover.wait_as_spare(given)))
    thread.start()
    until(lambda: any(each.state == SPARE and each.number == 2 for each in read_agents(server, "job")))
    running_job.publish(server, "job", RUNS)
    given.orders(ORDER)
    thread.join(30)
    assert came == [PlaceGiven(RUNS, 1, ORDER, place, 0, "3")]
    until(lambda: seated(server, "job", 0, 1) == "2")
    (entry,) = [each for each in read_agents(server, "job") if each.number == 2]
    assert (entry.state, entry.start, entry.size) == (RUNNING, 0, 2)
    assert failover.num_nodes_waiting() == 0 and not failover._was_replaced()
    failover.shutdown()


def test_a_node_that_has_opened_an_endpoint_behind_a_broken_network_goes_back(job: Job) -> None:
    """A second spare must not follow it there: with it, it would be a job of its own."""
    place, *_ = job
    other = free_place()
    stores = Stores((place, other), hosting=None)
    assert stores.serves(other) and not stores.serves(place)
    stores._windows[other].open(0, 2)
    assert stores.find_in_use() == other and stores.epoch == 2
    stores.go_back(place, 1)
    assert stores.find_in_use() == place and stores.epoch == 1
    assert stores.serves(other), "for the job's next endpoint, empty"
    until(lambda: stores._windows[other].look(5.0) == 0)
    stores.close()


@pytest.mark.parametrize("full", [True, False])
def test_a_newcomer_waits_while_the_job_has_all_its_nodes(job: Job, full: bool) -> None:
    """torch's rendezvous would let it in where a lost node was, and the others would make room for it."""
    place, server, *entries = job
    running_job.publish(server, "job", RUNS)
    for entry in entries[: 1 + full]:
        entry.renew(server, place, RUNNING)
    bench = Bench(place)
    bench.store_failover._max_nodes = 2
    bench.store_failover._silence = Silence(1e9)
    if not full:
        entries[1].renew(server, place, LEFT)
    bench.join()
    if full:
        until(lambda: bench.store_failover._waits_for_place)
        assert not bench.made
        entries[1].renew(server, place, LEFT)
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    bench.thread.join(30)
    bench.store_failover.shutdown()


def test_a_seated_node_sees_who_waits(job: Job) -> None:
    """By a handler that has not joined. One that cannot be made costs that only."""
    place, server, *_ = job
    bench = Bench(place)
    failover = bench.store_failover
    failover._entry.renew(server, place, SPARE)
    failover._stores.find_in_use()
    failover._enter(PlaceGiven(RUNS, 1, ORDER, place))
    until(lambda: len(bench.made) == 1)
    assert failover.num_nodes_waiting() == 0
    bench.made[0].waiting = lambda: 1
    until(lambda: failover.num_nodes_waiting() == 1)
    departures.publish_departure(server, "job", "node-a leaves")
    bench.made[0].waiting = lambda: 0
    until(lambda: failover.num_nodes_waiting() == 1)
    failover.shutdown()


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("ends", ["leave", "shutdown", "fails", "announce"])
def test_an_agent_whose_place_was_taken_publishes_no_end(job: Job, replaced: bool, ends: str) -> None:
    """The job goes on without it."""
    place, server, *_ = job
    failover = bench_of(place, server)
    sit_down(server, "job", 0, 1 if replaced else 0, "", 3)
    if ends == "announce":
        failover.announce_leave("its time is over")
    elif ends == "leave":
        failover.leave("its time is over")
    else:
        failover.shutdown("exit code 3" if ends == "fails" else "")
    published = (
        bool(departures.departures_after(server, "job", 0)),
        departures.succeeded(server, "job"),
        bool(departures.over(server, "job")),
    )
    expected = (ends in ("leave", "announce"), ends == "shutdown", ends == "fails")
    assert published == ((False,) * 3 if replaced else expected)


class Peers:
    """The agents of an attempt's two nodes, and another one that has the place of the second."""

    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = JobStore("127.0.0.1", self.server.port, 0)
        make = functools.partial(PeerAgents, place, nodes=2, look_s=0.02, lost_s=60.0)
        self.first, self.lost, self.seated = make(node=0), make(node=1), make(node=1, seated="c")

    def close(self) -> None:
        for each in (self.first, self.lost, self.seated):
            each.close()


@pytest.mark.parametrize("cut_off", [False, True])
def test_an_agent_whose_place_was_taken_publishes_nothing(cut_off: bool) -> None:
    """The next fault would have its deadline, and the job's end would wait for its restart. Also what it could not publish while it was cut off."""
    peers = Peers()
    peers.first.start()
    if not cut_off:
        peers.lost.start()
        until(lambda: peers.lost._reached, "its first answer")
    peers.seated.start()
    until(lambda: peers.seated._reached and peers.server.check(["ttp/nodes/seat/1"]), "the other's answer")
    peers.lost.publish_fault(0.0)
    peers.lost.publish_restart("b starts again")
    peers.lost.publish_succeeded()
    if cut_off:
        peers.lost.start()
    until(lambda: peers.lost.was_replaced, "its own end")
    peers.lost._thread.join(30)
    assert not peers.lost._thread.is_alive()
    assert not peers.server.check(["ttp/nodes/restarts"]) and not peers.server.check(["ttp/nodes/fault"])
    assert not peers.server.check(["ttp/nodes/succeeded/1"])
    assert not peers.seated.was_replaced and not peers.first.was_replaced
    for each in (peers.first, peers.seated):
        each.publish_succeeded()
    until(lambda: peers.first.all_have_succeeded, "word of all successes")
    peers.close()


def test_one_that_took_a_place_and_lost_it_does_not_take_it_back() -> None:
    """Its connection breaks, and a third has the place by the time it has another one."""
    peers = Peers()
    peers.seated.start()
    until(lambda: peers.seated._reached, "its first answer")
    peers.server.set("ttp/nodes/seat/1", "d")
    peers.server.add("ttp/nodes/changes", 1)
    until(lambda: peers.seated.was_replaced, "its own end")
    assert peers.server.get("ttp/nodes/seat/1") == b"d"
    again = PeerAgents(JobStore("127.0.0.1", peers.server.port, 0), 1, 2, look_s=0.02, seated="c")
    again._reached = True  # before
    again.start()
    until(lambda: again.was_replaced, "its own end")
    assert peers.server.get("ttp/nodes/seat/1") == b"d"
    again.close()
    peers.close()
