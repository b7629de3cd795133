"""Ranks that are preempted while no controller leads them save the step that all have finished, together, or none does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import unled
from tests.simulation.checks import violations
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.truth import events
from ttp.proto.messages import EXIT_CODE_PERSISTED, EXIT_CODE_PREEMPTED

SEEDS = 8
Arrange = Callable[[int], Scenario]


def ended(arrange: Arrange, seed: int) -> Job:
    """Return the job after its end, within the invariants."""
    scenario = arrange(seed)
    found = violations(scenario)
    assert not found, f"{arrange.__name__}({seed}): {found}"
    return scenario.job


def alone(job: Job) -> list[bool]:
    return [rank.boundary.saved for rank in job.ranks]


@pytest.mark.parametrize(
    "arrange",
    [unled.killed, unled.cut_off, unled.rank_0_is_unable, unled.first_disk_is_full],
    ids=lambda one: one.__name__,
)
def test_the_step_that_all_have_finished_is_saved(arrange: Arrange) -> None:
    """Every rank exits as on a controller's order, and those with the notice say so."""
    for seed in range(SEEDS):
        job = ended(arrange, seed)
        ((root, step),) = job.disk.published
        assert alone(job) == [True] * 4 and {rank.gate.state_step for rank in job.ranks} == {step}
        assert root == job.roots[arrange is unled.first_disk_is_full]
        codes = [EXIT_CODE_PREEMPTED if rank.state.notice else EXIT_CODE_PERSISTED for rank in job.ranks]
        assert [rank.ended for rank in job.ranks] == [f"exit code {code}" for code in codes]
        assert EXIT_CODE_PREEMPTED in codes


def test_ranks_that_wait_behind_a_step_when_the_controller_is_lost_save_the_next_one() -> None:
    """But for those that it has frozen by then: what is behind a closed gate, only a controller opens."""
    saved = 0
    for seed in range(2 * SEEDS):
        job = ended(unled.killed_in_the_notice, seed)
        saved += all(alone(job))
    assert saved > SEEDS


def test_a_controller_that_leads_some_ranks_is_the_one_that_saves() -> None:
    for seed in range(SEEDS):
        job = ended(unled.some_are_led, seed)
        assert alone(job) == [False] * 4 and len(events(job, "published")) == len(job.disk.published) == 1


def test_a_controller_that_comes_back_and_ranks_that_save_do_not_both_save() -> None:
    """In some jobs the one, in some the other: I4 and I14 hold in each."""
    by_ranks = [all(alone(ended(unled.comes_back, seed))) for seed in range(3 * SEEDS)]
    assert 0 < sum(by_ranks) < len(by_ranks)


def test_ranks_whose_save_failed_do_not_exit_as_if_it_had_not() -> None:
    for seed in range(SEEDS):
        job = ended(unled.full_disks, seed)
        assert job.disk.published == [] and {rank.ended for rank in job.ranks} == {"exit code 1"}


def test_a_disk_that_fails_a_save_without_a_controller_acts_where_none_leads() -> None:
    """Also where the controller runs on, cut off: no order is carried out behind a finished step, as the soak's matrix says."""
    for seed in range(SEEDS):
        scenario = unled.cut_off(seed)
        scenario.job.must_save, scenario.job.disk.full = "", set(scenario.job.roots)
        assert not violations(scenario)
        assert {strike.where for strike in scenario.job.strikes if strike.kind == "full disk"} == {"leaderless"}


def test_a_rank_that_dies_in_the_save_leaves_a_whole_checkpoint_or_none() -> None:
    """What is on disk is judged by the invariants; both happen."""
    whole = [len(ended(unled.a_rank_dies_in_the_save, seed).disk.published) for seed in range(3 * SEEDS)]
    assert set(whole) == {0, 1}


def test_a_rank_that_stops_in_the_save_does_not_hold_the_others_for_ever() -> None:
    """They exit as ranks that failed, unless the step was on disk by then."""
    ends: set[str | None] = set()
    for seed in range(SEEDS):
        job = ended(unled.a_rank_stops_in_the_save, seed)
        ends |= {rank.ended for rank in job.ranks if not rank.stopped}
    assert "exit code 1" in ends and ends <= {
        f"exit code {code}" for code in (1, EXIT_CODE_PREEMPTED, EXIT_CODE_PERSISTED)
    }


def test_a_save_that_no_directory_takes_ends_its_ranks_also_where_a_new_controller_waits_for_them() -> None:
    """No rank remains for it then: neither published nor refused."""
    waited = 0
    for seed in range(3 * SEEDS):
        job = ended(unled.full_disks_as_a_controller_comes, seed)
        assert not any(alone(job)) and not job.disk.published
        waited += len(job.controllers) > 2 and not events(job, "refused")
    assert waited
