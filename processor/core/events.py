"""What goes into a processor's machine and what comes out (PURE)."""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import dataclass
from ttp.proto.messages import (
    Cause,
    CommitRecord,
    Downward,
    Phase,
    PublishOrder,
    Registration,
    Regroup,
    ShareResult,
    StateReport,
    Upward,
    WriteOrder,
)


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    rank: int
    heartbeat_s: float = 1.0
    reconnect_s: float = 0.2
    """Pause between two tries to reach the controller."""
    controller_lost_s: float = 15.0
    """After a fault in its own rank, a processor that cannot reach a controller for this long gives up and exits."""
    boundary_s: float = 5.0
    """A rank with a preemption notice waits so long for the end of the step in flight before it asks for the dump."""
    address: str = ""
    """The controller that the job starts with; empty: the driver knows it."""
    look_s: float = inf
    """Between two looks for controllers that others have started, while all known ones are lost; inf: none is started in their place."""
    start_s: float = 20.0
    """Between two tries of rank 0 to start a controller where there is none."""
    saves_alone: bool = False
    """The ranks can save a finished step together without a controller."""
    alone_s: float = 120.0
    """So long a rank with a preemption notice waits, without a controller, for the end of the step that all save, and again for the save."""
    vacant: int = 0
    """The freeze in which this process was started in another's place: its gate is closed from the start, and it holds no shard yet."""
    beats_together: bool = False
    """Heartbeats are sent at the same moments by all ranks on a node, which share a relay and a clock."""


# --- in ---


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream is open; `registration` is what this rank holds right now."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Disconnected:
    reason: str
    refused: bool = False
    """Nothing listens there any more, or one that an active controller has fenced: another try is of no use."""


@dataclass(frozen=True, slots=True)
class Received:
    message: Downward


@dataclass(frozen=True, slots=True)
class GateClosed:
    """CloseGate was carried out (report.closed) or timed out (not report.closed); then it comes again, closed, when the
    update in progress ends after all."""

    report: StateReport


@dataclass(frozen=True, slots=True)
class RollForwardDone:
    freeze_id: int
    state_step: int


@dataclass(frozen=True, slots=True)
class RegroupDone:
    """RegroupTraining was carried out: the groups are whole, and the shards of the ordered step are here, equal to their replicas."""

    order: Regroup


@dataclass(frozen=True, slots=True)
class WriteDone:
    order: WriteOrder
    result: ShareResult


@dataclass(frozen=True, slots=True)
class PublishDone:
    order: PublishOrder
    path: str


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """RollForward, RegroupTraining, WriteShare or PublishCheckpoint raised."""

    freeze_id: int
    stage: str
    tmp_name: str
    error: str
    torn: tuple[int, ...] = ()
    """A publisher found files of these ranks that are not what they reported."""


@dataclass(frozen=True, slots=True)
class LocalFault:
    """`train` raised, or the agent is gone."""

    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """This rank has a preemption notice (SIGTERM). A second one: leave at once."""

    text: str


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """The step is finished, and the training thread of every rank stops behind it: some rank has a preemption notice."""

    step: int


@dataclass(frozen=True, slots=True)
class SavesAlone:
    """Every rank has finished the step, none had a controller when it was READY, and some rank has a preemption notice: the training threads
    of all are in the save now."""

    step: int


@dataclass(frozen=True, slots=True)
class SavedAlone:
    """They have: `path` is published. Or they could not: `error` says why."""

    step: int
    path: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ControllerStarted:
    """StartController was carried out: one that waits listens at `address`, and whoever looks finds it. Empty: why not."""

    address: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ControllerEnded:
    """A controller that this rank had started has ended."""

    address: str


@dataclass(frozen=True, slots=True)
class ControllersFound:
    """The answer to LookForControllers: all that ranks have started, in the order in which they take over."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainReturned:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; carries what the heartbeat says."""

    phase: Phase
    step: int
    waiting: bool = False
    paused: bool = False
    work_done: int = 0
    """Grows while an order is carried out; in what units does not matter."""
    steps: int = 0
    """Steps finished in this attempt."""
    step_times_s: tuple[float, ...] = ()
    """Seconds that the newest of them took, oldest first."""


Event = (
    Connected
    | Disconnected
    | Received
    | GateClosed
    | RollForwardDone
    | RegroupDone
    | WriteDone
    | PublishDone
    | WorkFailed
    | LocalFault
    | Noticed
    | BoundaryReached
    | SavesAlone
    | SavedAlone
    | ControllerStarted
    | ControllerEnded
    | ControllersFound
    | TrainReturned
    | Tick
)

# --- out ---


@dataclass(frozen=True, slots=True)
class Send:
    message: Upward


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to the controller at `address`, and close the one before (the driver answers Connected or
    Disconnected)."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class CloseGate:
    freeze_id: int


@dataclass(frozen=True, slots=True)
class OpenGate:
    freeze_id: int


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Roll forward: the local update of record.step, from the side thread."""

    freeze_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class RegroupTraining:
    """Have the training thread leave its step and make its groups again; answered by RegroupDone or WorkFailed. The gate stays closed."""

    order: Regroup


@dataclass(frozen=True, slots=True)
class WriteShare:
    order: WriteOrder


@dataclass(frozen=True, slots=True)
class PublishCheckpoint:
    order: PublishOrder


@dataclass(frozen=True, slots=True)
class ExitProcess:
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartController:
    """Start a controller that waits for ranks, where whoever looks finds it; answered by ControllerStarted. `known`: it is given
    undone when any other than these is found by then; empty: an active controller has asked for it."""

    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookForControllers:
    """Look for controllers that other ranks have started; answered by ControllersFound, or not at all."""


@dataclass(frozen=True, slots=True)
class ReportUnled:
    """From the next step on this rank contributes to the spanning collective whether no controller leads it."""

    unled: bool


@dataclass(frozen=True, slots=True)
class LeaveBoundary:
    """The training thread, waiting behind a finished step, goes on: no controller is there to have the step saved."""


@dataclass(frozen=True, slots=True)
class SaveStacks:
    """Write down what every thread of this process is doing, before anything is ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseTraining:
    """The training thread, waiting at the end of `train`, may leave (released), or at the start (there is no controller)."""


@dataclass(frozen=True, slots=True)
class Log:
    text: str


Effect = (
    Send
    | Connect
    | CloseGate
    | OpenGate
    | ApplyUpdate
    | RegroupTraining
    | WriteShare
    | PublishCheckpoint
    | StartController
    | LookForControllers
    | ReportUnled
    | LeaveBoundary
    | SaveStacks
    | ExitProcess
    | ReleaseTraining
    | Log
)
