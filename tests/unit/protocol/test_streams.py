"""Streams that break and are opened again, and agents that come and go: who receives what, and what is noted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, only, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.events import Send, StreamClosed, Tell
from ttp.controller.core.facts.state import Exiting, Stage
from ttp.proto.messages import (
    AgentHello,
    CauseKind,
    Exit,
    Finished,
    Freeze,
    Heartbeat,
    Phase,
    Published,
    PublishOrder,
    Registration,
    RollForward,
    StandbyList,
    StateReport,
    Thaw,
    Welcome,
    WriteOrder,
)

COMPUTE, READY, DONE = Phase.COMPUTE, Phase.READY, Phase.DONE
SIGKILL = "signal SIGKILL"


def hello(host: str = "host0", *ranks: int) -> AgentHello:
    return AgentHello(host, ranks, tuple(100 + rank for rank in ranks))


def rolling() -> ControllerBench:
    """Rank 2 is dead; ranks 0 and 3 roll forward to step 7, which rank 1 has."""
    job = ControllerBench()
    job.say(killed(2))
    job.say(report(0, 1, READY, 7), report(1, 1, DONE, 7, records=[7]), report(3, 1, READY, 7))
    assert sorted(job.sent(RollForward)) == [0, 3]
    return job


def publishing() -> tuple[ControllerBench, int, PublishOrder]:
    """Rank 3 is dead, the others have written."""
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    job.all_write(job.orders())
    return job, *job.publish_order()


# --- what a rank receives when it attaches again ---


def test_before_any_freeze_a_rank_that_attaches_again_is_only_welcomed() -> None:
    job = ControllerBench()
    job.say(registration(1))
    assert sorted(job.sent(Welcome)) == [1] and len(only(job.effects, Send)) == 1


def test_a_rank_that_owes_a_roll_forward_is_ordered_again() -> None:
    """And one that does not is only frozen."""
    job = rolling()
    job.close(0, 1)
    job.say(registration(0))
    assert job.sent(RollForward)[0].record.step == 7 and job.sent(Freeze)[0].freeze_id == 1
    job.say(registration(1))
    assert sorted(job.sent(Freeze)) == [1] and not job.sent(RollForward)


def test_a_publisher_is_ordered_again() -> None:
    """And no other rank is."""
    job, rank, order = publishing()
    job.close(0, 1)
    job.say(registration(rank))
    assert job.sent(PublishOrder) == {rank: order}
    job.say(registration(1))
    assert not job.sent(PublishOrder)


def test_what_a_writer_has_answered_is_not_ordered_again() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.all_report(7, ranks=(0, 1, 2))
    orders = job.orders()
    job.say(job.written(1, orders[1]))
    job.close(1, 2)
    job.say(registration(1))
    assert not job.sent(WriteOrder)
    job.say(registration(2))
    assert job.sent(WriteOrder) == {2: orders[2]}


def test_the_freeze_that_a_rank_missed_names_the_same_cause() -> None:
    """A suspicion alone is named as one."""
    job = ControllerBench()
    job.say(killed(2))
    job.close(1)
    job.say(registration(1))
    assert (job.sent(Freeze)[1].cause.kind, job.sent(Freeze)[1].cause.ranks) == (CauseKind.EXITED, (2,))
    job = ControllerBench()
    job.close(1, 2)
    job.say(registration(1))
    assert job.sent(Freeze)[1].cause.kind is CauseKind.SILENT


def test_only_rank_0_receives_what_the_job_is_made_of() -> None:
    """It alone prints it: the others' welcome stays short."""
    job = ControllerBench(assembled=False)
    job.say(*(registration(rank) for rank in range(4)))
    welcomes = job.sent(Welcome)
    assert welcomes[0].overview and not any(welcomes[rank].overview for rank in (1, 2, 3))
    assert {welcome.job_groups for welcome in welcomes.values()} == {2}


