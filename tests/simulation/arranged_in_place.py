"""Jobs that recover without a checkpoint, in which a rare turn of events is sure to come. One seed is one job. Where `harmless` is True the
job must train on, whatever is arranged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from math import inf

from tests.simulation.held import Hold
from tests.simulation.in_place import LIMIT_S
from tests.simulation.job import Job
from tests.simulation.lost import lose
from tests.simulation.network import DOWN
from tests.simulation.outliving import delay_results
from tests.simulation.rank import Rank
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Layout, Training, even, ring
from ttp.proto.messages import CauseKind, FaultReport, Regroup

AT = 3
"""The step in which something happens first."""
STEPS = 6
TIMES = Times(in_place_s=LIMIT_S)


def _calm(
    seed: int, layout: Layout | None = None, harmless: bool = True, standbys: int = 0, times: Times = TIMES
) -> Scenario:
    """Return a job without faults in which nothing fails by itself."""
    rng = random.Random(f"in place {seed}")
    training = Training(layout or even(4), steps=STEPS, local_copy=False)
    job = Job(rng, training, times, agents=True, standbys=standbys)
    job.in_place.failing = 0.0
    job.slowest_s = rng.choice((0.001, 0.005))
    return Scenario(seed, job, harmless)


def _when(job: Job, name: str, rank: int, act: Callable[[], object]) -> None:
    """Act when this first happens to this rank."""
    seen: list[int] = []

    def look(whom: int) -> None:
        if whom == rank and not seen:
            seen.append(whom)
            act()

    for count in range(1, 2 * len(job.everybody) + 1):
        job.hook(name, count, look)


def _kill(job: Job, moment: str, rank: int, later_s: float = 0.0) -> None:
    job.hook(moment, 1, lambda _: job.scheduler.after(later_s, partial(job.kill, rank)))


def _raise(job: Job, rank: int) -> None:
    process = job.ranks[rank]
    process.run(partial(process.fault, CauseKind.EXCEPTION, "ValueError: bad batch"))


def one_dies(seed: int) -> Scenario:
    """A rank dies in one of its phases."""
    scenario = _calm(seed, (even(2), even(4), ring(3))[seed % 3])
    job = scenario.job
    phase = ("COMPUTE", "READY", "UPDATING", "DONE")[seed // 3 % 4]
    _kill(job, f"{phase} {AT}", seed % len(job.everybody), 0.0005 * (seed % 7))
    return scenario


def one_raises(seed: int) -> Scenario:
    """A rank raises outside its update, once: it keeps its process, and nothing is reported of it afterwards."""
    scenario = _calm(seed, (even(2), even(4), ring(3))[seed % 3])
    job = scenario.job
    job.hook(f"{('COMPUTE', 'READY')[seed // 3 % 2]} {AT}", 1 + seed % 2, lambda rank: _raise(job, rank))
    return scenario


def the_last_step_is_rolled_forward(seed: int) -> Scenario:
    """A rank dies when one rank alone has begun the last update: what follows the recovery is the end of the training."""
    scenario = _calm(seed)
    job = scenario.job
    delay_results(job, random.Random(seed), [0, 1], STEPS)
    _kill(job, f"UPDATING {STEPS}", 3, 0.001)
    return scenario


def dies_when_it_has_regrouped(seed: int) -> Scenario:
    """After the last collective of the regrouping one of the ranks dies, before the answer of another has arrived."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)

    def strike(_: int) -> None:
        job.ranks[1].route.slowest_s = 0.5
        job.scheduler.after(0.03, partial(job.kill, 0))

    job.hook("filled", 4, strike)
    return scenario


def dies_while_another_rolls_forward(seed: int) -> Scenario:
    """A rank dies that had the step when it was decided; another process has come in its place, and the training thread of a third comes out of
    nothing: the step is written."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    delay_results(job, random.Random(seed), [0], AT)
    job.hook(f"DONE {AT}", 3, lambda _: job.kill(1))
    job.holds["roll"] = Hold(longest_s=0.1)
    job.hook("rolling", 1, lambda _: job.kill(2))
    job.hook("stage regrouping", 1, lambda _: setattr(job.ranks[0], "stuck", True))
    return scenario


def last_holder_dies_while_another_rolls_forward(seed: int) -> Scenario:
    """Of two that hold a shard one dies in training, and the other when the step is decided."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    delay_results(job, random.Random(seed), [0], AT)
    job.hook(f"DONE {AT}", 3, lambda _: job.kill(3))
    job.holds["roll"] = Hold(longest_s=0.1)
    job.hook("rolling", 1, lambda _: job.kill(1))
    return scenario


