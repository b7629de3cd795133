"""How long a standby waits for ranks before it takes over, what puts that off and until when, and what it notes meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, only
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_takeover import LEASE_S, coming, standby
from ttp.controller.core.facts.events import EarlierLives, Supersede
from ttp.controller.core.facts.state import Gathering, Stage
from ttp.controller.core.machine import next_deadline
from ttp.proto.messages import CauseKind, Vouch, WorkerExit


def gathering(*ranks: int) -> tuple[ControllerBench, float]:
    """Return a standby to which these ranks have come at one moment, and until when answers of earlier controllers may put the takeover off."""
    job = standby()
    job.say(*(coming(rank) for rank in ranks))
    return job, job.now + job.state.settings.orphan_timeout_s


def deadline(job: ControllerBench) -> float:
    assert isinstance(job.state.at, Gathering)
    return job.state.at.deadline


@pytest.mark.parametrize(("after_s", "waits_s"), [(0.5, 0.5 + LEASE_S), (0.0, LEASE_S)])
def test_the_answer_of_an_earlier_controller_gives_the_others_a_lease(after_s: float, waits_s: float) -> None:
    job, _ = gathering(0, 1, 2)
    job.wait(after_s)
    job.take(EarlierLives("c0"))
    assert Supersede("c0", 0) in job.effects and deadline(job) == pytest.approx(waits_s)


def test_answers_put_the_takeover_off_until_the_orphan_timeout_only() -> None:
    """They are ordered to end all the same, as long as the ranks here cover every shard."""
    job, until = gathering(0, 1, 2)
    while job.at(Stage.GATHERING):
        assert job.now < until + 1.0
        job.wait(1.0, senders=(0, 1, 2))
        job.take(EarlierLives("c0"))
        assert Supersede("c0", 0) in job.effects
    assert job.now == pytest.approx(until) and job.logged("took_over")


def test_an_answer_never_shortens_the_wait() -> None:
    """The others may have been given longer, because this controller was cut off."""
    job, until = gathering(0, 1, 2)
    assert isinstance(job.state.at, Gathering)
    job.state = replace(job.state, at=replace(job.state.at, deadline=until + 1.0))
    job.take(EarlierLives("c0"), after=0.5)
    assert deadline(job) == until + 1.0


def test_a_rank_of_a_later_generation_gives_the_others_a_lease_and_answers_a_new_orphan_timeout() -> None:
    job, _ = gathering(2)
    job.wait(0.5 * LEASE_S, senders=(2,))
    job.say(replace(coming(0), generation=1))
    assert deadline(job) == pytest.approx(job.now + LEASE_S)
    at = job.state.at
    assert isinstance(at, Gathering) and at.gather_by == pytest.approx(job.now + job.state.settings.orphan_timeout_s)
    job.say(replace(coming(1), generation=1), after=0.5)
    assert deadline(job) == pytest.approx(job.now - 0.5 + LEASE_S), "the next one of it gives no more"


def test_a_process_that_runs_by_its_agents_word_is_waited_for_until_the_orphan_timeout_only() -> None:
    job = ControllerBench(assembled=False, standby=1, address="c1", lease_s=4.0)
    job.say(*(coming(rank) for rank in (0, 1, 2)))
    until = job.now + job.state.settings.orphan_timeout_s
    while job.at(Stage.GATHERING):
        assert job.now < until + 1.0
        job.say(Vouch((3,), (103,)))
        job.wait(1.0, senders=(0, 1, 2))
    assert job.now == pytest.approx(until)


def test_a_process_that_its_agent_reports_once_is_waited_for_two_leases_at_most() -> None:
    job, _ = gathering(0, 1, 2)
    job.wait(1.0, senders=(0, 1, 2))
    job.say(Vouch((3,), (103,)))
    job.wait(LEASE_S, senders=(0, 1, 2))
    assert job.at(Stage.GATHERING)
    job.wait(LEASE_S, senders=(0, 1, 2))
    assert job.logged("took_over")[0]["absent"] == (3,)


def test_nothing_is_waited_for_by_an_agents_word_once_something_has_failed() -> None:
    """Gates are closed, or will be: those that came wait for the decision."""
    for failure in (killed(2), fault(2, CauseKind.EXCEPTION)):
        job, _ = gathering(0, 1, 2)
        job.say(failure, Vouch((3,), (103,)))
        for _ in range(4):
            job.wait(1.0, senders=(0, 1, 2))
            if job.at(Stage.GATHERING):
                job.say(Vouch((3,), (103,)))
        assert not job.at(Stage.GATHERING)


def test_a_rank_that_has_finished_and_ended_has_not_failed() -> None:
    """The others wait for the one whose interpreter is held."""
    job, _ = gathering(0, 1)
    job.say(WorkerExit(2, 102, "exit code 0", 0.0))
    for _ in range(4):
        job.say(Vouch((3,), (103,)))
        job.wait(1.0, senders=(0, 1))
    assert job.at(Stage.GATHERING)


def test_what_is_known_of_a_death_is_in_the_report_and_a_clean_exit_does_not_count() -> None:
    job, _ = gathering(0, 1)
    job.say(WorkerExit(2, 102, "exit code 0", 0.0), killed(3), fault(0, CauseKind.EXCEPTION))
    assert [(sign.rank, sign.kind) for sign in job.state.notes.signs] == [
        (3, CauseKind.EXITED),
        (0, CauseKind.EXCEPTION),
    ]
    assert job.state.notes.signs[0].pid == 103
    assert [line["rank"] for line in job.logged("left")] == [2] and [
        line["rank"] for line in job.logged("death_seen")
    ] == [3]


def test_a_rank_that_did_not_come_is_in_the_report() -> None:
    job, _ = gathering(0, 1, 2)
    job.wait(LEASE_S + 0.1, senders=(0, 1, 2))
    assert [(sign.rank, sign.kind) for sign in job.state.notes.signs] == [(3, CauseKind.SILENT)]


def test_a_standby_that_stands_by_again_has_forgotten_what_those_ranks_reported() -> None:
    job, _ = gathering(2, 3)
    job.say(fault(2, CauseKind.EXCEPTION))
    job.take(EarlierLives("c0", 1))
    assert job.at(Stage.STANDBY) and not job.state.notes.signs and next_deadline(job.state) is None
    assert not only(job.effects, Supersede)


@pytest.mark.parametrize(("ranks", "generation", "ends"), [((0, 1, 2, 3), 0, True), ((0, 1, 2, 3), 1, False)])
def test_an_earlier_controller_that_answers_after_the_takeover_ends_unless_it_leads_a_later_generation(
    ranks: tuple[int, ...], generation: int, ends: bool
) -> None:
    job, _ = gathering(*ranks)
    assert job.at(Stage.FREEZING)
    job.take(EarlierLives("c0", generation))
    assert bool(only(job.effects, Supersede)) is ends
