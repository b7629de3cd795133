"""Which rank keeps its process in a recovery, which one's is replaced, and why not: rank by rank. Whole recoveries are in test_regroup.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import registration, report
from tests.unit.protocol.test_known_at import changed
from tests.unit.protocol.test_regroup import regrouping
from ttp.controller.core.dump.regroup import _why_not_replaced, _why_not_stay, silent_here
from ttp.proto.messages import Cause, CauseKind, Phase

ENDED = Cause(CauseKind.EXITED, (3,), "signal SIGKILL")
SILENT = Cause(CauseKind.SILENT, (3,), "nothing received for 3 s")
TORN = report(3, 1, Phase.UPDATING, 7, torn=True)


def state(rank: int, of_report: Any = None, **of: Any) -> Any:
    """Return a state in which rank 3 is dead, with something else known of this rank, and this report of it."""
    found: Any = changed(regrouping().state, rank, **of)
    if of_report is None:
        return found
    fault = found.at.fault
    given = None if of_report == "none" else of_report
    return found.with_fault(replace(fault, reports=fault.reports.put(rank, given)))


@pytest.mark.parametrize(
    ("of_report", "of", "why"),
    [
        (None, {}, ""),
        (None, {"registration": None}, "cannot regroup"),
        (None, {"registration": registration(0)}, "cannot regroup"),
        (None, {"suspect": True}, "is silent"),
        (None, {"attached": False}, "is silent"),
        ("none", {}, "has a gate that cannot open again"),
        (report(0, 1, Phase.DONE, 7, final=True), {}, "has a gate that cannot open again"),
    ],
    ids=["stays", "never came", "its program cannot", "suspect", "away", "has not reported", "leaves"],
)
def test_who_stays(of_report: Any, of: dict[str, Any], why: str) -> None:
    assert _why_not_stay(state(0, of_report, **of), 0) == why


@pytest.mark.parametrize(
    ("of_report", "of", "why"),
    [
        (None, {}, ""),
        (None, {"attached": True}, "may still run"),
        (None, {"dead": SILENT}, "may still run"),
        (TORN, {"dead": None, "attached": True}, ""),
        (TORN, {"dead": None, "attached": False}, "is not at the step, and has not lost its state"),
        (TORN, {"dead": None, "attached": True, "suspect": True}, "is not at the step, and has not lost its state"),
        ("none", {"dead": None, "attached": True}, "is not at the step, and has not lost its state"),
    ],
    ids=["ended", "has a stream", "silent", "torn and here", "torn and away", "torn and suspect", "mute"],
)
def test_whose_process_is_replaced(of_report: Any, of: dict[str, Any], why: str) -> None:
    assert _why_not_replaced(state(3, of_report, **of), 3, frozenset()) == why


def test_a_rank_that_may_be_replaced_whatever_it_does_is_unless_it_is_in_the_middle_of_an_order() -> None:
    found = state(3, dead=SILENT)
    assert _why_not_replaced(found, 3, frozenset({3})) == ""
    stuck = found.with_fault(replace(found.at.fault, stuck=frozenset({3})))
    assert _why_not_replaced(stuck, 3, frozenset({3})) == "was given an order, and has not answered"


@pytest.mark.parametrize(
    ("of", "silent"),
    [
        ({}, True),
        ({"dead": None}, False),
        ({"dead": ENDED}, False),
        ({"registration": None}, False),
        ({"named_at": -1.0}, False),
    ],
    ids=["silent", "lives", "ended", "never came", "its agent is silent as well"],
)
def test_who_is_silent_where_its_agent_is_not(of: dict[str, Any], silent: bool) -> None:
    """Its agent has reported within a lease."""
    found = state(3, **{"dead": SILENT, "named_at": 9.0, **of})
    found = found.with_fault(replace(found.at.fault, causes=(SILENT,)))
    now = 9.0 + found.settings.lease_s - 0.1
    assert silent_here(found, now) == (frozenset({3}) if silent else frozenset())
    assert silent_here(found, now + 0.2) == frozenset()
    raised = replace(SILENT, kind=CauseKind.EXCEPTION)
    assert silent_here(found.with_fault(replace(found.at.fault, causes=(raised,))), now) == frozenset()
