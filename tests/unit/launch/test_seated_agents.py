"""A seated node's agent is as any other from then on, and the lost node's is none: what each of them keeps, forgets and publishes."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.attempts import RunningAttempt
from tests.unit.launch.test_agent import make_agent
from tests.unit.launch.test_fresh_store import FixedNodes
from tests.unit.launch.test_multi_endpoint import Bench, quick
from tests.unit.launch.test_replaced_nodes import Peers
from tests.unit.launch.test_seated_nodes import ORDER, RUNS, SECRET, Attached, Given, Job, Meeting, handler
from tests.unit.launch.test_sick_nodes import Check
from tests.unit.launch.test_spare_nodes import job
from tests.waiting import until
from ttp.launch import agent as agent_module
from ttp.launch.agent import HoldAgent
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.attempts.replacements import Replacements
from ttp.launch.rendezvous import departures, running_job
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous, JobStore
from ttp.launch.rendezvous.multi_endpoint import Endpoint
from ttp.launch.rendezvous.spare_nodes import RUNNING, Agent, Entry, read_agents, seated, sit_down
from ttp.launch.rendezvous.store_failover import FailoverRendezvous
from ttp.launch.rendezvous.waiting_spare import PlaceGiven, _Orders, _View

__all__ = ["job", "quick"]
"""Fixtures that pytest uses by themselves: a store with two nodes' entries, and short times."""

pytestmark = pytest.mark.usefixtures("agents_in_one_process")


def enter(place: Endpoint, server: TCPStore) -> FailoverRendezvous:
    """Return the rendezvous of node-c's agent, a spare one that was given node 1's place. A node had left before."""
    departures.publish_departure(server, "job", "node-x left before")
    failover = Bench(place).store_failover
    failover._spare_node, failover._entry = True, Entry("job", "node-c")
    running_job.publish(server, "job", RUNS)
    given = Given()
    given.orders(ORDER)
    assert isinstance(failover.wait_as_spare(given), PlaceGiven)
    until(lambda: own(server).state == RUNNING)
    return failover


def own(server: TCPStore) -> Agent:
    return next(each for each in read_agents(server, "job") if each.node == "node-c")


def renewed(server: TCPStore, times: int = 3) -> None:
    """Wait until its polls have renewed the entry so often."""
    then = own(server).beat
    until(lambda: own(server).beat >= then + times)


def test_a_seated_node_is_one_that_has_met_the_others(job: Job) -> None:
    place, server, *_ = job
    failover = enter(place, server)
    entry = own(server)
    assert (entry.start, entry.size, entry.epoch, entry.place) == (0, 2, 1, 2) and failover._secret.met
    assert failover._anew_meeting.moved(Endpoint("elsewhere", 1)) and failover._anew_meeting.number == 1
    renewed(server)
    assert failover.num_nodes_waiting() == 0, "who left before does not count"
    assert failover.wait_as_spare(Given()) is None, "it is as any other"
    departures.publish_departure(server, "job", "node-a leaves")
    until(lambda: failover.num_nodes_waiting() == 1)
    failover.shutdown()


def test_it_sits_down_once(job: Job) -> None:
    """Another one has its place later."""
    place, server, *_ = job
    failover = enter(place, server)
    number = str(failover.agent_number)
    until(lambda: seated(server, "job", 0, 1) == number)
    sit_down(server, "job", 0, 1, number, 9)
    renewed(server)
    assert seated(server, "job", 0, 1) == "9" and failover._was_replaced()
    failover.shutdown()


def test_one_that_becomes_a_spare_ends_as_a_node(job: Job) -> None:
    place, server, *_ = job
    failover = enter(place, server)
    polls = failover._waiting
    failover.become_spare()
    assert polls is not None and polls._stopping.is_set() and failover._waiting is None
    assert (failover._entry.agent.place, failover._entry.agent.start) == (0, -1)
    failover.shutdown()


def test_what_runs_has_the_epoch_under_which_its_nodes_have_met(job: Job) -> None:
    place, server, *_ = job
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    until(lambda: bool(came))
    assert bench.store_failover.epoch == 1
    bench.store_failover.publish_running(RUNS)
    assert running_job.read(server, "job") == RUNS
    bench.store_failover.shutdown()


def test_a_later_order_has_the_health_checked_anew() -> None:
    check, given = Check(), Given()
    orders = _Orders(given, check)
    orders.follow(_View(Endpoint("a", 1), [], "", False, RUNS, 0, ("", "")))
    for ordered in (ORDER, None, ORDER):
        given._order = ordered
        assert orders.given() is None
        time.sleep(0.001)  # by the clock's resolution
    assert len(set(check.begun)) == 2


