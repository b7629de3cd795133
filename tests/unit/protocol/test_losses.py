"""Ranks that die, fall silent or fail in a dump: whose work others do, whose answer counts, and who is asked nothing more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_dump import dying, failed, publishing
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.state import Stage
from ttp.errors import ProtocolError
from ttp.proto.messages import (
    CauseKind,
    Finished,
    Freeze,
    Part,
    Phase,
    Progress,
    Published,
    RolledForward,
    RollForward,
    StepFailed,
    Written,
)

READY, DONE, COMPUTE = Phase.READY, Phase.DONE, Phase.COMPUTE


def rolling(**settings: Any) -> ControllerBench:
    """Rank 2 is dead; ranks 0 and 3 roll forward to step 7, which rank 1 has."""
    job = ControllerBench(**settings)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, READY, 7))
    assert sorted(job.sent(RollForward)) == [0, 3]
    return job


def stuck_in_a_roll_forward() -> ControllerBench:
    """Rank 0 was found stuck, and its partner is dead: the others are asked again."""
    job = ControllerBench(progress_timeout_s=5.0, freeze_timeout_s=60.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.wait(5.1)
    assert job.at(Stage.FREEZING) and job.state.freeze_id == 2
    return job


# --- while rolling forward ---


def test_the_death_of_a_rank_that_owes_no_roll_forward_stands_for_nobodys_answer() -> None:
    job = rolling()
    job.say(killed(1), RolledForward(0, 1, 7))
    assert job.at(Stage.ROLLING), "rank 3 has not answered"
    job.say(RolledForward(3, 1, 7))
    assert sorted(job.orders()) == [0, 3]


def test_an_answer_said_twice_counts_once() -> None:
    job = rolling()
    job.say(RolledForward(0, 1, 7), RolledForward(0, 1, 7))
    assert job.at(Stage.ROLLING) and len(job.logged("rolled_forward")) == 1
    job.say(StepFailed(0, 1, "roll_forward", "", "late"))
    assert job.at(Stage.ROLLING) and not job.logged("roll_forward_failed")


def test_a_failure_counts_in_its_own_stage_only() -> None:
    """One that was said about an order that is over says nothing about the next."""
    job = rolling()
    job.say(RolledForward(0, 1, 7), RolledForward(3, 1, 7))
    job.say(StepFailed(0, 1, "roll_forward", "", "late"))
    assert not job.logged("write_failed") and not job.logged("roll_forward_failed")


def test_a_rank_whose_roll_forward_progresses_is_waited_for() -> None:
    job = rolling(progress_timeout_s=5.0)
    job.wait(4.0)
    job.say(Progress(3, 1))
    job.wait(4.0)
    assert not job.logged("stuck")
    job.say(RolledForward(0, 1, 7))
    job.wait(5.1)
    assert job.logged("stuck")[0]["ranks"] == (3,)


def test_every_answer_gives_the_others_that_roll_forward_their_whole_time_again() -> None:
    job = rolling(progress_timeout_s=5.0)
    job.wait(4.0)
    job.say(RolledForward(0, 1, 7))
    job.wait(4.9)
    assert not job.logged("stuck")
    job.wait(0.2)
    assert job.logged("stuck")[0]["ranks"] == (3,)


def test_a_rank_that_failed_to_reach_the_step_writes_nothing_of_it() -> None:
    """Its partner does."""
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(1, 1, DONE, 7, records=[7]), *(report(rank, 1, READY, 7) for rank in (0, 2, 3)))
    job.say(StepFailed(0, 1, "roll_forward", "", "raised"), RolledForward(2, 1, 7), RolledForward(3, 1, 7))
    assert sorted(job.orders()) == [1, 2, 3]


def test_the_last_rank_of_a_job_saves_it_alone() -> None:
    job = ControllerBench(((0, 1),))
    job.say(killed(0), report(1, 1, COMPUTE, 7))
    assert sorted(job.orders()) == [1] and job.orders()[1].directory == "/a"


def test_a_refusal_names_an_update_that_failed_half_way() -> None:
    job = ControllerBench()
    job.say(killed(3), report(0, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7))
    job.say(report(1, 1, Phase.UPDATING, 7, torn=True))
    assert "rank 1, whose update of step 7 failed half way" in job.logged("refused")[0]["reason"]


def test_a_rank_that_was_rolled_forward_and_dies_is_left_out_of_the_writing() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(1, 1, DONE, 7, records=[7]), *(report(rank, 1, READY, 7) for rank in (0, 2, 3)))
    job.say(RolledForward(0, 1, 7), killed(0), RolledForward(2, 1, 7), RolledForward(3, 1, 7))
    assert sorted(job.orders()) == [1, 2, 3]


def test_a_step_that_a_rank_failed_to_reach_is_not_asked_of_it_again() -> None:
    """Its gate is closed and its state whole: in the next round it is a holder of the step before."""
    job = rolling()
    job.say(StepFailed(0, 1, "roll_forward", "", "raised"), RolledForward(3, 1, 7))
    assert job.at(Stage.FREEZING)
    job.say(report(0, 2, READY, 7), report(1, 2, DONE, 7), report(3, 2, DONE, 7))
    assert not job.sent(RollForward) and job.logged("refused")


# --- stuck ranks ---


def test_a_stuck_ranks_death_stands_for_nobodys_report() -> None:
    """It is not waited for any more, so its death leaves as many to wait for as before."""
    job = stuck_in_a_roll_forward()
    job.say(killed(0), report(1, 2, DONE, 7))
    assert job.at(Stage.FREEZING) and not job.logged("refused"), "rank 3 has not reported"


def test_a_reported_ranks_death_stands_for_nobodys_report() -> None:
    job = ControllerBench()
    job.say(killed(3), report(0, 1, COMPUTE, 7), killed(0), report(1, 1, COMPUTE, 7))
    assert job.at(Stage.FREEZING), "rank 2 has not reported"
    job.say(report(2, 1, COMPUTE, 7))
    assert sorted(job.orders()) == [1, 2]


def test_a_publisher_that_fell_silent_is_ordered_nothing_in_the_next_directory() -> None:
    job, rank, order = publishing()
    job.wait(31.0)
    assert job.logged("stuck")[0] == {"ranks": (rank,), "stage": "publish"} and rank == 0
    job.say(failed(1, order), failed(2, order))
    assert {order.directory for order in job.orders().values()} == {"/b"} and sorted(job.orders()) == [1, 2]


def test_every_publisher_that_falls_silent_is_stuck_from_then_on() -> None:
    """The first one is not forgotten over the second."""
    job, _, _ = publishing()
    job.wait(62.0)
    assert [line["ranks"] for line in job.logged("stuck")] == [(0,), (1,)]
    assert job.state.fault is not None and job.state.fault.stuck == {0, 1}


def test_when_every_publisher_has_fallen_silent_the_ranks_are_asked_again() -> None:
    job, _, _ = publishing()
    job.wait(93.0)
    assert len(job.logged("stuck")) == 3 and job.logged("replanned")[0]["reason"] == "no rank remains that can publish"


def test_every_writer_that_falls_silent_is_stuck_from_then_on() -> None:
    """Rank 0 is replaced by rank 2, which falls silent too: shard 0 has no writer left."""
    job = dying()
    orders = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]))
    job.wait(31.0)
    assert job.logged("stuck") == [{"ranks": (0,), "stage": "write"}]
    job.wait(31.0)
    assert job.logged("stuck")[1] == {"ranks": (2,), "stage": "write"}
    assert job.state.fault is not None and job.state.fault.stuck == {0, 2}
    assert job.logged("replanned")[0]["reason"] == "a shard lost its last writer"


def test_a_stuck_ranks_work_does_not_prolong_the_wait_for_the_others() -> None:
    """Rank 0 progressed again, and its parts are rank 2's now."""
    job = dying()
    orders = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]))
    job.wait(31.0)
    job.wait(20.0)
    job.say(Progress(0, 1))
    job.wait(11.0)
    assert len(job.logged("stuck")) == 2


