"""Relays of nodes: what stands still or breaks with one costs a job nothing, and ranks leave the one that does not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import relays
from tests.simulation.checks import run_and_check
from tests.simulation.relays import Relay
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from tests.simulation.truth import events
from ttp.proto.stream import LOOKS, SILENT_LEASES

SEEDS = 60
STEPS = 60
"""Some two seconds: longer than two leases."""

Arrange = Callable[[Scenario, Relay], object]


def over(seed: int, arrange: Arrange) -> tuple[Scenario, list[str]]:
    """Return a job of two nodes with relays after its end, and what it violates; nothing went wrong but what was arranged."""
    scenario = build(seed, even(4), faults=False, steps=STEPS)
    job = scenario.job
    job.relays = {node: Relay(job, node) for node in set(job.nodes)}
    relay = job.relays[seed % 2]
    job.hook(f"{('COMPUTE', 'READY', 'UPDATING', 'DONE')[seed % 4]} 5", 1, lambda rank: arrange(scenario, relay))
    return scenario, run_and_check(scenario)


def finished(seed: int, arrange: Arrange) -> Scenario:
    """The job trained to its end, and no rank was taken for dead."""
    scenario, violated = over(seed, arrange)
    assert not violated, f"seed {seed}"
    silent = [fields for fields in events(scenario.job, "death_seen") if fields["kind"] == "silent"]
    assert events(scenario.job, "finished") and not silent, f"seed {seed}"
    return scenario


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.5])
def test_a_relay_that_stands_still_costs_nothing_and_is_left_by_its_ranks_alone(seconds: float) -> None:
    for seed in range(SEEDS):
        job = finished(seed, lambda scenario, relay: relay.stands_still(seconds)).job
        silent_s = SILENT_LEASES * job.times.lease_s
        its = {process.relayed for process in job.ranks if process.node == seed % 2}
        others = {process.relayed for process in job.ranks if process.node != seed % 2}
        assert others == {True}
        assert seconds < silent_s or its == {False} or seconds < silent_s * (1 + 1 / LOOKS)
        assert seconds > silent_s or its == {True}


def test_a_connection_that_breaks_is_made_again_by_the_relay() -> None:
    """The streams of its ranks break at the same moment: all gates close, and open again."""
    thawed = 0
    for seed in range(SEEDS):
        job = finished(seed, lambda scenario, relay: relay.loses(0)).job
        assert all(process.relayed for process in job.ranks)
        thawed += len(events(job, "thawed"))
    assert thawed > SEEDS / 2


def test_a_relay_that_is_gone_is_missed_by_no_rank() -> None:
    for seed in range(SEEDS):
        job = finished(seed, lambda scenario, relay: relay.ends()).job
        assert [process.relayed for process in job.ranks] == [process.node != seed % 2 for process in job.ranks]


def test_a_controller_that_dies_while_a_relay_stands_still_is_followed_by_its_ranks() -> None:
    """They leave the relay, find nothing at the controller, and come to the standby before they are given up."""

    def arrange(scenario: Scenario, relay: Relay) -> None:
        scenario.harmless = False
        relay.stands_still(1.5)
        scenario.job.controllers[0].kill()

    took_over = 0
    for seed in range(SEEDS):
        scenario, violated = over(seed, arrange)
        assert not violated, f"seed {seed}"
        took_over += len(events(scenario.job, "took_over"))
    assert took_over > SEEDS / 4, "some of them have a standby"


def test_ranks_that_wait_for_their_relay_for_too_long_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two leases in place of a quarter."""
    monkeypatch.setattr(relays, "SILENT_LEASES", 2.0)
    found = [over(seed, lambda scenario, relay: relay.stands_still(1.5))[1] for seed in range(10)]
    assert any(text.startswith("I7") for violated in found for text in violated)
