"""What an exception out of training says about its cause (PURE).

Owns the texts by which a failed collective is known. A rank whose collective failed is a witness and seldom the culprit,
and the address in the text may even name a rank that only left in the cascade: who is dead, the controller finds out.
"""

from __future__ import annotations

import re

from ttp.proto.messages import Cause, CauseKind

_PEER_TEXTS = (
    # gloo; its errors are plain RuntimeErrors that carry the C++ file.
    r"connection closed by peer",
    r"(gloo|pair\.cc|unbound_buffer\.cc).*(connection reset by peer|broken pipe|connection refused|no route to host)",
    r"timed out waiting \d+ ?ms for (recv|send) operation",
    r"application timeout caused pair closure",
    r"connectfullmesh failed",
    # NCCL and the backends that follow its names.
    r"\b(nccl|mccl|rccl|hccl|ccl)remoteerror",
    r"remote process exited or there was a network error",
    r"watchdog caught collective operation timeout",
    r"(nccl|mccl|hccl) communicator was aborted",
    r"proxy call to rank \d+ failed",
    r"net(work)? ?/? ?ib ?: got completion from peer .* with status",
    # torch's key-value store, asked while its host dies.
    r"connection was likely closed\. did the remote server shutdown",
    r"failed to recv, got 0 bytes",
    # any backend, waited for with a timeout or checked by torch's monitored barrier.
    r"\[rank \d+\]: rank[s]? \d+.* failed to pass monitoredbarrier",
    r"rank \d+ successfully reached monitoredbarrier, but received errors",
)
_PEER = re.compile("|".join(f"(?:{text})" for text in _PEER_TEXTS), re.IGNORECASE | re.DOTALL)

_PEER_TYPES = frozenset({"AbortedCollective", "DistNetworkError", "WrongPeer"})
_DIVERGED_TYPES = frozenset({"ReplicasDiffer", "WrongReplica"})

_LONGEST_TEXT = 300


def classify(text: str, type_name: str = "") -> CauseKind:
    """Return PEER_ERROR when some other rank is the cause: of a collective's error, or of replicas that differ. DIVERGED: replicas differ, by this
    rank's, or no one knows by whose. Else EXCEPTION.

    text: the exception's message. type_name: its class's name, without the module.
    """
    if type_name in _DIVERGED_TYPES:
        return CauseKind.DIVERGED
    return CauseKind.PEER_ERROR if type_name in _PEER_TYPES or _PEER.search(text) else CauseKind.EXCEPTION


def cause_of(rank: int, type_name: str, text: str) -> Cause:
    """Return the cause that a rank reports for an exception out of its training; its text is one line for people."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line_text = f"{type_name}: {line}" if line else type_name
    return Cause(
        classify(text, type_name),
        (rank,),
        line_text if len(line_text) <= _LONGEST_TEXT else f"{line_text[:_LONGEST_TEXT]}...",
    )