# --- while writing ---


def test_every_answer_gives_the_other_writers_their_whole_time_again() -> None:
    job = dying()
    orders = job.orders()
    job.wait(20.0)
    job.say(job.written(1, orders[1]))
    job.wait(29.9)
    assert not job.logged("stuck")
    job.wait(0.2)
    assert job.logged("stuck")[0]["ranks"] == (0, 2)


def test_a_rank_that_dies_after_it_has_written_all_moves_nothing() -> None:
    """Nor does its death give the others more time."""
    job = dying()
    orders = job.orders()
    job.say(job.written(0, orders[0]))
    assert job.state.dump is not None
    before = job.state.dump.progress_by
    job.wait(5.0)
    job.say(killed(0))
    assert job.state.dump is not None
    assert not job.logged("write_moved") and job.state.dump.progress_by == before


def test_a_finished_rank_that_exits_cleanly_has_its_parts_written_by_its_partner() -> None:
    """Its exit is not a cause of the fault."""
    job = dying()
    orders = job.orders()
    job.say(Finished(0), killed(0, "exit code 0"))
    ((rank, moved),) = job.orders().items()
    assert rank == 2 and moved.parts == orders[0].parts and job.logged("left") == [{"rank": 0}]
    assert job.state.fault is not None and [cause.ranks for cause in job.state.fault.causes] == [(3,)]


