"""From ranks that all hold the decided step to ranks that train on, without a checkpoint (PURE).

Owns when that is tried, whose process is replaced, and how it ends: with open gates, or with another round, after which the step is written. Until it
has succeeded the gates of all holders stay closed, and no process is ended that holds a shard, but for those of lost nodes that come back meanwhile,
and those that are silent, once the step is on disk; so a failure leads there as if it had not been tried.
"""

from __future__ import annotations

from math import inf
from typing import TypeGuard

from ttp.proto.frozen import replace
from ttp.proto.incident import Saved
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Registration,
    Regroup,
    Regrouped,
    Replace,
    ReplaceFailed,
    StepFailed,
    TakePlaces,
    Thaw,
)

from ..facts.coverage import coverage_of, named, survives
from ..facts.events import Effect, Fields, Journal, Send, Tell
from ..facts.incident import Outcome, report, stage_ended
from ..facts.membership import Member, attach, mark_dead, reachable, update
from ..facts.pace import rested
from ..facts.state import (
    AttachedAgent,
    Faulted,
    Ordered,
    Publishing,
    Recoveries,
    Regrouping,
    Rolling,
    Running,
    StateAt,
    Writing,
    goto,
)
from ..facts.state import ControllerState as State
from .finish import leave_saved
from .freeze import next_round
from .lost_nodes import LostNode, lost_nodes
from .roll_forward import able_holders
from .writing import start_writing

MOST_AT_A_STEP = 3
"""After so many recoveries in a row at one step the next fault is written: its cause is likely to come again."""

_AT_ONCE = (CauseKind.EXITED, CauseKind.EXCEPTION, CauseKind.DIVERGED)
"""What is known at once and for certain. A process that hangs may still run: such a fault is written, and all ranks leave. So may a silent one: it is
written, and the silent process is ended by its agent then. Where whole nodes are silent others can take their places."""


def regroup_or_write(state: StateAt[Rolling], now: float, out: list[Effect]) -> State:
    """Every roll-forward is answered: have the ranks train on if that is possible, else write the step. Once in a fault. Where it is to be
    published first, or a silent process is to be ended that may hold what the others hold, it is written in any case."""
    fault, dump = state.at.fault, state.at.dump
    possible = _is_possible(state, now, out)
    if possible and not state.settings.publish_first and not silent_here(state, now):
        return _start(state, now, out)
    return start_writing(goto(state, Writing(replace(fault, to_be_written=not possible), dump)), now, out)


def regroup_or_leave(state: StateAt[Writing | Publishing], saved: Saved, now: float, out: list[Effect]) -> State:
    """The step is published: have the ranks train on if that was the plan and is possible still, else leave. Never while ranks write."""
    state = state.with_dump(replace(state.at.dump, saved=saved))
    if isinstance(state.at, Publishing) and _is_possible(state, now, out):
        return _start(state, now, out)
    return leave_saved(state, saved, now, out)


def _is_possible(state: StateAt[Ordered], now: float, out: list[Effect]) -> bool:
    """Say whether the ranks can train on without a restart; journal why not."""
    if state.settings.in_place_s <= 0 or state.at.fault.to_be_written:
        return False
    if reason := _why_not(state, now):
        out.append(Journal("not_in_place", {"freeze_id": state.freeze_id, "reason": reason}))
    return not reason


