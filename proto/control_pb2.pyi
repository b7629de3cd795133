from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_COMPUTE: _ClassVar[Phase]
    PHASE_READY: _ClassVar[Phase]
    PHASE_UPDATING: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]

class CauseKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAUSE_KIND_UNSPECIFIED: _ClassVar[CauseKind]
    CAUSE_KIND_PERIODIC: _ClassVar[CauseKind]
    CAUSE_KIND_EXITED: _ClassVar[CauseKind]
    CAUSE_KIND_SILENT: _ClassVar[CauseKind]
    CAUSE_KIND_EXCEPTION: _ClassVar[CauseKind]
    CAUSE_KIND_PEER_ERROR: _ClassVar[CauseKind]
    CAUSE_KIND_PREEMPTED: _ClassVar[CauseKind]
    CAUSE_KIND_AGENT_LOST: _ClassVar[CauseKind]
    CAUSE_KIND_HUNG: _ClassVar[CauseKind]
    CAUSE_KIND_CONTROLLER_LOST: _ClassVar[CauseKind]
    CAUSE_KIND_REQUESTED: _ClassVar[CauseKind]
    CAUSE_KIND_DIVERGED: _ClassVar[CauseKind]
PHASE_COMPUTE: Phase
PHASE_READY: Phase
PHASE_UPDATING: Phase
PHASE_DONE: Phase
CAUSE_KIND_UNSPECIFIED: CauseKind
CAUSE_KIND_PERIODIC: CauseKind
CAUSE_KIND_EXITED: CauseKind
CAUSE_KIND_SILENT: CauseKind
CAUSE_KIND_EXCEPTION: CauseKind
CAUSE_KIND_PEER_ERROR: CauseKind
CAUSE_KIND_PREEMPTED: CauseKind
CAUSE_KIND_AGENT_LOST: CauseKind
CAUSE_KIND_HUNG: CauseKind
CAUSE_KIND_CONTROLLER_LOST: CauseKind
CAUSE_KIND_REQUESTED: CauseKind
CAUSE_KIND_DIVERGED: CauseKind