def test_shards_without_a_second_holder_are_warned_of_on_rank_0_alone() -> None:
    job = ControllerBench(((0,), (1,)), assembled=False)
    job.say(*(registration(rank, job.holders) for rank in (0, 1)))
    assert job.logged("assembled")[0]["warnings"]
    assert job.sent(Welcome)[0].warnings and not job.sent(Welcome)[1].warnings


# --- what is noted ---


def test_a_broken_stream_of_a_rank_that_is_dead_or_away_does_not_suspect_it() -> None:
    job = ControllerBench()
    job.say(killed(3))
    job.close(3)
    assert not job.logged("suspect")
    job.close(1)
    job.close(1)
    assert [line["rank"] for line in job.logged("suspect")] == [1]


def test_a_silent_dead_rank_whose_stream_breaks_is_not_suspected_again() -> None:
    job = ControllerBench()
    job.wait(3.1, senders=(0, 1, 2))
    assert [line["rank"] for line in job.logged("suspect")] == [3] and job.logged("death_seen")
    job.close(3)
    assert len(job.logged("suspect")) == 1 and job.state.members.suspects == 0


def test_streams_that_close_at_the_end_are_not_suspicions() -> None:
    job, rank, _ = publishing()
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    job.close(0)
    assert job.at(Stage.EXITING) and not job.logged("suspect")


def test_a_rank_that_attaches_again_is_registered_once_and_cleared_only_of_a_suspicion() -> None:
    job = ControllerBench()
    job.say(registration(1))
    assert len(job.logged("registered")) == 4 and not job.logged("cleared")
    job.close(1)
    job.say(registration(1))
    assert len(job.logged("registered")) == 4 and len(job.logged("cleared")) == 1


def done(rank: int) -> StateReport:
    return report(rank, 1, DONE, 7, records=[7])


def busy(rank: int) -> StateReport:
    """Its update has not ended."""
    return report(rank, 1, Phase.UPDATING, 7, records=[7], closed=False)


def silent_rank(*silent: int) -> ControllerBench:
    """These ranks were silent for a lease and count as dead; a round still waits for the end of rank 1's update."""
    job = ControllerBench(freeze_timeout_s=1.0)
    job.close(*silent)
    job.say(*(busy(1) if rank == 1 else done(rank) for rank in range(4) if rank not in silent))
    job.wait(3.1, senders=[rank for rank in range(4) if rank not in silent])
    assert job.logged("awaiting_updates") and job.at(Stage.FREEZING)
    return job


def test_a_rank_that_was_only_silent_counts_again_while_a_round_asks() -> None:
    """The round waits for what it holds; that it was taken for dead stays the fault's cause."""
    job = silent_rank(3)
    job.say(registration(3))
    assert job.logged("cleared")[-1] == {"rank": 3, "why": "it was only silent"}
    job.say(done(1))
    assert job.at(Stage.FREEZING), "rank 3 has not reported"
    job.say(done(3))
    assert job.logged("decided")[0]["able"] == (0, 1, 2, 3)
    job.all_write(job.orders())
    assert job.logged("publish_sent")[0]["culprits"] == (3,)


def test_a_rank_that_counts_again_when_the_wait_for_an_update_is_nearly_over_is_waited_for() -> None:
    """The end of that wait passes while the round waits for the rank that is back."""
    job = silent_rank(3)
    settings = job.state.settings
    job.wait(settings.progress_timeout_s - 0.2, senders=(0, 1, 2))
    job.say(registration(3))
    job.wait(settings.freeze_timeout_s - 0.1)
    assert job.at(Stage.FREEZING)
    job.say(done(3))
    assert job.logged("decided")[0]["able"] == (0, 2, 3)


def test_a_rank_that_was_only_silent_counts_again_with_its_report() -> None:
    """Its stream was open all the time: it answers the freeze that it got meanwhile."""
    job = ControllerBench(freeze_timeout_s=0.5)
    job.wait(2.4, senders=(0, 1, 2))
    job.say(done(0), busy(1), done(2))
    job.wait(1.0, senders=(0, 1, 2))
    job.say(done(3))
    assert job.logged("cleared")[-1] == {"rank": 3, "why": "it was only silent"}
    assert job.logged("decided")[0]["able"] == (0, 2, 3), "rank 1's update needs no waiting for any more"


