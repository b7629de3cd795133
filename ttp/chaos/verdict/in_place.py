"""One fault that ended without a checkpoint, judged from outside: whose processes are other ones, which step came next, what was written.

Pure functions over a run's record.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.chaos.observed.recorder import Key, Line, Record
from ttp.chaos.verdict.fault_outcome import FaultOutcome
from ttp.chaos.verdict.recoveries import Identity, in_place_line, misplaced

ENDS = ("kill", "segv", "abort", "exit")
"""Kinds that end a process."""
MAY_LIVE = ("raise", "async", "stop", "gil")
"""Kinds after which a process may live: another one takes its place only where its update is torn, or where it is silent for too long."""


def finding(incident: FaultOutcome) -> str:
    """Return what is to be reported of a fault that was to end in place and did not; empty: nothing. The job is as safe as ever: no violation."""
    if not incident.in_place_due or not incident.happened or incident.outcome == "in_place":
        return ""
    return f"fault {incident.number}: {incident.drawn_text}: {incident.outcome}, expected in_place: {incident.not_in_place or 'no reason in the journal'}"


def problems(incident: FaultOutcome, record: Record) -> list[str]:
    """Return what is not as it must be after a recovery in place."""
    key, since = incident.firings[0].key, incident.began_unix_s
    lines = [line for line in record.lines(since) if line["unix_s"] <= incident.over_unix_s]
    wrong = _misplaced(incident, record, key)
    if incident.saved_step not in (None, incident.kept_step):  # TTP_GASP=always: it is published first
        wrong.append(f"step {incident.saved_step} was published, and training continued after {incident.kept_step}")
    if incident.kept_step is not None:
        kept = incident.kept_step
        if kept < incident.committed - incident.unproven:
            wrong.append(f"it went on after step {kept}, and step {incident.committed} had been finished")
        wrong += _next_step(record, key, lines, kept, incident.over_unix_s)
    wrong += _former(record, key, lines, incident.over_unix_s)
    return [f"{incident.drawn_text}: {text}" for text in wrong]


def _misplaced(incident: FaultOutcome, record: Record, key: Key) -> list[str]:
    """Exactly the ranks whose process was to end have another one; of those that raised or stood still, some may."""
    before, after = _processes(record, key, incident.began_unix_s), _processes(record, key, incident.over_unix_s)
    hit = [(firing.kind, rank) for firing in incident.firings for rank in firing.ranks]
    ended = {rank for kind, rank in hit if kind in ENDS}
    ended |= {rank for kind, rank in hit if kind in MAY_LIVE and before.get(rank) != after.get(rank)}
    return misplaced(before, after, ended)


def _processes(record: Record, key: Key, until_unix_s: float) -> dict[int, Identity]:
    """Return each rank's process in an attempt by then: the last that had come."""
    return {rank: (pid, 0) for unix_s, its, rank, pid in record.hellos if its == key and unix_s <= until_unix_s}


def _next_step(record: Record, key: Key, lines: Sequence[Line], kept: int, until_unix_s: float) -> list[str]:
    """The first step that each rank finishes behind the opened gates is the one after the kept step."""
    opened = in_place_line(lines)
    if opened is None:
        return []
    first: dict[int, int] = {}
    for one in record.steps:
        if one.key == key and not one.recovered and float(opened["unix_s"]) < one.unix_s <= until_unix_s:
            first.setdefault(one.rank, one.step)
    missing = sorted(set(range(record.world_size)) - set(first))
    wrong = [f"rank {rank} finished no step afterwards" for rank in missing]
    return wrong + [
        f"rank {rank} went on with step {step}, expected {kept + 1}"
        for rank, step in sorted(first.items())
        if step != kept + 1
    ]


def _former(record: Record, key: Key, lines: Sequence[Line], until_unix_s: float) -> list[str]:
    """A process whose place another one has taken finishes no step after the gates have opened, however late it is."""
    opened, now = in_place_line(lines), _processes(record, key, until_unix_s)
    if opened is None:
        return []
    came = {pid for unix_s, its, _, pid in record.hellos if its == key and unix_s <= until_unix_s}
    former = came - {pid for pid, _ in now.values()}
    return [
        f"process {one.pid} finished step {one.step} after process {now[one.rank][0]} had taken its place as rank {one.rank}"
        for one in record.steps
        if one.key == key and one.pid in former and one.unix_s > float(opened["unix_s"])
    ]
