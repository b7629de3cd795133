"""Who owes a round its report, until when one that was asked late has time, and what progress gives: each rule alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import report
from tests.unit.protocol.test_known_at import NOW, changed, frozen
from ttp.controller.core.dump import freeze
from ttp.controller.core.dump.freeze import ask_late, count_again, extend_update_deadline, owes_report, take_report
from ttp.controller.core.facts.events import Effect
from ttp.controller.core.facts.state import ControllerState, Fault, Freezing, Running, StateAt
from ttp.proto.messages import Cause, CauseKind, Phase, Progress

SILENT = Cause(CauseKind.SILENT, (0,), "silent")
LATER = NOW + 1.0


def state_of(**of: Any) -> StateAt[Freezing]:
    """Return the state of a job whose rank 1 was killed at NOW, and whose other ranks are asked; `of`: of its fault, in place of what is so."""
    state: Any = frozen().state
    return state.with_fault(replace(state.fault, **of))  # type: ignore[no-any-return]


def fault_of(state: ControllerState) -> Fault:
    assert state.fault is not None
    return state.fault


def timeouts() -> tuple[float, float]:
    settings = frozen().state.settings
    return settings.freeze_timeout_s, settings.progress_timeout_s


@pytest.mark.parametrize(
    ("of_rank_0", "of_the_fault", "owes"),
    [
        ({}, {}, True),
        ({"attached": False}, {}, False),
        ({"dead": SILENT}, {}, False),
        ({}, {"stuck": frozenset({0})}, False),
        ({}, {"reports": frozen().state.fault.reports.put(0, report(0, 1, Phase.DONE, 7))}, False),  # type: ignore[union-attr]
    ],
    ids=["it owes it", "its stream is closed", "it is dead", "it is stuck", "it has reported"],
)
def test_who_owes_a_round_its_report_has_time_when_it_is_asked_late(
    of_rank_0: dict[str, Any], of_the_fault: dict[str, Any], owes: bool
) -> None:
    state = changed(state_of(**of_the_fault), 0, **of_rank_0)
    assert owes_report(state, fault_of(state), 0) is owes
    after = ask_late(state, 0, LATER)
    assert (after is state) is not owes
    if owes:
        assert fault_of(after).asked_late_until == LATER + timeouts()[0]


def test_half_of_a_faults_time_is_for_writing() -> None:
    state = state_of()
    half = NOW + state.settings.total_timeout_s / 2
    assert fault_of(ask_late(state, 0, half - 0.5)).asked_late_until == half


def test_outside_a_round_no_rank_is_asked() -> None:
    state = replace(frozen().state, at=Running())
    assert ask_late(state, 0, LATER) is state


def test_a_rank_that_has_not_reported_and_progresses_has_more_time_in_this_round() -> None:
    freeze_s, _ = timeouts()
    message, state = Progress(0, 1), state_of()
    assert fault_of(extend_update_deadline(state, message, LATER, [])).round_deadline == LATER + freeze_s
    later = state_of(round_deadline=NOW + 50.0)
    assert fault_of(extend_update_deadline(later, message, LATER, [])).round_deadline == NOW + 50.0
    stuck = state_of(stuck=frozenset({0}))
    assert extend_update_deadline(stuck, message, LATER, []) is stuck
    dead: Any = changed(state, 0, dead=SILENT)
    assert extend_update_deadline(dead, message, LATER, []) is dead


def test_only_a_rank_that_is_waited_for_in_its_update_puts_that_off() -> None:
    _, progress_s = timeouts()
    message, out = Progress(0, 1), list[Effect]()
    state: Any = take_report(state_of(), report(0, 1, Phase.UPDATING, 7, closed=False), out)
    assert extend_update_deadline(state, message, LATER, out) is state
    for known, expected in ((NOW, LATER + progress_s), (NOW + 500.0, NOW + 500.0)):
        waiting: Any = state.with_fault(replace(fault_of(state), updating=(0,), update_by=known))
        assert fault_of(extend_update_deadline(waiting, message, LATER, out)).update_by == expected


@pytest.mark.parametrize("why", ["", "dead", "stuck"])
def test_a_report_of_a_rank_that_was_not_waited_for_leaves_the_others_waited_for(why: str) -> None:
    state: Any = state_of(stuck=frozenset({0}) if why == "stuck" else frozenset())
    if why == "dead":
        state = changed(state, 0, dead=SILENT)
    before = fault_of(state).awaiting
    once = take_report(state, report(0, 1, Phase.DONE, 7), [])
    assert fault_of(once).awaiting == before - (why == "")
    again: Any = once
    assert fault_of(take_report(again, report(0, 1, Phase.DONE, 7), [])).awaiting == before - (why == "")


@pytest.mark.parametrize("reported", [False, True])
def test_a_rank_that_was_only_silent_is_waited_for_again_unless_it_has_reported(reported: bool) -> None:
    freeze_s, _ = timeouts()
    state: Any = changed(state_of(updating=(2,), round_deadline=NOW), 0, dead=SILENT)
    if reported:
        state = state.with_fault(replace(fault_of(state), reports=fault_of(state).reports.put(0, report(0, 1, Phase.DONE, 7))))  # fmt: skip
    before = fault_of(state).awaiting
    after = count_again(state, 0, LATER, [])
    assert after.members.table[0].dead is None and fault_of(after).updating == ()
    assert fault_of(after).awaiting == before + (not reported)
    assert fault_of(after).round_deadline == (NOW if reported else LATER + freeze_s)
    long: Any = state.with_fault(replace(fault_of(state), round_deadline=NOW + 50.0))
    assert fault_of(count_again(long, 0, LATER, [])).round_deadline == NOW + 50.0


def test_the_root_cause_is_of_the_kind_that_was_seen_first() -> None:
    exited, raised = CauseKind.EXITED, CauseKind.EXCEPTION
    one, two, three = Cause(exited, (1,), "SIGKILL"), Cause(raised, (2,), "boom"), Cause(exited, (3,), "SIGSEGV")
    assert freeze.root_cause((one, two)) == one
    assert freeze.root_cause((one, two, three)) == Cause(exited, (1, 3), "1: SIGKILL; 3: SIGSEGV")
    assert freeze.root_cause((two, one, three)) == two
