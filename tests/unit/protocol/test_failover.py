"""Which controller a rank turns to, when it looks for others, and when rank 0 starts one: one rule each, on a state made for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from ttp.processor.core import failover
from ttp.processor.core.events import (
    ControllerEnded,
    ControllersFound,
    ControllerStarted,
    Log,
    LookForControllers,
    ProcessorSettings,
    Send,
    StartController,
)
from ttp.processor.core.state import LinkState, ProcessorState, RankMode
from ttp.proto.messages import StandbyReport, StartStandby

NOW = 100.0
FIRST, SECOND, THIRD = "first:1", "second:2", "third:3"
RECONNECT_S, LOOK_S, LEASE_S, LOST_S, START_S = 0.5, 4.0, 3.0, 20.0, 30.0
SETTINGS = ProcessorSettings(
    0, reconnect_s=RECONNECT_S, controller_lost_s=LOST_S, address=FIRST, look_s=LOOK_S, start_s=START_S
)


def state_of(**changed: Any) -> ProcessorState:
    """Rank 0 without a controller, which knows the first one and a standby, and had been welcomed in term 1."""
    state = ProcessorState(
        SETTINGS,
        RankMode.TRAINING,
        LinkState.DOWN,
        reconnect_at=NOW,
        lost_since=NOW - 1.0,
        term=1,
        successors=(SECOND,),
        place=0,
        place_since=NOW - 1.0,
        lease_s=LEASE_S,
        looked=NOW - 1.0,
    )
    return replace(state, **changed)


def with_settings(state: ProcessorState, **changed: Any) -> ProcessorState:
    return replace(state, settings=replace(state.settings, **changed))


def started(state: ProcessorState, address: str = THIRD, error: str = "") -> tuple[ProcessorState, list[Any]]:
    out: list[Any] = []
    return failover.controller_started(state, ControllerStarted(address, error), NOW, out), out


def found(state: ProcessorState, *addresses: str) -> tuple[ProcessorState, list[Any]]:
    out: list[Any] = []
    return failover.found(state, ControllersFound(addresses), NOW, out), out


def nothing_runs(**changed: Any) -> ProcessorState:
    """Rank 0, which both controllers that it knows have refused."""
    return state_of(**(dict(refusals=2, starts_at=NOW) | changed))


# --- a stream that breaks ---


def test_a_stream_that_breaks_begins_the_loss_and_the_refusals_anew() -> None:
    after = failover.lost(state_of(link=LinkState.UP, lost_since=inf, refusals=2, heartbeat_at=NOW + 1.0), NOW, False)
    assert (after.link, after.lost_since, after.place_since, after.refusals) == (LinkState.DOWN, NOW, NOW, 0)
    assert (after.heartbeat_at, after.reconnect_at, after.place) == (inf, NOW + RECONNECT_S, 0)


def test_a_stream_that_breaks_by_a_refusal_counts_that_one_alone() -> None:
    after = failover.lost(state_of(link=LinkState.UP, lost_since=inf, refusals=7), NOW, True)
    assert (after.refusals, after.place) == (1, 1)


def test_a_refusal_counts_one_and_turns_to_the_next_controller() -> None:
    after = failover.lost(state_of(link=LinkState.CONNECTING, refusals=3), NOW, True)
    assert (after.refusals, after.place, after.lost_since) == (4, 1, NOW - 1.0)


@pytest.mark.parametrize(("tried_s", "place"), [(LEASE_S, 1), (LEASE_S - 0.1, 0)])
def test_a_failed_try_ends_the_row_of_refusals_and_is_repeated_for_a_lease(tried_s: float, place: int) -> None:
    after = failover.lost(state_of(link=LinkState.CONNECTING, refusals=3, place_since=NOW - tried_s), NOW, False)
    assert (after.refusals, after.place) == (0, place)


def test_a_silent_stream_is_lost_from_now_on() -> None:
    state = state_of(link=LinkState.UP, lost_since=inf, refusals=3, heartbeat_at=NOW)
    after = failover.silent(state, NOW)
    assert (after.lost_since, after.heartbeat_at, after.refusals) == (NOW, inf, 0)
    assert (after.link, after.place) == (LinkState.DOWN, 1)


# --- the next one ---


def test_the_next_controller_is_tried_at_once() -> None:
    after = failover.go_on(state_of(link=LinkState.UP, place=0), NOW)
    assert (after.link, after.place, after.place_since, after.reconnect_at) == (LinkState.DOWN, 1, NOW, NOW)
    assert after.looks_at == inf, "the list has not come to its end"


def test_after_the_last_comes_the_first_behind_a_pause() -> None:
    after = failover.go_on(state_of(place=1), NOW)
    assert (after.place, after.place_since, after.reconnect_at) == (0, NOW, NOW + RECONNECT_S)


@pytest.mark.parametrize(("looked_s_ago", "expected"), [(1.0, NOW - 1.0 + LOOK_S), (LOOK_S + 5.0, NOW)])
def test_at_the_end_of_the_list_it_looks_for_others(looked_s_ago: float, expected: float) -> None:
    assert failover.go_on(state_of(place=1, looked=NOW - looked_s_ago), NOW).looks_at == expected


def test_a_look_that_is_due_stays_where_it_is() -> None:
    assert failover.go_on(state_of(place=1, looks_at=NOW + 0.25), NOW).looks_at == NOW + 0.25


def test_before_the_job_has_assembled_it_looks_for_none() -> None:
    assert failover.go_on(state_of(place=1, term=-1), NOW).looks_at == inf
    assert failover.go_on(state_of(place=1, term=0), NOW).looks_at < inf


def test_where_no_rank_starts_controllers_it_looks_for_none() -> None:
    assert failover.go_on(with_settings(state_of(place=1), look_s=inf), NOW).looks_at == inf


def test_when_a_controller_is_given_up() -> None:
    up = state_of(link=LinkState.UP, received_s=NOW - 1.0)
    assert failover.go_on_at(up) == NOW - 1.0 + LEASE_S
    trying = state_of(link=LinkState.CONNECTING, place_since=NOW - 2.0)
    assert failover.go_on_at(trying) == NOW - 2.0 + LEASE_S
    assert failover.go_on_at(replace(trying, successors=())) == inf
    assert failover.go_on_at(state_of(link=LinkState.DOWN)) == inf


# --- all of them are lost ---


@pytest.mark.parametrize(("refusals", "expected"), [(1, False), (2, True)])
def test_all_are_lost_when_each_has_refused(refusals: int, expected: bool) -> None:
    assert failover.lost_all(state_of(refusals=refusals), NOW) is expected


@pytest.mark.parametrize(("lost_s", "lease_s", "patience"), [(LOST_S, LEASE_S, 6.0), (8.0, LEASE_S, 4.0)])
def test_or_when_a_takeover_would_be_over(lost_s: float, lease_s: float, patience: float) -> None:
    state = with_settings(state_of(lost_since=NOW, lease_s=lease_s), controller_lost_s=lost_s)
    assert failover.lost_all(state, NOW + patience)
    assert not failover.lost_all(state, NOW + patience - 0.1)


def test_a_rank_with_a_controller_or_before_its_first_welcome_has_not_lost_all() -> None:
    assert not failover.lost_all(state_of(link=LinkState.UP, refusals=2), NOW)
    assert not failover.lost_all(state_of(term=-1, refusals=2), NOW)
    assert failover.lost_all(state_of(term=0, refusals=2), NOW)


# --- the list ---


def test_the_active_controllers_order_comes_first_and_the_place_stays_with_its_address() -> None:
    after = failover.take_list(state_of(successors=(SECOND, THIRD), place=1), (THIRD,))
    assert after.successors == (THIRD, SECOND)
    assert failover.controllers(after)[after.place] == SECOND


def test_the_same_list_again_changes_nothing() -> None:
    state = state_of(successors=(SECOND, THIRD), place=2)
    assert failover.take_list(state, (SECOND, THIRD)) is state


# --- controllers that ranks start ---


def test_one_standby_is_started_at_a_time() -> None:
    out: list[Any] = []
    after = failover.start_standby(state_of(), StartStandby(), NOW, out)
    assert (out, after.starting) == ([StartController()], True)
    assert failover.start_standby(after, StartStandby(), NOW, out) is after
    assert len(out) == 1


def test_a_started_standby_is_reported_and_remembered() -> None:
    earlier = StandbyReport(0, "earlier:9", False)
    after, out = started(state_of(link=LinkState.UP, starting=True, standbys=(earlier,)))
    report = StandbyReport(0, THIRD, True)
    assert Send(report) in out
    assert (after.starting, after.standbys, after.looks_at) == (False, (earlier, report), inf)


@pytest.mark.parametrize(("address", "error"), [("", "no port"), (SECOND, "")])
def test_one_that_was_not_started_is_reported_and_not_remembered(address: str, error: str) -> None:
    after, out = started(state_of(link=LinkState.UP, starting=True), address, error)
    assert out[0] == Send(StandbyReport(0, "", False, error))
    assert isinstance(out[1], Log)
    assert (error or "its address is taken") in out[1].text
    assert (after.starting, after.standbys) == (False, ())


def test_without_a_controller_the_started_one_is_looked_for_when_all_others_are_lost() -> None:
    after, out = started(state_of(refusals=2, starting=True))
    assert after.looks_at == NOW
    assert not any(isinstance(effect, Send) for effect in out)
    assert started(state_of(refusals=0, starting=True))[0].looks_at == inf, "a standby may take over yet"
    assert started(with_settings(state_of(refusals=2, starting=True), look_s=inf))[0].looks_at == inf


def test_a_controller_that_has_ended_is_reported_in_place_of_what_was_said_of_it() -> None:
    other = StandbyReport(0, SECOND, True)
    state = state_of(link=LinkState.UP, standbys=(StandbyReport(0, THIRD, True), other))
    out: list[Any] = []
    after = failover.controller_ended(state, ControllerEnded(THIRD), NOW, out)
    report = StandbyReport(0, THIRD, False)
    assert (out, after.standbys) == ([Send(report)], (other, report))
    out.clear()
    after = failover.controller_ended(replace(state, link=LinkState.DOWN), ControllerEnded(THIRD), NOW, out)
    assert (out, after.standbys) == ([], (other, report))


# --- a look ---


def test_it_looks_when_that_is_due_and_notes_when_it_did() -> None:
    out: list[Any] = []
    after = failover.look(state_of(looks_at=NOW), NOW, out)
    assert (out, after.looks_at, after.looked) == ([LookForControllers()], inf, NOW)


def test_it_does_not_look_before() -> None:
    out: list[Any] = []
    state = state_of(looks_at=NOW + 0.1)
    assert failover.look(state, NOW, out) is state
    assert not out


def test_a_rank_that_has_a_controller_again_does_not_look() -> None:
    out: list[Any] = []
    after = failover.look(state_of(link=LinkState.UP, looks_at=NOW, looked=7.0), NOW, out)
    assert (out, after.looks_at, after.looked) == ([], inf, 7.0)


def test_the_newest_controller_that_it_did_not_know_of_is_tried_at_once() -> None:
    state = state_of(link=LinkState.CONNECTING, refusals=2, reconnect_at=NOW + 9.0)
    after, out = found(state, SECOND, THIRD, "fourth:4")
    assert after.successors == (SECOND, THIRD, "fourth:4")
    assert failover.controllers(after)[after.place] == "fourth:4"
    assert (after.link, after.place_since, after.reconnect_at, after.refusals) == (LinkState.DOWN, NOW, NOW, 0)
    assert [type(effect) for effect in out] == [Log]
    assert f"{THIRD}, fourth:4" in out[0].text


@pytest.mark.parametrize("changed", [dict(link=LinkState.UP), dict(alone=True)])
def test_what_is_found_is_of_no_use_to_a_rank_that_is_led_or_saves_alone(changed: dict[str, Any]) -> None:
    state = nothing_runs(**changed)
    assert found(state, THIRD) == (state, [])
    assert found(state) == (state, [])


# --- where none runs ---


def test_rank_0_starts_one_where_all_have_refused_and_no_other_is_found() -> None:
    after, out = found(nothing_runs(), SECOND)
    assert StartController((FIRST, SECOND)) in out
    assert (after.starting, after.starts_at) == (True, NOW + START_S)
    assert (after.successors, after.place) == ((SECOND,), 0)


@pytest.mark.parametrize(
    "state",
    [
        with_settings(nothing_runs(), rank=1),
        nothing_runs(refusals=1),
        nothing_runs(starting=True),
        nothing_runs(finished=True),
        nothing_runs(starts_at=NOW + 0.1),
    ],
    ids=["not rank 0", "one has not refused", "one is being started", "training is over", "one was started just now"],
)
def test_no_controller_is_started_otherwise(state: ProcessorState) -> None:
    assert found(state) == (state, [])
