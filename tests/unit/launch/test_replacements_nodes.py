"""Single processes of a running attempt are replaced on one of several nodes: what the agent waits for, and what the other nodes learn."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from tests.unit.launch.attempts import RunningAttempt
from tests.waiting import until
from ttp.exchange.first_step import progress_key
from ttp.fork_server.forked_process import ForkedChild
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.links import peer_agents
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.proto.messages import Replace


class Sleepers:
    """Starts programs that sleep in ranks' places."""

    def __init__(self) -> None:
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        """The newest of each rank."""
        self.all: list[subprocess.Popen[bytes]] = []

    def fork_again(self, rank: int, variables: Mapping[str, str]) -> tuple[ForkedChild, ForkedChild]:
        first, new = self.workers[rank], subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.workers[rank] = new
        self.all.append(new)
        return ForkedChild(new.pid, ["sleep"]), ForkedChild(first.pid, [])


def kill(running: RunningAttempt, rank: int) -> None:
    running.workers[rank].kill()
    until(lambda: rank in (deaths := running.attempt.deaths()) and deaths[rank].settled, "its end to be seen")


@contextlib.contextmanager
def held(nodes: int, first: bool = False) -> Iterator[RunningAttempt]:
    """Yield an attempt of so many nodes whose rank 1 has just been killed, in its hold. `first`: rank 0 was, before."""
    sleepers = Sleepers()
    running = RunningAttempt(60.0, controller=True, nodes=nodes, forker=sleepers)
    sleepers.workers = dict(enumerate(running.workers))
    try:
        if first:
            kill(running, 0)
            kill(running, 1)
        running.fail_one()
        until(lambda: running.attempt.fault is not None, "the hold")
        yield running
    finally:
        for worker in sleepers.all:
            worker.kill()
        running.close()
        for worker in sleepers.all:
            with worker:
                worker.wait()


@pytest.fixture
def on_two_nodes(short_times: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningAttempt, PeerAgents]]:
    """One of two nodes, held, and the other node's agent."""
    monkeypatch.setattr(peer_agents, "LOOK_S", 0.02)
    with held(2) as running:
        other = PeerAgents(JobStore("127.0.0.1", running.store.port, 0), 1, 2)
        other.start()
        try:
            yield running, other
        finally:
            other.close()


def assert_the_other_does_not_know(running: RunningAttempt, other: PeerAgents) -> None:
    """The other node's agent has read what was published last, and knows of no fault."""
    assert running.attempt.peers is not None
    running.attempt.peers.publish_restart("what is published next")
    until(lambda: other.restarts, "what is published next")
    assert other.fault_begun_monotonic_s is None


def test_other_nodes_do_not_learn_of_a_fault_that_was_recovered_from(
    on_two_nodes: tuple[RunningAttempt, PeerAgents],
) -> None:
    """Its deadline would be that of their next one, hours later."""
    running, other = on_two_nodes
    running.agent.take(Replace(1, 0, 1))
    running.held.join(30.0)
    assert running.attempt.living() == [0, 1] and running.attempt.fault is None and running.line.refusals == []
    assert_the_other_does_not_know(running, other)


