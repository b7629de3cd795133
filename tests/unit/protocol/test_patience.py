"""Slow work: when it is passed over, for which ranks, and when it is waited for to the end."""

from __future__ import annotations

import pytest

from tests.unit.protocol import test_places
from tests.unit.protocol.bench import ControllerBench, report
from tests.unit.protocol.test_controller_dump import dying, failed, publishing
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core import machine
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import CauseKind, Phase, Progress, Published, PublishOrder, RolledForward

READY, DONE, COMPUTE = Phase.READY, Phase.DONE, Phase.COMPUTE
TOTAL_S = 120.0


def works(job: ControllerBench, seconds: float, *ranks: int) -> None:
    """These ranks report every few seconds, for so long, that their work progresses."""
    until = job.now + seconds
    while job.now < until and not job.at(Stage.OVER):
        job.wait(min(4.0, until - job.now))
        for rank in ranks:
            if job.state.stage in (Stage.ROLLING, Stage.WRITING, Stage.PUBLISHING):
                job.say(Progress(rank, job.state.freeze_id))


def rolling() -> ControllerBench:
    """All live; ranks 0 and 3 roll forward to step 7, which 1 and 2 have."""
    job = ControllerBench()
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, READY, 7))
    return job


# --- writing ---


def all_alive_write() -> ControllerBench:
    """Rank 0 raised; every shard has two holders, which write half of it each."""
    job = ControllerBench()
    job.say(fault(0, CauseKind.EXCEPTION))
    job.all_report(7)
    assert sorted(job.orders()) == [0, 1, 2, 3]
    return job


def test_a_write_that_goes_on_for_half_of_the_time_is_given_to_a_holder_that_is_done() -> None:
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 2, 3)))
    works(job, TOTAL_S / 2 - 1, 0)
    assert job.at(Stage.WRITING) and not job.logged("passed_over")
    works(job, 1.5, 0)
    assert job.logged("passed_over")[0] == {"ranks": (0,), "stage": "writing"}
    assert job.logged("write_moved")[0] == {"from": (0,), "ranks": (2,), "parts": 1}
    assert job.state.fault is not None and job.state.fault.stuck == {0}


def test_a_write_that_no_other_rank_can_do_is_waited_for_until_the_total_time_is_over() -> None:
    """Rank 3 is dead, and rank 1 has its shard alone."""
    job = dying()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (0, 2)))
    works(job, TOTAL_S - 1, 1)
    assert job.at(Stage.WRITING) and not job.logged("passed_over")
    job.say(job.written(1, orders[1]))
    assert job.at(Stage.PUBLISHING)


def test_where_all_disks_are_slow_no_rank_is_passed_over_at_half_time() -> None:
    """The other holder is not faster: it has not finished its own share."""
    job = all_alive_write()
    works(job, TOTAL_S / 2 + 5, 0, 1, 2, 3)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)


@pytest.mark.parametrize(("took_s", "trusted"), [(29.0, True), (31.0, False), (59.0, False), (70.0, False)])
def test_only_who_was_done_in_a_quarter_of_the_time_writes_for_another(took_s: float, trusted: bool) -> None:
    """Rank 2 would need as long again, and longer beside a disk that is still written to: where it could not be sure to end in
    time, rank 0, which may be about to end, is waited for."""
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 3)))
    works(job, took_s, 0, 2)
    job.say(job.written(2, orders[2]))
    works(job, TOTAL_S - 1 - took_s, 0)
    assert bool(job.logged("write_moved")) is trusted
    if not trusted:
        job.say(job.written(0, orders[0]))
        assert job.at(Stage.PUBLISHING)


def test_who_is_slow_is_passed_over_as_soon_as_others_can_write_it_again() -> None:
    """Rank 2 is done at 20 s of 120, and has rank 0's share at 60 s: it may take three times as long for it."""
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 3)))
    works(job, 20.0, 0, 2)
    job.say(job.written(2, orders[2]))
    works(job, 39.0, 0)
    assert not job.logged("passed_over")
    works(job, 2.0, 0)
    assert job.logged("write_moved")[0]["ranks"] == (2,)


def test_who_gets_the_work_has_half_of_the_rest_for_it() -> None:
    """The replacement is slow as well: no other rank remains, and it is waited for."""
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 2, 3)))
    works(job, TOTAL_S / 2 + 1, 0)
    works(job, TOTAL_S / 2 - 2, 2)
    assert len(job.logged("passed_over")) == 1 and job.at(Stage.WRITING)


def test_a_holder_whose_disk_failed_it_takes_nothing_over() -> None:
    """Rank 2 cannot write in this directory: rank 0 is waited for, however long it takes."""
    job = all_alive_write()
    orders = job.orders()
    job.say(failed(2, orders[2]))
    moved = job.orders()
    assert sorted(moved) == [0]
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 3)))
    works(job, TOTAL_S - 2, 0)
    assert not job.logged("passed_over") and job.at(Stage.WRITING)


def test_an_answer_of_one_that_was_passed_over_counts_no_more() -> None:
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 2, 3)))
    works(job, TOTAL_S / 2 + 1, 0)
    job.say(job.written(0, orders[0]))
    assert job.at(Stage.WRITING), "its part is rank 2's now"


