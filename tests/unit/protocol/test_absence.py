"""No rank is attached, none sends, or the controller was away itself: whose silence counts, and from when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.events import Finish, HeartbeatBatch, Tick
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import next_deadline
from ttp.proto.messages import AgentHello, CauseKind, Heartbeat, Phase, Thaw, WriteOrder

COMPUTE, UPDATING, READY = Phase.COMPUTE, Phase.UPDATING, Phase.READY
LEASE_S = 3.0


def assembling(*came: int) -> ControllerBench:
    """These ranks of four have registered."""
    job = ControllerBench(assembled=False)
    job.say(*(registration(rank) for rank in came))
    return job


def writing(**settings: Any) -> ControllerBench:
    """Rank 3 is dead, the others have their write orders."""
    job = ControllerBench(**settings)
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.WRITING)
    return job


# --- before the job has assembled ---


def test_a_rank_that_loses_its_stream_long_after_it_registered_has_a_lease_from_the_break() -> None:
    """No rank sends heartbeats before the welcome, so the time of its last message proves nothing."""
    job = assembling(0, 1)
    job.wait(50.0, senders=())
    job.close(1)
    job.say(registration(2), after=0.5)
    job.wait(LEASE_S - 0.6, senders=())
    assert job.at(Stage.ASSEMBLING) and not job.logged("death_seen")
    job.wait(0.2, senders=())
    assert [line["rank"] for line in job.logged("death_seen")] == [1] and job.at(Stage.EXITING)


def test_ranks_that_all_lost_the_controller_while_assembling_have_a_lease_from_the_first_that_is_back() -> None:
    job = assembling(0, 1)
    job.close(0, 1)
    job.wait(LEASE_S - 0.5, senders=())
    job.say(registration(0))
    job.wait(LEASE_S - 0.1, senders=())
    assert not job.logged("death_seen")
    job.wait(0.2, senders=())
    assert [line["rank"] for line in job.logged("death_seen")] == [1]


def test_leases_are_looked_at_again_when_somebody_is_back_after_all_had_left() -> None:
    """While no rank was attached there was nothing to check."""
    job = assembling(0, 1)
    job.close(0, 1)
    job.wait(LEASE_S + 2.0, senders=())
    job.say(registration(0))
    job.wait(LEASE_S - 0.1, senders=())
    assert job.at(Stage.ASSEMBLING)
    job.wait(0.2, senders=())
    assert [line["rank"] for line in job.logged("death_seen")] == [1] and job.at(Stage.EXITING)


def test_a_controller_that_everybody_left_before_the_job_assembled_refuses_nothing() -> None:
    """There was no fault, and nothing to save."""
    job = assembling(0)
    job.close(0)
    job.wait(14.9, senders=())
    assert job.at(Stage.ASSEMBLING)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER) and not job.logged("refused")


# --- leases ---


def test_the_lease_of_a_rank_that_was_silent_before_its_stream_broke_began_with_its_last_word() -> None:
    job = ControllerBench()
    job.wait(1.5, senders=(0, 2, 3))
    job.close(1)
    job.wait(1.4, senders=(0, 2, 3))
    assert not job.logged("death_seen")
    job.wait(0.2, senders=(0, 2, 3))
    assert [line["rank"] for line in job.logged("death_seen")] == [1]


def test_when_one_of_many_silent_ranks_sends_again_the_others_have_a_new_lease() -> None:
    """All were silent at once: most likely it was the controller that received nothing."""
    job = ControllerBench()
    job.wait(2.5, senders=())
    assert job.state.members.suspects == 4
    job.wait(LEASE_S - 0.1, senders=(0,))
    assert not job.logged("death_seen")
    job.say(*(Heartbeat(rank, COMPUTE, 1) for rank in (1, 2, 3)))
    assert sorted(job.sent(Thaw)) == [0, 1, 2, 3]


def test_a_suspect_whose_heartbeat_comes_with_its_nodes_others_is_cleared() -> None:
    job = ControllerBench()
    job.wait(2.1, senders=(0, 1, 3))
    assert job.state.members.suspects == 1
    job.take(HeartbeatBatch(tuple(Heartbeat(rank, COMPUTE, 1) for rank in (0, 2))))
    assert job.state.members.suspects == 0 and job.logged("cleared")[0]["rank"] == 2 and job.at(Stage.RUNNING)


def test_heartbeats_that_come_together_prolong_each_ranks_lease() -> None:
    job = ControllerBench()
    for _ in range(6):
        job.now += 0.9
        job.take(HeartbeatBatch(tuple(Heartbeat(rank, COMPUTE, 1) for rank in range(4))))
    assert job.at(Stage.RUNNING) and not job.logged("suspect")


def test_ranks_that_stay_silent_on_open_streams_are_dead_after_the_orphan_timeout() -> None:
    """For so long it may be the controller that is cut off; the wait has an end."""
    job = ControllerBench(orphan_timeout_s=15.0)
    job.wait(14.9, senders=())
    assert not job.logged("death_seen") and job.at(Stage.FREEZING)
    job.wait(LEASE_S + 0.2, senders=())
    assert len(job.logged("death_seen")) == 4 and "all ranks are dead" in job.logged("refused")[0]["reason"]


def test_a_lease_that_runs_out_after_two_heartbeats_without_any_message_is_not_believed() -> None:
    """Of several ranks at least one sends within a heartbeat."""
    job = ControllerBench(heartbeat_s=1.0)
    job.wait(1.0, senders=(0, 1, 2))
    job.wait(2.1, senders=())
    assert not job.logged("death_seen")


def test_of_two_ranks_that_are_silent_at_once_neither_is_dead() -> None:
    job = ControllerBench(((0, 1),))
    job.wait(LEASE_S + 0.1, senders=())
    assert not job.logged("death_seen") and job.state.members.suspects == 2


def test_a_rank_is_suspected_once() -> None:
    """Its stream broke; the end of its lease does not suspect it a second time."""
    job = ControllerBench()
    job.wait(0.5)
    job.close(1)
    job.wait(2.9, senders=(0, 2, 3))
    assert [line["rank"] for line in job.logged("suspect")] == [1]


def test_the_dead_do_not_stand_for_a_controller_that_is_cut_off() -> None:
    """A dead rank's silence gives the others no more time."""
    job = writing()
    job.wait(2.1, senders=())
    assert job.state.members.suspects == 3


