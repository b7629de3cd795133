"""All that the controller's machine remembers (PURE).

Owns the state's shape, and the list of transitions between stages: `goto` is the only way from one to another. Frozen and hashable, so
that states can be compared, kept and searched.
"""

from __future__ import annotations

import enum
from math import inf
from typing import Any, ClassVar, Generic, TypeGuard, TypeVar

from ttp.proto.frozen import dataclass, replace
from ttp.proto.incident import Saved
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    PublishOrder,
    Regroup,
    ShareResult,
    StateReport,
    WriteOrder,
)

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
    """The names of the stages, as status and journals have them. The order is that of a fault; a standby begins with the first two."""

    STANDBY = "standby"
    GATHERING = "gathering"
    ASSEMBLING = "assembling"
    RUNNING = "running"
    FREEZING = "freezing"
    ROLLING = "rolling"
    REGROUPING = "regrouping"
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
    suspicion: Cause
    """Why the gates were closed, while there is no cause."""
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
    wrong: frozenset[int] = frozenset()
    """Ranks whose replica most holders of its shard have proven wrong in this fault: they hold nothing, and publish nothing."""
    unfit: frozenset[tuple[str, int]] = frozenset()
    """(directory, rank): what the rank's node had written there could not be published; it writes there no more in this fault."""
    unwritable: tuple[tuple[int, frozenset[int]], ...] = ()
    """(step, ranks): steps that could be written into no directory while those ranks had them. Until another rank has come to
    it (its update has ended), an older one that local copies cover is written instead, if any."""
    errors: tuple[str, ...] = ()
    """What failed in the dumps of earlier rounds, for the refusal's reason."""
    unproven: Cause | None = None
    """A hang: a cause once every report is in and no rank is seen to have progressed."""
    takeover: bool = False
    """The freeze with which a standby takes over: no false alarm before every rank has reported."""
    updating: tuple[int, ...] = ()
    """Ranks whose gate is not closed yet because their update goes on, and without which a shard has no holder: what they
    report when it has ended is waited for. Empty once there is something new to decide from."""
    update_by: float = inf
    """When these updates count as stuck; inf: none was waited for in this round."""
    to_be_written: bool = False
    """The ranks have been ordered to regroup, or to write, in an earlier round: this fault can only end with a checkpoint."""
    asked_late_until: float = -inf
    """Ranks that attached again during this round have as much time to answer it as the others had: nothing is refused before."""


@dataclass(frozen=True, slots=True)
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
    """When slow ranks are passed over where others can do their work: half of the fault's remaining time after the order, so that
    the others have as long for it."""
    directories: tuple[str, ...]
    work: PerRank[Work]
    looked: bool = False
    """It was looked already for who could be passed over."""
    prompt: frozenset[int] | None = None
    """WRITING: ranks that owed nothing any more when half of the patience with the newest order was over: they are given the work
    of others. None: that moment has not come."""
    attempt: int = 0
    """Index into `directories`, and the last number of the staging directory's name is one more."""
    failed_here: frozenset[int] = frozenset()
    """Ranks whose write failed in this staging directory."""
    order: PublishOrder | None = None
    publishers: frozenset[int] = frozenset()
    """Ranks that were ordered to publish and have not answered: one for each place that is not published yet."""
    asked: frozenset[tuple[int, str]] = frozenset()
    """(rank, staging directory): who was ordered to publish in this freeze, whatever became of it."""
    published_places: frozenset[str] = frozenset()
    failed_publishers: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    """Ranks of which a publisher said that a file of this staging directory is torn."""
    errors: tuple[str, ...] = ()
    """What failed in writing and publishing, for the refusal's reason."""
    saved: Saved | None = None
    """What was published; what fails then ends in a restart from it."""
    regroup: Regroup | None = None
    """The order to regroup of this freeze, whatever became of it."""


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
class AttachedAgent:
    """A launcher that is attached, and the ranks whose processes it starts."""

    host: str
    ranks: tuple[int, ...]
    places: int = 0
    """Of a spare node, which has no ranks: for how many of a lost one it has room."""


@dataclass(frozen=True)
class Recoveries:
    """Faults that ended in place, under this controller."""

    count: int = 0
    step: int = -1
    """Of the newest of them."""
    at_step: int = 0
    """How many of them in a row were at that step."""


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


# --- stages ---


class AnyStage:
    """Where the job is, with exactly what is known there and nowhere else."""

    name: ClassVar[Stage]


