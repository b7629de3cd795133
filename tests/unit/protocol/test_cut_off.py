"""The controller was cut off, and the first ranks' messages come again: whose silence counts."""

from __future__ import annotations

from math import inf

from tests.unit.protocol.bench import ControllerBench, report
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import Heartbeat, Phase

COMPUTE = Phase.COMPUTE
LEASE_S = 3.0


def messages_again_from(*ranks: int) -> ControllerBench:
    """No message came for a while, not so long that all became suspect; these ranks send now, and the others' leases end."""
    job = ControllerBench()
    job.wait(0.5)
    job.wait(1.0, senders=ranks)
    job.wait(1.7, senders=())
    job.say(*(Heartbeat(rank, COMPUTE, 1) for rank in ranks))
    job.wait(0.4, senders=ranks)
    assert job.now > 0.5 + LEASE_S
    return job


def test_whose_words_come_after_those_of_the_first_is_not_dead() -> None:
    """Connections that a network had cut find back one after the other: each tries again at its own moment."""
    job = messages_again_from(0)
    assert not job.logged("death_seen")
    job.wait(0.6)
    job.all_report(1)
    assert [line["rank"] for line in job.logged("cleared")] == [1, 2, 3] and job.at(Stage.RUNNING)


def test_most_ranks_have_a_lease_more_only_once() -> None:
    """They may have died together."""
    job = messages_again_from(0)
    job.wait(LEASE_S, senders=(0,))
    assert {line["rank"] for line in job.logged("death_seen")} == {1, 2, 3}


def test_half_of_the_ranks_that_go_silent_together_are_dead_after_a_lease() -> None:
    """A node of two: a longer wait would gain nothing."""
    job = messages_again_from(0, 1)
    assert {line["rank"] for line in job.logged("death_seen")} == {2, 3}


def test_a_rank_that_sends_now_and_then_does_not_keep_the_dead_alive() -> None:
    """Those whose leases end have had the lease more; a later message of another rank gives no third one."""
    job = ControllerBench()
    job.wait(0.5)
    for until_s in (1.8, 4.7):
        job.wait(until_s - job.now, senders=(0,))
        job.say(Heartbeat(1, COMPUTE, 1))
    assert not job.logged("death_seen")
    job.wait(0.6 + 2 * LEASE_S - job.now, senders=(0,))
    assert {line["rank"] for line in job.logged("death_seen")} == {2, 3}


def test_frequent_heartbeats_on_a_slow_network_do_not_look_like_a_cut() -> None:
    """Words that are under way for longer than a heartbeat are what that network always has: the silent one is dead after its lease."""
    job = ControllerBench(heartbeat_s=0.05)
    job.wait(0.2, senders=())
    job.wait(LEASE_S, senders=(0, 1, 2))  # 0.3 s ago, as the lease of the fourth ends
    assert {line["rank"] for line in job.logged("death_seen")} == {3}


def test_a_rank_that_was_only_silent_shows_that_the_controller_is_not_cut_off() -> None:
    """It is back while the other one writes, whose stream breaks and whose death no agent reports (seed 4942)."""
    job = ControllerBench(holders=((0, 1),), orphan_timeout_s=15.0)
    job.wait(6.5, senders=(0,))
    assert job.logged("death_seen")[0]["rank"] == 1
    job.say(report(0, job.state.freeze_id, Phase.DONE, 7))
    assert set(job.orders()) == {0}
    job.close(0)
    job.wait(6.5, senders=(1,))
    assert job.logged("death_seen")[-1]["rank"] == 0 and job.logged("cleared")[-1]["rank"] == 1
    job.say(report(1, job.state.freeze_id, Phase.DONE, 7))
    assert set(job.orders()) == {1} and not job.logged("refused")


def test_one_that_was_only_silent_and_is_again_does_not() -> None:
    """Then the controller may be cut off: the lease of the other one does not end before the orphan timeout."""
    job = ControllerBench(holders=((0, 1),), orphan_timeout_s=15.0)
    job.wait(6.5, senders=(0,))
    job.say(report(0, job.state.freeze_id, Phase.DONE, 7))
    job.wait(1.0, senders=(0, 1))
    job.close(0)
    job.wait(12.0, senders=())
    assert [line["rank"] for line in job.logged("death_seen")] == [1] and not job.logged("refused")
    job.wait(6.5, senders=(1,))
    assert [line["rank"] for line in job.logged("death_seen")] == [1, 0], "it is looked at again"


def test_where_no_rank_is_attached_leases_are_not_looked_at_again() -> None:
    """The first rank that attaches brings the next look."""
    job = ControllerBench(holders=((0, 1),), orphan_timeout_s=15.0)
    job.close(0, 1)
    job.wait(6.5, senders=())
    assert job.state.members.sweep_at == inf
