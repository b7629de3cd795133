"""A standstill is a hang only when it is long for this very job, and only until some rank is seen to have progressed."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core import machine
from ttp.controller.core.facts import pace as progress
from ttp.controller.core.facts.events import Send, Tick
from ttp.controller.core.facts.pace import ENOUGH, Pace, Place, advance, limit, suspects, unknown
from ttp.controller.core.facts.state import Stage
from ttp.hang_limits import HangLimits
from ttp.proto.messages import (
    CauseKind,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    PublishOrder,
    Thaw,
)

COMPUTE, READY, UPDATING, DONE = Phase.COMPUTE, Phase.READY, Phase.UPDATING, Phase.DONE
LIMITS = HangLimits(floor_s=1.0, early_floor_s=1.0, factor=10.0)


def stepping(durations: list[float], limits: HangLimits = LIMITS) -> tuple[Pace, float]:
    """Return the pace of a job whose rank 0 reported every step as it finished, and the time."""
    pace, now = unknown(4), 100.0
    pace = advance(pace, Heartbeat(0, COMPUTE, 1), now, limits)
    for number, duration in enumerate(durations):
        now += duration
        pace = advance(pace, after_step(0, 1 + number, duration), now, limits)
    return pace, now


def after_step(rank: int, steps: int, *times_s: float) -> Heartbeat:
    """Return the heartbeat of a rank that has just finished its `steps`-th step."""
    return Heartbeat(rank, COMPUTE, 1 + steps, steps=steps, step_times_s=times_s)


def trained(step_s: float = 0.5, steps: int = 12, **settings: float) -> ControllerBench:
    """A job whose four ranks reported each step as they finished it, all at once; they are in step `steps` now."""
    times: dict[str, Any] = {
        "hang_floor_s": 1.0,
        "hang_early_floor_s": 1.0,
        "hang_factor": 10.0,
        "lease_s": 1000.0,
        "heartbeat_s": 500.0,
    }
    job = ControllerBench(**times | settings)
    for step in range(steps):
        job.now += step_s
        job.say(*(after_step(rank, step, *((step_s,) if step else ())) for rank in range(4)))
    return job


def stand(job: ControllerBench, *places: tuple[Phase, int, bool]) -> None:
    """Say for ranks 0, 1, ... where they are."""
    job.say(*(Heartbeat(rank, phase, step, waiting) for rank, (phase, step, waiting) in enumerate(places)))


def hang(job: ControllerBench) -> None:
    """Let the limit pass."""
    job.take(Tick(), after=job.state.pace.limit_s / 2)
    job.take(Tick(), after=job.state.pace.limit_s / 2)
    assert job.at(Stage.FREEZING)


# --- the limit ---


def test_a_job_that_hangs_in_its_first_step_is_found_after_the_limit_for_the_start() -> None:
    job = ControllerBench(hang_start_s=20.0, hang_floor_s=1.0, lease_s=1000.0, heartbeat_s=500.0)
    stand(job, (COMPUTE, 1, True), (COMPUTE, 1, False), (COMPUTE, 1, True), (COMPUTE, 1, True))
    job.take(Tick(), after=10.0)
    assert job.logged("stalled") and job.at(Stage.RUNNING)
    job.take(Tick(), after=9.9)
    assert job.at(Stage.RUNNING)
    job.take(Tick(), after=0.1)
    assert job.logged("hung")[0]["ranks"] == (1,)


def test_a_controller_that_takes_over_knows_the_pace_from_the_ranks() -> None:
    """What the ranks measured makes the limit."""
    job = ControllerBench(hang_floor_s=1.0, hang_early_floor_s=1.0, assembled=False)
    for rank in range(4):
        job.say(replace(registration(rank), steps=ENOUGH + rank, step_times_s=(2.0,) * (ENOUGH + rank)))
    assert job.state.pace.limit_s == 20.0 and len(job.state.pace.durations) == ENOUGH + 3


def test_the_first_steps_have_a_generous_limit_of_their_own() -> None:
    pace, _ = stepping([0.1] * (ENOUGH - 1))
    assert pace.limit_s == LIMITS.start_s == 1800.0
    pace, _ = stepping([0.1] * ENOUGH)
    assert pace.limit_s == 1.0, "the floor"


def test_the_limit_follows_the_jobs_own_step_times() -> None:
    pace, _ = stepping([30.0] * 10)
    assert pace.limit_s == 300.0


def test_the_limit_is_doubled_while_step_times_vary() -> None:
    even, _ = stepping([1.0] * 20)
    uneven, _ = stepping([1.0, 1.0, 1.0, 4.0] * 5)
    assert even.limit_s == 10.0 and uneven.limit_s == 80.0
    little, much = (stepping([1.0, 1.0, 1.0, slow_s] * 5)[0].limit_s for slow_s in (2.0, 2.5))
    assert (little, much) == (20.0, 50.0), "more than twice the median is uneven"


def test_the_limit_is_made_of_the_ninth_tenth_and_the_median() -> None:
    """Of ten steps the ninth in order stands for a slow one, and the sixth for the usual."""
    pace, _ = stepping([1.0] * 8 + [1.5, 1.6])
    assert pace.limit_s == 15.0
    pace, _ = stepping([1.0] * 4 + [1.9] * 4 + [2.5] * 2)
    assert pace.limit_s == 25.0, "2.5 is less than twice 1.9"


def test_one_slow_step_in_many_moves_the_limit_little() -> None:
    pace, _ = stepping([1.0] * 40 + [4.0] + [1.0] * 10)
    assert pace.limit_s == 10.0


def test_a_longer_standstill_that_ended_by_itself_doubles_what_is_allowed() -> None:
    pace, _ = stepping([1.0] * 20 + [9.0] + [1.0] * 5)
    assert pace.limit_s == 18.0


def test_a_standstill_counts_from_the_eighth_step_on_and_only_if_it_is_the_longest() -> None:
    early, _ = stepping([1.0] * 7 + [9.0] + [1.0] * 20)
    pace, now = stepping([1.0] * 8 + [9.0] + [1.0] * 20)
    assert (early.limit_s, pace.limit_s) == (10.0, 18.0)
    assert progress.outlived(pace, now + 8.0, LIMITS) is pace
    assert progress.outlived(unknown(4), now, LIMITS) == unknown(4), "before the first heartbeat nothing stood still"


def test_a_rank_that_moves_within_the_newest_step_or_behind_it_progresses() -> None:
    """The job does not stand still while anybody moves."""
    pace, now = stepping([1.0] * 10)
    for rank, phase, step in ((0, READY, 11), (1, COMPUTE, 10), (1, READY, 10), (0, UPDATING, 11)):
        now += 4.0
        pace = advance(pace, Heartbeat(rank, phase, step), now, LIMITS)
        assert (pace.moved_at, pace.front) == (now, 11)


def test_the_starts_own_standstill_does_not_raise_the_limit() -> None:
    """Loading and compiling take minutes once."""
    pace, _ = stepping([600.0] + [1.0] * 40)
    assert pace.limit_s == 10.0


def test_old_step_times_are_forgotten() -> None:
    pace, _ = stepping([5.0] * 20 + [0.5] * progress.KEPT)
    assert pace.durations == (0.5,) * progress.KEPT


def test_a_pace_is_made_of_eight_to_sixty_four_steps() -> None:
    """The first seven are the start's; what was before the newest sixty-four is forgotten."""
    early, _ = stepping([30.0] * 7)
    known, _ = stepping([30.0] * 8)
    assert (early.limit_s, known.limit_s) == (1800.0, 300.0)
    long, _ = stepping([30.0] * 80)
    assert len(long.durations) == 64
    assert len(progress.learn(unknown(4), 80, (1.0,) * 80, LIMITS).durations) == 64


