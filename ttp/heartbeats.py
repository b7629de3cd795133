"""How often the ranks of a job send heartbeats, and whether their nodes' relays carry them (PURE)."""

from __future__ import annotations

STREAMS_A_SECOND = 2000.0
"""One controller takes a heartbeat of so many streams each second, and sends one to each: less than half of a core, so that a fault has the rest."""
RELAYED_A_SECOND = 10_000.0
"""And of so many ranks whose nodes have relays, eight ranks to a node."""
RELAYED_FROM = 2001
"""From so many ranks on a job has relays, unless TTP_RELAY says otherwise: a stream each would need rarer heartbeats."""
SLOWEST_HEARTBEAT_S = 5.0
"""However many ranks there are: a takeover and a dump must fit into TTP_OT."""


def is_relayed(asked: bool | None, world_size: int) -> bool:
    """Say whether the ranks' streams go through relays. `asked`: TTP_RELAY; None: it is not set."""
    return world_size >= RELAYED_FROM if asked is None else asked


def usual_heartbeat_s(world_size: int, relayed: bool = False) -> float:
    """Return the seconds between two heartbeats of a job of so many ranks."""
    return min(SLOWEST_HEARTBEAT_S, max(1.0, world_size / (RELAYED_A_SECOND if relayed else STREAMS_A_SECOND)))


def heartbeat_warning(heartbeat_s: float, world_size: int, relayed: bool = False) -> str:
    """Return a warning where a heartbeat is set that one controller cannot take from so many ranks; empty: it can."""
    usual_s = usual_heartbeat_s(world_size, relayed)
    if heartbeat_s >= usual_s:
        return ""
    return (
        f"a heartbeat every {heartbeat_s:g} s from {world_size} ranks (TTP_HEARTBEAT_S, or a third of TTP_LEASE_S): expected {usual_s:g} s or more, as a"
        f" controller takes some {RELAYED_A_SECOND if relayed else STREAMS_A_SECOND:g} a second, and one that falls behind takes ranks for silent. Unset both"
    )
