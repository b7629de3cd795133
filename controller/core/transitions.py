"""What each stage does: one table a stage (PURE).

Owns `TABLES`. Its handlers note facts; `stages` changes stages. An event that a stage's table lacks is a protocol error; `late` is for
messages that may cross a change of stage on the wire.
"""

from __future__ import annotations

from functools import partial
from math import inf

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

from . import stages
from .dump import publishing, reassign, roll_forward, writing
from .dump.finish import over
from .dump.freeze import count_again, extend_update_deadline, take_report
from .dump.publishing import publish_failed, published
from .dump.roll_forward import note_progress, roll_failed, rolled
from .dump.writing import write_failed, written
from .facts.events import Beats, Effect, StreamClosed, Tick
from .facts.stage_table import TABLES, Handler, StageTable
from .facts.state import (
    Assembling,
    ControllerState,
    Exiting,
    Faulted,
    Freezing,
    Gathering,
    Ordered,
    Over,
    Publishing,
    Rolling,
    Running,
    Standby,
    StateAt,
    Writing,
)  # fmt: skip
from .ranks import liveness, repeats, takeover
from .ranks.repeats import repeat_lost
from .ranks.stall import beat, beats, report_disproves
from .ranks.standbys import standby_report

__all__ = ["TABLES"]


def heartbeat(state: ControllerState, message: Heartbeat, now: float, out: list[Effect]) -> ControllerState:
    """A rank reported where it is; what it has lost is sent again."""
    return beat(repeat_lost(state, (message,), now, out), message, now, out)


def heartbeats(state: ControllerState, event: Beats, now: float, out: list[Effect]) -> ControllerState:
    """Several ranks reported where they are; what they have lost is sent again."""
    return beats(repeat_lost(state, event.messages, now, out), event, now, out)


def state_report(state: StateAt[Faulted], message: StateReport, now: float, out: list[Effect]) -> ControllerState:
    """What a rank holds behind its closed gate."""
    if message.freeze_id != state.freeze_id:
        return state
    state = count_again(report_disproves(state, message, now, out), message.rank, now, out)
    return take_report(state, message, out)


def rolled_forward(state: StateAt[Rolling], message: RolledForward, now: float, out: list[Effect]) -> ControllerState:
    """A rank has finished the decided step's update."""
    if message.freeze_id != state.freeze_id:
        return state
    return rolled(state, message.rank, message.state_step, now, out)


def share_written(state: StateAt[Writing], message: Written, now: float, out: list[Effect]) -> ControllerState:
    """A writer's parts are durable."""
    return written(state, message, now, out) if message.freeze_id == state.freeze_id else state


def checkpoint_published(
    state: StateAt[Writing | Publishing], message: Published, now: float, out: list[Effect]
) -> ControllerState:
    """The checkpoint is visible: the ranks leave."""
    return published(state, message, now, out) if message.freeze_id == state.freeze_id else state


