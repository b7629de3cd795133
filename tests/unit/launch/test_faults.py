"""When a fault begins, whose deadline counts, and when it is over though its attempt is not."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_a_fault_that_began_on_another_node_has_that_ones_deadline(clock: Clock) -> None:
    published: list[float] = []
    peers = SimpleNamespace(fault_begun_monotonic_s=980.0, publish_fault=published.append)
    fault = Faults(OT_S, peers, clock).begin("", deaths(990.0))  # type: ignore[arg-type]
    assert fault.begun_monotonic_s == 980.0 and published == [980.0]
