"""A step that no directory takes: an older one with local copies is written, where that gains something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, record, report
from tests.unit.protocol.test_controller_dump import failed
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_patience import works
from ttp.controller.core.dump.finish import step_of
from ttp.controller.core.dump.roll_forward import _unwritable
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import CauseKind, Freeze, Phase, Published, RollForward

COMPUTE, DONE = Phase.COMPUTE, Phase.DONE
RING = ((0, 1), (1, 2), (0, 2))


def two_ahead(checkpoint: str = "") -> ControllerBench:
    """Ranks 0 and 2 have step 7 and a copy of 6, rank 1 is at 6: rank 2 alone has shard 1 of step 7. Orders are out."""
    job = ControllerBench(RING)
    job.say(fault(0, CauseKind.EXCEPTION))
    all_say_again(job, checkpoint)
    assert job.logged("decided")[-1]["step"] == 7 and job.logged("decided")[-1]["able"] == (0, 2)
    return job


def all_say_again(job: ControllerBench, checkpoint: str = "") -> None:
    freeze_id = job.state.freeze_id
    for rank in (0, 2):
        job.say(report(rank, freeze_id, DONE, 7, records=[6, 7], backup_step=6, checkpoint=checkpoint))
    job.say(report(1, freeze_id, COMPUTE, 7, records=[5, 6], backup_step=5))


def fails_in_both_directories(job: ControllerBench, rank: int = 2) -> None:
    for _ in range(2):
        job.say(failed(rank, job.orders()[rank]))


def test_local_copies_of_the_step_before_are_written_when_no_directory_takes_the_decided_step() -> None:
    job = two_ahead()
    fails_in_both_directories(job)
    assert "none of 2 directories could be written" in job.logged("replanned")[0]["reason"]
    assert {freeze.freeze_id for freeze in job.sent(Freeze).values()} == {2}
    all_say_again(job)
    decided = job.logged("decided")[-1]
    assert (decided["step"], decided["able"]) == (6, (0, 1, 2)) and not job.logged("refused")
    assert not job.sent(RollForward)
    orders = job.orders()
    assert {(order.step, order.directory) for order in orders.values()} == {(6, "/a")}
    job.say(failed(2, orders[2]))
    moved = job.orders()
    assert sorted(moved) == [0, 1]
    job.all_write({rank: orders[rank] for rank in (0, 1)})
    job.all_write(moved)
    rank, order = job.publish_order()
    assert (order.step, order.record) == (6, record(6))
    job.say(Published(rank, 2, 6, "/a/iter_0000006"))
    assert job.logged("published")[0]["step"] == 6 and job.at(Stage.EXITING)


def test_without_local_copies_no_rank_is_asked_again() -> None:
    """There is no older step to be had: it is refused at once."""
    job = ControllerBench(RING)
    job.say(killed(1))
    job.say(report(0, 1, DONE, 7, records=[7]), report(2, 1, DONE, 7, records=[7]))
    fails_in_both_directories(job)
    assert job.logged("refused")[0]["reason"].startswith("none of 2 directories could be written: /a: rank 2:")
    assert job.state.freeze_id == 1


def test_a_rank_that_was_not_asked_may_have_come_to_the_step_that_no_directory_took() -> None:
    """Rank 1's update was not over when the step was decided; no other rank has its shard on a disk that works."""
    job = ControllerBench(RING)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.say(report(1, 1, Phase.UPDATING, 7, closed=False, records=[7]))
    job.say(*(report(rank, 1, DONE, 7, records=[7]) for rank in (0, 2)))
    assert job.logged("decided")[0]["able"] == (0, 2)
    fails_in_both_directories(job)
    assert not job.logged("refused")
    job.say(*(report(rank, 2, DONE, 7, records=[7]) for rank in range(3)))
    assert job.logged("decided")[1] == {"freeze_id": 2, "step": 7, "able": (0, 1, 2), "roll_forward": ()}
    orders = job.orders()
    job.say(failed(2, orders[2]))
    assert sorted(job.orders()) == [0, 1], "they do what rank 2 could not"


def test_a_torn_rank_is_not_asked_again() -> None:
    job = ControllerBench(RING)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.say(report(1, 1, Phase.UPDATING, 7, torn=True, records=[7]))
    job.say(*(report(rank, 1, DONE, 7, records=[7]) for rank in (0, 2)))
    fails_in_both_directories(job)
    assert job.logged("refused") and job.state.freeze_id == 1


