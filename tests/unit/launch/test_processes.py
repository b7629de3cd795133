"""Ending workers and what they leave, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.waiting import until
from ttp.launch.links import controller_shutdown
from ttp.launch.links.controller_client import ControllerEntry
from ttp.launch.links.controller_shutdown import START_VARIABLE, controllers_of, end_controllers, is_controller
from ttp.launch.watch.processes import (
    LOST,
    catches,
    children_leading_sessions,
    end_workers,
    exit_status,
    read_stat,
    status_text,
    sweep_sessions,
    wait_until_gone,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Return a function that starts `sh -c script` as a session leader and waits for its first line."""
    children: list[subprocess.Popen[str]] = []

    def start(script: str, *words: str, **environ: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            ["sh", "-c", script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environ},
        )
        children.append(child)
        assert child.stdout is not None
        child.first_line = child.stdout.readline().strip()  # type: ignore[attr-defined]
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.close()
        child.stdout.close()


def test_a_handler_for_a_signal_is_seen_and_so_is_one_that_is_ignored(spawn: Spawn) -> None:
    """The default, which ends a process at once, is neither; nor has a process that is gone a handler."""
    handles = spawn("trap 'echo' TERM; echo ready; read x")
    ignores = spawn("trap '' TERM; echo ready; read x")
    default = spawn("echo ready; read x")
    assert [catches(child.pid, signal.SIGTERM) for child in (handles, ignores, default)] == [True, True, False]
    default.kill()
    default.wait()
    assert not catches(default.pid, signal.SIGTERM)


def first_pid(child: subprocess.Popen[str]) -> int:
    return int(child.first_line)  # type: ignore[attr-defined]


def test_workers_that_obey_are_ended_by_the_first_signal(spawn: Spawn) -> None:
    """No worker needs SIGKILL, and the statuses are still there to be reaped."""
    children = [spawn("echo ready; exec sleep 600") for _ in range(2)]
    assert end_workers([child.pid for child in children], signal.SIGTERM, 20.0) == []
    assert [child.wait() for child in children] == [-signal.SIGTERM] * 2


def test_a_worker_that_ignores_the_signal_is_killed(spawn: Spawn) -> None:
    """After the grace there is SIGKILL; the obedient one is not named."""
    deaf = spawn("trap '' TERM; echo ready; while :; do sleep 600; done")
    obedient = spawn("echo ready; exec sleep 600")
    assert end_workers([deaf.pid, obedient.pid], signal.SIGTERM, 2.0) == [deaf.pid]
    assert exit_status(deaf.pid) == -signal.SIGKILL


def test_what_a_dead_worker_left_in_its_session_is_swept(spawn: Spawn) -> None:
    """A killed worker's child goes; a process with a session of its own stays; so does what is spared."""
    worker = spawn("sleep 600 & echo $!; wait", "worker")
    child = first_pid(worker)
    spared = spawn("sleep 600 & echo $!; wait")
    other = spawn("echo ready; exec sleep 600")
    for pid in (worker.pid, spared.pid):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sweep_sessions([worker.pid, spared.pid], spare=lambda pid: pid == first_pid(spared)) == [child]
    assert wait_until_gone(child, 10.0)
    assert read_stat(first_pid(spared)) is not None and exit_status(other.pid) is None
    os.kill(first_pid(spared), signal.SIGKILL)


def test_the_session_of_a_reaped_worker_is_not_touched(spawn: Spawn) -> None:
    """Its number may be somebody else's by now."""
    worker = spawn("sleep 600 & echo $!; wait")
    child = first_pid(worker)
    worker.kill()
    worker.wait()
    assert exit_status(worker.pid) is LOST
    assert sweep_sessions([worker.pid], spare=lambda pid: False) == []
    assert read_stat(child) is not None
    os.kill(child, signal.SIGKILL)


def test_children_are_found_without_having_been_written_down(spawn: Spawn) -> None:
    """What a launch that broke in the middle had started."""
    child = spawn("echo ready; exec sleep 600")
    assert child.pid in children_leading_sessions()


def test_statuses_are_named_for_people() -> None:
    """Signals by name where they have one."""
    assert status_text(-9) == "signal SIGKILL"
    assert status_text(-37) == "signal 37"
    assert status_text(1) == "exit code 1"
    assert status_text(LOST) == "gone, its status is lost"


class Asked:
    """Stands for `request_shutdown`; kills the controller with `obey`."""

    def __init__(self, obey: int | None = None, error: Exception | None = None) -> None:
        self.addresses: list[str] = []
        self._obey, self._error = obey, error

    def __call__(self, address: str) -> None:
        self.addresses.append(address)
        if self._error is not None:
            raise self._error
        if self._obey is not None:
            os.kill(self._obey, signal.SIGKILL)


