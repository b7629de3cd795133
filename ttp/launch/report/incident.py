"""One attempt's fault: the controller's `incident` event, completed by what only the agent knows.

Owns how the two become one report. Journal lines and the attempt's end in, a Report out; only `with_stacks` reads and writes files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ttp.launch.report.exit_status import Recorded, is_peer_error
from ttp.launch.report.journals import Line, leading_lines, read_journals
from ttp.launch.watch.hang_stacks import gather, main_frames, read_asked, read_blocks
from ttp.proto.incident import EVENT, Culprit, Incident, read_incident, trace_end
from ttp.proto.messages import CauseKind

NOTICE = CauseKind.PREEMPTED.value
ENDED = (CauseKind.EXITED.value, CauseKind.SILENT.value)
"""Kinds that show that a rank is gone, but not why."""
_SIGNS = frozenset({"suspect", "hung", "death_seen", "fault_reported", "takeover_began"})
_EXITING = "exiting"
_NO_TIME = "a second signal killed the ranks before"
_UNDECIDED = "not known on this node: its journal ends before a decision"
_NEVER_DECIDED = "the controllers ended before a decision"
_UNLED = "no controller on this node led the ranks"
_LEFT_OUT = (
    "not known on this node: the journals of attempt {} in {} are from before its begin by this node's clock, and were left out."
    " They may be an earlier launch's. If a clock was set back, read in them what was saved"
)
_SAVED_UNKNOWN = "not known on this node: ranks exited for a restart, and no journal here records a saved step"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Ranks that the agent killed at a second signal, and when."""

    ranks: frozenset[int] = frozenset()
    unix_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended on this node."""

    log_dir: Path | None
    """Where its journals are; None: no rank has reported it."""
    exits: Mapping[int, str]
    """How workers ended that failed by themselves."""
    first_exit_unix_s: float | None
    next: str
    """What follows, for people."""
    pids: Mapping[int, int]
    """Of this node's workers, by rank."""
    left_saved: bool = False
    """Workers on this node exited for a restart: on a controller's order, or frozen with no controller any more. A step may be saved."""
    raised: Mapping[int, Recorded] = field(default_factory=dict)
    """The exceptions that some of them recorded."""
    one_node: bool = True
    elsewhere: str | None = ""
    """What ended the attempt on another node, as its agent reported it; None: something has, and it is not known what."""
    succeeded: bool = False
    """All workers on this node have ended with status 0."""
    first_step: int | None = None
    """The first step that the attempt has completed; None: not known, or none."""
    skipped: str = ""
    """The newest checkpoint that its ranks found broken before that; empty: none."""
    drained_by: str = ""
    """The signal on which the agent sent the ranks SIGTERM; empty: none came."""
    at_once: AtOnce = field(default_factory=AtOnce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One attempt's fault, for people and programs."""

    start: int
    began_unix_s: float
    incident: Incident
    stood: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The innermost frames of some culprits' main threads, the innermost first."""
    stacks: str = ""
    """The file with the stacks of all ranks, suspects first."""
    next: str = ""
    elsewhere: str = ""
    """What another node's agent reported of a fault that no journal on this node has."""
    copied: bool = False
    """The ranks had copies in memory, which are looked at before the next attempt."""

    def is_unannounced(self, ending: AttemptEnd) -> bool:
        """Return whether all workers here have succeeded, and the culprits are ranks here that exited without calling close(). Unless something
        was saved for a restart, there was no fault."""
        ranks = {culprit.rank for culprit in self.incident.culprits}
        known = not self.elsewhere and self.incident.kind in ENDED
        return ending.succeeded and known and bool(ranks) and ranks <= set(ending.pids)


def with_stacks(report: Report, lines: Sequence[Line], log_dir: Path, name: str) -> Report:
    """Collect the stacks that the ranks wrote for a hang, or on request before they were killed, in the file `name`, and quote the culprits'.
    Raises OSError."""
    culprits = report.incident.culprits
    suspects: Sequence[int] = [culprit.rank for culprit in culprits]
    blocks = read_asked(log_dir, {culprit.rank: culprit.pid for culprit in culprits})
    if report.incident.kind == "hung":
        hung = next(line["fields"] for line in reversed(lines) if line["event"] == "hung")
        blocks, suspects = blocks | read_blocks(log_dir, hung["text"]), hung["ranks"]
    if not blocks:
        return report
    gather(log_dir / name, blocks, suspects)
    stood = {rank: main_frames(blocks.get(rank, "")) for rank in (culprit.rank for culprit in culprits)}
    return replace(report, stood=stood, stacks=str(log_dir / name))


def report_fields(report: Report) -> dict[str, Any]:
    """Return a report as the fields of a `fault` line of `story.jsonl`."""
    known = asdict(report.incident)
    shown = ("rank", "host", "pid", "cause", "phase", "step", "reported", "trace", "stood", "heard_s", "reached")
    culprits = [
        {name: report.stood.get(each["rank"], ()) if name == "stood" else each[name] for name in shown}
        for each in known["culprits"]
    ]
    first = {"start": report.start, "began_unix_s": report.began_unix_s, "kind": known["kind"], "culprits": culprits}
    names = ("survivors", "saved", "not_saved", "goes_on_from", "steps_lost", "took_over", "took_ms")
    last = {"stacks": report.stacks, "next": report.next, "elsewhere": report.elsewhere}
    return {**first, **{name: known[name] for name in names}, **last}


def report_of(
    start: int, lines: Sequence[Line], ending: AttemptEnd, saved_alone: Report | None = None
) -> Report | None:
    """Report the fault of an attempt from its controllers' journals; None if there was none.

    `saved_alone`: what ranks saved without a controller, in place of what the controllers made of it.
    """
    lines = leading_lines(lines)
    found = saved_alone or _ended(start, lines) or _unended(start, lines, ending)
    if ending.at_once.ranks and lines:
        found = _ended_at_once(start, found, ending)
    if found is None:
        return _unled(start, lines, ending)
    incident = found.incident
    exits, ranks = _exits(ending), {culprit.rank for culprit in incident.culprits}
    kind = CauseKind.EXITED.value if incident.suspected and ranks & exits.keys() else incident.kind
    if kind in ENDED and ranks and ranks <= ending.raised.keys():
        kind = CauseKind.EXCEPTION.value
    newest = [line["fields"] for line in _since_thaw(lines) if line["event"] == "death_named"]
    named = {fields["rank"]: fields["text"] for fields in newest}
    processes = {line["fields"]["rank"]: line["fields"] for line in reversed(lines) if line["event"] == "registered"}
    culprits = tuple(
        completed(each, incident.suspected, exits, named, processes.get(each.rank, {}), ending.raised.get(each.rank))
        for each in incident.culprits
    )
    if ending.drained_by and kind == NOTICE and not ending.at_once.ranks:
        cause = f"ttprun received {ending.drained_by} and sent SIGTERM to the ranks"
        culprits = tuple(replace(each, cause=each.cause.replace("SIGTERM", cause, 1)) for each in culprits)
    found = replace(found, incident=replace(incident, kind=kind, culprits=culprits))
    signs = [line["unix_s"] for line in _since_thaw(lines) if line["event"] in _SIGNS and incident.took_over]
    first = [ending.first_exit_unix_s] if ending.first_exit_unix_s is not None and ranks & exits.keys() else []
    return _begun_by(found, min([*first, *signs], default=math.inf))


def false_alarms(lines: Sequence[Line]) -> int:
    """Count the freezes of an attempt after which training continued."""
    return sum(line["event"] == "thawed" for line in leading_lines(lines))


def is_recovery(line: Line) -> bool:
    """Return whether a fault ended with this line, and training continued."""
    return line["event"] == EVENT and bool(line["fields"].get("in_place"))


def _since_thaw(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines since the gates have opened last, after a false alarm or a recovery; none where all ranks have finished: a controller that was stopped meanwhile declares them
    dead."""
    if any(line["event"] == "finished" for line in lines):
        return []
    opened = [number + 1 for number, line in enumerate(lines) if line["event"] == "thawed" or is_recovery(line)]
    return lines[max(opened, default=0) :]


def _ended(start: int, lines: Sequence[Line]) -> Report | None:
    """Return the report of the controller that ended the fault; of several, one that saved the state."""
    found = [(line, read_incident(line["fields"])) for line in _since_thaw(lines) if line["event"] == EVENT]
    chosen = next((each for each in found if each[1].saved is not None), found[0] if found else None)
    if chosen is None:
        return None
    line, incident = chosen
    took_s = (incident.took_ms or {}).get("total", 0.0) / 1e3
    return Report(start=start, began_unix_s=float(line["unix_s"]) - took_s, incident=incident)


def _unended(start: int, lines: Sequence[Line], ending: AttemptEnd) -> Report | None:
    """Return what is known of a fault whose controllers were all lost: the first signs, and why the gates were shut."""
    lines = [line for line in _since_thaw(lines) if line["unix_s"] < ending.at_once.unix_s]
    end = next((number + 1 for number, line in enumerate(lines) if line["event"] == "exit_sent"), len(lines))
    lines = lines[:end]  # the ends that follow were ordered
    signs = [line for line in lines if line["event"] in _SIGNS]
    shut = [line["fields"] for line in lines if line["event"] == "freeze_sent"]
    if not signs or not (shut or any(line["event"] in ("refused", "exit_sent") for line in lines)):
        return None
    found: dict[int, Culprit] = {}
    for fields in (line["fields"] for line in signs if line["event"] not in ("suspect", "takeover_began")):
        if (kind := fields.get("kind", CauseKind.HUNG.value)) != CauseKind.PEER_ERROR.value:
            known = {name: fields[name] for name in ("phase", "step", "heard_s") if name in fields}
            for rank in fields.get("ranks", [fields.get("rank")]):
                trace = trace_end(fields.get("detail", ""))
                found[rank] = Culprit(rank=rank, kind=kind, cause=fields["text"], trace=trace, **known)
    if suspected := not found and bool(shut):
        found = {rank: Culprit(rank=rank, cause=shut[-1]["text"]) for rank in shut[-1]["culprits"]}
    kinds = [*(fields["kind"] for fields in shut[-1:]), *(each.kind for each in found.values())]
    undecided = _NEVER_DECIDED if ending.one_node else _UNDECIDED
    incident = Incident(
        kind=next(iter(kinds), CauseKind.CONTROLLER_LOST.value),
        suspected=suspected,
        culprits=tuple(found.values()),
        not_saved=_SAVED_UNKNOWN if ending.left_saved else undecided,
        took_over=max(int(line["controller"]) for line in lines),
    )
    return Report(start=start, began_unix_s=float(signs[0]["unix_s"]), incident=incident)


def _unled(start: int, lines: Sequence[Line], ending: AttemptEnd) -> Report | None:
    """Report workers that failed though no journal has a fault, or what another node reported."""
    exits, raised = _exits(ending), ending.raised
    if not exits and not ending.elsewhere:
        return None
    causes_first = sorted(exits, key=lambda rank: (rank in raised and is_peer_error(raised[rank]), rank))
    why = "the journal has no fault" if lines else _UNLED
    if ending.log_dir is not None and not lines and read_journals(ending.log_dir, start, 0.0):
        why = _LEFT_OUT.format(start, ending.log_dir)
    incident = Incident(
        kind="unled" if exits else "elsewhere",
        culprits=tuple(
            Culprit(rank=rank, pid=ending.pids.get(rank, 0), cause=exits[rank], trace=_trace(raised.get(rank)))
            for rank in causes_first
        ),
        not_saved=_SAVED_UNKNOWN if ending.left_saved else why,
    )
    elsewhere = "" if exits else ending.elsewhere or ""
    return Report(start=start, began_unix_s=ending.first_exit_unix_s or 0.0, incident=incident, elsewhere=elsewhere)


def _ended_at_once(start: int, found: Report | None, ending: AttemptEnd) -> Report:
    """Report an attempt that a second signal ended: a fault from before the signal, or else the preemption notice, after which the number of
    completed steps is not known. What the controller saw of the end does not count."""
    at_once, incident = ending.at_once, found.incident if found is not None else Incident(kind=NOTICE)
    began = min(found.began_unix_s if found is not None else math.inf, at_once.unix_s)
    end = began + (incident.took_ms or {}).get("total", 0.0) / 1e3
    before = tuple(each for each in incident.culprits if end - each.age_s < at_once.unix_s)
    if began == at_once.unix_s or incident.kind == NOTICE or (incident.culprits and not before):
        cause = f"ttprun received {ending.drained_by}, and killed the ranks (SIGKILL) at a second signal"
        before = tuple(Culprit(rank=rank, cause=cause) for rank in sorted(at_once.ranks))
        incident = replace(incident, kind=NOTICE, survivors=(), took_ms=None, took_over=0)
    saved = incident.saved
    incident = replace(
        incident,
        suspected=False,
        culprits=before,
        not_saved="" if saved is not None else _NO_TIME,
        goes_on_from=saved.path if saved is not None else "",
        steps_lost=incident.steps_lost if saved is not None else None,
    )
    return Report(start=start, began_unix_s=began, incident=incident)


def _exits(ending: AttemptEnd) -> dict[int, str]:
    raised = ending.raised
    return {rank: f"{text}: {raised[rank].line}" if rank in raised else text for rank, text in ending.exits.items()}


def completed(
    culprit: Culprit,
    suspected: bool,
    exits: Mapping[int, str],
    named: Mapping[int, str],
    process: Mapping[str, Any],
    raised: Recorded | None,
) -> Culprit:
    """Add what this node's agent knows of a rank: its exit status, the exception it recorded, its process."""
    cause, own = culprit.cause, exits.get(culprit.rank, "")
    if cause == _EXITING:
        cause = own or named.get(culprit.rank, "exited")
    elif own and (suspected or own.startswith(cause)):  # `signal SIGKILL`, and why
        cause = own
    trace = culprit.trace
    if raised is not None and not trace:
        cause, trace = cause if raised.line in cause else f"{cause}: {raised.line}", _trace(raised)
    host, pid = (culprit.host, culprit.pid) if culprit.pid else (process.get("host", ""), process.get("pid", 0))
    return replace(culprit, cause=cause, trace=trace, host=host, pid=pid)


def _begun_by(report: Report, unix_s: float) -> Report:
    """Return the report of a fault whose first sign this agent, or a lost controller, saw at that time."""
    before_ms = 1e3 * (report.began_unix_s - unix_s)
    if before_ms <= 0:
        return report
    took_ms = report.incident.took_ms
    if took_ms is not None:
        took_ms = {
            stage: round(ms + before_ms, 1) if stage in ("seen", "total") else ms for stage, ms in took_ms.items()
        }
    return replace(report, began_unix_s=unix_s, incident=replace(report.incident, took_ms=took_ms))


def _trace(raised: Recorded | None) -> tuple[str, ...]:
    return trace_end(raised.trace) if raised is not None else ()
