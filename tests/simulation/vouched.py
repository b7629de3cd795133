"""Jobs in which a rank is silent: its interpreter is held, its process is stopped, or its host is lost. One seed is one job."""

from __future__ import annotations

import random
from functools import partial

from tests.simulation.faults import KINDS
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Layout, Training, even, ring

SILENT_S = (0.7, 1.2)
"""Longer than a lease; with the heartbeat before, shorter than a vouched one."""
_TWO_HOSTS = (even(4), ring(4))


def _job(
    seed: int, layout: Layout, harmless: bool, steps: int = 30, standbys: int = 1
) -> tuple[Scenario, random.Random]:
    rng = random.Random(f"vouched {seed}")
    job = Job(rng, Training(layout, steps, local_copy=False), Times(), agents=True, standbys=standbys)
    job.slowest_s = rng.choice((0.001, 0.005, 0.05))
    return Scenario(seed, job, harmless), rng


def _do(job: Job, rng: random.Random, kind: str, rank: int) -> None:
    KINDS[kind].inject(job, rng, rank)


def held_for_longer_than_a_lease(seed: int) -> Scenario:
    """A rank compiles: nothing else happens, or its stream breaks meanwhile, or the controller dies, or all ranks compile at once."""
    scenario, rng = _job(seed, _layout(seed), harmless=True)
    job, rank = scenario.job, seed % scenario.job.training.layout.world_size
    besides = ("nothing", "stream break", "controller kill", "all")[seed % 4]

    def hold(_: int) -> None:
        for process in job.ranks if besides == "all" else [job.ranks[rank]]:
            job.hog(process.rank, rng.uniform(*SILENT_S))
            job.struck("interpreter held", process.rank)
        if besides in KINDS:
            job.scheduler.after(rng.uniform(0.0, 0.5), partial(_do, job, rng, besides, rank))

    job.hook(f"COMPUTE {rng.randint(1, 12)}", 1, hold)
    return scenario


def _layout(seed: int) -> Layout:
    return random.Random(f"layout {seed}").choice((even(2), even(4), ring(3)))


def silent_for_good(seed: int, kind: str) -> Scenario:
    """A host is lost, a process stopped or an interpreter held, and never comes back."""
    scenario, rng = _job(seed, _TWO_HOSTS[seed % 2], harmless=False)
    job, rank = scenario.job, rng.randrange(4)

    def act(_: int) -> None:
        if kind == "host loss":
            _do(job, rng, kind, rank)
        elif kind == "stop":
            job.stop(rank, None)
            job.struck(kind, rank)
        else:
            job.hog(rank, None)
            job.struck(kind, rank)

    job.hook(f"{rng.choice(('COMPUTE', 'READY', 'DONE'))} {rng.randint(2, 20)}", 1, act)
    return scenario


def host_lost(seed: int) -> Scenario:
    return silent_for_good(seed, "host loss")


def process_stopped(seed: int) -> Scenario:
    return silent_for_good(seed, "stop")


def interpreter_held_for_good(seed: int) -> Scenario:
    return silent_for_good(seed, "interpreter held")