def test_a_rank_that_exited_cleanly_is_logged_once_and_receives_no_more_orders() -> None:
    """Its process has ended, whenever its stream is seen to."""
    job = ControllerBench()
    job.say(Finished(0), killed(0, "exit code 0"), killed(0, "exit code 0"))
    assert job.logged("left") == [{"rank": 0}] and job.state.members.alive == 3
    job.say(killed(3))
    assert sorted(job.sent(Freeze)) == [1, 2]


def test_parts_never_move_to_a_rank_that_does_not_have_the_step() -> None:
    """Rank 0 holds the shard, and stands a step behind."""
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, COMPUTE, 6), report(1, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7))
    assert sorted(job.orders()) == [1, 2]
    job.say(killed(2))
    assert not job.orders() and job.logged("replanned")[0]["reason"] == "a shard lost its last writer"


def test_parts_that_moved_go_to_the_holder_with_the_fewest_orders() -> None:
    """Ranks 1 and 2 hold the shard as well; rank 1 has finished its own."""
    job = ControllerBench(((0, 1, 2), (1, 3)))
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    orders = job.orders()
    job.say(job.written(1, orders[1]))
    job.say(killed(0))
    assert sorted(job.orders()) == [1]


def test_a_failed_writer_gets_no_parts_that_move_later() -> None:
    """Its disk failed it in this directory."""
    job = ControllerBench(((0, 1, 2), (1, 3)))
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    orders = job.orders()
    job.say(job.written(1, orders[1]), failed(2, orders[2]))
    assert sorted(job.orders()) == [1]
    job.say(job.written(1, job.orders()[1]), killed(0))
    assert sorted(job.orders()) == [1], "not rank 2, which has nothing to do"


def test_an_answer_of_an_earlier_write_does_not_count_in_the_next_directory() -> None:
    """The parts are the same and the directory is not."""
    job = dying()
    first = job.orders()
    job.say(failed(1, first[1]))
    second = job.orders()
    assert {order.directory for order in second.values()} == {"/b"}
    late: list[Written] = [job.written(rank, first[rank]) for rank in (0, 2)]
    job.say(*late, failed(0, first[0]))
    assert job.state.dump is not None and job.state.dump.pending == 3 and job.at(Stage.WRITING)
    assert len(job.logged("write_failed")) == 1
    job.all_write(second)
    assert len(job.publish_order()[1].results) == 3


def test_what_failed_in_one_directory_is_tried_in_the_next() -> None:
    """A rank whose disk failed it in /a writes in /b, and publishes there first."""
    job = dying()
    job.say(failed(0, job.orders()[0]))
    job.say(failed(2, {**job.orders()}[2]))
    second = job.orders()
    assert sorted(second) == [0, 1, 2] and {order.directory for order in second.values()} == {"/b"}
    job.all_write(second)
    assert job.publish_order()[0] == 0


