"""Random jobs that go on for long enough to lose controllers one after the other, and to have their standbys restored."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.faults import HARMLESS, KINDS
from tests.simulation.job import Job
from tests.simulation.standbys import RESTORED_S

LONG_STEPS = 200
"""They take about ten seconds."""
_APART_S = RESTORED_S + 0.5
"""Losses so far apart meet a job whose standbys are restored."""


def lose_controllers(job: Job, rng: random.Random) -> list[str]:
    """Put in what the job loses. Where rank 0 cannot start a controller, no two are lost at about the same time: none would lead."""
    helpless = rng.random() < 0.3
    if helpless:
        ranks = range(len(job.ranks))
        if rng.random() < 0.5:
            job.standbys.mute = {0}
        else:
            job.standbys.unable = {0, *rng.sample(ranks, min(len(ranks) - 1, 2))}
    moment, notes = (
        0.2,
        [f"ranks {sorted(job.standbys.unable | job.standbys.mute)} start no controller"] if helpless else [],
    )
    for _ in range(rng.randint(1, 3)):
        moment += _APART_S + rng.uniform(0.0, 0.5) if helpless and notes[1:] else rng.uniform(0.0, 4.0)
        whose, kill = rng.choice(_LOSSES[: -1 if helpless else None])
        notes.append(f"{whose} lost, at {moment:.4f} s")
        job.scheduler.at(moment, partial(kill, job, rng))
    if not helpless and rng.random() < 0.5:
        notes.append(_something_harmless(job, rng))
    return notes


def _something_harmless(job: Job, rng: random.Random) -> str:
    kind, rank, moment = KINDS[rng.choice(HARMLESS)], rng.randrange(len(job.ranks)), rng.uniform(0.2, 6.0)
    job.scheduler.at(moment, partial(kind.inject, job, rng, rank))
    return f"{kind.name} of rank {rank}, at {moment:.4f} s"


def _leader(job: Job, rng: random.Random) -> None:
    job.controller.kill()


def _idle(job: Job, rng: random.Random) -> None:
    idle = [controller for controller in job.controllers if controller.idle and not controller.gone]
    if idle:
        rng.choice(idle).kill()


def _all(job: Job, rng: random.Random) -> None:
    for controller in job.controllers:
        controller.kill()


Loss = Callable[[Job, random.Random], None]
_LOSSES: tuple[tuple[str, Loss], ...] = (
    ("the controller that leads is", _leader),
    ("the controller that leads is", _leader),
    ("a standby is", _idle),
    ("all controllers are", _all),
)
