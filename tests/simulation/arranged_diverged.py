"""Jobs whose replicas differ behind a step, or seem to, and what else goes wrong then. One seed is one job."""

from __future__ import annotations

from functools import partial

from tests.simulation.arranged_in_place import AT, TIMES, _calm, _kill
from tests.simulation.comparing import Place
from tests.simulation.scenario import Scenario
from tests.simulation.settings import Times
from tests.simulation.training import Layout, even, ring
from ttp.processor.core.events import LocalFault
from ttp.proto.messages import Cause, CauseKind

THREE = ring(3, replicas=3)


def _altered(
    seed: int,
    layout: Layout,
    *places: Place,
    harmless: bool,
    repairs: bool = True,
    standbys: int = 0,
    times: Times = TIMES,
) -> Scenario:
    scenario = _calm(seed, layout, harmless, standbys, times)
    comparing = scenario.job.comparing
    comparing.step, comparing.repairs, comparing.to_alter = AT, repairs, places
    return scenario


def one_of_three(seed: int) -> Scenario:
    """Most holders prove who is wrong: it is replaced, and all train on."""
    return _altered(seed, THREE, (seed % 3, f"g{seed // 3 % 3}"), harmless=True)


def two_of_four(seed: int) -> Scenario:
    """Two ranks are wrong, each about a shard that two others have right."""
    layout = ring(6, replicas=3)
    return _altered(seed, layout, (seed % 6, f"g{seed % 6}"), ((seed + 3) % 6, f"g{(seed + 3) % 6}"), harmless=True)


def one_of_two(seed: int) -> Scenario:
    """Either of two may be wrong."""
    return _altered(seed, even(4), (seed % 4, f"g{seed % 2}"), harmless=False)


def all_of_three(seed: int) -> Scenario:
    """Each of three holds other bits: there is no majority."""
    return _altered(seed, THREE, *((rank, "g1") for rank in (seed % 3, (seed + 1) % 3)), harmless=False)


def stopped(seed: int) -> Scenario:
    """Most holders prove who is wrong, and the ranks have asked for an end."""
    return _altered(seed, THREE, (seed % 3, "g0"), harmless=False, repairs=False)


def misread(seed: int) -> Scenario:
    """What one rank reads first is not what it holds."""
    scenario = _altered(seed, (even(4), THREE)[seed % 2], harmless=True, repairs=seed % 4 < 2)
    scenario.job.comparing.misread = ((seed % 3, f"g{(seed % 3) % 2}" if not seed % 2 else "g0"),)
    return scenario


def cannot_be_replaced(seed: int) -> Scenario:
    """One of three is wrong, and a rank's training thread does not come out: the step is written, by those that are right."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False)
    job, other = scenario.job, (seed + 1) % 3
    job.hook("stage regrouping", 1, lambda _: setattr(job.ranks[other], "stuck", True))
    job.must_save = "any"
    return scenario


def is_never_replaced(seed: int) -> Scenario:
    """One of three is wrong, and no process is ever replaced: those that are right write."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False, times=Times())
    scenario.job.must_save = "any"
    return scenario


def a_right_one_dies(seed: int) -> Scenario:
    """One of three is wrong, and one of those that are right dies as it becomes known: of two that differ either may be wrong."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False)
    job = scenario.job
    job.hook("stage freezing", 1, lambda _: job.kill((seed + 1) % 3))
    return scenario


def dies_while_they_compare(seed: int) -> Scenario:
    """A rank dies as it is compared: some have reported that they differ, and others not."""
    scenario = _altered(seed, (THREE, ring(4, replicas=3))[seed % 2], (seed % 3, "g0"), harmless=False)
    job = scenario.job
    _kill(job, f"DONE {AT}", (seed + seed // 3) % 3, 0.0005 * (seed % 40))
    return scenario


def controller_dies(seed: int) -> Scenario:
    """The controller dies while a wrong replica is replaced, or before it is: the next one has the same proof."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False, standbys=1)
    job = scenario.job
    moment = ("stage freezing", "stage regrouping", "left", "replacement_came")[seed % 4]
    job.hook(moment, 1, lambda _: job.controllers[0].kill())
    return scenario


