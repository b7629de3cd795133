"""Controllers that die, stop or are cut off at every moment of a job: a standby takes over, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from tests.simulation import checks
from tests.simulation.checks import run_and_check
from tests.simulation.job import Job
from tests.simulation.losing_controllers import (
    all_controllers_die,
    kill_the_controller,
    one_after_the_other,
    word_of_a_standby_is_missed,
)
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even, ring
from tests.simulation.truth import events
from ttp.controller.core.facts.state import Stage

MOMENTS = (
    "death_seen", "freeze_sent", "got Freeze", "frozen", "decided", "got RollForward", "rolling", "write_sent", "writing",
    "written", "publish_sent", "publishing", "manifest written", "renamed", "published", "got Exit",
)  # fmt: skip
TROUBLES: dict[str, Callable[[Job], None]] = {
    "killed": lambda job: job.controllers[0].kill(),
    "stopped for good": lambda job: job.controllers[0].pause(30.0),
    "stopped for a while": lambda job: job.controllers[0].pause(1.5),
    "cut off": lambda job: job.controllers[0].cut(2.0),
}


def two_standbys(seed: int, steps: int = 0) -> Scenario:
    """Return a job without faults that has two standbys and agents, and four ranks."""
    while True:
        scenario = build(seed, even(4) if seed % 2 else ring(5), faults=False, steps=steps)
        if len(scenario.job.controllers) == 3 and scenario.job.agents and scenario.job.training.steps >= 3:
            return scenario
        seed += 1000


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_dump_is_completed_whatever_becomes_of_its_controller(trouble: str, moment: str) -> None:
    """At every moment of a dump, its first or its third occurrence: the step is published, and only complete and right."""
    reached = 0
    for seed, count in ((1, 1), (2, 3), (3, 2)):
        scenario = two_standbys(seed)
        scenario.harmless = False
        job = scenario.job
        job.hook("UPDATING 3", 2, lambda rank, job=job: job.kill(3))  # type: ignore[misc]
        struck: list[float] = []

        def strike(rank: int, job: Job = job, struck: list[float] = struck) -> None:
            struck.append(job.now)
            TROUBLES[trouble](job)

        job.hook(moment, count, strike)
        found = run_and_check(scenario)
        assert not found, f"seed {seed}: {found}"
        assert job.disk.published, f"seed {seed}: nothing was published"
        reached += len(struck)
    assert reached, f"no run came to {moment}"


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("moment", ["READY 2", "UPDATING 2", "DONE 2"])
def test_training_continues_unharmed_under_a_standby(trouble: str, moment: str) -> None:
    """Without any other fault the takeover costs a short freeze, and all ranks train to the end."""
    for seed in range(8):
        scenario = two_standbys(seed)
        job = scenario.job
        job.hook(moment, 2, lambda rank, job=job: TROUBLES[trouble](job))  # type: ignore[misc]
        assert not run_and_check(scenario), f"seed {seed}"
        assert [rank.gate.state_step for rank in job.ranks] == [job.training.steps] * len(job.ranks)
        assert events(job, "finished") and not events(job, "published")


def test_the_second_standby_follows_the_first() -> None:
    """Two controllers die one after the other, the second in the middle of its takeover, and a rank with it."""
    for seed in range(12):
        scenario = two_standbys(seed, steps=8)
        scenario.harmless = False
        job = scenario.job
        job.hook("READY 3", 2, lambda rank, job=job: job.controllers[0].kill())  # type: ignore[misc]
        job.hook("took_over", 1, lambda rank, job=job: (job.controllers[1].kill(), job.kill(0)))  # type: ignore[misc]
        assert not run_and_check(scenario), f"seed {seed}"
        assert job.controllers[2].state.stage is Stage.OVER
        assert job.disk.published


def test_a_controller_that_comes_back_receives_the_order_to_end() -> None:
    """It was stopped, a standby has taken over, and training has gone on: it has no ranks any more, and it exits."""
    scenario = two_standbys(4, steps=60)
    job = scenario.job
    job.hook("DONE 1", 4, lambda rank: job.controllers[0].pause(1.4))
    assert not run_and_check(scenario)
    assert job.controllers[0].over == "superseded by c1"
    assert [line.fields["term"] for _, line in job.journal if line.event == "took_over"] == [2]


def test_without_a_standby_training_continues_unprotected() -> None:
    """The only controller is killed when all ranks train: no rank is stopped by that, and all are released at their end."""
    for seed in range(50):
        scenario = build(seed, even(4), faults=False)
        job = scenario.job
        if len(job.controllers) > 1:
            continue
        job.hook("DONE 1", 4, lambda rank, job=job: job.controllers[0].kill())  # type: ignore[misc]
        assert not run_and_check(scenario), f"seed {seed}"
        assert all(rank.released and rank.gate.state_step == job.training.steps for rank in job.ranks), f"seed {seed}"


def lose_controllers_in_turn(scenario: Scenario, moments: Sequence[float]) -> None:
    """At each of these moments the controller that leads is killed."""
    for moment in moments:
        scenario.job.scheduler.at(moment, partial(kill_the_controller, scenario.job))


@pytest.mark.parametrize("standbys", [1, 2])
def test_a_job_stays_protected_however_many_controllers_die_one_after_the_other(standbys: int) -> None:
    """Five controllers are killed with time between them, then a rank together with the sixth: the step is published."""
    for seed in range(6):
        scenario = one_after_the_other(seed, standbys)
        scenario.harmless = False
        job = scenario.job
        lose_controllers_in_turn(scenario, [0.5 + 3.2 * turn for turn in range(5)])
        job.scheduler.at(17.0, partial(job.kill, 2))
        job.scheduler.at(17.0, partial(kill_the_controller, job))
        assert not run_and_check(scenario), f"seed {seed}"
        assert job.controller.place > 5 and events(job, "standby_started")
        assert job.disk.published, f"seed {seed}: nothing was published"


def test_a_standby_that_dies_idle_is_replaced() -> None:
    """Its starter sees it end; later the controller dies, and the new standby leads."""
    for seed in range(6):
        scenario = one_after_the_other(seed, 1)
        job = scenario.job
        job.scheduler.at(0.5, lambda job=job: job.controllers[1].kill())  # type: ignore[misc]
        job.scheduler.at(4.0, partial(kill_the_controller, job))
        assert not run_and_check(scenario), f"seed {seed}"
        assert [line.fields["term"] for _, line in job.journal if line.event == "took_over"] == [3]
        assert all(rank.released for rank in job.ranks)


def test_a_rank_that_cannot_start_a_standby_is_passed_over() -> None:
    """All but one rank fail to, or never answer: that one is found."""
    for seed in range(4):
        scenario = one_after_the_other(seed, 1)
        job = scenario.job
        job.standbys.unable, job.standbys.mute = {0, 1}, {2} if seed % 2 else set()
        job.scheduler.at(0.5, partial(kill_the_controller, job))
        assert not run_and_check(scenario), f"seed {seed}"
        assert [fields["rank"] for fields in events(job, "standby_started")] == [3 if seed % 2 else 2]


def test_where_every_controller_is_lost_at_once_rank_0_starts_one() -> None:
    """No controller remains to ask for a standby: all ranks find the new one, and it leads them."""
    for seed in range(12):
        scenario = all_controllers_die(seed)
        job = scenario.job
        assert not run_and_check(scenario), f"seed {seed}"
        (took_over,) = events(job, "took_over")
        assert took_over["absent"] == () and took_over["ranks"] == tuple(range(len(job.ranks)))
        assert all(rank.released for rank in job.ranks)


def test_ranks_that_missed_the_word_of_a_standby_find_it_in_the_list() -> None:
    """The controller dies right after it has sent some ranks the standby that replaces a lost one."""
    for seed in range(12):
        scenario = word_of_a_standby_is_missed(seed)
        job = scenario.job
        assert not run_and_check(scenario), f"seed {seed}"
        (took_over,) = events(job, "took_over")
        assert took_over["absent"] == (), f"seed {seed}"
        assert all(rank.released for rank in job.ranks)


def test_a_rank_that_leaves_without_a_controller_costs_a_restart_only_while_one_is_away() -> None:
    """Two ranks leave after the last step while the others are in its last collective; all learn of another controller too late (seed 7402254)."""
    scenario = build(7402254)
    job = scenario.job
    assert run_and_check(scenario) == [] and job.disk.published == [("/a", job.training.steps)]
    for controller in job.controllers:
        controller.absences = [(began_s, ended_s - 0.2) for began_s, ended_s in controller.absences]
    assert checks._outcome(scenario)[0].startswith("I7: a false alarm cost the job")
