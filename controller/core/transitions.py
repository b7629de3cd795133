"""What each message means in each stage: one table (PURE).

Owns `TRANSITIONS`, from (stage, kind of event) to the function that handles it. Handlers note facts; `settling` changes
stages. A pair that is not in the table is a protocol error; `late` is for messages that may cross a change of stage on
the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttp.proto.messages import (
    AgentHello,
    FaultReport,
    Finished,
    Heartbeat,
    Published,
    Registration,
    RolledForward,
    StandbyReport,
    StateReport,
    StepFailed,
    Vouch,
    WorkerExit,
    Working,
    Written,
)

from .dump.freeze import count_again, extend_update_deadline, take_report
from .dump.publishing import publish_failed, published
from .dump.roll_forward import note_progress, roll_failed, rolled
from .dump.writing import write_failed, written
from .facts.events import Beats, Effect, StreamClosed, Tick
from .facts.state import ControllerState, Stage
from .ranks.liveness import (
    agent_attached,
    early_fault,
    fault_report,
    finished,
    register,
    stream_closed,
    vouched,
    worker_exit,
)
from .ranks.repeats import repeat_lost
from .ranks.stall import beat, beats, report_disproves
from .ranks.standbys import standby_report
from .ranks.takeover import first_rank_came, note_exit, note_fault

Handler = Callable[[ControllerState, Any, float, list[Effect]], ControllerState]

_BEFORE = (Stage.STANDBY, Stage.GATHERING)
_START = (Stage.ASSEMBLING,)
_CALM = (Stage.RUNNING,)
_FREEZE = (Stage.FREEZING,)
_ORDERED = (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING)
_FAULT = (*_FREEZE, *_ORDERED)
_END = (Stage.EXITING,)
_OVER = (Stage.OVER,)


def heartbeat(state: ControllerState, message: Heartbeat, now: float, out: list[Effect]) -> ControllerState:
    """A rank reported where it is; what it has lost is sent again."""
    return beat(repeat_lost(state, (message,), now, out), message, now, out)


def heartbeats(state: ControllerState, event: Beats, now: float, out: list[Effect]) -> ControllerState:
    """Several ranks reported where they are; what they have lost is sent again."""
    return beats(repeat_lost(state, event.messages, now, out), event, now, out)


def state_report(state: ControllerState, message: StateReport, now: float, out: list[Effect]) -> ControllerState:
    """What a rank holds behind its closed gate."""
    if message.freeze_id != state.freeze_id:
        return state
    state = count_again(report_disproves(state, message, now, out), message.rank, now, out)
    return take_report(state, message, out)


def rolled_forward(state: ControllerState, message: RolledForward, now: float, out: list[Effect]) -> ControllerState:
    """A rank has finished the decided step's update."""
    if message.freeze_id != state.freeze_id:
        return state
    return rolled(state, message.rank, message.state_step, now, out)


def share_written(state: ControllerState, message: Written, now: float, out: list[Effect]) -> ControllerState:
    """A writer's parts are durable."""
    return written(state, message, now, out) if message.freeze_id == state.freeze_id else state


def checkpoint_published(state: ControllerState, message: Published, now: float, out: list[Effect]) -> ControllerState:
    """The checkpoint is visible: the ranks leave."""
    return published(state, message, now, out) if message.freeze_id == state.freeze_id else state


