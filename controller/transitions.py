"""What each message means in each stage: one table (PURE).

Owns `TRANSITIONS`, from (stage, kind of event) to the function that handles it, and `settle`, which draws the
consequences once an event is noted. Handlers note facts; `settle` changes stages. A pair that is not in the table is a
protocol error; `late` is for messages that may cross a change of stage on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from ttp.errors import ProtocolError
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Published,
    Registration,
    RolledForward,
    RollForward,
    StateReport,
    StepFailed,
    Thaw,
    Welcome,
    WorkerExit,
    Written,
)

from .coverage import coverage_of, survives, warnings
from .decision import Refusal
from .events import Effect, Fields, Journal, Send, StreamClosed, Tick
from .leaving import finish_job, leave, over, refuse
from .membership import Member, attach, bury, detach, forgive, reachable, update
from .publishing import next_publisher, publish_failed, published, start_publishing
from .rolling import all_rolled, lost_while_rolling, roll_failed, rolled, start_dump
from .rounds import add_cause, begin_fault, forget, has_culprit, root_cause, take_report, thaw
from .state import ControllerState, Stage
from .writing import replace_writers, start_writing, write_failed, written

Handler = Callable[[ControllerState, Any, float, list[Effect]], ControllerState]

_START = (Stage.ASSEMBLING,)
_CALM = (Stage.RUNNING,)
_FREEZE = (Stage.FREEZING,)
_ORDERED = (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING)
_FAULT = (*_FREEZE, *_ORDERED)
_END = (Stage.EXITING,)
_OVER = (Stage.OVER,)

EXITING_TEXT = "exiting"
"""WorkerExit's text while the kernel still frees the process and nobody knows its status."""
CLEAN_EXIT_TEXT = "exit code 0"


# --- who is there ---


def register(state: ControllerState, message: Registration, now: float, out: list[Effect]) -> ControllerState:
    """A rank attaches, for the first time or again."""
    _check_registration(state, message)
    rank, member = message.rank, state.members.table[message.rank]
    known = member.registration
    if known is not None and known.pid != message.pid:
        cause = Cause(CauseKind.EXITED, (rank,), f"process {known.pid} was replaced by {message.pid}")
        state = die(state, rank, cause, True, now, out)
        member = state.members.table[rank]
    if known is None:
        fields: Fields = {"rank": rank, "host": message.host, "pid": message.pid, "groups": len(message.groups)}
        out.append(Journal("registered", {**fields, "state_step": message.state_step}))
    if member.suspect and member.dead is None:
        out.append(Journal("cleared", {"rank": rank, "why": "it attached again"}))
    state = replace(state, members=attach(state.members, message, now, state.settings))
    return _catch_up(state, rank, out)


def _catch_up(state: ControllerState, rank: int, out: list[Effect]) -> ControllerState:
    """Tell a rank that attached again all that it may have missed; commands may come twice."""
    if state.stage is Stage.EXITING:
        out.append(Send((rank,), Exit(75, state.reason)))
        return replace(state, untold=state.untold - {rank})
    if state.stage is Stage.ASSEMBLING:
        return state
    out.append(Send((rank,), _welcome(state, rank)))
    if state.stage is Stage.RUNNING:
        if state.freeze_id:  # a Thaw may have been lost with the old stream
            out.append(Send((rank,), Thaw(state.freeze_id)))
        return state
    fault, dump = state.fault, state.dump
    assert fault is not None
    cause = root_cause(fault.causes) or Cause(CauseKind.SILENT, (), "a rank is silent")
    out.append(Send((rank,), Freeze(state.freeze_id, cause)))
    if dump is None or state.members.table[rank].dead is not None:
        return state
    if dump.rolling[rank] and dump.decision.record is not None:
        out.append(Send((rank,), RollForward(state.freeze_id, dump.decision.record)))
    out.extend(Send((rank,), order) for order in dump.work[rank].orders)
    if state.stage is Stage.PUBLISHING and rank == dump.publisher and dump.order is not None:
        out.append(Send((rank,), dump.order))
    return state


def _welcome(state: ControllerState, rank: int) -> Welcome:
    settings = state.settings
    return Welcome(rank, settings.term, settings.heartbeat_s, settings.lease_s, state.survives)


