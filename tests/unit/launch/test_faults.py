"""When a fault begins, whose deadline counts, and when it is over though its attempt is not."""

from __future__ import annotations

import pytest

from ttp.launch.attempts.faults import Faults
from ttp.launch.watch.death_watch import Death

OT_S = 60.0


def deaths(seen_s: float, rank: int = 1) -> dict[int, Death]:
    return {rank: Death(rank, 71, 0.0, seen_s, "signal SIGKILL", -9, True)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock: Clock) -> Faults:
    return Faults(OT_S, None, clock)


def test_a_fault_has_one_deadline_however_often_it_is_asked_for(faults: Faults, clock: Clock) -> None:
    fault = faults.begin("", deaths(990.0))
    assert fault.cause == "rank 1 (pid 71) ended: signal SIGKILL"
    assert (fault.begun_monotonic_s, fault.deadline_monotonic_s) == (990.0, 990.0 + OT_S)
    clock.now_s += 5.0
    assert faults.begin("another reason", {}) is faults.current is fault


def test_a_recovery_that_fails_is_the_same_fault(faults: Faults) -> None:
    """Also where its first process was replaced before the agent's main thread had seen it end."""
    faults.replaced(990.0)
    faults.replaced(993.0)
    assert faults.current is None
    fault = faults.begin("", deaths(1000.0, rank=2))
    assert (fault.begun_monotonic_s, fault.deadline_monotonic_s) == (990.0, 990.0 + OT_S)


def test_a_failure_after_the_gates_have_opened_is_another_fault(faults: Faults) -> None:
    faults.begin("", deaths(990.0))
    faults.replaced(990.0)
    faults.recovered()
    faults.over()
    assert faults.current is None and faults.begin("", deaths(1000.0)).begun_monotonic_s == 1000.0


@pytest.mark.parametrize(("passed_s", "begun_s"), [(OT_S - 11.0, 990.0), (OT_S - 10.0, 2000.0)])
def test_a_fault_is_over_at_its_deadline_if_the_thaw_was_lost(
    faults: Faults, clock: Clock, passed_s: float, begun_s: float
) -> None:
    """Else the next one, hours later, would have no time."""
    faults.begin("", deaths(990.0))
    faults.replaced(990.0)
    faults.recovered()
    clock.now_s += passed_s
    assert faults.begin("", deaths(2000.0)).begun_monotonic_s == begun_s


def test_of_faults_whose_thaw_was_lost_the_last_one_counts(faults: Faults, clock: Clock) -> None:
    faults.replaced(990.0)
    clock.now_s = 2000.0
    faults.replaced(1999.0)
    assert faults.begin("", deaths(2000.0)).begun_monotonic_s == 1999.0


def test_a_notice_has_its_own_time(faults: Faults) -> None:
    """The ranks that receive SIGTERM save from then on."""
    faults.replaced(990.0)
    assert faults.begin("the agent is shutting down", {}).begun_monotonic_s == 1000.0


class Peers:
    """The other nodes' agents, and what was published to them."""

    def __init__(self, begun_s: float | None = None) -> None:
        self.fault_begun_monotonic_s = begun_s
        self.published: list[float] = []

    def publish_fault(self, begun_s: float) -> None:
        self.published.append(begun_s)


def test_a_fault_that_began_on_another_node_has_that_ones_deadline(clock: Clock) -> None:
    """Also where that node has published it later, as it did not know that it would end the attempt."""
    peers = Peers(980.0)
    faults = Faults(OT_S, peers, clock)  # type: ignore[arg-type]
    assert faults.begin("", deaths(990.0)).begun_monotonic_s == 980.0
    late = Peers()
    faults = Faults(OT_S, late, clock)  # type: ignore[arg-type]
    fault = faults.begin("", deaths(990.0))
    assert faults.left_s(fault) == OT_S - 10.0
    late.fault_begun_monotonic_s = 970.0
    assert faults.left_s(fault) == OT_S - 30.0
    clock.now_s += 100.0
    assert faults.left_s(fault) == 0.0


def test_a_fault_is_published_once_and_only_if_it_ends_the_attempt(clock: Clock) -> None:
    """One that was recovered from is not: another node's next one, hours later, would have no time."""
    peers = Peers()
    faults = Faults(OT_S, peers, clock)  # type: ignore[arg-type]
    faults.begin("", deaths(990.0))
    faults.replaced(990.0)
    faults.recovered()
    faults.publish()
    assert peers.published == []
    faults.begin("", deaths(995.0))
    faults.publish()
    faults.publish()
    assert peers.published == [990.0]


def test_a_fault_without_a_death_is_published_at_once(clock: Clock) -> None:
    peers = Peers()
    Faults(OT_S, peers, clock).begin("the set of nodes changes", {})  # type: ignore[arg-type]
    assert peers.published == [1000.0]
