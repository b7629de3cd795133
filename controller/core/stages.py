"""Stage transitions whose conditions now hold, and what is due by the clock (PURE).

Owns `advance_stages`, which runs after every event and never looks at it; leases; and the limits of an attempt's startup, a fault, a round and an
order. Never reads a clock: `now` is an argument.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace
from ttp.proto.messages import Cause, CauseKind

from .dump.finish import finish_job, leave, orphaned, over, refuse
from .dump.freeze import add_cause, half_of_the_rest, has_culprit, thaw
from .dump.publishing import start_publishing
from .dump.reassign import pass_over
from .dump.regroup import regroup_or_write
from .dump.roll_forward import start_dump
from .facts.coverage import coverage_of, named, rows, survives, warnings
from .facts.decision import Refusal
from .facts.events import Effect, Fields, Journal, Send
from .facts.incident import NO_RANKS_TEXT
from .facts.membership import only_lost_nodes, renew_all_leases, silent, silent_since, sweep_leases, vouched_lease
from .facts.pace import has_started
from .facts.stage_table import TABLES, table_of
from .facts.state import (
    Assembling,
    ControllerState,
    Exiting,
    Faulted,
    Freezing,
    Gathering,
    Notes,
    Ordered,
    Rolling,
    Running,
    StateAt,
    Writing,
    goto,
    is_ordered,
)  # fmt: skip
from .ranks.liveness import rank_died, suspicion, welcome
from .ranks.stall import check_stall, resume_pace
from .ranks.standbys import learn_successors, restore
from .ranks.takeover import decide_takeover

_LAST_VOUCH_LEASES = 0.5
"""An agent that goes with its node may have vouched for a rank so long after the rank's last message."""


