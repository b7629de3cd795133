"""The judge finds a difference in one bit and reads the time line of a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.chaos.test_judge import KILLED_S, SAVED, good_run, line
from ttp.chaos.kills import judged
from ttp.chaos.observed.recorder import Record, Resumed, Seen
from ttp.chaos.observed.training_job import Kill
from ttp.chaos.run.campaign import compared
from ttp.chaos.verdict.fault_outcome import ENDED, Firing, settle
from ttp.chaos.verdict.invariants import VIOLATED, judge
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


RELAUNCHED = "relaunched"
FULL = Firing("fill_disk", "/c", KILLED_S, "", SAVED, (1, 0))
BROKE = Firing("corrupt", "iter_0000004/a.distcp", KILLED_S, "", SAVED, (1, 0))


def loaded_an_older_one(record: Record, seen: Seen, *, skipped: tuple[str, ...] = (), event: str = "published") -> None:
    """The next attempt loads step 3, with another checkpoint on disk; of the fault the journal has this event."""
    record.journal[6] = {**line(event, 100.2), "reason": "no holder"} if event != "published" else record.journal[6]
    record.checkpoints = [seen]
    record.hellos.append((110.0, (1, 2), 0, 90))  # of another fault's attempt
    record.resumes = [Resumed(3, 104.0, rank, (1, 1), "/c/iter_0000003", skipped) for rank in (0, 1)]


def judged_of(change: Callable[[Record], None], how: str, *firings: Firing) -> tuple[str, set[str]]:
    """Return what became of the fault, and the invariants of a checkpoint and its loading that were violated."""
    run = good_run(change)
    (incident,) = run.incidents
    incident.firings += firings
    settle(incident, run.record, how)
    violated = {verdict.name.split()[0] for verdict in judge(run) if verdict.state == VIOLATED}
    return incident.outcome, violated & {"I9", "I10"}


@pytest.mark.parametrize(
    ("how", "skipped", "event", "outcome"),
    [
        (RELAUNCHED, (), "published", RELAUNCHED),
        ("", ("iter_0000005: bits",), "published", "fell_back"),
        ("", (), "refused", "refused"),
    ],
)
def test_whatever_became_of_a_fault_the_newest_whole_checkpoint_is_loaded(
    how: str, skipped: tuple[str, ...], event: str, outcome: str
) -> None:
    """One that the harness broke, that is on a disk that it filled, that is broken, or that came later may be passed over."""
    whole = Seen("/c/iter_0000004", 4, 99.0, "", "periodic")

    def found(seen: Seen, *firings: Firing) -> set[str]:
        change = partial(loaded_an_older_one, seen=seen, skipped=skipped, event=event)
        became, violated = judged_of(change, how, *firings)
        assert became == outcome
        return violated

    assert found(whole) == {"I10"}
    assert found(replace(whole, path="/c/iter_0000003", step=3)) == set()
    assert found(whole, FULL) == set() and "I10" not in found(whole, BROKE)
    assert found(replace(whole, broken="a file is missing")) == set()
    assert found(replace(whole, unix_s=103.5)) == set()


def test_a_relaunched_job_had_a_checkpoint_or_a_refusal() -> None:
    """It must not go on with neither."""

    def without(event: str) -> Callable[[Record], None]:
        def change(record: Record) -> None:
            record.journal[6] = line(event, 100.2, reason="no holder")

        return change

    assert judged_of(without("refused"), RELAUNCHED) == (RELAUNCHED, set())
    assert judged_of(without("exit_sent"), RELAUNCHED) == (RELAUNCHED, {"I9"})


def test_a_job_that_ended_before_it_loaded_anything_has_passed_nothing_over() -> None:
    """That it ended is the violation."""
    assert judged_of(lambda record: record.resumes.clear(), ENDED) == (ENDED, set())


def test_a_run_without_a_checkpoint_at_its_end_is_not_the_baseline_run() -> None:
    """A newer one only has no counterpart."""
    final = Path("/baseline/iter_0000060")
    assert compared([], final) == ["the run has no checkpoint at its end, the baseline run's newest is iter_0000060"]
    assert compared([Path("/run/iter_0000062")], final) is None
    differences = compared([Path("/run/iter_0000050")], final)
    assert differences and "cannot be compared" in differences[0]
