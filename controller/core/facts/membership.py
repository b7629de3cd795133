"""Who is registered, attached, silent, finished or dead (PURE).

Owns one record per rank, the counters over them, and the lease arithmetic. Never sends anything and never decides what
a death means: transitions do. A rank is *suspect* when its stream broke or most of its lease has passed in silence, and
*dead* when an agent saw its process end or its lease has run out. While the agent of a silent rank reports its process alive and
running, the lease is longer: such a rank compiles, or something else holds its interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ttp.proto.frozen import dataclass, replace
from ttp.proto.messages import NO_PROCESS, Cause, CauseKind, Registration, Vouch

from .events import ControllerSettings
from .per_rank import PerRank

SUSPECT_AFTER = 2 / 3
"""Part of the lease after which a silent rank that is still attached is suspect: gates close before it is declared
dead, and a rank that was only slow costs a short pause."""


VOUCHED_START_FACTOR = 3.0
"""The vouched lease before the eighth step, which is when ranks compile, is this many times as long."""
VOUCHED_PART = 1 / 4
"""The part of a fault's time that a vouched lease may take at most: what is decided then must still be done."""

HEARTBEATS_A_LEASE = 3
"""A heartbeat that comes more often than this makes neither the network nor a host faster: see `slow_heartbeat_s`."""
CUT_OFF_HEARTBEATS = 1.5
"""Of several ranks at least one sends within a heartbeat."""


@dataclass(frozen=True)
class Member:
    """One rank, as far as the controller knows. A rank that never registered counts as alive until an agent reports its exit."""

    registration: Registration | None = None
    attached: bool = False
    """Its stream is open."""
    received_at: float = -inf
    """When it last said anything."""
    vouched: float = -inf
    """When its agent last reported its process alive and running."""
    vouched_pid: int = 0
    """Which process that was."""
    named_at: float = -inf
    """When its agent last reported at all which processes run on its node."""
    suspect: bool = False
    dead: Cause | None = None
    exited_pid: int = 0
    """Which process has ended, as an agent reported before this rank registered here; 0: none."""
    finished: bool = False
    """`train` has returned."""


@dataclass(frozen=True)
class Membership:
    """All ranks with counters, so that no message needs a scan."""

    table: PerRank[Member]
    alive: int
    registered: int = 0
    attached: int = 0
    present: int = 0
    """Attached and not dead. A dead rank may still have a stream: its host was lost without a word, or it was only silent."""
    finished: int = 0
    suspects: int = 0
    """Suspects that are not dead."""
    leases_renewed_at: float = -inf
    """Silence before this moment does not count: the controller itself was away, or all ranks were."""
    away_until: float = -inf
    """The controller itself was away until then: silence before that proves nothing."""
    sweep_at: float = inf
    """No lease runs out before this moment."""
    empty_since: float = inf
    """Since when no live rank is attached; inf while one is, and before the first rank attached."""


@dataclass(frozen=True, slots=True)
class LeaseSweep:
    """What a look at all leases found."""

    members: Membership
    newly_suspect: tuple[int, ...]
    run_out: tuple[int, ...]
    """Ranks whose lease has passed: to be declared dead."""
    cut_off: bool = False
    """No rank, or hardly any, sends anything: the controller itself is cut off or was, and leases begin anew."""


def empty(world_size: int) -> Membership:
    """Return a membership without any registered rank."""
    return Membership(PerRank.filled(world_size, Member()), alive=world_size)


def update(members: Membership, rank: int, member: Member) -> Membership:
    """Replace one rank's record and keep the counters right."""
    old = members.table[rank]
    return replace(
        members,
        table=members.table.put(rank, member),
        registered=members.registered + _is_registered(member) - _is_registered(old),
        attached=members.attached + member.attached - old.attached,
        present=members.present + _is_present(member) - _is_present(old),
        alive=members.alive + (member.dead is None) - (old.dead is None),
        finished=members.finished + member.finished - old.finished,
        suspects=members.suspects + _is_suspect(member) - _is_suspect(old),
    )


def note_message(members: Membership, rank: int, now: float) -> Membership:
    """Note a message of an attached rank; O(sqrt(world))."""
    member = members.table[rank]
    if not member.attached:  # a leftover of a broken stream proves nothing about now
        return members
    changed = replace(member, received_at=now, suspect=False)
    if member.suspect:
        return update(members, rank, changed)
    return replace(members, table=members.table.put(rank, changed))


def note_messages(members: Membership, ranks: Iterable[int], now: float) -> Membership | None:
    """Note messages of these ranks, with each part of the table copied once; None when one of them is suspect."""
    table = members.table
    senders = {rank: table[rank] for rank in ranks}
    if any(member.suspect for member in senders.values()):
        return None
    attached = {rank: replace(member, received_at=now) for rank, member in senders.items() if member.attached}
    return replace(members, table=table.put_all(attached))