@dataclass(frozen=True)
class Standby(AnyStage):
    """No rank has come to this controller yet, or none that counts."""

    name = Stage.STANDBY


@dataclass(frozen=True)
class Gathering(AnyStage):
    """The ranks that lost their controller come to this one."""

    name = Stage.GATHERING
    deadline: float
    """When those that have not come are waited for no longer."""
    gather_by: float = inf
    """A message after a silence gives the others no more time than until then."""
    last_message_at: float = inf
    """When the last message of a rank came."""
    early: tuple[Cause, ...] = ()
    """Faults that ranks reported before the takeover."""
    waited_longer: bool = False
    """The ranks that came did not cover, and the others had a lease more."""
    looked: int = 0
    """The newest generation for which earlier controllers were looked for."""
    earlier: tuple[str, ...] = ()
    """Those that were looked for, for it."""


@dataclass(frozen=True)
class Assembling(AnyStage):
    """The ranks of a new job register."""

    name = Stage.ASSEMBLING
    deadline: float
    """When registering must be over."""


@dataclass(frozen=True)
class Running(AnyStage):
    """The job trains."""

    name = Stage.RUNNING


@dataclass(frozen=True)
class Faulted(AnyStage):
    """A fault is handled."""

    fault: Fault


class Freezing(Faulted):
    """The gates close, and the ranks report what they hold."""

    name = Stage.FREEZING


@dataclass(frozen=True)
class Ordered(Faulted):
    """A decision is carried out."""

    dump: Dump


class Rolling(Ordered):
    """Ranks that lack the decided step roll forward to it."""

    name = Stage.ROLLING


@dataclass(frozen=True)
class Regrouping(Ordered):
    """The ranks make their groups again, with replacements of those that the fault has cost; `dump` has what is written if that fails."""

    name = Stage.REGROUPING
    pending: frozenset[int] = frozenset()
    """Ranks that have not regrouped."""
    awaited: frozenset[int] = frozenset()
    """Those of them whose replacement has not registered."""
    lost: frozenset[str] = frozenset()
    """Nodes whose ranks' places are being given to others."""


class Writing(Ordered):
    """Every shard of the decided step is written."""

    name = Stage.WRITING


class Publishing(Ordered):
    """What was written is made visible."""

    name = Stage.PUBLISHING


@dataclass(frozen=True)
class Exiting(AnyStage):
    """The ranks are ordered to exit."""

    name = Stage.EXITING
    fault: Fault | None
    """What they exit for; None: the job had not assembled."""
    deadline: float
    """When the controller exits."""
    reason: str
    untold: frozenset[int]
    """Live ranks that were without a stream when Exit was sent."""


@dataclass(frozen=True)
class Over(AnyStage):
    """The controller's work is over."""

    name = Stage.OVER
    reason: str


STAGES = (Standby, Gathering, Assembling, Running, Freezing, Rolling, Regrouping, Writing, Publishing, Exiting, Over)
At = TypeVar("At", bound=AnyStage, covariant=True)
To = TypeVar("To", bound=AnyStage)


@dataclass(frozen=True)
class StateAt(Generic[At]):
    """The machine's whole state, in one stage."""

    settings: ControllerSettings
    at: At
    """The stage; `goto` changes it."""
    members: Membership
    pace: Pace
    coverage: Coverage = Coverage((), ())
    """Empty: not known yet."""
    survives: str = ""
    agents: tuple[AttachedAgent, ...] = ()
    """Those that are attached, in the order in which they came."""
    freeze_id: int = 0
    """The last freeze round's number; grows through the controller's life, and a standby's begin above those of all before
    it, so that an order of an earlier controller is never taken for one of this."""
    successors: tuple[str, ...] = ()
    """Addresses of all standbys, in the order in which they take over; this controller's own among them where it was one."""
    restoring: Restoring = Restoring()
    seen: float = -inf
    """When this machine last took an event: its process may have been stopped."""
    notes: Notes = Notes()
    recoveries: Recoveries = Recoveries()
    generation: int = 0
    """The newest freeze under which all groups were made and found whole; 0: those of the attempt's start."""
    begun_generation: int = 0
    """The newest under which this controller has ordered the ranks to make their groups."""
    lost_hosts: frozenset[str] = frozenset()
    """Nodes that were given up for lost, and whose ranks' places other nodes have."""
    checkpoint: str = ""
    """The newest that any rank has reported, or that this controller has had published; empty: none."""
    job_groups: int = 0
    """How many shard groups the job has, those of ranks that never came here included; 0: not known yet."""

    @property
    def stage(self) -> Stage:
        """The name of the stage."""
        return self.at.name

    @property
    def fault(self) -> Fault | None:
        """The fault, in a stage that has one."""
        return getattr(self.at, "fault", None)

    @property
    def dump(self) -> Dump | None:
        """The dump, in a stage that has one."""
        return getattr(self.at, "dump", None)

    @property
    def standbys(self) -> tuple[str, ...]:
        """The addresses of those that take over from this controller, as far as it knows that they run."""
        own, listed = self.settings.address, self.successors
        after = listed[listed.index(own) + 1 :] if own in listed else listed
        return tuple(address for address in after if address not in self.restoring.lost)

    def with_fault(self: S, fault: Fault) -> S:
        """Replace the fault; the stage stays."""
        at: Any = self.at
        return replace(self, at=replace(at, fault=fault))

    def with_dump(self: S, dump: Dump) -> S:
        """Replace the dump; the stage stays."""
        at: Any = self.at
        return replace(self, at=replace(at, dump=dump))


