"""Replicas that differ: where most holders prove which is wrong its process is replaced, and else nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation import arranged_diverged as arranged
from tests.simulation.checks import run_and_check
from tests.simulation.comparing import Comparing
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.truth import events

SEEDS = range(12)


def _run(build: Callable[[int], Scenario], seed: int) -> Job:
    scenario = build(seed)
    found = run_and_check(scenario)
    assert not found, f"seed {seed}: {found}"
    return scenario.job


@pytest.mark.parametrize("build", [arranged.one_of_three, arranged.two_of_four], ids=lambda build: build.__name__)
def test_wrong_replicas_are_replaced_and_all_train_on(build: Callable[[int], Scenario]) -> None:
    for seed in SEEDS:
        job = _run(build, seed)
        wrong = sorted({rank for rank, _ in job.comparing.altered})
        assert sorted(process.rank for process in job.in_place.former) == wrong, f"seed {seed}"
        assert events(job, "finished") and not events(job, "published"), f"seed {seed}"
        (incident,) = events(job, "incident")
        assert incident["kind"] == "diverged", f"seed {seed}: {incident}"


@pytest.mark.parametrize(
    "build", [arranged.one_of_two, arranged.all_of_three, arranged.stopped], ids=lambda build: build.__name__
)
def test_nothing_is_written_without_a_proof_or_where_it_was_not_asked_for(build: Callable[[int], Scenario]) -> None:
    for seed in SEEDS:
        job = _run(build, seed)
        assert job.comparing.known and events(job, "refused"), f"seed {seed}"
        assert not events(job, "published") and not job.in_place.former, f"seed {seed}"
        assert "replicas differ" in str(events(job, "refused")[0]["reason"]), f"seed {seed}"


def test_what_was_only_misread_costs_nothing() -> None:
    for seed in SEEDS:
        job = _run(arranged.misread, seed)
        assert job.comparing.disputed and not job.comparing.known, f"seed {seed}"
        assert events(job, "finished") and not events(job, "freeze_sent"), f"seed {seed}"


@pytest.mark.parametrize(
    "build", [arranged.cannot_be_replaced, arranged.is_never_replaced], ids=lambda build: build.__name__
)
def test_where_the_wrong_one_cannot_be_replaced_the_others_write(build: Callable[[int], Scenario]) -> None:
    for seed in SEEDS:
        job = _run(build, seed)
        wrong = {rank for rank, _ in job.comparing.altered}
        orders = [line.fields for _, line in job.journal if line.event in ("write_sent", "publish_sent")]
        assert events(job, "published") and orders, f"seed {seed}"
        assert not any(fields.get("rank") in wrong for fields in orders), f"seed {seed}"


@pytest.mark.parametrize(
    "build",
    [
        arranged.a_right_one_dies,
        arranged.dies_while_they_compare,
        arranged.controller_dies,
        arranged.holders_die_with_the_controller,
        arranged.frozen_as_they_compare,
    ],
    ids=lambda build: build.__name__,
)
def test_a_second_fault_makes_no_wrong_replica_a_source(build: Callable[[int], Scenario]) -> None:
    known = sum(_run(build, seed).comparing.known for seed in range(40))
    assert known >= 3


def test_what_a_fill_shows_is_not_written_without_a_proof() -> None:
    for seed in SEEDS:
        job = _run(arranged.found_by_a_fill, seed)
        assert job.comparing.known and events(job, "regroup_failed") and not events(job, "published"), f"seed {seed}"
        assert "replicas differ" in str(events(job, "refused")[0]["reason"]), f"seed {seed}"


def test_what_a_fill_shows_is_written_by_those_that_are_proven() -> None:
    """Three of five: of four, one of which is new, two do not suffice."""
    for seed in SEEDS:
        job = _run(arranged.found_by_a_fill_and_proven, seed)
        assert job.comparing.known and bool(events(job, "published")) == (seed % 2 > 0), f"seed {seed}"


def test_a_holder_without_a_digest_writes_nothing() -> None:
    for seed in SEEDS:
        job = _run(arranged.shut_before_its_second_reading, seed)
        assert job.comparing.known and events(job, "published") and not job.in_place.former, f"seed {seed}"


@pytest.mark.parametrize(
    "build",
    [arranged.found_by_a_fill_and_another_dies, arranged.asked_again_before_they_compare],
    ids=lambda build: build.__name__,
)
def test_another_fault_as_a_fill_is_compared(build: Callable[[int], Scenario]) -> None:
    known = [_run(build, seed).comparing.known for seed in range(30)]
    assert sum(known) >= 3 and not all(known)


def test_a_process_of_a_lost_node_may_publish_what_only_the_others_know_to_differ() -> None:
    """It has been cut off with the altered replica; a fill of the process in its place shows that something differs. Of seed 4500240781."""
    former, own = object(), object()
    job: Any = SimpleNamespace(in_place=SimpleNamespace(former=[former]))
    comparing = Comparing(job)
    comparing.altered.add((2, "g0"))
    comparing.learn({"g0"})
    publisher: Any = former
    comparing.publishes(publisher, 5)
    publisher = own
    comparing.publishes(publisher, 6)
    assert [comparing.wrong_part("g0", step) for step in (5, 6)] == ["", "I19"]
    assert comparing.wrong_part("g0") == "I19", "a state that ranks train on from is not on disk"
    assert comparing.wrong_part("g1", 5) == "I3"


def test_every_arrangement_is_tried() -> None:
    assert len(arranged.ARRANGED) == 18
