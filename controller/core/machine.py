"""The controller's protocol core: (state, event, now) -> (state, effects) (PURE).

Owns the entry points: what comes before and after every event. Never sends, sleeps or reads a clock: the driver does, and promises to
call `transition` with a Tick at `next_deadline`.
"""

from __future__ import annotations

from math import inf

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.limits import check_upward
from ttp.proto.messages import AgentHello, ReplaceFailed, Upward, Vouch, WorkerExit

from .facts.answers import check_answer, is_late
from .facts.events import ControllerSettings, Effect, Event, HeartbeatBatch, Journal, Received
from .facts.membership import (
    SUSPECT_AFTER,
    clock_went_back,
    controller_resumed,
    empty,
    note_message,
    note_messages,
    silent,
    slow_heartbeat_s,
)
from .facts.pace import at_start
from .facts.state import Assembling, ControllerState, Exiting, Faulted, Gathering, Running, Standby
from .ranks.generations import leads_earlier, refusal
from .stages import advance_stages, expire, grant_time
from .transitions import TABLES

FREEZES_OF_A_TERM = 1 << 20
"""More than a controller ever needs: the numbers of freezes then grow from one controller to the next."""

__all__ = ["initial", "leads_earlier", "next_deadline", "refusal", "transition"]

LATE_HEARTBEATS = 0.5
"""The machine asks to be called once a heartbeat; a driver that comes this much later was stopped. Of heartbeats as rare as
`slow_heartbeat_s`: a busy host that keeps the driver for less takes nothing from a lease that matters, and leases must run out."""


def initial(settings: ControllerSettings, now: float) -> ControllerState:
    """Return the state of a controller without any registered rank."""
    members = empty(settings.world_size)
    pace = at_start(settings)
    if settings.standby:
        freeze_id = settings.standby * FREEZES_OF_A_TERM
        return ControllerState(settings, Standby(), members, pace, freeze_id=freeze_id)
    return ControllerState(settings, Assembling(now + settings.register_timeout_s), members, pace)


def transition(state: ControllerState, event: Event, now: float) -> tuple[ControllerState, tuple[Effect, ...]]:
    """Take one event. Raises ProtocolError, with nothing changed, for one that the state does not allow."""
    subject = event.message if isinstance(event, Received) else event
    handler = TABLES[type(state.at)].on.get(type(subject))
    if handler is None:
        raise ProtocolError(
            f"job {state.settings.job_id}, stage {state.stage.value}: {type(subject).__name__} is not allowed here: "
            f"{subject!r}; does its sender run another version?"
        )
    out: list[Effect] = []
    was_cut_off = _receives_nothing(state)
    if now < state.seen:
        state = replace(state, members=clock_went_back(state.members, now, state.settings))
    state = _excuse_own_absence(state, now)
    of_rank = isinstance(event, HeartbeatBatch)
    if isinstance(event, Received):
        message = event.message
        _check_rank(state, message)
        check_answer(state, message)
        if isinstance(message, (AgentHello, WorkerExit, Vouch, ReplaceFailed)):  # of an agent: it proves no rank's life
            state = replace(state, seen=now)
        else:
            of_rank = True
            state = _note_sender(state, message.rank, now, out)
    elif isinstance(event, HeartbeatBatch):
        for message in event.messages:
            _check_rank(state, message)
        state = _note_senders(state, event, now, out)
    else:
        state = replace(state, seen=now)
    if not is_late(state, subject):
        state = handler(state, subject, now, out)
    if of_rank and isinstance(state.at, Gathering):
        state = replace(state, at=_received_while_gathering(state.at, state.settings, now))
    if of_rank and was_cut_off and not _receives_nothing(state):
        # It was this controller that was cut off: the others come back as well.
        state = grant_time(state, now)
    deadline = next_deadline(state)
    if deadline is not None and now >= deadline:
        state = expire(state, now, out)
    return advance_stages(state, now, out), tuple(out)


def next_deadline(state: ControllerState) -> float | None:
    """Return when the driver must call again with a Tick if nothing happens before; None: never. O(1)."""
    moment = TABLES[type(state.at)].deadline(state)
    return None if moment == inf else moment


def _excuse_own_absence(state: ControllerState, now: float) -> ControllerState:
    """A driver that comes much too late was stopped itself: no rank is to blame for messages that it did not receive meanwhile."""
    late_s = LATE_HEARTBEATS * slow_heartbeat_s(state.settings)
    if now - state.seen <= late_s:
        return state
    deadline = next_deadline(state)
    if deadline is None or now - deadline <= late_s:
        return state
    if isinstance(state.at, Exiting):
        return state
    return grant_time(replace(state, members=controller_resumed(state.members, now, state.settings)), now)


def _check_rank(state: ControllerState, message: Upward) -> None:
    if not isinstance(message, (AgentHello, Vouch)) and not 0 <= message.rank < state.settings.world_size:
        raise ProtocolError(
            f"job {state.settings.job_id}: {type(message).__name__} of rank {message.rank}, the world has ranks 0 to "
            f"{state.settings.world_size - 1}; is a process of another job sending here?"
        )
    check_upward(message, state.settings.world_size)


def _note_sender(state: ControllerState, rank: int, now: float, out: list[Effect]) -> ControllerState:
    """Any message of a rank itself proves that it lives."""
    members = note_message(state.members, rank, now)
    if members.suspects < state.members.suspects:
        out.append(Journal("cleared", {"rank": rank, "why": "it sends messages again"}))
        if state.fault is not None:  # its report counts again: perhaps no rank need be waited for
            state = state.with_fault(replace(state.fault, updating=()))
    return replace(state, members=members, seen=now)


def _note_senders(state: ControllerState, beats: HeartbeatBatch, now: float, out: list[Effect]) -> ControllerState:
    """All of them at once, unless one clears a suspicion."""
    members = note_messages(state.members, {message.rank for message in beats.messages}, now)
    if members is not None:
        return replace(state, members=members, seen=now)
    for message in beats.messages:
        state = _note_sender(state, message.rank, now, out)
    return state


def _receives_nothing(state: ControllerState) -> bool:
    """True while no rank is attached, or all that live are silent, in a job that has assembled."""
    return silent(state.members) and isinstance(state.at, (Running, Faulted))


def _received_while_gathering(at: Gathering, settings: ControllerSettings, now: float) -> Gathering:
    """A controller that received nothing for most of a lease was cut off: ranks that could not come have a lease from now on."""
    if now - at.last_message_at >= SUSPECT_AFTER * settings.lease_s:
        at = replace(at, deadline=min(now + settings.lease_s, max(at.deadline, at.gather_by)))
    return replace(at, last_message_at=now)
