"""Which controller a rank turns to: the first, then the standbys in order, and round again after a pause."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, registration
from ttp.processor.core.events import Connect, Connected, Disconnected, ProcessorSettings
from ttp.processor.core.machine import initial
from ttp.processor.core.state import LinkState
from ttp.proto.messages import Heartbeat, KeepAlive, Registration, Welcome

LEASE_S = 3.0
WELCOME = Welcome(1, 1, 1.0, LEASE_S, "any 1 of 4 ranks", ("c1", "c2"), 2)


def rank() -> ProcessorBench:
    """Return a welcomed rank that knows two standbys."""
    bench = ProcessorBench()
    bench.state = initial(ProcessorSettings(1, address="c0"), 0.0)
    bench.tick()
    assert only(bench.effects, Connect) == [Connect("c0")]
    bench.take(Connected(registration(1)))
    bench.receive(WELCOME)
    return bench


def tried(bench: ProcessorBench) -> list[str]:
    return [connect.address for connect in only(bench.effects, Connect)]


def test_the_first_registration_names_no_controllers_and_a_later_one_all() -> None:
    """And how many shard groups the job has: the next controller learns it from the ranks alone."""
    bench = rank()
    bench.take(Disconnected("gone", refused=True))
    bench.tick()
    bench.take(Connected(registration(1)))
    (said,) = bench.said(Registration)
    assert (said.controllers, said.job_groups) == (("c0", "c1", "c2"), 2)
    fresh = ProcessorBench(connected=False)
    fresh.tick()
    fresh.take(Connected(registration(1)))
    (said,) = fresh.said(Registration)
    assert (said.controllers, said.job_groups) == ((), 0)


def test_one_that_refuses_is_followed_by_the_next_at_once() -> None:
    bench = rank()
    for address in ("c1", "c2"):
        bench.take(Disconnected("refused", refused=True))
        assert bench.deadline() == bench.now
        bench.tick()
        assert tried(bench) == [address]


def test_before_a_new_round_through_the_list_there_is_a_pause() -> None:
    bench = rank()
    for _ in range(2):
        bench.take(Disconnected("refused", refused=True))
        bench.tick()
    bench.take(Disconnected("refused", refused=True))
    bench.tick()
    assert tried(bench) == []
    bench.tick(after=0.25)
    assert tried(bench) == ["c0"]


def test_a_stream_that_broke_is_opened_to_the_same_controller_for_a_lease() -> None:
    bench = rank()
    bench.now = 1.0
    bench.receive(KeepAlive())
    bench.take(Disconnected("broke"))
    for _ in range(9):
        bench.tick(after=0.3)
        assert tried(bench) == ["c0"]
        bench.take(Disconnected("timed out"))
    bench.tick(after=0.4)
    bench.take(Disconnected("timed out"))
    bench.tick()
    assert tried(bench) == ["c1"]


def test_a_silent_controller_is_left_after_a_lease() -> None:
    """Every message is a sign of life; a rank that was itself stopped gives it a lease more."""
    bench = rank()
    for _ in range(5):
        bench.tick(after=1.0)
        bench.receive(KeepAlive())
    for _ in range(5):
        bench.tick(after=0.5)
        assert tried(bench) == []
    bench.tick(after=0.6)
    assert tried(bench) == ["c1"] and bench.state.link is LinkState.CONNECTING


def test_to_the_moment_a_lease_is_enough_for_a_controller_that_cannot_be_reached() -> None:
    bench = rank()
    bench.take(Disconnected("broke"), after=1.0)
    bench.tick(after=0.5)
    bench.take(Disconnected("timed out"), after=LEASE_S - 0.5)
    bench.tick()
    assert tried(bench) == ["c1"]


def test_to_a_controller_that_was_left_no_heartbeat_is_sent() -> None:
    """Nor to the next one, before it has welcomed this rank."""
    bench = rank()
    bench.tick(after=1.0)
    bench.tick(after=1.0)
    bench.tick(after=LEASE_S - 2.0)
    assert tried(bench) == ["c1"] and not bench.said(Heartbeat)
    for _ in range(4):
        bench.tick(after=0.5)
        assert not bench.said(Heartbeat)


def test_a_rank_that_knows_one_controller_waits_for_its_answer_as_long_as_the_driver_does() -> None:
    """There is no other to go on to."""
    bench = ProcessorBench()
    bench.receive(Welcome(1, 1, 1.0, LEASE_S, ""))
    bench.take(Disconnected("broke"))
    bench.tick(after=0.5)
    for _ in range(20):
        bench.tick(after=0.5)
        assert tried(bench) == [] and bench.state.link is LinkState.CONNECTING


def test_a_rank_that_was_stopped_itself_does_not_blame_the_controller() -> None:
    bench = rank()
    bench.receive(KeepAlive(), after=1.0)
    bench.tick(after=60.0)
    assert tried(bench) == [] and bench.state.link is LinkState.UP


@pytest.mark.parametrize(("late_s", "stopped"), [(1.4, False), (1.5, False), (1.6, True)])
def test_a_driver_that_comes_one_and_a_half_heartbeats_later_was_stopped(late_s: float, stopped: bool) -> None:
    """Of its absence a heartbeat counts: the controller was silent for 2.9 s of its lease of 3."""
    bench = rank()
    bench.tick(after=0.9)
    bench.tick(after=1.0)
    bench.tick(after=late_s)
    assert (bench.state.link is LinkState.UP) is stopped


def test_a_standby_that_does_not_answer_is_left_after_a_lease_too() -> None:
    bench = rank()
    bench.take(Disconnected("refused", refused=True))
    bench.tick()
    assert tried(bench) == ["c1"]
    for _ in range(5):
        bench.tick(after=0.5)
        assert tried(bench) == []
    bench.tick(after=0.6)
    assert tried(bench) == ["c2"]


@pytest.mark.parametrize("known", [("c1",), ("c1", "c2"), ("c1", "c2", "c3")])
def test_a_list_that_grows_keeps_its_order(known: tuple[str, ...]) -> None:
    """A later welcome never takes a standby away."""
    bench = rank()
    bench.receive(Welcome(1, 1, 1.0, LEASE_S, "", known))
    assert bench.state.successors == (*("c1", "c2"), *known[2:])
    assert bench.state.job_groups == 2, "a controller that does not know the number does not unlearn it"
