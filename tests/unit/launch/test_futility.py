"""A job that dies again and again before its first new step waits longer each time, and then stops."""

from __future__ import annotations

from ttp.launch.futility import LONGEST_WAIT_S, FutileStarts, Verdict


def judge(
    starts: FutileStarts, new_step: bool | None = False, lasted_s: float = 1.0, protected: bool = False
) -> Verdict:
    """Judge a start, by default one that died at once."""
    return starts.ended(new_step=new_step, lasted_s=lasted_s, protected=protected)


def test_the_third_futile_start_in_a_row_ends_the_job() -> None:
    """After waits of one and two seconds, with the reason and the flag."""
    starts = FutileStarts(3)
    first, second, third = (judge(starts) for _ in range(3))
    assert (first.stop, first.wait_s) == (False, 1.0) and first.text.startswith("this start ended before")
    assert (second.stop, second.wait_s) == (False, 2.0) and second.text.startswith("2 starts in a row ended before")
    assert third.stop and "3 starts in a row" in third.text and "--ttp-futile-starts 3" in third.text


def test_a_step_begins_the_count_anew() -> None:
    """One committed step between two deaths is progress."""
    starts = FutileStarts(2)
    assert not judge(starts).stop
    assert judge(starts, new_step=True) == Verdict(False, 0.0, "")
    assert not judge(starts).stop
    assert judge(starts).stop


def test_what_cannot_be_known_is_not_held_against_a_job() -> None:
    """The store went with its node; or a script without a session ran for a while."""
    starts = FutileStarts(1)
    assert not judge(starts, new_step=None).text
    assert not judge(starts, lasted_s=61.0).text
    assert judge(starts, lasted_s=61.0, protected=True).stop


def test_zero_never_stops_and_waits_are_bounded() -> None:
    """The number of restarts alone ends such a job."""
    starts = FutileStarts(0)
    verdicts = [judge(starts) for _ in range(20)]
    assert not any(verdict.stop for verdict in verdicts)
    assert [verdict.wait_s for verdict in verdicts[:6]] == [1, 2, 4, 8, 16, 30] and verdicts[
        -1
    ].wait_s == LONGEST_WAIT_S