def test_an_older_step_that_the_survivors_do_not_cover_is_refused_with_what_failed_before() -> None:
    job = two_ahead()
    fails_in_both_directories(job)
    job.say(killed(1))
    for rank in (0, 2):
        job.say(report(rank, 2, DONE, 7, records=[6, 7], backup_step=-1))
    reason = job.logged("refused")[0]["reason"]
    assert reason.startswith("no directory took step 7 (/a: rank 2: no space left on device; /b: rank 2: no space left")
    assert "and then no live rank can write" in reason


def test_a_step_is_tried_again_when_a_rank_has_come_to_it_whose_update_was_not_over() -> None:
    """Rank 0's partner, rank 2, cannot write; rank 0 could not close its gate in time, and has step 7 since."""
    job = ControllerBench()
    job.say(killed(1))
    updating = report(0, 1, Phase.UPDATING, 7, records=[7], closed=False)
    job.say(*(report(rank, 1, DONE, 7, records=[6, 7], backup_step=6) for rank in (2, 3)), updating)
    assert job.logged("decided")[-1]["able"] == (2, 3)
    fails_in_both_directories(job)
    job.say(*(report(rank, 2, DONE, 7, records=[6, 7], backup_step=6) for rank in (0, 2, 3)))
    decided = job.logged("decided")[-1]
    assert (decided["step"], decided["able"]) == (7, (0, 2, 3))
    job.say(failed(2, job.orders()[2]))
    assert sorted(job.orders()) == [0] and not job.logged("refused")
    job.say(failed(0, job.orders()[0]))
    for rank in (0, 2):
        job.say(failed(rank, job.orders()[rank]))
    job.say(*(report(rank, 3, DONE, 7, records=[6, 7], backup_step=6) for rank in (0, 2, 3)))
    assert job.logged("decided")[-1]["step"] == 6, "no further rank has come to step 7"


def test_each_step_is_tried_once() -> None:
    """Where the disks take no step at all, it ends with the oldest."""
    job = two_ahead()
    fails_in_both_directories(job)
    all_say_again(job)
    for _ in range(2):
        orders = job.orders()
        job.say(failed(0, orders[0]))
        job.say(failed(1, job.orders().get(1) or orders[1]))
    all_say_again(job)
    assert [line["step"] for line in job.logged("decided")] == [7, 6]
    reason = job.logged("refused")[0]["reason"]
    assert reason.startswith("no directory took steps 6, 7 (")


def test_an_older_step_that_is_published_already_is_not_written_again() -> None:
    """The ranks know a checkpoint of step 6: going back to it needs no dump."""
    job = two_ahead("/c/iter_0000006")
    fails_in_both_directories(job)
    all_say_again(job, "/c/iter_0000006")
    refused = job.logged("refused")[0]
    assert "step 6, the newest with local copies, is not newer than /c/iter_0000006" in refused["reason"]
    assert refused["goes_on_from"] == "/c/iter_0000006" and job.at(Stage.EXITING)


def test_an_older_step_that_is_newer_than_what_is_published_is_written() -> None:
    job = two_ahead("/c/iter_0000005")
    fails_in_both_directories(job)
    all_say_again(job, "/c/iter_0000005")
    assert job.logged("decided")[-1]["step"] == 6 and job.at(Stage.WRITING)


def test_the_newest_checkpoint_is_known_by_its_number() -> None:
    """Ten million steps have one digit more than the names are padded to."""
    assert step_of("/a/iter_0000042") == 42 < step_of("/b/iter_10000000")
    assert step_of("") == step_of("/a/iter_x") == step_of("/a/other") == -1
    assert step_of("/a/iter_²") == step_of("/a/iter_٤٢") == step_of("/a/iter_" + "9" * 20) == -1
    assert step_of("/a/iter_" + "9" * 19) == 10**19 - 1


def test_the_step_before_is_written_when_no_other_rank_can_finish_with_the_decided_one() -> None:
    """Rank 2 alone has shard 1 of step 7, and writes on and on; at half of the time that does not matter yet, at half of the rest it
    does: ranks 0 and 1 cover step 6."""
    job = two_ahead()
    orders = job.orders()
    job.say(job.written(0, orders[0]))
    works(job, 61.0, 2)
    assert job.at(Stage.WRITING) and not job.logged("passed_over")
    works(job, 30.0, 2)
    assert job.logged("passed_over")[0]["ranks"] == (2,)
    assert job.logged("replanned")[0]["reason"] == "rank 2 did not finish with step 7; step 6 can be written without"
    all_say_again(job)
    decided = job.logged("decided")[-1]
    assert (decided["step"], decided["able"]) == (6, (0, 1)) and not job.logged("refused")