def advance_stages(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Change stages as far as the facts allow."""
    while True:
        kind = type(state.at)
        if state.members.alive == 0 and issubclass(kind, Assembling | Running | Faulted):
            # Those that were only silent get the order to exit too, in case they wake up.
            state = refuse(state, Refusal("all ranks are dead"), now, out)
            kind = type(state.at)
        state = TABLES[kind].advance(state, now, out)
        if type(state.at) is kind:
            return state


def assemble_job(state: StateAt[Assembling], now: float, out: list[Effect]) -> ControllerState:
    """Once every rank is registered and attached, the job's coverage is known and training may begin."""
    members, world_size = state.members, state.settings.world_size
    if members.attached < world_size:
        return state
    coverage = coverage_of(member.registration for member in members.table if member.registration is not None)
    running = replace(
        goto(state, Running()),
        coverage=coverage,
        survives=survives(coverage),
        job_groups=len(coverage.groups),
        notes=Notes(),
        members=renew_all_leases(members, now, state.settings),  # heartbeats begin now
    )
    running = learn_successors(running, _standbys(running), out)
    for rank in range(world_size):
        out.append(Send((rank,), welcome(running, rank)))
    fields: Fields = {"world_size": world_size, "groups": len(coverage.groups), "survives": running.survives}
    fields |= {"standbys": running.successors, "warnings": warnings(coverage)}
    if coverage.copied:
        fields |= {"copied": True}
    places: tuple[Fields, ...] = tuple(
        {"ranks": row.ranks, "host": row.host, "shards": row.shards, "also_on": row.also_on} for row in rows(coverage)
    )
    out.append(Journal("assembled", {**fields, "rows": places}))
    return running


def _standbys(state: ControllerState) -> list[str]:
    """Return the standbys that ranks have started. Their terms rise with the ranks that started them."""
    registrations = [member.registration for member in state.members.table]
    return [registration.standby for registration in registrations if registration is not None and registration.standby]


def finish_or_restore(state: StateAt[Running], now: float, out: list[Effect]) -> ControllerState:
    """End a job that has finished; else see to the standbys."""
    if state.members.finished == state.settings.world_size:
        return finish_job(state, out)
    return restore(state, now, out)


def end_round(state: StateAt[Freezing], now: float, out: list[Effect]) -> ControllerState:
    """Open the gates again, wait for more reports, or decide."""
    fault, members = state.at.fault, state.members
    if silent(members):
        return state  # no rank could receive the decision
    if not fault.causes:
        if members.finished == state.settings.world_size:
            return finish_job(state, out)
        if members.suspects:
            return state
        if (fault.takeover or fault.unproven is not None) and fault.awaiting and now < fault.round_deadline:
            return state
        if fault.takeover:
            state = decide_takeover(state, now, out)
            fault = state.at.fault
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


def end_roll_forwards(state: StateAt[Rolling], now: float, out: list[Effect]) -> ControllerState:
    """Every roll-forward is answered: the ranks regroup, or write if they still cover every shard."""
    return state if state.at.dump.pending else regroup_or_write(state, now, out)


def end_writing(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
    """Every shard is written: go on to publishing."""
    return state if state.at.dump.pending else start_publishing(state, now, out)


def exit_after_ranks(state: StateAt[Exiting], now: float, out: list[Effect]) -> ControllerState:
    """Exit when every rank that Exit was sent to has closed its stream, but for those that are lost with their nodes: no order reaches them, and no
    agent there asks which ranks may be killed."""
    wait = state.at.untold or not only_lost_nodes(state.members, now, state.settings)
    return state if wait else over(state, state.at.reason, out)


def abandon_start(state: StateAt[Assembling], now: float, out: list[Effect]) -> ControllerState:
    """The world did not assemble in time: release those that came."""
    missing = state.members.table.ranks(lambda member: member.registration is None)
    came = state.members.registered
    reason = f"only {came} of {state.settings.world_size} ranks registered in time; missing: {missing[:8]}"
    return leave(state, reason, now, out)


def give_up(state: StateAt[Faulted], now: float, out: list[Effect]) -> ControllerState:
    """The fault took longer than it may."""
    reason = f"the fault was not over after {state.settings.total_timeout_s:g} s, in stage {state.stage.value}"
    if state.at.fault.updating:
        reason += f"; the update of {named('rank', state.at.fault.updating)} had not ended"
    return refuse(state, Refusal(reason), now, out)


# --- when the driver must call again with a Tick, if nothing happens before; inf: never. O(1) ---


def orphan_deadline(state: ControllerState) -> float:
    return state.members.empty_since + state.settings.orphan_timeout_s


def gathering_deadline(state: StateAt[Gathering]) -> float:
    """Leases begin with the takeover."""
    return min(orphan_deadline(state), state.at.deadline) if state.members.present else orphan_deadline(state)


def assembling_deadline(state: StateAt[Assembling]) -> float:
    return min(orphan_deadline(state), state.members.sweep_at, state.at.deadline)


def running_deadline(state: StateAt[Running]) -> float:
    return min(_led_deadline(state), state.pace.due)


def freezing_deadline(state: StateAt[Freezing]) -> float:
    moment = _fault_deadline(state)
    return moment if silent(state.members) else min(moment, _round_end(state))


def ordered_deadline(state: StateAt[Ordered]) -> float:
    moment, dump = _fault_deadline(state), state.at.dump
    return moment if silent(state.members) else min(moment, dump.progress_by, dump.patience_until)


def _led_deadline(state: StateAt[Running | Faulted]) -> float:
    """Once a heartbeat also while no rank is attached: a rare look does not show that the process itself was stopped."""
    members, settings = state.members, state.settings
    return min(members.empty_since + settings.orphan_timeout_s, members.sweep_at, state.seen + settings.heartbeat_s)


def _fault_deadline(state: StateAt[Faulted]) -> float:
    return min(_led_deadline(state), state.at.fault.began + state.settings.total_timeout_s)


def _round_end(state: StateAt[Freezing]) -> float:
    """When a freeze round is decided if no further message comes; inf while there is nothing to decide about."""
    fault = state.at.fault
    if not fault.causes:
        waits = fault.unproven is not None or (fault.takeover and fault.awaiting)
        return fault.round_deadline if waits and not state.members.suspects else inf
    return max(
        -inf if has_culprit(fault.causes) else fault.hint_until,
        fault.round_deadline if fault.awaiting or state.members.suspects else -inf,
        fault.update_by if fault.updating else -inf,
    )


# --- what is done then ---


def expire(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Do what is due; `advance_stages` looks at the deadlines of a freeze round and of a takeover."""
    if now >= orphan_deadline(state) and not isinstance(state.at, Exiting):
        return orphaned(state, f"{NO_RANKS_TEXT} for {state.settings.orphan_timeout_s:g} s", now, out)
    return table_of(state).expire(state, now, out)


def expire_assembling(state: StateAt[Assembling], now: float, out: list[Effect]) -> ControllerState:
    return abandon_start(state, now, out) if now >= state.at.deadline else _look_at_leases(state, now, out)


def expire_running(state: StateAt[Running], now: float, out: list[Effect]) -> ControllerState:
    return check_stall(_look_at_leases(state, now, out), now, out)


def expire_faulted(state: StateAt[Faulted], now: float, out: list[Effect]) -> ControllerState:
    if now >= state.at.fault.began + state.settings.total_timeout_s:
        return give_up(state, now, out)
    after = _look_at_leases(state, now, out)
    if silent(after.members):
        return after  # ranks that come back have time to answer; when none does, the orphan timeout ends this
    if is_ordered(after) and now >= after.at.dump.progress_by:
        after = table_of(after).on_timeout(after, now, out)
    if is_ordered(after) and now >= after.at.dump.patience_until:
        after = pass_over(after, now, out)
    return after


def _look_at_leases(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    if now < state.members.sweep_at:
        return state
    welcomed, started = not isinstance(state.at, Assembling), has_started(state.pace)
    swept = sweep_leases(state.members, now, state.settings, welcomed, started)
    state = replace(state, members=swept.members)
    if swept.cut_off:
        state = grant_time(state, now)
    for rank in swept.newly_suspect:
        if state.members.table[rank].attached:  # it sends no heartbeats before it is welcomed
            out.append(Send((rank,), welcome(state, rank)))
        silent_s = now - silent_since(state.members.table[rank], state.members.leases_renewed_at)
        state = suspicion(state, rank, f"no message received for {silent_s:.1f} s", now, out)
    for rank in swept.run_out:
        cause = Cause(CauseKind.SILENT, (rank,), _silence(state, rank, now))
        state = rank_died(state, rank, cause, False, now, out)
    return state


def _silence(state: ControllerState, rank: int, now: float) -> str:
    """Return the rule by which a silent rank is dead, with what it was applied to."""
    settings, member = state.settings, state.members.table[rank]
    since = silent_since(member, state.members.leases_renewed_at)
    text = f"no message received for {now - since:.1f} s"
    if now - since > settings.lease_s * (1 + _LAST_VOUCH_LEASES):
        limit_s = vouched_lease(settings, has_started(state.pace))
        return f"{text}, although its agent saw the process running (limit {limit_s:g} s, TTP_VOUCHED_LEASE_S)"
    if member.vouched > since:
        text += f"; its agent last saw the process running {now - member.vouched:.1f} s ago"
    return f"{text} (limit {settings.lease_s:g} s, TTP_LEASE_S)"


def grant_time(state: ControllerState, now: float) -> ControllerState:
    """The controller received nothing for a while: answers that ranks owe have as much time as if they were asked for now."""
    settings, at = state.settings, state.at
    state = resume_pace(replace(state, members=renew_all_leases(state.members, now, settings)), now)
    if isinstance(at, Gathering):
        state = replace(state, at=replace(at, deadline=now + settings.lease_s, last_message_at=now))
    if state.members.empty_since < inf:  # no rank is attached, and one was
        state = replace(state, members=replace(state.members, empty_since=now))
    if (fault := state.fault) is not None:
        round_deadline = max(fault.round_deadline, now + settings.freeze_timeout_s)
        update_by = max(fault.update_by, now + settings.progress_timeout_s)
        state = state.with_fault(replace(fault, round_deadline=round_deadline, update_by=update_by))
    if is_ordered(state):
        dump = state.at.dump
        progress_by = max(dump.progress_by, now + settings.progress_timeout_s)
        patience_until = max(dump.patience_until, half_of_the_rest(state, now))
        state = state.with_dump(replace(dump, progress_by=progress_by, patience_until=patience_until))
    return state
