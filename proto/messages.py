"""Every message of the control protocol, as frozen dataclasses (PURE: standard library data modules only).

Owns the vocabulary that controller and processors share. Never imports protobuf, gRPC or torch: `codec.py` turns these
into bytes and back. Messages name their rank.

Upward (processor or agent -> controller): Registration, Heartbeat, StateReport, FaultReport, RolledForward, Written,
Published, Regrouped, StepFailed, Progress, Finished, AgentHello, WorkerExit, Vouch, ReplaceFailed.
Downward (controller -> processor): Welcome, Freeze, Thaw, RollForward, Regroup, WriteOrder, PublishOrder, Exit, Release.
Downward, to a stream rather than to a rank: KeepAlive (every stream), StandbyList, Replace and TakePlaces (agents).
"""

from __future__ import annotations

import enum

from ttp.proto.cause import Cause as Cause
from ttp.proto.cause import CauseKind as CauseKind
from ttp.proto.cause import Text as Text
from ttp.proto.cause import in_brief as in_brief
from ttp.proto.frozen import dataclass
from ttp.proto.shares import FileEntry as FileEntry
from ttp.proto.shares import Part as Part
from ttp.proto.shares import ShareResult as ShareResult

EXIT_CODE_PERSISTED = 75
"""Exit status of a rank that exited on the controller's order, state saved (EX_TEMPFAIL: try again)."""

EXIT_CODE_PREEMPTED = 76
"""Exit status of the same for a rank with a preemption notice (SIGTERM): nothing in it has failed."""

SAVED_EXIT_CODES = (EXIT_CODE_PERSISTED, EXIT_CODE_PREEMPTED)
"""Exit statuses of ranks that left because the controller had no more use for them: the dump is over."""

NO_PROCESS = 0
"""In a Vouch: no process of that rank runs."""


class Phase(enum.IntEnum):
    """Where a rank is within step t (design, section 3). Optimizer state is t-1 until DONE, then t."""

    COMPUTE = 0
    READY = 1
    UPDATING = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """All that a READY rank must know to finish step `step`'s update alone; identical on every rank that has it.

    Whoever holds it proves that every rank was READY(step): the spanning collective could not have finished otherwise.
    """

    step: int
    grad_norm: float
    """Global L2 norm of the unscaled gradient, before clipping. NaN or inf when `skipped`."""
    clip_factor: float
    """Gradients are multiplied by this (1.0: not clipped)."""
    skipped: bool
    """True when an overflow was found: the update changes nothing but the step and the loss scale."""
    loss_scale: float
    """The loss scale that step `step`'s gradients carry."""
    learning_rates: tuple[float, ...]
    """One per parameter group, in the optimizer's order."""
    sums: tuple[float, ...]
    """Small per-step numbers that rode on the spanning collective, summed over ranks (the trainer's loss, for one)."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The shards that a rank holds and that always move together, known by a hash of their addresses."""

    group_id: str
    label: Text
    """For people: `shard 1 of 2: layers.0.wq[0:4096] and 47 more`."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Registration:
    """Said by a processor whenever it attaches; a controller can rebuild all it knows from these."""

    rank: int
    world_size: int
    host: str
    pid: int
    groups: tuple[ShardGroup, ...]
    state_step: int
    """Last step whose update is in the optimizer state (0: none)."""
    save_dirs: tuple[str, ...]
    """Checkpoint directories in order of preference, absolute."""
    layout: str
    """JSON for the manifest: axes' sizes, replicas, bucket layout hash."""
    standby: str = ""
    """Address of the standby controller that this rank started; empty: none."""
    controllers: tuple[str, ...] = ()
    """Addresses of all controllers that this rank knows, in order of their terms; empty: only the one it speaks to."""
    job_groups: int = 0
    """How many shard groups the whole job has, as a controller reported; 0: never received."""
    step_times_s: tuple[float, ...] = ()
    """How long this rank's newest steps took, oldest first: a controller that takes over knows the job's pace from it."""
    finished: bool = False
    """`train` has returned: with the registration, so that this rank is never taken for one that trains."""
    steps: int = 0
    """Steps finished in this attempt; the last of `step_times_s` is the newest one's."""
    copies: bool = False
    """This rank's shards are copied into its agent's memory every few steps, and into another node's."""
    regroups: bool = False  # it can leave its training, make its groups again, and enter its training again
    vacant: int = 0  # the freeze in which it was started in a process's place, until it holds its shards; else 0
    generation: int = 0  # the newest freeze under which it has made its groups, or has begun to; 0: it has made none since the attempt began
    regrouped: int = 0  # the newest under which it has found them whole: every rank's process has begun that generation
    repairs: bool = (
        False  # a replica of its shards that most of a shard's holders prove wrong may be replaced; else the job stops
    )
    workload: str = ""
    """Ranks with the same one have the same part of the model, so that their own times of a step can be compared. Empty: it is not known."""
    own_checkpoints: bool = False
    """The trainer writes and loads checkpoints of its own: which one is the newest is not reported."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank lives, and where it is in its step."""

    # Journals leave out what has its default: another default would change what older ones say.
    rank: int
    phase: Phase
    step: int
    waiting: bool = False
    """The training thread stands in a collective: it waits for others, and is not suspected of a hang."""
    paused: bool = False
    """The training thread said that it does something else than steps for a while (an evaluation, a periodic save)."""
    frozen: int = 0
    """The freeze that its gate is closed under; 0: its gate is open."""
    owes: bool = False
    """It has not answered that freeze, or an order, yet."""
    finished: bool = False
    """`train` has returned."""
    steps: int = 0
    """Steps finished in this attempt."""
    step_times_s: tuple[float, ...] = ()
    """Seconds that the newest of them took, oldest first: those finished since the last heartbeat, a few at most."""
    own_s: float | None = None
    """Of a step, the median of those finished since the last heartbeat: without the time in which this rank waited for others. None: not
    measured. For people: no decision depends on it, as on the next two."""
    waited_s: float | None = None
    """Of a step, for other ranks."""
    loss: float | None = None
    """The newest that the program has reported since the last heartbeat; None: it has reported none. Any number, NaN too."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A sum over the bits that the reporting rank holds of a shard group: equal bits have equal sums, and one altered word another."""

    group_id: str
    value: int  # 64 bits, signed
    holders: int  # ranks that hold it, lost ones included: a controller that took over may not know them all


