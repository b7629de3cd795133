"""The end of an attempt on several nodes: what ended it elsewhere, and a signal in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from tests.unit.launch.attempts import DEADLINE_S, START_ID, RunningAttempt
from tests.unit.launch.test_signals import Clock, clock, torchs_handlers  # noqa: F401
from tests.waiting import until
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.attempts.signals import SAME_S, ShutdownSignals
from ttp.launch.links import controller_shutdown
from ttp.launch.links.controller_shutdown import START_VARIABLE
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.report import reporter as started
from ttp.launch.report.incident import AttemptEnd
from ttp.launch.report.reporter import Reporter


def lines_of_attempts(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a story.jsonl except those of a hold."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] not in ("hold", "held")]


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("words", ["b failed (rank 2: signal SIGKILL) and restarts", ""])
def test_an_attempt_that_another_node_ended_is_reported_with_that_nodes_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Ranks without a session exit here when others die there: a fault, though nothing failed here and no journal has it. Where
    no agent has reported it either, it is not known."""
    monkeypatch.setattr(attempt_module, "UNLED_S", DEADLINE_S)  # the ranks are waited for, however slowly they exit
    path = tmp_path / "story.jsonl"
    reporter = Reporter(path)
    running = RunningAttempt(60.0, controller=False, reporter=reporter, nodes=2)
    other = PeerAgents(JobStore("127.0.0.1", running.store.port, 0), 1, 2, look_s=0.02)
    try:
        peers = running.attempt.peers
        assert peers is not None
        other.start()
        if words:
            other.publish_restart(words)
        until(lambda: peers.failure == words, "the other node's report")
        running.leave(75, rank=0)
        running.leave(75, rank=1)
        running.held.start()
        running.held.join(DEADLINE_S)
        running.attempt.next = "restart 1 of 3"
    finally:
        running.close()
        other.close()
    reporter.finish("succeeded")
    _, *faults, end = lines_of_attempts(path)
    if not words:
        assert not faults and (end["faults"], end["untold_starts"]) == (0, [0])
        return
    (fault,) = faults
    assert (fault["kind"], fault["elsewhere"], fault["culprits"]) == ("elsewhere", words, [])
    assert fault["next"] == "restart 1 of 3" and fault["began_unix_s"] > 0 and fault["steps_lost"] is None
    assert (end["faults"], end["unknown_losses"], end["untold_starts"]) == (1, 1, [])


@pytest.mark.usefixtures("short_times")
def test_ranks_that_a_second_signal_ended_are_known_at_the_attempts_end(caplog: pytest.LogCaptureFixture) -> None:
    """But not one that had ended before: its end is a fault of its own."""
    endings: list[AttemptEnd] = []

    class Kept(Reporter):
        def end(self, attempt: started.AttemptStart, ending: AttemptEnd) -> None:
            endings.append(ending)

    running = RunningAttempt(60.0, controller=True, reporter=Kept())
    try:
        running.workers[1].kill()
        running.attempt._watch.wait(DEADLINE_S, lambda deaths: 1 in deaths and deaths[1].settled)
        begun_s = time.time()
        running.attempt.end_at_once()
    finally:
        running.close()
    (ending,) = endings
    assert ending.at_once.ranks == {0} and dict(ending.exits) == {1: "signal SIGKILL"}
    assert begun_s <= ending.at_once.unix_s <= time.time()
    assert "second signal received: killing the workers" in caplog.text


# A handler that raises, as torch's does, may do so within open(): its file is then closed by the interpreter only.
RAISED_ANYWHERE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def raise_signal(number: int, frame: object) -> None:
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


