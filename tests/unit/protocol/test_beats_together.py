"""Heartbeats of ranks that share a relay: all ranks on a node send theirs at the same moments, and never later than alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.protocol.bench import ProcessorBench
from ttp.processor.core.events import Disconnected
from ttp.proto.messages import Heartbeat, Welcome

LEASE_S = 1e6
"""No controller is silent for so long here."""
EVERY_S = st.sampled_from((0.1, 0.2, 1 / 3, 0.7, 1.0, 1.0005, 1.1, 2.5, 5.0))
BEATS = 40
LATE_S = 1e-5
"""A driver is never called at the very moment."""


def offset(values: st.SearchStrategy[float], least: float, most: float) -> st.SearchStrategy[float]:
    return st.tuples(values, st.floats(least, most)).map(sum)


MOMENTS = (
    st.floats(0.0, 100.0)
    | st.floats(0.0, 1e9)
    | offset(st.sampled_from((1e6, 1e7, 1e9)), 0.0, 1.0)
    | st.integers(0, 10**9).map(float)
)


@st.composite
def starts(draw: st.DrawFn) -> tuple[float, float]:
    """Return a heartbeat's time and a moment: any, or a multiple of it up to rounding."""
    every_s, nudges = draw(EVERY_S), draw(st.integers(-3, 3))
    if draw(st.booleans()):
        return every_s, draw(MOMENTS)
    moment = draw(st.integers(0, 10**8)) * every_s
    for _ in range(abs(nudges)):
        moment = max(0.0, math.nextafter(moment, math.copysign(math.inf, nudges)))
    return every_s, moment


def welcomed(every_s: float, moment: float, together: bool = True) -> ProcessorBench:
    rank = ProcessorBench(beats_together=together)
    rank.now = moment
    rank.receive(Welcome(1, 3, every_s, LEASE_S, ""))
    return rank


def beats(rank: ProcessorBench, late_s: float = 0.0, count: int = BEATS) -> list[float]:
    """Tick when the machine asks for it, or a little later; return when so many heartbeats were sent."""
    sent: list[float] = []
    for _ in range(10 * count):
        deadline = rank.deadline()
        assert deadline is not None
        assert not sent or deadline > rank.now, "the machine asks for a moment that has passed: its driver spins"
        rank.now = max(rank.now, deadline + late_s)
        rank.tick()
        sent += [rank.now] * len(rank.said(Heartbeat))
        if len(sent) == count:
            return sent
    raise AssertionError(f"{len(sent)} heartbeats of {10 * count} ticks")


def rounding(moment: float) -> float:
    """Return how far apart two ways of computing a moment may be."""
    return 8 * math.ulp(max(1.0, moment))


def multiple(moment: float, every_s: float, late_s: float) -> int:
    """Return which multiple a heartbeat was due at."""
    due = moment - late_s
    assert abs(math.remainder(due, every_s)) <= rounding(due)
    return round(due / every_s)


def check_beats(sent: list[float], every_s: float, late_s: float = 0.0) -> list[int]:
    """See that each comes in time; return the multiples of all but the first."""
    for before, moment in pairwise(sent):
        assert before < moment <= before + every_s + late_s + rounding(moment)
    return [multiple(moment, every_s, late_s) for moment in sent[1:]]


@given(starts())
@example((0.1, 0.3))
@example((0.2, 1e6 + 0.2))
@example((1.0, 0.0))
@example((1.0, 1e6))
@example((1 / 3, 1e6 + 2 / 3))
@example((5.0, 1e9 + 0.123))
def test_heartbeats_come_at_multiples_of_their_time_and_never_later_than_alone(begin: tuple[float, float]) -> None:
    """Whatever the moment at which they began: the first one comes at once, as on a stream of the rank's own."""
    every_s, moment = begin
    sent = beats(welcomed(every_s, moment))
    assert sent[0] == moment
    check_beats(sent, every_s)
    # up to rounding, a multiple may be reached twice: never three times
    assert all(later - before > every_s / 2 for before, later in zip(sent, sent[2:], strict=False))


@given(starts(), st.floats(LATE_S, 0.02))
@example((0.1, 0.3), LATE_S)
@example((0.2, 1e6 + 0.2), LATE_S)
@example((1.0, 1e6), 0.002)
def test_a_driver_that_comes_a_little_late_sends_one_heartbeat_at_each_multiple(
    begin: tuple[float, float], late_s: float
) -> None:
    """As every driver does: what it is late does not add up."""
    every_s, moment = begin
    first, *_ = sent = beats(welcomed(every_s, moment), late_s)
    multiples = check_beats(sent, every_s, late_s)
    assert first == pytest.approx(moment + late_s, abs=rounding(moment))
    assert multiples == list(range(multiples[0], multiples[0] + BEATS - 1))
    assert multiples[0] * every_s <= first + every_s + rounding(first)


@given(starts(), st.floats(0.0, 10.0))
@example((1.0, 7.3), 0.5)
def test_ranks_that_begin_at_different_moments_send_at_the_same_ones(begin: tuple[float, float], later: float) -> None:
    """`later`: in heartbeats."""
    every_s, moment = begin
    sent = [beats(welcomed(every_s, start), LATE_S)[1:] for start in (moment, moment + later * every_s)]
    one, other = ([multiple(moment, every_s, LATE_S) for moment in each] for each in sent)
    first, last = max(one[0], other[0]), min(one[-1], other[-1])
    shared = list(range(first, last + 1))
    assert len(shared) > BEATS / 2
    assert [each for each in one if first <= each <= last] == shared
    assert [each for each in other if first <= each <= last] == shared


def test_without_a_relay_a_rank_sends_a_heartbeats_time_after_the_one_before() -> None:
    sent = beats(welcomed(1.0, 7.3, together=False), 0.01, count=5)
    assert sent == pytest.approx([7.31, 8.32, 9.33, 10.34, 11.35])


def test_a_rank_that_stood_still_sends_at_once_and_then_at_multiples_again() -> None:
    """What it has missed is not made up for."""
    rank = welcomed(1.0, 7.3)
    assert beats(rank, count=3) == [7.3, 8.0, 9.0]
    rank.now = 21.6
    rank.tick()
    assert len(rank.said(Heartbeat)) == 1
    assert beats(rank, count=2) == [22.0, 23.0]


def test_a_rank_with_another_controller_sends_at_its_multiples() -> None:
    """A heartbeat's time is the controller's."""
    rank = welcomed(1.0, 7.3)
    assert beats(rank, count=2) == [7.3, 8.0]
    rank.receive(Welcome(1, 4, 2.5, LEASE_S, ""), after=0.4)
    assert beats(rank, count=3) == [8.4, 10.0, 12.5]


def test_a_rank_without_a_stream_sends_none() -> None:
    rank = welcomed(1.0, 7.3)
    assert beats(rank, count=2) == [7.3, 8.0]
    rank.take(Disconnected("reset"))
    rank.wait(3.0)
    assert not rank.said(Heartbeat)