def test_a_published_controller_is_asked_by_message(spawn: Spawn) -> None:
    """One that leaves is not killed."""
    controller = spawn("echo ready; while :; do sleep 0.1; done", "ttp.controller", **{START_VARIABLE: "start-a"})
    asked = Asked(obey=controller.pid)
    assert end_controllers("start-a", ControllerEntry("h:1", controller.pid), asked) == []
    assert asked.addresses == ["h:1"]
    assert controller.wait() == -signal.SIGKILL


def test_a_controller_that_stays_is_killed(spawn: Spawn) -> None:
    """Neither message nor silence helps it."""
    deaf = spawn(
        "trap '' TERM; echo ready; while :; do sleep 0.1; done", "ttp.controller", **{START_VARIABLE: "start-b"}
    )
    assert end_controllers("start-b", ControllerEntry("h:1", deaf.pid), Asked(), leave_s=0.2) == [deaf.pid]
    assert deaf.wait() == -signal.SIGKILL


def test_an_unreachable_or_unpublished_controller_gets_sigterm(spawn: Spawn) -> None:
    """Rank 0 may have died between starting it and publishing it."""
    published = spawn("echo ready; while :; do sleep 0.1; done", "ttp.controller", **{START_VARIABLE: "start-c"})
    unknown = spawn("echo ready; while :; do sleep 0.1; done", "ttp.controller", **{START_VARIABLE: "start-c"})
    entry = ControllerEntry("h:1", published.pid)
    assert end_controllers("start-c", entry, Asked(error=ConnectionError("refused"))) == []
    assert published.wait() == -signal.SIGTERM and unknown.wait() == -signal.SIGTERM


def test_a_standby_is_asked_as_one_that_its_launcher_guards(spawn: Spawn) -> None:
    """SIGTERM alone may be meant for every process of the job: a standby does not heed it while its launcher runs."""
    deaf_to_sigterm = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    standby = spawn(deaf_to_sigterm, "ttp.controller", "--standby", "1", **{START_VARIABLE: "start-s"})
    assert end_controllers("start-s", None, Asked()) == []
    assert standby.wait() == -signal.SIGUSR1


def test_only_controllers_of_this_attempt_are_ended(spawn: Spawn) -> None:
    """Another job's controller, and a worker of this attempt, are left alone even when their pid was published."""
    # `read`, because a shell that starts a program is for a moment two processes of the same name.
    other = spawn("echo ready; read x", "ttp.controller", **{START_VARIABLE: "start-d2"})
    worker = spawn("echo ready; read x", "train.py", **{START_VARIABLE: "start-d1"})
    assert is_controller(other.pid) and not is_controller(worker.pid)
    assert controllers_of("start-d1") == [] and controllers_of("start-d2") == [other.pid]
    for pid in (other.pid, worker.pid):
        asked = Asked(obey=pid)
        assert end_controllers("start-d1", ControllerEntry("h:1", pid), asked) == [] and asked.addresses == []
        assert exit_status(pid) is None


def test_a_controller_that_finishes_by_itself_is_not_asked(spawn: Spawn) -> None:
    """With other nodes' ranks still writing, it has patience_s to end in its own time."""
    controller = spawn("echo ready; sleep 0.3; exit 0 # for", "ttp.controller", **{START_VARIABLE: "start-e"})
    asked = Asked()
    assert end_controllers("start-e", ControllerEntry("h:1", controller.pid), asked, patience_s=20.0) == []
    assert asked.addresses == [] and controller.wait() == 0


@pytest.mark.parametrize("when", ["while another is waited for", "after it was asked"])
def test_a_number_that_has_become_another_processs_meanwhile_gets_no_signal(
    spawn: Spawn, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is made again before each signal. Here the process runs another program under its number; the other controller stays."""
    mark = {START_VARIABLE: f"start-{when[0]}"}
    deaf = spawn("trap '' TERM; echo ready; while :; do sleep 0.1; done", "ttp.controller", **mark)
    handler = "trap '' TERM; " if when == "after it was asked" else ""
    other = spawn(f"{handler}echo ready; read x; exec env -i sleep 600", "ttp.controller", **mark)

    def become_another(address: str) -> None:
        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
        until(lambda: not is_controller(other.pid), "another program in its place")

    if when == "after it was asked":
        published = ControllerEntry("h:1", other.pid)
        assert end_controllers(mark[START_VARIABLE], published, become_another, leave_s=0.2) == [deaf.pid]
    else:

        def turn_and_wait(*arguments: Any) -> bool:
            if is_controller(other.pid):
                become_another("")
            return wait_until_gone(*arguments)

        monkeypatch.setattr(controller_shutdown, "wait_until_gone", turn_and_wait)
        assert end_controllers(mark[START_VARIABLE], None, Asked(), patience_s=0.2, leave_s=0.2) == [deaf.pid]
    assert exit_status(other.pid) is None
