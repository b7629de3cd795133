"""The consequences of what is known: changes of stage (PURE).

Owns `advance_stages`, which is called after every event and goes on as far as the facts allow. It never looks at the event.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ttp.proto.frozen import replace

from .dump.finish import finish_job, leave, over, refuse
from .dump.freeze import add_cause, has_culprit, thaw
from .dump.publishing import start_publishing
from .dump.roll_forward import start_dump
from .dump.writing import start_writing
from .facts.coverage import coverage_of, named, rows, survives, warnings
from .facts.decision import Refusal
from .facts.events import Effect, Fields, Journal, Send
from .facts.membership import renew_all_leases, silent
from .facts.state import ControllerState, Notes, Stage
from .ranks.liveness import welcome
from .ranks.standbys import learn_successors, restore
from .ranks.takeover import decide_takeover, gather_ranks, stand_by


def advance_stages(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Change stages as far as the facts allow."""
    while True:
        if state.members.alive == 0 and state.stage not in _WITHOUT_RANKS:
            state = _nobody_left(state, now, out)
        advance = _ADVANCE.get(state.stage)
        if advance is None:
            return state
        stage = state.stage
        state = advance(state, now, out)
        if state.stage is stage:
            return state


_WITHOUT_RANKS = (Stage.STANDBY, Stage.GATHERING, Stage.EXITING, Stage.OVER)
"""Stages that see for themselves to there being no rank any more."""


def _nobody_left(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """All are dead; those that were only silent are told to exit in case they wake up."""
    return refuse(state, Refusal("all ranks are dead"), now, out)


def _assemble(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Once every rank is registered and attached, the job's coverage is known and training may begin."""
    members, world_size = state.members, state.settings.world_size
    if members.attached < world_size:
        return state
    coverage = coverage_of(member.registration for member in members.table if member.registration is not None)
    state = replace(
        state,
        stage=Stage.RUNNING,
        deadline=inf,
        coverage=coverage,
        survives=survives(coverage),
        job_groups=len(coverage.groups),
        notes=Notes(),
        members=renew_all_leases(members, now, state.settings),  # heartbeats begin now
    )
    state = learn_successors(state, _standbys(state), out)
    for rank in range(world_size):
        out.append(Send((rank,), welcome(state, rank)))
    fields: Fields = {"world_size": world_size, "groups": len(coverage.groups), "survives": state.survives}
    fields |= {"standbys": state.successors, "warnings": warnings(coverage)}
    places: tuple[Fields, ...] = tuple(
        {"ranks": row.ranks, "host": row.host, "shards": row.shards, "also_on": row.also_on} for row in rows(coverage)
    )
    out.append(Journal("assembled", {**fields, "rows": places}))
    return state


def _standbys(state: ControllerState) -> list[str]:
    """Return the standbys that ranks have started. Their terms rise with the ranks that started them."""
    registrations = [member.registration for member in state.members.table]
    return [registration.standby for registration in registrations if registration is not None and registration.standby]


def _run(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    if state.members.finished == state.settings.world_size:
        return finish_job(state, out)
    return restore(state, now, out)


def _freeze(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Open the gates again, wait for more reports, or decide."""
    fault, members = state.fault, state.members
    assert fault is not None
    if silent(members):
        return state  # nobody could be told what is decided
    if not fault.causes:
        if members.finished == state.settings.world_size:
            return finish_job(state, out)
        if members.suspects:
            return state
        if (fault.takeover or fault.unproven is not None) and fault.awaiting and now < fault.round_deadline:
            return state
        if fault.takeover:
            state = decide_takeover(state, fault, now, out)
            fault = state.fault
            assert fault is not None
        if fault.unproven is not None:
            state = add_cause(state, fault.unproven, now)
            return start_dump(state, now, out)
        if not fault.causes:
            return thaw(state, now, out)
    if not has_culprit(fault.causes) and now < fault.hint_until:
        return state
    if (fault.awaiting or members.suspects) and now < fault.round_deadline:
        return state
    if fault.updating and now < fault.update_by:
        return state
    return start_dump(state, now, out)


def _roll(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Every roll-forward is answered: go on to writing if what is left still covers every shard."""
    if state.dump is None or state.dump.pending:
        return state
    return start_writing(replace(state, stage=Stage.WRITING), now, out)


def _write(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    return start_publishing(state, now, out) if state.dump is not None and not state.dump.pending else state


def _exit(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Leave when every rank that could be told has let go of its stream."""
    return over(state, state.reason, out) if not state.members.attached and not state.untold else state


_ADVANCE: dict[Stage, Callable[[ControllerState, float, list[Effect]], ControllerState]] = {
    Stage.STANDBY: stand_by,
    Stage.GATHERING: gather_ranks,
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
    if state.fault is not None and state.fault.updating:
        reason += f"; the update of {named('rank', state.fault.updating)} had not ended"
    return refuse(state, Refusal(reason), now, out)
