"""What a simulated job is made of: its times, and its directories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """The simulated job's settings, seconds."""

    heartbeat_s: float = 0.2
    lease_s: float = 0.6
    vouched_lease_s: float = 1.5
    freeze_timeout_s: float = 0.8
    progress_timeout_s: float = 1.0
    total_timeout_s: float = 20.0
    register_timeout_s: float = 4.0
    orphan_timeout_s: float = 3.0
    controller_lost_s: float = 3.0
    hang_floor_s: float = 60.0
    hang_factor: float = 10.0
    hang_start_s: float = 1800.0
    boundary_s: float = 0.3
    standby_start_s: float = 1.0
    in_place_s: float = 0.0
    publish_first: bool = False


@dataclass(frozen=True)
class OwnDirectories:
    """Each host has directories of its own, of the same names. `fragile`: hosts whose disk goes when all their ranks are killed."""

    names: tuple[str, ...] = ("/a", "/b")
    fragile: frozenset[str] = frozenset()
