"""All that a processor's machine remembers (PURE).

Owns the state's shape: frozen and hashable.
"""

from __future__ import annotations

import enum
from math import inf

from ttp.proto.frozen import dataclass
from ttp.proto.messages import (
    CommitRecord,
    FaultReport,
    Published,
    PublishOrder,
    Regroup,
    StandbyReport,
    StepFailed,
    WriteOrder,
    Written,
)

from .events import ProcessorSettings


class RankMode(enum.Enum):
    """What the rank's gate is, and whether there is still a rank."""

    TRAINING = "training"
    """The gate is open."""
    FROZEN = "frozen"
    """A freeze has asked for the gate to be closed; an update in progress may still finish."""
    LEAVING = "leaving"
    """Ordered to exit, or released: nothing matters any more."""

    __hash__ = object.__hash__  # the tables are looked into at every event, and each member is there once


class LinkState(enum.Enum):
    """The stream to the controller."""

    DOWN = "down"
    CONNECTING = "connecting"
    UP = "up"


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """A write or publish order of the current freeze, and its answer once there is one: kept to be said again."""

    order: WriteOrder | PublishOrder
    answer: Written | Published | StepFailed | None = None


@dataclass(frozen=True)
class ProcessorState:
    """The machine's whole state; times as the driver counts them."""

    settings: ProcessorSettings
    standing: RankMode
    link: LinkState
    reconnect_at: float
    """DOWN: when to try again."""
    lost_since: float
    """Since when no controller is attached; inf while one is."""
    heartbeat_at: float = inf
    """When the next heartbeat is due; inf until welcomed on this stream."""
    heartbeat_s: float = inf
    answer_by: float = inf
    """A fault was reported and no controller has reacted, or the ranks save a step without one: the rank gives up then."""
    term: int = -1
    """Of the controller that welcomed last."""
    freeze_id: int = 0
    """The latest freeze's number, as its controller counts; meaningful while not TRAINING."""
    gate_id: int = 0
    """The number that the gate was closed under; differs from `freeze_id` when an older controller froze."""
    closed: bool = False
    """FROZEN: the gate was reported as really closed, so that the state stands still."""
    torn: bool = False
    state_step: int = 0
    """FROZEN: the step that the optimizer state is known to have."""
    records: tuple[CommitRecord, ...] = ()
    """Commit records that this rank was found to hold when its gate was closed last."""
    save_dirs: tuple[str, ...] = ()
    """As registered: the only directories that orders may name."""
    group_ids: frozenset[str] = frozenset()
    """As registered: the shard groups whose parts may be ordered."""
    applying: CommitRecord | None = None
    """A roll-forward that is being done."""
    rolled: bool = False
    """A roll-forward was begun behind this closed gate: it cannot open before this rank has regrouped."""
    regrouping: Regroup | None = None
    """The training thread leaves its groups and makes them again: until it has, this gate cannot open."""
    regroup_error: str = ""
    """Why that could not be done; empty: it has not failed."""
    regrouped: int = 0
    """The freeze under which that was done last."""
    vacant: bool = False
    """This process was started in another's place, and holds no shard yet."""
    ordered: int = 0
    """The freeze of the first write or publish order that was taken since the gate closed, by whatever controller; 0: none was."""
    orders: tuple[OpenOrder, ...] = ()
    steps: int = 0
    """Steps that the training thread has finished in this attempt."""
    step_times_s: tuple[float, ...] = ()
    """Seconds that the newest of them took, oldest first."""
    steps_reported: int = 0
    """Those that the controller on this stream knows of."""
    work_done: int = 0
    """As the last heartbeat's tick had it."""
    faults: tuple[FaultReport, ...] = ()
    """All reports, in order; repeated on every new stream, because nothing acknowledges them."""
    notice: str = ""
    """This rank has a preemption notice: from what. It exits with an exit status of its own."""
    notice_by: float = inf
    """The notice is reported to the controller then, if the end of the step is not reached before; inf: it has been reported."""
    parked: bool = False
    """The training thread stands behind a finished step, because some rank leaves; it goes on only if every controller is lost."""
    unled: bool = False
    """Every controller was lost, and none has come back: the spanning collective carries it. Only where ranks can save without one."""
    alone: bool = False
    """All ranks save a step together: this one attaches to no controller any more, and takes nothing from any."""
    finished: bool = False
    """`train` has returned."""
    successors: tuple[str, ...] = ()
    """Addresses of the job's standby controllers, in the order in which they take over."""
    place: int = 0
    """Which controller this rank is with or looks for: 0 the first one, i the i-th successor."""
    refusals: int = 0
    """How many controllers in a row have refused this rank: nothing listens there any more, or it is fenced."""
    looks_at: float = inf
    """When this rank looks for controllers that it does not know of; inf: no need."""
    looked: float = -inf
    """When it did last."""
    starts_at: float = -inf
    """Rank 0 starts no controller in the place of lost ones before."""
    starting: bool = False
    """A controller is being started here."""
    standbys: tuple[StandbyReport, ...] = ()
    """What this rank reports of the standbys that it has started; said again on every new stream."""
    place_since: float = -inf
    """Not UP: since when that controller is tried."""
    received_s: float = -inf
    """When the controller last said anything."""
    lease_s: float = inf
    """A controller that is silent for this long is given up; inf until welcomed."""
    job_groups: int = 0
    """How many shard groups the job has, to be reported to the next controller."""
    seen: float = -inf
    """When this machine last took an event: it may have been stopped itself."""
    loss_logged: bool = False
