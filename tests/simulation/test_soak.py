"""Thousands of jobs by seed: no invariant is violated, and every kind of fault acts wherever it can.

`SIMULATION_SEED=N` in the environment begins at another seed; `make soak` runs a million and wants every single cell.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.simulation.checks import violations
from tests.simulation.faults import KINDS
from tests.simulation.matrix import DUMP, PLACES, Tally, possible
from tests.simulation.replay import transcript
from tests.simulation.scenario import build
from tests.simulation.soak import gathered, reason_kind

BASE_SEED = int(os.environ.get("SIMULATION_SEED", "5000000"))
JOBS, CELLS_HIT = 2_000, 0.7
"""In `make test`: so many jobs, and the part of the cells that they hit at least; each is aimed at by about two, and one aim in five hits the rarest."""
JOBS_LONG, CELLS_HIT_LONG = 10_000, 0.98
"""The same in `make chaos`."""
TRANSCRIPTS = 8
MANY = 10
"""Second, third and later faults that so many jobs must meet at every stage of a dump."""
KEPT = 0.78
"""Part of the dumps and refusals that lose no committed step, at least; 80 to 82 of 100 at the seeds that were tried."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=[JOBS, pytest.param(JOBS_LONG, marks=pytest.mark.long)])
def many(request: pytest.FixtureRequest) -> Tally:
    """Run the jobs over all cores."""
    jobs: int = request.param
    print(f"seeds {BASE_SEED} to {BASE_SEED + jobs - 1}")
    return gathered(BASE_SEED, jobs, os.cpu_count() or 1, Console())


@pytest.mark.timeout(3600)
def test_no_job_violates_an_invariant(many: Tally) -> None:
    """A failing seed is printed in full by `python -m tests.simulation.replay SEED`."""
    assert many.jobs in (JOBS, JOBS_LONG)
    assert not many.failures, f"base seed {BASE_SEED}: {sorted(many.failures)[:3]}"


def test_every_kind_of_fault_acts_nearly_everywhere_it_can(many: Tally) -> None:
    """All kinds, all places, and all but the rarest of their pairs; nothing that is said to be impossible."""
    missing = many.missing()
    missed = f"base seed {BASE_SEED}: {len(missing)} of {len(possible())} cells not hit: {missing}"
    hit = CELLS_HIT if many.jobs == JOBS else CELLS_HIT_LONG
    assert len(missing) <= round((1 - hit) * len(possible())), missed
    assert {kind for kind, _ in many.cells} == set(KINDS), missed
    assert {place for _, place in many.cells} == set(PLACES), missed
    assert not many.impossible(), f"base seed {BASE_SEED}"


def test_a_dump_meets_second_and_third_faults_at_every_stage(many: Tally) -> None:
    """Rolling forward and publishing are over in milliseconds: some jobs have them take longer, and pile faults up there."""
    for place in DUMP:
        for order in ("second", "third", "later"):
            least = MANY if place != "regrouping" or order == "second" else 1  # there the second ends it
            assert many.orders[order, place] >= least, f"base seed {BASE_SEED}: {order} in {place}: {many.orders}"


def test_the_jobs_end_in_every_way_that_a_job_can(many: Tally) -> None:
    """Published most of all, and refused for every reason of the protocol."""
    for ended in ("published", "refused", "finished"):
        assert many.outcomes[ended] > many.jobs / 50, f"base seed {BASE_SEED}: {many.outcomes}"
    reasons = {
        "a shard has no live holder",
        "no step was finished yet",
        "no directory could be written",
        "all ranks are dead",
        "the fault took longer than it may",
        "no rank was attached any more",
    }
    assert reasons <= set(many.refusals), f"base seed {BASE_SEED}: {many.refusals}"
    assert set(many.refusals) == {reason_kind(reason) for reason in many.refusals}


def test_most_dumps_and_refusals_lose_no_committed_step(many: Tally) -> None:
    """That a job which loses some could not have kept them is checked in each; this bounds how many such jobs there are."""
    lost, whole = many.lost_steps, many.lost_steps[0]
    assert whole >= KEPT * lost.total(), f"base seed {BASE_SEED}: {sorted(lost.items())}"
    assert min(lost) >= 0, (
        f"base seed {BASE_SEED}: a checkpoint of a step that was never committed: {sorted(lost.items())}"
    )


def test_a_few_jobs_are_run_from_the_command_line() -> None:
    """Too few for every cell, which is not a failure then; the seeds and what became of them are printed."""
    command = [sys.executable, "-m", "tests.simulation.soak", str(BASE_SEED), "20", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seeds {BASE_SEED} to {BASE_SEED + 19}: 20 jobs" in done.stdout and "violations: 0" in done.stdout
    assert done.stdout.count("; not ") == 20, "the others are counted"


@pytest.mark.parametrize("hash_seeds", [("1", "2")])
def test_a_seed_gives_the_same_journals_whatever_pythons_hash_seed(hash_seeds: tuple[str, str]) -> None:
    """No order of a set or of hashed text gets into a decision: the transcripts are equal, letter by letter."""
    printed = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation.test_soak"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout
        for hash_seed in hash_seeds
    ]
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == TRANSCRIPTS


def main() -> None:
    """Print a digest of every transcript."""
    for seed in range(TRANSCRIPTS):
        scenario = build(seed)
        found = violations(scenario)
        text = "\n".join([*transcript(scenario), *found])
        print(seed, hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main()