def _why_not(state: StateAt[Ordered], now: float) -> str:
    """Say why the ranks cannot regroup; empty: they can."""
    fault, dump, settings = state.at.fault, state.at.dump, state.settings
    replaceable = frozenset(rank for node in lost_nodes(state, now) for rank in node.ranks) | silent_here(state, now)
    kinds = {cause.kind for cause in fault.causes} - {CauseKind.PEER_ERROR}
    others = {
        cause.kind
        for cause in fault.causes
        if cause.kind not in _AT_ONCE and not (cause.kind is CauseKind.SILENT and replaceable.issuperset(cause.ranks))
    } - {CauseKind.PEER_ERROR}
    if not (kinds or fault.wrong) or others:
        return f"a fault of kind {', '.join(sorted(kind.value for kind in kinds)) or CauseKind.PEER_ERROR.value}"
    if returned := _training_returned(state):
        return returned
    if state.members.table[0].registration is None and not _is_on_one_node(state):
        return "rank 0's process has never come to this controller: others may train on elsewhere"
    step = dump.decision.step
    if dump.decision.copies:
        return "some ranks keep the step before, so that others may be ahead"
    if any(record.step > step for record in fault.records):
        return f"step {step} is not the newest that any rank has finished"
    staying = able_holders(state)
    for rank in range(settings.world_size):
        if reason := _why_not_stay(state, rank) if rank in staying else _why_not_replaced(state, rank, replaceable):
            return f"rank {rank} {reason}"
    for group in state.coverage.groups:
        if staying.isdisjoint(group.holders):
            return f"{group.label} would have no holder that stays"
    until_s, part = (
        (settings.total_timeout_s / 2, "the first half of ") if dump.saved is None else (settings.total_timeout_s, "")
    )
    if now + settings.in_place_s > fault.began + until_s:  # the other half is for writing
        return f"less than {settings.in_place_s:g} s remain in {part}the fault's time"
    before = state.recoveries
    if before.count >= settings.most_in_place:
        return f"{before.count} faults have ended in place"
    if before.step == step and before.at_step >= MOST_AT_A_STEP:
        return f"no step was finished since {before.at_step} recoveries at step {step}"
    return ""


def _is_on_one_node(state: State) -> bool:
    """Say whether one agent has every rank. Its node is rank 0's, and so it was never given up."""
    return any(len(agent.ranks) == state.settings.world_size for agent in state.agents)


def _training_returned(state: State) -> str:
    """Name the living ranks whose training has returned, which they cannot enter again; empty: there are none."""
    if not state.members.finished:
        return ""
    ranks = state.members.table.ranks(lambda member: member.finished and member.dead is None)
    return f"training has returned on {named('rank', ranks)}" if ranks else ""


def _why_not_stay(state: StateAt[Ordered], rank: int) -> str:
    member, report = state.members.table[rank], state.at.fault.reports[rank]
    if member.registration is None or not member.registration.regroups:
        return "cannot regroup"
    if member.suspect or not member.attached:
        return "is silent"
    return "has a gate that cannot open again" if report is None or report.final else ""


def silent_here(state: StateAt[Ordered], now: float) -> frozenset[int]:
    """Return the ranks of this fault that are silent although their agents are not: these end such a process, and see it end."""
    table, since = state.members.table, now - state.settings.lease_s
    silent = {rank for cause in state.at.fault.causes if cause.kind is CauseKind.SILENT for rank in cause.ranks}
    return frozenset(
        rank
        for rank in silent
        if (known := table[rank]).dead is not None
        and known.dead.kind is CauseKind.SILENT
        and known.registration is not None
        and known.named_at > since
        and agent_of(state, rank) == known.registration.host
    )


def _why_not_replaced(state: StateAt[Ordered], rank: int, replaceable: frozenset[int]) -> str:
    """A process is replaced that has ended for certain, or is on a lost node, or is silent where its agent is not, or that has lost its state, or
    holds a wrong one, and is here: none trains on elsewhere, and none is ended that holds a shard which is not on disk."""
    member, report = state.members.table[rank], state.at.fault.reports[rank]
    if rank in state.at.fault.stuck:
        return "was given an order, and has not answered"
    if rank in replaceable:
        return ""
    if member.dead is None:
        lost = (report is not None and report.torn) or rank in state.at.fault.wrong
        if not lost or member.suspect or not member.attached:
            return "is not at the step, and has not lost its state"
    elif member.dead.kind is not CauseKind.EXITED or member.attached:
        return "may still run"
    return "" if agent_of(state, rank) else "has no agent that could start a process"


