"""A processor: what it says, what it asks of its process, and when it gives up."""

from __future__ import annotations

from math import inf

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, record, registration, report, share
from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    ApplyUpdate,
    CloseGate,
    Connect,
    Connected,
    Disconnected,
    ExitProcess,
    GateClosed,
    LocalFault,
    PublishCheckpoint,
    PublishDone,
    ReleaseTraining,
    RollForwardDone,
    Tick,
    TrainReturned,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from ttp.processor.core.state import RankMode
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Part,
    Phase,
    Progress,
    Published,
    PublishOrder,
    Registration,
    Release,
    RolledForward,
    RollForward,
    StateReport,
    StepFailed,
    Welcome,
    WriteOrder,
    Written,
)

CAUSE = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
WELCOME = Welcome(1, 3, 1.0, 3.0, "any 1 of 4 ranks")
ERROR = LocalFault(Cause(CauseKind.EXCEPTION, (1,), "ValueError: bad batch"), "traceback")


def write_order(freeze_id: int = 1, tmp: str = "", index: int = 0) -> WriteOrder:
    return WriteOrder(freeze_id, 5, "/a", tmp or f"iter_0000005_tmp_3_{freeze_id}_1", (Part("g1", index, 2),))


def publish_order(freeze_id: int = 1) -> PublishOrder:
    return PublishOrder(freeze_id, 5, "/a", f"iter_0000005_tmp_3_{freeze_id}_1", (share(1),), CAUSE, record(5), term=3)


# --- the stream ---


def test_the_first_tick_connects_and_the_stream_begins_with_the_registration() -> None:
    rank = ProcessorBench(connected=False)
    assert rank.deadline() == 0.0
    assert only(rank.tick(), Connect)
    rank.take(Connected(registration(1)))
    assert rank.said(Registration) == [registration(1)]


def test_heartbeats_begin_with_the_welcome() -> None:
    rank = ProcessorBench()
    rank.tick(after=5.0)
    assert not rank.said(Heartbeat)
    rank.receive(WELCOME)
    rank.tick()
    assert rank.said(Heartbeat) == [Heartbeat(1, Phase.COMPUTE, 1)]
    assert rank.deadline() == pytest.approx(rank.now + 1.0)
    rank.tick(after=0.5)
    assert not rank.said(Heartbeat)
    rank.tick(after=0.5)
    assert rank.said(Heartbeat)


def test_a_rank_reports_progress_only_while_its_work_progresses_and_an_order_is_open() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    order = write_order()

    def said_at(work_done: int) -> list[Progress]:
        rank.receive(KeepAlive())
        rank.take(Tick(Phase.COMPUTE, 1, work_done=work_done), after=1.0)
        return rank.said(Progress)

    assert said_at(10) == [], "nothing was ordered: a periodic save"
    rank.freeze(phase=Phase.DONE)
    rank.receive(order)
    assert said_at(20) == [Progress(1, 1)]
    assert said_at(20) == [], "the disk hangs"
    assert said_at(30) == [Progress(1, 1)]
    rank.take(WriteDone(order, share(1)))
    assert said_at(40) == [], "it was answered"
    rank.receive(write_order(index=1))
    rank.freeze(2, phase=Phase.DONE)
    assert said_at(50) == [], "it was asked afresh: an older freeze's order is owed to no controller"


def test_a_rank_whose_update_outlasts_the_freeze_reports_progress_and_its_end() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze(phase=Phase.UPDATING, closed=False)
    assert [reported.closed for reported in rank.said(StateReport)] == [False]
    rank.take(Tick(Phase.UPDATING, 5, work_done=3), after=1.0)
    assert rank.said(Progress) == [Progress(1, 1)]
    rank.take(GateClosed(report(1, 1, Phase.DONE, 5)))
    assert [(reported.closed, reported.state_step) for reported in rank.said(StateReport)] == [(True, 5)]
    rank.take(Tick(Phase.DONE, 5, work_done=4), after=1.0)
    assert not rank.said(Progress), "the update has ended"


def test_a_lost_stream_is_tried_again_after_a_pause() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(Disconnected("reset"))
    assert rank.deadline() == pytest.approx(0.2)
    assert not only(rank.tick(after=0.1), Connect)
    assert only(rank.tick(after=0.1), Connect)
    rank.take(Disconnected("refused"))
    assert only(rank.tick(after=0.2), Connect)


def test_without_a_fault_a_lost_controller_is_survived() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(Disconnected("reset"))
    for _ in range(1000):
        effects = rank.tick(after=0.1)
        assert not only(effects, ExitProcess)
        if only(effects, Connect):
            rank.take(Disconnected("refused"))
    assert rank.state.standing is RankMode.TRAINING


def test_connecting_twice_is_a_protocol_error() -> None:
    rank = ProcessorBench()
    with pytest.raises(ProtocolError, match="connected twice"):
        rank.take(Connected(registration(1)))


