"""The number of standbys behind the active controller: known, and restored when one is lost (PURE).

Owns who is asked to start a standby, one rank at a time: on a host without a controller where there is one. A rank that fails or does
not answer in time is passed over for the next one; when all have been, all are asked again after as long. Never starts a process: a rank
does. Nothing is asked for during a fault: what follows a dump starts with controllers of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttp.proto.frozen import replace
from ttp.proto.limits import MOST_ADDRESSES
from ttp.proto.messages import StandbyList, StandbyReport, StartStandby

from ..facts.events import Effect, Journal, Send, Tell
from ..facts.membership import Member, reachable, update
from ..facts.state import ControllerState, S


def learn_successors(state: S, addresses: Iterable[str], out: list[Effect]) -> S:
    """Add standbys to the list, which agents and ranks take over as it is: one order everywhere."""
    new = tuple(dict.fromkeys(address for address in addresses if address not in state.successors))
    new = new[: max(0, MOST_ADDRESSES - len(state.successors))]
    if not new:
        return state
    state = replace(state, successors=(*state.successors, *new))
    if state.agents:
        out.append(
            Tell(
                tuple(sorted(agent.host for agent in state.agents)),
                StandbyList(state.successors, state.settings.lease_s),
            )
        )
    return state


def spread(state: ControllerState, addresses: Iterable[str], out: list[Effect]) -> ControllerState:
    """Add standbys to the list, and send it to the ranks that are attached already."""
    before = state.successors
    state = learn_successors(state, addresses, out)
    recipients = reachable(state.members)
    if state.successors != before and recipients:
        out.append(Send(recipients, StandbyList(state.successors, state.settings.lease_s)))
    return state


def standby_report(state: ControllerState, message: StandbyReport, now: float, out: list[Effect]) -> ControllerState:
    """A rank has started a standby, could not, or has seen one end; said again on every stream."""
    rank, address, known = message.rank, message.address, state.restoring
    if not address:
        out.append(Journal("standby_failed", {"rank": rank, "text": message.error}))
        if known.asked == rank:
            known = replace(known, asked=-1, until=now, passed=known.passed | {rank})
        return replace(state, restoring=known)
    if not message.runs:
        if address not in known.lost and len(known.lost) >= MOST_ADDRESSES:
            return state
        if address not in known.lost:
            out.append(Journal("standby_lost", {"rank": rank, "address": address}))
        return replace(state, restoring=replace(known, lost=known.lost | {address}))
    if known.asked == rank:
        known = replace(known, asked=-1, until=now, passed=frozenset())
    if address not in state.successors:
        out.append(Journal("standby_started", {"rank": rank, "address": address}))
    return spread(replace(_noted(state, rank, address), restoring=known), (address,), out)


def _noted(state: ControllerState, rank: int, address: str) -> ControllerState:
    """A rank's standby goes with its node. Of two the older one is noted as long as it counts."""
    member = state.members.table[rank]
    if member.registration is None or member.registration.standby in state.standbys:
        return state
    changed = replace(member, registration=replace(member.registration, standby=address))
    return replace(state, members=update(state.members, rank, changed))


def restore(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
    """Ask a rank to start a standby where there are too few, and another one when it does not answer in time."""
    known = state.restoring
    if now < known.until or len(state.standbys) >= state.settings.standbys:
        return state
    if known.asked >= 0:
        known = replace(known, asked=-1, passed=known.passed | {known.asked})
    rank = _able(state, known.passed)
    until = now + state.settings.standby_start_s
    if rank < 0:  # all were asked: once more, later
        return replace(state, restoring=replace(known, until=until, passed=frozenset()))
    out.append(Journal("standby_asked", {"rank": rank, "left": len(state.standbys)}))
    out.append(Send((rank,), StartStandby()))
    return replace(state, restoring=replace(known, asked=rank, until=until))


def _able(state: ControllerState, passed: frozenset[int]) -> int:
    """Return the first rank that may be asked, of a host without a controller where there is one; -1: none."""
    taken = {host_of(address) for address in (state.settings.address, *state.standbys)}

    def may(member: Member) -> bool:
        return member.attached and member.dead is None

    able = [rank for rank in state.members.table.ranks(may) if rank not in passed]
    return min(able, key=lambda rank: (_host(state, rank) in taken, rank), default=-1)


def _host(state: ControllerState, rank: int) -> str:
    registration = state.members.table[rank].registration
    return registration.host if registration is not None else ""


def host_of(address: str) -> str:
    """Return the host of `host:port` or `[host]:port`."""
    return address.rpartition(":")[0].strip("[]")
