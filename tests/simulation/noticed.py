"""Random jobs that lose every controller and are told to leave then; in most of them something else goes wrong too."""

from __future__ import annotations

import random
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.job import Job

STEPS = 300
"""More than are done before all is over."""
_KINDS = (
    "kill", "exception", "brief stop", "interpreter held briefly", "full disk", "rank's disk", "failed fsync", "stop",
    "host loss", "several kills",
)  # fmt: skip


def lose_all_and_notify(job: Job, rng: random.Random) -> list[str]:
    """Have all controllers go, for good or for a while, and some rank or all be told to leave about then; say what befalls."""
    lost_s = rng.uniform(0.3, 0.8)
    how = rng.choice(("kill", "kill", "cut for good", "cut for a while"))
    if rng.random() < 0.5:
        job.standbys.unable = set(job.everybody)

    def lose() -> None:
        for controller in job.controllers:
            if how == "kill":
                controller.kill()
            else:
                controller.cut(40.0 if how == "cut for good" else rng.uniform(0.5, 3.0))

    job.scheduler.at(lost_s, lose)
    after_s = rng.uniform(-0.1, 2.5)
    for process in job.ranks if rng.random() < 0.5 else (rng.choice(job.ranks),):
        job.scheduler.at(lost_s + after_s + rng.uniform(0.0, 0.1), partial(process.run_beside, process.notice))
    befalls = [how, "notice"]
    alone = rng.random() < 0.4
    if alone and after_s >= 0 and job.own is None and not job.training.local_copy:
        job.must_save = "any"  # whoever leads the ranks by then, or nobody
    if not alone:
        kind, rank = KINDS[rng.choice(_KINDS)], rng.choice(job.everybody)
        strike = partial(kind.befall, job, rng, rank)
        if rng.random() < 0.5:
            job.hook(
                "saving alone",
                rng.randint(1, len(job.ranks)),
                lambda _: job.scheduler.after(rng.uniform(0.0, 0.1), strike),
            )
        else:
            job.scheduler.at(lost_s + rng.uniform(0.0, 2.5), strike)
        befalls.append(kind.name)
    return befalls


def cut_some_off_and_notify(job: Job, rng: random.Random) -> list[str]:
    """The controller is killed; some ranks come to the standby and the others to none, and some rank or all are told to leave."""
    lost_s, others = rng.uniform(0.3, 0.8), rng.sample(job.everybody, rng.randint(1, len(job.ranks) - 1))
    job.standbys.unable = set(job.everybody)

    def lose() -> None:
        for rank in others:
            job.ranks[rank].was_stopped = job.ranks[rank].route.rejects = True
        job.controller.kill()

    job.scheduler.at(lost_s, lose)
    noticed_s = lost_s + rng.uniform(0.0, 0.6)
    for process in job.ranks if rng.random() < 0.5 else (rng.choice(job.ranks),):
        job.scheduler.at(noticed_s, partial(process.run_beside, process.notice))
    return [f"ranks {sorted(others)} come to no controller after {lost_s:.3f} s", "notice"]
