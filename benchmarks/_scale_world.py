"""A job that exists in name only, for `benchmarks.scale`: what its ranks register, report and write.

Rank r and rank r + W/2 are partners: they hold one shard group together, as with two replicas over a flat shard each.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from ttp.proto.messages import CommitRecord, FileEntry, Part, Phase, Registration, ShardGroup, StateReport

WORLD_FLAGS = ("size", "ranks_per_node", "ready_every", "heartbeat_s")
GROUP_BYTES = 1 << 28
STEP = 42


@dataclass(frozen=True, slots=True)
class World:
    """`ready_every` n: every n-th rank is READY when it freezes and has to roll forward; 0: none has to. `heartbeat_s`: between two
    envelopes of heartbeats of a stream, in each direction."""

    size: int
    ranks_per_node: int = 8
    ready_every: int = 0
    heartbeat_s: int = 1
    job_id: str = "scale"
    step: int = STEP

    @classmethod
    def from_flags(cls, words: list[str]) -> World:
        size, ranks_per_node, ready_every, heartbeat_s = (int(word) for word in words)
        return cls(size, ranks_per_node, ready_every, heartbeat_s)

    def flags(self) -> list[str]:
        return [str(value) for value in astuple(self)[: len(WORLD_FLAGS)]]

    def is_ready(self, rank: int) -> bool:
        return bool(self.ready_every) and rank % self.ready_every == 1


def commit_record(step: int) -> CommitRecord:
    return CommitRecord(step, 1.25, 0.8, False, 1.0, (3e-4, 3e-4), (2.5, 1e6))


def registration(world: World, rank: int) -> Registration:
    """Return what a rank reports of itself; sizes of its texts are those of the bundled trainer's registrations."""
    half = world.size // 2
    group = ShardGroup(
        f"{rank % half:016x}", f"shard {rank % half} of {half}: layers.0.wq[0:4096] and 47 more", GROUP_BYTES
    )
    layout = f'{{"bucket_numel": 6553600, "dp": {world.size}, "replicas": 2, "ring": false}}'
    return Registration(
        rank,
        world.size,
        f"node{rank // world.ranks_per_node}",
        1000 + rank,
        (group,),
        STEP,
        ("/checkpoints",),
        layout,
    )


def report(world: World, rank: int, freeze_id: int) -> StateReport:
    """Return a frozen rank's answer: done with the step, or READY for it without the commit record."""
    if world.is_ready(rank):
        return StateReport(rank, freeze_id, True, Phase.READY, STEP, STEP - 1, False, -1, (commit_record(STEP - 1),))
    return StateReport(rank, freeze_id, True, Phase.DONE, STEP, STEP, False, -1, (commit_record(STEP),))


def file_entry(parts: tuple[Part, ...], rank: int) -> FileEntry:
    share: Any = parts[0]
    return FileEntry(
        f"__{rank}_{share.group_id[:6]}.{share.index}.{share.count}_0.distcp", GROUP_BYTES, "ab" * 32, rank
    )
