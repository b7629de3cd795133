"""Does the job progress? Step times that the ranks report, and what a standstill means (PURE).

Owns the pace of the job, the limit that follows from it, and who is suspect of a hang. A hang is a job in which no rank
has progressed for the limit while heartbeats go on; it begins a fault that the ranks' reports must confirm, so that a job that
was only slow is thawed. Never learns from a job that is frozen, and knows nothing of silence: leases do.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from operator import itemgetter

from ttp.hang_limits import HangLimits
from ttp.proto.frozen import dataclass, replace
from ttp.proto.messages import Heartbeat, Phase

from .events import ControllerSettings
from .per_rank import PerRank

ENOUGH = 8
"""Steps that must be finished before the job is judged by their times: the first ones compile, load and warm up."""
MANY = 50
"""Finished steps after which the floor of the limit is the lower one."""
KEPT = 64
"""Step times that the limit is made of: old habits are forgotten."""
HIGH = 0.9
"""The quantile of them that stands for a slow step."""
UNEVEN = 2.0
"""Steps vary when the slow ones take this many times the median: the limit is doubled then."""
PAUSE_FACTOR = 2.0
"""A standstill that ended by itself may come again, and last longer: the limit is at least this many times as long."""
_NAMED = 8
_FLOOR = "TTP_HANG_FLOOR_S"


@dataclass(frozen=True, slots=True)
class Place:
    """The place that a rank reported."""

    step: int
    phase: Phase
    waiting: bool
    """In a collective: for others."""

    @property
    def order(self) -> tuple[int, int]:
        """Later places are greater."""
        return self.step, int(self.phase)


@dataclass(frozen=True)
class Pace:
    """What the controller has learned of the job's steps."""

    places: PerRank[Place | None]
    """By rank; None before its first heartbeat."""
    moved_at: float = inf
    """When a rank was last seen to progress; inf before the first heartbeat."""
    front: int = 0
    """The newest step that any rank was seen in."""
    steps: int = 0
    """How many steps this attempt has finished, as far as a rank reported."""
    numbers: tuple[int, ...] = ()
    """Of the steps whose time is known, counted as `steps` is, oldest first."""
    durations: tuple[float, ...] = ()
    """Seconds that these steps took."""
    longest: float = 0.0
    """The longest standstill that ended by itself."""
    limit_s: float = inf
    """A longer standstill is a hang."""
    noted: bool = False
    """The standstill that goes on has been noted."""

    @property
    def note_at(self) -> float:
        """When a standstill is worth its line in the journal: half way to the limit."""
        return self.moved_at + self.limit_s / 2

    @property
    def hung_at(self) -> float:
        return self.moved_at + self.limit_s

    @property
    def due(self) -> float:
        """When something has to be done if no rank progresses until then."""
        return self.hung_at if self.noted else self.note_at


def unknown(world_size: int) -> Pace:
    """Return the pace of a job of which nothing was seen yet."""
    return Pace(PerRank.filled(world_size, None))


def at_start(settings: ControllerSettings) -> Pace:
    """Return the same with the limit that is in force then."""
    pace = unknown(settings.world_size)
    return replace(pace, limit_s=limit(pace, settings.hang))


def has_started(pace: Pace) -> bool:
    """Say whether the first steps, which compile and load, are over."""
    return pace.steps >= ENOUGH


def learn(pace: Pace, steps: int, times_s: tuple[float, ...], hang: HangLimits) -> Pace:
    """Take what a rank measured: it has finished `steps` steps in this attempt, and `times_s` are the newest ones' times.

    All ranks take every step together, so one that measured longer has waited for another that did something else meanwhile (it
    evaluated alone, say): the shortest time counts.
    """
    if not all(0.0 <= seconds < inf for seconds in times_s):
        return pace  # no time that a clock measured
    first = steps - len(times_s) + 1
    new = max(0, pace.steps + 1 - first)
    fresh = times_s[new:]
    durations = _shortened(pace, first, times_s[:new])
    if steps <= pace.steps and durations is pace.durations:
        return pace
    numbers = (*pace.numbers, *range(first + new, steps + 1))[-KEPT:]
    pace = replace(pace, steps=max(steps, pace.steps), numbers=numbers, durations=(*durations, *fresh)[-KEPT:])
    return replace(pace, limit_s=limit(pace, hang))


def _shortened(pace: Pace, first: int, times_s: tuple[float, ...]) -> tuple[float, ...]:
    """Return the known times with those replaced for which a shorter one was measured; the very same where there is none."""
    durations, numbers = pace.durations, pace.numbers
    for number, seconds in enumerate(times_s, first):
        place = bisect_left(numbers, number)
        if place < len(numbers) and numbers[place] == number and seconds < durations[place]:
            durations = (*durations[:place], seconds, *durations[place + 1 :])
    return durations