def raises_and_the_other_holder_dies(seed: int) -> Scenario:
    """Of two that hold a shard one raises, and the other dies while all regroup."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    job.hook(f"{('COMPUTE', 'READY')[seed % 2]} {AT}", 4, lambda _: _raise(job, 3))
    _kill(job, "stage regrouping", 1, 0.001 * (seed % 20))
    return scenario


def last_holder_dies_beside_a_replacement(seed: int) -> Scenario:
    """When a replacement has come, and holds nothing yet, the other holder of its shard dies."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    _kill(job, "replacement_came", 1, 0.0005 * (seed % 20))
    return scenario


def controller_dies_meanwhile(seed: int) -> Scenario:
    """While ranks regroup the controller dies, and a standby takes over."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job = scenario.job
    _kill(job, f"{('COMPUTE', 'UPDATING')[seed % 2]} {AT}", 3)
    job.hook("left", 1 + seed % 3, lambda _: job.controllers[0].kill())
    return scenario


def one_has_no_order_when_the_controller_dies(seed: int) -> Scenario:
    """All ranks live, one of them in another process, and one has not received the order to regroup, for which all others wait; some seeds: it
    was rolled forward before. Then the controller dies."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job, rank = scenario.job, seed % 3
    if seed % 2:
        delay_results(job, random.Random(seed), [0, 1, 2], AT)
        job.hook(f"DONE {AT}", 1, lambda _: job.kill(3))
    else:
        _kill(job, f"COMPUTE {AT}", 3)
    job.hook("stage freezing", 1, lambda _: lose(job, rank, Regroup))
    _when(job, "left", 3, job.controllers[0].kill)
    return scenario


def controller_dies_behind_it(seed: int) -> Scenario:
    """Some steps after a recovery the controller dies: the next one finds a job in which nothing is wrong."""
    scenario = _calm(seed, standbys=1)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.hook("regrouped", 1, lambda _: job.scheduler.after(0.4 + 0.002 * (seed % 20), job.controllers[0].kill))
    for process in job.ranks:  # so that training is not over by then
        process.slow_compute[STEPS - 1] = 1.0
    return scenario


def order_is_carried_out_late(seed: int) -> Scenario:
    """An agent takes long over an order to replace a process, and the controller is cut off before a rank has its order. That of the next one is
    carried out at once; when the time for the first has come, the process in that place has finished."""
    scenario = _calm(seed, standbys=1)
    job = scenario.job
    _kill(job, f"COMPUTE {STEPS}", 3)

    def strike(_: int) -> None:
        job.launchers[job.nodes[3]].replacements.slower_s = 1.0 + 0.02 * (seed % 20)
        job.scheduler.after(0.0, partial(job.controllers[0].cut, 1.5))

    job.hook("stage regrouping", 1, strike)
    return scenario


def noticed_meanwhile(seed: int) -> Scenario:
    """A rank gets a preemption notice while it regroups, and its report is lost."""
    scenario = _calm(seed, harmless=False)
    job, rank = scenario.job, seed % 3
    _kill(job, f"COMPUTE {AT}", 3)

    def notice() -> None:
        lose(job, rank, FaultReport)
        process = job.ranks[rank]
        process.run_beside(process.notice)

    _when(job, "left", rank, notice)
    job.must_save = "any"
    return scenario


def cannot_be_regrouped(seed: int) -> Scenario:
    """The training thread of a rank does not come out of its step: the step is written, also by that rank, which alone holds a shard."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    job.ranks[1].slow_compute[AT] = inf
    _kill(job, f"COMPUTE {AT}", 3, 0.02 + 0.001 * (seed % 10))
    return scenario


def regroups_after_all_beside_its_write(seed: int) -> Scenario:
    """A training thread comes out of its step when the time to regroup is over and the step is being written: all regroup after all, one beside a
    long write of its own. Then the controller dies, and all ranks live."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    job.in_place.slow_to_leave[seed % 3] = LIMIT_S + 0.05 + 0.001 * (seed % 20)
    job.holds["write"] = Hold(progresses=True)
    job.hook("filled", len(job.everybody), lambda _: job.scheduler.after(0.1, job.controllers[0].kill))
    return scenario


def training_returns_in_front_of_it(seed: int) -> Scenario:
    """Behind the last step a rank raises, and the training of another returns when the order to regroup has come; some seeds: from then on
    nothing of the controller arrives, and a standby takes over."""
    scenario = _calm(seed, harmless=False, standbys=1)
    job = scenario.job
    for process in job.ranks:  # behind the last step, before training returns: an evaluation
        process.pauses[STEPS + 1] = 1.0
    job.hook(f"DONE {STEPS}", 4, lambda _: job.scheduler.after(0.01, partial(_raise, job, 3)))

    def return_(process: Rank) -> None:
        process.leave_training()
        process.soon(0.0005, process.end_training)

    _when(job, "got Regroup", 1, partial(return_, job.ranks[1]))
    if seed % 2:
        job.hook("got Regroup", 4, lambda _: job.controllers[0].cut_one_way(DOWN, 3.0))
    return scenario


