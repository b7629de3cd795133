"""I13 is judged in every job that trains undisturbed for long enough, whatever came before, and in no job that is in a fault."""

from __future__ import annotations

from functools import partial
from itertools import count, islice

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.faults import KINDS
from tests.simulation.held import Hold
from tests.simulation.losing_controllers import (
    kill_the_controller,
    lost_controllers_are_not_replaced,
    one_after_the_other,
)
from tests.simulation.lost_in_turn import lose_controllers
from tests.simulation.scenario import Scenario, build
from tests.simulation.situations import drawn
from tests.simulation.standbys import RESTORED_S
from tests.simulation.truth import events
from ttp.controller.core.facts.events import Journal
from ttp.controller.core.ranks import standbys
from ttp.proto.messages import CauseKind

LOST_S = 0.5


def standby_lost(seed: int) -> Scenario:
    scenario = one_after_the_other(seed)
    scenario.job.scheduler.at(LOST_S, scenario.job.controllers[1].kill)
    return scenario


def test_no_standby_is_expected_during_a_fault_that_lasts() -> None:
    """A dump takes longer than standbys may be missing: its controller is lost at its beginning, and the step is published."""
    for seed in range(4):
        scenario = one_after_the_other(seed)
        scenario.harmless = False
        job = scenario.job
        job.holds["write"] = Hold(longest_s=2 * RESTORED_S, progresses=True)
        job.scheduler.at(LOST_S, partial(job.ranks[2].fault, CauseKind.EXCEPTION, "ValueError: bad batch"))
        job.hook("write_sent", 1, lambda rank, job=job: kill_the_controller(job))  # type: ignore[misc]
        assert not run_and_check(scenario), f"seed {seed}"
        assert job.disk.published and job.now > LOST_S + 2 * RESTORED_S


def test_standbys_are_expected_after_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is followed by a stream that breaks: once training has gone on for long enough, a standby must be there."""
    for replaced in (True, False):
        if not replaced:
            lost_controllers_are_not_replaced(monkeypatch)
        scenario = standby_lost(1)
        job = scenario.job
        job.scheduler.at(LOST_S + 0.1, partial(KINDS["stream break"].inject, job, job.rng, 2))
        found = run_and_check(scenario)
        assert events(job, "thawed") and job.standbys.judged
        assert [text[:4] for text in found] == ([] if replaced else ["I13:"])


def test_a_launcher_is_expected_to_know_a_standby_that_was_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: the controller announces that it has one, and agents must learn of it as of those of the start."""
    assert not run_and_check(standby_lost(1))
    learn = standbys.learn_successors
    with monkeypatch.context() as patch:
        patch.setattr(standbys, "learn_successors", lambda state, new, out: learn(state, new, []))
        found = run_and_check(standby_lost(1))
    assert any("never learned of ('c2',)" in text for text in found), found


def test_a_launcher_is_not_expected_to_know_a_standby_that_came_as_the_job_ended() -> None:
    """Two standbys belong to the job, and one of them is started late: no announcement of its controller comes in time now."""
    job = one_after_the_other(1, standbys=2).job
    first, launcher = job.controllers[0], job.launchers[0]
    launcher.addresses = ["c0", "c1"]
    first.journal += [
        (0.1, Journal("assembled", {"standbys": ("c1",)})),
        (5.0, Journal("standby_started", {"address": "c3"})),
    ]
    assert launcher.unknown_standbys() == ()
    first.journal.append((6.0, Journal("finished", {})))
    assert launcher.unknown_standbys() == ("c3",)


def test_random_jobs_lose_controllers_in_turn_and_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seeds are long jobs: without a fault in the machines they keep I13, and one that replaces no controller is found in them."""
    seeds = list(
        islice((seed for seed in count() if (chosen := drawn(seed)) and chosen[0].put_in is lose_controllers), 8)
    )
    jobs = [build(seed) for seed in seeds]
    assert not [found for job in jobs if (found := run_and_check(job))]
    assert sum(job.job.standbys.judged for job in jobs) >= len(jobs)
    lost_controllers_are_not_replaced(monkeypatch)
    assert any(text.startswith("I13") for seed in seeds for text in run_and_check(build(seed)))
