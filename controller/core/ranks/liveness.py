"""Who is there, and who no longer is: registrations, broken streams, exits and faults (PURE).

Owns what a rank's coming and going means in each stage. Stages change in `stages`, except that a death or a suspicion in
a running job begins a fault.
"""

from __future__ import annotations

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    AgentHello,
    Cause,
    CauseKind,
    Downward,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    PublishOrder,
    Registration,
    Regroup,
    RollForward,
    StandbyList,
    Thaw,
    Vouch,
    Welcome,
    WorkerExit,
    WriteOrder,
)

from ..dump import regroup
from ..dump.finish import leave
from ..dump.freeze import add_cause, ask_late, begin_fault, count_again, forget, root_cause, with_known_shards
from ..facts.coverage import overview, warnings
from ..facts.events import Effect, Fields, Journal, Send, StreamClosed, Tell
from ..facts.incident import EXITING_TEXT, began, death_named, sign_of_death, sign_of_report
from ..facts.membership import Member, attach, detach, mark_dead, update, vouch
from ..facts.pace import learn
from ..facts.stage_table import table_of
from ..facts.state import (
    MOST_KEPT,
    Assembling,
    AttachedAgent,
    ControllerState,
    Exiting,
    Fault,
    Faulted,
    Freezing,
    Regrouping,
    Running,
    Standby,
    StateAt,
)
from .generations import begun, is_of_lost_node, leads_earlier, note_generation, refusal
from .standbys import spread

CLEAN_EXIT_TEXT = "exit code 0"


def register(state: ControllerState, message: Registration, now: float, out: list[Effect]) -> ControllerState:
    """A rank attaches, for the first time or again."""
    _check_registration(state, message)
    state = note_generation(state, message, out)
    rank, member = message.rank, state.members.table[message.rank]
    known = member.registration
    if regroup.is_replacement(state, message):
        state = regroup.replacement_came(state, message, now, out)
        out.extend(Send((rank,), order) for order in table_of(state).catch_up(state, rank))
        return state
    if known is not None and known.pid != message.pid:
        cause = _replaced(known, member.dead, message)
        if member.dead is not None:  # it may have been taken for silent, and is gone
            state = replace(state, members=update(state.members, rank, replace(member, dead=cause)))
        state = rank_died(state, rank, cause, True, now, out)
        member = state.members.table[rank]
    if known is None and member.dead is not None and member.exited_pid not in (0, message.pid):
        # It came too late to be waited for: the process whose end was reported had another one in its place.
        late = Cause(CauseKind.SILENT, (rank,), f"process {member.exited_pid} has ended, before {message.pid} came")
        member = replace(member, dead=late, exited_pid=0)
        state = replace(state, members=update(state.members, rank, member))
    if known is None:
        fields: Fields = {"rank": rank, "host": message.host, "pid": message.pid, "groups": len(message.groups)}
        out.append(Journal("registered", {**fields, "state_step": message.state_step}))
    if member.suspect and member.dead is None:
        out.append(Journal("cleared", {"rank": rank, "why": "it attached again"}))
    if message.finished and not member.finished:
        out.append(Journal("rank_finished", {"rank": rank}))
    pace = learn(state.pace, message.steps, message.step_times_s, state.settings.hang)
    state = replace(state, pace=pace, members=attach(state.members, message, now, state.settings))
    if not isinstance(state.at, Assembling):
        state = spread(state, message.controllers[1:], out)
    state = ask_late(count_again(state, rank, now, out), rank, now)
    if known is None and isinstance(state.at, Freezing):
        state = with_known_shards(state)
    out.extend(Send((rank,), order) for order in table_of(state).catch_up(state, rank))
    return _owed_no_exit(state, rank)