def test_a_rank_that_comes_back_again_and_again_makes_the_round_no_longer_than_half_of_the_fault() -> None:
    job = silent_rank(3)
    settings, fault = job.state.settings, job.state.fault
    assert fault is not None
    while job.at(Stage.FREEZING):
        job.say(registration(3))
        job.close(3)
        job.wait(settings.lease_s + 0.1, senders=(0, 1, 2))
    assert job.now <= fault.began + settings.total_timeout_s / 2 + 2 * settings.lease_s


def test_a_rank_that_was_only_silent_is_asked_when_a_plan_without_it_falls_through() -> None:
    """It comes back while the others write; then rank 1, the last that has their shard, dies."""
    job = silent_rank(3)
    job.say(done(1))
    assert job.logged("decided")[0]["able"] == (0, 1, 2)
    job.say(registration(3))
    assert job.at(Stage.WRITING)
    job.say(killed(1))
    assert job.logged("replanned")
    job.say(*(report(rank, 2, DONE, 7, records=[7]) for rank in (0, 2)))
    assert job.at(Stage.FREEZING), "rank 3 is waited for"
    job.say(report(3, 2, DONE, 7, records=[7]))
    assert job.logged("decided")[1]["able"] == (0, 2, 3)


def test_a_silent_rank_whose_process_was_replaced_stays_dead() -> None:
    job = silent_rank(3)
    job.say(registration(3, pid=9999), done(3))
    assert not [line for line in job.logged("cleared") if line["why"] == "it was only silent"]
    assert job.at(Stage.FREEZING)


def test_a_rank_that_says_with_its_registration_that_it_has_finished_is_noted_once() -> None:
    job = ControllerBench()
    for _ in range(2):
        job.say(replace(registration(1), finished=True))
        assert job.logged("rank_finished") == [{"rank": 1}] and job.state.members.finished == 1
    job.say(Finished(1))
    assert len(job.logged("rank_finished")) == 1 and job.state.members.finished == 1


def test_a_death_is_noted_with_where_the_rank_was_at_its_last_message() -> None:
    job = ControllerBench()
    job.say(Heartbeat(1, READY, 9), killed(1), killed(2))
    first, second = job.logged("death_seen")
    assert (first["phase"], first["step"], first["host"], first["pid"]) == ("READY", 9, "host1", 101)
    assert "phase" not in second, "rank 2 never sent a message"


# --- the status of a death ---


def test_exiting_said_twice_names_nothing() -> None:
    job = ControllerBench()
    job.say(killed(1, "exiting"), killed(1, "exiting"))
    assert not job.logged("death_named") and len(job.logged("death_seen")) == 1


def test_a_death_that_was_named_is_not_named_again() -> None:
    job = ControllerBench()
    job.say(killed(1, "exiting"), killed(1, SIGKILL), killed(1, "exit code 1"))
    assert job.logged("death_named") == [{"rank": 1, "text": SIGKILL}]


def test_why_a_rank_was_killed_is_added_to_the_signal() -> None:
    job = ControllerBench()
    job.say(killed(1, SIGKILL), killed(1, f"{SIGKILL}, out of memory"), killed(1, SIGKILL))
    assert job.logged("death_named") == [{"rank": 1, "text": f"{SIGKILL}, out of memory"}]
    assert job.state.fault is not None
    assert [cause.text for cause in job.state.fault.causes] == [f"{SIGKILL}, out of memory"]


def test_naming_one_death_leaves_the_other_causes_as_they_are() -> None:
    job = ControllerBench()
    job.say(killed(1, "exiting"), fault(0, CauseKind.EXCEPTION), killed(1, SIGKILL))
    assert job.state.fault is not None
    assert [(cause.ranks, cause.text) for cause in job.state.fault.causes] == [((1,), SIGKILL), ((0,), "boom")]
    assert len(job.logged("death_seen")) == 1, "the same death"


