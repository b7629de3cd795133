"""Freeze rounds: whose report is waited for, and which of two reports counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, record, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import next_deadline
from ttp.errors import ProtocolError
from ttp.proto.messages import (
    CauseKind,
    CommitRecord,
    Freeze,
    Heartbeat,
    Phase,
    Progress,
    Published,
    RolledForward,
    RollForward,
    StateReport,
    StepFailed,
)

READY, DONE, COMPUTE, UPDATING = Phase.READY, Phase.DONE, Phase.COMPUTE, Phase.UPDATING
LEASE_S = 3.0


def frozen_by(rank: int) -> ControllerBench:
    """Return a job in which a rank raised, and no rank has reported yet."""
    job = ControllerBench()
    job.say(fault(rank, CauseKind.EXCEPTION))
    return job


def held(job: ControllerBench, rank: int) -> StateReport:
    assert job.state.fault is not None
    found = job.state.fault.reports[rank]
    assert found is not None
    return found


# --- whose report is waited for ---


def test_a_silent_dead_ranks_late_report_is_not_taken_for_an_awaited_one() -> None:
    """Its stream is still open: what it says does not stand for what another rank has not said yet."""
    job = ControllerBench(freeze_timeout_s=30.0)
    job.wait(LEASE_S + 0.1, senders=(0, 1, 2))
    assert job.logged("death_seen")[0]["rank"] == 3
    job.say(report(0, 1, COMPUTE, 7), report(1, 1, COMPUTE, 7))
    job.say(report(3, 1, COMPUTE, 7))
    assert job.at(Stage.FREEZING), "rank 2 has not reported"
    job.say(report(2, 1, COMPUTE, 7))
    assert job.at(Stage.WRITING)


def test_a_report_said_twice_counts_once() -> None:
    job = frozen_by(1)
    job.say(*[report(0, 1, COMPUTE, 7)] * 4)
    assert job.at(Stage.FREEZING)
    job.all_report(7, ranks=(1, 2, 3))
    assert job.at(Stage.WRITING)


def found_stuck() -> ControllerBench:
    """Rank 2 is dead, and rank 0 has not answered its roll-forward in time: all are asked again."""
    job = ControllerBench(progress_timeout_s=5.0, freeze_timeout_s=60.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    assert sorted(job.sent(RollForward)) == [0]
    job.wait(5.1)
    return job


def test_a_rank_found_stuck_is_not_waited_for_in_the_next_round() -> None:
    """Rank 0 never answers its roll-forward, and its partner is dead: asked again, the others decide without it."""
    job = found_stuck()
    assert job.at(Stage.FREEZING) and job.state.freeze_id == 2
    job.say(report(0, 2, READY, 7))
    assert job.at(Stage.FREEZING)
    job.say(report(1, 2, DONE, 7), report(3, 2, DONE, 7))
    assert "stuck in an order" in job.logged("refused")[0]["reason"]


def test_a_stuck_rank_is_not_named_silent() -> None:
    """It was not asked in this round."""
    job = found_stuck()
    job.say(report(1, 2, DONE, 7), report(3, 2, DONE, 7))
    assert [line["silent"] for line in job.logged("frozen")] == [(), ()]


def test_a_stuck_ranks_report_is_not_taken_for_an_awaited_one() -> None:
    job = found_stuck()
    job.say(report(1, 2, DONE, 7), report(0, 2, READY, 7))
    assert job.at(Stage.FREEZING), "rank 3 has not reported"


def test_a_new_round_forgets_the_plan_and_keeps_the_records() -> None:
    job = ControllerBench()
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.say(StepFailed(0, 1, "roll_forward", "", "raised"))
    assert job.at(Stage.FREEZING) and job.state.dump is None
    assert job.state.fault is not None and job.state.fault.records == (record(7),)


# --- which of two reports counts ---


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (report(0, 1, UPDATING, 7, closed=False), report(0, 1, DONE, 7), "second"),
        (report(0, 1, DONE, 7), report(0, 1, UPDATING, 7, closed=False), "first"),
        (report(0, 1, DONE, 7), report(0, 1, READY, 7), "first"),
        (report(0, 1, READY, 7), report(0, 1, DONE, 7), "second"),
        (report(0, 1, READY, 7), report(0, 1, UPDATING, 7, torn=True), "second"),
        (report(0, 1, UPDATING, 7, torn=True), report(0, 1, READY, 7), "first"),
        (report(0, 1, UPDATING, 7, torn=True), report(0, 1, DONE, 7), "first"),
        (report(0, 1, UPDATING, 7, closed=False), report(0, 1, UPDATING, 7, closed=False, torn=True), "second"),
        (report(0, 1, DONE, 7), report(0, 1, UPDATING, 7, torn=True), "second"),
        (report(0, 1, READY, 7), report(0, 1, UPDATING, 7, closed=False), "first"),
        (report(0, 1, READY, 7), report(0, 1, READY, 7, backup_step=5), "second"),
        (report(0, 1, UPDATING, 7, closed=False), report(0, 1, UPDATING, 7, closed=False, backup_step=5), "second"),
    ],
)
def test_behind_a_closed_gate_a_state_only_moves_forward_or_tears(
    first: StateReport, second: StateReport, counts: str
) -> None:
    job = frozen_by(1)
    job.say(first, second)
    assert held(job, 0) == (first if counts == "first" else second)


def test_the_records_of_a_report_that_does_not_count_still_count() -> None:
    job = frozen_by(1)
    job.say(report(0, 1, DONE, 7), report(0, 1, READY, 7, records=[6]))
    assert job.state.fault is not None and job.state.fault.records == (record(6),)


def test_records_that_agree_are_not_logged() -> None:
    job = frozen_by(1)
    job.say(report(0, 1, DONE, 7, records=[7]), report(1, 1, DONE, 7, records=[7]))
    assert not job.logged("records_differ")


def test_records_of_a_skipped_step_agree_although_a_norm_that_is_nan_equals_nothing() -> None:
    job = frozen_by(1)
    skipped = CommitRecord(7, float("nan"), 1.0, True, 1.0, (0.1,), (2.0,))
    alike = CommitRecord(7, float("nan") * 2, 1.0, True, 1.0, (0.1,), (2.0,))
    job.say(
        *(
            StateReport(rank, 1, True, DONE, 7, 7, False, -1, (reported,))
            for rank, reported in enumerate((skipped, alike))
        )
    )
    assert not job.logged("records_differ")


def test_a_false_alarm_leaves_nothing_behind() -> None:
    """The job's next fault has all its time."""
    job = ControllerBench(total_timeout_s=20.0)
    job.close(1)
    job.say(registration(1))
    assert job.at(Stage.RUNNING) and job.state.fault is None
    job.wait(30.0)
    assert job.at(Stage.RUNNING)


