"""Freeze rounds: closing every rank's gate and collecting what the ranks hold (PURE).

Owns the causes of a fault, its rounds and its reports. A fault may need several rounds: when a plan falls through, the
ranks are asked again under a new number, and everything is decided afresh from what they say then. Never decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from operator import attrgetter
from typing import Any

from ttp.proto.frozen import replace
from ttp.proto.messages import Cause, CauseKind, CommitRecord, Freeze, Phase, Progress, StateReport, Thaw

from ..facts.coverage import coverage_of
from ..facts.events import Effect, Fields, Journal, Send
from ..facts.incident import asked
from ..facts.membership import mark_alive, reachable, was_only_silent
from ..facts.pace import rested
from ..facts.per_rank import PerRank
from ..facts.state import (
    MOST_KEPT,
    ControllerState,
    Fault,
    Faulted,
    Freezing,
    Notes,
    Ordered,
    Running,
    S,
    StateAt,
    goto,
)
from .finish import learn_checkpoint

_KEPT_RECORDS = 4
_NAMED = 8
_PHASE_NAMES = {phase: phase.name for phase in Phase}
_KEPT_HINTS = 64
"""A death makes the collectives of all peers fail, and each of them reports that. So many reports are kept, the others are only
journaled: the first has all that they have."""


def begin_fault(
    state: ControllerState,
    causes: tuple[Cause, ...],
    suspicion: Cause,
    now: float,
    out: list[Effect],
    takeover: bool = False,
) -> StateAt[Freezing]:
    """Close all gates. `causes` empty: only `suspicion` so far, which may turn out a false alarm."""
    fault = Fault(
        began=now,
        causes=causes,
        suspicion=suspicion,
        hint_until=_hint_until(state, inf, causes, now),
        round_deadline=now,
        awaiting=0,
        reports=PerRank.filled(state.settings.world_size, None),
        takeover=takeover,
    )
    return _ask(state, fault, root_cause(causes) or suspicion, now, out)


def next_round(state: StateAt[Ordered], why: str, now: float, out: list[Effect]) -> ControllerState:
    """The plan fell through: ask again who holds what, ranks that came to a new controller meanwhile too. Gates are closed already, so this costs one
    round trip."""
    cause = root_cause(state.at.fault.causes)
    assert cause is not None, "a plan is made for a fault with a cause"
    out.append(Journal("replanned", {"reason": why, "freeze_id": state.freeze_id}))
    return _ask(with_known_shards(state), state.at.fault, cause, now, out)


def with_known_shards(state: S) -> S:
    """Take what all ranks hold that have come so far: some may come to a new controller after it has taken over. O(groups + holders)."""
    registrations = [member.registration for member in state.members.table if member.registration is not None]
    coverage = coverage_of(registrations, state.settings.world_size)
    return replace(state, coverage=coverage, job_groups=max(state.job_groups, len(coverage.groups)))


def _ask(state: ControllerState, fault: Fault, cause: Cause, now: float, out: list[Effect]) -> StateAt[Freezing]:
    freeze_id = state.freeze_id + 1
    lease_s = state.settings.lease_s
    for rank in state.members.table.ranks(
        lambda member: was_only_silent(member) and now < member.received_at + lease_s
    ):
        state = _revived(state, rank, now, out)  # it came back while others were at work
    waited_for = awaited(state, fault)
    recipients = reachable(state.members)
    out.append(Send(recipients, Freeze(freeze_id, cause)))
    out.append(Journal("freeze_sent", {"freeze_id": freeze_id, "ranks": recipients, **cause_fields(cause)}))
    fault = replace(
        fault,
        round_deadline=now + state.settings.freeze_timeout_s,
        awaiting=len(waited_for),
        reports=PerRank.filled(state.settings.world_size, None),
        updating=(),
        update_by=inf,
        asked_late_until=-inf,
    )
    return goto(replace(asked(state, cause, now), freeze_id=freeze_id), Freezing(fault))


def awaited(state: ControllerState, fault: Fault) -> tuple[int, ...]:
    """Return the ranks whose report a round waits for: alive, and not found stuck earlier in this fault."""
    alive = state.members.table.ranks(lambda member: member.dead is None)
    return tuple(rank for rank in alive if rank not in fault.stuck)


def half_of_the_rest(state: StateAt[Faulted], now: float) -> float:
    """Return when half of the fault's remaining time is over; inf when too little remains to share it out."""
    fault, settings = state.at.fault, state.settings
    half_s = (fault.began + settings.total_timeout_s - now) / 2
    return now + half_s if half_s > settings.heartbeat_s else inf


