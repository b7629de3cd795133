"""How a job came back from a fault is read from its journal and metrics, and what is not as it should be is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ttp.chaos.kills_in_place import as_line, summary
from ttp.chaos.verdict.recoveries import (
    BY_CHECKPOINT,
    IN_PLACE,
    REFUSED,
    UNKNOWN,
    EndedFault,
    FaultEnding,
    FaultTally,
    RecoveryLimits,
    ending_of,
    in_place_line,
    misplaced,
    quantile,
)

KILLED_S = 100.0


def event(unix_s: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"unix_s": unix_s, "event": name, **fields}


def step(unix_s: float, number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "loss": "0x1p+0", "unix_s": unix_s, **more}


BEGUN = [
    event(99.0, "regrouped", freeze_id=1, step=4),
    event(100.005, "death_seen", rank=1),
    event(100.006, "freeze_sent", freeze_id=2),
    event(100.010, "frozen", records=[7, 8]),
    event(100.011, "decided", step=8),
]
ORDERED = [*BEGUN, event(100.012, "regroup_sent", freeze_id=2, step=8, replaced=[1])]
REGROUPED = [
    *ORDERED,
    event(100.2, "replacement_came", rank=1, pid=9),
    event(100.3, "regrouped", freeze_id=2, step=8, replaced=[1]),
]
FAILED = [
    *ORDERED,
    event(100.2, "regroup_failed", reason="rank 1 died"),
    event(100.25, "written"),
    event(100.3, "published", step=8, path="/x"),
]
METRICS = [step(99.9, 8), step(100.001, 9), step(100.4, 8, recovered=True), step(100.41, 9), step(100.5, 10)]
"""Step 9 was written by a rank 0 that died with it, and is trained again."""


def test_a_recovery_in_place_has_its_step_its_stages_and_the_ranks_that_were_replaced() -> None:
    """The step that counts is the one after the kept step, after the gates were opened; the fault before is another one."""
    one = ending_of(REGROUPED, METRICS, KILLED_S)
    assert one is not None and (one.how, one.step, one.why, one.replaced) == (IN_PLACE, 8, "", (1,))
    assert {stage: round(ms) for stage, ms in one.stages_ms.items()} == {
        "seen": 5,
        "frozen": 10,
        "decided": 11,
        "came": 200,
        "regrouped": 300,
        "new step": 410,
    }
    assert one.alone and one.freezes == (2,)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (FAILED, "rank 1 died"),
        ([*BEGUN, event(100.1, "not_in_place", reason="100 faults have ended"), *FAILED[-1:]], "100 faults have ended"),
        ([*BEGUN, *FAILED[-1:]], UNKNOWN),
    ],
)
def test_a_fault_that_ended_by_a_checkpoint_has_the_reason_why(lines: Sequence[dict[str, Any]], why: str) -> None:
    one = ending_of(lines, METRICS, KILLED_S)
    assert one is not None and (one.how, one.step, one.why) == (BY_CHECKPOINT, 8, why)
    assert round(one.stages_ms["published"]) == 300


TAKEN_OVER = [event(100.33, "freeze_sent", freeze_id=1 << 20), event(100.34, "took_over"), event(100.35, "thawed")]


def test_a_controller_that_took_over_ends_it_in_place_by_its_thaw() -> None:
    """Whether or not the one before it had opened the gates; a thaw without an order to regroup is a false alarm's."""
    for lines in ([*REGROUPED, *TAKEN_OVER], [*REGROUPED[:-1], *TAKEN_OVER]):
        one = ending_of(lines, METRICS, KILLED_S)
        assert one is not None and (one.how, one.step) == (IN_PLACE, 8)
    assert in_place_line([*REGROUPED, *TAKEN_OVER]) == REGROUPED[-1], "the gates were open before"
    late = [*REGROUPED[:-1], *TAKEN_OVER, event(105.0, "regrouped", step=8)]
    assert in_place_line(late) == {**TAKEN_OVER[-1], "step": 8}, (
        "what a stopped controller finds when it continues opens nothing"
    )
    assert in_place_line([*BEGUN[1:], *TAKEN_OVER]) is None and in_place_line([*FAILED, *TAKEN_OVER]) is None
    assert ending_of([*REGROUPED, *TAKEN_OVER[:-1]], METRICS, KILLED_S) is None


def test_a_refusal_has_its_reason_and_no_step() -> None:
    lines = [
        *ORDERED,
        event(100.1, "regroup_failed", reason="x"),
        event(100.1, "refused", reason="shard 0 has no holder"),
    ]
    one = ending_of(lines, METRICS, KILLED_S)
    assert one is not None and (one.how, one.step, one.why) == (REFUSED, None, "shard 0 has no holder")


@pytest.mark.parametrize(
    "lines",
    [
        BEGUN,
        ORDERED,
        [*REGROUPED, event(100.35, "freeze_sent", freeze_id=3)],  # the next fault came before the step
    ],
)
def test_a_fault_that_is_not_over_has_no_recovery(lines: Sequence[dict[str, Any]]) -> None:
    assert ending_of(lines, METRICS, KILLED_S) is None


def test_without_a_new_step_the_job_is_not_back() -> None:
    """Neither a step that was under way, nor one that was read back from a record, nor the kept one is new."""
    for metrics in (METRICS[:3], [*METRICS[:3], step(100.4, 8)], [*METRICS[:3], step(100.4, 9, recovered=True)]):
        assert ending_of(REGROUPED, metrics, KILLED_S) is None


def test_lines_of_an_earlier_fault_do_not_count() -> None:
    assert ending_of(BEGUN[:1], [step(100.4, 5)], KILLED_S) is None


