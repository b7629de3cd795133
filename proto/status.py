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
    silent_s: float | None = None
    """Since the controller received anything of it; None: nothing came."""
    step_s: float | None = None
    """What it measured for its newest step whose time came with a heartbeat; None: none has."""
    suspect: bool = False
    """Its stream broke, or most of its lease has passed in silence."""
    waiting: bool = False
    """It is in a collective, by its last heartbeat."""
    paused: bool = False
    """It does something else than steps, and has reported so."""
    own_s: float | None = None
    """Its own time of a step, without the wait for others, by the newest heartbeat that had one; None: none had."""
    waited_s: float | None = None
    """How long it waited for others in a step."""


@dataclass(frozen=True, slots=True)
class PaceStatus:
    """How fast the job takes steps, by what its ranks have measured in this attempt."""

    steps: int = 0
    """Finished in this attempt, as far as a rank has reported."""
    front: int = 0
    """The newest step that a rank was seen in; 0: none was."""
    step_s: float | None = None
    """The median of the newest steps' times; None: no time is known."""
    slow_s: float | None = None
    """Their 90 % quantile."""
    still_s: float | None = None
    """Since a rank was last seen to progress; None: none was."""
    limit_s: float | None = None
    """A longer standstill is a hang; None: not known yet."""


@dataclass(frozen=True, slots=True)
class CoverageStatus:
    """What the live ranks hold, and what the job would lose with one of them."""

    groups: int = 0
    """Shard groups; 0: not known yet."""
    least: int = 0
    """Live holders of the group that has the fewest."""
    uncovered: int = 0
    """Groups without a live holder."""
    fatal_ranks: tuple[int, ...] = ()
    """The first of the live ranks whose death alone leaves a shard without a holder."""
    fatal_rank_count: int = 0
    fatal_nodes: tuple[str, ...] = ()
    """The first of the nodes whose loss alone does; none of a job on one node."""
    fatal_node_count: int = 0
    copies: bool = False
    """Every rank's shards are copied into agents' memory, a few steps behind."""


@dataclass(frozen=True, slots=True)
class FaultStatus:
    """The fault that is handled now."""

    age_s: float
    causes: tuple[Cause, ...]
    """The first of them, in the order seen. Empty: only suspicions so far."""


@dataclass(frozen=True, slots=True)
class StragglerStatus:
    """A rank that is slower than those that do the same work."""

    rank: int
    host: str
    ratio: float
    """Its own time of a step over the others' median."""
    own_s: float
    others_s: float
    steps: int
    """For so many by now."""


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
    place: int = 0
    """0: the controller that the attempt began with; i: its i-th standby."""
    address: str = ""
    """Its own, as the others have it."""
    standbys: tuple[str, ...] = ()
    """Addresses of those that take over from it, in their order, as far as it knows that they run."""
    save_dirs: tuple[str, ...] = ()
    """Where the first rank that has registered writes checkpoints."""
    heartbeat_s: float = 0.0
    lease_s: float = 0.0
    pace: PaceStatus = PaceStatus()
    coverage: CoverageStatus = CoverageStatus()
    fault: FaultStatus | None = None
    recoveries: int = 0
    """Faults of this attempt that ended without a checkpoint."""
    stragglers: tuple[StragglerStatus, ...] = ()
    """Ranks that are slower than others that do the same work, the slowest first."""
    loss: float | None = None
    """The newest that a rank has reported; None: none has. Any number, NaN too."""
