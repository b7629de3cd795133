"""Jobs with spare nodes that lose a node, in which a rare turn of events is sure to come. One seed is one job. Where `harmless` is True the job must
train on, whatever is arranged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.simulation.arranged_in_place import AT, STEPS, TIMES
from tests.simulation.job import Job
from tests.simulation.parted import cut_off, lose_node
from tests.simulation.scenario import Scenario
from tests.simulation.training import Layout, Training, even, ring

LEASE_S = TIMES.lease_s


def _calm(
    seed: int,
    layout: Layout | None = None,
    harmless: bool = True,
    standbys: int = 0,
    spares: int = 1,
    publish_first: bool = False,
) -> Scenario:
    """Return a job with spare nodes, without faults, in which nothing fails by itself."""
    rng = random.Random(f"seats {seed}")
    training = Training(layout or even(4), steps=STEPS, local_copy=False)
    times = replace(TIMES, publish_first=publish_first)
    job = Job(rng, training, times, agents=True, standbys=standbys, spares=spares)
    job.in_place.failing = 0.0
    job.slowest_s = rng.choice((0.001, 0.005))
    for process in job.ranks:  # by the second step each agent has reported
        process.slow_compute[1] = 0.3
    return Scenario(seed, job, harmless)


def _at(job: Job, moment: str, later_s: float, act: Callable[[], Any]) -> None:
    job.hook(moment, 1, lambda _: job.scheduler.after(later_s, act))


def _phase(seed: int) -> str:
    return f"{('COMPUTE', 'READY', 'UPDATING', 'DONE')[seed % 4]} {AT}"


def node_is_lost(seed: int) -> Scenario:
    """A node is lost in one of its phases, with one rank or two; some seeds: the step is published first."""
    scenario = _calm(seed, (even(4), ring(3), even(2, on_one_host=1))[seed % 3], publish_first=seed % 5 == 4)
    job = scenario.job
    _at(job, _phase(seed // 3), 0.0005 * (seed % 7), partial(lose_node, job, max(job.nodes)))
    return scenario


def node_is_back_at_once(seed: int) -> Scenario:
    """A node is cut off for about as long as it takes until it is given up, or until a spare one has its place; its processes run on."""
    scenario = _calm(seed, harmless=False, standbys=seed % 2)
    job = scenario.job
    _at(job, _phase(seed), 0.001 * (seed % 9), partial(cut_off, job, 1, LEASE_S + 0.01 * (seed % 40) - 0.1))
    for process in job.ranks:  # so that training is not over by then
        process.slow_compute[AT + 1] = 1.5
    return scenario


def node_is_back_later(seed: int) -> Scenario:
    """A node is cut off until long after the thaw: its processes come back to a job that trains on without them, and to its standbys, or another rank
    dies then."""
    scenario = _calm(seed, standbys=0 if seed % 2 else 1 + seed // 2 % 2)
    job = scenario.job
    _at(job, _phase(seed), 0.001 * (seed % 9), partial(cut_off, job, 1, LEASE_S + 0.8 + 0.05 * (seed % 20)))
    for process in job.ranks:  # so that training is not over by then
        process.slow_compute[STEPS - 1] = 1.5
    if seed % 2:
        job.hook(f"COMPUTE {STEPS}", 1, lambda _: job.kill(1))
    return scenario


def a_node_that_is_back_is_a_spare(seed: int) -> Scenario:
    """A node comes back after the thaw, and then the one that has its place is lost."""
    scenario = _calm(seed)
    job, back_s = scenario.job, LEASE_S + 0.8
    _at(job, f"COMPUTE {AT}", 0.001 * (seed % 9), partial(cut_off, job, 1, back_s))
    _at(job, f"COMPUTE {AT}", back_s + 0.5 + 0.02 * (seed % 10), partial(lose_node, job, 2))
    for process in job.ranks:
        process.slow_compute[STEPS - 1] = 2.5
    return scenario


def controller_dies_when_it_is_back(seed: int) -> Scenario:
    """A node comes back after the thaw, and then the controller dies: some of its processes come to the standby before those in their places. Where it
    learns of their ends before it knows the others, it takes these for dead: not in some seeds, in which their agent has ended."""
    scenario = _calm(seed, harmless=bool(seed % 2), standbys=1)
    job = scenario.job
    back_s = LEASE_S + 0.8
    if seed % 2:
        _at(job, f"COMPUTE {AT}", 0.0, partial(job.launchers[1].leave, 0.01))
    _at(job, f"COMPUTE {AT}", 0.001 * (seed % 9), partial(cut_off, job, 1, back_s))
    job.hook(
        f"COMPUTE {AT}",
        1,
        lambda _: job.scheduler.after(back_s + 0.01 * (seed % 20) - 0.1, job.controllers[0].kill),
    )
    for process in job.ranks:
        process.slow_compute[STEPS - 1] = 1.5
    return scenario


def those_in_its_place_die_with_the_controller(seed: int) -> Scenario:
    """The processes of a node that is cut off have come to the standby beside them, and then the controller dies with those in their places."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job = scenario.job
    _at(job, f"COMPUTE {AT}", 0.0, partial(job.launchers[1].leave, 0.01))
    _at(job, f"COMPUTE {AT}", 0.0, partial(cut_off, job, 1, LEASE_S + 0.8, (1,)))

    def strike() -> None:
        job.controllers[0].kill()
        for rank in (2, 3):
            if job.ranks[rank].node != 1:
                job.kill(rank)

    job.hook(f"COMPUTE {AT}", 1, lambda _: job.scheduler.after(LEASE_S + 0.2 + 0.012 * (seed % 30), strike))
    for process in job.ranks:
        process.slow_compute[STEPS - 1] = 1.5
    return scenario