def test_the_driver_comes_when_a_rounds_time_is_over() -> None:
    """A death needs no other culprit, who would be looked for during a lease."""
    job = ControllerBench(freeze_timeout_s=0.5, lease_s=3.0)
    job.say(killed(3))
    assert next_deadline(job.state) == 0.5


def test_the_driver_comes_when_no_culprit_was_found_within_a_lease() -> None:
    """All have reported: nothing else is waited for."""
    job = ControllerBench(freeze_timeout_s=10.0, lease_s=3.0)
    job.say(fault(1, CauseKind.PEER_ERROR))
    job.all_report(7)
    job.wait(2.6)
    assert job.at(Stage.FREEZING) and next_deadline(job.state) == 3.0


def all_but_the_silent_holder_send() -> ControllerBench:
    """Return a job whose round is over: rank 3 is dead, and rank 1, which holds the same shard, has reported and lost its stream."""
    job = ControllerBench(freeze_timeout_s=2.0)
    job.say(killed(3), report(1, 1, DONE, 7))
    job.close(1)
    job.say(report(0, 1, DONE, 7), report(2, 1, DONE, 7))
    job.wait(2.1, senders=(0, 2))
    return job


def test_a_silent_rank_does_not_justify_a_refusal_before_it_is_dead() -> None:
    """It may be the controller that receives nothing."""
    job = all_but_the_silent_holder_send()
    assert job.at(Stage.FREEZING) and next_deadline(job.state) == LEASE_S
    job.wait(LEASE_S - 2.0, senders=(0, 2))
    assert "rank 1, dead" in job.logged("refused")[0]["reason"]


