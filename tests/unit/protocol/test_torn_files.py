"""Files that ended short, found only by a publisher: their writers are done without, and the directory is not."""

from __future__ import annotations

import pytest

from tests.unit.protocol import test_places
from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_dump import publishing
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.state import Stage, is_ordered
from ttp.proto.messages import CauseKind, Freeze, Phase, Published, PublishOrder, StepFailed

COMPUTE = Phase.COMPUTE


def torn(rank: int, order: PublishOrder, *writers: int) -> StepFailed:
    """Rank `rank` finds files of these writers that are not what they reported."""
    error = "r2_0 has 5 bytes, expected 10"
    return StepFailed(rank, order.freeze_id, "publish", order.tmp_name, error, torn=writers)


def asked_again(job: ControllerBench, *ranks: int) -> None:
    job.say(*(report(rank, job.state.freeze_id, COMPUTE, 7) for rank in ranks))


def publishers(job: ControllerBench) -> frozenset[int]:
    assert is_ordered(job.state)
    return job.state.at.dump.publishers


def test_what_two_publishers_found_torn_is_written_by_another_holder_in_the_same_directory() -> None:
    """Rank 0 also holds rank 2's shard: the directory is kept, and rank 2 writes no more in it."""
    job, rank, order = publishing()
    job.say(torn(rank, order, 2))
    rank, again = job.publish_order()
    assert (rank, again) == (1, order), "one word may be that of a bad mount"
    job.say(torn(1, order, 2))
    assert job.logged("publish_failed")[1]["torn"] == (2,)
    assert job.logged("replanned")[0]["reason"] == "files of rank 2 ended short: r2_0 has 5 bytes, expected 10"
    assert {freeze.freeze_id for freeze in job.sent(Freeze).values()} == {2}
    asked_again(job, 0, 1, 2)
    orders = job.orders()
    assert sorted(orders) == [0, 1] and {order.directory for order in orders.values()} == {"/a"}
    job.all_write(orders)
    rank, order = job.publish_order()
    job.say(Published(rank, 2, 6, "/a/iter_0000006"))
    assert job.logged("published") and not job.logged("refused")


def test_another_publisher_that_finds_nothing_wrong_publishes() -> None:
    job, rank, order = publishing()
    job.say(torn(rank, order, 1, 2))
    rank, _ = job.publish_order()
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING) and not job.logged("replanned")


def test_only_what_both_found_torn_counts() -> None:
    """Each had a doubt of its own about a file; about one they agree."""
    job, _, order = publishing()
    job.say(torn(0, order, 0, 2), torn(1, order, 1, 2))
    asked_again(job, 0, 1, 2)
    assert sorted(job.orders()) == [0, 1]


def test_publishers_that_find_different_files_torn_are_followed_by_the_next() -> None:
    job, _, order = publishing()
    job.say(torn(0, order, 1), torn(1, order, 2))
    assert job.publish_order() == (2, order)


def test_what_a_third_publisher_says_again_is_proven() -> None:
    """Another doubt came in between, and only rank 3 can check: the first doubt is not forgotten for the second."""
    job = ControllerBench()
    job.say(fault(0, CauseKind.EXCEPTION))
    job.all_report(7)
    job.all_write(job.orders())
    _, order = job.publish_order()
    job.say(torn(0, order, 1), torn(1, order, 2), torn(2, order, 1))
    assert job.logged("replanned")[0]["reason"].startswith("files of rank 1 ended short")


def test_the_only_publisher_there_is_is_believed() -> None:
    """Partners 0 and 1 remain; rank 1 cannot publish, and rank 0 finds its file torn."""
    job = ControllerBench(((0, 1),))
    job.say(killed(1))
    job.say(report(0, 1, COMPUTE, 7))
    job.all_write(job.orders())
    _, order = job.publish_order()
    job.say(torn(0, order, 0))
    asked_again(job, 0)
    assert {order.directory for order in job.orders().values()} == {"/b"}, "no other rank has it: the next directory"


def test_a_torn_writer_that_is_indispensable_writes_in_the_next_directory() -> None:
    """Rank 1 alone holds its shard since rank 3 died."""
    job, _, order = publishing()
    job.say(torn(0, order, 1), torn(1, order, 1))
    asked_again(job, 0, 1, 2)
    orders = job.orders()
    assert sorted(orders) == [0, 1, 2] and {order.directory for order in orders.values()} == {"/b"}


