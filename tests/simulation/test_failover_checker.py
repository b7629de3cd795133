"""The checker can fail, controllers included: each of these wrong takeovers is caught within a few hundred jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.controllers import Controller
from tests.simulation.rank import Rank
from tests.simulation.scenario import Scenario
from tests.simulation.test_failover import two_standbys
from ttp.controller import machine, presence, rolling, settling, takeover
from ttp.controller.presence import welcome
from ttp.controller.state import Stage
from ttp.errors import ProtocolError

SEEDS = 120


def caught(arrange: Callable[[Scenario], None], known: tuple[str, ...], steps: int = 0) -> str:
    """Return the first violation of one of these kinds; fail when no job shows one."""
    others: set[str] = set()
    for seed in range(SEEDS):
        scenario = two_standbys(seed, steps)
        scenario.harmless = False
        arrange(scenario)
        try:
            found = run_and_check(scenario)
        except (AssertionError, KeyError, IndexError, ProtocolError, ValueError) as error:
            found = [f"raised: {error!r}"]
        for text in found:
            if text.startswith(known):
                return text
            others.add(text[:60])
    raise AssertionError(f"no job of {SEEDS} violated {known}; seen instead: {sorted(others)[:5]}")


def killed_in_a_dump(moment: str) -> Callable[[Scenario], None]:
    def arrange(scenario: Scenario) -> None:
        job = scenario.job
        job.hook("UPDATING 3", 2, lambda rank: job.kill(3))
        job.hook(moment, 1, lambda rank: job.controllers[0].kill())

    return arrange


def killed_idle(scenario: Scenario) -> None:
    job = scenario.job
    scenario.harmless = True
    job.hook("UPDATING 2", 1, lambda rank: job.controllers[0].kill())


def stopped_rank_and_dead_controller(scenario: Scenario) -> None:
    """A rank is silent until the others have been rolled forward, and comes back when the controller dies."""
    job = scenario.job
    job.hook("UPDATING 3", 1, lambda rank: job.stop((rank + 1) % len(job.ranks), 0.8))
    job.hook("rolled_forward", 1, lambda rank: job.controllers[0].kill())


def test_a_takeover_without_a_freeze_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lost controller had frozen stays frozen for good."""

    def wrong(state: Any, now: float, out: Any) -> Any:
        state = takeover.gather(state, now, out)
        if state.stage is Stage.FREEZING and not state.fault.causes:
            return replace(state, stage=Stage.RUNNING, fault=None)
        return state

    monkeypatch.setitem(settling._ADVANCE, Stage.GATHERING, wrong)

    def frozen_by_a_false_alarm(scenario: Scenario) -> None:
        job = scenario.job
        job.hook("DONE 2", 1, lambda rank: job.drop_stream(rank))
        job.hook("got Freeze", len(job.ranks) - 1, lambda rank: job.controllers[0].kill())

    caught(frozen_by_a_false_alarm, ("I11", "raised"))


def test_thawing_ranks_that_were_rolled_forward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = takeover.judge

    def wrong(state: Any, fault: Any, now: float, out: Any) -> Any:
        changed = judge(state, fault, now, out)
        finals = changed.fault.causes and "had begun a dump" in changed.fault.causes[0].text  # type: ignore[union-attr]
        return state if finals else changed

    monkeypatch.setattr(settling, "judge", wrong)
    caught(stopped_rank_and_dead_controller, ("I11",))


def test_freezes_counted_from_one_by_every_controller_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FREEZES_OF_A_TERM", 0)

    def killed_after_two_false_alarms(scenario: Scenario) -> None:
        """The ranks have seen freeze 2; the standby's is called 1 again."""
        job = scenario.job
        scenario.harmless = True
        job.hook("DONE 1", 1, lambda rank: job.drop_stream(rank))
        job.hook("thawed", 1, lambda rank: job.drop_stream(0))
        job.hook("thawed", 2, lambda rank: job.controllers[0].kill())

    caught(killed_after_two_false_alarms, ("I7", "I9", "I11", "raised"), steps=40)


def test_a_standby_that_forgets_shards_nobody_told_it_of_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both holders of a shard are gone before the takeover: what is left is no checkpoint."""
    start_dump = rolling.start_dump

    def wrong(state: Any, now: float, out: Any) -> Any:
        return start_dump(replace(state, job_groups=0), now, out)

    monkeypatch.setattr(settling, "start_dump", wrong)

    def all_holders_and_the_controller(scenario: Scenario) -> None:
        job = scenario.job

        def strike(rank: int) -> None:
            job.controllers[0].kill()
            for holder in job.training.layout.holders[0]:
                job.kill(holder)

        job.hook("DONE 2", 1, strike)

    caught(all_holders_and_the_controller, ("I5",))


def test_ranks_that_never_learn_of_the_standbys_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (presence, settling):
        monkeypatch.setattr(module, "welcome", lambda state, rank: replace(welcome(state, rank), successors=()))
    caught(killed_in_a_dump("got Freeze"), ("I11", "I9"))


def test_leaving_an_earlier_controller_its_ranks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for about a lease: some ranks have turned to the standby, the others are still with it."""
    monkeypatch.setattr(Controller, "_supersede", lambda self, older: None)

    def stopped_for_a_lease(scenario: Scenario) -> None:
        job = scenario.job
        scenario.harmless = True
        job.slowest_s = 0.05
        job.hook("UPDATING 2", 1, lambda rank: job.controllers[0].pause(0.4 + 0.002 * (scenario.seed % 120)))

    caught(stopped_for_a_lease, ("I7", "I9", "I11"), steps=40)


def test_a_term_that_is_not_checked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go back to a lower term, and the freezes of two controllers mix."""
    greeted = Rank._greeted

    def wrong(self: Rank, stream: Any) -> None:
        self.fence = 0
        greeted(self, stream)

    monkeypatch.setattr(Rank, "_greeted", wrong)
    monkeypatch.setattr(Controller, "_supersede", lambda self, older: None)

    def back_and_forth(scenario: Scenario) -> None:
        job = scenario.job
        job.hook("UPDATING 2", 1, lambda rank: job.controllers[0].pause(0.9))
        job.hook("thawed", 1, lambda rank: job.controllers[1].kill())
        job.hook("thawed", 1, lambda rank: job.controllers[2].cut(2.0))
        job.hook("DONE 60", 1, lambda rank: job.kill(rank))

    caught(back_and_forth, ("I7", "I9", "I11", "raised"), steps=80)
