"""The controller was cut off, and hears the first ranks again: whose silence counts."""

from __future__ import annotations

from tests.unit.protocol.bench import ControllerBench
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import Heartbeat, Phase

COMPUTE = Phase.COMPUTE
LEASE_S = 3.0


def heard_again_from(*ranks: int) -> ControllerBench:
    """Nobody was heard for a while, not so long that all became suspect; these ranks are heard now, and the others' leases end."""
    job = ControllerBench()
    job.wait(0.5)
    job.wait(1.0, heard=ranks)
    job.wait(1.7, heard=())
    job.say(*(Heartbeat(rank, COMPUTE, 1) for rank in ranks))
    job.wait(0.4, heard=ranks)
    assert job.now > 0.5 + LEASE_S
    return job


def test_whose_words_come_after_those_of_the_first_is_not_dead() -> None:
    """Connections that a network had cut find back one after the other: each tries again at its own moment."""
    job = heard_again_from(0)
    assert not job.told("death_seen")
    job.wait(0.6)
    job.all_report(1)
    assert [line["rank"] for line in job.told("cleared")] == [1, 2, 3] and job.at(Stage.RUNNING)


def test_most_ranks_have_a_lease_more_only_once() -> None:
    """They may have died together."""
    job = heard_again_from(0)
    job.wait(LEASE_S, heard=(0,))
    assert {line["rank"] for line in job.told("death_seen")} == {1, 2, 3}


def test_half_of_the_ranks_that_go_silent_together_are_dead_after_a_lease() -> None:
    """A node of two: to wait longer would help nobody."""
    job = heard_again_from(0, 1)
    assert {line["rank"] for line in job.told("death_seen")} == {2, 3}


def test_a_rank_that_is_heard_now_and_then_does_not_keep_the_dead_alive() -> None:
    """Those whose leases end have had the lease more; that another of the many was heard since is no reason for a third one."""
    job = ControllerBench()
    job.wait(0.5)
    for until_s in (1.8, 4.7):
        job.wait(until_s - job.now, heard=(0,))
        job.say(Heartbeat(1, COMPUTE, 1))
    assert not job.told("death_seen")
    job.wait(0.6 + 2 * LEASE_S - job.now, heard=(0,))
    assert {line["rank"] for line in job.told("death_seen")} == {2, 3}


def test_frequent_heartbeats_on_a_slow_network_do_not_look_like_a_cut() -> None:
    """Words that are under way for longer than a heartbeat are what that network always has: the silent one is dead after its lease."""
    job = ControllerBench(heartbeat_s=0.05)
    job.wait(0.2, heard=())
    job.wait(LEASE_S, heard=(0, 1, 2))  # 0.3 s ago, as the lease of the fourth ends
    assert {line["rank"] for line in job.told("death_seen")} == {3}