def _replaced(known: Registration, dead: Cause | None, message: Registration) -> Cause:
    """Return what became of a rank's process, of which another one has the place. On a node that was given up it may run on."""
    if begun(known) < begun(message) and (dead is None or dead.kind is CauseKind.SILENT):
        text = f"process {known.pid} on {known.host} was given up: its place is that of {message.pid} on {message.host}"
        return Cause(CauseKind.SILENT, (message.rank,), text)
    return Cause(CauseKind.EXITED, (message.rank,), f"process {known.pid} was replaced by {message.pid}")


# --- what a rank is sent that attaches again: all that it may have missed; commands may come twice ---


def missed_thaw(state: StateAt[Running], rank: int) -> tuple[Downward, ...]:
    """A Thaw may have been lost with the old stream."""
    return (welcome(state, rank), Thaw(state.freeze_id)) if state.freeze_id else (welcome(state, rank),)


def missed_orders(state: StateAt[Faulted], rank: int) -> tuple[Downward, ...]:
    """The freeze of this round, and the orders that it has not answered."""
    return (welcome(state, rank), freeze_in_force(state.freeze_id, state.at.fault), *open_orders(state, rank))


def missed_exit(state: StateAt[Exiting], rank: int | Heartbeat) -> tuple[Downward, ...]:
    """Whatever it was doing, it exits."""
    return (Exit(EXIT_CODE_PERSISTED, state.at.reason),)


def freeze_in_force(freeze_id: int, fault: Fault) -> Freeze:
    """Return the freeze of this fault's present round."""
    return Freeze(freeze_id, root_cause(fault.causes) or fault.unproven or fault.suspicion)


def open_orders(state: StateAt[Faulted], rank: int) -> tuple[RollForward | Regroup | WriteOrder | PublishOrder, ...]:
    """Return the orders that a rank has not answered; one that is dead owes nothing."""
    dump = state.dump
    if dump is None:
        return ()
    record, order = dump.decision.record, dump.order
    rolls = (RollForward(state.freeze_id, record),) if dump.rolling[rank] and record is not None else ()
    return (
        *rolls,
        *regroup.open_order(state, rank),
        *dump.work[rank].orders,
        *((order,) if rank in dump.publishers and order is not None else ()),
    )


def welcome(state: ControllerState, rank: int) -> Welcome:
    """Return what a rank must know of this controller; rank 0 also learns where all shards are."""
    settings, first = state.settings, rank == 0
    return Welcome(
        rank=rank,
        term=settings.term,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        survives=state.survives,
        successors=state.successors,
        job_groups=state.job_groups,
        overview=overview(state.coverage) if first else (),
        warnings=warnings(state.coverage) if first else (),
    )


def _check_registration(state: ControllerState, message: Registration) -> None:
    world_size = state.settings.world_size
    if message.world_size != world_size:
        raise ProtocolError(
            f"rank {message.rank} on {message.host} registers a world of {message.world_size} ranks, job "
            f"{state.settings.job_id} has {world_size}; is a process of an earlier attempt still running?"
        )
    if leads_earlier(state, message):
        raise ProtocolError(
            f"job {state.settings.job_id}: rank {message.rank} is of a later generation than all that came here"
        )
    if why := refusal(state, message):
        raise ProtocolError(f"job {state.settings.job_id}: rank {message.rank} registers, but {why}")


def stream_closed(state: ControllerState, event: StreamClosed, now: float, out: list[Effect]) -> ControllerState:
    """Streams broke: their ranks are suspect, and all gates close at once."""
    if event.host:
        out.append(Journal("agent_detached", {"host": event.host}))
        return replace(state, agents=_agents_but(state, event.host))
    welcomed = not isinstance(state.at, Assembling)
    for rank in event.ranks:
        member = state.members.table[rank]
        if not member.attached:
            continue
        state = replace(state, members=detach(state.members, rank, now, state.settings, welcomed))
        if member.dead is None and not isinstance(state.at, Exiting):
            state = suspicion(state, rank, "its stream broke", now, out)
    return state


