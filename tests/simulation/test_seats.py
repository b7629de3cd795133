"""Jobs with spare nodes that lose a node: each arranged turn of events comes, and ends as it must."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation import arranged_seats as arranged
from tests.simulation.checks import run_and_check, violations
from tests.simulation.contents import _given_up_with_its_node
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario, build
from tests.simulation.truth import events

SEEDS = range(12)
CONTINUED = (
    arranged.node_is_lost,
    arranged.node_is_back_later,
    arranged.two_nodes_one_after_the_other,
)
WRITTEN = (arranged.rank_0s_node_is_lost, arranged.two_nodes_and_one_spare, arranged.lost_again_as_it_sits_down)
"""In most of these jobs, at least."""
EITHER = (
    arranged.node_is_back_at_once,
    arranged.controller_dies_when_it_is_back,
    arranged.those_in_its_place_die_with_the_controller,
    arranged.controller_dies_meanwhile,
    arranged.standby_is_on_its_side,
)


def _run(arrange: Callable[[int], Scenario], seed: int) -> Job:
    scenario = arrange(seed)
    found = run_and_check(scenario)
    assert not found, f"seed {seed}: {found}"
    return scenario.job


@pytest.mark.parametrize("arrange", CONTINUED, ids=lambda arrange: arrange.__name__)
def test_training_continues_on_a_spare_node(arrange: Callable[[int], Scenario]) -> None:
    """The processes on other nodes are those of the start, and all are on the spare one that were on the lost one."""
    for seed in SEEDS:
        job = _run(arrange, seed)
        assert events(job, "take_places_sent") and events(job, "regrouped"), f"seed {seed}"
        seated = {rank for sent in events(job, "take_places_sent") for rank in sent["ranks"]}  # type: ignore[attr-defined]
        moved = {rank for rank, node in enumerate(job.nodes) if node != job.training.layout.hosts[rank]}
        assert moved == seated, f"seed {seed}"
        if not (events(job, "published") and not job.times.publish_first):
            assert events(job, "finished"), f"seed {seed}"


@pytest.mark.parametrize("arrange", WRITTEN, ids=lambda arrange: arrange.__name__)
def test_where_no_spare_can_take_its_place_the_step_is_written(arrange: Callable[[int], Scenario]) -> None:
    written = [bool(events(_run(arrange, seed), "published")) for seed in SEEDS]
    assert sum(written) >= len(written) - 2


@pytest.mark.parametrize("arrange", EITHER, ids=lambda arrange: arrange.__name__)
def test_whatever_crosses_nothing_is_lost(arrange: Callable[[int], Scenario]) -> None:
    jobs = [_run(arrange, seed) for seed in SEEDS]
    assert any(events(job, "take_places_sent") for job in jobs)


def test_a_node_that_is_back_ends_its_processes() -> None:
    """Its ranks or its agent, whoever comes first; those in their places train on. A standby may have led them to the end before."""
    jobs = [_run(arranged.node_is_back_later, seed) for seed in SEEDS]
    for seed, job in zip(SEEDS, jobs, strict=True):
        assert not any(process.alive for process in job.in_place.former), f"seed {seed}"
    assert any(events(job, "lost_node_back") for job in jobs) and any(events(job, "earlier_process") for job in jobs)


def test_a_node_that_is_back_takes_the_next_place() -> None:
    """Its own, which another one had meanwhile; it is not ended for having been lost before."""
    for seed in SEEDS:
        job = _run(arranged.a_node_that_is_back_is_a_spare, seed)
        assert [sent["host"] for sent in events(job, "take_places_sent")] == ["host2", "host1"], f"seed {seed}"
        assert job.nodes == list(job.training.layout.hosts) and events(job, "finished"), f"seed {seed}"
        lines = [line.event for _, line in job.journal if line.event in ("lost_node_back", "take_places_sent")]
        assert lines.pop() == "take_places_sent" and "lost_node_back" in lines, f"seed {seed}"


def test_a_controller_of_ranks_that_count_is_not_ended_by_one_that_others_have_come_to() -> None:
    """That one turns them away, and stands by again."""
    jobs = [_run(arranged.standby_is_on_its_side, seed) for seed in range(40)]
    again = [job for job in jobs if events(job, "stands_by_again")]
    assert len(again) > 10


def test_an_earlier_controller_ends_in_time_for_its_ranks_to_come_or_leads_on() -> None:
    """It is not ended as the later one gives its ranks up."""
    ends = []
    for seed in range(100):
        job = _run(arranged.network_is_back_as_the_others_are_given_up, seed)
        lines = {line.event: line for _, line in job.journal}
        ends.append(("stopped" in lines, "refused" in lines))
        assert "finished" in lines or "published" in lines, f"seed {seed}"
    assert {(True, False), (False, True)} == set(ends)


def test_an_order_to_end_that_comes_late_ends_nothing() -> None:
    for seed in range(60):
        job = _run(arranged.order_to_end_is_held_by_the_network, seed)
        assert events(job, "finished") or events(job, "published"), f"seed {seed}"


def test_a_standby_that_lost_processes_came_to_is_there_when_the_controller_dies() -> None:
    jobs = [_run(arranged.controller_dies_behind_a_standby_that_lost_processes_came_to, seed) for seed in range(60)]
    again = [job for job in jobs if events(job, "stands_by_again")]
    assert len(again) > 20 and any(events(job, "took_over") for job in jobs)


def test_every_arrangement_is_tried() -> None:
    alone = (
        arranged.a_node_that_is_back_is_a_spare,
        arranged.network_is_back_as_the_others_are_given_up,
        arranged.order_to_end_is_held_by_the_network,
        arranged.controller_dies_behind_a_standby_that_lost_processes_came_to,
    )
    assert {*CONTINUED, *WRITTEN, *EITHER, *alone} == set(arranged.ARRANGED)


def test_random_jobs_give_the_places_of_lost_nodes_away() -> None:
    scenarios = [scenario for scenario in map(build, range(955_000_000, 955_001_500)) if scenario.job.spares]
    seated = 0
    for scenario in scenarios:
        found = run_and_check(scenario)
        assert not found, f"seed {scenario.seed}: {found}"
        seated += bool(events(scenario.job, "take_places_sent"))
    assert len(scenarios) > 50 and seated > len(scenarios) / 12, (seated, len(scenarios))


@pytest.mark.parametrize(
    ("state_steps", "recorded", "lost", "others_end_s", "reported", "excused"),
    [
        ((4, 4, 5), 3, True, inf, (4,), True),  # the process of the lost node has come to it
        ((4, 4, 4), 2, True, inf, (4,), True),  # or has its record, and leads the job as it comes back: seed 2001125057
        ((4, 4, 4), 2, False, inf, (4,), False),
        ((4, 5, 5), 3, True, inf, (4,), False),
        ((4, 5, 5), 3, True, 0.5, (4,), True),  # the other one that had come to it was dead by then: seed 4700129432
        ((4, 5, 5), 3, True, 0.5, (4, 5), False),
        ((4, 5, 5), 3, True, 1.5, (4,), False),
        ((4, 4, 4), 3, True, inf, (4,), False),
    ],
)
def test_a_step_that_all_others_have_left_is_not_missed_where_it_is_on_a_node_that_was_given_up(
    state_steps: tuple[int, ...],
    recorded: int,
    lost: bool,
    others_end_s: float,
    reported: tuple[int, ...],
    excused: bool,
) -> None:
    """`recorded`: whose process has the record of step 5; 3: none has. They cannot roll forward any more. `reported`: which records ranks had named
    before the node was given up."""

    def process(rank: int, state_step: int) -> Any:
        records = (SimpleNamespace(step=5),) if rank == recorded else ()
        gate = SimpleNamespace(state_step=state_step, records=records)
        return SimpleNamespace(node=rank, gate=gate, ended_s=inf if rank == 2 else others_end_s)

    first, second, last = (process(rank, state_step) for rank, state_step in enumerate(state_steps))
    frozen = SimpleNamespace(event="frozen", fields={"records": reported})
    given_up = SimpleNamespace(event="take_places_sent", fields={"lost": "host2"})
    job: Any = SimpleNamespace(
        ranks=(first, second),
        in_place=SimpleNamespace(former=(last,)),
        journal=[(1.0, frozen), *([(1.0, given_up)] if lost else [])],
    )
    assert _given_up_with_its_node(job, 5) is excused


def test_a_step_of_a_lost_node_and_of_a_dead_rank_is_not_missed() -> None:
    """The others had left it: the call of the rule is shown by the job that was judged wrongly."""
    assert not violations(build(4700129432))