class UpwardEnvelope(_message.Message):
    __slots__ = ("job_id", "term", "messages", "chunk", "more")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    messages: _containers.RepeatedCompositeFieldContainer[Upward]
    chunk: bytes
    more: bool
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[Upward, _Mapping]]] = ..., chunk: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class Upward(_message.Message):
    __slots__ = ("registration", "heartbeat", "state_report", "fault_report", "finished", "agent_hello", "worker_exit", "rolled_forward", "written", "published", "step_failed", "progress", "vouch", "standby_report", "regrouped", "replace_failed")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STATE_REPORT_FIELD_NUMBER: _ClassVar[int]
    FAULT_REPORT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    AGENT_HELLO_FIELD_NUMBER: _ClassVar[int]
    WORKER_EXIT_FIELD_NUMBER: _ClassVar[int]
    ROLLED_FORWARD_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VOUCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_REPORT_FIELD_NUMBER: _ClassVar[int]
    REGROUPED_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FAILED_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    heartbeat: Heartbeat
    state_report: StateReport
    fault_report: FaultReport
    finished: Finished
    agent_hello: AgentHello
    worker_exit: WorkerExit
    rolled_forward: RolledForward
    written: Written
    published: Published
    step_failed: StepFailed
    progress: Progress
    vouch: Vouch
    standby_report: StandbyReport
    regrouped: Regrouped
    replace_failed: ReplaceFailed
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., state_report: _Optional[_Union[StateReport, _Mapping]] = ..., fault_report: _Optional[_Union[FaultReport, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., agent_hello: _Optional[_Union[AgentHello, _Mapping]] = ..., worker_exit: _Optional[_Union[WorkerExit, _Mapping]] = ..., rolled_forward: _Optional[_Union[RolledForward, _Mapping]] = ..., written: _Optional[_Union[Written, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., vouch: _Optional[_Union[Vouch, _Mapping]] = ..., standby_report: _Optional[_Union[StandbyReport, _Mapping]] = ..., regrouped: _Optional[_Union[Regrouped, _Mapping]] = ..., replace_failed: _Optional[_Union[ReplaceFailed, _Mapping]] = ...) -> None: ...

class DownwardEnvelope(_message.Message):
    __slots__ = ("job_id", "term", "ranks", "chunk", "more", "stream_opened", "welcome", "freeze", "thaw", "roll_forward", "write_order", "publish_order", "exit", "release", "batch", "keep_alive", "standby_list", "start_standby", "regroup", "replace", "take_places")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STREAM_OPENED_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    THAW_FIELD_NUMBER: _ClassVar[int]
    ROLL_FORWARD_FIELD_NUMBER: _ClassVar[int]
    WRITE_ORDER_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_ORDER_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_LIST_FIELD_NUMBER: _ClassVar[int]
    START_STANDBY_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TAKE_PLACES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    chunk: bytes
    more: bool
    stream_opened: StreamOpened
    welcome: Welcome
    freeze: Freeze
    thaw: Thaw
    roll_forward: RollForward
    write_order: WriteOrder
    publish_order: PublishOrder
    exit: Exit
    release: Release
    batch: DownwardBatch
    keep_alive: KeepAlive
    standby_list: StandbyList
    start_standby: StartStandby
    regroup: Regroup
    replace: Replace
    take_places: TakePlaces
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., chunk: _Optional[bytes] = ..., more: bool = ..., stream_opened: _Optional[_Union[StreamOpened, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., freeze: _Optional[_Union[Freeze, _Mapping]] = ..., thaw: _Optional[_Union[Thaw, _Mapping]] = ..., roll_forward: _Optional[_Union[RollForward, _Mapping]] = ..., write_order: _Optional[_Union[WriteOrder, _Mapping]] = ..., publish_order: _Optional[_Union[PublishOrder, _Mapping]] = ..., exit: _Optional[_Union[Exit, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., batch: _Optional[_Union[DownwardBatch, _Mapping]] = ..., keep_alive: _Optional[_Union[KeepAlive, _Mapping]] = ..., standby_list: _Optional[_Union[StandbyList, _Mapping]] = ..., start_standby: _Optional[_Union[StartStandby, _Mapping]] = ..., regroup: _Optional[_Union[Regroup, _Mapping]] = ..., replace: _Optional[_Union[Replace, _Mapping]] = ..., take_places: _Optional[_Union[TakePlaces, _Mapping]] = ...) -> None: ...

class StreamOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DownwardBatch(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[DownwardEnvelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[DownwardEnvelope, _Mapping]]] = ...) -> None: ...

class UpwardBundle(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[CarriedUpward]
    def __init__(self, parts: _Optional[_Iterable[_Union[CarriedUpward, _Mapping]]] = ...) -> None: ...

class CarriedUpward(_message.Message):
    __slots__ = ("streams", "begins", "envelope", "ended")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    begins: int
    envelope: bytes
    ended: bool
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., begins: _Optional[int] = ..., envelope: _Optional[bytes] = ..., ended: bool = ...) -> None: ...

class DownwardBundle(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[CarriedDownward]
    def __init__(self, parts: _Optional[_Iterable[_Union[CarriedDownward, _Mapping]]] = ...) -> None: ...

class CarriedDownward(_message.Message):
    __slots__ = ("streams", "envelope", "ended")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    envelope: bytes
    ended: StreamStatus
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., envelope: _Optional[bytes] = ..., ended: _Optional[_Union[StreamStatus, _Mapping]] = ...) -> None: ...

class StreamStatus(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("kind", "ranks", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: CauseKind
    ranks: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, kind: _Optional[_Union[CauseKind, str]] = ..., ranks: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class CommitRecord(_message.Message):
    __slots__ = ("step", "grad_norm", "clip_factor", "skipped", "loss_scale", "learning_rates", "sums")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    grad_norm: float
    clip_factor: float
    skipped: bool
    loss_scale: float
    learning_rates: _containers.RepeatedScalarFieldContainer[float]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., grad_norm: _Optional[float] = ..., clip_factor: _Optional[float] = ..., skipped: bool = ..., loss_scale: _Optional[float] = ..., learning_rates: _Optional[_Iterable[float]] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...

class ShardGroup(_message.Message):
    __slots__ = ("group_id", "label", "nbytes")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    label: str
    nbytes: int
    def __init__(self, group_id: _Optional[str] = ..., label: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("group_id", "index", "count")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    index: int
    count: int
    def __init__(self, group_id: _Optional[str] = ..., index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("name", "nbytes", "checksum", "rank", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    nbytes: int
    checksum: str
    rank: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., nbytes: _Optional[int] = ..., checksum: _Optional[str] = ..., rank: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ShareResult(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    def __init__(self, files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("rank", "world_size", "host", "pid", "groups", "state_step", "save_dirs", "layout", "standby", "controllers", "job_groups", "step_times_s", "finished", "steps", "copies", "regroups", "vacant", "repairs", "workload", "generation", "regrouped", "own_checkpoints")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STATE_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_DIRS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    JOB_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    REGROUPS_FIELD_NUMBER: _ClassVar[int]
    VACANT_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REGROUPED_FIELD_NUMBER: _ClassVar[int]
    OWN_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    host: str
    pid: int
    groups: _containers.RepeatedCompositeFieldContainer[ShardGroup]
    state_step: int
    save_dirs: _containers.RepeatedScalarFieldContainer[str]
    layout: str
    standby: str
    controllers: _containers.RepeatedScalarFieldContainer[str]
    job_groups: int
    step_times_s: _containers.RepeatedScalarFieldContainer[float]
    finished: bool
    steps: int
    copies: bool
    regroups: bool
    vacant: int
    repairs: bool
    workload: str
    generation: int
    regrouped: int
    own_checkpoints: bool
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[ShardGroup, _Mapping]]] = ..., state_step: _Optional[int] = ..., save_dirs: _Optional[_Iterable[str]] = ..., layout: _Optional[str] = ..., standby: _Optional[str] = ..., controllers: _Optional[_Iterable[str]] = ..., job_groups: _Optional[int] = ..., step_times_s: _Optional[_Iterable[float]] = ..., finished: bool = ..., steps: _Optional[int] = ..., copies: bool = ..., regroups: bool = ..., vacant: _Optional[int] = ..., repairs: bool = ..., workload: _Optional[str] = ..., generation: _Optional[int] = ..., regrouped: _Optional[int] = ..., own_checkpoints: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("rank", "phase", "step", "waiting", "paused", "steps", "step_times_s", "frozen", "owes", "finished", "own_s", "waited_s", "loss")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_S_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    OWES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    phase: Phase
    step: int
    waiting: bool
    paused: bool
    steps: int
    step_times_s: _containers.RepeatedScalarFieldContainer[float]
    frozen: int
    owes: bool
    finished: bool
    own_s: float
    waited_s: float
    loss: float
    def __init__(self, rank: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., waiting: bool = ..., paused: bool = ..., steps: _Optional[int] = ..., step_times_s: _Optional[_Iterable[float]] = ..., frozen: _Optional[int] = ..., owes: bool = ..., finished: bool = ..., own_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., loss: _Optional[float] = ...) -> None: ...

class StateReport(_message.Message):
    __slots__ = ("rank", "freeze_id", "closed", "phase", "step", "state_step", "torn", "backup_step", "records", "final", "checkpoint", "digests")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_STEP_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    BACKUP_STEP_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    closed: bool
    phase: Phase
    step: int
    state_step: int
    torn: bool
    backup_step: int
    records: _containers.RepeatedCompositeFieldContainer[CommitRecord]
    final: bool
    checkpoint: str
    digests: _containers.RepeatedCompositeFieldContainer[Digest]
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., closed: bool = ..., phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., state_step: _Optional[int] = ..., torn: bool = ..., backup_step: _Optional[int] = ..., records: _Optional[_Iterable[_Union[CommitRecord, _Mapping]]] = ..., final: bool = ..., checkpoint: _Optional[str] = ..., digests: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("group_id", "value", "holders")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    value: int
    holders: int
    def __init__(self, group_id: _Optional[str] = ..., value: _Optional[int] = ..., holders: _Optional[int] = ...) -> None: ...

class FaultReport(_message.Message):
    __slots__ = ("rank", "cause", "detail")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    cause: Cause
    detail: str
    def __init__(self, rank: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("host", "ranks", "pids", "places")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    host: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    places: int
    def __init__(self, host: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., pids: _Optional[_Iterable[int]] = ..., places: _Optional[int] = ...) -> None: ...

class WorkerExit(_message.Message):
    __slots__ = ("rank", "pid", "text", "seen_unix_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    text: str
    seen_unix_s: float
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., text: _Optional[str] = ..., seen_unix_s: _Optional[float] = ...) -> None: ...

class Vouch(_message.Message):
    __slots__ = ("ranks", "pids")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., pids: _Optional[_Iterable[int]] = ...) -> None: ...

class RolledForward(_message.Message):
    __slots__ = ("rank", "freeze_id", "state_step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    state_step: int
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., state_step: _Optional[int] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("rank", "freeze_id", "tmp_name", "parts", "result")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    TMP_NAME_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    tmp_name: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    result: ShareResult
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., tmp_name: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., result: _Optional[_Union[ShareResult, _Mapping]] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("rank", "freeze_id", "step", "path")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    step: int
    path: str
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("rank", "freeze_id")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ...) -> None: ...

class StandbyReport(_message.Message):
    __slots__ = ("rank", "address", "runs", "error")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    runs: bool
    error: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., runs: bool = ..., error: _Optional[str] = ...) -> None: ...

class Regrouped(_message.Message):
    __slots__ = ("rank", "freeze_id")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ...) -> None: ...

class ReplaceFailed(_message.Message):
    __slots__ = ("host", "rank", "freeze_id", "error")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    host: str
    rank: int
    freeze_id: int
    error: str
    def __init__(self, host: _Optional[str] = ..., rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("rank", "freeze_id", "stage", "tmp_name", "error", "torn")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TMP_NAME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    freeze_id: int
    stage: str
    tmp_name: str
    error: str
    torn: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., freeze_id: _Optional[int] = ..., stage: _Optional[str] = ..., tmp_name: _Optional[str] = ..., error: _Optional[str] = ..., torn: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("rank", "term", "heartbeat_s", "lease_s", "survives", "successors", "job_groups", "overview", "warnings")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    JOB_GROUPS_FIELD_NUMBER: _ClassVar[int]
    OVERVIEW_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    term: int
    heartbeat_s: float
    lease_s: float
    survives: str
    successors: _containers.RepeatedScalarFieldContainer[str]
    job_groups: int
    overview: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., term: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., survives: _Optional[str] = ..., successors: _Optional[_Iterable[str]] = ..., job_groups: _Optional[int] = ..., overview: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Freeze(_message.Message):
    __slots__ = ("freeze_id", "cause")
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    cause: Cause
    def __init__(self, freeze_id: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Thaw(_message.Message):
    __slots__ = ("freeze_id",)
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    def __init__(self, freeze_id: _Optional[int] = ...) -> None: ...

class RollForward(_message.Message):
    __slots__ = ("freeze_id", "record")
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    record: CommitRecord
    def __init__(self, freeze_id: _Optional[int] = ..., record: _Optional[_Union[CommitRecord, _Mapping]] = ...) -> None: ...

class WriteOrder(_message.Message):
    __slots__ = ("freeze_id", "step", "directory", "tmp_name", "parts")
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TMP_NAME_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    step: int
    directory: str
    tmp_name: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, freeze_id: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ..., tmp_name: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class PublishOrder(_message.Message):
    __slots__ = ("freeze_id", "step", "directory", "tmp_name", "results", "cause", "record", "term")
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TMP_NAME_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    step: int
    directory: str
    tmp_name: str
    results: _containers.RepeatedCompositeFieldContainer[ShareResult]
    cause: Cause
    record: CommitRecord
    term: int
    def __init__(self, freeze_id: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ..., tmp_name: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ShareResult, _Mapping]]] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., record: _Optional[_Union[CommitRecord, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class Exit(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandbyList(_message.Message):
    __slots__ = ("addresses", "lease_s")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class StartStandby(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Regroup(_message.Message):
    __slots__ = ("freeze_id", "step", "replaced", "record", "saved")
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    freeze_id: int
    step: int
    replaced: _containers.RepeatedScalarFieldContainer[int]
    record: CommitRecord
    saved: bool
    def __init__(self, freeze_id: _Optional[int] = ..., step: _Optional[int] = ..., replaced: _Optional[_Iterable[int]] = ..., record: _Optional[_Union[CommitRecord, _Mapping]] = ..., saved: bool = ...) -> None: ...

class Replace(_message.Message):
    __slots__ = ("rank", "pid", "freeze_id")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    freeze_id: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., freeze_id: _Optional[int] = ...) -> None: ...

class TakePlaces(_message.Message):
    __slots__ = ("ranks", "freeze_id")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ID_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    freeze_id: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., freeze_id: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "host", "pid", "attached", "phase", "step", "dead", "cause", "finished", "silent_s", "step_s", "suspect", "waiting", "paused", "own_s", "waited_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    attached: bool
    phase: Phase
    step: int
    dead: bool
    cause: Cause
    finished: bool
    silent_s: float
    step_s: float
    suspect: bool
    waiting: bool
    paused: bool
    own_s: float
    waited_s: float
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., attached: bool = ..., phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., dead: bool = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., finished: bool = ..., silent_s: _Optional[float] = ..., step_s: _Optional[float] = ..., suspect: bool = ..., waiting: bool = ..., paused: bool = ..., own_s: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class StragglerStatus(_message.Message):
    __slots__ = ("rank", "host", "ratio", "own_s", "others_s", "steps")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    ratio: float
    own_s: float
    others_s: float
    steps: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., ratio: _Optional[float] = ..., own_s: _Optional[float] = ..., others_s: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class PaceStatus(_message.Message):
    __slots__ = ("steps", "front", "step_s", "slow_s", "still_s", "limit_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SLOW_S_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    front: int
    step_s: float
    slow_s: float
    still_s: float
    limit_s: float
    def __init__(self, steps: _Optional[int] = ..., front: _Optional[int] = ..., step_s: _Optional[float] = ..., slow_s: _Optional[float] = ..., still_s: _Optional[float] = ..., limit_s: _Optional[float] = ...) -> None: ...

class CoverageStatus(_message.Message):
    __slots__ = ("groups", "least", "uncovered", "fatal_ranks", "fatal_rank_count", "fatal_nodes", "fatal_node_count", "copies")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    UNCOVERED_FIELD_NUMBER: _ClassVar[int]
    FATAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    FATAL_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    FATAL_NODES_FIELD_NUMBER: _ClassVar[int]
    FATAL_NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    groups: int
    least: int
    uncovered: int
    fatal_ranks: _containers.RepeatedScalarFieldContainer[int]
    fatal_rank_count: int
    fatal_nodes: _containers.RepeatedScalarFieldContainer[str]
    fatal_node_count: int
    copies: bool
    def __init__(self, groups: _Optional[int] = ..., least: _Optional[int] = ..., uncovered: _Optional[int] = ..., fatal_ranks: _Optional[_Iterable[int]] = ..., fatal_rank_count: _Optional[int] = ..., fatal_nodes: _Optional[_Iterable[str]] = ..., fatal_node_count: _Optional[int] = ..., copies: bool = ...) -> None: ...

class FaultStatus(_message.Message):
    __slots__ = ("age_s", "causes")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    causes: _containers.RepeatedCompositeFieldContainer[Cause]
    def __init__(self, age_s: _Optional[float] = ..., causes: _Optional[_Iterable[_Union[Cause, _Mapping]]] = ...) -> None: ...

class PublishedCheckpoint(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "term", "world_size", "stage", "survives", "ranks", "published", "pid", "role", "place", "address", "standbys", "save_dirs", "heartbeat_s", "lease_s", "pace", "coverage", "fault", "recoveries", "stragglers", "loss")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    SAVE_DIRS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    term: int
    world_size: int
    stage: str
    survives: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    published: PublishedCheckpoint
    pid: int
    role: str
    place: int
    address: str
    standbys: _containers.RepeatedScalarFieldContainer[str]
    save_dirs: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_s: float
    lease_s: float
    pace: PaceStatus
    coverage: CoverageStatus
    fault: FaultStatus
    recoveries: int
    stragglers: _containers.RepeatedCompositeFieldContainer[StragglerStatus]
    loss: float
    def __init__(self, job_id: _Optional[str] = ..., term: _Optional[int] = ..., world_size: _Optional[int] = ..., stage: _Optional[str] = ..., survives: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., published: _Optional[_Union[PublishedCheckpoint, _Mapping]] = ..., pid: _Optional[int] = ..., role: _Optional[str] = ..., place: _Optional[int] = ..., address: _Optional[str] = ..., standbys: _Optional[_Iterable[str]] = ..., save_dirs: _Optional[_Iterable[str]] = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., pace: _Optional[_Union[PaceStatus, _Mapping]] = ..., coverage: _Optional[_Union[CoverageStatus, _Mapping]] = ..., fault: _Optional[_Union[FaultStatus, _Mapping]] = ..., recoveries: _Optional[int] = ..., stragglers: _Optional[_Iterable[_Union[StragglerStatus, _Mapping]]] = ..., loss: _Optional[float] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("job_id", "reason", "term", "generation", "looks", "look")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    term: int
    generation: int
    looks: bool
    look: int
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ..., term: _Optional[int] = ..., generation: _Optional[int] = ..., looks: bool = ..., look: _Optional[int] = ...) -> None: ...

class ShutdownReply(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...
