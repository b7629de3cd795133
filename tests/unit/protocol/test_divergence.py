"""Who is wrong is what most of all holders of a shard prove, and no rank is accused by another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.protocol.bench import MIB, report
from ttp.controller.core.facts.coverage import Group
from ttp.controller.core.facts.divergence import Dispute, judge
from ttp.proto.frozen import replace
from ttp.proto.messages import Digest, Phase, StateReport

THREE = (Group("g0", "shard 0", MIB, (0, 1, 2)),)
TWO = (Group("g0", "shard 0", MIB, (0, 1)), Group("g1", "shard 1", MIB, (2, 3)))


def reports_of(values: Mapping[int, int], holders: int, group: str = "g0", **fields: Any) -> dict[int, StateReport]:
    """Each rank's report of what it has read."""
    return {
        rank: replace(report(rank, 1, Phase.DONE, 7), digests=(Digest(group, value, holders),), **fields)
        for rank, value in values.items()
    }


def test_reports_without_digests_prove_nothing() -> None:
    assert judge(THREE, {rank: report(rank, 1, Phase.DONE, 7) for rank in range(3)}) == Dispute()


def test_the_odd_one_out_of_three_is_wrong() -> None:
    for wrong in range(3):
        values = {rank: 5 + (rank == wrong) for rank in range(3)}
        assert judge(THREE, reports_of(values, 3)) == Dispute(frozenset({wrong}))


@pytest.mark.parametrize("values", [{0: 5, 1: 6}, {0: 5}, {1: 6}])
def test_of_two_neither_is_wrong(values: dict[int, int]) -> None:
    found = judge(TWO, reports_of(values, 2))
    assert found == Dispute(frozenset(), ("shard 0 (held by ranks 0, 1)",))


def test_three_that_all_differ_are_undecided() -> None:
    assert judge(THREE, reports_of({0: 5, 1: 6, 2: 7}, 3)).undecided == ("shard 0 (held by ranks 0, 1, 2)",)


def test_a_holder_that_reports_nothing_counts_for_the_majority() -> None:
    """It may be the one that is right."""
    assert judge(THREE, reports_of({0: 5, 1: 6}, 3)).undecided
    assert judge(THREE, reports_of({0: 5, 1: 5}, 3)) == Dispute()


def test_a_holder_without_a_digest_is_neither_right_nor_wrong() -> None:
    """It reports, and of the shard that most others prove it says nothing: what it holds may be anything."""
    silent = {2: report(2, 1, Phase.DONE, 7)}
    assert judge(THREE, reports_of({0: 5, 1: 5}, 3) | silent) == Dispute(unproven=frozenset({2}))
    found = judge(TWO, reports_of({0: 5}, 2) | silent | {1: report(1, 1, Phase.DONE, 7)})
    assert found.unproven == frozenset({1}) and found.undecided, "rank 2 holds no shard that differs"


def test_holders_that_this_controller_never_knew_count_too() -> None:
    alone = (Group("g0", "shard 0", MIB, (2,)),)
    assert judge(alone, reports_of({2: 5}, 3)).undecided, "one of three"
    five = (Group("g0", "shard 0", MIB, (0, 1, 2)),)
    assert judge(five, reports_of({0: 5, 1: 5, 2: 6}, 5)).undecided, "two of five"
    assert judge(five, reports_of({0: 5, 1: 5, 2: 5}, 5)) == Dispute()


@pytest.mark.parametrize("fields", [{"torn": True}, {"closed": False}])
def test_only_states_that_stand_still_and_are_whole_count(fields: dict[str, Any]) -> None:
    reports = reports_of({0: 5, 1: 5}, 3) | reports_of({2: 6}, 3, **fields)
    assert judge(THREE, reports) == Dispute(unproven=frozenset({2}))
    assert judge(THREE, reports_of({0: 5, 2: 6}, 3) | reports_of({1: 5}, 3, **fields)).undecided


def test_another_ranks_shard_is_not_this_ranks_to_report() -> None:
    """A digest of a rank that holds no such shard says nothing."""
    assert judge(TWO, reports_of({0: 5, 1: 5, 2: 6}, 2)) == Dispute()


def test_a_holder_that_counts_fewer_than_this_controller_knows_proves_no_more() -> None:
    """It counts the ranks that it compares with; one of three proves nothing by that."""
    assert judge(THREE, reports_of({0: 5}, 1)).undecided
