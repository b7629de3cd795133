"""Training that continues without a checkpoint: when it is tried, in which order, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import HALVES, ControllerBench, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.dump.regroup import MOST_AT_A_STEP
from ttp.controller.core.facts.events import StreamClosed
from ttp.controller.core.facts.state import Recoveries, Stage
from ttp.proto.incident import read_incident
from ttp.proto.messages import (
    AgentHello,
    CauseKind,
    Exit,
    Finished,
    Freeze,
    Phase,
    Registration,
    Regroup,
    Regrouped,
    Replace,
    RolledForward,
    RollForward,
    Thaw,
    Welcome,
    WorkerExit,
    WriteOrder,
)

READY, DONE, COMPUTE, UPDATING = Phase.READY, Phase.DONE, Phase.COMPUTE, Phase.UPDATING
IN_PLACE_S = 60.0
Holders = tuple[tuple[int, ...], ...]


def able(rank: int, holders: Holders = HALVES, **changed: Any) -> Registration:
    return replace(registration(rank, holders), regroups=True, **changed)


def job(
    holders: Holders = HALVES, agents: bool = True, unable: int = -1, in_place_s: float = IN_PLACE_S, **settings: Any
) -> ControllerBench:
    """A job in training whose ranks can regroup; `unable`: but this one."""
    bench = ControllerBench(holders, assembled=False, in_place_s=in_place_s, **settings)
    for rank in range(bench.world_size):
        if agents:
            bench.say(AgentHello(f"host{rank}", (rank,), (100 + rank,)))
        bench.say(able(rank, holders) if rank != unable else registration(rank, holders))
    assert bench.at(Stage.RUNNING)
    return bench


def regrouping(step: int = 7, **settings: Any) -> ControllerBench:
    """Rank 3 is dead, and ranks 0, 1 and 2 have the orders."""
    bench = job(**settings)
    lose_rank_3(bench, step)
    assert bench.at(Stage.REGROUPING)
    return bench


def lose_rank_3(bench: ControllerBench, step: int = 7, pid: int = 103) -> None:
    bench.say(killed(3, pid=pid))
    bench.all_report(step, ranks=(0, 1, 2))


def torn_rank_3(bench: ControllerBench) -> None:
    """Rank 3 has raised in the middle of its update; all others have the step before."""
    bench.say(fault(3, CauseKind.EXCEPTION))
    bench.all_report(7, ranks=(0, 1, 2))
    bench.say(replace(report(3, 1, UPDATING, 7), torn=True))


def replacement(rank: int = 3, freeze_id: int = 1, pid: int = 203) -> Registration:
    return able(rank, vacant=freeze_id, pid=pid)


def all_regroup(bench: ControllerBench, pid: int = 203) -> None:
    freeze_id = bench.state.freeze_id
    bench.say(replacement(freeze_id=freeze_id, pid=pid))
    bench.say(*(Regrouped(rank, freeze_id) for rank in range(4)))


# --- the whole of it ---


def test_a_recovery_from_the_death_to_the_thaw() -> None:
    bench = job()
    bench.say(killed(3), after=10.0)
    bench.all_report(7, ranks=(0, 1, 2))
    order = Regroup(1, 6, (3,), bench.sent(Regroup)[0].record)
    assert bench.sent(Regroup) == {0: order, 1: order, 2: order}
    assert bench.said_to_agents(Replace) == {"host3": [Replace(3, 0, 1)]}
    assert not bench.sent(WriteOrder) and not bench.sent(Exit)
    bench.say(replacement(), after=1.0)
    assert bench.sent(Regroup) == {3: order} and 3 in bench.sent(Welcome) and 3 in bench.sent(Freeze)
    for rank in (3, 0, 2):
        bench.say(Regrouped(rank, 1), after=0.5)
        assert not bench.sent(Thaw) and bench.at(Stage.REGROUPING)
    bench.say(Regrouped(1, 1))
    assert bench.sent(Thaw) == dict.fromkeys(range(4), Thaw(1)) and bench.at(Stage.RUNNING)
    assert bench.state.recoveries == Recoveries(1, 6, 1) and bench.state.members.alive == 4
    assert bench.logged("regroup_sent") == [{"freeze_id": 1, "step": 6, "replaced": (3,)}]
    assert bench.logged("regrouped") == [{"freeze_id": 1, "step": 6, "replaced": (3,)}]
    (incident,) = map(read_incident, bench.logged("incident"))
    assert (incident.kind, incident.in_place, incident.saved, incident.not_saved) == ("exited", True, None, "")
    assert incident.steps_lost == 0 and [(culprit.rank, culprit.pid) for culprit in incident.culprits] == [(3, 103)]
    took_ms = incident.took_ms or {}
    assert took_ms["regrouped"] == pytest.approx(2500.0) and "written" not in took_ms


def test_ranks_that_are_one_step_behind_roll_forward_first() -> None:
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[6, 7]), report(2, 1, READY, 7))
    assert sorted(bench.sent(RollForward)) == [0, 2] and not bench.sent(Regroup)
    bench.say(RolledForward(0, 1, 7))
    assert not bench.sent(Regroup)
    bench.say(RolledForward(2, 1, 7))
    assert {order.step for order in bench.sent(Regroup).values()} == {7} and sorted(bench.sent(Regroup)) == [0, 1, 2]
    all_regroup(bench)
    (incident,) = map(read_incident, bench.logged("incident"))
    assert incident.in_place and incident.steps_lost == 0


def test_a_rank_that_raised_keeps_its_process() -> None:
    """It holds a shard, and regroups with the others."""
    bench = job()
    bench.say(fault(3, CauseKind.EXCEPTION))
    bench.all_report(7)
    assert sorted(bench.sent(Regroup)) == [0, 1, 2, 3] and bench.sent(Regroup)[0].replaced == ()
    assert not bench.said_to_agents(Replace)
    bench.say(*(Regrouped(rank, 1) for rank in range(4)))
    assert bench.at(Stage.RUNNING) and bench.sent(Thaw)


def test_a_rank_whose_update_failed_half_way_is_replaced_although_its_process_runs() -> None:
    """Its agent ends it; that it ends is expected then, and so is what breaks with it."""
    bench = job()
    torn_rank_3(bench)
    assert sorted(bench.sent(Regroup)) == [0, 1, 2] and bench.said_to_agents(Replace)["host3"] == [Replace(3, 103, 1)]
    bench.close(3)
    bench.say(killed(3), fault(0, CauseKind.PEER_ERROR))
    assert bench.at(Stage.REGROUPING)
    all_regroup(bench)
    assert bench.at(Stage.RUNNING)
    bench.say(killed(3))
    assert bench.at(Stage.RUNNING), "its agent names the end of the former process once more"
    bench.say(killed(3, pid=203))
    assert bench.at(Stage.FREEZING)


def test_the_next_fault_of_a_recovered_job_is_handled_like_the_first() -> None:
    bench = regrouping()
    all_regroup(bench)
    bench.say(able(3, pid=203, generation=1, regrouped=1))
    assert bench.sent(Thaw) == {3: Thaw(1)}, "it attaches again, and may have missed it"
    bench.say(WorkerExit(0, 100, "signal SIGKILL", 0.0))
    bench.all_report(9, ranks=(1, 2, 3))
    assert bench.state.freeze_id == 2 and sorted(bench.sent(Regroup)) == [1, 2, 3]
    assert bench.sent(Regroup)[1].replaced == (0,)


def test_a_rank_whose_collective_failed_keeps_its_process() -> None:
    """It fails because another has died."""
    bench = job()
    bench.say(killed(3), fault(0, CauseKind.PEER_ERROR))
    bench.all_report(7, ranks=(0, 1, 2))
    assert sorted(bench.sent(Regroup)) == [0, 1, 2] and bench.sent(Regroup)[0].replaced == (3,)


def test_several_ranks_are_replaced_at_once() -> None:
    bench = job()
    bench.say(killed(3), killed(0))
    bench.all_report(7, ranks=(1, 2))
    order = Regroup(1, 6, (0, 3), bench.sent(Regroup)[1].record)
    assert bench.sent(Regroup) == {1: order, 2: order}
    assert bench.said_to_agents(Replace) == {"host0": [Replace(0, 0, 1)], "host3": [Replace(3, 0, 1)]}
    bench.say(replacement(0), *(Regrouped(rank, 1) for rank in (0, 1, 2)))
    assert bench.at(Stage.REGROUPING)
    bench.say(replacement(3), Regrouped(3, 1))
    assert bench.sent(Thaw) and bench.at(Stage.RUNNING)


# --- when it is not tried ---


def of_kind(kind: CauseKind) -> ControllerBench:
    bench = job()
    bench.say(fault(3, kind))
    bench.all_report(7)
    if kind is CauseKind.PEER_ERROR:
        bench.wait(30.0)
    return bench


def silent_for_good() -> ControllerBench:
    bench = job(lease_s=3.0)
    bench.close(3)
    bench.all_report(7, ranks=(0, 1, 2))
    bench.wait(4.0, senders=(0, 1, 2))
    return bench


def copies() -> ControllerBench:
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7), report(1, 1, DONE, 7, records=[7], backup_step=6))
    return bench


def newer_record() -> ControllerBench:
    bench = job()
    bench.say(killed(3))
    torn = replace(report(2, 1, UPDATING, 7, records=[6, 7]), torn=True)
    bench.say(report(0, 1, COMPUTE, 7), report(1, 1, COMPUTE, 7), torn)
    return bench


def unable(rank: int) -> ControllerBench:
    bench = job(unable=rank)
    lose_rank_3(bench)
    return bench


def finished() -> ControllerBench:
    bench = job()
    bench.say(Finished(0))
    lose_rank_3(bench)
    return bench


def out_of_reach() -> ControllerBench:
    """Rank 1, which need not roll forward, loses its stream while the others do."""
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[6, 7]), report(2, 1, READY, 7))
    bench.close(1)
    bench.say(RolledForward(0, 1, 7), RolledForward(2, 1, 7))
    return bench


def final() -> ControllerBench:
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, COMPUTE, 7), report(1, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7, final=True))
    return bench


def silent_besides() -> ControllerBench:
    bench = job(lease_s=30.0, freeze_timeout_s=5.0)
    bench.say(killed(3))
    bench.close(0)
    bench.say(report(1, 1, COMPUTE, 7), report(2, 1, COMPUTE, 7))
    bench.wait(6.0, senders=(1, 2))
    return bench


def another_process_came() -> ControllerBench:
    bench = job()
    bench.say(able(3, pid=777))
    bench.all_report(7, ranks=(0, 1, 2))
    return bench


def no_agent() -> ControllerBench:
    bench = job(agents=False)
    lose_rank_3(bench)
    return bench


def agent_gone() -> ControllerBench:
    bench = job()
    bench.take(StreamClosed((), host="host3"))
    lose_rank_3(bench)
    return bench


def no_holder_stays() -> ControllerBench:
    """The other holder of rank 3's shard dies while ranks roll forward."""
    bench = job()
    bench.say(killed(3))
    bench.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[6, 7]), report(2, 1, READY, 7))
    bench.say(killed(1))
    bench.say(RolledForward(0, 1, 7), RolledForward(2, 1, 7))
    return bench


