"""Whole jobs in which some rank hangs, is slow, or is preempted; a failing seed is printed and replays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.job import Job
from tests.simulation.rank import Rank
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Layout, Training, even, ring
from tests.simulation.truth import events

STEPS = 40
AT = 30
"""The step in which it happens: enough of them were seen."""
TIMES = Times(heartbeat_s=0.05, hang_floor_s=0.5, hang_factor=5.0)
LAYOUTS = (even(2), even(4), ring(3))


def build(seed: int, layout: Layout, harmless: bool, times: Times = TIMES, standbys: int = 0) -> Scenario:
    rng = random.Random(seed)
    job = Job(rng, Training(layout, steps=STEPS, local_copy=False), times, agents=True, standbys=standbys)
    job.slowest_s = rng.choice((0.001, 0.01))
    return Scenario(seed, job, harmless=harmless)


def compute_for(job: Job, rank: int, seconds: float) -> None:
    job.ranks[rank].slow_compute[AT] = seconds


def kill_controller(job: Job, rank: int) -> None:
    job.controller.kill()


def hang_in_update(job: Job, rank: int) -> None:
    job.ranks[rank].hang_update_at = AT


def give_notice(job: Job, process: Rank, concerned: int) -> None:
    job.scheduler.after(0.0, partial(process.run, process.notice))


def test_a_hang_without_detection_is_a_job_that_never_ends() -> None:
    """The checker can fail: without the limit, the same job violates I11."""
    scenario = build(0, even(4), harmless=False, times=replace(TIMES, hang_floor_s=inf))
    compute_for(scenario.job, 1, inf)
    assert any(text.startswith("I11") for text in run_and_check(scenario))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
@pytest.mark.parametrize("hang", [partial(compute_for, seconds=inf), hang_in_update], ids=["compute", "update"])
def test_a_hang_is_seen_named_and_survived(layout: Layout, hang: Callable[[Job, int], None]) -> None:
    for seed in range(12):
        scenario = build(seed, layout, harmless=False)
        job, rank = scenario.job, seed % layout.world_size
        hang(job, rank)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (hung,) = events(job, "hung")
        assert hung["ranks"] == (rank,), f"seed {seed}"
        (published,) = events(job, "published")
        # A rank that hangs in its update may be the only one that came to it: the others follow by its record.
        assert published["step"] == (AT - 1 if hang is not hang_in_update else AT), f"seed {seed}"


def test_a_hang_is_seen_soon_however_many_steps_there_are_in_a_heartbeat() -> None:
    """Steps take a twentieth of a heartbeat: eight of them are enough, and not eight heartbeats."""
    times = replace(TIMES, heartbeat_s=0.6, lease_s=1.8, vouched_lease_s=4.5, hang_floor_s=2.0)
    for seed in range(12):
        scenario = build(seed, even(4), harmless=False, times=times)
        job = scenario.job
        compute_for(job, seed % 4, inf)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        began = next(at for at, line in job.journal if line.event == "assembled")
        ((at, _),) = [(at, line) for at, line in job.journal if line.event == "hung"]
        assert at - began < 8 * times.heartbeat_s, f"seed {seed}"


def test_a_hang_is_seen_by_a_controller_that_its_host_keeps_again_and_again() -> None:
    """Each time for longer than a heartbeat, and for less than half of a third of a lease."""
    for seed in range(12):
        scenario = build(seed, even(4), harmless=False)
        job, rank = scenario.job, seed % 4
        compute_for(job, rank, inf)
        for number in range(40):
            job.scheduler.at(0.2 + 0.15 * number, partial(job.controllers[0].pause, 0.12))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        ((at, hung),) = [(at, line.fields) for at, line in job.journal if line.event == "hung"]
        assert hung["ranks"] == (rank,) and at < 5.0, f"seed {seed}: {at:.3f} s"


def test_a_hang_in_the_first_step_is_seen_by_the_limit_for_the_start() -> None:
    """There is nothing to save yet, and the job says so and starts again."""
    for seed in range(12):
        scenario = build(seed, even(4), harmless=False, times=replace(TIMES, hang_start_s=2.0))
        job, rank = scenario.job, seed % 4
        job.ranks[rank].slow_compute[1] = inf
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert [line["ranks"] for line in events(job, "hung")] == [(rank,)], f"seed {seed}"
        assert "nothing to save" in str(events(job, "refused")[0]["reason"]), f"seed {seed}"


def test_a_controller_that_took_over_a_moment_ago_sees_a_hang_by_the_pace_that_the_ranks_reported() -> None:
    for seed in range(12):
        scenario = build(seed, even(4), harmless=False, standbys=1)
        job, rank = scenario.job, seed % 4
        compute_for(job, rank, inf)
        job.hook(f"UPDATING {AT - 3}", 1, partial(kill_controller, job))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(job, "took_over") and events(job, "hung"), f"seed {seed}"
        assert [line["step"] for line in events(job, "published")] == [AT - 1], f"seed {seed}"


def test_a_slow_step_below_the_limit_costs_nothing() -> None:
    for seed in range(30):
        scenario = build(seed, even(4), harmless=True)
        compute_for(scenario.job, seed % 4, 0.4)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(scenario.job, "finished") and not events(scenario.job, "freeze_sent"), f"seed {seed}"


def test_a_slow_step_about_as_long_as_the_limit_is_a_hang_or_a_false_alarm_and_never_harm() -> None:
    """A rank that is seen to have progressed before the dump was ordered thaws the job, which trains to the same end."""
    outcomes: Counter[str] = Counter()
    for seed in range(120):
        scenario = build(seed, even(4), harmless=False)
        job = scenario.job
        compute_for(job, seed % 4, 0.5 + 0.3 * (seed % 40) / 40)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        ended = "finished" if events(job, "finished") else "published" if events(job, "published") else "other"
        outcomes[f"{ended}{' after a thaw' if events(job, 'not_hung') else ''}"] += 1
    assert set(outcomes) <= {"finished", "finished after a thaw", "published"}, outcomes
    assert min(outcomes["finished after a thaw"], outcomes["published"]) > 0, outcomes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
def test_a_preempted_rank_finishes_the_step_and_no_rank_begins_another(layout: Layout) -> None:
    """All stand behind the same step when the dump begins: nothing is rolled forward, and nothing computed is lost."""
    for seed in range(24):
        scenario = build(seed, layout, harmless=False)
        job = scenario.job
        process = job.ranks[seed % layout.world_size]
        moment = ("READY 12", "UPDATING 12", "DONE 12")[seed % 3]
        job.hook(moment, 1 + seed % layout.world_size, partial(give_notice, job, process))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (frozen,), (decided,) = events(job, "frozen"), events(job, "decided")
        assert decided["roll_forward"] == () and decided["step"] in (12, 13), f"seed {seed}"
        assert set(frozen["phases"]) == {"DONE"}, f"seed {seed}: {frozen}"  # type: ignore[call-overload]
        assert process.ended == "exit code 76", f"seed {seed}"
        others = {other.ended for other in job.ranks if other is not process}
        assert others == {"exit code 75"}, f"seed {seed}"


def test_a_step_that_cannot_be_finished_is_not_waited_for_for_long() -> None:
    for seed in range(12):
        scenario = build(seed, even(4), harmless=False)
        job, rank = scenario.job, seed % 4
        compute_for(job, rank, inf)
        job.hook(f"READY {AT}", 1, partial(give_notice, job, job.ranks[(rank + 1) % 4]))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert not events(job, "hung"), f"seed {seed}: the notice came first"
        assert [line["step"] for line in events(job, "published")] == [AT - 1], f"seed {seed}"
