"""Nodes with checkpoint directories of their own: every node that holds files publishes, and a lost node's are written again."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_dump import failed
from tests.unit.protocol.test_controller_members import killed
from ttp.controller.core.facts.state import Freezing, Stage
from ttp.proto.messages import Freeze, Phase, Published, PublishOrder, WriteOrder, Written

HOSTS = ("a", "a", "b", "b")
"""Partners 0 and 2, 1 and 3: each node holds everything."""


def writing(*dead: int) -> tuple[ControllerBench, dict[int, WriteOrder]]:
    """These ranks are dead, the others have their orders to write step 6."""
    job = ControllerBench(assembled=False, local_dirs=True)
    for rank, host in enumerate(HOSTS):
        job.say(registration(rank, host=host))
    job.say(*(killed(rank) for rank in dead))
    job.say(*(report(rank, 1, Phase.COMPUTE, 7) for rank in range(4) if rank not in dead))
    return job, job.orders()


def publishing(*dead: int) -> ControllerBench:
    """These ranks are dead, the others have written step 6."""
    job, orders = writing(*dead)
    job.all_write(orders)
    assert job.at(Stage.PUBLISHING)
    return job


def test_one_rank_of_every_node_publishes() -> None:
    """The step is saved when the last node has published."""
    job = publishing(3)
    orders = job.sent(PublishOrder)
    assert sorted(orders) == [0, 2] and orders[0] == orders[2]
    job.say(Published(2, 1, 6, "/a/iter_0000006"))
    assert job.logged("place_published")[0]["host"] == "b" and job.at(Stage.PUBLISHING)
    assert not job.sent(PublishOrder), "b is done, and a is at it"
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.logged("published")[0]["rank"] == 0 and job.at(Stage.EXITING)


def test_a_publisher_is_replaced_from_its_own_node() -> None:
    """The files are on that node's disk: no other node's rank can rename them."""
    job = publishing(3)
    order = job.sent(PublishOrder)[0]
    assert order.term == job.state.settings.term
    job.say(failed(0, order))
    assert sorted(job.sent(PublishOrder)) == [1]
    job.say(Published(2, 1, 6, "/a/iter_0000006"), Published(1, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_node_lost_with_what_it_wrote_is_written_again_by_the_others(when: str) -> None:
    """Whether it had published its files or not: they are gone. The other node holds all shards."""
    job = publishing(3)
    if when == "after":
        job.say(Published(2, 1, 6, "/a/iter_0000006"))
    job.say(killed(2))
    assert "node b was lost" in job.logged("replanned")[0]["reason"]
    assert {freeze.freeze_id for freeze in job.sent(Freeze).values()} == {2}
    job.say(*(report(rank, 2, Phase.COMPUTE, 7) for rank in (0, 1)))
    orders = job.orders()
    assert sorted(orders) == [0, 1] and {order.tmp_name for order in orders.values()} == {"iter_0000006_tmp_3_2_1"}
    job.all_write(orders)
    assert sorted(job.sent(PublishOrder)) == [0]
    job.say(Published(0, 2, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


def test_a_node_lost_between_writing_and_publishing_is_noticed() -> None:
    """Rank 2 has written and dies, with its node, while others still write."""
    job, orders = writing(3)
    job.say(job.written(2, orders[2]), killed(2))
    assert job.at(Stage.WRITING)
    answers: list[Written] = [job.written(rank, orders[rank]) for rank in (0, 1)]
    job.say(*answers)
    assert "node b was lost" in job.logged("replanned")[0]["reason"] and job.at(Stage.FREEZING)
    assert not job.logged("publish_sent"), "node a would publish a step of which node b's part is gone"


def test_a_piece_of_an_earlier_write_does_not_count() -> None:
    """Rank 0's word about the first write comes late: the second one lists other files."""
    job = publishing(3)
    job.say(killed(2))
    job.say(*(report(rank, 2, Phase.COMPUTE, 7) for rank in (0, 1)))
    job.all_write(job.orders())
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.PUBLISHING)
    job.say(Published(0, 2, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


def test_a_node_that_cannot_publish_vetoes_nothing() -> None:
    """Its disk fails it only when it publishes: the other node holds all shards, and writes them all, in the same directory."""
    job = publishing(3)
    job.say(failed(2, job.sent(PublishOrder)[2]))
    assert "node b could not publish: /a: rank 2: no space left" in job.logged("replanned")[0]["reason"]
    job.say(*(report(rank, 2, Phase.COMPUTE, 7) for rank in (0, 1, 2)))
    orders = job.orders()
    assert sorted(orders) == [0, 1] and {order.directory for order in orders.values()} == {"/a"}
    job.all_write(orders)
    assert sorted(job.sent(PublishOrder)) == [0]
    job.say(Published(0, 2, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING) and not job.logged("refused")


def test_a_rank_without_the_step_shows_nothing_of_a_directory_that_it_cannot_publish_in() -> None:
    """Rank 2 is a step behind. It is asked as the last one of its node, and may write its own step there later (seed 4500646563)."""
    job = ControllerBench(assembled=False, local_dirs=True)
    for rank, host in enumerate(HOSTS):
        job.say(registration(rank, host=host))
    job.say(killed(1), *(report(rank, 1, Phase.COMPUTE, 7) for rank in (0, 3)), report(2, 1, Phase.COMPUTE, 6))
    job.all_write(job.orders())
    job.say(failed(3, job.sent(PublishOrder)[3]))
    job.say(failed(2, job.sent(PublishOrder)[2]))
    assert "node b could not publish: /a: rank 2: " in job.logged("replanned")[0]["reason"]
    assert isinstance(job.state.at, Freezing) and job.state.at.fault.unfit == {("/a", 3)}


def test_a_node_that_cannot_publish_writes_in_the_next_directory_where_it_is_needed() -> None:
    """Node a has died: no other node holds what node b could not publish in the first directory."""
    job = publishing(0, 1)
    for freeze_id, directory in ((2, "/a"), (3, "/b")):
        order = job.sent(PublishOrder)[2]
        assert order.directory == directory
        job.say(failed(2, order))
        job.say(failed(3, job.sent(PublishOrder)[3]))
        job.say(*(report(rank, freeze_id, Phase.COMPUTE, 7) for rank in (2, 3)))
        job.all_write(job.orders())
    reason = job.logged("refused")[0]["reason"]
    assert reason.startswith("none of 2 directories could be written: /a: rank 2: no space left on device")
    assert "/b: rank 3" in reason


def test_a_node_lost_after_another_could_not_publish_is_stood_in_for_by_that_one() -> None:
    """Node b could not publish in the first directory, and then node a dies: b writes in the second."""
    job = publishing(3)
    job.say(failed(2, job.sent(PublishOrder)[2]))
    job.say(*(report(rank, 2, Phase.COMPUTE, 7) for rank in (0, 1, 2)))
    job.say(killed(0))
    assert not job.logged("refused") and {order.directory for order in job.orders().values()} == {"/b"}


def test_a_node_without_any_files_is_not_waited_for() -> None:
    """Both ranks of b are dead: a alone wrote, a alone publishes."""
    job = publishing(2, 3)
    assert sorted(job.sent(PublishOrder)) == [0]
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


def test_with_shared_directories_one_rank_publishes_for_all() -> None:
    """The same job without `local_dirs`."""
    job = ControllerBench()
    job.say(killed(3))
    job.say(*(report(rank, 1, Phase.COMPUTE, 7) for rank in (0, 1, 2)))
    job.all_write(job.orders())
    assert sorted(job.sent(PublishOrder)) == [0]


def test_a_node_that_has_published_is_not_found_stuck_with_the_others() -> None:
    """Its publisher has answered, and owes nothing when it comes again."""
    job = publishing(3)
    job.say(Published(2, 1, 6, "/a/iter_0000006"))
    job.close(2)
    job.say(registration(2, host="b"))
    assert not job.sent(PublishOrder)
    job.wait(31.0)
    assert job.logged("stuck")[0]["ranks"] == (0,)


def test_files_of_a_node_whose_writer_died_are_published_by_the_nodes_other_rank() -> None:
    """The rank that wrote them is gone, the disk is not."""
    job, orders = writing(3)
    job.say(job.written(0, orders[0]), killed(0), job.written(1, orders[1]), job.written(2, orders[2]))
    assert sorted(job.sent(PublishOrder)) == [1, 2]
