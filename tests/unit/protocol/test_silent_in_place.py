"""A rank that is silent although its agent is there: the step is published, then its agent ends its process, and the others keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, report
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_published_first import IN_PLACE_S, incident, publish
from tests.unit.protocol.test_regroup import all_regroup, job
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import (
    NO_PROCESS,
    CauseKind,
    Exit,
    Heartbeat,
    Phase,
    Regroup,
    Replace,
    Thaw,
    Upward,
    Vouch,
    WriteOrder,
)  # fmt: skip

LEASE_S, OTHERS = 3.0, (0, 1, 2)
STOPPED = Vouch((3,), (NO_PROCESS,))
"""Rank 3's agent sees its process, and does not see it run."""


def time_passes(bench: ControllerBench, seconds: float, *vouches: Vouch) -> None:
    for _ in range(int(seconds * 2)):
        bench.say(*vouches)
        bench.wait(0.5, senders=OTHERS)


def silent(*vouches: Vouch, beside: Upward | None = None) -> ControllerBench:
    """Rank 3 has sent nothing for a lease, and the others have reported."""
    bench = job(lease_s=LEASE_S, in_place_s=IN_PLACE_S)
    time_passes(bench, LEASE_S, *vouches)
    if beside is not None:
        bench.say(beside)
    bench.all_report(7, ranks=OTHERS)
    assert bench.logged("death_seen")[-1]["kind"] == "silent" and bench.at(Stage.WRITING)
    return bench


def written(bench: ControllerBench) -> ControllerBench:
    bench.all_write(bench.orders())
    assert bench.at(Stage.PUBLISHING)
    return bench


def test_its_process_is_ended_once_the_step_is_on_disk() -> None:
    """It may hold what the others hold, and one of these may die."""
    bench = silent(STOPPED)
    assert bench.sent(WriteOrder) and not bench.sent(Regroup) and not bench.said_to_agents(Replace)
    publish(written(bench))
    assert bench.at(Stage.REGROUPING) and not bench.sent(Exit)
    assert bench.said_to_agents(Replace) == {"host3": [Replace(3, 103, 1)]}
    order = bench.sent(Regroup)[0]
    assert order == Regroup(1, 6, (3,), order.record, saved=True) and sorted(bench.sent(Regroup)) == [0, 1, 2]
    bench.close(3)
    bench.say(killed(3))
    all_regroup(bench)
    assert bench.at(Stage.RUNNING) and sorted(bench.sent(Thaw)) == [0, 1, 2, 3]
    found = incident(bench)
    assert (found.kind, found.in_place, found.steps_lost) == ("silent", True, 0) and found.saved is not None


def test_one_that_runs_again_meanwhile_does_not_count_any_more() -> None:
    bench = silent(STOPPED)
    publish(written(bench))
    bench.say(Heartbeat(3, Phase.COMPUTE, 7), replace(report(3, 1, Phase.COMPUTE, 7)))
    assert bench.at(Stage.REGROUPING) and not bench.sent(Thaw)
    bench.close(3)
    all_regroup(bench)
    assert bench.at(Stage.RUNNING) and bench.state.members.alive == 4


def test_one_that_was_ended_and_one_that_is_silent_are_replaced_together() -> None:
    bench = job(((0, 1, 2, 3),), lease_s=LEASE_S, in_place_s=IN_PLACE_S)
    time_passes(bench, LEASE_S, STOPPED)
    bench.say(killed(1))
    bench.all_report(7, ranks=(0, 2))
    publish(written(bench))
    assert bench.said_to_agents(Replace) == {"host1": [Replace(1, 0, 1)], "host3": [Replace(3, 103, 1)]}


def lost_agent() -> ControllerBench:
    """Nothing was received from the agent either for a lease: the node may be lost, and the network with it."""
    return silent()


def hangs_too() -> ControllerBench:
    return silent(STOPPED, beside=fault(2, CauseKind.HUNG))


@pytest.mark.parametrize("make", [lost_agent, hangs_too])
def test_else_all_leave_when_it_is_published(make: Callable[[], ControllerBench]) -> None:
    bench = written(make())
    publish(bench)
    assert bench.at(Stage.EXITING) and bench.sent(Exit) and not bench.said_to_agents(Replace)


def test_an_agent_that_falls_silent_while_it_is_written_is_not_asked() -> None:
    bench = written(silent(STOPPED))
    time_passes(bench, LEASE_S)
    publish(bench)
    assert bench.at(Stage.EXITING) and not bench.said_to_agents(Replace)
