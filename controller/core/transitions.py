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
    Progress,
    Published,
    Registration,
    Regrouped,
    ReplaceFailed,
    RolledForward,
    StandbyReport,
    StateReport,
    StepFailed,
    Vouch,
    WorkerExit,
    Written,
)

from . import stages
from .dump import publishing, reassign, regroup, roll_forward, writing
from .dump.finish import over
from .dump.freeze import count_again, extend_update_deadline, take_report
from .facts.events import EarlierLives, Effect, HeartbeatBatch, StreamClosed, Tick
from .facts.stage_table import TABLES, Handler, StageTable
from .facts.state import (
    Assembling,
    ControllerState,
    Exiting,
    Faulted,
    Freezing,
    Gathering,
    Over,
    Publishing,
    Regrouping,
    Rolling,
    Running,
    Standby,
    StateAt,
    Writing,
)  # fmt: skip
from .ranks import liveness, repeats, takeover
from .ranks.repeats import repeat_lost
from .ranks.stall import report_disproves, take_places
from .ranks.standbys import standby_report

__all__ = ["TABLES"]


def heartbeat(state: ControllerState, message: Heartbeat, now: float, out: list[Effect]) -> ControllerState:
    """A rank reported where it is; what it has lost is sent again."""
    return take_places(repeat_lost(state, (message,), now, out), (message,), now, out)


def heartbeats(state: ControllerState, event: HeartbeatBatch, now: float, out: list[Effect]) -> ControllerState:
    """Several ranks reported where they are; what they have lost is sent again."""
    return take_places(repeat_lost(state, event.messages, now, out), event.messages, now, out)


def state_report(state: StateAt[Faulted], message: StateReport, now: float, out: list[Effect]) -> ControllerState:
    """What a rank holds behind its closed gate."""
    state = count_again(report_disproves(state, message, now, out), message.rank, now, out)
    return take_report(state, message, out)


def noted(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """Do only what every event does: note its rank's message and check deadlines."""
    return state


def late(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """It crossed a change of stage on the wire."""
    return state


_Handlers = dict[type, Handler]
_ANSWERS_LATE: _Handlers = dict.fromkeys(
    (StateReport, RolledForward, Regrouped, Written, Published, StepFailed, Progress), late
)
"""They answer a freeze, or an order, that is over."""

_ALWAYS: _Handlers = {
    StreamClosed: liveness.stream_closed, AgentHello: liveness.agent_attached, Vouch: liveness.vouched, ReplaceFailed: late, Tick: noted,
}  # fmt: skip
_COMING: _Handlers = {
    **_ALWAYS, Registration: liveness.register, Finished: liveness.finished, StandbyReport: standby_report,
}  # fmt: skip
_STARTED: _Handlers = {**_COMING, WorkerExit: liveness.worker_exit}
_LED: _Handlers = {
    **_STARTED, Heartbeat: heartbeat, HeartbeatBatch: heartbeats, FaultReport: liveness.fault_report, EarlierLives: takeover.end_earlier,
}  # fmt: skip
_FAULT: _Handlers = {**_LED, **_ANSWERS_LATE, StateReport: state_report}
_ORDERS: _Handlers = {**_FAULT, Progress: roll_forward.note_progress}

_faulted_table = partial(StageTable, expire=stages.expire_faulted, catch_up=liveness.missed_orders)
_ordered_table = partial(_faulted_table, deadline=stages.ordered_deadline, repeat=repeats.lost_orders)

TABLES.update({
    Standby: StageTable(
        on={
            **_ALWAYS, WorkerExit: takeover.note_exit, Registration: takeover.first_rank_came,
            **dict.fromkeys((Heartbeat, HeartbeatBatch, FaultReport, Finished, StandbyReport, EarlierLives, *_ANSWERS_LATE), late),  # of ranks that exit
        },
        deadline=stages.orphan_deadline,
        advance=takeover.stand_by,
    ),
    Gathering: StageTable(
        on={
            **_COMING, **_ANSWERS_LATE, Registration: takeover.another_rank_came, WorkerExit: takeover.note_exit, FaultReport: takeover.note_fault,
            Heartbeat: noted, HeartbeatBatch: noted, EarlierLives: takeover.earlier_lives,
        },
        deadline=stages.gathering_deadline,
        advance=takeover.gather_ranks,
        catch_up=takeover.welcome_again,
    ),
    Assembling: StageTable(
        on={**_STARTED, FaultReport: liveness.early_fault, Progress: late},
        deadline=stages.assembling_deadline,
        expire=stages.expire_assembling,
        advance=stages.assemble_job,
    ),
    Running: StageTable(
        on={**_LED, StateReport: late, Progress: late, Regrouped: late},
        deadline=stages.running_deadline,
        expire=stages.expire_running,
        advance=stages.finish_or_restore,
        catch_up=liveness.missed_thaw,
        repeat=repeats.lost_thaw,
    ),
    Freezing: _faulted_table(
        on={**_FAULT, Progress: extend_update_deadline},
        deadline=stages.freezing_deadline,
        advance=stages.end_round,
        repeat=repeats.lost_freeze,
    ),
    Rolling: _ordered_table(
        on={**_ORDERS, RolledForward: roll_forward.rolled, StepFailed: roll_forward.roll_failed},
        advance=stages.end_roll_forwards,
        rank_lost=roll_forward.on_rank_lost_rolling,
        on_timeout=roll_forward.on_timeout_rolling,
        slow=reassign.slow_roll_forwards,
    ),
    Regrouping: _ordered_table(
        on={
            **_ORDERS, Regrouped: regroup.regrouped, StepFailed: regroup.regroup_failed, ReplaceFailed: regroup.replace_failed,
            FaultReport: liveness.fault_while_regrouping,
        },
        advance=regroup.end_regrouping,
        rank_lost=regroup.on_rank_lost_regrouping,
        on_timeout=regroup.on_timeout_regrouping,
    ),
    Writing: _ordered_table(
        on={**_ORDERS, Written: writing.written, Published: publishing.published, StepFailed: writing.write_failed},
        advance=stages.end_writing,
        rank_lost=writing.on_rank_lost_writing,
        on_timeout=writing.on_timeout_writing,
        slow=reassign.slow_writers,
    ),
    Publishing: _ordered_table(
        on={**_ORDERS, Published: publishing.published, StepFailed: publishing.publish_failed},
        rank_lost=publishing.on_rank_lost_publishing,
        on_timeout=publishing.on_timeout_publishing,
        slow=reassign.slow_publishers,
    ),
    Exiting: StageTable(
        on={**_LED, **_ANSWERS_LATE, FaultReport: late, EarlierLives: late},
        deadline=lambda state: state.at.deadline,
        expire=lambda state, now, out: over(state, state.at.reason, out),
        advance=stages.exit_after_ranks,
        catch_up=liveness.missed_exit,
        repeat=liveness.missed_exit,
    ),
    Over: StageTable(on=dict.fromkeys((*_LED, *_ANSWERS_LATE), late), deadline=lambda state: inf),
})  # fmt: skip
