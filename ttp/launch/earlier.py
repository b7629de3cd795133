"""What other launchers have told of this job: rank 0 comes to another node when its own is lost, and the summary is of them all.

Pure: lines of a story file in, what they add to a summary out. A file may hold several jobs, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

StoryLine = Mapping[str, Any]
"""`{"unix_s", "event", ...}`: `start` and `fault` lines have the number of their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a story file adds to what one launcher has told itself."""

    faults: tuple[StoryLine, ...]
    lost_s: float
    """From each of these faults until the next start, where there was one."""
    again: int
    """Steps that starts trained again which others told of, though the fault before had left them whole."""
    begun_unix_s: float | None
    """When start 0 was told; None: it was not."""


def earlier(lines: Sequence[StoryLine], own: Collection[int], last: int, compared: Collection[int] = ()) -> Earlier:
    """Gather from a file's lines what others told of the job whose newest start is `last`. `own`: starts told here. `compared`: those
    of which it was said here whether they went back, though perhaps not how they ended."""
    job = of_this_job(lines, last)
    faults = [line for line in job if line["event"] == "fault" and line["start"] not in own]
    lost_s = 0.0
    for fault in faults:
        back = next((line for line in job if line["event"] == "start" and line["start"] > fault["start"]), None)
        if back is not None and fault["began_unix_s"]:
            lost_s += max(0.0, float(back["unix_s"]) - float(fault["began_unix_s"]))
    first = lines.index(job[0]) if job else len(lines)
    known = {*own, *compared}
    again = sum(line["steps"] for line in lines[first:] if line["event"] == "again" and line["start"] not in known)
    begun = float(job[0]["unix_s"]) if job and job[0]["start"] == 0 else None
    return Earlier(faults=tuple(faults), lost_s=lost_s, again=again, begun_unix_s=begun)


def of_this_job(lines: Sequence[StoryLine], last: int) -> list[StoryLine]:
    """Return the lines at the file's end that belong together: every job begins with start 0 again.

    An `end` is that of a launcher: the job of one that left went on, unless the next line is of a start 0.
    """
    job: list[StoryLine] = []
    place = (last, 1)
    for line in reversed(lines):
        if line["event"] in (
            "hold",
            "held",
            "left",
            "again",
            "unannounced",
        ):  # of a launcher itself, and what stands between others
            continue
        if line["event"] == "end":
            if place[0] == 0:
                break
            continue
        told = (int(line["start"]), 1 if line["event"] == "fault" else 0)
        if told > place or (job and told == place):
            break
        place = told
        job.append(line)
    return job[::-1]
