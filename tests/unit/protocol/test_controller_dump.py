"""From the freeze to the exit: deciding, rolling forward, writing, publishing, and what goes wrong meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.protocol.bench import MIB, ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.events import Finish, Send
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import (
    AgentHello,
    CauseKind,
    Exit,
    Freeze,
    Heartbeat,
    Part,
    Phase,
    Progress,
    Published,
    PublishOrder,
    RolledForward,
    RollForward,
    StepFailed,
    Thaw,
    WriteOrder,
)

READY, DONE, COMPUTE, UPDATING = Phase.READY, Phase.DONE, Phase.COMPUTE, Phase.UPDATING


def dying(step: int = 7, **settings: Any) -> ControllerBench:
    """Rank 3 is dead; all others are frozen in COMPUTE of `step`, and the write orders are out."""
    job = ControllerBench(**settings)
    job.say(killed(3))
    job.all_report(step, ranks=(0, 1, 2))
    assert job.at(Stage.WRITING)
    return job


def publishing(**settings: Any) -> tuple[ControllerBench, int, PublishOrder]:
    job = dying(**settings)
    job.all_write(job.orders())
    return job, *job.publish_order()


def failed(rank: int, order: WriteOrder | PublishOrder, text: str = "no space left on device") -> StepFailed:
    stage = "write" if isinstance(order, WriteOrder) else "publish"
    return StepFailed(rank, order.freeze_id, stage, order.tmp_name, text)


def test_a_whole_fault_from_death_to_finish() -> None:
    job = ControllerBench()
    job.say(killed(3), after=10.0)
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[6, 7]), report(2, 1, READY, 7), after=0.01)
    assert {r: m.record.step for r, m in job.sent(RollForward).items()} == {0: 7, 2: 7}
    job.say(RolledForward(0, 1, 7), RolledForward(2, 1, 7), after=0.01)
    orders = job.orders()
    assert {o.tmp_name for o in orders.values()} == {"iter_0000007_tmp_3_1_1"}
    assert {r: o.parts for r, o in orders.items()} == {
        0: (Part("g0", 0, 2),),
        1: (Part("g1", 0, 1),),
        2: (Part("g0", 1, 2),),
    }
    job.all_write(orders)
    rank, order = job.publish_order()
    assert rank == 0 and order.record is not None and order.record.step == 7 and len(order.results) == 3
    job.say(Published(0, 1, 7, "/a/iter_0000007"), after=0.08)
    exits = job.sent(Exit)
    assert sorted(exits) == [0, 1, 2] and exits[0].code == 75
    assert job.logged("published") == [{"rank": 0, "step": 7, "path": "/a/iter_0000007", "ms": pytest.approx(130.0)}]
    job.close(0, 1, 2)
    assert only(job.effects, Finish) and job.at(Stage.OVER)


def test_the_journal_has_the_faults_stages_in_order() -> None:
    job, rank, _ = publishing()
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    events = [line.event for line in job.journal if line.event not in ("registered", "written")]
    assert events == [
        "assembled", "death_seen", "freeze_sent", "frozen", "decided", "write_sent", "publish_sent", "published", "exit_sent", "incident",
    ]  # fmt: skip
    (frozen,) = job.logged("frozen")
    assert frozen["ranks"] == (0, 1, 2) and frozen["phases"] == ("COMPUTE",) * 3 and frozen["state_steps"] == (6, 6, 6)


def test_a_rank_that_does_not_close_its_gate_is_left_out_after_the_freeze_timeout() -> None:
    job = ControllerBench(freeze_timeout_s=10.0)
    job.say(fault(1, CauseKind.EXCEPTION))
    job.all_report(7, ranks=(1, 2, 3))
    job.wait(9.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.logged("frozen")[0]["silent"] == (0,)
    assert job.logged("write_sent")[0]["ranks"] == (1, 2, 3)


def test_one_stuck_rank_never_vetoes() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(0, 1, UPDATING, 7, records=[7], closed=False))
    job.say(*(report(rank, 1, READY, 7) for rank in (1, 2, 3)))
    assert sorted(job.sent(RollForward)) == [1, 2, 3] and job.logged("decided")[0]["step"] == 7


def test_a_refusal_says_what_the_job_goes_on_from() -> None:
    """The newest checkpoint that a survivor knows; ranks and agents receive the same message."""
    job = ControllerBench()
    job.say(killed(0), killed(2))
    job.say(*(report(rank, 1, READY, 7, checkpoint=f"/a/iter_000000{rank + 3}") for rank in (1, 3)))
    assert job.logged("refused")[0]["goes_on_from"] == "/a/iter_0000006"
    assert "shard 0 (held by rank 0, dead" in job.sent(Exit)[1].reason
    assert job.sent(Exit)[1].reason.endswith("the job goes on from /a/iter_0000006")


def test_the_agents_receive_the_reason_although_no_rank_remains() -> None:
    job = ControllerBench()
    job.say(AgentHello("host0", (0, 1, 2, 3), (100, 101, 102, 103)))
    job.say(*(killed(rank) for rank in range(4)))
    (exit_,) = [effect for effect in job.effects if isinstance(effect, Send) and isinstance(effect.message, Exit)]
    assert exit_.ranks == () and "all ranks are dead" in exit_.message.reason  # type: ignore[union-attr]


def test_an_agent_that_attaches_while_the_ranks_are_frozen_learns_why() -> None:
    """In the words of the freeze itself, as does a rank that has not received it."""
    job = ControllerBench(freeze_timeout_s=9.0)
    job.close(3)
    frozen = job.sent(Freeze)[0]
    assert frozen.cause.ranks == (3,)
    job.say(AgentHello("host0", (0, 1, 2, 3), (100, 101, 102, 103)))
    assert job.said_to_agents(Freeze) == {"host0": [frozen]}
    job.say(Heartbeat(0, COMPUTE, 7))
    assert job.sent(Freeze) == {0: frozen}


def stuck_alone() -> ControllerBench:
    """Ranks 1 and 3 hold shard 1: rank 3 is dead, and rank 1's update goes on behind its shut gate."""
    job = ControllerBench(progress_timeout_s=30.0, freeze_timeout_s=10.0)
    job.say(killed(3))
    job.say(report(1, 1, UPDATING, 7, records=[7], closed=False), *(report(rank, 1, READY, 7) for rank in (0, 2)))
    return job


