"""Leftover ranks that are real processes, with a fake controller."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from tests.unit.launch.attempts import DEADLINE_S, RunningAttempt
from tests.waiting import until
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.attempts import leftover_ranks
from ttp.launch.attempts.leftover_ranks import LeftoverRanks
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore


@pytest.fixture
def patient(led: RunningAttempt, monkeypatch: pytest.MonkeyPatch) -> RunningAttempt:
    """Return an attempt whose ranks have very long to leave by themselves."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 50.0)
    monkeypatch.setattr(leftover_ranks, "PATIENCE_S", 0.1)
    return led


def await_stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def let_one_leave(running: RunningAttempt) -> None:
    """Rank 1 exits on the controller's order, and rank 0 is held."""
    running.leave(75, rank=1)
    until(running.attempt.failed, "the end to be seen")
    running.held.start()


def test_a_stopped_rank_is_ended_at_once_when_another_has_left_on_the_controllers_word(
    patient: RunningAttempt, caplog: pytest.LogCaptureFixture
) -> None:
    """It would not leave by itself, nor at SIGTERM, and has nothing to save: no grace is waited for."""
    await_stop(patient.workers[0].pid)
    let_one_leave(patient)
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.living() == []
    assert "killed rank 0 (stopped): these ranks have nothing more to save" in caplog.text
    assert patient.attempt.outcome().startswith("rank 0: ended by ttprun (signal SIGKILL)")