def test_a_rank_that_sends_again_after_the_rounds_time_is_counted() -> None:
    job = all_but_the_silent_holder_send()
    job.say(registration(1), Heartbeat(1, DONE, 7))
    assert job.logged("decided")[0]["able"] == (0, 1, 2)


def test_a_rank_that_went_silent_in_an_update_which_does_not_end_is_known_after_its_lease() -> None:
    """The wait for the update is over then: its deadline has passed, and the driver must not come again and again until then."""
    job = ControllerBench(freeze_timeout_s=0.5, progress_timeout_s=1.0)
    job.say(killed(3))
    job.say(report(0, 1, READY, 7), report(1, 1, UPDATING, 7, closed=False, records=[7]), report(2, 1, READY, 7))
    job.wait(0.5, senders=(0, 1, 2))
    job.close(1)
    job.wait(0.6, senders=(0, 2))
    assert job.logged("awaiting_updates") and job.at(Stage.FREEZING)
    job.wait(LEASE_S, senders=(0, 2))
    assert "rank 1, dead" in job.logged("refused")[0]["reason"]


def test_the_end_of_an_update_that_raised_is_not_waited_for() -> None:
    """Only that of rank 1 can make a state whole."""
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, UPDATING, 7, closed=False, torn=True), report(2, 1, READY, 7))
    job.say(report(1, 1, UPDATING, 7, closed=False, records=[7]))
    assert job.logged("awaiting_updates")[0]["ranks"] == (1,)


def test_the_line_of_what_was_found_names_who_was_silent_and_who_did_not_close() -> None:
    """The dead are neither."""
    job = ControllerBench(((0, 1, 2, 3, 4),), freeze_timeout_s=2.0)
    job.say(killed(3))
    job.say(report(0, 1, READY, 7), report(1, 1, UPDATING, 7, closed=False), report(2, 1, READY, 7, torn=True))
    job.wait(2.1)
    (line,) = job.logged("frozen")
    assert (line["silent"], line["not_closed"], line["torn"]) == ((4,), (1,), (2,))


def test_only_the_newest_records_are_kept() -> None:
    """A rank keeps two, so four are plenty; the oldest go."""
    job = frozen_by(1)
    job.say(report(0, 1, DONE, 9, records=[3, 4, 5]), report(1, 1, DONE, 9, records=[6, 7, 2]))
    assert job.state.fault is not None
    assert [known.step for known in job.state.fault.records] == [4, 5, 6, 7]


def test_a_report_of_a_suspect_rank_does_not_count_when_time_is_over() -> None:
    """Its stream broke after its report: what it holds may be gone with it."""
    job = ControllerBench(freeze_timeout_s=1.0)
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(3, 1, COMPUTE, 7))
    job.close(3)
    job.all_report(7, ranks=(0, 1, 2))
    assert job.at(Stage.FREEZING), "rank 3 may come back"
    job.wait(1.1, senders=(0, 1, 2))
    assert job.logged("decided")[0]["able"] == (0, 1, 2)


def test_a_suspect_that_sends_again_ends_the_wait_for_its_partners_update() -> None:
    """Rank 1 was waited for only because rank 3, which holds the same shard, was silent."""
    job = ControllerBench(freeze_timeout_s=2.5, progress_timeout_s=30.0)
    job.say(fault(0, CauseKind.EXCEPTION))
    updating = report(1, 1, UPDATING, 7, closed=False, records=[7])
    job.say(report(0, 1, READY, 7), updating, report(3, 1, READY, 7))
    job.wait(2.6, senders=(0, 1, 2))
    assert job.logged("awaiting_updates") == [{"ranks": (1,), "freeze_id": 1}] and not job.logged("decided")
    job.say(Heartbeat(3, READY, 7))
    assert job.logged("decided")[0]["able"] == (0, 3)


# --- how long a rank that progresses is waited for ---


