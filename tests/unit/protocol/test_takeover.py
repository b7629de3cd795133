"""A standby becomes the active controller: who is waited for, what is asked, and what may be thawed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import FREEZES_OF_A_TERM, next_deadline
from ttp.proto.messages import (
    AgentHello,
    CauseKind,
    Exit,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    Registration,
    Release,
    StandbyList,
    Thaw,
    Welcome,
)

LEASE_S = 3.0
LIST = ("c0", "c1", "c2")


def coming(rank: int, groups: int = 2, pid: int = 0) -> Registration:
    """Return the first message of a rank that has lost its controller."""
    return replace(registration(rank, pid=pid), controllers=LIST, job_groups=groups)


def standby() -> ControllerBench:
    """Return the first standby of four ranks; none has come yet."""
    return ControllerBench(assembled=False, standby=1, address="c1", lease_s=LEASE_S)


def frozen() -> ControllerBench:
    """All four ranks have come, and their gates are being closed."""
    job = standby()
    for rank in range(4):
        job.say(coming(rank))
    assert job.at(Stage.FREEZING)
    return job


# --- gathering ---


def test_a_standby_waits_until_somebody_comes() -> None:
    """It has no deadline of its own, and does nothing."""
    job = standby()
    job.wait(1000.0, senders=())
    assert job.at(Stage.STANDBY) and not job.journal


def test_all_are_welcomed_and_frozen_under_a_number_above_all_of_the_lost_controllers() -> None:
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
        welcomed = job.sent(Welcome)[rank]
        assert (welcomed.term, welcomed.successors) == (3, ("c1", "c2"))
        assert not job.sent(Freeze)
    job.say(coming(3))
    freezes = job.sent(Freeze)
    assert sorted(freezes) == [0, 1, 2, 3]
    assert {freeze.freeze_id for freeze in freezes.values()} == {FREEZES_OF_A_TERM + 1}
    assert {freeze.cause.kind for freeze in freezes.values()} == {CauseKind.CONTROLLER_LOST}
    assert job.logged("took_over")[0]["survives"]


def test_a_rank_that_does_not_come_within_a_lease_is_dead() -> None:
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.wait(LEASE_S - 0.1, senders=(0, 1, 2))
    assert job.at(Stage.GATHERING)
    job.wait(0.2, senders=(0, 1, 2))
    assert job.at(Stage.FREEZING)
    assert [line["rank"] for line in job.logged("death_seen")] == [3]
    assert sorted(job.logged("freeze_sent")[0]["ranks"]) == [0, 1, 2]
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.WRITING)


def test_a_rank_that_is_known_to_be_dead_is_not_waited_for() -> None:
    job = standby()
    job.say(killed(3))
    for rank in range(3):
        job.say(coming(rank))
    assert job.at(Stage.FREEZING)
    job.all_report(7, ranks=(0, 1, 2))
    assert job.orders() and job.logged("decided")[0]["able"] == (0, 1, 2)


def test_while_no_rank_that_came_sends_the_others_are_waited_for() -> None:
    """It is this controller that is cut off then."""
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.wait(LEASE_S + 0.1, senders=())
    assert job.at(Stage.GATHERING)
    job.say(coming(3))
    assert job.at(Stage.FREEZING)


def test_exiting_is_not_the_last_word_on_a_death() -> None:
    job = standby()
    job.say(killed(3, "exiting"), killed(3, "signal SIGKILL"))
    job.say(killed(3, "signal SIGKILL, out of memory"), killed(3, "signal SIGKILL"), killed(3, "exit code 1"))
    for rank in range(3):
        job.say(coming(rank))
    job.all_report(7, ranks=(0, 1, 2))
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert order.cause.text == "signal SIGKILL, out of memory" and order.cause.ranks == (3,)
    assert len(job.logged("death_seen")) == 1


def test_the_exit_of_an_earlier_process_is_nothing() -> None:
    job = standby()
    job.say(coming(3, pid=777), killed(3, pid=103))
    for rank in range(3):
        job.say(coming(rank))
    assert job.at(Stage.FREEZING) and not job.logged("death_seen")


def test_faults_reported_again_are_the_causes_of_the_takeovers_freeze() -> None:
    """Each once, however often it is said."""
    job = standby()
    job.say(coming(0), fault(0, CauseKind.EXCEPTION), fault(0, CauseKind.EXCEPTION))
    for rank in range(1, 4):
        job.say(coming(rank))
    assert {freeze.cause.kind for freeze in job.sent(Freeze).values()} == {CauseKind.EXCEPTION}
    assert len(job.logged("fault_reported")) == 1
    job.all_report(7)
    assert job.at(Stage.WRITING)


# --- what the freeze finds ---


def test_when_nothing_was_begun_all_are_thawed_once_every_rank_has_reported() -> None:
    job = frozen()
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.FREEZING)
    job.all_report(7, ranks=(3,))
    assert sorted(job.sent(Thaw)) == [0, 1, 2, 3]
    assert job.at(Stage.RUNNING) and not job.logged("decided")


def test_a_rank_whose_gate_can_never_open_again_makes_a_dump_necessary() -> None:
    job = frozen()
    job.all_report(7, ranks=(0, 1, 2))
    job.say(report(3, FREEZES_OF_A_TERM + 1, Phase.COMPUTE, 7, final=True))
    assert not job.sent(Thaw) and job.at(Stage.WRITING)
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert order.cause.kind is CauseKind.CONTROLLER_LOST and order.cause.ranks == (3,)


def test_a_rank_that_does_not_answer_the_freeze_makes_a_dump_necessary() -> None:
    """The lost controller's orders to it are unknown."""
    job = frozen()
    job.all_report(7, ranks=(0, 1, 2))
    job.wait(10.1)
    assert not job.logged("thawed")
    assert job.logged("decided")[0]["able"] == (0, 1, 2)


