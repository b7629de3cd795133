"""What is lost on a stream that lives is sent again: a heartbeat shows what its rank takes the job for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, only, registration, report
from tests.unit.protocol.test_controller_dump import dying, publishing
from tests.unit.protocol.test_controller_members import killed
from tests.unit.protocol.test_processor import CAUSE, ERROR, WELCOME, write_order
from ttp.controller.core.facts.events import HeartbeatBatch, Send
from ttp.controller.core.facts.state import Stage
from ttp.processor.core.events import LocalFault
from ttp.processor.core.state import RankMode
from ttp.proto.messages import (
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    PublishOrder,
    Release,
    RollForward,
    Thaw,
    Welcome,
    WriteOrder,
)


def beat(rank: int, frozen: int = 0, owes: bool = False, **changed: Any) -> Heartbeat:
    return Heartbeat(rank, Phase.COMPUTE, 1, frozen=frozen, owes=owes, **changed)


def thawed() -> ControllerBench:
    """A false alarm that is over for the controller."""
    job = ControllerBench()
    job.close(3)
    assert job.at(Stage.FREEZING)
    job.say(registration(3))
    assert job.at(Stage.RUNNING) and job.state.freeze_id == 1
    return job


@pytest.mark.parametrize("together", [False, True])
def test_a_heartbeat_that_is_frozen_under_a_freeze_that_is_over_is_answered_with_the_thaw(together: bool) -> None:
    job = thawed()
    if together:
        job.take(HeartbeatBatch((beat(0), beat(1, frozen=1), beat(2))))
    else:
        job.say(beat(1, frozen=1, owes=True))
    assert job.sent(Thaw) == {1: Thaw(1)}
    job.say(beat(1))
    assert not job.sent(Thaw), "its gate is open"
    job.say(beat(1, frozen=2))
    assert not job.sent(Thaw), "no freeze of this controller has that number"


@pytest.mark.parametrize(
    ("heartbeat", "lost"),
    [
        (beat(1), True),
        (beat(1, frozen=1), True),
        (beat(1, frozen=1, owes=True), False),
        (beat(1, frozen=7, owes=True), True),
    ],
    ids=[
        "the freeze was lost",
        "the report was lost",
        "its gate is about to close",
        "it answers another controller's freeze",
    ],
)
def test_a_round_asks_a_rank_again_whose_report_or_freeze_was_lost(heartbeat: Heartbeat, lost: bool) -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.say(heartbeat)
    assert list(job.sent(Freeze)) == ([1] if lost else [])
    job.say(report(1, 1, Phase.COMPUTE, 1), beat(1))
    assert not job.sent(Freeze), "it has reported"
    fault = job.state.fault
    assert fault is not None
    job.state = job.state.with_fault(replace(fault, stuck=frozenset({0})))
    job.say(beat(0))
    assert not job.sent(Freeze), "it is not waited for"


def test_a_report_of_an_updates_end_that_was_lost_is_asked_for_again() -> None:
    job = ControllerBench()
    job.say(killed(3), report(1, 1, Phase.UPDATING, 1, closed=False))
    job.say(beat(1, frozen=1, owes=True))
    assert not job.sent(Freeze), "its update goes on"
    job.say(beat(1, frozen=1))
    assert list(job.sent(Freeze)) == [1]


def test_a_roll_forward_that_was_lost_or_whose_answer_was_is_ordered_again() -> None:
    job = ControllerBench()
    job.say(
        killed(3), report(0, 1, Phase.READY, 1), report(1, 1, Phase.READY, 1), report(2, 1, Phase.DONE, 1, records=(1,))
    )
    assert job.at(Stage.ROLLING)
    order = job.sent(RollForward)[1]
    job.say(beat(1, frozen=1, owes=True), beat(2, frozen=1))
    assert not job.sent(RollForward)
    job.say(beat(1, frozen=1))
    assert job.sent(RollForward) == {1: order}


def test_a_write_order_that_was_lost_or_whose_answer_was_is_given_again() -> None:
    job = dying()
    orders = job.orders()
    first = min(orders)
    job.say(beat(first, frozen=1, owes=True))
    assert not job.sent(WriteOrder)
    job.say(beat(first))
    assert not job.sent(WriteOrder), "sent before it was frozen"
    job.say(beat(first, frozen=1))
    assert job.sent(WriteOrder) == {first: orders[first]}
    job.say(job.written(first, orders[first]), beat(first, frozen=1))
    assert not job.sent(WriteOrder)


def test_a_publish_order_that_was_lost_or_whose_answer_was_is_given_again() -> None:
    job, publisher, order = publishing()
    job.say(beat(publisher, frozen=1))
    assert job.sent(PublishOrder) == {publisher: order}


def test_an_exit_that_was_lost_is_sent_again() -> None:
    job = ControllerBench()
    job.say(killed(3), killed(1))
    job.all_report(1, ranks=(0, 2))
    assert job.at(Stage.EXITING)
    job.say(beat(0, frozen=1))
    assert list(job.sent(Exit)) == [0]


def test_the_word_that_training_has_returned_comes_with_every_heartbeat() -> None:
    job = ControllerBench()
    job.say(Finished(0), Finished(1), Finished(2), beat(3, finished=True))
    assert set(job.sent(Release)) == {0, 1, 2, 3}


def test_a_rank_that_is_attached_and_silent_is_welcomed_again() -> None:
    """It sends no heartbeats before it is welcomed: frozen and thawed in turn it would progress slowly for ever."""
    job = ControllerBench()
    welcomed: list[int] = []
    take = job.take

    def watch(event: Any, after: float = 0.0) -> Any:
        effects = take(event, after)
        welcomed.extend(rank for e in only(effects, Send) if isinstance(e.message, Welcome) for rank in e.ranks)
        return effects

    job.take = watch  # type: ignore[method-assign]
    job.wait(2.5, senders=(0, 1, 2))
    assert welcomed == [3]


# --- the rank's side ---


def last_beat(rank: ProcessorBench) -> Heartbeat:
    rank.receive(WELCOME)
    rank.wait(1.1)
    return rank.said(Heartbeat)[-1]


def test_a_heartbeat_has_the_freeze_that_its_rank_is_frozen_under() -> None:
    rank = ProcessorBench()
    reported = last_beat(rank)
    assert (reported.frozen, reported.owes, reported.finished) == (0, False, False)
    rank.receive(Freeze(4, CAUSE))
    reported = last_beat(rank)
    assert (reported.frozen, reported.owes) == (4, True), "the gate is not closed yet"
    rank.freeze(4)
    reported = last_beat(rank)
    assert (reported.frozen, reported.owes) == (4, False)
    rank.receive(write_order(4))
    assert last_beat(rank).owes
    rank.receive(Thaw(4))
    assert last_beat(rank).frozen == 0


def test_a_fault_is_reported_again_with_each_heartbeat_until_a_freeze_comes() -> None:
    rank = ProcessorBench()
    rank.take(ERROR)
    reported = rank.said(FaultReport)
    assert last_beat(rank) and rank.said(FaultReport)[:1] == reported
    rank.freeze(1)
    last_beat(rank)
    assert not rank.said(FaultReport)


def test_a_thaw_of_a_rank_that_has_failed_is_answered_with_its_fault() -> None:
    """No controller thaws a rank of whose fault it knows: what was said behind the closed gate was lost."""
    rank = ProcessorBench()
    rank.freeze(1)
    rank.take(LocalFault(ERROR.cause, ""))
    rank.receive(Thaw(1))
    assert [reported.cause for reported in rank.said(FaultReport)] == [ERROR.cause]
    assert rank.state.standing is RankMode.TRAINING
    last_beat(rank)
    assert rank.said(FaultReport)
