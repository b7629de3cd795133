"""Does the job get on? Step times learned from heartbeats, and what a standstill means (PURE).

Owns the pace of the job, the limit that follows from it, and who is suspect of a hang. A hang is a job in which no rank
has got on for the limit while heartbeats go on; it begins a fault that the ranks' reports must confirm, so that a job that
was only slow is thawed. Never learns from a job that is frozen, and knows nothing of silence: leases do.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ttp.proto.frozen import dataclass, replace
from ttp.proto.messages import Heartbeat, Phase

from .rank_table import RankTable

if TYPE_CHECKING:
    from .events import ControllerSettings

ENOUGH = 8
"""Step times that must be known before the job is judged by them: the first steps compile, load and warm up."""
KEPT = 64
"""Step times that the limit is made of: old habits are forgotten."""
HIGH = 0.9
"""The quantile of them that stands for a slow step."""
UNEVEN = 2.0
"""Steps vary when the slow ones take this many times the median: the limit is doubled then."""
PAUSE_FACTOR = 2.0
"""A standstill that ended by itself may come again, and last longer: the limit is at least this many times as long."""
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank said it is."""

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

    places: RankTable[Place | None]
    """By rank; None before its first heartbeat."""
    moved_at: float = inf
    """When a rank was last seen to get on; inf before the first heartbeat."""
    front: int = 0
    """The newest step that any rank was seen in."""
    front_at: float = -inf
    """When it was first seen; -inf: not known, the next step's time is not measured."""
    durations: tuple[float, ...] = ()
    """Seconds a step, oldest first."""
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
        """When something has to be done if nobody gets on until then."""
        return self.hung_at if self.noted else self.note_at


def unknown(world_size: int) -> Pace:
    """Return the pace of a job of which nothing was seen yet."""
    return Pace(RankTable.filled(world_size, None))


def taught(pace: Pace, step_times_s: tuple[float, ...], settings: ControllerSettings) -> Pace:
    """Learn from step times that a rank measured itself, if they are more than what was seen here: another controller led
    the job before."""
    if len(step_times_s) <= len(pace.durations):
        return pace
    pace = replace(pace, durations=step_times_s[-KEPT:])
    return replace(pace, limit_s=limit(pace, settings))


def rested(pace: Pace, now: float) -> Pace:
    """Start the clock anew: what went by was not the job's time (a freeze, the controller's own absence)."""
    moved_at = pace.moved_at if pace.moved_at == inf else now
    return replace(pace, moved_at=moved_at, front_at=-inf, noted=False)


def advance(pace: Pace, beat: Heartbeat, now: float, settings: ControllerSettings) -> Pace:
    """Take a heartbeat of a job that is not frozen; O(sqrt(world)), but for a new front step."""
    place = Place(beat.step, beat.phase, beat.waiting)
    if place == pace.places[beat.rank]:
        return replace(pace, moved_at=now, front_at=-inf, noted=False) if beat.paused else pace
    if now - pace.moved_at > pace.longest:
        pace = outlived(pace, now, settings)
    places = pace.places.put(beat.rank, place)
    if place.step <= pace.front:  # the usual case, 10,000 times a second in a large job: one copy
        return replace(pace, places=places, moved_at=now, noted=False)
    if pace.front_at > -inf:
        duration = (now - pace.front_at) / (place.step - pace.front)
        pace = replace(pace, durations=(*pace.durations, duration)[-KEPT:])
        pace = replace(pace, limit_s=limit(pace, settings))
    return replace(pace, places=places, moved_at=now, front=place.step, front_at=now, noted=False)


def outlived(pace: Pace, now: float, settings: ControllerSettings) -> Pace:
    """Learn from a standstill that ended by itself just now.

    Before enough steps were seen it is the start's: loading and compiling are no habit.
    """
    gap = now - pace.moved_at
    if len(pace.durations) < ENOUGH or gap <= pace.longest:
        return pace
    pace = replace(pace, longest=gap)
    return replace(pace, limit_s=limit(pace, settings))


def limit(pace: Pace, settings: ControllerSettings) -> float:
    """Return how long nobody may get on, in seconds."""
    if len(pace.durations) < ENOUGH:
        return max(settings.hang_floor_s, settings.hang_start_s)
    ordered = sorted(pace.durations)
    slow, median = ordered[int(HIGH * (len(ordered) - 1))], ordered[len(ordered) // 2]
    doubled = 2.0 if slow > UNEVEN * median else 1.0
    return max(settings.hang_floor_s, doubled * settings.hang_factor * slow, PAUSE_FACTOR * pace.longest)


def suspects(pace: Pace, living: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that the others may be waiting for: of those that wait for nobody, the ones furthest behind.

    living: ranks that live and still train. Empty when that tells nothing: all wait, or all stand in the same place.
    """
    busy = {rank: place for rank in living if (place := pace.places[rank]) is not None and not _waits(place)}
    if not busy:
        return ()
    last = min(place.order for place in busy.values())
    named = tuple(sorted(rank for rank, place in busy.items() if place.order == last))
    return named if len(named) < len(living) else ()


def _waits(place: Place) -> bool:
    return place.waiting or place.phase is Phase.READY


def standstill(pace: Pace, living: tuple[int, ...], now: float) -> str:
    """Describe for people what nobody gets on from."""
    named = suspects(pace, living)
    if named:
        place = pace.places[named[0]]
        assert place is not None
        who = f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named[:_NAMED]))}"
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        where = f"{who}{more} in {place.phase.name} of step {place.step}, the others wait"
    else:
        where = f"no rank stands out; the newest step is {pace.front}"
    return f"nobody has got on for {now - pace.moved_at:.1f} s (limit {pace.limit_s:.1f} s): {where}"
