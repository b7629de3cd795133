"""What a process may say to a controller, by its certificate (PURE).

A rank speaks for itself, an agent for the ranks on its node, and no other process takes part. Without TLS there are no certificates: each is
believed, as far as this host's loopback or the site's network lets it come.
"""

from __future__ import annotations

from ttp.identity.role import Identity, Role
from ttp.proto.messages import AgentHello, FaultReport, Upward, Vouch, WorkerExit


def stream_refusal(peer: Identity | None, job_id: str) -> str:
    """Return why a process may not take part in this attempt; empty: it may."""
    if peer is None:
        return ""
    if peer.job_id != job_id:
        return f"got a certificate of job {peer.job_id!r}, expected one of {job_id!r}"
    return "" if peer.role in (Role.RANK, Role.AGENT) else f"got a stream of {peer}, expected a rank's or an agent's"


def message_refusal(peer: Identity | None, message: Upward) -> str:
    """Return why a process may not say this; empty: it may."""
    if peer is None:
        return ""
    by_agent = isinstance(message, AgentHello | WorkerExit | Vouch)
    if by_agent and peer.role is not Role.AGENT:
        return f"got {type(message).__name__} from {peer}, expected it from an agent"
    said = message.ranks if isinstance(message, AgentHello | Vouch) else (message.rank,)
    if isinstance(message, FaultReport):
        said = (*said, *message.cause.ranks)
    if foreign := sorted(set(said) - set(peer.ranks)):
        return (
            f"got {type(message).__name__} for rank {foreign[0]} from {peer}, expected it from that rank or its agent"
        )
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