def test_the_next_meeting_gives_no_place() -> None:
    """And has the next number, also where this node is node 0 by then."""
    inner = Meeting(HashStore(), 0)
    inner._inner_handler = FixedNodes(HashStore(), 0, 1)
    inner.spare = PlaceGiven(replace(RUNS, answer=f"127.0.0.1 4000 4 {SECRET}", start=4), 1, ORDER, Endpoint("a", 1))
    node = handler(inner)
    node.next_rendezvous()
    assert node.given is not None
    inner.spare = None
    node.next_rendezvous()
    assert node.given is None and node.job_store.round_number == 5


def test_one_that_is_no_longer_node_0_publishes_nothing() -> None:
    inner = [Meeting(HashStore(), 0), Meeting(HashStore(), 1)]
    nodes = [handler(each) for each in inner]
    inner[0]._inner_handler = FixedNodes(HashStore(), 0, 1)
    nodes[0].next_rendezvous()
    store = HashStore()
    inner[0]._inner_handler, inner[1]._inner_handler = FixedNodes(store, 1, 2), FixedNodes(store, 0, 2)
    threads = [threading.Thread(target=node.next_rendezvous) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for node in nodes:
        node.publish_running(HashStore(), 3)
    assert not inner[0].published and len(inner[1].published) == 1


def test_a_store_that_fails_as_what_runs_is_published_costs_that_only(caplog: pytest.LogCaptureFixture) -> None:
    """Node 0 would meet anew, and the others be in an attempt without rank 0."""
    inner = Meeting(HashStore(), 0)
    inner._inner_handler = FixedNodes(HashStore(), 0, 1)
    node = handler(inner)
    node.next_rendezvous()
    node.publish_running(mock.Mock(check=mock.Mock(side_effect=RuntimeError("connection reset"))), 3)
    assert not inner.published and "is replaced by a restart only" in caplog.text


def test_a_place_is_taken_with_the_secret_with_which_the_job_was_followed() -> None:
    """A file that was replaced meanwhile is the next attempt's."""
    inner = Meeting(HashStore(), 0)
    inner.become_spare()
    node = handler(inner)
    node._job_secret.read = read = mock.Mock(return_value=False)  # type: ignore[method-assign]
    node.next_rendezvous()
    assert node.given is not None and not read.called
    inner.spare, inner._inner_handler = None, FixedNodes(HashStore(), 0, 1)
    node.next_rendezvous()
    assert read.called


# --- its connection and its workers ---


def test_an_attempt_is_followed_once_and_again_after_the_end_of_the_connection() -> None:
    """Each look reads it anew; a node that sat down and was replaced waits again."""
    bench = Attached()
    bench.spare.follow(RUNS)
    until(lambda: len(bench.opened) == 1, "the connection")
    bench.spare.take(ORDER)
    bench.spare.follow(replace(RUNS))
    assert bench.spare.order(0.0) == ORDER
    bench.spare.close()
    bench.spare.follow(RUNS)
    until(lambda: len(bench.opened) == 2, "another connection")
    bench.spare.close()


def test_a_spare_has_a_certificate_of_the_attempt_without_ranks() -> None:
    bench, identities = Attached(), mock.Mock()
    bench.spare._launching = replace(bench.spare._launching, identities=identities)
    bench.spare.follow(RUNS)
    (call,) = identities.begin.call_args_list
    assert (call.args[0].value.decode(), *call.args[1:]) == (SECRET, "job/0", 0, ())
    bench.spare.close()


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("sent_away", [None, 5.0])
def test_a_job_runs_while_its_controller_is_there_and_orders_no_exit(connected: bool, sent_away: float | None) -> None:
    bench = Attached()
    assert not bench.spare.job_runs
    bench.spare._client = mock.Mock(connected=connected, sent_away_monotonic_s=sent_away)
    assert bench.spare.job_runs is (connected and sent_away is None)


def test_an_order_for_spare_nodes_is_not_one_for_a_node_with_workers() -> None:
    stand_in = mock.Mock()
    replacements = Replacements(
        {2: 52}, None, nodes=2, watch=stand_in, controller=stand_in, faults=stand_in, memory=stand_in,
        behind_shells=stand_in, identities=None, copies=None, vacant=7,
    )  # fmt: skip
    replacements.take(ORDER)
    assert replacements._thread is None and replacements._orders.empty()


def test_the_agent_of_a_seated_node_starts_its_workers_vacant(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address of the controller that leads; then the attempt has a connection of its own."""
    begun: dict[str, Any] = {}

    def attempt(launching: object, **given: Any) -> mock.Mock:
        begun.update(given)
        return mock.Mock(pids={})

    monkeypatch.setattr(agent_module, "Attempt", attempt)
    monkeypatch.setattr(agent_module, "begin_attempt", lambda *of: begun.update(variable=of[-1]))
    monkeypatch.setattr(FreshStoreRendezvous, "take_excluded", lambda self: [])
    monkeypatch.setattr(HoldAgent, "_start_processes", lambda self, group: {0: 1, 1: 2})
    inner = Meeting(HashStore(), 0)
    inner.become_spare()
    agent = make_agent(inner)  # type: ignore[arg-type]
    assert agent._rendezvous_handler.attached is agent._spare and agent._spare.places == 2
    agent._spare._client = client = mock.Mock(leader="a:1")
    group = agent.get_worker_group()
    agent._rendezvous(group)
    agent._start_workers(group)
    assert (begun["variable"], begun["vacant"]) == ("7 a:1", 7)
    assert [worker.global_rank for worker in group.workers] == [2, 3]
    client.close.assert_called_once()


def test_a_seated_node_whose_workers_cannot_be_started_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller then has the step written at once."""
    monkeypatch.setattr(agent_module, "begin_attempt", lambda *of: None)
    monkeypatch.setattr(HoldAgent, "_start_processes", mock.Mock(side_effect=OSError("no process left")))
    inner = Meeting(HashStore(), 0)
    inner.become_spare()
    agent = make_agent(inner)  # type: ignore[arg-type]
    agent._spare._client = client = mock.Mock(leader="a:1", sent_away_monotonic_s=None)
    agent._spare.take(ORDER)
    agent._rendezvous(agent.get_worker_group())
    with pytest.raises(OSError, match="no process left"):
        agent._start_workers(agent.get_worker_group())
    assert [call.args[:2] for call in client.replace_failed.call_args_list] == [(2, 7), (3, 7)]
    client.close.assert_called_once()


def test_the_agent_of_node_0_publishes_what_runs() -> None:
    inner = Meeting(HashStore(), 0)
    inner._inner_handler = FixedNodes(HashStore(), 0, 1)
    agent = make_agent(inner)  # type: ignore[arg-type]
    agent._rendezvous(agent.get_worker_group())
    (found,) = inner.published
    assert found.nodes[0].assigned == (0, 2, 0, 2)


# --- the lost node's ---


def test_an_attempt_of_a_seated_node_has_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(attempt_module, "PeerAgents", made)
    launching = mock.Mock(total_timeout_s=5.0, poll_s=0.01)
    for vacant in (0, 7):
        attempt_module.Attempt(
            launching, job_id="j", job_store=JobStore("127.0.0.1", 1, 0), start_id="s", pids={}, nodes=2,
            node=1, hosts_rank_zero=False, vacant=vacant,
        ).close()  # fmt: skip
    assert [call.kwargs["seated"] for call in made.call_args_list] == ["", "s"]


def test_an_attempt_begins_where_rank_zero_starts_its_first_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes a lost rank 0's place starts none."""
    monkeypatch.setattr(attempt_module, "PeerAgents", mock.Mock())
    launching = mock.Mock(total_timeout_s=5.0, poll_s=0.01)
    for hosts, vacant in ((True, 0), (True, 7), (False, 0)):
        attempt = attempt_module.Attempt(
            launching, job_id="j", job_store=JobStore("127.0.0.1", 1, 0), start_id="s", pids={}, nodes=2,
            node=1, hosts_rank_zero=hosts, vacant=vacant,
        )  # fmt: skip
        attempt.close()
        assert attempt._start.begins_here is (hosts and not vacant)


def test_a_hold_ends_once_another_agent_has_the_place() -> None:
    """Its survivors would be held until TTP_OT, and have devices that the node could give to others."""
    running = RunningAttempt(60.0, True, nodes=2)
    running.fail_one()
    running.store.set("ttp/nodes/seat/0", "c")
    running.store.add("ttp/nodes/changes", 1)
    running.held.join(20)
    over, replaced = not running.held.is_alive(), running.attempt.was_replaced
    running.close()
    assert over and replaced


def test_an_agent_with_nothing_to_publish_learns_it_too_and_is_silent() -> None:
    """Its heartbeat would hide the loss of the one that has the place."""
    peers = Peers()
    peers.lost.start()
    until(lambda: peers.lost._reached, "its first answer")
    peers.seated.start()
    until(lambda: peers.lost.was_replaced, "its own end")
    peers.lost._thread.join(20)
    assert not peers.lost._thread.is_alive()
    peers.first.start()
    peers.close()
