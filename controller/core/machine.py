"""The controller's protocol core: (state, event, now) -> (state, effects) (PURE).

Owns the entry points and the clock's side: leases, deadlines, and what their running out means. Never sends, sleeps or
reads a clock: the driver does, and promises to call `transition` with a Tick at `next_deadline`.
"""

from __future__ import annotations

from math import inf

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.limits import check_upward
from ttp.proto.messages import AgentHello, Cause, CauseKind, Upward, Vouch, WorkerExit

from .dump.finish import orphaned, over
from .dump.freeze import half_of_the_rest, has_culprit
from .dump.publishing import on_timeout_publishing
from .dump.reassign import pass_over
from .dump.roll_forward import on_timeout_rolling
from .dump.writing import on_timeout_writing
from .facts.answers import check_answer
from .facts.events import Beats, ControllerSettings, Effect, Event, Journal, Received, Send
from .facts.membership import (
    SUSPECT_AFTER,
    clock_went_back,
    controller_resumed,
    empty,
    hear,
    hear_unsuspected,
    renew_all_leases,
    silent,
    silent_since,
    slow_heartbeat_s,
    sweep_leases,
)
from .facts.pace import has_started, limit, unknown
from .facts.state import ControllerState, Fault, Stage
from .ranks.liveness import rank_died, suspicion, welcome
from .ranks.stall import check_stall, resume_pace
from .stages import abandon_start, advance_stages, give_up
from .transitions import TRANSITIONS

FREEZES_OF_A_TERM = 1 << 20
"""More than a controller ever needs: the numbers of freezes then grow from one controller to the next."""

LATE_HEARTBEATS = 0.5
"""The machine asks to be called once a heartbeat; a driver that comes this much later was stopped. Of heartbeats as rare as
`slow_heartbeat_s`: a busy host that keeps the driver for less takes nothing from a lease that matters, and leases must run out."""

_LAST_VOUCH_HEARTBEATS = 1.5
"""An agent that goes with its node may have vouched for a rank so long after the rank was heard last."""

_OF_LAUNCHERS = (AgentHello, WorkerExit, Vouch)
"""What launchers say proves no rank's life."""

_ORDERED = (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING)
_UNLED = (Stage.STANDBY, Stage.GATHERING)
_GATHERING, _ASSEMBLING = Stage.GATHERING, Stage.ASSEMBLING
_RUNNING, _FREEZING, _EXITING, _OVER = Stage.RUNNING, Stage.FREEZING, Stage.EXITING, Stage.OVER
_LED = (Stage.RUNNING, Stage.FREEZING, *_ORDERED)


def initial(settings: ControllerSettings, now: float) -> ControllerState:
    """Return the state of a controller that nobody has registered with."""
    members = empty(settings.world_size)
    pace = unknown(settings.world_size)
    pace = replace(pace, limit_s=limit(pace, settings))
    if settings.standby:
        freeze_id = settings.standby * FREEZES_OF_A_TERM
        return ControllerState(settings, Stage.STANDBY, members, pace, inf, freeze_id=freeze_id)
    return ControllerState(settings, Stage.ASSEMBLING, members, pace, now + settings.register_timeout_s)


def transition(state: ControllerState, event: Event, now: float) -> tuple[ControllerState, tuple[Effect, ...]]:
    """Take one event. Raises ProtocolError, with nothing changed, for one that the state does not allow."""
    subject = event.message if isinstance(event, Received) else event
    handler = TRANSITIONS.get((state.stage, type(subject)))
    if handler is None:
        raise ProtocolError(
            f"job {state.settings.job_id}, stage {state.stage.value}: {type(subject).__name__} is not allowed here: "
            f"{subject!r}; does its sender run another version?"
        )
    out: list[Effect] = []
    was_deaf = _hears_nobody(state)
    if now < state.seen:
        state = replace(state, members=clock_went_back(state.members, now, state.settings))
    state = _excuse_own_absence(state, now)
    if isinstance(event, Received):
        _check_rank(state, event.message)
        check_answer(state, event.message)
        state = _hear(state, event.message, now, out)
    elif isinstance(event, Beats):
        for message in event.messages:
            _check_rank(state, message)
        state = _hear_beats(state, event, now, out)
    else:
        state = replace(state, seen=now)
    state = handler(state, subject, now, out)
    if state.stage is _GATHERING and _is_of_a_rank(event):
        state = _heard_while_gathering(state, now)
    if was_deaf and _is_of_a_rank(event) and not _hears_nobody(state):
        # It was this controller that was cut off: the others come back as well.
        state = _grant_time(state, now)
    deadline = next_deadline(state)
    if deadline is not None and now >= deadline:
        state = _expire(state, now, out)
    return advance_stages(state, now, out), tuple(out)


