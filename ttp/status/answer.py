"""What `ttp status` answers, as frozen values with plain fields (PURE): `--json` prints them as they are, tables show them to people.

Owns the names of the keys, which docs/status.md lists. A key is never left out: what is not known is null, an empty string or an empty list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ttp.launch.report.time_use import TimeUse


@dataclass(frozen=True, slots=True)
class Leader:
    """The controller that leads the ranks."""

    place: int
    """0: the one that the attempt began with, which rank 0 started; i: its i-th standby."""
    term: int
    host: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True)
class CoverageNow:
    """What the live ranks hold."""

    shards: int
    """Shard groups; 0: not known yet."""
    least_holders: int
    uncovered: int
    """Shard groups that no live rank holds."""
    fatal_ranks: list[int]
    """The first ranks whose death alone would cost steps."""
    fatal_rank_count: int
    fatal_nodes: list[str]
    fatal_node_count: int
    copies: bool
    """Every rank's shards are copied into agents' memory, some steps behind."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank."""

    rank: int
    node: str
    pid: int
    state: str
    """`missing`, `dead`, `detached`, `suspect`, `finished`, `paused`, or where it is in its step: `compute`, `ready`, `updating`, `done`. By the files alone
    `unknown`, or `ended` as the job has."""
    step: int
    step_s: float | None
    heartbeat_age_s: float | None
    cause: str
    """What happened to it; empty: no fault of it is known."""
    own_s: float | None = None
    """Its own time of a step, without the wait for others."""
    waited_s: float | None = None
    """How long it waits for others in a step."""
    slower: float | None = None
    """It is named a straggler: its own time over that of the others that do the same work. Null: it is not."""


@dataclass(frozen=True, slots=True)
class StragglerRow:
    """A rank that is slower than the others that do the same work."""

    rank: int
    node: str
    ratio: float
    own_s: float
    """Its own time of a step."""
    others_s: float
    """The others' median."""
    steps: int
    """For so many."""


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault of the job."""

    attempt: int
    unix_s: float
    """Of its first sign."""
    kind: str
    """A cause's kind (docs/operating.md), or `false alarm`."""
    ranks: list[int]
    cause: str
    outcome: str
    """`saved`, `in place` (training continued without a restart), `not saved`, `false alarm`, `unknown`, or `now` while it lasts."""
    detail: str
    """The checkpoint, or why there is none."""
    step: int | None
    """The one that was saved, or from which training continued; null: there is none."""
    steps_lost: int | None
    """Finished steps that have to be trained again; null: not known."""
    took_s: float | None
    """From its first sign until the ranks were ordered to exit or to continue."""
    stages_s: dict[str, float] = field(default_factory=dict)
    """What of it each stage took, in their order: those of `ttp.proto.incident.STAGES` that there were, and behind `took_s` `restarted`: from the order
    to exit, or to continue, until the next finished step."""


@dataclass(frozen=True, slots=True)
class HolderRow:
    """What a rank, or a node of a large job, held when the attempt began."""

    ranks: str
    node: str
    shards: list[str]
    """Empty: the row is a node's."""
    also_on: list[str]
    """Who else holds them: of a rank's row for each shard."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One published checkpoint."""

    directory: str
    step: int
    path: str
    cause: str
    """Why it was written; empty: its manifest cannot be read."""
    written_unix_s: float | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class End:
    """How a job has ended."""

    unix_s: float
    result: str
    why: str
    last_step: int | None
    saved_step: int | None
    """The newest step that is on disk; null: not known."""
    lost: int | None
    """Steps that were trained more than once, or are not on disk; null: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One look at a job."""

    state: str
    """`running`, `ended`, or `unknown`: no controller answers, and no file says that the job has ended."""
    source: str
    """`controller`, or `files`."""
    phase: str
    """`training`, `starting`, `frozen`, ...: docs/status.md lists them."""
    unix_s: float
    """When this was asked; of the newest line in the files where no controller answers."""
    job: str
    """The attempt's name, `RUN/ATTEMPT`."""
    attempt: int | None
    log_dir: str
    """Empty: its files are not known here."""
    world_size: int
    step: int | None
    """The newest finished step."""
    steps_per_s: float | None
    step_s: float | None
    """The median of the newest steps' times; of a job that has ended the mean of its newest attempt's."""
    slow_step_s: float | None
    still_s: float | None
    """Since a rank was last seen to progress."""
    hang_limit_s: float | None
    since_unix_s: float | None
    """When the job's first rank came to its first controller."""
    goodput: float | None
    """The share of the time since then in which new steps were trained; null: not known, or not for certain."""
    time_use: TimeUse | None
    """Where the time since then went."""
    leader: Leader | None
    standbys: list[str]
    survives: str
    coverage: CoverageNow | None
    rank_count: int
    ranks: list[RankLine]
    """All of them, or those to look at first; of a job that has ended those of its newest attempt."""
    fault_count: int
    faults: list[FaultRow]
    """The newest first."""
    holder_count: int
    holders: list[HolderRow]
    """All of them, or the first."""
    checkpoints: list[CheckpointRow]
    """The newest of each directory."""
    end: End | None
    steps_lost: int = 0
    """Finished steps that were trained again, or have to be, as far as it is known."""
    stragglers: list[StragglerRow] = field(default_factory=list)
    """The slowest first."""
    stragglers_compared: bool | None = None
    """Two ranks or more report their own time of a step, by which ranks are compared. Null: not known, as no step's time is, or no controller answers."""
    loss: float | None = None
    """The newest that the program has reported; null: it reports none, or it is not finite."""
    loss_finite: bool | None = None
    """Null: no loss is known."""
    page: str = ""
    """The address of the status page, if one is served now."""
    excluded: list[str] = field(default_factory=list)
    """Nodes that take no part any more as their health checks failed, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """What could not be asked or read, one line each."""
