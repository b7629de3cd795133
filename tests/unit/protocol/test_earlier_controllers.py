"""What a controller that takes over asks and orders the earlier ones, and how long it waits for their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, only
from tests.unit.protocol.test_takeover import coming, standby
from ttp.controller.core.facts import events as ev
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import WorkerExit


def test_when_the_first_rank_comes_all_earlier_controllers_are_looked_for() -> None:
    """And no later one."""
    job = standby()
    job.say(coming(2))
    assert only(job.effects, ev.LookFor) == [ev.LookFor(("c0",))] and not only(job.effects, ev.Supersede)
    assert job.at(Stage.GATHERING)
    job.say(coming(1))
    assert not only(job.effects, ev.LookFor)
    second = ControllerBench(assembled=False, standby=2, address="c2")
    second.say(coming(2))
    assert only(second.effects, ev.LookFor) == [ev.LookFor(("c0", "c1"))]


def test_an_earlier_controller_that_lives_is_to_end_and_its_ranks_have_a_lease_to_come() -> None:
    """One that was cut off, and ended just before this one gave its ranks up, would leave no controller that has what they hold written."""
    job = standby()
    job.say(coming(2))
    lease_s = job.state.settings.lease_s
    job.wait(1.9 * lease_s, senders=(2,))
    assert job.at(Stage.GATHERING)
    job.take(ev.EarlierLives("c0"))
    assert only(job.effects, ev.Supersede) == [ev.Supersede("c0", 0)]
    job.wait(1.5 * lease_s, senders=(2,))  # two leases, as those that came do not cover
    assert job.at(Stage.GATHERING) and not job.logged("death_seen")
    job.say(*(coming(rank) for rank in (0, 1, 3)))
    assert job.logged("took_over")[0]["absent"] == ()


def test_a_controller_to_which_only_a_dead_rank_has_come_ends() -> None:
    """Its agent was faster than what the rank had sent."""
    job = standby()
    job.say(WorkerExit(2, 102, "signal SIGKILL", 0.0), coming(2))
    assert job.at(Stage.GATHERING)
    job.wait(2 * job.state.settings.orphan_timeout_s, senders=())
    assert job.at(Stage.OVER)


def test_answers_postpone_a_takeover_until_a_bound() -> None:
    """The order may be lost again and again."""
    job = standby()
    job.say(coming(2))
    settings = job.state.settings
    for _ in range(100):
        if not job.at(Stage.GATHERING):
            break
        job.take(ev.EarlierLives("c0"))
        job.wait(0.3 * settings.lease_s, senders=(2,))
    assert settings.orphan_timeout_s <= job.now <= settings.orphan_timeout_s + 2 * settings.lease_s
    assert job.logged("took_over")[0]["absent"] == (0, 1, 3)


def test_a_controller_that_a_later_rank_alone_knows_is_looked_for_too() -> None:
    job = standby()
    job.say(replace(coming(2), controllers=("c0", "c1")))
    job.say(replace(coming(1), controllers=("c0", "x", "c1")))
    assert only(job.effects, ev.LookFor) == [ev.LookFor(("x",))]
    job.say(replace(coming(0), controllers=("c0", "x", "c1")))
    assert not only(job.effects, ev.LookFor)


@pytest.mark.parametrize("came", [(1, 2, 3), (1, 3)])
def test_one_that_answers_after_the_takeover_is_to_end_only_if_those_that_came_cover(came: tuple[int, ...]) -> None:
    """It leads on with what they lack."""
    job = standby()
    job.say(*(coming(rank) for rank in came))
    for _ in range(3):
        job.wait(job.state.settings.lease_s, senders=came)
        if not job.at(Stage.GATHERING):
            break
    assert job.at(Stage.FREEZING)
    job.take(ev.EarlierLives("c0"))
    assert bool(only(job.effects, ev.Supersede)) == (len(came) == 3)