def test_a_step_takes_as_long_as_the_rank_that_did_not_wait() -> None:
    """Rank 0 evaluates alone for a minute, and says so; the others wait for it within their own step."""
    pace, _ = stepping([1.0] * 20)
    for times_s in ((61.0,), (1.0,), (61.0,)):
        pace = progress.learn(pace, 21, times_s, LIMITS)
    assert pace.durations == (1.0,) * 21 and pace.limit_s == 10.0
    pace = progress.learn(pace, 24, (61.0, 1.0, 1.0), LIMITS)
    pace = progress.learn(pace, 23, (1.0, 1.0, 1.0), LIMITS)
    assert pace.durations == (1.0,) * 24, "also when others have gone on since"


def test_times_of_steps_that_are_known_teach_nothing() -> None:
    pace, _ = stepping([1.0] * 10)
    assert progress.learn(pace, 10, (9.0,) * 10, LIMITS) is pace
    assert progress.learn(pace, 3, (9.0,) * 3, LIMITS) is pace
    assert progress.learn(pace, 11, (9.0,) * 11, LIMITS).durations == (*(1.0,) * 10, 9.0)


@pytest.mark.parametrize("times_s", [(float("nan"),), (-1.0,), (inf, 1.0)])
def test_what_no_clock_measured_teaches_nothing(times_s: tuple[float, ...]) -> None:
    pace, _ = stepping([1.0] * 10)
    assert progress.learn(pace, 12, times_s, LIMITS) is pace


