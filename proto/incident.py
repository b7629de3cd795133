"""The report of one fault, as the controller that ended it journals it and a launcher reads it (PURE).

Owns the shape of the journal's `incident` event. Never judges anything: a controller that has ended a fault knows all that is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVENT = "incident"
TRACE_LINES = 3
STAGES = ("seen", "frozen", "decided", "written", "published", "regrouped")
"""The parts of a fault, in order: each took from the end of the one before it. `seen` begins with the first sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank at fault, or one with a preemption notice."""

    rank: int
    host: str = ""
    pid: int = 0
    kind: str = ""
    cause: str = ""
    phase: str = ""
    """Where it was: by its own report behind its gate, or by its last heartbeat. Empty: not known."""
    step: int = 0
    reported: bool = False
    """Phase and step are from its report, not from its last heartbeat."""
    trace: tuple[str, ...] = ()
    """The last lines of its traceback."""
    heard_s: float | None = None
    """How old its last heartbeat was when its end was seen; None: not known."""
    reached: int = 0
    """It was READY of this step for certain: others have the step's commit record. 0: no more is known than phase and step."""
    age_s: float = 0.0
    """How long before the end of the fault it was found at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where survivors were when they were frozen."""

    phase: str
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The emergency checkpoint. `ranks`: those that wrote it."""

    step: int
    path: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault, from its first sign until the ranks are ordered to exit."""

    kind: str
    """A `CauseKind`, or what a launcher calls a fault that no controller has seen."""
    suspected: bool = False
    """Nothing but a suspicion is known of the culprits."""
    culprits: tuple[Culprit, ...] = ()
    survivors: tuple[RankPlace, ...] = ()
    saved: Saved | None = None
    not_saved: str = ""
    """Why nothing was saved."""
    in_place: bool = False
    """All ranks train on, some of them in another process. Without `saved`, nothing had to be."""
    goes_on_from: str = ""
    """The checkpoint that the next attempt resumes from, as far as it is known."""
    steps_lost: int | None = None
    """Finished steps that have to be trained again; None: not known."""
    took_over: int = 0
    """The standby that ended the fault; 0: none had to."""
    took_ms: Mapping[str, float] | None = None
    """Milliseconds of each of STAGES that there was, and `total`."""


def trace_end(detail: str) -> tuple[str, ...]:
    """Return the last lines of a traceback without the marks under the code."""
    lines = [line.strip() for line in detail.splitlines()]
    return tuple(line for line in lines if line.strip("^~ "))[-TRACE_LINES:]


def incident_fields(incident: Incident) -> dict[str, Any]:
    """Return an incident as a journal event's fields."""
    return dataclasses.asdict(incident)


def read_incident(fields: Mapping[str, Any]) -> Incident:
    """Return the incident of a journal event. Raises TypeError or KeyError for fields that no controller writes."""
    saved = fields["saved"]
    return Incident(
        **{
            **fields,
            "culprits": tuple(Culprit(**{**each, "trace": tuple(each["trace"])}) for each in fields["culprits"]),
            "survivors": tuple(RankPlace(**{**each, "ranks": tuple(each["ranks"])}) for each in fields["survivors"]),
            "saved": Saved(**{**saved, "ranks": tuple(saved["ranks"])}) if saved is not None else None,
        }
    )