@pytest.mark.parametrize("end", ["dies", "is stuck"])
@pytest.mark.parametrize("local_dirs", [False, True])
def test_a_doubt_stands_when_the_last_that_could_look_again_is_gone(end: str, local_dirs: bool) -> None:
    """Three holders of one shard, on one node: rank 2's own file is torn, rank 2 is asked last and never answers."""
    job = ControllerBench(((0, 1, 2),), assembled=False, local_dirs=local_dirs)
    job.say(*(registration(rank, job.holders, host="a") for rank in range(3)))
    job.say(killed(1))
    job.say(*(report(rank, 1, COMPUTE, 7) for rank in (0, 2)))
    job.all_write(job.orders())
    _, order = job.publish_order()
    job.say(torn(0, order, 2))
    assert job.publish_order() == (2, order)
    if end == "dies":
        job.say(killed(2))
    else:
        job.wait(job.state.settings.progress_timeout_s + 0.1, senders=(0, 2))
    assert job.logged("replanned")[0]["reason"] == "files of rank 2 ended short: no other rank can check them"
    asked_again(job, 0)
    orders = job.orders()
    assert sorted(orders) == [0] and orders[0].directory == "/a"


def test_a_doubt_waits_for_the_next_that_can_look_again() -> None:
    job, _, order = publishing()
    job.say(torn(0, order, 2))
    assert job.publish_order() == (1, order)
    job.say(killed(1))
    assert job.publish_order() == (2, order) and not job.logged("replanned")


def test_a_failure_that_comes_late_takes_no_publisher_away() -> None:
    """Of a publisher that was followed by another, of what the publisher itself wrote, and of the directory before."""
    job, _, order = publishing()
    late = torn(0, order)
    wrote = StepFailed(1, order.freeze_id, "write", order.tmp_name, "no space")
    job.say(late)
    assert job.publish_order() == (1, order)
    job.say(late, wrote)
    assert len(job.logged("publish_failed")) == 1 and publishers(job) == {1}
    job.say(torn(1, order), torn(2, order))
    job.all_write(job.orders())
    rank, after = job.publish_order()
    assert (rank, after.directory) == (0, "/b") and after.freeze_id == order.freeze_id
    job.say(late)
    assert len(job.logged("publish_failed")) == 3 and publishers(job) == {0}


def test_reports_about_ranks_that_wrote_nothing_are_ignored() -> None:
    """Rank 3 is dead, and there is no rank 9."""
    job, _, order = publishing()
    job.say(torn(0, order, 3, 9), torn(1, order, 3, 9))
    assert job.publish_order() == (2, order) and not job.logged("replanned")


def test_doubts_about_one_directory_are_none_about_the_next() -> None:
    job, _, order = publishing()
    job.say(torn(0, order, 2), torn(1, order), torn(2, order))
    job.all_write(job.orders())
    rank, order = job.publish_order()
    assert (rank, order.directory) == (0, "/b")
    job.say(torn(0, order, 2))
    assert job.publish_order() == (1, order)


@pytest.mark.parametrize("writer", [0, 1])
def test_one_torn_file_does_not_cost_its_node(writer: int) -> None:
    """Each node has its own directories. Rank 3 is dead, so no rank of another node can write rank 1's share."""
    job = test_places.publishing(3)
    order = job.sent(PublishOrder)[0]
    job.say(torn(0, order, writer), torn(1, order, writer))
    asked_again(job, 0, 1, 2)
    orders = job.orders()
    if writer == 0:  # rank 2 has its shard too
        assert sorted(orders) == [1, 2] and {order.directory for order in orders.values()} == {"/a"}
    else:
        assert sorted(orders) == [0, 1, 2] and {order.directory for order in orders.values()} == {"/b"}


def test_a_fault_of_several_rounds_ends_within_the_total_time_of_its_beginning() -> None:
    """Two publishers find a file torn after a while, all are asked again, and then the writers get nowhere: the new round does not
    begin the time anew."""
    job, rank, order = publishing(total_timeout_s=120.0, progress_timeout_s=500.0)
    alive = (0, 1, 2)
    assert job.now == 0.0
    job.wait(50.0, senders=alive)
    job.say(torn(rank, order, 2), torn(1, order, 2))
    assert job.at(Stage.FREEZING) and job.state.freeze_id == 2
    asked_again(job, *alive)
    assert job.at(Stage.WRITING)
    job.wait(69.9, senders=alive)
    assert not job.logged("refused")
    job.wait(0.2, senders=alive)
    assert job.logged("refused")[0]["reason"].startswith("the fault was not over after 120 s")