def next_deadline(state: ControllerState) -> float | None:
    """Return when the driver must call again with a Tick if nothing happens before; None: never. O(1)."""
    stage, members, settings = state.stage, state.members, state.settings
    if stage is _OVER:
        return None
    if stage is _EXITING:
        return state.deadline
    moment = members.empty_since + settings.orphan_timeout_s
    if stage in _UNLED:  # leases begin with the takeover
        moment = min(moment, state.deadline) if members.present else moment
        return None if moment == inf else moment
    moment = members.sweep_at if members.sweep_at < moment else moment
    if stage is _ASSEMBLING:
        moment = min(moment, state.deadline)
    else:  # also while nobody is attached: who looks seldom does not see that it stood still itself
        look_at = state.seen + settings.heartbeat_s
        moment = look_at if look_at < moment else moment
    if stage is _RUNNING:
        due = state.pace.due
        moment = due if due < moment else moment
    if state.fault is not None:
        moment = min(moment, state.fault.began + settings.total_timeout_s)
        if silent(members):
            return moment
        if stage is _FREEZING:
            moment = min(moment, _round_end(state, state.fault))
    if state.dump is not None and stage in _ORDERED:
        moment = min(moment, state.dump.progress_by, state.dump.patience_until)
    return None if moment == inf else moment


def _round_end(state: ControllerState, fault: Fault) -> float:
    """When a freeze round is decided if nothing more is heard; inf while there is nothing to decide about."""
    if not fault.causes:
        waits = fault.unproven is not None or (fault.takeover and fault.awaiting)
        return fault.round_deadline if waits and not state.members.suspects else inf
    return max(
        -inf if has_culprit(fault.causes) else fault.hint_until,
        fault.round_deadline if fault.awaiting or state.members.suspects else -inf,
        fault.update_by if fault.updating else -inf,
    )


def _excuse_own_absence(state: ControllerState, now: float) -> ControllerState:
    """A driver that comes much too late was stopped itself: what it did not hear meanwhile is nobody's fault."""
    late_s = LATE_HEARTBEATS * slow_heartbeat_s(state.settings)
    if now - state.seen <= late_s:
        return state
    deadline = next_deadline(state)
    if deadline is None or now - deadline <= late_s:
        return state
    if state.stage is _EXITING:
        return state
    return _grant_time(replace(state, members=controller_resumed(state.members, now, state.settings)), now)


def _grant_time(state: ControllerState, now: float) -> ControllerState:
    """Nobody could be heard for a while: what ranks owe an answer to, they have as much time for as if it were asked now."""
    settings = state.settings
    state = resume_pace(replace(state, members=renew_all_leases(state.members, now, settings)), now)
    if state.stage is Stage.GATHERING:
        state = replace(state, deadline=now + settings.lease_s, heard_at=now)
    if state.members.empty_since < inf:  # nobody is attached, and somebody was
        state = replace(state, members=replace(state.members, empty_since=now))
    if state.fault is not None:
        fault = replace(state.fault, round_deadline=max(state.fault.round_deadline, now + settings.freeze_timeout_s))
        if fault.update_by < inf:
            fault = replace(fault, update_by=max(fault.update_by, now + settings.progress_timeout_s))
        state = replace(state, fault=fault)
    if state.dump is not None:
        progress_by = max(state.dump.progress_by, now + settings.progress_timeout_s)
        patience_until = max(state.dump.patience_until, half_of_the_rest(state, now))
        state = replace(state, dump=replace(state.dump, progress_by=progress_by, patience_until=patience_until))
    return state


def _check_rank(state: ControllerState, message: Upward) -> None:
    if not isinstance(message, AgentHello | Vouch) and not 0 <= message.rank < state.settings.world_size:
        raise ProtocolError(
            f"job {state.settings.job_id}: {type(message).__name__} of rank {message.rank}, the world has ranks 0 to "
            f"{state.settings.world_size - 1}; is a process of another job sending here?"
        )
    check_upward(message, state.settings.world_size)


