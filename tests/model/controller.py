"""The exhaustive model's controller: the shipped machine, with times counted from now and without what it never reads again.

`canonical` is where states that cannot behave differently become one state; `docs/model.md` argues each line of it. Never
changes what the machine decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from tests.simulation.training import Training
from ttp.controller import events as ev
from ttp.controller import machine
from ttp.controller.membership import Member, Membership, empty
from ttp.controller.rank_table import RankTable
from ttp.controller.state import ControllerState, Dump, Fault, Stage
from ttp.errors import ProtocolError
from ttp.proto.messages import Cause, CauseKind, Downward, Heartbeat, Phase

_FINISHED_ROUND = (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING)


@dataclass(frozen=True, slots=True)
class Head:
    """A controller: its machine, and what it has announced so far (for the checks)."""

    state: ControllerState
    outcomes: tuple[str, ...] = ()
    """published, refused, refused for want of a step, finished; in the order announced."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one event."""

    head: Head
    sends: tuple[tuple[int, Downward], ...]
    """(rank, message) in the order sent."""
    broken: str


def start(training: Training) -> Head:
    """Whole seconds, so that sums of them are exact; the lease's two thirds are whole as well."""
    settings = ev.ControllerSettings("model", 1, training.layout.world_size, heartbeat_s=1.0, lease_s=3.0)
    return Head(canonical(machine.initial(settings, 0.0)))


def hear(head: Head, event: ev.Event, at_s: float = 0.0) -> Heard:
    """Give the machine one event at `at_s` from now; that moment becomes now."""
    try:
        state, effects = machine.transition(head.state, event, at_s)
    except (ProtocolError, AssertionError, KeyError, IndexError) as error:
        return Heard(head, (), f"raised: {type(error).__name__}: {error}")
    outcomes, broken = list(head.outcomes), ""
    sends: list[tuple[int, Downward]] = []
    for effect in effects:
        match effect:
            case ev.Send(ranks, message):
                sends += [(rank, message) for rank in ranks]
            case ev.Journal("published" | "refused" | "finished" as name, fields):
                nothing = "nothing to save" in str(fields.get("reason", ""))
                outcomes.append("refused for want of a step" if nothing else name)
            case ev.Journal("decided", fields):
                broken = broken or _decided_wrong(state, fields["step"])
    return Heard(Head(canonical(state, at_s), tuple(outcomes)), tuple(sends), broken)


def _decided_wrong(state: ControllerState, step: object) -> str:
    """I6: a step whose record was told is not given up without having been tried."""
    fault = state.fault
    if fault is None or fault.unreachable or not fault.records:
        return ""
    newest = fault.records[-1].step
    return f"I6: decided for step {step} although record {newest} was told" if step != newest and newest > 0 else ""


def let_time_pass(head: Head, seconds: float, beating: tuple[int, ...]) -> Heard:
    """Advance to a deadline: the beating ranks' last heartbeats come half a second before it."""
    sends: tuple[tuple[int, Downward], ...] = ()
    passed, broken = 0.0, ""
    if head.state.stage not in (Stage.ASSEMBLING, Stage.OVER) and seconds > 0.5:
        for rank in beating:
            heard = hear(head, ev.Received(Heartbeat(rank, Phase.COMPUTE, 1)), seconds - 0.5 - passed)
            head, sends, broken = heard.head, sends + heard.sends, broken or heard.broken
            passed = seconds - 0.5
    heard = hear(head, ev.Tick(), seconds - passed)
    return Heard(heard.head, sends + heard.sends, broken or heard.broken)


def deadline(head: Head) -> float:
    """Return the seconds until the machine's next deadline, inf: none."""
    moment = machine.next_deadline(head.state)
    return inf if moment is None else moment


# --- one state for all states that behave alike ---


def canonical(state: ControllerState, passed_s: float = 0.0) -> ControllerState:
    """Return the state with times counted from `passed_s` later, and unread fields at one value."""
    if state.stage is Stage.OVER:
        members = empty(state.settings.world_size)
        return replace(
            state, members=members, coverage=None, survives="", reason="", fault=None, dump=None, untold=frozenset(),
            deadline=inf, freeze_id=0,
        )  # fmt: skip
    leaving = state.stage is Stage.EXITING
    fault = None if leaving or state.fault is None else _fault(state.fault, state.stage, passed_s)
    return replace(
        state,
        members=_members(state.members, passed_s, leaving),
        deadline=state.deadline - passed_s,
        fault=fault,
        dump=None if state.dump is None else _dump(state.dump, passed_s),
        reason="" if leaving else state.reason,
        freeze_id=0 if leaving else state.freeze_id,
        coverage=None if leaving else state.coverage,
    )


def _members(members: Membership, passed_s: float, leaving: bool) -> Membership:
    def member(old: Member) -> Member:
        unread = leaving or old.dead is not None or old.registration is None
        return replace(old, heard=0.0 if unread else max(old.heard, members.amnesty) - passed_s)

    chunks = tuple(tuple(member(old) for old in chunk) for chunk in members.table.chunks)
    return replace(
        members,
        table=RankTable(chunks, members.table.width, members.table.size),
        amnesty=-inf,
        sweep_at=inf if leaving else members.sweep_at - passed_s,
        empty_since=inf if leaving else members.empty_since - passed_s,
    )


def _fault(fault: Fault, stage: Stage, passed_s: float) -> Fault:
    fault = replace(
        fault,
        began=fault.began - passed_s,
        causes=_causes(fault.causes),
        hint_until=max(-1.0, fault.hint_until - passed_s),
        round_deadline=max(-1.0, fault.round_deadline - passed_s),
    )
    if stage in _FINISHED_ROUND:  # decided: nobody looks at this round's reports again
        fault = replace(fault, awaiting=0, reports=RankTable.filled(fault.reports.size, None), round_deadline=-1.0)
    return fault


def _causes(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    """The kind seen first comes first; hints count only while they are alone."""
    named = [cause for cause in causes if cause.kind is not CauseKind.PEER_ERROR] or list(causes)
    first = named[0].kind if named else None
    return tuple(sorted(named, key=lambda cause: (cause.kind is not first, cause.kind.value, cause.ranks)))


def _dump(dump: Dump, passed_s: float) -> Dump:
    return replace(dump, progress_by=dump.progress_by - passed_s, errors=())