def test_who_was_slow_with_its_own_share_is_not_counted_on_for_anothers() -> None:
    """Ranks 0, 1 and 2 have step 7, rank 3 is at 6. Rank 2 writes without end; rank 1, which has its shards too, was done after half
    of the time and would not be done with them in the rest: ranks 0 and 3 cover step 6 (seed 974730093)."""
    job = ControllerBench(((0, 1), (1, 2, 3), (2, 1, 3)))
    job.say(fault(3, CauseKind.EXCEPTION))
    for freeze_id in (1, 2):
        for rank in (0, 1, 2):
            job.say(report(rank, freeze_id, DONE, 7, records=[6, 7], backup_step=6))
        job.say(report(3, freeze_id, COMPUTE, 7, records=[5, 6], backup_step=5))
        if freeze_id == 1:
            orders = job.orders()
            assert sorted(orders) == [0, 1, 2] and job.logged("decided")[0]["step"] == 7
            job.say(job.written(0, orders[0]))
            works(job, 75.0, 1, 2)
            job.say(job.written(1, orders[1]))
            works(job, 14.0, 2)
            assert job.at(Stage.WRITING) and not job.logged("passed_over")
            works(job, 4.0, 2)
            assert job.logged("passed_over")[-1]["ranks"] == (1, 2)
    decided = job.logged("decided")[-1]
    assert (decided["step"], decided["able"]) == (6, (0, 3)) and not job.logged("refused")


def test_who_is_slow_with_the_decided_step_is_waited_for_where_the_step_before_is_published_already() -> None:
    """Going back to it needs no dump; the decided step may still be saved."""
    job = two_ahead("/a/iter_0000006")
    orders = job.orders()
    job.say(job.written(0, orders[0]))
    works(job, 118.0, 2)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)
    job.say(job.written(2, orders[2]))
    assert job.at(Stage.PUBLISHING)


def test_a_rank_that_the_step_before_needs_as_well_is_waited_for() -> None:
    """Rank 1 has died: only rank 2 has shard 1, of both steps."""
    job = two_ahead()
    orders = job.orders()
    job.say(job.written(0, orders[0]), killed(1))
    works(job, 118.0, 2)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)


def test_without_local_copies_no_step_before_is_looked_for() -> None:
    """Rank 0 is at step 6 without being READY, as no such job can; it is not asked for a report again."""
    job = ControllerBench(((0, 1),))
    job.say(fault(0, CauseKind.EXCEPTION))
    job.say(report(0, 1, COMPUTE, 7), report(1, 1, DONE, 7, records=[7]))
    works(job, 118.0, 1)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)


def test_no_rank_is_passed_over_for_the_same_step_that_others_cannot_write_here() -> None:
    """Rank 2 has rank 0's shard of step 7 too, and its disk has failed it: rank 0 is waited for, whatever copies there are."""
    job = ControllerBench()
    job.say(fault(0, CauseKind.EXCEPTION))
    job.say(*(report(rank, 1, DONE, 7, records=[6, 7], backup_step=6) for rank in range(4)))
    orders = job.orders()
    job.say(failed(2, orders[2]), *(job.written(rank, orders[rank]) for rank in (1, 3)))
    works(job, 118.0, 0)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)


@pytest.mark.parametrize(
    ("rank", "of", "again"),
    [
        (2, {}, True),
        (0, {}, False),
        (2, {"closed": False}, False),
        (2, {"torn": True}, False),
        (2, {"state_step": 6}, False),
    ],
    ids=[
        "another rank has it",
        "the one that failed",
        "behind an open gate",
        "its state is torn",
        "it has another step",
    ],
)
def test_a_step_that_no_directory_took_is_tried_again_by_a_rank_that_has_it_and_has_not_tried(
    rank: int, of: dict[str, Any], again: bool
) -> None:
    bench = ControllerBench()
    bench.say(killed(3))
    assert bench.state.fault is not None
    fault = replace(bench.state.fault, unwritable=((7, frozenset({0})),))
    reports = {rank: report(rank, 1, Phase.DONE, 7, **of)}
    assert _unwritable(fault, reports) == (frozenset() if again else {7})