def test_an_update_is_waited_for_when_no_other_rank_has_its_shards() -> None:
    """The rank reports again when its gate has closed; then all go on with its step."""
    job = stuck_alone()
    assert job.at(Stage.FREEZING) and job.logged("awaiting_updates") == [{"ranks": (1,), "freeze_id": 1}]
    job.wait(12.0)
    assert job.at(Stage.FREEZING) and not job.logged("frozen")
    job.say(report(1, 1, DONE, 7, records=[7]))
    assert sorted(job.sent(RollForward)) == [0, 2] and job.logged("decided")[0]["step"] == 7


def test_an_update_is_not_waited_for_longer_than_the_progress_timeout() -> None:
    job = stuck_alone()
    job.wait(29.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert "rank 1, stuck in UPDATING of step 7" in job.logged("refused")[0]["reason"]


def test_an_update_that_progresses_is_waited_for_within_the_total() -> None:
    """`Progress` is worth as much for an update as for an order."""
    job = stuck_alone()
    for _ in range(4):
        job.wait(25.0)
        job.say(Progress(1, 1))
    assert job.at(Stage.FREEZING)
    job.wait(21.0)
    assert "the update of rank 1 had not ended" in job.logged("refused")[0]["reason"]


def test_a_rank_that_still_rolls_forward_for_an_earlier_round_is_waited_for_while_it_progresses() -> None:
    job = ControllerBench(freeze_timeout_s=10.0)
    job.say(killed(3))
    job.all_report(7, READY, ranks=(0, 2))
    for _ in range(3):
        job.wait(8.0)
        job.say(Progress(1, 1))
    assert job.at(Stage.FREEZING)
    job.say(report(1, 1, DONE, 7, records=[7]))
    assert job.logged("decided")[0]["step"] == 7


def test_a_rank_whose_update_is_waited_for_and_that_dies_is_waited_for_no_longer() -> None:
    job = stuck_alone()
    job.say(killed(1))
    assert job.logged("refused")[0]["missing"] == ("shard 1",)


def test_an_update_whose_end_would_cover_nothing_is_not_waited_for() -> None:
    job = ControllerBench(holders=((0, 2), (1, 3), (3,)))
    job.say(killed(3))
    job.say(report(1, 1, UPDATING, 7, records=[7], closed=False), *(report(rank, 1, READY, 7) for rank in (0, 2)))
    assert job.logged("refused")


def test_a_refusal_names_the_shards_and_leaves_with_75() -> None:
    job = ControllerBench()
    job.say(killed(1), killed(3))
    job.all_report(7, ranks=(0, 2))
    (refused,) = job.logged("refused")
    assert refused["missing"] == ("shard 1",)
    assert "rank 1, dead (signal SIGKILL)" in refused["reason"]
    assert sorted(job.sent(Exit)) == [0, 2] and job.sent(Exit)[0].code == 75


def test_nothing_committed_is_refused_as_nothing_to_save() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(1, ranks=(0, 1, 2))
    assert "nothing to save" in job.logged("refused")[0]["reason"]


def test_a_second_death_while_frozen_is_not_waited_for() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1))
    job.say(killed(2))
    assert sorted(job.orders()) == [0, 1]