def test_eight_steps_are_enough_however_many_heartbeats_they_take() -> None:
    """149 steps of 20 ms are over within three heartbeats."""
    pace = advance(unknown(4), Heartbeat(0, COMPUTE, 1), 100.0, LIMITS)
    pace = advance(pace, after_step(0, 50, *(0.02,) * 8), 101.0, LIMITS)
    assert (pace.limit_s, pace.steps, pace.durations) == (1.0, 50, (0.02,) * 8)
    slow, _ = stepping([100.0] * 7)
    assert slow.limit_s == 1800.0, "seven steps, in as many heartbeats as they take"


def test_the_floor_is_lower_once_fifty_steps_are_known() -> None:
    pace, _ = stepping([0.1] * 49, HangLimits())
    assert pace.limit_s == 60.0
    pace, _ = stepping([0.1] * 50, HangLimits())
    assert pace.limit_s == 10.0


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        ([0.1] * 7, "limit 1800.0 s: TTP_HANG_START_S, for the first 8 steps"),
        ([0.1] * 8, "limit 60.0 s: TTP_HANG_FLOOR_S before 50 steps"),
        ([0.1] * 50, "limit 10.0 s: TTP_HANG_FLOOR_S"),
        ([3.0] * 50, "limit 30.0 s: TTP_HANG_FACTOR, with 3 s for a slow step"),
        ([1.0, 1.0, 1.0, 4.0] * 15, "limit 80.0 s: twice TTP_HANG_FACTOR, with 4 s for a slow step"),
        ([1.0] * 50 + [40.0] + [1.0] * 30, "limit 80.0 s: 2 times the longest standstill so far"),
    ],
)
def test_a_hang_names_the_limit_in_force(durations: list[float], said: str) -> None:
    pace, now = stepping(durations, HangLimits())
    assert f"({said}): " in progress.standstill(pace, (0,), now + 1e4, HangLimits())


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_job_never_comes_near_its_limit(seed: int) -> None:
    """Step times with a spread of 30 %, whatever the heartbeats' timing: no gap between two moves passes half the limit."""
    rng = random.Random(seed)
    limits = replace(LIMITS, floor_s=0.01, early_floor_s=0.01)
    pace, now, worst = unknown(4), 0.0, 0.0
    position = 1.0
    for _ in range(3000):
        dt = rng.uniform(0.0, 0.5)
        now += dt
        position += dt / rng.uniform(0.7, 1.3)
        before = pace
        pace = advance(pace, Heartbeat(rng.randrange(4), COMPUTE, int(position)), now, limits)
        if before.limit_s < inf:
            worst = max(worst, (now - before.moved_at) / before.limit_s)
    assert worst < 0.5, f"seed {seed}"


# --- who is suspect ---


def places(*reported: tuple[Phase, int, bool]) -> Pace:
    pace = unknown(len(reported))
    for rank, (phase, step, waiting) in enumerate(reported):
        pace = replace(pace, places=pace.places.put(rank, Place(step, phase, waiting)))
    return pace


@pytest.mark.parametrize(
    ("reported", "named"),
    [
        ([(READY, 9, True), (COMPUTE, 9, False), (READY, 9, True)], (1,)),  # the others wait in the spanning collective
        ([(COMPUTE, 9, True), (COMPUTE, 9, False), (COMPUTE, 9, True)], (1,)),  # they wait for its gradients
        ([(DONE, 9, True), (UPDATING, 9, False), (DONE, 9, True)], (1,)),  # they wait for its parameters
        ([(COMPUTE, 10, True), (DONE, 9, False), (COMPUTE, 10, True)], (1,)),  # it loads data, or writes a log
        ([(READY, 9, False), (COMPUTE, 9, False), (READY, 9, False)], (1,)),  # a trainer that never says `waiting`
        ([(COMPUTE, 9, False), (COMPUTE, 9, False), (READY, 9, True)], (0, 1)),
        ([(COMPUTE, 9, False), (UPDATING, 8, False), (READY, 9, True)], (1,)),  # the one furthest behind
        ([(COMPUTE, 10, False), (READY, 9, False)], (0,)),  # READY waits, wherever it is
        ([(COMPUTE, 9, False)] * 3, ()),  # distinguishes none
        ([(READY, 9, True)] * 3, ()),  # the network itself
    ],
)
def test_the_suspects_are_those_that_do_not_wait_themselves(
    reported: list[tuple[Phase, int, bool]], named: tuple[int, ...]
) -> None:
    assert suspects(places(*reported), tuple(range(len(reported)))) == named