def _check_registration(state: ControllerState, message: Registration) -> None:
    world_size = state.settings.world_size
    if message.world_size != world_size:
        raise ProtocolError(
            f"rank {message.rank} on {message.host} registers a world of {message.world_size} ranks, job "
            f"{state.settings.job_id} has {world_size}; is a process of an earlier start still running?"
        )


def stream_closed(state: ControllerState, event: StreamClosed, now: float, out: list[Effect]) -> ControllerState:
    """Streams broke: their ranks are suspect, and all gates close at once."""
    if event.host and not event.ranks:
        out.append(Journal("agent_detached", {"host": event.host}))
        return replace(state, agents=state.agents - {event.host})
    welcomed = state.stage is not Stage.ASSEMBLING
    for rank in event.ranks:
        member = state.members.table[rank]
        if not member.attached:
            continue
        state = replace(state, members=detach(state.members, rank, now, state.settings, welcomed))
        if member.dead is None and state.stage is not Stage.EXITING:
            state = suspicion(state, rank, "its stream broke", now, out)
    return state


def suspicion(state: ControllerState, rank: int, why: str, now: float, out: list[Effect]) -> ControllerState:
    """A rank may be dead: close all gates until that is known."""
    out.append(Journal("suspect", {"rank": rank, "why": why}))
    if state.stage is Stage.RUNNING:
        return begin_fault(state, (), Cause(CauseKind.SILENT, (rank,), why), now, out)
    return state


def agent_attached(state: ControllerState, message: AgentHello, now: float, out: list[Effect]) -> ControllerState:
    out.append(Journal("agent_attached", {"host": message.host, "ranks": message.ranks}))
    return replace(state, agents=state.agents | {message.host})


# --- deaths and faults ---


def worker_exit(state: ControllerState, message: WorkerExit, now: float, out: list[Effect]) -> ControllerState:
    """An agent saw a process end, or begin to end: there is nothing to wait for."""
    member = state.members.table[message.rank]
    if member.registration is not None and member.registration.pid != message.pid:
        return state  # an earlier process of that rank
    if member.finished and message.text == CLEAN_EXIT_TEXT:
        return _left_in_peace(state, message.rank, member, now, out)
    cause = Cause(CauseKind.EXITED, (message.rank,), message.text)
    if member.dead is not None:
        return _name_death(state, message.rank, member, cause, now, out)
    return die(state, message.rank, cause, True, now, out)


def die(state: ControllerState, rank: int, cause: Cause, gone: bool, now: float, out: list[Effect]) -> ControllerState:
    """A rank is dead for the rest of this controller's life. `gone`: its process is known to have ended."""
    member = state.members.table[rank]
    if member.dead is not None:
        return state
    host, pid = (member.registration.host, member.registration.pid) if member.registration else ("", 0)
    fields: Fields = {"rank": rank, "kind": cause.kind.value, "text": cause.text, "host": host, "pid": pid}
    out.append(Journal("death_seen", fields))
    state = forget(replace(state, members=bury(state.members, rank, cause, gone, now)), rank, member)
    state = replace(state, untold=state.untold - {rank})
    if state.stage is Stage.ASSEMBLING:
        return leave(state, f"rank {rank} died before the job had assembled: {cause.text}", now, out)
    if state.stage is Stage.RUNNING:
        return begin_fault(state, (cause,), cause, now, out)
    if state.fault is not None:
        state = add_cause(state, cause, now)
    if state.stage is Stage.ROLLING:
        return lost_while_rolling(state, rank, now, out)
    if state.stage is Stage.WRITING:
        return replace_writers(state, (rank,), now, out)
    if state.stage is Stage.PUBLISHING and state.dump is not None and state.dump.publisher == rank:
        return next_publisher(state, now, out)
    return state


def _name_death(
    state: ControllerState, rank: int, member: Member, cause: Cause, now: float, out: list[Effect]
) -> ControllerState:
    """More became known of a death that was seen already: the status after `exiting`, or that a silent rank is gone."""
    assert member.dead is not None
    gone = replace(member, attached=False)
    if member.dead.text == EXITING_TEXT and cause.text != EXITING_TEXT:
        out.append(Journal("death_named", {"rank": rank, "text": cause.text}))
        gone = replace(gone, dead=cause)
        if state.fault is not None:
            causes = tuple(cause if known is member.dead else known for known in state.fault.causes)
            state = replace(state, fault=replace(state.fault, causes=causes))
    members = update(state.members, rank, gone)
    emptied = members.attached == 0 and member.attached
    return replace(state, members=replace(members, empty_since=now) if emptied else members)


