"""Messages that are lost although their stream lives: one that could not be encoded, or that a side failed to take.

No stream breaks, so that no rank registers anew and receives everything again: only a heartbeat shows what is missing.
"""

from __future__ import annotations

import random

from tests.simulation.job import Job
from ttp.proto.messages import (
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Published,
    PublishOrder,
    Regroup,
    Regrouped,
    Release,
    RolledForward,
    RollForward,
    StateReport,
    Thaw,
    Welcome,
    WriteOrder,
    Written,
)

LOSABLE: tuple[type, ...] = (
    Welcome, Freeze, Thaw, RollForward, Regroup, WriteOrder, PublishOrder, Exit, Release,
    StateReport, RolledForward, Regrouped, Written, Published, FaultReport, Finished, Heartbeat,
)  # fmt: skip
"""All but Registration: messages of a rank that is not registered do not count, and end the stream that they come on."""
LOST = 0.1
"""Part of the random jobs in which a message is lost so."""


def lose(job: Job, rank: int, kind: type) -> None:
    """The next message of a kind to or from a rank is lost."""
    job.note(f"the next {kind.__name__} of rank {rank} is lost")
    job.ranks[rank].route.loses = kind


def lose_something(job: Job, rng: random.Random) -> list[str]:
    """In some jobs a message or two are lost; say which."""
    if rng.random() >= LOST:
        return []
    ranks = rng.sample(range(job.training.layout.world_size), rng.randint(1, 2))
    kinds = {rank: rng.choice(LOSABLE) for rank in ranks}
    for rank, kind in kinds.items():
        lose(job, rank, kind)
    return [f"the next {kind.__name__} of rank {rank} is lost" for rank, kind in kinds.items()]
