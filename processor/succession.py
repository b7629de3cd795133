"""Which controller a rank turns to when its own is gone (PURE).

Owns the rank's place in the list of controllers: the first one, then the standbys in the order of their terms, the same
list on every rank. A rank goes on to the next one when nobody listens at the address, when the stream that broke cannot be
opened again within a lease, or when nothing was heard for a lease. After the last comes the first again: where no standby
was ever reached the first may be back, and once one was, the stream refuses every lower term.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace

from .state import Link, ProcessorState

_UP, _CONNECTING = Link.UP, Link.CONNECTING


def controllers(state: ProcessorState) -> tuple[str, ...]:
    """Return the addresses of all controllers, in the order of their terms."""
    return (state.settings.address, *state.successors)


def lost(state: ProcessorState, now: float, refused: bool) -> ProcessorState:
    """The stream is closed, or could not be opened: say when to try again, and where."""
    was_up = state.link is Link.UP
    if was_up:
        state = replace(state, lost_since=now, place_since=now)
    state = replace(state, link=Link.DOWN, heartbeat_at=inf, reconnect_at=now + state.settings.reconnect_s)
    return go_on(state, now) if refused or now >= state.place_since + state.lease_s else state


def silent(state: ProcessorState, now: float) -> ProcessorState:
    """Nothing was heard on an open stream for a lease."""
    return go_on(replace(state, lost_since=now, heartbeat_at=inf), now)


def go_on(state: ProcessorState, now: float) -> ProcessorState:
    """Turn to the next controller: at once, but with a pause before every new round through the list."""
    place = (state.place + 1) % (1 + len(state.successors))
    pause = 0.0 if place else state.settings.reconnect_s
    return replace(state, link=Link.DOWN, place=place, place_since=now, reconnect_at=now + pause)


def go_on_at(state: ProcessorState) -> float:
    """Return when the controller that this rank is with, or waits for, is given up; inf: never."""
    link = state.link
    if link is _UP:
        return state.heard + state.lease_s
    if link is _CONNECTING and state.successors:
        return state.place_since + state.lease_s
    return inf