def test_a_rank_that_dies_after_its_report_does_not_count_as_holder() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1))
    job.say(killed(1), report(2, 1, COMPUTE, 7))
    assert job.logged("refused")[0]["missing"] == ("shard 1",)


def test_a_rank_dying_in_the_roll_forward_is_left_out_when_its_partner_lives() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(1, 1, DONE, 7, records=[7]), *(report(rank, 1, READY, 7) for rank in (0, 2, 3)))
    job.say(RolledForward(0, 1, 7), killed(2), RolledForward(3, 1, 7))
    assert sorted(job.orders()) == [0, 1, 3]
    assert job.orders()[0].parts == (Part("g0", 0, 1),)


def test_when_a_roll_forward_fails_the_ranks_are_asked_again_and_an_older_copy_is_used() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.say(
        report(0, 1, READY, 7), report(1, 1, READY, 7, backup_step=5), report(2, 1, DONE, 7, records=[7], backup_step=6)
    )
    job.say(RolledForward(0, 1, 7), StepFailed(1, 1, "roll_forward", "", "not ready"))
    assert sorted(job.sent(Freeze)) == [0, 1, 2] and job.sent(Freeze)[0].freeze_id == 2
    job.say(report(0, 2, DONE, 7, backup_step=6), report(1, 2, READY, 7), report(2, 2, DONE, 7, backup_step=6))
    assert {order.step for order in job.orders().values()} == {6}
    assert job.logged("decided")[-1]["roll_forward"] == ()


def test_a_silent_roll_forward_counts_as_failed_after_the_progress_timeout() -> None:
    job = ControllerBench(progress_timeout_s=30.0)
    job.say(fault(1, CauseKind.EXCEPTION))
    job.say(report(1, 1, DONE, 7, records=[7]), *(report(rank, 1, READY, 7) for rank in (0, 2, 3)))
    job.say(RolledForward(0, 1, 7), RolledForward(3, 1, 7), after=20.0)
    job.wait(29.0)
    assert job.at(Stage.ROLLING), "the deadline moves with every answer"
    job.wait(2.0)
    assert job.logged("stuck")[0]["ranks"] == (2,) and job.at(Stage.WRITING)


def test_a_dead_writers_parts_go_to_its_partner_into_the_same_directory() -> None:
    job = dying()
    orders = job.orders()
    job.say(job.written(2, orders[2]), job.written(1, orders[1]), killed(0))
    (moved,) = job.orders().items()
    assert moved[0] == 2 and moved[1].parts == orders[0].parts and moved[1].tmp_name == orders[0].tmp_name
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert len(order.results) == 3


def test_what_a_dead_writer_had_finished_is_kept() -> None:
    job = dying()
    orders = job.orders()
    job.say(job.written(0, orders[0]), job.written(1, orders[1]), killed(0), job.written(2, orders[2]))
    rank, order = job.publish_order()
    assert rank == 1 and len(order.results) == 3


