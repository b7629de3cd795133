"""Standbys that are lost are replaced: which rank is asked for one, when, and when another one is."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench
from ttp.proto.messages import StandbyReport, StartStandby

START_S = 20.0


def short_of_two() -> ControllerBench:
    """Return a job that has no standby, is to have two, and has asked rank 0 for one."""
    bench = ControllerBench(standbys=2, standby_start_s=START_S)
    assert asked(bench) == [0]
    return bench


def asked(bench: ControllerBench) -> list[int]:
    """Return which ranks were asked for a standby so far, in order."""
    return [int(str(fields["rank"])) for fields in bench.logged("standby_asked")]


def started(rank: int) -> StandbyReport:
    return StandbyReport(rank, f"host{rank}:29600", True)


def test_the_next_one_is_asked_for_as_soon_as_one_has_been_started() -> None:
    bench = short_of_two()
    bench.say(started(0), after=1.0)
    assert asked(bench) == [0, 1] and len(bench.logged("standby_started")) == 1
    assert list(bench.sent(StartStandby)) == [1]
    bench.say(started(1), after=1.0)
    bench.wait(3 * START_S)
    assert asked(bench) == [0, 1], "there are two"


def test_another_rank_is_asked_at_once_where_one_cannot() -> None:
    bench = short_of_two()
    bench.say(StandbyReport(0, "", False, "no memory"), after=1.0)
    assert asked(bench) == [0, 1]
    (failed,) = bench.logged("standby_failed")
    assert failed == {"rank": 0, "text": "no memory"}


def test_another_rank_is_asked_where_one_does_not_answer_in_time() -> None:
    bench = short_of_two()
    bench.wait(0.9 * START_S)
    assert asked(bench) == [0]
    bench.wait(0.2 * START_S)
    assert asked(bench) == [0, 1]


def test_a_rank_that_could_not_is_asked_again_when_all_were() -> None:
    bench = short_of_two()
    for rank in range(4):
        bench.say(StandbyReport(rank, "", False, "no memory"))
    assert asked(bench) == [0, 1, 2, 3]
    bench.wait(1.1 * START_S)
    assert asked(bench) == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("times", [1, 2])
def test_a_standby_that_has_ended_is_replaced_and_noted_once(times: int) -> None:
    bench = short_of_two()
    bench.say(started(0), started(1))
    for _ in range(times):
        bench.say(StandbyReport(1, "host1:29600", False))
    assert len(bench.logged("standby_lost")) == 1 and asked(bench)[:2] == [0, 1] and len(asked(bench)) == 3