ControllerState = StateAt[AnyStage]
S = TypeVar("S", bound=ControllerState)


def is_ordered(state: ControllerState) -> TypeGuard[StateAt[Ordered]]:
    return isinstance(state.at, Ordered)


EDGES: dict[tuple[type[AnyStage], type[AnyStage]], str] = {
    (Standby, Gathering): "the first rank has come, which has lost its controller",
    (Standby, Over): "all ranks have ended",
    (Gathering, Standby): "only processes on lost nodes have come, and the job goes on without them",
    (Gathering, Freezing): "every rank has come or counts as dead: all gates close once",
    (Gathering, Exiting): "the controller was lost before the job had assembled",
    (Gathering, Over): "all ranks have finished or ended, or none is attached any more",
    (Assembling, Running): "every rank is registered and attached",
    (Assembling, Exiting): "a rank died or failed, or the world did not assemble in time",
    (Assembling, Over): "no rank is attached any more",
    (Running, Freezing): "a rank died, failed or is suspect, or the job hangs",
    (
        Running,
        Over,
    ): "all ranks have finished, or none is attached any more",
    (Freezing, Running): "a false alarm: all gates open",
    (Freezing, Rolling): "every awaited report is in: the step is decided",
    (Freezing, Exiting): "nothing can be saved, or the fault's time is over",
    (Freezing, Over): "all ranks have finished, or none is attached any more",
    (Rolling, Writing): "every roll forward is answered",
    (Rolling, Regrouping): "every roll forward is answered, and training can continue without a checkpoint",
    (Rolling, Freezing): "another plan is better: ask again",
    (Rolling, Exiting): "all ranks are dead, or the fault's time is over",
    (Rolling, Over): "no rank is attached any more",
    (Regrouping, Running): "all ranks have regrouped: all gates open",
    (
        Regrouping,
        Freezing,
    ): "a rank died, failed or has finished, or the time for it is over: ask again, and write the step",
    (
        Regrouping,
        Exiting,
    ): "it failed, and the step is published already; or all ranks are dead, or the fault's time is over",
    (Regrouping, Over): "no rank is attached any more",
    (Writing, Publishing): "every shard is written",
    (Writing, Freezing): "a shard has lost its last writer, or no directory takes the step: ask again",
    (Writing, Exiting): "no directory takes any step, all ranks are dead, or the fault's time is over",
    (Writing, Over): "no rank is attached any more",
    (Publishing, Regrouping): "published, and training can continue",
    (Publishing, Exiting): "published; or all ranks are dead, or the fault's time is over",
    (Publishing, Writing): "no rank can publish in this directory: the next one",
    (Publishing, Freezing): "what a node has written is lost, torn or cannot be published: ask again",
    (Publishing, Over): "no rank is attached any more",
    (Exiting, Over): "every rank has closed its stream, or the time for it is over",
}
"""Every transition, and when it is taken."""


def goto(state: ControllerState, at: To) -> StateAt[To]:
    """Go to another stage. Raises ValueError for a transition that is not listed."""
    if (type(state.at), type(at)) not in EDGES:
        raise ValueError(f"stage {state.stage.value} is never followed by {at.name.value}")
    any_state: Any = state
    gone: StateAt[To] = replace(any_state, at=at)
    return gone
