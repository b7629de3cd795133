"""A silent rank whose agent sees its process running has a longer lease; no other rank has."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_members import killed
from ttp.controller.core.facts.events import ControllerSettings, StreamClosed, Tick
from ttp.controller.core.facts.membership import vouched_lease
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import next_deadline
from ttp.proto.messages import NO_PROCESS, AgentHello, Heartbeat, Phase, Vouch

COMPUTE = Phase.COMPUTE
OTHERS = (0, 2, 3)


def running(steps: int = 8, freeze_timeout_s: float = 10.0) -> ControllerBench:
    """A job of four ranks that has finished so many steps, a rank on each host."""
    job = ControllerBench(freeze_timeout_s=freeze_timeout_s)
    job.say(*(Heartbeat(rank, COMPUTE, steps + 1, steps=steps) for rank in range(4)))
    return job


def silent(job: ControllerBench, seconds: float, *vouched: int, pid: int = 0) -> None:
    """Let rank 1 be silent, heartbeats of the others and vouches for these ranks coming every half second."""
    for _ in range(round(2 * seconds)):
        job.say(Vouch(vouched, tuple(pid or 100 + rank for rank in vouched)))
        job.wait(0.5, senders=OTHERS)


def test_a_rank_whose_process_runs_outlives_its_lease_in_silence() -> None:
    """It is not even suspect: no gate closes while it compiles."""
    job = running()
    silent(job, 8.0, 1)
    assert job.at(Stage.RUNNING) and not job.logged("suspect") and not job.logged("death_seen")
    job.say(Heartbeat(1, COMPUTE, 9, steps=8))
    silent(job, 8.0, 1)
    assert job.at(Stage.RUNNING), "after a message it has its whole time again"


@pytest.mark.parametrize(("steps", "lease_s"), [(8, 10.0), (7, 30.0), (0, 30.0)])
def test_an_interpreter_that_is_held_for_good_costs_the_vouched_lease(steps: int, lease_s: float) -> None:
    job = running(steps)
    silent(job, lease_s - 1.5, 1)
    assert job.at(Stage.RUNNING)
    silent(job, 1.0, 1)
    assert job.logged("suspect") and not job.logged("death_seen"), "gates close in the last third of a lease"
    silent(job, 0.5, 1)
    (death,) = job.logged("death_seen")
    assert death["rank"] == 1 and f"{lease_s:.1f} s, although its agent saw the process running" in death["text"]


def test_a_node_that_is_lost_keeps_its_time() -> None:
    """The vouch ages with its agent's silence."""
    job = running()
    silent(job, 4.0, 1)
    job.wait(2.4, senders=OTHERS)
    assert job.at(Stage.FREEZING) and not job.logged("death_seen")
    job.wait(0.2, senders=OTHERS)
    assert job.logged("death_seen")[0]["rank"] == 1, "3 s after the agent's last word"


def test_a_process_that_is_stopped_is_found_within_the_ordinary_lease() -> None:
    """Its agent vouches for the others only."""
    job = running()
    silent(job, 3.0, *OTHERS)
    assert [line["rank"] for line in job.logged("death_seen")] == [1]
    text = job.logged("death_seen")[0]["text"]
    assert re.fullmatch(r"no message received for 3\.\d s \(limit 3 s, TTP_LEASE_S\)", text), text


def test_nothing_is_believed_of_another_process() -> None:
    job = running()
    silent(job, 3.0, 1, pid=77)
    assert [line["rank"] for line in job.logged("death_seen")] == [1]


def test_what_was_said_of_an_earlier_process_is_forgotten_with_it() -> None:
    job = ControllerBench(assembled=False)
    job.say(Vouch((1,), (77,)), *(registration(rank) for rank in range(4)))
    assert job.state.members.table[1].vouched < 0.0


def test_a_vouch_for_ranks_that_the_job_has_not_changes_nothing() -> None:
    job = running()
    before = job.state.members.table
    job.say(Vouch((-1, 4, 1 << 40), (1, 2, 3)), Vouch((0, 1), ()))
    assert job.state.members.table == before


def test_a_vouched_rank_whose_stream_broke_is_waited_for_with_closed_gates() -> None:
    """Perhaps it was the network: it comes back when it can, and then all go on."""
    job = running()
    job.close(1)
    assert job.at(Stage.FREEZING)
    silent(job, 9.5, 1)
    assert not job.logged("death_seen")
    job.say(registration(1))
    job.say(*(Heartbeat(rank, COMPUTE, 9) for rank in range(4)))
    assert job.at(Stage.RUNNING)


def test_a_vouched_rank_that_is_seen_to_end_is_dead_at_once() -> None:
    job = running()
    silent(job, 4.0, 1)
    job.say(killed(1))
    assert job.logged("death_seen")[0]["kind"] == "exited"


def test_a_vouch_does_not_count_as_a_message_of_its_rank() -> None:
    """All ranks silent: it clears no suspicion, and a controller that receives nothing of them stays careful."""
    job = running()
    job.close(0, 1, 2, 3)
    job.say(Vouch((0, 1, 2, 3), (100, 101, 102, 103)), after=0.5)
    assert job.state.members.suspects == 4


def test_the_loss_of_a_node_is_seen_while_all_others_compile() -> None:
    """Messages of agents prove that the controller is not cut off; a lease more may go by, once."""
    job = running()
    for _ in range(12):
        job.take(Tick(), after=0.25)
        job.say(Vouch((0, 1, 2), (100, 101, 102)), after=0.25)
        if job.logged("death_seen"):
            break
    assert [line["rank"] for line in job.logged("death_seen")] == [3] and job.now <= 6.0


