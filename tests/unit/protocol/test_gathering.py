"""What a standby makes of those that come, come and go again, or never come, and of what their launchers tell."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_takeover import LEASE_S, coming, frozen, standby
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import FREEZES_OF_A_TERM
from ttp.proto.messages import (
    CauseKind,
    Exit,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    Progress,
    Thaw,
    Welcome,
)

COMPUTE, READY, DONE = Phase.COMPUTE, Phase.READY, Phase.DONE


# --- who comes ---


def test_a_standby_that_the_ranks_do_not_list_looks_for_no_controller() -> None:
    """It cannot tell who comes before it."""
    job = standby()
    job.say(registration(2))
    assert not only(job.effects, ev.LookFor) and job.logged("takeover_began")[0]["earlier"] == ()


def test_a_rank_that_came_and_went_again_does_not_count_as_absent() -> None:
    """It has its lease from the takeover on, and may come back for as long."""
    job = standby()
    for rank in range(4):
        if rank == 3:
            job.close(0)
        job.say(coming(rank))
    assert job.at(Stage.GATHERING), "rank 0 is waited for"
    job.wait(LEASE_S, senders=(1, 2, 3))
    assert job.at(Stage.FREEZING) and job.logged("took_over")[0]["absent"] == () and not job.logged("death_seen")
    job.all_report(7, ranks=(1, 2, 3))
    job.say(coming(0))
    assert sorted(job.sent(Freeze)) == [0]
    job.all_report(7, ranks=(0,))
    assert job.at(Stage.RUNNING)


def test_a_rank_that_comes_after_the_takeover_brings_its_shards() -> None:
    """Rank 2 was waited for in vain, twice; its partner 0 is dead, so that it alone has their shard."""
    job = standby()
    job.say(coming(1), coming(3), killed(0))
    job.wait(2 * LEASE_S, senders=(1, 3))
    assert job.logged("took_over")[0]["absent"] == (2,)
    job.all_report(7, ranks=(1,))
    job.say(coming(2))
    job.all_report(7, ranks=(2, 3))
    assert job.logged("decided")[0]["able"] == (1, 2, 3)


def test_where_those_that_came_do_not_cover_the_others_have_another_lease() -> None:
    """They may have stood still for a moment, each with a new lease for the lost controller; once, and not for dead ones.
    One of those that came was never welcomed, and knows of no groups."""
    job = standby()
    job.say(coming(1, groups=0), coming(3, groups=2), killed(0))
    job.wait(LEASE_S + 0.1, senders=(1, 3))
    assert job.at(Stage.GATHERING)
    job.say(coming(2))
    assert job.logged("took_over")[0]["absent"] == ()


def test_words_that_come_now_and_then_do_not_put_the_takeover_off_for_ever() -> None:
    """One rank sends once in most of a lease; the others have the orphan timeout, and a lease more as they do not cover."""
    job = standby()
    job.say(coming(0), coming(1))
    while job.at(Stage.GATHERING) and job.now < 100.0:
        job.wait(LEASE_S * 0.9, senders=())
        if job.at(Stage.GATHERING):
            job.say(Heartbeat(0, COMPUTE, 1))
    assert job.now <= job.state.settings.orphan_timeout_s + 2 * LEASE_S


def test_where_those_that_came_cover_the_others_are_not_waited_for_longer() -> None:
    job = standby()
    job.say(coming(1), coming(2))
    job.wait(LEASE_S, senders=(1, 2))
    assert job.logged("took_over")[0]["absent"] == (0, 3)


def test_no_rank_is_silent_for_what_was_before_the_takeover() -> None:
    """Whoever came first had nothing to say until now."""
    job = standby()
    job.say(coming(0), coming(1), coming(2))
    job.now = 2.4
    job.say(coming(3))
    assert job.at(Stage.FREEZING)
    job.wait(LEASE_S / 2, senders=(3,))
    assert not job.logged("suspect")


def test_ranks_that_did_not_come_are_given_up_when_no_rank_sends_for_the_orphan_timeout() -> None:
    """For so long it may be this controller that is cut off."""
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.wait(14.0, senders=())
    assert job.at(Stage.GATHERING)
    job.wait(2 * LEASE_S, senders=())
    assert job.logged("took_over")[0]["absent"] == (3,)


def test_a_takeover_of_part_of_the_job_promises_nothing() -> None:
    """What the job survives is known when all are there."""
    job = standby()
    job.say(killed(3))
    for rank in range(3):
        job.say(coming(rank))
    assert job.logged("took_over")[0]["survives"] == "" and job.logged("took_over")[0]["warnings"] == ()
    assert job.state.job_groups == 2


def test_the_groups_that_a_takeover_finds_are_the_jobs() -> None:
    """The ranks did not know how many there are, and all have come."""
    job = standby()
    for rank in range(4):
        job.say(coming(rank, groups=0))
    job.all_report(7)
    job.close(1)
    job.say(coming(1, groups=0))
    assert job.sent(Welcome)[1].job_groups == 2


# --- what launchers tell ---


def test_a_rank_that_came_and_ends_with_status_0_before_it_has_finished_is_dead() -> None:
    job = standby()
    job.say(coming(3), killed(3, "exit code 0"))
    assert len(job.logged("death_seen")) == 1 and not job.logged("left")
    for rank in range(3):
        job.say(coming(rank))
    assert {freeze.cause.ranks for freeze in job.sent(Freeze).values()} == {(3,)}


def test_a_rank_that_came_and_leaves_after_it_has_finished_does_not_count_as_cause() -> None:
    job = standby()
    job.say(replace(coming(3), finished=True), killed(3, "exit code 0"))
    assert job.logged("left") and not job.logged("death_seen")
    for rank in range(3):
        job.say(coming(rank))
    assert {freeze.cause.kind for freeze in job.sent(Freeze).values()} == {CauseKind.CONTROLLER_LOST}
    job.all_report(7, ranks=(0, 1, 2))
    assert sorted(job.sent(Thaw)) == [0, 1, 2]
    job.say(*(Finished(rank) for rank in range(3)))
    assert job.logged("finished")


def test_a_rank_that_exited_cleanly_has_finished_whatever_it_had_reported_before() -> None:
    """Its registration was still on the wire, from before its training returned."""
    job = standby()
    job.say(killed(3, "exit code 0"), coming(3))
    assert job.state.members.finished == 1
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    assert job.at(Stage.OVER) and job.logged("finished")


def test_a_death_whose_status_comes_later_is_logged_with_it() -> None:
    job = standby()
    job.say(killed(3, "exiting"), killed(3, "exit code 7"))
    assert len(job.logged("death_seen")) == 1
    for rank in range(3):
        job.say(coming(rank))
    assert {freeze.cause.text for freeze in job.sent(Freeze).values()} == {"exit code 7"}


def test_ranks_that_finished_do_not_wait_for_one_that_ends_longer_than_a_lease() -> None:
    """Its status stays unknown: it is a death then."""
    job = standby()
    job.say(killed(3, "exiting"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=True))
    job.wait(LEASE_S - 0.1, senders=(0, 1, 2))
    assert job.at(Stage.GATHERING)
    job.wait(0.2, senders=(0, 1, 2))
    assert job.at(Stage.FREEZING) and job.logged("took_over")


def test_while_some_rank_trains_the_status_of_another_is_not_waited_for() -> None:
    """It cannot have been released."""
    job = standby()
    job.say(killed(3, "exiting"))
    for rank in range(3):
        job.say(replace(coming(rank), finished=rank != 1))
    assert job.at(Stage.FREEZING)


# --- what the freeze finds ---


def test_a_mute_rank_counts_more_than_what_the_others_had_begun() -> None:
    """Its state is unknown; the cause names it."""
    job = frozen()
    job.say(report(0, FREEZES_OF_A_TERM + 1, COMPUTE, 7, final=True))
    job.all_report(7, ranks=(1, 2))
    assert job.at(Stage.FREEZING)
    job.wait(10.1)
    assert job.state.fault is not None
    assert [(cause.kind, cause.ranks) for cause in job.state.fault.causes] == [(CauseKind.SILENT, (3,))]


def test_a_rank_that_still_rolls_forward_for_the_lost_controller_is_waited_for_while_it_progresses() -> None:
    job = frozen()
    number = FREEZES_OF_A_TERM + 1
    job.all_report(7, READY, ranks=(0, 2, 3))
    for _ in range(3):
        job.wait(8.0)
        job.say(Progress(1, number))
    assert job.at(Stage.FREEZING)
    job.say(report(1, number, DONE, 7, records=[7], final=True))
    assert job.logged("decided")[0]["step"] == 7


def test_a_fault_that_comes_during_the_takeovers_freeze_is_its_cause() -> None:
    job = frozen()
    job.say(fault(0, CauseKind.EXCEPTION))
    job.all_report(7)
    assert job.at(Stage.WRITING) and job.state.fault is not None
    assert [cause.kind for cause in job.state.fault.causes] == [CauseKind.EXCEPTION]


def test_ranks_that_have_all_finished_are_let_go_from_the_takeovers_freeze() -> None:
    job = frozen()
    job.say(*(Finished(rank) for rank in range(4)))
    assert job.at(Stage.OVER) and job.logged("finished") and not job.logged("decided")


# --- afterwards ---


def test_a_takeover_that_was_a_false_alarm_leads_the_job_like_the_first_controller() -> None:
    """Its next freeze has the next number, and a rank that comes again is thawed again."""
    job = frozen()
    job.all_report(7)
    assert job.at(Stage.RUNNING)
    job.say(*(Heartbeat(rank, COMPUTE, 8) for rank in range(4)))
    job.say(coming(2))
    assert job.sent(Thaw)[2].freeze_id == FREEZES_OF_A_TERM + 1
    job.say(killed(3))
    assert {freeze.freeze_id for freeze in job.sent(Freeze).values()} == {FREEZES_OF_A_TERM + 2}


def test_a_job_that_had_not_assembled_is_released_by_the_standby_with_the_reason() -> None:
    job = standby()
    job.say(coming(0, groups=0))
    job.wait(LEASE_S + 0.1, senders=(0,))
    assert "before the job had assembled" in job.logged("exit_sent")[0]["reason"]
    job.say(coming(1, groups=0))
    assert sorted(job.sent(Exit)) == [1] and not job.sent(Welcome)


def test_a_second_standby_numbers_its_freezes_above_the_firsts() -> None:
    job = ControllerBench(assembled=False, standby=2, address="c2")
    for rank in range(4):
        job.say(coming(rank))
    assert {freeze.freeze_id for freeze in job.sent(Freeze).values()} == {2 * FREEZES_OF_A_TERM + 1}


def cut_off() -> ControllerBench:
    """Rank 0 came to a standby, which then received nothing for almost two leases; rank 1 comes right after."""
    job = ControllerBench(assembled=False, standby=1, address="c1", lease_s=3.0)
    job.say(replace(registration(0), job_groups=2))
    job.wait(5.9, senders=())
    assert job.at(Stage.GATHERING)
    job.say(replace(registration(1), job_groups=2))
    return job


def test_a_standby_that_was_cut_off_while_it_gathered_gives_the_others_a_lease_from_its_return() -> None:
    """Ranks 2 and 3 are on their way when the time would be over."""
    job = cut_off()
    job.wait(2.9, senders=(0, 1))
    assert job.at(Stage.GATHERING)
    job.say(registration(2), registration(3))
    assert job.logged("took_over")[0]["absent"] == ()


def test_it_gives_them_no_more_than_that() -> None:
    job = cut_off()
    job.wait(3.0, senders=(0, 1))
    assert job.logged("took_over")[0]["absent"] == (2, 3)


def test_ranks_that_send_all_the_while_do_not_prolong_the_gathering() -> None:
    job = ControllerBench(assembled=False, standby=1, address="c1", lease_s=3.0)
    job.say(registration(0))
    job.wait(3.1, senders=(0,))
    assert job.logged("took_over")[0]["absent"] == (1, 2, 3)