def _hear(state: ControllerState, message: Upward, now: float, out: list[Effect]) -> ControllerState:
    """Whatever a rank says itself proves that it lives."""
    if isinstance(message, _OF_LAUNCHERS):
        return replace(state, seen=now)
    members = hear(state.members, message.rank, now)
    if members.suspects < state.members.suspects:
        out.append(Journal("cleared", {"rank": message.rank, "why": "it was heard again"}))
        if state.fault is not None and state.fault.updating:
            # Its report counts again: perhaps nobody need be waited for.
            state = replace(state, fault=replace(state.fault, updating=()))
    return replace(state, members=members, seen=now)


def _hear_beats(state: ControllerState, beats: Beats, now: float, out: list[Effect]) -> ControllerState:
    """All of them at once, unless one clears a suspicion."""
    members = hear_unsuspected(state.members, {message.rank for message in beats.messages}, now)
    if members is not None:
        return replace(state, members=members, seen=now)
    for message in beats.messages:
        state = _hear(state, message, now, out)
    return state


def _hears_nobody(state: ControllerState) -> bool:
    """True while nobody is attached, or all that live are silent, in a job that has assembled."""
    return silent(state.members) and state.stage in _LED


def _heard_while_gathering(state: ControllerState, now: float) -> ControllerState:
    """Whoever heard nobody for most of a lease was cut off: those that could not come have a lease from now on."""
    if now - state.heard_at >= SUSPECT_AFTER * state.settings.lease_s:
        longest = max(state.deadline, state.gather_by)
        state = replace(state, deadline=min(now + state.settings.lease_s, longest))
    return replace(state, heard_at=now)


def _is_of_a_rank(event: Event) -> bool:
    """True for what a rank says itself."""
    if isinstance(event, Received):
        return not isinstance(event.message, _OF_LAUNCHERS)
    return isinstance(event, Beats)


def _expire(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Do what is due; `advance_stages` looks at the freeze round's own deadline."""
    settings = state.settings
    if state.stage is Stage.EXITING:
        return over(state, state.reason, out) if now >= state.deadline else state
    if now >= state.members.empty_since + settings.orphan_timeout_s:
        return orphaned(state, f"no rank was attached for {settings.orphan_timeout_s:g} s", now, out)
    if state.stage in _UNLED:
        return state  # `advance_stages` looks at the deadline
    if state.stage is Stage.ASSEMBLING and now >= state.deadline:
        return abandon_start(state, now, out)
    if state.fault is not None and now >= state.fault.began + settings.total_timeout_s:
        return give_up(state, now, out)
    if now >= state.members.sweep_at:
        state = _look_at_leases(state, now, out)
    if state.fault is not None and silent(state.members):
        return state  # whoever comes back has time to answer; when nobody does, the orphan timeout ends this
    state = check_stall(state, now, out)
    if state.stage in _ORDERED and state.dump is not None and now >= state.dump.progress_by:
        state = _SILENT[state.stage](state, now, out)
    if state.stage in _ORDERED and state.dump is not None and now >= state.dump.patience_until:
        state = pass_over(state, now, out)
    return state


_SILENT = {
    Stage.ROLLING: on_timeout_rolling,
    Stage.WRITING: on_timeout_writing,
    Stage.PUBLISHING: on_timeout_publishing,
}


def _look_at_leases(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    welcomed, started = state.stage is not Stage.ASSEMBLING, has_started(state.pace)
    swept = sweep_leases(state.members, now, state.settings, welcomed, started)
    state = replace(state, members=swept.members)
    if swept.cut_off:
        state = _grant_time(state, now)
    for rank in swept.newly_suspect:
        if state.members.table[rank].attached:  # it sends no heartbeats before it is welcomed
            out.append(Send((rank,), welcome(state, rank)))
        state = suspicion(state, rank, "it has not been heard for most of its lease", now, out)
    for rank in swept.run_out:
        cause = Cause(CauseKind.SILENT, (rank,), _silence(state, rank, now))
        state = rank_died(state, rank, cause, False, now, out)
    return state


def _silence(state: ControllerState, rank: int, now: float) -> str:
    settings, since = state.settings, silent_since(state.members.table[rank], state.members.amnesty)
    if now - since <= settings.lease_s + _LAST_VOUCH_HEARTBEATS * settings.heartbeat_s:
        return f"nothing was heard for {settings.lease_s:g} s"
    return f"nothing was heard for {now - since:.1f} s, although its agent saw the process running"