def test_a_clock_that_leaps_back_leaves_no_vouch_in_the_future() -> None:
    job = running()
    job.say(Vouch((1,), (101,)), after=100.0)
    job.take(Tick(), after=-90.0)
    assert job.state.members.table[1].vouched == job.now


@pytest.mark.parametrize(
    ("vouched_s", "total_s", "started", "expected"),
    [(10.0, 120.0, True, 10.0), (10.0, 120.0, False, 30.0), (10.0, 60.0, False, 15.0), (1.0, 120.0, True, 3.0), (10.0, 8.0, True, 3.0)],
)  # fmt: skip
def test_the_vouched_lease_is_a_quarter_of_a_faults_time_at_most_and_a_lease_at_least(
    vouched_s: float, total_s: float, started: bool, expected: float
) -> None:
    settings = ControllerSettings("job", 1, 4, vouched_lease_s=vouched_s, total_timeout_s=total_s)
    assert vouched_lease(settings, started) == expected


# --- a new controller ---


def standby() -> ControllerBench:
    """A standby to which three ranks have come; rank 1 has not."""
    job = ControllerBench(assembled=False, standby=1)
    job.say(*(replace(registration(rank), job_groups=2, controllers=("a", "b")) for rank in OTHERS))
    assert job.at(Stage.GATHERING)
    return job


def gather(job: ControllerBench, seconds: float, *vouched: int) -> None:
    for _ in range(round(2 * seconds)):
        job.say(AgentHello("host1", (1,), (101,)), Vouch(vouched, tuple(100 + rank for rank in vouched)))
        job.wait(0.5, senders=OTHERS)


def test_a_new_controller_waits_for_a_rank_whose_process_runs() -> None:
    job = standby()
    gather(job, 8.0, 1)
    assert job.at(Stage.GATHERING)
    job.say(replace(registration(1), job_groups=2))
    assert job.at(Stage.FREEZING) and not job.logged("death_seen"), "it took over with all ranks"


def test_a_new_controller_waits_no_longer_than_ranks_wait_for_one() -> None:
    job = standby()
    gather(job, 14.0, 1)
    assert job.at(Stage.GATHERING)
    gather(job, 1.5, 1)
    assert job.at(Stage.FREEZING) and job.logged("death_seen")[0]["rank"] == 1


def test_a_new_controller_that_knows_of_a_fault_does_not_wait_for_running_ranks() -> None:
    job = standby()
    job.say(killed(2))
    gather(job, 3.5, 1)
    assert {line["rank"] for line in job.logged("death_seen")} == {1, 2}


def test_a_standby_without_ranks_takes_vouches_too() -> None:
    job = ControllerBench(assembled=False, standby=1)
    job.say(Vouch((1,), (101,)))
    assert job.at(Stage.STANDBY) and next_deadline(job.state) is None
    job.take(StreamClosed((), "host1"))
    assert job.state.members.table[1].vouched == 0.0


def test_an_agent_without_a_process_vouches_for_none() -> None:
    """It reports only that it is there."""
    job = ControllerBench(assembled=False, standby=1)
    job.say(Vouch((1,), (NO_PROCESS,)))
    member = job.state.members.table[1]
    assert (member.vouched, member.named_at) == (-inf, 0.0)


# --- no refusal while it may still come ---


def test_a_shard_whose_last_holder_compiles_is_waited_for_before_a_refusal() -> None:
    """Rank 3 is dead and rank 1, its partner, does not answer the freeze: its process runs."""
    job = running()
    silent(job, 2.5, 1)
    job.say(killed(3), *(report(rank, 1, Phase.DONE, 8, records=[8]) for rank in (0, 2)))
    for _ in range(13):
        job.say(Vouch((1,), (101,)))
        job.wait(0.5, senders=(0, 2))
    assert job.at(Stage.FREEZING) and not job.logged("refused")
    job.say(Heartbeat(1, COMPUTE, 9), report(1, 1, Phase.DONE, 8, records=[8]))
    assert job.logged("decided")[0]["step"] == 8


def test_a_shard_whose_last_holder_is_held_for_good_is_refused_in_time() -> None:
    job = running(freeze_timeout_s=5.0)
    silent(job, 2.5, 1)
    job.say(killed(3), *(report(rank, 1, Phase.DONE, 8, records=[8]) for rank in (0, 2)))
    for _ in range(17):
        job.say(Vouch((1,), (101,)))
        job.wait(0.5, senders=(0, 2))
        if job.now >= 5.5 + 2.5 and job.now < 9.0:
            assert not job.logged("refused"), "the round's time is over, and its process runs"
    assert job.logged("refused") and job.now <= 12.0


def test_an_agent_that_names_another_process_says_nothing_of_the_registered_one() -> None:
    """Its node was given up, and its processes ran on behind a broken cable: those in their places may be lost, and their agent with them. Of a rank that
    has ended its own agent may name the next process, before that has come."""
    job = running()
    job.say(Vouch((1,), (999,)))
    assert job.state.members.table[1].named_at == -inf
    job.say(killed(1))
    job.say(Vouch((1,), (999,)))
    member = job.state.members.table[1]
    assert (member.named_at, member.vouched) == (job.now, -inf)
