"""Which ranks are slower than the others that do the same work, by what they measured themselves (PURE).

In a data-parallel job every rank's whole step is equally long, as each waits for the slowest. So a rank is judged by its *own* time of a step, which its
heartbeat carries: the whole without the waits for others. Steps are taken in windows of WINDOW. In each, a rank's median is compared with the median of
the others of the same workload: it was slow there if it took MARGIN times as long. It is named when SLOW of its newest KEPT windows were so, one more among
CROWD ranks or more, and, among MANY or more, their median stands out by FAR times the lasting spread between ranks; and no more when at most OVER of its
windows are slow. Medians leave out what comes now and then (evaluations, saves, garbage collections), the run of windows leaves out what passes, and the
spread leaves out clusters whose ranks differ anyway.

Sources: the modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993), with the factor 1.4826 and the limit 3.5. That
ranks are compared with each other and over several windows is as in NVIDIA's resiliency extension (its relative performance score), FALCON (Wu et al.,
arXiv 2410.12588) and GUARD (Liu et al., arXiv 2605.17879); no code is theirs.

Owns who is named. It is advice for people: no machine reads it. Never knows what time it is, but for what it is given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from ttp.proto.limits import LONGEST_S
from ttp.proto.status import StragglerStatus

WINDOW = 12
"""Steps."""
MARGIN = 1.12
"""A rank is slow in a window if it took so many times as long as the others."""
LEAST_S = 0.005
"""And if it took so much longer: what a rank's own log costs in steps of some milliseconds is not a defect."""
FAR = 3.5
MANY = 5
"""Ranks from which on the spread between them is known."""
KEPT = 11
SLOW = 7
CROWD = 64
"""Ranks from which on it takes one more: the more there are, the more often one of them is slow in SLOW windows by chance."""
OVER = 3
LASTING = 8.0
"""Windows over which a rank's ratio is averaged, exponentially, for the spread that lasts."""
MOST_NAMED = 64
"""More of them are another kind of machine, rather than stragglers: the slowest are named."""
MOST_SAMPLES = 256
SHORTEST_S = 1e-6
"""A time below this counts as this: no ratio is infinite."""
LATE_BEATS = 2.0
"""Heartbeats for which a window's first ranks wait for the others: all finish a step together, and report it within one."""
AS_FAST, REPLACED, FINISHED = "as fast as the others again", "another process has its place", "the rank has finished"
"""Why a rank is not named any more."""
_SPREAD = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""


def is_measured(seconds: float) -> bool:
    """Say whether a clock can have measured this: JSON has no NaN."""
    return 0.0 <= seconds <= LONGEST_S


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank, by its newest windows in which it was slow."""

    rank: int
    host: str
    ratio: float
    """Its own time over the others' median."""
    own_s: float
    others_s: float
    since_step: int
    """The first step of those windows."""


@dataclass(frozen=True, slots=True)
class Change:
    """A rank is named from now on, or not any more."""

    straggler: Straggler
    step: int
    """The newest step that any rank has reported."""
    over: str = ""
    """Why it is not named any more; empty: it is from now on."""

    @property
    def fields(self) -> dict[str, Any]:
        """Return what the journal says of it."""
        slow = self.straggler
        return {
            "rank": slow.rank,
            "host": slow.host,
            "ratio": round(slow.ratio, 3),
            "own_s": round(slow.own_s, 6),
            "others_s": round(slow.others_s, 6),
            "since_step": slow.since_step,
            "step": self.step,
            **({"why": self.over} if self.over else {}),
        }


@dataclass(slots=True)
class _Window:
    """One window of one rank."""

    slow: bool
    ratio: float
    own_s: float
    others_s: float
    first_step: int


@dataclass(slots=True, eq=False)
class _Group:
    """The ranks of one workload, and the window that they are in."""

    ranks: set[int] = field(default_factory=set)
    first: int = 0
    """The window's first step."""
    front: int = 0
    medians: dict[int, float] = field(default_factory=dict)
    """Of the ranks that have come to the window's end."""
    closing_at: float = inf
    """When the first of them had."""
    ratios: dict[int, float] = field(default_factory=dict)
    """Each rank's median over that of all, averaged over windows."""


