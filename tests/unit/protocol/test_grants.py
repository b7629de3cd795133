"""What a controller that received nothing for a while gives its ranks, and what it says of a rank whose lease is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.test_controller_dump import dying
from tests.unit.protocol.test_gathering import cut_off
from tests.unit.protocol.test_known_at import NOW, changed, frozen
from tests.unit.protocol.test_late_answers import fault_of, state_of, timeouts
from ttp.controller.core.dump.freeze import half_of_the_rest
from ttp.controller.core.facts.membership import vouched_lease
from ttp.controller.core.facts.state import Gathering, is_ordered
from ttp.controller.core.stages import _silence, grant_time

FAR = 1000.0


def test_answers_have_as_much_time_as_if_they_were_asked_for_now() -> None:
    freeze_s, progress_s = timeouts()
    fault = fault_of(grant_time(state_of(round_deadline=NOW, update_by=NOW), NOW + 5.0))
    assert (fault.round_deadline, fault.update_by) == (NOW + 5.0 + freeze_s, NOW + 5.0 + progress_s)


def test_no_time_that_was_given_already_is_taken_away() -> None:
    fault = fault_of(grant_time(state_of(round_deadline=FAR, update_by=FAR), NOW + 5.0))
    assert (fault.round_deadline, fault.update_by) == (FAR, FAR)


@pytest.mark.parametrize("planned", [0.0, FAR])
def test_orders_have_their_time_anew(planned: float) -> None:
    state: Any = dying().state
    state = state.with_dump(replace(state.at.dump, progress_by=planned, patience_until=planned))
    after = grant_time(state, 5.0)
    assert is_ordered(after)
    _, progress_s = timeouts()
    expected = (5.0 + progress_s, half_of_the_rest(after, 5.0)) if not planned else (FAR, FAR)
    assert (after.at.dump.progress_by, after.at.dump.patience_until) == expected


def test_a_takeover_waits_a_lease_from_then_on() -> None:
    job = cut_off()
    now = job.now + 1.0
    after = grant_time(job.state, now).at
    assert isinstance(after, Gathering)
    assert (after.deadline, after.last_message_at) == (now + job.state.settings.lease_s, now)


@pytest.mark.parametrize(
    ("seen_s_ago", "silent_s", "expected"),
    [
        (None, 3.0, "no message received for 3.0 s (limit 3 s, TTP_LEASE_S)"),
        (3.0, 3.0, "no message received for 3.0 s (limit 3 s, TTP_LEASE_S)"),
        (0.5, 3.5, "no message received for 3.5 s; its agent last saw the process running 0.5 s ago (limit 3 s, TTP_LEASE_S)"),
        (0.5, 4.5, "no message received for 4.5 s; its agent last saw the process running 0.5 s ago (limit 3 s, TTP_LEASE_S)"),
        (0.5, 8.0, "no message received for 8.0 s, although its agent saw the process running (limit {} s, TTP_VOUCHED_LEASE_S)"),
    ],
)  # fmt: skip
def test_which_lease_was_over_is_said_with_what_the_agent_saw(
    seen_s_ago: float | None, silent_s: float, expected: str
) -> None:
    state, now = frozen().state, NOW + silent_s
    assert state.settings.lease_s == 3.0
    state = changed(state, 0, received_at=NOW, **({} if seen_s_ago is None else {"vouched": now - seen_s_ago}))
    assert _silence(state, 0, now) == expected.format(f"{vouched_lease(state.settings, False):g}")
