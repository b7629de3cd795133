"""Jobs in which a message comes that the protocol does not have: an answer to no order, an exit with another status, an order that was altered
on its way. One seed is one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.simulation.disk import OLDER_STEP, final_name
from tests.simulation.network import Stream
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from ttp.proto.messages import Downward, Exit, Published, PublishOrder, RollForward, WriteOrder


def published_by_another(seed: int) -> Scenario:
    """While the shares are written, or one rank publishes, another rank reports the step as published."""
    scenario = build(seed, even(4), faults=False)
    scenario.harmless = False
    job = scenario.job
    job.refusals = []

    def say() -> None:
        state = job.controller.state
        if state.dump is None:
            return
        other = next(rank for rank in (0, 1, 3) if rank not in state.dump.publishers)
        step = state.dump.decision.step
        job.controller.receive_again(other, Published(other, state.freeze_id, step, f"/a/iter_{step:07d}"))

    job.hook(("writing", "publishing")[seed % 2], 1, lambda rank: job.scheduler.after(0.0, say))
    job.hook("UPDATING 2", 2, lambda rank: job.kill(2))
    return scenario


def exit_with_another_status(seed: int) -> Scenario:
    """A rank of a job that trains receives an exit with a status that no controller orders."""
    scenario = build(seed, even(4), faults=False)
    job = scenario.job
    job.refusals = []

    def say() -> None:
        process = job.ranks[seed % 4]
        if process.stream is not None:
            process.take_in(process.stream, Exit(1, "of no controller"))

    job.hook("COMPUTE 2", 1, lambda rank: job.scheduler.after(0.0, say))
    return scenario


def roll_forward_with_an_impossible_record(seed: int) -> Scenario:
    """The record that one of the ranks is to roll forward with has a clip factor that no step can have."""

    def alter(order: RollForward) -> RollForward:
        return replace(order, record=replace(order.record, clip_factor=1.5))

    return _altered(seed, RollForward, alter)


def write_into_a_published_checkpoint(seed: int) -> Scenario:
    """The staging directory that a rank is to write into has become the name of the older checkpoint."""
    return _altered(seed, WriteOrder, lambda order: replace(order, tmp_name=final_name(OLDER_STEP)))


def publish_another_steps_record(seed: int) -> Scenario:
    """The record that the manifest is to have has become the one of the step before."""

    def alter(order: PublishOrder) -> PublishOrder:
        assert order.record is not None
        return replace(order, record=replace(order.record, step=order.step - 1))

    return _altered(seed, PublishOrder, alter)


def _altered(seed: int, kind: type[Downward], alter: Callable[[Any], Any]) -> Scenario:
    """A rank dies in an update that rank 1 has no record of yet. The first order of a kind that comes to rank 1 is altered; for an order to
    publish, the first one to any rank."""
    scenario = build(seed, even(4), faults=False)
    scenario.harmless = False
    job = scenario.job
    job.refusals = []
    job.ranks[1].late_results[2] = 3.0
    pending = [True]

    def receive(take_in: Callable[[Stream, Any], None], stream: Stream, message: Any) -> None:
        if pending and type(message) is kind:
            pending.clear()
            message = alter(message)
        take_in(stream, message)

    for process in job.ranks if kind is PublishOrder else job.ranks[1:2]:
        process.take_in = partial(receive, process.take_in)  # type: ignore[method-assign]
    job.hook("UPDATING 2", 2, lambda rank: job.kill(2))
    return scenario
