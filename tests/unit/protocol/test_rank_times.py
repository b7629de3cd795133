"""What a new stream changes, when a rank without a controller gives up, and what it does till then: one rule each, on a state made for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.unit.protocol.bench import registration
from ttp.processor.core import transitions
from ttp.processor.core.events import (
    Connect,
    Connected,
    ExitProcess,
    LeaveBoundary,
    Log,
    ProcessorSettings,
    ReportUnled,
    SavesAlone,
    Send,
    Tick,
)
from ttp.processor.core.state import LinkState, ProcessorState, RankMode
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    EXIT_CODE_PREEMPTED,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Heartbeat,
    Phase,
    StandbyReport,
    Welcome,
)

NOW, RANK = 100.0, 1
LOST_S, ALONE_S, RECONNECT_S = 20.0, 60.0, 0.5
NOTICE = FaultReport(RANK, Cause(CauseKind.PREEMPTED, (RANK,), "SIGTERM"), "")
FAULT = FaultReport(RANK, Cause(CauseKind.EXCEPTION, (RANK,), "boom"), "")


def state_of(settings: dict[str, Any] | None = None, **changed: Any) -> ProcessorState:
    """Rank 1, which has lost its controller."""
    state = ProcessorState(
        ProcessorSettings(
            RANK,
            reconnect_s=RECONNECT_S,
            controller_lost_s=LOST_S,
            alone_s=ALONE_S,
            address="first:1",
            **(settings or {}),
        ),
        RankMode.TRAINING,
        LinkState.DOWN,
        reconnect_at=inf,
        lost_since=NOW - 1.0,
        term=1,
        lease_s=3.0,
        place_since=NOW - 1.0,
    )
    return replace(state, **changed)


def tick(state: ProcessorState, **said: Any) -> tuple[ProcessorState, list[Any]]:
    out: list[Any] = []
    return transitions.tick(state, replace(Tick(Phase.COMPUTE, 1), **said), NOW, out), out


# --- a new stream ---


def test_a_new_stream_ends_all_that_the_loss_had_begun_and_says_what_may_have_been_lost() -> None:
    standby = StandbyReport(RANK, "mine:7", True)
    lost = state_of(
        unled=True, loss_logged=True, refusals=3, steps=9, steps_reported=4, faults=(FAULT,), standbys=(standby,)
    )
    out: list[Any] = []
    after = transitions.connected(lost, Connected(registration(RANK)), NOW, out)
    assert (after.link, after.lost_since, after.received_s) == (LinkState.UP, inf, NOW)
    assert (after.unled, after.loss_logged, after.refusals, after.steps_reported) == (False, False, 0, 9)
    assert after.save_dirs == registration(RANK).save_dirs and after.group_ids == {"g1"}
    assert out[0] == ReportUnled(False)
    assert out[-2:] == [Send(FAULT), Send(standby)]


def test_a_rank_that_was_led_all_the_time_does_not_say_otherwise() -> None:
    out: list[Any] = []
    transitions.connected(state_of(), Connected(registration(RANK)), NOW, out)
    assert not any(isinstance(effect, ReportUnled) for effect in out)


@pytest.mark.parametrize(
    ("look_s", "standbys", "behind"),
    [
        (4.0, (), "no standby controller until one has been started in its place"),
        (inf, (), "no standby controller: should this one fail too, training continues without protection"),
        (4.0, ("a:1",), "1 standby controller"),
        (inf, ("a:1", "b:2"), "2 standby controllers"),
    ],
)
def test_what_is_behind_a_new_controller(look_s: float, standbys: tuple[str, ...], behind: str) -> None:
    out: list[Any] = []
    transitions.welcome(state_of({"look_s": look_s}), Welcome(RANK, 2, 1.0, 3.0, "", standbys), NOW, out)
    assert out == [Log(f"controller of term 2; behind it {behind}")]


# --- a tick ---


def test_a_controller_that_does_not_take_the_stream_within_a_lease_ends_the_row_of_refusals() -> None:
    state = state_of(link=LinkState.CONNECTING, successors=("second:2",), place_since=NOW - 3.0, refusals=1)
    after, out = tick(state)
    assert (after.place, after.refusals) == (1, 0)
    assert out == [Connect("second:2")]


def test_a_rank_that_gives_up_does_so_at_that_moment() -> None:
    state = state_of(standing=RankMode.FROZEN, closed=True, lost_since=NOW - LOST_S)
    assert [effect.code for effect in tick(state)[1] if isinstance(effect, ExitProcess)] == [75]
    assert not tick(replace(state, lost_since=NOW - LOST_S + 0.1))[1]


@pytest.mark.parametrize(("steps", "times_s", "sent"), [(7, (1.0, 2.0), (1.0, 2.0)), (5, (1.0, 2.0), (2.0,))])
def test_as_many_step_times_are_sent_as_there_are(
    steps: int, times_s: tuple[float, ...], sent: tuple[float, ...]
) -> None:
    """Fewer than the steps that are new, where a freeze had held up one between them."""
    state = state_of(
        link=LinkState.UP, lost_since=inf, received_s=NOW, heartbeat_at=NOW, heartbeat_s=1.0, steps=4, steps_reported=4
    )
    _, out = tick(state, steps=steps, step_times_s=times_s)
    (beat,) = (effect.message for effect in out if isinstance(effect, Send))
    assert isinstance(beat, Heartbeat)
    assert (beat.steps, beat.step_times_s) == (steps, sent)


def test_the_same_number_of_steps_brings_no_other_times() -> None:
    after, _ = tick(state_of(steps=4, step_times_s=(1.0,)), steps=4, step_times_s=(9.0,))
    assert after.step_times_s == (1.0,)


# --- every controller is lost ---


def all_lost(saves_alone: bool = True, **changed: Any) -> ProcessorState:
    return state_of({"saves_alone": saves_alone}, refusals=1, **changed)


def test_the_loss_is_noted_and_ends_a_wait_behind_a_step() -> None:
    after, out = tick(all_lost(parked=True))
    assert (after.unled, after.parked) == (True, False)
    assert ReportUnled(True) in out and LeaveBoundary() in out


@pytest.mark.parametrize(
    "state",
    [all_lost(False, parked=True), all_lost(alone=True, parked=True), replace(all_lost(parked=True), refusals=0)],
    ids=["cannot save alone", "saves already", "a controller may be there yet"],
)
def test_otherwise_it_is_not(state: ProcessorState) -> None:
    after, out = tick(state)
    assert (after.unled, after.parked, out) == (False, True, [])


# --- giving up ---


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (dict(standing=RankMode.LEAVING, alone=True, answer_by=NOW), inf),
        (dict(alone=True, answer_by=NOW + 7.0), NOW + 7.0),
        (dict(unled=True, faults=(NOTICE,)), NOW - 1.0 + ALONE_S),
        (dict(unled=True, faults=(NOTICE, FAULT)), NOW - 1.0 + LOST_S),
        (dict(unled=True), NOW - 1.0 + LOST_S),
        (dict(unled=False, faults=(NOTICE,)), NOW - 1.0 + LOST_S),
        (dict(unled=True, faults=(NOTICE,), parked=True), NOW - 1.0 + LOST_S),
        (dict(unled=True, faults=(NOTICE,), finished=True), NOW - 1.0 + LOST_S),
        (dict(unled=True, faults=(NOTICE,), standing=RankMode.FROZEN), NOW - 1.0 + LOST_S),
        (dict(loss_logged=True), inf),
        (dict(loss_logged=True, faults=(FAULT,)), NOW - 1.0 + LOST_S),
        (dict(loss_logged=True, finished=True), NOW - 1.0 + LOST_S),
        (dict(loss_logged=True, parked=True), NOW - 1.0 + LOST_S),
        (dict(loss_logged=True, standing=RankMode.FROZEN), NOW - 1.0 + LOST_S),
        (dict(answer_by=NOW + 2.0), NOW + 2.0),
    ],
    ids=str,
)
def test_when_a_rank_gives_up(changed: dict[str, Any], expected: float) -> None:
    assert transitions.give_up_at(state_of(**changed)) == expected


def test_a_rank_that_saves_with_the_others_has_no_other_duty() -> None:
    state = state_of(notice="SIGTERM", notice_by=NOW + 1.0, looks_at=NOW + 1.0, heartbeat_at=NOW + 1.0)
    after = transitions.saves_alone(state, SavesAlone(9), NOW, [])
    assert (after.alone, after.answer_by) == (True, NOW + ALONE_S)
    assert (after.notice_by, after.looks_at, after.heartbeat_at) == (inf, inf, inf)


@pytest.mark.parametrize(("notice", "code"), [("SIGTERM", EXIT_CODE_PREEMPTED), ("", EXIT_CODE_PERSISTED)])
def test_a_notice_shows_in_the_exit_status(notice: str, code: int) -> None:
    out: list[Any] = []
    transitions.leave(state_of(notice=notice), Exit(EXIT_CODE_PERSISTED, "step 5 is saved"), NOW, out)
    assert out == [ExitProcess(code, "step 5 is saved")]
