"""What is searched: the job's size, its settings, and the faults that may happen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ttp.proto.messages import CommitRecord, ShardGroup

FAULTS = (
    "kill",
    "stop",
    "raise",
    "hang",
    "break",
    "controller kill",
    "controller stop",
    "full disk",
)
"""Kinds of faults. A stopped process may go on at any later moment, without that counting as a fault."""
FAULTS_IN_PLACE = (*FAULTS, "replace fails")
"""With those that there are only where ranks may regroup: an agent cannot start a process in another's place."""

THREE_RANKS = ((0, 1), (1, 2))
"""Holders of two shards, of which one rank has both."""


@dataclass(frozen=True)
class Shape:
    """One search: 2 shards with 2 holders each, so many steps, standbys and faults; times in seconds, powers of two."""

    steps: int = 2
    calm_steps: int = 0
    """Steps that are finished before anything goes wrong."""
    faults: int = 2
    standbys: int = 1
    kinds: tuple[str, ...] = FAULTS
    each_once: bool = False
    """No kind comes twice."""
    agents: bool = True
    peer_errors: int = 1
    """How many ranks' collectives raise on account of a dead peer; the others hang, as gloo's do."""
    parts: int = 1
    """Parts that each shard is written in."""
    roots: tuple[str, ...] = ("/a", "/b")
    holders: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))

    heartbeat_s: float = 0.25
    lease_s: float = 0.75
    reconnect_s: float = 0.125
    freeze_timeout_s: float = 1.0
    update_timeout_s: float = 0.5
    """How long a rank waits for the end of its update before it reports that the gate is not closed."""
    progress_timeout_s: float = 1.0
    total_timeout_s: float = 16.0
    controller_lost_s: float = 4.0
    in_place_s: float = 0.0
    """How long ranks may take to regroup before a checkpoint is written instead; 0: that is not tried."""
    publish_first: bool = False
    """The step is published before the ranks regroup."""
    late_agents: bool = False
    """An agent may replace a process also when the controller that lives and ordered it writes a checkpoint by now."""

    @cached_property
    def world_size(self) -> int:
        return 1 + max(rank for ranks in self.holders for rank in ranks)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(f"g{index}" for index in range(len(self.holders)))

    def spent_by(self, kind: str) -> int:
        """Return the bit of a kind that cannot come any more once it came; 0: it may come again, or does not count as a fault."""
        return 1 << FAULTS_IN_PLACE.index(kind) if self.each_once and kind in FAULTS_IN_PLACE else 0

    def groups_of(self, rank: int) -> tuple[ShardGroup, ...]:
        """Return what a rank registers."""
        nbytes = 4096 * self.parts
        return tuple(
            ShardGroup(name, name, nbytes)
            for name, ranks in zip(self.groups, self.holders, strict=True)
            if rank in ranks
        )

    def record(self, step: int) -> CommitRecord:
        """Return the commit record of a step."""
        return CommitRecord(step, 1.0, 1.0, False, 1.0, (0.5,), ())