def test_a_stopped_rank_lives_as_long_as_the_controller_has_not_sent_the_ranks_away(
    patient: RunningAttempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other left with the same exit code because it had lost its controller: the stopped one may be the only holder."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 1.0)
    patient.line.decided = False
    await_stop(patient.workers[0].pid)
    let_one_leave(patient)
    until(
        lambda: patient.line.asked >= 10 or not patient.held.is_alive(), "the controller to be asked for several graces"
    )
    assert patient.held.is_alive()
    assert patient.attempt.living() == [0] and "killed" not in caplog.text
    patient.line.decided = True
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.living() == []
    assert "killed rank 0 (stopped): these ranks have nothing more to save" in caplog.text


def test_ranks_that_the_controller_has_not_sent_away_are_held_up_to_the_deadline(
    short_times: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not longer, and the deadline is logged."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 0.1)
    running = RunningAttempt(2.0, controller=True)
    try:
        running.line.decided = False
        let_one_leave(running)
        running.held.join(DEADLINE_S)
        assert not running.held.is_alive() and running.attempt.living() == [0]
        assert "TTP_OT (2 s) expired; terminating rank 0" in caplog.text
    finally:
        running.close()


def test_a_stopped_rank_has_the_others_time_while_the_shutdown_is_undecided(
    led: RunningAttempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller is lost: the other rank's exit code alone is not a reason to kill."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 1.0)
    led.line.attached = led.line.decided = False
    await_stop(led.workers[0].pid)
    let_one_leave(led)
    led.held.join(DEADLINE_S)
    assert not led.held.is_alive()
    said = [record.getMessage() for record in caplog.records]
    passed = next(place for place, text in enumerate(said) if "saved and exited 1 s ago" in text)
    killed = next(place for place, text in enumerate(said) if text.startswith("killed rank 0 (stopped): "))
    assert passed < killed


def test_a_stopped_rank_that_goes_on_while_stacks_are_gathered_leaves_by_itself(
    patient: RunningAttempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state of two seconds ago is not a reason."""
    asked = threading.Event()

    def go_on(asked_by: LeftoverRanks, ranks: Iterable[int]) -> None:
        os.kill(patient.workers[0].pid, signal.SIGCONT)
        os.waitid(os.P_PID, patient.workers[0].pid, os.WCONTINUED | os.WNOWAIT)
        asked.set()

    monkeypatch.setattr(LeftoverRanks, "ask_for_stacks", go_on)
    await_stop(patient.workers[0].pid)
    let_one_leave(patient)
    assert asked.wait(DEADLINE_S)
    patient.leave(75)
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.deaths()[0].status == 75
    assert "killed" not in caplog.text


def end_given_up(running: RunningAttempt, done: Callable[[], bool]) -> None:
    """Look again and again, as the agent does."""

    def looked() -> bool:
        if not done():
            running.attempt.end_given_up()
        return done()

    until(looked, "the end of those that are given up")


def test_ranks_that_stand_still_are_ended_when_the_controller_has_sent_all_away(
    patient: RunningAttempt, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank here has failed or left: what the others had is saved, and perhaps the job is over on every other node."""
    for worker in patient.workers:
        await_stop(worker.pid)
    patient.attempt.end_given_up()
    assert patient.attempt.living() == [0, 1] and patient.line.asked == 0, "no rank was ordered to exit"
    patient.line.sent_away_monotonic_s = time.monotonic()
    end_given_up(patient, done=lambda: patient.attempt.living() == [])
    assert "killed ranks 0-1 (stopped): these ranks have nothing more to save" in caplog.text


def test_ranks_that_were_sent_away_may_have_work_of_their_own(patient: RunningAttempt) -> None:
    """A script that handles its trainer's exception saves and evaluates for as long as it likes. Who was silent is ended when it is
    through, for the end of one is the end of all; the controller is asked about it once."""
    patient.line.sent_away_monotonic_s = time.monotonic()
    patient.line.silent = frozenset({1})
    end_given_up(patient, done=lambda: patient.line.asked > 0)
    asked = patient.line.asked
    for _ in range(50):
        patient.attempt.end_given_up()
    assert patient.line.asked == asked and patient.attempt.living() == [0, 1] and not patient.attempt.failed()
    patient.leave(0)
    end_given_up(patient, done=lambda: patient.attempt.living() == [])


def test_a_controller_that_never_answers_costs_only_those_that_are_stopped(
    patient: RunningAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sent the ranks away, so that all is decided; whom it had given up is not known any more."""
    monkeypatch.setattr(leftover_ranks, "ANSWERS_S", 0.3)
    patient.line.decided = False
    patient.line.sent_away_monotonic_s = time.monotonic()
    for worker in patient.workers:
        await_stop(worker.pid)
    end_given_up(patient, done=lambda: patient.attempt.living() == [])
    assert time.monotonic() - patient.line.sent_away_monotonic_s > 0.3


def test_who_is_stopped_later_may_go_on(patient: RunningAttempt) -> None:
    """A script that is stopped for inspection is not ended."""
    patient.line.sent_away_monotonic_s = time.monotonic() - leftover_ranks.ANSWERS_S - 1.0
    patient.attempt.end_given_up()
    for worker in patient.workers:
        await_stop(worker.pid)
    patient.attempt.end_given_up()
    assert patient.attempt.living() == [0, 1] and not patient.attempt.failed()


def test_a_stopped_rank_outlives_a_job_that_is_over_elsewhere_by_a_faults_time_only(short_times: None) -> None:
    """This launcher had no line to the controller when that sent the ranks away. Others here may still have work of their own."""
    running = RunningAttempt(0.5, controller=True, nodes=2)
    other = PeerAgents(JobStore("127.0.0.1", running.store.port, 0), 1, 2, look_s=0.02)
    try:
        other.start()
        await_stop(running.workers[0].pid)
        for _ in range(20):
            running.attempt.end_given_up()
        assert running.attempt.living() == [0, 1], "nothing is known of the others"
        other.publish_failed("b has failed (rank 3: signal SIGKILL)")
        peers = running.attempt.peers
        assert peers is not None
        until(lambda: peers.failed, "the news")
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.5:
            running.attempt.end_given_up()
            time.sleep(0.01)
        assert running.attempt.living() == [0, 1], "the other one works"
        running.leave(0, rank=1)
        end_given_up(running, done=lambda: running.attempt.living() == [])
    finally:
        running.close()
        other.close()


def test_a_stopped_rank_is_not_ended_while_nothing_is_decided(patient: RunningAttempt) -> None:
    """It may go on, and be the one that holds what is to be saved."""
    await_stop(patient.workers[0].pid)
    patient.fail_one()
    patient.held.join(1.0)
    assert patient.held.is_alive() and patient.attempt.living() == [0]
    os.kill(patient.workers[0].pid, signal.SIGCONT)
    patient.leave(75)
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.deaths()[0].status == 75


def test_a_rank_that_was_silent_is_ended_soon_when_another_has_left_on_the_controllers_word(
    patient: RunningAttempt, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller reports it; an interpreter that C code blocks looks healthy to the operating system."""
    patient.line.silent = frozenset({0, 7})
    let_one_leave(patient)
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.living() == []
    assert "killed rank 0 (silent): these ranks have nothing more to save" in caplog.text


def test_a_rank_that_was_neither_stopped_nor_silent_has_its_time_to_leave(patient: RunningAttempt) -> None:
    """Others' silence is nothing to it."""
    patient.line.silent = frozenset({7})
    let_one_leave(patient)
    patient.held.join(1.0)
    assert patient.held.is_alive() and patient.attempt.living() == [0]
    patient.leave(75)
    patient.held.join(DEADLINE_S)
    assert not patient.held.is_alive() and patient.attempt.deaths()[0].status == 75


def test_a_stopped_rank_without_a_controller_has_no_grace_after_its_hold(
    led: RunningAttempt, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM would not reach it."""
    await_stop(led.workers[0].pid)
    led.line.attached = False
    led.fail_one()
    led.held.join(DEADLINE_S)
    assert not led.held.is_alive()
    led.attempt.end_workers(signal.SIGTERM, 2 * DEADLINE_S)
    assert led.attempt.living() == []
    assert "the ranks had no controller for 1 s" in caplog.text and "killed rank 0 (stopped): " in caplog.text


def test_a_stopped_rank_without_any_protection_keeps_its_grace(
    short_times: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its script may save at SIGTERM, as under torchrun, when somebody has it go on."""
    running = RunningAttempt(60.0, controller=False)
    try:
        await_stop(running.workers[0].pid)
        running.fail_one()
        running.held.join(DEADLINE_S)
        assert not running.held.is_alive() and running.attempt.living() == [0]
        assert "killed" not in caplog.text, "its end would be seen a moment later"
    finally:
        running.close()
