"""What a controller takes from single heartbeats, and what it leaves: the edges of the pace."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.protocol.bench import registration
from tests.unit.protocol.test_hangs import COMPUTE, LIMITS, READY, after_step, stand, stepping, trained
from ttp.controller.core.facts import pace as progress
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.pace import advance, unknown
from ttp.controller.core.facts.state import Stage
from ttp.hang_limits import HangLimits
from ttp.proto.messages import Heartbeat


def test_a_step_may_take_no_time_that_the_clock_can_measure() -> None:
    assert progress.learn(unknown(4), 2, (0.0, 1.0), LIMITS).durations == (0.0, 1.0)


def test_a_rank_that_is_behind_takes_no_finished_step_back() -> None:
    pace, _ = stepping([1.0] * 12)
    shorter = progress.learn(pace, 10, (0.5,), LIMITS)
    assert shorter.steps == 12 and shorter.numbers == pace.numbers and shorter.durations[9:] == (0.5, 1.0, 1.0)


def test_a_time_counts_for_its_own_step_alone() -> None:
    """A rank may report that it has finished steps without saying how long the newest took."""
    silent = progress.learn(unknown(4), 5, (), LIMITS)
    assert (silent.steps, silent.durations) == (5, ())
    assert progress.learn(silent, 5, (0.5,), LIMITS) is silent, "no known step is shortened, and none is new"
    known = progress.learn(progress.learn(silent, 6, (1.0,), LIMITS), 9, (1.0,), LIMITS)
    assert known.numbers == (6, 9)
    assert progress.learn(known, 8, (0.5,), LIMITS).durations == (1.0, 1.0)


def test_a_shorter_time_of_a_step_that_another_rank_has_reported_counts() -> None:
    """Also when it comes by heartbeat, with as many steps as are known."""
    pace, now = stepping([1.0] * 12)
    pace = advance(pace, after_step(1, 12, 0.5), now, LIMITS)
    assert pace.steps == 12 and pace.durations == (*(1.0,) * 11, 0.5)


def test_the_floor_also_holds_for_the_first_steps() -> None:
    limits = HangLimits(start_s=20.0, floor_s=60.0)
    assert progress.limit(unknown(4), limits) == 60.0
    assert progress.limit(unknown(4), replace(limits, start_s=90.0)) == 90.0


def test_a_standstill_that_a_fault_has_interrupted_is_noted_anew() -> None:
    job = trained(lease_s=1000.0, heartbeat_s=500.0)
    stand(job, *((READY, 12, True),) * 4)
    job.take(Tick(), after=2.5)
    job.close(1)
    job.say(registration(1), after=1.0)
    assert job.at(Stage.RUNNING)
    job.take(Tick(), after=2.5)
    assert len(job.logged("stalled")) == 2 and not job.logged("hung")


def test_a_rank_that_goes_on_goes_on_once() -> None:
    """The journal has a line of it only where a standstill had been noted."""
    job = trained()
    job.take(Tick(), after=2.5)
    for step in (13, 14):
        job.say(Heartbeat(0, COMPUTE, step))
    assert len(job.logged("moving_again")) == 1
    job.say(Heartbeat(0, COMPUTE, 15), after=1.0)
    assert len(job.logged("moving_again")) == 1


def test_a_look_at_leases_notes_no_standstill_before_its_time() -> None:
    job = trained(lease_s=1.5, heartbeat_s=0.5)
    stand(job, *((READY, 12, True),) * 4)
    for _ in range(4):
        job.now += 0.5
        stand(job, *((READY, 12, True),) * 4)
        job.take(Tick())
    assert job.at(Stage.RUNNING) and not job.logged("stalled")
    job.take(Tick(), after=0.5)
    assert job.logged("stalled")


def test_a_rank_that_falls_silent_as_the_limit_passes_makes_one_fault() -> None:
    """No hang begins beside it."""
    job = trained(lease_s=7.5, heartbeat_s=4.0)
    stand(job, *((READY, 12, True),) * 4)
    for seconds in (2.5, 2.4):
        job.now += seconds
        job.say(*(Heartbeat(rank, READY, 12, True) for rank in (0, 1, 3)))
        job.take(Tick())
    assert job.at(Stage.RUNNING) and job.logged("stalled")
    job.take(Tick(), after=0.1)
    assert job.at(Stage.FREEZING) and [line["rank"] for line in job.logged("suspect")] == [2]
    assert not job.logged("hung") and job.state.fault is not None and job.state.fault.unproven is None
