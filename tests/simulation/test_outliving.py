"""Every fault that needs two coincidences can be made to act at its place, and no invariant breaks."""

from __future__ import annotations

import random

import pytest

from tests.simulation.checks import violations
from tests.simulation.held import LONGEST_S, Hold, stand_still
from tests.simulation.job import Job
from tests.simulation.matrix import Cell, possible
from tests.simulation.outliving import IN_TRAINING, STAGE_OF, STEPS, hold_rank, hold_work
from tests.simulation.scenario import Scenario, build
from tests.simulation.settings import Times
from tests.simulation.training import Training, even, ring

TRIES = 30
DUMP_AND_TAKEOVER = ("freezing", "rolling", "writing", "publishing", "exiting", "gathering", "leaderless")
_EVEN_RANKS_COVER = ring(5)
CELLS = [cell for cell in possible() if cell[0] in (*STEPS, *IN_TRAINING) and cell[1] in DUMP_AND_TAKEOVER]


def _arranged(seed: int, cell: Cell) -> Scenario:
    rng = random.Random(seed)
    kind, place = cell
    odd_rank_behind = place == "rolling" and kind in ("hang in compute", "slow rank")
    training = Training(_EVEN_RANKS_COVER if odd_rank_behind else even(4), 4, local_copy=odd_rank_behind)
    job = Job(rng, training, Times(), agents=True, standbys=1)
    arrange = hold_work if kind in STEPS else hold_rank
    return Scenario(seed, job, harmless=False, faults=[arrange(job, rng, kind, place)])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " in ".join(cell))
def test_a_fault_acts_where_it_is_arranged_to(cell: Cell) -> None:
    """Within a few jobs, none of which violates an invariant."""
    for seed in range(TRIES):
        scenario = _arranged(seed, cell)
        assert not violations(scenario), f"seed {seed}: {scenario.faults}"
        if cell in {(strike.kind, strike.where) for strike in scenario.job.strikes}:
            return
    pytest.fail(f"no job of {TRIES} had {cell[0]} act in {cell[1]}")


def _job() -> Job:
    return build(1, even(2), faults=False, steps=40).job


def test_a_held_rank_goes_on_when_the_job_comes_to_the_place() -> None:
    """Neither before nor later; the notes of its beginning and its end name the rank."""
    job, notes = _job(), list[tuple[str, int, float]]()
    hold = Hold(
        "controller killed",
        began=lambda rank: notes.append(("began", rank, job.now)),
        ends=lambda rank: notes.append(("ends", rank, job.now)),
    )
    job.scheduler.at(0.2, lambda: stand_still(job.ranks[1], hold))
    job.scheduler.at(0.3, job.controller.kill)
    job.run(0.299)
    assert job.ranks[1].stopped
    job.run(0.301)
    assert not job.ranks[1].stopped
    assert notes == [("began", 1, 0.2), ("ends", 1, 0.3)]


def test_a_hold_ends_by_itself_once() -> None:
    """A place that the job never comes to holds no rank up for good."""
    job, ended = _job(), list[float]()
    hold = Hold("stage gathering", ends=lambda rank: ended.append(job.now))
    job.scheduler.at(0.2, lambda: stand_still(job.ranks[1], hold))
    job.scheduler.at(0.2 + LONGEST_S + 1.0, lambda: job.happened("stage gathering", -1))
    job.run(0.2 + LONGEST_S + 2.0)
    assert ended == [0.2 + LONGEST_S]
    assert not job.ranks[1].stopped


def test_every_step_of_the_work_has_a_stage() -> None:
    """A kind of fault is arranged in steps that a rank really comes to."""
    assert {step for steps in STEPS.values() for step in steps} <= set(STAGE_OF)