def roll_not_done(state: StateAt[Rolling], message: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """A roll-forward failed; an order that was taken back since, or of another stage, is no news."""
    if (message.freeze_id, message.stage) != (state.freeze_id, "roll_forward"):
        return state
    return roll_failed(state, message.rank, message.error, now, out)


def write_not_done(state: StateAt[Writing], message: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """A write order failed; one that was taken back since, or of another stage, is no news."""
    if (message.freeze_id, message.stage) != (state.freeze_id, "write"):
        return state
    return write_failed(state, message.rank, message.tmp_name, message.error, now, out)


def publish_not_done(state: StateAt[Publishing], message: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """The publish order failed; one that was taken back since, or of another stage, is no news."""
    if (message.freeze_id, message.stage) != (state.freeze_id, "publish"):
        return state
    return publish_failed(state, message, now, out)


def working(state: StateAt[Ordered], message: Working, now: float, out: list[Effect]) -> ControllerState:
    """An order gets on: the wait for answers begins anew."""
    return note_progress(state, message.rank, now) if message.freeze_id == state.freeze_id else state


def update_gets_on(state: StateAt[Freezing], message: Working, now: float, out: list[Effect]) -> ControllerState:
    """An update that its freeze waits for gets on."""
    return extend_update_deadline(state, message.rank, now) if message.freeze_id == state.freeze_id else state


def noted(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """Nothing to do but what every event does: its rank was heard, and deadlines are looked at."""
    return state


def late(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """It crossed a change of stage on the wire."""
    return state


_Handlers = dict[type, Handler]
_ANSWERS_LATE: _Handlers = dict.fromkeys((StateReport, RolledForward, Written, Published, StepFailed, Working), late)
"""They answer a freeze, or an order, that is over."""

_ALWAYS: _Handlers = {
    StreamClosed: liveness.stream_closed, AgentHello: liveness.agent_attached, Vouch: liveness.vouched, Tick: noted,
}  # fmt: skip
_COMING: _Handlers = {
    **_ALWAYS, Registration: liveness.register, Finished: liveness.finished, StandbyReport: standby_report,
}  # fmt: skip
_STARTED: _Handlers = {**_COMING, WorkerExit: liveness.worker_exit}
_LED: _Handlers = {**_STARTED, Heartbeat: heartbeat, Beats: heartbeats, FaultReport: liveness.fault_report}
_FAULT: _Handlers = {**_LED, **_ANSWERS_LATE, StateReport: state_report}
_ORDERS: _Handlers = {**_FAULT, Working: working}

_fault = partial(StageTable, expire=stages.expire_faulted, catch_up=liveness.missed_orders)
_orders = partial(_fault, deadline=stages.ordered_deadline, repeat=repeats.lost_orders)

TABLES.update({
    Standby: StageTable(
        on={**_ALWAYS, WorkerExit: takeover.note_exit, Registration: takeover.first_rank_came},
        deadline=stages.orphan_deadline,
        advance=takeover.stand_by,
    ),
    Gathering: StageTable(
        on={
            **_COMING, **_ANSWERS_LATE, WorkerExit: takeover.note_exit, Heartbeat: noted, Beats: noted, FaultReport: takeover.note_fault,
        },
        deadline=stages.gathering_deadline,
        advance=takeover.gather_ranks,
        catch_up=lambda state, rank: (liveness.welcome(state, rank),),
    ),
    Assembling: StageTable(
        on={**_STARTED, FaultReport: liveness.early_fault, Working: late},
        deadline=stages.assembling_deadline,
        expire=stages.expire_assembling,
        advance=stages.assemble,
    ),
    Running: StageTable(
        on={**_LED, StateReport: late, Working: late},
        deadline=stages.running_deadline,
        expire=stages.expire_running,
        advance=stages.run,
        catch_up=liveness.missed_thaw,
        repeat=repeats.lost_thaw,
    ),
    Freezing: _fault(
        on={**_FAULT, Working: update_gets_on},
        deadline=stages.freezing_deadline,
        advance=stages.freeze,
        repeat=repeats.lost_freeze,
    ),
    Rolling: _orders(
        on={**_ORDERS, RolledForward: rolled_forward, StepFailed: roll_not_done},
        advance=stages.roll,
        rank_lost=roll_forward.on_rank_lost_rolling,
        on_timeout=roll_forward.on_timeout_rolling,
        slow=reassign.slow_roll_forwards,
    ),
    Writing: _orders(
        on={**_ORDERS, Written: share_written, Published: checkpoint_published, StepFailed: write_not_done},
        advance=stages.write,
        rank_lost=writing.on_rank_lost_writing,
        on_timeout=writing.on_timeout_writing,
        slow=reassign.slow_writers,
    ),
    Publishing: _orders(
        on={**_ORDERS, Published: checkpoint_published, StepFailed: publish_not_done},
        rank_lost=publishing.on_rank_lost_publishing,
        on_timeout=publishing.on_timeout_publishing,
        slow=reassign.slow_publishers,
    ),
    Exiting: StageTable(
        on={**_LED, **_ANSWERS_LATE, FaultReport: late},
        deadline=lambda state: state.at.deadline,
        expire=lambda state, now, out: over(state, state.at.reason, out),
        advance=stages.leave_last,
        catch_up=liveness.missed_exit,
        repeat=liveness.missed_exit,
    ),
    Over: StageTable(on=dict.fromkeys((*_LED, *_ANSWERS_LATE), late), deadline=lambda state: inf),
})  # fmt: skip
