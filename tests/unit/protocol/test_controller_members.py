"""Registration, suspicion, death and false alarms, as the controller sees them."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from ttp.controller.core import machine
from ttp.controller.core.facts.events import ControllerSettings, Finish, Received, Tick
from ttp.controller.core.facts.state import Over, Stage
from ttp.errors import ProtocolError
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    Release,
    StateReport,
    Thaw,
    Welcome,
    WorkerExit,
    Written,
)

SIGKILL = "signal SIGKILL"


def killed(rank: int, text: str = SIGKILL, pid: int = 0) -> WorkerExit:
    return WorkerExit(rank, pid or 100 + rank, text, 0.0)


def fault(rank: int, kind: CauseKind, text: str = "boom") -> FaultReport:
    return FaultReport(rank, Cause(kind, (rank,), text), "")


def test_all_are_welcomed_once_the_last_has_registered() -> None:
    job = ControllerBench(assembled=False)
    for rank in (3, 0, 2):
        job.say(registration(rank))
        assert not job.sent(Welcome)
    job.say(registration(1))
    welcomes = job.sent(Welcome)
    assert sorted(welcomes) == [0, 1, 2, 3]
    assert welcomes[2].survives == "any 1 of 4 ranks; 4 of 6 pairs; each of 4 nodes" and welcomes[2].term == 3
    assert job.at(Stage.RUNNING)


def test_a_death_before_the_job_has_assembled_releases_all_with_75() -> None:
    job = ControllerBench(assembled=False)
    job.say(registration(0), registration(1), killed(3))
    assert (job.logged("death_seen")[0]["host"], job.logged("death_seen")[0]["pid"]) == ("", 0), "it never came"
    exits = job.sent(Exit)
    assert sorted(exits) == [0, 1] and exits[0].code == 75 and "rank 3 died" in exits[0].reason


def test_a_fault_before_the_job_has_assembled_releases_all() -> None:
    job = ControllerBench(assembled=False)
    job.say(registration(0), fault(0, CauseKind.EXCEPTION))
    assert job.logged("fault_reported")[0]["text"] == "boom"
    assert sorted(job.sent(Exit)) == [0] and job.at(Stage.EXITING)


def test_a_late_starter_of_a_job_that_failed_to_assemble_receives_the_order_to_exit() -> None:
    job = ControllerBench(assembled=False)
    job.say(registration(0), killed(3), registration(1))
    assert sorted(job.sent(Exit)) == [1]


def test_a_world_that_does_not_assemble_in_time_is_released_and_the_missing_are_named() -> None:
    job = ControllerBench(assembled=False, register_timeout_s=60.0)
    job.say(registration(0), registration(2))
    job.wait(61.0, senders=())
    assert "missing: (1, 3)" in str(job.logged("exit_sent")[0]["reason"])


def test_a_rank_that_lost_its_stream_while_assembling_has_a_lease_from_then() -> None:
    job = ControllerBench(assembled=False)
    job.say(registration(0))
    job.now = 50.0
    job.close(0)
    assert job.at(Stage.ASSEMBLING)
    job.say(registration(0), after=1.0)
    job.say(*(registration(rank) for rank in (1, 2, 3)))
    assert job.at(Stage.RUNNING)


def test_an_exit_seen_by_an_agent_freezes_at_once() -> None:
    job = ControllerBench()
    job.say(killed(1))
    freezes = job.sent(Freeze)
    assert sorted(freezes) == [0, 2, 3]
    assert freezes[0].cause == Cause(CauseKind.EXITED, (1,), SIGKILL)
    assert job.logged("death_seen")[0]["rank"] == 1


def test_the_status_after_exiting_names_the_death() -> None:
    job = ControllerBench()
    job.say(killed(1, "exiting"), killed(1))
    assert job.logged("death_named") == [{"rank": 1, "text": SIGKILL}]
    assert len(job.logged("death_seen")) == 1
    assert job.state.fault is not None and job.state.fault.causes[0].text == SIGKILL


def test_exit_code_0_of_a_rank_that_had_not_finished_is_a_death() -> None:
    job = ControllerBench()
    job.say(killed(1, "exit code 0"))
    assert job.at(Stage.FREEZING)


def test_the_exit_of_an_earlier_process_of_a_rank_is_nothing() -> None:
    job = ControllerBench()
    job.say(killed(1, pid=7))
    assert job.at(Stage.RUNNING)


def test_a_new_process_under_a_known_rank_means_that_the_old_one_is_dead() -> None:
    job = ControllerBench()
    job.say(registration(1, pid=999))
    assert job.at(Stage.FREEZING) and "replaced by 999" in job.logged("death_seen")[0]["text"]


def test_a_broken_stream_freezes_and_the_same_process_attaching_again_thaws() -> None:
    job = ControllerBench()
    job.close(1)
    assert sorted(job.sent(Freeze)) == [0, 2, 3] and job.at(Stage.FREEZING)
    job.all_report(5, ranks=(0, 2, 3))
    assert job.at(Stage.FREEZING), "a suspicion alone decides nothing"
    job.say(registration(1), after=0.1)
    assert sorted(job.sent(Thaw)) == [0, 1, 2, 3]
    assert job.at(Stage.RUNNING) and [line["rank"] for line in job.logged("cleared")] == [1]


def test_a_broken_stream_is_a_death_when_the_lease_has_run_out() -> None:
    job = ControllerBench(lease_s=3.0)
    job.wait(0.5)
    job.close(1)
    job.all_report(5, ranks=(0, 2, 3))
    job.wait(2.9, senders=(0, 2, 3))
    assert not job.logged("death_seen")
    job.wait(0.2, senders=(0, 2, 3))
    assert job.logged("death_seen")[0]["kind"] == "silent" and job.at(Stage.WRITING)


def test_a_rank_silent_on_an_open_stream_is_suspect_and_then_dead_within_a_lease() -> None:
    job = ControllerBench(lease_s=3.0)
    job.wait(2.1, senders=(0, 1, 3))
    assert job.at(Stage.FREEZING) and job.logged("suspect")[0]["rank"] == 2
    job.all_report(5, ranks=(0, 1, 3))
    job.wait(1.0, senders=(0, 1, 3))
    assert job.logged("death_seen")[0]["rank"] == 2 and job.now == pytest.approx(3.1)


def test_a_heartbeat_clears_the_suspicion_of_an_open_stream() -> None:
    job = ControllerBench(lease_s=3.0)
    job.wait(2.1, senders=(0, 1, 3))
    job.say(Heartbeat(2, Phase.COMPUTE, 1))
    assert job.at(Stage.RUNNING) and sorted(job.sent(Thaw)) == [0, 1, 2, 3]


def test_a_late_word_of_a_broken_stream_clears_nothing() -> None:
    job = ControllerBench()
    job.close(1)
    job.say(Heartbeat(1, Phase.COMPUTE, 1))
    assert job.at(Stage.FREEZING)


def test_a_rank_that_attaches_again_after_a_thaw_is_thawed_again() -> None:
    """Its stream may have broken between the freeze and the thaw."""
    job = ControllerBench()
    job.close(1)
    job.say(registration(1))
    job.say(registration(3))
    assert sorted(job.sent(Thaw)) == [3] and sorted(job.sent(Welcome)) == [3]


def test_when_everybody_is_gone_it_is_the_controller_that_is_cut_off() -> None:
    job = ControllerBench(lease_s=3.0, orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(10.0, senders=())
    assert not job.logged("death_seen")
    for rank in range(4):
        job.say(registration(rank), after=0.5)
    assert job.at(Stage.RUNNING) and not job.logged("death_seen")


def test_the_controller_exits_when_no_rank_is_attached_for_long() -> None:
    job = ControllerBench(orphan_timeout_s=15.0)
    job.close(0, 1, 2, 3)
    job.wait(14.9, senders=())
    assert job.at(Stage.FREEZING)
    job.take(Tick(), after=0.1)
    assert job.at(Stage.OVER) and only(job.effects, Finish)


def test_a_controller_that_was_stopped_itself_blames_no_rank() -> None:
    job = ControllerBench(lease_s=3.0)
    job.take(Tick(), after=60.0)
    assert job.at(Stage.RUNNING) and not job.logged("suspect")
    job.wait(2.5, senders=(0, 1, 2))
    assert job.logged("suspect")[0]["rank"] == 3, "from then on the lease counts again"


def test_a_fault_of_a_living_rank_freezes_and_the_rank_stays_a_holder() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION))
    assert job.logged("fault_reported")[0]["rank"] == 1
    assert sorted(job.sent(Freeze)) == [0, 1, 2, 3]
    job.all_report(5)
    assert sorted(job.orders()) == [0, 1, 2, 3] and job.logged("decided")[0]["step"] == 4


def test_a_fault_reported_again_on_a_new_stream_counts_once() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.EXCEPTION), fault(1, CauseKind.EXCEPTION))
    assert job.state.fault is not None and len(job.state.fault.causes) == 1


def test_a_peers_error_waits_one_lease_for_the_culprit_and_then_goes_ahead() -> None:
    job = ControllerBench(lease_s=3.0)
    job.say(fault(1, CauseKind.PEER_ERROR))
    job.all_report(5)
    job.wait(2.9)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.at(Stage.WRITING)


def test_a_death_seen_after_a_peers_error_is_the_cause() -> None:
    job = ControllerBench()
    job.say(fault(1, CauseKind.PEER_ERROR))
    job.all_report(5, ranks=(0, 1, 2))
    job.say(killed(3))
    assert job.at(Stage.WRITING)
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert order.cause == Cause(CauseKind.EXITED, (3,), SIGKILL)


def test_all_finished_dismisses_all_and_ends() -> None:
    job = ControllerBench()
    job.say(*(Finished(rank) for rank in range(4)))
    assert sorted(job.sent(Release)) == [0, 1, 2, 3] and only(job.effects, Finish)
    job.say(killed(2, "exit code 0"))
    assert job.at(Stage.OVER) and not job.effects


def test_a_finished_rank_stays_a_holder_for_the_others() -> None:
    job = ControllerBench()
    job.say(Finished(0), killed(2))
    job.all_report(5, ranks=(0, 1, 3))
    assert 0 in job.orders()


def test_a_finished_rank_that_is_killed_before_the_others_have_finished_is_a_fault() -> None:
    job = ControllerBench()
    job.say(Finished(0), killed(0))
    assert job.at(Stage.FREEZING)


def test_a_finished_rank_that_exited_cleanly_is_not_a_fault() -> None:
    job = ControllerBench()
    job.say(Finished(0), killed(0, "exit code 0"))
    assert job.at(Stage.RUNNING)
    job.say(*(Finished(rank) for rank in (1, 2, 3)))
    assert job.at(Stage.OVER)


def test_leases_begin_when_the_job_has_assembled() -> None:
    """No rank sends heartbeats before the welcome: the first to come was silent for minutes."""
    job = ControllerBench(assembled=False)
    job.say(registration(0), registration(1), registration(2))
    job.wait(50.0, senders=())
    job.say(registration(3))
    job.wait(2.9, senders=(3,))
    assert not job.logged("death_seen")
    job.wait(0.2, senders=(3,))
    assert [line["rank"] for line in job.logged("death_seen")] == [0, 1, 2]


@pytest.mark.parametrize("end", ["all die", "all are gone"])
def test_what_is_over_remembers_nothing_but_why(end: str) -> None:
    """Whether the ranks had received the order to exit, or none was there to receive it."""
    job = ControllerBench(orphan_timeout_s=15.0)
    job.say(killed(1))
    job.all_report(7, ranks=(0, 2, 3))
    assert job.at(Stage.WRITING)
    if end == "all die":
        job.say(*(killed(rank) for rank in (0, 2, 3)))
    else:
        job.close(0, 2, 3)
        job.wait(15.1, senders=())
    assert isinstance(job.state.at, Over)
    assert ("all ranks are dead" if end == "all die" else "no rank was attached") in job.state.at.reason


def test_a_wrong_world_or_rank_is_a_protocol_error_and_changes_nothing() -> None:
    job = ControllerBench(assembled=False)
    before = job.state
    with pytest.raises(ProtocolError, match="world of 2 ranks, job job has 4"):
        job.say(registration(0, ((0, 1),)))
    with pytest.raises(ProtocolError, match="of rank 4, the world has ranks 0 to 3"):
        job.say(Finished(4))
    assert job.state is before


def test_an_answer_without_a_question_is_a_protocol_error() -> None:
    state = machine.initial(ControllerSettings("job", 1, 4), 0.0)
    for message in (report(0, 1, Phase.DONE, 1), Heartbeat(0, Phase.DONE, 1)):
        with pytest.raises(ProtocolError, match="not allowed here"):
            machine.transition(state, Received(message), 0.0)


def test_late_answers_of_an_older_freeze_are_ignored() -> None:
    job = ControllerBench()
    job.close(1)
    job.say(registration(1))
    job.close(1)
    stale: list[StateReport | Written] = [report(0, 1, Phase.DONE, 9, records=[9])]
    job.say(*stale)
    assert job.state.fault is not None and job.state.fault.records == ()


def test_heartbeats_cost_the_same_at_any_world_size() -> None:
    """No work per message grows with the world: the number of references copied does, with its square root."""
    job = ControllerBench(tuple((i, i + 200) for i in range(200)))
    chunks = job.state.members.table.chunks
    job.say(Heartbeat(234, Phase.COMPUTE, 1), after=0.1)
    same = sum(a is b for a, b in zip(chunks, job.state.members.table.chunks, strict=True))
    assert same == len(chunks) - 1 and max(map(len, chunks)) <= 20