def test_the_late_answer_of_a_replaced_writer_is_dropped() -> None:
    job = dying()
    orders = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]))
    job.say(failed(0, orders[0]))
    (moved,) = job.orders().items()
    assert moved[0] == 2
    job.say(job.written(0, orders[0]))
    assert job.at(Stage.WRITING), "rank 0's answer counts no more: its parts are rank 2's now"
    job.say(job.written(2, moved[1]))
    assert sorted(result.files[0].rank for result in job.publish_order()[1].results) == [1, 2, 2]


def test_the_last_writer_of_a_shard_dying_means_refusal_with_its_name() -> None:
    job = dying()
    job.say(killed(1))
    job.all_report(7, ranks=(0, 2))
    assert job.logged("refused")[0]["missing"] == ("shard 1",)


def test_a_full_directory_falls_through_to_the_next() -> None:
    job = dying()
    first = job.orders()
    job.say(failed(0, first[0]))
    job.say(failed(1, first[1]))
    second = job.orders()
    assert sorted(second) == [0, 1, 2] and {order.directory for order in second.values()} == {"/b"}
    assert second[0].tmp_name == "iter_0000006_tmp_3_1_2"
    job.all_write(second)
    assert job.publish_order()[1].directory == "/b" and len(job.publish_order()[1].results) == 3


def test_no_directory_left_is_refused_with_the_last_errors() -> None:
    job = dying()
    for _ in range(2):
        job.say(failed(1, job.orders()[1]))
    (refused,) = job.logged("refused")
    assert "none of 2 directories" in refused["reason"] and "no space left" in refused["reason"]


def test_a_write_that_falls_silent_is_done_by_others() -> None:
    job = dying()
    orders = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]))
    job.wait(31.0)
    assert job.logged("stuck")[0]["ranks"] == (0,)
    assert job.logged("write_moved")[0]["ranks"] == (2,)