def test_lines_of_a_later_fault_do_not_count() -> None:
    later = [*REGROUPED, event(200.0, "freeze_sent", freeze_id=3), event(200.1, "published", step=20, path="/x")]
    one = ending_of(later, METRICS, KILLED_S, until_unix_s=150.0)
    assert one is not None and one.how == IN_PLACE


BEFORE = {0: (10, 1), 1: (11, 1), 2: (12, 1)}


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        ({**BEFORE, 1: (20, 5)}, ""),
        ({**BEFORE, 1: (11, 5)}, ""),  # the number was used again
        (BEFORE, "rank 1 was lost and has the process that it had, 11"),
        ({**BEFORE, 1: (20, 5), 2: (21, 5)}, "rank 2 was not lost, and has process 21 in place of 12"),
        ({0: (10, 1), 1: (20, 5)}, "rank 2 has no process"),
    ],
)
def test_exactly_the_lost_ranks_have_other_processes(after: dict[int, tuple[int, int]], wrong: str) -> None:
    assert "; ".join(misplaced(BEFORE, after, [1])) == wrong


def fault(how: str = IN_PLACE, *, ms: float = 250.0, why: str = "", kept: int | None = 8, **fields: Any) -> EndedFault:
    end = FaultEnding(how, kept, why, (1,), {"new step": ms}, alone=bool(fields.pop("alone", False)))
    given: dict[str, Any] = {
        "ranks": (1,),
        "pids": (11,),
        "unix_s": (KILLED_S,),
        "after_step": 8,
        "before": BEFORE,
        "after": {**BEFORE, 1: (20, 5)},
    }
    return EndedFault(**{**given, **fields}, ending=end)


def test_a_fault_without_a_problem_has_none() -> None:
    assert fault().problems() == [] and fault(BY_CHECKPOINT, after={}).problems() == []


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (fault(after_step=9), "1 committed steps were lost"),
        (fault(after_step=9, ranks=(0,), after={**BEFORE, 0: (20, 5)}), "1 committed steps were lost"),
        (fault(after=BEFORE), "rank 1 was lost and has the process that it had, 11"),
        (fault(REFUSED, kept=None, why="no holder"), "refused: no holder"),
    ],
)
def test_what_is_wrong_is_found(one: EndedFault, problem: str) -> None:
    assert one.problems() == [problem] and f"WRONG: {problem}" in as_line(one)


def test_a_step_that_rank_0_alone_knew_of_is_not_lost() -> None:
    """Rank 0 had written it down and was killed; if another rank was killed, a survivor wrote it."""
    one = fault(after_step=9, ranks=(0,), after={**BEFORE, 0: (20, 5)}, alone=True)
    assert one.lost == 0 and not one.problems() and replace(one, ranks=(1,)).lost == 1


def test_the_summary_has_medians_tails_and_reasons() -> None:
    tally = FaultTally([fault(ms=float(ms)) for ms in range(1, 101)])
    tally.faults += [fault(BY_CHECKPOINT, ms=900.0, why=f"rank {kills} died", ranks=(1,) * kills) for kills in (1, 2)]
    lines = summary(tally)
    assert lines == [
        "in place: 100 of 102; kill to new step, ms (100 single kills): median 50, p90 90, p99 99, max 100",
        "by checkpoint: 2 of 102; kill to new step, ms (1 single kills): median 900, p90 900, p99 900, max 900",
        "not in place, 2 times: rank N died",
    ]
    assert [quantile([1.0, 2.0, 3.0], share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]


LIMITS = RecoveryLimits(median_s=0.5, p99_s=1.5, in_place=0.98)


@pytest.mark.parametrize(
    ("times_ms", "by_checkpoint_ms", "kept"),
    [
        ([500.0] * 100, [], [True, True, True]),
        ([499.0] * 49 + [502.0] * 51, [], [False, True, True]),
        ([400.0] * 98, [1501.0] * 2, [True, False, True]),  # a time counts however the fault ended
        ([400.0] * 97 + [1501.0], [600.0] * 2, [True, True, True]),  # one of a hundred is beyond the 99th percentile
        ([400.0] * 97, [600.0] * 3, [True, True, False]),
        ([], [], [False, False, False]),
    ],
)
def test_limits_are_of_all_single_kills(times_ms: list[float], by_checkpoint_ms: list[float], kept: list[bool]) -> None:
    """One that hits the process in the lost one's place, too, takes longer, and does not count."""
    tally = FaultTally([fault(ms=ms) for ms in times_ms] + [fault(BY_CHECKPOINT, ms=ms) for ms in by_checkpoint_ms])
    tally.faults += [fault(BY_CHECKPOINT, ms=9000.0, ranks=(1, 1)) for _ in range(9)]
    assert [good for _, good in tally.kept(LIMITS)] == kept


def test_a_limit_is_reported_with_what_was_measured_and_only_where_it_is_given() -> None:
    tally = FaultTally([fault(ms=250.0), fault(ms=300.0), fault(BY_CHECKPOINT, ms=900.0)])
    assert tally.kept(RecoveryLimits()) == []
    assert tally.kept(LIMITS) == [
        ("kill to new step, median of 3 single kills: 0.300 s, limit 0.5 s", True),
        ("kill to new step, p99 of 3 single kills: 0.900 s, limit 1.5 s", True),
        ("in place: 2 of 3 single kills, limit 98.0%", False),
    ]
    assert [text for text, _ in tally.kept(RecoveryLimits(p99_s=0.1))] == [
        "kill to new step, p99 of 3 single kills: 0.900 s, limit 0.1 s"
    ]
