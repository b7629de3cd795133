"""Which controller a rank turns to when its own is lost, and where it finds those that it does not know of (PURE).

Owns the rank's place in the list of controllers: the first one, then the standbys in the order in which they take over. The list is
the active controller's, which has all that any of its ranks knows. A rank moves to the next one when nothing listens at the address,
when the stream that broke cannot be opened again within a lease, or when nothing was received for a lease. After the last comes the
first again: where no standby was ever reached the first may be back, and once one was, the stream refuses every lower term.

A rank that has come to the end of its list looks for controllers that other ranks have started: it may have missed the word of one.
When all that it knows have refused it and it finds no other, no controller runs any more, and rank 0 starts one.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace
from ttp.proto.limits import MOST_ADDRESSES
from ttp.proto.messages import StandbyList, StandbyReport, StartStandby

from .events import (
    ControllerEnded,
    ControllersFound,
    ControllerStarted,
    Effect,
    Log,
    LookForControllers,
    Send,
    StartController,
)
from .state import LinkState, ProcessorState

_UP, _DOWN, _CONNECTING = LinkState.UP, LinkState.DOWN, LinkState.CONNECTING


def controllers(state: ProcessorState) -> tuple[str, ...]:
    """Return the addresses of all controllers, in the order in which they take over."""
    return (state.settings.address, *state.successors)


def lost(state: ProcessorState, now: float, refused: bool) -> ProcessorState:
    """The stream is closed, or could not be opened: say when to try again, and where."""
    was_up = state.link is LinkState.UP
    if was_up:
        state = replace(state, lost_since=now, place_since=now, refusals=0)
    state = replace(state, link=LinkState.DOWN, heartbeat_at=inf, reconnect_at=now + state.settings.reconnect_s)
    if refused:
        return go_on(replace(state, refusals=state.refusals + 1), now)
    state = replace(state, refusals=0)
    return go_on(state, now) if now >= state.place_since + state.lease_s else state


def silent(state: ProcessorState, now: float) -> ProcessorState:
    """Nothing was received on an open stream for a lease."""
    return go_on(replace(state, lost_since=now, heartbeat_at=inf, refusals=0), now)


def go_on(state: ProcessorState, now: float) -> ProcessorState:
    """Turn to the next controller: at once, but with a pause before every new round through the list."""
    place = (state.place + 1) % (1 + len(state.successors))
    pause = 0.0 if place else state.settings.reconnect_s
    look_s = state.settings.look_s
    if not place and look_s < inf and state.term >= 0 and state.looks_at == inf:
        state = replace(state, looks_at=max(now, state.looked + look_s))
    return replace(state, link=LinkState.DOWN, place=place, place_since=now, reconnect_at=now + pause)


def go_on_at(state: ProcessorState) -> float:
    """Return when the controller that this rank is with, or waits for, is given up; inf: never."""
    link = state.link
    if link is _UP:
        return state.received_s + state.lease_s
    if link is _CONNECTING and state.successors:
        return state.place_since + state.lease_s
    return inf


def lost_all(state: ProcessorState, now: float) -> bool:
    """Say whether no controller leads this rank nor is likely to soon: every one that it knows has refused it in a row, or it has been
    without one for longer than a takeover takes."""
    if state.link is _UP or state.term < 0:
        return False
    patience = min(2 * state.lease_s, state.settings.controller_lost_s / 2)
    return state.refusals >= len(controllers(state)) or now >= state.lost_since + patience


# --- controllers that ranks start ---


def take_list(state: ProcessorState, addresses: tuple[str, ...]) -> ProcessorState:
    """Take over the order of the active controller's list; what it does not have, which is nothing once this rank has registered with
    it, comes behind."""
    if addresses == state.successors:
        return state
    current = controllers(state)[state.place]
    successors = (*addresses, *(address for address in state.successors if address not in addresses))[:MOST_ADDRESSES]
    if current not in (state.settings.address, *successors):
        successors = (*successors[:-1], current)
    return replace(state, successors=successors, place=(state.settings.address, *successors).index(current))


def learn(state: ProcessorState, message: StandbyList, now: float, out: list[Effect]) -> ProcessorState:
    """The list of standbys has changed."""
    return take_list(state, message.addresses)


def start_standby(state: ProcessorState, message: StartStandby, now: float, out: list[Effect]) -> ProcessorState:
    """There are too few standbys: start one, unless one is being started already."""
    if state.starting:
        return state
    out.append(StartController())
    return replace(state, starting=True)


def controller_started(
    state: ProcessorState, event: ControllerStarted, now: float, out: list[Effect]
) -> ProcessorState:
    """Report it to the active controller; without one, ranks find it as they look for one, behind the standbys that they know.

    A rank that went to it at once would begin its term while the others waited for an earlier standby.
    """
    address = (
        event.address if event.address not in controllers(state) else ""
    )  # an earlier one's: the two could not be distinguished
    report = StandbyReport(state.settings.rank, address, bool(address), event.error)
    if state.link is _UP:
        out.append(Send(report))
    elif state.settings.look_s < inf and lost_all(state, now):
        state = replace(state, looks_at=now)
    if not address:
        out.append(Log(f"no controller was started here: {event.error or 'its address is taken'}"))
        return replace(state, starting=False)
    out.append(Log(f"a standby controller was started at {address}"))
    return replace(state, starting=False, standbys=(*state.standbys, report))


def controller_ended(state: ProcessorState, event: ControllerEnded, now: float, out: list[Effect]) -> ProcessorState:
    """Report that a controller that this rank has started is gone: another standby may be needed."""
    report = StandbyReport(state.settings.rank, event.address, False)
    if state.link is _UP:
        out.append(Send(report))
    return replace(state, standbys=(*(one for one in state.standbys if one.address != event.address), report))


def look(state: ProcessorState, now: float, out: list[Effect]) -> ProcessorState:
    """Look for controllers that this rank does not know of, when that is due and it still has none."""
    if now < state.looks_at:
        return state
    if state.link is _UP:
        return replace(state, looks_at=inf)
    out.append(LookForControllers())
    return replace(state, looks_at=inf, looked=now)


def found(state: ProcessorState, event: ControllersFound, now: float, out: list[Effect]) -> ProcessorState:
    """Turn to the newest controller that this rank did not know of; where there is none and no known one runs, rank 0 starts one."""
    if state.link is _UP or state.alone:
        return state
    new = tuple(address for address in event.addresses if address not in controllers(state))
    if new:
        out.append(Log(f"controllers were started meanwhile: {', '.join(new)}"))
        successors = (*state.successors, *new)
        return replace(
            state,
            successors=successors,
            place=len(successors),
            link=_DOWN,
            place_since=now,
            reconnect_at=now,
            refusals=0,
        )
    if not _starts_one(state, now):
        return state
    out += [Log("no controller runs any more: starting one"), StartController(controllers(state))]
    return replace(state, starting=True, starts_at=now + state.settings.start_s)


def _starts_one(state: ProcessorState, now: float) -> bool:
    """True on rank 0 when every controller that it knows has refused it, none since anything else: none of them runs."""
    all_refused = state.refusals >= len(controllers(state))
    return (
        state.settings.rank == 0 and all_refused and not (state.starting or state.finished) and now >= state.starts_at
    )
