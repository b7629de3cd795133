"""A rank that is preempted: the step in flight first, then the dump, then an exit status of its own."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, only, registration
from ttp.controller.core.facts.state import Stage
from ttp.processor.core.events import (
    BoundaryReached,
    CloseGate,
    Connected,
    Disconnected,
    ExitProcess,
    Noticed,
    SaveStacks,
    Send,
    Tick,
    TrainReturned,
)
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    EXIT_CODE_PREEMPTED,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Freeze,
    Heartbeat,
    Phase,
    Thaw,
    Welcome,
)

SIGTERM = Noticed("SIGTERM")


def reported(rank: ProcessorBench) -> list[str]:
    return [report.cause.text for report in rank.said(FaultReport) if report.cause.kind is CauseKind.PREEMPTED]


def test_a_notice_is_reported_at_the_end_of_the_step_in_flight() -> None:
    rank = ProcessorBench(1)
    rank.take(SIGTERM)
    assert not reported(rank), "the step goes on"
    rank.take(BoundaryReached(7), after=0.4)
    assert reported(rank) == ["SIGTERM; step 7 is finished"]
    assert rank.said(FaultReport)[0].cause.ranks == (1,)


def test_a_step_that_does_not_end_in_time_is_not_waited_for() -> None:
    rank = ProcessorBench(1)
    rank.take(SIGTERM)
    assert rank.deadline() == rank.now + rank.state.settings.boundary_s
    rank.tick(after=4.9)
    assert not reported(rank)
    rank.tick(after=0.1)
    assert reported(rank) == ["SIGTERM; the step in flight did not end within 5 s"]
    rank.take(BoundaryReached(7))
    assert not reported(rank), "it is reported once"


def test_a_second_notice_does_not_wait() -> None:
    rank = ProcessorBench(1)
    rank.take(SIGTERM)
    rank.take(SIGTERM, after=0.5)
    assert reported(rank) == ["SIGTERM; sent twice"]
    rank.take(SIGTERM)
    assert not reported(rank)


@pytest.mark.parametrize("after", ["finished", "frozen"])
def test_a_rank_without_a_step_in_flight_reports_at_once(after: str) -> None:
    rank = ProcessorBench(1)
    if after == "finished":
        rank.take(TrainReturned())
    else:
        rank.freeze()
    rank.take(SIGTERM)
    assert reported(rank) == ["SIGTERM; no step is in flight here"]


def test_a_rank_that_was_not_preempted_only_waits_at_the_boundary() -> None:
    rank = ProcessorBench(1)
    rank.take(BoundaryReached(7))
    assert rank.effects == ()


@pytest.mark.parametrize("long_gone", [False, True])
def test_a_rank_at_the_boundary_does_not_wait_for_ever_without_a_controller(long_gone: bool) -> None:
    """Its training thread never goes on; a controller that is long gone has its time from the boundary on."""
    rank = ProcessorBench(1)
    rank.receive(Welcome(1, 3, 1.0, 3.0, "any 1 of 4 ranks"))
    if not long_gone:
        rank.take(BoundaryReached(7))
    rank.take(Disconnected("reset"))
    if long_gone:
        rank.wait(60.0)
        rank.take(BoundaryReached(7))
    assert not only(rank.wait(14.8), ExitProcess)
    (leaving,) = only(rank.wait(0.4), ExitProcess)
    assert leaving.code == 75 and "another rank's notice to leave" in leaving.reason


def test_a_notice_is_reported_again_on_a_new_stream() -> None:
    rank = ProcessorBench(1)
    rank.take(SIGTERM)
    rank.take(Disconnected("reset"))
    rank.take(BoundaryReached(7))
    assert not only(rank.effects, Send)
    rank.tick(after=1.0)
    rank.take(Connected(registration(1)))
    assert reported(rank) == ["SIGTERM; step 7 is finished"]


def test_a_false_alarm_in_between_does_not_take_the_notice_back() -> None:
    rank = ProcessorBench(1)
    rank.take(SIGTERM)
    rank.freeze(1)
    rank.receive(Thaw(1))
    rank.take(BoundaryReached(7))
    assert reported(rank) == ["SIGTERM; step 7 is finished"]


def test_only_a_preempted_rank_exits_with_a_status_of_its_own() -> None:
    for notice, expected in ((True, EXIT_CODE_PREEMPTED), (False, EXIT_CODE_PERSISTED)):
        rank = ProcessorBench(1)
        if notice:
            rank.take(SIGTERM)
        rank.freeze()
        rank.receive(Exit(EXIT_CODE_PERSISTED, "step 7 is saved"))
        assert [effect.code for effect in only(rank.effects, ExitProcess)] == [expected]


def test_a_preempted_rank_of_a_healthy_job_is_dumped_and_all_leave() -> None:
    job = ControllerBench()
    job.say(FaultReport(1, Cause(CauseKind.PREEMPTED, (1,), "SIGTERM; step 7 is finished"), ""))
    job.all_report(7, phase=Phase.DONE)
    assert job.logged("decided")[0]["step"] == 7 and job.logged("decided")[0]["roll_forward"] == ()
    assert job.at(Stage.WRITING) and sorted(job.orders()) == [0, 1, 2, 3]


def test_a_hangs_freeze_saves_the_stacks_before_the_gate_closes_and_once() -> None:
    rank = ProcessorBench(1)
    hung = Cause(CauseKind.HUNG, (2,), "no rank has progressed for 60 s")
    rank.receive(Freeze(1, hung))
    assert rank.effects[-2:] == (SaveStacks(hung.text), CloseGate(1))
    rank.receive(Freeze(2, hung))
    assert not only(rank.effects, SaveStacks)


def test_other_freezes_save_no_stacks() -> None:
    rank = ProcessorBench(1)
    rank.receive(Freeze(1, Cause(CauseKind.EXITED, (0,), "signal SIGKILL")))
    assert not only(rank.effects, SaveStacks)


def test_heartbeats_say_whether_the_rank_waits_or_pauses() -> None:
    rank = ProcessorBench(1)
    rank.receive(Welcome(1, 1, 1.0, 3.0, ""))
    rank.take(Tick(Phase.COMPUTE, 4, waiting=True))
    assert rank.said(Heartbeat) == [Heartbeat(1, Phase.COMPUTE, 4, True, False)]
    rank.take(Tick(Phase.DONE, 4, paused=True), after=1.0)
    assert rank.said(Heartbeat) == [Heartbeat(1, Phase.DONE, 4, False, True)]