def rested(pace: Pace, now: float) -> Pace:
    """Start the clock anew: what went by was not the job's time (a freeze, the controller's own absence)."""
    moved_at = pace.moved_at if pace.moved_at == inf else now
    return replace(pace, moved_at=moved_at, noted=False)


def advance(pace: Pace, beat: Heartbeat, now: float, hang: HangLimits) -> Pace:
    """Take a heartbeat of a job that is not frozen; O(sqrt(world)), but for a step that no rank reported yet."""
    place = Place(beat.step, beat.phase, beat.waiting)
    if place != pace.places[beat.rank]:
        if now - pace.moved_at > pace.longest:
            pace = outlived(pace, now, hang)
        places = pace.places.put(beat.rank, place)
        pace = replace(pace, places=places, moved_at=now, front=max(pace.front, place.step), noted=False)
    elif beat.paused:
        pace = replace(pace, moved_at=now, noted=False)
    if beat.steps > pace.steps or beat.step_times_s:
        pace = learn(pace, beat.steps, beat.step_times_s, hang)
    return pace


def outlived(pace: Pace, now: float, hang: HangLimits) -> Pace:
    """Learn from a standstill that ended by itself just now.

    Before enough steps were seen it is the start's limit: loading and compiling do not repeat.
    """
    gap = now - pace.moved_at
    if not has_started(pace) or gap <= pace.longest:
        return pace
    pace = replace(pace, longest=gap)
    return replace(pace, limit_s=limit(pace, hang))


def limit(pace: Pace, hang: HangLimits) -> float:
    """Return how long the job may go without progress, in seconds."""
    return _limits(pace, hang)[0][0]


def limit_in_force(pace: Pace, hang: HangLimits) -> str:
    """Say for people which of the limits is in force, and what makes it."""
    return f"limit {pace.limit_s:.1f} s: {_limits(pace, hang)[0][1]}"


def _limits(pace: Pace, hang: HangLimits) -> list[tuple[float, str]]:
    """Return every limit that applies now, the one in force first."""
    if not has_started(pace) or not pace.durations:
        limits = [(hang.start_s, f"TTP_HANG_START_S, for the first {ENOUGH} steps"), (hang.floor_s, _FLOOR)]
        return sorted(limits, key=itemgetter(0), reverse=True)
    median, slow = step_times(pace)
    uneven = slow > UNEVEN * median
    times = "twice TTP_HANG_FACTOR" if uneven else "TTP_HANG_FACTOR"
    few = "" if pace.steps >= MANY else f" before {MANY} steps"
    limits = [
        (hang.floor_s if pace.steps >= MANY else hang.early_floor_s, f"{_FLOOR}{few}"),
        ((2.0 if uneven else 1.0) * hang.factor * slow, f"{times}, with {slow:.3g} s for a slow step"),
        (PAUSE_FACTOR * pace.longest, f"{PAUSE_FACTOR:g} times the longest standstill so far"),
    ]
    return sorted(limits, key=itemgetter(0), reverse=True)


def step_times(pace: Pace) -> tuple[float, float]:
    """Return the median of the known step times, and the slow one; there must be some."""
    ordered = sorted(pace.durations)
    return ordered[len(ordered) // 2], ordered[int(HIGH * (len(ordered) - 1))]


def suspects(pace: Pace, living: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that the others may be waiting for: of those that do not wait themselves, the ones furthest behind.

    living: ranks that live and still train. Empty when that distinguishes none: all wait, or all are at the same place.
    """
    busy = {rank: place for rank in living if (place := pace.places[rank]) is not None and not _waits(place)}
    if not busy:
        return ()
    last = min(place.order for place in busy.values())
    named = tuple(sorted(rank for rank, place in busy.items() if place.order == last))
    return named if len(named) < len(living) else ()


def _waits(place: Place) -> bool:
    return place.waiting or place.phase is Phase.READY


def standstill(pace: Pace, living: tuple[int, ...], now: float, hang: HangLimits) -> str:
    """Describe for people at what place the job does not progress."""
    named = suspects(pace, living)
    if named:
        place = pace.places[named[0]]
        assert place is not None
        who = f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named[:_NAMED]))}"
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        where = f"{who}{more} in {place.phase.name} of step {place.step}, the others wait"
    else:
        where = f"no rank stands out; the newest step is {pace.front}"
    return f"no rank has progressed for {now - pace.moved_at:.1f} s ({limit_in_force(pace, hang)}): {where}"
