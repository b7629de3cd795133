"""A rank that regroups: what it answers, what it refuses, what it reports meanwhile, and when its gate opens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, record, registration, report, share
from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    BoundaryReached,
    CloseGate,
    Connected,
    Disconnected,
    GateClosed,
    LocalFault,
    Log,
    OpenGate,
    RegroupDone,
    RegroupTraining,
    RollForwardDone,
    SaveStacks,
    TrainReturned,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from ttp.processor.core.state import RankMode
from ttp.proto.messages import (
    Cause,
    CauseKind,
    FaultReport,
    Finished,
    Freeze,
    Part,
    Phase,
    Registration,
    Regroup,
    Regrouped,
    StateReport,
    StepFailed,
    Thaw,
    Welcome,
    WriteOrder,
    Written,
)

CAUSE = Cause(CauseKind.EXITED, (3,), "signal SIGKILL")
WELCOME = Welcome(1, 3, 1.0, 3.0, "")
VACANT = 4
"""The freeze in which a process is started in another's place."""


def order(freeze_id: int = 1, step: int = 5, replaced: tuple[int, ...] = (3,)) -> Regroup:
    return Regroup(freeze_id, step, replaced, None)


def write_order(freeze_id: int = 1) -> WriteOrder:
    return WriteOrder(freeze_id, 5, "/a", f"iter_0000005_tmp_3_{freeze_id}_1", (Part("g1", 0, 2),))


def fault(kind: CauseKind) -> LocalFault:
    return LocalFault(Cause(kind, (1,), kind.value), "")


def frozen(**changed: Any) -> ProcessorBench:
    """Rank 1 has finished step 5, and its gate is closed."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze(phase=Phase.DONE, **changed)
    return rank


def regrouping() -> ProcessorBench:
    rank = frozen()
    rank.receive(order())
    return rank


def vacant(connected: bool = True) -> ProcessorBench:
    """A process in the place of rank 1's."""
    return ProcessorBench(connected=connected, vacant=VACANT)


def _standing(rank: ProcessorBench) -> RankMode:
    return rank.state.standing


def texts(rank: ProcessorBench) -> str:
    return " | ".join(log.text for log in only(rank.effects, Log))


# --- once, and answered as often as it is said ---


def test_an_order_is_carried_out_once_and_answered_as_often_as_it_is_said() -> None:
    rank = frozen()
    assert only(rank.receive(order()), RegroupTraining) == [RegroupTraining(order())]
    assert not rank.said(Regrouped)
    assert rank.receive(order()) == (), "it is being done"
    rank.take(RegroupDone(order()))
    assert rank.said(Regrouped) == [Regrouped(1, 1)]
    rank.receive(order())
    assert rank.said(Regrouped) == [Regrouped(1, 1)] and not only(rank.effects, RegroupTraining)


def test_a_rank_that_has_not_regrouped_by_the_next_freeze_saves_its_stacks() -> None:
    """It may stand in a collective that does not end: they say where. The same freeze, asked again, says nothing new."""
    rank = regrouping()
    assert not only(rank.receive(Freeze(1, CAUSE)), SaveStacks)
    assert rank.receive(Freeze(2, CAUSE))[-2:] == (
        SaveStacks("the regroup of freeze 1 was given up before this rank had done it"),
        CloseGate(2),
    )
    assert not only(rank.receive(Freeze(2, CAUSE)), SaveStacks)
    done = regrouping()
    done.take(RegroupDone(order()))
    assert not only(done.receive(Freeze(2, CAUSE)), SaveStacks)


def test_an_order_of_another_freeze_is_not_obeyed() -> None:
    rank = frozen()
    for freeze_id in (0, 2):
        assert rank.receive(order(freeze_id)) == ()
    assert rank.state.regrouping is None


def test_a_rank_in_training_does_not_regroup() -> None:
    rank = frozen()
    rank.receive(Thaw(1))
    assert rank.receive(order()) == () and rank.state.standing is RankMode.TRAINING


def test_the_end_of_what_was_not_ordered_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="rank 1: regrouped for freeze 1 without an order"):
        frozen().take(RegroupDone(order()))