@dataclass(frozen=True, slots=True)
class StateReport:
    """A rank's answer to Freeze. `closed` False: the gate could not be closed in time (a stuck update)."""

    rank: int
    freeze_id: int
    closed: bool
    phase: Phase
    step: int
    """The step that `phase` belongs to."""
    state_step: int
    """Step of the optimizer state; meaningless while `closed` is False or `torn` is True."""
    torn: bool
    """True when an exception left an update half done: this rank's shards must not be used."""
    backup_step: int
    """Step of the local copy, -1: none."""
    records: tuple[CommitRecord, ...]
    """Commit records that this rank still has, newest last (at least the newest)."""
    final: bool = False
    """True when no thaw can open the gate: the state was rolled forward, orders of a dump were taken, the rank has left its groups, or it
    holds no shard yet."""
    checkpoint: Text = ""
    """Path of the newest checkpoint that this rank knows to be published; empty: none."""
    digests: tuple[Digest, ...] = ()
    """Of its shard groups that were found to differ between their holders at `state_step`, what this rank itself has read in its own memory."""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A processor reports its own rank's fault: an exception out of `train`, SIGTERM, or a lost agent. The rank is alive."""

    rank: int
    cause: Cause
    detail: Text
    """Traceback, or empty."""


@dataclass(frozen=True, slots=True)
class Finished:
    """`train` returned. The rank stays as a holder until Release."""

    rank: int


@dataclass(frozen=True, slots=True)
class AgentHello:
    """A node's launcher attaches; `pids` in the order of `ranks`."""

    host: str
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    places: int = 0
    """Of a spare node: for so many ranks of a lost node it has room. It has none of its own."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The agent saw a worker end (or begin to end). `seen_unix_s`: the agent's clock at that moment."""

    rank: int
    pid: int
    text: Text
    """`signal SIGKILL`, `exit code 1`, or `exiting` as long as the kernel does not tell how."""
    seen_unix_s: float


@dataclass(frozen=True, slots=True)
class Vouch:
    """The agent found these processes alive and running: neither ending nor stopped. Repeated three times a lease; `pids` in
    the order of `ranks`, or NO_PROCESS."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Registration accepted. `survives` is what the job survives, as text."""

    rank: int
    term: int
    heartbeat_s: float
    lease_s: float
    survives: Text
    successors: tuple[str, ...] = ()
    """Addresses of the job's standby controllers, in the order in which they take over; the same for every rank."""
    job_groups: int = 0
    """How many shard groups the whole job has; 0: this controller does not know yet."""
    overview: tuple[Text, ...] = ()
    """To rank 0 alone, which shows it to people: ranks, hosts and replicas, a line each."""
    warnings: tuple[Text, ...] = ()
    """To rank 0 alone: which shards are worse protected than this world allows, a line each."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Close the gate and report. Doing it twice is harmless."""

    freeze_id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Thaw:
    """Open the gate again: a false alarm, or all ranks have regrouped."""

    freeze_id: int