def test_orders_have_their_whole_time_again_after_the_controller_was_cut_off() -> None:
    """No message came for a lease: all answers on the way are lost."""
    job = writing(progress_timeout_s=4.0)
    job.wait(5.0, senders=())
    assert not job.logged("stuck") and [line["rank"] for line in job.logged("death_seen")] == [3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_silence_of_all_ranks_at_once_is_the_controllers(ranks: int) -> None:
    """Then what they owe an answer to, they have the whole time for again."""
    job = ControllerBench((tuple(range(ranks)),), freeze_timeout_s=10.0)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.wait(2.5, senders=())
    assert job.state.members.suspects == ranks
    job.say(*(Heartbeat(rank, COMPUTE, 1) for rank in range(ranks)))
    job.wait(7.6)
    assert job.at(Stage.FREEZING)


def test_nothing_is_decided_while_all_ranks_are_silent() -> None:
    """Their streams are open, and the round's time is over: a silent rank could receive no order, and would not count."""
    job = ControllerBench(freeze_timeout_s=2.6)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.wait(2.9, senders=())
    assert job.state.members.suspects == 4 and not job.logged("refused")
    job.say(*(report(rank, 1, COMPUTE, 7) for rank in range(4)))
    assert job.logged("decided")[0]["step"] == 6


def test_the_last_message_before_the_clock_leapt_back_is_not_in_the_future() -> None:
    """Silence after it counts as any other: nothing is decided without the silent rank."""
    job = ControllerBench(((0, 1),), freeze_timeout_s=2.6)
    job.wait(10.0)
    job.now -= 9.0
    job.say(killed(1))
    job.wait(4.0, senders=())
    assert job.state.members.suspects == 1 and not job.logged("refused")
    job.say(report(0, 1, COMPUTE, 7))
    assert job.logged("decided")[0]["step"] == 6


def test_a_rank_that_alone_is_left_has_its_whole_time_again_when_it_comes_back() -> None:
    job = ControllerBench(((0,),), freeze_timeout_s=10.0)
    job.say(fault(0, CauseKind.EXCEPTION))
    job.close(0)
    job.wait(9.5, senders=())
    job.say(registration(0, ((0,),)))
    job.wait(9.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.logged("refused")


# --- no rank is attached ---


def test_a_death_seen_while_no_rank_is_attached_does_not_make_the_wait_longer() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(10.0, senders=())
    job.say(killed(3))
    job.wait(4.9, senders=())
    assert job.at(Stage.FREEZING)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER) and job.logged("refused")


def test_the_status_of_a_death_that_comes_while_no_rank_is_attached_does_not_make_the_wait_longer() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.say(killed(3, "exiting"))
    job.close(0, 1, 2)
    job.wait(10.0, senders=())
    job.say(killed(3))
    assert job.logged("death_named")
    job.wait(5.1, senders=())
    assert job.at(Stage.OVER)


def test_a_death_is_waited_out_from_then_on_when_it_was_the_last_rank_attached() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2)
    job.wait(1.0, senders=(3,))
    job.say(killed(3))
    job.wait(14.9, senders=())
    assert job.at(Stage.FREEZING)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER)


