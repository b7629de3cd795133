"""Messages of an earlier start, an earlier process or an earlier freeze, that come when nobody waits for them any more."""

from __future__ import annotations

import random

from tests.simulation.job import Job
from ttp.controller import events as ev
from ttp.controller.state import Stage
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Downward,
    Freeze,
    Part,
    Published,
    PublishOrder,
    RolledForward,
    RollForward,
    ShareResult,
    StateReport,
    StepFailed,
    Thaw,
    Upward,
    WorkerExit,
    WriteOrder,
    Written,
)

_NAME = "iter_0000001_tmp_0_0_1"


def stale_message(job: Job, rng: random.Random, rank: int) -> bool:
    """Say one of them to the active controller or to this rank; False when that is gone."""
    controller, process = job.controller, job.ranks[rank]
    if rng.random() < 0.5:
        if controller.gone or not _known(job, rank):
            return False
        message = rng.choice(_upward(job, rank))
        job.note(f"a stale {type(message).__name__} of rank {rank} comes to c{controller.place}")
        controller.take(ev.Received(message))
        return True
    stream = process.stream
    if not process.alive or stream is None or stream is not process.attached:
        return False
    order = rng.choice(_downward(job, rank))
    job.note(f"a stale {type(order).__name__} comes to rank {rank}")
    process.take_in(stream, order)
    return True


def _known(job: Job, rank: int) -> bool:
    """True when the active controller knows the rank's process: only then it can tell an earlier one from it."""
    return job.controller.state.members.table[rank].registration is not None


def _upward(job: Job, rank: int) -> list[Upward]:
    """Return what the controller's adapters let through: they know jobs, terms and streams, but not freezes."""
    state, process = job.controller.state, job.ranks[rank]
    exits: list[Upward] = [WorkerExit(rank, process.pid - 50, "signal SIGKILL", 0.0)]
    if state.stage in (Stage.STANDBY, Stage.ASSEMBLING, Stage.RUNNING) or not state.freeze_id:
        return exits
    old, record = state.freeze_id - 1, job.training.record(1)
    parts = (Part("g0", 0, 1),)
    answers: list[Upward] = [
        StateReport(rank, old, True, process.phase, 1, 0, False, -1, (record,)),
        RolledForward(rank, old, 1),
        StepFailed(rank, old, "write", _NAME, "no space left on device"),
        StepFailed(rank, old, "publish", _NAME, "no space left on device"),
    ]
    if state.stage in (Stage.GATHERING, Stage.FREEZING, Stage.WRITING, Stage.PUBLISHING, Stage.EXITING):
        answers += [Written(rank, old, _NAME, parts, ShareResult(())), Published(rank, old, 1, "/a/iter_0000001")]
    return [*exits, *answers]


def _downward(job: Job, rank: int) -> list[Downward]:
    old, record = job.ranks[rank].state.freeze_id - 1, job.training.record(1)
    cause = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
    return [
        Freeze(old, cause),
        Thaw(old),
        RollForward(old, record),
        WriteOrder(old, 1, "/a", _NAME, (Part("g0", 0, 1),)),
        PublishOrder(old, 1, "/a", _NAME, (), cause, None, 0),
    ]
