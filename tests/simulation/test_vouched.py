"""Whole jobs in which a rank is silent: one whose process runs is waited for, and no other for longer than ever."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation import vouched
from tests.simulation.arranged import attaches_again_late_with_the_newest_step
from tests.simulation.checks import run_and_check
from tests.simulation.scenario import Scenario
from tests.simulation.truth import events

SEEDS = 24


def test_an_interpreter_that_is_held_for_longer_than_a_lease_costs_a_pause_at_most() -> None:
    """Also while its stream breaks, the controller dies, or all ranks compile at once."""
    paused: Counter[bool] = Counter()
    for seed in range(SEEDS):
        scenario = vouched.held_for_longer_than_a_lease(seed)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert not events(scenario.job, "death_seen") or events(scenario.job, "finished"), f"seed {seed}"
        paused[bool(events(scenario.job, "freeze_sent"))] += 1
    assert paused[False] >= SEEDS // 4, "silence alone closes no gate"


def test_without_agents_such_a_rank_is_dead_after_its_lease() -> None:
    """No agent vouches: what was so before there were agents is so still."""
    for seed in range(0, SEEDS, 4):
        scenario = vouched.held_for_longer_than_a_lease(seed)
        scenario.harmless = False
        for launcher in scenario.job.launchers.values():
            launcher.lost = True
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        text = str(events(scenario.job, "death_seen")[0]["text"])
        assert re.fullmatch(r"no message received for 0\.[67] s \(limit 0\.6 s, TTP_LEASE_S\)", text), (
            f"seed {seed}: {text}"
        )


@pytest.mark.parametrize("make", [vouched.host_lost, vouched.process_stopped, vouched.interpreter_held_for_good])
def test_who_is_silent_for_good_is_found_in_time(make: Callable[[int], Scenario]) -> None:
    for seed in range(SEEDS):
        scenario = make(seed)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert events(scenario.job, "death_seen"), f"seed {seed}"


def test_a_rank_that_attaches_late_with_the_newest_step_is_waited_for() -> None:
    """In these seeds it is back within its lease; without waiting, local copies of an older step are saved (`mutations`)."""
    for seed in range(2, 17):
        found = run_and_check(attaches_again_late_with_the_newest_step(seed))
        assert not found, f"seed {seed}: {found}"
