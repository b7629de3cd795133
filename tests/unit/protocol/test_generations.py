"""Which of several processes has a rank's place, function by function; whole jobs are in test_seats.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import HALVES, ControllerBench
from tests.unit.protocol.test_seats import LEASE_S, able, seated, whole
from ttp.controller.core.facts.state import Gathering, Stage
from ttp.controller.core.ranks.generations import leads_earlier, refusal
from ttp.proto.messages import Cause, CauseKind, FaultReport, WorkerExit

NEW: dict[str, Any] = {"generation": 1, "regrouped": 1}


def gathering(*ranks: int, **of: Any) -> ControllerBench:
    """Return a standby to which processes of these ranks have come, of the first generation unless it is said otherwise."""
    bench = ControllerBench(HALVES, assembled=False, standby=1, lease_s=LEASE_S, address="s1")
    bench.say(*(coming(rank, **of) for rank in ranks))
    assert bench.at(Stage.GATHERING)
    return bench


def coming(rank: int, host: str = "", **of: Any) -> Any:
    return able(rank, host, controllers=("s0", "s1"), job_groups=2, **of)


def processes(bench: ControllerBench) -> dict[int, int]:
    """Return which process of each rank is known here."""
    known = (member.registration for member in bench.state.members.table)
    return {registration.rank: registration.pid for registration in known if registration is not None}


def early(bench: ControllerBench) -> list[tuple[int, ...]]:
    assert isinstance(bench.state.at, Gathering)
    return [cause.ranks for cause in bench.state.at.early]


# --- who is refused ---


def test_while_all_regroup_only_a_process_of_this_regrouping_has_a_lost_ranks_place() -> None:
    bench = seated()
    assert refusal(bench.state, able(2, pid=999)) and not refusal(bench.state, able(2, "c", pid=202, vacant=1))
    assert not refusal(bench.state, able(0)), "it stays"


def test_a_process_that_has_come_has_the_place_also_when_regrouping_fails() -> None:
    bench = seated()
    bench.say(able(2, "c", pid=202, vacant=1))
    bench.wait(30.0, senders=(0, 1, 2))
    assert not bench.at(Stage.REGROUPING) and bench.state.generation == 0
    assert "of generation 0 of the job's groups, which are in 1" in refusal(bench.state, able(2))


# --- who is not taken in ---


@pytest.mark.parametrize(("regrouped", "leads"), [(0, False), (1, False), (2, True)])
def test_a_controller_leads_earlier_processes_if_none_is_of_the_generation_that_one_has_found_whole(
    regrouped: int, leads: bool
) -> None:
    bench = whole()
    assert leads_earlier(bench.state, able(0, generation=regrouped, regrouped=regrouped)) is leads


def test_a_controller_that_gathers_its_ranks_takes_all_in() -> None:
    assert not leads_earlier(gathering(2).state, able(0, **NEW))


def test_a_controller_takes_in_those_that_have_found_its_own_regrouping_whole() -> None:
    """One that lost its stream may say so before it knows that all have."""
    assert not leads_earlier(seated().state, able(0, **NEW))


def test_one_process_of_that_generation_is_enough() -> None:
    bench = whole()
    later = able(0, generation=2, regrouped=2)
    assert leads_earlier(bench.state, later)
    table = bench.state.members.table
    member = table[1]
    assert member.registration is not None
    member = replace(member, registration=replace(member.registration, generation=2))
    members = replace(bench.state.members, table=table.put(1, member))
    assert not leads_earlier(replace(bench.state, members=members), later)


# --- who is forgotten by a controller that gathers its ranks ---


def test_those_that_have_begun_the_newest_generation_stay() -> None:
    """The first one has not found it whole yet."""
    bench = gathering(2)
    bench.say(coming(0, generation=1), coming(1, **NEW))
    assert processes(bench) == {0: 100, 1: 101}
    assert bench.logged("earlier_process") == [{"rank": 2, "host": "b", "pid": 102}]


def test_the_newest_generation_stays_known_when_one_comes_that_has_not_found_it_whole() -> None:
    bench = gathering(1, **NEW)
    bench.say(coming(0, generation=1))
    assert bench.state.generation == 1 and processes(bench) == {0: 100, 1: 101}


def test_one_in_a_ranks_place_has_its_earlier_process_forgotten_before_the_generation_is_whole() -> None:
    bench = gathering(2, 3)
    bench.say(coming(2, "c", pid=202, vacant=1))
    assert processes(bench) == {2: 202, 3: 103} and bench.state.generation == 0
    assert bench.state.members.table[2].dead is None


def test_another_process_of_the_same_generation_in_its_place_is_a_death() -> None:
    bench = gathering(2, **NEW)
    bench.say(coming(2, pid=999, **NEW))
    assert not bench.logged("earlier_process")
    dead = bench.state.members.table[2].dead
    assert dead is not None and dead.text == "process 102 was replaced by 999"


def test_what_an_earlier_process_reported_is_forgotten_with_it() -> None:
    """What others have reported stays."""
    bench = gathering(2)
    bench.say(coming(0, generation=1), *(FaultReport(rank, _raised(rank), "") for rank in (2, 0)))
    assert early(bench) == [(2,), (0,)] and [sign.rank for sign in bench.state.notes.signs] == [2, 0]
    bench.say(coming(1, **NEW))
    assert early(bench) == [(0,)] and [sign.rank for sign in bench.state.notes.signs] == [0]


def test_the_end_of_an_earlier_process_is_forgotten_when_the_one_in_its_place_comes() -> None:
    for pid, known in ((202, {2: 202}), (102, {2: 102})):
        bench = gathering(0)
        bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
        assert [sign.rank for sign in bench.state.notes.signs] == [2]
        bench.say(coming(2, "c", pid=pid, **NEW))
        assert processes(bench) == known
        assert (bench.state.members.table[2].dead is None) is (pid == 202)


def _raised(rank: int) -> Cause:
    return Cause(CauseKind.EXCEPTION, (rank,), "boom")
