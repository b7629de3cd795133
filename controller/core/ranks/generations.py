"""Which of several processes has a rank's place (PURE).

A node that was given up for lost may come back, and its processes with it, when others are in their places. They are distinguished by their
generation: all have begun the newest that any process has found whole (L22), and in one place each process begins a newer one than those before it.
"""

from __future__ import annotations

from ttp.proto.frozen import replace
from ttp.proto.messages import EXIT_CODE_PERSISTED, AgentHello, Exit, Registration

from ..facts.events import Effect, Journal, Tell
from ..facts.membership import Member, update
from ..facts.state import ControllerState, Gathering, Regrouping, S, Standby

ENDS = "its node was given up for lost, and other processes are in its ranks' places"
REPLACED = "its process was given up, and another one has that place"


def begun(process: Registration | None) -> int:
    """Return the newest generation that a process has begun: it has made its groups, makes them, or was started for it."""
    return max(process.generation, process.vacant) if process is not None else 0


def refusal(state: ControllerState, message: Registration) -> str:
    """Return why this process is not the one in its rank's place: it is to exit, whatever it holds. Empty: it is, as far as is known here."""
    known = state.members.table[message.rank].registration
    needed = max(state.generation, begun(known))
    at = state.at
    if isinstance(at, Regrouping) and at.dump.regroup is not None and message.rank in at.dump.regroup.replaced:
        needed = max(needed, state.freeze_id)
    if begun(message) >= needed:
        return ""
    return f"process {message.pid} on {message.host} is of generation {begun(message)} of the job's groups, which are in {needed}: {REPLACED}"


def leads_earlier(state: ControllerState, message: Registration) -> bool:
    """Say whether this controller has taken over with processes of an earlier generation than this one's alone: the job trains on without them. It
    does not take this one in, which goes on to another controller."""
    if message.regrouped <= max(state.generation, state.begun_generation) or isinstance(state.at, Standby | Gathering):
        return False
    return all(begun(member.registration) < message.regrouped for member in state.members.table)


def note_generation(state: S, message: Registration, out: list[Effect]) -> S:
    """Learn the newest generation that is whole. To a controller that gathers its ranks earlier processes may have come first,
    or the word of their ends: as if they had not."""
    newest = max(state.generation, message.regrouped)
    grew, state = newest > state.generation, replace(state, generation=newest)
    if not isinstance(state.at, Gathering):
        return state
    members, earlier = state.members, set()
    for rank in range(members.table.size) if grew else (message.rank,):  # the others were looked at as it grew
        member = members.table[rank]
        known = member.registration
        least = max(newest, begun(message)) if rank == message.rank else newest
        ended = rank == message.rank and known is None and member.exited_pid not in (0, message.pid)
        if ended or (known is not None and begun(known) < least):
            host, pid = (known.host, known.pid) if known is not None else ("", member.exited_pid)
            out.append(Journal("earlier_process", {"rank": rank, "host": host, "pid": pid}))
            members = update(members, rank, Member())
            earlier.add(rank)
    if not earlier:
        return state
    early = tuple(cause for cause in state.at.early if not earlier.issuperset(cause.ranks) or not cause.ranks)
    signs = tuple(sign for sign in state.notes.signs if sign.rank not in earlier)
    at = replace(state.at, early=early)
    return replace(state, members=members, at=at, notes=replace(state.notes, signs=signs))


def is_of_lost_node(state: ControllerState, message: AgentHello, out: list[Effect]) -> bool:
    """Say whether this agent's node was given up for lost, and have it end its ranks' processes then."""
    if not message.ranks or message.host not in state.lost_hosts:
        return False
    out.append(Journal("lost_node_back", {"host": message.host, "ranks": message.ranks}))
    out.append(Tell((message.host,), Exit(EXIT_CODE_PERSISTED, ENDS)))
    return True
