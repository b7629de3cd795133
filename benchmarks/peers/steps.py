"""From the lines that the ranks wrote to figures: finished steps, what a kill cost, how long a step takes.

A step is finished when all ranks that took part in it have reported it. Owns the arithmetic; knows no system and starts nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.chaos.observed.training_job import GrowingLines

WARM_UP = 10
"""Steps after a start that are left out of the step time."""


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    attempt: str
    ranks: int
    pids: frozenset[int]
    unix_s: float
    """When the last of its ranks had finished it."""


@dataclass(slots=True)
class Steps:
    """The finished steps so far, in the order in which they were finished."""

    finished: list[Step] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each rank, by the newest line."""
    _reported: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in sorted(lines, key=lambda line: line["unix_s"]):
            self.pids[line["rank"]] = line["pid"]
            key = (line["attempt"], line["step"])
            reported = self._reported.setdefault(key, {})
            reported[line["pid"]] = line["unix_s"]
            if len(reported) == line["ranks"]:
                pids = frozenset(reported)
                self.finished.append(Step(line["step"], line["attempt"], line["ranks"], pids, line["unix_s"]))
                del self._reported[key]


class StepFiles:
    """The files that the ranks of a job append to; each look reads what was added."""

    def __init__(self, folder: Path) -> None:
        self.steps = Steps()
        self._folder = folder
        self._files: dict[Path, tuple[GrowingLines, int]] = {}

    def look(self) -> Steps:
        added = []
        for path in self._folder.glob("steps_*.jsonl"):
            file, seen = self._files.get(path) or (GrowingLines(path), 0)
            lines = file.read()
            added += lines[seen:]
            self._files[path] = (file, len(lines))
        self.steps.add(added)
        return self.steps


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a kill, in seconds since it; None for what did not happen."""

    back_s: float | None
    """The first step without the killed process, of whatever number."""
    lost: int | None
    """Steps that were finished before the kill and trained again."""
    new_s: float | None
    """The first step beyond all that were finished before the kill."""
    full_s: float | None
    """The first step of as many ranks as before."""


def recovery(steps: Sequence[Step], killed_s: float, pid: int, ranks: int) -> Recovery:
    """Say what followed the kill of a process at a time, in a job of so many ranks.

    The step in flight at the kill counts as finished before it where the killed process had reported it: no recovery was needed for it.
    """
    before = max((step.number for step in steps if step.unix_s <= killed_s or pid in step.pids), default=0)
    after = [step for step in steps if step.unix_s > killed_s and pid not in step.pids]
    if not after:
        return Recovery(None, None, None, None)

    def first(found: Iterable[Step]) -> float | None:
        return next((step.unix_s - killed_s for step in found), None)

    return Recovery(
        back_s=first(after),
        lost=max(0, before + 1 - after[0].number),
        new_s=first(step for step in after if step.number > before),
        full_s=first(step for step in after if step.ranks == ranks),
    )


def stayed(steps: Sequence[Step], killed_s: float, pid: int) -> bool | None:
    """Say whether all processes but the killed one that were in the last step before are in the first one after it; None: there is not any."""
    before = [step for step in steps if step.unix_s <= killed_s or pid in step.pids]
    after = [step for step in steps if step.unix_s > killed_s and pid not in step.pids]
    return before[-1].pids - {pid} <= after[0].pids if before and after else None


def step_times(steps: Sequence[Step], until_s: float, ranks: int) -> list[float]:
    """Return the seconds from each step to the next in the first attempt, before a time and with all ranks, without the first ones."""
    steady = [step for step in steps if step.ranks == ranks and step.unix_s < until_s]
    steady = [step for step in steady if step.attempt == steady[0].attempt][WARM_UP:]
    pairs = itertools.pairwise(steady)
    return [later.unix_s - step.unix_s for step, later in pairs if later.number == step.number + 1]


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return median, least and most."""
    return (statistics.median(values), min(values), max(values)) if values else None