@dataclass(frozen=True, slots=True)
class RollForward:
    """Do the local update of `record.step` with this record; answered by RolledForward or StepFailed."""

    freeze_id: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class RolledForward:
    """The ordered update is finished."""

    rank: int
    freeze_id: int
    state_step: int


@dataclass(frozen=True, slots=True)
class Regroup:
    """Leave the training thread's step and the process groups, make the groups again with the replacements, fill these from the ranks that
    hold the same shards, and compare; answered by Regrouped or StepFailed. The gate stays closed."""

    freeze_id: int
    step: int  # of the state of all that are not replaced, and of a replacement when it is filled
    replaced: tuple[int, ...]  # ranks whose process is another one from now on (ascending)
    record: CommitRecord | None  # of `step`, if any rank has reported it
    saved: bool = False  # this fault has published it


@dataclass(frozen=True, slots=True)
class Regrouped:
    """This rank's groups are whole, and its shards are those of the ordered step, equal to its replicas'."""

    rank: int
    freeze_id: int


@dataclass(frozen=True, slots=True)
class Replace:
    """To an agent: start another process in the place of this rank's, which has ended, or is ended for it; it registers as vacant."""

    rank: int
    pid: int  # to be ended first: it has lost its state. 0: the rank's process has ended; else nothing is started
    freeze_id: int


@dataclass(frozen=True, slots=True)
class TakePlaces:
    """To the agent of a spare node: start processes in the places of these ranks, all those of a node that is lost; they register as vacant.
    Answered by ReplaceFailed if one cannot be started."""

    ranks: tuple[int, ...]
    freeze_id: int


@dataclass(frozen=True, slots=True)
class ReplaceFailed:
    """An agent could not start another process in a rank's place, or that one has ended."""

    host: str
    rank: int
    freeze_id: int
    error: Text


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write these parts of step `step` into `directory`/`tmp_name`; answered by Written or StepFailed."""

    freeze_id: int
    step: int
    directory: str
    tmp_name: str
    """`iter_0000042_tmp_...`, the staging directory: fresh for every write attempt."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The ordered parts are durable (fsync)."""

    rank: int
    freeze_id: int
    tmp_name: str
    parts: tuple[Part, ...]
    result: ShareResult


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """Make what was written visible: metadata, manifest, fsync, rename, tracker; answered by Published or StepFailed."""

    freeze_id: int
    step: int
    directory: str
    tmp_name: str
    results: tuple[ShareResult, ...]
    cause: Cause
    record: CommitRecord | None
    """Commit record of `step`, if any survivor has it."""
    term: int
    """The ordering controller's: a checkpoint of a higher one is not replaced."""


@dataclass(frozen=True, slots=True)
class Published:
    """The checkpoint is visible at `path`."""

    rank: int
    freeze_id: int
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Progress:
    """An order of this freeze, or an update that keeps the gate from closing, has progressed since this was said last: gigabytes take longer
    than a rank may be silent. Not said by a rank whose disk hangs, which goes on to send heartbeats."""

    rank: int
    freeze_id: int


@dataclass(frozen=True, slots=True)
class StandbyReport:
    """A standby controller that this rank started listens at `address`, or has ended; without an address it could not be started."""

    rank: int
    address: str
    runs: bool
    error: Text = ""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A RollForward, Regroup, WriteOrder or PublishOrder could not be carried out by this rank."""

    rank: int
    freeze_id: int
    stage: str  # `roll_forward`, `regroup`, `write` or `publish`
    tmp_name: str
    error: Text
    torn: tuple[int, ...] = ()
    """Ranks of which a file of this staging directory is there and is not what they reported: it ended short, without a report."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Leave the process now, with this status (75: persisted or refused, start again)."""

    code: int
    reason: Text


@dataclass(frozen=True, slots=True)
class Release:
    """All ranks have finished: exit."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The controller lives. Said once a heartbeat on every stream, whatever number of ranks it carries."""


@dataclass(frozen=True, slots=True)
class StandbyList:
    """The standby controllers, in the order in which they take over when this one is silent for `lease_s`. To agents, and to ranks when
    the list has changed; without any, this controller's return is waited for."""

    addresses: tuple[str, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class StartStandby:
    """Start a standby controller: the job has too few behind this one. Answered by StandbyReport."""


Upward = (
    Registration
    | Heartbeat
    | StateReport
    | FaultReport
    | Finished
    | AgentHello
    | WorkerExit
    | Vouch
    | RolledForward
    | Written
    | Published
    | StepFailed
    | Progress
    | StandbyReport
    | Regrouped
    | ReplaceFailed
)
Downward = (
    Welcome
    | Freeze
    | Thaw
    | RollForward
    | WriteOrder
    | PublishOrder
    | Exit
    | Release
    | KeepAlive
    | StandbyList
    | StartStandby
    | Regroup
    | Replace
    | TakePlaces
)
