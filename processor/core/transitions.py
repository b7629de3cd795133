"""What each event and message means to a processor: one table (PURE).

Owns `TRANSITIONS`, from (standing, kind of event or message) to the function that handles it. A pair that is not in the
table is a protocol error; `late` is for what may cross a change of standing on the wire or in the driver's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    EXIT_CODE_PREEMPTED,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Progress,
    PublishOrder,
    Regroup,
    Release,
    RollForward,
    StandbyList,
    StartStandby,
    Thaw,
    Welcome,
    WriteOrder,
)

from .events import (
    BoundaryReached,
    Connect,
    Connected,
    ControllerEnded,
    ControllersFound,
    ControllerStarted,
    Disconnected,
    Effect,
    ExitProcess,
    GateClosed,
    LeaveBoundary,
    LocalFault,
    Log,
    Noticed,
    PublishDone,
    RegroupDone,
    ReleaseTraining,
    ReportUnled,
    RollForwardDone,
    SavedAlone,
    SavesAlone,
    Send,
    Tick,
    TrainReturned,
    WorkFailed,
    WriteDone,
)
from .failover import (
    controller_ended,
    controller_started,
    controllers,
    found,
    go_on,
    go_on_at,
    learn,
    look,
    lost,
    lost_all,
    silent,
    start_standby,
    take_list,
)
from .freezes import freeze, gate_closed, thaw
from .orders import (
    generation,
    outlived,
    owes_answer,
    publish,
    publish_done,
    regroup,
    regroup_done,
    roll_forward,
    roll_forward_done,
    work_failed,
    write,
    write_done,
)
from .refusals import why_no_exit
from .state import LinkState, ProcessorState, RankMode
from .step_times import REPORTED_STEPS

Handler = Callable[[ProcessorState, Any, float, list[Effect]], ProcessorState]

_OPEN = (RankMode.TRAINING,)
_SHUT = (RankMode.FROZEN,)
_LIVE = (*_OPEN, *_SHUT)
_GONE = (RankMode.LEAVING,)
_TRAINING, _FROZEN, _LEAVING = RankMode  # found faster than attributes of an enumeration
_DOWN, _UP = LinkState.DOWN, LinkState.UP


# --- the stream ---


def connected(state: ProcessorState, event: Connected, now: float, out: list[Effect]) -> ProcessorState:
    """Register, and say again what an earlier stream may have lost."""
    if state.link is LinkState.UP:
        raise ProtocolError(f"rank {state.settings.rank}: connected twice; the driver must say Disconnected first")
    if state.alone:  # it never registers: who saves with the other ranks alone is led by no controller
        return state
    if state.unled:
        out.append(ReportUnled(False))
    registration = replace(
        event.registration,
        job_groups=state.job_groups,
        step_times_s=state.step_times_s,
        finished=state.finished,
        steps=state.steps,
        vacant=state.settings.vacant if state.vacant else 0,
        generation=generation(state),
        regrouped=state.regrouped,
        controllers=controllers(state) if state.successors else event.registration.controllers,
    )
    if state.successors:
        out.append(Log(f"attached to the controller at {controllers(state)[state.place]}"))
    out.append(Send(registration))
    out.extend(Send(fault) for fault in state.faults)
    out.extend(Send(report) for report in state.standbys)
    return replace(
        state,
        link=LinkState.UP,
        lost_since=inf,
        loss_logged=False,
        unled=False,
        received_s=now,
        refusals=0,
        steps_reported=state.steps,
        save_dirs=registration.save_dirs,
        group_ids=frozenset(group.group_id for group in registration.groups),
    )


def disconnected(state: ProcessorState, event: Disconnected, now: float, out: list[Effect]) -> ProcessorState:
    """Try again after a pause, or elsewhere. Training continues, and the gate stays as it is."""
    if state.link is LinkState.UP:
        out.append(Log(f"lost the controller: {event.reason}"))
    return lost(state, now, event.refused)


def welcome(state: ProcessorState, message: Welcome, now: float, out: list[Effect]) -> ProcessorState:
    """The job has assembled, or a controller knows this rank: heartbeats begin."""
    before = state.term
    state = replace(
        take_list(state, message.successors),
        heartbeat_at=now,
        heartbeat_s=message.heartbeat_s,
        lease_s=message.lease_s,
        job_groups=message.job_groups or state.job_groups,
        term=message.term,
    )
    if before not in (-1, message.term):  # the first one is introduced by the session, on rank 0 alone
        out.append(Log(_introduction(state, message)))
    return state


def _introduction(state: ProcessorState, message: Welcome) -> str:
    survives = f"; the job survives {message.survives}" if message.survives else ""
    left = len(state.successors) - state.place
    behind = f"{left} standby controllers" if left != 1 else "1 standby controller"
    if not left and state.settings.look_s < inf:
        behind = "no standby controller until one has been started in its place"
    elif not left:
        behind = "no standby controller: should this one fail too, training continues without protection"
    return f"controller of term {message.term}{survives}; behind it {behind}"


def keep_alive(state: ProcessorState, message: KeepAlive, now: float, out: list[Effect]) -> ProcessorState:
    """Nothing but a sign of life: every message is one."""
    return state


def tick(state: ProcessorState, event: Tick, now: float, out: list[Effect]) -> ProcessorState:
    """Do what is due: reconnect, beat, or give up."""
    rank = state.settings.rank
    if event.steps > state.steps:
        state = replace(state, steps=event.steps, step_times_s=event.step_times_s)
    if state.link is not _DOWN and now >= go_on_at(state):
        if state.link is _UP:
            out.append(Log(f"nothing received from the controller for {state.lease_s:g} s"))
        state = silent(state, now) if state.link is _UP else go_on(replace(state, refusals=0), now)
    if state.link is _DOWN and now >= state.reconnect_at and not state.alone:
        out.append(Connect(controllers(state)[state.place]))
        state = replace(state, link=LinkState.CONNECTING)
    state = without_controller(look(state, now, out), now, out)
    if now >= state.heartbeat_at:
        frozen, owes = state.freeze_id if state.standing is _FROZEN else 0, owes_answer(state)
        place = (event.phase, event.step, event.waiting, event.paused)
        behind = (frozen, owes, state.finished)
        out.append(Send(Heartbeat(rank, *place, *behind, state.steps, _new_times(state))))
        if state.answer_by < inf:  # no freeze has come: perhaps what was said was lost
            out.extend(Send(fault) for fault in state.faults)
        if event.work_done > state.work_done and owes:
            out.append(Send(Progress(rank, state.freeze_id)))
        beat_at = _next_beat(state, now)
        state = replace(state, heartbeat_at=beat_at, work_done=event.work_done, steps_reported=state.steps)
    if now >= state.notice_by:
        waited = f"the step in flight did not end within {state.settings.boundary_s:g} s"
        state = _tell_notice(state, waited, now, out)
    return give_up(state, now, out) if now >= give_up_at(state) else state


def _next_beat(state: ProcessorState, now: float) -> float:
    """Return when the next heartbeat is due: a heartbeat's time from now, or sooner, at the next multiple of it."""
    every_s = state.heartbeat_s
    if not state.settings.beats_together:
        return now + every_s
    beat = (now // every_s + 1) * every_s
    return beat if beat > now else beat + every_s


def without_controller(state: ProcessorState, now: float, out: list[Effect]) -> ProcessorState:
    """Note that every controller is lost; a training thread that waits behind a step for one goes on, to where all ranks know of it."""
    if not state.settings.saves_alone or state.alone:
        return state
    if not state.unled and lost_all(state, now):
        out.append(ReportUnled(True))
        state = replace(state, unled=True)
    if state.unled and state.parked and state.standing is _TRAINING:
        out += [Log("every controller is lost: training continues, to be saved without one"), LeaveBoundary()]
        state = replace(state, parked=False)
    return state


def _new_times(state: ProcessorState) -> tuple[float, ...]:
    """Return the times of the steps finished since the last heartbeat, the newest few."""
    new = min(state.steps - state.steps_reported, REPORTED_STEPS, len(state.step_times_s))
    return state.step_times_s[len(state.step_times_s) - new :]


def give_up_at(state: ProcessorState) -> float:
    """Return when the missing controller has consequences; inf: never."""
    standing = state.standing
    if standing is _LEAVING:
        return inf
    if state.alone:
        return state.answer_by
    if _will_be_saved_alone(state):
        return state.lost_since + state.settings.alone_s
    if state.loss_logged and standing is _TRAINING and not (state.faults or state.finished or state.parked):
        return inf
    lost = state.lost_since + state.settings.controller_lost_s
    return lost if lost < state.answer_by else state.answer_by


def _will_be_saved_alone(state: ProcessorState) -> bool:
    """Say whether a rank with a preemption notice, which has lost every controller, trains on to the step that all ranks save."""
    if not state.unled or not state.faults:
        return False
    trains = state.standing is _TRAINING and not (state.parked or state.finished)
    return trains and all(fault.cause.kind is CauseKind.PREEMPTED for fault in state.faults)


def give_up(state: ProcessorState, now: float, out: list[Effect]) -> ProcessorState:
    """No controller for too long. Only a rank that cannot go on by itself leaves."""
    if state.alone or _will_be_saved_alone(state):
        text = (
            "the save without a controller"
            if state.alone
            else f"after {state.notice}, the step that is saved without a controller"
        )
        return _exit(state, 1, f"{text} did not end within {state.settings.alone_s:g} s", out)
    waited = f"no controller answered for {state.settings.controller_lost_s:g} s"
    if state.faults:
        return _exit(state, 1, f"{waited} after: {state.faults[0].cause.text}", out)
    if state.standing is not RankMode.TRAINING:
        return _exit(state, 75, f"{waited} while this rank was frozen", out)
    if state.parked:
        return _exit(state, 75, f"{waited} after another rank's notice to leave", out)
    if state.term < 0:
        out += [Log(f"{waited} before the job had assembled"), ReleaseTraining()]
        return replace(state, standing=RankMode.LEAVING)
    if state.finished:
        out += [Log(f"{waited}; training has finished, leaving without its word"), ReleaseTraining()]
        return replace(state, standing=RankMode.LEAVING)
    out.append(Log(f"{waited}: training continues without protection"))
    return replace(state, loss_logged=True)


# --- this rank's own news ---


def local_fault(state: ProcessorState, event: LocalFault, now: float, out: list[Effect]) -> ProcessorState:
    """Report this rank's fault to the controller, and give it its time to react."""
    report = FaultReport(state.settings.rank, event.cause, event.detail)
    if state.link is LinkState.UP:
        out.append(Send(report))
    if state.standing is RankMode.TRAINING and state.answer_by == inf:
        state = replace(state, answer_by=now + state.settings.controller_lost_s)
    if state.link is not LinkState.UP:  # a controller that is long gone gets its time from the fault on
        state = replace(state, lost_since=now)
    return replace(state, faults=(*state.faults, report))


def noticed(state: ProcessorState, event: Noticed, now: float, out: list[Effect]) -> ProcessorState:
    """This rank has a preemption notice. The step in flight is finished first, if it can be soon.

    Every rank learns of it in that step's spanning collective, so that all stop behind the same step.
    """
    if state.alone:  # it exits behind the save, without a report to a controller
        return replace(state, notice=event.text)
    again = bool(state.notice)
    if again and state.notice_by == inf:
        return state
    state = replace(state, notice=event.text, notice_by=now + state.settings.boundary_s)
    if again:
        return _tell_notice(state, "sent twice", now, out)
    if state.standing is not RankMode.TRAINING or state.finished:
        return _tell_notice(state, "no step is in flight here", now, out)
    out.append(Log(f"{event.text}: this rank leaves at the end of the step, or in {state.settings.boundary_s:g} s"))
    return state


def boundary_reached(state: ProcessorState, event: BoundaryReached, now: float, out: list[Effect]) -> ProcessorState:
    """The training thread stands behind a finished step. A rank without a preemption notice only waits there."""
    lost_since = (
        state.lost_since if state.link is LinkState.UP else now
    )  # a controller that is long gone gets its time from here on
    state = replace(state, parked=True, lost_since=lost_since)
    return _tell_notice(state, f"step {event.step} is finished", now, out) if state.notice_by < inf else state


def saves_alone(state: ProcessorState, event: SavesAlone, now: float, out: list[Effect]) -> ProcessorState:
    """All training threads are in the save: this rank turns to no controller any more, and does nothing for one that leads it since."""
    out.append(Log(f"no controller leads any rank: all ranks save step {event.step} together"))
    by = now + state.settings.alone_s
    return replace(state, alone=True, answer_by=by, notice_by=inf, looks_at=inf, heartbeat_at=inf)


def saved_alone(state: ProcessorState, event: SavedAlone, now: float, out: list[Effect]) -> ProcessorState:
    """Exit as on a controller's order, if the step is on disk: every rank has learned that in the same collective."""
    if event.path:
        reason = f"step {event.step} was saved without a controller: {event.path}"
        return _exit(state, EXIT_CODE_PREEMPTED if state.notice else EXIT_CODE_PERSISTED, reason, out)
    return _exit(state, 1, f"step {event.step} could not be saved without a controller: {event.error}", out)


def _tell_notice(state: ProcessorState, when: str, now: float, out: list[Effect]) -> ProcessorState:
    cause = Cause(CauseKind.PREEMPTED, (state.settings.rank,), f"{state.notice}; {when}")
    return local_fault(replace(state, notice_by=inf), LocalFault(cause, ""), now, out)


def train_returned(state: ProcessorState, event: TrainReturned, now: float, out: list[Effect]) -> ProcessorState:
    """Tell the controller that training is over here; this rank stays as a holder."""
    if state.finished:
        raise ProtocolError(f"rank {state.settings.rank}: training returned twice")
    if state.link is LinkState.UP:
        out.append(Send(Finished(state.settings.rank)))
    return replace(state, finished=True)


# --- the end ---


def leave(state: ProcessorState, message: Exit, now: float, out: list[Effect]) -> ProcessorState:
    """The controller has no more use for this rank. One with a preemption notice shows that by its exit status."""
    if why := why_no_exit(message):
        raise ProtocolError(f"rank {state.settings.rank}, {state.standing.value}: {why}. This rank continues")
    preempted = bool(state.notice) and message.code == EXIT_CODE_PERSISTED
    return _exit(state, EXIT_CODE_PREEMPTED if preempted else message.code, message.reason, out)


def _exit(state: ProcessorState, code: int, reason: str, out: list[Effect]) -> ProcessorState:
    out.append(ExitProcess(code, reason))
    return replace(state, standing=RankMode.LEAVING, heartbeat_at=inf)


def released(state: ProcessorState, message: Release, now: float, out: list[Effect]) -> ProcessorState:
    """Every rank has finished: let the training thread go."""
    if not state.finished:
        out.append(Log("released although training has not returned here; ignored"))
        return state
    out.append(ReleaseTraining())
    return replace(state, standing=RankMode.LEAVING, heartbeat_at=inf)


def late(state: ProcessorState, event: object, now: float, out: list[Effect]) -> ProcessorState:
    """It crossed a change of standing."""
    return state


_ROWS: tuple[tuple[tuple[RankMode, ...], type, Handler], ...] = (
    (_LIVE, Tick, tick),
    (_LIVE, Connected, connected),
    (_LIVE, Disconnected, disconnected),
    (_LIVE, Welcome, welcome),
    (_LIVE, LocalFault, local_fault),
    (_LIVE, Noticed, noticed),
    (_LIVE, BoundaryReached, boundary_reached),
    (_LIVE, SavesAlone, saves_alone),
    (_LIVE, SavedAlone, saved_alone),
    (_LIVE, TrainReturned, train_returned),
    (_LIVE, Freeze, freeze),
    (_SHUT, GateClosed, gate_closed),
    (_SHUT, Thaw, thaw),
    (_SHUT, RollForward, roll_forward),
    (_SHUT, RollForwardDone, roll_forward_done),
    (_SHUT, Regroup, regroup),
    (_SHUT, RegroupDone, regroup_done),
    (_SHUT, WriteOrder, write),
    (_SHUT, WriteDone, write_done),
    (_SHUT, PublishOrder, publish),
    (_SHUT, PublishDone, publish_done),
    (_SHUT, WorkFailed, work_failed),
    (_LIVE, KeepAlive, keep_alive),
    (_LIVE, StandbyList, learn),
    (_LIVE, StartStandby, start_standby),
    (_LIVE, ControllerStarted, controller_started),
    (_LIVE, ControllerEnded, controller_ended),
    (_LIVE, ControllersFound, found),
    (_LIVE, Exit, leave),
    (_LIVE, Release, released),
    # Crossed a thaw.
    (_OPEN, GateClosed, late),
    (_OPEN, Thaw, late),
    (_OPEN, RollForward, late),
    (_OPEN, Regroup, late),
    (_OPEN, WriteOrder, late),
    (_OPEN, PublishOrder, late),
    # What a lost controller had ordered is done, and the new one has opened the gate meanwhile.
    (_OPEN, WriteDone, outlived),
    (_OPEN, PublishDone, outlived),
    (_OPEN, WorkFailed, outlived),
    *(
        (_GONE, kind, late)
        for kind in (
            Tick, Connected, Disconnected, Welcome, LocalFault, Noticed, BoundaryReached, TrainReturned, Freeze, GateClosed,
            Thaw, RollForward, RollForwardDone, Regroup, RegroupDone, WriteOrder, WriteDone, PublishOrder, PublishDone, WorkFailed, Exit, Release,
            KeepAlive, StandbyList, StartStandby, SavesAlone, SavedAlone, ControllerStarted, ControllerEnded, ControllersFound,
        )
    ),
)  # fmt: skip

TRANSITIONS: dict[tuple[RankMode, type], Handler] = {
    (standing, kind): handler for standings, kind, handler in _ROWS for standing in standings
}