def suspicion(state: ControllerState, rank: int, why: str, now: float, out: list[Effect]) -> ControllerState:
    """A rank may be dead: close all gates until that is known."""
    out.append(Journal("suspect", {"rank": rank, "why": why}))
    state = began(state, now)
    if isinstance(state.at, Running):
        return begin_fault(state, (), Cause(CauseKind.SILENT, (rank,), why), now, out)
    return state


def agent_attached(state: ControllerState, message: AgentHello, now: float, out: list[Effect]) -> ControllerState:
    """A launcher attaches: it learns the lease, so that it notices when this controller falls silent, the standbys, and that the ranks
    are frozen or were sent away, if they are: of its own some may stand still."""
    others = _agents_but(state, message.host)
    if len(others) >= MOST_KEPT + state.settings.world_size:
        raise ProtocolError(
            f"job {state.settings.job_id}: agent on {message.host!r}: got {len(others)} hosts already, expected at most"
            f" {MOST_KEPT + state.settings.world_size}; are agents of another job sending here?"
        )
    if is_of_lost_node(state, message, out):
        return state
    spare: Fields = {"places": message.places} if message.places else {}
    out.append(Journal("agent_attached", {"host": message.host, "ranks": message.ranks, **spare}))
    if not isinstance(state.at, Standby):  # a standby must not be taken for the active controller
        out.append(Tell((message.host,), StandbyList(state.successors, state.settings.lease_s)))
    if isinstance(state.at, Exiting):
        out.append(Tell((message.host,), Exit(EXIT_CODE_PERSISTED, state.at.reason)))
    if isinstance(state.at, Faulted):
        out.append(Tell((message.host,), freeze_in_force(state.freeze_id, state.at.fault)))
    return replace(state, agents=(*others, AttachedAgent(message.host, message.ranks, message.places)))


def _agents_but(state: ControllerState, host: str) -> tuple[AttachedAgent, ...]:
    return tuple(agent for agent in state.agents if agent.host != host)


def vouched(state: ControllerState, message: Vouch, now: float, out: list[Effect]) -> ControllerState:
    """An agent found processes alive and running: their ranks, should they be silent, have the vouched lease."""
    return replace(state, members=vouch(state.members, message, now))


# --- deaths and faults ---


def worker_exit(state: ControllerState, message: WorkerExit, now: float, out: list[Effect]) -> ControllerState:
    """An agent saw a process end, or begin to end: there is nothing to wait for."""
    member = state.members.table[message.rank]
    if member.registration is not None and member.registration.pid != message.pid:
        return state  # an earlier process of that rank
    if member.finished and message.text == CLEAN_EXIT_TEXT:
        return _exited_cleanly(state, message.rank, member, now, out)
    cause = Cause(CauseKind.EXITED, (message.rank,), message.text)
    if member.dead is not None:
        return _refine_cause(state, message.rank, member, cause, now, out)
    return rank_died(state, message.rank, cause, True, now, out)


def rank_died(
    state: ControllerState, rank: int, cause: Cause, gone: bool, now: float, out: list[Effect]
) -> ControllerState:
    """A rank is dead, and stays so unless it was only silent and comes while a round asks. `gone`: its process is known to have ended."""
    member = state.members.table[rank]
    if member.dead is not None:
        return state
    host, pid = (member.registration.host, member.registration.pid) if member.registration else ("", 0)
    fields: Fields = {"rank": rank, "kind": cause.kind.value, "text": cause.text, "host": host, "pid": pid}
    if (place := state.pace.places[rank]) is not None:  # as of its last heartbeat, so long ago
        fields |= {"phase": place.phase.name, "step": place.step, "heard_s": round(now - member.received_at, 3)}
    out.append(Journal("death_seen", fields))
    state = sign_of_death(state, rank, cause, now)
    members = mark_dead(state.members, rank, cause, gone, now)
    state = forget(_owed_no_exit(replace(state, members=members), rank), rank)
    if isinstance(state.at, Assembling):
        return leave(state, f"rank {rank} died before the job had assembled: {cause.text}", now, out)
    if isinstance(state.at, Running):
        return begin_fault(state, (cause,), cause, now, out)
    return table_of(state).rank_lost(add_cause(state, cause, now), rank, now, out)


