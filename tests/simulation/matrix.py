"""Which kinds of fault have acted where: the matrix that a soak fills, and the cells that nothing can ever fill.

A place is the controller's stage when the fault really acts; while training is on, the phase of the rank that it hits; and
`leaderless` between a controller's death and the first rank that comes to a standby, and where the ranks save a step without one:
theirs may still run, cut off from all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.faults import KINDS

TRAINING = ("COMPUTE", "READY", "UPDATING", "DONE")
DUMP = ("freezing", "rolling", "regrouping", "writing", "publishing", "exiting")
PLACES = ("assembling", *TRAINING, *DUMP, "gathering", "leaderless")

Cell = tuple[str, str]
"""(kind, place)."""

_WRITE = ("writer kill", "torn write")
_PUBLISH = tuple(name for name in KINDS if name.startswith("publisher killed"))
_DISK = ("full disk", "rank's disk", "failed fsync")
_ORDERS = (*_WRITE, *_PUBLISH, *_DISK, "failing roll-forward", "hanging work")


@dataclass(frozen=True)
class Rule:
    """Cells that have a common reason not to be hit."""

    kinds: tuple[str, ...]
    places: tuple[str, ...]
    why: str

    def cells(self) -> set[Cell]:
        return {(kind, place) for kind in self.kinds for place in self.places}


NEVER = (
    Rule(
        _ORDERS,
        ("assembling", *TRAINING),
        "these act on a rank that carries out an order; none is given before a fault, and a rank that took one is never thawed",
    ),
    Rule(
        ("hang in compute", "slow rank", "hang in update"),
        ("assembling",),
        "no rank trains before the job has assembled",
    ),
    Rule(
        ("hang in compute", "slow rank"),
        ("READY", "UPDATING", "DONE"),
        "these act when a computation begins: the rank is in COMPUTE from then on",
    ),
    Rule(
        ("hang in update",),
        ("COMPUTE", "READY", "DONE"),
        "this acts when an update begins: the rank is UPDATING from then on",
    ),
    Rule(
        (*_ORDERS, "hang in compute", "slow rank", "hang in update"),
        ("regrouping",),
        "every rank is behind a closed gate, and none writes or rolls forward",
    ),
)
"""Cells that cannot occur."""


def possible() -> tuple[Cell, ...]:
    """Return every cell that can occur: many jobs must hit each."""
    excluded = set().union(*(rule.cells() for rule in NEVER))
    return tuple((kind, place) for kind in KINDS for place in PLACES if (kind, place) not in excluded)


@dataclass
class Tally:
    """What many jobs were hit by and how they ended; two of them can be added."""

    jobs: int = 0
    cells: Counter[Cell] = field(default_factory=Counter)
    orders: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(first, second, third, later; place): the how manieth fault of its job it was."""
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    lost_steps: Counter[int] = field(default_factory=Counter)
    """Committed steps that no checkpoint of the job has; jobs that ended with a dump or a refusal."""
    failures: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """(seed, violated invariants)."""

    def add(self, other: Tally) -> None:
        self.jobs += other.jobs
        for name in ("cells", "orders", "outcomes", "refusals", "lost_steps"):
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures

    def note_strikes(self, strikes: Iterable[tuple[str, str]]) -> None:
        """Note one job's faults: (kind, place) in the order in which they acted."""
        for count, (kind, place) in enumerate(strikes):
            if place in PLACES:
                self.cells[kind, place] += 1
                self.orders[("first", "second", "third", "later")[min(count, 3)], place] += 1

    def missing(self) -> tuple[Cell, ...]:
        """Return the cells that can occur and that no job has hit."""
        return tuple(cell for cell in possible() if not self.cells[cell])

    def impossible(self) -> tuple[Cell, ...]:
        """Return the cells that were hit although they are said never to be."""
        known = set(possible())
        return tuple(cell for cell in sorted(self.cells) if cell not in known)