def test_a_large_share_gets_the_time_that_a_slow_disk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer answers once, when all is durable: its silence counts from when a slow disk would be done."""
    monkeypatch.setattr("ttp.controller.core.dump.writing.SLOW_DISK_BYTES_PER_S", MIB / 60.0)
    job = dying(total_timeout_s=600.0)
    orders = job.orders()
    job.say(job.written(1, orders[1]), job.written(2, orders[2]))
    job.wait(31.0)
    assert not job.logged("stuck")
    job.wait(65.0)
    assert job.logged("stuck")[0]["ranks"] == (0,)


def test_a_dead_publisher_is_replaced() -> None:
    job, rank, order = publishing()
    assert rank == 0
    job.say(killed(0))
    assert job.publish_order() == (1, order)


def test_a_failed_publisher_is_replaced_and_then_the_directory() -> None:
    job, rank, order = publishing()
    for expected in (1, 2):
        job.say(failed(rank, order))
        rank, again = job.publish_order()
        assert (rank, again) == (expected, order)
    job.say(failed(rank, order))
    assert {o.directory for o in job.orders().values()} == {"/b"} and job.at(Stage.WRITING)


def test_a_late_publishers_word_counts() -> None:
    """The first publisher was given up, but it was it that renamed."""
    job, _, _ = publishing()
    job.wait(31.0)
    assert job.logged("stuck")[0]["ranks"] == (0,)
    job.say(Published(0, 1, 6, "/a/iter_0000006"))
    assert job.logged("published")[0]["rank"] == 0 and job.at(Stage.EXITING)


def test_the_total_timeout_bounds_it_all() -> None:
    job = ControllerBench(total_timeout_s=120.0, freeze_timeout_s=500.0)
    job.say(killed(3))
    job.wait(121.0)
    reason = job.logged("refused")[0]["reason"]
    assert reason.endswith("not over after 120 s, in stage freezing"), "no update was waited for"
    assert job.state.stage in (Stage.EXITING, Stage.OVER)


def test_a_fault_during_the_dump_only_adds_a_cause() -> None:
    job = dying()
    orders = job.orders()
    job.say(fault(0, CauseKind.PREEMPTED, "SIGTERM"))
    assert not job.sent(Freeze) and job.at(Stage.WRITING)
    job.all_write(orders)
    assert job.publish_order()[0] == 0, "the rank is still a holder"


def test_a_rank_that_attaches_again_gets_what_it_may_have_missed() -> None:
    job = dying()
    order = job.orders()[1]
    job.close(1)
    assert job.at(Stage.WRITING)
    job.say(registration(1))
    assert job.sent(Freeze)[1].freeze_id == 1 and job.orders() == {1: order}
    assert not job.sent(Thaw), "orders are out: no false alarm any more"


def test_a_silent_rank_that_comes_back_in_the_dump_stays_out_of_it_and_is_asked_when_it_falls_through() -> None:
    job = ControllerBench()
    job.wait(1.0)
    job.close(3)
    job.all_report(7, ranks=(0, 1, 2))
    job.wait(3.1, senders=(0, 1, 2))
    assert job.at(Stage.WRITING)
    orders = job.logged("write_sent")[0]["ranks"]
    assert orders == (0, 1, 2)
    job.say(registration(3))
    assert sorted(job.sent(Freeze)) == [3] and not job.orders()
    job.say(killed(0), killed(1), killed(2))
    assert job.at(Stage.FREEZING)
    job.all_report(7, ranks=(3,))
    assert job.logged("refused") and sorted(job.sent(Exit)) == [3], "it is the only one that remains"


def test_a_live_rank_without_a_stream_receives_the_order_to_exit_when_it_attaches() -> None:
    job, rank, _ = publishing()
    job.close(1)
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    assert sorted(job.sent(Exit)) == [0, 2]
    job.close(0, 2)
    assert job.at(Stage.EXITING), "rank 1 has not received it"
    job.say(registration(1))
    assert sorted(job.sent(Exit)) == [1]
    job.close(1)
    assert job.at(Stage.OVER)


def test_the_controller_does_not_wait_for_ever_for_ranks_to_leave() -> None:
    job, rank, _ = publishing()
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    job.wait(5.1)
    assert job.at(Stage.OVER)


def test_all_dead_ends_the_controller() -> None:
    job = ControllerBench()
    job.say(*(killed(rank) for rank in range(4)))
    assert job.logged("refused")[0]["reason"] == "all ranks are dead" and job.at(Stage.OVER)


def test_a_report_that_comes_late_does_not_undo_a_newer_one() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.say(report(0, 1, DONE, 7, records=[7]), report(0, 1, READY, 7))
    assert job.state.fault is not None
    known = job.state.fault.reports[0]
    assert known is not None and known.state_step == 7


def test_differing_records_of_one_step_are_logged() -> None:
    job = ControllerBench()
    job.say(killed(3))
    odd = report(1, 1, DONE, 7, records=[7])
    other = odd.records[0].__class__(7, 9.9, 1.0, False, 1.0, (0.1,), (2.0,))
    job.say(report(0, 1, DONE, 7, records=[7]))
    job.say(odd.__class__(1, 1, True, DONE, 7, 7, False, -1, (other,)))
    assert job.logged("records_differ")[0]["step"] == 7


def test_a_writer_whose_work_progresses_is_waited_for_beyond_the_progress_timeout() -> None:
    """Gigabytes on a slow disk take longer than that; one that falls silent is given up all the same."""
    job = dying()
    orders = job.orders()
    for _ in range(4):
        job.wait(20.0)
        job.say(*(Progress(rank, job.state.freeze_id) for rank in orders))
    assert job.at(Stage.WRITING) and not job.logged("stuck")
    job.say(*(Progress(rank, job.state.freeze_id - 1) for rank in orders))  # of an earlier round: proves nothing
    job.wait(30.5)
    assert job.logged("stuck")


def test_a_rank_that_owes_nothing_cannot_prolong_the_wait() -> None:
    job = dying()
    orders = job.orders()
    first = min(orders)
    job.say(job.written(first, orders[first]))
    for _ in range(2):
        job.wait(16.0)
        job.say(Progress(first, job.state.freeze_id))
    assert job.logged("stuck")