def quarter_of_the_rest(state: StateAt[Faulted], now: float) -> float:
    """Return when a quarter of the fault's remaining time is over; inf when too little remains to share it out."""
    half_at = half_of_the_rest(state, now)
    return half_at if half_at == inf else (now + half_at) / 2


def add_cause(state: S, cause: Cause, now: float) -> S:
    """Note what became known during a fault, if there is one."""
    fault = state.fault
    most = _KEPT_HINTS if cause.kind is CauseKind.PEER_ERROR else MOST_KEPT + state.settings.world_size
    if fault is None or len(fault.causes) >= most:
        return state
    causes = (*fault.causes, cause)
    return state.with_fault(replace(fault, causes=causes, hint_until=_hint_until(state, fault.hint_until, causes, now)))


def _hint_until(state: ControllerState, until: float, causes: tuple[Cause, ...], now: float) -> float:
    """A dead rank's peers often fail before its death is seen: give that one lease from the first hint."""
    return until if until < inf or not causes else now + state.settings.lease_s


def has_culprit(causes: Iterable[Cause]) -> bool:
    """True when somebody is known to be at fault, and not only peers' failed collectives."""
    return any(cause.kind is not CauseKind.PEER_ERROR for cause in causes)


def root_cause(causes: tuple[Cause, ...]) -> Cause | None:
    """Merge causes into the root cause: the kind seen first and all affected ranks. Peer errors count only if nothing else is known."""
    if not causes:
        return None
    named = [cause for cause in causes if cause.kind is not CauseKind.PEER_ERROR] or list(causes)
    same = [cause for cause in named if cause.kind is named[0].kind]
    ranks = tuple(sorted({rank for cause in same for rank in cause.ranks}))
    if len(same) == 1:
        return Cause(same[0].kind, ranks, same[0].text)
    texts = [f"{'+'.join(map(str, cause.ranks))}: {cause.text}" for cause in same[:_NAMED]]
    more = f"; and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
    return Cause(same[0].kind, ranks, "; ".join(texts) + more)


def cause_fields(cause: Cause) -> Fields:
    """Return a cause as journal fields."""
    return {"kind": cause.kind.value, "culprits": cause.ranks, "text": cause.text}


def count_again(state: S, rank: int, now: float, out: list[Effect]) -> S:
    """A rank whose silence was taken for death is there while a round still asks: its report counts, and is waited for.

    Nothing was decided without it yet, and what stands behind its gate it says anew. The cause stays: its peers may have failed.
    """
    if not isinstance(state.at, Freezing) or not was_only_silent(state.members.table[rank]):
        return state
    fault = replace(state.at.fault, updating=())  # perhaps no rank need be waited for
    state = _revived(state, rank, now, out).with_fault(fault)
    if fault.reports[rank] is not None or rank in fault.stuck:
        return state
    until = _late_until(state, fault, now)
    return state.with_fault(
        replace(fault, awaiting=fault.awaiting + 1, round_deadline=max(fault.round_deadline, until))
    )


def ask_late(state: ControllerState, rank: int, now: float) -> ControllerState:
    """A rank attached again while a round asks, and receives its freeze only now."""
    at = state.at
    if not isinstance(at, Freezing) or not owes_report(state, at.fault, rank):
        return state
    return state.with_fault(replace(at.fault, asked_late_until=_late_until(state, at.fault, now)))


def owes_report(state: ControllerState, fault: Fault, rank: int) -> bool:
    """Say whether a rank that is there has yet to answer this round."""
    member = state.members.table[rank]
    return fault.reports[rank] is None and member.attached and member.dead is None and rank not in fault.stuck


def _late_until(state: ControllerState, fault: Fault, now: float) -> float:
    """Return when a rank that is asked now must have answered: half of the fault's time is for writing what the others have."""
    return min(now + state.settings.freeze_timeout_s, fault.began + state.settings.total_timeout_s / 2)


def _revived(state: S, rank: int, now: float, out: list[Effect]) -> S:
    out.append(Journal("cleared", {"rank": rank, "why": "it was only silent"}))
    return replace(state, members=mark_alive(state.members, rank, now))


