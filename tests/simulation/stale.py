"""Messages of an earlier attempt, an earlier process or an earlier freeze, that come when they are not waited for any more.

Some are made up; the others were really said in this job, under a freeze that is over, and come once more.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from tests.simulation.job import Job
from ttp.controller.core.facts.state import Stage
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

KEPT = 12
"""So many of the newest numbered messages of each rank, and as many to each, may come again."""
_NAME = "iter_0000001_tmp_0_0_1"


class Past:
    """What was said to and by the ranks of a job under the numbers of its freezes; the newest of it."""

    def __init__(self, job: Job) -> None:
        ranks = range(len(job.ranks))
        self.up: list[deque[Any]] = [deque(maxlen=KEPT) for _ in ranks]
        self.down: list[deque[Any]] = [deque(maxlen=KEPT) for _ in ranks]

    def said_by(self, rank: int, before: int) -> list[Any]:
        """Return the messages of this rank under an earlier freeze than `before`."""
        return [message for message in self.up[rank] if message.freeze_id < before]

    def said_to(self, rank: int, before: int) -> list[Any]:
        return [message for message in self.down[rank] if message.freeze_id < before]


def remember(job: Job) -> Past:
    """Keep what is said in a job from now on; doing it twice is harmless."""
    if job.past is not None:
        return job.past
    job.past = past = Past(job)
    send_up = job.send_up

    def send(process: Any, message: Any) -> None:
        if hasattr(message, "freeze_id"):
            past.up[process.rank].append(message)
        send_up(process, message)

    def listen(process: Any) -> None:
        take_in = process.take_in

        def take(stream: Any, message: Any) -> None:
            if hasattr(message, "freeze_id"):
                past.down[process.rank].append(message)
            take_in(stream, message)

        process.take_in = take

    job.send_up = send  # type: ignore[method-assign]
    for process in job.ranks:
        listen(process)
    return past


def stale_message(job: Job, rng: random.Random, rank: int) -> bool:
    """Say one of them to the active controller or to this rank; False when that is gone."""
    controller, process = job.controller, job.ranks[rank]
    if rng.random() < 0.5:
        if controller.gone or not _known(job, rank):
            return False

        def say() -> None:
            """One that stands still is in another stage by then."""
            if job.controller is controller and _known(job, rank):
                message = rng.choice(said_again(job, rank) or _upward(job, rank))
                job.note(f"a stale {type(message).__name__} of rank {rank} comes to c{controller.place}")
                controller.receive_again(rank, message)

        controller.when_running(say)
        return True
    stream = process.stream
    if not process.alive or stream is None or stream is not process.attached:
        return False
    past = job.past.said_to(rank, process.state.freeze_id) if job.past is not None else []
    order = rng.choice(past or _downward(job, rank))
    job.note(f"a stale {type(order).__name__} comes to rank {rank}")
    process.take_in(stream, order)
    return True


def said_again(job: Job, rank: int) -> list[Upward]:
    """Return the messages of this rank under an earlier freeze, as far as the active controller is asked for such a thing: streams are
    in order, so that an answer comes late only where its stream does."""
    state = job.controller.state
    if job.past is None or state.stage in _UNASKED:
        return []
    return job.past.said_by(rank, state.freeze_id)


_UNASKED = (Stage.STANDBY, Stage.ASSEMBLING, Stage.RUNNING, Stage.OVER)


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