def test_a_rank_whose_disk_failed_it_publishes_only_when_the_others_could_not() -> None:
    job = dying()
    orders = job.orders()
    job.say(failed(0, orders[0]))
    moved = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]), job.written(2, moved[2]))
    for expected in (1, 2, 0):
        rank, order = job.publish_order()
        assert rank == expected
        job.say(failed(rank, order))
    assert {order.directory for order in job.orders().values()} == {"/b"}


def test_a_rank_without_the_step_publishes_when_no_other_can() -> None:
    """The shards are written: it needs the step's host state only."""
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, COMPUTE, 6), report(1, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7))
    assert job.logged("decided")[0]["able"] == (1, 2)
    job.all_write(job.orders())
    for expected in (1, 2, 0):
        rank, order = job.publish_order()
        assert rank == expected
        job.say(failed(rank, order))


# --- while publishing ---


def test_the_death_of_a_rank_that_does_not_publish_orders_nothing() -> None:
    job, rank, _ = publishing()
    job.say(killed(1))
    assert len(job.logged("publish_sent")) == 1 and job.at(Stage.PUBLISHING)
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


def test_a_refusal_has_the_reason_why_nothing_could_be_published() -> None:
    """All was written in both directories, and no rank could rename it."""
    job, rank, order = publishing()
    for directory in ("/a", "/b"):
        for _ in range(3):
            job.say(failed(rank, order, f"read-only {directory}"))
            if job.at(Stage.PUBLISHING):
                rank, order = job.publish_order()
        if directory == "/a":
            job.all_write(job.orders())
            rank, order = job.publish_order()
    reason = job.logged("refused")[0]["reason"]
    assert "/b: rank 0: read-only /b" in reason and "/b: rank 2: read-only /b" in reason


def test_a_failure_to_publish_counts_from_its_publisher_and_about_its_staging_directory_only() -> None:
    job, rank, order = publishing()
    for failure in (failed(1, order), failed(rank, replace(order, tmp_name="iter_0000006_tmp_3_1_9"))):
        with pytest.raises(ProtocolError, match="a rank that was ordered to publish"):
            job.say(failure)
    assert not job.logged("publish_failed") and job.state.dump is not None and job.state.dump.publishers == {0}


def test_publishers_have_their_whole_time_from_the_order_on() -> None:
    job, _, _ = publishing(total_timeout_s=600.0)
    job.wait(29.0)
    job.say(killed(0))
    assert job.publish_order()[0] == 1
    job.wait(29.0)
    assert not job.logged("stuck")
    job.say(Progress(1, 1))
    job.wait(29.0)
    assert not job.logged("stuck")
    job.wait(1.1)
    assert job.logged("stuck")[0]["ranks"] == (1,)


def test_a_word_of_publishing_that_comes_while_the_next_directory_is_written_counts() -> None:
    """The publisher that was given up had renamed after all: the step is saved, and nothing more need be written."""
    job, _, order = publishing()
    job.wait(31.0)
    job.say(failed(1, order), failed(2, order))
    assert job.at(Stage.WRITING)
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.logged("published")[0]["path"] == "/a/iter_0000006" and job.at(Stage.EXITING)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097])
def test_a_small_shard_is_not_cut_finer_than_a_file_is_worth(nbytes: int) -> None:
    """Two holders share one that is larger than the smallest part."""
    job = ControllerBench(assembled=False)
    for rank in range(4):
        reported = registration(rank)
        job.say(replace(reported, groups=tuple(replace(group, nbytes=nbytes) for group in reported.groups)))
    job.say(fault(1, CauseKind.EXCEPTION))
    job.all_report(7)
    parts = sorted((part.group_id, part.index, part.count) for order in job.orders().values() for part in order.parts)
    count = 2 if nbytes > 4096 else 1
    assert [Part(*part) for part in parts] == [Part(group, i, count) for group in ("g0", "g1") for i in range(count)]
