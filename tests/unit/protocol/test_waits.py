"""How long an answer is waited for: what begins a wait, what prolongs it, and that nothing shortens it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import MIB, ControllerBench, registration, report
from tests.unit.protocol.test_controller_dump import dying, failed
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_takeover import LEASE_S, coming, standby
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import next_deadline
from ttp.proto.messages import CauseKind, Finished, Phase, Progress

READY, DONE, COMPUTE = Phase.READY, Phase.DONE, Phase.COMPUTE
PROGRESS_S = 30.0
SLOW_S = 60.0
"""How long a share of one MiB takes on the slow disk of these tests."""


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttp.controller.core.dump.writing.SLOW_DISK_BYTES_PER_S", MIB / SLOW_S)


def large_and_small() -> ControllerBench:
    """Ranks 0 and 1 share 2 MiB, 2 and 3 a hundredth of it; all write."""
    job = ControllerBench(((0, 1), (2, 3)), assembled=False, total_timeout_s=600.0)
    for rank in range(4):
        mine = registration(rank, job.holders)
        nbytes = 2 * MIB if rank < 2 else 2 * MIB // 100
        job.say(replace(mine, groups=tuple(replace(group, nbytes=nbytes) for group in mine.groups)))
    job.say(fault(0, CauseKind.EXCEPTION))
    job.all_report(7)
    assert sorted(job.orders()) == [0, 1, 2, 3]
    return job


def stuck_at(job: ControllerBench) -> float:
    """Let time pass until a rank counts as stuck; return when."""
    while not job.logged("stuck"):
        assert job.state.stage not in (Stage.EXITING, Stage.OVER)
        job.wait(0.5)
    return job.now


# --- writing ---


def test_the_largest_share_decides_how_long_writers_are_waited_for(slow_disk: None) -> None:
    """Whoever has it, the first rank or the last."""
    assert stuck_at(large_and_small()) == pytest.approx(PROGRESS_S + SLOW_S, abs=1.0)


def test_progress_never_shortens_the_wait_for_a_large_share(slow_disk: None) -> None:
    """A writer on a slow disk says at once that it has begun, and nothing until it is done."""
    job = large_and_small()
    job.say(Progress(0, 1), after=1.0)
    assert stuck_at(job) == pytest.approx(PROGRESS_S + SLOW_S, abs=1.0)


def test_an_answer_never_shortens_the_wait_for_a_large_share(slow_disk: None) -> None:
    """A small share is durable at once."""
    job = large_and_small()
    answer = job.written(3, job.orders()[3])
    job.say(answer, after=1.0)
    assert stuck_at(job) == pytest.approx(PROGRESS_S + SLOW_S, abs=1.0)


def test_a_small_share_that_is_handed_over_never_shortens_the_wait_for_a_large_one(slow_disk: None) -> None:
    """Rank 3 dies, and rank 2 has its part besides its own."""
    job = large_and_small()
    job.say(killed(3), after=1.0)
    assert sorted(job.orders()) == [2]
    assert stuck_at(job) == pytest.approx(PROGRESS_S + SLOW_S, abs=1.0)


def test_a_controller_that_was_away_never_shortens_the_wait_for_a_large_share(slow_disk: None) -> None:
    """What it grants for its absence comes on top, or not at all."""
    job = large_and_small()
    job.now += 10.0
    job.take(Tick())
    assert stuck_at(job) == pytest.approx(PROGRESS_S + SLOW_S, abs=1.0)


def test_a_controller_that_was_away_waits_as_long_as_if_it_had_asked_when_it_came_back() -> None:
    """Answers may wait in its queue."""
    job = dying()
    job.now += 10.0
    job.take(Tick())
    assert stuck_at(job) == pytest.approx(10.0 + PROGRESS_S, abs=1.0)


# --- rolling forward ---


def test_roll_forwards_are_waited_for_from_their_order_on() -> None:
    """The freeze took longer than the progress timeout: that is nothing against the ranks that roll forward only now."""
    job = ControllerBench(progress_timeout_s=5.0, freeze_timeout_s=60.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(3, 1, READY, 7))
    job.wait(6.0)
    job.say(report(1, 1, DONE, 7, records=[7]))
    assert job.at(Stage.ROLLING)
    job.wait(4.9)
    assert job.at(Stage.ROLLING) and not job.logged("stuck")
    job.wait(0.2)
    assert job.logged("stuck")[0]["ranks"] == (0, 3)


# --- the freeze ---


def test_a_rank_that_exits_cleanly_during_a_freeze_is_not_waited_for() -> None:
    """Its training had finished, and its launcher saw it end with status 0."""
    job = ControllerBench(freeze_timeout_s=30.0)
    job.say(Finished(3), fault(0, CauseKind.EXCEPTION))
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.FREEZING)
    job.say(killed(3, "exit code 0"))
    assert job.logged("left") and job.at(Stage.WRITING)


def test_a_round_that_is_over_still_waits_for_a_culprit() -> None:
    """Only a peer's error is known; whose death caused it shows within a lease, however short rounds are."""
    job = ControllerBench(freeze_timeout_s=1.0)
    job.say(fault(1, CauseKind.PEER_ERROR))
    job.all_report(7)
    job.wait(2.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.at(Stage.WRITING)


def test_a_stuck_rank_that_comes_back_is_not_waited_for() -> None:
    """Rank 0 never answered its order, fell silent, and attaches again while the others are asked: they are enough."""
    job = ControllerBench(progress_timeout_s=5.0, freeze_timeout_s=60.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.wait(5.1)
    assert job.logged("stuck")[0]["ranks"] == (0,) and job.at(Stage.FREEZING)
    job.wait(LEASE_S + 0.1, senders=(1, 3))
    assert job.logged("death_seen")[-1]["rank"] == 0
    job.say(registration(0), report(1, 2, DONE, 7), report(3, 2, DONE, 7))
    assert job.logged("refused") and not job.at(Stage.FREEZING)


def test_a_round_with_an_update_and_a_silent_rank_is_over_when_both_waits_are() -> None:
    """A driver that came for the earlier one would come again and again until the later one (seed 974952228)."""
    job = ControllerBench(((0, 1), (1, 2), (0, 2)), freeze_timeout_s=10.0, progress_timeout_s=1.0)
    job.say(killed(2))
    job.say(report(0, 1, DONE, 7, records=[7]), report(1, 1, Phase.UPDATING, 7, closed=False, records=[7]))
    assert job.logged("awaiting_updates")
    job.close(0, after=0.5)
    job.wait(0.6, senders=(1,))
    assert job.at(Stage.FREEZING) and job.state.fault is not None and job.state.fault.updating


def test_the_driver_comes_when_the_total_time_is_over() -> None:
    """To the moment, whatever else it would have come for later."""
    job = ControllerBench(total_timeout_s=120.0, freeze_timeout_s=500.0)
    job.say(killed(3))
    job.wait(119.9)
    assert next_deadline(job.state) == pytest.approx(120.0)
    job.wait(0.1)
    assert job.logged("refused")


# --- what was tried ---


def test_a_step_that_no_directory_took_from_any_rank_is_not_asked_for_again() -> None:
    """Rank 1 came to the step after it had failed, and failed too; rank 0, which had failed before, says nothing the second time."""
    job = ControllerBench(((0, 1), (1, 2), (0, 2)), freeze_timeout_s=10.0)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.say(report(1, 1, Phase.UPDATING, 7, closed=False, records=[7]))
    job.say(*(report(rank, 1, DONE, 7, records=[7]) for rank in (0, 2)))
    fails_everywhere(job, 2)
    job.say(*(report(rank, 2, DONE, 7, records=[7]) for rank in (1, 2)))
    job.wait(10.1)
    assert job.logged("decided")[1]["able"] == (1, 2)
    fails_everywhere(job, 2)
    assert job.logged("refused") and job.state.freeze_id == 2


def fails_everywhere(job: ControllerBench, rank: int) -> None:
    """Neither directory takes this rank's share."""
    for _ in range(2):
        assert job.state.dump is not None
        job.say(failed(rank, job.state.dump.work[rank].orders[0]))


# --- taking over ---


def test_a_dead_ranks_shards_do_not_make_a_takeover_hasty() -> None:
    """Ranks 0, 2 and 3 came, and 3 died: only the absent rank 1 has its shard now, and it has another lease to come."""
    job = standby()
    job.say(coming(0), coming(2), coming(3), killed(3))
    job.wait(LEASE_S + 0.1, senders=(0, 2))
    assert job.at(Stage.GATHERING)
    job.say(coming(1))
    assert job.at(Stage.FREEZING) and [line["rank"] for line in job.logged("death_seen")] == [3]


def test_a_rank_that_went_again_does_not_prove_that_the_controller_receives_the_others() -> None:
    """Rank 2's last message was later than those of 0 and 1, and its stream broke: no attached rank sent for most of a lease."""
    job = standby()
    job.say(coming(0), coming(1))
    job.say(coming(2), after=1.9)
    job.close(2, after=0.05)
    job.wait(LEASE_S - 1.9, senders=())
    assert job.at(Stage.GATHERING) and not job.logged("took_over")


@pytest.mark.parametrize("stage", [Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING])
def test_a_dump_without_attached_ranks_is_over_after_the_orphan_timeout(stage: Stage) -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, Phase.DONE, 7, records=[7]))
    job.say(*(report(rank, 1, Phase.READY if stage is Stage.ROLLING else Phase.DONE, 7) for rank in (1, 2)))
    if stage is Stage.PUBLISHING:
        job.all_write(job.orders())
    assert job.at(stage)
    job.close(0, 1, 2)
    job.wait(14.9, senders=())
    assert job.at(stage)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER) and job.logged("refused")[0]["reason"] == "no rank was attached for 15 s"