def test_a_leftover_of_a_broken_stream_does_not_make_the_wait_longer() -> None:
    """Nothing is received through it now."""
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(10.0, senders=())
    job.say(Heartbeat(1, COMPUTE, 1))
    job.wait(5.1, senders=())
    assert job.at(Stage.OVER)


def test_the_driver_comes_once_a_heartbeat() -> None:
    """So that the machine sees when the driver was stopped."""
    job = ControllerBench(heartbeat_s=0.3)
    assert next_deadline(job.state) == 0.3
    job.say(killed(3), after=0.1)
    assert next_deadline(job.state) == pytest.approx(0.4)


def test_a_controller_without_attached_ranks_sees_that_it_was_stopped() -> None:
    """The time for which it did so is not one for which no rank came; it would end the job while they are on their way."""
    job = ControllerBench(heartbeat_s=0.3, orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(5.0, senders=())
    job.take(Tick(), after=9.9)
    job.wait(14.9, senders=())
    assert not job.at(Stage.OVER)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER)


def test_a_start_that_waits_for_ranks_is_not_called_before_it_is_over() -> None:
    """No lease runs."""
    job = assembling(0)
    job.wait(5.0, senders=())
    assert next_deadline(job.state) == job.state.settings.register_timeout_s


def test_no_rank_is_an_orphan_once_one_is_back() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(1.0, senders=())
    job.say(*(registration(rank) for rank in range(4)))
    job.wait(20.0)
    assert job.at(Stage.RUNNING)


def silent_dead(progress_timeout_s: float = 100.0) -> ControllerBench:
    """Rank 3 is dead because it was silent, and its stream is still open; the others write."""
    job = ControllerBench(total_timeout_s=500.0, progress_timeout_s=progress_timeout_s)
    job.wait(LEASE_S + 0.1, senders=(0, 1, 2))
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.WRITING)
    return job


def test_the_exit_of_a_silent_rank_leaves_the_others_attached() -> None:
    """There is no orphan then."""
    job = silent_dead()
    job.say(killed(3))
    job.wait(20.0, senders=(0, 1, 2))
    assert job.at(Stage.WRITING)


def test_a_dead_rank_whose_stream_is_open_does_not_count_as_attached() -> None:
    """Its host failed silently. When the others lose the controller too, they are waited for as if no rank were attached:
    their orders do not count as stuck, and they have what they need to answer when they come back."""
    job = silent_dead(progress_timeout_s=4.0)
    orders = job.orders()
    job.close(0, 1, 2)
    job.wait(14.0, senders=())
    assert job.at(Stage.WRITING) and not job.logged("stuck")
    job.say(*(registration(rank) for rank in (0, 1, 2)))
    job.all_write(orders)
    assert job.at(Stage.PUBLISHING)