def test_a_second_recovery_needs_a_second_order() -> None:
    rank = regrouping()
    rank.take(RegroupDone(order()))
    rank.receive(Thaw(1))
    rank.freeze(2, phase=Phase.DONE, step=6)
    assert only(rank.receive(order(2, 6)), RegroupTraining)


# --- what is refused ---


def refused(rank: ProcessorBench, what: Regroup) -> str:
    assert not only(rank.receive(what), RegroupTraining)
    (failure,) = rank.said(StepFailed)
    assert (failure.rank, failure.freeze_id, failure.stage, failure.tmp_name) == (1, what.freeze_id, "regroup", "")
    assert rank.state.regrouping is None and "regroup refused" in texts(rank)
    return failure.error


def test_an_order_that_takes_a_rank_for_another_is_refused() -> None:
    assert "got replaced ranks [1, 3], expected this one to be not among them" in refused(
        frozen(), order(replaced=(1, 3))
    )
    rank = vacant()
    assert "got replaced ranks [3], expected this one to be among them" in refused(rank, order(VACANT))


@pytest.mark.parametrize(
    ("changed", "step", "text"),
    [
        ({}, 6, "got step 5, closed True, torn False, expected step 6"),
        ({}, 4, "got step 5, closed True, torn False, expected step 4"),
        ({"torn": True}, 5, "got step 5, closed True, torn True, expected step 5"),
    ],
)
def test_a_rank_whose_state_is_another_one_refuses(changed: dict[str, Any], step: int, text: str) -> None:
    assert text in refused(frozen(**changed), order(step=step))


def test_what_is_ordered_while_the_training_thread_regroups_keeps_its_gate_shut() -> None:
    """The order to regroup took too long, and another round has the step written: the training thread ends the older order after all."""
    rank = regrouping()
    rank.freeze(2, phase=Phase.DONE)
    rank.receive(write_order(2))
    rank.take(RegroupDone(order()))
    rank.freeze(3, phase=Phase.DONE)
    assert rank.said(StateReport)[-1].final, "a write of freeze 2 may be under way"
    assert "its training cannot be entered again" in refused(rank, order(3))


def test_an_order_with_another_steps_record_is_refused() -> None:
    wrong = replace(order(), record=record(6))
    assert "invalid record: got step 6, expected step 5" in refused(frozen(), wrong)


def test_a_rank_whose_gate_is_not_closed_yet_refuses() -> None:
    rank = ProcessorBench()
    rank.freeze(phase=Phase.UPDATING, closed=False, state_step=5)
    assert "closed False" in refused(rank, order(step=rank.state.state_step))


def test_a_rank_that_writes_rolls_forward_or_has_finished_refuses() -> None:
    writes = frozen()
    writes.receive(write_order())
    rolls = ProcessorBench()
    rolls.freeze()
    rolls.roll()
    has_finished = frozen()
    has_finished.take(TrainReturned())
    for rank in (writes, rolls, has_finished):
        assert "its training cannot be entered again" in refused(rank, order())


def test_a_rank_that_has_written_regroups_under_the_same_freeze_alone() -> None:
    """Then the step is published already. Under a later freeze what an earlier one has ordered may still be under way."""
    writes = frozen()
    writes.receive(write_order())
    writes.take(WriteDone(write_order(), share(1)))
    writes.freeze(2, phase=Phase.DONE)
    assert writes.said(StateReport)[-1].final
    assert "its training cannot be entered again" in refused(writes, order(2))
    writes = frozen()
    writes.receive(write_order())
    writes.take(WriteDone(write_order(), share(1)))
    assert only(writes.receive(order()), RegroupTraining)
    writes.take(RegroupDone(order()))
    writes.freeze(2, phase=Phase.DONE)
    assert not writes.said(StateReport)[-1].final, "the next controller may thaw it"
    assert only(writes.receive(order(2)), RegroupTraining)