def vouch(members: Membership, message: Vouch, now: float) -> Membership:
    """Note that an agent found these processes alive and running; each part of the table is copied once.

    Nothing is believed of a process that is not the registered one. Of a rank that has not registered here it is noted with its
    process: a standby receives reports of agents before those of ranks whose interpreter is held.
    """
    table = members.table
    noted = {
        rank: _vouched(table[rank], pid, now)
        for rank, pid in zip(message.ranks, message.pids, strict=False)
        if 0 <= rank < table.size
    }
    return replace(members, table=table.put_all(noted)) if noted else members


def _vouched(member: Member, pid: int, now: float) -> Member:
    if pid == NO_PROCESS:
        return replace(member, named_at=now)
    if member.registration is None or member.registration.pid == pid:
        return replace(member, vouched=now, vouched_pid=pid, named_at=now)
    if member.dead is None or member.dead.kind is not CauseKind.EXITED:
        return member  # of the agent of a node that was given up, whose processes ran on behind a broken cable
    return replace(member, named_at=now)


def vouched_lease(settings: ControllerSettings, started: bool) -> float:
    """Return how long a rank may be silent whose agent vouches for it. `started`: the job has finished its eighth step."""
    longest_s = settings.vouched_lease_s * (1.0 if started else VOUCHED_START_FACTOR)
    return max(settings.lease_s, min(longest_s, VOUCHED_PART * settings.total_timeout_s))


def silent_since(member: Member, leases_renewed_at: float) -> float:
    """Return when a rank was last known to live, as far as its silence counts."""
    return max(member.received_at, leases_renewed_at)


def alive_at(member: Member, leases_renewed_at: float, settings: ControllerSettings, started: bool) -> float:
    """Return when a rank was last known to be alive: its lease runs from then.

    A vouch ages like a word of the rank's own, so a lost node keeps its time; and it counts only until the vouched lease is over.
    """
    since = silent_since(member, leases_renewed_at)
    longest = since + vouched_lease(settings, started) - settings.lease_s
    return max(since, min(member.vouched, longest))


def attach(members: Membership, registration: Registration, now: float, settings: ControllerSettings) -> Membership:
    """Note a registration on a fresh stream; it clears the suspicion against that rank."""
    rank = registration.rank
    known = members.table[rank]
    if members.present == 0 and known.dead is None:
        # Everybody had lost the controller: the others get a whole lease to come back as well.
        members = replace(members, leases_renewed_at=now, empty_since=inf)
    finished = known.finished or registration.finished
    member = replace(known, registration=registration, attached=True, received_at=now, suspect=False, finished=finished)
    if member.vouched_pid != registration.pid:
        member = replace(member, vouched=-inf)
    members = update(members, rank, member)
    if members.present == 0:  # it came, and had been reported dead before
        members = replace(members, empty_since=min(members.empty_since, now))
    return replace(members, sweep_at=min(members.sweep_at, now + SUSPECT_AFTER * settings.lease_s))


def detach(members: Membership, rank: int, now: float, settings: ControllerSettings, welcomed: bool) -> Membership:
    """Note a broken stream: the rank is suspect, and dead once its lease runs out.

    `welcomed` False: ranks do not send heartbeats yet, so the lease runs from the break.
    """
    member = members.table[rank]
    received_at = member.received_at if welcomed else now
    members = update(members, rank, replace(member, attached=False, suspect=True, received_at=received_at))
    expiry = max(received_at, members.leases_renewed_at) + settings.lease_s
    members = replace(members, sweep_at=min(members.sweep_at, expiry))
    return replace(members, empty_since=now) if members.present == 0 and member.dead is None else members


def mark_dead(members: Membership, rank: int, cause: Cause, gone: bool, now: float) -> Membership:
    """Note a death. `gone`: the process is known to have ended, so its stream counts as closed."""
    member = members.table[rank]
    attached = member.attached and not gone
    members = update(members, rank, replace(member, dead=cause, attached=attached))
    emptied = members.present == 0 and _is_present(member)
    return replace(members, empty_since=now) if emptied else members


def was_only_silent(member: Member) -> bool:
    """True for a rank that was taken for dead because it was silent, and whose stream is open."""
    return member.dead is not None and member.attached and member.dead.kind is CauseKind.SILENT


def only_lost_nodes(members: Membership, now: float, settings: ControllerSettings) -> bool:
    """Return whether every rank that still has a stream is lost with its node: it counts as dead, and it and its agent have been silent for a
    lease. O(world), and only when no live rank is attached.

    An agent that lives reports three times a lease, also where no process of its node runs. One that has never reported here proves nothing.
    """
    if members.present:
        return False
    until = now - settings.lease_s
    return all(
        -inf < member.named_at and max(member.received_at, member.named_at, members.leases_renewed_at) <= until
        for member in members.table
        if member.attached
    )


def mark_alive(members: Membership, rank: int, now: float) -> Membership:
    """Note that a rank that was only silent, and is attached, lives."""
    if members.present == 0:
        members = replace(members, leases_renewed_at=now, empty_since=inf)
    return update(members, rank, replace(members.table[rank], dead=None, suspect=False, received_at=now))


