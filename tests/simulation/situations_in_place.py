"""Situations in which ranks die and training continues without a checkpoint, or would: several deaths in turn, and what goes wrong while
all ranks regroup.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.faults import KINDS
from tests.simulation.job import Job
from tests.simulation.lost import lose
from tests.simulation.situations_of_time import PHASES, inject
from ttp.proto.messages import Freeze, Regroup, Regrouped, StateReport, Thaw, Welcome

MOMENTS = (
    "stage regrouping", "got Regroup", "replacement started", "replacement_came", "left", "filled", "regroup_failed", "regrouped",
    "got Thaw", "regroup_sent", "registers",
)  # fmt: skip
_THEN = (
    *("kill", "kill", "controller kill", "controller kill", "rank and controller kill") * 2, "exception", "stream break", "stop",
    "controller pause", "controller cut", "all replicas killed", "interpreter held", "preemption", "launcher loss", "message loss",
    "slow network", "rank's messages do not arrive", "controller's messages do not arrive", "brief stop", "peer error",
)  # fmt: skip
_LOSABLE = (Regroup, Regroup, Regrouped, Thaw, Welcome, Freeze, StateReport)


def regroups(job: Job, rng: random.Random) -> list[str]:
    """One rank or two die or stand still, one after the other; often something else happens while all regroup."""
    notes, steps = [], sorted(rng.sample(range(2, job.training.steps + 1), rng.choice((1, 1, 2, 3))))
    for count, step in enumerate(steps):
        kind = rng.choice(
            ("kill", "kill", "kill", "kill", "exception", "several kills", "host loss", "stop", "interpreter held")
        )
        moment, whom = f"{rng.choice(PHASES)} {step}", rng.choice(job.everybody)
        job.hook(moment, 1 + rng.randrange(len(job.everybody)), _act(job, rng, kind, whom))
        notes.append(f"{count + 1}: {kind} of rank {whom} at '{moment}'")
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        kind, moment, whom = rng.choice(_THEN), rng.choice(MOMENTS), rng.choice(job.everybody)
        job.hook(
            moment,
            rng.randint(1, len(job.everybody)),
            _act(job, rng, kind, whom, rng.choice((0.0, rng.uniform(0, 0.03)))),
        )
        notes.append(f"{kind} of rank {whom} after '{moment}'")
    if rng.random() < 0.3:
        lost, whom = rng.choice(_LOSABLE), rng.choice(job.everybody)
        job.hook("stage freezing", 1, lambda _: lose(job, whom, lost))
        notes.append(f"the next {lost.__name__} of rank {whom} is lost")
    return notes


def _act(job: Job, rng: random.Random, kind: str, whom: int, later_s: float = 0.0) -> Callable[[int], object]:
    assert kind in KINDS
    return lambda _: job.scheduler.after(later_s, lambda: inject(job, rng, kind, whom))
