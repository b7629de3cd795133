"""Mutants that cannot be noticed, each with the reason: they are counted apart, and `make mutants` leaves them out.

A row is found by its module, its line as it is written, and the change; a test holds that each row is still a mutant.
"""

from __future__ import annotations

from tests.simulation.mutants.changes import Mutant

Row = tuple[str, str, str]
"""(module, line, change)."""

EQUIVALENT: dict[str, tuple[Row, ...]] = {
    "for the type checker; the stage, or who calls, proves it": (
        ("controller.core.ranks.liveness", "rolls = (RollForward(state.freeze_id, record),) if dump.rolling[rank] and record is not None else ()", "dump.rolling[rank] and record is not None: without record is not None"),
        ("controller.core.ranks.liveness", "*((order,) if rank in dump.publishers and order is not None else ()),", "rank in dump.publishers and order is not None: without order is not None"),
        ("controller.core.dump.reassign", "free = (able_holders(state) & (dump.prompt or frozenset())) - failing_here(state) - frozenset(late)", "dump.prompt or frozenset(): without frozenset()"),
        ("controller.core.ranks.stall", "if fault is None or fault.unproven is None or fault.causes or known is None or order <= known.order:", "fault is None or fault.unproven is None or fault.causes or (known is None) or (order <= known.order): without fault is None"),
        ("controller.core.stages", "return [registration.standby for registration in registrations if registration is not None and registration.standby]", "registration is not None and registration.standby: without registration is not None"),
    ),
    "what it leaves out is looked at again further on: only time is lost": (
        ("controller.core.stages", "if fault.updating and now < fault.update_by:", "if fault.updating and now < fault.update_by: always False"),
        ("controller.core.machine", "if deadline is not None and now >= deadline:", "if deadline is not None and now >= deadline: always True"),
        ("controller.core.machine", "if deadline is not None and now >= deadline:", "deadline is not None and now >= deadline: without now >= deadline"),
        ("controller.core.facts.pace", "if now - pace.moved_at > pace.longest:", "now - pace.moved_at > pace.longest: GtE"),
        ("controller.core.facts.pace", "if now - pace.moved_at > pace.longest:", "now - pace.moved_at: Add"),
        ("controller.core.dump.roll_forward", "if isinstance(verdict, Refusal):  # written again, with every absent rank's fate: O(world) strings without a reader", "if isinstance(verdict, Refusal): always True"),
        ("controller.core.dump.roll_forward", "return updating if updating and isinstance(verdict_of(state, fault, updating), Decision) else ()", "updating and isinstance(verdict_of(state, fault, updating), Decision): without updating"),
        ("controller.core.machine", "if now - state.seen <= late_s:", "now - state.seen <= late_s: Lt"),
        ("controller.core.machine", "if now - state.seen <= late_s:", "now - state.seen: Add"),
    ),
    "in RUNNING whoever is dead has finished": (
        ("controller.core.ranks.stall", "living = state.members.table.ranks(lambda member: member.dead is None and not member.finished)", "member.dead is None and (not member.finished): without member.dead is None"),
    ),
    "words and digits that people read": (
        ("processor.core.transitions", 'survives = f"; the job survives {message.survives}" if message.survives else ""', "if message.survives: always True"),
        ("processor.core.transitions", 'survives = f"; the job survives {message.survives}" if message.survives else ""', "if message.survives: always False"),
        ("controller.core.ranks.stall", 'fields: Fields = {"ranks": named, "text": text, "limit_s": round(pace.limit_s, 3)}', "3: 4"),
    ),
    "a rank that never registered has no stream that could count as closed": (
        ("controller.core.ranks.takeover", "members = mark_dead(members, rank, cause, False, now)", "False: True"),
    ),
    "a rank that never registered is waited for anyway": (
        ("controller.core.ranks.takeover", "came = [member for member in state.members.table if member.registration is not None and member.dead is None]", "member.registration is not None and member.dead is None: without member.registration is not None"),
    ),
    "a freeze without a cause and without suspects, in which no takeover is judged, is thawed at once": (
        ("controller.core.stages", "waits = fault.unproven is not None or (fault.takeover and fault.awaiting)", "fault.takeover and fault.awaiting: Or"),
        ("controller.core.stages", "waits = fault.unproven is not None or (fault.takeover and fault.awaiting)", "fault.takeover and fault.awaiting: without fault.takeover"),
        ("controller.core.stages", "waits = fault.unproven is not None or (fault.takeover and fault.awaiting)", "fault.takeover and fault.awaiting: without fault.awaiting"),
        ("controller.core.stages", "return fault.round_deadline if waits and not state.members.suspects else inf", "waits and (not state.members.suspects): without waits"),
    ),
    "a rank is frozen through a stream, and a new stream forgets that a loss was reported": (
        ("processor.core.transitions", "if state.loss_logged and standing is _TRAINING and not (state.faults or state.finished or state.parked):", "state.loss_logged and standing is _TRAINING and (not (state.faults or state.finished or state.parked)): without standing is _TRAINING"),
    ),
    "terms begin at 1": (
        ("processor.core.transitions", "if state.term < 0:", "state.term < 0: LtE"),
        ("processor.core.transitions", "if state.term < 0:", "0: 1"),
    ),
    "of two equal values either is the smaller": (
        ("controller.core.facts.pace", "if place < len(numbers) and numbers[place] == number and seconds < durations[place]:", "seconds < durations[place]: LtE"),
        ("processor.core.machine", "moment = going_on if going_on < moment else moment", "going_on < moment: LtE"),
        ("processor.core.machine", "moment = giving_up if giving_up < moment else moment", "giving_up < moment: LtE"),
        ("processor.core.machine", "moment = state.heartbeat_at if state.heartbeat_at < moment else moment", "state.heartbeat_at < moment: LtE"),
        ("processor.core.machine", "moment = state.notice_by if state.notice_by < moment else moment", "state.notice_by < moment: LtE"),
        ("processor.core.transitions", "return lost if lost < state.answer_by else state.answer_by", "lost < state.answer_by: LtE"),
    ),
    "the same standstill again teaches the same": (
        ("controller.core.facts.pace", "if not has_started(pace) or gap <= pace.longest:", "gap <= pace.longest: Lt"),
    ),
    "one entry a rank is in both": (
        ("controller.core.dump.roll_forward", "for rank, report, member in zip(range(len(fault.reports)), fault.reports, state.members.table, strict=True)", "True: False"),
    ),
    "a rank whose report can be used is known by its step, and never by its absence": (
        ("controller.core.dump.roll_forward", "elif not report.closed:", "if not report.closed: always True"),
    ),
    "a byte a second": (
        ("controller.core.dump.writing", "SLOW_DISK_BYTES_PER_S = 50e6", "50000000.0: 50000001.0"),
    ),
    "what is down has no link to give up: each of two looks at the link is enough": (
        ("processor.core.failover", "if link is _CONNECTING and state.successors:", "link is _CONNECTING and state.successors: Or"),
        ("processor.core.failover", "if link is _CONNECTING and state.successors:", "link is _CONNECTING and state.successors: without link is _CONNECTING"),
        ("processor.core.transitions", "if state.link is not _DOWN and now >= go_on_at(state):", "state.link is not _DOWN and now >= go_on_at(state): without state.link is not _DOWN"),
    ),
    "where no rank lives none is attached, and it is asked first": (
        ("controller.core.facts.membership", "return members.present == 0 or 0 < members.suspects == members.alive", "0 < members.suspects == members.alive: LtE"),
    ),
    "what is the very object is the same text": (
        ("controller.core.dump.freeze", "if known != record and repr(known) != repr(record):  # by text where they differ: a skipped step's norm is NaN", "known != record and repr(known) != repr(record): without known != record"),
    ),
    "of whom nothing else is known, the text says the same": (
        ("controller.core.dump.roll_forward", "elif report is None or member.suspect:", "report is None or member.suspect: without member.suspect"),
    ),
}  # fmt: skip
"""By the reason."""

_REASONS = {row: why for why, rows in EQUIVALENT.items() for row in rows}


def reason(mutant: Mutant) -> str:
    """Return why a mutant changes nothing that matters; empty: no reason is known."""
    return _REASONS.get((mutant.module, mutant.source, mutant.change), "")
