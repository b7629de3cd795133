"""What a controller shows to operators: made of its state, and small enough for one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from tests.unit.protocol.bench import HALVES, ControllerBench, registration
from ttp.controller.core.facts.state import Restoring, Stage
from ttp.controller.core.facts.status import MOST_NAMED, Reported, job_status
from ttp.proto.codec import MOST_TEXT, encode_status
from ttp.proto.messages import Cause, CauseKind, FaultReport, Heartbeat, Phase, WorkerExit
from ttp.proto.status import CoverageStatus, JobStatus, PaceStatus
from ttp.proto.transport import MAX_MESSAGE_BYTES

ALONE = ((0, 2), (1,))
"""Rank 1 has a shard that no other rank has."""


def status_of(
    bench: ControllerBench,
    beats: Mapping[int, Heartbeat] = MappingProxyType({}),
    times: Mapping[int, float] = MappingProxyType({}),
    later_s: float = 0.0,
) -> JobStatus:
    return job_status(bench.state, Reported(beats, times), None, 7, bench.now + later_s)


def test_before_all_have_registered_no_coverage_and_no_pace_is_known() -> None:
    bench = ControllerBench(assembled=False)
    bench.say(registration(1))
    status = status_of(bench, later_s=2.5)
    assert status.coverage == CoverageStatus() and status.pace == PaceStatus(limit_s=1800.0) and status.fault is None
    assert [rank.silent_s for rank in status.ranks] == [None, 2.5, None, None]
    assert status.save_dirs == ("/a", "/b")


def test_the_pace_is_what_the_ranks_have_measured() -> None:
    bench = ControllerBench(hang_floor_s=10.0)
    for step in range(1, 12):
        beats = [Heartbeat(rank, Phase.COMPUTE, step + 1, steps=step, step_times_s=(0.1 * step,)) for rank in range(4)]
        bench.say(*beats, after=0.1)
    status = status_of(bench, later_s=3.0)
    pace = status.pace
    assert (pace.steps, pace.front) == (11, 12)
    assert pace.step_s == pytest.approx(0.6) and pace.slow_s == pytest.approx(1.0)
    assert pace.still_s == pytest.approx(3.0) and pace.limit_s == bench.state.pace.limit_s


def test_a_rank_has_its_last_heartbeat_its_time_and_its_silence() -> None:
    bench = ControllerBench(lease_s=3.0)
    beat = Heartbeat(2, Phase.READY, 5, waiting=True, paused=True)
    bench.say(beat, after=1.0)
    bench.close(0)
    status = status_of(bench, beats={2: beat}, times={2: 0.25}, later_s=0.5)
    rank = status.ranks[2]
    assert (rank.phase, rank.step, rank.waiting, rank.paused, rank.step_s) == (Phase.READY, 5, True, True, 0.25)
    assert rank.silent_s == 0.5 and not rank.suspect
    assert status.ranks[0].suspect and status.ranks[3].silent_s == 1.5


def test_coverage_counts_live_holders_alone() -> None:
    """Two halves of four: each death of a partner is fatal once the other is dead."""
    bench = ControllerBench()
    assert status_of(bench).coverage == CoverageStatus(groups=2, least=2)
    bench.say(WorkerExit(0, 100, "signal SIGKILL", 0.0))
    one_dead = status_of(bench).coverage
    assert (one_dead.least, one_dead.uncovered, one_dead.fatal_ranks, one_dead.fatal_nodes) == (1, 0, (2,), ("host2",))
    assert (one_dead.fatal_rank_count, one_dead.fatal_node_count) == (1, 1)
    bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
    both = status_of(bench).coverage
    assert (both.least, both.uncovered, both.fatal_ranks) == (0, 1, ())


def test_a_shard_of_one_rank_alone_is_named() -> None:
    assert status_of(ControllerBench(ALONE)).coverage.fatal_ranks == (1,)


def test_a_fault_has_its_age_and_its_causes_and_each_rank_its_own() -> None:
    """The ranks that a cause names are those of the fault: each rank's entry names that rank alone."""
    bench = ControllerBench()
    bench.say(FaultReport(1, Cause(CauseKind.EXCEPTION, (1,), "RuntimeError: no"), ""))
    assert bench.at(Stage.FREEZING)
    status = status_of(bench, later_s=2.0)
    assert status.fault is not None and status.fault.age_s == 2.0
    assert [(cause.kind, cause.ranks) for cause in status.fault.causes] == [(CauseKind.EXCEPTION, (1,))]
    assert status.ranks[1].cause == Cause(CauseKind.EXCEPTION, (1,), "RuntimeError: no")
    assert [rank.rank for rank in status.ranks if rank.cause is not None] == [1]


def test_a_hang_that_the_reports_must_confirm_is_shown_as_its_suspicion() -> None:
    bench = ControllerBench()
    bench.say(FaultReport(1, Cause(CauseKind.EXCEPTION, (1,), "no"), ""))
    fault = bench.state.fault
    assert fault is not None
    unproven = Cause(CauseKind.HUNG, (2,), "no rank has progressed")
    bench.state = bench.state.with_fault(replace(fault, causes=(), unproven=unproven))
    shown = status_of(bench).fault
    assert shown is not None and shown.causes == (unproven,)


def test_a_rank_that_does_not_answer_an_order_holds_nothing() -> None:
    bench = ControllerBench()
    bench.say(FaultReport(1, Cause(CauseKind.EXCEPTION, (1,), "no"), ""))
    fault = bench.state.fault
    assert fault is not None
    bench.state = bench.state.with_fault(replace(fault, stuck=frozenset({0})))
    assert status_of(bench).coverage.fatal_ranks == (2,)


def test_standbys_are_those_that_run_and_take_over_from_this_controller() -> None:
    bench = ControllerBench(assembled=False, address="b:2/5", standby=1)
    bench.state = replace(
        bench.state, successors=("a:1/4", "b:2/5", "c:3/6", "d:4/7"), restoring=Restoring(frozenset({"c:3/6"}))
    )
    status = status_of(bench)
    assert (status.address, status.standbys, status.place) == ("b:2/5", ("d:4/7",), 1)


def test_ten_thousand_dead_ranks_of_long_names_fit_into_one_message() -> None:
    """Each has the longest text, which is escaped, and all are named by one cause: in four bytes a character."""
    world = 10_000
    bench = ControllerBench(HALVES, assembled=False, world_size=4)
    everyone = Cause(CauseKind.AGENT_LOST, tuple(range(world)), "\udc80" * MOST_TEXT)
    member = replace(
        bench.state.members.table[0],
        registration=registration(0, host="\U0001f525" * 255, pid=2**31),
        received_at=1.0,
        dead=everyone,
    )
    table = type(bench.state.members.table).filled(world, member)
    bench.state = replace(
        bench.state,
        members=replace(bench.state.members, table=table),
        settings=replace(bench.state.settings, world_size=world),
    )
    beats = {rank: Heartbeat(rank, Phase.DONE, 2**53, True, True) for rank in range(world)}
    status = status_of(bench, beats=beats, times=dict.fromkeys(range(world), 0.1), later_s=2.0)
    assert len(status.ranks) == world and all(rank.cause is not None for rank in status.ranks)
    assert encode_status(status).ByteSize() < MAX_MESSAGE_BYTES
    assert len(status.coverage.fatal_ranks) <= MOST_NAMED
