"""Jobs whose ranks are preempted while no controller leads them, and what must not be done then: wrong variants of it."""

from __future__ import annotations

import random
from functools import partial
from math import inf

import pytest

from tests.simulation import boundaries
from tests.simulation.job import Job
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Training, even
from ttp.controller.core.facts.state import Stage
from ttp.optim.step_agreement.participation import Ending
from ttp.processor.core import machine, transitions
from ttp.processor.core import transitions as tables
from ttp.processor.core.events import Effect, Event, Received, SavedAlone, SavesAlone
from ttp.processor.core.state import ProcessorState, RankMode
from ttp.proto.frozen import replace
from ttp.proto.messages import EXIT_CODE_PREEMPTED

Patch = pytest.MonkeyPatch
STEPS = 400
"""More than are done before all is over."""
LOST_S = 0.5
"""When the controllers are lost."""


def _job(seed: int, standbys: int = 0) -> Scenario:
    training = Training(even(4), steps=STEPS, local_copy=False)
    job = Job(random.Random(seed), training, Times(), agents=True, standbys=standbys)
    scenario = Scenario(seed, job)
    scenario.harmless = False
    return scenario


def _notify(job: Job, seed: int, at_s: float) -> None:
    """One rank is preempted, or all are."""
    for process in job.ranks if seed % 2 else (job.ranks[seed // 2 % 4],):
        job.scheduler.at(at_s, partial(process.run_beside, process.notice))


def killed(seed: int) -> Scenario:
    """The only controller is killed; SIGTERM comes up to half a second later, or up to a tenth before."""
    scenario = _job(seed)
    job = scenario.job
    job.must_save = "alone"
    job.scheduler.at(LOST_S, job.controllers[0].kill)
    _notify(job, seed, LOST_S + random.Random(seed).uniform(0.0, 0.5))
    return scenario


def killed_in_the_notice(seed: int) -> Scenario:
    """Ranks wait behind their step when the controller is killed, before it has frozen any: they train on by one step."""
    scenario = _job(seed)
    job = scenario.job

    def kill(rank: int) -> None:
        job.must_save = "alone" if job.controllers[0].state.stage is Stage.RUNNING else ""
        job.controllers[0].kill()

    _notify(job, seed, LOST_S)
    job.hook("boundary", 1 + seed % 4, kill)
    return scenario


def cut_off(seed: int) -> Scenario:
    """Nothing reaches the only controller any more, without an error: the ranks find out after a lease, and know after two more."""
    scenario = _job(seed)
    job = scenario.job
    job.must_save = "alone"
    job.scheduler.at(LOST_S, partial(job.controllers[0].cut, 40.0))
    _notify(job, seed, LOST_S + random.Random(seed).uniform(0.0, 3.0))
    return scenario


def rank_0_is_unable(seed: int) -> Scenario:
    """All controllers are killed, and rank 0 cannot start one."""
    scenario = _job(seed, standbys=1)
    job = scenario.job
    job.must_save = "alone"
    job.standbys.unable = {0, 1, 2, 3}

    def kill_all() -> None:
        for controller in job.controllers:
            controller.kill()

    job.scheduler.at(LOST_S, kill_all)
    _notify(job, seed, LOST_S + 0.2 + random.Random(seed).uniform(0.0, 1.0))
    return scenario


def comes_back(seed: int) -> Scenario:
    """The controller is cut off, and reached again shortly before, in or after the save, which takes longer than a dump in every other
    job: one of both saves a step."""
    scenario = _job(seed)
    job, rng = scenario.job, random.Random(seed)
    job.must_save = "any"
    for process in job.ranks if seed % 2 else ():
        process.slow_work["alone"] = 5.0
    job.scheduler.at(LOST_S, partial(job.controllers[0].cut, 1.9 + rng.uniform(0.0, 0.4)))
    _notify(job, seed, LOST_S + 1.9 + rng.uniform(0.0, 0.2))
    return scenario


def some_are_led(seed: int) -> Scenario:
    """The controller is killed; two ranks come to the standby and two cannot. It waits for those for a lease, and then it saves."""
    scenario = _job(seed, standbys=1)
    job = scenario.job
    job.standbys.unable = {0, 1, 2, 3}
    for rank in (2, 3):
        process = job.ranks[rank]
        process.was_stopped = True
        job.scheduler.at(LOST_S, partial(setattr, process.route, "rejects", True))
    job.scheduler.at(LOST_S, job.controllers[0].kill)
    _notify(job, seed, LOST_S + random.Random(seed).uniform(0.15, 0.5))
    return scenario


def full_disks(seed: int) -> Scenario:
    """The controller is killed, and no directory takes the checkpoint."""
    scenario = killed(seed)
    job = scenario.job
    job.must_save = ""
    job.disk.full = set(job.roots)
    return scenario


def full_disks_as_a_controller_comes(seed: int) -> Scenario:
    """All controllers are killed, no directory takes the checkpoint, and the ranks are preempted about when rank 0 starts a controller."""
    scenario = _job(seed, standbys=1)
    job = scenario.job
    job.disk.full = set(job.roots)
    for controller in job.controllers:
        job.scheduler.at(LOST_S, controller.kill)
    _notify(job, seed, LOST_S + random.Random(seed).uniform(0.2, 0.45))
    return scenario


def first_disk_is_full(seed: int) -> Scenario:
    scenario = killed(seed)
    scenario.job.disk.full = {scenario.job.roots[0]}
    return scenario


def a_rank_dies_in_the_save(seed: int) -> Scenario:
    """No step may be taken for saved that is not on disk."""
    scenario = killed(seed)
    job = scenario.job
    job.must_save = ""
    delay_s = random.Random(seed).uniform(0.0, 0.06)
    job.hook("saving alone", 1 + seed % 4, lambda rank: job.scheduler.after(delay_s, partial(job.kill, (rank + 1) % 4)))
    return scenario


def a_rank_stops_in_the_save(seed: int) -> Scenario:
    """For good, and no controller sees it: the others do not wait for ever."""
    scenario = killed(seed)
    job = scenario.job
    job.must_save = ""
    job.hook("saving alone", 1 + seed % 4, lambda rank: job.stop((rank + 1) % 4, None))
    return scenario


# --- wrong on purpose ---


def some_ranks_without_a_controller_are_enough(patch: Patch) -> None:
    def wrong(notices: float, unled: float, size: int, world: int) -> Ending:
        return Ending.GO_ON if not notices else Ending.SAVE if unled else Ending.WAIT

    patch.setattr(boundaries, "ending_of", wrong)


def ranks_with_a_controller_save_alone(patch: Patch) -> None:
    """No rank asks who is led."""

    def wrong(notices: float, unled: float, size: int, world: int) -> Ending:
        return Ending.SAVE if notices else Ending.GO_ON

    patch.setattr(boundaries, "ending_of", wrong)


def a_rank_saves_where_it_alone_knows(patch: Patch) -> None:
    """It looks at its own notice and its own lack of a controller, not at the sums: the others are not behind the step."""

    def wrong(self: boundaries.Boundary, step: int) -> Ending:
        gate = self.process.gate
        return Ending.SAVE if gate.notice and gate.unled else Ending.GO_ON

    patch.setattr(boundaries.Boundary, "ending", wrong)


def a_failed_save_counts(patch: Patch) -> None:
    """The process exits as if its step were on disk."""

    def wrong(state: ProcessorState, event: SavedAlone, now: float, out: list[Effect]) -> ProcessorState:
        return transitions._exit(state, EXIT_CODE_PREEMPTED, "saved", out)

    for standing in (RankMode.TRAINING, RankMode.FROZEN):
        patch.setitem(tables.TRANSITIONS, (standing, SavedAlone), wrong)


def lost_controllers_are_waited_for(patch: Patch) -> None:
    """Ranks do not contribute that every controller is lost."""
    patch.setattr(transitions, "lost_all", lambda state, now: False)


def ranks_wait_behind_a_step_for_lost_controllers(patch: Patch) -> None:
    """They contribute it, and those that wait behind a step already do not go on to the next."""
    without = transitions.without_controller

    def wrong(state: ProcessorState, now: float, out: list[Effect]) -> ProcessorState:
        return state if state.parked else without(state, now, out)

    patch.setattr(transitions, "without_controller", wrong)


def ranks_that_save_alone_obey_a_controller(patch: Patch) -> None:
    """One that had come back before they began."""
    transition = machine.transition

    def wrong(state: ProcessorState, event: Event, now: float) -> tuple[ProcessorState, tuple[Effect, ...]]:
        if not (state.alone and isinstance(event, Received)):
            return transition(state, event, now)
        after, effects = transition(replace(state, alone=False), event, now)
        return replace(after, alone=True), effects

    patch.setattr(machine, "transition", wrong)


def ranks_that_save_alone_turn_to_controllers(patch: Patch) -> None:
    """One that is back may lead them while they save."""

    def wrong(state: ProcessorState, event: SavesAlone, now: float, out: list[Effect]) -> ProcessorState:
        return state

    for standing in (RankMode.TRAINING, RankMode.FROZEN):
        patch.setitem(tables.TRANSITIONS, (standing, SavesAlone), wrong)


def a_save_alone_has_no_bound(patch: Patch) -> None:
    """A rank that is stopped in it holds all others up."""
    begin = transitions.saves_alone

    def wrong(state: ProcessorState, event: SavesAlone, now: float, out: list[Effect]) -> ProcessorState:
        return replace(begin(state, event, now, out), answer_by=inf)

    for standing in (RankMode.TRAINING, RankMode.FROZEN):
        patch.setitem(tables.TRANSITIONS, (standing, SavesAlone), wrong)