def test_a_lost_connection_to_the_controller_settles_nothing(
    on_two_nodes: tuple[RunningAttempt, PeerAgents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby may take over, and have the rank replaced: the first one's node was this one, and its controller died with rank 0."""
    running, other = on_two_nodes
    monkeypatch.setattr(attempt_module, "UNLED_S", 600.0)
    running.line.attached = False
    looks = running.line.looks
    until(lambda: running.line.looks > looks + 2, "the hold to look for a controller")
    running.line.attached = True
    running.agent.take(Replace(1, 0, 1))
    running.held.join(30.0)
    assert running.attempt.living() == [0, 1] and running.attempt.fault is None and running.line.refusals == []
    assert_the_other_does_not_know(running, other)


@pytest.mark.parametrize("first", [True, False])
def test_a_node_without_a_worker_waits_for_the_order_of_a_controller_that_leads_other_nodes(
    short_times: None, first: bool
) -> None:
    """Its only rank has ended, or all of them have, before the hold or in it: processes take their places, and the attempt continues."""
    with held(2, first) as running:
        if not first:
            kill(running, 0)
        for rank in (1, 0):
            assert running.held.is_alive() and running.attempt.fault is not None
            running.agent.take(Replace(rank, 0, 1))
        running.held.join(30.0)
        assert running.attempt.living() == [0, 1] and running.attempt.fault is None and running.line.refusals == []


def finish_a_step(running: RunningAttempt) -> None:
    running.store.set(progress_key(0), "1 ")
    until(lambda: running.attempt._controller.first_step == 1, "the first step to be known")


@pytest.mark.parametrize("how", ["ordered to exit", "no controller", "no controller before the first step"])
def test_a_node_without_a_worker_waits_no_longer_than_another_process_may_come(
    on_two_nodes: tuple[RunningAttempt, PeerAgents], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Without a controller less long than where ranks run, which could save, and not at all where nothing is trained so far. The other nodes learn
    when the fault began: it ends the attempt."""
    running, other = on_two_nodes
    monkeypatch.setattr(attempt_module, "UNLED_S", 600.0)
    monkeypatch.setattr(attempt_module, "UNPROTECTED_S", 0.3 if how == "no controller" else 600.0)
    if how == "no controller":
        finish_a_step(running)
    kill(running, 0)
    if how == "ordered to exit":
        running.line.sent_away_monotonic_s = 1.0
    else:
        running.line.attached = False
    running.held.join(30.0)
    assert not running.held.is_alive() and running.attempt.fault is not None
    running.attempt.end_workers(signal.SIGKILL, 0.0)
    until(lambda: other.fault_begun_monotonic_s is not None, "the begin of the fault")


def test_a_node_without_a_worker_waits_for_a_standby_to_take_over(
    on_two_nodes: tuple[RunningAttempt, PeerAgents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was its only one, and has died with its controller."""
    running, _ = on_two_nodes
    monkeypatch.setattr(attempt_module, "UNLED_S", 600.0)
    monkeypatch.setattr(attempt_module, "UNPROTECTED_S", 600.0)
    finish_a_step(running)
    running.line.attached = False
    kill(running, 0)
    looks = running.line.looks
    until(lambda: running.line.looks > looks + 2, "the hold to look for a controller")
    running.line.attached = True
    for rank in (0, 1):
        running.agent.take(Replace(rank, 0, 1))
    running.held.join(30.0)
    assert running.attempt.living() == [0, 1] and running.attempt.fault is None


@pytest.mark.parametrize(
    ("controller", "forker", "drained"), [(False, Sleepers(), False), (True, None, False), (True, Sleepers(), True)]
)
def test_a_node_without_a_worker_does_not_wait_where_no_process_can_come(
    short_times: None, caplog: pytest.LogCaptureFixture, controller: bool, forker: Sleepers | None, drained: bool
) -> None:
    """No rank has had a controller, the workers cannot be forked again, or the attempt is being ended."""
    running = RunningAttempt(60.0, controller=controller, nodes=2, forker=forker)
    try:
        if drained:
            running.attempt.drain()
        else:
            kill(running, 0)
            kill(running, 1)
        assert not running.attempt.hold()
        assert "waiting for the controller's order" not in caplog.text
    finally:
        running.close()


def test_the_job_of_a_lone_node_ends_with_its_last_worker(short_times: None) -> None:
    """No rank remains that a controller could lead."""
    with held(1) as running:
        kill(running, 0)
        running.held.join(30.0)
        assert not running.held.is_alive() and running.attempt.fault is not None and running.attempt.has_controller
        running.attempt.end_workers(signal.SIGKILL, 0.0)
        running.agent.take(Replace(1, 0, 1))
        until(lambda: running.line.refusals, "an answer")
        assert running.line.refusals == [(1, 1, "the attempt is being ended")]


def test_other_nodes_learn_when_a_fault_began_once_it_ends_the_attempt(
    on_two_nodes: tuple[RunningAttempt, PeerAgents],
) -> None:
    """No process is replaced from then on, also if a later controller orders it."""
    running, other = on_two_nodes
    running.line.sent_away_monotonic_s = 1.0
    until(lambda: other.fault_begun_monotonic_s is not None, "the begin of the fault")
    begun_s = running.attempt.deaths()[1].seen_monotonic_s
    assert other.fault_begun_monotonic_s == pytest.approx(begun_s, abs=5.0)
    running.line.sent_away_monotonic_s = None
    running.agent.take(Replace(1, 0, 1))
    until(lambda: running.line.refusals, "an answer")
    assert running.line.refusals == [(1, 1, "the other nodes know that this fault ends the attempt")]


def test_other_nodes_learn_when_a_fault_began_at_the_latest_at_the_end_of_the_attempt(
    on_two_nodes: tuple[RunningAttempt, PeerAgents],
) -> None:
    """Here where no controller has led the ranks for too long."""
    running, other = on_two_nodes
    running.line.attached = False
    running.held.join(30.0)
    assert running.attempt.living() == [0] and other.fault_begun_monotonic_s is None
    running.attempt.end_workers(signal.SIGKILL, 0.0)
    until(lambda: other.fault_begun_monotonic_s is not None, "the begin of the fault")
