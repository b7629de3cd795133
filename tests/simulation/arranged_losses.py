"""Jobs in which a message is lost although its stream lives. One seed is one job; the seed chooses the kind unless a test does."""

from __future__ import annotations

from functools import partial

from tests.simulation.lost import LOSABLE, lose
from tests.simulation.outliving import delay_results
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from ttp.proto.messages import CauseKind, FaultReport, Welcome


def in_training(seed: int, kind: type | None = None) -> Scenario:
    """One message is lost in a job without a fault."""
    return _losing(seed, kind)


def in_a_false_alarm(seed: int, kind: type | None = None) -> Scenario:
    """A stream breaks for a moment, and another rank loses a message."""
    scenario = _losing(seed, kind)
    job = scenario.job
    job.hook("DONE 1", 1, lambda rank: job.drop_stream(len(job.ranks) - 1))
    return scenario


def in_a_dump(seed: int, kind: type | None = None) -> Scenario:
    """Two of four ranks die, or rank 0 raises; rank 0, which is indispensable then, rolls forward and loses a message."""
    scenario = _losing(seed, kind)
    scenario.harmless = False
    job, process = scenario.job, scenario.job.ranks[0]
    if process.route.loses is FaultReport:
        job.hook("READY 2", 1, lambda rank: process.run(partial(process.fault, CauseKind.EXCEPTION, "bad batch")))
        return scenario
    delay_results(job, job.rng, [0], 2)
    for other in (2, 3):
        job.hook("UPDATING 2", 3, lambda rank, other=other: job.kill(other))  # type: ignore[misc]
    return scenario


def of_the_first_welcome(seed: int) -> Scenario:
    """Rank 1 has not begun when the controller dies, and with it rank 0, which waits in its first step for rank 1 alone."""
    scenario, later = build(seed, even(2), faults=False), seed
    while len(scenario.job.controllers) == 1:
        later += 1000
        scenario = build(later, even(2), faults=False)
    job = scenario.job
    lose(job, 1, Welcome)

    def strike() -> None:
        job.controllers[0].kill()
        job.kill(0)

    job.hook("READY 1", 1, lambda rank: job.scheduler.after(0.001 + 0.002 * (seed % 50), strike))
    scenario.harmless = False
    return scenario


def _losing(seed: int, kind: type | None) -> Scenario:
    scenario = build(seed, even(4), faults=False)
    lose(scenario.job, 0, kind or LOSABLE[seed % len(LOSABLE)])
    return scenario
