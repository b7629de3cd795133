"""Which nodes are lost, and which spare one takes each one's place (PURE).

Owns when a node counts as lost. Its processes may run on behind a broken network. They lack rank 0's there, which is never replaced for its silence,
and so they finish no step that this side does not finish with the same bits (L22). Never sends anything.
"""

from __future__ import annotations

from math import inf

from ttp.proto.frozen import dataclass
from ttp.proto.messages import CauseKind

from ..facts.membership import Member
from ..facts.state import Ordered, StateAt


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node, by its host, with its ranks, and the spare one whose agent is to start their processes."""

    host: str
    ranks: tuple[int, ...]
    spare: str


def lost_nodes(state: StateAt[Ordered], now: float) -> tuple[LostNode, ...]:
    """Return the lost nodes for which there is a spare one. A spare has room for one node of its own size. O(world)."""
    room = {agent.host: agent.places for agent in state.agents if agent.places}
    found = []
    for host, ranks in _all_lost(state, now).items() if room else ():
        spare = next((name for name, places in room.items() if places == len(ranks)), "")
        if spare:
            del room[spare]
            found.append(LostNode(host, ranks, spare))
    return tuple(found)


def _all_lost(state: StateAt[Ordered], now: float) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each node that is lost whole, by its host; never rank 0's node."""
    nodes: dict[str, list[int]] = {}
    for rank, member in enumerate(state.members.table):
        host = member.registration.host if member.registration is not None else ""
        nodes.setdefault(host, []).append(rank)
    return {
        host: tuple(ranks)
        for host, ranks in nodes.items()
        if host and 0 not in ranks and all(_is_lost(state, rank, state.members.table[rank], now) for rank in ranks)
    }


def _is_lost(state: StateAt[Ordered], rank: int, member: Member, now: float) -> bool:
    """Say whether a rank has ended or been silent for a lease, and its agent silent as long, and whether it carries out nothing for this fault:
    what it was ordered to write it may still be writing."""
    if member.dead is None or state.at.dump.work[rank].given or any(asked == rank for asked, _ in state.at.dump.asked):
        return False
    if member.dead.kind is CauseKind.EXITED and not member.attached:
        last = member.named_at
    elif member.dead.kind is CauseKind.SILENT:
        last = max(member.received_at, member.named_at)
    else:
        return False
    reported = -inf < member.named_at  # an agent that never has proves nothing by its silence
    return reported and now >= max(last, state.members.leases_renewed_at) + state.settings.lease_s
