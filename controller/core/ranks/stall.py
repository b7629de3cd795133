"""A standstill of the whole job: noted, then a fault that the ranks' reports must confirm (PURE).

Owns the beginning of a hang's fault and the proof of its contrary: a rank that progressed after all. What the pace is,
`pace` knows; what is done about it, `freeze` and `stages`.
"""

from __future__ import annotations

from ttp.proto.frozen import replace
from ttp.proto.messages import Cause, CauseKind, Heartbeat, StateReport

from ..dump.freeze import begin_fault
from ..facts.events import Effect, Fields, Journal
from ..facts.incident import no_hang, signs_of
from ..facts.pace import advance, outlived, rested, standstill, suspects
from ..facts.state import ControllerState, Running, S


def take_places(
    state: ControllerState, messages: tuple[Heartbeat, ...], now: float, out: list[Effect]
) -> ControllerState:
    """Ranks reported where they are. While frozen that can only disprove a hang."""
    if not isinstance(state.at, Running):
        for message in messages:
            state = _disproved(state, message.rank, (message.step, int(message.phase)), now, out)
        return state
    before = pace = state.pace
    for message in messages:
        after = advance(pace, message, now, state.settings.hang)
        if pace.noted and not after.noted:
            out.append(Journal("moving_again", {"rank": message.rank, "after_s": round(now - pace.moved_at, 3)}))
        pace = after
    return state if pace is before else replace(state, pace=pace)


def check_stall(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Note a standstill half way to the limit; at the limit, close all gates."""
    pace = state.pace
    if not isinstance(state.at, Running) or now < pace.due:
        return state
    living = state.members.table.ranks(lambda member: member.dead is None and not member.finished)
    text, named = standstill(pace, living, now, state.settings.hang), suspects(pace, living)
    fields: Fields = {"ranks": named, "text": text, "limit_s": round(pace.limit_s, 3)}
    if now < pace.hung_at:
        out.append(Journal("stalled", fields))
        return replace(state, pace=replace(pace, noted=True))
    out.append(Journal("hung", fields))
    cause = Cause(CauseKind.HUNG, named, text)
    frozen = begin_fault(signs_of(state, cause, now), (), cause, now, out)
    return frozen.with_fault(replace(frozen.at.fault, unproven=cause))


def report_disproves(state: S, report: StateReport, now: float, out: list[Effect]) -> S:
    """A report from behind a closed gate may show a later place than any heartbeat did."""
    return _disproved(state, report.rank, (report.step, int(report.phase)), now, out)


def _disproved(state: S, rank: int, order: tuple[int, int], now: float, out: list[Effect]) -> S:
    """A rank progressed after its last heartbeat before the freeze: the job was slow, not hung."""
    fault, known = state.fault, state.pace.places[rank]
    if fault is None or fault.unproven is None or fault.causes or known is None or order <= known.order:
        return state
    out.append(Journal("not_hung", {"rank": rank, "step": order[0]}))
    pace = outlived(
        state.pace, now, state.settings.hang
    )  # else the next one of its kind would be taken for a hang again
    return replace(no_hang(state).with_fault(replace(fault, unproven=None)), pace=pace)


def resume_pace(state: S, now: float) -> S:
    """Training continues after a pause that was not its own."""
    return replace(state, pace=rested(state.pace, now))