class StragglerWatch:
    """All ranks of a job, as one controller sees them. `take` is for each heartbeat, `look` for each delivery of them."""

    def __init__(self, heartbeat_s: float) -> None:
        self._late_s = LATE_BEATS * heartbeat_s
        self._groups: dict[str, _Group] = {}
        self._group: dict[int, _Group] = {}
        self._host: dict[int, tuple[str, int]] = {}
        self._samples: dict[int, list[float]] = {}
        self._until: dict[int, int] = {}
        """By rank, the step that ends its window: one that many steps pass between two heartbeats ends with the next one."""
        self._windows: dict[int, list[_Window]] = {}
        """Of the ranks that were slow in one of them, oldest first."""
        self._closing: dict[int, _Group] = {}
        """Groups of which a rank has come to the window's end, by id."""
        self.named: dict[int, Straggler] = {}
        self._over: list[Change] = []
        """Those that are not named any more, as their processes do no steps any more."""

    def join(self, rank: int, host: str, pid: int, workload: str) -> None:
        """A rank has registered: again, or another process in its place, of which nothing is known yet."""
        if self._host.get(rank) == (host, pid):
            return
        self.leave(rank, REPLACED)
        self._host[rank] = host, pid
        if workload:
            group = self._group[rank] = self._groups.setdefault(workload, _Group())
            group.ranks.add(rank)
            self._samples[rank], self._until[rank] = [], group.front + WINDOW

    def compares(self, rank: int) -> bool:
        """Say whether this rank's own time is measured so that it means something: it has a workload."""
        return rank in self._group

    def leave(self, rank: int, why: str = FINISHED) -> None:
        """A rank's process does no steps any more."""
        group = self._group.pop(rank, None)
        if group is not None:
            if rank in self.named:
                self._over.append(Change(self.named[rank], group.front, why))
            group.ranks.discard(rank)
            group.medians.pop(rank, None)
            group.ratios.pop(rank, None)
        for known in (self._host, self._samples, self._until, self._windows, self.named):
            known.pop(rank, None)

    def take(self, rank: int, step: int, own_s: float, now: float) -> None:
        """A heartbeat: the rank is in `step`, and its steps since the heartbeat before took `own_s` of its own."""
        group = self._group.get(rank)
        if group is None or not is_measured(own_s):
            return
        samples = self._samples[rank]
        if len(samples) < MOST_SAMPLES:
            samples.append(max(own_s, SHORTEST_S))
        if step > group.front:
            group.front = step
        if step >= self._until[rank] and rank not in group.medians:
            group.medians[rank] = median(samples)
            self._until[rank] = step + WINDOW
            samples.clear()
            if group.closing_at == inf:
                group.closing_at = now
                self._closing[id(group)] = group

    def look(self, now: float) -> tuple[Change, ...]:
        """Judge the windows that have ended, and return what changes by them."""
        if not self._closing and not self._over:
            return ()
        changes, self._over = self._over, []
        for key, group in [*self._closing.items()]:
            if len(group.medians) >= len(group.ranks) or now >= group.closing_at + self._late_s:
                del self._closing[key]
                changes += self._judge(group)
        return tuple(changes)

    def slowest(self) -> tuple[StragglerStatus, ...]:
        """Return those that are named, for operators, the slowest first."""
        return tuple(
            StragglerStatus(
                each.rank, each.host, each.ratio, each.own_s, each.others_s, max(0, front - each.since_step)
            )
            for each in sorted(self.named.values(), key=lambda each: -each.ratio)
            for front in (self._group[each.rank].front,)
        )

    def _judge(self, group: _Group) -> Iterator[Change]:
        medians, first = group.medians, group.first
        group.medians, group.first, group.closing_at = {}, group.front, inf
        if len(medians) < len(
            group.ranks
        ):  # one that came in the middle, or was late, ends its next window with the others
            until = min(self._until[rank] for rank in medians) if medians else 0
            self._until |= {rank: until for rank in group.ranks if rank not in medians}
        if len(medians) < 2 or 2 * len(medians) < len(group.ranks):
            return
        ordered = sorted(medians.values())
        middle, ratios = median(ordered), group.ratios
        for rank, own_s in medians.items():
            ratio = own_s / middle
            ratios[rank] = known + (ratio - known) / LASTING if (known := ratios.get(rank, 0.0)) else ratio
        far = _far(ratios.values())
        # Below this no rank can be slow, whichever it is: most need no look of their own.
        least = MARGIN * ordered[max(0, (len(ordered) - 1) // 2 - 1)]
        found = [rank for rank, own_s in medians.items() if own_s >= least or rank in self._windows]
        for rank in sorted(found, key=lambda rank: -medians[rank]):
            own_s, others_s = medians[rank], _others(ordered, medians[rank])
            slow = own_s >= MARGIN * others_s and own_s >= others_s + LEAST_S
            window = _Window(slow, own_s / others_s, own_s, others_s, first)
            change = self._note(rank, window, group, far)
            if change is not None:
                yield change

    def _note(self, rank: int, window: _Window, group: _Group, far: float) -> Change | None:
        """Take a rank's window, and return what changes by it. `far`: the ratio from which on a rank stands out."""
        kept = self._windows.setdefault(rank, [])
        kept.append(window)
        del kept[:-KEPT]
        slow = [each for each in kept if each.slow]
        before = self.named.get(rank)
        if not slow:
            del self._windows[rank]
        if before is not None and len(slow) <= OVER:
            return Change(self.named.pop(rank), group.front, AS_FAST)
        enough = SLOW + (len(group.ranks) >= CROWD)
        if before is None and (len(slow) < enough or len(self.named) >= MOST_NAMED):
            return None
        ratio = median(each.ratio for each in slow)
        if before is None and ratio < far:
            return None
        own_s, others_s = median(each.own_s for each in slow), median(each.others_s for each in slow)
        since = before.since_step if before is not None else slow[0].first_step
        now = self.named[rank] = Straggler(rank, self._host[rank][0], ratio, own_s, others_s, since)
        return Change(now, group.front) if before is None else None


def _far(ratios: Collection[float]) -> float:
    """Return the ratio from which on a rank is far from the others, by the spread that lasts among them. O(ranks log ranks): once a window."""
    if len(ratios) < MANY:
        return 0.0
    middle = median(ratios)
    return middle + FAR * _SPREAD * median(abs(each - middle) for each in ratios)


def _others(ordered: list[float], own: float) -> float:
    """Return the median of the values without `own`, which is one of them."""
    place, last = bisect_left(ordered, own), len(ordered) - 2
    lower, upper = last // 2, (last + 1) // 2
    return (ordered[lower + (lower >= place)] + ordered[upper + (upper >= place)]) / 2
