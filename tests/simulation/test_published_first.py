"""A step that is published before the ranks regroup: each arranged turn of events comes, and ends as it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation import arranged_published_first as arranged
from tests.simulation.checks import run_and_check
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.truth import events
from ttp.proto.incident import Incident, read_incident


def _run(build: Callable[[int], Scenario], seed: int) -> Job:
    scenario = build(seed)
    found = run_and_check(scenario)
    assert not found, f"seed {seed}: {found}"
    return scenario.job


def _count(job: Job) -> Counter[str]:
    return Counter(line.event for _, line in job.journal)


def _incident(job: Job) -> Incident:
    return read_incident(events(job, "incident")[-1])


@pytest.mark.parametrize("seed", range(24))
def test_training_continues_and_the_step_is_on_disk(seed: int) -> None:
    job = _run(arranged.one_dies, seed)
    order = [line.event for _, line in job.journal if line.event in ("published", "regroup_sent", "regrouped")]
    assert order == ["published", "regroup_sent", "regrouped"] and events(job, "finished")
    incident = _incident(job)
    assert incident.in_place and incident.saved is not None and incident.saved.step == job.disk.newest_published()
    assert incident.took_ms is not None and incident.took_ms["published"] > 0 and incident.took_ms["regrouped"] > 0


def test_each_fault_publishes_its_step() -> None:
    for seed in range(8):
        job = _run(arranged.dies_twice, seed)
        count = _count(job)
        assert (count["published"], count["regrouped"], count["finished"]) == (2, 2, 1), f"seed {seed}"
        assert len({step for _, step in job.disk.published}) == 2, f"seed {seed}"


def test_another_death_meanwhile_is_a_part_of_it() -> None:
    both = 0
    for seed in range(16):
        job = _run(arranged.another_dies_while_they_write, seed)
        assert events(job, "published"), f"seed {seed}"
        sent = events(job, "regroup_sent")
        both += bool(sent) and len(list(sent[0]["replaced"])) == 2  # type: ignore[call-overload]
    assert both > 4, both


def test_what_fails_then_ends_in_a_restart_from_it() -> None:
    """At once, and without a second dump."""
    for seed in range(8):
        job = _run(arranged.cannot_be_regrouped, seed)
        count, incident = _count(job), _incident(job)
        assert (count["published"], count["regroup_failed"], count["freeze_sent"]) == (1, 1, 1), f"seed {seed}"
        assert incident.saved is not None and not incident.in_place and not count["refused"], f"seed {seed}"


def test_a_job_that_is_lost_then_has_its_checkpoint() -> None:
    """The report says so, however the controller comes to its end."""
    for seed in range(8):
        job = _run(arranged.all_die_when_it_is_published, seed)
        incident = _incident(job)
        assert incident.saved is not None and incident.goes_on_from == incident.saved.path, f"seed {seed}"
        assert not events(job, "refused"), f"seed {seed}"


def test_a_job_that_is_lost_later_has_that_checkpoint_too() -> None:
    """No rank is there to report it: the controller knows what it has had published."""
    for seed in range(8):
        job = _run(arranged.all_die_behind_it, seed)
        (published,), incident = events(job, "published"), _incident(job)
        assert incident.saved is None and incident.goes_on_from == published["path"], f"seed {seed}"


def test_a_standby_ends_what_its_predecessor_began() -> None:
    ends = Counter[str]()
    for seed in range(36):
        job = _run(arranged.controller_dies, seed)
        ends["finished" if events(job, "finished") else "saved" if events(job, "published") else "other"] += 1
    assert ends["finished"] and ends["saved"] and not ends["other"], ends


def test_a_rank_that_writes_still_is_not_asked_to_leave_its_step() -> None:
    """It refuses, or is stuck: the job restarts."""
    for seed in range(6):
        job = _run(arranged.slow_writer_is_passed_over, seed)
        assert events(job, "published") and not events(job, "regrouped"), f"seed {seed}"


def test_a_rank_that_publishes_still_is_not_asked_to_leave_its_step() -> None:
    """It refuses, and the job restarts."""
    for seed in range(6):
        job = _run(arranged.slow_publisher_is_passed_over, seed)
        assert events(job, "passed_over") and events(job, "published"), f"seed {seed}"
        assert "this rank writes" in str(events(job, "regroup_failed")[0]["reason"]), f"seed {seed}"
        assert not events(job, "regrouped"), f"seed {seed}"


def test_every_arrangement_is_tried() -> None:
    assert len(set(arranged.ARRANGED)) == 9
