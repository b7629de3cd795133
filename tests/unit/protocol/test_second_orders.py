"""A writer that took over another's parts owes two orders: each is answered, repeated and taken from it for itself."""

from __future__ import annotations

from tests.unit.protocol.bench import ControllerBench, registration
from tests.unit.protocol.test_controller_dump import failed
from tests.unit.protocol.test_controller_members import killed
from ttp.controller.core.facts.events import Send
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import Part, WriteOrder

THIRDS = tuple(Part("g0", index, 3) for index in range(3))


def two_orders() -> tuple[ControllerBench, WriteOrder, WriteOrder, WriteOrder]:
    """Four replicas of one shard, of which 3 and 0 are dead: rank 1 owes its own third and rank 0's, rank 2 its own."""
    job = ControllerBench(((0, 1, 2, 3),))
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    orders = job.orders()
    assert [orders[rank].parts for rank in range(3)] == [(part,) for part in THIRDS]
    job.say(killed(0))
    moved = job.orders()
    assert moved[1].parts == (THIRDS[0],) and sorted(moved) == [1]
    return job, orders[1], moved[1], orders[2]


def ordered(job: ControllerBench, rank: int) -> list[WriteOrder]:
    """Every write order to a rank in the last effects."""
    sent = [effect for effect in job.effects if isinstance(effect, Send) and rank in effect.ranks]
    return [effect.message for effect in sent if isinstance(effect.message, WriteOrder)]


def test_of_a_writer_that_dies_with_two_orders_all_parts_are_written_by_others() -> None:
    """Its own and those that it had taken over."""
    job, own, taken, last = two_orders()
    job.say(killed(1))
    again = ordered(job, 2)
    assert [part for order in again for part in order.parts] == [*taken.parts, *own.parts]
    job.say(*(job.written(2, order) for order in (last, *again)))
    assert len(job.publish_order()[1].results) == 1 + len(again)


def test_of_a_writer_whose_disk_fails_it_with_two_orders_all_parts_are_written_by_others() -> None:
    """One failure is reported; both orders are for the same directory."""
    job, own, taken, _ = two_orders()
    job.say(failed(1, own))
    assert [part for order in ordered(job, 2) for part in order.parts] == [*taken.parts, *own.parts]


def test_an_answer_that_is_said_twice_settles_one_order() -> None:
    """The other one's parts are not written yet."""
    job, own, taken, last = two_orders()
    job.say(job.written(2, last))
    job.say(*[job.written(1, own)] * 2)
    assert job.at(Stage.WRITING)
    job.say(job.written(1, taken))
    assert job.at(Stage.PUBLISHING) and len(job.publish_order()[1].results) == 3


def test_the_second_order_may_be_answered_first() -> None:
    """What was taken over is small; the answers say which they are."""
    job, own, taken, last = two_orders()
    job.say(job.written(2, last), job.written(1, taken), killed(1))
    assert [order.parts for order in ordered(job, 2)] == [own.parts], "only what it had not finished"


def test_a_writer_that_attaches_again_receives_both_of_its_orders() -> None:
    """Either may have been lost with the old stream."""
    job, own, taken, _ = two_orders()
    job.close(1)
    job.say(registration(1, job.holders))
    assert ordered(job, 1) == [own, taken]
