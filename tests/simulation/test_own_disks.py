"""Each host has checkpoint directories of its own: what a lost host, with its disk, may cost, and what not."""

from __future__ import annotations

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.job import OwnDirectories
from tests.simulation.pieces import OwnDisks
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from tests.simulation.truth import events

MOMENTS = (
    "death_seen", "frozen", "decided", "rolling", "write_sent", "writing", "written", "publish_sent", "publishing", "claimed",
    "manifest written", "renamed", "place_published",
)  # fmt: skip


def two_hosts(seed: int, lost: int = 1, names: tuple[str, ...] = ("/a", "/b")) -> Scenario:
    """Return a job of four ranks on two hosts, each of which holds every shard; rank 3, or 1, dies in the third step."""
    own = OwnDirectories(names, frozenset({f"host{lost}"}))
    scenario = build(seed, even(4), faults=False, steps=5, own=own)
    scenario.harmless = False
    scenario.job.hook("UPDATING 3", 2, lambda rank: scenario.job.kill(2 * lost + 1))
    return scenario


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_host_lost_with_its_disk_before_the_word_costs_no_step(moment: str, lost: int) -> None:
    """Two replicas on two hosts: at every moment of the dump the other host writes and publishes the step alone."""
    reached = 0
    for seed in range(6):
        scenario = two_hosts(seed, lost)
        job = scenario.job
        job.hook(moment, 1 + seed % 2, lambda rank, job=job: job.kill(2 * lost))  # type: ignore[misc]
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert isinstance(job.disk, OwnDisks)
        said = [int(str(fields["step"])) for fields in events(job, "published")]
        if job.disk.lost and said and not job.said[-1][1] & job.disk.lost:
            assert job.disk.recovered() == said[-1] > 0, f"seed {seed}"
            reached += 1
        else:  # the moment came too late: the controller could not know that the host had just gone with its piece
            assert not job.disk.lost or job.said, f"seed {seed}"
    assert reached, f"no run came to {moment}"


def test_a_host_that_cannot_publish_is_done_without() -> None:
    """It has one directory, which is full when it publishes; the other host saves the step."""
    for seed in range(6):
        scenario = two_hosts(seed, names=("/a",))
        job = scenario.job
        job.hook("publish_sent", 1, lambda rank, job=job: job.disk.full.add("host1/a"))  # type: ignore[misc]
        assert not run_and_check(scenario), f"seed {seed}"
        assert events(job, "published") and job.disk.recovered() in (2, 3), f"seed {seed}"


def test_the_older_checkpoint_is_loaded_until_every_host_has_published() -> None:
    """Everybody dies when one of two pieces has its name: a restart passes it over."""
    for seed in range(6):
        scenario = two_hosts(seed)
        job = scenario.job

        def strike(rank: int, scenario: Scenario = scenario) -> None:
            for other in (0, 1, 2):
                scenario.job.kill(other)

        job.own = OwnDirectories()  # all disks stay
        job.hook("renamed", 1, strike)
        assert not run_and_check(scenario), f"seed {seed}"
        assert job.disk.published and job.disk.recovered() == 0, f"seed {seed}"


def test_a_seventh_of_the_random_jobs_has_such_directories() -> None:
    """And some of them meet what they are there for: lost disks, several places, superseded pieces."""
    jobs = [build(seed).job for seed in range(1000)]
    own = [job.own for job in jobs if job.own is not None]
    assert 110 <= len(own) <= 190
    assert {len(directories.names) for directories in own} == {1, 2}
    assert any(directories.fragile for directories in own) and not all(directories.fragile for directories in own)
