"""What must not grow with the square of the world: the tables, the sentences about coverage, and a storm of peers' errors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.unit.protocol.bench import ControllerBench
from tests.unit.protocol.test_controller_members import killed
from ttp.controller import coverage, rounds
from ttp.controller.rank_table import RankTable
from ttp.proto.messages import Cause, CauseKind, FaultReport, Registration, ShardGroup


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000])
def test_putting_many_values_is_putting_each(size: int) -> None:
    rng = random.Random(size)
    table = one_by_one = RankTable.filled(size, 0)
    values = {rank: rng.randrange(100) for rank in rng.sample(range(size), size // 2)}
    for rank, value in values.items():
        one_by_one = one_by_one.put(rank, value)
    assert table.put_all(values) == one_by_one and table.put_all({}) == table
    assert hash(table.put_all(values)) == hash(one_by_one)


class CountedHosts(tuple[str, ...]):
    """A tuple of hosts that counts how often it is gone through."""

    walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        type(self).walks += 1
        return super().__iter__()


@pytest.mark.parametrize("say", [coverage.survives, coverage.warnings])
def test_the_hosts_are_not_gone_through_once_for_each_shard(say: Callable[[coverage.Coverage], object]) -> None:
    """At 100,000 ranks that took two and a half minutes."""

    def walks(world: int) -> int:
        half = world // 2
        found = coverage.coverage_of(
            Registration(r, world, f"node{r // 8}", r, (ShardGroup(f"{r % half:06}", "s", 8),), 0, ("/a",), "{}")
            for r in range(world)
        )
        CountedHosts.walks = 0
        say(coverage.Coverage(found.groups, CountedHosts(found.hosts)))
        return CountedHosts.walks

    assert walks(16) == walks(400)


def test_peers_errors_beyond_a_number_are_journaled_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One death makes the collectives of all its peers fail: the cause stays the death, and says so."""
    monkeypatch.setattr(rounds, "_KEPT_HINTS", 2)
    job = ControllerBench()
    for rank in (0, 1, 2):
        job.say(FaultReport(rank, Cause(CauseKind.PEER_ERROR, (rank,), "connection closed by peer"), ""))
    assert job.state.fault is not None and len(job.state.fault.causes) == 2
    assert len(job.told("fault_reported")) == 3
    job.say(killed(3))
    assert job.state.fault is not None
    cause = rounds.root_cause(job.state.fault.causes)
    assert cause == Cause(CauseKind.EXITED, (3,), "signal SIGKILL")
