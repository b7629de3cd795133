"""A frozen rank's orders: each is done once, answered as often as it is said, and over when a newer freeze comes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, record, registration, report, share
from tests.unit.protocol.test_processor import CAUSE, WELCOME, publish_order, write_order
from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    ApplyUpdate,
    CloseGate,
    Connected,
    Disconnected,
    GateClosed,
    OpenGate,
    PublishCheckpoint,
    PublishDone,
    RollForwardDone,
    Tick,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from ttp.processor.core.state import RankMode
from ttp.proto.messages import (
    Freeze,
    KeepAlive,
    Phase,
    Progress,
    Published,
    RolledForward,
    RollForward,
    StateReport,
    StepFailed,
    Thaw,
    Written,
)

TMP = "iter_0000005_tmp_3_1_1"


def frozen(**changed: Any) -> ProcessorBench:
    rank = ProcessorBench()
    rank.freeze(**changed)
    return rank


def working(rank: ProcessorBench, work_done: int) -> list[Progress]:
    """Take the next heartbeat's tick, and return what the rank reports of its work."""
    rank.receive(KeepAlive())
    rank.take(Tick(Phase.READY, 5, work_done=work_done), after=1.0)
    return rank.said(Progress)


# --- one order, one answer ---


def test_the_end_of_a_write_that_was_not_ordered_is_a_protocol_error_though_another_is_open() -> None:
    rank = frozen()
    rank.receive(write_order(index=0))
    with pytest.raises(ProtocolError, match="was not ordered"):
        rank.take(WriteDone(write_order(index=1), share(1)))
    with pytest.raises(ProtocolError, match="was not ordered"):
        rank.take(PublishDone(publish_order(), "/a/iter_0000005"))


def test_a_write_that_ends_twice_is_a_protocol_error() -> None:
    rank = frozen()
    rank.receive(write_order())
    rank.take(WriteDone(write_order(), share(1)))
    with pytest.raises(ProtocolError, match="answered already"):
        rank.take(WriteDone(write_order(), share(1)))
    with pytest.raises(ProtocolError, match="without being ordered"):
        rank.take(WorkFailed(1, "write", TMP, "no space"))


def test_each_of_several_orders_keeps_its_own_answer() -> None:
    rank = frozen()
    first, second = write_order(index=0), write_order(index=1)
    rank.receive(first)
    rank.receive(second)
    rank.take(WriteDone(second, share(2)))
    assert rank.receive(first) == (), "it is being written"
    rank.take(WriteDone(first, share(1)))
    for order, result in ((first, share(1)), (second, share(2))):
        rank.receive(order)
        assert rank.said(Written) == [Written(1, 1, TMP, order.parts, result)]


def test_a_failed_order_that_is_said_again_is_answered_with_its_failure() -> None:
    """It is not tried again: the controller has others, and other directories."""
    rank = frozen()
    failure = StepFailed(1, 1, "write", TMP, "no space")
    rank.receive(write_order())
    rank.take(WorkFailed(1, "write", TMP, "no space"))
    assert rank.said(StepFailed) == [failure]
    rank.receive(write_order())
    assert rank.said(StepFailed) == [failure] and not only(rank.effects, WriteShare)


def test_a_publisher_names_the_writers_of_torn_files() -> None:
    rank = frozen()
    rank.receive(publish_order())
    rank.take(WorkFailed(1, "publish", TMP, "r2_0 is short", torn=(2, 3)))
    assert [failure.torn for failure in rank.said(StepFailed)] == [(2, 3)]


def test_a_failed_publish_leaves_the_write_of_the_same_directory_as_it_is() -> None:
    rank = frozen()
    rank.receive(write_order())
    rank.receive(publish_order())
    rank.take(WorkFailed(1, "publish", TMP, "no space"))
    assert [failure.stage for failure in rank.said(StepFailed)] == ["publish"]
    rank.take(WriteDone(write_order(), share(1)))
    assert rank.said(Written)
    rank.receive(publish_order())
    assert rank.said(StepFailed) and not only(rank.effects, PublishCheckpoint)


def test_a_failed_write_of_another_directory_is_a_protocol_error() -> None:
    rank = frozen()
    rank.receive(write_order())
    with pytest.raises(ProtocolError, match="without being ordered"):
        rank.take(WorkFailed(1, "write", "iter_0000005_tmp_3_1_2", "no space"))


def test_a_publish_that_is_said_again_is_answered_from_memory() -> None:
    rank = frozen()
    order = publish_order()
    rank.receive(order)
    assert rank.receive(order) == ()
    rank.take(PublishDone(order, "/a/iter_0000005"))
    rank.receive(order)
    assert rank.said(Published) == [Published(1, 1, 5, "/a/iter_0000005")] and not only(rank.effects, PublishCheckpoint)


# --- a newer freeze ---


def test_an_order_of_an_earlier_freeze_is_done_anew_under_the_next() -> None:
    """What was answered under the old number is not an answer under the new one."""
    rank = frozen()
    rank.receive(write_order(1))
    rank.take(WriteDone(write_order(1), share(1)))
    rank.freeze(2)
    order = write_order(2)
    assert only(rank.receive(order), WriteShare) == [WriteShare(order)]


def test_the_same_freeze_said_again_keeps_the_orders() -> None:
    rank = frozen()
    rank.receive(write_order())
    rank.receive(Freeze(1, CAUSE))
    assert not only(rank.receive(write_order()), WriteShare), "it is being written"