def order_is_lost(seed: int) -> Scenario:
    """A rank loses its order to regroup, in one of two ways."""
    scenario = _calm(seed)
    job, rank = scenario.job, seed % 3
    _kill(job, f"COMPUTE {AT}", 3)
    if seed % 2:
        job.hook("stage freezing", 1, lambda _: lose(job, rank, Regroup))
    else:
        job.hook("stage regrouping", 1, lambda _: job.drop_stream(rank))
    return scenario


def in_a_recovery(seed: int, kind: type) -> Scenario:
    """A message of a rank that stays is lost."""
    scenario = _calm(seed)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)
    lose(job, seed % 3, kind)
    return scenario


def dies_again_and_again(seed: int) -> Scenario:
    """In every try of a step a rank dies."""
    scenario = _calm(seed, even(2), harmless=False)
    job = scenario.job

    def strike(_: int) -> None:
        job.hook(f"COMPUTE {AT}", 2, strike)
        job.scheduler.after(0.001, partial(job.kill, 1))

    job.hook(f"COMPUTE {AT}", 1, strike)
    return scenario


def fills_differ(seed: int) -> Scenario:
    """What a replacement is given is not what the others hold."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    _kill(job, f"COMPUTE {AT}", 3)

    def damage() -> None:
        job.ranks[3].replica.values["g1"] += 1

    _when(job, "filled", 3, damage)
    return scenario


def stopped_in_front_of_its_update(seed: int) -> Scenario:
    """A process is stopped when others have begun an update that it may begin too, and runs again a while after its lease."""
    scenario = _calm(seed, ring(4, replicas=3), harmless=False)
    job = scenario.job
    job.ranks[3].late_results[AT] = 0.3
    job.hook(f"UPDATING {AT}", 1, lambda _: job.stop(3, 0.62 + 0.01 * (seed % 20)))
    return scenario


def rank_0_dies_with_its_controller(seed: int) -> Scenario:
    """At the same moment, on the only node: a standby leads that rank 0 has never come to."""
    scenario = _calm(seed, even(4, on_one_host=4), standbys=1)
    job = scenario.job

    def strike(_: int) -> None:
        job.controllers[0].kill()
        job.kill(0)

    job.hook(f"{('COMPUTE', 'READY', 'DONE')[seed % 3]} {AT}", 1 + seed % 4, strike)
    return scenario


def one_stands_still(seed: int) -> Scenario:
    """A process is stopped for a while or for good, or its interpreter is held: its agent, which is there, ends it."""
    scenario = _calm(seed, (even(2), even(4), ring(3))[seed % 3])
    job, rank = scenario.job, seed // 3 % 2
    act = (
        partial(job.stop, rank, None),
        partial(job.stop, rank, 0.65 + 0.01 * (seed % 20)),
        partial(job.hog, rank, None),
    )[seed % 4 % 3]
    phase = ("COMPUTE", "READY", "DONE")[seed // 2 % 3]
    job.hook(f"{phase} {AT}", 1 + seed % len(job.everybody), lambda _: act())
    return scenario


def one_stands_still_and_the_other_holder_dies(seed: int) -> Scenario:
    """Of two that hold a shard one is stopped, and the other dies before the step is published, or when all regroup."""
    scenario = _calm(seed, harmless=False)
    job = scenario.job
    job.hook(f"COMPUTE {AT}", 1, lambda _: job.stop(3, (None, 0.7 + 0.01 * (seed % 30))[seed % 2]))
    _kill(
        job,
        ("stage writing", "stage publishing", "stage regrouping", "replacement started")[seed % 4],
        1,
        0.002 * (seed % 10),
    )
    return scenario


ARRANGED = (
    one_stands_still, one_stands_still_and_the_other_holder_dies, rank_0_dies_with_its_controller,
    one_dies, one_raises, the_last_step_is_rolled_forward, dies_when_it_has_regrouped, last_holder_dies_while_another_rolls_forward, last_holder_dies_beside_a_replacement,
    dies_while_another_rolls_forward, raises_and_the_other_holder_dies, controller_dies_meanwhile, one_has_no_order_when_the_controller_dies, controller_dies_behind_it,
    order_is_carried_out_late, noticed_meanwhile,
    cannot_be_regrouped, regroups_after_all_beside_its_write, training_returns_in_front_of_it, order_is_lost, dies_again_and_again, fills_differ, stopped_in_front_of_its_update,
)  # fmt: skip