def too_late() -> ControllerBench:
    bench = job(in_place_s=60.0, total_timeout_s=118.0)
    lose_rank_3(bench)
    return bench


def often_enough() -> ControllerBench:
    bench = job(most_in_place=1)
    lose_rank_3(bench)
    all_regroup(bench)
    bench.say(killed(3, pid=203))
    bench.all_report(20, ranks=(0, 1, 2))
    return bench


def again_and_again() -> ControllerBench:
    bench = job()
    for count in range(MOST_AT_A_STEP + 1):
        lose_rank_3(bench, pid=103 + 100 * count)
        if bench.at(Stage.REGROUPING):
            all_regroup(bench, pid=203 + 100 * count)
    return bench


WHY_NOT: dict[str, tuple[Callable[[], ControllerBench], str]] = {
    "a notice": (lambda: of_kind(CauseKind.PREEMPTED), "a fault of kind preempted"),
    "a failed collective alone": (lambda: of_kind(CauseKind.PEER_ERROR), "a fault of kind peer_error"),
    "silence": (silent_for_good, "a fault of kind silent"),
    "local copies": (copies, "some ranks keep the step before, so that others may be ahead"),
    "a newer record": (newer_record, "step 6 is not the newest that any rank has finished"),
    "a staying rank cannot": (lambda: unable(1), "rank 1 cannot regroup"),
    "a hang": (lambda: of_kind(CauseKind.HUNG), "a fault of kind hung"),
    "one has finished": (finished, "training has returned on rank 0"),
    "one is out of reach": (out_of_reach, "rank 1 is silent"),
    "one has begun a dump": (final, "rank 2 has a gate that cannot open again"),
    "another is silent": (silent_besides, "rank 0 is not at the step, and has not lost its state"),
    "another process came": (another_process_came, "rank 3 may still run"),
    "no agent": (no_agent, "rank 3 has no agent that could start a process"),
    "its agent is gone": (agent_gone, "rank 3 has no agent that could start a process"),
    "a shard is lost with a process": (no_holder_stays, "shard 1 would have no holder that stays"),
    "no time": (too_late, "less than 60 s remain in the first half of the fault's time"),
    "often enough": (often_enough, "1 faults have ended in place"),
    "again and again": (again_and_again, f"no step was finished since {MOST_AT_A_STEP} recoveries at step 6"),
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_the_step_is_written_instead(why: str) -> None:
    build, reason = WHY_NOT[why]
    bench = build()
    assert [line["reason"] for line in bench.logged("not_in_place")] == [reason]
    assert not bench.sent(Regroup)
    if build is no_holder_stays:
        assert bench.at(Stage.FREEZING), "all are asked again"
        return
    assert bench.at(Stage.WRITING) and bench.logged("write_sent")


def test_without_the_setting_a_checkpoint_is_always_written() -> None:
    bench = job(in_place_s=0.0)
    lose_rank_3(bench)
    assert bench.at(Stage.WRITING) and not bench.logged("not_in_place")


def test_a_short_limit_is_one_too() -> None:
    assert regrouping(in_place_s=0.5).sent(Regroup)


def test_a_finished_step_between_two_recoveries_begins_the_count_anew() -> None:
    bench = job()
    for count in range(MOST_AT_A_STEP + 2):
        lose_rank_3(bench, step=7 + count, pid=103 + 100 * count)
        all_regroup(bench, pid=203 + 100 * count)
    assert bench.state.recoveries == Recoveries(MOST_AT_A_STEP + 2, 6 + MOST_AT_A_STEP + 1, 1)


def test_the_last_moment_at_which_it_is_tried() -> None:
    """It ends in the first half of the fault's time, whatever becomes of it: then there is time to write."""
    for total_s, tried in ((120.0, True), (119.9, False)):
        bench = job(in_place_s=60.0, total_timeout_s=total_s)
        lose_rank_3(bench)
        assert bench.at(Stage.REGROUPING) == tried


def test_as_many_recoveries_at_one_step_as_there_may_be_do_not_count_at_the_next() -> None:
    bench = job()
    for count in range(MOST_AT_A_STEP):
        lose_rank_3(bench, pid=103 + 100 * count)
        all_regroup(bench, pid=203 + 100 * count)
    lose_rank_3(bench, step=8, pid=103 + 100 * MOST_AT_A_STEP)
    assert bench.at(Stage.REGROUPING)
