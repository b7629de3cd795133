"""Long jobs that lose one controller after the other, and what is wrong on purpose with how they are replaced."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

import pytest

from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Training, even
from ttp.controller.core import stages
from ttp.controller.core.facts.events import Effect
from ttp.controller.core.facts.state import ControllerState
from ttp.controller.core.ranks import standbys
from ttp.processor.core import failover
from ttp.processor.core import transitions as tables
from ttp.processor.core.events import ControllerEnded, ControllersFound
from ttp.processor.core.state import RankMode
from ttp.proto.messages import CauseKind

Patch = pytest.MonkeyPatch
LONG_STEPS = 650
"""Longer than all that happens to a job here."""


def one_after_the_other(seed: int, standbys: int = 1, ranks: int = 4) -> Scenario:
    """Return a long job without faults."""
    training = Training(even(ranks), steps=LONG_STEPS, local_copy=False)
    return Scenario(seed, Job(random.Random(seed), training, Times(), agents=True, standbys=standbys))


def kill_the_controller(job: Job) -> None:
    """The one that leads."""
    job.controller.kill()


def leader_dies(seed: int) -> Scenario:
    """The controller is killed, and its standby a good while later."""
    scenario = one_after_the_other(seed)
    for moment in (0.5, 4.0):
        scenario.job.scheduler.at(moment, partial(kill_the_controller, scenario.job))
    return scenario


def idle_standby_dies(seed: int) -> Scenario:
    scenario = one_after_the_other(seed)
    scenario.job.scheduler.at(0.5, scenario.job.controllers[1].kill)
    return scenario


def first_asked_rank_is_mute(seed: int) -> Scenario:
    scenario = leader_dies(seed)
    scenario.job.standbys.mute = {0}
    return scenario


def first_asked_rank_is_unable(seed: int) -> Scenario:
    scenario = leader_dies(seed)
    scenario.job.standbys.unable = {0}
    return scenario


def word_of_a_standby_is_missed(seed: int) -> Scenario:
    """The standby is lost and replaced; the controller dies when one rank or some know the new one."""
    scenario = one_after_the_other(seed)
    job = scenario.job
    job.scheduler.at(0.5, job.controllers[1].kill)
    job.hook("got StandbyList", 1 + seed % 3, lambda rank: job.controllers[0].kill())
    return scenario


def standby_comes_as_the_leader_dies(seed: int) -> Scenario:
    """A rank is starting a standby in a lost one's place when the controller dies. The standby that is next is stopped for longer than
    a lease, then there is one more, to which all come together."""
    scenario = one_after_the_other(seed, standbys=3, ranks=2)
    job = scenario.job
    job.scheduler.at(0.5, job.controllers[3].kill)

    def die(rank: int) -> None:
        job.controllers[0].kill()
        job.controllers[1].pause(1.5 * job.times.lease_s)

    job.hook("got StartStandby", 1, die)
    return scenario


def raises_as_the_leader_dies(seed: int) -> Scenario:
    """Rank 0 raises, and the controller is killed when it has received the report."""
    scenario = one_after_the_other(seed)
    scenario.harmless = False
    job = scenario.job
    process = job.ranks[0]
    job.hook("READY 4", 1, lambda rank: process.run(partial(process.fault, CauseKind.EXCEPTION, "bad batch")))
    job.hook("fault_reported", 1, lambda rank: job.controllers[0].kill())
    return scenario


def all_controllers_die(seed: int) -> Scenario:
    scenario = one_after_the_other(seed, 1 + seed % 2)

    def kill_all() -> None:
        for controller in scenario.job.controllers:
            controller.kill()

    scenario.job.scheduler.at(0.5, kill_all)
    return scenario


# --- wrong on purpose ---


def lost_controllers_are_not_replaced(patch: Patch) -> None:
    patch.setattr(stages, "restore", lambda state, now, out: state)


def new_standbys_are_sent_to_agents_only(patch: Patch) -> None:
    def wrong(state: ControllerState, addresses: Iterable[str], out: list[Effect]) -> ControllerState:
        return standbys.learn_successors(state, addresses, out)

    patch.setattr(standbys, "spread", wrong)


def standbys_end_unseen(patch: Patch) -> None:
    patch.setitem(tables.TRANSITIONS, (RankMode.TRAINING, ControllerEnded), tables.late)


def mute_ranks_are_waited_for(patch: Patch) -> None:
    """No other rank is asked when one does not answer."""
    restore = standbys.restore

    def wrong(state: ControllerState, now: float, out: list[Effect]) -> ControllerState:
        return state if state.restoring.asked >= 0 else restore(state, now, out)

    patch.setattr(stages, "restore", wrong)


def unable_ranks_are_asked_again(patch: Patch) -> None:
    """The rank that could not start a standby is asked again and again."""
    able = standbys._able
    patch.setattr(standbys, "_able", lambda state, passed: able(state, frozenset()))


def ranks_look_for_no_controllers(patch: Patch) -> None:
    patch.setitem(tables.TRANSITIONS, (RankMode.TRAINING, ControllersFound), tables.late)


def new_standby_is_turned_to_at_once(patch: Patch) -> None:
    """The rank that has started it leaves the order in which standbys take over."""
    patch.setattr(failover, "lost_all", lambda state, now: True)


def rank_0_starts_no_controller(patch: Patch) -> None:
    patch.setattr(failover, "_starts_one", lambda state, now: False)
