"""What other agents have reported of this job: rank 0 moves to another node when its own is lost, and the summary covers all reports.

Pure: lines of a story.jsonl in, what they add to a summary out. A file may contain several jobs, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ReportLine = Mapping[str, Any]
"""`{"unix_s", "event", ...}`: `start` and `fault` lines have the number of their attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a story.jsonl adds to one agent's own reports."""

    faults: tuple[ReportLine, ...] = ()
    recovered: tuple[ReportLine, ...] = ()
    """Faults after which the attempt continued."""
    lost_s: float = 0.0
    """From each of these faults until the next attempt, where there was one, or until training continued."""
    again: Mapping[int, int] = field(default_factory=dict)
    """Attempt -> steps that it has repeated by others' reports, though the fault before had kept them."""
    times: tuple[ReportLine, ...] = ()
    """Where the time of these attempts went."""
    begun_unix_s: float | None = None
    """When attempt 0 was reported; None: it was not."""


_ORDER = {"start": 0, "recovered": 1, "fault": 2}
"""In which order an attempt's lines are written. There may be several recoveries."""


def earlier(lines: Sequence[ReportLine], own: Collection[int], last: int, compared: Collection[int] = ()) -> Earlier:
    """Collect from a file's lines what others reported of the job whose newest attempt is `last`. `own`: attempts reported here. `compared`:
    those whose resumed step was compared here, though perhaps not their end."""
    job = of_this_job(lines, last)
    if not job:
        return Earlier()
    since = lines[lines.index(job[0]) :]
    faults = tuple(line for line in job if line["event"] == "fault" and line["start"] not in own)
    corrected = {int(line["start"]): line["steps_lost"] for line in since if line["event"] == "copies"}
    faults = tuple(
        {**fault, "steps_lost": corrected[int(fault["start"])]} if int(fault["start"]) in corrected else fault
        for fault in faults
    )
    recovered = tuple(line for line in job if line["event"] == "recovered" and line["start"] not in own)
    lost_s = sum((line["took_ms"] or {}).get("total", 0.0) / 1e3 for line in recovered)
    for fault in faults:
        back = next((line for line in job if line["event"] == "start" and line["start"] > fault["start"]), None)
        if back is not None and fault["began_unix_s"]:
            lost_s += max(0.0, float(back["unix_s"]) - float(fault["began_unix_s"]))
    known = {*own, *compared}
    again = {
        int(line["start"]): int(line["steps"])
        for line in since
        if line["event"] == "again" and line["start"] not in known
    }
    times = tuple(fault["time"] for fault in faults if "time" in fault)
    begun = float(job[0]["unix_s"]) if job[0]["start"] == 0 else None
    return Earlier(faults=faults, recovered=recovered, lost_s=lost_s, again=again, times=times, begun_unix_s=begun)


def of_this_job(lines: Sequence[ReportLine], last: int) -> list[ReportLine]:
    """Return the `start`, `recovered` and `fault` lines at the file's end that belong together: every job begins with attempt 0 again.

    An `end` line is one agent's: the job may have continued without it, unless the next line is of an attempt 0.
    """
    job: list[ReportLine] = []
    place = (last, _ORDER["fault"])
    for line in reversed(lines):
        if line["event"] == "end" and place[0] == 0:
            break
        if line["event"] not in _ORDER:
            continue
        here = (int(line["start"]), _ORDER[line["event"]])
        if here > place or (job and here == place and line["event"] != "recovered"):
            break
        place = here
        job.append(line)
    return job[::-1]
