"""What a fault was: gathered while it lasts, and journaled once, when the ranks are ordered to exit (PURE).

Owns the notes and the `incident` event that is made of them. Decides nothing: no other module reads the notes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ttp.proto.frozen import dataclass, replace
from ttp.proto.incident import EVENT, STAGES, Culprit, Incident, RankPlace, Saved, incident_fields, trace_end
from ttp.proto.messages import Cause, CauseKind, FaultReport, Phase, StateReport

from .events import Effect, Journal
from .state import MOST_KEPT, ControllerState, Notes, S, Sign

NO_RANKS_TEXT = "no rank was attached"
"""Why a controller has ended that was left alone; with how long it has waited behind it."""
EXITING_TEXT = "exiting"
"""WorkerExit's text while the kernel still frees the process and its status is unknown."""
_GONE = (CauseKind.EXITED, CauseKind.SILENT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a fault ended: saved, or why not and what the next attempt goes on from."""

    saved: Saved | None = None
    not_saved: str = ""
    goes_on_from: str = ""
    kept_step: int | None = None
    """The newest step that is on disk, 0: none; None: not known."""
    in_place: bool = False
    """Training continues at `kept_step`, without a checkpoint."""


# --- notes ---


def began(state: S, now: float) -> S:
    """Note that something is wrong; only the first sign counts."""
    notes = state.notes
    return state if notes.began < inf else replace(state, notes=replace(notes, began=now))


def signs_of(state: S, cause: Cause, now: float, trace: tuple[str, ...] = (), pid: int = 0) -> S:
    """Note what happened to these ranks, in which process where that is known better than by their registrations. A failed collective names no culprit, and is kept only while nothing else is known."""
    state = began(state, now)
    signs = state.notes.signs
    if (cause.kind is CauseKind.PEER_ERROR and signs) or len(signs) >= MOST_KEPT + state.settings.world_size:
        return state
    added = tuple(_sign(state, rank, cause, now, trace, pid) for rank in cause.ranks)
    return replace(state, notes=replace(state.notes, signs=(*signs, *added)))


def _sign(
    state: ControllerState, rank: int, cause: Cause, seen: float, trace: tuple[str, ...] = (), pid: int = 0
) -> Sign:
    registration = state.members.table[rank].registration
    host, known = (registration.host, registration.pid) if registration is not None else ("", 0)
    pid = pid or known
    return Sign(rank, cause.kind, cause.text, seen, trace, host, pid)


def sign_of_death(state: S, rank: int, cause: Cause, now: float, pid: int = 0) -> S:
    """Note a death, with where the rank was by its last heartbeat."""
    place = state.pace.places[rank]
    state = signs_of(state, Cause(cause.kind, (rank,), cause.text), now, pid=pid)
    if place is None or state.notes.signs[-1].rank != rank:
        return state
    heard_s = round(now - state.members.table[rank].received_at, 3)
    last = replace(state.notes.signs[-1], phase=place.phase.name, step=place.step, heard_s=heard_s)
    return replace(state, notes=replace(state.notes, signs=(*state.notes.signs[:-1], last)))


def sign_of_report(state: S, report: FaultReport, now: float) -> S:
    """Note a fault that a rank reported of itself."""
    return signs_of(state, replace(report.cause, ranks=(report.rank,)), now, trace_end(report.detail))


def death_named(state: S, rank: int, known: Cause, cause: Cause) -> S:
    """More is known of a death."""
    signs = tuple(
        replace(sign, text=cause.text) if sign.rank == rank and sign.kind in _GONE and sign.text == known.text else sign
        for sign in state.notes.signs
    )
    return replace(state, notes=replace(state.notes, signs=signs))


def no_hang(state: S) -> S:
    """A rank has progressed: what was noted of a hang is void."""
    signs = tuple(sign for sign in state.notes.signs if sign.kind is not CauseKind.HUNG)
    return replace(state, notes=replace(state.notes, signs=signs))


def asked(state: S, cause: Cause, now: float) -> S:
    """Note that the gates are ordered shut, and why."""
    state = began(state, now)
    stages = state.notes.stages or (("seen", now),)
    return replace(state, notes=replace(state.notes, asked=cause, stages=stages))


def stage_ended(state: S, stage: str, now: float) -> S:
    """Note the end of one of STAGES; of a stage that there was several times the last one counts. The first reports say where the ranks
    were: later ones come after roll-forwards. Without any, nothing is known of the steps."""
    notes = state.notes
    stages = (*(known for known in notes.stages if known[0] != stage), (stage, now))
    reports, fault = notes.reports, state.fault
    if stage == "frozen" and reports is None and fault is not None and any(each is not None for each in fault.reports):
        reports = fault.reports
    return replace(state, notes=replace(notes, stages=stages, reports=reports))


# --- the event ---


def report(state: S, outcome: Outcome, now: float, out: list[Effect]) -> S:
    """Journal the fault that ends, if there was one."""
    notes, fault = state.notes, state.fault
    if notes.began == inf:
        return state
    culprits = _culprits(state, now)
    named = {culprit.rank for culprit in culprits}
    records = [record.step for record in fault.records] if fault is not None else []
    lost = None
    if outcome.in_place:
        lost = 0  # a process whose place was taken may have finished one step more, alone: the others take it next
    elif notes.reports is not None and outcome.kept_step is not None:
        lost = max(0, max(records, default=outcome.kept_step) - outcome.kept_step)
    incident = Incident(
        kind=_kind(state),
        suspected=not notes.signs,
        culprits=culprits,
        survivors=_survivors(notes, named),
        saved=outcome.saved,
        not_saved=outcome.not_saved,
        in_place=outcome.in_place,
        goes_on_from=outcome.goes_on_from,
        steps_lost=lost,
        took_over=state.settings.standby,
        took_ms=_took_ms(notes, now),
    )
    out.append(Journal(EVENT, incident_fields(incident)))
    return replace(state, notes=Notes())


def _kind(state: ControllerState) -> str:
    """Return the kind of the root cause: the first that is not what came of another."""
    notes, causes = state.notes, state.fault.causes if state.fault is not None else ()
    kinds = [cause.kind for cause in causes] or [sign.kind for sign in notes.signs]
    first = next((kind for kind in kinds if kind is not CauseKind.PEER_ERROR), kinds[0] if kinds else None)
    if first is None and notes.asked is not None:
        first = notes.asked.kind
    if first is None:
        return CauseKind.CONTROLLER_LOST.value if state.settings.standby else "unknown"
    return first.value


def _culprits(state: ControllerState, now: float) -> tuple[Culprit, ...]:
    """Return the ranks that died, raised, hung or were preempted, in the order seen; else those that are suspected."""
    notes, found = state.notes, tuple(_by_rank(state.notes.signs).values())
    if not found and (cause := notes.asked) is not None:
        found = tuple(_sign(state, rank, cause, notes.began) for rank in cause.ranks)
    ready = _ready_on_all_ranks(state)
    return tuple(_culprit(state, sign, ready, now) for sign in found)


def _by_rank(signs: Iterable[Sign]) -> dict[int, Sign]:
    """Make one sign of each rank's: an end does not hide what came before it. A notice in the middle of another fault is for survivors
    that a launcher holds: no cause."""
    found: dict[int, Sign] = {}
    for sign in signs:
        known = found.get(sign.rank)
        if sign.kind is CauseKind.PEER_ERROR:
            continue
        if sign.kind in _GONE and known is not None:
            text = known.text if sign.text == EXITING_TEXT else f"{known.text}; then {sign.text}"
            host, pid = known.host or sign.host, known.pid or sign.pid
            sign = replace(sign, kind=known.kind, text=text, seen=known.seen, trace=known.trace, host=host, pid=pid)
        elif sign.kind is CauseKind.PREEMPTED and any(one.kind is not CauseKind.PREEMPTED for one in found.values()):
            continue
        found[sign.rank] = sign
    return found


def _culprit(state: ControllerState, sign: Sign, ready: int, now: float) -> Culprit:
    """Add its process, and where it was."""
    host, pid = sign.host, sign.pid
    if not pid and (registration := state.members.table[sign.rank].registration) is not None:
        host, pid = registration.host, registration.pid
    report: StateReport | None = state.notes.reports[sign.rank] if state.notes.reports is not None else None
    phase, step, heard_s = sign.phase, sign.step, sign.heard_s
    if report is not None:
        phase, step, heard_s = report.phase.name, report.step, None
    known = step if phase != Phase.COMPUTE.name else step - 1
    return Culprit(
        rank=sign.rank,
        host=host,
        pid=pid,
        kind=sign.kind.value,
        cause=sign.text,
        phase=phase,
        step=step,
        reported=report is not None,
        trace=sign.trace,
        heard_s=heard_s,
        reached=ready if phase and report is None and ready > known else 0,
        age_s=round(now - sign.seen, 3),
    )


def _ready_on_all_ranks(state: ControllerState) -> int:
    """Return the newest step of which every rank was READY for certain: somebody reported its commit record, which the spanning
    collective made. 0: not known (with local copies there is none, and a single record may be a checkpoint's)."""
    fault, first = state.fault, state.notes.reports
    if fault is None or first is None:
        return 0
    if any(report is not None and report.backup_step >= 0 for reports in (first, fault.reports) for report in reports):
        return 0
    steps = {record.step for record in fault.records}
    return max((step for step in steps if step - 1 in steps), default=0)


def _survivors(notes: Notes, culprits: set[int]) -> tuple[RankPlace, ...]:
    places: dict[tuple[int, Phase], list[int]] = {}
    for report in notes.reports or ():
        if report is not None and report.rank not in culprits:
            places.setdefault((report.step, report.phase), []).append(report.rank)
    named = sorted((step, phase.name, tuple(ranks)) for (step, phase), ranks in places.items())
    return tuple(RankPlace(phase=phase, step=step, ranks=ranks) for step, phase, ranks in named)


def _took_ms(notes: Notes, now: float) -> dict[str, float]:
    """Return how long each stage took that there was, from the end of the one before it."""
    ends, before = {"seen": notes.began, **dict(notes.stages)}, notes.began
    took: dict[str, float] = {}
    for stage in STAGES:
        if stage in ends:
            took[stage] = round(max(0.0, ends[stage] - before) * 1e3, 1)
            before = max(before, ends[stage])
    took["total"] = round(max(0.0, now - notes.began) * 1e3, 1)
    return took
