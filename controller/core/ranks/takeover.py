"""How a standby becomes the active controller (PURE).

Owns the two stages before everything else: STANDBY, in which no rank has come yet, and GATHERING, in which the ranks that
lost their controller come one after the other. Their registrations are all there is to know; afterwards every gate is
closed once, to find what an earlier controller had begun and no one finished. Ranks that it only froze, or
that have all regrouped, are thawed; one that was rolled forward, took an order to write or publish, regroups still, or is not filled makes a
dump necessary. Never decides about the dump itself.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import replace
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Downward,
    FaultReport,
    Registration,
    WorkerExit,
)

from ..dump.finish import finish_job, leave, over
from ..dump.freeze import add_cause, begin_fault
from ..facts.coverage import coverage_of, named, survives, warnings
from ..facts.events import EarlierLives, Effect, Fields, Journal, LookFor, Send, Supersede, TurnAway
from ..facts.incident import EXITING_TEXT, began, death_named, sign_of_death, sign_of_report, signs_of
from ..facts.membership import SUSPECT_AFTER, Member, empty, mark_dead, renew_all_leases, update
from ..facts.pace import at_start
from ..facts.state import ControllerState, Freezing, Gathering, Notes, Standby, StateAt, goto
from .generations import REPLACED, begun
from .liveness import CLEAN_EXIT_TEXT, fault_line, register, says_more, welcome

SUPERSEDE_PART = 1 / 3
"""The part of a lease, from its answer on, in which a controller obeys that it is to end: its ranks have the rest to come."""


def first_rank_came(state: StateAt[Standby], message: Registration, now: float, out: list[Effect]) -> ControllerState:
    """A rank has given up its controller: gather all of them, and look for the earlier controllers, should one live."""
    settings, generation = state.settings, begun(message)
    earlier = _earlier(settings.address, message.controllers)
    fields: Fields = {"term": settings.term, "rank": message.rank, "earlier": earlier}
    out.append(Journal("takeover_began", fields))
    if earlier:
        out.append(LookFor(earlier))
    at = Gathering(
        now + settings.lease_s, gather_by=now + settings.orphan_timeout_s, looked=generation, earlier=earlier
    )
    return register(began(goto(state, at), now), message, now, out)


def another_rank_came(
    state: StateAt[Gathering], message: Registration, now: float, out: list[Effect]
) -> ControllerState:
    """One more has given up its controller. Earlier controllers that it alone knows are looked for too.

    If it is of a later generation than the ranks before, it is as if it were the first: these may be of nodes that were given up, and an earlier
    controller that leads the later generation has led on.
    """
    at, settings, generation = state.at, state.settings, begun(message)
    if generation > at.looked:
        deadline = max(at.deadline, now + settings.lease_s)
        at = Gathering(deadline, now + settings.orphan_timeout_s, at.last_message_at, at.early, looked=generation)
    earlier = tuple(each for each in _earlier(settings.address, message.controllers) if each not in at.earlier)
    if earlier:
        out.append(LookFor(earlier))
        at = replace(at, earlier=(*at.earlier, *earlier))
    return register(replace(state, at=at), message, now, out)


def earlier_lives(state: StateAt[Gathering], event: EarlierLives, now: float, out: list[Effect]) -> ControllerState:
    """An earlier controller is alive: it was only slow, stopped or cut off. It is ordered to end, as it would keep its ranks, and neither side could be
    sure of a holder of every shard. These ranks have time to come here as from the beginning, so that none is given up just as its controller ends; but
    answers postpone the takeover until `gather_by` only.

    If the job has gone on to a later generation than all that came here, it leads on: they are of nodes that were given up, and exit.
    """
    at = state.at
    if event.generation > newest_begun(state):
        return _stand_by_again(state, event, out)
    if now >= at.gather_by:
        return end_earlier(state, event, now, out)
    out.append(Supersede(event.address, newest_begun(state), event.look))
    deadline = max(at.deadline, min(now + state.settings.lease_s, at.gather_by))
    return replace(state, at=replace(at, deadline=deadline, waited_longer=False))


def _stand_by_again(state: StateAt[Gathering], event: EarlierLives, out: list[Effect]) -> ControllerState:
    """As if none of these ranks had come: those in their places may need this controller yet."""
    came = [(rank, member.registration) for rank, member in enumerate(state.members.table)]
    processes, size = tuple((rank, known.pid) for rank, known in came if known is not None), state.settings.world_size
    ranks = tuple(rank for rank, _ in processes)
    out.append(Journal("stands_by_again", {"ranks": ranks, "generation": event.generation, "said_by": event.address}))
    out.append(TurnAway(processes, REPLACED))
    pace = at_start(state.settings)
    state = replace(state, members=empty(size), notes=Notes(), pace=pace, generation=event.generation)
    return goto(state, Standby())


def end_earlier(state: ControllerState, event: EarlierLives, now: float, out: list[Effect]) -> ControllerState:
    """An earlier controller answered after the takeover. It is ordered to end if the ranks here cover all shards; otherwise it leads on, as its ranks may
    hold what they lack."""
    if _covers(state) and event.generation <= newest_begun(state):
        out.append(Supersede(event.address, newest_begun(state), event.look))
    return state


def newest_begun(state: ControllerState) -> int:
    """Return the newest generation that a process has begun which has come here. O(world), and rare."""
    return max((begun(member.registration) for member in state.members.table), default=0)


def _earlier(own: str, controllers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the controllers that stand before this one in the ranks' list."""
    return controllers[: controllers.index(own)] if own in controllers else ()