def _owed_no_exit(state: ControllerState, rank: int) -> ControllerState:
    """No Exit is owed to this rank any more."""
    at = state.at
    return replace(state, at=replace(at, untold=at.untold - {rank})) if isinstance(at, Exiting) else state


def _refine_cause(
    state: ControllerState, rank: int, member: Member, cause: Cause, now: float, out: list[Effect]
) -> ControllerState:
    """More became known of a death that was seen already: its status, why it was killed, or that a silent rank is gone."""
    assert member.dead is not None
    gone = replace(member, attached=False)
    if says_more(member.dead.text, cause.text):
        out.append(Journal("death_named", {"rank": rank, "text": cause.text}))
        gone = replace(gone, dead=cause)
        state = death_named(state, rank, member.dead, cause)
        if state.fault is not None:
            causes = tuple(cause if known is member.dead else known for known in state.fault.causes)
            state = state.with_fault(replace(state.fault, causes=causes))
    return replace(state, members=update(state.members, rank, gone))


def says_more(known: str, reported: str) -> bool:
    """Say whether an agent now knows better how a process has ended: the status, or why it was killed."""
    return reported != known and (known == EXITING_TEXT or reported.startswith(known))


def _exited_cleanly(
    state: ControllerState, rank: int, member: Member, now: float, out: list[Effect]
) -> ControllerState:
    """A rank whose `train` has returned left with status 0 without being released: no fault, but no holder either."""
    if member.dead is not None:
        return state
    out.append(Journal("left", {"rank": rank}))
    cause = Cause(CauseKind.EXITED, (rank,), "exit code 0 after its training had finished")
    state = forget(replace(state, members=mark_dead(state.members, rank, cause, True, now)), rank)
    return table_of(state).rank_lost(_owed_no_exit(state, rank), rank, now, out)


def early_fault(state: ControllerState, message: FaultReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank failed before the job had assembled: nothing is committed, all start again."""
    out.append(fault_line(message))
    state = sign_of_report(state, message, now)
    return leave(state, f"rank {message.rank} failed before the job had assembled: {message.cause.text}", now, out)


def fault_report(state: ControllerState, message: FaultReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank reports its own fault. It lives and stays a replica holder, but the job must save and restart."""
    if state.fault is not None and message.cause in state.fault.causes:
        return state  # said again after a reconnect
    out.append(fault_line(message))
    state = sign_of_report(state, message, now)
    if isinstance(state.at, Running):
        return begin_fault(state, (message.cause,), message.cause, now, out)
    return add_cause(state, message.cause, now)


def fault_while_regrouping(
    state: StateAt[Regrouping], message: FaultReport, now: float, out: list[Effect]
) -> ControllerState:
    """A rank reports a fault of its own while all regroup. That collectives fail whose groups are given up is expected."""
    if message.cause in state.at.fault.causes or message.rank in state.at.awaited:
        return state  # known, or of a process in whose place another one is to come
    out.append(fault_line(message))
    state = add_cause(sign_of_report(state, message, now), message.cause, now)
    if message.cause.kind is CauseKind.PEER_ERROR or message.rank in state.at.fault.wrong:
        return state  # of a process that is being replaced
    return regroup.ask_again(state, f"rank {message.rank}: {message.cause.text}", now, out)


def fault_line(message: FaultReport) -> Journal:
    fields: Fields = {"rank": message.rank, "kind": message.cause.kind.value, "text": message.cause.text}
    return Journal("fault_reported", {**fields, "detail": message.detail})


def finished(state: ControllerState, message: Finished, now: float, out: list[Effect]) -> ControllerState:
    """A rank's training is over; it stays as a holder until all are done."""
    member = state.members.table[message.rank]
    if member.finished:
        return state
    out.append(Journal("rank_finished", {"rank": message.rank}))
    return replace(state, members=update(state.members, message.rank, replace(member, finished=True)))