# --- faults and the end ---


def test_an_own_fault_is_reported_and_reported_again_on_a_new_stream() -> None:
    rank = ProcessorBench()
    rank.take(ERROR)
    assert rank.said(FaultReport) == [FaultReport(1, ERROR.cause, "traceback")]
    rank.take(Disconnected("reset"))
    rank.tick(after=0.2)
    rank.take(Connected(registration(1)))
    assert rank.said(FaultReport) == [FaultReport(1, ERROR.cause, "traceback")]


def test_a_fault_that_no_controller_answers_ends_the_process_with_1() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(ERROR)
    assert not only(rank.wait(14.9), ExitProcess)
    (leaving,) = only(rank.wait(0.2), ExitProcess)
    assert leaving.code == 1 and "bad batch" in leaving.reason


def test_a_freeze_is_an_answer_to_a_fault() -> None:
    rank = ProcessorBench()
    rank.take(ERROR)
    rank.receive(Freeze(1, CAUSE), after=1.0)
    assert not only(rank.tick(after=60.0), ExitProcess)


def test_a_fault_while_the_controller_is_long_gone_waits_from_the_fault_on() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(Disconnected("reset"))
    rank.wait(100.0)
    rank.take(ERROR)
    assert not only(rank.wait(14.0), ExitProcess)
    assert only(rank.wait(2.0), ExitProcess)


def test_a_frozen_rank_without_a_controller_leaves_with_75() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.take(Disconnected("reset"))
    assert not only(rank.tick(after=14.9), ExitProcess)
    (leaving,) = only(rank.tick(after=0.2), ExitProcess)
    assert leaving.code == 75


def test_a_finished_rank_waits_for_its_dismissal() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(TrainReturned())
    assert rank.said(Finished) == [Finished(1)]
    assert only(rank.receive(Release()), ReleaseTraining)
    assert rank.state.standing is RankMode.LEAVING and rank.state.heartbeat_at == inf and rank.deadline() is None
    assert rank.deadline() is None


def test_finished_is_said_again_on_a_new_stream() -> None:
    """With the registration: no controller takes this rank for one that trains."""
    rank = ProcessorBench()
    rank.take(Disconnected("reset"))
    rank.take(TrainReturned())
    assert not rank.said(Finished)
    rank.tick(after=0.2)
    rank.take(Connected(registration(1)))
    assert [message.finished for message in rank.said(Registration)] == [True]


def test_a_finished_rank_without_a_controller_is_released() -> None:
    rank = ProcessorBench()
    rank.take(TrainReturned())
    rank.take(Disconnected("reset"))
    assert only(rank.tick(after=15.1), ReleaseTraining)


def test_a_dismissal_of_a_rank_that_still_trains_does_not_release_it() -> None:
    rank = ProcessorBench()
    assert not only(rank.receive(Release()), ReleaseTraining)


def test_exit_ends_the_process_and_nothing_matters_afterwards() -> None:
    rank = ProcessorBench()
    rank.freeze()
    (leaving,) = only(rank.receive(Exit(75, "step 5 is saved")), ExitProcess)
    assert leaving == ExitProcess(75, "step 5 is saved")
    assert rank.receive(Freeze(2, CAUSE)) == () and rank.take(Disconnected("closed")) == () and rank.deadline() is None


# --- orders ---


def test_a_roll_forward_is_done_once_and_answered_every_time() -> None:
    rank = ProcessorBench()
    rank.freeze()
    order = rank.roll()
    assert only(rank.effects, ApplyUpdate) == [ApplyUpdate(1, record(5))]
    assert rank.receive(order) == ()
    rank.take(RollForwardDone(1, 5))
    assert rank.said(RolledForward) == [RolledForward(1, 1, 5)]
    rank.receive(order)
    assert rank.said(RolledForward) == [RolledForward(1, 1, 5)] and not only(rank.effects, ApplyUpdate)


def test_a_rank_that_has_the_step_already_answers_without_doing_anything() -> None:
    rank = ProcessorBench()
    rank.freeze(phase=Phase.DONE, step=5)
    rank.roll()
    assert rank.said(RolledForward) == [RolledForward(1, 1, 5)] and not only(rank.effects, ApplyUpdate)


@pytest.mark.parametrize("why", ["not closed", "torn", "two steps behind"])
def test_a_roll_forward_that_cannot_be_is_refused(why: str) -> None:
    rank = ProcessorBench()
    rank.freeze(closed=why != "not closed", torn=why == "torn", step=4 if why == "two steps behind" else 5)
    rank.roll()
    (failure,) = rank.said(StepFailed)
    assert failure.stage == "roll_forward" and not only(rank.effects, ApplyUpdate)