def test_a_rank_whose_training_returns_before_it_could_leave_does_not_regroup_any_more() -> None:
    """It stays as a holder: its gate does not open, and what is written instead it writes."""
    rank = regrouping()
    rank.take(TrainReturned())
    assert rank.said(Finished) == [Finished(1)]
    with pytest.raises(ProtocolError, match="regrouped for freeze 1, but its training has returned"):
        rank.take(RegroupDone(order()))
    assert not only(rank.receive(Thaw(1)), OpenGate) and reported(rank, 2).final
    assert only(rank.receive(write_order(2)), WriteShare)


# --- what it reports meanwhile ---


def reported(rank: ProcessorBench, freeze_id: int, **changed: Any) -> StateReport:
    rank.receive(Freeze(freeze_id, CAUSE))
    assert only(rank.effects, CloseGate) == [CloseGate(freeze_id)]
    rank.take(GateClosed(report(1, freeze_id, Phase.DONE, 5, **changed)))
    (said,) = rank.said(StateReport)
    return said


def test_a_rank_that_is_half_way_reports_that_its_gate_cannot_open() -> None:
    assert not reported(frozen(), 2).final
    rank = regrouping()
    assert reported(rank, 2).final
    rank.take(RegroupDone(order()))
    assert only(rank.effects, CloseGate) == [CloseGate(2)], "what was reported is no longer so"
    assert not rank.said(Regrouped), "the newer freeze did not ask for it"
    rank.take(GateClosed(report(1, 2, Phase.COMPUTE, 6)))
    assert [said.final for said in rank.said(StateReport)] == [False]
    rank.receive(Thaw(2))
    assert only(rank.effects, OpenGate)


def test_a_rank_that_failed_half_way_reports_that_its_gate_cannot_open() -> None:
    rank = regrouping()
    rank.take(WorkFailed(1, "regroup", "", "connection refused"))
    assert rank.said(StepFailed) == [StepFailed(1, 1, "regroup", "", "connection refused")]
    assert not only(rank.receive(Thaw(1)), OpenGate) and not only(rank.receive(order()), RegroupTraining)
    assert reported(rank, 2).final


def test_a_rank_that_failed_after_a_newer_freeze_says_so_under_the_old_number() -> None:
    rank = regrouping()
    reported(rank, 2)
    rank.take(WorkFailed(1, "regroup", "", "late"))
    assert [failure.freeze_id for failure in rank.said(StepFailed)] == [1]


def test_orders_to_write_are_taken_while_the_training_thread_regroups() -> None:
    """What stands in for a recovery that fails."""
    rank = regrouping()
    assert only(rank.receive(write_order()), WriteShare)
    rank.take(WriteDone(write_order(), share(1)))
    assert rank.said(Written)


# --- when its gate opens ---


def test_a_thaw_opens_a_rank_that_has_regrouped_and_no_other() -> None:
    rank = regrouping()
    assert not only(rank.receive(Thaw(1)), OpenGate)
    assert "has not regrouped, so its gate stays closed" in texts(rank) and _standing(rank) is RankMode.FROZEN
    rank.take(RegroupDone(order()))
    assert only(rank.receive(Thaw(1)), OpenGate) and _standing(rank) is RankMode.TRAINING
    assert "all ranks have regrouped, training continues" in texts(rank)


def test_a_later_false_alarm_is_logged_as_one() -> None:
    rank = regrouping()
    rank.take(RegroupDone(order()))
    rank.receive(Thaw(1))
    rank.freeze(2, phase=Phase.DONE, step=6)
    rank.receive(Thaw(2))
    assert "freeze 2 was a false alarm, training continues" in texts(rank)


def test_a_rank_that_was_rolled_forward_opens_once_it_has_regrouped() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.roll()
    rank.take(RollForwardDone(1, 5))
    assert not only(rank.receive(Thaw(1)), OpenGate) and "was rolled forward" in texts(rank)
    rank.receive(order())
    assert not only(rank.receive(Thaw(1)), OpenGate)
    rank.take(RegroupDone(order()))
    assert only(rank.receive(Thaw(1)), OpenGate)


# --- faults ---


