"""A processor's protocol core: (state, event, now) -> (state, effects) (PURE).

Owns the entry points. Never touches the gate, the stream or the optimizer: the driver does, and promises to call
`transition` with a Tick at `next_deadline`.
"""

from __future__ import annotations

from math import inf

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.limits import check_downward

from .events import Effect, Event, ProcessorSettings, Received
from .failover import go_on_at
from .state import LinkState, ProcessorState, RankMode
from .transitions import TRANSITIONS, give_up_at

_LEAVING, _DOWN = (
    RankMode.LEAVING,
    LinkState.DOWN,
)  # an attribute of an enumeration takes longer to find than a global name

OWN_ABSENCE_HEARTBEATS = 1.5
"""The machine asks to be called once a heartbeat; a driver that comes later than this was stopped."""


def initial(settings: ProcessorSettings, now: float) -> ProcessorState:
    """Return the state of a rank that has not looked for a controller yet; its first Tick does. It trains, or waits to be filled."""
    state = ProcessorState(settings, RankMode.TRAINING, LinkState.DOWN, reconnect_at=now, lost_since=now)
    if not settings.vacant:
        return state
    freeze_id = settings.vacant
    return replace(
        state, standing=RankMode.FROZEN, freeze_id=freeze_id, gate_id=freeze_id, closed=True, torn=True, vacant=True
    )


def transition(state: ProcessorState, event: Event, now: float) -> tuple[ProcessorState, tuple[Effect, ...]]:
    """Take one event. Raises ProtocolError, with nothing changed, for one that the state does not allow."""
    subject = event.message if isinstance(event, Received) else event
    if state.alone and isinstance(event, Received):
        return state, ()  # it exits when the step is saved, and with no order before
    handler = TRANSITIONS.get((state.standing, type(subject)))
    if handler is None:
        raise ProtocolError(
            f"rank {state.settings.rank}, {state.standing.value}: {type(subject).__name__} is not allowed here: "
            f"{subject!r}"
        )
    if isinstance(event, Received):
        check_downward(event.message)
    out: list[Effect] = []
    return handler(_listen(state, event, now), subject, now, out), tuple(out)


def _listen(state: ProcessorState, event: Event, now: float) -> ProcessorState:
    """Note that the controller has sent. Nothing can have been received while this process was stopped itself, or its clock leapt:
    what a driver comes later than it promised is added to every wait, and no more: one that is kept again and again, because the
    training holds the interpreter, must give a silent controller up as well."""
    received_s, late_s = state.received_s, now - state.seen - state.heartbeat_s
    if late_s > (OWN_ABSENCE_HEARTBEATS - 1) * state.heartbeat_s:
        received_s, lost_since, answer_by = received_s + late_s, state.lost_since + late_s, state.answer_by + late_s
        state = replace(state, lost_since=lost_since, answer_by=answer_by)
    return replace(state, seen=now, received_s=now if isinstance(event, Received) else received_s)


def next_deadline(state: ProcessorState) -> float | None:
    """Return when the driver must call again with a Tick if nothing happens before; None: never."""
    if state.standing is _LEAVING:
        return None
    if state.link is _DOWN:
        moment = inf if state.alone else state.reconnect_at
    else:
        moment = state.seen + state.heartbeat_s
        going_on = go_on_at(state)
        moment = going_on if going_on < moment else moment
    giving_up = give_up_at(state)
    moment = giving_up if giving_up < moment else moment
    moment = state.heartbeat_at if state.heartbeat_at < moment else moment
    moment = state.notice_by if state.notice_by < moment else moment
    moment = state.looks_at if state.looks_at < moment else moment
    return None if moment == inf else moment
