"""What a controller shows to operators, as frozen dataclasses (PURE: standard library data modules only)."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.proto.messages import Cause, Phase, Text


@dataclass(frozen=True, slots=True)
class RankStatus:
    rank: int
    host: str
    pid: int
    """0: the rank has not registered yet."""
    attached: bool
    """A stream of this rank is open."""
    phase: Phase
    step: int
    """Of the last heartbeat; `phase` belongs to it."""
    dead: bool
    cause: Cause | None
    """The rank's own fault, if one is known."""
    finished: bool = False
    """Its training has come to its end: it waits for the others."""


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One look at a job; ranks in order."""

    job_id: str
    term: int
    world_size: int
    stage: str
    """Where the controller stands: `assembling`, `watching`, `freezing`, ..."""
    survives: Text
    """What the job survives, as text; empty until every rank has registered."""
    ranks: tuple[RankStatus, ...]
    published: PublishedCheckpoint | None
    """The last checkpoint that this controller had published."""
    pid: int
    """The controller's own process."""
    role: str = "active"
    """`active`, or `standby` while no rank has come to it."""
