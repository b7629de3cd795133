"""Whole jobs in which an update takes longer than a freeze waits for it; a failing seed is printed and replays."""

from __future__ import annotations

from functools import partial

from tests.simulation.checks import run_and_check
from tests.simulation.held import Hold
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even, ring
from tests.simulation.truth import events
from tests.simulation.work import FREEZE_TIMEOUT_S
from ttp.proto.messages import CauseKind

STEP = 3


def slow(seed: int, layout_of: int, seconds: float, victims: tuple[int, ...]) -> tuple[Scenario, Job]:
    """Rank 0's update takes so long, and the victims are killed when it begins."""
    scenario = build(seed, ring(3) if layout_of == 3 else even(layout_of), faults=False, steps=6)
    job = scenario.job
    scenario.harmless = False
    job.ranks[0].slow_update[STEP] = seconds

    def kill(rank: int) -> None:
        for victim in victims:
            job.scheduler.after(0.0, partial(job.kill, victim))

    job.hook(f"UPDATING {STEP}", layout_of, kill)
    return scenario, job


def test_the_end_of_a_long_update_is_waited_for_when_no_other_rank_holds_its_shards() -> None:
    """The rank reports again when its update has ended, and the dump takes its step."""
    for seed in range(60):
        scenario, job = slow(seed, 2, FREEZE_TIMEOUT_S + 0.7, victims=(1,))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(job, "awaiting_updates"), f"seed {seed}: the case did not come about"
        assert [line["step"] for line in events(job, "published")] == [STEP], f"seed {seed}"


def test_the_end_of_a_long_update_is_not_waited_for_when_another_holder_lives() -> None:
    for seed in range(60):
        scenario, job = slow(seed, 4, 15.0, victims=(1,))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert not events(job, "awaiting_updates"), f"seed {seed}"
        assert events(job, "published"), f"seed {seed}"


def test_an_update_that_never_ends_is_refused_in_the_end_and_named() -> None:
    for seed in range(24):
        scenario, job = slow(seed, 2, 1e6, victims=(1,))
        job.ranks[0].hang_update_at = STEP
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (refused,) = events(job, "refused")
        assert "rank 0, stuck in UPDATING of step 3" in str(refused["reason"]), f"seed {seed}: {refused}"


def test_a_holder_that_dies_in_its_long_update_is_not_waited_for() -> None:
    for seed in range(24):
        scenario, job = slow(seed, 2, 4.0, victims=(1,))
        job.hook("awaiting_updates", 1, partial(lambda job, rank: job.kill(0), job))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (refused,) = events(job, "refused")
        assert "UPDATING" not in str(refused["reason"]), f"seed {seed}: {refused}"


def writes_on(seed: int, layout_of: int) -> tuple[Scenario, Job]:
    """A rank raises, and the first that writes does so for longer than a fault may take."""
    scenario = build(seed, ring(3) if layout_of == 3 else even(layout_of), faults=False, steps=6)
    job = scenario.job
    scenario.harmless = False
    job.holds["write"] = Hold(longest_s=1.5 * job.times.total_timeout_s, progresses=True)
    job.hook(f"DONE {STEP}", 2, lambda rank: job.ranks[rank].fault(CauseKind.EXCEPTION, "ValueError: bad batch"))
    return scenario, job


def test_a_slow_write_is_done_by_another_holder_when_half_of_the_time_is_over() -> None:
    """Nothing is lost, and the other half is enough."""
    for seed in range(8):
        scenario, job = writes_on(seed, 3 if seed % 2 else 4)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (passed,) = events(job, "passed_over")
        assert passed["stage"] == "writing" and events(job, "published"), f"seed {seed}"


def test_a_slow_write_is_refused_when_the_total_time_is_over_if_no_other_rank_can_do_it() -> None:
    """Progress extends the wait for an answer, never the fault's total."""
    for seed in range(8):
        scenario, job = writes_on(seed, 2)
        job.hook("decided", 1, partial(lambda job, rank: job.kill(0), job))
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        (refused,) = events(job, "refused")
        assert f"was not over after {job.times.total_timeout_s:g} s" in str(refused["reason"]), (
            f"seed {seed}: {refused}"
        )
