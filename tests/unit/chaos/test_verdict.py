"""The judge finds a difference in one bit and reads the time line of a fault."""

from __future__ import annotations

from typing import Any

import pytest

from ttp.chaos.kills import judged
from ttp.chaos.observed.training_job import Kill
from ttp.chaos.verdict.timeline import compare, lost_steps, timeline


def metric(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss.hex(), "grad_norm": (loss / 3).hex(), **more}


FINAL = {"step": 3, "weights_sha256": "aa"}
WHOLE = [metric(1, 5.0), metric(2, 4.0), metric(3, 3.0)]


def test_equal_runs_are_equal() -> None:
    """A resumed run may train a step twice, with the same bits."""
    faulted = [metric(1, 5.0), metric(2, 4.0), {"event": "resume", "from_step": 1}, metric(2, 4.0), metric(3, 3.0)]
    verdict = compare(faulted, WHOLE, FINAL, FINAL)
    assert verdict.equal and verdict.steps == 3


def test_one_bit_is_found() -> None:
    """Also in a line that a later line of the same step replaced."""
    faulted = [metric(1, 5.0), metric(2, 4.000000000000001), metric(2, 4.0), metric(3, 3.0)]
    verdict = compare(faulted, WHOLE, FINAL, FINAL)
    assert not verdict.equal and "step 2: loss" in verdict.differences[0]


def test_missing_steps_and_other_weights_are_found() -> None:
    """No line, no equality; and the final weights count."""
    verdict = compare(WHOLE[:2], WHOLE, {"step": 2, "weights_sha256": "bb"}, FINAL)
    assert [d.split(":")[0].split(" ")[0] for d in verdict.differences] == ["steps", "final", "final"]


def test_empty_runs_are_not_equal() -> None:
    """Nothing to compare is not a success."""
    assert not compare([], [], FINAL, FINAL).equal


def test_timeline_counts_from_the_kill() -> None:
    """Milliseconds, and what was published; the first new step is the resumed run's."""
    journal = [
        {"event": "death_seen", "unix_s": 100.005},
        {"event": "frozen", "unix_s": 100.01},
        {"event": "decided", "unix_s": 100.011},
        {"event": "written", "unix_s": 100.05},
        {"event": "published", "unix_s": 100.06, "step": 7, "path": "/x/iter_0000007"},
    ]
    metrics = [metric(7, 1.0, unix_s=99.9), metric(8, 1.0, unix_s=104.0)]
    line = timeline(journal, metrics, 100.0)
    assert line.death_seen is not None and round(line.death_seen) == 5
    assert line.first_new_step is not None and round(line.first_new_step) == 4000
    assert (line.step, line.path, lost_steps(line, 7), lost_steps(line, 9)) == (7, "/x/iter_0000007", 0, 2)


def test_timeline_of_a_refusal_says_why() -> None:
    """Nothing published: the stages are empty and the reason stands."""
    line = timeline([{"event": "refused", "unix_s": 100.2, "reason": "shard 1 of 2 has no holder"}], [], 100.0)
    assert line.published is None and line.step is None and "no holder" in line.refused
    assert lost_steps(line, 5) is None


@pytest.mark.parametrize(
    ("rank", "records", "lost", "alone"), [(0, [6, 7], 0, 1), (0, [7, 8], 1, 0), (1, [6, 7], 1, 0)]
)
def test_a_step_that_only_the_dead_rank_knew_of_is_not_lost(
    rank: int, records: list[int], lost: int, alone: int
) -> None:
    """Rank 0 had written step 8 down, and no other rank had its record; a survivor's record makes it a lost step."""
    journal = [
        {"event": "frozen", "unix_s": 1.0, "records": records},
        {"event": "published", "unix_s": 2.0, "step": 7, "path": "/x"},
    ]
    kill = Kill(rank, 100, 0.5, 8)
    survived = judged(kill, timeline(journal, [], kill.unix_s), journal)
    assert (survived.lost, survived.alone) == (lost, alone)
