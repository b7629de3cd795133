"""Parts of a checkpoint that are handed on: a writer fails, and so does the one that took its parts over.

With two replicas of a shard the second failure is the last. With three a writer may owe two orders at once, its own and
another's, when it dies, loses its stream, its disk fails it, or what it says comes twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.job import Job
from tests.simulation.training import ring
from ttp.proto.messages import WriteOrder

THREE_REPLICAS = (ring(3, replicas=3), ring(4, replicas=3), ring(5, replicas=3))
_SECOND = ("kill", "kill", "duplication", "stream break", "rank's disk")
_DISK_S = (0.05, 0.3)
"""How long a write takes, at least and at most: an order comes while another is under way."""


def owes(job: Job, rank: int) -> int:
    """Return how many write orders a rank has not answered."""
    orders = job.ranks[rank].state.orders
    return sum(isinstance(known.order, WriteOrder) and known.answer is None for known in orders)


def when_one_owes_two(job: Job, act: Callable[[int], None]) -> None:
    """Act once, on the first rank that has two write orders to answer."""
    waiting = [True]

    def look(rank: int) -> None:
        if waiting and owes(job, rank) > 1:
            waiting.clear()
            act(rank)

    for count in range(1, 4 * len(job.ranks)):
        job.hook("got WriteOrder", count, look)


def hand_on(job: Job, rng: random.Random) -> str:
    """Have a writer fail, and then whoever owes its parts besides its own; say how."""
    first, second = rng.choice(("kill", "kill", "rank's disk")), rng.choice(_SECOND)
    count = rng.randint(1, len(job.ranks) - 1)
    for process in job.ranks:
        process.slow_work["write"] = rng.uniform(*_DISK_S)

    def inject(kind: str, rank: int) -> None:
        KINDS[kind].inject(job, rng, rank)

    def later(rank: int) -> None:
        job.scheduler.after(rng.choice((0.0, rng.uniform(0.0, 0.2))), partial(inject, second, rank))

    job.hook("writing", count, lambda rank: job.scheduler.after(rng.uniform(0.0, 0.03), partial(inject, first, rank)))
    when_one_owes_two(job, later)
    return f"{first} of the writer that begins as number {count}, then {second} of one that owes two orders"