def controller_dies_meanwhile(seed: int) -> Scenario:
    """The controller dies while a lost node's ranks are started elsewhere; some seeds: the node comes back about then."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job = scenario.job
    if seed % 2:
        _at(job, _phase(seed // 2), 0.0, partial(cut_off, job, 1, LEASE_S + 0.05 * (seed % 40)))
    else:
        _at(job, _phase(seed // 2), 0.0, partial(lose_node, job, 1))
    moment = ("take_places_sent", "replacement started", "left", "filled")[seed // 4 % 4]
    _at(job, moment, 0.001 * (seed % 5), partial(job.controllers[0].kill))
    return scenario


def standby_is_on_its_side(seed: int) -> Scenario:
    """A node is cut off with a standby beside it that takes over there, while the others go on with a spare node."""
    scenario = _calm(seed, ring(3), harmless=False, standbys=2)
    job = scenario.job
    _at(job, _phase(seed), 0.0005 * (seed % 7), partial(cut_off, job, 2, 1.0 + 0.1 * (seed % 40), (2,)))
    for process in job.ranks:
        process.slow_compute[STEPS - 1] = 1.0 + 0.1 * (seed % 20)
    return scenario


def network_is_back_as_the_others_are_given_up(seed: int) -> Scenario:
    """A node is cut off with the standby, which waits there for the ranks of the others, while these write their step with their own controller. There is
    no spare node."""
    scenario = _calm(seed, ring(3), harmless=False, standbys=1, spares=0)
    job = scenario.job
    _at(
        job,
        _phase(seed),
        0.0005 * (seed % 7),
        partial(cut_off, job, 2, LEASE_S * (2.5 + 0.01 * (seed // 2 % 100)), (1,)),
    )
    for process in job.ranks:
        process.slow_compute[STEPS - 1] = 6 * LEASE_S if seed % 2 else 0.0
    for process in job.ranks[:2]:
        process.slow_work["write"] = 4 * LEASE_S
    return scenario


def order_to_end_is_held_by_the_network(seed: int) -> Scenario:
    """The same; the network is gone again as the standby has learned that the other controller lives, and back as it gives the ranks up at last."""
    scenario = network_is_back_as_the_others_are_given_up(seed)
    job = scenario.job
    away_s = LEASE_S * (1.8 + 0.01 * (seed // 2 % 60))
    for process in job.ranks[:2]:
        process.slow_work["write"] = 8 * LEASE_S
    job.hook("an earlier controller has answered", 1, lambda _: cut_off(job, 2, away_s, (1,)))
    return scenario


def controller_dies_behind_a_standby_that_lost_processes_came_to(seed: int) -> Scenario:
    """A node is cut off with the only standby, a spare one has its place, and its processes come to that standby. Then a rank dies, and the controller
    in that fault."""
    scenario = _calm(seed, ring(3), harmless=False, standbys=1)
    job = scenario.job
    _at(job, _phase(seed), 0.0005 * (seed % 7), partial(cut_off, job, 2, 1.2 + 0.02 * (seed % 40), (1,)))
    for process in job.ranks:
        process.slow_compute[AT + 2] = 8 * LEASE_S
    later_s = LEASE_S * (0.05 + 0.02 * (seed % 100))

    def fault() -> None:
        job.hook("freeze_sent", 1, lambda _: job.scheduler.after(0.02, job.controllers[0].kill))
        job.kill(1)

    if seed % 2:  # should it ever take over with them alone
        job.hook("took_over", 1, lambda _: job.scheduler.after(0.01, fault))
        return scenario
    job.hook("takeover_began", 1, lambda _: job.scheduler.after(later_s, fault))
    return scenario


def rank_0s_node_is_lost(seed: int) -> Scenario:
    """Rank 0's node is lost, or cut off and back."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    lost = partial(lose_node, job, 0) if seed % 2 else partial(cut_off, job, 0, LEASE_S + 0.05 * (seed % 20))
    _at(job, _phase(seed), 0.001 * (seed % 9), lost)
    for process in job.ranks:
        process.slow_compute[AT + 1] = 1.5
    return scenario


