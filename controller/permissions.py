"""What a process may say to a controller, by its certificate, and how often it was refused (PURE).

A rank speaks for itself, an agent for the ranks on its node, and no other process takes part. Without TLS there are no certificates: each is
believed, as far as this host's loopback or the site's network lets it come.
"""

from __future__ import annotations

from ttp.identity.role import Identity, Role
from ttp.proto.messages import AgentHello, FaultReport, ReplaceFailed, Upward, Vouch, WorkerExit

MOST_REFUSALS = 1_000
"""Whoever is refused with ever new words fills neither the memory nor the journal."""


def stream_refusal(peer: Identity | None, job_id: str) -> str:
    """Return why a process may not take part in this attempt; empty: it may."""
    if peer is None:
        return ""
    if peer.job_id != job_id:
        return f"got a certificate of job {peer.job_id!r}, expected one of {job_id!r}"
    return "" if peer.role in (Role.RANK, Role.AGENT) else f"got a stream of {peer}, expected a rank's or an agent's"


def carrier_refusal(peer: Identity | None) -> str:
    """Return why a process may not carry the streams of ranks; empty: it may."""
    return (
        ""
        if peer is None or peer.role is Role.AGENT
        else f"got the streams of ranks from {peer}, expected them from an agent"
    )


class Sender:
    """The process at the other end of one stream."""

    def __init__(self, peer: Identity | None) -> None:
        self._peer = peer
        self.is_believed = peer is None
        """Whatever it says: there are no certificates."""
        self._ranks = frozenset(peer.ranks) if peer is not None else frozenset()

    def refusal(self, message: Upward) -> str:
        """Return why it may not say this; empty: it may. Called for every message of every rank."""
        if self._peer is None:
            return ""
        said: tuple[int, ...]
        match message:
            case AgentHello(ranks=said) | Vouch(ranks=said):
                by_agent = True
            case WorkerExit(rank=rank) | ReplaceFailed(rank=rank):
                said, by_agent = (rank,), True
            case FaultReport(rank=rank, cause=cause):
                said, by_agent = (rank, *cause.ranks), False
            case _:
                said, by_agent = (message.rank,), False
        name = type(message).__name__
        if by_agent and self._peer.role is not Role.AGENT:
            return f"got {name} from {self._peer}, expected it from an agent"
        if not self._ranks.issuperset(said):
            foreign = min(set(said) - self._ranks)
            return f"got {name} for rank {foreign} from {self._peer}, expected it from that rank or its agent"
        return ""


def shutdown_refusal(peer: Identity | None, job_id: str, term: int, world_size: int) -> str:
    """Return why a process may not have this controller end; empty: it may. `term`: of the controller that takes over, 0: none does."""
    if peer is None:
        return ""
    if peer.job_id != job_id:
        return f"got a certificate of job {peer.job_id!r}, expected one of {job_id!r}"
    if peer.role is Role.AGENT or (peer.role is Role.RANK and world_size == 1):
        return ""
    if peer.role is Role.CONTROLLER and term == peer.term:
        return ""
    return f"got a request to end from {peer}, expected it from an agent or from the controller that takes over"


class Refusals:
    """How often each refusal was made."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, text: str) -> int:
        """Return how often it was made so far, at its first time, its tenth, its hundredth, and so on; 0: that is not worth a line."""
        if text not in self._counts and len(self._counts) >= MOST_REFUSALS:
            return 0
        self._counts[text] = count = self._counts.get(text, 0) + 1
        return count if str(count).strip("0") == "1" else 0