def take_report(state: StateAt[Faulted], report: StateReport, out: list[Effect]) -> ControllerState:
    """Keep a rank's report of this round, and any commit record in it. Older news than what is known is dropped."""
    fault = state.at.fault
    known = fault.reports[report.rank]
    awaited, reports = fault.awaiting, fault.reports
    if known is None:
        awaited -= state.members.table[report.rank].dead is None and report.rank not in fault.stuck
    if known is None or not _is_older(report, known):
        reports = reports.put(report.rank, report)
    records = _merge(fault.records, report, out)
    state = learn_checkpoint(state, report.checkpoint)
    return state.with_fault(replace(fault, records=records, updating=(), awaiting=awaited, reports=reports))


def extend_update_deadline(
    state: StateAt[Freezing], message: Progress, now: float, out: list[Effect]
) -> ControllerState:
    """A rank that is waited for progresses in its update: extend its deadline, within the fault's total.

    So has a rank that has not reported yet, because it still rolls forward for an earlier round or controller; but for half
    of the fault's time at most: the others' shards may do without it, and then there must be time to write them.
    """
    fault, settings, rank = state.at.fault, state.settings, message.rank
    if rank in fault.stuck:
        return state
    if fault.reports[rank] is None and state.members.table[rank].dead is None:
        round_deadline = max(fault.round_deadline, _late_until(state, fault, now))
        return state.with_fault(replace(fault, round_deadline=round_deadline))
    if rank not in fault.updating:
        return state
    update_by = max(fault.update_by, now + settings.progress_timeout_s)
    return state.with_fault(replace(fault, update_by=update_by))


def _is_older(report: StateReport, known: StateReport) -> bool:
    """Behind a closed gate a state only moves forward or tears; anything else was said earlier and came late."""
    if known.torn or report.torn:
        return known.torn
    return known.closed and (not report.closed or report.state_step < known.state_step)


def _merge(records: tuple[CommitRecord, ...], report: StateReport, out: list[Effect]) -> tuple[CommitRecord, ...]:
    by_step = {record.step: record for record in records}
    for record in report.records:
        known = by_step.setdefault(record.step, record)
        if known != record and repr(known) != repr(record):  # by text where they differ: a skipped step's norm is NaN
            fields: Fields = {"step": record.step, "rank": report.rank, "known": repr(known), "told": repr(record)}
            out.append(Journal("records_differ", fields))
    return tuple(by_step[step] for step in sorted(by_step)[-_KEPT_RECORDS:])


def forget(state: S, rank: int) -> S:
    """A rank that a round may wait for has died just now."""
    fault = state.fault
    if fault is None:
        return state
    fault = replace(fault, updating=())  # it may have been one of them
    owed = rank not in fault.stuck and fault.reports[rank] is None
    return state.with_fault(replace(fault, awaiting=fault.awaiting - owed))


def thaw(state: StateAt[Freezing], now: float, out: list[Effect]) -> ControllerState:
    """A false alarm: no rank died and nothing was ordered. Training continues."""
    recipients = reachable(state.members)
    out.append(Send(recipients, Thaw(state.freeze_id)))
    out.append(Journal("thawed", {"freeze_id": state.freeze_id, "ranks": recipients}))
    return goto(replace(state, notes=Notes(), pace=rested(state.pace, now)), Running())


def frozen_fields(state: StateAt[Freezing]) -> Fields:
    """Return the reports of this round as journal fields, one column per fact."""
    fault = state.at.fault
    reports = [report for report in fault.reports if report is not None]

    def column(name: str) -> tuple[Any, ...]:
        return tuple(map(attrgetter(name), reports))

    missing = [rank for rank, report in enumerate(fault.reports) if report is None]
    silent = (rank for rank in missing if state.members.table[rank].dead is None and rank not in fault.stuck)
    return {
        "freeze_id": state.freeze_id,
        "ranks": column("rank"),
        "phases": tuple(map(_PHASE_NAMES.__getitem__, column("phase"))),
        "steps": column("step"),
        "state_steps": column("state_step"),
        "backup_steps": column("backup_step"),
        "not_closed": tuple(report.rank for report in reports if not report.closed),
        "torn": tuple(report.rank for report in reports if report.torn),
        "silent": tuple(silent),
        "records": tuple(record.step for record in fault.records),
    }
