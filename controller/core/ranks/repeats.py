"""What a rank has lost is sent to it once more (PURE).

Owns the comparison of a heartbeat with the controller's own stage. A stream that breaks is noticed, and its rank is told
everything when it registers again; a message that is lost while its stream lives is not. So each heartbeat reports the
freeze that its rank is frozen under, whether the rank owes an answer, and whether it has finished: what does not fit is
sent again, once a heartbeat, until it fits. A heartbeat that has crossed a message has it sent twice, which does no harm.

Never changes what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttp.proto.messages import EXIT_CODE_PERSISTED, Exit, Finished, Heartbeat, Thaw

from ..facts.events import Effect, Send
from ..facts.state import ControllerState, Stage
from .liveness import finished, freeze_in_force, open_orders

_RUNNING, _FREEZING, _EXITING = Stage.RUNNING, Stage.FREEZING, Stage.EXITING  # found faster than attributes
_ORDERED = (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING)


def repeat_lost(state: ControllerState, beats: Iterable[Heartbeat], now: float, out: list[Effect]) -> ControllerState:
    """Send these ranks again what they have lost, and take from them what was lost on the way here."""
    stage = state.stage
    for beat in beats:
        if beat.finished and not state.members.table[beat.rank].finished:
            state = finished(state, Finished(beat.rank), now, out)
        if stage is _RUNNING:
            if 0 < beat.frozen <= state.freeze_id:
                out.append(Send((beat.rank,), Thaw(state.freeze_id)))
        elif stage is _FREEZING:
            if _lacks_report(state, beat):
                out.append(Send((beat.rank,), freeze_in_force(state)))
        elif stage in _ORDERED:
            if beat.frozen == state.freeze_id and not beat.owes:
                out.extend(Send((beat.rank,), order) for order in open_orders(state, beat.rank))
        elif stage is _EXITING:
            out.append(Send((beat.rank,), Exit(EXIT_CODE_PERSISTED, state.reason)))
    return state


def _lacks_report(state: ControllerState, beat: Heartbeat) -> bool:
    """The freeze has not come to this rank, or its answer has not come here. While an update keeps its gate from closing it owes
    the answer still."""
    fault = state.fault
    assert fault is not None
    report = fault.reports[beat.rank]
    if (report is not None and report.closed) or beat.rank in fault.stuck:
        return False
    return beat.frozen != state.freeze_id or not beat.owes
