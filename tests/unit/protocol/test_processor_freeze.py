"""A processor at a freeze and a thaw: which one closes or opens the gate, and what it reports."""

from __future__ import annotations

from tests.unit.protocol.bench import ProcessorBench, only, report
from tests.unit.protocol.test_processor import CAUSE, WELCOME
from ttp.processor.core.events import CloseGate, GateClosed, OpenGate, RollForwardDone
from ttp.processor.core.state import RankMode
from ttp.proto.messages import (
    Freeze,
    Phase,
    StateReport,
    Thaw,
    Welcome,
)


def test_a_freeze_closes_the_gate_and_its_closing_is_reported() -> None:
    rank = ProcessorBench()
    assert only(rank.receive(Freeze(4, CAUSE)), CloseGate) == [CloseGate(4)]
    reported = report(1, 4, Phase.READY, 5)
    rank.take(GateClosed(reported))
    assert rank.said(StateReport) == [reported]


def test_a_freeze_under_a_new_number_is_answered_under_that_number_only() -> None:
    rank = ProcessorBench()
    rank.receive(Freeze(4, CAUSE))
    rank.receive(Freeze(5, CAUSE))
    rank.take(GateClosed(report(1, 4, Phase.READY, 5)))
    assert not rank.said(StateReport)
    rank.take(GateClosed(report(1, 5, Phase.READY, 5)))
    assert [reported.freeze_id for reported in rank.said(StateReport)] == [5]


def test_the_same_freeze_again_is_answered_afresh() -> None:
    rank = ProcessorBench()
    rank.freeze()
    assert only(rank.receive(Freeze(1, CAUSE)), CloseGate)
    rank.take(GateClosed(report(1, 1, Phase.READY, 5)))
    assert rank.said(StateReport)


def test_an_update_that_ends_late_is_reported_again() -> None:
    rank = ProcessorBench()
    rank.freeze(phase=Phase.UPDATING, closed=False)
    rank.take(GateClosed(report(1, 1, Phase.DONE, 5)))
    assert rank.said(StateReport)[0].closed


def test_a_thaw_opens_the_gate() -> None:
    rank = ProcessorBench()
    rank.freeze(4)
    assert only(rank.receive(Thaw(4)), OpenGate) == [OpenGate(4)]
    assert rank.state.standing is RankMode.TRAINING


def test_a_thaw_while_the_gate_is_still_closing_opens_it() -> None:
    rank = ProcessorBench()
    rank.receive(Freeze(4, CAUSE))
    assert only(rank.receive(Thaw(4)), OpenGate)
    rank.take(GateClosed(report(1, 4, Phase.READY, 5)))
    assert not rank.said(StateReport)


def test_a_thaw_of_a_newer_freeze_opens_a_gate_whose_own_thaw_was_lost() -> None:
    rank = ProcessorBench()
    rank.freeze(4)
    assert only(rank.receive(Thaw(6)), OpenGate) == [OpenGate(4)]


def test_a_thaw_of_an_older_freeze_opens_nothing() -> None:
    rank = ProcessorBench()
    rank.freeze(4)
    assert not only(rank.receive(Thaw(3)), OpenGate)


def test_a_rank_that_was_rolled_forward_never_opens_again() -> None:
    rank = ProcessorBench()
    rank.freeze(1)
    rank.roll()
    rank.take(RollForwardDone(1, 5))
    assert not only(rank.receive(Thaw(1)), OpenGate)
    rank.freeze(2, Phase.DONE)
    assert not only(rank.receive(Thaw(2)), OpenGate)


def test_a_new_controller_may_thaw_what_an_older_one_froze() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.freeze(9)
    rank.receive(Welcome(1, 4, 1.0, 3.0, ""))
    assert not only(rank.receive(Thaw(1)), OpenGate), "a later controller counts on from higher numbers"
    assert only(rank.receive(Thaw(1 << 20)), OpenGate) == [OpenGate(9)], "the gate knows the freeze by its own number"