def test_a_fault_of_the_groups_that_are_gone_is_forgotten_and_every_other_one_is_not() -> None:
    rank = frozen()
    rank.take(fault(CauseKind.PEER_ERROR))
    rank.receive(order())
    rank.take(fault(CauseKind.PREEMPTED))
    rank.take(RegroupDone(order()))
    rank.receive(Thaw(1))
    assert [said.cause.kind for said in rank.said(FaultReport)] == [CauseKind.PREEMPTED]
    assert rank.state.answer_by < float("inf"), "a controller that does not react to it is not waited for without end"


def test_what_failed_once_is_answered_so_again() -> None:
    """The answer was lost: the order comes again with a heartbeat."""
    rank = regrouping()
    rank.take(WorkFailed(1, "regroup", "", "connection refused"))
    assert [said.error for said in rank.said(StepFailed)] == ["connection refused"]
    rank.receive(order())
    assert [(said.stage, said.error) for said in rank.said(StepFailed)] == [("regroup", "connection refused")]


def test_a_rank_that_waited_behind_a_step_for_anothers_notice_trains_after_a_recovery() -> None:
    rank = frozen()
    rank.take(BoundaryReached(5))
    assert rank.state.parked
    rank.receive(order())
    rank.take(RegroupDone(order()))
    assert not rank.state.parked


def test_a_record_that_is_not_the_one_that_this_rank_holds_is_refused() -> None:
    rank = frozen()
    rank.state = replace(rank.state, records=(record(5),))
    rank.receive(replace(order(), record=replace(record(5), grad_norm=77.0)))
    assert "invalid record of step 5" in rank.said(StepFailed)[0].error


@pytest.mark.parametrize("kind", [CauseKind.PEER_ERROR, CauseKind.EXCEPTION])
def test_a_recovered_rank_has_no_fault(kind: CauseKind) -> None:
    rank = frozen()
    rank.take(fault(kind))
    rank.receive(order())
    rank.take(RegroupDone(order()))
    rank.receive(Thaw(1))
    assert not rank.said(FaultReport) and rank.state.answer_by == float("inf")
    rank.take(Disconnected("reset"))
    rank.tick(after=1.0)
    rank.take(Connected(registration(1)))
    assert not rank.said(FaultReport)


# --- a process in another's place ---


def test_a_vacant_process_registers_as_one_and_is_closed_from_the_start() -> None:
    rank = vacant(connected=False)
    state = rank.state
    assert (state.standing, state.freeze_id, state.closed, state.torn) == (RankMode.FROZEN, VACANT, True, True)
    rank.tick()
    rank.take(Connected(registration(1)))
    assert [said.vacant for said in rank.said(Registration)] == [VACANT]
    assert not only(rank.receive(Thaw(VACANT)), OpenGate)


def test_a_vacant_process_writes_nothing_and_reports_that_its_gate_cannot_open() -> None:
    rank = vacant()
    assert not only(rank.receive(write_order(VACANT)), WriteShare)
    assert "holds no shard yet" in rank.said(StepFailed)[0].error
    assert reported(rank, VACANT + 1, torn=True).final


def test_a_vacant_process_is_a_rank_like_any_other_once_it_is_filled() -> None:
    rank = vacant()
    what = order(VACANT, replaced=(1,))
    assert only(rank.receive(what), RegroupTraining)
    rank.take(RegroupDone(what))
    assert rank.said(Regrouped) == [Regrouped(1, VACANT)]
    assert (rank.state.state_step, rank.state.torn, rank.state.vacant) == (5, False, False)
    assert only(rank.receive(Thaw(VACANT)), OpenGate)
    rank.take(Disconnected("reset"))
    rank.tick(after=1.0)
    rank.take(Connected(registration(1)))
    assert [said.vacant for said in rank.said(Registration)] == [0]
    assert not reported(rank, VACANT + 1).final
    assert only(rank.receive(write_order(VACANT + 1)), WriteShare)


def test_an_ordinary_process_registers_as_a_holder() -> None:
    rank = ProcessorBench(connected=False)
    rank.tick()
    rank.take(Connected(registration(1)))
    assert [said.vacant for said in rank.said(Registration)] == [0]
