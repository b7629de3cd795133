"""What a rank has lost is sent to it once more (PURE).

Owns the comparison of a heartbeat with the controller's own stage. A stream that breaks is noticed, and its rank receives
everything when it registers again; a message that is lost while its stream lives is not. So each heartbeat reports the
freeze that its rank is frozen under, whether the rank owes an answer, and whether it has finished: what does not fit is
sent again, once a heartbeat, until it fits. A heartbeat that has crossed a message has it sent twice, which does no harm.

Never changes what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttp.proto.messages import Downward, Finished, Freeze, Heartbeat, Thaw

from ..facts.events import Effect, Send
from ..facts.stage_table import table_of
from ..facts.state import ControllerState, Freezing, Ordered, Running, StateAt
from .liveness import finished, freeze_in_force, open_orders


def repeat_lost(state: ControllerState, beats: Iterable[Heartbeat], now: float, out: list[Effect]) -> ControllerState:
    """Send these ranks again what they have lost, and take from them what was lost on the way here."""
    repeat = table_of(state).repeat
    for beat in beats:
        if beat.finished and not state.members.table[beat.rank].finished:
            state = finished(state, Finished(beat.rank), now, out)
        for message in repeat(state, beat):
            out.append(Send((beat.rank,), message))
    return state


def lost_thaw(state: StateAt[Running], beat: Heartbeat) -> tuple[Thaw, ...]:
    """The rank is frozen under a freeze that is over."""
    return (Thaw(state.freeze_id),) if 0 < beat.frozen <= state.freeze_id else ()


def lost_freeze(state: StateAt[Freezing], beat: Heartbeat) -> tuple[Freeze, ...]:
    """The freeze has not come to this rank, or its answer has not come here. While an update keeps its gate from closing it owes
    the answer still."""
    fault = state.at.fault
    report = fault.reports[beat.rank]
    if (report is not None and report.closed) or beat.rank in fault.stuck:
        return ()
    return (freeze_in_force(state.freeze_id, fault),) if beat.frozen != state.freeze_id or not beat.owes else ()


def lost_orders(state: StateAt[Ordered], beat: Heartbeat) -> tuple[Downward, ...]:
    """The rank owes no answer, and one is awaited."""
    return open_orders(state, beat.rank) if beat.frozen == state.freeze_id and not beat.owes else ()