def test_the_driver_comes_when_the_time_for_answers_is_over() -> None:
    job = frozen()
    job.all_report(7, ranks=(0, 1, 2))
    job.wait(9.6)
    assert next_deadline(job.state) == job.state.settings.freeze_timeout_s == 10.0


def test_shards_that_no_rank_reported_are_refused() -> None:
    """The job has three groups; the ranks that came hold two."""
    job = standby()
    job.say(killed(3))
    for rank in range(3):
        job.say(coming(rank, groups=3))
    job.all_report(7, ranks=(0, 1, 2))
    reason = job.logged("refused")[0]["reason"]
    assert "1 of 3 shard groups" in reason and "(rank 3)" in reason


def test_a_job_that_had_not_assembled_is_released() -> None:
    """The ranks never received how many groups there are, and one is missing."""
    job = standby()
    job.say(killed(3))
    for rank in range(3):
        job.say(coming(rank, groups=0))
    assert sorted(job.sent(Exit)) == [0, 1, 2]


def test_a_whole_job_that_had_not_received_its_groups_continues() -> None:
    """Its ranks are welcomed together, when all have come, and before they are frozen."""
    job = standby()
    for rank in range(4):
        assert not job.sent(Welcome)
        job.say(coming(rank, groups=0))
    orders = [(effect.ranks, type(effect.message)) for effect in only(job.effects, ev.Send)]
    assert orders[:4] == [((rank,), Welcome) for rank in range(4)] and orders[4][1] is Freeze
    job.all_report(7)
    assert job.at(Stage.RUNNING)


def test_a_rank_that_was_never_welcomed_does_not_begin_while_others_are_awaited() -> None:
    """It could finish a step, and this controller does not know yet that the job had assembled."""
    job = standby()
    job.say(coming(0, groups=0))
    assert not job.sent(Welcome)
    job.say(coming(1))
    assert sorted(job.sent(Welcome)) == [1]
    job.say(coming(2), coming(3))
    assert sorted(job.sent(Welcome)) == [0, 3] and sorted(job.sent(Freeze)) == [0, 1, 2, 3]


def test_ranks_that_were_never_welcomed_send_nothing_and_the_takeover_does_not_wait_for_it() -> None:
    """Their silence does not show that this controller is cut off."""
    job = standby()
    job.say(killed(3))
    job.say(coming(0, groups=0), coming(1, groups=0))
    job.wait(2 * LEASE_S + 0.1, senders=())
    assert [line["ranks"] for line in job.logged("exit_sent")] == [(0, 1)]


# --- the end of a job under a standby ---


def test_when_all_have_finished_there_is_nothing_left_to_do() -> None:
    job = standby()
    for rank in range(4):
        job.say(coming(rank), Finished(rank))
        if rank == 0:
            assert job.at(Stage.GATHERING)
    assert job.logged("finished") and job.at(Stage.OVER)
    assert job.sent(Release)