def _left_in_peace(state: ControllerState, rank: int, member: Member, now: float, out: list[Effect]) -> ControllerState:
    """A rank whose `train` has returned left with status 0 without being dismissed: no fault, but no holder either."""
    if member.dead is not None:
        return state
    out.append(Journal("left", {"rank": rank}))
    cause = Cause(CauseKind.EXITED, (rank,), "exit code 0 after its training had finished")
    state = forget(replace(state, members=bury(state.members, rank, cause, True, now)), rank, member)
    if state.stage is Stage.ROLLING:
        return lost_while_rolling(state, rank, now, out)
    if state.stage is Stage.WRITING:
        return replace_writers(state, (rank,), now, out)
    if state.stage is Stage.PUBLISHING and state.dump is not None and state.dump.publisher == rank:
        return next_publisher(state, now, out)
    return replace(state, untold=state.untold - {rank})


def early_fault(state: ControllerState, message: FaultReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank failed before the job had assembled: nothing is committed, all start again."""
    out.append(_fault_line(message))
    return leave(state, f"rank {message.rank} failed before the job had assembled: {message.cause.text}", now, out)


def fault_report(state: ControllerState, message: FaultReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank tells its own fault. It lives and stays a holder, but the job must save and restart."""
    if state.fault is not None and message.cause in state.fault.causes:
        return state  # said again after a reconnect
    out.append(_fault_line(message))
    if state.stage is Stage.RUNNING:
        return begin_fault(state, (message.cause,), message.cause, now, out)
    return add_cause(state, message.cause, now)


def _fault_line(message: FaultReport) -> Journal:
    fields: Fields = {"rank": message.rank, "kind": message.cause.kind.value, "text": message.cause.text}
    return Journal("fault_reported", {**fields, "detail": message.detail})


def finished(state: ControllerState, message: Finished, now: float, out: list[Effect]) -> ControllerState:
    member = state.members.table[message.rank]
    if member.finished:
        return state
    out.append(Journal("rank_finished", {"rank": message.rank}))
    return replace(state, members=update(state.members, message.rank, replace(member, finished=True)))


# --- answers ---


def state_report(state: ControllerState, message: StateReport, now: float, out: list[Effect]) -> ControllerState:
    if message.freeze_id != state.freeze_id:
        return state
    return take_report(state, message, out)


def rolled_forward(state: ControllerState, message: RolledForward, now: float, out: list[Effect]) -> ControllerState:
    if message.freeze_id != state.freeze_id:
        return state
    return rolled(state, message.rank, message.state_step, now, out)


def share_written(state: ControllerState, message: Written, now: float, out: list[Effect]) -> ControllerState:
    return written(state, message, now, out) if message.freeze_id == state.freeze_id else state


def checkpoint_published(state: ControllerState, message: Published, now: float, out: list[Effect]) -> ControllerState:
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
            return publish_failed(state, message.rank, message.tmp_name, message.error, now, out)
    return state


def noted(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """Nothing to do but what every event does: its rank was heard, and deadlines are looked at."""
    return state


def late(state: ControllerState, event: object, now: float, out: list[Effect]) -> ControllerState:
    """It crossed a change of stage on the wire."""
    return state


_ROWS: tuple[tuple[tuple[Stage, ...], type, Handler], ...] = (
    ((*_START, *_CALM, *_FAULT, *_END), Registration, register),
    ((*_START, *_CALM, *_FAULT, *_END), StreamClosed, stream_closed),
    ((*_START, *_CALM, *_FAULT, *_END), AgentHello, agent_attached),
    ((*_START, *_CALM, *_FAULT, *_END), WorkerExit, worker_exit),
    ((*_START, *_CALM, *_FAULT, *_END), Tick, noted),
    ((*_CALM, *_FAULT, *_END), Heartbeat, noted),
    (_START, FaultReport, early_fault),
    ((*_CALM, *_FAULT), FaultReport, fault_report),
    ((*_START, *_CALM, *_FAULT, *_END), Finished, finished),
    (_FAULT, StateReport, state_report),
    (_ORDERED, RolledForward, rolled_forward),
    ((Stage.WRITING,), Written, share_written),
    ((Stage.WRITING, Stage.PUBLISHING), Published, checkpoint_published),
    (_ORDERED, StepFailed, step_failed),
    # Answers to an order, or to a freeze, that is over.
    ((*_CALM, *_END), StateReport, late),
    ((*_FREEZE, *_END), RolledForward, late),
    ((*_FREEZE, Stage.ROLLING, Stage.PUBLISHING, *_END), Written, late),
    ((*_FREEZE, Stage.ROLLING, *_END), Published, late),
    ((*_FREEZE, *_END), StepFailed, late),
    (_END, FaultReport, late),
    *(
        (_OVER, kind, late)
        for kind in (
            Registration, StreamClosed, AgentHello, WorkerExit, Tick, Heartbeat, FaultReport, Finished, StateReport,
            RolledForward, Written, Published, StepFailed,
        )
    ),
)  # fmt: skip

TRANSITIONS: dict[tuple[Stage, type], Handler] = {
    (stage, kind): handler for stages, kind, handler in _ROWS for stage in stages
}


# --- consequences ---


def settle(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Change stages as far as the facts allow."""
    while True:
        if state.members.alive == 0 and state.stage not in (Stage.EXITING, Stage.OVER):
            state = _nobody_left(state, now, out)
        advance = _ADVANCE.get(state.stage)
        if advance is None:
            return state
        stage = state.stage
        state = advance(state, now, out)
        if state.stage is stage:
            return state


def _nobody_left(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """All are dead; those that were only silent are told to exit in case they wake up."""
    return refuse(state, Refusal("all ranks are dead"), now, out)


def _assemble(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Once every rank is registered and attached, the job's coverage is known and training may begin."""
    members, world_size = state.members, state.settings.world_size
    if members.registered < world_size or members.attached < world_size:
        return state
    coverage = coverage_of(member.registration for member in members.table if member.registration is not None)
    state = replace(
        state,
        stage=Stage.RUNNING,
        deadline=inf,
        coverage=coverage,
        survives=survives(coverage),
        members=forgive(members, now, state.settings),  # heartbeats begin now
    )
    for rank in range(world_size):
        out.append(Send((rank,), _welcome(state, rank)))
    fields: Fields = {"world_size": world_size, "groups": len(coverage.groups), "survives": state.survives}
    out.append(Journal("assembled", {**fields, "warnings": warnings(coverage)}))
    return state


def _run(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    return finish_job(state, out) if state.members.finished == state.settings.world_size else state


def _freeze(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Open the gates again, wait for more reports, or decide."""
    fault, members = state.fault, state.members
    assert fault is not None
    if not fault.causes:
        if members.finished == state.settings.world_size:
            return finish_job(state, out)
        return state if members.suspects else thaw(state, out)
    if not has_culprit(fault.causes) and now < fault.hint_until:
        return state
    if (fault.awaiting or members.suspects) and now < fault.round_deadline:
        return state
    return start_dump(state, now, out)


def _roll(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    if state.dump is None or state.dump.pending:
        return state
    state = all_rolled(state, now, out)
    return start_writing(state, now, out) if state.stage is Stage.WRITING else state


def _write(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    return start_publishing(state, now, out) if state.dump is not None and not state.dump.pending else state


def _exit(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Leave when every rank that could be told has let go of its stream."""
    return over(state, state.reason, out) if not state.members.attached and not state.untold else state


_ADVANCE: dict[Stage, Callable[[ControllerState, float, list[Effect]], ControllerState]] = {
    Stage.ASSEMBLING: _assemble,
    Stage.RUNNING: _run,
    Stage.FREEZING: _freeze,
    Stage.ROLLING: _roll,
    Stage.WRITING: _write,
    Stage.EXITING: _exit,
}


def abandon_start(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """The world did not assemble in time: release those that came."""
    missing = state.members.table.ranks(lambda member: member.registration is None)
    came = state.members.registered
    reason = f"only {came} of {state.settings.world_size} ranks registered in time; missing: {missing[:8]}"
    return leave(state, reason, now, out)


def give_up(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """The fault took longer than it may."""
    reason = f"the fault was not over after {state.settings.total_timeout_s:g} s, in stage {state.stage.value}"
    return refuse(state, Refusal(reason), now, out)


def attached_ranks(state: ControllerState) -> tuple[int, ...]:
    """Return the ranks with an open stream; for status displays."""
    return reachable(state.members)
