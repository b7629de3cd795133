"""What must not grow with the square of the world: the tables, the sentences about coverage, and a storm of peers' errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench
from tests.unit.protocol.test_controller_members import killed
from ttp.controller.core import machine
from ttp.controller.core.dump import freeze
from ttp.controller.core.facts import coverage
from ttp.controller.core.facts.events import Effect, HeartbeatBatch, Received, Send
from ttp.controller.core.facts.per_rank import PerRank
from ttp.controller.core.facts.state import Stage
from ttp.errors import ProtocolError
from ttp.proto.messages import Cause, CauseKind, FaultReport, Heartbeat, Phase, Registration, ShardGroup


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000])
def test_putting_many_values_is_putting_each(size: int) -> None:
    rng = random.Random(size)
    table = one_by_one = PerRank.filled(size, 0)
    values = {rank: rng.randrange(100) for rank in rng.sample(range(size), size // 2)}
    for rank, value in values.items():
        one_by_one = one_by_one.put(rank, value)
    assert table.put_all(values) == one_by_one and table.put_all({}) == table
    assert hash(table.put_all(values)) == hash(one_by_one)
    assert PerRank.of(list(one_by_one)) == one_by_one


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
    monkeypatch.setattr(freeze, "_KEPT_HINTS", 2)
    job = ControllerBench()
    for rank in (0, 1, 2):
        job.say(FaultReport(rank, Cause(CauseKind.PEER_ERROR, (rank,), "connection closed by peer"), ""))
    assert job.state.fault is not None and len(job.state.fault.causes) == 2
    assert len(job.logged("fault_reported")) == 3
    job.say(killed(3))
    assert job.state.fault is not None
    cause = freeze.root_cause(job.state.fault.causes)
    assert cause == Cause(CauseKind.EXITED, (3,), "signal SIGKILL")


def _sent_once(effects: Iterable[Effect]) -> list[Effect]:
    """Leave out what is sent to one rank again: a heartbeat that comes with one that ends a freeze cannot know of the end."""
    return [effect for effect in effects if not (isinstance(effect, Send) and len(effect.ranks) == 1)]


@pytest.mark.parametrize("seed", range(20))
def test_heartbeats_taken_together_are_heartbeats_taken_one_by_one(seed: int) -> None:
    """The same state and the same effects: calm, stalled, suspected, frozen for a hang, or with a dead rank among them.

    One that thaws a hang is followed by beats of a running job; in a batch they were still said behind the freeze.
    """
    rng = random.Random(seed)
    job = ControllerBench()
    place = {rank: 1 for rank in range(4)}
    for _ in range(rng.randrange(40)):
        rank = rng.randrange(4)
        place[rank] += rng.randrange(2)
        job.now += rng.choice((0.01, 0.2))
        job.say(Heartbeat(rank, rng.choice(tuple(Phase)), place[rank], waiting=rng.random() < 0.3))
    match seed % 4:
        case 1:
            job.close(1)
        case 2:
            job.say(killed(2))
        case 3:
            state = job.state
            cause = Cause(CauseKind.HUNG, (), "no rank progresses")
            frozen = freeze.begin_fault(state, (), cause, job.now, [])
            job.state = frozen.with_fault(replace(frozen.at.fault, unproven=cause))
    frozen_under = job.state.freeze_id if job.state.stage is Stage.FREEZING else 0
    beats = tuple(
        Heartbeat(
            rank,
            rng.choice(tuple(Phase)),
            place[rank] + rng.randrange(2),
            rng.random() < 0.5,
            rng.random() < 0.2,
            frozen=frozen_under,
            owes=bool(frozen_under),
        )
        for rank in rng.sample(range(4), 3)
    )
    before, now = job.state, job.now + 0.01
    together, of_batch = machine.transition(before, HeartbeatBatch(beats), now)
    one_by_one, each = before, list[Effect]()
    for beat in beats:
        one_by_one, effects = machine.transition(one_by_one, Received(beat), now)
        each += effects
    if seed % 4 == 3:
        together, one_by_one = replace(together, pace=before.pace), replace(one_by_one, pace=before.pace)
    assert together == one_by_one, f"seed {seed}"
    assert _sent_once(of_batch) == _sent_once(each), f"seed {seed}"


def test_a_batch_with_a_rank_of_another_world_is_refused_whole() -> None:
    """An event that raises changes nothing."""
    job = ControllerBench()
    with pytest.raises(ProtocolError, match="Heartbeat of rank 9, the world has ranks 0 to 3"):
        machine.transition(
            job.state, HeartbeatBatch((Heartbeat(0, Phase.DONE, 1), Heartbeat(9, Phase.DONE, 1))), job.now
        )