def test_a_controller_that_was_away_at_half_time_passes_no_rank_over_before_it_has_received_their_messages() -> None:
    """The answer may wait in its queue."""
    job = all_alive_write()
    orders = job.orders()
    job.say(*(job.written(rank, orders[rank]) for rank in (1, 2, 3)))
    works(job, 50.0, 0)
    job.now += 20.0
    job.take(Tick())
    assert not job.logged("passed_over")
    job.say(job.written(0, orders[0]))
    assert job.at(Stage.PUBLISHING)


# --- rolling forward ---


def test_a_roll_forward_that_goes_on_is_done_without_where_another_holder_has_the_step() -> None:
    """Rank 1 has rank 3's shard at step 7; rank 0 answers."""
    job = rolling()
    job.say(RolledForward(0, 1, 7))
    works(job, TOTAL_S / 2 - 1, 3)
    assert job.at(Stage.ROLLING)
    works(job, 1.5, 3)
    assert job.logged("passed_over")[0] == {"ranks": (3,), "stage": "rolling"} and job.at(Stage.WRITING)
    assert job.logged("write_sent")[0]["ranks"] == (0, 1)


def test_a_roll_forward_that_is_indispensable_is_waited_for() -> None:
    """Rank 0 has its shard alone since rank 2 died; rank 3 is passed over all the same."""
    job = rolling()
    works(job, TOTAL_S / 2 + 1, 0, 3)
    assert job.logged("passed_over")[0]["ranks"] == (3,) and job.at(Stage.ROLLING)
    job.say(RolledForward(0, 1, 7))
    assert job.at(Stage.WRITING)


def test_what_is_passed_over_does_not_end_the_dump_when_it_dies() -> None:
    job = rolling()
    works(job, TOTAL_S / 2 + 1, 0, 3)
    job.say(killed(3), RolledForward(3, 1, 7))
    assert job.at(Stage.ROLLING)


def test_a_holder_whose_long_update_has_ended_since_is_asked_instead() -> None:
    """Rank 2 could not close its gate when the step was decided, and rank 0, its partner, rolls forward on and on."""
    job = ControllerBench()
    job.say(killed(1))
    stuck = report(2, 1, Phase.UPDATING, 7, records=[7], closed=False)
    job.say(report(0, 1, READY, 7), stuck, report(3, 1, DONE, 7, records=[7]))
    assert job.logged("decided")[0]["able"] == (0, 3)
    works(job, 20.0, 0)
    job.say(report(2, 1, DONE, 7, records=[7]))
    works(job, TOTAL_S / 2 - 19.0, 0)
    assert job.logged("passed_over")[0]["ranks"] == (0,) and job.state.freeze_id == 2
    job.say(*(report(rank, 2, DONE, 7, records=[7]) for rank in (2, 3)))
    assert job.logged("decided")[1]["able"] == (2, 3) and sorted(job.orders()) == [2, 3]


# --- publishing ---


def test_a_publish_that_goes_on_is_ordered_from_another_rank_beside_it() -> None:
    """Whichever of both says that it is done, is believed."""
    job, _, _ = publishing()
    works(job, TOTAL_S / 2 - 1, 0)
    assert len(job.logged("publish_sent")) == 1
    works(job, 1.5, 0)
    assert job.logged("passed_over")[0] == {"ranks": (0,), "stage": "publishing"}
    assert [line["rank"] for line in job.logged("publish_sent")] == [0, 1]
    assert job.state.fault is not None and not job.state.fault.stuck, "it stays a holder: others publish in its place"
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.logged("published")[0]["rank"] == 0 and job.at(Stage.EXITING)


def test_the_last_publisher_there_is_is_waited_for() -> None:
    job, _, order = publishing()
    job.say(killed(0), failed(1, order))
    assert job.publish_order()[0] == 2
    job.say(killed(1))
    works(job, TOTAL_S - 2, 2)
    assert job.at(Stage.PUBLISHING) and not job.logged("passed_over")


@pytest.mark.parametrize("needed", [True, False])
def test_a_node_whose_only_publisher_goes_on_is_done_without_unless_it_is_needed(needed: bool) -> None:
    """Each node has its own directories; node b has rank 2 alone, whose shard rank 0 holds too."""
    job = test_places.publishing(3)
    assert sorted(job.sent(PublishOrder)) == [0, 2]
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    if needed:
        job.say(killed(0))
        assert not job.logged("replanned"), "rank 1 keeps node a's files"
    works(job, TOTAL_S / 2 + 1, 2)
    if needed:
        assert not job.logged("passed_over") and job.at(Stage.PUBLISHING)
        return
    assert job.logged("passed_over")[0]["ranks"] == (2,) and job.at(Stage.FREEZING)
    job.say(*(report(rank, 2, COMPUTE, 7) for rank in (0, 1)))
    assert sorted(job.orders()) == [0, 1]


def test_the_total_time_is_never_moved() -> None:
    job = all_alive_write()
    works(job, TOTAL_S + 1, 0, 1, 2, 3)
    assert "was not over after 120 s, in stage writing" in job.logged("refused")[0]["reason"]


def test_when_little_is_left_nothing_is_shared_out_any_more() -> None:
    """Half of the rest, and half of that, would be asked for without end."""
    job = all_alive_write()
    works(job, TOTAL_S - 0.5, 0, 1, 2, 3)
    assert job.state.dump is not None and job.state.dump.patience_until == float("inf")
    assert machine.next_deadline(job.state) is not None