def holders_die_with_the_controller(seed: int) -> Scenario:
    """Two of three that differ die with the controller, before another one knows them: the third may be the wrong one."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False, standbys=2)
    job = scenario.job

    def strike(_: int) -> None:
        job.controllers[0].kill()
        for other in (1, 2):
            job.scheduler.after(0.001 * (seed % 7), partial(job.kill, (seed + other) % 3))

    job.hook("stage freezing", 1, strike)
    return scenario


def frozen_as_they_compare(seed: int) -> Scenario:
    """A rank that is compared loses its launcher: gates close for a dump as the ranks learn that they differ."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False)
    job, lost = scenario.job, LocalFault(Cause(CauseKind.AGENT_LOST, (1,), "the launcher is gone"), "")
    job.hook(f"DONE {AT}", 3, lambda _: job.scheduler.after(0.0002 * (seed % 50), partial(job.ranks[1].put, lost)))
    return scenario


def _latent(seed: int, layout: Layout, place: Place, lost: int, repairs: bool, moment: str = "") -> Scenario:
    """A replica was altered since the last comparison, and `lost` dies: what its place is filled with shows it. `moment`: when another rank dies."""
    scenario = _altered(seed, layout, place, harmless=False, repairs=repairs)
    job = scenario.job
    job.comparing.altered_at, job.comparing.step = AT - 1, 100 * AT
    _kill(job, f"COMPUTE {AT + 1}", lost, 0.0005 * (seed % 5))
    if moment:
        job.hook(moment, 1 + seed // 3 % 3, lambda _: job.kill((lost + 1) % len(job.everybody)))
    return scenario


def found_by_a_fill(seed: int) -> Scenario:
    """Of three holders one dies and one is wrong: of those that stay neither is proven right."""
    return _latent(seed, THREE, (seed % 3, "g0"), (seed + 1) % 3, repairs=seed % 2 > 0)


def found_by_a_fill_and_proven(seed: int) -> Scenario:
    """Of four holders one dies and one is wrong: two of four agree, and with a fifth three do."""
    count = 4 + seed % 2
    return _latent(seed, ring(count, replicas=count), (seed % count, "g0"), (seed + 1) % count, repairs=True)


def found_by_a_fill_and_another_dies(seed: int) -> Scenario:
    """A rank dies as the others learn of it."""
    moment = ("filled", "disputed", "regroup_failed")[seed % 3]
    return _latent(seed, THREE, (seed % 3, "g0"), (seed + 1) % 3, repairs=seed % 2 > 0, moment=moment)


def asked_again_before_they_compare(seed: int) -> Scenario:
    """A rank has a preemption notice while all regroup: what they find of their replicas after that comes too late."""
    scenario = _latent(seed, THREE, (seed % 3, "g0"), (seed + 1) % 3, repairs=seed % 2 > 0)
    job = scenario.job
    notice = LocalFault(Cause(CauseKind.PREEMPTED, (seed % 3,), "SIGTERM"), "")
    job.hook("filled", 1, lambda _: job.scheduler.after(0.002 * (seed % 40), partial(job.ranks[seed % 3].put, notice)))
    return scenario


def shut_before_its_second_reading(seed: int) -> Scenario:
    """The gate of the one that is wrong closes before it has read a second time, and the others have reported that they agree."""
    scenario = _altered(seed, THREE, (seed % 3, "g0"), harmless=False)
    job, wrong = scenario.job, scenario.job.ranks[seed % 3]
    job.comparing.reading_s[wrong.rank] = 1.0
    lost = LocalFault(Cause(CauseKind.AGENT_LOST, (wrong.rank,), "the launcher is gone"), "")
    raise_ = partial(wrong.run, partial(wrong.fault, CauseKind.EXCEPTION, "ValueError: bad batch"))
    act = partial(wrong.put, lost) if seed // 3 % 2 else raise_
    job.hook(f"DONE {AT}", 3, lambda _: job.scheduler.after(0.1, act))
    job.hook("stage freezing", 1, lambda _: job.comparing.learn({"g0"} if job.comparing.disputed else ()))
    return scenario


ARRANGED = (
    one_of_three, two_of_four, one_of_two, all_of_three, stopped, misread, cannot_be_replaced, a_right_one_dies, dies_while_they_compare,
    controller_dies, holders_die_with_the_controller, frozen_as_they_compare, is_never_replaced,
    found_by_a_fill, found_by_a_fill_and_proven, found_by_a_fill_and_another_dies, asked_again_before_they_compare,
    shut_before_its_second_reading,
)  # fmt: skip