def _start(state: StateAt[Ordered], now: float, out: list[Effect]) -> State:
    """Order replacements from the agents, and all that stay to regroup with them."""
    fault, dump, table = state.at.fault, state.at.dump, state.members.table
    staying = able_holders(state)
    replaced = tuple(rank for rank in range(state.settings.world_size) if rank not in staying)
    order = Regroup(state.freeze_id, dump.decision.step, replaced, dump.decision.record, dump.saved is not None)
    nodes, silent = lost_nodes(state, now), silent_here(state, now)
    state, moved = _move(state, nodes, out)
    members = state.members
    for rank in replaced:
        if rank in moved:
            continue
        known, pid = table[rank].registration, 0
        if table[rank].dead is None and known is not None:
            wrong = rank in fault.wrong
            kind = CauseKind.DIVERGED if wrong else CauseKind.EXCEPTION
            why = "its replica is wrong" if wrong else "its update failed half way"
            cause = Cause(kind, (rank,), f"{why}: its process is replaced")
            members, pid = mark_dead(members, rank, cause, False, now), known.pid
        elif known is not None and rank in silent:
            pid = known.pid
        out.append(Tell((agent_of(state, rank),), Replace(rank, pid, state.freeze_id)))
    out.append(Send(tuple(sorted(staying)), order))
    out.append(Journal("regroup_sent", {"freeze_id": state.freeze_id, "step": order.step, "replaced": replaced}))
    dump = replace(
        dump,
        able=dump.able.difference(replaced),
        regroup=order,
        progress_by=now + state.settings.in_place_s,
        patience_until=inf,
    )
    ranks = frozenset(range(len(table)))
    at = Regrouping(
        replace(fault, to_be_written=True), dump, ranks, frozenset(replaced), frozenset(node.host for node in nodes)
    )
    return goto(replace(state, members=members, begun_generation=state.freeze_id), at)


def _move(
    state: StateAt[Ordered], nodes: tuple[LostNode, ...], out: list[Effect]
) -> tuple[StateAt[Ordered], frozenset[int]]:
    """Give the places of lost nodes' ranks to spare ones; return these ranks. What their earlier processes say means nothing from now on, and the standbys
    that these have started count as lost with them."""
    members, agents, standbys = state.members, state.agents, dict[str, int]()
    for node in nodes:
        for rank in node.ranks:
            member = members.table[rank]
            members = update(members, rank, replace(member, attached=False))
            if member.registration is not None and member.registration.standby in state.standbys:
                standbys[member.registration.standby] = rank
        agents = tuple(
            AttachedAgent(agent.host, node.ranks) if agent.host == node.spare else agent
            for agent in agents
            if agent.host != node.host
        )
        out.append(Tell((node.spare,), TakePlaces(node.ranks, state.freeze_id)))
        fields: Fields = {"host": node.spare, "ranks": node.ranks, "lost": node.host}
        out.append(Journal("take_places_sent", {**fields, "freeze_id": state.freeze_id}))
    out.extend(Journal("standby_lost", {"rank": rank, "address": address}) for address, rank in standbys.items())
    moved = frozenset(rank for node in nodes for rank in node.ranks)
    lost_hosts = state.lost_hosts.difference(node.spare for node in nodes)  # it may have come back as a spare one
    restoring = replace(state.restoring, lost=state.restoring.lost.union(standbys))
    return replace(state, members=members, agents=agents, lost_hosts=lost_hosts, restoring=restoring), moved


def agent_of(state: State, rank: int) -> str:
    """Return the host of the attached agent that starts this rank's process; empty: none is attached. A controller that has taken over may have two
    that name the rank, one of them on a node that was given up: it is the one on the host of the process that has the place."""
    named = [agent.host for agent in state.agents if rank in agent.ranks]
    process = state.members.table[rank].registration
    if process is not None and process.host in named:
        return process.host
    return named[0] if named else ""


def open_order(state: StateAt[Faulted], rank: int) -> tuple[Regroup, ...]:
    """Return the order that a rank has not answered, if there is one; a replacement receives it when it has come."""
    at = state.at
    if not isinstance(at, Regrouping) or at.dump.regroup is None or rank not in at.pending - at.awaited:
        return ()
    return (at.dump.regroup,)


def is_replacement(state: State, message: Registration) -> TypeGuard[StateAt[Regrouping]]:
    """Say whether this is the process that an agent was asked for."""
    return isinstance(state.at, Regrouping) and message.rank in state.at.awaited and message.vacant == state.freeze_id


