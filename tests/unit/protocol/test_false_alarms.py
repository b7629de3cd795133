"""A noisy job is not called hung: 10,000 steps with evaluations and saves between, through the controller's machine."""

from __future__ import annotations

import pytest

from benchmarks.false_alarms import STEPS, TAILS, alarms
from ttp.controller.core.facts import pace as progress
from ttp.hang_limits import HangLimits


@pytest.mark.parametrize(("seed", "mean_s"), [(1, 0.02), (2, 0.5)])
def test_ten_thousand_noisy_steps_raise_no_alarm(seed: int, mean_s: float) -> None:
    assert STEPS == 10_000
    assert alarms(seed, mean_s, TAILS["none"]) == []


def test_an_evaluation_that_was_not_announced_is_taken_for_a_hang_and_named_by_its_limit() -> None:
    """The measure can fail: the same job, in which rank 0 evaluates for 12 s without a pause."""
    lines = alarms(1, 0.02, TAILS["none"], unannounced_s=12.0)
    assert lines and all("(limit 10.0 s: TTP_HANG_FLOOR_S)" in text for text in lines)


def test_an_evaluation_on_one_rank_makes_no_slow_steps_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were each rank's own time believed, steps of an evaluation would be the usual ones where it is frequent."""
    slow_s: list[float] = []

    def noting(pace: progress.Pace, hang: HangLimits) -> float:
        if len(pace.durations) >= 2 * progress.ENOUGH:
            slow_s.append(sorted(pace.durations)[int(progress.HIGH * (len(pace.durations) - 1))])
        return limit(pace, hang)

    limit = progress.limit
    monkeypatch.setattr("benchmarks.false_alarms.EVALUATE_EVERY", 5)
    monkeypatch.setattr("benchmarks.false_alarms.STEPS", 200)
    monkeypatch.setattr(progress, "limit", noting)
    assert alarms(3, 0.5, TAILS["none"]) == []
    assert len(slow_s) > 100 and max(slow_s) < 2.0
