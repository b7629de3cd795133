"""Jobs in which the step is published before the ranks regroup (`TTP_GASP=always`): a fault in each stage of that. One seed is one job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.simulation.arranged_in_place import AT, STEPS, TIMES, _calm, _kill, _raise
from tests.simulation.held import Hold
from tests.simulation.scenario import Scenario
from tests.simulation.training import even, ring

FIRST = replace(TIMES, publish_first=True)


def one_dies(seed: int) -> Scenario:
    """A rank dies, or raises, in one of its phases."""
    scenario = _calm(seed, (even(2), even(4), ring(3))[seed % 3], times=FIRST)
    job = scenario.job
    phase = ("COMPUTE", "READY", "UPDATING", "DONE")[seed // 3 % 4]
    if seed % 2:
        _kill(job, f"{phase} {AT}", seed % len(job.everybody), 0.0005 * (seed % 7))
    else:
        job.hook(f"{('COMPUTE', 'READY')[seed // 3 % 2]} {AT}", 1 + seed % 2, lambda rank: _raise(job, rank))
    return scenario


def dies_twice(seed: int) -> Scenario:
    """The replacement dies in a later step: that one is published too."""
    scenario = _calm(seed, times=FIRST)
    _kill(scenario.job, f"COMPUTE {AT}", 3)
    scenario.job.hook(f"READY {STEPS}", 4, lambda _: scenario.job.kill(3))
    return scenario


def another_dies_while_they_write(seed: int) -> Scenario:
    """Both are replaced when the others have written their parts, unless they were all that held a shard."""
    scenario = _calm(seed, (even(8), ring(4, replicas=3))[seed % 2], harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.hook("writing", 1, lambda _: job.kill(2 if seed % 2 else 1))
    return scenario


def cannot_be_regrouped(seed: int) -> Scenario:
    """A training thread comes out of nothing: the job restarts from what is published, and nothing is written again."""
    scenario = _calm(seed, harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.hook("stage regrouping", 1, lambda _: setattr(job.ranks[seed % 3], "stuck", True))
    return scenario


def all_die_when_it_is_published(seed: int) -> Scenario:
    """No rank remains that could regroup: the fault ended with a checkpoint all the same."""
    scenario = _calm(seed, harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)

    def strike(_: int) -> None:
        for rank in (0, 1, 2):
            job.scheduler.after(0.002 * rank, partial(job.kill, rank))

    job.hook("stage regrouping", 1, strike)
    return scenario


def all_die_behind_it(seed: int) -> Scenario:
    """All die at once, a step after a recovery: none can report what was published in it."""
    scenario = _calm(seed, harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)

    def strike(_: int) -> None:
        for rank in job.everybody:
            job.kill(rank)

    job.hook("regrouped", 1, lambda _: job.hook(f"{('COMPUTE', 'UPDATING')[seed % 2]} {AT + 1}", 1, strike))
    return scenario


def controller_dies(seed: int) -> Scenario:
    """While they write, publish or regroup: its standby does all of it again, or what remains."""
    scenario = _calm(seed, standbys=1, harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    moment = ("writing", "publish_sent", "published", "got Regroup", "filled", "regrouped")[seed % 6]
    job.hook(moment, 1, lambda _: job.scheduler.after(0.001 * (seed % 5), job.controllers[0].kill))
    return scenario


def slow_writer_is_passed_over(seed: int) -> Scenario:
    """Another rank writes its part, and what the slow one does at it must not go on while it regroups."""
    scenario = _calm(seed, ring(4, replicas=3), harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.slow = True
    job.ranks[seed % 3].slow_work["write"] = 15.0
    return scenario


def slow_publisher_is_passed_over(seed: int) -> Scenario:
    """Another rank publishes in its place, and all are ordered to regroup while it is still at it."""
    scenario = _calm(seed, (even(4), ring(4, replicas=3))[seed % 2], harmless=False, times=FIRST)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.slow = True
    job.holds[("manifest", "rename", "tracker")[seed % 3]] = Hold(longest_s=15.0, progresses=True)
    return scenario


ARRANGED = (
    one_dies, dies_twice, another_dies_while_they_write, cannot_be_regrouped, all_die_when_it_is_published, all_die_behind_it, controller_dies, slow_writer_is_passed_over,
    slow_publisher_is_passed_over,
)  # fmt: skip
