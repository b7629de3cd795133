"""Messages that are still queued when their stream, or the freeze that they belong to, is over: the rank does not act on them."""

from __future__ import annotations

import threading

import pytest

from ttp.proto.messages import (
    Cause,
    CauseKind,
    Exit,
    FileEntry,
    Freeze,
    Part,
    Phase,
    PublishOrder,
    RollForward,
    ShareResult,
    WriteOrder,
)

from .conftest import LONG_S, Rank, StartController, StartRanks, commit_record, until

CAUSE = Cause(CauseKind.EXITED, (9,), "signal SIGKILL")


@pytest.fixture
def rank(new_controller: StartController, new_ranks: StartRanks) -> Rank:
    """Return a rank alone, with three steps done, and a controller that finds nothing wrong with it."""
    (rank,) = new_ranks(new_controller(world_size=1, lease_s=60.0).address, 1)
    rank.train_to(3)
    return rank


def test_a_message_of_the_stream_before_is_not_executed(rank: Rank) -> None:
    """The rank has connected anew; what the old stream had read is behind it in the queue. A higher freeze of it would close the
    gate under a number that no controller knows, an exit would end the rank."""
    old = rank.connect_anew()
    rank.receive(Freeze(99, CAUSE), old)
    rank.receive(Exit(75, "an order of the stream before"), old)
    rank.receive(Freeze(50, CAUSE))
    until(lambda: rank.gate.freeze_id >= 50, "a freeze")
    assert rank.gate.freeze_id == 50 and rank.exit_code is None


def test_the_end_of_the_stream_before_does_not_end_the_one_of_now(rank: Rank) -> None:
    """It is noticed late."""
    old = rank.connect_anew()
    new = rank.stream
    rank.processor.stream_closed(old, "noticed late")
    rank.receive(Freeze(50, CAUSE))
    until(lambda: rank.gate.freeze_id == 50, "a freeze")
    assert rank.stream is new


def write_order(directory: str, freeze_id: int, attempt: int) -> WriteOrder:
    name = f"iter_0000003_tmp_1_{freeze_id}_{attempt}"
    return WriteOrder(freeze_id, 3, directory, name, (Part("g0", 0, 1),))


def publish_order(directory: str, freeze_id: int, attempt: int) -> PublishOrder:
    name = f"iter_0000003_tmp_1_{freeze_id}_{attempt}"
    return PublishOrder(freeze_id, 3, directory, name, (ShareResult((FileEntry("f", 1, "00", 0),)),), CAUSE, None, 1)


def test_an_order_of_an_older_freeze_that_is_still_queued_is_not_executed(rank: Rank) -> None:
    """The work thread is busy with the first order when the ranks are frozen anew, perhaps by another controller: what is queued
    behind it belongs to a write that is over."""
    begun, go_on = threading.Event(), threading.Event()
    write = rank.holder.write

    def slow_write(order: WriteOrder) -> ShareResult:
        begun.set()
        assert go_on.wait(LONG_S)
        return write(order)

    rank.holder.write = slow_write  # type: ignore[method-assign]
    rank.receive(Freeze(1, CAUSE))
    rank.receive(write_order(rank.holder.save_dir, 1, 1))
    assert begun.wait(LONG_S)
    rank.receive(write_order(rank.holder.save_dir, 1, 2))
    rank.receive(publish_order(rank.holder.save_dir, 1, 1))
    rank.receive(Freeze(2, CAUSE))
    until(lambda: rank.gate.freeze_id == 2, "the second freeze")
    rank.receive(write_order(rank.holder.save_dir, 2, 1))
    rank.receive(publish_order(rank.holder.save_dir, 2, 1))
    go_on.set()
    until(lambda: bool(rank.holder.published), "the publish order of the second freeze")
    assert [order.freeze_id for order in rank.holder.written] == [1, 2]
    assert [order.freeze_id for order in rank.holder.published] == [2]


@pytest.mark.parametrize("copies", [False, True])
def test_after_a_roll_forward_only_a_rank_with_local_copies_offers_the_step_before(rank: Rank, copies: bool) -> None:
    """A backup step that is not there would have that rank ordered to write a state that it does not hold."""
    rank.gate.computing(4)
    rank.gate.ready(4)
    rank.gate.begin_update(4, commit_record(4), backup_step=3 if copies else -1)
    rank.gate.end_update(4)
    rank.gate.computing(5)
    rank.gate.ready(5)
    rank.receive(Freeze(1, CAUSE))

    def rolled_forward() -> bool:
        rank.receive(
            RollForward(1, commit_record(5))
        )  # again and again: refused until the report on the gate has gone out
        return rank.gate.step == 5 and rank.gate.phase is Phase.DONE

    until(rolled_forward, "the roll forward")
    assert rank.gate.backup_step == (4 if copies else -1)


def test_an_exception_out_of_an_update_gives_the_gate_back(rank: Rank) -> None:
    """The rank's thread left the update open. The freeze that follows is answered at once, and reports a torn state: it does not wait
    for the end of an update that will never end."""

    def train() -> None:
        rank.gate.computing(4)
        rank.gate.ready(4)
        rank.gate.begin_update(4, commit_record(4))
        rank.processor.release_at_exit()
        rank.processor.fault(Cause(CauseKind.EXCEPTION, (0,), "ValueError: bad batch"), "")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(LONG_S)
    until(lambda: rank.gate.closed, "a gate that is closed and free")
    assert rank.gate.torn
