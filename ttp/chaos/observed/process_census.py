"""What the processes of a job hold: whether one is still the same process, and whether descriptors, threads or memory add up with every recovery.

Read from `/proc`; a process that has ended is not in it. Owns how it is read and what counts as adding up; judges nothing else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttp.chaos.observed.leaks import MIB, own_bytes

LEAST_LOOKS = 24
"""Fewer looks at a process say nothing of what adds up: groups that were given up are closed some recoveries later, now more of them, now fewer."""
LIMITS = {"descriptors": 0.2, "threads": 0.2, "MiB": 1.0}
"""More than so much for each recovery adds up."""


Point = tuple[int, float]
"""At which look, and the figure then."""


@dataclass(frozen=True, slots=True)
class Held:
    """One look at a process."""

    pid: int
    began_ticks: int
    """When the kernel started it, in clock ticks since the machine's start: another process of the same number began at another time."""
    command: str
    descriptors: int
    threads: int
    mib: float

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.began_ticks

    def figures(self) -> dict[str, float]:
        return {"descriptors": self.descriptors, "threads": self.threads, "MiB": self.mib}


def look_at(pid: int, command: str = "") -> Held | None:
    """Return what a process holds; None: it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        threads, began = int(fields[17]), int(fields[19])
        descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    nbytes = own_bytes(pid)  # a process that has ended has none
    if nbytes is None:
        return None
    return Held(pid, began, command, descriptors, threads, nbytes / MIB)


def look_at_all(found: Iterable[tuple[int, str]]) -> list[Held]:
    """Return what each of these processes (pid, command) holds, without those that have ended."""
    return [held for pid, command in found if (held := look_at(pid, command)) is not None]


def adding_up(looks: Sequence[Sequence[Held]]) -> list[str]:
    """Return what adds up: for each process that was seen often enough, what grew with every look by more than LIMITS. `looks`: one after each recovery."""
    found: dict[tuple[int, int], list[tuple[int, Held]]] = {}
    for place, look in enumerate(looks):
        for held in look:
            found.setdefault(held.identity, []).append((place, held))
    lines = []
    for seen in found.values():
        if len(seen) < LEAST_LOOKS:
            continue
        for name, slope in slopes(seen).items():
            if slope > LIMITS[name]:
                first, last = (one.figures()[name] for _, one in (seen[0], seen[-1]))
                held = seen[-1][1]
                lines.append(
                    f"pid {held.pid} ({held.command[:80]}): {slope:.2f} {name} more with each of {len(seen)} recoveries, from {first:.0f} to {last:.0f}"
                )
    return lines


def slopes(seen: Sequence[tuple[int, Held]]) -> Mapping[str, float]:
    """Return by how much each figure grew from one look to the next: the median over all pairs of looks, and no more than in either half, as what is
    made late does not add up, and than from the lowest of the first half to that of the second, as what goes up and down does not."""
    half = len(seen) // 2
    grown = {}
    for name in LIMITS:
        points: list[Point] = [(place, held.figures()[name]) for place, held in seen]
        lowest = [min(part, key=lambda point: point[1]) for part in (points[:half], points[half:])]
        grown[name] = min(_slope(part) for part in (points, points[:half], points[half:], lowest))
    return grown


def _slope(points: Sequence[Point]) -> float:
    return statistics.median(
        (later - earlier) / (there - here)
        for index, (here, earlier) in enumerate(points)
        for there, later in points[index + 1 :]
    )