def renew_all_leases(members: Membership, now: float, settings: ControllerSettings) -> Membership:
    """Start every lease anew: the silence was the controller's own."""
    return replace(members, leases_renewed_at=now, sweep_at=now + SUSPECT_AFTER * settings.lease_s)


def controller_resumed(members: Membership, now: float, settings: ControllerSettings) -> Membership:
    """The controller's own process was stopped, or its clock leapt: silence of ranks counts from now on."""
    return renew_all_leases(replace(members, away_until=now), now, settings)


def clock_went_back(members: Membership, now: float, settings: ControllerSettings) -> Membership:
    """The controller's clock leapt back: no message came in the future. O(world), and rare."""
    later = {
        rank: replace(
            member,
            received_at=min(member.received_at, now),
            vouched=min(member.vouched, now),
            named_at=min(member.named_at, now),
        )
        for rank, member in enumerate(members.table)
        if max(member.received_at, member.vouched, member.named_at) > now
    }
    return controller_resumed(replace(members, table=members.table.put_all(later)), now, settings)


def slow_heartbeat_s(settings: ControllerSettings) -> float:
    """Return the heartbeat that delays are measured in: one, or a third of a lease where that is longer.

    With heartbeats every 0.05 s, messages that take 0.08 s would look like a cut, and a host that keeps the controller for as long
    like one that stopped it: each time the dead ranks would keep their lives for a lease more. Agents vouch no more often, either.
    """
    return max(settings.heartbeat_s, settings.lease_s / HEARTBEATS_A_LEASE)


def cut_off_s(settings: ControllerSettings) -> float:
    """Return how long all ranks may be silent before this controller counts as cut off."""
    return CUT_OFF_HEARTBEATS * slow_heartbeat_s(settings)


def sweep_leases(
    members: Membership, now: float, settings: ControllerSettings, welcomed: bool, started: bool
) -> LeaseSweep:
    """Look at every lease; O(world), but not before `sweep_at`.

    `welcomed` False: ranks do not send heartbeats yet, so that only broken streams count. `started`: see `vouched_lease`.
    """
    late_at = now - cut_off_s(settings)
    spoke_at = max((member.received_at for member in members.table if member.attached), default=-inf)
    if members.present == 0 and spoke_at < late_at:  # no rank answers: it is the controller that is cut off
        again_at = now + slow_heartbeat_s(settings) if members.attached else inf
        return LeaseSweep(replace(members, sweep_at=again_at), (), ())
    newly_suspect, run_out, next_at, last_received, silent_ranks = [], [], inf, spoke_at, 0
    for rank, member in enumerate(members.table):
        if member.dead is not None or member.registration is None or (member.attached and not welcomed):
            continue
        alive = alive_at(member, members.leases_renewed_at, settings, started)
        suspect_at, dead_at = alive + SUSPECT_AFTER * settings.lease_s, alive + settings.lease_s
        last_received = max(last_received, member.received_at, member.vouched)
        silent_ranks += member.received_at < late_at
        if now >= dead_at:
            run_out.append(rank)
        elif member.suspect or now >= suspect_at:
            next_at = min(next_at, dead_at)
            if not member.suspect:
                newly_suspect.append(rank)
        else:
            next_at = min(next_at, suspect_at)
    for rank in newly_suspect:
        members = update(members, rank, replace(members.table[rank], suspect=True))
    quiet_s = now - max(last_received, members.away_until)
    if run_out and welcomed and cut_off_s(settings) < quiet_s < settings.orphan_timeout_s:
        # No other rank sends either, if there is one: most likely it is the controller that is cut off. The ranks that it could
        # give orders to are silent anyway, so it renews all their leases, until their death is certain.
        return LeaseSweep(renew_all_leases(members, now, settings), tuple(newly_suspect), (), True)
    most_silent = welcomed and 2 * silent_ranks > members.alive
    if run_out and most_silent and members.leases_renewed_at < max(members.table[rank].received_at for rank in run_out):
        # Most have been silent for that long: the controller was cut off, and their messages are under way behind the first ones.
        # They get a lease more, once: they may have died together.
        return LeaseSweep(renew_all_leases(members, now, settings), tuple(newly_suspect), (), True)
    return LeaseSweep(replace(members, sweep_at=next_at), tuple(newly_suspect), tuple(run_out))


def silent(members: Membership) -> bool:
    """True while no live rank is attached, or all of them are silent: a decision now reaches no rank. O(1)."""
    return members.present == 0 or 0 < members.suspects == members.alive


def reachable(members: Membership) -> tuple[int, ...]:
    """Return the ranks with an open stream, dead ones that were only silent included. O(world)."""
    return members.table.ranks(lambda member: member.attached)


def _is_present(member: Member) -> bool:
    return member.attached and member.dead is None


def _is_registered(member: Member) -> bool:
    return member.registration is not None


def _is_suspect(member: Member) -> bool:
    return member.suspect and member.dead is None
