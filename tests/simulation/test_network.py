"""Networks that carry one way only, twice, late or not at all: nothing worse than a pause comes of it, or the dump succeeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.job import Job
from tests.simulation.network import DOWN, UP
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from tests.simulation.truth import events


def alone(seed: int) -> Scenario:
    """Return a job of four ranks without faults, with only one controller."""
    while True:
        scenario = build(seed, even(4), faults=False, steps=6)
        if len(scenario.job.controllers) == 1:
            return scenario
        seed += 1000


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("moment", ["freeze_sent", "frozen", "write_sent", "publish_sent"])
def test_a_dump_outlasts_a_controller_that_is_cut_off_one_way(way: str, moment: str) -> None:
    """For longer than a round of the freeze or an order may take: without anybody to tell it, nothing is decided."""
    for seed in range(12):
        scenario = alone(seed)
        scenario.harmless = False
        job = scenario.job
        job.hook("DONE 3", 2, lambda rank, job=job: job.kill(rank))  # type: ignore[misc]
        job.hook(moment, 1, lambda rank, job=job: job.controller.cut_one_way(way, 1.1))  # type: ignore[misc]
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(job, "published"), f"seed {seed}"


def doubled(job: Job, rank: int) -> None:
    job.ranks[rank].route.twice_until = 60.0


def inject(job: Job, trouble: str, rank: int) -> None:
    """Note it, so that the checks know whom nothing can reach for a while, and do it."""
    kind, act = TROUBLES[trouble]
    job.struck(kind, rank)
    act(job, rank)


TROUBLES: dict[str, tuple[str, Callable[[Job, int], object]]] = {
    "loses what it said last": ("message loss", lambda job, rank: job.lose_tail(rank, 0.1)),
    "sends late on its old stream": ("reordering", lambda job, rank: job.leave_behind(rank)),
    "sends and receives everything twice": ("duplication", doubled),
    "receives nothing for a moment": (
        "rank receives nothing",
        lambda job, rank: job.ranks[rank].route.hold(DOWN, job.now + 0.2),
    ),
    "loses its route to the controller for a moment": (
        "rank's messages do not arrive",
        lambda job, rank: job.ranks[rank].route.hold(UP, job.now + 0.2),
    ),
}
"""By what the test is called: the kind of fault as the checks know it, and how it is done."""


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("moment", ["frozen", "write_sent", "publish_sent"])
def test_a_dump_is_completed_whatever_the_network_does_to_a_rank(trouble: str, moment: str) -> None:
    """The publisher, a writer or any other: orders and answers are said again on the next stream, and done once."""
    for seed in range(8):
        scenario = alone(seed)
        scenario.harmless = False
        job = scenario.job
        job.hook("UPDATING 3", 2, lambda rank, job=job: job.kill(3))  # type: ignore[misc]
        job.hook(moment, 1, lambda rank, job=job, seed=seed: inject(job, trouble, seed % 3))  # type: ignore[misc]
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (published,) = events(job, "published")
        assert published["step"] in (2, 3), f"seed {seed}"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_training_is_not_harmed_by_what_the_network_does_to_a_rank(trouble: str) -> None:
    for seed in range(12):
        scenario = alone(seed)
        job = scenario.job
        job.hook("READY 2", 2, lambda rank, job=job: TROUBLES[trouble][1](job, rank))  # type: ignore[misc]
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(job, "finished"), f"seed {seed}"


def test_a_controller_that_was_cut_off_twice_declares_no_rank_dead() -> None:
    """All ranks are silent; when the first one sends again, the others have their whole lease to come back."""
    for seed in range(24):
        scenario = alone(seed)
        job = scenario.job

        def strike(rank: int, job: Job = job) -> None:
            job.controller.cut(0.52)
            job.scheduler.after(0.5, lambda: job.controller.cut(1.1))
            job.hook("cut", 1, lambda _: job.drop_stream(rank))
            job.scheduler.after(0.55, lambda: job.happened("cut", rank))

        job.hook("READY 2", 1, strike)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert not events(job, "death_seen"), f"seed {seed}"