@pytest.mark.parametrize("seen_to_end", [True, False])
def test_the_wait_for_the_others_begins_when_the_last_living_rank_is_gone(seen_to_end: bool) -> None:
    """What becomes of a dead one's stream, or that it comes again, changes nothing."""
    job = silent_dead()
    job.close(0, 1, 2)
    job.say(killed(3) if seen_to_end else registration(3), after=1.0)
    job.wait(13.9, senders=())
    assert job.at(Stage.WRITING)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER) if seen_to_end else job.logged("refused") or job.at(Stage.OVER)


def test_a_silent_rank_that_is_seen_to_end_receives_no_order_to_exit() -> None:
    """Its stream counts as closed: it is not waited for at the end."""
    job = silent_dead()
    orders = {rank: job.state.dump.work[rank].orders[0] for rank in (0, 1, 2)} if job.state.dump is not None else {}
    job.say(killed(3))
    job.all_write(orders)
    job.say(killed(0), killed(1), killed(2))
    assert job.logged("exit_sent")[0]["ranks"] == () and only(job.effects, Finish)


def test_no_rank_is_found_stuck_while_none_is_attached() -> None:
    """Who comes back gets its order again, and the whole time for it."""
    job = writing(progress_timeout_s=4.5)
    orders = job.orders()
    job.wait(4.0, senders=(0, 1, 2))
    job.close(0, 1, 2)
    job.wait(4.0, senders=())
    assert not job.logged("stuck") and job.at(Stage.WRITING)
    for rank in (0, 1, 2):
        job.say(registration(rank))
        assert job.orders() == {rank: orders[rank]}
    job.wait(4.4, senders=(0, 1, 2))
    assert not job.logged("stuck")
    job.wait(0.2, senders=(0, 1, 2))
    assert job.logged("stuck")


# --- the controller was away itself ---


def test_a_controller_that_was_stopped_while_no_rank_was_attached_waits_its_whole_time_again() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.take(Tick(), after=60.0)
    assert job.at(Stage.FREEZING)
    job.wait(14.9, senders=())
    assert job.at(Stage.FREEZING)
    job.wait(0.2, senders=())
    assert job.at(Stage.OVER)


def test_a_controller_that_was_stopped_gives_writers_their_whole_time_again() -> None:
    job = writing(progress_timeout_s=5.0)
    job.take(Tick(), after=60.0)
    job.wait(4.9, senders=(0, 1, 2))
    assert not job.logged("stuck")
    job.wait(0.2, senders=(0, 1, 2))
    assert job.logged("stuck")