def test_a_freeze_of_an_earlier_number_is_ignored() -> None:
    rank = ProcessorBench()
    rank.freeze(4)
    assert rank.receive(Freeze(3, CAUSE)) == () and rank.state.freeze_id == 4


def test_failures_that_end_after_a_new_freeze_are_not_reported() -> None:
    """Except a roll-forward's: its end lets the report go that was held back, and the state is torn from then on."""
    rank = frozen()
    rank.receive(write_order(1))
    rank.freeze(2)
    rank.take(WorkFailed(1, "write", TMP, "no space"))
    assert not rank.said(StepFailed)
    rank = frozen()
    rank.roll(1)
    rank.receive(Freeze(2, CAUSE))
    rank.take(WorkFailed(1, "roll_forward", "", "out of memory"))
    assert not rank.said(StepFailed) and only(rank.effects, CloseGate) == [CloseGate(2)]
    rank.take(GateClosed(report(1, 2, Phase.UPDATING, 5, torn=True)))
    assert rank.said(StateReport)[0].torn
    rank.roll(2)
    assert rank.said(StepFailed) and not only(rank.effects, ApplyUpdate)


def test_a_roll_forward_that_is_being_done_is_answered_under_the_newest_number() -> None:
    rank = frozen()
    rank.roll(1)
    rank.receive(Freeze(2, CAUSE))
    assert rank.receive(RollForward(2, record(5))) == (), "the answer will come"
    rank.take(RollForwardDone(1, 5))
    rank.take(GateClosed(report(1, 2, Phase.DONE, 5)))
    rank.receive(RollForward(2, record(5)))
    assert rank.said(RolledForward) == [RolledForward(1, 2, 5)]


# --- what a report says of a dump that was begun ---


def test_a_rank_that_took_an_order_says_so_in_every_later_freeze() -> None:
    """A dump was decided, by whatever controller: none may thaw this rank any more."""
    rank = frozen()
    assert not rank.said(StateReport)[0].final
    rank.receive(write_order(1))
    for number in (2, 3):
        rank.freeze(number)
        assert rank.said(StateReport)[0].final


def test_a_gate_that_says_itself_that_it_is_final_is_passed_on() -> None:
    rank = frozen(final=True)
    assert rank.said(StateReport)[0].final


def test_a_thaw_ends_what_was_known_of_the_freeze() -> None:
    """The next freeze begins afresh: no order was taken, and an update that goes on keeps the gate from closing."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze(1)
    rank.receive(write_order(1))
    rank.receive(Thaw(1))
    assert rank.state.standing is RankMode.TRAINING and rank.state.orders == ()
    rank.freeze(2, Phase.UPDATING, closed=False)
    (reported,) = rank.said(StateReport)
    assert not reported.final and not reported.closed
    assert working(rank, 3) == [Progress(1, 2)], "the update progresses"
    for step in (4, 5):
        rank.roll(2, step)
        assert rank.said(StepFailed) and not only(rank.effects, ApplyUpdate), "it was at 4, behind the first freeze"


def test_a_report_is_said_on_an_open_stream_only() -> None:
    """The controller asks again when the rank is back."""
    rank = ProcessorBench()
    rank.receive(Freeze(1, CAUSE))
    rank.take(Disconnected("reset"))
    rank.take(GateClosed(report(1, 1, Phase.READY, 5)))
    assert not rank.said(StateReport)
    rank.tick(after=0.2)
    rank.take(Connected(registration(1)))
    assert only(rank.receive(Freeze(1, CAUSE)), CloseGate)
    rank.take(GateClosed(report(1, 1, Phase.READY, 5)))
    assert rank.said(StateReport)


# --- signs of work ---


def test_a_rank_that_rolls_forward_reports_its_progress() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze()
    assert working(rank, 1) == []
    rank.roll()
    assert working(rank, 2) == [Progress(1, 1)]
    rank.take(RollForwardDone(1, 5))
    assert working(rank, 3) == []


def test_a_rank_reports_progress_until_the_last_of_its_orders_is_answered() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze()
    first, second = write_order(index=0), write_order(index=1)
    rank.receive(first)
    rank.receive(second)
    rank.take(WriteDone(first, share(1)))
    assert working(rank, 1) == [Progress(1, 1)]
    rank.take(WorkFailed(1, "write", TMP, "no space"))
    assert working(rank, 2) == []


def test_work_counts_from_the_last_heartbeat_on() -> None:
    """Progress before the order does not count as the order's progress."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    assert working(rank, 50) == []
    rank.freeze()
    rank.receive(write_order())
    assert working(rank, 50) == []
    assert working(rank, 51) == [Progress(1, 1)]


# --- work that outlives its freeze ---


def test_work_that_an_earlier_controller_ordered_may_end_after_the_thaw() -> None:
    rank = frozen()
    rank.receive(write_order(1))
    rank.receive(Freeze(1 << 20, CAUSE))
    opened = rank.receive(Thaw(1 << 20))
    assert only(opened, OpenGate)
    assert rank.take(WriteDone(write_order(1), share(1))) == ()
    assert rank.take(PublishDone(publish_order(1), "/a/iter_0000005")) == ()
    assert rank.take(WorkFailed(1, "write", TMP, "no space")) == ()
    with pytest.raises(ProtocolError, match="with an open gate"):
        rank.take(WriteDone(write_order(1 << 20), share(1)))