def test_the_name_of_a_death_that_comes_after_the_end_of_its_fault_is_noted_all_the_same() -> None:
    job = ControllerBench(assembled=False)
    job.say(registration(0), registration(1), killed(1, "exiting"))
    assert job.at(Stage.EXITING)
    job.say(killed(1, SIGKILL))
    assert job.logged("death_named") == [{"rank": 1, "text": SIGKILL}]


# --- the end ---


def test_a_rank_that_could_not_receive_the_order_to_exit_and_dies_is_waited_for_no_longer() -> None:
    job, rank, _ = publishing()
    job.close(1)
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    job.close(0, 2)
    assert job.at(Stage.EXITING)
    job.say(killed(1))
    assert job.at(Stage.OVER)


def test_a_finished_rank_that_could_not_receive_the_order_to_exit_and_leaves_is_waited_for_no_longer() -> None:
    job, rank, _ = publishing()
    job.say(Finished(1))
    job.close(1)
    job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    job.close(0, 2)
    assert job.at(Stage.EXITING)
    job.say(killed(1, "exit code 0"))
    assert job.at(Stage.OVER) and job.logged("left") == [{"rank": 1}]


@pytest.mark.parametrize("stage", ["assembling", "publishing"])
def test_a_rank_that_comes_during_the_end_receives_the_reason(stage: str) -> None:
    if stage == "assembling":
        job = ControllerBench(assembled=False)
        job.say(registration(0), killed(3))
    else:
        job, rank, _ = publishing()
        job.say(Published(rank, 1, 6, "/a/iter_0000006"))
    job.say(registration(1))
    assert isinstance(job.state.at, Exiting)
    assert job.sent(Exit)[1].reason == job.state.at.reason and job.state.at.reason
    assert not job.sent(Welcome) and not job.sent(Thaw)


# --- launchers ---


def test_an_agent_that_comes_during_the_end_receives_the_order_that_the_ranks_had() -> None:
    """Its line was down when the others received it, and its ranks may be hung."""
    job, rank, _ = publishing()
    job.say(hello("host0"))
    assert not any(isinstance(effect.message, Exit) for effect in only(job.effects, Tell))
    job.say(Published(rank, 1, 6, "/a/iter_0000006"), hello("host1"))
    assert isinstance(job.state.at, Exiting)
    (effect,) = [effect for effect in only(job.effects, Tell) if isinstance(effect.message, Exit)]
    assert (
        effect.hosts == ("host1",) and isinstance(effect.message, Exit) and effect.message.reason == job.state.at.reason
    )


def test_an_agent_whose_stream_has_ended_receives_nothing_any_more() -> None:
    job = ControllerBench()
    job.say(hello("host0"), hello("host1"))
    job.take(StreamClosed((), "host0"))
    assert job.logged("agent_detached") == [{"host": "host0"}] and job.at(Stage.RUNNING)
    job.say(replace(registration(1), controllers=("c0", "c1")))
    assert only(job.effects, Tell) == [Tell(("host1",), StandbyList(("c1",), 3.0))]
    job.take(StreamClosed((), "host1"))
    job.say(*(killed(rank) for rank in range(4)))
    assert not [effect for effect in only(job.effects, Send) if isinstance(effect.message, Exit)], (
        "no agent would receive it"
    )


def test_standbys_that_are_known_already_are_not_sent_again() -> None:
    job = ControllerBench()
    job.say(replace(registration(3), controllers=("c0", "c1")))
    assert not only(job.effects, Tell), "there is no launcher"
    job.say(hello("host0"))
    coming: list[Registration] = [replace(registration(rank), controllers=("c0", "c1", "c2")) for rank in (1, 2)]
    job.say(coming[0])
    assert only(job.effects, Tell)
    job.say(coming[1])
    assert not only(job.effects, Tell) and job.state.successors == ("c1", "c2")