def note_exit(state: ControllerState, message: WorkerExit, now: float, out: list[Effect]) -> ControllerState:
    """An agent reports an exit. A process that exited with status 0 before it came here had been released."""
    rank, member = message.rank, state.members.table[message.rank]
    if member.registration is not None and member.registration.pid != message.pid:
        return state  # an earlier process of that rank
    cause = Cause(CauseKind.EXITED, (rank,), message.text)
    exited_cleanly = message.text == CLEAN_EXIT_TEXT and (member.registration is None or member.finished)
    members = state.members
    if member.dead is None:
        fields: Fields = {"rank": rank, "kind": cause.kind.value, "text": cause.text, "host": "", "pid": message.pid}
        out.append(Journal("left" if exited_cleanly else "death_seen", fields))
        members = mark_dead(members, rank, cause, True, now)
        state = state if exited_cleanly else sign_of_death(state, rank, cause, now, message.pid)
    elif not says_more(member.dead.text, cause.text):
        return state
    else:
        state = death_named(state, rank, member.dead, cause)
    finished = member.finished or exited_cleanly
    exited_pid = message.pid if member.registration is None else member.exited_pid
    gone = replace(members.table[rank], dead=cause, finished=finished, exited_pid=exited_pid)
    members = update(members, rank, gone)
    return replace(state, members=members)


