"""All that the controller's machine remembers (PURE).

Owns the state's shape and nothing else: frozen and hashable, so that states can be compared, kept and searched.
"""

from __future__ import annotations

import enum
from math import inf

from ttp.proto.frozen import dataclass
from ttp.proto.messages import Cause, CauseKind, CommitRecord, PublishOrder, ShareResult, StateReport, WriteOrder

from .coverage import Coverage
from .decision import Decision
from .events import ControllerSettings
from .membership import Membership
from .pace import Pace
from .per_rank import PerRank

MOST_KEPT = 1024
"""Causes and errors that are kept of one fault, standbys and hosts that are kept of one job: more come only from what goes wrong."""

EXIT_WAIT_S = 5.0
"""How long the controller waits for streams to close after Exit before it leaves itself."""


class Stage(enum.Enum):
    """Where the job is. The order is the order of a fault's life; a standby begins with the first two."""

    STANDBY = "standby"
    GATHERING = "gathering"
    ASSEMBLING = "assembling"
    RUNNING = "running"
    FREEZING = "freezing"
    ROLLING = "rolling"
    WRITING = "writing"
    PUBLISHING = "publishing"
    EXITING = "exiting"
    OVER = "over"

    __hash__ = object.__hash__  # the tables are looked into at every event, and each member is there once


@dataclass(frozen=True)
class Fault:
    """A fault from the first freeze to the thaw or the exit, over all its freeze rounds."""

    began: float
    causes: tuple[Cause, ...]
    """In the order seen. Empty: only suspicions so far, so that it may still be a false alarm."""
    hint_until: float
    """Peers' errors alone name no culprit; a death is waited for until then."""
    round_deadline: float
    """When this freeze round goes on without the ranks that have not closed their gate."""
    awaiting: int
    """Ranks whose report of this round is still awaited."""
    reports: PerRank[StateReport | None]
    """Of this freeze round."""
    records: tuple[CommitRecord, ...] = ()
    """One per step, oldest first, from any report of any round, whatever became of its rank."""
    unreachable: frozenset[tuple[int, int]] = frozenset()
    """(rank, step): rolling forward to that step failed on that rank."""
    stuck: frozenset[int] = frozenset()
    """Ranks that took an order and did not answer in time: no holders any more during this fault."""
    unfit: frozenset[tuple[str, int]] = frozenset()
    """(directory, rank): what the rank's node had written there could not be published; it writes there no more in this fault."""
    unwritable: tuple[tuple[int, frozenset[int]], ...] = ()
    """(step, ranks): steps that could be written into no directory while those ranks had them. Until another rank has come to
    it (its update has ended), an older one that local copies cover is written instead, if any."""
    errors: tuple[str, ...] = ()
    """What failed in the dumps of earlier rounds, for the refusal's reason."""
    unproven: Cause | None = None
    """A hang: a cause once every report is in and nobody is seen to have got on."""
    takeover: bool = False
    """The freeze with which a standby takes over: no false alarm before every rank has reported."""
    updating: tuple[int, ...] = ()
    """Ranks whose gate is not closed yet because their update goes on, and without which a shard has no holder: what they
    report when it has ended is waited for. Empty once there is something new to decide from."""
    update_by: float = inf
    """When these updates count as stuck; inf: none was waited for in this round."""
    asked_late_until: float = -inf
    """Ranks that attached again during this round have as much time to answer it as the others had: nothing is refused before."""


@dataclass(frozen=True)
class Work:
    """One rank's share of the writing."""

    orders: tuple[WriteOrder, ...] = ()
    """Sent and not answered."""
    results: tuple[ShareResult, ...] = ()
    given: tuple[WriteOrder, ...] = ()
    """All that were sent in this freeze, in whatever directory, answered and taken back ones included."""


