"""Until when a controller waits that would refuse, or save less: for ranks that are silent, and for those that came late."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, report
from tests.unit.protocol.test_controller_members import killed
from ttp.controller.core.dump.roll_forward import _is_less, _known_at
from ttp.controller.core.facts.decision import Decision, Refusal
from ttp.controller.core.facts.membership import SUSPECT_AFTER
from ttp.controller.core.facts.state import ControllerState, Fault, Stage
from ttp.proto.messages import Cause, CauseKind, CommitRecord, Phase

LEASE_S, NOW = 3.0, 10.0
SILENT_S = SUSPECT_AFTER * LEASE_S
DEAD = Cause(CauseKind.EXITED, (2,), "signal SIGKILL")


def frozen() -> ControllerBench:
    """Rank 1 was killed at second 10; the gates of the others are being closed."""
    bench = ControllerBench(lease_s=LEASE_S, total_timeout_s=120.0)
    bench.wait(NOW)
    bench.say(killed(1))
    assert bench.at(Stage.FREEZING) and bench.now == NOW and bench.state.members.leases_renewed_at < NOW - LEASE_S
    return bench


def changed(state: ControllerState, rank: int, **of: Any) -> ControllerState:
    """Return a state in which something else is known of a rank."""
    table = state.members.table
    return replace(state, members=replace(state.members, table=table.put(rank, replace(table[rank], **of))))


def known_at(state: ControllerState, now: float = NOW, **of: Any) -> float:
    fault = state.fault
    assert isinstance(fault, Fault)
    return _known_at(state, replace(fault, **of), now)


def reported(*ranks: int) -> ControllerState:
    bench = frozen()
    bench.say(*(report(rank, bench.state.freeze_id, Phase.DONE, 7) for rank in ranks))
    return bench.state


def test_where_all_send_no_rank_is_waited_for() -> None:
    assert known_at(reported(0)) == -inf


def test_a_rank_that_has_reported_and_is_silent_is_waited_for_until_its_lease_is_over() -> None:
    state = changed(reported(0, 2), 2, suspect=True, received_at=NOW - 2.5)
    assert known_at(state) == NOW - 2.5 + LEASE_S


@pytest.mark.parametrize("of", [{"dead": DEAD}, {"registration": None}, {"suspect": False}], ids=str)
def test_one_that_is_dead_or_was_never_here_or_is_not_suspect_is_not(of: dict[str, Any]) -> None:
    state = changed(reported(0, 2), 2, suspect=True, received_at=NOW - 2.5)
    assert known_at(changed(state, 2, **of)) == -inf


def test_nor_is_one_that_is_stuck() -> None:
    state = changed(reported(0, 2), 2, suspect=True, received_at=NOW - 2.5)
    assert known_at(state, stuck=frozenset({2})) == -inf


@pytest.mark.parametrize(
    ("silent_s", "vouched_s", "waited_for"),
    [(SILENT_S, 0.2, True), (SILENT_S - 0.01, 0.2, False), (SILENT_S, SILENT_S, False), (SILENT_S, inf, False)],
    ids=["its agent sees it", "not silent for long", "its agent has seen it when it sent last", "its agent has not"],
)
def test_a_silent_rank_that_has_not_reported_is_waited_for_if_its_agent_sees_it(
    silent_s: float, vouched_s: float, waited_for: bool
) -> None:
    """Until a lease after its agent's newest word."""
    state = changed(reported(0), 3, received_at=NOW - silent_s, vouched=NOW - vouched_s)
    assert known_at(state) == (pytest.approx(NOW - vouched_s + LEASE_S) if waited_for else -inf)


def test_the_last_of_several_is_waited_for() -> None:
    state = reported(0, 2, 3)
    for rank, silent_s in ((0, 2.1), (2, 2.5), (3, 2.9)):
        state = changed(state, rank, suspect=True, received_at=NOW - silent_s)
    assert known_at(state) == NOW - 2.1 + LEASE_S


def test_one_that_was_asked_late_has_the_time_to_answer() -> None:
    """Another one that is silent does not shorten it."""
    state = reported(0, 2)
    assert known_at(state, asked_late_until=NOW + 4.0) == NOW + 4.0
    silent = changed(state, 2, suspect=True, received_at=NOW - 2.5)
    assert known_at(silent, asked_late_until=NOW + 4.0) == NOW + 4.0
    assert known_at(silent, asked_late_until=NOW + 0.2) == NOW + 0.5
    assert known_at(reported(0, 2, 3), asked_late_until=NOW + 4.0) == -inf, "all have answered"


def test_no_rank_is_waited_for_in_the_second_half_of_a_faults_time() -> None:
    state = changed(reported(0, 2), 2, suspect=True, received_at=NOW - 2.5)
    assert known_at(state, began=NOW - 59.75) == NOW + 0.25


@pytest.mark.parametrize(("step", "less"), [(5, True), (6, False), (7, False)])
def test_less_is_saved_where_a_later_step_is_known_to_be_committed(step: int, less: bool) -> None:
    fault = reported(0).fault
    assert fault is not None
    record = CommitRecord(6, 1.0, 1.0, False, 1.0, (0.1,), ())
    assert _is_less(Decision(step, None, (), (0,)), replace(fault, records=(record,))) is less


def test_a_refusal_is_less_than_anything() -> None:
    fault = reported(0).fault
    assert fault is not None and _is_less(Refusal("no live rank holds it"), fault)
