"""Each host has checkpoint directories of its own: what a lost host, with its disk, may cost, and what not."""

from __future__ import annotations

from math import inf

import pytest

from tests.simulation import time_checks
from tests.simulation.checks import run_and_check, violations
from tests.simulation.faults import KINDS
from tests.simulation.pieces import OwnDisks
from tests.simulation.scenario import Scenario, build
from tests.simulation.settings import OwnDirectories
from tests.simulation.time_checks import unseen_s
from tests.simulation.training import even, ring
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


def hosts_lost_in_turn(seed: int) -> Scenario:
    """Return a job of four ranks on four hosts, each shard on three of them. One host is lost in training, and two when they publish, the second
    when the loss of the first has been found."""
    scenario = build(seed, ring(4, replicas=3), faults=False, steps=5, own=OwnDirectories(("/a", "/b")))
    scenario.harmless = False
    job = scenario.job

    def lose(rank: int) -> None:
        KINDS["host loss"].inject(job, job.rng, rank)

    job.hook("UPDATING 3", 4, lose)
    for count in (1, 4):
        job.hook("publishing", count, lose)
    return scenario


def test_every_host_that_is_lost_in_turn_costs_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than that, and no less is granted (seed 600103479, which takes longer)."""
    monkeypatch.setattr(time_checks, "UNTROUBLED_S", 1.5)
    for seed in range(6):
        scenario = hosts_lost_in_turn(seed)
        job = scenario.job
        assert not run_and_check(scenario), f"seed {seed}"
        assert len(events(job, "replanned")) == 2 and events(job, "refused"), f"seed {seed}"
        assert unseen_s(job, inf) == pytest.approx(3 * job.times.lease_s, abs=0.1), f"seed {seed}"
    monkeypatch.setattr(time_checks, "UNTROUBLED_S", 0.5)
    assert any("nothing held it up" in text for text in violations(hosts_lost_in_turn(0)))


def test_time_in_which_two_hosts_are_silent_counts_once_and_an_end_that_an_agent_sees_not_at_all() -> None:
    job = build(1, even(4), faults=False).job
    job.agents, lease_s = True, job.times.lease_s
    job.killed = {3: 1.0 + 2 * lease_s, 0: 1.0, 1: 1.0 + lease_s / 4, 2: 1.0}
    job.seen_to_end = {2}
    assert unseen_s(job, 100.0) == pytest.approx(2.25 * lease_s)
    assert unseen_s(job, 1.0 + lease_s) == pytest.approx(1.25 * lease_s), "what dies behind the word holds nothing up"
    job.agents = False
    job.killed, job.seen_to_end = {2: 1.0}, {2}
    assert unseen_s(job, 100.0) == pytest.approx(lease_s)


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