def test_a_controller_that_was_stopped_gives_a_round_its_whole_time_again() -> None:
    job = ControllerBench(freeze_timeout_s=5.0)
    job.say(fault(1, CauseKind.EXCEPTION))
    job.all_report(7, ranks=(0, 1, 2))
    job.take(Tick(), after=60.0)
    job.wait(4.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.logged("decided")[0]["able"] == (0, 1, 2)


def test_a_controller_that_was_stopped_gives_an_update_its_whole_time_again() -> None:
    job = ControllerBench(freeze_timeout_s=5.0, progress_timeout_s=10.0)
    job.say(killed(3))
    job.say(report(1, 1, UPDATING, 7, records=[7], closed=False), *(report(rank, 1, READY, 7) for rank in (0, 2)))
    assert job.logged("awaiting_updates")
    job.take(Tick(), after=60.0)
    job.wait(9.9, senders=(0, 1, 2))
    assert job.at(Stage.FREEZING)
    job.wait(0.2, senders=(0, 1, 2))
    assert job.logged("refused")


def test_a_deaf_controller_whose_clock_leaps_takes_no_rank_for_dead() -> None:
    """What the leap adds to the silence is its own; only after the orphan timeout without another leap it must be true."""
    job = writing(orphan_timeout_s=15.0, progress_timeout_s=100.0)
    job.wait(8.0, senders=())
    job.take(Tick(), after=10.0)
    job.wait(14.0, senders=())
    assert len(job.logged("death_seen")) == 1 and job.at(Stage.WRITING)
    job.wait(2.0 + LEASE_S, senders=())
    assert len(job.logged("death_seen")) == 4 and job.logged("refused")[0]["reason"] == "all ranks are dead"


def test_a_standby_whose_clock_leaps_goes_on_to_wait_for_those_that_have_not_come() -> None:
    """Rank 0 came and is silent like the others: it is the standby that is cut off, for as long as that may last."""
    job = ControllerBench(assembled=False, standby=1, address="c1", orphan_timeout_s=15.0)
    job.say(replace(registration(0), job_groups=2))
    job.wait(8.0, senders=())
    job.take(Tick(), after=10.0)
    job.wait(14.0, senders=())
    assert job.at(Stage.GATHERING)
    job.wait(2.0 + LEASE_S, senders=())
    assert job.logged("took_over")[0]["absent"] == (1, 2, 3)


def test_a_standby_that_was_stopped_waits_a_lease_again_for_those_that_have_not_come() -> None:
    job = ControllerBench(assembled=False, standby=1, address="c1")
    job.say(registration(0))
    job.take(Tick(), after=60.0)
    assert job.at(Stage.GATHERING)
    job.wait(LEASE_S - 0.1, senders=(0,))
    assert job.at(Stage.GATHERING) and not job.logged("took_over")
    job.wait(0.2, senders=(0,))
    assert job.logged("took_over")[0]["absent"] == (1, 2, 3)


def test_a_controller_that_was_stopped_while_ranks_left_does_not_stay_for_them() -> None:
    """At the end no rank needs more time."""
    job = ControllerBench()
    job.say(killed(0), killed(2))
    job.all_report(7, ranks=(1, 3))
    assert job.at(Stage.EXITING)
    job.take(Tick(), after=60.0)
    assert job.at(Stage.OVER)


@pytest.mark.parametrize("late_s", [0.4, 0.5, 0.6])
def test_a_driver_that_comes_a_little_late_is_not_taken_for_one_that_was_stopped(late_s: float) -> None:
    """Half a heartbeat is the difference: a lease that ran out a little earlier has run out."""
    job = ControllerBench(lease_s=LEASE_S, heartbeat_s=1.0)
    job.wait(2.9, senders=(0, 1, 2))
    assert job.logged("suspect")
    for rank in (0, 1, 2):
        job.say(Heartbeat(rank, COMPUTE, 1))
    job.take(Tick(), after=0.1 + late_s)
    assert bool(job.logged("death_seen")) is (late_s <= 0.5)


@pytest.mark.parametrize("late_s", [0.45, 0.55])
def test_a_host_that_keeps_the_controller_again_and_again_keeps_no_dead_rank_alive(late_s: float) -> None:
    """Heartbeats come every 0.05 s; half of a third of the lease is the difference all the same."""
    job = ControllerBench(lease_s=LEASE_S, heartbeat_s=0.05)
    for _ in range(9):
        job.take(Tick(), after=0.05 + late_s)
        job.take(HeartbeatBatch(tuple(Heartbeat(rank, COMPUTE, 1) for rank in (0, 1, 2))))
    assert bool(job.logged("death_seen")) is (late_s <= 0.5)


def test_a_launchers_word_excuses_no_silence() -> None:
    """All ranks are silent; that a launcher attaches says nothing of them."""
    job = ControllerBench(orphan_timeout_s=15.0)
    job.wait(2.5, senders=())
    before = job.state.members.leases_renewed_at
    job.say(AgentHello("host0", (0,), (100,)))
    assert job.state.members.leases_renewed_at == before


def test_what_was_ordered_is_not_ordered_again_when_the_controller_goes_on() -> None:
    job = writing()
    job.take(Tick(), after=60.0)
    assert not job.sent(WriteOrder) and job.at(Stage.WRITING)