def test_ranks_that_exited_cleanly_count_as_finished() -> None:
    job = standby()
    for rank in range(3):
        job.say(killed(rank, "exit code 0"))
    assert not job.logged("death_seen") and len(job.logged("left")) == 3
    job.say(coming(3), Finished(3))
    assert job.at(Stage.OVER) and job.logged("finished")


def test_a_rank_that_ends_with_an_unknown_status_is_waited_for_when_the_others_have_finished() -> None:
    """It may have been released by the controller that was lost."""
    job = standby()
    job.say(killed(3, "exiting"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    assert job.at(Stage.GATHERING)
    job.say(killed(3, "exit code 0"))
    assert job.at(Stage.OVER)


@pytest.mark.parametrize("came", [False, True])
def test_when_all_ranks_have_ended_a_standby_ends(came: bool) -> None:
    job = standby()
    if came:
        job.say(coming(0))
    for rank in range(4):
        job.say(killed(rank))
    assert job.at(Stage.OVER)


def test_a_standby_that_everybody_has_left_again_ends_after_the_orphan_timeout() -> None:
    job = standby()
    job.say(coming(0), coming(1))
    job.close(0, 1)
    job.wait(14.0, senders=())
    assert job.at(Stage.GATHERING)
    job.wait(2.0, senders=())
    assert job.at(Stage.OVER)


def test_agents_learn_the_list_of_standbys() -> None:
    """Whenever they attach, and when it grows."""
    job = standby()
    job.say(AgentHello("h", (0, 1), (100, 101)))
    assert not only(job.effects, ev.Tell)
    job.say(coming(0))
    assert only(job.effects, ev.Tell) == [ev.Tell(("h",), StandbyList(("c1", "c2"), LEASE_S))]
    job.say(coming(1))
    assert not only(job.effects, ev.Tell)
    job.say(AgentHello("i", (2, 3), (102, 103)))
    assert only(job.effects, ev.Tell) == [ev.Tell(("i",), StandbyList(("c1", "c2"), LEASE_S))]


def test_answers_to_the_lost_controller_mean_nothing() -> None:
    """Heartbeats only show that a rank lives, and a report of an old freeze is of the old freeze."""
    job = standby()
    job.say(coming(0), Heartbeat(0, Phase.COMPUTE, 4), report(0, 1, Phase.DONE, 9))
    assert job.at(Stage.GATHERING)
    for rank in range(1, 4):
        job.say(coming(rank))
    job.say(report(0, 1, Phase.DONE, 9))
    assert job.state.fault is not None and job.state.fault.awaiting == 4


def test_a_rank_that_falls_silent_in_the_takeovers_freeze_is_waited_for_by_its_lease() -> None:
    """The round's time is over before the lease is: nothing can be decided then, so nothing is due before the lease ends."""
    job = ControllerBench(assembled=False, standby=1, address="c1", lease_s=LEASE_S, freeze_timeout_s=1.0)
    for rank in range(4):
        job.say(coming(rank))
    job.say(*(report(rank, job.state.freeze_id, Phase.COMPUTE, 7) for rank in range(3)))
    job.close(3)
    job.wait(1.1, senders=(0, 1, 2))
    assert job.at(Stage.FREEZING) and not job.logged("frozen")
    job.wait(LEASE_S, senders=(0, 1, 2))
    assert job.logged("death_seen")[0]["rank"] == 3 and job.at(Stage.WRITING)


def test_when_all_that_come_have_finished_no_gate_is_closed_any_more() -> None:
    job = standby()
    for rank in range(4):
        job.say(replace(coming(rank), finished=True))
    assert job.logged("finished") and not job.logged("freeze_sent")


def test_no_rank_is_dismissed_when_all_have_exited_cleanly() -> None:
    """None is there to receive it."""
    job = standby()
    job.say(coming(3), Finished(3))
    for rank in (3, 0, 1, 2):
        assert job.at(Stage.GATHERING)
        job.say(killed(rank, "exit code 0"))
    assert job.at(Stage.OVER) and job.logged("finished")
    assert not only(job.effects, ev.Send)


def test_a_rank_that_had_finished_stays_finished_however_it_ends() -> None:
    """A signal after the end of its training costs the job nothing."""
    job = standby()
    job.say(replace(coming(3), finished=True), killed(3, "signal SIGKILL"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    assert job.logged("finished") and job.at(Stage.OVER)


def test_a_rank_that_came_and_is_ending_is_waited_for_when_the_others_have_finished() -> None:
    """Until its status is known, or a lease has passed."""
    job = standby()
    job.say(coming(3), killed(3, "exiting"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    assert job.at(Stage.GATHERING)
    job.say(killed(3, "signal SIGSEGV"))
    assert job.at(Stage.FREEZING)


def test_a_rank_whose_end_is_known_is_not_waited_for_when_the_others_have_finished() -> None:
    job = standby()
    job.say(killed(3, "signal SIGKILL"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    assert job.at(Stage.FREEZING)


def test_a_rank_whose_end_is_never_reported_is_not_waited_for_longer_than_a_lease() -> None:
    """However silent the others are: all that live have come."""
    job = standby()
    job.say(killed(3, "exiting"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    job.wait(LEASE_S - 0.1, senders=())
    assert job.at(Stage.GATHERING)
    job.wait(0.2, senders=())
    assert job.at(Stage.FREEZING)


# --- whose messages come while the ranks gather ---


def test_a_message_of_one_rank_proves_that_the_controller_is_not_cut_off() -> None:
    job = standby()
    job.say(coming(0), coming(1))
    job.wait(LEASE_S + 0.1, senders=(0,))
    assert job.logged("took_over")[0]["absent"] == (2, 3)


def test_two_thirds_of_a_lease_in_silence_are_enough_to_wait_for_the_others() -> None:
    """To the moment."""
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.say(*(Heartbeat(rank, Phase.COMPUTE, 1) for rank in range(3)), after=0.0)
    job.now = 1.0
    job.say(*(Heartbeat(rank, Phase.COMPUTE, 1) for rank in range(3)))
    job.take(ev.Tick(), after=LEASE_S - 1.0)
    assert job.at(Stage.GATHERING)


def test_a_controller_that_receives_nothing_takes_over_after_the_orphan_timeout_all_the_same() -> None:
    """It must be true then."""
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.wait(job.state.settings.orphan_timeout_s - 0.1, senders=())
    assert job.at(Stage.GATHERING)
    job.wait(0.1, senders=())
    assert job.logged("took_over")[0]["absent"] == (3,)


def test_when_all_that_came_have_gone_again_nothing_is_taken_over() -> None:
    """They come back, or the orphan timeout ends it; an agent's messages meanwhile change nothing."""
    job = standby()
    job.say(coming(0))
    job.close(0)
    job.say(killed(3), after=LEASE_S + 1.0)
    assert job.at(Stage.GATHERING) and not job.logged("took_over")


def test_a_rank_that_comes_again_gives_the_others_no_more_time() -> None:
    """The lease in which all come begins with the first."""
    job = standby()
    job.say(coming(1), coming(0))
    job.close(0)
    job.say(coming(0), after=1.0)
    job.wait(LEASE_S - 0.9, senders=(0, 1))
    assert job.logged("took_over")[0]["absent"] == (2, 3)


def test_the_rank_that_knows_most_groups_sets_their_number() -> None:
    """One that was never welcomed knows of none."""
    job = standby()
    job.say(killed(3), coming(0, groups=0), coming(1, groups=3), coming(2, groups=3))
    job.all_report(7, ranks=(0, 1, 2))
    assert "1 of 3 shard groups" in job.logged("refused")[0]["reason"]


def test_a_rank_that_comes_while_others_write_is_a_holder_in_the_next_round() -> None:
    """Ranks 2 and 3 cover, and rank 0 comes late. Then the rank dies that writes the same as it (seed 4700992854)."""
    job = standby()
    job.say(killed(1), coming(2), coming(3))
    job.wait(2 * LEASE_S + 0.1, senders=(2, 3))
    assert job.logged("took_over")[0]["absent"] == (0,)
    job.all_report(7, ranks=(2, 3))
    assert set(job.orders()) == {2, 3}
    job.say(coming(0), killed(2))
    assert job.at(Stage.FREEZING)
    job.all_report(7, ranks=(0, 3))
    assert set(job.orders()) == {0, 3} and not job.logged("refused")
