"""Moving a machine's clock: all moments in its state become relative to now, so that equal situations are equal states."""

from __future__ import annotations

from math import inf
from typing import Any

from ttp.controller.core.dump.freeze import has_culprit
from ttp.controller.core.facts.membership import Membership
from ttp.controller.core.facts.pace import unknown
from ttp.controller.core.facts.per_rank import PerRank
from ttp.controller.core.facts.state import (
    Assembling,
    ControllerState,
    Exiting,
    Fault,
    Freezing,
    Gathering,
    Notes,
    Publishing,
    Rolling,
    Writing,
)
from ttp.processor.core.state import ProcessorState
from ttp.proto.frozen import replace
from ttp.proto.messages import Cause, CauseKind

_DIGITS = 6
_SETTLED = Fault(0.0, (), Cause(CauseKind.SILENT, (), ""), 0.0, 0.0, 0, PerRank.filled(1, None))
_LONG_S = 1e6
FORGOTTEN_S = 20.0
"""Moments that are longer ago than every timeout of the model are all the same."""


def ago(moment: float, seconds: float) -> float:
    """Return a moment as seen `seconds` later. Infinities stay, and what is long past stays long past."""
    moved = moment - seconds
    if moved in (inf, -inf):
        return moved
    return max(round(moved, _DIGITS), -FORGOTTEN_S)


def later_processor(state: ProcessorState, seconds: float) -> ProcessorState:
    """Return a processor's state as it is `seconds` later. How long steps take is dropped, as the controller's pace is."""
    return replace(
        state,
        steps=0,
        step_times_s=(),
        steps_reported=0,
        reconnect_at=ago(state.reconnect_at, seconds),
        lost_since=ago(state.lost_since, seconds),
        heartbeat_at=ago(state.heartbeat_at, seconds),
        answer_by=ago(state.answer_by, seconds),
        notice_by=ago(state.notice_by, seconds),
        place_since=ago(state.place_since, seconds),
        received_s=ago(state.received_s, seconds),
        seen=ago(state.seen, seconds),
    )


def later_controller(state: ControllerState, seconds: float) -> ControllerState:
    """Return a controller's state as it is `seconds` later.

    What nothing reads any more is dropped: the reports of a round once it is decided (the next round begins without
    any), and once it is decided whether the ranks regroup; a fault's particulars once the ranks are leaving, the order in which causes became known, which only texts show,
    (where ranks may regroup, also who was received from when),
    what is noted of a fault for its report, and the pace, for which these jobs are too short.
    """
    at: Any = state.at
    in_place = state.settings.in_place_s > 0
    if isinstance(at, Gathering):
        at = replace(at, last_message_at=ago(at.last_message_at, seconds))
    if isinstance(at, Gathering | Assembling | Exiting):
        at = replace(at, deadline=ago(at.deadline, seconds))
    if (fault := state.fault) is not None:
        fault = _SETTLED if isinstance(at, Exiting) else fault
        fault = replace(
            fault,
            causes=_causes(fault.causes),
            reports=fault.reports if _reads_reports(state) else PerRank.filled(state.settings.world_size, None),
            began=ago(fault.began, seconds),
            hint_until=ago(fault.hint_until, seconds),
            round_deadline=ago(fault.round_deadline, seconds),
            update_by=ago(fault.update_by, seconds),
        )
        at = replace(at, fault=fault)
    if (dump := state.dump) is not None:
        progress_by, patience_until = ago(dump.progress_by, seconds), ago(dump.patience_until, seconds)
        at = replace(at, dump=replace(dump, progress_by=progress_by, patience_until=patience_until))
    return replace(
        state,
        at=at,
        members=_later_members(state.members, _LONG_S if isinstance(at, Exiting) and in_place else seconds),
        pace=unknown(state.settings.world_size),
        seen=ago(state.seen, seconds),
        notes=Notes(),
    )


def _reads_reports(state: ControllerState) -> bool:
    until = (Rolling, Writing, Publishing) if state.settings.publish_first else (Rolling,)
    return isinstance(state.at, Freezing) or (isinstance(state.at, until) and state.settings.in_place_s > 0)


def _causes(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    """Sort the causes; peer errors do not count once a culprit is known."""
    if has_culprit(causes):
        causes = tuple(cause for cause in causes if cause.kind is not CauseKind.PEER_ERROR)
    return tuple(sorted(set(causes), key=repr))


def _later_members(members: Membership, seconds: float) -> Membership:
    aged = {
        rank: replace(member, received_at=ago(member.received_at, seconds)) for rank, member in enumerate(members.table)
    }
    return replace(
        members,
        table=members.table.put_all(aged),
        leases_renewed_at=ago(members.leases_renewed_at, seconds),
        away_until=ago(members.away_until, seconds),
        sweep_at=ago(members.sweep_at, seconds),
        empty_since=ago(members.empty_since, seconds),
    )