def test_a_rank_that_progresses_is_waited_for_half_the_total_at_most() -> None:
    """The others hold every shard, and need the other half to write them."""
    job = ControllerBench(freeze_timeout_s=10.0, total_timeout_s=120.0)
    job.say(killed(2))
    job.all_report(7, READY, ranks=(0, 3))
    for _ in range(7):
        job.wait(8.0)
        job.say(Progress(1, 1))
    assert job.at(Stage.FREEZING) and job.now == 56.0
    job.wait(4.1)
    assert job.logged("decided")[0]["able"] == (0, 3)


def test_a_stuck_ranks_work_does_not_prolong_the_round() -> None:
    """It was found stuck in an order: it is not waited for, so its progress changes nothing."""
    job = ControllerBench(progress_timeout_s=5.0, freeze_timeout_s=20.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.wait(5.1)
    fault_before = job.state.fault
    assert fault_before is not None and fault_before.stuck == {0}
    job.wait(10.0)
    job.say(Progress(0, 2))
    assert job.state.fault is not None and job.state.fault.round_deadline == fault_before.round_deadline


def test_a_message_of_an_agent_gives_silent_ranks_no_new_lease() -> None:
    """Both ranks are silent and one is seen to die: the other one is no less silent for it."""
    job = ControllerBench(holders=((0, 1),))
    job.wait(2.5, senders=())
    assert job.state.members.suspects == 2
    job.say(killed(1))
    assert job.state.members.leases_renewed_at < job.now


def test_the_last_rank_is_not_taken_for_dead_before_a_controller_that_is_cut_off_would_be() -> None:
    """A lease of silence of the last rank may be the controller's own; the orphan timeout decides."""
    job = ControllerBench(holders=((0, 1),), orphan_timeout_s=15.0)
    job.say(killed(1))
    job.wait(14.0, senders=())
    assert len(job.logged("death_seen")) == 1 and job.at(Stage.FREEZING)
    job.say(report(0, 1, READY, 7))
    assert job.logged("decided")[0]["able"] == (0,)


def test_the_last_rank_is_dead_when_the_orphan_timeout_is_over() -> None:
    job = ControllerBench(holders=((0, 1),), orphan_timeout_s=15.0)
    job.say(killed(1))
    job.wait(15.0 + 3.1, senders=())
    assert job.logged("death_seen")[-1]["rank"] == 0 and job.logged("refused")[0]["reason"] == "all ranks are dead"


# --- answers that say something else than was ordered ---


def test_a_rank_that_rolled_to_another_step_has_not_rolled_forward() -> None:
    job = ControllerBench()
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.say(RolledForward(0, 1, 6))
    assert job.logged("roll_forward_failed")[0]["rank"] == 0
    assert job.at(Stage.FREEZING), "no other rank holds its shard"


def test_another_steps_publish_is_not_this_ones() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    job.all_write(job.orders())
    with pytest.raises(ProtocolError, match="expected step 6"):
        job.say(Published(0, 1, 5, "/a/iter_0000005"))
    assert job.at(Stage.PUBLISHING) and not job.logged("published")
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.at(Stage.EXITING)


# --- before a round, and after the last ---


def test_a_job_does_not_assemble_while_a_rank_that_registered_is_away() -> None:
    job = ControllerBench(assembled=False)
    for rank in range(3):
        job.say(registration(rank))
    job.close(0)
    job.say(registration(3))
    assert job.at(Stage.ASSEMBLING)
    job.say(registration(0))
    assert job.at(Stage.RUNNING)


def test_a_rank_that_registered_twice_is_one_that_came() -> None:
    """The line that names the missing counts ranks, not registrations."""
    job = ControllerBench(assembled=False, register_timeout_s=10.0)
    job.say(registration(0), registration(1))
    job.close(1)
    job.say(registration(1), registration(1))
    job.wait(10.1, senders=())
    assert job.logged("exit_sent")[0]["reason"].startswith("only 2 of 4 ranks registered in time; missing: (2, 3)")


def test_ranks_that_waited_long_for_the_others_have_a_whole_lease_from_then_on() -> None:
    """They send no heartbeats before they are welcomed."""
    job = ControllerBench(assembled=False)
    for rank in range(3):
        job.say(registration(rank))
    job.wait(20.0, senders=())
    job.say(registration(3))
    assert job.at(Stage.RUNNING)
    job.wait(1.9, senders=())
    assert not job.logged("suspect") and not job.logged("death_seen")


def test_a_job_without_any_shards_has_its_dump_refused() -> None:
    """A checkpoint of nothing would be taken for one."""
    job = ControllerBench(assembled=False)
    for rank in range(4):
        job.say(replace(registration(rank), groups=()))
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    assert job.logged("refused")[0]["reason"] == "no rank registered any shards"


def test_an_update_is_waited_for_although_no_other_rank_is_behind_it() -> None:
    """When it ends, all have its step; now none is covered."""
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, DONE, 7), report(2, 1, DONE, 7), report(1, 1, UPDATING, 7, records=[7], closed=False))
    assert job.logged("awaiting_updates") and not job.logged("refused")
    job.say(report(1, 1, DONE, 7))
    assert job.logged("decided")[0]["able"] == (0, 1, 2)