def two_nodes_and_one_spare(seed: int) -> Scenario:
    """Two nodes are lost together, and there is one spare."""
    scenario = _calm(seed, ring(4, replicas=3), harmless=False)
    job = scenario.job
    for node in (1, 3):
        _at(job, _phase(seed), 0.001 * (seed % 5), partial(lose_node, job, node))
    return scenario


def two_nodes_one_after_the_other(seed: int) -> Scenario:
    """Two nodes are lost in turn, and there are two spares; or the spare that has taken a node's place is lost, and another takes its."""
    scenario = _calm(seed, ring(3), spares=2)
    job = scenario.job
    _at(job, f"COMPUTE {AT}", 0.0, partial(lose_node, job, 1))
    _at(job, f"DONE {AT + 1}", 0.001 * (seed % 5), partial(lose_node, job, 2 if seed % 2 else 3))
    return scenario


def lost_again_as_it_sits_down(seed: int) -> Scenario:
    """The spare node is lost, too, before all have regrouped."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    _at(job, f"COMPUTE {AT}", 0.0, partial(lose_node, job, 1))
    moment = ("take_places_sent", "replacement started", "replacement_came", "filled")[seed % 4]
    _at(job, moment, 0.002 * (seed % 10), partial(lose_node, job, 2))
    return scenario


ARRANGED = (
    node_is_lost, node_is_back_at_once, node_is_back_later, controller_dies_when_it_is_back, those_in_its_place_die_with_the_controller, controller_dies_meanwhile, standby_is_on_its_side, network_is_back_as_the_others_are_given_up, order_to_end_is_held_by_the_network, controller_dies_behind_a_standby_that_lost_processes_came_to,
    a_node_that_is_back_is_a_spare, rank_0s_node_is_lost, two_nodes_and_one_spare, two_nodes_one_after_the_other, lost_again_as_it_sits_down,
)  # fmt: skip