def step_failed(state: ControllerState, message: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """An order could not be carried out; one that was taken back since, or of another stage, is no news."""
    if message.freeze_id != state.freeze_id:
        return state
    match state.stage, message.stage:
        case Stage.ROLLING, "roll_forward":
            return roll_failed(state, message.rank, message.error, now, out)
        case Stage.WRITING, "write":
            return write_failed(state, message.rank, message.tmp_name, message.error, now, out)
        case Stage.PUBLISHING, "publish":
            return publish_failed(state, message, now, out)
    return state


def working(state: ControllerState, message: Working, now: float, out: list[Effect]) -> ControllerState:
    """An order gets on: the wait for answers begins anew."""
    return note_progress(state, message.rank, now) if message.freeze_id == state.freeze_id else state


def update_gets_on(state: ControllerState, message: Working, now: float, out: list[Effect]) -> ControllerState:
    """An update that its freeze waits for gets on."""
    return extend_update_deadline(state, message.rank, now) if message.freeze_id == state.freeze_id else state


def noted(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """Nothing to do but what every event does: its rank was heard, and deadlines are looked at."""
    return state


def late(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """It crossed a change of stage on the wire."""
    return state


_ROWS: tuple[tuple[tuple[Stage, ...], type, Handler], ...] = (
    ((Stage.STANDBY,), Registration, first_rank_came),
    ((Stage.GATHERING,), Registration, register),
    (_BEFORE, StreamClosed, stream_closed),
    (_BEFORE, AgentHello, agent_attached),
    (_BEFORE, WorkerExit, note_exit),
    (_BEFORE, Vouch, vouched),
    (_BEFORE, Tick, noted),
    ((Stage.GATHERING,), Heartbeat, noted),
    ((Stage.GATHERING,), Beats, noted),
    ((Stage.GATHERING,), FaultReport, note_fault),
    ((Stage.GATHERING,), Finished, finished),
    # Answers to what an earlier controller had ordered.
    *(((Stage.GATHERING,), kind, late) for kind in (StateReport, RolledForward, Written, Published, StepFailed, Working)),
    ((Stage.GATHERING, *_START, *_CALM, *_FAULT, *_END), StandbyReport, standby_report),
    ((*_START, *_CALM, *_FAULT, *_END), Registration, register),
    ((*_START, *_CALM, *_FAULT, *_END), StreamClosed, stream_closed),
    ((*_START, *_CALM, *_FAULT, *_END), AgentHello, agent_attached),
    ((*_START, *_CALM, *_FAULT, *_END), WorkerExit, worker_exit),
    ((*_START, *_CALM, *_FAULT, *_END), Vouch, vouched),
    ((*_START, *_CALM, *_FAULT, *_END), Tick, noted),
    ((*_CALM, *_FAULT, *_END), Heartbeat, heartbeat),
    ((*_CALM, *_FAULT, *_END), Beats, heartbeats),
    (_START, FaultReport, early_fault),
    ((*_CALM, *_FAULT), FaultReport, fault_report),
    ((*_START, *_CALM, *_FAULT, *_END), Finished, finished),
    (_FAULT, StateReport, state_report),
    (_ORDERED, RolledForward, rolled_forward),
    ((Stage.WRITING,), Written, share_written),
    ((Stage.WRITING, Stage.PUBLISHING), Published, checkpoint_published),
    (_ORDERED, StepFailed, step_failed),
    (_ORDERED, Working, working),
    (_FREEZE, Working, update_gets_on),
    # Answers to an order, or to a freeze, that is over.
    ((*_CALM, *_END), StateReport, late),
    ((*_FREEZE, *_END), RolledForward, late),
    ((*_FREEZE, Stage.ROLLING, Stage.PUBLISHING, *_END), Written, late),
    ((*_FREEZE, Stage.ROLLING, *_END), Published, late),
    ((*_FREEZE, *_END), StepFailed, late),
    ((*_START, *_CALM, *_END), Working, late),
    (_END, FaultReport, late),
    *(
        (_OVER, kind, late)
        for kind in (
            Registration, StreamClosed, AgentHello, WorkerExit, Vouch, Tick, Heartbeat, Beats, FaultReport, Finished,
            StateReport, RolledForward, Written, Published, StepFailed, Working, StandbyReport,
        )
    ),
)  # fmt: skip

TRANSITIONS: dict[tuple[Stage, type], Handler] = {
    (stage, kind): handler for stages, kind, handler in _ROWS for stage in stages
}
