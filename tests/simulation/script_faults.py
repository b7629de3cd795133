"""The words of a script: each line sets up the job or names one fault and its moment.

    kill rank 2 when UPDATING 3                    the first rank that begins the update of step 3
    kill rank 2 when rank 1 writing                that rank's
    kill controller c0 when got Freeze, 3rd time   the third that it happens to
    stop rank 1 for 0.4 s when READY 2 + 0.01 s    a little later
    cut controller c0 for 2 s at 0.3 s             by the clock
    fill /a                                        from the start

A moment is a phase with its step, a line of the journal, or what a rank does (`got Freeze`, `rolling`, `writing`,
`publishing`, `manifest written`, `renamed`, `got Exit`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from tests.simulation.network import UP
from tests.simulation.staged import StagedJob
from ttp.proto.messages import CauseKind

_LINE = re.compile(
    r"(?P<act>.+?)"
    r"(?: at (?P<at>[\d.]+) s"
    r"| when (?:rank (?P<rank>\d+) )?(?P<moment>[\w ]+?)(?:, (?P<count>\d+)(?:st|nd|rd|th) time)?(?: \+ (?P<later>[\d.]+) s)?)?"
)


class ScriptError(ValueError):
    """A line of a script means nothing."""


@dataclass
class Planned:
    """One fault line; `struck` says whether its moment ever came."""

    line: str
    struck: bool = False


def plan(job: StagedJob, line: str) -> Planned:
    """Put one fault into a job. Raises ScriptError for a line without meaning."""
    read = _LINE.fullmatch(line)
    act = _act(read["act"]) if read else None
    if read is None or act is None:
        known = "\n  ".join(_ACTS)
        raise ScriptError(f"invalid line {line!r}: expected one of\n  {known}\nwith `at N s`, `when MOMENT` or neither")
    planned = Planned(line)

    def strike(rank: int = -1) -> None:
        planned.struck = True
        act(job)

    if read["at"]:
        job.scheduler.at(float(read["at"]), strike)
    elif read["moment"]:
        _await(job, read, strike)
    else:
        strike()
    return planned


def _await(job: StagedJob, read: re.Match[str], strike: Callable[[], None]) -> None:
    """Hook a fault to its moment: the counted one of any rank, or of the rank that is named."""
    later, left = float(read["later"] or 0.0), [int(read["count"] or 1)]

    def came(rank: int) -> None:
        if read["rank"] is None or int(read["rank"]) == rank:
            left[0] -= 1
            if left[0] == 0 and later:
                job.scheduler.after(later, strike)
            elif left[0] == 0:
                strike()

    for count in range(1, 65):
        job.hook(read["moment"], count, came)


def _act(text: str) -> Callable[[StagedJob], None] | None:
    for pattern, act in _ACTS.items():
        if words := re.fullmatch(_pattern(pattern), text):
            return lambda job: act(job, *words.groups())
    return None


def _pattern(words: str) -> str:
    """Return the expression for a line of `_ACTS`: N a number, S seconds, D a directory."""
    for letter, pattern in (("N", r"(\d+)"), ("S", r"([\d.]+)"), ("D", r"(/\w+)")):
        words = re.sub(rf"(?<![a-z]){letter}(?![a-z])|(?<=\bc){letter}", lambda _, p=pattern: p, words)  # type: ignore[misc]
    return words


def _raise(job: StagedJob, rank: str) -> None:
    job.note(f"rank {rank} raises")
    process = job.ranks[int(rank)]
    process.run(lambda: process.fault(CauseKind.EXCEPTION, "ValueError: bad batch"))


def _tell_to_leave(job: StagedJob, rank: str) -> None:
    job.note(f"rank {rank} is preempted")
    process = job.ranks[int(rank)]
    process.run(process.notice)


def _kill_host(job: StagedJob, host: str) -> None:
    for rank, place in enumerate(job.training.layout.hosts):
        if place == int(host):
            job.kill(rank, quiet=True)


def _break_stream(job: StagedJob, rank: str) -> None:
    job.note(f"rank {rank}'s stream breaks")
    job.drop_stream(int(rank))


def _hold_stream(job: StagedJob, rank: str, seconds: str) -> None:
    stream = job.ranks[int(rank)].stream
    if stream is not None:
        job.note(f"rank {rank}'s stream stands still for {seconds} s")
        stream.hold(float(seconds))


def _fill_node(job: StagedJob, directory: str, host: str) -> None:
    job.note(f"{directory} of node {host} is full")
    job.disk.full.add(f"host{host}{directory}")


def _fill(job: StagedJob, directory: str) -> None:
    job.note(f"{directory} is full")
    job.disk.full.add(directory)


def _break_directory(job: StagedJob, directory: str, rank: str) -> None:
    job.disk.broken_for.add((int(rank), job.root_of(int(rank), directory)))


def _tear(job: StagedJob, directory: str, rank: str) -> None:
    job.disk.tearing.add((int(rank), job.root_of(int(rank), directory)))


def _let_fit(job: StagedJob, rank: str, attribute: str, value: Any) -> None:
    setattr(job.ranks[int(rank)], attribute, value)


def _take(job: StagedJob, rank: str, seconds: float, step: str) -> None:
    job.ranks[int(rank)].slow_compute[int(step)] = seconds


def _work_on(job: StagedJob, rank: str, seconds: str, step: str) -> None:
    """It progresses all the while."""
    job.ranks[int(rank)].slow_work[step] = float(seconds)


_ACTS: dict[str, Callable[..., None]] = {
    "kill rank N": lambda job, rank: job.kill(int(rank)),
    "kill host N": _kill_host,
    "kill controller cN": lambda job, place: job.controllers[int(place)].kill(),
    "stop rank N for S s": lambda job, rank, seconds: job.stop(int(rank), float(seconds)),
    "stop rank N for good": lambda job, rank: job.stop(int(rank), None),
    "rank N holds its interpreter for S s": lambda job, rank, seconds: job.hog(int(rank), float(seconds)),
    "rank N holds its interpreter for good": lambda job, rank: job.hog(int(rank), None),
    "stop controller cN for S s": lambda job, place, seconds: job.controllers[int(place)].pause(float(seconds)),
    "cut controller cN for S s": lambda job, place, seconds: job.controllers[int(place)].cut(float(seconds)),
    "controller cN receives nothing for S s": lambda job, place, s: job.controllers[int(place)].cut_one_way(
        UP, float(s)
    ),
    "clock of controller cN leaps by S s": lambda job, place, seconds: job.controllers[int(place)].jump(float(seconds)),
    "break stream of rank N": _break_stream,
    "hold stream of rank N for S s": _hold_stream,
    "rank N raises": _raise,
    "tell rank N to leave": _tell_to_leave,
    "rank N hangs in step N": lambda job, rank, step: _take(job, rank, inf, step),
    "rank N takes S s for step N": lambda job, rank, seconds, step: _take(job, rank, float(seconds), step),
    "rank N hangs in update N": lambda job, rank, step: _let_fit(job, rank, "hang_update_at", int(step)),
    "rank N hangs in its next order": lambda job, rank: _let_fit(job, rank, "hang_work", True),
    "rank N fails to roll forward": lambda job, rank: _let_fit(job, rank, "break_roll", True),
    "rank N takes S s to roll forward": lambda job, rank, seconds: _work_on(job, rank, seconds, "roll"),
    "rank N takes S s to write": lambda job, rank, seconds: _work_on(job, rank, seconds, "write"),
    "rank N takes S s to publish": lambda job, rank, seconds: _work_on(job, rank, seconds, "manifest"),
    "rank N misses record N": lambda job, rank, step: job.partial.missed.add((int(rank), int(step))),
    "fill D": _fill,
    "fill D of host N": _fill_node,
    "break D for rank N": _break_directory,
    "tear D for rank N": _tear,
    "tear next write of rank N": lambda job, rank: job.disk.torn_next.add(int(rank)),
}
"""What may be said. N: a number; S: seconds; D: a directory."""