@pytest.mark.parametrize(("busy", "expected"), [(8, "7 in COMPUTE"), (9, "7 and 1 more in COMPUTE")])
def test_of_many_suspects_eight_are_named(busy: int, expected: str) -> None:
    pace = replace(places(*[(COMPUTE, 9, False)] * busy, (READY, 9, True)), moved_at=0.0)
    assert f"ranks 0, 1, 2, 3, 4, 5, 6, {expected} of step 9" in progress.standstill(
        pace, tuple(range(busy + 1)), 5.0, LIMITS
    )


# --- the machine ---


def test_a_standstill_is_noted_half_way_and_a_hang_at_the_limit() -> None:
    job = trained(step_s=0.5)
    stand(job, (READY, 12, True), (READY, 12, True), (COMPUTE, 12, False), (READY, 12, True))
    assert job.state.pace.limit_s == 5.0 and machine.next_deadline(job.state) == job.now + 2.5
    job.take(Tick(), after=2.5)
    assert job.logged("stalled")[0]["ranks"] == (2,) and job.at(Stage.RUNNING) and not only(job.effects, Send)
    assert machine.next_deadline(job.state) == job.now + 2.5, "noted once"
    job.take(Tick(), after=2.5)
    freezes = job.sent(Freeze)
    assert (
        sorted(freezes) == [0, 1, 2, 3] and freezes[0].cause.kind is CauseKind.HUNG and freezes[0].cause.ranks == (2,)
    )
    assert "rank 2 in COMPUTE of step 12, the others wait" in job.logged("hung")[0]["text"]


def test_a_hung_rank_that_closes_its_gate_is_a_holder() -> None:
    job = trained()
    stand(job, (READY, 12, True), (READY, 12, True), (COMPUTE, 12, False), (READY, 12, True))
    hang(job)
    job.say(*(report(rank, 1, READY, 12) for rank in (0, 1, 3)))
    assert job.at(Stage.FREEZING), "a hang is judged by all reports"
    job.say(report(2, 1, COMPUTE, 12))
    assert sorted(job.orders()) == [0, 1, 2, 3] and job.logged("decided")[0]["step"] == 11
    job.all_write(job.orders())
    ((_, order),) = job.sent(PublishOrder).items()
    assert order.cause.kind is CauseKind.HUNG and order.cause.ranks == (2,)


def test_a_rank_hung_in_its_update_is_left_out_and_its_record_used() -> None:
    job = trained()
    stand(job, (READY, 12, True), (DONE, 12, True), (UPDATING, 12, False), (READY, 12, True))
    hang(job)
    job.say(report(0, 1, READY, 12), report(1, 1, READY, 12), report(3, 1, READY, 12))
    job.say(report(2, 1, UPDATING, 12, closed=False, records=[12]))
    assert job.logged("decided")[0]["step"] == 12 and job.logged("decided")[0]["able"] == (0, 1, 3)


def test_a_rank_that_does_not_report_at_all_is_left_out_after_the_freeze_timeout() -> None:
    job = trained(freeze_timeout_s=10.0)
    stand(job, *((READY, 12, True),) * 4)
    hang(job)
    job.all_report(12, ranks=(0, 1, 2), phase=READY)
    assert machine.next_deadline(job.state) == job.now + 10.0
    job.take(Tick(), after=10.0)
    assert job.at(Stage.WRITING)


def test_a_rank_that_progressed_before_its_gate_closed_means_a_slow_job_and_thaws_it() -> None:
    job = trained()
    stand(job, *((COMPUTE, 12, False),) * 4)
    hang(job)
    limit_before = job.state.pace.limit_s
    job.say(report(1, 1, COMPUTE, 12), report(2, 1, READY, 12))
    assert sorted(job.sent(Thaw)) == [0, 1, 2, 3] and job.at(Stage.RUNNING)
    assert job.logged("not_hung") == [{"rank": 2, "step": 12}]
    assert job.state.pace.limit_s > limit_before, "it will not be called hung for the same again"
    assert job.state.pace.moved_at == job.now


def test_a_heartbeat_of_a_later_place_that_crossed_the_freeze_thaws() -> None:
    job = trained()
    stand(job, *((COMPUTE, 12, False),) * 4)
    hang(job)
    job.say(Heartbeat(3, COMPUTE, 12, False))
    assert job.at(Stage.FREEZING), "the same place proves nothing"
    job.say(Heartbeat(3, DONE, 12, False))
    assert job.at(Stage.RUNNING)