@dataclass(frozen=True)
class Dump:
    """A decision being carried out."""

    decision: Decision
    able: frozenset[int]
    """Ranks that have the decided step, or are rolling forward to it. Dead and stuck ones may still be in it."""
    rolling: PerRank[bool]
    """Ranks whose RollForward is not answered."""
    pending: int
    """Roll-forwards, or write orders, that are not answered."""
    progress_by: float
    """When everything that is not answered counts as failed; moves with every answer."""
    patience_until: float
    """When ranks whose work gets on and on are passed over where others can do it: half of what is left of the fault's time
    after the order, so that those have as long for it."""
    directories: tuple[str, ...]
    work: PerRank[Work]
    looked: bool = False
    """It was looked already for who could be passed over."""
    prompt: frozenset[int] | None = None
    """WRITING: ranks that owed nothing any more when half of the patience with the newest order was over: they are given the work
    of others. None: that moment has not come."""
    attempt: int = 0
    """Index into `directories`, and the last number of the attempt's name is one more."""
    failed_here: frozenset[int] = frozenset()
    """Ranks whose write failed in this attempt's directory."""
    order: PublishOrder | None = None
    publishers: frozenset[int] = frozenset()
    """Ranks that were told to publish and have not answered: one for each place that is not published yet."""
    asked: frozenset[tuple[int, str]] = frozenset()
    """(rank, staging directory): who was ordered to publish in this freeze, whatever became of it."""
    published_places: frozenset[str] = frozenset()
    failed_publishers: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    """Ranks of which a publisher said that a file of this attempt is torn."""
    errors: tuple[str, ...] = ()
    """What failed in writing and publishing, for the refusal's reason."""


@dataclass(frozen=True)
class Restoring:
    """What is done about the number of standbys."""

    lost: frozenset[str] = frozenset()
    """Addresses of standbys that have ended."""
    asked: int = -1
    """The rank that was asked to start one and has not answered; -1: none."""
    until: float = -inf
    """Until then its answer is awaited; without one asked, until then no rank is."""
    passed: frozenset[int] = frozenset()
    """Ranks that could not start one, or did not answer, since one was started last."""


@dataclass(frozen=True)
class Sign:
    """What happened to one rank, for the report of the fault."""

    rank: int
    kind: CauseKind
    text: str
    seen: float
    trace: tuple[str, ...] = ()
    """The last lines of its traceback."""
    host: str = ""
    pid: int = 0
    """Its process then; 0: it had not registered."""
    phase: str = ""
    """Where it was by its last heartbeat; empty: not known."""
    step: int = 0
    heard_s: float | None = None


@dataclass(frozen=True)
class Notes:
    """What is noted of a fault for its report, from its first sign on. Nothing is decided by it: see `incident.py`."""

    began: float = inf
    """When the first sign came; inf: nothing is wrong."""
    signs: tuple[Sign, ...] = ()
    """In the order seen."""
    asked: Cause | None = None
    """Why the newest freeze was sent."""
    stages: tuple[tuple[str, float], ...] = ()
    """When each stage of the fault ended."""
    reports: PerRank[StateReport | None] | None = None
    """Where the ranks were when they were frozen first."""


@dataclass(frozen=True)
class ControllerState:
    """The machine's whole state."""

    settings: ControllerSettings
    stage: Stage
    members: Membership
    pace: Pace
    deadline: float
    """ASSEMBLING, GATHERING: when registering must be over. EXITING: when the controller leaves. Else unused."""
    coverage: Coverage | None = None
    survives: str = ""
    agents: frozenset[str] = frozenset()
    """Hosts whose launcher is attached."""
    freeze_id: int = 0
    """The last freeze round's number; grows through the controller's life, and a standby's begin above those of all before
    it, so that an order of an earlier controller is never taken for one of this."""
    fault: Fault | None = None
    dump: Dump | None = None
    reason: str = ""
    """Why the ranks leave, once EXITING."""
    untold: frozenset[int] = frozenset()
    """Live ranks that were without a stream when Exit was sent."""
    early: tuple[Cause, ...] = ()
    """GATHERING: faults that ranks told before the takeover."""
    heard_at: float = inf
    """GATHERING: when a rank was heard last."""
    gather_by: float = inf
    """GATHERING: words that come after a silence give the others no more time than until then."""
    waited_longer: bool = False
    """GATHERING: the ranks that came did not cover, and the others had a lease more."""
    successors: tuple[str, ...] = ()
    """Addresses of all standbys, in the order in which they take over; this controller's own among them where it was one."""
    restoring: Restoring = Restoring()
    seen: float = -inf
    """When this machine last took an event: its process may have been stopped."""
    notes: Notes = Notes()
    job_groups: int = 0
    """How many shard groups the job has, those of ranks that never came here included; 0: not known yet."""