def replacement_came(
    state: StateAt[Regrouping], message: Registration, now: float, out: list[Effect]
) -> StateAt[Regrouping]:
    """Another process takes a rank's place: it lives, as its agent does, which has just started it, and holds nothing yet."""
    rank, at = message.rank, state.at
    out.append(Journal("replacement_came", {"rank": rank, "host": message.host, "pid": message.pid}))
    members = attach(update(state.members, rank, Member(named_at=now)), message, now, state.settings)
    pace = replace(state.pace, places=state.pace.places.put(rank, None))
    fault = replace(at.fault, wrong=at.fault.wrong - {rank})
    return replace(state, members=members, pace=pace, at=replace(at, fault=fault, awaited=at.awaited - {rank}))


def regrouped(state: StateAt[Regrouping], answer: Regrouped, now: float, out: list[Effect]) -> State:
    """A rank's groups are whole, and its shards equal its replicas'."""
    if answer.rank in state.at.awaited:
        return state  # of no process that was asked
    return replace(state, at=replace(state.at, pending=state.at.pending - {answer.rank}))


def end_regrouping(state: StateAt[Regrouping], now: float, out: list[Effect]) -> State:
    """Once all have regrouped every gate opens: the only point of no return. A rank whose training returned before it could leave it never
    regroups, and is not waited for."""
    if returned := _training_returned(state):
        return ask_again(state, returned, now, out)
    if state.at.pending or state.members.suspects:
        return state
    order, saved, before = state.at.dump.regroup, state.at.dump.saved, state.recoveries
    here = frozenset(member.registration.host for member in state.members.table if member.registration is not None)
    assert order is not None
    out.append(Send(reachable(state.members), Thaw(state.freeze_id)))
    out.append(Journal("regrouped", {"freeze_id": state.freeze_id, "step": order.step, "replaced": order.replaced}))
    state = stage_ended(state, "regrouped", now)
    state = report(state, Outcome(saved, in_place=True, kept_step=order.step), now, out)
    coverage = coverage_of(member.registration for member in state.members.table if member.registration is not None)
    at_step = before.at_step + 1 if before.step == order.step else 1
    return goto(
        replace(
            state,
            coverage=coverage,
            survives=survives(coverage),
            pace=rested(state.pace, now),
            generation=order.freeze_id,
            lost_hosts=(state.lost_hosts | state.at.lost) - here,
            recoveries=Recoveries(before.count + 1, order.step, at_step),
        ),
        Running(),
    )


def ask_again(state: StateAt[Regrouping], reason: str, now: float, out: list[Effect]) -> State:
    """Have the step written after all, by what the ranks hold now: they may have compared their replicas meanwhile, and found that they differ.
    Where it was published first, they leave."""
    out.append(Journal("regroup_failed", {"freeze_id": state.freeze_id, "reason": reason}))
    if (saved := state.at.dump.saved) is not None:
        return leave_saved(state, saved, now, out)
    return next_round(state, reason, now, out)


def on_rank_lost_regrouping(state: StateAt[Regrouping], rank: int, now: float, out: list[Effect]) -> State:
    """A rank died. One that is replaced counts as dead already when its process ends."""
    return ask_again(state, f"rank {rank} died", now, out)


def on_timeout_regrouping(state: StateAt[Regrouping], now: float, out: list[Effect]) -> State:
    """It took too long."""
    suspects = state.members.table.ranks(lambda member: member.suspect and member.dead is None)
    late = named("rank", sorted(state.at.pending) or suspects)
    return ask_again(state, f"{late} had not regrouped after {state.settings.in_place_s:g} s", now, out)


def regroup_failed(state: StateAt[Regrouping], answer: StepFailed, now: float, out: list[Effect]) -> State:
    """A rank cannot regroup, or has found that its replicas differ."""
    if answer.stage != "regroup":
        return state
    return ask_again(state, f"rank {answer.rank}: {answer.error}", now, out)


def replace_failed(state: StateAt[Regrouping], answer: ReplaceFailed, now: float, out: list[Effect]) -> State:
    """An agent cannot start a process in a rank's place."""
    order = state.at.dump.regroup
    if answer.freeze_id != state.freeze_id or order is None or answer.rank not in order.replaced:
        return state
    return ask_again(state, f"no process for rank {answer.rank}: {answer.error}", now, out)