@RAISED_ANYWHERE
@pytest.mark.usefixtures("short_times")
def test_a_signal_while_a_controller_is_waited_for_ends_it_and_the_attempt_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other nodes' ranks might need it for minutes, which is logged; after a signal no process remains."""
    monkeypatch.setattr(controller_shutdown, "LEAVE_S", 0.2)
    path = tmp_path / "story.jsonl"
    code = "import time; print(flush=True); time.sleep(600)"
    environ = {**os.environ, START_VARIABLE: START_ID}
    controller = subprocess.Popen(
        [sys.executable, "-c", code, "ttp.controller"], env=environ, stdout=subprocess.PIPE, start_new_session=True
    )
    running = RunningAttempt(60.0, controller=False, reporter=Reporter(path), nodes=2)
    before = signal.signal(signal.SIGTERM, raise_signal)

    def tell_to_end() -> None:
        until(lambda: "waiting up to" in caplog.text, "the line that a controller is waited for")
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        assert controller.stdout is not None and controller.stdout.readline()
        running.fail_one()
        running.held.join(DEADLINE_S)
        running.attempt.end_workers(signal.SIGTERM, 5.0)
        teller = threading.Thread(target=tell_to_end)
        teller.start()
        with pytest.raises(SignalException):
            running.attempt.close()
        teller.join(DEADLINE_S)
        assert controller.wait(DEADLINE_S) == -signal.SIGTERM
        assert f"controller (pid {controller.pid}): ranks on other nodes may still be writing" in caplog.text
        _, fault = lines_of_attempts(path)
        assert fault["next"] == "no restart on this node: the agent received SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is raise_signal
    finally:
        signal.signal(signal.SIGTERM, before)
        with controller:
            controller.kill()
        running.close()


@RAISED_ANYWHERE
@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("forces", [False, True])
def test_a_first_signal_keeps_a_controllers_time_and_a_forcing_one_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,  # noqa: F811
    forces: bool,
) -> None:
    """Ranks on other nodes may be saving under it, as SIGTERM to every launcher of a job comes; Ctrl-C after that ends it."""
    monkeypatch.setattr(controller_shutdown, "LEAVE_S", 0.2)
    path = tmp_path / "story.jsonl"
    code = "import sys; print(flush=True); sys.stdin.read()"
    controller = subprocess.Popen(
        [sys.executable, "-c", code, "ttp.controller"],
        env={**os.environ, START_VARIABLE: START_ID},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    running = RunningAttempt(60.0, controller=False, reporter=Reporter(path), nodes=2)
    notices = ShutdownSignals(clock)
    notices.install()

    over = threading.Event()

    def comes(met: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not met() and time.monotonic() < deadline:
            if over.wait(0.005):
                return False
        return True

    def tell_to_end() -> None:
        if not comes(lambda: "waiting up to" in caplog.text):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if not comes(lambda: notices.name == "SIGTERM"):
            return
        clock.now_s += 2 * SAME_S
        if forces:
            os.kill(os.getpid(), signal.SIGINT)
        elif controller.stdin is not None:
            controller.stdin.close()

    teller = threading.Thread(target=tell_to_end)
    try:
        assert controller.stdout is not None and controller.stdout.readline()
        running.fail_one()
        running.held.join(DEADLINE_S)
        running.attempt.end_workers(signal.SIGTERM, 5.0)
        teller.start()
        with pytest.raises(SignalException) as raised, notices.leaving():
            running.attempt.close(True, lambda: notices.name)
        name = "SIGINT" if forces else "SIGTERM"
        assert raised.value.sigval.name == name
        assert controller.wait(DEADLINE_S) == (-signal.SIGTERM if forces else 0)
        _, fault = lines_of_attempts(path)
        assert fault["next"] == f"no restart on this node: the agent received {name}"
    finally:
        over.set()
        if teller.ident is not None:
            teller.join(DEADLINE_S)
        with controller:
            controller.kill()
        running.close()


@pytest.mark.parametrize("patient", [True, False])
def test_controllers_that_other_nodes_may_need_have_the_rest_of_a_faults_time_unless_a_signal_forces_the_end(
    patient: bool, short_times: None
) -> None:
    running = RunningAttempt(60.0, controller=True, nodes=2)
    waits: list[float] = []
    inner: Any = running.attempt
    inner._end_controllers = waits.append
    try:
        running.fail_one()
        running.leave(75)
        running.held.join(DEADLINE_S)
        running.attempt.close(patient)
        (wait_s,) = waits
        assert 0.0 < wait_s <= 60.0 if patient else wait_s == 0.0
    finally:
        running.close()
