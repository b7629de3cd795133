"""Ranks that a worker's shell has started, without `exec`: real processes, with a fake controller."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.attempts import DEADLINE_S, LineToController
from tests.waiting import until
from ttp.exchange.discovery import controller_key, process_key, process_text
from ttp.launch.attempts import attempt as attempt_module
from ttp.launch.attempts import leftover_ranks
from ttp.launch.attempts.attempt import Attempt
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.attempts.leftover_ranks import LeftoverRanks
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.watch.processes import exit_status, is_stopped, read_stat, sweep_sessions
from ttp.launch.watch.shell_ranks import ShellRanks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANK = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
def report():
    while True:
        signal.sigwait({signal.SIGTERM})
        print("signalled", flush=True)
threading.Thread(target=report, daemon=True).start()
print(os.getpid(), flush=True)
sys.exit(int(sys.stdin.readline()))
"""
"""It receives SIGTERM, and exits when it reads its exit code from a line. A handler in Python would not do: one that is due when the read
begins runs when it ends."""


class Shells:
    """Two workers that are shells, the ranks that they have started, and their round."""

    def __init__(self, after: str = "exit $?") -> None:
        """`after`: what the shell does when its rank has ended."""
        script = f"exec 3<&0; '{sys.executable}' -c '{RANK}' <&3 & exec 3<&- 0<&-; wait $!; {after}"
        self.workers = [
            subprocess.Popen(
                ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            for _ in range(2)
        ]
        self.ranks = [int(self.line(rank)) for rank in range(2)]
        self.controller = LineToController()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set(controller_key(0), f"127.0.0.1:1 {os.getpid()}")
        for rank, pid in enumerate(self.ranks):
            self.store.set(process_key(0, rank), process_text(pid))
        self.attempt = Attempt(
            LaunchContext(
                total_timeout_s=60.0,
                poll_s=0.002,
                open_link=lambda address, job_id, pids, running: self.controller,
                request_shutdown=lambda address: None,
            ),
            job_id="job",
            job_store=JobStore("127.0.0.1", self.store.port, 0),
            start_id=f"none-of-the-kind-{os.getpid()}",
            pids={rank: worker.pid for rank, worker in enumerate(self.workers)},
            nodes=1,
            hosts_rank_zero=False,
        )
        self.thread = threading.current_thread()
        until(
            lambda: len(self.attempt._watch._followed) == len(self.ranks) and self.attempt.has_controller,
            "the ranks' processes to be watched, and a controller",
        )
        assert self.attempt.processes == dict(enumerate(self.ranks))

    def line(self, rank: int) -> str:
        stdout = self.workers[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def leave(self, rank: int, status: int) -> None:
        stdin = self.workers[rank].stdin
        assert stdin is not None
        stdin.write(f"{status}\n")
        stdin.flush()

    def kill_shell(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.workers[rank].pid, number)
        os.waitid(os.P_PID, self.workers[rank].pid, os.WEXITED | os.WNOWAIT)

    def run(self, target: str, *args: object) -> None:
        self.thread = threading.Thread(target=getattr(self.attempt, target), args=args)
        self.thread.start()

    def hold_to_the_end_when_one_has_left(self, rank: int) -> None:
        """Let a rank exit with status 75, and hold the remaining ones until all have exited."""
        self.leave(rank, 75)
        until(self.attempt.failed, "the end to be seen")
        self.run("hold")
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive() and self.attempt.living() == []

    def close(self) -> None:
        for pid in (*self.ranks, *(worker.pid for worker in self.workers)):
            if (stat := read_stat(pid)) is not None and not stat.gone:
                os.kill(pid, signal.SIGKILL)
        if self.thread is not threading.current_thread():
            self.thread.join(DEADLINE_S)
        self.attempt.close()
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
            with worker:
                worker.wait()


def here(pids: list[int]) -> list[int]:
    return [pid for pid in pids if (stat := read_stat(pid)) is not None and not stat.gone]


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[list[int]]:
    """Return the leftover processes in the workers' sessions at each sweep's begin."""
    seen: list[list[int]] = []

    def look_and_sweep(leaders: object, **more: object) -> list[int]:
        seen.append(here(SHELLS[0].ranks))
        return sweep_sessions(leaders, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(attempt_module, "sweep_sessions", look_and_sweep)
    caplog.set_level(logging.INFO, "ttp.launch")
    return seen


SHELLS: list[Shells] = []


@pytest.fixture
def shells(swept: list[list[int]]) -> Iterator[Shells]:
    SHELLS[:] = [Shells()]
    yield SHELLS[0]
    SHELLS[0].close()


def test_a_notice_goes_to_the_ranks_and_their_shells_tell_how_they_left(
    shells: Shells, swept: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A shell that got SIGTERM would die at once: its rank's exit code would be lost."""
    shells.run("drain")
    assert [shells.line(rank) for rank in range(2)] == ["signalled", "signalled"]
    assert [exit_status(worker.pid) for worker in shells.workers] == [None, None] and swept == []
    for rank in range(2):
        shells.leave(rank, 76)
    shells.thread.join(DEADLINE_S)
    assert shells.attempt.outcome() == "ranks 0-1: exited on a preemption notice (exit code 76)"
    assert [death.pid for _, death in sorted(shells.attempt.deaths().items())] == shells.ranks
    assert swept == [[]]
    said = [record.getMessage() for record in caplog.get_records("setup")]
    assert f"rank 1 is process {shells.ranks[1]}, started by its worker (pid {shells.workers[1].pid})" in said


def test_ranks_whose_shells_a_signal_has_ended_have_the_time_of_the_fault(
    shells: Shells, swept: list[list[int]]
) -> None:
    """A scheduler may signal every process at once: leftover processes in the sessions are ended when the ranks have saved."""
    for rank in range(2):
        shells.kill_shell(rank, signal.SIGTERM)
    shells.run("drain")
    assert [shells.line(rank) for rank in range(2)] == ["signalled", "signalled"]
    shells.leave(1, 76)
    shells.thread.join(0.5)
    assert shells.thread.is_alive() and swept == [] and here(shells.ranks)[:1] == shells.ranks[:1]
    shells.leave(0, 76)
    shells.thread.join(DEADLINE_S)
    assert swept == [[]] and shells.attempt.living() == []


def test_a_survivor_whose_shell_is_gone_is_held(
    shells: Shells, swept: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is reported with the dead rank's own process, not with its shell's."""
    shells.kill_shell(0, signal.SIGKILL)
    os.kill(shells.ranks[1], signal.SIGKILL)
    until(shells.attempt.failed, "the death to be seen")
    assert shells.attempt.living() == [0]
    shells.run("hold")
    shells.thread.join(0.3)
    assert shells.thread.is_alive() and here(shells.ranks) == shells.ranks[:1]
    shells.leave(0, 75)
    shells.thread.join(DEADLINE_S)
    shells.attempt.end_workers(signal.SIGTERM, 5.0)
    assert swept == [[]]
    cause = f"rank 1 (pid {shells.ranks[1]}) ended: exit code 137 (a shell's code for SIGKILL)"
    assert shells.attempt.fault is not None and shells.attempt.fault.cause == cause and cause in caplog.text


def test_a_rank_that_outlives_its_shell_and_the_fault_has_the_grace_before_the_sweep(
    shells: Shells, swept: list[list[int]]
) -> None:
    """As for a worker without a shell: it is asked once more, and may exit by itself."""
    for rank in range(2):
        shells.kill_shell(rank, signal.SIGKILL)
    shells.run("end_workers", signal.SIGTERM, DEADLINE_S)
    assert [shells.line(rank) for rank in range(2)] == ["signalled", "signalled"] and swept == []
    for rank in range(2):
        shells.leave(rank, 76)
    shells.thread.join(DEADLINE_S)
    assert not shells.thread.is_alive() and swept == [[]] and shells.attempt.living() == []


def test_a_stopped_rank_behind_a_shell_is_ended_when_another_has_left_and_the_shell_follows(
    shells: Shells, swept: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The shell gets no signal: it may clean up, and its status is its rank's."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 2 * DEADLINE_S)
    os.kill(shells.ranks[0], signal.SIGSTOP)
    until(lambda: is_stopped(shells.ranks[0]), "the rank to stop")
    shells.hold_to_the_end_when_one_has_left(1)
    assert exit_status(shells.workers[0].pid) == 137
    assert "killed rank 0 (stopped): these ranks have nothing more to save" in caplog.text


def test_a_rank_that_is_stopped_with_its_shell_is_ended_with_it(
    shells: Shells, swept: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody stopped the whole session: the shell would never see its rank's end."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 2 * DEADLINE_S)
    os.killpg(shells.workers[0].pid, signal.SIGSTOP)
    until(lambda: is_stopped(shells.ranks[0]) and is_stopped(shells.workers[0].pid), "both to stop")
    shells.hold_to_the_end_when_one_has_left(1)
    assert exit_status(shells.workers[0].pid) == -signal.SIGKILL


@pytest.fixture
def tidy(swept: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shells]:
    """Return shells that clean up until they are let go, of ranks that have very long to leave."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 2 * DEADLINE_S)
    monkeypatch.setattr(leftover_ranks, "PATIENCE_S", 0.05)
    SHELLS[:] = [Shells(after=f"code=$?; while [ ! -e {tmp_path}/$$ ]; do sleep 0.05; done; exit $code")]
    yield SHELLS[0]
    SHELLS[0].close()


def let_go(shells: Shells, rank: int, folder: Path) -> None:
    """Have the shell whose rank has left follow it."""
    (folder / str(shells.workers[rank].pid)).touch()
    os.waitid(os.P_PID, shells.workers[rank].pid, os.WEXITED | os.WNOWAIT)


def hold_with_one_left(shells: Shells, folder: Path) -> None:
    """Rank 1 has left with its shell, and rank 0, which the controller names as silent, is held."""
    shells.controller.silent = frozenset({0})
    shells.leave(1, 75)
    let_go(shells, 1, folder)
    until(shells.attempt.failed, "the end to be seen")
    shells.run("hold")


def test_a_shell_that_cleans_up_after_its_silent_rank_is_left_to_it(tidy: Shells, tmp_path: Path) -> None:
    """The controller still names the rank, which has ended: the shell is not the one that was silent."""
    tidy.leave(0, 75)
    until(lambda: not here(tidy.ranks[:1]), "the rank to leave")
    hold_with_one_left(tidy, tmp_path)
    tidy.thread.join(1.0)
    assert tidy.thread.is_alive() and exit_status(tidy.workers[0].pid) is None
    let_go(tidy, 0, tmp_path)
    tidy.thread.join(DEADLINE_S)
    assert not tidy.thread.is_alive() and exit_status(tidy.workers[0].pid) == 75


def test_a_shell_whose_silent_rank_leaves_while_it_is_asked_for_its_stacks_is_left_to_clean_up(
    tidy: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking takes up to two seconds, and the rank may have come to itself meanwhile."""
    asked = threading.Event()

    def leave_now(leftover_ranks: LeftoverRanks, ranks: Iterable[int]) -> None:
        tidy.leave(0, 75)
        until(lambda: not here(tidy.ranks[:1]), "the rank to leave")
        asked.set()

    monkeypatch.setattr(LeftoverRanks, "ask_for_stacks", leave_now)
    hold_with_one_left(tidy, tmp_path)
    assert asked.wait(DEADLINE_S)
    tidy.thread.join(1.0)
    assert tidy.thread.is_alive() and exit_status(tidy.workers[0].pid) is None
    assert "killed" not in caplog.text
    let_go(tidy, 0, tmp_path)
    tidy.thread.join(DEADLINE_S)
    assert not tidy.thread.is_alive() and exit_status(tidy.workers[0].pid) == 75


def test_a_shell_that_stays_when_its_rank_has_left_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a moment, not after all of TTP_OT."""
    monkeypatch.setattr(attempt_module, "LEAVE_GRACE_S", 0.2)
    shells = Shells(after="exec sleep 600")
    try:
        shells.run("drain")
        assert [shells.line(rank) for rank in range(2)] == ["signalled", "signalled"]
        for rank in range(2):
            shells.leave(rank, 76)
        shells.thread.join(DEADLINE_S)
        assert not shells.thread.is_alive() and shells.attempt.living() == []
        assert "but not the shells that started them; killing ranks 0-1" in caplog.text
    finally:
        shells.close()


def test_a_process_that_cannot_be_proven_to_be_the_rank_is_left_alone() -> None:
    """A number from a container's namespace, one of another session, or one that was given to another process since."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as worker:
        with subprocess.Popen(["sleep", "600"], process_group=0) as other:
            own = process_text(other.pid)
            later = f"{other.pid} {int(own.split()[1]) - 1}"
            session = os.getsid(0)
            assert ShellRanks().add({0: worker.pid}, {0: own}) == {}
            assert ShellRanks().add({0: session}, {0: later}) == {}
            assert ShellRanks().add({0: session}, {0: ""}) == {}
            behind = ShellRanks()
            assert behind.add({0: session}, {0: own}) == {0: other.pid}
            assert behind.signal([0, 1], signal.SIGTERM) == [0]
            assert other.wait(DEADLINE_S) == -signal.SIGTERM
        worker.kill()
