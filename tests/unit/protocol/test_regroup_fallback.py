"""While ranks regroup something fails, or a message is lost, or the controller: what is done then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, record, report
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_regroup import (
    IN_PLACE_S,
    able,
    all_regroup,
    job,
    lose_rank_3,
    regrouping,
    replacement,
    torn_rank_3,
)
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.membership import mark_dead, was_only_silent
from ttp.controller.core.facts.state import Stage
from ttp.errors import ProtocolError
from ttp.proto.incident import read_incident
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    Published,
    Regroup,
    Regrouped,
    ReplaceFailed,
    RolledForward,
    RollForward,
    StepFailed,
    Thaw,
    Upward,
    Welcome,
    WriteOrder,
)

READY, DONE, COMPUTE = Phase.READY, Phase.DONE, Phase.COMPUTE
CAUSE = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")


# --- what fails, and what is done then ---


def raised(rank: int) -> StepFailed:
    return StepFailed(rank, 1, "regroup", "", "connection refused")


def asked_again(bench: ControllerBench, *ranks: int, step: int = 7) -> None:
    """What has failed leads to another round, which these ranks answer."""
    assert bench.at(Stage.FREEZING) and bench.state.freeze_id == 2 and not bench.sent(WriteOrder)
    bench.all_report(step, ranks=ranks)
    for rank in {2, 3} - set(ranks):
        if (
            bench.state.members.table[rank].dead is None
        ):  # a process that has taken a lost one's place, and holds nothing
            bench.say(replace(report(rank, 2, COMPUTE, 1), torn=True))
    assert bench.at(Stage.WRITING)


FAILURES: dict[str, tuple[tuple[Upward, ...], str]] = {
    "a rank that stays dies": ((killed(2),), "rank 2 died"),
    "a replacement dies": ((replacement(), killed(3, pid=203)), "rank 3 died"),
    "a rank dies that has regrouped": ((Regrouped(2, 1), killed(2)), "rank 2 died"),
    "a rank fails": ((raised(0),), "rank 0: connection refused"),
    "a rank fails that has regrouped": ((Regrouped(0, 1), raised(0)), "rank 0: connection refused"),
    "no process is started": ((ReplaceFailed("host3", 3, 1, "no memory"),), "no process for rank 3: no memory"),
    "a replacement ends": (
        (replacement(), ReplaceFailed("host3", 3, 1, "it has ended")), "no process for rank 3: it has ended",
    ),
    "a fault of a rank": ((fault(2, CauseKind.EXCEPTION, "out of memory"),), "rank 2: out of memory"),
    "a notice": ((fault(2, CauseKind.PREEMPTED, "SIGTERM"),), "rank 2: SIGTERM"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_while_all_regroup_has_the_step_written_by_those_that_hold_it(what: str) -> None:
    messages, reason = FAILURES[what]
    bench = regrouping()
    bench.say(*messages)
    assert bench.logged("regroup_failed") == [{"freeze_id": 1, "reason": reason}]
    left = {0, 1} if "rank 2 died" in reason else {0, 1, 2}
    asked_again(bench, *left)
    orders = bench.orders()
    assert set(orders) == left and {order.step for order in orders.values()} == {6}
    assert not bench.sent(Thaw)
    bench.all_write(orders)
    rank, order = bench.publish_order()
    bench.say(Published(rank, 2, 6, f"{order.directory}/iter_0000006"))
    (incident,) = map(read_incident, bench.logged("incident"))
    assert incident.saved is not None and incident.saved.step == 6 and not incident.in_place
    assert set(bench.sent(Exit)) >= left


def test_a_rank_that_does_not_regroup_in_time() -> None:
    bench = regrouping()
    bench.say(replacement(), Regrouped(0, 1), Regrouped(3, 1))
    bench.wait(IN_PLACE_S - 0.1)
    assert bench.at(Stage.REGROUPING)
    bench.wait(0.2)
    assert bench.logged("regroup_failed")[0]["reason"] == "ranks 1, 2 had not regrouped after 60 s"
    bench.all_report(7)
    assert bench.at(Stage.WRITING) and bench.state.dump is not None
    assert bench.state.dump.progress_by > bench.now + 1.0, "the writers have their own time"


def test_no_gate_opens_while_a_rank_that_has_answered_is_suspect() -> None:
    """Its stream has broken: when it comes back all gates open, and when it does not the step is written."""
    for comes in (True, False):
        bench = regrouping(lease_s=200.0)
        bench.say(replacement(), Regrouped(0, 1))
        bench.close(0)
        bench.say(*(Regrouped(rank, 1) for rank in (1, 2, 3)))
        assert bench.at(Stage.REGROUPING) and not bench.sent(Thaw)
        if comes:
            bench.say(able(0))
            assert bench.at(Stage.RUNNING)
        else:
            bench.wait(IN_PLACE_S + 0.1, senders=(1, 2, 3))
            assert bench.logged("regroup_failed")[0]["reason"] == "rank 0 had not regrouped after 60 s"
            assert bench.at(Stage.FREEZING)


def test_a_failure_of_a_rank_that_was_not_replaced_means_nothing() -> None:
    bench = regrouping()
    bench.say(ReplaceFailed("host2", 2, 1, "it has ended"))
    assert bench.at(Stage.REGROUPING)


def test_a_rank_whose_training_returns_meanwhile_is_not_waited_for() -> None:
    """It never regroups: the step is written at once, not when the time for regrouping is over."""
    bench = regrouping()
    bench.say(Finished(0))
    assert bench.at(Stage.FREEZING) and bench.logged("regroup_failed")[0]["reason"] == "training has returned on rank 0"
    asked_again(bench, 0, 1, 2)
    assert set(bench.orders()) == {0, 1, 2}, "it holds its shards"


def test_a_return_that_was_lost_is_known_by_the_next_heartbeat() -> None:
    bench = regrouping()
    bench.say(Heartbeat(0, DONE, 6, frozen=1, finished=True))
    assert bench.at(Stage.FREEZING) and bench.logged("regroup_failed")[0]["reason"] == "training has returned on rank 0"


def test_a_rank_that_dies_when_its_training_has_returned_is_replaced_like_any_other() -> None:
    bench = job()
    bench.say(Finished(3))
    lose_rank_3(bench)
    assert bench.at(Stage.REGROUPING)
    all_regroup(bench)
    assert bench.at(Stage.RUNNING) and bench.sent(Thaw)


def test_what_failed_once_is_written_also_when_all_are_asked_again() -> None:
    """A file of one writer ended short, by the word of two publishers: the ranks are asked again, and write again."""
    bench = job(holders=((0, 1, 2, 3),))
    lose_rank_3(bench)
    bench.say(raised(0))
    asked_again(bench, 0, 1, 2)
    bench.all_write(bench.orders())
    for publisher in (0, 1):
        dump = bench.state.dump
        assert dump is not None and dump.order is not None
        bench.say(StepFailed(publisher, 2, "publish", dump.order.tmp_name, "a file is short", torn=(2,)))
    assert bench.at(Stage.FREEZING) and bench.state.freeze_id == 3
    bench.all_report(7, ranks=(0, 1, 2))
    assert bench.at(Stage.WRITING) and len(bench.logged("decided")) == 3
    assert len(bench.logged("regroup_sent")) == 1 and not bench.logged("not_in_place")


def test_a_replacement_that_comes_too_late_holds_nothing() -> None:
    bench = regrouping()
    bench.say(raised(0), replacement())
    assert bench.at(Stage.FREEZING) and bench.state.members.table[3].dead is not None
    assert not bench.sent(Regroup) and not bench.sent(WriteOrder)


def test_a_vacant_process_of_another_freeze_is_not_the_one_that_was_asked_for() -> None:
    bench = regrouping()
    bench.say(replacement(freeze_id=7))
    assert bench.at(Stage.REGROUPING) and not bench.logged("replacement_came")
    assert bench.state.members.table[3].dead is not None


def test_what_answers_an_older_freeze_means_nothing() -> None:
    bench = regrouping()
    all_regroup(bench)
    bench.say(killed(3, pid=203))
    bench.all_report(9, ranks=(0, 1, 2))
    assert bench.state.freeze_id == 2 and bench.at(Stage.REGROUPING)
    bench.say(Regrouped(0, 1), ReplaceFailed("host3", 3, 1, "late"), StepFailed(1, 1, "regroup", "", "late"))
    assert bench.at(Stage.REGROUPING)
    bench.say(replacement(freeze_id=2, pid=303), *(Regrouped(rank, 2) for rank in (1, 2, 3)))
    assert bench.at(Stage.REGROUPING), "rank 0 has not answered this one"


@pytest.mark.parametrize("answer", [Regrouped(0, 1), StepFailed(0, 1, "regroup", "", "no")])
def test_an_answer_to_an_order_that_was_not_given_is_refused(answer: Upward) -> None:
    bench = job(in_place_s=0.0)
    lose_rank_3(bench)
    before = bench.state
    with pytest.raises(ProtocolError, match="expected no answer: no rank was ordered to regroup"):
        bench.say(answer)
    assert bench.state is before


def test_answers_that_cross_the_fallback_are_late() -> None:
    bench = regrouping()
    bench.say(raised(0), Regrouped(1, 1), raised(2), ReplaceFailed("host3", 3, 1, "no memory"))
    assert bench.at(Stage.FREEZING) and len(bench.logged("regroup_failed")) == 1
    bench = regrouping()
    all_regroup(bench)
    bench.say(Regrouped(1, 1), ReplaceFailed("host3", 3, 1, "late"))
    assert bench.at(Stage.RUNNING)


def test_a_failed_collective_of_the_groups_that_are_given_up_is_expected() -> None:
    bench = regrouping()
    bench.say(fault(0, CauseKind.PEER_ERROR), fault(1, CauseKind.PEER_ERROR))
    assert bench.at(Stage.REGROUPING)
    repeated = FaultReport(0, bench.state.fault.causes[0], "") if bench.state.fault is not None else None
    assert repeated is not None
    bench.say(repeated)
    assert bench.at(Stage.REGROUPING), "what was known before changes nothing"


@pytest.mark.parametrize("kind", [CauseKind.PEER_ERROR, CauseKind.EXCEPTION])
def test_what_a_rank_reports_while_all_regroup_is_one_of_the_faults_causes(kind: CauseKind) -> None:
    """It is named with the first one, and noted once."""
    bench = regrouping()
    report = fault(0, kind)
    bench.say(report, report)
    assert bench.state.fault is not None and bench.state.fault.causes[-1] == report.cause
    assert len(bench.logged("fault_reported")) == 1


@pytest.mark.parametrize("came", [False, True], ids=["before it came", "after it came"])
def test_a_process_that_was_replaced_writes_nothing_although_it_held_the_step(came: bool) -> None:
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[6, 7]), report(2, 1, READY, 7))
    bench.say(killed(2), RolledForward(0, 1, 7))
    bench.say(*((replacement(2), replacement(3)) if came else ()), raised(0))
    asked_again(bench, 0, 1, step=8)
    assert sorted(bench.orders()) == [0, 1]
    assert bench.state.dump is not None and bench.state.dump.progress_by <= bench.now + 30.0 + 1.0


def test_what_is_written_once_is_not_recovered_in_a_later_round() -> None:
    """No agent was there at first: the ranks that were ordered to write cannot enter their training again."""
    bench = job(holders=((0, 1, 2, 3),), agents=False)
    lose_rank_3(bench)
    orders = bench.orders()
    bench.say(AgentHello("host3", (3,), (103,)))
    bench.all_write(orders)
    for publisher in (0, 1):
        dump = bench.state.dump
        assert dump is not None and dump.order is not None
        bench.say(StepFailed(publisher, 1, "publish", dump.order.tmp_name, "a file is short", torn=(2,)))
    bench.all_report(7, ranks=(0, 1, 2))
    assert bench.at(Stage.WRITING) and not bench.logged("regroup_sent")


def test_the_exception_and_the_end_of_its_process_are_one_ranks_and_its_replacements_end_is_named_with_it() -> None:
    bench = job()
    torn_rank_3(bench)
    bench.say(replacement(), killed(3, pid=203))
    asked_again(bench, 0, 1, 2)
    bench.all_write(bench.orders())
    rank, order = bench.publish_order()
    bench.say(Published(rank, 2, 6, f"{order.directory}/iter_0000006"))
    (incident,) = map(read_incident, bench.logged("incident"))
    assert [(one.rank, one.pid, one.cause) for one in incident.culprits] == [(3, 103, "boom; then signal SIGKILL")]


def test_all_ranks_die_while_they_regroup() -> None:
    bench = regrouping()
    for rank in (0, 1, 2):
        bench.state = replace(bench.state, members=mark_dead(bench.state.members, rank, CAUSE, True, bench.now))
    bench.take(Tick())
    assert bench.logged("refused")[0]["reason"] == "all ranks are dead" and not bench.sent(WriteOrder)
    assert bench.at(Stage.EXITING) or bench.at(Stage.OVER)


def test_ranks_that_regroup_and_never_come_back_end_the_job() -> None:
    bench = regrouping(orphan_timeout_s=15.0, lease_s=40.0)
    bench.close(0, 1, 2)
    bench.wait(16.0, senders=())
    assert bench.at(Stage.OVER)


def test_a_process_that_was_to_be_replaced_and_still_runs_exits_with_a_controller_that_has_lost_all_others() -> None:
    """Random job 3000386671: its launcher was lost before that could end it. It does not wait for another controller."""
    bench = job(orphan_timeout_s=15.0, lease_s=40.0)
    torn_rank_3(bench)
    bench.close(0, 1, 2)
    bench.wait(16.0, senders=())
    assert bench.at(Stage.OVER) and bench.sent(Exit) == {3: Exit(75, "no rank was attached for 15 s")}


def test_a_rank_that_was_only_silent_may_belong_to_another_controller_and_is_not_ended() -> None:
    bench = job(orphan_timeout_s=15.0, lease_s=5.0)
    bench.wait(7.0, senders=(0, 1, 2))
    assert was_only_silent(bench.state.members.table[3])
    bench.close(0, 1, 2)
    bench.wait(16.0, senders=())
    assert bench.at(Stage.OVER) and not bench.sent(Exit)


# --- orders that were lost ---


def test_a_replacement_that_attaches_again_came_once() -> None:
    bench = regrouping()
    bench.say(replacement())
    bench.close(3)
    bench.say(replacement())
    assert len(bench.logged("replacement_came")) == 1 and bench.sent(Regroup)[3].step == 6


def test_a_process_that_is_replaced_is_not_ordered_to_regroup() -> None:
    bench = job()
    torn_rank_3(bench)
    bench.say(Heartbeat(3, READY, 7, frozen=1))
    assert not bench.sent(Regroup)


def test_a_rank_that_attaches_again_is_ordered_again_unless_it_has_answered() -> None:
    bench = regrouping()
    bench.close(0)
    bench.say(able(0))
    assert bench.sent(Regroup)[0].replaced == (3,) and 0 in bench.sent(Freeze)
    bench.say(Regrouped(1, 1))
    bench.close(1)
    bench.say(able(1))
    assert not bench.sent(Regroup)


def test_an_order_that_was_lost_is_given_again_at_a_heartbeat() -> None:
    bench = regrouping()
    bench.say(Heartbeat(0, COMPUTE, 7, frozen=1))
    assert bench.sent(Regroup)[0].step == 6
    bench.say(Regrouped(0, 1), Heartbeat(0, COMPUTE, 7, frozen=1))
    assert not bench.sent(Regroup)
    bench.say(replacement())
    bench.say(Heartbeat(3, COMPUTE, 0, frozen=1))
    assert bench.sent(Regroup)[3].step == 6


def test_a_thaw_that_was_lost_is_sent_again() -> None:
    bench = regrouping()
    all_regroup(bench)
    bench.say(Heartbeat(2, COMPUTE, 7, frozen=1))
    assert bench.sent(Thaw) == {2: Thaw(1)}


# --- a new controller ---


@pytest.mark.parametrize("half_way", [True, False], ids=["half way", "all regrouped"])
def test_a_new_controller_thaws_only_ranks_that_have_all_regrouped(half_way: bool) -> None:
    """The lost one had ordered it; the ranks do it to its end without a controller."""
    bench = ControllerBench(assembled=False, in_place_s=IN_PLACE_S, standby=1, address="b")
    for rank in range(4):
        vacant: dict[str, Any] = {"vacant": 4, "pid": 203} if rank == 3 and half_way else {}
        bench.say(able(rank, controllers=("a", "b"), job_groups=2, **vacant))
    assert bench.at(Stage.FREEZING)
    freeze_id = bench.state.freeze_id
    for rank in range(4):
        empty: dict[str, Any] = {"state_step": 0, "torn": True} if rank == 3 and half_way else {}
        bench.say(report(rank, freeze_id, COMPUTE, 7, final=half_way, **empty))
    assert bench.at(Stage.WRITING if half_way else Stage.RUNNING), bench.state.stage
    assert bool(bench.sent(Thaw)) == (not half_way)
    if half_way:
        assert sorted(bench.orders()) == [0, 1, 2]


def test_a_new_controller_to_which_only_a_vacant_process_comes_knows_that_the_job_had_assembled() -> None:
    """The lost controller had ordered it, and never came to welcome it; all that held shards have ended with the controller."""
    bench = ControllerBench(assembled=False, in_place_s=IN_PLACE_S, standby=1, address="b")
    bench.say(killed(0), killed(1), killed(2), able(3, vacant=4, pid=203))
    assert bench.at(Stage.FREEZING) and 3 in bench.sent(Welcome)
    bench.say(report(3, bench.state.freeze_id, COMPUTE, 1, state_step=0, torn=True, final=True))
    (refusal,) = bench.logged("refused")
    assert "no live rank can write" in refusal["reason"] and bench.at(Stage.EXITING)


def test_records_of_the_ranks_that_stay_outlive_a_recovery() -> None:
    """Nothing of an earlier fault decides the next one."""
    bench = regrouping()
    all_regroup(bench)
    bench.say(killed(0))
    bench.say(report(1, 2, READY, 7), report(2, 2, DONE, 7, records=[7]), report(3, 2, READY, 7))
    assert sorted(bench.sent(RollForward)) == [1, 3]
    assert {order.record for order in bench.sent(RollForward).values()} == {record(7)}