def note_fault(state: StateAt[Gathering], message: FaultReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank repeats its report to the lost controller, or reports for the first time."""
    if message.cause in state.at.early or not state.members.table[message.rank].attached:
        return state  # known already, or of a process that is not the one in its rank's place
    out.append(fault_line(message))
    state = sign_of_report(state, message, now)
    return replace(state, at=replace(state.at, early=(*state.at.early, message.cause)))


def gather_ranks(state: StateAt[Gathering], now: float, out: list[Effect]) -> ControllerState:
    """Take over once every rank has come or is known to be dead, or a lease has passed; two where those that came do not cover."""
    at, members, settings = state.at, state.members, state.settings
    if members.alive == 0 or members.finished == settings.world_size:
        return _nothing_left_to_do(state, out)
    awaited = members.table.ranks(lambda member: member.dead is None and not member.attached)
    if (awaited or _may_have_been_released(state)) and now < at.deadline:
        return state
    if not members.present:
        return state  # all have gone again: they come back, or the orphan timeout ends this
    received = [member.received_at for member in members.table if member.attached and _trains(member)]
    last_received = max(members.away_until, *received) if received else inf
    if awaited and last_received + SUSPECT_AFTER * settings.lease_s <= now < last_received + settings.orphan_timeout_s:
        # Those that came are silent too: it is this controller that is cut off, and the others cannot reach it.
        return replace(state, at=replace(at, deadline=now + settings.lease_s))
    absent = members.table.ranks(lambda member: member.dead is None and member.registration is None)
    if absent and not at.waited_longer and not _covers(state):
        # Whoever stood still itself for a moment gave the lost controller a new lease, and comes as much later.
        return replace(state, at=replace(at, deadline=now + settings.lease_s, waited_longer=True))
    if _waits_for_vouched(state, absent, now):
        return replace(state, at=replace(at, deadline=min(now + settings.lease_s, at.gather_by)))
    for rank in absent:
        cause = Cause(CauseKind.SILENT, (rank,), f"it did not come to the new controller within {settings.lease_s:g} s")
        out.append(Journal("death_seen", {"rank": rank, "kind": cause.kind.value, "text": cause.text}))
        state = signs_of(state, cause, now)
        members = mark_dead(members, rank, cause, False, now)
    registrations = [member.registration for member in members.table if member.registration is not None]
    coverage = coverage_of(registrations, settings.world_size)
    known_groups = max(registration.job_groups for registration in registrations)
    whole = members.registered == settings.world_size
    state = replace(
        state,
        members=renew_all_leases(members, now, settings),
        coverage=coverage,
        survives=survives(coverage) if whole else "",
        job_groups=max(known_groups, len(coverage.groups)),
    )
    deaths = tuple(member.dead for member in members.table if member.dead is not None and not member.finished)
    came = members.table.ranks(lambda member: member.registration is not None)
    fields: Fields = {"term": settings.term, "ranks": came, "absent": absent, "survives": state.survives}
    out.append(Journal("took_over", {**fields, "warnings": warnings(coverage) if whole else ()}))
    if not whole and not known_groups and not any(registration.vacant for registration in registrations):
        return leave(state, "the controller was lost before the job had assembled", now, out)
    for rank in members.table.ranks(lambda member: member.attached and member.dead is None and not _trains(member)):
        out.append(Send((rank,), welcome(state, rank)))
    suspicion = Cause(CauseKind.CONTROLLER_LOST, (), f"the controller was lost; term {settings.term} took over")
    return begin_fault(state, (*deaths, *at.early), suspicion, now, out, takeover=True)


def _trains(member: Member) -> bool:
    """True when a controller has welcomed this rank: it knows how many shard groups the job has, and may have trained since."""
    return member.registration is not None and member.registration.job_groups > 0


def welcome_again(state: StateAt[Gathering], rank: int) -> tuple[Downward, ...]:
    """A rank that no controller has welcomed is not welcomed before this one has taken over: it would begin to train, and a step that it finishes
    could not be saved while it is not known whether the job had assembled."""
    return (welcome(state, rank),) if _trains(state.members.table[rank]) else ()


def _waits_for_vouched(state: StateAt[Gathering], absent: tuple[int, ...], now: float) -> bool:
    """True while nothing is known to have failed, and an agent sees the process of a rank running that has not come: something
    holds its interpreter. Training continues meanwhile; ranks that wait for a decision are not kept waiting."""
    table, settings = state.members.table, state.settings
    failed = state.at.early or table.ranks(lambda member: member.dead is not None and not member.finished)
    if failed or now >= state.at.gather_by:
        return False
    return any(now < table[rank].vouched + settings.lease_s for rank in absent)


def _covers(state: ControllerState) -> bool:
    """True when those that came, and live, hold every shard that any of them knows of."""
    came = (member for member in state.members.table if member.dead is None)
    registrations = [member.registration for member in came if member.registration is not None]
    known = max((registration.job_groups for registration in registrations), default=inf)
    return len(coverage_of(registrations, state.settings.world_size).groups) >= known


def _may_have_been_released(state: ControllerState) -> bool:
    """True while some rank is ending with an unknown status, and all that came here have finished their training."""
    came = [member for member in state.members.table if member.registration is not None and member.dead is None]
    ending = any(member.dead is not None and member.dead.text == EXITING_TEXT for member in state.members.table)
    return ending and all(member.finished for member in came)


def _nothing_left_to_do(state: ControllerState, out: list[Effect]) -> ControllerState:
    if state.members.finished == state.settings.world_size:
        return finish_job(state, out)
    return over(state, "all ranks have ended", out)


def stand_by(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Wait until a rank comes; end when all ranks are known to have ended, so that none will."""
    return over(state, "all ranks have ended", out) if state.members.alive == 0 else state


def decide_takeover(state: StateAt[Freezing], now: float, out: list[Effect]) -> StateAt[Freezing]:
    """After the takeover's freeze, without any cause so far: name one where the gates cannot all be opened again.

    Leaves the causes empty when they can. Called when every report is in or the round's time is over.
    """
    fault, alive = state.at.fault, state.members.table.ranks(lambda member: member.dead is None)
    mute = tuple(rank for rank in alive if fault.reports[rank] is None)
    final = tuple(report.rank for report in fault.reports if report is not None and report.final)
    newest = max(state.generation, *(begun(state.members.table[rank].registration) for rank in alive))
    earlier = tuple(rank for rank in alive if begun(state.members.table[rank].registration) < newest)
    if mute:
        cause = Cause(CauseKind.SILENT, mute, f"{named('rank', mute)} did not answer the new controller's freeze")
        state = signs_of(state, cause, now)
    elif final:
        text = f"{named('rank', final)} had begun a dump for the controller that was lost"
        cause = Cause(CauseKind.CONTROLLER_LOST, final, text)
    elif earlier:
        text = f"{named('rank', earlier)} had not begun generation {newest} of the groups, as others had"
        cause = Cause(CauseKind.CONTROLLER_LOST, earlier, text)
    else:
        return state
    return add_cause(state, cause, now)