def test_a_failed_roll_forward_is_reported_and_leaves_the_rank_unusable() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.roll()
    rank.take(WorkFailed(1, "roll_forward", "", "out of memory"))
    assert rank.said(StepFailed) == [StepFailed(1, 1, "roll_forward", "", "out of memory")]
    rank.roll()
    assert rank.said(StepFailed) and not only(rank.effects, ApplyUpdate)


def test_a_report_taken_during_a_roll_forward_is_held_back_until_its_end() -> None:
    """It would tell a state that does not stand still."""
    rank = ProcessorBench()
    rank.freeze(1)
    rank.roll(1)
    rank.receive(Freeze(2, CAUSE))
    rank.take(GateClosed(report(1, 2, Phase.READY, 5)))
    assert not rank.said(StateReport)
    assert only(rank.take(RollForwardDone(1, 5)), CloseGate) == [CloseGate(2)]
    rank.take(GateClosed(report(1, 2, Phase.DONE, 5)))
    assert rank.said(StateReport)[0].state_step == 5
    rank.roll(2)
    assert rank.said(RolledForward) == [RolledForward(1, 2, 5)]


def test_a_write_order_is_done_once_and_answered_every_time() -> None:
    rank = ProcessorBench()
    rank.freeze()
    order = write_order()
    assert only(rank.receive(order), WriteShare) == [WriteShare(order)]
    assert rank.receive(order) == ()
    rank.take(WriteDone(order, share(1)))
    answer = Written(1, 1, order.tmp_name, order.parts, share(1))
    assert rank.said(Written) == [answer]
    rank.receive(order)
    assert rank.said(Written) == [answer] and not only(rank.effects, WriteShare)


def test_several_write_orders_are_each_answered() -> None:
    rank = ProcessorBench()
    rank.freeze()
    first, second = write_order(), write_order(index=1)
    rank.receive(first)
    assert only(rank.receive(second), WriteShare) == [WriteShare(second)]
    rank.take(WorkFailed(1, "write", first.tmp_name, "no space"))
    assert rank.said(StepFailed) == [StepFailed(1, 1, "write", first.tmp_name, "no space")]
    rank.take(WriteDone(second, share(1)))
    assert rank.said(Written)[0].parts == second.parts


def test_publishing_is_ordered_done_and_reported() -> None:
    rank = ProcessorBench()
    rank.freeze()
    order = publish_order()
    assert only(rank.receive(order), PublishCheckpoint) == [PublishCheckpoint(order)]
    rank.take(PublishDone(order, "/a/iter_0000005"))
    assert rank.said(Published) == [Published(1, 1, 5, "/a/iter_0000005")]


def test_a_failed_publish_is_reported() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.receive(publish_order())
    rank.take(WorkFailed(1, "publish", "iter_0000005_tmp_3_1_1", "no space"))
    assert rank.said(StepFailed)[0].stage == "publish"


def test_orders_of_an_older_freeze_are_ignored() -> None:
    rank = ProcessorBench()
    rank.freeze(2)
    orders = (RollForward(1, record(5)), write_order(1), publish_order(1))
    assert all(rank.receive(order) == () for order in orders)


def test_work_that_ends_after_a_new_freeze_is_not_reported() -> None:
    rank = ProcessorBench()
    rank.freeze(1)
    order = write_order(1)
    rank.receive(order)
    rank.freeze(2)
    assert rank.take(WriteDone(order, share(1))) == ()


@pytest.mark.parametrize(
    "event",
    [
        WriteDone(write_order(), share(1)),
        PublishDone(publish_order(), "/a/x"),
        RollForwardDone(1, 5),
        WorkFailed(1, "write", "iter", "no space"),
        WorkFailed(1, "roll_forward", "", "boom"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_work_that_was_not_ordered_is_a_protocol_error_and_changes_nothing(event: WriteDone) -> None:
    rank = ProcessorBench()
    with pytest.raises(ProtocolError, match="rank 1"):
        rank.take(event)
    rank.freeze()
    before = rank.state
    with pytest.raises(ProtocolError, match="rank 1"):
        rank.take(event)
    assert rank.state is before


@pytest.mark.parametrize("unusable", ["torn", "not closed"])
def test_a_rank_whose_state_cannot_be_used_does_not_say_that_it_has_the_step(unusable: str) -> None:
    """Its number is right, and what it holds is not."""
    bench = ProcessorBench()
    changed = {"torn": True} if unusable == "torn" else {"closed": False}
    bench.freeze(phase=Phase.DONE, step=5, **changed)
    bench.roll(step=5)
    assert bench.said(StepFailed) and not bench.said(RolledForward)


def test_a_second_roll_forward_to_another_step_is_refused() -> None:
    """One update is being done already, and it is not this one."""
    bench = ProcessorBench()
    bench.freeze()
    bench.roll(step=5)
    assert only(bench.effects, ApplyUpdate)
    bench.roll(step=6)
    assert bench.said(StepFailed) and not only(bench.effects, ApplyUpdate)
