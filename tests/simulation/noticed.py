"""Random jobs that lose every controller and are preempted then; in most of them something else goes wrong too."""

from __future__ import annotations

import random
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.job import Job
from ttp.controller.core.facts.state import Stage

STEPS = 300
"""More than are done before all is over."""
_KINDS = (
    "kill", "exception", "brief stop", "interpreter held briefly", "full disk", "rank's disk", "failed fsync", "stop",
    "host loss", "several kills",
)  # fmt: skip


_LOSSES = (
    "kill", "kill", "kill", "kill at the boundary", "cut for good", "cut for a while", "cut until about then", "cut until about then",
)  # fmt: skip


def lose_all_and_notify(job: Job, rng: random.Random) -> list[str]:
    """Have all controllers go, for good or for a while, and some rank or all be preempted about then; return what is injected."""
    lost_s, how = rng.uniform(0.3, 0.8), rng.choice(_LOSSES)
    notified = job.ranks if rng.random() < 0.5 else [rng.choice(job.ranks)]
    if rng.random() < 0.5:
        job.standbys.unable = set(job.everybody)
    alone = rng.random() < 0.5
    must_save = alone and job.own is None and not job.training.local_copy

    def lose(_: int = 0) -> None:
        if how == "kill at the boundary":
            job.must_save = "any" if must_save and job.controller.state.stage is Stage.RUNNING else ""
        for controller in job.controllers:
            if how.startswith("kill"):
                controller.kill()
            else:
                controller.cut(away_s)

    after_s, away_s = rng.uniform(-0.1, 2.5), 40.0
    if how == "kill at the boundary":
        after_s = 0.0
        job.hook("boundary", rng.randint(1, len(job.ranks)), lose)
    else:
        job.scheduler.at(lost_s, lose)
    if how == "cut for a while":
        away_s = rng.uniform(0.5, 3.0)
    elif how == "cut until about then":  # the ranks have just given it up
        away_s, after_s = rng.uniform(1.8, 2.4), rng.uniform(1.8, 2.2)
        for process in job.ranks if rng.random() < 0.5 else ():
            process.slow_work["alone"] = 5.0
    for process in notified:
        job.scheduler.at(lost_s + after_s + rng.uniform(0.0, 0.1), partial(process.run_beside, process.notice))
    injected = [how, "notice"]
    if alone:
        if rng.random() < 0.2:
            must_save = False
            job.disk.full = {job.root_of(rank, name) for rank in job.everybody for name in job.roots}
            injected.append("all directories are full")
        elif must_save and after_s >= 0 and how != "kill at the boundary":
            job.must_save = "any"  # whoever leads the ranks by then, or no controller
        return injected
    kind, rank = KINDS[rng.choice(_KINDS)], rng.choice(job.everybody)
    strike = partial(kind.inject, job, rng, rank)
    if rng.random() < 0.5:
        count, later_s = rng.randint(1, len(job.ranks)), rng.uniform(0.0, 0.1)
        job.hook("saving alone", count, lambda _: job.scheduler.after(later_s, strike))
    else:
        job.scheduler.at(lost_s + rng.uniform(0.0, 2.5), strike)
    return [*injected, kind.name]


def cut_some_off_and_notify(job: Job, rng: random.Random) -> list[str]:
    """The controller is killed; some ranks come to the standby and the others to none, and some rank or all are preempted."""
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
