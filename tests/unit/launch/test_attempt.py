"""How long survivors are held: real processes, with a fake controller that comes and goes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.launch.attempts import DEADLINE_S, RunningAttempt, silent_store
from tests.waiting import until
from ttp.exchange import controller_file
from ttp.exchange.discovery import controller_key
from ttp.exchange.first_step import progress_key
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.links import peer_agents
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.report.exit_status import Recorded
from ttp.launch.report.reporter import Reporter
from ttp.launch.watch import death_watch
from ttp.launch.watch.processes import LOST
from ttp.proto.messages import CauseKind


@pytest.mark.parametrize(
    ("statuses", "nodes", "expected"), [((75, 75), 2, True), ((75, 3), 2, False), ((75, 75), 1, False)]
)
def test_workers_that_all_left_on_the_controllers_word_left_for_another_node(
    short_times: None, statuses: tuple[int, int], nodes: int, expected: bool
) -> None:
    """Where there is one, and nothing failed here."""
    running = RunningAttempt(60.0, controller=True, nodes=nodes)
    try:
        for rank, status in enumerate(statuses):
            running.leave(status, rank)
        until(running.attempt.failed, "an end to be seen")
        running.held.start()
        running.held.join(DEADLINE_S)
        assert running.attempt.living() == [] and running.attempt.left_for_others() is expected
    finally:
        running.close()


@pytest.mark.parametrize(
    ("kind", "lost"),
    [(CauseKind.SILENT, True), (CauseKind.EXITED, True), (CauseKind.PREEMPTED, False), (None, False)],
)
def test_a_freeze_for_lost_ranks_is_not_for_a_node_that_joins(
    led: RunningAttempt, kind: CauseKind | None, lost: bool
) -> None:
    """A node that joins has the ranks preempted. Without a report the cause is not known."""
    until(lambda: led.attempt.has_controller, "the connection")
    led.line.frozen_by = kind
    assert led.attempt.lost_ranks_elsewhere() is lost


def test_a_store_that_may_be_lost_is_not_asked_for_a_step_that_is_known(led: RunningAttempt) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return False

    assert led.attempt.made_a_step(ask) is False and asked == [True]
    led.store.set(progress_key(0), "3")
    until(lambda: led.attempt.made_a_step(lambda: False) is True, "the step to be read")
    assert led.attempt.made_a_step(ask) is True and asked == [True]


def test_survivors_are_held_while_a_controller_leads_them(led: RunningAttempt) -> None:
    """Several times as long as they would be without one."""
    led.fail_one()
    led.held.join(2.0)
    assert led.held.is_alive()
    led.leave(75)
    led.held.join(DEADLINE_S)
    assert not led.held.is_alive() and led.attempt.living() == []


def test_workers_that_a_controller_has_led_get_a_short_grace_after_their_hold(led: RunningAttempt) -> None:
    """They had a fault's time to save; those without a controller may save at SIGTERM only."""
    led.fail_one()
    until(lambda: led.attempt.fault is not None, "the hold")
    assert led.attempt.grace_s() == attempt_module.EXPIRED_GRACE_S < attempt_module.SHUTDOWN_S
    led.leave(75)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_survivors_whose_controller_was_lost_are_not_held_for_the_whole_timeout(
    led: RunningAttempt, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the fault or in the middle of it: after it no controller leads them to a checkpoint."""
    if lost == "before":
        led.line.attached = False
    led.fail_one()
    led.line.attached = False
    led.held.join(DEADLINE_S)
    assert not led.held.is_alive() and led.attempt.living() == [0]
    assert "the ranks had no controller for 1 s" in caplog.text


@pytest.mark.parametrize("signalled", [True, False])
def test_drained_ranks_are_not_ended_without_a_controller(
    led: RunningAttempt, signalled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They save without one; but not after a failure of one of them."""
    monkeypatch.setattr(
        attempt_module, "signal_workers", lambda pids, number: list(pids)
    )  # these workers would die of SIGTERM
    led.line.attached = False
    if signalled:
        led.attempt.note_signal("SIGTERM")
    leaving = threading.Thread(target=led.attempt.drain)
    leaving.start()
    leaving.join(3 * attempt_module.UNLED_S)
    assert leaving.is_alive() and led.attempt.living() == [0, 1]
    led.leave(3)
    leaving.join(DEADLINE_S)
    assert led.attempt.living() == [] and "the ranks had no controller for 1 s; killing rank 1" in caplog.text
    led.held.start()


def test_a_controller_that_was_away_for_a_moment_costs_the_survivors_nothing(
    led: RunningAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby takes over: the time without a controller counts from the last one's last connection."""
    now_s = time.monotonic()
    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def looked() -> None:
        """The launcher has looked, and has drawn its conclusion: it looks again."""
        seen = led.line.looks
        until(lambda: led.line.looks >= seen + 2 or not led.held.is_alive(), "the launcher to look for the controller")

    led.fail_one()
    for _ in range(4):
        led.line.attached = False
        now_s += 0.7 * attempt_module.UNLED_S
        looked()
        led.line.attached = True
        looked()
    assert led.held.is_alive()
    led.leave(75)


def test_survivors_that_never_had_a_controller_are_held_for_a_moment(
    short_times: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script without a session: nothing can be saved."""
    monkeypatch.setattr(attempt_module, "ASK_AGAIN_S", DEADLINE_S)  # it is known as soon as the store answers
    running = RunningAttempt(60.0, controller=False)
    try:
        running.fail_one()
        running.held.join(DEADLINE_S)
        assert not running.held.is_alive() and running.attempt.living() == [0]
    finally:
        running.close()
    assert "the ranks had no controller for" in caplog.text
    assert "no rank called ttp.start() so far; this attempt is unprotected" in caplog.text


def test_that_no_rank_has_a_session_is_said_only_when_it_is_known(
    short_times: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the workers' store does not answer they may have a controller, and are held as those that have lost one."""
    monkeypatch.setattr(attempt_module, "UNPROTECTED_S", 0.0)
    monkeypatch.setattr(attempt_module, "ASK_AGAIN_S", 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        running = RunningAttempt(60.0, controller=False, port=taken.getsockname()[1])
        try:
            running.fail_one()
            running.held.join(DEADLINE_S)
            assert not running.held.is_alive() and running.attempt.living() == [0]
        finally:
            running.close()
    assert "cannot determine whether the ranks have a controller: the workers' store at 127.0.0.1:" in caplog.text
    assert "no rank called ttp.start()" not in caplog.text
    assert "the ranks had no controller for 1 s" in caplog.text


def test_survivors_are_held_under_a_controller_that_only_the_file_of_their_ranks_names(
    short_times: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store never answers; the fault comes before the agent's first look. They have TTP_OT, and the journal is found."""
    journals = tmp_path / "log"
    journals.mkdir()
    with silent_store() as port:
        running = RunningAttempt(60.0, controller=False, port=port, attempt_dir=tmp_path, reporter=Reporter())
        try:
            controller_file.write(tmp_path, controller_file.Controllers(("127.0.0.1:1",), 0, str(journals)))
            running.fail_one()
            running.held.join(4 * attempt_module.UNLED_S)
            assert running.held.is_alive() and running.attempt.living() == [0]
            running.leave(75)
            running.held.join(DEADLINE_S)
            assert not running.held.is_alive() and running.attempt.living() == []
        finally:
            running.close()
    assert re.search(r"holding rank 0 for up to (5\d|60) s", caplog.text)
    assert "cannot determine whether the ranks have a controller" not in caplog.text
    assert (journals / "story.jsonl").exists(), "the report is made where the journal is"


def test_how_workers_ended_that_torch_has_reaped_is_taken_from_torch(
    short_times: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost status is a success only if torch reports no failure."""
    running = RunningAttempt(60.0, controller=True)
    try:
        monkeypatch.setattr(death_watch, "exit_status", lambda pid: LOST)
        running.workers[0].kill()
        until(
            lambda: running.attempt.living() == [1], "the death of rank 0"
        )  # one after the other: reported in the order seen
        running.workers[1].kill()
        until(lambda: running.attempt.living() == [], "the death of rank 1")
        assert not running.attempt.failed() and not running.attempt.succeeded()
        running.attempt.learn({1: -9}, failed=True)
        assert running.attempt.failed() and not running.attempt.succeeded()
        assert running.attempt.outcome() == "rank 0: gone, its status is lost; rank 1: signal SIGKILL"
        assert (
            "torchelastic detected the exit of ranks 0-1 first and killed its peers; no emergency checkpoint was possible"
            in caplog.text
        )
        running.attempt.learn({}, failed=False)
        assert running.attempt.deaths()[0].status == 0 and running.attempt.deaths()[1].status == -9
    finally:
        running.held.start()
        running.close()


def test_a_worker_that_has_begun_to_end_is_waited_for_but_not_for_ever(
    short_times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is asked about one in uninterruptible sleep all the same."""
    running = RunningAttempt(60.0, controller=True)
    try:
        assert not running.attempt.settling()
        monkeypatch.setattr(death_watch, "exit_status", lambda pid: None)
        running.workers[1].kill()
        until(lambda: 1 in running.attempt.deaths(), "the death of rank 1")
        assert running.attempt.settling()
        monkeypatch.setattr(attempt_module, "SETTLE_S", 0.0)
        assert not running.attempt.settling()
    finally:
        running.held.start()
        monkeypatch.undo()
        running.close()


def test_survivors_are_held_for_three_leases_of_their_lost_controller(
    led: RunningAttempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large job's lease is long, and a standby takes over within two of them."""
    now_s = time.monotonic()
    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    led.line.lease_s = attempt_module.UNLED_S
    led.fail_one()

    def looked() -> None:
        seen = led.line.looks
        until(lambda: led.line.looks >= seen + 2 or not led.held.is_alive(), "the agent to look for the controller")

    looked()  # it counts from here
    led.line.attached = False
    looked()  # every look that began before has ended
    now_s += 2.5 * attempt_module.UNLED_S
    looked()
    assert led.held.is_alive() and led.attempt.living() == [0]
    now_s += attempt_module.UNLED_S
    led.held.join(DEADLINE_S)
    assert led.attempt.living() == [0] and "the ranks had no controller for 2 s" in caplog.text


@pytest.mark.parametrize(("status", "held"), [(3, False), (2, True)])
def test_workers_without_protection_are_ended_soon_but_for_those_that_may_refuse_as_well(
    status: int, held: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their script has torchrun's time for a signal; after exit code 2 all have the time to come to the same end."""
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.02)
    monkeypatch.setattr(attempt_module, "UNPROTECTED_S", 0.2)
    monkeypatch.setattr(attempt_module, "UNLED_S", 1.5)
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 0.1)
    running = RunningAttempt(60.0, controller=False)
    try:
        running.leave(status, rank=1)
        until(running.attempt.failed, "the end to be seen")
        running.held.start()
        running.held.join(DEADLINE_S)
        assert running.attempt.living() == [0] and running.attempt.grace_s() == attempt_module.SHUTDOWN_S
    finally:
        running.close()
    assert ("had no controller for 2 s" in caplog.text) is held
    assert ("had no controller for 0 s" in caplog.text) is not held


def test_an_attempts_end_is_reported_with_what_this_node_saw(short_times: None, tmp_path: Path) -> None:
    """Who failed by itself, with its process, its exception and what follows; not the worker that ttprun has ended."""
    path = tmp_path / "story.jsonl"
    running = RunningAttempt(60.0, controller=False, reporter=Reporter(path))
    try:
        running.fail_one()
        running.held.join(DEADLINE_S)
        running.attempt.end_workers(signal.SIGTERM, 5.0)
        running.attempt.raised[1] = Recorded("ValueError: boom", "")
        running.attempt.next = "restart 1 of 3"
    finally:
        running.close()
    hold, held, begun, expected = [json.loads(line) for line in path.read_text().splitlines()]
    assert (hold["event"], hold["ranks"]) == ("hold", [0]) and hold["cause"].endswith("ended: signal SIGKILL")
    assert 0 < hold["up_to_s"] <= attempt_module.UNPROTECTED_S, "the attempt is not protected"
    assert (held["event"], held["ranks"]) == ("held", [0]) and held["why"].startswith("the ranks had no controller")
    assert (begun["event"], begun["start"], begun["rows"]) == ("start", 0, []) and len(begun["pids"]) == 2
    (culprit,) = expected["culprits"]
    assert (culprit["rank"], culprit["pid"]) == (1, running.workers[1].pid)
    assert culprit["cause"] == "signal SIGKILL: ValueError: boom" and expected["next"] == "restart 1 of 3"


@pytest.mark.usefixtures("short_times")
def test_a_fault_has_one_deadline_on_all_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Another node published the fault a while ago and joins again: this one's survivors have the remaining time only."""
    running = RunningAttempt(100.0, controller=True, nodes=2)
    try:
        other = PeerAgents(JobStore("127.0.0.1", running.store.port, 0), 1, 2, look_s=0.02)
        other.start()
        other.publish_fault(time.monotonic() - 99.0)
        peers = running.attempt.peers
        assert peers is not None
        until(lambda: peers.fault_begun_monotonic_s is not None, "the other node's report of a fault")
        other.close()
        held = threading.Thread(target=running.attempt.hold, args=("the set of nodes changes",))
        held.start()
        held.join(DEADLINE_S)
        assert not held.is_alive() and running.attempt.living() == [0, 1]
        assert running.attempt.fault is not None and running.attempt.fault.left_s(time.monotonic()) == 0.0
        begun = re.search(r"the fault began (\d+) s ago on another node; its deadline applies", caplog.text)
        assert begun is not None and int(begun[1]) >= 99
        assert "TTP_OT (100 s) expired; terminating ranks 0-1" in caplog.text
    finally:
        for worker in running.workers:
            worker.kill()
        running.held.start()
        running.close()


@pytest.mark.parametrize("since", ["a controller is known", "the ranks have had their time"])
def test_a_lost_node_ends_an_attempt_only_while_its_ranks_have_yet_to_meet(
    since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later a controller handles it, or a script without a session trains: a silent agent is not a reason to end them."""
    monkeypatch.setattr(peer_agents, "LOOK_S", 0.02)
    monkeypatch.setattr(peer_agents, "LOST_S", 2.0)
    running = RunningAttempt(60.0, controller=False, nodes=2)
    try:
        until(lambda: "node 1 of 2" in running.attempt.lost_node, "the silent node to be missed")
        until(
            lambda: running.attempt.unreached_store == "",
            "an answer of the store, which a busy machine may owe for as long",
        )
        if since == "a controller is known":
            running.store.set(controller_key(0), f"127.0.0.1:1 {os.getpid()}")
            until(lambda: running.attempt.had_controller, "the controller to be found")
        else:
            monkeypatch.setattr(attempt_module, "MEETING_S", 0.0)
        assert running.attempt.lost_node == ""
    finally:
        for worker in running.workers:
            worker.kill()
        running.held.start()
        running.close()


@pytest.mark.parametrize(("number", "final"), [(0, True), (1, False)])
def test_only_the_jobs_first_attempt_is_final_where_no_directory_can_be_written(number: int, final: bool) -> None:
    """Later its disk may have failed, and may come back."""
    error = Recorded("NotWritable: /d: read-only", "...\nttp.errors.NotWritable: /d: read-only\n")
    deaths = {0: SimpleNamespace(status=1, failed=True)}
    attempt: Any = SimpleNamespace(deaths=lambda: deaths, raised={0: error}, _start=SimpleNamespace(number=number))
    assert bool(attempt_module.Attempt.refusal(attempt, new_step=False)) is final