def test_a_rank_without_directories_has_its_dump_refused() -> None:
    job = ControllerBench(assembled=False)
    for rank in range(4):
        job.say(registration(rank, roots=()))
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    assert "no directory" in job.logged("refused")[0]["reason"]


def test_a_holder_that_died_in_the_last_directory_is_missed_in_the_next() -> None:
    """All was written in /a; its last holder died since, and the publish failed: in /b that shard has no writer."""
    job = ControllerBench()
    job.say(killed(2))
    job.all_report(7, ranks=(0, 1, 3))
    job.all_write(job.orders())
    rank, order = job.publish_order()
    assert rank == 0
    job.say(killed(0))
    for _ in (1, 3):
        rank, order = job.publish_order()
        job.say(StepFailed(rank, order.freeze_id, "publish", order.tmp_name, "no space left on device"))
    assert job.at(Stage.FREEZING) and job.logged("replanned")
    job.say(report(1, 2, COMPUTE, 7), report(3, 2, COMPUTE, 7))
    assert job.logged("refused")[0]["missing"] == ("shard 0",)


def test_a_failure_said_twice_counts_once() -> None:
    """After its parts went to another, a writer has nothing that could fail."""
    job = ControllerBench()
    job.say(killed(2))
    job.all_report(7, ranks=(0, 1, 3))
    order = job.orders()[3]
    for _ in range(2):
        job.say(StepFailed(3, order.freeze_id, "write", order.tmp_name, "no space left on device"))
    assert len(job.logged("write_failed")) == 1 and len(job.logged("write_moved")) == 1
    assert job.state.dump is not None and len(job.state.dump.errors) == 1


def test_writers_have_their_whole_time_from_the_order_on() -> None:
    """What rolling forward took is not taken from them."""
    job = ControllerBench(progress_timeout_s=5.0)
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, DONE, 7))
    job.wait(4.0)
    job.say(RolledForward(0, 1, 7))
    assert job.state.dump is not None and job.state.dump.progress_by >= job.now + 5.0
    job.wait(4.0)
    assert not job.logged("stuck")


def test_a_takeover_freezes_for_the_death_that_was_reported_to_it() -> None:
    """The ranks' lines and their stacks name the culprit, and not only that a controller was lost."""
    job = ControllerBench(assembled=False, standby=1, address="c1")
    job.say(killed(3))
    for rank in range(3):
        job.say(replace(registration(rank), job_groups=2))
    assert job.at(Stage.FREEZING)
    freezes = job.sent(Freeze)
    assert {freeze.cause.kind for freeze in freezes.values()} == {CauseKind.EXITED}
    assert {freeze.cause.ranks for freeze in freezes.values()} == {(3,)}


def test_nothing_happens_in_a_calm_job() -> None:
    """Heartbeats and ticks alone never close a gate."""
    job = ControllerBench()
    for step in range(1, 40):
        for rank in range(4):
            job.say(Heartbeat(rank, COMPUTE, step), after=0.1)
        job.take(Tick())
    assert job.at(Stage.RUNNING) and not job.logged("freeze_sent")