def test_a_rank_that_never_said_where_it_was_disproves_no_hang() -> None:
    job = ControllerBench(hang_start_s=20.0, hang_floor_s=1.0, lease_s=1000.0, heartbeat_s=500.0)
    stand(job, (COMPUTE, 1, False), (COMPUTE, 1, False), (COMPUTE, 1, False))
    hang(job)
    job.say(report(3, 1, READY, 1))
    assert job.at(Stage.FREEZING) and not job.logged("not_hung")


def test_a_death_during_a_hangs_freeze_is_a_cause_of_its_own() -> None:
    job = trained()
    stand(job, *((COMPUTE, 12, False),) * 4)
    hang(job)
    job.say(killed(3), report(0, 1, READY, 12), report(1, 1, COMPUTE, 12), report(2, 1, COMPUTE, 12))
    assert job.at(Stage.WRITING) and not job.logged("not_hung"), "a fault with a cause is not thawed"


def test_a_suspect_rank_is_waited_for_before_a_hang_is_judged() -> None:
    job = trained(lease_s=1000.0, heartbeat_s=500.0)
    stand(job, *((READY, 12, True),) * 4)
    hang(job)
    job.close(1)
    job.all_report(12, ranks=(0, 2, 3), phase=READY)
    assert job.at(Stage.FREEZING)
    job.say(registration(1))
    assert only(job.effects, Send) and job.sent(Freeze)[1].cause.kind is CauseKind.HUNG
    job.say(report(1, 1, READY, 12))
    assert job.at(Stage.WRITING)


def test_progress_after_a_stall_is_logged_and_learned() -> None:
    job = trained()
    job.take(Tick(), after=2.5)
    assert job.logged("stalled")
    job.say(Heartbeat(0, READY, 12), after=2.4)
    assert job.logged("moving_again") == [{"rank": 0, "after_s": 4.9}] and job.state.pace.limit_s == 9.8


def test_a_pause_that_was_announced_is_not_a_standstill() -> None:
    """An evaluation or a periodic save: heartbeats say so for as long as it lasts."""
    job = trained()
    stand(job, *((DONE, 12, False),) * 4)
    for _ in range(300):
        job.say(*(Heartbeat(rank, DONE, 12, False, paused=True) for rank in range(4)), after=0.25)
    assert job.at(Stage.RUNNING) and not job.logged("stalled") and job.state.pace.limit_s == 5.0
    hang(job)  # what comes after it counts again


def test_a_standstill_after_a_pause_is_noted_anew() -> None:
    job = trained()
    stand(job, *((DONE, 12, False),) * 4)
    job.take(Tick(), after=2.5)
    job.say(Heartbeat(0, DONE, 12, False, paused=True))
    job.take(Tick(), after=2.5)
    assert len(job.logged("stalled")) == 2 and job.at(Stage.RUNNING)


def test_finished_ranks_are_not_suspects() -> None:
    job = trained()
    stand(job, (DONE, 12, False), (DONE, 12, False), (DONE, 13, True), (DONE, 13, True))
    job.say(Finished(0))
    hang(job)
    assert job.logged("hung")[0]["ranks"] == (1,)


def test_a_frozen_job_is_not_called_hung() -> None:
    job = trained(lease_s=1000.0, heartbeat_s=500.0)
    job.close(1)
    assert job.at(Stage.FREEZING)
    job.take(Tick(), after=100.0)
    assert not job.logged("hung")
    job.say(registration(1))
    assert job.at(Stage.RUNNING) and machine.next_deadline(job.state) == job.now + job.state.pace.limit_s / 2


def test_a_controller_that_was_stopped_itself_calls_no_rank_hung() -> None:
    job = trained(heartbeat_s=1.0, lease_s=3.0)
    job.take(Tick(), after=100.0)
    assert job.at(Stage.RUNNING) and not job.logged("hung")


def test_a_peers_error_during_a_hangs_freeze_still_waits_for_its_culprit() -> None:
    job = trained(lease_s=30.0, heartbeat_s=20.0)
    stand(job, *((READY, 12, True),) * 4)
    hang(job)
    job.say(fault(1, CauseKind.PEER_ERROR))
    job.all_report(12, phase=READY)
    assert job.at(Stage.FREEZING)
    job.wait(30.1)
    assert job.at(Stage.WRITING)


def test_the_limit_is_at_least_the_floor_whatever_the_steps() -> None:
    limits = replace(LIMITS, floor_s=60.0, early_floor_s=60.0)
    pace, _ = stepping([1e-4] * 30, limits)
    assert limit(pace, limits) == 60.0
